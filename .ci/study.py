"""The frontier of reward against generation, each arm at its best learning rate. Started by hand:

    python .ci/study.py tiny FOLDER            all runs; started again, it continues
    python .ci/study.py smol FOLDER MODEL      the same with a real model, a folder or a Hub id
    python .ci/study.py tables FOLDER          the results so far, in Markdown
    python .ci/study.py picture FOLDER FILE    the README's picture

The rules were fixed before the first run. An arm's learning rate is the one with the highest mean
cumulative reward over seeds 1 to 3 (smol: seed 1), and only the seeds after these are reported.
Gains over 8/0 are paired by seed and have a 95% interval (the program's own report has neither).
A run is finished when it has a line in FOLDER/results.jsonl. The environment variable THREADS (1)
is the number of threads of a run; results repeat for the same number.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TINY = dict(
    MODEL_NAME="tiny", LOCAL_NODES=8, MAX_ROUNDS=120, CHECKPOINT_INTERVAL=60, EVAL_INTERVAL=20
)
SMOL = dict(
    LOCAL_NODES=4, MAX_ROUNDS=40, NUM_GENERATIONS=4, MAX_NEW_TOKENS=16, WARM_START_STEPS=25,
    EVAL_INTERVAL=10, CHECKPOINT_INTERVAL=20, CHECKPOINT_KEEP=1,
    TASKS="small_products,small_gcd,small_count_bits,small_chain_sum,small_arithmetic",
)  # fmt: skip
STUDIES = {  # settings, arms, learning rates, seeds that choose, seeds that are reported
    "tiny": (TINY, "8/0 4/4 2/6 4/0 1/7 2/0 1/0 4/4u 8/0x2", "3e-4 6e-4 1e-3 2e-3",
             (1, 2, 3), range(4, 10)),
    "smol": (SMOL, "8/0 4/4 2/6 4/0", "1e-5 3e-5 1e-4", (1,), range(2, 5)),
}  # fmt: skip
LEVELS = (0.3, 0.4)  # of the smoothed reward; the study asks what it takes to reach them
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


# -------- The runs --------------------------------------------------------------------------------


def settings_of(arm: str) -> dict:
    """Settings of an arm. "4/4u" -> I = 4, J = 4, unfiltered; "8/0x2" -> LOCAL_OVERSAMPLE = 2."""
    pair, _, oversample = arm.replace("u", "").partition("x")
    own, external = pair.split("/")
    return {
        "NUM_TRAIN_SAMPLES": own,
        "NUM_TRANSPLANT_TREES": external,
        "LOCAL_OVERSAMPLE": oversample or 1,
        "EXTERNAL_FILTER": "u" not in arm,
    }


def read_results(folder: Path) -> dict:
    """{(arm, learning rate, seed): result} of all finished runs."""
    path = folder / "results.jsonl"
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        results[row["arm"], row["lr"], row["seed"]] = row
    return results


def best_learning_rate(arm: str, results: dict, choosing_seeds) -> str | None:
    """The one with the highest mean cumulative reward among those that were run with all seeds."""
    means = {}
    for lr in sorted({lr for a, lr, _ in results if a == arm}, key=float):
        runs = [results.get((arm, lr, seed)) for seed in choosing_seeds]
        if all(runs):
            means[lr] = statistics.fmean(run["cumulative"] for run in runs)
    return max(means, key=means.get) if means else None


def run_study(name: str, folder: Path, model: str | None = None) -> None:
    """Run the first four arms and then the others: choosing seeds at all learning rates, then the
    reported seeds at the best one."""
    settings, arms, rates, choosing_seeds, reported_seeds = STUDIES[name]
    if model:
        settings = settings | {"MODEL_NAME": model}
    arms = arms.split()
    for part in (arms[:4], arms[4:]):
        for seed in choosing_seeds:
            for lr in rates.split():
                for arm in part:
                    run_once(settings, folder, arm, lr, seed)
        for seed in reported_seeds:
            for arm in part:
                lr = best_learning_rate(arm, read_results(folder), choosing_seeds)
                run_once(settings, folder, arm, lr, seed)


def run_once(settings: dict, folder: Path, arm: str, lr: str, seed: int) -> None:
    """Run an arm, unless that is done, and append its result."""
    if (arm, lr, seed) in read_results(folder):
        return
    name = f"{arm.replace('/', '_')}-lr{lr}-s{seed}"

    # The run, in an environment of its own.
    settings = settings | settings_of(arm) | {"LEARNING_RATE": lr, "SEED": seed, "NODE_ID": "node"}
    settings |= {"DEVICE": "cpu", "GDRIVE_PATH": folder, "EXPERIMENT_NAME": name}
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": os.environ.get("THREADS", "1")}
    environ |= {variable: str(value) for variable, value in settings.items()}
    with open(folder / f"{name}.log", "a") as log:
        command = [sys.executable, ROOT / "sapo.py"]
        subprocess.run(command, env=environ, stdout=log, stderr=log, check=True)

    # Its logs. A round that was repeated after a kill has several rows; the last one counts.
    experiment_dir = folder / "experiments" / name
    rows = {}
    for path in experiment_dir.glob("nodes/*/logs/metrics.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            rows[row["round"], row["node_id"]] = row

    result = {"arm": arm, "lr": lr, "seed": seed}
    result |= summarize([*rows.values()], settings["MAX_ROUNDS"])
    with open(folder / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    print(name, f"{result['cumulative']:.2f}", flush=True)

    # Checkpoints and models take gigabytes and are not needed any more.
    checkpoints = experiment_dir.glob("nodes/*/checkpoints/*")
    models = experiment_dir.glob("nodes/*/model/*.safetensors")
    for path in (*checkpoints, *models):
        path.unlink()


def summarize(rows: list[dict], max_rounds: int) -> dict:
    """A run's result, per node: reward, completions and tokens, and the cost of reaching LEVELS.

    rows: those of all nodes' logs.
    """
    by_round = [[] for _ in range(max_rounds)]
    for row in rows:
        by_round[row["round"]].append(row)

    # Means over the nodes, one a round.
    means = {}
    for name in ("my_reward", "completions", "generated_tokens", "grad_norm"):
        means[name] = [statistics.fmean(row[name] for row in each) for each in by_round]
    curve = means["my_reward"]
    window = max(1, max_rounds // 10)

    # When does the reward, smoothed over a tenth of the run, reach each level?
    levels = {}
    for level in LEVELS:
        levels[str(level)] = None
        for t in range(max_rounds):
            recent = curve[max(0, t + 1 - window) : t + 1]
            if statistics.fmean(recent) >= level:
                completions = sum(means["completions"][: t + 1])
                levels[str(level)] = {"round": t, "completions": completions}
                break

    held_out = [row["held_out"] for row in by_round[-1] if "held_out" in row]
    return {
        "cumulative": sum(curve),
        "completions": sum(means["completions"]),
        "levels": levels,
        "curve": curve,
        "tokens": sum(means["generated_tokens"]),
        "last12": statistics.fmean(curve[-window:]),
        "held_out": statistics.fmean(held_out or [math.nan]),
        "grad_norm": means["grad_norm"],
    }


# -------- The results -----------------------------------------------------------------------------


def reported_runs(folder: Path) -> dict[str, list[dict]]:
    """{arm: its reported runs, at its best learning rate}."""
    results = read_results(folder)
    reported = {}
    for arm in dict.fromkeys(arm for arm, _, _ in results):
        is_tiny = (arm, "6e-4", 1) in results
        choosing_seeds = (1, 2, 3) if is_tiny else (1,)
        best = best_learning_rate(arm, results, choosing_seeds)
        runs = []
        for (a, lr, seed), result in results.items():
            if a == arm and lr == best and seed not in choosing_seeds:
                runs.append(result)
        if runs:
            reported[arm] = runs
    return reported


def format_gain(totals: dict, baseline: dict) -> str:
    """The gain, a mean of log ratios paired by seed, with the 95% interval of Student's t.

    totals, baseline: {seed: cumulative reward}. Returns "" for fewer than three pairs.
    """
    logs = [math.log(totals[seed] / baseline[seed]) for seed in totals if seed in baseline]
    if len(logs) < 3:
        return ""
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs)) * T_95[len(logs) - 2]
    gain, low, high = (math.expm1(x) for x in (mean, mean - error, mean + error))
    return f"{gain:+.0%} ({low:+.0%} to {high:+.0%})"


def format_level(runs: list[dict], level: str) -> str:
    """Mean number of completions to reach a level, and how many runs did if some did not."""
    costs = [run["levels"][level]["completions"] for run in runs if run["levels"][level]]
    if not costs:
        return "never"
    text = f"{statistics.fmean(costs):.0f}"
    return text if len(costs) == len(runs) else f"{text} ({len(costs)} of {len(runs)})"


def print_tables(folder: Path) -> None:
    reported = reported_runs(folder)
    baseline = {run["seed"]: run["cumulative"] for run in reported["8/0"]}
    headers = ["I/J", "rate", "seeds", "reward", "against 8/0 (95%)", "completions"]
    headers += ["to 0.3", "to 0.4", "end", "held-out"]
    print("|", " | ".join(headers), "|")
    print("|---" * len(headers) + "|")

    for arm, runs in reported.items():
        totals = {run["seed"]: run["cumulative"] for run in runs}
        reward = f"{statistics.fmean(totals.values()):.1f}"
        if len(runs) > 1:
            reward += f" ± {statistics.stdev(totals.values()):.1f}"
        cells = [
            arm,
            runs[0]["lr"],
            str(len(runs)),
            reward,
            "" if arm == "8/0" else format_gain(totals, baseline),
            f"{statistics.fmean(run['completions'] for run in runs):.0f}",
            *(format_level(runs, str(level)) for level in LEVELS),
            f"{statistics.fmean(run['last12'] for run in runs):.2f}",
            f"{statistics.fmean(run['held_out'] for run in runs):.2f}",
        ]
        print("|", " | ".join(cells), "|")


def draw_picture(folder: Path, file: str, arms: tuple = ("8/0", "4/4", "2/6")) -> None:
    """Plot the smoothed reward, mean and standard error over seeds, over rounds and completions."""
    from matplotlib.figure import Figure

    import coordinator

    figure = Figure((10, 4), dpi=120, layout="constrained")
    by_round, by_completions = figure.subplots(1, 2, sharey=True)
    shown = {arm: runs for arm, runs in reported_runs(folder).items() if arm in arms}
    ends = {}  # arm -> (last mean, color)
    for arm, runs in shown.items():
        # Mean and standard error of each round.
        curves = [coordinator.moving_average(run["curve"]) for run in runs]
        mean = []
        low = []
        high = []
        for values in zip(*curves, strict=True):
            error = statistics.stdev(values) / math.sqrt(len(values))
            mean.append(statistics.fmean(values))
            low.append(mean[-1] - error)
            high.append(mean[-1] + error)

        # Once over rounds and once over completions.
        rounds = range(len(mean))
        completions_per_round = runs[0]["completions"] / len(mean)
        completions = [completions_per_round * (t + 1) for t in rounds]
        for axis, x in ((by_round, rounds), (by_completions, completions)):
            (line,) = axis.plot(x, mean)
            color = line.get_color()
            axis.fill_between(x, low, high, alpha=0.2, color=color)
        ends[arm] = (mean[-1], color)
        by_completions.annotate(
            arm, (completions[-1], mean[-1]), (0, 7), textcoords="offset points", color=color
        )

    # Over rounds all lines end at one place, so their names are spread out beside it.
    height = -1.0
    for arm, (end, color) in sorted(ends.items(), key=lambda item: item[1][0]):
        height = max(end, height + 0.03)
        by_round.annotate(
            arm, (len(mean) - 1, height), (4, -3), textcoords="offset points", color=color
        )
    by_round.margins(x=0.08, y=0.1)
    by_completions.margins(x=0.08)
    by_round.set(xlabel="round", ylabel="mean reward, smoothed", ylim=(0, None))
    by_completions.set(xlabel="completions generated per node")
    figure.suptitle(
        "2/6 reaches a reward of 0.4 with a quarter of 8/0's generation (tiny, eight nodes)"
    )
    figure.savefig(file)


if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    if mode in STUDIES:
        run_study(mode, folder, *rest)
    else:
        {"tables": print_tables, "picture": draw_picture}[mode](folder, *rest)
