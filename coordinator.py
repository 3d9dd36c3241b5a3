"""Waiting for the folder, the role that opens rounds, and the readers (status, monitor, validate, report).

The readers change nothing in an experiment. A store (drive_store.py) is passed in everywhere.
"""

import io
import itertools
import math
import shutil
import statistics
import sys
import textwrap
import time
from collections import Counter

from tabulate import tabulate  # reasoning-gym brings it

if "DriveStore" not in globals():  # pasted into one notebook cell, the modules are there already
    from drive_store import BadFile, DriveStore, is_number

COORDINATOR = "coordinator"  # the coordinator's seat: one per experiment, whoever holds it

# -------- Waiting -----------------------------------------------------------------------------------------


class Patient:
    """A store whose calls wait for the folder: each is tried again until it works, or the user stops.

    All that a store does may be done twice. event(kind, text): called with what people should know.
    """

    def __init__(self, store, event, stop):
        self.store, self.event, self.stop = store, event, stop

    def __getattr__(self, name):
        found = getattr(self.store, name)
        return (lambda *args, **kwargs: self.insist(found, *args, **kwargs)) if callable(found) else found

    def insist(self, call, *args, **kwargs):
        """call(…), again after each OSError, with pauses up to 5 s; KeyboardInterrupt if the user stops."""
        began, pause = time.monotonic(), 0.5
        while True:
            try:
                result = call(*args, **kwargs)
                break
            except OSError as error:
                if pause == 0.5:
                    self.event("outage", f"the shared folder fails ({plain(error, 200)}); waiting for it")
                until = time.monotonic() + pause
                while time.monotonic() < until:
                    if self.stop.pressed:  # no round can be finished, no checkpoint written
                        raise KeyboardInterrupt from error
                    time.sleep(0.1)
                pause = min(2 * pause, 5.0)
        if pause > 0.5:
            self.event("outage over", f"the shared folder is back after {time.monotonic() - began:.0f} s")
        return result


def breathe(began: float) -> float:
    """The pause between two looks at the folder: as long as the look took that began then, 20 ms to 2 s.

    Returns the seconds of both; of a look that waited for the folder two count.
    """
    look = min(2.0, time.monotonic() - began)
    pause = max(0.02, look)
    time.sleep(pause)
    return look + pause


def workers_of(sessions) -> list[str]:
    """The nodes among those that have registered, in order: all but the coordinator's seat."""
    return sorted(set(sessions) - {COORDINATOR})


# -------- The role that opens rounds ----------------------------------------------------------------------


def is_round_over(strategy: str, elapsed: float, interval: float, live, submitted) -> bool:
    """Whether the clock moves on. time: interval over; completion: all who live submitted; hybrid: either.

    It never runs on for nobody: without a live worker and without any reward of this round, it waits.
    """
    in_time = elapsed >= interval and bool(live or submitted)
    complete = bool(submitted) and set(live) <= set(submitted)
    return {"time": in_time, "completion": complete, "hybrid": in_time or complete}[strategy]


def keep_the_clock(store, config, log, stop) -> str:
    """Open rounds until MAX_ROUNDS is reached and every worker is done; trains nothing. How it ended.

    Round 0 is held until the first reward (models take minutes to download), and where NUM_WORKERS is set the
    first one until so many live, an interval at most.
    """
    session = store.register([COORDINATOR], "coordinator", {})
    interval, last = config.COORDINATOR_ROUND_INTERVAL, config.MAX_ROUNDS - 1
    t = max(0, store.clock())
    store.open_round(t, COORDINATOR)
    holding = t == 0 or (t < last and config.NUM_WORKERS > 0)
    log.say(f"coordinator: round {t} is open ({config.ROUND_ADVANCE}, interval {interval:g} s)")
    opened = began = time.monotonic()
    next_beat, stages, past = 0.0, 0, []
    while not stop.pressed:
        look = time.monotonic()
        sessions, clock = store.sessions(), store.clock()
        if sessions[COORDINATOR] > session:
            return "superseded"
        if look >= next_beat:
            next_beat = look + min(10.0, config.STALE_AFTER_SECONDS / 8)
            store.heartbeat(COORDINATOR, session, t)
            log.flush(store)
        if clock > t:  # a worker that saw no coordinator opened it
            t, opened = clock, look
        stages = stages or begun_with(store, "MAX_STAGES", 0)  # whoever begins says how many
        submitted, late = who_submitted(store, sessions, t, max(0, stages - 1), config.STALE_AFTER_SECONDS)
        elapsed = look - opened
        if holding:
            begun = bool(store.rounds("rewards"))
            holding = not begun or (len(late | submitted) < config.NUM_WORKERS and elapsed < interval)
            opened = began = opened if begun else look
        elif t >= last:
            if not late or elapsed > interval + config.STALE_AFTER_SECONDS:  # they can end alone
                say_round(store, config, log.say, t, submitted, late, began, past)
                log.event("end", verdict(past, "all nodes"))
                store.heartbeat(COORDINATOR, session, t, "done")
                return "finished"
        elif is_round_over(config.ROUND_ADVANCE, elapsed, interval, late | submitted, submitted):
            store.open_round(t + 1, COORDINATOR)
            say_round(store, config, log.say, t, submitted, late, began, past)
            t, opened = t + 1, look
        breathe(look)
    store.heartbeat(COORDINATOR, session, t, "stopped")
    return "stopped"


def who_submitted(store, sessions: dict, t: int, stage: int, stale_after: float) -> tuple[set, set]:
    """The registered nodes that submitted their reward of a stage, and those that live and did not."""
    submitted = set(store.nodes("rewards", t, stage)) & sessions.keys()
    others = set(workers_of(sessions)) - submitted
    return submitted, {node for node in others if store.life(node, sessions[node], stale_after) == "live"}


def say_round(store, config, say, t: int, submitted, late, began: float, past: list[dict]) -> None:
    """One line for a round that has ended, and its winners. past: figures of the rounds since `began`."""
    rows = write_winners(store, t, submitted)
    means = {name: average(row.get(name) for row in rows) or 0.0 for name in IN_ROUND_LINE}
    past.append(means | {"ended": time.monotonic()})
    went = pace(began, past, config.MAX_ROUNDS - 1 - t)
    if late:
        went += f" | {len(submitted)} nodes, late: {some(sorted(late), 3)}"
    say(f"{counted(t, config.MAX_ROUNDS)} | {round_line(past[-20:])} | {went}")


# How to read it: .github/MANUAL.md, "The log line".
ROUND_LINE = (
    "reward {reward:.2f} ({recent} rounds: {smooth:.2f})"
    " | tags {answer_tag_rate:.0%} cut {truncated_rate:.0%}"
    " | groups {local_groups:.0f}+{external_groups:.3g}, {informative_groups:.3g} informative"
)


IN_ROUND_LINE = (
    "reward answer_tag_rate truncated_rate local_groups external_groups informative_groups".split()
)


def round_line(recent: list[dict]) -> str:
    """What explains a flat curve: figures of the last of these rounds, and the mean reward of all."""
    smooth = average(figures["reward"] for figures in recent)
    return ROUND_LINE.format(**recent[-1], recent=len(recent), smooth=smooth)


def pace(began: float, past: list[dict], left: int) -> str:
    """Seconds of the last round, wall clock, and the time that is left at the pace of the last ten."""
    ends = [began, *(figures["ended"] for figures in past)][-11:]
    each = (ends[-1] - ends[0]) / (len(ends) - 1)
    return f"{ends[-1] - ends[-2]:.1f}s | eta {short_time(each * left)}"


def write_winners(store, round_: int, nodes) -> list[dict]:
    """winners/round_000012.json, {node: its mean reward}, the best first; returns the round's rewards."""
    rows = store.rewards(round_, nodes)
    means = {node: average(row["reward"] for row in mine) for node, mine in rows_by("node_id", rows).items()}
    if means:
        best_first = sorted(means.items(), key=lambda item: (-item[1], item[0]))
        store.write(f"winners/round_{round_:06d}.json", dict(best_first))
    return rows


def counted(round_: int, max_rounds: int) -> str:
    """(7, 200) -> "round 007/200"."""
    return f"round {round_:0{len(str(max_rounds))}d}/{max_rounds}"


def short_time(seconds: float) -> str:
    """42 -> "42s", 150 -> "2m", 8000 -> "2h13m"."""
    hours, minutes = divmod(int(seconds // 60), 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m" if minutes else f"{seconds:.0f}s"


def some(names: list[str], most: int = 20) -> str:
    """The first of these names, for a sentence."""
    more = f" and {len(names) - most} others" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# -------- The readers: what an experiment's folder says. They change nothing in it ------------------------


def reward_rows(store, known: dict | None = None) -> list[dict]:
    """Every reward of a registered node, in order, as pandas likes it; `known` remembers old rounds."""
    known = {} if known is None else known
    nodes, clock = store.sessions(), store.clock()
    rounds = [r for r in store.rounds("rewards") if r <= clock]
    for round_ in rounds:
        if round_ not in known or round_ > clock - 8:  # a slow node may still add to the newest rounds
            rows = store.rewards(round_, nodes)
            known[round_] = [{**r, "experiment": store.base.name, "my_reward": r["reward"]} for r in rows]
    return [row for round_ in rounds for row in known[round_]]


def begun_with(store, name: str, otherwise: int) -> int:
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


def sparkline(values: list[float], width: int = 24) -> str:
    """A whole curve of values in 0 to 1 as `width` characters at most. [0, 0.5, 1] -> "▁▅█"."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)]
    means = [average(values[a:b]) for a, b in itertools.pairwise(edges)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * mean))] for mean in means)


def verdict(history: list[dict], who: str) -> str:
    """Whether rewards rose, in a sentence: the last 20 rounds against the first, or half against half."""
    part = min(20, (len(history) + 1) // 2)
    rewards = [figures["reward"] for figures in history]
    first, last = average(rewards[:part]), average(rewards[-part:])
    if not any(figures["informative_groups"] for figures in history):
        found = f"nothing was learned: {why_flat(history)}"
    elif len(history) < 10:
        found = "too few rounds to tell what was learned"
    elif last > first + 0.05:
        found = "learned"
    else:
        found = "little was learned: more MAX_ROUNDS, another LEARNING_RATE?"
    went = f"mean reward of {who} {first:.2f} -> {last:.2f}"
    return f"{found}; {went} (first and last {part} of {len(history)} rounds) {sparkline(rewards)}"


def why_flat(rows: list[dict]) -> str:
    """Why rewards within a group were all equal, and which variable may help. rows: recent figures."""
    rates = {name: average(row.get(name) for row in rows) or 0.0 for name in IN_ROUND_LINE}
    todo = "easier TASKS, or a better MODEL_NAME: the answers are wrong"
    if rates["reward"] > 0.95:
        todo = "harder TASKS: all answers are right"
    elif rates["truncated_rate"] > 0.5:
        todo = "raise MAX_NEW_TOKENS: the answers are cut off"
    elif rates["answer_tag_rate"] < 0.05:
        todo = "raise WARM_START_STEPS: the model does not write <answer> tags"
    figures = "reward {reward:.2f}, tags {answer_tag_rate:.0%}, cut {truncated_rate:.0%}".format(**rates)
    return f"equal rewards within each group give no gradient ({figures}): {todo}"


def reward_per_task(rows: list[dict]) -> dict[str, float]:
    """{task: mean reward} of the figures of nodes or rounds, the best first; 20 that occur most at most."""
    counts = Counter(name for row in rows for name in row if name.startswith("reward_"))
    means = {name[7:]: average(row.get(name) for row in rows) for name, _ in counts.most_common(20)}
    return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))


def experiment_status(store, stale_after: float = 300.0) -> dict:
    """The state of one experiment, as a reader sees it now."""
    rows, sessions = reward_rows(store), store.sessions()
    nodes, saved = workers_of(sessions), store.rounds("checkpoints")
    times = [row["timestamp"] for row in rows]
    totals = {node: sum(r["reward"] for r in mine) for node, mine in rows_by("node_id", rows).items()}
    return {
        "experiment": store.base.name,
        "current_round": store.clock(),
        "current_stage": rows[-1]["stage"] if rows else 0,
        "num_active_peers": sum(store.life(node, sessions[node], stale_after) == "live" for node in nodes),
        "peer_ids": nodes,
        "last_updated": max(times, default=None),
        "cumulative_rewards": totals,
        "latest_checkpoint": str(store.base / f"checkpoints/round_{saved[-1]:06d}") if saved else None,
        "duration_seconds": max(times) - min(times) if times else 0.0,
    }


def validate_experiment(store, max_rounds: int, nodes: int) -> list[str]:
    """What a finished run lacks, as sentences; an empty list means that everything is there."""
    config, rows, clock = store.read_matching("config.json") or {}, reward_rows(store), store.clock()
    by_node, last = rows_by("node_id", rows), max_rounds - 1
    nonzero = {name for row in rows for name in row if row[name]}
    unpaid = sorted(set(range(max_rounds)) - {row["round"] for row in rows})
    late = [node for node, mine in by_node.items() if mine[-1]["round"] < last]
    alone = nodes == 1 or config.get("NUM_TRANSPLANT_TREES") == 0
    checks = [  # (whether it is there, what to say if not)
        (isinstance(config.get("MAX_STAGES"), int), f"{store.base}: no config.json with MAX_STAGES"),
        (clock >= last, f"the clock stands at round {clock}, expected {last}"),
        (len(by_node) >= nodes, f"{len(by_node)} nodes submitted rewards, expected {nodes}"),
        (not unpaid, f"rounds without rewards: {unpaid[:9]}"),
        (store.rounds("rollouts"), "no rollouts"),
        (not late, f"no reward for the last round {last}: {some(late)}"),
        (store.names(f"checkpoints/round_{last:06d}"), f"no checkpoint after the last round {last}"),
        ("informative_groups" in nonzero, "no node trained on an informative group"),
        ("grad_norm" in nonzero, f"every gradient is zero: nothing was learned: {why_flat(rows)}"),
        (alone or "external_groups" in nonzero, "no external group was drawn"),
    ]
    for node in by_node:
        files = {*store.names(f"logs/{node}"), *store.names(f"models/{node}")}
        files = {"weights" if name.endswith(".safetensors") else name for name in files}
        lacking = ", ".join(sorted({"metrics.jsonl", "config.json", "tokenizer.json", "weights"} - files))
        checks.append((not lacking, f"logs/{node} and models/{node} lack {lacking}"))
    return [problem for there, problem in checks if not there]


# -------- The report --------------------------------------------------------------------------------------

ARM = ("NUM_TRAIN_SAMPLES", "NUM_TRANSPLANT_TREES", "LOCAL_OVERSAMPLE", "EXTERNAL_FILTER", "EXTERNAL_FLOOR")
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t for 2 to 10 pairs


def summarize(store) -> dict | None:
    """One experiment as figures, None if it has no rewards. ValueError if its config.json cannot be used."""
    rows = reward_rows(store)
    if not rows:
        return None
    config = store.read("config.json") or {}
    if not all(isinstance(config.get(name), bool) or is_number(config.get(name)) for name in ARM):
        raise ValueError(f"config.json lacks one of {', '.join(ARM)}")
    nodes, found = len(rows_by("node_id", rows)), rows_by("round", rows)
    by_round = [found.get(t, []) for t in range(rows[-1]["round"] + 1)]
    settings = {name: value for name, value in config.items() if name.isupper()} | {"nodes": nodes}
    completions = [sum(row.get("completions", 0) for row in now) / nodes for now in by_round]
    own, external, oversample, filtered, floor = (settings.pop(name) for name in ARM)
    arm = f"{own}/{external}" + (f" x{oversample}" if oversample > 1 else "")
    arm += "" if filtered or not external else " unfiltered"
    return {
        "experiment": store.base.name,
        "seed": plain(settings.pop("SEED", None)),
        "arm": arm + (f" floor {floor:g}" if floor else ""),
        "baseline": f"{own + external}/0",  # a lone node that trains on as many groups
        "settings": {n: plain(v, 40) for n, v in settings.items() if n != "EXPERIMENT_NAME"},
        "per_node": sum(row["reward"] for row in rows) / nodes,
        "held_out": average(row.get("held_out") for row in rows[-len(rows) // 10 :]),
        "curve": [average(row["reward"] for row in now) or 0.0 for now in by_round],
        "spent": list(itertools.accumulate(completions)),
        "tasks": reward_per_task(rows[-len(rows) // 10 :]),
    }


def compare(runs: list[dict]) -> list[dict]:
    """A row for each group of runs that differ in their seed alone, with its gain over the J = 0 baseline.

    The gain is a mean of log ratios paired by seed, its 95% interval Student's t: None with fewer than three
    seeds, or where a run earned next to nothing.
    """
    differ = [n for n in runs[0]["settings"] if len({r["settings"].get(n) for r in runs}) > 1] if runs else []
    groups = {}
    for run in runs:
        where = " ".join(f"{name}={run['settings'].get(name)}" for name in differ)
        groups.setdefault((where, run["arm"]), []).append(run)
    rows = []
    for (where, arm), members in groups.items():
        totals = {run["seed"]: run["per_node"] for run in members}
        base = {run["seed"]: run["per_node"] for run in groups.get((where, members[0]["baseline"]), [])}
        row = {"label": f"{arm} {where}".strip(), "runs": members, "gain": None, "low": None, "high": None}
        row["per_node"], row["held_out"] = average(totals.values()), average(r["held_out"] for r in members)
        least = 0.05 * len(members[0]["curve"])  # below that the reward stayed at the floor
        row["learned"] = row["per_node"] > least
        row["sd"] = statistics.stdev(totals.values()) if len(totals) > 1 else None
        row["completions"] = average(run["spent"][-1] for run in members)
        pairs = [(totals[seed], base[seed]) for seed in totals if seed in base]
        if arm != members[0]["baseline"] and 3 <= len(pairs) <= 10 and min(map(max, pairs)) > least:
            logs = [math.log(max(ours, 1e-3) / max(theirs, 1e-3)) for ours, theirs in pairs]
            mean, error = average(logs), statistics.stdev(logs) / math.sqrt(len(logs)) * T_95[len(logs) - 2]
            row |= {"gain": math.expm1(mean), "low": math.expm1(mean - error)}
            row["high"] = math.expm1(mean + error)
        rows.append(row)
    return sorted(rows, key=lambda row: -row["per_node"])


def report_text(rows: list[dict]) -> str:
    """Two tables: cumulative reward per node over seeds, gain over the baseline, cost; reward per task."""
    cells = []
    for row in rows:
        gain = "" if row["gain"] is None else f"{row['gain']:+.0%} ({row['low']:+.0%} to {row['high']:+.0%})"
        if not row["learned"]:
            gain = "nothing was learned: more MAX_ROUNDS"
        figures = [row[name] for name in ("per_node", "sd", "held_out", "completions")]
        cells.append([row["label"][:60], len(row["runs"]), *figures, gain])
    names = ["I/J", "runs", "cumulative reward per node", "sd", "held-out", "completions", "gain (95%)"]
    formats = ("", "d", ".2f", ".2f", ".2f", ".0f", "")
    table = tabulate(cells, names, "simple", floatfmt=formats, missingval="-", disable_numparse=[0, 6])
    tasks = {task: [] for row in rows for run in row["runs"] for task in run["tasks"]}
    for task, row in itertools.product(tasks, rows):
        tasks[task].append(average(run["tasks"].get(task) for run in row["runs"]))
    names = ["reward at the end", *(row["label"][:30] for row in rows)]
    by_task = [[plain(task, 40), *means] for task, means in sorted(tasks.items())]
    return f"{table}\n\n{tabulate(by_task, names, 'simple', floatfmt='.2f', missingval='-')}"


def new_figure():
    """A figure for `png_of`; None, and a sentence, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no picture: pip install matplotlib")
    return Figure((10, 4.2), dpi=150, layout="constrained")


def png_of(figure) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def draw_run(rows: list[dict], name: str) -> bytes | None:
    """One experiment as PNG: reward per node, reward per task, shares of useful groups and tagged answers."""
    figure = new_figure()
    if figure is None or not rows:
        return None
    nodes, tasks, shares = figure.subplots(1, 3, sharex=True, sharey=True)
    by_round = [*rows_by("round", rows).values()]
    for node, mine in rows_by("node_id", rows).items():
        nodes.plot(
            [r["round"] for r in mine], smooth([r["reward"] for r in mine]), alpha=0.4, label=plain(node, 20)
        )
    x = [now[0]["round"] for now in by_round]
    nodes.plot(x, smooth([average(r["reward"] for r in now) for now in by_round]), "k", label="mean")
    for task in reward_per_task(rows):
        tasks.plot(
            x,
            smooth([average(r.get(f"reward_{task}") for r in now) for now in by_round]),
            label=plain(task, 20),
        )
    share = [
        average(r.get("informative_local", 0) / max(1, r.get("groups", 1)) for r in now) for now in by_round
    ]
    shares.plot(x, smooth(share), label="informative groups")
    tags = [average(r.get("answer_tag_rate") for r in now) for now in by_round]
    shares.plot(x, smooth(tags), label="answers in <answer> tags")
    for axis, title in ((nodes, f"{name}: reward"), (tasks, "reward per task"), (shares, "shares")):
        axis.set(title=title, xlabel="round", ylim=(0, 1))
        axis.legend(fontsize=6)
    return png_of(figure)


def draw(rows: list[dict]) -> bytes | None:
    """Smoothed reward, mean and standard error over seeds, over rounds and over completions, as PNG.

    Six rows at most: more cannot be told apart.
    """
    figure = new_figure()
    if figure is None:
        return None
    left, right = figure.subplots(1, 2, sharey=True)
    for row in rows[:6]:
        curves = list(zip(*(smooth(run["curve"]) for run in row["runs"]), strict=False))  # one may be longer
        mean = [average(now) for now in curves]
        error = [statistics.stdev(now) / math.sqrt(len(now)) if len(now) > 1 else 0.0 for now in curves]
        low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
        spent = row["runs"][0]["spent"][: len(mean)]
        for axis, x in ((left, range(len(mean))), (right, spent)):
            (line,) = axis.plot(x, mean, label=row["label"][:40].replace("$", ""))
            axis.fill_between(x, low, high, color=line.get_color(), alpha=0.15)
    left.set(xlabel="round", ylabel="mean reward (0 to 1), smoothed", ylim=(0, None))
    right.set(xlabel="completions generated per node")
    left.legend(fontsize=8)
    best = rows[0]
    gain = ""
    if best["gain"] is not None:
        interval = f"95%: {best['low']:+.0%} to {best['high']:+.0%}"
        gain = f", {best['gain']:+.0%} over {best['runs'][0]['baseline']} ({interval})"
    title = f"most reward: {best['label'][:60]}{gain}" if best["learned"] else "nothing was learned"
    figure.suptitle(title.replace("$", ""))
    return png_of(figure)


# -------- The monitor -------------------------------------------------------------------------------------


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; that the package has been imported is not enough."""
    return {"ipykernel", "IPython"} <= sys.modules.keys() and sys.modules["IPython"].get_ipython() is not None


def dashboard(store, stale_after: float, known: dict, max_rounds: int | None) -> str:
    """An experiment as text that fits the terminal: clock, nodes, tasks, what looks wrong, one group."""
    screen = shutil.get_terminal_size((110, 40))
    sessions = store.sessions()
    lives = {node: store.life(node, sessions[node], stale_after) for node in sessions}
    rows, clock = reward_rows(store, known), store.clock()  # after `lives`: who is done has all rewards there
    led = lives.pop(COORDINATOR, "none")
    live = sum(life == "live" for life in lives.values())
    workers = f"{live} of {len(lives)} workers live" if lives else "no worker has begun"
    planned = max_rounds or max(begun_with(store, "MAX_ROUNDS", 0), clock + 1 if rows else 0)
    lines = [
        f"{store.base.name}: round {clock}{f' of {planned}' if planned else ''}, {workers}, coordinator {led}"
    ]
    claims = DriveStore(store.root, None)
    for name in claims.names("warmstart") if not rows else []:
        claim = claims.read_matching(f"warmstart/{name}") if name.endswith(".claim") else None
        if claim:
            lines.append(plain(claim.get("progress", "the warm start begins")))
    if rows:
        now = [row for row in rows if row["round"] == rows[-1]["round"]]
        ago = short_time(max(0.0, time.time() - rows[-1]["timestamp"]))
        lines.append(f"reward {average(r['reward'] for r in now):.2f} in round {now[0]['round']}, {ago} ago")
    for node in sorted(lives):
        rewards = [row["reward"] for row in rows if row["node_id"] == node]
        total = f"{len(rewards):5} rewards, in all {sum(rewards):8.2f}"
        lines.append(f"{node:16.16} {lives[node]:4} {total}  {sparkline(smooth(rewards))}")
    recent = [row for row in rows if row["round"] > clock - 10]
    tasks = [f"{plain(task, 24)} {mean:.2f}" for task, mean in reward_per_task(recent).items()]
    lines += textwrap.wrap("by task: " + ", ".join(tasks), screen.columns) if tasks else []
    for why, count in store.skipped.most_common(3):
        lines.append(f"! unusable file, {count} times: {plain(why)}")
    if recent and not any(row.get("informative_groups") for row in recent):
        lines.append(f"! nothing is learned: {why_flat(recent)}")
    left = [node for node, life in lives.items() if life == "dead"]
    if left and clock < planned - 1:
        lines.append(f"! silent: {some(left, 8)} (STALE_AFTER_SECONDS={stale_after:g})")
    free = shutil.disk_usage(store.base).free / 1e9
    if free < 1:
        lines.append(f"! the disk is nearly full: {free:.2f} GB free")
    if rows and rows[-1]["round"] >= planned - 1 and "live" not in lives.values():
        lines.append("finished; NODE_ROLE=report compares experiments")
    lines += latest_group(store, clock, screen.columns)
    return "\n".join(line[: screen.columns] for line in lines[: screen.lines - 1])


def latest_group(store, clock: int, width: int) -> list[str]:
    """The newest group there is, as lines: the end of its question, the right answer, three completions."""
    for peer in reversed(store.nodes("rollouts", clock, 0)):
        try:
            group = store.fetch(clock, 0, peer)[0]
        except (IndexError, BadFile):  # empty, or damaged
            continue
        return ["", *group_lines(group["prompt"], group["answer"], group["completions"][:3], width, peer)]
    return []


def group_lines(question: str, answer: str, completions: list[dict], width: int, who: str = "") -> list[str]:
    """A question, cut at its beginning, and completions with their rewards, one a line."""
    question = plain(" ".join(question.split()), 10**6)
    right = f"  (right: {plain(answer, 30)})" if answer else ""
    room = width - len(who) - len(right) - 3
    end = question if len(question) <= room else "…" + question[1 - room :]
    lines = [f"{who}? {end}{right}"]
    for each in completions:
        lines.append(f"  {each['reward']:4.2f}  {plain(repr(each['response']), width - 8)}")
    return lines


def monitor(store, stale_after: float, max_rounds: int | None, once: bool, stop) -> None:
    """Show the dashboard every 10 s in place of the last until the run is over; once if asked.

    max_rounds: where it is not what the experiment began with. In a notebook with the picture of the run.
    """
    known = {}
    while True:
        picture = None
        try:
            text = dashboard(store, stale_after, known, max_rounds)
            picture = draw_run(reward_rows(store, known), store.base.name) if in_notebook() else None
        except OSError as error:
            text = f"the shared folder cannot be read ({plain(error)}); trying on"
        if in_notebook():
            from IPython.display import Image, clear_output, display

            clear_output(wait=True)
            if picture:
                display(Image(picture))
        clear = "\033[2J\033[H" if sys.stdout.isatty() else ""
        print(clear + text, flush=True)
        for _ in range(50):
            if once or stop.pressed or "\nfinished; " in text:
                return
            time.sleep(0.2)
