"""Helpers for the tests. They provide settings, run the program and read a run's files.

test_sapo.py contains more helpers, and world.py contains the simulated world.
"""

import contextlib
import difflib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import sapo

ROOT = Path(__file__).resolve().parent.parent
gc.freeze()  # the garbage collection at the end of each sapo.main then skips the libraries

# For tests in which only the order of events matters. With these settings, a model learns nothing.
QUICK = {
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "NODE_ID": "n", "TASKS": "small_products",
    "WARM_START_STEPS": 0, "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4,
    "EXTERNAL_FILTER": False, "CHECKPOINT_INTERVAL": 3, "MAX_ROUNDS": 40, "FETCH_TIMEOUT_SECONDS": 20,
}  # fmt: skip
# Combined with QUICK, these settings make some answers correct, so that weights and rewards change.
LEARNING = {
    "TASKS": "small_products,small_gcd", "WARM_START_STEPS": 60, "ANSWER_TAG_SHARE": 0.9,
    "LEARNING_RATE": 0.001, "MAX_ROUNDS": 6, "CHECKPOINT_INTERVAL": 2, "FETCH_TIMEOUT_SECONDS": 0.1,
}  # fmt: skip


def to_environ(settings: dict) -> dict:
    """Return settings as environment variables. A setting with the value None is left unset."""
    return {name: str(value) for name, value in settings.items() if value is not None}


def run(drive, *more: dict, **settings) -> int:
    """Call sapo.main with QUICK, two nodes (n_0 and n_1) and these settings. Return the exit code.

    Example: run(drive, LEARNING, MAX_ROUNDS=4)
    """
    merged = {**QUICK, "LOCAL_NODES": 2, "GDRIVE_PATH": drive}
    for each in (*more, settings):
        merged |= each
    return sapo.main(to_environ(merged))


def wait_until(condition, seconds: float = 120):
    """Call `condition` repeatedly until it returns a truthy value, and return this value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the expected condition was not met in time"
        time.sleep(0.01)
    return value


def processes_with(*words: str) -> list[int]:
    """Return the IDs of processes with all these words in their environment or mapped files."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or it belongs to another user
            text = (folder / "environ").read_text(errors="replace") + (folder / "maps").read_text()
            if all(word in text for word in words):
                pids.append(int(folder.name))
    return pids


def run_command(folder: Path, *command, act=lambda group: None, seconds=60, **settings):
    """Run a command in its own session, as a terminal does. Meanwhile, call act(process_group).

    After `act`, all processes that the command started must end within `seconds`. Return the
    exit code (`status`), the output (`screen`) and `logs`, a dict {process: text}.
    """
    folder.mkdir(exist_ok=True)
    settings = {"LOG_DIR": folder / "logs", "PYTHON": sys.executable, **settings}
    environ = os.environ | to_environ(settings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, **pipes)
    try:
        act(process.pid)
        screen, _ = process.communicate(timeout=seconds)  # waits until no process can write to it
        assert not processes_with(f"LOG_DIR={folder}/logs")
    finally:
        for pid in processes_with(f"LOG_DIR={folder}/logs"):
            os.kill(pid, signal.SIGKILL)
    logs = {path.stem: path.read_text() for path in folder.glob("logs/*")}
    return SimpleNamespace(status=process.returncode, screen=screen, logs=logs)


def folder_of(drive, node="", name="default") -> Path:
    """Return a node's folder or, without a node, the folder of all nodes."""
    return Path(drive) / "experiments" / name / "nodes" / node


def rounds_of(drive, node, kind="rewards", name="default") -> list[int]:
    """Return the rounds for which a node has files of this kind, ascending."""
    paths = folder_of(drive, node, name).glob(f"{kind}/round_*")
    return sorted({int(path.name[6:12]) for path in paths})


def checkpoint_of(drive, node, name="default") -> int | None:
    """Return the round of a node's newest checkpoint, or None without a checkpoint."""
    return max(rounds_of(drive, node, "checkpoints", name), default=None)


def heartbeat_of(drive, node, name="default") -> str:
    """Return the state in a node's last heartbeat: running, done, stopped or failed."""
    return json.loads((folder_of(drive, node, name) / "heartbeat.json").read_bytes())["state"]


def read_log(drive, node, log="metrics", name="default") -> list[dict]:
    """Return the rows of a node's log."""
    lines = (folder_of(drive, node, name) / f"logs/{log}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def events_of(drive, node, kind, name="default") -> list[str]:
    """Return the texts of a process's events of one kind. `node` is the process's first node."""
    rows = read_log(drive, node, "training_events", name)
    return [row["text"] for row in rows if row["event"] == kind]


def without_times(row: dict) -> dict:
    return {name: row[name] for name in row if not re.search("seconds|time", name)}


def results(drive, name="default") -> dict:
    """Return the results that an identical run reproduces, as {path below nodes/: contents}.

    Reward and rollout files are dicts without times, and checkpoints are bytes.
    """
    found = {}
    for path in sorted(folder_of(drive, "", name).glob("*/[rc]*/round_*")):
        data = path.read_bytes()
        if path.suffix == ".json":
            data = without_times(json.loads(data))
        found[str(path.relative_to(folder_of(drive, "", name)))] = data
    return found


def rewards_of(drive, node="*", name="default") -> list[dict]:
    """Return the reward files of a node (by default, all nodes), as dicts without times.

    They are sorted by round, stage and node.
    """
    paths = folder_of(drive, "", name).glob(f"{node}/rewards/*.json")
    paths = sorted(paths, key=lambda path: (path.name, path.parent.parent.name))
    return [without_times(json.loads(path.read_bytes())) for path in paths]


def compare_transcript(name: str, text: str, masks: dict) -> None:
    """Compare a text with the file NAME in .ci/, after replacing each pattern in `masks`.

    After a change to the output, rewrite the files, and review the changes with `git diff`:

        UPDATE=1 PYTHONPATH=. python -m pytest .ci -k transcript
    """
    for pattern, replacement in masks.items():
        text = re.sub(pattern, replacement, text)
    text = re.sub(" +\n", "\n", text).rstrip() + "\n"
    path = ROOT / ".ci" / name
    if os.environ.get("UPDATE"):
        path.write_text(text)
    expected = path.read_text().splitlines()
    diff = "\n".join(difflib.unified_diff(expected, text.splitlines(), name, "now", lineterm=""))
    assert not diff, diff


@contextlib.contextmanager
def time_limit(seconds: float = 30):
    """Fail the test if the block takes longer than `seconds`.

    It does not raise TimeoutError, because that is an OSError, which makes the program retry.
    """
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"took longer than {seconds} s"))
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again each second, until the block ends
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def is_safe_to_print(text: str) -> bool:
    """Return whether a text is free of control characters, very long lines and tracebacks."""
    is_printable = text.replace("\n", "").isprintable()
    return is_printable and max(map(len, text.split("\n"))) < 2000 and "Traceback" not in text
