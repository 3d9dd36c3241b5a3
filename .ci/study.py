"""Runs a study, one experiment for each arm and seed, and goes on where it was killed. Started by hand:

    python .ci/study.py smol FOLDER MODEL          the runs of one study, in the order of the seeds
    python .ci/study.py smol FOLDER MODEL tables   what they gave so far, in Markdown

FOLDER is a shared folder for this study alone. A run that has saved its models is finished and is not
started again; any other goes on from its newest checkpoint. Settings, arms, seeds and the tables were fixed
before the first run. THREADS (1) is the number of threads of a run; figures repeat for the same number.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(MODEL_NAME="tiny", LOCAL_NODES=8, MAX_ROUNDS=120, CHECKPOINT_INTERVAL=60, ANSWER_TAG_SHARE=0.02)
SETTINGS = {
    "a": TINY,
    "b": TINY | dict(ANSWER_TAG_SHARE=0.005),
    "c": TINY | dict(LEARNING_RATE=1e-4, MAX_ROUNDS=150),
    "smol": dict(
        LOCAL_NODES=4, MAX_ROUNDS=40, NUM_GENERATIONS=4, MAX_NEW_TOKENS=16, WARM_START_STEPS=25,
        LEARNING_RATE=1e-5, EVAL_INTERVAL=10, EVAL_SAMPLES=64, CHECKPOINT_INTERVAL=20, CHECKPOINT_KEEP=1,
        TASKS="small_products,small_gcd,small_count_bits,small_chain_sum,small_arithmetic",
    ),
}  # fmt: skip
OWN, PEERS, AGAIN = "NUM_TRAIN_SAMPLES", "NUM_TRANSPLANT_TREES", "LOCAL_REPLAY"
ARMS = {  # name -> what makes it; the two that matter most come first
    "8/0": {OWN: 8, PEERS: 0},
    "4/4": {OWN: 4, PEERS: 4},
    "8/0 +r8": {OWN: 8, PEERS: 0, AGAIN: 8},
    "4/0 +r4": {OWN: 4, PEERS: 0, AGAIN: 4},
    "8/0 x2": {OWN: 8, PEERS: 0, "LOCAL_OVERSAMPLE": 2},
    "6/2": {OWN: 6, PEERS: 2},
    "2/6": {OWN: 2, PEERS: 6},
    "4/4 unfiltered": {OWN: 4, PEERS: 4, "EXTERNAL_FILTER": False},
    "8/0 x4": {OWN: 8, PEERS: 0, "LOCAL_OVERSAMPLE": 4},
    "4/4 floor": {OWN: 4, PEERS: 4, "EXTERNAL_FLOOR": 0.05},
}
SEEDS = range(1, 7)


def runs(setting: str):
    """(arm, seed, experiment) in order: all arms of a seed before the next seed, two main arms first."""
    main = list(ARMS)[:2]
    for arms, seeds in ((main, SEEDS[:3]), (ARMS, SEEDS[:3]), (ARMS, SEEDS)):
        for seed in seeds:
            for arm in arms:
                name = f"{setting}-{arm}-s{seed}".replace("/", "_").replace(" ", "_").replace("+", "")
                yield arm, seed, name


def run(setting: str, folder: Path, model: str | None) -> None:
    for arm, seed, name in dict.fromkeys(runs(setting)):
        models = folder / "experiments" / name / "models"
        wanted = {**SETTINGS[setting], **ARMS[arm], "SEED": seed, "NODE_ID": "node"}
        if sum(1 for _ in models.glob("*/model.safetensors")) == wanted["LOCAL_NODES"]:
            continue
        wanted |= {"MODEL_NAME": model} if model else {}
        threads = os.environ.get("THREADS", "1")
        env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": threads}
        env |= {n: str(v) for n, v in wanted.items()}
        env |= {"GDRIVE_PATH": str(folder), "EXPERIMENT_NAME": name}
        with open(folder / f"{name}.log", "a") as log:
            status = subprocess.run([sys.executable, ROOT / "sapo.py"], env=env, stdout=log, stderr=log)
        print(f"{name}: status {status.returncode}", flush=True)
        if status.returncode:
            return
        for weights in (folder / "experiments" / name / "checkpoints").glob("*/*.safetensors"):
            weights.unlink()  # gigabytes that nobody needs once the run is over


def tables(setting: str, folder: Path) -> None:
    """What each run gave, answers right in whatever form included; from the files alone.

    *to 0.2*: first round in which the smoothed mean reward reaches it, and completions per node until then.
    """
    sys.path.insert(0, str(ROOT))
    from coordinator import reward_rows, smooth, summarize
    from drive_store import DriveStore
    from grpo import make_question

    columns = "cumulative reward | completions | informative per update | held-out | answer only | to 0.2"
    print(f"| arm | seed | {columns} |\n{'|---' * 8}|")
    for arm, seed, name in dict.fromkeys(runs(setting)):
        store = DriveStore(folder, name)
        if not store.base.exists() or not (rows := reward_rows(store)):
            continue
        nodes = len({row["node_id"] for row in rows})
        last = max(row["round"] for row in rows)
        held_out = [row["held_out"] for row in rows if "held_out" in row and row["round"] > last - 10]
        right = total = 0  # answers whose last number is the right one, in whatever form
        for path in sorted(store.base.glob(f"rollouts/round_{last:06d}/stage_0/*.json")):
            for group in json.loads(path.read_text())["rollouts"].values():
                answer = make_question(group["task"], group["seed"]).answer
                for completion in group["completions"]:
                    words = "".join(c if c.isdigit() or c == "-" else " " for c in completion["response"])
                    right += bool(words.split()) and words.split()[-1] == answer
                    total += 1
        run = summarize(store)
        reached = next((t for t, reward in enumerate(smooth(run["curve"])) if reward >= 0.2), None)
        to_level = "-" if reached is None else f"{reached}, {run['spent'][reached]:.0f}"
        print(
            f"| {arm} | {seed}{'' if last + 1 == SETTINGS[setting]['MAX_ROUNDS'] else f' (round {last})'} "
            f"| {sum(row['reward'] for row in rows) / nodes:.2f} "
            f"| {sum(row['completions'] for row in rows) / nodes:.0f} "
            f"| {sum(row['informative_groups'] for row in rows) / len(rows):.2f} "
            f"| {sum(held_out) / max(1, len(held_out)):.2f} | {right / max(1, total):.2f} | {to_level} |"
        )


if __name__ == "__main__":
    setting, folder, *rest = sys.argv[1:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if "tables" in rest:
        tables(setting, folder)
    else:
        run(setting, folder, rest[0] if rest else None)
