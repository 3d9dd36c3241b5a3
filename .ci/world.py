"""A simulated world: one folder, one clock, and processes that take turns.

Each process is a thread that runs `sapo.main`. One runs at a time; at each call to the folder and in
each sleep it hands over to the one that wakes first. Time passes only in sleeps and in calls, so an
hour of waiting costs nothing, and a run repeats call by call. At each call a process can be killed,
suspended, stopped or get an error. `observe` sees each change of the folder, `trained` each update.

Of the program's insides this file knows the table SEAMS. Not seen here: torch, writes that are torn
within one call, and what libraries do in local files.
"""

import builtins
import contextlib
import copy
import errno
import functools
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

import grpo
import sapo

# -------- The seams: a rewrite of the program adapts this part --------------------------------------
# Each fake takes what the program passes and gives it what it expects. Between them stand functions
# that know nothing of the program: `compute`, `answers`, `learn`.


def load_model(*args):
    """The model and the codec of all processes; the model is one of a few hundred weights."""
    if not CACHE:
        codec = REAL["load_model"](*args)[1]
        sizes = dict(n_embd=4, n_layer=1, n_head=1, n_positions=16, vocab_size=codec.vocabulary)
        CACHE.append((transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval(), codec))
    return copy.deepcopy(CACHE[0])


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
    """Each process makes other weights, as on machines that round differently."""
    for step in range(1, 4):
        compute(model)
        fill(model, number_from(WORLD.current.name, step))
        yield step, torch.tensor(0.0)


def save_model(model, codec, card, folder):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        Path(folder, name).write_text(f"{name} {number_from(weights_of(model))}")


FAKES = (load_model, sample_in_batches, update_policy, warm_start, save_model)
SEAMS = {fake.__name__: fake for fake in FAKES}
REAL = {name: getattr(grpo, name) for name in SEAMS}


@functools.cache
def question(task: str, seed: int) -> tuple[str, str]:
    """The prompt in a rollout file and the right answer, by the program's own rules."""
    made = grpo.make_question(task, seed)
    return made.text, made.answer


# -------- What the fakes compute depends on all that must not be lost -------------------------------

CACHE = []
WORLD = None  # the one that runs


def number_from(*values) -> int:
    """A number that depends on these values, in every interpreter the same."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:4], "big")


def weights_of(model, optimizer=None) -> bytes:
    """All that a checkpoint must bring back: weights and, with an optimizer, its state."""
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
    """Let the seconds of a step pass, in forward passes of 5 s."""
    seconds = WORLD.current.step_seconds
    while seconds > 0:
        with torch.no_grad():
            model(torch.tensor([[0]]))
        WORLD.sleep(min(seconds, 5.0))
        seconds -= 5.0


def answers(model, seed: int, num: int) -> list[str]:
    """Answers that the seed and all weights choose. Some of them are right."""
    compute(model)
    rng = random.Random(number_from(seed, weights_of(model)))
    return [f"<answer>{rng.choice('1234')}</answer>" for _ in range(num)]


def learn(model, optimizer, groups: list) -> float:
    """Weights and moments that depend on all that was ever trained on. groups: ((task, seed),
    rewards, whether it is an own one)."""
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


# -------- Processes and their world -----------------------------------------------------------------

MOVES = ("replace", "rename", "link")
CHANGES = (*MOVES, "mkdir", "unlink", "remove", "rmdir")
CALLS = [(os, name) for name in ("open", "listdir", "scandir", "stat", "lstat", *CHANGES)]
CALLS += [(io, "open"), (builtins, "open")]
CLOCKS = ("time", "monotonic", "thread_time", "process_time", "perf_counter")
ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE)


def writes(args, kwargs) -> bool:
    """Whether a file is opened for writing, by these arguments after its path."""
    mode = args[0] if args else kwargs.get("mode", "r")
    if isinstance(mode, int):
        return bool(mode & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
    return not {*"wax+"}.isdisjoint(mode)


class Killed(BaseException):
    """SIGKILL: nothing in the program handles it."""


class Process:
    """A worker or the coordinator, over all its starts. `status` and `pending` are of the latest."""

    def __init__(self, world, name: str, settings: dict, step_seconds=0.3, clock_error=0.0):
        self.world = world
        self.name = name
        self.settings = settings
        self.step_seconds = step_seconds
        self.clock_error = clock_error
        self.turn = threading.Semaphore(0)
        self.faults = {}  # number of the call before which it happens -> (kind, *arguments)
        self.num_calls = self.num_pauses = 0
        self.calls = Counter()  # (name, path) -> how often
        self.fails_until, self.fail_once = 0.0, None
        self.output = ""
        self.statuses = []
        self.may_end = set()  # statuses that a scenario expects
        self.struck = []  # kinds of the faults that it has met
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
            self.world.fail(f"{self.name} ended in {error!r}")
        self.status = -9 if self.is_killed else self.status  # whatever it says of that itself
        self.statuses.append(self.status)
        self.ended_at = self.world.now
        self.world.running.remove(self)
        self.world.tell(self.world.ended, self)
        self.world.hand_over(self, is_ending=True)

    def strike(self, kind: str, *more):
        """Something happens to it. In a scenario: now; where it is killed, before its next call."""
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
        self.events = []  # (time, number, function): what happens then
        self.numbers = itertools.count()
        self.until = lambda: False
        self.deadline = math.inf
        self.violations = []
        self.call_seconds = 0.01
        self.delays = [0.0]  # seconds until a change of names shows in the listings of others
        self.shows = {}  # folder -> [(when it shows, who changed it, name, whether it was added)]
        self.refuse = lambda process, name, path: None  # the errno with which a call is refused
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
        """Call an observer, whose own calls are no process's. A mistake in it is a failure."""
        process, self.current = self.current, None
        try:
            observer(*args)
        except Exception:
            self.fail(traceback.format_exc())
        self.current = process

    def at(self, seconds: float, action) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), action))

    def run(self, until=None, seconds=20_000) -> None:
        """Let the processes take turns until the condition holds or all have ended."""
        self.until = until or (lambda: False)
        self.deadline = self.now + seconds
        with contextlib.redirect_stdout(Screen(self, sys.stdout)):
            self.hand_over(None)
        assert not self.violations, "\n".join(self.violations)
        states = [(process.name, process.statuses, process.num_calls) for process in self.processes]
        assert self.now <= self.deadline, f"not over after {seconds:.0f} s: {states}"

    def choose(self) -> Process | None:
        """Who has the next turn: the process that wakes first, or None for the test."""
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
        """What the program sleeps of its own will."""
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
        """A system call. Where a process makes it and it is about the folder, others come first,
        and it may fail."""
        process = self.current
        is_about_it = bool(args) and str(args[0]).startswith(str(self.drive))
        if process is None or process.is_calling or not is_about_it:
            return function(*args, **kwargs)
        path = os.path.abspath(args[0])
        process.num_calls += 1
        process.calls[name, path] += 1
        if process.num_calls in process.faults:
            process.strike(*process.faults.pop(process.num_calls))
        if process.is_killed:
            raise Killed
        self.sleep(self.call_seconds)

        # It fails for good, before its work or after it, or does not fail.
        if code := self.refuse(process, name, path):
            raise OSError(code, os.strerror(code), path)
        fault, process.fail_once = process.fail_once, None
        if self.now < process.fails_until:
            fault = self.rng.choice(["before", "after"])
        if fault and not (fault == "after" and name in CHANGES):
            raise self.error(path)
        process.is_calling = True  # an `open` with an opener counts once
        try:
            result = function(*args, **kwargs)
        finally:
            process.is_calling = False
        if name in CHANGES or (name == "open" and writes(args[1:], kwargs)):
            target = os.path.abspath(args[1]) if name in MOVES else path
            self.note_names(process, name, path, target)
            self.tell(self.observe, process, name, path, target)
        if fault:
            raise self.error(path)
        return self.listing(process, path, result) if name == "listdir" else result

    def error(self, path) -> OSError:
        code = self.rng.choice(ERRORS)
        return OSError(code, os.strerror(code), str(path))

    def note_names(self, process, name, path, target) -> None:
        """On a slow storage a name that comes or goes shows in others' listings after a delay."""
        if self.delays != [0.0] and name != "mkdir" and name != "open":
            shows_at = self.now + self.rng.choice(self.delays)
            for changed, is_added in ((path, False), (target, target != path)):
                folder, base = os.path.split(changed)
                change = (shows_at, process.name, base, is_added)
                self.shows.setdefault(folder, []).append(change)

    def listing(self, process, folder: str, names: list) -> list:
        """What a process sees: its own changes, and those of others that show by now. A change that
        shows hides older ones of its name."""
        seen, settled = set(names), set()
        for shows_at, author, name, is_added in reversed(self.shows.get(folder, ())):
            if shows_at <= self.now or author == process.name:
                settled.add(name)
            elif name not in settled:
                (seen.discard if is_added else seen.add)(name)
        return sorted(seen)

    # -------- What may happen to a process --------------------------------------------------------

    def do_kill(self, process, restart_after=None):
        process.is_killed = True
        self.restart(process, restart_after)

    def do_stop(self, process, restart_after=None):
        """SIGTERM, and a new start when it has ended."""
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
        """Another process of this name."""
        twin = self.process(process.name, step_seconds, process.clock_error, **process.settings)
        twin.struck.append("twin")
        twin.start()

    # -------- Beginning and end -------------------------------------------------------------------

    @contextlib.contextmanager
    def patched(self):
        """The folder, the clock, signals, the screen and the fakes, for the processes."""
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
        patch(tempfile, "tempdir", str(self.drive.parent))
        for module, name in CALLS:
            patch(module, name, functools.partial(self.call, getattr(module, name), name))
        pictures = sys.modules.get("matplotlib", False)
        sys.modules["matplotlib"] = None  # a picture would take a second
        try:
            yield self
        finally:
            for process in self.running:  # nobody goes on after the test
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
    """What a process prints is its output."""

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
