"""The README's Colab cells in real Jupyter kernels, the four modules pasted in, google.colab stood in for."""

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
README = (ROOT / "README.md").read_text()
CELLS = dict(re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", README, re.DOTALL))
RUN = "%run /content/drive/MyDrive/sapo/sapo.py\n"  # the last line of each cell; or the modules' text
STAND_IN = """
import os, sys, types
def mount(path):
    os.makedirs("drive/MyDrive", exist_ok=True)
colab = types.ModuleType("google.colab")
colab.drive = types.SimpleNamespace(mount=mount, flush_and_unmount=lambda: None)
sys.modules["google.colab"] = colab
os.environ.update(GDRIVE_PATH=os.path.abspath("drive/MyDrive/rl-swarm"), PIP_NO_INDEX="1")
os.environ.update(MODEL_NAME="tiny", WARM_START_STEPS="60")
"""


class Session:
    """One Colab session: a kernel whose folder is not the project's, with a mounted Drive that others share."""

    def __init__(self, cwd):
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(cwd))
        self.run(STAND_IN)
        self.run(CELLS["mount"])

    def start(self, cell: str, paste=False, **settings):
        """Begin a README cell, as it is or with the modules pasted in; `settings` make it short."""
        settings = {name: str(value) for name, value in settings.items()}
        self.text, self.pictures = "", 0
        program = MODULES if paste else [f"%run {ROOT / 'sapo.py'}\n"]
        self.request = self.client.execute(
            cell.replace(RUN, "\n".join([f"os.environ.update({settings!r})", *program]))
        )

    def until(self, pattern: str | None, seconds: float = 300) -> str:
        """Read what the cell prints until it shows `pattern`; None: until it has ended."""
        deadline = time.monotonic() + seconds
        while pattern is None or not re.search(pattern, self.text, re.MULTILINE):
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
        text = self.until(None)
        assert "Traceback" not in text
        return text

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


def test_a_whole_swarm_in_one_cell_is_stopped_resumed_and_looked_into(session, tmp_path):
    one = session()
    one.start("SEED = 7\n" + CELLS["swarm"], paste=True)
    one.until(r"round 002/200")
    assert "SEED is a Python variable, which is not seen: write %env SEED=7" in one.text
    stopped = one.stop()
    assert "once more to exit at once" in stopped and "node end: stopped before round" in stopped
    assert re.search(r"4 nodes round .* groups 4\+", stopped), "the nodes of the cell share with one another"
    last = int(re.search(r"stopped before round (\d+)", stopped)[1]) - 1
    experiment = tmp_path / "drive/MyDrive/rl-swarm/experiments/ours"
    assert [path.parent.name for path in experiment.glob("checkpoints/*/node.safetensors")] == [
        f"round_{last:06d}"
    ]
    assert "to go on:\n  run this cell again" in stopped
    again = one.run(CELLS["swarm"], paste=True, MAX_ROUNDS=last + 3)
    assert f"from the checkpoint after round {last}\n" in again and "node end: finished" in again
    assert len(list(experiment.glob("models/node_?/config.json"))) == 4
    table = one.run(CELLS["look"])
    assert (
        "['ours']" in table and f"'current_round': {last + 2}" in table and re.search(r"round +\n0 ", table)
    )


def test_sessions_with_a_coordinator_train_together_and_one_that_died_goes_on(session, tmp_path):
    settings = {"FETCH_TIMEOUT_SECONDS": 5, "EXTERNAL_FILTER": False, "CHECKPOINT_INTERVAL": 2}
    settings |= {"COORDINATOR_ROUND_INTERVAL": 15, "MAX_ROUNDS": 20000}
    lead, anna, ben = session(), session(), session()
    ben_cell = CELLS["worker"].replace("anna", "ben")
    lead.start(CELLS["coordinator"], **settings)
    anna.start(CELLS["worker"], **settings)
    ben.start(ben_cell, **settings)
    for one, name in ((anna, "anna"), (ben, "ben")):
        one.until(rf"{name} round \d+/20000 \| reward \S+ \| groups 4\+4")
    ben.until(r"ben round 0*([3-9]|[1-9]\d+)/20000")
    ben.close()  # the session dies
    again = session()
    again.start(ben_cell, **settings)
    again.until(r"from the checkpoint after round \d+")
    again.until(r"ben round \d+/20000")

    watching = session()
    watching.start(CELLS["monitor"])
    text = watching.until(r"storage: ")
    for node in ("anna", "ben"):
        assert re.search(rf"^{node} +live ", text, re.MULTILINE), text
    watching.until(r"Figure|Image")
    assert watching.pictures == 1, "the curve, inline"
    for one in (watching, anna, again, lead):
        one.stop()


def test_the_settings_of_the_readme_are_compared_on_one_machine(tmp_path):
    """The shell line of the cell, with the embedded model and few rounds in place of a GPU."""
    (command,) = re.findall(r"^!cd \S+ && (.*)$", CELLS["compare"], re.MULTILINE)
    command = re.sub(r"MODEL_NAME=\S+", "MODEL_NAME=tiny", command)
    command = re.sub(r"MAX_ROUNDS=\d+", "MAX_ROUNDS=2", command).replace("bash ", f"bash {ROOT}/")
    environ = {**os.environ, "PYTHON": sys.executable, "WARM_START_STEPS": "40", "NUM_WORKERS": "2"}
    environ |= {"GDRIVE_PATH": str(tmp_path)}
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    for arm in re.search(r'CONFIGS="([^"]*)"', command)[1].split():
        assert re.search(rf"^ *{arm} +1 ", done.stdout, re.MULTILINE), done.stdout[-3000:]
