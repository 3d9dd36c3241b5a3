"""The shared folder: everything nodes tell one another goes through the files written and read here.

Contract
    Write-once   What the swarm's logic reads (round clock, registrations, rollouts, rewards, checkpoints, config) is
                 written under a name used once and never changed: temp file in the same folder, fsync, then linked or
                 renamed into place. A reader sees no file or the whole file. The first complete file counts; a second
                 writer of the same name leaves it as it is.
    Rewritten    current_state.json and heartbeats are conveniences for people; logs are appended. On a mounted drive
                 such files may arrive late or never, so nothing depends on them alone.
    Tolerant     A stranger may write anything here. Readers bound size, type and depth, parse or raise BadFile, and
                 never open a file through a link of its own name. One's *own* unreadable state is a StoreError, never "round 0".
    Patient      Every call retries passing faults (EIO, ENOTCONN, ETIMEDOUT, ENOSPC …) with backoff and jitter, then
                 raises OSError. The Courier, one daemon thread, owns these calls, so that training never hangs on one.

Assumption: os.replace and os.link are atomic for readers on one machine. Across machines a stale or partial file may
show for a while; it fails to parse and is read again when its size or time changes.

Layout below GDRIVE_PATH/experiments/EXPERIMENT_NAME: see the tree at the top of the README.
"""

import contextlib
import errno
import json
import math
import os
import random
import re
import secrets
import shutil
import stat
import threading
import time
import zipfile
from collections import Counter, deque
from concurrent import futures
from pathlib import Path

FORMAT = 1  # of rollout files
MAX_JSON_BYTES = 8 << 20  # a rollout file of 64 x 64 completions of 256 tokens is about 4 MiB
MAX_ABOUT_BYTES = 64 << 10  # a registration or heartbeat: kept in memory for every node that anybody invents
MAX_REWARD_BYTES = 1 << 20  # with 4096 externals named about half of that; a report holds all of them
MAX_CACHE_BYTES = 32 << 20  # of JSON text; parsed it may take twenty times that
MAX_GROUPS_PER_FILE = 4096
MAX_RESPONSE_CHARS = 32768
MAX_QUESTION_CHARS = 16384
GROUP_SIZES = range(2, 65)  # completions per question that a peer may publish; its G may differ from ours
MAX_SEED = 2**53  # seeds travel through JSON: beyond this, readers in other languages would round them
COORDINATOR = "coordinator"  # the coordinator's seat: one per experiment, whoever holds it
DEFINITE_ERRNOS = {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


class StoreError(Exception):
    """Something of this node's or the experiment's own that must be readable is not. Never guessed around."""


class BadFile(ValueError):
    """A file that cannot be used; the text is a short reason, fit for counting."""


def check_name(name: str, variable: str) -> str:
    """Return `name` if it is safe as a file name everywhere, else raise ValueError. It becomes part of paths."""
    windows = re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name)
    clash = name.lower().endswith((".", ".json"))  # a folder NODE/ must not look like the file of another node
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", name) or clash or windows:
        raise ValueError(
            f"{variable}={name!r}: use 1 to 64 letters, digits, '.', '_' or '-', not starting or ending with '.', "
            "not ending with .json, and no name that Windows reserves"
        )
    return name


def bucket(round_: int) -> str:
    """Folder of a round. 12 -> "round_000012"."""
    return f"round_{round_:06d}"


def bucket_round(name: str) -> int | None:
    """Inverse of `bucket`, None for any other name. "round_000012" -> 12, "round_000012 (1)" -> None."""
    return int(name[6:]) if re.fullmatch(r"round_\d{6}", name, re.ASCII) else None


def stage_folder(kind: str, round_: int, stage: int) -> str:
    """("rewards", 12, 0) -> "rewards/round_000012/stage_0"."""
    return f"{kind}/{bucket(round_)}/stage_{stage}"


# -------- Reading and writing one file ------------------------------------------------------------------------


def is_passing(error: Exception) -> bool:
    """Whether this is a fault of the folder that may pass, not an answer that will stay the same."""
    return isinstance(error, OSError) and error.errno not in DEFINITE_ERRNOS


def retrying(operation, patience: float, pause: float = 0.05):
    """Run operation(); on a passing OSError try again with doubling, jittered pauses for up to `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return operation()
        except OSError as error:
            if not is_passing(error) or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))  # jitter: nodes must not come back in step
        pause = min(2 * pause, 5.0)


def read_bytes(path, max_bytes: int) -> bytes:
    """Contents of a regular file. Links, FIFOs, devices and larger files raise BadFile; nothing can block on open."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(max_bytes + 1) if is_regular else b""
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES, errno.EPERM):
            raise
        is_regular = False
    if not is_regular:
        raise BadFile("not a regular file that this user may read")
    if len(data) > max_bytes:
        raise BadFile(f"larger than {max_bytes} bytes")
    return data


def parse_json(data: bytes):
    """JSON -> objects. NaN, Infinity, 1e400, duplicate keys, lone surrogates, deep nesting and huge integers raise BadFile."""

    def no_constant(name):
        raise ValueError(f"{name} is no number")

    def finite(digits):
        if math.isinf(value := float(digits)):
            raise ValueError(f"{digits} is too large")
        return value

    def no_duplicates(pairs):
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    try:
        text = data.decode("utf-8")
        parsed = json.loads(text, parse_constant=no_constant, parse_float=finite, object_pairs_hook=no_duplicates)
        if "\\ud" in text or "\\uD" in text:  # "\ud800" parses, but no file or log can hold it
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise BadFile("empty file" if not data else "not valid JSON") from error
    return parsed


def read_json(path, max_bytes: int = MAX_JSON_BYTES) -> dict:
    """One JSON object from a file; raises BadFile with a reason, FileNotFoundError, or OSError."""
    data = parse_json(read_bytes(path, max_bytes))
    if not isinstance(data, dict):
        raise BadFile("not a JSON object")
    return data


def is_readable_json(path) -> bool:
    try:
        read_json(path)
        return True
    except (BadFile, FileNotFoundError):
        return False


def is_whole_zip(path) -> bool:
    """torch.save writes a zip, whose directory comes last: a torn one has none. A FIFO would block whoever opens it."""
    return path.is_file() and zipfile.is_zipfile(path)


def write_atomically(path: Path, write, owner: str, once: bool, is_complete=is_readable_json) -> bool:
    """Write `path` through a temp file: readers see the old file, or none, or the whole new one.

    write: called with a binary file. once=True keeps a complete file that is there already and returns False. The
    folder must exist. A crash leaves at most a temp file named after `owner`, which `sweep_temp_files` removes.
    """
    temp = path.parent / f".{path.name}~{owner}~{os.getpid()}-{secrets.token_hex(4)}.tmp"  # no name holds a ~
    try:
        with open(temp, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if once:
            with contextlib.suppress(OSError):
                os.link(temp, path)  # atomic and exclusive, where the file system has links
                return True
            if os.path.lexists(path) and is_complete(path):
                return False
        os.replace(temp, path)
        return True
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temp)


# -------- The store -------------------------------------------------------------------------------------------


class DriveStore:
    """One experiment's files, as seen by one process. Methods raise OSError when the folder stays unreachable."""

    def __init__(self, root, experiment: str, owner: str = "reader", patience: float = 5.0):
        self.root = Path(root)
        self.base = self.root / "experiments" / check_name(experiment, "EXPERIMENT_NAME")
        self.owner, self.patience = check_name(owner, "NODE_ID"), patience
        self.skipped = Counter()  # reason -> how many files were unusable
        self._parsed = {}  # path -> (parsed write-once file, its size): immutable, so read once
        self._parsed_bytes, self._lock = 0, threading.Lock()
        self._bad = {}  # path -> (size, mtime, reason): looked at again when one of them changes

    # -- plumbing

    def create(self) -> None:
        """Make the experiment's folder. Only here: later a missing folder means that the drive is not mounted."""
        retrying(lambda: self.base.mkdir(parents=True, exist_ok=True), self.patience)

    def _require_base(self) -> None:
        if not self.base.is_dir():  # else an unmounted drive would be refilled on the local disk, unseen by the swarm
            raise OSError(errno.ENOTCONN, "the shared folder is gone (drive not mounted?)", str(self.base))

    def _in_folder_of(self, path: Path, operation):
        """operation() with retries, in a folder made for it; one that vanishes meanwhile is a fault that may pass."""

        def attempt():
            self._require_base()
            try:
                for folder in reversed(path.relative_to(self.base).parents[:-1]):
                    (self.base / folder).mkdir(exist_ok=True)
                return operation()
            except FileNotFoundError as error:
                raise OSError(errno.ESTALE, "the folder vanished during a write", str(path)) from error

        return retrying(attempt, self.patience)

    def _write(self, path: Path, write, once: bool, is_complete=is_readable_json) -> bool:
        return self._in_folder_of(path, lambda: write_atomically(path, write, self.owner, once, is_complete))

    def _copy(self, local_file, path: Path, once: bool, is_complete=is_readable_json) -> bool:
        with open(local_file, "rb") as source:

            def copy(file):
                source.seek(0)  # a second try starts over
                shutil.copyfileobj(source, file, 1 << 20)

            return self._write(path, copy, once, is_complete)

    def write_once(self, path, data: dict) -> bool:
        """Write a JSON file unless a complete one is there; returns whether ours was written."""
        return self._write_json(path, data, once=True)

    def rewrite(self, path, data: dict) -> None:
        """Replace a JSON file that is a convenience for people."""
        self._write_json(path, data, once=False)

    def _write_json(self, path, data: dict, once: bool) -> bool:
        text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=1).encode("utf-8", "replace")
        return self._write(self.base / path, lambda file: file.write(text), once)

    def append(self, path, text: str) -> None:
        """Append to a log; a line torn by a crash is closed first, so that the new ones stay readable."""
        path, data = self.base / path, text.encode("utf-8", "replace")

        def add():
            try:
                with open(path, "a+b") as file:
                    if file.seek(0, os.SEEK_END):
                        file.seek(-1, os.SEEK_END)
                        if file.read(1) != b"\n":
                            file.write(b"\n")
                    file.write(data)
            except PermissionError:  # rclone's default, without a cache: files are written whole or not at all
                known = read_bytes(path, MAX_CACHE_BYTES)
                known += b"" if known.endswith(b"\n") else b"\n"
                write_atomically(path, lambda file: file.write(known + data), self.owner, once=False)

        self._in_folder_of(path, add)

    def read(self, path, max_bytes: int = MAX_JSON_BYTES) -> dict | None:
        """A write-once JSON file, read once and remembered. None if absent; BadFile (counted once) if unusable."""
        path = self.base / path
        if (known := self._parsed.get(path)) is not None:
            return known[0]

        def attempt():
            info = os.lstat(path)
            known = self._bad.get(path)
            if known and known[:2] == (info.st_size, info.st_mtime_ns):
                raise BadFile(known[2])
            try:
                data = read_json(path, max_bytes)
            except BadFile as error:
                self.skipped[str(error)] += path not in self._bad
                self._bad[path] = (info.st_size, info.st_mtime_ns, str(error))
                raise
            with self._lock:  # the courier's thread and the trainer's may read the same file at once
                self._parsed_bytes += info.st_size - self._parsed.pop(path, (None, 0))[1]
                self._parsed[path] = data, info.st_size
                while self._parsed_bytes > MAX_CACHE_BYTES:  # the oldest goes
                    self._parsed_bytes -= self._parsed.pop(next(iter(self._parsed)))[1]
            return data

        return self._unless_absent(attempt, None)

    def read_matching(self, path, max_bytes: int = MAX_JSON_BYTES, **identity) -> dict | None:
        """A write-once JSON file that says of itself what its path says; None if absent, unusable or another's."""
        with contextlib.suppress(BadFile):
            data = self.read(path, max_bytes)
            if data is not None and all(data.get(key) == value for key, value in identity.items()):
                return data
        return None

    def names(self, path) -> list[str]:
        """Names in a folder, sorted; empty if there is no such folder. One directory listing."""
        return self._unless_absent(lambda: sorted(os.listdir(self.base / path)), [])

    def _unless_absent(self, operation, absent):
        """operation() with retries, or `absent` where it finds nothing; OSError if the drive itself is gone."""
        try:
            return retrying(operation, self.patience)
        except OSError as error:
            if is_passing(error):
                raise
        retrying(self._require_base, self.patience)
        return absent

    def rounds(self, kind: str) -> list[int]:
        """Rounds that have a folder below `kind` (rollouts, rewards …), ascending."""
        return [r for r in map(bucket_round, self.names(kind)) if r is not None]

    def stages(self, kind: str, round_: int) -> list[int]:
        """Stages that have a folder in this round, ascending (up to 100)."""
        names = set(self.names(f"{kind}/{bucket(round_)}"))
        return [stage for stage in range(100) if f"stage_{stage}" in names]

    def _node_names(self, path) -> list[str]:
        """Node ids that have a file NODE.json or a folder NODE/ in `path`; copies and temp files do not match."""
        found = set()
        for name in self.names(path):
            with contextlib.suppress(ValueError):
                if name.endswith(".json") or (self.base / path / name).is_dir():
                    found.add(check_name(name.removesuffix(".json"), "file name"))
        return sorted(found)

    # -- the experiment and its clock

    def open_config(self, settings: dict, only_read: bool = False) -> dict:
        """What the experiment was started with: `settings` if this node is the first, else the file that is there."""
        try:
            if self.read("config.json") is None and not only_read:
                self.write_once("config.json", settings)
            return self.read("config.json") or settings
        except BadFile as error:
            path = self.base / "config.json"
            raise StoreError(f"{path}: {error}; restore it or start a new EXPERIMENT_NAME") from error

    def open_round(self, round_: int, by: str) -> None:
        """Declare "round >= round_ is open". Idempotent: two writers of one round do no harm."""
        if not 0 <= round_ < 10**6:
            raise ValueError(f"round {round_}: expected 0 to 999999")
        now = time.time()
        opened = {"round": round_, "opened_by": by, "opened_at": now}
        state = {"round": round_, "stage": 0, "updated_at": now, "updated_by": by}
        if self.write_once(f"state/rounds/{bucket(round_)}.json", opened):  # a straggler must not set the state back
            with contextlib.suppress(OSError):  # for people only
                self.rewrite("state/current_state.json", state)

    def current_round(self) -> int:
        """The highest readable round file, -1 before round 0. StoreError if there are some and none can be read."""
        files = [name.removesuffix(".json") for name in self.names("state/rounds") if name.endswith(".json")]
        rounds = [r for r in map(bucket_round, files) if r is not None]
        for round_ in reversed(rounds):
            if self.read_matching(f"state/rounds/{bucket(round_)}.json", round=round_):
                return round_
        if rounds:
            raise StoreError(
                f"{self.base / 'state/rounds'}: {len(rounds)} round files, none readable. Nothing was changed. "
                "Wait for the drive to sync, restore one, or start a new EXPERIMENT_NAME"
            )
        return -1

    def opened_by(self, round_: int) -> str | None:
        """Who opened a round, None if unknown."""
        return (self.read_matching(f"state/rounds/{bucket(round_)}.json", round=round_) or {}).get("opened_by")

    def highest_rewarded_round(self) -> int:
        """The clock's second witness, for a lost state folder: the last round with a reward that follows on another.

        A lone outlier (over 100 rounds after the one before) (round 999999 after round 12) is ignored. -1 if there are no rewards.
        """
        rounds = [r for r in self.rounds("rewards") if self.stages("rewards", r)]
        while len(rounds) > 1 and rounds[-1] - rounds[-2] > 100:
            rounds.pop()
        return rounds[-1] if rounds else -1

    # -- who is here

    def sessions(self) -> dict[str, str]:
        """Newest session of every node that ever registered, from names alone: one directory listing."""
        newest = {}
        for name in self.names("peers"):
            match = re.fullmatch(r"(.+)\.(\d{13}-[0-9a-f]{8})\.json", name, re.ASCII)
            with contextlib.suppress(ValueError):
                if match:
                    node = check_name(match[1], "file name")
                    newest[node] = max(newest.get(node, ""), match[2])
        return newest

    def register(self, node_id: str, role: str, about: dict) -> str:
        """Announce a new session of this node and return its id; it sorts after every one seen, whatever the clocks."""
        previous = self.sessions().get(node_id, "0")
        start = max(int(time.time() * 1000), int(previous.split("-")[0]) + 1)
        session = f"{start:013d}-{secrets.token_hex(4)}"
        data = {"node_id": node_id, "role": role, "session": session, "registered_at": time.time(), **about}
        self.write_once(f"peers/{node_id}.{session}.json", data)
        return session

    def registration(self, node_id: str, session: str) -> dict | None:
        """What a node said of itself when it registered: role, model, host, pid …"""
        return self.read_matching(f"peers/{node_id}.{session}.json", MAX_ABOUT_BYTES, node_id=node_id)

    def heartbeat(self, node_id: str, data: dict) -> None:
        self.rewrite(f"heartbeats/{node_id}.json", {"node_id": node_id, "time": time.time(), **data})

    def read_heartbeat(self, node_id: str) -> dict | None:
        """The last heartbeat that reached this machine, or None. Never cached: this file changes.

        Nor retried: a mount that remembers another size of a rewritten file fails (EIO) until its listing is renewed.
        """
        try:
            data = read_json(self.base / f"heartbeats/{node_id}.json", MAX_ABOUT_BYTES)
        except (BadFile, OSError):
            retrying(self._require_base, self.patience)
            return None
        return data if data and data.get("node_id") == node_id else None

    # -- rollouts

    def publish(self, round_: int, stage: int, node_id: str, about: dict, groups: dict, part=None, parts=None) -> bool:
        """Write one rollout file; groups: {"0": {task, seed, prompt, answer, completions}, …}.

        part: None writes NODE.json; a number writes NODE/<part>.json, one of `parts` (publish frequency `generation`).
        """
        data = {"format": FORMAT, "peer_id": node_id, "round": round_, "stage": stage, "timestamp": time.time()}
        name = f"{node_id}.json"
        if part is not None:
            data["parts"], name = parts, f"{node_id}/{part:04d}.json"
        path = f"{stage_folder('rollouts', round_, stage)}/{name}"
        return self.write_once(path, {**data, **about, "rollouts": groups})

    def publishers(self, round_: int, stage: int) -> list[str]:
        """Nodes that have published anything for this round and stage. One directory listing."""
        return self._node_names(stage_folder("rollouts", round_, stage))

    def fetch(self, round_: int, stage: int, node_id: str) -> tuple[list[dict], bool, Counter]:
        """One peer's groups of one round: (groups, whether all of them are there, reasons of what was rejected).

        Each group: {key: (round, stage, node, index), task, seed, prompt, completions: [{response, finished, claimed}]},
        its structure checked, its truth not. claimed is the writer's own reward: for people to see, never to learn from.
        """
        mine, rejected, groups, parts = f"{stage_folder('rollouts', round_, stage)}/{node_id}", Counter(), [], None

        def listing():
            try:
                return sorted(os.listdir(self.base / mine))
            except PermissionError as error:  # of one peer's folder: no outage, and nothing to wait for
                raise BadFile("not a folder that this user may read") from error

        try:
            data = self.read(f"{mine}.json")
            if data is not None:
                return check_rollouts(data, round_, stage, node_id), True, rejected
            names = self._unless_absent(listing, [])
            files = [f"{mine}/{name}" for name in names if re.fullmatch(r"\d{4}\.json", name, re.ASCII)]
        except BadFile as error:
            return [], True, Counter({str(error): 1})
        budget = MAX_JSON_BYTES  # all parts together may be no larger than one file
        for path in files:
            try:
                data = self.read(path) or {}
                groups += check_rollouts(data, round_, stage, node_id)
                parts = data.get("parts")
            except BadFile as error:
                rejected[str(error)] += 1
            budget -= self._unless_absent(lambda path=path: os.lstat(self.base / path).st_size, 0)
            if budget < 0 or len(groups) > MAX_GROUPS_PER_FILE:
                break
        unique = {group["key"]: group for group in groups}  # a key must not stand for two groups
        if len(unique) < len(groups):
            rejected["group index used twice"] += len(groups) - len(unique)
        return list(unique.values()), bool(files) and len(files) == parts, rejected

    def clean_rollouts(self, before_round: int, node_ids, archive: bool) -> int:
        """Delete, or move to archives/, what `node_ids` (None: everybody) published before a round; returns a count."""
        done = 0
        for round_ in self.rounds("rollouts"):
            folder = f"rollouts/{bucket(round_)}"
            if round_ >= before_round or (self.base / folder).is_symlink():  # a stranger's link may lead anywhere
                continue
            stages = [stage_folder("rollouts", round_, s) for s in self.stages("rollouts", round_)]
            for stage in [s for s in stages if not (self.base / s).is_symlink()]:
                for node_id in node_ids if node_ids is not None else self._node_names(stage):
                    done += sum(self._retire(f"{stage}/{name}", archive) for name in (f"{node_id}.json", node_id))
            for empty in (*stages, folder):
                with contextlib.suppress(OSError):  # not empty: other nodes' files are theirs to clean
                    (self.base / empty).rmdir()
        return done

    def _retire(self, path, archive: bool) -> int:
        """Delete a file or folder, or move it to archives/; returns 1, or 0 if it is not there."""
        source, target = self.base / path, self.root / "archives" / self.base.name / path

        def retire():
            os.lstat(source)
            if archive and not os.path.lexists(target):  # what was archived first stands
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, target)
            elif source.is_dir() and not source.is_symlink():
                shutil.rmtree(source)
            else:
                source.unlink()
            return 1

        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # never there, or somebody else was faster
            return retrying(retire, self.patience)
        return 0

    # -- rewards and winners

    def submit_reward(self, round_: int, stage: int, node_id: str, data: dict) -> bool:
        """Publish a node's reward of a round and stage; the first one stands."""
        identity = {"node_id": node_id, "round": round_, "stage": stage, "timestamp": time.time()}
        return self.write_once(f"{stage_folder('rewards', round_, stage)}/{node_id}.json", identity | data)

    def reward(self, round_: int, stage: int, node_id: str) -> dict | None:
        """A published reward file, or None if there is none or it makes no sense."""
        path = f"{stage_folder('rewards', round_, stage)}/{node_id}.json"
        data = self.read_matching(path, MAX_REWARD_BYTES, node_id=node_id, round=round_, stage=stage) or {}
        named = ("completions", "local_groups", "external_groups", "flat_groups", "held_out")
        counts = [data.get(key, 0) for key in named]
        sane = all(map(is_number, [data.get("reward"), data.get("timestamp"), *counts])) and 0 <= data["reward"] <= 1
        return {**data, "round": round_, "stage": stage} if sane else None  # True and 1.0 equal 1, but are no index

    def rewarded(self, round_: int, stage: int) -> list[str]:
        """Nodes with a reward file for this round and stage. One directory listing."""
        return self._node_names(stage_folder("rewards", round_, stage))

    # -- checkpoints

    def write_checkpoint(self, round_: int, node_id: str, local_file) -> bool:
        """Copy a finished local file to checkpoints/round/NODE.pt, atomically; the first complete one stands."""
        path = self.base / f"checkpoints/{bucket(round_)}/{node_id}.pt"
        return self._copy(local_file, path, once=True, is_complete=is_whole_zip)

    def checkpoints(self, node_id: str) -> list[tuple[int, Path]]:
        """(round, path) of this node's checkpoints, newest first."""
        paths = [(r, self.base / f"checkpoints/{bucket(r)}/{node_id}.pt") for r in reversed(self.rounds("checkpoints"))]
        return [(r, path) for r, path in paths if retrying(path.is_file, self.patience)]

    def set_aside(self, path: Path) -> None:
        """Rename an own damaged file out of the way; it is kept for its owner to look at."""
        retrying(lambda: os.replace(path, path.with_name(path.name + ".damaged")), self.patience)

    def clean_checkpoints(self, node_id: str, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints of a node."""
        for round_, path in self.checkpoints(node_id)[keep:]:
            self._retire(f"checkpoints/{bucket(round_)}/{node_id}.pt", archive=False)
            with contextlib.suppress(OSError):  # not empty: others' checkpoints
                path.parent.rmdir()

    def copy_folder(self, local, path: str) -> None:
        """Copy the files of a local folder, each atomically (a saved model)."""
        for source in sorted(Path(local).iterdir()):
            self._copy(source, self.base / path / source.name, once=False)

    # -- housekeeping

    def sweep_temp_files(self, node_ids, from_round: int) -> int:
        """Remove temp files that a killed session of these nodes left, in the folders it wrote to; returns how many."""
        folders = ["", "state", "state/rounds", "peers", "heartbeats"]
        folders += [f"{kind}/{n}" for kind in ("logs", "models") for n in node_ids]
        for kind in ("rollouts", "rewards", "winners", "checkpoints"):
            for round_ in [r for r in self.rounds(kind) if r >= from_round]:
                stages = [stage_folder(kind, round_, s) for s in self.stages(kind, round_)]
                folders += [f"{kind}/{bucket(round_)}", *stages, *(f"{s}/{n}" for s in stages for n in node_ids)]
        mine = re.compile(rf"\..+~({'|'.join(map(re.escape, [self.owner, *node_ids]))})~\d+-[0-9a-f]{{8}}\.tmp")
        found = [Path(folder, name) for folder in folders for name in self.names(folder) if mine.fullmatch(name)]
        return sum(self._retire(path, archive=False) for path in found)


def list_experiments(root) -> list[str]:
    """Names of the experiments below GDRIVE_PATH, sorted."""
    names = []
    for path in sorted(Path(root).glob("experiments/*/config.json")):
        with contextlib.suppress(ValueError):  # a folder that this project did not make
            names.append(check_name(path.parent.name, "EXPERIMENT_NAME"))
    return names


# -------- What a stranger's rollout file may look like --------------------------------------------------------


def is_number(value) -> bool:
    """A finite int or float. True and False are no numbers here, nor are integers too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def check_rollouts(data: dict, round_: int, stage: int, node_id: str) -> list[dict]:
    """Structure of a rollout file -> its groups; BadFile with the reason if any of it is out of bounds.

    Extra keys are ignored, so that newer writers stay readable. One bad group rejects the file: a writer that breaks
    the format once is not trusted with the rest.
    """

    def need(condition, reason):
        if not condition:
            raise BadFile(reason)

    need(data.get("format") == FORMAT, "unknown format")
    need(data.get("peer_id") == node_id, "peer_id differs from the file name")
    need((data.get("round"), data.get("stage")) == (round_, stage), "foreign round or stage")
    need(is_number(data.get("timestamp")), "timestamp is no number")
    rollouts = data.get("rollouts")
    need(isinstance(rollouts, dict), "rollouts is no object")
    need(len(rollouts) <= MAX_GROUPS_PER_FILE, "too many groups")
    groups = []
    for index, group in rollouts.items():
        need(re.fullmatch(r"0|[1-9]\d{0,5}", index, re.ASCII), "group index is no number")
        need(isinstance(group, dict), "group is no object")
        task, seed, prompt, completions = (group.get(k) for k in ("task", "seed", "prompt", "completions"))
        need(isinstance(task, str) and len(task) <= 64, "task is no short string")
        need(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < MAX_SEED, "seed out of range")
        need(isinstance(prompt, str) and len(prompt) <= MAX_QUESTION_CHARS, "prompt is no text or too long")
        need(isinstance(completions, list), "completions is no list")
        need(len(completions) in GROUP_SIZES, f"group size outside {GROUP_SIZES[0]}-{GROUP_SIZES[-1]}")
        for completion in completions:
            need(isinstance(completion, dict), "completion is no object")
            need(isinstance(completion.get("response"), str), "response is no text")
            need(len(completion["response"]) <= MAX_RESPONSE_CHARS, "response too long")
            need(isinstance(completion.get("finished"), bool), "finished is no boolean")
            need("reward" not in completion or is_number(completion["reward"]), "reward is no finite number")
        kept = [{"response": c["response"], "finished": c["finished"], "claimed": c.get("reward")} for c in completions]
        key = (round_, stage, node_id, int(index))
        groups.append({"key": key, "task": task, "seed": seed, "prompt": prompt, "completions": kept})
    return groups


# -------- The one thread that waits for the folder ------------------------------------------------------------


class Courier:
    """A daemon thread that owns the folder calls, because a call on a mounted drive can hang for minutes.

    post()  hands over a write; they are carried out in order and kept until they succeed: an outage loses nothing.
    ask()   runs a read, ahead of waiting writes, and waits for it with a deadline.
    beat    is called every `beat_seconds` (the heartbeat).
    report  is called with (event, text) when an outage begins or ends, and when a job fails for good.
    """

    def __init__(self, report=lambda event, text: None, beat=None, beat_seconds: float = 15.0):
        self.report, self.beat, self.beat_seconds = report, beat, beat_seconds
        self.outage_since = None  # monotonic time of the first failed call, None while all is well
        self._outbox, self._questions, self._wake = deque(), deque(), threading.Condition()
        self._retry_at, self._pause, self._next_beat, self._open = 0.0, 1.0, 0.0, True
        self._cannot_write = False  # a full disk can be read: then only a write ends the outage
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        return len(self._outbox)

    def post(self, function, *args, **kwargs) -> None:
        with self._wake:
            self._outbox.append((function, args, kwargs))
            self._wake.notify_all()

    def ask(self, function, *args, timeout: float):
        """function(*args), run by the thread. Raises TimeoutError after `timeout` seconds, or what it raised itself."""
        future = futures.Future()
        with self._wake:
            self._questions.append((future, function, args))
            self._wake.notify_all()
        if not futures.wait([future], timeout).done:
            future.cancel()  # if the thread comes back from its hang, it need not catch up on this
            error = TimeoutError(f"no answer within {timeout:.0f} s")
            self._failed(error)
            raise error
        return future.result()

    def flush(self, timeout: float) -> bool:
        """Wait until everything posted is written; False when `timeout` seconds passed first."""
        with self._wake:
            self._retry_at = 0.0
            self._wake.notify_all()
            return self._wake.wait_for(lambda: not self._outbox, timeout)

    def close(self, timeout: float) -> int:
        """Flush and end the thread; returns how many writes are still pending (0 = nothing lost)."""
        self.flush(timeout)
        with self._wake:
            self._open = False
            self._wake.notify_all()
        self._thread.join(timeout=5.0)
        return self.pending

    def _run(self) -> None:
        while self._open:
            with self._wake:
                now = time.monotonic()
                question = self._questions.popleft() if self._questions else None  # first: somebody waits for it
                job = self._outbox[0] if self._outbox and now >= self._retry_at else None
                beat_due = self.beat is not None and now >= self._next_beat
                if not (question or job or beat_due):
                    self._wake.wait(0.5)
            if question:
                self._answer(*question)
            elif job:
                self._carry_out(*job)
            elif beat_due:
                self._next_beat = now + self.beat_seconds
                self._beat()

    def _beat(self) -> None:
        """A convenience: nothing of it may end this thread. But who only waits learns from it that nothing can be written."""
        try:
            self.beat()
            self._fine(wrote=not self._outbox)
        except Exception as error:
            if is_passing(error):
                self._failed(error, writing=True)

    def _carry_out(self, function, args, kwargs) -> None:
        try:
            function(*args, **kwargs)
            self._fine(wrote=True)
        except Exception as error:
            if is_passing(error):
                self._failed(error, writing=True)
                self._retry_at = time.monotonic() + self._pause * random.uniform(0.5, 1.0)
                self._pause = min(2 * self._pause, 15.0)
                return  # stays at the head of the queue: order is kept
            # a bug, or a folder where a file should be: one job must not stop the queue, nor training
            self.report("error", f"{getattr(function, '__name__', 'job')} failed and was dropped: {error!r}")
        with self._wake:
            self._outbox.popleft()
            self._wake.notify_all()

    def _answer(self, future, function, args) -> None:
        if not future.set_running_or_notify_cancel():  # whoever asked has given up
            return
        try:
            value = function(*args)
        except Exception as error:  # handed to whoever asked
            if is_passing(error):
                self._failed(error)
            future.set_exception(error)
            return
        self._fine(wrote=False)
        self._retry_at = min(self._retry_at, time.monotonic() + 1.0)  # reading works: try writing soon
        future.set_result(value)

    def _failed(self, error: OSError, writing: bool = False) -> None:
        self._cannot_write = self._cannot_write or writing
        if self.outage_since is None:
            self.outage_since = time.monotonic()
            self.report("outage", f"the shared folder fails ({error}); training goes on, writes are queued")

    def _fine(self, wrote: bool) -> None:
        if self._cannot_write and not wrote:
            return
        self._cannot_write, self._pause, self._retry_at = False, 1.0, 0.0  # one success: the queue need not wait any longer
        if self.outage_since is not None:
            seconds = time.monotonic() - self.outage_since
            self.outage_since = None
            text = f"the shared folder is back after {seconds:.0f} s; {self.pending} writes to catch up on"
            self.report("outage over", text)
