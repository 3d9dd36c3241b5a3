"""A swarm on two mounts of one storage: what arrives, and whether anything is lost. Started by hand:

    PYTHONPATH=. python .ci/mounts.py MOUNT_A MOUNT_B [coordinator]     worker a on A, worker b on B

Prints a row of the manual's table of storages. Exit status 1 if a file that counts is missing, torn or left over.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from drive_store import DriveStore, bucket

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = dict(
    EXPERIMENT_NAME="mounts", NUM_TRAIN_SAMPLES=4, NUM_TRANSPLANT_TREES=4, MODEL_NAME="tiny", MAX_ROUNDS=40,
    EXTERNAL_FILTER=False, NUM_WORKERS=2, OMP_NUM_THREADS=1,
)  # fmt: skip


def start(mount: str, **more) -> subprocess.Popen:
    settings = SETTINGS | {"GDRIVE_PATH": Path(mount, "mounts"), "PATH": os.environ["PATH"]} | more
    return subprocess.Popen([sys.executable, ROOT / "sapo.py"], env={n: str(v) for n, v in settings.items()})


def row_of(store: DriveStore, node: str) -> tuple[list[dict], list[str]]:
    """The node's rounds as its log has them, and what the storage lacks of them."""
    text = store.read_bytes(f"logs/{node}/metrics.jsonl", 2**30).decode()
    rows, lost = [json.loads(line) for line in text.splitlines()], []
    for row in rows:
        t, rewards = row["round"], [r["reward"] for r in store.rewards(row["round"], [node])]
        if len(store.fetch(t, 0, node)) != 4 or rewards != [row["reward"]]:
            lost.append(f"{node}: {bucket('rollouts', t)} or its reward")
    return rows, lost


def main(mounts: list[str], with_coordinator: bool) -> int:
    processes = [start(mounts[0], NODE_ROLE="coordinator")] if with_coordinator else []
    processes += [start(mount, NODE_ID=node) for mount, node in zip(mounts, "ab", strict=True)]
    status = [process.wait() for process in processes]
    time.sleep(10)  # what is still on its way
    store = DriveStore(Path(mounts[0], "mounts"), "mounts")
    found = [row_of(store, node) for node in "ab"]
    rows, lost = [row for rows, _ in found for row in rows], [each for _, lost in found for each in lost]
    lost += [str(path) for path in store.base.glob("tmp/*/*")]
    ages = [age for row in rows for age in row["external_ages"]]
    times = [[row["timestamp"] for row in rows] for rows, _ in found]
    seconds = [after - before for each in times for before, after in zip(each, each[1:], strict=False)]
    full = sum(row["external_short"] == 0 for row in rows)
    now = ages.count(0) / max(1, len(ages))
    print(f"{full} of {len(rows)} | {now:.0%} | {statistics.median(seconds):.1f} s a round")
    print(f"exit status {status}; lost or left over: {lost or 'nothing'}")
    return int(bool(lost) or any(status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:3], "coordinator" in sys.argv[3:]))
