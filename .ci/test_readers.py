"""Tests of the monitor, the plot and the report (U5, U7) on experiments written by hand."""

import inspect
import io
import itertools
import json
import re
import shutil
import time
import warnings
from statistics import mean
from types import SimpleNamespace

import matplotlib.figure
import numpy
import pytest

import coordinator
import drive_store
import sapo
from drive_store import At, DriveStore, Swarm, dump_json

FOUR = ("anna", "bob", "carl", "dora")


def experiment(root, name="x", nodes=FOUR, num_rounds=30, states=(), absent=(), row=(), **settings):
    """Write an experiment by hand, and return its store.

    states: {node: state in its last heartbeat}, by default "running"
    absent: pairs (node, round) without a reward
    row: metrics to add to each reward, or to change
    """
    store = DriveStore(root, name)
    environ = {"MODEL_NAME": "tiny", "NUM_TRAIN_SAMPLES": "4", "NUM_TRANSPLANT_TREES": "4"}
    store.begin(sapo.saved_settings(sapo.read_config(environ | settings)))
    for node in [*nodes, "coordinator"]:
        (store.dir / f"nodes/{node}/rewards").mkdir(parents=True)
        (store.dir / f"nodes/{node}/logs").mkdir()
        session = f"{int(time.time() * 1000) - 5000:013d}-00000000"
        store.write(f"board/session.{node}.{session}", b"")
        beat = {"time": time.time(), "session": session, "state": dict(states).get(node, "running")}
        store.write(f"nodes/{node}/heartbeat.json", dump_json(beat))
        rounds = [t for t in range(num_rounds) if (node, t) not in absent and node in nodes]
        write_rows(store, node, rounds, dict(row))
    return store


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
def test_U5_at_80x24_what_looks_wrong_comes_first(tmp_path, monkeypatch, num_nodes):
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
    time.sleep(1.1)
    assert "! stalled" in look(1.0) and "! stalled" not in screen


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

    def slow_open(path, flags):
        opened.append(path)
        time.sleep(0.3)
        return real_open(path, flags)

    monkeypatch.setattr(drive_store, "open_no_link", slow_open)
    experiments = coordinator.read_experiments(tmp_path, ["e0", "e1", "e2"])
    assert [len(exp.rows) for exp in experiments] == [80, 80, 80]
    # Per experiment, a reader opens config.json, and two files per node.
    assert len(opened) == 3 * (1 + 2 * 5)
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


def test_U7_a_report_says_what_it_leaves_out_and_why(tmp_path, monkeypatch, capsys):
    experiment(tmp_path, "whole", SEED="1")
    experiment(tmp_path, "gaps", SEED="2", absent={("dora", t) for t in range(3, 30)})
    experiment(tmp_path, "again", SEED="2", row={"reward": 0.7})
    experiment(tmp_path, "short", num_rounds=14)
    experiment(tmp_path, "test", TEST_MODE="True")
    source, patch = inspect.getsource, monkeypatch.setattr
    patch(inspect, "getsource", lambda module: source(module) + "\n# a comment\n")
    experiment(tmp_path, "commented", SEED="3")
    patch(inspect, "getsource", lambda module: source(module) + "\nx = 1\n")
    experiment(tmp_path, "changed", SEED="1")
    patch(sapo, "hash_code", lambda: None)
    experiment(tmp_path, "pasted", SEED="1", LEARNING_RATE="0.001")

    assert sapo.main({"GDRIVE_PATH": tmp_path, "NODE_ROLE": "report"}) == 0
    text = capsys.readouterr().out
    rows = json.loads((tmp_path / "reports/report_all.json").read_bytes())
    by_runs = {tuple(row["experiments"]): row for row in rows}
    runs = ("again", "commented", "gaps", "whole")
    assert by_runs.keys() == {runs, ("changed",), ("pasted",)}
    by_seed = dict(by_runs[runs]["by seed"])
    assert by_seed == pytest.approx({1: 30 * 0.5, 2: 30 * 0.6, 3: 30 * 0.5})
    assert "LEARNING_RATE=0.001 code=None" in by_runs["pasted",]["I/J"]
    for words in ("short is left out: 14 rounds", "test is left out: 30 rounds, TEST_MODE",
                  "gaps has gaps: 27 rounds", "earlier version): pasted", "code are not averaged"):  # fmt: skip
        assert words in text, words
    assert len(json.loads((tmp_path / "reports/whole.json").read_bytes())["rows"]) == 4 * 30


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


def test_U5_X3_a_report_escapes_values_that_markdown_would_interpret(tmp_path, capsys):
    for name, value in (("a", "dapo"), ("b", "<script>alert(1)</script>|x")):
        store = experiment(tmp_path, name)
        config = json.loads((store.dir / "config.json").read_bytes())
        config |= {"LOSS_TYPE": value, "<b>|": value}
        (store.dir / "config.json").write_bytes(dump_json(config))
    assert sapo.main({"GDRIVE_PATH": tmp_path, "NODE_ROLE": "report"}) == 0
    text = (tmp_path / "reports/report_all.md").read_text()
    assert text in capsys.readouterr().out
    assert "<" not in text and "&lt;script>" in text and r"&lt;b>\|" in text
    table = [line for line in text.split("\n") if line.startswith("|")]
    assert len(table) == 4
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, "cells per row"


def test_U3_a_plot_shows_whole_rounds_and_what_a_point_is_and_does_not_warn(tmp_path):
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
