"""The swarm seen as a whole: who is live, the round clock, and what an experiment's folder says afterwards.

Everything here reads and writes through a DriveStore that is passed in; no model is loaded. The coordinator does not
train: it opens rounds. Without one, the workers open them themselves (see `next_round` in sapo.py).
"""

import os
import socket
import time
from pathlib import Path


class Liveness:
    """Who is live: a node of which anything new was seen within `stale_after` seconds.

    Judged by when *this* reader first saw it, on its own monotonic clock, so that the nodes' clocks need not agree. Only at
    the very first look does a timestamp count: something that says it is an hour old is not taken for fresh.
    """

    def __init__(self, store, stale_after: float):
        self.store, self.stale_after = store, stale_after
        self.sessions = {}  # node -> newest session
        self.heartbeats = {}  # node -> last heartbeat read
        self._evidence = {}  # (node, kind) -> last value seen
        self._seen = {}  # node -> monotonic time of the newest evidence

    def note(self, node_id: str, kind: str, value, age: float = 0.0) -> None:
        """Something of this node was seen; it counts as a sign of life if it differs from the last of its kind."""
        if self._evidence.get((node_id, kind)) != value:
            self._evidence[node_id, kind] = value
            self._seen[node_id] = max(self._seen.get(node_id, -1e9), time.monotonic() - max(0.0, age))

    def refresh(self, node_ids=None) -> None:
        """Look at the registrations (one listing) and at the heartbeats of `node_ids` (None: everybody)."""
        self.sessions = self.store.sessions()
        for node in self.sessions if node_ids is None else [n for n in node_ids if n in self.sessions]:
            about = self.store.registration(node, self.sessions[node]) or {}
            first_look = node not in self._seen
            self.note(node, "session", self.sessions[node], age_of(about.get("registered_at")) if first_look else 0.0)
            beat = self.store.read_heartbeat(node)
            if beat is not None:
                self.heartbeats[node] = beat
                self.note(node, "heartbeat", beat.get("time"), age_of(beat.get("time")) if first_look else 0.0)

    def about(self, node_id: str) -> dict:
        """The registration of this node's newest session; {} if there is none to read."""
        session = self.sessions.get(node_id)
        return (self.store.registration(node_id, session) if session else None) or {}

    def has_left(self, node_id: str) -> bool:
        """Whether its newest session said goodbye (finished or stopped)."""
        beat = self.heartbeats.get(node_id, {})
        return beat.get("session") == self.sessions.get(node_id) and beat.get("state") in ("done", "stopped")

    def silence(self, node_id: str) -> float:
        """Seconds since the newest evidence, infinite if there is none."""
        return time.monotonic() - self._seen.get(node_id, -float("inf"))

    def is_live(self, node_id: str) -> bool:
        fresh = self.silence(node_id) < self.stale_after
        return fresh and not self.has_left(node_id) and not is_known_dead(self.about(node_id))

    def live_workers(self) -> list[str]:
        return sorted(n for n in self.sessions if self.about(n).get("role") == "worker" and self.is_live(n))


def age_of(timestamp) -> float:
    """Seconds since a wall-clock timestamp somebody wrote; 0 if it makes no sense or lies in the future."""
    return max(0.0, time.time() - timestamp) if isinstance(timestamp, int | float) and timestamp > 0 else 0.0


def process_identity() -> dict:
    """Host, pid and start time of this process: enough for others on the same host to see that it has died."""
    return {"host": socket.gethostname(), "boot_id": _boot_id(), "pid": os.getpid(), "pid_start": _pid_start(os.getpid())}


def is_known_dead(about: dict) -> bool:
    """Whether a process that registered with `process_identity` ran on this host and is gone. False means: unknown."""
    pid = about.get("pid")
    if about.get("host") != socket.gethostname() or about.get("boot_id") != _boot_id() or not isinstance(pid, int):
        return False
    if _boot_id() is None or not 0 < pid < 2**31:
        return False
    return _pid_start(pid) != about.get("pid_start")


def _boot_id() -> str | None:
    """Names this boot of this machine, so that two containers called "localhost" are not taken for one. Linux only."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + namespace
    except OSError:
        return None


def _pid_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, None if it does not run (a zombie does not). Linux only."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Pace:
    """How long to sleep between two looks at the folder: ten times what a look costs, 0.02 to 5 seconds.

    A local folder answers in a millisecond and is asked often; a mounted drive takes 300 and is left in peace.
    """

    def __init__(self):
        self._start = time.monotonic()

    def seconds(self) -> float:
        cost = time.monotonic() - self._start
        return min(5.0, max(0.02, 10 * cost))

    def sleep(self) -> None:
        time.sleep(self.seconds())
        self._start = time.monotonic()


# -------- The round clock -------------------------------------------------------------------------------------


def resume_clock(store, by: str) -> int:
    """The round to go on with: the highest open one; where none is, the last rewarded one; else round 0 is opened."""
    round_ = store.current_round()
    if round_ < 0:
        round_ = max(0, store.highest_rewarded_round())
        store.open_round(round_, by)
    return round_


def is_round_over(strategy: str, elapsed: float, interval: float, live: list[str], submitted: list[str]) -> bool:
    """Whether the clock moves on. time: the interval is over · completion: all live workers submitted · hybrid: either.

    It never runs on for nobody: without a live worker and without any reward of this round, it waits.
    """
    if not live and not submitted:
        return False
    all_submitted = bool(submitted) and set(live) <= set(submitted)
    if strategy == "time":
        return elapsed >= interval
    return all_submitted or (strategy == "hybrid" and elapsed >= interval)


def coordinate(store, session, seat, *, max_rounds, last_stage, strategy, interval, liveness, say, should_stop, clean=None):
    """Run the clock until MAX_ROUNDS is reached and every worker is done or stale. Returns how it ended, in a word.

    session: this coordinator's own; a newer one on the same seat ends this one. clean: called with the round, now and then.
    """
    round_, opened, down, next_beat, hold = resume_clock(store, seat), time.monotonic(), False, 0.0, True
    say(f"coordinator: round {round_} is open ({strategy}, interval {interval:g} s)")
    pace = Pace()
    while not should_stop():
        try:
            liveness.refresh()
            if liveness.sessions.get(seat, session) > session:
                say("coordinator: a newer session holds the seat; this one stops")
                return "superseded"
            now = time.monotonic()
            if now >= next_beat:
                store.heartbeat(seat, {"session": session, "round": round_, "state": "running"})
                next_beat = now + min(15.0, liveness.stale_after / 4)
            seen = store.current_round()
            if seen > round_:
                round_, opened = seen, now
            submitted = store.rewarded(round_, last_stage)
            for node in submitted:
                liveness.note(node, "reward", round_)
            for node in store.publishers(round_, 0):
                liveness.note(node, "rollouts", round_)
            live = liveness.live_workers()
            if hold and round_ == 0 and not submitted:
                opened = now  # models may take minutes to download: round 0 waits for its first reward
            hold = hold and not submitted
            if round_ >= max_rounds - 1 and submitted and set(live) <= set(submitted):
                store.heartbeat(seat, {"session": session, "round": round_, "state": "done"})
                say(f"coordinator: round {round_} was the last; finished")
                return "finished"
            if round_ >= max_rounds - 1 and not live and not hold:
                say(f"coordinator: round {round_} was the last and no worker is live; finished")
                return "finished"
            if round_ < max_rounds - 1 and is_round_over(strategy, now - opened, interval, live, submitted):
                late = sorted(set(live) - set(submitted))
                say(f"coordinator: round {round_} -> {round_ + 1}: {len(submitted)} submitted" + (f", late: {' '.join(late)}" if late else ""))
                round_ += 1
                store.open_round(round_, seat)
                opened = time.monotonic()
                if clean is not None:
                    clean(round_)
            if down:
                down = say("coordinator: the shared folder is back")
        except OSError as error:
            if not down:
                say(f"coordinator: the shared folder fails ({error}); trying on")
            down = True
        pace.sleep()
    store.heartbeat(seat, {"session": session, "round": round_, "state": "stopped"})
    return "stopped"


# -------- What the folder says --------------------------------------------------------------------------------


def reward_rows(store) -> list[dict]:
    """Every published reward, one row per node, round and stage: ready for pandas.DataFrame. Sorted by round."""
    rows = []
    for bucket_name in store.names("rewards"):
        for stage_name in store.names(f"rewards/{bucket_name}"):
            round_text, stage_text = bucket_name.removeprefix("round_"), stage_name.removeprefix("stage_")
            if round_text.isdecimal() and stage_text.isdecimal():
                for node in store.rewarded(int(round_text), int(stage_text)):
                    data = store.reward(int(round_text), int(stage_text), node)
                    if data is not None:
                        rows.append({**data, "experiment": store.base.name, "my_reward": data["reward"]})
    return rows


def experiment_status(store, stale_after: float = 300.0) -> dict:
    """The state of one experiment, as a reader sees it now. Changes nothing."""
    rows, live = reward_rows(store), Liveness(store, stale_after)
    live.refresh()
    totals = {}
    for row in rows:
        totals[row["node_id"]] = totals.get(row["node_id"], 0.0) + row["reward"]
    times = [row["timestamp"] for row in rows if isinstance(row.get("timestamp"), int | float)]
    latest = [name for name in store.names("checkpoints") if store.names(f"checkpoints/{name}")]
    return {
        "experiment": store.base.name,
        "current_round": store.current_round(),
        "current_stage": max((row["stage"] for row in rows if row["round"] == rows[-1]["round"]), default=0),
        "num_active_peers": len(live.live_workers()),
        "peer_ids": sorted(n for n in live.sessions if live.about(n).get("role") == "worker"),
        "last_updated": max(times, default=None),
        "cumulative_rewards": totals,
        "latest_checkpoint": str(store.base / "checkpoints" / latest[-1]) if latest else None,
        "duration_seconds": max(times) - min(times) if times else 0.0,
    }


def validate_experiment(store, max_rounds: int, nodes: int, checkpoints: bool = True) -> list[str]:
    """What a finished run lacks, as sentences; an empty list means that everything is there."""
    problems = []
    try:
        config = store.read("config.json")
        if config is None:
            return [f"{store.base}: no such experiment (no config.json)"]
        if store.current_round() < max_rounds - 1:
            problems.append(f"the clock stands at round {store.current_round()}, expected {max_rounds - 1}")
    except Exception as error:  # StoreError or BadFile: a reader reports it
        return [f"{store.base}: {error}"]
    rows = reward_rows(store)
    workers = sorted({row["node_id"] for row in rows})
    if len(workers) < nodes:
        problems.append(f"{len(workers)} nodes submitted rewards, expected {nodes}")
    last = {row["node_id"] for row in rows if row["round"] == max_rounds - 1}
    for node in workers:
        if node not in last:
            problems.append(f"{node}: no reward for the last round {max_rounds - 1}")
        if not (store.base / "logs" / node / "metrics.jsonl").is_file():
            problems.append(f"{node}: no logs/{node}/metrics.jsonl")
        if checkpoints and not store.checkpoints(node):
            problems.append(f"{node}: no checkpoint")
        if not (store.base / "models" / node / "config.json").is_file():
            problems.append(f"{node}: no final model in models/{node}")
    if not any(store.publishers(r, 0) for r in range(max_rounds)) and not config.get("ROLLOUT_CLEANUP_ENABLED"):
        problems.append("no rollouts were published")
    for row in rows:
        for part in ("completions", "local_groups"):
            if not row.get(part):
                problems.append(f"{row['node_id']} round {row['round']}: reward without {part}")
    return problems
