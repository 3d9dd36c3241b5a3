"""Tests of the monitor, the plot and the report (U5, U7) on experiments written by hand."""

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import matplotlib.figure
import numpy
import pytest

import coordinator
import drive_store
import grpo
import sapo
from common import compare_transcript, folder_of, is_safe_to_print, rewards_of, run, time_limit
from common import to_environ
from drive_store import At, DriveStore, Swarm, dump_json

ENVIRON = {"MODEL_NAME": "tiny", "NUM_TRAIN_SAMPLES": "4", "NUM_TRANSPLANT_TREES": "4"}
CONFIG = sapo.read_config(ENVIRON)
FOUR = ("anna", "bob", "carl", "dora")


def experiment(root, name="x", nodes=FOUR, num_rounds=30, states=(), absent=(), row=(), **settings):
    """Write an experiment by hand, and return its store.

    states: {node: state in its last heartbeat}, by default "running"
    absent: pairs (node, round) without a reward
    row: metrics to add to each reward row, or to change in it
    """
    store = DriveStore(root, name)
    config = sapo.read_config(ENVIRON | settings)
    store.begin(sapo.saved_settings(config))
    for node in [*nodes, "coordinator"]:
        (store.dir / f"nodes/{node}/rewards").mkdir(parents=True)
        (store.dir / f"nodes/{node}/logs").mkdir()
        session = register(store, node, config)
        beat = {"time": time.time(), "session": session, "state": dict(states).get(node, "running")}
        store.write(f"nodes/{node}/heartbeat.json", dump_json(beat))
        rounds = [t for t in range(num_rounds) if (node, t) not in absent and node in nodes]
        write_rows(store, node, rounds, dict(row))
    return store


def register(store, node, config, seconds=-5, **changes) -> str:
    """Write the session file of a process of this node, and return the session.

    changes: facts in which the process differs from `config` and this program
    """
    facts = {name: getattr(config, name) for name in sapo.TABLE if name != grpo.SECRET}
    facts |= {"code": coordinator.hash_code(), **grpo.VERSIONS} | changes
    session = f"{int((time.time() + seconds) * 1000):013d}-00000000"
    store.write(f"board/session.{node}.{session}", dump_json(facts))
    return session


def write_rows(store, node, rounds, more) -> None:
    """Submit and log a node's rewards. Every third round has a question of the task gcd."""
    for t in rounds:
        row = {"node_id": node, "round": t, "stage": 0, "timestamp": time.time(), "reward": 0.5}
        row |= {"informative_groups": 2, "informative_local": 1, "groups": 4, "completions": 32}
        row |= {"reward_gcd": t / 100} if t % 3 == 0 else {}
        store.write(drive_store.stage_file("rewards", node, At(t)), dump_json(row | more))
        with open(store.dir / f"nodes/{node}/logs/metrics.jsonl", "ab") as log:
            log.write(dump_json(row | more) + b"\n")
        for kind in ("open", "rollouts", "rewards"):
            store.move_marker(kind, node, At(t))


def drawn(lines) -> list[list]:
    """Draw these lines, and return each line's points as [round, value or None]."""
    axis = matplotlib.figure.Figure().add_subplot()
    coordinator.draw_curves(axis, lines)
    return [numpy.ma.stack(line.get_data(), axis=1).tolist() for line in axis.get_lines()]


def test_U5_absent_rounds_are_gaps_and_a_point_is_the_mean_of_its_rounds(tmp_path):
    absent = {("bob", t) for t in range(10, 20)} | {("carl", t) for t in range(25)}
    exp = coordinator.read_experiment(Swarm(experiment(tmp_path, absent=absent), 300.0))
    assert exp.curve() == [0.5] * 30
    for node in FOUR:
        expected = [None if (node, t) in absent else 0.5 for t in range(30)]
        assert exp.curve(node_id=node) == expected
        assert drawn([(node, [expected])]) == [[[t, value] for t, value in enumerate(expected)]]

    # A round without the task does not count as zero. With 90 rounds, a point is the mean of three.
    curve = exp.curve("reward_gcd")
    assert curve[24:] == [0.24, None, None, 0.27, None, None]
    [points] = drawn([("gcd", [[*curve, *[None] * 30, *curve]])])
    assert [t for t, _ in points] == list(range(0, 90, 3))
    values = [t / 100 for t in range(0, 30, 3)]
    assert [value for _, value in points] == pytest.approx([*values, *[None] * 10, *values])


@pytest.mark.parametrize("num_nodes", [8, 128])
def test_U5_at_80x24_problems_come_first(tmp_path, monkeypatch, num_nodes):
    monkeypatch.setattr(coordinator.shutil, "get_terminal_size", lambda *_: (80, 24))
    nodes = [f"w{i:03d}" for i in range(num_nodes)]
    states = dict.fromkeys([*nodes[:7], "coordinator"], "failed")
    store = experiment(tmp_path, "x", nodes, 3, states, absent={("w007", 2)})
    store.write(f"board/session.{nodes[-1]}.{int(time.time() * 1000):013d}-00000000", b"")
    store.move_marker("rollouts", "w007", At(2))

    def look(stale_after) -> str:
        swarm = Swarm(store, stale_after)
        return coordinator.format_screen(coordinator.read_experiment(swarm), swarm)

    screen = look(300.0)
    lines = screen.split("\n")
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert lines[0].startswith("! coordinator failed, w000 failed") and "4 more" in lines[0]
    for words in ("round 2 of 2000", f"{num_nodes - 7} of {num_nodes} workers alive"):
        assert words in screen
    shown = {line.split()[0] for line in lines if line.endswith("▅")}
    assert {"w000", "w007", nodes[-1]} <= shown, "a failed node, the slowest and the newest"
    assert num_nodes == 8 or f"and {128 - len(shown)} more: " in screen

    # For longer than `stale_after`, no marker has moved and no reward was submitted.
    assert "! stalled" in look(0.0) and "! stalled" not in screen


def test_U5_all_readers_count_the_last_of_equal_rows_and_skip_torn_lines(tmp_path):
    store = experiment(tmp_path, nodes=["anna"], num_rounds=3)
    with open(store.dir / "nodes/anna/logs/metrics.jsonl", "ab") as log:
        log.write(b'{"torn\n')
    write_rows(store, "anna", [1], {"reward": 0.75, "total_reward": 1.75})
    write_rows(store, "anna", [2], {"reward": 0.25, "total_reward": 2.0})

    assert coordinator.read_experiment(Swarm(store, 300.0)).curve() == [0.5, 0.75, 0.25]
    assert sapo.get_experiment_metrics(tmp_path, "x")["my_reward"].tolist() == [0.5, 0.75, 0.25]
    assert sapo.get_experiment_status(tmp_path, "x")["cumulative_rewards"] == {"anna": 2.0}
    assert sapo.compare_experiments(tmp_path, ["x"])[0]["reward per node"] == 1.5
    swarm = Swarm(store, 300.0)
    exp = coordinator.read_experiment(swarm, coordinator.MONITOR_BYTES)
    screen = coordinator.format_screen(exp, swarm)
    assert "2/2000 reward 0.25" in screen


def test_U5_rewards_that_are_not_in_the_log_yet_count(tmp_path):
    """A node appends the rows of a round to its log when all stages of the round are done."""
    store = experiment(tmp_path, nodes=["anna"], num_rounds=3, MAX_STAGES="2")
    for stage, reward in enumerate([0.25, 0.75]):
        row = {"node_id": "anna", "round": 3, "stage": stage, "timestamp": 1e9, "reward": reward}
        store.write(drive_store.stage_file("rewards", "anna", At(3, stage)), dump_json(row))
    store.move_marker("open", "anna", At(3))
    store.move_marker("rewards", "anna", At(3, 1))
    exp = coordinator.read_experiment(Swarm(store, 300.0))
    assert exp.curve() == [0.5, 0.5, 0.5, 0.5] and len(exp.rows) == 5
    assert exp.totals == {"anna": 2.5}


def test_U5_a_report_opens_few_files_and_shows_its_progress(tmp_path, monkeypatch, capsys):
    """Each access to a mounted drive takes time, so readers do not open each reward file."""
    for number in range(3):
        experiment(tmp_path, f"e{number}", num_rounds=20, SEED=str(number))
    opened = []
    real_open = drive_store.open_no_link

    def count(path, flags):
        opened.append(path)
        return real_open(path, flags)

    monkeypatch.setattr(drive_store, "open_no_link", count)
    monkeypatch.setitem(coordinator.PROGRESS, "delay", 0)
    experiments = coordinator.read_experiments(tmp_path, ["e0", "e1", "e2"])
    assert [len(exp.rows) for exp in experiments] == [80, 80, 80]
    # Per experiment, a reader opens config.json and three files per node: its heartbeat,
    # metrics.jsonl and session file.
    assert len(opened) == 3 * (1 + 3 * 5)
    assert "reading experiments: " in capsys.readouterr().err


def test_U5_a_new_run_with_the_name_of_a_deleted_run_has_only_its_own_rows(tmp_path, monkeypatch):
    """A monitor that is running sees both runs."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    experiment(tmp_path, nodes=["anna", "bob"], row={"reward": 0.25, "total_reward": 99.0})
    screens = []

    def act(seconds):
        """Replace the run after the monitor's first poll. Stop the monitor after the second."""
        if len(screens) == 2:
            raise KeyboardInterrupt
        shutil.rmtree(tmp_path / "experiments/x")
        experiment(tmp_path, nodes=["anna"], num_rounds=2, row={"reward": 0.75})

    def keep_screen(text):
        if "\033[2J" in text:
            screens.append(text)

    monkeypatch.setattr(coordinator, "say", keep_screen)
    config = sapo.read_config(
        {"GDRIVE_PATH": tmp_path, "EXPERIMENT_NAME": "x", "NODE_ROLE": "monitor"}
    )
    with pytest.raises(KeyboardInterrupt):
        coordinator.run_reader(config, SimpleNamespace(sleep=act))
    assert "99.00" in screens[0] and "reward 0.25" in screens[0]
    assert "1/2000 reward 0.75" in screens[1]
    assert not re.search("bob|99.00|0.25", screens[1])
    assert not list((tmp_path / "reports").iterdir()), "a reader leaves the folder unchanged"


def test_U5_the_readmes_pandas_lines_keep_the_nodes_01_and_1_apart(tmp_path, monkeypatch, capsys):
    experiment(tmp_path / "rl-swarm", "default", ["01", "1", "1e3"], 12)
    readme = Path(coordinator.__file__).with_name("README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(readme.split("<!-- pandas -->\n```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.splitlines()[0].split() == ["node_id", "01", "1", "1e3"]


def write_arms(root, monkeypatch) -> None:
    """Write experiments of several arms, and experiments that a report leaves out or marks."""
    alone = {"NUM_TRAIN_SAMPLES": "8", "NUM_TRANSPLANT_TREES": "0"}
    for seed, rewards in {1: (0.2, 0.1, 0.4), 2: (0.4, 0.1, 0.5), 3: (0.3, 0.1, 0.9)}.items():
        names = [f"compare_4-4_seed{seed}", f"compare_8-0_seed{seed}", f"hard_{seed}"]
        rows = [{"reward": reward, "held_out": reward + 0.02} for reward in rewards]
        experiment(root, names[0], row=rows[0], SEED=str(seed))
        experiment(root, names[1], row=rows[1], SEED=str(seed), **alone)
        with monkeypatch.context() as patch:
            patch.setattr(coordinator, "hash_code", lambda: "0123456789ab")
            experiment(root, names[2], row=rows[2], SEED=str(seed))
    experiment(root, "again", SEED="2", row={"reward": 0.7})
    experiment(root, "gaps", SEED="4", absent={("dora", t) for t in range(3, 30)})
    experiment(root, "short", num_rounds=14)
    experiment(root, "test", TEST_MODE="True")
    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "hash_code", lambda: None)
        experiment(root, "pasted", SEED="1", LEARNING_RATE="0.001")
    store = experiment(root, "old", SEED="5")
    for path in store.dir.glob("board/session.*"):
        path.write_bytes(dump_json({"model": "tiny", "device": "cpu", "host": "here"}))
    store = experiment(root, "markdown")
    for path in store.dir.glob("board/session.*"):
        facts = json.loads(path.read_bytes()) | {"LOSS_TYPE": "<b>|x"}
        path.write_bytes(dump_json(facts))


def test_U5_U7_X3_the_report_prints_the_transcript(tmp_path, monkeypatch, capsys):
    write_arms(tmp_path, monkeypatch)
    names = [
        name for name in coordinator.list_experiments(tmp_path) if name[:4] in ("comp", "hard")
    ]
    texts = []
    for pattern, status in (("*", 0), ("compare_*", 0), ("hard_*", 0), ("test", 0), ("no_*", 1)):
        settings = {"GDRIVE_PATH": tmp_path, "NODE_ROLE": "report", "EXPERIMENT_NAME": pattern}
        assert sapo.main(to_environ(settings)) == status
        texts.append(f"==== {pattern}\n{capsys.readouterr().out}\n")
    masks = {str(tmp_path): "FOLDER"}
    compare_transcript("report.txt", "".join(texts), masks)
    table = [line for line in texts[1].splitlines() if line.startswith("|")]
    assert len(table) == 4 and max(map(len, table)) <= 80

    # The Markdown report is printed. The expected gains are computed by hand, paired by seed.
    assert (tmp_path / "reports/report_all.md").read_text() in texts[0]
    assert (tmp_path / "reports/report_all.png").read_bytes()[:4] == b"\x89PNG"
    rows = sapo.compare_experiments(tmp_path, names)
    gains = {row["I/J"]: row["gain"] for row in rows}
    ours, hard = (2 * 4 * 3) ** (1 / 3) - 1, (0.4 / 0.2 * 0.5 / 0.4 * 0.9 / 0.3) ** (1 / 3) - 1
    assert gains == {"4/4 hard_*": pytest.approx(hard), "4/4": pytest.approx(ours), "8/0": None}
    rows = json.loads((tmp_path / "reports/report_all.json").read_bytes())
    (row,) = [row for row in rows if "again" in row["experiments"]]
    assert dict(row["by seed"])[2] == pytest.approx(30 * (0.4 + 0.7) / 2)


def test_U5_X1_the_monitor_prints_the_transcript(tmp_path, monkeypatch, capsys):
    """Names that look like numbers stay text, and control characters are replaced."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    states = {"bob": "failed", "carl": "done"}
    nodes = ["007", "1e3", "bob", "carl", "silent"]
    store = experiment(tmp_path, "x", nodes, 12, states, row={"informative_groups": 0})
    (path,) = store.dir.glob("board/session.coordinator.*")  # with it, all names are text
    path.unlink()
    (path,) = store.dir.glob("board/session.silent.*")
    path.unlink()
    session = register(store, "silent", CONFIG, seconds=-1000)
    beat = {"time": time.time() - 1000, "session": session, "state": "running"}
    store.write("nodes/silent/heartbeat.json", dump_json(beat))
    completion = {"response": "say 3\x1b[2J", "reward": 0.0, "finished": True}
    group = {"task": "gcd", "seed": 1, "prompt": "What is 1+1?", "answer": "2"}
    file = {"format": 1, "peer_id": "1e3", "round": 12, "stage": 0, "timestamp": 1e9}
    file["rollouts"] = {"0": group | {"completions": [completion] * 2}}
    (store.dir / "nodes/1e3/rollouts").mkdir()
    store.write("nodes/1e3/rollouts/round_000012.stage_0.json", dump_json(file))
    store.move_marker("rollouts", "1e3", At(12))
    settings = {"GDRIVE_PATH": tmp_path, "NODE_ROLE": "monitor", "EXPERIMENT_NAME": "x"}
    assert sapo.main(to_environ(settings)) == 0
    masks = {r"\d+:\d\d ago": "MM:SS ago", r"eta \d+:\d\d": "eta MM:SS"}
    compare_transcript("monitor.txt", capsys.readouterr().out, masks)


@pytest.mark.parametrize("has_packages", [True, False])
def test_U5_the_functions_for_notebooks_need_no_matplotlib_or_pandas(
    tmp_path, monkeypatch, capsys, has_packages
):
    store = experiment(tmp_path, nodes=["anna", "bob"], row={"total_reward": 15.0})
    write_rows(store, "anna", [29], {"reward": 0.75, "total_reward": 15.25})
    (store.dir / "nodes/bob/checkpoints").mkdir()
    store.write("nodes/bob/checkpoints/round_000019.safetensors", b"")
    if not has_packages:
        for name in ("matplotlib.figure", "pandas"):
            monkeypatch.setitem(sys.modules, name, None)
    assert sapo.main({"GDRIVE_PATH": str(tmp_path), "NODE_ROLE": "report"}) == 0
    assert (tmp_path / "reports/report_all.png").exists() == has_packages
    assert ("pip install matplotlib" in capsys.readouterr().out) == (not has_packages)

    metrics = sapo.get_experiment_metrics(tmp_path, "x")
    assert isinstance(metrics, list) == (not has_packages)
    metrics = metrics.to_dict("records") if has_packages else metrics
    rewards = {(row["node_id"], row["round"]): row["my_reward"] for row in metrics}
    assert len(metrics) == len(rewards) == 60 and rewards["anna", 29] == 0.75

    status = sapo.get_experiment_status(tmp_path, "x")
    names = ("current_round", "current_stage", "num_active_peers", "peer_ids")
    assert [status[name] for name in names] == [29, 0, 2, ["anna", "bob"]]
    assert status["cumulative_rewards"] == {"anna": 15.25, "bob": 15.0}
    assert status["latest_checkpoint"].endswith("nodes/bob/checkpoints/round_000019.safetensors")
    assert status["last_updated"] > 1e9 and 0 <= status["duration_seconds"] < 60

    # For an unknown name, the error lists the existing experiments.
    assert sapo.list_experiments(tmp_path) == ["x"]
    with pytest.raises(drive_store.StoreError, match="no experiment 'nosuch'.*available: x"):
        sapo.get_experiment_status(tmp_path, "nosuch")


def test_U5_the_monitors_reward_of_a_node_covers_ten_rounds_of_any_number_of_stages(tmp_path):
    store = experiment(tmp_path, nodes=["anna"], MAX_STAGES="2")
    for t, stage in [(t, stage) for t in range(30) for stage in (0, 1)]:
        row = {"node_id": "anna", "round": t, "stage": stage, "timestamp": time.time()}
        row |= {"reward": t / 100 + stage / 2}
        with open(store.dir / "nodes/anna/logs/metrics.jsonl", "ab") as log:
            log.write(dump_json(row) + b"\n")
    store.move_marker("rewards", "anna", At(29, 1))
    exp = coordinator.read_experiment(Swarm(store, 300.0))
    assert len(exp.rows) == 60
    assert exp.summary("anna")["reward"] == pytest.approx(mean(range(20, 30)) / 100 + 0.25)


def test_U3_a_plot_shows_whole_rounds_and_explains_its_points_without_warnings(tmp_path):
    def axes_of(num_rounds) -> list:
        """Draw an experiment's panels, and return their axes."""
        rows = []
        for t, node in itertools.product(range(num_rounds), FOUR):
            row = {"node_id": node, "round": t, "stage": 0, "timestamp": 1, "reward": t % 7 / 10}
            rows.append(row | {"groups": 4, "informative_local": 1, "reward_gcd": 0.1})
        exp = coordinator.Experiment("x", {"MAX_ROUNDS": num_rounds}, drive_store.Board(), {}, rows)
        figure = matplotlib.figure.Figure(layout="constrained")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for draw_on in coordinator.plot_of(exp).values():
                draw_on(figure.add_subplot())
            figure.savefig(io.BytesIO())
        return figure.axes

    for num_rounds, per_point in ((2, 1), (30, 1), (31, 2), (10_000, 334)):
        for axis in axes_of(num_rounds):
            assert axis.get_xlabel() == f"round (rounds per point: {per_point})"
            assert all(tick == int(tick) for tick in axis.get_xticks())
            assert max(len(line.get_xdata()) for line in axis.get_lines()) <= 30


# -------- The identity of runs --------------------------------------------------------------------


def arms_of(drive) -> dict[str, list[str]]:
    """Return {an arm's name: its experiments}, as in the report."""
    return {row["I/J"]: row["experiments"] for row in sapo.compare_experiments(drive)}


@pytest.mark.parametrize("fact, value", [
    ("LEARNING_RATE", 0.5), ("LOSS_TYPE", "grpo"), ("DTYPE", "bfloat16"), ("FETCH_MAX_PEERS", 1),
    ("FETCH_TIMEOUT_SECONDS", 1.0), ("EVAL_SAMPLES", 1), ("NUM_TRANSPLANT_TREES", 0),
    ("code", "0123456789ab"), ("torch", "1.0"),
])  # fmt: skip
@pytest.mark.parametrize("who", ["a resumed node", "a node", "all nodes"])
def test_U5_runs_are_averaged_only_if_all_their_processes_had_equal_facts(
    tmp_path, fact, value, who
):
    for name in ("one", "two", "three"):
        store = experiment(tmp_path, name, ["anna", "dora"], 2)
        register(store, "anna", CONFIG, seconds=-2)  # this process was resumed
        if name == "two" and who == "a resumed node":
            register(store, "dora", CONFIG, seconds=-1, **{fact: value})
        elif name == "two":
            for path in store.dir.glob(f"board/session.{'*' if who == 'all nodes' else 'dora.*'}"):
                facts = json.loads(path.read_bytes())
                path.write_bytes(dump_json(facts | {fact: value}))

    names = coordinator.list_experiments(tmp_path)
    rows, notes = coordinator.compare_arms(coordinator.read_experiments(tmp_path, names))
    arms = {row["I/J"]: row["experiments"] for row in rows}
    assert sorted(arms.values()) == [["one", "three"], ["two"]]

    # The arm's name or a note states what differs, and a note names the experiment.
    (name,) = [name for name, experiments in arms.items() if experiments == ["two"]]
    assert str(value) in name or fact == "code"
    assert f"{fact}=" in name or (fact == "code" and name.endswith(" two*"))
    assert f"{drive_store.printable(name, 60)}: two" in notes


def test_U5_places_devices_and_the_division_into_processes_do_not_separate_runs(tmp_path):
    different = {
        "GDRIVE_PATH": "/there", "EXPERIMENT_NAME": "two", "NODE_ID": "x", "LOCAL_NODES": 4,
        "SEED": 7, "MAX_ROUNDS": 99, "DEVICE": "cuda", "device": "cuda, T4", "host": "elsewhere",
        "MICRO_BATCH_SIZE": 3, "NUM_WORKERS": 9, "SEEDS": "1 2", "CONFIGS": "4/4", "HF_REPO": "me",
    }  # fmt: skip
    experiment(tmp_path, "one", num_rounds=4)
    store = experiment(tmp_path, "two", num_rounds=4)
    register(store, "anna", CONFIG, seconds=-1, **different)
    assert arms_of(tmp_path) == {"4/4": ["one", "two"]}


def test_U5_each_process_writes_its_settings_code_and_versions_but_never_the_token(tmp_path):
    secret = {grpo.SECRET: "hf_secret", "MAX_ROUNDS": 2, "NUM_TRAIN_SAMPLES": 1, "LOCAL_NODES": 2}
    assert run(tmp_path, secret) == 0
    assert run(tmp_path, secret, MAX_ROUNDS=3, LEARNING_RATE=0.25) == 0
    board = tmp_path / "experiments/default/board"
    processes = [json.loads(path.read_bytes()) for path in sorted(board.glob("session.n_1.*"))]
    assert [facts["LEARNING_RATE"] for facts in processes] == [0.0006, 0.25]
    for facts in processes:
        assert sapo.TABLE.keys() - facts.keys() == {grpo.SECRET}
        assert facts["code"] == coordinator.hash_code()
        assert grpo.VERSIONS.items() <= facts.items()
    files = [path for path in tmp_path.glob("experiments/**/*") if path.is_file()]
    assert not any(b"hf_secret" in path.read_bytes() for path in files)
    assert list(arms_of(tmp_path)) == ["1/2 unfiltered"], "a single run differs from no other run"


CODE = b'''#!/usr/bin/env python
"""A module."""

import os  # for names

def f(x, *, width=3):  # a comment
    """Return x."""

    text = f"{x:>{width}}|{x!r}|{{}} # no comment"
    return f"a" f"{x = }" "\\u2028\xc3\xa9", {"": 1, "b": ""}, """

    two lines"""
'''


def test_U5_equal_code_has_an_equal_hash_on_every_python_version(tmp_path):
    """The expected hash is from Python 3.11, 3.12 and 3.13. Only installed versions are tested."""
    expected = coordinator.hash_sources(CODE)
    assert expected == "3555fbc721c1"
    source = Path(coordinator.__file__).read_text()
    start, end = source.index("@functools.cache\ndef hash_sources"), source.index("def read_facts")
    program = f"import ast, functools, hashlib, json\n{source[start:end]}"
    program += f"print(hash_sources({CODE!r}))\n"
    for name in filter(shutil.which, ("python3.11", "python3.12", "python3.13", "python3.14")):
        done = subprocess.run([name, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode or done.stdout.strip() == expected, name

    # What changes the hash, and what does not?
    same = CODE.replace(b"  # a comment", b"").replace(b"\n\n    text", b"\n    text")
    same = same.replace(b"A module", b"One module").replace(b"Return x.", b"It returns x.")
    assert same != CODE and coordinator.hash_sources(same) == expected
    for old, new in ((b"no comment", b"comment"), (b"{width}", b"5"), (b"\n\n    two", b"\n    two"),
                     (b"width=3", b"width=4"), (b'{"": 1, "b": ""}', b'{"": "", "b": 1}')):  # fmt: skip
        assert old in CODE and coordinator.hash_sources(CODE.replace(old, new)) != expected


def test_X3_session_files_of_untrusted_peers_neither_end_nor_delay_a_report(tmp_path, capsys):
    experiment(tmp_path, "one", num_rounds=4)
    board = experiment(tmp_path, "two", num_rounds=4).dir / "board"
    session = "session.evil{}.1795300037123-{:08x}"
    (board / session.format(0, 0)).symlink_to("/etc/passwd")
    os.mkfifo(board / session.format(1, 0))
    bad = [b"[" * 60_000 + b"]" * 60_000, b"\xff", b"[]", b'{"code": {"\\u001b[2J": []}}',
           b'{"code": "x", "NUM_TRAIN_SAMPLES": "\\u001b[2J\\n", "SEED": {"a": NaN}}',
           b'{"code": "x", "SEED": [1], "NUM_GENERATIONS": "' + b"y" * 60_000 + b'"}']  # fmt: skip
    for number, data in enumerate(bad):
        (board / session.format(2, number)).write_bytes(data)
    facts = ", ".join(f'"{i}": [[]]' for i in range(3000))
    (board / session.format(3, 0)).write_text(f'{{{facts}, "code": "x"}}')
    for number in range(1, 600):
        (board / session.format(3, number)).write_text(f'{{"{number}": [[]], "code": "x"}}')
    with time_limit(60):
        assert sapo.main({"GDRIVE_PATH": tmp_path, "NODE_ROLE": "report"}) == 0
    text = capsys.readouterr().out
    assert is_safe_to_print(text) and "4/4" in text


# -------- Numbers of the report -------------------------------------------------------------------


def test_U5_reward_and_completions_of_a_row_describe_the_same_rounds(tmp_path):
    """61 of 100 rounds are present, and each has two stages."""
    absent = {("anna", t) for t in range(30, 69)}
    store = experiment(tmp_path, "x", ["anna"], 100, absent=absent, MAX_STAGES="2")
    for t in range(100):
        first = drive_store.stage_file("rewards", "anna", At(t))
        if (store.dir / first).exists():
            row = json.loads((store.dir / first).read_bytes()) | {"stage": 1}
            store.write(drive_store.stage_file("rewards", "anna", At(t, 1)), dump_json(row))
            with open(store.dir / "nodes/anna/logs/metrics.jsonl", "ab") as log:
                log.write(dump_json(row) + b"\n")
    (row,) = sapo.compare_experiments(tmp_path)
    assert row["rounds"] == 100
    assert (row["reward per node"], row["completions"]) == (200 * 0.5, 200 * 32)


@pytest.mark.parametrize("interval, rounds", [(2, {1, 3}), (3, {2, 3})])
def test_U7_the_last_round_is_evaluated_once_and_reaches_the_report(
    tmp_path, monkeypatch, interval, rounds
):
    evaluated = []
    measure = sapo.held_out_accuracy

    def count(run, node, t):
        evaluated.append(t)
        return measure(run, node, t)

    monkeypatch.setattr(sapo, "held_out_accuracy", count)
    settings = {"LOCAL_NODES": 1, "MAX_ROUNDS": 4, "EVAL_INTERVAL": interval, "EVAL_SAMPLES": 4}
    assert run(tmp_path, settings) == 0
    assert evaluated == [-1, *sorted(rounds)]  # -1: before training
    rows = {row["round"]: row["held_out"] for row in rewards_of(tmp_path) if "held_out" in row}
    assert rows.keys() == rounds
    (row,) = sapo.compare_experiments(tmp_path)
    assert row["held-out"] == mean(rows.values())
    card = (folder_of(tmp_path, "n") / "model/README.md").read_text()
    assert f"{rows[3]:.2f} after training" in card
