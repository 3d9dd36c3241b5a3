"""The swarm as one process sees it: who is alive, the round clock, what peers have published.

`Swarm` is all that a process knows of the shared folder; `Coordinator` is the role that opens rounds; the
readers at the end (status, validation, comparison, monitor) change nothing. A store is passed in.
"""

import bisect
import contextlib
import csv
import functools
import itertools
import io
import json
import math
import os
import random
import re
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

# -------- Life ------------------------------------------------------------------------------------


class Life:
    """Who is alive: a node of which anything new was seen within `stale_after` seconds.

    Judged by when *this* reader first saw it, on its own monotonic clock: the nodes' clocks need not agree.
    Only at the first look does a timestamp count: what says that it is an hour old is not taken for fresh.
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
        last = self._evidence.get((node, kind))
        is_older = (
            isinstance(last, int) and isinstance(value, int) and value < last
        )  # old rollouts, read again
        if value == last or is_older:
            return False
        written = time.monotonic() - (0.0 if (node, kind) in self._evidence else age)
        self._evidence[node, kind] = value
        self._seen[node] = max(self._seen.get(node, -math.inf), written)
        return True

    def refresh(self, nodes=None) -> None:
        """Look at the sessions (one listing), and at registration and heartbeat of `nodes` (None: all)."""
        self.sessions = self.store.sessions()
        for node, session in self.sessions.items():  # it begins with its start in milliseconds
            self.note(node, "session", session, age_of(int(session[:13]) / 1000))
        now = time.monotonic()
        for node in self.sessions if nodes is None else [n for n in nodes if n in self.sessions]:
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
    return isinstance(pid, int) and 0 < pid < 2**31 and pid_start(pid) != about.get("pid_start")


@functools.cache
def boot_id() -> str | None:
    """Names this boot of this machine: two containers called "localhost" are two. Linux only."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + namespace
    except OSError:
        return None


def pid_start(pid: int) -> str | None:
    """Start time of a process in ticks since boot, None if it does not run (or is a zombie). Linux only."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


# -------- The swarm as a worker sees it -----------------------------------------------------------


@dataclass
class Job:
    """A write that waits for the folder."""

    function: object
    args: tuple
    tries: int = 0
    retry_at: float = 0.0


class Swarm:
    """What this process knows of the shared folder. A daemon thread looks at it and writes what is queued.

    The trainer reads attributes and never touches the folder, so it cannot hang on it. Who writes what:
        main thread    round, state; hands over work with post, publish and open
        swarm thread   clock, sessions, is_led, looked_at, rollouts, refused; it alone calls the store
        hub threads    nothing here (uploads, see `push_to_hub` in sapo.py)

    nodes: {id: session} of this process. seat: the coordinator's name. max_peers: 0 if nothing is drawn from
    peers. note(event, text): called with what people should know. lines: see class Log in sapo.py.
    """

    def __init__(self, store, nodes: dict, *, seat, stages, max_age, max_peers, stale_after, note, lines):
        self.store, self.nodes, self.seat, self.note, self.lines = store, nodes, seat, note, lines
        self.stages, self.max_age, self.max_peers = stages, max_age, max_peers
        self.life = Life(store, stale_after)
        self.clock = -1  # highest round known to be open; never goes back
        self.sessions = {}  # node -> newest session, of everybody who ever registered
        self.is_led = False  # whether a coordinator is alive
        self.leaderless_since = time.monotonic()
        self.rollouts = {}  # (round, stage, node) -> groups, structure checked, of the last max_age rounds
        self.refused = {}  # (round, stage, node) -> when a file that could not be used is read again
        self.round = 0  # the one that this process works on
        self.looked_at = -1  # the round for which the folder was last looked at
        self.state = "running"  # as the heartbeat says it
        self._published = {}  # (round, stage) -> peers that have a file there
        self._chosen = {}  # round -> peers to read
        self._gone = set()  # awaited peers whose process is known to be dead
        self._given_up = set()  # peers that were waited for in vain before anybody had published
        self._jobs, self._lock, self._wake = deque(), threading.Lock(), threading.Event()
        self._wanted = self._closing = False  # somebody waits for news; nothing more will be posted
        self._failing = None  # monotonic time at which an outage began
        self._good_look, self._next_beat, self._beat_seconds = (
            time.monotonic(),
            0.0,
            min(15.0, stale_after / 4),
        )
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)

    # -- for the trainer

    @property
    def down(self) -> bool:
        """Whether the folder fails or hangs: no good look for half a minute."""
        return self._failing is not None or time.monotonic() - self._good_look > 30.0

    @property
    def superseded(self) -> list[str]:
        """This process's nodes of which a newer session is running."""
        return [node for node, session in self.nodes.items() if self.sessions.get(node, "") > session]

    @property
    def alone(self) -> bool:
        """Whether nobody else ever registered or published."""
        return self.sessions.keys() <= self.nodes.keys() and not any(self._published.values())

    def start(self) -> None:
        """One look in the foreground (or OSError), so that nothing is decided blindly; then the thread."""
        self._look()
        self._thread.start()

    def post(self, function, *args) -> None:
        """Hand over a write. They are done in order and kept until they succeed: an outage loses nothing."""
        self._jobs.append(Job(function, args))
        self._wake.set()

    def publish(self, round_: int, stage: int, node: str, about: dict, groups: dict) -> None:
        """Publish a node's groups; the other nodes of this process see them at once."""
        if self.max_peers:
            with self._lock:
                keyed = [
                    group | {"key": (round_, stage, node, int(index))} for index, group in groups.items()
                ]
                self.rollouts[round_, stage, node] = keyed
        self.post(self.store.publish, round_, stage, node, about, groups)

    def open(self, round_: int) -> None:
        """Open a round where nobody leads, and say who was best in the one before."""
        self.clock = max(self.clock, round_)
        self.post(self.store.open_round, round_, next(iter(self.nodes)))
        if round_ > 0:
            self.post(write_winners, self.store, round_ - 1)

    def missing(self, round_: int, stage: int) -> set[str]:
        """Peers to wait for: chosen ones that have not published this stage and may still do so.

        Chosen are peers that published the round before: who did not is not waited for again. Before anybody
        else has published at all, registered peers are waited for once.
        """
        return self._awaited(round_) - self._published.get((round_, stage), set()) - self._gone

    def _awaited(self, round_: int) -> set[str]:
        if any(self._published.values()):
            return set(self._chosen.get(round_, ()))
        return self.sessions.keys() - {self.seat} - self.nodes.keys() - self._given_up

    def give_up(self, peers: set[str]) -> None:
        """These were waited for in vain."""
        self._given_up |= peers

    def groups_of(self, round_: int, stage: int | None = None) -> dict[str, list[dict]]:
        """{node: its groups} of one round and stage (None: all stages), as far as they have come."""
        found = {}
        with self._lock:
            for key in sorted(key for key in self.rollouts if key[0] == round_ and stage in (None, key[1])):
                found.setdefault(key[2], []).extend(self.rollouts[key])
        return found

    def wait(self) -> None:
        """Called by whoever waits for news: the next look comes as soon as the folder's pace allows."""
        self._wanted = True
        self._wake.set()
        time.sleep(0.01)

    def flush_log(self) -> None:
        """Queue the log lines that have gathered."""
        texts = {}
        with self._lock:
            while self.lines:
                path, line = self.lines.popleft()
                texts[path] = texts.get(path, "") + line + "\n"
        for path, text in texts.items():
            self.post(self.store.append, path, text)

    def close(self, patience: float) -> int:
        """Write what is queued, end the thread; how many writes did not get through in `patience` seconds."""
        self.flush_log()
        for node in self.nodes:
            self.post(self.store.heartbeat, node, self._beat(node))
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(patience)
        else:  # it was never started
            with contextlib.suppress(OSError):
                self._write()
        return len(self._jobs)

    # -- the thread

    def _run(self) -> None:
        soon = later = retry_at = (
            0.0  # the next look at the earliest, at the latest; the next try in an outage
        )
        pause = 1.0
        while self._jobs or not self._closing:
            due = min(soon if self._wanted else later, self._next_beat)
            self._wake.wait(max(0.0, max(due, retry_at) - time.monotonic()))
            self._wake.clear()
            began = time.monotonic()
            if began < retry_at and not self._closing:
                continue
            try:
                self._write()
                if began >= (soon if self._wanted else later):
                    self._wanted, began = False, time.monotonic()
                    self._look()
                    soon = time.monotonic() + min(5.0, max(0.02, 10 * (time.monotonic() - began)))
                    later = soon + 0.5
                if self._failing is not None:
                    self.note("outage over", f"the shared folder is back after {began - self._failing:.0f} s")
                self._failing, pause = None, 1.0
            except OSError as error:
                if self._failing is None:
                    self._failing = began
                    self.note(
                        "outage", f"the shared folder fails ({error}); training goes on, writes are queued"
                    )
                retry_at, pause = time.monotonic() + pause * random.uniform(0.5, 1.0), min(2 * pause, 15.0)
            except Exception as error:  # nothing may end this thread
                self.note("error", f"the look at the folder failed: {error!r}")
                retry_at = time.monotonic() + pause

    def _write(self) -> None:
        """Heartbeats, log lines, and the queue in order. OSError if the folder takes no writes at all."""
        now = time.monotonic()
        if now >= self._next_beat:
            for node in self.nodes:
                self._do(Job(self.store.heartbeat, (node, self._beat(node))))
            self._next_beat = now + self._beat_seconds
            self.flush_log()
        for job in list(self._jobs):
            if (now >= job.retry_at or self._closing) and self._do(job):
                self._jobs.remove(job)

    def _beat(self, node: str) -> dict:
        return {"session": self.nodes[node], "round": self.round, "state": self.state}

    def _do(self, job: Job) -> bool:
        """Whether a job is done with. One that fails because of its own path is set aside after a minute."""
        try:
            job.function(*job.args)
            return True
        except Exception as error:  # one job stops neither the queue nor training
            if isinstance(error, OSError):
                if not self.store.can_write():
                    raise
                job.tries, job.retry_at = job.tries + 1, time.monotonic() + 2**job.tries
                if job.tries < 6 and not self._closing:
                    return False
            what = [job.function.__name__, *(arg for arg in job.args if isinstance(arg, str))][:2]
            self.note("error", f"{' '.join(what)} was set aside: {error}")
            return True

    def _look(self) -> None:
        """Registrations, the clock, the coordinator, and what peers have published."""
        round_ = self.round
        self.life.refresh([self.seat])
        clock, openers = self.store.clock()
        if self.seat in openers:  # rounds that workers open are no sign of its life
            self.life.note(self.seat, "clock", clock)
        self.sessions, self.clock = self.life.sessions, max(self.clock, clock)
        led = self.life.is_live(self.seat)
        self.leaderless_since = self.leaderless_since if led == self.is_led else time.monotonic()
        self.is_led = led
        if self.max_peers:
            self._fetch(round_)
        self._good_look, self.looked_at = time.monotonic(), round_

    def _fetch(self, round_: int) -> None:
        """Read the chosen peers' files of this round; at its first look also those of the rounds before."""
        oldest = max(0, round_ - self.max_age)
        rounds = [round_] if self.looked_at == round_ else range(round_, oldest - 1, -1)
        keys = list(itertools.product(rounds, range(self.stages)))
        published = {key: peers for key, peers in self._published.items() if key[0] >= oldest}
        for key in keys:
            published[key] = set(self.store.nodes("rollouts", *key)) - self.nodes.keys()
        self._published = published
        for r, stage in keys:
            for peer in sorted(published[r, stage] & self._choose(r)):
                self._fetch_one((r, stage, peer))
        if late := self._awaited(round_) - published[round_, self.stages - 1]:
            self.life.refresh(late)
        self._gone = {peer for peer in late if is_known_dead(self.life.about(peer))}
        self._chosen = {r: peers for r, peers in self._chosen.items() if r >= oldest}
        self.refused = {key: retry_at for key, retry_at in self.refused.items() if key[0] >= oldest}
        with self._lock:
            self.rollouts = {key: groups for key, groups in self.rollouts.items() if key[0] >= oldest}

    def _choose(self, round_: int) -> set[str]:
        """Up to max_peers peers to read, drawn from who published the round before, then this round."""
        chosen = self._chosen.setdefault(round_, set())
        for r in (round_ - 1, round_):
            others = (
                set().union(*(self._published.get((r, stage), ()) for stage in range(self.stages))) - chosen
            )
            chosen |= set(random.sample(sorted(others), min(len(others), self.max_peers - len(chosen))))
        return chosen

    def _fetch_one(self, key: tuple) -> None:
        """Read a peer's file once. One that cannot be used is read again after 2 s: it may be on its way."""
        if key in self.rollouts or time.monotonic() < self.refused.get(key, 0.0):
            return
        try:
            groups = self.store.fetch(*key)
        except (OSError, ValueError) as error:  # BadFile is a ValueError
            if key not in self.refused:
                self.note("reject", f"{key[2]}: {error}")
            self.refused[key] = time.monotonic() + 2.0
            return
        with self._lock:
            self.rollouts[key] = groups
        self.refused.pop(key, None)


# -------- The role that opens rounds --------------------------------------------------------------


def write_winners(store, round_: int, limit: int = 100) -> dict[str, float]:
    """winners/round_000012.json: mean reward of every node (of the first `limit`), the best first."""
    rewards = {}
    for stage in store.stages("rewards", round_):
        for node in store.nodes("rewards", round_, stage)[:limit]:
            if data := store.reward(round_, stage, node):
                rewards.setdefault(node, []).append(data["reward"])
    best_first = sorted(((sum(each) / len(each), node) for node, each in rewards.items()), reverse=True)
    means = {node: mean for mean, node in best_first}
    if means:
        store.write_once(f"winners/round_{round_:06d}.json", means)
    return means


def first_round(store, by: str) -> int:
    """The round to go on with: the highest open one, else the last rewarded one, else 0, now opened."""
    round_, _ = store.clock()
    if round_ < 0:
        round_ = max(0, store.last_rewarded())
        store.open_round(round_, by)
    return round_


def is_round_over(
    strategy: str, elapsed: float, interval: float, live: list[str], submitted: list[str]
) -> bool:
    """Whether the clock moves on. time: interval over; completion: all who live submitted; hybrid: either.

    It never runs on for nobody: without a live worker and without any reward of this round, it waits.
    """
    in_time = elapsed >= interval and bool(live or submitted)
    complete = bool(submitted) and set(live) <= set(submitted)
    return {"time": in_time, "completion": complete, "hybrid": in_time or complete}[strategy]


class Coordinator:
    """The role that keeps a swarm in step: it opens rounds, trains nothing and loads no model.

    swarm: a started Swarm of the coordinator's seat; it beats, writes the log and says when the folder fails.
    expected: workers to wait for in round 0 (0: the first is enough), at most one interval after the first.
    """

    LOOK_AT = 8  # registrations and heartbeats read per look, however many workers are silent

    def __init__(self, swarm, *, max_rounds, last_stage, strategy, interval, expected, say, each_round):
        self.swarm, self.store, self.seat, self.say = swarm, swarm.store, swarm.seat, say
        self.max_rounds, self.last_stage, self.strategy = max_rounds, last_stage, strategy
        self.interval, self.expected, self.each_round = interval, expected, each_round
        self.life = Life(swarm.store, swarm.life.stale_after)
        self.first = self.round = first_round(self.store, self.seat)
        self.opened = self.began = time.monotonic()
        self.holding = self.round == 0
        waiting = ", waiting for a first worker" if self.holding else ""
        self.say(f"coordinator: round {self.round} is open ({strategy}, interval {interval:g} s){waiting}")

    def run(self, should_stop) -> str:
        """Keep the clock until MAX_ROUNDS is reached and every worker is done. Returns how it ended."""
        while not should_stop():
            if self.swarm.superseded:
                return "superseded"
            began = time.monotonic()
            with contextlib.suppress(OSError):  # the Swarm's thread meets it too, and says so
                if self.step():
                    return "finished"
            time.sleep(min(5.0, max(0.02, 10 * (time.monotonic() - began))))
        return "stopped"

    def step(self) -> bool:
        """One look at the folder, and perhaps the next round; whether the coordinator's work is done."""
        submitted, live = self._look()
        elapsed, late = time.monotonic() - self.opened, sorted(set(live) - set(submitted))
        if self.holding:  # models take minutes to download
            workers = len(self.life.sessions.keys() - {self.seat})
            self.opened = self.opened if submitted else time.monotonic()
            self.holding = not submitted or (workers < self.expected and elapsed < self.interval)
        elif self.round >= self.max_rounds - 1:
            if not late:
                self._tell(self.round, submitted, late)
            return not late
        elif is_round_over(self.strategy, elapsed, self.interval, live, submitted):
            self.store.open_round(
                self.round + 1, self.seat
            )  # may fail: only an open round is the current one
            self.swarm.round = self.round = self.round + 1
            self.opened = time.monotonic()
            self._tell(self.round - 1, submitted, late)
            self.each_round(self.round)
        return False

    def _look(self) -> tuple[list[str], list[str]]:
        """(workers that submitted this round, workers that live): listings first, then a few heartbeats."""
        clock, _ = self.store.clock()
        if clock > self.round:
            self.round, self.opened = clock, time.monotonic()
        submitted = self.store.nodes("rewards", self.round, self.last_stage)
        for kind, nodes in (("reward", submitted), ("rollouts", self.store.nodes("rollouts", self.round, 0))):
            for node in nodes:
                self.life.note(node, kind, self.round)
        quiet = sorted(self.life.sessions.keys() - {self.seat} - set(submitted))
        self.life.refresh(random.sample(quiet, min(len(quiet), self.LOOK_AT)))
        return submitted, [n for n in self.life.sessions if n != self.seat and self.life.is_live(n)]

    def _tell(self, round_: int, submitted: list[str], late: list[str]) -> None:
        """One line for a round that has ended, and its winners' file."""
        means = write_winners(self.store, round_)
        reward = f"reward {statistics.fmean(means.values()):.2f}" if means else "no reward"
        behind = f" | late: {' '.join(late)[:40]}" if late else ""
        per_round = (time.monotonic() - self.began) / max(1, round_ + 1 - self.first)
        eta = short_time(per_round * (self.max_rounds - 1 - round_))
        width = len(str(self.max_rounds))
        who = f"{len(submitted)} nodes{behind}"
        self.say(f"round {round_:0{width}d}/{self.max_rounds} | {reward} | {who} | eta {eta}")


def short_time(seconds: float) -> str:
    """42 -> "42s", 150 -> "2m", 8000 -> "2h13m"."""
    minutes = int(seconds // 60)
    return (
        f"{seconds:.0f}s"
        if minutes < 1
        else f"{minutes}m"
        if minutes < 60
        else f"{minutes // 60}h{minutes % 60:02d}m"
    )


# -------- The readers: what an experiment's folder says. They change nothing in it ----------------

OPEN_ROUNDS = 8  # so many of the newest rounds may still get rewards: from a slow node, over a slow drive


def reward_rows(store, known: dict | None = None) -> list[dict]:
    """Every reward of a registered node: a row per round, stage and node, in this order, as pandas likes it.

    known: {round: its rows}, kept by who asks again and again, so that an old round is listed only once.
    Neither a name that never registered nor a round beyond the clock counts: anybody could have put it there.
    """
    known = {} if known is None else known
    clock, nodes = store.clock()[0], store.sessions()
    rounds = [r for r in store.rounds("rewards") if r <= clock]
    for round_ in rounds:
        if round_ not in known or round_ > clock - OPEN_ROUNDS:
            known[round_] = [
                {**data, "experiment": store.base.name, "my_reward": data["reward"]}
                for stage in store.stages("rewards", round_)
                for node in store.nodes("rewards", round_, stage)
                if node in nodes and (data := store.reward(round_, stage, node))
            ]
    return [row for round_ in rounds for row in known[round_]]


def list_experiments(root) -> list[str]:
    """Names of the experiments below GDRIVE_PATH. One with a coordinator alone has no config.json yet."""
    found = [*Path(root).glob("experiments/*/config.json"), *Path(root).glob("experiments/*/state/rounds")]
    names = {path.relative_to(root).parts[1] for path in found}
    return sorted(name for name in names if re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII))


def rows_by(column: str, rows: list[dict]) -> dict:
    """{value of this column: its rows}, the values in order."""
    groups = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return dict(sorted(groups.items()))


def plain(value, width: int = 100) -> str:
    """A stranger's text for one line of a terminal, cut, control characters as "?"."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:width])


def average(values) -> float | None:
    """Mean of the values that are there, None where there are none. average([1, None, 2]) -> 1.5."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def smooth(values: list) -> list:
    """Running mean over a tenth of the run, at most 100 values. Of 20: [0, 1, 1, …] -> [0, 0.5, 1, …]."""
    window = max(1, min(100, len(values) // 10))
    return [average(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def experiment_status(store, stale_after: float = 300.0) -> dict:
    """The state of one experiment, as a reader sees it now."""
    rows, life = reward_rows(store), Life(store, stale_after)
    life.refresh()
    times, by_node = [row["timestamp"] for row in rows], rows_by("node_id", rows)
    saved = [path for r in store.rounds("checkpoints") if store.names(path := f"checkpoints/round_{r:06d}")]
    return {
        "experiment": store.base.name,
        "current_round": store.clock()[0],
        "current_stage": rows[-1]["stage"] if rows else 0,
        "num_active_peers": len(life.live_workers()),
        "peer_ids": life.workers(),
        "last_updated": max(times, default=None),
        "cumulative_rewards": {node: sum(row["reward"] for row in mine) for node, mine in by_node.items()},
        "latest_checkpoint": str(store.base / saved[-1]) if saved else None,
        "duration_seconds": max(times) - min(times) if times else 0.0,
    }


def validate_experiment(store, max_rounds: int, nodes: int) -> list[str]:
    """What a finished run lacks, as sentences; an empty list means that everything is there."""
    try:
        config = store.read("config.json") or {}
    except ValueError as error:
        return [f"config.json: {error}"]
    stages, shares = config.get("MAX_STAGES"), nodes > 1 and config.get("NUM_TRANSPLANT_TREES") != 0
    if not isinstance(stages, int) or not 1 <= stages <= 100:
        return [f"{store.base}: no config.json, or one without a MAX_STAGES from 1 to 100"]
    rows, clock, last = reward_rows(store), store.clock()[0], max_rounds - 1
    by_node, by_round = rows_by("node_id", rows), rows_by("round", rows)
    saved = [n for r in store.rounds("checkpoints") for n in store.names(f"checkpoints/round_{r:06d}")]
    unpaid = [t for t in range(max_rounds) if t not in by_round]
    silent = [] if config.get("ROLLOUT_CLEANUP_ENABLED") else range(max_rounds)
    silent = [t for t in silent if not any(store.nodes("rollouts", t, s) for s in range(stages))]
    checks = [  # (whether it is there, what to say if not)
        (clock >= last, f"the clock stands at round {clock}, expected {last}"),
        (len(by_node) >= nodes, f"{len(by_node)} nodes submitted rewards, expected {nodes}"),
        (not unpaid, f"{len(unpaid)} rounds without rewards, such as round {min(unpaid, default='')}"),
        (not silent, f"{len(silent)} rounds without rollouts, such as round {min(silent, default='')}"),
        (saved, "no checkpoint"),
        (any(row.get("informative_groups") for row in rows), "no node trained on an informative group"),
        (any(row.get("grad_norm") for row in rows), "every gradient is zero: nothing was learned"),
        (not shares or any(row.get("external_groups") for row in rows), "no external group was drawn"),
    ]
    for node, mine in by_node.items():
        files = {*store.names(f"logs/{node}"), *store.names(f"models/{node}")}
        lacking = ", ".join(sorted({"metrics.jsonl", "config.json", "tokenizer.json"} - files))
        bare = [row["round"] for row in mine if not row.get("completions") or not row.get("local_groups")]
        checks += [
            (mine[-1]["round"] == last, f"{node}: no reward for the last round {last}"),
            (not bare, f"{node} round {min(bare, default='')}: reward without completions or local_groups"),
            (not lacking, f"{node}: logs/{node} and models/{node} lack {lacking}"),
            (any(name.endswith(".safetensors") for name in files), f"{node}: no weights in models/{node}"),
        ]
    return [problem for there, problem in checks if not there]


# -------- Comparing experiments -------------------------------------------------------------------

PAPER = (
    "The paper's own (table 1: 8 x Qwen2.5-0.5B, 2000 rounds, one run each, summed over nodes): "
    "8/0 561.79, 6/2 854.43 +52%, 4/4 1093.31 +94%, 2/6 945.87 +68%."
)
FEW_SEEDS = (
    "An interval needs 3 seeds of both; 3 seeds allow no p below 0.05, 6 would do (4 if they do not pair)."
)
ARM = ("NUM_TRAIN_SAMPLES", "NUM_TRANSPLANT_TREES", "LOCAL_OVERSAMPLE", "LOCAL_REPLAY", "EXTERNAL_FILTER")
NO_SETTING = {  # may differ between repetitions; every other key of config.json, a new one too, is a setting
    "SEED", "EXPERIMENT_NAME", "created_at", "layout", "reasoning_gym", "TEST_MODE", "CONFIGS", "SEEDS",
    "MAX_ROUNDS", "LOCAL_NODES", "NUM_WORKERS",  # the rounds and the nodes that were seen count instead
    "MICRO_BATCH_SIZE", "EVAL_INTERVAL", "EVAL_SAMPLES", "CHECKPOINT_INTERVAL", "CHECKPOINT_KEEP",
    "ROLLOUT_CLEANUP_ENABLED", "ROLLOUT_KEEP_LAST_N_ROUNDS", "ROLLOUT_ARCHIVE_OLD", "STALE_AFTER_SECONDS",
    "COORDINATOR_ROUND_INTERVAL", "FETCH_TIMEOUT_SECONDS", "VERBOSE",
}  # fmt: skip
NEAR_ZERO = 1e-3  # a cumulative reward of which no ratio can be taken


def settings_of(config: dict) -> dict:
    """What two runs must agree in to be repetitions of each other. What has no effect in this one is None."""
    settings = {"LOCAL_OVERSAMPLE": 1, "LOCAL_REPLAY": 0, "EXTERNAL_FILTER": True}
    settings |= {name: value for name, value in config.items() if name not in NO_SETTING}
    if settings["NUM_TRANSPLANT_TREES"] == 0:
        settings |= dict.fromkeys(("EXTERNAL_FILTER", "FETCH_MAX_PEERS", "ROLLOUT_PUBLISH_FREQUENCY"))
        settings |= {} if settings["LOCAL_REPLAY"] else {"ROLLOUT_MAX_AGE": None}
    return settings


def arm_of(settings: dict) -> str:
    """How a round gets its groups: 4/4, 8/0, 8/0 x2 (oversampled), 4/4 unfiltered, 4/4 +r4 (replay)."""
    own, external, oversample, replay, filtered = (settings[name] for name in ARM)
    text = f"{own}/{external}" + (f" x{oversample}" if oversample > 1 else "")
    return text + (" unfiltered" if filtered is False else "") + (f" +r{replay}" if replay else "")


def summarize(store) -> dict | None:
    """One experiment as figures, None if it has no rewards. ValueError if config.json cannot be used."""
    config, rows = store.read("config.json") or {}, reward_rows(store)
    for name in ARM[:4]:
        value = config.get(name, None if name in ARM[:2] else 0)
        if not isinstance(value, int) or not 0 <= value <= 4096:
            raise ValueError(f"config.json: {name} is {plain(value)}")
    if not rows:
        return None
    nodes, rounds, found = len(rows_by("node_id", rows)), rows[-1]["round"] + 1, rows_by("round", rows)
    by_round = [found.get(t, []) for t in range(rounds)]
    curve = [average(row["reward"] for row in now) for now in by_round]
    spent = [sum(row.get("completions", 0) for row in now) / nodes for now in by_round]
    return {
        "experiment": store.base.name,
        "seed": plain(config.get("SEED")),
        "settings": settings_of({**config, "nodes": nodes, "rounds": rounds}),
        "per_node": sum(row["reward"] for row in rows) / nodes,
        "final": smooth(curve)[-1],
        "held_out": average(row.get("held_out") for row in rows if row["round"] >= 0.9 * rounds),
        "informative": average(row.get("informative_groups") for row in rows),
        "completions": sum(spent),
        "curve": curve,
        "spent": list(itertools.accumulate(spent)),  # completions per node, so far
    }


def compare(summaries: list[dict]) -> list[dict]:
    """A row for each group of repetitions, compared with its baseline; the best of equal settings first."""
    groups, rows = {}, []
    for summary in summaries:
        groups.setdefault(json.dumps(summary["settings"], sort_keys=True), []).append(summary)
    every = [runs[0]["settings"] for runs in groups.values()]
    values = {n: {json.dumps(s.get(n, "unset")) for s in every} - {"null"} for s in every for n in s}
    shown = sorted(n for n in values if len(values[n]) > 1 and n not in ARM)
    for settings, runs in zip(every, groups.values(), strict=True):
        own = settings["NUM_TRAIN_SAMPLES"] + settings["NUM_TRANSPLANT_TREES"]  # of a lone node's groups: all
        base = settings_of(settings | dict(zip(ARM, (own, 0, 1, 0, None), strict=True)))
        lone = groups.get(json.dumps(base, sort_keys=True), [])
        others = {n: settings.get(n, "unset") for n in shown}
        where = " ".join(plain(f"{n}={value}", 60) for n, value in others.items() if value is not None)
        row = {"label": f"{arm_of(settings)} {where}".rstrip(), "arm": arm_of(settings), "where": where}
        for name in ("per_node", "final", "held_out", "informative", "completions"):
            row[name] = average(run[name] for run in runs)
        row["cumulative"] = row["per_node"] * settings["nodes"]
        row["cost"] = row["completions"] / max(1, average(r["completions"] for r in lone)) if lone else None
        row |= {"baseline": arm_of(base), "runs": len(runs), "settings": settings, "members": runs}
        rows.append(row | advantage(runs, lone))
    return sorted(rows, key=lambda row: (row["where"], -row["per_node"]))


def advantage(runs: list[dict], baseline: list[dict]) -> dict:
    """How much more reward than the baseline, with a 95% interval and a p-value where there are seeds enough.

    Logarithms are compared: seed by seed where both have the same seeds, else group with group (Welch).
    Two runs of one seed are averaged, for they are no independent evidence.
    """
    ours, base = (
        {seed: average(run["per_node"] for run in mine) for seed, mine in rows_by("seed", group).items()}
        for group in (runs, baseline)
    )
    result = dict.fromkeys(("improvement", "low", "high", "p_value", "method"))
    result |= {"seeds": " ".join(ours), "spread": statistics.stdev(ours.values()) if len(ours) > 1 else None}
    if baseline is runs or not base:
        return result | {"note": "baseline" if base else "no baseline"}
    if min(*base.values(), *ours.values()) <= NEAR_ZERO:
        return result | {"note": "baseline near 0" if min(base.values()) <= NEAR_ZERO else "reward near 0"}
    paired = ours.keys() == base.keys()
    a, b = ([math.log(values[seed]) for seed in sorted(values)] for values in (ours, base))
    samples = [[x - y for x, y in zip(a, b, strict=True)]] if paired else [a, b]
    center, method = average(a) - average(b), "paired by seed" if paired else "Welch"
    result |= {"improvement": math.expm1(center), "p_value": p_value(a, b, paired), "method": method}
    parts = [statistics.variance(s) / len(s) for s in samples] if min(map(len, samples)) > 2 else []
    if not any(parts):
        return result | {"note": "no spread" if parts else "too few seeds"}
    freedom = sum(parts) ** 2 / sum(v * v / (len(s) - 1) for v, s in zip(parts, samples, strict=True))
    half = t_quantile(freedom) * math.sqrt(sum(parts))
    return result | {"low": math.expm1(center - half), "high": math.expm1(center + half), "note": ""}


def t_quantile(freedom: float, steps: int = 20000) -> float:
    """97.5% quantile of Student's t. Of 2: 4.303. For t = sqrt(f) tan u, u has density cos(u)^(f - 1)."""
    angles = [(i + 0.5) * math.pi / 2 / steps for i in range(steps)]
    below = list(itertools.accumulate(math.cos(u) ** (freedom - 1) for u in angles))
    return math.sqrt(freedom) * math.tan(angles[bisect.bisect(below, 0.95 * below[-1])])


def p_value(a: list[float], b: list[float], paired: bool, limit: int = 20000) -> float | None:
    """Two-sided p-value of mean(a) != mean(b): the share of relabelings that are at least as far apart.

    paired: the two of a seed change places; else any do. Exact up to `limit`. None if none can be below 0.05.
    """
    rng, both, n = random.Random(0), [*a, *b], len(a)
    pairs, total = list(zip(a, b, strict=paired)), 2**n if paired else math.comb(len(both), n)
    if 2 / total > 0.05:
        return None
    every = itertools.product(*pairs) if paired else itertools.combinations(both, n)
    if total > limit:  # drawn at random, and what was observed is one of them
        drawn = (map(rng.choice, pairs) if paired else rng.sample(both, n) for _ in range(limit))
        every = itertools.chain([a], drawn)
    gaps = [abs(left / n - (sum(both) - left) / len(b)) for left in map(sum, every)]
    return sum(gap >= abs(sum(a) / n - sum(b) / len(b)) - 1e-12 for gap in gaps) / len(gaps)


def conclusion(row: dict) -> str:
    """What a comparison says, as a sentence."""
    gain, low, high, base = (row[name] for name in ("improvement", "low", "high", "baseline"))
    if row["cost"] is None:
        return f"{row['label']}: no {base} with the same settings to compare it with."
    said = f"{row['label']}: {row['note']}" + (f", {gain:+.0%} against {base}" if gain is not None else "")
    if low is not None:
        verb = "beats" if low > 0 else "falls behind" if high < 0 else "cannot be told from"
        by = f" by {abs(gain):.0%}" if low * high > 0 else ""
        said = f"{row['label']} {verb} {base}{by} (95% interval {low:.0%} to {high:.0%}, {row['method']})"
    cost = {1: "as many", 0.5: "half the"}.get(round(row["cost"], 2), f"{row['cost']:.2g} times the")
    p = "" if row["p_value"] is None else f"; p = {row['p_value']:.3f}"
    return f"{said} at {cost} completions{p}."


def report_text(rows: list[dict]) -> str:
    """The comparison as a table of at most 100 columns, then in sentences. Empty columns are left out."""

    def show(value, form=".2f", before="", after=""):
        return "" if value is None else before + format(value, form) + after

    table = [("I/J", "runs", "reward per node", "gain", "p", "final", "held-out", "completions", "where")]
    for row in rows:
        reward = show(row["per_node"]) + show(row["spread"], before=" ± ")
        interval = show(row["low"], ".0%", " (") + show(row["high"], ".0%", " to ", ")")
        gain = show(row["improvement"], "+.0%") + interval or row["note"]
        last = [show(row["p_value"], ".3f"), show(row["final"]), show(row["held_out"])]
        spent = show(row["completions"], ".0f")
        table.append((row["arm"], str(row["runs"]), reward, gain, *last, spent, row["where"]))
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    # indented by four, it is a code block in Markdown
    lines = ["    " + "  ".join(line)[:96].rstrip() for line in zip(*padded, strict=True)]
    said = [conclusion(row) for row in rows if row["note"] != "baseline"]
    return "\n".join([*lines, *("\n" + textwrap.fill(text, 100) for text in [*said, FEW_SEEDS, PAPER]), ""])


def write_report(rows: list[dict], write) -> list[str]:
    """Hand report.md, .csv, .json, curves.csv and, with matplotlib, report.png to write(name, data)."""
    curves = [("label", "seed", "experiment", "round", "reward", "completions")]
    for row in rows:
        for run in row["members"]:
            points = zip(itertools.count(), run["curve"], run["spent"], strict=False)
            curves += [(row["label"], run["seed"], run["experiment"], *point) for point in points]
    names = [name for name in rows[0] if name not in ("settings", "members")]
    full = [{**row, "members": [run["experiment"] for run in row["members"]]} for row in rows]
    files = {"report.md": report_text(rows).encode(), "report.json": json.dumps(full, indent=1).encode()}
    files |= {"report.csv": as_csv([names, *([row[name] for name in names] for row in rows)])}
    files |= {"curves.csv": as_csv(curves), "report.png": draw(report_panels(rows))}
    files = {name: data for name, data in files.items() if data}
    for name, data in files.items():
        write(name, data)
    return list(files)


def as_csv(table) -> bytes:
    """Lines of cells as CSV. A text that a spreadsheet would take for a formula gets a quote in front."""
    risky, out = ("=", "+", "-", "@"), io.StringIO()
    lines = [[f"'{c}" if isinstance(c, str) and c.startswith(risky) else c for c in line] for line in table]
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue().encode()


SHARING, LONE, UNFILTERED = "#0072B2", "#D55E00", "#009E73"  # by Okabe and Ito, safe for the colour-blind


def report_panels(rows: list[dict]) -> dict:
    """Smoothed reward over rounds and completions, for `draw`: a colour for a family, a style for a line."""
    panels, styles = {"round": [], "completions generated per node (log)": []}, {}
    for row in rows:
        external, filtered = row["settings"]["NUM_TRANSPLANT_TREES"], row["settings"]["EXTERNAL_FILTER"]
        color = SHARING if external and filtered else UNFILTERED if external else LONE
        style = next(styles.setdefault(color, itertools.cycle(("-", "--", "-.", ":"))))
        heights = list(zip(*(smooth(run["curve"]) for run in row["members"]), strict=True))
        spent = [average(now) for now in zip(*(run["spent"] for run in row["members"]), strict=True)]
        for panel, x in zip(panels.values(), (range(len(spent)), spent), strict=True):
            panel.append((plain(row["label"], 34), color, style, x, heights))
    return panels


def draw(panels: dict, ylabel: str = "mean reward (0 to 1), smoothed", size=(9, 4.2)) -> bytes | None:
    """A panel for each {label of its x axis: lines}, as PNG, shown in a notebook. None without matplotlib.

    A line: (name, colour, style, x values, for each of these the values whose mean and range are drawn).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return None
    figure, png = Figure(figsize=size, dpi=150, layout="constrained"), io.BytesIO()
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    axes[0].set(ylabel=ylabel)
    for axis, xlabel in zip(axes, panels, strict=True):
        ends = []
        for name, color, style, x, heights in panels[xlabel]:
            heights = [[math.nan if y is None else y for y in now] for now in heights]
            mean, low, high = ([f(now) for now in heights] for f in (statistics.fmean, min, max))
            axis.plot(x, mean, style, color=color, linewidth=1.4)
            axis.fill_between(x, low, high, color=color, alpha=0.08, linewidth=0)
            ends.append((mean[-1], x[-1], name, color))
        axis.set(xlabel=xlabel, xscale="log" if "(log)" in xlabel else "linear")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        place, gap = -1.0, axis.get_ylim()[1] * min(0.055, 1 / len(ends))
        for y, x, name, color in sorted(ends):  # the names stand right of the panel, none on another
            place, thread = max(y, place + gap), {"arrowstyle": "-", "color": color, "alpha": 0.4}
            at = {"xytext": (1.03, place), "textcoords": axis.get_yaxis_transform(), "annotation_clip": False}
            look = {"color": color, "fontsize": 8, "va": "center", "parse_math": False}
            axis.annotate(name, (x, y), arrowprops=thread, **at, **look)
    figure.savefig(png, format="png")
    if in_notebook():
        from IPython.display import Image, display

        display(Image(data=png.getvalue(), width=int(100 * size[0])))
    return png.getvalue()


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; that the package has been imported is not enough."""
    ipython = sys.modules.get("IPython")
    return "ipykernel" in sys.modules and ipython is not None and ipython.get_ipython() is not None


# -------- Watching one experiment -----------------------------------------------------------------


def dashboard(store, life, rows: list[dict], max_rounds: int) -> str:
    """An experiment as text that fits the terminal: clock, times, nodes, latest rollout, what looks wrong."""
    screen = shutil.get_terminal_size() if sys.stdout.isatty() else os.terminal_size((110, 1000))
    life.refresh()
    clock, by_node, recent = store.clock()[0], rows_by("node_id", rows), []
    for round_ in [r for r in store.rounds("rollouts") if clock - 3 < r <= clock]:
        for stage in store.stages("rollouts", round_):
            recent += [(round_, stage, node) for node in store.nodes("rollouts", round_, stage)]
    for round_, _, node in recent:
        life.note(node, "rollouts", round_, age=math.inf)  # how old they are at the first look is not known
    for node, mine in by_node.items():
        life.note(node, "reward", mine[-1]["round"], age_of(mine[-1]["timestamp"]))
    nodes = [n for n in life.sessions if life.about(n).get("role") != "coordinator"]
    nodes.sort(key=lambda node: (not life.is_live(node), node))
    live, gigabytes = sum(map(life.is_live, nodes)), shutil.disk_usage(store.base).free / 1e9
    lines = [f"{store.base.name}: round {clock} of {max_rounds}, {len(nodes)} nodes registered, {live} live"]
    waiting = f"waiting for a first {'reward' if nodes else 'worker'}"
    lines += [progress(rows, max_rounds) if rows else waiting, ""]
    lines += [f"{'node':20} {'state':5} {'round':>6} {'reward':>7} {'total':>8}  trend"]
    tail = [f"! {warning}" for warning in health_warnings(store, life, rows, clock, recent, gigabytes)[:4]]
    tail = ["", *tail, f"storage: {gigabytes:.1f} GB free. Ctrl-C leaves, the swarm goes on"]
    room = max(2, screen.lines - len(lines) - len(tail) - 1)
    fit = len(nodes) if len(nodes) <= room else room - 1
    for node in nodes[:fit]:
        state = "left" if life.has_left(node) else "live" if life.is_live(node) else "dead"
        rewards = [row["reward"] for row in by_node.get(node, [])]
        last = f"{by_node[node][-1]['round']:6} {rewards[-1]:7.2f} {sum(rewards):8.2f}  " if rewards else ""
        bars = ("▁▂▃▄▅▆▇█"[min(7, int(8 * reward))] for reward in smooth(rewards)[-20:])
        lines.append(f"{node:20.20} {state:5} {last}{''.join(bars)}")
    lines += [f"and {len(nodes) - fit} more"] if len(nodes) > fit else []
    lines += latest_rollout(store, recent) if room >= fit + 4 else []
    return "\n".join(line[: screen.columns] for line in [*lines, *tail])


def progress(rows: list[dict], max_rounds: int) -> str:
    """Stage, mean reward and times; the time left is guessed from the last 20 rounds."""
    times = {row["round"]: row["timestamp"] for row in rows}
    first, last = list(times)[-20:][0], rows[-1]["round"]
    left = (times[last] - times[first]) / max(1, last - first) * (max_rounds - 1 - last)
    seconds = (age_of(times[last]), times[last] - rows[0]["timestamp"], left)
    ago, running, left = (short_time(max(0.0, s)) for s in seconds)
    mean = average(mine[-1]["reward"] for mine in rows_by("node_id", rows).values())
    return f"stage {rows[-1]['stage']} | mean reward {mean:.3f}, {ago} ago | running {running} | eta {left}"


def latest_rollout(store, recent: list[tuple]) -> list[str]:
    """The newest question, its best and its worst completion, and what their writer says that they earned."""
    for round_, stage, node in recent[-1:]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            group = store.fetch(round_, stage, node)[0]
            best_first = sorted(group["completions"], key=lambda c: -(c["claimed"] or 0))
            shown = [(c["claimed"], plain(repr(c["response"]))) for c in (best_first[0], best_first[-1])]
            lines = [f"  {claimed!s:5.5} {response}" for claimed, response in shown]
            return ["", f"latest rollout, by {node}: {plain(repr(group['prompt']))}", *lines]
    return []


def health_warnings(store, life, rows, clock: int, recent: list[tuple], gigabytes: float) -> list[str]:
    """What looks wrong, each with what to do about it, the worst first."""
    live, workers = life.live_workers(), life.workers()
    finished = all(map(life.has_left, workers))
    idle = min(map(life.silence, live), default=0.0)
    starts = Counter(name.rsplit(".", 2)[0] for name in store.names("peers"))
    often = [node for node in live if starts[node] > 5]
    informative = [row.get("informative_groups", 0) for row in rows if row["round"] > clock - 10]
    unusable = ", ".join(f"{count} {plain(why)}" for why, count in store.skipped.items())
    checks = [  # (whether it is so, what to say then)
        (clock < 0, "no round is open: start a worker or the coordinator, or check EXPERIMENT_NAME"),
        (not live and not finished, "no live worker: start one with its old NODE_ID to resume it"),
        (live and clock > 1 and not recent, "no rollouts in three rounds: too short, or another folder?"),
        (idle > life.stale_after / 2, f"nothing new for {idle:.0f} s: is the drive still mounted?"),
        (informative and not any(informative), "no informative group: WARM_START_STEPS, NUM_SHOTS, TASKS?"),
        (often, f"started more than five times: {', '.join(often)}. Do two machines share this NODE_ID?"),
        (gigabytes < 1, "less than 1 GB free: lower CHECKPOINT_KEEP, set ROLLOUT_CLEANUP_ENABLED=True"),
        (unusable, f"unusable files: {unusable}"),
    ]
    return [warning for is_so, warning in checks if is_so]


def monitor(store, stale_after: float, max_rounds: int, once=False, should_stop=lambda: False) -> None:
    """Show the dashboard every 30 seconds in place of the last, in a notebook with a chart; once if asked."""
    life, known, clear = Life(store, stale_after), {}, "\033[2J\033[H" if sys.stdout.isatty() else ""
    while not should_stop():
        try:
            rows = reward_rows(store, known)
            text = dashboard(store, life, rows, max_rounds)
        except OSError as error:
            if once:
                raise
            rows, text = [], f"the shared folder cannot be read ({plain(error)}); trying on"
        if in_notebook():
            from IPython.display import clear_output

            clear_output(wait=True)
        print(clear + text, flush=True)
        if in_notebook() and rows:
            by_round = {t: [row["reward"] for row in now] for t, now in rows_by("round", rows).items()}
            line = (store.base.name, SHARING, "-", list(by_round), list(by_round.values()))
            draw({"round": [line]}, "reward (0 to 1): mean and range of nodes")
        if once:
            return
        deadline = time.monotonic() + 30.0
        while not should_stop() and time.monotonic() < deadline:
            time.sleep(0.2)
