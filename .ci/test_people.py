"""Proofs of the promises to people, mostly by whole runs: U1 settings, U2 stopping, U3 and U4 the
log, U5 the readers, U6 the quick check, U7 comparisons, U8 models, U9 notebooks, and of L6, the
warm start."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from signal import SIGINT, SIGKILL
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import coordinator
import grpo
import sapo
from drive_store import DriveStore, StoreError
from test_swarm import LEARNING, QUICK, ROOT, Process, drive, experiment_dir  # noqa: F401
from test_swarm import latest_checkpoint_round, read_heartbeat, read_log, repeatable_metrics
from test_swarm import rounds_of, store_of, to_environ, wait_until

# ruff: noqa: F811, `drive` is a fixture
SECRET = "hf_NobodyMayEverSeeThisToken"
VARIABLES = {spec.name for spec in dataclasses.fields(sapo.Config)}
BASE_ENVIRON = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
BASE_ENVIRON["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def run(drive, **settings) -> int:
    """Call sapo.main with QUICK, two nodes and these settings. Returns the exit status."""
    settings = {**QUICK, "LOCAL_NODES": 2, "NODE_ID": "n", "GDRIVE_PATH": drive, **settings}
    return sapo.main(to_environ(settings))


def run_command(*arguments, **settings) -> subprocess.CompletedProcess:
    environ = BASE_ENVIRON | {"OMP_NUM_THREADS": "1"} | to_environ(settings)
    return subprocess.run(
        arguments, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def run_swarm_script(*arguments, **settings) -> subprocess.CompletedProcess:
    return run_command("bash", ROOT / "run_swarm.sh", *arguments, **settings)


def without_spaces(text: str) -> str:
    """A text in which it does not matter where lines are broken."""
    return "".join(text.split())


def has_variable(text: str) -> bool:
    """Whether it names one of the program's variables: it says what may help."""
    return bool(VARIABLES & {*re.findall(r"\w+", text)})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> SimpleNamespace:
    """A run of two nodes without a network: its folder, what it printed, its nodes and codec."""
    drive = tmp_path_factory.mktemp("finished")
    settings = LEARNING | {"MAX_ROUNDS": 12, "EVAL_INTERVAL": 4, "EVAL_SAMPLES": 8}
    output = io.StringIO()
    runs = []
    train = sapo.train

    def recording_train(run):
        runs.append(run)
        train(run)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setenv("COLUMNS", "200")  # room for all parts of a round's line
        patch.setattr(socket, "getaddrinfo", None)
        patch.setattr(sapo, "train", recording_train)
        assert run(drive, **settings) == 0
    return SimpleNamespace(
        drive=drive, output=output.getvalue(), nodes=runs[0].nodes, codec=runs[0].codec
    )


# -------- U1: settings ----------------------------------------------------------------------------


def test_U1_help_explains_every_variable_with_its_default():
    done = run_swarm_script("--help")
    assert done.returncode == 0, done.stderr
    assert "CONFIGS=" in done.stdout
    for spec in dataclasses.fields(sapo.Config):
        # The line of the variable, and those by which it is continued.
        pattern = rf"^  {spec.name} .*(?:\n {{9}}.*)*$"
        (entry,) = re.findall(pattern, done.stdout, re.MULTILINE)
        assert without_spaces(spec.metadata["help"]) in without_spaces(entry)
        assert str(spec.default)[:8] in entry


@pytest.mark.parametrize("mounted", ["", "drive", "gdrive"])
def test_U1_in_colab_a_start_finds_the_mounted_drive_or_says_that_all_is_lost(
    tmp_path, monkeypatch, capsys, mounted
):
    folders = [str(tmp_path / name / "MyDrive") for name in ("drive", "gdrive")]
    monkeypatch.setattr(sapo, "COLAB_DRIVES", folders)
    monkeypatch.chdir(tmp_path)
    if mounted:
        (tmp_path / mounted / "MyDrive").mkdir(parents=True)
    settings = {**QUICK, "COLAB_RELEASE_TAG": "release", "MAX_ROUNDS": 1, "NODE_ID": "n"}
    assert sapo.main(to_environ(settings)) == 0
    output = capsys.readouterr().out

    parent = tmp_path / mounted / "MyDrive" if mounted else tmp_path
    assert (parent / "rl-swarm/experiments/default").is_dir()
    before_training = output[: output.index("n 0/1 | reward")].splitlines()
    assert before_training[-1].endswith("drive.mount('/content/drive')") == (not mounted)


def test_U1_a_tilde_in_a_path_is_expanded():
    env, _ = sapo.read_environment({"MODEL_NAME": "~/model", "GDRIVE_PATH": "~/folder"})
    assert env["MODEL_NAME"] == str(Path.home() / "model")
    assert env["GDRIVE_PATH"] == str(Path.home() / "folder")


def test_U2_a_clone_that_converts_line_ends_leaves_run_swarm_as_it_is(tmp_path):
    for name in (".gitattributes", "run_swarm.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        assert run_command(*git, *command).returncode == 0
    clone = ["git", "clone", "-q", "-c", "core.autocrlf=true", str(tmp_path), str(tmp_path / "c")]
    assert run_command(*clone).returncode == 0
    assert b"\r" not in (tmp_path / "c/run_swarm.sh").read_bytes()


# -------- U2: stopping ----------------------------------------------------------------------------


def test_U2_a_second_ctrl_c_exits_at_once_in_the_middle_of_a_round(tmp_path, monkeypatch):
    def press_twice(*_):
        for _ in range(2):
            os.kill(os.getpid(), SIGINT)
            time.sleep(0.6)  # one key press may arrive twice within half a second
        pytest.fail("the program goes on")

    monkeypatch.setattr(sapo, "policy_gradient", press_twice)
    assert run(tmp_path) == 130
    assert not repeatable_metrics(tmp_path), "the round was finished"


def test_U2_L6_ctrl_c_in_a_warm_start_is_obeyed_at_once_and_the_next_start_waits_for_nobody(
    tmp_path, monkeypatch, capsys
):
    real_step = sapo.log_warm_start
    steps = []

    def press_in_step_three(log, signals, started, step, *more):
        steps.append(step)
        if step == 3 and len(steps) == 3:
            os.kill(os.getpid(), SIGINT)
        real_step(log, signals, started, step, *more)

    monkeypatch.setattr(sapo, "log_warm_start", press_in_step_three)
    settings = {"MAX_ROUNDS": 2, "WARM_START_STEPS": 20}
    assert run(tmp_path, **settings) == 130
    assert steps == [1, 2, 3]
    assert "\nstopping; once more to exit at once" in capsys.readouterr().out
    assert list(tmp_path.rglob("*")) == []  # what the start had made is gone again

    # Another name starts at once, also beside what older versions left or a stranger plants there.
    claim = tmp_path / "warmstart/0123456789abcdef.claim.json"
    claim.parent.mkdir(parents=True)
    claim.write_text(json.dumps({"time": time.time() + 10**6}))
    started = time.monotonic()
    assert run(tmp_path, **settings, NODE_ID="other") == 0
    assert time.monotonic() - started < 30
    assert "waits for" not in capsys.readouterr().out


def processes_of_session(leader: int) -> list[int]:
    """Ids of the running processes of a session, in any process group."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            state, _, _, session = fields[:4]
            if int(session) == leader and state not in "ZX":
                pids.append(int(path.parent.name))
    return pids


@pytest.mark.parametrize("seconds", [0.5, 3, None])
def test_U2_ctrl_c_ends_run_swarm_and_everything_that_it_started_in_order(tmp_path, seconds):
    """seconds: when Ctrl-C is pressed; None: once a worker has submitted a reward."""
    drive = tmp_path / "drive"
    log = tmp_path / "log"
    settings = {**QUICK, "GDRIVE_PATH": drive, "PYTHON": sys.executable, "NUM_WORKERS": 1}
    environ = BASE_ENVIRON | to_environ(settings) | {"VERBOSE": "1"}
    started = time.monotonic()
    with log.open("w") as output:
        swarm = subprocess.Popen(
            ["bash", ROOT / "run_swarm.sh"],
            env=environ,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        # Press Ctrl-C: a terminal sends the signal to the whole process group.
        if seconds is None:
            wait_until(lambda: rounds_of(drive, "worker_0"))
        else:
            wait_until(lambda: time.monotonic() > started + seconds)
        os.killpg(swarm.pid, SIGINT)

        # The processes that put a name before each line may need a moment more.
        assert swarm.wait(60) == 130
        wait_until(lambda: not processes_of_session(swarm.pid), 10)
    finally:
        for pid in processes_of_session(swarm.pid):
            os.kill(pid, SIGKILL)

    assert "Traceback" not in log.read_text()
    if seconds is None:
        assert latest_checkpoint_round(drive, "worker_0") == rounds_of(drive, "worker_0")[-1]
        for name in ("worker_0", "coordinator"):
            assert read_heartbeat(drive, name)["state"] == "stopped"


def test_U2_S2_run_swarm_goes_on_without_a_worker_that_was_killed_and_says_how_to_start_it_again(
    tmp_path,
):
    drive = tmp_path / "drive"
    log = tmp_path / "log"
    settings = QUICK | {"GDRIVE_PATH": drive, "NUM_WORKERS": 2, "MAX_ROUNDS": 400}
    environ = BASE_ENVIRON | to_environ(settings) | {"PYTHON": sys.executable}
    with log.open("w") as output:
        swarm = subprocess.Popen(
            ["bash", ROOT / "run_swarm.sh"],
            env=environ,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        # Kill worker_1 in the middle of the run.
        wait_until(lambda: rounds_of(drive, "worker_1")[3:])
        for pid in processes_of_session(swarm.pid):
            if b"NODE_ID=worker_1\0" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, SIGKILL)

        # The script says "stopped" in its name, and nobody waits for it: a round of an interval or
        # of STALE_AFTER_SECONDS would take minutes.
        wait_until(lambda: read_heartbeat(drive, "worker_1")["state"] == "stopped", 10)
        assert swarm.wait(150) == 1
    finally:
        for pid in processes_of_session(swarm.pid):
            os.kill(pid, SIGKILL)

    text = log.read_text()
    assert rounds_of(drive, "worker_0")[-1] == 399
    assert rounds_of(drive, "worker_1")[-1] < 390
    lines = re.findall(r"^run_swarm: worker_1 ended with exit code 137.*$", text, re.MULTILINE)
    assert len(lines) == 2, text[-2000:]  # at once, and at the end
    assert lines[0] == lines[1]
    assert f"GDRIVE_PATH={drive} EXPERIMENT_NAME=default NODE_ID=worker_1" in lines[0]
    assert "Killed" not in text


def test_U2_run_swarm_names_the_worker_that_failed_ends_the_others_and_shares_out_the_gpus(
    tmp_path,
):
    # A stand-in for Python: worker_1 fails, and the coordinator runs until it is interrupted.
    python = """#!/bin/bash
    [[ $1 != -c* ]] || exec python3 "$@"  # the script asks for packages or the number of cores
    [[ $NODE_ROLE != prepare ]] || exit 0
    case "$NODE_ID" in
    worker_1) echo "gpu ${CUDA_VISIBLE_DEVICES:-none}"; exit 7 ;;
    worker_*) echo "gpu ${CUDA_VISIBLE_DEVICES:-none}" ;;
    *) trap 'echo the coordinator was stopped; exit 130' INT; while :; do sleep 0.1; done ;;
    esac"""
    nvidia_smi = "#!/bin/sh\necho GPU 0; echo GPU 1"
    for name, text in (("python", python), ("nvidia-smi", nvidia_smi)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    path = f"{tmp_path}:{BASE_ENVIRON['PATH']}"
    done = run_swarm_script(PYTHON=tmp_path / "python", PATH=path, NUM_WORKERS=3)
    assert done.returncode == 1
    assert re.search(r"worker_1\b.*\b7\b", done.stderr), done.stdout + done.stderr
    assert "worker_0" not in done.stderr
    assert "the coordinator was stopped" in done.stdout
    lines = "\n".join(sorted(done.stdout.splitlines()))
    assert re.findall(r"gpu (\w+)", lines) == ["0", "1", "0"]


# -------- F6: joining a node that is still starting --------------------------------------------


def load_slowly(seconds=20, error=None):
    """Let this process take long to load its model, and fail then if `error` is set."""
    load_model = grpo.load_model

    def slow_load_model(*arguments):
        time.sleep(seconds)
        if error:
            raise sapo.ConfigError(error)
        return load_model(*arguments)

    grpo.load_model = slow_load_model


LOAD_AND_FAIL = functools.partial(load_slowly, 10, "no such model")


@pytest.mark.parametrize("patch", [None, load_slowly, LOAD_AND_FAIL])
def test_F6_a_node_that_joins_while_the_first_one_still_starts_gets_its_settings(drive, patch):
    # anna makes a warm start, loads slowly, or loads and fails.
    first = {"SEED": 77, "MAX_ROUNDS": 3, "WARM_START_STEPS": 0 if patch else 300}
    anna = Process(drive, "anna", **first).start(patch)
    config = experiment_dir(drive) / "config.json"
    wait_until(config.exists)

    # ben sets only GDRIVE_PATH, EXPERIMENT_NAME and NODE_ID. If anna fails, he is loading then.
    ben = Process(drive, "ben", **dict.fromkeys(QUICK), EXPERIMENT_NAME="default")
    ben.start(load_slowly if patch is LOAD_AND_FAIL else None)
    wait_until(lambda: "joining experiment default" in ben.output)
    assert not anna.is_registered()
    assert anna.wait_for_exit() == (2 if patch is LOAD_AND_FAIL else 0), anna.output
    if patch is LOAD_AND_FAIL:
        assert not config.exists()
    assert ben.wait_for_exit() == 0, ben.output

    # Both trained with anna's settings, in one experiment.
    saved = json.loads(config.read_text())
    for name, value in {**QUICK, **first}.items():
        if name in (*sapo.SWARM_SETTINGS, *sapo.MODEL_SETTINGS):
            assert saved[name] == value, name
    text = ben.output.split("from the experiment: ")[1]
    assert "SEED=77" in text
    assert "NUM_TRAIN_SAMPLES=2" in text
    assert rounds_of(drive, "ben")[-1] == 2


# -------- U3, U4: the log -------------------------------------------------------------------------


def test_U3_each_round_has_a_line_and_the_end_says_what_was_learned_and_where_the_model_is(
    finished,
):
    # A round's line shows the mean reward, and in per cent answer tags and truncated completions.
    metrics = repeatable_metrics(finished.drive)
    for t in range(12):
        rewards = [row["reward"] for (round_, *_), row in metrics.items() if round_ == t]
        (line,) = re.findall(rf"^.*\b0*{t}/12\b.*$", finished.output, re.MULTILINE)
        assert f"{sum(rewards) / 2:.2f}" in line
        assert len(re.findall(r"\d+%", line)) >= 2

    # The end: the folder of the model, the total reward of a node, a picture.
    assert str(experiment_dir(finished.drive) / "models/n_0") in finished.output
    total = sum(row["reward"] for row in metrics.values()) / 2
    assert f"{total:.2f}" in finished.output[-3000:]
    picture = finished.drive / "reports/default.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"

    # Samples: questions with the model's answers.
    events = read_log(finished.drive, "n_0/training_events.jsonl")
    samples = [row for row in events if row["event"] == "sample"]
    assert len(samples) >= 2
    answer = samples[-1]["groups"][0]["completions"][0]["response"]
    assert repr(answer)[:8] in finished.output


@pytest.mark.parametrize("beginning, rewards, informative", [
    ("learned", [0.1] * 20 + [0.2] * 20, 1),
    ("little", [0.1] * 40, 1),
    ("too few", [0.1, 0.9], 1),
    ("nothing was learned", [0] * 40, 0),
])  # fmt: skip
def test_U3_the_summary_says_whether_the_rewards_rose(beginning, rewards, informative):
    history = [{"reward": reward, "informative_groups": informative} for reward in rewards]
    assert coordinator.learning_summary(history, "all").startswith(beginning)


def test_U3_the_metrics_of_a_round_are_means_over_its_stages(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(tmp_path, **LEARNING | {"MAX_STAGES": 2, "MAX_ROUNDS": 3}) == 0
    rewards = {}
    for (round_, _, _), row in repeatable_metrics(tmp_path).items():
        rewards.setdefault(round_, []).append(row["reward"])
    printed = re.findall(
        r"^2 nodes (\d)/3 \| reward (\d\.\d\d)", capsys.readouterr().out, re.MULTILINE
    )
    assert len(printed) == 3
    for round_, reward in printed:
        assert len(rewards[int(round_)]) == 4
        assert abs(float(reward) - sum(rewards[int(round_)]) / 4) < 0.006


@pytest.mark.parametrize("settings", [
    {"NODE_ROLE": "monitor"}, {"NODE_ROLE": "report"}, {"NODE_ROLE": "validate"}, {"MAX_ROUNDS": 3},
])  # fmt: skip
def test_U1_U3_U5_no_terminal_and_no_pipe_ends_a_role_with_a_traceback(tmp_path, settings):
    assert run(tmp_path, MAX_ROUNDS=2) == 0
    settings = {**QUICK, "LOCAL_NODES": 2, "NODE_ID": "n", "GDRIVE_PATH": tmp_path, **settings}
    settings |= {"COLUMNS": 10, "PYTHONIOENCODING": "ascii"}
    command = f"set -o pipefail; {sys.executable} sapo.py"
    for reader in ("cat", "head -1", "true"):
        done = run_command("bash", "-c", f"{command} | {reader}", **settings)
        assert "Traceback" not in done.stdout + done.stderr
        assert "Exception ignored" not in done.stderr
        assert done.returncode in (0, 1), done.stdout + done.stderr  # validate finds faults


def test_U3_the_end_of_a_resumed_run_judges_the_whole_run(tmp_path, capsys):
    settings = {"CHECKPOINT_INTERVAL": 2}
    assert run(tmp_path, **settings, MAX_ROUNDS=6) == 0
    first = capsys.readouterr().out
    assert run(tmp_path, **settings, MAX_ROUNDS=11) == 0
    resumed = capsys.readouterr().out

    # Means over all 11 rounds, and the samples of the first start.
    metrics = repeatable_metrics(tmp_path)
    rewards = [[row["reward"] for key, row in metrics.items() if key[0] == t] for t in range(11)]
    means = [sum(values) / 2 for values in rewards]
    change = f"{sum(means[:6]) / 6:.2f} -> {sum(means[-6:]) / 6:.2f}"
    assert f"{change} (first and last 6 of 11 rounds)" in " ".join(resumed.split())
    samples = [output.split("what it answered at the start")[1] for output in (first, resumed)]
    before = [re.findall(r"before .*", sample) for sample in samples]
    assert before[0] == before[1]
    assert len(before[0]) == 6


def test_U3_a_process_that_waits_for_workers_says_for_how_many(drive):
    settings = {"NUM_WORKERS": 2, "COORDINATOR_ROUND_INTERVAL": 1}
    lonely = Process(drive, "coordinator", **settings).start()
    wait_until(lambda: lonely.output.count("waiting for 2 workers (none here)") >= 2)
    assert f"GDRIVE_PATH={drive} EXPERIMENT_NAME=default" in lonely.output
    assert lonely.send(SIGINT).wait_for_exit() == 130

    anna = Process(drive.parent / "other", "anna", **settings, MAX_ROUNDS=2).start()
    assert anna.wait_for_exit() == 0
    assert "for 2 workers (NUM_WORKERS), 1 are here; 1 s at most" in anna.output


def test_U1_a_start_without_packages_is_a_sentence_with_the_pip_command():
    done = run_command(sys.executable, "-S", "sapo.py", "--help")
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("\n") == 1
    assert "pip install torch transformers reasoning-gym" in done.stderr


def test_U1_a_wrong_variable_is_named_again_as_the_last_thing_before_training(tmp_path, capsys):
    assert run(tmp_path, LOCAL_NODE=3, MAX_ROUNDS=1) == 0
    output = capsys.readouterr().out
    before, _ = output.split("2 nodes 0/1")
    assert before.count("LOCAL_NODE") == 2 + before.count("LOCAL_NODES")
    assert "LOCAL_NODE is not a variable" in " ".join(before.splitlines()[-2:])


def test_U1_arguments_are_answered_with_the_command_that_was_meant():
    for arguments, meant in (
        (["MAX_ROUNDS=5"], "MAX_ROUNDS=5 python sapo.py"),
        (["monitor"], "NODE_ROLE=monitor python sapo.py"),
    ):
        done = run_command(sys.executable, "sapo.py", *arguments)
        assert done.returncode == 1
        assert done.stdout + done.stderr == f"settings are environment variables: {meant}\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_U3_a_flat_curve_is_explained_and_a_terminal_gets_a_progress_bar(
    tmp_path, monkeypatch, capsys, is_terminal
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert run(tmp_path, MAX_ROUNDS=10, NUM_TRANSPLANT_TREES=0) == 0

    events = read_log(tmp_path, "n_0/training_events.jsonl")
    (event,) = [row for row in events if row["event"] == "no signal"]
    assert has_variable(event["text"])
    screen = capsys.readouterr()
    assert without_spaces(event["text"]) in without_spaces(screen.out)
    assert ("10/10" in screen.err) == is_terminal


def test_U3_run_swarm_puts_a_name_before_each_line_and_prints_once_what_all_would_say(tmp_path):
    settings = {**QUICK, "MAX_ROUNDS": 3, "NUM_WORKERS": 2}
    done = run_swarm_script(**settings, GDRIVE_PATH=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    lines = {"prepare": [], "coordinator": [], "worker_0": [], "worker_1": []}
    for line in done.stdout.splitlines():
        if not line.startswith("run_swarm: "):
            name, text = re.fullmatch(r"\[(\w+)\] (.*)", line).groups()
            lines[name].append(text)

    # The coordinator prints the rounds; worker_0 the start, samples and its end; worker_1 its end.
    for name, expected in (("coordinator", 3), ("worker_0", 0), ("worker_1", 0)):
        assert sum("| reward" in text for text in lines[name]) == expected
        starts = [text for text in lines[name] if re.match("(new|joining) experiment", text)]
        samples = [text for text in lines[name] if text.startswith(f"{name} sample:")]
        assert bool(starts) == bool(samples) == (name == "worker_0")
    assert any(text.startswith("worker_0 end: ") for text in lines["worker_0"])
    assert lines["worker_1"][0].startswith("worker_1 end: ")
    assert all(text.startswith("  ") for text in lines["worker_1"][1:])

    # The log of each has everything.
    for name in ("worker_0", "worker_1"):
        log = (experiment_dir(tmp_path) / f"logs/{name}/stdout.log").read_text()
        assert log.count("| reward") == 3
        for text in ("experiment default", f"{name} sample:", f"{name} end: "):
            assert text in log


def test_U4_each_node_has_its_metrics_and_system_and_each_process_its_events_and_output(finished):
    # Of the process: events, and everything that it printed.
    events = read_log(finished.drive, "n_0/training_events.jsonl")
    for row in events:
        assert {"timestamp", "event", "node_id", "text"} <= row.keys()
    assert {"start", "checkpoint", "end"} <= {row["event"] for row in events}
    logs = experiment_dir(finished.drive) / "logs"
    written = (logs / "n_0/stdout.log").read_text().splitlines()
    assert {*finished.output.splitlines()} <= {*written}

    # Of each node: the metrics of every round, as in its reward files, and the system.
    metrics = repeatable_metrics(finished.drive)
    for node_id in ("n_0", "n_1"):
        rows = read_log(finished.drive, f"{node_id}/metrics.jsonl")
        assert [row["round"] for row in rows] == [*range(12)]
        for row in rows:
            assert metrics[row["round"], 0, node_id].items() <= row.items()
        total = sum(row["my_reward"] for row in rows)
        assert rows[-1]["total_reward"] == pytest.approx(total)

        system = json.loads((logs / node_id / "system_info.json").read_text())
        assert system["node_id"] == node_id
        assert system["torch"] == torch.__version__
        assert system["device"] == "cpu"


# -------- U5: the readers -------------------------------------------------------------------------


def test_U5_the_monitor_shows_living_nodes_rewards_the_latest_rollout_and_what_looks_wrong(
    drive, capsys
):
    # Before the first reward an experiment has not finished.
    store = store_of(drive, "working")
    store.open_round(0, "working")
    assert run(drive, NODE_ROLE="monitor") == 0
    assert "finished" not in capsys.readouterr().out

    # Two nodes that have exited, and a silent one.
    for node_id, state in (("gone", "stopped"), ("ended", "done")):
        session = store.register([node_id], "worker", {})
        store.write_heartbeat(node_id, session, 1, state)
    store.create(["silent"])
    store.write_atomic("peers/silent.1000000000000-00000000.json", {"node_id": "silent"})

    # Twelve rounds without any informative group.
    completion = {"response": "say 3\x1b[2J", "reward": 0.0, "finished": True}
    group = {"task": "gcd", "seed": 1, "prompt": "What is 1+1?", "answer": "2"}
    group["completions"] = [completion] * 2
    metrics = {"reward": 0.25, "timestamp": 1.0, "informative_groups": 0}
    for t in range(12):
        store.open_round(t, "working")
        store.publish_rollouts(t, 0, "working", {}, {"0": group})
        for node_id in ("working", "silent"):
            store.submit_reward(t, 0, node_id, metrics)

    assert run(drive, NODE_ROLE="monitor", MAX_ROUNDS=40) == 0
    screen = capsys.readouterr().out
    status = dict(re.findall(r"^(\w+) +(alive|dead|exited)\b", screen, re.MULTILINE))
    expected = {"working": "alive", "silent": "dead", "gone": "exited", "ended": "exited"}
    assert status == expected, screen
    assert screen.count(" 3.00") == 2, "total rewards of the two nodes"
    assert "11 of 40" in screen
    assert "1+1?" in screen
    assert "say 3" in screen
    assert "\x1b" not in screen
    assert has_variable(screen)


def write_experiment(drive, name="x", rewards=(0.25, 0.25), completions=16, **settings):
    """Write a finished experiment of two nodes. Returns its store."""
    store = DriveStore(drive, name, "by_hand")
    store.create(["n1", "n2"])
    config = {spec.name: spec.default for spec in dataclasses.fields(sapo.Config)}
    config |= {"NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4} | settings
    store.load_or_create_config(config)
    metrics = dict.fromkeys(("local_groups", "external_groups", "informative_groups"), 1)
    metrics |= {"grad_norm": 1, "completions": completions}

    for node_id in ("n1", "n2"):
        session = store.register([node_id], "worker", {})
        store.write_heartbeat(node_id, session, len(rewards), "done")
        files = ["checkpoints/n1/round_000001.safetensors", f"logs/{node_id}/metrics.jsonl"]
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            files.append(f"models/{node_id}/{file}")
        for file in files:
            store.write_atomic(file, {})

        for t, reward in enumerate(rewards):
            store.open_round(t, "n1")
            store.publish_rollouts(t, 0, node_id, {}, {})
            numbers = {"reward": reward, "reward_gcd": reward, "timestamp": 100.0 + t}
            store.submit_reward(t, 0, node_id, metrics | numbers)
    return store


def test_U5_validate_passes_a_finished_run_and_names_each_missing_thing(tmp_path, capsys):
    settings = {"NODE_ROLE": "validate", "EXPERIMENT_NAME": "x", "MAX_ROUNDS": 2}
    complete = tmp_path / "complete"
    write_experiment(complete, MAX_ROUNDS=2)
    assert run(complete, **settings) == 0

    # Delete one thing after another from a copy.
    problems = {
        "config.json": "config.json",
        "state/rounds/round_000001.n1.json": "the open round is 0",
        "progress": "rollouts",
        "rewards/n2/round_000001.stage_0.json": "n2",
        "checkpoints/n1": "checkpoint",
        "logs/n2": "metrics.jsonl",
        "models/n2/config.json": "config.json",
        "models/n2/tokenizer.json": "tokenizer.json",
        "models/n1/model.safetensors": "weights",
    }
    part = tmp_path / "part"
    for path, problem in problems.items():
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(complete, part)
        DriveStore(part, "x").delete(path)
        assert run(part, **settings) == 1, path
        assert problem in capsys.readouterr().out, path

    # More rounds or nodes are expected than there are.
    assert run(complete, **settings | {"MAX_ROUNDS": 3}) == 1
    assert run(complete, **settings | {"NUM_WORKERS": 3}) == 1


@pytest.mark.parametrize("has_packages", [True, False])
def test_U5_the_report_pairs_seeds_and_needs_no_matplotlib(
    tmp_path, monkeypatch, capsys, has_packages
):
    # Four seeds of 4/4 and of its baseline 8/0, and a run with another setting and a broken one.
    ours = (0.40, 0.44, 0.52, 0.48)
    alone = (0.20, 0.22, 0.24, 0.25)
    baseline = dict(NUM_TRAIN_SAMPLES=8, NUM_TRANSPLANT_TREES=0)
    for seed in range(4):
        rewards = [ours[seed]] * 20
        write_experiment(tmp_path, f"a{seed}", rewards, completions=16, SEED=seed)
        rewards = [alone[seed]] * 20
        write_experiment(tmp_path, f"b{seed}", rewards, completions=32, SEED=seed, **baseline)
    write_experiment(tmp_path, "other", [0.01] * 20, LOSS_TYPE="grpo")
    write_experiment(tmp_path, "broken").delete("config.json")
    if not has_packages:
        for name in ("matplotlib.figure", "pandas"):
            monkeypatch.setitem(sys.modules, name, None)

    # A pattern that fits no experiment shows nothing.
    environ = {"NODE_ROLE": "report", "GDRIVE_PATH": str(tmp_path)}
    assert sapo.main(environ | {"EXPERIMENT_NAME": "no_*"}) == 1
    assert sapo.main(environ) == 0
    output = capsys.readouterr().out

    # Worked by hand: the logarithms of the four ratios have the mean 0.7029 and the standard error
    # 0.02532, and Student's t of 3 degrees of freedom is 3.182.
    best = sapo.compare_experiments(tmp_path)[0]
    interval = [best[name] for name in ("low", "gain", "high")]
    assert interval == pytest.approx([0.863, 1.020, 1.189], abs=1e-3)
    assert best["per_node"] == pytest.approx(20 * 0.46)
    assert len(best["runs"]) == 4
    assert best["completions"] == 320

    # The table. Runs that differ in more than their seed are never averaged.
    table = (tmp_path / "reports/report_all.md").read_text()
    assert table in output
    assert max(map(len, table.splitlines())) <= 80
    rows = json.loads((tmp_path / "reports/report_all.json").read_text())
    assert rows == json.loads(json.dumps(sapo.compare_experiments(tmp_path)))
    for text in ("+102% (+86% to +119%)", "9.20", "4.55", "LOSS_TYPE=grpo", "little was learned"):
        assert text in table
    assert "SEED" not in table
    assert re.search(r"^gcd +0.46 +0.23 +0.01$", table, re.MULTILINE)

    # Without matplotlib and pandas there is no picture, and metrics come as a list.
    assert (tmp_path / "reports/report_all.png").exists() == has_packages
    assert ("matplotlib" in output) == (not has_packages)
    assert isinstance(sapo.get_experiment_metrics(tmp_path, "a0"), list) == (not has_packages)


def test_U5_the_functions_for_notebooks_return_what_is_in_the_folder(tmp_path):
    store = write_experiment(tmp_path)
    assert sapo.get_experiment_status(tmp_path, "x") == {
        "experiment": "x", "current_round": 1, "current_stage": 0, "num_active_peers": 0,
        "peer_ids": ["n1", "n2"], "last_updated": 101.0, "duration_seconds": 1.0,
        "cumulative_rewards": {"n1": 0.5, "n2": 0.5},
        "latest_checkpoint": str(store.experiment_dir / "checkpoints/n1/round_000001.safetensors"),
    }  # fmt: skip
    assert sapo.list_experiments(tmp_path) == ["x"]
    assert sapo.list_experiments(tmp_path / "no") == []

    # A name that does not exist is an error that names those that do.
    for function in (sapo.get_experiment_status, sapo.get_experiment_metrics):
        with pytest.raises(StoreError, match="no experiment 'nosuch'.*there are: x"):
            function(tmp_path, "nosuch")

    metrics = sapo.get_experiment_metrics(tmp_path, "x")
    rows = metrics[["round", "node_id", "my_reward"]].values.tolist()
    assert rows == [[0, "n1", 0.25], [0, "n2", 0.25], [1, "n1", 0.25], [1, "n2", 0.25]]


# -------- U6, U7: the quick check, comparisons ----------------------------------------------------


def test_U6_test_mode_shows_information_externals_and_a_gradient_in_a_minute(tmp_path):
    settings = to_environ({"TEST_MODE": 1, "GDRIVE_PATH": tmp_path, "LOCAL_NODES": 2})
    started = time.process_time()  # a minute where nothing else runs
    assert sapo.main(settings) == 0
    assert time.process_time() < started + 60

    metrics = repeatable_metrics(tmp_path)
    for name in ("informative_groups", "external_groups", "grad_norm"):
        assert any(row[name] for row in metrics.values()), name
    assert sapo.main(settings | {"NODE_ROLE": "validate"}) == 0


def test_U6_test_mode_of_a_real_model_is_small_too():
    environ = {"TEST_MODE": True, "GDRIVE_PATH": ".", "NODE_ID": "n", "MODEL_NAME": "gpt2"}
    config = sapo.resolve_config(environ, {}, [])
    assert config.TASKS.split(",") == list(grpo.TINY_TASKS)
    assert (config.MAX_NEW_TOKENS, config.WARM_START_STEPS, config.MAX_ROUNDS) == (32, 40, 3)
    config = sapo.resolve_config(environ | {"MAX_NEW_TOKENS": 99}, {}, [])
    assert config.MAX_NEW_TOKENS == 99


def test_L4_U5_a_finished_swarm_teaches_a_node_that_generates_nothing(finished, tmp_path, capsys):
    """The README's recipe, after a short run and with fewer rounds."""
    recipe = (ROOT / "README.md").read_text().split("<!-- teach -->\n```bash\n")[1].split("```")[0]
    recipe = recipe.replace("MAX_ROUNDS=120 EVAL_INTERVAL=20", "MAX_ROUNDS=11 EVAL_INTERVAL=1")
    recipe = recipe.replace("python sapo.py", f"{sys.executable} {ROOT}/sapo.py")
    experiments = tmp_path / "rl-swarm/experiments"
    shutil.copytree(finished.drive, tmp_path / "rl-swarm")
    shutil.move(experiments / "default", experiments / "one")
    settings = {name: LEARNING[name] for name in ("ANSWER_TAG_SHARE", "LEARNING_RATE")}
    settings |= {
        "WARM_START_STEPS": 60,
        "TASKS": QUICK["TASKS"],
        "EVAL_SAMPLES": 8,
        "DEVICE": "cpu",
    }
    environ = BASE_ENVIRON | to_environ(settings)
    done = subprocess.run(
        ["bash", "-euc", recipe], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"pupil 05/11 \| .*held-out 0\.\d\d \| 0 own \+ [1-8] peer groups", done.stdout
    )
    assert re.search(
        r"held-out accuracy of pupil .* of 11 measurements", " ".join(done.stdout.split())
    )

    # Nothing was generated, and yet it was trained; each reward file counts as submitted.
    store = DriveStore(tmp_path / "rl-swarm", "school")
    rows = store.read_rewards(5, ["pupil"], 1)
    assert [row["reward"] for row in rows] == [None]
    assert rows[0]["completions"] == 0
    assert rows[0]["external_groups"] > 0
    assert rows[0]["grad_norm"] > 0
    assert not store.fetch_rollouts(5, 0, "pupil")
    readers = {"GDRIVE_PATH": str(tmp_path / "rl-swarm"), "EXPERIMENT_NAME": "school"}
    for role in ("validate", "monitor", "report"):
        assert sapo.main(readers | {"NODE_ROLE": role}) == 0, role
    assert "0/8" in capsys.readouterr().out

    # Who taught whom: the report draws what the log says.
    row = json.loads((experiments / "school/logs/pupil/metrics.jsonl").read_text().splitlines()[5])
    assert len(row["teachers"]) == row["external_groups"]
    assert {peer for peer, _ in row["teachers"]} <= {"n_0", "n_1"}
    picture = tmp_path / "rl-swarm/reports/report_school_teachers.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"

    # Without own questions and without peers there is nothing to train on.
    settings = {"GDRIVE_PATH": tmp_path / "new", "NODE_ID": "n", "NUM_TRAIN_SAMPLES": 0}
    assert sapo.main(to_environ(settings | {"MODEL_NAME": "tiny"})) == 2
    assert "nothing to train on" in capsys.readouterr().out


def test_U7_run_swarm_runs_configs_and_seeds_one_after_another_and_reports_them(tmp_path):
    settings = {**QUICK, "LOCAL_NODES": 2, "MAX_ROUNDS": 3, "EVAL_INTERVAL": 3, "EVAL_SAMPLES": 4}
    settings |= {"CONFIGS": "2/0 1/1", "SEEDS": "1 2"}
    done = run_swarm_script(**settings, GDRIVE_PATH=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr

    names = ["compare_1-1_seed1", "compare_1-1_seed2", "compare_2-0_seed1", "compare_2-0_seed2"]
    assert sapo.list_experiments(tmp_path) == names
    for name in names:
        metrics = sapo.get_experiment_metrics(tmp_path, name)
        assert len(metrics) == 6
        most = 1 if "1-1" in name else 0
        assert {*metrics["external_groups"]} <= {0, most}

    table = (tmp_path / "reports/report_compare.md").read_text()
    assert table in done.stdout
    assert re.search("experiment 4 of 4: compare_1-1_seed2; about 1 minutes left", done.stdout)
    assert {*re.findall(r"^ *(\d/\d) +2 ", table, re.MULTILINE)} == {"2/0", "1/1"}


def test_U7_held_out_accuracy_disturbs_nothing_and_oversampling_is_a_fair_baseline(
    tmp_path, finished
):
    # Without its held-out accuracy, a run that is evaluated equals one that is not.
    shutil.copytree(finished.drive / "warmstart", tmp_path / "warmstart")
    assert run(tmp_path, **LEARNING | {"MAX_ROUNDS": 12}) == 0
    evaluated = repeatable_metrics(finished.drive)
    held_out = {}
    for (round_, *_), row in evaluated.items():
        if "held_out" in row:
            held_out[round_] = row.pop("held_out")
    assert held_out.keys() == {3, 7, 11}
    assert all(0 <= share <= 1 for share in held_out.values())
    assert evaluated == repeatable_metrics(tmp_path)

    # With LOCAL_OVERSAMPLE, three times the questions are answered and informative ones come first.
    shutil.rmtree(experiment_dir(tmp_path))
    baseline = {"MAX_ROUNDS": 4, "LOCAL_OVERSAMPLE": 3, "NUM_TRANSPLANT_TREES": 0}
    assert run(tmp_path, **LEARNING | baseline) == 0
    metrics = repeatable_metrics(tmp_path)
    for row in metrics.values():
        assert row["completions"] == 3 * 4 * 4
        assert row["local_groups"] == 4
        assert row["informative_groups"] == min(4, row["informative_local"])
    assert any(row["informative_local"] for row in metrics.values())


# -------- U8: models ------------------------------------------------------------------------------


def test_U8_a_final_model_is_an_ordinary_folder_with_the_same_logits_and_the_printed_line_tries_it(
    finished,
):
    ids = torch.tensor([finished.codec.encode("Solve the following")])
    for node in finished.nodes:
        folder = experiment_dir(finished.drive) / "models" / node.id
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, node.model(ids).logits)

    line = re.findall(r"python -c .*$", finished.output, re.MULTILINE)[-1]
    done = run_command("bash", "-c", line)
    assert done.returncode == 0, done.stderr
    assert "generated_text" in done.stdout


def test_U8_a_model_with_a_generation_config_that_contradicts_itself_is_exported(tmp_path):
    # Its sampling settings contradict do_sample, as those of many instruct models do.
    model, tokenizer = grpo.build_tiny_model(["small_products"])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(settings))

    # Its whole life: training, export, and what it says afterwards.
    drive = tmp_path / "drive"
    more = {"MODEL_NAME": tmp_path / "model", "MAX_NEW_TOKENS": 8, "MAX_ROUNDS": 2}
    assert run(drive, **more, NUM_SHOTS=0) == 0
    folder = experiment_dir(drive) / "models/n_0"
    ids = torch.tensor([tokenizer("4 * 1?").input_ids])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.generate(ids, max_new_tokens=4, do_sample=True).shape[1] > ids.shape[1]


def test_U8_F2_a_disk_that_is_full_when_the_model_is_exported_is_an_outage(
    tmp_path, monkeypatch, capsys
):
    works = GPT2LMHeadModel.save_pretrained
    failures = [SafetensorError("Error while serializing: No space left on device")] * 2

    def fail_twice(model, folder, **more):
        assert tmp_path in Path(folder).parents, "it is written elsewhere first"
        if failures:
            raise failures.pop()
        return works(model, folder, **more)

    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", fail_twice)
    assert run(tmp_path, MAX_ROUNDS=2) == 0
    output = capsys.readouterr().out
    assert not failures
    assert output.count("outage: the shared folder fails (Error while serializing") == 1
    assert output.count("outage over") == 1
    for node_id in ("n_0", "n_1"):
        AutoModelForCausalLM.from_pretrained(experiment_dir(tmp_path) / "models" / node_id)


@pytest.mark.parametrize("is_down", [False, True])
def test_U8_models_are_pushed_once_at_the_end_and_a_push_that_fails_changes_nothing_else(
    tmp_path, monkeypatch, capfd, is_down
):
    drive = tmp_path / "drive"
    last_reward = experiment_dir(drive) / "rewards/n_1/round_000004.stage_0.json"
    pushes = []

    class Hub(huggingface_hub.HfApi):
        def whoami(self):
            assert self.token == SECRET
            if is_down:
                raise ConnectionError(f"401 for {SECRET}")
            return {"name": "me"}

        def create_repo(self, *_, **__):
            pass

        def upload_folder(self, *, repo_id, folder_path, **_):
            push = SimpleNamespace(repo=repo_id, folder=Path(folder_path))
            push.files = {path.name for path in push.folder.iterdir()}
            push.in_main_thread = threading.current_thread() is threading.main_thread()
            push.after_last_reward = last_reward.exists()
            pushes.append(push)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert run(drive, MAX_ROUNDS=5, HUGGINGFACE_ACCESS_TOKEN=SECRET) == 0
    screen = capfd.readouterr()
    events = read_log(drive, "n_0/training_events.jsonl")
    (event,) = [row for row in events if row["event"] == "hub"]
    assert without_spaces(event["text"]) in without_spaces(screen.out)

    # Each node's model is pushed once, from where it lies, after the last round.
    if is_down:
        assert pushes == []
        assert "push failed" in event["text"]
    else:
        assert "push failed" not in event["text"]
        assert [push.repo for push in pushes] == ["me/default-n_0", "me/default-n_1"]
        for push in pushes:
            node_id = push.repo.removeprefix("me/default-")
            assert push.folder == experiment_dir(drive) / "models" / node_id
            assert {"config.json", "model.safetensors", "tokenizer.json"} <= push.files
            assert push.in_main_thread
            assert push.after_last_reward

    # Everything else is as in a run without a token.
    without = tmp_path / "without_token"
    assert run(without, MAX_ROUNDS=5) == 0
    assert len(repeatable_metrics(drive)) == 10
    assert repeatable_metrics(drive) == repeatable_metrics(without)
    for node_id in ("n_0", "n_1"):
        assert read_heartbeat(drive, node_id)["state"] == "done"
        model = f"models/{node_id}/model.safetensors"
        pushed = (experiment_dir(drive) / model).read_bytes()
        assert pushed == (experiment_dir(without) / model).read_bytes()

    # The token is nowhere.
    texts = [*screen]
    for path in drive.rglob("*"):
        if path.is_file():
            texts.append(path.read_text(errors="replace"))
    assert not any(SECRET[3:] in text for text in texts)


# -------- U9: notebooks ---------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path):
    """A notebook's kernel. run_cell(code, settings…) runs a cell; `outputs` holds all output."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    outputs = []

    def record(message):
        outputs.append(json.dumps(message["content"], default=str))

    def run_cell(code, **settings):
        code = f"import os; os.environ.update({to_environ(settings)!r})\n{code}"
        reply = client.execute_interactive(code, output_hook=record, timeout=120)
        assert reply["content"]["status"] == "ok", outputs
        assert "Traceback" not in "".join(outputs), outputs

    yield SimpleNamespace(run_cell=run_cell, outputs=outputs, interrupt=manager.interrupt_kernel)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_U9_one_cell_of_the_four_modules_runs_stops_like_ctrl_c_and_goes_on(tmp_path, kernel):
    modules = ("drive_store", "grpo", "coordinator", "sapo")
    program = "\n".join((ROOT / f"{name}.py").read_text() for name in modules)

    def press_stop():
        wait_until(lambda: len(rounds_of(tmp_path, "n")) >= 2)
        kernel.interrupt()

    # The stop button finishes the round, saves and says goodbye.
    threading.Thread(target=press_stop).start()
    settings = QUICK | {"GDRIVE_PATH": tmp_path, "NODE_ID": "n", "NUM_TRANSPLANT_TREES": 0}
    kernel.run_cell(program, **settings)
    last = rounds_of(tmp_path, "n")[-1]
    assert latest_checkpoint_round(tmp_path, "n") == last
    assert read_heartbeat(tmp_path, "n")["state"] == "stopped"

    # The same cell goes on, and the functions for notebooks are there afterwards.
    kernel.run_cell(program, MAX_ROUNDS=last + 3)
    assert rounds_of(tmp_path, "n") == [*range(last + 3)]
    status = f"get_experiment_status({str(tmp_path)!r}, 'default')"
    kernel.run_cell(f"assert {status}['current_round'] == {last + 2}")


def test_U9_the_printed_cells_run_in_a_notebook_and_draw(tmp_path, kernel):
    text = (ROOT / "README.md").read_text() + (ROOT / ".github/MANUAL.md").read_text()
    cells = re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", text, re.DOTALL)
    names = [name for name, _ in cells]
    assert names == "swarm mount swarm coordinator worker monitor look compare".split()

    # Colab's module, and settings for a short run.
    colab = "import sys; from types import SimpleNamespace as S; drive = S(mount=print)"
    kernel.run_cell(f"{colab}\nsys.modules |= {{'google': S(), 'google.colab': S(drive=drive)}}")
    kernel.run_cell("", GDRIVE_PATH=tmp_path, WARM_START_STEPS=20, PYTHONPATH=ROOT)

    for name, cell in cells:
        if name in ("coordinator", "compare"):
            continue
        cell = re.sub("%pip.*", "", cell).replace("/content/drive/MyDrive/sapo", str(ROOT))
        max_rounds = 3 if name == "swarm" else 5
        kernel.run_cell(re.sub(r'MAX_ROUNDS="\d+"', f'MAX_ROUNDS="{max_rounds}"', cell))
    outputs = "".join(kernel.outputs)
    assert "finished; " in outputs
    assert outputs.count("image/png") >= 2


# -------- L6: the warm start ----------------------------------------------------------------------

FROZEN = {  # a node's final model is its warm start
    "WARM_START_STEPS": 60, "MAX_ROUNDS": 1, "LEARNING_RATE": 0, "LOCAL_NODES": 1,
}  # fmt: skip
MADE = "60/60"  # a process that makes the warm start counts its steps


def warm_starts(drive: Path) -> list[Path]:
    """The files in warmstart/, all of which must be warm starts."""
    paths = sorted((drive / "warmstart").iterdir())
    assert all(path.suffix == ".safetensors" for path in paths), paths
    return paths


def assert_model_is(drive: Path, node_id: str, warm_start: Path):
    """The node's final model has the weights of this warm start."""
    model = load_file(experiment_dir(drive) / f"models/{node_id}/model.safetensors")
    weights = load_file(warm_start)
    assert weights.keys() <= model.keys()
    for name, tensor in weights.items():
        assert torch.equal(model[name], tensor), name


def test_L6_processes_that_start_together_go_on_with_the_same_warm_start_and_later_ones_load_it(
    drive,
):
    # Each of the three may make the warm start, but they end with one file.
    processes = [Process(drive, name, **FROZEN).start() for name in "abc"]
    assert [process.wait_for_exit() for process in processes] == [0] * 3
    assert any(MADE in process.output for process in processes)
    (warm_start,) = warm_starts(drive)
    for name in "abc":
        assert_model_is(drive, name, warm_start)

    # A later process loads it.
    before = warm_start.read_bytes()
    later = Process(drive, "d", **FROZEN).start()
    assert later.wait_for_exit() == 0
    assert MADE not in later.output
    assert warm_start.read_bytes() == before
    assert_model_is(drive, "d", warm_start)

    # Another seed needs another warm start.
    other = Process(drive, "e", **FROZEN, EXPERIMENT_NAME="other", SEED=4).start()
    assert other.wait_for_exit() == 0
    assert MADE in other.output
    assert len(warm_starts(drive)) == 2


def test_L6_of_two_workers_that_find_no_warm_start_the_slower_one_loads_the_others_file(
    tmp_path, monkeypatch
):
    """Their weights differ, as they may on machines that round differently. In the end both have
    those of the file."""
    real_warm_start = grpo.warm_start
    calls = []

    def warm_start(model, *arguments, **more):
        real_warm_start(model, *arguments, **more)
        calls.append(model)
        if len(calls) == 1:
            # While the slower one works, the faster one starts, finds no file and finishes.
            assert run(tmp_path, **FROZEN | {"NODE_ID": "faster"}) == 0
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)

    monkeypatch.setattr(grpo, "warm_start", warm_start)
    assert run(tmp_path, **FROZEN | {"NODE_ID": "slower"}) == 0
    assert len(calls) == 2
    (path,) = warm_starts(tmp_path)
    for node_id in ("faster", "slower"):
        assert_model_is(tmp_path, node_id, path)


def test_L6_prepare_makes_the_warm_start_once_and_begins_no_experiment(tmp_path, capsys):
    assert run(tmp_path, **FROZEN, NODE_ROLE="prepare") == 0
    assert MADE in capsys.readouterr().out
    (path,) = warm_starts(tmp_path)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    assert sapo.list_experiments(tmp_path) == []

    # It is not made again, neither by prepare nor by a worker.
    assert run(tmp_path, **FROZEN, NODE_ROLE="prepare") == 0
    assert run(tmp_path, **FROZEN) == 0
    assert MADE not in capsys.readouterr().out
    assert warm_starts(tmp_path) == [path]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert_model_is(tmp_path, "n", path)


def test_L6_run_swarm_prepares_the_warm_start_once_and_its_workers_only_load_it(tmp_path):
    drive = tmp_path / "drive"
    settings = {**QUICK, **FROZEN, "NUM_WORKERS": 2, "VERBOSE": 1}
    done = run_swarm_script(**settings, GDRIVE_PATH=drive, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr

    # It is made by prepare, before anything else is started.
    lines = done.stdout.splitlines()
    (made,) = [i for i, line in enumerate(lines) if MADE in line]
    assert lines[made].startswith("[prepare] ")
    others = [i for i, line in enumerate(lines) if re.match(r"\[(coordinator|worker_\d)\]", line)]
    assert made < min(others)

    (warm_start,) = warm_starts(drive)
    for node_id in ("worker_0", "worker_1"):
        log = experiment_dir(drive) / f"logs/{node_id}/stdout.log"
        assert MADE not in log.read_text()
        assert_model_is(drive, node_id, warm_start)


def test_L6_if_the_model_cannot_be_prepared_run_swarm_says_so_and_starts_nothing_else(tmp_path):
    drive = tmp_path / "drive"
    settings = {**QUICK, "MODEL_NAME": "no/such model", "NUM_WORKERS": 2}
    done = run_swarm_script(**settings, GDRIVE_PATH=drive, PYTHON=sys.executable)
    assert done.returncode == 1
    assert re.search(r"^\[prepare\] .*MODEL_NAME='no/such model'", done.stdout, re.MULTILINE)
    assert "prepare ended with exit code 2" in done.stderr
    assert not re.search(r"\[(coordinator|worker_\d)\]", done.stdout + done.stderr)
    assert not drive.exists()
