"""The swarm as one process sees it: who is alive, the round clock, what peers have published.

`Swarm` is all that a process knows of the shared folder; `Coordinator` is the role that opens rounds; the
readers at the end (status, validation, comparison, monitor) change nothing. A store is passed in.
"""

import bisect
import contextlib
import csv
import errno
import functools
import io
import itertools
import json
import math
import os
import random
import shutil
import socket
import statistics
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

COORDINATOR = "coordinator"  # the coordinator's seat: one per experiment, whoever holds it

# -------- Life ------------------------------------------------------------------------------------


class Life:
    """Who is alive: a node of which anything new was seen within `stale_after` seconds.

    Judged by when *this* reader first saw it, on its own monotonic clock: the nodes' clocks need not agree.
    Timestamps count at the first look only, so that an hour-old file does not look fresh.
    """

    def __init__(self, store, stale_after: float):
        self.store, self.stale_after = store, stale_after
        self.sessions = {}  # node -> newest session
        self.beats = {}  # node -> last heartbeat read
        self.abouts = {}  # (node, session) -> what it said of itself when it registered
        self._evidence = {}  # (node, kind) -> last value seen
        self._seen = {}  # node -> monotonic time of the newest evidence
        self._next_beat = {}  # node -> when its heartbeat is worth reading again

    def note(self, node: str, kind: str, value, age: float = 0.0) -> bool:
        """Something of this node was seen. True, and a sign of life, if it is new of its kind.

        age: seconds since it was written, by the writer's clock; believed only of the first of its kind.
        """
        if value == self._evidence.get((node, kind)):
            return False
        written = time.monotonic() - (0.0 if (node, kind) in self._evidence else age)
        self._evidence[node, kind] = value
        self._seen[node] = max(self._seen.get(node, -math.inf), written)
        return True

    def refresh(self, nodes=None) -> None:
        """Look at the sessions (one listing), and at registration and heartbeat of `nodes` (None: all)."""
        self.sessions, now = self.store.sessions(), time.monotonic()
        if len(self._seen) > 2 * len(self.sessions) + 100:  # names that came and went, a stranger's
            for known in (self._seen, self._evidence, self.abouts, self.beats, self._next_beat):
                for key in [k for k in known if (k if isinstance(k, str) else k[0]) not in self.sessions]:
                    del known[key]
        for node, session in self.sessions.items():  # it begins with its start in milliseconds
            self.note(node, "session", session, age_of(int(session[:13]) / 1000))
        for node in self.sessions if nodes is None else self.sessions.keys() & set(nodes):
            key = node, self.sessions[node]
            if key not in self.abouts and (about := self.store.registration(*key)):
                self.abouts[key] = about
            if now >= self._next_beat.get(node, 0.0) and (beat := self.store.read_heartbeat(node)):
                self.beats[node] = beat
                if self.note(node, "heartbeat", beat.get("time"), age_of(beat.get("time"))):
                    # A mount uploads a rewritten file when nobody has used it for 5 s: leave it in peace.
                    self._next_beat[node] = now + min(10.0, self.stale_after / 8)

    def about(self, node: str) -> dict:
        """What this node's newest session said when it registered, if that was looked at."""
        return self.abouts.get((node, self.sessions.get(node)), {})

    def has_left(self, node: str) -> bool:
        """Whether its newest session said goodbye (finished or stopped)."""
        beat = self.beats.get(node, {})
        return beat.get("session") == self.sessions.get(node) and beat.get("state") in ("done", "stopped")

    def silence(self, node: str) -> float:
        """Seconds since the newest evidence, infinite if there is none."""
        return time.monotonic() - self._seen.get(node, -math.inf)

    def is_live(self, node: str) -> bool:
        fresh = self.silence(node) < self.stale_after
        return fresh and not self.has_left(node) and not is_known_dead(self.about(node))

    def status(self, node: str) -> str:
        """For people: "live", "left" or "dead" (which a node that never was is, too)."""
        return "live" if self.is_live(node) else "left" if self.has_left(node) else "dead"

    def workers(self) -> list[str]:
        return sorted(n for n in self.sessions if self.about(n).get("role") == "worker")

    def live_workers(self) -> list[str]:
        return [n for n in self.workers() if self.is_live(n)]


def age_of(timestamp) -> float:
    """Seconds since a wall-clock timestamp somebody wrote; 0 if it makes no sense or lies in the future."""
    now = time.time()
    return now - timestamp if isinstance(timestamp, int | float) and 0 < timestamp < now else 0.0


def process_identity() -> dict:
    """Host, boot, pid and start time of this process: by these others on the host see that it died."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot_id": boot_id(), "pid": pid, "pid_start": pid_start(pid)}


def is_known_dead(about: dict) -> bool:
    """Whether a process with this `process_identity` ran on this host and is gone. False: unknown."""
    here, pid = (socket.gethostname(), boot_id()), about.get("pid")
    if None in here or (about.get("host"), about.get("boot_id")) != here:
        return False
    return isinstance(pid, int) and 0 < pid < 2**31 and pid_start(pid) not in (None, about.get("pid_start"))


@functools.cache
def boot_id() -> str | None:
    """Names this boot of this machine: two containers called "localhost" are two. Linux only."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def pid_start(pid: int) -> str | None:
    """Start time of a process in ticks since boot, "ended" also of a zombie, None: unknown. Linux only."""
    try:
        with contextlib.suppress(PermissionError):  # another user's: /proc may hide it (hidepid)
            os.kill(pid, 0)  # asks only
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()  # names: bytes
        return "ended" if fields[0] in "ZX" else fields[19]
    except ProcessLookupError:
        return "ended"
    except OSError:
        return None


# -------- The swarm as a worker sees it -----------------------------------------------------------


@dataclass(eq=False)  # a queue that compares fields while another thread appends to it raises IndexError
class Job:
    """A write that waits for the folder."""

    function: object
    args: tuple
    tries: int = 0  # that failed though the folder takes other files
    again: float = 0.0  # when it is tried next

    def __str__(self):  # (round, stage, node), or a path
        named = [str(arg) for arg in self.args[:3] if isinstance(arg, str | int)]
        return " ".join([self.function.__name__, *(named[:1] if named and "/" in named[0] else named)])


class Swarm:
    """What this process knows of the shared folder. A daemon thread looks at it and writes what is queued.

    The trainer reads attributes and never touches the folder, so it cannot hang on it. Who writes what:
        main thread    round, state, what give_up sets; with `publish` its own rollouts, with `open` the clock
        swarm thread   clock, sessions, is_led, looked_at_round, rollouts, refused (coordinator: round), files
        hub thread     nothing but lines (uploads, see `push_to_hub` in sapo.py)

    nodes: {id: session} of this process. config: see Config in sapo.py. note(event, text): called with what
    people should know. lines: (path, line) of logs, see class Log in sapo.py.
    """

    def __init__(self, store, nodes, config, note, lines):
        self.store, self.nodes, self.config, self.note, self.lines = store, dict(nodes), config, note, lines
        draws = COORDINATOR not in nodes and config.NUM_TRANSPLANT_TREES > 0
        self.max_peers = config.FETCH_MAX_PEERS if draws else 0  # 0: no rollouts are read
        first = config.MAX_STAGES - 1 if config.ROLLOUT_PUBLISH_FREQUENCY == "round" else 0
        self.publishing_stages = range(first, config.MAX_STAGES)
        self.life = Life(store, config.STALE_AFTER_SECONDS)
        self.clock = -1  # highest round known to be open; never goes back
        self.sessions = {}  # node -> newest session, of everybody who ever registered
        self.is_led = False  # whether a coordinator is alive
        self.leaderless_since = self._good_look = time.monotonic()
        self.rollouts = {}  # (round, stage, node) -> groups, structure checked: this round's and older ones
        self.refused = {}  # (round, stage, node) -> when a file that could not be used is read again
        self.round, self.looked_at_round = 0, -1  # the one that is worked on; of the last look at the folder
        self.given_up = set()  # who was awaited in vain before anybody published
        self.in_vain, self.wait_from = 0, 0  # waits in vain, in a row; round of the next wait
        self.state = "running"  # as the heartbeat says it
        self._published = {}  # (round, stage) -> peers that have a file there
        self._chosen = {}  # round -> peers to read
        self.set_aside, self._gone = set(), set()  # writes that failed for good; awaited peers that died
        self._told = set()  # reasons why sessions do not count
        self._jobs, self._lock, self._wake = deque(), threading.Lock(), threading.Event()
        self._wanted = self._there = False  # whether somebody waits for news; its own registration was seen
        self._lead = None  # what a coordinator does after each look
        self._closing = threading.Event()  # nothing more will be posted
        self.is_abandoned = False  # set by who leaves: the thread ends too, whatever is queued
        self._failing = None  # monotonic time at which an outage began
        self._next_beat = self._could_write = self._reading = 0.0
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)

    # -- for the trainer

    @property
    def down(self) -> bool:
        """Whether the folder fails (an error since the last look) or hangs (no good look for 30 s)."""
        return self._failing is not None or time.monotonic() - self._good_look > 30.0

    @property
    def hangs(self) -> bool:
        """Whether it gives no answer at all: the Swarm's thread is inside a call."""
        return self.down and self._failing is None

    @property
    def superseded(self) -> list[str]:
        """This process's nodes of which a newer session is running."""
        return [node for node, s in self.nodes.items() if s and self.sessions.get(node, "") > s]

    @property
    def alone(self) -> bool:
        """Whether nobody else ever registered, nor published in the rounds that count."""
        return self.sessions.keys() <= self.nodes.keys() and not self.has_met

    @property
    def has_met(self) -> bool:
        """Whether anybody else's rollouts were seen in the rounds that count."""
        return any(self._published.values())

    def start(self, lead=None) -> None:
        """One look in the foreground (or OSError): nothing is decided blindly. Then the thread.

        The nodes of one process draw from each other's older rounds too: after a restart they are read again.
        lead: called after each look of the thread, see Coordinator.
        """
        self._good_look = time.monotonic()  # loading a checkpoint may have taken minutes
        self._look()
        rounds = range(max(0, self.round - self.config.ROLLOUT_MAX_AGE), self.round)
        several = self.max_peers and len(self.nodes) > 1
        for key in itertools.product(rounds if several else (), self.publishing_stages):
            for node in self.nodes.keys() & self.store.nodes("rollouts", *key):
                self._fetch_one((*key, node))
        self._lead = lead
        self._thread.start()

    def post(self, function, *args) -> None:
        """Hand over a write. They are kept while the folder is away, and done in order, see `_do`."""
        self._jobs.append(Job(function, args))
        self._wake.set()

    def publish(self, round_: int, stage: int, node: str, about: dict, groups: dict) -> None:
        """Publish a node's groups; the other nodes of this process see them at once."""
        if self.max_peers:
            keyed = [group | {"key": (round_, stage, node, int(i))} for i, group in groups.items()]
            with self._lock:
                self.rollouts[round_, stage, node] = keyed
        self.post(self.store.publish, round_, stage, node, about, groups)

    def open(self, round_: int) -> None:
        """Open a round where nobody leads, if it is not open; say who was best in the one before."""
        if round_ > self.clock:
            self.clock = round_
            self.post(self.store.open_round, round_, next(iter(self.nodes)))
            if round_ > 0:
                self.post(write_winners, self.store, round_ - 1)

    def end(self, round_: int) -> None:
        """In the thread, after the last round: open it where nobody leads (any more); its winners."""
        if not self.is_led:
            self.open(round_)
            self.post(write_winners, self.store, round_)

    def missing(self, round_: int, stage: int) -> set[str]:
        """Peers to wait for: chosen ones that have not published this stage and may still do so.

        Of them only those that published it the round before: who did not is not waited for again.
        Before anybody else has published at all, registered peers are waited for once.
        """
        before, now = (self._published.get((r, stage), set()) for r in (round_ - 1, round_))
        awaited = self._awaited(round_)
        return (awaited & before if self.has_met else awaited) - now - self._gone

    def _awaited(self, round_: int) -> set[str]:
        if self.wait_from > round_:
            return set()
        if self.has_met:
            return self._chosen.get(round_, set()) & self.sessions.keys()
        return set(without_seat(self.sessions)) - self.nodes.keys() - self.given_up

    def give_up(self, late: set[str]) -> None:
        """They were waited for in vain: the next wait is after 1, 2, 4 … rounds, whoever it was each time.

        So nobody can cost every round. ROLLOUT_MAX_AGE rounds at most: where the folder is always late, nodes
        must not run away from what the others publish.
        """
        self.given_up |= late
        again = self.round <= self.wait_from + 1  # in the first round with a wait, or the one after it
        self.in_vain = self.in_vain + 1 if again else 1
        self.wait_from = self.round + min(2 ** (self.in_vain - 1), max(1, self.config.ROLLOUT_MAX_AGE))

    def groups_of(self, round_: int, stage: int | None = None) -> dict[str, list[dict]]:
        """{node: its groups} of one round and stage (None: all stages), as far as they have come."""
        found, rollouts = {}, self.rollouts  # the other thread adds to it, or puts another in its place
        for key in sorted(key for key in [*rollouts] if key[0] == round_ and stage in (None, key[1])):
            found.setdefault(key[2], []).extend(rollouts[key])
        return found

    def wait(self) -> None:
        """Called by whoever waits for news: the next look comes as soon as the folder's pace allows."""
        self._wanted = True
        self._wake.set()
        time.sleep(0.01)

    def flush_log(self) -> None:
        """Queue the log lines that have gathered, those of one file together."""
        texts = {}
        with self._lock:
            for path, line in [self.lines.popleft() for _ in range(len(self.lines))]:
                texts[path] = texts.get(path, "") + line + "\n"
        for path, text in texts.items():
            self.post(self.store.append, path, text)

    def close(self, patience: float) -> int:
        """Write what is queued, end the thread; how many writes did not get through in `patience` seconds."""
        self.flush_log()
        self._jobs.extend(self._beats())
        self.post(self.store.sweep)
        for job in list(self._jobs):
            job.again = 0.0  # now or never
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(patience)
        else:  # it was never started
            with contextlib.suppress(OSError):
                self._write()
        return len(self._jobs)

    # -- the thread

    def _run(self) -> None:
        look_at, pause = 0.0, 1.0  # the next look, 0.5 s sooner if somebody waits; the rest after an error
        while not self.is_abandoned and (self._jobs or not self._closing.is_set()):
            try:
                began = time.monotonic()
                if self._failing is not None or began >= look_at - 0.5 * self._wanted:
                    self._wanted, self._reading = False, 0.0
                    self._look()
                    listing = time.monotonic() - began - self._reading  # each file is read only once
                    look_at = time.monotonic() + min(5.0, max(0.02, 10 * listing)) + 0.5
                self._write()
                if self._failing is not None:
                    self.note("outage over", f"the shared folder is back after {began - self._failing:.0f} s")
                self._failing, pause = None, 1.0
                self._wake.wait(max(0.0, look_at - 0.5 * self._wanted - time.monotonic()))
                self._wake.clear()
            except Exception as error:  # nothing may end this thread
                if self._failing is None:
                    self._failing, what = time.monotonic(), f"the shared folder fails ({error})"
                    self.note("outage", f"{what}; training goes on, writes are queued")
                self._closing.wait(pause * random.uniform(0.5, 1.0))
                time.sleep(0.1)  # also while closing
                pause = min(2 * pause, 15.0)

    def _write(self) -> None:
        """Heartbeats, log lines, and the queue in order. OSError if the folder takes no writes at all."""
        if time.monotonic() >= self._next_beat:
            for beat in self._beats():
                self._do(beat)
            self._next_beat = time.monotonic() + min(15.0, self.life.stale_after / 4)
            self.flush_log()
        for job in list(self._jobs):
            if time.monotonic() >= job.again and self._do(job):
                self._jobs.remove(job)

    def _beats(self) -> list[Job]:
        """A heartbeat of every node of this process that has registered, and that no newer session is of."""
        about, replaced = dict(round=self.round, state=self.state), self.superseded
        ours = [(n, dict(session=s, **about)) for n, s in self.nodes.items() if s and n not in replaced]
        return [Job(self.store.heartbeat, beat) for beat in ours]

    def _do(self, job: Job) -> bool:
        """Whether a job is done with. One that fails for its own path lets others pass, and is set aside."""
        self._be_here()
        try:
            job.function(*job.args)
        except Exception as error:  # one job stops neither the queue nor training
            if isinstance(error, OSError):
                now, (most, pause) = time.monotonic(), (3, 1.0) if self._closing.is_set() else (7, 10.0)
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # there may be room for smaller files
                known = now < self._could_write + pause / 2 and not full  # one answers for many
                if not (known or self.store.can_write()):
                    raise
                self._could_write = self._could_write if known else now
                job.tries, job.again = job.tries + 1, now + pause
                if full and job.tries == 1:
                    self.note("disk", f"{job} waits for room: {error}")
                if full or job.tries < most:
                    return False
            if str(job) not in self.set_aside:  # once: it is said in a log, perhaps the very one that fails
                self.set_aside.add(str(job))
                self.note("error", f"{job} was set aside: {error}")
        return True

    def _be_here(self, nodes: int = 1) -> None:
        """OSError if this process's first `nodes` had registered and one has not: that is another folder."""
        here = all(self.store.is_registered(*pair) for pair in [*self.nodes.items()][:nodes])
        if self._there and not here:
            why = "this node is not registered there: another folder in its place? If not, start it again"
            raise OSError(errno.ENOTCONN, why)
        self._there = here

    def _look(self) -> None:
        """Registrations, the clock, the coordinator, and what peers have published."""
        round_ = self.round
        self.life.refresh([COORDINATOR])
        self.sessions = self.life.sessions
        self._be_here(len(self.nodes))
        clock, openers = self.store.clock()
        if COORDINATOR in openers:  # rounds that workers open are no sign of its life
            self.life.note(COORDINATOR, "clock", clock)
        self.clock = max(self.clock, clock)
        if self.life.is_live(COORDINATOR) != self.is_led:
            self.is_led, self.leaderless_since = not self.is_led, time.monotonic()
        if self.max_peers:
            self._fetch(round_)
        if self.hangs:
            silence = time.monotonic() - self._good_look
            self.note("outage over", f"the shared folder answers again, after {silence:.0f} s")
        for why in {w for w in self.store.skipped if w.startswith("session")} - self._told:
            self._told.add(why)
            self.note("clock", why)
        self._good_look, self.looked_at_round = time.monotonic(), round_
        if self._lead is not None:
            self._lead()

    def _fetch(self, round_: int) -> None:
        """Read the chosen peers' files of this round; at its first look also those of the rounds before."""
        oldest = max(0, round_ - self.config.ROLLOUT_MAX_AGE)
        rounds = [round_] if self.looked_at_round == round_ else range(round_, oldest - 1, -1)
        keys = [*itertools.product(rounds, self.publishing_stages)]
        found = {key: set(self.store.nodes("rollouts", *key)) - self.nodes.keys() for key in keys}
        self._published = published = recent(self._published, min(oldest, round_ - 1)) | found  # see missing
        began = time.monotonic()
        for r, stage in keys:
            for peer in sorted(published[r, stage] & self._choose(r)):
                self._fetch_one((r, stage, peer))
        self._reading = time.monotonic() - began
        if late := self._awaited(round_) - published[round_, self.publishing_stages[-1]]:
            self.life.refresh(random.sample(sorted(late), min(len(late), 8)))  # there may be thousands
        self._gone = {peer for peer in late if is_known_dead(self.life.about(peer))}
        self._chosen = {r: peers for r, peers in self._chosen.items() if r >= oldest}
        self.refused = recent(self.refused, oldest)
        with self._lock:
            self.rollouts = recent(self.rollouts, oldest)

    def _choose(self, round_: int) -> set[str]:
        """Up to max_peers peers to read, drawn from who published the round before, then this round."""
        chosen = self._chosen.setdefault(round_, set())
        for r in (round_ - 1, round_):
            there = [peers for key, peers in self._published.items() if key[0] == r]
            others = set().union(*there) - chosen - {key[2] for key in self.refused}
            chosen |= set(random.sample(sorted(others), min(len(others), self.max_peers - len(chosen))))
        return chosen

    def _fetch_one(self, key: tuple) -> None:
        """Read a peer's file once. What cannot be used may be on its way: again after 2 s, then every 30."""
        if key in self.rollouts or time.monotonic() < self.refused.get(key, 0.0):
            return
        config = self.config
        own = config.NUM_TRAIN_SAMPLES * config.LOCAL_OVERSAMPLE * config.MAX_STAGES  # groups of an own file
        most = own if key[2] in self.nodes else 2 * config.NUM_TRAIN_SAMPLES * len(self.nodes)  # are kept
        tokens = own * config.NUM_GENERATIONS * config.MAX_NEW_TOKENS
        try:
            groups = self.store.fetch(*key, 2**20 + 2**8 * tokens)
            if len(groups) > most:
                groups = random.sample(groups, most)
        except (OSError, ValueError) as error:  # BadFile is a ValueError
            if key not in self.refused:
                self.note("reject", f"{key[2]}: {error}")
            self.refused[key] = time.monotonic() + (30.0 if key in self.refused else 2.0)
            return
        self.rollouts[key] = [shortened(group, config) for group in groups]
        self.refused.pop(key, None)


def shortened(group: dict, config) -> dict:
    """A peer's group as it is kept: at most G completions, as one of this node's own.

    A text of over 64 characters a token, more than `verify` allows, is replaced by one that it refuses.
    """
    drawn, longest = group["completions"], 128 * config.MAX_NEW_TOKENS
    if len(drawn) > config.NUM_GENERATIONS:
        drawn = random.Random(str(group["key"])).sample(drawn, config.NUM_GENERATIONS)
    refused = {"response": "", "finished": False, "claimed": None}
    return group | {"completions": [c if len(c["response"]) <= longest else refused for c in drawn]}


def without_seat(sessions) -> list[str]:
    """The nodes among those that have registered, in order: all but the coordinator's seat."""
    return sorted(sessions.keys() - {COORDINATOR})


def recent(by_key: dict, oldest: int) -> dict:
    """What there is of rounds from `oldest` on, of a dict with keys (round, …)."""
    return {key: value for key, value in by_key.items() if key[0] >= oldest}


# -------- The role that opens rounds --------------------------------------------------------------


def mean_rewards(store, round_: int, nodes, limit: int = 32) -> dict[str, float]:
    """{node: its mean reward in a round} of the first `limit` of `nodes`, the best first."""
    found = rows_by("node_id", store.rewards(round_, nodes, limit))
    means = {node: average(row["reward"] for row in rows) for node, rows in found.items()}
    return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))


def write_winners(store, round_: int, means: dict | None = None) -> None:
    """winners/round_000012.json, for people: the `mean_rewards` of a round."""
    if means := means or mean_rewards(store, round_, store.sessions()):
        store.rewrite(f"winners/round_{round_:06d}.json", means)


def rounds_to_keep(config) -> int:
    """Rounds of rollouts that retention leaves: what was asked for, and what a resumed node may draw from."""
    return max(config.ROLLOUT_KEEP_LAST_N_ROUNDS, config.CHECKPOINT_INTERVAL + config.ROLLOUT_MAX_AGE)


def is_round_over(strategy: str, elapsed: float, interval: float, live, submitted) -> bool:
    """Whether the clock moves on. time: interval over; completion: all who live submitted; hybrid: either.

    It never runs on for nobody: without a live worker and without any reward of this round, it waits.
    """
    in_time = elapsed >= interval and bool(live or submitted)
    complete = bool(submitted) and set(live) <= set(submitted)
    return {"time": in_time, "completion": complete, "hybrid": in_time or complete}[strategy]


class Coordinator:
    """The role that keeps a swarm in step: it opens rounds, trains nothing and loads no model.

    swarm: a Swarm of the coordinator's seat, not yet started. Its thread beats, writes the log, says when the
    folder fails, and calls `step` after each look. Round 0 is held until the first reward (models take
    minutes to download), and where NUM_WORKERS is set the first one until so many live, an interval at most.
    """

    def __init__(self, swarm, config, say):
        self.swarm, self.store, self.config, self.say = swarm, swarm.store, config, say
        self.life, self.paces, self.is_over = swarm.life, deque(maxlen=10), False
        swarm.round = self.store.clock()[0]
        if swarm.round < 0:  # none, or the state folder was lost: then the last rewarded one
            swarm.round = max(0, self.store.last_rewarded())
            self.store.open_round(swarm.round, COORDINATOR)
        more = swarm.round < config.MAX_ROUNDS - 1
        self.opened, self.holding = time.monotonic(), swarm.round == 0 or (more and config.NUM_WORKERS > 0)
        how = f"{config.ROUND_ADVANCE}, interval {config.COORDINATOR_ROUND_INTERVAL:g} s"
        self.say(f"coordinator: round {swarm.round} is open ({how})" + ", waiting for workers" * self.holding)

    def run(self, should_stop) -> str:
        """Keep the clock until MAX_ROUNDS is reached and every worker is done. Returns how it ended."""
        self.swarm.start(lead=self.step)
        while not (should_stop() or self.swarm.superseded or self.is_over):
            self.swarm.wait()
        return "finished" if self.is_over else "superseded" if self.swarm.superseded else "stopped"

    def step(self) -> None:
        """In the Swarm's thread, after a look at the folder: perhaps the next round, perhaps the end."""
        if self.is_over:
            return
        submitted, live = self._look()
        config, elapsed = self.config, time.monotonic() - self.opened
        late, interval = sorted(set(live) - set(submitted)), config.COORDINATOR_ROUND_INTERVAL
        passed = not (live or self.holding) and self.store.last_rewarded() > self.swarm.round  # in an outage
        if self.holding:
            begun = self.store.rounds("rewards")  # of any stage
            self.opened = self.opened if begun else time.monotonic()
            self.holding = not begun or (len(live) < config.NUM_WORKERS and elapsed < interval)
        elif self.swarm.round >= config.MAX_ROUNDS - 1:
            self.is_over = not late or elapsed > interval + config.STALE_AFTER_SECONDS  # they can end alone
            if self.is_over:
                self._tell(self.swarm.round, submitted, late)
        elif passed or is_round_over(config.ROUND_ADVANCE, elapsed, interval, live, submitted):
            self.store.open_round(self.swarm.round + 1, COORDINATOR)  # may fail: then this round goes on
            self.swarm.round += 1
            self.opened = time.monotonic()
            self.paces.append(elapsed)
            self._tell(self.swarm.round - 1, submitted, late)

    def _look(self) -> tuple[list[str], list[str]]:
        """(workers that submitted this round, workers that live): listings first, then a few heartbeats."""
        swarm, store = self.swarm, self.store
        if self.holding:  # whoever begins the experiment says how many stages a round has
            store.max_stages = min(100, begun_with(store, "MAX_STAGES", self.config.MAX_STAGES))
        if swarm.clock > swarm.round:  # a worker that saw no coordinator opened it
            swarm.round, self.opened = swarm.clock, time.monotonic()
        submitted = store.nodes("rewards", swarm.round, store.max_stages - 1)
        submitted = [node for node in submitted if node in self.life.sessions]
        for kind, nodes in (("reward", submitted), ("rollouts", store.nodes("rollouts", swarm.round, 0))):
            for node in nodes:
                self.life.note(node, kind, swarm.round)
        nodes = without_seat(self.life.sessions)
        quiet = sorted(set(nodes) - set(submitted))
        few = random.sample(quiet, min(len(quiet), 4))  # however many are silent
        self.life.refresh(nodes if self.holding and self.config.NUM_WORKERS else few)
        return submitted, [node for node in nodes if self.life.is_live(node)]

    def _tell(self, round_: int, submitted: list[str], late: list[str]) -> None:
        """One line for a round that has ended; its winners' file is written by the Swarm's thread."""
        means = mean_rewards(self.store, round_, self.life.sessions)
        self.swarm.post(write_winners, self.store, round_, means)
        reward = f"reward {statistics.fmean(means.values()):.2f}" if means else "no reward"
        who = f"{len(submitted)} nodes" + f" | late: {' '.join(late)[:40]}" * bool(late)
        eta = short_time((average(self.paces) or 0.0) * (self.config.MAX_ROUNDS - 1 - round_))
        self.say(f"{counted(round_, self.config.MAX_ROUNDS)} | {reward} | {who} | eta {eta}")


def counted(round_: int, max_rounds: int) -> str:
    """(7, 200) -> "round 007/200"."""
    return f"round {round_:0{len(str(max_rounds))}d}/{max_rounds}"


def short_time(seconds: float) -> str:
    """42 -> "42s", 150 -> "2m", 8000 -> "2h13m"."""
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m" if minutes else f"{seconds:.0f}s"


# -------- The readers: what an experiment's folder says. They change nothing in it ----------------


def rollout_files(store, rounds) -> list[tuple]:
    """(round, stage, node) of every rollout file in these rounds, in order."""
    stages = [(round_, stage) for round_ in rounds for stage in store.stages("rollouts", round_)]
    return [(*where, node) for where in stages for node in store.nodes("rollouts", *where, look=False)]


def reward_rows(store, known: dict | None = None) -> list[dict]:
    """Every reward of a registered node, in order, as pandas likes it; `known` remembers old rounds."""
    store.max_stages = min(100, begun_with(store, "MAX_STAGES", 100))
    known, nodes = {} if known is None else known, store.sessions()
    there, clock = store.rounds("rewards"), store.clock()[0]
    rounds = [r for r in there if r <= clock]
    if len(rounds) < len(there):
        why = "rewards of rounds that the clock has not reached (a coordinator, once started, opens them)"
        store.skipped[why] = len(there) - len(rounds)
    for round_ in rounds:
        if round_ not in known or round_ > clock - 8:  # a slow node may still add to the newest rounds
            rows = store.rewards(round_, nodes)
            known[round_] = [{**r, "experiment": store.base.name, "my_reward": r["reward"]} for r in rows]
    return [row for round_ in rounds for row in known[round_]]


def begun_with(store, name: str, otherwise):
    """A number that config.json holds since the experiment began, `otherwise` if it makes no sense there."""
    value = (store.read_matching("config.json") or {}).get(name)
    return value if type(value) is int and 0 < value <= 10**6 else otherwise


def rows_by(column: str, rows: list[dict]) -> dict:
    """{value of this column: its rows}, the values in order."""
    ordered = sorted(rows, key=lambda row: row[column])
    return {value: list(same) for value, same in itertools.groupby(ordered, lambda row: row[column])}


def plain(value, width: int = 100) -> str:
    """A stranger's text for one line of a terminal, cut, control characters as "?"."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:width])


def average(values) -> float | None:
    """Mean of the values that are there and finite, None without any. average([1, None, 2, nan]) -> 1.5."""
    there = [v for v in values if v is not None and math.isfinite(v)]  # JSON holds no others
    return sum(there) / len(there) if there else None


def smooth(values: list) -> list:
    """Running mean over a tenth of the run, at most 100 values. Of 20: [0, 1, 1, …] -> [0, 0.5, 1, …]."""
    window = max(1, min(100, len(values) // 10))
    return [average(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def latest_checkpoint(store) -> Path | None:
    """Folder of the newest round with a checkpoint, of any node."""
    last = store.clock()[0] + 100  # one from far above the clock is a stranger's joke
    folders = (f"checkpoints/round_{r:06d}" for r in reversed(store.rounds("checkpoints")) if r <= last)
    return next((store.base / folder for folder in folders if store.names(folder)), None)


def experiment_status(store, stale_after: float = 300.0) -> dict:
    """The state of one experiment, as a reader sees it now."""
    rows, life, saved = reward_rows(store), Life(store, stale_after), latest_checkpoint(store)
    life.refresh()
    times, by_node = [row["timestamp"] for row in rows], rows_by("node_id", rows)
    return {
        "experiment": store.base.name,
        "current_round": store.clock()[0],
        "current_stage": rows[-1]["stage"] if rows else 0,
        "num_active_peers": len(life.live_workers()),
        "peer_ids": life.workers(),
        "last_updated": max(times, default=None),
        "cumulative_rewards": {node: sum(row["reward"] for row in mine) for node, mine in by_node.items()},
        "latest_checkpoint": saved and str(saved),
        "duration_seconds": max(times) - min(times) if times else 0.0,
    }


def validate_experiment(store, max_rounds: int, nodes: int) -> list[str]:
    """What a finished run lacks, as sentences; an empty list means that everything is there."""
    config, rows, clock = store.read_matching("config.json") or {}, reward_rows(store), store.clock()[0]
    by_node, last = rows_by("node_id", rows), max_rounds - 1
    nonzero = {name for row in rows for name in row if row[name]}
    rounds = range(min(max_rounds, clock + 1))
    unpaid = sorted(set(rounds) - {row["round"] for row in rows})
    silent = sorted(set(rounds) - {t for t, *_ in rollout_files(store, store.rounds("rollouts"))})
    late = [node for node, mine in by_node.items() if mine[-1]["round"] < last]
    few = [node for node, mine in by_node.items() if len({row["round"] for row in mine}) < max_rounds / 2]
    bare = [row for row in rows if not row.get("completions") or not row.get("local_groups")]
    alone = nodes == 1 or config.get("NUM_TRANSPLANT_TREES") == 0
    checks = [  # (whether it is there, what to say if not)
        (isinstance(config.get("MAX_STAGES"), int), f"{store.base}: no config.json with MAX_STAGES"),
        (clock >= last, f"the clock stands at round {clock}, expected {last}"),
        (len(by_node) >= nodes, f"{len(by_node)} nodes submitted rewards, expected {nodes}"),
        (not unpaid, f"rounds without rewards: {unpaid[:9]}"),
        (not silent or config.get("ROLLOUT_CLEANUP_ENABLED"), f"rounds without rollouts: {silent[:9]}"),
        (not late, f"no reward for the last round {last}: {', '.join(late)[:200]}"),
        (not few, f"rewards of less than half of the rounds: {', '.join(few)[:200]}"),
        (not bare, f"{len(bare)} rewards without completions or local_groups"),
        (store.names(f"checkpoints/round_{last:06d}"), f"no checkpoint after the last round {last}"),
        ("informative_groups" in nonzero, "no node trained on an informative group"),
        ("grad_norm" in nonzero, "every gradient is zero: nothing was learned"),
        (alone or "external_groups" in nonzero, "no external group was drawn"),
    ]
    for node in by_node:
        folders = f"logs/{node}", f"models/{node}"
        paths = [store.base / folder / name for folder in folders for name in store.names(folder)]
        files = {path.name for path in paths if os.access(path, os.R_OK) and path.lstat().st_size > 0}
        files = {"weights" if name.endswith(".safetensors") else name for name in files}
        lacking = ", ".join(sorted({"metrics.jsonl", "config.json", "tokenizer.json", "weights"} - files))
        checks.append((not lacking, f"logs/{node} and models/{node} lack {lacking}"))
    return [problem for there, problem in checks if not there]


ARM = ("NUM_TRAIN_SAMPLES", "NUM_TRANSPLANT_TREES", "LOCAL_OVERSAMPLE", "LOCAL_REPLAY", "EXTERNAL_FILTER")
OF_SHARING = (*ARM, "EXTERNAL_FLOOR", "FETCH_MAX_PEERS", "ROLLOUT_PUBLISH_FREQUENCY", "ROLLOUT_MAX_AGE")
NO_SETTING = {  # may differ between repetitions; every other key of config.json, a new one too, is a setting
    "SEED", "EXPERIMENT_NAME", "created_at", "layout", "reasoning_gym", "TEST_MODE", "CONFIGS", "SEEDS",
    "VERBOSE", "MAX_ROUNDS", "LOCAL_NODES", "NUM_WORKERS", "MICRO_BATCH_SIZE", "EVAL_INTERVAL",
    "EVAL_SAMPLES", "CHECKPOINT_INTERVAL", "CHECKPOINT_KEEP", "ROLLOUT_CLEANUP_ENABLED",
    "ROLLOUT_KEEP_LAST_N_ROUNDS", "ROLLOUT_ARCHIVE_OLD", "STALE_AFTER_SECONDS",
    "COORDINATOR_ROUND_INTERVAL", "FETCH_TIMEOUT_SECONDS",
}  # fmt: skip


def summarize(store, known: dict | None = None) -> dict | None:
    """One experiment as figures, None if it has no rewards. ValueError if config.json cannot be used."""
    if not (rows := reward_rows(store, known)):
        return None
    config = dict(LOCAL_OVERSAMPLE=1, LOCAL_REPLAY=0, EXTERNAL_FILTER=True, EXTERNAL_FLOOR=0.0)
    config |= store.read("config.json") or {}
    if len(config) > 150 or any(isinstance(value, list | dict) for value in config.values()):
        raise ValueError("config.json holds more than a Config does")
    for name in ARM:
        if not isinstance(config.get(name), int) or not 0 <= config[name] <= 4096:
            raise ValueError(f"config.json: {name} is {plain(config.get(name))}")
    own, external, oversample, replay, filtered = (config[name] for name in ARM)
    arm = f"{own}/{external}" + f" x{oversample}" * (oversample > 1) + f" +r{replay}" * (replay > 0)
    nodes, rounds, found = len(rows_by("node_id", rows)), rows[-1]["round"] + 1, rows_by("round", rows)
    if rounds > 100 + 10 * len(found):
        raise ValueError(f"rewards of only {len(found)} of {rounds} rounds")
    settings = {n: config[n] for n in config if n not in NO_SETTING} | {"nodes": nodes, "rounds": rounds}
    by_round = [found.get(t, []) for t in range(rounds)]
    held = [row for row in rows if "held_out" in row]
    last_tenth = min([0.9 * rounds, *(row["round"] for row in held[-1:])])  # or the last evaluation
    curve = [average(row["reward"] for row in now) or 0.0 for now in by_round]
    spent = [sum(row.get("completions", 0) for row in now) / nodes for now in by_round]
    return {
        "experiment": store.base.name,
        "seed": plain(json.dumps(config.get("SEED"))),
        "arm": arm + " unfiltered" * (external > 0 and not filtered),
        "baseline": f"{own + external}/0",  # a lone node that trains on as many groups
        "settings": settings,
        "key": json.dumps(settings, sort_keys=True),  # the same in two runs: they are repetitions
        "task": json.dumps({n: settings[n] for n in sorted(settings) if n not in OF_SHARING}),
        "per_node": sum(row["reward"] for row in rows) / nodes,
        "final": smooth(curve)[-1],
        "held_out": average(row["held_out"] for row in held if row["round"] >= last_tenth),
        "completions": sum(spent),
        "missing": 1 - len(rows) / (nodes * rounds * store.max_stages),
        "curve": curve,
        "spent": list(itertools.accumulate(spent)),
    }


def compare(summaries: list[dict]) -> list[dict]:
    """A row for each group of repetitions, compared with its baseline; the best of equal settings first."""
    found, rows = [run for run in summaries if run], []
    common = Counter(n for run in found for n in run["settings"] if n not in ARM).most_common(200)
    names = dict.fromkeys(["rounds", "nodes", *(n for n, _ in common)])  # strangers' files may hold others
    differ = [n for n in names if len({json.dumps(run["settings"].get(n)) for run in found}) > 1]
    for runs in rows_by("key", found).values():
        arm, base, task, settings = (runs[0][name] for name in ("arm", "baseline", "task", "settings"))
        where = " ".join(plain(f"{name}={settings.get(name, 'unset')}", 60) for name in differ)
        row = {"label": f"{arm} {where}".rstrip()[:200], "baseline": base, "runs": len(runs)}
        row |= {n: average(r[n] for r in runs) for n in ("per_node", "final", "held_out", "completions")}
        row["spread"] = statistics.stdev(run["per_node"] for run in runs) if len(runs) > 1 else None
        row |= {"improvement": None, "low": None, "high": None, "p_value": None, "note": "baseline"}
        if arm != base:
            lone = [run for run in found if run["arm"] == base and run["task"] == task]
            row |= advantage(runs, lone)
            share = row["completions"] / (average(run["completions"] for run in lone) or math.inf)
            row["note"] += f", at {share:.0%} of the completions" * bool(lone)
        missing = max(run["missing"] for run in runs)
        row["note"] += f"; {missing:.0%} of the rewards of a run are missing" * (missing >= 0.01)
        rows.append({"short": "", **row, "settings": settings, "members": runs})
    rows.sort(key=lambda row: (row["members"][0]["task"], -row["per_node"]))
    alike = Counter(row["label"][:30] for row in rows)  # what the table and the picture have room for
    for i, row in enumerate(rows, 1):
        number = f" #{i}" * (alike[row["label"][:30]] > 1)
        row["short"], row["label"] = plain(row["label"][:30]) + number, row["label"] + number
    return rows


def advantage(runs: list[dict], lone: list[dict]) -> dict:
    """Gain over the baseline, interval and p: Student's t, assuming log ratios roughly normal over seeds."""
    seeds = [rows_by("seed", group).items() for group in (runs, lone)]  # two runs of one seed count once
    ours, base = ({seed: average(r["per_node"] for r in same) for seed, same in group} for group in seeds)
    if not base or min(*ours.values(), *base.values()) < 1e-3:
        return {"note": "a run earned nothing: no ratio" if base else "no baseline with the same settings"}
    ours, base = ({seed: math.log(x) for seed, x in g.items()} for g in (ours, base))
    pairs = [ours[seed] - base[seed] for seed in ours if seed in base]
    if len(pairs) < 3:
        gain = math.expm1(average(pairs or [average(ours.values()) - average(base.values())]))
        return {"improvement": gain, "note": f"{gain:+.0%}, three seeds at least give an interval"}
    mean, freedom = average(pairs), len(pairs) - 1  # of the logarithm of the ratio
    gain, error = math.expm1(mean), math.sqrt(statistics.variance(pairs) / len(pairs) + 1e-18)  # never 0
    t = bisect.bisect(range(10**5), -0.05, key=lambda i: -p_value(i / 10**4, freedom)) / 10**4  # p(t) = 0.05
    low, high, p = math.expm1(mean - t * error), math.expm1(mean + t * error), p_value(mean / error, freedom)
    verb = "better" if low > 0 else "worse" if high < 0 else "not to be told apart"
    note = f"{verb}, {gain:+.0%} (95% interval {low:+.0%} to {high:+.0%}, p = {p:.2g}, paired by seed)"
    return {"improvement": gain, "low": low, "high": high, "p_value": p, "note": note}


def p_value(t: float, freedom: float) -> float:
    """Two-sided p of Student's t. Of t = 4.303 with 2 degrees of freedom: 0.05."""
    from mpmath import betainc  # torch brings it

    return float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


def report_text(rows: list[dict]) -> str:
    """The comparison as a table and in sentences, of at most 100 columns (indented: code in Markdown)."""
    from tabulate import tabulate  # reasoning-gym brings it

    names = {"runs": "runs", "per_node": "per node", "spread": "sd", "final": "final"}
    names |= {"held_out": "held-out", "completions": "completions"}
    cells = [[row["short"], *(row[name] for name in names)] for row in rows]
    formats = ("", "d", ".2f", ".2f", ".2f", ".2f", ".0f")
    table = tabulate(cells, ["groups", *names.values()], "simple", floatfmt=formats, missingval="-")
    compared = [row for row in rows if row["note"] != "baseline"]
    said = [textwrap.fill(f"{r['label']} against {r['baseline']}: {r['note']}.", 96) for r in compared]
    return textwrap.indent("\n\n".join([table, *said]), "    ") + "\n"


def report_files(rows: list[dict]) -> dict[str, bytes]:
    """{name: contents} of report.md, .csv, .json, curves.csv and, with matplotlib, report.png."""
    curves = [["label", "seed", "experiment", "round", "reward", "completions"]]
    for label, run in [(row["label"], run) for row in rows for run in row["members"]]:
        points = zip(itertools.count(), run["curve"], run["spent"], strict=False)
        curves += [[label, run["seed"], run["experiment"], *point] for point in points]
    full = [{**row, "members": [run["experiment"] for run in row["members"]]} for row in rows]
    table = [list(rows[0])[:-2], *(list(row.values())[:-2] for row in rows)]  # less settings and members
    files = {"report.md": report_text(rows).encode(), "report.json": json.dumps(full, indent=1).encode()}
    for name, lines in (("report.csv", table), ("curves.csv", curves)):
        csv.writer(text := io.StringIO(), lineterminator="\n").writerows(lines)
        files[name] = text.getvalue().encode()
    return files | ({"report.png": picture} if (picture := draw(rows)) else {})


def draw(rows: list[dict]) -> bytes | None:
    """Smoothed reward (mean and range) over rounds and completions, as PNG; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no picture: pip install matplotlib")
    figure, png = Figure((10, 4.2), dpi=150, layout="constrained"), io.BytesIO()
    left, right = figure.subplots(1, 2, sharey=True)
    for i, row in enumerate(sorted(rows[:40], key=lambda row: row["final"])):  # more cannot be told apart
        alone, filtered = row["settings"]["NUM_TRANSPLANT_TREES"] == 0, row["settings"]["EXTERNAL_FILTER"]
        color = "#D55E00" if alone else "#0072B2" if filtered else "#009E73"  # safe for the colour-blind
        curves = list(zip(*(smooth(run["curve"]) for run in row["members"]), strict=True))
        mean, low, high = ([f(now) for now in curves] for f in (average, min, max))
        spent = [average(now) for now in zip(*(run["spent"] for run in row["members"]), strict=True)]
        for axis, x in ((left, range(len(mean))), (right, spent)):
            axis.plot(x, mean, color=color, linestyle=("-", "--", "-.", ":")[i % 4])
            axis.fill_between(x, low, high, color=color, alpha=0.08)
        place, thread = (1.05, (i + 0.5) / len(rows)), {"arrowstyle": "-", "color": color, "relpos": (0, 0.5)}
        look = {"textcoords": "axes fraction", "arrowprops": thread, "color": color, "parse_math": False}
        right.annotate(row["short"], (spent[-1], mean[-1]), place, va="center", **look)
    name = rows[0]["members"][0]["experiment"] if len(rows) == len(rows[0]["members"]) == 1 else ""
    left.set(xlabel="round", ylabel="mean reward (0 to 1), smoothed", ylim=(0, None), title=name)
    right.set(xlabel="completions generated per node (log)", xscale="log")
    figure.savefig(png)
    return png.getvalue()


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; that the package has been imported is not enough."""
    return {"ipykernel", "IPython"} <= sys.modules.keys() and sys.modules["IPython"].get_ipython() is not None


def dashboard(store, life, rows: list[dict], max_rounds: int | None = None) -> str:
    """An experiment as text that fits the terminal: clock, nodes, what looks wrong, latest rollout.

    max_rounds: None means what config.json says by now.
    """
    screen = shutil.get_terminal_size() if sys.stdout.isatty() else os.terminal_size((110, 1000))
    life.refresh()
    clock, by_node = store.clock()[0], rows_by("node_id", rows)
    max_rounds = max_rounds or max(begun_with(store, "MAX_ROUNDS", 2000), clock + 1)  # it may have grown
    for node, mine in by_node.items():
        life.note(node, "reward", mine[-1]["round"], age_of(mine[-1]["timestamp"]))
    live, nodes, times = {*life.live_workers()}, life.workers(), sorted(row["timestamp"] for row in rows)
    led = life.status(COORDINATOR) if COORDINATOR in life.sessions else "none"
    done = "finished, " * (bool(nodes) and clock >= max_rounds - 1 and all(map(life.has_left, nodes)))
    workers = f"{done}{len(live)} of {len(nodes)} workers live, coordinator {led}"
    lines = [f"{store.base.name}: round {clock} of {max_rounds}, {workers}"]
    if rows:
        last, took = rows[-1], times[-1] - times[0]
        mean = average(row["reward"] for row in rows if row["round"] == last["round"])
        eta = short_time(took / max(1, clock) * max(0, max_rounds - 1 - clock))
        where, ago = f"round {last['round']}, stage {last['stage']}", short_time(age_of(times[-1]))
        lines.append(f"reward {mean:.2f} in {where}, {ago} ago; running for {short_time(took)}, eta {eta}")
    else:
        lines.append(f"waiting for a first {'reward' if nodes else 'worker'}")
    for node in sorted(nodes, key=lambda node: (node not in live, node)):
        rewards = [row["reward"] for row in by_node.get(node, [])]
        trend = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * r))] for r in smooth(rewards)[-20:])
        state, total = life.status(node), sum(rewards)
        lines.append(f"{node:20.20} {state}  {len(rewards):5} rewards, in all {total:8.2f}  {trend}")
    shared = rollout_files(store, [r for r in store.rounds("rollouts") if clock - 3 < r <= clock])
    tail = health_warnings(store, life, rows, clock, shared)[:4]
    tail += [f"storage: {shutil.disk_usage(store.base).free / 1e9:.1f} GB free (Ctrl-C: the swarm goes on)"]
    with contextlib.suppress(OSError, ValueError, IndexError):  # there is none, or it is damaged
        group = store.fetch(*shared[-1])[0]
        best = max(group["completions"], key=lambda c: c["claimed"] or 0)["response"]
        tail.append(plain(f"latest rollout, by {shared[-1][2]}: {group['prompt']!r}"))
        tail.append(plain(f"best: {best!r}"))
    lines = lines[: max(4, screen.lines - len(tail) - 2)]  # the first says how many workers there are
    return "\n".join(line[: screen.columns] for line in [*lines, "", *tail])


def health_warnings(store, life, rows, clock: int, shared: list[tuple]) -> list[str]:
    """What looks wrong, each with what to do about it, the worst first."""
    live, finished = life.live_workers(), all(map(life.has_left, life.workers()))
    idle, full = min(map(life.silence, live), default=0.0), shutil.disk_usage(store.base).free < 1e9
    starts = Counter(name.rsplit(".", 2)[0] for name in store.names("peers"))
    often = ", ".join(node for node in live if starts[node] > 5)
    informative = [row.get("informative_groups", 0) for row in rows if row["round"] > clock - 10]
    unusable = ", ".join(f"{count} {plain(why)}" for why, count in store.skipped.items())
    checks = [  # (whether it is so, what to say then)
        (clock < 0, "no round is open: start a worker or the coordinator, or check EXPERIMENT_NAME"),
        (not live and not finished, "no live worker: start one with its old NODE_ID to resume it"),
        (live and clock > 1 and not shared, "no rollouts in three rounds: too short, or another folder?"),
        (idle > life.stale_after / 2, f"nothing new for {idle:.0f} s: is the drive still mounted?"),
        (informative and not any(informative), "no informative group: WARM_START_STEPS, NUM_SHOTS, TASKS?"),
        (often, f"started more than five times: {often}. Do two machines share this NODE_ID?"),
        (full, "less than 1 GB free: lower CHECKPOINT_KEEP, set ROLLOUT_CLEANUP_ENABLED=True"),
        (unusable, f"unusable files: {unusable}"),
    ]
    return [f"! {warning}" for is_so, warning in checks if is_so]


def monitor(store, stale_after: float, max_rounds=None, once=False, should_stop=lambda: False) -> None:
    """Show the dashboard every 30 s in place of the last, in a notebook with a picture; once if asked."""
    life, known = Life(store, stale_after), {}
    while True:
        try:
            text = dashboard(store, life, reward_rows(store, known), max_rounds)
        except OSError as error:
            if once:
                raise
            text = f"the shared folder cannot be read ({plain(error)}); trying on"
        if in_notebook():
            from IPython.display import Image, clear_output, display

            clear_output(wait=True)
            with contextlib.suppress(OSError, ValueError, IndexError):  # no reward yet, or no matplotlib
                display(Image(draw(compare([summarize(store, known)])), width=900))
        print("\033[2J\033[H" * sys.stdout.isatty() + text, flush=True)
        for _ in range(150):
            if once or should_stop():
                return
            time.sleep(0.2)
