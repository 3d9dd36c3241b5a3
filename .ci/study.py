"""Measure reward against generation, with each arm at its best learning rate. Run it by hand:

    python .ci/study.py NAME FOLDER [MODEL]       run a study of STUDIES (MODEL: folder or Hub id)
    python .ci/study.py strength FOLDER [NAME…]   run tiny at four more initial strengths, or at NAME…
    python .ci/study.py mixed FOLDER              after strength: run swarms of two kinds of nodes

    python .ci/study.py tables FOLDER [NAME…]     print the results so far in Markdown
    python .ci/study.py quarters FOLDER [NAME…]   print the reward in each quarter of the rounds
    python .ci/study.py rates FOLDER [NAME…]      print the runs that chose the learning rates
    python .ci/study.py seeds FOLDER [NAME…]      print the end of every run, by learning rate
    python .ci/study.py teachers FOLDER           print how mixed compares with strength
    python .ci/study.py picture FOLDER FILE       draw the README's plot
    python .ci/study.py gains FOLDER FILE         print and plot the gains of tiny and strength
    python .ci/study.py parrots FOLDER [TASK…]    print the best parrots, or a task's (see parrots.py)

The rules were fixed before the first run. An arm's learning rate is the rate with the highest mean
cumulative reward over the seeds that choose a rate, and only the other seeds are reported. Gains
over 8/0 are computed as in the program's report: they are geometric means of ratios paired by seed,
with a 95% confidence interval.

A finished run is a line in FOLDER/results.jsonl, or in the file that the environment variable
RESULTS gives. It is never repeated, so a study that was interrupted continues when it is started
again. Each process uses THREADS (1) threads, and results repeat only with the same number of them.
Environment variables override a study's settings; use a different FOLDER for such runs.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean, stdev

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import coordinator
import parrots
from coordinator import column_by, mean_of

RESULTS = os.environ.get("RESULTS")
PROGRAM = Path(coordinator.__file__).with_name("sapo.py")


@dataclass
class Study:
    """Swarms with equal settings, except for their arms, learning rates and seeds."""

    settings: dict
    arms: str
    rates: str
    choosing: Iterable = (1, 2, 3)  # seeds that choose a rate
    reported: Iterable = range(4, 10)


TINY = dict(MODEL_NAME="tiny", LOCAL_NODES=8, MAX_ROUNDS=120, EVAL_INTERVAL=20)
SMOL = dict(
    LOCAL_NODES=4, MAX_ROUNDS=20, NUM_GENERATIONS=4, MAX_NEW_TOKENS=16, WARM_START_STEPS=25,
    EVAL_INTERVAL=20, CHECKPOINT_INTERVAL=20, CHECKPOINT_KEEP=1,
    TASKS="small_products,small_gcd,small_count_bits,small_chain_sum,small_arithmetic",
)  # fmt: skip
TWO_SMOL = SMOL | dict(LOCAL_NODES=2, NUM_GENERATIONS=8, MAX_ROUNDS=40, EVAL_INTERVAL=10)
ALONE = "8/0-alone 16/0-alone"  # one node that generates as much as 8/0, or as a swarm at 2/6
STUDIES = {
    "tiny": Study(TINY, f"8/0 6/2 4/4 2/6 8/0x2 {ALONE}", "6e-4 1e-3 2e-3 4e-3"),
    "smol arms": Study(SMOL, "8/0 4/4 2/6 16/0-alone", "3e-6 1e-5 3e-5", (1,), range(2, 5)),
    "smol rates": Study(TWO_SMOL, "8/0", "1e-6 3e-6 1e-5 3e-5", (1, 2), ()),
}  # fmt: skip
for size in (2, 4, 16):
    settings = TINY | {"LOCAL_NODES": size}
    STUDIES[f"{size} nodes"] = Study(settings, "4/4 2/6", "1e-3 2e-3", (1,))
for age in (1, 4, 8):  # in a copy of the program in which external groups are at least this old
    settings = TINY | {"ROLLOUT_MAX_AGE": age + 4}
    STUDIES[f"age {age}"] = Study(settings, "4/4", "2e-3", ())
STRENGTHS = {  # WARM_START_STEPS (for arithmetic) and ANSWER_TAG_SHARE (for the rewarded format)
    "rare form": (1000, 0.005),
    "known form": (1000, 0.2),
    "weak sums": (170, 0.9),
    "strong": (2000, 0.9),
}
for name, (steps, share) in STRENGTHS.items():
    settings = TINY | {"WARM_START_STEPS": steps, "ANSWER_TAG_SHARE": share}
    STUDIES[name] = Study(settings, "8/0 4/4 2/6", "5e-4 1e-3 2e-3", (1,))
# Studies of swarms of tiny, ordered by their reward at the start.
SWARMS = ("rare form", "tiny", "known form", "weak sums", "strong")
KINDS = ("known", "rare")  # nodes that know the rewarded format, and nodes that rarely use it
LEVELS = (0.3, 0.4)  # levels of the smoothed reward; the study measures the cost of reaching them
COSTS = ("completions", "generate_seconds", "train_seconds")  # columns that measure this cost


# -------- The runs --------------------------------------------------------------------------------


def settings_of(arm: str) -> dict:
    """Return an arm's settings, such as I = 8 and J = 0 for "8/0".

    "8/0x2" has LOCAL_OVERSAMPLE=2, and "8/0-alone" has only one node.
    """
    own, external, oversample, alone = re.fullmatch(r"(\d+)/(\d+)x?(\d*)(-alone)?", arm).groups()
    settings = {"NUM_TRAIN_SAMPLES": own, "NUM_TRANSPLANT_TREES": external}
    settings["LOCAL_OVERSAMPLE"] = oversample or 1
    return settings | ({"LOCAL_NODES": 1} if alone else {})


def read_results(folder: Path, study: str) -> dict:
    """Return {(arm, learning rate, seed): result} for the finished runs of a study."""
    path = Path(RESULTS or folder / "results.jsonl")
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {(row["arm"], row["lr"], row["seed"]): row for row in rows if row["study"] == study}


def run_study(name: str, folder: Path, model: str = "") -> None:
    """Run each arm: the choosing seeds at all rates, then the reported seeds at the best rate."""
    study = STUDIES[name]
    settings = {"MODEL_NAME": model} | study.settings
    settings = {key: os.environ.get(key, value) for key, value in settings.items()}
    assert settings["MODEL_NAME"], f"{name} needs a MODEL"
    for arm in study.arms.split():
        process = settings | settings_of(arm) | {"NODE_ID": "node"}
        for lr, seed in itertools.product(study.rates.split(), study.choosing):
            run_swarm(folder, (name, arm, lr, seed), [process])
        best = best_rate(folder, name, arm)
        for seed in study.reported:
            run_swarm(folder, (name, arm, best, seed), [process])


def best_rate(folder: Path, study: str, arm: str) -> str:
    """Return the learning rate that the choosing seeds choose, or the only rate of the study."""
    runs = runs_of(folder, study, STUDIES[study].choosing).get(arm, [])
    means = {lr: fmean(each) for lr, each in column_by("lr", runs, "cumulative").items()}
    return max(means, key=means.get, default=STUDIES[study].rates)


def run_swarm(folder: Path, key: tuple, processes: list[dict]) -> None:
    """Run an experiment, with one process per dict of settings, and append its result.

    If the result exists, return immediately. key: study, arm, learning rate and seed.
    """
    study, arm, lr, seed = key
    if (arm, lr, seed) in read_results(folder, study):
        return
    name = re.sub(r"[^\w.-]", "_", "-".join(map(str, key)))
    commit = subprocess.getoutput(f"git -C {PROGRAM.parent} rev-parse --short HEAD")
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": os.environ.get("THREADS", "1")}
    environ |= {"GDRIVE_PATH": str(folder), "EXPERIMENT_NAME": name, "DEVICE": "cpu"}
    environ |= {"LEARNING_RATE": lr, "SEED": str(seed)}
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
    # Delete checkpoints and models, which take gigabytes and are no longer needed.
    nodes_dir = folder / "experiments" / name / "nodes"
    for path in (*nodes_dir.glob("*/checkpoints/*"), *nodes_dir.glob("*/model/*.safetensors")):
        path.unlink()


def moving_average(values: list) -> list:
    """Return the running mean over a tenth of the values (at most 100)."""
    window = max(1, min(100, len(values) // 10))
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def summarize(run: coordinator.Experiment) -> dict:
    """Return a run's reward, completions and tokens per node, and the cost of reaching LEVELS."""
    curve = run.curve()
    costs = {name: run.curve(name) for name in COSTS}

    # Sum the costs until the reward, smoothed over a tenth of the run, first reaches each level.
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
        "informative": fmean(run.curve("informative_groups")),
        "levels": levels,
        "curve": [round(reward, 4) for reward in curve],
    }


def run_mixed(folder: Path) -> None:
    """Run swarms at 4/4 in which some nodes know the rewarded format and the others rarely use it.

    Each kind has the learning rate that is best for a swarm of its own, so run `strength` first.
    """
    swarm = {"NUM_WORKERS": 2, "ROUND_ADVANCE": "completion"}
    for seed, mixture in itertools.product(range(4, 10), ((2, 6), (4, 4), (6, 2))):
        processes = []
        for kind, num_nodes in zip(KINDS, mixture, strict=True):
            study = f"{kind} form"
            own = {"NODE_ID": kind, "LOCAL_NODES": num_nodes}
            own["LEARNING_RATE"] = best_rate(folder, study, "4/4")
            processes.append(STUDIES[study].settings | settings_of("4/4") | swarm | own)
        run_swarm(folder, ("mixed", "{}+{}".format(*mixture), "best", seed), processes)


def measure_kinds(folder: Path, run: coordinator.Experiment) -> dict:
    """Return each kind's reward, and how many of its external groups came from nodes of kind "known"."""
    kinds = {}
    for kind in KINDS:
        logs = (folder / "experiments" / run.name).glob(f"nodes/{kind}_*/logs/metrics.jsonl")
        lines = itertools.chain(*(log.read_text().splitlines() for log in logs))
        teachers = [peer for line in lines for peer, _ in json.loads(line)["teachers"]]
        from_known = sum(peer.startswith("known") for peer in teachers)
        reward = fmean(run.totals[node] for node in run.totals if node.startswith(kind))
        kinds[kind] = {"cumulative": reward, "from_known": from_known, "drawn": len(teachers)}
    return kinds


# -------- The results -----------------------------------------------------------------------------


def runs_of(folder: Path, study: str, seeds=None) -> dict[str, list[dict]]:
    """Return {arm: runs} for the reported seeds of a study, or for `seeds`."""
    runs = {}
    for run in read_results(folder, study).values():
        if run["seed"] in (STUDIES[study].reported if seeds is None else seeds):
            runs.setdefault(run["arm"], []).append(run)
    return runs


def gain_over(baseline: list[dict], runs: list[dict]) -> list[float] | None:
    """Return the gain and its 95% confidence interval, or None with fewer than three pairs."""
    totals = {run["seed"]: run["cumulative"] for run in baseline}
    ratios = [run["cumulative"] / totals[run["seed"]] for run in runs if run["seed"] in totals]
    if len(ratios) < 3:
        return None
    return [geometric_mean(ratios) - 1, *coordinator.interval_of(ratios)]


def format_gain(gain: list[float] | None) -> str:
    return "{:+.0%} ({:+.0%} to {:+.0%})".format(*gain) if gain else ""


def format_spread(values: list[float]) -> str:
    """Return the mean and standard deviation as text, with 1 decimal, or 2 if the mean is below 1."""
    mean = fmean(values)
    decimals = 1 if mean >= 1 else 2
    text = f"{mean:.{decimals}f}"
    return f"{text} ± {stdev(values):.{decimals}f}" if len(values) > 1 else text


def format_each(values: list[float]) -> str:
    """Return the mean, followed by each value in parentheses."""
    mean, *each = (f"{value:.3f}" for value in (fmean(values), *values))
    return f"{mean} ({', '.join(each)})"


def format_level(runs: list[dict], level: str) -> str:
    """Return the mean cost of reaching a level: completions, and seconds of generation + update.

    If only some of the runs reached it, add how many did.
    """
    costs = [run["levels"][level] for run in runs if level in run["levels"]]
    if not costs:
        return "never"
    completions, generation, update = [mean_of(name, costs) for name in COSTS]
    text = f"{completions:,.0f} in {generation:.0f}+{update:.0f} s"
    return text if len(costs) == len(runs) else f"{text} ({len(costs)} of {len(runs)})"


def print_table(title: str, rows: Iterable[dict]) -> None:
    """Print rows, which are {header: cell}, as a Markdown table."""
    rows = list(rows)
    print(f"\n{title}: {len(rows) or 'no'} rows")
    for i, row in enumerate(rows):
        if i == 0:
            print("\n|", " | ".join(row), "|\n" + "|---" * len(row) + "|")
        print("|", " | ".join(map(str, row.values())), "|")


def row_of(arm: str, runs: list[dict]) -> dict:
    """Return the columns that two tables share: an arm's reward over the whole run and at its end."""
    row = {"I/J": arm, "rate": runs[0]["lr"], "seeds": len(runs)}
    row["cumulative reward"] = format_spread([run["cumulative"] for run in runs])
    return row | {"end": f"{mean_of('end', runs):.2f}"}


def frontier_rows(folder: Path, study: str) -> Iterable[dict]:
    """Yield each arm's reward and its cost. The baseline is the study's 8/0, or otherwise tiny's."""
    reported = runs_of(folder, study)
    baseline = reported.get("8/0") or runs_of(folder, "tiny").get("8/0", [])
    for arm, runs in reported.items():
        row = row_of(arm, runs)
        row["against 8/0 (95% CI)"] = format_gain(gain_over(baseline, runs)) if arm != "8/0" else ""
        completions = mean_of("completions", runs)
        row["completions"] = f"{completions:,.0f}"
        row["completions of the whole swarm"] = f"{completions * runs[0]['nodes']:,.0f}"
        row["tokens"] = f"{mean_of('tokens', runs):,.0f}"
        row["informative groups"] = f"{mean_of('informative', runs):.1f}"
        for level in LEVELS:
            row[f"to {level}"] = format_level(runs, str(level))
        row["held-out"] = f"{mean_of('held_out', runs):.2f}"
        row["commit"] = " ".join(sorted({run["commit"] for run in runs}))
        yield row


def rate_rows(folder: Path, study: str) -> Iterable[dict]:
    """Yield each arm's cumulative reward, end and held-out accuracy at each learning rate.

    They are means over the seeds that choose a rate.
    """
    for arm, runs in runs_of(folder, study, STUDIES[study].choosing).items():
        row = {"I/J": arm}
        for lr in STUDIES[study].rates.split():
            same = [run for run in runs if run["lr"] == lr]
            if same:
                rewards = format_spread([run["cumulative"] for run in same])
                row[lr] = f"{rewards}, {mean_of('end', same):.2f}, {mean_of('held_out', same):.2f}"
        yield row


def seed_rows(folder: Path, study: str) -> Iterable[dict]:
    """Yield the end of every run, by arm and learning rate, as the mean and the seeds' values."""
    results = read_results(folder, study)
    for arm, lr in sorted({key[:2] for key in results}, key=lambda key: (key[0], float(key[1]))):
        runs = [results[key] for key in sorted(results) if key[:2] == (arm, lr)]
        row = {"I/J": arm, "rate": lr, "seeds": " ".join(str(run["seed"]) for run in runs)}
        row["reward, last 10 rounds"] = format_each([fmean(run["curve"][-10:]) for run in runs])
        row["held-out"] = format_each([run["held_out"] for run in runs])
        yield row | {"informative groups": f"{mean_of('informative', runs):.1f}"}


def quarter_rows(folder: Path, study: str) -> Iterable[dict]:
    """Yield each arm's mean reward in each quarter of the rounds."""
    titles = ("1st quarter", "2nd", "3rd", "4th")
    for arm, runs in runs_of(folder, study).items():
        quarters = [map(fmean, numpy.array_split(run["curve"], 4)) for run in runs]
        spreads = map(format_spread, zip(*quarters, strict=True))
        yield {"I/J": arm} | dict(zip(titles, spreads, strict=True))


def teacher_rows(folder: Path) -> Iterable[dict]:
    """Yield each kind's reward and gains in mixed swarms, and its share of groups from "known"."""
    results = read_results(folder, "mixed").values()
    for arm, kind in itertools.product(dict.fromkeys(run["arm"] for run in results), KINDS):
        equals = runs_of(folder, f"{kind} form")
        runs = [run[kind] | {"seed": run["seed"]} for run in results if run["arm"] == arm]
        from_known = sum(run["from_known"] for run in runs) / sum(run["drawn"] for run in runs)
        row = {"nodes that know the format + others": arm, "kind": kind}
        row["cumulative reward"] = format_spread([run["cumulative"] for run in runs])
        for other, title in (("8/0", "against 8/0"), ("4/4", "against eight equals at 4/4")):
            row[title] = format_gain(gain_over(equals.get(other, []), runs))
        yield row | {"groups drawn from nodes that know it": f"{from_known:.0%}"}


def draw_picture(folder: Path, file: str) -> None:
    """Plot the smoothed reward (mean and standard error of the seeds) over rounds and completions."""
    from matplotlib.figure import Figure

    figure = Figure((10, 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    reported = runs_of(folder, "tiny")
    for arm in ("8/0", "4/4", "2/6"):
        curves = numpy.array([moving_average(run["curve"]) for run in reported[arm]])
        mean = curves.mean(0)  # (rounds,)
        error = curves.std(0, ddof=1) / len(curves) ** 0.5
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
    """Print and plot the gains over 8/0 in each of SWARMS.

    One gain is for the same rounds, the other for the same completions.
    """
    from matplotlib.figure import Figure

    figure = Figure((10, 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    rows, labels = [], []
    for place, study in enumerate(SWARMS):
        every = runs_of(folder, study)
        reported = {arm: every[arm] for arm in ("8/0", "4/4", "2/6") if arm in every}
        baseline = reported.get("8/0", [])
        start = fmean([run["curve"][0] for run in baseline] or [0.0])
        swarm = "default" if study == "tiny" else study
        labels.append(f"{swarm}\n{start:.3f}")
        for arm, runs in reported.items():
            others = baseline if arm != "8/0" else []
            # For the same completions, compare the arm's mean reward per round with the mean over
            # the first rounds of 8/0, in which 8/0 generates as many completions as the arm.
            same_cost = []
            for run in others:
                share = runs[0]["completions"] / run["completions"]
                mean_reward = fmean(run["curve"][: round(run["rounds"] * share)])
                same_cost.append(run | {"cumulative": run["rounds"] * mean_reward})
            gains = (gain_over(others, runs), gain_over(same_cost, runs))
            row = {"swarm": swarm, "reward at the start": f"{start:.3f}"} | row_of(arm, runs)
            row["gain, same rounds (95% CI)"] = format_gain(gains[0])
            row["gain, same completions (95% CI)"] = format_gain(gains[1])
            rows.append(row)
            for axis, (gain, low, high) in zip(axes, filter(None, gains), strict=False):
                x, style = (place, "C0o") if arm == "4/4" else (place + 0.1, "C1s")
                axis.errorbar(x, 1 + gain, [[gain - low], [high - gain]], fmt=style, capsize=3)
    print_table("gains", rows)
    for axis, what in zip(axes, ("rounds", "generated completions"), strict=True):
        axis.set(yscale="log", title=f"for the same {what}", xlabel="mean reward at the start")
        axis.set_xticks(range(len(labels)), labels)
        axis.set_yticks([1, 2, 5, 10], ["1x", "2x", "5x", "10x"])
    axes[0].set_ylabel("reward relative to 8/0\n(circles: 4/4, squares: 2/6)")
    figure.savefig(file)


def add_parrot(study: str, rows: Iterable[dict]) -> Iterable[dict]:
    """Add the mean reward of the tasks' best parrots to each row, if the study's model is real."""
    if STUDIES[study].settings.get("MODEL_NAME") == "tiny":
        return rows
    results = map(parrots.measure_task, STUDIES[study].settings["TASKS"].split(","))
    reward = fmean(fmean(rewards[best]) for best, rewards in results)
    return [row | {"parrot": f"{reward:.2f}"} for row in rows]


TABLES = {  # command: function that yields the table's rows, and the studies that it shows
    "tables": (frontier_rows, ("tiny", "smol arms")),
    "quarters": (quarter_rows, ("tiny", "smol arms")),
    "rates": (rate_rows, ("tiny", "smol arms")),
    "seeds": (seed_rows, ("smol rates",)),
}

if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    if mode in STUDIES:
        run_study(mode, folder, *rest)
    elif mode == "strength":
        for study in rest or STRENGTHS:
            run_study(study, folder)
    elif mode in TABLES:
        rows_of, studies = TABLES[mode]
        for study in rest or studies:
            print_table(study, add_parrot(study, rows_of(folder, study)))
    elif mode == "teachers":
        print_table("mixed", teacher_rows(folder))
    elif mode == "parrots":
        for task in rest:
            print_table(task, parrots.rule_rows(task))
        if not rest:
            print_table("parrots", parrots.best_rows())
    else:
        {"mixed": run_mixed, "picture": draw_picture, "gains": show_gains}[mode](folder, *rest)
