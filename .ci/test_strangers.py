"""Strangers who can write to the folder: X1-X4, L3 and L4 as far as they are concerned. Examples repeat."""

import contextlib
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import coordinator
import sapo
from coordinator import Patient
from drive_store import BadFile, DriveStore, parse_json
from grpo import HELD_OUT_SEEDS, TASK_TABLE, load_model, load_tensors, lucky_question, make_question, score
from sapo import ConfigError, sample_external, settle, verify
from test_sapo import at_call, contents, group_by_hand, put
from test_store import SMALL, rows, run

SESSION = "1000000000000-00000000"  # of long ago
HERE = {"WARM_START_STEPS": 8, "CHECKPOINT_INTERVAL": 1, "CHECKPOINT_KEEP": 9, "MAX_ROUNDS": 4}
phases, checks = [Phase.explicit, Phase.generate], list(HealthCheck)
repeatable = dict(deadline=None, derandomize=True, database=None, phases=phases, suppress_health_check=checks)


@contextlib.contextmanager
def at_most(seconds=30):
    """Fails what is held up. (A TimeoutError would be caught by who waits for the folder.)"""
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"held up for {seconds} s"))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def peers_files(drive) -> DriveStore:
    """What an honest peer q and a hostile one p left in the experiment y long ago."""
    (store := DriveStore(drive, "y", "q")).create()
    for t, name in [(t, name) for t in range(3) for name in "pq"]:
        store.publish(t, 0, name, {}, {str(i): group_by_hand(10 * t + i + ord(name)) for i in range(3)})
        store.submit_reward(t, 0, name, {"reward": 0.5})
    for name in ("p", "q", "coordinator"):
        about = {"node_id": name, "session": SESSION, "time": 1.0, "round": 0, "state": "running"}
        put(store, f"peers/{name}.{SESSION}.json", about), put(store, f"heartbeats/{name}.json", about)
    return store


def outcome(base: Path) -> tuple:
    """What was earned and learned: own rewards, and weights, optimizer, totals and externals used."""
    rewards = [json.loads(path.read_bytes()) for path in sorted(base.glob("rewards/*/*/n_?.json"))]
    checkpoints = {path.parent.name: path.read_bytes() for path in base.glob("checkpoints/*/n.safetensors")}
    return [(row["round"], row["node_id"], row["reward"]) for row in rewards], checkpoints


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text) and max(map(len, text.split("\n"))) < 2000


def play_all_roles(drive, monkeypatch, **given) -> None:
    """A worker to its end, a coordinator, the readers: none is held up, ended, or prints strangers' text."""
    for name in ("draw", "draw_run"):
        monkeypatch.setattr(sapo, name, lambda *_: b"a picture")
    with at_most(), contextlib.redirect_stdout(screen := io.StringIO()):
        assert run(drive, **given) == 0
        for role in ("coordinator", "validate", "monitor", "report"):
            assert run(drive, NODE_ROLE=role, **given) in (0, 1, 2)
    assert is_plain(screen.getvalue())


ROUNDS = [f"{kind}/round_{t:06d}/stage_0/" for t in range(4) for kind in ("rollouts", "rewards")]
PEERS = (
    [f"{place}p.json" for place in ROUNDS[:6]]
    + f"""peers/p.{SESSION}.json peers/coordinator.{SESSION}.json
    heartbeats/p.json heartbeats/coordinator.json models/p state/rounds/round_000000.p.json junk""".split()
)
LOGS = "n/stdout.log n/training_events.jsonl n_0/metrics.jsonl coordinator/stdout.log".split()
OWN = (
    [f"{place}n_0.json" for place in ROUNDS]
    + """winners/round_000001.json models/n_0/config.json
    models/n_0/model.safetensors heartbeats/n_0.json state/current_state.json""".split()
)
OTHERS = """../../reports/report.md ../../reports/report.png ../../reports/y.png ../../archives tmp/n
    tmp/reader ../../tmp/n ../../warmstart/WARM.safetensors ../../warmstart/WARM.claim""".split()
BYTES = {
    "empty": b"", "torn": b'{"format": 1, "peer_id": "p', "no text": b"\xff\xfe\0" * 99, "no object": b"[1]",
    "deep": b'{"a": ' + b"[" * 4000 + b"]" * 4000 + b"}", "not finite": b'{"time": NaN, "reward": 1e999}',
    "digits": b'{"time": ' + b"9" * 100_000 + b"}", "commas": b'{"a": [' + b"[]," * 3_000_000 + b"1]}",
    "for the terminal": "\x1b]0;x\x07\u202e\r\n".encode() * 99,
    "odd types": b'{"time": 1' + b"0" * 400 + b', "session": ["x"], "round": "\\u001b[2J", "reward": true}',
}  # fmt: skip
KINDS = {
    "link": lambda path, outside: path.symlink_to(outside / "n_0.json"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "dangling link": lambda path, outside: path.symlink_to(outside / "new"),
    "loop": lambda path, _: path.symlink_to(path), "/dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "FIFO": lambda path, _: os.mkfifo(path), "folder": lambda path, _: (path / "in").mkdir(parents=True),
    "terabytes": lambda path, _: path.touch() or os.truncate(path, 2**43),
} | {kind: lambda path, _, data=data: path.write_bytes(data) for kind, data in BYTES.items()}  # fmt: skip


@pytest.fixture
def outside(tmp_path):
    """A folder that is nobody's business, with names that the program writes or deletes; it stays so."""

    def picture():
        found = sorted((tmp_path / "outside").rglob("*"))
        return [(path, path.lstat().st_mtime_ns, path.is_file() and path.read_text()) for path in found]

    for name in ("n_0", "n/n_0", "y/rollouts/round_000000/stage_0/n_0", "stage_0/n_0"):
        put(SimpleNamespace(base=tmp_path), f"outside/{name}.json")
    before = picture()
    yield tmp_path / "outside"
    assert picture() == before


def plant(base: Path, places, kind, outside) -> None:
    for path in [Path(os.path.normpath(base / place)) for place in places]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        KINDS[kind](path, outside)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """(What is learned where p's files are not there, the name of the warm start.)"""
    store = peers_files(drive := tmp_path_factory.mktemp("honest"))
    for path in store.base.glob("r*/*/*/p.json"):
        path.unlink()
    assert run(drive, **HERE) == 0
    return outcome(store.base), next((drive / "warmstart").glob("*.safetensors")).stem


@pytest.mark.parametrize("kind", KINDS)
def test_X2_X3_no_file_of_any_kind_changes_what_is_learned(honest, tmp_path, outside, monkeypatch, kind):
    store, (expected, warm) = peers_files(tmp_path / "drive"), honest
    own = OWN + ([] if kind in BYTES else [f"logs/{name}" for name in LOGS])  # else they are logs, and go on
    plant(store.base, [name.replace("WARM", warm) for name in PEERS + own + OTHERS], kind, outside)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    play_all_roles(tmp_path / "drive", monkeypatch, **HERE)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 500_000, "kilobytes"
    assert outcome(store.base) == expected and all(map(store.find, own)), "what lay in the way made room"
    said = [row["text"] for row in rows(store.base, "n/training_events.jsonl") if row["event"] == "reject"]
    assert said and len(said) == len({*said}) and {text[:3] for text in said} == {"p: "}, "named once"
    assert sum(row["rejected"] for row in rows(store.base, "n_0/metrics.jsonl")) >= 3, "counted each time"


@pytest.mark.parametrize("how", ["link to a folder", "dangling link", "empty"])
@pytest.mark.parametrize("folders", [  # that are links, or files, at the same time
    "peers heartbeats logs state rollouts rewards winners checkpoints models tmp ../../archives ../../reports"
    " ../../tmp ../../warmstart", "logs/n logs/n_0 state/rounds rollouts/round_000000 models/n_0 tmp/n"
    " rewards/round_000001 checkpoints/round_000001 ../../archives/y", "rollouts/round_000001/stage_0"
    " rewards/round_000000/stage_0 ../../archives/y/rollouts",
    "../../archives/y/rollouts/round_000000 ../../archives/y/rollouts/round_000001",
], ids=range(4))  # fmt: skip
def test_X2_nothing_happens_below_a_folder_that_is_a_link(tmp_path, outside, monkeypatch, folders, how):
    for archive in ("True", "False"):
        plant(tmp_path / f"{archive}/experiments/y", folders.split(), how, outside)
        given = HERE | dict(ROLLOUT_CLEANUP_ENABLED=True, ROLLOUT_KEEP_LAST_N_ROUNDS=1, ROLLOUT_MAX_AGE=0)
        play_all_roles(tmp_path / archive, monkeypatch, **given, ROLLOUT_ARCHIVE_OLD=archive)
        assert DriveStore(tmp_path / archive, "y").rounds("rollouts") == [3]


def test_X1_X3_texts_and_figures_of_strangers_end_hold_up_and_deceive_nobody_who_looks(tmp_path, capsys):
    assert run(tmp_path, **HERE) == 0 and capsys.readouterr()
    (store := DriveStore(tmp_path, "y", "p")).register(["p"], "worker", {})
    odd, evil = [0, -1, 1e299, 10**299, -1e299, 1e-300], "\x1b]0;x\x07\u202e\r"
    for t in range(40):
        names = ("groups", "informative_local", "completions", "held_out")
        figures = {name: odd[(t + len(name)) % 6] for name in names}
        figures |= {f"reward_{t}_{i}": 0.5 for i in range(55)} | {"reward": 0.5}
        store.submit_reward(t, 0, "p", figures)
    drawn = [{"response": evil, "reward": 1e299, "finished": True}] * 4
    store.publish(39, 0, "p", {}, {"0": dict(task=evil, seed=1, prompt=evil, answer=evil, completions=drawn)})
    store.open_round(39, "p")
    with at_most(20):
        assert [run(tmp_path, NODE_ROLE=role) for role in ("monitor", "report", "validate")] == [0, 0, 1]
        assert coordinator.draw_run(coordinator.reward_rows(store), "y") and is_plain(capsys.readouterr().out)


RAW = {
    "@huge@": "9" * 4000, "@1e400@": "1e400", "@nan@": "NaN", "@deep@": "[" * 900 + "]" * 900,
    "@half@": '"\\ud800"', "@text@": '"' + "x" * 40_000 + '"', "@escape@": '"\\u001b[2J\\u0007\\n\\u202e"',
}  # fmt: skip
ODD = [None, True, 0, 1, -1, 0.5, 1e300, 2**53, 10**400, "", "1", "p", " auto", "tiny", "../x", "x" * 300]
scalars, short = st.sampled_from([*RAW, *ODD]) | st.text(max_size=6), dict(max_size=3)
values = st.recursive(scalars, lambda x: st.lists(x, **short) | st.dictionaries(st.text(**short), x, **short))


def encode(value) -> bytes:
    text = json.dumps(value)
    for word, raw in RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text.encode()


def paths_in(tree, path=()):
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from paths_in(child, (*path, key))


@st.composite
def mutants(draw, valid: dict) -> bytes:
    """A JSON file with one part changed to anything or deleted, or with damaged bytes."""
    tree, how = json.loads(json.dumps(valid)), draw(st.integers(0, 5))
    if how == 0:
        data, at = encode(valid), draw(st.integers(0, len(encode(valid))))
        return data[:at] + draw(st.binary(max_size=4)) + data[at + 1 :]
    *above, last = draw(st.sampled_from([path or ("no key",) for path in paths_in(valid)]))
    place = tree
    for key in above:
        place = place[key]
    place[last] = draw(values)
    if how == 1:
        del place[last]
    return encode(tree)


READ = f"""config.json {PEERS[0]} {PEERS[1]} peers/p.{SESSION}.json heartbeats/p.json
    heartbeats/coordinator.json ../../warmstart/0.claim""".split()


@pytest.fixture(scope="module")
def readable(tmp_path_factory):
    """A finished experiment with files of p, and what is in those that are read."""
    store = peers_files(drive := tmp_path_factory.mktemp("readable"))
    assert run(drive, **HERE) == 0
    put(store, "../../warmstart/0.claim", {"time": 1.0, "progress": "1/8"})
    return drive, {name: json.loads((store.base / name).read_bytes()) for name in READ}


@settings(max_examples=200, **repeatable)
@given(data=st.data(), name=st.sampled_from(READ))
def test_X3_no_reader_trips_over_a_damaged_file(readable, data, name):
    drive, valid = readable
    path, store, screen = drive / "experiments/y" / name, DriveStore(drive, "y"), io.StringIO()
    path.write_bytes(data.draw(mutants(valid[name])))
    try:
        with pytest.MonkeyPatch.context() as patch, at_most(), contextlib.redirect_stdout(screen):
            patch.setattr(sapo, "draw", lambda *_: None)
            for role in ("monitor", "validate", "report"):
                assert run(drive, NODE_ROLE=role, MAX_ROUNDS=None, LOCAL_NODES=None) in (0, 1, 2)
        assert sapo.get_experiment_status(drive, "y")["current_round"] == 3 and is_plain(screen.getvalue())
        assert all(0 <= row["reward"] <= 1 for row in store.rewards(0, ["p"]))
        assert store.life("p", SESSION, 300.0) in ("live", "left", "dead")
    finally:
        path.write_text(json.dumps(valid[name]))


@settings(max_examples=400, **repeatable)
@given(data=st.data())
def test_X3_whatever_config_json_says_a_start_has_sound_settings_or_a_sentence(readable, data):
    notes, ours = [], dict(GDRIVE_PATH="d", NODE_ID="late", EXPERIMENT_NAME="y", DEVICE="cpu")
    with contextlib.suppress(BadFile):
        there = parse_json(data.draw(mutants(readable[1]["config.json"])))
        try:
            config = settle(ours, there, notes)
        except ConfigError as error:
            assert (notes := [str(error)])[0]
        else:
            assert {*config.TASKS.split(",")} <= TASK_TABLE.keys() and config.MODEL_NAME == "tiny"
            for spec in [f for f in fields(config) if f.name in (*sapo.OF_SWARM, *sapo.OF_MODEL)]:
                value = getattr(config, spec.name)
                assert type(value) is spec.type and sapo.parse_value(str(value), spec) == value
        assert is_plain("\n".join(notes))


TENSORS = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
WEIGHTS = safetensors.torch.save(TENSORS, {"about": "x"})
HEADER = json.loads(WEIGHTS[8 : 8 + int.from_bytes(WEIGHTS[:8], "little")])


@settings(max_examples=300, **repeatable)
@given(st.just(encode(HEADER)) | mutants(HEADER), st.sampled_from([1, 1, 1, 2**20, 2**50]), st.data())
def test_X3_tensors_of_a_stranger_fit_and_are_finite_or_there_are_none(tmp_path_factory, header, times, data):
    path = tmp_path_factory.getbasetemp() / "weights"
    numbers = data.draw(st.sampled_from([WEIGHTS[-40:], b"\xff" * 40, WEIGHTS[-39:], WEIGHTS[-40:] + b"x"]))
    path.write_bytes((len(header) * times).to_bytes(8, "little") + header + numbers)
    try:
        saved = load_tensors(path, TENSORS)
    except Exception:  # as who calls it expects
        return
    for name, tensor in TENSORS.items():
        assert (saved[name].shape, saved[name].dtype) == (tensor.shape, tensor.dtype)
        assert saved[name].isfinite().all()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("PWNED",)


@pytest.mark.parametrize("save", [pickle.dump, torch.save])
def test_X1_a_pickle_in_the_place_of_weights_is_never_unpickled(tmp_path, monkeypatch, capsys, save):
    monkeypatch.chdir(tmp_path)
    assert run("d", **HERE) == 0
    [warm] = Path("d").glob("warmstart/*.safetensors")
    sound = warm.read_bytes()
    for path in (warm, *Path("d").glob("experiments/y/checkpoints/*/*")):
        save(Evil(), path.open("wb"))
    assert run("d", **HERE | {"MAX_ROUNDS": 7}) == 2 and "cannot be used" in capsys.readouterr().out
    assert warm.read_bytes() == sound and not Path("PWNED").exists(), "it was made again"


def reader(drive, **environ):
    """A run and its node n in round 2 beside the peers' files; its log is a list."""
    given = {**SMALL, "LOCAL_NODES": 1, "GDRIVE_PATH": drive, "EXPERIMENT_NAME": "y", **environ}
    config = settle(sapo.read_environment({name: str(value) for name, value in given.items()})[0], {}, [])
    log, stop, tasks = SimpleNamespace(said=[]), SimpleNamespace(pressed=0), config.TASKS.split(",")
    log.event = lambda kind, text, **_: log.said.append(text)
    model, codec = load_model(config, tasks)
    node, store = sapo.Node("n", model, None), Patient(DriveStore(drive, "y", "n"), log.event, stop)
    return sapo.Run(config, store, codec, [node], log, stop, tasks, 64), node


PAYLOADS = [
    "__import__('os').system('touch PWNED')", "open('PWNED','w')", "().__class__.__base__.__subclasses__()",
    "{{7*7}}", "${jndi:ldap://x}", "[x for x in [1]]", "lambda: 1", "$(touch PWNED)", "`id`", "%n%s",
    "exec('1')", "!!python/object/apply:os.system ['id']", "cos\nsystem\n(S'id'\ntR.", "9**9**9",
]  # fmt: skip
FORMS = "{}|{} {}|[[{}]]|({})|{}+{}|{}∧{}|'{}'|\\frac{{{}}}{{{}}}|print({})|<answer>{}".split("|")
EVENTS = "exec compile open os.system subprocess.Popen os.exec os.fork socket.connect import".split()
WATCHED = []  # while texts of strangers are looked at: None, and what was done
sys.addaudithook(lambda event, args: WATCHED and event in EVENTS and WATCHED.append((event, str(args)[:99])))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """A reader of all tasks, and two questions of each; imports and caches are warm."""
    reading, _ = reader(tmp_path_factory.mktemp("scorer"), TASKS=",".join(TASK_TABLE), MAX_NEW_TOKENS=64)
    questions = [make_question(task, seed) for task in TASK_TABLE for seed in (3, 99)]
    for question in questions:
        for text in (question.answer, "1", "x ∧ y", "1/2", "[[1]]"):
            score(question, f"<answer>{text}</answer>"), reading.codec.prompt(question)
    return reading, questions


@settings(max_examples=500, **repeatable)
@given(data=st.data(), form=st.sampled_from(FORMS), kind=st.sampled_from(["exact", "verifier"]))
def test_X1_L3_no_completion_of_a_stranger_is_evaluated_or_opens_anything(scorer, data, form, kind):
    reading, questions = scorer
    question = data.draw(st.sampled_from(questions))
    piece = st.sampled_from([*PAYLOADS, question.answer]) | st.text(max_size=10)
    text = form.format(*data.draw(st.tuples(piece, piece)))
    completions = [{"response": said, "finished": True} for said in (f"<answer>{text}</answer>", text + "x")]
    group = {"task": question.task, "seed": question.seed, "prompt": question.text, "key": (2, 0, "p", 0)}
    WATCHED[:] = [None]
    try:
        with at_most(5):
            found = verify(reading, group | {"completions": completions})
            rewards = [score(question, each["response"], kind) for each in completions]
        assert WATCHED == [None] and all(0 <= reward <= 1 for reward in rewards)
    finally:
        WATCHED.clear()
    assert isinstance(found, str) or len(found.texts) == len(found.group.rewards) == 2


@pytest.mark.parametrize("changes, reason", [
    ({"seed": HELD_OUT_SEEDS.start + 5}, "held-out"), ({"prompt": "What is 1 + 1?"}, "prompt differs"),
    ({"task": "basic_arithmetic", "seed": 721121905971561}, "cannot be made"),
    ({"task": "decimal_arithmetic", "seed": 1488473454406226}, "cannot be made"),
    ({"completions": [{"response": "", "finished": False}] * 4}, "empty"),
])  # fmt: skip
def test_L3_L4_poisoned_seeds_held_out_and_rewritten_questions_are_refused_at_once(tmp_path, changes, reason):
    reading, _ = reader(tmp_path, TASKS="small_products,basic_arithmetic,decimal_arithmetic")
    with at_most(10):
        assert reason in verify(reading, (group := group_by_hand(1, key=(2, 0, "p", 0)) | changes))
        assert "made" not in reason or lucky_question(group["task"], group["seed"]).seed == group["seed"] + 1


def test_X3_a_peer_has_bounded_seconds_of_a_round_whatever_the_others_need(tmp_path, monkeypatch):
    peers_files(tmp_path), monkeypatch.setattr(sapo, "PEER_SECONDS", 0.0)
    reading, node = reader(tmp_path, ROLLOUT_MAX_AGE=0)
    assert sample_external(reading, node, 2, 0) == [] and node.figures["rejected"] == 4
    assert reading.log.said == ["p: too slow to verify", "q: too slow to verify"]


def test_X4_the_token_reaches_no_file_no_log_and_no_error(tmp_path, monkeypatch, capfd):
    drive, secret, shown = tmp_path / "drive", "hf_0123456789abcdefSECRET", []

    def fail(*args, token=secret, **kwargs):
        raise ValueError(f"401 Unauthorized: Bearer {token}")

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", fail)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    told = dict(HUGGINGFACE_ACCESS_TOKEN=secret, VERBOSE=True, **HERE)
    assert run(drive, **told) == 0
    assert "push failed" in (drive / "experiments/y/logs/n/stdout.log").read_text()
    for wrong, status in (
        ({"MODEL_NAME": "no/such model"}, 2), ({"SEED": "x"}, 2), ({"SEED": 7}, 2), ({"NODE_ID": "../n"}, 2),
        ({"NODE_ROLE": "monitor"}, 0), ({"HUGGINGFACE_ACCES_TOKEN": secret}, 0),
    ):  # fmt: skip
        assert run(drive, **told | {"MAX_ROUNDS": 5} | wrong) == status, wrong
    at_call(monkeypatch, "communicate", 1, lambda: 1 / 0)  # a mistake in the program
    with pytest.raises(ZeroDivisionError) as error:
        run(drive, **told | {"MAX_ROUNDS": 6})
    monkeypatch.setattr(sapo, "load_tensors", fail)  # told while it goes on, and at the end
    assert run(drive, **told | {"MAX_ROUNDS": 7}) == 2
    shown += [str(error.getrepr(style="native")), *(repr(e.locals.get("config")) for e in error.traceback)]
    environ = os.environ | {sapo.SECRET: secret, "NODE_ROLE": "report", "GDRIVE_PATH": f"{drive}"}
    done = subprocess.run([sys.executable, sapo.__file__], env=environ, capture_output=True, text=True)
    shown += [*capfd.readouterr(), str(done), str(contents(drive)), str(sorted(drive.rglob("*")))]
    assert len(shown) > 9 and not any("0123456789" in text or "SECRET" in text for text in shown)
