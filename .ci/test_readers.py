"""Tests of the monitor, the plot and the report (U5, U7) on experiments written by hand."""

import inspect
import json
import time
from statistics import mean
from types import SimpleNamespace

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


def test_U5_absent_rounds_are_gaps_and_the_last_point_is_the_mean_of_the_same_rows(tmp_path):
    absent = {("bob", t) for t in range(10, 20)} | {("carl", t) for t in range(25)}
    swarm = Swarm(experiment(tmp_path, absent=absent), 300.0)
    for exp in (coordinator.read_experiment(swarm), coordinator.read_experiment(swarm, {})):
        for node in FOUR:
            expected = [None if (node, t) in absent else 0.5 for t in range(30)]
            assert coordinator.moving_average(exp.curve(node_id=node)) == expected
        assert exp.curve() == [0.5] * 30

        # A round without the task does not count as zero. The average is over three rounds.
        curve = coordinator.moving_average(exp.curve("reward_gcd"))
        rows = [row for row in exp.rows if 25 <= row["round"] <= 27 and "reward_gcd" in row]
        assert curve[27] == mean(row["reward_gcd"] for row in rows)
        assert curve[28:] == [None, None]


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
        return coordinator.format_screen(coordinator.read_experiment(swarm, {}), swarm)

    screen = look(300.0)
    lines = screen.split("\n")
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert lines[0].startswith("! coordinator failed, w000 failed") and "4 more" in lines[0]
    for words in ("round 2 of 2000", f"{num_nodes - 7} of {num_nodes} workers alive", "by task"):
        assert words in screen
    counts = f"round 2: {num_nodes} nodes published rollouts, {num_nodes - 1} submitted rewards"
    assert counts in screen
    shown = {line.split()[0] for line in lines if line.endswith("▅")}
    assert {"w000", "w007", nodes[-1]} <= shown, "a failed node, the slowest and the newest"
    assert num_nodes == 8 or f"and {128 - len(shown)} more: " in screen

    # For longer than `stale_after`, no marker has moved and no reward was submitted.
    time.sleep(1.1)
    assert "! stalled" in look(1.0) and "! stalled" not in screen


def test_U5_a_look_reads_only_what_was_appended_and_the_first_one_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "FIRST_LOOK_BYTES", 20_000)
    store = experiment(tmp_path, nodes=["anna"], num_rounds=200)
    path = store.dir / "nodes/anna/logs/metrics.jsonl"
    swarm, logs = Swarm(store, 300.0), {}
    before = coordinator.read_experiment(swarm, logs).rows
    assert len(before) < 100 and before[-1]["round"] == 199

    # Overwrite the lines that were already read, and append a torn line and two complete lines.
    path.write_bytes(b"#" * path.stat().st_size + b'{"torn\n')
    write_rows(store, "anna", [200, 201], {"total_reward": 77})
    exp = coordinator.read_experiment(swarm, logs)
    assert exp.rows[:-2] == before and [row["round"] for row in exp.rows[-2:]] == [200, 201]
    assert exp.totals == {"anna": 77}


def test_U5_on_a_terminal_the_picture_is_a_file_and_named_once(tmp_path, monkeypatch, capsys):
    experiment(tmp_path, nodes=[f"w{i}" for i in range(9)])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    looks = iter(range(7))
    config = sapo.read_config(
        {"GDRIVE_PATH": tmp_path, "EXPERIMENT_NAME": "x", "NODE_ROLE": "monitor"}
    )
    with pytest.raises(StopIteration):
        coordinator.run_reader(config, SimpleNamespace(sleep=lambda seconds: next(looks)))
    assert capsys.readouterr().out.count("monitor_x.png") == 1
    pictures = {path.name: path.read_bytes()[:4] for path in tmp_path.glob("reports/*")}
    assert pictures == {"monitor_x.png": b"\x89PNG"}


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
        store.write(drive_store.stage_file("rewards", "anna", At(t, stage)), dump_json(row))
    store.move_marker("rewards", "anna", At(29, 1))
    exp = coordinator.read_experiment(Swarm(store, 300.0))
    assert exp.summary("anna")["reward"] == pytest.approx(mean(range(20, 30)) / 100 + 0.25)
