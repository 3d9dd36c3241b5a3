"""Swarms in one process: a folder, a clock, and processes that take turns.

Each process is a thread that runs `sapo.main`. One runs at a time; at each call to the folder and in
each sleep it hands over to the one that is to wake first. Time passes only in sleeps and in calls, so
an hour of waiting costs nothing and a test repeats call by call. At each call a process can be
killed, be suspended, or get an error. Sampling, update, warm start and export are replaced by fakes:
they take a moment of this time, and what they compute depends on all that must not be lost.

Not seen here: torch, the threads and files of libraries, and writes that are torn within one call.
"""

import builtins
import contextlib
import errno
import functools
import hashlib
import io
import os
import random
import re
import threading
from pathlib import Path

import pytest
import torch

import coordinator
import drive_store
import grpo
import sapo
from common import QUICK, to_environ

FUNCTIONS = ("open", "listdir", "scandir", "mkdir", "stat", "lstat", "replace", "unlink")
CALLS = [(os, name) for name in FUNCTIONS] + [(io, "open"), (builtins, "open")]
CHANGES = ("mkdir", "replace", "unlink")  # an error may come after these have done their work
CALL_SECONDS = 0.01
STEP_SECONDS = 0.3  # of sampling, and of an update
FAULTS = (errno.EIO, errno.ENOSPC, errno.ESTALE)

# In these rounds nobody publishes before the last stage, and each node reads three of four peers.
FIVE_NODES = {
    "LOCAL_NODES": 5, "MAX_STAGES": 2, "ROLLOUT_PUBLISH_FREQUENCY": "round", "FETCH_MAX_PEERS": 3,
    "MAX_ROUNDS": 5, "CHECKPOINT_INTERVAL": 2,
}  # fmt: skip


class Killed(BaseException):
    """SIGKILL: nothing in the program handles it."""


class Process:
    """A worker or the coordinator. `output`, `status` and `num_calls` are of its latest start."""

    def __init__(self, world, name, settings):
        self.world = world
        self.name = name
        role = {"NODE_ROLE": name} if name == "coordinator" else {}
        self.settings = {**QUICK, "GDRIVE_PATH": world.drive, "NODE_ID": name, **role, **settings}
        self.turn = threading.Semaphore(0)
        self.kill_at = None  # number of the call to the folder before which it is killed
        self.is_suspended = False
        self.clock_error = 0.0  # seconds by which its clock is ahead
        self.step_seconds = STEP_SECONDS

    def start(self, **settings):
        self.settings |= settings
        self.output = ""
        self.num_calls = 0
        self.status = self.signals = self.exception = None
        self.rates = set()  # learning rates of its optimizer steps
        self.initial_weights = None  # before the first of these
        self.trained = []  # keys of the external groups in them
        self.is_killed = False
        self.wake_at = self.world.now
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        self.world.processes.append(self)
        return self

    def work(self):
        self.turn.acquire()
        try:
            self.status = sapo.main(to_environ(self.settings))
        except Killed:
            self.status = -9
        except BaseException as error:
            self.exception = error
        self.kill_at = None
        self.world.processes.remove(self)
        self.world.turn.release()

    def interrupt(self):
        """The first Ctrl-C."""
        self.signals.requested += 1
        return self

    def kill(self):
        self.is_killed = True
        self.world.run(lambda: self.status == -9)

    @property
    def first(self) -> str:
        """Its first node."""
        return self.name if self.settings.get("LOCAL_NODES", 1) == 1 else f"{self.name}_0"

    @property
    def resumed_from(self) -> int | None:
        """The round of the checkpoint that was loaded."""
        match = re.search(rf"^{self.name}(?:_0)? resume: from .*?(\d+)", self.output, re.MULTILINE)
        return int(match[1]) if match else None


class World:
    """The folder, the clock and the processes. It stands in for the module `time`, too."""

    def __init__(self, drive: Path, seed=0):
        self.drive = drive
        self.now = 1e9
        self.rng = random.Random(seed)
        self.turn = threading.Semaphore(0)
        self.call_seconds = CALL_SECONDS
        self.processes = []
        self.current = None
        # What may go wrong. fault(process, name of a call, path): "before" or "after" for an error of
        # the disk before or after the call has done its work, or another OSError. delay(path): the
        # seconds until a name that came or went shows in the listings of others.
        self.fault = lambda process, name, path: None
        self.delay = lambda path: 0.0
        self.as_seen_by_the_disk = None  # path -> path, on a disk that takes several names for one
        self.changes = {}  # folder -> [(when it shows, who changed it, name, whether it was added)]
        self.writers = {}  # path -> names of the processes that tried to write there
        self.watch = lambda: None  # called after each turn

    def start(self, name="n", **settings) -> Process:
        return Process(self, name, settings).start()

    def finish(self, name="n", status=0, **settings) -> Process:
        """Start a process and let it run to its end, which must have this status."""
        process = self.start(name, **settings)
        self.run(lambda: process.status is not None)
        assert process.status == status, process.output
        return process

    def end(self, *processes, status=0, seconds=10_000):
        """Let all run to their ends. These processes must have this status."""
        self.run(seconds=seconds)
        for process in processes:
            assert process.status == status, process.output

    def run(self, until=None, seconds=10_000):
        """Let the processes take turns until the condition holds, or until all have ended."""
        deadline = self.now + seconds
        while not (until and until()):
            ready = [process for process in self.processes if not process.is_suspended]
            if not ready and until is None:
                return
            assert ready, "all have ended"
            assert self.now < deadline, "what the test waits for did not happen"

            # The one that wakes first has its turn. Ties are broken by the seed.
            first = min(process.wake_at for process in ready)
            process = self.rng.choice([each for each in ready if each.wake_at == first])
            self.now = max(self.now, first)
            self.current = process
            process.turn.release()
            self.turn.acquire()
            self.current = None
            if process.exception:
                raise process.exception
            self.watch()

    def wait(self, seconds):
        """Let the processes take turns for a while."""
        end = self.now + seconds
        self.run(lambda: self.now >= end or not self.processes)

    # -------- What the program uses of the module `time` ------------------------------------------

    def time(self):
        return self.now + (self.current.clock_error if self.current else 0.0)

    def monotonic(self):
        return self.now

    thread_time = monotonic

    def sleep(self, seconds):
        process = self.current
        if process is None:  # the test itself
            return
        process.wake_at = self.now + seconds
        self.turn.release()
        process.turn.acquire()
        if process.is_killed:
            raise Killed

    # -------- What else is replaced ---------------------------------------------------------------

    def call(self, function, *args, **kwargs):
        """A system call. If a process makes it and it is about the folder, the process may be killed
        before it, others come first, and it may fail."""
        process = self.current
        if process is None or not args or not str(args[0]).startswith(str(self.drive)):
            return function(*args, **kwargs)
        process.num_calls += 1
        process.is_killed |= process.num_calls == process.kill_at
        if process.is_killed:
            raise Killed
        self.sleep(self.call_seconds)

        name = function.__name__
        if self.as_seen_by_the_disk:
            args = [self.as_seen_by_the_disk(arg) if i < 1 + (name == "replace") else arg
                    for i, arg in enumerate(args)]  # fmt: skip
        self.note_writer(name, args)
        fault = self.fault(process, name, str(args[0]))
        if not fault:
            result = function(*args, **kwargs)
            self.note_change(name, args)
            return self.listing(args[0], result) if name == "listdir" else result
        if fault == "after" and name in CHANGES:
            function(*args, **kwargs)
        if isinstance(fault, OSError):
            raise fault
        code = self.rng.choice(FAULTS)
        raise OSError(code, os.strerror(code), str(args[0]))

    def note_writer(self, name, args):
        is_open = name == "open" and len(args) > 1
        creates = is_open and (args[1] & os.O_CREAT if type(args[1]) is int else "w" in args[1])
        if name in CHANGES or creates:
            for path in args[: 2 if name == "replace" else 1]:
                self.writers.setdefault(os.path.abspath(path), set()).add(self.current.name)

    def note_change(self, name, args):
        """A name that comes or goes shows in the listings of others after a delay."""
        if name in ("replace", "unlink"):
            shows_at = self.now + self.delay(args[-1])
            for path, is_added in ((args[0], False), (args[-1], name == "replace")):
                folder, base = os.path.split(os.path.abspath(path))
                change = (shows_at, self.current.name, base, is_added)
                self.changes.setdefault(folder, []).append(change)

    def listing(self, folder, names):
        """What a process sees in a folder: its own changes, and those of others that show by now."""
        seen = set(names)
        for shows_at, author, name, is_added in reversed(self.changes.get(str(folder), ())):
            if shows_at > self.now and author != self.current.name:
                (seen.discard if is_added else seen.add)(name)
        return sorted(seen)

    def print(self, *texts, **kwargs):
        if self.current:
            self.current.output += " ".join(map(str, texts)) + "\n"


# -------- Fakes: what they compute depends on the weights and on all that was trained on ------------


def number_from(*values) -> int:
    """A number that depends on these values, in every interpreter the same."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:4], "big")


def compute(model):
    """Let the seconds of a step pass, in forward passes of 5 s."""
    seconds = sapo.time.current.step_seconds
    while seconds > 0:
        for hook in model.base_model._forward_pre_hooks.values():
            hook(model.base_model, ())
        sapo.time.sleep(min(seconds, 5.0))
        seconds -= 5.0


def fake_generate(model, codec, prompts, num_generations, config, seed, limit):
    """Right and wrong answers, chosen by the seed and by what was learned."""
    compute(model)
    rng = random.Random(number_from(seed, next(model.parameters()).sum().item()))
    choice = [[40, 3, 0], [41, 5, 7, 0]]
    return [[rng.choice(choice) for _ in range(num_generations)] for _ in prompts]


def fake_update(model, optimizer, groups, config, codec, limit):
    """Weights that depend on all groups that were ever trained on, in their order."""
    compute(model)
    process = sapo.time.current
    process.rates.add(optimizer.param_groups[0]["lr"])
    process.trained += [group.key for group in groups if group.key]
    if process.initial_weights is None:
        process.initial_weights = next(model.parameters()).sum().item()
    number = number_from([(group.completions, group.rewards) for group in groups]) % 1000 / 1000
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(number)
            optimizer.state[parameter]["step"] += 1
    rows = grpo.make_rows(groups, config)
    for row in rows:
        row.old_logprobs = torch.full([len(row.completion)], -1.0)
    return rows, [(0.0, 0, number)] if rows else []


def fake_reward(question, texts, kind="exact"):
    return [float(len(text) % 2) for text in texts]


def fake_warm_start(model, codec, config, tasks, progress):
    """Three steps; each process would get other weights, as on machines that round differently."""
    for step in range(1, 4):
        sapo.time.sleep(sapo.time.current.step_seconds)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number_from(sapo.time.current.name, step) % 1000)
        progress(step, 3, torch.tensor(0.0))


def fake_save_model(model, codec, card, folder):
    """Three files with the weights in them."""
    weight = next(model.parameters()).sum().item()
    Path(folder).mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        Path(folder, name).write_text(f"{name} {weight}")


# -------- The fixtures ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny():
    """The model and the codec of all processes."""
    config = sapo.resolve_config(sapo.read_environment(to_environ(QUICK))[0], {}, [])
    return grpo.load_model(config, config.tasks)


@pytest.fixture
def real_load_model(world):
    """`grpo.load_model` as it is outside."""
    return world.real_load_model


@pytest.fixture
def world(tmp_path, monkeypatch, tiny):
    world = World(tmp_path / "drive")
    world.real_load_model = grpo.load_model
    model, codec = tiny

    class Signals(sapo.Signals):
        def __init__(self):
            super().__init__()
            if world.current:
                world.current.signals = self

    for module in (sapo, coordinator, drive_store):
        monkeypatch.setattr(module, "time", world)
        monkeypatch.setattr(module, "print", world.print, raising=False)
    monkeypatch.setattr(sapo, "Signals", Signals)
    monkeypatch.setattr(coordinator, "plot", lambda panels: b"a picture")
    monkeypatch.setattr(sapo, "sample_answers", lambda run: [])
    fakes = {
        "load_model": lambda config, tasks: (sapo.copy.deepcopy(model), codec),
        "generate": fake_generate,
        "update_policy": fake_update,
        "group_rewards": fake_reward,
        "warm_start": fake_warm_start,
        "save_model": fake_save_model,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(grpo, name, fake)
    for module, name in CALLS:
        replacement = functools.partial(world.call, getattr(module, name))
        monkeypatch.setattr(module, name, replacement)
    yield world

    # Nobody goes on after the test.
    world.fault = lambda process, name, path: None
    for process in list(world.processes):
        process.is_suspended = False
        process.is_killed = True
        with contextlib.suppress(BaseException):
            world.run(lambda: process not in world.processes)  # noqa: B023
