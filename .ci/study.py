"""The frontier of reward against generation, each arm at its best learning rate. Started by hand:

    python .ci/study.py tiny FOLDER              all runs; started again, it continues
    python .ci/study.py smol FOLDER MODEL        the same with a real model, a folder or a Hub id
    python .ci/study.py tables FOLDER            the results so far, in Markdown
    python .ci/study.py quarters FOLDER          the same in each quarter of the rounds
    python .ci/study.py picture FOLDER FILE      the README's picture

    python .ci/study.py strength FOLDER [NAME…]  tiny at five strengths at the start, or at these
    python .ci/study.py gains FOLDER FILE        their gains, in Markdown and as a picture
    python .ci/study.py mixed FOLDER             then weak and strong nodes in one swarm
    python .ci/study.py teachers FOLDER          the results of these, in Markdown

The rules were fixed before the first run. An arm's learning rate is the one with the highest mean
cumulative reward over seeds 1 to 3 (smol: seed 1), and only the seeds after these are reported.
Gains over 8/0 are paired by seed and have a 95% interval (the program's own report has neither). A
run is finished when it has a line in results.jsonl. The environment variable THREADS (1) is the
number of threads of a run; results repeat for the same number.
"""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import coordinator
from drive_store import DriveStore

TINY = dict(
    MODEL_NAME="tiny", LOCAL_NODES=8, MAX_ROUNDS=120, CHECKPOINT_INTERVAL=60, EVAL_INTERVAL=20
)
SMOL = dict(
    LOCAL_NODES=4, MAX_ROUNDS=60, NUM_GENERATIONS=4, MAX_NEW_TOKENS=16, WARM_START_STEPS=25,
    EVAL_INTERVAL=10, CHECKPOINT_INTERVAL=20, CHECKPOINT_KEEP=1,
    TASKS="small_products,small_gcd,small_count_bits,small_chain_sum,small_arithmetic",
)  # fmt: skip
STUDIES = {  # settings, arms, learning rates, seeds that choose, seeds that are reported
    "tiny": (TINY, "8/0 4/4 2/6 4/0 1/7 2/0 1/0 4/4u 8/0x2", "3e-4 6e-4 1e-3 2e-3",
             (1, 2, 3), range(4, 10)),
    "smol": (SMOL, "8/0 4/4 2/6 4/0 4/4f", "1e-5 3e-5 1e-4", (1,), range(2, 5)),
    "strength": (TINY, "8/0 4/4 2/6", "5e-4 1e-3 2e-3", (1, 2, 3), range(4, 10)),
}  # fmt: skip
STRENGTHS = {  # WARM_START_STEPS teach the sums, ANSWER_TAG_SHARE the rewarded form
    "rare form": {"WARM_START_STEPS": 1750, "ANSWER_TAG_SHARE": 0.005},
    "default": {"WARM_START_STEPS": 1750, "ANSWER_TAG_SHARE": 0.02},
    "known form": {"WARM_START_STEPS": 1750, "ANSWER_TAG_SHARE": 0.2},
    "weak sums": {"WARM_START_STEPS": 300, "ANSWER_TAG_SHARE": 0.9},
    "strong": {"WARM_START_STEPS": 3500, "ANSWER_TAG_SHARE": 0.9},
}
MIXED_RATE = "1e-3"
KINDS = ("known", "rare")  # nodes that know the form, nodes to which it is rare
MIXTURES = ((2, 6), (4, 4), (6, 2))  # how many of each
LEVELS = (0.3, 0.4)  # of the smoothed reward; the study asks what it takes to reach them
COSTS = ("completions", "generate_seconds", "train_seconds")  # what it takes is counted in these
# Student's t for 2 to 10 pairs.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


# -------- The runs --------------------------------------------------------------------------------


def settings_of(arm: str) -> dict:
    """Settings of an arm. "4/4u" -> I = 4, J = 4, unfiltered; "8/0x2" -> LOCAL_OVERSAMPLE = 2;
    "4/4f" -> DTYPE=float32."""
    own, external, oversample, marks = re.fullmatch(r"(\d+)/(\d+)x?(\d*)([uf]*)", arm).groups()
    settings = {"NUM_TRAIN_SAMPLES": own, "NUM_TRANSPLANT_TREES": external}
    settings["LOCAL_OVERSAMPLE"] = oversample or 1
    settings["EXTERNAL_FILTER"] = "u" not in marks
    settings["DTYPE"] = "float32" if "f" in marks else "auto"
    return settings


def read_results(folder: Path) -> dict:
    """{(arm, learning rate, seed): result} of all finished runs."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    results = [json.loads(line) for line in lines]
    return {(result["arm"], result["lr"], result["seed"]): result for result in results}


def append_result(folder: Path, result: dict) -> None:
    with open(folder / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    print(result["arm"], result["lr"], result["seed"], f"{result['cumulative']:.2f}", flush=True)


def run_study(study: str, folder: Path, more_settings: dict) -> None:
    """Run the first four arms and then the others: choosing seeds at all learning rates, then the
    reported seeds at the best one. What has a result is not run again."""
    settings, arms, rates, choosing_seeds, reported_seeds = STUDIES[study]
    arms, rates = arms.split(), rates.split()
    for part in (arms[:4], arms[4:]):
        choosing = itertools.product(choosing_seeds, rates, part)
        reported = itertools.product(reported_seeds, [None], part)  # None: the best one, found here
        for seed, lr, arm in (*choosing, *reported):
            results = read_results(folder)
            is_reported = lr is None
            if is_reported:
                rewards = {}
                for rate in rates:
                    runs = [results[arm, rate, choosing_seed] for choosing_seed in choosing_seeds]
                    rewards[rate] = mean_of("cumulative", runs)
                lr = max(rewards, key=rewards.get)
            if (arm, lr, seed) in results:
                continue

            own = {"LEARNING_RATE": lr, "SEED": seed, "NODE_ID": "node"}
            process = settings | more_settings | settings_of(arm) | own
            name = f"{arm.replace('/', '_')}-lr{lr}-s{seed}"
            run = run_swarm(folder, name, f"{name}.log", [process])
            result = {"arm": arm, "lr": lr, "seed": seed, "is_reported": is_reported}
            append_result(folder, result | summarize(run))


def run_swarm(folder: Path, name: str, log: str, processes: list[dict]) -> coordinator.Experiment:
    """Run an experiment to its end, with a process for each of these settings.

    A star in `log` stands for the process's NODE_ID. Checkpoints and models are deleted: they take
    gigabytes and are not needed any more.
    """
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": os.environ.get("THREADS", "1")}
    environ |= {"GDRIVE_PATH": str(folder), "EXPERIMENT_NAME": name, "DEVICE": "cpu"}
    running = []
    for settings in processes:
        own = {variable: str(value) for variable, value in settings.items()}
        command = [sys.executable, Path(coordinator.__file__).with_name("sapo.py")]
        with open(folder / log.replace("*", own["NODE_ID"]), "a") as output:
            process = subprocess.Popen(command, env=environ | own, stdout=output, stderr=output)
        running.append(process)
    if any([process.wait() for process in running]):
        sys.exit(f"a run failed: see {folder / log}")

    nodes_dir = folder / "experiments" / name / "nodes"
    for path in (*nodes_dir.glob("*/checkpoints/*"), *nodes_dir.glob("*/model/*.safetensors")):
        path.unlink()
    return coordinator.read_experiment(DriveStore(folder, name))


def summarize(run: coordinator.Experiment) -> dict:
    """A run's result, per node: reward, completions and tokens, and the cost of reaching LEVELS."""
    curve = run.curve()
    costs = {name: run.curve(name) for name in COSTS}

    # When does the reward, smoothed over a tenth of the run, reach each level?
    smoothed = coordinator.moving_average(curve)
    levels = {}
    for level in LEVELS:
        reached = [t for t, reward in enumerate(smoothed) if reward >= level]
        levels[str(level)] = None
        if reached:
            until_then = {name: sum(values[: reached[0] + 1]) for name, values in costs.items()}
            levels[str(level)] = {"round": reached[0]} | until_then

    last_round = run.rounds(len(curve) - 1, len(curve))
    held_out = [row["held_out"] for row in last_round if "held_out" in row]
    return {
        "cumulative": sum(curve),
        "completions": sum(costs["completions"]),
        "levels": levels,
        "curve": curve,
        "tokens": sum(run.curve("generated_tokens")),
        "last12": smoothed[-1],
        "held_out": fmean(held_out or [math.nan]),
        "grad_norm": run.curve("grad_norm"),
    }


def run_mixed(folder: Path) -> None:
    """Run swarms of two processes at 4/4: one has the nodes that know the form, the other one those
    to which it is rare."""
    settings, *_, reported_seeds = STUDIES["strength"]
    settings = settings | settings_of("4/4") | {"LEARNING_RATE": MIXED_RATE}
    settings |= {"NUM_WORKERS": 2, "ROUND_ADVANCE": "completion"}
    place = folder / "mixed"
    for kind in KINDS:  # their warm starts need not be made again
        warm_start = folder / f"{kind} form" / "warmstart"
        shutil.copytree(warm_start, place / "warmstart", dirs_exist_ok=True)

    for seed, mixture in itertools.product(reported_seeds, MIXTURES):
        arm = "{}+{}".format(*mixture)
        if (arm, MIXED_RATE, seed) in read_results(place):
            continue
        processes = []
        for kind, num_nodes in zip(KINDS, mixture, strict=True):
            own = {"NODE_ID": kind, "LOCAL_NODES": num_nodes, "SEED": seed}
            processes.append(settings | STRENGTHS[f"{kind} form"] | own)
        name = f"{arm.replace('+', '_and_')}-s{seed}"
        run = run_swarm(place, name, f"{name}-*.log", processes)

        # The reward of each kind of node, and how many groups it drew from each kind.
        result = {"arm": arm, "lr": MIXED_RATE, "seed": seed, "cumulative": run.reward_per_node}
        for kind in KINDS:
            nodes = [node for node in run.nodes if node.startswith(kind)]
            teachers = []
            for node in nodes:
                log = place / f"experiments/{name}/nodes/{node}/logs/metrics.jsonl"
                rows = map(json.loads, log.read_text().splitlines())
                by_round = {row["round"]: row for row in rows}  # a repeated round counts once
                teachers += [peer for row in by_round.values() for peer, _ in row["teachers"]]
            result[kind] = {
                "cumulative": fmean(run.total(node) for node in nodes),
                "from_known": sum(peer.startswith("known") for peer in teachers),
                "drawn": len(teachers),
            }
        append_result(place, result)


# -------- The results -----------------------------------------------------------------------------


def reported_runs(folder: Path) -> dict[str, list[dict]]:
    """{arm: its reported runs}."""
    reported = {}
    for result in read_results(folder).values():
        if result.get("is_reported"):  # a mixed swarm's result does not say
            reported.setdefault(result["arm"], []).append(result)
    return reported


def paired_gain(runs: list[dict], baseline: list[dict]) -> list[float]:
    """The gain, a mean of log ratios paired by seed, and the 95% interval of Student's t. All three
    are nan for fewer than three pairs."""
    totals = {run["seed"]: run["cumulative"] for run in baseline}
    paired = [run for run in runs if run["seed"] in totals]
    if len(paired) < 3:
        return [math.nan] * 3
    logs = [math.log(run["cumulative"] / totals[run["seed"]]) for run in paired]
    mean = fmean(logs)
    error = stdev(logs) / math.sqrt(len(logs)) * T_95[len(logs) - 2]
    return [math.expm1(x) for x in (mean, mean - error, mean + error)]


def format_gain(gain: float, low: float, high: float) -> str:
    return "" if math.isnan(gain) else f"{gain:+.0%} ({low:+.0%} to {high:+.0%})"


def mean_of(name: str, rows: list[dict]) -> float:
    return fmean(row[name] for row in rows)


def format_spread(values: list[float]) -> str:
    """Mean and standard deviation, with one decimal, or with two below 1."""
    mean = fmean(values)
    decimals = 1 if mean >= 1 else 2
    text = f"{mean:.{decimals}f}"
    return f"{text} ± {stdev(values):.{decimals}f}" if len(values) > 1 else text


def format_level(runs: list[dict], level: float) -> str:
    """What it took to reach a level, and how many runs did if some did not: mean completions, and
    mean seconds of generation + update."""
    costs = [run["levels"][str(level)] for run in runs if run["levels"][str(level)]]
    if not costs:
        return "never"
    # Results of earlier versions have no seconds.
    means = [fmean(cost.get(name, math.nan) for cost in costs) for name in COSTS]
    completions, generation, update = means
    text = f"{completions:.0f} in {generation:.0f}+{update:.0f} s"
    return text if len(costs) == len(runs) else f"{text} ({len(costs)} of {len(runs)})"


def print_table(folder: Path, rows: Iterable[dict]) -> None:
    """Print rows of the form {header: cell} in Markdown."""
    rows = list(rows)
    if not rows:
        sys.exit(f"{folder}: there are no results of seeds that are reported")
    print("|", " | ".join(rows[0]), "|")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("|", " | ".join(map(str, row.values())), "|")


def frontier_rows(folder: Path) -> Iterable[dict]:
    """What each arm earned, and at what cost."""
    reported = reported_runs(folder)
    for arm, runs in reported.items():
        baseline = [] if arm == "8/0" else reported.get("8/0", [])
        row = {"I/J": arm, "rate": runs[0]["lr"], "seeds": len(runs)}
        row["reward"] = format_spread([run["cumulative"] for run in runs])
        row["against 8/0 (95%)"] = format_gain(*paired_gain(runs, baseline))
        row["completions"] = f"{mean_of('completions', runs):.0f}"
        for level in LEVELS:
            row[f"to {level}"] = format_level(runs, level)
        row["end"] = f"{mean_of('last12', runs):.2f}"
        row["held-out"] = f"{mean_of('held_out', runs):.2f}"
        yield row


def quarter_rows(folder: Path) -> Iterable[dict]:
    """The mean reward in each quarter of the rounds: the curves of the arms, in numbers."""
    for arm, runs in reported_runs(folder).items():
        row = {"I/J": arm, "seeds": len(runs)}
        curves = [run["curve"][: len(run["curve"]) // 4 * 4] for run in runs]
        quarters = zip(*[numpy.reshape(curve, (4, -1)).mean(1) for curve in curves], strict=True)
        for title, means in zip(("1st quarter", "2nd", "3rd", "4th"), quarters, strict=True):
            row[title] = format_spread(means)
        row["held-out"] = format_spread([run["held_out"] for run in runs])
        yield row


def draw_picture(folder: Path, file: str) -> None:
    """Plot the smoothed reward, mean and standard error over seeds, over rounds and completions."""
    from matplotlib.figure import Figure

    figure = Figure((10, 4), dpi=120, layout="constrained")
    by_round, by_completions = figure.subplots(1, 2, sharey=True)
    ends = []  # (last mean, arm, color)
    for arm, runs in reported_runs(folder).items():
        if arm not in ("8/0", "4/4", "2/6"):
            continue
        curves = numpy.array([coordinator.moving_average(run["curve"]) for run in runs])
        mean = curves.mean(0)  # (rounds,)
        error = curves.std(0, ddof=1) / math.sqrt(len(runs))
        rounds = numpy.arange(len(mean))
        completions = (rounds + 1) * runs[0]["completions"] / len(mean)
        for axis, x in ((by_round, rounds), (by_completions, completions)):
            (line,) = axis.plot(x, mean)
            color = line.get_color()
            axis.fill_between(x, mean - error, mean + error, alpha=0.2, color=color)
        end = (completions[-1], mean[-1])
        by_completions.annotate(arm, end, (0, 7), textcoords="offset points", color=color)
        ends.append((mean[-1], arm, color))

    # Over rounds all lines end at one place, so their names are spread out beside it.
    height = -1.0
    for end, arm, color in sorted(ends):
        height = max(end, height + 0.03)
        place = (rounds[-1], height)
        by_round.annotate(arm, place, (4, -3), textcoords="offset points", color=color)
    by_round.margins(x=0.08, y=0.1)
    by_completions.margins(x=0.08)
    by_round.set(xlabel="round", ylabel="mean reward, smoothed", ylim=(0, None))
    by_completions.set(xlabel="completions generated per node")
    title = "2/6 reaches a reward of 0.4 with a quarter of 8/0's generation (tiny, eight nodes)"
    figure.suptitle(title)
    figure.savefig(file)


def show_gains(folder: Path, file: str) -> None:
    """Print and plot, for each strength at the start, what sharing gains over 8/0: for the same
    rounds, and for the same completions."""
    rows = []
    starts = {}  # strength -> reward at the start
    panels = ([], [])  # (arm, reward at the start, gain, low, high): same rounds, same completions
    for name in STRENGTHS:
        reported = reported_runs(folder / name)
        first_rewards = [run["curve"][0] for runs in reported.values() for run in runs]
        for arm, runs in reported.items():
            starts[name] = fmean(first_rewards)
            baseline = [] if arm == "8/0" else reported.get("8/0", [])

            # For the same completions: all rounds of an arm against as many completions of 8/0,
            # which are its first rounds, at the reward of a mean round.
            same_cost = []
            for run in baseline:
                num_rounds = len(run["curve"])
                share = runs[0]["completions"] / run["completions"]
                mean_reward = fmean(run["curve"][: round(num_rounds * share)])
                same_cost.append(run | {"cumulative": num_rounds * mean_reward})
            gains = (paired_gain(runs, baseline), paired_gain(runs, same_cost))

            row = {"at the start": name, "reward": f"{starts[name]:.3f}"}
            row |= {"I/J": arm, "rate": runs[0]["lr"], "seeds": len(runs)}
            row["cumulative reward"] = format_spread([run["cumulative"] for run in runs])
            row["end"] = f"{mean_of('last12', runs):.2f}"
            row["gain, same rounds (95%)"] = format_gain(*gains[0])
            row["gain, same completions (95%)"] = format_gain(*gains[1])
            rows.append(row)
            for panel, gain in zip(panels, gains, strict=True):
                panel.append((arm, starts[name], *gain))
    print_table(folder, rows)
    draw_gains(starts, panels, file)


def draw_gains(starts: dict[str, float], panels: tuple, file: str) -> None:
    """Plot the gains over the reward at the start."""
    from matplotlib.figure import Figure

    # Strengths with nearly the same reward at the start are named together.
    names = {}
    for name, first in sorted(starts.items(), key=lambda item: item[1]):
        near = next((other for other in names if first / other < 1.5), first)
        names[near] = f"{names[near]}\n{name}" if near in names else name

    figure = Figure((10, 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = ("for the same rounds", "for the same generated completions")
    for axis, panel, title in zip(axes, panels, titles, strict=True):
        for arm, marker, shift in (("4/4", "o", 0.97), ("2/6", "s", 1.03)):
            points = [point[1:] for point in panel if point[0] == arm]
            first, gain, low, high = numpy.reshape(points, (-1, 4)).T
            errors = (gain - low, high - gain)
            axis.errorbar(first * shift, 1 + gain, errors, fmt=marker, capsize=3, label=arm)
        for first, text in names.items():
            axis.text(first, 0.02, text, transform=axis.get_xaxis_transform(),
                      ha="center", va="bottom", fontsize=8, color="gray")  # fmt: skip
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=title, xlabel="mean reward at the start")
        axis.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5x", "1x", "2x", "5x", "10x", "20x"])
        axis.minorticks_off()
        axis.margins(x=0.1, y=0.2)
    axes[0].set_ylabel("reward, as a multiple of 8/0's")
    axes[0].legend()
    figure.savefig(file)


def teacher_rows(folder: Path) -> Iterable[dict]:
    """What each kind of node earned in mixed swarms, over the same kind among its equals, and
    from whom it drew its groups."""
    results = read_results(folder / "mixed").values()
    for arm, kind in itertools.product(dict.fromkeys(run["arm"] for run in results), KINDS):
        equals = reported_runs(folder / f"{kind} form")
        runs = [run[kind] | {"seed": run["seed"]} for run in results if run["arm"] == arm]
        from_known = sum(run["from_known"] for run in runs) / sum(run["drawn"] for run in runs)
        row = {"nodes that know the form + others": arm, "kind": kind}
        row["cumulative reward"] = format_spread([run["cumulative"] for run in runs])
        for other, title in (("8/0", "against 8/0"), ("4/4", "against eight equals at 4/4")):
            row[title] = format_gain(*paired_gain(runs, equals.get(other, [])))
        row["groups drawn from nodes that know it"] = f"{from_known:.0%}"
        yield row


if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"tables": frontier_rows, "quarters": quarter_rows, "teachers": teacher_rows}
    others = {"mixed": run_mixed, "picture": draw_picture, "gains": show_gains}
    if mode in ("tiny", "smol"):
        run_study(mode, folder, {"MODEL_NAME": "tiny" if mode == "tiny" else rest[0]})
    elif mode == "strength":
        for name in rest or STRENGTHS:
            (folder / name).mkdir(exist_ok=True)
            run_study(mode, folder / name, STRENGTHS[name])
    elif mode in tables:
        print_table(folder, tables[mode](folder))
    else:
        others[mode](folder, *rest)
