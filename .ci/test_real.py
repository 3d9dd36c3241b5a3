"""Tests that a simulation cannot replace. They use real processes, real signals, a second
interpreter, and errors in the middle of a file operation (S5, F2, F3, F5, X2, L5).
"""

import os
import resource
import signal
import sys

import pytest

import sapo
from common import LEARNING, QUICK, checkpoint_of, heartbeat_of, results, rounds_of, run
from common import run_command, wait_until
from drive_store import At
from test_sapo import contents, new_store, put

ENDLESS = {"MAX_ROUNDS": 10**5, "NUM_TRANSPLANT_TREES": 0, "CHECKPOINT_INTERVAL": 2}


def run_process(drive, *more: dict, act=lambda pid: None, **settings):
    """Run `python sapo.py` with QUICK and these settings, and call act(pid) while it runs."""
    merged = {**QUICK, "GDRIVE_PATH": drive, "OMP_NUM_THREADS": 1}
    for each in (*more, settings):
        merged |= each
    return run_command(drive, sys.executable, sapo.__file__, act=act, seconds=120, **merged)


@pytest.mark.parametrize(
    "number, status, state",
    [(signal.SIGUSR1, 130, "stopped"), (signal.SIGKILL, -9, "running")],
)
def test_S5_F3_a_process_resumes_after_a_real_signal(tmp_path, capsys, number, status, state):
    """test_world.py tests SIGTERM, which has the same handler as SIGUSR1."""

    def send_signal(pid):
        wait_until(lambda: checkpoint_of(tmp_path, "n"))
        os.kill(pid, number)

    done = run_process(tmp_path, ENDLESS, act=send_signal)
    assert done.status == status, done.screen
    assert heartbeat_of(tmp_path, "n") == state

    # A clean stop saves a checkpoint after the last round. After a kill, the rounds since the last
    # checkpoint are repeated.
    saved = checkpoint_of(tmp_path, "n")
    last = rounds_of(tmp_path, "n")[-1]
    assert saved == last if state == "stopped" else saved <= last
    assert run(tmp_path, ENDLESS, LOCAL_NODES=1, MAX_ROUNDS=last + 3) == 0
    assert f"from the checkpoint after round {saved}" in capsys.readouterr().out
    assert rounds_of(tmp_path, "n") == [*range(last + 3)]


def test_L5_two_runs_of_one_command_are_equal_bit_for_bit(tmp_path):
    """The second run uses another interpreter, with a different PYTHONHASHSEED. Five nodes publish
    once per round of two stages, and each node reads three of its four peers."""
    settings = {"LOCAL_NODES": 5, "MAX_STAGES": 2, "ROLLOUT_PUBLISH_FREQUENCY": "round"}
    settings |= {"FETCH_MAX_PEERS": 3, "EXTERNAL_FILTER": True}
    assert run(tmp_path / "one", LEARNING, settings) == 0
    (tmp_path / "two").mkdir()
    os.rename(tmp_path / "one/warmstart", tmp_path / "two/warmstart")
    done = run_process(tmp_path / "two", LEARNING, settings, PYTHONHASHSEED=7)
    assert done.status == 0, done.screen

    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert one == two
    rewards = [row for path, row in one.items() if "/rewards/" in path]
    assert len({row["reward"] for row in rewards}) > 3
    assert max(row["grad_norm"] for row in rewards) > 0, "no update had a gradient"


# -------- Single operations of the store ----------------------------------------------------------


def test_F2_a_disk_that_fills_up_within_a_write_loses_nothing(tmp_path):
    """A limit on the file size simulates a full disk, because a write then stops halfway."""
    store = new_store(tmp_path, "n")
    rows = [f"row {i:04d}\n" for i in range(2000)]
    store.append("nodes/n/logs/a", "".join(rows[:1000]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, *args in (
        ("append", "nodes/n/logs/a", "".join(rows[1000:])),
        ("write", "nodes/n/checkpoints/c", b"x" * 50_000),
        ("publish", "rewards", "n", At(0), {"reward": 0.5, "text": "x" * 50_000}),
    ):
        before = contents(tmp_path).keys()
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_001, limits[1]))
        try:
            with pytest.raises(OSError):
                getattr(store, name)(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        after = contents(tmp_path).keys()
        assert {path for path in after - before if "/.new-" not in path} == set()
        getattr(store, name)(*args)

    # The log may contain a truncated line and repeated lines.
    lines = (store.dir / "nodes/n/logs/a").read_text().splitlines(keepends=True)
    assert [line for line in dict.fromkeys(lines) if len(line) == len(rows[0])] == rows
    assert store.read_reward("n", At(0))["reward"] == 0.5


def test_F5_X2_a_checkpoint_is_emptied_before_it_is_deleted_but_never_one_with_another_name(
    tmp_path,
):
    """On Google Drive, a deleted file goes to the trash, where its size still counts."""
    store = new_store(tmp_path, "n")
    folder = store.dir / "nodes/n/checkpoints"
    outside = tmp_path / "outside"
    outside.write_text("thesis")
    (folder / "own").write_text("weights")
    (folder / "link").symlink_to(outside)
    os.link(outside, folder / "hard_link")
    with open(folder / "own") as file:  # open handles still give the size of deleted files
        for name in ("own", "link", "hard_link"):
            store.delete(f"nodes/n/checkpoints/{name}", frees_space=True)
        assert os.fstat(file.fileno()).st_size == 0
    assert [*folder.iterdir()] == [] and outside.read_text() == "thesis"

    # A rollout file is not emptied, because a peer may be reading it.
    path = put(store, "nodes/n/rollouts/round_000000.stage_0.json", b"whole")
    with open(path) as file:
        store.prune_rollouts("n", 4, archive=False)
        assert not path.exists() and file.read() == "whole"
