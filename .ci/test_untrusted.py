"""Tests of the protection against untrusted peers (X1 to X4, and L3 as far as it concerns them).

The peers' files are written by hand. Hypothesis generates the same examples in every run.
"""

import contextlib
import errno
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import sys
import tracemalloc
from math import inf, nan
from unittest.mock import Mock, patch

import pytest
import safetensors.torch
import torch
from common import LEARNING, QUICK, events_of, folder_of, is_safe_to_print, read_log, rewards_of
from common import run, time_limit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coordinator
import drive_store
import grpo
import sapo
from test_sapo import at_call, contents, group_by_hand, make_config, new_store

SHORT = LEARNING | {"WARM_START_STEPS": 8, "MAX_ROUNDS": 4, "MAX_NEW_TOKENS": 5}
SHORT |= {"CHECKPOINT_INTERVAL": 1, "CHECKPOINT_KEEP": 9, "FETCH_MAX_PEERS": 99}
CONFIG_JSON = sapo.saved_settings(make_config(**QUICK | SHORT | {"NODE_ID": "q"}))
READERS = ("monitor", "report")
REPEATABLE = dict(derandomize=True, deadline=None, suppress_health_check=[*HealthCheck])


def run_roles(drive, *roles, **more) -> tuple[list, str]:
    """Run these roles one after another. Return their exit codes and their output.

    Peers' files must not hold up a role or cause a traceback, and must not be printed raw.
    """
    screen = io.StringIO()
    plot = patch("coordinator.plot", lambda *_: b"a picture")
    with time_limit(30), contextlib.redirect_stdout(screen), plot:
        statuses = [run(drive, SHORT, NODE_ROLE=role, **more) for role in roles]
    assert is_safe_to_print(screen.getvalue())
    return statuses, screen.getvalue()


# -------- X1, X2, X3: files of every kind in every place ------------------------------------------

TERMINAL = "\x1b]0;x\x07\u202e\r"
STAGES = [f"{kind}/round_{t:06d}.stage_0.json" for t in range(4) for kind in ("rollouts", "rewards")]  # fmt: skip
EVIL = type("Evil", (), {"__reduce__": lambda _: (os.mkdir, ("PWNED",))})()  # runs if unpickled
BYTES = {
    "empty": b"", "torn": b'{"format": 1, "peer_id": "p', "no-text": b"\xff\xfe\0" * 99, "no-object": b"[1]",
    "deep": b'{"a": ' + b"[" * 4000 + b"]" * 4000 + b"}", "not-finite": b'{"time": NaN, "reward": 1e999}',
    "digits": b'{"time": ' + b"9" * 100_000 + b"}", "commas": b'{"a": [' + b"[]," * 2_500_000 + b"1]}",
    "odd-types": b'{"time": 1' + b"0" * 400 + b', "session": ["x"], "round": "\\u001b[2J", "reward": true}',
    "for-the-terminal": "\x1b]0;x\x07\u202e\r\n".encode() * 99, "pickle": b"cos\nmkdir\n(S'PWNED'\ntR.",
}  # fmt: skip
for kind, changes in {  # rollouts of round 2 with a group that is wrong only in these values
    "bad-task": dict.fromkeys(("task", "prompt", "answer"), TERMINAL),
    "bad-response": {"completions": [{"response": 1, "finished": True}] * 2},
}.items():
    about = {"format": 1, "peer_id": kind, "round": 2, "stage": 0, "timestamp": 1e9}
    BYTES[kind] = json.dumps(about | {"rollouts": {"0": group_by_hand(1) | changes}}).encode()
LINKS = {  # kind -> function that creates it at a path, as a link into the folder `outside`
    "link": lambda path, outside: path.symlink_to(outside / "n_0.json"),
    "link-to-a-folder": lambda path, outside: path.symlink_to(outside),
    "dangling-link": lambda path, outside: path.symlink_to(outside / "new"),
}
FILES = {
    "loop": lambda path, _: path.symlink_to(path),
    "dev-zero": lambda path, _: path.symlink_to("/dev/zero"),
    "FIFO": lambda path, _: os.mkfifo(path),
    "terabytes": lambda path, _: path.touch() or os.truncate(path, 2**43),
    "torch-pickle": lambda path, _: torch.save(EVIL, path.open("wb")),
}
FILES |= {kind: lambda path, _, data=data: path.write_bytes(data) for kind, data in BYTES.items()}
MAKE = LINKS | FILES | {"folder": lambda path, _: (path / "in").mkdir(parents=True)}

# Peers are named after kinds, so that files of all kinds can be next to each other and a failure
# shows the kind. NN stands for the number of the kind.
PEERS = ("KIND", "KIND-1", "KIND-2")
PEER_FILES = ["nodes/KIND-1", "nodes/KIND-2/rollouts", "nodes/KIND-2/rewards"]
PEER_FILES += """nodes/KIND/heartbeat.json nodes/KIND/model nodes/junk-KIND board/junk-KIND board/open.KIND.000000.0
    board/rollouts.KIND.000009.0 board/rewards.n_1.0000NN.0 nodes/n_0/checkpoints/round_0009NN.safetensors
    nodes/n_0/.new-NN nodes/n_0/logs/.new-NN ../linked-KIND ../broken-KIND/board ../broken-KIND/config.json""".split()
PEER_FILES += [f"nodes/KIND/{name}" for name in STAGES[:6]]
OWN_FILES = [
    f"nodes/{node}/{name}"
    for node in ("n_0", "n_1")
    for name in (*STAGES, "heartbeat.json", "model/config.json", "model/model.safetensors")
]
OWN_FILES += """nodes/n_0/logs/system_info.json nodes/coordinator/heartbeat.json
    ../../reports/default.png ../../reports/report_all.md ../../reports/report_all.json""".split()


def write(path, content=b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def begin(drive, peers="qp"):
    """Write an experiment with files that these peers left in 2001. Return its folder."""
    folder = drive / "experiments/default"
    for name in ("board", "../../warmstart", "../../reports", "../../archives/default"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", CONFIG_JSON)
    for name in (*peers, "coordinator"):
        session = {"session": "1000000000000-00000000", "time": 1e9, "state": "running"}
        write(folder / f"nodes/{name}/heartbeat.json", session)
        write(folder / f"board/session.{name}.{session['session']}", {})
    for name, t in itertools.product(peers, range(3)):
        groups = {str(i): group_by_hand(10 * t + i + ord(name[0])) for i in range(3)}
        about = dict(round=t, stage=0, timestamp=1e9, format=1, node_id=name, peer_id=name)
        reward = about | {"reward": 0.5}
        for kind, content in (("rollouts", about | {"rollouts": groups}), ("rewards", reward)):
            write(folder / f"nodes/{name}/{kind}/round_{t:06d}.stage_0.json", content)
            write(folder / f"board/{kind}.{name}.{t:06d}.0")
    return folder


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory):
    """Return the shared folder of a run in which p published nothing. Tests undo their changes."""
    drive = tmp_path_factory.mktemp("honest_run")
    begin(drive, "q")
    assert run_roles(drive, "worker")[0] == [0]
    folder = begin(drive)  # add p's files, for the monitor and the report
    row = (folder / f"nodes/p/{STAGES[1]}").read_bytes()
    write(folder / "nodes/p/logs/metrics.jsonl", row + b"\n")
    return drive


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Provide a folder outside the shared folder, with files that the program could read or change.

    It is the current folder. The test fails if anything in it changes.
    """
    elsewhere = tmp_path / "elsewhere"
    names = ["config.json", "n_0.json", "heartbeat.json", ".new-1", STAGES[0], STAGES[0][9:]]
    for folder, name in itertools.product((".", "n_0", "default/n_0", "board"), names):
        write(elsewhere / folder / name, CONFIG_JSON)
    monkeypatch.chdir(elsewhere)
    before = contents(elsewhere), *map(os.path.getmtime, sorted(elsewhere.rglob("*")))
    yield elsewhere
    now = contents(elsewhere), *map(os.path.getmtime, sorted(elsewhere.rglob("*")))
    assert now == before


def plant(path, kind, outside) -> None:
    """Create something of this kind at a path, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    MAKE[kind](path, outside)


def outcome(drive) -> tuple:
    """Return the nodes' rewards and the bytes of their checkpoints and of the warm start.

    A checkpoint contains weights, optimizer state, total rewards and keys of used external groups.
    """
    rewards = [(row["round"], row["node_id"], row["reward"]) for row in rewards_of(drive, "n_?")]
    checkpoints = sorted(folder_of(drive, "n_0").glob("checkpoints/round_00000*"))
    return rewards, [path.read_bytes() for path in checkpoints], contents(drive / "warmstart")


def check_planted(drive, outside, honest_run, kinds, own_kinds) -> None:
    """Run all roles with files of these kinds, and compare the results with the honest run's.

    Files of all `kinds` are planted wherever a peer can write. `own_kinds` take turns in place of
    the node's own files. (They do not include folders, because a node waits if a folder is in its
    way.)
    """
    peers = [peer.replace("KIND", kind) for kind in kinds for peer in PEERS]
    folder = begin(drive, ["q", *peers])
    for (number, kind), name in itertools.product(enumerate(kinds, 10), PEER_FILES):
        plant(folder / name.replace("KIND", kind).replace("NN", str(number)), kind, outside)
    own = [f"../../warmstart/{name}" for name in os.listdir(honest_run / "warmstart")] + OWN_FILES
    own_paths = dict(zip((folder / name for name in own), itertools.cycle(own_kinds)))
    for path, kind in own_paths.items():
        plant(path, kind, outside)

    # The files cost little memory and do not affect the results. The node replaces files that are
    # in its way.
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    statuses, _ = run_roles(drive, "worker", "prepare", "coordinator", *READERS)
    assert statuses[0] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < kilobytes + 500_000
    assert outcome(drive) == outcome(honest_run)
    for path, kind in own_paths.items():
        is_replaced = path.is_file() and not path.is_symlink() and path.stat().st_size < 2**30
        assert is_replaced, (path, kind)

    # Each reason to reject a peer's files is logged once, and each failed read is counted.
    rejections = events_of(drive, "n_0", "reject")
    assert len(rejections) == len({*rejections})
    assert {*kinds} <= {text.split(":")[0] for text in rejections} <= {*peers}
    assert sum(row["rejected"] for row in read_log(drive, "n_0")) >= 3 * len(kinds)
    report = json.loads((drive / "reports/report_all.json").read_text())
    assert [row["experiments"] for row in report] == [["default"]]


@pytest.mark.parametrize("step", [1, -1])
def test_X1_X2_X3_no_file_of_any_kind_changes_what_is_learned(honest_run, tmp_path, outside, step):
    own_kinds = [*LINKS, *FILES][::step]
    try:
        check_planted(tmp_path / "drive", outside, honest_run, [*MAKE], own_kinds)
    except BaseException:  # repeat the run with one kind at a time, to find the responsible kind
        for kind in MAKE:
            own_kind = [kind] * (kind in own_kinds)
            check_planted(tmp_path / kind, outside, honest_run, [kind], own_kind)
        raise


CLEANUP = {"ROLLOUT_CLEANUP_ENABLED": True, "ROLLOUT_KEEP_LAST_N_ROUNDS": 1, "ROLLOUT_MAX_AGE": 0}
LINKED = [  # path, kind of link, exit code of the worker (Ctrl-C stops a worker that waits)
    ("nodes/n_0", "dangling-link", 2), ("nodes/n_0/rollouts", "link-to-a-folder", 2),
    ("nodes/n_0/checkpoints", "link-to-a-folder", 2), ("nodes/n_0/logs", "link", 2),
    ("../../archives/default/n_0", "link-to-a-folder", 2),
    ("nodes/n_0/logs/stdout.log", "link", 130), ("nodes/n_0/logs/metrics.jsonl", "dangling-link", 130),
    ("nodes/p/rollouts", "link-to-a-folder", 0),
]  # fmt: skip


def test_X2_nothing_is_changed_where_a_link_leads(tmp_path, outside, monkeypatch):
    monkeypatch.setattr(sapo.Signals, "sleep", Mock(side_effect=KeyboardInterrupt))
    drive = tmp_path / "drive"
    folder = begin(drive)
    for name, kind, status in LINKED:
        plant(folder / name, kind, outside)
        statuses, output = run_roles(drive, "worker", ROLLOUT_ARCHIVE_OLD=True, **CLEANUP)
        assert statuses == [status], name
        assert status == 0 or os.path.basename(name) in output
        (folder / name).unlink()


def test_X2_a_backup_by_hard_links_keeps_what_the_program_deletes_and_replaces(
    honest_run, tmp_path
):
    drive, backup = shutil.copytree(honest_run, tmp_path / "drive"), tmp_path / "backup"
    shutil.copytree(drive, backup, copy_function=os.link, ignore=shutil.ignore_patterns("*logs"))
    before = contents(backup)
    assert run_roles(drive, "worker", **CLEANUP, CHECKPOINT_KEEP=1, MAX_ROUNDS=5)[0] == [0]
    assert contents(backup) == before
    names = [name for name in before if "n_0/checkpoints" in name or "n_0/rollouts" in name]
    assert sum(not (drive / name).exists() for name in names) > 3


def test_X2_an_upload_that_is_repeated_does_not_empty_the_hard_link_that_it_created(
    tmp_path, monkeypatch
):
    store, local, link = new_store(tmp_path), tmp_path / "local", os.link
    local.write_text("weights")

    def fail_after_linking(*paths):
        monkeypatch.setattr(os, "link", link)
        link(*paths)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", fail_after_linking)
    store.on_event, store.sleep = Mock(), lambda seconds: local.write_text("changed")
    store.upload(local, "/warmstart/weights", replaces=False)
    assert contents(tmp_path / "warmstart") == {"weights": b"weights"}


# -------- X3: damaged JSON and tensors ------------------------------------------------------------

ODD = [None, True, 0, 1, -1, 0.5, nan, inf, 1e300, 2**53, 10**400, 10**4000, "", "1", "p", " auto", "tiny", "../x"]  # fmt: skip
ODD += [TERMINAL, "\ud800", "x" * 40_000, ",".join(f"nonsense_{i}" for i in range(4000))]
odd_values = st.recursive(
    st.sampled_from(ODD) | st.text(max_size=6),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
)


@st.composite
def damaged(draw, valid: bytes) -> bytes:
    """Replace or delete a random part of a JSON file, or replace a byte with up to four bytes."""
    kind_of_damage = draw(st.integers(0, 5))
    if kind_of_damage == 0:
        start = draw(st.integers(0, len(valid)))
        return valid[:start] + draw(st.binary(max_size=4)) + valid[start + 1 :]

    # Descend to a random part. (The list around the file makes the whole file one of the parts.)
    tree = [json.loads(valid)]
    parent, key = tree, 0
    while parent[key] and isinstance(parent[key], dict | list) and draw(st.integers(0, 9)):
        parent = parent[key]
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = draw(st.sampled_from(keys))
    parent[key] = draw(odd_values)
    if kind_of_damage == 1:
        del parent[key]
    return json.dumps(tree)[1:-1].encode()


READ = f"config.json nodes/coordinator/heartbeat.json nodes/p/heartbeat.json nodes/p/{STAGES[0]} nodes/p/{STAGES[1]} nodes/p/logs/metrics.jsonl"
TENSORS = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
FILE = safetensors.torch.save(TENSORS, {"about": "x"})
HEADERS = [FILE[8:-40], FILE[8:-40].replace(b"[2,3]", b"[3,2]"), FILE[8:-40].replace(b"F32", b"I32")]  # fmt: skip


@settings(max_examples=100, **REPEATABLE)
@given(data=st.data(), name=st.sampled_from(READ.split()))
def test_X3_every_reader_copes_with_a_damaged_file(honest_run, data, name):
    path = honest_run / "experiments/default" / name
    valid = path.read_bytes()
    try:
        write(path, data.draw(damaged(valid)))
        statuses, output = run_roles(honest_run, *READERS, MAX_ROUNDS=None)
        # A report without any usable experiment exits with code 1.
        assert {*statuses} <= {0, 2} or (statuses[1] == 1 and "default is left out" in output)
        assert sapo.get_experiment_status(honest_run, "default")["current_round"] == 3
        rewards = sapo.get_experiment_metrics(honest_run, "default")["reward"].dropna()
        assert rewards.between(0, 1).all()
    finally:
        write(path, valid)


WRONG = [("SEED", [1]), ("SEED", "1"), ("SEED", None), ("MAX_ROUNDS", "9"), ("MAX_ROUNDS", 10**400)]
WRONG += [("MAX_ROUNDS", 1.5), ("MAX_ROUNDS", None), ("MAX_STAGES", "2"), ("MAX_STAGES", 10**400)]
WRONG += [("NUM_TRAIN_SAMPLES", "8"), ("NUM_TRANSPLANT_TREES", {}), ("LOCAL_OVERSAMPLE", -1)]


def test_X3_experiments_with_a_wrong_setting_do_not_end_the_readers(honest_run, tmp_path):
    drive = shutil.copytree(honest_run, tmp_path / "drive")
    for number, (name, value) in enumerate(WRONG):
        other = f"wrong_{number}"
        shutil.copytree(drive / "experiments/default", drive / "experiments" / other)
        write(drive / f"experiments/{other}/config.json", CONFIG_JSON | {name: value})
        statuses, output = run_roles(drive, "monitor", EXPERIMENT_NAME=other)
        assert statuses == [0], (name, value)
        assert re.search("(?m)^! unusable files .1.: ", output), (name, value)

    statuses, output = run_roles(drive, "report", EXPERIMENT_NAME="*")
    assert statuses == [0]
    assert len(re.findall("(?m)^wrong_[0-9]+ is left out", output)) == len(WRONG)
    report = json.loads((drive / "reports/report_all.json").read_text())
    assert [row["experiments"] for row in report] == [["default"]]


def test_X3_a_long_log_with_distant_rounds_does_not_hold_up_the_readers(tmp_path):
    folder = begin(tmp_path)
    row = {"timestamp": 1e9, "reward_gcd": 0.1, "reward": 0.5, "node_id": "p", "round": 1}
    filler = json.dumps(row)[:-1]
    write(folder / "nodes/p/logs/metrics.jsonl")
    with open(folder / "nodes/p/logs/metrics.jsonl", "a") as log:
        log.writelines(f'{filler}, "stage": {stage}}}\n' for stage in range(150_000))
    for name, t in ("q", 1), ("q", 2), ("p", 2), ("p", 3), ("p", 99_999), ("p", 999_999):
        (folder / f"board/open.{name}.{t:06d}.0").touch()
        about = {"node_id": name, "round": t, "stage": 0, "reward": 7 if t == 3 else 0.5}
        forged = json.dumps(row | about).encode()
        write(folder / f"nodes/{name}/rewards/round_{t:06d}.stage_0.json", forged)
        (folder / f"nodes/{name}/logs").mkdir(exist_ok=True)
        with open(folder / f"nodes/{name}/logs/metrics.jsonl", "ab") as log:
            log.write(forged + b"\n")

    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    swarm = drive_store.Swarm(drive_store.DriveStore(tmp_path, "default"), 300.0)
    tracemalloc.start()
    exp = coordinator.read_experiment(swarm, coordinator.MONITOR_BYTES)
    assert tracemalloc.get_traced_memory()[1] < 60 * 2**20
    tracemalloc.stop()
    assert [row["reward"] for row in exp.select(node_id="q")] == [0.5, 0.5]
    assert not exp.select(round=3), "a reward above 1 was not rejected"
    with time_limit(20):
        coordinator.format_screen(exp, swarm)
        assert coordinator.plot(coordinator.plot_of(exp)).startswith(b"\x89PNG")
        assert run(tmp_path, NODE_ROLE="report") == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < kilobytes + 200_000
    assert (tmp_path / "reports/report_all.png").exists()


def test_X1_X3_a_question_of_a_million_characters_is_displayed_at_once_and_not_raw():
    completions = [{"response": TERMINAL, "reward": 0.5, "finished": True}]
    group = {"prompt": "x" * 10**6 + TERMINAL, "answer": "1", "completions": completions}
    with time_limit(2):
        lines = coordinator.format_sample(group)
    assert len(lines) <= 5 and sum(map(len, lines)) < 500
    text = "\n".join(lines)
    assert "(correct: 1)" in text and is_safe_to_print(text)


@settings(max_examples=400, **REPEATABLE)
@given(damaged(json.dumps(CONFIG_JSON).encode()))
def test_X3_with_any_config_json_a_start_has_sound_settings_or_ends_with_a_few_sentences(data):
    environ = dict(GDRIVE_PATH="d", NODE_ID="late", NODE_ROLE="worker", DEVICE="cpu")
    try:
        with time_limit(5):
            config = sapo.read_config(environ, drive_store.parse_json(data))
            notes = config.notes
    except (drive_store.InvalidFileError, sapo.ConfigError) as error:
        notes = [str(error)]
        assert notes[0]
    else:
        assert {*config.TASKS.split(",")} <= grpo.TASK_TABLE.keys()
        assert config.MODEL_NAME == "tiny"
        for name, row in sapo.TABLE.items():
            value = getattr(config, name)
            if row.metadata["scope"] != "node":
                assert type(value) is row.type
                assert sapo.parse_value(row, str(value)) == value
    assert is_safe_to_print("\n".join(notes))
    assert "\n".join(notes).count("\n") < 20


@settings(max_examples=300, **REPEATABLE)
@given(
    st.sampled_from(HEADERS) | damaged(HEADERS[0]),
    st.sampled_from([1, 1, 1, 2**20, 2**50]),
    st.sampled_from([FILE[-40:], b"\xff" * 40, FILE[-39:], FILE[-40:] + b"x"]),
)
def test_X3_tensors_of_a_peer_fit_and_are_finite_or_are_rejected(tmp_path, header, times, numbers):
    """times: the factor by which the file exaggerates the length of its header"""
    length = min(len(header) * times, 2**64 - 1)
    write(tmp_path / "weights", length.to_bytes(8, "little") + header + numbers)
    with contextlib.suppress(*sapo.UNUSABLE):
        saved, _ = sapo.read_tensors(drive_store.DriveStore(tmp_path, "x"), "/weights", TENSORS)
        sapo.copy_tensors(saved, TENSORS)
        saved = safetensors.torch.load_file(tmp_path / "weights")
        for name, tensor in TENSORS.items():
            assert (saved[name].shape, saved[name].dtype) == (tensor.shape, tensor.dtype)
            assert saved[name].isfinite().all() and saved[name].equal(tensor)


# -------- X1, X3, X4, L3: a peer's groups, and the access token -----------------------------------

PAYLOADS = [
    "__import__('os').system('touch PWNED')", "open('PWNED','w')", "().__class__.__base__.__subclasses__()", "{{7*7}}", "${jndi:ldap://x}", "lambda: 1",
    "[x for x in [1]]", "$(touch PWNED)", "`id`", "%n%s", "exec('1')", "9**9**9", "cos\nsystem\n(S'id'\ntR.", "!!python/object/apply:os.system ['id']",
]  # fmt: skip
FORMS = "{}|{} {}|[[{}]]|({})|{}+{}|{}∧{}|'{}'|\\frac{{{}}}{{{}}}|print({})|<answer>{}".split("|")
WATCHED = "exec compile open os.system subprocess.Popen os.exec os.fork socket.connect import"
SEEN = []  # watched events in this process
sys.addaudithook(lambda event, _: event in WATCHED.split() and SEEN.append(event))


def test_X1_L3_no_completion_of_a_peer_is_evaluated_or_opens_anything():
    tasks = [*grpo.TASK_TABLE]
    config = make_config(**QUICK | {"TASKS": ",".join(tasks), "MAX_NEW_TOKENS": 64})
    verifier = Mock(["config", "codec"], config=config)
    verifier.codec = grpo.load_model(config, config.tasks)[1]
    rng = random.Random(1)

    # Verification and scoring must not cause a watched event. In the first pass, imports and caches
    # cause such events.
    for is_first, task, form in itertools.product((True, False), tasks, FORMS):
        question = grpo.make_question(task, 3)
        for payload in (*rng.sample(PAYLOADS, 3), question.answer):
            text = form.format(payload, question.answer)
            responses = [f"<answer>{text}</answer>", text + "x"]
            completions = [{"response": response, "finished": True} for response in responses]
            group = group_by_hand(3, task, completions=completions, key=(0, 0, "p", 0))
            SEEN.clear()
            try:
                with time_limit(5):
                    sapo.verify(verifier, group)
            except (sapo.Rejected, grpo.QuestionError) as error:
                assert is_safe_to_print(str(error))
            for response, kind in itertools.product(responses, ("exact", "verifier")):
                assert 0 <= grpo.compute_reward(question, response, kind) <= 1
            assert is_first or not SEEN

    open(os.devnull).close()
    assert SEEN, "the audit hook does not record events"


def test_X4_the_token_reaches_no_file_no_log_and_no_error(tmp_path, monkeypatch, capfd):
    secret = 'hf_0123456789abcdef"éSECRET'  # JSON escapes some of its characters
    drive = tmp_path / "drive"

    def fail(*args, token=secret, **kwargs):
        raise ValueError(f"401 Unauthorized: Bearer {token}")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    at_call(monkeypatch, "publish_groups", 5, fail)  # in the third round of two nodes
    for more, status in (
        ({"MAX_ROUNDS": 1}, 0),  # the push to the Hub fails
        ({"MODEL_NAME": "no/such model"}, 2), ({"SEED": "x"}, 2), ({"SEED": 7}, 2), ({"NODE_ID": "../n"}, 2),
        ({"MODEL_NAME": f"/models/{secret}/model", "GDRIVE_PATH": tmp_path / "new"}, 2),
        ({"NODE_ROLE": "monitor"}, 0), ({"NODE_ROLE": "report"}, 0), ({"HUGGINGFACE_ACCES_TOKEN": secret}, 2),
        ({"MAX_ROUNDS": 3}, 1),  # a bug in the program, whose traceback is logged
    ):  # fmt: skip
        settings = {"HUGGINGFACE_ACCESS_TOKEN": f" {secret} ", "MAX_ROUNDS": 2}
        assert run(drive, SHORT, settings, more) == status, more
    assert (folder_of(drive, "n_0") / "logs/stdout.log").read_text().count("Bearer ***")

    # The text of this error contains the token. It is logged for each checkpoint and at the end.
    refuse = Mock(side_effect=safetensors.SafetensorError(f"Bearer {secret}"))
    monkeypatch.setattr("safetensors.safe_open", refuse)
    assert run(drive, SHORT, settings, MAX_ROUNDS=4) == 2
    shown = [*capfd.readouterr(), str(contents(tmp_path)), str(sorted(tmp_path.rglob("*")))]
    shown.append(repr(make_config(HUGGINGFACE_ACCESS_TOKEN=secret)))
    assert shown[0].count("Bearer ***") >= 3
    assert not any("0123456789" in text or "SECRET" in text for text in shown)
