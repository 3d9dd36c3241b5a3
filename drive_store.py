"""The shared folder is the swarm's only means of communication. Every path below has one writer.

experiments/NAME/    (beside experiments/: warmstart/, reports/, archives/)
    config.json      the settings that the experiment began with, written last by its maker
    board/           the state of the swarm, in the names of files, which a node renames to go on
        session.anna.1795300037123-ab12cd34      anna's newest process
        open.anna.000012.0                       anna has entered round 12
        open.coordinator.000012.0                … and so has a coordinator. Who is first opens it
        rollouts.anna.000012.0                   anna has published up to round 12, stage 0
        rewards.anna.000012.0                    … and has submitted its reward
        checkpoint.anna.000009.0                 … and has written a checkpoint after round 9
    nodes/anna/      all other files of anna: rollouts/round_000012.stage_0.json and so on,
                     rewards/ with the same names, heartbeat.json, checkpoints/, logs/, model/

A node has exited if the last heartbeat of its newest process says so ("done", "stopped", "failed").
Any other is alive if in the last STALE_AFTER_SECONDS (300) its process started, wrote a heartbeat
or was seen to move a marker. Else it is dead.
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
    """A stage of a round, the swarm's unit of time."""

    round: int
    stage: int = 0


@dataclass
class Board:
    """The state of the swarm at one look. Nodes are known by their ids, such as "anna"."""

    open_round: int = -1  # the newest that anybody has entered
    sessions: dict = field(default_factory=dict)  # node_id -> its newest session
    progress: dict = field(default_factory=dict)  # (kind, node_id) -> At, how far it has got

    @property
    def workers(self) -> list[str]:
        """All nodes that ever had a session but the coordinator, sorted."""
        return sorted(self.sessions.keys() - {COORDINATOR_ID})

    def reached(self, kind: str, at: At) -> list[str]:
        """The nodes that have got as far as this stage, sorted."""
        nodes = [n for (k, n), last in self.progress.items() if k == kind and last >= at]
        return sorted(nodes)

    def in_step(self, kind: str, t: int, num_stages: int) -> set[str]:
        """The workers that round t is to wait for, if they live: those that have got to the end of
        the round before, or have entered this one. kind: waited for, "rollouts" or "rewards"."""
        if t == 0:
            return set(self.workers)
        last_stage = At(t - 1, num_stages - 1)
        in_step = {*self.reached(kind, last_stage), *self.reached("open", At(t))}
        return in_step - {COORDINATOR_ID}


class Folder:
    """The folder of an experiment, and what nodes do in it. A path is relative to this folder, or
    to the shared one if it begins with "/". While the drive is away a method raises OSError.

    Its subclass `DriveStore`, below, waits for the drive instead. It adds `read` (a file's bytes,
    None without one), `list_names` (of a folder) and `post` (a file on the board), used here.
    """

    def __init__(self, root, experiment: str, node_ids=()):
        self.root = Path(root)
        self.dir = self.root / "experiments" / experiment
        self.node_ids = list(node_ids)  # of the nodes of this process; readers have none
        self.markers = {}  # (kind, node_id) -> name of the marker, for the nodes of this process
        owner = self.node_ids[0] if self.node_ids else "prepare"
        # The name of a file while it is being written. Readers skip it.
        self.temporary_name = f".new-{owner}-{secrets.token_hex(8)}"

    def read_board(self) -> Board:
        return parse_board(self.list_names("board"))

    def move_marker(self, kind: str, node_id: str, at: At) -> None:
        """Say how far a node has got: rename its marker, or post one where there is none."""
        name = marker_name(kind, node_id, at)
        before = self.markers.get((kind, node_id))
        if before is None or not self.rename(f"board/{before}", f"board/{name}"):
            self.post(node_id, name)
        self.markers[kind, node_id] = name

    def publish(self, kind: str, node_id: str, at: At, data: dict):
        """Write a node's rollouts or metrics of a stage. A valid file from before a kill stays as
        it is, because peers may have read it; a broken one is written again. Returns what counts:
        `data`, or what `fetch` gives of the older file."""
        path = stage_file(kind, node_id, at)
        content = dump_json(header(kind, node_id, at) | data)
        older = None
        if not self.write(path, content, replaces=False):
            with contextlib.suppress(InvalidFileError):
                older = self.fetch(kind, node_id, at)
            if older is None:
                self.write(path, content)

        # The marker comes after the file, so normally whoever sees it finds the file. Some drives
        # show the file later, so readers check both.
        self.move_marker(kind, node_id, at)
        return data if older is None else older

    def fetch(self, kind: str, node_id: str, at: At):
        """What a node's file of a stage holds: a list of groups, as dicts ("rollouts"), or metrics
        ("rewards"); None if there is no file. One that is broken, too large or a link raises
        InvalidFileError: peers count and skip it, and read it again in a later round."""
        data = self.read(stage_file(kind, node_id, at), MAX_JSON_BYTES)
        parse = parse_rollouts if kind == "rollouts" else parse_reward
        return None if data is None else parse(parse_json(data), node_id, at)

    def write(self, path: str, data: bytes, replaces: bool = True) -> bool:
        """Write a file in place of an older one. A reader sees the old one or the whole new one.
        Returns whether it was written: with replaces=False an older file stays as it is."""
        target = self.resolve(path)
        temp = target.with_name(self.temporary_name)
        with open(temp, "wb", opener=open_no_link) as file:
            file.write(data)
        if not replaces:
            with contextlib.suppress(FileNotFoundError):  # of a drive that is there: it took `temp`
                os.lstat(target)
                os.unlink(temp)
                return False
        os.replace(temp, target)
        return True

    def rename(self, path: str, new_path: str) -> bool:
        """Returns False if there is no such file. (An earlier try may have renamed it.)"""
        try:
            os.replace(self.resolve(path), self.resolve(new_path))
            return True
        except FileNotFoundError:
            check_mounted(self, path)
            return False

    def resolve(self, path: str) -> Path:
        return self.root / path[1:] if path.startswith("/") else self.dir / path


# ==== The heart ends here. Below: errors, waiting, housekeeping, parsing, a process in the swarm ==

LAYOUT = 5  # of the tree above; config.json says it
ANOTHER_NAME = "take another EXPERIMENT_NAME"
COORDINATOR_ID = "coordinator"
NODE_DIRS = ("rollouts", "rewards", "checkpoints", "logs")
EXITED_STATES = ("done", "stopped", "failed")  # of the last heartbeat of a process
BEGIN_TIMEOUT_SECONDS = 30.0  # between the folder of an experiment and its config.json
MAX_JSON_BYTES = 8 << 20  # a rollout file of 64 x 64 completions of 256 tokens takes about 4 MiB
MAX_METADATA_BYTES = 64 << 10
# What is no ordinary file, or is hidden from us: no waiting helps.
NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EACCES)
# What may be in the way of a move, as to another disk: no waiting helps.
NO_MOVE = (errno.EXDEV, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM)
# What does not pass if it meets a process that starts: permission, read-only, another file system.
HOPELESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV)
# What says that a storage has no hard links, or no fsync.
NOT_SUPPORTED = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
NOT_SUPPORTED += (errno.EOPNOTSUPP,)  # on Linux the same number
COLAB_DRIVES = ("/content/drive/MyDrive", "/content/gdrive/MyDrive")

# -------- What stands on the board ----------------------------------------------------------------
# Names: of a node, "anna"; of a marker, "rollouts.anna.000012.0"; of a session,
# "session.anna.1795300037123-ab12cd34". Of several sessions the highest is the newest.

NODE = r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?"
MARKER = rf"(open|rollouts|rewards|checkpoint)\.({NODE})\.(\d{{6}})\.(0|[1-9]\d?)"
SESSION = rf"session\.({NODE})\.(\d{{13}}-[0-9a-f]{{8}})"


def marker_name(kind: str, node_id: str, at: At) -> str:
    """("rewards", "anna", At(12, 0)) -> "rewards.anna.000012.0"."""
    return f"{kind}.{node_id}.{at.round:06d}.{at.stage}"


def stage_file(kind: str, node_id: str, at: At) -> str:
    """("rewards", "anna", At(12, 0)) -> "nodes/anna/rewards/round_000012.stage_0.json"."""
    return f"nodes/{node_id}/{kind}/round_{at.round:06d}.stage_{at.stage}.json"


def parse_board(names: list[str]) -> Board:
    """One listing of board/ tells the state. Where a node has several markers of a kind the newest
    counts. Names of any other form are ignored."""
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


# -------- A bad file, or a lost drive? ------------------------------------------------------------
# An absent file is an answer, as long as the folder that it would be in is there.


class StoreError(Exception):
    """This node's or the experiment's own state cannot be used. The program stops and says why."""


class InvalidFileError(ValueError):
    """A file that cannot be used. The text is a short reason, fit for a log line."""


def check_mounted(folder: Folder, path: str) -> None:
    """Raise OSError if the experiment's folder (or the shared one) is away."""
    os.listdir(folder.root if path.startswith("/") else folder.dir)


def check_read_error(folder: Folder, path: str, error: OSError) -> None:
    """Return if there is no such file. Raise InvalidFileError if this file alone cannot be read.
    But where none may be lost, a process's own and a warm start, the error is the drive's."""
    check_mounted(folder, path)
    if isinstance(error, FileNotFoundError):
        return
    precious = ("/warmstart/", *[f"nodes/{node_id}/" for node_id in folder.node_ids])
    if path.startswith(precious) and error.errno not in NO_FILE:
        raise error
    raise InvalidFileError(f"unreadable ({error.strerror})") from error


# -------- Waiting for the drive -------------------------------------------------------------------


def open_no_link(path, flags: int) -> int:
    """The opener of what may be a stranger's file: it follows no link and waits for no FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def waits(operation):
    """An operation of a DriveStore that is repeated until the drive is back. One line says when
    that begins, one when it is over. It must be safe to call twice: an error may come after the
    work. One thread makes all calls, so the folder holds a process's writes up to some point.

    While a process starts, an error that will not pass is a StoreError."""

    @functools.wraps(operation)
    def repeat(store, *args, **kwargs):
        started = time.monotonic()
        pause = 0.0
        while True:
            try:
                result = operation(store, *args, **kwargs)
                break
            except OSError as error:
                if store.on_event is None:
                    raise
                if error.errno in HOPELESS and not store.has_joined:
                    text = f"GDRIVE_PATH={store.root}: this folder cannot be used ({error})"
                    raise StoreError(f"{text}: mend that, or take another folder") from error
                if pause == 0:
                    store.on_event("outage", f"waiting for the shared folder ({error})")
                pause = min(5.0, 2 * pause or 0.5)
                store.sleep(pause)

        if pause > 0:
            seconds = time.monotonic() - started
            store.on_event("outage over", f"the shared folder is back after {seconds:.0f} s")
        return result

    return repeat


class DriveStore(Folder):
    """A `Folder` that waits while its drive is away, with all else that a process does there.

    on_event(kind, text) tells the user of an outage; without it (readers) nothing is waited for.
    sleep(seconds) may raise KeyboardInterrupt.
    """

    def __init__(self, root, experiment: str, node_ids=(), on_event=None, sleep=time.sleep):
        super().__init__(root, experiment, node_ids)
        self.on_event = on_event
        self.sleep = sleep
        self.invalid_files = Counter()  # reason -> number of failed reads
        self.was_there = os.path.isdir(self.root)  # then it is not made again while it is away
        self.has_joined = False  # from then on every error is waited for

    write = waits(Folder.write)
    rename = waits(Folder.rename)

    @waits
    def read(self, path: str, max_bytes: int) -> bytes | None:
        """The contents of a file; None if there is none. Raises InvalidFileError if it is too large
        or if it alone cannot be read: a peer's bad disk stops nobody."""
        try:
            with open(self.resolve(path), "rb", opener=open_no_link) as file:
                data = file.read(max_bytes + 1)
        except OSError as error:
            check_read_error(self, path, error)
            return None
        if len(data) > max_bytes:
            raise InvalidFileError(f"larger than {max_bytes} bytes")
        return data

    @waits
    def list_names(self, path: str, lenient: bool = False) -> list[str]:
        """The names in a folder, sorted; none if there is no such folder. lenient: for a reader, to
        whom a folder that cannot be listed is empty, too."""
        try:
            return sorted(os.listdir(self.resolve(path)))
        except OSError as error:
            check_mounted(self, path)
            if not lenient and not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                raise
            return []

    # -- files

    def post(self, node_id: str, name: str, data: bytes = b"") -> None:
        """Put a file on the board, through the node's own folder, which its next start tidies."""
        path = f"nodes/{node_id}/{self.temporary_name}.post"
        self.write(path, data)
        self.rename(path, f"board/{name}")

    def read_valid(self, path: str, parse=lambda data: data) -> dict | None:
        """parse(the JSON object in a file), None for a file that is missing or cannot be used."""
        try:
            data = self.read(path, MAX_METADATA_BYTES)
            return None if data is None else parse(parse_json(data))
        except InvalidFileError as error:
            self.invalid_files[str(error)] += 1
            return None

    def read_reward(self, node_id: str, at: At) -> dict | None:
        """A node's reward and metrics, None if there is no valid file."""
        path = stage_file("rewards", node_id, at)
        return self.read_valid(path, lambda data: parse_reward(data, node_id, at))

    def list_stages(self, kind: str, node_id: str, lenient: bool = False) -> list[At]:
        """The stages of a node's files of this kind, ascending. Only names that this program makes
        count."""
        stages = []
        end = "()safetensors" if kind == "checkpoints" else r"stage_(0|[1-9]\d?)\.json"
        for name in self.list_names(f"nodes/{node_id}/{kind}", lenient):
            if match := re.fullmatch(rf"round_(\d{{6}})\.{end}", name, re.ASCII):
                stages.append(At(int(match[1]), int(match[2] or 0)))
        return sorted(stages)

    @waits
    def append(self, path: str, text: str) -> None:
        """Append whole lines to a log. A line that a crash cut off is ended first. After an outage
        a line may stand there twice."""
        with open(self.resolve(path), "a+b", opener=open_no_link) as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = f"\n{text}"
            file.write(text.encode("utf-8", "replace"))

    @waits
    def upload(self, local: Path, path: str, replaces: bool = True) -> None:
        """Copy a local file here, because what a library does on a drive may fail in any way. It is
        on disk before this returns: a checkpoint must be there before an older one is deleted.
        replaces: False lets a file stand that is there."""
        target = self.resolve(path)
        temp = target.with_name(self.temporary_name)
        with open(local, "rb") as source, open(temp, "wb", opener=open_no_link) as copy:
            shutil.copyfileobj(source, copy, 2**20)
            copy.flush()
            try:
                os.fsync(copy.fileno())
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
        if replaces:
            os.replace(temp, target)
            return

        # A hard link never replaces what another process has put there meanwhile. On a storage that
        # has none the last one counts: when this returns all that were written at once are there.
        # (Who begins to read in these two seconds may still get another one.)
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
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)

    @waits
    def download(self, path: str, local: Path, max_bytes: int) -> None:
        """Copy a file from here. Raises InvalidFileError if it is too large, or if it alone cannot
        be read."""
        try:
            with open(self.resolve(path), "rb", opener=open_no_link) as source:
                if os.fstat(source.fileno()).st_size > max_bytes:
                    raise InvalidFileError(f"larger than {max_bytes} bytes")
                with open(local, "wb") as copy:
                    shutil.copyfileobj(source, copy, 2**20)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # nobody runs out of space by reading
                text = f"TMPDIR: there is no room for {local}"
                raise StoreError(f"{text}; set TMPDIR to another local folder") from error
            check_read_error(self, path, error)
            raise InvalidFileError("it is gone") from error

    @waits
    def delete(self, path: str, frees_space: bool = False) -> None:
        """Delete a file, if that is possible. frees_space: empty it first, because on Google Drive
        it goes to the trash, where it still counts. One with hard links, as in a backup, is not."""
        if frees_space:
            with contextlib.suppress(OSError):
                if os.lstat(self.resolve(path)).st_nlink < 2:
                    open(self.resolve(path), "wb", opener=open_no_link).close()
        try:
            os.unlink(self.resolve(path))
        except (FileNotFoundError, IsADirectoryError, PermissionError):  # gone already, or no file
            check_mounted(self, path)

    @waits
    def make_dir(self, path: str) -> bool:
        """Make a folder in one that exists. Returns False if it was there already."""
        try:
            os.mkdir(self.resolve(path))
        except FileExistsError:
            return False
        return True

    def make_root(self) -> None:
        """Make the shared folder, unless it was there when this process began."""
        if not self.was_there:
            self.make_dir("/")

    @waits
    def has_dir(self, path: str) -> bool:
        """Whether there is such a folder."""
        check_mounted(self, path)
        return self.resolve(path).is_dir()

    # -- housekeeping

    def begin(self, settings: dict) -> dict:
        """Begin the experiment unless another process has. Returns the settings that it began with:
        `settings`, or what its maker wrote. Raises StoreError if its maker does not write them."""
        # mkdir succeeds in one process only, the maker. It makes all folders that several write in,
        # because on Google Drive two processes that make one folder would make two.
        self.make_root()
        self.make_dir("/experiments")
        if self.make_dir(f"/experiments/{self.dir.name}"):
            for path in ("board", "nodes", "/warmstart", "/reports", "/archives"):
                self.make_dir(path)
            self.make_dir(f"/archives/{self.dir.name}")
            self.write("config.json", dump_json(settings, indent=1))
            return settings

        deadline = time.monotonic() + BEGIN_TIMEOUT_SECONDS
        while (saved := self.load_config()) is None:
            if time.monotonic() > deadline:
                text = f"{self.dir} has no valid config.json: a start that was killed, or not ours"
                raise StoreError(f"{text}; delete it, or {ANOTHER_NAME}")
            self.sleep(0.5)
        return saved

    @waits
    def load_config(self) -> dict | None:
        """The settings that the experiment began with, None if they do not show yet, or not whole.
        Raises StoreError if another program made the experiment."""
        try:
            with open(self.resolve("config.json"), "rb", opener=open_no_link) as file:
                config = parse_json(file.read(MAX_METADATA_BYTES))
        except (FileNotFoundError, InvalidFileError):
            return None
        if config.get("layout") != LAYOUT:
            raise StoreError(f"{self.dir}: made by another version or program; {ANOTHER_NAME}")
        return config

    def own_dirs(self) -> list[str]:
        """The folders that the nodes of this process write in."""
        names = ("", *NODE_DIRS, "model")
        folders = [f"nodes/{node_id}/{name}" for node_id in self.node_ids for name in names]
        return folders + [f"/archives/{self.dir.name}/{node_id}" for node_id in self.node_ids]

    @waits
    def check_own_dirs(self) -> None:
        """Raise StoreError if one is a link: this program would write and delete where it leads."""
        for folder in map(self.resolve, self.own_dirs()):
            if folder.is_symlink():
                raise StoreError(f"{folder} is a link: put a folder there")

    def remove_leftovers(self) -> None:
        """Delete what a killed process of this name left unfinished."""
        pattern = re.escape(self.temporary_name[:-16]) + r"[0-9a-f]{16}(\.post)?"
        for folder in ("/warmstart", *self.own_dirs()):
            for name in self.list_names(folder):
                if re.fullmatch(pattern, name):
                    self.delete(f"{folder}/{name}", frees_space=True)

    @waits
    def prune_rollouts(self, node_id: str, before_round: int, archive: bool) -> str:
        """Delete a node's rollouts of older rounds, or move them to archives/EXPERIMENT/NODE/.
        Returns why one stays, if one does."""
        reason = ""
        archives = f"/archives/{self.dir.name}"
        if archive and not self.has_dir(archives):  # somebody has removed it: nothing is moved
            return reason
        if archive:
            self.make_dir(f"{archives}/{node_id}")
        for at in self.list_stages("rollouts", node_id):
            path = stage_file("rollouts", node_id, at)
            if at.round < before_round and archive:
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
    """The shared folder where GDRIVE_PATH is not set: in a mounted Google Drive, or here."""
    mounted = [folder for folder in COLAB_DRIVES if os.path.isdir(folder)]
    return f"{mounted[0]}/rl-swarm" if mounted else "rl-swarm"


def is_safe_name(name: str) -> bool:
    """Whether `name` may become part of a path: 1 to 64 letters, digits, ".", "_" or "-"."""
    return re.fullmatch(NODE, name) is not None


# -------- What is in a file -----------------------------------------------------------------------
# Whatever another node wrote may come from a stranger. Its size, its form and the types of what is
# used are checked here; a file that fails raises InvalidFileError.


def header(kind: str, node_id: str, at: At) -> dict:
    """What a rollout or reward file says of itself. It must agree with its path."""
    name = "peer_id" if kind == "rollouts" else "node_id"
    return {name: node_id, "round": at.round, "stage": at.stage, "timestamp": time.time()}


def rollout_file(groups: list, about: dict) -> dict:
    """The contents of a rollout file. `publish` adds the header. about: for people."""
    rollouts = {str(index): group_to_json(group) for index, group in enumerate(groups)}
    return {"format": 1, **about, "rollouts": rollouts}


def parse_rollouts(data: dict, node_id: str, at: At) -> list[dict]:
    """The groups of a rollout file as `group_from_json` gives them."""
    require(data, {"format": int, "peer_id": str, "round": int, "stage": int, "rollouts": dict})
    if [data["format"], data["peer_id"], data["round"], data["stage"]] != [1, node_id, *at]:
        raise InvalidFileError("another format, or its contents do not match its path")
    groups = []
    for index, group in data["rollouts"].items():
        if not re.fullmatch(r"0|[1-9]\d{0,5}", index, re.ASCII):  # "01" would be group 1 once more
            raise InvalidFileError("the index of a group is not a number")
        groups.append(group_from_json(group, (*at, node_id, int(index))))
    return groups


def group_to_json(group) -> dict:
    """A grpo.Group in a rollout file. A peer uses task, seed, response and finished, and compares
    the prompt; answer and reward are for people."""
    completions = []
    for text, reward, finished in zip(group.texts, group.rewards, group.finished, strict=True):
        completions.append({"response": text, "reward": reward, "finished": finished})
    question = group.question
    asked = {"task": question.task, "seed": question.seed, "prompt": question.text}
    return asked | {"answer": question.answer, "completions": completions}


def group_from_json(data, key: tuple) -> dict:
    """A peer's group: what `group_to_json` wrote, or what any program did, its types checked, and
    "key": (round, stage, node, index). Its answer and its rewards are claims, never learned from.
    """
    require(data, {"task": str, "seed": int, "prompt": str, "completions": list})
    # JSON readers in other languages round larger integers.
    if not 0 <= data["seed"] < 2**53 or not 2 <= len(data["completions"]) <= 64:
        raise InvalidFileError("seed or group size out of range")
    completions = []
    for completion in data["completions"]:
        require(completion, {"response": str, "finished": bool})
        if not is_finite_number(completion.get("reward", 0)):
            raise InvalidFileError("reward is not a number")
        kept = {name: completion[name] for name in ("response", "finished")}
        completions.append(kept | {"reward": completion.get("reward", 0)})
    # Whatever else is there would stay in memory for ROLLOUT_MAX_AGE rounds.
    kept = {name: data[name] for name in ("task", "seed", "prompt")}
    answer = str(data.get("answer"))[:64]
    return kept | {"key": key, "answer": answer, "completions": completions}


def require(data, types: dict) -> None:
    """Raise InvalidFileError unless `data` is a dict with values of these types."""
    for name, kind in types.items():
        if not isinstance(data, dict) or type(data.get(name)) is not kind:
            raise InvalidFileError(f"{name} is missing or not of type {kind.__name__}")


def parse_reward(data: dict, node_id: str, at: At) -> dict:
    """The reward and the metrics of a reward file.

    They become columns and curves, so only numbers with plain names are kept, 128 at most. A node
    that generates nothing (I = 0) has no reward: it is None.
    """
    row = {"reward": None}
    for name, value in list(data.items())[:128]:
        if is_finite_number(value) and re.fullmatch(r"\w{1,40}", name, re.ASCII):
            row[name] = value

    expected = {"node_id": node_id, "round": at.round, "stage": at.stage}
    in_range = row["reward"] is None or 0 <= row["reward"] <= 1
    has_time = 0 < row.get("timestamp", 0) < 1e11
    if not (in_range and has_time and expected.items() <= data.items()):
        raise InvalidFileError("not a reward, or its contents do not match its path")
    return row | expected


def parse_json(data: bytes) -> dict:
    """Parse one JSON object."""
    if data.count(b"[") + data.count(b"{") > 10**6:  # they would take seconds
        raise InvalidFileError("more than a million lists")
    try:
        parsed = json.loads(data)
        # NaN, 1e999 and "\ud800" parse but cannot be saved.
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
    """Whether `value` is a finite int or float. Booleans and integers beyond floats are not."""
    return type(value) in (int, float) and abs(value) < 1e300


def printable(value, width: int = 100) -> str:
    """Text from a stranger, safe for a terminal: cut to `width`, control characters as "?"."""
    text = "".join(char if char.isprintable() else "?" for char in str(value)[: width + 1])
    return text if len(text) <= width else text[: width - 1] + "…"


# -------- A process in the swarm ------------------------------------------------------------------


class Stopped(Exception):
    """A process ends early: "stopped" by a signal, or "superseded" by a newer one of its name."""


class Swarm:
    """A process's seat in the swarm, under the names of its nodes: it joins, looks at the board,
    shows that it is alive, and gives way to a newer process of its name. Readers only look."""

    def __init__(self, store: DriveStore, stale_after: float):
        self.store = store
        self.node_ids = store.node_ids
        self.stale_after = stale_after
        self.board = Board()  # as of the last look
        self.statuses = {}  # of the nodes asked for since then: a question costs a read of a file
        self.moved_at = {}  # node -> when one of its markers was last seen to move
        self.beats = {}  # node -> the time in the last heartbeat that was read
        self.has_other_clock = set()  # nodes of which that was said
        self.session = ""  # of this process, once it has joined
        self.next_heartbeat = 0.0
        self.looked_at = self.changed_at = 0.0  # when the last look began, when one saw a change
        self.posted_at = 0.0  # when the markers were posted again
        self.coordinator_seen_at = 0.0  # when one was seen alive, or when this process has joined

    def join(self, about: dict, folders=NODE_DIRS) -> None:
        """Register this process under the names of its nodes, and make their folders.

        A session id begins with the time in milliseconds and sorts after every earlier one of these
        nodes, also if the clock was set back.
        """
        self.store.check_own_dirs()
        board = self.look()
        self.coordinator_seen_at = self.looked_at
        previous = max(board.sessions.get(node_id, "0") for node_id in self.node_ids)
        milliseconds = max(int(time.time() * 1000), int(previous[:13]) + 1)
        self.session = f"{milliseconds:013d}-{secrets.token_hex(4)}"
        for (kind, node_id), at in board.progress.items():
            if node_id in self.node_ids:
                self.store.markers[kind, node_id] = marker_name(kind, node_id, at)
        for node_id in self.node_ids:
            for folder in ("", *folders):
                self.store.make_dir(f"nodes/{node_id}/{folder}")
            self.store.post(node_id, f"session.{node_id}.{self.session}", dump_json(about))
        self.store.has_joined = True
        self.store.remove_leftovers()  # an older process that still writes one tries again
        self.look()
        self.beat()

    def look(self) -> Board:
        """Look at the board."""
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
        """Look at the board between rounds. Raises Stopped if this process is to end."""
        self.check_superseded()
        self.beat()
        if signals.requested:  # only between rounds: a round that has begun is finished
            raise Stopped("stopped")

        # While all wait, one marker may have been lost on its way to the others: post all again.
        unchanged_since = max(self.changed_at, self.posted_at)
        if self.looked_at - unchanged_since > self.stale_after / 4:
            self.posted_at = self.looked_at
            for (_, node_id), name in self.store.markers.items():
                self.store.post(node_id, name)
        return self.board

    def check_superseded(self) -> None:
        """Raise Stopped if a newer process has registered one of these nodes."""
        sessions = self.look().sessions
        if any(sessions.get(node_id, "") > self.session for node_id in self.node_ids):
            raise Stopped("superseded")

    def sleep(self) -> float:
        """Sleep as long as the last look took, or a tenth of the time in which nothing has changed,
        between 20 ms and 2 s. Returns the seconds of look and sleep. A look counts 2 s at most, so
        that an outage does not use up a budget."""
        look_seconds = min(2.0, time.monotonic() - self.looked_at)
        unchanged = self.looked_at - self.changed_at
        pause = max(0.02, look_seconds, min(2.0, unchanged / 10))
        time.sleep(pause)
        return look_seconds + pause

    def enter(self, t: int) -> None:
        """Say that all nodes of this process work on round t. Who is first opens it."""
        for node_id in self.node_ids:
            self.store.move_marker("open", node_id, At(t))

    def beat(self, state: str = "running") -> None:
        """Write the heartbeats if they are due. state: one of EXITED_STATES in the last ones."""
        is_due = state != "running" or time.monotonic() >= self.next_heartbeat
        if is_due and self.session:  # not before it has joined
            data = dump_json({"time": time.time(), "session": self.session, "state": state})
            for node_id in self.node_ids:
                self.store.write(f"nodes/{node_id}/heartbeat.json", data)
            self.next_heartbeat = time.monotonic() + min(10.0, self.stale_after / 8)

    def status(self, node_id: str) -> str:
        """What a node was at the last look: "done", "stopped" or "failed" if the last heartbeat of
        its newest session says so, else "alive" if there was a sign of life in the last stale_after
        seconds, or "dead".

        Signs of life are its registration, its heartbeat and, because on a mounted drive a file
        that is rewritten often may never arrive, a marker that was seen to move.
        """
        session = self.board.sessions.get(node_id)
        if session is None or node_id in self.statuses:
            return self.statuses.get(node_id, "dead")
        heartbeat = self.store.read_valid(f"nodes/{node_id}/heartbeat.json") or {}
        signs = [int(session[:13]) / 1000, self.moved_at.get(node_id, 0.0)]
        if is_finite_number(heartbeat.get("time")):
            signs.append(heartbeat["time"])
            if self.store.on_event is not None:  # readers tell nobody
                self.compare_clocks(node_id, heartbeat["time"])
        # A peer's clock may be ahead.
        youngest = min(abs(time.time() - sign) for sign in signs)
        status = "alive" if youngest < self.stale_after else "dead"
        if heartbeat.get("session") == session and heartbeat.get("state") in EXITED_STATES:
            status = heartbeat["state"]
        self.statuses[node_id] = status
        return status

    def compare_clocks(self, node_id: str, beat_at: float) -> None:
        """Say once if a heartbeat that has just changed tells a time far from this machine's."""
        has_changed = self.beats.get(node_id, beat_at) != beat_at
        self.beats[node_id] = beat_at
        seconds = abs(beat_at - time.time())
        if has_changed and seconds > self.stale_after and node_id not in self.has_other_clock:
            self.has_other_clock.add(node_id)
            text = f"the clock of {node_id} and this one differ by {seconds:.0f} s: set them right"
            self.store.on_event("clock", f"{text}, or live nodes count as dead")

    def is_alive(self, node_id: str) -> bool:
        return self.status(node_id) == "alive"

    def others(self) -> set[str]:
        """All nodes of the swarm but those of this process."""
        return self.board.sessions.keys() - set(self.node_ids)
