"""Tests of the guarantees to users (U1 to U11), the warm start (L6) and startup (F6).

run_swarm.sh is tested with a stand-in for python, which records how it is called.
"""

import contextlib
import errno
import io
import json
import os
import re
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
from common import LEARNING, QUICK, ROOT, checkpoint_of, events_of, folder_of, heartbeat_of
from common import processes_with, read_log, results, rewards_of, rounds_of, run, run_command
from common import to_environ, wait_until
from drive_store import DriveStore, StoreError
from test_sapo import at_call, contents, put

signal(SIGINT, default_int_handler)  # background jobs of a script ignore it by default
UNSET = dict.fromkeys([*QUICK, "LOCAL_NODES"])  # removes these settings from a run
TWELVE_ROUNDS = LEARNING | {"MAX_ROUNDS": 12, "MAX_STAGES": 2}
WARM = {"WARM_START_STEPS": 20}
MADE = "creating the warm start"
PRINTED = (ROOT / "README.md").read_text() + (ROOT / ".github/MANUAL.md").read_text()


def test_U3_the_warm_start_logs_a_line_at_least_every_30_seconds(monkeypatch):
    # The first step takes 90 s, and each other step takes 0.5 s.
    clock, lines = [0.0], []
    seconds = [90.0] + [0.5] * 999

    def slow_warm_start(*_):
        for step, duration in enumerate(seconds, start=1):
            clock[0] += duration
            yield step, torch.tensor(2.5)

    monkeypatch.setattr(grpo, "warm_start", slow_warm_start)
    monkeypatch.setattr(grpo, "warm_start_recipe", lambda *_: {})
    monkeypatch.setattr(sapo, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    log = sapo.Log("")
    log.info = lambda text: lines.append((clock[0], text))
    config = SimpleNamespace(WARM_START_STEPS=1000, MODEL_NAME="tiny", tasks=["small_gcd"])
    store = SimpleNamespace(list_names=lambda _: [], has_dir=lambda _: False)
    signals = SimpleNamespace(requested=0)
    run_ = SimpleNamespace(config=config, log=log, store=store, signals=signals, codec=None)
    sapo.apply_warm_start(run_, None)

    times = [now for now, text in lines if "left" in text]
    assert 90 < times[0] < 92 and times[-1] > clock[0] - 31
    assert max(after - before for before, after in zip(times, times[1:], strict=False)) <= 30.5
    for now, text in lines[1:]:
        minutes, rest = re.search(r"loss 2.500, (\d+):(\d+) left", text).groups()
        assert int(minutes) * 60 + int(rest) == pytest.approx(sum(seconds) - now, abs=1)


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
    """Run two nodes, with two stages per round and no network. Return folder, output and Run."""
    drive = tmp_path_factory.mktemp("finished")
    train = Mock(wraps=sapo.train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", None)
        patch.setattr(sapo, "train", train)
        output = output_of(drive, TWELVE_ROUNDS, EVAL_INTERVAL=4, EVAL_SAMPLES=8)
    return SimpleNamespace(drive=drive, output=output, run=train.call_args.args[0])


# -------- Shell commands --------------------------------------------------------------------------

RUN_SWARM = ("bash", ROOT / "run_swarm.sh")

# A stand-in for python. If run_swarm.sh asks for cores and GPUs, it reports two of each. Otherwise,
# it records its environment and arguments, and does what CASES specifies for this process.
STAND_IN = """#!/bin/bash
if [[ $2 = *device_count* ]]; then echo 2 2; exit; fi
if [[ $2 = *cpu_count* ]]; then echo 2; exit; fi
if [[ $2 = *heartbeat* ]]; then exec PYTHON "$@"; fi
ARGUMENTS="$*" env -0 > "$STARTS/$EPOCHREALTIME"
until_ctrl_c() { trap 'echo "$NODE_ROLE was stopped"; exit 130' INT; while :; do sleep 0.1; done; }
case "$NODE_ROLE $NODE_ID" in CASES esac
"""


def stand_in(folder: Path, cases: str) -> dict:
    """Create a stand-in for python. Return the variables that make a command use it."""
    (folder / "starts").mkdir()
    (folder / "python").write_text(
        STAND_IN.replace("CASES", cases).replace("PYTHON", sys.executable)
    )
    (folder / "python").chmod(0o755)
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
def test_F6_U1_a_start_that_is_refused_says_why_and_touches_nothing(tmp_path, role, name, value):
    output = output_of(tmp_path / "drive", {"NODE_ROLE": role, name: value}, status=2)
    assert f"{name}='{value}'" in output
    assert not (tmp_path / "drive").exists()


def test_U1_a_missing_package_is_one_sentence(tmp_path):
    # -S hides the environment's packages.
    for script in (ROOT / "sapo.py", ROOT / "run_swarm.sh"):
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        command = [python, script] if script.suffix == ".py" else ["bash", script]
        environ = os.environ | {"PYTHON": str(python), "LOG_DIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
        text = done.stdout + done.stderr
        assert done.returncode != 0 and text.count("\n") == 1, text
        assert text.startswith("No module named ") and "README.md" in text


@pytest.mark.parametrize("name", ["/no/such/model", "./no_such_model", "runs/no/model", "model/"])
def test_U1_a_model_folder_that_does_not_exist_is_reported_as_such(tmp_path, name):
    output = output_of(tmp_path, status=2, MODEL_NAME=name)
    assert f"MODEL_NAME='{name}'" in output and "folder that exists" in output
    assert "loading" not in output and "download" not in output and "huggingface.co" not in output


def test_U1_a_disk_that_disappears_with_the_colab_session_is_pointed_out(tmp_path):
    colab = {"COLAB_RELEASE_TAG": "release-colab", "MODEL_NAME": "tiny"}
    for path, is_said in ((tmp_path, True), ("/content/drive/MyDrive/rl-swarm", False)):
        with contextlib.suppress(sapo.ConfigError):  # there is no such folder here
            notes = sapo.read_config(colab | {"GDRIVE_PATH": str(path)}).notes
            assert any("will disappear" in note for note in notes) == is_said
    assert "will disappear" in output_of(tmp_path, colab, MAX_ROUNDS=1)
    assert "will disappear" not in output_of(tmp_path, MAX_ROUNDS=1)


def test_U3_the_free_space_and_the_space_for_checkpoints_are_logged_before_training(tmp_path):
    output = output_of(tmp_path, MAX_ROUNDS=1, LOCAL_NODES=8, CHECKPOINT_KEEP=3)
    (line,) = re.findall(r"(?m)^free space: .*", output)
    free, checkpoint, needed = map(float, re.findall(r"([\d.]+) GB", line))
    size = max(path.stat().st_size for path in folder_of(tmp_path).rglob("*.safetensors")) / 1e9
    assert checkpoint == pytest.approx(size, abs=0.007)
    assert needed == pytest.approx(4 * size, abs=0.01)
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / 1e9, rel=0.5)
    assert output.index("free space: ") < output.index("n_0 start: ")


def test_U3_the_progress_bar_does_not_count_rounds_that_this_process_missed(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    log = sapo.Log("")
    log.show_bar(2000, 0)
    config = SimpleNamespace(MAX_ROUNDS=2000)
    run = SimpleNamespace(log=log, config=config, nodes=[], is_first_round=True)
    sapo.log_skipped(run, 0, 400)
    time.sleep(0.2)
    log.bar.update(401 - log.bar.n)
    assert log.bar.n == 401 and log.bar.format_dict["rate"] < 5.1, "one round took 0.2 s"
    log.bar.close()


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_U2_the_same_command_without_a_name_trains_no_new_node_in_a_stopped_swarm(
    tmp_path, monkeypatch, num_nodes
):
    settings = {"LOCAL_NODES": 1, "NODE_ID": None, "MAX_ROUNDS": 6, "NUM_TRANSPLANT_TREES": 0}
    stop = {"LOCAL_NODES": num_nodes} | ({"NODE_ID": "anna"} if num_nodes > 1 else {})
    with monkeypatch.context() as patch:
        at_call(patch, "finish_round", 2, lambda: os.kill(os.getpid(), SIGINT))
        output_of(tmp_path, settings, stop, status=130)
    before = contents(tmp_path)

    # The same command fails and prints the command that resumes the node.
    output = output_of(tmp_path, settings, status=2)
    assert contents(tmp_path) == before, "a new node has joined"
    names = [path.name for path in folder_of(tmp_path).iterdir()]
    assert len(names) == num_nodes and all(name in output for name in names)
    (command,) = re.findall(r"(?m)^  (.* )python sapo.py$", output)

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


def test_U2_L6_ctrl_c_ends_a_warm_start_at_once_and_prepare_makes_it_for_all(tmp_path, monkeypatch):
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
def test_U2_L6_run_swarm_names_what_failed_ends_all_and_shares_out_the_gpus(
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


def test_U4_run_swarm_keeps_the_output_of_earlier_launches_in_its_log_folder(tmp_path):
    program = stand_in(tmp_path, "*) echo launch $LAUNCH, $EXPERIMENT_NAME ;;")
    for launch in (1, 2):
        more = {"LAUNCH": launch, "NUM_WORKERS": 1, "CONFIGS": "1/0 2/0", "SEEDS": 1}
        done = run_command(tmp_path, *RUN_SWARM, **program, **more)
        assert done.status == 0, done.screen
    names = [f"{launch}, compare_{arm}-0_seed1" for launch in (1, 2) for arm in (1, 2)]
    for name in ("prepare", "coordinator", "worker_0"):
        assert re.findall(r"(?m)^launch (.*)$", done.logs[name]) == names


@pytest.mark.parametrize("link", ["", "heartbeat.json", "heartbeat.json.new", "../worker_0"])
def test_U2_X2_a_killed_worker_is_marked_as_failed_and_no_link_is_followed(tmp_path, link):
    private = tmp_path / "private"
    private.mkdir()
    secret = json.dumps({"time": 1.0, "session": "1000000000000-00000000", "state": "running"})
    (private / "heartbeat.json").write_text(secret)
    folder = tmp_path / "drive/experiments/default/nodes/worker_0"
    folder.mkdir(parents=True)
    if link != "heartbeat.json":
        (folder / "heartbeat.json").write_text(secret)
    if link == "../worker_0":
        shutil.rmtree(folder)
        folder.symlink_to(private)
    elif link:
        (folder / link).symlink_to(private / "heartbeat.json")

    cases = "*worker_0) kill -9 $$ ;; coord*) until_ctrl_c ;;"
    drive = tmp_path / "drive" if link else "~/drive"
    paths = {"HOME": tmp_path, "GDRIVE_PATH": drive}
    done = run_swarm(tmp_path, cases, NUM_WORKERS=1, DEVICE="cpu", **paths)
    assert done.status == 1 and "worker_0 ended with exit code 137" in done.screen
    assert contents(private) == {"heartbeat.json": secret.encode()}
    if link == "heartbeat.json":
        assert (folder / link).is_symlink(), "it has published a private file"
    elif link != "../worker_0":
        assert heartbeat_of(tmp_path / "drive", "worker_0") == "failed"


def test_U2_U3_S2_L6_a_swarm_stops_in_order_and_goes_on_without_a_worker_that_was_killed(tmp_path):
    drive = tmp_path / "drive"
    workers = ("worker_0", "worker_1")
    # A process that kept waiting for a dead worker after STALE_AFTER_SECONDS would wait for hours.
    waits = {"COORDINATOR_ROUND_INTERVAL": 86400, "FETCH_TIMEOUT_SECONDS": 3600}
    waits["STALE_AFTER_SECONDS"] = 20
    more = {"NUM_WORKERS": 2, "MAX_ROUNDS": 10**5, "GDRIVE_PATH": drive}
    settings = {**QUICK, **WARM, **waits, **more}

    # Press Ctrl-C when both workers have submitted a reward and the coordinator, which may be the
    # last to start, has logged a round.
    def press_after_rewards(group):
        log = tmp_path / "1/logs/coordinator.log"
        wait_until(lambda: log.exists() and " reward " in log.read_text(), 300)
        wait_until(lambda: all(rounds_of(drive, name) for name in workers))
        os.killpg(group, SIGINT)

    stopped = run_command(tmp_path / "1", *RUN_SWARM, act=press_after_rewards, **settings)
    assert stopped.status == 130
    assert "Traceback" not in "".join([stopped.screen, *stopped.logs.values()])
    for name in workers:
        last = rounds_of(drive, name)[-1]
        assert (heartbeat_of(drive, name), checkpoint_of(drive, name)) == ("stopped", last)
        assert re.search(
            rf"to resume, run:\s.*\bNODE_ID={name}\b.* python sapo.py", stopped.logs[name]
        )

    # In the second run, worker_1 is killed. The script reports this and how to resume it.
    def kill_worker_1(group):
        wait_until(lambda: rounds_of(drive, "worker_1")[-1] > last + 3, 300)
        for pid in processes_with(f"GDRIVE_PATH={drive}", "NODE_ID=worker_1"):
            os.kill(pid, SIGKILL)

    settings["MAX_ROUNDS"] = last + 40
    killed = run_command(tmp_path / "2", *RUN_SWARM, act=kill_worker_1, seconds=300, **settings)
    assert killed.status == 1
    assert rounds_of(drive, "worker_0")[-1] == last + 39
    assert rounds_of(drive, "worker_1")[-1] < last + 35
    found = re.findall(r"(?m)^run_swarm: (\w+) ended .*\b(\d+) ", killed.screen)
    assert found == [("worker_1", "137")]
    (command,) = re.findall(r"(?m)^.*\bNODE_ID=worker_1 .*python sapo\.py$", killed.screen)
    assert {f"GDRIVE_PATH={drive}", "EXPERIMENT_NAME=default"} <= {*command.split()}

    # Screen lines start with a process's name. Only the coordinator's rounds are shown.
    for done in (stopped, killed):
        shown = re.findall(r"(?m)^\[(\w+)\] (.*)$", done.screen)
        for name, text in shown:  # the name is not repeated
            assert {text, f"{name} {text}"} & {*done.logs[name].splitlines()}
        line = r"(?m)^\[(?:coordinator|worker_0)\] .*\b(\d+)/\d+ reward \d"
        rounds = [int(t) for t in re.findall(line, done.screen)]
        assert rounds == [*range(rounds[0], rounds[-1] + 1)]

    # Only prepare created a warm start.
    assert [name for name, log in stopped.logs.items() if MADE in log] == ["prepare"]
    assert MADE not in "".join(killed.logs.values())


# -------- U3, U4, U5: output, logs, monitor and report --------------------------------------------


def test_U3_each_round_has_a_line_and_the_end_says_what_was_learned_and_where_it_is(finished):
    # A round's line shows the mean reward, and the shares of answer tags and truncated completions.
    rows = rewards_of(finished.drive)
    for t in range(12):
        rewards = [row["reward"] for row in rows if row["round"] == t]
        (line,) = re.findall(rf"(?m)^2 nodes {t:02d}/12\b.*$", finished.output)
        shown = float(re.search(r"reward (\d\.\d\d)", line)[1])
        assert len(rewards) == 4 and abs(shown - sum(rewards) / 4) < 0.006
        assert len(re.findall(r"\d+%", line)) >= 2

    # The end reports the total reward per node and the model's folder. A plot was saved.
    total = sum(row["reward"] for row in rows) / 2
    assert f"{total:.2f}" in finished.output[-3000:]
    assert str(folder_of(finished.drive, "n_0") / "model") in finished.output
    assert (finished.drive / "reports/default.png").read_bytes()[:4] == b"\x89PNG"

    # Samples are two questions with three answers each. The end repeats the earlier answers next to
    # the final answers.
    answers = re.findall(r"(?m)^ +(\d\.\d\d  '.*)$", finished.output)
    assert len(answers) == 6 and len({*re.findall(r"(?m)^\? .*$", finished.output)}) == 2
    assert re.findall(r"(?m)^ +before +(\d\.\d\d  '.*)$", finished.output) == answers
    assert len(re.findall(r"(?m)^ +now +\d\.\d\d  '", finished.output)) == 6


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


def test_U3_run_swarm_prints_one_verdict_which_is_the_swarms(tmp_path):
    """Both processes print two lines at the end, and each line names its process."""
    end = 'echo "$1 end: learned by $1"; echo "  ▁▂▃ of $1 trained 2 of 2 rounds, cumulative reward 1.00 per node"'
    cases = f"""
        worker*) set -- "$NODE_ID"; {end}; echo "final model: /x" ;;
        coordinator*) set -- coordinator; {end} ;;
    """
    screen = run_swarm(tmp_path, cases, NUM_WORKERS=2).screen
    assert re.findall(r"learned by (\w+)", screen) == ["coordinator"]
    assert re.findall(r"of (\w+) trained 2 of 2 rounds", screen) == ["coordinator"]
    assert "[worker_0] final model: /x" in screen


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
def test_U3_the_diagnosis_says_what_was_learned_or_what_may_help(text, variable, rewards, metrics):
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


@pytest.mark.parametrize("is_terminal", [False, True])
def test_U3_a_flat_curve_is_explained_and_a_terminal_has_a_bar(
    tmp_path, monkeypatch, capsys, is_terminal
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert run(tmp_path, MAX_ROUNDS=10, NUM_TRANSPLANT_TREES=0) == 0
    (text,) = events_of(tmp_path, "n_0", "no signal")
    screen, errors = capsys.readouterr()
    assert text in screen and ("10/10" in errors) == is_terminal
    assert sapo.TABLE.keys() & {*re.findall(r"\w+", text)}, "it suggests no variable"


def join_by_hand(store, node, since=2e9) -> None:
    """Register a node, as any program can."""
    put(store, f"board/session.{node}.{int(1000 * since):013d}-00000000")


def write_experiment(drive, name, reward, num_completions=16, **settings) -> None:
    """Write twenty rounds of the nodes n1 and n2 by hand."""
    store = DriveStore(drive, name)
    config = {name: row.default for name, row in sapo.TABLE.items()}
    config |= {"NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4, "layout": 5, "maker": "n1"}
    config["created_at"] = 100 * reward  # different for each experiment
    put(store, "config.json", config | settings)
    put(store, "board/open.n1.000019.0")
    for node in ("n1", "n2"):
        join_by_hand(store, node)
        put(store, f"board/rewards.{node}.000019.0")
        rows = []
        for t in range(20):
            row = {"node_id": node, "round": t, "stage": 0, "timestamp": 100.0 + t}
            row |= {"reward": reward, "completions": num_completions, "informative_groups": 1}
            rows.append(json.dumps(row) + "\n")
        (store.dir / f"nodes/{node}/logs").mkdir(parents=True)
        (store.dir / f"nodes/{node}/logs/metrics.jsonl").write_text("".join(rows))


def test_U5_monitor_and_functions_show_who_lives_rewards_and_what_looks_wrong(tmp_path):
    # Two nodes have finished without learning anything, "working" is alive, and "silent" was last
    # active long ago.
    output_of(tmp_path, MAX_ROUNDS=2)
    store = DriveStore(tmp_path, "default")
    join_by_hand(store, "silent", since=1e9)
    join_by_hand(store, "working", since=time.time())
    completion = {"response": "say 3\x1b[2J", "reward": 0.0, "finished": True}
    group = {"task": "gcd", "seed": 1, "prompt": "What is 1+1?", "answer": "2"}
    file = {"format": 1, "peer_id": "working", "round": 1, "stage": 0, "timestamp": 1e9}
    file["rollouts"] = {"0": group | {"completions": [completion] * 2}}
    put(store, "nodes/working/rollouts/round_000001.stage_0.json", file)
    put(store, "board/rollouts.working.000001.0")

    screen = output_of(tmp_path, NODE_ROLE="monitor")
    status = re.findall(r"(?m)^(\w+) +(alive|dead)\b", screen)
    assert sorted(status) == [("silent", "dead"), ("working", "alive")]
    assert "round 1 of 2" in " ".join(screen.split())
    assert "1+1?" in screen and "say 3" in screen and "\x1b" not in screen
    assert re.search(r"(?m)^! .*\bsilent\b", screen)
    assert re.search(r"(?m)^! .*nothing was learned", screen)

    # The functions for notebooks return the same.
    rewards = [[row["round"], row["node_id"], row["reward"]] for row in rewards_of(tmp_path)]
    metrics = sapo.get_experiment_metrics(tmp_path, "default")
    assert metrics[["round", "node_id", "my_reward"]].values.tolist() == rewards
    status = sapo.get_experiment_status(tmp_path, "default")
    names = ("current_round", "current_stage", "num_active_peers", "peer_ids", "coordinator")
    assert [status[name] for name in names] == [1, 0, 1, ["n_0", "n_1", "silent", "working"], None]
    total = sum(reward for *_, reward in rewards)
    assert sum(status["cumulative_rewards"].values()) == pytest.approx(total)
    assert status["latest_checkpoint"].endswith("nodes/n_0/checkpoints/round_000001.safetensors")
    assert status["last_updated"] > 1e9 and 0 < status["duration_seconds"] < 60

    # For an unknown name, the error lists the existing experiments.
    assert sapo.list_experiments(tmp_path) == ["default"]
    with pytest.raises(StoreError, match="no experiment 'nosuch'.*available: default"):
        sapo.get_experiment_status(tmp_path, "nosuch")


@pytest.mark.parametrize("has_packages", [True, False])
def test_U5_reports_compare_over_seeds_without_matplotlib_too(tmp_path, monkeypatch, has_packages):
    # Write two seeds of 4/4 and of its baseline, 8/0, and a run of each with a different LOSS_TYPE.
    eight = {"NUM_TRAIN_SAMPLES": 8, "NUM_TRANSPLANT_TREES": 0}
    for seed, ours, alone in ((0, 0.40, 0.20), (1, 0.52, 0.24)):
        write_experiment(tmp_path, f"a{seed}", ours, SEED=seed, maker=f"n{seed + 1}")
        write_experiment(tmp_path, f"b{seed}", alone, 32, SEED=seed, **eight)
    write_experiment(tmp_path, "other", 0.01, LOSS_TYPE="grpo")
    write_experiment(tmp_path, "other_alone", 0.02, LOSS_TYPE="grpo", **eight)
    (tmp_path / "reports").mkdir()
    if not has_packages:
        for name in ("matplotlib.figure", "pandas"):
            monkeypatch.setitem(sys.modules, name, None)
    output_of(tmp_path, UNSET, status=1, NODE_ROLE="report", EXPERIMENT_NAME="no_*")
    output = output_of(tmp_path, UNSET, NODE_ROLE="report")

    # The expected values are worked out by hand, from 20 rounds and both seeds. Runs that differ in
    # more than their seed are never averaged. A gain is relative to the baseline with the same
    # settings.
    rows = sapo.compare_experiments(tmp_path)
    found = [(row["I/J"], row["runs"], row["completions"]) for row in rows]
    dapo, grpo_loss = "LOSS_TYPE=dapo", "LOSS_TYPE=grpo"
    assert found == [
        (f"4/4 {dapo}", 2, 320), (f"8/0 {dapo}", 2, 640),
        (f"8/0 {grpo_loss}", 1, 320), (f"4/4 {grpo_loss}", 1, 320),
    ]  # fmt: skip
    assert [row["reward per node"] for row in rows] == pytest.approx([9.2, 4.4, 0.4, 0.2])
    by_hand = (8.0 / 4.0 * 10.4 / 4.8) ** 0.5 - 1  # paired by seed; a gain needs two pairs
    assert [row["gain"] for row in rows] == pytest.approx([by_hand, None, None, None])

    # The report is a table and a JSON file. Without matplotlib, it has no plot, and without pandas,
    # metrics are a list.
    table = (tmp_path / "reports/report_all.md").read_text()
    assert table in output and all(text in table for text in ("9.20", "4.40", "+108%"))
    assert "a 95% CI needs 3" in table, "two seeds give no interval"
    assert json.loads((tmp_path / "reports/report_all.json").read_text()) == rows
    assert (tmp_path / "reports/report_all.png").exists() == has_packages
    assert ("pip install matplotlib" in output) == (not has_packages)
    assert isinstance(sapo.get_experiment_metrics(tmp_path, "a0"), list) == (not has_packages)


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


def test_U6_test_mode_shows_information_externals_and_a_gradient_in_a_minute(tmp_path):
    started = time.process_time()  # CPU time, which other processes do not affect
    assert "check: passed" in output_of(tmp_path, UNSET, TEST_MODE=1, LOCAL_NODES=2)
    assert time.process_time() < started + 60
    for name in ("informative_groups", "external_groups", "grad_norm"):
        assert any(row[name] for row in rewards_of(tmp_path)), name
    for node_folder in folder_of(tmp_path).iterdir():
        assert rounds_of(tmp_path, node_folder.name) == [0, 1, 2]
        assert {"model.safetensors", "tokenizer.json"} <= {*os.listdir(node_folder / "model")}


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


def test_U8_a_final_model_has_the_same_logits_and_the_printed_line_tries_it(finished):
    for node in finished.run.nodes:
        folder = folder_of(finished.drive, node.id) / "model"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("Solve the following", return_tensors="pt").input_ids
        with torch.no_grad():
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert torch.equal(loaded(ids).logits, node.model(ids).logits)
    words = shlex.split(re.findall(r"(?m)try it: (python .*)$", finished.output)[-1])
    done = subprocess.run([sys.executable, *words[1:], "1 + 1?"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("\n"), done.stderr


def test_U3_try_py_asks_the_better_known_sample_question_and_prints_its_answer(finished):
    # The last lines about samples show both questions, each with answers from before and now.
    command = re.findall(r"(?m)try it: python (.*)$", finished.output)[-1]
    done = subprocess.run([sys.executable, command], capture_output=True, text=True)
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
def test_U8_try_py_asks_the_final_model_as_training_did(tmp_path, chat):
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
    done = subprocess.run([sys.executable, tmp_path / "try.py"], capture_output=True, text=True)
    assert json.loads(done.stdout) == [codec.encode_prompt(question)], done.stderr


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
def test_U11_the_tested_diffs_change_what_they_say(tmp_path, recipes, changed):
    for module in ("sapo", "coordinator", "drive_store", "grpo"):
        shutil.copy(ROOT / f"{module}.py", tmp_path)
    (tmp_path / "peft.py").touch()
    for name in recipes.split():
        diff = recipe(name).encode()
        subprocess.run(["patch", "-F0", "-p0"], input=diff, cwd=tmp_path, check=True)
    code = 'import sapo\nfrom grpo import *\nquestion = make_question("small_gcd", 1)\n'
    code += 'answer = f"<answer>{question.answer}</answer>"\n'
    subprocess.run([sys.executable, "-c", code + changed], cwd=tmp_path, check=True)


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


def test_U9_the_pasted_modules_and_the_printed_cells_run_and_draw_and_the_stop_button_is_ctrl_c(
    tmp_path, kernel
):
    cells = re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", PRINTED, re.DOTALL)
    names = [name for name, _ in cells]
    assert names == "swarm mount swarm coordinator worker monitor look compare".split()

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

    modules = ("drive_store", "grpo", "coordinator", "sapo")
    program = "\n".join((ROOT / f"{name}.py").read_text() for name in modules)
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
        outputs += kernel.run_cell(cell)
    kernel.run_cell("assert _exit_code == 0, 'run_swarm.sh has failed'")
    assert "already finished" in outputs and outputs.count("image/png") >= 2
    roles = [start["NODE_ROLE"] for start in starts_in(tmp_path) if "NODE_ROLE" in start]
    assert sorted(roles) == ["coordinator", "prepare", "report", *["worker"] * 4]


def test_U9_a_second_copy_in_one_kernel_stops_instead_of_running_the_first_copys_modules(
    tmp_path, kernel
):
    for name in ("original", "changed"):
        (tmp_path / name).mkdir()
        for module in ("drive_store", "grpo", "coordinator", "sapo"):
            shutil.copy(ROOT / f"{module}.py", tmp_path / name)
    settings = to_environ({**QUICK, "GDRIVE_PATH": tmp_path / "drive", "MAX_ROUNDS": 1})
    kernel.run_cell(f"import os, sys\nos.environ.update({settings!r})\nerrors = []")
    # `%run` prints an exception and does not raise it.
    kernel.run_cell("keep = lambda *_, **__: errors.append(str(sys.exc_info()[1]))")
    kernel.run_cell("get_ipython().showtraceback = keep")

    for number, (name, is_run) in enumerate([("original", 1), ("changed", 0), ("original", 1)]):
        code = f"os.environ['EXPERIMENT_NAME'] = 'e{number}'\n%run {name}/sapo.py\nprint(errors)"
        output = kernel.run_cell(code)
        assert (tmp_path / f"drive/experiments/e{number}").exists() == bool(is_run), output
        assert "restart the kernel" not in output or number > 0
    assert "changed/sapo.py" in output and output.count("restart the kernel") == 1


# -------- U10: bugs in the program's own code -----------------------------------------------------


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


MISTAKES = [
    FileNotFoundError(errno.ENOENT, "No such file", "my_notes.txt"), BrokenPipeError("mine"),
    KeyError("mine"), MemoryError(), Unprintable(), SystemExit(7), GeneratorExit(),
]  # fmt: skip
PLACES = [(grpo, "update_policy"), (sapo, "save_checkpoint"), (sapo.Log, "event")]


@pytest.mark.parametrize("place, step, error", [
    *((sapo, "submit_reward", error) for error in MISTAKES), *((*place, MISTAKES[0]) for place in PLACES),
])  # fmt: skip
def test_U10_a_mistake_of_any_type_and_place_shows_its_traceback_and_says_goodbye(
    tmp_path, monkeypatch, place, step, error
):
    def my_own_line():
        raise error.with_traceback(None)

    # The edited function fails in the second round. The store calls `Log.event` in an outage, so an
    # outage is simulated for it.
    original, listdir = getattr(place, step), os.listdir
    outages = [OSError(errno.EIO, "broken")] if step == "event" else []

    def edited(*args, **more):
        if rounds_of(tmp_path, "n_1") and "error" not in args:
            my_own_line()
        return original(*args, **more)

    def failing_listdir(path="."):
        if outages and str(path).endswith("board") and rounds_of(tmp_path, "n_1"):
            raise outages.pop()
        return listdir(path)

    settings = {"MAX_ROUNDS": 3, "CHECKPOINT_INTERVAL": 1}
    with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as screen:
        patch.setattr(place, step, edited)
        patch.setattr(os, "listdir", failing_listdir)
        with contextlib.suppress(SystemExit, GeneratorExit):  # these may end the interpreter
            assert run(tmp_path, settings) == 1
    texts = [(folder_of(tmp_path, "n_0") / "logs/stdout.log").read_text()]
    texts += [screen.getvalue()] if isinstance(error, Exception) else []
    for text in texts:
        assert "Traceback (most recent call last)" in text and type(error).__name__ in text
        assert text.count("in my_own_line") == 1
    assert read_log(tmp_path, "n_0", "training_events")[-1]["event"] == "error"
    assert {heartbeat_of(tmp_path, node) for node in ("n_0", "n_1")} == {"failed"}

    # With the bug fixed, the next process resumes.
    output_of(tmp_path, settings)
    assert rounds_of(tmp_path, "n_1") == [0, 1, 2]


@pytest.mark.parametrize("module, name, words", [
    (grpo, "save_model", "export: n_0's model"), (coordinator, "plot", "no plot ("),
])  # fmt: skip
def test_U10_a_model_or_a_picture_that_cannot_be_made_is_a_sentence_and_ends_no_run(
    tmp_path, monkeypatch, module, name, words
):
    monkeypatch.setattr(module, name, Mock(side_effect=OSError("No space left on device")))
    output = output_of(tmp_path, MAX_ROUNDS=1)
    assert words in output and "OSError" in output
    assert heartbeat_of(tmp_path, "n_0") == "done"
