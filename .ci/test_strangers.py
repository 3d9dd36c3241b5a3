"""Proofs of X1 to X4, and of L3 and L4 as far as they concern strangers who can write to the
folder. The examples that hypothesis draws are the same in every run."""

import contextlib
import functools
import io
import json
import os
import pickle
import resource
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import coordinator
import drive_store
import grpo
import sapo
from drive_store import DriveStore, RetryingStore
from test_sapo import at_call, contents, group_by_hand, put
from test_store import SMALL, read_log, run

OLD_SESSION = "1000000000000-00000000"  # of the year 2001
SHORT = {"WARM_START_STEPS": 8, "CHECKPOINT_INTERVAL": 1, "CHECKPOINT_KEEP": 9, "MAX_ROUNDS": 4}
REPEATABLE = dict(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@contextlib.contextmanager
def time_limit(seconds=30):
    """Fail the test if the block takes longer. (A TimeoutError would be an OSError, which the
    program retries.)"""
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"held up for {seconds} s"))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def is_safe_to_print(text: str) -> bool:
    """Whether it holds no control characters, no endless lines and no traceback."""
    is_printable = all(char.isprintable() or char == "\n" for char in text)
    is_short = max(len(line) for line in text.split("\n")) < 2000
    return is_printable and is_short and "Traceback" not in text


def settings_by_hand(drive, **more) -> sapo.Config:
    """The Config of a node n that joins or begins the experiment y."""
    environ = {**SMALL, **SHORT, "GDRIVE_PATH": drive, "EXPERIMENT_NAME": "y", **more}
    env, _ = sapo.read_environment({name: str(value) for name, value in environ.items()})
    return sapo.resolve_config(env, {}, [])


def store_with_peers(drive) -> DriveStore:
    """The experiment y with what an honest peer q and a hostile peer p left in it long ago."""
    store = DriveStore(drive, "y")
    store.create(sapo.saved_settings(settings_by_hand(drive, NODE_ID="q", LOCAL_NODES=1)))
    for name in ("p", "q", "coordinator"):
        put(store, f"board/session.{name}.{OLD_SESSION}")
        heartbeat = {"session": OLD_SESSION, "time": 1.0, "round": 0, "state": "running"}
        put(store, f"nodes/{name}/heartbeat.json", heartbeat)

    for name in "pq":
        store.make_dir(f"nodes/{name}/rollouts")
        store.make_dir(f"nodes/{name}/rewards")
        for t in range(3):
            groups = {str(i): group_by_hand(10 * t + i + ord(name)) for i in range(3)}
            store.publish("rollouts", name, t, 0, {"format": 1, "rollouts": groups})
            store.publish("rewards", name, t, 0, {"reward": 0.5})
    return store


def outcome(store) -> tuple:
    """What the nodes earned and learned: their rewards, and their checkpoints' bytes (weights,
    optimizer, total rewards and external groups used)."""
    rewards = []
    for path in sorted(store.dir.glob("nodes/n_?/rewards/*.json")):
        row = json.loads(path.read_bytes())
        rewards.append((row["round"], row["node_id"], row["reward"]))

    checkpoints = {}
    for path in store.dir.glob("nodes/n_0/checkpoints/round_00000*"):
        checkpoints[path.name] = path.read_bytes()
    return rewards, checkpoints


def run_all_roles(drive, monkeypatch, **more) -> None:
    """Run a worker to its end, and then every other role. Nothing holds them up or ends them, and
    no stranger's text reaches the terminal raw."""
    monkeypatch.setattr(coordinator, "draw", lambda *_: b"a picture")
    screen = io.StringIO()
    with time_limit(), contextlib.redirect_stdout(screen):
        assert run(drive, **more) == 0
        for role in ("prepare", "coordinator", "validate", "monitor", "report"):
            assert run(drive, NODE_ROLE=role, **more) in (0, 1, 2)
    assert is_safe_to_print(screen.getvalue())


# -------- X2, X3: files of every kind in every place ----------------------------------------------

STAGES = [f"{kind}/round_{t:06d}.stage_0.json" for t in range(4) for kind in ("rollouts", "rewards")]  # fmt: skip
PEER_FILES = """nodes/p/heartbeat.json nodes/p/posting nodes/p/model nodes/junk board/junk
    board/open.p.000000.0 board/rollouts.p.000009.0 board/rewards.n_1.000009.0
    nodes/n_0/checkpoints/round_000999.safetensors nodes/n_0/.new-1 nodes/n_0/logs/.new-2""".split()
PEER_FILES += [f"nodes/p/{name}" for name in STAGES[:6]]
OWN_FILES = """nodes/n_0/heartbeat.json nodes/n_0/logs/system_info.json nodes/n_0/posting
    nodes/n_0/model/config.json nodes/n_0/model/model.safetensors
    nodes/coordinator/heartbeat.json nodes/coordinator/winners/round_000003.json
    /reports/y.png /reports/report_y.md /reports/report_y.json /warmstart/WARM.safetensors""".split()
OWN_FILES += [f"nodes/n_0/{name}" for name in STAGES]
OWN_LOGS = """nodes/n_0/logs/stdout.log nodes/n_0/logs/training_events.jsonl nodes/n_0/logs/metrics.jsonl
    nodes/coordinator/logs/stdout.log""".split()

BYTES = {
    "empty": b"", "torn": b'{"format": 1, "peer_id": "p', "no text": b"\xff\xfe\0" * 99, "no object": b"[1]",
    "deep": b'{"a": ' + b"[" * 4000 + b"]" * 4000 + b"}", "not finite": b'{"time": NaN, "reward": 1e999}',
    "digits": b'{"time": ' + b"9" * 100_000 + b"}", "commas": b'{"a": [' + b"[]," * 2_500_000 + b"1]}",
    "for the terminal": "\x1b]0;x\x07\u202e\r\n".encode() * 99,
    "odd types": b'{"time": 1' + b"0" * 400 + b', "session": ["x"], "round": "\\u001b[2J", "reward": true}',
}  # fmt: skip
MAKE = {  # kind -> a function that makes it at a path, perhaps as a link into the folder `outside`
    "link": lambda path, outside: path.symlink_to(outside / "n_0.json"),
    "second name": lambda path, outside: path.hardlink_to(outside / "n_0.json"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "dangling link": lambda path, outside: path.symlink_to(outside / "new"),
    "loop": lambda path, _: path.symlink_to(path),
    "/dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "FIFO": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: (path / "in").mkdir(parents=True),
    "terabytes": lambda path, _: path.touch() or os.truncate(path, 2**43),
}
for kind, data in BYTES.items():
    MAKE[kind] = lambda path, _, data=data: path.write_bytes(data)


@pytest.fixture
def outside(tmp_path):
    """A folder outside the shared one, with names that the program writes or deletes. Fails the
    test if anything in it is changed."""
    folder = tmp_path / "outside"

    def state():
        found = []
        for path in sorted(folder.rglob("*")):
            text = path.is_file() and path.read_text()
            found.append((path, path.lstat().st_mtime_ns, text))
        return found

    names = ["n_0", "heartbeat", ".new-1", "rollouts/.new-2", STAGES[0], Path(STAGES[0]).name]
    names += [f"n_0/{name}" for name in names] + [f"y/n_0/{names[-1]}"]
    for name in names:
        path = folder / f"{name.removesuffix('.json')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    before = state()
    yield folder
    assert state() == before


def plant(store, names, kind, outside) -> list[Path]:
    """Make something of this kind in all these places. Returns their full paths."""
    paths = []
    for name in names:
        path = store.root / name[1:] if name.startswith("/") else store.dir / name
        paths.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        MAKE[kind](path, outside)
    return paths


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory):
    """(the outcome of a run without p's rollouts and rewards, the name of its warm start)"""
    drive = tmp_path_factory.mktemp("honest_run")
    store = store_with_peers(drive)
    for path in store.dir.glob("nodes/p/r*/*.json"):
        path.unlink()
    assert run(drive, **SHORT) == 0
    return outcome(store), next((drive / "warmstart").glob("*.safetensors")).stem


@pytest.mark.parametrize("kind", MAKE)
def test_X2_X3_no_file_of_any_kind_changes_what_is_learned(
    honest_run, tmp_path, outside, monkeypatch, kind
):
    expected, warm_start = honest_run
    drive = tmp_path / "drive"
    store = store_with_peers(drive)

    # Files of this kind lie wherever a peer or the node itself writes. (A regular file in the place
    # of a log is a log, to which the node appends. A folder is in its way: it waits.)
    own_files = OWN_FILES + OWN_LOGS
    if kind in BYTES or kind in ("terabytes", "second name"):
        own_files = OWN_FILES
    elif kind == "folder":
        own_files = []
    plant(store, PEER_FILES, kind, outside)
    own_files = [name.replace("WARM", warm_start) for name in own_files]
    paths = plant(store, own_files, kind, outside)

    # They cost little memory and change nothing, and each one in the node's way makes room.
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_all_roles(drive, monkeypatch, **SHORT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < kilobytes + 500_000
    assert outcome(store) == expected
    for path in set(paths) - {store.dir / "nodes/n_0/posting"}:  # it was moved to the board
        status = path.lstat()
        assert stat.S_ISREG(status.st_mode) and status.st_nlink == 1, path
        assert status.st_size < 2**30, path

    # Each of p's files is named once, and counted each time it is read.
    events = read_log(store.dir, "n_0", "training_events")
    rejections = [row["text"] for row in events if row["event"] == "reject"]
    assert rejections
    assert len(rejections) == len({*rejections})
    assert {text[:3] for text in rejections} == {"p: "}
    metrics = read_log(store.dir, "n_0", "metrics")
    assert sum(row["rejected"] for row in metrics) >= 3


OTHER_FOLDERS = "nodes/p/rollouts nodes/p nodes/q/rewards nodes/q /reports".split()
OWN_FOLDERS = """board nodes /warmstart /archives /archives/y /archives/y/n_0 nodes/n_0
    nodes/n_0/rollouts nodes/n_0/rewards nodes/n_0/checkpoints nodes/n_0/logs""".split()


@pytest.mark.parametrize("folder", OTHER_FOLDERS + OWN_FOLDERS)
def test_X2_nothing_happens_below_a_folder_that_is_a_link(
    tmp_path, outside, monkeypatch, capsys, folder
):
    cleanup = dict(ROLLOUT_CLEANUP_ENABLED=True, ROLLOUT_KEEP_LAST_N_ROUNDS=1, ROLLOUT_MAX_AGE=0)
    monkeypatch.setattr(sapo.Signals, "sleep", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(coordinator, "draw", lambda *_: b"a picture")
    for kind in ("link to a folder", "dangling link"):
        store = store_with_peers(tmp_path / kind)
        plant(store, [folder], kind, outside)

        # Where only a peer's files or the pictures would be, the node goes on. Where a link is in
        # its own way, it waits.
        with time_limit():
            status = run(store.root, **SHORT, **cleanup, ROLLOUT_ARCHIVE_OLD=True)
        is_waiting = "waiting for the shared folder" in capsys.readouterr().out
        expected = (130, True) if folder in OWN_FOLDERS else (0, False)
        assert (status, is_waiting) == expected


def test_X2_X3_a_report_leaves_out_what_it_cannot_read_and_says_so_if_it_cannot_be_written(
    tmp_path, capsys
):
    # Beside an honest experiment one whose folder is a link, and one whose board is a file.
    store = store_with_peers(tmp_path / "drive")
    store.move_marker("open", "p", 2)
    shutil.copytree(store.dir, tmp_path / "outside")
    store.dir.with_name("linked").symlink_to(tmp_path / "outside")
    put(store, "../broken/board", b"")
    put(store, "../broken/config.json", {"layout": drive_store.LAYOUT})

    assert run(store.root, "*", NODE_ROLE="report") == 0
    output = capsys.readouterr().out
    assert is_safe_to_print(output)
    assert "experiments/linked cannot be read" in output
    assert "experiments/broken cannot be read" in output
    report = json.loads((store.root / "reports/report_all.json").read_text())
    assert [row["experiments"] for row in report] == [["y"]]

    shutil.rmtree(store.root / "reports")
    (store.root / "reports").symlink_to(tmp_path / "outside")
    before = contents(tmp_path / "outside")
    assert run(store.root, "*", NODE_ROLE="report") == 0
    assert "the report cannot be written" in capsys.readouterr().out
    assert contents(tmp_path / "outside") == before


def test_X1_X3_texts_and_numbers_of_strangers_neither_end_nor_hold_up_nor_deceive_a_reader(
    tmp_path, capsys
):
    assert run(tmp_path, **SHORT) == 0
    capsys.readouterr()
    store = DriveStore(tmp_path, "y")
    store.create_node("p")
    store.register(["p"], {})

    # Rewards of forty rounds with absurd metrics and with names of tasks that do not exist, one of
    # which is a formula to the library that draws the pictures.
    absurd = [0, -1, 1e299, 10**299, -1e299, 1e-300]
    for t in range(40):
        metrics = {}
        for name in ("groups", "informative_local", "completions", "held_out"):
            metrics[name] = absurd[(t + len(name)) % 6]
        metrics |= {f"reward_{t}_{i}": 0.5 for i in range(55)}
        metrics |= {"held_out": -9, "reward_$\\frac{$": 0.5, "reward": 0.5}
        store.publish("rewards", "p", t, 0, metrics)

    # A group whose texts would control the terminal.
    evil = "\x1b]0;x\x07\u202e\r"
    completions = [{"response": evil, "reward": 1e299, "finished": True}] * 4
    group = dict(task=evil, seed=1, prompt=evil, answer=evil, completions=completions)
    store.publish("rollouts", "p", 39, 0, {"format": 1, "rollouts": {"0": group}})
    store.move_marker("open", "p", 39)

    with time_limit(20):
        status = [run(tmp_path, NODE_ROLE=role) for role in ("monitor", "report", "validate")]
        assert status == [0, 0, 1]
        assert (tmp_path / "reports/report_y.png").stat().st_size > 9999
        assert coordinator.plot_run(coordinator.read_experiment(store))
    assert is_safe_to_print(capsys.readouterr().out)


def test_X2_an_experiments_folder_that_is_a_link_is_refused(tmp_path, capsys):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").write_text("x")
    before = contents(tmp_path / "outside")
    drive = tmp_path / "drive"
    (drive / "experiments").mkdir(parents=True)
    (drive / "experiments/y").symlink_to(tmp_path / "outside")

    assert run(drive, MAX_ROUNDS=1) == 2
    assert run(drive, NODE_ROLE="coordinator") == 2
    assert capsys.readouterr().out.count("y: a link; take another EXPERIMENT_NAME") == 2
    assert contents(tmp_path / "outside") == before


def test_X3_thousands_of_unknown_tasks_in_config_json_are_refused_in_a_few_lines(tmp_path, capsys):
    tasks = ",".join(f"nonsense_{i}" for i in range(4000))
    put(DriveStore(tmp_path, "y"), "config.json", {"layout": drive_store.LAYOUT, "TASKS": tasks})
    with time_limit(5):
        assert run(tmp_path, TASKS=None) == 2
    output = capsys.readouterr().out
    assert "nonsense_0" in output
    assert output.count("\n") < 20


# -------- X3: damaged JSON ------------------------------------------------------------------------

RAW = {  # what JSON text may hold and json.dumps does not write
    "@huge@": "9" * 4000, "@1e400@": "1e400", "@nan@": "NaN", "@deep@": "[" * 900 + "]" * 900,
    "@half@": '"\\ud800"', "@text@": '"' + "x" * 40_000 + '"', "@escape@": '"\\u001b[2J\\u0007\\n\\u202e"',
}  # fmt: skip
ODD = [
    None, True, 0, 1, -1, 0.5, 1e300, 2**53, 10**400, "", "1", "p", " auto", "tiny", "../x", "x" * 300,
]  # fmt: skip


def lists_or_dictionaries(children):
    keys = st.text(max_size=3)
    return st.lists(children, max_size=3) | st.dictionaries(keys, children, max_size=3)


odd_values = st.recursive(
    st.sampled_from([*RAW, *ODD]) | st.text(max_size=6), lists_or_dictionaries
)


def encode(value) -> bytes:
    text = json.dumps(value)
    for word, raw in RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text.encode()


def paths_in(tree, path=()):
    """The path of every part of a JSON value: () for the whole, ("a", 0) for tree["a"][0]."""
    yield path
    children = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list):
        children = enumerate(tree)
    for key, child in children:
        yield from paths_in(child, (*path, key))


@st.composite
def damaged(draw, valid: dict) -> bytes:
    """A JSON file of which one part is changed to anything or deleted, or with damaged bytes."""
    kind_of_damage = draw(st.integers(0, 5))
    if kind_of_damage == 0:
        data = encode(valid)
        start = draw(st.integers(0, len(data)))
        return data[:start] + draw(st.binary(max_size=4)) + data[start + 1 :]

    tree = json.loads(json.dumps(valid))
    *parents, last = draw(st.sampled_from([path or ("no key",) for path in paths_in(valid)]))
    part = tree
    for key in parents:
        part = part[key]
    part[last] = draw(odd_values)
    if kind_of_damage == 1:
        del part[last]
    return encode(tree)


FILES_OF_PEERS_THAT_ARE_READ = f"""config.json nodes/coordinator/heartbeat.json nodes/p/heartbeat.json
    nodes/p/{STAGES[0]} nodes/p/{STAGES[1]}""".split()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the folder of a finished experiment with p's files, {name: contents of such a file})"""
    drive = tmp_path_factory.mktemp("finished")
    store = store_with_peers(drive)
    assert run(drive, **SHORT) == 0
    valid = {}
    for name in FILES_OF_PEERS_THAT_ARE_READ:
        valid[name] = json.loads((store.dir / name).read_bytes())
    return drive, valid


@settings(max_examples=200, **REPEATABLE)
@given(data=st.data(), name=st.sampled_from(FILES_OF_PEERS_THAT_ARE_READ))
def test_X3_every_reader_copes_with_a_damaged_file(finished, data, name):
    drive, valid = finished
    store = DriveStore(drive, "y")
    path = store.dir / name
    path.write_bytes(data.draw(damaged(valid[name])))
    screen = io.StringIO()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            time_limit(),
            contextlib.redirect_stdout(screen),
        ):
            patch.setattr(coordinator, "draw", lambda *_: None)
            for role in ("monitor", "validate", "report"):
                status = run(drive, NODE_ROLE=role, MAX_ROUNDS=None, LOCAL_NODES=None)
                assert status in (0, 1, 2)
        assert is_safe_to_print(screen.getvalue())
        assert sapo.get_experiment_status(drive, "y")["current_round"] == 3
        row = store.read_reward("p", 0, 0) or {"reward": None}
        assert row["reward"] is None or 0 <= row["reward"] <= 1
        assert store.node_status("p", OLD_SESSION, 300.0) in ("alive", "exited", "dead")
    finally:
        path.write_text(json.dumps(valid[name]))


@settings(max_examples=400, **REPEATABLE)
@given(data=st.data())
def test_X3_with_any_config_json_a_start_has_sound_settings_or_ends_with_a_sentence(finished, data):
    _, valid = finished
    notes = []
    env = dict(GDRIVE_PATH="d", NODE_ID="late", NODE_ROLE="worker", DEVICE="cpu")
    try:
        saved = drive_store.parse_json(data.draw(damaged(valid["config.json"])))
    except drive_store.InvalidFileError:
        return

    try:
        config = sapo.resolve_config(env, saved, notes)
    except sapo.ConfigError as error:
        notes = [str(error)]
        assert notes[0]
    else:
        assert {*config.TASKS.split(",")} <= grpo.TASK_TABLE.keys()
        assert config.MODEL_NAME == "tiny"
        for name, row in sapo.TABLE.items():
            if row.metadata["scope"] != "node":
                value = getattr(config, name)
                assert type(value) is row.type
                assert sapo.parse_value(row, str(value)) == value
    assert is_safe_to_print("\n".join(notes))


# -------- X1, X3: tensors -------------------------------------------------------------------------

TENSORS = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
SAFETENSORS = safetensors.torch.save(TENSORS, {"about": "x"})
NUMBERS = SAFETENSORS[-40:]
HEADER = json.loads(SAFETENSORS[8 : 8 + int.from_bytes(SAFETENSORS[:8], "little")])


@settings(max_examples=300, **REPEATABLE)
@given(
    st.just(encode(HEADER)) | damaged(HEADER), st.sampled_from([1, 1, 1, 2**20, 2**50]), st.data()
)
def test_X3_a_strangers_tensors_fit_and_are_finite_or_are_refused(
    tmp_path_factory, header, times, data
):
    """times: the file claims that its header is this many times as long as it is."""
    store = DriveStore(tmp_path_factory.getbasetemp(), "y")
    numbers = [NUMBERS, b"\xff" * 40, NUMBERS[1:], NUMBERS + b"x"]
    length = min(len(header) * times, 2**64 - 1)
    prefix = length.to_bytes(8, "little")
    put(store, "weights", prefix + header + data.draw(st.sampled_from(numbers)))

    try:
        saved = store.load_file("weights", functools.partial(grpo.load_tensors, ours=TENSORS))
    except drive_store.InvalidFileError:
        return
    for name, tensor in TENSORS.items():
        assert (saved[name].shape, saved[name].dtype) == (tensor.shape, tensor.dtype)
        assert saved[name].isfinite().all()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("PWNED",)


@pytest.mark.parametrize("save", [pickle.dump, torch.save])
def test_X1_a_pickle_in_the_place_of_weights_is_never_unpickled(
    tmp_path, monkeypatch, capsys, save
):
    monkeypatch.chdir(tmp_path)
    assert run("d", **SHORT) == 0
    [warm_start] = Path("d").glob("warmstart/*.safetensors")
    sound = warm_start.read_bytes()
    for path in (warm_start, *Path("d").glob("experiments/y/nodes/*/checkpoints/*")):
        with path.open("wb") as file:
            save(Evil(), file)

    # The warm start is made again. The checkpoints cannot be, so the start ends with a sentence.
    assert run("d", **SHORT | {"MAX_ROUNDS": 7}) == 2
    assert "cannot be used" in capsys.readouterr().out
    assert warm_start.read_bytes() == sound
    assert not Path("PWNED").exists()


# -------- X1, L3, L4, X3: a peer's groups ---------------------------------------------------------


def run_by_hand(drive, **more):
    """(a Run of one node n beside the peers' files, its node). run.log.texts is its log."""
    config = settings_by_hand(drive, LOCAL_NODES=1, **more)
    log = SimpleNamespace(texts=[])
    log.event = lambda kind, text, **_: log.texts.append(text)
    signals = SimpleNamespace(requested=0)
    store = RetryingStore(DriveStore(drive, "y"), log.event, signals)
    model, codec = grpo.load_model(config, config.tasks)
    node = sapo.Node("n", model, None)
    return sapo.Run(config, store, codec, [node], log, signals, max_rows=64), node


PAYLOADS = [
    "__import__('os').system('touch PWNED')", "open('PWNED','w')", "().__class__.__base__.__subclasses__()",
    "{{7*7}}", "${jndi:ldap://x}", "[x for x in [1]]", "lambda: 1", "$(touch PWNED)", "`id`", "%n%s",
    "exec('1')", "!!python/object/apply:os.system ['id']", "cos\nsystem\n(S'id'\ntR.", "9**9**9",
]  # fmt: skip
FORMS = "{}|{} {}|[[{}]]|({})|{}+{}|{}∧{}|'{}'|\\frac{{{}}}{{{}}}|print({})|<answer>{}".split("|")
WATCHED_EVENTS = (
    "exec compile open os.system subprocess.Popen os.exec os.fork socket.connect import".split()
)
WATCHED = []  # empty: nothing is watched. Else None, and then the events since


def audit(event, args):
    if WATCHED and event in WATCHED_EVENTS:
        WATCHED.append((event, str(args)[:99]))


sys.addaudithook(audit)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """(a Run of all tasks, two questions of each). All imports are made and caches filled."""
    drive = tmp_path_factory.mktemp("verifier")
    every_task = ",".join(grpo.TASK_TABLE)
    verifying_run, _ = run_by_hand(drive, TASKS=every_task, MAX_NEW_TOKENS=64)
    questions = []
    for task in grpo.TASK_TABLE:
        for seed in (3, 99):
            question = grpo.make_question(task, seed)
            questions.append(question)
            verifying_run.codec.encode_prompt(question)
            for text in (question.answer, "1", "x ∧ y", "1/2", "[[1]]"):
                grpo.compute_reward(question, f"<answer>{text}</answer>")
    return verifying_run, questions


@settings(max_examples=500, **REPEATABLE)
@given(data=st.data(), form=st.sampled_from(FORMS), kind=st.sampled_from(["exact", "verifier"]))
def test_X1_L3_no_completion_of_a_stranger_is_evaluated_or_opens_anything(
    verifier, data, form, kind
):
    # Two completions, made of payloads, of the right answer and of random text.
    verifying_run, questions = verifier
    question = data.draw(st.sampled_from(questions))
    piece = st.sampled_from([*PAYLOADS, question.answer]) | st.text(max_size=10)
    text = form.format(*data.draw(st.tuples(piece, piece)))
    responses = [f"<answer>{text}</answer>", text + "x"]
    group = {"task": question.task, "seed": question.seed, "prompt": question.text}
    group["completions"] = [{"response": text, "finished": True} for text in responses]
    group["key"] = (2, 0, "p", 0)

    # Verification and scoring make no watched call.
    WATCHED[:] = [None]
    try:
        with time_limit(5):
            try:
                verified = sapo.verify(verifying_run, group)
            except sapo.Rejected as rejection:
                verified = rejection
            rewards = [grpo.compute_reward(question, response, kind) for response in responses]
        assert WATCHED == [None]
    finally:
        WATCHED.clear()

    assert all(0 <= reward <= 1 for reward in rewards)
    if isinstance(verified, sapo.Rejected):
        assert is_safe_to_print(str(verified))
    else:
        assert len(verified.texts) == len(verified.rewards) == 2


def test_L3_a_verifier_alone_would_evaluate_an_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    question = grpo.make_question("binary_matrix", 3)
    WATCHED[:] = [None]
    question.dataset.score_answer(PAYLOADS[0], question.entry)
    seen = {event for event, _ in WATCHED[1:]}
    WATCHED.clear()
    assert seen >= {"compile", "exec", "os.system"}
    assert Path("PWNED").exists()


@pytest.mark.parametrize("task, seed", [
    ("basic_arithmetic", 721121905971561), ("decimal_arithmetic", 1488473454406226),
])  # fmt: skip
def test_L3_a_seed_at_which_a_generator_fails_or_computes_for_minutes_costs_nobody_anything(
    tmp_path, task, seed
):
    verifying_run, _ = run_by_hand(tmp_path, TASKS=f"small_products,{task}")
    group = group_by_hand(1, key=(2, 0, "p", 0)) | {"task": task, "seed": seed}
    with time_limit(10):
        with pytest.raises(sapo.Rejected, match="its question cannot be made"):
            sapo.verify(verifying_run, group)
        assert grpo.first_valid_question(task, seed).seed == seed + 1


def test_X3_verification_of_a_peers_groups_takes_a_bounded_time_whatever_the_others_need(
    tmp_path, monkeypatch
):
    store_with_peers(tmp_path)
    monkeypatch.setattr(sapo, "MAX_VERIFY_SECONDS_PER_PEER", 0.0)
    verifying_run, node = run_by_hand(tmp_path, ROLLOUT_MAX_AGE=0)
    assert sapo.sample_external(verifying_run, node, 2, 0) == []
    assert node.metrics["rejected"] == 4
    assert verifying_run.log.texts == ["p: too slow to verify", "q: too slow to verify"]


# -------- X4: the access token --------------------------------------------------------------------


def test_X4_the_token_reaches_no_file_no_log_and_no_error(tmp_path, monkeypatch, capfd):
    drive = tmp_path / "drive"
    secret = "hf_0123456789abcdefSECRET"

    def fail(*args, token=secret, **kwargs):
        raise ValueError(f"401 Unauthorized: Bearer {token}")

    # A run whose push to the Hub fails.
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    environ = dict(HUGGINGFACE_ACCESS_TOKEN=secret, **SHORT)
    assert run(drive, **environ) == 0
    log = drive / "experiments/y/nodes/n_0/logs/stdout.log"
    assert "push failed (ValueError)" in log.read_text()

    # Starts with something wrong, and a token in a variable whose name is mistyped.
    for more, status in (
        ({"MODEL_NAME": "no/such model"}, 2), ({"SEED": "x"}, 2), ({"SEED": 7}, 2), ({"NODE_ID": "../n"}, 2),
        ({"NODE_ROLE": "monitor"}, 0), ({"HUGGINGFACE_ACCES_TOKEN": secret}, 0),
    ):  # fmt: skip
        assert run(drive, **environ | {"MAX_ROUNDS": 5} | more) == status, more

    # A mistake in the program, whose traceback is logged.
    at_call(monkeypatch, "publish_groups", 1, fail)
    assert run(drive, **environ | {"MAX_ROUNDS": 6}) == 1
    assert "Bearer ***" in log.read_text()
    shown = [repr(sapo.Config(HUGGINGFACE_ACCESS_TOKEN=secret))]

    # An error whose text holds the token. It is shown for each checkpoint and at the end.
    monkeypatch.setattr(grpo, "load_tensors", fail)
    assert run(drive, **environ | {"MAX_ROUNDS": 7}) == 2

    # A reader, in a process of its own.
    variables = os.environ | {sapo.SECRET: secret, "NODE_ROLE": "report", "GDRIVE_PATH": f"{drive}"}
    command = [sys.executable, sapo.__file__]
    shown.append(str(subprocess.run(command, env=variables, capture_output=True, text=True)))

    shown += capfd.readouterr()
    shown += [str(contents(drive)), str(sorted(drive.rglob("*")))]
    assert shown[2].count("Bearer ***") >= 3
    assert not any("0123456789" in text or "SECRET" in text for text in shown)


def test_X4_a_setting_that_contains_the_token_is_refused_because_settings_are_written(
    tmp_path, capsys
):
    secret = "hf_0123456789abcdefSECRET"
    settings = {"HUGGINGFACE_ACCESS_TOKEN": secret, "MODEL_NAME": f"/models/{secret}/model"}
    assert run(tmp_path / "drive", **settings) == 2
    output = capsys.readouterr().out
    assert "MODEL_NAME: it contains the token of HUGGINGFACE_ACCESS_TOKEN" in output
    assert secret not in output
    assert not (tmp_path / "drive").exists()
