"""The shared folder: everything that nodes tell one another goes through the files written and read here.

Write-once  What the swarm's logic reads (clock, registrations, rollouts, rewards, config) is written once: to
            a temp file in tmp/OWNER/, synced, then linked or renamed to its name. A reader sees no file or
            the whole one. The first complete file of a name counts; a second writer leaves it as it is.
Rewritten   current_state.json is for people, heartbeats are one sign of life among others; logs are appended.
            On a mounted drive such files may arrive late or never: nothing depends on them alone.
Tolerant    A stranger may write anything. Readers bound size, type and depth; they parse or raise BadFile.
            One's *own* unreadable config or checkpoint is a StoreError, never "round 0".
Inside      No read, write, rename or delete leaves the folder: no part of a path is followed if it is a link.
Impatient   A call does its work once or raises OSError (but `probe`): no threads, no retries. The caller
            decides how long to go on: the Swarm's thread (coordinator.py) for ever, a reader not at all.

Assumption: link and rename are atomic for readers on one machine. Across machines a stale or partial file may
show for a while; it does not parse, and is read again later. The README shows the folder as a tree.
"""

import contextlib
import errno
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
from collections import Counter
from pathlib import Path, PurePosixPath

FORMAT = 1  # of rollout files
LAYOUT = 3  # of an experiment's folder; stands in config.json
MAX_JSON_BYTES = 8 << 20  # a rollout file of 64 x 64 completions of 256 tokens is about 4 MiB
MAX_JSON_PARTS = 400_000  # commas and brackets: 8 MiB of "[]," would parse to a gigabyte of objects
MAX_ABOUT_BYTES = 64 << 10  # a registration, heartbeat, reward or config
MAX_GROUPS_PER_FILE = 4096
MAX_RESPONSE_CHARS = 32768
MAX_QUESTION_CHARS = 16384
GROUP_SIZES = range(2, 65)  # completions per question that a peer may publish; its G may differ from ours
COUNTS = "completions local_groups external_groups informative_groups held_out grad_norm".split()
FIGURES = """reward timestamp informative_local answer_tag_rate truncated_rate mean_length generated_tokens
    generate_seconds external_pool external_peers rejected external_short wait_seconds loss clip_fraction
    trained_tokens logp_own logp_external external_kept train_seconds""".split()
MAX_SEED = 2**53  # seeds travel through JSON: beyond this, readers in other languages would round them
MAX_GAP = 100  # a round further than this above the one before it is a stranger's joke, not the clock
MAX_CLOCK_SKEW = 3600  # seconds: a session from further ahead is not counted
AFRESH = "start a new EXPERIMENT_NAME"
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hold up who opens it
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EAGAIN}


class StoreError(Exception):
    """Something of this node's or the experiment's own that must be readable is not. Never guessed around."""


class BadFile(ValueError):
    """A file that cannot be used; the text is a short reason, fit for counting."""


def is_name(name: str) -> bool:
    """Whether `name` is safe as a file name everywhere: it is put into paths."""
    for_windows = re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name)
    return re.fullmatch(r"[A-Za-z0-9_-]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?", name) and not for_windows


def check_name(name: str, variable: str) -> str:
    """Return a name that `is_name`, else raise ValueError."""
    if not is_name(name):
        allowed = "1 to 64 letters, digits, '.', '_', '-', no '.' at either end, no name of Windows' own"
        raise ValueError(f"{variable}={name!r}: use {allowed}")
    return name


def bucket(round_: int) -> str:
    """Folder of a round. 12 -> "round_000012"."""
    return f"round_{round_:06d}"


def stage_folder(kind: str, round_: int, stage: int) -> str:
    """("rewards", 12, 0) -> "rewards/round_000012/stage_0"."""
    return f"{kind}/{bucket(round_)}/stage_{stage}"


def last_without_gap(rounds) -> int:
    """The last round before the first gap of more than MAX_GAP; -1 if there is none. {3, 4, 999999} -> 4."""
    last = -1
    for round_ in sorted(rounds):
        last = round_ if last < 0 or round_ - last <= MAX_GAP else last
    return last


def parts_of(data: bytes) -> int:
    """How many elements a JSON text can hold at most."""
    return sum(map(data.count, (b",", b"[", b"{")))


def parse_json(data: bytes, max_parts: int = MAX_JSON_PARTS) -> dict:
    """JSON -> dict. NaN, Infinity, 1e400, lone surrogates, deep nesting and huge integers raise BadFile."""

    def finite(digits):
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"{digits} is no finite number")
        return value

    if parts_of(data) > max_parts:
        raise BadFile("too many elements")
    try:
        parsed = json.loads(data.decode("utf-8"), parse_constant=finite, parse_float=finite)
        if b"\\ud" in data or b"\\uD" in data:  # "\ud800" parses, but no file or log can hold it
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise BadFile("not valid JSON" if data else "empty file") from error
    if not isinstance(parsed, dict):
        raise BadFile("not a JSON object")
    return parsed


def to_json(data: dict, indent: int | None = None) -> bytes:
    """dict -> JSON. indent=1, for people, takes ten times as long: Python's fast encoder has none."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=indent).encode("utf-8", "replace")
    if len(text) > MAX_JSON_BYTES or parts_of(text) > MAX_JSON_PARTS:
        todo = "lower NUM_TRAIN_SAMPLES, NUM_GENERATIONS, MAX_NEW_TOKENS"
        raise BadFile(f"over {MAX_JSON_BYTES} bytes or {MAX_JSON_PARTS} elements are not read: {todo}")
    return text


class DriveStore:
    """One experiment's files; experiment=None: what all experiments share (warmstart/, archives/, reports/).

    Paths are relative to `base`. All but create, can_write, read_heartbeat raise OSError where it is missing.
    """

    def __init__(self, root, experiment: str | None, owner: str = "reader", max_stages: int = 100):
        self.root = Path(root)
        inside = experiment is not None
        self.place = ("experiments", check_name(experiment, "EXPERIMENT_NAME")) if inside else ()
        self.base = self.root.joinpath(*self.place)
        self.owner = check_name(owner, "NODE_ID")
        self.tmp, self.max_stages = f"tmp/{owner}", max_stages
        self.leftovers = []  # names in self.tmp when this process began
        self.skipped = Counter()  # reason -> how often a file was unusable
        self._rewards = {}  # (round, stage, node) -> a recent reward file: write-once, so it is read once
        self._sessions = {}  # name in peers/ -> (node, session), or None; judged at first sight
        self._figures = dict.fromkeys((*COUNTS, *FIGURES))  # names of figures, see sane_reward

    # -- folders and files

    def create(self) -> None:
        """Make the experiment's folder. Only here: later a missing one means an unmounted drive."""
        self.root.mkdir(parents=True, exist_ok=True)
        with DriveStore(self.root, None, self.owner).folder("/".join(self.place), make=True):
            pass
        for part in ("peers", "state", "rollouts", "rewards"):
            with self.folder(part, make=True):
                pass
        self.leftovers = self.names(self.tmp)

    @contextlib.contextmanager
    def folder(self, path: str = "", make: bool = False, look: bool = False):
        """Descriptor of a folder, opened part by part, never through a link. make: missing parts are made.

        look: list a folder before opening a part of it (the first part is there by now). An NFS client
        that was asked for a missing name says "missing" for half a minute; a listing refreshes it.
        """

        def enter(part, outer=None):
            fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | NO_LINK, dir_fd=outer)
            opened.callback(os.close, fd)
            return fd

        with contextlib.ExitStack() as opened:
            try:
                fd = enter(os.path.realpath(self.root))  # the user's own path may hold links
                for part in self.place:
                    fd = enter(part, fd)
            except FileNotFoundError as error:
                gone = "no such experiment or shared folder (drive not mounted?)"
                raise OSError(errno.ENOTCONN, gone, str(self.base)) from error
            for depth, part in enumerate(PurePosixPath(path).parts):
                if look and depth > 0 and part not in os.listdir(fd):
                    raise FileNotFoundError(errno.ENOENT, "no such folder", path)
                try:
                    fd = enter(part, fd)
                except OSError as error:
                    if not make or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                        raise
                    if self.place and error.errno != errno.ENOENT:  # never in the user's own folder
                        os.unlink(part, dir_fd=fd)  # a file or link in the place of a folder of ours
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                    fd = enter(part, fd)
            yield fd

    def names(self, path: str, look: bool = True) -> list[str]:
        """Names in a folder, sorted; none if there is no such folder or it may not be read (counted)."""
        try:
            with self.folder(path, look=look) as folder:
                return sorted(os.listdir(folder))
        except OSError as error:
            if error.errno in NOT_A_FILE:
                self.skipped["not a folder that this user may read"] += 1
            elif error.errno != errno.ENOENT:
                raise
            return []

    def open(self, path: str, flags: int = os.O_RDONLY, mode: str = "rb", make: bool = False, within=None):
        """Open a regular file; BadFile if it is none, or has a second name and is to be written. No waiting.

        within: descriptor of the file's folder, where many files of one folder are read.
        """
        parent, _, name = path.rpartition("/")
        try:
            with self.folder(parent, make) if within is None else contextlib.nullcontext(within) as folder:
                fd = os.open(name, flags | NO_LINK, 0o666, dir_fd=folder)
            about = os.fstat(fd)
            if stat.S_ISREG(about.st_mode) and (flags == os.O_RDONLY or about.st_nlink == 1):
                return open(fd, mode)
            os.close(fd)
        except OSError as error:
            if error.errno not in NOT_A_FILE:
                raise
        raise BadFile("not a regular file that this user may use")

    def read_bytes(self, path: str, max_bytes: int, within=None) -> bytes:
        with self.open(path, within=within) as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise BadFile(f"larger than {max_bytes} bytes")
        return data

    def read(self, path: str, max_bytes: int = MAX_ABOUT_BYTES, within=None) -> dict | None:
        """One JSON object; None if there is no such file, BadFile (counted) if it is unusable."""
        try:
            data = self.read_bytes(path, max_bytes, within)
            return parse_json(data, max_bytes * MAX_JSON_PARTS // MAX_JSON_BYTES)
        except FileNotFoundError:
            return None
        except BadFile as error:
            self.skipped[str(error)] += 1
            raise

    def read_matching(self, path: str, within=None, **identity) -> dict | None:
        """A JSON file that says of itself what its path says; None if absent, unusable or another's."""
        with contextlib.suppress(BadFile):
            data = self.read(path, within=within)
            if data is not None and all(data.get(key) == value for key, value in identity.items()):
                return data

    def write(self, path: str, source, keep=None) -> bool:
        """Write a file through a temp file: readers see the old one, or none, or the whole new one.

        source: bytes, or the path of a local file. keep: called with the contents of a file that has the name
        already; where it is true of them that file stays, and False is returned. A crash leaves a temp file.
        """
        parent, _, name = path.rpartition("/")
        temp = secrets.token_hex(8)
        data = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")
        with data, self.folder(self.tmp, make=True) as tmp, self.folder(parent, make=True) as folder:
            try:
                with open(os.open(temp, NEW_FILE, 0o666, dir_fd=tmp), "wb") as file:
                    shutil.copyfileobj(data, file, 1 << 20)
                    file.flush()
                    os.fsync(file.fileno())
                    size = file.tell()
                if keep is not None:
                    with contextlib.suppress(OSError):  # atomic and exclusive, where there are links
                        # a link in the place of the temp file: not what it points to
                        os.link(temp, name, src_dir_fd=tmp, dst_dir_fd=folder, follow_symlinks=False)
                        return True
                    with contextlib.suppress(BadFile, FileNotFoundError):
                        if keep(self.read_bytes(path, MAX_JSON_BYTES + 2 * size)):
                            return False
                try:
                    os.replace(temp, name, src_dir_fd=tmp, dst_dir_fd=folder)
                except IsADirectoryError:  # a stranger's, where a file belongs; perhaps too deep to delete
                    os.rename(name, f"{temp}.aside", src_dir_fd=folder, dst_dir_fd=tmp)
                    os.replace(temp, name, src_dir_fd=tmp, dst_dir_fd=folder)
                return True
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temp, dir_fd=tmp)

    def write_once(self, path: str, data: dict, keep=parse_json) -> bool:
        """Write a JSON file unless one that `keep` accepts is there; whether it was. Too large: BadFile."""
        return self.write(path, to_json(data), keep)

    def rewrite(self, path: str, data: dict) -> None:
        """Replace a JSON file that is a convenience for people."""
        self.write(path, to_json(data, indent=1))

    def append(self, path: str, text: str) -> None:
        """Append to a log; a torn line is closed first. Where files cannot be appended to, write it anew.

        A log that has a second name, or is too large for that, is renamed and another begun.
        """
        data = text.encode("utf-8", "replace")
        try:
            file = self.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, "r+b", make=True)
            if (size := os.fstat(file.fileno()).st_size) > 2**40:  # a stranger's sparse one: it cannot grow
                file.close()
                raise BadFile("no log")
        except BadFile:  # rclone without a cache writes files whole or not at all; or this is not ours
            known, (parent, _, name) = b"", path.rpartition("/")
            with contextlib.suppress(BadFile), self.open(path) as file, self.folder(parent) as folder:
                if (about := os.fstat(file.fileno())).st_nlink == 1 and about.st_size <= 4 * MAX_JSON_BYTES:
                    known = file.read(4 * MAX_JSON_BYTES)  # it may be growing
                else:  # another name of it may be anybody's file: no copy is made
                    aside = f"{name}.{secrets.token_hex(4)}"
                    os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
            self.write(path, known + b"\n" * (known[-1:] not in (b"", b"\n")) + data)
        else:
            with file:
                torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
                file.write(b"\n" * torn + data)

    def delete(self, path: str, prune: bool = False) -> None:
        """Delete a file, a link, or a folder with all in it. prune: its folder too, if that is empty then."""
        parent, _, name = path.rpartition("/")
        gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)  # a link is no directory either
        with gone, self.folder(parent) as folder:
            delete_in(folder, name)
        if prune:
            outer, _, inner = parent.rpartition("/")
            with contextlib.suppress(OSError), self.folder(outer) as folder:
                os.rmdir(inner, dir_fd=folder)

    def probe(self, patience: float = 3.0) -> str:
        """What the folder can do, in one line. OSError if it cannot rename: then nothing here is safe."""
        old, new, links = secrets.token_hex(8), secrets.token_hex(8), "no"
        with self.folder(self.tmp, make=True) as tmp:
            os.close(os.open(old, NEW_FILE, 0o666, dir_fd=tmp))
            with contextlib.suppress(OSError):
                os.link(old, f"{old}.link", src_dir_fd=tmp, dst_dir_fd=tmp, follow_symlinks=False)
                links = "yes"
            os.replace(old, new, src_dir_fd=tmp, dst_dir_fd=tmp)
        began = time.monotonic()
        while not (shown := new in self.names(self.tmp)) and time.monotonic() < began + patience:
            time.sleep(0.05)
        self.sweep(new, f"{old}.link")
        seen = f"after {time.monotonic() - began:.2f} s" if shown else f"not within {patience:g} s"
        return f"links: {links}, rename: yes, a listing shows a new file {seen}"

    def sweep(self, *more: str) -> None:
        """Delete what lay in tmp/OWNER when this process began, and `more`; what came since may be in use."""
        with self.folder(self.tmp, make=True):  # where a file or a link is, a folder takes its place
            pass
        for name in (*self.leftovers, *more, "-"):  # "-": no file; an empty folder goes too
            self.delete(f"{self.tmp}/{name}", prune=True)

    def can_write(self) -> bool:
        """Whether the folder takes a small file now: then a write that fails does so for its own path."""
        path = f"{self.tmp}/{secrets.token_hex(8)}"  # a name that nobody can have taken
        with contextlib.suppress(OSError):
            self.write(path, bytes(4096))
            self.delete(path)
            return True
        return False

    # -- the experiment, its clock, and who is here

    def rounds(self, kind: str) -> list[int]:
        """Rounds that have a folder below `kind` (rollouts, rewards, checkpoints), ascending."""
        return [int(n[6:]) for n in self.names(kind) if re.fullmatch(r"round_\d{6}", n, re.ASCII)]

    def stages(self, kind: str, round_: int) -> list[int]:
        """Stages that have a folder in this round, ascending."""
        names = set(self.names(f"{kind}/{bucket(round_)}", look=False))  # rounds have just been listed
        return [stage for stage in range(self.max_stages) if f"stage_{stage}" in names]

    def nodes(self, kind: str, round_: int, stage: int, look: bool = True) -> list[str]:
        """Nodes that have a file NODE.json in a stage's folder; copies such as "n1 (1).json" do not match."""
        files = [n for n in self.names(stage_folder(kind, round_, stage), look) if n.endswith(".json")]
        return [n[:-5] for n in files if is_name(n[:-5]) and ".sync-conflict-" not in n]

    def open_config(self, settings: dict, only_read: bool = False) -> dict:
        """What the experiment was started with: the file there, else `settings`, written unless only_read.

        StoreError if that is damaged, or if the folder has another layout than this program's.
        """
        names = [*self.names("rollouts"), *self.names("rewards"), *self.names("state/rounds")]
        layout = None if any(re.fullmatch(r"round_(\d{1,5}|\d{6}\.json)", n) for n in names) else LAYOUT
        try:
            began_with = self.read("config.json")
            if began_with is None and layout == LAYOUT and not only_read:
                self.write("config.json", to_json({"layout": LAYOUT, **settings}, indent=1), keep=parse_json)
                began_with = self.read("config.json")  # if two were first at once, one file counts for both
        except BadFile as error:
            raise StoreError(f"{self.base / 'config.json'}: {error}; wait, restore it or {AFRESH}") from error
        if ({"layout": layout} if began_with is None else began_with).get("layout") != LAYOUT:
            why = "was written by another version of this program; nothing was changed"
            raise StoreError(f"{self.base} {why}: {AFRESH}")
        return began_with or settings

    def open_round(self, round_: int, by: str) -> None:
        """Declare this round open, and all before it. Idempotent: two writers of one round do no harm."""
        state, clock = {"stage": 0, "updated_at": time.time(), "updated_by": by}, self.clock()[0]
        for t in (*range(clock + MAX_GAP, round_, MAX_GAP), round_):  # a larger gap is not believed
            self.write_once(f"state/rounds/{bucket(t)}.{by}.json", {"round": t, **state})
        if round_ > clock:  # a straggler must not set the state back
            with contextlib.suppress(OSError):  # it is for people
                self.rewrite("state/current_state.json", {"round": round_, **state})

    def clock(self) -> tuple[int, set[str]]:
        """(highest open round, who opened it) or (-1, nobody). Only names count, so one listing is enough."""
        opened = {}
        for name in self.names("state/rounds"):
            if match := re.fullmatch(r"round_(\d{6})\.([\w.-]+)\.json", name, re.ASCII):
                opened.setdefault(int(match[1]), set()).add(match[2])
        highest = last_without_gap(opened)
        return highest, opened.get(highest, set())

    def sessions(self) -> dict[str, str]:
        """Newest session of every node that ever registered, from names alone: one listing.

        One that was first seen an hour ahead of its time counts as old: it would stop a node when that comes.
        """
        names, latest = self.names("peers"), 1000 * (time.time() + MAX_CLOCK_SKEW)
        for name in names:
            if name not in self._sessions:
                match = re.fullmatch(r"(.+)\.(\d{13}-[0-9a-f]{8})\.json", name, re.ASCII)
                self._sessions[name] = match.groups() if match and is_name(match[1]) else None
                if self._sessions[name] and int(match[2][:13]) >= latest:
                    self.skipped["session an hour ahead of this clock: set the wrong one, start again"] += 1
                    self._sessions[name] = (match[1], f"{1:013d}")
        self._sessions = {name: self._sessions[name] for name in names}
        return dict(sorted(filter(None, self._sessions.values())))  # of a node's sessions the last

    def new_session(self, *nodes: str) -> str:
        """An id that sorts after every session seen of these nodes, whatever the clocks.

        One for all nodes of a process: of two processes the same one is the newer for each of them.
        """
        previous = max((session for node, session in self.sessions().items() if node in nodes), default="0")
        return f"{max(int(time.time() * 1000), int(previous[:13]) + 1):013d}-{secrets.token_hex(4)}"

    def register(self, node_id: str, role: str, about: dict, session: str = "") -> str:
        """Announce a session of this node, a new one if none is given; returns its id."""
        session = session or self.new_session(node_id)
        data = {"node_id": node_id, "role": role, "session": session, "registered_at": time.time(), **about}
        self.write_once(f"peers/{node_id}.{session}.json", data)
        return session

    def registration(self, node_id: str, session: str) -> dict | None:
        """What a node said of itself when it registered, as far as its life is concerned."""
        data = self.read_matching(f"peers/{node_id}.{session}.json", node_id=node_id)
        return data and brief(data, "role", "host", "boot_id", "pid", "pid_start")

    def is_registered(self, node_id: str, session: str) -> bool:
        """Whether the folder holds this registration: another folder mounted in its place does not."""
        peers = self.base / "peers"  # two calls, for it is asked often; a link holds no registrations
        if os.path.lexists(peers / f"{node_id}.{session}.json") and not os.path.islink(peers):
            return True
        with self.folder():  # OSError where there is none
            return False

    def heartbeat(self, node_id: str, data: dict) -> None:
        self.rewrite(f"heartbeats/{node_id}.json", {"node_id": node_id, "time": time.time(), **data})

    def read_heartbeat(self, node_id: str) -> dict | None:
        """The last heartbeat that got here, or None: a mount may fail (EIO) on a file just rewritten."""
        with contextlib.suppress(OSError):
            data = self.read_matching(f"heartbeats/{node_id}.json", node_id=node_id)
            return data and brief(data, "time", "session", "state", "round")

    # -- rollouts, rewards, checkpoints

    def publish(self, round_: int, stage: int, node_id: str, about: dict, groups: dict) -> bool:
        """Write a rollout file; groups: {"0": {task, seed, prompt, answer, completions}, …}."""
        data = {"format": FORMAT, "peer_id": node_id, "round": round_, "stage": stage}
        data |= {"timestamp": time.time(), **about, "rollouts": groups}
        check_rollouts(data, round_, stage, node_id)
        place = f"{stage_folder('rollouts', round_, stage)}/{node_id}.json"
        return self.write_once(place, data, lambda x: check_rollouts(parse_json(x), round_, stage, node_id))

    def fetch(self, round_: int, stage: int, node_id: str, max_bytes: int = MAX_JSON_BYTES) -> list[dict]:
        """A peer's groups, their structure checked, their truth not; BadFile says why there are none."""
        path = f"{stage_folder('rollouts', round_, stage)}/{node_id}.json"
        data = self.read(path, min(max_bytes, MAX_JSON_BYTES))
        if data is None:
            raise BadFile("listed, but not there yet")
        return check_rollouts(data, round_, stage, node_id)

    def retire_rollouts(self, before_round: int, archive: bool) -> None:
        """Delete, or move to archives/, the rollouts of all rounds before this one.

        A round is renamed away first: what somebody puts in its place meanwhile is not touched.
        """
        to = DriveStore(self.root, None, self.owner) if archive else self
        aside = f"archives/{self.base.name}/rollouts" if archive else self.tmp
        for name in [bucket(r) for r in self.rounds("rollouts") if r < before_round]:
            with self.folder("rollouts") as source, to.folder(aside, make=True) as goal:
                new = name
                with contextlib.suppress(FileNotFoundError):
                    os.lstat(name, dir_fd=goal)  # files that came after their round had been taken away
                    new = f"{name}.{secrets.token_hex(4)}"
                with contextlib.suppress(FileNotFoundError, PermissionError):  # gone meanwhile, or another's
                    os.rename(name, new, src_dir_fd=source, dst_dir_fd=goal)
            if not archive:
                self.delete(f"{aside}/{new}")

    def submit_reward(self, round_: int, stage: int, node_id: str, data: dict) -> bool:
        """Publish a node's reward of a round and stage; the first one that makes sense stands."""
        about = {"node_id": node_id, "round": round_, "stage": stage}
        place = f"{stage_folder('rewards', round_, stage)}/{node_id}.json"
        data = {**about, "timestamp": time.time(), **data}
        return self.write_once(place, data, lambda old: sane_reward(parse_json(old), {}, **about))

    def rewards(self, round_: int, nodes, limit: int | None = None) -> list[dict]:
        """The reward files of `nodes` in a round that make sense, stage by stage; each is read once.

        limit: of the first so many nodes of a stage. Its folder is opened once for all of them.
        """
        rows, self._rewards = [], {key: row for key, row in self._rewards.items() if key[0] > round_ - 10}
        for stage in self.stages("rewards", round_):
            where = stage_folder("rewards", round_, stage)
            there = [n for n in self.nodes("rewards", round_, stage, look=False) if n in nodes][:limit]
            gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)  # swapped meanwhile
            with gone, self.folder(where) if there else contextlib.nullcontext() as folder:
                for node in there:
                    about = dict(node_id=node, round=round_, stage=stage)
                    if (row := self._rewards.get((round_, stage, node))) is None:
                        data = self.read_matching(f"{where}/{node}.json", folder)
                        row = sane_reward(data or {}, self._figures, **about)
                    if row is not None:  # else it may be on its way
                        self._rewards[round_, stage, node] = row
                        rows.append(row)
        return rows

    def last_rewarded(self) -> int:
        """The clock's second witness, for a lost state folder: the last round with rewards, or -1."""
        return last_without_gap(self.rounds("rewards"))

    def checkpoints(self, process: str, last: int = 10**6) -> list[int]:
        """Rounds up to `last` after which this process has a checkpoint file, newest first."""
        rounds, name = reversed(self.rounds("checkpoints")), f"{process}.safetensors"
        return [r for r in rounds if r <= last and name in self.names(f"checkpoints/{bucket(r)}", look=False)]


def delete_in(folder: int, name: str, depth: int = 50) -> None:
    """Delete a name in an open folder, with what is in it, never through a link and never waiting for a FIFO.

    shutil.rmtree can be made to open what was put into a folder's place. What is nested deeper is left, and
    what belongs to another user.
    """
    if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        os.unlink(name, dir_fd=folder)
    elif depth > 0:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | NO_LINK, dir_fd=folder)
        try:
            for each in os.listdir(inner):
                with contextlib.suppress(PermissionError):  # another user's
                    delete_in(inner, each, depth - 1)
        finally:
            os.close(inner)
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(name, dir_fd=folder)


# -------- What a stranger's rollout file may look like --------------------------------------------


def is_number(value) -> bool:
    """A finite int or float. True and False are no numbers here, nor is an integer too large for a float."""
    return type(value) in (int, float) and abs(value) < 1e300  # nan is less than nothing


def brief(data: dict, *names: str) -> dict:
    """What a stranger's JSON has of these names, where it is short: who remembers it needs little memory."""
    values = {name: data.get(name) for name in names}
    return {n: x for n, x in values.items() if isinstance(x, str | int | float) and len(str(x)) <= 300}


def sane_reward(data: dict, names: dict[str, None], **about) -> dict | None:
    """`about` and the figures of a reward file, None if they make no sense. names: known, at most 64."""
    figures = [data.get("reward"), data.get("timestamp"), *(data.get(name, 0) for name in COUNTS)]
    sane = all(is_number(figure) and 0 <= figure < 1e11 for figure in figures)
    if not sane or max(data["reward"], data.get("held_out", 0)) > 1 or not about.items() <= data.items():
        return None
    new = [n for n in data.keys() - names if is_number(data[n]) and re.fullmatch(r"\w{1,40}", n, re.ASCII)]
    names.update(dict.fromkeys(sorted(new)[: max(0, 64 - len(names))]))
    return {name: data[name] for name in names if is_number(data.get(name))} | about  # rows share the names


def check_rollouts(data: dict, round_: int, stage: int, node_id: str) -> list[dict]:
    """Structure of a rollout file -> its groups; BadFile with the reason if any of it is out of bounds.

    A group: {key: (round, stage, node, index), task, seed, prompt, completions: [{response, finished,
    claimed}]}; claimed is the writer's own reward: for people, never to learn from. Extra keys are ignored.
    """

    def need(condition, reason):
        if not condition:
            raise BadFile(reason)

    need(data.get("format") == FORMAT, "unknown format")
    need(data.get("peer_id") == node_id, "peer_id differs from the file name")
    need((data.get("round"), data.get("stage")) == (round_, stage), "foreign round or stage")
    need(is_number(data.get("timestamp")), "timestamp is no number")
    rollouts, groups = data.get("rollouts"), []
    need(isinstance(rollouts, dict), "rollouts is no object")
    need(len(rollouts) <= MAX_GROUPS_PER_FILE, "too many groups")
    for index, group in rollouts.items():
        need(re.fullmatch(r"0|[1-9]\d{0,5}", index, re.ASCII), "group index is no number")
        need(isinstance(group, dict), "group is no object")
        task, seed, prompt, completions = (group.get(k) for k in ("task", "seed", "prompt", "completions"))
        need(isinstance(task, str) and len(task) <= 64, "task is no short string")
        need(type(seed) is int and 0 <= seed < MAX_SEED, "seed out of range")  # True is an int, but no seed
        need(isinstance(prompt, str) and len(prompt) <= MAX_QUESTION_CHARS, "prompt is no text or too long")
        need(isinstance(completions, list), "completions is no list")
        need(len(completions) in GROUP_SIZES, f"group size outside {GROUP_SIZES[0]}-{GROUP_SIZES[-1]}")
        kept = []
        for completion in completions:
            need(isinstance(completion, dict), "completion is no object")
            response, finished, claimed = (completion.get(k) for k in ("response", "finished", "reward"))
            need(isinstance(response, str), "response is no text")
            need(len(response) <= MAX_RESPONSE_CHARS, f"response over {MAX_RESPONSE_CHARS} (MAX_NEW_TOKENS)")
            need(isinstance(finished, bool), "finished is no boolean")
            need("reward" not in completion or is_number(claimed), "reward is no finite number")
            kept.append({"response": response, "finished": finished, "claimed": claimed})
        key = (round_, stage, node_id, int(index))
        groups.append({"key": key, "task": task, "seed": seed, "prompt": prompt, "completions": kept})
    return groups
