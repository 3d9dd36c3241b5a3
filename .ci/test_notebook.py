"""The README's Colab cells in real Jupyter kernels, the four modules pasted in, with a stand-in for google.colab."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).resolve().parent.parent
MODULES = [(ROOT / f).read_text() for f in ("drive_store.py", "grpo.py", "coordinator.py", "sapo.py")]
CELLS = dict(
    re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
)
PASTE = "# drive_store.py, grpo.py, coordinator.py and sapo.py go here\n"
STAND_IN = """
import os, sys, types
colab = types.ModuleType("google.colab")
colab.drive = types.SimpleNamespace(mount=lambda path: os.makedirs("drive/MyDrive", exist_ok=True), flush_and_unmount=lambda: None)
sys.modules["google.colab"] = colab
os.environ.update(GDRIVE_PATH=os.path.abspath("drive/MyDrive/rl-swarm"), MODEL_NAME="tiny", WARM_START_STEPS="60", PIP_NO_INDEX="1")
"""


class Session:
    """One Colab session: a kernel whose folder is not the project's, with a mounted Drive that others share."""

    def __init__(self, cwd):
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(cwd))
        self.run(STAND_IN)
        self.run(CELLS["mount"])

    def start(self, cell: str, **settings):
        """Begin a README cell, with the modules where it says so; `settings` make it short."""
        short = f"os.environ.update({ {k: str(v) for k, v in settings.items()}!r})\n"
        self.text, self.pictures = "", 0
        self.request = self.client.execute(cell.replace(PASTE, short + "\n".join(MODULES)))

    def until(self, pattern: str | None, seconds: float = 300) -> str:
        """Read what the cell prints until it shows `pattern`; None: until it has ended."""
        deadline = time.monotonic() + seconds
        while pattern is None or not re.search(pattern, self.text):
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != self.request:
                continue
            content = message["content"]
            self.text += content.get("text", "") + content.get("data", {}).get("text/plain", "")
            self.pictures += "image/png" in content.get("data", {})
            assert message["msg_type"] != "error", "\n".join(content["traceback"])
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                assert pattern is None, f"ended without {pattern!r}:\n{self.text[-2000:]}"
                return self.text
        return self.text

    def run(self, cell: str, **settings) -> str:
        self.start(cell, **settings)
        return self.until(None)

    def stop(self) -> str:
        """The stop button."""
        self.manager.interrupt_kernel()
        return self.until(None)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def session(tmp_path):
    opened = []

    def open_session():
        opened.append(Session(tmp_path))
        return opened[-1]

    yield open_session
    for one in opened:
        one.close()


def checkpoints(tmp_path, node: str) -> list[Path]:
    return sorted((tmp_path / "drive/MyDrive/rl-swarm/experiments/ours/checkpoints").glob(f"*/{node}.pt"))


def test_a_whole_swarm_in_one_cell_is_stopped_resumed_and_looked_into(session, tmp_path):
    one = session()
    one.start(CELLS["swarm"])
    one.until(r"node_3 round 002/200")
    stopped = one.stop()
    assert (
        "stopping; once more to exit at once" in stopped
        and "node end: stopped before round" in stopped
        and "Traceback" not in stopped
    )
    assert "groups 4+" in stopped, "the nodes of the cell share with one another"
    last = int(re.search(r"stopped before round (\d+)", stopped)[1]) - 1
    assert [len(checkpoints(tmp_path, f"node_{i}")) for i in range(4)] == [1] * 4
    again = one.run(CELLS["swarm"], MAX_ROUNDS=last + 3)
    assert f"from the checkpoint after round {last}" in again and "node end: finished" in again
    table = one.run(CELLS["look"])
    assert (
        "['ours']" in table and f"'current_round': {last + 2}" in table and re.search(r"round +\n0 ", table)
    )


def test_sessions_with_a_coordinator_train_together_and_one_that_died_goes_on(session, tmp_path):
    settings = {
        "FETCH_TIMEOUT_SECONDS": 5,
        "EXTERNAL_FILTER": False,
        "CHECKPOINT_INTERVAL": 2,
        "COORDINATOR_ROUND_INTERVAL": 15,
        "MAX_ROUNDS": 20000,
    }
    lead, anna, ben = session(), session(), session()
    lead.start(CELLS["coordinator"], **settings)
    anna.start(CELLS["worker"], **settings)
    ben.start(CELLS["worker"].replace("anna", "ben"), **settings)
    anna.until(r"anna round \d+/20000 \| reward \S+ \| groups 4\+4")
    ben.until(r"ben round \d+/20000 \| reward \S+ \| groups 4\+4")
    ben.until(r"ben round 0*([3-9]|[1-9]\d+)/20000")
    ben.close()  # the session dies
    again = session()
    again.start(CELLS["worker"].replace("anna", "ben"), **settings)
    again.until(r"from the checkpoint after round \d+")
    again.until(r"ben round \d+/20000")

    watching = session()
    watching.start(CELLS["monitor"])
    text = watching.until(r"storage: ")
    for node in ("anna", "ben", "coordinator"):
        assert re.search(rf"^{node} .* live ", text, re.MULTILINE), text
    watching.until(r"Figure")
    assert watching.pictures == 1, "the charts, inline"
    assert "Traceback" not in watching.stop()
    for one in (anna, again, lead):
        assert "Traceback" not in one.stop()


def test_four_settings_are_compared_on_one_machine(tmp_path):
    """The shell line of the cell, with the embedded model and few rounds in place of a GPU."""
    (command,) = re.findall(r"^!cd \S+ && (.*)$", CELLS["compare"], re.MULTILINE)
    command = (
        command.replace("MODEL_NAME=gpt2", "MODEL_NAME=tiny")
        .replace("MAX_ROUNDS=200", "MAX_ROUNDS=2")
        .replace("bash ", f"bash {ROOT}/")
    )
    environ = {
        **os.environ,
        "PYTHON": sys.executable,
        "WARM_START_STEPS": "40",
        "GDRIVE_PATH": str(tmp_path),
        "LOCAL_NODES": "2",
    }
    done = subprocess.run(
        ["bash", "-c", command], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    for label in ("4/0", "3/1", "2/2", "1/3"):
        assert f"| {label} | 1 |" in done.stdout
