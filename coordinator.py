"""The swarm seen as a whole: who is live, the round clock, and what an experiment's folder says afterwards.

Everything here reads and writes through a DriveStore that is passed in; no model is loaded. The coordinator does not
train: it opens rounds. Without one, the workers open them themselves (see `next_round` in sapo.py).
"""

import contextlib
import csv
import itertools
import json
import math
import os
import random
import shutil
import socket
import statistics
import sys
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
        self.abouts = {}  # node -> what its newest session said of itself
        self._evidence = {}  # (node, kind) -> last value seen
        self._seen = {}  # node -> monotonic time of the newest evidence
        self._look_again = {}  # node -> monotonic time

    def note(self, node_id: str, kind: str, value, age: float = 0.0) -> bool:
        """Something of this node was seen; it counts as a sign of life, and True is returned, if it is new of its kind."""
        last = self._evidence.get((node_id, kind))  # a round number may not go down: old rollouts read again are no life
        if value != last and not (isinstance(last, int) and isinstance(value, int) and value < last):
            self._evidence[node_id, kind] = value
            self._seen[node_id] = max(self._seen.get(node_id, -1e9), time.monotonic() - max(0.0, age))
            return True
        return False

    def refresh(self, node_ids=None) -> None:
        """Look at the registrations (one listing) and at the heartbeats of `node_ids` (None: everybody)."""
        self.sessions = self.store.sessions()
        for node in self.sessions if node_ids is None else [n for n in node_ids if n in self.sessions]:
            about = self.abouts[node] = self.store.registration(node, self.sessions[node]) or {}
            first_look = node not in self._seen
            self.note(node, "session", self.sessions[node], age_of(about.get("registered_at")) if first_look else 0.0)
            if time.monotonic() < self._look_again.get(node, 0.0):
                continue
            beat = self.store.read_heartbeat(node)
            if beat is not None:
                self.heartbeats[node] = beat
                if self.note(node, "heartbeat", beat.get("time"), age_of(beat.get("time")) if first_look else 0.0):
                    # rclone carries a rewritten file to the remote 5 s after its last use: who polls it keeps it from everybody else
                    self._look_again[node] = time.monotonic() + min(10.0, self.stale_after / 8)

    def about(self, node_id: str) -> dict:
        """What this node's newest session said when it registered, as `refresh` read it: no call to the folder."""
        return self.abouts.get(node_id, {})

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
    now = time.time()
    return now - timestamp if isinstance(timestamp, int | float) and 0 < timestamp < now else 0.0


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
    round_, opened, down, next_beat = resume_clock(store, seat), time.monotonic(), False, 0.0
    hold = round_ == 0  # models may take minutes to download: round 0 waits for its first reward
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
            hold = hold and round_ == 0 and not submitted
            if hold:
                opened = now
            elif round_ >= max_rounds - 1 and set(live) <= set(submitted):
                store.heartbeat(seat, {"session": session, "round": round_, "state": "done"})
                say(f"coordinator: round {round_} was the last; finished" + ("" if live else ", no worker is live"))
                return "finished"
            elif round_ < max_rounds - 1 and is_round_over(strategy, now - opened, interval, live, submitted):
                late = sorted(set(live) - set(submitted))
                say(f"coordinator: round {round_} -> {round_ + 1}: {len(submitted)} submitted" + (f", late: {' '.join(late)}" if late else ""))
                store.open_round(round_ + 1, seat)  # may fail: only an open round is the current one
                round_, opened = round_ + 1, time.monotonic()
                if clean is not None:
                    clean(round_)
            if down:
                say("coordinator: the shared folder is back")
                down = False
        except OSError as error:
            if not down:
                say(f"coordinator: the shared folder fails ({error}); trying on")
            down = True
        pace.sleep()
    with contextlib.suppress(OSError):
        store.heartbeat(seat, {"session": session, "round": round_, "state": "stopped"})
    return "stopped"


# -------- What the folder says --------------------------------------------------------------------------------


def reward_rows(store) -> list[dict]:
    """Every published reward, one row per node, round and stage: ready for pandas.DataFrame. Sorted by round."""
    rows = []
    for round_ in store.rounds("rewards"):
        for stage in store.stages("rewards", round_):
            found = [store.reward(round_, stage, node) for node in store.rewarded(round_, stage)]
            rows += [{**data, "experiment": store.base.name, "my_reward": data["reward"]} for data in found if data]
    return rows


def experiment_status(store, stale_after: float = 300.0) -> dict:
    """The state of one experiment, as a reader sees it now. Changes nothing."""
    rows, live = reward_rows(store), Liveness(store, stale_after)
    live.refresh()
    totals = {}
    for row in rows:
        totals[row["node_id"]] = totals.get(row["node_id"], 0.0) + row["reward"]
    times = [row["timestamp"] for row in rows]
    saved = [f"checkpoints/round_{r:06d}" for r in reversed(store.rounds("checkpoints"))]
    latest = next((store.base / path for path in saved if store.names(path)), None)
    return {
        "experiment": store.base.name,
        "current_round": store.current_round(),
        "current_stage": max((row["stage"] for row in rows if row["round"] == rows[-1]["round"]), default=0),
        "num_active_peers": len(live.live_workers()),
        "peer_ids": sorted(n for n in live.sessions if live.about(n).get("role") == "worker"),
        "last_updated": max(times, default=None),
        "cumulative_rewards": totals,
        "latest_checkpoint": str(latest) if latest else None,
        "duration_seconds": max(times) - min(times) if times else 0.0,
    }


def spans(rounds) -> list[str]:
    """[3, 5, 6, 7] -> ["round 3", "rounds 5 to 7"]"""
    found = []
    for r in rounds:
        if found and found[-1][1] == r - 1:
            found[-1][1] = r
        else:
            found.append([r, r])
    return [f"round {a}" if a == b else f"rounds {a} to {b}" for a, b in found]


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
        for name in ("config.json", "tokenizer.json"):
            if not (store.base / "models" / node / name).is_file():
                problems.append(f"{node}: no models/{node}/{name}")
        if not any(name.endswith(".safetensors") for name in store.names(f"models/{node}")):
            problems.append(f"{node}: no weights in models/{node}")
    stages = config.get("MAX_STAGES", 1)
    rewarded = {row["round"] for row in rows}
    problems += [f"{span}: no rewards" for span in spans(r for r in range(max_rounds) if r not in rewarded)]
    if not config.get("ROLLOUT_CLEANUP_ENABLED"):
        lost = [r for r in range(max_rounds) if not any(store.publishers(r, s) for s in range(stages))]
        problems += [f"{span}: no rollouts" for span in spans(lost)]
    for row in rows:
        for part in ("completions", "local_groups"):
            if not row.get(part):
                problems.append(f"{row['node_id']} round {row['round']}: reward without {part}")
    return problems


# -------- Comparing experiments ------------------------------------------------------------------------------------

# The paper's table 1 (8 x Qwen2.5-0.5B, 2000 rounds): I/J -> (cumulative reward, improvement over 8/0)
PAPER = {"8/0": (561.79, ""), "6/2": (854.43, "+52%"), "4/4": (1093.31, "+94%"), "2/6": (945.87, "+68%")}
SETTINGS = {  # what makes two runs repetitions of one another, and its short name in a label; all but the seed
    "NUM_TRAIN_SAMPLES": "I", "NUM_TRANSPLANT_TREES": "J", "EXTERNAL_FILTER": "filter", "LOCAL_OVERSAMPLE": "k",
    "MODEL_NAME": "model", "LEARNING_RATE": "lr", "ANSWER_TAG_SHARE": "tags", "NUM_GENERATIONS": "G", "TASKS": "tasks",
}  # fmt: skip


def summarize(store, threshold: float = 0.3) -> dict | None:
    """One finished or running experiment as figures, from config.json and rewards/ alone; None if there are no rewards."""
    config, rows = store.read("config.json") or {}, reward_rows(store)
    if not rows:
        return None
    nodes = sorted({row["node_id"] for row in rows})
    rounds = max(row["round"] for row in rows) + 1
    by_round, curves = [[] for _ in range(rounds)], {node: [None] * rounds for node in nodes}
    for row in rows:
        by_round[row["round"]].append(row["reward"])
        curves[row["node_id"]][row["round"]] = row["reward"]
    completions, spent = [0] * rounds, 0
    for row in rows:
        completions[row["round"]] += row.get("completions", 0)
    for t in range(rounds):
        spent += completions[t]
        completions[t] = spent / len(nodes)
    mean = [sum(r) / len(r) if r else None for r in by_round]
    curve = smooth(mean, window_of(rounds))
    reached = next((t for t, r in enumerate(curve) if r is not None and r >= threshold), None)
    held_out = [row["held_out"] for row in rows if "held_out" in row and row["round"] >= 0.9 * rounds]
    key = {short: config.get(name) for name, short in SETTINGS.items()}
    key["filter"] = bool(key["filter"]) if key["J"] else None  # without externals there is nothing to filter
    return {
        "experiment": store.base.name, "seed": config.get("SEED"), "key": {**key, "nodes": len(nodes), "rounds": rounds},
        "cumulative": sum(row["reward"] for row in rows), "per_node": sum(row["reward"] for row in rows) / len(nodes),
        "mean_reward": sum(row["reward"] for row in rows) / len(rows), "peak": max(row["reward"] for row in rows),
        "final": curve[-1], "rounds_to_threshold": reached,
        "completions_to_threshold": None if reached is None else completions[reached],
        "completions_per_node": completions[-1], "held_out": sum(held_out) / len(held_out) if held_out else None,
        "useful_groups": sum(r.get("local_groups", 0) + r.get("external_groups", 0) - r.get("flat_groups", 0) for r in rows) / len(rows),
        "mean": mean, "curves": curves, "completions": completions,
    }  # fmt: skip


def window_of(rounds: int) -> int:
    return 100 if rounds >= 1000 else max(1, rounds // 10)


def smooth(values: list, window: int) -> list:
    """Mean over the last `window` values, None where there are none. smooth([0, 1, 1], 2) -> [0, 0.5, 1]."""
    result = []
    for i in range(len(values)):
        recent = [v for v in values[max(0, i + 1 - window) : i + 1] if v is not None]
        result.append(sum(recent) / len(recent) if recent else None)
    return result


def permutation_p(a: list[float], b: list[float], limit: int = 20000) -> float | None:
    """Two-sided p-value of mean(a) != mean(b): the share of relabelings at least as far apart. Exact where feasible.

    None where even the most extreme outcome could not get below 0.05: too few seeds to say anything.
    """
    both, n = [*a, *b], len(a)
    total = math.comb(len(both), n)
    if n == 0 or not b or 2 / total > 0.05:
        return None
    observed = abs(sum(a) / n - sum(b) / len(b))
    rng = random.Random(0)
    exact = total <= limit
    splits = itertools.combinations(range(len(both)), n) if exact else (rng.sample(range(len(both)), n) for _ in range(limit))
    hits = count = 0
    for chosen in splits:
        left = sum(both[i] for i in chosen)
        hits += abs(left / n - (sum(both) - left) / len(b)) >= observed - 1e-12
        count += 1
    return hits / count if exact else (hits + 1) / (count + 1)


def bootstrap_improvement(a: list[float], b: list[float], resamples: int = 10000) -> tuple[float, float] | None:
    """95% interval of mean(a) / mean(b) - 1 by resampling the seeds; None with fewer than three of either."""
    if min(len(a), len(b)) < 3 or not sum(b):
        return None
    rng = random.Random(0)
    ratios = sorted(
        sum(rng.choices(a, k=len(a))) / len(a) / max(1e-9, sum(rng.choices(b, k=len(b))) / len(b)) - 1 for _ in range(resamples)
    )
    return ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples)]


def label_of(key: dict, shown=()) -> str:
    """4/4, 8/0 x4 (oversampled), 4/4 unfiltered; with the settings in `shown` behind."""
    text = f"{key['I']}/{key['J']}" + (f" x{key['k']}" if key["k"] and key["k"] > 1 else "")
    text += " unfiltered" if key["filter"] is False else ""
    return " ".join([text, *(f"{name}={key[name]}" for name in shown)])


def compare(summaries: list[dict]) -> list[dict]:
    """Group summaries by everything but the seed and compare each group with its baseline: the same settings with J = 0."""
    groups = {}
    for summary in summaries:
        groups.setdefault(json.dumps(summary["key"], sort_keys=True), []).append(summary)
    keys = [members[0]["key"] for members in groups.values()]
    shown = [n for n in ("model", "lr", "tags", "G", "nodes", "rounds", "tasks") if len({str(k[n]) for k in keys}) > 1]
    rows = []
    for members in groups.values():
        key = members[0]["key"]
        same = [n for n in key if n not in ("I", "J", "filter", "k")]
        baseline = [
            s for s in summaries
            if s["key"]["J"] == 0 and s["key"]["k"] == 1 and s["key"]["I"] == key["I"] + key["J"] and all(s["key"][n] == key[n] for n in same)
        ]  # fmt: skip
        ours, base = [m["per_node"] for m in members], [s["per_node"] for s in baseline]
        is_baseline = key["J"] == 0 and key["k"] == 1
        row = {"label": label_of(key, shown), **key, "runs": len(members), "seeds": sorted(str(m["seed"]) for m in members)}
        for name in ("cumulative", "per_node", "mean_reward", "peak", "final", "rounds_to_threshold", "completions_to_threshold",
                     "completions_per_node", "held_out", "useful_groups"):  # fmt: skip
            values = [m[name] for m in members if m[name] is not None]
            row[name] = sum(values) / len(values) if values else None
            if name.endswith("threshold") and len(values) < len(members):
                row[name] = None  # not all runs reached it: a mean over those that did would flatter
        row["spread"] = statistics.stdev(ours) if len(ours) > 1 else None
        row["improvement"] = sum(ours) / len(ours) / (sum(base) / len(base)) - 1 if base and sum(base) and not is_baseline else None
        row["interval"] = bootstrap_improvement(ours, base) if not is_baseline else None
        row["p_value"] = permutation_p(ours, base) if not is_baseline else None
        row["members"] = members
        rows.append(row)
    return sorted(rows, key=lambda r: (str([r[n] for n in shown]), -r["per_node"]))


def report_text(rows: list[dict], threshold: float) -> str:
    """The comparison as a Markdown table; what there are too few seeds for is said, not left out."""

    def show(value, form, missing="-"):
        return missing if value is None else format(value, form)

    lines = [
        "| I/J | runs | cumulative per node | improvement (95% interval) | p | final reward | held-out | "
        f"rounds to {threshold:g} | completions to {threshold:g} | completions per node | useful groups |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        interval = f" ({row['interval'][0]:+.0%} to {row['interval'][1]:+.0%})" if row["interval"] else ""
        tested = "baseline" if row["J"] == 0 and row["k"] == 1 else show(row["p_value"], ".3f", "too few seeds" if row["improvement"] is not None else "no baseline")
        lines.append(
            f"| {row['label']} | {row['runs']} | {row['per_node']:.2f}" + (f" ± {row['spread']:.2f}" if row["spread"] is not None else "")
            + f" | {show(row['improvement'], '+.0%')}{interval} | {tested} | {show(row['final'], '.2f')} | {show(row['held_out'], '.2f')}"
            f" | {show(row['rounds_to_threshold'], '.0f')} | {show(row['completions_to_threshold'], '.0f')}"
            f" | {row['completions_per_node']:.0f} | {row['useful_groups']:.1f} |"
        )  # fmt: skip
    paper = ", ".join(f"{name} {total} {gain}".strip() for name, (total, gain) in PAPER.items())
    lines += ["", f"The paper's own (8 x Qwen2.5-0.5B, 2000 rounds, one run each, summed over nodes): {paper}."]
    return "\n".join(lines)


def write_report(rows: list[dict], folder, threshold: float = 0.3) -> list[Path]:
    """report.md, report.csv, report.json and, with matplotlib, report.png; returns what was written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = report_text(rows, threshold)
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    plain = [{k: v for k, v in row.items() if k != "members"} for row in rows]
    with open(folder / "report.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(plain[0]))
        writer.writeheader()
        writer.writerows(plain)
    (folder / "report.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    written = [folder / name for name in ("report.md", "report.csv", "report.json")]
    if plot_report(rows, folder / "report.png", threshold):
        written.append(folder / "report.png")
    return written


def pyplot():
    """matplotlib, or None with a line that says how to get it."""
    try:
        import matplotlib

        if "ipykernel" not in sys.modules:
            matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        return plt
    except ImportError:
        print("no picture: pip install matplotlib")
        return None


def plot_report(rows: list[dict], path, threshold: float) -> bool:
    """Three panels: every agent's raw curve; smoothed mean over seeds with min/max band; reward against completions."""
    plt = pyplot()
    if plt is None:
        return False
    figure, (raw, band, cost) = plt.subplots(1, 3, figsize=(18, 5.5), constrained_layout=True)
    for i, row in enumerate(rows):
        color, members = f"C{i % 10}", row["members"]
        for member in members[:1]:
            for curve in member["curves"].values():
                raw.plot([v if v is not None else float("nan") for v in curve], color=color, alpha=0.25, linewidth=0.7)
        curves = [smooth(m["mean"], window_of(len(m["mean"]))) for m in members]
        length = min(map(len, curves))
        columns = [[c[t] for c in curves if c[t] is not None] or [float("nan")] for t in range(length)]
        mean = [sum(c) / len(c) for c in columns]
        band.plot(mean, color=color, label=f"{row['label']} ({row['runs']})")
        band.fill_between(range(length), [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15)
        cost.plot(members[0]["completions"][:length], mean, color=color, label=row["label"])
    raw.set(title="every agent, one seed each", xlabel="round", ylabel="reward")
    band.set(title="mean over nodes and seeds, min/max over seeds", xlabel="round", ylabel="reward (smoothed)")
    cost.set(title="what it costs", xlabel="completions generated per node", ylabel="reward (smoothed)")
    cost.axhline(threshold, color="gray", linewidth=0.5)
    band.legend(fontsize=8)
    for axis in (raw, band, cost):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


# -------- Watching one experiment -----------------------------------------------------------------------------------


def sparkline(values: list[float], width: int = 20) -> str:
    """The last `width` values in [0, 1] as bars. sparkline([0, 0.5, 1]) -> "▁▅█"."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * max(0.0, v)))] for v in values[-width:])


def dashboard(store, live: Liveness, rows: list[dict], now: float) -> str:
    """The state of an experiment as text: clock, nodes, latest rollout, storage, and what looks wrong."""
    live.refresh()
    clock = store.current_round()
    lines = [f"{store.base.name}: round {clock}, {len(rows)} rewards, {time.strftime('%H:%M:%S', time.localtime(now))}", ""]
    lines.append(f"{'node':20} {'role':12} {'model':16} {'state':8} {'round':>6} {'reward':>7} {'total':>8}  trend")
    for node in sorted(live.sessions):
        mine = [row for row in rows if row["node_id"] == node]
        about, beat = live.about(node), live.heartbeats.get(node, {})
        for row in mine[-1:]:
            live.note(node, "reward", (row["round"], row["stage"]))
        state = beat.get("state", "left") if live.has_left(node) else "live" if live.is_live(node) else "dead"
        reward = f"{mine[-1]['reward']:7.2f} {sum(r['reward'] for r in mine):8.2f}  {sparkline([r['reward'] for r in mine])}" if mine else ""
        round_ = mine[-1]["round"] if mine else beat.get("round", "-")
        lines.append(f"{node:20.20} {str(about.get('role')):12.12} {str(about.get('model') or '-'):16.16} {state:8} {round_!s:>6} {reward}")
    counts = [f"{r}: {len(store.publishers(r, 0))}" for r in range(max(0, clock - 4), clock + 1)]
    lines += ["", f"rollout files in rounds  {'  '.join(counts)}", *latest_rollout(store, clock), *latest_winners(store, clock)]
    size = sum(f.stat().st_size for f in store.base.rglob("*") if f.is_file())
    free = shutil.disk_usage(store.base).free
    lines += ["", f"storage: {size / 1e6:.1f} MB here, {free / 1e9:.1f} GB free"]
    return "\n".join(lines + [f"! {warning}" for warning in health_warnings(store, live, rows, clock, free)])


def latest_rollout(store, clock: int) -> list[str]:
    """One question of the newest rollout file with two of its completions. Rewards are the publisher's own claim."""
    for round_ in range(clock, max(-1, clock - 5), -1):
        for node in store.publishers(round_, 0):
            groups, _, _ = store.fetch(round_, 0, node)
            if groups:
                group = groups[0]
                lines = [f"latest rollout: {node}, round {round_}, {group['task']}", f"  {group['prompt']!r:.110}"]
                return lines + [f"  -> {c['response']!r:.100}" + ("" if c["finished"] else " (cut)") for c in group["completions"][:2]]
    return []


def latest_winners(store, clock: int) -> list[str]:
    for round_ in range(clock, max(-1, clock - 3), -1):
        votes = []
        for name in store.names(f"winners/round_{round_:06d}"):
            try:
                votes.append(str((store.read(f"winners/round_{round_:06d}/{name}") or {}).get("winner")))
            except ValueError:  # BadFile
                continue
        if votes:
            return [f"winners of round {round_}: " + ", ".join(f"{n} ({votes.count(n)})" for n in sorted(set(votes)))]
    return []


def health_warnings(store, live: Liveness, rows: list[dict], clock: int, free: float) -> list[str]:
    """What looks wrong, each with what to do about it."""
    warnings, workers = [], live.live_workers()
    everybody = [n for n in live.sessions if live.about(n).get("role") == "worker"]
    finished = bool(everybody) and all(live.has_left(n) for n in everybody)
    if clock < 0:
        warnings.append("no round is open: start a worker or the coordinator, or check EXPERIMENT_NAME")
    if not workers and not finished:
        warnings.append("no live worker: start one with its old NODE_ID to resume it")
    if workers and not any(store.publishers(r, 0) for r in range(max(0, clock - 2), clock + 1)):
        warnings.append("no rollouts in the last three rounds: is the folder of all nodes the same and synced?")
    idle = min((live.silence(n) for n in workers), default=0.0)
    if idle > live.stale_after / 2:
        warnings.append(f"nothing new for {idle:.0f} s: is the drive still mounted?")
    for node in workers:
        started = [name for name in store.names("peers") if name.startswith(f"{node}.") and name[len(node) + 1 :][:13].isdigit()]
        if len(started) > 5:
            warnings.append(f"{node} was started {len(started)} times: do two machines share this NODE_ID?")
    recent = [row for row in rows if row["round"] > clock - 10]
    if recent and all(row.get("flat_groups") == row.get("local_groups", 0) + row.get("external_groups", 0) for row in recent):
        warnings.append("no informative group in ten rounds: see WARM_START_STEPS, NUM_SHOTS, MAX_NEW_TOKENS, TASKS")
    if free < 1e9:
        warnings.append("less than 1 GB free: lower CHECKPOINT_KEEP, set ROLLOUT_CLEANUP_ENABLED=True")
    return warnings


def plot_experiment(store, path, rows: list[dict]) -> bool:
    """Five charts of one experiment as a PNG; shown inline in a notebook. path=None only shows."""
    plt = pyplot()
    if plt is None or not rows:
        return False
    nodes = sorted({row["node_id"] for row in rows})
    by_round = {}
    for row in rows:
        by_round.setdefault(row["round"], []).append(row["reward"])
    rounds = sorted(by_round)
    mean = [sum(by_round[t]) / len(by_round[t]) for t in rounds]
    figure, axes = plt.subplots(2, 3, figsize=(16, 8), constrained_layout=True)
    (spread, trend, total), (active, histogram, empty) = axes
    spread.plot(rounds, mean)
    spread.fill_between(rounds, [min(by_round[t]) for t in rounds], [max(by_round[t]) for t in rounds], alpha=0.2)
    for node in nodes:
        mine = [row for row in rows if row["node_id"] == node]
        trend.plot([r["round"] for r in mine], smooth([r["reward"] for r in mine], window_of(len(rounds))), label=node)
    total.bar(nodes, [sum(r["reward"] for r in rows if r["node_id"] == node) for node in nodes])
    total.tick_params(axis="x", rotation=60)
    active.step(rounds, [len(by_round[t]) for t in rounds])
    histogram.hist([row["reward"] for row in rows], bins=20)
    empty.axis("off")
    titles = ("reward per round, min to max", "smoothed reward per node", "cumulative reward", "active nodes", "rewards, histogram")
    for axis, title in zip((spread, trend, total, active, histogram), titles, strict=True):
        axis.set_title(title)
    if len(nodes) <= 10:
        trend.legend(fontsize=8)
    if path is not None:
        figure.savefig(path, dpi=100)
    if "ipykernel" in sys.modules:
        plt.show()
    plt.close(figure)
    return True


def monitor(store, stale_after: float, chart=None, every: float = 30.0, once: bool = False, should_stop=lambda: False) -> None:
    """Print the dashboard every 30 seconds, on a terminal in place; once if asked. chart: a path for the five charts."""
    live, terminal = Liveness(store, stale_after), sys.stdout.isatty()
    while True:
        rows = reward_rows(store)
        print(("\033[2J\033[H" if terminal else "") + dashboard(store, live, rows, time.time()), flush=True)
        if chart is not None or "ipykernel" in sys.modules:
            plot_experiment(store, chart, rows)
        deadline = time.monotonic() + every
        while time.monotonic() < deadline and not once and not should_stop():
            time.sleep(0.2)
        if once or should_stop():
            return
