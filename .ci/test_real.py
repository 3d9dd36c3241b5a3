"""What a simulation cannot show: real processes, real signals, another interpreter. S5, U2, F3, L5."""

import os
import signal
import subprocess
import sys

import pytest

import sapo
from common import LEARNING, QUICK, checkpoint_of, heartbeat_of, results, rounds_of, run, to_environ
from common import wait_until

ENDLESS = {"MAX_ROUNDS": 10**5, "NUM_TRANSPLANT_TREES": 0, "CHECKPOINT_INTERVAL": 2}


def start(drive, *more: dict, **settings) -> subprocess.Popen:
    """`python sapo.py` with QUICK and these settings."""
    merged = {**QUICK, "GDRIVE_PATH": drive, "OMP_NUM_THREADS": 1}
    for each in (*more, settings):
        merged |= each
    environ = os.environ | to_environ(merged)
    command = [sys.executable, sapo.__file__]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number, status, state", [
    (signal.SIGTERM, 130, "stopped"), (signal.SIGUSR1, 130, "stopped"), (signal.SIGKILL, -9, "running"),
])  # fmt: skip
def test_S5_F3_a_real_signal_stops_in_order_or_kills_and_the_next_start_goes_on(
    tmp_path, capsys, number, status, state
):
    process = start(tmp_path, ENDLESS)
    try:
        wait_until(lambda: checkpoint_of(tmp_path, "n"))
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, output
    assert heartbeat_of(tmp_path, "n") == state

    # A stop saves the last round. After a kill the rounds since the checkpoint are repeated.
    saved = checkpoint_of(tmp_path, "n")
    last = rounds_of(tmp_path, "n")[-1]
    assert saved == last if state == "stopped" else saved <= last
    assert run(tmp_path, ENDLESS, LOCAL_NODES=1, MAX_ROUNDS=last + 3) == 0
    assert f"from the checkpoint after round {saved}" in capsys.readouterr().out
    assert rounds_of(tmp_path, "n") == [*range(last + 3)]


def test_L5_two_runs_of_one_command_are_equal_bit_for_bit(tmp_path):
    """The second one in another interpreter, with other hashes of texts. Five nodes publish once in a
    round of two stages, and each reads three of its four peers."""
    settings = {"LOCAL_NODES": 5, "MAX_STAGES": 2, "ROLLOUT_PUBLISH_FREQUENCY": "round"}
    settings |= {"FETCH_MAX_PEERS": 3, "EXTERNAL_FILTER": True}
    assert run(tmp_path / "one", LEARNING, settings) == 0
    (tmp_path / "two").mkdir()
    os.rename(tmp_path / "one/warmstart", tmp_path / "two/warmstart")
    process = start(tmp_path / "two", LEARNING, settings, PYTHONHASHSEED=7)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output

    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert one == two
    rewards = [row for path, row in one.items() if "/rewards/" in path]
    assert len({row["reward"] for row in rewards}) > 3
    assert max(row["grad_norm"] for row in rewards) > 0, "nothing was learned"
