"""A swarm on two mounts of one storage: does anything get lost? Started by hand:

    PYTHONPATH=. python .ci/mounts.py MOUNT_A MOUNT_B [coordinator]

Worker a, which begins the experiment, and the coordinator use MOUNT_A, worker b uses MOUNT_B. It is
started when the registration of a, and with it the warm start, shows there. Prints a row of the manual's table of storages: rounds with
all J external groups, share of external groups of the same round, seconds a round. The exit status
is 1 if a file that counts is missing, torn or left over on either side, or if a node trained twice
on one group.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import drive_store
import sapo

SETTINGS = dict(
    EXPERIMENT_NAME="mounts", MODEL_NAME="tiny", NUM_TRAIN_SAMPLES=4, NUM_TRANSPLANT_TREES=4,
    EXTERNAL_FILTER=False, MAX_ROUNDS=40, NUM_WORKERS=2, OMP_NUM_THREADS=1, WARM_START_STEPS=200,
)  # fmt: skip
ARRIVAL_SECONDS = 180  # on the other mount


def start(mount: str, **more) -> subprocess.Popen:
    settings = SETTINGS | {"GDRIVE_PATH": Path(mount, "mounts"), "PATH": os.environ["PATH"]} | more
    environ = {name: str(value) for name, value in settings.items()}
    environ["PYTHONPATH"] = os.path.dirname(sapo.__file__)
    return subprocess.Popen([sys.executable, __file__], env=environ)


def run_node() -> int:
    """A process of the swarm. Its log also names the external groups that were drawn."""
    external_metrics = sapo.external_metrics

    def with_keys(run, t, external, seconds) -> dict:
        keys = [group.key for group in external]
        return external_metrics(run, t, external, seconds) | {"externals": keys}

    sapo.external_metrics = with_keys
    return sapo.main()


def open_store(mount: str) -> drive_store.DriveStore:
    return drive_store.DriveStore(Path(mount, "mounts"), "mounts")


def wait_for_first(mount: str) -> None:
    """Wait until this mount shows that worker a has registered."""
    give_up_at = time.monotonic() + ARRIVAL_SECONDS
    while not list(Path(mount).glob("mounts/experiments/mounts/board/session.a.*")):
        assert time.monotonic() < give_up_at, f"{mount}: no registration arrives here"
        time.sleep(0.5)


def read_metrics(store: drive_store.DriveStore, node: str) -> list[dict]:
    """The node's log, one row a round."""
    text = store.read_bytes(f"nodes/{node}/logs/metrics.jsonl", 2**30).decode()
    return [json.loads(line) for line in text.splitlines()]


def missing_files(store: drive_store.DriveStore, node: str, metrics: list[dict]) -> list[str]:
    """Rounds in the node's log whose rollouts or reward cannot be read there."""
    missing = []
    for row in metrics:
        groups = store.fetch_rollouts(node, row["round"], 0) or []
        reward = store.read_reward(node, row["round"], 0) or {}
        if len(groups) != SETTINGS["NUM_TRAIN_SAMPLES"] or reward.get("reward") != row["reward"]:
            missing.append(f"{store.root}: {node}: rollouts of round {row['round']} or its reward")
    return missing


def leftovers(store: drive_store.DriveStore) -> list[str]:
    """Unfinished files, and second copies that a storage made of a name."""
    pattern = r"\.new-.*|.* \(\d+\).*|.*sync-conflict.*"
    return [str(path) for path in store.root.rglob("*") if re.fullmatch(pattern, path.name)]


def main(mounts: list[str], with_coordinator: bool) -> int:
    # Run the swarm to its end.
    processes = [start(mounts[0], NODE_ID="a")]
    if with_coordinator:
        processes.append(start(mounts[0], NODE_ROLE="coordinator"))
    wait_for_first(mounts[1])
    processes.append(start(mounts[1], NODE_ID="b"))
    statuses = [process.wait() for process in processes]
    time.sleep(10)  # for files that are still on their way

    # What is lost, as seen from either side?
    lost = []
    rows = []
    seconds = []
    for mount, own_node in zip(mounts, "ab", strict=True):
        store = open_store(mount)
        lost += leftovers(store)
        for node in "ab":
            metrics = read_metrics(store, node)
            lost += missing_files(store, node, metrics)
            if node == own_node:
                rows += metrics
                for before, after in zip(metrics, metrics[1:], strict=False):
                    seconds.append(after["timestamp"] - before["timestamp"])

    # The external groups: how old, and did a node draw one twice?
    drawn = []
    of_same_round = 0
    for row in rows:
        for key in row["externals"]:
            drawn.append((row["node_id"], *key))
            of_same_round += key[0] == row["round"]
    num_twice = len(drawn) - len(set(drawn))

    # The row of the table.
    full = sum(row["external_short"] == 0 for row in rows)
    share = of_same_round / max(1, len(drawn))
    print(f"{full} of {len(rows)} | {share:.0%} | {statistics.median(seconds):.1f} s a round")
    print(f"exit statuses {statuses}; lost or left over: {lost or 'nothing'}; {num_twice} twice")
    return int(bool(lost) or any(statuses) or num_twice > 0)


if __name__ == "__main__":
    if "GDRIVE_PATH" in os.environ and len(sys.argv) == 1:
        sys.exit(run_node())
    sys.exit(main(sys.argv[1:3], "coordinator" in sys.argv[3:]))
