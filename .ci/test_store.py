"""Proofs of the folder's promises F1, F2, F4, F5, F6 and F7, by the store alone or in one process.
U10, mistakes in the program's own code, stands at the end, because it is proved in the same way."""

import builtins
import contextlib
import errno
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import coordinator
import drive_store
import grpo
import sapo
from drive_store import DriveStore, RetryingStore
from test_sapo import at_call, contents, group_by_hand, new_store

SMALL = {
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "NODE_ID": "n", "LOCAL_NODES": 2, "WARM_START_STEPS": 60,
    "TASKS": "small_products,small_gcd", "ANSWER_TAG_SHARE": 0.9, "LEARNING_RATE": 0.001,
    "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "MAX_ROUNDS": 6,
    "CHECKPOINT_INTERVAL": 2, "FETCH_TIMEOUT_SECONDS": 0.1, "EXTERNAL_FILTER": False,
}  # fmt: skip
JOINING = dict.fromkeys(SMALL) | {"NODE_ID": "late"}  # a node that joins sets its name and no more


def run(drive, name="y", **settings) -> int:
    """Call sapo.main with SMALL and these settings (None: unset). Returns the exit status."""
    settings = {"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name, **SMALL, **settings}
    return sapo.main({key: str(value) for key, value in settings.items() if value is not None})


def play(drive, *nodes) -> DriveStore:
    """A store through which a test plays these nodes. They have just registered."""
    store = DriveStore(drive, "y")
    store.create({"layout": drive_store.LAYOUT, "maker": nodes[0]})
    for node_id in nodes:
        store.create_node(node_id)
    store.register([*nodes], {})
    return store


def read_log(folder: Path, node_id: str, log: str) -> list[dict]:
    """The rows of a node's log in the experiment whose folder is given."""
    return [json.loads(line) for line in (folder / f"nodes/{node_id}/logs/{log}.jsonl").open()]


def logged_events(folder: Path) -> list[str]:
    """The kinds of the events of the process whose first node is n_0."""
    return [row["event"] for row in read_log(folder, "n_0", "training_events")]


def repeatable_results(folder: Path) -> dict:
    """What a run leaves and a second run would repeat: checkpoints, rollouts, rewards and the last
    log row of each round, without times and the experiment's name."""
    results = {}
    for path in folder.glob("nodes/n_*/checkpoints/*"):
        results[path.name] = path.read_bytes()

    paths = [*folder.glob("nodes/n_*/r*/*.json"), *folder.glob("nodes/n_*/logs/metrics.jsonl")]
    varying = ("seconds", "timestamp", "experiment")
    for path in paths:
        for row in map(json.loads, path.open()):
            kept = {key: value for key, value in row.items() if not key.endswith(varying)}
            results[path.relative_to(folder), row["round"], row["stage"]] = kept
    return results


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The folder of an undisturbed run of the experiment x. It is copied and never changed."""
    drive = tmp_path_factory.mktemp("undisturbed")
    assert run(drive, "x") == 0
    return drive


@pytest.fixture
def drive(undisturbed, tmp_path):
    """A copy of that folder: it holds a warm start and the finished experiment x."""
    return shutil.copytree(undisturbed, tmp_path / "drive")


# -------- F1: a file is complete or absent --------------------------------------------------------


def test_F1_a_reader_sees_no_file_or_the_whole_one_and_what_is_published_stays(tmp_path):
    store = play(tmp_path, "a", "b")

    def write(node_id):
        writer = DriveStore(tmp_path, "y")
        for i in range(80):
            writer.write(f"nodes/{node_id}/heartbeat.json", b"%02d" % i * 30_000)
            for text in ("x" * 60_000, "published once more"):
                writer.publish("rewards", node_id, i, 0, {"reward": 0.5, "text": text})

    threads = [threading.Thread(target=write, args=node_id) for node_id in "ab"]
    for thread in threads:
        thread.start()

    # A heartbeat holds one number, and a reward is there from its marker on.
    polls = 0
    while any(thread.is_alive() for thread in threads):
        polls += 1
        for (kind, node_id), (round_, _) in store.board().progress.items():
            heartbeat = (store.dir / f"nodes/{node_id}/heartbeat.json").read_bytes()
            assert heartbeat == heartbeat[:2] * 30_000
            path = store.dir / drive_store.stage_file(kind, node_id, round_, 0)
            assert len(json.loads(path.read_bytes())["text"]) == 60_000
    assert polls > 5
    rewards = [*store.dir.glob("nodes/*/rewards/*")]
    assert len(rewards) == 160
    for path in rewards:
        assert len(json.loads(path.read_bytes())["text"]) == 60_000


# -------- F2: an outage of the folder -------------------------------------------------------------


def fail_below(monkeypatch, folder, plan) -> None:
    """Let system calls on paths below `folder` fail.

    plan() is called before each of them and returns "before" or "after", for a call that fails
    before or after it did its work, or None for a call that works.
    """
    names = ("open", "listdir", "scandir", "mkdir", "stat", "lstat", "replace", "unlink")
    for module, name in [*((os, name) for name in names), (io, "open"), (builtins, "open")]:

        def fake(*args, name=name, real=getattr(module, name), **kwargs):
            fault = plan() if args and str(folder) in str(args[0]) else None
            if not fault:
                return real(*args, **kwargs)
            if fault == "after" and name in ("mkdir", "replace", "unlink"):
                real(*args, **kwargs)
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(module, name, fake)


def do_everything(store, before_each=lambda: None, in_outage=lambda: None) -> list[str]:
    """Make every call by which a node changes the folder, for five rounds, in no time.

    Returns the kinds of the events that were logged.
    """
    events = []

    def on_event(kind, text):
        events.append(kind)
        if kind == "outage":
            in_outage()

    signals = SimpleNamespace(sleep=lambda seconds: None)
    retrying = RetryingStore(store, on_event, signals)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e9)  # all files carry the same timestamp
        for t in range(5):
            calls = [
                ("prune_rollouts", "n", t - 1, True),
                ("move_marker", "open", "n", t),
                ("write_heartbeat", "n", "s", t),
                ("publish", "rollouts", "n", t, 0, {"format": 1, "rollouts": {"0": group_by_hand(1)}}),
                ("append", "nodes/n/logs/b", f"{t}\n"),
                ("publish", "rewards", "n", t, 0, {"reward": 0.5}),
                ("publish", "rewards", "n", t, 0, {"reward": 0.9}),  # it stays as it is
                ("append", "nodes/n/logs/a", f"{t}\n" * 9999),
                ("write", f"nodes/n/checkpoints/{t}", b"x" * 9000, True),
                ("move_marker", "checkpoint", "n", t),
                ("delete", f"nodes/n/checkpoints/{t - 1}", True),
            ]  # fmt: skip
            for name, *args in calls:
                before_each()
                getattr(retrying, name)(*args)
    return events


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 MB. Only root can mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if os.getuid() or not shutil.which("mount"):
        pytest.skip("no disk can be mounted here")
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill_up(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass


@pytest.mark.parametrize("fault", ["full disk", *range(4)])
def test_F2_an_outage_of_any_kind_loses_nothing_and_doubles_nothing(
    request, tmp_path, monkeypatch, fault
):
    """fault: "full disk", or the seed by which calls are chosen that fail."""
    sound = tmp_path / "sound"
    assert do_everything(new_store(sound, "n")) == []

    # Do the same work in a folder that fails again and again.
    if fault == "full disk":
        broken = request.getfixturevalue("small_disk")
        filler = broken / "filler"
        events = do_everything(new_store(broken, "n"), lambda: fill_up(broken), filler.unlink)
        filler.unlink()
    else:
        broken = tmp_path / "broken"
        store = new_store(broken, "n")
        rng = random.Random(fault)
        with monkeypatch.context() as patch:
            fail_below(patch, broken, lambda: rng.choice([None] * 8 + ["before", "after"]))
            events = do_everything(store)

    # What was left behind in an outage goes at the next start.
    DriveStore(broken, "x").remove_leftovers("n")
    assert contents(broken) == contents(sound)
    assert len(events) > 20
    assert events == ["outage", "outage over"] * (len(events) // 2)


@pytest.mark.parametrize("seed", range(3))
def test_F2_a_run_in_which_the_folder_fails_again_and_again_ends_like_an_undisturbed_one(
    undisturbed, drive, monkeypatch, seed
):
    """An outage begins at any call to the folder, a resumed start's first ones included, or while
    a checkpoint is loaded. All calls fail until the process has waited for a while."""
    assert run(drive, MAX_ROUNDS=2) == 0
    rng = random.Random(seed)
    outage = [seed == 0]

    def plan():
        kind = "before" if outage[0] else rng.choice(["before", "after"])
        outage[0] = outage[0] or rng.random() < 0.05
        return kind if outage[0] else None

    def wait(signals, seconds):
        outage[0] = False

    at_call(monkeypatch, "load_checkpoint", 1, lambda: outage.__setitem__(0, True))
    monkeypatch.setattr(sapo.Signals, "sleep", wait)
    with monkeypatch.context() as patch:
        fail_below(patch, drive, plan)
        assert run(drive) == 0

    folder = drive / "experiments/y"
    assert repeatable_results(folder) == repeatable_results(undisturbed / "experiments/x")
    kinds = [kind for kind in logged_events(folder) if kind.startswith("outage")]
    assert len(kinds) > 10
    assert kinds == ["outage", "outage over"] * (len(kinds) // 2)


@pytest.mark.parametrize("is_stopped, call", [(False, 4), (True, 8)])
def test_F2_training_waits_for_a_missing_folder_and_goes_on_unless_it_is_stopped(
    undisturbed, drive, monkeypatch, is_stopped, call
):
    folder = drive / "experiments/y"
    away = drive / "away"

    def begin_outage():
        folder.rename(away)
        threading.Timer(0.7, end_outage).start()

    def end_outage():
        if is_stopped:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            away.rename(folder)

    at_call(monkeypatch, "publish_groups", call, begin_outage)

    # A stopped run leaves the missing folder alone, and the next start goes on.
    if is_stopped:
        assert run(drive) == 130
        assert not folder.exists()
        away.rename(folder)
    assert run(drive) == 0
    assert not away.exists(), "another folder was made in its place"
    assert repeatable_results(folder) == repeatable_results(undisturbed / "experiments/x")

    # The outage is logged once. (A stopped run repeats rounds, so its logs have more rows.)
    if not is_stopped:
        events = logged_events(folder)
        assert (events.count("outage"), events.count("outage over")) == (1, 1)
        for node_id in ("n_0", "n_1"):
            assert len(read_log(folder, node_id, "metrics")) == 6


def test_F2_a_drive_that_is_unmounted_while_the_picture_is_drawn_is_not_made_again(
    drive, monkeypatch
):
    draw = coordinator.draw
    away = drive.with_name("away")

    def unmount_and_draw(panels):
        drive.rename(away)
        threading.Timer(0.3, lambda: away.rename(drive)).start()
        return draw(panels)

    monkeypatch.setattr(coordinator, "draw", unmount_and_draw)
    assert run(drive, MAX_ROUNDS=1) == 0
    assert not away.exists()
    assert (drive / "reports/y.png").exists()


def test_F2_a_peers_unreadable_file_is_skipped_and_read_again_in_a_later_round(drive, monkeypatch):
    store = play(drive, "p", "q")
    for peer in "pq":
        rollouts = {"format": 1, "rollouts": {"0": group_by_hand(ord(peer))}}
        store.publish("rollouts", peer, 0, 0, rollouts)
        store.write_heartbeat(peer, store.sessions[peer], 0, "done")

    # The first two reads of p's file fail.
    reads = itertools.count()
    path = "p/rollouts/round_000000"
    fail_below(monkeypatch, path, lambda: "before" if next(reads) < 2 else None)
    assert run(drive, LOCAL_NODES=1, MAX_ROUNDS=3) == 0

    metrics = read_log(store.dir, "n", "metrics")
    found = [(row["external_groups"], row["rejected"]) for row in metrics]
    assert found == [(1, 1), (0, 1), (1, 0)]
    events = [row["event"] for row in read_log(store.dir, "n", "training_events")]
    assert (events.count("reject"), events.count("outage")) == (1, 0)


# -------- F4: checkpoints -------------------------------------------------------------------------


def refuse_to_open(monkeypatch, paths, *targets) -> None:
    """Let functions, such as (os, "lstat"), raise PermissionError for these paths, as for files of
    another user. (Root may read everything.)"""
    forbidden = {str(path) for path in paths}
    for module, name in targets:

        def fake(path, *args, real=getattr(module, name), **kwargs):
            if str(path) in forbidden:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, fake)


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1],
    lambda data: b"",
    lambda data: data.replace(b'"tiny\\"', b'"tinx\\"'),
    lambda data: b"\xff" * 7 + b"\0" + data,
    [(builtins, "open"), (grpo.safetensors, "safe_open")],
    [(os, "lstat")],
], ids=["torn", "empty", "of another model", "with a huge header", "mode 600", "without status"])  # fmt: skip
def test_F4_the_newest_readable_checkpoint_is_loaded_and_if_there_is_none_the_start_fails(
    undisturbed, drive, monkeypatch, capsys, damage
):
    assert run(drive, MAX_ROUNDS=4) == 0
    folder = drive / "experiments/y"
    older, newer = sorted(folder.glob("nodes/n_0/checkpoints/*.safetensors"))
    sound = older.read_bytes()

    # Damage both checkpoints of the process. It does not start again at round 0, does not take
    # this for an outage, and nothing in the experiment changes.
    with monkeypatch.context() as patch:
        if callable(damage):
            for path in (older, newer):
                path.write_bytes(damage(path.read_bytes()))
        else:
            refuse_to_open(patch, (older, newer), *damage)
        before = contents(folder)
        capsys.readouterr()
        assert run(drive) == 2
        output = capsys.readouterr().out
    assert contents(folder) == before
    assert "cannot be used" in output
    assert "outage" not in output
    assert "/6 reward" not in output

    # With the older one restored it resumes from there, and ends as an undisturbed run does.
    older.write_bytes(sound)
    if not callable(damage):
        refuse_to_open(monkeypatch, (newer,), *damage)
    assert run(drive) == 0
    monkeypatch.undo()
    output = capsys.readouterr().out
    assert output.count(f"{newer.name} cannot be used") == 1
    assert "from the checkpoint after round 1" in output
    assert "outage" not in output
    assert repeatable_results(folder) == repeatable_results(undisturbed / "experiments/x")


def test_F4_a_checkpoint_must_be_there_if_its_marker_is_and_only_then(undisturbed, drive, capsys):
    # The first run ends before CHECKPOINT_INTERVAL, and its only checkpoint is lost.
    assert run(drive, MAX_ROUNDS=1) == 0
    folder = drive / "experiments/y"
    checkpoint = folder / "nodes/n_0/checkpoints/round_000000.safetensors"
    moved = checkpoint.rename(drive / "moved")
    before = contents(folder)
    capsys.readouterr()
    assert run(drive) == 2
    assert "n_0 needs its checkpoint, but it is gone" in capsys.readouterr().out
    assert contents(folder) == before

    # It goes on from it, once it is back.
    moved.rename(checkpoint)
    assert run(drive) == 0
    assert "from the checkpoint after round 0" in capsys.readouterr().out

    # Without a marker a node that was killed begins again, whatever names of its files tell.
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        at_call(patch, "finish_round", 2, sys.exit)
        run(drive, "z")
    folder = drive / "experiments/z"
    planted = [folder / f"nodes/n_0/rewards/round_00050{i}.stage_0.json" for i in range(2)]
    for path in planted:
        path.mkdir()
    assert run(drive, "z") == 0
    for path in planted:
        path.rmdir()
    assert repeatable_results(folder) == repeatable_results(undisturbed / "experiments/x")


def test_L5_F3_eleven_nodes_that_publish_once_a_round_repeat_what_a_kill_interrupted(drive):
    """When they repeat it, the markers of peers are ahead, and more peers than FETCH_MAX_PEERS
    have published."""
    settings = {"LOCAL_NODES": 11, "MAX_STAGES": 2, "ROLLOUT_PUBLISH_FREQUENCY": "round"}
    settings |= {"MAX_ROUNDS": 4, "NUM_GENERATIONS": 2}
    assert run(drive, "y", **settings) == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        at_call(patch, "submit_reward", 4 * 2 * 11 - 3, sys.exit)
        run(drive, "z", **settings)
    assert run(drive, "z", **settings) == 0
    results = [repeatable_results(drive / "experiments" / name) for name in "yz"]
    assert len(results[0]) == 2 + 11 * (4 + 4 * 2 + 4 * 2)  # rollouts, rewards, rows of the log
    assert results[0] == results[1]


def test_F3_planted_checkpoints_cost_a_node_none_of_its_own(drive):
    folder = drive / "experiments/x/nodes/n_0/checkpoints"
    (folder / "round_999998.safetensors").write_text("x")
    (folder / "round_999999.safetensors").symlink_to(drive / "experiments/x/config.json")
    assert run(drive, "x", MAX_ROUNDS=8) == 0
    rounds = [int(path.name[6:12]) for path in sorted(folder.iterdir())]
    assert rounds == [5, 7, 999998, 999999]


def test_F4_planted_files_neither_finish_a_node_nor_refuse_a_new_one(drive, capsys):
    # Garbage under the names of the last round's files does not end a node's run.
    assert run(drive, MAX_ROUNDS=4) == 0
    store = DriveStore(drive, "y")
    for node_id in ("n_0", "n_1"):
        for path in ("checkpoints/round_000005.safetensors", "rewards/round_000005.stage_0.json"):
            (store.dir / f"nodes/{node_id}" / path).write_bytes(b"")
        store.move_marker("rewards", node_id, 5)
    capsys.readouterr()
    assert run(drive) == 0
    assert "already finished" not in capsys.readouterr().out
    assert store.read_reward("n_1", 5, 0)["round"] == 5

    # Nor does a file in the folder of a node that has never registered keep it out, nor one that
    # looks like another program's, even if it is the name of a node.
    for path in ("nodes/round_5/checkpoints/round_000000.safetensors", "rollouts/round_5"):
        (store.dir / path).parent.mkdir(parents=True)
        (store.dir / path).write_bytes(b"")
    for max_rounds in (8, 9):
        store.move_marker("open", "n_0", max_rounds - 1)
        assert run(drive, **JOINING | {"NODE_ID": "round_5", "MAX_ROUNDS": max_rounds}) == 0
        assert store.read_reward("round_5", max_rounds - 1, 0) is not None


def test_F5_a_checkpoint_is_emptied_before_it_is_deleted_but_never_one_with_another_name(drive):
    """On Google Drive a deleted file goes to the trash, where it still counts."""
    folder = drive / "experiments/y/nodes/n_0/checkpoints"
    opened = {}  # name -> a descriptor, which shows the file's size after it has been deleted

    def open_all():
        for path in folder.iterdir():
            opened.setdefault(path.name, os.open(path, os.O_RDONLY))

    with pytest.MonkeyPatch.context() as patch:
        for call in range(2, 5):
            at_call(patch, "save_checkpoint", call, open_all)
        assert run(drive, MAX_ROUNDS=4, CHECKPOINT_INTERVAL=1) == 0
    kept = sorted(path.name[6:12] for path in folder.iterdir())
    assert kept == ["000002", "000003"]
    assert [os.fstat(file).st_size > 0 for _, file in sorted(opened.items())] == [
        False,
        False,
        True,
    ]

    # What a link or a hard link leads to stays, and so does a rollout file that is being read.
    store = DriveStore(drive, "y")
    outside = drive / "outside"
    outside.write_text("thesis")
    (folder / "link").symlink_to(outside)
    os.link(outside, folder / "hard_link")
    for name in ("link", "hard_link"):
        store.delete(f"nodes/n_0/checkpoints/{name}", frees_space=True)
        assert not os.path.lexists(folder / name)
    assert outside.read_text() == "thesis"
    with open(store.dir / "nodes/n_0/rollouts/round_000000.stage_0.json") as file:
        store.prune_rollouts("n_0", 4, archive=False)
        assert json.loads(file.read())["peer_id"] == "n_0"


# -------- F5: retention ---------------------------------------------------------------------------


def rollouts_in(folder: Path, pattern: str) -> set[tuple]:
    """{(round, node)} of the rollout files whose paths match."""
    found = set()
    for path in folder.glob(pattern):
        found.add((int(path.name[6:12]), path.relative_to(folder).parts[0]))
    return found


@pytest.mark.parametrize("archive", [False, True])
def test_F5_a_node_deletes_or_archives_its_own_rounds_that_no_node_needs(drive, archive):
    store = play(drive, "human")
    for t in (0, 4, 7):
        rollouts = {"format": 1, "rollouts": {"0": group_by_hand(t)}}
        store.publish("rollouts", "human", t, 0, rollouts)

    settings = dict(MAX_ROUNDS=9, ROLLOUT_MAX_AGE=1, ROLLOUT_CLEANUP_ENABLED=True)
    settings |= dict(ROLLOUT_KEEP_LAST_N_ROUNDS=1, ROLLOUT_ARCHIVE_OLD=archive)
    assert run(drive, **settings) == 0

    # A node that resumes may need CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE rounds. The files of
    # another node stay.
    published = {*itertools.product(range(9), ("n_0", "n_1"))}
    needed = {(t, node_id) for t, node_id in published if t >= 6}
    of_others = {(t, "human") for t in (0, 4, 7)}
    assert rollouts_in(store.dir / "nodes", "*/rollouts/*.json") == needed | of_others
    assert rollouts_in(drive / "archives/y", "*/*.json") == (
        published - needed if archive else set()
    )
    for node_id in ("n_0", "n_1"):
        assert store.list_stages("rewards", node_id) == [(t, 0) for t in range(9)]


# -------- F7: dropped folders ---------------------------------------------------------------------


def test_F7_a_folder_that_was_dropped_is_made_again_by_its_maker_alone(drive, monkeypatch, capsys):
    """Copied buckets, archives of files and tidy users drop empty folders."""
    monkeypatch.setattr(drive_store, "FOLDER_TIMEOUT_SECONDS", 0.3)
    archiving = dict(ROLLOUT_CLEANUP_ENABLED=True, ROLLOUT_ARCHIVE_OLD=True)
    archiving |= dict(ROLLOUT_KEEP_LAST_N_ROUNDS=1, ROLLOUT_MAX_AGE=0, CHECKPOINT_INTERVAL=1)
    assert run(drive, MAX_ROUNDS=2, **archiving) == 0
    store = play(drive, "late")
    capsys.readouterr()
    for folder in ("archives/y", "experiments/y/nodes/late"):
        shutil.rmtree(drive / folder)

    # A node that the board names waits for its folder, which may only be late. What another node
    # made is missed by nobody.
    joining = JOINING | {"MAX_ROUNDS": 6}
    assert run(drive, **joining | archiving) == 0
    output = capsys.readouterr().out
    assert output.count("outage") == 2
    assert "nodes/late is not there yet" in output
    assert store.read_reward("late", 5, 0) is not None
    assert not (drive / "archives/y").exists()
    assert (5, 0) in store.list_stages("rollouts", "late")

    # The maker of the experiment makes its folders again, and old rollouts move there.
    assert run(drive, MAX_ROUNDS=7, **archiving) == 0
    assert {(1, "n_0"), (1, "n_1")} <= rollouts_in(drive / "archives/y", "*/*.json")

    # If the maker was killed before it wrote config.json, another process takes its place.
    (drive / "experiments/z").mkdir()
    capsys.readouterr()
    assert run(drive, "z", MAX_ROUNDS=1) == 0
    assert "another process is still creating the experiment" in capsys.readouterr().out


# -------- F6: new, joined, resumed, finished or refused -------------------------------------------


@pytest.mark.parametrize("expected, settings, status", [
    (["y: a new experiment"], {"EXPERIMENT_NAME": "y", "MAX_ROUNDS": 1}, 0),
    (["x: resuming, round 5 of 7, nodes: n_0, n_1",
      "from the checkpoint after round 5"], {"MAX_ROUNDS": 7}, 0),
    (["x: joining, round 5 of 6, nodes: n_0, n_1"], JOINING, 0),
    (["x: already finished", "all 6 rounds"], {}, 0),
    (["x: already finished"], {"NODE_ROLE": "coordinator", "NODE_ID": None}, 0),
    (["round 5 is open and MAX_ROUNDS is 6"], JOINING | {"NODE_ID": None}, 2),  # its name is made up
    (["round 5 is open and MAX_ROUNDS is 3"], JOINING | {"MAX_ROUNDS": 3}, 2),
])  # fmt: skip
def test_F6_a_start_says_whether_the_experiment_is_new_joined_resumed_or_finished(
    drive, capsys, expected, settings, status
):
    assert run(drive, **{"EXPERIMENT_NAME": "x", **settings}) == status
    output = capsys.readouterr().out
    for text in expected:
        assert text in output


def test_F6_a_node_joins_with_three_settings_and_disturbs_no_other_experiment(drive, capsys):
    folder = drive / "experiments/x"
    other = shutil.copytree(folder, drive / "experiments/y")
    before = contents(other)

    # A setting of the swarm differs from its default, and settings of a process are forged.
    config = json.loads((folder / "config.json").read_text())
    config |= {"LEARNING_RATE": 0.002, "NUM_SHOTS": " auto", "LOCAL_NODES": 9}
    config |= dict.fromkeys(("DEVICE", "HF_REPO", "NODE_ID", "GDRIVE_PATH"), "evil")
    (folder / "config.json").write_text(json.dumps(config))

    # The node inherits the first and not the others.
    assert run(drive, "x", **JOINING) == 0
    output = capsys.readouterr().out
    assert "LEARNING_RATE=0.002" in output.split("from the experiment: ")[1]
    assert "evil" not in output

    [row] = read_log(folder, "late", "metrics")
    assert (row["round"], row["completions"], row["external_groups"]) == (5, 8, 2)
    groups = DriveStore(drive, "x").fetch_rollouts("late", 5, 0)
    assert {group["task"] for group in groups} <= {*SMALL["TASKS"].split(",")}
    assert contents(other) == before


def test_F6_of_two_that_take_the_place_of_a_maker_that_was_killed_one_config_counts(
    drive, monkeypatch
):
    # The other's config.json comes last, just before this one registers.
    config = json.loads((drive / "experiments/x/config.json").read_text())
    others = json.dumps(config | {"LEARNING_RATE": 0.002, "maker": "other"}).encode()

    def replace_config():
        DriveStore(drive, "y").write("config.json", others)

    at_call(monkeypatch, "register", 1, replace_config)
    assert run(drive, LEARNING_RATE=None) == 0
    assert (drive / "experiments/y/config.json").read_bytes() == others

    # It has learned with the other's rate.
    monkeypatch.undo()
    assert run(drive, "z", LEARNING_RATE=0.002) == 0
    results = [repeatable_results(drive / "experiments" / name) for name in "yz"]
    assert results[0] == results[1]


@pytest.mark.parametrize("source, name, value", [
    *(("environment", *setting) for setting in [
        ("SEED", 7), ("TASKS", "small_gcd"), ("REWARD", "verifier"), ("MAX_STAGES", 2), ("DEVICE", "cuda:9"),
        ("MODEL_NAME", "/tmp"), ("MODEL_NAME", "no/such model"), ("MAX_NEW_TOKENS", 600),
        ("NUM_GENERATIONS", 1), ("TASKS", "countdown"), ("NODE_ID", "../n"), ("NODE_ID", "coordinator"),
    ]), ("config.json", "SEED", "7\x1b[2J"), ("config.json", "TASKS", "countdown"), ("config.json", "layout", 4),
])  # fmt: skip
def test_F6_a_setting_that_disagrees_or_cannot_be_used_is_named_and_leaves_nothing(
    drive, tmp_path, capsys, source, name, value
):
    settings = {"MAX_ROUNDS": 7, name: value}
    if source == "config.json":
        settings = JOINING
        path = drive / "experiments/x/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    # The start is refused in a printable sentence that names the setting.
    before = contents(drive)
    assert run(drive, "x", **settings) == 2
    assert contents(drive) == before
    output = capsys.readouterr().out
    assert ("another version" if name == "layout" else name) in output
    assert len(output) < 2000
    assert all(char.isprintable() or char == "\n" for char in output)

    # A value that is wrong anywhere leaves nothing in an empty folder either.
    is_wrong_anywhere = not sapo.TABLE[name].metadata["agree"] if name in sapo.TABLE else False
    if source == "environment" and (is_wrong_anywhere or value == "countdown"):
        assert run(tmp_path / "new", **settings) == 2
        assert not (tmp_path / "new").exists()


def test_F6_a_shared_folder_that_is_a_file_is_refused_and_no_outage(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert run(tmp_path / "file") == 2
    assert "it is no folder" in capsys.readouterr().out


def test_F6_half_a_start_leaves_at_most_its_own_empty_folder(drive, monkeypatch):
    def paths():
        return {str(path.relative_to(drive)) for path in drive.rglob("*")}

    # A joining start is interrupted before it has registered: earlier, or at the last moment.
    before = paths()
    for step in ("load_latest_checkpoint", "register"):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            at_call(patch, step, 1, sys.exit)
            run(drive, "x", **JOINING)
        assert paths() == before
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(DriveStore, "register", lambda *_: sys.exit())
        run(drive, "x", **JOINING)
    assert paths() - before <= {"experiments/x/nodes/late"}
    assert run(drive, "x", **JOINING) == 0


def test_F6_two_names_that_a_disk_takes_for_one_are_refused(drive, monkeypatch, capsys):
    assert run(drive, NODE_ID="anna", LOCAL_NODES=1, MAX_ROUNDS=1) == 0
    before = contents(drive)

    # A disk that does not tell "Anna" from "anna".
    names = ("open", "listdir", "scandir", "chmod", "mkdir", "stat", "lstat", "replace", "unlink")
    functions = [(os, name) for name in names] + [(io, "open"), (builtins, "open")]
    functions += [(grpo.safetensors, "safe_open"), (grpo.safetensors.torch, "save_file")]
    for module, name in functions:

        def fake(*args, real=getattr(module, name), **kwargs):
            args = list(args)
            for i, arg in enumerate(args[:2]):
                if isinstance(arg, str | Path):
                    args[i] = str(arg).replace("nodes/Anna", "nodes/anna")
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(sapo, "export_models", lambda run: None)  # a library writes by itself
    capsys.readouterr()
    assert run(drive, NODE_ID="Anna", LOCAL_NODES=1, MAX_ROUNDS=2) == 2
    monkeypatch.undo()
    assert "NODE_ID=Anna: to this disk it is the same as anna" in capsys.readouterr().out
    assert contents(drive) == before


# -------- U10: mistakes in the program's own code -------------------------------------------------


@pytest.mark.parametrize("module, step, error", [
    (sapo, "submit_reward", FileNotFoundError(errno.ENOENT, "No such file", "my_notes.txt")),
    (sapo, "mean_reward", KeyError("mine")), (grpo, "grpo_loss", MemoryError()),
])  # fmt: skip
def test_U10_a_mistake_of_any_type_shows_its_traceback_and_says_goodbye(
    undisturbed, drive, monkeypatch, capsys, module, step, error
):
    def my_own_line():
        raise error

    # The function has been edited, and fails in the second round.
    original = getattr(module, step)

    def edited(*args):
        if DriveStore(drive, "y").board().open_round == 1:
            my_own_line()
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, step, edited)
        assert run(drive) == 1
    output = capsys.readouterr().out
    folder = drive / "experiments/y"
    for text in (output, (folder / "nodes/n_0/logs/stdout.log").read_text()):
        assert text.count("Traceback (most recent call last)") == 1
        assert "in my_own_line" in text
        assert type(error).__name__ in text
    assert "outage" not in output
    assert logged_events(folder)[-1] == "error"
    for node_id in ("n_0", "n_1"):
        heartbeat = json.loads((folder / f"nodes/{node_id}/heartbeat.json").read_text())
        assert heartbeat["state"] == "failed"

    # The next start, with the mistake mended, goes on.
    assert run(drive) == 0
    assert repeatable_results(folder) == repeatable_results(undisturbed / "experiments/x")
