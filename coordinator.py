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
from collections import Counter
from pathlib import Path


class Liveness:
    """Who is live: a node of which anything new was seen within `stale_after` seconds.

    Judged by when *this* reader first saw it, on its own monotonic clock, so that the nodes' clocks need not agree.
    Only at the very first look does a timestamp count: what says it is an hour old is not taken for fresh.
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
        """Something of this node was seen; it counts as a sign of life, and True is returned, if it is new of its kind.

        age: seconds since it was written, by the writer's clock; believed only of the first of its kind.
        """
        last = self._evidence.get((node_id, kind))
        is_older = isinstance(last, int) and isinstance(value, int) and value < last  # old rollouts, read again
        is_new = value != last and not is_older
        if is_new:
            written = time.monotonic() - (0.0 if (node_id, kind) in self._evidence else age)
            self._evidence[node_id, kind] = value
            self._seen[node_id] = max(self._seen.get(node_id, -1e9), written)
        return is_new

    def refresh(self, node_ids=None) -> None:
        """Look at the registrations (one listing) and at the heartbeats of `node_ids` (None: everybody)."""
        self.sessions = self.store.sessions()
        for node in self.sessions if node_ids is None else [n for n in node_ids if n in self.sessions]:
            about = self.abouts[node] = self.store.registration(node, self.sessions[node]) or {}
            self.note(node, "session", self.sessions[node], age_of(about.get("registered_at")))
            if time.monotonic() < self._look_again.get(node, 0.0):
                continue
            beat = self.store.read_heartbeat(node)
            if beat is not None:
                self.heartbeats[node] = beat
                if self.note(node, "heartbeat", beat.get("time"), age_of(beat.get("time"))):
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

    def workers(self) -> list[str]:
        return sorted(n for n in self.sessions if self.about(n).get("role") == "worker")

    def live_workers(self) -> list[str]:
        return [n for n in self.workers() if self.is_live(n)]


def age_of(timestamp) -> float:
    """Seconds since a wall-clock timestamp somebody wrote; 0 if it makes no sense or lies in the future."""
    now = time.time()
    return now - timestamp if isinstance(timestamp, int | float) and 0 < timestamp < now else 0.0


def process_identity() -> dict:
    """Host, boot, pid and start time of this process: by these others on the same host see that it has died."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot_id": _boot_id(), "pid": pid, "pid_start": _pid_start(pid)}


def is_known_dead(about: dict) -> bool:
    """Whether a process that registered with `process_identity` ran on this host and is gone. False means: unknown."""
    here, pid = (socket.gethostname(), _boot_id()), about.get("pid")
    if None in here or (about.get("host"), about.get("boot_id")) != here:
        return False
    return isinstance(pid, int) and 0 < pid < 2**31 and _pid_start(pid) != about.get("pid_start")


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

    def sleep(self) -> None:
        cost = time.monotonic() - self._start
        time.sleep(min(5.0, max(0.02, 10 * cost)))
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
    """Whether the clock moves on. time: the interval is over; completion: all live workers submitted; hybrid: either.

    It never runs on for nobody: without a live worker and without any reward of this round, it waits.
    """
    in_time = elapsed >= interval and bool(live or submitted)
    complete = bool(submitted) and set(live) <= set(submitted)
    return {"time": in_time, "completion": complete, "hybrid": in_time or complete}[strategy]


def coordinate(
    store, session, seat, *, max_rounds, last_stage, strategy, interval, liveness, say, should_stop, each_round=None
) -> str:
    """Run the clock until MAX_ROUNDS is reached and every worker is done or stale. Returns how it ended, in a word.

    session: this coordinator's own; a newer one on the same seat ends this one. each_round: called with each round it opens.
    """

    def beat(state):
        store.heartbeat(seat, {"session": session, "round": round_, "state": state})

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
                beat("running")
                next_beat = now + min(15.0, liveness.stale_after / 4)
            if (seen := store.current_round()) > round_:
                round_, opened = seen, now
            submitted = store.rewarded(round_, last_stage)
            for kind, nodes in (("reward", submitted), ("rollouts", store.publishers(round_, 0))):
                for node in nodes:
                    liveness.note(node, kind, round_)
            live = liveness.live_workers()
            late = sorted(set(live) - set(submitted))
            hold = hold and round_ == 0 and not submitted
            if hold:
                opened = now
            elif round_ >= max_rounds - 1:
                if not late:
                    beat("done")
                    say(f"coordinator: round {round_} was the last; finished" + ("" if live else ", no worker is live"))
                    return "finished"
            elif is_round_over(strategy, now - opened, interval, live, submitted):
                behind = f", late: {' '.join(late)}" if late else ""
                say(f"coordinator: round {round_} -> {round_ + 1}: {len(submitted)} submitted{behind}")
                store.open_round(round_ + 1, seat)  # may fail: only an open round is the current one
                round_, opened = round_ + 1, time.monotonic()
                if each_round is not None:
                    each_round(round_)
            if down:
                say("coordinator: the shared folder is back")
                down = False
        except OSError as error:
            if not down:
                say(f"coordinator: the shared folder fails ({error}); trying on")
            down = True
        pace.sleep()
    with contextlib.suppress(OSError):
        beat("stopped")
    return "stopped"


# -------- What the folder says --------------------------------------------------------------------------------


def reward_rows(store) -> list[dict]:
    """Every published reward, one row per node, round and stage: ready for pandas.DataFrame. Sorted by round."""
    return [
        {**data, "experiment": store.base.name, "my_reward": data["reward"]}
        for round_ in store.rounds("rewards")
        for stage in store.stages("rewards", round_)
        for node in store.rewarded(round_, stage)
        if (data := store.reward(round_, stage, node))
    ]


def rows_by(column: str, rows: list[dict]) -> dict:
    """{value of this column: its rows}, the values in order."""
    groups = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return dict(sorted(groups.items()))


def experiment_status(store, stale_after: float = 300.0) -> dict:
    """The state of one experiment, as a reader sees it now. Changes nothing."""
    rows, live = reward_rows(store), Liveness(store, stale_after)
    live.refresh()
    times = [row["timestamp"] for row in rows]
    saved = [path for r in store.rounds("checkpoints") if store.names(path := f"checkpoints/round_{r:06d}")]
    return {
        "experiment": store.base.name,
        "current_round": store.current_round(),
        "current_stage": rows[-1]["stage"] if rows else 0,
        "num_active_peers": len(live.live_workers()),
        "peer_ids": live.workers(),
        "last_updated": max(times, default=None),
        "cumulative_rewards": {n: sum(row["reward"] for row in mine) for n, mine in rows_by("node_id", rows).items()},
        "latest_checkpoint": str(store.base / saved[-1]) if saved else None,
        "duration_seconds": max(times) - min(times) if times else 0.0,
    }


def validate_experiment(store, max_rounds: int, nodes: int) -> list[str]:
    """What a finished run lacks, as sentences; an empty list means that everything is there."""
    try:
        config = store.read("config.json")
        if config is None:
            return [f"{store.base}: no such experiment (no config.json)"]
        stages = config.get("MAX_STAGES", 1)
        if not isinstance(stages, int) or not 1 <= stages <= 100:
            return [f"config.json: MAX_STAGES is {plain(stages)}"]
        clock = store.current_round()
    except Exception as error:  # StoreError or BadFile: a reader reports it
        return [f"{store.base}: {error}"]
    rows, last = reward_rows(store), max_rounds - 1
    by_node, by_round = rows_by("node_id", rows), rows_by("round", rows)
    checks = [  # (whether it is there, what to say if not)
        (clock >= last, f"the clock stands at round {clock}, expected {last}"),
        (len(by_node) >= nodes, f"{len(by_node)} nodes submitted rewards, expected {nodes}"),
    ]
    for node, mine in by_node.items():
        model = store.names(f"models/{node}")
        checks += [
            (any(row["round"] == last for row in mine), f"{node}: no reward for the last round {last}"),
            ("metrics.jsonl" in store.names(f"logs/{node}"), f"{node}: no logs/{node}/metrics.jsonl"),
            (store.checkpoints(node), f"{node}: no checkpoint"),
            *((name in model, f"{node}: no models/{node}/{name}") for name in ("config.json", "tokenizer.json")),
            (any(name.endswith(".safetensors") for name in model), f"{node}: no weights in models/{node}"),
        ]
        for part in ("completions", "local_groups"):
            checks += [(row.get(part), f"{node} round {row['round']}: reward without {part}") for row in mine]
    lost = {"rewards": [t for t in range(max_rounds) if t not in by_round]}
    if not config.get("ROLLOUT_CLEANUP_ENABLED"):
        lost["rollouts"] = [t for t in range(max_rounds) if not any(store.publishers(t, s) for s in range(stages))]
    for what, rounds in lost.items():
        if rounds:
            others = f", nor in {len(rounds) - 1} others" if len(rounds) > 1 else ""
            checks.append((False, f"round {rounds[0]}: no {what}{others}"))
    return [problem for there, problem in checks if not there]


# -------- Comparing experiments ------------------------------------------------------------------------------------

PAPER = (
    "The paper's own (table 1: 8 x Qwen2.5-0.5B, 2000 rounds, one run each, summed over nodes): "
    "8/0 561.79, 6/2 854.43 +52%, 4/4 1093.31 +94%, 2/6 945.87 +68%."
)
SETTINGS = {  # what makes two runs repetitions of one another, and its short name in a label; all but the seed
    "NUM_TRAIN_SAMPLES": "I", "NUM_TRANSPLANT_TREES": "J", "EXTERNAL_FILTER": "filter", "LOCAL_OVERSAMPLE": "k",
    "MODEL_NAME": "model", "LEARNING_RATE": "lr", "ANSWER_TAG_SHARE": "tags", "NUM_GENERATIONS": "G", "TASKS": "tasks",
    "LOSS_TYPE": "loss", "REWARD": "reward", "TEMPERATURE": "temperature", "NUM_ITERATIONS": "iterations",
    "CLIP_LOW": "clip_low", "CLIP_HIGH": "clip_high", "MAX_NEW_TOKENS": "max_tokens", "WARM_START_STEPS": "warm_start",
    "NUM_SHOTS": "shots", "MAX_STAGES": "stages", "ROLLOUT_MAX_AGE": "max_age",
}  # fmt: skip


def average(values) -> float | None:
    """Mean of the values that are there, None where there are none. average([1, None, 2]) -> 1.5."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def smooth(values: list) -> list:
    """Running average over the last tenth of the run, at most 100 values. Of 20: [0, 1, 1, …] -> [0, 0.5, 1, …]."""
    window = max(1, min(100, len(values) // 10))
    return [average(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def summarize(store, threshold: float = 0.3) -> dict | None:
    """One finished or running experiment as figures, from config.json and rewards/ alone; None without rewards.

    ValueError if config.json cannot be used.
    """
    config, rows = read_settings(store), reward_rows(store)
    if not rows:
        return None
    found, rounds = rows_by("round", rows), rows[-1]["round"] + 1
    by_round = [found.get(t, []) for t in range(rounds)]
    curves = {}  # node -> its reward in every round, None where it has none
    for node, mine in rows_by("node_id", rows).items():
        rewards = {row["round"]: row["reward"] for row in mine}
        curves[node] = [rewards.get(t) for t in range(rounds)]
    spent = itertools.accumulate(sum(row.get("completions", 0) for row in now) for now in by_round)
    completions = [total / len(curves) for total in spent]
    mean = [average(row["reward"] for row in now) for now in by_round]
    curve = smooth(mean)
    reached = next((t for t, r in enumerate(curve) if r is not None and r >= threshold), None)
    total = sum(row["reward"] for row in rows)
    key = {short: config.get(name) for name, short in SETTINGS.items()} | {"nodes": len(curves), "rounds": rounds}
    key["filter"] = bool(key["filter"]) if key["J"] else None  # without externals there is nothing to filter
    return {
        "experiment": store.base.name, "seed": config.get("SEED"), "key": key,
        "cumulative": total, "per_node": total / len(curves), "mean_reward": total / len(rows),
        "peak": max(row["reward"] for row in rows), "final": curve[-1],
        "held_out": average(row.get("held_out") for row in rows if row["round"] >= 0.9 * rounds),
        "rounds_to_threshold": reached, "completions_to_threshold": None if reached is None else completions[reached],
        "completions_per_node": completions[-1], "useful_groups": average(map(useful_groups, rows)),
        "mean": mean, "curves": curves, "completions": completions,
    }  # fmt: skip


def useful_groups(row: dict) -> int:
    """How many of the groups that a node trained on in one round had a gradient."""
    return row.get("local_groups", 0) + row.get("external_groups", 0) - row.get("flat_groups", 0)


def read_settings(store) -> dict:
    """config.json; ValueError if what is computed with is not of the kind that this program writes there."""
    config = store.read("config.json") or {}
    for name, short in SETTINGS.items():
        value = config.get(name)
        if not isinstance(value, int if short in ("I", "J", "k") else str | int | float | None):
            raise ValueError(f"config.json: {name} is {plain(value)}")
    return config


def plain(value, width: int = 100) -> str:
    """A stranger's value for one line of a terminal: control characters as ?, cut. plain("a\x1b[2Jb", 4) -> "a?[2"."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:width])


def permutation_p(a: list[float], b: list[float], limit: int = 20000) -> float | None:
    """Two-sided p-value of mean(a) != mean(b): the share of relabelings at least as far apart. Exact where feasible.

    None where even the most extreme outcome could not get below 0.05: too few seeds to say anything.
    """
    both, n = [*a, *b], len(a)
    total = math.comb(len(both), n)
    if n == 0 or not b or 2 / total > 0.05:
        return None
    observed = abs(sum(a) / n - sum(b) / len(b))
    rng, exact = random.Random(0), total <= limit
    drawn = (rng.sample(both, n) for _ in range(limit))
    sums = [sum(chosen) for chosen in (itertools.combinations(both, n) if exact else drawn)]
    hits = sum(abs(left / n - (sum(both) - left) / len(b)) >= observed - 1e-12 for left in sums)
    return hits / len(sums) if exact else (hits + 1) / (len(sums) + 1)


def bootstrap_improvement(a: list[float], b: list[float], resamples: int = 10000) -> tuple[float, float] | None:
    """95% interval of mean(a) / mean(b) - 1 by resampling the seeds; None with fewer than three of either."""
    if min(len(a), len(b)) < 3 or not sum(b):
        return None
    rng = random.Random(0)

    def resampled(values):
        return sum(rng.choices(values, k=len(values))) / len(values)

    ratios = sorted(resampled(a) / max(1e-9, resampled(b)) - 1 for _ in range(resamples))
    return ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples)]


def is_baseline(key: dict) -> bool:
    """Whether these settings are a lone node's: nothing from peers, and no oversampling either."""
    return key["J"] == 0 and key["k"] == 1


def label_of(key: dict, shown=()) -> str:
    """4/4, 8/0 x4 (oversampled), 4/4 unfiltered; with the settings in `shown` behind."""
    text = f"{key['I']}/{key['J']}" + (f" x{key['k']}" if key["k"] and key["k"] > 1 else "")
    text += " unfiltered" if key["filter"] is False else ""
    return " ".join([text, *(f"{name}={plain(key[name])}" for name in shown)])


AVERAGED = ("cumulative", "per_node", "mean_reward", "peak", "final", "rounds_to_threshold", "completions_to_threshold",
            "completions_per_node", "held_out", "useful_groups")  # fmt: skip


def compare(summaries: list[dict]) -> list[dict]:
    """Group summaries by everything but the seed; compare each group with its baseline, the same settings at J = 0."""
    groups = {}
    for summary in summaries:
        groups.setdefault(json.dumps(summary["key"], sort_keys=True), []).append(summary)
    keys = [members[0]["key"] for members in groups.values()]
    names = [name for name in (keys[0] if keys else ()) if name not in ("I", "J", "k", "filter")]
    shown = [name for name in names if len({str(key[name]) for key in keys}) > 1]
    rows = []
    for key, members in zip(keys, groups.values(), strict=True):
        lone = [s for s in summaries if is_baseline(s["key"]) and not is_baseline(key)]
        lone = [s for s in lone if s["key"] == {**key, "I": key["I"] + key["J"], "J": 0, "k": 1, "filter": None}]
        ours, base = [m["per_node"] for m in members], [s["per_node"] for s in lone]
        row = {"label": label_of(key, shown), **key, "runs": len(members)}
        row["seeds"] = sorted(str(m["seed"]) for m in members)
        row |= {name: average(m[name] for m in members) for name in AVERAGED}
        if any(m["rounds_to_threshold"] is None for m in members):  # a mean over those that did would flatter
            row["rounds_to_threshold"] = row["completions_to_threshold"] = None
        row["spread"] = statistics.stdev(ours) if len(ours) > 1 else None
        row["improvement"] = average(ours) / average(base) - 1 if sum(base) else None
        row["interval"] = bootstrap_improvement(ours, base)
        row["p_value"] = permutation_p(ours, base)
        rows.append({**row, "members": members})
    return sorted(rows, key=lambda r: (str([r[n] for n in shown]), -r["per_node"]))


def report_text(rows: list[dict], threshold: float) -> str:
    """The comparison as a Markdown table; what there are too few seeds for is said, not left out."""

    def show(value, form, missing="-"):
        return missing if value is None else form.format(value)

    table = []
    for row in rows:
        untested = "no baseline" if row["improvement"] is None else "too few seeds"
        gain = show(row["improvement"], "{:+.0%}") + show(row["interval"], " ({0[0]:+.0%} to {0[1]:+.0%})", "")
        table.append({
            "I/J": row["label"],
            "runs": str(row["runs"]),
            "cumulative per node": f"{row['per_node']:.2f}" + show(row["spread"], " ± {:.2f}", ""),
            "improvement (95% interval)": gain,
            "p": "baseline" if is_baseline(row) else show(row["p_value"], "{:.3f}", untested),
            "final reward": show(row["final"], "{:.2f}"),
            "held-out": show(row["held_out"], "{:.2f}"),
            f"rounds to {threshold:g}": show(row["rounds_to_threshold"], "{:.0f}"),
            f"completions to {threshold:g}": show(row["completions_to_threshold"], "{:.0f}"),
            "completions per node": f"{row['completions_per_node']:.0f}",
            "useful groups": f"{row['useful_groups']:.1f}",
        })  # fmt: skip
    cells = [table[0].keys(), ["---" for _ in table[0]], *(line.values() for line in table)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in cells), "", PAPER])


def write_report(rows: list[dict], folder, threshold: float = 0.3) -> list[Path]:
    """report.md, report.csv, report.json and, with matplotlib, report.png; returns what was written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text, table, full, picture = (folder / f"report.{kind}" for kind in ("md", "csv", "json", "png"))
    text.write_text(report_text(rows, threshold) + "\n", encoding="utf-8")
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[name for name in rows[0] if name != "members"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    full.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return [text, table, full] + [picture] * plot_report(rows, picture, threshold)


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; that the package has been imported is not enough."""
    ipython = sys.modules.get("IPython")
    return "ipykernel" in sys.modules and ipython is not None and ipython.get_ipython() is not None


def draw(path, rows: int, columns: int, size: tuple[float, float], paint) -> bool:
    """Make a picture with paint(its axes) and save it as a PNG unless path is None; a notebook also shows it.

    False, with a line that says how to get it, where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install matplotlib")
        return False
    if not in_notebook():
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, constrained_layout=True)
    paint(*axes.flat)
    if path is not None:
        figure.savefig(path, dpi=110)
    if in_notebook():
        plt.show()
    plt.close(figure)
    return True


def plot_report(rows: list[dict], path, threshold: float) -> bool:
    """Three panels: every agent's raw curve; smoothed mean over seeds with min/max band; reward against completions."""

    def paint(raw, band, cost):
        for i, row in enumerate(rows):
            color, members = f"C{i % 10}", row["members"]
            for curve in members[0]["curves"].values():
                raw.plot(curve, color=color, alpha=0.25, linewidth=0.7)
            curves = zip(*(smooth(m["mean"]) for m in members), strict=False)
            seeds = [[r for r in now if r is not None] or [math.nan] for now in curves]  # of every round
            low, mean, high = [min(now) for now in seeds], [average(now) for now in seeds], [max(now) for now in seeds]
            band.plot(mean, color=color, label=f"{row['label']} ({row['runs']})")
            band.fill_between(range(len(mean)), low, high, color=color, alpha=0.15)
            cost.plot(members[0]["completions"][: len(mean)], mean, color=color, label=row["label"])
        raw.set(title="every agent, one seed each", xlabel="round", ylabel="reward")
        band.set(title="mean over nodes and seeds, min/max over seeds", xlabel="round", ylabel="reward (smoothed)")
        cost.set(title="what it costs", xlabel="completions generated per node", ylabel="reward (smoothed)")
        cost.axhline(threshold, color="gray", linewidth=0.5)
        band.legend(fontsize=8)
        for axis in (raw, band, cost):
            axis.grid(alpha=0.3)

    return draw(path, 1, 3, (18, 5.5), paint)


# -------- Watching one experiment -----------------------------------------------------------------------------------


def sparkline(values: list[float], width: int = 20) -> str:
    """The last `width` values in [0, 1] as bars. sparkline([0, 0.5, 1]) -> "▁▅█"."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * max(0.0, v)))] for v in values[-width:])


def dashboard(store, live: Liveness, rows: list[dict]) -> str:
    """The state of an experiment as text: clock, nodes, latest rollout, storage, and what looks wrong."""
    live.refresh()
    clock, by_node = store.current_round(), rows_by("node_id", rows)
    rounds = [r for r in store.rounds("rollouts") if r <= clock][-5:]  # a stranger's later than the clock left out
    recent = {r: published(store, r) for r in rounds}  # two listings a round: made once for all that is said below
    counts = [f"{r}: {len(nodes)}" for r, nodes in recent.items()]
    size = sum(size_of(os.path.join(folder, name)) for folder, _, names in os.walk(store.base) for name in names)
    free = shutil.disk_usage(store.base).free
    return "\n".join([
        f"{store.base.name}: round {clock}, {len(rows)} rewards, {time.strftime('%H:%M:%S')}", "",
        f"{'node':20} {'role':12} {'model':16} {'state':8} {'round':>6} {'reward':>7} {'total':>8}  trend",
        *(node_line(live, node, by_node.get(node, [])) for node in sorted(live.sessions)), "",
        f"nodes with rollouts, by round  {'  '.join(counts)}",
        *latest_rollout(store, recent), *latest_winners(store, clock), "",
        f"storage: {size / 1e6:.1f} MB here, {free / 1e9:.1f} GB free",
        *(f"unusable files: {count} ({reason})" for reason, count in sorted(store.skipped.items())),
        *(f"! {warning}" for warning in health_warnings(store, live, rows, clock, recent, free)),
    ])  # fmt: skip


def node_line(live: Liveness, node: str, mine: list[dict]) -> str:
    """One node's line of the dashboard, from what it said of itself and its reward rows."""
    about, beat, rewards = live.about(node), live.heartbeats.get(node, {}), [row["reward"] for row in mine]
    for row in mine[-1:]:
        live.note(node, "reward", (row["round"], row["stage"]), age_of(row["timestamp"]))
    state = beat["state"] if live.has_left(node) else "live" if live.is_live(node) else "dead"
    role, model = plain(about.get("role"), 12), plain(about.get("model") or "-", 16)
    round_ = mine[-1]["round"] if mine else plain(beat.get("round", "-"), 6)
    figures = f"{rewards[-1]:7.2f} {sum(rewards):8.2f}  {sparkline(rewards)}" if mine else ""
    return f"{node:20.20} {role:12} {model:16} {state:8} {round_!s:>6} {figures}"


def size_of(path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # it has just been renamed or deleted
        return 0


def published(store, round_: int) -> dict[str, int]:
    """{node: last stage in which it published} of one round."""
    return {node: stage for stage in store.stages("rollouts", round_) for node in store.publishers(round_, stage)}


def latest_rollout(store, recent: dict) -> list[str]:
    """One question of the newest rollout file with three of its completions and what their writer says they earned.

    recent: {round: what `published` says of it}, oldest first.
    """
    for round_, nodes in reversed(recent.items()):
        for node, stage in nodes.items():
            for group in store.fetch(round_, stage, node)[0]:
                lines = [f"latest rollout: {node}, round {round_}, {plain(group['task'])}", f"  {group['prompt']!r:.110}"]
                best_first = sorted(group["completions"], key=lambda c: -(c["claimed"] or 0))
                for c in best_first[:2] + best_first[-1:]:
                    earned = "-" if c["claimed"] is None else f"{c['claimed']:.2f}"
                    lines.append(f"  {earned:>4}  {c['response']!r:.100}" + ("" if c["finished"] else " (cut)"))
                return lines
    return []


def latest_winners(store, clock: int) -> list[str]:
    """Who was found best in the newest round that has votes, and by how many nodes."""
    for round_ in range(clock, max(-1, clock - 3), -1):
        folder = f"winners/round_{round_:06d}"
        ballots = [store.read_matching(f"{folder}/{name}", round=round_) for name in store.names(folder)]
        votes = Counter(plain(ballot.get("winner"), 64) for ballot in ballots if ballot)
        if votes:
            return [f"winners of round {round_}: " + ", ".join(f"{node} ({n})" for node, n in sorted(votes.items()))]
    return []


def health_warnings(store, live: Liveness, rows: list[dict], clock: int, recent: dict, free: float) -> list[str]:
    """What looks wrong, each with what to do about it. recent: as in `latest_rollout`."""
    live_now, workers = live.live_workers(), live.workers()
    finished = bool(workers) and all(live.has_left(n) for n in workers)
    silent = not any(nodes for round_, nodes in recent.items() if round_ > clock - 3)
    idle = min((live.silence(n) for n in live_now), default=0.0)
    starts = Counter(name.rsplit(".", 2)[0] for name in store.names("peers"))
    useful = [useful_groups(row) for row in rows if row["round"] > clock - 10]
    many = "{} was started {} times: do two machines share this NODE_ID?"
    checks = [  # (whether it is so, what to say then)
        (clock < 0, "no round is open: start a worker or the coordinator, or check EXPERIMENT_NAME"),
        (not live_now and not finished, "no live worker: start one with its old NODE_ID to resume it"),
        (live_now and silent, "no rollouts in the last three rounds: do all nodes see the same folder, and are rounds long enough?"),
        (idle > live.stale_after / 2, f"nothing new for {idle:.0f} s: is the drive still mounted?"),
        (useful and not any(useful), "no informative group in ten rounds: WARM_START_STEPS, NUM_SHOTS, MAX_NEW_TOKENS, TASKS?"),
        *((starts[n] > 5, many.format(n, starts[n])) for n in live_now),
        (free < 1e9, "less than 1 GB free: lower CHECKPOINT_KEEP, set ROLLOUT_CLEANUP_ENABLED=True"),
    ]
    return [warning for is_so, warning in checks if is_so]


def plot_experiment(path, rows: list[dict]) -> bool:
    """Five charts of one experiment as a PNG; shown inline in a notebook. path=None only shows."""
    by_node = rows_by("node_id", rows)
    by_round = {t: [row["reward"] for row in now] for t, now in rows_by("round", rows).items()}
    rounds, rewards = list(by_round), list(by_round.values())

    def paint(spread, trend, total, active, histogram, empty):
        spread.set_title("reward per round, min to max")
        spread.plot(rounds, [average(now) for now in rewards])
        spread.fill_between(rounds, [min(now) for now in rewards], [max(now) for now in rewards], alpha=0.2)
        trend.set_title("smoothed reward per node")
        for node, mine in by_node.items():
            trend.plot([row["round"] for row in mine], smooth([row["reward"] for row in mine]), label=node)
        if len(by_node) <= 10:
            trend.legend(fontsize=8)
        total.set_title("cumulative reward")
        total.bar(list(by_node), [sum(row["reward"] for row in mine) for mine in by_node.values()])
        total.tick_params(axis="x", rotation=60)
        active.set_title("active nodes")
        active.step(rounds, [len(now) for now in rewards])
        active.set_ylim(bottom=0)
        histogram.set_title("rewards, histogram")
        histogram.hist([row["reward"] for row in rows], bins=20)
        empty.axis("off")

    return bool(rows) and draw(path, 2, 3, (16, 8), paint)


def monitor(store, stale_after: float, once: bool = False, should_stop=lambda: False, chart=None) -> None:
    """Print the dashboard every 30 seconds, on a terminal in place; once if asked. chart: where to save the charts."""
    live, clear = Liveness(store, stale_after), "\033[2J\033[H" if sys.stdout.isatty() else ""
    while True:
        rows = reward_rows(store)
        print(clear + dashboard(store, live, rows), flush=True)
        drawn = (chart is not None or in_notebook()) and plot_experiment(chart, rows)
        if drawn and chart is not None:
            print(f"charts: {chart}", flush=True)
        deadline = time.monotonic() + 30.0
        while not once and not should_stop() and time.monotonic() < deadline:
            time.sleep(0.2)
        if once or should_stop():
            return
