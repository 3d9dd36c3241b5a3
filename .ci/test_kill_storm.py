"""Kill storms: real processes, real signals, a real folder. What is written is never damaged or lost."""

import contextlib
import fcntl
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = {
    "MODEL_NAME": "tiny", "TASKS": "small_products", "WARM_START_STEPS": 100, "ANSWER_TAG_SHARE": 0.3,
    "NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "CHECKPOINT_INTERVAL": 3,
    "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1,
}  # fmt: skip
KEPT = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR")  # of this process's environment
STARTED = r" start: |coordinator: round \d+ is open"
ROUND = r"\w+ round \d+/\d+ "
CHILDREN, STARTS = [], itertools.count()
SERVER = multiprocessing.get_context("forkserver")  # it imports torch once, and each start is forked from it
SERVER.set_forkserver_preload(["sapo", "test_kill_storm"])


def main(environ: dict, log: Path):
    """What a forked process runs: sapo.py in a session of its own, its output in a file."""
    os.setsid()
    os.chdir(log.parent)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ |= environ
    if "UID" in environ:
        importlib.import_module("grpo").build_tiny(
            ["small_products"]
        )  # what is imported late is imported now
        os.setuid(int(environ["UID"]))
    sys.exit(importlib.import_module("sapo").main(environ))


class Forked:
    """Popen's way to speak of such a process."""

    def __init__(self, *arguments):
        self.process = SERVER.Process(target=main, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self.process.join(seconds)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired("sapo.py", seconds)
        return self.process.exitcode

    def send_signal(self, number: int):
        if self.process.is_alive():
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Process:
    """One sapo.py in a session of its own; `text` is what its newest start has printed."""

    command = None  # or what to run in place of sapo.py forked

    def __init__(self, drive: Path, name: str, **settings):
        self.drive, self.name, self.child, self.logs = drive, name, None, []
        self.settings = {**TINY, "NODE_ID": name, "GDRIVE_PATH": drive, **settings}
        if name == "coordinator":
            self.settings["NODE_ROLE"] = name

    def start(self):
        self.log = self.drive.parent / f"{self.name}.{next(STARTS)}.log"
        self.log.touch()
        self.logs.append(self.log)
        self.child = self.spawn({name: str(value) for name, value in self.settings.items()})
        CHILDREN.append(self.child)
        return self

    def spawn(self, settings: dict):
        return Forked(settings, self.log)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def shows(self, pattern: str, times: int = 1) -> bool:
        return len(re.findall(pattern, self.text)) >= times

    def until(self, pattern: str, times: int = 1, seconds: float = 300) -> bool:
        """Wait until its output shows `pattern` so often; False if it ended before that."""
        deadline = time.monotonic() + seconds
        while not self.shows(pattern, times):
            if self.child.poll() is not None:
                return self.shows(pattern, times)
            assert time.monotonic() < deadline, (
                f"{self.name}: no {pattern!r} after {seconds} s:\n{self.text[-3000:]}"
            )
            time.sleep(0.01)
        return True

    def until_more(self, rounds: int) -> bool:
        return self.until(ROUND, len(re.findall(ROUND, self.text)) + rounds)

    def signal(self, number: int):
        self.child.send_signal(number)
        return self

    def kill(self):
        self.child.kill()
        self.child.wait()

    def end(self, seconds: float = 300) -> int:
        try:
            return self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} runs on after {seconds} s:\n{self.text[-3000:]}")


class Command(Process):
    """The same as a program of its own, started from a clean environment: sapo.py, or run_swarm.sh."""

    command = (sys.executable, ROOT / "sapo.py")

    def spawn(self, settings: dict):
        with open(self.log, "ab") as out:
            return self.popen(settings, stdout=out, stderr=subprocess.STDOUT)

    def popen(self, settings: dict, **how):
        environ = {name: value for name, value in os.environ.items() if name in KEPT} | settings
        return subprocess.Popen(
            self.command, env=environ, cwd=self.drive.parent, start_new_session=True, **how
        )


class Script(Command):
    """run_swarm.sh with two workers."""

    command = ("bash", ROOT / "run_swarm.sh")

    def __init__(self, drive: Path, **settings):
        super().__init__(
            drive, "run_swarm", PYTHON=sys.executable, NUM_WORKERS=2, MAX_ROUNDS=10**5, VERBOSE=1, **settings
        )
        del self.settings["NODE_ID"]

    def until_both_train(self):
        assert self.until(r"worker_0 round \d+/") and self.until(r"worker_1 round \d+/")


class ScriptInTerminal(Script):
    """The same at a terminal of its own, whose keys `press` presses."""

    def spawn(self, settings: dict):
        self.keyboard, screen = pty.openpty()
        own = {"preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}  # the terminal of this session
        child = self.popen(settings, stdin=screen, stdout=screen, stderr=screen, **own)
        os.close(screen)
        threading.Thread(target=self.copy_output, args=(os.dup(self.keyboard),), daemon=True).start()
        return child

    def copy_output(self, terminal: int):
        with open(self.log, "ab", buffering=0) as log, contextlib.suppress(OSError):
            while data := os.read(
                terminal, 65536
            ):  # OSError when the last program that had it open has ended
                log.write(data)
        os.close(terminal)

    def press(self, keys: bytes):
        os.write(self.keyboard, keys)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    while CHILDREN:
        child = CHILDREN.pop()
        if child.poll() is None:
            child.kill()  # a suspended one too
        for pid in alive(child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


def alive(session: int) -> dict[int, str]:
    """{pid: command line} of all processes of a session, whatever their process group."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found[int(stat.parent.name)] = (stat.parent / "cmdline").read_text().replace("\0", " ")
        except OSError:
            pass  # it has just ended
    return found


@functools.cache
def unbroken(root: Path) -> Path:
    """The folder of a LOCAL_NODES=2 run that nobody disturbed; its warm start serves all tests."""
    process = Process(root / "unbroken", "n", LOCAL_NODES=2, MAX_ROUNDS=40)
    assert process.start().end() == 0, process.text
    return process.drive


@pytest.fixture
def drive(tmp_path_factory, tmp_path) -> Path:
    source = unbroken(tmp_path_factory.getbasetemp())
    shutil.copytree(source / "warmstart", tmp_path / "drive" / "warmstart")
    return tmp_path / "drive"


class Witness:
    """Looks at the folder again and again: a write-once file keeps its bytes, the clock never goes back."""

    def __init__(self, drive: Path):
        self.drive, self.base, self.known, self.clock = drive, drive / "experiments" / "default", {}, -1

    def look(self):
        for kind in ("rewards", "rollouts", "state/rounds", "winners", "peers"):
            for path in self.base.glob(f"{kind}/**/*.json"):
                assert self.known.setdefault(path, data := path.read_bytes()) == data, f"{path} has changed"
        gone = [path for path in self.known if not path.exists()]
        assert not gone
        clock = max((int(p.name[6:12]) for p in self.base.glob("state/rounds/*.json")), default=-1)
        assert clock >= self.clock
        self.clock = clock

    def all_is_whole(self):
        """Every file parses, to the last byte; no temp file and no claim is left."""
        self.look()
        for path in (p for p in self.drive.rglob("*") if p.is_file()):
            if path.suffix == ".json":
                json.loads(path.read_bytes())
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
            elif path.suffix == ".safetensors":
                data = path.read_bytes()
                size = int.from_bytes(data[:8], "little")
                header = json.loads(data[8 : 8 + size])
                ends = [
                    tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"
                ]
                assert len(data) == 8 + size + max(ends)
            else:
                assert path.suffix in (".log", ".jinja"), f"what is {path}?"


def rewards(drive: Path) -> dict:
    files = (drive / "experiments" / "default" / "rewards").glob("*/*/*.json")
    return {(p.parts[-3], p.name): json.loads(p.read_bytes())["reward"] for p in files}


def newest_checkpoint(drive: Path, process: str) -> int | None:
    found = (drive / "experiments" / "default").glob(f"checkpoints/*/{process}.safetensors")
    return max((int(path.parent.name[6:]) for path in found), default=None)


def tails(processes) -> str:
    return "\n".join(f"--- {p.name}\n{p.text[-800:]}" for p in processes)


# -------- One process, killed -------------------------------------------------------------------------------


def test_a_swarm_in_one_process_killed_at_random_moments_repeats_the_unbroken_run(drive, tmp_path_factory):
    rng, kills, witness = random.Random(1), 0, Witness(drive)
    process = Process(drive, "n", LOCAL_NODES=2, MAX_ROUNDS=40)
    while kills < 10:
        process.start()
        if not process.until(ROUND, rng.randrange(1, 8)):
            break
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        kills += 1
        witness.look()
    assert process.start().end() == 0, process.text
    assert kills >= 8
    witness.all_is_whole()
    assert rewards(drive) == rewards(unbroken(tmp_path_factory.getbasetemp())), "bit for bit"


# -------- Five processes, killed ----------------------------------------------------------------------------


def every_round_is_accounted_for(drive: Path, process: Process) -> int:
    """No reward is lost or written twice, in all lives of a worker; returns how many rounds it trained.

    In one life every round from its first line to its last is either worked on (it has a line) or named as
    skipped. A round with a line is in rewards/, with a figure that some life printed. The kill may come
    between file and line: one life may leave a last line without its file, or a file without its line.
    That a file, once there, keeps its bytes is the Witness's to see.
    """
    printed, certain, published = {}, set(), rewards(drive)
    for log in process.logs:
        text = log.read_text(errors="replace")
        lines = re.findall(rf"^{process.name} round (\d+)/\d+ \| reward ([\d.]+) ", text, re.M)
        lines = [(int(t), figure) for t, figure in lines]
        trained = [t for t, _ in lines]
        assert trained == sorted(set(trained)), f"{log}: a round twice, or backwards"
        leaps = re.findall(r" skip: rounds (\d+) to (\d+) ", text)
        skipped = {t for first, last in leaps for t in range(int(first), int(last) + 1)}
        assert set(range(trained[0], trained[-1] + 1)) <= {*trained, *skipped} if trained else True, log
        assert not set(trained) & skipped, log
        certain |= set(trained if process.name + " end: finished" in text else trained[:-1])
        for t, figure in lines:
            printed.setdefault(t, set()).add(figure)
    mine = {
        int(folder[6:]): reward
        for (folder, name), reward in published.items()
        if name == f"{process.name}.json"
    }
    assert certain <= set(mine), f"{process.name}: no reward for rounds {sorted(certain - set(mine))}"
    unsaid = [t for t, reward in mine.items() if f"{reward:.2f}" not in printed.get(t, ())]
    assert len(unsaid) < len(process.logs), f"{process.name}: rewards that nobody earned, of rounds {unsaid}"
    return len(printed)


def test_a_swarm_of_five_processes_survives_fifty_kills_of_any_of_them_and_a_power_cut(drive):
    """Coordinator and four workers; random ones are killed, start-up included, and started again."""
    rng, kills, early, witness = random.Random(2), 0, 0, Witness(drive)
    settings = {"MAX_ROUNDS": 10**5, "ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 0.5}
    settings |= {"STALE_AFTER_SECONDS": 20, "FETCH_TIMEOUT_SECONDS": 2}
    names = ("coordinator", "w0", "w1", "w2", "w3")
    swarm = [Process(drive, name, **settings).start() for name in names]

    def kill_and_start_again(victims):
        for process in victims:
            process.kill()
        witness.look()
        for process in victims:
            process.expected = newest_checkpoint(drive, process.name)
            process.start()
        for process in victims:
            assert process.until(STARTED), process.text
            resumed = re.findall(r"from the checkpoint after round (\d+)\n", process.text)
            assert process.expected is None or int(resumed[-1]) == process.expected

    for process in swarm:
        process.until(STARTED)
    while kills < 50:
        time.sleep(rng.uniform(0, 2))
        victims = rng.sample(swarm, rng.choice([1, 2, 3, 4, 5]))
        for process in victims[: rng.choice([0, 0, 1, 2])]:  # these die a second time, while they start
            process.kill()
            process.start()
            time.sleep(rng.uniform(0, 1.5))
            early += not process.shows(STARTED)
            kills += 1
        kill_and_start_again(victims)
        kills += len(victims)
    witness.look()
    for process in swarm:
        process.settings["MAX_ROUNDS"] = witness.clock + 20
    kill_and_start_again(swarm)
    assert [p.end() for p in swarm] == [0] * 5, tails(swarm)
    witness.all_is_whole()
    assert swarm[0].settings["MAX_ROUNDS"] - 1 == witness.clock
    trained = [every_round_is_accounted_for(drive, process) for process in swarm[1:]]
    resumes = sum(log.read_text().count("resume: from the checkpoint") for p in swarm for log in p.logs)
    print(
        f"{kills + 5} kills, {early} while starting; {witness.clock + 1} rounds, {trained}; {resumes} resumes"
    )


# -------- Clocks and seats ----------------------------------------------------------------------------------

CLOCK = """
import os, time
real, offset = time.time, float(os.environ["CLOCK_OFFSET"])
time.time = lambda: real() + offset
time.time_ns = lambda: int(time.time() * 10**9)
"""


def test_nodes_whose_clocks_are_ten_minutes_apart_train_together_and_the_newest_session_wins(drive, tmp_path):
    """Wall clocks only: ages are taken from them and from nothing else."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(CLOCK)
    witness = Witness(drive)
    settings = {"ROUND_ADVANCE": "completion", "STALE_AFTER_SECONDS": 60, "MAX_ROUNDS": 10**5}
    settings |= {"PYTHONPATH": tmp_path / "clock", "EXTERNAL_FILTER": False}

    def node(name, offset, **changes):
        return Command(drive, name, **{**settings, "CLOCK_OFFSET": offset, **changes})

    def all_have_shared(peers, last):
        """In the last so many rounds each of the two has trained on groups of the other."""
        for t in range(witness.clock - last, witness.clock):
            for peer in peers:
                data = json.loads((witness.base / f"rewards/round_{t:06d}/stage_0/{peer}.json").read_bytes())
                assert data["external_groups"] == 2, (t, peer)

    swarm = [node(*who).start() for who in (("coordinator", 0), ("w0", 600), ("w1", -600))]
    for process in swarm[1:]:
        process.until(STARTED)
    for process in swarm[1:]:
        process.until(ROUND, 12)
    registrations = [json.loads(path.read_bytes()) for path in witness.base.glob("peers/*.json")]
    times = {about["node_id"]: about["registered_at"] for about in registrations}
    assert 1100 < times["w0"] - times["w1"] < 1300, "the shim works"
    first, second = swarm[1], node("w0", -600).start()  # its first session is twenty minutes ahead of it
    swarm[1] = second
    assert second.until(STARTED)
    assert first.end(90) == 3 and "a newer session of w0 runs" in first.text
    assert second.until(ROUND, 12) and swarm[2].until_more(12)
    witness.look()
    all_have_shared(["w0", "w1"], 8)
    for process in swarm:
        process.kill()
    witness.look()
    settings["MAX_ROUNDS"] = witness.clock + 60
    swarm = [node(*who).start() for who in (("coordinator", -600), ("w0", 600), ("w1", 0))]
    assert [p.end() for p in swarm] == [0] * 3, tails(swarm)
    witness.all_is_whole()
    all_have_shared(["w0", "w1"], 10)
    ended = re.findall(r"round \d+/\d+ \| reward \S+ \| (.*) \| eta", swarm[0].text)[-10:]
    assert ended == ["2 nodes"] * 10, "nobody was taken for dead, or waited for in vain"
    assert "not here after" not in "".join(p.text for p in swarm)
    opened_by = {path.name.split(".")[1] for path in witness.base.glob("state/rounds/*.json")}
    assert opened_by <= {"coordinator", "w0", "w1"}


def test_of_two_processes_with_one_node_id_the_older_stops_within_seconds_and_says_so(drive):
    older = Process(drive, "twin", MAX_ROUNDS=10**6).start()
    older.until(ROUND)
    newer = Process(drive, "twin", MAX_ROUNDS=10**6).start()
    newer.until(STARTED)
    assert older.end(10) == 3
    assert "a newer session of twin runs" in older.text
    assert newer.until(ROUND, 3) and newer.child.poll() is None
    assert newer.signal(signal.SIGINT).end(30) == 130
    Witness(drive).all_is_whole()


def test_a_suspended_coordinator_is_replaced_and_stops_when_it_wakes(drive):
    settings = {"MAX_ROUNDS": 10**5, "ROUND_ADVANCE": "completion", "STALE_AFTER_SECONDS": 3}
    first, worker = (Process(drive, name, **settings).start() for name in ("coordinator", "w0"))
    worker.until(ROUND, 5)
    first.signal(signal.SIGSTOP)
    suspended, witness = time.monotonic(), Witness(drive)
    second = Process(drive, "coordinator", **settings).start()
    second.until(STARTED)
    time.sleep(max(0.0, suspended + 5 - time.monotonic()))
    witness.look()
    worker.until_more(5)
    before = witness.clock
    assert first.signal(signal.SIGCONT).end(10) == 3
    assert first.shows("coordinator: .* newer")
    assert worker.until_more(5)
    witness.look()
    assert witness.clock > before
    for process in (worker, second):
        assert process.signal(signal.SIGINT).end(30) == 130
    witness.all_is_whole()


# -------- run_swarm.sh --------------------------------------------------------------------------------------


def has_ended_with_all_it_started(script: Script, status: int) -> bool:
    ended = script.end(60)
    deadline = time.monotonic() + 5  # who prefixed the last lines may still be at it
    while (left := alive(script.child.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == {} and ended == status, f"{ended} {left}\n{script.text[-3000:]}"
    return True


def is_stopped_in_order(script: Script, drive: Path) -> None:
    """Everything that it had started has ended, each worker with a checkpoint and a goodbye."""
    assert has_ended_with_all_it_started(script, 130)
    assert None not in [newest_checkpoint(drive, node) for node in ("worker_0", "worker_1")]
    for node in ("worker_0", "worker_1", "coordinator"):
        beat = drive / f"experiments/default/heartbeats/{node}.json"
        assert json.loads(beat.read_bytes())["state"] == "stopped", node
    assert "Traceback" not in script.text
    Witness(drive).all_is_whole()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_a_whole_run_swarm_with_checkpoints_and_status_130(drive, number):
    script = Script(drive).start()
    script.until_both_train()
    script.signal(number)
    is_stopped_in_order(script, drive)
    assert script.shows(r"worker_\d end: stopped before round", 2)


@pytest.mark.parametrize("how", ["Ctrl-C", "the terminal is closed"])
def test_in_a_terminal_ctrl_c_ends_run_swarm_and_all_that_it_started(drive, how):
    script = ScriptInTerminal(drive).start()
    script.until_both_train()
    if how == "Ctrl-C":
        script.press(b"\x03")
    else:
        script.signal(signal.SIGHUP)  # as the kernel sends it to the session's leader
    is_stopped_in_order(script, drive)


@pytest.mark.parametrize("pause", [0.3, 2, 5])
def test_ctrl_c_ends_run_swarm_while_it_is_starting_and_when_pressed_twice(drive, pause):
    script = ScriptInTerminal(drive).start()
    time.sleep(pause)
    script.press(b"\x03")
    if pause == 2:
        time.sleep(1)
        script.press(b"\x03")
    assert has_ended_with_all_it_started(script, 130)


def test_run_swarm_names_workers_with_a_bad_setting_and_leaves_no_process_behind(drive, tmp_path_factory):
    source = unbroken(tmp_path_factory.getbasetemp())
    shutil.copytree(source / "experiments", drive / "experiments")
    script = Script(drive, SEED=7).start()  # the experiment began with another one
    assert has_ended_with_all_it_started(script, 1)
    assert script.shows(r"run_swarm: worker_\d ended with exit code 2", 2) and "SEED=7" in script.text
