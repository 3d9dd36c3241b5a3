"""A swarm on two mounts of one storage: does anything get lost? Started by hand:

    PYTHONPATH=. python .ci/mounts.py MOUNT_A MOUNT_B [coordinator]

Worker a uses MOUNT_A and worker b MOUNT_B. Prints a row of the manual's table of storages: rounds
with all J external groups, share of external groups of the same round, seconds a round. The exit
status is 1 if a file that counts is missing, torn or left over.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import drive_store

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = dict(
    EXPERIMENT_NAME="mounts", MODEL_NAME="tiny", NUM_TRAIN_SAMPLES=4, NUM_TRANSPLANT_TREES=4,
    EXTERNAL_FILTER=False, MAX_ROUNDS=40, NUM_WORKERS=2, OMP_NUM_THREADS=1,
)  # fmt: skip


def start(mount: str, **more) -> subprocess.Popen:
    settings = SETTINGS | {"GDRIVE_PATH": Path(mount, "mounts"), "PATH": os.environ["PATH"]} | more
    environ = {name: str(value) for name, value in settings.items()}
    return subprocess.Popen([sys.executable, ROOT / "sapo.py"], env=environ)


def read_metrics(store: drive_store.DriveStore, node_id: str) -> list[dict]:
    """The node's log, one row a round."""
    text = store.read_bytes(f"logs/{node_id}/metrics.jsonl", 2**30).decode()
    return [json.loads(line) for line in text.splitlines()]


def missing_files(store: drive_store.DriveStore, node_id: str, metrics: list[dict]) -> list[str]:
    """Rounds in the node's log whose rollouts or reward the storage lacks."""
    missing = []
    for row in metrics:
        round_ = row["round"]
        groups = store.fetch_rollouts(round_, 0, node_id)
        rewards = [reward["reward"] for reward in store.read_rewards(round_, [node_id], 1)]
        if groups is None or len(groups) != 4 or rewards != [row["reward"]]:
            missing.append(f"{node_id}: rollouts of round {round_} or its reward")
    return missing


def main(mounts: list[str], with_coordinator: bool) -> int:
    # Run the swarm to its end.
    processes = []
    if with_coordinator:
        processes.append(start(mounts[0], NODE_ROLE="coordinator"))
    for mount, node_id in zip(mounts, "ab", strict=True):
        processes.append(start(mount, NODE_ID=node_id))
    statuses = [process.wait() for process in processes]
    time.sleep(10)  # for files that are still on their way

    # What is lost, as seen from mount A?
    store = drive_store.DriveStore(Path(mounts[0], "mounts"), "mounts")
    rows = []
    lost = []
    seconds = []
    for node_id in "ab":
        metrics = read_metrics(store, node_id)
        rows += metrics
        lost += missing_files(store, node_id, metrics)
        for before, after in zip(metrics, metrics[1:], strict=False):
            seconds.append(after["timestamp"] - before["timestamp"])
    lost += [str(path) for path in store.experiment_dir.glob("tmp/*/*")]

    # The row of the table.
    full = sum(row["external_short"] == 0 for row in rows)
    ages = []
    for row in rows:
        ages += row["external_ages"]
    of_same_round = ages.count(0) / max(1, len(ages))
    pace = statistics.median(seconds)
    print(f"{full} of {len(rows)} | {of_same_round:.0%} | {pace:.1f} s a round")
    print(f"exit statuses {statuses}; lost or left over: {lost or 'nothing'}")
    return int(bool(lost) or any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:3], "coordinator" in sys.argv[3:]))
