"""The frontier of reward against generation, each arm at its best learning rate. Started by hand:

    python .ci/study.py tiny FOLDER              all runs; started again, it continues
    python .ci/study.py smol FOLDER MODEL        the same with a real model, a folder or a Hub id
    python .ci/study.py tables FOLDER            the results so far, in Markdown
    python .ci/study.py rates FOLDER             the runs that have chosen the learning rates
    python .ci/study.py quarters FOLDER          the reward in each quarter of the rounds
    python .ci/study.py picture FOLDER FILE      the README's picture

    python .ci/study.py strength FOLDER [NAME…]  tiny at five strengths at the start, or at these
    python .ci/study.py gains FOLDER FILE        their gains, in Markdown and as a picture
    python .ci/study.py mixed FOLDER             then weak and strong nodes in one swarm
    python .ci/study.py teachers FOLDER          the results of these, in Markdown

The rules were fixed before the first run. An arm's learning rate is the one with the highest mean
cumulative reward over seeds 1 to 3, and only the seeds after these are reported. (smol has one
rate, which an earlier version chose.) Gains over 8/0 are paired by seed and have a 95% interval
(Student's t on logarithms of ratios).

A finished run is a line of FOLDER/results.jsonl, or of the file that the variable RESULTS names. It
is never repeated, so an interruption costs one run. THREADS (1) are those of a run, whose results
repeat for the same number. A variable that TINY or SMOL names overrides it: take another FOLDER.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import coordinator
from coordinator import column_by, mean_of, moving_average

RESULTS = os.environ.get("RESULTS")
PROGRAM = Path(coordinator.__file__).with_name("sapo.py")
TINY = dict(MODEL_NAME="tiny", LOCAL_NODES=8, MAX_ROUNDS=120, EVAL_INTERVAL=20)
SMOL = dict(
    LOCAL_NODES=4, MAX_ROUNDS=40, NUM_GENERATIONS=4, MAX_NEW_TOKENS=16, WARM_START_STEPS=25,
    EVAL_INTERVAL=10, CHECKPOINT_INTERVAL=20, CHECKPOINT_KEEP=1,
    TASKS="small_products,small_gcd,small_count_bits,small_chain_sum,small_arithmetic",
)  # fmt: skip
STUDIES = {  # settings, arms, learning rates, seeds that choose, seeds that are reported
    "tiny": (TINY, "8/0 4/4 2/6 4/0 6/2 8/0x2 4/4u 1/7 2/0 1/0", "6e-4 1e-3 2e-3 4e-3",
             (1, 2, 3), range(4, 10)),
    "smol": (SMOL, "4/4 8/0", "3e-5", (), range(2, 5)),
}  # fmt: skip
STRENGTHS = {  # WARM_START_STEPS, which teach the sums, and ANSWER_TAG_SHARE of the rewarded form
    "rare form": (1000, 0.005),
    "default": (1000, 0.02),
    "known form": (1000, 0.2),
    "weak sums": (170, 0.9),
    "strong": (2000, 0.9),
}
for study, (steps, share) in STRENGTHS.items():
    settings = TINY | {"WARM_START_STEPS": steps, "ANSWER_TAG_SHARE": share}
    STUDIES[study] = (settings, "8/0 4/4 2/6", "5e-4 1e-3 2e-3", (1, 2, 3), range(4, 10))
KINDS = ("known", "rare")  # nodes that know the form, nodes to which it is rare
LEVELS = (0.3, 0.4)  # of the smoothed reward; the study asks what it takes to reach them
COSTS = ("completions", "generate_seconds", "train_seconds")  # what it takes is counted in these


# -------- The runs --------------------------------------------------------------------------------


def settings_of(arm: str) -> dict:
    """Settings of an arm. "4/4u" -> I = 4, J = 4, unfiltered; "8/0x2" -> LOCAL_OVERSAMPLE = 2."""
    own, external, oversample, mark = re.fullmatch(r"(\d+)/(\d+)x?(\d*)(u?)", arm).groups()
    settings = {"NUM_TRAIN_SAMPLES": own, "NUM_TRANSPLANT_TREES": external}
    return settings | {"LOCAL_OVERSAMPLE": oversample or 1, "EXTERNAL_FILTER": mark != "u"}


def read_results(folder: Path, study: str) -> dict:
    """{(arm, learning rate, seed): result} of the finished runs of a study."""
    path = Path(RESULTS or folder / "results.jsonl")
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {(row["arm"], row["lr"], row["seed"]): row for row in rows if row["study"] == study}


def run_study(study: str, folder: Path, **more_settings) -> None:
    """Run the first four arms and then the others: the choosing seeds at all learning rates, then
    the reported seeds at the best one."""
    settings, arms, rates, choosing_seeds, reported_seeds = STUDIES[study]
    settings = {name: os.environ.get(name, value) for name, value in settings.items()}
    for part in (arms.split()[:4], arms.split()[4:]):
        choosing = itertools.product(choosing_seeds, rates.split(), part)
        reported = itertools.product(reported_seeds, [None], part)  # None: the best one
        for seed, lr, arm in (*choosing, *reported):
            runs = runs_of(folder, study, choosing_seeds).get(arm, [])
            rewards = column_by("lr", runs, "cumulative")
            lr = lr or max(rates.split(), key=lambda rate: fmean(rewards.get(rate, [0.0])))
            own = {"LEARNING_RATE": lr, "SEED": seed, "NODE_ID": "node"}
            process = settings | more_settings | settings_of(arm) | own
            run_swarm(folder, (study, arm, lr, seed), [process])


def run_swarm(folder: Path, key: tuple, processes: list[dict]) -> None:
    """Run an experiment to its end, with a process for each of these settings, and append its
    result, unless there is one. key: study, arm, learning rate and seed."""
    study, *of_study = key
    if tuple(of_study) in read_results(folder, study):
        return
    name = re.sub(r"[^\w.-]", "_", "-".join(map(str, key)))
    commit = subprocess.getoutput(f"git -C {PROGRAM.parent} rev-parse --short HEAD")
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": os.environ.get("THREADS", "1")}
    environ |= {"GDRIVE_PATH": str(folder), "EXPERIMENT_NAME": name, "DEVICE": "cpu"}
    started = time.monotonic()
    running = []
    for settings in processes:
        own = {name: str(value) for name, value in settings.items()}
        with open(folder / f"{name}-{own['NODE_ID']}.log", "a") as log:
            command = [sys.executable, PROGRAM]
            running.append(subprocess.Popen(command, env=environ | own, stdout=log, stderr=log))
    if any([process.wait() for process in running]):
        sys.exit(f"a run failed: see {folder}/{name}-*.log")

    result = dict(zip(("study", "arm", "lr", "seed"), key, strict=True))
    result |= {"commit": commit, "seconds": round(time.monotonic() - started, 1)}
    run = coordinator.read_experiment(coordinator.open_experiment(folder, name))
    result |= summarize(run) | (measure_kinds(folder, run) if study == "mixed" else {})
    with open(RESULTS or folder / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    print(name, f"reward {result['cumulative']:.2f}, {result['seconds']:.0f} s", flush=True)
    # Checkpoints and models take gigabytes and are not needed any more.
    nodes_dir = folder / "experiments" / name / "nodes"
    for path in (*nodes_dir.glob("*/checkpoints/*"), *nodes_dir.glob("*/model/*.safetensors")):
        path.unlink()


def summarize(run: coordinator.Experiment) -> dict:
    """A run's result, per node: reward, completions and tokens, and the cost of reaching LEVELS."""
    curve = run.curve()
    costs = {name: run.curve(name) for name in COSTS}

    # When does the reward, smoothed over a tenth of the run, reach each level?
    smoothed = moving_average(curve)
    levels = {}
    for level in LEVELS:
        reached = [t for t, reward in enumerate(smoothed) if reward >= level]
        if reached:
            levels[level] = {name: sum(costs[name][: reached[0] + 1]) for name in COSTS}

    return {
        "rounds": len(curve),
        "nodes": len(run.totals),
        "cumulative": sum(curve),
        "end": smoothed[-1],
        "held_out": mean_of("held_out", run.last_rounds(1)),
        "completions": sum(costs["completions"]),
        "tokens": sum(run.curve("generated_tokens")),
        "levels": levels,
        "curve": [round(reward, 4) for reward in curve],
    }


def run_mixed(folder: Path) -> None:
    """Run swarms at 4/4: one process has nodes that know the form, another one weak ones."""
    swarm = {"LEARNING_RATE": "1e-3", "NUM_WORKERS": 2, "ROUND_ADVANCE": "completion"}
    for seed, mixture in itertools.product(range(4, 10), ((2, 6), (4, 4), (6, 2))):
        processes = []
        for kind, num_nodes in zip(KINDS, mixture, strict=True):
            own = {"NODE_ID": kind, "LOCAL_NODES": num_nodes, "SEED": seed}
            settings = STUDIES[f"{kind} form"][0]
            processes.append(settings | settings_of("4/4") | swarm | own)
        run_swarm(folder, ("mixed", "{}+{}".format(*mixture), "1e-3", seed), processes)


def measure_kinds(folder: Path, run: coordinator.Experiment) -> dict:
    """The reward of each kind of node, and from whom it drew its groups."""
    kinds = {}
    for kind in KINDS:
        nodes = [node for node in run.totals if node.startswith(kind)]
        teachers = []
        for node in nodes:
            log = folder / f"experiments/{run.name}/nodes/{node}/logs/metrics.jsonl"
            rows = map(json.loads, log.read_text().splitlines())
            by_round = {row["round"]: row for row in rows}  # a repeated round counts once
            teachers += [peer for row in by_round.values() for peer, _ in row["teachers"]]
        from_known = sum(peer.startswith("known") for peer in teachers)
        reward = fmean(run.totals[node] for node in nodes)
        kinds[kind] = {"cumulative": reward, "from_known": from_known, "drawn": len(teachers)}
    return kinds


# -------- The results -----------------------------------------------------------------------------


def runs_of(folder: Path, study: str, seeds=None) -> dict[str, list[dict]]:
    """{arm: its runs} of the seeds that are reported, or of these."""
    runs = {}
    for run in read_results(folder, study).values():
        if run["seed"] in (STUDIES[study][4] if seeds is None else seeds):
            runs.setdefault(run["arm"], []).append(run)
    return runs


def paired_gain(runs: list[dict], baseline: list[dict]) -> list[float]:
    """The gain, a mean of log ratios paired by seed, and the 95% interval of Student's t. All three
    are nan for fewer than three pairs, and for the baseline itself."""
    totals = {run["seed"]: run["cumulative"] for run in baseline}
    paired = [run for run in runs if run["seed"] in totals]
    if len(paired) < 3 or runs[0].get("arm") == "8/0":
        return [math.nan] * 3
    logs = [math.log(run["cumulative"] / totals[run["seed"]]) for run in paired]
    mean = fmean(logs)
    error = stdev(logs) / math.sqrt(len(logs)) * coordinator.T_95[len(logs) - 2]
    return [math.expm1(x) for x in (mean, mean - error, mean + error)]


def format_gain(gain: float, low: float, high: float) -> str:
    return "" if math.isnan(gain) else f"{gain:+.0%} ({low:+.0%} to {high:+.0%})"


def format_spread(values: list[float]) -> str:
    """Mean and standard deviation, with one decimal, or with two below 1."""
    mean = fmean(values)
    decimals = 1 if mean >= 1 else 2
    text = f"{mean:.{decimals}f}"
    return f"{text} ± {stdev(values):.{decimals}f}" if len(values) > 1 else text


def format_level(runs: list[dict], level: str) -> str:
    """What it took to reach a level, and how many runs did if some did not: mean completions, and
    mean seconds of generation + update."""
    costs = [run["levels"][level] for run in runs if level in run["levels"]]
    if not costs:
        return "never"
    completions, generation, update = [mean_of(name, costs) for name in COSTS]
    text = f"{completions:,.0f} in {generation:.0f}+{update:.0f} s"
    return text if len(costs) == len(runs) else f"{text} ({len(costs)} of {len(runs)})"


def print_table(title: str, rows: Iterable[dict]) -> None:
    """Print rows of the form {header: cell} in Markdown."""
    rows = list(rows)
    print(f"\n{title}: {len(rows) or 'no'} rows")
    for i, row in enumerate(rows):
        if i == 0:
            print("\n|", " | ".join(row), "|\n" + "|---" * len(row) + "|")
        print("|", " | ".join(map(str, row.values())), "|")


def row_of(arm: str, runs: list[dict]) -> dict:
    """What two tables have in common: what an arm earned, over the whole run and at its end."""
    row = {"I/J": arm, "rate": runs[0]["lr"], "seeds": len(runs)}
    row["cumulative reward"] = format_spread([run["cumulative"] for run in runs])
    return row | {"end": f"{mean_of('end', runs):.2f}"}


def frontier_rows(folder: Path, study: str) -> Iterable[dict]:
    """What each arm earned, and at what cost."""
    reported = runs_of(folder, study)
    for arm, runs in reported.items():
        row = row_of(arm, runs)
        row["against 8/0 (95%)"] = format_gain(*paired_gain(runs, reported.get("8/0", [])))
        row["completions"] = f"{mean_of('completions', runs):,.0f}"
        row["tokens"] = f"{mean_of('tokens', runs):,.0f}"
        for level in LEVELS:
            row[f"to {level}"] = format_level(runs, str(level))
        row["held-out"] = f"{mean_of('held_out', runs) or math.nan:.2f}"
        row["commit"] = " ".join(sorted({run["commit"] for run in runs}))
        yield row


def rate_rows(folder: Path, study: str) -> Iterable[dict]:
    """The cumulative reward of each arm at each learning rate, over the seeds that choose."""
    for arm, runs in runs_of(folder, study, STUDIES[study][3]).items():
        rewards = column_by("lr", runs, "cumulative")
        yield {"I/J": arm} | {lr: format_spread(rewards[lr]) for lr in sorted(rewards, key=float)}


def quarter_rows(folder: Path, study: str) -> Iterable[dict]:
    """The mean reward in each quarter of the rounds: the curves of the arms, in numbers."""
    titles = ("1st quarter", "2nd", "3rd", "4th")
    for arm, runs in runs_of(folder, study).items():
        quarters = [map(fmean, numpy.array_split(run["curve"], 4)) for run in runs]
        spreads = map(format_spread, zip(*quarters, strict=True))
        yield {"I/J": arm} | dict(zip(titles, spreads, strict=True))


def teacher_rows(folder: Path) -> Iterable[dict]:
    """What each kind of node earned in mixed swarms, over its equals, and from whom it learned."""
    results = read_results(folder, "mixed").values()
    for arm, kind in itertools.product(dict.fromkeys(run["arm"] for run in results), KINDS):
        equals = runs_of(folder, f"{kind} form")
        runs = [run[kind] | {"seed": run["seed"]} for run in results if run["arm"] == arm]
        from_known = sum(run["from_known"] for run in runs) / sum(run["drawn"] for run in runs)
        row = {"nodes that know the form + others": arm, "kind": kind}
        row["cumulative reward"] = format_spread([run["cumulative"] for run in runs])
        for other, title in (("8/0", "against 8/0"), ("4/4", "against eight equals at 4/4")):
            row[title] = format_gain(*paired_gain(runs, equals.get(other, [])))
        yield row | {"groups drawn from nodes that know it": f"{from_known:.0%}"}


def draw_picture(folder: Path, file: str) -> None:
    """Plot the smoothed reward, mean and standard error over seeds, over rounds and completions."""
    from matplotlib.figure import Figure

    figure = Figure((10, 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    reported = runs_of(folder, "tiny")
    for arm in ("8/0", "4/4", "2/6"):
        curves = numpy.array([moving_average(run["curve"]) for run in reported[arm]])
        mean = curves.mean(0)  # (rounds,)
        error = curves.std(0, ddof=1) / math.sqrt(len(curves))
        rounds = numpy.arange(1, len(mean) + 1)
        completions = rounds * reported[arm][0]["completions"] / len(mean)
        for axis, x in zip(axes, (rounds, completions), strict=True):
            axis.plot(x, mean, label=arm)
            axis.fill_between(x, mean - error, mean + error, alpha=0.2)
    axes[0].set(xlabel="round", ylabel="mean reward, smoothed", ylim=(0, None))
    axes[1].set(xlabel="completions generated per node")
    axes[0].legend()
    figure.savefig(file)


def show_gains(folder: Path, file: str) -> None:
    """Print and plot, for each strength at the start, what sharing gains over 8/0: for the same
    rounds, and for the same completions."""
    from matplotlib.figure import Figure

    figure = Figure((10, 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    rows, labels = [], []
    for place, study in enumerate(STRENGTHS):
        reported = runs_of(folder, study)
        baseline = reported.get("8/0", [])
        start = fmean([run["curve"][0] for runs in reported.values() for run in runs] or [0.0])
        labels.append(f"{study}\n{start:.3f}")
        for arm, runs in reported.items():
            # For the same completions: all rounds of an arm against as many completions of 8/0,
            # which are its first rounds, at the reward of a mean round.
            same_cost = []
            for run in baseline:
                share = runs[0]["completions"] / run["completions"]
                mean_reward = fmean(run["curve"][: round(run["rounds"] * share)])
                same_cost.append(run | {"cumulative": run["rounds"] * mean_reward})
            gains = (paired_gain(runs, baseline), paired_gain(runs, same_cost))
            row = {"at the start": study, "reward": f"{start:.3f}"} | row_of(arm, runs)
            row["gain, same rounds (95%)"] = format_gain(*gains[0])
            row["gain, same completions (95%)"] = format_gain(*gains[1])
            rows.append(row)
            for axis, (gain, low, high) in zip(axes, gains, strict=True):
                x, style = (place, "C0o") if arm == "4/4" else (place + 0.1, "C1s")
                axis.errorbar(x, 1 + gain, [[gain - low], [high - gain]], fmt=style, capsize=3)
    print_table("gains", rows)
    for axis, what in zip(axes, ("rounds", "generated completions"), strict=True):
        axis.set(yscale="log", title=f"for the same {what}", xlabel="mean reward at the start")
        axis.set_xticks(range(len(labels)), labels)
        axis.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5x", "1x", "2x", "5x", "10x", "20x"])
    axes[0].set_ylabel("reward over 8/0's: 4/4 circles, 2/6 squares")
    figure.savefig(file)


if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"tables": frontier_rows, "rates": rate_rows, "quarters": quarter_rows}
    if mode in ("tiny", "smol"):
        run_study(mode, folder, MODEL_NAME="tiny" if mode == "tiny" else rest[0])
    elif mode == "strength":
        for study in rest or STRENGTHS:
            run_study(study, folder)
    elif mode in tables:
        for study in ("tiny", "smol"):
            print_table(study, tables[mode](folder, study))
    elif mode == "teachers":
        print_table("mixed", teacher_rows(folder))
    else:
        {"mixed": run_mixed, "picture": draw_picture, "gains": show_gains}[mode](folder, *rest)
