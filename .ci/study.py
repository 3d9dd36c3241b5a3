"""The frontier: reward against generation, each arm at its own best learning rate. Started by hand:

    python .ci/study.py tiny FOLDER              all runs, one after the other; started again, it continues
    python .ci/study.py smol FOLDER MODEL        the same with a real model (a folder or Hugging Face id)
    python .ci/study.py tables FOLDER            what they gave so far, in Markdown
    python .ci/study.py picture FOLDER FILE      the README's picture

Fixed before the first run: seeds 1 to 3 at each rate choose an arm's rate, by the highest mean cumulative
reward (smol: seed 1). Only the seeds after these are reported. A run is finished when it has a line in
FOLDER/results.jsonl. THREADS (1) is the number of threads of a run; figures repeat for the same number.
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
TINY = dict(MODEL_NAME="tiny", LOCAL_NODES=8, MAX_ROUNDS=120, CHECKPOINT_INTERVAL=60, EVAL_INTERVAL=20)
SMOL = dict(
    LOCAL_NODES=4, MAX_ROUNDS=40, NUM_GENERATIONS=4, MAX_NEW_TOKENS=16, WARM_START_STEPS=25, EVAL_INTERVAL=10,
    CHECKPOINT_INTERVAL=20, CHECKPOINT_KEEP=1,
    TASKS="small_products,small_gcd,small_count_bits,small_chain_sum,small_arithmetic",
)  # fmt: skip
STUDIES = {  # settings, arms, rates, seeds that choose, seeds that are reported
    "tiny": (TINY, "8/0 4/4 2/6 4/0 1/7 2/0 1/0 4/4u 8/0x2", "3e-4 6e-4 1e-3 2e-3", (1, 2, 3), range(4, 10)),
    "smol": (SMOL, "8/0 4/4 2/6 4/0", "1e-5 3e-5 1e-4", (1,), range(2, 5)),
}
LEVELS, T_95 = (0.3, 0.4), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def settings_of(arm: str) -> dict:
    """ "4/4u" -> I = 4, J = 4, unfiltered; "8/0x2" -> LOCAL_OVERSAMPLE = 2."""
    pair, _, times = arm.replace("u", "").partition("x")
    own, peers = pair.split("/")
    found = {"NUM_TRAIN_SAMPLES": own, "NUM_TRANSPLANT_TREES": peers, "LOCAL_OVERSAMPLE": times or 1}
    return found | {"EXTERNAL_FILTER": "u" not in arm}


def results(folder: Path) -> dict:
    path = folder / "results.jsonl"
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {(row["arm"], row["lr"], row["seed"]): row for row in rows}


def best_rate(arm: str, done: dict, seeds) -> str | None:
    means = {lr: statistics.fmean(done[arm, lr, s]["cumulative"] for s in seeds)
             for lr in sorted({lr for a, lr, _ in done if a == arm}, key=float)
             if all((arm, lr, s) in done for s in seeds)}  # fmt: skip
    return max(means, key=means.get) if means else None


def run_all(study: str, folder: Path, model: str | None = None) -> None:
    """The main four arms whole, then the others: choosing seeds at all rates, then the reported ones."""
    settings, arms, rates, choosing, reported = STUDIES[study]
    for part in (arms.split()[:4], arms.split()[4:]):
        for seed in choosing:
            for lr in rates.split():
                for arm in part:
                    run(settings, folder, model, arm, lr, seed)
        for seed in reported:
            for arm in part:
                run(settings, folder, model, arm, best_rate(arm, results(folder), choosing), seed)


def run(settings: dict, folder: Path, model: str | None, arm: str, lr: str, seed: int) -> None:
    if (arm, lr, seed) in results(folder):
        return
    name = f"{arm.replace('/', '_')}-lr{lr}-s{seed}"
    wanted = settings | settings_of(arm) | {"LEARNING_RATE": lr, "SEED": seed, "NODE_ID": "node"}
    wanted |= {"DEVICE": "cpu", "GDRIVE_PATH": folder, "EXPERIMENT_NAME": name} | (
        {"MODEL_NAME": model} if model else {}
    )
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": os.environ.get("THREADS", "1")}
    env |= {n: str(v) for n, v in wanted.items()}
    with open(folder / f"{name}.log", "a") as log:
        subprocess.run([sys.executable, ROOT / "sapo.py"], env=env, stdout=log, stderr=log, check=True)
    found = folder / "experiments" / name
    rows = {}
    for path in found.glob("logs/*/metrics.jsonl"):  # after a kill a round's last row counts
        rows |= {(r["round"], r["node_id"]): r for r in map(json.loads, path.read_text().splitlines())}
    row = {"arm": arm, "lr": lr, "seed": seed} | figures([*rows.values()], wanted["MAX_ROUNDS"])
    with open(folder / "results.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    for path in (*found.glob("checkpoints/*/*"), *found.glob("models/*/*.safetensors")):
        path.unlink()  # gigabytes that nobody needs once the run is over
    print(name, f"{row['cumulative']:.2f}", flush=True)


def figures(rows: list[dict], rounds: int) -> dict:
    """What a run gave, per node: reward, completions and tokens, and what it took to reach the levels."""
    by_round = [[row for row in rows if row["round"] == t] for t in range(rounds)]
    per_round = {key: [statistics.fmean(row[key] for row in each) for each in by_round]
                 for key in ("my_reward", "completions", "generated_tokens", "grad_norm")}  # fmt: skip
    curve, window = per_round["my_reward"], max(1, rounds // 10)
    smooth = [statistics.fmean(curve[max(0, t + 1 - window) : t + 1]) for t in range(rounds)]
    levels = {}
    for level in LEVELS:
        at = next((t for t, reward in enumerate(smooth) if reward >= level), None)
        spent = sum(per_round["completions"][: at + 1]) if at is not None else None
        levels[str(level)] = None if at is None else {"round": at, "completions": spent}
    return {
        "cumulative": sum(curve), "completions": sum(per_round["completions"]), "levels": levels, "curve": curve,
        "tokens": sum(per_round["generated_tokens"]), "last12": statistics.fmean(curve[-window:]),
        "held_out": statistics.fmean([r["held_out"] for r in by_round[-1] if "held_out" in r] or [math.nan]),
        "grad_norm": per_round["grad_norm"],
    }  # fmt: skip


def ratio(ours: dict, base: dict) -> str:
    """Gain paired by seed with its 95% interval: Student's t on log ratios."""
    logs = [math.log(ours[s] / base[s]) for s in ours if s in base]
    if len(logs) < 3:
        return ""
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)) * T_95[len(logs) - 2]
    return "{:+.0%} ({:+.0%} to {:+.0%})".format(*(math.expm1(x) for x in (mean, mean - error, mean + error)))


def reported_runs(folder: Path) -> dict[str, list[dict]]:
    """{arm: its reported runs at the rate that was chosen}."""
    done, found = results(folder), {}
    for arm in dict.fromkeys(arm for arm, _, _ in done):
        choosing = (1, 2, 3) if (arm, "6e-4", 1) in done else (1,)
        rate = best_rate(arm, done, choosing)
        runs = [row for (a, lr, seed), row in done.items() if (a, lr) == (arm, rate) and seed not in choosing]
        found |= {arm: runs} if runs else {}
    return found


def tables(folder: Path) -> None:
    found = reported_runs(folder)
    base = {row["seed"]: row["cumulative"] for row in found["8/0"]}
    print(
        "| I/J | rate | seeds | reward | against 8/0 (95%) | completions | to 0.3 | to 0.4 | end | held-out |"
    )
    print("|---" * 10 + "|")
    for arm, runs in found.items():
        total = [row["cumulative"] for row in runs]
        spread = f" ± {statistics.stdev(total):.1f}" if len(runs) > 1 else ""
        cells = [arm, runs[0]["lr"], len(runs), f"{statistics.fmean(total):.1f}{spread}"]
        cells += ["" if arm == "8/0" else ratio({r["seed"]: r["cumulative"] for r in runs}, base)]
        cells += [f"{statistics.fmean(row['completions'] for row in runs):.0f}"]
        for level in map(str, LEVELS):
            there = [row["levels"][level]["completions"] for row in runs if row["levels"][level]]
            never = f" ({len(there)} of {len(runs)})" if len(there) < len(runs) else ""
            cells += [f"{statistics.fmean(there):.0f}{never}" if there else "never"]
        cells += [f"{statistics.fmean(row[key] for row in runs):.2f}" for key in ("last12", "held_out")]
        print("|", " | ".join(map(str, cells)), "|")


def picture(folder: Path, file: str, arms: tuple = ("8/0", "4/4", "2/6")) -> None:
    """Mean and standard error over seeds of the smoothed reward, over rounds and over completions."""
    from coordinator import smooth
    from matplotlib.figure import Figure

    figure = Figure((10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    shown = [(arm, runs) for arm, runs in reported_runs(folder).items() if arm in arms]
    for k, (arm, runs) in enumerate(shown):
        rounds = len(runs[0]["curve"])
        curves = list(zip(*(smooth(run["curve"]) for run in runs), strict=True))
        mean = [statistics.fmean(now) for now in curves]
        error = [statistics.stdev(now) / math.sqrt(len(now)) for now in curves]
        each = runs[0]["completions"] / rounds
        for axis, x in ((left, range(rounds)), (right, [each * (t + 1) for t in range(rounds)])):
            (line,) = axis.plot(x, mean)
            low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
            axis.fill_between(x, low, high, alpha=0.2, color=line.get_color())
            end, apart = (x[-1], mean[-1]), (3, 6 - 9 * k)  # points: two lines may end at one place
            axis.annotate(arm, end, apart, textcoords="offset points", color=line.get_color())
    right.margins(x=0.08)
    left.set(xlabel="round", ylabel="mean reward, smoothed", ylim=(0, None))
    right.set(xlabel="completions generated per node")
    figure.suptitle("2/6 reaches a reward of 0.4 with a quarter of 8/0's generation (tiny, eight nodes)")
    figure.savefig(file)


if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    Path(place).mkdir(parents=True, exist_ok=True)
    if mode in STUDIES:
        run_all(mode, Path(place), *rest)
    else:
        {"tables": tables, "picture": picture}[mode](Path(place), *rest)
