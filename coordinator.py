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
from collections import Counter, defaultdict
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
    run.round_ends.append(run.swarm.looked_at)
    run.log.info(format_round(t, run.config.MAX_ROUNDS, rows, run.round_ends))
    log_changes(run, t, rows)


# -------- The line of a round ---------------------------------------------------------------------


def log_changes(run, t: int, rows: list[dict]) -> None:
    """Say who has joined or left the swarm since the round before, because the mean changes then.
    A node has left if it has no reward of this round and is not alive."""
    here = {row["node_id"] for row in rows}
    left = {n for n in run.present - here if not run.swarm.is_alive(n)}
    came = here - run.present if run.present else ()  # in the first round nobody joins
    changes = [f"{node_id} joined in round {t}" for node_id in sorted(came)]
    changes += [f"{node_id} has left ({run.swarm.status(node_id)})" for node_id in sorted(left)]
    run.present = (run.present | here) - left
    if changes:
        run.log.event("nodes", f"{', '.join(changes)}, {len(run.present)} nodes now")


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


def reward_curve(rows: list[dict]) -> list[float]:
    """The mean reward of each round that has any, in order."""
    by_round = column_by("round", rows)
    means = [mean(by_round[round_]) for round_ in sorted(by_round)]
    return [reward for reward in means if reward is not None]


def diagnose(rows: list[dict], history=None, checkpoints=()) -> str:
    """What happened in these rows, in a sentence, and the variable that may help.

    history: all rows since the beginning, where `rows` are the last ones. checkpoints: the stages
    after which those that are kept were written, ascending.
    """
    curve = reward_curve(rows)
    if not curve:
        return "no rewards, because nothing was generated (NUM_TRAIN_SAMPLES=0)"

    # The last 20 rounds against the first 20, or one half against the other.
    part = min(20, (len(curve) + 1) // 2)
    first = statistics.fmean(curve[:part])
    last = statistics.fmean(curve[-part:])
    change = f"mean reward {first:.2f} -> {last:.2f}"

    # Is it worse than the very first round, which was generated before any update, and by more than
    # chance explains? The first 20 may hide that, where the policy has collapsed at once.
    history = history or rows
    untrained = [row for row in history if row["round"] == history[0]["round"]]
    before = mean_of("reward", untrained) or 0.0
    num_completions = sum(row.get("completions") or 0 for row in untrained)
    if before - last > 0.05 + max(1, num_completions) ** -0.5:  # two standard errors
        advice = "lower LEARNING_RATE"
        if checkpoints:
            advice += f"; the checkpoint after round {checkpoints[0].round} is there"
        return f"worse than before training ({before:.2f} -> {last:.2f}): {advice}"

    if has_signal(rows):
        verdict = "learned" if last > first + 0.05 else "little was learned"
        return f"{verdict}: {change} (first and last {part} of {len(curve)})"

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
    has_peers = config.NUM_TRANSPLANT_TREES > 0 and num_workers > 1
    lacks = {
        f"{num_workers} workers came, of {config.NUM_WORKERS}": num_workers < config.NUM_WORKERS,
        f"no group gave a gradient: {diagnose(rows)}": not has_signal(rows),
        "no group of a peer was trained on": has_peers and not mean_of("external_groups", rows),
    }
    problems += [text for text, holds in lacks.items() if holds]
    run.log.event("check", "; ".join(problems) or "passed")
    return 1 if problems else 0


# -------- Reading an experiment, also from notebooks ----------------------------------------------

ARM = ("NUM_TRAIN_SAMPLES", "NUM_TRANSPLANT_TREES", "EXTERNAL_FILTER", "LOCAL_OVERSAMPLE")
NEEDED = (*ARM, "SEED", "MAX_ROUNDS")  # of config.json
FIRST_LOOK_BYTES = 16 << 20  # of all metrics.jsonl: with 4 nodes about 4000 rounds, with 128 120


@dataclass
class Experiment:
    """All that readers show of an experiment, read at one moment."""

    name: str
    config: dict  # the settings that it began with; 1 for one of NEEDED that is missing
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

    @property
    def sick(self) -> list[str]:
        """The nodes that have failed, then those that are dead, also the coordinator."""
        return [n for sick in ("failed", "dead") for n in self.status if self.status[n] == sick]

    def summary(self, node_id: str) -> dict:
        """The line of a node in the monitor. The reward is that of ten rounds."""
        rows = self.select(node_id=node_id)
        curve = self.curve(node_id=node_id)[rows[0]["round"] :] if rows else []
        return {
            "node": node_id[:16],
            "status": self.status[node_id],
            "round": self.round_of(node_id),
            "reward": mean_of("reward", rows[-10:]),
            "total": self.totals.get(node_id),
            "last reward": f"{age(rows[-1]['timestamp'])} ago" if rows else "",
            "curve": sparkline(curve),
        }

    def with_status(self, status: str) -> list[str]:
        """The workers that are alive, done, stopped, failed or dead."""
        return [node_id for node_id in self.board.workers if self.status[node_id] == status]

    def select(self, **columns) -> list[dict]:
        """The rows with these values."""
        return [row for row in self.rows if columns.items() <= row.items()]

    def last_rounds(self, number: int) -> list[dict]:
        """The rows of the newest rounds that have any."""
        return [row for row in self.rows if row["round"] > self.newest_round - number]

    def curve(self, metric: str = "reward", **columns) -> list[float | None]:
        """The metric's mean over the rows with these values, for each round from 0 to the newest.
        None where there are none: nobody was there, or the task was not asked."""
        by_round = column_by("round", self.select(**columns), metric)
        return [mean(by_round[round_]) for round_ in range(self.newest_round + 1)]

    def round_of(self, node_id: str) -> int:
        """The round in which a node is, -1 if it has entered none."""
        rounds = [at.round for (_, name), at in self.board.progress.items() if name == node_id]
        return max(rounds, default=-1)

    @property
    def arm(self) -> str:
        """What is compared: I/J. "4/4", "8/0 x4" (LOCAL_OVERSAMPLE), "4/4 unfiltered"."""
        own, external, is_filtered, factor = [self.config[name] for name in ARM]
        name = f"{own}/{external}" if factor == 1 else f"{own}/{external} x{factor}"
        return name if is_filtered else f"{name} unfiltered"

    @property
    def totals(self) -> dict[str, float]:
        """{node: cumulative reward} of the nodes that have submitted rewards. A row of a log tells
        it, also that of earlier rows, which may not have been read."""
        totals = {}
        for row in self.rows:
            total = totals.get(row["node_id"], 0.0) + (row["reward"] or 0.0)
            totals[row["node_id"]] = row.get("total_reward", total)
        return totals


def read_experiment(swarm, logs: dict | None = None) -> Experiment:
    """Read an experiment: all its reward files. Or with `logs`, the same dict in each call, only
    what was appended to metrics.jsonl of its nodes since the call before."""
    store = swarm.store
    board = swarm.look()
    status = {}
    rows = {}
    for node_id in sorted(board.sessions):
        status[node_id] = swarm.status(node_id)  # first: one that is done has all its rewards there
        if logs is None:
            stages = store.list_stages("rewards", node_id, lenient=True)
            found = [
                store.read_reward(node_id, at) for at in stages if at.round <= board.open_round
            ]
        else:
            found = read_metrics(store, node_id, logs, FIRST_LOOK_BYTES // len(board.sessions))
        for row in filter(None, found):
            if 0 <= row["round"] <= board.open_round:
                rows.setdefault((row["round"], row["stage"], node_id), row)
    config = dict.fromkeys(NEEDED, 1) | (store.read_valid("config.json") or {})
    return Experiment(store.dir.name, config, board, status, [rows[key] for key in sorted(rows)])


def read_metrics(store, node_id: str, logs: dict, max_bytes: int) -> list[dict]:
    """The rows of a node's metrics.jsonl. logs: {node: (position, rows)}, what was read before. Of
    what is new the last max_bytes are read."""
    position, rows = logs.get(node_id, (0, []))
    path = store.resolve(f"nodes/{node_id}/logs/metrics.jsonl")
    try:
        with open(path, "rb", opener=drive_store.open_no_link) as file:
            position = max(position, file.seek(0, os.SEEK_END) - max_bytes)
            file.seek(position)
            data = file.read(max_bytes)
    except OSError:  # it is not there yet, or cannot be read now
        return rows

    # The last line may not be whole yet. One that is torn, or a stranger's, is skipped. No row is
    # shorter than 64 bytes.
    end = data.rfind(b"\n") + 1
    for line in data[:end].splitlines()[-max_bytes // 64 :]:
        with contextlib.suppress(drive_store.InvalidFileError):
            row = drive_store.parse_json(line[: drive_store.MAX_METADATA_BYTES])
            drive_store.require(row, {"round": int, "stage": int})
            at = drive_store.At(row["round"], row["stage"])
            rows.append(drive_store.parse_reward(row, node_id, at))
    logs[node_id] = (position + end, rows)
    return rows


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
    rows = [row | {"experiment": name, "my_reward": row["reward"]} for row in rows]
    try:
        import pandas
    except Exception:  # it is not there, or does not fit the numpy that is
        return rows
    return pandas.DataFrame(rows)


def compare_experiments(path, names=None) -> list[dict]:
    """Compare experiments over seeds with their J = 0 baseline: all below `path`, or `names`."""
    names = list_experiments(path) if names is None else names
    return compare_arms(read_experiments(path, names))[0]


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
    logs = {}
    for look in itertools.count():
        exp = read_experiment(swarm, logs)
        screen = format_screen(exp, swarm)
        if sys.stdout.isatty():
            screen = f"\033[2J\033[H{screen}"  # in place of what was shown before
        elif is_watched:
            from IPython.display import clear_output

            clear_output(wait=True)
        say(screen)

        # A notebook shows the picture below the text. Beside a terminal it is a file, which a
        # browser or Google Drive shows, made every minute, and named once.
        if in_notebook():
            draw(picture_of(exp), say)
        elif is_watched and look % 6 == 0:
            inform = say if look == 0 else lambda text: None
            save(path, f"monitor_{name}.png", draw(picture_of(exp), inform), inform)
        if exp.is_over or not is_watched:
            return 0
        signals.sleep(10)


def format_screen(exp: Experiment, swarm) -> str:
    """An experiment as text that fits the screen. What looks wrong comes first and is never cut
    off; then where the experiment stands, its nodes, its last rounds, its tasks, and a group."""
    width, height = shutil.get_terminal_size((80, 24))
    board, current = exp.board, exp.board.open_round
    lines = []
    for warning in find_warnings(exp, swarm):
        lines += textwrap.wrap(f"! {warning}", width, subsequent_indent="  ", max_lines=3)

    # Where it stands. Who has submitted the reward of a round has also published it.
    stage = max((at.stage for at in board.progress.values() if at.round == current), default=0)
    alive = exp.with_status("alive")
    begun_at = exp.config.get("created_at")
    begun = age(begun_at) if drive_store.is_finite_number(begun_at) else "?"  # a stranger's
    stands = (
        f"{exp.name:.24}: round {current} of {exp.num_rounds}, stage {stage}, begun {begun} ago, "
        f"{len(alive)} of {len(board.workers)} workers alive"
    )
    lines += textwrap.wrap(stands, width)
    published_at = {n: at for (kind, n), at in board.progress.items() if kind == "rollouts"}
    counts = []
    for t in range(max(0, current - 2), current + 1):
        submitted = {row["node_id"] for row in exp.select(round=t)}
        published = submitted | {n for n, at in published_at.items() if at.round == t}
        counts.append(f"{t}: {len(published)}/{len(submitted)}")
    lines.append(f"nodes with rollouts/rewards of round {', '.join(counts)}")

    # Below the nodes: the last rounds, with the time that is left, and the tasks.
    ends = column_by("round", exp.last_rounds(11), "timestamp")
    round_ends = [max(ends[t]) for t in sorted(ends)]
    below = [
        format_round(t, exp.num_rounds, exp.select(round=t), round_ends) for t in sorted(ends)[-2:]
    ]
    rewards = reward_per_task(exp.last_rounds(10)).items()
    tasks = ", ".join(f"{task} {reward:.2f}" for task, reward in rewards)
    below += textwrap.wrap(f"by task: {tasks}", width, subsequent_indent="  ", max_lines=3)

    # A line for each node. Of many the sick, the slowest and the newest are shown.
    room = max(0, height - 4 - len(lines) - len(below))
    slowest = sorted(alive, key=exp.round_of)
    newest = sorted(exp.status, key=board.sessions.get, reverse=True)
    ranked = dict.fromkeys([*exp.sick[: room // 2], *slowest[: room // 4], *newest])
    shown = sorted(list(ranked)[:room], key=lambda n: (n not in exp.sick, exp.round_of(n), n))
    lines += tabulate(map(exp.summary, shown), "keys", "plain", floatfmt=".2f").splitlines()
    if others := Counter(exp.status[node_id] for node_id in exp.status.keys() - set(shown)):
        counts = [f"{count} {status}" for status, count in others.most_common()]
        lines.append(f"and {others.total()} more: {', '.join(counts)}")
    lines += below

    # A group of the newest file.
    newest = max(published_at, key=lambda n: (published_at[n], n), default=None)
    with contextlib.suppress(drive_store.InvalidFileError):
        if groups := newest and swarm.store.fetch("rollouts", newest, published_at[newest]):
            lines += [f"{newest} was asked:", *format_sample(groups[0])]
    return "\n".join(line[:width].rstrip() for line in lines[: height - 2])


def find_warnings(exp: Experiment, swarm) -> list[str]:
    """What looks wrong, as sentences."""
    warnings = []
    if exp.sick:
        names = join_names([f"{node_id} {exp.status[node_id]}" for node_id in exp.sick], 4)
        warnings.append(f"{names}: look at logs/stdout.log in nodes/{exp.sick[0]}")

    # Does anything move? A session begins with its time.
    moves = [int(session[:13]) / 1000 for session in exp.board.sessions.values()]
    moves += [row["timestamp"] for row in exp.last_rounds(1)] + list(swarm.moved_at.values())
    moved_at = max(moves, default=time.time())
    if not exp.is_over and time.time() - moved_at > swarm.stale_after:
        warnings.append(f"standstill: nothing has moved for {age(moved_at)}")

    # Is anything learned, and can all files be read?
    recent = exp.last_rounds(10)
    diagnosis = diagnose(recent, exp.rows)
    if recent and (diagnosis.startswith("worse") or not has_signal(recent)):
        warnings.append(diagnosis)
    for reason, count in swarm.store.invalid_files.most_common(3):
        warnings.append(f"unusable file, {count} times: {drive_store.printable(reason)}")
    return warnings


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


# -------- The report ------------------------------------------------------------------------------

# In these the runs of an arm may differ, besides the two that name it.
MAY_DIFFER = ("SEED", "MAX_ROUNDS", "EXPERIMENT_NAME", "TEST_MODE", "created_at", "maker")
# Student's t for a 95% interval of the mean of 2, 3, … 10 values, and of more.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def compare_arms(experiments: list[Experiment]) -> tuple[list[dict], list[str]]:
    """(rows, notes). A row for each arm, over its seeds, the best first, with its gain over the
    J = 0 baseline; and what the rows leave out or cannot tell, as sentences.

    They are compared over the rounds that all have, or the longest run would have earned most.
    """
    # Tests and runs that ended early are left out.
    compared, notes = [], []
    num_rounds = {exp.name: len({row["round"] for row in exp.rows}) for exp in experiments}
    for exp in experiments:
        is_short = num_rounds[exp.name] < max(num_rounds.values()) / 2
        if is_short or exp.config.get("TEST_MODE"):
            reason = "fewer than half of the longest run" if is_short else "TEST_MODE"
            notes.append(f"{exp.name} is left out: {num_rounds[exp.name]} rounds, {reason}")
        else:
            compared.append(exp)

    # An arm is named by I and J, and by the other settings that are not equal in all runs.
    common = min((exp.newest_round + 1 for exp in compared), default=0)
    settings = [exp.config | {"nodes": len(exp.totals)} for exp in compared]
    names = {name for each in settings for name in each} - {*ARM, *MAY_DIFFER}
    names = [n for n in sorted(names) if len({str(each.get(n)) for each in settings}) > 1]
    arms = defaultdict(list)  # (I/J, other settings) -> its runs
    for exp, each in zip(compared, settings, strict=True):
        rows = [row for row in exp.rows if row["round"] < common]
        others = " ".join(f"{name}={drive_store.printable(each.get(name), 999)}" for name in names)
        arms[exp.arm, others].append(replace(exp, rows=rows))
        present = {(row["node_id"], row["round"]) for row in rows}
        if num_missing := common * len(exp.totals) - len(present):
            notes.append(f"{exp.name} has gaps: {num_missing} rounds of its nodes do not count")
    if differing := drive_store.printable(", ".join(names), 200):
        notes.append(f"runs that differ in {differing} are never averaged, nor is a gain over them")
    if unknown := join_names([exp.name for exp in compared if not exp.config.get("code")]):
        notes.append(f"of which code is not known (a pasted cell, an earlier version): {unknown}")

    rows = []
    for (arm, others), runs in arms.items():
        # The baseline trains on as many groups, all its own.
        num_external = runs[0].config["NUM_TRANSPLANT_TREES"]
        alone = f"{runs[0].config['NUM_TRAIN_SAMPLES'] + num_external}/0"
        baseline = arms.get((alone, others), []) if num_external > 0 else []
        rewards = reward_by_seed(runs, common)
        # The gain of each seed that both have. A baseline that has earned nearly nothing is none.
        earned = reward_by_seed(baseline, common)
        seeds = [seed for seed in rewards if earned.get(seed, 0.0) > 0.01 * common]
        gains = [rewards[seed] / earned[seed] - 1 for seed in seeds]
        row = {
            "I/J": f"{arm} {others}".strip(),
            "nodes": len(runs[0].totals),
            "runs": len(runs),
            "rounds": common,
            "reward per node": statistics.fmean(rewards.values()),
            "sd": statistics.stdev(rewards.values()) if len(rewards) > 1 else None,
            "held-out": mean(mean_of("held_out", exp.last_rounds(20)) for exp in runs),
            "completions": round(mean(sum(filter(None, exp.curve("completions"))) for exp in runs)),
            "gain": statistics.fmean(gains) if len(gains) > 1 else None,
            "interval": interval_of(gains) if len(gains) > 2 else None,
            "by seed": list(map(list, rewards.items())),
            "experiments": [exp.name for exp in runs],
            "curves": [exp.curve() for exp in runs],
        }
        rows.append(row)
        if num_external > 0 and len(gains) < 3:
            notes.append(
                f"{drive_store.printable(row['I/J'], 60)} has {len(gains)} seeds with a run of its "
                f"baseline {alone} that has earned something: a gain takes 2, an interval 3"
            )
    return sorted(rows, key=lambda row: -row["reward per node"]), notes


def reward_by_seed(runs: list[Experiment], num_rounds: int) -> dict[int, float]:
    """{seed: reward per node}, the paper's metric divided by the number of nodes. Of a round it is
    the mean over the nodes that were there; a round without any counts as the others' mean. Several
    runs of one seed are averaged."""
    rows = []
    for exp in runs:
        num_stages = num_rounds * exp.config.get("MAX_STAGES", 1)
        reward = num_stages * (mean(exp.curve()) or 0.0)
        rows.append({"seed": exp.config["SEED"], "reward": reward})
    return {seed: mean(rewards) for seed, rewards in column_by("seed", rows).items()}


def interval_of(gains: list[float]) -> list[float]:
    """The 95% interval of their mean."""
    margin = T_95[min(len(gains), 11) - 2] * statistics.stdev(gains) / len(gains) ** 0.5
    return [mean(gains) - margin, mean(gains) + margin]


def report(path: str, pattern: str) -> int:
    """Compare the experiments whose names match. Print the table, and write it to reports/, with
    the numbers as JSON and a picture; and all rows of each experiment as JSON, for notebooks.
    Returns the exit status."""
    experiments = read_experiments(path, fnmatch.filter(list_experiments(path), pattern))
    if not experiments:
        say(f"report: no rewards below {path} for EXPERIMENT_NAME={pattern}")
        return 1
    rows, notes = compare_arms(experiments)
    text = format_report(rows, notes)
    say(text)

    # Arms beside one another, and their gains.
    curves = [(row["I/J"], row["curves"]) for row in rows]
    known = [row for row in rows if row["interval"]]
    arms = [drive_store.printable(row["I/J"], 40) for row in known]
    gains = [100 * row["gain"] for row in known]
    margins = [100 * (row["interval"][1] - row["gain"]) for row in known]
    bars = {"fmt": "o", "color": COLORS[1], "linewidth": 3, "capsize": 6}
    panels = {"reward, mean ± sd over runs": lambda axis: draw_curves(axis, curves)}
    if known:
        title = "gain over J = 0 in %, 95% interval"
        panels[title] = lambda axis: axis.errorbar(gains, arms, xerr=margins, **bars)
    name = re.sub(r"[^A-Za-z0-9._-]", "", pattern)[:64].strip("._-") or "all"
    save(path, f"report_{name}.md", text.encode(), say)
    save(path, f"report_{name}.json", json.dumps(rows).encode(), say)
    save(path, f"report_{name}.png", draw(panels, say), say)
    for exp in experiments:
        about = {"experiment": exp.name, "config": exp.config, "totals": exp.totals}
        save(path, f"{exp.name}.json", json.dumps(about | {"rows": exp.rows}).encode(), say)
    return 0


def format_report(rows: list[dict], notes: list[str]) -> str:
    """A table of the arms in Markdown, with the notes below it."""
    columns = (
        "nodes",
        "runs",
        "rounds",
        "reward per node",
        "sd",
        "held-out",
        "completions",
        "gain",
    )
    table = []
    for row in rows:
        low, high = row["interval"] or (None, None)
        arm = {"I/J": drive_store.printable(row["I/J"], 60)}
        arm |= {column: row[column] for column in columns} | {"from": low, "to": high}
        table.append(arm | {"experiments": join_names(row["experiments"], 1)})
    form = [".2f"] * len(columns) + ["+.0%"] * 3 + [""]
    text = tabulate(table, "keys", "github", floatfmt=form, missingval="")
    return "\n- ".join([f"{text}\n", *notes])


# -------- The pictures ----------------------------------------------------------------------------

# Of Okabe and Ito, who chose them so that the colour-blind tell them apart, without the yellow.
COLORS = ("black", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C7A00")
STYLES = ("-", "--", ":")


def write_picture(exp: Experiment, root, log) -> None:
    """Draw reports/EXPERIMENT.png if matplotlib is installed."""
    save(root, f"{exp.name}.png", draw(picture_of(exp), log.info), log.info)


def save(root, name: str, data: bytes | None, inform) -> None:
    """Write a file into reports/, whole or not at all, and say so. Where that folder is missing or
    cannot be written there is none: nobody waits for it."""
    store = drive_store.DriveStore(root, "")
    with contextlib.suppress(OSError):
        if data and store.has_dir("/reports"):
            store.write(f"/reports/{name}", data)
            inform(f"written: {store.root.absolute()}/reports/{name}")


def picture_of(exp: Experiment) -> dict:
    """The panels of an experiment's picture, for `draw`."""
    # Up to eight nodes have a colour and a name, of more all are grey.
    curves = {node_id: [exp.curve(node_id=node_id)] for node_id in sorted(exp.totals)}
    nodes = [(f"mean ± sd of {len(curves)} nodes", sum(curves.values(), []))]
    nodes += [(node_id if len(curves) <= 8 else None, curves[node_id]) for node_id in curves]

    # By task, the best first, and what explains the reward.
    tasks = [(task, [exp.curve(f"reward_{task}")]) for task in reward_per_task(exp.rows)]
    counts = zip(exp.curve("informative_local"), exp.curve("groups"), strict=True)
    shares = [
        (
            "own groups that are informative",
            [[some / all_ if all_ else None for some, all_ in counts]],
        ),
        ("answers in <answer> tags", [exp.curve("answer_tag_rate")]),
        ("answers that are cut off", [exp.curve("truncated_rate")]),
    ]

    # Who was there, and the last rewards.
    nodes_of = column_by("round", exp.rows, "node_id")
    rounds = range(min(nodes_of, default=0), exp.newest_round + 1)
    present = [len(set(nodes_of[t])) for t in rounds]
    order = sorted(exp.totals, key=exp.totals.get)  # the highest on top
    totals = [exp.totals[node_id] for node_id in order]
    rewards = [row["reward"] for row in exp.last_rounds(20) if row["reward"] is not None]
    return {
        f"{exp.name}: reward": lambda axis: draw_curves(axis, nodes),
        "reward by task": lambda axis: draw_curves(axis, tasks),
        "what explains it": lambda axis: draw_curves(axis, shares),
        "nodes that submitted each round": lambda axis: axis.stairs(
            present, [*rounds, rounds.stop], fill=True, color=COLORS[6]
        ),
        "cumulative reward": lambda axis: axis.barh(order, totals, color=COLORS[6]),
        "rewards of the last 20 rounds": lambda axis: axis.hist(rewards, 20, color=COLORS[6]),
    }


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
    """{title: function that draws on an axis} as PNG, three in a row."""
    import matplotlib.figure

    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)  # rounded up
    file = io.BytesIO()
    # A name may hold a "$".
    with matplotlib.rc_context({"text.parse_math": False, "ytick.labelsize": 7}):
        figure = matplotlib.figure.Figure(
            (5.5 * num_columns, 4.5 * num_rows), dpi=110, layout="constrained"
        )
        for number, (title, draw_on) in enumerate(panels.items(), start=1):
            axis = figure.add_subplot(num_rows, num_columns, number, title=title)
            draw_on(axis)
        figure.savefig(file, format="png")
    return file.getvalue()


def draw_curves(axis, lines: list[tuple]) -> None:
    """Draw (label, curves) pairs, smoothed. Of several curves, those of seeds or nodes, the mean is
    drawn with a band of one standard deviation. A line without a label is grey. Where a curve has
    None there is a gap."""
    for number, (label, curves) in enumerate(lines):
        smooth = list(itertools.zip_longest(*map(moving_average, curves)))  # some may be longer
        values = numpy.array(smooth, dtype=float).reshape(len(smooth), len(curves))
        values = numpy.ma.masked_invalid(values)  # (round, curve)
        center, spread = values.mean(1), values.std(1)
        style = {
            "label": drive_store.printable(label, 40),
            "color": COLORS[number % 8],
            "linestyle": STYLES[number // 8 % 3],
            "linewidth": 2.5 if len(curves) > 1 else 1.3,
            "marker": ".",
            "markersize": 3,
        }
        if label is None:
            style = {"color": "0.8", "linewidth": 0.5, "zorder": 1}
        axis.plot(center, **style)
        rounds = range(len(center))
        axis.fill_between(
            rounds, center - spread, center + spread, color=style["color"], alpha=0.15
        )
    axis.set(xlabel="round", ylim=(0, None))  # the top fits the values
    if lines:  # a node with I = 0 has no tasks
        axis.legend(fontsize=7)


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


def moving_average(values: list) -> list:
    """Running mean over a tenth of the values, at most 100. What is None stays None."""
    window = max(1, min(100, len(values) // 10))
    smooth = [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    return [None if value is None else near for value, near in zip(values, smooth, strict=True)]


def sparkline(values: list, width: int = 24) -> str:
    """A curve of values in 0 to 1 as at most `width` characters. [0, 0.5, None, 1] -> "▁▅ █"."""
    columns = min(width, len(values)) or 1
    ends = [i * len(values) // columns for i in range(columns + 1)]
    heights = [mean(values[a:b]) for a, b in itertools.pairwise(ends)]
    levels = [None if height is None else min(7, int(8 * height)) for height in heights]
    return "".join(" " if level is None else "▁▂▃▄▅▆▇█"[level] for level in levels)


def join_names(names: list[str], limit: int = 20) -> str:
    """The first names, for a sentence. (["a", "b", "c"], 2) -> "a, b and 1 more"."""
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def age(timestamp: float) -> str:
    """How long ago that was: "02:30", or "2:13:20" for hours."""
    return tqdm.tqdm.format_interval(max(0.0, time.time() - timestamp))
