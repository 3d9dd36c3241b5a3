"""Proofs of the swarm's promises in a simulated folder (see simulator.py), in this order: S1 keeping
together, S2 late and missing nodes, S3 and X3 waiting for peers, S4 two processes of one name, S5
engines and signals, L6 and F6 nodes that start together, F3 and F1 kills at any call, F7 one maker of
each folder, S3 what a round costs."""

import functools
import json
import os
import random
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import coordinator
import grpo
import sapo
from common import QUICK, assert_each_reward_counts_once, checkpoint_of, events_of, folder_of
from common import heartbeat_of, play, read_log, rewards_of, rounds_of
from drive_store import At, DriveStore

SWARM = ("w0", "w1", "w2")
LED = (*SWARM, "coordinator")


def submit(store, round_, node):
    store.publish("rewards", node, At(round_, 0), {"reward": 0.5})


def board_of(world):
    return DriveStore(world.drive, "default").board()


def now(world) -> int:
    """The open round, -1 while there is no experiment."""
    try:
        return board_of(world).open_round
    except FileNotFoundError:
        return -1


def openers(world) -> dict:
    """{node: the last round that it has opened}."""
    progress = board_of(world).progress
    return {node: at[0] for (kind, node), at in progress.items() if kind == "open"}


def assert_no_path_has_two_writers(world):
    assert len(world.writers) > 100
    assert {path: names for path, names in world.writers.items() if len(names) > 1} == {}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "names, behind",
    [(SWARM, ""), (LED, ""), (LED, "w0"), (LED, "coordinator")],
    ids=["alone", "led", "led, w0 is behind", "led, coordinator is behind"],
)
def test_S1_workers_keep_together_with_or_without_a_coordinator(world, names, behind, seed):
    """Also if the clock of one stands 200 seconds behind. Nobody waits for an interval."""
    world.rng.seed(seed)
    settings = {"MAX_ROUNDS": 8, "NUM_WORKERS": 3, "COORDINATOR_ROUND_INTERVAL": 600}
    swarm = [world.start(name, **settings) for name in names]
    for process in swarm:
        process.clock_error = -200.0 if process.name == behind else 0.0
    world.end(*swarm, seconds=120)

    # Each worker takes part in every round and, after the first, draws groups of that very round.
    for name in SWARM:
        assert rounds_of(world.drive, name) == [*range(8)]
        for row in read_log(world.drive, name)[1:]:
            assert row["external_ages"] == [0, 0]
    if names == LED:
        assert openers(world)["coordinator"] == 7
        names = {path.name for path in folder_of(world.drive, "coordinator").iterdir()}
        assert names <= {"heartbeat.json", "logs", "winners"}


@pytest.mark.parametrize("elapsed, is_pending, is_submitted, strategies", [
    (99, False, False, ""), (9, True, False, ""), (10, True, False, "time hybrid"),
    (9, True, True, ""), (10, True, True, "time hybrid"), (9, False, True, "completion hybrid"),
    (10, False, True, "time completion hybrid"),
])  # fmt: skip
def test_S1_a_round_of_ten_seconds_is_over_by_time_by_completion_or_by_either(
    elapsed, is_pending, is_submitted, strategies
):
    for strategy in ("time", "completion", "hybrid"):
        config = SimpleNamespace(ROUND_ADVANCE=strategy, COORDINATOR_ROUND_INTERVAL=10)
        is_over = coordinator.should_advance(config, elapsed, is_pending, is_submitted)
        assert is_over == (strategy in strategies.split()), strategy


def test_S1_S4_the_coordinator_waits_for_a_worker_holds_round_0_then_goes_by_time_and_ends(
    world, monkeypatch
):
    """It does not see its own registration for a while, which is no newer process of its name."""
    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 5, "MAX_ROUNDS": 4}
    leader = world.start("coordinator", **settings)
    world.run(lambda: "python sapo.py" in leader.output)
    for word in ("NODE_ID=anna", "MAX_ROUNDS=4", "TASKS=small_products", "ROUND_ADVANCE=time"):
        assert word in leader.output
    assert not world.drive.exists()

    began = world.now
    read_board = DriveStore.board

    def stale_board(store):
        board = read_board(store)
        if world.now < began + 70:
            board.sessions.pop("coordinator", None)
        return board

    monkeypatch.setattr(DriveStore, "board", stale_board)
    store = play(world.drive, "n1")
    world.run(lambda: world.now > began + 60)
    assert now(world) == 0, "a living worker may still be downloading its model"
    submit(store, 0, "n1")
    world.run(lambda: now(world) == 3, seconds=20)
    world.run(lambda: world.now > began + 120)
    assert leader.status is None, "the last round waits for its worker"
    submit(store, 3, "n1")
    world.end(leader)
    assert heartbeat_of(world.drive, "coordinator") == "done"
    winners = folder_of(world.drive, "coordinator") / "winners/round_000003.json"
    assert json.loads(winners.read_bytes()) == {"n1": 0.5}


def test_S1_the_coordinator_waits_for_all_living_workers_and_at_its_start_for_all_expected(world):
    settings = {"ROUND_ADVANCE": "hybrid", "NUM_WORKERS": 2, "COORDINATOR_ROUND_INTERVAL": 3600}
    store = play(world.drive, "n1")
    leader = world.start("coordinator", **settings)

    def assert_waits_in(round_):
        began = world.now
        world.run(lambda: world.now > began + 30)
        assert now(world) == round_

    # Two workers are expected, and one has come.
    world.run(lambda: now(world) == 0)
    submit(store, 0, "n1")
    assert_waits_in(0)
    store = play(world.drive, "n1", "n2")
    submit(store, 0, "n2")
    world.run(lambda: now(world) == 1)

    # n1 is alive and has not submitted. When it exits it is not waited for.
    submit(store, 1, "n2")
    assert_waits_in(1)
    store.write_heartbeat("n1", store.session, "stopped")
    world.run(lambda: now(world) == 2)

    # All stop: n2 after round 2, n1 before it. Started again, n2 is there first.
    submit(store, 2, "n2")
    store.write_heartbeat("n2", store.session, "stopped")
    world.end(leader.interrupt(), status=130)
    leader.start()
    store = play(world.drive, "n2")
    assert_waits_in(2)
    store = play(world.drive, "n1")
    store.move_marker("open", "n1", At(2))
    assert_waits_in(2)
    submit(store, 2, "n1")
    world.run(lambda: now(world) == 3)


@pytest.mark.parametrize("names", [SWARM, LED], ids=["alone", "led"])
@pytest.mark.parametrize("seed", range(2))
def test_S1_a_storage_that_shows_new_names_late_or_never_stops_nobody_and_loses_nothing(
    world, seed, names
):
    """As a mounted drive does, and the attribute cache of NFS: the names that others changed show
    after up to 20 s, one in ten of them never."""
    rng = random.Random(seed)
    world.delay = lambda path: rng.choice([0, 1, 5, 20, 1e9 if rng.random() < 0.5 else 3])
    settings = {"MAX_ROUNDS": 12, "COORDINATOR_ROUND_INTERVAL": 20, "NUM_TRANSPLANT_TREES": 4}
    first = world.start("w0", **settings)  # begins the experiment alone
    world.run(lambda: rounds_of(world.drive, "w0"))
    swarm = [first, *(world.start(name, **settings) for name in names[1:])]
    world.end(*swarm)
    for process in swarm[:3]:
        assert rounds_of(world.drive, process.name)[-1] == 11
        assert_each_reward_counts_once(world.drive, process.name)
        assert len(process.trained) > 8
        assert len(process.trained) == len({*process.trained}), "trained twice on one group"
    del world.writers[str(world.drive / "reports/default.png")]  # beside the experiment
    assert_no_path_has_two_writers(world)


@pytest.mark.parametrize("with_coordinator", [False, True])
def test_S1_nodes_of_unequal_speed_train_nearly_all_rounds_together(world, with_coordinator):
    """Steps of 0.3, 3 and 20 s, half of each for sampling, and a process that comes late."""
    settings = {"MAX_ROUNDS": 20, "FETCH_TIMEOUT_SECONDS": 30, "COORDINATOR_ROUND_INTERVAL": 120}
    names = ("fast", "medium", "slow") + ("coordinator",) * with_coordinator
    for name, seconds in zip(names, (0.15, 1.5, 10.0, 0.0), strict=False):
        world.start(name, **settings).step_seconds = seconds
    world.run(lambda: rounds_of(world.drive, "slow"))
    world.start("late", **settings).step_seconds = 1.5
    world.run()
    came = rounds_of(world.drive, "late")[0]
    for name in (*names[:3], "late"):
        assert len(rounds_of(world.drive, name)) >= 0.9 * (20 - (came if name == "late" else 0))


def test_S1_S2_S3_a_node_of_a_hundred_seconds_a_step_costs_the_others_one_timeout(world):
    """Half of a step is sampling. In it each forward pass shows that the node is alive."""
    settings = {"MAX_ROUNDS": 10**5, "FETCH_TIMEOUT_SECONDS": 30}
    for name in "ab":
        world.start(name, **settings).step_seconds = 1.0
    world.start("snail", STALE_AFTER_SECONDS=40, **settings).step_seconds = 50.0
    for _ in range(100):
        world.wait(10)
        store = DriveStore(world.drive, "default")
        session = store.board().sessions["snail"]
        assert store.node_status("snail", session, 40.0) == "alive"
    rows = read_log(world.drive, "a")
    entered = len(rounds_of(world.drive, "snail", "rollouts"))
    assert 5 < entered < 11
    assert all(row["wait_seconds"] < 32 for row in rows)
    assert sum(row["wait_seconds"] > 5 for row in rows) <= entered + 1
    assert len(rows) > 200


def test_S2_a_node_that_comes_late_or_was_away_joins_the_open_round_and_names_the_missed(world):
    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 5}
    for name in ("coordinator", "early"):
        world.start(name, **settings)
    world.run(lambda: now(world) >= 4)
    late = world.start("late", **settings)
    world.run(lambda: len(rounds_of(world.drive, "late")) >= 2)
    late.is_suspended = True
    suspended_at = now(world)
    world.run(lambda: now(world) >= suspended_at + 4)
    late.is_suspended = False
    world.run(lambda: rounds_of(world.drive, "late")[-1] >= suspended_at + 4)
    late.interrupt()
    world.run(lambda: late.status == 130)

    # Each round was worked on, or is named as missed in an event and on the screen.
    texts = events_of(world.drive, "late", "skip")
    missed = []
    for text in texts:
        assert f"late skip: {text}" in late.output
        first, last = re.match(r"rounds (\d+) to (\d+) ", text).groups()
        missed += range(int(first), int(last) + 1)
    worked = rounds_of(world.drive, "late")
    assert {0, 1, 2, 3, suspended_at + 1, suspended_at + 2} <= {*missed}
    assert sorted(missed + worked) == [*range(worked[-1] + 1)]

    # Who was too slow, and did not only come late, is told which variable may help.
    assert "STALE_AFTER_SECONDS" not in texts[0]
    assert "STALE_AFTER_SECONDS" in texts[-1]


def test_S2_a_process_suspended_for_longer_than_stale_is_missed_by_nobody_and_comes_back(world):
    settings = {"STALE_AFTER_SECONDS": 30, "MAX_ROUNDS": 10**5, "FETCH_TIMEOUT_SECONDS": 5}
    swarm = [world.start(name, **settings) for name in SWARM]
    world.run(lambda: all(len(rounds_of(world.drive, name)) > 3 for name in SWARM))
    away = swarm[0]
    away.is_suspended = True
    world.wait(40)
    before = now(world)
    world.wait(40)
    assert now(world) > before + 20, "the others wait for it"

    # It goes on with the open round, and from then on they keep together again.
    away.is_suspended = False
    world.wait(40)
    missed = {*range(now(world) - 10)} - {*rounds_of(world.drive, "w0")}
    first, last = min(missed), max(missed)
    assert missed == {*range(first, last + 1)}
    assert f"rounds {first} to {last} were opened by the swarm meanwhile" in away.output
    ages = [row["external_ages"] for row in read_log(world.drive, "w1")[-10:]]
    assert ages == [[0, 0]] * 10


def test_S2_workers_replace_a_dead_coordinator_and_it_takes_over_again_when_it_is_back(world):
    settings = {"ROUND_ADVANCE": "completion", "STALE_AFTER_SECONDS": 30, "NUM_WORKERS": 2}
    settings |= {"MAX_ROUNDS": 10**5}
    leader = world.start("coordinator", **settings)
    workers = ("w0", "w1")
    for name in workers:
        world.start(name, **settings)
    world.run(lambda: now(world) >= 4)
    leader.kill()
    killed_at = world.now
    before = now(world)
    world.run(lambda: now(world) > before + 1)
    assert 25 < world.now - killed_at < 35, "workers open rounds after STALE_AFTER_SECONDS"
    world.run(lambda: all(rounds_of(world.drive, name)[-1] > before + 3 for name in workers))

    leader.start()
    world.run(lambda: openers(world)["coordinator"] >= max(openers(world).values()), seconds=60)
    led = now(world)
    world.run(lambda: now(world) > led + 5, seconds=60)
    assert openers(world)["coordinator"] == now(world)


@pytest.mark.parametrize("frequency", ["stage", "round"])
def test_S3_a_round_waits_for_peers_once_and_only_for_those_that_published_the_round_before(
    world, frequency
):
    """`slow` has published round 1 alone, `dead` round 2 alone, and `silent`, which is alive,
    nothing."""
    store = play(world.drive, "silent", "slow", "dead")
    for peer, round_ in (("slow", 1), ("dead", 2)):
        for stage in range(3) if frequency == "stage" else [2]:
            store.publish("rollouts", peer, At(round_, stage), {"format": 1, "rollouts": {}})
    store.write_heartbeat("dead", store.session, "failed")
    settings = {"LOCAL_NODES": 2, "MAX_STAGES": 3, "MAX_ROUNDS": 4}
    world.finish("n", **settings, ROLLOUT_PUBLISH_FREQUENCY=frequency)

    # Each round waited 20 s in all, if at all. If each stage waited anew, it would be 60 s.
    waits = [0.0] * 4
    for row in read_log(world.drive, "n_0") + read_log(world.drive, "n_1"):
        waits[row["round"]] += row["wait_seconds"]
    for round_, is_waiting in enumerate((True, False, True, False)):
        low, high = (19, 24) if is_waiting else (0, 4)
        assert low <= waits[round_] < high, f"round {round_}: {waits}"


def test_X3_a_peer_that_only_claims_to_publish_costs_its_timeout_and_no_more(world):
    """Its markers are ahead of all, there are no files, and its heartbeat says that it lives."""
    store = play(world.drive, "liar")
    for kind in ("rollouts", "rewards"):
        store.move_marker(kind, "liar", At(999))
    process = world.start(MAX_ROUNDS=5)
    began = world.now
    while process.status is None:
        store.write_heartbeat("liar", store.session)
        world.wait(5)
    assert process.status == 0
    waits = [row["wait_seconds"] for row in read_log(world.drive, "n")]
    assert len(waits) == 5
    assert max(waits) < 24
    assert world.now - began < 5 * 30


@pytest.mark.parametrize("name", ["twin", "coordinator"])
def test_S4_of_two_processes_of_one_name_the_older_says_so_and_stops_with_status_3(world, name):
    store = play(world.drive, "n1")
    older = world.start(name, FETCH_TIMEOUT_SECONDS=0)
    world.run(lambda: name in board_of(world).sessions)
    if name == "twin":
        world.run(lambda: rounds_of(world.drive, name))
    newer = world.start(name, FETCH_TIMEOUT_SECONDS=0)
    world.run(lambda: older.status == 3)
    assert "newer" in older.output
    before = now(world)
    if name == "coordinator":
        submit(store, 0, "n1")
    world.run(lambda: now(world) > before)
    assert newer.status is None
    assert heartbeat_of(world.drive, name) == "running"


def test_S4_a_start_that_is_finished_or_refused_supersedes_nobody_and_removes_nothing(
    world, monkeypatch
):
    running = world.start("anna")
    world.run(lambda: (world.drive / "experiments").exists() and checkpoint_of(world.drive, "anna"))
    on_its_way = folder_of(world.drive, "anna") / ".new-anna-0123456789abcdef"
    on_its_way.write_text("half of a file")

    # It has done as many rounds as this start asks for, and another start finds no checkpoint.
    assert "already finished" in world.finish("anna", MAX_ROUNDS=2).output
    with monkeypatch.context() as patch:
        damaged = Mock(side_effect=grpo.SafetensorError("damaged"))
        patch.setattr(grpo, "load_tensors", damaged)
        assert "cannot be used" in world.finish("anna", status=2).output
    assert on_its_way.exists()

    # The running process goes on, and whatever was left over goes at its end.
    before = rounds_of(world.drive, "anna")
    world.run(lambda: len(rounds_of(world.drive, "anna")) > len(before))
    world.end(running.interrupt(), status=130)
    assert not on_its_way.exists()


STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"}


@pytest.mark.parametrize("environ, node_id, auto_role", [
    ({**STEP, "SLURM_PROCID": "0"}, "node_0", "coordinator"),
    ({**STEP, "SLURM_PROCID": "2", "RANK": "7"}, "node_2", "worker"),
    ({**STEP, "SLURM_PROCID": "2", "SLURM_STEP_ID": "123456789"}, "node_2", "worker"),
    # Two interactive shells are both of rank 0.
    ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, "node_[0-9a-f]{8}", "worker"),
    ({"SLURM_PROCID": "0"}, "node_[0-9a-f]{8}", "worker"),
    ({"JOB_COMPLETION_INDEX": "0"}, "node_0", "coordinator"),
    ({"SKYPILOT_NODE_RANK": "3"}, "node_3", "worker"),
    ({"RANK": "x"}, "node_[0-9a-f]{8}", "worker"),
    ({}, "node_[0-9a-f]{8}", "worker"),
])  # fmt: skip
def test_S5_an_engines_rank_becomes_the_nodes_name_and_rank_0_the_coordinator_with_auto(
    environ, node_id, auto_role
):
    for more, role in (({}, "worker"), ({"NODE_ROLE": "auto"}, auto_role)):
        env, _ = sapo.read_environment(environ | more)
        assert re.fullmatch(node_id if role == "worker" else "coordinator", env["NODE_ID"])
        assert env["NODE_ROLE"] == role
    env, _ = sapo.read_environment(environ | {"NODE_ID": "anna"})
    assert env["NODE_ID"] == "anna", "a name that was set is kept"


def test_S5_a_stop_ends_in_order_and_requeued_tasks_resume_under_their_names(world):
    """(That SIGTERM and SIGUSR1 count as stops is proved with real signals.)"""
    engine = {**STEP, "NODE_ROLE": "auto", "NODE_ID": None, "ROUND_ADVANCE": "completion"}
    names = ["coordinator", "node_1", "node_2"]
    swarm = [world.start(name, **engine, SLURM_PROCID=rank) for rank, name in enumerate(names)]
    world.run(lambda: all(len(rounds_of(world.drive, name)) >= 4 for name in names[1:]))
    world.end(*(process.interrupt() for process in swarm), status=130)
    assert [heartbeat_of(world.drive, name) for name in names] == ["stopped"] * 3
    saved = [checkpoint_of(world.drive, name) for name in names[1:]]
    assert saved == [rounds_of(world.drive, name)[-1] for name in names[1:]], "a round was lost"

    # The engine starts the same tasks again.
    for process in swarm:
        process.start(MAX_ROUNDS=max(saved) + 4)
    world.end(*swarm)
    assert [process.resumed_from for process in swarm[1:]] == saved


@pytest.mark.parametrize("delay", [0, 0.01, 0.05, 0.1, 0.3, 0.6, 0.9, 1, 1.05, 1.1, 1.3, 2])
def test_L6_F6_of_nodes_that_start_together_one_begins_and_all_have_its_settings_and_its_weights(
    world, delay
):
    """Whoever comes meanwhile sets its name and no more. On machines that round differently each
    would make other weights."""
    short = {"MAX_ROUNDS": 4, "WARM_START_STEPS": 3}
    first = world.start("anna", SEED=77, NUM_TRAIN_SAMPLES=3, **short)
    world.wait(delay)
    joining = dict.fromkeys(QUICK) | short
    others = [world.start(name, **joining | {"NODE_ID": name}) for name in ("ben", "carl")]
    world.run()
    config = json.loads((world.drive / "experiments/default/config.json").read_bytes())
    begun_by_anna = config["maker"] == "anna"
    assert [process.status for process in others] == [0, 0]
    assert first.status == (0 if begun_by_anna else 2), "another seed than the experiment's"

    swarm = [process for process in (first, *others) if process.status == 0]
    assert len({process.initial_weights for process in swarm}) == 1
    assert len([*(world.drive / "warmstart").iterdir()]) == 1
    for process in swarm:
        num_groups = {row["groups"] for row in rewards_of(world.drive, process.name)}
        assert num_groups == {config["NUM_TRAIN_SAMPLES"]}
        assert rounds_of(world.drive, process.name)[-1] == config["MAX_ROUNDS"] - 1


def test_F3_F1_F7_a_swarm_survives_kills_loses_nothing_and_every_path_has_one_writer(world):
    # What was published stays.
    published = {}

    def check():
        for pattern in ("config.json", "board/session.*", "nodes/*/r*/*.json"):
            for path in (world.drive / "experiments/default").glob(pattern):
                data = path.read_bytes()
                assert published.setdefault(path, data) == data, f"{path} has changed"
        for (kind, node), at in board_of(world).progress.items():
            path = folder_of(world.drive, node) / kind / "round_{:06d}.stage_{}.json".format(*at)
            assert path.exists() or kind in ("open", "checkpoint"), "a marker without its file"

    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 3, "CHECKPOINT_INTERVAL": 5}
    settings |= {"FETCH_TIMEOUT_SECONDS": 1, "STALE_AFTER_SECONDS": 20, "MAX_ROUNDS": 10**5}
    first = world.start("w0", **settings)  # begins the experiment alone
    world.run(lambda: first.num_calls > 120)
    stranger = ".new-w-0123456789abcdef"
    strangers = {world.drive / folder / stranger for folder in ("warmstart", "reports")}
    for path in strangers:
        path.touch()
    swarm = [first, *(world.start(name, **settings) for name in LED[1:])]
    resumes = 0
    saved = dict.fromkeys(SWARM)  # worker -> round of its newest checkpoint when it was killed
    for _ in range(40):
        process = world.rng.choice(swarm)
        process.kill_at = process.num_calls + world.rng.randrange(1, 500)
        world.run(lambda: process.status == -9)  # noqa: B023
        check()
        if process.resumed_from is not None:
            resumes += 1
            assert process.resumed_from == saved[process.name]
        saved[process.name] = checkpoint_of(world.drive, process.name)
        process.start()
    last = now(world) + 7
    for process in swarm:
        process.kill()
        process.start(MAX_ROUNDS=last + 1)
    world.end(*swarm)
    check()
    assert resumes >= 10, "hardly a start had a checkpoint to go on from"
    for name in SWARM:
        assert rounds_of(world.drive, name)[-1] == checkpoint_of(world.drive, name) == last
        assert {*rounds_of(world.drive, name)} <= {*rounds_of(world.drive, name, "rollouts")}
        assert_each_reward_counts_once(world.drive, name)
    assert {*world.drive.rglob(".*")} == strangers, "its own were not removed, or another's were"
    assert_no_path_has_two_writers(world)


def test_S3_a_round_of_a_thousand_nodes_costs_a_worker_hardly_more_calls_than_one_of_sixteen(
    world, monkeypatch
):
    """Calls to the folder that a worker and the coordinator make in a round: means over all workers
    and over rounds 1 to 6, with steps of 3 s and calls of 2 ms. NODES="4 16 64 256" prints the
    manual's table, in ten minutes; 1024 takes hours."""
    calls_after = {}  # process -> its number of calls after each round
    world.call_seconds = 0.002
    monkeypatch.setattr(re, "fullmatch", functools.lru_cache(2**20)(re.fullmatch))  # of the board

    def record(module, name):
        function = getattr(module, name)

        def recording(*args):
            result = function(*args)
            calls_after.setdefault(world.current.name, []).append(world.current.num_calls)
            return result

        monkeypatch.setattr(module, name, recording)

    record(sapo, "finish_round")
    record(coordinator, "log_round_of_swarm")
    of_workers = {}
    for num_nodes in map(int, os.environ.get("NODES", "16 48").split()):
        calls_after.clear()
        world.drive = world.drive.with_name(f"of_{num_nodes}")
        settings = {"MAX_ROUNDS": 8, "NUM_WORKERS": num_nodes, "CHECKPOINT_INTERVAL": 100}
        for name in ("coordinator", *(f"w{i}" for i in range(num_nodes))):
            world.start(name, **settings).step_seconds = 3.0
        world.run()
        per_round = {name: (calls[6] - calls[0]) / 6 for name, calls in calls_after.items()}
        of_coordinator = per_round.pop("coordinator")
        assert len(per_round) == num_nodes
        of_workers[num_nodes] = sum(per_round.values()) / num_nodes
        print(f"| {num_nodes} | {of_workers[num_nodes]:.0f} | {of_coordinator:.0f} |", flush=True)
    assert max(of_workers.values()) < of_workers[16] + 10
