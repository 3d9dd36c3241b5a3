"""The promises of the swarm, with real processes in a real folder: keeping together (S1), who comes late (S2),
waiting (S3), seats (S4), signals (S5), SIGKILL at any moment (F3), runs that repeat bit for bit (L5)."""

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

import pytest

from coordinator import is_round_over
from drive_store import DriveStore
from sapo import main, read_environment

ROOT = Path(__file__).resolve().parent.parent
QUICK = {  # nothing is learned: only who does what when counts
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "TASKS": "small_products", "WARM_START_STEPS": 0,
    "EXTERNAL_FILTER": False, "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4,
    "CHECKPOINT_INTERVAL": 3, "MAX_ROUNDS": 10**5, "FETCH_TIMEOUT_SECONDS": 20,
}  # fmt: skip
LEARNING = {"WARM_START_STEPS": 60, "ANSWER_TAG_SHARE": 0.9, "EXTERNAL_FILTER": True, "NUM_TRAIN_SAMPLES": 4}
LEARNING |= {"MAX_ROUNDS": 40, "LEARNING_RATE": 0.001}
CHILDREN = []
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the server, too
SERVER = multiprocessing.get_context("forkserver")  # it imports once; processes are forked from it
SERVER.set_forkserver_preload(["test_swarm", "transformers.generation", "matplotlib.backends.backend_agg"])


def run_forked(environ: dict, log: Path):
    """What a forked process does: `python sapo.py` in a session of its own, its output in a file."""
    os.setsid()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    sys.exit(main(environ))


def words(settings: dict) -> dict:
    """Settings as an environment; None: not set."""
    return {name: str(value) for name, value in settings.items() if value is not None}


class Process:
    """One node, or the coordinator. It may be started again; log, text, resumed_from are of its newest start."""

    def __init__(self, drive: Path, name: str, **settings):
        role = {"NODE_ROLE": name} if name == "coordinator" else {}
        self.settings = {**QUICK, "GDRIVE_PATH": drive, "NODE_ID": name, **role, **settings}
        self.drive, self.name = drive, name

    def start(self):
        self.log = self.drive.parent / f"{self.name}.{len(CHILDREN)}.log"
        self.child = SERVER.Process(target=run_forked, args=(words(self.settings), self.log))
        before = len(sessions(self.drive, self.name))
        self.is_here = lambda: len(sessions(self.drive, self.name)) > before
        self.child.start()
        CHILDREN.append(self.child)
        return self

    def wait_here(self):
        until(lambda: self.is_here() or not self.child.is_alive())
        assert self.is_here(), self.text
        return self

    def signal(self, number: int):
        os.kill(self.child.pid, number)
        return self

    def kill(self):
        self.child.kill()
        self.child.join()
        assert self.child.exitcode == -signal.SIGKILL, f"{self.name} had ended:\n{self.text[-3000:]}"

    def end(self, seconds: float = 90) -> int:
        self.child.join(seconds)
        assert not self.child.is_alive(), f"{self.name} runs on after {seconds} s:\n{self.text[-3000:]}"
        return self.child.exitcode

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def resumed_from(self) -> int | None:
        found = re.search(rf"^{self.name} resume: .*?(\d+)", self.text, re.M)
        return int(found[1]) if found else None


def until(condition, seconds: float = 120):
    """The first truthy value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.01)
    return value


def base(drive: Path) -> Path:
    return drive / "experiments/default"


def sessions(drive: Path, name="") -> list[str]:
    return [path.name for path in base(drive).glob(f"peers/{name}*.json")]


def rounds(drive: Path, name: str, kind="rewards") -> list[int]:
    """Rounds of which there is a file of this node (of stage 0), ascending."""
    return sorted(int(path.parts[-3][6:]) for path in base(drive).glob(f"{kind}/*/stage_0/{name}.json"))


def opened(drive: Path) -> dict[str, list[int]]:
    """{who: the rounds that it opened}."""
    by = {}
    for path in sorted(base(drive).glob("state/rounds/*.json")):
        by.setdefault(path.name.split(".")[1], []).append(int(path.name[6:12]))
    return by


def clock(drive: Path) -> int:
    return max((round_ for those in opened(drive).values() for round_ in those), default=-1)


def newest_checkpoint(drive: Path, name: str) -> int | None:
    found = base(drive).glob(f"checkpoints/*/{name}.safetensors")
    return max((int(path.parent.name[6:]) for path in found), default=None)


def heartbeat(drive: Path, name: str) -> dict:
    return json.loads((base(drive) / f"heartbeats/{name}.json").read_bytes())


def log_rows(drive: Path, path: str) -> list[dict]:
    return [json.loads(line) for line in (base(drive) / "logs" / path).read_text().splitlines()]


def lines(drive: Path, log: str) -> int:
    return sum(path.read_text().count("\n") for path in base(drive).glob(f"logs/*/{log}"))


def figures(drive: Path) -> dict:
    """{(round, stage, node): all that the reward file says but times and the session}."""
    rows = [json.loads(path.read_bytes()) for path in base(drive).glob("rewards/*/*/*.json")]
    kept = [{k: v for k, v in row.items() if not re.search("seconds|time|session", k)} for row in rows]
    return {(row["round"], row["stage"], row["node_id"]): row for row in kept}


def by_hand(drive: Path, node: str) -> DriveStore:
    """A store through which a test plays this node, which lives."""
    store = DriveStore(drive, "default", "by_hand")
    store.create()
    store.register([node], "worker", {})
    return store


def pay(store: DriveStore, round_: int, node: str):
    store.submit_reward(round_, 0, node, {"reward": 0.5})


class Witness:
    """Looks at the folder again and again: a write-once file keeps its bytes, the clock never goes back."""

    def __init__(self, drive: Path):
        self.drive, self.known, self.clock = drive, {}, -1

    def look(self):
        for kind in ("config.json", "rewards/*/*/*.json", "rollouts/*/*/*.json", "state/rounds/*", "peers/*"):
            for path in base(self.drive).glob(kind):
                assert self.known.setdefault(path, data := path.read_bytes()) == data, f"{path} has changed"
        assert all(path.exists() for path in self.known)
        before, self.clock = self.clock, clock(self.drive)
        assert before <= self.clock

    def all_is_whole(self):
        """Every file parses, and every reward has its rollouts."""
        self.look()
        for path in self.drive.rglob("*.json*"):
            for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
                assert isinstance(json.loads(text), dict), path
        paid = [str(path) for path in self.known if "rewards" in path.parts]
        assert paid and {path.replace("/rewards/", "/rollouts/") for path in paid} <= {*map(str, self.known)}


@pytest.fixture
def drive(tmp_path) -> Path:
    yield tmp_path / "drive"
    while CHILDREN:
        child = CHILDREN.pop()
        if child.is_alive():
            child.kill()  # a suspended one, too
        child.join()


@pytest.mark.parametrize("led", [False, True])
def test_S1_workers_keep_together_with_and_without_a_coordinator_and_learn_from_one_another(drive, led):
    names = ("w0", "w1", "w2")
    settings = {"MAX_ROUNDS": 12, "NUM_WORKERS": 3, "COORDINATOR_ROUND_INTERVAL": 60}
    swarm = [Process(drive, name, **settings).start() for name in ("coordinator",) * led + names]
    assert {process.end() for process in swarm} == {0}
    assert all(rounds(drive, name) == [*range(12)] for name in names), "nobody runs away or is left behind"
    rows = [row for row in figures(drive).values() if row["round"] > 0]
    assert all(row["external_ages"] == [0, 0] for row in rows), "each learns from the others in every round"
    assert not led or opened(drive) == {"coordinator": [*range(12)]}
    trained = ("rollouts", "rewards", "checkpoints", "models")
    assert not [path for kind in trained for path in base(drive).glob(f"{kind}/**/coordinator*")]


def test_S1_a_round_is_over_by_time_by_completion_or_by_either():
    for elapsed, live, submitted, *expected in [  # of an interval of 10 -> time, completion, hybrid
        (99, "", "", 0, 0, 0), (9, "ab", "", 0, 0, 0), (10, "ab", "", 1, 0, 1), (9, "ab", "a", 0, 0, 0),
        (10, "ab", "a", 1, 0, 1), (9, "ab", "ab", 0, 1, 1), (9, "a", "ab", 0, 1, 1), (9, "", "a", 0, 1, 1),
        (10, "ab", "abc", 1, 1, 1),
    ]:  # fmt: skip
        ways = ("time", "completion", "hybrid")
        over = [is_round_over(way, elapsed, 10, list(live), list(submitted)) for way in ways]
        assert over == [bool(e) for e in expected], (elapsed, live, submitted)


def test_S1_the_coordinator_holds_round_0_until_the_first_reward_then_goes_by_time_and_ends(drive):
    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 0.05, "MAX_ROUNDS": 4}
    lead, store = Process(drive, "coordinator", **settings).start().wait_here(), by_hand(drive, "n1")
    time.sleep(0.5)
    assert clock(drive) == 0, "the worker lives, but it may be downloading its model"
    pay(store, 0, "n1")
    until(lambda: clock(drive) == 3)  # by time, rewarded or not
    time.sleep(0.3)
    assert lead.child.is_alive(), "the last round waits for its worker"
    pay(store, 3, "n1")
    assert lead.end() == 0 and heartbeat(drive, "coordinator")["state"] == "done"
    assert json.loads((base(drive) / "winners/round_000003.json").read_bytes()) == {"n1": 0.5}


@pytest.mark.parametrize("strategy", ["completion", "hybrid"])
def test_S1_the_coordinator_waits_for_all_who_live_and_in_round_0_for_all_who_are_expected(drive, strategy):
    settings = {"ROUND_ADVANCE": strategy, "NUM_WORKERS": 2, "COORDINATOR_ROUND_INTERVAL": 3600}
    Process(drive, "coordinator", **settings).start().wait_here()
    pay(store := by_hand(drive, "n1"), 0, "n1")
    time.sleep(0.4)
    assert clock(drive) == 0, "the second worker is expected"
    store.register(["n2"], "worker", {})
    pay(store, 0, "n2")
    until(lambda: clock(drive) == 1)
    pay(store, 1, "n2")
    time.sleep(0.4)
    assert clock(drive) == 1, "n1 lives and has not submitted"
    store.heartbeat("n1", store.sessions()["n1"], 1, "stopped")
    until(lambda: clock(drive) == 2)  # who leaves says so, and is not waited for


def test_S2_who_comes_late_or_was_away_goes_on_with_the_clocks_round_and_says_what_it_missed(drive):
    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 0.3}
    Process(drive, "coordinator", **settings).start()
    Process(drive, "early", **settings).start()
    until(lambda: clock(drive) >= 4)
    late = Process(drive, "late", **settings).start()
    until(lambda: len(rounds(drive, "late")) >= 2)
    late.signal(signal.SIGSTOP)
    asleep = clock(drive)
    until(lambda: clock(drive) >= asleep + 4)
    late.signal(signal.SIGCONT)
    until(lambda: rounds(drive, "late")[-1] >= asleep + 4)
    assert late.signal(signal.SIGINT).end() == 130
    events = log_rows(drive, "late/training_events.jsonl")
    skips = [(row["first"], row["last"]) for row in events if row["event"] == "skip"]
    missed = [t for first, last in skips for t in range(first, last + 1)]
    worked = rounds(drive, "late")
    assert {*range(4)} <= {*missed} and {asleep + 1, asleep + 2} <= {*missed}
    assert sorted(missed + worked) == [*range(worked[-1] + 1)], "each is worked on, or named as missed"
    assert f"{skips[0][0]} to {skips[0][1]} " in late.text, "and a person is told"


def test_S2_workers_replace_a_dead_coordinator_after_stale_after_seconds_and_it_takes_over_again(drive):
    settings = {"ROUND_ADVANCE": "completion", "STALE_AFTER_SECONDS": 2, "NUM_WORKERS": 2}
    lead, *_ = [Process(drive, name, **settings).start() for name in ("coordinator", "w0", "w1")]
    until(lambda: clock(drive) >= 5)
    lead.kill()
    assert opened(drive).keys() == {"coordinator"}
    beat = heartbeat(drive, "coordinator")["time"]
    by_workers = until(lambda: [*base(drive).glob("state/rounds/*.w?.json")])
    assert min(path.stat().st_mtime for path in by_workers) - beat > 2, "silence shorter than that is none"
    before = clock(drive)
    until(lambda: min(rounds(drive, name)[-1] for name in ("w0", "w1")) > before + 3)
    lead.start()
    until(lambda: {*opened(drive)["coordinator"]} >= {*range(clock(drive) - 4, clock(drive) + 1)})
    assert min(set(opened(drive)["coordinator"]) - {*range(before)}) > before, "from where the clock stood"


@pytest.mark.parametrize("frequency", ["stage", "round"])
def test_S3_a_round_waits_for_peers_once_and_not_for_who_did_not_publish_the_round_before(drive, frequency):
    """`slow` publishes the last stage of round 1 and nothing else, `dead` that of round 2."""
    store = by_hand(drive, "slow")
    store.publish(1, 2, "slow", {}, {})
    old = {"format": 1, "peer_id": "dead", "round": 2, "stage": 2, "timestamp": 1.0, "rollouts": {}}
    store.write("rollouts/round_000002/stage_2/dead.json", old)
    store.write("peers/dead.1000000000000-00000000.json", {"node_id": "dead"})
    settings = {"MAX_STAGES": 3, "MAX_ROUNDS": 4, "FETCH_TIMEOUT_SECONDS": 1.5, "LOCAL_NODES": 2}
    settings |= {"ROLLOUT_PUBLISH_FREQUENCY": frequency, "GDRIVE_PATH": drive, "NODE_ID": "n"}
    assert main(words({**QUICK, **settings})) == 0
    waits = [0.0] * 4
    for row in log_rows(drive, "n_0/metrics.jsonl") + log_rows(drive, "n_1/metrics.jsonl"):
        waits[row["round"]] += row["wait_seconds"]
    for round_, waited_for_slow in enumerate((True, False, True, False)):
        low, high = (1.4, 2.8) if waited_for_slow else (0, 1.3)  # in each of its stages it would be 4.5 s
        assert low <= waits[round_] < high, f"round {round_}: {waits}"


@pytest.mark.parametrize("name", ["twin", "coordinator"])
def test_S4_of_two_processes_of_one_name_the_older_says_so_and_stops_with_status_3(drive, name):
    older = Process(drive, name).start().wait_here()
    if name == "twin":
        until(lambda: rounds(drive, name))
    newer = Process(drive, name).start().wait_here()
    assert older.end(30) == 3 and "newer" in older.text
    at_its_end = clock(drive)
    if name == "coordinator":
        pay(by_hand(drive, "n1"), 0, "n1")
    until(lambda: clock(drive) > at_its_end)
    assert newer.child.is_alive() and heartbeat(drive, name)["state"] == "running", "the newer one goes on"
    assert newer.signal(signal.SIGINT).end(30) == 130


def test_S5_an_engines_rank_is_the_nodes_name_and_rank_0_the_coordinator_with_auto():
    for environ, name, role in [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, "node_0", "coordinator"),
        ({"SLURM_PROCID": "2", "RANK": "7"}, "node_2", "worker"),
        ({"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "0"}, "node_4", "worker"),
        ({"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "node_4_1", "worker"),
        ({"JOB_COMPLETION_INDEX": "0"}, "node_0", "coordinator"),
        ({"SKYPILOT_NODE_RANK": "3"}, "node_3", "worker"),
        ({"RANK": "x"}, "node_[0-9a-f]{8}", "worker"), ({}, "node_[0-9a-f]{8}", "worker"),
    ]:  # fmt: skip
        plain, auto, named = (
            read_environment(environ | more)[0] for more in ({}, {"NODE_ROLE": "auto"}, {"NODE_ID": "anna"})
        )
        assert re.fullmatch(name, plain["NODE_ID"]) and plain.get("NODE_ROLE", "worker") == "worker"
        assert auto["NODE_ROLE"] == role and named["NODE_ID"] == "anna", "a name that was set stands"


def test_S5_sigterm_and_sigusr1_stop_in_order_and_requeued_tasks_resume_under_their_names(drive):
    names = {"coordinator": signal.SIGTERM, "node_1": signal.SIGTERM, "node_2": signal.SIGUSR1}
    engine = {"NODE_ROLE": "auto", "NODE_ID": None, "SLURM_NTASKS": 3, "ROUND_ADVANCE": "completion"}
    swarm = [Process(drive, name, **engine, SLURM_PROCID=rank).start() for rank, name in enumerate(names)]
    until(lambda: min(len(rounds(drive, node)) for node in ("node_1", "node_2")) >= 4)
    for process in swarm:
        process.signal(names[process.name])
    assert [process.end(30) for process in swarm] == [130] * 3
    assert [heartbeat(drive, name)["state"] for name in names] == ["stopped"] * 3
    saved = {node: newest_checkpoint(drive, node) for node in ("node_1", "node_2")}
    assert all(round_ == rounds(drive, node)[-1] for node, round_ in saved.items()), "none is lost"
    for process in swarm:
        process.settings["MAX_ROUNDS"] = clock(drive) + 4
        process.start()
    assert [process.end() for process in swarm] == [0] * 3
    assert [process.resumed_from for process in swarm[1:]] == [*saved.values()]
    assert sorted(name.split(".")[0] for name in sessions(drive)) == sorted([*names] * 2), "no other names"


def learner(drive: Path, nodes: int) -> Process:
    return Process(drive, "n", **LEARNING, LOCAL_NODES=nodes)


@functools.cache
def unbroken(place: Path, nodes: int) -> Path:
    """The folder of a run that nobody disturbed."""
    process = learner(place / f"unbroken_{nodes}", nodes).start()
    assert process.end() == 0, process.text
    return process.drive


@pytest.fixture(params=[1, 2])
def whole(request, tmp_path_factory, drive) -> Path:
    """The folder of an unbroken run of so many nodes; `drive` gets its warm start."""
    whole = unbroken(tmp_path_factory.getbasetemp(), request.param)
    shutil.copytree(whole / "warmstart", drive / "warmstart")
    return whole


def is_equal(whole: Path, drive: Path):
    """All that was shared, earned and learned, bit for bit."""

    def shared(place):
        files = {path.relative_to(place): path.read_text() for path in place.rglob("rollouts/*/*/*")}
        return {path: re.sub(r'"timestamp": [\d.]+', "", text) for path, text in files.items()}

    def learned(place):
        return [path.read_bytes() for path in sorted(place.glob("experiments/*/checkpoints/*/*"))]

    ours, theirs = figures(drive), figures(whole)
    assert ours == theirs and len({row["reward"] for row in ours.values()}) > 3
    assert max(row["grad_norm"] for row in ours.values()) > 0, "something was learned"
    assert shared(drive) == shared(whole)
    assert learned(drive) == learned(whole) and len(learned(drive)) == 2


@pytest.mark.parametrize("whole", [2], indirect=True)
def test_L5_two_runs_of_one_command_are_equal_bit_for_bit(drive, whole):
    environ = os.environ | words(learner(drive, 2).settings) | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, ROOT / "sapo.py"], env=environ, timeout=120, check=True)
    is_equal(whole, drive)


def test_F3_killed_at_random_moments_a_process_that_is_alone_repeats_the_unbroken_run(drive, whole):
    nodes = sorted({node for _, _, node in figures(whole)})
    process, rng, witness = learner(drive, len(nodes)), random.Random(1), Witness(drive)
    for kill in range(8):
        enough = lines(drive, "metrics.jsonl") + rng.randrange(1, 5) * len(nodes)
        process.start().wait_here()
        until(lambda: kill % 4 == 0 or lines(drive, "metrics.jsonl") >= enough)  # noqa: B023
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        witness.look()
    (left := base(drive) / "tmp/n/left").write_text("by a kill in the middle of a write")
    assert process.start().wait_here() and not left.exists(), "temp files go at the next start"
    assert process.end() == 0 and process.resumed_from is not None
    witness.all_is_whole()
    is_equal(whole, drive)
    for node in nodes:  # the last row of a round counts
        rows = {row["round"]: row["my_reward"] for row in log_rows(drive, f"{node}/metrics.jsonl")}
        assert rows == {t: figures(whole)[t, 0, node]["reward"] for t in range(40)}


def test_F3_a_swarm_of_processes_survives_forty_kills_and_loses_nothing(drive):
    """Coordinator and three workers in rounds of 0.4 s; one after another dies, some while they start."""
    settings = {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 0.4, "STALE_AFTER_SECONDS": 5}
    settings |= {"FETCH_TIMEOUT_SECONDS": 1, "CHECKPOINT_INTERVAL": 2}
    names = ("w0", "w1", "w2")
    swarm = [Process(drive, name, **settings).start() for name in ("coordinator", *names)]
    workers, rng, witness = swarm[1:], random.Random(2), Witness(drive)
    expected, published, resumes = dict.fromkeys(names), {name: [] for name in names}, 0

    def shared(name):
        """Rounds of which it published rollouts in this life."""
        return [t for t in rounds(drive, name, "rollouts") if t not in published[name]]

    def account_for(process) -> bool:
        """A life has ended: on from the newest checkpoint, no reward missing between its rounds."""
        name, mine = process.name, shared(process.name)
        assert {*mine[:-1]} <= {*rounds(drive, name)}, f"{name}: {mine}"
        assert not process.is_here() or process.resumed_from == expected[name], process.text[-2000:]
        published[name] += mine
        expected[name] = newest_checkpoint(drive, name)
        return process.resumed_from is not None

    for kill in range(40):
        process = rng.choice(swarm)
        if kill % 5:  # else it may die while it starts
            process.wait_here()
        if kill % 5 > 1 and process in workers:
            until(lambda: shared(process.name))  # noqa: B023
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        witness.look()
        resumes += process in workers and account_for(process)
        process.start()
    for process in swarm:
        process.kill()
        resumes += process in workers and account_for(process)
    for process in swarm:
        process.settings["MAX_ROUNDS"] = witness.clock + 8
        process.start()
    assert [process.end() for process in swarm] == [0] * 4
    for process in workers:
        resumes += account_for(process)
        last = process.settings["MAX_ROUNDS"] - 1
        assert rounds(drive, process.name)[-1] == newest_checkpoint(drive, process.name) == last
    witness.all_is_whole()
    assert resumes >= 10, "most starts had something to go on from"
    assert len({t for name in names for t in rounds(drive, name)}) > witness.clock / 2, "it was a swarm"
