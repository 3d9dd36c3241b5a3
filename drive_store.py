"""The shared folder: all that nodes tell one another goes through the files written and read here.

Write-once  What the swarm relies on (clock, registrations, rollouts, rewards, config) goes to a temp file,
            which is linked to its name: a reader sees no file or the whole one, and the first one counts
            (the last of two at once on a storage without hard links). One that is not valid is replaced.
Rewritten   Heartbeats, checkpoints, models and what is for people: a temp file, then a rename.
Appended    Logs. A line that a kill tore is closed before the next one.
Tolerant    A stranger may write anything. Readers bound size, type and depth; they parse or raise BadFile.
Inside      Nothing is read, written, moved or deleted through a link below the experiment's folder.
Impatient   A call does its work once or raises OSError, and may be made again. Who waits for the folder is
            `Patient` (coordinator.py). An absent file is an answer (None, no names), not an OSError, as long
            as the experiment's folder itself is there.

Across machines a stale or partial file may show for a while; it does not parse, and is read again later.
"""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
from collections import Counter
from pathlib import Path

FORMAT = 1  # of rollout files
LAYOUT = 3  # of an experiment's folder; stands in config.json
MAX_JSON_BYTES = 8 << 20  # a rollout file of 64 x 64 completions of 256 tokens is about 4 MiB
MAX_JSON_PARTS = 400_000  # commas and brackets: 8 MiB of "[]," would parse to a gigabyte of objects
MAX_ABOUT_BYTES = 64 << 10  # a registration, heartbeat, reward or config
MAX_LOG_BYTES = 1 << 40  # a log that is larger is a stranger's sparse file: nothing could be appended
MAX_TEXT_CHARS = 32768  # of a question or a completion
GROUP_SIZES = range(2, 65)  # completions per question that a peer may publish; its G may differ from ours
MAX_SEED = 2**53  # seeds travel through JSON: beyond this, readers in other languages would round them
NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM}
LOOK_AGAIN_SECONDS = 2.0  # a heartbeat is not read more often: it is written every few seconds


class StoreError(Exception):
    """Something of this node's or the experiment's own that must be readable is not. Never guessed around."""


class BadFile(ValueError):
    """A file that cannot be used; the text is a short reason, fit for counting."""


def is_name(name: str) -> bool:
    """Whether `name` is safe as a file's name: it is put into paths."""
    return re.fullmatch(r"[A-Za-z0-9_-]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?", name) is not None


def bucket(kind: str, round_: int, stage: int | None = None) -> str:
    """Folder of a round or stage. ("rewards", 12, 0) -> "rewards/round_000012/stage_0"."""
    return f"{kind}/round_{round_:06d}" + ("" if stage is None else f"/stage_{stage}")


def parse_json(data: bytes) -> dict:
    """JSON -> dict. NaN, Infinity, 1e400, lone surrogates, deep nesting and huge integers raise BadFile."""

    def finite(digits):
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"{digits} is no finite number")
        return value

    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_PARTS:
        raise BadFile("too many elements")
    try:
        parsed = json.loads(data.decode("utf-8"), parse_constant=finite, parse_float=finite)
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # "\ud800" parses, but no file can hold it
    except (ValueError, RecursionError) as error:
        raise BadFile("not valid JSON" if data else "empty file") from error
    if not isinstance(parsed, dict):
        raise BadFile("not a JSON object")
    return parsed


def to_json(data: dict, indent: int | None = None) -> bytes:
    """dict -> JSON. indent=1, for people, takes ten times as long: Python's fast encoder has none."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False, indent=indent).encode("utf-8", "replace")


class DriveStore:
    """One experiment's files; experiment=None: what all experiments share (warmstart/, archives/, reports/).

    Paths are relative to `base`. All but `create` raise OSError where it is missing, an unmounted drive;
    `open_config` takes that for an experiment that is new.
    """

    def __init__(self, root, experiment: str | None, owner: str = "reader"):
        self.root = Path(root)
        self.base = self.root if experiment is None else self.root / "experiments" / experiment
        self.tmp = f"tmp/{owner}"
        self.skipped = Counter()  # reason -> how often a file was unusable
        self._seen = set()  # folders that are no links: looked at once, for each look is a call
        self._length_before = {}  # log -> its length before an append that failed
        self._beats = {}  # node -> (when it was read, its heartbeat)
        self._heard = {}  # node -> timestamp of the last rollout or reward file of its that was read

    # -- folders and files

    def create(self) -> None:
        """Make the experiment's folder, and empty this owner's tmp folder: a kill may have left files there.

        Only here: later a missing folder means an unmounted drive. StoreError where nothing can be appended.
        """
        self.base.mkdir(parents=True, exist_ok=True)
        try:
            for _ in range(2):  # an empty file can be appended to everywhere
                self.append(f"{self.tmp}/try", "x\n")
        except (BadFile, PermissionError) as error:
            todo = "an rclone mount needs --vfs-cache-mode writes"
            raise StoreError(f"{self.base}: files cannot be appended to there: {todo}") from error
        self.delete(self.tmp)

    def check_mounted(self) -> None:
        """OSError where the experiment's folder cannot be listed: an unmounted drive."""
        self._seen.clear()  # what is mounted next may hold other folders
        try:
            os.listdir(self.base)
        except OSError as error:
            raise OSError(errno.ENOTCONN, f"{error.strerror}: not mounted?", str(self.base)) from error

    def at(self, path: str, make: bool = False) -> Path:
        """Where a file lies, after a look at each folder on the way; make: what is missing of them is made.

        A link, or a file, in the place of a folder is BadFile; with `make` it makes room.
        """
        *folders, name = path.split("/")
        here = self.base
        for part in folders:
            here = here / part
            if here in self._seen:
                continue
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(here)
            if not stat.S_ISDIR(os.lstat(here).st_mode):
                if not make:
                    raise BadFile("not in a folder of this experiment")
                here.unlink()
                os.mkdir(here)
            self._seen.add(here)
        return here / name

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; none if there is no such folder."""
        try:
            return sorted(os.listdir(self.at(f"{path}/-").parent))
        except (FileNotFoundError, BadFile):
            self.check_mounted()
            return []

    def open(self, path: str, mode: str = "rb"):
        """Open a regular file to read (rb) or append (a+b); a FIFO or a link in its place is BadFile.

        FileNotFoundError if it is not there, another OSError if the experiment's folder is not either.
        """
        flags = os.O_RDONLY if mode == "rb" else os.O_RDWR | os.O_APPEND | os.O_CREAT
        try:
            where = self.at(path, make=mode != "rb")
            descriptor = os.open(where, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except FileNotFoundError:
            self.check_mounted()
            raise
        except OSError as error:
            if error.errno in NOT_A_FILE:
                raise BadFile("not a regular file that this user may use") from error
            raise
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and (mode == "rb" or found.st_size < MAX_LOG_BYTES):
            return os.fdopen(descriptor, mode)
        os.close(descriptor)
        raise BadFile("not a regular file that this user may use")

    def find(self, path: str) -> Path | None:
        """Where a regular file lies that a library will open itself; None if there is none."""
        try:
            full = self.at(path)
            return full if stat.S_ISREG(os.lstat(full).st_mode) else None
        except (FileNotFoundError, BadFile):
            self.check_mounted()
            return None

    def read_bytes(self, path: str, max_bytes: int) -> bytes | None:
        """A file's contents, None if it is not there; BadFile if it is larger than max_bytes."""
        try:
            with self.open(path) as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            return None
        if len(data) > max_bytes:
            raise BadFile(f"larger than {max_bytes} bytes")
        return data

    def read(self, path: str, max_bytes: int = MAX_ABOUT_BYTES) -> dict | None:
        """One JSON object; None if there is no such file, BadFile (counted) if it is unusable.

        A file that fails (EIO, ESTALE) while the experiment's folder can be listed is unusable, too.
        """
        try:
            data = self.read_bytes(path, max_bytes)
            return None if data is None else parse_json(data)
        except OSError as error:
            self.check_mounted()
            why = f"cannot be read ({error.strerror})"
        except BadFile as error:
            why = str(error)
        self.skipped[why] += 1
        raise BadFile(why)

    def read_matching(self, path: str, **identity) -> dict | None:
        """Somebody's file that says of itself what its path says; None if absent, unusable or another's."""
        try:
            data = self.read(path) or {}
        except BadFile:
            return None
        return data if identity.items() <= data.items() else None

    def write(self, path: str, data, sync: bool = False) -> None:
        """Write a file in place of an older one: readers see the old one, or none, or the whole new one.

        data: a dict, bytes, or a function that writes the file at the path it is given. sync: the file is on
        the disk before it has its name. What is no file and has the name is deleted.
        """
        with self._temp_file(data, sync) as temp:
            self._replace(temp, path)

    def write_once(self, path: str, data, is_valid=parse_json, sync: bool = False) -> bool:
        """`write`, unless a valid file has this name already: False then. is_valid: judges a file's bytes.

        Of several writers the first one wins; without hard links, of two at the same moment the last.
        """
        with self._temp_file(data, sync) as temp:
            try:
                os.link(temp, self.at(path, make=True))  # atomic, and fails where there is a file
            except OSError:  # there is one, or the storage has no links
                if self._has_valid(path, is_valid):
                    return False
                self._replace(temp, path)
        return True

    @contextlib.contextmanager
    def _temp_file(self, data, sync: bool):
        temp = self.at(f"{self.tmp}/{secrets.token_hex(8)}", make=True)
        try:
            if callable(data):
                data(temp)
            else:
                temp.write_bytes(to_json(data) if isinstance(data, dict) else data)
            if sync:
                with open(temp, "rb") as file:
                    os.fsync(file.fileno())
            yield temp
        except OSError:
            self._seen.clear()  # perhaps a folder is gone
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temp)

    def _replace(self, temp: Path, path: str) -> None:
        full = self.at(path, make=True)
        try:
            os.replace(temp, full)
        except IsADirectoryError:
            self.delete(path)
            os.replace(temp, full)

    def _has_valid(self, path: str, is_valid) -> bool:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # BadFile, or what is_valid cannot read
            old = self.read_bytes(path, MAX_JSON_BYTES)
            return old is not None and bool(is_valid(old))
        return False

    def append(self, path: str, text: str) -> None:
        """Append lines to a log. What a failed try wrote is cut off first, a line that a kill tore is closed.

        What is no file and has its name is deleted.
        """
        try:
            file = self.open(path, "a+b")
        except BadFile:
            self.delete(path)
            file = self.open(path, "a+b")
        with file:
            size = self._length_before.setdefault(path, os.fstat(file.fileno()).st_size)
            file.truncate(size)
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(("\n" if torn else "").encode() + text.encode("utf-8", "replace"))
        del self._length_before[path]  # a full disk shows when the file is closed

    def delete(self, path: str) -> None:
        """Delete a file, a link, or a folder with all that is in it."""
        with contextlib.suppress(FileNotFoundError, BadFile):
            full = self.at(path)
            if stat.S_ISDIR(os.lstat(full).st_mode):
                shutil.rmtree(full, ignore_errors=True)  # follows no links
                self._seen.clear()
            else:
                os.unlink(full)

    def rounds(self, kind: str) -> list[int]:
        """Rounds that have a folder below `kind` (rollouts, rewards, checkpoints), ascending."""
        return [int(n[6:]) for n in self.names(kind) if re.fullmatch(r"round_\d{6}", n, re.ASCII)]

    def nodes(self, kind: str, round_: int, stage: int) -> list[str]:
        """Nodes that have a file NODE.json in a stage's folder; copies such as "n1 (1).json" do not match."""
        files = [n for n in self.names(bucket(kind, round_, stage)) if n.endswith(".json")]
        return [n[:-5] for n in files if is_name(n[:-5]) and ".sync-conflict-" not in n]

    # -- the experiment, its clock, and who is here

    def open_config(self, settings: dict | None = None) -> dict | None:
        """What the experiment was started with: the file there, else `settings`, which are written.

        StoreError if the file cannot be used, or the folder is another program's.
        """
        try:
            began_with = self.read("config.json") if self.base.is_dir() else None
            if began_with is None and settings:
                data = to_json({"layout": LAYOUT, **settings}, indent=1)
                self.write_once("config.json", data, sync=True)
                began_with = self.read("config.json")  # if two were first at once, one file counts for both
        except BadFile as error:
            todo = "wait, restore it or start a new EXPERIMENT_NAME"
            raise StoreError(f"{self.base / 'config.json'}: {error}; {todo}") from error
        names = self.names("rollouts") if self.base.is_dir() else []
        unpadded = any(re.fullmatch(r"round_\d{1,5}", name) for name in names)
        if unpadded or (began_with is not None and began_with.get("layout") != LAYOUT):
            why = "was written by another program, or another version; nothing was changed"
            raise StoreError(f"{self.base} {why}: start a new EXPERIMENT_NAME")
        return began_with

    def clock(self) -> int:
        """The highest open round, -1 if there is none. Only names count, so one listing is enough."""
        pattern = re.compile(r"round_(\d{6})\.[\w.-]+\.json", re.ASCII)
        found = map(pattern.fullmatch, self.names("state/rounds"))
        return max((int(match[1]) for match in found if match), default=-1)

    def open_round(self, round_: int, by: str) -> None:
        """Declare this round open, and all before it. Two writers of one round do no harm."""
        state = {"round": round_, "stage": 0, "updated_at": time.time(), "updated_by": by}
        self.write_once(f"{bucket('state/rounds', round_)}.{by}.json", state)
        self.write("state/current_state.json", state)

    def sessions(self) -> dict[str, str]:
        """Newest session of every node that ever registered, from names alone: one listing."""
        pattern = re.compile(r"(.+)\.(\d{13}-[0-9a-f]{8})\.json", re.ASCII)
        found = [match.groups() for name in self.names("peers") if (match := pattern.fullmatch(name))]
        return dict(sorted(pair for pair in found if is_name(pair[0])))  # of a node's sessions the last

    def register(self, nodes: list[str], role: str, about: dict) -> str:
        """Announce a new session of these nodes of one process; returns its id.

        It begins with the time in milliseconds, and sorts after every session seen of them.
        """
        previous = max((session for node, session in self.sessions().items() if node in nodes), default="0")
        session = f"{max(int(time.time() * 1000), int(previous[:13]) + 1):013d}-{secrets.token_hex(4)}"
        for node in nodes:
            data = {"node_id": node, "role": role, "session": session, "registered_at": time.time(), **about}
            self.write_once(f"peers/{node}.{session}.json", data)
        return session

    def heartbeat(self, node: str, session: str, round_: int, state: str = "running") -> None:
        """A sign of life; state: running, done or stopped."""
        data = {"node_id": node, "time": time.time(), "session": session, "round": round_, "state": state}
        self.write(f"heartbeats/{node}.json", data)

    def life(self, node: str, session: str, stale_after: float) -> str:
        """ "left" if the node's newest session said goodbye, "live" if a sign of it is fresh, else "dead".

        Signs are its registration, its heartbeat and the last of its files that was read, by the wall clock:
        clocks must agree within stale_after seconds.
        """
        read_at, beat = self._beats.get(node, (-math.inf, {}))
        if time.monotonic() - read_at > min(LOOK_AGAIN_SECONDS, stale_after / 8):
            beat = self.read_matching(f"heartbeats/{node}.json", node_id=node) or {}
            self._beats[node] = time.monotonic(), beat
        if beat.get("session") == session and beat.get("state") in ("done", "stopped"):
            return "left"
        signs = [int(session[:13] or 0) / 1000, beat.get("time"), self._heard.get(node)]
        fresh = any(is_number(sign) and abs(time.time() - sign) < stale_after for sign in signs)
        return "live" if fresh else "dead"

    # -- rollouts, rewards, checkpoints

    def publish(self, round_: int, stage: int, node: str, about: dict, groups: dict) -> bool:
        """Write a rollout file; groups: {"0": {task, seed, prompt, answer, completions}, …}."""
        data = {"format": FORMAT, "peer_id": node, "round": round_, "stage": stage, "timestamp": time.time()}
        place = f"{bucket('rollouts', round_, stage)}/{node}.json"
        data |= {**about, "rollouts": groups}
        return self.write_once(place, data, lambda old: check_rollouts(parse_json(old), round_, stage, node))

    def fetch(self, round_: int, stage: int, node: str, max_bytes: int = MAX_JSON_BYTES) -> list[dict]:
        """A peer's groups, their structure checked, their truth not; BadFile says why there are none."""
        data = self.read(f"{bucket('rollouts', round_, stage)}/{node}.json", max_bytes)
        if data is None:
            raise BadFile("listed, but not there yet")
        groups = check_rollouts(data, round_, stage, node)
        self._heard[node] = data["timestamp"]
        return groups

    def retire_rollouts(self, before_round: int, archive: bool) -> None:
        """Delete, or move to archives/, the rollouts of all rounds before this one."""
        shared = DriveStore(self.root, None)
        for path in [bucket("rollouts", r) for r in self.rounds("rollouts") if r < before_round]:
            if archive:
                aside = shared.at(f"archives/{self.base.name}/{path}", make=True)
                if os.path.lexists(aside):  # of an experiment of this name that was deleted
                    aside = aside.with_name(f"{aside.name}.{secrets.token_hex(4)}")
                with contextlib.suppress(FileNotFoundError):  # another node was faster
                    self.at(path).rename(aside)
            self.delete(path)

    def submit_reward(self, round_: int, stage: int, node: str, data: dict) -> bool:
        """Publish a node's reward of a round and stage; the first one that makes sense counts."""
        about = {"node_id": node, "round": round_, "stage": stage}
        place = f"{bucket('rewards', round_, stage)}/{node}.json"
        data = {**about, "timestamp": time.time(), **data}
        return self.write_once(place, data, lambda old: sane_reward(parse_json(old), **about))

    def rewards(self, round_: int, nodes) -> list[dict]:
        """The reward files of `nodes` in a round that make sense, stage by stage."""
        names = self.names(bucket("rewards", round_))
        rows = []
        for stage in sorted(int(n[6:]) for n in names if re.fullmatch(r"stage_(0|[1-9]\d?)", n, re.ASCII)):
            for node in [n for n in self.nodes("rewards", round_, stage) if n in nodes]:
                found = self.read_matching(f"{bucket('rewards', round_, stage)}/{node}.json") or {}
                row = sane_reward(found, node_id=node, round=round_, stage=stage)
                if row is not None:  # else it may be on its way
                    self._heard[node] = row["timestamp"]
                    rows.append(row)
        return rows

    def checkpoints(self, process: str) -> dict[int, str]:
        """{round: path} of this process's checkpoints, the newest first."""
        name, found = f"{process}.safetensors", {}
        for round_ in reversed(self.rounds("checkpoints")):
            if name in self.names(bucket("checkpoints", round_)):
                found[round_] = f"{bucket('checkpoints', round_)}/{name}"
        return found


# -------- What a stranger's file may look like ------------------------------------------------------------


def is_number(value) -> bool:
    """A finite int or float. True and False are no numbers here, nor is an integer too large for a float."""
    return type(value) in (int, float) and abs(value) < 1e300  # nan is less than nothing


def sane_reward(data: dict, **about) -> dict | None:
    """`about` and the numbers of a reward file (64 at most), None if they make no sense."""
    numbers = [n for n in data if is_number(data[n]) and re.fullmatch(r"\w{1,40}", n, re.ASCII)]
    row = {name: data[name] for name in numbers[:64]} | about
    sane = 0 <= row.get("reward", -1) <= 1 and 0 < row.get("timestamp", 0) < 1e11
    return row if sane and about.items() <= data.items() else None


def check_rollouts(data: dict, round_: int, stage: int, node: str) -> list[dict]:
    """Structure of a rollout file -> its groups; BadFile with the reason if any of it is out of bounds.

    A group: {key: (round, stage, node, index), task, seed, prompt, answer, completions: [{response, finished,
    reward}]}; answer and reward are the writer's own: for people, never to learn from.
    """

    def need(condition, reason):
        if not condition:
            raise BadFile(reason)

    def text(value, longest=MAX_TEXT_CHARS):
        return isinstance(value, str) and len(value) <= longest

    said = [data.get(name) for name in ("format", "peer_id", "round", "stage")]
    need(said == [FORMAT, node, round_, stage], "another format, or not what its path says")
    need(is_number(data.get("timestamp")), "timestamp is no number")
    rollouts, groups = data.get("rollouts"), []
    need(isinstance(rollouts, dict), "no groups")
    for index, group in rollouts.items():
        need(re.fullmatch(r"0|[1-9]\d{0,5}", index, re.ASCII) and isinstance(group, dict), "no group")
        task, seed, prompt, completions = (group.get(k) for k in ("task", "seed", "prompt", "completions"))
        need(text(task, 64) and text(prompt), "task or prompt is no text, or too long")
        need(type(seed) is int and 0 <= seed < MAX_SEED, "seed out of range")  # True is an int, but no seed
        need(isinstance(completions, list) and len(completions) in GROUP_SIZES, "group size out of range")
        for each in completions:
            need(isinstance(each, dict) and is_number(each.get("reward", 0)), "no completion")
            need(text(each.get("response")), "response is no text, or too long (MAX_NEW_TOKENS)")
            need(isinstance(each.get("finished"), bool), "finished is no boolean")
        key, kept = (round_, stage, node, int(index)), ("response", "finished", "reward")
        completions = [{name: each.get(name, 0) for name in kept} for each in completions]
        about = {"key": key, "task": task, "seed": seed, "prompt": prompt}
        groups.append({**about, "answer": str(group.get("answer"))[:64], "completions": completions})
    return groups
