"""The dashboard beside a live swarm of real processes: one look after a kill it says who is dead."""

import os
import re
import subprocess
import sys

from test_kill_storm import ROOT, ROUND, STARTED, Process, drive, nothing_left_behind  # noqa: F401  the last two are fixtures


def look(drive) -> tuple[str, dict[str, str]]:  # noqa: F811
    """One refresh of NODE_ROLE=monitor: its text, and {node: state}."""
    environ = {**os.environ, "NODE_ROLE": "monitor", "GDRIVE_PATH": str(drive), "EXPERIMENT_NAME": "default"}
    done = subprocess.run(
        [sys.executable, ROOT / "sapo.py"],
        env=environ,
        cwd=drive.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    states = {
        m[1]: m[3]
        for m in re.finditer(r"^(\S+) +(worker|coordinator) +\S+ +(\S+) ", done.stdout, re.MULTILINE)
    }
    return done.stdout, states


def test_the_monitor_tells_the_truth_one_refresh_after_kills_and_restarts(drive):  # noqa: F811
    settings = {"MAX_ROUNDS": 10**5, "COORDINATOR_ROUND_INTERVAL": 5}
    names = ("coordinator", "w0", "w1", "w2", "w3")
    swarm = {name: Process(drive, name, **settings).start() for name in names}
    for name in names[1:]:
        swarm[name].until(ROUND, 3)
    text, states = look(drive)
    print(text)
    assert states == dict.fromkeys(names, "live") and "dead" not in text
    before = int(re.search(r"round (\d+),", text)[1])

    for name in ("coordinator", "w1", "w3"):
        swarm[name].kill()
    swarm["w2"].child.send_signal(2)  # Ctrl-C: it leaves, and says so
    swarm["w2"].end()
    text, states = look(drive)
    print(text)
    assert states == {"coordinator": "dead", "w0": "live", "w1": "dead", "w2": "stopped", "w3": "dead"}

    for name in ("coordinator", "w1"):
        assert swarm[name].start().until(STARTED)
    swarm["w1"].until(ROUND)
    text, states = look(drive)
    print(text)
    assert states == {"coordinator": "live", "w0": "live", "w1": "live", "w2": "stopped", "w3": "dead"}
    assert int(re.search(r"round (\d+),", text)[1]) > before
    for warning in ("latest rollout", "storage:", "nodes with rollouts"):
        assert warning in text

    for name in ("coordinator", "w0", "w1"):
        swarm[name].kill()
    text, states = look(drive)
    print(text)
    assert "live" not in states.values() and "no live worker: start one with its old NODE_ID" in text
