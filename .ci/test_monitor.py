"""The dashboard beside a live swarm of real processes: one look after a kill it says who is dead."""

import os
import re
import signal
import subprocess
import sys

from test_kill_storm import ROOT, ROUND, STARTED, Process, drive, nothing_left_behind  # noqa: F401  two fixtures


def look(drive) -> tuple[str, int, dict[str, str]]:  # noqa: F811
    """One refresh of NODE_ROLE=monitor: its text, the round that it shows, and {node: state}."""
    environ = {**os.environ, "NODE_ROLE": "monitor", "GDRIVE_PATH": str(drive), "EXPERIMENT_NAME": "default"}
    command = [sys.executable, ROOT / "sapo.py"]
    done = subprocess.run(command, env=environ, cwd=drive.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    print(done.stdout)
    states = dict(re.findall(r"^(w\d) +(live|dead|left)\b", done.stdout, re.MULTILINE))
    return done.stdout, int(re.search(r"round (\d+) of", done.stdout)[1]), states


def test_the_monitor_tells_the_truth_one_refresh_after_kills_and_restarts(drive):  # noqa: F811
    settings = {"MAX_ROUNDS": 10**5, "COORDINATOR_ROUND_INTERVAL": 5}
    names = ("coordinator", "w0", "w1", "w2", "w3")
    swarm = {name: Process(drive, name, **settings).start() for name in names}
    for name in names[1:]:
        swarm[name].until(ROUND, 3)
    text, before, states = look(drive)
    assert states == dict.fromkeys(names[1:], "live") and "dead" not in text
    assert "latest rollout, by w" in text and "storage:" in text

    for name in ("coordinator", "w1", "w3"):
        swarm[name].kill()
    swarm["w2"].signal(signal.SIGINT).end()  # Ctrl-C: it leaves, and says so
    text, _, states = look(drive)
    assert states == {"w0": "live", "w1": "dead", "w2": "left", "w3": "dead"}

    for name in ("coordinator", "w1"):
        assert swarm[name].start().until(STARTED)
    swarm["w1"].until(ROUND)
    text, after, states = look(drive)
    assert states == {"w0": "live", "w1": "live", "w2": "left", "w3": "dead"} and after > before

    for name in ("coordinator", "w0", "w1"):
        swarm[name].kill()
    text, _, states = look(drive)
    assert "live" not in states.values() and "no live worker: start one with its old NODE_ID" in text
