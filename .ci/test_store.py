"""The promises of the folder, by the store alone or in one process: F1, F2, F4, F5, F6."""

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import sapo
from coordinator import Patient
from drive_store import DriveStore
from test_sapo import at_call, contents, group_by_hand, new_store

SMALL = {
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "NODE_ID": "n", "LOCAL_NODES": 2, "WARM_START_STEPS": 60,
    "TASKS": "small_products,small_gcd", "ANSWER_TAG_SHARE": 0.9, "LEARNING_RATE": 0.001,
    "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "MAX_ROUNDS": 6,
    "CHECKPOINT_INTERVAL": 2, "FETCH_TIMEOUT_SECONDS": 0.1, "EXTERNAL_FILTER": False,
}  # fmt: skip
JOINING = dict.fromkeys(SMALL) | {"NODE_ID": "late"}  # what a node that joins sets


def run(drive, name="y", **settings) -> int:
    """sapo.main with SMALL and these settings, None: not set; its exit status."""
    given = {"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name, **SMALL, **settings}
    return sapo.main({key: str(value) for key, value in given.items() if value is not None})


def history(base: Path) -> dict:
    """What a run leaves: rollouts, rewards, the last log row of each round, weights; not what time it was."""
    found = {path.parent.name: path.read_bytes() for path in base.glob("checkpoints/*/*")}
    for path in [*base.glob("r*/*/*/n_?.json"), *base.glob("logs/n_?/metrics.jsonl")]:
        for row in map(json.loads, path.open()):
            of_the_day = ("seconds", "timestamp", "session", "experiment")
            kept = {key: value for key, value in row.items() if not key.endswith(of_the_day)}
            found[path.relative_to(base), row["round"]] = kept
    return found


def rows(base: Path, log: str) -> list[dict]:
    return [json.loads(line) for line in (base / "logs" / log).open()]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """The folder of a run that nothing disturbed; it is copied, never changed."""
    assert run(drive := tmp_path_factory.mktemp("unbroken"), "x") == 0
    return drive


@pytest.fixture
def drive(unbroken, tmp_path):
    """A copy of it: a warm start, and the experiment x, which has finished."""
    return shutil.copytree(unbroken, tmp_path / "drive")


def whole_files(base: Path) -> dict:
    """{name: who wrote it} of all JSON files; fails if one is not whole."""
    found = {path.name: json.loads(path.read_bytes()) for path in base.glob("[!t]*/*.json")}
    assert all(len(data["text"]) == 60_000 for data in found.values())
    return {name: data["by"] for name, data in found.items()}


@pytest.mark.parametrize("links", [True, False])
def test_F1_readers_beside_several_writers_see_no_file_or_the_whole_one(tmp_path, monkeypatch, links):
    monkeypatch.setattr(os, "link", os.link if links else Mock(side_effect=OSError("no links")))
    stores, won, looks = [new_store(tmp_path, me) for me in "abc"], set(), [{}]

    def write(store, me):
        for i in range(80):
            mine = {"by": me, "text": "x" * 60_000}
            won.update({(f"{i}.json", me)} if store.write_once(f"once/{i}.json", mine) else ())
            store.write("heartbeats/shared.json", mine)

    writers = [threading.Thread(target=write, args=pair) for pair in zip(stores, "abc", strict=True)]
    [writer.start() for writer in writers]
    while any(writer.is_alive() for writer in writers):
        looks.append(whole_files(stores[0].base))
        once = {name: by for name, by in looks[-2].items() if name[0].isdigit()}
        assert not links or once.items() <= looks[-1].items(), "written once and never changed"
    there = {(name, by) for name, by in whole_files(stores[0].base).items() if name[0].isdigit()}
    assert len(looks) > 5 and len(there) == 80 and there <= won
    assert len(won) == 80 or not links, "the first one counts, and only its writer believes so"


def fail_below(monkeypatch, folder, plan) -> None:
    """Calls of the system fail below a folder as `plan()` says: "before" or "after" they did their work."""
    for name in ("open", "listdir", "mkdir", "lstat", "link", "replace", "rename", "unlink"):

        def fake(*args, name=name, real=getattr(os, name), **kwargs):
            fault = plan() if str(folder) in str(args[0]) else None
            done = real(*args, **kwargs) if not fault or (fault == "after" and name != "open") else None
            if fault:
                raise OSError(errno.EIO, "broken")
            return done

        monkeypatch.setattr(os, name, fake)


def work(store, before_each=lambda: None, in_outage=lambda: None) -> list[str]:
    """Everything that a node does to the folder, several times -> what it says. Pauses take no time."""
    event = lambda kind, text, **_: (events.append(kind), kind == "outage" and in_outage())  # noqa: E731
    patient, events, clock = Patient(store, event, SimpleNamespace(pressed=0)), [], itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in (("sleep", id), ("monotonic", lambda: next(clock)), ("time", lambda: 1e9)):
            patch.setattr(time, name, fake)
        for t in range(5):
            for name, *args in (
                ("retire_rollouts", t - 1, t < 3), ("open_round", t, "n"), ("heartbeat", "n", "s", t),
                ("publish", t, 0, "n", {}, {"0": group_by_hand(1)}), ("append", "logs/n/b", f"{t}\n"),
                ("submit_reward", t, 0, "n", {"reward": 0.5}), ("append", "logs/n/a", f"{t}\n" * 9999),
                ("write", f"checkpoints/{t}/n", b"x" * 9000), ("delete", f"checkpoints/{t - 1}/n"),
            ):  # fmt: skip
                before_each()
                getattr(patient, name)(*args)
    return events


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 MB; only root can have one."""
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if os.getuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill_up(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass


@pytest.mark.parametrize("how", ["full disk", *range(5)])
def test_F2_whatever_fails_for_a_while_nothing_is_lost_or_doubled(request, tmp_path, monkeypatch, how):
    sound, broken = tmp_path / "sound", tmp_path / "broken"
    assert work(new_store(sound, "n")) == []
    if how == "full disk":
        store = new_store(broken := request.getfixturevalue("small_disk"), "n")
        events = work(store, lambda: fill_up(broken), (broken / "filler").unlink)
        (broken / "filler").unlink()
    else:
        store, rng = new_store(broken, "n"), random.Random(how)
        with monkeypatch.context() as patch:
            fail_below(patch, broken, lambda: rng.choice([None] * 8 + ["before", "after"]))
            events = work(store)
    for place in (sound, broken):
        DriveStore(place, "x").retire_rollouts(3, False)  # what could not be deleted then is deleted later
        shutil.rmtree(place / "experiments/x/tmp")
    assert contents(broken) == contents(sound)
    assert len(events) > 20 and events == ["outage", "outage over"] * (len(events) // 2)


@pytest.mark.parametrize("how, step, call", [
    ("renamed away", "communicate", 4), ("renamed away", "finish_round", 4), ("EIO", "sample_external", 5),
    ("full disk", "submit_reward", 3), ("stopped", "communicate", 8),
])  # fmt: skip
def test_F2_training_waits_and_goes_on_or_is_stopped(request, unbroken, drive, monkeypatch, how, step, call):
    if how == "full disk":
        drive = shutil.copytree(drive, request.getfixturevalue("small_disk") / "drive")
    base, away, broken, bring_back = drive / "experiments/y", drive / "away", [], lambda: away.rename(base)
    begin, end = {
        "renamed away": (lambda: base.rename(away), lambda: base.exists() or bring_back()),
        "EIO": (lambda: broken.append("before"), broken.clear),
        "full disk": (lambda: fill_up(drive.parent), (drive.parent / "filler").unlink),
        "stopped": (lambda: base.rename(away), lambda: os.kill(os.getpid(), signal.SIGINT)),
    }[how]
    fail_below(monkeypatch, base, lambda: broken[0] if broken else None)
    at_call(monkeypatch, step, call, lambda: (begin(), threading.Timer(1.5, end).start()))
    if how == "stopped":
        assert run(drive) == 130 and not base.exists()
        bring_back()
    assert run(drive) == 0 and not away.exists(), "nothing was made in its place"
    assert history(base) == history(unbroken / "experiments/x")
    if how != "stopped":  # who was stopped replays rounds
        events = [row["event"] for row in rows(base, "n/training_events.jsonl")]
        assert (events.count("outage"), events.count("outage over")) == (1, 1)
        assert [len(rows(base, f"n_{i}/metrics.jsonl")) for i in range(2)] == [6, 6]


def test_F2_a_peers_file_that_cannot_be_read_is_skipped_and_read_again_later(drive, monkeypatch):
    store, looks = DriveStore(drive, "y", "p"), itertools.count()
    store.create()
    for peer in "pq":
        store.publish(0, 0, peer, {}, {"0": group_by_hand(ord(peer))})
    fail_below(monkeypatch, "stage_0/p.json", lambda: "before" if next(looks) < 2 else None)
    assert run(drive, LOCAL_NODES=1, MAX_ROUNDS=3) == 0
    found = [(row["external_groups"], row["rejected"]) for row in rows(store.base, "n/metrics.jsonl")]
    events = [row["event"] for row in rows(store.base, "n/training_events.jsonl")]
    assert found == [(1, 1), (0, 1), (1, 0)] and (events.count("reject"), events.count("outage")) == (1, 0)


def test_F2_a_mount_that_refuses_to_append_is_said_at_the_start(drive, monkeypatch, capsys):
    monkeypatch.setattr(DriveStore, "append", Mock(side_effect=PermissionError))  # rclone without a cache
    assert run(drive) == 2 and "--vfs-cache-mode writes" in capsys.readouterr().out


@pytest.mark.parametrize("harm", [
    lambda x: x[:-1], lambda x: x[:-5000] + bytes([x[-5000] ^ 1]) + x[-4999:], lambda x: b"",
    lambda x: x.replace(b'"tiny\\"', b'"tinx\\"'), lambda x: b"\xff" * 7 + b"\0" + x,
], ids=["torn", "flipped", "empty", "another model's", "of a long header"])  # fmt: skip
def test_F4_the_newest_readable_checkpoint_counts_and_none_is_an_error(unbroken, drive, capsys, harm):
    assert run(drive, MAX_ROUNDS=4) == 0 and capsys.readouterr()
    base = drive / "experiments/y"
    both = sorted(base.glob("checkpoints/*/n.safetensors"))
    sound = [path.read_bytes() for path in both]
    for path, data in zip(both, sound, strict=True):
        path.write_bytes(harm(data))
    before = contents(base)
    assert run(drive) == 2 and contents(base) == before
    assert "cannot be used" in (said := capsys.readouterr().out) and "| reward" not in said
    both[0].write_bytes(sound[0])
    assert run(drive) == 0 and f"{both[1].relative_to(base)} cannot be used" in capsys.readouterr().out
    assert "from the checkpoint after round 1" in (base / "logs/n/stdout.log").read_text()
    assert history(base) == history(unbroken / "experiments/x")


@pytest.mark.parametrize("archive", [False, True])
def test_F5_retention_deletes_or_archives_whole_rounds_that_nobody_needs(drive, archive):
    (store := DriveStore(drive, "y", "human")).create()
    for t in (0, 4, 7):
        store.publish(t, 0, "human", {}, {"0": group_by_hand(t)})
    settings = dict(ROLLOUT_CLEANUP_ENABLED=True, ROLLOUT_KEEP_LAST_N_ROUNDS=1, ROLLOUT_ARCHIVE_OLD=archive)
    assert run(drive, MAX_ROUNDS=9, ROLLOUT_MAX_AGE=1, **settings) == 0
    paths = [place.glob("rollouts/*/*/*.json") for place in (store.base, drive / "archives/y")]
    here, aside = ({(int(p.parts[-3][6:]), p.stem) for p in found} for found in paths)
    everyone = {*itertools.product(range(9), ("n_0", "n_1")), *((t, "human") for t in (0, 4, 7))}
    needed = {(t, node) for t, node in everyone if t >= 6}  # CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE
    assert here == needed and aside == (everyone - needed if archive else set())
    assert store.rounds("rollouts") == [6, 7, 8] and store.rounds("rewards") == [*range(9)]


@pytest.mark.parametrize("said, settings, status", [
    (["new experiment y", "there are also: x"], {"EXPERIMENT_NAME": "y", "MAX_ROUNDS": 1}, 0),
    (["there already: round 5, nodes: n_0, n_1", "from the checkpoint after round 5"], {"MAX_ROUNDS": 7}, 0),
    (["there already: round 5, nodes: n_0, n_1"], JOINING, 0), (["already finished", "all 6 rounds"], {}, 0),
    (["already finished"], {"NODE_ROLE": "coordinator", "NODE_ID": None}, 0),
    (["has finished its 6 rounds"], JOINING | {"NODE_ID": None}, 2),  # a made-up name
])  # fmt: skip
def test_F6_a_start_says_new_or_joined_or_resumed_or_finished(drive, capsys, said, settings, status):
    assert run(drive, **{"EXPERIMENT_NAME": "x", **settings}) == status
    out = capsys.readouterr().out
    assert all(words in out for words in said), out


def test_F6_a_node_joins_with_three_settings_and_disturbs_no_other_experiment(drive, capsys):
    base, other = drive / "experiments/x", drive / "experiments/y"
    before, config = contents(shutil.copytree(base, other)), json.loads((base / "config.json").read_text())
    config |= dict.fromkeys(("DEVICE", "HF_REPO", "NODE_ID", "GDRIVE_PATH"), "evil") | {"LOCAL_NODES": 9}
    (base / "config.json").write_text(json.dumps(config | {"LEARNING_RATE": 0.002, "NUM_SHOTS": " auto"}))
    assert run(drive, "x", **JOINING) == 0
    said = capsys.readouterr().out
    assert "LEARNING_RATE=0.002" in said.split("from the experiment: ")[1] and "evil" not in said
    [*_, row], groups = rows(base, "late/metrics.jsonl"), DriveStore(drive, "x").fetch(5, 0, "late")
    assert (row["round"], row["completions"], row["external_groups"]) == (5, 8, 2)
    assert {group["task"] for group in groups} <= {*SMALL["TASKS"].split(",")} and contents(other) == before


@pytest.mark.parametrize("where, name, value", [
    *(("environment", *pair) for pair in [
        ("SEED", 7), ("TASKS", "small_gcd"), ("REWARD", "verifier"), ("MAX_STAGES", 2), ("DEVICE", "cuda:9"),
        ("MODEL_NAME", "/tmp"), ("MODEL_NAME", "no/such model"), ("MAX_NEW_TOKENS", 300),
        ("NUM_GENERATIONS", 1), ("TASKS", "countdown"), ("NODE_ID", "../n"), ("NODE_ID", "coordinator"),
    ]), ("config.json", "SEED", "7\x1b[2J"), ("config.json", "TASKS", "countdown"), ("config.json", "layout", 2),
])  # fmt: skip
def test_F6_what_disagrees_or_fails_is_said_and_leaves_nothing(drive, tmp_path, capsys, where, name, value):
    config = drive / "experiments/x/config.json"
    if where == "config.json":
        config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    before, settings = contents(drive), JOINING if where == "config.json" else {"MAX_ROUNDS": 7, name: value}
    assert run(drive, "x", **settings) == 2 and contents(drive) == before
    said = capsys.readouterr().out
    assert ("another version" if name == "layout" else name) in said and len(said) < 2000
    assert all(c.isprintable() or c == "\n" for c in said)
    if where == "environment" and (name not in sapo.MUST_AGREE or value == "countdown"):
        assert run(tmp_path / "new", **settings) == 2 and not (tmp_path / "new").exists()
