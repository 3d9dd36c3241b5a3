"""What else a worker holds: settings, resuming, two stages, other models, the Hub, a lost folder."""
# ruff: noqa: F811, fixtures are imported

import errno
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import grpo
import huggingface_hub
import pytest
import sapo
import torch
from coordinator import COORDINATOR
from drive_store import COUNTS, FIGURES, LAYOUT, BadFile, DriveStore, bucket
from safetensors import safe_open
from safetensors.torch import save_file
from test_grpo import base_models  # noqa: F401
from test_sapo import PROJECT, TASKS, UNTRAINED, Config, at_call, config_error, config_of, contents, events_of
from test_sapo import drive, own_temp_folder, unbroken  # noqa: F401
from test_sapo import (
    fields,
    group_by_hand,
    in_another_process,
    make_question,
    read_config,
    rewards_of,
    rows_of,
)
from test_sapo import plain_logps, put, ragged_groups, score, swarm, tiny_lm, until, write_peer
from transformers import AutoTokenizer

# -------- Settings ----------------------------------------------------------------------------------------

DEFAULTS = dict(
    GDRIVE_PATH="auto", EXPERIMENT_NAME="default", NODE_ROLE="worker", NODE_ID="auto", MODEL_NAME="auto",
    SEED=42, TEST_MODE=False, MAX_ROUNDS=2000, MAX_STAGES=1, NUM_TRAIN_SAMPLES=8, NUM_TRANSPLANT_TREES=0,
    NUM_GENERATIONS=8, LOCAL_NODES=1, TASKS="auto", NUM_SHOTS="auto", WARM_START_STEPS="auto",
    ANSWER_TAG_SHARE=0.02, LEARNING_RATE="auto", TEMPERATURE=1.0, MAX_NEW_TOKENS="auto", CLIP_LOW=0.2,
    CLIP_HIGH=0.28, NUM_ITERATIONS=1, LOSS_TYPE="dapo", MICRO_BATCH_SIZE="auto", DTYPE="auto", DEVICE="auto",
    REWARD="exact", EXTERNAL_FILTER=True, LOCAL_OVERSAMPLE=1, COORDINATOR_ROUND_INTERVAL=60.0,
    ROUND_ADVANCE="hybrid", ROLLOUT_PUBLISH_FREQUENCY="stage", ROLLOUT_MAX_AGE=4, FETCH_MAX_PEERS=10,
    FETCH_TIMEOUT_SECONDS=30.0, ROLLOUT_CLEANUP_ENABLED=False, ROLLOUT_KEEP_LAST_N_ROUNDS=10,
    ROLLOUT_ARCHIVE_OLD=False, CHECKPOINT_INTERVAL=10, CHECKPOINT_KEEP=2, EVAL_INTERVAL=0, EVAL_SAMPLES=64,
    STALE_AFTER_SECONDS=300.0, HUGGINGFACE_ACCESS_TOKEN="", HF_REPO="auto", NUM_WORKERS=0, CONFIGS="",
    SEEDS="", EXTERNAL_FLOOR=0.0, LOCAL_REPLAY=0,
)  # fmt: skip


def test_every_variable_of_the_specification_exists_with_its_default():
    assert DEFAULTS.items() <= {spec.name: spec.default for spec in fields(Config)}.items()


def test_a_variable_more_as_in_an_exercise_breaks_no_test_of_settings_or_layout(tmp_path):
    for name in ("drive_store", "grpo", "coordinator", "sapo", "test_sapo"):
        shutil.copy(PROJECT / f"{name}.py", tmp_path)
    text = (tmp_path / "sapo.py").read_text()
    more, before = '    KL_BETA: float = var(0.0, "weight of the KL", low=0, high=10)\n', "    LOSS_TYPE: str"
    (tmp_path / "sapo.py").write_text(text.replace(before, more + before))
    chosen = "value or unset or near_misses or leaves_import or top_level or main_guard"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sapo.py", "-k", chosen]
    command += ["--basetemp", tmp_path / "inner"]  # else it also deletes what many runs before left: minutes
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and int(re.search(r"(\d+) passed", done.stdout)[1]) > 40, done.stdout


@pytest.mark.parametrize(
    "gpu, bf16", [(False, False), (True, False), (True, True)], ids=["cpu", "T4", "A100"]
)
def test_auto_follows_the_hardware_and_the_model(monkeypatch, gpu, bf16):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bf16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (14e9, 16e9))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    auto = config_of()
    assert (auto.DEVICE, auto.DTYPE) == ("cuda" if gpu else "cpu", "bfloat16" if bf16 else "float32")
    assert auto.MODEL_NAME == (sapo.REAL_MODEL if gpu else "tiny")
    for shared in (dict(LOCAL_NODES=4), dict(NUM_WORKERS=4)):  # four of them do not fit a T4
        config, notes = read_config({name: str(value) for name, value in shared.items()})
        assert config.MODEL_NAME == "tiny" and "MODEL_NAME=auto takes tiny" in notes[0]
    for model, values in {"tiny": (0, 1750, 3e-4, 10), "gpt2": (2, 0, 1e-6, 256)}.items():
        c = config_of(MODEL_NAME=model)
        assert (c.NUM_SHOTS, c.WARM_START_STEPS, c.LEARNING_RATE, c.MAX_NEW_TOKENS) == values


def test_names_and_places_are_chosen_and_the_coordinators_seat_is_kept_free(monkeypatch):
    first, second = (read_config({})[0] for _ in range(2))
    assert first.NODE_ID != second.NODE_ID and re.fullmatch("node_[0-9a-f]{8}", first.NODE_ID)
    assert read_config({"LOCAL_NODES": "3"})[0].NODE_ID == "node" and first.GDRIVE_PATH == "rl-swarm"
    assert read_config({"GDRIVE_PATH": "~/drive"})[0].GDRIVE_PATH == str(Path.home() / "drive")
    assert config_of(NODE_ROLE="coordinator").NODE_ID == COORDINATOR
    assert "seat" in config_error(NODE_ID="Coordinator") and config_of(NODE_ID="x" * 64)
    assert "NODE_ID" in config_error(NODE_ID="x" * 63, LOCAL_NODES="2")
    assert "no token has" in config_error(HUGGINGFACE_ACCESS_TOKEN="hf_\u200babc")
    monkeypatch.setattr(Path, "is_dir", lambda self: str(self) == "/content/drive/MyDrive")
    assert config_of().GDRIVE_PATH == "/content/drive/MyDrive/rl-swarm"


def test_test_mode_changes_defaults_each_of_which_can_be_set():
    names = ("MAX_ROUNDS", "NUM_TRAIN_SAMPLES", "NUM_GENERATIONS", "MODEL_NAME")
    assert [getattr(config_of(TEST_MODE=True), name) for name in names] == [3, 4, 4, "tiny"]
    for name in (*names, "WARM_START_STEPS"):
        text = "gpt2" if name == "MODEL_NAME" else "5"
        assert str(getattr(config_of(TEST_MODE=True, **{name: text}), name)) == text


def test_retention_covers_resuming_and_the_oldest_externals():
    for given, kept in (("23", 24), ("24", 24), ("30", 30)):
        settings = dict(CHECKPOINT_INTERVAL="20", ROLLOUT_KEEP_LAST_N_ROUNDS=given)
        config, warnings = read_config({"MODEL_NAME": "tiny", "ROLLOUT_CLEANUP_ENABLED": "1", **settings})
        assert sapo.rounds_to_keep(config) == kept and bool(warnings) == (given == "23")


def test_settings_that_disagree_with_the_experiment_are_refused_with_both_values(
    drive, unbroken, base_models, capsys
):
    shutil.copytree(unbroken, folder := drive / "experiments/differs")
    kept = {path: data for path, data in contents(folder).items() if path[:4] in ("conf", "rewa", "chec")}
    for variable, ours, theirs in [
        ("SEED", 7, "42"), ("TASKS", "small_gcd", ",".join(TASKS)), ("REWARD", "verifier", "exact"),
        ("MAX_STAGES", 2, "1"), ("LOCAL_NODES", 3, "node_1"), ("MODEL_NAME", base_models / "llama", "tiny"),
    ]:  # fmt: skip
        settings = {"MAX_ROUNDS": 20, "MAX_NEW_TOKENS": 8, **UNTRAINED, variable: ours}
        assert swarm(drive, "differs", **settings) == 2
        last = capsys.readouterr().out.splitlines()[-1]
        assert variable in last and str(ours) in last and theirs in last
        assert kept.items() <= contents(folder).items()


def test_a_coordinator_that_comes_first_does_not_decide_what_the_workers_train_on(tmp_path):
    settings = dict(MAX_ROUNDS=1, LOCAL_NODES=1, **UNTRAINED)
    role = dict(NODE_ROLE="coordinator", TASKS="bf", **settings)
    thread = threading.Thread(target=lambda: swarm(tmp_path, "first", **role), daemon=True)
    thread.start()
    until(lambda: (tmp_path / "experiments/first/state/rounds").exists())
    assert swarm(tmp_path, "first", TASKS=" gcd, lcm ", SEED=7, **settings) == 0
    thread.join(30)
    config = json.loads((tmp_path / "experiments/first/config.json").read_text())
    assert (config["TASKS"], config["SEED"]) == ("gcd,lcm", 7) and not thread.is_alive()


def test_a_folder_that_cannot_be_used_is_named_with_its_variable(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert swarm(tmp_path / "file", "x", **UNTRAINED) == 2
    assert f"GDRIVE_PATH={tmp_path / 'file'}" in capsys.readouterr().out
    assert swarm(tmp_path, "none", NODE_ROLE="monitor") == 1
    assert "no experiment 'none'" in capsys.readouterr().out


# -------- Going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "empty", "wrong bytes in a tensor", "something else"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(drive, unbroken, damage):
    name = f"damaged_{damage}".replace(" ", "_")
    shutil.copytree(unbroken, folder := drive / "experiments" / name)
    path = folder / "checkpoints/round_000013/node.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 64  # nothing but the checksum tells
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b""}.get(damage, data))
    if damage == "something else":
        save_file({"x": torch.zeros(3)}, path, {"about": '{"next_round": 99}'})
    assert swarm(drive, name, MAX_ROUNDS=15) == 0, "MAX_ROUNDS may grow"
    texts = [event["text"] for event in events_of(drive, name, "resume")]
    assert "round_000013" in texts[0] and "cannot be used" in texts[0] and "after round 11" in texts[-1]
    assert rewards_of(drive, "unbroken").items() < rewards_of(drive, name).items()


def test_with_all_checkpoints_damaged_nothing_starts_over(drive, unbroken, capsys):
    shutil.copytree(unbroken, folder := drive / "experiments/all_damaged")
    for path in folder.glob("checkpoints/*/*.safetensors"):
        path.write_bytes(b"damaged")
    kinds = ("checkpoints", "rewards", "rollouts", "state", "models")
    before = [contents(folder / kind) for kind in kinds]
    assert swarm(drive, "all_damaged", MAX_ROUNDS=20) == 2 and "can be used" in capsys.readouterr().out
    assert [contents(folder / kind) for kind in kinds] == before


def test_a_checkpoint_with_a_header_that_would_fill_the_memory_is_passed_over(drive, unbroken):
    """64 MB of empty strings took 2.2 GB and a minute; hard links to one file cost a minute each."""
    shutil.copytree(unbroken, folder := drive / "experiments/long_header")
    header = b'{"__metadata__":{' + b",".join(b'"%07d":""' % i for i in range(2_000_000)) + b"}}"
    for round_ in (14, 15, 16):
        place = folder / f"checkpoints/{bucket(round_)}/node.safetensors"
        place.parent.mkdir()
        place.write_bytes(len(header).to_bytes(8, "little") + header)
    began = time.monotonic()
    assert swarm(drive, "long_header", MAX_ROUNDS=15) == 0
    texts = [event["text"] for event in events_of(drive, "long_header", "resume")]
    assert len(texts) == 4 and "after round 13" in texts[-1] and time.monotonic() < began + 30
    assert all("ValueError" in text for text in texts[:3])


def test_what_is_too_much_for_a_header_is_not_written_but_said(drive, monkeypatch):
    monkeypatch.setattr(sapo, "MAX_HEADER", 100)
    assert swarm(drive, "too_much", MAX_ROUNDS=4, CHECKPOINT_INTERVAL=2, LOCAL_REPLAY=9) == 1
    assert "lower NUM_TRANSPLANT_TREES" in events_of(drive, "too_much", "error")[0]["text"]
    assert len(rows_of(drive, "too_much")) == 8


def test_a_run_whose_last_rounds_were_skipped_keeps_what_it_learned(drive, monkeypatch):
    """A stranger, or a slow machine: the clock is beyond MAX_ROUNDS before the last round was worked on."""

    def run_away():
        store = DriveStore(drive, "skipped_end")
        store.register("zed", "worker", {})
        store.open_round(40, "zed")
        time.sleep(1.5)

    at_call(monkeypatch, "finish_round", 5, run_away)
    settings = dict(MAX_ROUNDS=14, CHECKPOINT_INTERVAL=100, LOCAL_NODES=1, NODE_ID="node")
    assert swarm(drive, "skipped_end", **settings) == 0
    assert [round_ for _, round_ in events_with_round(drive, "skipped_end")] == [4]
    assert swarm(drive, "skipped_end", **{**settings, "MAX_ROUNDS": 50}) == 0
    assert "after round 4" in events_of(drive, "skipped_end", "resume")[0]["text"]


def events_with_round(drive, name) -> list[tuple]:
    return [(event["event"], event["round"]) for event in events_of(drive, name, "checkpoint")]


def test_a_resumed_run_takes_the_settings_of_the_update_from_the_new_start(drive, monkeypatch):
    new = dict(temperature=0.9, loss_type="grpo", clip_low=0.1, clip_high=0.4, num_iterations=2)
    seen, learn, settings = [], sapo.update, {name.upper(): value for name, value in new.items()}

    def spy(model, optimizer, groups, **given):
        seen.append({name: given[name] for name in new} | {"lr": optimizer.param_groups[0]["lr"]})
        return learn(model, optimizer, groups, **given)

    assert swarm(drive, "new_settings", MAX_ROUNDS=1, **UNTRAINED) == 0
    monkeypatch.setattr(sapo, "update", spy)
    assert swarm(drive, "new_settings", MAX_ROUNDS=2, LEARNING_RATE=1e-5, **settings, **UNTRAINED) == 0
    assert "after round 0" in events_of(drive, "new_settings", "resume")[0]["text"]
    assert seen == [new | {"lr": 1e-5}] * 2  # nodes


def test_what_is_planted_where_ones_own_checkpoints_will_be_and_above_costs_none_of_them(drive):
    settings = dict(CHECKPOINT_INTERVAL=2, **UNTRAINED)
    assert swarm(drive, "planted", MAX_ROUNDS=4, **settings) == 0
    for round_, data in ((5, b"PK\3\4dummy"), (7, b"PK\3\4dummy"), (50, b""), (60, b""), (900, b"")):
        put(DriveStore(drive, "planted"), f"checkpoints/{bucket(round_)}/node.safetensors", data)
    assert swarm(drive, "planted", MAX_ROUNDS=8, **settings) == 0
    texts = [event["text"] for event in events_of(drive, "planted", "resume")]
    assert len(texts) == 5 and "after round 3" in texts[-1]
    for round_ in (5, 7):
        path = drive / f"experiments/planted/checkpoints/{bucket(round_)}/node.safetensors"
        assert read_state(path)[0]["next_round"] == round_ + 1


@pytest.mark.parametrize("name, others", [("node_0", {"LOCAL_NODES": 1}), ("a", {"LOCAL_NODES": 2})])
def test_a_node_does_not_begin_again_because_it_ran_with_others_or_alone(
    drive, unbroken, capsys, name, others
):
    folder = drive / f"experiments/regrouped_{name}"
    if name == "node_0":  # it ran in a process with node_1
        shutil.copytree(unbroken, folder)
    else:
        assert swarm(drive, folder.name, NODE_ID="a_0", LOCAL_NODES=1, MAX_ROUNDS=5) == 0
    shutil.rmtree(folder / "models")  # as where it was killed before its end
    before = contents(folder / "rewards")
    assert swarm(drive, folder.name, NODE_ID=name, MAX_ROUNDS=20, **others) == 2
    assert f"{name} trained here, and has no checkpoint: restore it or LOCAL_NODES" in capsys.readouterr().out
    assert contents(folder / "rewards") == before
    if name == "node_0":
        shutil.move(folder / "checkpoints", folder / "taken")  # its process's log tells of them
        assert swarm(drive, folder.name, NODE_ID=name, MAX_ROUNDS=20, **others) == 2
        shutil.move(folder / "taken", folder / "checkpoints")
    for new in ({"NODE_ID": "node_1", "LOCAL_NODES": 2}, {"NODE_ID": "node_new", "LOCAL_NODES": 1}):
        assert swarm(drive, folder.name, MAX_ROUNDS=20, **new) == 0, "others may join"


def test_tasks_that_change_during_a_start_are_not_trained_on(drive, monkeypatch, capsys):
    """Tokenizer and warm start are made for the tasks of the first look."""

    def meanwhile(*_):
        there = dict(layout=LAYOUT, SEED=42, REWARD="exact", MAX_STAGES=1, TASKS="small_gcd")
        put(store, "config.json", there)

    store = DriveStore(drive, "other_tasks")
    monkeypatch.setattr(sapo, "load_warm_start", meanwhile)
    assert swarm(drive, "other_tasks", TASKS="auto") == 2
    text = capsys.readouterr().out
    assert "config.json changed during this start: start it again" in text
    assert not [*store.base.glob("rollouts/*")]


def test_a_node_that_comes_too_late_does_not_say_that_it_trained_all_rounds(drive, capsys):
    store = DriveStore(drive, "too_late")
    for round_ in range(3):
        put(store, f"state/rounds/{bucket(round_)}.other.json")
        put(store, f"rewards/{bucket(round_)}/stage_0/other.json")
    put(store, "peers/other.1700000000000-00000000.json")
    assert swarm(drive, "too_late", NODE_ID="late", LOCAL_NODES=1, MAX_ROUNDS=2, **UNTRAINED) == 0
    text = capsys.readouterr().out
    assert "skip: rounds 0 to 1 were opened by the swarm meanwhile; to go on, raise MAX_ROUNDS" in text
    assert "already finished" not in text


@pytest.mark.parametrize("how", ["deleted", "link", "file"])
def test_a_node_whose_checkpoints_are_gone_does_not_begin_again(drive, unbroken, capsys, tmp_path, how):
    shutil.copytree(unbroken, folder := drive / "experiments/none_left", dirs_exist_ok=True)
    for path in (folder / "checkpoints").glob("*"):
        path.rename(tmp_path / path.name)
        if how != "deleted":
            path.symlink_to(tmp_path / path.name) if how == "link" else path.touch()
    before = [contents(folder / name) for name in ("models", "rewards", "rollouts")]
    assert swarm(drive, "none_left", MAX_ROUNDS=15) == 2
    assert "trained here, and has no checkpoint" in capsys.readouterr().out
    assert [contents(folder / name) for name in ("models", "rewards", "rollouts")] == before
    shutil.rmtree(folder / "models")  # now only the rewards tell that it had come so far
    assert swarm(drive, "none_left", MAX_ROUNDS=15) == 2
    shutil.rmtree(folder)


def test_a_checkpoint_from_far_above_a_wiped_clock_is_no_reason_to_begin_again(drive, unbroken, capsys):
    shutil.copytree(unbroken, folder := drive / "experiments/wiped")
    for name in ("state", "rewards", "models"):
        shutil.rmtree(folder / name)
    (folder / "checkpoints/round_000013").rename(folder / "checkpoints/round_000213")
    shutil.rmtree(folder / "checkpoints/round_000011")
    assert swarm(drive, "wiped", MAX_ROUNDS=15) == 2
    assert "trained here, and has no checkpoint" in capsys.readouterr().out


def test_a_node_that_was_stopped_before_its_first_checkpoint_begins_again(drive, unbroken, monkeypatch):
    def work():
        at_call(monkeypatch, "finish_round", 1, lambda: os._exit(9))
        swarm(drive, "early")

    assert in_another_process(work) == 9
    assert swarm(drive, "early") == 0
    assert rewards_of(drive, "early").items() < rewards_of(drive, "unbroken").items(), "it replays"
    said = (drive / "experiments/early/logs/node/stdout.log").read_text()
    assert said.count("node was here before, and left no checkpoint: it begins with fresh weights") == 1


def test_the_registration_of_any_node_of_a_process_is_missed(drive, monkeypatch, tmp_path):
    """A deleted one of another node than the first went unnoticed, and the report knew nothing of it."""
    peers = drive / "experiments/unregistered/peers"

    def take():
        (path,) = peers.glob("node_1.*")
        path.rename(tmp_path / path.name)
        time.sleep(2)

    def bring_back():
        (path,) = tmp_path.glob("node_1.*")
        path.rename(peers / path.name)
        time.sleep(2)

    at_call(monkeypatch, "finish_round", 3, take)
    at_call(monkeypatch, "finish_round", 6, bring_back)
    assert swarm(drive, "unregistered", MAX_ROUNDS=8, **UNTRAINED) == 0
    assert len(events_of(drive, "unregistered", "outage")) == 2, "and that it is over"
    assert len(rows_of(drive, "unregistered")) == 16


def test_a_process_that_slept_over_a_newer_one_leaves_its_model_alone(drive, monkeypatch):
    def finish_elsewhere():
        store = DriveStore(drive, "slept")
        store.register("node_1", "worker", {})
        store.write("models/node_0/model.safetensors", b"the newer one's")

    at_call(monkeypatch, "save_models", 1, finish_elsewhere)
    assert swarm(drive, "slept", MAX_ROUNDS=2, **UNTRAINED) == 3
    assert contents(drive / "experiments/slept/models") == {"node_0/model.safetensors": b"the newer one's"}


def test_a_second_stop_in_a_notebook_leaves_no_thread_behind(drive, monkeypatch):
    def stop_twice():
        for _ in range(2):
            time.sleep(0.6)
            os.kill(os.getpid(), signal.SIGINT)

    at_call(monkeypatch, "policy_gradient", 3, stop_twice)
    assert swarm(drive, "cell", **UNTRAINED) == 130
    until(lambda: "swarm" not in {thread.name for thread in threading.enumerate()})


def test_a_local_disk_that_was_tidied_up_costs_no_checkpoint(drive, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "job"))
    (tmp_path / "job").mkdir()
    at_call(monkeypatch, "finish_round", 2, lambda: shutil.rmtree(tmp_path / "job"))
    assert swarm(drive, "tidied", MAX_ROUNDS=4, CHECKPOINT_INTERVAL=2, **UNTRAINED) == 0
    assert DriveStore(drive, "tidied").checkpoints("node") == [3, 1]


def test_tasks_that_are_the_experiments_own_are_named(drive, capsys):
    for tasks in ("small_gcd,small_lcm", "auto"):
        assert swarm(drive, "named", MAX_ROUNDS=2, **UNTRAINED | {"TASKS": tasks}) == 0
    assert "config.json: small_gcd,small_lcm\n" in capsys.readouterr().out


@pytest.mark.parametrize("where", [">&-", "2>&1 >&-", "> /dev/full", "> /dev/full 2>&1", "| true"])
def test_an_output_that_is_closed_or_full_ends_no_training(tmp_path, where):
    settings = {"GDRIVE_PATH": tmp_path, "MODEL_NAME": "tiny", "NODE_ID": "n", "MAX_ROUNDS": 3}
    settings |= {"NUM_GENERATIONS": 2, "NUM_TRAIN_SAMPLES": 2, **UNTRAINED}
    environ = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    command = f"set -o pipefail; {sys.executable} {PROJECT / 'sapo.py'} {where}"
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert DriveStore(tmp_path, "default").rounds("rewards") == [0, 1, 2]


def test_a_newer_session_makes_the_older_one_stop_with_status_3(drive, monkeypatch):
    def start_again():
        DriveStore(drive, "twins").register("node_1", "worker", {})
        time.sleep(1)

    at_call(monkeypatch, "finish_round", 3, start_again)
    assert swarm(drive, "twins", MAX_ROUNDS=14, **UNTRAINED) == 3
    assert max(t for t, _, _ in rewards_of(drive, "twins")) == 2
    assert "newer session of node_1" in events_of(drive, "twins", "end")[-1]["text"]


def test_a_second_signal_ends_the_process_at_once(drive, monkeypatch):
    began, child = time.monotonic(), os.fork()
    if child == 0:
        at_call(monkeypatch, "policy_gradient", 3, lambda: time.sleep(60))
        os._exit(swarm(drive, "hurry", **UNTRAINED))
    until(lambda: (drive / "experiments/hurry/rewards/round_000000").exists())
    for _ in range(2):
        time.sleep(0.7)
        os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130 and time.monotonic() - began < 30


def test_the_rows_of_a_killed_run_are_in_the_log_up_to_its_checkpoint(drive, unbroken, monkeypatch):
    def work():
        first = drive / "experiments/rows/checkpoints/round_000003/node.safetensors"
        at_call(monkeypatch, "policy_gradient", 11, lambda: (until(first.exists), os._exit(9)))
        swarm(drive, "rows", MAX_ROUNDS=6)

    assert in_another_process(work) == 9 and swarm(drive, "rows", MAX_ROUNDS=6) == 0
    lines = (drive / "experiments/rows/logs/node_0/metrics.jsonl").read_text().splitlines()
    rows = {row["round"]: row for row in map(json.loads, lines)}
    assert rows.keys() == set(range(6))
    for reward in rows_of(drive, "rows", "node_0"):
        row = rows[reward["round"]]
        assert row["my_reward"] == reward["reward"] and row["experiment"] == "rows"
        assert reward.keys() - row.keys() <= {"session"}, "every figure is in the log too"


# -------- Sharing and rewards -----------------------------------------------------------------------------


@pytest.mark.parametrize("frequency, files", [("generation", 8), ("stage", 8), ("round", 4)])
def test_every_publish_frequency_shares_with_two_stages(drive, frequency, files):
    name = f"per_{frequency}"
    settings = dict(MAX_STAGES=2, ROLLOUT_PUBLISH_FREQUENCY=frequency, EXTERNAL_FILTER=False, MAX_ROUNDS=2)
    assert swarm(drive, name, **settings, **UNTRAINED) == 0
    late = 0 if frequency == "round" else 2  # before the last stage of round 0 nothing is there yet
    assert [row["external_groups"] for row in rows_of(drive, name)] == [late, late, 2, 2, 2, 2, 2, 2]
    assert len(contents(drive / "experiments" / name / "rollouts")) == files


def test_the_reward_is_the_mean_over_all_own_completions(drive, unbroken):
    assert swarm(drive, "oversample", LOCAL_OVERSAMPLE=2) == 0
    for name, published in (("unbroken", 2), ("oversample", 4)):
        for row in rows_of(drive, name, "node_0"):
            file, scores = f"{name}/rollouts/{bucket(row['round'])}/stage_0/node_0.json", []
            groups = json.loads((drive / "experiments" / file).read_text())["rollouts"].values()
            for group in groups:
                question = make_question(group["task"], group["seed"])
                scores += [score(question, completion["response"]) for completion in group["completions"]]
            assert len(groups) == published and row["local_groups"] == 2, "all are published, I trained on"
            assert row["reward"] == sum(scores) / len(scores) and row["completions"] == len(scores)


@pytest.mark.parametrize("filtered", [True, False])
def test_the_filter_decides_whether_flat_externals_are_trained_on(drive, filtered):
    write_peer(drive, f"filter_{filtered}", "human", [group_by_hand(1, right=4), group_by_hand(2)])
    settings = dict(MAX_ROUNDS=1, EXTERNAL_FILTER=filtered, NUM_TRANSPLANT_TREES=9)
    assert swarm(drive, f"filter_{filtered}", **settings, **UNTRAINED) == 0
    row = rows_of(drive, f"filter_{filtered}", "node_0")[0]
    assert row["external_groups"] == (1 if filtered else 4) and row["informative_groups"] == 1


def test_seeds_without_a_question_stop_nobody(drive, monkeypatch):
    """A node's own is replaced by the next; a stranger's is a rejection."""
    bad, original = 1488473454406226, sapo.stream_seed
    prompt = make_question("decimal_arithmetic", bad + 1).text
    strange = group_by_hand(1) | {"task": "decimal_arithmetic", "seed": bad, "prompt": prompt}
    write_peer(drive, "unlucky", "human", [strange])
    monkeypatch.setattr(sapo, "stream_seed", lambda *a: bad if a[4] == "question" else original(*a))
    assert swarm(drive, "unlucky", TASKS="decimal_arithmetic", MAX_ROUNDS=1, **UNTRAINED) == 0
    assert rows_of(drive, "unlucky")[0]["rejected"] == 1
    own = (drive / "experiments/unlucky/rollouts/round_000000/stage_0/node_0.json").read_text()
    assert {group["seed"] for group in json.loads(own)["rollouts"].values()} == {bad + 1}


def test_a_peers_completion_may_be_twice_as_long_as_ones_own_and_no_longer(drive):
    seed = next(seed for seed in range(99) if len(make_question(TASKS[0], seed).answer) == 2)
    for peer, more, times in (("fits", 15, 1), ("long", 16, 1), ("heavy", 251, 16)):
        group = group_by_hand(seed, right=2)
        for completion in group["completions"]:  # two tags, two characters and EOS
            completion["response"] = "x" * more + completion["response"]
        group["completions"] *= times
        write_peer(drive, "long_ones", peer, [group])
    assert swarm(drive, "long_ones", MAX_ROUNDS=1, **UNTRAINED) == 0
    texts = [event["text"] for event in events_of(drive, "long_ones", "reject")]
    assert sorted(texts) == [f"{peer}: completion empty or over 20 tokens here" for peer in ("heavy", "long")]
    for row in rows_of(drive, "long_ones"):
        assert (row["external_groups"], row["trained_tokens"]) == (1, 4 * 20)


def test_three_different_models_learn_from_one_another(drive, base_models, monkeypatch):
    statuses, load, one = {}, sapo.load_model, threading.Lock()
    begin, together = sapo.next_round, threading.Barrier(3)  # or one is done before another begins

    def begin_together(run):
        if not run.history:
            together.wait(60)
            until(lambda: len(run.swarm.sessions) == 3)
            run.swarm.leaderless_since = float("-inf")
            together.wait(60)
        return begin(run)

    def load_alone(*args):
        with one:  # from_pretrained changes globals of torch while it runs
            return load(*args)

    def work(name):
        own = {} if name == "tiny" else {"MODEL_NAME": base_models / name, "MAX_NEW_TOKENS": 8, **UNTRAINED}
        settings = dict(LOCAL_NODES=1, MAX_ROUNDS=4, FETCH_TIMEOUT_SECONDS=10, NUM_TRANSPLANT_TREES=4, **own)
        statuses[name] = swarm(drive, "mixed", NODE_ID=name, EXTERNAL_FILTER=False, **settings)

    monkeypatch.setattr(sapo, "load_model", load_alone)
    monkeypatch.setattr(sapo, "next_round", begin_together)
    threads = [threading.Thread(target=work, args=(name,)) for name in ("llama", "gpt2")]
    for thread in threads:
        thread.start()
    work("tiny")
    for thread in threads:
        thread.join(timeout=60)
    assert statuses == dict.fromkeys(("tiny", "llama", "gpt2"), 0)
    for name in statuses:
        path = drive / f"experiments/mixed/checkpoints/round_000003/{name}.safetensors"
        used = {peer for _, _, peer, _ in read_state(path)[0]["nodes"][name]["trained"]}
        assert used == statuses.keys() - {name}
        assert any(row["grad_norm"] > 0 for row in rows_of(drive, "mixed", name))


def test_held_out_figures_disturb_nothing_and_the_functions_for_notebooks_agree(drive, unbroken):
    assert swarm(drive, "held_out", EVAL_INTERVAL=2, EVAL_SAMPLES=8, MAX_ROUNDS=4) == 0
    rows = rows_of(drive, "held_out", "node_0")
    assert ["held_out" in row for row in rows] == [False, True, False, True] and 0 <= rows[1]["held_out"] <= 1
    numbers = {name for row in rows for name, value in row.items() if isinstance(value, float | int)}
    assert numbers - {"round", "stage"} == {*COUNTS, *FIGURES}, "readers keep a place for each"
    rewards, status = rewards_of(drive, "unbroken"), sapo.get_experiment_status(drive, "unbroken")
    assert rewards_of(drive, "held_out").items() <= rewards.items()
    assert status["current_round"] == 13 and status["num_active_peers"] == 0
    total = sum(reward for key, reward in rewards.items() if key[2] == "node_0")
    assert status["cumulative_rewards"]["node_0"] == pytest.approx(total)
    about, _ = read_state(max(drive.glob("experiments/unbroken/checkpoints/*/node.safetensors")))
    assert about["nodes"]["node_0"]["total_reward"] == pytest.approx(total)
    assert len(sapo.get_experiment_metrics(drive, "unbroken")) == 28


@pytest.mark.parametrize("archive", [False, True])
def test_retention_takes_old_rounds_and_nothing_else(drive, archive):
    name = f"retention_{archive}"
    write_peer(drive, name, "human", [group_by_hand(1)])
    settings = dict(ROLLOUT_KEEP_LAST_N_ROUNDS=4, CHECKPOINT_INTERVAL=2, ROLLOUT_MAX_AGE=2, MAX_ROUNDS=8)
    settings |= dict(ROLLOUT_CLEANUP_ENABLED=True, ROLLOUT_ARCHIVE_OLD=archive, **UNTRAINED)
    assert swarm(drive, name, **settings) == 0 and len(rewards_of(drive, name)) == 16
    left = sorted(path[:12] for path in contents(drive / "experiments" / name / "rollouts"))
    assert left == [bucket(t) for t in range(4, 8) for _ in range(2)]
    assert len(contents(drive / "archives" / name)) == (9 if archive else 0)


def test_validate_passes_a_test_mode_run_and_what_is_missing_fails_it(drive):
    own = {"TEST_MODE": True, "LOCAL_NODES": 1, "NODE_ID": "solo", "NUM_WORKERS": 1}
    assert swarm(drive, "tested", **own) == 0 and len(rows_of(drive, "tested")) == 3
    assert swarm(drive, "tested", NODE_ROLE="validate", **own) == 0
    assert swarm(drive, "tested", NODE_ROLE="validate", **{**own, "NUM_WORKERS": 2}) == 1
    weights = drive / "experiments/tested/models/solo/model.safetensors"
    weights.write_bytes(b"")
    assert swarm(drive, "tested", NODE_ROLE="validate", **own) == 1
    shutil.rmtree(drive / "experiments/tested/models")
    assert swarm(drive, "tested", NODE_ROLE="validate", **own) == 1


@pytest.mark.parametrize(("clock", "before"), [(2, 2), (30, 9)])
def test_a_node_far_ahead_of_the_clock_retires_by_the_clock(clock, before):
    """Back from an outage it deleted everybody's newest rollouts."""
    retired = []
    store = SimpleNamespace(retire_rollouts=lambda *args: retired.append(args))
    config = config_of(ROLLOUT_KEEP_LAST_N_ROUNDS=1, CHECKPOINT_INTERVAL=1, ROLLOUT_MAX_AGE=0)
    sapo.retire(SimpleNamespace(done=9, config=config, store=store, swarm=SimpleNamespace(clock=clock)))
    assert retired == [(before, False)]


def test_archives_that_cannot_be_made_are_said_once(tmp_path, capsys):
    (tmp_path / "archives").write_text("a plain file in the user's own folder")
    settings = dict(ROLLOUT_CLEANUP_ENABLED=True, ROLLOUT_ARCHIVE_OLD=True, ROLLOUT_KEEP_LAST_N_ROUNDS=1)
    settings |= dict(CHECKPOINT_INTERVAL=1, MAX_ROUNDS=12, ROLLOUT_MAX_AGE=1, **UNTRAINED)
    assert swarm(tmp_path, "no_archives", **settings) == 1
    said = capsys.readouterr().out
    assert said.count("retire was set aside: ") == 1 and "\n1 writes did not reach" in said


# -------- What may go wrong -------------------------------------------------------------------------------


def test_training_goes_on_where_the_folder_vanishes_in_the_first_round(drive, monkeypatch):
    folder = drive / "experiments/early"
    away, returned = folder.with_name("early_away"), []

    def vanish():
        folder.rename(away)
        time.sleep(1)  # time enough to notice
        threading.Timer(6, lambda: (returned.append(time.time()), away.rename(folder))).start()

    at_call(monkeypatch, "policy_gradient", 1, vanish)
    assert swarm(drive, "early", MAX_ROUNDS=4, **UNTRAINED) == 0
    lines = (folder / "logs/node_0/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[2])["timestamp"] < returned[0]


def test_in_an_outage_only_the_newest_checkpoint_waits(drive, monkeypatch):
    folder, waiting, save = drive / "experiments/newest", [], sapo.save_checkpoint
    away = folder.with_name("newest_away")

    def watched(run):
        if run.done == 2:
            folder.rename(away)
            until(lambda: run.swarm.down)
        elif run.done == 9:
            away.rename(folder)
        save(run)
        waiting.append([path.parent.name[-1] for path in run.scratch.glob("checkpoints/*/*")])

    def full(tensors, path, about):
        if json.loads(about["about"])["next_round"] == 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, about)

    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr(sapo, "save_checkpoint", watched)
    assert swarm(drive, "newest", MAX_ROUNDS=11, CHECKPOINT_INTERVAL=1, **UNTRAINED) == 0
    expected = [[str(t)] for t in (2, 3, 4, 5, 5, 7, 8)]
    assert waiting[2:9] == expected, "what waits is deleted only when a newer one is there"


@pytest.mark.parametrize("failing, status", [(3, 0), (9, 1)])  # of four: after each round, and at the end
def test_a_checkpoint_that_the_local_disk_does_not_take_is_said_and_training_goes_on(
    drive, monkeypatch, failing, status
):
    tries, name = itertools.count(), f"unsaved{failing}"

    def full(tensors, path, about):
        if next(tries) < failing:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, about)

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert swarm(drive, name, CHECKPOINT_INTERVAL=1, **UNTRAINED) == status
    assert len(rows_of(drive, name)) == 6
    texts = [event["text"] for event in events_of(drive, name, "error")]
    assert len(texts) == min(failing, 4) and all("No space left" in text for text in texts)
    saved = drive / f"experiments/{name}/checkpoints/round_000002"
    assert saved.exists() == (status == 0) and len([*saved.parent.glob("*")]) <= 1


def test_questions_that_have_no_room_beside_the_completions_are_named(drive, base_models, capsys):
    settings = dict(
        MODEL_NAME=base_models / "gpt2", MAX_NEW_TOKENS=200, TASKS="arc_1d,small_gcd", **UNTRAINED
    )
    assert swarm(drive, "narrow", MAX_ROUNDS=1, NUM_TRAIN_SAMPLES=1, **settings) == 0
    assert "questions of arc_1d are cut to 256 tokens: lower MAX_NEW_TOKENS" in capsys.readouterr().out


def test_a_missing_signal_is_named_also_after_resuming(drive):
    settings = dict(NUM_TRANSPLANT_TREES=0, CHECKPOINT_INTERVAL=13, **UNTRAINED)
    told = []
    for rounds in (13, 30):
        assert swarm(drive, "silence", MAX_ROUNDS=rounds, **settings) == 0
        told.append([event["round"] for event in events_of(drive, "silence", "no signal")])
    assert told[0] == [9] and len(told[1]) > 1


@pytest.mark.parametrize("lies", ["list", "torn", "link to zeros", "a dead maker's"])
def test_what_lies_in_the_place_of_a_claim_or_a_warm_start_blocks_nobody(tmp_path, lies):
    assert swarm(tmp_path, "first", MAX_ROUNDS=1, WARM_START_STEPS=2) == 0
    (weights,) = (tmp_path / "warmstart").glob("*")
    good, dead = weights.read_bytes(), json.dumps(sapo.process_identity() | {"pid_start": "1"})
    weights.unlink()
    if lies == "link to zeros":
        weights.symlink_to("/dev/zero")
    else:
        weights.write_bytes(good[:-9])
        claim = {"list": "[]", "torn": '{"pid"', "a dead maker's": dead}[lies]
        weights.with_suffix(".claim").write_text(claim)
    assert swarm(tmp_path, "second", MAX_ROUNDS=1, WARM_START_STEPS=2) == 0
    assert contents(tmp_path / "warmstart") == {weights.name: good}


@pytest.fixture
def hub(monkeypatch):
    """Stands for huggingface_hub.HfApi: uploads wait for hub.ready, and are then listed in hub.pushed."""

    class Hub:
        ready, pushed = threading.Event(), []

        def __init__(self, token):
            assert token == "hf_x"

        def whoami(self):
            return {"name": "me"}

        def create_repo(self, repo, exist_ok):
            assert self.ready.wait(60)

        def upload_folder(self, repo_id, folder_path, commit_message):
            self.pushed.append((repo_id, commit_message, "model.safetensors" in os.listdir(folder_path)))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    yield Hub
    Hub.ready.set()


@pytest.mark.parametrize("patience", [60.0, 0.2])
def test_the_last_model_reaches_the_hub_or_is_kept_however_slow_it_is(
    drive, hub, monkeypatch, capsys, patience
):
    if patience > 1:  # no push is through before training is over
        at_call(monkeypatch, "save_models", 1, hub.ready.set)
    monkeypatch.setattr(sapo, "HUB_PATIENCE", patience)
    settings = dict(LOCAL_NODES=1, HUGGINGFACE_ACCESS_TOKEN="hf_x", HF_REPO="me/ours", CHECKPOINT_INTERVAL=1)
    assert swarm(drive, f"slow_{patience}", **settings, **UNTRAINED) == 0
    if patience > 1:
        assert hub.pushed == [("me/ours", f"after round {t}", True) for t in (0, 2)]
    else:
        kept = re.search(r"did not reach the Hub; the model lies in (\S+)", capsys.readouterr().out)[1]
        assert not hub.pushed and len(list(Path(kept).glob("2/*/model.safetensors"))) == 1


def test_with_each_checkpoint_every_nodes_model_is_pushed(drive, hub, monkeypatch):
    at_call(monkeypatch, "sample_batch", 3, lambda: (hub.ready.set(), time.sleep(1)))
    settings = dict(HUGGINGFACE_ACCESS_TOKEN="hf_x", CHECKPOINT_INTERVAL=1, MAX_ROUNDS=2)
    assert swarm(drive, "both", **settings, **UNTRAINED) == 0
    pushed = {(repo, message) for repo, message, _ in hub.pushed}
    assert pushed == {(f"me/both-node_{i}", f"after round {t}") for i in range(2) for t in range(2)}


def test_of_a_token_nothing_is_shown_not_even_a_part_of_it(drive, hub, monkeypatch, capsys):
    """The text of the Hub's error may hold a part, which no scrubber finds: only type and status are told."""
    message = config_error(HUGGINGFACE_ACCESS_TOKEN="hf_\u200bNobody")
    assert "HUGGINGFACE_ACCESS_TOKEN: holds characters" in message and "Nobody" not in message
    refused = ValueError("hf_Nobo…")
    refused.response = SimpleNamespace(status_code=401)
    errors = [refused, ConnectionError("hf_Nobo…")]

    def fail(self):
        raise errors.pop()

    monkeypatch.setattr(hub, "__init__", lambda self, token: None)
    monkeypatch.setattr(hub, "whoami", fail)
    assert swarm(drive, "unheard", HUGGINGFACE_ACCESS_TOKEN="hf_Nobody", MAX_ROUNDS=1, **UNTRAINED) == 0
    told = [event["text"].partition("goes on: ")[2] for event in events_of(drive, "unheard", "hub")]
    assert told == ["ConnectionError (no answer)", "ValueError (401)"]
    assert "Nobo" not in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["LOCAL_NODES", "MODEL_NAME"])
def test_a_start_that_is_refused_takes_nobodys_place(drive, unbroken, base_models, wrong):
    shutil.copytree(unbroken, drive / f"experiments/refused_{wrong}")
    before = DriveStore(drive, f"refused_{wrong}").sessions()
    settings = {"MAX_ROUNDS": 20, "MAX_NEW_TOKENS": 8, **UNTRAINED}
    settings |= {wrong: 3 if wrong == "LOCAL_NODES" else base_models / "llama"}
    assert swarm(drive, f"refused_{wrong}", **settings) == 2
    assert DriveStore(drive, f"refused_{wrong}").sessions() == before


def test_a_stop_ends_the_wait_for_another_nodes_warm_start(tmp_path):
    assert swarm(tmp_path, "first", MAX_ROUNDS=1, WARM_START_STEPS=2) == 0
    (weights,) = (tmp_path / "warmstart").glob("*")
    weights.rename(claim := weights.with_suffix(".claim"))
    claim.write_text(json.dumps(sapo.process_identity()))
    child = os.fork()
    if child == 0:
        os._exit(swarm(tmp_path, "second", MAX_ROUNDS=1, WARM_START_STEPS=2))
    try:
        until(lambda: (tmp_path / "experiments/second").exists())
        time.sleep(1)
        os.kill(child, signal.SIGTERM)
        until(lambda: os.waitpid(child, os.WNOHANG)[0], timeout=3)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_stop_ends_a_warm_start_that_is_being_made_and_leaves_no_claim(tmp_path, monkeypatch):
    config = config_of(MODEL_NAME="tiny", GDRIVE_PATH=str(tmp_path), WARM_START_STEPS="400", NODE_ID="n1")
    model, codec = sapo.load_model(config, TASKS)
    said = []

    def check_stop():
        if len(said) == 1:
            raise sapo.Ended("stopped")

    with pytest.raises(sapo.Ended):
        sapo.load_warm_start(config, model, codec, TASKS, said.append, check_stop)
    assert "warm start 40/400" in said[0] and not [*(tmp_path / "warmstart").iterdir()]


def test_a_run_that_was_stopped_in_its_last_round_gets_its_models_from_the_next_start(drive, monkeypatch):
    settings = dict(MAX_ROUNDS=2, LOCAL_NODES=1, NODE_ID="node")
    with monkeypatch.context() as patch:
        at_call(patch, "policy_gradient", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert swarm(drive, "last_round", **settings) == 130
    models = drive / "experiments/last_round/models/node"
    assert not models.exists()
    assert swarm(drive, "last_round", **settings) == 0
    assert {"model.safetensors", "config.json", "tokenizer_config.json"} <= set(os.listdir(models))


def test_a_full_local_disk_at_the_end_is_said_and_the_next_start_makes_the_models(drive, monkeypatch):
    settings = dict(MAX_ROUNDS=2, LOCAL_NODES=1, NODE_ID="node")

    def full(model, folder):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("I/O error: No space left on device")  # as safetensors says it

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        assert swarm(drive, "full_disk", **settings) == 1
    assert "No space left" in events_of(drive, "full_disk", "error")[0]["text"]
    models = drive / "experiments/full_disk/models/node"
    assert not models.exists()
    assert swarm(drive, "full_disk", **settings) == 0 and "model.safetensors" in os.listdir(models)


def test_a_read_error_at_the_start_is_no_reason_to_go_back_to_an_older_checkpoint(drive, unbroken, capsys):
    shutil.copytree(unbroken, folder := drive / "experiments/eio")
    with pytest.MonkeyPatch.context() as patch:
        read = DriveStore.open

        def fails(store, path, *args, **kwargs):
            if path.startswith("checkpoints/"):
                raise OSError(5, "Input/output error")
            return read(store, path, *args, **kwargs)

        patch.setattr(DriveStore, "open", fails)
        assert swarm(drive, "eio", MAX_ROUNDS=20) == 2
    assert "round_000013/node.safetensors cannot be copied to" in capsys.readouterr().out
    assert swarm(drive, "eio", MAX_ROUNDS=15) == 0
    assert "after round 13" in events_of(drive, "eio", "resume")[0]["text"]
    assert rewards_of(drive, "unbroken").items() < rewards_of(drive, "eio").items() and folder.exists()


def test_a_variable_may_have_one_bound_only():
    @dataclass
    class More:
        KL_BETA: float = sapo.var(0.0, "weight of the KL", low=0)

    assert sapo.parse_value("1", fields(More)[0]) == 1.0


# -------- Ranks, memory, replay, what a new user meets ----------------------------------------------------


@pytest.mark.parametrize(
    "environ, name, role",
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, "node_0", "coordinator"),
        ({"SLURM_PROCID": "2", "RANK": "7"}, "node_2", "worker"),
        ({"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "0"}, "node_4", "worker"),
        ({"SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "node_4_1", "worker"),
        ({"JOB_COMPLETION_INDEX": "0"}, "node_0", "coordinator"), ({"SKYPILOT_NODE_RANK": "3"}, "node_3", "worker"),
        ({"RANK": "x"}, None, "worker"), ({}, None, "worker"),
    ],
)  # fmt: skip
def test_an_engines_rank_is_the_name_so_that_a_requeued_task_resumes_itself(environ, name, role):
    config = read_config({"NODE_ROLE": "auto", "MODEL_NAME": "tiny", **environ})[0]
    assert config.NODE_ROLE == role
    plain = read_config({"MODEL_NAME": "tiny", **environ})[0]
    assert plain.NODE_ROLE == "worker" and plain.NODE_ID == (name or plain.NODE_ID)
    assert name or re.fullmatch("node_[0-9a-f]{8}", plain.NODE_ID)
    assert read_config({"NODE_ID": "anna", "MODEL_NAME": "tiny", **environ})[0].NODE_ID == "anna"


@pytest.mark.parametrize("shared", [{"LOCAL_NODES": "4"}, {"NUM_WORKERS": "4"}])
def test_what_cannot_fit_into_memory_is_refused_before_it_is_tried(monkeypatch, shared):
    monkeypatch.setattr(sapo, "available_memory", lambda device: (8 * 10**9, 8 * 10**9))
    model = torch.nn.Linear(1000, 250_000, bias=False, device="meta")  # 250 M parameters: 4 GB
    model.config = torch.nn.Module()
    shape = type("Shape", (), {"num_hidden_layers": 2, "hidden_size": 64})
    model.config.get_text_config = lambda: shape
    said = []
    assert sapo.check_memory(config_of(MODEL_NAME="x", DEVICE="cpu"), model, said.append) >= 8
    assert said[0].startswith("memory: 4 GB for 1 x x") and said[0].endswith("8.0 GB available")
    with pytest.raises(sapo.ConfigError, match="LOCAL_NODES or NUM_WORKERS, or set a smaller MODEL_NAME"):
        sapo.check_memory(config_of(MODEL_NAME="x", DEVICE="cpu", **shared), model, said.append)


def test_own_informative_groups_are_used_again_once_in_the_place_of_flat_ones():
    config = config_of(LOCAL_REPLAY=2, ROLLOUT_MAX_AGE=2)
    node, rewards = sapo.Node("n", None, None), {"flat": [0.0, 0.0], "good": [0.0, 1.0]}

    def round_(t, *kinds):
        groups = [sapo.Group([t, i], [[1], [2]], rewards[kind]) for i, kind in enumerate(kinds)]
        return [tuple(group.prompt) for group in sapo.replay(groups, node, config, t, 0)]

    assert round_(0, "good", "good", "flat") == [(0, 0), (0, 1), (0, 2)], "there is no past yet"
    assert set(round_(1, "flat", "flat", "flat")) == {(0, 0), (0, 1), (1, 2)}, "at most two"
    assert round_(2, "good", "flat") == [(2, 0), (2, 1)], "each once"
    assert round_(5, "flat") == [(5, 0)], "too old"
    assert sapo.replay([1, 2], node, config_of(), 6, 0) == [1, 2]


def test_a_strangers_group_weighs_no_more_than_one_of_ones_own(drive):
    group = group_by_hand(3, right=2)
    group["completions"] *= 16
    write_peer(drive, "heavy", "human", [group])
    assert swarm(drive, "heavy", MAX_ROUNDS=1, **UNTRAINED) == 0
    rows = rows_of(drive, "heavy")
    assert all(row["external_groups"] in (0, 1) for row in rows) and any(
        row["external_groups"] for row in rows
    )
    own = max(row["trained_tokens"] for row in rows)
    assert own <= 4 * 20, "four completions, as in a group of its own"


def test_a_folder_that_gives_no_answer_is_said_and_training_goes_on(drive, monkeypatch):
    hanging, done = threading.Event(), threading.Event()
    look = sapo.Swarm._look

    def slow_look(self):
        if hanging.is_set():
            done.wait(20)
            hanging.clear()
        look(self)

    monkeypatch.setattr(sapo.Swarm, "_look", slow_look)
    monkeypatch.setattr(
        sapo.Swarm, "down", property(lambda self: hanging.is_set() or self._failing is not None)
    )
    at_call(monkeypatch, "finish_round", 3, hanging.set)
    at_call(monkeypatch, "sample_batch", 13, done.set)
    assert swarm(drive, "hangs", MAX_ROUNDS=8, **UNTRAINED) == 0
    assert [event["text"] for event in events_of(drive, "hangs", "outage")][0].endswith("writes are queued")
    assert len(rows_of(drive, "hangs")) == 16


def test_a_long_outage_is_trained_through_at_the_pace_of_before(drive, monkeypatch):
    """Its rounds wait for nobody: were their speed taken for the pace, thousands of writes would be queued."""
    folder = drive / "experiments/paced"
    away = folder.with_name("paced_away")

    def slowly(*args, learn=sapo.policy_gradient):
        time.sleep(0 if away.exists() else 0.2)  # what waiting for the swarm costs
        return learn(*args)

    monkeypatch.setattr(sapo, "policy_gradient", slowly)
    at = []
    at_call(
        monkeypatch,
        "finish_round",
        4,
        lambda: (folder.rename(away), time.sleep(1), at.append(time.monotonic())),
    )
    at_call(monkeypatch, "finish_round", 40, lambda: (at.append(time.monotonic()), away.rename(folder)))
    assert swarm(drive, "paced", MAX_ROUNDS=44, LOCAL_NODES=1, NODE_ID="n", **UNTRAINED) == 0
    assert at[1] - at[0] > 30 * 0.2


def test_a_closed_terminal_stops_a_run_but_not_one_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, pressed in ((signal.SIG_DFL, 1), (signal.SIG_IGN, 0)):
            signal.signal(signal.SIGHUP, handler)
            stop = sapo.StopButton()
            stop.install()
            os.kill(os.getpid(), signal.SIGHUP)
            stop.restore()
            assert stop.pressed == pressed and signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_who_joins_a_swarm_without_a_coordinator_begins_with_its_round_at_once(drive):
    store = DriveStore(drive, "joined", "other")
    store.create()
    store.register("other", "worker", {})
    store.open_round(5, "other")
    assert swarm(drive, "joined", NODE_ID="n", LOCAL_NODES=1, MAX_ROUNDS=7, **UNTRAINED) == 0
    (start,), (skip,) = (events_of(drive, "joined", kind, "n") for kind in ("start", "skip"))
    assert (skip["first"], skip["last"]) == (0, 4) and skip["timestamp"] - start["timestamp"] < 1.0


@pytest.mark.parametrize("number", [*sapo.STOP_SIGNALS])
def test_a_signal_during_the_imports_ends_the_start_in_order(tmp_path, number):
    environ = {**os.environ, "GDRIVE_PATH": str(tmp_path), "MODEL_NAME": "tiny", "NODE_ID": "n"}
    program = [sys.executable, PROJECT / "sapo.py"]
    with subprocess.Popen(program, env=environ, stdout=-1, stderr=-2, text=True) as child:
        assert "loading torch" in child.stdout.readline()
        child.send_signal(number)
        text = child.communicate(timeout=120)[0]
    assert child.returncode == 130 and "to go on" in text and "Traceback" not in text


def test_run_swarm_spreads_its_workers_over_the_gpus_and_names_missing_packages(tmp_path):
    for name, lines in {
        "nvidia-smi": ["echo GPU 0", "echo GPU 1"],
        "python": [
            '[ "$1" != -c ] || exec python3 "$@"',
            'echo "$NODE_ROLE has ${CUDA_VISIBLE_DEVICES:-all}"',
        ],
    }.items():
        (tmp_path / name).write_text("\n".join(["#!/bin/sh", *lines]))
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHON": str(tmp_path / "python"), "NUM_WORKERS": "3"}
    command = ["bash", str(PROJECT / "run_swarm.sh")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.split("\n")[:-1]) == [
        "[coordinator] coordinator has all", "[worker_0] worker has 0", "[worker_1] worker has 1",
        "[worker_2] worker has 0",
    ]  # fmt: skip
    (tmp_path / "python").write_text('#!/bin/sh\nexec /usr/bin/env -i python3 -S "$@"\n')
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "pip install torch transformers reasoning-gym" in done.stderr


@pytest.mark.parametrize("variable, value", [("LOG_DIR", __file__), ("CONFIGS", " "), ("SEEDS", "1 2")])
def test_run_swarm_refuses_what_it_cannot_use_before_anything_is_started(variable, value, tmp_path):
    environ = {**os.environ, "PYTHON": sys.executable, "GDRIVE_PATH": str(tmp_path), variable: value}
    command = ["bash", str(PROJECT / "run_swarm.sh")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not [*tmp_path.iterdir()]
    assert value in done.stdout + done.stderr


def test_the_folder_is_tried_at_the_start_and_described_in_a_line(tmp_path):
    store = DriveStore(tmp_path, "x", "n")
    store.create()
    assert re.fullmatch(r"links: yes, rename: yes, a listing shows a new file after 0\.\d\d s", store.probe())


# -------- Checkpoints that a stranger has put there -------------------------------------------------------


def read_state(path) -> tuple[dict, dict]:
    """What a checkpoint says of itself, and its tensors by name."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["about"]), {name: file.get_tensor(name) for name in file.keys()}


def forge(kind: str, about: dict, tensors: dict) -> None:
    node, first = about["nodes"]["node_0"], "node_0/transformer.wte.weight"
    if kind == "other rows":
        node["trained"] = [[]]
    elif kind == "other shapes":
        tensors[f"{first}/exp_avg"] = torch.zeros(3)
    elif kind == "other types":
        tensors[f"{first}/weight"] = tensors[f"{first}/weight"].to(torch.float64)
    elif kind == "not finite":
        tensors[f"{first}/weight"] *= float("nan")
    elif kind == "negative squares":
        tensors[f"{first}/exp_avg_sq"] -= 1.0
    elif kind == "negative step":
        tensors[f"{first}/step"] -= 99.0
    elif kind == "another model":
        about["model_name"] = "\x1b]0;other\x07"
    elif kind == "other nodes":
        about["nodes"] = {"\x1b[2J": node}
    elif kind == "deep":
        about["model_name"] = json.loads("[" * 900 + "]" * 900)
    elif kind == "a million lists":
        about["model_name"] = [[] for _ in range(5 * 10**6)]
    for node_id, each in about["nodes"].items():  # a forger knows how to sum
        each["crc"] = sapo.checksum(t for name, t in tensors.items() if name.startswith(f"{node_id}/"))


FORGERIES = (
    "other rows,other shapes,other types,not finite,negative squares,negative step,another model,other nodes"
)
FORGERIES += ",deep,a million lists"


@pytest.mark.parametrize("kind", FORGERIES.split(","))
def test_a_forged_checkpoint_is_passed_over_for_the_one_before(drive, unbroken, capsys, kind):
    name = f"forged {kind}".replace(" ", "_")
    shutil.copytree(unbroken, drive / "experiments" / name)
    path = drive / "experiments" / name / "checkpoints/round_000013/node.safetensors"
    about, tensors = read_state(path)
    forge(kind, about, tensors)
    save_file(tensors, path, {"about": json.dumps(about)})
    assert swarm(drive, name, MAX_ROUNDS=15) == 0
    events = [event["text"] for event in events_of(drive, name, "resume")]
    assert "cannot be used" in events[-2] and "after round 11" in events[-1]
    assert "\x1b" not in capsys.readouterr().out


def test_a_checkpoint_far_larger_than_the_model_is_not_read_and_hidden_ones_are_an_error(
    drive, unbroken, capsys
):
    shutil.copytree(unbroken, folder := drive / "experiments/large")
    with open(folder / "checkpoints/round_000013/node.safetensors", "r+b") as file:
        file.truncate(10**10)
    assert swarm(drive, "large", MAX_ROUNDS=15) == 0
    assert "after round 11" in events_of(drive, "large", "resume")[-1]["text"]
    (folder / "checkpoints").rename(folder / "hidden")
    (folder / "checkpoints").symlink_to("hidden")
    assert swarm(drive, "large", MAX_ROUNDS=16) == 2
    assert "trained here, and has no checkpoint" in capsys.readouterr().out


def test_many_empty_folders_hold_up_no_start(tmp_path):
    store = DriveStore(tmp_path, "x", "n")
    for round_ in range(3000):
        (store.base / f"checkpoints/{bucket(round_)}").mkdir(parents=True)
    (store.base / "checkpoints/round_000007/n.safetensors").touch()
    began = time.monotonic()
    assert store.checkpoints("n", last=100) == [7] and store.checkpoints("n", last=6) == []
    assert time.monotonic() - began < 2


def test_weights_that_are_not_finite_any_more_replace_no_good_checkpoint(drive, monkeypatch):
    learn = sapo.policy_gradient

    def spoil(run, node, external, t, stage):
        learn(run, node, external, t, stage)
        if t == 4:
            next(node.model.parameters()).data[0] = float("nan")

    monkeypatch.setattr(sapo, "policy_gradient", spoil)
    swarm(drive, "spoilt", MAX_ROUNDS=8, CHECKPOINT_INTERVAL=2)
    saved = {path.parent.name for path in (drive / "experiments/spoilt/checkpoints").glob("*/*")}
    assert "round_000003" in saved <= {"round_000001", "round_000003"}
    assert "not finite any more" in events_of(drive, "spoilt", "error")[0]["text"]


def test_a_checkpoint_from_a_far_round_is_not_believed(drive, unbroken):
    shutil.copytree(unbroken, drive / "experiments/far")
    checkpoints = drive / "experiments/far/checkpoints"
    (checkpoints / "round_999998").mkdir()
    shutil.copy(checkpoints / "round_000013/node.safetensors", checkpoints / "round_999998/node.safetensors")
    assert swarm(drive, "far", MAX_ROUNDS=15) == 0
    assert [event["round"] for event in events_of(drive, "far", "resume")] == [13]


def test_a_checkpoint_that_cannot_be_deleted_costs_no_other_one(drive, monkeypatch):
    name = "undeleted"
    folder = drive / "experiments" / name / "checkpoints"
    (folder / "round_000001").mkdir(parents=True)
    settings = dict(MAX_ROUNDS=12, CHECKPOINT_INTERVAL=2, CHECKPOINT_KEEP=2, **UNTRAINED)
    (folder / "round_000003").symlink_to(drive)  # writing and deleting there fail for their own path
    monkeypatch.setattr(
        sapo, "report_round", lambda run, t, say=sapo.report_round: (time.sleep(0.3), say(run, t))
    )
    # rounds so slow that no checkpoint waits long enough to give way to a newer one
    assert swarm(drive, name, **settings) == 0
    assert sorted(path.parent.name for path in folder.glob("round_0000??/node.safetensors"))[-2:] == [
        "round_000009", "round_000011",
    ]  # fmt: skip


def test_a_finished_experiment_is_told_before_it_is_joined(drive, unbroken, capsys):
    environ = {"GDRIVE_PATH": str(drive), "EXPERIMENT_NAME": "unbroken", "MODEL_NAME": "tiny"}
    assert sapo.main(environ) == 2
    assert "experiment unbroken has finished its 14 rounds" in capsys.readouterr().out


def test_a_file_of_the_old_layout_planted_later_refuses_no_start(drive, unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "experiments/unbroken")
    (tmp_path / "experiments/unbroken/state/rounds/round_000123.json").touch()
    assert swarm(tmp_path, "unbroken", MAX_ROUNDS=15) == 0
    assert max(row["round"] for row in rows_of(tmp_path, "unbroken")) == 14


class DictStore(DriveStore):
    """README's recipe for another store, over a dict."""

    files = {}

    def create(self):
        self.base.mkdir(parents=True, exist_ok=True)  # for the disk check

    def folder(self, path="", make=False, look=False):
        return nullcontext()

    def names(self, path, look=True):
        parts = PurePosixPath(*self.place, path).parts
        known = [PurePosixPath(name).parts for name in self.files]
        return sorted({name[len(parts)] for name in known if name[: len(parts)] == parts and name != parts})

    def open(self, path, *rest, **more):
        return io.BytesIO(self.read_bytes(path, 0))

    def read_bytes(self, path, max_bytes, within=None):
        if (name := "/".join((*self.place, path))) not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def write(self, path, source, keep=None):
        name = "/".join((*self.place, path))
        with suppress(BadFile):
            if keep and name in self.files and keep(self.files[name]):
                return False
        self.files[name] = source if isinstance(source, bytes) else Path(source).read_bytes()
        return True

    def append(self, path, text):
        name = "/".join((*self.place, path))
        self.files[name] = self.files.get(name, b"") + text.encode()

    def delete(self, path, prune=False):
        self.files.pop("/".join((*self.place, path)), None)

    def is_registered(self, node_id, session):
        return "/".join((*self.place, f"peers/{node_id}.{session}.json")) in self.files

    def probe(self, patience=3.0):
        return "a dict"


def test_another_store_needs_nine_methods_and_resumes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sapo, "DriveStore", DictStore)
    assert swarm(tmp_path, "x") == swarm(tmp_path, "x", MAX_ROUNDS=5) == 0
    rows = [
        json.loads(line) for line in DictStore.files["experiments/x/logs/node_0/metrics.jsonl"].splitlines()
    ]
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4] and any(row["external_groups"] for row in rows)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("role", ["coordinator", "monitor", "validate", "report", "worker"])
def test_only_a_worker_needs_torch(drive, unbroken, tmp_path, role):
    blocked = "for name in ('torch', 'transformers', 'reasoning_gym'): sys.modules[name] = None"
    program = [sys.executable, "-c", f"import sys\n{blocked}\nimport sapo\nsys.exit(sapo.main())"]
    shutil.copytree(drive / "experiments/unbroken", tmp_path / "experiments/unbroken")
    environ = {"PATH": os.environ["PATH"], "GDRIVE_PATH": str(tmp_path), "EXPERIMENT_NAME": "unbroken"}
    environ |= {"NODE_ROLE": role, "MAX_ROUNDS": "14", "STALE_AFTER_SECONDS": "1"}
    done = subprocess.run(program, cwd=PROJECT, env=environ, capture_output=True, text=True)
    assert "Traceback" not in done.stdout + done.stderr
    expected = {"coordinator": "finished", "report": "per node", "worker": "pip install torch"}.get(
        role, "unbroken"
    )
    assert expected in done.stdout and (done.returncode == 2) == (role == "worker")


def test_what_did_not_reach_the_folder_survives_the_next_start(drive, unbroken, tmp_path, capsys):
    shutil.copytree(unbroken, folder := drive / "experiments/left")
    store, log = DriveStore(drive, "left", "node"), SimpleNamespace(bar=None, say=print)
    (kept, lock), (left, its), (lives, _used) = (sapo.make_scratch(store, log) for _ in range(3))
    newest, waits = (base / sapo.checkpoint_path("node", 13) for base in (folder, kept))
    waits.parent.mkdir(parents=True)
    newest.rename(waits)
    swarm_ = SimpleNamespace(state="stopped", close=lambda patience: 3, set_aside={"a reward"})
    run = SimpleNamespace(log=log, swarm=swarm_, scratch=kept, done=-1)
    run.stop, run.checkpoints = SimpleNamespace(pressed=0), []
    assert not sapo.close(run)
    text = capsys.readouterr().out
    assert f"3 writes did not reach the shared folder; what lies in {kept} can be copied there" in text
    assert "they cannot be written: 1 files" in text
    lock.close()
    its.close()
    strange = "sapo-results", "sapo-0123456789ab", "sapo-of_mine_too"  # are no folders of ours
    for name in strange:
        (tmp_path / name).mkdir()
    (tmp_path / "sapo-12345678").write_text("a file")
    (tmp_path / "sapo-abcdefgh").symlink_to(left)
    (tmp_path / "sapo-fifo_abc").mkdir()
    os.mkfifo(tmp_path / "sapo-fifo_abc/lock")
    sapo.make_scratch(DriveStore(drive, "left", "another"), log)
    assert left.exists(), "just made, and perhaps not yet locked"
    assert "did not reach" not in capsys.readouterr().out, "this is another node's affair"
    os.utime(left / "lock", (1, 1))
    os.utime(kept / "lock", (1, 1))
    assert swarm(drive, "left", MAX_ROUNDS=15) == 0
    said = f"{waits} did not reach {folder} in an earlier start, and this one does not use it"
    assert said in capsys.readouterr().out
    assert waits.exists() and lives.exists() and not left.exists()
    assert all((tmp_path / name).is_dir() for name in strange)
    assert events_of(drive, "left", "resume")[-1]["round"] == 11
    shutil.copytree(kept / "checkpoints", folder / "checkpoints", dirs_exist_ok=True)  # as it was told
    shutil.rmtree(folder / "checkpoints/round_000014")
    assert swarm(drive, "left", MAX_ROUNDS=15) == 0
    assert events_of(drive, "left", "resume")[-1]["round"] == 13


@pytest.mark.parametrize("begun, own, refused", [(3, 50, False), (50, 3, True)])
def test_whether_there_was_a_checkpoint_is_no_matter_of_another_nodes_interval(
    drive, monkeypatch, capsys, begun, own, refused
):
    """The interval of whoever began the experiment counted: refused for good, or begun again."""
    name, settings = f"interval_{own}", dict(MAX_ROUNDS=12, NODE_ID="b", LOCAL_NODES=1, **UNTRAINED)

    def work():  # killed before the first checkpoint, or stopped with one
        at_call(monkeypatch, "finish_round", 8, stop)
        assert swarm(drive, name, CHECKPOINT_INTERVAL=own, **settings) == 130

    stop = (lambda: os.kill(os.getpid(), signal.SIGINT)) if refused else (lambda: os._exit(9))
    assert in_another_process(work) == (0 if refused else 9)
    folder = drive / "experiments" / name
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    config = json.loads((folder / "config.json").read_text()) | {"CHECKPOINT_INTERVAL": begun}
    (folder / "config.json").write_text(json.dumps(config))
    assert swarm(drive, name, CHECKPOINT_INTERVAL=own, **settings) == (2 if refused else 0)
    assert ("trained here, and has no checkpoint" in capsys.readouterr().out) == refused


def test_one_stop_while_the_last_files_are_written_loses_none_of_them(drive, monkeypatch):
    """It counted as the second one, and the final checkpoint and model were given up."""
    fsync = os.fsync

    def slow(fd):
        if os.fstat(fd).st_size > 10**5 and not pressed:
            pressed.append(os.kill(os.getpid(), signal.SIGINT))
        fsync(fd)

    pressed = []
    at_call(monkeypatch, "close", 1, lambda: monkeypatch.setattr(os, "fsync", slow))
    assert swarm(drive, "pressed", MAX_ROUNDS=2, **UNTRAINED) == 0 and pressed
    assert (drive / "experiments/pressed/models/node_0/model.safetensors").exists()


@pytest.mark.parametrize("role", ["report", "validate", "monitor"])
def test_readers_name_near_misses_too(drive, capsys, role):
    sapo.main({"GDRIVE_PAHT": str(drive), "GDRIVE_PATH": str(drive / "none"), "NODE_ROLE": role})
    assert "GDRIVE_PAHT is not a variable of this program: did you mean" in capsys.readouterr().out
    assert "LR is not a variable of this program" in config_error(LR="3", SEED="x"), "beside a mistake too"


def test_own_rollouts_that_a_stranger_swelled_cost_a_start_little(drive, unbroken):
    """Stages that there are not, and 4096 groups in a file, took gigabytes."""
    shutil.copytree(unbroken, folder := drive / "experiments/swollen")
    store = DriveStore(drive, "swollen", "node")
    for node in ("node_0", "node_1"):
        groups = {str(i): group_by_hand(i, right=1) for i in range(300)}
        path = folder / f"rollouts/round_000012/stage_0/{node}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rollouts": groups}))
        store.publish(12, 5, node, {}, groups)
    config = config_of(LOCAL_NODES=2, NUM_TRAIN_SAMPLES=2, NUM_TRANSPLANT_TREES=2)
    swarm = sapo.Swarm(store, dict.fromkeys(["node_0", "node_1"], ""), config, print, [])
    swarm.round = 13
    swarm._be_here = swarm._thread.start = lambda *_: None
    swarm.start()
    assert {key[1] for key in swarm.rollouts} == {0}
    assert all(len(groups) <= 4 for groups in swarm.rollouts.values())


def test_a_log_of_any_size_tells_of_a_checkpoint(drive, unbroken):
    """Over 32 MiB it was not read, and the node began again."""
    shutil.copytree(unbroken, folder := drive / "experiments/long_log")
    for name in ("checkpoints", "models"):
        shutil.rmtree(folder / name)
    with open(folder / "logs/node/training_events.jsonl", "a") as file:
        file.write("x" * (33 << 20))
    assert swarm(drive, "long_log", MAX_ROUNDS=15) == 2


def test_folders_that_a_stranger_made_cost_a_start_no_minutes(tmp_path):
    """Each name was asked for after a listing of all of them: 20,000 took eight minutes."""
    for i in range(1000):
        (tmp_path / f"experiments/e{i}/state/rounds").mkdir(parents=True)
    listings, listdir = [], os.listdir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", lambda fd: listings.append(len(names := listdir(fd))) or names)
        assert len(sapo.list_experiments(tmp_path)) == 1000
    assert sum(listings) < 10_000, "names that were listed in all"


def test_a_tokenizer_with_several_templates_is_saved_as_files_only(tmp_path):
    model, tokenizer = sapo.import_learner() or grpo.build_tiny(TASKS)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tools": "{{ messages[0].content }}!"}
    run = SimpleNamespace(scratch=tmp_path, codec=SimpleNamespace(tokenizer=tokenizer), log=None)
    folder = sapo.save_locally(run, SimpleNamespace(id="n", model=model), "models")
    assert all(path.is_file() for path in folder.iterdir()), (
        "a folder is not carried, and the run ends with 1"
    )
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


def test_a_worker_follows_a_coordinator_whose_registration_does_not_count():
    """That one's clock is two hours ahead."""
    swarm = SimpleNamespace(superseded=[], hangs=False, down=False, is_led=True, alone=True, clock=5)
    run = SimpleNamespace(swarm=swarm, paces=[], stop=SimpleNamespace(check=lambda: None), hanging=False)
    assert sapo.wait_for_clock(run, 1) == 5


def test_in_an_outage_before_its_first_rounds_a_worker_does_not_run_away():
    """It had no pace yet, and came to the last round while the swarm was in the second."""
    for alone, fast in ((False, False), (True, True)):
        swarm = SimpleNamespace(
            superseded=[],
            hangs=False,
            down=True,
            is_led=True,
            alone=alone,
            clock=0,
            wait=lambda: time.sleep(0.01),
        )
        presses = iter(range(20))
        stop = SimpleNamespace(check=lambda presses=presses: next(presses))
        config = SimpleNamespace(COORDINATOR_ROUND_INTERVAL=5.0)
        run = SimpleNamespace(swarm=swarm, paces=[], config=config, stop=stop, hanging=False)
        run.round_began, run.log = time.monotonic(), SimpleNamespace(event=lambda *_, **__: None)
        with nullcontext() if fast else pytest.raises(StopIteration):
            assert sapo.wait_for_clock(run, 1) == 1


def test_a_terminal_that_takes_no_progress_bar_ends_no_training(drive, monkeypatch):
    """Its stderr may be a full disk."""

    class Bar:
        def __init__(self, **given):
            self.n = 0

        def fails(self, *args):
            raise OSError(errno.ENOSPC, "No space left on device")

        write = update = close = fails

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert swarm(drive, "no_bar", MAX_ROUNDS=2, **UNTRAINED) == 0


def watched_rounds(monkeypatch) -> list[int]:
    """The rounds that this process has trained, as they come."""
    rounds, report_round = [-1], sapo.report_round
    monkeypatch.setattr(sapo, "report_round", lambda run, t: (rounds.append(t), report_round(run, t)))
    return rounds


def test_an_outage_of_more_than_a_hundred_rounds_leaves_no_gap_in_the_clock(monkeypatch, tmp_path):
    base, rounds = tmp_path / "experiments/x", watched_rounds(monkeypatch)

    def go_away():
        until(lambda: rounds[-1] >= 5, 60)
        base.rename(tmp_path / "away")
        until(lambda: rounds[-1] >= 140, 60)
        (tmp_path / "away").rename(base)

    thread = threading.Thread(target=go_away)
    thread.start()
    settings = dict(MAX_ROUNDS=170, LOCAL_NODES=1, NODE_ID="n", NUM_TRANSPLANT_TREES=0) | UNTRAINED
    assert swarm(tmp_path, "x", **settings) == 0
    thread.join()
    store = DriveStore(tmp_path, "x")
    assert store.clock() == (169, {"n"})
    assert [row["round"] for row in sapo.reward_rows(store)] == list(range(170))


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "sapo", place], capture_output=True
    ).returncode:
        pytest.skip("only root mounts")
    yield place
    subprocess.run(["umount", "-l", place])


def test_a_full_disk_at_the_end_loses_neither_checkpoint_nor_model(monkeypatch, small_disk, capsys):
    rounds, filler = watched_rounds(monkeypatch), small_disk / "filler"

    def fill_and_free():
        until(lambda: rounds[-1] >= 5, 60)
        with suppress(OSError), open(filler, "wb", 0) as file:
            while True:
                file.write(bytes(4096))
        until(lambda: rounds[-1] >= 29, 60)
        time.sleep(5)
        filler.unlink()

    thread = threading.Thread(target=fill_and_free)
    thread.start()
    settings = dict(MAX_ROUNDS=30, CHECKPOINT_INTERVAL=10, LOCAL_NODES=1, NODE_ID="n") | UNTRAINED
    assert swarm(small_disk, "x", **settings) == 0
    thread.join()
    base, text = small_disk / "experiments/x", capsys.readouterr().out
    assert (
        (base / "models/n/model.safetensors").exists() and "set aside" not in text and "No space left" in text
    )
    assert (base / "checkpoints/round_000029/n.safetensors").exists()
    assert [row["round"] for row in sapo.reward_rows(DriveStore(small_disk, "x"))] == list(range(30))


# -------- What a stranger's words can do --------------------------------------------------------------------


def test_right_answers_behind_words_that_nobody_here_would_say_teach_nothing_with_a_floor(drive, monkeypatch):
    """Without EXTERNAL_FLOOR they outweigh all else: in a swarm of eight they cost three quarters of the reward."""
    rows, logps = {}, sapo.shared_prompt_logps

    def narrow(model, pairs, *args):
        if sum(len(completions) for _, completions in pairs) > 4:
            raise torch.OutOfMemoryError
        return logps(model, pairs, *args)

    monkeypatch.setattr(sapo, "shared_prompt_logps", narrow)  # of the floor; the update calls its own
    for name, floor in (("no-floor", 0), ("floor", 0.05)):
        groups = [group_by_hand(seed, TASKS[seed % 2]) for seed in (1, 2)]
        for completion in [c for group in groups for c in group["completions"]]:
            completion["response"] = "zq#}" + completion["response"]
        write_peer(drive, name, "human", groups)
        settings = dict(MAX_ROUNDS=1, LOCAL_NODES=1, NODE_ID="node", EXTERNAL_FLOOR=floor)
        assert swarm(drive, name, **settings) == 0
        (rows[name],) = rows_of(drive, name)
    assert (rows["no-floor"]["external_groups"], rows["floor"]["external_groups"]) == (2, 0)
    assert (rows["no-floor"]["external_kept"], rows["floor"]["external_kept"]) == (1, 0)
    assert rows["no-floor"]["logp_external"] < -2 and rows["floor"]["logp_external"] is None
    assert (
        rows["no-floor"]["informative_local"]
        == 0
        == rows["floor"]["grad_norm"]
        < rows["no-floor"]["grad_norm"]
    )


def test_the_rest_of_a_group_whose_right_answers_a_floor_leaves_out_teaches_nothing(drive):
    """It would only teach what not to say: the ordinary ones had the advantages of the whole group."""
    groups = [group_by_hand(seed, TASKS[seed % 2], right=2) for seed in (1, 2)]
    for group in groups:
        for i, completion in enumerate(group["completions"]):
            right = f"zq#}}<answer>{group['answer']}</answer>"
            completion["response"] = right if i < 2 else f"The answer is {group['answer']}."
    write_peer(drive, "half", "human", groups)
    assert swarm(drive, "half", MAX_ROUNDS=1, LOCAL_NODES=1, NODE_ID="node", EXTERNAL_FLOOR=0.05) == 0
    (row,) = rows_of(drive, "half")
    assert (row["external_groups"], row["external_kept"], row["informative_local"]) == (2, 0.5, 0)
    assert row["informative_groups"] == row["grad_norm"] == 0


@pytest.mark.parametrize("max_rows", [1, 3, 99])
@pytest.mark.parametrize("floor", [0.05, 0.5, 1.0])
def test_a_floor_leaves_out_the_same_completions_in_micro_batches_of_any_size(max_rows, floor):
    (own, *theirs), model = ragged_groups(), tiny_lm()
    means = [[plain_logps(model, g.prompt, c, 0.7).mean().item() for c in g.completions] for g in theirs]
    mine = sorted(plain_logps(model, own.prompt, c, 0.7).mean().item() for c in own.completions)
    least = [*mine, float("inf")][int(floor * len(mine))]
    settings = SimpleNamespace(EXTERNAL_FLOOR=floor, DTYPE="float32", TEMPERATURE=0.7)
    run = SimpleNamespace(config=settings, codec=SimpleNamespace(pad_id=0), max_rows=max_rows)
    node = SimpleNamespace(model=model.eval(), rollouts=[SimpleNamespace(group=own)], figures={})
    kept = sapo.without_unlikely(run, node, theirs)
    rows = [list(zip(g.completions, g.rewards, m, strict=True)) for g, m in zip(theirs, means, strict=True)]
    wanted = [[(c, r) for c, r, mean in group if mean >= least] for group in rows]
    ours = [list(zip(g.completions, g.rewards, strict=True)) for g in kept]
    assert ours == [group for group in wanted if group] and run.max_rows == max_rows
    assert node.figures["external_kept"] == sum(map(len, wanted)) / sum(map(len, rows))


def test_an_answer_is_scored_as_the_tokens_that_are_trained_on(drive):
    """Fullwidth digits are right for a verifier, and unknown to tiny: an empty answer was what it learned."""
    group = group_by_hand(1, "small_products", right=2)
    for completion in group["completions"][:2]:
        wide = "".join(chr(ord(digit) - ord("0") + 0xFF10) for digit in group["answer"])
        completion["response"] = f"<answer>{wide}</answer>"
        assert score(make_question("small_products", 1), completion["response"]) == 1
    write_peer(drive, "wide", "human", [group])
    settings = dict(MAX_ROUNDS=1, LOCAL_NODES=1, NODE_ID="node", TASKS="small_products")
    assert swarm(drive, "wide", EXTERNAL_FILTER=False, **settings) == 0
    (row,) = rows_of(drive, "wide")
    assert (row["external_groups"], row["informative_groups"]) == (1, row["informative_local"])


def test_a_floor_leaves_nearly_all_that_equals_say(drive):
    assert swarm(drive, "equals", EXTERNAL_FLOOR=0.05, LOCAL_NODES=4, MAX_ROUNDS=8) == 0
    kept = [row["external_kept"] for row in rows_of(drive, "equals") if "external_kept" in row]
    assert len(kept) > 8 and sum(kept) / len(kept) > 0.8


# -------- A stranger's deletions and plants, bad days -----------------------------------------------------


@pytest.mark.parametrize("lost", ["registration", "clock"])
def test_a_model_is_not_replaced_though_all_else_that_knew_the_node_was_deleted(drive, unbroken, lost):
    shutil.copytree(unbroken, folder := drive / f"experiments/forgotten_{lost}")
    gone = ["peers/*", "checkpoints/*"] if lost == "registration" else ["peers/*", "state/*", "rewards/*"]
    for path in itertools.chain.from_iterable(map(folder.glob, gone)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if lost == "clock":  # its checkpoints are beyond all that is believed
        for round_ in (11, 13):
            (folder / f"checkpoints/{bucket(round_)}").rename(folder / f"checkpoints/{bucket(round_ + 200)}")
        shutil.rmtree(folder / "models")
    before = contents(folder / "models") if lost == "registration" else None
    assert swarm(drive, folder.name, MAX_ROUNDS=16) == 2
    assert lost == "clock" or contents(folder / "models") == before


def test_what_a_superseded_process_did_not_write_is_kept_and_so_is_the_checkpoint_before(
    drive, monkeypatch, tmp_path
):
    """A session forged in the last round: the node stops, but neither its model nor a checkpoint is lost."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def forge_session():
        until(lambda: DriveStore(drive, "robbed").checkpoints("node") == [3])
        put(DriveStore(drive, "robbed"), f"peers/node.{int(time.time() * 1000):013d}-ffffffff.json")

    at_call(monkeypatch, "save_checkpoint", 3, forge_session)
    settings = dict(LOCAL_NODES=1, NODE_ID="node", MAX_ROUNDS=6, CHECKPOINT_INTERVAL=2, CHECKPOINT_KEEP=1)
    assert swarm(drive, "robbed", **settings, **UNTRAINED) == 3
    assert DriveStore(drive, "robbed").checkpoints("node") == [3]
    waits = [path.parent.name for path in tmp_path.glob("sapo-*/*/*/*.safetensors")]
    assert sorted(waits) == ["node", "round_000005"]


def test_what_a_superseded_process_trained_since_its_last_checkpoint_stays_on_the_local_disk(
    drive, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def forge_session():
        put(DriveStore(drive, "seized"), f"peers/node.{int(time.time() * 1000):013d}-ffffffff.json")

    at_call(monkeypatch, "submit_reward", 3, forge_session)
    settings = dict(LOCAL_NODES=1, NODE_ID="node", MAX_ROUNDS=10**5, CHECKPOINT_INTERVAL=10**5)
    assert swarm(drive, "seized", **settings, **UNTRAINED) == 3
    (waits,) = tmp_path.glob("sapo-*/*/*/node.safetensors")
    assert f"a newer session of this node runs; it lies in {waits}" in capsys.readouterr().out
    assert not DriveStore(drive, "seized").checkpoints("node")


def test_rounds_that_an_outage_kept_shut_are_named_by_the_report_and_opened_by_a_restart(
    drive, unbroken, capsys
):
    """The coordinator died meanwhile, and the workers ended: 6 of 40 rounds were counted without a word."""
    shutil.copytree(unbroken, folder := drive / "experiments/shut")
    store, last = DriveStore(drive, "shut"), DriveStore(drive, "shut").clock()[0]
    for round_ in range(5, last + 1):
        for path in (folder / "state/rounds").glob(f"{bucket(round_)}.*"):
            path.unlink()
    (row,) = sapo.compare_experiments(drive, ["shut"])
    assert "shut: not used: rewards of rounds that the clock has not reached" in capsys.readouterr().out
    assert swarm(drive, "shut", MAX_ROUNDS=last + 1) == 0 and store.clock()[0] == last
    (whole,) = sapo.compare_experiments(drive, ["shut"])
    assert "not used" not in capsys.readouterr().out and whole["per_node"] > row["per_node"]


def test_a_node_whose_registration_and_checkpoints_are_gone_is_known_by_its_log(drive, unbroken, capsys):
    shutil.copytree(unbroken, folder := drive / "experiments/known")
    for name in ("peers", "checkpoints", "models"):
        shutil.rmtree(folder / name)
    assert swarm(drive, "known", MAX_ROUNDS=16) == 2
    assert "new experiment" not in capsys.readouterr().out


def test_who_joined_late_and_was_killed_at_once_begins_again_and_is_not_refused(drive, unbroken):
    shutil.copytree(unbroken, folder := drive / "experiments/late")
    store, reward = DriveStore(drive, "late"), {"reward": 0.5}
    store.register("zed", "worker", {})
    assert store.submit_reward(13, 0, "zed", reward)
    settings = dict(NODE_ID="zed", LOCAL_NODES=1, MAX_ROUNDS=16, COORDINATOR_ROUND_INTERVAL=0.2)
    assert swarm(drive, "late", FETCH_TIMEOUT_SECONDS=0, **settings) == 0
    assert folder.exists()


def test_what_a_checkpoint_says_of_other_rounds_is_forgotten(drive, unbroken):
    """Else a stranger could cut off a peer for ever, or make the next checkpoint too large to be written."""
    shutil.copytree(unbroken, drive / "experiments/foretold")
    path = drive / "experiments/foretold/checkpoints/round_000013/node.safetensors"
    about, tensors = read_state(path)
    for node in about["nodes"].values():
        node["trained"] += [[t, 0, "peer", i] for t in (2, 10**9) for i in range(10**5)] + [
            [13, 0, "\x1b", 0]
        ]
    save_file(tensors, path, {"about": json.dumps(about)})
    assert swarm(drive, "foretold", MAX_ROUNDS=15) == 0
    about, _ = read_state(path.parents[1] / "round_000014/node.safetensors")
    for node in about["nodes"].values():
        assert all(10 <= key[0] <= 14 and key[2] != "\x1b" for key in node["trained"])


def test_rounds_that_somebody_opened_far_ahead_hold_up_no_start(drive, unbroken, monkeypatch):
    shutil.copytree(unbroken, folder := drive / "experiments/far_ahead")
    put(DriveStore(drive, "far_ahead"), "peers/x.0000000000001-00000000.json")
    for round_ in range(100, 10**6, 100):
        (folder / f"state/rounds/{bucket(round_)}.x.json").touch()
    asked, rewards = [], DriveStore.rewards
    monkeypatch.setattr(
        DriveStore, "rewards", lambda self, t, *rest: asked.append(t) or rewards(self, t, *rest)
    )
    # The last round has been opened: nothing is left to do.
    assert swarm(drive, "far_ahead", MAX_ROUNDS=2000) == 0
    assert len(asked) < 40


def test_a_checkpoint_without_a_header_is_not_copied(drive, unbroken, monkeypatch):
    shutil.copytree(unbroken, folder := drive / "experiments/sparse")
    for round_ in range(14, 60):
        put(DriveStore(drive, "sparse"), f"checkpoints/{bucket(round_)}/node.safetensors", b"")
        os.truncate(folder / f"checkpoints/{bucket(round_)}/node.safetensors", 60 << 20)
    fetch, sizes = sapo.fetch_checkpoint, []

    def measured(run, round_):
        try:
            return fetch(run, round_)
        finally:
            sizes.append((run.scratch / "resume").stat().st_size)

    monkeypatch.setattr(sapo, "fetch_checkpoint", measured)
    assert swarm(drive, "sparse", MAX_ROUNDS=15) == 0 and len(sizes) == 47 and max(sizes[:-1]) <= 1 << 20


def test_a_second_stop_at_the_end_says_where_the_checkpoint_lies(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupted(patience):
        raise KeyboardInterrupt

    for waits, leave in ((True, interrupted), (False, interrupted), (False, lambda patience: 0)):
        swarm = SimpleNamespace(state="stopped", close=leave, set_aside={"a reward"})
        run = SimpleNamespace(
            log=SimpleNamespace(bar=None, say=print), swarm=swarm, scratch=tmp_path / f"sapo-{waits}"
        )
        run.scratch.mkdir(exist_ok=True)
        run.stop, run.checkpoints, run.done = SimpleNamespace(pressed=1), [], -1
        if waits:
            (run.scratch / "checkpoints/round_000004").mkdir(parents=True)
            (run.scratch / sapo.checkpoint_path("n", 4)).write_bytes(b"weights")
        assert not sapo.close(run) and run.scratch.exists() == waits
        assert (f"what lies in {run.scratch}" in capsys.readouterr().out) == waits


def test_a_report_is_written_though_nobody_reads_what_is_printed(drive, unbroken):
    shutil.rmtree(drive / "reports", ignore_errors=True)
    command = f"{sys.executable} {PROJECT / 'sapo.py'} > /dev/full"
    environ = {**os.environ, "GDRIVE_PATH": str(drive), "NODE_ROLE": "report"}
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, timeout=120)
    written = {path.name for path in drive.glob("reports/*")}
    assert {"report.md", "report.csv", "curves.csv"} <= written, done.stderr.decode()


def test_an_experiment_that_was_made_longer_is_joined_shown_and_validated(drive, unbroken, capsys):
    assert (
        swarm(drive, "longer", MAX_ROUNDS=2, **UNTRAINED)
        == swarm(drive, "longer", MAX_ROUNDS=4, **UNTRAINED)
        == 0
    )
    config = config_of(GDRIVE_PATH=str(drive), EXPERIMENT_NAME="longer", MODEL_NAME="tiny", MAX_ROUNDS="9")
    sapo.announce(config, DriveStore(drive, "longer"), print)  # no ConfigError
    environ = {"GDRIVE_PATH": str(drive), "EXPERIMENT_NAME": "longer", "MODEL_NAME": "tiny"}
    assert sapo.main(environ) == 2 and "has finished its 2 rounds" in capsys.readouterr().out
    assert sapo.main(environ | {"NODE_ROLE": "monitor"}) == 0
    assert "round 3 of 4, finished" in capsys.readouterr().out
    sapo.main(environ | {"NODE_ROLE": "validate"})
    assert "no reward for the last round" not in capsys.readouterr().out


def test_values_may_be_numbers_names_may_have_spaces_and_a_terminal_may_know_no_unicode(tmp_path):
    settings = {"GDRIVE_PATH": tmp_path, "MAX_ROUNDS": 1, "NODE_ID": "numbers", "EXPERIMENT_NAME": "numbers"}
    assert sapo.main({**settings, "TEST_MODE": True, "WARM_START_STEPS": 0}) == 0
    assert config_of(TASKS=" small_gcd , small_lcm,, ").TASKS == "small_gcd,small_lcm"
    assert read_config({"LOCAL_NODES": "2", "SLURM_PROCID": "1"})[0].NODE_ID == "node_1", "of its own"
    DriveStore(tmp_path, "x").create()
    DriveStore(tmp_path, "x").open_round(0, "a")
    environ = {
        **os.environ,
        "GDRIVE_PATH": str(tmp_path),
        "EXPERIMENT_NAME": "x",
        "PYTHONIOENCODING": "ascii",
    }
    store = DriveStore(tmp_path, "x")
    store.register("a", "worker", {})
    store.submit_reward(0, 0, "a", {"reward": 0.9})
    command = [sys.executable, PROJECT / "sapo.py"]
    environ |= {"NODE_ROLE": "monitor"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "1 rewards" in done.stdout and not done.stderr
