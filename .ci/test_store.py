"""Proofs of the folder's promises F1 to F7, in this order, in a simulated folder (see simulator.py):
outages and kills at any call, damages, retention, and all kinds of starts. U10, mistakes in the
program's own code, stands at the end, because it is proved in the same way."""

import errno
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import coordinator
import drive_store
import grpo
import sapo
from common import QUICK, assert_each_reward_counts_once, events_of, folder_of, heartbeat_of, play
from common import read_log, results, rewards_of, rounds_of
from drive_store import At, DriveStore
from simulator import FIVE_NODES
from test_sapo import contents, group_by_hand, new_store

# In a longer run every call has its turn: EVERY=1 for all of them.
EVERY = int(os.environ.get("EVERY", 3))
SIX = {"MAX_ROUNDS": 6, "CHECKPOINT_INTERVAL": 2, "WARM_START_STEPS": 3}
JOINING = dict.fromkeys(QUICK)  # a node that joins sets its name and no more
LATE = JOINING | {"NODE_ID": "late"}


def experiment(world, name="default"):
    return world.drive / "experiments" / name


def paths_below(folder) -> set:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def rollouts(seed) -> dict:
    return {"format": 1, "rollouts": {"0": group_by_hand(seed)}}


def refuse(world, sentence, name="n", **settings):
    """A start of these settings ends with this sentence and changes nothing. Returns its process."""
    around = world.drive.parent
    before = paths_below(around), contents(around)
    process = world.finish(name, status=2, **settings)
    assert sentence in process.output
    assert (paths_below(around), contents(around)) == before
    return process


def fail_reads(world, path, numbers, code):
    """Let the reads of a file fail that have these numbers, from 0. Returns a count of all."""
    reads = itertools.count()

    def fault(process, name, called):
        is_read = name == "open" and called.endswith(path)
        return OSError(code, "broken") if is_read and next(reads) in numbers else None

    world.fault = fault
    return reads


@pytest.fixture
def undisturbed(world):
    """What a run with SIX leaves. Its folder is world.drive; a test works in another one."""
    world.finish(**SIX)
    expected = results(world.drive)
    world.drive = world.drive.with_name("disturbed")
    return expected


def test_F1_a_reader_sees_no_file_or_the_whole_one_and_what_is_published_stays(tmp_path):
    """With threads that really run at once. What a crash leaves is proved in test_sapo.py."""
    store = play(tmp_path, "a", "b")

    def write(node):
        writer = DriveStore(tmp_path, "default")
        for i in range(80):
            writer.write(f"nodes/{node}/heartbeat.json", b"%02d" % i * 30_000)
            for text in ("x" * 60_000, "published once more"):
                writer.publish("rewards", node, At(i, 0), {"reward": 0.5, "text": text})

    threads = [threading.Thread(target=write, args=node) for node in "ab"]
    for thread in threads:
        thread.start()

    # A heartbeat holds one number, and a reward is there from its marker on.
    polls = 0
    while any(thread.is_alive() for thread in threads):
        polls += 1
        for (kind, node), (round_, _) in store.board().progress.items():
            heartbeat = (store.dir / f"nodes/{node}/heartbeat.json").read_bytes()
            assert heartbeat == heartbeat[:2] * 30_000
            path = store.dir / drive_store.stage_file(kind, node, At(round_))
            assert len(json.loads(path.read_bytes())["text"]) == 60_000
    assert polls > 5
    rewards = [*store.dir.glob("nodes/*/rewards/*")]
    assert len(rewards) == 160
    assert all(len(json.loads(path.read_bytes())["text"]) == 60_000 for path in rewards)


def outages_of(world, process, expected) -> int:
    """The number of outages in a run that left what was expected nevertheless: its results, each row
    of its log once, and of each outage when it began and when it was over."""
    assert results(world.drive) == expected
    kinds = [row["event"] for row in read_log(world.drive, process.first, "training_events")]
    kinds = [kind for kind in kinds if kind.startswith("outage")]
    assert kinds == ["outage", "outage over"] * (len(kinds) // 2)
    rows = read_log(world.drive, process.first)
    stages = [(row["round"], row["stage"]) for row in rows]
    assert stages == sorted(set(stages)), "a row of the log is missing or doubled"
    return len(kinds) // 2


@pytest.mark.parametrize("seconds", [0.3, 3])
@pytest.mark.parametrize("settings", [SIX, FIVE_NODES], ids=["1 node", "5 nodes"])
@pytest.mark.parametrize("seed", range(3))
def test_F2_a_run_in_which_the_folder_fails_again_and_again_ends_like_an_undisturbed_one(
    world, tmp_path, seed, settings, seconds
):
    """An outage begins at any call. All calls fail for some seconds, half of them after they have
    done their work."""
    world.finish(**settings)
    expected = results(world.drive)
    world.drive = tmp_path / "broken"
    world.rng.seed(seed)
    ends_at = 0.0

    def fault(process, name, path):
        nonlocal ends_at
        if ends_at < world.now and world.rng.random() < 0.05:
            ends_at = world.now + seconds
        return world.rng.choice(["before", "after"]) if world.now < ends_at else None

    world.fault = fault
    process = world.finish(**settings)
    world.fault = lambda *_: None
    assert outages_of(world, process, expected) > 3


@pytest.mark.parametrize("kind", ["before", "after"])
def test_F2_an_error_at_any_single_call_changes_nothing(world, tmp_path, kind):
    process = world.finish(**SIX)
    expected = results(world.drive)
    for call in range(1, process.num_calls, 2 * EVERY):
        world.drive = tmp_path / f"{call}"
        world.fault = lambda process, *_: kind if process.num_calls == call else None  # noqa: B023
        process = world.finish(**SIX)
        assert outages_of(world, process, expected) <= 1


def test_F2_a_drive_that_is_not_there_is_an_outage_and_no_absent_file(tmp_path):
    drive = tmp_path / "drive"
    store = play(drive, "n")
    at = At(3)
    reads = (
        lambda: store.has_dir("/reports"), lambda: store.fetch_rollouts("peer", at),
        lambda: store.read_reward("peer", at), lambda: store.list_names("nodes/peer/rewards"),
        lambda: store.download("nodes/n/checkpoints/c", tmp_path / "local", 100),
    )  # fmt: skip
    assert [read() for read in reads] == [True, None, None, [], False]
    drive.rename(tmp_path / "away")
    for read in reads:
        with pytest.raises(OSError):
            read()


def test_F2_a_disk_that_fills_up_within_a_write_loses_and_doubles_nothing(tmp_path):
    """The limit of a file's size stands for the end of the disk: a write stops half-way."""
    store = new_store(tmp_path, "n")
    store.append("nodes/n/logs/a", "1\n" * 5000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, *args in (
        ("append", "nodes/n/logs/a", "2\n" * 5000),
        ("write", "nodes/n/checkpoints/c", b"x" * 50_000),
        ("publish", "rewards", "n", At(0), {"reward": 0.5, "text": "x" * 50_000}),
    ):
        before = contents(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_001, limits[1]))
        try:
            with pytest.raises(OSError):
                getattr(store, name)(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if name != "append":  # half of it stands there until the next try
            assert contents(tmp_path) == before
        getattr(store, name)(*args)
    assert (store.dir / "nodes/n/logs/a").read_text() == "1\n" * 5000 + "2\n" * 5000
    assert store.read_reward("n", At(0))["reward"] == 0.5


HOPELESS = (errno.ENOTEMPTY, errno.EROFS, errno.EACCES, errno.EOPNOTSUPP, errno.ENAMETOOLONG)


@pytest.mark.parametrize("code", HOPELESS, ids=errno.errorcode.get)
def test_F2_what_waiting_cannot_mend_is_refused_before_a_process_registers_and_waits_later(
    world, undisturbed, code
):
    def fault(process, name, path):
        return OSError(code, os.strerror(code), path) if name in ("mkdir", "replace") else None

    world.fault = fault
    process = refuse(world, f"cannot be used ([Errno {code}]", **SIX)
    assert "mount options" in process.output

    # Once it has registered it is an outage, and the line that says so names what to look at.
    world.fault = lambda *_: None
    process = world.start(**SIX)
    world.run(lambda: "start:" in process.output)
    world.fault = fault
    world.wait(60)
    assert process.status is None
    assert len(re.findall("outage: .*: look at permissions", process.output)) == 1
    world.fault = lambda *_: None
    world.end(process)
    assert results(world.drive) == undisturbed


def test_F2_every_method_of_the_store_may_be_called_twice(tmp_path):
    """A retry repeats a call whose work was done."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (model / name).write_text(name)
    settings = {"layout": drive_store.LAYOUT, "maker": "n"}
    calls = [
        ("create", settings), ("create_node", "n"), ("register", ["n"], {}), ("board",),
        ("publish", "rollouts", "n", At(0), rollouts(1)), ("publish", "rewards", "n", At(0), {"reward": 0.5}),
        ("move_marker", "open", "n", At(1)), ("move_marker", "open", "n", At(2)),
        ("write_heartbeat", "n", "session"), ("write", "nodes/n/logs/a.json", b"{}"),
        ("upload", model / "config.json", "nodes/n/checkpoints/round_000001.safetensors"),
        ("upload_model", model, "nodes/n/model"), ("append", "nodes/n/logs/b", "1\n"),
        ("delete", "nodes/n/checkpoints/round_000001.safetensors", True),
        ("prune_rollouts", "n", 1, True), ("remove_leftovers", "n"), ("make_dir", "nodes/n/logs"),
    ]  # fmt: skip
    once = DriveStore(tmp_path / "once", "x")
    twice = DriveStore(tmp_path / "twice", "x")
    for name, *args in calls:
        getattr(once, name)(*args)
        for _ in range(1 if name == "append" else 2):  # a failed append is cut off, see above
            getattr(twice, name)(*args)

    def left(store):
        return {re.sub(r"\d{13}-\w{8}", "ID", path) for path in paths_below(store.root)}

    assert left(once) == left(twice)
    assert len([*twice.dir.glob("board/session.*")]) == 1


@pytest.mark.parametrize("what, moment", [
    ("experiments/default", "round"), ("experiments/default", "stop"), ("", "round"), ("", "stop"),
    ("", "picture"),
])  # fmt: skip
def test_F2_training_waits_for_a_missing_folder_and_goes_on_unless_it_is_stopped(
    world, undisturbed, monkeypatch, what, moment
):
    """The experiment or the whole drive goes within a round, or while the picture is drawn."""
    folder, away = world.drive / what, world.drive.with_name("away")

    def unmount(panels=None):
        folder.rename(away)
        return b"a picture"

    process = world.start(**SIX)
    if moment == "picture":
        monkeypatch.setattr(coordinator, "plot", unmount)
        world.run(away.exists)
    else:
        world.run(lambda: process.num_calls > 150)
        unmount()
    world.wait(60)
    assert not folder.exists(), "another folder was made in its place"
    assert process.output.count("outage") == 1
    if moment == "stop":
        process.interrupt()
        world.end(process, status=130)
        assert "stopped without a checkpoint" in process.output
    away.rename(folder)
    if moment == "stop":
        process.start()
    world.end(process)
    assert results(world.drive) == undisturbed
    assert (world.drive / "reports/default.png").read_bytes() == b"a picture"


def test_F2_a_peers_unreadable_file_is_skipped_and_read_again_in_a_later_round(world):
    store = play(world.drive, "p", "q")
    for peer in "pq":
        store.publish("rollouts", peer, At(0, 0), rollouts(ord(peer)))
        store.write_heartbeat(peer, store.session, "done")
    fail_reads(world, "p/rollouts/round_000000.stage_0.json", (0, 1), errno.EIO)
    world.finish(MAX_ROUNDS=3)
    rows = read_log(world.drive, "n")
    found = [(row["external_groups"], row["rejected"]) for row in rows]
    assert found == [(1, 1), (0, 1), (1, 0)]
    assert len(events_of(world.drive, "n", "reject")) == 1
    assert events_of(world.drive, "n", "outage") == []


def test_F2_L5_an_error_while_a_node_reads_another_one_of_its_process_waits(world):
    settings = {"LOCAL_NODES": 2, "MAX_ROUNDS": 4, "NUM_TRANSPLANT_TREES": 2}
    world.finish(**settings)
    expected = results(world.drive)
    world.drive = world.drive.with_name("broken")
    reads = fail_reads(world, "n_1/rollouts/round_000002.stage_0.json", (1,), errno.ESTALE)
    process = world.finish(**settings)
    assert next(reads) > 2
    assert outages_of(world, process, expected) == 1
    assert events_of(world.drive, "n_0", "reject") == []


@pytest.mark.parametrize("every, settings", [(EVERY, SIX), (43 * EVERY, FIVE_NODES)])
def test_F3_a_process_that_is_alone_and_killed_at_any_call_repeats_the_undisturbed_run(
    world, tmp_path, every, settings
):
    """At any call of its start, of a round, of a checkpoint and of the end with the export."""
    undisturbed = world.finish(**settings)
    expected = results(world.drive)
    names = paths_below(world.drive)
    assert len({row["reward"] for row in rewards_of(world.drive)}) > 2

    for call in range(1, undisturbed.num_calls + 1, every):
        world.drive = tmp_path / f"killed_{call}"
        process = world.start(**settings)
        process.kill_at = call
        world.end(process, status=-9)
        before = results(world.drive)
        process.start()
        world.end(process)
        # A kill right after the last checkpoint may leave an older one, and an older marker.
        after = results(world.drive)
        older = {path: after.pop(path) for path in after.keys() - expected.keys()}
        assert after == expected, call
        is_kept = [(expected | older).get(path, data) == data for path, data in before.items()]
        assert all(is_kept), call
        new = {path for path in paths_below(world.drive) ^ names if "session." not in path}
        assert all("checkpoint" in path for path in new), new


def test_F3_what_a_kill_left_unfinished_is_removed_by_its_owner_and_by_nobody_else(world):
    """Whose it is stands in the name, which counts as a whole: a is not a-b."""
    world.finish("a", MAX_ROUNDS=1)
    digits = "0123456789abcdef"
    folders = ["warmstart", "reports", "experiments/default"]
    folders += [f"experiments/default/nodes/a{name}" for name in ("", "/checkpoints", "/logs")]

    def plant(*names, age=0.0):
        paths = {world.drive / folder / name for folder in folders for name in names}
        for path in paths:
            path.write_text("half of a file")
            os.utime(path, (world.now - age, world.now - age))
        return paths

    plant(f".new-a-{digits}")
    others = plant(f".new-a-b-{digits}", f".new-b-{digits}", f".new-a-{digits}0", f".new--{digits}")
    others |= plant(".git", ".new-a", f".new-a-{digits[:-1]}", age=90_000)
    world.finish("a", MAX_ROUNDS=2)
    assert {*world.drive.rglob(".*")} == others

    # Readers and prepare have no name, and work beside the experiments. What they left goes at the
    # next such start, a day later.
    for role in ("report", "prepare"):
        old = plant(f".new--{digits[::-1]}", age=90_000)
        left = {path for path in old if path.parent.name not in ("warmstart", "reports")}
        world.finish("a", NODE_ROLE=role, NODE_ID=None, WARM_START_STEPS=3)
        assert {*world.drive.rglob(".*")} == others | left


def test_F3_in_a_swarm_a_nodes_total_counts_each_of_its_rewards_once_whatever_was_repeated(world):
    """It is killed after its reward of round 4, with a checkpoint of round 2. The repeated round 4
    earns another reward than the one that was published, and later a round is not repeated."""
    store = play(world.drive, "coordinator", "other")
    process = world.start(NUM_TRANSPLANT_TREES=0, MAX_ROUNDS=7)

    def open_round(t):
        store.move_marker("open", "coordinator", At(t))
        store.write_heartbeat("coordinator", store.session)
        world.run(lambda: t in rounds_of(world.drive, "n"))

    def restart():
        process.kill()
        process.start()

    def assert_resumed_and_each_counts_once():
        assert process.resumed_from == 2
        assert_each_reward_counts_once(world.drive, "n")

    for t in range(5):
        open_round(t)
    restart()
    world.run(lambda: "n 4/7 reward" in process.output)
    world.wait(3)  # until its log is written
    assert_resumed_and_each_counts_once()

    restart()
    for t in (5, 6):
        open_round(t)
    world.end(process)
    assert_resumed_and_each_counts_once()


DAMAGES = {
    "torn": lambda data: data[:-1],
    "empty": lambda data: b"",
    "of another model": lambda data: data.replace(b'"tiny\\"', b'"tinx\\"'),
    "with a huge header": lambda data: b"\xff" * 7 + b"\0" + data,
    "of another user": None,  # it cannot be opened
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_F4_the_newest_readable_checkpoint_is_loaded_and_if_there_is_none_the_start_fails(
    world, undisturbed, damage
):
    world.finish(**SIX | {"MAX_ROUNDS": 4})
    older, newer = sorted((folder_of(world.drive, "n") / "checkpoints").iterdir())
    sound = older.read_bytes()
    forbidden = []

    def fault(process, name, path):
        is_forbidden = name == "open" and path in map(str, forbidden)
        return PermissionError(errno.EACCES, "Permission denied", path) if is_forbidden else None

    world.fault = fault
    for path in (older, newer):
        if damage:
            path.write_bytes(damage(path.read_bytes()))
        else:
            forbidden.append(path)

    # With both damaged the process does not start again at round 0 and sees no outage.
    process = refuse(world, "cannot be used", **SIX)
    assert "outage" not in process.output
    assert "/6 reward" not in process.output

    # With the older one restored it resumes from there, and ends as an undisturbed run does.
    older.write_bytes(sound)
    forbidden = [newer] * (damage is None)
    process = world.finish(**SIX)
    assert process.output.count(f"{newer.name} cannot be used") == 1
    assert process.resumed_from == 1
    assert "outage" not in process.output
    assert results(world.drive) == undisturbed


def test_F4_a_checkpoint_must_be_there_if_its_marker_is_and_only_then(world, undisturbed):
    # The first run ends before CHECKPOINT_INTERVAL, its only checkpoint is lost, and comes back.
    world.finish(**SIX | {"MAX_ROUNDS": 1})
    checkpoint = folder_of(world.drive, "n") / "checkpoints/round_000000.safetensors"
    moved = checkpoint.rename(world.drive / "moved")
    refuse(world, "n needs its checkpoint, but it is gone", **SIX)
    moved.rename(checkpoint)
    assert world.finish(**SIX).resumed_from == 0

    # Without a marker a node that was killed begins again, whatever names of its files tell.
    process = world.start(EXPERIMENT_NAME="other", **SIX)
    world.run(lambda: rounds_of(world.drive, "n", name="other"))
    process.kill()
    planted = [folder_of(world.drive, "n", "other") / f"rewards/round_00050{i}.x" for i in range(2)]
    for path in planted:
        path.mkdir()
    process.start()
    world.end(process)
    for path in planted:
        path.rmdir()
    assert results(world.drive, "other") == undisturbed


def test_F4_planted_files_neither_finish_a_node_nor_refuse_a_new_one(world):
    # Garbage under the names of the last round's files does not end a node's run.
    world.finish(**SIX | {"MAX_ROUNDS": 4})
    store = DriveStore(world.drive, "default")
    for path in ("checkpoints/round_000005.safetensors", "rewards/round_000005.stage_0.json"):
        (store.dir / "nodes/n" / path).write_bytes(b"")
    store.move_marker("rewards", "n", At(5))
    assert "already finished" not in world.finish(**SIX).output
    assert store.read_reward("n", At(5))["round"] == 5

    # Nor does a file in the folder of a node that has never registered keep it out, nor one that
    # looks like another program's, even if it is the name of a node.
    for path in ("nodes/round_5/checkpoints/round_000000.safetensors", "rollouts/round_5"):
        (store.dir / path).parent.mkdir(parents=True)
        (store.dir / path).write_bytes(b"")
    for max_rounds in (8, 9):
        store.move_marker("open", "n", At(max_rounds - 1))
        world.finish("round_5", **JOINING | {"NODE_ID": "round_5", "MAX_ROUNDS": max_rounds})
        assert store.read_reward("round_5", At(max_rounds - 1)) is not None


def test_F5_a_checkpoint_is_emptied_before_it_is_deleted_but_never_one_with_another_name(tmp_path):
    """On Google Drive a deleted file goes to the trash, where it still counts."""
    store = new_store(tmp_path, "n")
    folder = store.dir / "nodes/n/checkpoints"
    outside = tmp_path / "outside"
    outside.write_text("thesis")
    (folder / "own").write_text("weights")
    (folder / "link").symlink_to(outside)
    os.link(outside, folder / "hard_link")
    with open(folder / "own") as file:  # it shows the size of the file that is deleted
        for name in ("own", "link", "hard_link"):
            store.delete(f"nodes/n/checkpoints/{name}", frees_space=True)
        assert os.fstat(file.fileno()).st_size == 0
    assert [*folder.iterdir()] == []
    assert outside.read_text() == "thesis"

    # A rollout file that is being read stays whole.
    store.publish("rollouts", "n", At(0, 0), rollouts(1))
    with open(store.dir / "nodes/n/rollouts/round_000000.stage_0.json") as file:
        store.prune_rollouts("n", 4, archive=False)
        assert json.loads(file.read())["peer_id"] == "n"


STRANGE = (
    "rollouts/round_000000.stage_0.txt", "rollouts/round_000000.stage_00.json", "rollouts/notes",
    "rewards/round_000001.stage_0.json.bak", "rewards/round_1.stage_0.json",
    "checkpoints/round_000001.x", "checkpoints/round_999999.bak", "checkpoints/round_00001.safetensors",
    "checkpoints/round_999998.safetensors",
    "model/.git/config", "model/model.gguf", "model/notes.md", "model/.hidden",
)  # fmt: skip


@pytest.mark.parametrize("archive", [False, True])
def test_F5_F3_U8_what_the_user_or_a_stranger_put_beside_a_nodes_files_stays_and_stops_nothing(
    world, request, archive
):
    settings = SIX | {"ROLLOUT_CLEANUP_ENABLED": True, "ROLLOUT_KEEP_LAST_N_ROUNDS": 1}
    settings |= {"ROLLOUT_MAX_AGE": 0, "ROLLOUT_ARCHIVE_OLD": archive}
    world.finish(**settings | {"MAX_ROUNDS": 3})
    node = folder_of(world.drive, "n")
    outside = world.drive / "outside"
    for path in (outside, *(node / name for name in STRANGE)):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    blocking = node / "rollouts/round_000001.stage_7.json"
    blocking.mkdir()
    (blocking / "in").write_text("mine")

    # In the place of its newest checkpoint and of its model, and far after all of them.
    (node / "checkpoints/round_000002.safetensors").write_text("garbage")
    (node / "checkpoints/round_999999.safetensors").symlink_to(outside)
    old_weights = (node / "model/model.safetensors").read_text()
    (node / "model/tokenizer.json").unlink()
    (node / "model/tokenizer.json").symlink_to(outside)
    deep = node / "model/config.json"
    deep.unlink()
    deep.mkdir()
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", node], check=True))
    for _ in range(30):  # deeper than Python's stack, and than pytest can remove
        deep = deep / "/".join(["d"] * 40)
        os.makedirs(deep)
        os.chdir(deep)
        deep = Path(".")
    os.chdir("/")

    process = world.finish(**settings | {"MAX_ROUNDS": 9})
    for path in (outside, *(node / name for name in STRANGE)):
        assert path.read_text() == "mine"
        path.unlink()
    assert rounds_of(world.drive, "n", "checkpoints") == [7, 8, 999999]
    assert_each_reward_counts_once(world.drive, "n")
    if not archive:
        assert (blocking / "in").read_text() == "mine"
        assert process.output.count("round_000001.stage_7.json stays") == 1

    # The export has replaced its own files, none is new, and each is a file.
    exported = ("config.json", "model.safetensors", "tokenizer.json")
    for name in exported:
        assert (node / "model" / name).read_text().startswith(name)
        assert not (node / "model" / name).is_symlink()
    assert (node / "model/model.safetensors").read_text() != old_weights
    names = {name for name in os.listdir(node / "model") if not name.startswith(".new-")}
    assert names == {*exported, ".git"}


@pytest.mark.parametrize("archive", [False, True])
def test_F5_a_node_deletes_or_archives_its_own_rounds_that_no_node_needs(world, archive):
    store = play(world.drive, "human")
    for t in (0, 4, 7):
        store.publish("rollouts", "human", At(t, 0), rollouts(t))
    store.write_heartbeat("human", store.session, "done")
    settings = dict(MAX_ROUNDS=9, LOCAL_NODES=2, CHECKPOINT_INTERVAL=2, ROLLOUT_MAX_AGE=1)
    settings |= dict(ROLLOUT_CLEANUP_ENABLED=True, ROLLOUT_KEEP_LAST_N_ROUNDS=1)
    world.finish(**settings, ROLLOUT_ARCHIVE_OLD=archive)

    # A node that resumes may need CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE rounds. The files of
    # another node stay, and so do all rewards. Of checkpoints the newest two are kept.
    for node in ("n_0", "n_1"):
        assert rounds_of(world.drive, node, "rollouts") == [6, 7, 8]
        assert rounds_of(world.drive, node) == [*range(9)]
        archived = sorted((world.drive / "archives/default" / node).glob("*"))
        assert [path.name[6:12] for path in archived] == [f"{t:06d}" for t in range(6) if archive]
    assert rounds_of(world.drive, "human", "rollouts") == [0, 4, 7]
    assert rounds_of(world.drive, "n_0", "checkpoints") == [7, 8]


STARTS = {
    "new": ("other: a new experiment", {"EXPERIMENT_NAME": "other", "MAX_ROUNDS": 1}),
    "resumed": ("resuming, round 5 of 7, nodes: n", {"MAX_ROUNDS": 7}),
    "joined": ("joining, round 5 of 6, nodes: n", LATE),
    "finished": ("already finished, all 6 rounds", {}),
    "led to the end": ("already finished", {"NODE_ROLE": "coordinator", "NODE_ID": None}),
}


@pytest.mark.parametrize("sentence, settings", STARTS.values(), ids=STARTS)
def test_F6_a_start_says_whether_the_experiment_is_new_joined_resumed_or_finished(
    world, sentence, settings
):
    world.finish(**SIX)
    process = world.finish(**SIX | settings)
    assert sentence in process.output
    assert process.resumed_from == (5 if "resuming" in sentence else None)


UNUSABLE = [
    ("DEVICE", "cuda:9"), ("MODEL_NAME", "/tmp"), ("MODEL_NAME", "no/such model"), ("MAX_NEW_TOKENS", 600),
    ("NUM_GENERATIONS", 1), ("TASKS", "countdown"), ("NODE_ID", "../n"), ("NODE_ID", "coordinator"),
]  # fmt: skip
FOREIGN = ("state/round", "peers/a", "logs/x.log", "round_0/n", "rollouts/r")


# What was changed in which JSON file of the experiment, settings of the start, words of the sentence.
@pytest.mark.parametrize("is_begun, changed, settings, words", [
    # A setting that cannot be used leaves nothing, in an empty folder either.
    *((is_begun, {}, {name: value}, name) for is_begun in (True, False) for name, value in UNUSABLE),
    (True, {"config.json": {"SEED": "7\x1b[2J"}}, LATE, "SEED"),
    (True, {"config.json": {"TASKS": "countdown"}}, LATE, "TASKS"),
    (True, {"config.json": {"layout": 4}}, LATE, "another version"),
    # Settings that disagree with the experiment's.
    (True, {}, {"SEED": 7}, "SEED"),
    (True, {}, {"TASKS": "small_gcd"}, "TASKS"),
    (True, {}, {"REWARD": "verifier"}, "REWARD"),
    (True, {}, {"MAX_STAGES": 2}, "MAX_STAGES"),
    # A node that is new, or whose name is made up, comes too late.
    (True, {}, LATE | {"MAX_ROUNDS": 3}, "round 5 is open and MAX_ROUNDS is 3"),
    (True, {}, JOINING, "round 5 is open and MAX_ROUNDS is 6"),
    *((False, {name: {}}, {}, "another version or program; take another EXPERIMENT_NAME") for name in FOREIGN),
], ids=lambda value: re.sub("'[A-Z_]+': None(, )?", "", str(value)))  # fmt: skip
def test_F6_a_start_that_is_refused_says_why_in_a_printable_sentence_and_changes_nothing(
    world, monkeypatch, real_load_model, is_begun, changed, settings, words
):
    if is_begun:
        world.finish(**SIX)
    monkeypatch.setattr(grpo, "load_model", real_load_model)
    for name, changes in changed.items():
        path = experiment(world) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | changes))
    process = refuse(world, words, **SIX | {"MAX_ROUNDS": 7} | settings)
    assert len(process.output) < 2000
    assert process.output.replace("\n", "").isprintable()


def test_F6_a_file_in_place_of_the_folder_and_two_names_for_one_are_refused(world):
    world.drive.write_text("x")
    refuse(world, "it is no folder")
    world.drive.unlink()
    world.finish("anna", MAX_ROUNDS=1)
    world.as_seen_by_the_disk = lambda path: str(path).replace("nodes/Anna", "nodes/anna")
    words = "NODE_ID=Anna: to this disk it is the same as anna"
    refuse(world, words, "Anna", MAX_ROUNDS=2)


def test_F6_a_node_joins_with_three_settings_and_disturbs_no_other_experiment(world):
    world.finish(**SIX)
    other = shutil.copytree(experiment(world), experiment(world, "other"))
    before = contents(other)

    # A setting of the swarm differs from its default, and settings of a process are forged.
    path = experiment(world) / "config.json"
    config = json.loads(path.read_text())
    config |= {"LEARNING_RATE": 0.002, "NUM_SHOTS": " auto", "LOCAL_NODES": 9}
    config |= dict.fromkeys(("DEVICE", "HF_REPO", "NODE_ID", "GDRIVE_PATH"), "evil")
    path.write_text(json.dumps(config))

    # The node inherits the first and not the others.
    process = world.finish(**LATE | {"EXPERIMENT_NAME": "default"})
    assert "LEARNING_RATE=0.002" in process.output.split("from the experiment: ")[1]
    assert "evil" not in process.output
    [row] = read_log(world.drive, "late")
    assert (row["round"], row["completions"], row["external_groups"]) == (5, 8, 2)
    groups = DriveStore(world.drive, "default").fetch_rollouts("late", At(5))
    assert {group["task"] for group in groups} == {QUICK["TASKS"]}
    assert contents(other) == before


def test_F6_of_two_that_take_the_place_of_a_maker_that_was_killed_one_config_counts(
    world, monkeypatch
):
    world.finish(EXPERIMENT_NAME="first", **SIX)
    config = json.loads((experiment(world, "first") / "config.json").read_text())
    others = json.dumps(config | {"LEARNING_RATE": 0.002, "maker": "other"}).encode()

    # The other's config.json comes last, just before this one registers.
    register = DriveStore.register

    def replace_config_and_register(store, *args):
        if not store.session:
            store.write("config.json", others)
        return register(store, *args)

    monkeypatch.setattr(DriveStore, "register", replace_config_and_register)
    process = world.finish(**SIX)
    assert (experiment(world) / "config.json").read_bytes() == others
    assert process.rates == {0.002}, "it has learned with the other's rate"


def test_F6_half_a_start_leaves_at_most_its_own_empty_folder(world):
    """A joining start is killed at every call until it has registered."""
    world.finish(**SIX)
    before = paths_below(world.drive)
    call = 0
    new = set()
    while not any("session.late" in path for path in new):
        assert new <= {"experiments/default/nodes/late"}
        call += 1
        process = world.start(**LATE)
        process.kill_at = call
        world.run()
        new = {path for path in paths_below(world.drive) - before if ".new-" not in path}
        new -= {"experiments/default/nodes/late/posting"}
    assert call > 20
    world.finish(**LATE)
    assert not [*world.drive.rglob(".*")]


def test_F7_a_folder_that_was_dropped_is_made_again_by_its_maker_alone(world):
    """Copied buckets, archives of files and tidy users drop empty folders."""
    archiving = dict(ROLLOUT_CLEANUP_ENABLED=True, ROLLOUT_ARCHIVE_OLD=True)
    archiving |= dict(ROLLOUT_KEEP_LAST_N_ROUNDS=1, ROLLOUT_MAX_AGE=0, CHECKPOINT_INTERVAL=1)
    world.finish(MAX_ROUNDS=2, **archiving)
    play(world.drive, "late")
    for folder in ("archives/default", "experiments/default/nodes/late"):
        shutil.rmtree(world.drive / folder)

    # A node that the board names waits for its folder, which may only be late. What another node
    # made is missed by nobody.
    process = world.finish("late", **LATE | {"MAX_ROUNDS": 6} | archiving)
    assert process.output.count("outage") == 2
    assert "nodes/late is not there yet" in process.output
    assert rounds_of(world.drive, "late")[-1] == 5
    assert not (world.drive / "archives/default").exists()
    assert 5 in rounds_of(world.drive, "late", "rollouts")

    # The maker of the experiment makes its folders again, and old rollouts move there.
    world.finish(MAX_ROUNDS=7, **archiving)
    assert (world.drive / "archives/default/n/round_000001.stage_0.json").exists()

    # If the maker was killed before it wrote config.json, another process takes its place.
    experiment(world, "other").mkdir()
    process = world.finish(EXPERIMENT_NAME="other", MAX_ROUNDS=1)
    assert "another process is still creating the experiment" in process.output


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


MISTAKES = [
    FileNotFoundError(errno.ENOENT, "No such file", "my_notes.txt"), BrokenPipeError("mine"),
    KeyError("mine"), MemoryError(), Unprintable(), SystemExit(7), GeneratorExit(),
]  # fmt: skip
PLACES = [
    (sapo, "submit_reward"), (sapo, "mean_reward"), (grpo, "update_policy"), (grpo, "save_tensors"),
]  # fmt: skip


@pytest.mark.parametrize("module, step, error", [
    *((*PLACES[0], error) for error in MISTAKES), *((*place, MISTAKES[0]) for place in PLACES[1:]),
])  # fmt: skip
def test_U10_a_mistake_of_any_type_and_place_shows_its_traceback_and_says_goodbye(
    world, undisturbed, monkeypatch, module, step, error
):
    def my_own_line():
        raise error

    # The function has been edited, and fails in the second round.
    original = getattr(module, step)

    def edited(*args, **more):
        if DriveStore(world.drive, "default").board().open_round == 1:
            my_own_line()
        return original(*args, **more)

    # What is no Exception ends Python as it does elsewhere.
    with monkeypatch.context() as patch:
        patch.setattr(module, step, edited)
        process = world.start(**SIX)
        if isinstance(error, Exception):
            world.end(process, status=1)
        else:
            with pytest.raises(type(error)):
                world.run()
    texts = [(folder_of(world.drive, "n") / "logs/stdout.log").read_text()]
    for text in texts + [process.output] * isinstance(error, Exception):
        assert text.count("Traceback (most recent call last)") == 1
        assert "in my_own_line" in text
        assert type(error).__name__ in text
    assert "outage" not in process.output
    assert read_log(world.drive, "n", "training_events")[-1]["event"] == "error"
    assert heartbeat_of(world.drive, "n") == "failed"

    # The next start, with the mistake mended, goes on.
    world.finish(**SIX)
    assert results(world.drive) == undisturbed
