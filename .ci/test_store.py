"""Proofs of the folder's promises F1, F2, F4, F5 and F6, by the store alone or in one process."""

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import sapo
from drive_store import DriveStore, RetryingStore
from test_sapo import at_call, contents, group_by_hand, new_store

SMALL = {
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "NODE_ID": "n", "LOCAL_NODES": 2, "WARM_START_STEPS": 60,
    "TASKS": "small_products,small_gcd", "ANSWER_TAG_SHARE": 0.9, "LEARNING_RATE": 0.001,
    "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "MAX_ROUNDS": 6,
    "CHECKPOINT_INTERVAL": 2, "FETCH_TIMEOUT_SECONDS": 0.1, "EXTERNAL_FILTER": False,
}  # fmt: skip
PROCESS_EVENTS = "n_0/training_events.jsonl"  # the process's log is that of its first node
JOINING = dict.fromkeys(SMALL) | {"NODE_ID": "late"}  # a node that joins sets its name and no more


def run(drive, name="y", **settings) -> int:
    """Call sapo.main with SMALL and these settings (None: unset). Returns the exit status."""
    settings = {"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name, **SMALL, **settings}
    return sapo.main({key: str(value) for key, value in settings.items() if value is not None})


def read_log(experiment_dir: Path, log: str) -> list[dict]:
    return [json.loads(line) for line in (experiment_dir / "logs" / log).open()]


def repeatable_results(experiment_dir: Path) -> dict:
    """What a run leaves and a second run would repeat: checkpoints, rollouts, rewards and the last
    log row of each round, without times, sessions and the experiment's name."""
    results = {}
    for path in experiment_dir.glob("checkpoints/*/*"):
        results[path.name] = path.read_bytes()

    varying = ("seconds", "timestamp", "session", "experiment")
    json_files = experiment_dir.glob("r*/n_?/*.json")
    logs = experiment_dir.glob("logs/n_?/metrics.jsonl")
    for path in [*json_files, *logs]:
        for row in map(json.loads, path.open()):
            kept = {key: value for key, value in row.items() if not key.endswith(varying)}
            results[path.relative_to(experiment_dir), row["round"]] = kept
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


def writer_of_each_file(experiment_dir: Path) -> dict:
    """{name: the node that wrote it} of the JSON files outside tmp/. Fails if one is incomplete."""
    writers = {}
    for path in experiment_dir.glob("[!t]*/*.json"):
        data = json.loads(path.read_bytes())
        assert len(data["text"]) == 60_000
        writers[path.name] = data["by"]
    return writers


@pytest.mark.parametrize("has_links", [True, False])
def test_F1_readers_beside_several_writers_see_either_no_file_or_the_complete_one(
    tmp_path, monkeypatch, has_links
):
    link = os.link if has_links else Mock(side_effect=OSError("no links"))
    monkeypatch.setattr(os, "link", link)
    stores = [new_store(tmp_path, owner) for owner in "abc"]
    successes = set()  # (file, writer) of each call of write_once that returned True

    def write(store, owner):
        for i in range(80):
            data = {"by": owner, "text": "x" * 60_000}
            if store.write_once(f"winners/{i}.json", data):
                successes.add((f"{i}.json", owner))
            store.write_atomic("heartbeats/shared.json", data)

    # Three threads write the same files.
    threads = []
    for pair in zip(stores, "abc", strict=True):
        threads.append(threading.Thread(target=write, args=pair))
        threads[-1].start()

    # Meanwhile every file can be parsed, and a write-once file keeps its contents.
    polls = [{}]
    while any(thread.is_alive() for thread in threads):
        polls.append(writer_of_each_file(stores[0].experiment_dir))
        before = {name: by for name, by in polls[-2].items() if name[0].isdigit()}
        if has_links:
            assert before.items() <= polls[-1].items(), "a write-once file was changed"

    # Each write-once file is by a writer that was told so. With hard links there is only one.
    final = writer_of_each_file(stores[0].experiment_dir)
    write_once_files = {(name, by) for name, by in final.items() if name[0].isdigit()}
    assert len(polls) > 5
    assert len(write_once_files) == 80
    assert write_once_files <= successes
    if has_links:
        assert len(successes) == 80, "two writers believe that their file counts"


# -------- F2: an outage of the folder -------------------------------------------------------------


def fail_below(monkeypatch, folder, plan) -> None:
    """Let system calls on paths below `folder` fail.

    plan() is called before each of them and returns "before" or "after", for a call that fails
    before or after it did its work, or None for a call that works.
    """
    for name in ("open", "listdir", "mkdir", "lstat", "link", "replace", "rename", "unlink"):

        def fake(*args, name=name, real=getattr(os, name), **kwargs):
            fault = plan() if str(folder) in str(args[0]) else None
            if not fault:
                return real(*args, **kwargs)
            if fault == "after" and name != "open":
                real(*args, **kwargs)
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(os, name, fake)


def do_everything(store, before_each=lambda: None, in_outage=lambda: None) -> list[str]:
    """Make every call by which a node changes the folder, for five rounds, in no time.

    Returns the kinds of the events that were logged.
    """
    events = []

    def on_event(kind, text, **_):
        events.append(kind)
        if kind == "outage":
            in_outage()

    retrying = RetryingStore(store, on_event, SimpleNamespace(requested=0))
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        # A pause takes no time, and all files carry the same timestamp.
        patch.setattr(time, "sleep", lambda seconds: None)
        patch.setattr(time, "monotonic", lambda: next(ticks))
        patch.setattr(time, "time", lambda: 1e9)

        for t in range(5):
            calls = [
                ("prune_rollouts", "n", t - 1, t < 3),
                ("open_round", t, "n"),
                ("write_heartbeat", "n", "s", t),
                ("publish_rollouts", t, 0, "n", {}, {"0": group_by_hand(1)}),
                ("append", "logs/n/b", f"{t}\n"),
                ("submit_reward", t, 0, "n", {"reward": 0.5}),
                ("append", "logs/n/a", f"{t}\n" * 9999),
                ("write_atomic", f"checkpoints/n/{t}", b"x" * 9000),
                ("delete", f"checkpoints/n/{t - 1}"),
            ]
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


@pytest.mark.parametrize("fault", ["full disk", *range(5)])
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

    # A file that could not be deleted during an outage is deleted by a later call.
    for folder in (sound, broken):
        DriveStore(folder, "x", "n").prune_rollouts("n", 3, False)
        shutil.rmtree(folder / "experiments/x/tmp")

    assert contents(broken) == contents(sound)
    assert len(events) > 20
    assert events == ["outage", "outage over"] * (len(events) // 2)


@pytest.mark.parametrize("fault, step, call", [
    ("renamed away", "publish_groups", 4), ("renamed away", "finish_round", 4),
    ("EIO", "sample_external", 5), ("full disk", "submit_reward", 3), ("stopped", "publish_groups", 8),
])  # fmt: skip
def test_F2_training_waits_for_the_folder_and_goes_on_unless_it_is_stopped(
    request, undisturbed, drive, monkeypatch, fault, step, call
):
    if fault == "full disk":
        disk = request.getfixturevalue("small_disk")
        drive = shutil.copytree(drive, disk / "drive")
    experiment_dir = drive / "experiments/y"
    away = drive / "away"
    faults = []
    filler = drive.parent / "filler"

    def rename_away():
        experiment_dir.rename(away)

    def bring_back():
        if not experiment_dir.exists():
            away.rename(experiment_dir)

    # Begin the outage just before a call of one of the six steps, and end it 1.5 s later.
    begin, end = {
        "renamed away": (rename_away, bring_back),
        "EIO": (lambda: faults.append("before"), faults.clear),
        "full disk": (lambda: fill_up(drive.parent), filler.unlink),
        "stopped": (rename_away, lambda: os.kill(os.getpid(), signal.SIGINT)),
    }[fault]

    def begin_outage():
        begin()
        threading.Timer(1.5, end).start()

    fail_below(monkeypatch, experiment_dir, lambda: faults[0] if faults else None)
    at_call(monkeypatch, step, call, begin_outage)

    # A stopped run leaves the missing folder alone, and the next start goes on.
    if fault == "stopped":
        assert run(drive) == 130
        assert not experiment_dir.exists()
        bring_back()
    assert run(drive) == 0
    assert not away.exists(), "another folder was made in its place"
    assert repeatable_results(experiment_dir) == repeatable_results(undisturbed / "experiments/x")

    # The outage is logged once. (A stopped run repeats rounds, so its logs have more rows.)
    if fault != "stopped":
        events = [row["event"] for row in read_log(experiment_dir, PROCESS_EVENTS)]
        assert (events.count("outage"), events.count("outage over")) == (1, 1)
        for node_id in ("n_0", "n_1"):
            assert len(read_log(experiment_dir, f"{node_id}/metrics.jsonl")) == 6


@pytest.mark.parametrize("name", ["mkdir", "disk_usage"])
def test_F2_a_start_waits_for_a_folder_that_fails_for_a_moment(drive, monkeypatch, capsys, name):
    """mkdir: of the experiment's folders; disk_usage: for the forecast of the disk space."""
    module = os if name == "mkdir" else shutil
    works = getattr(module, name)
    failures = [OSError(errno.EIO, "Input/output error"), OSError(errno.ENOTCONN, "not connected")]

    def fail_twice(path, *args, **kwargs):
        if failures and "drive" in str(path):
            raise failures.pop()
        return works(path, *args, **kwargs)

    monkeypatch.setattr(module, name, fail_twice)
    assert run(drive, MAX_ROUNDS=1) == 0
    output = capsys.readouterr().out
    assert not failures
    assert output.count("outage: the shared folder fails") == 1
    assert output.count("outage over") == 1


def test_F2_a_gdrive_path_that_is_no_folder_is_an_error_and_no_outage(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert run(tmp_path / "file") == 2
    assert f"GDRIVE_PATH={tmp_path / 'file'} cannot be used" in capsys.readouterr().out
    assert (tmp_path / "file").read_text() == "x"


def test_F2_a_peers_unreadable_file_is_skipped_and_read_again_in_a_later_round(drive, monkeypatch):
    store = DriveStore(drive, "y", "p")
    store.create(["p", "q"])
    for peer in "pq":
        store.publish_rollouts(0, 0, peer, {}, {"0": group_by_hand(ord(peer))})

    # The first two reads of p's file fail.
    reads = itertools.count()
    fail_below(
        monkeypatch, "rollouts/p/round_000000", lambda: "before" if next(reads) < 2 else None
    )
    assert run(drive, LOCAL_NODES=1, MAX_ROUNDS=3) == 0

    metrics = read_log(store.experiment_dir, "n/metrics.jsonl")
    assert [(row["external_groups"], row["rejected"]) for row in metrics] == [
        (1, 1),
        (0, 1),
        (1, 0),
    ]
    events = [row["event"] for row in read_log(store.experiment_dir, "n/training_events.jsonl")]
    assert (events.count("reject"), events.count("outage")) == (1, 0)


def test_F2_a_mount_that_refuses_to_append_is_reported_at_the_start(drive, monkeypatch, capsys):
    # An rclone mount without a cache does this.
    monkeypatch.setattr(DriveStore, "append", Mock(side_effect=PermissionError))
    assert run(drive) == 2
    assert "--vfs-cache-mode writes" in capsys.readouterr().out


# -------- F4: unusable checkpoints ----------------------------------------------------------------


def flip_one_bit(data: bytes) -> bytes:
    return data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:]


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1],
    flip_one_bit,
    lambda data: b"",
    lambda data: data.replace(b'"tiny\\"', b'"tinx\\"'),
    lambda data: b"\xff" * 7 + b"\0" + data,
], ids=["torn", "flipped", "empty", "of another model", "with a huge header"])  # fmt: skip
def test_F4_the_newest_readable_checkpoint_is_loaded_and_if_there_is_none_the_start_fails(
    undisturbed, drive, capsys, damage
):
    # Damage both checkpoints of a node.
    assert run(drive, MAX_ROUNDS=4) == 0
    capsys.readouterr()
    experiment_dir = drive / "experiments/y"
    older, newer = sorted(experiment_dir.glob("checkpoints/n_0/*.safetensors"))
    sound = older.read_bytes()
    for path in (older, newer):
        path.write_bytes(damage(path.read_bytes()))

    # It does not start again at round 0, and nothing in the experiment changes.
    before = contents(experiment_dir)
    assert run(drive) == 2
    assert contents(experiment_dir) == before
    output = capsys.readouterr().out
    assert "cannot be used" in output
    assert "| reward" not in output

    # With the older one restored it resumes from there, and ends as an undisturbed run does.
    older.write_bytes(sound)
    assert run(drive) == 0
    assert f"{newer.relative_to(experiment_dir)} cannot be used" in capsys.readouterr().out
    log = (experiment_dir / "logs/n_0/stdout.log").read_text()
    assert "from the checkpoint after round 1" in log
    assert repeatable_results(experiment_dir) == repeatable_results(undisturbed / "experiments/x")


def test_F3_planted_checkpoints_cost_a_node_none_of_its_own_and_old_ones_leave_no_folders(drive):
    assert run(drive, "x", MAX_ROUNDS=8) == 0
    folder = drive / "experiments/x/checkpoints/n_0"
    (folder / "round_999998.safetensors").write_text("x")
    (folder / "round_999999.safetensors").symlink_to(drive / "experiments/x/config.json")

    # The process keeps its own newest two, starts again in spite of the planted ones, and leaves no
    # folder behind but those of its nodes.
    for max_rounds in (10, 14):
        assert run(drive, "x", MAX_ROUNDS=max_rounds) == 0
        own = [path.name[6:12] for path in sorted(folder.iterdir())][:-2]
        assert own == [f"{max_rounds - 3:06d}", f"{max_rounds - 1:06d}"]
    assert {path.name for path in folder.parent.iterdir()} == {"n_0", "n_1"}


def test_F4_planted_files_neither_finish_a_node_nor_refuse_a_new_one(drive, capsys):
    # An empty checkpoint of the last round and a file in place of a model do not end a node's run.
    assert run(drive, MAX_ROUNDS=4) == 0
    experiment_dir = drive / "experiments/y"
    (experiment_dir / "checkpoints/n_0/round_000005.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert run(drive) == 0
    assert "already finished" not in capsys.readouterr().out
    assert DriveStore(drive, "y").read_reward(5, 0, "n_1") is not None

    # Nor does such a file in the folder of a node that has never registered keep it out.
    folder = experiment_dir / "checkpoints/anna"
    folder.mkdir()
    (folder / "round_000000.safetensors").write_bytes(b"")
    assert run(drive, **JOINING | {"NODE_ID": "anna", "MAX_ROUNDS": 8}) == 0
    assert DriveStore(drive, "y").read_reward(7, 0, "anna") is not None


# -------- F5: retention ---------------------------------------------------------------------------


def rollouts_in(folder: Path) -> set[tuple]:
    """{(round, node)} of the rollout files in rollouts/ or in an archive."""
    return {(int(path.name[6:12]), path.parent.name) for path in folder.glob("*/*.json")}


@pytest.mark.parametrize("archive", [False, True])
def test_F5_a_node_deletes_or_archives_its_own_rounds_that_no_node_needs(drive, archive, capsys):
    store = DriveStore(drive, "y", "human")
    store.create(["human"])
    for t in (0, 4, 7):
        store.publish_rollouts(t, 0, "human", {}, {"0": group_by_hand(t)})

    settings = dict(MAX_ROUNDS=9, ROLLOUT_MAX_AGE=1, ROLLOUT_CLEANUP_ENABLED=True)
    settings |= dict(ROLLOUT_KEEP_LAST_N_ROUNDS=1, ROLLOUT_ARCHIVE_OLD=archive)
    assert run(drive, **settings) == 0

    # A node that resumes may need CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE rounds, which the start
    # says. The files of another node stay.
    text = "rollouts of 3 rounds are kept, which a resumed node needs: CHECKPOINT_INTERVAL"
    assert text in capsys.readouterr().out
    published = {*itertools.product(range(9), ("n_0", "n_1"))}
    needed = {(t, node_id) for t, node_id in published if t >= 6}
    of_others = {(t, "human") for t in (0, 4, 7)}
    assert rollouts_in(store.experiment_dir / "rollouts") == needed | of_others
    assert rollouts_in(drive / "archives/y") == (published - needed if archive else set())
    for node_id in ("n_0", "n_1"):
        assert store.list_stages("rewards", node_id) == [(t, 0) for t in range(9)]


# -------- F6: new, joined, resumed, finished or refused -------------------------------------------


@pytest.mark.parametrize("expected, settings, status", [
    (["new experiment y; other experiments here: x"],
     {"EXPERIMENT_NAME": "y", "MAX_ROUNDS": 1}, 0),
    (["resuming experiment x: round 5 is open, nodes: n_0, n_1",
      "from the checkpoint after round 5"], {"MAX_ROUNDS": 7}, 0),
    (["joining experiment x: round 5 is open, nodes: n_0, n_1"], JOINING, 0),
    (["already finished", "all 6 rounds"], {}, 0),
    (["already finished"], {"NODE_ROLE": "coordinator", "NODE_ID": None}, 0),
    (["has nothing left to do"], JOINING | {"NODE_ID": None}, 2),  # its name is made up
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
    experiment_dir = drive / "experiments/x"
    other = shutil.copytree(experiment_dir, drive / "experiments/y")
    before = contents(other)

    # A setting of the swarm differs from its default, and settings of a process are forged.
    config = json.loads((experiment_dir / "config.json").read_text())
    config |= {"LEARNING_RATE": 0.002, "NUM_SHOTS": " auto", "LOCAL_NODES": 9}
    config |= dict.fromkeys(("DEVICE", "HF_REPO", "NODE_ID", "GDRIVE_PATH"), "evil")
    (experiment_dir / "config.json").write_text(json.dumps(config))

    # The node inherits the first and not the others.
    assert run(drive, "x", **JOINING) == 0
    output = capsys.readouterr().out
    assert "LEARNING_RATE=0.002" in output.split("from the experiment: ")[1]
    assert "evil" not in output

    [*_, row] = read_log(experiment_dir, "late/metrics.jsonl")
    assert (row["round"], row["completions"], row["external_groups"]) == (5, 8, 2)
    groups = DriveStore(drive, "x").fetch_rollouts(5, 0, "late")
    assert {group["task"] for group in groups} <= {*SMALL["TASKS"].split(",")}
    assert contents(other) == before


@pytest.mark.parametrize("source, name, value", [
    *(("environment", *setting) for setting in [
        ("SEED", 7), ("TASKS", "small_gcd"), ("REWARD", "verifier"), ("MAX_STAGES", 2), ("DEVICE", "cuda:9"),
        ("MODEL_NAME", "/tmp"), ("MODEL_NAME", "no/such model"), ("MAX_NEW_TOKENS", 600),
        ("NUM_GENERATIONS", 1), ("TASKS", "countdown"), ("NODE_ID", "../n"), ("NODE_ID", "coordinator"),
    ]), ("config.json", "SEED", "7\x1b[2J"), ("config.json", "TASKS", "countdown"), ("config.json", "layout", 2),
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
    is_wrong_anywhere = name not in sapo.MUST_AGREE or value == "countdown"
    if source == "environment" and is_wrong_anywhere:
        assert run(tmp_path / "new", **settings) == 2
        assert not (tmp_path / "new").exists()
