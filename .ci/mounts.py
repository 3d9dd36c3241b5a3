"""Check that a swarm on two mounts of one shared folder loses no files. Run it by hand:

    PYTHONPATH=. python .ci/mounts.py MOUNT_A MOUNT_B [coordinator]

Worker a and the optional coordinator use MOUNT_A. Worker b uses MOUNT_B and starts once worker a is
visible there. The script prints how many rounds had all J external groups, the share of drawn
groups that were published in the same round, and the median time per round. It exits with code 1
if a process fails, if a file is missing, damaged or left over on either mount, or if a worker
trains on an external group twice.
"""

import contextlib
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import sapo
from common import read_log, to_environ, wait_until
from drive_store import At, DriveStore, InvalidFileError

SETTINGS = dict(
    EXPERIMENT_NAME="mounts", MODEL_NAME="tiny", NUM_TRAIN_SAMPLES=4, NUM_TRANSPLANT_TREES=4,
    EXTERNAL_FILTER=False, NUM_WORKERS=2, OMP_NUM_THREADS=1, WARM_START_STEPS=200,
    MAX_ROUNDS=os.environ.get("MAX_ROUNDS", 40), PATH=os.environ["PATH"],
    PYTHONPATH=os.path.dirname(sapo.__file__),
)  # fmt: skip
# Names of unfinished writes, and of second copies that a sync client creates.
LEFT_OVER = r"\.new-.*|.* \(\d+\).*|.*sync-conflict.*"


def start(**settings) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__], env=to_environ(SETTINGS | settings))


def run_node() -> int:
    """Run a process of the swarm, and add the keys of its external groups to its metrics."""
    policy_gradient = sapo.policy_gradient

    def with_keys(run, node) -> None:
        policy_gradient(run, node)
        node.metrics["externals"] = [group.key for group in node.external]

    sapo.policy_gradient = with_keys
    return sapo.main()


def missing_files(drive: Path, node: str) -> list[str]:
    """Return a message for each logged round whose rollouts or reward cannot be read."""
    store = DriveStore(drive, "mounts")
    missing = []
    for row in read_log(drive, node, name="mounts"):
        at = At(row["round"])
        with contextlib.suppress(InvalidFileError):
            reward = store.fetch("rewards", node, at) or {}
            if store.fetch("rollouts", node, at) and reward.get("reward") == row["reward"]:
                continue
        missing.append(f"{drive}: {node}: rollouts of round {row['round']} or its reward")
    return missing


def main(mounts: list[str], with_coordinator: bool) -> int:
    # Run the swarm until all processes end.
    drives = [Path(mount, "mounts") for mount in mounts]
    processes = [start(GDRIVE_PATH=drives[0], NODE_ID="a")]
    if with_coordinator:
        processes.append(start(GDRIVE_PATH=drives[0], NODE_ROLE="coordinator"))
    wait_until(lambda: [*drives[1].glob("experiments/mounts/board/session.a.*")], seconds=180)
    processes.append(start(GDRIVE_PATH=drives[1], NODE_ID="b"))
    statuses = [process.wait() for process in processes]
    time.sleep(10)  # the last files may not be visible on the other mount yet

    # Collect missing files and leftovers, as seen from each mount.
    lost = []
    for drive in drives:
        lost += [str(path) for path in drive.rglob("*") if re.fullmatch(LEFT_OVER, path.name)]
        lost += missing_files(drive, "a") + missing_files(drive, "b")

    # Print the figures for the table in LOG.md, from the rounds of both workers.
    logs = [read_log(drive, node, name="mounts") for drive, node in zip(drives, "ab", strict=True)]
    seconds = [b["timestamp"] - a["timestamp"] for log in logs for a, b in itertools.pairwise(log)]
    rows = logs[0] + logs[1]
    drawn = [(row["node_id"], *key) for row in rows for key in row["externals"]]
    num_twice = len(drawn) - len(set(drawn))
    full = sum(row["external_short"] == 0 for row in rows)
    share = sum(row["external_ages"].count(0) for row in rows) / max(1, len(drawn))
    print(f"{full} of {len(rows)} | {share:.0%} | {statistics.median(seconds):.1f} s per round")
    print(f"exit codes {statuses}; lost or left over: {lost or 'none'}; used twice: {num_twice}")
    return int(any([*lost, *statuses, num_twice]))


if __name__ == "__main__":
    is_node = "GDRIVE_PATH" in os.environ and len(sys.argv) == 1
    sys.exit(run_node() if is_node else main(sys.argv[1:3], "coordinator" in sys.argv[3:]))
