"""Property tests of the trust boundary: thousands of generated and damaged files thrown at every reader.

A stranger can write anything into the shared folder. Whatever it is: no reader raises, waits or fills the
memory, and what is refused is refused with a counted reason. Examples are derandomized: the gate repeats.
"""

import contextlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import unicodedata
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import coordinator
import pytest
import grpo
import sapo
import torch
from coordinator import COORDINATOR, Coordinator, Life, Swarm, experiment_status, is_known_dead
from coordinator import reward_rows, write_winners
from drive_store import (
    COUNTS,
    FIGURES,
    GROUP_SIZES,
    MAX_RESPONSE_CHARS,
    BadFile,
    DriveStore,
    StoreError,
    check_name,
)
from drive_store import check_rollouts, parse_json, stage_folder
from grpo import TASK_TABLE, load_weights, make_question, score
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_save
from sapo import ConfigError, Node, Rollout, Run, list_experiments, read_config, sample_external, verify
from test_sapo import TASKS, UNTRAINED, events_of, group_by_hand, put, tiny_codec
from test_sapo import swarm as swarm_of

SECONDS = 60  # for one look at everything: the machine may be busy, but nothing may wait for ever
SESSION = "1000000000000-00000000"
phases, checks = [Phase.explicit, Phase.generate], list(HealthCheck)
repeatable = dict(deadline=None, derandomize=True, database=None, phases=phases, suppress_health_check=checks)
many = settings(max_examples=100, **repeatable)
EXPERIMENT = "experiments/x/"
FILES = {  # kind -> path below the shared folder
    "config": EXPERIMENT + "config.json",
    "clock": EXPERIMENT + "state/rounds/round_000002.coordinator.json",
    "state": EXPERIMENT + "state/current_state.json",
    "registration": EXPERIMENT + f"peers/p.{SESSION}.json",
    "coordinator": EXPERIMENT + f"peers/coordinator.{SESSION}.json",
    "heartbeat": EXPERIMENT + "heartbeats/coordinator.json",
    "rollouts": EXPERIMENT + "rollouts/round_000002/stage_0/p.json",
    "reward": EXPERIMENT + "rewards/round_000001/stage_0/p.json",
    "own reward": EXPERIMENT + "rewards/round_000001/stage_0/n1.json",
    "winner": EXPERIMENT + "winners/round_000002.json",
    "metrics": EXPERIMENT + "logs/p/metrics.jsonl",
    "claim": "warmstart/0.claim",
}


# -------- A whole experiment, and everything that reads one -----------------------------------------------


def make_experiment(root) -> None:
    """n1 (the reader), p, q and a coordinator after three rounds; all of it valid."""
    store = DriveStore(root, "x", "n1")
    store.create()
    store.open_config({
        "SEED": 42, "TASKS": ",".join(TASKS), "REWARD": "exact", "MAX_ROUNDS": 3, "MAX_STAGES": 1,
        "LOCAL_NODES": 1, "MODEL_NAME": "tiny", "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2,
        "NUM_GENERATIONS": 4, "EXTERNAL_FILTER": True, "LOCAL_OVERSAMPLE": 1, "LEARNING_RATE": 3e-4,
        "ROLLOUT_CLEANUP_ENABLED": False,
    })  # fmt: skip
    for node in ("coordinator", "n1", "p", "q"):
        role = "coordinator" if node == "coordinator" else "worker"
        about = {"node_id": node, "role": role, "session": SESSION, "registered_at": time.time()}
        about |= {"model": "tiny", "host": "h", "boot_id": "b", "pid": 1, "pid_start": "1"}
        store.write_once(f"peers/{node}.{SESSION}.json", about)
        store.heartbeat(node, {"session": SESSION, "round": 2, "state": "running"})
    for t in range(3):
        store.open_round(t, "coordinator")
        for node in ("n1", "p", "q"):
            groups = {str(i): group_by_hand(100 * t + 10 * i + ord(node[0]), TASKS[i]) for i in range(2)}
            store.publish(t, 0, node, {"model": "tiny"}, groups)
            figures = {"reward": 0.25, "completions": 8, "local_groups": 2, "external_groups": 2}
            figures |= {"informative_groups": 1, "held_out": 0.5, "grad_norm": 1.0, "external_ages": [0, 1]}
            store.submit_reward(t, 0, node, {"session": SESSION, **figures})
            store.append(f"logs/{node}/metrics.jsonl", '{"round": 1}\n')
        write_winners(store, t)
    store.write("checkpoints/round_000002/n1.safetensors", b"{}")
    store.write("models/p/config.json", b"{}")
    claim = {"host": "h", "boot_id": None, "pid": 1, "pid_start": "1"}
    DriveStore(root, None, "n1").write_once(FILES["claim"], claim)
    for owner in (store, DriveStore(root, None, "n1")):
        owner.delete("tmp")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    make_experiment(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "draw", lambda *args: None)
        yield


@contextlib.contextmanager
def at_most(seconds=SECONDS):
    """Raise TimeoutError where something waits for ever, whatever it waits for."""

    def too_long(*_):
        raise TimeoutError(f"not done after {seconds} s")

    old = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


CODEC = tiny_codec()


def reading_run(root, **environ) -> Run:
    """What node n1's trainer holds at the start of round 2, its log a list, after one look at the folder."""
    environ = {"NUM_TRAIN_SAMPLES": "2", "NUM_TRANSPLANT_TREES": "4", "FETCH_TIMEOUT_SECONDS": "0"} | environ
    environ = {"MAX_NEW_TOKENS": str(CODEC.max_completion // 2)} | environ
    environ |= {
        "NODE_ID": "n1",
        "GDRIVE_PATH": str(root),
        "EXPERIMENT_NAME": "x",
        "MODEL_NAME": "tiny",
    }
    config, events = read_config(environ | {"TASKS": ",".join(TASKS)})[0], []
    log = SimpleNamespace(events=events, lines=deque())
    log.event = lambda kind, text, **_: events.append((kind, text))
    store, stop = DriveStore(root, "x", "n1"), SimpleNamespace(pressed=0, check=lambda: None)
    swarm = Swarm(store, {"n1": SESSION}, config, log.event, log.lines)
    swarm.round = 2
    swarm._look()  # as start() does; but without its thread, so that examples do not overlap
    swarm.leaderless_since = float("-inf")
    node = Node("n1", None, None)
    return Run(config, store, swarm, CODEC, [node], log, stop, TASKS, None, done=1)


def train_beside(root, **environ):
    """What a worker's round reads: the clock, the peers' rollouts, its own earlier reward -> (drawn, run)."""
    run = reading_run(root, **environ)
    [node] = run.nodes
    assert not run.swarm.alone and sapo.wait_for_clock(run, 2) == 2, "the clock is names, not contents"
    drawn, events = sample_external(run, node, 2, 0), run.log.events
    assert len(drawn) <= 4 and len({r.key for r in drawn}) == len(drawn) and node.figures["rejected"] >= 0
    assert (node.figures["rejected"] > 0) == any(kind == "reject" for kind, _ in events)
    assert all(0 <= row["reward"] <= 1 for t in range(3) for row in run.store.rewards(t, ["n1"]))
    return drawn, run


def look_at_everything(root) -> Counter:
    """Every function that reads the folder, once; returns what was refused. To raise is to fail."""
    store, shared = DriveStore(root, "x"), DriveStore(root, None)
    life, rejected = Life(store, 300.0), Counter()
    assert store.clock() == (2, {"coordinator"}) and store.last_rewarded() == 2
    experiment_status(store)
    json.dumps(reward_rows(store), allow_nan=False)
    for round_ in range(4):
        for node in store.nodes("rollouts", round_, 0):
            try:
                groups = store.fetch(round_, 0, node)
            except BadFile as error:
                rejected[str(error)] += 1
                continue
            for group in groups:
                assert set(group) == {"key", "task", "seed", "prompt", "completions"}
                assert len(group["completions"]) in GROUP_SIZES
                for completion in group["completions"]:
                    assert len(completion["response"]) <= MAX_RESPONSE_CHARS
                    assert type(completion["finished"]) is bool
        for node in store.nodes("rewards", round_, 0):
            assert all(0 <= row["reward"] <= 1 for row in store.rewards(round_, [node]))
    life.refresh()
    for node, session in store.sessions().items():
        store.registration(node, session), store.read_heartbeat(node), store.checkpoints(node)
        life.is_live(node), life.has_left(node), life.silence(node), life.about(node)
    assert list_experiments(root) == ["x"]
    play_all_roles(root, store)
    train_beside(root)
    with contextlib.suppress(BadFile):  # as load_warm_start looks at it
        assert is_known_dead(shared.read(FILES["claim"]) or {}) in (True, False)
    return rejected


def play_all_roles(root, store) -> None:
    """Those that only read, a coordinator's look at its last round, and a worker that joins."""
    environ = {"GDRIVE_PATH": str(root), "EXPERIMENT_NAME": "x", "NODE_ID": "r", "MODEL_NAME": "tiny"}
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        for role in ("validate", "monitor", "report"):
            assert sapo.main({**environ, "NODE_ROLE": role}) in (0, 1, 2)
    text = screen.getvalue()
    assert len(text) < 20_000 and all(c.isprintable() or c == "\n" for c in text), "it goes to a terminal"
    config, silent = read_config(environ)[0], SimpleNamespace(event=lambda *_: None, lines=deque())
    sapo.announce(config, store, lambda text: None)
    with contextlib.suppress(ConfigError, StoreError):
        sapo.join_experiment(config, store, lambda text: None, only_read=True)
    ours = DriveStore(root, "x", "coordinator")
    swarm = Swarm(ours, {"coordinator": SESSION}, config, silent.event, silent.lines)
    role = Coordinator(swarm, replace(config, MAX_ROUNDS=3), lambda text: None)
    with contextlib.suppress(OSError):  # winners/round_000002.json cannot be written: the Swarm tries again
        role.step()
    assert swarm.round == 2


# -------- Files that are no such files --------------------------------------------------------------------

DEEP = "[" * 970 + "]" * 970  # parses, but hardly
RAW = {  # what json.dumps cannot write, put in place of these words
    "@huge@": "9" * 5000, "@long@": "9" * 4000, "@1e400@": "1e400", "@-1e400@": "-1e400", "@nan@": "NaN", "@deep@": DEEP, "@deeper@": "[" * 5000,
    "@objects@": '{"a":' * 300 + "1" + "}" * 300, "@twice@": '{"a": 1, "a": 2}', "@surrogate@": '"\\ud800"', "@text@": '"' + "x" * 40_000 + '"',
    "@escape@": '"\\u001b[2J\\u0007\\n\\u202e"',
}  # fmt: skip
scalars = st.one_of(
    st.sampled_from([*RAW, *RAW]), st.none(), st.booleans(), st.sampled_from([0, 1, -1, 1.0, 2.0, 0.5, 1e300, -1e308, 2**53, 10**6, 10**18, 10**400, "", "1"]),
    st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["../../x", "/etc/passwd", "n1", "p", "running", "done", "coordinator", "\x1b[31m", "x" * 300]),
)  # fmt: skip
keys = st.one_of(
    st.sampled_from("round stage node_id reward timestamp rollouts format 0 1 00 time state".split()), st.text(max_size=5)
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=8,
)


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


def with_change(valid: bytes, path, value, action: str) -> bytes:
    """The valid JSON with one node set to `value`, deleted, or under another key."""
    tree = json.loads(valid)
    if not path:
        return encode(value)
    place = tree
    for key in path[:-1]:
        place = place[key]
    if action == "delete":
        del place[path[-1]]
    elif action == "move" and isinstance(place, dict):
        place[str(value)[:20]] = place.pop(path[-1])
    else:
        place[path[-1]] = value
    return encode(tree)


def mutants(valid: bytes):
    """One node of the JSON tree changed to any value, or the bytes damaged, or another file altogether."""
    paths = list(paths_in(json.loads(valid)))
    places, short = st.integers(0, len(valid)), st.binary(max_size=6)
    cut = st.tuples(places, places, short).map(lambda c: valid[: min(c[:2])] + c[2] + valid[max(c[:2]) :])
    flip = st.tuples(places, st.sampled_from(list(b'{}[],:"\\-0e.\n\0\xff\x80'))).map(
        lambda f: valid[: f[0]] + bytes([f[1]]) + valid[f[0] + 1 :]
    )
    actions = st.sampled_from(["set"] * 4 + ["delete", "move"])
    changed = st.builds(with_change, st.just(valid), st.sampled_from(paths), values, actions)
    return st.one_of(changed, changed, changed, cut, flip, values.map(encode), st.binary(max_size=40))


def near_misses(valid: bytes):
    """Every field of a small file in turn set to values that are nearly right, or huge, or for a terminal."""
    tree = json.loads(valid)
    for path in paths_in(tree):
        value = tree
        for key in path:
            value = value[key]
        if not any(isinstance(key, int) and key for key in path[:-1]):  # one element of a list stands for all
            like = [float(value)] if isinstance(value, int | float) else [[["a"]]]
            text, huge = ("../../x", "@escape@", "@text@"), (10**400, "@1e400@")
            for other in (None, True, -1, str(value), [value], {"a": value}, *text, *huge, *like):
                yield with_change(valid, path, other, "set")


def restore(root, valid: dict) -> None:
    for kind, content in valid.items():
        (root / FILES[kind]).write_bytes(content)
    shutil.rmtree(root / "reports", ignore_errors=True)


# Several files at once, where none of them hides another: a damaged config.json ends most readers.
TOGETHER = {"config": ["config"], "rollouts": ["rollouts"]}
TOGETHER["all others"] = [kind for kind in FILES if kind not in TOGETHER]


@pytest.mark.parametrize("which", ["config", "all others"])
def test_no_reader_trips_over_a_nearly_valid_file(root, which):
    kinds = [kind for kind in TOGETHER[which] if kind not in ("state", "metrics")]  # nobody reads those
    valid, failed = {kind: (root / FILES[kind]).read_bytes() for kind in kinds}, {}
    misses = {kind: list(near_misses(valid[kind])) for kind in kinds}
    misses.get("own reward", []).reverse()  # not the same as in a peer's
    count = max(map(len, misses.values()))
    for contents in itertools.islice(zip(*map(itertools.cycle, misses.values()), strict=True), count):
        for kind, content in zip(kinds, contents, strict=True):
            (root / FILES[kind]).write_bytes(content)
        try:
            with at_most():
                look_at_everything(root)
        except Exception as error:
            failed[f"{type(error).__name__}: {error!s:.100}"] = [content[:400] for content in contents]
    restore(root, valid)
    print(count, "near misses")
    assert not failed


@pytest.mark.parametrize("which", TOGETHER)
def test_no_reader_trips_over_a_damaged_file(root, which):
    kinds, counts = TOGETHER[which], Counter()
    valid = {kind: (root / FILES[kind]).read_bytes() for kind in kinds}
    damage = {
        kind: mutants(data.splitlines()[0] if kind == "metrics" else data) for kind, data in valid.items()
    }

    @many
    @given(st.fixed_dictionaries(damage))
    def damaged(contents):
        for kind, content in contents.items():
            (root / FILES[kind]).write_bytes(content)
        with at_most():
            rejected = look_at_everything(root)
        counts["examples"] += 1
        counts["rejected"] += bool(rejected)
        if which == "rollouts" and not rejected:  # used, or refused with a reason: nothing disappears
            seen = json.loads(contents[which])["rollouts"]
            assert len(DriveStore(root, "x").fetch(2, 0, "p")) == len(seen)

    try:
        damaged()
    finally:
        restore(root, valid)
    print(dict(counts))
    assert look_at_everything(root) == Counter()


@settings(many, max_examples=1000)
@given(mutants(json.dumps(group_by_hand(1)).encode()), st.sampled_from(["0", "1", "00", "x"]))
def test_a_rollout_file_is_used_whole_or_refused_whole_and_never_costs_more_than_its_size(content, index):
    head = b'{"format": 1, "peer_id": "p", "round": 1, "stage": 0, "timestamp": 1.0, "rollouts": {"'
    file = head + index.encode() + b'": ' + content + b"}}"
    try:
        data = parse_json(file)
        assert len(repr(data)) < 10**6 and data == parse_json(file)  # no depth at which they would give up
        json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
        [group] = check_rollouts(data, 1, 0, "p")
    except BadFile as error:
        assert len(str(error)) < 60, "a short reason, fit for counting"
    else:
        assert group["key"] == (1, 0, "p", int(index)) and isinstance(group["seed"], int)


def test_what_is_no_file_or_a_huge_one_stops_no_reader(tmp_path):
    """In a process of its own: without root's rights, with a limit on its memory, and with its time measured."""
    make_experiment(tmp_path)
    here = Path(__file__).resolve().parent
    code = f"import sys; sys.path[:0] = {[str(here), str(here.parent)]}; import test_strangers; test_strangers.meet_obstacles(sys.argv[1])"
    for folder in [path for path in (tmp_path, *tmp_path.parents) if "pytest-of" in str(path)]:
        folder.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=tmp_path, capture_output=True, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    print(done.stdout[-500:])
    assert done.returncode == 0, done.stderr[-4000:]


OUTSIDE = {"format": 1, "peer_id": "p", "round": 2, "stage": 0, "timestamp": 1.0, "rollouts": {}}


def obstacles(path: Path, outside: Path):
    """Put one thing after another at `path`; yields its name."""
    sparse = b'{"a": "'
    kinds = {
        "link outside": lambda: path.symlink_to(outside), "folder outside": lambda: path.symlink_to(outside.parent), "loop": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to(outside / "nothing"), "/dev/zero": lambda: path.symlink_to("/dev/zero"),
        "/dev/stdin": lambda: path.symlink_to("/dev/stdin"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir,
        "socket": lambda: listen(path), "unreadable": lambda: (path.write_text("{}"), path.chmod(0)), "closed folder": lambda: (path.mkdir(), path.chmod(0)),
        "listed, closed folder": lambda: (path.mkdir(), (path / "0000.json").write_text("{}"), path.chmod(0o444)),
        "100 MB string": lambda: path.write_bytes(sparse + b"x" * ((100 << 20) * ("rollouts" in str(path)) + 10**7) + b'"}'),
        "terabyte": lambda: (path.write_bytes(sparse), os.truncate(path, 1 << 40)),
    }  # fmt: skip
    for kind, make in kinds.items():
        make()
        yield kind
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            path.chmod(0o700)
            shutil.rmtree(path)


def listen(path: Path):
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


def meet_obstacles(root):
    import resource

    coordinator.draw = lambda *args: None
    torch.isfinite(torch.ones(1))  # what is loaded late is loaded now
    root, outside = Path(root), Path(root).parent / "outside.json"
    outside.write_text(json.dumps(OUTSIDE))
    if os.getuid() == 0:
        for path in (root, outside, *root.rglob("*")):
            os.chown(path, 65534, 65534)
        os.setuid(65534)
    look_at_everything(root)
    size, statm = 1 << 40, Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (600 << 20),) * 2)
    met, slowest = 0, 0.0
    for name in FILES.values():
        path, kept = root / name, root / "kept"
        for place in (path, path.parent) if "rollouts" in name or "reward" in name else (path,):
            place.rename(kept)
            for kind in obstacles(place, outside):
                began = time.monotonic()
                try:
                    with at_most():
                        rejected = look_at_everything(root)
                except Exception as error:
                    raise AssertionError(f"{place}: {kind}") from error
                met, slowest = met + 1, max(slowest, time.monotonic() - began)
                if place == path and name == FILES["rollouts"]:
                    assert rejected, kind
            kept.rename(place)
    assert look_at_everything(root) == Counter()
    print(f"{met} obstacles met, {slowest:.1f} s for the slowest look")


# -------- Names -------------------------------------------------------------------------------------------

odd = st.sampled_from([*"/\\.:~\0\n\t *?%$", "..", "../", "∕", "⁄", "／", "＼", "﹨", "․", "‥", "…", "。", "\u202e", "\u200b", "\u0301", "\ud800", "\u0130", "K",
                       "con", "PRN", "aux", "nul", "COM1", "com¹", "lpt9", "CONIN$", ".json", ".JSON", ".tmp", ".pt", "coordinator", "C:", "file://"])  # fmt: skip
fine = st.sampled_from([*"ab01._-", "node_1", ".json", ".1000000000000-00000000"])
name_texts = st.one_of(
    st.text(max_size=12),
    st.lists(odd | fine | st.characters(), max_size=5).map("".join),
    st.lists(fine, max_size=8).map("".join),
)


@settings(many, max_examples=1000)
@given(name_texts, st.sampled_from(["NODE_ID", "EXPERIMENT_NAME"]), st.booleans())
def test_no_name_leads_out_of_its_folder_or_means_another_file(name, variable, local):
    environ = {"NODE_ID": "n", variable: name, "LOCAL_NODES": "2" if local else "1", "GDRIVE_PATH": "/drive"}
    try:
        assert check_name(name, variable) == name
    except ValueError as error:
        assert str(error).startswith(f"{variable}=") and str(error).isprintable()
        if name.strip() and name.strip() not in ("auto", "coordinator") and name.strip() == name:
            with pytest.raises(ConfigError, match=variable):
                read_config(environ)
        return
    assert name.isascii() and name.isprintable() and name.strip() == name
    assert unicodedata.normalize("NFKC", name) == name and not name.endswith((".", " "))
    assert Path("/base", name).resolve().parent == Path("/base") and len(f"{name}.{SESSION}.json") < 255
    on_windows = PureWindowsPath("C:/base", name)
    assert on_windows.parent == PureWindowsPath("C:/base") and not on_windows.is_reserved()
    with contextlib.suppress(ConfigError):  # "coordinator" is taken, 61 characters leave no room for _0
        config = read_config(environ)[0]
        assert name in (getattr(config, variable), "auto")
        for node in [f"{config.NODE_ID}_{i}" for i in (0, 1)] if local else [config.NODE_ID]:
            assert check_name(node, "NODE_ID") == node
        experiment = config.EXPERIMENT_NAME
        assert DriveStore("/drive", experiment).base == Path("/drive/experiments", experiment)


@settings(many, max_examples=200)
@given(st.lists(name_texts.filter(lambda n: len(n) < 40), min_size=1, max_size=4, unique_by=str.lower))
def test_every_node_reads_back_as_itself_and_no_other(tmp_path_factory, names):
    store, nodes = DriveStore(tmp_path_factory.mktemp("names"), "x", "n1"), []
    store.create()
    for name in names:
        with contextlib.suppress(ValueError):
            nodes.append(check_name(name, "NODE_ID"))
    sessions = {node: store.register(node, "worker", {}) for node in nodes}
    for i, node in enumerate(nodes):
        store.publish(1, 0, node, {}, {"0": group_by_hand(i)})
        store.submit_reward(1, 0, node, {"reward": 0.5})
        store.heartbeat(node, {"session": sessions[node]})
    assert store.nodes("rollouts", 1, 0) == store.nodes("rewards", 1, 0) == sorted(nodes)
    assert store.sessions() == sessions
    for i, node in enumerate(nodes):
        [group] = store.fetch(1, 0, node)
        assert (group["key"], group["seed"]) == ((1, 0, node, 0), i)
        about, beat = store.registration(node, sessions[node]), store.read_heartbeat(node)
        assert (about["role"], beat["session"]) == ("worker", sessions[node])
        assert store.rewards(1, [node])[0]["node_id"] == node


any_bytes = st.binary(min_size=1, max_size=12).filter(
    lambda b: not {*b"/\0"} & {*b} and b not in (b".", b"..")
)
stems = st.sampled_from(["p", "p.json", "round_000007", "round_000001", "stage_0", "0000.json"])
tails = st.sampled_from(["\n", " (1)", "~", "\u0661", "\\", "\x1b[2J"])


@many
@given(st.lists(any_bytes, min_size=1, max_size=3), stems, tails)
def test_files_with_odd_names_change_nothing_that_is_read(tmp_path_factory, names, stem, tail):
    root = tmp_path_factory.getbasetemp() / "odd names"
    if not root.exists():
        make_experiment(root)
    store, before = DriveStore(root, "x"), read_state(root)
    places = [Path(folder) for folder, _, _ in os.walk(store.base)]
    odd_names = {*map(os.fsdecode, names), stem + tail}
    made = [place / name for place in places for name in odd_names if not (place / name).exists()]
    made = [path for path in made if not looks_like_a_node(path)]
    for path in made:
        path.write_bytes(b'{"round": 7}')
    try:
        with at_most():
            look_at_everything(root)
            assert read_state(root) == before
    finally:
        for path in made:
            path.unlink()
        shutil.rmtree(root / "reports", ignore_errors=True)


def looks_like_a_node(path: Path) -> bool:
    try:
        return path.name.endswith(".json") and bool(check_name(path.name.removesuffix(".json"), "file name"))
    except ValueError:
        return False


def read_state(root):
    """What the swarm's logic takes from the folder."""
    store = DriveStore(root, "x")
    fetched = [store.fetch(t, 0, node) for t in range(3) for node in store.nodes("rollouts", t, 0)]
    listed = store.rounds("rollouts"), store.stages("rollouts", 1), store.checkpoints("n1")
    return store.clock(), store.sessions(), listed, fetched, reward_rows(store)


# -------- What a peer may gain ----------------------------------------------------------------------------


claims = st.sampled_from(["answer", "reward", "model", "tasks", "reasoning_gym", "timestamp", "new"])


@many
@given(claims, values, st.integers(0, 3))
def test_what_a_peer_claims_changes_nothing_that_is_trained_on(root, field, value, which):
    path, expected = root / FILES["rollouts"], [unlabelled(r) for r in train_beside(root)[0]]
    valid = path.read_bytes()
    data = json.loads(valid)
    for group in data["rollouts"].values():
        if field == "reward":
            group["completions"][which]["reward"] = value
        elif field in ("answer", "new"):
            group[field] = value
    if field not in ("answer", "reward"):
        data[field] = value
    path.write_bytes(encode(data))
    try:
        drawn, run = train_beside(root)
    finally:
        path.write_bytes(valid)
    if run.nodes[0].figures["rejected"]:  # not even a claim may be out of bounds
        assert run.swarm.refused.keys() == {(2, 0, "p")} and all(r.key[:3] != (2, 0, "p") for r in drawn)
    else:
        assert [unlabelled(r) for r in drawn] == expected


def unlabelled(r: Rollout):
    group = r.group.rewards, r.group.prompt, r.group.completions
    return r.key, r.question.text, r.texts, r.finished, *group


@settings(many, max_examples=60)
@given(st.lists(st.integers(0, 30), max_size=4), st.integers(1, 4), st.integers(0, 6), st.integers(0, 10**6))
def test_each_peer_has_a_fair_share_and_the_draw_is_bounded(tmp_path_factory, groups_of, i, j, seed):
    root = tmp_path_factory.mktemp("shares")
    store = DriveStore(root, "x", "writer")
    store.create()
    for t, (n, count) in itertools.product((1, 2), enumerate(groups_of)):
        groups = {str(k): group_by_hand(1000 * n + 100 * t + k) for k in range(count)}
        store.publish(t, 0, f"p{n}", {}, groups)
    run = reading_run(root, NUM_TRAIN_SAMPLES=str(i), NUM_TRANSPLANT_TREES=str(j), SEED=str(seed))
    [node] = run.nodes
    drawn, keys = sample_external(run, node, 2, 0), set(node.trained)
    available = [sum(min(i, count) for count in groups_of)] * 2  # of this round, and of the one before
    assert len(drawn) == min(j, sum(available)) and {r.key for r in drawn} == keys and len(keys) == len(drawn)
    assert node.figures["external_short"] == j - len(drawn) and node.figures["rejected"] == 0
    assert max(Counter(r.key[:3] for r in drawn).values(), default=0) <= i
    assert sum(r.key[0] == 2 for r in drawn) == min(j, available[0]), "this round's come first"
    assert not {r.key for r in sample_external(run, node, 2, 0)} & keys, "never twice"


@pytest.mark.parametrize("count, is_read", [(10_000, False), (3_000, True)])
def test_ten_thousand_groups_are_drawn_no_more_often_than_one_peers_share(tmp_path, count, is_read):
    store = DriveStore(tmp_path, "x", "writer")
    store.create()
    for n in range(4):
        store.publish(1, 0, f"honest{n}", {}, {str(k): group_by_hand(10 * n + k) for k in range(2)})
    write_anything(store, 1, "flood", [group_by_hand(1000 + k % 200) for k in range(count)])
    drawn, tried = Counter(), 60
    with at_most(120):
        first = reading_run(tmp_path, NUM_TRANSPLANT_TREES="5")
        assert ((1, 0, "flood") in first.swarm.rollouts) == is_read, "a file may hold so many groups"
        for seed in range(tried):
            config = replace(first.config, SEED=seed)
            run = replace(first, config=config, nodes=[Node("n1", None, None)])  # what was read stays read
            drawn.update(r.key[2] for r in sample_external(run, run.nodes[0], 2, 0))
    assert drawn.total() == tried * 5 and (drawn["flood"] > 0) == is_read
    assert drawn["flood"] < tried * 5 * 0.3, "two of ten in the pool: a fifth of what is drawn"
    print(dict(drawn))


def write_anything(store, round_: int, node: str, groups: list[dict]) -> None:
    """A rollout file as only a stranger writes it: DriveStore.publish checks its own."""
    data = {"format": 1, "peer_id": node, "round": round_, "stage": 0, "timestamp": 1.0}
    data["rollouts"] = {str(k): group for k, group in enumerate(groups)}
    text = json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")
    store.write(f"{stage_folder('rollouts', round_, 0)}/{node}.json", text)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"0,"])
def test_megabytes_of_commas_and_brackets_are_refused_before_they_are_parsed(tmp_path, piece):
    store = DriveStore(tmp_path, "x", "n")
    store.create()
    for kind, size, most in (("rollouts", 8_300_000, 8 << 20), ("heartbeat", 65_000, 64 << 10)):
        path, text = FILES[kind].removeprefix(EXPERIMENT), b'{"x": [' + piece * (size // 3) + b"0]}"
        store.write(path, text)
        tracemalloc.start()
        with pytest.raises(BadFile, match="too many elements"):
            store.read(path, most)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(text) + 2**20
        tracemalloc.stop()


def test_a_peer_has_twenty_seconds_of_a_rounds_scoring_whatever_the_others_need(root, monkeypatch):
    run, now, verify_one = reading_run(root), [0.0], sapo.verify

    def slowly(run, raw):
        now[0] += {"p": 21.0, "q": 9.0}[raw["key"][2]]
        return verify_one(run, raw)

    monkeypatch.setattr(sapo, "time", SimpleNamespace(thread_time=lambda: now[0]))
    monkeypatch.setattr(sapo, "verify", slowly)
    run.nodes[0].figures = Counter()
    pool = sapo.informative_pool(run, run.nodes[0], 2, 0, random.Random(0))
    assert sorted(r.key[2] for r in pool) == ["p", "q", "q"] and run.nodes[0].figures["rejected"] == 1
    assert run.log.events == [("reject", "p: too slow to verify")]


def test_a_text_that_is_the_end_of_a_turn_here_is_refused_and_none_is_shared(root):
    """To some tokenizers "</s>" in a text is EOS, and to some models EOS is an ordinary word."""
    ends = replace(CODEC, eos_ids={0, CODEC.encode("#")[0]}, eos_id=CODEC.encode("#")[0])
    run, raw = replace(reading_run(root), codec=ends), group_by_hand(1) | {"key": (2, 0, "p", 0)}
    rollout = verify(run, raw)
    assert all(ids[-1] == ends.eos_id for ids in rollout.group.completions)
    assert [ends.decode(ids) for ids in rollout.group.completions] == rollout.texts
    assert sum(rollout.group.rewards) == 1 and not any("#" in text for text in rollout.texts)
    raw["completions"][0]["response"] = "#" + raw["completions"][0]["response"]
    assert verify(run, raw) == "a text that is the end of a turn here"


def test_a_strangers_question_that_would_take_minutes_is_refused(root):
    run = replace(reading_run(root), tasks=["basic_arithmetic", "decimal_arithmetic"])
    for task, seed in zip(run.tasks, (721121905971561, 1488473454406226), strict=True):
        raw = group_by_hand(1) | {"key": (2, 0, "p", 0), "task": task, "seed": seed}
        assert verify(run, raw) == "a question that cannot be made"


# -------- What a stranger's text may do -------------------------------------------------------------------

ARMED, watched = False, []
EVENTS = "exec compile open os.system subprocess.Popen os.exec os.fork socket.connect import".split()
sys.addaudithook(
    lambda event, arguments: ARMED and event in EVENTS and watched.append((event, arguments[:1]))
)
payloads = st.sampled_from([
    "__import__('os').system('touch PWNED')", "open('PWNED','w')", "().__class__.__base__.__subclasses__()", "exec('1')", "{{7*7}}", "${jndi:ldap://x}",
    "[x for x in [1]]", "lambda: 1", "$(touch PWNED)", "`id`", "!!python/object/apply:os.system ['id']", "%n%s", "{0.__class__}", "cos\nsystem\n(S'id'\ntR.",
])  # fmt: skip


@pytest.fixture(scope="module")
def warm():
    """One question of every task, scored once: imports and caches are warm before anything is watched."""
    questions = [make_question(task, seed) for task in TASK_TABLE for seed in (3, 99)]
    for question in questions:
        for text in (question.answer, "1", "x ∧ y", "1/2", "[[1]]"):
            score(question, f"<answer>{text}</answer>"), CODEC.prompt(question)
    return questions


@settings(many, max_examples=1000)
@given(
    st.data(),
    st.integers(0, 2 * len(TASK_TABLE) - 1),
    st.sampled_from(["{}", "{} {}", "[[{}]]", "({})", "{}+{}", "{}∧{}", "'{}'", "\\frac{{{}}}{{{}}}"]),
    st.sampled_from(["exact", "verifier"]),
)
def test_no_completion_is_evaluated_or_opens_anything(warm, data, which, form, kind):
    global ARMED
    question = warm[which]
    piece = payloads | st.just(question.answer) | st.text(max_size=10)
    pieces = data.draw(st.tuples(piece, piece))
    texts = [f"<answer>{form.format(*pieces)}</answer>", "".join(pieces)]
    raw = {"task": question.task, "seed": question.seed, "prompt": question.text, "key": (0, 0, "p", 0)}
    raw["completions"] = [{"response": text, "finished": True} for text in texts]
    codec, config = replace(CODEC, max_completion=10**5), SimpleNamespace(REWARD=kind, NUM_GENERATIONS=64)
    run = SimpleNamespace(tasks=list(TASK_TABLE), codec=codec, config=config)
    watched.clear()
    ARMED = True
    try:
        rollout = verify(run, raw)
    finally:
        ARMED = False
    assert watched == []
    assert all(0 <= reward <= 1 for reward in rollout.group.rewards)
    assert rollout.texts == [codec.decode(ids) for ids in rollout.group.completions]


CONTROLS = "<|im_start|> <|im_end|> <|endoftext|> [INST] </s> <s> <|eot_id|> <start_of_turn> <tool_call> <pad>".split()
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
CHAT = tiny_codec(0, TEMPLATE, CONTROLS)


@settings(many, max_examples=1000)
@given(st.lists(st.sampled_from([*CONTROLS, "<eos>", "<unk>", "system\n", "assistant\n", "\n", "<answer>", "</answer>", "{{ m }}", "{% raw %}"]) | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6), min_size=1, max_size=12).map("".join), st.booleans())  # fmt: skip
def test_control_tokens_of_any_template_are_plain_text_in_a_strangers_completion(text, finished):
    controls = set(CHAT.tokenizer.convert_tokens_to_ids([*CONTROLS, "<eos>", "<unk>"]))
    question = make_question(TASKS[0], 1)
    before = CHAT.prompt(question)
    raw = {"task": TASKS[0], "seed": 1, "prompt": question.text, "key": (0, 0, "p", 0)}
    raw["completions"] = [{"response": text, "finished": finished}] * 2
    rollout = verify(
        SimpleNamespace(tasks=TASKS, codec=CHAT, config=SimpleNamespace(REWARD="exact", NUM_GENERATIONS=64)),
        raw,
    )
    if isinstance(rollout, str):
        assert rollout.startswith("completion empty or over")
        assert (text == "" and not finished) or len(text) > 200
        return
    for ids in rollout.group.completions:
        body = ids[:-1] if finished else ids
        assert not set(body) & controls and CHAT.decode(body) == text and (ids[-1] == CHAT.eos_id) == finished
    assert rollout.group.prompt == before == CHAT.prompt(question)


def test_a_token_that_the_tokenizer_knows_and_the_model_does_not_is_refused(root):
    codec = tiny_codec()
    codec.tokenizer.add_tokens(["zebra"])  # no special token, so it is found in a text
    run, question = replace(reading_run(root), codec=codec), make_question(TASKS[0], 1)
    raw = {"task": TASKS[0], "seed": 1, "prompt": question.text, "key": (0, 0, "p", 0)}
    answer = {"response": f"<answer>{question.answer}</answer>", "finished": True}
    assert not isinstance(verify(run, raw | {"completions": [answer] * 2}), str)
    odd = answer | {"response": "zebra" + answer["response"]}
    assert verify(run, raw | {"completions": [answer, odd]}) == "a token that this model does not have"


@pytest.mark.parametrize("length", [MAX_RESPONSE_CHARS, MAX_RESPONSE_CHARS + 1, 10**6])
@pytest.mark.parametrize("piece", ["x", "<answer>", " ", "9", "\U0001f600", "(", "</answer>", "<eos>"])
def test_a_million_characters_cost_bounded_time_and_memory(tmp_path, piece, length):
    text = (piece * length)[:length]
    long = group_by_hand(0, completions=[{"response": text, "finished": True}] * 4)
    store = DriveStore(tmp_path, "x", "writer")
    store.create()
    write_anything(store, 1, "p", [long, group_by_hand(1)])
    began, fits = time.process_time(), length == MAX_RESPONSE_CHARS
    tracemalloc.start()
    run = reading_run(tmp_path)
    drawn = sample_external(run, run.nodes[0], 2, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(drawn) == fits, "one group is refused, or the whole file"
    reasons = ("over 256 tokens",) if fits else ("response over", "larger than")
    told = [text for kind, text in run.log.events if kind == "reject"]
    assert len(told) == 1 and any(reason in told[0] for reason in reasons)
    assert peak < 200 << 20 and time.process_time() - began < 20
    began = time.process_time()
    for task in TASK_TABLE:  # a model of one's own may write as much
        assert score(make_question(task, 3), text) == 0
    assert time.process_time() - began < 20


# -------- The warm start ----------------------------------------------------------------------------------

TENSORS = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
WEIGHTS = safetensors_save(TENSORS)
HEADER = WEIGHTS[8 : 8 + int.from_bytes(WEIGHTS[:8], "little")]
headers = st.builds(with_change, st.just(HEADER), st.sampled_from(list(paths_in(json.loads(HEADER)))), values | st.sampled_from(["F64", "I32", "BOOL", "F8_E4M3", "BF16", "C64"]), st.sampled_from(["set", "delete", "move"]))  # fmt: skip
weight_files = st.one_of(
    st.builds(lambda header, rest: len(header).to_bytes(8, "little") + header + rest, headers, st.just(WEIGHTS[8 + len(HEADER) :]) | st.binary(max_size=60)),
    st.builds(lambda at, piece: WEIGHTS[:at] + piece + WEIGHTS[at + len(piece) :], st.integers(0, len(WEIGHTS)), st.binary(min_size=1, max_size=8)),
    st.integers(0, len(WEIGHTS)).map(lambda n: WEIGHTS[:n]), st.binary(max_size=40), st.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little") + b"{}"),
)  # fmt: skip


class TwoTensors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.zeros(4))
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=7))


def start_warm(root, patch) -> TwoTensors:
    """A model that went through load_warm_start, where training does nothing and waiting takes no time."""
    root.mkdir(exist_ok=True)
    ticks = itertools.count(0, 100)
    patch.setattr(sapo, "warm_start", lambda *_: None)
    patch.setattr(sapo, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda seconds: None))
    environ = {"NODE_ID": "n", "GDRIVE_PATH": str(root), "MODEL_NAME": "tiny", "WARM_START_STEPS": "1"}
    model = TwoTensors()
    sapo.load_warm_start(read_config(environ)[0], model, None, TASKS, lambda text: None)
    assert next(ticks) < 2000, "no claim holds up a start for longer than ten minutes"
    return model


@settings(many, max_examples=400)
@given(weight_files)
def test_any_warm_start_file_is_loaded_replaced_or_refused_by_name(tmp_path_factory, content):
    root = tmp_path_factory.getbasetemp() / "warm start"
    with pytest.MonkeyPatch.context() as patch:
        start_warm(root, patch)
        [made] = (root / "warmstart").glob("*.safetensors")
        made.write_bytes(content)
        model = start_warm(root, patch)
        assert all(torch.isfinite(w).all() for w in model.state_dict().values())
        assert load_weights(model, made.read_bytes()), "a damaged one was replaced"
        made.unlink()


@settings(many, max_examples=200)
@given(mutants(b'{"host": "h", "boot_id": null, "pid": 1, "pid_start": "1"}'))
def test_whatever_a_claim_says_the_warm_start_is_made_after_ten_minutes_at_most(tmp_path_factory, content):
    root = tmp_path_factory.getbasetemp() / "claims"
    with pytest.MonkeyPatch.context() as patch:
        start_warm(root, patch)
        [made] = (root / "warmstart").glob("*.safetensors")
        made.unlink()
        made.with_suffix(".claim").write_bytes(content)
        assert load_weights(start_warm(root, patch), made.read_bytes())
        made.unlink()


# -------- Found by attackers: each of these stopped a node, or cost it minutes --------------------------------


def test_a_reward_file_whose_needed_figures_come_after_many_others_is_read(tmp_path):
    store = DriveStore(tmp_path, "x", "n1")
    store.create()
    store.register("n1", "worker", {})
    store.submit_reward(0, 0, "n1", {"reward": 0.5})
    path = store.base / "rewards/round_000000/stage_0/n1.json"
    path.write_text(json.dumps({f"k{i}": 0 for i in range(64)} | json.loads(path.read_text())))
    store.open_round(0, "n1")
    (row,) = reward_rows(store)
    assert (row["node_id"], row["round"], row["reward"]) == ("n1", 0, 0.5) and len(row) < 80


@pytest.mark.parametrize("shape, offsets", [([1] * 65, [0, 4]), ([0, 2**63], [0, 0]), ([2**62, 4], [0, 4])])
def test_a_warm_start_of_a_shape_that_torch_does_not_have_is_none(shape, offsets):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(offsets[1])
    assert load_weights(torch.nn.Linear(2, 2), data) is False


@pytest.mark.parametrize(
    "place", ["tmp", "state", "state/rounds", "rewards", "rewards/round_000001", "heartbeats"]
)
@pytest.mark.parametrize("how", ["file", "link"])
def test_what_lies_in_the_place_of_a_folder_is_replaced_by_the_next_write(tmp_path, place, how):
    store, outside = DriveStore(tmp_path / "drive", "x", "n1"), tmp_path / "outside"
    store.create(), outside.mkdir()
    path = store.base / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.rmdir()
    path.touch() if how == "file" else path.symlink_to(outside)
    store.sweep()
    store.open_round(1, "n1"), store.submit_reward(1, 0, "n1", {"reward": 0.5}), store.heartbeat("n1", {})
    assert store.clock() == (1, {"n1"}) and store.rewards(1, ["n1"]) and store.read_heartbeat("n1")
    assert not list(outside.iterdir())


def test_a_folder_in_the_place_of_the_state_for_people_stops_no_clock(tmp_path):
    store = DriveStore(tmp_path, "x", "n1")
    (store.base / "state/current_state.json").mkdir(parents=True)
    store.open_round(3, "n1")
    assert store.clock() == (3, {"n1"})


def test_who_is_always_late_costs_a_few_time_outs_and_not_one_in_every_round(tmp_path):
    store = DriveStore(tmp_path, "x", "ghost")
    store.create()
    session, done = store.register("ghost", "worker", {}), threading.Event()

    def haunt():
        for t in itertools.count():
            while t not in store.rounds("rewards") and not done.is_set():
                time.sleep(0.005)
            if done.is_set():
                return
            store.heartbeat("ghost", {"session": session, "round": t})
            store.publish(t, 0, "ghost", {}, {})

    thread = threading.Thread(target=haunt)
    thread.start()
    settings = dict(LOCAL_NODES=1, NODE_ID="n", FETCH_TIMEOUT_SECONDS=0.5, MAX_ROUNDS=40, **UNTRAINED)
    assert swarm_of(tmp_path, "x", **settings) == 0
    done.set(), thread.join()
    waits = [event["round"] for event in events_of(tmp_path, "x", "wait", "n") if "ghost" in event["text"]]
    assert 1 <= len(waits) <= 40 / 4 + 4, waits


def test_files_that_take_long_to_read_make_nobody_wait_for_the_next_listing(tmp_path, monkeypatch):
    """The pause between two looks goes by what a listing costs: a file is read once."""
    store = DriveStore(tmp_path, "x", "p")
    store.create()
    for t in range(10):
        write_anything(store, t, "p", [group_by_hand(0)])
    fetch = DriveStore.fetch
    monkeypatch.setattr(DriveStore, "fetch", lambda *args: (time.sleep(0.3), fetch(*args))[1])
    swarm, began = reading_run(tmp_path).swarm, time.monotonic()
    swarm.start()
    for t in range(2, 10):
        swarm.round = t
        while swarm.looked_at_round < t:
            swarm.wait()
    assert len({key[0] for key in swarm.rollouts}) >= 4 and time.monotonic() - began < 12, "not 3 s for each"
    swarm.is_abandoned = True


def test_thousands_of_names_make_no_long_line_and_thousands_of_settings_no_report(tmp_path):
    store = DriveStore(tmp_path, "x", "n")
    (store.base / "peers").mkdir(parents=True)
    for i in range(3000):
        (store.base / f"peers/ghost_{i}.{SESSION}.json").touch()
    settings = dict(LOCAL_NODES=1, NODE_ID="n", FETCH_TIMEOUT_SECONDS=0.5, MAX_ROUNDS=1, **UNTRAINED)
    assert swarm_of(tmp_path, "x", **settings) == 0
    wait = events_of(tmp_path, "x", "wait", "n")[0]
    assert len(wait["text"]) < 300 and "2992 others" in wait["text"]
    config = json.loads((store.base / "config.json").read_text()) | {f"K{i}": i for i in range(500)}
    (store.base / "config.json").write_text(json.dumps(config))
    assert sapo.compare_experiments(tmp_path) == []


def test_no_private_file_gets_a_name_in_the_folder_by_a_swapped_temp_file(tmp_path):
    store, private, done = DriveStore(tmp_path / "drive", "x", "n1"), tmp_path / "private", threading.Event()
    store.create(), private.write_text("key")

    def swap():
        while not done.is_set():
            for path in [p for p in (store.base / "tmp/n1").glob("*") if len(p.name) == 16]:
                with contextlib.suppress(OSError):
                    path.with_suffix(".x").symlink_to(private)
                    path.with_suffix(".x").rename(path)

    thread = threading.Thread(target=swap)
    thread.start()
    for round_ in range(1500):
        with contextlib.suppress(OSError):
            store.submit_reward(round_, 0, "n1", {"reward": 0.5})
    done.set(), thread.join()
    assert private.stat().st_nlink == 1 and private.read_text() == "key"


@pytest.mark.parametrize("once", [True, False])
def test_a_folder_in_the_place_of_a_file_makes_way(tmp_path, once):
    store = DriveStore(tmp_path, "x", "n1")
    (store.base / "rewards/a.json/b/c").mkdir(parents=True)
    (store.write_once if once else store.rewrite)("rewards/a.json", {"a": 1})
    assert store.read("rewards/a.json") == {"a": 1}


def test_a_session_planted_ahead_of_its_time_stops_nobody(tmp_path):
    store = DriveStore(tmp_path, "x", "n1")
    store.create()
    session = store.register("n1", "worker", {})
    (store.base / f"peers/n1.{1000 * (int(time.time()) + 3602)}-00000000.json").touch()
    (store.base / "peers/n2.9999999999999-00000000.json").touch()
    assert store.sessions() == {"n1": session, "n2": "0000000000001"}
    time.sleep(3)
    assert store.sessions()["n1"] == session


def test_a_new_name_in_every_round_costs_a_few_time_outs_only(tmp_path):
    store = DriveStore(tmp_path, "x", "ghost")
    store.create()
    for round_ in range(40):
        store.register(f"ghost_{round_}", "worker", {})
        store.publish(round_, 0, f"ghost_{round_}", {}, {})
    settings = dict(LOCAL_NODES=1, NODE_ID="n", FETCH_TIMEOUT_SECONDS=0.3, MAX_ROUNDS=40, **UNTRAINED)
    assert swarm_of(tmp_path, "x", **settings) == 0
    waits = [e["round"] for e in events_of(tmp_path, "x", "wait", "n") if "FETCH_TIMEOUT" in e["text"]]
    assert 1 <= len(waits) <= 40 / 4 + 4, waits


def test_a_tree_too_deep_to_be_deleted_holds_up_no_write(tmp_path):
    store = DriveStore(tmp_path, "x", "n1")
    store.create()
    for path in ("tmp/n1/probe", "heartbeats/n1.json", "rewards/round_000001/stage_0/n1.json"):
        (store.base / path / "/".join("d" * 60)).mkdir(parents=True)
    store.sweep()
    assert store.can_write() and store.submit_reward(1, 0, "n1", {"reward": 0.5})
    store.heartbeat("n1", {"state": "running"})
    assert store.read_heartbeat("n1")["state"] == "running" and len(store.rewards(1, ["n1"])) == 1


def test_ever_new_figures_in_reward_files_make_no_ever_wider_table(tmp_path):
    store = DriveStore(tmp_path, "x", "n1")
    store.create()
    store.open_round(0, "n1")
    for node in range(50):
        store.register(f"n{node}", "worker", {})
        own = {f"k{node}_{i}": i for i in range(64)} if node else {"kl": 1.0}
        store.submit_reward(0, 0, f"n{node}", {"reward": 0.5, "completions": 8} | own)
    rows = reward_rows(store)
    assert len(rows) == 50 and rows[0]["kl"] == 1.0 and all(row["completions"] == 8 for row in rows)
    assert len({name for row in rows for name in row}) < 80


def test_figures_of_one_stranger_take_no_place_from_those_of_this_program(tmp_path):
    store, ours = DriveStore(tmp_path, "x", "n1"), dict.fromkeys(COUNTS + FIGURES, 0.5)
    store.create()
    store.open_round(0, "n1")
    for node, figures in (("a", {f"z{i}": i for i in range(64)}), ("n1", ours)):
        store.register(node, "worker", {})
        store.submit_reward(0, 0, node, {"reward": 0.5} | figures)
    assert ours.keys() <= reward_rows(store)[1].keys()


@pytest.mark.parametrize("place", ["experiments/other", "experiments/other/config.json"])
def test_a_link_to_a_name_that_no_file_can_have_stops_no_start_and_no_reader(tmp_path, place, capsys):
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).symlink_to("a" * 300)
    settings = dict(LOCAL_NODES=1, NODE_ID="n", MAX_ROUNDS=2, **UNTRAINED)
    assert swarm_of(tmp_path, "x", **settings) == 0 and "x" in list_experiments(tmp_path)
    assert sapo.main({"GDRIVE_PATH": tmp_path, "NODE_ROLE": "report"}) == 0
    assert list_experiments(tmp_path / "nowhere") == []


@pytest.mark.parametrize("place", ["experiments", "experiments/other"])
def test_what_lies_behind_a_link_is_no_experiment(tmp_path, place):
    """Its name came onto the screen, and into a log that everybody reads."""
    (outside := tmp_path / "outside/secret/state/rounds").mkdir(parents=True)
    (tmp_path / "drive" / place).parent.mkdir(parents=True)
    (tmp_path / "drive" / place).symlink_to(tmp_path / "outside" / ("secret" * ("/" in place)))
    assert outside.is_dir() and list_experiments(tmp_path / "drive") == []


def test_rewards_of_who_never_registered_move_no_clock(tmp_path):
    config, store = sapo.Config(NODE_ROLE="coordinator", MAX_ROUNDS=9), DriveStore(tmp_path, "x", COORDINATOR)
    store.create()
    swarm = Swarm(store, {COORDINATOR: store.register(COORDINATOR, COORDINATOR, {})}, config, print, [])
    role = Coordinator(swarm, config, lambda text: None)
    for node in ("ghost", "n1"):
        store.submit_reward(0, 0, node, {"reward": 0.5})
        swarm._look(), role.step()
        assert store.clock()[0] == 0
    store.register("n1", "worker", {})
    swarm._look(), role.step(), role.step()
    assert store.clock()[0] == 1


def test_a_task_that_config_json_names_a_thousand_times_is_read_once(monkeypatch):
    made, question = [], grpo.lucky_question
    monkeypatch.setattr(grpo, "lucky_question", lambda *args: made.append(args) or question(*args))
    grpo.build_tiny(["small_gcd"] * 1000)
    assert len(made) == 100


@pytest.mark.parametrize("how", ["far round", "deep config"])
def test_an_experiment_that_would_fill_the_report_is_left_out_of_it(tmp_path, how, capsys):
    store, last = DriveStore(tmp_path, "x", "n1"), 999_999 if how == "far round" else 0
    store.create()
    nested = {"deep": [[1]]} if how == "deep config" else {}
    settings = {"NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 0} | nested
    store.open_config(settings)
    store.register("n1", "worker", {}), store.open_round(last, "n1")
    store.submit_reward(last, 0, "n1", {"reward": 0.5})
    assert sapo.compare_experiments(tmp_path) == [] and "experiment x is left out" in capsys.readouterr().out


def test_what_is_kept_of_a_peers_file_is_small_whatever_it_holds(tmp_path):
    """One character beyond U+FFFF makes Python keep four bytes for each of a text."""
    store = DriveStore(tmp_path, "x", "writer")
    store.create()
    text = "\U0001f600" + "x" * 16000
    for peer in "abcdef":
        long = group_by_hand(0, completions=[{"response": text, "finished": True}] * 64)
        write_anything(store, 1, peer, [long, group_by_hand(1)])
    run = reading_run(tmp_path, NUM_GENERATIONS="4")
    kept = [group for groups in run.swarm.rollouts.values() for group in groups]
    assert len(kept) == 12 and all(len(group["completions"]) <= 4 for group in kept)
    config = replace(run.config, MAX_NEW_TOKENS=10)
    short = coordinator.shortened(kept[0], config)
    assert not any(c["response"] or c["finished"] for c in short["completions"]), "verify refuses these"
    run = reading_run(tmp_path, MAX_NEW_TOKENS="10")
    assert not run.swarm.rollouts or sum(len(str(g)) for g in run.swarm.rollouts.values()) < 10**5


def test_what_is_kept_of_registrations_and_heartbeats_is_small(tmp_path):
    store = DriveStore(tmp_path, "x", "n1")
    store.create()
    session = store.register(
        "fat", "worker", {"host": "\U0001f600" * 9000, "pid": 5, "boot_id": ["x"] * 1000}
    )
    store.heartbeat("fat", {"session": session, "state": "running", "more": "x" * 50000})
    assert store.registration("fat", session) == {"role": "worker", "pid": 5}
    assert store.read_heartbeat("fat").keys() == {"time", "session", "state"}


def test_files_beside_ones_own_folders_are_listed_by_nobody_and_names_are_parsed_once(tmp_path, monkeypatch):
    store = DriveStore(tmp_path, "x", "n1")
    store.create()
    for i in range(2000):
        put(store, f"junk{i}", b""), put(store, f"peers/junk{i}", b"")
    store.register("n1", "worker", {}), store.sessions()
    listed, parsed = [], []
    listdir, match = os.listdir, re.fullmatch
    monkeypatch.setattr(os, "listdir", lambda fd: listed.append(names := listdir(fd)) or names)
    monkeypatch.setattr(re, "fullmatch", lambda *rest: parsed.append(1) or match(*rest))
    store.nodes("rollouts", 3, 0), store.clock(), store.rounds("rewards"), store.sessions()
    assert not any("junk1" in names and "peers" in names for names in listed) and len(parsed) < 20


@pytest.mark.parametrize("place", ["peers", "state", "rollouts", "rewards"])
@pytest.mark.parametrize("how", ["file", "link"])
def test_what_was_planted_before_the_first_start_stops_none(tmp_path, place, how):
    (tmp_path / "outside").mkdir()
    path = tmp_path / "drive/experiments/x" / place
    path.parent.mkdir(parents=True)
    path.touch() if how == "file" else path.symlink_to(tmp_path / "outside")
    DriveStore(tmp_path / "drive", "x", "n1").create()
    assert path.is_dir() and not path.is_symlink() and not [*(tmp_path / "outside").iterdir()]


def test_names_in_reward_files_are_short_and_plain(tmp_path):
    store = DriveStore(tmp_path, "x", "n1")
    store.create()
    odd = {"\x1b]0;pwned\x07": 1, "\U0001f600" * 900: 2, "x" * 41: 3, "good": 4}
    put(store, "rewards/round_000001/stage_0/p.json", json.dumps(row("p", 1) | odd).encode())
    [read] = store.rewards(1, ["p"])
    assert "good" in read and not any(len(name) > 40 or not name.isprintable() for name in read)


def row(node, round_) -> dict:
    return {"node_id": node, "round": round_, "stage": 0, "timestamp": 1.0, "reward": 0.5}


def test_with_one_file_a_round_no_other_stage_is_read(tmp_path):
    store = DriveStore(tmp_path, "x", "writer")
    store.create()
    for stage in range(3):
        store.publish(2, stage, "p", {}, {"0": group_by_hand(stage)})
    run = reading_run(tmp_path, MAX_STAGES="3", ROLLOUT_PUBLISH_FREQUENCY="round")
    assert [*run.swarm.rollouts] == [(2, 2, "p")]
    assert len(reading_run(tmp_path, MAX_STAGES="3").swarm.rollouts) == 3
