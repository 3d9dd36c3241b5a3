"""Proofs of the swarm's promises, with real processes in a real folder: S1 keeping together,
S2 late and missing nodes, S3 waiting for peers, S4 two processes of one name, S5 engines and
signals, L5 runs that repeat bit for bit, F3 SIGKILL at any moment, F7 one maker of each folder."""

import functools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import coordinator
import drive_store
import grpo
import sapo
from drive_store import DriveStore

QUICK = {  # nothing is learned; only the order of events matters
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "TASKS": "small_products", "WARM_START_STEPS": 0,
    "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "EXTERNAL_FILTER": False,
    "CHECKPOINT_INTERVAL": 3, "MAX_ROUNDS": 10**5, "FETCH_TIMEOUT_SECONDS": 20,
}  # fmt: skip
WARM = {"WARM_START_STEPS": 60, "ANSWER_TAG_SHARE": 0.9}  # some answers are right

# The fork server imports everything once; the processes of the tests are forked from it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    ["test_swarm", "transformers.generation", "matplotlib.backends.backend_agg"]
)
CHILDREN = []


# -------- Processes -------------------------------------------------------------------------------


def to_environ(settings: dict) -> dict:
    """Settings as environment variables; None leaves one unset."""
    return {name: str(value) for name, value in settings.items() if value is not None}


def record_writes(file: Path, name: str) -> None:
    """Append "NAME PATH" to a file for every attempt of this process to make a folder, or to write,
    rename or delete a file."""
    os_open = os.open

    def record(function, num_paths):
        def recording(*args, **kwargs):
            is_read = function is os_open and not args[1] & os.O_CREAT
            for path in () if is_read else args[:num_paths]:
                with file.open("a") as log:
                    log.write(f"{name} {os.path.abspath(path)}\n")
            return function(*args, **kwargs)

        setattr(os, function.__name__, recording)

    for function, num_paths in ((os.mkdir, 1), (os.replace, 2), (os.unlink, 1), (os.open, 1)):
        record(function, num_paths)


def run_forked(environ: dict, log: Path) -> None:
    """Do what `python sapo.py` does, in a session of its own and with its output in a file."""
    os.setsid()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    record_writes(log.parent / "writes", environ.get("NODE_ID", "unnamed"))
    sys.exit(sapo.main(environ))


class Process:
    """A worker or the coordinator. It may be started again; `log`, `output` and `resumed_from` are
    those of its latest start."""

    def __init__(self, drive: Path, name: str, **settings):
        role = {"NODE_ROLE": name} if name == "coordinator" else {}
        self.settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ID": name, **role, **settings}
        self.drive = drive
        self.name = name

    def start(self):
        self.log = self.drive.parent / f"{self.name}.{len(CHILDREN)}.log"
        self.sessions_before = len(sessions_of(self.drive, self.name))
        arguments = (to_environ(self.settings), self.log)
        self.child = FORK_SERVER.Process(target=run_forked, args=arguments)
        self.child.start()
        CHILDREN.append(self.child)
        return self

    def is_registered(self) -> bool:
        return len(sessions_of(self.drive, self.name)) > self.sessions_before

    def wait_until_registered(self):
        wait_until(lambda: self.is_registered() or not self.child.is_alive())
        assert self.is_registered(), self.output
        return self

    def send(self, number: int):
        os.kill(self.child.pid, number)
        return self

    def kill(self) -> None:
        self.child.kill()
        self.child.join()
        tail = self.output[-3000:]
        assert self.child.exitcode == -signal.SIGKILL, f"{self.name} had ended before:\n{tail}"

    def wait_for_exit(self, seconds: float = 90) -> int:
        """Return the exit status."""
        self.child.join(seconds)
        tail = self.output[-3000:]
        assert not self.child.is_alive(), f"{self.name} still runs after {seconds} s:\n{tail}"
        return self.child.exitcode

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def resumed_from(self) -> int | None:
        """The round of the checkpoint that was loaded."""
        match = re.search(rf"^{self.name}(?:_0)? resume: .*?(\d+)", self.output, re.MULTILINE)
        return int(match[1]) if match else None


def wait_until(condition, seconds: float = 120):
    """Return the first truthy value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the test waits for something that did not happen"
        time.sleep(0.01)
    return value


@pytest.fixture
def drive(tmp_path) -> Path:
    """A folder that is not there yet. The processes of the test are killed at its end."""
    yield tmp_path / "drive"
    while CHILDREN:
        child = CHILDREN.pop()
        if child.is_alive():
            child.kill()  # it may be suspended
        child.join()


# -------- What a test does and sees in the folder -------------------------------------------------


def begin(drive: Path) -> DriveStore:
    """Begin the experiment by hand, because a coordinator does not. Returns its store."""
    store = DriveStore(drive, "default")
    store.create({"layout": drive_store.LAYOUT, "maker": "by_hand"})
    return store


def play(drive: Path, node_id: str) -> DriveStore:
    """A store through which a test plays this node, which has just registered."""
    store = begin(drive)
    store.create_node(node_id)
    store.register([node_id], {})
    return store


def submit_reward(store: DriveStore, round_: int, node_id: str) -> None:
    store.publish("rewards", node_id, round_, 0, {"reward": 0.5})


def folder_of(drive: Path, node_id: str) -> Path:
    return drive / "experiments/default/nodes" / node_id


def sessions_of(drive: Path, node_id="") -> list[str]:
    """Names of the registrations of all processes of a node, such as w0 or, of node n, n_0."""
    board = drive / "experiments/default/board"
    return [path.name for path in board.glob(f"session.{node_id}*")]


def opened_rounds(drive: Path) -> dict[str, int]:
    """{node: the last round that it has opened}."""
    progress = DriveStore(drive, "default").board().progress
    return {node: round_ for (kind, node), (round_, _) in progress.items() if kind == "open"}


def current_round(drive: Path) -> int:
    return DriveStore(drive, "default").board().open_round


def rounds_of(drive: Path, node_id: str, kind="rewards") -> list[int]:
    """Rounds for which this node has a file of stage 0, ascending."""
    paths = folder_of(drive, node_id).glob(f"{kind}/*.stage_0.json")
    return sorted(int(path.name[6:12]) for path in paths)


def newest_checkpoint(drive: Path, node_id: str) -> int | None:
    paths = folder_of(drive, node_id).glob("checkpoints/*.safetensors")
    return max((int(path.name[6:12]) for path in paths), default=None)


def read_heartbeat(drive: Path, node_id: str) -> dict:
    return json.loads((folder_of(drive, node_id) / "heartbeat.json").read_bytes())


def read_log(drive: Path, node_id: str, log="metrics") -> list[dict]:
    text = (folder_of(drive, node_id) / f"logs/{log}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def repeatable_metrics(drive: Path) -> dict:
    """{(round, stage, node_id): contents of the reward file without times}."""
    metrics = {}
    for path in folder_of(drive, "").glob("*/rewards/*.json"):
        row = json.loads(path.read_bytes())
        kept = {name: x for name, x in row.items() if not re.search("seconds|time", name)}
        metrics[row["round"], row["stage"], row["node_id"]] = kept
    return metrics


class Observer:
    """Checks at every call that no write-once file has changed or gone."""

    WRITE_ONCE = "config.json board/session.* nodes/*/rewards/*.json nodes/*/rollouts/*.json"

    def __init__(self, drive: Path):
        self.drive = drive
        self.files = {}  # path -> bytes

    def check(self) -> None:
        for pattern in self.WRITE_ONCE.split():
            for path in (self.drive / "experiments/default").glob(pattern):
                data = path.read_bytes()
                assert self.files.setdefault(path, data) == data, f"{path} has changed"
        assert all(path.exists() for path in self.files)

    def check_that_all_is_complete(self) -> None:
        """Every file can be parsed, nothing is left over, and every reward has its rollouts."""
        self.check()
        for path in self.drive.rglob("*.json*"):
            text = path.read_text()
            for each in text.splitlines() if path.suffix == ".jsonl" else [text]:
                assert isinstance(json.loads(each), dict), path
        assert not [*self.drive.rglob(".*")]

        # With ROLLOUT_PUBLISH_FREQUENCY=round there is one rollout file for all stages.
        rounds = {"rewards": set(), "rollouts": set()}
        for path in self.files:
            if path.parent.name in rounds:
                rounds[path.parent.name].add((path.parent.parent.name, path.name[:12]))
        assert rounds["rewards"]
        assert rounds["rewards"] <= rounds["rollouts"]


# -------- S1: keeping together --------------------------------------------------------------------


@pytest.mark.parametrize("with_coordinator", [False, True])
def test_S1_workers_keep_together_with_or_without_a_coordinator_and_learn_from_one_another(
    drive, with_coordinator
):
    workers = ["w0", "w1", "w2"]
    settings = {"MAX_ROUNDS": 8, "NUM_WORKERS": 3, "COORDINATOR_ROUND_INTERVAL": 60}
    swarm = [Process(drive, name, **settings) for name in workers]
    if with_coordinator:
        begin(drive)
        leader = Process(drive, "coordinator", **settings).start().wait_until_registered()
    for process in swarm:
        process.start()
    assert [process.wait_for_exit() for process in swarm] == [0] * 3

    # Each worker takes part in every round and, after the first, draws groups of that very round.
    for name in workers:
        assert rounds_of(drive, name) == [*range(8)]
        for row in read_log(drive, name)[1:]:
            assert row["external_ages"] == [0, 0]

    # A coordinator opens every round and trains nothing.
    if with_coordinator:
        assert leader.wait_for_exit() == 0
        assert opened_rounds(drive) == {"coordinator": 7}
        names = {path.name for path in folder_of(drive, "coordinator").iterdir()}
        assert names <= {"heartbeat.json", "logs", "winners"}


@pytest.mark.parametrize("elapsed, alive, submitted, by_time, by_completion, by_either", [
    (99, "", "", 0, 0, 0), (9, "ab", "", 0, 0, 0), (10, "ab", "", 1, 0, 1),
    (9, "ab", "a", 0, 0, 0), (10, "ab", "a", 1, 0, 1), (9, "ab", "ab", 0, 1, 1),
    (9, "a", "ab", 0, 1, 1), (9, "", "a", 0, 1, 1), (10, "ab", "abc", 1, 1, 1),
])  # fmt: skip
def test_S1_a_round_of_ten_seconds_is_over_by_time_by_completion_or_by_either(
    elapsed, alive, submitted, by_time, by_completion, by_either
):
    expected = {"time": by_time, "completion": by_completion, "hybrid": by_either}
    for strategy, is_over in expected.items():
        config = SimpleNamespace(ROUND_ADVANCE=strategy, COORDINATOR_ROUND_INTERVAL=10)
        pending = {*alive} - {*submitted}
        advance = coordinator.should_advance(config, elapsed, pending, {*submitted})
        assert advance == bool(is_over), strategy


def test_S1_the_coordinator_waits_for_a_worker_holds_round_0_then_goes_by_time_and_ends(drive):
    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 0.05, "MAX_ROUNDS": 4}
    process = Process(drive, "coordinator", **settings).start()

    # It begins no experiment, and says how to start a worker with everything that was set.
    wait_until(lambda: "python sapo.py" in process.output)
    for word in ("NODE_ID=anna", "MAX_ROUNDS=4", "TASKS=small_products", "ROUND_ADVANCE=time"):
        assert word in process.output
    assert not drive.exists()
    store = play(drive, "n1")
    process.wait_until_registered()
    time.sleep(0.5)
    assert current_round(drive) == 0, "a living worker may still be downloading its model"

    # After the first reward rounds advance by time, whether or not there are rewards.
    submit_reward(store, 0, "n1")
    wait_until(lambda: current_round(drive) == 3)
    time.sleep(0.3)
    assert process.child.is_alive(), "the last round waits for its worker"

    submit_reward(store, 3, "n1")
    assert process.wait_for_exit() == 0
    assert read_heartbeat(drive, "coordinator")["state"] == "done"
    winners = folder_of(drive, "coordinator") / "winners/round_000003.json"
    assert json.loads(winners.read_bytes()) == {"n1": 0.5}


def test_S1_the_coordinator_waits_for_all_living_workers_and_at_each_start_for_all_expected_ones(
    drive,
):
    settings = {"ROUND_ADVANCE": "hybrid", "NUM_WORKERS": 2, "COORDINATOR_ROUND_INTERVAL": 3600}
    first = play(drive, "n1")
    process = Process(drive, "coordinator", **settings).start().wait_until_registered()

    def assert_waits_in(round_):
        time.sleep(0.4)
        assert current_round(drive) == round_

    # Two workers are expected, and one has come.
    submit_reward(first, 0, "n1")
    assert_waits_in(0)
    second = play(drive, "n2")
    submit_reward(second, 0, "n2")
    wait_until(lambda: current_round(drive) == 1)

    # n1 is alive and has not submitted. When it exits it is not waited for.
    submit_reward(second, 1, "n2")
    assert_waits_in(1)
    first.write_heartbeat("n1", first.sessions["n1"], 1, "stopped")
    wait_until(lambda: current_round(drive) == 2)

    # All stop: n2 after round 2, n1 before it. Started again, n2 is there first.
    submit_reward(second, 2, "n2")
    second.write_heartbeat("n2", second.sessions["n2"], 2, "stopped")
    assert process.send(signal.SIGINT).wait_for_exit() == 130
    process.start().wait_until_registered()
    play(drive, "n2")
    assert_waits_in(2)
    first = play(drive, "n1")
    assert_waits_in(2)
    submit_reward(first, 2, "n1")
    wait_until(lambda: current_round(drive) == 3)


def test_S4_a_coordinator_that_does_not_see_its_own_registration_yet_goes_on(drive, monkeypatch):
    read_board = DriveStore.board
    listings = []

    def stale_board(store):
        listings.append(read_board(store))
        if len(listings) < 6:  # it shows after a while
            listings[-1].sessions.pop("coordinator", None)
        return listings[-1]

    worker = play(drive, "n1")
    submit_reward(worker, 0, "n1")
    monkeypatch.setattr(DriveStore, "board", stale_board)
    threading.Timer(1, submit_reward, (worker, 1, "n1")).start()
    settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ROLE": "coordinator", "MAX_ROUNDS": 2}
    assert sapo.main(to_environ(settings)) == 0
    assert len(listings) > 6


# -------- S2: late and missing nodes --------------------------------------------------------------


def test_S2_a_node_that_comes_late_or_was_away_joins_the_current_round_and_names_the_missed_ones(
    drive,
):
    begin(drive)
    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 0.3}
    for name in ("coordinator", "early"):
        Process(drive, name, **settings).start()

    # `late` comes four rounds late, works on two rounds or more, and is then suspended for four.
    wait_until(lambda: current_round(drive) >= 4)
    late = Process(drive, "late", **settings).start()
    wait_until(lambda: len(rounds_of(drive, "late")) >= 2)
    late.send(signal.SIGSTOP)
    suspended_at = current_round(drive)
    wait_until(lambda: current_round(drive) >= suspended_at + 4)
    late.send(signal.SIGCONT)
    wait_until(lambda: rounds_of(drive, "late")[-1] >= suspended_at + 4)
    assert late.send(signal.SIGINT).wait_for_exit() == 130

    # Each round was worked on, or is named as missed in an event and on the screen.
    events = read_log(drive, "late", "training_events")
    skips = [row["text"] for row in events if row["event"] == "skip"]
    missed = []
    for text in skips:
        assert f"late skip: {text}" in late.output
        first, last = re.match(r"rounds (\d+) to (\d+) ", text).groups()
        missed += range(int(first), int(last) + 1)
    worked = rounds_of(drive, "late")
    assert {0, 1, 2, 3, suspended_at + 1, suspended_at + 2} <= {*missed}
    assert sorted(missed + worked) == [*range(worked[-1] + 1)]

    # Who was too slow, and did not only come late, is told which variable may help.
    assert "STALE_AFTER_SECONDS" not in skips[0]
    assert "STALE_AFTER_SECONDS" in skips[-1]


def test_S2_heartbeats_are_sent_between_the_batches_of_a_step_that_takes_long(drive, monkeypatch):
    happened = []

    def record(module, name, seconds):
        function = getattr(module, name)

        def recording(*args, **kwargs):
            happened.append(name)
            time.sleep(seconds)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, recording)

    # A heartbeat is due after 0.125 s, and each batch of two or four completions takes longer.
    settings = {"STALE_AFTER_SECONDS": 1, "MICRO_BATCH_SIZE": 2, "MAX_ROUNDS": 1}
    record(DriveStore, "write_heartbeat", 0)
    record(grpo, "sample_completions", 0.15)
    record(grpo, "completion_logprobs_shared_prompt", 0.15)
    monkeypatch.setattr(sapo, "Run", functools.partial(sapo.Run, max_generation_rows=4))
    monkeypatch.setattr(
        grpo, "group_rewards", lambda _, texts, *__: [i % 2 for i in range(len(texts))]
    )
    settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ID": "n", **settings}
    assert sapo.main(to_environ(settings)) == 0

    # Once it has registered, no batch follows another one without a heartbeat.
    happened = happened[happened.index("write_heartbeat") :]
    assert happened.count("sample_completions") >= 2
    assert happened.count("completion_logprobs_shared_prompt") == 4
    for before, after in zip(happened, happened[1:], strict=False):
        assert "write_heartbeat" in (before, after), happened


def test_S2_workers_replace_a_dead_coordinator_and_it_takes_over_again_when_it_is_back(drive):
    begin(drive)
    settings = {"ROUND_ADVANCE": "completion", "STALE_AFTER_SECONDS": 2, "NUM_WORKERS": 2}
    process = Process(drive, "coordinator", **settings).start().wait_until_registered()
    for name in ("w0", "w1"):
        Process(drive, name, **settings).start()
    wait_until(lambda: current_round(drive) >= 4)
    process.kill()
    assert opened_rounds(drive).keys() == {"coordinator"}

    # The workers open rounds themselves, but not before STALE_AFTER_SECONDS.
    killed_at = read_heartbeat(drive, "coordinator")["time"]
    board = drive / "experiments/default/board"
    markers = wait_until(lambda: [*board.glob("open.w?.*")])
    opened_at = min(path.stat().st_ctime for path in markers)
    assert opened_at - killed_at > 2
    before = current_round(drive)
    wait_until(lambda: min(rounds_of(drive, name)[-1] for name in ("w0", "w1")) > before + 3)

    # A new coordinator goes on from the current round.
    process.start()

    def coordinator_leads():
        opened = opened_rounds(drive)
        last = opened.pop("coordinator")
        return last >= max(opened.values()) + 5

    wait_until(coordinator_leads)


# -------- S3: waiting for peers -------------------------------------------------------------------


@pytest.mark.parametrize("frequency", ["stage", "round"])
def test_S3_a_round_waits_for_peers_once_and_only_for_those_that_published_the_round_before(
    drive, frequency
):
    """`slow` has published round 1 alone, `dead` round 2 alone, and `silent`, which is alive,
    nothing."""
    play(drive, "silent")
    for peer, round_ in (("slow", 1), ("dead", 2)):
        store = play(drive, peer)
        for stage in range(3) if frequency == "stage" else [2]:
            store.publish("rollouts", peer, round_, stage, {"format": 1, "rollouts": {}})
    [session] = (drive / "experiments/default/board").glob("session.dead.*")
    session.rename(session.with_name("session.dead.1000000000000-00000000"))

    settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ID": "n", "LOCAL_NODES": 2}
    settings |= {"MAX_STAGES": 3, "MAX_ROUNDS": 4, "FETCH_TIMEOUT_SECONDS": 1.5}
    settings |= {"ROLLOUT_PUBLISH_FREQUENCY": frequency}
    assert sapo.main(to_environ(settings)) == 0

    # Seconds that each round waited. If each stage waited anew, it would be 4.5 s.
    waits = [0.0] * 4
    for row in read_log(drive, "n_0") + read_log(drive, "n_1"):
        waits[row["round"]] += row["wait_seconds"]
    # Round 0 waits for `silent`, and round 2 for `slow`.
    for round_, is_waiting in enumerate((True, False, True, False)):
        low, high = (1.4, 2.8) if is_waiting else (0, 1.3)
        assert low <= waits[round_] < high, f"round {round_}: {waits}"


# -------- S4: two processes of one name -----------------------------------------------------------


@pytest.mark.parametrize("name", ["twin", "coordinator"])
def test_S4_of_two_processes_of_one_name_the_older_says_so_and_stops_with_status_3(drive, name):
    worker = play(drive, "n1")
    older = Process(drive, name, FETCH_TIMEOUT_SECONDS=0).start().wait_until_registered()
    if name == "twin":
        wait_until(lambda: rounds_of(drive, name))
    newer = Process(drive, name, FETCH_TIMEOUT_SECONDS=0).start().wait_until_registered()
    assert older.wait_for_exit(30) == 3
    assert "newer" in older.output

    # The newer one goes on.
    before = current_round(drive)
    if name == "coordinator":
        submit_reward(worker, 0, "n1")
    wait_until(lambda: current_round(drive) > before)
    assert newer.child.is_alive()
    assert read_heartbeat(drive, name)["state"] == "running"
    assert newer.send(signal.SIGINT).wait_for_exit(30) == 130


def test_S4_a_start_that_is_finished_or_refused_supersedes_nobody_and_removes_nothing(
    drive, monkeypatch, capsys
):
    running = Process(drive, "anna").start()
    wait_until(lambda: newest_checkpoint(drive, "anna"))
    on_its_way = folder_of(drive, "anna") / ".new-0123456789abcdef"
    on_its_way.write_text("half of a file")

    # It has done as many rounds as this start asks for.
    assert sapo.main(to_environ(running.settings | {"MAX_ROUNDS": 2})) == 0
    assert "already finished" in capsys.readouterr().out
    assert not (folder_of(drive, "anna") / "model").exists()

    # A start that cannot use the checkpoints is refused before it registers.
    monkeypatch.setattr(sapo, "load_checkpoint", Mock(side_effect=ValueError("damaged")))
    assert sapo.main(to_environ(running.settings)) == 2
    assert "cannot be used" in capsys.readouterr().out
    assert len(sessions_of(drive, "anna")) == 1
    assert on_its_way.exists()

    # The running process goes on, and whatever was left over goes at its end.
    before = rounds_of(drive, "anna")
    wait_until(lambda: len(rounds_of(drive, "anna")) > len(before))
    assert running.send(signal.SIGINT).wait_for_exit(30) == 130
    assert not on_its_way.exists()


# -------- S5: engines and signals -----------------------------------------------------------------

STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"}


@pytest.mark.parametrize("environ, node_id, auto_role", [
    ({**STEP, "SLURM_PROCID": "0"}, "node_0", "coordinator"),
    ({**STEP, "SLURM_PROCID": "2", "RANK": "7"}, "node_2", "worker"),
    ({**STEP, "SLURM_PROCID": "2", "SLURM_STEP_ID": "123456789"}, "node_2", "worker"),
    ({**STEP, "SLURM_PROCID": "1", "SLURM_ARRAY_TASK_ID": "4"}, "node_4_1", "worker"),
    ({"SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "4"}, "node_4", "worker"),
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
    env, _ = sapo.read_environment(environ)
    assert re.fullmatch(node_id, env["NODE_ID"])
    assert env["NODE_ROLE"] == "worker"

    env, _ = sapo.read_environment(environ | {"NODE_ROLE": "auto"})
    assert env["NODE_ROLE"] == auto_role

    env, _ = sapo.read_environment(environ | {"NODE_ID": "anna"})
    assert env["NODE_ID"] == "anna", "a name that was set is kept"


def test_S5_sigterm_and_sigusr1_stop_in_order_and_requeued_tasks_resume_under_their_names(drive):
    signals = {"coordinator": signal.SIGTERM, "node_1": signal.SIGTERM, "node_2": signal.SIGUSR1}
    workers = ["node_1", "node_2"]
    engine = {**STEP, "NODE_ROLE": "auto", "NODE_ID": None, "ROUND_ADVANCE": "completion"}
    swarm = []
    for rank, name in enumerate(signals):
        swarm.append(Process(drive, name, **engine, SLURM_PROCID=rank).start())
    wait_until(lambda: min(len(rounds_of(drive, node_id)) for node_id in workers) >= 4)

    # Each process finishes its round, saves and says goodbye.
    for process in swarm:
        process.send(signals[process.name])
    assert [process.wait_for_exit(30) for process in swarm] == [130] * 3
    assert [read_heartbeat(drive, name)["state"] for name in signals] == ["stopped"] * 3
    saved = {}
    for node_id in workers:
        saved[node_id] = newest_checkpoint(drive, node_id)
        assert saved[node_id] == rounds_of(drive, node_id)[-1], "a round was lost"

    # The engine starts the same tasks again.
    for process in swarm:
        process.settings["MAX_ROUNDS"] = current_round(drive) + 4
        process.start()
    assert [process.wait_for_exit() for process in swarm] == [0] * 3
    assert [process.resumed_from for process in swarm[1:]] == [*saved.values()]
    registered = [name.split(".")[1] for name in sessions_of(drive)]
    assert sorted(registered) == sorted([*signals] * 2), "a task came back under another name"


# -------- L5, F3: runs that repeat, also after SIGKILL --------------------------------------------

LEARNING = {
    **WARM, "LEARNING_RATE": 0.001, "NUM_TRAIN_SAMPLES": 4, "EXTERNAL_FILTER": True, "MAX_ROUNDS": 30,
}  # fmt: skip
# In these rounds nobody publishes before the last stage, and each node reads three of four peers.
FIVE_NODES = {
    **LEARNING, "LOCAL_NODES": 5, "MAX_STAGES": 2, "ROLLOUT_PUBLISH_FREQUENCY": "round",
    "FETCH_MAX_PEERS": 3, "MAX_ROUNDS": 12, "NUM_TRAIN_SAMPLES": 2,
}  # fmt: skip


@functools.cache
def undisturbed_drive(parent: Path, num_nodes: int) -> Path:
    """The shared folder of a run of LEARNING or FIVE_NODES. It is made once."""
    settings = LEARNING if num_nodes == 1 else FIVE_NODES
    process = Process(parent / f"undisturbed_{num_nodes}", "n", **settings).start()
    assert process.wait_for_exit() == 0, process.output
    return process.drive


@pytest.fixture
def undisturbed(request, tmp_path_factory, drive) -> Path:
    """The folder of an undisturbed run of this many nodes. `drive` gets its warm start."""
    undisturbed = undisturbed_drive(tmp_path_factory.getbasetemp(), request.param)
    shutil.copytree(undisturbed / "warmstart", drive / "warmstart")
    return undisturbed


def assert_equal_runs(drive: Path, undisturbed: Path) -> None:
    """Rewards and metrics, rollouts and checkpoints of the two runs are equal bit for bit."""

    def rollouts(folder):
        texts = {}
        for path in folder.rglob("rollouts/*.json"):
            text = re.sub(r'"timestamp": [\d.]+', "", path.read_text())
            texts[path.relative_to(folder)] = text
        return texts

    def checkpoints(folder):
        return [path.read_bytes() for path in sorted(folder.rglob("checkpoints/*"))]

    metrics = repeatable_metrics(drive)
    assert metrics == repeatable_metrics(undisturbed)
    assert len({row["reward"] for row in metrics.values()}) > 3
    assert max(row["grad_norm"] for row in metrics.values()) > 0, "nothing was learned"
    assert rollouts(drive) == rollouts(undisturbed)
    assert checkpoints(drive) == checkpoints(undisturbed)
    assert len(checkpoints(drive)) == 2


@pytest.mark.parametrize("undisturbed", [5], indirect=True)
def test_L5_two_runs_of_one_command_are_equal_bit_for_bit(drive, undisturbed):
    settings = Process(drive, "n", **FIVE_NODES).settings
    environ = os.environ | to_environ(settings) | {"PYTHONHASHSEED": "7"}
    command = [sys.executable, sapo.__file__]
    subprocess.run(command, env=environ, timeout=120, check=True, capture_output=True)
    assert_equal_runs(drive, undisturbed)


@pytest.mark.parametrize("undisturbed", [1, 5], indirect=True)
def test_F3_a_process_that_is_alone_and_killed_at_random_moments_repeats_the_undisturbed_run(
    drive, undisturbed
):
    expected = repeatable_metrics(undisturbed)
    node_ids = sorted({node_id for _, _, node_id in expected})
    settings = LEARNING if len(node_ids) == 1 else FIVE_NODES
    process = Process(drive, "n", **settings)
    observer = Observer(drive)
    rng = random.Random(1)

    def num_rewards():
        return len(rounds_of(drive, node_ids[0]))

    # Kill it six times, twice of them soon after its start.
    for kill in range(6):
        process.start().wait_until_registered()
        if kill % 3 > 0:
            rounds = num_rewards() + rng.randrange(1, 3)
            wait_until(lambda: num_rewards() >= rounds)  # noqa: B023
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        observer.check()
    assert rounds_of(drive, node_ids[0])[-1] < settings["MAX_ROUNDS"] - 1

    # It ends like a run that was never killed. What a kill in the middle of a write left goes, too.
    (folder_of(drive, node_ids[0]) / "checkpoints/.new-0123456789abcdef").write_text("x")
    assert process.start().wait_for_exit() == 0
    assert process.resumed_from is not None
    observer.check_that_all_is_complete()
    assert_equal_runs(drive, undisturbed)

    # A round that was repeated has several rows in the log; the last one counts.
    for node_id in node_ids:
        logged = {
            (row["round"], row["stage"]): row["my_reward"] for row in read_log(drive, node_id)
        }
        for (round_, stage), reward in logged.items():
            assert reward == expected[round_, stage, node_id]["reward"]
        assert len(logged) == len(expected) / len(node_ids)


def test_F3_in_a_swarm_a_nodes_total_counts_each_of_its_rewards_once_whatever_was_repeated(drive):
    store = play(drive, "coordinator")
    process = Process(drive, "n", **WARM, LEARNING_RATE=0.003, NUM_TRAIN_SAMPLES=8, MAX_ROUNDS=7)
    process.settings["NUM_TRANSPLANT_TREES"] = 0

    def open_round(t):
        store.move_marker("open", "coordinator", t)
        wait_until(lambda: t in rounds_of(drive, "n"))

    def assert_each_counts_once():
        rewards = [row["reward"] for row in repeatable_metrics(drive).values()]
        assert read_log(drive, "n")[-1]["total_reward"] == pytest.approx(sum(rewards))

    # It is killed after its reward of round 4, and its checkpoint is that of round 2: the reward of
    # a repeated round 4 differs from the one that is published.
    process.start()
    for t in range(5):
        open_round(t)
    process.kill()
    process.start()
    wait_until(lambda: "n 4/7 reward" in process.output)
    time.sleep(0.3)  # until its log is written
    assert_each_counts_once()

    # The same, but the clock goes on while it starts, so that the round is not repeated.
    process.kill()
    process.start().wait_until_registered()
    assert process.resumed_from == 2
    for t in (5, 6):
        open_round(t)
    assert process.wait_for_exit() == 0
    assert_each_counts_once()


def test_F3_F1_F7_a_swarm_survives_forty_kills_loses_nothing_and_every_path_has_one_writer(drive):
    """A coordinator and three workers in rounds of 0.4 s. They are killed in random order, some of
    them while they start."""
    settings = {**WARM, "ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 0.4}
    settings |= {"FETCH_TIMEOUT_SECONDS": 1, "CHECKPOINT_INTERVAL": 2, "STALE_AFTER_SECONDS": 5}
    names = ["w0", "w1", "w2"]
    workers = [Process(drive, name, **settings) for name in names]
    swarm = [*workers, Process(drive, "coordinator", **settings)]
    swarm[0].start().wait_until_registered()  # the first one begins the experiment alone
    for process in swarm[1:]:
        process.start()
    observer = Observer(drive)
    rng = random.Random(2)

    checkpoints = dict.fromkeys(names)  # worker -> round of its newest checkpoint
    published = {name: [] for name in names}  # worker -> rounds that its earlier starts published
    resumes = 0

    def newly_published(name):
        """Rounds of which this worker published rollouts since its latest start."""
        rounds = rounds_of(drive, name, "rollouts")
        return [round_ for round_ in rounds if round_ not in published[name]]

    def check_ended_worker(process) -> bool:
        """It went on from its newest checkpoint, and of the rounds that it published only the last
        may lack its reward. Returns whether it had resumed from a checkpoint."""
        name = process.name
        rounds = newly_published(name)
        assert {*rounds[:-1]} <= {*rounds_of(drive, name)}, f"{name}: {rounds}"
        if process.is_registered():
            assert process.resumed_from == checkpoints[name], process.output[-2000:]
        published[name] += rounds
        checkpoints[name] = newest_checkpoint(drive, name)
        return process.resumed_from is not None

    # Kill: one in five at any moment, one in five once it has registered, the others once they
    # have published.
    last_round = 0
    for kill in range(40):
        process = rng.choice(swarm)
        is_worker = process in workers
        if kill % 5 > 0:
            process.wait_until_registered()
        if kill % 5 > 1 and is_worker:
            wait_until(lambda: newly_published(process.name))  # noqa: B023
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        observer.check()
        assert current_round(drive) >= last_round
        last_round = current_round(drive)
        if is_worker:
            resumes += check_ended_worker(process)
        process.start()

    # Kill all of them, and let them run to the end.
    for process in swarm:
        process.kill()
        if process in workers:
            resumes += check_ended_worker(process)
    last_round = current_round(drive) + 7
    for process in swarm:
        process.settings["MAX_ROUNDS"] = last_round + 1
        process.start()
    assert [process.wait_for_exit() for process in swarm] == [0] * 4

    for process in workers:
        resumes += check_ended_worker(process)
        assert rounds_of(drive, process.name)[-1] == last_round
        assert newest_checkpoint(drive, process.name) == last_round
    observer.check_that_all_is_complete()
    assert resumes >= 10, "hardly a start had a checkpoint to go on from"
    rewarded = {round_ for name in names for round_ in rounds_of(drive, name)}
    assert len(rewarded) > last_round / 2, "the swarm hardly worked"

    # Each round counts once in a node's total.
    metrics = repeatable_metrics(drive)
    for name in names:
        rewards = [row["reward"] for (*_, node_id), row in metrics.items() if node_id == name]
        total = read_log(drive, name)[-1]["total_reward"]
        assert total == pytest.approx(sum(rewards))
        assert total > 0
    assert_one_writer_of_each_path(drive)


def assert_one_writer_of_each_path(drive: Path) -> None:
    """No two nodes have even tried to make one folder or to write one file."""
    writers = {}  # path -> names of the nodes
    for line in (drive.parent / "writes").read_text().splitlines():
        name, path = line.split(" ", 1)
        if path.startswith(str(drive)):
            writers.setdefault(path, set()).add(name)
    assert {path: names for path, names in writers.items() if len(names) > 1} == {}
    for path in ("rollouts", "heartbeat.json", "logs/metrics.jsonl"):
        assert writers[str(folder_of(drive, "w1") / path)] == {"w1"}
    assert len(writers) > 100
