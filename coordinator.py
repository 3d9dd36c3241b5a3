"""The coordinator, which opens rounds, and the readers of an experiment: monitor, validate, report.

The coordinator trains nothing and needs no model. The readers change nothing in an experiment. All
functions are given a store (drive_store.py).
"""

import contextlib
import io
import itertools
import math
import shutil
import statistics
import string
import sys
import textwrap
import time
from collections import Counter

from tabulate import tabulate  # comes with reasoning-gym

if "DriveStore" in globals():  # the four modules pasted into one notebook cell
    drive_store = sys.modules[__name__]
else:
    import drive_store


# -------- The coordinator -------------------------------------------------------------------------


def run_coordinator(config, store, log, signals) -> str:
    """Open one round after another until MAX_ROUNDS.

    Returns "finished", "stopped" or "superseded". Round 0 stays open until the first reward
    arrives, because models take minutes to download. With NUM_WORKERS set, the first round also
    waits until that many workers are alive, one interval at most.
    """
    coordinator_id = drive_store.COORDINATOR_ID
    session = store.register([coordinator_id], "coordinator", {})
    interval = config.COORDINATOR_ROUND_INTERVAL
    last_round = config.MAX_ROUNDS - 1
    current = max(0, store.current_round())
    store.open_round(current, coordinator_id)
    waiting_to_begin = current == 0 or (current < last_round and config.NUM_WORKERS > 0)
    log.info(f"coordinator: round {current} is open", topic="start")

    opened_at = started_at = time.monotonic()
    next_heartbeat = next_reminder = 0.0
    num_stages = 0  # until the first worker has written config.json
    history = []  # metrics of each round that ended
    while not signals.requested:
        poll_started = time.monotonic()

        # Another coordinator with a newer session takes precedence.
        sessions = store.latest_sessions()
        if sessions.get(coordinator_id, session) > session:
            return "superseded"

        # Show that this coordinator is alive.
        if poll_started >= next_heartbeat:
            pause = drive_store.heartbeat_interval(config.STALE_AFTER_SECONDS)
            next_heartbeat = poll_started + pause
            store.write_heartbeat(coordinator_id, session, current)
            log.flush(store)

        # Workers open rounds themselves while they see no live coordinator; follow them.
        newest = store.current_round()
        if newest > current:
            current = newest
            opened_at = poll_started

        # Which nodes have submitted a reward for this round, and which are still working on it?
        num_stages = num_stages or saved_setting(store, "MAX_STAGES", default=0)
        last_stage = max(0, num_stages - 1)
        submitted, pending = submission_status(
            store, sessions, current, last_stage, config.STALE_AFTER_SECONDS
        )
        alive = pending | submitted
        elapsed = poll_started - opened_at

        # Hold the first round, end after the last one, or open the next when this one is over.
        if waiting_to_begin:
            has_reward = bool(store.list_progress("rewards"))
            enough_workers = len(alive) >= config.NUM_WORKERS or elapsed >= interval
            waiting_to_begin = not (has_reward and enough_workers)
            if not has_reward:
                opened_at = poll_started
            started_at = opened_at
            if waiting_to_begin and poll_started >= next_reminder:
                next_reminder = poll_started + interval
                log_waiting(config, log, sorted(alive))
        elif current >= last_round:
            if not pending or elapsed > interval + config.STALE_AFTER_SECONDS:
                log_round(
                    store, config, log, current, num_stages, submitted, pending, started_at, history
                )
                log.event("end", learning_summary(history, "all nodes"))
                store.write_heartbeat(coordinator_id, session, current, "done")
                return "finished"
        elif should_advance(config.ROUND_ADVANCE, elapsed, interval, alive, submitted):
            store.open_round(current + 1, coordinator_id)
            log_round(
                store, config, log, current, num_stages, submitted, pending, started_at, history
            )
            current += 1
            opened_at = poll_started

        drive_store.poll_sleep(poll_started)

    store.write_heartbeat(coordinator_id, session, current, "stopped")
    return "stopped"


def log_waiting(config, log, alive: list[str]) -> None:
    """Say what the coordinator waits for before the first round, and how to start a worker."""
    workers = f"{config.NUM_WORKERS} workers" if config.NUM_WORKERS > 1 else "a worker"
    here = f"{join_names(alive, 8)} here" if alive else "none here"
    text = f"coordinator: waiting for {workers} ({here}) and a first reward"
    if len(alive) < max(1, config.NUM_WORKERS):
        text += f"; to start one:\n  GDRIVE_PATH={config.GDRIVE_PATH}"
        text += f" EXPERIMENT_NAME={config.EXPERIMENT_NAME} NODE_ID=anna python sapo.py"
    log.info(text, topic="start")


def submission_status(
    store, sessions: dict, current: int, stage: int, stale_after: float
) -> tuple[set, set]:
    """Two sets of nodes: those that submitted their reward of a stage, and those that are alive and
    did not."""
    submitted = set(store.list_nodes("rewards", current, stage)) & sessions.keys()
    pending = set()
    for node_id in drive_store.worker_ids(sessions):
        if node_id in submitted:
            continue
        if store.node_status(node_id, sessions[node_id], stale_after) == "alive":
            pending.add(node_id)
    return submitted, pending


def should_advance(strategy: str, elapsed: float, interval: float, alive, submitted) -> bool:
    """Whether the next round is to be opened.

    time: the interval is over; completion: all live workers have submitted; hybrid: either.
    Rounds never advance without a live worker or a submission.
    """
    interval_is_over = elapsed >= interval and bool(alive or submitted)
    all_submitted = bool(submitted) and set(alive) <= set(submitted)
    if strategy == "time":
        return interval_is_over
    if strategy == "completion":
        return all_submitted
    if strategy == "hybrid":
        return interval_is_over or all_submitted
    raise ValueError(f"ROUND_ADVANCE={strategy!r}")


# -------- The round's line ------------------------------------------------------------------------

LINE_METRICS = (
    "reward",
    "answer_tag_rate",
    "truncated_rate",
    "local_groups",
    "external_groups",
    "external_short",
    "informative_groups",
)


def log_round(
    store,
    config,
    log,
    round_: int,
    num_stages: int,
    submitted,
    pending,
    start_time: float,
    history: list[dict],
) -> None:
    """Log one line for a round that has ended, and write its winners.

    history: metrics of the rounds that ended since start_time; the round's are appended.
    """
    rewards = write_winners(store, round_, submitted, max(1, num_stages))
    metrics = {"ended": time.monotonic()}
    for name in (*LINE_METRICS, "held_out"):
        metrics[name] = nanmean(row.get(name) for row in rewards)
    history.append(metrics)

    notes = []
    if pending:
        notes.append(f"late: {join_names(sorted(pending), 3)}")
    label = format_round(round_, config.MAX_ROUNDS)
    rounds_left = config.MAX_ROUNDS - 1 - round_
    log.info(format_metrics(label, history, start_time, rounds_left, notes))


def format_metrics(
    label: str, history: list[dict], start_time: float, rounds_left: int, notes: list[str]
) -> str:
    """The line of a round: everything that explains a flat curve, in the width of the terminal.

    history: metrics of all rounds since start_time, the newest last. notes: warnings, which always
    stay. The least important parts are dropped until the line fits. The manual explains the words.
    """
    metrics = {name: history[-1].get(name) or 0.0 for name in LINE_METRICS}
    recent = history[-20:]
    mean_reward = nanmean(row["reward"] for row in recent)
    held_out = history[-1].get("held_out")
    is_generating = history[-1]["reward"] is not None  # not with I = 0
    seconds, eta = format_timing(start_time, history, rounds_left)

    # Groups are means over nodes, so they may be fractions. Without J there are no peers to name.
    groups = f"{format_number(metrics['local_groups'])} own"
    if metrics["external_groups"] + metrics["external_short"] > 0:
        groups += f" + {format_number(metrics['external_groups'])} peer"
    groups += f" groups, {format_number(metrics['informative_groups'])} informative"

    truncated = metrics["truncated_rate"]
    parts = [  # (rank, text): the highest rank is dropped first, rank 0 never
        (0, label),
        (0, f"reward {metrics['reward']:.2f}" if is_generating else ""),
        (4, f"{len(recent)} rounds: {mean_reward:.2f}" if is_generating and recent[1:] else ""),
        (1, "" if held_out is None else f"held-out {held_out:.2f}"),
        (2, f"tags {metrics['answer_tag_rate']:.0%}" if is_generating else ""),
        (0 if truncated > 0.1 else 5, f"cut {truncated:.0%}" if is_generating else ""),
        (0, groups),
        *((0, note) for note in notes),
        (6, seconds),
        (3, eta),
    ]
    parts = [part for part in parts if part[1]]
    width = shutil.get_terminal_size((100, 24)).columns
    while len(" | ".join(text for _, text in parts)) > width:
        least_important = max(parts, key=lambda part: part[0])
        if least_important[0] == 0:
            break
        parts.remove(least_important)
    return " | ".join(text for _, text in parts)


def format_timing(start_time: float, history: list[dict], rounds_left: int) -> tuple[str, str]:
    """Seconds of the last round by the wall clock, and the time left at the pace of the last ten
    rounds. ("0.8s", "eta 2m"); the second is "" during the first three rounds."""
    ends = [start_time]
    ends += [row["ended"] for row in history]
    ends = ends[-11:]
    seconds = f"{ends[-1] - ends[-2]:.1f}s"
    if len(history) < 4:
        return seconds, ""
    seconds_per_round = (ends[-1] - ends[0]) / (len(ends) - 1)
    return seconds, f"eta {format_duration(seconds_per_round * rounds_left)}"


def write_winners(store, round_: int, node_ids, num_stages: int) -> list[dict]:
    """Write winners/round_000012.json, {node_id: its mean reward}, the best first. For people.

    Returns the rewards of the round.
    """
    rewards = store.read_rewards(round_, node_ids, num_stages)
    means = {}
    for node_id, rows in group_by("node_id", rewards).items():
        means[node_id] = nanmean(row["reward"] for row in rows)
    if means:
        best_first = sorted(means.items(), key=lambda item: (-(item[1] or 0.0), item[0]))
        store.write_atomic(f"winners/round_{round_:06d}.json", dict(best_first))
    return rewards


def format_round(round_: int, max_rounds: int) -> str:
    """(7, 200) -> "007/200"."""
    return f"{round_:0{len(str(max_rounds))}d}/{max_rounds}"


def format_number(value: float) -> str:
    """4.0 -> "4", 1.75 -> "1.8"."""
    return f"{value:.1f}".removesuffix(".0")


def format_duration(seconds: float) -> str:
    """42 -> "42s", 150 -> "2m", 8000 -> "2h13m"."""
    hours, minutes = divmod(int(seconds // 60), 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m" if minutes else f"{seconds:.0f}s"


# -------- Reading an experiment -------------------------------------------------------------------


def all_rewards(store, cache: dict | None = None) -> list[dict]:
    """Every reward of a registered node, in order, with the columns that pandas users expect.

    cache: {(round, stage, node_id): reward}, to be passed again. Reward files never change, so each
    is read once.
    """
    cache = {} if cache is None else cache
    newest = store.current_round()
    for node_id in store.latest_sessions():
        for round_, stage in store.list_stages("rewards", node_id):
            key = (round_, stage, node_id)
            if round_ <= newest and key not in cache:
                reward = store.read_reward(round_, stage, node_id)
                if reward is not None:
                    reward["experiment"] = store.experiment_dir.name
                    reward["my_reward"] = reward["reward"]
                    cache[key] = reward
    return [cache[key] for key in sorted(cache)]


def read_log(store, path: str) -> list[dict]:
    """The records of a log. Lines that cannot be used are skipped, as is a log over 256 MiB."""
    try:
        lines = (store.read_bytes(path, 256 << 20) or b"").splitlines()
    except drive_store.InvalidFileError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(drive_store.InvalidFileError):
            records.append(drive_store.parse_json(line))
    return records


def read_metrics(store, node_id: str) -> list[dict]:
    """The usable rows of a node's metrics.jsonl, one for each round and stage: of one that was
    repeated, the last row counts. "teachers" is as the node wrote it, everything else a number."""
    rows = {}
    for row in read_log(store, f"logs/{node_id}/metrics.jsonl"):
        metrics = drive_store.parse_reward(row)
        if metrics is not None and {"round", "informative_groups"} <= metrics.keys():
            metrics["teachers"] = row.get("teachers")
            rows[metrics["round"], metrics.get("stage")] = metrics
    return list(rows.values())


def saved_setting(store, name: str, default: int) -> int:
    """An integer from config.json, or `default` if it is missing or invalid."""
    value = (store.read_json_matching("config.json") or {}).get(name)
    return value if type(value) is int and 0 < value <= 10**6 else default


def experiment_status(store, stale_after: float = 300.0) -> dict:
    """The state of an experiment now."""
    rewards = all_rewards(store)
    sessions = store.latest_sessions()
    node_ids = drive_store.worker_ids(sessions)
    statuses = [store.node_status(node_id, sessions[node_id], stale_after) for node_id in node_ids]

    cumulative = {}
    for node_id, rows in group_by("node_id", rewards).items():
        cumulative[node_id] = sum(row["reward"] or 0.0 for row in rows)

    checkpoints = {}  # round -> path
    for process in node_ids:
        checkpoints |= store.list_checkpoints(process)
    latest_checkpoint = None
    if checkpoints:
        latest_checkpoint = str(store.experiment_dir / checkpoints[max(checkpoints)])

    timestamps = [row["timestamp"] for row in rewards]
    return {
        "experiment": store.experiment_dir.name,
        "current_round": store.current_round(),
        "current_stage": rewards[-1]["stage"] if rewards else 0,
        "num_active_peers": statuses.count("alive"),
        "peer_ids": node_ids,
        "last_updated": max(timestamps, default=None),
        "cumulative_rewards": cumulative,
        "latest_checkpoint": latest_checkpoint,
        "duration_seconds": max(timestamps) - min(timestamps) if timestamps else 0.0,
    }


def validate_experiment(store, max_rounds: int, num_nodes: int) -> list[str]:
    """What a finished run lacks, one sentence each. An empty list means that it is complete."""
    config = store.read_json_matching("config.json") or {}
    rewards = all_rewards(store)
    by_node = group_by("node_id", rewards)
    newest = store.current_round()
    last = max_rounds - 1
    problems = []

    # The experiment, its rounds and its files.
    if not isinstance(config.get("MAX_STAGES"), int):
        problems.append(f"{store.experiment_dir}: no config.json with MAX_STAGES")
    if newest < last:
        problems.append(f"the open round is {newest}, expected {last}")
    if len(by_node) < num_nodes:
        problems.append(f"{len(by_node)} nodes submitted rewards, expected {num_nodes}")
    without_rewards = sorted(set(range(max_rounds)) - {row["round"] for row in rewards})
    if without_rewards:
        problems.append(f"rounds without rewards: {without_rewards[:9]}")
    if not store.list_progress("rollouts"):
        problems.append("no rollouts")
    unfinished = [node_id for node_id, rows in by_node.items() if rows[-1]["round"] < last]
    if unfinished:
        problems.append(f"no reward for the last round {last}: {join_names(unfinished)}")
    if not any(last in store.list_checkpoints(process) for process in by_node):
        problems.append(f"no checkpoint after the last round {last}")

    # Something must have been learned, and from peers if there are any.
    nonzero = {name for row in rewards for name in row if row[name]}
    has_peers = num_nodes > 1 and config.get("NUM_TRANSPLANT_TREES") != 0
    if "informative_groups" not in nonzero:
        problems.append("no node trained on an informative group")
    if "grad_norm" not in nonzero:
        reason = diagnose_no_signal(rewards)
        problems.append(f"every gradient is zero: nothing was learned: {reason}")
    if has_peers and "external_groups" not in nonzero:
        problems.append("no external group was drawn")

    # Each node's log and model.
    for node_id in by_node:
        names = store.list_names(f"logs/{node_id}") + store.list_names(f"models/{node_id}")
        missing = {"metrics.jsonl", "config.json", "tokenizer.json"} - set(names)
        if not any(name.endswith(".safetensors") for name in names):
            missing.add("weights")
        if missing:
            listed = ", ".join(sorted(missing))
            problems.append(f"logs/{node_id} and models/{node_id} lack {listed}")
    return problems


# -------- Diagnosis -------------------------------------------------------------------------------


def learning_summary(history: list[dict], who: str) -> str:
    """Say in a sentence whether rewards rose: the last 20 rounds against the first 20, or one half
    against the other. history: metrics of each round."""
    verdict, part, scores = learning_verdict(history)
    if verdict == "nothing was learned":
        verdict += f": {diagnose_no_signal(history)}"
    if verdict == "little was learned":
        verdict += ": more MAX_ROUNDS, another LEARNING_RATE?"
    if not scores:
        return f"{verdict}; set EVAL_INTERVAL, because a node with I = 0 has no rewards"

    is_reward = any(metrics.get("reward") is not None for metrics in history)
    score = "mean reward" if is_reward else "held-out accuracy"
    unit = "rounds" if is_reward else "measurements"
    change = f"{score} of {who} {nanmean(scores[:part]):.2f} -> {nanmean(scores[-part:]):.2f}"
    rounds = f"first and last {part} of {len(scores)} {unit}"
    return f"{verdict}; {change} ({rounds}) {sparkline(scores)}"


def learning_verdict(history: list[dict]) -> tuple[str, int, list[float]]:
    """Whether rewards rose, in a few words; how many rounds at either end were compared; and the
    rewards. history: metrics of each round. Without any reward (I = 0), held-out accuracies count.
    """
    scores = [metrics["reward"] for metrics in history if metrics.get("reward") is not None]
    if not scores:
        scores = [metrics["held_out"] for metrics in history if metrics.get("held_out") is not None]
    part = min(20, (len(scores) + 1) // 2)
    if not any(metrics["informative_groups"] for metrics in history):
        verdict = "nothing was learned"
    elif len(history) < 10 or not scores:
        verdict = "too few rounds to tell what was learned"
    elif nanmean(scores[-part:]) > nanmean(scores[:part]) + 0.05:
        verdict = "learned"
    else:
        verdict = "little was learned"
    return verdict, part, scores


def diagnose_no_signal(metrics: list[dict]) -> str:
    """Say why all rewards within each group were equal, and which variable may help.

    metrics: those of recent rounds or rewards.
    """
    rates = {name: nanmean(row.get(name) for row in metrics) or 0.0 for name in LINE_METRICS}
    if rates["reward"] > 0.95:
        advice = "harder TASKS: all answers are right"
    elif rates["answer_tag_rate"] < 0.05:
        advice = "raise WARM_START_STEPS or take easier TASKS: <answer> tags are rare"
    elif rates["truncated_rate"] > 0.5:
        advice = "raise MAX_NEW_TOKENS: the answers are cut off"
    else:
        advice = "easier TASKS, or a better MODEL_NAME: the answers are wrong"
    numbers = "reward {reward:.2f}, tags {answer_tag_rate:.0%}, cut {truncated_rate:.0%}"
    reason = f"equal rewards within each group give no gradient ({numbers.format(**rates)})"
    return f"{reason}: {advice}"


def reward_per_task(metrics: list[dict]) -> dict[str, float]:
    """{task: mean reward}, the best first, for the 20 tasks that occur most."""
    counts = Counter()
    for row in metrics:
        counts.update(name for name in row if name.startswith("reward_"))

    means = {}
    for name, _ in counts.most_common(20):
        means[name.removeprefix("reward_")] = nanmean(row.get(name) for row in metrics)
    return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))


# -------- The monitor -----------------------------------------------------------------------------


def monitor(store, stale_after: float, max_rounds: int | None, once: bool, signals) -> None:
    """Show the dashboard every 10 s until the run is over, or a single time.

    max_rounds: if it is not what the experiment began with. A notebook shows the plot, too.
    """
    cache = {}
    while True:
        plot = None
        try:
            text = dashboard(store, stale_after, cache, max_rounds)
            if in_notebook():
                plot = plot_run(all_rewards(store, cache), store.experiment_dir.name)
        except OSError as error:
            reason = drive_store.printable(error)
            text = f"the shared folder cannot be read ({reason}); trying again"

        # Replace what was shown before.
        if in_notebook():
            from IPython.display import Image, clear_output, display

            clear_output(wait=True)
            if plot:
                display(Image(plot))
        clear_screen = "\033[2J\033[H" if sys.stdout.isatty() else ""
        print(clear_screen + text, flush=True)

        # Sleep in small steps, so that Ctrl-C works.
        for _ in range(50):
            if once or signals.requested or "\nfinished; " in text:
                return
            time.sleep(0.2)


def dashboard(store, stale_after: float, cache: dict, max_rounds: int | None) -> str:
    """An experiment as text that fits the terminal: rounds, nodes, tasks, warnings, one group."""
    screen = shutil.get_terminal_size((100, 40))
    sessions = store.latest_sessions()
    status = {}
    for node_id, session in sessions.items():
        status[node_id] = store.node_status(node_id, session, stale_after)
    # Read rewards after the statuses: a node that has exited has all its rewards there.
    rewards = all_rewards(store, cache)
    current = store.current_round()
    planned = max_rounds or saved_setting(store, "MAX_ROUNDS", default=0)
    if rewards and not max_rounds:
        planned = max(planned, current + 1)

    # The experiment as a whole.
    coordinator_status = status.pop(drive_store.COORDINATOR_ID, "none")
    num_alive = list(status.values()).count("alive")
    workers = f"{num_alive} of {len(status)} workers alive" if status else "no worker yet"
    published = store.list_progress("rollouts")
    rounds = f"round {current} of {planned}" if planned else f"round {current}"
    if saved_setting(store, "MAX_STAGES", default=1) > 1:
        stages = [stage for round_, stage in published.values() if round_ == current]
        rounds += f", stage {max(stages, default=0)}"
    if current < 0:
        rounds = "no round is open yet"
    name = store.experiment_dir.name
    lines = [f"{name}: {rounds}, {workers}, coordinator {coordinator_status}"]
    if rewards:
        newest = rewards[-1]["round"]
        mean = nanmean(row["reward"] for row in rewards if row["round"] == newest)
        age = format_duration(max(0.0, time.time() - rewards[-1]["timestamp"]))
        lines.append(f"reward {mean or 0:.2f} in round {newest}, {age} ago")

    # How many nodes have written the files of the newest rounds?
    counts = []
    for t in range(max(0, current - 2), current + 1):
        num_rollouts = sum(marker >= (t, 0) for marker in published.values())
        num_rewards = sum(row["round"] == t for row in rewards)
        counts.append(f"round {t}: {num_rollouts} rollouts, {num_rewards} rewards")
    lines += textwrap.wrap("files of " + "; ".join(counts), screen.columns) if counts else []

    # A line for each node: its status, since when it runs, its rewards and their curve.
    by_node = group_by("node_id", rewards)
    for node_id in sorted(status):
        since = format_duration(max(0.0, time.time() - int(sessions[node_id][:13]) / 1000))
        own = [row["reward"] or 0.0 for row in by_node.get(node_id, [])]
        line = f"{node_id:16.16} {status[node_id]:6} since {since:>5} {len(own):5} rewards,"
        line += f" in all {sum(own):8.2f}  "
        curve_width = max(8, min(24, screen.columns - len(line)))
        lines.append(line + sparkline(moving_average(own), curve_width))

    # Rewards by task, and what looks wrong.
    recent = [row for row in rewards if row["round"] > current - 10]
    tasks = []
    for task, mean in reward_per_task(recent).items():
        tasks.append(f"{drive_store.printable(task, 24)} {mean:.2f}")
    if tasks:
        lines += textwrap.wrap("by task: " + ", ".join(tasks), screen.columns)
    for warning in list_warnings(store, status, recent, current, planned, stale_after):
        lines += textwrap.wrap(f"! {warning}", screen.columns, subsequent_indent="  ")

    is_over = bool(rewards) and rewards[-1]["round"] >= planned - 1
    if is_over and "alive" not in status.values():
        lines.append("finished; NODE_ROLE=report compares experiments")
    lines += latest_group(store, current, screen.columns)
    return "\n".join(line[: screen.columns] for line in lines[: screen.lines - 1])


def list_warnings(
    store, status: dict, recent: list[dict], current: int, planned: int, stale_after: float
) -> list[str]:
    """Sentences about what looks wrong. recent: the rewards of the last ten rounds."""
    warnings = []
    for reason, count in store.invalid_files.most_common(3):
        warnings.append(f"unusable file, {count} times: {drive_store.printable(reason)}")
    if recent and not any(row.get("informative_groups") for row in recent):
        warnings.append(f"nothing is learned: {diagnose_no_signal(recent)}")
    dead = [node_id for node_id in sorted(status) if status[node_id] == "dead"]
    if dead and current < planned - 1:
        warnings.append(f"silent: {join_names(dead, 8)} (STALE_AFTER_SECONDS={stale_after:g})")
    free = shutil.disk_usage(store.experiment_dir).free / 1e9
    if free < 1:
        warnings.append(f"the disk is nearly full: {free:.2f} GB free")
    return warnings


def latest_group(store, current: int, width: int) -> list[str]:
    """A group of the open round as lines, with three of its completions."""
    for node_id in reversed(store.list_nodes("rollouts", current, 0)):
        try:
            groups = store.fetch_rollouts(current, 0, node_id)
        except drive_store.InvalidFileError:
            continue
        if not groups:
            continue
        group = groups[0]
        lines = [f"{node_id} was asked:"]
        lines += format_question(group["prompt"], group["answer"], width)
        lines += format_completions(group["completions"][:3], width)
        return ["", *lines]
    return []


def format_question(question: str, answer: str, width: int) -> list[str]:
    """A question and its right answer as lines. Of a long question the last three lines remain."""
    text = " ".join(str(question).split())  # grids come in several lines
    if answer:
        text += f"  (right: {' '.join(str(answer).split())})"
    lines = textwrap.wrap(drive_store.printable(text, 10**6), max(20, width - 2))
    if len(lines) > 3:
        lines = ["…" + lines[-3][1:], *lines[-2:]]
    return [("? " if i == 0 else "  ") + line for i, line in enumerate(lines)]


def format_completions(completions: list[dict], width: int, label: str = "") -> list[str]:
    """Completions with their rewards, one or two lines each."""
    lines = []
    for completion in completions:
        text = drive_store.printable(repr(completion["response"]), 10**6)
        head = f"  {label}{completion['reward']:4.2f}  "
        room = max(20, width - len(head))
        if len(text) > 2 * room:
            text = text[: 2 * room - 1] + "…"
        lines.append(head + text[:room])
        if len(text) > room:
            lines.append(" " * len(head) + text[room:])
    return lines


def show_in_notebook(plot: bytes) -> None:
    """Show a PNG file below the cell of a notebook. Elsewhere nothing happens."""
    if in_notebook():
        from IPython.display import Image, display

        display(Image(plot))


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel. The package may be imported without one."""
    if not {"ipykernel", "IPython"} <= sys.modules.keys():
        return False
    return sys.modules["IPython"].get_ipython() is not None


# -------- The report and the plots ----------------------------------------------------------------

ARM_SETTINGS = (  # an arm of a comparison: the runs that agree in these
    "NUM_TRAIN_SAMPLES",
    "NUM_TRANSPLANT_TREES",
    "LOCAL_OVERSAMPLE",
    "EXTERNAL_FILTER",
    "EXTERNAL_FLOOR",
)
T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
)  # Student's t, 2 to 10 pairs


def summarize_experiment(store) -> dict | None:
    """One experiment as numbers, None if it has no rewards.

    Raises ValueError if its config.json cannot be used.
    """
    rewards = all_rewards(store)
    if not rewards:
        return None
    config = store.read_json("config.json") or {}
    for name in ARM_SETTINGS:
        value = config.get(name)
        if not isinstance(value, bool) and not drive_store.is_finite_number(value):
            raise ValueError(f"config.json lacks one of {', '.join(ARM_SETTINGS)}")

    # Rewards and completions of each round.
    num_nodes = len(group_by("node_id", rewards))
    by_round = group_by("round", rewards)
    curve = []
    completions = []
    history = []  # without the rounds that all nodes skipped
    for round_ in range(rewards[-1]["round"] + 1):
        rows = by_round.get(round_, [])
        curve.append(nanmean(row["reward"] for row in rows) or 0.0)
        completions.append(sum(row.get("completions", 0) for row in rows) / num_nodes)
        if rows:
            metrics = {}
            for name in ("reward", "held_out", "informative_groups"):
                metrics[name] = nanmean(row.get(name) for row in rows)
            history.append(metrics)

    # Its arm, such as "4/4" or "8/0 x2", and all other settings.
    own, external, oversample, is_filtered, floor = (config[name] for name in ARM_SETTINGS)
    arm = f"{own}/{external}"
    if oversample > 1:
        arm += f" x{oversample}"
    if external and not is_filtered:
        arm += " unfiltered"
    if floor:
        arm += f" floor {floor:g}"
    settings = {}
    for name, value in config.items():
        if name.isupper() and name not in (*ARM_SETTINGS, "SEED", "EXPERIMENT_NAME"):
            settings[drive_store.printable(name, 40)] = drive_store.printable(value, 1000)
    settings["nodes"] = str(num_nodes)

    last_tenth = rewards[-len(rewards) // 10 :]
    return {
        "experiment": store.experiment_dir.name,
        "seed": drive_store.printable(config.get("SEED")),
        "arm": arm,
        "baseline": f"{own + external}/0",  # a lone node that trains on as many groups
        "settings": settings,
        "per_node": sum(row["reward"] or 0.0 for row in rewards) / num_nodes,
        "held_out": nanmean(row.get("held_out") for row in last_tenth),
        "curve": curve,
        "history": history,
        "spent": list(itertools.accumulate(completions)),
        "tasks": reward_per_task(last_tenth),
    }


def compare_arms(runs: list[dict]) -> list[dict]:
    """One row for each set of runs that differ in their seed alone, the best first, with its gain
    over the J = 0 baseline.

    The gain is a mean of log ratios paired by seed, and its 95% interval is Student's t. It is None
    with fewer than 3 or more than 10 paired seeds, and if both runs of a pair earned next to
    nothing.
    """
    # Runs that differ in any setting but the seed are never averaged.
    differing = []
    for name in runs[0]["settings"] if runs else ():
        if len({run["settings"].get(name) for run in runs}) > 1:
            differing.append(name)
    arms = {}
    for run in runs:
        condition = " ".join(f"{name}={run['settings'].get(name)}" for name in differing)
        arms.setdefault((condition, run["arm"]), []).append(run)

    conditions = sorted({condition for condition, _ in arms})
    rows = []
    for (condition, arm), members in arms.items():
        # A letter stands for the settings, which `format_report` lists below the table.
        letter = string.ascii_letters[conditions.index(condition) % 52]
        mean_history = []
        for metrics in zip(*(run["history"] for run in members), strict=False):
            mean = {name: nanmean(row[name] for row in metrics) for name in metrics[0]}
            mean_history.append(mean)
        totals = {run["seed"]: run["per_node"] for run in members}
        floor = 0.05 * len(members[0]["curve"])  # below it the reward never rose
        row = {
            "label": f"{arm} ({letter})" if len(conditions) > 1 else arm,
            "condition": f"({letter}) {condition}" if len(conditions) > 1 else "",
            "verdict": learning_verdict(mean_history)[0],
            "runs": members,
            "per_node": nanmean(totals.values()),
            "sd": statistics.stdev(totals.values()) if len(totals) > 1 else None,
            "held_out": nanmean(run["held_out"] for run in members),
            "completions": nanmean(run["spent"][-1] for run in members),
            "gain": None,
            "low": None,
            "high": None,
        }

        # The same seeds of the baseline.
        baseline = members[0]["baseline"]
        pairs = []
        for run in arms.get((condition, baseline), []):
            if run["seed"] in totals:
                pairs.append((totals[run["seed"]], run["per_node"]))
        is_measurable = 3 <= len(pairs) <= 10 and min(map(max, pairs)) > floor
        if arm != baseline and is_measurable:
            row["gain"], row["low"], row["high"] = paired_gain(pairs)
        rows.append(row)
    return sorted(rows, key=lambda row: -row["per_node"])


def paired_gain(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Mean relative gain of the first over the second of each pair, and its 95% interval."""
    logs = [math.log(max(ours, 1e-3) / max(theirs, 1e-3)) for ours, theirs in pairs]
    mean = nanmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs)) * T_95[len(logs) - 2]
    return math.expm1(mean), math.expm1(mean - error), math.expm1(mean + error)


def format_report(rows: list[dict]) -> str:
    """Two tables: cumulative reward per node, gain over the baseline and cost; reward per task."""
    # The arms.
    cells = []
    for row in rows:
        gain = ""
        if row["gain"] is not None:
            gain = f"{row['gain']:+.0%} ({row['low']:+.0%} to {row['high']:+.0%})"
        if not gain and row["verdict"] != "learned":
            gain = row["verdict"].removesuffix(" to tell what was learned")
        numbers = [f"{row['per_node']:.2f}"]
        for name, digits in (("sd", 2), ("held_out", 2), ("completions", 0)):
            numbers.append("" if row[name] is None else f"{row[name]:.{digits}f}")
        cells.append([row["label"][:20], f"{len(row['runs'])}", *numbers, gain])
    headers = ["I/J", "runs", "cumulative\nreward\nper node", "sd", "held-\nout", "completions"]
    headers.append("gain (95%)")

    # Columns without a value are left out. (Held-out accuracies need EVAL_INTERVAL.)
    columns = []
    for header, *column in zip(headers, *cells, strict=True):
        if any(column):
            columns.append([header, *column])
    headers, *cells = zip(*columns, strict=True)
    alignment = ("left", *["right"] * (len(headers) - 2), "left")
    text = tabulate(cells, headers, "simple", disable_numparse=True, colalign=alignment)
    for condition in sorted({row["condition"] for row in rows} - {""}):
        text += "\n" + textwrap.fill(condition, 80, subsequent_indent="    ")

    # Reward per task at the end, a column for each arm, five arms to a table.
    for i in range(0, len(rows), 5):
        text += "\n\n" + format_task_rewards(rows[i : i + 5])
    return text


def format_task_rewards(rows: list[dict]) -> str:
    """A table of the rewards per task at the end, a column for each arm."""
    tasks = set()
    for row in rows:
        for run in row["runs"]:
            tasks |= run["tasks"].keys()
    cells = []
    for task in sorted(tasks):
        cell = [drive_store.printable(task, 24)]
        for row in rows:
            cell.append(nanmean(run["tasks"].get(task) for run in row["runs"]))
        cells.append(cell)
    headers = ["reward at the end", *(row["label"][:20] for row in rows)]
    return tabulate(cells, headers, "simple", floatfmt=".2f", missingval="-")


def new_figure(height: float = 4.2):
    """An empty figure, or None and a sentence if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return None
    return Figure((10, height), dpi=150, layout="constrained")


def png_bytes(figure) -> bytes:
    """The figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def plot_run(rewards: list[dict], name: str) -> bytes | None:
    """One experiment as PNG: reward per node, reward per task, shares of informative groups, of
    tagged answers and of active nodes, and the distribution of the first and the last rewards. None
    if matplotlib is missing or there are no rewards."""
    figure = new_figure(height=7)
    if figure is None or not rewards:
        return None
    (nodes_axis, tasks_axis), (shares_axis, rewards_axis) = figure.subplots(2, 2)
    by_round = group_by("round", rewards)
    rounds = list(by_round)
    num_nodes = len(group_by("node_id", rewards))

    def plot_mean(axis, value, *style, **options):
        """Plot the smoothed mean of value(row) over the rows of each round."""
        means = []
        for rows in by_round.values():
            means.append(nanmean(value(row) for row in rows))
        axis.plot(rounds, moving_average(means), *style, **options)

    # Reward of each node, and of all.
    for node_id, rows in group_by("node_id", rewards).items():
        own_rounds = []
        own_rewards = []
        for row in rows:
            own_rounds.append(row["round"])
            own_rewards.append(math.nan if row["reward"] is None else row["reward"])
        label = drive_store.printable(node_id, 20)
        nodes_axis.plot(own_rounds, moving_average(own_rewards), alpha=0.4, label=label)
    plot_mean(nodes_axis, lambda row: row["reward"], "k", label="mean")

    # A band of one standard deviation over the nodes of a round.
    low = []
    high = []
    for rows in by_round.values():
        values = [row["reward"] for row in rows if row["reward"] is not None] or [0.0]
        low.append(nanmean(values) - statistics.pstdev(values))
        high.append(nanmean(values) + statistics.pstdev(values))
    band = (moving_average(low), moving_average(high))
    nodes_axis.fill_between(rounds, *band, color="k", alpha=0.12, label="± one sd over nodes")

    # Reward of each task.
    for task in reward_per_task(rewards):
        label = drive_store.printable(task, 20)
        plot_mean(tasks_axis, lambda row, key=f"reward_{task}": row.get(key), label=label)

    # Shares that explain the reward.
    def informative_share(row):
        return row.get("informative_local", 0) / max(1, row.get("groups", 1))

    plot_mean(shares_axis, informative_share, label="informative groups")
    plot_mean(shares_axis, lambda row: row.get("answer_tag_rate"), label="answers in <answer> tags")
    active = [len(group_by("node_id", rows)) / num_nodes for rows in by_round.values()]
    shares_axis.step(rounds, active, "k:", label=f"active nodes, of {num_nodes}")

    # The distribution of the nodes' rewards in the first and in the last 20 rounds.
    ends = []
    for some_rounds in (rounds[:20], rounds[-20:]):
        rows = [row for t in some_rounds for row in by_round[t] if row["reward"] is not None]
        ends.append([row["reward"] for row in rows])
    labels = ["first 20 rounds", "last 20 rounds"]
    rewards_axis.hist(ends, bins=10, range=(0, 1), label=labels)
    rewards_axis.set(title="rewards of the nodes", xlabel="reward", ylabel="how many")
    rewards_axis.legend(fontsize=6)

    titles = (
        (nodes_axis, f"{name}: reward"),
        (tasks_axis, "reward per task"),
        (shares_axis, "shares"),
    )
    for axis, title in titles:
        axis.set(title=title, xlabel="round", ylim=(0, 1.02))
        if axis.get_legend_handles_labels()[0]:  # a node with I = 0 has no tasks
            axis.legend(fontsize=6)
    return png_bytes(figure)


def plot_teachers(store) -> bytes | None:
    """Who taught whom, as PNG: how many groups each node (row) drew from each peer (column), and
    the round in which each node first earned a reward in each task. None if matplotlib is missing
    or no node has logged a group of a peer."""
    taught = {}  # node -> {its teacher: number of groups}
    first_round = {}  # node -> {task: round}
    for node_id in drive_store.worker_ids(store.latest_sessions()):
        rows = read_metrics(store, node_id)
        if not rows:
            continue
        taught[node_id] = Counter()
        first_round[node_id] = {}
        for row in sorted(rows, key=lambda row: row["round"]):
            for peer, _ in row["teachers"] if is_list_of_pairs(row["teachers"]) else ():
                taught[node_id][drive_store.printable(peer, 20)] += 1
            for name in row:
                if name.startswith("reward_") and row[name]:
                    task = name.removeprefix("reward_").removeprefix("small_")
                    first_round[node_id].setdefault(task, row["round"])

    figure = new_figure()
    if figure is None or not any(taught.values()):
        return None
    titles = ("groups drawn (row: learner, column: teacher)", "round of the first reward in a task")
    tables = (taught, first_round)
    for axis, table, title in zip(figure.subplots(1, 2), tables, titles, strict=True):
        columns = sorted({name for row in table.values() for name in row})[:20]
        if not columns:  # a node with I = 0 earns no rewards
            continue
        values = [[row.get(name, math.nan) for name in columns] for row in table.values()]
        axis.imshow(values, aspect="auto", cmap="Blues", alpha=0.6, vmin=0)
        axis.set(title=title, xticks=range(len(columns)), yticks=range(len(table)))
        axis.set_xticklabels(columns, rotation=30, ha="right", fontsize=7)
        axis.set_yticklabels(list(table), fontsize=7)
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if math.isfinite(value):
                    axis.text(x, y, f"{value:g}", ha="center", va="center", fontsize=7)
    return png_bytes(figure)


def is_list_of_pairs(value) -> bool:
    """Whether a value from a log is a list of pairs of strings."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


def plot_comparison(rows: list[dict]) -> bytes | None:
    """Arms as PNG: smoothed reward, mean and standard error over seeds, over rounds and over
    generated completions. Six arms at most, because more cannot be told apart."""
    figure = new_figure()
    if figure is None:
        return None
    by_round, by_completions = figure.subplots(1, 2, sharey=True)
    for row in rows[:6]:
        # Mean and standard error of each round. A run may be longer than another.
        curves = [moving_average(run["curve"]) for run in row["runs"]]
        mean = []
        low = []
        high = []
        for values in zip(*curves, strict=False):
            error = 0.0
            if len(values) > 1:
                error = statistics.stdev(values) / math.sqrt(len(values))
            mean.append(nanmean(values))
            low.append(mean[-1] - error)
            high.append(mean[-1] + error)

        spent = row["runs"][0]["spent"][: len(mean)]
        for axis, x in ((by_round, range(len(mean))), (by_completions, spent)):
            (line,) = axis.plot(x, mean, label=row["label"][:20].replace("$", ""))
            axis.fill_between(x, low, high, color=line.get_color(), alpha=0.15)

    by_round.set(xlabel="round", ylabel="mean reward (0 to 1), smoothed", ylim=(0, None))
    by_completions.set(xlabel="completions generated per node")
    by_round.legend(fontsize=8)
    figure.suptitle(comparison_title(rows[0]).replace("$", ""))
    return png_bytes(figure)


def comparison_title(best: dict) -> str:
    """One sentence about the best arm."""
    if best["verdict"] == "nothing was learned":
        return best["verdict"]
    title = f"most reward: {best['label'][:20]}"
    if best["gain"] is not None:
        interval = f"95%: {best['low']:+.0%} to {best['high']:+.0%}"
        title += f", {best['gain']:+.0%} over {best['runs'][0]['baseline']} ({interval})"
    return title


# -------- Text and number helpers -----------------------------------------------------------------


def join_names(names: list[str], limit: int = 20) -> str:
    """The first names, for a sentence. (["a", "b", "c"], 2) -> "a, b and 1 more"."""
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def group_by(column: str, rows: list[dict]) -> dict:
    """{value of this column: its rows}, the values in order."""
    groups = {}
    for row in sorted(rows, key=lambda row: row[column]):
        groups.setdefault(row[column], []).append(row)
    return groups


def nanmean(values) -> float | None:
    """Mean that skips None and NaN; None if nothing is left. [1, None, 2, nan] -> 1.5."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def moving_average(values: list) -> list:
    """Running mean over a tenth of the values, at most 100.

    For 20 values: [0, 1, 1, …] -> [0, 0.5, 1, …]
    """
    window = max(1, min(100, len(values) // 10))
    return [nanmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def sparkline(values: list[float], width: int = 24) -> str:
    """A curve of values in 0 to 1 as at most `width` characters. [0, 0.5, 1] -> "▁▅█"."""
    columns = min(width, len(values))
    text = ""
    for i in range(columns):
        first = i * len(values) // columns
        last = (i + 1) * len(values) // columns
        mean = nanmean(values[first:last])
        text += "▁▂▃▄▅▆▇█"[min(7, int(8 * mean))]
    return text
