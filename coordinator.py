"""Which process opens the next round, and when?

In a swarm without a coordinator, the first worker to finish the open round opens the next round.

A *coordinator* is an optional process that opens the rounds instead. It does not train and needs no
model. While it is alive, the workers wait for it. By default, it opens the next round when all
live workers in step (see `Board.in_step`) have submitted their rewards, or an interval
(COORDINATOR_ROUND_INTERVAL, 60 s) after the first reward.
"""

import ast
import contextlib
import fnmatch
import functools
import hashlib
import io
import json
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy  # numpy and tqdm come with transformers
import tqdm
from tabulate import tabulate  # comes with reasoning-gym

if "DriveStore" in globals():  # the four modules pasted into one notebook cell
    drive_store = sys.modules[__name__]
else:
    import drive_store


def wait_for_round(run, next_own: int) -> int:
    """Wait until this process may enter a round, and return that round.

    `next_own` is the round after the last round that this process has finished. Return
    - the open round, if it is `next_own` or later and nodes of other processes have ever joined
      (a process that was always alone repeats the rounds since its checkpoint after a crash);
    - otherwise `next_own`, once `opening_delay` seconds have passed without a live coordinator.
    Raise Stopped if the process should end.
    """
    swarm = run.swarm
    while True:
        board = swarm.check_in(run.signals)  # poll and heartbeat
        if swarm.others() and board.open_round >= next_own:
            return board.open_round

        # At first, `coordinator_seen_at` is the time when this process joined.
        if swarm.is_alive(drive_store.COORDINATOR_ID):
            swarm.coordinator_seen_at = swarm.looked_at
        elif swarm.looked_at - swarm.coordinator_seen_at >= opening_delay(run):
            return next_own
        else:
            log_missing_workers(run)
        swarm.sleep()


def opening_delay(run) -> float:
    """Return how many seconds to wait without a live coordinator before opening a round.

    The delay is 0 unless workers are missing or a coordinator may be about to open the round.
    """
    if lacks_workers(run):
        return run.config.COORDINATOR_ROUND_INTERVAL  # 60 by default

    # A coordinator that has joined may be alive even if its heartbeat could not be read.
    if drive_store.COORDINATOR_ID in run.swarm.board.sessions:
        return 2.0

    # A coordinator that starts with the workers can join only after a worker has created the
    # experiment, perhaps during round 0. Before round 1, give it half a second from when this
    # process joined.
    return 0.5 if run.last_round == 0 else 0.0


def lacks_workers(run) -> bool:
    """Return whether, in this process's first round, fewer than NUM_WORKERS workers are alive."""
    wanted = run.config.NUM_WORKERS
    workers = run.swarm.board.workers
    if not run.is_first_round or wanted == 0:
        return False
    # Count the workers first, because checking which of them are alive reads a file per worker.
    return len(workers) < wanted or sum(map(run.swarm.is_alive, workers)) < wanted


def run_coordinator(run) -> None:
    """Open one round after another. Raise Stopped if the process should end."""
    swarm = run.swarm
    swarm.join(coordinator_facts(run), folders=["logs"])
    final_round = run.config.MAX_ROUNDS - 1
    t = -1  # the newest round that this process has entered
    interval_start = 0.0  # when the interval of round t started

    while True:
        run.log.flush(run.store)
        board = swarm.check_in(run.signals)

        # Enter round 0, or a newer round that an earlier coordinator or a worker has opened.
        newest = max(0, board.open_round)
        if t < newest:
            swarm.enter(newest)
            t = newest
            interval_start = swarm.looked_at

        # The interval starts with the round's first reward, because a round may take many
        # intervals. With ROUND_ADVANCE=time, this holds only for round 0, in which models may
        # take minutes to download.
        submitted = submitted_workers(run, t)
        if not submitted and (t == 0 or run.config.ROUND_ADVANCE != "time"):
            interval_start = swarm.looked_at

        if round_is_over(run, t, submitted, swarm.looked_at - interval_start):
            if t < final_round:
                swarm.enter(t + 1)  # before logging, because the workers are waiting
            log_round_of_swarm(run, t)
            if t >= final_round:
                return
            t += 1
            interval_start = swarm.looked_at
        else:
            log_missing_workers(run)
        swarm.sleep()


def round_is_over(run, t: int, submitted: set[str], elapsed: float) -> bool:
    """Return whether round t is over, `elapsed` seconds after its interval started.

    ROUND_ADVANCE selects the rule. The workers in step are expected to submit a reward, and
    `submitted` contains the workers that have done so.
    time        when COORDINATOR_ROUND_INTERVAL is over, if an expected worker is alive or a reward
                was submitted; otherwise, the round stays open
    completion  when a reward was submitted, and every live expected worker has submitted
    hybrid      like completion, or COORDINATOR_ROUND_INTERVAL after the first reward (the default)
    """
    config = run.config
    interval = config.COORDINATOR_ROUND_INTERVAL

    # This process's first round waits for NUM_WORKERS live workers until the interval is over.
    if elapsed < interval and lacks_workers(run):
        return False

    # In the last round, or if no worker is in step, all workers are expected.
    is_last = t >= config.MAX_ROUNDS - 1
    expected = run.swarm.board.in_step("rewards", t, config.MAX_STAGES)
    if is_last or not expected:
        expected = set(run.swarm.board.workers)

    # Is an expected worker still alive without having submitted?
    is_pending = any(map(run.swarm.is_alive, sorted(expected - submitted)))

    # The last round waits for every live worker, for at most interval + STALE_AFTER_SECONDS.
    if is_last and is_pending:
        return elapsed > interval + config.STALE_AFTER_SECONDS

    is_complete = bool(submitted) and not is_pending
    is_late = elapsed >= interval
    is_over = {
        "time": is_late and (bool(submitted) or is_pending),
        "completion": is_complete,
        "hybrid": is_complete or (is_late and bool(submitted)),
    }
    return is_over[config.ROUND_ADVANCE]


# ==== The core ends here. Below: who has submitted, the round's log line, monitor, report, plots ==


def coordinator_facts(run) -> dict:
    """Return the code and the settings in the coordinator's session file, for `read_facts`."""
    return {
        "role": "coordinator",
        "code": run.code,
        "ROUND_ADVANCE": run.config.ROUND_ADVANCE,
        "COORDINATOR_ROUND_INTERVAL": run.config.COORDINATOR_ROUND_INTERVAL,
        "STALE_AFTER_SECONDS": run.config.STALE_AFTER_SECONDS,
    }


def log_missing_workers(run) -> None:
    """If workers are missing, log once that this process waits for them."""
    if lacks_workers(run):
        run.log.once(
            "wait",
            f"until {run.config.NUM_WORKERS} workers are alive, "
            "for at most COORDINATOR_ROUND_INTERVAL",
        )


def submitted_workers(run, t: int) -> set[str]:
    """Return the workers that have submitted a reward for the last stage of round t.

    A worker that has saved a checkpoint after round t counts as well, because the marker of its
    last reward may be lost, and a worker that has ended does not post its markers again.
    """
    board = run.swarm.board
    last_stage = drive_store.At(t, run.config.MAX_STAGES - 1)
    return {*board.reached("rewards", last_stage), *board.reached("checkpoint", drive_store.At(t))}


def log_round_of_swarm(run, t: int) -> None:
    """Log a finished round's line, and which nodes have joined or left."""
    stages = [drive_store.At(t, stage) for stage in range(run.config.MAX_STAGES)]
    rows = []
    for node_id in run.swarm.board.workers:
        rows += run.store.read_rewards(node_id, stages)

    run.round_ends.append(run.swarm.looked_at)
    run.log.info(format_round(t, run.config.MAX_ROUNDS, rows, run.round_ends))
    log_changes(run, t, rows)


# -------- The round's log line --------------------------------------------------------------------


def log_changes(run, t: int, rows: list[dict]) -> None:
    """Log which nodes have joined or left since the previous round, because this changes the mean.

    A node has left if it has not submitted a reward in this round and is not alive.
    """
    submitted = {row["node_id"] for row in rows}
    joined = submitted - run.present if run.present else ()  # in the first round, all are new
    left = {n for n in run.present - submitted if not run.swarm.is_alive(n)}
    run.present = (run.present | submitted) - left

    changes = [f"{node_id} joined in round {t}" for node_id in sorted(joined)]
    changes += [f"{node_id} has left ({run.swarm.status(node_id)})" for node_id in sorted(left)]
    if changes:
        run.log.event("nodes", f"{', '.join(changes)}, {len(run.present)} nodes now")


def format_round(round_: int, max_rounds: int, rows: list[dict], round_ends=()) -> str:
    """Return a round's log line, whose values explain a flat reward curve.

    They are means over nodes and stages. "6 of 4+4 groups" means that 6 groups were informative
    (had non-zero reward variance), out of 4 own and 4 external groups. With run_swarm.sh's prefix
    "[coordinator] ", the line fits into about 80 columns.

    round_ends: the times when rounds ended, from which the remaining time is estimated.
    """
    label = f"{round_:0{len(str(max_rounds))}d}/{max_rounds}"
    if not rows:  # on some storage backends, a marker becomes visible before its file
        return f"{label} no reward file has arrived yet"

    def average(name: str, form: str) -> str:
        value = mean_of(name, rows)
        return "-" if value is None else format(value, form)  # with I = 0, there is no reward

    line = (
        f"{label} reward {average('reward', '.2f')} tags {average('answer_tag_rate', '.0%')} "
        f"trunc {average('truncated_rate', '.0%')} {average('informative_groups', '.0f')} of "
        f"{average('local_groups', '.0f')}+{average('external_groups', '.0f')} groups"
    )
    if mean_of("held_out", rows) is not None:
        line += f" held-out {average('held_out', '.2f')}"

    # Estimate the remaining time from the last ten rounds.
    recent = round_ends[-11:]
    if len(recent) > 3:
        seconds_per_round = (recent[-1] - recent[0]) / (len(recent) - 1)
        seconds_left = seconds_per_round * (max_rounds - 1 - round_)
        line += f" eta {tqdm.tqdm.format_interval(seconds_left)}"
    return line


def has_signal(rows: list[dict]) -> bool:
    """Return whether any group was informative, so that there was something to learn."""
    return bool(mean_of("informative_groups", rows))


def diagnose(rows: list[dict], history=None, checkpoints=()) -> str:
    """Return a sentence about the progress in these rows, with advice if there is a problem.

    history: all rows since the start, if `rows` contains only the latest rows.
    checkpoints: the stages of all remaining checkpoints, ascending.
    """
    history = [row for row in history or rows if row["reward"] is not None]
    num_rounds = len(column_by("round", history))
    if num_rounds == 0:
        return "no rewards, because no answers were generated"

    # A verdict requires a change of more than two standard errors. A short run requires more,
    # because the noise is estimated from few rounds. "Worse" requires one more standard error,
    # because it is checked twice and because the noise of a single round is skewed.
    num_errors = 2 + 8 / num_rounds

    # Compare the last 20 rounds with the first 20 (in a short run, its halves). Compare them with
    # the first round as well, whose completions were generated before any update. If the policy
    # collapsed at once, the mean of the first 20 rounds would hide it.
    part = min(20, num_rounds // 2)
    for num_first in (1, part):
        first, last, error = compare_ends(history, num_first, part)
        if first - last > max(0.05, (num_errors + 1) * error):
            advice = "lower LEARNING_RATE"
            if checkpoints:
                advice += f"; the oldest checkpoint left is from round {checkpoints[0].round}"
            return f"worse than before training ({first:.2f} -> {last:.2f}): {advice}"
    if numpy.isnan(error):
        return "no verdict, because no node has rewards in both the first and the last rounds"

    # Were there informative groups in the last rounds or, if the reward rose, in any round?
    change = f"mean reward {first:.2f} -> {last:.2f}"
    has_learned = last - first > max(0.05, num_errors * error)
    late = [row for row in rows if row["round"] > rows[-1]["round"] - part]
    if has_signal(late) or (has_learned and has_signal(rows)):
        verdict = "learned" if has_learned else "no clear change"
        return f"{verdict}: {change} (first and last {part} of {num_rounds} rounds)"

    # Groups with equal rewards give no gradient. Why are the rewards equal?
    untrained = [row for row in history if row["round"] == history[0]["round"]]

    def rise(name: str) -> float:
        return (mean_of(name, late) or 0.0) - (mean_of(name, untrained) or 0.0)

    advice = "the answers are incorrect: use easier TASKS or a better MODEL_NAME"
    if last > 0.95:
        advice = "nearly all answers are correct: use harder TASKS"
    elif rise("truncated_rate") > 0.25 or rise("answer_tag_rate") < -0.25:
        advice = "training has made the answers truncated or untagged: lower LEARNING_RATE"
    elif (mean_of("truncated_rate", late) or 0.0) > 0.5:
        advice = "the answers are truncated: raise MAX_NEW_TOKENS"
    elif (mean_of("answer_tag_rate", late) or 0.0) < 0.05:
        advice = "<answer> tags are rare: raise WARM_START_STEPS or use easier TASKS"
    return f"nothing was learned ({change}, equal rewards within each group), because {advice}"


def compare_ends(rows: list[dict], num_first: int, num_last: int) -> tuple:
    """Compare the rewards in the first and in the last rounds of these rows.

    Return (mean of the first rounds, mean of the last rounds, standard error of their difference).
    All three cover only the nodes that have rewards in both, because a node that joins or leaves
    changes the mean. If there is no such node, for example after one round, return NaNs.
    """
    rounds = sorted(column_by("round", rows))
    early, late = rounds[:num_first], rounds[len(rounds) - num_last :]
    first = column_by("node_id", [row for row in rows if row["round"] in early])
    last = column_by("node_id", [row for row in rows if row["round"] in late])

    # Completions of one question are correlated, so the noise of a mean is estimated from a node's
    # rewards. Their successive differences are used, because they contain hardly any trend.
    nodes = []  # (mean of the first rounds, mean of the last rounds, variance of the difference)
    for node_id, rewards in column_by("node_id", rows).items():
        if node_id in first and node_id in last:
            noise = statistics.fmean(numpy.diff(rewards) ** 2) / 2
            factor = 1 / len(first[node_id]) + 1 / len(last[node_id])
            nodes.append((mean(first[node_id]), mean(last[node_id]), noise * factor))

    before, after, variance = numpy.mean(nodes or [[numpy.nan] * 3], axis=0)
    return before, after, (variance / max(1, len(nodes))) ** 0.5


def log_end(run, rows: list[dict], checkpoints=()) -> None:
    """Log the verdict on these rows, their reward curve and the cumulative reward."""
    rewards = column_by("round", rows)
    curve = sparkline([mean(rewards[round_]) for round_ in sorted(rewards)])
    total = sum(row["reward"] or 0.0 for row in rows) / max(1, len(column_by("node_id", rows)))
    run.log.event(
        "end",
        f"{diagnose(rows, checkpoints=checkpoints)}\n  {curve} trained {len(rewards)} of "
        f"{run.config.MAX_ROUNDS} rounds, cumulative reward {total:.2f} per node",
    )


def check_test_run(run, rows: list[dict], node_ids: list[str], folders: list[str]) -> int:
    """In TEST_MODE, check a run at its end. Log "passed" or the problems. Return the exit code.

    `rows` contains the checked nodes' rewards and metrics. Each of `folders` must contain a file.
    """
    config = run.config
    if not config.TEST_MODE:
        return 0

    # Each node must have files, and a reward for each round.
    problems = [f"{folder} is empty" for folder in folders if not run.store.list_names(folder)]
    rounds_of = column_by("node_id", rows, "round")
    for node_id in node_ids:
        first = min(rounds_of[node_id], default=0)  # it may have joined late
        if set(rounds_of[node_id]) != set(range(first, config.MAX_ROUNDS)):
            problems.append(f"{node_id} has rewards only in rounds {rounds_of[node_id]}")

    # The workers must have joined, learned and shared.
    num_workers = len(run.swarm.board.workers)
    failures = {
        f"only {num_workers} of {config.NUM_WORKERS} workers joined": (
            num_workers < config.NUM_WORKERS
        ),
        f"no group gave a gradient: {diagnose(rows)}": not has_signal(rows),
        "no external group was used": (
            config.NUM_TRANSPLANT_TREES > 0
            and num_workers > 1
            and not mean_of("external_groups", rows)
        ),
    }
    problems += [text for text, holds in failures.items() if holds]
    run.log.event("check", "; ".join(problems) or "passed")
    return 1 if problems else 0


# -------- Reading an experiment, from the program or a notebook -----------------------------------

ARM = ("NUM_TRAIN_SAMPLES", "NUM_TRANSPLANT_TREES", "EXTERNAL_FILTER", "LOCAL_OVERSAMPLE")
NEEDED = (*ARM, "SEED", "MAX_ROUNDS", "MAX_STAGES")  # settings that readers need
# Readers ignore later rounds, and the older rows of a longer metrics.jsonl, because an untrusted
# peer may have written any number of rows. A row takes about 1 KiB.
END_OF_ROUNDS = 100_000
MAX_ROWS = 20_000
MAX_LOG_BYTES = 64 << 20
# The monitor reads the end of all these files every ten seconds, at most 16 MiB in total. This is
# about 4000 rounds of 4 nodes, or 120 rounds of 128 nodes.
MONITOR_BYTES = 16 << 20
# After two seconds, readers show how many files they have read.
PROGRESS = {"delay": 2, "mininterval": 1, "leave": False, "position": 0}


@dataclass
class Experiment:
    """A snapshot of an experiment for readers, such as the monitor and the report."""

    name: str
    config: dict  # the experiment's settings, including all in NEEDED
    board: "drive_store.Board"
    status: dict  # node -> alive, done, stopped, failed or dead
    rows: list  # all rewards with their metrics, by round
    facts: dict = field(default_factory=dict)  # what defines its arm; see `read_facts`

    @property
    def num_rounds(self) -> int:
        """The number of planned rounds. (A later process may have raised MAX_ROUNDS.)"""
        return max(self.config["MAX_ROUNDS"], self.board.open_round + 1)

    @property
    def newest_round(self) -> int:
        """The last round with a reward, or -1."""
        return self.rows[-1]["round"] if self.rows else -1

    @property
    def is_over(self) -> bool:
        """True if the last round has a reward and no worker is alive."""
        return self.newest_round >= self.num_rounds - 1 and not self.alive

    @property
    def alive(self) -> list[str]:
        """The workers that are alive."""
        return [node_id for node_id in self.board.workers if self.status[node_id] == "alive"]

    @property
    def unhealthy(self) -> list[str]:
        """The failed nodes, followed by the dead nodes. The coordinator may be among them."""
        nodes = [n for n, status in self.status.items() if status in ("failed", "dead")]
        return sorted(nodes, key=self.status.get, reverse=True)

    def summary(self, node_id: str) -> dict:
        """Return a node's row in the monitor. The reward is averaged over its last ten rounds."""
        rows = self.select(node_id=node_id)
        curve = self.curve(node_id=node_id)[rows[0]["round"] :] if rows else []
        return {
            "node": node_id[:16],
            "status": self.status[node_id],
            "round": self.round_of(node_id),
            "reward": mean_of("reward", [r for r in rows if r["round"] > rows[-1]["round"] - 10]),
            "total": self.totals.get(node_id),
            "last reward": f"{age(rows[-1]['timestamp'])} ago" if rows else "",
            "curve": sparkline(curve),
        }

    def select(self, **columns) -> list[dict]:
        """Return the rows with these column values, such as round=3."""
        return [row for row in self.rows if columns.items() <= row.items()]

    def last_rounds(self, number: int) -> list[dict]:
        """Return the rows of the last `number` rounds."""
        return [row for row in self.rows if row["round"] > self.newest_round - number]

    def curve(self, metric: str = "reward", **columns) -> list[float | None]:
        """Return the metric's mean over rows with these values, for each round up to the newest.

        It is None for a round without such rows or without the metric, for example because a node
        was absent or a task was not drawn.
        """
        by_round = column_by("round", self.select(**columns), metric)
        return [mean(by_round[round_]) for round_ in range(self.newest_round + 1)]

    def round_of(self, node_id: str) -> int:
        """Return the round that a node is in, or -1 if it has not entered a round."""
        rounds = [at.round for (_, name), at in self.board.progress.items() if name == node_id]
        return max(rounds, default=-1)

    @property
    def arm(self) -> str:
        """The I/J part of the arm's name, such as "4/4", "8/0 x4" or "4/4 unfiltered"."""
        own, external, is_filtered, factor = map(self.config.get, ARM)
        name = f"{own}/{external}" if factor == 1 else f"{own}/{external} x{factor}"
        return name if is_filtered else f"{name} unfiltered"

    @property
    def totals(self) -> dict[str, float]:
        """The cumulative rewards, {node: reward}, of the nodes that have submitted rewards.

        A row of metrics.jsonl contains the running total, including earlier rows that were not
        read.
        """
        totals = {}
        for row in self.rows:
            total = totals.get(row["node_id"], 0.0) + (row["reward"] or 0.0)
            totals[row["node_id"]] = row.get("total_reward", total)
        return totals


def read_experiment(swarm, max_bytes: int = 1 << 40) -> Experiment:
    """Read an experiment. If its config.json is unusable, each setting is 1.

    max_bytes: the limit for all metrics.jsonl files together.
    """
    store = swarm.store
    board = swarm.look()
    num_rounds = min(END_OF_ROUNDS, board.open_round + 1)
    node_bytes = min(MAX_LOG_BYTES, max_bytes // max(1, len(board.sessions)))
    status = {}
    rows = []
    for node_id in tqdm.tqdm(sorted(board.sessions), f"reading {store.dir.name}", **PROGRESS):
        # Read the status before the rewards, because a node that is done has written all rewards.
        status[node_id] = swarm.status(node_id)
        for row in read_rows(store, board, node_id, node_bytes):
            if 0 <= row["round"] < num_rounds and 0 <= row["stage"] < 100:
                rows.append(row)

    rows.sort(key=lambda row: (row["round"], row["stage"], row["node_id"]))
    config = store.read_valid("config.json", check_settings) or dict.fromkeys(NEEDED, 1)
    return Experiment(store.dir.name, config, board, status, rows)


def read_rows(store, board, node_id: str, max_bytes: int = MAX_LOG_BYTES) -> list[dict]:
    """Return a node's rewards with their metrics. If a row occurs twice, the last row counts.

    Rows come from metrics.jsonl, one file per node, because opening thousands of reward files on a
    mounted drive would take minutes. A node appends a round's rows at the end of the round, so the
    newest rows may be missing there. These rows come from the reward files.
    """
    rows = logged_rows(store, node_id, max_bytes)
    last = board.progress.get(("rewards", node_id), drive_store.At(-1, -1))
    missing = [
        drive_store.At(last.round, stage)
        for stage in range(last.stage + 1)
        if (last.round, stage) not in rows
    ]
    return [*rows.values(), *store.read_rewards(node_id, missing)]


def logged_rows(store, node_id: str, max_bytes: int = MAX_LOG_BYTES) -> dict:
    """Return the valid rows of a node's metrics.jsonl, {At: row}."""
    try:
        data = store.read(f"nodes/{node_id}/logs/metrics.jsonl", max_bytes, from_end=True)
    except drive_store.InvalidFileError:
        data = None

    # Skip invalid lines, which a crash or an untrusted peer may have written.
    rows = {}
    for line in (data or b"").splitlines()[-MAX_ROWS:]:
        with contextlib.suppress(drive_store.InvalidFileError):
            row = drive_store.parse_json(line[: drive_store.MAX_METADATA_BYTES])
            drive_store.require(row, {"round": int, "stage": int})
            at = drive_store.At(row["round"], row["stage"])
            rows[at] = drive_store.parse_reward(row, node_id, at)
    return rows


def check_settings(config: dict) -> dict:
    """Return the contents of config.json. Raise InvalidFileError if a setting in NEEDED is invalid.

    The file is untrusted, because any program may have written it.
    """
    drive_store.require(config, dict.fromkeys(NEEDED, int) | {"EXTERNAL_FILTER": bool})
    if not all(0 <= config[name] < 2**53 for name in NEEDED):
        raise drive_store.InvalidFileError("a setting in config.json is out of range")
    return config


def column_by(name: str, rows: list[dict], metric: str = "reward") -> dict:
    """Return {value of the column `name`: [the metric in each row with this value]}."""
    values = defaultdict(list)
    for row in rows:
        values[row[name]].append(row.get(metric))
    return values


def list_experiments(path) -> list[str]:
    """Return the names of the experiments in the shared folder `path`."""
    names = [config.parent.name for config in Path(path).glob("experiments/*/config.json")]
    return sorted(filter(drive_store.is_safe_name, names))


def open_experiment(path, name: str, stale_after: float = 300.0) -> "drive_store.Swarm":
    """Open an experiment for reading. Raise StoreError if it does not exist."""
    config = Path(path, "experiments", name, "config.json")
    if not drive_store.is_safe_name(name) or not config.exists():
        raise drive_store.StoreError(
            f"no experiment {name!r} in {path}; "
            f"available: {join_names(list_experiments(path), 8) or 'none'}"
        )
    return drive_store.Swarm(drive_store.DriveStore(path, name), stale_after)


def get_experiment_status(path, name: str) -> dict:
    """Return the current state of an experiment. Raise StoreError if it does not exist."""
    exp = read_experiment(open_experiment(path, name))
    checkpoints = sorted(Path(path, "experiments", name).glob("nodes/*/checkpoints/round_*"))
    newest = max(checkpoints, key=lambda path: path.name, default=None)
    times = [row["timestamp"] for row in exp.rows]
    return {
        "experiment": exp.name,
        "current_round": exp.board.open_round,
        "current_stage": exp.rows[-1]["stage"] if exp.rows else 0,
        "num_active_peers": len(exp.alive),
        "peer_ids": exp.board.workers,
        "coordinator": exp.status.get(drive_store.COORDINATOR_ID),  # None without a coordinator
        "last_updated": max(times, default=None),
        "cumulative_rewards": dict.fromkeys(exp.board.workers, 0.0) | exp.totals,
        "latest_checkpoint": newest and str(newest),
        "duration_seconds": max(times, default=0.0) - min(times, default=0.0),
    }


def get_experiment_metrics(path, name: str):
    """Return one row per node, round and stage, as a pandas.DataFrame or, without pandas, a list.

    Raise StoreError if the experiment does not exist.
    """
    rows = read_experiment(open_experiment(path, name)).rows
    rows = [row | {"experiment": name, "my_reward": row["reward"]} for row in rows]
    try:
        import pandas
    except Exception:  # pandas is missing, or incompatible with the installed numpy
        return rows
    return pandas.DataFrame(rows)


def compare_experiments(path, names=None) -> list[dict]:
    """Compare experiments with their J = 0 baselines over seeds. Return the report's rows.

    By default, compare all experiments in the shared folder `path`.
    """
    names = list_experiments(path) if names is None else names
    return compare_arms(read_experiments(path, names))[0]


def read_experiments(path, names: list[str]) -> list[Experiment]:
    """Read these experiments. Leave out experiments without rewards or valid settings."""
    experiments = []
    for name in tqdm.tqdm(names, "reading experiments", **PROGRESS):
        exp = read_experiment(open_experiment(path, name))
        if exp.config.get("layout") != drive_store.LAYOUT:
            say(f"{name} is left out, because its config.json is damaged or of another version")
        elif exp.rows:
            experiments.append(replace(exp, facts=read_facts(path, exp)))
    return experiments


# -------- The monitor -----------------------------------------------------------------------------


def run_reader(config, signals) -> int:
    """Run the monitor or the report. Return the exit code.

    Neither changes an experiment or loads a model.
    """
    path = os.path.abspath(config.GDRIVE_PATH)
    if config.NODE_ROLE == "report":
        return report(path, config.environ.get("EXPERIMENT_NAME", "").strip() or "*")

    # On a terminal or in a notebook, wait for the experiment, and redraw the monitor until the
    # experiment ends.
    name = config.EXPERIMENT_NAME
    is_watched = sys.stdout.isatty() or in_notebook()
    while is_watched and name not in list_experiments(path):
        say(
            f"monitor: waiting for {path}/experiments/{name}; "
            f"available: {join_names(list_experiments(path), 8) or 'none'}"
        )
        signals.sleep(10)

    swarm = open_experiment(path, name, config.STALE_AFTER_SECONDS)
    swarm.store.on_event = lambda kind, text: say(f"monitor: {text}")
    swarm.store.sleep = signals.sleep
    while True:
        swarm.store.invalid_files.clear()  # warn only about files that are still unusable
        exp = read_experiment(swarm, MONITOR_BYTES)
        screen = format_screen(exp, swarm)
        if sys.stdout.isatty():
            screen = f"\033[2J\033[H{screen}"  # clear the terminal first
        elif is_watched:
            from IPython.display import clear_output

            clear_output(wait=True)
        say(screen)

        if in_notebook():  # the plot is below the text
            draw(plot_of(exp), say)
        if exp.is_over or not is_watched:
            return 0
        signals.sleep(10)


def format_screen(exp: Experiment, swarm) -> str:
    """Return the monitor's text, cropped to the size of the screen.

    Warnings come first, so that they are not cropped. Then come the state of the run, its nodes,
    its last rounds and a sample group.
    """
    width, height = shutil.get_terminal_size((80, 24))
    board, current = exp.board, exp.board.open_round
    lines = []
    for warning in find_warnings(exp, swarm):
        lines += textwrap.wrap(f"! {warning}", width, subsequent_indent="  ", max_lines=3)

    # Describe the run's state.
    stage = max((at.stage for at in board.progress.values() if at.round == current), default=0)
    alive = exp.alive
    created_at = exp.config.get("created_at")
    started = age(created_at) if drive_store.is_finite_number(created_at) else "?"  # untrusted
    lines += textwrap.wrap(
        f"{exp.name:.24}: round {current} of {exp.num_rounds}, stage {stage}, "
        f"started {started} ago, {len(alive)} of {len(board.workers)} workers alive",
        width,
    )

    # Format the last two rounds, with the remaining time. They are printed below the nodes.
    ends = column_by("round", exp.last_rounds(11), "timestamp")
    round_ends = [max(ends[t]) for t in sorted(ends)]
    below = [
        format_round(t, exp.num_rounds, exp.select(round=t), round_ends) for t in sorted(ends)[-2:]
    ]

    # Add one line per node. On a small screen, show failed and dead nodes, the slowest nodes and
    # the newest nodes, and count the others.
    room = max(0, height - 4 - len(lines) - len(below))
    slowest = sorted(alive, key=exp.round_of)
    newest = sorted(exp.status, key=board.sessions.get, reverse=True)
    ranked = dict.fromkeys([*exp.unhealthy[: room // 2], *slowest[: room // 4], *newest])
    shown = sorted(list(ranked)[:room], key=lambda n: (n not in exp.unhealthy, exp.round_of(n), n))
    lines += tabulate(
        map(exp.summary, shown), "keys", "plain", floatfmt=".2f", disable_numparse=[0]
    ).splitlines()
    if others := Counter(map(exp.status.get, exp.status.keys() - set(shown))):
        counts = [f"{count} {status}" for status, count in others.most_common()]
        lines.append(f"and {others.total()} more: {', '.join(counts)}")
    lines += below

    # Add a group from the newest rollout file.
    published_at = {n: at for (kind, n), at in board.progress.items() if kind == "rollouts"}
    newest = max(published_at, key=lambda n: (published_at[n], n), default=None)
    with contextlib.suppress(drive_store.InvalidFileError):
        if groups := newest and swarm.store.fetch("rollouts", newest, published_at[newest]):
            lines += [f"{newest} was asked:", *format_sample(groups[0])]
    return "\n".join(line[:width].rstrip() for line in lines[: height - 2])


def find_warnings(exp: Experiment, swarm) -> list[str]:
    """Return a short warning for each of the experiment's problems."""
    warnings = []
    if exp.unhealthy:
        names = join_names([f"{node_id} {exp.status[node_id]}" for node_id in exp.unhealthy], 4)
        warnings.append(f"{names}: see nodes/{exp.unhealthy[0]}/logs/stdout.log")

    # Is there progress? New sessions (which start with a time), rewards and moved markers count as
    # progress. Heartbeats do not.
    moves = [int(session[:13]) / 1000 for session in exp.board.sessions.values()]
    moves += [row["timestamp"] for row in exp.last_rounds(1)] + list(swarm.moved_at.values())
    moved_at = max(moves, default=time.time())
    if not exp.is_over and time.time() - moved_at > swarm.stale_after:
        warnings.append(f"stalled: no progress for {age(moved_at)}")

    # Do the nodes learn, and can all files be read?
    diagnosis = diagnose(exp.last_rounds(10), exp.rows)
    if diagnosis.startswith(("worse", "nothing")):
        warnings.append(diagnosis)
    for reason, count in swarm.store.invalid_files.most_common(3):
        warnings.append(f"unusable files ({count}): {drive_store.printable(reason)}")
    return warnings


def format_sample(group: dict, before: dict | None = None) -> list[str]:
    """Return a question and three completions with their rewards, as lines.

    before: the same question with earlier completions, which are listed first.
    """
    # Join the question's lines, wrap its end, and keep at most the last three lines.
    width = max(20, shutil.get_terminal_size((80, 40)).columns - 30)
    text = " ".join(f"{group['prompt']}  (correct: {group['answer']})".split())[-5 * width :]
    lines = textwrap.wrap(drive_store.printable(text, 10**6), width, subsequent_indent="  ")[-3:]

    answers = {"": group} if before is None else {"before  ": before, "now     ": group}
    for label, answered in answers.items():
        for completion in answered["completions"][:3]:
            text = drive_store.printable(repr(completion["response"]), width)
            lines.append(f"  {label}{completion['reward']:4.2f}  {text}")
    return [f"? {lines[0].strip()}", *lines[1:]]


# -------- The identity of runs --------------------------------------------------------------------

MODULES = ("drive_store", "grpo", "coordinator", "sapo")
MAX_SESSIONS = 500  # session files that a report reads per experiment; peers may add any number


def hash_code() -> str | None:
    """Return a hash of the four modules, so that the report can tell different versions apart.

    A pasted cell has no source files, so its hash is None.
    """
    try:
        sources = [
            Path(drive_store.__file__).with_name(f"{name}.py").read_bytes() for name in MODULES
        ]
    except (OSError, AttributeError):
        return None
    return hash_sources(*sources)


@functools.cache
def hash_sources(*sources: bytes) -> str:
    """Return a hash of Python files that ignores comments, blank lines, docstrings and layout."""
    outlines = [outline(ast.parse(source)) for source in sources]
    return hashlib.sha256(json.dumps(outlines).encode()).hexdigest()[:12]


def outline(node) -> list | str:
    """Return a syntax tree as nested lists that are the same on all Python versions.

    In contrast, `ast.dump` omits empty fields on some versions. Docstrings are left out.
    """
    if isinstance(node, ast.JoinedStr):  # an f-string, which may contain additional empty strings
        node.values = [each for each in node.values if getattr(each, "value", None) != ""]
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
        return [type(node).__name__, *[(name, outline(value)) for name, value in fields]]
    if isinstance(node, list):
        return [
            outline(each)
            for each in node
            if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        ]
    return ascii(node)


def read_facts(path, exp: Experiment) -> dict[str, str]:
    """Return what defines a run's arm, as text: its settings, code hash and package versions.

    All processes of all nodes wrote them into their session files. If the processes differ, the
    text lists the value of each process, such as "0.001 + 0.001 + 0.01".
    """
    store = drive_store.DriveStore(path, exp.name)
    sessions = [name for name in store.list_names("board") if name[:8] == "session."]
    texts = defaultdict(list)
    for number, name in enumerate(sessions):
        facts = (store.read_valid(f"board/{name}") if number < MAX_SESSIONS else None) or {}
        # A pasted cell has no code, and an earlier version wrote neither code nor settings.
        if not facts.get("code"):
            facts = exp.config | facts | {"unknown": True}
        for fact, value in list(facts.items())[:128]:
            texts[fact].append(str(value))
    known = {name: str(value) for name, value in exp.config.items()}
    for fact, each in texts.items():
        known[fact] = each[0] if len(set(each)) == 1 else " + ".join(sorted(each))
    return known


# -------- The report ------------------------------------------------------------------------------

# Facts that do not define an arm: names and folders, the run's length and seed, how its work is
# divided among processes, devices and micro-batches, and which files are kept.
MAY_DIFFER = (
    "EXPERIMENT_NAME", "GDRIVE_PATH", "HF_REPO", "created_at", "maker", "unknown",
    "MAX_ROUNDS", "SEED", "SEEDS", "CONFIGS", "TEST_MODE",
    "NODE_ID", "NODE_ROLE", "LOCAL_NODES", "NUM_WORKERS", "role", "model", "host",
    "DEVICE", "device", "MICRO_BATCH_SIZE",
    "CHECKPOINT_KEEP", "ROLLOUT_CLEANUP_ENABLED", "ROLLOUT_KEEP_LAST_N_ROUNDS",
    "ROLLOUT_ARCHIVE_OLD",
)  # fmt: skip
# Student's t for the 95% CI of the mean of 2, 3, … 10 values, and of 11 or more.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
# Escapes Markdown in text from config.json, which is untrusted.
MARKDOWN = str.maketrans({"|": r"\|", "<": "&lt;"})


def compare_arms(experiments: list[Experiment]) -> tuple[list[dict], list[str]]:
    """Compare arms. An arm is a set of runs whose facts agree, except for MAY_DIFFER.

    Return (rows, notes). There is one row per arm, best first, with its relative gain. An arm with
    changed code is compared with the same arm of this program, and any other arm with its J = 0
    baseline. The notes report omitted runs, gaps and other limitations of the rows. Only the rounds
    that all runs have completed are compared. Otherwise, the longest run would have the highest
    reward.
    """
    # Leave out test runs and runs that ended early.
    compared, notes = [], []
    num_rounds = {exp.name: len(column_by("round", exp.rows)) for exp in experiments}
    for exp in experiments:
        is_short = num_rounds[exp.name] < max(num_rounds.values()) / 2
        if is_short or exp.config.get("TEST_MODE"):
            reason = "fewer than half as many as the longest run" if is_short else "TEST_MODE"
            notes.append(f"{exp.name} is left out: {num_rounds[exp.name]} rounds, {reason}")
        else:
            compared.append(exp)

    # Which facts differ between runs? A setting that a program lacks is not compared.
    all_facts = [exp.facts | {"nodes": str(len(exp.totals))} for exp in compared]
    differing = []
    for name in sorted(set().union(*all_facts) - {*ARM, *MAY_DIFFER}):
        if len({facts[name] for facts in all_facts if name in facts}) > 1:
            differing.append(name)

    # Group the runs into arms. An arm with changed code gets its name below.
    common = min((exp.newest_round + 1 for exp in compared), default=0)
    arms = defaultdict(list)  # (I/J, other facts, code) -> runs
    for exp, facts in zip(compared, all_facts, strict=True):
        # The arm's name starts with the experiment's I/J. Add values that a process has changed.
        shown = [name for name in ARM if facts[name] != str(exp.config[name])]
        shown += [name for name in differing if name in facts and name != "code"]
        others = [f"{name}={facts[name]}" for name in shown]
        rows = [row for row in exp.rows if row["round"] < common]
        arms[exp.arm, " ".join(others), facts.get("code")].append(replace(exp, rows=rows))
        present = {(row["node_id"], row["round"]) for row in rows}
        if num_missing := common * len(exp.totals) - len(present):
            notes.append(f"{exp.name} has gaps: {num_missing} rounds of its nodes are missing")

    if names := drive_store.printable(", ".join(differing), 200):
        notes.append(
            f"runs that differ in {names} are not averaged; "
            "gains compare arms that differ only in I/J or only in code"
        )
    if unknown := join_names([exp.name for exp in compared if "unknown" in exp.facts]):
        notes.append(
            "the code or the settings of some processes are unknown (a pasted cell, or an earlier "
            f"version): {unknown}"
        )

    rows = []
    own_code = str(hash_code())
    for (arm, others, code), runs in arms.items():
        # The baseline trains on the same number of groups, all of them its own.
        num_external = runs[0].config["NUM_TRANSPLANT_TREES"]
        alone = f"{runs[0].config['NUM_TRAIN_SAMPLES'] + num_external}/0"
        baseline = (alone, others, code) if num_external > 0 else None
        label = f"{arm} {others}".strip()

        # The baseline of a changed program is the original, which is the reporting program.
        names = [exp.name for exp in runs]
        if "code" in differing and code != own_code:
            label = f"{arm} {os.path.commonprefix(names)}* {others}".strip()
            if (arm, others, own_code) in arms:
                baseline = arm, others, own_code

        # Compute the relative gain for each seed that both arms have. Skip a baseline with almost
        # no reward, because the ratio would be meaningless.
        rewards = mean_by_seed("reward", runs, common)
        baseline_rewards = mean_by_seed("reward", arms.get(baseline, []), common)
        ratios = []
        for seed, reward in rewards.items():
            if baseline_rewards.get(seed, 0.0) > 0.01 * common:
                ratios.append(max(reward, 0.01 * common) / baseline_rewards[seed])

        row = {
            "I/J": drive_store.printable(label, 999),
            "nodes": len(runs[0].totals),
            "runs": len(runs),
            "rounds": common,
            "reward per node": statistics.fmean(rewards.values()),
            "sd": statistics.stdev(rewards.values()) if len(rewards) > 1 else None,
            "held-out": mean(mean_of("held_out", exp.last_rounds(20)) for exp in runs),
            "completions": round(mean(mean_by_seed("completions", runs, common).values())),
            "baseline": None,
            "gain": statistics.geometric_mean(ratios) - 1 if len(ratios) > 1 else None,
            "interval": interval_of(ratios) if len(ratios) > 2 else None,
            "by seed": list(map(list, rewards.items())),
            "experiments": names,
            "curves": [exp.curve() for exp in runs],
        }
        rows.append(row)
        shown = drive_store.printable(label, 60)
        if label != arm:
            notes.append(f"{shown}: {join_names(names, 5)}")
        if baseline in arms:
            row["baseline"] = drive_store.printable(" ".join(baseline[:2]).strip(), 60)
            missing = "a gain needs 2" if len(ratios) < 2 else "a 95% CI needs 3"
            if row["interval"]:
                missing = "the gain's 95% CI is {:+.0%} to {:+.0%}".format(*row["interval"])
            notes.append(
                f"{shown} has {len(ratios)} seed(s) in common with usable runs of its baseline "
                f"{row['baseline']}: {missing}"
            )
    return sorted(rows, key=lambda row: -row["reward per node"]), notes


def mean_by_seed(metric: str, runs: list[Experiment], num_rounds: int) -> dict[int, float]:
    """Return {seed: the metric's sum over these rounds, per node}, averaged over the seed's runs.

    For the reward, it is the paper's metric divided by the number of nodes. A round counts as the
    mean over the nodes that were present, and a missing round counts as the mean of the other
    rounds.
    """
    sums = defaultdict(list)  # seed -> the sum of each run
    for exp in runs:
        num_stages = num_rounds * exp.config["MAX_STAGES"]
        sums[exp.config["SEED"]].append(num_stages * (mean(exp.curve(metric)) or 0.0))
    return {seed: statistics.fmean(values) for seed, values in sums.items()}


def interval_of(ratios: list[float]) -> list[float]:
    """Return the 95% confidence interval of the gain, [low, high], from the ratios' logarithms."""
    logs = numpy.log(ratios)
    margin = T_95[min(len(logs), 11) - 2] * logs.std(ddof=1) / len(logs) ** 0.5
    return [float(numpy.expm1(logs.mean() + sign * margin)) for sign in (-1, 1)]


def report(path: str, pattern: str) -> int:
    """Compare the experiments whose names match the pattern. Return the exit code.

    Print the table and write it to reports/, with its numbers as JSON and a plot.
    """
    experiments = read_experiments(path, fnmatch.filter(list_experiments(path), pattern))
    if not experiments:
        say(f"report: no rewards in {path} for EXPERIMENT_NAME={pattern}")
        return 1

    rows, notes = compare_arms(experiments)
    text = format_report(rows, notes)
    say(text)

    # Plot the arms' reward curves in one panel and their gains in another.
    curves, arms, gains, margins = [], [], [], []
    for row in rows:
        curves.append((row["I/J"], row["curves"]))
        if row["interval"]:
            arms.append(drive_store.printable(f"{row['I/J']} over {row['baseline']}", 40))
            gains.append(100 * row["gain"])
            margins.append([100 * abs(end - row["gain"]) for end in row["interval"]])

    panels = {"reward, mean ± sd over runs": lambda axis: draw_curves(axis, curves)}
    if gains:
        panels["gain in %, 95% CI"] = lambda axis: axis.errorbar(
            gains,
            arms,
            xerr=numpy.transpose(margins),  # (2, arms)
            fmt="o",
            color=COLORS[1],
            linewidth=3,
            capsize=6,
        )

    name = re.sub(r"[^A-Za-z0-9._-]", "", pattern)[:64].strip("._-") or "all"
    save(path, f"report_{name}.md", text.encode(), say)
    save(path, f"report_{name}.json", json.dumps(rows).encode(), say)
    save(path, f"report_{name}.png", draw(panels, say), say)
    return 0


def format_report(rows: list[dict], notes: list[str]) -> str:
    """Return a Markdown table of the arms, with the notes below it.

    The rewards and completions are sums per node.
    """
    table = []
    for row in rows:
        table.append(
            {
                "I/J": drive_store.printable(row["I/J"], 60).translate(MARKDOWN),
                "runs": row["runs"],
                "reward": row["reward per node"],
                "sd": row["sd"],
                "held-out": row["held-out"],
                "completions": row["completions"],
                "gain": row["gain"],
            }
        )

    text = tabulate(
        table,
        "keys",
        "github",
        floatfmt=["", "", ".2f", ".2f", ".2f", "", "+.0%"],
        missingval="",
        disable_numparse=[0] if table else False,  # tabulate cannot index an empty table
    )
    return "\n- ".join([f"{text}\n", *[note.translate(MARKDOWN) for note in notes]])


# -------- Plots -----------------------------------------------------------------------------------

# The colorblind-safe palette of Okabe and Ito, with a darker yellow.
COLORS = ("black", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C7A00")
STYLES = ("-", "--", ":")


def write_plot(exp: Experiment, root, log) -> None:
    """Write a plot of the experiment to reports/EXPERIMENT.png, if matplotlib is installed."""
    save(root, f"{exp.name}.png", draw(plot_of(exp), log.info), log.info, [log.node_id])


def save(root, name: str, data: bytes | None, inform, node_ids=()) -> None:
    """Write a file to reports/ and print its path.

    node_ids: the nodes of this process. If it is killed, the next process of its first node deletes
    the unfinished file. If reports/ is missing or not writable, skip the file, because no process
    should wait for it.
    """
    store = drive_store.DriveStore(root, "", node_ids)
    with contextlib.suppress(OSError):
        if data and store.has_dir("/reports"):
            store.write(f"/reports/{name}", data)
            inform(f"written: {store.root.absolute()}/reports/{name}")


def plot_of(exp: Experiment) -> dict:
    """Return the panels of an experiment's plot, for `draw`."""
    # Draw up to eight nodes with colors and names. With more nodes, draw all of them in gray.
    curves = {node_id: exp.curve(node_id=node_id) for node_id in sorted(exp.totals)}
    nodes = [(f"mean ± sd of {len(curves)} nodes", list(curves.values()))]
    for node_id, curve in curves.items():
        nodes.append((node_id if len(curves) <= 8 else None, [curve]))

    # Draw the reward of up to 20 tasks, and the metrics that explain the reward.
    columns = [name for name in sorted(set().union(*exp.rows)) if name.startswith("reward_")]
    tasks = [(name.removeprefix("reward_"), [exp.curve(name)]) for name in columns[:20]]
    informative_shares = []
    for number, total in zip(exp.curve("informative_local"), exp.curve("groups"), strict=True):
        informative_shares.append(number / total if total else None)
    nodes_of = column_by("round", exp.rows, "node_id")
    present_shares = [len(set(nodes_of[t])) / len(curves) for t in range(exp.newest_round + 1)]
    shares = [
        ("own groups that are informative", [informative_shares]),
        ("answers in <answer> tags", [exp.curve("answer_tag_rate")]),
        ("truncated answers", [exp.curve("truncated_rate")]),
        ("nodes that submitted a reward", [present_shares]),
    ]

    return {
        f"{exp.name}: reward": lambda axis: draw_curves(axis, nodes),
        "reward by task": lambda axis: draw_curves(axis, tasks),
        "diagnostics (shares)": lambda axis: draw_curves(axis, shares),
    }


def draw(panels: dict, inform) -> bytes | None:
    """Return the plot as a PNG, and display it in a notebook. If `plot` fails, return None."""
    try:
        image = plot(panels)
    except Exception as error:  # the package may be missing, or broken in any way
        advice = ": pip install matplotlib" if isinstance(error, ImportError) else ""
        inform(f"no plot ({type(error).__name__}: {error}){advice}")
        return None

    if in_notebook():
        from IPython.display import Image, display

        display(Image(image))
    return image


def plot(panels: dict) -> bytes:
    """Return the panels, {title: function that draws on an axis}, side by side as a PNG."""
    import matplotlib.figure

    file = io.BytesIO()
    # A name may contain "$", which would start a formula.
    with matplotlib.rc_context({"text.parse_math": False, "ytick.labelsize": 7}):
        figure = matplotlib.figure.Figure(
            figsize=(5.5 * len(panels), 4.5), dpi=110, layout="constrained"
        )
        for number, (title, draw_on) in enumerate(panels.items(), start=1):
            draw_on(figure.add_subplot(1, len(panels), number, title=title))
        figure.savefig(file, format="png")
    return file.getvalue()


def draw_curves(axis, lines: list[tuple]) -> None:
    """Draw one line per (label, curves) pair. Average rounds to get at most 30 points per line.

    Several curves (of seeds or nodes) are drawn as their mean, with a band of one standard
    deviation. A line without a label is gray. A point without values is a gap.
    """
    num_rounds = max((len(curve) for _, curves in lines for curve in curves), default=0)
    step = max(1, -(-num_rounds // 30))  # rounds per point, rounded up
    starts = range(0, num_rounds, step)
    for number, (label, curves) in enumerate(lines):
        means = []
        for t in starts:
            means.append([mean(curve[t : t + step]) for curve in curves])
        values = numpy.array(means, dtype=float).reshape(len(starts), len(curves))
        values = numpy.ma.masked_invalid(values)  # (point, curve)
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

        axis.plot(starts, center, **style)
        axis.fill_between(
            starts, center - spread, center + spread, color=style["color"], alpha=0.15
        )

    axis.set(xlabel=f"round (rounds per point: {step})", ylim=(0, None))
    axis.locator_params(axis="x", integer=True)
    if lines:  # with I = 0, the list of tasks is empty
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


# -------- Text and numbers, which sapo.py uses as well --------------------------------------------


def say(text: str) -> None:
    """Print a text. Ignore a full disk, a closed pipe (as in `| head`) and an interrupted print."""
    try:
        with tqdm.tqdm.external_write_mode():  # redraws the progress bar below the text
            print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # otherwise, Python prints an error at exit
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a signal came during a print
        pass


def in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel, and not just with Jupyter's packages loaded."""
    has_packages = {"ipykernel", "IPython"} <= sys.modules.keys()
    return has_packages and sys.modules["IPython"].get_ipython() is not None


def mean(values) -> float | None:
    """Return the mean of the values that are not None. [1, None, 2] -> 1.5, [] -> None."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def mean_of(metric: str, rows: list[dict]) -> float | None:
    """Return the mean of a metric over the rows that contain it, or None if no row does."""
    return mean(row.get(metric) for row in rows)


def sparkline(values: list, width: int = 24) -> str:
    """Draw values from 0 to 1 with at most `width` characters. [0, 0.5, None, 1] -> "▁▅ █"."""
    columns = min(width, len(values)) or 1
    line = ""
    for i in range(columns):
        first, end = i * len(values) // columns, (i + 1) * len(values) // columns
        height = mean(values[first:end])
        line += " " if height is None else "▁▂▃▄▅▆▇█"[min(7, int(8 * height))]
    return line


def join_names(names: list[str], limit: int = 20) -> str:
    """Join the first `limit` names. (["a", "b", "c"], 2) -> "a, b and 1 more"."""
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def age(timestamp: float) -> str:
    """Return how long ago a time was, such as "02:30" (minutes) or "2:13:20" (hours)."""
    return tqdm.tqdm.format_interval(max(0.0, time.time() - timestamp))
