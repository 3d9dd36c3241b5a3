"""A simulated world: one shared folder, one clock, and processes that take turns.

Each process is a thread that runs `sapo.main`. Only one thread runs at a time. When it sleeps or
issues a system call on the shared folder, the process with the earliest wake-up time continues.
Time passes only in these sleeps and calls, so an hour of waiting costs no real time, and a run with
the same seed repeats call by call.

Before any such call, a process can be killed, suspended or stopped, or the call can fail. The
callbacks `World.observe` and `World.trained` report each change of the folder and each update of a
model to the test.

Only the first section, the seams, and `parse_board` in `World.patched` depend on the program's
internals. The simulation does not cover torch, writes that are torn within one call, or libraries'
writes to local files.
"""

import builtins
import contextlib
import errno
import functools
import gc
import hashlib
import heapq
import io
import itertools
import math
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
import transformers

import drive_store
import grpo
import sapo

gc.freeze()  # the garbage collection at the start of each process then skips the libraries

# -------- The seams: adapt this section when the program changes ----------------------------------
# Each fake replaces the function of grpo.py with the same name, and has the same arguments and
# return value. It leaves the work to `compute`, `answers` and `learn`, which are independent of the
# program.


class Model(torch.nn.Module):
    """A model with two parameters. The program writes heartbeats when `base_model` is called."""

    config = transformers.GPT2Config()  # the program estimates the memory of a step from it

    def __init__(self):
        super().__init__()
        self.base_model = torch.nn.Linear(2, 1)

    def forward(self):
        return self.base_model(torch.zeros(2))


def load_model(*args):
    """Return a model, with equal weights in all processes, and the codec of tiny."""
    if not CACHE:
        CACHE.append(REAL["load_model"](*args)[1])
    model = Model()
    fill(model, 1)
    return model, CACHE[0]


def estimate_generated_at_once(model, config, available):
    return 1000


def sample_in_batches(model, codec, prompts, num_generations, config, seed, limit):
    texts = answers(model, seed, len(prompts) * num_generations)
    ids = codec.encode_completions(texts, [True] * len(texts))
    return [ids[i : i + num_generations] for i in range(0, len(ids), num_generations)]


def update_policy(model, optimizer, groups, config, codec, limit):
    rows = [
        ((group.question.task, group.question.seed), group.rewards, group.key is None)
        for group in groups
    ]
    number = learn(model, optimizer, rows)
    step = {"loss": 0.0, "clipped_tokens": 0, "grad_norm": number}
    return grpo.update_numbers([], [step] * config.NUM_ITERATIONS, config)


def warm_start(model, codec, config, tasks):
    """Set weights that depend on the process, as if each machine rounded differently."""
    for step in range(1, 4):
        compute(model)
        fill(model, number_from(WORLD.current.name, step))
        yield step, torch.tensor(0.0)


def save_model(model, codec, card, folder):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        Path(folder, name).write_text(f"{name} {number_from(weights_of(model))}")


FAKES = (load_model, estimate_generated_at_once, sample_in_batches, update_policy, warm_start)
SEAMS = {fake.__name__: fake for fake in (*FAKES, save_model)}
REAL = {name: getattr(grpo, name) for name in SEAMS}


@functools.cache
def question(task: str, seed: int) -> tuple[str, str]:
    """Return the prompt and the correct answer of a question, as the program generates them."""
    made = grpo.make_question(task, seed)
    return made.text, made.answer


# -------- The work of the fakes -------------------------------------------------------------------
# The results depend on all state that a node must not lose, so any loss changes them.

CACHE = []
WORLD = None  # the world that is running


def number_from(*values) -> int:
    """Return a hash of these values, which is the same in every interpreter."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:4], "big")


def weights_of(model, optimizer=None) -> bytes:
    """Return the state that a checkpoint must restore: weights and, if given, optimizer state."""
    tensors = [*model.parameters()]
    for parameter in [*tensors] if optimizer else ():
        state = optimizer.state[parameter]
        tensors += [state[name] for name in sorted(state)]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


def fill(model, number: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number % 9973 / 1000)


def compute(model) -> None:
    """Let the simulated seconds of a step pass, in forward passes of at most 5 s.

    The program writes due heartbeats before each forward pass.
    """
    seconds = WORLD.current.step_seconds
    while seconds > 0:
        with torch.no_grad():
            model()
        WORLD.sleep(min(seconds, 5.0))
        seconds -= 5.0


def answers(model, seed: int, num: int) -> list[str]:
    """Return answers that depend on the seed and on all weights. Some of them are correct."""
    compute(model)
    rng = random.Random(number_from(seed, weights_of(model)))
    return [f"<answer>{rng.choice('1234')}</answer>" for _ in range(num)]


def learn(model, optimizer, groups: list) -> float:
    """Update weights and moments so that they depend on these groups and all earlier training.

    Return a number that serves as the gradient norm.

    groups: tuples ((task, seed), rewards, whether the node generated the group itself)
    """
    compute(model)
    before = weights_of(model, optimizer)
    number = number_from(groups, before) % 9973
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(number / 1000)
            state = optimizer.state[parameter]
            for name, start in (("step", torch.tensor(0.0)), ("exp_avg", 0 * parameter)):
                state.setdefault(name, start.clone()).add_(number % 97)
            state.setdefault("exp_avg_sq", 0 * parameter)
    after = weights_of(model, optimizer)
    WORLD.tell(WORLD.trained, WORLD.current, before, after, groups)
    return number / 9973


# -------- Processes and their world ---------------------------------------------------------------

MOVES = ("replace", "rename", "link")
CHANGES = (*MOVES, "mkdir", "unlink", "remove", "rmdir")
CALLS = [(os, name) for name in ("open", "listdir", "scandir", "stat", "lstat", *CHANGES)]
CALLS += [(io, "open"), (builtins, "open")]
CLOCKS = ("time", "monotonic", "thread_time", "process_time", "perf_counter")
ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE)


def writes(args, kwargs) -> bool:
    """Return whether `open` with these arguments, after the path, opens a file for writing."""
    mode = args[0] if args else kwargs.get("mode", "r")
    if isinstance(mode, int):
        return bool(mode & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
    return not {*"wax+"}.isdisjoint(mode)


class Killed(BaseException):
    """SIGKILL. If the program catches it, the next call on the folder raises it again."""


class Process:
    """A worker process or the coordinator, including its restarts.

    `status` (the exit code) and `pending` (signals) belong to the latest launch.
    """

    def __init__(self, world, name: str, settings: dict, step_seconds=0.3, clock_error=0.0):
        self.world = world
        self.name = name
        self.settings = settings
        self.step_seconds = step_seconds
        self.clock_error = clock_error
        self.turn = threading.Semaphore(0)
        self.faults = {}  # number of a call -> fault that happens before it: (kind, *arguments)
        self.num_calls = self.num_pauses = 0
        self.calls = Counter()  # (function, path) -> number of calls
        self.fails_until, self.fail_once = 0.0, None
        self.output = ""
        self.statuses = []
        self.may_end = set()  # exit codes that a scenario expects
        self.struck = []  # kinds of the faults injected so far
        self.began_at = self.ended_at = world.now

    def start(self, **settings):
        self.settings = {**self.settings, **settings}
        self.status = None
        self.is_killed = self.is_calling = False
        self.pending, self.handlers = [], {}
        self.wake_at = self.began_at = self.world.now
        self.world.running.append(self)
        threading.Thread(target=self.work, daemon=True).start()
        return self

    def work(self):
        self.turn.acquire()
        try:
            environ = {name: str(value) for name, value in self.settings.items()}
            self.status = sapo.main(environ)
        except Killed:
            self.status = -9
        except BaseException as error:
            self.world.fail(f"{self.name} ended with {error!r}")
        self.status = -9 if self.is_killed else self.status  # even if it caught Killed
        self.statuses.append(self.status)
        self.ended_at = self.world.now
        self.world.running.remove(self)
        self.world.tell(self.world.ended, self)
        self.world.hand_over(self, is_ending=True)

    def strike(self, kind: str, *more):
        """Inject a fault. A killed process ends as soon as it wakes or makes a call."""
        self.struck.append(kind)
        getattr(self.world, f"do_{kind}")(self, *more)

    @property
    def nodes(self) -> list[str]:
        count = self.settings.get("LOCAL_NODES", 1)
        return [self.name] if count == 1 else [f"{self.name}_{i}" for i in range(count)]


class World:
    def __init__(self, drive: Path, seed=0):
        self.drive = drive
        self.now = 1e9
        self.rng = random.Random(seed)
        self.turn = threading.Semaphore(0)
        self.running, self.processes = [], []
        self.current = None
        self.events = []  # a heap of (time, number, function to call at that time)
        self.numbers = itertools.count()
        self.until = lambda: False
        self.deadline = math.inf
        self.violations = []
        self.call_seconds = 0.01
        self.delays = [0.0]  # possible delays of changed names in others' listings, in seconds
        self.shows = {}  # folder -> [(visible from, process, name, whether it was added)]
        self.refuse = lambda process, name, path: None  # returns an errno if the call must fail
        self.observe = lambda process, name, path, target: None
        self.trained = lambda process, before, after, groups: None
        self.ended = self.stranger = lambda process: None

    def process(self, name, step_seconds=0.3, clock_error=0.0, **settings) -> Process:
        role = {"NODE_ROLE": name} if name == "coordinator" else {"NODE_ID": name}
        settings = {"GDRIVE_PATH": self.drive, **role, **settings}
        self.processes.append(Process(self, name, settings, step_seconds, clock_error))
        return self.processes[-1]

    def fail(self, text: str) -> None:
        self.violations.append(text)

    def tell(self, observer, *args) -> None:
        """Call an observer. Its calls belong to no process, and its exceptions fail the test."""
        process, self.current = self.current, None
        try:
            observer(*args)
        except Exception:
            self.fail(traceback.format_exc())
        self.current = process

    def at(self, seconds: float, action) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), action))

    def run(self, until=None, seconds=20_000) -> None:
        """Let the processes take turns until `until()` is true or all of them have ended.

        Fail on a violation, or after this many seconds of simulated time.
        """
        self.until = until or (lambda: False)
        self.deadline = self.now + seconds
        with contextlib.redirect_stdout(Screen(self, sys.stdout)):
            self.hand_over(None)
        assert not self.violations, "\n".join(self.violations)
        states = [(process.name, process.statuses, process.num_calls) for process in self.processes]
        assert self.now <= self.deadline, f"not finished after {seconds:.0f} s: {states}"

    def choose(self) -> Process | None:
        """Advance the clock. Return the process that wakes first, or None to resume the test."""
        self.current = None
        while not (self.violations or self.now > self.deadline or self.until()):
            first = min((process.wake_at for process in self.running), default=math.inf)
            if self.events and self.events[0][0] <= first:
                self.now = max(self.now, self.events[0][0])
                heapq.heappop(self.events)[2]()
            elif first == math.inf:
                return None
            else:
                self.now = max(self.now, first)
                self.current = self.rng.choice([p for p in self.running if p.wake_at == first])
                return self.current
        return None

    def hand_over(self, process, is_ending=False) -> None:
        chosen = self.choose()
        if chosen is not process or is_ending:
            (chosen or self).turn.release()
            if not is_ending:
                (process or self).turn.acquire()

    def pause(self, seconds: float) -> None:
        """Replace `time.sleep` for processes, and count the calls."""
        self.current.num_pauses += 1
        self.sleep(seconds)

    def sleep(self, seconds: float) -> None:
        process = self.current
        process.wake_at = self.now + seconds
        self.hand_over(process)
        if process.is_killed:
            raise Killed
        while process.pending:
            number = process.pending.pop()
            if number not in process.handlers:
                process.is_killed = True
                raise Killed
            process.handlers[number](number, None)

    def call(self, function, name, *args, **kwargs):
        """Run the system call `function`.

        When a process calls on the shared folder, other processes run first, and the call may fail.
        """
        process = self.current
        if process is None or process.is_calling or not args:
            return function(*args, **kwargs)
        path = str(args[0])
        if not path.startswith(str(self.drive)):
            return function(*args, **kwargs)
        process.num_calls += 1
        process.calls[name, path] += 1
        if process.num_calls in process.faults:
            process.strike(*process.faults.pop(process.num_calls))
        if process.is_killed:
            raise Killed
        self.sleep(self.call_seconds)

        # An error is raised before the call does its work or, for one of CHANGES, possibly
        # afterwards.
        if code := self.refuse(process, name, path):
            raise OSError(code, os.strerror(code), path)
        fault, process.fail_once = process.fail_once, None
        if self.now < process.fails_until:
            fault = self.rng.choice(["before", "after"])
        is_write = name in CHANGES or (name == "open" and writes(args[1:], kwargs))
        if fault and not (fault == "after" and name in CHANGES):
            raise self.error(path, is_write)
        process.is_calling = True  # an `open` with an opener counts once
        try:
            result = function(*args, **kwargs)
        finally:
            process.is_calling = False
        if is_write:
            target = str(args[1]) if name in MOVES else path
            self.note_names(process, name, path, target)
            self.tell(self.observe, process, name, path, target)
        if fault:
            raise self.error(path, is_write)
        return self.listing(process, path, result) if name == "listdir" else result

    def error(self, path, is_write: bool) -> OSError:
        code = self.rng.choice(ERRORS)
        if code == errno.ENOSPC and not is_write:  # a full disk does not keep anyone from reading
            code = errno.EIO
        return OSError(code, os.strerror(code), str(path))

    def note_names(self, process, name, path, target) -> None:
        """On a slow storage backend, choose when a changed name becomes visible in listings."""
        if self.delays != [0.0] and name != "mkdir" and name != "open":
            shows_at = self.now + self.rng.choice(self.delays)
            for changed, is_added in ((path, False), (target, target != path)):
                folder, base = os.path.split(changed)
                change = (shows_at, process.name, base, is_added)
                self.shows.setdefault(folder, []).append(change)

    def listing(self, process, folder: str, names: list) -> list:
        """Return the names that a process sees in a folder: `names` without invisible changes.

        Changes by other processes become visible after a delay. Once a change is visible, older
        changes of the same name no longer matter.
        """
        seen, settled = set(names), set()
        for shows_at, author, name, is_added in reversed(self.shows.get(folder, ())):
            if shows_at <= self.now or author == process.name:
                settled.add(name)
            elif name not in settled:
                (seen.discard if is_added else seen.add)(name)
        return sorted(seen)

    # -------- Faults (see `Process.strike`) -------------------------------------------------------

    def do_kill(self, process, restart_after=None):
        process.is_killed = True
        self.restart(process, restart_after)

    def do_stop(self, process, restart_after=None):
        """Send SIGTERM and, if `restart_after` is given, restart the process once it has ended."""
        process.pending.append(signal.SIGTERM)
        self.restart(process, restart_after)

    def restart(self, process, seconds):
        def start():
            if process in self.running:
                self.at(1.0, start)
            elif process.statuses[-1] != 3:
                process.start()

        if seconds is not None:
            self.at(seconds, start)

    def do_suspend(self, process, seconds):
        self.current.wake_at = self.now + seconds
        self.hand_over(process)

    def do_error(self, process, when):
        process.fail_once = when

    def do_outage(self, process, seconds, of_all=False):
        for each in self.processes if of_all else [process]:
            each.struck.append("outage")
            each.fails_until = self.now + seconds

    def do_stranger(self, process):
        self.tell(self.stranger, process)

    def do_twin(self, process, step_seconds):
        """Start another process with the same name."""
        twin = self.process(process.name, step_seconds, process.clock_error, **process.settings)
        twin.struck.append("twin")
        twin.start()

    # -------- Setup and cleanup -------------------------------------------------------------------

    @contextlib.contextmanager
    def patched(self):
        """Redirect processes' system calls, clocks and signals to this world, and use the fakes."""
        global WORLD
        WORLD = self
        mine = []

        def patch(module, name, replacement):
            mine.append((module, name, getattr(module, name)))
            setattr(module, name, replacement)

        def dispatch(module, name, simulated):
            real = getattr(module, name)
            patch(module, name, lambda *a, **k: (simulated if self.current else real)(*a, **k))

        for name in CLOCKS:
            dispatch(time, name, lambda: self.now)
        dispatch(time, "time", lambda: self.now + self.current.clock_error)
        dispatch(time, "sleep", self.pause)
        dispatch(secrets, "token_hex", lambda n=8: f"{self.rng.getrandbits(8 * n):0{2 * n}x}")
        dispatch(threading, "main_thread", threading.current_thread)
        dispatch(signal, "getsignal", lambda n: self.current.handlers.get(n, signal.SIG_DFL))
        dispatch(signal, "signal", lambda n, handler: self.current.handlers.update({n: handler}))
        for name, fake in SEAMS.items():
            patch(grpo, name, fake)
        parse = functools.lru_cache(1000)(drive_store.parse_board)  # most polls find the same names
        patch(drive_store, "parse_board", lambda names: parse(tuple(names)))
        patch(tempfile, "tempdir", str(self.drive.parent))
        for module, name in CALLS:
            patch(module, name, functools.partial(self.call, getattr(module, name), name))
        pictures = sys.modules.get("matplotlib", False)
        sys.modules["matplotlib"] = None  # a plot would take a second
        try:
            yield self
        finally:
            for process in self.running:  # end the processes that are still running
                process.is_killed, process.wake_at = True, self.now
            self.violations, self.events = [], []
            with contextlib.suppress(AssertionError):
                self.run()
            for module, name, value in reversed(mine):
                setattr(module, name, value)
            sys.modules["matplotlib"] = pictures
            if pictures is False:
                del sys.modules["matplotlib"]


class Screen:
    """A stdout that appends each process's text to `Process.output`."""

    def __init__(self, world, real):
        self.world, self.real = world, real

    def write(self, text):
        if self.world.current is None:
            return self.real.write(text)
        self.world.current.output += text

    def __getattr__(self, name):
        if name == "reconfigure":
            raise AttributeError(name)
        return getattr(self.real, name)
