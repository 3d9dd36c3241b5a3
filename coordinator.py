"""Who opens the next round, and when? Whichever process enters it first opens it: a worker's, or
that of a coordinator, which trains nothing and needs no model.
"""

import contextlib
import fnmatch
import io
import itertools
import json
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy  # comes with transformers
import tqdm  # also
from tabulate import tabulate  # comes with reasoning-gym

if "DriveStore" in globals():  # the four modules pasted into one notebook cell
    drive_store = sys.modules[__name__]
else:
    import drive_store


def wait_for_round(run, next_own: int) -> int:
    """Wait for the round to enter, and return it:
    - the newest open one, if it is `next_own` or later and any other process has ever joined;
    - else `next_own`, which this process thereby opens, when for `opening_delay` seconds no
      coordinator was alive (until one is seen: since this process has joined).

    So a process that was always alone repeats after a kill the rounds since its checkpoint.
    """
    swarm = run.swarm
    while True:
        board = swarm.check_in(run.signals)  # a look, and a sign of life; raises Stopped
        if swarm.others() and board.open_round >= next_own:
            return board.open_round

        if swarm.is_alive(drive_store.COORDINATOR_ID):
            swarm.coordinator_seen_at = swarm.looked_at
        elif swarm.looked_at - swarm.coordinator_seen_at >= opening_delay(run):
            return next_own
        swarm.sleep()


def opening_delay(run) -> float:
    """Seconds without a live coordinator after which this process opens a round itself."""
    if not run.history and lacks_workers(run):  # its first round waits for NUM_WORKERS
        return run.config.COORDINATOR_ROUND_INTERVAL  # 60 by default
    if drive_store.COORDINATOR_ID in run.swarm.board.sessions:
        return 2.0  # there has been one, and a single look at its heartbeat may fail
    if run.last_round == 0:
        return 0.5  # for a coordinator that could not join before the experiment had begun
    return 0.0


def run_coordinator(run) -> None:
    """Open one round after another, MAX_ROUNDS in all. Raises Stopped if it is to end before.

    ROUND_ADVANCE says when a round is over:
    time        COORDINATOR_ROUND_INTERVAL (60 s) after its opening (round 0: after the first
                reward), if a live worker works on it or a reward was submitted
    completion  when a reward was submitted, and every live worker that is in step has submitted
    hybrid      whichever comes first (the default)
    The first round of a start also waits for NUM_WORKERS to be alive, one interval at most; the
    last one for all live workers, an interval and STALE_AFTER_SECONDS at most.
    """
    swarm = run.swarm
    last_round = run.config.MAX_ROUNDS - 1
    swarm.join({"role": "coordinator"}, folders=["logs"])
    t = -1  # the round that it keeps open

    while True:
        run.log.flush(run.store)
        board = swarm.check_in(run.signals)

        # Enter round 0, or one that workers have opened while they saw no live coordinator.
        newest = max(0, board.open_round)
        if t < newest:
            t = newest
            opened_at = swarm.looked_at
            swarm.enter(t)

        # Before the first reward of all, models may take minutes to download.
        if t == 0 and not board.reached("rewards", drive_store.At(0, run.config.MAX_STAGES - 1)):
            opened_at = swarm.looked_at

        if round_is_over(run, t, swarm.looked_at - opened_at):
            if t < last_round:
                swarm.enter(t + 1)  # before the log, for which nobody is to wait
            log_round_of_swarm(run, t)
            if t >= last_round:
                return
            t += 1
            opened_at = swarm.looked_at
        swarm.sleep()


# ==== The heart ends here. Below: when a round is over, its line, what reads an experiment ========


def round_is_over(run, t: int, elapsed: float) -> bool:
    """Whether round t is over after so many seconds, by the rules of `run_coordinator`. The last
    round waits for all workers, but not for ever."""
    config = run.config
    board = run.swarm.board
    interval = config.COORDINATOR_ROUND_INTERVAL
    is_last = t >= config.MAX_ROUNDS - 1

    # The first round of a start waits for those who come.
    if not run.round_ends and elapsed < interval and lacks_workers(run):
        return False

    # Who has submitted the reward of this round? On some storages a marker never shows: in a long
    # round the reward itself is looked for.
    last_stage = drive_store.At(t, config.MAX_STAGES - 1)
    submitted = set(board.reached("rewards", last_stage))
    if elapsed > config.STALE_AFTER_SECONDS:
        submitted |= {n for n in board.workers if run.store.read_reward(n, last_stage)}

    # Is anybody alive who still works on it?
    expected = board.in_step("rewards", t, config.MAX_STAGES)
    if is_last or not expected:  # in some round nobody may be in step
        expected = set(board.workers)
    pending = expected - submitted
    is_pending = any(run.swarm.is_alive(node_id) for node_id in sorted(pending))
    if is_last and is_pending:
        return elapsed > interval + config.STALE_AFTER_SECONDS

    # While somebody is pending only the time can end the round. Else all who live have submitted.
    is_late = elapsed >= interval and config.ROUND_ADVANCE != "completion"
    if is_pending:
        return is_late
    return bool(submitted) and (is_late or config.ROUND_ADVANCE != "time")


def lacks_workers(run) -> bool:
    """Whether fewer than NUM_WORKERS are alive. Nobody is asked where too few have registered."""
    wanted = run.config.NUM_WORKERS
    workers = run.swarm.board.workers
    if wanted == 0 or (len(workers) >= wanted and sum(map(run.swarm.is_alive, workers)) >= wanted):
        return False
    run.log.once("wait", f"for {wanted} workers, one COORDINATOR_ROUND_INTERVAL at most")
    return True


def log_round_of_swarm(run, t: int) -> None:
    """Log the line of a round that has ended."""
    rows = []
    stages = [drive_store.At(t, stage) for stage in range(run.config.MAX_STAGES)]
    for node_id in run.swarm.board.workers:
        rows += filter(None, [run.store.read_reward(node_id, at) for at in stages])
    run.history += rows
    run.round_ends.append(run.swarm.looked_at)
    run.log.info(format_round(t, run.config.MAX_ROUNDS, rows, run.round_ends))


# -------- The line of a round ---------------------------------------------------------------------


def format_round(round_: int, max_rounds: int, rows: list[dict], round_ends=()) -> str:
    """The line of a round: everything that explains a flat curve, as means over nodes and stages.

    It fits about 80 columns behind run_swarm.sh's "[coordinator] ". "6 of 4+4 groups" were
    informative: 4 own and 4 of peers. round_ends: times, for the time that is left.
    """
    label = f"{round_:0{len(str(max_rounds))}d}/{max_rounds}"
    if not rows:  # on some storages a marker arrives before its file
        return f"{label} no reward file has arrived yet"

    def average(name: str, form: str) -> str:
        value = mean_of(name, rows)
        return "-" if value is None else format(value, form)  # a node with I = 0 generates nothing

    line = f"{label} reward {average('reward', '.2f')} tags {average('answer_tag_rate', '.0%')}"
    line += f" cut {average('truncated_rate', '.0%')} {average('informative_groups', '.0f')} of"
    line += f" {average('local_groups', '.0f')}+{average('external_groups', '.0f')} groups"
    if mean_of("held_out", rows) is not None:
        line += f" held-out {average('held_out', '.2f')}"

    # The time that is left, at the pace of the last ten rounds.
    recent = round_ends[-11:]
    if len(recent) > 3:
        seconds_per_round = (recent[-1] - recent[0]) / (len(recent) - 1)
        seconds_left = seconds_per_round * (max_rounds - 1 - round_)
        line += f" eta {tqdm.tqdm.format_interval(seconds_left)}"
    return line


def has_signal(rows: list[dict]) -> bool:
    """Whether a group was informative, so that something could be learned from it."""
    return any(row.get("informative_groups") for row in rows)


def diagnose(rows: list[dict]) -> str:
    """What happened in these rows, in a sentence with the curve, and the variable that may help."""
    by_round = column_by("round", rows)
    curve = [mean(by_round[round_]) for round_ in sorted(by_round)]
    curve = [reward for reward in curve if reward is not None]
    if not curve:
        return "no rewards, because nothing was generated (NUM_TRAIN_SAMPLES=0)"

    # The last 20 rounds against the first 20, or one half against the other.
    part = min(20, (len(curve) + 1) // 2)
    first = statistics.fmean(curve[:part])
    last = statistics.fmean(curve[-part:])
    change = f"mean reward {first:.2f} -> {last:.2f}"
    if has_signal(rows):
        verdict = "learned" if last > first + 0.05 else "little was learned"
        rounds = f"first and last {part} of {len(curve)} rounds"
        return f"{verdict}; {change} ({rounds}) {sparkline(curve)}"

    # Equal rewards within each group give no gradient.
    advice = "the answers are wrong: easier TASKS, or a better MODEL_NAME"
    if last > 0.95:
        advice = "all answers are right: harder TASKS"
    elif (mean_of("truncated_rate", rows) or 0.0) > 0.5:
        advice = "the answers are cut off: raise MAX_NEW_TOKENS"
    elif (mean_of("answer_tag_rate", rows) or 0.0) < 0.05:
        advice = "<answer> tags are rare: raise WARM_START_STEPS, or take easier TASKS"
    return f"nothing was learned ({change}): rewards within each group are equal: {advice}"


def check_test_run(run, rows: list[dict], node_ids: list[str], folders: list[str]) -> int:
    """TEST_MODE checks itself: say what these nodes lack at the end, or that the check is passed.
    Returns the exit status.

    rows: their rewards with metrics. folders: those in which they should have left something.
    """
    config = run.config
    if not config.TEST_MODE:
        return 0

    problems = [f"{folder} is empty" for folder in folders if not run.store.list_names(folder)]
    rounds_of = column_by("node_id", rows, "round")
    for node_id in node_ids:
        first = min(rounds_of[node_id], default=0)  # it may have joined late
        if set(rounds_of[node_id]) != set(range(first, config.MAX_ROUNDS)):
            problems.append(f"{node_id} has rewards in rounds {rounds_of[node_id]} only")
    num_workers = len(run.swarm.board.workers)
    if num_workers < config.NUM_WORKERS:
        problems.append(f"{num_workers} workers came, of {config.NUM_WORKERS}")
    if not has_signal(rows):
        problems.append(f"no group gave a gradient: {diagnose(rows)}")
    if config.NUM_TRANSPLANT_TREES > 0 and num_workers > 1 and not mean_of("external_groups", rows):
        problems.append("no group of a peer was trained on")
    run.log.event("check", "; ".join(problems) or "passed")
    return 1 if problems else 0


# -------- Reading an experiment, also from notebooks ----------------------------------------------


@dataclass
class Experiment:
    """All that readers show of an experiment, read at one moment."""

    name: str
    config: dict  # the settings that it began with; 1 for one that readers need and that is missing
    board: "drive_store.Board"
    status: dict  # node, also the coordinator -> alive, done, stopped, failed or dead
    rows: list  # every reward with its metrics, in order

    @property
    def num_rounds(self) -> int:
        """Rounds that are planned. (A later start may have raised MAX_ROUNDS.)"""
        return max(self.config["MAX_ROUNDS"], self.board.open_round + 1)

    @property
    def newest_round(self) -> int:
        """The last round that has a reward, -1 if none has."""
        return self.rows[-1]["round"] if self.rows else -1

    @property
    def is_over(self) -> bool:
        """Whether the last round has rewards and nobody works any more."""
        return self.newest_round >= self.num_rounds - 1 and not self.with_status("alive")

    def with_status(self, status: str) -> list[str]:
        """The workers that are alive, done, stopped, failed or dead."""
        return [node_id for node_id in self.board.workers if self.status[node_id] == status]

    def select(self, **columns) -> list[dict]:
        """The rows with these values."""
        return [row for row in self.rows if columns.items() <= row.items()]

    def last_rounds(self, number: int) -> list[dict]:
        """The rows of the newest rounds that have any."""
        return [row for row in self.rows if row["round"] > self.newest_round - number]

    def curve(self, metric: str = "reward", **columns) -> list[float]:
        """The metric's mean over the rows with these values, for each round from their first to
        their last. 0 where nobody was there."""
        by_round = column_by("round", self.select(**columns), metric)
        rounds = range(min(by_round, default=0), max(by_round, default=-1) + 1)
        return [mean(by_round[round_]) or 0.0 for round_ in rounds]

    @property
    def arm(self) -> str:
        """What is compared: I/J. "4/4", "8/0 x4" (LOCAL_OVERSAMPLE), "4/4 unfiltered"."""
        own, external, is_filtered, factor = [self.config[name] for name in ARM]
        name = f"{own}/{external}" if factor == 1 else f"{own}/{external} x{factor}"
        return name if is_filtered else f"{name} unfiltered"

    @property
    def totals(self) -> dict[str, float]:
        """{node: cumulative reward} of the nodes that have submitted rewards."""
        by_node = column_by("node_id", self.rows)
        return {node_id: sum(filter(None, rewards)) for node_id, rewards in by_node.items()}

    @property
    def reward_per_node(self) -> float:
        """The paper's metric, divided by the number of nodes."""
        return statistics.fmean(self.totals.values())


def read_experiment(swarm, cache: dict | None = None) -> Experiment:
    """Read an experiment. cache: pass the same dict again, and no reward file is read twice."""
    rows = {} if cache is None else cache
    store = swarm.store
    board = swarm.look()
    status = {}
    for node_id in sorted(board.sessions):
        status[node_id] = swarm.status(node_id)  # first: one that is done has all its rewards there
        for at in store.list_stages("rewards", node_id, lenient=True):
            if at.round <= board.open_round and (*at, node_id) not in rows:
                if row := store.read_reward(node_id, at):
                    names = {"experiment": store.dir.name, "my_reward": row["reward"]}
                    rows[*at, node_id] = row | names
    config = dict.fromkeys(ARM + MAY_DIFFER, 1)
    config |= store.read_valid("config.json") or {}
    return Experiment(store.dir.name, config, board, status, [rows[key] for key in sorted(rows)])


def column_by(name: str, rows: list[dict], metric: str = "reward") -> dict:
    """{value of the column `name`: the metric in its rows}."""
    values = defaultdict(list)
    for row in rows:
        values[row[name]].append(row.get(metric))
    return values


def list_experiments(path) -> list[str]:
    """Names of the experiments below the shared folder `path`."""
    names = [config.parent.name for config in Path(path).glob("experiments/*/config.json")]
    return sorted(filter(drive_store.is_safe_name, names))


def open_experiment(path, name: str, stale_after: float = 300.0) -> "drive_store.Swarm":
    """A reader's look at an experiment. Raises StoreError if there is none of this name."""
    names = list_experiments(path)
    if name not in names:
        others = join_names(names, 8) or "none"
        raise drive_store.StoreError(f"no experiment {name!r} in {path}; there are: {others}")
    return drive_store.Swarm(drive_store.DriveStore(path, name), stale_after)


def get_experiment_status(path, name: str) -> dict:
    """The state of an experiment now. Raises StoreError if there is none of this name."""
    swarm = open_experiment(path, name)
    exp = read_experiment(swarm)
    checkpoints = sorted(swarm.store.dir.glob("nodes/*/checkpoints/round_*"))
    newest = max(checkpoints, key=lambda path: path.name, default=None)
    times = [row["timestamp"] for row in exp.rows]
    return {
        "experiment": exp.name,
        "current_round": exp.board.open_round,
        "current_stage": exp.rows[-1]["stage"] if exp.rows else 0,
        "num_active_peers": len(exp.with_status("alive")),
        "peer_ids": exp.board.workers,
        "coordinator": exp.status.get(drive_store.COORDINATOR_ID),  # None: there was never one
        "last_updated": max(times, default=None),
        "cumulative_rewards": dict.fromkeys(exp.board.workers, 0.0) | exp.totals,
        "latest_checkpoint": newest and str(newest),
        "duration_seconds": max(times, default=0.0) - min(times, default=0.0),
    }


def get_experiment_metrics(path, name: str):
    """One row per node, round and stage: a pandas.DataFrame if pandas is installed, else a list.

    Raises StoreError if there is no experiment of this name.
    """
    rows = read_experiment(open_experiment(path, name)).rows
    try:
        import pandas
    except Exception:  # it is not there, or does not fit the numpy that is
        return rows
    return pandas.DataFrame(rows)


def compare_experiments(path, names=None) -> list[dict]:
    """Compare experiments over seeds with their J = 0 baseline: all below `path`, or `names`."""
    return compare_arms(read_experiments(path, list_experiments(path) if names is None else names))


def read_experiments(path, names: list[str]) -> list[Experiment]:
    """Those of these experiments that have rewards."""
    experiments = [read_experiment(open_experiment(path, name)) for name in names]
    return [exp for exp in experiments if exp.rows]


# -------- The monitor -----------------------------------------------------------------------------


def run_reader(config, signals) -> int:
    """Run monitor or report, which change no experiment and load no model. Returns the exit
    status."""
    path = os.path.abspath(config.GDRIVE_PATH)
    if config.NODE_ROLE == "report":
        return report(path, config.environ.get("EXPERIMENT_NAME", "").strip() or "*")

    # Where somebody watches, the monitor waits for the experiment, and is drawn until it is over.
    name = config.EXPERIMENT_NAME
    is_watched = sys.stdout.isatty() or in_notebook()
    while is_watched and name not in list_experiments(path):
        others = join_names(list_experiments(path), 8) or "none"
        say(f"monitor: waiting for {path}/experiments/{name}; there are: {others}")
        signals.sleep(10)

    swarm = open_experiment(path, name, config.STALE_AFTER_SECONDS)
    swarm.store.on_event = lambda kind, text: say(f"monitor: {text}")
    swarm.store.sleep = signals.sleep
    cache = {}
    while True:
        exp = read_experiment(swarm, cache)
        screen = dashboard(exp, swarm.store)
        if sys.stdout.isatty():
            screen = f"\033[2J\033[H{screen}"  # in place of what was shown before
        elif is_watched:
            from IPython.display import clear_output

            clear_output(wait=True)
        say(screen)
        if exp.is_over or not is_watched:
            return 0
        signals.sleep(10)


def dashboard(exp: Experiment, store) -> str:
    """An experiment as text: nodes, last rounds, tasks, what looks wrong, one group."""
    current = exp.board.open_round
    workers = f"{len(exp.with_status('alive'))} of {len(exp.board.workers)} workers alive"
    lines = [f"{store.dir.absolute()}: round {current} of {exp.num_rounds}, {workers}"]

    # A line for each node: its status, the age of its session, its rewards and their curve.
    for node_id, status in exp.status.items():
        since = age(int(exp.board.sessions[node_id][:13]) / 1000)
        line = f"{node_id:16.16} {status:7} {since:>8}  "
        rows = exp.select(node_id=node_id)
        if rows:
            rewards = [row["reward"] or 0.0 for row in rows]
            line += f"{len(rows):5} rewards, in all {sum(rewards):8.2f}, last "
            line += f"{age(rows[-1]['timestamp'])} ago  {sparkline(moving_average(rewards))}"
        lines.append(line.rstrip())

    # The last rounds, rewards by task, and what looks wrong.
    for round_ in range(max(0, current - 2), current + 1):
        lines.append(format_round(round_, exp.num_rounds, exp.select(round=round_)))
    recent = exp.last_rounds(10)
    tasks = [f"{task} {reward:.2f}" for task, reward in reward_per_task(recent).items()]
    lines.append(f"by task: {', '.join(tasks)}")
    if recent and not has_signal(recent):
        lines.append(f"! {diagnose(recent)}")
    if names := exp.with_status("dead") + exp.with_status("failed"):
        lines.append(f"! look at logs/stdout.log of {join_names(names)}")
    for reason, count in store.invalid_files.most_common(3):
        lines.append(f"! unusable file, {count} times: {drive_store.printable(reason)}")

    # A group of the open round.
    at = drive_store.At(current)
    publishers = exp.board.reached("rollouts", at)
    with contextlib.suppress(drive_store.InvalidFileError):
        groups = store.fetch("rollouts", publishers[-1], at) if publishers else None
        if groups:
            lines += [f"{publishers[-1]} was asked:", *format_sample(groups[0])]
    return "\n".join(lines)


def format_sample(group: dict, before: dict | None = None) -> list[str]:
    """A question with its right answer, and three answers with their rewards, as lines; with
    `before`, beside what was answered then. Of a long question the last three lines remain."""
    width = max(20, shutil.get_terminal_size((80, 40)).columns - 30)
    text = " ".join(f"{group['prompt']}  (right: {group['answer']})".split())  # grids have lines
    lines = textwrap.wrap(drive_store.printable(text, 10**6), width, subsequent_indent="  ")[-3:]
    answers = {"": group} if before is None else {"before  ": before, "now     ": group}
    for label, answered in answers.items():
        for completion in answered["completions"][:3]:
            text = drive_store.printable(repr(completion["response"]), width)
            lines.append(f"  {label}{completion['reward']:4.2f}  {text}")
    return [f"? {lines[0].strip()}", *lines[1:]]


# -------- The report and the pictures -------------------------------------------------------------

ARM = ("NUM_TRAIN_SAMPLES", "NUM_TRANSPLANT_TREES", "EXTERNAL_FILTER", "LOCAL_OVERSAMPLE")
# Experiments that differ in more than these and in their arm are never compared.
MAY_DIFFER = ("SEED", "MAX_ROUNDS", "EXPERIMENT_NAME", "created_at", "maker")
# Student's t for a 95% interval of the mean of 2, 3, … 10 values, and of more.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.2)


def compare_arms(experiments: list[Experiment]) -> list[dict]:
    """One row for each arm, over its runs, the best first, with its gain over the J = 0 baseline.

    They are compared over the rounds that all have, or the longest run would have earned most.
    """
    common = min((exp.newest_round + 1 for exp in experiments), default=0)
    arms = defaultdict(list)  # (other settings, arm) -> its runs
    for exp in experiments:
        first_rows = [row for row in exp.rows if row["round"] < common]
        others = {name: exp.config[name] for name in exp.config if name not in ARM + MAY_DIFFER}
        family = json.dumps([others, len(exp.totals)], sort_keys=True)
        arms[family, exp.arm].append(replace(exp, rows=first_rows))

    rows = []
    for (family, arm), runs in arms.items():
        # The baseline trains on as many groups, all its own.
        num_external = runs[0].config["NUM_TRANSPLANT_TREES"]
        num_groups = runs[0].config["NUM_TRAIN_SAMPLES"] + num_external
        baseline = arms.get((family, f"{num_groups}/0"), []) if num_external > 0 else []
        gain, interval = gain_over(baseline, runs, common)
        rewards = [exp.reward_per_node for exp in runs]
        row = {
            "I/J": arm,
            "nodes": len(runs[0].totals),
            "runs": len(runs),
            "rounds": common,
            "reward per node": statistics.fmean(rewards),
            "sd": statistics.stdev(rewards) if len(rewards) > 1 else None,
            "held-out": mean(mean_of("held_out", exp.last_rounds(20)) for exp in runs),
            "completions": statistics.fmean(sum(exp.curve("completions")) for exp in runs),
            "gain": gain,
            "interval": interval,
            "by seed": [[exp.config["SEED"], exp.reward_per_node] for exp in runs],
            "experiments": [exp.name for exp in runs],
            "curves": [exp.curve() for exp in runs],
        }
        rows.append(row)
    return sorted(rows, key=lambda row: -row["reward per node"])


def gain_over(baseline: list[Experiment], runs: list[Experiment], num_rounds: int) -> tuple:
    """(mean gain, its 95% interval) over pairs of runs with equal seeds, (None, None) for fewer
    than two. A pair whose baseline has earned nearly nothing does not count."""
    rewards = {exp.config["SEED"]: exp.reward_per_node for exp in baseline}
    pairs = [(exp.reward_per_node, rewards.get(exp.config["SEED"], 0.0)) for exp in runs]
    gains = [ours / alone - 1 for ours, alone in pairs if alone > 0.01 * num_rounds]
    if len(gains) < 2:
        return None, None
    gain = statistics.fmean(gains)
    t = T_95[min(len(gains), 11) - 2]
    margin = t * statistics.stdev(gains) / len(gains) ** 0.5
    return gain, [gain - margin, gain + margin]


def report(path: str, pattern: str) -> int:
    """Compare the experiments whose names match. Print the tables, and write them to reports/, with
    the numbers as JSON and a picture. Returns the exit status."""
    experiments = read_experiments(path, fnmatch.filter(list_experiments(path), pattern))
    if not experiments:
        say(f"report: no rewards below {path} for EXPERIMENT_NAME={pattern}")
        return 1
    rows = compare_arms(experiments)
    text = format_report(experiments, rows)
    say(text)

    name = re.sub(r"[^A-Za-z0-9._-]", "", pattern)[:64].strip("._-") or "all"
    curves = {f"{row['I/J']} ({row['experiments'][0]})": row["curves"] for row in rows}
    files = {
        "md": text.encode(),
        "json": json.dumps(rows).encode(),
        "png": draw({"reward": curves}, say),
    }
    store = drive_store.DriveStore(path, "")
    with contextlib.suppress(OSError):  # the table is on the screen, and nobody wants to wait here
        store.make_dir("/reports")
        for suffix, data in files.items():
            if data:
                store.write(f"/reports/report_{name}.{suffix}", data)
                say(f"written: {path}/reports/report_{name}.{suffix}")
    return 0


def format_report(experiments: list[Experiment], rows: list[dict]) -> str:
    """Two tables in Markdown: the experiments and the arms."""
    runs = []
    for exp in experiments:
        run = {
            "experiment": exp.name,
            "rounds": exp.newest_round + 1,
            "nodes": len(exp.totals),
            "I/J": exp.arm,
            "model": drive_store.printable(exp.config.get("MODEL_NAME"), 24),
            "last": f"{age(exp.rows[-1]['timestamp'])} ago",
            "reward at the end": mean_of("reward", exp.last_rounds(20)),
        }
        runs.append(run)

    columns = ("I/J", "nodes", "runs", "reward per node", "sd", "held-out", "completions")
    arms = []
    for row in rows:
        arm = {column: row[column] for column in columns} | {"gain": None}
        if row["gain"] is not None:
            arm["gain"] = "{:+.0%} ({:+.0%} to {:+.0%})".format(row["gain"], *row["interval"])
        arms.append(arm | {"experiments": join_names(row["experiments"], 1)})

    form = {"headers": "keys", "tablefmt": "github", "floatfmt": ".2f", "missingval": ""}
    over = f"Over the first {rows[0]['rounds']} rounds, which all of them have:"
    return "\n\n".join([tabulate(runs, **form), over, tabulate(arms, **form)])


def write_picture(swarm, log) -> None:
    """Draw reports/EXPERIMENT.png if matplotlib is installed: the reward of the nodes with their
    mean and spread, the reward per task, and the shares that explain it."""
    store = swarm.store
    exp = read_experiment(swarm)
    # Each node begins at its own first round; a late joiner's curve is drawn from 0.
    nodes = {node_id: [exp.curve(node_id=node_id)] for node_id in exp.totals}
    nodes["mean ± sd over nodes"] = [curve for [curve] in nodes.values()]
    tasks = {task: [exp.curve(f"reward_{task}")] for task in reward_per_task(exp.rows)}
    counts = zip(exp.curve("informative_local"), exp.curve("groups"), strict=True)
    shares = {
        "own groups that are informative": [[some / max(1, groups) for some, groups in counts]],
        "answers in <answer> tags": [exp.curve("answer_tag_rate")],
        "truncated answers": [exp.curve("truncated_rate")],
    }
    panels = {f"{exp.name}: reward": nodes, "by task": tasks, "shares": shares}

    picture = draw(panels, log.info)
    if picture and store.has_dir("/reports"):
        store.write(f"/reports/{exp.name}.png", picture)
        log.info(f"picture: {store.root.absolute()}/reports/{exp.name}.png")


def draw(panels: dict, inform) -> bytes | None:
    """`plot`, shown below the cell of a notebook. A picture that cannot be drawn ends nothing."""
    try:
        picture = plot(panels)
    except Exception as error:  # the package may be missing, or broken in any way
        inform(f"no picture: pip install matplotlib ({type(error).__name__}: {error})")
        return None
    if in_notebook():
        from IPython.display import Image, display

        display(Image(picture))
    return picture


def plot(panels: dict) -> bytes:
    """{title: {label: curves}} as PNG. Of several curves, those of seeds or nodes, the mean is
    drawn with a band of one standard deviation. All are smoothed."""
    from matplotlib.figure import Figure

    figure = Figure((5 * len(panels) + 2, 4), dpi=150, layout="constrained")
    for number, (title, lines) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(1, len(panels), number)
        for label, curves in lines.items():
            length = min(map(len, curves))  # one run may be longer than another
            smooth = numpy.array([moving_average(curve)[:length] for curve in curves])
            center, spread = smooth.mean(0), smooth.std(0)
            label = drive_store.printable(label, 32).replace("$", "")
            axis.plot(center, label=label, alpha=0.7, linewidth=1.2 if len(curves) == 1 else 2.5)
            axis.fill_between(range(length), center - spread, center + spread, alpha=0.15)
        axis.set(title=title.replace("$", ""), xlabel="round", ylim=(0, 1.02))
        if lines:  # a node with I = 0 has no tasks
            axis.legend(fontsize=6)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


# -------- Words and numbers, also for sapo.py -----------------------------------------------------


def say(text: str) -> None:
    """Print for people. A full disk or a reader that has gone, as in `| head`, ends nothing."""
    try:
        with tqdm.tqdm.external_write_mode():  # on a terminal the progress bar makes room
            print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # Python would complain when it exits
    except (OSError, ValueError):
        pass


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel. (Its package may be imported without one.)"""
    if not {"ipykernel", "IPython"} <= sys.modules.keys():
        return False
    return sys.modules["IPython"].get_ipython() is not None


def mean(values) -> float | None:
    """Mean of the values that are not None; None if there are none. [1, None, 2] -> 1.5."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def mean_of(metric: str, rows: list[dict]) -> float | None:
    """Mean of a metric over rows; None if none of them has it."""
    return mean(row.get(metric) for row in rows)


def reward_per_task(rows: list[dict]) -> dict[str, float]:
    """{task: mean reward}, the best first, 20 at most."""
    names = sorted({name for row in rows for name in row if name.startswith("reward_")})[:20]
    means = {name.removeprefix("reward_"): mean_of(name, rows) for name in names}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def moving_average(values: list[float]) -> list[float]:
    """Running mean over a tenth of the values, at most 100."""
    window = max(1, min(100, len(values) // 10))
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def sparkline(values: list[float], width: int = 24) -> str:
    """A curve of values in 0 to 1 as at most `width` characters. [0, 0.5, 1] -> "▁▅█"."""
    columns = min(width, len(values))
    ends = [i * len(values) // columns for i in range(columns + 1)]
    heights = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(ends)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * height))] for height in heights)


def join_names(names: list[str], limit: int = 20) -> str:
    """The first names, for a sentence. (["a", "b", "c"], 2) -> "a, b and 1 more"."""
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def age(timestamp: float) -> str:
    """How long ago that was: "02:30", or "2:13:20" for hours."""
    return tqdm.tqdm.format_interval(max(0.0, time.time() - timestamp))
