"""What else coordinator.py holds: life, the clock and its role, the Swarm's thread, and the readers."""

import csv
import errno
import io
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import coordinator
import pytest
from coordinator import COORDINATOR, Life, average, boot_id, dashboard, experiment_status, is_known_dead
from coordinator import compare, summarize
from coordinator import is_round_over, p_value, pid_start, process_identity, report_text
from coordinator import report_files, reward_rows, validate_experiment, write_winners
from drive_store import DriveStore, bucket
from sapo import Config, compare_experiments, list_experiments
from test_drive_store import refuse
from test_sapo import contents, new_store, new_swarm, put, swarm, until, wire_file

# -------- Life --------------------------------------------------------------------------------------------


def test_life_is_judged_by_the_readers_clock_and_by_any_evidence(tmp_path, monkeypatch):
    store, now, wall = new_store(tmp_path), [1000.0], time.time()
    life = Life(store, stale_after=300)

    def beat(node, age, **data):
        put(store, f"heartbeats/{node}.json", {"node_id": node, "time": wall - age, **data})

    def live_after(seconds):
        now[0] += seconds
        life.refresh()
        return life.live_workers()

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: wall - 3600)
    sessions = {node: store.register(node, "worker", {}) for node in ("behind", "fresh", "gone")}
    store.register(COORDINATOR, "coordinator", {})
    monkeypatch.setattr(time, "time", lambda: wall)
    for node, age in (("behind", 600), ("fresh", 5), ("gone", 3600)):
        beat(node, age)
    assert live_after(0) == ["fresh"], "at the first look timestamps count"
    beat("behind", 590)  # its clock is still ten minutes behind, but it moves
    assert [live_after(40), live_after(262), live_after(50)] == [["behind", "fresh"], ["behind"], []]
    assert life.silence("nobody") == math.inf
    life.note("gone", "rollouts", 5)  # any evidence counts, but once, and nothing older
    assert live_after(299) == ["gone"] and not life.note("gone", "rollouts", 5) and live_after(2) == []
    beat("fresh", 0, session=sessions["fresh"], state="done")
    assert live_after(0) == [] and life.has_left("fresh"), "it said goodbye"
    assert store.register("fresh", "worker", {}) > sessions["fresh"] and live_after(0) == ["fresh"]


def test_a_figure_that_is_no_number_keeps_no_reward_from_the_folder():
    assert average([1, None, 2, math.nan, -math.inf]) == 1.5  # JSON has no NaN
    assert average([math.nan]) is None


def test_names_that_come_and_go_are_forgotten(tmp_path):
    """Five thousand files renamed again and again took two megabytes a second, for good."""
    store = new_store(tmp_path)
    life, session = Life(store, 300), store.register("n1", "worker", process_identity())
    for look in range(4):
        for i in range(200):
            place = f"peers/s{i}_{{}}.{session}.json"
            old, new = (store.base / place.format(look + j) for j in (-1, 0))
            old.rename(new) if look else new.touch()
            put(store, f"heartbeats/s{i}_{look}.json", {"node_id": f"s{i}_{look}", "time": 1.0})
        life.refresh()
        life.note("ghost", "reward", look)
    memory = (life._evidence, life._seen, life.abouts, life.beats, life._next_beat)
    assert max(map(len, memory)) < 450 and life.is_live("n1")


@pytest.mark.skipif(boot_id() is None, reason="only Linux tells")
def test_a_dead_process_of_this_host_is_not_live_at_once(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    about = {**process_identity(), "pid": child.pid, "pid_start": pid_start(child.pid)}
    store.register("child", "worker", about)
    store.register("me", "worker", process_identity())
    life = Life(store, 300)
    life.refresh()
    assert life.live_workers() == ["child", "me"]
    child.kill()
    until(lambda: life.live_workers() == ["me"])  # a zombie is dead
    child.communicate()
    assert life.live_workers() == ["me"]
    assert is_known_dead({**process_identity(), "pid_start": "1"})  # the pid was given to another process
    with monkeypatch.context() as patch:  # another user's process that /proc hides
        patch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(PermissionError))
        assert not is_known_dead({**about, "pid": 2**22 + 1})
    assert is_known_dead({**about, "pid": 2**22 + 1})
    strange = [{**about, "pid": pid} for pid in (None, "1", -1, 0, 10**30, [1])]
    odd = os.fsencode(tmp_path / "a name cut ") + b"\xc3"  # to 15 bytes, within a character
    shutil.copy(shutil.which("sleep"), odd)
    child = subprocess.Popen([odd, "60"])
    until(lambda: b"cut \xc3" in Path(f"/proc/{child.pid}/comm").read_bytes())
    assert not is_known_dead({**about, "pid": child.pid, "pid_start": pid_start(child.pid)})
    child.kill()
    child.communicate()
    assert not any(map(is_known_dead, [{}, {**about, "host": "b"}, {**about, "boot_id": "b"}, *strange]))


# -------- The clock ---------------------------------------------------------------------------------------


def test_a_round_is_over_by_time_by_completion_or_by_either():
    for elapsed, live, submitted, *expected in [  # of an interval of 10 -> time, completion, hybrid
        (99, "", "", 0, 0, 0), (9, "ab", "", 0, 0, 0), (10, "ab", "", 1, 0, 1), (9, "ab", "a", 0, 0, 0),
        (10, "ab", "a", 1, 0, 1), (9, "ab", "ab", 0, 1, 1), (9, "a", "ab", 0, 1, 1), (9, "", "a", 0, 1, 1),
        (10, "ab", "abc", 1, 1, 1),
    ]:  # fmt: skip
        strategies = ("time", "completion", "hybrid")
        over = [is_round_over(each, elapsed, 10, list(live), list(submitted)) for each in strategies]
        assert over == [bool(e) for e in expected], (elapsed, live, submitted)


def start_clock(drive, rounds=3, strategy="completion", **settings):
    """A coordinator in a thread, with a worker n1 that is registered; (store, [its exit status], clock)."""
    store, ended = new_store(drive), []
    store.register("n1", "worker", {})
    settings = {"NODE_ROLE": "coordinator", "MAX_ROUNDS": rounds, "ROUND_ADVANCE": strategy, **settings}
    threading.Thread(target=lambda: ended.append(swarm(drive, "x", **settings)), daemon=True).start()
    until(lambda: store.clock()[0] >= 0)
    return store, ended, lambda: store.clock()[0]


def reward(store, round_, node="n1"):
    store.submit_reward(round_, 0, node, {"reward": 0.5})


def test_the_clock_holds_round_0_until_the_first_reward_then_advances_and_finishes(tmp_path):
    store, ended, clock = start_clock(tmp_path, strategy="time", COORDINATOR_ROUND_INTERVAL=0.02)
    time.sleep(0.2)
    assert clock() == 0, "the worker is live, but it may be downloading its model"
    reward(store, 0)
    until(lambda: clock() == 2)  # by time, rewarded or not
    time.sleep(0.1)
    assert not ended, "the last round waits for its worker"
    reward(store, 2)
    until(lambda: ended)
    beat = store.read_heartbeat(COORDINATOR)
    assert ended == [0] and (beat["round"], beat["state"]) == (2, "done")
    assert store.read("winners/round_000002.json") == {"n1": 0.5}


def test_the_clock_waits_in_round_0_for_as_many_workers_as_are_expected_or_one_interval(tmp_path):
    store, ended, clock = start_clock(tmp_path, NUM_WORKERS=2, COORDINATOR_ROUND_INTERVAL=1.5)
    reward(store, 0)
    time.sleep(0.5)
    assert clock() == 0
    until(lambda: clock() == 1)
    reward(store, 1)
    until(lambda: clock() == 2)
    reward(store, 2)
    until(lambda: ended)


def test_a_coordinator_that_goes_on_waits_for_as_many_workers_as_are_expected_or_one_interval(tmp_path):
    """Whoever of run_swarm.sh was up first trained alone, and the others skipped its rounds."""
    before = new_store(tmp_path)
    for node in ("n1", "n2"):  # both have finished round 5, and stopped
        session = before.register(node, "worker", {})
        before.submit_reward(5, 0, node, {"reward": 0.5})
        before.heartbeat(node, {"session": session, "state": "stopped"})
    before.open_round(5, COORDINATOR)
    store, ended, clock = start_clock(tmp_path, rounds=8, NUM_WORKERS=2, COORDINATOR_ROUND_INTERVAL=3)
    time.sleep(1)  # n1 has come back: see start_clock
    assert clock() == 5, "its reward of this round is there, and it is the only one who lives"
    store.register("n2", "worker", {})
    until(lambda: clock() == 6, 1.5)
    for round_ in (6, 7):
        until(lambda: clock() == round_)  # noqa: B023
        for node in ("n1", "n2"):
            reward(store, round_, node)
    until(lambda: ended)


def test_the_last_round_ends_though_a_peer_beats_for_ever_and_never_submits(tmp_path):
    settings = {"COORDINATOR_ROUND_INTERVAL": 0.2, "STALE_AFTER_SECONDS": 1}
    store, ended, clock = start_clock(tmp_path, rounds=2, strategy="hybrid", **settings)
    stranger = store.register("stranger", "worker", {})
    for round_ in range(2):
        until(lambda: clock() == round_)  # noqa: B023
        reward(store, round_)
    until(lambda: ended or store.heartbeat("stranger", {"session": stranger, "state": "running"}))
    assert ended == [0]


def test_a_goodbye_that_somebody_forged_neither_moves_the_clock_nor_ends_it(tmp_path):
    store, ended, clock = start_clock(tmp_path)
    reward(store, 0)
    until(lambda: clock() == 1)
    store.heartbeat("n1", {"session": store.sessions()["n1"], "state": "done", "round": 2})
    time.sleep(1.5)
    assert clock() == 1 and not ended
    for round_ in (1, 2):
        until(lambda: clock() == round_)  # noqa: B023
        reward(store, round_)
    until(lambda: ended)
    assert ended == [0] and store.read("winners/round_000002.json") == {"n1": 0.5}


def test_the_clock_follows_others_never_rewinds_and_yields_to_a_newer_session(tmp_path):
    store, ended, clock = start_clock(tmp_path, rounds=100)
    store.open_round(5, "n1")
    reward(store, 0), reward(store, 5)
    until(lambda: clock() == 6)
    (store.base / "state/rounds/round_000006.coordinator.json").unlink()  # a stale listing
    time.sleep(0.1)
    assert clock() == 5, "nothing below its own round is opened again"
    reward(store, 6)
    until(lambda: clock() == 7)
    store.register(COORDINATOR, "coordinator", {})
    until(lambda: ended)
    assert ended == [3]


def test_the_clock_goes_on_after_an_outage_and_ends_when_nobody_is_left(tmp_path):
    store, ended, clock = start_clock(tmp_path, STALE_AFTER_SECONDS=1)
    reward(store, 0)
    until(lambda: clock() == 1)
    away = store.base.rename(tmp_path / "away")
    time.sleep(1.2)
    assert not store.base.exists() and not ended
    away.rename(store.base)
    reward(store, 1)
    until(lambda: ended, timeout=20)
    assert ended == [0] and clock() == 2


def test_a_lost_clock_is_resumed_from_the_rewards_and_a_signal_ends_the_coordinator(tmp_path):
    store = new_store(tmp_path)
    for round_ in (11, 12, 999_999):  # the last is a lone outlier
        reward(store, round_)
    child = os.fork()
    if child == 0:
        os._exit(swarm(tmp_path, "x", NODE_ROLE="coordinator", MAX_ROUNDS=100))
    try:
        until(lambda: store.clock()[0] >= 12 and store.read_heartbeat(COORDINATOR))
        assert store.names("state/rounds")[0] == "round_000012.coordinator.json" and store.clock()[0] <= 13
    finally:
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert store.read_heartbeat(COORDINATOR)["state"] == "stopped"


def test_a_round_of_which_nothing_is_left_holds_up_no_coordinator_when_its_workers_have_ended(tmp_path):
    """They ended in an outage in which that round's rewards were lost: it waited for ever."""
    store = new_store(tmp_path)
    store.open_round(3, COORDINATOR)
    for round_ in range(4, 10):
        reward(store, round_)
    assert swarm(tmp_path, "x", NODE_ROLE="coordinator", MAX_ROUNDS=10) == 0 and store.clock()[0] == 9


def test_a_coordinator_that_came_first_takes_the_stages_of_the_experiment(tmp_path):
    """With another number it never saw a round submitted, or moved on after the first stage."""
    for ours, theirs in ((2, 1), (1, 3)):
        store = new_store(tmp_path / str(ours))
        child = os.fork()
        if child == 0:
            settings = dict(NODE_ROLE="coordinator", MAX_STAGES=ours, MAX_ROUNDS=100)
            os._exit(swarm(tmp_path / str(ours), "x", COORDINATOR_ROUND_INTERVAL=60, **settings))
        try:
            until(lambda store=store: store.clock()[0] == 0)
            store.open_config({"MAX_STAGES": theirs})
            store.register("n1", "worker", {})
            for stage in range(theirs):
                assert store.clock()[0] == 0, "it does not move on before the last stage"
                store.submit_reward(0, stage, "n1", {"reward": 0.5})
                time.sleep(0.5)
            until(lambda store=store: store.clock()[0] == 1)
        finally:
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
    for stage in range(3):  # the same command goes on, another number is refused
        store.submit_reward(1, stage, "n1", {"reward": 0.5})
    again = dict(NODE_ROLE="coordinator", MAX_ROUNDS=2)
    assert swarm(tmp_path / "1", "x", **again) == 0 and swarm(tmp_path / "1", "x", MAX_STAGES=2, **again) == 2


def test_a_node_whose_clock_is_two_hours_ahead_counts_and_is_named(tmp_path, monkeypatch):
    """It trained and shared, and was in no report, until two hours later."""
    store, now = new_store(tmp_path), time.time
    store.register("n1", "worker", {})
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    session = new_store(tmp_path, "n2").register("n2", "worker", {})
    monkeypatch.setattr(time, "time", now)
    store.open_round(0, "n1")
    for node in ("n1", "n2"):
        store.submit_reward(0, 0, node, {"reward": 0.5})
    assert {row["node_id"] for row in reward_rows(DriveStore(tmp_path, "x"))} == {"n1", "n2"}
    ours, events = new_swarm(store)
    ours.start()
    until(lambda: any("hour ahead of this clock" in text for _, text in events))
    assert ours.sessions["n2"] < session and ours.close(patience=5) == 0
    assert len([text for _, text in events if "hour ahead" in text]) == 1, "it is said once"


def test_who_publishes_once_a_round_is_not_awaited_in_the_stages_before(tmp_path):
    store = new_store(tmp_path)
    for peer, stages in (("n2", (0, 1)), ("n3", (1,))):
        store.register(peer, "worker", process_identity())
        for stage in stages:
            place = f"rollouts/round_000000/stage_{stage}/{peer}.json"
            put(store, place, wire_file(peer, round=0, stage=stage))
    ours, _ = new_swarm(store, MAX_STAGES=2)
    ours.round = 1
    ours.start()
    until(lambda: ours.looked_at_round == 1)
    assert (ours.missing(1, 0), ours.missing(1, 1)) == ({"n2"}, {"n2", "n3"}) and ours.close(patience=5) == 0


# -------- The Swarm's thread ------------------------------------------------------------------------------


def test_nothing_is_written_or_deleted_once_another_folder_lies_there(tmp_path):
    store, other = new_store(tmp_path), tmp_path / "experiments/other"
    ours, events = new_swarm(store)
    ours.start()
    until(lambda: ours._there)
    for path in ("peers", "checkpoints/round_000007", "tmp"):
        (other / path).mkdir(parents=True)
    (other / "checkpoints/round_000007/n1.safetensors").write_bytes(b"theirs")
    before = contents(other)
    ours._look = lambda: None  # the next look is seconds away, as on a slow mount
    store.base.rename(tmp_path / "experiments/away")
    other.rename(store.base)
    ours.post(store.delete, "checkpoints/round_000007/n1.safetensors", True)
    ours.post(store.rewrite, "state/current_state.json", {})
    until(lambda: events)
    assert contents(store.base) == before and "another folder" in events[0][1]
    ours.is_abandoned = True


def test_a_folder_that_hangs_never_holds_up_the_trainer_and_lost_writes_are_counted(tmp_path):
    hang = threading.Event()
    ours, _ = new_swarm(new_store(tmp_path))
    ours.start()
    ours.post(hang.wait)
    ours.post(print)
    began = time.monotonic()
    assert (ours.superseded, ours.clock, ours.missing(0, 0)) == ([], -1, set())
    assert ours.close(patience=0.2) >= 2 and time.monotonic() - began < 2
    hang.set()


def test_neither_a_bug_nor_an_obstacle_stops_the_queue(tmp_path):
    store = new_store(tmp_path)
    ours, events = new_swarm(store)
    put(store, "rewards/round_000001/stage_0/n1.json/x"), put(store, "rewards/round_000002")
    ours.start()
    ours.post(lambda: 1 / 0)
    ours.post(store.rewrite, "n" * 300, {})  # no file system has such a name
    for round_ in (1, 2, 3):
        ours.post(store.submit_reward, round_, 0, "n1", {"reward": 0.5})
    until(lambda: store.rewards(3, ["n1"]))
    assert not ours.down and ours.close(patience=5) == 0
    assert [kind for kind, _ in events] == ["error"] * 2 and "nnn was set aside" in events[1][1]
    assert store.rewards(1, ["n1"]) and store.rewards(2, ["n1"]), "what was in their place made way"


def test_a_write_that_fails_for_a_moment_at_the_end_is_tried_again(tmp_path):
    ours, events = new_swarm(new_store(tmp_path))
    tries = []

    def for_a_moment():
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EIO, "input/output error")

    ours.start()
    ours.post(for_a_moment)
    assert ours.close(patience=20) == 0 and len(tries) == 3 and not ours.set_aside and not events


def test_a_full_disk_is_an_outage_in_which_nothing_that_is_said_is_lost(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    ours, events = new_swarm(store)
    ours.start()
    with monkeypatch.context() as full:
        refuse(full, "fsync", errno.ENOSPC)
        ours.post(store.submit_reward, 1, 0, "n1", {"reward": 0.5})
        until(lambda: ours.down)
        ours.lines.append(("logs/n1/stdout.log", "said meanwhile"))
        assert [kind for kind, _ in events] == ["outage"] and "No space" in events[0][1]
    until(lambda: not ours.down)
    assert ours.close(patience=5) == 0 and store.rewards(1, ["n1"])
    assert (store.base / "logs/n1/stdout.log").read_text() == "said meanwhile\n"


def test_a_file_that_arrives_late_is_read_and_old_rounds_are_forgotten(tmp_path):
    store = new_store(tmp_path)
    path = put(store, "rollouts/round_000000/stage_0/n2.json", b'{"format"')
    ours, events = new_swarm(store, ROLLOUT_MAX_AGE=2)
    ours.start()
    assert list(ours.refused) == [(0, 0, "n2")] and events == [("reject", "n2: not valid JSON")]
    path.write_text(json.dumps(wire_file("n2", round=0)))
    until(lambda: ours.groups_of(0))
    assert not ours.refused and len(events) == 1
    for ours.round in (2, 3):
        until(lambda: ours.looked_at_round == ours.round)
        assert bool(ours.groups_of(0)) == (ours.round == 2)
    ours.close(patience=5)


def test_rounds_that_workers_open_are_no_sign_of_the_coordinators_life(tmp_path):
    store = new_store(tmp_path)
    store.register(COORDINATOR, "coordinator", {"host": "elsewhere", "pid": 1})
    ours, _ = new_swarm(store, STALE_AFTER_SECONDS=1.0)
    ours.start()
    assert ours.is_led
    for round_ in range(3):
        store.open_round(round_, "n1")
        time.sleep(0.5)
    until(lambda: not ours.is_led)
    store.open_round(3, COORDINATOR)
    until(lambda: ours.is_led)
    ours.close(patience=5)


def test_writes_that_fail_for_reasons_of_their_own_hold_up_nobody(tmp_path, monkeypatch):
    """A planted link failed one write of every round; each was tried again in every pass, with a probe."""
    store, probes, done = new_store(tmp_path), [], []
    swarm, events = new_swarm(store)
    can_write = store.can_write
    monkeypatch.setattr(store, "can_write", lambda: probes.append(1) or time.sleep(0.05) or can_write())

    def fail():
        raise PermissionError(errno.EACCES, "closed")

    swarm.start()
    for _ in range(200):
        swarm.post(fail)
    began = time.monotonic()
    for i in range(20):
        swarm.post(done.append, i)
        until(lambda i=i: i in done, 5.0)
    assert time.monotonic() < began + 5.0 and len(probes) <= 3
    assert not swarm.down and swarm.close(patience=30) == 0
    assert [kind for kind, _ in events] == ["error"], "told once"


def test_what_there_is_no_room_for_holds_up_no_smaller_write(tmp_path):
    store, room, done = new_store(tmp_path), [], []
    swarm, events = new_swarm(store)

    def large():
        if not room:
            raise OSError(errno.ENOSPC, "no space left on device")
        done.append("large")

    swarm.start()
    swarm.post(large)
    for i in range(20):
        swarm.post(done.append, i)
    until(lambda: len(done) == 20, 5.0)
    assert not swarm.down and [kind for kind, _ in events] == ["disk"]
    assert swarm.close(patience=1.0) == 1, "it is not given up"
    room.append("a lot")
    assert swarm.close(patience=20.0) == 0 and done[-1] == "large" and not swarm.set_aside


def test_a_peer_with_an_unusable_file_is_not_chosen_for_a_while_and_its_file_is_seldom_read(tmp_path):
    """Files of 5 MB that are refused after half a second of parsing, linked to ten names, stopped sharing."""
    store = new_store(tmp_path)
    swarm, events = new_swarm(store, FETCH_MAX_PEERS=2)
    for round_ in range(3):
        for peer in ("bad", "worse", "good"):
            data = wire_file(peer, round=round_) if peer == "good" else {"a": 1}
            put(store, f"rollouts/{bucket(round_)}/stage_0/{peer}.json", data)
    fetched, fetch = [], store.fetch
    store.fetch = lambda *key: fetched.append(key) or fetch(*key)
    for round_ in range(3):
        swarm.round = round_
        for _ in range(3):
            swarm._look()
    assert len([key for key in fetched if key[2] != "good"]) <= 2, "each name once"
    assert {2} <= {key[0] for key in swarm.rollouts}, "its seat goes to another"
    bad = next(iter(swarm.refused))
    assert 0 < swarm.refused[bad] - time.monotonic() <= 2
    swarm.refused[bad] = 0.0
    swarm._fetch_one(bad)
    assert 29 < swarm.refused[bad] - time.monotonic() <= 30


@pytest.mark.parametrize("newer", [False, True])
def test_where_another_folder_takes_the_place_of_ones_own_nothing_is_written(tmp_path, newer):
    """A drive mounted late, or the experiment moved away and begun anew: its checkpoints are not ours."""
    store = new_store(tmp_path)
    swarm, events = new_swarm(store)
    other = DriveStore(tmp_path / "other", store.base.name, "n1")
    other.create()
    swarm.start()
    until(lambda: swarm.looked_at_round == 0)
    away = store.base.rename(tmp_path / "away")
    for i in range(3):
        swarm.post(store.append, "logs/n1/order", f"{i}\n")
    until(lambda: swarm.down)
    if newer:
        other.register("n1", "worker", process_identity())
    before = contents(other.base)
    other.base.rename(store.base)
    time.sleep(2.5)
    assert contents(store.base) == before and swarm.down
    assert swarm.superseded == ["n1"] * newer, "and a newer start of this name is noticed"
    store.base.rename(tmp_path / "never mind")
    away.rename(store.base)
    until(lambda: not swarm.down, 20)
    assert swarm.close(patience=20) == 0
    assert (store.base / "logs/n1/order").read_text().split() == list("012")


def test_of_thousands_that_registered_and_never_came_a_few_are_read_per_look(tmp_path):
    store = new_store(tmp_path)
    for i in range(500):
        put(store, f"peers/p{i}.1000000000000-00000000.json")
    swarm, _ = new_swarm(store)
    read, registration = [], store.registration
    store.registration = lambda *key: read.append(key) or registration(*key)
    swarm._look()
    swarm._look()
    assert len(swarm.missing(0, 0)) == 500 and len(read) <= 2 * 8


# -------- Readers: status, validation, the dashboard ------------------------------------------------------

SETTINGS = {spec.name: spec.default for spec in Config.__dataclass_fields__.values()}
SETTINGS |= {"NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4, "layout": 3}


def finished_run(folder, name="x", rewards=(0.25, 0.25), completions=16, **settings) -> DriveStore:
    store = DriveStore(folder, name, "n1")
    store.create()
    store.open_config(SETTINGS | settings)
    store.register(COORDINATOR, "coordinator", {})
    figures = dict.fromkeys(("local_groups", "external_groups", "informative_groups", "grad_norm"), 1)
    for node in ("n1", "n2"):
        store.register(node, "worker", process_identity())
        model = [f"models/{node}/{file}" for file in ("config.json", "tokenizer.json", "model.safetensors")]
        for path in (f"logs/{node}/metrics.jsonl", "checkpoints/round_000001/n1.safetensors", *model):
            put(store, path)
        for round_, value in enumerate(rewards):
            store.open_round(round_, "c")
            store.publish(round_, 0, node, {}, wire_file()["rollouts"])
            figures |= {"reward": value, "timestamp": 100.0 + round_, "completions": completions}
            store.submit_reward(round_, 0, node, figures)
    return store


def test_status_and_rows_say_what_is_in_the_folder_and_no_more(tmp_path):
    store = finished_run(tmp_path)
    for round_, node in ((1, "n9"), (7, "n1")):  # who never registered; a round that was never opened
        store.submit_reward(round_, 0, node, {"reward": 0.5})
    rows = [(row["round"], row["stage"], row["node_id"], row["my_reward"]) for row in reward_rows(store)]
    assert rows == [(t, 0, node, 0.25) for t in range(2) for node in ("n1", "n2")]
    assert experiment_status(store) == {
        "experiment": "x", "current_round": 1, "current_stage": 0, "num_active_peers": 2,
        "peer_ids": ["n1", "n2"], "last_updated": 101.0, "duration_seconds": 1.0,
        "cumulative_rewards": {"n1": 0.5, "n2": 0.5},
        "latest_checkpoint": str(store.base / "checkpoints/round_000001"),
    }  # fmt: skip
    empty = experiment_status(new_store(tmp_path / "empty"))
    assert (empty["current_round"], empty["cumulative_rewards"], empty["latest_checkpoint"]) == (-1, {}, None)
    put(store, tmp_path / "experiments/not a name/config.json")
    assert list_experiments(tmp_path) == ["x"] and list_experiments(tmp_path / "no") == []


def test_old_rounds_are_listed_once_however_often_the_rows_are_asked_for(tmp_path, monkeypatch):
    store, known, calls = finished_run(tmp_path, rewards=[0.5] * 20), {}, []
    first = reward_rows(store, known)
    refuse(monkeypatch, "listdir", 0, lambda *_: calls.append(1))
    assert reward_rows(store, known) == first and len(calls) < 12 * 8


def test_validate_passes_a_finished_run_and_names_each_missing_thing(tmp_path):
    assert validate_experiment(finished_run(tmp_path / "whole"), 2, 2) == []
    for path, problem in {
        "config.json": "no config.json", "state/rounds/round_000001.c.json": "clock stands at round 0",
        "logs/n2": "metrics.jsonl", "rewards/round_000001/stage_0/n2.json": "last round 1: n2",
        "checkpoints": "no checkpoint after the last round", "models/n2/config.json": "config.json",
        "rollouts/round_000000": "rollouts",
        "models/n2/tokenizer.json": "tokenizer.json", "models/n2/model.safetensors": "weights",
    }.items():  # fmt: skip
        shutil.rmtree(tmp_path / "part", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "part")
        store = DriveStore(tmp_path / "part", "x")
        lost = store.base / path
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
        problems = validate_experiment(store, 2, 2)
        assert problem in " ".join(problems), (path, problems)
    whole = DriveStore(tmp_path / "whole", "x")
    for problem in ("the clock stands at round 1, expected 2", "2 nodes submitted rewards, expected 3"):
        assert problem in validate_experiment(whole, 3, 3)
    put(whole, "config.json", b"")
    assert "no config.json" in validate_experiment(DriveStore(tmp_path / "whole", "x"), 2, 2)[0]


def test_the_dashboard_shows_who_lives_and_what_is_wrong_and_no_strangers_control_characters(tmp_path):
    store, day_ago = finished_run(tmp_path), time.time() - 86400
    put(store, f"peers/far.{int(day_ago * 1000):013d}-01234567.json", {"node_id": "far", "role": "worker"})
    put(store, "heartbeats/far.json", {"node_id": "far", "time": day_ago})
    session = store.register("n3", "\x1b[2J", {"model": "\x07" * 99})
    put(store, "heartbeats/n3.json", {"node_id": "n3", "session": session, "round": "\x1b[2J" + "9" * 10**5})
    evil = wire_file("n3", prompt="\x1b[2J", response="\x1b[2J\n")
    put(store, "rollouts/round_000001/stage_0/n3.json", evil)
    text = dashboard(store, Life(store, 300), reward_rows(store), 2)
    assert all(c.isprintable() for line in text.splitlines() for c in line)
    states = {line.split()[0]: line.split()[1] for line in text.splitlines() if line[:2] in ("n1", "fa")}
    assert states == {"n1": "live", "far": "dead"}
    assert "round 1 of 2" in text and "latest rollout, by n3" in text
    text = dashboard(new_store(tmp_path / "empty"), Life(new_store(tmp_path / "empty"), 300), [], 2)
    assert "! no round is open" in text and "waiting for a first worker" in text


# -------- Comparing experiments ---------------------------------------------------------------------------


@pytest.mark.parametrize("t, freedom", [(12.7062, 1), (4.30265, 2), (2.57058, 5), (2.04227, 30)])
def test_p_is_students(t, freedom):
    assert p_value(t, freedom) == pytest.approx(0.05, abs=1e-5) and p_value(0.0, freedom) == pytest.approx(1)


def test_runs_that_differ_in_any_setting_are_never_averaged_and_only_the_seed_may_differ(tmp_path):
    changes = ({}, {"SEED": 2}, {"LOSS_TYPE": "grpo"}, {"A_NEW_ONE": 1}, {"MAX_ROUNDS": 9})
    for i, change in enumerate(changes):
        finished_run(tmp_path, f"e{i}", **change)
    rows = compare_experiments(tmp_path)
    assert sorted(row["runs"] for row in rows) == [1, 1, 3]
    labels = " ".join(row["label"] for row in rows)
    assert "LOSS_TYPE=grpo" in labels and "A_NEW_ONE=1" in labels and "SEED" not in labels


def test_settings_that_a_label_has_no_room_for_are_told_apart_by_a_number(tmp_path):
    for i in range(3):
        finished_run(tmp_path, f"e{i}", **{f"A{name:020}": i // 2 for name in range(20)}, THE_LAST=i)
    rows = compare_experiments(tmp_path)
    assert len({row["label"] for row in rows}) == len({row["short"] for row in rows}) == 3
    assert sum(row["label"].endswith(f" #{i}") for i, row in enumerate(rows, 1)) == 2


def test_no_ratio_is_told_where_a_run_earned_nothing(tmp_path):
    """The logarithm of 0 was that of a constant, which decided the gain."""
    for seed, reward in enumerate((0.9, 0.9, 0.9, 0.0)):
        finished_run(tmp_path, f"a{seed}", [reward] * 20, SEED=seed)
        lone = dict(NUM_TRAIN_SAMPLES=8, NUM_TRANSPLANT_TREES=0, SEED=seed)
        finished_run(tmp_path, f"b{seed}", [0.5] * 20, **lone)
    row = compare_experiments(tmp_path)[0]
    assert row["improvement"] is None and "earned nothing" in row["note"]


def test_seeds_that_the_baseline_has_not_run_yet_have_no_say_in_the_gain(tmp_path):
    for seed, (ours, base) in enumerate([(0.3, 0.2), (0.6, 0.5), (0.9, None)]):
        finished_run(tmp_path, f"a{seed}", [ours] * 20, SEED=seed)
        lone = dict(NUM_TRAIN_SAMPLES=8, NUM_TRANSPLANT_TREES=0, SEED=seed)
        base and finished_run(tmp_path, f"b{seed}", [base] * 20, **lone)
    assert compare_experiments(tmp_path)[0]["improvement"] == pytest.approx((1.5 * 1.2) ** 0.5 - 1)


def test_evaluations_before_the_last_tenth_are_reported_where_there_are_no_later_ones(tmp_path):
    store = finished_run(tmp_path, "early", [0.5] * 20)
    for path in (store.base / "rewards").glob("*/*/*.json"):
        data = json.loads(path.read_text())
        if data["round"] in (5, 11):
            path.write_text(json.dumps(data | {"held_out": data["round"] / 100}))
    assert compare_experiments(tmp_path)[0]["held_out"] == pytest.approx(0.11)


def test_stages_that_an_experiment_does_not_have_are_not_read(tmp_path):
    """A stranger's made a node's own total 594 of 40, and memory grow by 6 MB a round."""
    store = finished_run(tmp_path, "stages", [0.5] * 20)
    for stage in range(1, 100):
        store.submit_reward(3, stage, "n1", {"reward": 1.0})
    rows = reward_rows(DriveStore(store.root, "stages"))
    assert {row["stage"] for row in rows} == {0} and len(store._rewards) < 300
    assert [row["stage"] for row in DriveStore(store.root, "stages", "w", 1).rewards(3, {"n1"})] == [0]


def test_a_report_names_gain_interval_cost_and_baseline_and_is_written_in_every_form(tmp_path):
    ours, base = (0.40, 0.44, 0.52, 0.48), (0.20, 0.22, 0.24, 0.25)
    for seed, (high, low) in enumerate(zip(ours, base, strict=True)):
        finished_run(tmp_path, f"a{seed}", [high] * 20, completions=16, SEED=seed)
        lone = dict(NUM_TRAIN_SAMPLES=8, NUM_TRANSPLANT_TREES=0, SEED=seed)
        finished_run(tmp_path, f"b{seed}", [low] * 20, completions=32, **lone)
    rows = compare_experiments(tmp_path)
    logs = [math.log(x / y) for x, y in zip(ours, base, strict=True)]
    half = 3.182446 * statistics.stdev(logs) / 2  # Student's t of 3 degrees of freedom
    expected = [math.expm1(statistics.fmean(logs) + d) for d in (-half, 0, half)]
    assert [rows[0][name] for name in ("low", "improvement", "high")] == pytest.approx(expected, rel=1e-4)
    assert [row["label"] for row in rows] == ["4/4", "8/0"]
    assert rows[0]["per_node"] == pytest.approx(20 * 0.46)
    text, files = report_text(rows), report_files(rows)
    assert "4/4 against 8/0: better, +10" in text and "paired by seed" in text
    assert max(map(len, text.splitlines())) <= 100
    assert [row["label"] for row in json.loads(files["report.json"])] == ["4/4", "8/0"]
    assert len(list(csv.reader(io.StringIO(files["curves.csv"].decode())))) == 1 + 8 * 20
    assert files.get("report.png", b"\x89PNG")[:4] == b"\x89PNG"
    put(new_store(tmp_path), "config.json", {"NUM_TRAIN_SAMPLES": "2"})
    assert [row["runs"] for row in compare_experiments(tmp_path)] == [4, 4], "one damaged hides no other"


def test_no_text_in_a_config_breaks_the_picture_or_becomes_a_formula(tmp_path):
    for i, bad in enumerate(("=cmd", r"$\frac{$", "@cmd(1)", "+cmd", "-cmd", "\t=cmd")):
        finished_run(tmp_path, f"e{i}", SEED=bad, **{bad: bad})
    rows = compare_experiments(tmp_path)
    files = report_files(rows)
    assert len(rows) == 6 and files.get("report.png", b"\x89PNG")[:4] == b"\x89PNG"
    for name in ("report.csv", "curves.csv"):
        table = csv.reader(io.StringIO(files[name].decode()))
        cells = [cell for row in table for cell in row if "cmd" in cell]
        assert len(cells) >= 5 and not [cell for cell in cells if cell.strip()[0] in "=+-@"]


def test_a_peer_whose_file_could_not_be_used_is_not_waited_for_in_the_next_round(tmp_path):
    store = new_store(tmp_path)
    ours, _ = new_swarm(store)
    put(store, "rollouts/round_000000/stage_0/n2.json", wire_file("n2", round=0))
    put(store, "rollouts/round_000000/stage_0/evil.json", b"")
    for name in ("n2", "evil"):
        store.register(name, "worker", {})
    put(store, "rollouts/round_000000/stage_0/never_registered.json", wire_file("never_registered", round=0))
    ours.start()
    ours.round = 1
    until(lambda: ours.looked_at_round == 1)
    assert ours.missing(1, 0) == {"n2"}
    ours.close(patience=5)


def test_winners_are_registered_nodes_and_their_rewards_take_little_memory(tmp_path):
    store = new_store(tmp_path)
    store.register("n1", "worker", {})
    for node, reward in (("n1", 0.25), ("a_stranger", 1.0)):
        padding = {f"x{i}": "y" * 50 for i in range(500)}
        store.submit_reward(0, 0, node, {"reward": reward, **padding})
    write_winners(store, 0)
    assert store.read("winners/round_000000.json") == {"n1": 0.25}
    assert len(json.dumps(store.rewards(0, ["n1"]))) < 2000


def test_the_monitor_of_a_notebook_waits_for_the_first_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coordinator, "in_notebook", lambda: True)
    store = new_store(tmp_path)
    coordinator.monitor(store, 300, once=True)
    store.open_config({"MAX_ROUNDS": 9})
    coordinator.monitor(store, 300, once=True)
    assert capsys.readouterr().out.count("round -1 of") == 2


def test_two_jobs_are_never_equal():
    """A queue that compares their fields while another thread appends to it raises IndexError: a false outage."""
    assert coordinator.Job(print, ("a",)) != coordinator.Job(print, ("a",))


def test_an_arm_with_missing_rewards_says_so_and_a_run_with_few_is_not_valid(tmp_path):
    for seed in (1, 2):
        finished_run(tmp_path / str(seed), rewards=[0.5] * 20)
    store = DriveStore(tmp_path / "1", "x")
    for round_ in range(19):
        (store.base / f"rewards/{bucket(round_)}/stage_0/n2.json").unlink()
    rows = compare([summarize(DriveStore(tmp_path / name, "x")) for name in ("1", "2")])
    assert any("48% of the rewards of a run are missing" in row["note"] for row in rows)
    assert any("less than half of the rounds: n2" in text for text in validate_experiment(store, 20, 2))
    assert not any("half" in text for text in validate_experiment(DriveStore(tmp_path / "2", "x"), 20, 2))


def test_experiments_with_settings_of_their_own_hold_up_no_report(tmp_path):
    finished_run(tmp_path)
    mine, began = summarize(DriveStore(tmp_path, "x")), time.monotonic()
    planted = []
    for i in range(300):
        more = {f"k{i}_{j}": j for j in range(140)}
        settings = mine["settings"] | more
        planted.append(
            mine | {"settings": settings, "key": json.dumps(settings), "task": json.dumps(settings)}
        )
    assert len(compare([mine, *planted])) == 301 and time.monotonic() < began + 20
    assert len(report_files(compare([mine, *planted]))["report.md"]) < 10**6 and time.monotonic() < began + 60
