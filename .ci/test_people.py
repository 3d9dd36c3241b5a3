"""Tests of the guarantees to users (U1 to U11), the warm start (L6) and startup (F6).

run_swarm.sh is tested with a stand-in for python, which records how it is called.
"""

import contextlib
import copy
import errno
import io
import json
import os
import re
import resource
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from signal import SIGINT, SIGKILL, default_int_handler, signal
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer

import coordinator
import drive_store
import grpo
import sapo
from common import LEARNING, QUICK, ROOT, checkpoint_of, compare_transcript, events_of, folder_of
from common import heartbeat_of
from common import processes_with, read_log, results, rewards_of, rounds_of, run, run_command
from common import to_environ, wait_until
from drive_store import StoreError
from test_sapo import at_call, contents

signal(SIGINT, default_int_handler)  # background jobs of a script ignore it by default
UNSET = dict.fromkeys([*QUICK, "LOCAL_NODES"])  # removes these settings from a run
TWELVE_ROUNDS = LEARNING | {"MAX_ROUNDS": 12, "MAX_STAGES": 2}
WARM = {"WARM_START_STEPS": 20}
MADE = "creating the warm start"
MODULES = ("drive_store", "grpo", "coordinator", "sapo")
PRINTED = (ROOT / "README.md").read_text() + (ROOT / ".github/MANUAL.md").read_text()


def output_of(drive, *more: dict, status=0, **settings) -> str:
    """Call `run`, which must return this exit code. Return the printed output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        found = run(drive, *more, **settings)
    assert found == status, output.getvalue()
    return output.getvalue()


def printed(marker: str) -> str:
    """Return the code block after this marker in README or MANUAL."""
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", PRINTED, re.DOTALL)[1]


def recipe(name: str) -> str:
    """Return a recipe, a diff or a script, from its own file, README or MANUAL."""
    for path in ROOT.glob(f".github/recipes/{name}.*"):
        return path.read_text()
    return printed(f"recipe: {name.replace('_', ' ')}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> SimpleNamespace:
    """Run two nodes, with two stages per round and no network.

    Return the folder, the output, and copies of the nodes' models before they were exported.
    """
    drive = tmp_path_factory.mktemp("finished")
    models = {}
    export_models = sapo.export_models

    def copy_and_export(run, *args):
        models.update({node.id: copy.deepcopy(node.model) for node in run.nodes})
        export_models(run, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", None)
        patch.setattr(sapo, "export_models", copy_and_export)
        output = output_of(drive, TWELVE_ROUNDS, EVAL_INTERVAL=4, EVAL_SAMPLES=8)
    assert models.keys() == {"n_0", "n_1"}
    return SimpleNamespace(drive=drive, output=output, models=models)


# -------- Shell commands --------------------------------------------------------------------------

RUN_SWARM = ("bash", ROOT / "run_swarm.sh")

# A stand-in for python. It reports two cores and two GPUs if run_swarm.sh asks for them. Otherwise,
# it records its environment and arguments, and does what CASES specifies for this process.
STAND_IN = """
if [[ $2 = *device_count* ]]; then echo 2 2; exit; fi
if [[ $2 = *cpu_count* ]]; then echo 2; exit; fi
if [[ $2 = *heartbeat* ]]; then exec PYTHON "$@"; fi
ARGUMENTS="$*" env -0 > "$STARTS/$EPOCHREALTIME"
until_ctrl_c() { trap 'echo "$NODE_ROLE was stopped"; exit 130' INT; while :; do sleep 0.1; done; }
case "$NODE_ROLE $NODE_ID" in CASES esac
"""


def write_python(folder: Path, script: str) -> Path:
    """Write a shell script that commands run in place of python."""
    path = folder / "python"
    path.write_text(f"#!/bin/bash\n{script}")
    path.chmod(0o755)
    return path


def stand_in(folder: Path, cases: str) -> dict:
    """Create a stand-in for python. Return the variables that make a command use it."""
    (folder / "starts").mkdir()
    write_python(folder, STAND_IN.replace("CASES", cases).replace("PYTHON", sys.executable))
    path = f"{folder}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHON": folder / "python", "STARTS": folder / "starts"}


def starts_in(folder: Path) -> list[dict]:
    """Return the environment of each call of the stand-in, in order, including ARGUMENTS."""
    texts = [path.read_text() for path in sorted(folder.glob("starts/*"))]
    return [dict(line.split("=", 1) for line in text.split("\0") if line) for text in texts]


def run_swarm(folder: Path, cases: str, **settings) -> SimpleNamespace:
    """Run run_swarm.sh with a stand-in for python. The result includes its calls (`starts`)."""
    done = run_command(folder, *RUN_SWARM, **stand_in(folder, cases), **settings)
    done.starts = starts_in(folder)
    return done


# -------- U1, U2, F6: settings, starts and stops --------------------------------------------------


def test_U1_help_explains_every_variable_and_an_argument_is_answered(monkeypatch, capsys):
    answers = []
    for argument, status in (("--help", 0), ("monitor", 2)):
        monkeypatch.setattr(sys, "argv", ["sapo.py", argument])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(f"{ROOT}/sapo.py", run_name="__main__")
        assert caught.value.code == status
        answers.append(capsys.readouterr().out)

    # The entry of each variable is one line, plus indented continuation lines.
    for name, row in sapo.TABLE.items():
        (entry,) = re.findall(rf"(?m)^  {name} .*(?:\n {{9}}.*)*$", answers[0])
        assert "".join(row.metadata["help"].split()) in "".join(entry.split())
        assert ("auto" if name == "TASKS" else str(row.default)[:8]) in entry
    assert "environment variables" in answers[1]


def test_U1_the_shared_folder_is_in_the_drive_that_is_mounted(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("drive", "gdrive")]  # mount points in notebooks
    monkeypatch.setattr(drive_store, "COLAB_DRIVES", [str(folder) for folder in folders])
    folders[1].mkdir()
    output_of(None, LOCAL_NODES=1, MAX_ROUNDS=1)
    assert (folders[1] / "rl-swarm/experiments/default").is_dir()


@pytest.mark.parametrize("role, name, value", [
    ("worker", "MODEL_NAME", "no/such model"), ("prepare", "MODEL_NAME", "no/such model"),
    ("auto", "NODE_ROLE", "auto"), ("validate", "NODE_ROLE", "validate"),
])  # fmt: skip
def test_F6_U1_a_process_that_cannot_start_leaves_the_folder_untouched(tmp_path, role, name, value):
    output = output_of(tmp_path / "drive", {"NODE_ROLE": role, name: value}, status=2)
    assert f"{name}='{value}'" in output
    assert not (tmp_path / "drive").exists()


def test_U1_a_missing_package_is_reported_in_one_sentence(tmp_path):
    # -S hides the environment's packages.
    python = write_python(tmp_path, f'exec {sys.executable} -S "$@"\n')
    for script in (ROOT / "sapo.py", ROOT / "run_swarm.sh"):
        command = [python, script] if script.suffix == ".py" else ["bash", script]
        environ = os.environ | {"PYTHON": str(python), "LOG_DIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
        text = done.stdout + done.stderr
        assert done.returncode != 0 and text.count("\n") == 1, text
        assert text.startswith("No module named ") and "README.md" in text


@pytest.mark.parametrize("name", ["/no/such/model", "runs/no/model", "model/"])
def test_U1_a_model_folder_that_does_not_exist_is_reported_as_such(tmp_path, name):
    output = output_of(tmp_path, status=2, MODEL_NAME=name)
    assert f"MODEL_NAME='{name}'" in output and "folder that exists" in output
    assert "loading" not in output and "download" not in output and "huggingface.co" not in output


def test_U1_a_disk_that_disappears_with_the_colab_session_is_pointed_out(tmp_path, monkeypatch):
    drive, isdir = "/content/drive/MyDrive", os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: str(path) == drive or isdir(path))
    colab = {"COLAB_RELEASE_TAG": "release-colab", "MODEL_NAME": "tiny"}
    for path, is_said in ((tmp_path, True), (f"{drive}/rl-swarm", False)):
        notes = sapo.read_config(colab | {"GDRIVE_PATH": str(path)}).notes
        assert any("will disappear" in note for note in notes) == is_said


def test_U2_the_same_command_without_a_name_adds_no_node_to_a_stopped_swarm(tmp_path, monkeypatch):
    settings = {"LOCAL_NODES": 1, "NODE_ID": None, "MAX_ROUNDS": 6, "NUM_TRANSPLANT_TREES": 0}
    with monkeypatch.context() as patch:
        at_call(patch, "finish_round", 2, lambda: os.kill(os.getpid(), SIGINT))
        output = output_of(tmp_path, settings, status=130, LOCAL_NODES=2, NODE_ID="anna")
    (command,) = re.findall(r"(?m)^  (.* )python sapo.py$", output)  # resumes the nodes
    before = contents(tmp_path)

    # The same command without a NODE_ID fails and lists the nodes that were stopped.
    output = output_of(tmp_path, settings, status=2)
    assert contents(tmp_path) == before, "a new node has joined"
    names = [path.name for path in folder_of(tmp_path).iterdir()]
    assert len(names) == 2 and all(f"{name} is stopped" in output for name in names)

    # A node with its own name may always join. While a node is alive, any node may join.
    for live, name in ((False, "ben"), (True, None)):
        copy = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}_{live}"))
        for path in folder_of(copy).glob("*/heartbeat.json") if live else ():
            beat = json.loads(path.read_bytes()) | {"time": time.time(), "state": "running"}
            path.write_text(json.dumps(beat))
        more = {"NODE_ID": name, "MAX_ROUNDS": 4, "FETCH_TIMEOUT_SECONDS": 0}
        assert "joining, round 1 of 4" in output_of(copy, settings, more)

    words = shlex.split(command)
    assert sapo.main(dict(word.split("=", 1) for word in words)) == 0
    assert all(rounds_of(tmp_path, name) == [*range(6)] for name in names)


def test_U2_a_second_ctrl_c_exits_at_once_in_the_middle_of_a_round(tmp_path, monkeypatch):
    def press_twice():
        for _ in range(2):
            os.kill(os.getpid(), SIGINT)
            time.sleep(0.6)  # one key press may arrive twice within half a second
        pytest.fail("the program did not exit")

    at_call(monkeypatch, "policy_gradient", 1, press_twice)
    output_of(tmp_path, status=130)
    assert not rewards_of(tmp_path), "it finished the round"
    assert heartbeat_of(tmp_path, "n_0") == "stopped", "its peers would wait for it"


def test_U2_a_signal_that_interrupts_a_print_counts_and_is_no_error(monkeypatch):
    class Screen(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            if not signals.requested:
                os.kill(os.getpid(), SIGINT)
            return len(data)

    signals = sapo.Signals()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Screen())))
            coordinator.say("a line")
    finally:
        signals.uninstall()
    assert signals.requested == 1


def test_U2_L6_ctrl_c_ends_a_warm_start_at_once_and_prepare_creates_it_for_all(
    tmp_path, monkeypatch
):
    steps = []

    warm_start = grpo.warm_start

    def press_in_step_three(*args):
        for step, loss in warm_start(*args):
            steps.append(step)
            if step == 3:
                os.kill(os.getpid(), SIGINT)
            yield step, loss

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "warm_start", press_in_step_three)
        output_of(tmp_path, WARM, status=130, NODE_ROLE="prepare")
    assert steps == [1, 2, 3] and contents(tmp_path) == {}
    assert MADE in output_of(tmp_path, WARM, NODE_ROLE="prepare")
    assert len(contents(tmp_path)) == 1, "prepare must not create an experiment"
    assert MADE not in output_of(tmp_path, WARM, MAX_ROUNDS=1)


# All processes succeed in the first run. A worker fails in the second, and prepare in the third.
# `cases` defines how each process behaves, and `words` must appear on the screen.
@pytest.mark.parametrize("cases, status, failed, num_workers, words", [
    ("prepare*) ;;", 0, [], 3, ""),
    ("*worker_1) echo no such luck; exit 7 ;; coord*) until_ctrl_c ;;", 1, [("worker_1", "7")], 3, "[coordinator] was stopped"),
    ("prepare*) echo no such model; exit 2 ;;", 1, [("prepare", "2")], 0, "[prepare] no such model"),
])  # fmt: skip
def test_U2_L6_run_swarm_reports_failed_processes_ends_all_and_divides_the_gpus(
    tmp_path, cases, status, failed, num_workers, words
):
    done = run_swarm(tmp_path, cases, NUM_WORKERS=3)
    assert done.status == status and words in done.screen, done.screen
    found = re.findall(r"(?m)^run_swarm: (\w+) ended with exit code (\d+) ", done.screen)
    assert found == failed
    workers = [start for start in done.starts if start.get("NODE_ROLE") == "worker"]
    gpus = {start["NODE_ID"]: start["DEVICE"] for start in workers}
    expected = {"worker_0": "cuda:0", "worker_1": "cuda:1", "worker_2": "cuda:0"}
    assert len(gpus) == num_workers and gpus.items() <= expected.items()


@pytest.mark.parametrize("link", ["heartbeat.json", "heartbeat.json.new", "../worker_0"])
def test_X2_run_swarm_follows_no_link_when_it_marks_a_worker_as_failed(tmp_path, monkeypatch, link):
    drive, private = tmp_path / "drive", tmp_path / "private"
    private.mkdir()
    secret = json.dumps({"time": 1.0, "session": "1000000000000-00000000", "state": "running"})
    (private / "heartbeat.json").write_text(secret)
    folder = folder_of(drive, "worker_0")
    (folder.parent if link == "../worker_0" else folder).mkdir(parents=True)
    target = private if link == "../worker_0" else private / "heartbeat.json"
    (folder / link).resolve().symlink_to(target)
    if link == "heartbeat.json.new":
        (folder / "heartbeat.json").write_text(secret)

    # Run the script's Python code.
    (program,) = re.findall("(?s)\nmark_failed='(.*?)'\n", (ROOT / "run_swarm.sh").read_text())
    monkeypatch.setattr(sys, "argv", ["-c", str(ROOT)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, value in (("GDRIVE_PATH", drive), ("NODE_ID", "worker_0"), ("DEVICE", "cpu")):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(StoreError) if link == "../worker_0" else contextlib.nullcontext():
        exec(program, {})
    assert contents(private) == {"heartbeat.json": secret.encode()}
    if link == "heartbeat.json":
        assert (folder / link).is_symlink(), "it has published a private file"
    elif link == "heartbeat.json.new":
        assert heartbeat_of(drive, "worker_0") == "failed"


def test_U2_U3_S2_L6_a_swarm_continues_without_a_killed_worker_and_ctrl_c_stops_it(tmp_path):
    drive = tmp_path / "drive"
    # A process that kept waiting for a dead worker would wait for hours.
    waits = {"COORDINATOR_ROUND_INTERVAL": 86400, "FETCH_TIMEOUT_SECONDS": 3600}
    more = {"NUM_WORKERS": 2, "MAX_ROUNDS": 10**5, "GDRIVE_PATH": drive}

    # Kill worker_1 when both workers have submitted a reward and the coordinator, which may be the
    # last to start, has logged a round. Press Ctrl-C when worker_0 has continued.
    def kill_and_press(group):
        log = tmp_path / "swarm/logs/coordinator.log"
        wait_until(lambda: log.exists() and " reward " in log.read_text(), 300)
        wait_until(lambda: all(rounds_of(drive, name) for name in ("worker_0", "worker_1")))
        for pid in processes_with(f"GDRIVE_PATH={drive}", "NODE_ID=worker_1"):
            os.kill(pid, SIGKILL)
        last = rounds_of(drive, "worker_1")[-1]
        wait_until(lambda: rounds_of(drive, "worker_0")[-1] > last + 5, 300)
        wait_until(lambda: heartbeat_of(drive, "worker_1") == "failed")
        os.killpg(group, SIGINT)

    settings = {**QUICK, **WARM, **waits, **more}
    done = run_command(tmp_path / "swarm", *RUN_SWARM, act=kill_and_press, **settings)
    assert done.status == 130
    assert "Traceback" not in "".join([done.screen, *done.logs.values()])

    # Ctrl-C lets worker_0 finish its round. The script reports the killed worker, and how to resume
    # it.
    last = rounds_of(drive, "worker_0")[-1]
    assert (heartbeat_of(drive, "worker_0"), checkpoint_of(drive, "worker_0")) == ("stopped", last)
    resume = r"to resume, run:\s.*\bNODE_ID=worker_0\b.* python sapo.py"
    assert re.search(resume, done.logs["worker_0"])
    found = re.findall(r"(?m)^run_swarm: (\w+) ended .*\b(\d+) ", done.screen)
    assert found == [("worker_1", "137")]
    (command,) = re.findall(r"(?m)^.*\bNODE_ID=worker_1 .*python sapo\.py$", done.screen)
    assert {f"GDRIVE_PATH={drive}", "EXPERIMENT_NAME=default"} <= {*command.split()}

    # Screen lines start with a process's name. Only the coordinator's rounds are shown.
    for name, text in re.findall(r"(?m)^\[(worker_0|coordinator)\] (.*)$", done.screen):
        assert {text, f"{name} {text}"} & {*done.logs[name].splitlines()}, "the name is repeated"
    line = r"(?m)^\[(?:coordinator|worker_0)\] .*\b(\d+)/\d+ reward \d"
    rounds = [int(t) for t in re.findall(line, done.screen)]
    assert rounds == [*range(rounds[0], rounds[-1] + 1)]

    # Only prepare created a warm start.
    assert [name for name, log in done.logs.items() if MADE in log] == ["prepare"]


# Texts that depend on the machine, the time or which process is faster.
MASKS = {
    r"(?m)^\S* ?(warm start \d+|wait: until|waiting for the first).*\n": "",
    r"(?m)^([0-7]/9 reward|written: ).*\n": "", r"joining, round \d": "joining, round N",
    r"(?m)^.*NODE_ID=anna.*\n": "", r"(?m)(nodes: |end: ).*$": r"\1TEXT",
    r"(a|joining another node's) new experiment": "NEW EXPERIMENT", r"\d+:\d\d ago": "MM:SS ago",
    r"(?s)worker_\d was asked:.*": "NODE was asked: QUESTION AND ANSWERS\n",
    r"(?s)\? .*?\(correct:.*?\)": "? QUESTION (correct: ANSWER)", r"  '.*'": "  'TEXT'",
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d": "DATE", r"\d+\.\d\d": "N.NN", r"\d+%": "N%",
    r" eta \d+:\d\d": "", r"\d of 4\+\d groups": "N of 4+N groups",
    "[▁-█]+": "CURVE", r"(?m)^! .*\n(  .*\n)*": "",  # rewards vary, and so may the verdict
}  # fmt: skip


def test_U2_U3_U5_U6_a_swarm_in_test_mode_prints_the_transcript(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    drive = tmp_path / "drive"
    settings = {"TEST_MODE": True, "NUM_WORKERS": 2, "GDRIVE_PATH": drive, "OMP_NUM_THREADS": 1}
    settings["MAX_ROUNDS"] = 9

    # The workers start when the coordinator waits for them. On a busy machine, the coordinator might
    # otherwise join after the last round.
    wait = 'until grep -qs "waiting for" "$LOG_DIR/coordinator.log"; do sleep 0.1; done'
    script = f'[[ $NODE_ROLE = worker ]] && {wait}\nexec {sys.executable} "$@"\n'
    settings["PYTHON"] = write_python(tmp_path, script)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = run_command(tmp_path / "swarm", *RUN_SWARM, seconds=600, **settings)
    assert done.status == 0, done.screen
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime < before + 120, "CPU time"
    for node in ("worker_0", "worker_1"):
        assert rounds_of(drive, node) == [*range(9)]

    # The lines of all processes are mixed on the screen, so compare one process after another.
    parts = dict.fromkeys(("run_swarm", "prepare", "coordinator", "worker_0"), "")
    for line in done.screen.splitlines():
        name, text = re.match(r"(?:\[(\w+)\] )?(.*)", line).groups()
        parts[name or "run_swarm"] += f"{text}\n"
    parts["worker_1.log"] = done.logs["worker_1"]
    parts["monitor"] = output_of(drive, UNSET, NODE_ROLE="monitor")
    for part in parts:
        for pattern in MASKS:  # a pattern may cover several lines, but only one process
            parts[part] = re.sub(pattern, MASKS[pattern], parts[part])
    text = "".join(f"==== {part}\n{text}\n" for part, text in parts.items())
    compare_transcript("transcript.txt", text, {str(tmp_path): "FOLDER"})


# -------- U3, U4, U5: output, logs, monitor and report --------------------------------------------


def test_U3_the_rounds_lines_and_the_end_give_mean_rewards_and_repeat_the_first_answers(finished):
    rows = rewards_of(finished.drive)
    for t in range(12):
        rewards = [row["reward"] for row in rows if row["round"] == t]
        (line,) = re.findall(rf"(?m)^2 nodes {t:02d}/12\b.*$", finished.output)
        shown = float(re.search(r"reward (\d\.\d\d)", line)[1])
        assert len(rewards) == 4 and abs(shown - sum(rewards) / 4) < 0.006
    total = sum(row["reward"] for row in rows) / 2
    assert f"cumulative reward {total:.2f} per node" in finished.output
    assert (finished.drive / "reports/default.png").read_bytes()[:4] == b"\x89PNG"
    answers = re.findall(r"(?m)^ +(\d\.\d\d  '.*)$", finished.output)
    assert len(answers) == 6
    assert re.findall(r"(?m)^ +before +(\d\.\d\d  '.*)$", finished.output) == answers


def test_U4_each_node_has_its_metrics_and_system_each_process_its_events_and_output(finished):
    # The process logs its events and everything that it printed.
    events = read_log(finished.drive, "n_0", "training_events")
    assert all({"timestamp", "event", "node_id", "text"} <= row.keys() for row in events)
    written = (folder_of(finished.drive, "n_0") / "logs/stdout.log").read_text().splitlines()
    assert {*finished.output.splitlines()} <= {*written}

    # Each node logs the metrics of every stage, as in its reward files, and has a system_info.json.
    for node in ("n_0", "n_1"):
        rows = read_log(finished.drive, node)
        assert len(rows) == 24 and rows[-1]["teachers"] is not None
        for row, reward in zip(rows, rewards_of(finished.drive, node), strict=True):
            assert reward.items() <= row.items()
        assert rows[-1]["total_reward"] == pytest.approx(sum(row["my_reward"] for row in rows))
        system = json.loads((folder_of(finished.drive, node) / "logs/system_info.json").read_text())
        assert {"torch": torch.__version__, "device": "cpu"}.items() <= system.items()


@pytest.mark.parametrize("text, variable, rewards, metrics", [
    ("learned: mean reward 0.10 -> 0.20", "", [0.1] * 20 + [0.2] * 20, {"informative_groups": 1}),
    ("no clear change: mean reward 0.10 -> 0.10", "", [0.1] * 40, {"informative_groups": 1}),
    ("nothing was learned", "TASKS", [1] * 40, {}),
    ("nothing was learned", "MAX_NEW_TOKENS", [0] * 40, {"truncated_rate": 0.9}),
    ("nothing was learned", "WARM_START_STEPS", [0] * 40, {"answer_tag_rate": 0.01}),
    ("nothing was learned", "MODEL_NAME", [0] * 40, {"answer_tag_rate": 0.9}),
    ("nothing was learned", "LEARNING_RATE", [0.03] + [0] * 39, "truncated"),
    ("nothing was learned", "LEARNING_RATE", [0.03] + [0] * 39, "untagged"),
])  # fmt: skip
def test_U3_the_diagnosis_reports_what_was_learned_or_which_setting_may_help(
    text, variable, rewards, metrics
):
    """If the first update ruins the answers, the advice is not to raise MAX_NEW_TOKENS."""
    rows = [{"node_id": "n", "round": t, "reward": reward} for t, reward in enumerate(rewards)]
    for row in rows:
        is_ruined = row["round"] > 0
        if metrics == "truncated":
            row |= {"truncated_rate": is_ruined, "informative_groups": not is_ruined}
        elif metrics == "untagged":
            row |= {"answer_tag_rate": not is_ruined, "informative_groups": not is_ruined}
        else:
            row |= metrics
    diagnosis = coordinator.diagnose(rows)
    assert diagnosis.startswith(text) and variable in diagnosis


def test_U3_a_flat_curve_is_explained_and_a_terminal_has_a_progress_bar(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(tmp_path, MAX_ROUNDS=10, NUM_TRANSPLANT_TREES=0) == 0
    (text,) = events_of(tmp_path, "n_0", "no signal")
    screen, errors = capsys.readouterr()
    assert text in screen and "10/10" in errors
    assert sapo.TABLE.keys() & {*re.findall(r"\w+", text)}, "it suggests no setting"


def test_L4_U5_a_swarm_teaches_a_node_that_generates_nothing(finished, tmp_path, monkeypatch):
    # Run the manual's commands, after a short run and with fewer rounds.
    drive = shutil.copytree(finished.drive, tmp_path / "rl-swarm")
    (drive / "experiments/default").rename(drive / "experiments/one")
    prepare, command = printed("teach").strip().splitlines()
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-euc", prepare], check=True)
    settings = dict(word.split("=") for word in shlex.split(command) if "=" in word)
    settings |= {"MAX_ROUNDS": 11, "EVAL_INTERVAL": 1, "EVAL_SAMPLES": 8}
    output = output_of(None, UNSET, settings, DEVICE="cpu")
    assert re.search(r"pupil 05/11 .*held-out 0\.\d\d", output)

    # The pupil was trained although it generated no answers. The monitor and the report can handle
    # such an experiment.
    rows = rewards_of(drive, "pupil", "school")
    assert {(row["reward"], row["completions"]) for row in rows} == {(None, 0)}
    assert any(row["external_groups"] > 0 and row["grad_norm"] > 0 for row in rows)
    for role in ("monitor", "report"):
        output_of(drive, UNSET, EXPERIMENT_NAME="school", NODE_ROLE=role)
    exec(recipe("teachers").replace("default", "school"), {})
    assert Path("teachers.png").read_bytes()[:4] == b"\x89PNG"


# -------- U6, U7, U8, U11: experiments, models, changes -------------------------------------------


def test_U7_run_swarm_runs_configs_and_seeds_one_after_another_and_then_the_report(tmp_path):
    settings = {"LOCAL_NODES": 2, "CONFIGS": "8/0 4/4u 8/0x2", "SEEDS": "1 2"}
    *starts, last = run_swarm(tmp_path, "x) ;;", **settings).starts
    assert (last["NODE_ROLE"], last["EXPERIMENT_NAME"]) == ("report", "compare_*")
    names = ["EXPERIMENT_NAME", "NODE_ROLE", "NUM_TRAIN_SAMPLES", "NUM_TRANSPLANT_TREES"]
    names += ["EXTERNAL_FILTER", "LOCAL_OVERSAMPLE", "SEED"]
    expected = []
    for seed in (1, 2):
        for arm, values in (
            ("8-0", "8 0 True 1"),
            ("4-4u", "4 4 False 1"),
            ("8-0x2", "8 0 True 2"),
        ):
            for role in ("prepare", "worker"):
                expected.append(f"compare_{arm}_seed{seed} {role} {values} {seed}")
    assert [" ".join(start[name] for name in names) for start in starts] == expected


def test_U7_held_out_accuracy_disturbs_nothing_and_oversampling_is_fair(finished, tmp_path):
    # Apart from the held-out accuracy, a run with evaluation equals a run without it.
    shutil.copytree(finished.drive / "warmstart", tmp_path / "warmstart")
    output_of(tmp_path, TWELVE_ROUNDS)
    evaluated = rewards_of(finished.drive)
    held_out = {row["round"]: row.pop("held_out") for row in evaluated if "held_out" in row}
    assert held_out.keys() == {3, 7, 11} and all(0 <= share <= 1 for share in held_out.values())
    assert evaluated == rewards_of(tmp_path)

    # With LOCAL_OVERSAMPLE=3, three times as many groups are generated, and informative groups are
    # used first.
    baseline = {"LOCAL_OVERSAMPLE": 3, "NUM_TRANSPLANT_TREES": 0, "EXPERIMENT_NAME": "baseline"}
    output_of(tmp_path, LEARNING, baseline)
    rows = rewards_of(tmp_path, name="baseline")
    for row in rows:
        assert (row["completions"], row["local_groups"]) == (3 * 2 * 4, 2)
        assert row["informative_groups"] == min(2, row["informative_local"])
    assert any(row["informative_local"] for row in rows)


def test_U8_a_final_model_has_the_same_logits(finished):
    for node_id, model in finished.models.items():
        folder = folder_of(finished.drive, node_id) / "model"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("Solve the following", return_tensors="pt").input_ids
        with torch.no_grad():
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_U3_try_py_asks_the_better_known_sample_question_and_prints_its_answer(finished):
    # The last lines about samples show both questions, each with answers from before and now.
    command = re.findall(r"(?m)try it: python (.*)$", finished.output)[-1]
    done = subprocess.run([sys.executable, command], capture_output=True, text=True, check=True)
    asked = re.match(r"(.* \(correct: .*?\))\n", done.stdout)[1]
    rewards = {}
    for text in re.split(r"(?m)^\? ", finished.output)[-2:]:
        question = re.match(r".* \(correct: .*?\)", " ".join(text.split()))[0]
        rewards[question] = sum(map(float, re.findall(r"(?m)^  now +([\d.]+)  ", text)))
    assert len(rewards) == 2 and rewards[asked] == max(rewards.values())
    assert "python try.py" in (Path(command).parent / "README.md").read_text()


@pytest.mark.parametrize(
    "chat", ["", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}A: "]
)
def test_U8_try_py_uses_the_prompt_of_training(tmp_path, monkeypatch, capsys, chat):
    config = sapo.read_config({"MODEL_NAME": "tiny", "NUM_SHOTS": "2", "TASKS": "small_gcd"})
    model, codec = grpo.load_model(config, config.tasks)
    codec.tokenizer.chat_template = chat or None
    codec.num_shots = 0 if chat else 2
    question = grpo.make_question("small_gcd", 5)
    grpo.save_model(model, codec, "", tmp_path)
    script = grpo.try_script(codec, question, config).replace("output = model.generate", "print(")
    (tmp_path / "try.py").write_text(
        script[: script.index("print(")] + "print(inputs.input_ids.tolist())"
    )
    monkeypatch.setattr(sys, "argv", ["try.py"])
    runpy.run_path(f"{tmp_path}/try.py")
    assert json.loads(capsys.readouterr().out) == [codec.encode_prompt(question)]
    monkeypatch.setattr(sys, "argv", ["try.py", "1 + 1?"])
    runpy.run_path(f"{tmp_path}/try.py")
    assert "1 + 1?" in codec.tokenizer.decode(json.loads(capsys.readouterr().out)[0])


def test_F3_a_node_resumes_with_a_model_folder_that_was_moved(tmp_path, capsys):
    folder = tmp_path / "model"
    for part in grpo.build_tiny_model(["small_products"]):
        part.save_pretrained(folder)
    settings = {"MAX_NEW_TOKENS": 8, "NUM_SHOTS": 0, "WARM_START_STEPS": 4, "LEARNING_RATE": 0.01}
    assert run(tmp_path / "drive", settings, MODEL_NAME=folder, MAX_ROUNDS=2) == 0

    # It inherits the model's settings, because the experiment uses the same model, and loads the
    # same warm start.
    (tmp_path / "elsewhere").mkdir()
    folder = folder.rename(tmp_path / "elsewhere/model")
    capsys.readouterr()
    assert (
        run(tmp_path / "drive", MODEL_NAME=f"{folder}/", MAX_ROUNDS=3, WARM_START_STEPS=None) == 0
    )
    output = capsys.readouterr().out
    assert "resume: from the checkpoint after round 1\n" in output
    assert re.search("inherited from the experiment: .*LEARNING_RATE=0.01", output)
    assert MADE not in output and rounds_of(tmp_path / "drive", "n_0") == [0, 1, 2]


def test_U8_a_model_that_contradicts_itself_is_written_and_pushed_whatever_fails(
    tmp_path, monkeypatch
):
    # The sampling settings contradict do_sample, as in many instruct models.
    folder = tmp_path / "model"
    for part in grpo.build_tiny_model(["small_products"]):
        part.save_pretrained(folder)
    generation = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}'
    (folder / "generation_config.json").write_text(generation)
    settings = {"MODEL_NAME": folder, "MAX_NEW_TOKENS": 8, "NUM_SHOTS": 0, "MAX_ROUNDS": 5}
    drive, secret = tmp_path / "drive", "hf_NobodyMayEverSeeThisToken"

    # Pushing the first model fails.
    class Hub(huggingface_hub.HfApi):
        def create_repo(self, repo, *, private, **_):
            assert self.token == secret and private
            if repo == "default-n_0":
                raise ConnectionError(f"401 for {secret}")
            return SimpleNamespace(repo_id=f"me/{repo}")

        def upload_folder(self, *, repo_id, folder_path):
            shutil.copytree(folder_path, tmp_path / repo_id)  # raises an error the second time

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    output = output_of(drive, settings, HUGGINGFACE_ACCESS_TOKEN=secret)
    failed, pushed = events_of(drive, "n_0", "hub")
    assert "push failed" in failed and failed in output and pushed in output
    assert f"hf upload --private default-n_0 {folder_of(drive, 'n_0')}/model" in failed

    # The push does not change any other file.
    output_of(tmp_path / "without_token", settings)
    assert len(rewards_of(drive)) == 10 and results(drive) == results(tmp_path / "without_token")
    for node in ("n_0", "n_1"):
        model = contents(folder_of(drive, node) / "model")
        assert model == contents(folder_of(tmp_path / "without_token", node) / "model")
    assert model == contents(tmp_path / "me/default-n_1")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= model.keys()
    loaded = AutoModelForCausalLM.from_pretrained(folder_of(drive, "n_1") / "model")
    loaded.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=True)


SEVERAL = """
assert group_advantages([1, 0, 0, 1]) == [0.5, -0.5, -0.5, 0.5]
assert 0.5 < compute_reward(question, f"It is {answer}") < compute_reward(question, answer)
assert make_question("double", 3).answer.isdigit() and "legs" in TASK_TABLE"""
PARTS = (
    "assert [compute_reward(question, text) for text in (answer, '<answer>x</answer>')] == [1, .2]"
)


@pytest.mark.parametrize("recipes, changed", [
    ("advantage kl task own_task length lora truncated", SEVERAL), ("parts", PARTS),
])  # fmt: skip
def test_U11_the_tested_diffs_do_what_they_announce(tmp_path, monkeypatch, recipes, changed):
    for module in MODULES:
        shutil.copy(ROOT / f"{module}.py", tmp_path)
        monkeypatch.delitem(sys.modules, module)  # the copy is imported below
    (tmp_path / "peft.py").touch()
    for name in recipes.split():
        diff = recipe(name).encode()
        subprocess.run(["patch", "-F0", "-p0"], input=diff, cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    code = 'import sapo\nfrom grpo import *\nquestion = make_question("small_gcd", 1)\n'
    code += 'answer = f"<answer>{question.answer}</answer>"\n'
    copy = {}
    exec(code + changed, copy)
    assert Path(copy["sapo"].__file__).parent == tmp_path


# -------- U9: notebooks ---------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path):
    """Provide a notebook kernel with the functions `run_cell` and `interrupt` (the stop button).

    run_cell(code, status) runs a cell, which must end with this status, and returns its output.
    """
    manager, client = start_new_kernel(cwd=str(tmp_path))

    def run_cell(code, status="ok") -> str:
        outputs = []
        reply = client.execute_interactive(code, output_hook=outputs.append, timeout=200)
        text = "\n".join(json.dumps(message["content"], default=str) for message in outputs)
        assert reply["content"]["status"] == status, text
        assert status == "error" or "Traceback" not in text, text
        return text

    yield SimpleNamespace(run_cell=run_cell, interrupt=manager.interrupt_kernel)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_U9_the_pasted_modules_and_the_printed_cells_run_and_the_stop_button_is_ctrl_c(
    tmp_path, kernel
):
    cells = re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", PRINTED, re.DOTALL)
    names = [name for name, _ in cells]
    assert names == "swarm mount swarm coordinator worker monitor look compare hour".split()

    # Set the variables for a short run, and imitate Colab's module. run_swarm.sh uses the stand-in.
    settings = {"GDRIVE_PATH": tmp_path, "COORDINATOR_ROUND_INTERVAL": 1, "WARM_START_STEPS": 20}
    settings |= {"LOG_DIR": tmp_path / "logs", **stand_in(tmp_path, "")}
    kernel.run_cell(f"import os\nos.environ.update({to_environ(settings)!r})")
    colab = "import sys; from types import SimpleNamespace as S; drive = S(mount=print)"
    kernel.run_cell(f"{colab}\nsys.modules |= {{'google': S(), 'google.colab': S(drive=drive)}}")

    # Run the four modules in one cell. The stop button lets the round finish and saves a
    # checkpoint, and the same cell then resumes the run. With a SEED that differs from the
    # experiment's, the cell raises an error, so that "Run all" stops there.
    def press_stop():
        wait_until(lambda: len(rounds_of(tmp_path, "n", name="pasted")) >= 2)
        kernel.interrupt()

    program = "\n".join((ROOT / f"{name}.py").read_text() for name in MODULES)
    more = {**QUICK, "EXPERIMENT_NAME": "pasted", "MAX_ROUNDS": 10**5, "NUM_TRANSPLANT_TREES": 0}
    kernel.run_cell(f"os.environ.update({to_environ(more)!r})")
    threading.Thread(target=press_stop).start()
    kernel.run_cell(program)
    last = rounds_of(tmp_path, "n", name="pasted")[-1]
    assert heartbeat_of(tmp_path, "n", "pasted") == "stopped"
    assert checkpoint_of(tmp_path, "n", "pasted") == last
    kernel.run_cell(f"os.environ['MAX_ROUNDS'] = '{last + 3}'\n{program}")
    assert rounds_of(tmp_path, "n", name="pasted") == [*range(last + 3)]
    error = kernel.run_cell(f"os.environ['SEED'] = '7'\n{program}", "error")
    assert "the run ended with exit code 2" in error
    kernel.run_cell(f"for name in {[*more, 'SEED']}: os.environ.pop(name)")
    kernel.run_cell(f"os.environ.update({to_environ(settings)!r})")

    # Run the cells of README and MANUAL. The coordinator's cell comes after the worker's, when the
    # experiment is already finished.
    cells[3:5] = cells[4:2:-1]
    outputs = ""
    for name, cell in cells:
        cell = re.sub("%pip.*", "", cell).replace("/content/drive/MyDrive/sapo", str(ROOT))
        cell = re.sub(r'(MAX_ROUNDS="?)\d+', rf"\g<1>{3 if name == 'swarm' else 5}", cell)
        cell = cell.replace("gpt2", "tiny").replace("3/1 2/2 1/3", "")
        cell = cell.replace("Gensyn/Qwen2.5-0.5B-Instruct", "tiny")
        outputs += kernel.run_cell(cell)
    kernel.run_cell("assert _exit_code == 0, 'run_swarm.sh has failed'")
    assert rounds_of(tmp_path, "anna", name="hour") == [*range(5)]
    assert "already finished" in outputs and outputs.count("image/png") >= 2
    roles = [start["NODE_ROLE"] for start in starts_in(tmp_path) if "NODE_ROLE" in start]
    assert sorted(roles) == ["coordinator", "prepare", "report", *["worker"] * 4]


def test_U9_a_second_copy_in_one_kernel_is_an_error(tmp_path, monkeypatch):
    for module in MODULES:
        shutil.copy(ROOT / f"{module}.py", tmp_path)
    monkeypatch.setattr(sys, "argv", ["sapo.py"])
    monkeypatch.setenv("MAX_ROUNDS", "invalid")  # without the error below, the process ends
    with pytest.raises(RuntimeError, match="restart the kernel to run another copy"):
        runpy.run_path(f"{tmp_path}/sapo.py", run_name="__main__")


# -------- U10: bugs in the program's own code -----------------------------------------------------


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


BUGS = [  # the function that fails, and the exception
    (sapo, "submit_reward", FileNotFoundError(errno.ENOENT, "No such file", "my_notes.txt")),
    (sapo, "submit_reward", BrokenPipeError("mine")), (sapo, "submit_reward", MemoryError()),
    (sapo, "submit_reward", Unprintable()), (sapo, "submit_reward", SystemExit(7)),
    (grpo, "update_policy", OSError(errno.EIO, "mine")),
    (sapo, "save_checkpoint", OSError(errno.ENOSPC, "mine")),
    (sapo.Log, "event", OSError(errno.EIO, "mine")),
]  # fmt: skip


def test_U10_a_bug_shows_its_traceback_and_the_next_process_resumes(tmp_path, monkeypatch):
    settings = {"MAX_ROUNDS": len(BUGS), "CHECKPOINT_INTERVAL": 1}
    listdir = os.listdir
    for number, (place, step, error) in enumerate(BUGS):
        # The edited function fails in the round `number`. The store calls `Log.event` in an outage,
        # so an outage is simulated for it.
        original = getattr(place, step)
        outages = [OSError(errno.EIO, "broken")] if step == "event" else []

        def is_due(number=number):
            return len(rounds_of(tmp_path, "n_1")) >= number

        def my_own_line(error=error):
            raise error.with_traceback(None)

        def edited(*args, original=original, is_due=is_due, fail=my_own_line, **more):
            if is_due() and "error" not in args:
                fail()
            return original(*args, **more)

        def failing_listdir(path=".", outages=outages, is_due=is_due):
            if outages and str(path).endswith("board") and is_due():
                raise outages.pop()
            return listdir(path)

        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as screen:
            patch.setattr(place, step, edited)
            patch.setattr(os, "listdir", failing_listdir)
            with contextlib.suppress(SystemExit):  # may end the interpreter
                assert run(tmp_path, settings) == 1
        log = (folder_of(tmp_path, "n_0") / "logs/stdout.log").read_text()
        for text in [log, screen.getvalue()] if isinstance(error, Exception) else [log]:
            text = text[text.rindex("Traceback (most recent call last)") :]
            assert text.count("in my_own_line") == 1 and type(error).__name__ in text
        assert read_log(tmp_path, "n_0", "training_events")[-1]["event"] == "error"
        assert {heartbeat_of(tmp_path, node) for node in ("n_0", "n_1")} == {"failed"}

    # With the last bug fixed, the next process finishes the run.
    output_of(tmp_path, settings)
    assert rounds_of(tmp_path, "n_1") == [*range(len(BUGS))]


def test_U10_a_plot_that_cannot_be_drawn_does_not_end_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "plot", Mock(side_effect=OSError("No space left on device")))
    output = output_of(tmp_path, MAX_ROUNDS=1)
    assert "no plot (" in output and "OSError" in output
    assert heartbeat_of(tmp_path, "n_0") == "done"
