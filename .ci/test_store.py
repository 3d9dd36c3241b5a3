"""The promises of the shared folder: whole files (F1), waiting for the folder (F2), damaged checkpoints (F4),
retention (F5), experiments kept apart (F6); by the store alone or in one process. Files are asked, not words.
"""

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import sapo
from coordinator import Patient
from drive_store import DriveStore
from test_sapo import at_call, contents, group_by_hand

ROOT = Path(sapo.__file__).parent
SMALL = {
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "NODE_ID": "n", "LOCAL_NODES": 2, "WARM_START_STEPS": 60,
    "TASKS": "small_products,small_gcd", "ANSWER_TAG_SHARE": 0.9, "LEARNING_RATE": 0.001, "NUM_TRAIN_SAMPLES": 2,
    "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "MAX_ROUNDS": 6, "CHECKPOINT_INTERVAL": 2,
    "FETCH_TIMEOUT_SECONDS": 0.1, "EXTERNAL_FILTER": False,
}  # fmt: skip
JOINING = dict.fromkeys(SMALL) | {"NODE_ID": "late"}  # what a node that joins sets


def run(drive, name="x", **settings) -> int:
    """sapo.main with SMALL and these settings, None: not set; its exit status."""
    given = {"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name, **SMALL, **settings}
    return sapo.main({key: str(value) for key, value in given.items() if value is not None})


def history(base: Path) -> dict:
    """What a run leaves: rollouts, rewards, the last log row of each round, weights; not what time it was."""
    found = {path.parent.name: path.read_bytes() for path in base.glob("checkpoints/*/*")}
    for path in [*base.glob("r*/*/*/*.json"), *base.glob("logs/*/metrics.jsonl")]:
        for row in map(json.loads, path.open()):
            row = {key: value for key, value in row.items() if not key.endswith("_seconds")}
            row |= dict.fromkeys(("timestamp", "session", "experiment"))
            found[path.relative_to(base), row["round"]] = row
    return found


def rows(base: Path, log: str) -> list[dict]:
    return [json.loads(line) for line in (base / "logs" / log).open()]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """The folder of a run that nothing disturbed; it is copied, never changed."""
    assert run(drive := tmp_path_factory.mktemp("unbroken")) == 0
    return drive


@pytest.fixture
def drive(unbroken, tmp_path):
    """A shared folder in which nothing was made yet but the warm start."""
    shutil.copytree(unbroken / "warmstart", tmp_path / "drive/warmstart")
    return tmp_path / "drive"


# -------- F1: no file or the whole one --------------------------------------------------------------------

WRITER = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from drive_store import DriveStore, parse_json
_, drive, me, links, first, last = sys.argv
if links == "no links":
    os.link = lambda *_: os.mkdir("/")  # an OSError
store = DriveStore(drive, "x", me)
store.create()
for i in range(int(first), int(last)):
    mine = {{"by": me, "i": i, "text": "x" * 60_000}}
    won = store.write(f"once/{{i}}.json", mine, keep=parse_json)
    store.write("heartbeats/shared.json", mine)
    store.write(f"checkpoints/{{me}}.json", mine, sync=True)
    store.append(f"logs/{{me}}.jsonl", json.dumps(mine) + "\\n")
    print(i, won, flush=True)
"""


def start_writer(drive, me, links="links", first=0, last=10**6):
    command = [sys.executable, "-c", WRITER, drive, me, links, str(first), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def whole_files(base: Path) -> dict:
    """{name: who wrote it} of all JSON files; fails if one is not whole."""
    found = {path.name: json.loads(path.read_bytes()) for path in base.glob("[!t]*/*.json")}
    assert all(len(data["text"]) == 60_000 for data in found.values())
    return {name: data["by"] for name, data in found.items()}


@pytest.mark.parametrize("links", ["links", "no links"])
def test_F1_readers_beside_several_writers_see_no_file_or_the_whole_one(tmp_path, links):
    writers, looks = {me: start_writer(tmp_path, me, links, last=80) for me in "abc"}, [{}]
    while any(writer.poll() is None for writer in writers.values()):
        looks.append(whole_files(tmp_path / "experiments/x"))
        once = {name: by for name, by in looks[-2].items() if name[0].isdigit()}
        assert links != "links" or once.items() <= looks[-1].items(), "written once and never changed"
    won = {(i, me) for me in "abc" for i, yes in map(str.split, writers[me].stdout) if yes == "True"}
    there = whole_files(tmp_path / "experiments/x")
    assert len(looks) > 5 and {(str(i), there[f"{i}.json"]) for i in range(80)} <= won
    assert len(won) == 80 or links == "no links", "the first one counts, and only its writer believes so"


def test_F1_kill_9_in_the_middle_of_writes_leaves_whole_files_and_whole_lines(tmp_path):
    rng, base, count = random.Random(0), tmp_path / "experiments/x", 0
    for _ in range(15):
        writer = start_writer(tmp_path, "a", first=count)
        assert writer.stdout.readline()
        time.sleep(rng.random() / 20)
        writer.kill()
        writer.communicate()
        count = sum(name[0].isdigit() for name in whole_files(base))
    store = DriveStore(tmp_path, "x", "a")
    store.create()
    store.append("logs/a.jsonl", "[]\n")
    assert len(list(base.glob("*/*.*"))) == count + 3 and len(list(base.glob("tmp/*/*"))) < 2
    lines = (base / "logs/a.jsonl").read_text().splitlines()
    whole = [json.loads(line)["i"] for line in lines[:-1] if line.endswith("}")]
    assert lines[-1] == "[]" and len(lines) - 1 - len(whole) <= 15 and set(whole) >= {0, count - 2}


@pytest.mark.parametrize("links", ["links", "no links"])
@pytest.mark.parametrize("planted", [None, b"", b'{"node_id"', b"[1]", "another's"])
def test_F1_the_first_complete_file_counts_and_nothing_else(tmp_path, monkeypatch, planted, links):
    if links == "no links":
        monkeypatch.setattr(os, "link", lambda *_: os.mkdir("/"))  # an OSError
    (store := DriveStore(tmp_path, "x", "n")).create()
    store.publish(1, 0, "other", {}, {"0": group_by_hand(1)}), store.submit_reward(1, 0, "other", {"reward": 0.25})
    for kind in ("rollouts", "rewards") if planted is not None else ():
        path, other = (store.base / f"{kind}/round_000001/stage_0/{name}.json" for name in ("n", "other"))
        path.write_bytes(other.read_bytes() if planted == "another's" else planted)
    assert store.publish(1, 0, "n", {}, {"0": group_by_hand(2)}) and store.submit_reward(1, 0, "n", {"reward": 0.5})
    before = contents(store.base)
    assert not store.publish(1, 0, "n", {}, {}) and not store.submit_reward(1, 0, "n", {"reward": 1.0})
    assert contents(store.base) == before and store.fetch(1, 0, "n")[0]["seed"] == 2
    assert [row["reward"] for row in store.rewards(1, ["n", "other"])] == [0.5, 0.25]


# -------- F2: a node waits for the folder -----------------------------------------------------------------


def fail_below(monkeypatch, folder, plan) -> None:
    """Calls of the system fail below a folder as `plan()` says: "before" or "after" they did their work."""
    for name in ("open", "listdir", "mkdir", "lstat", "link", "replace", "rename", "unlink"):

        def fake(*args, name=name, real=getattr(os, name), **kwargs):
            fault = plan() if str(folder) in str(args[0]) else None
            if fault == "before":
                raise OSError(errno.EIO, "broken")
            done = real(*args, **kwargs)
            if fault == "after":
                if name == "open":
                    os.close(done)
                raise OSError(errno.ENOSPC, "full")
            return done

        monkeypatch.setattr(os, name, fake)


def work(drive, before_each=lambda: None, in_outage=lambda: None) -> list[str]:
    """Everything that a node does to the folder, several times; what it says of outages. Pauses take no time."""
    (store := DriveStore(drive, "x", "n")).create()
    event = lambda kind, text, **_: (events.append(kind), kind == "outage" and in_outage())  # noqa: E731
    patient, events, clock = Patient(store, event, SimpleNamespace(pressed=0)), [], itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in (("sleep", lambda s: None), ("monotonic", lambda: next(clock)), ("time", lambda: 1e9)):
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
    """A disk of 32 MB; only root can have one."""
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)]
    if os.getuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill_up(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass


@pytest.mark.parametrize("seed", range(5))
def test_F2_whatever_fails_for_a_while_nothing_is_lost_and_nothing_doubled(
    tmp_path, monkeypatch, no_pauses, seed
):
    rng, sound, broken = random.Random(seed), tmp_path / "sound", tmp_path / "broken"
    assert work(sound) == []
    with monkeypatch.context() as patch:
        fail_below(patch, broken / "experiments/x/", lambda: rng.choice([None] * 8 + ["before", "after"]))
        events = work(broken)
    assert contents(broken) == contents(sound)
    assert len(events) > 20 and events == ["outage", "outage over"] * (len(events) // 2)


def test_F2_a_disk_that_is_full_at_every_write_loses_nothing(tmp_path, small_disk, no_pauses):
    filler = small_disk / "filler"
    assert work(tmp_path / "sound") == []
    events = work(small_disk, lambda: fill_up(small_disk), filler.unlink)
    filler.unlink()
    assert contents(small_disk) == contents(tmp_path / "sound")
    assert len(events) > 20 and events == ["outage", "outage over"] * (len(events) // 2)


@pytest.mark.parametrize("how, step, call", [
    ("renamed away", "communicate", 4), ("renamed away", "finish_round", 4), ("EIO", "sample_external", 5),
    ("full disk", "submit_reward", 3),
])  # fmt: skip
def test_F2_training_waits_for_the_folder_and_then_goes_on(
    request, unbroken, drive, monkeypatch, how, step, call
):
    if how == "full disk":
        drive = shutil.copytree(drive, request.getfixturevalue("small_disk") / "drive")
    base, away, broken = drive / "experiments/x", drive / "away", []
    begin = {"renamed away": lambda: base.rename(away), "EIO": lambda: broken.append("before")}
    end = {"renamed away": lambda: base.exists() or away.rename(base), "EIO": broken.clear}
    begin, end = begin.get(how, lambda: fill_up(drive.parent)), end.get(how, (drive.parent / "filler").unlink)
    fail_below(monkeypatch, base, lambda: broken[0] if broken else None)
    at_call(monkeypatch, step, call, lambda: (begin(), threading.Timer(2.0, end).start()))
    assert run(drive) == 0 and not away.exists()
    assert history(base) == history(unbroken / "experiments/x")
    assert [len(log_rows(base, node)) for node in ("n_0", "n_1")] == [6, 6]
    assert [len(events_of(base, "n", kind)) for kind in ("outage", "outage over")] == [1, 1]


def test_F2_ctrl_c_ends_an_outage_at_once_and_the_next_start_goes_on(unbroken, drive, monkeypatch, capsys):
    base, away, press = drive / "experiments/x", drive / "away", lambda: os.kill(os.getpid(), signal.SIGINT)
    with monkeypatch.context() as patch:
        at_call(patch, "communicate", 8, lambda: (base.rename(away), threading.Timer(2.0, press).start()))
        began = time.monotonic()
        assert run(drive) == 130 and time.monotonic() < began + 10
    assert "NODE_ID=n" in capsys.readouterr().out.split("to go on")[1] and not base.exists()
    away.rename(base)
    assert run(drive) == 0 and history(base) == history(unbroken / "experiments/x")


def test_F2_a_peers_file_that_cannot_be_read_is_skipped_and_read_again_in_the_next_round(drive, monkeypatch):
    store, looks = DriveStore(drive, "x", "p"), itertools.count()
    store.create()
    for peer in "pq":
        store.publish(0, 0, peer, {}, {"0": group_by_hand(ord(peer))})
    fail_below(monkeypatch, "stage_0/p.json", lambda: "before" if next(looks) < 2 else None)
    assert run(drive, LOCAL_NODES=1, MAX_ROUNDS=3) == 0
    rows = [(row["external_groups"], row["rejected"]) for row in log_rows(store.base, "n")]
    assert rows == [(1, 1), (0, 1), (1, 0)] and not events_of(store.base, "n", "outage")
    assert len(events_of(store.base, "n", "reject")) == 1, "said once"


# -------- F4, F5: checkpoints and retention ---------------------------------------------------------------

HARM = {  # what becomes of a checkpoint's bytes
    "torn": lambda data: data[:-1], "flipped": lambda data: data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:],
    "empty": lambda data: b"", "another model's": lambda data: data.replace(b'"tiny\\"', b'"tinx\\"'),
    "of a long header": lambda data: b"\xff" * 7 + b"\0" + data,
}  # fmt: skip


@pytest.mark.parametrize("how", HARM)
def test_F4_the_newest_readable_checkpoint_counts_and_without_one_nothing_starts_over(
    unbroken, drive, capsys, how
):
    assert run(drive, MAX_ROUNDS=4) == 0 and capsys.readouterr()
    base = drive / "experiments/x"
    both = sorted(base.glob("checkpoints/*/n.safetensors"))
    sound = [path.read_bytes() for path in both]
    for path, data in zip(both, sound, strict=True):
        path.write_bytes(HARM[how](data))
    before = contents(base)
    assert run(drive) == 2 and contents(base) == before
    assert "cannot be used" in (said := capsys.readouterr().out) and "| reward" not in said
    both[0].write_bytes(sound[0])
    assert run(drive) == 0 and f"{both[1].relative_to(base)} cannot be used" in capsys.readouterr().out
    assert events_of(base, "n", "resume")[-1] == "from the checkpoint after round 1"
    assert history(base) == history(unbroken / "experiments/x")


@pytest.mark.parametrize("archive", [False, True])
def test_F5_retention_deletes_or_archives_whole_rounds_that_nobody_needs(drive, archive):
    (store := DriveStore(drive, "x", "human")).create()
    for t in (0, 4, 7):
        store.publish(t, 0, "human", {}, {"0": group_by_hand(t)})
    settings = {
        "ROLLOUT_CLEANUP_ENABLED": True,
        "ROLLOUT_KEEP_LAST_N_ROUNDS": 1,
        "ROLLOUT_ARCHIVE_OLD": archive,
    }
    assert run(drive, MAX_ROUNDS=9, ROLLOUT_MAX_AGE=1, **settings) == 0
    paths = {place: place.glob("rollouts/*/*/*.json") for place in (store.base, drive / "archives/x")}
    here, aside = ({(int(p.parts[-3][6:]), p.stem) for p in found} for found in paths.values())
    everyone = {*itertools.product(range(9), ("n_0", "n_1")), *((t, "human") for t in (0, 4, 7))}
    needed = {
        (t, node) for t, node in everyone if t >= 6
    }  # by who resumes: CHECKPOINT_INTERVAL, ROLLOUT_MAX_AGE
    assert here == needed and aside == (everyone - needed if archive else set())
    assert store.rounds("rollouts") == [6, 7, 8] and store.rounds("rewards") == [*range(9)]


# -------- F6: an experiment -------------------------------------------------------------------------------


@pytest.fixture
def finished(unbroken, drive):
    """A shared folder with a run that has ended."""
    shutil.copytree(unbroken / "experiments", drive / "experiments")
    return drive


@pytest.mark.parametrize("said, settings, status", [
    (["new experiment z", "there are also: x"], {"EXPERIMENT_NAME": "z", "MAX_ROUNDS": 1}, 0),
    (["there already: round 5, nodes: n_0, n_1", "from the checkpoint after round 5"], {"MAX_ROUNDS": 7}, 0),
    (["there already: round 5, nodes: n_0, n_1"], JOINING, 0), (["already finished", "all 6 rounds"], {}, 0),
    (["has finished its 6 rounds"], JOINING | {"NODE_ID": None}, 2),  # a made-up name joins nothing that is over
])  # fmt: skip
def test_F6_a_start_says_new_or_joined_or_resumed_or_finished(finished, capsys, said, settings, status):
    assert run(finished, **settings) == status
    out = capsys.readouterr().out
    assert all(words in out for words in said), out


def test_F6_a_node_joins_with_three_settings_and_disturbs_no_other_experiment(finished, capsys):
    base, other = (
        finished / "experiments/x",
        shutil.copytree(finished / "experiments/x", finished / "experiments/y"),
    )
    before, began_with = contents(other), json.loads((base / "config.json").read_text())
    evil = dict.fromkeys(
        "DEVICE HF_REPO GDRIVE_PATH HUGGINGFACE_ACCESS_TOKEN NODE_ID VERBOSE".split(), "evil"
    )
    (base / "config.json").write_text(
        json.dumps(began_with | evil | {"LOCAL_NODES": 9, "LEARNING_RATE": 0.002})
    )
    assert run(finished, **JOINING) == 0
    said = capsys.readouterr().out
    assert "LEARNING_RATE=0.002" in said.split("from the experiment: ")[1] and "evil" not in said
    [*_, row], groups = log_rows(base, "late"), DriveStore(finished, "x").fetch(5, 0, "late")
    assert (row["round"], row["completions"], row["external_groups"]) == (5, 8, 2)
    assert {group["task"] for group in groups} <= {"small_gcd", "small_products"} and contents(
        other
    ) == before


@pytest.mark.parametrize("name, value", [
    ("SEED", 7), ("TASKS", "small_gcd"), ("REWARD", "verifier"), ("MAX_STAGES", 2), ("MODEL_NAME", ROOT),
    ("MODEL_NAME", "no/such model"), ("DEVICE", "cuda:9"), ("MAX_NEW_TOKENS", 300), ("NUM_GENERATIONS", 1),
    ("TASKS", "countdown"), ("NODE_ID", "../n"), ("NODE_ID", "coordinator"),
])  # fmt: skip
def test_F6_a_start_that_disagrees_or_fails_says_why_and_leaves_nothing(
    finished, tmp_path, capsys, name, value
):
    before = contents(finished)
    assert run(finished, MAX_ROUNDS=7, **{name: value}) == 2 and name in capsys.readouterr().out
    assert contents(finished) == before
    if (
        name not in sapo.MUST_AGREE or value == "countdown"
    ):  # the others are as good as any in a new experiment
        assert run(tmp_path / "new", **{name: value}) == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name, value", [
    *itertools.product(["SEED"], [-1, None, [1], "7\x1b[2J", 10**400, 1e308, True, {}]), ("REWARD", "eval"),
    *itertools.product(["TASKS"], ["countdown", "\x1b]0;x\x07", ["small_gcd"], 5]), ("MAX_NEW_TOKENS", 32768),
    *itertools.product(["LEARNING_RATE"], ["nan", 10**400, -1, [], " auto"]), ("MAX_ROUNDS", "9" * 4000),
    ("NUM_SHOTS", 17), ("MAX_STAGES", 0), ("LOSS_TYPE", "x" * 9000), ("EXTERNAL_FLOOR", 10**400), ("layout", None),
])  # fmt: skip
def test_F6_settings_in_config_json_pass_the_same_checks_and_are_refused_in_a_sentence(
    finished, capsys, name, value
):
    config = finished / "experiments/x/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    before = contents(finished)
    assert run(finished, **JOINING) == 2 and contents(finished) == before
    said = capsys.readouterr().out
    assert ("another version" if name == "layout" else name) in said and len(said) < 2000
    assert all(c.isprintable() or c == "\n" for c in said)
