"""Proofs of the promises to people, mostly by whole runs: U1 settings, U2 stopping, U3 and U4 the
log, U5 the readers, U6 the quick check, U7 comparisons, U8 models, U9 notebooks; of L6, the warm
start; and of F6, joining while another node starts."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
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
from drive_store import LAYOUT, DriveStore, StoreError
from test_swarm import LEARNING, QUICK, Process, drive, read_heartbeat, repeatable_metrics  # noqa: F401
from test_swarm import rounds_of, to_environ, wait_until

# ruff: noqa: F811, `drive` is a fixture
ROOT = Path(__file__).resolve().parent.parent
TWELVE_ROUNDS = LEARNING | {"MAX_ROUNDS": 12, "MAX_STAGES": 2}
SECRET = "hf_NobodyMayEverSeeThisToken"
BASE_ENVIRON = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
BASE_ENVIRON["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def experiment_dir(drive: Path) -> Path:
    return drive / "experiments/default"


def latest_checkpoint_round(drive: Path, process: str) -> int | None:
    paths = experiment_dir(drive).glob(f"nodes/{process}/checkpoints/*.safetensors")
    return max((int(path.name[6:12]) for path in paths), default=None)


def read_log(drive: Path, log: str) -> list[dict]:
    """The rows of a log, such as "n_0/metrics.jsonl"."""
    node_id, name = log.split("/")
    text = (experiment_dir(drive) / "nodes" / node_id / "logs" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def run(drive, **settings) -> int:
    """Call sapo.main with QUICK, two nodes and these settings. Returns the exit status."""
    settings = {**QUICK, "LOCAL_NODES": 2, "NODE_ID": "n", "GDRIVE_PATH": drive, **settings}
    return sapo.main(to_environ(settings))


def run_command(*arguments, folder=ROOT, **settings) -> subprocess.CompletedProcess:
    environ = BASE_ENVIRON | {"OMP_NUM_THREADS": "1"} | to_environ(settings)
    return subprocess.run(
        arguments, env=environ, cwd=folder, capture_output=True, text=True, timeout=300
    )


def run_swarm_script(*arguments, **settings) -> subprocess.CompletedProcess:
    settings = {"PYTHON": sys.executable, **settings}
    return run_command("bash", ROOT / "run_swarm.sh", *arguments, **settings)


def printed(marker: str) -> str:
    """What stands after this marker in README or MANUAL: a command or a recipe."""
    text = (ROOT / "README.md").read_text() + (ROOT / ".github/MANUAL.md").read_text()
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", text, re.DOTALL)[1]


def without_spaces(text: str) -> str:
    """A text in which it does not matter where lines are broken."""
    return "".join(text.split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> SimpleNamespace:
    """A run of two nodes and two stages without a network: its folder, output and Run."""
    drive = tmp_path_factory.mktemp("finished")
    settings = TWELVE_ROUNDS | {"EVAL_INTERVAL": 4, "EVAL_SAMPLES": 8}
    output = io.StringIO()
    runs = []
    train = sapo.train

    def recording_train(run):
        runs.append(run)
        train(run)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(socket, "getaddrinfo", None)
        patch.setattr(sapo, "SAMPLE_INTERVAL", 5)
        patch.setattr(sapo, "train", recording_train)
        assert run(drive, **settings) == 0, output.getvalue()
    return SimpleNamespace(drive=drive, output=output.getvalue(), run=runs[0])


# -------- U1: settings ----------------------------------------------------------------------------


def test_U1_help_explains_every_variable_with_its_default():
    done = run_swarm_script("--help")
    assert done.returncode == 0, done.stderr
    assert "CONFIGS=" in done.stdout
    for name, row in sapo.TABLE.items():
        # The line of the variable, and those by which it is continued.
        pattern = rf"^  {name} .*(?:\n {{9}}.*)*$"
        (entry,) = re.findall(pattern, done.stdout, re.MULTILINE)
        assert without_spaces(row.metadata["help"]) in without_spaces(entry)
        default = "auto" if name == "TASKS" else str(row.default)
        assert default[:8] in entry


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

    parent = tmp_path / mounted / "MyDrive" if mounted else tmp_path
    assert (parent / "rl-swarm/experiments/default").is_dir()
    before_training, _, _ = capsys.readouterr().out.partition("n 0/1 reward")
    assert ("drive.mount('/content/drive')" in before_training) == (not mounted)


def test_U1_a_start_without_packages_is_a_sentence_with_the_pip_command():
    done = run_command(sys.executable, "-S", "sapo.py", "--help")
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("\n") == 1
    assert "pip install torch transformers reasoning-gym" in done.stderr


def test_U1_arguments_are_answered_with_how_settings_are_given():
    done = run_command(sys.executable, "sapo.py", "monitor")
    assert done.returncode == 2
    answer = done.stdout + done.stderr
    assert "environment variables, such as MAX_ROUNDS=5 python sapo.py" in answer
    assert answer.count("\n") == 1


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
    real_warm_start = grpo.warm_start
    steps = []

    def interrupted_warm_start(model, codec, config, tasks, progress):
        def press_in_step_three(step, *more):
            steps.append(step)
            if len(steps) == 3:
                os.kill(os.getpid(), SIGINT)
            progress(step, *more)

        real_warm_start(model, codec, config, tasks, press_in_step_three)

    monkeypatch.setattr(grpo, "warm_start", interrupted_warm_start)
    settings = {"MAX_ROUNDS": 2, "WARM_START_STEPS": 20}
    assert run(tmp_path, **settings) == 130
    assert steps == [1, 2, 3]
    output = capsys.readouterr().out
    assert "\nstopping" in output
    assert "to go on:" in output
    assert warm_starts(tmp_path) == []

    # Another name starts at once.
    started = time.monotonic()
    assert run(tmp_path, **settings, NODE_ID="other") == 0
    assert time.monotonic() - started < 25
    assert rounds_of(tmp_path, "other_1") == [0, 1]


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


@contextlib.contextmanager
def running_swarm(folder: Path, **settings):
    """run_swarm.sh with QUICK, in a session of its own, as a terminal starts it. It must end and
    leave no process behind. Its output is in folder/screen."""
    settings = {**QUICK, "GDRIVE_PATH": folder / "drive", "LOG_DIR": folder / "logs", **settings}
    environ = BASE_ENVIRON | to_environ(settings) | {"PYTHON": sys.executable}
    with (folder / "screen").open("w") as screen:
        swarm = subprocess.Popen(
            ["bash", ROOT / "run_swarm.sh"],
            env=environ,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            # This process may have been started with SIGINT ignored, as `cmd &` in a shell is.
            preexec_fn=lambda: signal.signal(SIGINT, signal.SIG_DFL),
        )
    try:
        yield swarm
        # The processes that put a name before each line may need a moment more.
        wait_until(lambda: not processes_of_session(swarm.pid), 10)
    finally:
        for pid in processes_of_session(swarm.pid):
            os.kill(pid, SIGKILL)


@pytest.mark.parametrize("seconds", [0.5, 3, None])
def test_U2_ctrl_c_ends_run_swarm_and_everything_that_it_started_in_order(tmp_path, seconds):
    """seconds: when Ctrl-C is pressed; None: once a worker has submitted a reward."""
    drive = tmp_path / "drive"
    with running_swarm(tmp_path, NUM_WORKERS=2) as swarm:
        # Press Ctrl-C: a terminal sends the signal to the whole process group.
        if seconds is None:
            wait_until(lambda: rounds_of(drive, "worker_0") and rounds_of(drive, "worker_1"))
        else:
            time.sleep(seconds)
        os.killpg(swarm.pid, SIGINT)
        assert swarm.wait(60) == 130, (tmp_path / "screen").read_text()

    texts = [path.read_text() for path in (tmp_path / "screen", *tmp_path.glob("logs/*"))]
    assert not any("Traceback" in text for text in texts)
    if seconds is None:
        for name in ("worker_0", "worker_1"):
            assert latest_checkpoint_round(drive, name) == rounds_of(drive, name)[-1]
            log = (tmp_path / f"logs/{name}.log").read_text()
            assert re.search(rf"to go on:\s.*\bNODE_ID={name}\b.* python sapo.py", log)
        for name in ("worker_0", "worker_1", "coordinator"):
            assert read_heartbeat(drive, name)["state"] == "stopped"


def test_U2_S2_run_swarm_goes_on_without_a_worker_that_was_killed_and_says_how_to_start_it_again(
    tmp_path,
):
    drive = tmp_path / "drive"
    with running_swarm(tmp_path, NUM_WORKERS=2, MAX_ROUNDS=150) as swarm:
        # Kill worker_1 in the middle of the run.
        wait_until(lambda: rounds_of(drive, "worker_1")[3:])
        for pid in processes_of_session(swarm.pid):
            if b"NODE_ID=worker_1\0" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, SIGKILL)

        # The script says "failed" in its name, and nobody waits for it: a round of an interval or
        # of STALE_AFTER_SECONDS would take minutes.
        wait_until(lambda: read_heartbeat(drive, "worker_1")["state"] == "failed", 15)
        assert swarm.wait(150) == 1

    assert rounds_of(drive, "worker_0")[-1] == 149
    assert rounds_of(drive, "worker_1")[-1] < 140
    screen = (tmp_path / "screen").read_text()
    assert re.search(r"^run_swarm: worker_1 .*\b137\b", screen, re.MULTILINE), screen[-2000:]
    (command,) = re.findall(r".*\bNODE_ID=worker_1 .*python sapo\.py$", screen, re.MULTILINE)
    assert {f"GDRIVE_PATH={drive}", "EXPERIMENT_NAME=default"} <= {*command.split()}
    assert "Killed" not in screen


def test_U2_run_swarm_names_the_worker_that_failed_ends_the_others_and_shares_out_the_gpus(
    tmp_path,
):
    # A stand-in for Python: worker_1 fails, and the coordinator runs until it is interrupted.
    python = """#!/bin/bash
    [[ $1 != -c* ]] || exec python3 "$@"  # the script asks for the number of cores
    [[ $NODE_ROLE != prepare ]] || exit 0
    case "$NODE_ID" in
    worker_1) echo "gpu ${CUDA_VISIBLE_DEVICES:-none}"; echo "no such luck"; exit 7 ;;
    worker_*) echo "gpu ${CUDA_VISIBLE_DEVICES:-none}" ;;
    *) trap 'echo the coordinator was stopped; exit 130' INT; while :; do sleep 0.1; done ;;
    esac"""
    nvidia_smi = "#!/bin/sh\necho GPU 0; echo GPU 1"
    for name, text in (("python", python), ("nvidia-smi", nvidia_smi)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    path = f"{tmp_path}:{BASE_ENVIRON['PATH']}"
    more = {"NUM_WORKERS": 3, "LOG_DIR": tmp_path / "logs", "GDRIVE_PATH": tmp_path / "drive"}
    done = run_swarm_script(PYTHON=tmp_path / "python", PATH=path, **more)
    screen = done.stdout + done.stderr
    assert done.returncode == 1
    (line,) = [line for line in screen.splitlines() if re.match(r"run_swarm: worker_\d ", line)]
    assert re.search(r"worker_1\b.*\b7\b", line)
    assert "no such luck" in screen, "the end of its log is not shown"
    assert "the coordinator was stopped" in screen
    logs = [(tmp_path / f"logs/worker_{i}.log").read_text() for i in range(3)]
    assert [re.findall(r"gpu (\w+)", log) for log in logs] == [["0"], ["1"], ["0"]]


# -------- F6: joining a node that is still starting --------------------------------------------


def test_F6_a_node_that_joins_while_the_first_one_makes_its_warm_start_gets_its_settings(drive):
    first = {"SEED": 77, "MAX_ROUNDS": 3, "WARM_START_STEPS": 300}
    anna = Process(drive, "anna", **first).start()
    config = experiment_dir(drive) / "config.json"
    wait_until(config.exists)

    # ben sets only GDRIVE_PATH, EXPERIMENT_NAME and NODE_ID.
    ben = Process(drive, "ben", **dict.fromkeys(QUICK), EXPERIMENT_NAME="default").start()
    wait_until(lambda: "default: joining" in ben.output or not ben.child.is_alive())
    assert not anna.is_registered()
    assert [anna.wait_for_exit(), ben.wait_for_exit()] == [0, 0], anna.output + ben.output

    # Both trained with anna's settings, and with one warm start.
    saved = json.loads(config.read_text())
    for name, value in {**QUICK, **first}.items():
        if name in saved:
            assert saved[name] == value, name
    assert "NUM_TRAIN_SAMPLES=2" in ben.output.split("from the experiment: ")[1]
    assert rounds_of(drive, "ben")[-1] == 2
    assert len(warm_starts(drive)) == 1


def test_F6_of_nodes_that_load_their_model_whoever_is_ready_first_begins_and_the_others_obey(
    tmp_path, monkeypatch, capsys
):
    drive = tmp_path / "drive"
    statuses = {}
    outputs = {}

    def start(node_id, **settings):
        settings = {"NODE_ID": node_id, "LOCAL_NODES": 1, "MAX_ROUNDS": 3, "SEED": None, **settings}
        statuses[node_id] = run(drive, **settings)
        outputs[node_id] = capsys.readouterr().out

    def load_and_fail(*_):
        raise grpo.ModelError("there is no such model")

    load_model = grpo.load_model
    monkeypatch.setattr(grpo, "load_model", load_and_fail)
    start("carl")
    assert statuses.pop("carl") == 2
    assert "there is no such model" in outputs["carl"]
    assert not drive.exists(), "a start that failed has touched the folder"

    # While dora loads her model, anna starts, and while anna loads hers, ben does.
    later = [("ben", {"SEED": 77}), ("anna", {})]

    def load_slowly(*arguments):
        if later:
            name, settings = later.pop()
            start(name, **settings)
        return load_model(*arguments)

    monkeypatch.setattr(grpo, "load_model", load_slowly)
    start("dora", SEED=5)
    assert statuses == {"ben": 0, "anna": 0, "dora": 2}
    assert "another node began it" in outputs["anna"]
    assert "SEED=5: the experiment has 77" in outputs["dora"]
    assert not (experiment_dir(drive) / "nodes/dora").exists()

    # anna asked the questions of ben's seed.
    config = SimpleNamespace(SEED=77)
    seeds = [sapo.derive_seed(config, "anna", 2, 0, "question", i) for i in range(2)]
    path = experiment_dir(drive) / "nodes/anna/rollouts/round_000002.stage_0.json"
    groups = json.loads(path.read_bytes())["rollouts"].values()
    assert [group["seed"] for group in groups] == seeds


# -------- U3, U4: the log -------------------------------------------------------------------------


def test_U3_each_round_has_a_line_and_the_end_says_what_was_learned_and_where_the_model_is(
    finished,
):
    # A round's line: the mean reward of nodes and stages, and in per cent answer tags and truncated
    # completions.
    metrics = repeatable_metrics(finished.drive)
    for t in range(12):
        rewards = [row["reward"] for (round_, *_), row in metrics.items() if round_ == t]
        assert len(rewards) == 4
        (line,) = re.findall(rf"^2 nodes {t:02d}/12\b.*$", finished.output, re.MULTILINE)
        printed = float(re.search(r"reward (\d\.\d\d)", line)[1])
        assert abs(printed - sum(rewards) / 4) < 0.006
        assert len(re.findall(r"\d+%", line)) >= 2

    # The end: the folder of the model, the total reward of a node, a picture.
    assert str(experiment_dir(finished.drive) / "nodes/n_0/model") in finished.output
    total = sum(row["reward"] for row in metrics.values()) / 2
    assert f"{total:.2f}" in finished.output[-3000:]
    picture = finished.drive / "reports/default.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"

    # Samples: the same questions at the start, every SAMPLE_INTERVAL rounds and at the end.
    for sample in finished.run.initial_samples:
        (question, *_) = coordinator.format_question(sample)
        assert finished.output.count(question) == 4
        for completion in sample["completions"]:
            answer = re.escape(f"{completion['reward']:4.2f}  {completion['response']!r}")
            assert re.search(rf"before +{answer}", finished.output)
    assert len(re.findall(r"^ +now +\d", finished.output, re.MULTILINE)) == 6


@pytest.mark.parametrize("text, variable, rewards, metrics", [
    ("learned; mean reward 0.10 -> 0.20", "", [0.1] * 20 + [0.2] * 20, {"informative_groups": 1}),
    ("little was learned; mean reward 0.10 -> 0.10", "", [0.1] * 40, {"informative_groups": 1}),
    ("nothing was learned", "TASKS", [1] * 40, {}),
    ("nothing was learned", "MAX_NEW_TOKENS", [0] * 40, {"truncated_rate": 0.9}),
    ("nothing was learned", "WARM_START_STEPS", [0] * 40, {"answer_tag_rate": 0.01}),
    ("nothing was learned", "MODEL_NAME", [0] * 40, {"answer_tag_rate": 0.9}),
])  # fmt: skip
def test_U3_the_diagnosis_is_a_sentence_with_the_curve_and_the_variable_that_may_help(
    text, variable, rewards, metrics
):
    rows = [{"round": t, "reward": reward, **metrics} for t, reward in enumerate(rewards)]
    diagnosis = coordinator.diagnose(rows)
    assert diagnosis.startswith(text)
    assert variable in diagnosis
    assert variable or re.search("[▁▂▃▄▅▆▇█]{24}", diagnosis)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_U3_a_flat_curve_is_explained_and_a_terminal_gets_a_progress_bar(
    tmp_path, monkeypatch, capsys, is_terminal
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert run(tmp_path, MAX_ROUNDS=10, NUM_TRANSPLANT_TREES=0) == 0

    events = read_log(tmp_path, "n_0/training_events.jsonl")
    (event,) = [row for row in events if row["event"] == "no signal"]
    assert sapo.TABLE.keys() & {*re.findall(r"\w+", event["text"])}, "it names no variable"
    screen = capsys.readouterr()
    assert event["text"] in screen.out
    assert ("10/10" in screen.err) == is_terminal


@pytest.mark.parametrize("settings", [
    {"NODE_ROLE": "monitor"}, {"NODE_ROLE": "report"}, {"NODE_ROLE": "validate"}, {"MAX_ROUNDS": 3},
])  # fmt: skip
def test_U3_U5_no_terminal_and_no_pipe_ends_a_role_with_a_traceback(tmp_path, settings):
    assert run(tmp_path, MAX_ROUNDS=2) == 0
    settings = {**QUICK, "LOCAL_NODES": 2, "NODE_ID": "n", "GDRIVE_PATH": tmp_path, **settings}
    settings |= {"COLUMNS": 10, "PYTHONIOENCODING": "ascii"}
    command = f"set -o pipefail; {sys.executable} sapo.py"
    for reader in ("cat", "head -1"):
        done = run_command("bash", "-c", f"{command} | {reader}", **settings)
        assert "Traceback" not in done.stdout + done.stderr
        assert "Exception ignored" not in done.stderr
        assert done.stdout
        is_fault = settings.get("NODE_ROLE") == "validate"  # nothing is learned in two rounds
        assert done.returncode in ((0, 1) if is_fault else (0,)), done.stdout + done.stderr


def test_U3_L6_run_swarm_shows_coordinator_and_worker_0_keeps_all_and_makes_one_warm_start(
    tmp_path,
):
    drive = tmp_path / "drive"
    more = {"NUM_WORKERS": 2, "MAX_ROUNDS": 3, "WARM_START_STEPS": 60, "LEARNING_RATE": 0}
    settings = {**QUICK, **more, "GDRIVE_PATH": drive, "LOG_DIR": tmp_path / "logs"}
    done = run_swarm_script(**settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr

    # The screen: lines with a name in front. Rounds are the coordinator's.
    shown = {}
    for line in done.stdout.splitlines():
        if not line.startswith("run_swarm: "):
            name, text = re.fullmatch(r"\[(\w+)\] (.*)", line).groups()
            shown.setdefault(name, []).append(text)
    assert shown.keys() == {"prepare", "coordinator", "worker_0"}
    is_round = re.compile(r".*\b\d/3 reward \d")
    num_rounds = {name: len([*filter(is_round.match, shown[name])]) for name in shown}
    assert num_rounds == {"prepare": 0, "coordinator": 3, "worker_0": 0}
    assert any("final model:" in text for text in shown["worker_0"])

    # LOG_DIR has everything that each process printed.
    logs = {path.stem: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs.keys() == {"prepare", "coordinator", "worker_0", "worker_1"}
    for name, log in logs.items():
        lines = log.splitlines()
        assert {*shown.get(name, [])} <= {*lines}
        if name.startswith("worker"):
            assert len([*filter(is_round.match, lines)]) == 3
            stdout_log = experiment_dir(drive) / f"nodes/{name}/logs/stdout.log"
            assert {*stdout_log.read_text().splitlines()} <= {*lines}

    # The warm start was made by prepare alone, and both workers have it.
    assert [name for name in logs if MADE in logs[name]] == ["prepare"]
    (warm_start,) = warm_starts(drive)
    for node_id in ("worker_0", "worker_1"):
        assert_model_is(drive, node_id, warm_start)


def test_U4_each_node_has_its_metrics_and_system_and_each_process_its_events_and_output(finished):
    # Of the process: events, and everything that it printed.
    events = read_log(finished.drive, "n_0/training_events.jsonl")
    for row in events:
        assert {"timestamp", "event", "node_id", "text"} <= row.keys()
    assert {"start", "end"} <= {row["event"] for row in events}
    nodes = experiment_dir(finished.drive) / "nodes"
    written = (nodes / "n_0/logs/stdout.log").read_text().splitlines()
    assert {*finished.output.splitlines()} <= {*written}

    # Of each node: the metrics of every round, as in its reward files, and the system.
    metrics = repeatable_metrics(finished.drive)
    for node_id in ("n_0", "n_1"):
        rows = read_log(finished.drive, f"{node_id}/metrics.jsonl")
        stages = [(row["round"], row["stage"]) for row in rows]
        assert stages == [(t, stage) for t in range(12) for stage in range(2)]
        for row in rows:
            assert metrics[row["round"], row["stage"], node_id].items() <= row.items()
            peers = {peer for peer, _ in row["teachers"]}
            assert peers <= {"n_0", "n_1"} - {node_id}
            assert len(row["teachers"]) == row["external_groups"]
        total = sum(row["my_reward"] for row in rows)
        assert rows[-1]["total_reward"] == pytest.approx(total)

        system = json.loads((nodes / node_id / "logs/system_info.json").read_text())
        assert system["torch"] == torch.__version__
        assert system["host"] == os.uname().nodename
        assert system["device"] == "cpu"


# -------- U5: the readers -------------------------------------------------------------------------


NO_GROUPS = {"informative_groups": 0}


def write_experiment(drive, name="x", rewards=(0.25, 0.25), maker="n1", metrics=None, **settings):
    """Write a finished experiment of two nodes. Returns its store."""
    store = DriveStore(drive, name)
    config = {name: row.default for name, row in sapo.TABLE.items()}
    config |= {"NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4} | settings
    created_at = 100 * float(sum(rewards))  # each experiment began at another time
    store.create(config | {"layout": LAYOUT, "maker": maker, "created_at": created_at})
    numbers = dict.fromkeys(("groups", "external_groups", "informative_groups", "grad_norm"), 1)
    numbers |= {"completions": 16, **(metrics or {})}

    for node_id in ("n1", "n2"):
        store.create_node(node_id)
        session = store.register([node_id], {})
        store.write_heartbeat(node_id, session, len(rewards), "done")
        store.make_dir(f"nodes/{node_id}/model")
        last = len(rewards) - 1
        for file in (
            f"checkpoints/round_{last:06d}.safetensors",
            "logs/metrics.jsonl",
            "model/config.json",
            "model/tokenizer.json",
            "model/model.safetensors",
        ):
            store.write(f"nodes/{node_id}/{file}", b"{}")
        store.move_marker("checkpoint", node_id, last)

        for t, reward in enumerate(rewards):
            store.move_marker("open", "n1", t)
            store.publish("rollouts", node_id, t, 0, {"format": 1, "rollouts": {}})
            row = {"reward": reward, "reward_gcd": reward, "timestamp": 100.0 + t}
            store.publish("rewards", node_id, t, 0, numbers | row)
    return store


def test_U5_the_monitor_shows_living_nodes_rewards_the_latest_rollout_and_what_looks_wrong(
    drive, capsys
):
    # n1 has ended, n2 was stopped, "working" lives and "silent" has not been heard of for long.
    drive.mkdir()
    store = write_experiment(drive, "default", [0.25] * 12, metrics=NO_GROUPS, MAX_ROUNDS=40)
    store.write_heartbeat("n2", store.sessions["n2"], 12, "stopped")
    for node_id in ("working", "silent"):
        store.create_node(node_id)
    store.register(["working"], {})
    store.post("silent", "session.silent.1000000000000-00000000")
    group = {"task": "gcd", "seed": 1, "prompt": "What is 1+1?", "answer": "2"}
    group["completions"] = [{"response": "say 3\x1b[2J", "reward": 0.0, "finished": True}] * 2
    store.publish("rollouts", "working", 11, 0, {"format": 1, "rollouts": {"0": group}})

    assert run(drive, NODE_ROLE="monitor") == 0
    screen = capsys.readouterr().out
    status = dict(re.findall(r"^(\w+) +(alive|dead|exited)\b", screen, re.MULTILINE))
    expected = {"working": "alive", "silent": "dead", "n1": "exited", "n2": "exited"}
    assert status == expected, screen
    assert screen.count(" 3.00") == 2, "total rewards of the two nodes"
    assert "round 11 of 40" in " ".join(screen.split())
    assert "1+1?" in screen
    assert "say 3" in screen
    assert "\x1b" not in screen
    warnings = [line for line in screen.splitlines() if line.startswith("! ")]
    assert any("silent" in line.split() for line in warnings)
    assert any("nothing was learned" in line for line in warnings)


def test_U5_validate_passes_a_finished_run_and_names_each_missing_thing(tmp_path, capsys):
    settings = {"NODE_ROLE": "validate", "EXPERIMENT_NAME": "x", "MAX_ROUNDS": 2}
    complete = tmp_path / "complete"
    complete.mkdir()
    write_experiment(complete, MAX_ROUNDS=2)
    assert run(complete, **settings) == 0

    # Delete one thing after another from a copy.
    problems = {
        "board/open.*": "round 1 is open",
        "board/rollouts.*": "there are rollouts",
        "nodes/n2/rewards/round_000001.stage_0.json": "2 nodes submitted rewards in round 1",
        "nodes/*/rewards/round_000000.stage_0.json": "every round has rewards",
        "nodes/*/checkpoints/*": "checkpoint after round 1",
        "nodes/n2/logs/metrics.jsonl": "n2 has written its log",
        "nodes/n2/model/config.json": "n2 has written its log and its model",
        "nodes/n2/model/tokenizer.json": "n2 has written its log and its model",
        "nodes/n1/model/model.safetensors": "n1 has written its log and its model",
    }
    part = tmp_path / "part"
    for pattern, problem in problems.items():
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(complete, part)
        for path in (part / "experiments/x").glob(pattern):
            path.unlink()
        capsys.readouterr()
        assert run(part, **settings) == 1, pattern
        assert problem in capsys.readouterr().out, pattern

    # Nothing was learned, or nothing of peers.
    for name, problem in (("grad_norm", "gradient"), ("external_groups", "groups of peers")):
        store = write_experiment(complete, name, MAX_ROUNDS=2, metrics={name: 0})
        assert run(complete, **settings | {"EXPERIMENT_NAME": store.dir.name}) == 1
        assert problem in capsys.readouterr().out

    # More rounds or nodes are expected than there are.
    assert run(complete, **settings | {"MAX_ROUNDS": 3}) == 1
    assert run(complete, **settings | {"NUM_WORKERS": 3}) == 1


@pytest.mark.parametrize("has_packages", [True, False])
def test_U5_the_report_compares_over_seeds_and_needs_no_matplotlib(
    tmp_path, monkeypatch, capsys, has_packages
):
    # Two seeds of 4/4 and of its baseline 8/0, a run with another setting, a baseline with it, and
    # a broken one.
    eight = {"NUM_TRAIN_SAMPLES": 8, "NUM_TRANSPLANT_TREES": 0}
    double = {"completions": 32}
    for seed, ours, alone in ((0, 0.40, 0.20), (1, 0.52, 0.24)):
        maker = f"n{seed + 1}"  # whose mkdir was the first is chance
        write_experiment(tmp_path, f"a{seed}", [ours] * 20, maker, SEED=seed)
        write_experiment(tmp_path, f"b{seed}", [alone] * 20, maker, double, SEED=seed, **eight)
    write_experiment(tmp_path, "other", [0.01] * 20, LOSS_TYPE="grpo")
    write_experiment(tmp_path, "other_alone", [0.02] * 20, LOSS_TYPE="grpo", **eight)
    (write_experiment(tmp_path, "broken").dir / "config.json").unlink()
    if not has_packages:
        for name in ("matplotlib.figure", "pandas"):
            monkeypatch.setitem(sys.modules, name, None)

    # A pattern that fits no experiment shows nothing.
    environ = {"NODE_ROLE": "report", "GDRIVE_PATH": str(tmp_path)}
    assert sapo.main(environ | {"EXPERIMENT_NAME": "no_*"}) == 1
    assert sapo.main(environ) == 0
    output = capsys.readouterr().out

    # Worked by hand: 20 rounds, means of both seeds. Runs that differ in more than their seed are
    # never averaged, and a gain is over the baseline with the same settings.
    rows = sapo.compare_experiments(tmp_path)
    found = [(row["I/J"], row["runs"], row["completions"]) for row in rows]
    assert found == [("4/4", 2, 320), ("8/0", 2, 640), ("8/0", 1, 320), ("4/4", 1, 320)]
    totals = [row["reward per node"] for row in rows]
    assert totals == pytest.approx([9.2, 4.4, 0.4, 0.2])
    assert [row["sd"] for row in rows[2:]] == [None, None]
    assert [row["sd"] for row in rows[:2]] == pytest.approx([1.2 * 2**0.5, 0.4 * 2**0.5])
    gains = [row["gain"] for row in rows if row["I/J"] == "4/4"]
    assert gains == pytest.approx([9.2 / 4.4 - 1, -0.5])

    # The table, and the numbers as JSON.
    table = (tmp_path / "reports/report_all.md").read_text()
    assert table in output
    for text in ("9.20", "4.40", "+109%", "-50%"):
        assert text in table
    assert re.search(r"^\| gcd +\| +0.46 \| +0.22 \|", table, re.MULTILINE)
    assert json.loads((tmp_path / "reports/report_all.json").read_text()) == rows

    # Without matplotlib and pandas there is no picture, and metrics come as a list.
    assert (tmp_path / "reports/report_all.png").exists() == has_packages
    assert ("pip install matplotlib" in output) == (not has_packages)
    assert isinstance(sapo.get_experiment_metrics(tmp_path, "a0"), list) == (not has_packages)


def test_U5_the_functions_for_notebooks_return_what_is_in_the_folder(tmp_path):
    store = write_experiment(tmp_path)
    assert sapo.get_experiment_status(tmp_path, "x") == {
        "experiment": "x", "current_round": 1, "current_stage": 0, "num_active_peers": 0,
        "peer_ids": ["n1", "n2"], "last_updated": 101.0, "duration_seconds": 1.0,
        "cumulative_rewards": {"n1": 0.5, "n2": 0.5},
        "latest_checkpoint": str(store.dir / "nodes/n2/checkpoints/round_000001.safetensors"),
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
    assert (config.MAX_NEW_TOKENS, config.MAX_ROUNDS) == (32, 3)
    assert 0 < config.WARM_START_STEPS < 100
    config = sapo.resolve_config(environ | {"MAX_NEW_TOKENS": 99}, {}, [])
    assert config.MAX_NEW_TOKENS == 99


def test_L4_U5_a_finished_swarm_teaches_a_node_that_generates_nothing(finished, tmp_path, capsys):
    """The README's recipe, after a short run and with fewer rounds."""
    recipe = printed("teach").replace(
        "MAX_ROUNDS=120 EVAL_INTERVAL=20", "MAX_ROUNDS=11 EVAL_INTERVAL=1"
    )
    recipe = recipe.replace("python sapo.py", f"{sys.executable} {ROOT}/sapo.py")
    experiments = tmp_path / "rl-swarm/experiments"
    shutil.copytree(finished.drive, tmp_path / "rl-swarm")
    shutil.move(experiments / "default", experiments / "one")
    settings = {name: LEARNING[name] for name in ("ANSWER_TAG_SHARE", "LEARNING_RATE")}
    settings |= {"WARM_START_STEPS": 60, "EVAL_SAMPLES": 8, "DEVICE": "cpu"}
    settings["TASKS"] = QUICK["TASKS"]
    done = run_command("bash", "-euc", recipe, folder=tmp_path, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"pupil 05/11 .*held-out 0\.\d\d", done.stdout)

    # Nothing was generated, and yet it was trained; each reward file counts as submitted.
    store = DriveStore(tmp_path / "rl-swarm", "school")
    row = store.read_reward("pupil", 5, 0)
    assert row["reward"] is None
    assert row["completions"] == 0
    assert row["external_groups"] > 0
    assert row["grad_norm"] > 0
    assert not store.fetch_rollouts("pupil", 5, 0)
    settings = {"GDRIVE_PATH": tmp_path / "rl-swarm", "EXPERIMENT_NAME": "school"}
    settings |= {"MAX_ROUNDS": 11, "NUM_WORKERS": 1}
    for role in ("validate", "monitor", "report"):
        assert sapo.main(to_environ(settings | {"NODE_ROLE": role})) == 0, role

    # Who taught whom.
    recipe = printed("recipe: teachers").replace("default", "school")
    done = run_command(sys.executable, "-c", recipe, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "teachers.png").read_bytes()[:4] == b"\x89PNG"

    # Without own questions and without peers there is nothing to train on.
    settings = {"GDRIVE_PATH": tmp_path / "new", "NODE_ID": "n", "NUM_TRAIN_SAMPLES": 0}
    assert sapo.main(to_environ(settings | {"MODEL_NAME": "tiny"})) == 2
    assert "nothing to train on" in capsys.readouterr().out


def test_U7_run_swarm_runs_configs_and_seeds_one_after_another_and_reports_them(tmp_path):
    settings = {**QUICK, "LOCAL_NODES": 2, "MAX_ROUNDS": 3, "EVAL_INTERVAL": 3, "EVAL_SAMPLES": 4}
    settings |= {"CONFIGS": "2/0 1/1", "SEEDS": "1 2", "LOG_DIR": tmp_path / "logs"}
    done = run_swarm_script(**settings, GDRIVE_PATH=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr

    names = ["compare_1-1_seed1", "compare_1-1_seed2", "compare_2-0_seed1", "compare_2-0_seed2"]
    assert sapo.list_experiments(tmp_path) == names
    for name in names:
        metrics = sapo.get_experiment_metrics(tmp_path, name)
        assert len(metrics) == 6
        most = 1 if "1-1" in name else 0
        assert {*metrics["external_groups"]} <= {0, most}

    assert (tmp_path / "reports/report_compare.md").read_text() in done.stdout
    rows = json.loads((tmp_path / "reports/report_compare.json").read_text())
    assert sorted([row["I/J"], row["runs"]] for row in rows) == [["1/1", 2], ["2/0", 2]]
    assert all(0 <= row["held-out"] <= 1 for row in rows)


def test_U7_held_out_accuracy_disturbs_nothing_and_oversampling_is_a_fair_baseline(
    tmp_path, finished
):
    # Without its held-out accuracy, a run that is evaluated equals one that is not.
    shutil.copytree(finished.drive / "warmstart", tmp_path / "warmstart")
    assert run(tmp_path, **TWELVE_ROUNDS) == 0
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
    ids = torch.tensor([finished.run.codec.encode("Solve the following")])
    for node in finished.run.nodes:
        folder = experiment_dir(finished.drive) / "nodes" / node.id / "model"
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
    folder = experiment_dir(drive) / "nodes/n_0/model"
    ids = torch.tensor([tokenizer("4 * 1?").input_ids])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.generate(ids, max_new_tokens=4, do_sample=True).shape[1] > ids.shape[1]


def test_U8_F2_a_disk_that_is_full_when_the_model_is_exported_is_an_outage(
    tmp_path, monkeypatch, capsys
):
    works = GPT2LMHeadModel.save_pretrained
    failures = [SafetensorError("Error while serializing: No space left on device")] * 2

    def fail_twice(model, folder, **more):
        if failures:
            raise failures.pop()
        return works(model, folder, **more)

    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", fail_twice)
    assert run(tmp_path, MAX_ROUNDS=2) == 0
    output = capsys.readouterr().out
    assert not failures
    assert len(re.findall(r"outage: .*Error while serializing", output)) == 1
    assert output.count("outage over") == 1
    for node_id in ("n_0", "n_1"):
        AutoModelForCausalLM.from_pretrained(experiment_dir(tmp_path) / f"nodes/{node_id}/model")


@pytest.mark.parametrize("is_down", [False, True])
def test_U8_models_are_pushed_once_at_the_end_and_a_push_that_fails_changes_nothing_else(
    tmp_path, monkeypatch, capsys, is_down
):
    drive = tmp_path / "drive"
    last_reward = experiment_dir(drive) / "nodes/n_1/rewards/round_000004.stage_0.json"
    pushed = tmp_path / "pushed"

    class Hub(huggingface_hub.HfApi):
        def create_repo(self, repo, *, private, **_):
            assert self.token == SECRET
            assert private
            assert last_reward.exists()
            if is_down:
                raise ConnectionError(f"401 for {SECRET}")
            return SimpleNamespace(repo_id=f"me/{repo}")

        def upload_folder(self, *, repo_id, folder_path):
            shutil.copytree(folder_path, pushed / repo_id)  # raises an error the second time

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert run(drive, MAX_ROUNDS=5, HUGGINGFACE_ACCESS_TOKEN=SECRET) == 0
    screen = capsys.readouterr().out
    events = read_log(drive, "n_0/training_events.jsonl")
    texts = [row["text"] for row in events if row["event"] == "hub"]
    assert len(texts) == 2

    # Each node's model is pushed once, after the last round.
    for node_id, text in zip(("n_0", "n_1"), texts, strict=True):
        assert text in screen
        assert ("push failed" in text) == is_down
        if not is_down:
            ours = experiment_dir(drive) / f"nodes/{node_id}/model"
            for name in ("README.md", "config.json", "model.safetensors", "tokenizer.json"):
                theirs = (pushed / f"me/default-{node_id}" / name).read_bytes()
                assert theirs == (ours / name).read_bytes()

    # Everything else is as in a run without a token.
    without = tmp_path / "without_token"
    assert run(without, MAX_ROUNDS=5) == 0
    assert len(repeatable_metrics(drive)) == 10
    assert repeatable_metrics(drive) == repeatable_metrics(without)
    for node_id in ("n_0", "n_1"):
        assert read_heartbeat(drive, node_id)["state"] == "done"
        model = f"nodes/{node_id}/model/model.safetensors"
        ours = (experiment_dir(drive) / model).read_bytes()
        assert ours == (experiment_dir(without) / model).read_bytes()


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
        reply = client.execute_interactive(code, output_hook=record, timeout=200)
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
    settings = {"GDRIVE_PATH": tmp_path, "COORDINATOR_ROUND_INTERVAL": 1, "WARM_START_STEPS": 20}
    kernel.run_cell("", **settings, PYTHON=sys.executable)

    cells[3:5] = cells[4:2:-1]  # the coordinator after the worker, so that it finds nothing to do
    for name, cell in cells:
        cell = re.sub("%pip.*", "", cell).replace("/content/drive/MyDrive/sapo", str(ROOT))
        max_rounds = 3 if name == "swarm" else 5
        cell = re.sub(r'(MAX_ROUNDS="?)\d+', rf"\g<1>{max_rounds}", cell)
        if name == "compare":
            cell = cell.replace("gpt2", "tiny").replace("3/1 2/2 1/3", "")
            cell = cell.replace("NUM_WORKERS=4", "NUM_WORKERS=2")
        kernel.run_cell(cell)
    outputs = "".join(kernel.outputs)
    assert "finished; " in outputs
    assert outputs.count("image/png") >= 2
    assert "five_4-0_seed1" in sapo.list_experiments(tmp_path)


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
    model = load_file(experiment_dir(drive) / f"nodes/{node_id}/model/model.safetensors")
    weights = load_file(warm_start)
    assert weights.keys() <= model.keys()
    for name, tensor in weights.items():
        assert torch.equal(model[name], tensor), name


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
    assert run(tmp_path, **FROZEN | {"NODE_ID": "slower", "MAX_ROUNDS": 2}) == 0
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

    # Another seed needs another warm start.
    assert run(tmp_path, **FROZEN, EXPERIMENT_NAME="other", SEED=4) == 0
    assert MADE in capsys.readouterr().out
    assert len(warm_starts(tmp_path)) == 2


def test_L6_if_the_model_cannot_be_prepared_run_swarm_says_so_and_starts_nothing_else(tmp_path):
    drive = tmp_path / "drive"
    settings = {**QUICK, "MODEL_NAME": "no/such model", "LOG_DIR": tmp_path / "logs"}
    done = run_swarm_script(**settings, GDRIVE_PATH=drive)
    screen = done.stdout + done.stderr
    assert done.returncode == 1
    assert re.search(r"^\[prepare\] .*MODEL_NAME='no/such model'", screen, re.MULTILINE)
    assert re.search(r"^run_swarm: prepare .*\b2\b", screen, re.MULTILINE)
    assert not re.search(r"\[(coordinator|worker_\d)\]", screen)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["prepare.log"]
    assert not drive.exists()
