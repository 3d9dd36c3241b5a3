"""The shared folder is the swarm's only means of communication. Every path of an experiment has one
writer.

experiments/NAME/
    config.json      the settings that the experiment began with; written last by its maker, the
                     process whose mkdir made NAME, so whoever sees it finds board/ and nodes/, too
    board/           the names of its files are the state of the swarm; a node renames its own
        session.anna.1795300037123-ab12cd34      anna's newest process (holds model, host, versions)
        open.coordinator.000012.0                the coordinator has opened round 12
        rollouts.anna.000012.0                   anna has published up to round 12, stage 0
        rewards.anna.000012.0                    … and has submitted its reward
        checkpoint.anna.000009.0                 … and has written a checkpoint after round 9
    nodes/anna/      everything that anna writes: heartbeat.json, rollouts/, rewards/, checkpoints/,
                     logs/, model/
warmstart/  reports/  archives/NAME/             beside the experiments; also made by the maker

A path in this file is relative to the experiment's folder, or to the shared folder if it begins
with "/". Logs are appended to; every other file is written beside its place under a name that no
listing shows and that tells whose it is, .new-<node>-<hex>, and is then renamed: a reader sees no
file or the whole one.

Whatever another node wrote may come from a stranger. Size, type and structure of a file are checked
before it is used; one that cannot be used raises InvalidFileError. No link is followed. Where a
node's own folder is a link, its writes fail and it waits.

Every method tries once, may be called twice, and raises OSError if the folder cannot be reached.
`RetryingStore` repeats it until it can.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

LAYOUT = 5  # of the tree above; config.json says it
ROLLOUT_FORMAT_VERSION = 1  # the key "format" of a rollout file
NODE_DIRS = ("rollouts", "rewards", "checkpoints", "logs")
EXITED_STATES = ("done", "stopped", "failed")  # of the last heartbeat of a process
FOLDER_TIMEOUT_SECONDS = 30.0  # a folder that another process made shows later on a mounted drive
MAX_JSON_BYTES = 8 << 20  # a rollout file of 64 x 64 completions of 256 tokens takes about 4 MiB
MAX_JSON_ELEMENTS = 400_000  # 8 MiB of "[]," would parse to a gigabyte of Python objects
MAX_METADATA_BYTES = 64 << 10
MAX_TEXT_CHARS = 32768
MAX_SEED = 2**53  # JSON readers in other languages round larger integers
COORDINATOR_ID = "coordinator"


class StoreError(Exception):
    """This node's or the experiment's own state cannot be used. The program stops and says why."""


class InvalidFileError(ValueError):
    """A file that cannot be used. The text is a short reason, fit for a log line."""


@dataclass
class Board:
    """The state of the swarm: one listing of board/."""

    open_round: int = -1
    sessions: dict = field(default_factory=dict)  # node -> its newest session id
    progress: dict = field(default_factory=dict)  # (kind, node) -> (round, stage)

    @property
    def workers(self) -> list[str]:
        """All nodes that ever registered but the coordinator, sorted."""
        return sorted(self.sessions.keys() - {COORDINATOR_ID})

    def reached(self, kind: str, round_: int, stage: int) -> list[str]:
        """The nodes that have got as far as this round and stage, sorted."""
        nodes = []
        for (marker_kind, node), at in self.progress.items():
            if marker_kind == kind and at >= (round_, stage):
                nodes.append(node)
        return sorted(nodes)


class DriveStore:
    """The files of one experiment, and what stands beside the experiments."""

    def __init__(self, root, experiment: str, node: str = ""):
        self.root = Path(root)
        self.dir = self.root / "experiments" / experiment
        self.node = node  # of this process, the first one; readers have none
        self.invalid_files = Counter()  # reason -> number of failed reads
        self.is_maker = False
        self.waiting_since = {}  # reason -> when this process began to wait for a folder
        self.sessions = {}  # node -> its session, of the nodes that this process has registered
        self.markers = {}  # (kind, node) -> name of the marker that this process has written
        self.progress = {}  # of the last listing of the board
        self.moved_at = {}  # node -> when one of its markers was last seen to move
        self.checked_dirs = set()  # known to be no links; a check costs a file-system call
        self.checked_logs = set()  # the same of logs
        self.append_at = {}  # path of a log -> its length before an append that has failed so far

    # -- the board

    def board(self) -> Board:
        """What the swarm is doing. Names such as "… (1)", made by sync clients, do not count."""
        # "rollouts.anna.000012.0" and "session.anna.1795300037123-ab12cd34"
        board = Board()
        kinds = "open|rollouts|rewards|checkpoint"
        marker = re.compile(rf"({kinds})\.(.+)\.(\d{{6}})\.(\d{{1,2}})", re.ASCII)
        session = re.compile(r"session\.(.+)\.(\d{13}-[0-9a-f]{8})", re.ASCII)

        # Of several files of one kind and node the newest counts.
        for name in sorted(os.listdir(self.resolve_dir("board"))):
            if (match := session.fullmatch(name)) and is_safe_name(match[1]):
                board.sessions[match[1]] = match[2]
            elif (match := marker.fullmatch(name)) and is_safe_name(match[2]):
                at = (int(match[3]), int(match[4]))
                key = (match[1], match[2])
                board.progress[key] = max(at, board.progress.get(key, at))

        # A marker that moves is a sign of life (see `node_status`).
        for (kind, node), at in board.progress.items():
            if kind == "open":
                board.open_round = max(board.open_round, at[0])
            if self.progress.get((kind, node), at) != at:
                self.moved_at[node] = time.time()
        self.progress = board.progress
        return board

    def post(self, node: str, name: str, data: bytes = b"") -> None:
        """Put a file of this node on the board. It is written in the node's own folder first."""
        self.write(f"nodes/{node}/posting", data)
        os.replace(self.resolve(f"nodes/{node}/posting"), self.resolve(f"board/{name}"))

    def move_marker(self, kind: str, node: str, round_: int, stage: int = 0) -> None:
        """Say how far a node has got: rename its marker, or write the first one."""
        new = f"{kind}.{node}.{round_:06d}.{stage}"
        old = self.markers.get((kind, node))
        if old is None:  # the first time in this process: an earlier one may have left a marker
            at = self.board().progress.get((kind, node), (round_, stage))
            old = f"{kind}.{node}.{at[0]:06d}.{at[1]}"

        # There may be none yet, and a retried call may have renamed the old one before.
        try:
            os.replace(self.resolve(f"board/{old}"), self.resolve(f"board/{new}"))
        except FileNotFoundError:
            self.post(node, new)
        self.markers[kind, node] = new

    def register(self, nodes: list[str], metadata: dict, folders=NODE_DIRS) -> str:
        """Register a process under the names of its nodes, and make the folders in theirs. Returns
        the id of the new session.

        It begins with the time in milliseconds and sorts after every earlier one of these nodes.
        """
        # A clock that was set back must not make this session the older one.
        sessions = self.board().sessions
        previous = max((sessions.get(node, "0") for node in nodes), default="0")
        milliseconds = max(int(time.time() * 1000), int(previous[:13]) + 1)
        session = f"{milliseconds:013d}-{secrets.token_hex(4)}"

        for node in nodes:
            self.post(node, f"session.{node}.{session}", dump_json(metadata))
            self.sessions[node] = session
            for folder in folders:
                self.make_dir(f"nodes/{node}/{folder}")
        return session

    def write_heartbeat(self, node: str, session: str, round_: int, state: str = "running") -> None:
        """Show that a node is alive. state: running, or one of EXITED_STATES when it exits."""
        data = {"time": time.time(), "session": session, "round": round_, "state": state}
        self.write(f"nodes/{node}/heartbeat.json", dump_json(data))

    def node_status(self, node: str, session: str, stale_after: float) -> str:
        """Return "exited" if the heartbeat of its newest session says so ("failed" after an error),
        "alive" if there was a sign of life less than stale_after seconds ago, else "dead".

        Signs of life are its registration, its heartbeat and, because on a mounted drive a file
        that is rewritten often may never arrive, a marker that was seen to move.
        """
        heartbeat = self.read_valid(f"nodes/{node}/heartbeat.json") or {}
        if heartbeat.get("session") == session and heartbeat.get("state") in EXITED_STATES:
            return "failed" if heartbeat["state"] == "failed" else "exited"

        signs = [int(session[:13] or 0) / 1000, self.moved_at.get(node, 0.0)]
        if is_finite_number(heartbeat.get("time")):
            signs.append(heartbeat["time"])
        youngest = min(
            abs(time.time() - sign) for sign in signs
        )  # abs: a peer's clock may be ahead
        return "alive" if youngest < stale_after else "dead"

    # -- rollouts and rewards

    def publish(self, kind: str, node: str, round_: int, stage: int, data: dict):
        """Write a node's rollouts or reward of a stage, then move its marker.

        What the node wrote before it was killed stays: a file never changes once peers may have
        read it. Returns the contents of such an earlier file, else None.
        """
        # Is there a valid file already, from before a kill?
        path = stage_file(kind, node, round_, stage)
        parse = parse_rollouts if kind == "rollouts" else parse_reward
        published = None
        with contextlib.suppress(FileNotFoundError, InvalidFileError):
            data_before = parse_json(self.read_bytes(path, MAX_JSON_BYTES))
            published = parse(data_before, node, round_, stage)

        if published is None:
            name = "peer_id" if kind == "rollouts" else "node_id"
            header = {name: node, "round": round_, "stage": stage, "timestamp": time.time()}
            self.write(path, dump_json(header | data))

        # The marker last: who sees it finds the file (on some storages a little later).
        self.move_marker(kind, node, round_, stage)
        return published

    def fetch_rollouts(self, node: str, round_: int, stage: int) -> list[dict] | None:
        """A peer's groups, structure checked; None if there is no file. Raises InvalidFileError."""
        data = self.read_json(stage_file("rollouts", node, round_, stage), MAX_JSON_BYTES)
        return None if data is None else parse_rollouts(data, node, round_, stage)

    def read_reward(self, node: str, round_: int, stage: int) -> dict | None:
        """A node's reward and metrics, None if there is no valid file."""
        try:
            data = self.read_json(stage_file("rewards", node, round_, stage))
            return None if data is None else parse_reward(data, node, round_, stage)
        except InvalidFileError as error:
            self.invalid_files[str(error)] += 1
            return None

    def list_stages(self, kind: str, node: str, lenient: bool = False) -> list[tuple[int, int]]:
        """(round, stage) of a node's files of this kind, ascending. lenient: see `list_names`."""
        stages = []
        for name in self.list_names(f"nodes/{node}/{kind}", lenient):
            if match := re.fullmatch(r"round_(\d{6})(?:\.stage_(\d{1,2}))?\.\w+", name, re.ASCII):
                stages.append((int(match[1]), int(match[2] or 0)))
        return sorted(stages)

    # -------- Atomic files ------------------------------------------------------------------------

    def write(self, path: str, data, fsync: bool = False) -> None:
        """Write a file in place of an older one.

        data: bytes, or a function that is given a path and writes a file or a folder there.
        """
        target = self.resolve(path)
        temp = self.temporary(path)
        try:
            if callable(data):
                data(temp)
                make_readable(temp)
            else:
                temp.write_bytes(data)

            # A checkpoint must be on disk before the one that it replaces is deleted.
            if fsync:
                with open(temp, "rb") as file:
                    os.fsync(file.fileno())

            if temp.is_dir():
                remove(target)  # a folder replaces neither another one nor a link
            os.replace(temp, target)
        except OSError:
            remove(temp)
            raise

    def temporary(self, path: str) -> Path:
        """A new name beside a file. It tells whose file it is: in nodes/NODE that node's, elsewhere
        this process's."""
        node = path.split("/")[1] if path.startswith("nodes/") else self.node
        return self.resolve(path).with_name(f".new-{node}-{secrets.token_hex(8)}")

    def append(self, path: str, text: str) -> None:
        """Append whole lines to a log. A line that a crash cut off is ended first."""
        # Once: a stranger's link or FIFO goes, or every append would fail. (A folder stays.)
        if path not in self.checked_logs:
            target = self.resolve(path)
            if target.is_symlink() or target.is_fifo():
                remove(target)
            self.checked_logs.add(path)

        with self.open(path, "a+b") as file:
            # A retry cuts off what the failed attempt has written.
            size = self.append_at.setdefault(path, file.seek(0, os.SEEK_END))
            file.truncate(size)
            is_torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(("\n" if is_torn else "").encode() + text.encode("utf-8", "replace"))
        del self.append_at[path]

    # -------- Reading what others wrote -----------------------------------------------------------

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """The contents of a file. Raises InvalidFileError if it is no regular file or too large."""
        try:
            file = self.open(path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EINVAL):  # a link, or not a regular file
                raise InvalidFileError("not a regular file") from error
            raise
        with file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise InvalidFileError(f"larger than {max_bytes} bytes")
        return data

    def read_json(self, path: str, max_bytes: int = MAX_METADATA_BYTES) -> dict | None:
        """One JSON object; None if there is no such file. Raises InvalidFileError.

        An error on this one file (EIO, ESTALE, EACCES) counts as an invalid file, so that a peer's
        bad disk stops nobody. If the experiment's folder cannot be listed either, it is an outage:
        OSError.
        """
        try:
            return parse_json(self.read_bytes(path, max_bytes))
        except FileNotFoundError:
            self.check_mounted(path)
            return None
        except OSError as error:
            self.check_mounted(path)
            raise InvalidFileError(f"unreadable ({error.strerror or error})") from error

    def read_valid(self, path: str) -> dict | None:
        """Like `read_json`, but None for a file that cannot be used."""
        try:
            return self.read_json(path)
        except InvalidFileError as error:
            self.invalid_files[str(error)] += 1
            return None

    def open(self, path: str, mode: str = "rb"):
        """Open a regular file. Follows no link, does not wait for a FIFO; both raise OSError."""
        # O_NONBLOCK: opening a FIFO would wait for its other end.
        flags = os.O_RDONLY if mode == "rb" else os.O_RDWR | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self.resolve(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return os.fdopen(descriptor, mode)

    def list_names(self, path: str, lenient: bool = False, hidden: bool = False) -> list[str]:
        """Names in a folder, sorted. An empty list if there is no such folder.

        lenient: a folder that gives an error counts as empty, too (for monitor and report).
        hidden: the names that begin with a dot, instead of the others.
        """
        try:
            names = os.listdir(self.resolve_dir(path))
        except OSError as error:
            self.check_mounted(path)
            absent = (FileNotFoundError, NotADirectoryError, PermissionError)
            if not lenient and not isinstance(error, absent):
                raise
            return []
        return sorted(name for name in names if name.startswith(".") == hidden)

    def resolve(self, path: str) -> Path:
        """Full path of a path of this file. A link among its parents raises NotADirectoryError. The
        last part may be a link, which `open` refuses.
        """
        full = self.root / path[1:] if path.startswith("/") else self.dir / path
        for parent in full.relative_to(self.root).parents[:-1]:
            if parent not in self.checked_dirs:
                with contextlib.suppress(FileNotFoundError):  # then the caller's own call fails
                    if stat.S_ISLNK(os.lstat(self.root / parent).st_mode):
                        error = "a link where a folder belongs"
                        raise NotADirectoryError(errno.ENOTDIR, error, str(parent))
                    self.checked_dirs.add(parent)
        return full

    def resolve_dir(self, path: str) -> Path:
        """Full path of a folder. If it is a link itself, this raises NotADirectoryError, too."""
        # As the parent of a name in it, the folder itself is checked.
        return self.resolve(f"{path}/-").parent

    def check_mounted(self, path: str = "") -> None:
        """Raise OSError if the experiment's folder, or for "/…" the shared folder, cannot be
        listed: the drive is not mounted."""
        os.listdir(self.root if path.startswith("/") else self.dir)

    # -------- Housekeeping: the folders of experiments and nodes, retention -----------------------

    def create(self, settings: dict) -> dict:
        """Begin the experiment unless another process has. Returns the settings that it began with.

        settings: those of this process, with "layout" and "maker", the name of its first node.
        Raises OSError while another process makes the experiment.
        """
        # mkdir succeeds in one process only: the maker.
        saved = self.load_config()
        if saved is None:
            self.root.mkdir(exist_ok=True)
            self.make_dir("/experiments")
            with contextlib.suppress(FileExistsError):
                self.dir.mkdir()
                self.is_maker = True

            # If config.json does not come, its maker was killed, and this process takes its place.
            if not self.is_maker:
                self.give_time("another process is still creating the experiment")

        # Folders that a copy or a tidy user dropped are made again by the node that made them.
        if saved is None or saved.get("maker") == settings["maker"]:
            for folder in ("board", "nodes", "/warmstart", "/reports", "/archives"):
                self.make_dir(folder)
            self.make_dir(f"/archives/{self.dir.name}")

        # config.json comes last: who sees it finds the folders, too. It is never replaced: another
        # process may have written it meanwhile, so look again first, and then read what is there.
        if saved is None and self.load_config() is None:
            self.write("config.json", dump_json(settings, indent=1))
        saved = self.load_config()
        if saved is None:
            raise OSError("config.json is gone")
        return saved

    def load_config(self) -> dict | None:
        """The settings that the experiment began with, None if there are none yet.

        Raises StoreError if they cannot be used, or if another program made the experiment.
        """
        if self.dir.is_symlink():
            raise StoreError(f"{self.dir}: a link; take another EXPERIMENT_NAME")
        try:
            config = parse_json(self.read_bytes("config.json", MAX_METADATA_BYTES))
        except FileNotFoundError:
            config = None
        except InvalidFileError as error:
            advice = "restore it, or take another EXPERIMENT_NAME"
            raise StoreError(f"{self.dir}/config.json: {error}; {advice}") from error

        # Earlier versions and the program that this one replaces kept rollouts/ here.
        if config is None:
            is_foreign = any(self.dir.glob("rollouts/*"))
        else:
            is_foreign = config.get("layout") != LAYOUT
        if is_foreign:
            advice = "take another EXPERIMENT_NAME; nothing was changed"
            raise StoreError(f"{self.dir}: made by another version of this program; {advice}")
        return config

    def create_node(self, node: str) -> None:
        """Make the folder of a node. (`register` makes what is in it.)

        Raises OSError while a folder that was made elsewhere may only be late, and StoreError if
        the disk takes two names, such as anna and Anna, for one.
        """
        folder = self.resolve_dir(f"nodes/{node}")
        names = self.list_names("nodes")
        twins = [name for name in names if name.lower() == node.lower()]
        if twins and node not in twins and folder.exists():
            raise StoreError(f"NODE_ID={node}: to this disk it is the same as {twins[0]}")
        if not folder.exists() and node in self.board().sessions:
            self.give_time(f"nodes/{node} is not there yet")
        self.make_dir(f"nodes/{node}")

    def remove_leftovers(self, node: str = "") -> None:
        """Delete what a killed process of this node left unfinished, or, without a name, what
        readers and prepare left a day ago."""
        folders = ["/warmstart", "/reports"]
        if node:
            own = ["", *NODE_DIRS, "winners"]
            folders += [".", *(f"nodes/{node}/{name}" for name in own)]
        for folder in folders:
            for name in self.list_names(folder, lenient=True, hidden=True):
                if re.fullmatch(rf"\.new-{re.escape(node)}-[0-9a-f]{{16}}", name):
                    path = self.resolve(f"{folder}/{name}")
                    if node or time.time() - os.lstat(path).st_mtime > 86400:
                        remove(path, frees_space=True)

    def make_dir(self, path: str) -> None:
        """Make a folder. Its parents must exist: if one is missing, the drive is not mounted."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.resolve_dir(path))

    def has_dir(self, path: str) -> bool:
        """Whether there is such a folder. Only its maker makes one that is missing."""
        if self.resolve_dir(path).is_dir():
            return True
        self.check_mounted(path)
        return False

    def give_time(self, reason: str) -> None:
        """Raise OSError until FOLDER_TIMEOUT_SECONDS have passed since the first call with this
        reason; after that do nothing."""
        began = self.waiting_since.setdefault(reason, time.monotonic())
        if time.monotonic() - began < FOLDER_TIMEOUT_SECONDS:
            raise OSError(reason)

    def prune_rollouts(self, node: str, before_round: int, archive: bool) -> None:
        """Delete a node's rollouts of older rounds, or move them to archives/EXPERIMENT/NODE/."""
        archives = f"/archives/{self.dir.name}"
        if archive:
            if not self.has_dir(archives):  # until it is there again, nothing is moved
                return
            self.make_dir(f"{archives}/{node}")
        for round_, stage in self.list_stages("rollouts", node):
            if round_ >= before_round:
                break
            path = self.resolve(stage_file("rollouts", node, round_, stage))
            if archive:
                os.replace(path, self.resolve(f"{archives}/{node}/{path.name}"))
            else:
                path.unlink(missing_ok=True)

    def delete(self, path: str, frees_space: bool = False) -> None:
        """Delete a file. It is renamed first, so that no reader finds half of it."""
        target = self.resolve(path)
        temp = self.temporary(path)
        with contextlib.suppress(FileNotFoundError):
            os.replace(target, temp)
            remove(temp, frees_space)

    def load_file(self, path: str, read):
        """read(full path) of a file that a library opens itself; None if there is no regular file.

        Raises InvalidFileError if `read` raises what a damaged or a stranger's file may cause.
        """
        full = self.resolve(path)
        try:
            return read(full) if stat.S_ISREG(os.lstat(full).st_mode) else None
        except FileNotFoundError:
            self.check_mounted(path)
            return None
        except (OSError, ValueError, TypeError, LookupError) as error:
            self.check_mounted(path)
            raise InvalidFileError(f"{type(error).__name__}: {printable(error, 200)}") from error


def make_readable(path: Path) -> None:
    """Give a file, or the files in a folder, the usual permissions. safetensors makes files that
    their owner alone can read."""
    umask = os.umask(0)
    os.umask(umask)
    for file in path.glob("*") if path.is_dir() else [path]:
        with contextlib.suppress(OSError):  # some mounts know no permissions
            file.chmod(0o666 & ~umask)


def remove(path: Path, frees_space: bool = False) -> None:
    """Delete a file, a link, or a folder with all that is in it, if that is possible.

    frees_space: on Google Drive a deleted file goes to the trash, where it still counts, so empty
    it first. Not one with hard links: what its other names show would be lost.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        if frees_space and not path.is_symlink():
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
    with contextlib.suppress(OSError):
        path.unlink()


def stage_file(kind: str, node: str, round_: int, stage: int) -> str:
    """("rewards", "anna", 12, 0) -> "nodes/anna/rewards/round_000012.stage_0.json"."""
    return f"nodes/{node}/{kind}/round_{round_:06d}.stage_{stage}.json"


# -------- Parsing untrusted files -----------------------------------------------------------------


def is_safe_name(name: str) -> bool:
    """Whether `name` may become part of a path: 1 to 64 letters, digits, ".", "_" or "-"."""
    return re.fullmatch(r"[A-Za-z0-9_-]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?", name) is not None


def is_finite_number(value) -> bool:
    """Whether `value` is a finite int or float. Booleans and integers beyond floats are not."""
    return type(value) in (int, float) and abs(value) < 1e300


def printable(value, width: int = 100) -> str:
    """Text from a stranger, safe for a terminal: cut to `width`, control characters as "?"."""
    return "".join(char if char.isprintable() else "?" for char in str(value)[:width])


def dump_json(data: dict, indent: int | None = None) -> bytes:
    """Encode a dict as JSON."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode("utf-8", "replace")


def parse_json(data: bytes) -> dict:
    """Parse one JSON object. Raises InvalidFileError for what no file of this program contains."""

    def refuse(text: str):
        raise ValueError(f"{text} is not a finite number")

    # Count before parsing: a small file can hold very many objects. Commas in strings (also in one
    # that does not end) do not count.
    skeleton = re.sub(rb'"(?:[^"\\]|\\.)*+"?', b"", data, flags=re.DOTALL)
    if sum(map(skeleton.count, (b",", b"[", b"{"))) > MAX_JSON_ELEMENTS:
        raise InvalidFileError("too many elements")

    try:
        parsed = json.loads(data, parse_constant=refuse)
        json.dumps(parsed, ensure_ascii=False).encode()  # "\ud800" parses but cannot be saved
    except (ValueError, RecursionError) as error:
        raise InvalidFileError("not valid JSON" if data else "empty file") from error
    if not isinstance(parsed, dict):
        raise InvalidFileError("not a JSON object")
    return parsed


def parse_reward(data: dict, node: str, round_: int, stage: int) -> dict:
    """The reward and the metrics of a reward file. Raises InvalidFileError.

    They become columns and curves, so only numbers with plain names are kept, 128 at most. A node
    that generates nothing (I = 0) has no reward: it is None.
    """
    row = {"reward": None}
    for name, value in list(data.items())[:128]:
        if is_finite_number(value) and re.fullmatch(r"\w{1,40}", name, re.ASCII):
            row[name] = value

    # It must say what its path says.
    header = {"node_id": node, "round": round_, "stage": stage}
    in_range = row["reward"] is None or 0 <= row["reward"] <= 1
    has_time = 0 < row.get("timestamp", 0) < 1e11
    if not (in_range and has_time and header.items() <= data.items()):
        raise InvalidFileError("not a reward, or its contents do not match its path")
    return row | header


def parse_rollouts(data: dict, node: str, round_: int, stage: int) -> list[dict]:
    """The groups of a rollout file, their structure checked. Raises InvalidFileError.

    A group: {"key": (round, stage, node, index), "task", "seed", "prompt", "answer", "completions":
    [{"response", "finished", "reward"}]}. The answer and the rewards are claims of the peer. They
    are shown to people and never used for learning.
    """

    def require(value, types: dict) -> None:
        for name, kind in types.items():
            if not isinstance(value, dict) or type(value.get(name)) is not kind:
                raise InvalidFileError(f"{name} is missing or not of type {kind.__name__}")
            if kind is str and len(value[name]) > MAX_TEXT_CHARS:
                raise InvalidFileError(f"{name} is too long")

    # The file must say what its path says.
    header = [data.get(name) for name in ("format", "peer_id", "round", "stage")]
    if header != [ROLLOUT_FORMAT_VERSION, node, round_, stage]:
        raise InvalidFileError("another format, or its contents do not match its path")
    require(data, {"rollouts": dict})

    groups = []
    for index, group in data["rollouts"].items():
        # The question.
        require(group, {"task": str, "seed": int, "prompt": str, "completions": list})
        if not re.fullmatch(r"0|[1-9]\d{0,5}", index, re.ASCII):  # "01" would be group 1 once more
            raise InvalidFileError("the index of a group is not a number")
        if not 0 <= group["seed"] < MAX_SEED or not 2 <= len(group["completions"]) <= 64:
            raise InvalidFileError("seed or group size out of range")

        # Its completions.
        completions = []
        for completion in group["completions"]:
            require(completion, {"response": str, "finished": bool})
            reward = completion.get("reward", 0)
            if not is_finite_number(reward):
                raise InvalidFileError("reward is not a number")
            completions.append({**completion, "reward": reward})

        key = (round_, stage, node, int(index))
        answer = str(group.get("answer"))[:64]
        groups.append({**group, "key": key, "answer": answer, "completions": completions})
    return groups


# -------- Retry -----------------------------------------------------------------------------------


class RetryingStore:
    """A DriveStore whose calls are repeated until the folder can be reached. That is safe because
    every method of DriveStore may be called twice.

    on_event(kind, text): called once when an outage begins and once when it is over.
    """

    def __init__(self, store: DriveStore, on_event, signals):
        self.store = store
        self.on_event = on_event
        self.signals = signals

    def __getattr__(self, name):
        attribute = getattr(self.store, name)
        if not callable(attribute):
            return attribute
        return lambda *args, **kwargs: self.retry(attribute, *args, **kwargs)

    def retry(self, call, *args, **kwargs):
        """Call `call(…)` again after each OSError, with pauses of 0.5 to 5 seconds."""
        started = time.monotonic()
        pause = 0.0
        while True:
            try:
                result = call(*args, **kwargs)
                break
            except OSError as error:
                # One line when it begins, and one when it is over.
                if pause == 0:
                    text = f"waiting for the shared folder ({printable(error, 200)})"
                    self.on_event("outage", text)

                self.store.checked_dirs.clear()  # it may not be the same folder afterwards
                pause = min(5.0, 2 * pause or 0.5)
                self.signals.sleep(pause)  # KeyboardInterrupt if the user stops during an outage

        if pause > 0:
            seconds = time.monotonic() - started
            self.on_event("outage over", f"the shared folder is back after {seconds:.0f} s")
        return result


def poll_sleep(poll_started: float) -> float:
    """Sleep as long as the last poll took, between 20 ms and 2 s. Returns the time of both; a poll
    counts 2 s at most, so that an outage does not use up a budget."""
    poll_seconds = min(2.0, time.monotonic() - poll_started)
    pause = max(0.02, poll_seconds)
    time.sleep(pause)
    return poll_seconds + pause
