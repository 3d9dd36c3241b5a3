"""Who opens the next round, and when? The workers themselves, or a coordinator. Below the banner
stand the readers of an experiment: monitor, validate, report.

The coordinator trains nothing and needs no model. The readers change nothing in an experiment: they
read it once, as an `Experiment`, and what they show are short functions of it.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass

import tqdm  # comes with transformers
from tabulate import tabulate  # comes with reasoning-gym

if "DriveStore" in globals():  # the four modules pasted into one notebook cell
    drive_store = sys.modules[__name__]
else:
    import drive_store


# -------- Who opens the next round, and when? -----------------------------------------------------


def wait_for_round(run, own: int) -> int:
    """Block until round `own` or a later one is open, and return it. Where no coordinator has been
    seen alive for `opening_delay`, that is `own`, which this process opens by entering it.

    In a swarm it is the newest open round. A process that is alone decides itself: after a kill it
    repeats the rounds since its checkpoint.
    """
    member = run.member
    while True:
        board = member.check_in(run.signals)
        if member.others() and board.open_round >= own:
            return board.open_round

        if member.is_alive(drive_store.COORDINATOR_ID):
            member.coordinator_seen_at = member.poll_started
        elif member.poll_started - member.coordinator_seen_at >= opening_delay(run):
            return own
        member.sleep()


def opening_delay(run) -> float:
    """How long must no coordinator have been seen before this process opens a round itself?

    COORDINATOR_ROUND_INTERVAL (60 s)   in its first round, until NUM_WORKERS are alive
    2 s                                 if there has ever been one: a single look at its heartbeat
                                        may fail
    0 s                                 otherwise
    The time counts from the last sighting, or from the start of this process.
    """
    config, member = run.config, run.member
    wanted = 0 if run.log.history else config.NUM_WORKERS
    if lacks_workers(member, wanted):
        delay = config.COORDINATOR_ROUND_INTERVAL
        run.log.once("wait", f"for {wanted} workers, {delay:.0f} s at most")
        return delay
    return 2.0 if drive_store.COORDINATOR_ID in member.board.sessions else 0.0


def lacks_workers(member, wanted: int) -> bool:
    """Whether fewer than `wanted` workers are alive. Nobody is asked where too few have registered,
    or where none is wanted."""
    workers = member.board.workers
    return len(workers) < wanted or (wanted > 0 and sum(map(member.is_alive, workers)) < wanted)


def run_coordinator(config, member, log, signals) -> None:
    """Open one round after another until MAX_ROUNDS. Raises Stopped if it ends before.

    Round 0 stays open until the first reward arrives, because models take minutes to download. The
    first round of each start also waits, one interval at most, until NUM_WORKERS are alive, so that
    a swarm that is stopped and started again leaves nobody behind.
    """
    store = member.store
    interval = config.COORDINATOR_ROUND_INTERVAL
    last_round = config.MAX_ROUNDS - 1
    member.register({"role": "coordinator"}, folders=("logs", "winners"))
    opened_at = time.monotonic()
    current = -1
    is_waiting = config.NUM_WORKERS > 0

    while True:
        log.flush(store)
        board = member.check_in(signals)
        now = member.poll_started

        # Workers open rounds themselves while they see no live coordinator; follow them.
        if max(0, board.open_round) > current:
            current = max(0, board.open_round)
            opened_at = now
            store.move_marker("open", drive_store.COORDINATOR_ID, drive_store.At(current))

        # Which nodes have submitted a reward for this round, and does any other one still work on
        # it? The last round waits for all, and in some round nobody may be in step.
        submitted = set(board.reached("rewards", drive_store.At(current, config.MAX_STAGES - 1)))
        expected = drive_store.in_step(board, "rewards", current, config)
        if current >= last_round or not expected:
            expected = set(board.workers)
        is_pending = any(map(member.is_alive, sorted(expected - submitted)))

        # Is the round over? Round 0 begins with its first reward.
        if current == 0 and not submitted:
            opened_at = now
        elapsed = now - opened_at
        is_over = should_advance(config, elapsed, is_pending, bool(submitted))
        if current >= last_round and is_pending:
            is_over = elapsed > interval + config.STALE_AFTER_SECONDS

        # The first round of a start waits for those who come.
        if is_waiting:
            is_waiting = elapsed < interval and lacks_workers(member, config.NUM_WORKERS)
        if is_over and not is_waiting:
            # Nobody waits for the log: open the next round first.
            if current < last_round:
                store.move_marker("open", drive_store.COORDINATOR_ID, drive_store.At(current + 1))
            log.round_ends.append(now)
            log.history += log_round_of_swarm(store, config, log, current, board)
            if current >= last_round:
                log.event("end", verdict(config, log.history))
                write_picture(store, log)
                return
        member.sleep()


def should_advance(config, elapsed: float, is_pending: bool, is_submitted: bool) -> bool:
    """Whether the round is over. ROUND_ADVANCE: time: after the interval; completion: when somebody
    has submitted and nobody is pending; hybrid: at the first of both."""
    interval_is_over = elapsed >= config.COORDINATOR_ROUND_INTERVAL and (is_pending or is_submitted)
    all_submitted = is_submitted and not is_pending
    return {
        "time": interval_is_over,
        "completion": all_submitted,
        "hybrid": interval_is_over or all_submitted,
    }[config.ROUND_ADVANCE]


# ==== Below: the line of a round, and the readers of an experiment ================================


def log_round_of_swarm(store, config, log, round_: int, board) -> list[dict]:
    """Log the line of a round that has ended, and write its winners, the best first, for people.
    Returns its rewards."""
    stages = [drive_store.At(round_, stage) for stage in range(config.MAX_STAGES)]
    rows = [store.read_reward(node, at) for node in board.workers for at in stages]
    rows = [row for row in rows if row is not None]

    # A node's reward of a round is the mean over its stages.
    means = {node: mean(rewards) for node, rewards in column_by("node_id", rows).items()}
    winners = dict(sorted(means.items(), key=lambda item: -(item[1] or 0.0)))
    path = f"nodes/{drive_store.COORDINATOR_ID}/winners/round_{round_:06d}.json"
    store.write(path, drive_store.dump_json(winners))

    log.info(format_round(round_, config.MAX_ROUNDS, rows, log.round_ends))
    return rows


def format_round(round_: int, max_rounds: int, rows: list[dict], round_ends: list[float]) -> str:
    """The line of a round: everything that explains a flat curve, as means over nodes and stages.

    It fits 80 columns behind run_swarm.sh's "[coordinator] ". "6 of 4+4 groups" were informative:
    4 own and 4 of peers. round_ends: times, for the time that is left.
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
        line += f" eta {format_duration(seconds_per_round * (max_rounds - 1 - round_))}"
    return line


# -------- Reading an experiment -------------------------------------------------------------------


@dataclass
class Experiment:
    """All that readers show of an experiment, read at one moment."""

    name: str
    config: dict  # the settings that it began with
    board: "drive_store.Board"
    status: dict  # node, also the coordinator -> alive, exited, failed or dead
    rows: list  # every reward with its metrics, in order

    def setting(self, name: str) -> int:
        """An integer from config.json, or 1 if it is missing or invalid."""
        value = self.config.get(name)
        return value if type(value) is int and 0 <= value <= 10**6 else 1

    def select(self, **columns) -> list[dict]:
        """The rows with these values."""
        return [row for row in self.rows if columns.items() <= row.items()]

    def curve(self, metric: str = "reward", **columns) -> list[float]:
        """The metric's mean over the rows with these values, for each round from their first to
        their last. 0 where nobody was there."""
        by_round = column_by("round", self.select(**columns), metric)
        rounds = range(min(by_round, default=0), max(by_round, default=-1) + 1)
        return [mean(by_round.get(round_, [])) or 0.0 for round_ in rounds]

    def total(self, node: str) -> float:
        """A node's cumulative reward."""
        return sum(row["reward"] or 0.0 for row in self.select(node_id=node))

    def rounds(self, first: int, end: int) -> list[dict]:
        """The rows of the rounds from first to end - 1."""
        return [row for row in self.rows if first <= row["round"] < end]

    @property
    def num_rounds(self) -> int:
        """Rounds that are planned. (A later start may have raised MAX_ROUNDS.)"""
        return max(self.setting("MAX_ROUNDS"), self.board.open_round + 1)

    def with_status(self, status: str) -> list[str]:
        """The workers that are alive, exited, failed or dead."""
        return natural_sort(node for node in self.board.workers if self.status[node] == status)

    @property
    def is_finished(self) -> bool:
        """Whether the last round has rewards and nobody works any more."""
        has_last = bool(self.rows) and self.rows[-1]["round"] >= self.num_rounds - 1
        return has_last and not self.with_status("alive")

    @property
    def nodes(self) -> list[str]:
        return natural_sort(column_by("node_id", self.rows))

    @property
    def last_rounds(self) -> list[dict]:
        """The rows of its last 20 rounds."""
        newest = self.rows[-1]["round"]
        return self.rounds(newest - 19, newest + 1)

    @property
    def arm(self) -> str:
        """Its I/J, such as "4/4", "4/4 unfiltered" or "8/0 x4"."""
        arm = f"{self.setting('NUM_TRAIN_SAMPLES')}/{self.setting('NUM_TRANSPLANT_TREES')}"
        if self.setting("LOCAL_OVERSAMPLE") > 1:
            arm += f" x{self.setting('LOCAL_OVERSAMPLE')}"
        return arm + (" unfiltered" if self.config.get("EXTERNAL_FILTER") is False else "")


def read_experiment(store, stale_after: float = 300.0, cache: dict | None = None) -> Experiment:
    """Read an experiment. cache: pass the same dict again, and no reward file is read twice."""
    cache = {} if cache is None else cache
    board = store.board()
    status = {}
    for node in natural_sort(board.sessions):
        # Status first: a node that has exited has all its rewards there.
        status[node] = store.node_status(node, board.sessions[node], stale_after)
        for at in store.list_stages("rewards", node, lenient=True):
            if at.round <= board.open_round and (*at, node) not in cache:
                row = store.read_reward(node, at)
                if row is not None:
                    row |= {"experiment": store.dir.name, "my_reward": row["reward"]}
                    cache[*at, node] = row
    rows = [cache[key] for key in sorted(cache)]
    config = store.read_valid("config.json") or {}
    return Experiment(store.dir.name, config, board, status, rows)


def column_by(name: str, rows: list[dict], metric: str = "reward") -> dict:
    """{value of the column `name`: the metric in its rows}."""
    values = {}
    for row in rows:
        values.setdefault(row[name], []).append(row.get(metric))
    return values


def experiment_status(exp: Experiment, store) -> dict:
    """The state of an experiment now."""
    # The newest checkpoint of all nodes.
    checkpoints = []
    for node in exp.board.workers:
        for at in store.list_stages("checkpoints", node, lenient=True)[-1:]:
            path = store.dir / f"nodes/{node}/checkpoints/round_{at.round:06d}.safetensors"
            checkpoints.append((at.round, str(path)))

    times = [row["timestamp"] for row in exp.rows]
    return {
        "experiment": exp.name,
        "current_round": exp.board.open_round,
        "current_stage": exp.rows[-1]["stage"] if exp.rows else 0,
        "num_active_peers": len(exp.with_status("alive")),
        "peer_ids": exp.board.workers,
        "coordinator": exp.status.get(drive_store.COORDINATOR_ID),  # None: there was never one
        "last_updated": max(times, default=None),
        "cumulative_rewards": {node: exp.total(node) for node in exp.board.workers},
        "latest_checkpoint": max(checkpoints)[1] if checkpoints else None,
        "duration_seconds": max(times) - min(times) if times else 0.0,
    }


# -------- Diagnosis and validation ----------------------------------------------------------------


def has_signal(rows: list[dict]) -> bool:
    """Whether a group was informative, so that something could be learned from it."""
    return any(row.get("informative_groups") for row in rows)


def verdict(config, rows: list[dict]) -> str:
    """What is said at the end of a run."""
    if config.TEST_MODE:
        return "everything ran; NODE_ROLE=validate, with the same settings, checks what is there"
    return diagnose(rows)


def diagnose(rows: list[dict]) -> str:
    """What happened in these rows, in a sentence with the curve, and the variable that may help."""
    if all(row["reward"] is None for row in rows):
        measured = [row["held_out"] for row in rows if row.get("held_out") is not None]
        text = "no rewards, because nothing was generated (NUM_TRAIN_SAMPLES=0)"
        if measured:
            text += f"; held-out accuracy {measured[0]:.2f} -> {measured[-1]:.2f}"
        return text

    # The last 20 rounds against the first 20, or one half against the other; only rounds that have
    # rewards.
    by_round = column_by("round", rows)
    curve = [mean(by_round[round_]) or 0.0 for round_ in sorted(by_round)]
    part = min(20, (len(curve) + 1) // 2)
    first, last = mean(curve[:part]) or 0.0, mean(curve[-part:]) or 0.0
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


def validate(exp: Experiment, store, max_rounds: int, num_nodes: int) -> list[str]:
    """What a finished run lacks, one sentence each. An empty list means that it is complete."""
    # What is there?
    last = max_rounds - 1
    finished = column_by("node_id", exp.select(round=last))
    missing = sorted(set(range(max_rounds)) - column_by("round", exp.rows).keys())
    nonzero = {name for row in exp.rows for name in row if row[name]}
    has_peers = num_nodes > 1 and exp.setting("NUM_TRANSPLANT_TREES") > 0
    checkpoints = [store.list_stages("checkpoints", node, True)[-1:] for node in exp.nodes]

    # What should be there?
    gaps = f"{len(missing)} of {max_rounds} have none: {join_names(list(map(str, missing)), 9)}"
    claims = {
        f"round {last} is open": exp.board.open_round >= last,
        f"{num_nodes} nodes submitted rewards in round {last}": len(finished) >= num_nodes,
        f"every round has rewards ({gaps})": not missing,
        "there are rollouts": any(kind == "rollouts" for kind, _ in exp.board.progress),
        f"there is a checkpoint after round {last}": [(last, 0)] in checkpoints,
        f"a gradient was not zero ({diagnose(exp.rows)})": "grad_norm" in nonzero,
        "groups of peers were trained on": "external_groups" in nonzero or not has_peers,
    }

    # Each node leaves a log and a model.
    for node in exp.nodes:
        names = set(store.list_names(f"nodes/{node}/model", lenient=True))
        names |= set(store.list_names(f"nodes/{node}/logs", lenient=True))
        has_weights = names & {"model.safetensors", "model.safetensors.index.json"}
        has_all = has_weights and names >= {"config.json", "tokenizer.json", "metrics.jsonl"}
        claims[f"{node} has written its log and its model"] = has_all
    return [f"not true: {claim}" for claim, holds in claims.items() if not holds]


# -------- The monitor -----------------------------------------------------------------------------


def monitor(store, stale_after: float, others: list[str], once: bool, signals) -> None:
    """Show the dashboard every 10 s until the run is over, or a single time. others: the other
    experiments of this folder."""
    cache = {}
    while True:
        exp = read_experiment(store, stale_after, cache)
        text = dashboard(exp, store)
        if others:
            text += f"\nother experiments, the newest first: {join_names(others, 5)}"

        # Replace what was shown before.
        if in_notebook():
            from IPython.display import clear_output

            clear_output(wait=True)
        clear_screen = "\033[2J\033[H" if sys.stdout.isatty() else ""
        say(clear_screen + text)
        if once or exp.is_finished:
            return
        signals.sleep(10)


def dashboard(exp: Experiment, store) -> str:
    """An experiment as text that fits the terminal: rounds, nodes, tasks, warnings, one group."""
    screen = shutil.get_terminal_size((100, 40))
    workers = f"{len(exp.with_status('alive'))} of {len(exp.board.workers)} workers alive"
    lines = [f"{store.dir.absolute()}: round {exp.board.open_round} of {exp.num_rounds}, {workers}"]
    if exp.rows:
        newest = exp.rows[-1]
        reward = exp.curve()[-1]
        lines.append(f"reward {reward:.2f} in round {newest['round']}, {age(newest)} ago")

    # A line for each node: its status, the age of its session, its rewards and their curve.
    for node, status in exp.status.items():
        started = {"timestamp": int(exp.board.sessions[node][:13]) / 1000}
        line = f"{node:16.16} {status:6} {age(started):>6}  "
        rows = exp.select(node_id=node)
        if node == drive_store.COORDINATOR_ID:
            opened = exp.board.progress.get(("open", node), drive_store.At(0)).round
            lines.append(f"{line}has opened round {opened}")
        else:
            rewards = [row["reward"] or 0.0 for row in rows]
            line += f"{len(rows):5} rewards, in all {sum(rewards):8.2f}, "
            line += f"last {age(rows[-1]):>4} ago  " if rows else "none yet  "
            width = max(8, min(24, screen.columns - len(line)))
            lines.append(line + sparkline(moving_average(rewards), width))

    # Rewards by task, and what looks wrong.
    recent = exp.rounds(exp.board.open_round - 9, exp.board.open_round + 1)
    if recent:
        tasks = reward_per_task(recent).items()
        lines.append("by task: " + ", ".join(f"{task[:24]} {value:.2f}" for task, value in tasks))
        lines.append(f"! {diagnose(recent)}" if not has_signal(recent) else "")
    sick = {
        "dead": "silent for STALE_AFTER_SECONDS",
        "failed": "ended with an error, see its logs/stdout.log",
    }
    for status, text in sick.items():
        if names := join_names(exp.with_status(status), 5):
            lines.append(f"! {text}: {names}")
    for reason, count in store.invalid_files.most_common(3):
        lines.append(f"! unusable file, {count} times: {drive_store.printable(reason)}")
    if exp.is_finished:
        lines.append("finished; NODE_ROLE=report compares experiments")

    lines += latest_group(store, exp.board)
    shown = []
    for line in lines:
        shown += textwrap.wrap(line, screen.columns, subsequent_indent="  ")
    return "\n".join(shown[: screen.lines - 1])


def age(row: dict) -> str:
    """How long ago a reward was submitted. "3s"."""
    return format_duration(max(0.0, time.time() - row["timestamp"]))


def latest_group(store, board) -> list[str]:
    """A group of the open round as lines, with three of its completions."""
    at = drive_store.At(board.open_round)
    for node in reversed(board.reached("rollouts", at)):
        groups = None
        with contextlib.suppress(drive_store.InvalidFileError):
            groups = store.fetch_rollouts(node, at)
        if groups:
            lines = [f"{node} was asked:"]
            return lines + format_question(groups[0]) + format_completions(groups[0])
    return []


def format_question(group: dict) -> list[str]:
    """A question and its right answer as lines. Of a long question the last three lines remain."""
    width = shutil.get_terminal_size((80, 40)).columns - 16
    text = " ".join(group["prompt"].split())  # grids come in several lines
    text += f"  (right: {' '.join(group['answer'].split())})"
    lines = textwrap.wrap(drive_store.printable(text, 10**6), max(20, width))[-3:]
    return [("? " if i == 0 else "  ") + line for i, line in enumerate(lines)]


def format_completions(group: dict, label: str = "") -> list[str]:
    """Three completions with their rewards, a line each."""
    width = shutil.get_terminal_size((80, 40)).columns - 22 - len(label)
    lines = []
    for completion in group["completions"][:3]:
        text = drive_store.printable(repr(completion["response"]), max(20, width))
        lines.append(f"  {label}{completion['reward']:4.2f}  {text}")
    return lines


# -------- The report and the pictures -------------------------------------------------------------


ARM_SETTINGS = (
    "NUM_TRAIN_SAMPLES",
    "NUM_TRANSPLANT_TREES",
    "EXTERNAL_FILTER",
    "LOCAL_OVERSAMPLE",
)


def compare_arms(experiments: list[Experiment]) -> list[dict]:
    """One row for each set of experiments that differ in nothing but SEED and MAX_ROUNDS, the best
    first, with its gain over the J = 0 baseline.

    They are compared over the rounds that all have, or the longest run would have earned most.
    """
    common = min((exp.rows[-1]["round"] + 1 for exp in experiments), default=0)
    arms = {}
    for exp in experiments:
        # Runs that differ in another setting are never averaged. A gain is taken over the
        # baseline of the same family: other settings may differ only in what makes the arm.
        family = exp.config | {"nodes": len(exp.nodes)}
        for name in ARM_SETTINGS + ("SEED", "EXPERIMENT_NAME", "created_at", "maker", "MAX_ROUNDS"):
            family.pop(name, None)
        key = (json.dumps(family, sort_keys=True), exp.arm)
        shortened = dataclasses.replace(exp, rows=exp.rounds(0, common))
        arms.setdefault(key, []).append(shortened)

    # A row for each arm, over seeds.
    rows = []
    for members in arms.values():
        # The paper's metric, divided by the number of nodes.
        totals = [mean(map(exp.total, exp.nodes)) or 0.0 for exp in members]
        pairs = zip(members, totals, strict=True)
        held_out = [mean_of("held_out", exp.last_rounds) for exp in members]
        rows.append(
            {
                "I/J": members[0].arm,
                "nodes": len(members[0].nodes),
                "runs": len(members),
                "rounds": common,
                "reward per node": mean(totals),
                "sd": statistics.stdev(totals) if len(totals) > 1 else None,
                "held-out": mean(held_out),
                "gain": None,
                "interval": None,
                "by seed": [[exp.setting("SEED"), total] for exp, total in pairs],
                "completions": mean(sum(exp.curve("completions")) for exp in members),
                "experiments": [exp.name for exp in members],
                "curves": [exp.curve() for exp in members],
            }
        )

    # The baseline trains on as many groups, all its own. Runs of equal seeds are compared; fewer
    # than two of them, or a baseline near 0, would say nothing.
    totals = {key: dict(row["by seed"]) for key, row in zip(arms, rows, strict=True)}
    for (family, arm), row in zip(arms, rows, strict=True):
        # "4/4 unfiltered" -> 4, 4 -> the totals of "8/0"
        own, _, external = arm.split()[0].partition("/")
        ours = totals[family, arm]
        baseline = totals.get((family, f"{int(own) + int(external)}/0"), {})
        seeds = ours.keys() & baseline.keys() if external != "0" else ()
        if len(seeds) > 1 and min(baseline[seed] for seed in seeds) > 0.01 * common:
            gains = [ours[seed] / baseline[seed] - 1 for seed in sorted(seeds)]
            margin = t_95(len(gains)) * statistics.stdev(gains) / math.sqrt(len(gains))
            row["gain"] = mean(gains)
            row["interval"] = [row["gain"] - margin, row["gain"] + margin]
    return sorted(rows, key=lambda row: -row["reward per node"])


def t_95(num_pairs: int) -> float:
    """Student's t for a 95% interval of the mean of so many values, 2 or more."""
    table = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
    return table[num_pairs - 2] if num_pairs <= 10 else 2.2


def format_report(experiments: list[Experiment], rows: list[dict]) -> str:
    """Two tables in Markdown: the experiments and the arms."""
    headers = ["experiment", "rounds", "nodes", "I/J", "model", "last", "reward at the end"]

    # The experiments.
    cells = []
    for exp in experiments:
        model = drive_store.printable(exp.config.get("MODEL_NAME"), 24)
        end = mean_of("reward", exp.last_rounds)
        last = f"{age(exp.rows[-1])} ago"
        num_rounds = exp.rows[-1]["round"] + 1
        cells.append([exp.name, num_rounds, len(exp.nodes), exp.arm, model, last, end])
    tables = [markdown_table(cells, headers)]

    # The arms.
    columns = ["I/J", "nodes", "runs", "reward per node", "sd", "held-out", "completions", "gain"]
    cells = []
    for row in rows:
        gain = None
        if row["gain"] is not None:
            low, high = row["interval"]
            gain = f"{row['gain']:+.0%} ({low:+.0%} to {high:+.0%})"
        names = join_names(row["experiments"], 1)
        cells.append([*(row[name] for name in columns[:-1]), gain, names])
    tables.append(f"Over the first {rows[0]['rounds']} rounds, which all of them have:")
    tables.append(markdown_table(cells, [*columns, "experiments"]))
    return "\n\n".join(tables)


def markdown_table(cells: list, headers: list[str]) -> str:
    return tabulate(cells, headers, "github", floatfmt=".2f", missingval="")


def write_report(store, pattern: str, experiments: list[Experiment]) -> None:
    """Print the tables, and write them to reports/, with the numbers as JSON and a picture."""
    rows = compare_arms(experiments)
    text = format_report(experiments, rows)
    say(text)
    name = re.sub(r"[^A-Za-z0-9._-]", "", pattern)[:64].strip("._-") or "all"
    picture = draw({"reward": {row["I/J"]: row["curves"] for row in rows[:6]}})
    files = {"md": text.encode(), "json": json.dumps(rows).encode(), "png": picture}
    try:
        store.make_dir("/reports")
        store.remove_leftovers()
        for suffix, data in files.items():
            if data:
                store.write(f"/reports/report_{name}.{suffix}", data)
        written = f"{store.resolve('/reports').absolute()}/report_{name}"
        say(f"written: {written}.{{{','.join(files)}}}")
    except OSError as error:  # not as in training: nobody wants to wait here
        say(f"the report cannot be written: {drive_store.printable(error, 200)}")
    show_in_notebook(picture)


def write_picture(store, log) -> None:
    """Draw reports/EXPERIMENT.png if matplotlib is installed."""
    if not store.has_dir("/reports"):
        return
    picture = plot_run(read_experiment(store), log)
    if picture:
        path = f"/reports/{store.dir.name}.png"
        store.write(path, picture)
        log.info(f"picture: {store.resolve(path).absolute()}")
        show_in_notebook(picture)


def plot_run(exp: Experiment, log=None) -> bytes | None:
    """One experiment as PNG: reward of the nodes with their mean and spread, reward per task, and
    the shares that explain it."""
    # Each node begins at its own first round; a late joiner's curve is drawn from 0.
    curves = {node: [exp.curve(node_id=node)] for node in exp.nodes}
    curves["mean ± sd over nodes"] = [curve for [curve] in curves.values()]

    tasks = {task: [exp.curve(f"reward_{task}")] for task in reward_per_task(exp.rows)}
    counts = zip(exp.curve("informative_local"), exp.curve("groups"), strict=True)
    informative = [some / max(1, groups) for some, groups in counts]
    shares = {
        "own groups that are informative": [informative],
        "answers in <answer> tags": [exp.curve("answer_tag_rate")],
        "truncated answers": [exp.curve("truncated_rate")],
    }
    return draw({f"{exp.name}: reward": curves, "by task": tasks, "shares": shares}, log)


def draw(panels: dict, log=None) -> bytes | None:
    """`plot`, but a picture that cannot be drawn ends nothing: None, and a sentence. The traceback
    is in the log."""
    try:
        return plot(panels)
    except ImportError:
        text = "no picture: pip install matplotlib"
    except Exception as error:  # an installation may be broken in any way
        text = f"no picture: matplotlib raised {type(error).__name__}"
        if log:
            log.queue_traceback(error)
    (log.info if log else say)(text)
    return None


def plot(panels: dict) -> bytes:
    """{title: {label: curves}} as PNG. Of several curves, those of seeds or nodes, the mean is
    drawn with a band of one standard deviation. All are smoothed."""
    from matplotlib.figure import Figure

    figure = Figure((5 * len(panels) + 2, 4), dpi=150, layout="constrained")
    for number, (title, lines) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(1, len(panels), number)
        for label, curves in lines.items():
            # Mean and standard deviation of each round. One run may be longer than another.
            rounds = list(zip(*map(moving_average, curves), strict=False))
            center = [mean(values) for values in rounds]
            low = [mean(values) - statistics.pstdev(values) for values in rounds]
            high = [mean(values) + statistics.pstdev(values) for values in rounds]

            label = drive_store.printable(label, 32).replace("$", "")
            width = 2.5 if len(curves) > 1 else 1.2
            (line,) = axis.plot(center, label=label, alpha=0.7, linewidth=width)
            if len(curves) > 1:
                axis.fill_between(range(len(center)), low, high, color=line.get_color(), alpha=0.15)
        axis.set(title=title.replace("$", ""), xlabel="round", ylim=(0, 1.02))
        if lines:  # a node with I = 0 has no tasks
            axis.legend(fontsize=6)

    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def show_in_notebook(picture: bytes | None) -> None:
    """Show a PNG file below the cell of a notebook. Elsewhere nothing happens."""
    if picture and in_notebook():
        from IPython.display import Image, display

        display(Image(picture))


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel. The package may be imported without one."""
    if not {"ipykernel", "IPython"} <= sys.modules.keys():
        return False
    return sys.modules["IPython"].get_ipython() is not None


# -------- Text and number helpers -----------------------------------------------------------------


def say(text: str) -> None:
    """Print for people. A full disk or a reader that has gone, as in `| head`, ends nothing."""
    try:
        with tqdm.tqdm.external_write_mode():  # on a terminal the progress bar makes room
            print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # Python would complain when it exits
    except (OSError, ValueError):
        pass


def mean(values) -> float | None:
    """Mean that skips None and NaN; None if nothing is left. [1, None, 2, nan] -> 1.5."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


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
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def sparkline(values: list[float], width: int = 24) -> str:
    """A curve of values in 0 to 1 as at most `width` characters. [0, 0.5, 1] -> "▁▅█"."""
    columns = min(width, len(values))
    text = ""
    for i in range(columns):
        part = values[i * len(values) // columns : (i + 1) * len(values) // columns]
        text += "▁▂▃▄▅▆▇█"[min(7, int(8 * mean(part)))]
    return text


def natural_sort(names) -> list[str]:
    """Names in order, numbers by their value. ["n_10", "n_2"] -> ["n_2", "n_10"]."""
    return sorted(names, key=lambda name: [f"{part:0>12}" for part in re.split(r"(\d+)", name)])


def join_names(names: list[str], limit: int = 20) -> str:
    """The first names, for a sentence. (["a", "b", "c"], 2) -> "a, b and 1 more"."""
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def format_duration(seconds: float) -> str:
    """42 -> "42s", 150 -> "2m", 8000 -> "2h13m"."""
    hours, minutes = divmod(int(seconds // 60), 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m" if minutes else f"{seconds:.0f}s"
