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

import json
import math
import os
import shutil
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
    "rare form": (1750, 0.005),
    "default": (1750, 0.02),
    "known form": (1750, 0.2),
    "weak sums": (300, 0.9),
    "strong": (3500, 0.9),
}
MIXED_RATE = "1e-3"
MIXTURES = ((2, 6), (4, 4), (6, 2))  # nodes that know the form, nodes to which it is rare
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
    """Settings of an arm. "4/4u" -> I = 4, J = 4, unfiltered; "8/0x2" -> LOCAL_OVERSAMPLE = 2;
    "4/4f" -> DTYPE=float32."""
    pair, _, oversample = arm.rstrip("uf").partition("x")
    own, external = pair.split("/")
    return {
        "NUM_TRAIN_SAMPLES": own,
        "NUM_TRANSPLANT_TREES": external,
        "LOCAL_OVERSAMPLE": oversample or 1,
        "EXTERNAL_FILTER": "u" not in arm,
        "DTYPE": "float32" if "f" in arm else "auto",
    }


def read_results(folder: Path) -> dict:
    """{(arm, learning rate, seed): result} of all finished runs."""
    path = folder / "results.jsonl"
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        results[row["arm"], row["lr"], row["seed"]] = row
    return results


def best_learning_rate(arm: str, results: dict) -> str:
    """The one with the highest mean cumulative reward over the seeds that choose."""
    rewards = {}
    for (other, lr, _), result in results.items():
        if other == arm and not result["is_reported"]:
            rewards.setdefault(lr, []).append(result["cumulative"])
    return max(rewards, key=lambda lr: statistics.fmean(rewards[lr]))


def run_study(name: str, folder: Path, more_settings: dict) -> None:
    """Run the first four arms and then the others: choosing seeds at all learning rates, then the
    reported seeds at the best one."""
    settings, arms, rates, choosing_seeds, reported_seeds = STUDIES[name]
    settings = settings | more_settings
    arms = arms.split()
    for part in (arms[:4], arms[4:]):
        for seed in choosing_seeds:
            for lr in rates.split():
                for arm in part:
                    run_once(settings, folder, arm, lr, seed, is_reported=False)
        for seed in reported_seeds:
            for arm in part:
                lr = best_learning_rate(arm, read_results(folder))
                run_once(settings, folder, arm, lr, seed, is_reported=True)


def run_once(settings: dict, folder: Path, arm: str, lr: str, seed: int, is_reported: bool) -> None:
    """Run an arm, unless that is done, and append its result."""
    if (arm, lr, seed) in read_results(folder):
        return
    name = f"{arm.replace('/', '_')}-lr{lr}-s{seed}"
    settings = settings | settings_of(arm) | {"LEARNING_RATE": lr, "SEED": seed}
    swarm = settings | {"GDRIVE_PATH": folder, "EXPERIMENT_NAME": name, "NODE_ID": "node"}
    if start(swarm, folder / f"{name}.log").wait():
        sys.exit(f"a run failed: see {folder / name}.log")

    rows = take_rows(folder, name)
    result = {"arm": arm, "lr": lr, "seed": seed, "is_reported": is_reported}
    append_result(folder, result | summarize(rows, settings["MAX_ROUNDS"]))


def start(settings: dict, log: Path) -> subprocess.Popen:
    """Start sapo.py, in an environment of its own."""
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": os.environ.get("THREADS", "1")}
    environ |= {variable: str(value) for variable, value in settings.items()} | {"DEVICE": "cpu"}
    with open(log, "a") as output:
        return subprocess.Popen(
            [sys.executable, ROOT / "sapo.py"], env=environ, stdout=output, stderr=output
        )


def take_rows(folder: Path, name: str) -> list[dict]:
    """Read the rows of all nodes' logs, and delete the weights of the run.

    A round that was repeated after a kill has several rows; the last one counts. Checkpoints and
    models take gigabytes and are not needed any more.
    """
    experiment_dir = folder / "experiments" / name
    rows = {}
    for path in experiment_dir.glob("nodes/*/logs/metrics.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            rows[row["round"], row["node_id"]] = row
    checkpoints = experiment_dir.glob("nodes/*/checkpoints/*")
    models = experiment_dir.glob("nodes/*/model/*.safetensors")
    for path in (*checkpoints, *models):
        path.unlink()
    return [*rows.values()]


def append_result(folder: Path, result: dict) -> None:
    with open(folder / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    print(result["arm"], result["lr"], result["seed"], f"{result['cumulative']:.2f}", flush=True)


def run_strengths(folder: Path, *names: str) -> None:
    """Run the study "strength" in a subfolder for each strength."""
    for name in names or STRENGTHS:
        steps, tag_share = STRENGTHS[name]
        place = folder / name
        place.mkdir(exist_ok=True)
        warm_start = {"WARM_START_STEPS": steps, "ANSWER_TAG_SHARE": tag_share}
        run_study("strength", place, warm_start)


def run_mixed(folder: Path) -> None:
    """Run swarms of two processes at 4/4: one has the nodes that know the form, the other one those
    to which it is rare."""
    settings, _, _, _, reported_seeds = STUDIES["strength"]
    place = folder / "mixed"
    for name in ("known form", "rare form"):  # their warm starts need not be made again
        shutil.copytree(folder / name / "warmstart", place / "warmstart", dirs_exist_ok=True)
    settings = settings | settings_of("4/4") | {"LEARNING_RATE": MIXED_RATE, "GDRIVE_PATH": place}
    settings |= {"NUM_WORKERS": 2, "ROUND_ADVANCE": "completion"}

    for seed in reported_seeds:
        for mixture in MIXTURES:
            arm = "{}+{}".format(*mixture)
            if (arm, MIXED_RATE, seed) in read_results(place):
                continue
            name = f"{arm.replace('+', '_and_')}-s{seed}"
            processes = []
            for strength, num_nodes in zip(("known form", "rare form"), mixture, strict=True):
                steps, tag_share = STRENGTHS[strength]
                own = {"WARM_START_STEPS": steps, "ANSWER_TAG_SHARE": tag_share, "SEED": seed}
                node_id = strength.split()[0]
                own |= {"EXPERIMENT_NAME": name, "NODE_ID": node_id, "LOCAL_NODES": num_nodes}
                processes.append(start(settings | own, place / f"{name}-{node_id}.log"))
            if any([process.wait() for process in processes]):
                sys.exit(f"a run failed: see {place / name}-*.log")

            # The reward of each kind of node, and how many groups it drew from each kind.
            rows = take_rows(place, name)
            result = {"arm": arm, "lr": MIXED_RATE, "seed": seed}
            result["cumulative"] = sum(row["my_reward"] for row in rows) / sum(mixture)
            for kind, num_nodes in zip(("known", "rare"), mixture, strict=True):
                of_kind = [row for row in rows if row["node_id"].startswith(kind)]
                teachers = [peer for row in of_kind for peer, _ in row["teachers"]]
                result[kind] = {
                    "cumulative": sum(row["my_reward"] for row in of_kind) / num_nodes,
                    "from_known": sum(peer.startswith("known") for peer in teachers),
                    "drawn": len(teachers),
                }
            append_result(place, result)


def summarize(rows: list[dict], max_rounds: int) -> dict:
    """A run's result, per node: reward, completions and tokens, and the cost of reaching LEVELS.

    rows: those of all nodes' logs.
    """
    by_round = [[] for _ in range(max_rounds)]
    for row in rows:
        by_round[row["round"]].append(row)

    # Means over the nodes, one a round.
    means = {}
    columns = "my_reward completions generated_tokens grad_norm generate_seconds train_seconds"
    for name in columns.split():
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
                levels[str(level)] = {"round": t}
                for name in ("completions", "generate_seconds", "train_seconds"):
                    levels[str(level)][name] = sum(means[name][: t + 1])
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
    """{arm: its reported runs}."""
    reported = {}
    for result in read_results(folder).values():
        if result["is_reported"]:
            reported.setdefault(result["arm"], []).append(result)
    return reported


def paired_gain(totals: dict, baseline: dict) -> tuple[float, float, float]:
    """The gain, a mean of log ratios paired by seed, and the 95% interval of Student's t.

    totals, baseline: {seed: reward}. All three are nan for fewer than three pairs.
    """
    logs = [math.log(totals[seed] / baseline[seed]) for seed in totals if seed in baseline]
    if len(logs) < 3:
        return math.nan, math.nan, math.nan
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs)) * T_95[len(logs) - 2]
    return math.expm1(mean), math.expm1(mean - error), math.expm1(mean + error)


def format_gain(totals: dict, baseline: dict) -> str:
    gain, low, high = paired_gain(totals, baseline)
    return "" if math.isnan(gain) else f"{gain:+.0%} ({low:+.0%} to {high:+.0%})"


def format_spread(values) -> str:
    """Mean and standard deviation, with one decimal, or with two below 1."""
    values = [*values]
    mean = statistics.fmean(values)
    decimals = 1 if mean >= 1 else 2
    text = f"{mean:.{decimals}f}"
    return f"{text} ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else text


def format_level(runs: list[dict], level: str) -> str:
    """What it took to reach a level, and how many runs did if some did not: mean completions, and
    mean seconds of generation + update."""
    costs = [run["levels"][level] for run in runs if run["levels"][level]]
    if not costs:
        return "never"
    completions, generation, update = (
        statistics.fmean(cost[name] for cost in costs)
        for name in ("completions", "generate_seconds", "train_seconds")
    )
    text = f"{completions:.0f} in {generation:.0f}+{update:.0f} s"
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
        cells = [
            arm,
            runs[0]["lr"],
            str(len(runs)),
            format_spread(totals.values()),
            "" if arm == "8/0" else format_gain(totals, baseline),
            f"{statistics.fmean(run['completions'] for run in runs):.0f}",
            *(format_level(runs, str(level)) for level in LEVELS),
            f"{statistics.fmean(run['last12'] for run in runs):.2f}",
            f"{statistics.fmean(run['held_out'] for run in runs):.2f}",
        ]
        print("|", " | ".join(cells), "|")


def print_quarters(folder: Path) -> None:
    """Print the mean reward in each quarter of the rounds: the curves of the arms, in numbers."""
    print("| I/J | seeds | 1st quarter | 2nd | 3rd | 4th | held-out |")
    print("|---" * 7 + "|")
    for arm, runs in reported_runs(folder).items():
        cells = [arm, str(len(runs))]
        for quarter in range(4):
            means = []
            for run in runs:
                length = len(run["curve"]) // 4
                means.append(statistics.fmean(run["curve"][quarter * length :][:length]))
            cells.append(format_spread(means))
        cells.append(format_spread(run["held_out"] for run in runs))
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


def show_gains(folder: Path, file: str) -> None:
    """Print and plot, for each strength at the start, what sharing gains over 8/0: for the same
    rounds, and for the same completions."""
    from matplotlib.figure import Figure

    # For the same completions: all rounds of an arm against as many completions of 8/0, which are
    # its first rounds, in the reward of a mean round.
    points = []  # (arm, reward at the start, name, gains with intervals: rounds, completions)
    print("| at the start | reward | I/J | rate | seeds | cumulative reward | end |", end="")
    print(" gain, same rounds (95%) | gain, same completions (95%) |")
    print("|---" * 9 + "|")
    for name in STRENGTHS:
        reported = reported_runs(folder / name)
        baseline = {run["seed"]: run for run in reported.get("8/0", [])}
        baseline_rounds = {seed: run["cumulative"] for seed, run in baseline.items()}
        first_rewards = [run["curve"][0] for runs in reported.values() for run in runs]
        for arm, runs in reported.items():
            by_seed = {run["seed"]: run for run in runs if run["seed"] in baseline}
            same_rounds = {seed: run["cumulative"] for seed, run in by_seed.items()}
            same_cost = {seed: statistics.fmean(run["curve"]) for seed, run in by_seed.items()}
            baseline_cost = {}
            for seed, run in by_seed.items():
                share = run["completions"] / baseline[seed]["completions"]
                num_rounds = round(len(run["curve"]) * share)
                baseline_cost[seed] = statistics.fmean(baseline[seed]["curve"][:num_rounds])
            cells = [
                name,
                f"{statistics.fmean(first_rewards):.3f}",
                arm,
                runs[0]["lr"],
                str(len(runs)),
                format_spread(run["cumulative"] for run in runs),
                f"{statistics.fmean(run['last12'] for run in runs):.2f}",
                "" if arm == "8/0" else format_gain(same_rounds, baseline_rounds),
                "" if arm == "8/0" else format_gain(same_cost, baseline_cost),
            ]
            print("|", " | ".join(cells), "|")
            if arm != "8/0":
                gains = [paired_gain(same_rounds, baseline_rounds)]
                gains.append(paired_gain(same_cost, baseline_cost))
                points.append((arm, statistics.fmean(first_rewards), name, gains))

    figure = Figure((10, 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = ("for the same rounds", "for the same generated completions")
    for i, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        for arm, marker, shift in (("4/4", "o", 0.97), ("2/6", "s", 1.03)):
            of_arm = sorted((first, name, gains[i]) for a, first, name, gains in points if a == arm)
            x = [first * shift for first, _, _ in of_arm]
            factors = [1 + gain for _, _, (gain, _, _) in of_arm]
            below = [gain - low for _, _, (gain, low, _) in of_arm]
            above = [high - gain for _, _, (gain, _, high) in of_arm]
            axis.errorbar(x, factors, (below, above), fmt=marker, capsize=3, label=arm)
        # Strengths with nearly the same reward at the start are named together.
        names = {}
        for first, name in sorted({(first, name) for _, first, name, _ in points}):
            near = next((other for other in names if first / other < 1.5), first)
            names.setdefault(near, []).append(name)
        for first, together in names.items():
            axis.text(first, 0.02, "\n".join(together), transform=axis.get_xaxis_transform(),
                      ha="center", va="bottom", fontsize=8, color="gray")  # fmt: skip
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=title, xlabel="mean reward at the start")
        axis.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5x", "1x", "2x", "5x", "10x", "20x"])
        axis.minorticks_off()
        axis.margins(x=0.1, y=0.2)
    axes[0].set_ylabel("reward, as a multiple of 8/0's")
    axes[0].legend()
    figure.savefig(file)


def print_teachers(folder: Path) -> None:
    """Print what each kind of node earned in mixed swarms, over the same kind among its equals, and
    from whom it drew its groups."""
    print("| nodes that know the form + others | kind | cumulative reward |", end="")
    print(" against 8/0 | against eight equals at 4/4 | groups drawn from nodes that know it |")
    print("|---" * 6 + "|")
    results = read_results(folder / "mixed")
    for arm in dict.fromkeys(arm for arm, _, _ in results):
        of_arm = [result for (other, _, _), result in results.items() if other == arm]
        for kind in ("known", "rare"):
            equals = reported_runs(folder / f"{kind} form")
            totals = {result["seed"]: result[kind]["cumulative"] for result in of_arm}
            cells = [arm, kind, format_spread(totals.values())]
            for other in ("8/0", "4/4"):
                alike = {run["seed"]: run["cumulative"] for run in equals[other]}
                cells.append(format_gain(totals, alike))
            drawn = sum(result[kind]["drawn"] for result in of_arm)
            cells.append(f"{sum(result[kind]['from_known'] for result in of_arm) / drawn:.0%}")
            print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    if mode == "tiny":
        run_study(mode, folder, {})
    elif mode == "smol":
        run_study(mode, folder, {"MODEL_NAME": rest[0]})
    else:
        modes = {
            "strength": run_strengths,
            "mixed": run_mixed,
            "tables": print_tables,
            "quarters": print_quarters,
            "picture": draw_picture,
            "gains": show_gains,
            "teachers": print_teachers,
        }
        modes[mode](folder, *rest)
