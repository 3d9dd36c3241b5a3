"""A swarm on two mounts of one storage: does anything get lost? Started by hand:

    PYTHONPATH=. python .ci/mounts.py MOUNT_A MOUNT_B [coordinator]

Worker a, which begins the experiment, and the coordinator use MOUNT_A, worker b uses MOUNT_B. It is
started when the registration of a, and with it the warm start, shows there. Prints a row of the
manual's table of storages: rounds with all J external groups, share of external groups of the same
round, seconds a round. The exit status is 1 if a file that counts is missing, torn or left over on
either side, or if a node trained twice on one group.
"""

import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import sapo
from common import read_log, to_environ
from drive_store import At, DriveStore

SETTINGS = dict(
    EXPERIMENT_NAME="mounts", MODEL_NAME="tiny", NUM_TRAIN_SAMPLES=4, NUM_TRANSPLANT_TREES=4,
    EXTERNAL_FILTER=False, MAX_ROUNDS=40, NUM_WORKERS=2, OMP_NUM_THREADS=1, WARM_START_STEPS=200,
)  # fmt: skip
ARRIVAL_SECONDS = 180  # on the other mount
LEFT_OVER = r"\.new-.*|.* \(\d+\).*|.*sync-conflict.*"  # unfinished, or the second copy of a name


def start(drive: Path, **more) -> subprocess.Popen:
    settings = SETTINGS | {"GDRIVE_PATH": drive, "PATH": os.environ["PATH"]} | more
    settings["PYTHONPATH"] = os.path.dirname(sapo.__file__)
    return subprocess.Popen([sys.executable, __file__], env=to_environ(settings))


def run_node() -> int:
    """A process of the swarm. Its log also names the external groups that were drawn."""
    external_metrics = sapo.external_metrics

    def with_keys(run, node, at) -> dict:
        return external_metrics(run, node, at) | {"externals": [g.key for g in node.external]}

    sapo.external_metrics = with_keys
    return sapo.main()


def missing_files(drive: Path, node: str) -> list[str]:
    """Rounds in the node's log whose rollouts or reward cannot be read there."""
    store = DriveStore(drive, "mounts")
    missing = []
    for row in read_log(drive, node, name="mounts"):
        groups = store.fetch_rollouts(node, At(row["round"])) or []
        reward = store.read_reward(node, At(row["round"])) or {}
        if len(groups) != SETTINGS["NUM_TRAIN_SAMPLES"] or reward.get("reward") != row["reward"]:
            missing.append(f"{drive}: {node}: rollouts of round {row['round']} or its reward")
    return missing


def main(mounts: list[str], with_coordinator: bool) -> int:
    # Run the swarm to its end. Worker b waits until its mount shows that a has registered.
    drives = [Path(mount, "mounts") for mount in mounts]
    processes = [start(drives[0], NODE_ID="a")]
    if with_coordinator:
        processes.append(start(drives[0], NODE_ROLE="coordinator"))
    give_up_at = time.monotonic() + ARRIVAL_SECONDS
    while not list(drives[1].glob("experiments/mounts/board/session.a.*")):
        assert time.monotonic() < give_up_at, f"{mounts[1]}: no registration arrives here"
        time.sleep(0.5)
    processes.append(start(drives[1], NODE_ID="b"))
    statuses = [process.wait() for process in processes]
    time.sleep(10)  # for files that are still on their way

    # What is lost, as seen from either side?
    lost = []
    for drive in drives:
        lost += [str(path) for path in drive.rglob("*") if re.fullmatch(LEFT_OVER, path.name)]
        lost += missing_files(drive, "a") + missing_files(drive, "b")

    # The rounds of both workers, and the external groups that they drew.
    rows = []
    seconds = []
    for drive, node in zip(drives, "ab", strict=True):
        metrics = read_log(drive, node, name="mounts")
        rows += metrics
        for before, after in itertools.pairwise(metrics):
            seconds.append(after["timestamp"] - before["timestamp"])
    drawn = [(row["node_id"], *key) for row in rows for key in row["externals"]]
    num_twice = len(drawn) - len(set(drawn))

    # The row of the table.
    full = sum(row["external_short"] == 0 for row in rows)
    share = sum(row["external_ages"].count(0) for row in rows) / max(1, len(drawn))
    print(f"{full} of {len(rows)} | {share:.0%} | {statistics.median(seconds):.1f} s a round")
    print(f"exit statuses {statuses}; lost or left over: {lost or 'nothing'}; {num_twice} twice")
    return int(bool(lost) or any(statuses) or num_twice > 0)


if __name__ == "__main__":
    if "GDRIVE_PATH" in os.environ and len(sys.argv) == 1:
        sys.exit(run_node())
    sys.exit(main(sys.argv[1:3], "coordinator" in sys.argv[3:]))
