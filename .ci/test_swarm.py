"""Proofs of the swarm's promises, with real processes in a real folder: S1 keeping together,
S2 late and missing nodes, S3 waiting for peers, S4 two processes of one name, S5 engines and
signals, F3 SIGKILL at any moment, L5 runs that repeat bit for bit, F7 one maker and one writer."""

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
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import coordinator
import drive_store
import grpo
import sapo
from drive_store import DriveStore

ROOT = Path(__file__).resolve().parent.parent
QUICK = {  # nothing is learned; only the order of events matters
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "TASKS": "small_products", "WARM_START_STEPS": 0,
    "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "EXTERNAL_FILTER": False,
    "CHECKPOINT_INTERVAL": 3, "MAX_ROUNDS": 10**5, "FETCH_TIMEOUT_SECONDS": 20,
}  # fmt: skip
LEARNING = {
    "WARM_START_STEPS": 60, "ANSWER_TAG_SHARE": 0.9, "LEARNING_RATE": 0.001, "MAX_ROUNDS": 40,
    "NUM_TRAIN_SAMPLES": 4, "EXTERNAL_FILTER": True,
}  # fmt: skip

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
    """Append "NAME PATH" to a file for every attempt of this process to make a folder, and for
    every path that it writes, renames or deletes."""

    def record(function, count):
        def recording(*args, **kwargs):
            is_read = function is open_ and not args[1] & os.O_CREAT
            for path in () if is_read else args[:count]:
                with file.open("a") as log:
                    log.write(f"{name} {os.path.abspath(path)}\n")
            return function(*args, **kwargs)

        return recording

    open_ = os.open
    for function, count in ((os.mkdir, 1), (os.replace, 2), (os.unlink, 1), (os.open, 1)):
        setattr(os, function.__name__, record(function, count))


def run_forked(environ: dict, log: Path, patch=None):
    """Do what `python sapo.py` does, in a session of its own and with its output in a file.

    patch: a function that changes the program in this process first."""
    os.setsid()
    if patch:
        patch()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    record_writes(log.parent / "writes", log.name.split(".")[0])
    sys.exit(sapo.main(environ))


class Process:
    """A worker or the coordinator. It may be started again; `log`, `output` and `resumed_from` are
    those of its latest start."""

    def __init__(self, drive: Path, name: str, **settings):
        role = {"NODE_ROLE": name} if name == "coordinator" else {}
        self.settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ID": name, **role, **settings}
        self.drive = drive
        self.name = name

    def start(self, patch=None):
        self.log = self.drive.parent / f"{self.name}.{len(CHILDREN)}.log"
        self.sessions_before = len(session_files(self.drive, self.name))
        arguments = (to_environ(self.settings), self.log, patch)
        self.child = FORK_SERVER.Process(target=run_forked, args=arguments)
        self.child.start()
        CHILDREN.append(self.child)
        return self

    def is_registered(self) -> bool:
        return len(session_files(self.drive, self.name)) > self.sessions_before

    def wait_until_registered(self):
        wait_until(lambda: self.is_registered() or not self.child.is_alive())
        assert self.is_registered(), self.output
        return self

    def send(self, number: int):
        os.kill(self.child.pid, number)
        return self

    def kill(self):
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


# -------- The files that they leave ---------------------------------------------------------------


def experiment_dir(drive: Path) -> Path:
    return drive / "experiments/default"


def session_files(drive: Path, name="") -> list[str]:
    """Names of the session files of a process, or of all."""
    return [path.name for path in experiment_dir(drive).glob(f"board/session.{name}*")]


def rounds_of(drive: Path, node_id: str, kind="rewards") -> list[int]:
    """Rounds for which this node has a file of stage 0, ascending."""
    paths = experiment_dir(drive).glob(f"nodes/{node_id}/{kind}/*.stage_0.json")
    return sorted(int(path.name[6:12]) for path in paths)


def opened_rounds(drive: Path) -> dict[str, int]:
    """{node_id: the newest round that it has opened}."""
    names = [path.name for path in experiment_dir(drive).glob("board/open.*")]
    return {name.split(".")[1]: int(name.split(".")[2]) for name in names}


def current_round(drive: Path) -> int:
    return max(opened_rounds(drive).values(), default=-1)


def latest_checkpoint_round(drive: Path, process: str) -> int | None:
    paths = experiment_dir(drive).glob(f"nodes/{process}/checkpoints/*.safetensors")
    return max((int(path.name[6:12]) for path in paths), default=None)


def read_heartbeat(drive: Path, node_id: str) -> dict:
    return json.loads((experiment_dir(drive) / f"nodes/{node_id}/heartbeat.json").read_bytes())


def read_log(drive: Path, log: str) -> list[dict]:
    """The rows of a log, such as "n_0/metrics.jsonl"."""
    node_id, name = log.split("/")
    text = (experiment_dir(drive) / "nodes" / node_id / "logs" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def count_log_lines(drive: Path, log: str) -> int:
    """Lines in the logs of this name, of all nodes."""
    paths = experiment_dir(drive).glob(f"nodes/*/logs/{log}")
    return sum(path.read_text().count("\n") for path in paths)


def repeatable_metrics(drive: Path) -> dict:
    """{(round, stage, node_id): contents of the reward file without times}."""
    metrics = {}
    for path in experiment_dir(drive).glob("nodes/*/rewards/*.json"):
        row = json.loads(path.read_bytes())
        kept = {name: x for name, x in row.items() if not re.search("seconds|time", name)}
        metrics[row["round"], row["stage"], row["node_id"]] = kept
    return metrics


def play(drive: Path, *node_ids) -> DriveStore:
    """A store through which a test plays these nodes. They have just registered."""
    drive.mkdir(exist_ok=True)
    store = DriveStore(drive, "default")
    store.create({"layout": drive_store.LAYOUT, "maker": node_ids[0]})
    for node_id in node_ids:
        store.create_node(node_id)
    store.register([*node_ids], {})
    return store


def submit_reward(store: DriveStore, round_: int, node_id: str):
    store.publish("rewards", node_id, round_, 0, {"reward": 0.5})


class Observer:
    """Checks at every call that nothing published has changed or gone and, in a swarm, that the
    current round has not decreased. (A process that is alone repeats rounds.)"""

    PUBLISHED = "config.json nodes/*/rewards/*.json nodes/*/rollouts/*.json".split()

    def __init__(self, drive: Path, is_swarm: bool):
        self.drive = drive
        self.is_swarm = is_swarm
        self.files = {}  # path -> bytes
        self.current_round = -1

    def check(self):
        for pattern in self.PUBLISHED:
            for path in experiment_dir(self.drive).glob(pattern):
                data = path.read_bytes()
                assert self.files.setdefault(path, data) == data, f"{path} has changed"
        assert all(path.exists() for path in self.files)

        before = self.current_round
        self.current_round = current_round(self.drive)
        assert before <= self.current_round or not self.is_swarm

    def check_that_all_is_complete(self):
        """Every file can be parsed, every reward has its rollouts, and nothing is left over."""
        self.check()
        assert not [*self.drive.rglob(".*")], "unfinished files of killed processes"
        for path in self.drive.rglob("*.json*"):
            text = path.read_text()
            for each in text.splitlines() if path.suffix == ".jsonl" else [text]:
                assert isinstance(json.loads(each), dict), path

        paths = {str(path) for path in self.files}
        rewards = {path for path in paths if "/rewards/" in path}
        assert rewards
        assert {path.replace("/rewards/", "/rollouts/") for path in rewards} <= paths


# -------- S1: keeping together --------------------------------------------------------------------


@pytest.mark.parametrize("with_coordinator", [False, True])
def test_S1_workers_keep_together_with_or_without_a_coordinator_and_learn_from_one_another(
    drive, with_coordinator
):
    workers = ["w0", "w1", "w2"]
    names = ["coordinator", *workers] if with_coordinator else workers
    settings = {"MAX_ROUNDS": 12, "NUM_WORKERS": 3, "COORDINATOR_ROUND_INTERVAL": 60}
    swarm = [Process(drive, name, **settings).start() for name in names]
    assert [process.wait_for_exit() for process in swarm] == [0] * len(names)

    # Each worker takes part in every round and, after the first, draws groups of that very round.
    for name in workers:
        assert rounds_of(drive, name) == [*range(12)]
        for row in read_log(drive, f"{name}/metrics.jsonl")[1:]:
            assert row["external_ages"] == [0, 0]

    # A coordinator opens every round and trains nothing.
    if with_coordinator:
        assert opened_rounds(drive) == {"coordinator": 11}
        folders = {path.name for path in (experiment_dir(drive) / "nodes/coordinator").iterdir()}
        assert folders == {"heartbeat.json", "logs", "winners"}


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
    assert not experiment_dir(drive).exists()
    store = play(drive, "n1")
    process.wait_until_registered()
    time.sleep(0.4)
    assert current_round(drive) == 0, "a living worker may still be downloading its model"

    # After the first reward rounds advance by time, whether or not there are rewards.
    submit_reward(store, 0, "n1")
    wait_until(lambda: current_round(drive) == 3)
    time.sleep(0.3)
    assert process.child.is_alive(), "the last round waits for its worker"

    submit_reward(store, 3, "n1")
    assert process.wait_for_exit() == 0
    assert read_heartbeat(drive, "coordinator")["state"] == "done"
    winners = experiment_dir(drive) / "nodes/coordinator/winners/round_000003.json"
    assert json.loads(winners.read_bytes()) == {"n1": 0.5}


@pytest.mark.parametrize("strategy", ["completion", "hybrid"])
def test_S1_the_coordinator_waits_for_the_living_and_after_each_start_for_the_expected_workers(
    drive, strategy
):
    settings = {"NUM_WORKERS": 2, "COORDINATOR_ROUND_INTERVAL": 3600, "ROUND_ADVANCE": strategy}
    store = play(drive, "n1")
    process = Process(drive, "coordinator", **settings).start().wait_until_registered()

    # Two workers are expected, and one has come.
    submit_reward(store, 0, "n1")
    time.sleep(0.4)
    assert current_round(drive) == 0
    play(drive, "n2")
    submit_reward(store, 0, "n2")
    wait_until(lambda: current_round(drive) == 1)

    # n1 is alive and has not submitted. When it exits it is not waited for.
    submit_reward(store, 1, "n2")
    time.sleep(0.4)
    assert current_round(drive) == 1
    store.write_heartbeat("n1", store.sessions["n1"], 1, "stopped")
    wait_until(lambda: current_round(drive) == 2)

    # All of them are stopped, n1 before round 2 and n2 before round 3, and started again. Round 3
    # is not opened before n1 has come.
    submit_reward(store, 2, "n2")
    assert process.send(signal.SIGINT).wait_for_exit() == 130
    play(drive, "n2")
    process.start().wait_until_registered()
    time.sleep(0.4)
    assert current_round(drive) == 2
    play(drive, "n1")
    submit_reward(store, 2, "n1")
    wait_until(lambda: current_round(drive) == 3)


# -------- S2: late and missing nodes --------------------------------------------------------------


def test_S2_a_node_that_comes_late_or_was_away_joins_the_current_round_and_names_the_missed_ones(
    drive,
):
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
    missed = []
    skips = [row for row in read_log(drive, "late/training_events.jsonl") if row["event"] == "skip"]
    for skip in skips:
        first, last = map(int, re.match(r"rounds (\d+) to (\d+) ", skip["text"]).groups())
        missed += range(first, last + 1)
        assert skip["text"] in late.output
    worked = rounds_of(drive, "late")
    assert {0, 1, 2, 3, suspended_at + 1, suspended_at + 2} <= {*missed}
    assert sorted(missed + worked) == [*range(worked[-1] + 1)]


def test_S2_workers_replace_a_dead_coordinator_and_it_takes_over_again_when_it_is_back(drive):
    settings = {"ROUND_ADVANCE": "completion", "STALE_AFTER_SECONDS": 2, "NUM_WORKERS": 2}
    process, *_ = [Process(drive, name, **settings).start() for name in ("coordinator", "w0", "w1")]
    wait_until(lambda: current_round(drive) >= 5)
    process.kill()
    assert opened_rounds(drive).keys() == {"coordinator"}

    # The workers open rounds themselves, but not before STALE_AFTER_SECONDS.
    killed_at = read_heartbeat(drive, "coordinator")["time"]
    wait_until(lambda: len(opened_rounds(drive)) > 1)
    assert time.time() - killed_at > 2
    before = current_round(drive)
    wait_until(lambda: min(rounds_of(drive, name)[-1] for name in ("w0", "w1")) > before + 3)

    # A new coordinator goes on from the current round, and no worker opens another one.
    process.start()
    wait_until(lambda: opened_rounds(drive)["coordinator"] > before)
    wait_until(lambda: opened_rounds(drive)["coordinator"] == current_round(drive))
    first = current_round(drive) + 1
    wait_until(lambda: current_round(drive) > first + 3)
    opened = opened_rounds(drive)
    assert opened.pop("coordinator") > first
    assert max(opened.values()) <= first


def test_S2_a_step_that_takes_longer_than_STALE_AFTER_SECONDS_does_not_look_dead(
    tmp_path, monkeypatch
):
    beats = []
    batches = {}

    def slow(name, original):
        """Each batch takes 0.25 s, and memory is for four completions at once."""

        def batch(model, rows, *args, **kwargs):
            if name == "sample_completions" and args[0].shape[1] > 4:
                raise torch.OutOfMemoryError
            if beats:  # it has registered
                batches[name] = batches.get(name, 0) + 1
                time.sleep(0.25)
            return original(model, rows, *args, **kwargs)

        monkeypatch.setattr(grpo, name, batch)

    slow("sample_completions", grpo.sample_completions)
    slow("completion_logprobs_shared_prompt", grpo.completion_logprobs_shared_prompt)
    write_heartbeat = DriveStore.write_heartbeat

    def recording(*args):
        beats.append(time.monotonic())
        write_heartbeat(*args)

    monkeypatch.setattr(DriveStore, "write_heartbeat", recording)
    settings = {**QUICK, **LEARNING, "GDRIVE_PATH": tmp_path, "NODE_ID": "n", "MAX_ROUNDS": 1}
    settings |= {"STALE_AFTER_SECONDS": 1, "MICRO_BATCH_SIZE": 1, "NUM_TRAIN_SAMPLES": 8}
    assert sapo.main(to_environ(settings)) == 0
    assert len(batches) == 2
    assert min(batches.values()) >= 4, "a step takes longer than a second"
    assert max(after - before for before, after in zip(beats, beats[1:], strict=False)) < 1


# -------- S3: waiting for peers -------------------------------------------------------------------


@pytest.mark.parametrize("frequency", ["stage", "round"])
def test_S3_a_round_waits_for_peers_once_and_only_for_those_that_published_the_round_before(
    drive, frequency
):
    """`slow` has published round 1, `dead` round 2, and `silent`, which is alive, nothing."""
    store = play(drive, "silent", "slow", "dead")
    for node_id, round_ in (("slow", 1), ("dead", 2)):
        for stage in range(3):
            rollouts = {"format": 1, "rollouts": {}}
            store.publish("rollouts", node_id, round_, stage, rollouts)
    [session] = experiment_dir(drive).glob("board/session.dead.*")
    session.rename(session.with_name("session.dead.1000000000000-00000000"))

    settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ID": "n", "LOCAL_NODES": 2}
    settings |= {"MAX_STAGES": 3, "MAX_ROUNDS": 4, "FETCH_TIMEOUT_SECONDS": 1.2}
    settings |= {"ROLLOUT_PUBLISH_FREQUENCY": frequency}
    assert sapo.main(to_environ(settings)) == 0

    # Seconds that each round waited. If each stage waited anew, it would be 3.6 s.
    waits = [0.0] * 4
    for row in read_log(drive, "n_0/metrics.jsonl") + read_log(drive, "n_1/metrics.jsonl"):
        waits[row["round"]] += row["wait_seconds"]
    # Round 0 waits for `silent`, and round 2 for `slow`.
    for round_, is_waiting in enumerate((True, False, True, False)):
        low, high = (1.1, 2.2) if is_waiting else (0, 1.0)
        assert low <= waits[round_] < high, f"round {round_}: {waits}"


# -------- S4: two processes of one name -----------------------------------------------------------


def test_S4_a_coordinator_that_does_not_see_its_own_registration_yet_goes_on(drive, monkeypatch):
    board = DriveStore.board
    listings = []

    def stale_listing(store):
        listings.append(board(store))
        if len(listings) < 4:  # it shows after a while
            listings[-1].sessions.pop("coordinator", None)
        return listings[-1]

    worker = play(drive, "n1")
    submit_reward(worker, 0, "n1")
    monkeypatch.setattr(DriveStore, "board", stale_listing)
    settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ROLE": "coordinator", "MAX_ROUNDS": 1}
    assert sapo.main(to_environ(settings)) == 0
    assert len(listings) >= 3


@pytest.mark.parametrize("name", ["twin", "coordinator"])
def test_S4_of_two_processes_of_one_name_the_older_says_so_and_stops_with_status_3(drive, name):
    worker = play(drive, "n1") if name == "coordinator" else None
    older = Process(drive, name).start().wait_until_registered()
    if name == "twin":
        wait_until(lambda: rounds_of(drive, name))
    newer = Process(drive, name).start().wait_until_registered()
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


def test_S4_a_start_that_ends_before_it_registers_leaves_the_running_process_alone(
    drive, monkeypatch, capsys
):
    running = Process(drive, "anna").start().wait_until_registered()
    wait_until(lambda: latest_checkpoint_round(drive, "anna"))
    temp = experiment_dir(drive) / "nodes/anna/checkpoints/.new-0123456789abcdef"
    temp.write_text("on its way")

    # The checkpoints cannot be used, or MAX_ROUNDS is smaller and all is done.
    with monkeypatch.context() as patch:
        patch.setattr(sapo, "load_checkpoint", lambda *_: int("damaged"))
        assert sapo.main(to_environ(running.settings)) == 2
    assert "cannot be used" in capsys.readouterr().out
    assert sapo.main(to_environ(running.settings | {"MAX_ROUNDS": 2})) == 0
    assert "already finished" in capsys.readouterr().out
    assert temp.exists()

    before = current_round(drive)
    wait_until(lambda: current_round(drive) > before + 1)
    assert running.send(signal.SIGINT).wait_for_exit(30) == 130


# -------- S5: engines and signals -----------------------------------------------------------------


STEP = {"SLURM_STEP_ID": "0"}  # in a job step


@pytest.mark.parametrize("environ, node_id, auto_role", [
    (STEP | {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, "node_0", "coordinator"),
    (STEP | {"SLURM_PROCID": "2", "RANK": "7"}, "node_2", "worker"),
    ({"SLURM_PROCID": "0"}, "node_[0-9a-f]{8}", "worker"),  # every interactive shell has it
    ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, "node_[0-9a-f]{8}", "worker"),
    (STEP | {"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "0"}, "node_4", "worker"),
    (STEP | {"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "node_4_1", "worker"),
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
    assert env.get("NODE_ROLE", "worker") == "worker"

    env, _ = sapo.read_environment(environ | {"NODE_ROLE": "auto"})
    assert env["NODE_ROLE"] == auto_role

    env, _ = sapo.read_environment(environ | {"NODE_ID": "anna"})
    assert env["NODE_ID"] == "anna", "a name that was set is kept"


def test_S5_sigterm_and_sigusr1_stop_in_order_and_requeued_tasks_resume_under_their_names(drive):
    signals = {"coordinator": signal.SIGTERM, "node_1": signal.SIGTERM, "node_2": signal.SIGUSR1}
    workers = ["node_1", "node_2"]
    engine = {"NODE_ROLE": "auto", "NODE_ID": None, "ROUND_ADVANCE": "completion"}
    engine |= STEP | {"SLURM_NTASKS": 3}
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
        saved[node_id] = latest_checkpoint_round(drive, node_id)
        assert saved[node_id] == rounds_of(drive, node_id)[-1], "a round was lost"

    # The engine starts the same tasks again.
    for process in swarm:
        process.settings["MAX_ROUNDS"] = current_round(drive) + 4
        process.start()
    assert [process.wait_for_exit() for process in swarm] == [0] * 3
    assert [process.resumed_from for process in swarm[1:]] == [*saved.values()]
    registered = [name.split(".")[1] for name in session_files(drive)]
    assert sorted(registered) == sorted([*signals] * 2), "a task came back under another name"


# -------- L5, F3: runs that repeat, also after SIGKILL --------------------------------------------


def learning_process(drive: Path, num_nodes: int) -> Process:
    return Process(drive, "n", **LEARNING, LOCAL_NODES=num_nodes)


@functools.cache
def undisturbed_drive(parent: Path, num_nodes: int) -> Path:
    process = learning_process(parent / f"undisturbed_{num_nodes}", num_nodes).start()
    assert process.wait_for_exit() == 0, process.output
    return process.drive


@pytest.fixture(params=[1, 2])
def undisturbed(request, tmp_path_factory, drive) -> Path:
    """The folder of an undisturbed run of this many nodes. `drive` gets its warm start."""
    undisturbed = undisturbed_drive(tmp_path_factory.getbasetemp(), request.param)
    shutil.copytree(undisturbed / "warmstart", drive / "warmstart")
    return undisturbed


def assert_equal_runs(drive: Path, undisturbed: Path):
    """Rewards and metrics, rollouts and checkpoints of the two runs are equal bit for bit."""

    def rollouts(folder):
        texts = {}
        for path in folder.rglob("rollouts/*.json"):
            text = re.sub(r'"timestamp": [\d.]+', "", path.read_text())
            texts[path.relative_to(folder)] = text
        return texts

    def checkpoints(folder):
        return [
            path.read_bytes() for path in sorted(folder.glob("experiments/*/nodes/*/checkpoints/*"))
        ]

    metrics = repeatable_metrics(drive)
    assert metrics == repeatable_metrics(undisturbed)
    assert len({row["reward"] for row in metrics.values()}) > 3
    assert max(row["grad_norm"] for row in metrics.values()) > 0, "nothing was learned"
    assert rollouts(drive) == rollouts(undisturbed)
    assert checkpoints(drive) == checkpoints(undisturbed)
    assert len(checkpoints(drive)) == 2


@pytest.mark.parametrize("undisturbed", [2], indirect=True)
def test_L5_two_runs_of_one_command_are_equal_bit_for_bit(drive, undisturbed):
    environ = os.environ | to_environ(learning_process(drive, 2).settings) | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, ROOT / "sapo.py"], env=environ, timeout=120, check=True)
    assert_equal_runs(drive, undisturbed)


def test_F3_a_process_that_is_alone_and_killed_at_random_moments_repeats_the_undisturbed_run(
    drive, undisturbed
):
    expected = repeatable_metrics(undisturbed)
    node_ids = sorted({node_id for _, _, node_id in expected})
    process = learning_process(drive, len(node_ids))
    observer = Observer(drive, is_swarm=False)
    rng = random.Random(1)

    # Kill it six times, twice of them soon after its start.
    for kill in range(6):
        num_lines = count_log_lines(drive, "metrics.jsonl") + rng.randrange(1, 5) * len(node_ids)
        process.start().wait_until_registered()
        if kill % 3 > 0:
            wait_until(lambda: count_log_lines(drive, "metrics.jsonl") >= num_lines)  # noqa: B023
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        observer.check()

    # A kill in the middle of a write has left half of a file. It ends like a run that was never
    # killed.
    (experiment_dir(drive) / "nodes" / node_ids[0] / ".new-0123456789abcdef").write_text("half")
    process.start()
    assert process.wait_for_exit() == 0
    assert process.resumed_from is not None
    observer.check_that_all_is_complete()
    assert_equal_runs(drive, undisturbed)

    # A round that was repeated has several rows in the log; the last one counts.
    for node_id in node_ids:
        rows = read_log(drive, f"{node_id}/metrics.jsonl")
        rewards = {row["round"]: row["my_reward"] for row in rows}
        assert rewards == {t: expected[t, 0, node_id]["reward"] for t in range(40)}


def test_F3_in_a_swarm_a_nodes_total_counts_each_of_its_rewards_once_whatever_was_repeated(drive):
    store = play(drive, "coordinator")
    settings = {**LEARNING, "LEARNING_RATE": 0.003, "NUM_TRAIN_SAMPLES": 8, "MAX_ROUNDS": 7}
    process = Process(drive, "n", **settings | {"NUM_TRANSPLANT_TREES": 0})

    def open_round(t):
        store.move_marker("open", "coordinator", t)
        wait_until(lambda: t in rounds_of(drive, "n"))

    def assert_each_counts_once():
        rewards = [row["reward"] for row in repeatable_metrics(drive).values()]
        assert read_log(drive, "n/metrics.jsonl")[-1]["total_reward"] == pytest.approx(sum(rewards))

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


def test_F3_a_swarm_of_processes_survives_forty_kills_and_loses_nothing(drive):
    """A coordinator and three workers in rounds of 0.4 s. They are killed in random order, some of
    them while they start."""
    settings = {
        "ROUND_ADVANCE": "time",
        "COORDINATOR_ROUND_INTERVAL": 0.4,
        "STALE_AFTER_SECONDS": 5,
    }
    settings |= {"FETCH_TIMEOUT_SECONDS": 1, "CHECKPOINT_INTERVAL": 2}
    names = ["w0", "w1", "w2"]
    swarm = [Process(drive, name, **settings).start() for name in ("coordinator", *names)]
    workers = swarm[1:]
    observer = Observer(drive, is_swarm=True)
    rng = random.Random(2)

    checkpoints = dict.fromkeys(names)  # worker -> round of its latest checkpoint
    published = {name: [] for name in names}  # worker -> rounds that its earlier starts published
    resumes = 0

    def newly_published(name):
        """Rounds of which this worker published rollouts since its latest start."""
        rounds = rounds_of(drive, name, "rollouts")
        return [round_ for round_ in rounds if round_ not in published[name]]

    def check_ended_worker(process) -> bool:
        """It went on from its latest checkpoint, and of the rounds that it published only the last
        may lack its reward. Returns whether it had resumed from a checkpoint."""
        name = process.name
        rounds = newly_published(name)
        assert {*rounds[:-1]} <= {*rounds_of(drive, name)}, f"{name}: {rounds}"
        if process.is_registered():
            assert process.resumed_from == checkpoints[name], process.output[-2000:]
        published[name] += rounds
        checkpoints[name] = latest_checkpoint_round(drive, name)
        return process.resumed_from is not None

    # Kill: one in five at any moment, one in five once it has registered, the others once they
    # have published.
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
        if is_worker:
            resumes += check_ended_worker(process)
        process.start()

    # Kill all of them, and let them run to the end.
    for process in swarm:
        process.kill()
        if process in workers:
            resumes += check_ended_worker(process)
    last_round = observer.current_round + 7
    for process in swarm:
        process.settings["MAX_ROUNDS"] = last_round + 1
        process.start()
    assert [process.wait_for_exit() for process in swarm] == [0] * 4

    for process in workers:
        resumes += check_ended_worker(process)
        assert rounds_of(drive, process.name)[-1] == last_round
        assert latest_checkpoint_round(drive, process.name) == last_round
    observer.check_that_all_is_complete()
    assert resumes >= 10, "hardly a start had a checkpoint to go on from"
    rewarded = {round_ for name in names for round_ in rounds_of(drive, name)}
    assert len(rewarded) > observer.current_round / 2, "the swarm hardly worked"


# -------- F7: one maker for every folder ----------------------------------------------------------


def test_F1_F7_no_two_processes_write_one_path_or_even_try_to_make_one_folder(drive):
    # w0 begins the experiment. When it shows, a coordinator and three more workers join.
    settings = {"ROUND_ADVANCE": "completion", "STALE_AFTER_SECONDS": 3, "CHECKPOINT_INTERVAL": 2}
    settings |= {"FETCH_TIMEOUT_SECONDS": 1, "WARM_START_STEPS": 4}
    swarm = [Process(drive, "w0", **settings).start().wait_until_registered()]
    for name in ("coordinator", "w1", "w2", "w3"):
        swarm.append(Process(drive, name, **settings).start())

    # Kill one process after another, some while they start, and start each again.
    rng = random.Random(3)
    for i in range(8):
        process = rng.choice(swarm)
        if i % 3:
            process.wait_until_registered()
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.start()
    for process in swarm:
        process.kill()
        process.settings["MAX_ROUNDS"] = current_round(drive) + 5
    for process in swarm:
        process.start()
    for process in swarm:
        assert process.wait_for_exit() == 0, process.output[-2000:]

    # Attempts that failed were recorded, too.
    writers = {}  # path -> names of the processes that tried to make, write or delete it
    for line in (drive.parent / "writes").read_text().splitlines():
        name, path = line.split(" ", 1)
        if path.startswith(str(drive)):
            writers.setdefault(path, set()).add(name)
    assert {path: names for path, names in writers.items() if len(names) > 1} == {}
    for path in ("nodes/w0/rollouts", "nodes/w3/heartbeat.json", "nodes/w3/logs/metrics.jsonl"):
        assert str(experiment_dir(drive) / path) in writers
    assert len(writers) > 100
