"""Property tests of the trust boundary: thousands of generated and damaged files thrown at every reader.

A stranger can write anything into the shared folder. Whatever it is: no reader raises, waits or fills the memory, and what is
refused is refused with a counted reason. Examples are derandomized, so that the gate repeats itself.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from safetensors.torch import save as safetensors_save

import coordinator
import sapo
from coordinator import (
    Liveness,
    compare,
    dashboard,
    experiment_status,
    reward_rows,
    summarize,
    validate_experiment,
)
from drive_store import (
    GROUP_SIZES,
    MAX_RESPONSE_CHARS,
    BadFile,
    DriveStore,
    StoreError,
    check_name,
    check_rollouts,
    list_experiments,
    parse_json,
)
from sapo import ConfigError, TASK_TABLE, Node, Rollout, Run, read_config, sample_external, verify_uncached
from test_sapo import group_by_hand, tiny_codec

SECONDS = 60  # a generous deadline for one look at everything: the machine may be busy, but nothing may wait for ever
TASKS = ["small_products", "small_count_bits"]
many = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)  # fmt: skip
EXPERIMENT = "experiments/x/"
OWN_REWARD = EXPERIMENT + "rewards/round_000001/stage_0/n1.json"
FILES = {  # kind -> path below the shared folder
    "config": EXPERIMENT + "config.json",
    "clock": EXPERIMENT + "state/rounds/round_000002.json",
    "state": EXPERIMENT + "state/current_state.json",
    "registration": EXPERIMENT + "peers/p.1000000000000-00000000.json",
    "coordinator": EXPERIMENT + "peers/coordinator.1000000000000-00000000.json",
    "heartbeat": EXPERIMENT + "heartbeats/coordinator.json",
    "rollouts": EXPERIMENT + "rollouts/round_000002/stage_0/p.json",
    "part": EXPERIMENT + "rollouts/round_000002/stage_0/q/0000.json",
    "reward": EXPERIMENT + "rewards/round_000001/stage_0/p.json",
    "own reward": OWN_REWARD,
    "winner": EXPERIMENT + "winners/round_000002/p.json",
    "metrics": EXPERIMENT + "logs/p/metrics.jsonl",
    "claim": "warmstart/0.claim",
}


# -------- A whole experiment, and everything that reads one -----------------------------------------------------


def make_experiment(root) -> None:
    """n1 (the reader), p and q (who publishes in parts) and a coordinator after three rounds; all of it valid."""
    store = DriveStore(root, "x", "n1")
    store.create()
    store.open_config({
        "SEED": 42, "TASKS": ",".join(TASKS), "REWARD": "exact", "MAX_ROUNDS": 3, "MAX_STAGES": 1, "LOCAL_NODES": 1, "MODEL_NAME": "tiny",
        "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "EXTERNAL_FILTER": True, "LOCAL_OVERSAMPLE": 1,
        "LEARNING_RATE": 3e-4, "ANSWER_TAG_SHARE": 0.02, "ROLLOUT_CLEANUP_ENABLED": False,
    })  # fmt: skip
    session, now = "1000000000000-00000000", time.time()
    for node in ("coordinator", "n1", "p", "q"):
        role = "coordinator" if node == "coordinator" else "worker"
        about = {
            "node_id": node,
            "role": role,
            "session": session,
            "registered_at": now,
            "model": "tiny",
            "host": "h",
            "pid": 1,
        }
        store.write_once(f"peers/{node}.{session}.json", about)
        store.heartbeat(node, {"session": session, "round": 2, "state": "running"})
    for t in range(3):
        store.open_round(t, "coordinator")
        for node in ("n1", "p", "q"):
            parts = [{str(i): group_by_hand(100 * t + 10 * i + ord(node[0]), TASKS[i])} for i in range(2)]
            if node == "q":
                [store.publish(t, 0, node, {}, part, part=i, parts=2) for i, part in enumerate(parts)]
            else:
                store.publish(t, 0, node, {"model": "tiny"}, parts[0] | parts[1])
            figures = {
                "completions": 8,
                "local_groups": 2,
                "external_groups": 2,
                "flat_groups": 1,
                "held_out": 0.5,
            }
            store.submit_reward(
                t, 0, node, {"reward": 0.25, **figures, "externals": [[t, 0, "p", 0], [t, 0, "q", 1]]}
            )
            store.write_once(
                f"winners/round_{t:06d}/{node}.json",
                {"round": t, "node_id": node, "winner": "p", "mean_rewards": {"p": 1}},
            )
            store.append(f"logs/{node}/metrics.jsonl", '{"round": 1}\n')
    for name in ("checkpoints/round_000002/n1.pt", "models/p/config.json"):
        (store.base / name).parent.mkdir(parents=True, exist_ok=True)
        (store.base / name).write_bytes(b"{}")
    (Path(root) / "warmstart").mkdir()
    (Path(root) / "warmstart/0.claim").write_text(
        json.dumps({"host": "h", "boot_id": None, "pid": 1, "pid_start": "1"})
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    make_experiment(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "draw", lambda *args: False)
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
    """What node n1's trainer holds after round 2, with a courier that answers at once and a log that is a list."""
    defaults = {
        "NUM_TRAIN_SAMPLES": "2",
        "NUM_TRANSPLANT_TREES": "4",
        "FETCH_TIMEOUT_SECONDS": "0",
        "TASKS": ",".join(TASKS),
        "MODEL_NAME": "tiny",
    }
    config = read_config(
        {"NODE_ID": "n1", "GDRIVE_PATH": str(root), "EXPERIMENT_NAME": "x", **defaults, **environ}
    )[0]
    store, events, posted = DriveStore(root, "x", "n1", patience=0.0), [], []
    courier = SimpleNamespace(
        outage_since=None,
        ask=lambda function, *args, timeout: function(*args),
        post=lambda *job, **_: posted.append(job),
    )
    log = SimpleNamespace(event=lambda kind, text, **data: events.append((kind, text)), events=events)
    node = Node("n1", None, None, session="1000000000000-00000000")
    question = sapo.make_question(TASKS[0], 1)
    node.rollouts = [Rollout(question, sapo.Group([1], [[2]], [0.0]), ["x"], [True])]
    return Run(
        config,
        store,
        courier,
        CODEC,
        Liveness(store, 300),
        [node],
        log,
        SimpleNamespace(),
        TASKS,
        None,
        done=1,
        clock=2,
    )


def look_at_everything(root) -> Counter:
    """Every function that reads the folder, once; returns what was counted as rejected. Exceptions are the test's business."""
    store = DriveStore(root, "x", "reader", patience=0.0)
    live, rejected = Liveness(store, 300.0), Counter()
    with contextlib.suppress(StoreError):  # an experiment's own unreadable clock: said, never guessed around
        assert -1 <= store.current_round() < 10**6
        experiment_status(store)
        text = dashboard(store, live, reward_rows(store))
        assert len(text) < 20_000 and all(c.isprintable() or c == "\n" for c in text), "it goes to a terminal"
    assert store.highest_rewarded_round() >= -1
    for round_ in range(4):
        store.opened_by(round_)
        for node in ("n1", "p", "q"):
            groups, complete, reasons = store.fetch(round_, 0, node)
            rejected += reasons
            assert all(
                isinstance(reason, str) and count > 0 for reason, count in reasons.items()
            ) and complete in (True, False)
            for group in groups:
                assert len(group["completions"]) in GROUP_SIZES and set(group) == {
                    "key",
                    "task",
                    "seed",
                    "prompt",
                    "completions",
                }
                assert all(
                    len(c["response"]) <= MAX_RESPONSE_CHARS and type(c["finished"]) is bool
                    for c in group["completions"]
                )
            reward = store.reward(round_, 0, node)
            assert reward is None or 0 <= reward["reward"] <= 1
        store.publishers(round_, 0), store.rewarded(round_, 0)
    sessions = store.sessions()
    for node in {"n1", "p", "q", "coordinator", *sessions}:
        (
            store.registration(node, sessions.get(node, "1000000000000-00000000")),
            store.read_heartbeat(node),
            store.checkpoints(node),
        )
    live.refresh()
    for node in sessions:
        live.is_live(node), live.has_left(node), live.silence(node), live.about(node)
    json.dumps(reward_rows(store), allow_nan=False)
    assert all(
        isinstance(problem, str) and len(problem) < 1000 for problem in validate_experiment(store, 3, 3)
    )
    with contextlib.suppress(ValueError):  # config.json: documented, the reason is the answer
        if summary := summarize(store):
            rows = compare([summary, summary])
            coordinator.report_text(rows, 0.3)
    assert list_experiments(root) in (["x"], [])
    with contextlib.redirect_stdout(io.StringIO()):
        for role in ("validate", "monitor", "report"):
            environ = {"NODE_ROLE": role, "GDRIVE_PATH": str(root), "EXPERIMENT_NAME": "x", "NODE_ID": "r"}
            assert sapo.main(environ) in (0, 1, 2)
        sapo.compare_experiments(root), sapo.list_experiments(root)
        with contextlib.suppress(ConfigError, StoreError):
            sapo.join_experiment(
                read_config({**environ, "NODE_ROLE": "worker", "TASKS": "auto", "MODEL_NAME": "tiny"})[0],
                store,
                print,
            )
    train_beside(root)
    claim = Path(root) / "warmstart/0.claim"
    assert sapo.take_claim(claim) in (True, False) and sapo.read_weights(claim, 10**6) is None
    return rejected


def train_beside(root, **environ):
    """What a worker's round reads: the clock, the peers' rollouts, its own earlier reward. Returns (drawn, figures, run)."""
    run, t = reading_run(root, **environ), 2
    [node] = run.nodes
    with contextlib.suppress(StoreError):
        sapo.look_around(run)
    sapo.somebody_is_ahead(run), sapo.newest_peer_file(run, node, t)
    drawn, figures = sample_external(run, node, t, 0)
    assert len(drawn) <= 4 and len({r.key for r in drawn}) == len(drawn) and figures["rejected"] >= 0
    assert (figures["rejected"] > 0) == any(kind == "reject" for kind, _ in run.log.events)
    run.replay_until = 2
    again, _ = sample_external(run, node, 1, 0)
    assert all(isinstance(r, Rollout) for r in again)
    return drawn, figures, run


# -------- Files that are no such files ------------------------------------------------------------------------------

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
    st.sampled_from(
        [
            "round",
            "stage",
            "node_id",
            "reward",
            "timestamp",
            "rollouts",
            "format",
            "0",
            "1",
            "00",
            "time",
            "state",
        ]
    ),
    st.text(max_size=5),
)
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
    for key, child in (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    ):
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
    changed = st.builds(
        with_change,
        st.just(valid),
        st.sampled_from(paths),
        values,
        st.sampled_from(["set"] * 4 + ["delete", "move"]),
    )
    return st.one_of(changed, changed, changed, cut, flip, values.map(encode), st.binary(max_size=40))


def near_misses(valid: bytes):
    """Every field of a small file in turn set to each of a dozen values that are nearly right, or huge, or for a terminal."""
    tree = json.loads(valid)
    for path in paths_in(tree):
        value = tree
        for key in path:
            value = value[key]
        if not any(
            isinstance(key, int) and key > 0 for key in path[:-1]
        ):  # one element of a list stands for all
            like = [float(value)] if isinstance(value, int | float) else [[["a"]]]
            for other in (
                None,
                True,
                -1,
                10**400,
                str(value),
                [value],
                {"a": value},
                "../../x",
                "@1e400@",
                "@escape@",
                "@text@",
                *like,
            ):
                yield with_change(valid, path, other, "set")


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind not in ("rollouts", "part", "metrics")])
def test_no_reader_trips_over_a_nearly_valid_file(root, kind):
    path, count = root / FILES[kind], 0
    valid, failed = path.read_bytes(), {}
    for content in near_misses(valid):
        path.write_bytes(content)
        count += 1
        try:
            with at_most():
                look_at_everything(root)
        except Exception as error:
            failed[f"{type(error).__name__}: {error!s:.100}"] = content[:400]
    path.write_bytes(valid)
    shutil.rmtree(root / "reports", ignore_errors=True)
    print(kind, count, "near misses")
    assert not failed


@pytest.mark.parametrize("kind", FILES)
def test_no_reader_trips_over_a_damaged_file(root, kind):
    path = root / FILES[kind]
    valid = path.read_bytes().splitlines()[0] if kind == "metrics" else path.read_bytes()
    counts = Counter()

    @many
    @given(mutants(valid))
    def damaged(content):
        path.write_bytes(content)
        with at_most():
            rejected = look_at_everything(root)
        counts["examples"] += 1
        counts["rejected"] += bool(rejected)
        if kind in ("rollouts", "part"):  # used, or refused with a reason: nothing disappears
            groups, _, reasons = DriveStore(root, "x").fetch(2, 0, path.stem if kind == "rollouts" else "q")
            wanted = read_groups(content) if kind == "rollouts" else None
            assert reasons or wanted is None or len(groups) == wanted

    try:
        damaged()
    finally:
        shutil.rmtree(root / "reports", ignore_errors=True)
        path.write_bytes(valid)
    print(kind, dict(counts))
    assert look_at_everything(root) == Counter()


def read_groups(content: bytes) -> int | None:
    """How many groups a rollout file seems to have, by plain json; None if it says nothing of the kind."""
    try:
        return len(json.loads(content)["rollouts"])
    except Exception:
        return None


@settings(many, max_examples=1500)
@given(
    mutants(json.dumps(group_by_hand(1) | {"peer_id": "p"}).encode()),
    st.sampled_from(["0", "1", "00", "x"]),
    st.integers(0, 5),
)
def test_a_rollout_file_is_used_whole_or_refused_whole_and_never_costs_more_than_its_size(
    content, index, format_
):
    head = (
        b'{"format": 1, "peer_id": "p", "round": 1, "stage": 0, "timestamp": 1.0, "rollouts": {"%s": '
        % index.encode()
    )
    file = head + content + b"}}"
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
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=tmp_path, capture_output=True, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    print(done.stdout[-500:])
    assert done.returncode == 0, done.stderr[-4000:]


OUTSIDE = {
    "format": 1,
    "peer_id": "p",
    "round": 2,
    "stage": 0,
    "timestamp": 1.0,
    "rollouts": {},
    "secret": "of this machine",
}


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

    coordinator.draw = lambda *args: False
    sapo.torch.isfinite(torch.ones(1))  # what is loaded late is loaded now
    root, outside = Path(root), Path(root).parent / "outside.json"
    outside.write_text(json.dumps(OUTSIDE))
    if os.getuid() == 0:
        for path in (root, outside, *root.rglob("*")):
            os.chown(path, 65534, 65534)
        os.setuid(65534)
    look_at_everything(root)
    size = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if Path("/proc").is_dir()
        else 1 << 40
    )
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
                except PermissionError:  # of all the peers' files at once: an outage, not a peer's file
                    assert place != path and "closed" in kind
                except Exception as error:
                    raise AssertionError(f"{place}: {kind}") from error
                met, slowest = met + 1, max(slowest, time.monotonic() - began)
                if (
                    place == path
                    and name == FILES["rollouts"]
                    and kind not in ("dangling", "loop")
                    and "folder" not in kind
                ):
                    assert rejected, kind
            kept.rename(place)
    assert look_at_everything(root) == Counter()
    print(f"{met} obstacles met, {slowest:.1f} s for the slowest look")


# -------- Names -------------------------------------------------------------------------------------------------

odd = st.sampled_from([*"/\\.:~\0\n\t *?%$", "..", "../", "∕", "⁄", "／", "＼", "﹨", "․", "‥", "…", "。", "\u202e", "\u200b", "\u0301", "\ud800", "\u0130", "K",
                       "con", "PRN", "aux", "nul", "COM1", "com¹", "lpt9", "CONIN$", ".json", ".JSON", ".tmp", ".pt", "coordinator", "C:", "file://"])  # fmt: skip
fine = st.sampled_from([*"ab01._-", "node_1", ".json", ".1000000000000-00000000"])
name_texts = st.one_of(
    st.text(max_size=12),
    st.lists(odd | fine | st.characters(), max_size=5).map("".join),
    st.lists(fine, max_size=8).map("".join),
)


@settings(many, max_examples=1500)
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
    assert (
        name.isascii()
        and unicodedata.normalize("NFKC", name) == name
        and name.strip() == name
        and name.isprintable()
    )
    assert Path("/base", name).resolve().parent == Path("/base") and PureWindowsPath(
        "C:/base", name
    ).parent == PureWindowsPath("C:/base")
    assert (
        not PureWindowsPath(name).is_reserved()
        and not name.endswith((".", " "))
        and len(name + ".1000000000000-00000000.json") < 255
    )
    with contextlib.suppress(ConfigError):  # "coordinator" is taken, 61 characters leave no room for _0
        config = read_config(environ)[0]
        assert (
            config.EXPERIMENT_NAME if variable == "EXPERIMENT_NAME" else config.NODE_ID
        ) == name or name == "auto"
        for node in [f"{config.NODE_ID}_{i}" for i in (0, 255)] if local else [config.NODE_ID]:
            assert check_name(node, "NODE_ID") == node
        assert DriveStore("/drive", config.EXPERIMENT_NAME).base == Path(
            "/drive/experiments", config.EXPERIMENT_NAME
        )


@settings(many, max_examples=200)
@given(st.lists(name_texts.filter(lambda n: len(n) < 40), min_size=1, max_size=4, unique_by=str.lower))
def test_every_node_reads_back_as_itself_and_no_other(tmp_path_factory, names):
    store, nodes = DriveStore(tmp_path_factory.mktemp("names"), "x", "n1", patience=0.0), []
    store.create()
    for name in names:
        with contextlib.suppress(ValueError):
            nodes.append(check_name(name, "NODE_ID"))
    sessions = {node: store.register(node, "worker", {}) for node in nodes}
    for i, node in enumerate(nodes):
        store.publish(1, 0, node, {}, {"0": group_by_hand(i)}, **({"part": 0, "parts": 1} if i % 2 else {}))
        store.submit_reward(1, 0, node, {"reward": 0.5})
        store.heartbeat(node, {"session": sessions[node]})
    assert store.publishers(1, 0) == store.rewarded(1, 0) == sorted(nodes) and store.sessions() == sessions
    for i, node in enumerate(nodes):
        [group], complete, rejected = store.fetch(1, 0, node)
        assert (group["key"], group["seed"], complete, rejected) == ((1, 0, node, 0), i, True, Counter())
        assert (
            store.registration(node, sessions[node])["node_id"]
            == store.read_heartbeat(node)["node_id"]
            == node
        )


@settings(many, max_examples=100)
@given(st.lists(st.binary(min_size=1, max_size=12).filter(lambda b: not set(b"/\0") & set(b) and b not in (b".", b"..")), min_size=1, max_size=3), st.sampled_from(["p", "p.json", "round_000007", "round_000001", "stage_0", "0000.json"]), st.sampled_from(["\n", " (1)", "~", "\u0661", "\\", "\x1b[2J", ""]))  # fmt: skip
def test_files_with_odd_names_change_nothing_that_is_read(tmp_path_factory, names, stem, tail):
    root = tmp_path_factory.getbasetemp() / "odd names"
    if not root.exists():
        make_experiment(root)
    store, before = DriveStore(root, "x", patience=0.0), read_state(root)
    places = [Path(folder) for folder, _, _ in os.walk(store.base)]
    odd_names = {*map(os.fsdecode, names), stem + tail} - {stem}
    made = [place / name for place in places for name in odd_names if not (place / name).exists()]
    made = [
        path
        for path in made
        if bytes(path.name, "utf-8", "surrogateescape") not in {b"n1", b"p", b"q"}
        and not looks_like_a_node(path)
    ]
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
    store = DriveStore(root, "x", patience=0.0)
    fetched = [store.fetch(t, 0, node) for t in range(3) for node in store.publishers(t, 0)]
    return (
        store.current_round(),
        store.sessions(),
        store.rounds("rollouts"),
        store.stages("rollouts", 1),
        fetched,
        reward_rows(store),
    )


# -------- What a peer may gain --------------------------------------------------------------------------------------


def rewrite(root, path, change):
    data = json.loads((root / path).read_text())
    change(data)
    (root / path).write_bytes(encode(data))


@many
@given(
    st.sampled_from(["answer", "reward", "model", "tasks", "reasoning_gym", "timestamp", "new"]),
    values,
    st.integers(0, 3),
)
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
        groups, _, reasons = DriveStore(root, "x").fetch(2, 0, "p")
        drawn, figures, _ = train_beside(root)
    finally:
        path.write_bytes(valid)
    if reasons:  # not even a claim may be out of bounds
        assert groups == [] and figures["rejected"] == 1 and all(r.key[:3] != (2, 0, "p") for r in drawn)
    else:
        assert [unlabelled(r) for r in drawn] == expected


def unlabelled(rollout: Rollout):
    return (
        rollout.key,
        rollout.question.text,
        rollout.texts,
        rollout.finished,
        rollout.group.rewards,
        rollout.group.prompt,
        rollout.group.completions,
    )


@settings(many, max_examples=60)
@given(st.lists(st.integers(0, 30), max_size=4), st.integers(1, 4), st.integers(0, 6), st.integers(0, 10**6))
def test_each_peer_has_a_fair_share_and_the_draw_is_bounded(tmp_path_factory, groups_of, i, j, seed):
    root = tmp_path_factory.mktemp("shares")
    store = DriveStore(root, "x", "writer")
    store.create()
    for t in (1, 2):
        for n, count in enumerate(groups_of):
            store.publish(
                t, 0, f"p{n}", {}, {str(k): group_by_hand(1000 * n + 100 * t + k) for k in range(count)}
            )
    run = reading_run(root, NUM_TRAIN_SAMPLES=str(i), NUM_TRANSPLANT_TREES=str(j), SEED=str(seed))
    drawn, figures = sample_external(run, run.nodes[0], 2, 0)
    available = [sum(min(i, count) for count in groups_of)] * 2  # of this round, and of the one before
    assert (
        len(drawn) == min(j, sum(available))
        and len({r.key for r in drawn}) == len(drawn)
        and figures["rejected"] == 0
    )
    assert max(Counter(r.key[:3] for r in drawn).values(), default=0) <= i
    assert sum(r.key[0] == 2 for r in drawn) == min(j, available[0]), "this round's come first"
    run.nodes[0].trained.update(r.key for r in drawn)
    again, _ = sample_external(run, run.nodes[0], 2, 0)
    assert not {r.key for r in again} & {r.key for r in drawn}


@pytest.mark.parametrize("parts", [False, True])
def test_ten_thousand_groups_are_drawn_no_more_often_than_one_peers_share(tmp_path, parts):
    store = DriveStore(tmp_path, "x", "writer")
    store.create()
    for n in range(4):
        store.publish(1, 0, f"honest{n}", {}, {str(k): group_by_hand(10 * n + k) for k in range(2)})
    flood = {str(k): group_by_hand(1000 + k) for k in range(10_000 if not parts else 500)}
    if parts:  # 500 files of their own, and 9,500 that repeat the first
        for k, group in flood.items():
            store.publish(1, 0, "flood", {}, {k: group}, part=int(k), parts=10_000)
        folder = store.base / "rollouts/round_000001/stage_0/flood"
        for k in range(500, 10_000):
            os.link(folder / "0000.json", folder / f"{k:04d}.json")
    else:
        store.publish(1, 0, "flood", {}, flood)
    drawn, began, tried = Counter(), time.monotonic(), 60
    with at_most(120):
        first = run = reading_run(tmp_path, NUM_TRANSPLANT_TREES="5")
        for seed in range(tried):
            drawn.update(r.key[2] for r in sample_external(run, run.nodes[0], 2, 0)[0])
            run = reading_run(tmp_path, SEED=str(seed), NUM_TRANSPLANT_TREES="5")
            run.store, run.verified = first.store, first.verified  # what was read once is not read again
    if not parts:
        assert drawn["flood"] == 0, "more groups than a file may hold"
    assert drawn.total() == tried * 5 and drawn["flood"] < tried * 5 * 0.3, (
        "two of ten in the pool: a fifth of what is drawn"
    )
    print(dict(drawn), f"{time.monotonic() - began:.1f} s")


# -------- What a stranger's text may do ------------------------------------------------------------------------------

watched = []
sys.addaudithook(
    lambda event, arguments: (
        watched is not None and ARMED and event in EVENTS and watched.append((event, arguments[:1]))
    )
)
ARMED, EVENTS = (
    False,
    (
        "exec",
        "compile",
        "open",
        "os.system",
        "subprocess.Popen",
        "os.exec",
        "os.fork",
        "socket.connect",
        "import",
    ),
)
payloads = st.sampled_from([
    "__import__('os').system('touch PWNED')", "open('PWNED','w')", "().__class__.__base__.__subclasses__()", "exec('1')", "{{7*7}}", "${jndi:ldap://x}",
    "[x for x in [1]]", "lambda: 1", "$(touch PWNED)", "`id`", "!!python/object/apply:os.system ['id']", "%n%s", "{0.__class__}", "cos\nsystem\n(S'id'\ntR.",
])  # fmt: skip


@pytest.fixture(scope="module")
def warm():
    """One question of every task, scored once: imports and caches are warm before anything is watched."""
    questions = [sapo.make_question(task, seed) for task in TASK_TABLE for seed in (3, 99)]
    for question in questions:
        for text in (question.answer, "1", "x ∧ y", "1/2", "[[1]]"):
            sapo.score(question, f"<answer>{text}</answer>"), CODEC.prompt(question)
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
    pieces = data.draw(
        st.lists(payloads | st.just(question.answer) | st.text(max_size=10), min_size=2, max_size=2)
    )
    texts = [f"<answer>{form.format(*pieces)}</answer>", "".join(pieces)]
    raw = {"task": question.task, "seed": question.seed, "prompt": question.text, "key": (0, 0, "p", 0)}
    raw["completions"] = [{"response": text, "finished": True} for text in texts]
    run = SimpleNamespace(
        tasks=list(TASK_TABLE),
        codec=replace(CODEC, max_completion=10**5),
        config=SimpleNamespace(REWARD=kind),
    )
    watched.clear()
    ARMED = True
    try:
        rollout = verify_uncached(run, raw)
    finally:
        ARMED = False
    assert watched == []
    assert all(0 <= reward <= 1 for reward in rollout.group.rewards) and rollout.texts == texts


CONTROLS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "[INST]",
    "</s>",
    "<s>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<tool_call>",
    "<pad>",
]
CHAT = tiny_codec(
    0,
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    CONTROLS,
)


@settings(many, max_examples=1000)
@given(st.lists(st.sampled_from([*CONTROLS, "<eos>", "<unk>", "system\n", "assistant\n", "\n", "<answer>", "</answer>", "{{ m }}", "{% raw %}"]) | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6), min_size=1, max_size=12).map("".join), st.booleans())  # fmt: skip
def test_control_tokens_of_any_template_are_plain_text_in_a_strangers_completion(text, finished):
    controls = set(CHAT.tokenizer.convert_tokens_to_ids([*CONTROLS, "<eos>", "<unk>"]))
    question = sapo.make_question(TASKS[0], 1)
    before = CHAT.prompt(question)
    raw = {
        "task": TASKS[0],
        "seed": 1,
        "prompt": question.text,
        "key": (0, 0, "p", 0),
        "completions": [{"response": text, "finished": finished}] * 2,
    }
    rollout = verify_uncached(
        SimpleNamespace(tasks=TASKS, codec=CHAT, config=SimpleNamespace(REWARD="exact")), raw
    )
    if isinstance(rollout, str):
        assert rollout.startswith("completion empty or over") and (
            text == "" and not finished or len(text) > 200
        )
        return
    for ids in rollout.group.completions:
        body = ids[:-1] if finished else ids
        assert not set(body) & controls and CHAT.decode(body) == text and (ids[-1] == CHAT.eos_id) == finished
    assert rollout.group.prompt == before == CHAT.prompt(question)


@pytest.mark.parametrize("length", [MAX_RESPONSE_CHARS, MAX_RESPONSE_CHARS + 1, 10**6])
@pytest.mark.parametrize("piece", ["x", "<answer>", " ", "9", "\U0001f600", "(", "</answer>", "<eos>"])
def test_a_million_characters_cost_bounded_time_and_memory(tmp_path, piece, length):
    text = (piece * length)[:length]
    groups = [group_by_hand(seed) for seed in range(2)]
    groups[0]["completions"] = [{"response": text, "finished": True}] * 4
    store = DriveStore(tmp_path, "x", "writer")
    store.create()
    store.publish(1, 0, "p", {}, {str(k): group for k, group in enumerate(groups)})
    began = time.process_time()
    tracemalloc.start()
    run = reading_run(tmp_path)
    drawn, figures = sample_external(run, run.nodes[0], 2, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert figures["rejected"] == 1 and len(drawn) == (
        length == MAX_RESPONSE_CHARS
    )  # one group, or the whole file
    reasons = ("over 256 tokens",) if length == MAX_RESPONSE_CHARS else ("response too long", "larger than")
    assert [any(reason in text for reason in reasons) for _, text in run.log.events] == [True]
    assert peak < 200 << 20 and time.process_time() - began < 20
    began = time.process_time()
    for task in TASK_TABLE:  # a model of one's own may write as much
        assert sapo.score(sapo.make_question(task, 3), text) == 0
    assert time.process_time() - began < 20


# -------- The warm start ------------------------------------------------------------------------------------------------

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
        self.config = SimpleNamespace(vocab_size=7)

    def tie_weights(self):
        pass


@settings(many, max_examples=400)
@given(weight_files)
def test_any_warm_start_file_is_loaded_replaced_or_refused_by_name(tmp_path_factory, content):
    root = tmp_path_factory.getbasetemp() / "warm start"
    path = root / "any.safetensors"
    root.mkdir(exist_ok=True)
    path.write_bytes(content)
    weights = sapo.read_weights(path, 10**6)
    assert weights is None or all(w.is_floating_point() and torch.isfinite(w).all() for w in weights.values())
    assert sapo.read_weights(path, len(content) - 1) is None
    config = read_config(
        {"NODE_ID": "n", "GDRIVE_PATH": str(root), "MODEL_NAME": "tiny", "WARM_START_STEPS": "1"}
    )[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sapo, "warm_start", lambda *_: None)
        sapo.load_warm_start(TwoTensors(), None, config, TASKS, str)
        [made] = (root / "warmstart").glob("*.safetensors")
        made.write_bytes(content)
        model = TwoTensors()
        with contextlib.suppress(StoreError):
            sapo.load_warm_start(model, None, config, TASKS, str)
            assert all(torch.isfinite(w).all() for w in model.state_dict().values())
        made.unlink()
