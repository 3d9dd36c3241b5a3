"""Proofs of the promises to people, U1 to U9; of L6, the warm start; and of F6, how nodes start beside
others. What run_swarm.sh and printed commands ask the program to do is seen with a stand-in for
python, and then done in this process."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import textwrap
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
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import coordinator
import drive_store
import grpo
import sapo
from common import LEARNING, QUICK, ROOT, checkpoint_of, events_of, folder_of, heartbeat_of
from common import read_log, results, rewards_of, rounds_of, run, to_environ, wait_until
from drive_store import LAYOUT, At, DriveStore, StoreError
from test_sapo import at_call, contents, put

signal(SIGINT, default_int_handler)  # behind `cmd &` in a shell it is ignored, also by all children
UNSET = dict.fromkeys([*QUICK, "LOCAL_NODES"])  # for a run in which only the rest is set
TWELVE_ROUNDS = LEARNING | {"MAX_ROUNDS": 12, "MAX_STAGES": 2}
FROZEN = {"WARM_START_STEPS": 20, "LEARNING_RATE": 0}  # the weights stay those of the warm start
MADE = "20/20"  # a process that makes the warm start counts its steps
SECRET = "hf_NobodyMayEverSeeThisToken"
PRINTED = (ROOT / "README.md").read_text() + (ROOT / ".github/MANUAL.md").read_text()


def output_of(drive, *more: dict, status=0, **settings) -> str:
    """Call `run`, which must return this status. Returns what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        found = run(drive, *more, **settings)
    assert found == status, output.getvalue()
    return output.getvalue()


def printed(marker: str) -> str:
    """What stands after this marker in README or MANUAL: a command or a recipe."""
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", PRINTED, re.DOTALL)[1]


def has_the_warm_start(drive: Path, node: str) -> bool:
    """Whether a node's newest checkpoint has the weights of the only warm start."""
    (path,) = drive.glob("warmstart/*")
    checkpoint = f"checkpoints/round_{checkpoint_of(drive, node):06d}.safetensors"
    tensors = load_file(folder_of(drive, node) / checkpoint)
    weights = load_file(path).items()
    return all(torch.equal(tensors[f"{node}/{name}/weight"], weight) for name, weight in weights)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> SimpleNamespace:
    """A run of two nodes and two stages without a network: its folder, output and Run."""
    drive = tmp_path_factory.mktemp("finished")
    train = Mock(wraps=sapo.train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", None)
        patch.setattr(sapo, "SAMPLE_INTERVAL", 5)
        patch.setattr(sapo, "train", train)
        output = output_of(drive, TWELVE_ROUNDS, EVAL_INTERVAL=4, EVAL_SAMPLES=8)
    return SimpleNamespace(drive=drive, output=output, run=train.call_args.args[0])


# -------- Commands of the shell -------------------------------------------------------------------

RUN_SWARM = ("bash", ROOT / "run_swarm.sh")
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

# A stand-in for python writes down how it was started; `case` says what it does then. It also
# answers how many cores there are.
STAND_IN = """#!/bin/bash
if [[ $2 = *cpu_count* ]]; then echo 2; exit; fi
trap 'echo "$name was stopped"; exit 130' INT
ARGUMENTS="$*" env -0 > "$STARTS/$EPOCHREALTIME"
wait_for_starts() { while [[ $(ls "$STARTS" | wc -l) -lt $1 ]]; do sleep 0.1; done; }
say() { echo "$*"; until grep -q "$*" "$LOG_DIR/$name.log"; do sleep 0.1; done; }
press_ctrl_c() { kill -INT -- -$PPID; until_ctrl_c; }  # a terminal signals the process group
until_ctrl_c() { while :; do sleep 0.1; done; }
name=$NODE_ROLE
if [[ $name = worker ]]; then name=$NODE_ID; fi
case "$name" in CASES esac
"""


def stand_in(folder: Path, cases: str) -> dict:
    """Make a stand-in for python. Returns the variables with which a command finds it."""
    (folder / "starts").mkdir()
    (folder / "python").write_text(STAND_IN.replace("CASES", cases))
    (folder / "python").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHON": folder / "python", "STARTS": folder / "starts"}


def starts_in(folder: Path) -> list[dict]:
    """The environment of each start of the stand-in, in order, with its ARGUMENTS."""
    texts = [path.read_text() for path in sorted(folder.glob("starts/*"))]
    return [dict(line.split("=", 1) for line in text.split("\0") if line) for text in texts]


def processes_with(*words: str) -> list[int]:
    """Ids of the running processes in whose environment and loaded files all of these stand."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            text = (folder / "environ").read_text(errors="replace") + (folder / "maps").read_text()
            if all(word in text for word in words):
                pids.append(int(folder.name))
    return pids


def run_command(folder: Path, *command, cases=None, act=lambda _: None, seconds=60, **settings):
    """Run a command as a terminal does, in a session of its own, and do `act(group)` first. All that
    it starts must then end in time. With `cases`, python is a stand-in.

    Returns its status, its screen, {process: log} and the starts of the stand-in.
    """
    folder.mkdir(exist_ok=True)
    settings = {"LOG_DIR": folder / "logs", "PYTHON": sys.executable, **settings}
    environ = os.environ | to_environ(settings | ({} if cases is None else stand_in(folder, cases)))
    process = subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, **PIPES)
    try:
        act(process.pid)
        screen, _ = process.communicate(timeout=seconds)  # until nobody is left who could write
        assert not processes_with(f"LOG_DIR={folder}/logs")
    finally:
        for pid in processes_with(f"LOG_DIR={folder}/logs"):
            os.kill(pid, SIGKILL)
    logs = {path.stem: path.read_text() for path in folder.glob("logs/*")}
    starts = starts_in(folder)
    return SimpleNamespace(status=process.returncode, screen=screen, logs=logs, starts=starts)


# -------- U1: settings ----------------------------------------------------------------------------


def test_U1_help_explains_all_and_other_starts_get_a_sentence(tmp_path, monkeypatch, capsys):
    # run_swarm.sh explains itself, and then calls the program's help.
    done = run_command(tmp_path, *RUN_SWARM, "--help", cases="")
    assert done.status == 0 and "CONFIGS=" in done.screen
    assert [start["ARGUMENTS"] for start in done.starts] == [f"{ROOT}/sapo.py --help"]

    # Another argument than --help, and a start without packages.
    answers = []
    for argument, status in (("--help", 0), ("monitor", 2)):
        monkeypatch.setattr(sys, "argv", ["sapo.py", argument])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(f"{ROOT}/sapo.py", run_name="__main__")
        assert caught.value.code == status
        answers.append("".join(capsys.readouterr()))
    done = run_command(tmp_path, sys.executable, "-S", ROOT / "sapo.py", "--help")
    assert done.status == 1
    assert "ModuleNotFoundError: No module named" in done.screen
    assert "environment variables, such as MAX_ROUNDS=5 python sapo.py" in answers[1]
    assert answers[1].count("\n") == 1

    # The line of each variable, and those by which it is continued.
    for name, row in sapo.TABLE.items():
        (entry,) = re.findall(rf"(?m)^  {name} .*(?:\n {{9}}.*)*$", answers[0])
        assert "".join(row.metadata["help"].split()) in "".join(entry.split())
        default = "auto" if name == "TASKS" else str(row.default)
        assert default[:8] in entry


@pytest.mark.parametrize("mounted", ["", "drive/MyDrive", "gdrive/MyDrive"])
def test_U1_in_colab_a_mounted_drive_is_found_or_all_will_be_lost(tmp_path, monkeypatch, mounted):
    folders = [str(tmp_path / name) for name in ("drive/MyDrive", "gdrive/MyDrive")]
    monkeypatch.setattr(drive_store, "COLAB_DRIVES", folders)
    monkeypatch.chdir(tmp_path)
    (tmp_path / mounted).mkdir(parents=True, exist_ok=True)
    output = output_of(None, LOCAL_NODES=1, MAX_ROUNDS=1, COLAB_RELEASE_TAG="release")
    assert (tmp_path / mounted / "rl-swarm/experiments/default").is_dir()
    before_training, _, _ = output.partition("n 0/1 reward")
    assert ("drive.mount('/content/drive')" in before_training) == (not mounted)


# -------- U2: stopping ----------------------------------------------------------------------------


def test_U2_a_second_ctrl_c_exits_at_once_in_the_middle_of_a_round(tmp_path, monkeypatch):
    def press_twice():
        for _ in range(2):
            os.kill(os.getpid(), SIGINT)
            time.sleep(0.6)  # one key press may arrive twice within half a second
        pytest.fail("the program goes on")

    at_call(monkeypatch, "policy_gradient", 1, press_twice)
    output_of(tmp_path, status=130)
    assert not rewards_of(tmp_path), "the round was finished"


def test_U2_L6_ctrl_c_ends_a_warm_start_at_once_and_delays_no_other_node(tmp_path, monkeypatch):
    steps = []

    def press_in_step_three(bar, n=1):
        steps.append(n)
        if len(steps) == 3:
            os.kill(os.getpid(), SIGINT)

    settings = {"MAX_ROUNDS": 2, "WARM_START_STEPS": 20}
    with monkeypatch.context() as patch:
        patch.setattr(sapo.tqdm.tqdm, "update", press_in_step_three)
        output = output_of(tmp_path, settings, status=130)
    assert steps == [1, 1, 1]
    assert "\nstopping (nothing was begun)" in output and "stopped before the first round" in output
    assert contents(tmp_path / "warmstart") == {}

    # Another name starts at once.
    started = time.monotonic()
    output_of(tmp_path, settings, NODE_ID="other")
    assert time.monotonic() - started < 25
    assert rounds_of(tmp_path, "other_1") == [0, 1]


# What each process does, how the script ends, what failed, how many workers were started, what the
# screen shows. All ends well, Ctrl-C is pressed, a worker fails, and the preparation.
@pytest.mark.parametrize("cases, status, failed, num_workers, words", [
    ("prepare) ;;", 0, [], (3,), []),
    ("prepare) press_ctrl_c ;;", 130, [], (0,), ["[prepare] prepare was stopped"]),
    ("prepare) ;; coordinator) press_ctrl_c ;; *) until_ctrl_c ;;", 130, [], range(4), ["[coordinator] coordinator was stopped"]),
    ("prepare) ;; worker_2) wait_for_starts 5; press_ctrl_c ;; *) until_ctrl_c ;;", 130, [], (3,), ["[coordinator] coordinator was stopped", "[worker_0] worker_0 was stopped"]),
    ("worker_1) say no such luck; exit 7 ;; coordinator) until_ctrl_c ;;", 1, [("worker_1", "7")], (3,), ["[worker_1] no such luck", "[coordinator] coordinator was stopped"]),
    ("prepare) echo there is no such model; exit 2 ;;", 1, [("prepare", "2")], (0,), ["[prepare] there is no such model"]),
])  # fmt: skip
def test_U2_L6_run_swarm_names_what_failed_ends_all_and_shares_out_the_gpus(
    tmp_path, cases, status, failed, num_workers, words
):
    done = run_command(tmp_path, *RUN_SWARM, cases=cases, NUM_WORKERS=3)
    assert done.status == status
    assert all(word in done.screen for word in words), done.screen
    found = re.findall(r"(?m)^run_swarm: (\w+) ended with exit code (\d+) ", done.screen)
    assert found == failed
    workers = [start for start in done.starts if start.get("NODE_ROLE") == "worker"]
    ranks = {start["NODE_ID"]: start["LOCAL_RANK"] for start in workers}
    assert len(ranks) in num_workers
    assert ranks.items() <= {"worker_0": "0", "worker_1": "1", "worker_2": "2"}.items()
    assert num_workers != (0,) or done.logs.keys() == {"prepare"}


def test_U2_U3_S2_L6_a_swarm_stops_in_order_and_goes_on_without_a_worker_that_was_killed(tmp_path):
    """It is started three times. Its model stays what the warm start made."""
    drive = tmp_path / "drive"
    workers = ("worker_0", "worker_1")
    round_line = r"\b(\d+)/\d+ reward \d"
    # Whoever waited for a worker that is gone would wait for longer than this test does.
    settings = {"COORDINATOR_ROUND_INTERVAL": 86400, "STALE_AFTER_SECONDS": 86400}
    settings |= {"FETCH_TIMEOUT_SECONDS": 3600, "NUM_WORKERS": 2, "MAX_ROUNDS": 10**5}
    settings = {**QUICK, **FROZEN, **settings, "GDRIVE_PATH": drive}

    # Ctrl-C is pressed while the first process imports torch, and then when both have rewards that
    # the coordinator, which may be the last to start, has seen.
    def press_while_loading(group):
        wait_until(lambda: processes_with(f"GDRIVE_PATH={drive}", "libtorch"))
        os.killpg(group, SIGINT)

    def press_after_rewards(group):
        wait_until(lambda: rounds_of(drive, "coordinator", "winners"), 300)
        wait_until(lambda: all(rounds_of(drive, name) for name in workers))
        os.killpg(group, SIGINT)

    loading = run_command(tmp_path / "1", *RUN_SWARM, act=press_while_loading, **settings)
    stopped = run_command(tmp_path / "2", *RUN_SWARM, act=press_after_rewards, **settings)
    assert (loading.status, stopped.status) == (130, 130), loading.screen + stopped.screen
    assert "Traceback" not in "".join([stopped.screen, *stopped.logs.values()])
    assert heartbeat_of(drive, "coordinator") == "stopped"
    for name in workers:
        last = rounds_of(drive, name)[-1]
        assert (heartbeat_of(drive, name), checkpoint_of(drive, name)) == ("stopped", last)
        rounds = [int(t) for t in re.findall(round_line, stopped.logs[name])]
        assert rounds == rounds_of(drive, name)
        assert re.search(rf"to go on:\s.*\bNODE_ID={name}\b.* python sapo.py", stopped.logs[name])

    # The third time worker_1 is killed. The script says "failed" in its name, and how to resume it.
    def kill_worker_1(group):
        wait_until(lambda: rounds_of(drive, "worker_1")[-1] > last + 3, 300)
        for pid in processes_with(f"GDRIVE_PATH={drive}", "NODE_ID=worker_1"):
            os.kill(pid, SIGKILL)

    settings["MAX_ROUNDS"] = last + 100
    killed = run_command(tmp_path / "3", *RUN_SWARM, act=kill_worker_1, seconds=150, **settings)
    assert killed.status == 1 and heartbeat_of(drive, "worker_1") == "failed"
    assert rounds_of(drive, "worker_0")[-1] == last + 99
    assert rounds_of(drive, "worker_1")[-1] < last + 90
    (line,) = re.findall(r"(?m)^run_swarm: \w+ ended .*$", killed.screen)
    assert re.search(r"^run_swarm: worker_1 .*\b137\b", line)
    (command,) = re.findall(r"(?m)^.*\bNODE_ID=worker_1 .*python sapo\.py$", killed.screen)
    assert {f"GDRIVE_PATH={drive}", "EXPERIMENT_NAME=default"} <= {*command.split()}
    assert "Killed" not in killed.screen

    # The screen: lines with a name in front, of worker_1 only how it ended. Rounds are the
    # coordinator's. The logs have everything that each process printed.
    quiet = {"prepare", "worker_0"}
    for done, more in ((stopped, set()), (killed, {"worker_1"})):
        lines = done.screen.replace(f"{command}\n", "").splitlines()
        lines = [line for line in lines if not line.startswith("run_swarm: ")]
        shown = [re.fullmatch(r"\[(\w+)\] (.*)", line).groups() for line in lines]
        assert {name for name, _ in shown} == {"coordinator"} | quiet | more
        assert not any(re.search(round_line, text) for name, text in shown if name in quiet)
        assert done.logs.keys() == {"prepare", "coordinator", *workers}
        assert all(text in done.logs[name].splitlines() for name, text in shown)
    rounds = [int(t) for t in re.findall(rf"\[coordinator\] {round_line}", killed.screen)]
    assert rounds == [*range(rounds[0], last + 100)]
    assert "[worker_0] final model:" in killed.screen
    for name in workers:
        written = (folder_of(drive, name) / "logs/stdout.log").read_text().splitlines()
        assert {*written} <= {*stopped.logs[name].splitlines(), *killed.logs[name].splitlines()}

    # The warm start was made by prepare alone, and both workers have it.
    assert [name for name, log in stopped.logs.items() if MADE in log] == ["prepare"]
    assert MADE not in "".join(killed.logs.values())
    assert all(has_the_warm_start(drive, name) for name in workers)


# -------- F6, L6: starting beside others ----------------------------------------------------------


def test_F6_L6_the_first_one_begins_others_obey_and_one_warm_start_counts(tmp_path, monkeypatch):
    drive = tmp_path / "drive"
    for role in ("worker", "prepare"):
        output = output_of(drive, status=2, NODE_ROLE=role, MODEL_NAME="no/such model")
        assert "MODEL_NAME='no/such model'" in output
        assert not drive.exists(), "a start that failed has touched the folder"

    # While dora loads her model, anna starts. While anna loads hers, ben starts, and begins.
    outputs = {}
    settings = FROZEN | {"LOCAL_NODES": 1, "MAX_ROUNDS": 3}

    def start(node, *more, **settings):
        outputs[node] = output_of(drive, *more, NODE_ID=node, **settings)

    at_call(monkeypatch, "load_checked_model", 1, lambda: start("anna", settings))
    at_call(monkeypatch, "load_checked_model", 2, lambda: start("ben", settings, SEED=77))

    # While ben makes his warm start, eve joins, sets nothing but her name, and finds no file. Her
    # weights are others than his, as on a machine that rounds differently.
    warm_start = grpo.warm_start
    models = []

    def warm_start_while_eve_joins(model, *arguments):
        warm_start(model, *arguments)
        models.append(model)
        if len(models) == 1:
            assert DriveStore(drive, "default").board().sessions == {}
            start("eve", UNSET, EXPERIMENT_NAME="default")
        else:
            model.get_input_embeddings().weight.data *= 1.001

    monkeypatch.setattr(grpo, "warm_start", warm_start_while_eve_joins)
    start("dora", settings, SEED=5, status=2)
    assert len(models) == 2
    assert "default: joining" in outputs["eve"]
    assert "NUM_TRAIN_SAMPLES=2" in outputs["eve"].split("from the experiment: ")[1]
    assert rounds_of(drive, "eve") == [0, 1, 2]
    assert all("joining; another node began it" in outputs[name] for name in ("anna", "dora"))
    assert "SEED=5: the experiment has 77" in outputs["dora"]
    assert not folder_of(drive, "dora").exists()
    config = json.loads((drive / "experiments/default/config.json").read_bytes())
    for name, value in {**QUICK, **settings, "SEED": 77}.items():
        assert config.get(name, value) == value, name

    # anna asked the questions of ben's seed. All have the weights of the one file, which are eve's.
    config = SimpleNamespace(SEED=77)
    seeds = [sapo.derive_seed(config, "anna", At(2), "question", i) for i in range(2)]
    path = folder_of(drive, "anna") / "rollouts/round_000002.stage_0.json"
    groups = json.loads(path.read_bytes())["rollouts"].values()
    assert [group["seed"] for group in groups] == seeds
    assert all(has_the_warm_start(drive, node) for node in ("anna", "ben", "eve"))


# -------- U3, U4: the log -------------------------------------------------------------------------


def test_U3_each_round_has_a_line_and_the_end_says_what_was_learned_and_where_it_is(finished):
    # A round's line: the mean reward of nodes and stages, and in per cent answer tags and truncated
    # completions.
    rows = rewards_of(finished.drive)
    for t in range(12):
        rewards = [row["reward"] for row in rows if row["round"] == t]
        (line,) = re.findall(rf"(?m)^2 nodes {t:02d}/12\b.*$", finished.output)
        shown = float(re.search(r"reward (\d\.\d\d)", line)[1])
        assert len(rewards) == 4 and abs(shown - sum(rewards) / 4) < 0.006
        assert len(re.findall(r"\d+%", line)) >= 2

    # The end: the folder of the model, the total reward of a node, a picture.
    total = sum(row["reward"] for row in rows) / 2
    assert f"{total:.2f}" in finished.output[-3000:]
    assert str(folder_of(finished.drive, "n_0") / "model") in finished.output
    assert (finished.drive / "reports/default.png").read_bytes()[:4] == b"\x89PNG"

    # Samples: the same questions at the start, every SAMPLE_INTERVAL rounds and at the end.
    for sample in finished.run.log.initial_samples:
        (question, *_) = coordinator.format_question(sample)
        assert finished.output.count(question) == 4
        for completion in sample["completions"]:
            answer = re.escape(f"{completion['reward']:4.2f}  {completion['response']!r}")
            assert re.search(rf"before +{answer}", finished.output)
    assert len(re.findall(r"(?m)^ +now +\d", finished.output)) == 6


def test_U4_each_node_has_its_metrics_and_system_each_process_its_events_and_output(finished):
    # Of the process: events, and everything that it printed.
    events = read_log(finished.drive, "n_0", "training_events")
    assert all({"timestamp", "event", "node_id", "text"} <= row.keys() for row in events)
    assert {"start", "end"} <= {row["event"] for row in events}
    written = (folder_of(finished.drive, "n_0") / "logs/stdout.log").read_text().splitlines()
    assert {*finished.output.splitlines()} <= {*written}

    # Of each node: the metrics of every round, as in its reward files, and the system.
    for node, other in (("n_0", "n_1"), ("n_1", "n_0")):
        rows = read_log(finished.drive, node)
        stages = [(row["round"], row["stage"]) for row in rows]
        assert stages == [(t, stage) for t in range(12) for stage in range(2)]
        for row, reward in zip(rows, rewards_of(finished.drive, node), strict=True):
            assert reward.items() <= row.items()
            assert [peer for peer, _ in row["teachers"]] == [other] * row["external_groups"]
        assert rows[-1]["total_reward"] == pytest.approx(sum(row["my_reward"] for row in rows))
        system = json.loads((folder_of(finished.drive, node) / "logs/system_info.json").read_text())
        expected = {"torch": torch.__version__, "host": os.uname().nodename, "device": "cpu"}
        assert expected.items() <= system.items()


@pytest.mark.parametrize("text, variable, rewards, metrics", [
    ("learned; mean reward 0.10 -> 0.20", "", [0.1] * 20 + [0.2] * 20, {"informative_groups": 1}),
    ("little was learned; mean reward 0.10 -> 0.10", "", [0.1] * 40, {"informative_groups": 1}),
    ("nothing was learned", "TASKS", [1] * 40, {}),
    ("nothing was learned", "MAX_NEW_TOKENS", [0] * 40, {"truncated_rate": 0.9}),
    ("nothing was learned", "WARM_START_STEPS", [0] * 40, {"answer_tag_rate": 0.01}),
    ("nothing was learned", "MODEL_NAME", [0] * 40, {"answer_tag_rate": 0.9}),
])  # fmt: skip
def test_U3_the_diagnosis_shows_the_curve_or_what_may_help(text, variable, rewards, metrics):
    rows = [{"round": t, "reward": reward, **metrics} for t, reward in enumerate(rewards)]
    diagnosis = coordinator.diagnose(rows)
    assert diagnosis.startswith(text) and variable in diagnosis
    assert variable or re.search("[▁▂▃▄▅▆▇█]{24}", diagnosis)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_U3_a_flat_curve_is_explained_and_a_terminal_has_a_bar(
    tmp_path, monkeypatch, capsys, is_terminal
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert run(tmp_path, MAX_ROUNDS=10, NUM_TRANSPLANT_TREES=0) == 0
    (text,) = events_of(tmp_path, "n_0", "no signal")
    screen, errors = capsys.readouterr()
    assert text in screen and ("10/10" in errors) == is_terminal
    assert sapo.TABLE.keys() & {*re.findall(r"\w+", text)}, "it names no variable"


# One process imports the program. Each child of it writes to a reader, and ends like a program.
ROLES_AND_READERS = """
import gc, os, subprocess, sys, matplotlib.backends.backend_agg, transformers.generation, sapo
gc.freeze()  # or each child would spend a second on it at its end
for reader, settings in eval(sys.argv[1]):
    pipe = subprocess.Popen(reader, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = os.fork()
    if child == 0:
        os.dup2(pipe.stdin.fileno(), 1)
        pipe.stdin.close()
        sys.exit(sapo.main(settings))
    pipe.stdin.close()
    shown = pipe.stdout.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert shown and status == 0, (reader, settings, shown, status)
    os.write(1, shown)
"""


def test_U3_U5_no_terminal_and_no_pipe_ends_a_role_with_a_traceback(finished, tmp_path):
    drive = shutil.copytree(finished.drive, tmp_path / "drive")
    base = {"GDRIVE_PATH": drive, "NODE_ID": "n", "LOCAL_NODES": 2, "DEVICE": "cpu"}
    cases = []
    for reader, max_rounds in (("cat", 13), ("head -1", 14)):
        for role in ("worker", "monitor", "report", "validate"):
            settings = to_environ(base | {"NODE_ROLE": role, "MAX_ROUNDS": max_rounds})
            cases.append((reader, settings))
    command = (sys.executable, "-c", ROLES_AND_READERS, repr(cases))
    more = {"COLUMNS": 10, "PYTHONIOENCODING": "ascii", "PYTHONPATH": ROOT}
    done = run_command(tmp_path, *command, seconds=300, **more)
    assert done.status == 0, done.screen
    assert "Traceback" not in done.screen and "Exception ignored" not in done.screen


# -------- U5: the readers -------------------------------------------------------------------------


def write_experiment(drive, name, rewards=(0.25, 0.25), maker="n1", metrics=None, **settings):
    """Write a finished experiment of two nodes by hand. Returns its store."""
    store = DriveStore(drive, name)
    config = {name: row.default for name, row in sapo.TABLE.items()}
    config |= {"NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4} | settings
    created_at = 100 * float(sum(rewards))  # each experiment began at another time
    store.create(config | {"layout": LAYOUT, "maker": maker, "created_at": created_at})
    numbers = dict.fromkeys(("groups", "external_groups", "informative_groups", "grad_norm"), 1)
    numbers |= {"completions": 16, **(metrics or {})}
    for node in ("n1", "n2"):
        store.create_node(node)
        session = store.register([node], {})
        store.write_heartbeat(node, session, "done")
        put(store, f"nodes/{node}/checkpoints/round_{len(rewards) - 1:06d}.safetensors")
        for t, reward in enumerate(rewards):
            store.move_marker("open", "n1", At(t))
            row = {"reward": reward, "reward_gcd": reward, "timestamp": 100.0 + t}
            store.publish("rewards", node, At(t), numbers | row)
    return store


def test_U5_monitor_and_functions_show_who_lives_rewards_and_what_looks_wrong(tmp_path):
    # n1 has ended, n2 was stopped, "working" lives and "silent" has not been heard of for long.
    settings = {"MAX_ROUNDS": 40, "metrics": {"informative_groups": 0}}
    store = write_experiment(tmp_path, "default", [0.25] * 12, **settings)
    store.write_heartbeat("n2", store.session, "stopped")
    for node in ("working", "silent"):
        store.create_node(node)
    store.register(["working"], {})
    store.post("silent", "session.silent.1000000000000-00000000")
    group = {"task": "gcd", "seed": 1, "prompt": "What is 1+1?", "answer": "2"}
    group["completions"] = [{"response": "say 3\x1b[2J", "reward": 0.0, "finished": True}] * 2
    store.publish("rollouts", "working", At(11), {"format": 1, "rollouts": {"0": group}})

    screen = output_of(tmp_path, NODE_ROLE="monitor")
    status = dict(re.findall(r"(?m)^(\w+) +(alive|dead|exited)\b", screen))
    assert status == {"working": "alive", "silent": "dead", "n1": "exited", "n2": "exited"}
    assert screen.count(" 3.00") == 2, "total rewards of the two nodes"
    assert "round 11 of 40" in " ".join(screen.split())
    assert "1+1?" in screen and "say 3" in screen and "\x1b" not in screen
    warnings = re.findall(r"(?m)^! .*$", screen)
    assert any("silent" in line.split() for line in warnings)
    assert any("nothing was learned" in line for line in warnings)

    # The functions for notebooks return the same.
    assert sapo.get_experiment_status(tmp_path, "default") == {
        "experiment": "default", "current_round": 11, "current_stage": 0, "num_active_peers": 1,
        "peer_ids": ["n1", "n2", "silent", "working"], "last_updated": 111.0, "duration_seconds": 11.0,
        "cumulative_rewards": {"n1": 3.0, "n2": 3.0, "silent": 0, "working": 0},
        "coordinator": None, "latest_checkpoint": str(store.dir / "nodes/n2/checkpoints/round_000011.safetensors"),
    }  # fmt: skip
    metrics = sapo.get_experiment_metrics(tmp_path, "default")
    rows = metrics[["round", "node_id", "my_reward"]].values.tolist()
    assert rows == [[t, node, 0.25] for t in range(12) for node in ("n1", "n2")]

    # A name that does not exist is an error that names those that do.
    assert sapo.list_experiments(tmp_path) == ["default"]
    assert sapo.list_experiments(tmp_path / "no") == []
    for function in (sapo.get_experiment_status, sapo.get_experiment_metrics):
        with pytest.raises(StoreError, match="no experiment 'nosuch'.*there are: default"):
            function(tmp_path, "nosuch")


@pytest.mark.parametrize("missing, problem, changes", [
    ("", "passed", {}),
    ("", "checkpoint after round 12", {"MAX_ROUNDS": 13}),
    ("", "3 nodes submitted rewards in round 11", {"NUM_WORKERS": 3}),
    ("", "gradient", {"EXPERIMENT_NAME": "grad_norm", "MAX_ROUNDS": 2}),
    ("", "groups of peers", {"EXPERIMENT_NAME": "external_groups", "MAX_ROUNDS": 2}),
    ("board/open.*", "round 11 is open", {}),
    ("board/rollouts.*", "there are rollouts", {}),
    ("nodes/n_1/rewards/round_000011.*", "2 nodes submitted rewards in round 11", {}),
    ("nodes/*/rewards/round_000000.*", "every round has rewards", {}),
    ("nodes/*/checkpoints/*", "checkpoint after round 11", {}),
    ("nodes/n_1/logs/metrics.jsonl", "n_1 has written its log", {}),
    ("nodes/n_1/model/config.json", "n_1 has written its log and its model", {}),
    ("nodes/n_1/model/tokenizer.json", "n_1 has written its log and its model", {}),
    ("nodes/n_0/model/model.safetensors", "n_0 has written its log and its model", {}),
])  # fmt: skip
def test_U5_validate_passes_a_finished_run_and_names_each_missing_thing(
    finished, tmp_path, missing, problem, changes
):
    drive = shutil.copytree(finished.drive, tmp_path / "drive")
    for path in (drive / "experiments/default").glob(missing or "nothing"):
        path.unlink()
    for metric in ("grad_norm", "external_groups"):  # which are 0 in an experiment of this name
        write_experiment(drive, metric, metrics={metric: 0})
    settings = {"NODE_ROLE": "validate", "MAX_ROUNDS": 12}
    assert problem in output_of(drive, settings, changes, status=int(problem != "passed"))


@pytest.mark.parametrize("has_packages", [True, False])
def test_U5_reports_compare_over_seeds_without_matplotlib_too(tmp_path, monkeypatch, has_packages):
    # Two seeds of 4/4 and of its baseline 8/0, a run with another setting, a baseline with it, and
    # a broken one.
    eight = {"NUM_TRAIN_SAMPLES": 8, "NUM_TRANSPLANT_TREES": 0}
    for seed, ours, alone in ((0, 0.40, 0.20), (1, 0.52, 0.24)):
        more = {"SEED": seed, "maker": f"n{seed + 1}"}  # whose mkdir was the first is chance
        write_experiment(tmp_path, f"a{seed}", [ours] * 20, **more)
        more["metrics"] = {"completions": 32}
        write_experiment(tmp_path, f"b{seed}", [alone] * 20, **more, **eight)
    write_experiment(tmp_path, "other", [0.01] * 20, LOSS_TYPE="grpo")
    write_experiment(tmp_path, "other_alone", [0.02] * 20, LOSS_TYPE="grpo", **eight)
    (write_experiment(tmp_path, "broken").dir / "config.json").unlink()
    if not has_packages:
        for name in ("matplotlib.figure", "pandas"):
            monkeypatch.setitem(sys.modules, name, None)

    # A pattern that fits no experiment shows nothing.
    output_of(tmp_path, UNSET, status=1, NODE_ROLE="report", EXPERIMENT_NAME="no_*")
    output = output_of(tmp_path, UNSET, NODE_ROLE="report")

    # Worked by hand: 20 rounds, means of both seeds. Runs that differ in more than their seed are
    # never averaged, and a gain is over the baseline with the same settings.
    rows = sapo.compare_experiments(tmp_path)
    found = [(row["I/J"], row["runs"], row["completions"]) for row in rows]
    assert found == [("4/4", 2, 320), ("8/0", 2, 640), ("8/0", 1, 320), ("4/4", 1, 320)]
    assert [row["reward per node"] for row in rows] == pytest.approx([9.2, 4.4, 0.4, 0.2])
    expected = [1.2 * 2**0.5, 0.4 * 2**0.5, None, None]
    assert [row["sd"] for row in rows] == pytest.approx(expected)
    by_hand = (8.0 / 4.0 + 10.4 / 4.8) / 2 - 1  # of pairs of one seed; fewer than two say nothing
    assert [row["gain"] for row in rows] == pytest.approx([by_hand, None, None, None])
    half = 12.71 * (10.4 / 4.8 - 8.0 / 4.0) / 2
    assert rows[0]["interval"] == pytest.approx([by_hand - half, by_hand + half])

    # The table, and the numbers as JSON.
    table = (tmp_path / "reports/report_all.md").read_text()
    assert table in output and all(text in table for text in ("9.20", "4.40", "+108% (+2% to"))
    assert json.loads((tmp_path / "reports/report_all.json").read_text()) == rows

    # Without matplotlib and pandas there is no picture, and metrics come as a list.
    assert (tmp_path / "reports/report_all.png").exists() == has_packages
    assert ("pip install matplotlib" in output) == (not has_packages)
    assert isinstance(sapo.get_experiment_metrics(tmp_path, "a0"), list) == (not has_packages)


def test_L4_U5_a_swarm_teaches_a_node_that_generates_nothing(finished, tmp_path, monkeypatch):
    # The README's recipe, after a short run and with fewer rounds.
    drive = shutil.copytree(finished.drive, tmp_path / "rl-swarm")
    (drive / "experiments/default").rename(drive / "experiments/one")
    recipe = (
        printed("teach").replace("ROUNDS=120", "ROUNDS=11").replace("INTERVAL=20", "INTERVAL=1")
    )
    done = run_command(tmp_path, "bash", "-euc", recipe, cases="", EVAL_SAMPLES=8, DEVICE="cpu")
    (start,) = done.starts
    assert (done.status, start["ARGUMENTS"]) == (0, "sapo.py")
    monkeypatch.chdir(tmp_path)
    output = output_of(None, UNSET, start)
    assert re.search(r"pupil 05/11 .*held-out 0\.\d\d", output)

    # Nothing was generated, and yet it was trained; each reward file counts as submitted.
    store = DriveStore(drive, "school")
    row = store.read_reward("pupil", At(5))
    assert (row["reward"], row["completions"]) == (None, 0)
    assert row["external_groups"] > 0 and row["grad_norm"] > 0
    assert not store.fetch_rollouts("pupil", At(5))
    settings = UNSET | {"EXPERIMENT_NAME": "school", "MAX_ROUNDS": 11, "NUM_WORKERS": 1}
    for role in ("validate", "monitor", "report"):
        output_of(drive, settings, NODE_ROLE=role)
    exec(printed("recipe: teachers").replace("default", "school"), {})
    assert Path("teachers.png").read_bytes()[:4] == b"\x89PNG"

    # Without own questions and without peers there is nothing to train on.
    none = {"NUM_TRAIN_SAMPLES": 0, "NUM_TRANSPLANT_TREES": None}
    assert "nothing to train on" in output_of(tmp_path / "new", none, status=2)


# -------- U11: a student's first changes (the gate also trains with them) -------------------------


def test_U11_the_printed_diffs_change_what_they_say(tmp_path):
    first = """
        import sapo
        from grpo import *
        question = make_question("small_gcd", 1)
        answer = f"<answer>{question.answer}</answer>"
    """
    several = """
        assert group_advantages([1, 0, 0, 1]) == [0.5, -0.5, -0.5, 0.5]
        assert 0.5 < compute_reward(question, f"It is {answer}") < compute_reward(question, answer)
        assert make_question("double", 3).answer.isdigit() and "legs" in TASK_TABLE
        assert Row(None, [], 0.0, 0.0).kl == 0
    """
    parts = """
        assert compute_reward(question, answer) == 1
        assert compute_reward(question, "<answer>x</answer>") == 0.2
    """
    cases = {"advantage kl task own_task length lora truncated": several, "parts": parts}
    for recipes, expected in cases.items():
        folder = tmp_path / recipes.split()[-1]
        folder.mkdir()
        for module in ("sapo", "coordinator", "drive_store", "grpo"):
            shutil.copy(ROOT / f"{module}.py", folder)
        (folder / "peft.py").touch()
        for recipe in recipes.split():
            diff = printed(f"recipe: {recipe.replace('_', ' ')}").encode()
            subprocess.run(["patch", "-F0", "-p0"], input=diff, cwd=folder, check=True)
        code = textwrap.dedent(first) + textwrap.dedent(expected)
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


# -------- U6, U7: the quick check, comparisons ----------------------------------------------------


def test_U6_test_mode_shows_information_externals_and_a_gradient_in_a_minute(tmp_path):
    started = time.process_time()  # a minute where nothing else runs
    output_of(tmp_path, UNSET, TEST_MODE=1, LOCAL_NODES=2)
    assert time.process_time() < started + 60
    for name in ("informative_groups", "external_groups", "grad_norm"):
        assert any(row[name] for row in rewards_of(tmp_path)), name
    output_of(tmp_path, UNSET, TEST_MODE=1, LOCAL_NODES=2, NODE_ROLE="validate")

    # That of a real model is small, too.
    environ = {"TEST_MODE": True, "GDRIVE_PATH": ".", "NODE_ID": "n", "MODEL_NAME": "gpt2"}
    config = sapo.resolve_config(environ, {}, [])
    assert config.TASKS.split(",") == list(grpo.TINY_TASKS)
    assert (config.MAX_NEW_TOKENS, config.MAX_ROUNDS) == (32, 3)
    assert 0 < config.WARM_START_STEPS < 100
    assert sapo.resolve_config(environ | {"MAX_NEW_TOKENS": 99}, {}, []).MAX_NEW_TOKENS == 99


def test_U7_L6_run_swarm_runs_configs_and_seeds_one_after_another_and_reports_them(tmp_path):
    settings = {**QUICK, **FROZEN, "LOCAL_NODES": 2, "MAX_ROUNDS": 3, "GDRIVE_PATH": tmp_path}
    settings |= {"EVAL_INTERVAL": 3, "EVAL_SAMPLES": 4, "CONFIGS": "2/0 1/1", "SEEDS": "1 2"}
    done = run_command(tmp_path, *RUN_SWARM, cases="report) echo the report ;;", **settings)
    assert done.status == 0 and done.screen.endswith("\nthe report\n")
    names = ["compare_2-0_seed1", "compare_1-1_seed1", "compare_2-0_seed2", "compare_1-1_seed2"]
    pairs = [(name, role) for name in names for role in ("prepare", "worker")]
    order = [(start["EXPERIMENT_NAME"], start["NODE_ROLE"]) for start in done.starts]
    assert order == [*pairs, ("compare_*", "report")]

    # Do here what each process was asked to do. To prepare begins no experiment, and makes the warm
    # start of a seed. Nobody makes it again.
    made = []
    files = {}
    for number, start in enumerate(done.starts):
        assert start["ARGUMENTS"] == f"{ROOT}/sapo.py"
        output = output_of(None, UNSET, start)
        assert len(sapo.list_experiments(tmp_path)) == (number + 1) // 2
        made += [number] if MADE in output else []
        for path in tmp_path.glob("warmstart/*"):
            found = (path.read_bytes(), path.stat().st_mtime_ns)
            assert files.setdefault(path, found) == found
    assert made == [0, 4] and len(files) == 2

    # The report has them all.
    assert sapo.list_experiments(tmp_path) == sorted(names)
    for name in names:
        metrics = sapo.get_experiment_metrics(tmp_path, name)
        assert len(metrics) == 6
        assert {*metrics["external_groups"]} <= {0, 1 if "1-1" in name else 0}
    assert (tmp_path / "reports/report_compare.md").read_text() in output
    rows = json.loads((tmp_path / "reports/report_compare.json").read_text())
    assert sorted([row["I/J"], row["runs"]] for row in rows) == [["1/1", 2], ["2/0", 2]]
    assert all(0 <= row["held-out"] <= 1 for row in rows)


def test_U7_held_out_accuracy_disturbs_nothing_and_oversampling_is_fair(finished, tmp_path):
    # Without its held-out accuracy, a run that is evaluated equals one that is not.
    shutil.copytree(finished.drive / "warmstart", tmp_path / "warmstart")
    output_of(tmp_path, TWELVE_ROUNDS)
    evaluated = rewards_of(finished.drive)
    held_out = {row["round"]: row.pop("held_out") for row in evaluated if "held_out" in row}
    assert held_out.keys() == {3, 7, 11} and all(0 <= share <= 1 for share in held_out.values())
    assert evaluated == rewards_of(tmp_path)

    # With LOCAL_OVERSAMPLE, three times the questions are answered and informative ones come first.
    baseline = {"LOCAL_OVERSAMPLE": 3, "NUM_TRANSPLANT_TREES": 0, "EXPERIMENT_NAME": "baseline"}
    output_of(tmp_path, LEARNING, baseline)
    rows = rewards_of(tmp_path, name="baseline")
    for row in rows:
        assert (row["completions"], row["local_groups"]) == (3 * 2 * 4, 2)
        assert row["informative_groups"] == min(2, row["informative_local"])
    assert any(row["informative_local"] for row in rows)


# -------- U8: models ------------------------------------------------------------------------------


def test_U8_a_final_model_has_the_same_logits_and_the_printed_line_tries_it(finished, tmp_path):
    ids = torch.tensor([finished.run.codec.encode("Solve the following")])
    for node in finished.run.nodes:
        loaded = AutoModelForCausalLM.from_pretrained(folder_of(finished.drive, node.id) / "model")
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, node.model(ids).logits)
    line = re.findall(r"(?m)python -c .*$", finished.output)[-1]
    (start,) = run_command(tmp_path, "bash", "-c", line, cases="").starts
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(start["ARGUMENTS"].removeprefix("-c "), {})
    assert "generated_text" in output.getvalue()


def test_U8_a_model_that_contradicts_itself_is_written_and_pushed_whatever_fails(
    tmp_path, monkeypatch
):
    # Sampling settings that contradict do_sample, as those of many instruct models do.
    folder = tmp_path / "model"
    for part in grpo.build_tiny_model(["small_products"]):
        part.save_pretrained(folder)
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    settings = {"MODEL_NAME": folder, "MAX_NEW_TOKENS": 8, "NUM_SHOTS": 0, "MAX_ROUNDS": 5}
    output_of(tmp_path / "without_token", settings)

    # The same with a token. The hub is down for the first model.
    drive = tmp_path / "drive"

    class Hub(huggingface_hub.HfApi):
        def create_repo(self, repo, *, private, **_):
            assert self.token == SECRET and private
            assert rounds_of(drive, "n_1")[-1] == 4
            if repo == "default-n_0":
                raise ConnectionError(f"401 for {SECRET}")
            return SimpleNamespace(repo_id=f"me/{repo}")

        def upload_folder(self, *, repo_id, folder_path):
            shutil.copytree(folder_path, tmp_path / repo_id)  # raises an error the second time

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    output = output_of(drive, settings, HUGGINGFACE_ACCESS_TOKEN=SECRET)
    texts = events_of(drive, "n_0", "hub")
    assert all(text in output for text in texts)
    assert ["push failed" in text for text in texts] == [True, False]
    later = f"hf upload --private default-n_0 {folder_of(drive, 'n_0')}/model"
    assert later in texts[0], "the command that pushes later"

    # Each model is pushed once, if at all. Everything else is as in a run without a token.
    assert len(rewards_of(drive)) == 10 and results(drive) == results(tmp_path / "without_token")
    for node in ("n_0", "n_1"):
        assert heartbeat_of(drive, node) == "done"
        model = contents(folder_of(drive, node) / "model")
        assert model == contents(folder_of(tmp_path / "without_token", node) / "model")
        loaded = AutoModelForCausalLM.from_pretrained(folder_of(drive, node) / "model")
        written = loaded.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=True)
        assert written.shape[1] > 3
    assert model == contents(tmp_path / "me/default-n_1")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= model.keys()


@pytest.mark.parametrize("module, name, event", [
    (grpo, "save_model", "export: the model of n_0 could not be written (OSError)"),
    (coordinator, "plot", "no picture: matplotlib raised OSError"),
])  # fmt: skip
def test_U10_a_model_or_a_picture_that_cannot_be_made_is_a_sentence_and_ends_no_run(
    tmp_path, monkeypatch, module, name, event
):
    monkeypatch.setattr(module, name, Mock(side_effect=OSError("No space left on device")))
    output = output_of(tmp_path, MAX_ROUNDS=1)
    assert event in output and "Traceback" not in output
    assert "Traceback" in (folder_of(tmp_path, "n_0") / "logs/stdout.log").read_text()
    assert heartbeat_of(tmp_path, "n_0") == "done"


def test_S5_the_local_rank_chooses_one_of_several_gpus_whose_memory_its_processes_share(
    monkeypatch,
):
    devices = {"cuda": "float32", "cuda:0": "float32", "cuda:1": "float32", "cpu": "float32"}
    monkeypatch.setattr(grpo, "available_devices", lambda: devices)
    for environ, device in (
        ({"LOCAL_RANK": "3"}, "cuda:1"), ({"SLURM_LOCALID": "0"}, "cuda:0"), ({}, None),
        ({"LOCAL_RANK": "1", "DEVICE": "cpu"}, "cpu"), ({"LOCAL_RANK": "x"}, None),
    ):  # fmt: skip
        assert sapo.read_environment(environ)[0].get("DEVICE") == device
    assert [sapo.num_sharers(workers) for workers in (0, 1, 2, 3, 4)] == [1, 1, 1, 2, 2]


# -------- U9: notebooks ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A notebook's kernel. run_cell(code) runs a cell and returns its output; reset(settings…)
    forgets what cells have defined and sets the environment."""
    manager, client = start_new_kernel(cwd=str(tmp_path_factory.mktemp("notebook")))

    def run_cell(code) -> str:
        outputs = []
        reply = client.execute_interactive(code, output_hook=outputs.append, timeout=200)
        text = "\n".join(json.dumps(message["content"], default=str) for message in outputs)
        assert reply["content"]["status"] == "ok" and "Traceback" not in text, text
        return text

    def reset(**settings):
        run_cell("%reset -f")
        run_cell(f"import os\nfor name in {[*sapo.TABLE]}: os.environ.pop(name, None)")
        run_cell(f"os.environ.update({to_environ(settings)!r})")

    yield SimpleNamespace(run_cell=run_cell, reset=reset, interrupt=manager.interrupt_kernel)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_U9_one_cell_of_the_four_modules_runs_stops_like_ctrl_c_and_goes_on(tmp_path, kernel):
    modules = ("drive_store", "grpo", "coordinator", "sapo")
    program = "\n".join((ROOT / f"{name}.py").read_text() for name in modules)

    def press_stop():
        wait_until(lambda: len(rounds_of(tmp_path, "n")) >= 2)
        kernel.interrupt()

    # The stop button finishes the round, saves and says goodbye.
    settings = {"GDRIVE_PATH": tmp_path, "NUM_TRANSPLANT_TREES": 0, "MAX_ROUNDS": 10**5}
    kernel.reset(**QUICK | settings)
    kernel.run_cell("import torch; num_threads_before = torch.get_num_threads()")
    threading.Thread(target=press_stop).start()
    kernel.run_cell(program)
    last = rounds_of(tmp_path, "n")[-1]
    assert (heartbeat_of(tmp_path, "n"), checkpoint_of(tmp_path, "n")) == ("stopped", last)

    # The same cell goes on, and the functions for notebooks are there afterwards.
    kernel.run_cell(f"os.environ['MAX_ROUNDS'] = '{last + 3}'")
    kernel.run_cell(program)
    assert rounds_of(tmp_path, "n") == [*range(last + 3)]
    status = f"get_experiment_status({str(tmp_path)!r}, 'default')"
    kernel.run_cell(f"assert {status}['current_round'] == {last + 2}")

    # A run that is refused raises there, so that "Run all" does not go on.
    kernel.run_cell("os.environ['SEED'] = '7'")
    with pytest.raises(AssertionError, match="the run has ended with status 2"):
        kernel.run_cell(program)
    kernel.run_cell("assert torch.get_num_threads() == num_threads_before")


def test_U9_the_printed_cells_run_in_a_notebook_and_draw(tmp_path, kernel):
    cells = re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", PRINTED, re.DOTALL)
    names = [name for name, _ in cells]
    assert names == "swarm mount swarm coordinator worker monitor look compare".split()

    # Colab's module, and settings for a short run. run_swarm.sh finds a stand-in for python.
    settings = {"GDRIVE_PATH": tmp_path, "COORDINATOR_ROUND_INTERVAL": 1, "WARM_START_STEPS": 20}
    kernel.reset(**settings, **stand_in(tmp_path, ""), LOG_DIR=tmp_path / "logs")
    colab = "import sys; from types import SimpleNamespace as S; drive = S(mount=print)"
    kernel.run_cell(f"{colab}\nsys.modules |= {{'google': S(), 'google.colab': S(drive=drive)}}")

    cells[3:5] = cells[4:2:-1]  # the coordinator after the worker, so that it finds nothing to do
    outputs = ""
    for name, cell in cells:
        cell = re.sub("%pip.*", "", cell).replace("/content/drive/MyDrive/sapo", str(ROOT))
        cell = re.sub(r'(MAX_ROUNDS="?)\d+', rf"\g<1>{3 if name == 'swarm' else 5}", cell)
        cell = cell.replace("gpt2", "tiny").replace("3/1 2/2 1/3", "")
        cell = cell.replace("NUM_WORKERS=4", "NUM_WORKERS=2")
        outputs += kernel.run_cell(cell)
    kernel.run_cell("assert _exit_code == 0, 'run_swarm.sh has failed'")
    assert "finished; " in outputs and outputs.count("image/png") >= 2

    # Do here what the last cell asked for, the coordinator after the workers.
    starts = sorted(starts_in(tmp_path), key=lambda start: start["NODE_ROLE"] == "coordinator")
    assert len(starts) == 5
    for start in starts:
        output_of(None, UNSET, start)
    assert "five_4-0_seed1" in sapo.list_experiments(tmp_path)
