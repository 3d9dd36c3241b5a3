"""Proofs of X1 to X4, and of L3 as far as it concerns strangers who can write to the folder. The
examples that hypothesis draws are the same in every run."""

import contextlib
import io
import itertools
import json
import os
import resource
import shutil
import sys
from unittest.mock import Mock, patch

import pytest
import safetensors.torch
import torch
from common import LEARNING, QUICK, events_of, folder_of, is_safe_to_print, play, read_log
from common import rewards_of, run, time_limit
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import coordinator
import drive_store
import grpo
import sapo
from drive_store import At, DriveStore, InvalidFileError
from test_sapo import at_call, contents, group_by_hand, make_config, put, write_peer

SHORT = LEARNING | {"WARM_START_STEPS": 8, "MAX_ROUNDS": 4, "MAX_NEW_TOKENS": 5}
SHORT |= {"CHECKPOINT_INTERVAL": 1, "CHECKPOINT_KEEP": 9}
CONFIG_JSON = sapo.saved_settings(make_config(**QUICK | SHORT | {"NODE_ID": "q"}))
READERS = ("monitor", "validate", "report")
REPEATABLE = dict(derandomize=True, deadline=None, suppress_health_check=[*HealthCheck])


def run_roles(drive, *roles, seconds=30, draw=lambda *_: b"a picture", **more) -> tuple[list, str]:
    """Run these roles one after another. Nothing that strangers wrote holds one up, ends it in a
    mistake or reaches the terminal raw. Returns the exit statuses and the output."""
    screen = io.StringIO()
    with time_limit(seconds), contextlib.redirect_stdout(screen), patch("coordinator.plot", draw):
        statuses = [run(drive, SHORT, NODE_ROLE=role, **more) for role in roles]
    assert is_safe_to_print(screen.getvalue())
    return statuses, screen.getvalue()


def store_with_peers(drive, publishing="pq") -> DriveStore:
    """An experiment with what an honest peer q and a hostile peer p left in it in the year 2001."""
    with patch("time.time", lambda: 1e9):
        DriveStore(drive, "default").create(CONFIG_JSON)
        store = play(drive, "q", "p", "coordinator")
        for name in ("q", "p", "coordinator"):
            store.write_heartbeat(name, store.session)
        for name, t in itertools.product(publishing, range(3)):
            groups = [group_by_hand(10 * t + i + ord(name)) for i in range(3)]
            write_peer(drive, "default", name, groups, t)
            store.publish("rewards", name, At(t), {"reward": 0.5})
    return store


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory):
    """The folder of a run for which p published nothing. What a test changes it puts back."""
    drive = tmp_path_factory.mktemp("honest_run")
    store_with_peers(drive, "q")
    assert run_roles(drive, "worker")[0] == [0]
    store_with_peers(drive)  # p's files, for the readers
    return drive


# -------- X1, X2, X3: files of every kind in every place ------------------------------------------

STAGES = [f"{kind}/round_{t:06d}.stage_0.json" for t in range(4) for kind in ("rollouts", "rewards")]  # fmt: skip
PEER_FILES = """nodes/p/heartbeat.json nodes/p/posting nodes/p/model nodes/junk board/junk board/open.p.000000.0 board/rollouts.p.000009.0
    board/rewards.n_1.000009.0 nodes/n_0/checkpoints/round_000999.safetensors nodes/n_0/.new-1 nodes/n_0/logs/.new-2 ../linked
    ../broken/board ../broken/config.json""".split()
PEER_FILES += [f"nodes/p/{name}" for name in STAGES[:6]]
OWN_FILES = """nodes/n_0/heartbeat.json nodes/n_0/logs/system_info.json nodes/n_0/posting nodes/n_0/model/config.json
    nodes/n_0/model/model.safetensors nodes/coordinator/heartbeat.json nodes/coordinator/winners/round_000003.json
    ../../reports/default.png ../../reports/report_all.md ../../reports/report_all.json""".split()
OWN_FILES += [f"nodes/n_0/{name}" for name in STAGES]
OWN_LOGS = """nodes/n_0/logs/stdout.log nodes/n_0/logs/training_events.jsonl nodes/n_0/logs/metrics.jsonl
    nodes/coordinator/logs/stdout.log""".split()
EVIL = type(
    "Evil", (), {"__reduce__": lambda _: (os.mkdir, ("PWNED",))}
)()  # unpickled, it makes a folder
BYTES = {
    "empty": b"", "torn": b'{"format": 1, "peer_id": "p', "no text": b"\xff\xfe\0" * 99, "no object": b"[1]",
    "deep": b'{"a": ' + b"[" * 4000 + b"]" * 4000 + b"}", "not finite": b'{"time": NaN, "reward": 1e999}',
    "digits": b'{"time": ' + b"9" * 100_000 + b"}", "commas": b'{"a": [' + b"[]," * 2_500_000 + b"1]}",
    "odd types": b'{"time": 1' + b"0" * 400 + b', "session": ["x"], "round": "\\u001b[2J", "reward": true}',
    "for the terminal": "\x1b]0;x\x07\u202e\r\n".encode() * 99, "pickle": b"cos\nmkdir\n(S'PWNED'\ntR.",
}  # fmt: skip
IN_THE_WAY = {  # kind -> a function that makes it at a path, perhaps as a link into `outside`
    "link": lambda path, outside: path.symlink_to(outside / "n_0.json"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "dangling link": lambda path, outside: path.symlink_to(outside / "new"),
    "loop": lambda path, _: path.symlink_to(path),
    "/dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "FIFO": lambda path, _: os.mkfifo(path),
}
MAKE = IN_THE_WAY | {
    "folder": lambda path, _: (path / "in").mkdir(parents=True),
    "second name": lambda path, outside: path.hardlink_to(outside / "n_0.json"),
    "terabytes": lambda path, _: path.touch() or os.truncate(path, 2**43),
    "pickle of torch": lambda path, _: torch.save(EVIL, path.open("wb")),
}
for kind, data in BYTES.items():
    MAKE[kind] = lambda path, _, data=data: path.write_bytes(data)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder outside the shared one, with names that the program reads, writes or deletes; the
    current one, too. Fails the test if anything in it is changed."""
    elsewhere = DriveStore(tmp_path / "elsewhere", "default")
    names = ["config.json", "n_0.json", "heartbeat.json", ".new-1", "rollouts/.new-2"]
    names += [STAGES[0], os.path.basename(STAGES[0])]
    for folder, name in itertools.product((".", "n_0", "default/n_0", "board"), names):
        put(elsewhere, f"{folder}/{name}", CONFIG_JSON)
    monkeypatch.chdir(elsewhere.dir)

    def state():
        return contents(elsewhere.dir), *map(os.path.getmtime, sorted(elsewhere.dir.rglob("*")))

    before = state()
    yield elsewhere.dir
    assert state() == before


def plant(store, names, kind, outside) -> list:
    """Make something of this kind in all these places. Returns their full paths."""
    paths = [store.dir / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        drive_store.remove(path)
        MAKE[kind](path, outside)
    return paths


def outcome(drive) -> tuple:
    """What the nodes earned and learned: their rewards, the warm start's bytes, and those of their
    checkpoints (weights, optimizer, total rewards and external groups used)."""
    rewards = [(row["round"], row["node_id"], row["reward"]) for row in rewards_of(drive, "n_?")]
    checkpoints = sorted(folder_of(drive, "n_0").glob("checkpoints/round_00000*"))
    return rewards, [path.read_bytes() for path in checkpoints], contents(drive / "warmstart")


@pytest.mark.parametrize("kind", MAKE)
def test_X1_X2_X3_no_file_of_any_kind_changes_what_is_learned(honest_run, tmp_path, outside, kind):
    # Files of this kind lie wherever a peer or the node itself writes. (A regular file in the place
    # of a log is a log, to which the node appends. A folder is in its way: it waits.)
    store = store_with_peers(tmp_path / "drive")
    own_files = [f"../../warmstart/{name}" for name in os.listdir(honest_run / "warmstart")]
    own_files += OWN_FILES + (OWN_LOGS if kind in IN_THE_WAY else [])
    plant(store, PEER_FILES, kind, outside)
    paths = plant(store, own_files if kind != "folder" else [], kind, outside)

    # They cost little memory and change nothing, and each one in the node's way makes room.
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    statuses, output = run_roles(store.root, "worker", "prepare", "coordinator", *READERS)
    assert statuses[0] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < kilobytes + 500_000
    assert outcome(store.root) == outcome(honest_run)
    for path in set(paths) - {store.dir / "nodes/n_0/posting"}:  # it was moved to the board
        assert path.is_file() and not path.is_symlink(), path
        assert path.stat().st_nlink == 1 and path.stat().st_size < 2**30, path

    # Each of p's files is named once, and counted each time it is read.
    rejections = events_of(store.root, "n_0", "reject")
    assert len(rejections) == len({*rejections})
    assert {text[:3] for text in rejections} == {"p: "}
    assert sum(row["rejected"] for row in read_log(store.root, "n_0")) >= 3

    # The report leaves out the experiments that it cannot read.
    report = json.loads((store.root / "reports/report_all.json").read_text())
    assert [row["experiments"] for row in report] == [["default"]]
    is_broken = kind not in ("dangling link", "loop", "folder")
    assert ("experiments/broken cannot be read" in output) == is_broken
    assert ("experiments/linked cannot be read" in output) == (kind == "link to a folder")


WAITS = "waiting for the shared folder"
CLEANUP = {"ROLLOUT_CLEANUP_ENABLED": True, "ROLLOUT_KEEP_LAST_N_ROUNDS": 1, "ROLLOUT_MAX_AGE": 0, "ROLLOUT_ARCHIVE_OLD": True}  # fmt: skip
LINKED = [  # folders that are links; roles, their exit status, and what one says
    ("nodes/p/rollouts nodes/q/rewards ../../reports", "worker report", 0, "the report cannot be written"),
    ("nodes/p nodes/q ../../reports", "worker report", 0, "the report cannot be written"),
    (".", "worker", 2, "default: a link; take another EXPERIMENT_NAME"),
    (".", "coordinator", 2, "default: a link; take another EXPERIMENT_NAME"),
]  # fmt: skip
OWN_FOLDERS = """board nodes ../../warmstart ../../archives ../../archives/default ../../archives/default/n_0
    nodes/n_0 nodes/n_0/rollouts nodes/n_0/rewards nodes/n_0/checkpoints nodes/n_0/logs""".split()
LINKED += [(folder, "worker", 130, WAITS) for folder in OWN_FOLDERS]


@pytest.mark.parametrize("kind", ["link to a folder", "dangling link"])
@pytest.mark.parametrize("row", LINKED, ids=str)
def test_X2_nothing_happens_in_a_folder_that_is_a_link(tmp_path, outside, monkeypatch, kind, row):
    # Where only a peer's files or the pictures would be, the node goes on. Where a link is in its
    # own way, it waits, here until Ctrl-C.
    monkeypatch.setattr(sapo.Signals, "sleep", Mock(side_effect=KeyboardInterrupt))
    store = store_with_peers(tmp_path / "drive")
    folders, roles, status, text = row
    plant(store, folders.split(), kind, outside)
    warm_start = {"WARM_START_STEPS": 8 if "warmstart" in folders else 0}
    statuses, output = run_roles(store.root, *roles.split(), **CLEANUP, **warm_start)
    assert {*statuses} == {status}
    assert text in output
    assert (WAITS in output) == (text == WAITS)


def test_X1_X3_absurd_texts_and_numbers_neither_stop_nor_deceive_a_reader(honest_run, tmp_path):
    # Rewards of forty rounds with absurd metrics and with names of tasks that do not exist, one of
    # which is a formula to the library that draws the pictures.
    drive = shutil.copytree(honest_run, tmp_path / "drive")
    store = play(drive, "p")
    absurd = [0, -1, 1e299, 10**299, -1e299, 1e-300]
    for t in range(40):
        metrics = {"groups": absurd[t % 6], "held_out": -9, "reward": 0.5, "reward_$\\frac{$": 0.5}
        metrics |= dict.fromkeys(["informative_local", "completions"], absurd[t % 6 - 1])
        metrics |= {f"reward_{t}_{i}": 0.5 for i in range(55)}
        store.publish("rewards", "p", At(t), metrics)

    # A group whose texts would control the terminal.
    evil = "\x1b]0;x\x07\u202e\r"
    completions = [{"response": evil, "reward": 1e299, "finished": True}] * 4
    group = dict(task=evil, seed=1, prompt=evil, answer=evil, completions=completions)
    store.publish("rollouts", "p", At(39), {"format": 1, "rollouts": {"0": group}})
    store.move_marker("open", "p", At(39))

    assert run_roles(drive, *READERS, seconds=20, draw=coordinator.plot)[0] == [0, 1, 0]
    assert (drive / "reports/report_all.png").stat().st_size > 9999
    with time_limit(20):
        assert coordinator.plot_run(coordinator.read_experiment(store))


# -------- X3: damaged JSON and tensors ------------------------------------------------------------

RAW = {  # what JSON text may hold and json.dumps does not write
    "@huge@": "9" * 4000, "@1e400@": "1e400", "@nan@": "NaN", "@deep@": "[" * 900 + "]" * 900,
    "@half@": '"\\ud800"', "@text@": '"' + "x" * 40_000 + '"', "@escape@": '"\\u001b[2J\\u0007\\n\\u202e"',
}  # fmt: skip
ODD = [None, True, 0, 1, -1, 0.5, 1e300, 2**53, 10**400, "", "1", "p", " auto", "tiny", "../x", "x" * 300]  # fmt: skip
odd_values = st.recursive(
    st.sampled_from([*RAW, *ODD]) | st.text(max_size=6),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
)


@st.composite
def damaged(draw, valid: bytes) -> bytes:
    """A JSON file of which one part is changed to anything or deleted, or with damaged bytes."""
    kind_of_damage = draw(st.integers(0, 5))
    if kind_of_damage == 0:
        start = draw(st.integers(0, len(valid)))
        return valid[:start] + draw(st.binary(max_size=4)) + valid[start + 1 :]

    # Go down to a part at random. (The whole is in a list, so that it is a part, too.)
    tree = [json.loads(valid)]
    parent, key = tree, 0
    while parent[key] and isinstance(parent[key], dict | list) and draw(st.integers(0, 9)):
        parent = parent[key]
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = draw(st.sampled_from(keys))
    parent[key] = draw(odd_values)
    if kind_of_damage == 1:
        del parent[key]
    text = json.dumps(tree)[1:-1]
    for word, raw in RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text.encode()


READ = f"config.json nodes/coordinator/heartbeat.json nodes/p/heartbeat.json nodes/p/{STAGES[0]} nodes/p/{STAGES[1]}"
UNKNOWN_TASKS = CONFIG_JSON | {"TASKS": ",".join(f"nonsense_{i}" for i in range(4000))}
TENSORS = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
FILE = safetensors.torch.save(TENSORS, {"about": "x"})
HEADERS = [FILE[8:-40], FILE[8:-40].replace(b"[2,3]", b"[3,2]"), FILE[8:-40].replace(b"F32", b"I32")]  # fmt: skip


@settings(max_examples=200, **REPEATABLE)
@given(data=st.data(), name=st.sampled_from(READ.split()))
def test_X3_every_reader_copes_with_a_damaged_file(honest_run, data, name):
    store = DriveStore(honest_run, "default")
    valid = (store.dir / name).read_bytes()
    try:
        put(store, name, data.draw(damaged(valid)))
        assert {*run_roles(store.root, *READERS, MAX_ROUNDS=None, LOCAL_NODES=None)[0]} <= {0, 1, 2}
        assert sapo.get_experiment_status(store.root, "default")["current_round"] == 3
        row = store.read_reward("p", At(0)) or {"reward": None}
        assert row["reward"] is None or 0 <= row["reward"] <= 1
        session = store.board().sessions["p"]
        assert store.node_status("p", session, 300.0) in ("alive", "exited", "dead")
    finally:
        put(store, name, valid)


@settings(max_examples=400, **REPEATABLE)
@given(damaged(json.dumps(CONFIG_JSON).encode()))
@example(json.dumps(UNKNOWN_TASKS).encode())
def test_X3_with_any_config_json_a_start_has_sound_settings_or_ends_with_a_few_sentences(data):
    env = dict(GDRIVE_PATH="d", NODE_ID="late", NODE_ROLE="worker", DEVICE="cpu")
    notes = []
    try:
        with time_limit(5):
            config = sapo.resolve_config(env, drive_store.parse_json(data), notes)
    except (InvalidFileError, sapo.ConfigError) as error:
        notes = [str(error)]
        assert notes[0]
        assert ("nonsense_0" in notes[0]) == (b"nonsense_0" in data)
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
def test_X3_a_strangers_tensors_fit_and_are_finite_or_are_refused(tmp_path, header, times, numbers):
    """times: the file claims that its header is this many times as long as it is."""
    length = min(len(header) * times, 2**64 - 1)
    path = tmp_path / "weights"
    path.write_bytes(length.to_bytes(8, "little") + header + numbers)
    with contextlib.suppress(grpo.SafetensorError):
        grpo.load_tensors(path, TENSORS)
        saved = safetensors.torch.load_file(path)
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
QUESTIONS = list(itertools.product(grpo.TASK_TABLE, (3, 99)))
SEEN = []  # such events in this process
sys.addaudithook(lambda event, _: event in WATCHED.split() and SEEN.append(event))


@pytest.fixture(scope="module")
def verifier():
    """What `verify` needs of a Run, for all tasks. All imports are made and caches filled."""
    config = make_config(**QUICK | {"TASKS": ",".join(grpo.TASK_TABLE), "MAX_NEW_TOKENS": 64})
    codec = grpo.load_model(config, config.tasks)[1]
    for question in itertools.starmap(grpo.make_question, QUESTIONS):
        codec.encode_prompt(question)
        for text in (question.answer, "1", "x ∧ y", "1/2", "[[1]]"):
            grpo.compute_reward(question, f"<answer>{text}</answer>")
    return Mock(["config", "codec"], config=config, codec=codec)


@settings(max_examples=500, **REPEATABLE)
@given(st.sampled_from(QUESTIONS), st.data())
def test_X1_L3_no_completion_of_a_stranger_is_evaluated_or_opens_anything(verifier, key, data):
    # Two completions, made of payloads, of the right answer and of random text.
    question = grpo.make_question(*key)
    piece = st.sampled_from([*PAYLOADS, question.answer]) | st.text(max_size=10)
    text = data.draw(st.sampled_from(FORMS)).format(*data.draw(st.tuples(piece, piece)))
    responses = [f"<answer>{text}</answer>", text + "x"]
    completions = [{"response": response, "finished": True} for response in responses]
    group = group_by_hand(key[1], key[0], completions=completions, key=(0, 0, "p", 0))

    # Verification and scoring make no watched call.
    SEEN.clear()
    with time_limit(5):
        try:
            verified = sapo.verify(verifier, group)
        except (sapo.Rejected, grpo.QuestionError) as error:
            verified = error
        cases = itertools.product([question], responses, ("exact", "verifier"))
        rewards = list(itertools.starmap(grpo.compute_reward, cases))
    assert not SEEN
    assert all(0 <= reward <= 1 for reward in rewards)
    if isinstance(verified, Exception):
        assert is_safe_to_print(str(verified))
    else:
        assert len(verified.texts) == len(verified.rewards) == 2


def test_L3_a_verifier_alone_would_evaluate_an_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    question = grpo.make_question("binary_matrix", 3)
    SEEN.clear()
    question.dataset.score_answer(PAYLOADS[0], question.entry)
    assert {*SEEN} >= {"compile", "exec", "os.system"}
    assert os.path.exists("PWNED")


def test_X3_verifying_a_peer_takes_a_bounded_time_whatever_the_others_need(tmp_path, monkeypatch):
    # This clock goes on by 15 s at each look, and a peer has 20 s: of two groups one is too slow.
    store_with_peers(tmp_path)
    monkeypatch.setattr("time.thread_time", itertools.count(step=15).__next__)
    assert run_roles(tmp_path, "worker", MAX_ROUNDS=1)[0] == [0]
    row = read_log(tmp_path, "n_0")[0]
    assert (row["rejected"], row["external_pool"]) == (3, 3)
    expected = [f"{peer}: too slow to verify" for peer in ("n_1", "p", "q", "n_0")]
    assert events_of(tmp_path, "n_0", "reject") == expected


def test_X4_the_token_reaches_no_file_no_log_and_no_error(tmp_path, monkeypatch, capfd):
    secret = 'hf_0123456789abcdef"éSECRET'  # JSON escapes some of its signs
    drive = tmp_path / "drive"

    def fail(*args, token=secret, **kwargs):
        raise ValueError(f"401 Unauthorized: Bearer {token}")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    at_call(monkeypatch, "publish_groups", 5, fail)  # of two nodes, in the third round
    for more, status in (
        ({"MAX_ROUNDS": 1}, 0),  # the push to the Hub fails
        ({"MODEL_NAME": "no/such model"}, 2), ({"SEED": "x"}, 2), ({"SEED": 7}, 2), ({"NODE_ID": "../n"}, 2),
        ({"MODEL_NAME": f"/models/{secret}/model", "GDRIVE_PATH": tmp_path / "new"}, 2),
        ({"NODE_ROLE": "monitor"}, 0), ({"NODE_ROLE": "report"}, 0), ({"HUGGINGFACE_ACCES_TOKEN": secret}, 0),
        ({"MAX_ROUNDS": 3}, 1),  # a mistake in the program, whose traceback is logged
    ):  # fmt: skip
        settings = {"HUGGINGFACE_ACCESS_TOKEN": f" {secret} ", "MAX_ROUNDS": 2}
        assert run(drive, SHORT, settings, more) == status, more
    log = (folder_of(drive, "n_0") / "logs/stdout.log").read_text()
    assert "push failed (ValueError)" in log and "Bearer ***" in log
    assert not (tmp_path / "new").exists()

    # An error whose text holds the token. It is shown for each checkpoint and at the end.
    def refuse(*_):
        raise grpo.SafetensorError(f"Bearer {secret}")

    monkeypatch.setattr(grpo, "load_tensors", refuse)
    assert run(drive, SHORT, settings, MAX_ROUNDS=4) == 2
    shown = [*capfd.readouterr(), str(contents(drive)), str(sorted(drive.rglob("*")))]
    shown.append(repr(sapo.Config(HUGGINGFACE_ACCESS_TOKEN=secret)))
    assert shown[0].count("Bearer ***") >= 3
    assert "MODEL_NAME: it contains the token of HUGGINGFACE_ACCESS_TOKEN" in shown[0]
    assert not any("0123456789" in text or "SECRET" in text for text in shown)
