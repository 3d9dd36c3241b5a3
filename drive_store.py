"""The shared folder is the swarm's only means of communication. There is no server and no lock.

A node is a worker, which trains, or the coordinator. A process runs one or more nodes. All nodes
follow these rules:

1. Each of a node's files has one writer, the node's newest process.
2. Files, except logs, are written under a temporary name and then renamed. Renaming is atomic, so
   a reader sees no file, the older file or the complete new file, even if the writer is killed.
3. A *marker* is an empty file in board/ whose name records how far a node has progressed. The node
   renames it to advance, so one listing of board/ shows the state of the swarm.
4. A node writes a file before it moves the marker, so a reader that sees the marker finds the file.

On a local disk, these rules are exact. On a mounted drive, changes may reach other machines late,
incompletely or out of order. A reader therefore looks for a missing file again, and reads a damaged
file again in the next round. A new version of a file may arrive late, and peers may have read the
older version, so a valid rollout or reward file is never rewritten.

experiments/NAME/    (next to experiments/: warmstart/, reports/, archives/)
    config.json      the settings at creation
    board/           the state of the swarm, encoded in file names
        session.anna.1795300037123-ab12cd34      registers a process of anna; the highest is newest
        open.anna.000012.0                       anna has entered round 12
        open.coordinator.000012.0                … and so has the coordinator
        rollouts.anna.000012.0                   anna has published up to round 12, stage 0
        rewards.anna.000012.0                    … has submitted rewards up to the same stage
        checkpoint.anna.000009.0                 … and has saved a checkpoint after round 9
    nodes/anna/      anna's other files: rollouts/round_000012.stage_0.json …, rewards/ with the
                     same file names, heartbeat.json, checkpoints/, logs/, model/

The first node to enter a round opens it. The *open round* is the newest round that any node has
entered.

A node has *exited* if the last heartbeat of its newest process contains the state "done", "stopped"
or "failed". Otherwise, it is *alive* if, within the last STALE_AFTER_SECONDS (300), that process
registered, its last heartbeat was written, or one of its markers was seen to move. If not, it is
*dead*.
"""

import contextlib
import errno
import functools
import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class At(NamedTuple):
    """A stage of a round, the unit of progress. At(12, 1) < At(13, 0)."""

    round: int
    stage: int = 0  # a round has MAX_STAGES stages, by default one


@dataclass
class Board:
    """A snapshot of the swarm's state, parsed from one listing of board/.

    A marker's kind is the first word of its name: "open", "rollouts", "rewards" or "checkpoint".
    """

    open_round: int = -1
    sessions: dict = field(default_factory=dict)  # node_id -> "1795300037123-ab12cd34", the newest
    progress: dict = field(default_factory=dict)  # (kind, node_id) -> At of this marker

    @property
    def workers(self) -> list[str]:
        """All workers that have ever joined, sorted."""
        return sorted(self.sessions.keys() - {COORDINATOR_ID})

    def reached(self, kind: str, at: At) -> list[str]:
        """Return the nodes whose marker of this kind is at this stage or later, sorted."""
        return sorted(n for (k, n), last in self.progress.items() if k == kind and last >= at)

    def in_step(self, kind: str, t: int, num_stages: int) -> set[str]:
        """Return the workers that are in step with round t; in round 0, all of them.

        A worker is in step if it has published the rollouts of round t - 1 (kind "rollouts", used
        by workers) or submitted that round's reward (kind "rewards", used by the coordinator), or
        if it has entered round t. Other nodes wait for it while it is alive. If it dies in
        round t, it is not in step with round t + 2, so it usually delays only one round.
        """
        if t == 0:
            return set(self.workers)

        last_stage = At(t - 1, num_stages - 1)
        in_step = {*self.reached(kind, last_stage), *self.reached("open", At(t))}
        return in_step - {COORDINATOR_ID}


class Folder:
    """The folder of one experiment, with the rules above as code.

    A path is relative to this folder or, if it starts with "/", to the shared folder. While the
    shared folder is unavailable (an *outage*), methods raise OSError. The subclass `DriveStore`,
    below, waits instead, and provides `read`, `list_names` and `post` (put a file on the board).
    """

    def __init__(self, root, experiment: str, node_ids=()):
        self.root = Path(root)
        self.dir = self.root / "experiments" / experiment
        self.node_ids = list(node_ids)  # this process's nodes; empty for readers
        self.markers = {}  # (kind, node_id) -> name; `Swarm.join` adds earlier processes' markers

        # A file has this name while it is being written. Readers skip it. If this process is
        # killed, the next process with the same owner deletes the file.
        owner = self.node_ids[0] if self.node_ids else "prepare"
        self.temporary_name = f".new-{owner}-{secrets.token_hex(8)}"

    def read_board(self) -> Board:
        return parse_board(self.list_names("board"))

    def move_marker(self, kind: str, node_id: str, at: At) -> None:
        """Rename a node's marker to record its progress, or post the marker if it is missing."""
        name = marker_name(kind, node_id, at)
        before = self.markers.get((kind, node_id))
        if before is None or not self.rename(f"board/{before}", f"board/{name}"):
            self.post(node_id, name)
        self.markers[kind, node_id] = name

    def publish(self, kind: str, node_id: str, at: At, data: dict):
        """Write a node's rollout or reward file for a stage, and then move its marker (rule 4).

        If the node repeats the stage after a crash, keep a valid older file, because peers may have
        read it. Return its contents (as `fetch` does), or None if `data` was written.
        """
        path = stage_file(kind, node_id, at)
        content = dump_json(header(kind, node_id, at) | data)

        older = None
        if not self.write(path, content, replaces=False):  # there is an older file
            with contextlib.suppress(InvalidFileError):
                older = self.fetch(kind, node_id, at)
            if older is None:  # invalid or gone
                self.write(path, content)

        self.move_marker(kind, node_id, at)
        return older

    def fetch(self, kind: str, node_id: str, at: At):
        """Return a node's groups as dicts (kind "rollouts") or its metrics ("rewards") for a stage.

        Return None if the file does not exist. Raise InvalidFileError if it is unreadable, damaged,
        too large or a link. A peer then skips and counts the file.
        """
        data = self.read(stage_file(kind, node_id, at), MAX_JSON_BYTES)
        parse = parse_rollouts if kind == "rollouts" else parse_reward
        return None if data is None else parse(parse_json(data), node_id, at)

    def write(self, path: str, data: bytes, replaces: bool = True) -> bool:
        """Write a file and return True.

        With replaces=False, keep an older file and return False.
        """
        target = self.resolve(path)
        temp = target.with_name(self.temporary_name)  # in the same folder, so the rename is atomic
        with open(temp, "wb", opener=open_no_link) as file:
            file.write(data)

        if not replaces:
            try:
                os.lstat(target)
            except FileNotFoundError:
                pass  # there is no older file (and no outage, because `temp` was just written)
            else:
                os.unlink(temp)
                return False

        # The check and the rename are two steps. By rule 1, only an older process of this node that
        # is being superseded could write `target` between them.
        os.replace(temp, target)
        return True

    def rename(self, path: str, new_path: str) -> bool:
        """Rename a file. Return False if it is missing (perhaps an attempt in an outage did it)."""
        try:
            os.replace(self.resolve(path), self.resolve(new_path))
            return True
        except FileNotFoundError:
            check_mounted(self, path)  # raises OSError in an outage
            return False

    def make_dir(self, path: str) -> None:
        """Create a folder, unless it exists. Its parent must exist."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.resolve(path))

    def resolve(self, path: str) -> Path:
        return self.root / path[1:] if path.startswith("/") else self.dir / path


# ==== The core ends here. Below: errors, waiting, housekeeping, parsing, a process in the swarm ===

LAYOUT = 5  # version of the tree above, stored in config.json
ANOTHER_NAME = "use another EXPERIMENT_NAME"
COORDINATOR_ID = "coordinator"
NODE_DIRS = ("rollouts", "rewards", "checkpoints", "logs")
EXITED_STATES = ("done", "stopped", "failed")  # in a process's last heartbeat
BEGIN_TIMEOUT_SECONDS = 30.0  # longest wait for config.json once the experiment's folder exists
MAX_JSON_BYTES = 8 << 20  # a rollout file with 64 x 64 completions of 256 tokens is about 4 MiB
MAX_METADATA_BYTES = 64 << 10
# Errors for a path that is not a readable regular file. Waiting does not help.
NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EACCES)
# Errors for an impossible move, such as to a different disk. Waiting does not help.
NO_MOVE = (errno.EXDEV, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM)
# Errors that are final at startup: no permission, a read-only or a different file system.
HOPELESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV)
# Errors of a storage backend that lacks hard links or fsync.
NOT_SUPPORTED = (
    errno.EPERM,
    errno.EACCES,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,  # equals ENOTSUP on Linux
)
COLAB_DRIVES = ("/content/drive/MyDrive", "/content/gdrive/MyDrive")

# -------- Names on the board ----------------------------------------------------------------------
# Examples are the node "anna", the marker "rollouts.anna.000012.0" and the session file
# "session.anna.1795300037123-ab12cd34". A session starts with a time in milliseconds, so a node's
# highest session is its newest.

NODE = r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?"
MARKER = rf"(open|rollouts|rewards|checkpoint)\.({NODE})\.(\d{{6}})\.(0|[1-9]\d?)"
SESSION = rf"session\.({NODE})\.(\d{{13}}-[0-9a-f]{{8}})"


def marker_name(kind: str, node_id: str, at: At) -> str:
    """Return a marker's name. ("rewards", "anna", At(12, 0)) -> "rewards.anna.000012.0"."""
    return f"{kind}.{node_id}.{at.round:06d}.{at.stage}"


def stage_file(kind: str, node_id: str, at: At) -> str:
    """Return the path of a node's rollout or reward file for a stage.

    ("rewards", "anna", At(12, 0)) -> "nodes/anna/rewards/round_000012.stage_0.json".
    """
    return f"nodes/{node_id}/{kind}/round_{at.round:06d}.stage_{at.stage}.json"


def parse_board(names: list[str]) -> Board:
    """Parse a listing of board/. Ignore unknown names, such as a sync client's "… (1)" copies.

    If a node has several markers of a kind, the most advanced marker counts.
    """
    board = Board()
    for name in sorted(names):
        if session := re.fullmatch(SESSION, name, re.ASCII):
            board.sessions[session[1]] = session[2]
        elif marker := re.fullmatch(MARKER, name, re.ASCII):
            kind, node_id, round_, stage = marker.groups()
            at = At(int(round_), int(stage))
            board.progress[kind, node_id] = max(at, board.progress.get((kind, node_id), At(-1)))
            if kind == "open":
                board.open_round = max(board.open_round, at.round)
    return board


# -------- A bad file or an outage? ----------------------------------------------------------------
# A missing file is a valid result while the experiment's folder can be listed. Otherwise, this is
# an outage.


class StoreError(Exception):
    """This folder, experiment or node cannot be used. The program logs the text and exits."""


class InvalidFileError(ValueError):
    """A file is unusable. The text is a short reason for a log line."""


def check_mounted(folder: Folder, path: str) -> None:
    """Raise OSError if the folder that this path is relative to (see `Folder`) is unavailable."""
    os.listdir(folder.root if path.startswith("/") else folder.dir)


def check_read_error(folder: Folder, path: str, error: OSError) -> None:
    """Raise OSError in an outage, or InvalidFileError unless the file is just missing.

    A temporary error on one of this process's own files or on a warm start counts as an outage,
    because the process must not continue without the file.
    """
    check_mounted(folder, path)
    if isinstance(error, FileNotFoundError):
        return

    precious = ("/warmstart/", *[f"nodes/{node_id}/" for node_id in folder.node_ids])
    if path.startswith(precious) and error.errno not in NO_FILE:
        raise error
    raise InvalidFileError(f"unreadable ({error.strerror})") from error


# -------- Waiting for the shared folder -----------------------------------------------------------


def open_no_link(path, flags: int) -> int:
    """Open a file without following a link or blocking on a FIFO that a peer may have planted."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def waits(operation):
    """Decorate a DriveStore operation so that it is repeated until the folder is available.

    Log a line when an outage starts and when it ends. The operation must be safe to repeat, because
    an error may be raised after the work was done. One thread calls all operations in order, so the
    folder always contains a prefix of the process's writes.

    Before the process has joined the swarm, raise StoreError for the errors in HOPELESS.
    """

    @functools.wraps(operation)
    def repeat(store, *args, **kwargs):
        started = time.monotonic()
        pause = 0.0
        while True:
            try:
                result = operation(store, *args, **kwargs)
                break
            except OSError as error:
                if store.on_event is None:  # readers do not wait
                    raise
                if error.errno in HOPELESS and not store.has_joined:
                    raise StoreError(
                        f"cannot use GDRIVE_PATH={store.root} ({error}): "
                        "fix the cause, or use another folder"
                    ) from error

                if pause == 0:
                    store.on_event("outage", f"waiting for the shared folder ({error})")
                pause = min(5.0, 2 * pause or 0.5)  # 0.5, 1, 2, 4, 5, 5 … seconds
                store.sleep(pause)

        if pause > 0:
            seconds = time.monotonic() - started
            store.on_event("outage over", f"the shared folder is back after {seconds:.0f} s")
        return result

    return repeat


class DriveStore(Folder):
    """A `Folder` that waits during an outage. It also provides the other folder operations.

    on_event(kind, text) logs an outage. Without it, as in the report, an outage raises OSError.
    sleep(seconds) may raise KeyboardInterrupt.
    """

    def __init__(self, root, experiment: str, node_ids=(), on_event=None, sleep=time.sleep):
        super().__init__(root, experiment, node_ids)
        self.on_event = on_event
        self.sleep = sleep
        self.invalid_files = Counter()  # reason -> number of failed reads
        self.was_there = os.path.isdir(self.root)  # if so, its absence later means an outage
        self.has_joined = False  # from then on, every OSError is an outage

    write = waits(Folder.write)
    rename = waits(Folder.rename)
    make_dir = waits(Folder.make_dir)

    @waits
    def read(self, path: str, max_bytes: int, from_end: bool = False) -> bytes | None:
        """Return the contents of a file, or None if it does not exist.

        Raise InvalidFileError if the file is larger than max_bytes or unreadable, because a peer's
        bad file must not stop this process. For outages, see `check_read_error`. With `from_end`,
        return the last max_bytes of a larger file instead.
        """
        try:
            with open(self.resolve(path), "rb", opener=open_no_link) as file:
                if from_end:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
                    return file.read(max_bytes)
                data = file.read(max_bytes + 1)
        except OSError as error:
            check_read_error(self, path, error)
            return None
        if len(data) > max_bytes:
            raise InvalidFileError(f"larger than {max_bytes} bytes")
        return data

    @waits
    def list_names(self, path: str) -> list[str]:
        """Return the names in a folder, sorted, or [] if the folder does not exist."""
        try:
            return sorted(os.listdir(self.resolve(path)))
        except (FileNotFoundError, NotADirectoryError):
            check_mounted(self, path)
            return []

    # -- files

    def post(self, node_id: str, name: str, data: bytes = b"") -> None:
        """Put a file on the board.

        The file is first written to the node's own folder. If this process is killed before the
        rename, the node's next process deletes it there.
        """
        path = f"nodes/{node_id}/{self.temporary_name}.post"
        self.write(path, data)
        self.rename(path, f"board/{name}")

    def read_valid(self, path: str, parse=lambda data: data) -> dict | None:
        """Return a file's JSON object after `parse`, or None if the file is missing or unusable.

        Unusable files are counted by reason in `invalid_files`.
        """
        try:
            data = self.read(path, MAX_METADATA_BYTES)
            return None if data is None else parse(parse_json(data))
        except InvalidFileError as error:
            self.invalid_files[str(error)] += 1
            return None

    def read_reward(self, node_id: str, at: At) -> dict | None:
        """Return a node's reward and metrics for a stage, or None if there is no valid file."""
        return self.read_valid(
            stage_file("rewards", node_id, at), lambda data: parse_reward(data, node_id, at)
        )

    def read_rewards(self, node_id: str, stages: list[At]) -> list[dict]:
        """Return a node's rewards and metrics for these stages. Skip missing and invalid files."""
        rows = [self.read_reward(node_id, at) for at in stages]
        return [row for row in rows if row is not None]

    def list_stages(self, kind: str, node_id: str) -> list[At]:
        """Return the stages for which a node has a file of this kind, ascending.

        Ignore file names that this program does not create.
        """
        stages = []
        end = "()safetensors" if kind == "checkpoints" else r"stage_(0|[1-9]\d?)\.json"
        for name in self.list_names(f"nodes/{node_id}/{kind}"):
            if match := re.fullmatch(rf"round_(\d{{6}})\.{end}", name, re.ASCII):
                stages.append(At(int(match[1]), int(match[2] or 0)))
        return sorted(stages)

    @waits
    def append(self, path: str, text: str) -> None:
        """Append whole lines to a log. After an outage, a line may appear twice."""
        with open(self.resolve(path), "a+b", opener=open_no_link) as file:
            # Terminate a line that a crash cut off.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = f"\n{text}"

            file.write(text.encode("utf-8", "replace"))

    @waits
    def upload(self, local: Path, path: str, replaces: bool = True) -> None:
        """Copy a local file to the shared folder. With replaces=False, keep an existing file.

        Libraries write a local file first, because on a mounted drive, they may fail in ways that
        the program cannot handle. The copy is synced to disk before this returns, because a new
        checkpoint must exist before an older checkpoint is deleted.
        """
        target = self.resolve(path)
        temp = target.with_name(self.temporary_name)
        # After a failed attempt, `temp` may be a hard link to `target`, which must not be emptied.
        temp.unlink(missing_ok=True)

        with open(local, "rb") as source, open(temp, "wb", opener=open_no_link) as copy:
            shutil.copyfileobj(source, copy, 2**20)
            copy.flush()
            try:
                os.fsync(copy.fileno())
            except OSError as error:  # some storage backends have no fsync
                if error.errno not in NOT_SUPPORTED:
                    raise

        if replaces:
            os.replace(temp, target)
            return

        # Several processes may upload this file at once, and all should then load the same copy. A
        # hard link never replaces a file, so the first copy wins. On a storage backend without hard
        # links, the last copy wins, and the pause gives all concurrent copies time to arrive. (A
        # process that starts to read during the pause may still get a different copy.)
        try:
            os.link(temp, target)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            if not target.exists():
                os.replace(temp, target)
            self.sleep(2.0)

        temp.unlink(missing_ok=True)

    @waits
    def download(self, path: str, local: Path, max_bytes: int) -> None:
        """Copy a file from the shared folder to a local path.

        Raise InvalidFileError if the file is missing, larger than max_bytes or unreadable.
        """
        try:
            with open(self.resolve(path), "rb", opener=open_no_link) as source:
                if os.fstat(source.fileno()).st_size > max_bytes:
                    raise InvalidFileError(f"larger than {max_bytes} bytes")
                with open(local, "wb") as copy:
                    shutil.copyfileobj(source, copy, 2**20)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # reading needs no space, so the local disk is full
                raise StoreError(
                    f"cannot use TMPDIR (no space left for {local}): use a different local folder"
                ) from error
            check_read_error(self, path, error)
            raise InvalidFileError("the file is missing") from error

    @waits
    def delete(self, path: str, frees_space: bool = False) -> None:
        """Delete a file, if possible.

        With `frees_space`, empty the file first, because Google Drive moves deleted files to the
        trash, where they still use space. A file with another hard link, such as a backup, is not
        emptied.
        """
        if frees_space:
            with contextlib.suppress(OSError):
                if os.lstat(self.resolve(path)).st_nlink < 2:
                    open(self.resolve(path), "wb", opener=open_no_link).close()

        try:
            os.unlink(self.resolve(path))
        except (FileNotFoundError, IsADirectoryError, PermissionError):  # gone or not deletable
            check_mounted(self, path)

    def make_root(self) -> None:
        """Create the shared folder, unless it existed when this process started."""
        if not self.was_there:
            self.make_dir("/")

    @waits
    def has_dir(self, path: str) -> bool:
        """Return whether this folder exists."""
        check_mounted(self, path)
        return self.resolve(path).is_dir()

    # -- housekeeping

    def begin(self, settings: dict) -> dict:
        """Create the experiment, unless it exists. Return its settings.

        Raise StoreError if its folder exists, but has no valid config.json. The folder may become
        visible before the file, so wait for the file first.
        """
        # The process that creates the experiment also creates every folder that has several
        # writers. On Google Drive, two processes that create the same folder at once would create
        # two folders.
        self.make_root()
        shared = ("/experiments", "/warmstart", "/reports", "/archives")
        for path in (*shared, f"/archives/{self.dir.name}"):
            self.make_dir(path)
        self.create(settings)

        deadline = time.monotonic() + BEGIN_TIMEOUT_SECONDS
        while (saved := self.load_config()) is None:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{self.dir} has no valid config.json (an earlier version was interrupted, or "
                    f"a different program created it): delete this folder, or {ANOTHER_NAME}"
                )
            self.sleep(0.5)
        return saved

    @waits
    def create(self, settings: dict) -> None:
        """Build the experiment's folder under a temporary name and rename it, unless it exists.

        The rename fails if another process was faster. No call in here waits on its own, because a
        newer process with the same NODE_ID may have deleted the temporary folder. Instead, `waits`
        repeats the whole method, which then finds the newer process's folder.
        """
        experiments = self.resolve("/experiments")
        name, new = self.dir.name, f"/experiments/{self.temporary_name}"
        if name in os.listdir(experiments):
            return
        for path in (new, f"{new}/board", f"{new}/nodes"):
            super().make_dir(path)
        super().write(f"{new}/config.json", dump_json(settings, indent=1))
        try:
            super().rename(new, f"/experiments/{name}")
        except OSError as error:  # another process was faster, or the rename succeeded anyway
            is_there = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            if not is_there and name not in os.listdir(experiments):
                raise

    @waits
    def load_config(self) -> dict | None:
        """Return the experiment's settings, or None if config.json is missing or invalid.

        Raise StoreError if another program or version created the experiment.
        """
        try:
            with open(self.resolve("config.json"), "rb", opener=open_no_link) as file:
                config = parse_json(file.read(MAX_METADATA_BYTES))
        except (FileNotFoundError, InvalidFileError):
            return None

        if config.get("layout") != LAYOUT:
            raise StoreError(
                f"cannot use {self.dir} (created by a different version or program): {ANOTHER_NAME}"
            )
        return config

    def own_dirs(self) -> list[str]:
        """Return the folders that the nodes of this process write to."""
        names = ("", *NODE_DIRS, "model")
        folders = [f"nodes/{node_id}/{name}" for node_id in self.node_ids for name in names]
        return folders + [f"/archives/{self.dir.name}/{node_id}" for node_id in self.node_ids]

    @waits
    def check_own_dirs(self) -> None:
        """Raise StoreError if one of `own_dirs` is a link.

        Otherwise, this program would write and delete files where the link leads.
        """
        for folder in map(self.resolve, self.own_dirs()):
            if folder.is_symlink():
                raise StoreError(f"cannot use {folder} (it is a link): replace it with a folder")

    def remove_leftovers(self) -> None:
        """Delete temporary files of earlier processes with the same first node (or `prepare`)."""
        pattern = re.escape(self.temporary_name[:-16]) + r"[0-9a-f]{16}(\.post)?"
        for folder in ("/experiments", "/warmstart", "/reports", *self.own_dirs()):
            for name in self.list_names(folder):
                if re.fullmatch(pattern, name):
                    self.delete(f"{folder}/{name}", frees_space=True)
                    if folder == "/experiments":  # a folder that `begin` did not complete
                        shutil.rmtree(self.resolve(f"{folder}/{name}"), ignore_errors=True)

    @waits
    def prune_rollouts(self, node_id: str, before_round: int, archive: bool) -> str:
        """Delete a node's rollouts from rounds before `before_round`, or move them to archives/.

        Return the reason if a file could not be moved, otherwise "".
        """
        reason = ""
        archives = f"/archives/{self.dir.name}"
        if archive and not self.has_dir(archives):  # a user has deleted it, so keep the rollouts
            return reason
        if archive:
            self.make_dir(f"{archives}/{node_id}")

        for at in self.list_stages("rollouts", node_id):
            path = stage_file("rollouts", node_id, at)
            if at.round < before_round and archive:
                # Use `Folder.rename`, because waiting does not help if archives/ is on a different
                # disk.
                try:
                    super().rename(path, f"{archives}/{node_id}/{os.path.basename(path)}")
                except OSError as error:
                    if error.errno not in NO_MOVE:
                        raise
                    reason = error.strerror
            elif at.round < before_round:
                self.delete(path)
        return reason


def default_root() -> str:
    """Return the default of GDRIVE_PATH: rl-swarm in a mounted Google Drive, or ./rl-swarm."""
    mounted = [folder for folder in COLAB_DRIVES if os.path.isdir(folder)]
    return f"{mounted[0]}/rl-swarm" if mounted else "rl-swarm"


def is_safe_name(name: str) -> bool:
    """Return whether `name` may become part of a path.

    It must consist of 1 to 64 letters, digits, ".", "_" or "-", without "." at its start or end.
    """
    return re.fullmatch(NODE, name) is not None


# -------- The contents of files -------------------------------------------------------------------
# Peers are untrusted. The functions below check the size and structure of their files and the types
# of all values that are used. They raise InvalidFileError if a check fails.


def header(kind: str, node_id: str, at: At) -> dict:
    """Return the first fields of a rollout or reward file. All but the time must match its path."""
    name = "peer_id" if kind == "rollouts" else "node_id"
    return {name: node_id, "round": at.round, "stage": at.stage, "timestamp": time.time()}


def rollout_file(groups: list, about: dict) -> dict:
    """Return the contents of a rollout file, to which `publish` adds the header.

    `about` holds informational fields, such as the model that generated the groups.
    """
    return {
        "format": 1,
        **about,
        "rollouts": {str(index): group_to_json(group) for index, group in enumerate(groups)},
    }


def parse_rollouts(data: dict, node_id: str, at: At) -> list[dict]:
    """Return the groups of a rollout file, as `group_from_json` returns them."""
    require(data, {"format": int, "peer_id": str, "round": int, "stage": int, "rollouts": dict})
    if [data["format"], data["peer_id"], data["round"], data["stage"]] != [1, node_id, *at]:
        raise InvalidFileError("unknown format, or contents that do not match the path")

    groups = []
    for index, group in data["rollouts"].items():
        if not re.fullmatch(r"0|[1-9]\d{0,5}", index, re.ASCII):  # "01" would repeat group 1
            raise InvalidFileError("a group's index is not a number below a million")
        groups.append(group_from_json(group, (*at, node_id, int(index))))
    return groups


def group_to_json(group) -> dict:
    """Return a `grpo.Group` as a dict for a rollout file.

    A peer uses `task`, `seed`, `response` and `finished`, and compares `prompt` with the question
    that it regenerates. `answer` and `reward` are informational.
    """
    completions = []
    for text, reward, finished in zip(group.texts, group.rewards, group.finished, strict=True):
        completions.append({"response": text, "reward": reward, "finished": finished})

    question = group.question
    return {
        "task": question.task,
        "seed": question.seed,
        "prompt": question.text,
        "answer": question.answer,
        "completions": completions,
    }


def group_from_json(data, key: tuple) -> dict:
    """Check a peer's group, and return it with its key, (round, stage, node, index).

    Any program may have written the group. Its answer and rewards are claims that are never used in
    training.
    """
    require(data, {"task": str, "seed": int, "prompt": str, "completions": list})
    # JavaScript, for example, rounds integers above 2**53.
    if not 0 <= data["seed"] < 2**53 or not 2 <= len(data["completions"]) <= 64:
        raise InvalidFileError("seed or number of completions out of range")

    # Keep only these fields, because groups stay in memory for ROLLOUT_MAX_AGE rounds.
    completions = []
    for completion in data["completions"]:
        require(completion, {"response": str, "finished": bool})
        reward = completion.get("reward", 0)
        if not is_finite_number(reward):
            raise InvalidFileError("reward is not a finite number")
        completions.append(
            {
                "response": completion["response"],
                "finished": completion["finished"],
                "reward": reward,
            }
        )

    return {
        "task": data["task"],
        "seed": data["seed"],
        "prompt": data["prompt"],
        "key": key,
        "answer": str(data.get("answer"))[:64],
        "completions": completions,
    }


def require(data, types: dict) -> None:
    """Raise InvalidFileError unless `data` is a dict with values of exactly these types."""
    for name, kind in types.items():
        if not isinstance(data, dict) or type(data.get(name)) is not kind:
            raise InvalidFileError(f"{name} is missing or not of type {kind.__name__}")


def parse_reward(data: dict, node_id: str, at: At) -> dict:
    """Return the reward and the metrics of a reward file.

    Metrics become columns and curves, so only finite numbers with plain names are kept (from the
    first 128 entries). The reward is None for a node with I = 0, which generates no answers.
    """
    row = {"reward": None}
    for name, value in list(data.items())[:128]:
        if is_finite_number(value) and re.fullmatch(r"\w{1,40}", name, re.ASCII):
            row[name] = value

    expected = {"node_id": node_id, "round": at.round, "stage": at.stage}
    in_range = row["reward"] is None or 0 <= row["reward"] <= 1
    has_time = 0 < row.get("timestamp", 0) < 1e11
    if not (in_range and has_time and expected.items() <= data.items()):
        raise InvalidFileError("not a reward file, or contents that do not match the path")
    return row | expected


def parse_json(data: bytes) -> dict:
    """Parse one JSON object. Raise InvalidFileError if the data is anything else."""
    if data.count(b"[") + data.count(b"{") > 10**6:  # parsing would take seconds
        raise InvalidFileError("more than a million brackets")

    try:
        parsed = json.loads(data)
        # NaN, 1e999 and "\ud800" can be parsed, but not written back as JSON.
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidFileError("not valid JSON" if data else "empty file") from error

    if not isinstance(parsed, dict):
        raise InvalidFileError("not a JSON object")
    return parsed


def dump_json(data: dict, indent: int | None = None) -> bytes:
    """Encode a dict as JSON."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode("utf-8", "replace")


def is_finite_number(value) -> bool:
    """Return whether `value` is an int or float, but not a boolean, NaN, infinite or huge."""
    return type(value) in (int, float) and abs(value) < 1e300


def printable(value, width: int = 100) -> str:
    """Return at most `width` characters of untrusted text, with "?" for control characters."""
    text = "".join(char if char.isprintable() else "?" for char in str(value)[: width + 1])
    return text if len(text) <= width else text[: width - 1] + "…"


# -------- A process in the swarm ------------------------------------------------------------------


class Stopped(Exception):
    """The process ends early, "stopped" by a signal or "superseded" by a newer process."""


class Swarm:
    """A process as a member of the swarm.

    It registers its nodes, polls the board, writes heartbeats, and stops if a newer process has
    registered one of its nodes. Readers (monitor and report) only poll.
    """

    def __init__(self, store: DriveStore, stale_after: float):
        self.store = store
        self.stale_after = stale_after
        self.board = Board()  # as of the last poll
        self.statuses = {}  # node -> status, cached until the next poll (`status` reads a file)
        self.moved_at = {}  # node -> when one of its markers was last seen to move
        self.session = ""  # of this process, once it has joined

        # Times by time.monotonic().
        self.next_heartbeat = 0.0
        # The last poll's start, and the time when the board changed or markers were posted again.
        self.looked_at = self.changed_at = 0.0
        self.entered_at = float("inf")  # when this process entered its round
        self.coordinator_seen_at = 0.0  # when it was last seen alive, or when this process joined

    def join(self, about: dict, folders=NODE_DIRS) -> None:
        """Register the nodes of this process, and create their folders.

        The session sorts after all earlier sessions of these nodes, even if the clock was set back.
        """
        self.store.check_own_dirs()
        board = self.look()
        self.coordinator_seen_at = self.looked_at

        previous = max(board.sessions.get(node_id, "0") for node_id in self.store.node_ids)
        milliseconds = max(int(time.time() * 1000), int(previous[:13]) + 1)
        self.session = f"{milliseconds:013d}-{secrets.token_hex(4)}"

        # Take over the markers of earlier processes.
        for (kind, node_id), at in board.progress.items():
            if node_id in self.store.node_ids:
                self.store.markers[kind, node_id] = marker_name(kind, node_id, at)

        for node_id in self.store.node_ids:
            for folder in ("", *folders):
                self.store.make_dir(f"nodes/{node_id}/{folder}")
            self.store.post(node_id, f"session.{node_id}.{self.session}", dump_json(about))
        self.store.has_joined = True

        # If an older process is still writing such a file, its rename fails, and it writes again.
        self.store.remove_leftovers()
        self.look()
        self.beat()

    def look(self) -> Board:
        """Poll the board and return it."""
        self.looked_at = time.monotonic()
        before = self.board
        self.board = self.store.read_board()
        self.statuses.clear()

        for (kind, node_id), at in self.board.progress.items():
            if before.progress.get((kind, node_id), at) != at:
                self.moved_at[node_id] = time.time()
        if self.board != before:
            self.changed_at = self.looked_at
        return self.board

    def check_in(self, signals) -> Board:
        """Poll the board and return it. Write the heartbeats if they are due.

        Raise Stopped if the process should end. A worker calls this only between rounds, so it
        finishes each round that it has entered.
        """
        self.check_superseded()
        self.beat()
        if signals.requested:
            raise Stopped("stopped")

        # If the board has not changed for a long time, a marker may have been lost on its way to
        # the other machines. Post this process's markers again.
        if self.looked_at - self.changed_at > self.stale_after / 4:
            self.changed_at = self.looked_at
            for (_, node_id), name in self.store.markers.items():
                self.store.post(node_id, name)
        return self.board

    def check_superseded(self) -> None:
        """Raise Stopped if a newer process has registered one of this process's nodes."""
        sessions = self.look().sessions
        if any(sessions.get(node_id, "") > self.session for node_id in self.store.node_ids):
            raise Stopped("superseded")

    def sleep(self) -> float:
        """Sleep between two polls. Return the seconds since the last poll started.

        Sleep as long as the poll took, for a tenth of the time since the last change, or for a
        hundredth of the time in this round, whichever is longer, but for at least 20 ms and at most
        2 s. The hundredth limits the number of polls per round in a large swarm, whose board
        changes all the time. The poll counts as at most 2 s, so that an outage does not eat into
        the time a node waits for its peers.
        """
        look_seconds = min(2.0, time.monotonic() - self.looked_at)
        since_change = self.looked_at - self.changed_at
        since_entry = self.looked_at - self.entered_at
        pause = max(0.02, look_seconds, min(2.0, max(since_change / 10, since_entry / 100)))
        time.sleep(pause)
        return look_seconds + pause

    def enter(self, t: int) -> None:
        """Enter round t with all nodes of this process."""
        for node_id in self.store.node_ids:
            self.store.move_marker("open", node_id, At(t))
        self.entered_at = time.monotonic()

    def beat(self, state: str = "running") -> None:
        """Write the heartbeats if they are due or if `state` is one of EXITED_STATES."""
        is_due = state != "running" or time.monotonic() >= self.next_heartbeat
        if is_due and self.session:  # not before the process has joined
            data = dump_json({"time": time.time(), "session": self.session, "state": state})
            for node_id in self.store.node_ids:
                self.store.write(f"nodes/{node_id}/heartbeat.json", data)
            self.next_heartbeat = time.monotonic() + min(10.0, self.stale_after / 8)

    def status(self, node_id: str) -> str:
        """Return a node's status as of the last poll (see the top of this file).

        It is "alive", "dead" or one of EXITED_STATES. A node that never registered is dead. A moved
        marker proves activity even if the heartbeat, which is rewritten often, never arrives.
        """
        session = self.board.sessions.get(node_id)
        if session is None or node_id in self.statuses:
            return self.statuses.get(node_id, "dead")

        # When was the node last active?
        heartbeat = self.store.read_valid(f"nodes/{node_id}/heartbeat.json") or {}
        signs = [int(session[:13]) / 1000, self.moved_at.get(node_id, 0.0)]
        if is_finite_number(heartbeat.get("time")):
            signs.append(heartbeat["time"])

        # The time may be in the future, because a peer's clock may be ahead.
        youngest = min(abs(time.time() - sign) for sign in signs)
        status = "alive" if youngest < self.stale_after else "dead"
        if heartbeat.get("session") == session and heartbeat.get("state") in EXITED_STATES:
            status = heartbeat["state"]
        self.statuses[node_id] = status
        return status

    def is_alive(self, node_id: str) -> bool:
        return self.status(node_id) == "alive"

    def others(self) -> set[str]:
        """Return the nodes of all other processes that have ever joined."""
        return self.board.sessions.keys() - set(self.store.node_ids)
