"""The shared folder is the swarm's only means of communication. Every path of an experiment has one
writer. A node whose newest session said goodbye has exited (or failed). Any other is alive if it
registered, wrote its heartbeat or moved a marker in the last STALE_AFTER_SECONDS (300), else dead.

experiments/NAME/
    config.json      the settings that the experiment began with; its maker writes it last
    board/           the names of its files are the state of the swarm; a node renames its own
        session.anna.1795300037123-ab12cd34      anna's newest process (only sessions have contents)
        open.coordinator.000012.0                the coordinator has opened round 12
        open.anna.000012.0                       anna has entered round 12
        rollouts.anna.000012.0                   anna has published up to round 12, stage 0
        rewards.anna.000012.0                    … and has submitted its reward
        checkpoint.anna.000009.0                 … and has written a checkpoint after round 9
    nodes/anna/      everything that anna writes: heartbeat.json, rollouts/, rewards/, checkpoints/,
                     logs/, model/
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
from typing import NamedTuple


class At(NamedTuple):
    """A stage of a round, the swarm's unit of time."""

    round: int
    stage: int = 0


# A node's name, kind.node.round.stage, and session.node.id: the last id is the newest.
NODE = r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?"
MARKER = rf"(open|rollouts|rewards|checkpoint)\.({NODE})\.(\d{{6}})\.(0|[1-9]\d?)"
SESSION = rf"session\.({NODE})\.(\d{{13}}-[0-9a-f]{{8}})"


@dataclass
class Board:  # the state of the swarm
    open_round: int = -1
    sessions: dict = field(default_factory=dict)  # node -> its newest session id
    progress: dict = field(default_factory=dict)  # (kind, node) -> At, how far it has got

    @property
    def workers(self) -> list[str]:
        """All nodes that ever registered but the coordinator, sorted."""
        return sorted(self.sessions.keys() - {COORDINATOR_ID})

    def reached(self, kind: str, at: At) -> list[str]:
        """The nodes that have got as far as this stage, sorted."""
        return sorted(n for (k, n), reached in self.progress.items() if k == kind and reached >= at)


def parse_board(names: list[str]) -> Board:
    """One listing of board/ tells the state. Where a node has several markers of a kind the newest
    counts. Names of any other form are ignored."""
    board = Board()
    for name in sorted(names):
        if session := re.fullmatch(SESSION, name, re.ASCII):
            board.sessions[session[1]] = session[2]
        elif marker := re.fullmatch(MARKER, name, re.ASCII):
            kind, node, round_, stage = marker.groups()
            at = At(int(round_), int(stage))
            board.progress[kind, node] = max(at, board.progress.get((kind, node), At(-1)))
            if kind == "open":
                board.open_round = max(board.open_round, at.round)
    return board


class SwarmFolder:
    """What nodes do in it. `DriveStore`, below, is this class with all that makes it safe."""

    def board(self) -> Board:
        board = parse_board(os.listdir(self.resolve_dir("board")))
        self.note_signs_of_life(board)
        return board

    def move_marker(self, kind: str, node: str, at: At) -> None:
        """Say how far a node has got: rename its marker, or post the first one."""
        name = marker_name(kind, node, at)
        before = self.own_marker(kind, node)  # None if there is none yet
        if before is None:
            self.post(node, name)
        else:
            os.replace(self.resolve(f"board/{before}"), self.resolve(f"board/{name}"))
        self.markers[kind, node] = name

    def publish(self, kind: str, node: str, at: At, data: dict) -> dict:
        """Write a node's rollouts or reward of a stage, unless a valid file from before a kill is
        there: peers may have read it, so it never changes. Returns what the file holds."""
        published = self.already_published(kind, node, at)
        if published is None:
            published = header(kind, node, at) | data
            self.write(stage_file(kind, node, at), dump_json(published))
        # The marker last: who sees it finds the file (on some storages a little later).
        self.move_marker(kind, node, at)
        return published

    def fetch_rollouts(self, node: str, at: At) -> list[dict] | None:
        """A peer's groups; None if there is no file. One that is broken, too large or a link raises
        InvalidFileError: it is counted, skipped, and read again if a later round needs it."""
        data = self.read_json(stage_file("rollouts", node, at), MAX_JSON_BYTES)
        return None if data is None else parse_rollouts(data, node, at)

    def write(self, path: str, data: bytes) -> None:
        """Write a file in place of an older one. A reader sees the old one or the whole new one."""
        with self.temporary(path) as temp:  # a name beside it that no listing shows
            temp.write_bytes(data)
            os.replace(temp, self.resolve(path))


# ==== The heart ends here. Below: reading with care, signs of life, housekeeping, retry ===========

# A path in this file is relative to the experiment's folder, or to the shared folder if it begins
# with "/". Logs are appended to. Every other file is written under another name in a folder of the
# same writer and then renamed. A name beside its place tells whose it is: .new-<node>-<hex>.
#
# Whatever another node wrote may come from a stranger. Size, type and structure of a file are
# checked before it is used; one that cannot be used raises InvalidFileError. No link is followed.
# Where a node's own folder is a link, its writes fail and it waits.
#
# Every method tries once, may be called twice, and raises OSError if the folder cannot be reached.
# `RetryingStore` repeats it until it can.

LAYOUT = 5  # of the tree above; config.json says it
ROLLOUT_FORMAT_VERSION = 1  # the key "format" of a rollout file
NODE_DIRS = ("rollouts", "rewards", "checkpoints", "logs")
EXITED_STATES = ("done", "stopped", "failed")  # of the last heartbeat of a process
FOLDER_TIMEOUT_SECONDS = 30.0  # a folder that another process made shows later on a mounted drive
MAX_JSON_BYTES = 8 << 20  # a rollout file of 64 x 64 completions of 256 tokens takes about 4 MiB
MAX_JSON_ELEMENTS = 400_000  # 8 MiB of "[]," would parse to a gigabyte of Python objects
MAX_METADATA_BYTES = 64 << 10
MAX_SEED = 2**53  # JSON readers in other languages round larger integers
COORDINATOR_ID = "coordinator"
COLAB_DRIVES = ("/content/drive/MyDrive", "/content/gdrive/MyDrive")


def in_step(board: Board, kind: str, t: int, config) -> set[str]:
    """The workers that round t waits for while they live: those that got to the end of the round
    before (kind: of its "rollouts" or of its "rewards"), or have entered this one. At first all."""
    if t == 0:
        return set(board.workers)
    before = At(t - 1, config.MAX_STAGES - 1)
    return {*board.reached(kind, before), *board.reached("open", At(t))} - {COORDINATOR_ID}


class StoreError(Exception):
    """This node's or the experiment's own state cannot be used. The program stops and says why."""


class InvalidFileError(ValueError):
    """A file that cannot be used. The text is a short reason, fit for a log line."""


class DriveStore(SwarmFolder):
    """The files of one experiment, and what stands beside the experiments."""

    def __init__(self, root, experiment: str, node: str = ""):
        self.root = Path(root)
        self.dir = self.root / "experiments" / experiment
        self.node = node  # the first one of this process; readers have none
        self.invalid_files = Counter()  # reason -> number of failed reads
        self.is_maker = False
        self.waiting_since = {}  # reason -> when this process began to wait for a folder
        self.session = ""  # of this process, once it registers
        self.own_nodes = []
        self.markers = {}  # (kind, node) -> name of the marker that this process has written
        self.progress = {}  # of the last listing of the board
        self.moved_at = {}  # node -> when one of its markers was last seen to move
        self.checked_dirs = set()  # known to be no links; a check costs a file-system call
        self.checked_logs = set()  # the same of logs
        self.append_at = {}  # path of a log -> its length before an append that has failed so far

    # -- who is there

    def note_signs_of_life(self, board: Board) -> None:
        """A marker that moves is a sign of life (see `node_status`)."""
        for (kind, node), at in board.progress.items():
            if self.progress.get((kind, node), at) != at:
                self.moved_at[node] = time.time()
        self.progress = board.progress

    def own_marker(self, kind: str, node: str) -> str | None:
        """The name of a node's marker, as this process has left it or as the board shows it."""
        if (kind, node) in self.markers:
            return self.markers[kind, node]
        at = self.board().progress.get((kind, node))
        return None if at is None else marker_name(kind, node, at)

    def post(self, node: str, name: str, data: bytes = b"") -> None:
        """Put a file of this node on the board. It is written in the node's own folder first."""
        self.write(f"nodes/{node}/posting", data)
        os.replace(self.resolve(f"nodes/{node}/posting"), self.resolve(f"board/{name}"))

    def register(self, nodes: list[str], metadata: dict, folders=NODE_DIRS) -> str:
        """Register a process under the names of its nodes, and make the folders in theirs. Returns
        the id of its session.

        It begins with the time in milliseconds and sorts after every earlier one of these nodes.
        """
        # A clock that was set back must not make this session the older one.
        if not self.session:
            sessions = self.board().sessions
            previous = max((sessions.get(node, "0") for node in nodes), default="0")
            milliseconds = max(int(time.time() * 1000), int(previous[:13]) + 1)
            self.session = f"{milliseconds:013d}-{secrets.token_hex(4)}"

        for node in nodes:
            self.post(node, f"session.{node}.{self.session}", dump_json(metadata))
            for folder in folders:
                self.make_dir(f"nodes/{node}/{folder}")
        self.own_nodes = nodes
        return self.session

    def write_heartbeat(self, node: str, session: str, state: str = "running") -> None:
        """Show that a node is alive. state: running, or one of EXITED_STATES when it exits."""
        data = {"time": time.time(), "session": session, "state": state}
        self.write(f"nodes/{node}/heartbeat.json", dump_json(data))

    def node_status(self, node: str, session: str, stale_after: float) -> str:
        """Return "exited" or, after an error, "failed" if the last heartbeat of its newest session
        says so, else "alive" if there was a sign of life less than stale_after seconds ago, or
        "dead".

        Signs of life are its registration, its heartbeat and, because on a mounted drive a file
        that is rewritten often may never arrive, a marker that was seen to move.
        """
        heartbeat = self.read_valid(f"nodes/{node}/heartbeat.json") or {}
        if heartbeat.get("session") == session and heartbeat.get("state") in EXITED_STATES:
            return "failed" if heartbeat["state"] == "failed" else "exited"

        signs = [int(session[:13] or 0) / 1000, self.moved_at.get(node, 0.0)]
        if is_finite_number(heartbeat.get("time")):
            signs.append(heartbeat["time"])
        # A peer's clock may be ahead.
        youngest = min(abs(time.time() - sign) for sign in signs)
        return "alive" if youngest < stale_after else "dead"

    # -- rollouts and rewards

    def already_published(self, kind: str, node: str, at: At):
        """The contents of a valid file from before a kill, or else None."""
        parse = parse_rollouts if kind == "rollouts" else parse_reward
        with contextlib.suppress(FileNotFoundError, InvalidFileError):
            data = parse_json(self.read_bytes(stage_file(kind, node, at), MAX_JSON_BYTES))
            return parse(data, node, at)

    def read_reward(self, node: str, at: At) -> dict | None:
        """A node's reward and metrics, None if there is no valid file."""
        path = stage_file("rewards", node, at)
        return self.read_valid(path, lambda data: parse_reward(data, node, at))

    def list_stages(self, kind: str, node: str, lenient: bool = False) -> list[At]:
        """The stages of a node's files of this kind, ascending. Only names that this program makes
        count. lenient: see `list_names`."""
        ending = r"\.safetensors" if kind == "checkpoints" else r"\.stage_(0|[1-9]\d?)\.json"
        pattern = re.compile(rf"round_(\d{{6}}){ending}", re.ASCII)
        matches = map(pattern.fullmatch, self.list_names(f"nodes/{node}/{kind}", lenient))
        return sorted(At(*map(int, match.groups())) for match in matches if match)

    # -------- Logs --------------------------------------------------------------------------------

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
            with self.open(path) as file:
                data = file.read(max_bytes + 1)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EINVAL):  # a link, or not a regular file
                raise InvalidFileError("not a regular file") from error
            raise
        if len(data) > max_bytes:
            raise InvalidFileError(f"larger than {max_bytes} bytes")
        return data

    def read_json(self, path: str, max_bytes: int = MAX_METADATA_BYTES) -> dict | None:
        """One JSON object; None if there is no such file. Raises InvalidFileError.

        An error on this one file (EIO, ESTALE, EACCES) counts as an invalid file, so that a peer's
        bad disk stops nobody. It is an outage, OSError, if the experiment's folder cannot be listed
        either, and if the file is of a node of this process, whose run must repeat.
        """
        try:
            return parse_json(self.read_bytes(path, max_bytes))
        except FileNotFoundError:
            self.check_mounted(path)
            return None
        except OSError as error:
            self.check_mounted(path)
            if path.split("/")[1:2] in [[node] for node in self.own_nodes]:
                raise
            raise InvalidFileError(f"unreadable ({error.strerror or error})") from error

    def read_valid(self, path: str, parse=lambda data: data) -> dict | None:
        """parse(the object in a file), None for a file that is missing or cannot be used."""
        try:
            data = self.read_json(path)
            return None if data is None else parse(data)
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
        """Names in a folder, sorted. An empty list if there is no such folder, or a link.

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

        # Until its maker writes config.json only board/ and nodes/ hold anything. Other folders
        # that do come from earlier versions or from the program that this one replaces.
        if config is None:
            folders = {path.parent.name for path in self.dir.glob("[!.]*/*")}
            is_foreign = not folders <= {"board", "nodes"}
        else:
            is_foreign = config.get("layout") != LAYOUT
        if is_foreign:
            advice = "take another EXPERIMENT_NAME; nothing was changed"
            raise StoreError(f"{self.dir}: made by another version or program; {advice}")
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
            own = ["", *NODE_DIRS, "winners", "model"]
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

    def prune_rollouts(self, node: str, before_round: int, archive: bool) -> list[str]:
        """Delete a node's rollouts of older rounds, or move them to archives/EXPERIMENT/NODE/.
        Returns the names of what stays because it is no file or cannot be moved."""
        archives = f"/archives/{self.dir.name}"
        if archive:
            if not self.has_dir(archives):  # until it is there again, nothing is moved
                return []
            self.make_dir(f"{archives}/{node}")
        stuck = []
        for at in self.list_stages("rollouts", node):
            if at.round >= before_round:
                break
            path = self.resolve(stage_file("rollouts", node, at))
            try:
                if archive:
                    os.replace(path, self.resolve(f"{archives}/{node}/{path.name}"))
                else:
                    path.unlink(missing_ok=True)
            except OSError:
                self.check_mounted()
                stuck.append(path.name)
        return stuck

    def delete(self, path: str, frees_space: bool = False) -> None:
        """Delete a file. It is renamed first, so that no reader finds half of it."""
        with contextlib.suppress(FileNotFoundError), self.temporary(path) as temp:
            os.replace(self.resolve(path), temp)
            remove(temp, frees_space)

    # -------- Files of libraries ------------------------------------------------------------------
    # A library reads and writes local files only: what it calls them and how it opens them need not
    # work on every mount, and its errors are no outages.

    def upload(self, local: Path, path: str) -> None:
        """Copy a local file here. It is on disk before this returns, because a checkpoint must be
        there before an older one is deleted."""
        target = self.resolve(path)
        with self.temporary(path) as temp:
            with local.open("rb") as source, open(temp, "xb") as copy:
                shutil.copyfileobj(source, copy, 2**20)
                copy.flush()
                os.fsync(copy.fileno())
            if target.is_dir() and not target.is_symlink():
                self.delete(path)  # a file replaces no folder
            os.replace(temp, target)

    def upload_model(self, folder: Path, path: str) -> None:
        """Copy a model's files here, each in place of an older one. What else lies there stays.

        First the weights. The index of several files of weights goes first and comes last, so that
        a kill in between leaves a folder that loads, or that says what it lacks.
        """
        self.make_dir(path)
        index = f"{path}/model.safetensors.index.json"
        self.delete(index)
        names = sorted(os.listdir(folder), key=lambda name: (name.endswith(".json"), name))
        for name in names:
            self.upload(folder / name, f"{path}/{name}")

    def download(self, path: str, local: Path, max_bytes: int) -> bool:
        """Copy a file from here. Returns False if there is none. Raises InvalidFileError if it is
        too large or not regular, or if it alone cannot be read."""
        try:
            with self.open(path) as source:
                if os.fstat(source.fileno()).st_size > max_bytes:
                    raise InvalidFileError(f"larger than {max_bytes} bytes")
                with local.open("wb") as copy:
                    shutil.copyfileobj(source, copy, 2**20)
        except FileNotFoundError:
            self.check_mounted(path)
            return False
        except OSError as error:
            self.check_mounted(path)
            raise InvalidFileError(printable(error, 200)) from error
        return True

    @contextlib.contextmanager
    def temporary(self, path: str):
        """A new name beside a file, which no listing shows. It tells whose file it is: below
        nodes/NODE that node's, elsewhere this process's. After an error nothing is left of it."""
        node = path.split("/")[1] if path.startswith("nodes/") else self.node
        temp = self.resolve(path).with_name(f".new-{node}-{secrets.token_hex(8)}")
        try:
            yield temp
        except OSError:
            remove(temp)
            raise


def remove(path: Path, frees_space: bool = False) -> None:
    """Delete a file, a link, or a folder with all that is in it, if that is possible.

    frees_space: on Google Drive a deleted file goes to the trash, where it still counts, so empty
    it first. Not one with hard links: what its other names show would be lost.
    """
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(RecursionError):  # somebody planted a thousand folders
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


def stage_file(kind: str, node: str, at: At) -> str:
    """("rewards", "anna", At(12, 0)) -> "nodes/anna/rewards/round_000012.stage_0.json"."""
    return f"nodes/{node}/{kind}/round_{at.round:06d}.stage_{at.stage}.json"


def marker_name(kind: str, node: str, at: At) -> str:
    """("rewards", "anna", At(12, 0)) -> "rewards.anna.000012.0"."""
    return f"{kind}.{node}.{at.round:06d}.{at.stage}"


def header(kind: str, node: str, at: At) -> dict:
    """What a rollout or reward file says of itself."""
    return {
        "peer_id" if kind == "rollouts" else "node_id": node,
        "round": at.round,
        "stage": at.stage,
        "timestamp": time.time(),
    }


# -------- Parsing untrusted files -----------------------------------------------------------------


def default_root() -> str:
    """The shared folder where GDRIVE_PATH is not set: in a mounted Google Drive, or here."""
    mounted = [folder for folder in COLAB_DRIVES if os.path.isdir(folder)]
    return f"{mounted[0]}/rl-swarm" if mounted else "rl-swarm"


def is_safe_name(name: str) -> bool:
    """Whether `name` may become part of a path: 1 to 64 letters, digits, ".", "_" or "-"."""
    return re.fullmatch(NODE, name) is not None


def is_finite_number(value) -> bool:
    """Whether `value` is a finite int or float. Booleans and integers beyond floats are not."""
    return type(value) in (int, float) and abs(value) < 1e300


def printable(value, width: int = 100) -> str:
    """Text from a stranger, safe for a terminal: cut to `width`, control characters as "?"."""
    text = "".join(char if char.isprintable() else "?" for char in str(value)[: width + 1])
    return text if len(text) <= width else text[: width - 1] + "…"


def dump_json(data: dict, indent: int | None = None) -> bytes:
    """Encode a dict as JSON."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode("utf-8", "replace")


def parse_json(data: bytes) -> dict:
    """Parse one JSON object. Raises InvalidFileError for what no file of this program contains."""
    # Count before parsing: a small file can hold very many objects. Commas in strings (also in one
    # that does not end) do not count.
    skeleton = re.sub(rb'"(?:[^"\\]|\\.)*+"?', b"", data, flags=re.DOTALL)
    if sum(map(skeleton.count, (b",", b"[", b"{"))) > MAX_JSON_ELEMENTS:
        raise InvalidFileError("too many elements")

    try:
        parsed = json.loads(data)
        # NaN, 1e999 and "\ud800" parse but cannot be saved.
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidFileError("not valid JSON" if data else "empty file") from error
    if not isinstance(parsed, dict):
        raise InvalidFileError("not a JSON object")
    return parsed


def parse_reward(data: dict, node: str, at: At) -> dict:
    """The reward and the metrics of a reward file. Raises InvalidFileError.

    They become columns and curves, so only numbers with plain names are kept, 128 at most. A node
    that generates nothing (I = 0) has no reward: it is None.
    """
    items = [(name, value) for name, value in list(data.items())[:128] if is_finite_number(value)]
    items = [item for item in items if re.fullmatch(r"\w{1,40}", item[0], re.ASCII)]
    row = {"reward": None} | dict(items)

    # It must say what its path says.
    expected = {"node_id": node, "round": at.round, "stage": at.stage}
    in_range = row["reward"] is None or 0 <= row["reward"] <= 1
    has_time = 0 < row.get("timestamp", 0) < 1e11
    if not (in_range and has_time and expected.items() <= data.items()):
        raise InvalidFileError("not a reward, or its contents do not match its path")
    return row | expected


def parse_checkpoint(text: bytes) -> tuple[str, int, dict]:
    """The text of a checkpoint: the model's name, the round, and {node: (total reward, keys of the
    external groups used, {when: held-out accuracy})}. Raises InvalidFileError."""
    data = parse_json(text)
    nodes = {}
    try:
        for node, saved in data["nodes"].items():
            used = {(int(t), int(s), str(peer), int(i)) for t, s, peer, i in saved["trained"]}
            held_out = {str(when): float(value) for when, value in saved["held_out"].items()}
            nodes[node] = float(saved["total_reward"]), used, held_out
        return data["model_name"], data["round"], nodes
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InvalidFileError("its text is not a checkpoint's") from error


def parse_rollouts(data: dict, node: str, at: At) -> list[dict]:
    """The groups of a rollout file, their structure checked. Raises InvalidFileError.

    A group: {"key": (round, stage, node, index), "task", "seed", "prompt", "answer", "completions":
    [{"response", "finished", "reward"}]}. The answer and the rewards are claims of the peer. They
    are shown to people and never used for learning.
    """

    def require(value, types: dict) -> None:
        for name, kind in types.items():
            if not isinstance(value, dict) or type(value.get(name)) is not kind:
                raise InvalidFileError(f"{name} is missing or not of type {kind.__name__}")

    # The file must say what its path says.
    claims = [data.get(name) for name in ("format", "peer_id", "round", "stage")]
    if claims != [ROLLOUT_FORMAT_VERSION, node, *at]:
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

        key = (*at, node, int(index))
        answer = str(group.get("answer"))[:64]
        groups.append({**group, "key": key, "answer": answer, "completions": completions})
    return groups


# -------- Retry -----------------------------------------------------------------------------------


# Errors that hardly go by waiting. Before a process has registered, they end it.
HOPELESS = (errno.ENOTEMPTY, errno.EROFS, errno.EACCES, errno.EOPNOTSUPP, errno.ENAMETOOLONG)


class RetryingStore:
    """A DriveStore whose calls are repeated until the folder can be reached. That is safe because
    every method of DriveStore may be called twice. One thread makes all calls, in order: if a
    process is killed, the folder holds its writes up to some point and none after it.

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
                advice = ""
                if error.errno in HOPELESS:
                    advice = ": look at permissions, mount options and the length of the path"
                    if not self.store.session:
                        text = f"the shared folder cannot be used ({printable(error, 200)}){advice}"
                        raise StoreError(text) from error

                # One line when it begins, and one when it is over.
                if pause == 0:
                    text = f"waiting for the shared folder ({printable(error, 200)}){advice}"
                    self.on_event("outage", text)

                self.store.checked_dirs.clear()  # it may not be the same folder afterwards
                self.store.markers.clear()
                pause = min(5.0, 2 * pause or 0.5)
                self.signals.sleep(pause)  # KeyboardInterrupt if the user stops during an outage

        if pause > 0:
            seconds = time.monotonic() - started
            self.on_event("outage over", f"the shared folder is back after {seconds:.0f} s")
        return result


class Stopped(Exception):
    """A process ends early: "stopped" by a signal, or "superseded" by a newer one of its name."""


class Member:
    """A process in the swarm, under the names of its nodes: it registers, looks at the board, shows
    that it is alive, and gives way to a newer process of its name."""

    def __init__(self, store, nodes: list[str], stale_after: float):
        self.store = store
        self.nodes = nodes
        self.stale_after = stale_after
        self.board = Board()  # as of the last `refresh`
        self.alive = {}  # the nodes asked for since then: a question costs a read of a file
        self.session = ""  # of this process, once it has registered
        self.next_heartbeat = 0.0
        self.poll_started = self.changed_at = 0.0  # when the last look began, when one saw a change
        self.coordinator_seen_at = time.monotonic()

    def register(self, metadata: dict, folders=NODE_DIRS) -> None:
        """Join the swarm."""
        self.session = self.store.register(self.nodes, metadata, folders)
        self.refresh()
        self.beat()

    def refresh(self) -> Board:
        """Look at the board."""
        self.poll_started = time.monotonic()
        before = self.board
        self.board = self.store.board()
        self.alive.clear()
        if self.board != before:
            self.changed_at = self.poll_started
        return self.board

    def sleep(self) -> float:
        """Sleep as long as the last look took, or a tenth of the time in which nothing has changed,
        between 20 ms and 2 s. Returns the seconds of look and sleep. A look counts 2 s at most, so
        that an outage does not use up a budget."""
        poll_seconds = min(2.0, time.monotonic() - self.poll_started)
        unchanged = self.poll_started - self.changed_at
        pause = max(0.02, poll_seconds, min(2.0, unchanged / 10))
        time.sleep(pause)
        return poll_seconds + pause

    def beat(self, state: str = "running") -> None:
        """Write the heartbeats if they are due, or the last ones."""
        is_due = state != "running" or time.monotonic() >= self.next_heartbeat
        if is_due and self.session:  # not before it has registered
            for node in self.nodes:
                self.store.write_heartbeat(node, self.session, state)
            self.next_heartbeat = time.monotonic() + min(10.0, self.stale_after / 8)

    def is_alive(self, node: str) -> bool:
        """Whether a node of the swarm was alive at the last look."""
        if node not in self.alive:
            session = self.board.sessions.get(node)
            status = session and self.store.node_status(node, session, self.stale_after)
            self.alive[node] = status == "alive"
        return self.alive[node]

    def others(self) -> set[str]:
        """All nodes of the swarm but those of this process."""
        return self.board.sessions.keys() - set(self.nodes)

    def check_superseded(self) -> None:
        """Raise Stopped if a newer process has registered one of these nodes."""
        sessions = self.refresh().sessions
        if any(sessions.get(node, "") > self.session for node in self.nodes):
            raise Stopped("superseded")

    def check_in(self, signals) -> Board:
        """Look at the board between rounds. Raises Stopped if this process is to end."""
        self.check_superseded()
        self.beat()
        if signals.requested:  # only between rounds: a round that has begun is finished
            raise Stopped("stopped")
        return self.board
