"""Proofs of the swarm's promises, with real processes in a real folder: S1 keeping together,
S2 late and missing nodes, S3 waiting for peers, S4 two processes of one name, S5 engines and
signals, F3 SIGKILL at any moment, L5 runs that repeat bit for bit."""

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
from unittest.mock import Mock

import pytest

import coordinator
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


def record_made_folders(file: Path, name: str) -> None:
    """Append "NAME PATH" to a file for every attempt of this process to make a folder."""
    mkdir = os.mkdir

    def recording_mkdir(path, *args, **kwargs):
        with file.open("a") as log:
            log.write(f"{name} {os.path.abspath(path)}\n")
        return mkdir(path, *args, **kwargs)

    os.mkdir = recording_mkdir


def run_forked(environ: dict, log: Path, patch=None):
    """Do what `python sapo.py` does, in a session of its own and with its output in a file.

    patch: a function that changes the program in this process first."""
    os.setsid()
    if patch:
        patch()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    record_made_folders(log.parent / "made_folders", environ.get("NODE_ID", "unnamed"))
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


def session_files(drive: Path, node_id="") -> list[str]:
    return [path.name for path in experiment_dir(drive).glob(f"peers/{node_id}*.json")]


def rounds_of(drive: Path, node_id: str, kind="rewards") -> list[int]:
    """Rounds for which this node has a file of stage 0, ascending."""
    paths = experiment_dir(drive).glob(f"{kind}/{node_id}/*.stage_0.json")
    return sorted(int(path.name[6:12]) for path in paths)


def opened_rounds(drive: Path) -> dict[str, list[int]]:
    """{node_id: the rounds that it opened, ascending}."""
    opened = {}
    for path in sorted(experiment_dir(drive).glob("state/rounds/*.json")):
        round_, node_id, _ = path.name.split(".")
        opened.setdefault(node_id, []).append(int(round_.removeprefix("round_")))
    return opened


def current_round(drive: Path) -> int:
    newest = -1
    for rounds in opened_rounds(drive).values():
        newest = max(newest, *rounds)
    return newest


def latest_checkpoint_round(drive: Path, process: str) -> int | None:
    paths = experiment_dir(drive).glob(f"checkpoints/{process}/*.safetensors")
    return max((int(path.name[6:12]) for path in paths), default=None)


def read_heartbeat(drive: Path, node_id: str) -> dict:
    return json.loads((experiment_dir(drive) / f"heartbeats/{node_id}.json").read_bytes())


def read_log(drive: Path, log: str) -> list[dict]:
    text = (experiment_dir(drive) / "logs" / log).read_text()
    return [json.loads(line) for line in text.splitlines()]


def count_log_lines(drive: Path, log: str) -> int:
    """Lines in the logs of this name, of all nodes."""
    paths = experiment_dir(drive).glob(f"logs/*/{log}")
    return sum(path.read_text().count("\n") for path in paths)


def repeatable_metrics(drive: Path) -> dict:
    """{(round, stage, node_id): contents of the reward file without times and session}."""
    metrics = {}
    for path in experiment_dir(drive).glob("rewards/*/*.json"):
        row = json.loads(path.read_bytes())
        kept = {name: x for name, x in row.items() if not re.search("seconds|time|session", name)}
        metrics[row["round"], row["stage"], row["node_id"]] = kept
    return metrics


def store_of(drive: Path, node_id: str) -> DriveStore:
    """A store through which a test plays this node, which has just registered."""
    store = DriveStore(drive, "default", "by_hand")
    store.create([node_id])
    store.register([node_id], "worker", {})
    return store


def submit_reward(store: DriveStore, round_: int, node_id: str):
    store.submit_reward(round_, 0, node_id, {"reward": 0.5})


class Observer:
    """Checks at every call that no write-once file has changed or gone and that the current round
    has not decreased."""

    WRITE_ONCE = "config.json rewards/*/*.json rollouts/*/*.json state/rounds/* peers/*".split()

    def __init__(self, drive: Path):
        self.drive = drive
        self.files = {}  # path -> bytes
        self.current_round = -1

    def check(self):
        for pattern in self.WRITE_ONCE:
            for path in experiment_dir(self.drive).glob(pattern):
                data = path.read_bytes()
                assert self.files.setdefault(path, data) == data, f"{path} has changed"
        assert all(path.exists() for path in self.files)

        before = self.current_round
        self.current_round = current_round(self.drive)
        assert before <= self.current_round

    def check_that_all_is_complete(self):
        """Every file can be parsed, and every reward has its rollouts."""
        self.check()
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
    for (round_, *_), row in repeatable_metrics(drive).items():
        assert round_ == 0 or row["external_ages"] == [0, 0]

    # A coordinator opens every round and trains nothing.
    if with_coordinator:
        assert opened_rounds(drive) == {"coordinator": [*range(12)]}
    for kind in ("rollouts", "rewards", "checkpoints", "models"):
        assert not [*experiment_dir(drive).glob(f"{kind}/**/coordinator*")]


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
        advance = coordinator.should_advance(strategy, elapsed, 10, list(alive), list(submitted))
        assert advance == bool(is_over), strategy


def test_S1_the_coordinator_holds_round_0_until_the_first_reward_then_goes_by_time_and_ends(drive):
    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 0.05, "MAX_ROUNDS": 4}
    process = Process(drive, "coordinator", **settings).start().wait_until_registered()
    store = store_of(drive, "n1")
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
    winners = json.loads((experiment_dir(drive) / "winners/round_000003.json").read_bytes())
    assert winners == {"n1": 0.5}


@pytest.mark.parametrize("strategy", ["completion", "hybrid"])
def test_S1_the_coordinator_waits_for_all_living_workers_and_in_round_0_for_all_expected_ones(
    drive, strategy
):
    settings = {
        "ROUND_ADVANCE": strategy,
        "NUM_WORKERS": 2,
        "COORDINATOR_ROUND_INTERVAL": 3600,
    }
    Process(drive, "coordinator", **settings).start().wait_until_registered()

    # Two workers are expected, and one has come.
    store = store_of(drive, "n1")
    submit_reward(store, 0, "n1")
    time.sleep(0.4)
    assert current_round(drive) == 0
    store.create(["n2"])
    store.register(["n2"], "worker", {})
    submit_reward(store, 0, "n2")
    wait_until(lambda: current_round(drive) == 1)

    # n1 is alive and has not submitted. When it exits it is not waited for.
    submit_reward(store, 1, "n2")
    time.sleep(0.4)
    assert current_round(drive) == 1
    store.write_heartbeat("n1", store.latest_sessions()["n1"], 1, "stopped")
    wait_until(lambda: current_round(drive) == 2)


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
        missed += range(skip["first"], skip["last"] + 1)
    worked = rounds_of(drive, "late")
    assert {0, 1, 2, 3, suspended_at + 1, suspended_at + 2} <= {*missed}
    assert sorted(missed + worked) == [*range(worked[-1] + 1)]
    assert f"{skips[0]['first']} to {skips[0]['last']} " in late.output


def test_S2_workers_replace_a_dead_coordinator_and_it_takes_over_again_when_it_is_back(drive):
    settings = {"ROUND_ADVANCE": "completion", "STALE_AFTER_SECONDS": 2, "NUM_WORKERS": 2}
    process, *_ = [Process(drive, name, **settings).start() for name in ("coordinator", "w0", "w1")]
    wait_until(lambda: current_round(drive) >= 5)
    process.kill()
    assert opened_rounds(drive).keys() == {"coordinator"}

    # The workers open rounds themselves, but not before STALE_AFTER_SECONDS.
    killed_at = read_heartbeat(drive, "coordinator")["time"]
    markers = wait_until(lambda: [*experiment_dir(drive).glob("state/rounds/*.w?.json")])
    assert min(path.stat().st_mtime for path in markers) - killed_at > 2
    before = current_round(drive)
    wait_until(lambda: min(rounds_of(drive, name)[-1] for name in ("w0", "w1")) > before + 3)

    # A new coordinator goes on from the current round.
    process.start()

    def coordinator_leads():
        newest = current_round(drive)
        return {*opened_rounds(drive)["coordinator"]} >= {*range(newest - 4, newest + 1)}

    wait_until(coordinator_leads)
    later = [round_ for round_ in opened_rounds(drive)["coordinator"] if round_ >= before]
    assert min(later) > before


# -------- S3: waiting for peers -------------------------------------------------------------------


@pytest.mark.parametrize("frequency", ["stage", "round"])
def test_S3_a_round_waits_for_peers_once_and_only_for_those_that_published_the_round_before(
    drive, frequency
):
    """`slow` publishes only the last stage of round 1, `dead` only that of round 2, and `silent`,
    which is alive, nothing."""
    store_of(drive, "silent")
    store = store_of(drive, "slow")
    store.publish_rollouts(1, 2, "slow", {}, {})
    old = {"format": 1, "peer_id": "dead", "round": 2, "stage": 2, "timestamp": 1.0, "rollouts": {}}
    store.create(["dead"])
    store.write_atomic("rollouts/dead/round_000002.stage_2.json", old)
    store.advance_marker("rollouts", "dead", 2, 2)
    store.write_atomic("peers/dead.1000000000000-00000000.json", {"node_id": "dead"})

    settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ID": "n", "LOCAL_NODES": 2}
    settings |= {"MAX_STAGES": 3, "MAX_ROUNDS": 4, "FETCH_TIMEOUT_SECONDS": 1.5}
    settings |= {"ROLLOUT_PUBLISH_FREQUENCY": frequency}
    assert sapo.main(to_environ(settings)) == 0

    # Seconds that each round waited. If each stage waited anew, it would be 4.5 s.
    waits = [0.0] * 4
    for row in read_log(drive, "n_0/metrics.jsonl") + read_log(drive, "n_1/metrics.jsonl"):
        waits[row["round"]] += row["wait_seconds"]
    # Round 0 waits for `silent`, and round 2 for `slow`.
    for round_, is_waiting in enumerate((True, False, True, False)):
        low, high = (1.4, 2.8) if is_waiting else (0, 1.3)
        assert low <= waits[round_] < high, f"round {round_}: {waits}"


# -------- S4: two processes of one name -----------------------------------------------------------


def test_S1_a_coordinator_that_does_not_see_its_own_registration_yet_goes_on(drive, monkeypatch):
    latest_sessions = DriveStore.latest_sessions
    listings = []

    def stale_listing(store):
        sessions = latest_sessions(store)
        listings.append(sessions)
        if len(listings) < 4:  # it shows elsewhere after a while
            sessions.pop("coordinator", None)
        return sessions

    monkeypatch.setattr(DriveStore, "latest_sessions", stale_listing)
    worker = store_of(drive, "n1")
    submit_reward(worker, 0, "n1")
    worker.write_heartbeat("n1", worker.latest_sessions()["n1"], 0, "done")
    settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ROLE": "coordinator", "MAX_ROUNDS": 1}
    assert sapo.main(to_environ(settings)) == 0
    assert len(listings) > 4


@pytest.mark.parametrize("name", ["twin", "coordinator"])
def test_S4_of_two_processes_of_one_name_the_older_says_so_and_stops_with_status_3(drive, name):
    older = Process(drive, name).start().wait_until_registered()
    if name == "twin":
        wait_until(lambda: rounds_of(drive, name))
    newer = Process(drive, name).start().wait_until_registered()
    assert older.wait_for_exit(30) == 3
    assert "newer" in older.output

    # The newer one goes on.
    before = current_round(drive)
    if name == "coordinator":
        submit_reward(store_of(drive, "n1"), 0, "n1")
    wait_until(lambda: current_round(drive) > before)
    assert newer.child.is_alive()
    assert read_heartbeat(drive, name)["state"] == "running"
    assert newer.send(signal.SIGINT).wait_for_exit(30) == 130


def test_S4_processes_of_one_name_and_different_local_nodes_share_no_file(drive):
    two = Process(drive, "anna", LOCAL_NODES=2).start().wait_until_registered()
    one = Process(drive, "anna", LOCAL_NODES=1).start().wait_until_registered()
    wait_until(lambda: all(latest_checkpoint_round(drive, name) for name in ("anna", "anna_0")))
    for process in (two, one):
        assert process.send(signal.SIGINT).wait_for_exit(30) == 130
    folders = {path.parent.name for path in experiment_dir(drive).glob("checkpoints/*/*")}
    assert folders == {"anna", "anna_0"}


def test_S4_a_start_that_is_refused_leaves_the_temporary_files_of_the_running_process(
    drive, monkeypatch, capsys
):
    running = Process(drive, "anna").start().wait_until_registered()
    wait_until(lambda: latest_checkpoint_round(drive, "anna"))
    temp = experiment_dir(drive) / "tmp/anna/on_its_way"
    temp.write_text("x")

    # Its checkpoints cannot be used, so the second start is refused before it registers.
    monkeypatch.setattr(sapo, "load_checkpoint", Mock(side_effect=ValueError("damaged")))
    assert sapo.main(to_environ(running.settings)) == 2
    assert "cannot be used" in capsys.readouterr().out
    assert temp.exists()
    assert running.send(signal.SIGINT).wait_for_exit(30) == 130


# -------- S5: engines and signals -----------------------------------------------------------------


@pytest.mark.parametrize("environ, node_id, auto_role", [
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, "node_0", "coordinator"),
    ({"SLURM_PROCID": "2", "RANK": "7"}, "node_2", "worker"),
    ({"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "0"}, "node_4", "worker"),
    ({"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "node_4_1", "worker"),
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
    engine = {
        "NODE_ROLE": "auto",
        "NODE_ID": None,
        "SLURM_NTASKS": 3,
        "ROUND_ADVANCE": "completion",
    }
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
    registered = [name.split(".")[0] for name in session_files(drive)]
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
        for path in folder.rglob("rollouts/*/*.json"):
            text = re.sub(r'"timestamp": [\d.]+', "", path.read_text())
            texts[path.relative_to(folder)] = text
        return texts

    def checkpoints(folder):
        return [path.read_bytes() for path in sorted(folder.glob("experiments/*/checkpoints/*/*"))]

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
    observer = Observer(drive)
    rng = random.Random(1)

    # Kill it eight times, twice of them soon after its start.
    for kill in range(8):
        num_lines = count_log_lines(drive, "metrics.jsonl") + rng.randrange(1, 5) * len(node_ids)
        process.start().wait_until_registered()
        if kill % 4 > 0:
            wait_until(lambda: count_log_lines(drive, "metrics.jsonl") >= num_lines)  # noqa: B023
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        observer.check()

    # The next start deletes a temporary file that a kill in the middle of a write left.
    left_over = experiment_dir(drive) / "tmp" / node_ids[0] / "left_over"
    left_over.write_text("half of a file")
    process.start()
    wait_until(lambda: not left_over.exists())

    # It ends like a run that was never killed.
    assert process.wait_for_exit() == 0
    assert process.resumed_from is not None
    observer.check_that_all_is_complete()
    assert_equal_runs(drive, undisturbed)

    # A round that was repeated has several rows in the log; the last one counts.
    for node_id in node_ids:
        rows = read_log(drive, f"{node_id}/metrics.jsonl")
        rewards = {row["round"]: row["my_reward"] for row in rows}
        assert rewards == {t: expected[t, 0, node_id]["reward"] for t in range(40)}


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
    observer = Observer(drive)
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


@pytest.mark.parametrize("with_kills", [False, True])
def test_F7_no_two_processes_even_try_to_make_the_same_folder(drive, with_kills):
    # A coordinator begins the experiment, and four workers join it.
    settings = {"ROUND_ADVANCE": "completion", "NUM_WORKERS": 4, "STALE_AFTER_SECONDS": 3}
    settings |= {"MAX_ROUNDS": 10**5 if with_kills else 10, "CHECKPOINT_INTERVAL": 2}
    settings |= {"FETCH_TIMEOUT_SECONDS": 1, "WARM_START_STEPS": 4}
    coordinator = Process(drive, "coordinator", **settings).start().wait_until_registered()
    workers = [Process(drive, f"w{i}", **settings).start() for i in range(4)]

    # Kill one process after another, some while they start, and start each again.
    rng = random.Random(3)
    for i in range(10 if with_kills else 0):
        process = rng.choice([coordinator, *workers])
        if i % 3:
            process.wait_until_registered()
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.start()
    for process in (coordinator, *workers) if with_kills else ():
        process.kill()
        process.settings["MAX_ROUNDS"] = current_round(drive) + 5
        process.start()
    for process in (coordinator, *workers):
        assert process.wait_for_exit() == 0, process.output[-2000:]

    # Each attempt to make a folder was recorded, failed ones too.
    makers = {}  # path -> names of the processes that tried to make it
    for line in (drive.parent / "made_folders").read_text().splitlines():
        name, path = line.split(" ", 1)
        if path.startswith(str(drive)):
            makers.setdefault(path, set()).add(name)
    assert {path: names for path, names in makers.items() if len(names) > 1} == {}
    assert str(experiment_dir(drive) / "rollouts/w0") in makers
    assert len(makers) > 30
