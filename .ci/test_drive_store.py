"""What else drive_store.py holds: other file systems, races, every odd file and name, retention."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from drive_store import BadFile, DriveStore, StoreError, bucket, check_name, check_rollouts
from drive_store import parse_json
from test_sapo import BIG, contents, in_another_process, new_store, put, wire_file

PEER = "rollouts/round_000001/stage_0/p.json"


def fail_with(number, *_, **__):
    raise OSError(number, os.strerror(number))


def refuse(monkeypatch, name, number, condition=lambda *args: True):
    """os.<name> fails with this errno where the condition holds of its arguments."""
    real = getattr(os, name)
    fake = lambda *a, **k: fail_with(number) if condition(*a) else real(*a, **k)  # noqa: E731
    monkeypatch.setattr(os, name, fake)


# -------- One file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planted", [b'{"a": 1}', b"{}", b"[]", b"", b'{"peer_id": "n1", "round": 1, "stage": 0}']
)
def test_what_makes_no_sense_under_ones_own_name_is_replaced_and_what_does_stays(tmp_path, planted):
    """Planted before the round, such a file silenced a node without a word."""
    store, groups = new_store(tmp_path), wire_file()["rollouts"]
    for kind in ("rollouts", "rewards"):
        put(store, f"{kind}/round_000001/stage_0/n1.json", planted)
    assert store.publish(1, 0, "n1", {}, groups) and store.fetch(1, 0, "n1")
    assert store.submit_reward(1, 0, "n1", {"reward": 0.5}) and store.rewards(1, ["n1"])[0]["reward"] == 0.5
    before = contents(tmp_path)
    assert not store.publish(1, 0, "n1", {}, groups) and not store.submit_reward(1, 0, "n1", {"reward": 0.7})
    assert contents(tmp_path) == before, "the first one stands"


@pytest.mark.parametrize("planted", ["folder", "full folder", "link", "hard link", "fifo", "own"])
def test_a_log_whose_place_was_taken_is_written_all_the_same(tmp_path, planted):
    store, secret = new_store(tmp_path / "drive"), tmp_path / "secret"
    secret.write_text("mine\n")
    log = put(store, "logs/n1/stdout.log", b"old\n")
    if planted != "own":
        log.unlink()
        make = {"folder": log.mkdir, "full folder": lambda: (log / "x").mkdir(parents=True)}
        make |= {"link": lambda: log.symlink_to(secret), "hard link": lambda: log.hardlink_to(secret)}
        make.get(planted, lambda: os.mkfifo(log))()
    for line in "ab":
        store.append("logs/n1/stdout.log", f"{line}\n")
    assert log.read_text().split() == ["old"] * (planted == "own") + ["a", "b"]
    assert secret.read_text() == "mine\n"
    aside = [path.read_text() for path in log.parent.glob("stdout.log.*")]
    assert aside == ["mine\n"] * (planted == "hard link"), "it may be a snapshot of ours: nothing is lost"


@pytest.fixture(params=["links", "no links"])
def links(request, monkeypatch) -> bool:
    """Whether the file system has hard links: FAT, and many a mounted drive, has not."""
    if request.param == "no links":
        refuse(monkeypatch, "link", errno.EPERM)
    return request.param == "links"


@pytest.mark.parametrize("old", [None, b"{}", b"", b'{"torn": ', b"\0" * 9, b"[1]"])
def test_the_first_complete_file_of_a_name_stands(tmp_path, links, old):
    store = new_store(tmp_path)
    if old is not None:
        put(store, "a.json", old)
    assert store.write_once("a.json", BIG) and not store.write_once("a.json", {"late": 1})
    assert json.loads((store.base / "a.json").read_bytes()) == BIG
    store.rewrite("a.json", {"new": 1})
    assert contents(store.base).keys() == {"a.json"} and store.read("a.json") == {"new": 1}


def test_of_two_threads_racing_for_a_name_one_wins_whole(tmp_path, links):
    stores, start, wins = [new_store(tmp_path, f"n{i}") for i in range(2)], threading.Barrier(2), [[], []]

    def write_all(me):
        for i in range(20):
            start.wait()
            wins[me].append(stores[me].write_once(f"{i}.json", {"by": me, **BIG}))

    threads = [threading.Thread(target=write_all, args=(me,)) for me in range(2)]
    for call in ("start", "join"):
        [getattr(thread, call)() for thread in threads]
    for i, won in enumerate(zip(*wins, strict=True)):
        data = json.loads((stores[0].base / f"{i}.json").read_bytes())
        assert data["text"] == BIG["text"] and won[data["by"]] and (sum(won) == 1 or not links)


@pytest.mark.parametrize("can_append", [True, False])
def test_a_log_grows_by_whole_lines_also_where_nothing_can_be_appended(tmp_path, monkeypatch, can_append):
    store = new_store(tmp_path)
    path = put(store, "logs/n1/stdout.log", b"one\ntor")
    if not can_append:  # rclone's default, without a cache
        refuse(monkeypatch, "open", errno.EPERM, lambda name, flags, *_: flags & os.O_APPEND)
    for text in ("two\n", "three\n"):
        store.append("logs/n1/stdout.log", text)
    assert path.read_text().splitlines() == ["one", "tor", "two", "three"]


def test_a_round_far_ahead_is_opened_without_a_gap(tmp_path):
    """After an outage of hours; `clock` takes it for a joke, and nobody ever came there."""
    store = new_store(tmp_path)
    for round_ in (10, 350, 340):
        store.open_round(round_, "n1")
    assert store.clock() == (350, {"n1"}) and store.read("state/current_state.json")["round"] == 350


def test_a_log_that_grows_while_it_is_read_is_not_read_whole(tmp_path, monkeypatch):
    """A stranger's that may not be written, empty when its size was asked for, and a sparse gigabyte then."""
    store, fstat = new_store(tmp_path), os.fstat
    path = put(store, "logs/n1/stdout.log", b"")
    refuse(monkeypatch, "open", errno.EACCES, lambda name, flags, *_: flags & os.O_APPEND)
    monkeypatch.setattr(os, "fstat", lambda fd: (fstat(fd), os.truncate(path, 2**30))[0])
    store.append("logs/n1/stdout.log", "one\n")
    assert path.stat().st_size < 2**26


def test_a_log_as_large_as_files_can_be_is_set_aside(tmp_path):
    store = new_store(tmp_path)
    path = put(store, "logs/n1/stdout.log", b"")
    os.truncate(path, 2**41)  # sparse: it takes no disk
    for text in ("one\n", "two\n"):
        store.append("logs/n1/stdout.log", text)
    assert path.read_text() == "one\ntwo\n" and len([*path.parent.iterdir()]) == 2


def test_temp_files_are_swept_by_their_owner_only(tmp_path):
    for owner in ("b", "bb", "a.b"):
        assert in_another_process(lambda owner=owner: die_in_the_middle(new_store(tmp_path, owner))) == 9
    store = new_store(tmp_path, "b")
    assert len(contents(store.base)) == 3
    store.delete(f"tmp/{store.owner}")
    assert sorted(path.split("/")[1] for path in contents(store.base)) == ["a.b", "bb"]


def die_in_the_middle(store):
    os.fsync = lambda *_: os._exit(9)
    store.rewrite("a.json", BIG)


GOOD_NAMES = ["a", "node_1", "A-b.c", "x" * 64, "0", "-", "com10", "console", "a.json"]
BAD_NAMES = ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a b", "a\n", "\na", ".a", "a.", "x" * 65, "C:a",
             "CON", "nul.json", "com1", "Lpt9.x", "nod\u0435", "\uff4eode", "\u0663", "a\0"]  # fmt: skip


def test_names_are_safe_on_every_file_system():
    assert [check_name(name, "NODE_ID") for name in GOOD_NAMES] == GOOD_NAMES
    for name in BAD_NAMES:
        with pytest.raises(ValueError, match="^NODE_ID="):
            check_name(name, "NODE_ID")
        with pytest.raises(ValueError, match="^EXPERIMENT_NAME="):
            DriveStore("/nowhere", name)


# -------- What a stranger may leave -----------------------------------------------------------------------

SOME = {"response": "", "finished": False}
WRONG = {  # field -> values that must be refused there
    "format": [None, 2, "1", [1]], "peer_id": [None, "q", 1, "P"], "round": [None, 2, "1", [1]],
    "stage": [None, 1, "0"], "timestamp": [None, True, "now", 10**400, [1]],
    "rollouts": [None, [], "0", 1, {"0": None}, {"0": []}, {str(i): {} for i in range(4097)},
                 *({index: {}} for index in ("", "x", "-1", "00", "1234567", "\u0663", "1\n"))],
    "task": [None, 1, ["gcd"], "x" * 65], "seed": [None, True, -1, 1.0, "1", 2**53],
    "prompt": [None, 1, ["?"], "x" * 16385], "response": [None, 1, ["x"], "x" * 32769],
    "completions": [None, {}, "xx", 2, [], [SOME], [SOME] * 65, [SOME, None], [SOME, []]],
    "finished": [None, 0, 1, "true"], "reward": [None, True, "1", 10**400],
}  # fmt: skip


def test_a_wrong_value_in_any_field_rejects_the_file_and_what_is_sound_is_read_whole():
    for field, value in [(field, value) for field, values in WRONG.items() for value in values]:
        with pytest.raises(BadFile, match=field if field in ("seed", "reward", "format") else r"\w+ \w+"):
            check_rollouts(wire_file(**{field: value}), 1, 0, "p")
    for size in (2, 64):
        data = wire_file(completions=[{**SOME, "reward": 0.5, "new": 1}] * size)
        [group] = check_rollouts(data | {"new": 1}, 1, 0, "p")
        assert group.keys() == {"key", "task", "seed", "prompt", "completions"}, "no answer is passed on"
        assert group["completions"] == [{**SOME, "claimed": 0.5}] * size
    odd = {"a": "\U0001f600 \\ud800", "b": 10**4000, "c": json.loads("[" * 99 + "]" * 99)}
    assert parse_json(json.dumps(odd).encode()) == odd


KINDS = ["link", "dangling", "loop", "fifo", "folder", "forbidden", "file above", "loop above"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_rejected_without_waiting_or_leaving_it_open(tmp_path, monkeypatch, kind):
    store, began = new_store(tmp_path), time.monotonic()
    path = put(store, PEER, wire_file())
    targets = {"link": put(store, "other.json", wire_file()), "dangling": tmp_path / "none", "loop": path}
    if kind.endswith("above"):
        shutil.rmtree(path := store.base / "rollouts/round_000001")
        path.symlink_to(path) if kind == "loop above" else path.write_bytes(b"")
    elif kind == "forbidden":
        refuse(monkeypatch, "open", errno.EACCES, lambda name, *_: name == "p.json")
    else:
        path.unlink()
        make = {"fifo": os.mkfifo, "folder": os.mkdir}.get(kind, lambda path: path.symlink_to(targets[kind]))
        make(path)
    os.close(lowest := os.dup(0))
    with pytest.raises(BadFile):
        store.fetch(1, 0, "p")
    os.close(again := os.dup(0))
    assert again == lowest and time.monotonic() - began < 2
    assert store.nodes("rollouts", 1, 0) == ([] if kind.endswith("above") else ["p"])


def test_copies_temp_files_and_foreign_names_are_in_no_listing(tmp_path):
    store = new_store(tmp_path)
    session = store.register("n1", "worker", {})
    store.open_round(2, "n1")
    store.submit_reward(2, 0, "n1", {"reward": 0.5})
    strays = ["n1 (1).json", "n 9.json", ".n3.json", "desktop.ini", "Icon\r", "n4.json.tmp", "nod\u0435.json",
              "n5.sync-conflict-1.json", "round_000007.n1 (1).json", f"n1.{session} (1).json"]  # fmt: skip
    for place, name in itertools.product(("rewards/round_000002/stage_0", "peers", "state/rounds"), strays):
        put(store, f"{place}/{name}")
    put(store, "state/rounds/round_7.n1.json")
    put(store, f"peers/n1.{int(time.time() * 1000) + 10**9:013d}-01234567.json")  # far in the future
    for alias in ("000002/0", "2/stage_0", "000003 (1)/stage_0", "00000\u0662/stage_0"):
        put(store, f"rewards/round_{alias}/n1.json")
    for path in (
        "000003 (1)/n1.safetensors",
        "000003/n1.safetensors (1)",
        "000004/n1.safetensors",
        "000012/n1.safetensors",
    ):
        put(store, f"checkpoints/round_{path}")
    assert (store.rounds("rewards"), store.stages("rewards", 2)) == ([2], [0])
    assert (store.nodes("rewards", 2, 0), store.checkpoints("n1")) == (["n1"], [12, 4])
    assert (store.sessions(), store.clock()) == ({"n1": session}, (2, {"n1"}))


def test_a_reward_or_registration_that_says_something_else_than_its_name_is_nobodys(tmp_path):
    store = new_store(tmp_path)
    whole = {"node_id": "n1", "round": 1, "stage": 0, "reward": 0.5, "timestamp": 1.0}
    wrong = [{"reward": value} for value in (2, -0.1, True, None, "1")] + [{"timestamp": None}]
    wrong += [
        {"round": 7},
        {"stage": 1},
        {"node_id": "n2"},
        {"completions": "x"},
        {"text": "x" * 70_000},
        {"held_out": 2},
    ]
    for change in wrong:
        put(store, "rewards/round_000001/stage_0/n1.json", whole | change)
        assert store.rewards(1, ["n1"]) == [], change
    put(store, "rewards/round_000001/stage_0/n1.json", whole | {"new": [1]})
    assert store.rewards(1, ["n1"])[0]["reward"] == 0.5
    session = store.register("n1", "worker", {"host": "b"})
    shutil.copy(store.base / f"peers/n1.{session}.json", store.base / f"peers/n2.{session}.json")
    assert store.registration("n1", session)["host"] == "b" and store.registration("n2", session) is None


# -------- The folder --------------------------------------------------------------------------------------


def test_a_vanished_folder_is_an_error_and_is_never_made_anew(tmp_path):
    store = new_store(tmp_path / "drive")
    shutil.rmtree(store.root)
    calls = [
        lambda: store.write_once("a.json", {}), lambda: store.read("a.json"), store.clock, store.sessions,
        lambda: store.append("logs/a", "x"), lambda: store.names("peers"), lambda: store.fetch(1, 0, "p"),
        lambda: store.heartbeat("n1", {}), lambda: store.retire_rollouts(9, True),
        lambda: store.open_config({}),
    ]  # fmt: skip
    for number, call in enumerate(calls):
        with pytest.raises(OSError, match="drive not mounted"):
            call()
        assert not store.root.exists(), number


def test_a_fault_is_an_error_and_never_taken_for_nothing_there(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    store.open_round(3, "n1")
    store.heartbeat("n1", {})
    put(store, "config.json")
    for name, read in {"listdir": store.clock, "open": lambda: store.read("config.json")}.items():
        with monkeypatch.context() as broken, pytest.raises(OSError, match=os.strerror(errno.EIO)):
            refuse(broken, name, errno.EIO)
            read()
    refuse(monkeypatch, "open", errno.EIO, lambda name, *_: name == "n1.json")
    assert store.clock()[0] == 3
    assert store.read_heartbeat("n1") is None  # but rclone may fail on a file that is just rewritten


@pytest.mark.parametrize("archive", [False, True])
def test_retention_takes_whole_old_rounds_and_nothing_else(tmp_path, archive):
    store = new_store(tmp_path)
    for round_, node in itertools.product(range(4), ("n1", "human")):
        store.publish(round_, 0, node, {}, wire_file()["rollouts"])
    store.retire_rollouts(2, archive)
    assert store.rounds("rollouts") == [2, 3] and len(contents(store.base)) == 4
    assert len(contents(tmp_path / "archives/x/rollouts") if archive else range(4)) == 4


@pytest.mark.parametrize("before", ["archived", "too deep to delete"])
def test_retention_goes_on_where_files_of_a_retired_round_come_late(tmp_path, before):
    store, folder = new_store(tmp_path), tmp_path / "experiments/x/rollouts/round_000000"
    put(store, "rollouts/round_000000/stage_0/n1.json")
    if before == "too deep to delete":
        for _ in range(1500):
            (folder := folder / "d").mkdir()
    try:
        for _ in range(2):
            store.retire_rollouts(2, archive=before == "archived")
            assert store.rounds("rollouts") == []
            put(store, "rollouts/round_000000/stage_0/late.json")
        assert (
            before != "archived" or (tmp_path / "archives/x/rollouts/round_000000/stage_0/n1.json").exists()
        )
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "experiments"], check=True)  # pytest cannot either


def test_rollouts_that_no_reader_would_take_are_not_published(tmp_path):
    store, group = new_store(tmp_path), wire_file()["rollouts"]["0"]
    large = group | {"completions": group["completions"][:1] * 64}
    for groups in (
        {"0": wire_file(response="x" * 40_000)["rollouts"]["0"]},
        {"0": group | {"answer": "x" * 9 * 10**6}},
        {str(i): large for i in range(2100)},  # 3 MB, of more elements than are parsed
    ):
        with pytest.raises(BadFile, match="over .*MAX_NEW_TOKENS"):
            store.publish(1, 0, "n1", {}, groups)
    assert store.publish(1, 0, "n1", {}, {"0": group}) and not store.publish(1, 0, "n1", {}, {})
    assert len(store.fetch(1, 0, "n1")) == 1


def test_a_clock_that_jumps_back_for_a_while_loses_nobody_who_was_there(tmp_path, monkeypatch):
    store, now = new_store(tmp_path), time.time
    sessions = {node: store.register(node, "worker", {}) for node in ("n1", "n2")}
    for seconds in (0, -3 * 3600, 0):
        monkeypatch.setattr(time, "time", lambda late=seconds: now() + late)
        assert store.sessions() == sessions


def test_the_newest_session_wins_even_if_its_clock_is_ten_minutes_behind(tmp_path, monkeypatch):
    store, now = new_store(tmp_path), time.time
    first = store.register("n1", "worker", {})
    monkeypatch.setattr(time, "time", lambda: now() - 600)
    second = new_store(tmp_path, "elsewhere").register("n1", "worker", {})
    assert second > first and store.sessions() == {"n1": second}


def test_with_a_checkpoint_its_folder_goes_unless_somebody_elses_is_in_it(tmp_path):
    store = new_store(tmp_path)
    for path in ("round_000001/n1.safetensors", "round_000002/n1.safetensors", "round_000002/n2.safetensors"):
        put(store, f"checkpoints/{path}")
    for round_ in (1, 2):
        store.delete(f"checkpoints/{bucket(round_)}/n1.safetensors", prune=True)
    assert store.rounds("checkpoints") == [2] and store.checkpoints("n2") == [2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="leases are Linux's own")
def test_a_file_on_which_another_process_holds_a_lease_blocks_nobody(tmp_path):
    store = new_store(tmp_path)
    path = put(store, "a.json", {"a": 1})
    hold = "import fcntl, os, signal, sys, time; signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
    hold += "fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK); print(1, flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", hold, path], stdout=-1) as holder:
        assert holder.stdout.readline()
        began = time.monotonic()
        with pytest.raises(BadFile):
            store.read("a.json")
        holder.kill()
    assert time.monotonic() < began + 5 and store.read("a.json") == {"a": 1}


@pytest.mark.parametrize("lies", ["file", "link", "nothing"])
def test_what_lies_in_the_place_of_a_folder_stops_no_deletion_in_it(tmp_path, lies):
    store, outside = new_store(tmp_path / "drive"), tmp_path / "outside"
    put_there = {
        "file": Path.touch,
        "link": lambda path: path.symlink_to(outside),
        "nothing": lambda path: None,
    }
    outside.mkdir(), (outside / "n1.safetensors").touch()
    (store.base / "checkpoints").mkdir()
    put_there[lies](store.base / "checkpoints/round_000004")
    store.delete("checkpoints/round_000004/n1.safetensors", True)
    assert list(outside.iterdir())


def test_of_two_starts_of_one_name_neither_deletes_what_the_other_writes(tmp_path):
    """On a slow folder each swept the other's temp files away in mid-write, and both ended."""
    killed = DriveStore(tmp_path, "x", "n1")
    killed.create()
    put(killed, "tmp/n1/left"), put(killed, "tmp/n1/round_000001/left")
    one, other = (DriveStore(tmp_path, "x", "n1") for _ in range(2))
    one.create(), other.create()
    put(one, "tmp/n1/in_use")
    assert "rename: yes" in other.probe()
    assert one.names("tmp/n1") == ["in_use"]
    one.delete("tmp/n1/in_use"), one.sweep()
    assert one.names("tmp") == []


def test_registrations_behind_a_link_are_none(tmp_path):
    """Listings know nobody there: a node that still found itself was alone and ran away."""
    store = new_store(tmp_path)
    session = store.register("n1", "worker", {})
    assert store.is_registered("n1", session)
    (store.base / "peers").rename(store.base / "elsewhere")
    (store.base / "peers").symlink_to("elsewhere")
    assert not store.is_registered("n1", session) and store.sessions() == {}


def test_an_empty_config_agrees_with_nothing(tmp_path):
    put(new_store(tmp_path), "config.json", b"{}")
    with pytest.raises(StoreError, match="EXPERIMENT_NAME"):
        new_store(tmp_path).open_config({"SEED": 2})
    assert new_store(tmp_path).read("config.json") == {}


def test_of_two_processes_with_several_nodes_the_same_one_is_newer_in_all_whoever_registers_last(tmp_path):
    one, other = (DriveStore(tmp_path, "x", "n") for _ in range(2))
    one.create()
    sessions = [store.new_session("n_0", "n_1") for store in (one, other)]
    one.register("n_0", "worker", {}, sessions[0])
    for node in ("n_0", "n_1"):
        other.register(node, "worker", {}, sessions[1])
    one.register("n_1", "worker", {}, sessions[0])
    assert set(one.sessions().values()) == {max(sessions)}
    assert one.new_session("n_1", "n_2") > max(sessions)
