"""The promises to people: settings (U1), stopping (U2), the log (U3, U4), the readers (U5), the quick check (U6),
comparisons (U7), models (U8), notebooks (U9), and tiny's warm start (L6), mostly by whole runs."""

import contextlib
import dataclasses
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
import sapo
import torch
from drive_store import DriveStore
from jupyter_client.manager import start_new_kernel
from coordinator import verdict
from sapo import Config, compare_experiments, get_experiment_metrics, get_experiment_status, list_experiments
from test_swarm import LEARNING, QUICK, ROOT, Process, base, by_hand, drive, figures, heartbeat  # noqa: F401
from test_swarm import log_rows, main, newest_checkpoint, rounds, until, words
from transformers import AutoModelForCausalLM

# ruff: noqa: F811, `drive` is a fixture
SECRET = "hf_NobodyMayEverSeeThisToken"
NAMES = {spec.name for spec in dataclasses.fields(Config)}
KEPT = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
KEPT["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def run(drive, **settings) -> int:
    return main(words({**QUICK, "LOCAL_NODES": 2, "NODE_ID": "n", "GDRIVE_PATH": drive, **settings}))


def command(*arguments, **settings) -> subprocess.CompletedProcess:
    environ = KEPT | {"OMP_NUM_THREADS": "1"} | words(settings)
    return subprocess.run(arguments, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> SimpleNamespace:
    """A run of two nodes without a network: its folder, what it printed, its nodes and codec."""
    drive, said, caught, train = tmp_path_factory.mktemp("finished"), io.StringIO(), [], sapo.train
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(socket, "getaddrinfo", None)
        patch.setattr(sapo, "train", lambda run: (caught.append(run), train(run)))
        assert run(drive, **LEARNING | {"MAX_ROUNDS": 12}, EVAL_INTERVAL=4, EVAL_SAMPLES=8) == 0
    return SimpleNamespace(drive=drive, text=said.getvalue(), nodes=caught[0].nodes, codec=caught[0].codec)


def test_U1_help_explains_every_variable_with_its_default():
    done = command("bash", ROOT / "run_swarm.sh", "--help")
    assert done.returncode == 0 and "CONFIGS=" in done.stdout, done.stderr
    for spec in dataclasses.fields(Config):
        (line,) = re.findall(rf"^ +{spec.name} .*$", done.stdout, re.MULTILINE)
        assert spec.metadata["help"] in line and str(spec.default)[:8] in line


def test_U2_a_second_ctrl_c_exits_at_once_in_the_middle_of_a_round(tmp_path, monkeypatch):
    def press_twice(*_):
        for _ in range(2):
            os.kill(os.getpid(), SIGINT)
            time.sleep(0.6)  # one key press may arrive twice
        pytest.fail("it goes on")

    monkeypatch.setattr(sapo, "policy_gradient", press_twice)
    assert run(tmp_path) == 130 and not figures(tmp_path), "the round was not finished"


def session_of(pid: int) -> list[int]:
    """The processes of its session, whatever their group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            found += [int(path.parent.name)] * (int(session) == pid and state not in "ZX")
    return found


@pytest.mark.parametrize("moment", [0.5, 3, None])
def test_U2_ctrl_c_ends_run_swarm_and_all_that_it_started_in_order(tmp_path, moment):
    drive, began, text = tmp_path / "drive", time.monotonic(), (tmp_path / "out").open("w+")
    given = KEPT | words({**QUICK, "GDRIVE_PATH": drive, "PYTHON": sys.executable, "NUM_WORKERS": 1})
    whole = dict(env=given | {"VERBOSE": "1"}, stdout=text, stderr=text, start_new_session=True)
    swarm = subprocess.Popen(["bash", ROOT / "run_swarm.sh"], **whole)
    try:
        until(lambda: time.monotonic() > began + moment if moment else rounds(drive, "worker_0"))
        os.killpg(swarm.pid, SIGINT)  # as a terminal does
        assert swarm.wait(60) == 130
        until(lambda: not session_of(swarm.pid), 10)  # who prefixed the last lines may still be at it
    finally:
        for pid in session_of(swarm.pid):
            os.kill(pid, SIGKILL)
    assert "Traceback" not in (tmp_path / "out").read_text()
    if moment is None:
        assert newest_checkpoint(drive, "worker_0") == rounds(drive, "worker_0")[-1]
        assert [heartbeat(drive, name)["state"] for name in ("worker_0", "coordinator")] == ["stopped"] * 2


def test_U2_run_swarm_names_who_failed_ends_the_others_and_shares_out_the_gpus(tmp_path):
    stand_in = """#!/bin/bash
    case "$1 $NODE_ID" in
    -c*) exec python3 "$@" ;;  # which packages are there, how many cores
    *worker_1) echo "gpu ${CUDA_VISIBLE_DEVICES:-none}"; exit 7 ;;
    *worker_*) echo "gpu ${CUDA_VISIBLE_DEVICES:-none}" ;;
    *) trap 'echo the coordinator was stopped; exit 130' INT; while :; do sleep 0.1; done ;;
    esac"""
    for name, text in (("python", stand_in), ("nvidia-smi", "#!/bin/sh\necho GPU 0; echo GPU 1")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    settings = dict(PYTHON=tmp_path / "python", PATH=f"{tmp_path}:{KEPT['PATH']}", NUM_WORKERS=3)
    done = command("bash", ROOT / "run_swarm.sh", **settings)
    assert done.returncode == 1 and re.search(r"worker_1\b.*\b7\b", done.stderr), done.stdout + done.stderr
    assert "worker_0" not in done.stderr and "the coordinator was stopped" in done.stdout
    assert re.findall(r"gpu (\w+)", "\n".join(sorted(done.stdout.splitlines()))) == ["0", "1", "0"]


def test_U3_a_line_a_round_says_reward_and_groups_and_the_end_what_was_learned_and_where(finished):
    for t in range(12):
        rows = [row for (round_, *_), row in figures(finished.drive).items() if round_ == t]
        (line,) = re.findall(rf"^.*round 0*{t}/12\b.*$", finished.text, re.MULTILINE)
        assert f"{sum(row['reward'] for row in rows) / 2:.2f}" in line
        assert len(re.findall(r"\d+%", line)) >= 2, "answer tags, truncated completions"
    assert str(base(finished.drive) / "models/n_0") in finished.text
    total = sum(row["reward"] for row in figures(finished.drive).values())
    assert f"{total / 2:.2f}" in finished.text[-3000:], "what each earned in all"
    samples = [row for row in log_rows(finished.drive, "n/training_events.jsonl") if row["event"] == "sample"]
    said = samples[-1]["groups"][0]["completions"][0]["response"]
    assert len(samples) >= 2 and repr(said)[:8] in finished.text, "what the model answers"
    assert (finished.drive / "reports/default.png").read_bytes()[:4] == b"\x89PNG"
    curves = {"learned": [0.1] * 20 + [0.2] * 20, "little": [0.1] * 40, "too few": [0.1, 0.9]}
    for said, rewards in curves.items():
        assert verdict([{"reward": r, "informative_groups": 1} for r in rewards], "all").startswith(said)
    assert verdict([{"reward": 0, "informative_groups": 0}] * 40, "all").startswith("nothing was learned")


def test_U3_a_flat_curve_is_explained_and_a_terminal_gets_a_bar(tmp_path, monkeypatch, capsys):
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)  # noqa: B023
        drive = tmp_path / str(is_terminal)
        assert run(drive, MAX_ROUNDS=10, NUM_TRANSPLANT_TREES=0) == 0
        (event,) = (row for row in log_rows(drive, "n/training_events.jsonl") if row["event"] == "no signal")
        said = capsys.readouterr()
        assert NAMES & {*re.findall(r"\w+", event["text"])} and event["text"] in said.out, "what may help"
        assert ("10/10" in said.err) == is_terminal


def test_U4_each_node_has_its_metrics_and_system_and_each_process_its_events_and_output(finished):
    events = log_rows(finished.drive, "n/training_events.jsonl")
    assert all({"timestamp", "event", "node_id", "text"} <= row.keys() for row in events)
    assert {"start", "checkpoint", "end"} <= {row["event"] for row in events}
    written = (base(finished.drive) / "logs/n/stdout.log").read_text().splitlines()
    assert {*finished.text.splitlines()} <= {*written}
    for node in ("n_0", "n_1"):
        rows, rewards = log_rows(finished.drive, f"{node}/metrics.jsonl"), figures(finished.drive)
        assert [row["round"] for row in rows] == [*range(12)]
        assert all(rewards[row["round"], 0, node].items() <= row.items() for row in rows)
        assert rows[-1]["total_reward"] == pytest.approx(sum(row["my_reward"] for row in rows))
        about = json.loads((base(finished.drive) / f"logs/{node}/system_info.json").read_text())
        assert about["node_id"] == node and about["torch"] == torch.__version__ and about["device"] == "cpu"


def test_U5_the_monitor_says_who_lives_what_was_earned_said_and_what_looks_wrong(drive, capsys):
    store = by_hand(drive, "alive")
    store.open_round(0, "alive")
    assert run(drive, NODE_ROLE="monitor") == 0 and "finished" not in capsys.readouterr().out, "has not begun"
    for node, state in (("gone", "stopped"), ("ended", "done")):
        store.heartbeat(node, store.register([node], "worker", {}), 1, state)
    store.write("peers/silent.1000000000000-00000000.json", {"node_id": "silent"})
    groups = {"0": {"task": "gcd", "seed": 1, "prompt": "What is 1+1?", "answer": "2"}}
    groups["0"]["completions"] = [{"response": "say 3\x1b[2J", "reward": 0.0, "finished": True}] * 2
    for t in range(12):
        store.open_round(t, "alive")
        store.publish(t, 0, "alive", {}, groups)
        for node in ("alive", "silent"):
            store.submit_reward(t, 0, node, {"reward": 0.25, "timestamp": 1.0, "informative_groups": 0})
    assert run(drive, NODE_ROLE="monitor", MAX_ROUNDS=40) == 0
    text = capsys.readouterr().out
    states = dict(re.findall(r"^(\w+) +(live|dead|left)\b", text, re.MULTILINE))
    assert states == {"alive": "live", "silent": "dead", "gone": "left", "ended": "left"}, text
    assert text.count(" 3.00") == 2 and "11 of 40" in text
    assert "1+1?" in text and "say 3" in text and "\x1b" not in text
    assert NAMES & {*re.findall(r"\w+", text)}, "what may help"


def experiment(drive, name="x", rewards=(0.25, 0.25), completions=16, **settings) -> DriveStore:
    """A finished experiment of two nodes, by hand."""
    store = DriveStore(drive, name, "by_hand")
    store.create()
    default = {spec.name: spec.default for spec in dataclasses.fields(Config)}
    store.open_config(default | {"NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4} | settings)
    row = dict.fromkeys(("local_groups", "external_groups", "informative_groups", "grad_norm"), 1)
    for node in ("n1", "n2"):
        store.heartbeat(node, store.register([node], "worker", {}), len(rewards), "done")
        model = [f"models/{node}/{file}" for file in ("config.json", "tokenizer.json", "model.safetensors")]
        for path in (f"logs/{node}/metrics.jsonl", "checkpoints/round_000001/n1.safetensors", *model):
            store.write(path, {})
        for t, reward in enumerate(rewards):
            store.open_round(t, "n1")
            store.publish(t, 0, node, {}, {})
            row |= {"reward": reward, "reward_gcd": reward, "timestamp": 100.0 + t}
            row |= {"completions": completions}
            store.submit_reward(t, 0, node, row)
    return store


def test_U5_validate_passes_a_finished_run_and_names_each_missing_thing(tmp_path, capsys):
    settings = {"NODE_ROLE": "validate", "EXPERIMENT_NAME": "x", "MAX_ROUNDS": 2}
    experiment(whole := tmp_path / "whole", MAX_ROUNDS=2)
    assert run(whole, **settings) == 0
    for path, problem in {
        "config.json": "config.json", "state/rounds/round_000001.n1.json": "round 0", "rollouts": "rollouts",
        "logs/n2": "metrics.jsonl", "rewards/round_000001/stage_0/n2.json": "n2", "checkpoints": "checkpoint",
        "models/n2/config.json": "config.json", "models/n2/tokenizer.json": "tokenizer.json",
        "models/n1/model.safetensors": "weights",
    }.items():  # fmt: skip
        shutil.rmtree(tmp_path / "part", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "part")
        DriveStore(tmp_path / "part", "x").delete(path)
        assert run(tmp_path / "part", **settings) == 1 and problem in capsys.readouterr().out, path
    assert [run(whole, **settings | more) for more in ({"MAX_ROUNDS": 3}, {"NUM_WORKERS": 3})] == [1, 1]


@pytest.mark.parametrize("optional", [True, False])
def test_U5_the_report_pairs_seeds_and_needs_no_matplotlib(tmp_path, monkeypatch, capsys, optional):
    ours, alone = (0.40, 0.44, 0.52, 0.48), (0.20, 0.22, 0.24, 0.25)
    for seed, (high, low) in enumerate(zip(ours, alone, strict=True)):
        experiment(tmp_path, f"a{seed}", [high] * 20, completions=16, SEED=seed)
        lone = dict(NUM_TRAIN_SAMPLES=8, NUM_TRANSPLANT_TREES=0, SEED=seed)
        experiment(tmp_path, f"b{seed}", [low] * 20, completions=32, **lone)
    experiment(tmp_path, "other", [0.01] * 20, LOSS_TYPE="grpo")
    experiment(tmp_path, "broken").delete("config.json")
    for name in () if optional else ("matplotlib.figure", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    report = {"NODE_ROLE": "report", "GDRIVE_PATH": str(tmp_path)}
    assert main(report | {"EXPERIMENT_NAME": "no_*"}) == 1, "nothing else is shown"
    assert main(report) == 0
    text = capsys.readouterr().out
    best = compare_experiments(tmp_path)[0]
    # by hand: the four ratios' logarithms, mean 0.7029, standard error 0.02532, Student's t of 3 degrees 3.182
    assert [best[name] for name in ("low", "gain", "high")] == pytest.approx([0.863, 1.020, 1.189], abs=1e-3)
    assert (best["per_node"], len(best["runs"]), best["completions"]) == (pytest.approx(20 * 0.46), 4, 320)
    table = (tmp_path / "reports/report.md").read_text()
    assert table in text and "+102% (+86% to +119%)" in table and "9.20" in table and "4.55" in table
    assert "LOSS_TYPE=grpo" in table and "SEED" not in table, "runs that differ in more are never averaged"
    assert re.search(r"^gcd +0.46 +0.23 +0.01$", table, re.MULTILINE) and "nothing was learned" in table
    assert (tmp_path / "reports/report.png").exists() == optional and ("matplotlib" in text) == (not optional)
    assert isinstance(get_experiment_metrics(tmp_path, "a0"), list) != optional


def test_U5_the_functions_for_notebooks_say_what_is_in_the_folder(tmp_path):
    store = experiment(tmp_path)
    assert get_experiment_status(tmp_path, "x") == {
        "experiment": "x", "current_round": 1, "current_stage": 0, "num_active_peers": 0,
        "peer_ids": ["n1", "n2"], "last_updated": 101.0, "duration_seconds": 1.0,
        "cumulative_rewards": {"n1": 0.5, "n2": 0.5},
        "latest_checkpoint": str(store.base / "checkpoints/round_000001"),
    }  # fmt: skip
    assert list_experiments(tmp_path) == ["x"] and list_experiments(tmp_path / "no") == []
    rows = get_experiment_metrics(tmp_path, "x")[["round", "node_id", "my_reward"]].values.tolist()
    assert rows == [[t, node, 0.25] for t in range(2) for node in ("n1", "n2")]


def test_U6_test_mode_shows_information_externals_and_a_gradient_in_a_minute(tmp_path, capsys):
    settings, began = words({"TEST_MODE": 1, "GDRIVE_PATH": tmp_path, "LOCAL_NODES": 2}), time.process_time()
    assert main(settings) == 0 and time.process_time() < 60 + began  # a minute where nothing else runs
    for name in ("informative_groups", "external_groups", "grad_norm"):
        assert any(row[name] for row in figures(tmp_path).values()), name
    assert main(settings | {"NODE_ROLE": "validate"}) == 0


def test_U7_configs_and_seeds_are_run_one_by_one_and_reported(tmp_path):
    settings = {**QUICK, "LOCAL_NODES": 2, "MAX_ROUNDS": 3, "EVAL_INTERVAL": 3, "EVAL_SAMPLES": 4}
    settings |= {"CONFIGS": "2/0 1/1", "SEEDS": "1 2", "GDRIVE_PATH": tmp_path, "PYTHON": sys.executable}
    done = command("bash", ROOT / "run_swarm.sh", **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    names = [f"compare_{own}-{external}_seed{seed}" for own, external in ((1, 1), (2, 0)) for seed in (1, 2)]
    assert list_experiments(tmp_path) == names
    for name in names:
        rows = get_experiment_metrics(tmp_path, name).to_dict("records")
        assert len(rows) == 6 and {row["external_groups"] for row in rows} <= {0, int("1-1" in name)}
    assert (table := (tmp_path / "reports/report.md").read_text()) in done.stdout
    assert {*re.findall(r"^ *(\d/\d) +2 ", table, re.MULTILINE)} == {"2/0", "1/1"}


def test_U7_held_out_accuracy_disturbs_nothing_and_oversampling_is_a_fair_baseline(tmp_path, finished):
    shutil.copytree(finished.drive / "warmstart", tmp_path / "warmstart")
    assert run(tmp_path, **LEARNING | {"MAX_ROUNDS": 12}) == 0
    ours, plain = figures(finished.drive), figures(tmp_path)
    held_out = {round_: row.pop("held_out") for (round_, _, _), row in ours.items() if "held_out" in row}
    assert held_out.keys() == {3, 7, 11} and all(0 <= share <= 1 for share in held_out.values())
    assert ours == plain, "a run that is evaluated is the same run"
    shutil.rmtree(base(tmp_path))
    fair = {"MAX_ROUNDS": 4, "LOCAL_OVERSAMPLE": 3, "NUM_TRANSPLANT_TREES": 0}
    assert run(tmp_path, **LEARNING | fair) == 0
    for row in figures(tmp_path).values():
        assert row["completions"] == 3 * 4 * 4 and row["local_groups"] == 4
        assert row["informative_groups"] == min(4, row["informative_local"]), "informative ones first"
    assert any(row["informative_local"] for row in figures(tmp_path).values())


def test_U8_a_final_model_is_an_ordinary_folder_with_the_same_logits_and_the_printed_line_tries_it(finished):
    ids = torch.tensor([finished.codec.encode("Solve the following")])
    for node in finished.nodes:
        loaded = AutoModelForCausalLM.from_pretrained(base(finished.drive) / "models" / node.id)
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, node.model(ids).logits)
    done = command("bash", "-c", re.findall(r"python -c .*$", finished.text, re.MULTILINE)[-1])
    assert done.returncode == 0 and "generated_text" in done.stdout, done.stderr


@pytest.mark.parametrize("down", [False, True])
def test_U8_models_are_pushed_and_a_hub_that_fails_stops_nothing(tmp_path, monkeypatch, capfd, down):
    pushed, last_reward = [], tmp_path / "experiments/default/rewards/round_000004/stage_0/n_1.json"

    class Hub(huggingface_hub.HfApi):
        def whoami(self):
            assert self.token == SECRET
            if down:
                raise ConnectionError(f"401 for {SECRET}")
            return {"name": "me"}

        def create_repo(self, *_, **__): ...

        def upload_folder(self, *, repo_id, folder_path, **_):
            until(last_reward.exists)  # training goes on while the first one is under way
            pushed.append((repo_id, {path.name for path in Path(folder_path).iterdir()}))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert run(tmp_path, MAX_ROUNDS=5, HUGGINGFACE_ACCESS_TOKEN=SECRET) == 0
    assert len(figures(tmp_path)) == 10
    twice = [f"me/default-n_{i}" for i in (0, 1, 0, 1)]  # with the checkpoint after round 2, and at the end
    assert [repo for repo, _ in pushed] == ([] if down else twice)
    assert all({"config.json", "model.safetensors", "tokenizer.json"} <= files for _, files in pushed)
    files = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET[3:] in text for text in (*capfd.readouterr(), *files))


@pytest.fixture
def kernel(tmp_path):
    """A notebook's kernel; run_cell(code, settings…) runs a cell, said holds all output."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    said = []

    def run_cell(code, **settings):
        code = f"import os; os.environ.update({words(settings)!r})\n{code}"
        hook = lambda message: said.append(json.dumps(message["content"], default=str))  # noqa: E731
        reply = client.execute_interactive(code, output_hook=hook, timeout=120)
        assert reply["content"]["status"] == "ok" and "Traceback" not in "".join(said), said

    yield SimpleNamespace(run_cell=run_cell, said=said, interrupt=manager.interrupt_kernel)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_U9_one_cell_of_the_four_modules_runs_stops_like_ctrl_c_and_goes_on(tmp_path, kernel):
    modules = [ROOT / f"{name}.py" for name in ("drive_store", "grpo", "coordinator", "sapo")]
    program = "\n".join(path.read_text() for path in modules)

    def press_stop():
        until(lambda: len(rounds(tmp_path, "n")) >= 2)
        kernel.interrupt()

    run_cell = kernel.run_cell
    threading.Thread(target=press_stop).start()
    run_cell(program, **QUICK | {"GDRIVE_PATH": tmp_path, "NODE_ID": "n", "NUM_TRANSPLANT_TREES": 0})
    last = rounds(tmp_path, "n")[-1]
    assert newest_checkpoint(tmp_path, "n") == last and heartbeat(tmp_path, "n")["state"] == "stopped"
    run_cell(program, MAX_ROUNDS=last + 3)
    assert rounds(tmp_path, "n") == [*range(last + 3)]
    run_cell(f"assert get_experiment_status({str(tmp_path)!r}, 'default')['current_round'] == {last + 2}")


def test_U9_the_printed_cells_run_in_a_notebook_and_draw(tmp_path, kernel):
    text = (ROOT / "README.md").read_text() + (ROOT / ".github/MANUAL.md").read_text()
    cells = re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in cells] == "swarm mount swarm coordinator worker monitor look compare".split()
    colab = "import sys; from types import SimpleNamespace as S; drive = S(mount=print)"
    kernel.run_cell(f"{colab}\nsys.modules |= {{'google': S(), 'google.colab': S(drive=drive)}}")
    kernel.run_cell("", GDRIVE_PATH=tmp_path, WARM_START_STEPS=20, PYTHONPATH=ROOT)
    for name, cell in [cell for cell in cells if cell[0] not in ("coordinator", "compare")]:
        cell = re.sub("%pip.*", "", cell).replace("/content/drive/MyDrive/sapo", str(ROOT))
        kernel.run_cell(re.sub(r'MAX_ROUNDS="\d+"', f'MAX_ROUNDS="{3 if name == "swarm" else 5}"', cell))
    assert "finished; " in "".join(kernel.said) and "".join(kernel.said).count("image/png") >= 2


def test_L6_the_warm_start_is_made_once_and_shared_by_processes_that_start_together(drive):
    processes = [Process(drive, name, WARM_START_STEPS=60, MAX_ROUNDS=1).start() for name in "abc"]
    assert [process.end() for process in processes] == [0] * 3
    assert [path.suffix for path in (drive / "warmstart").iterdir()] == [".safetensors"], "no claim is left"
    assert sum("60/60" in process.text for process in processes) == 1
    other = Process(drive, "d", WARM_START_STEPS=60, MAX_ROUNDS=1, EXPERIMENT_NAME="other", SEED=4).start()
    assert other.end() == 0 and "(the one that is there differs in SEED)" in other.text
