"""The shared folder is the swarm's only means of communication. This module reads and writes it.

Write-once files: the names of open rounds, registrations, rollouts, rewards and the experiment's
    config. Each is written to a temporary file and then hard-linked to its final name, so that a
    reader sees either no file or the complete one, and the first writer wins. (Without hard links
    the file is renamed; of two simultaneous writers the last one wins.)
Replaceable files: heartbeats, checkpoints, exported models and what is written for people. Written
    to a temporary file, then renamed.
Append-only files: logs. If a crash left an incomplete last line, the next append starts a new one.
Progress markers: empty files whose names say how far a node has got. They are renamed.
Folders: each is made by one process only. On Google Drive a name is no identity, so a folder that
    two processes make at once exists twice, and a mount shows only one of the two. The process that
    begins an experiment makes all folders that several nodes write into (`create`); below them a
    node makes those of its own name. No other call makes a folder.

Anyone with access to the folder may write anything into it. Readers therefore limit the size and
check the type of every file; they return parsed data or raise `InvalidFileError`. Symbolic links
below the experiment's folder are never followed. Every method tries once and raises OSError if the
folder cannot be reached; `RetryingStore` repeats it. A missing file, or a missing folder of a node,
is not an error: the result is None or [], as long as the experiment's own folders exist.

A network drive may still show an old or an incomplete file for a while. An incomplete one does not
parse, counts as invalid, and is read again in the next round.
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

ROLLOUT_FORMAT_VERSION = 1  # the key "format" of a rollout file
LAYOUT_VERSION = 4  # in layout.json: where an experiment keeps its files
ROOT_DIRS = ("experiments", "warmstart", "reports", "archives", "tmp")  # below the shared folder
SHARED_DIRS = (  # below an experiment's folder; several nodes write into each of them
    "peers", "heartbeats", "progress", "state", "state/rounds", "winners", "rollouts", "rewards",
    "checkpoints", "models", "logs", "tmp",
)  # fmt: skip
WORKER_DIRS = ("rollouts", "rewards", "checkpoints", "models", "logs", "tmp")  # each holds NODE/
COORDINATOR_DIRS = ("logs", "tmp")
LAYOUT_TIMEOUT_SECONDS = 30.0  # how long to wait for folders that another process makes
MAX_JSON_BYTES = 8 << 20  # a rollout file of 64 x 64 completions of 256 tokens takes about 4 MiB
MAX_JSON_ELEMENTS = 400_000  # 8 MiB of "[]," would parse to a gigabyte of Python objects
MAX_METADATA_BYTES = 64 << 10  # a registration, heartbeat, reward or config
MAX_LOG_BYTES = 1 << 40  # no log grows so long; a larger file was planted and is replaced
MAX_TEXT_CHARS = 32768  # of a question
GROUP_SIZES = range(2, 65)  # completions per question in a peer's file; its G may differ from ours
MAX_SEED = 2**53  # JSON readers in other languages round larger integers
HEARTBEAT_CACHE_SECONDS = 2.0  # heartbeats are written every few seconds, so reading can be rarer
NOT_REGULAR_FILE_ERRNOS = {
    errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM,
}  # fmt: skip


class StoreError(Exception):
    """This node's or the experiment's own state cannot be used. The program stops and says why."""


class InvalidFileError(ValueError):
    """A file that cannot be used. The text is a short reason, fit for a log line."""


# -------- The experiment's records ----------------------------------------------------------------


def round_file(kind: str, node_id: str, round_: int, stage: int) -> str:
    """Path of a node's file of a round and stage.

    ("rewards", "anna", 12, 0) -> "rewards/anna/round_000012.stage_0.json"
    """
    return f"{kind}/{node_id}/round_{round_:06d}.stage_{stage}.json"


def marker_file(kind: str, node_id: str, round_: int, stage: int) -> str:
    """Path of a progress marker: the node has written all its files of this kind up to here.

    ("rewards", "anna", 12, 0) -> "progress/anna.rewards.000012.0"
    """
    return f"progress/{node_id}.{kind}.{round_:06d}.{stage}"


class DriveStore:
    """One experiment's files. Paths are relative to `experiment_dir`.

    experiment=None stands for what all experiments share: warmstart/, archives/ and reports/.
    owner: the node that writes; its temporary files lie in tmp/OWNER. A reader has none.
    invalid_files counts, by reason, the files that could not be used.

    All methods but `create` and `load_config` raise OSError if `experiment_dir` is missing, because
    that means a drive that is not mounted. For a node the same holds for a missing folder among
    SHARED_DIRS, which may not have arrived yet.
    """

    def __init__(self, root, experiment: str | None, owner: str = ""):
        self.root = Path(root)
        self.experiment_dir = self.root
        if experiment is not None:
            self.experiment_dir = self.root / "experiments" / experiment
        self.owner = owner
        self.is_root = experiment is None
        self.invalid_files = Counter()  # reason -> number of failed reads

        self._checked_dirs = set()  # known to be no links; a check costs a file-system call
        self._append_offsets = {}  # log -> its length before an append that failed
        self._heartbeat_cache = {}  # node_id -> (when it was read, the heartbeat)
        self._last_activity = {}  # node_id -> timestamp in its rollout or reward file last read
        self._markers = {}  # (kind, node_id) -> (round, stage) of this process's marker
        self._is_maker = False  # whether this process begins the experiment
        self._has_written_config = False
        self._waiting_since = None  # when it first waited for another process that begins it

    # -- the experiment

    def create(self, node_ids: list[str] = (), kinds: tuple = WORKER_DIRS) -> None:
        """Begin the experiment unless another process has, and make the folders of these nodes.

        kinds: the folders of a node. Raises StoreError if the folder cannot be used, and OSError
        while another process is still making the experiment, so that the caller tries again.
        """
        # The one whose mkdir succeeds makes all folders that several nodes write into. Others wait
        # for layout.json. If it does not come, its maker was killed.
        self.create_root_dirs()
        self._checked_dirs.clear()  # an earlier experiment of this name may have vanished
        if self.experiment_dir.is_symlink():
            raise StoreError(f"{self.experiment_dir} is a link: choose another EXPERIMENT_NAME")
        if not self.experiment_dir.is_dir():
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.experiment_dir)
                self._is_maker = True
        if not self.is_complete():
            if not self._is_maker:
                self._wait_for(self.experiment_dir, "another process is still creating it")
            self._create_shared_dirs()

        self._create_node_dirs(node_ids, kinds)
        if self.owner not in node_ids:
            self._make_dir(self.experiment_dir / "tmp" / self.owner)
        self._check_append()

    def create_root_dirs(self) -> None:
        """Make what is missing of the folders that all experiments share. Raises StoreError if the
        shared folder cannot be used."""
        try:
            if not self.root.is_dir():
                os.mkdir(self.root)
            for name in ROOT_DIRS:
                self._make_dir(self.root / name)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise StoreError(f"GDRIVE_PATH={self.root} cannot be used: {error.strerror}") from error

    def _create_shared_dirs(self) -> None:
        for name in SHARED_DIRS:
            self._make_dir(self.experiment_dir / name)
        self._make_dir(self.root / "archives" / self.experiment_dir.name)
        if self.owner:
            self._make_dir(self.experiment_dir / "tmp" / self.owner)
        data = {"layout": LAYOUT_VERSION, "created_by": self.owner}
        self.write_atomic("layout.json", data, fsync=True)  # last: all folders are there

    def _create_node_dirs(self, node_ids: list[str], kinds: tuple) -> None:
        """Make the missing folders of these nodes. Those of a node that has registered before exist
        already, but may not have arrived here yet."""
        known = self.latest_sessions()
        for node_id in node_ids:
            for kind in kinds:
                path = self.experiment_dir / kind / node_id
                if path.is_dir() and not path.is_symlink():
                    continue
                if node_id in known and not os.path.lexists(path):
                    self._wait_for(path, f"{kind}/{node_id} is not here yet")
                self._make_dir(path)

    def _wait_for(self, path: Path, reason: str) -> None:
        """Raise OSError, so that the caller tries again, until LAYOUT_TIMEOUT_SECONDS have passed
        since this store first waited. Then the maker was killed, or never existed."""
        self._waiting_since = self._waiting_since or time.monotonic()
        if time.monotonic() - self._waiting_since < LAYOUT_TIMEOUT_SECONDS:
            raise OSError(errno.EAGAIN, reason, str(path))

    def _make_dir(self, path: Path) -> None:
        """Make a directory unless it exists. A link or a file in its place is replaced."""
        if path.is_dir() and not path.is_symlink():
            return
        if os.path.lexists(path):
            path.unlink()
        os.mkdir(path)

    def _check_append(self) -> None:
        """Find out now, not after the first round, whether logs can be written."""
        # Append twice: the first call creates the file, and every storage can do that.
        path = f"tmp/{self.owner}/try"
        try:
            for _ in range(2):
                self.append(path, "x\n")
        except (InvalidFileError, PermissionError) as error:
            advice = "an rclone mount needs --vfs-cache-mode writes"
            raise StoreError(
                f"{self.experiment_dir}: files cannot be appended to there: {advice}"
            ) from error
        self.delete(path)

    def is_complete(self) -> bool:
        """Whether the experiment exists with all its shared folders."""
        if not self.experiment_dir.is_dir() or self.experiment_dir.is_symlink():
            return False
        return self.read_json_matching("layout.json", layout=LAYOUT_VERSION) is not None

    def load_config(self) -> dict | None:
        """Return the settings that the experiment began with, None if there are none yet.

        Raises StoreError if config.json cannot be used, or if the folder belongs to another program
        or to an older version of this one.
        """
        try:
            if not self.experiment_dir.is_dir():
                return None
            saved = self.read_json("config.json")
        except PermissionError as error:
            raise StoreError(f"GDRIVE_PATH={self.root} cannot be used: {error.strerror}") from error
        except InvalidFileError as error:
            path = self.experiment_dir / "config.json"
            advice = "wait, restore it or start a new EXPERIMENT_NAME"
            raise StoreError(f"{path}: {error}; {advice}") from error

        # Older layouts have a key in config.json, and folders of rounds below rollouts/, as has
        # rl-swarm's Google Drive mode.
        is_older = saved is not None and "layout" in saved
        for name in DriveStore(self.root, self.experiment_dir.name).list_names("rollouts"):
            is_older = is_older or re.fullmatch(r"round_\d+", name) is not None
        if is_older:
            reason = "was written by another program, or another version; nothing was changed"
            raise StoreError(f"{self.experiment_dir} {reason}: start a new EXPERIMENT_NAME")
        return saved

    def load_or_create_config(self, settings: dict) -> dict:
        """Return the settings that the experiment began with: those in config.json, or else
        `settings`, which are written to it. Raises StoreError as `load_config` does."""
        saved = self.load_config()
        if saved is None:
            is_new = self.write_once("config.json", dump_json(settings, indent=1), fsync=True)
            self._has_written_config = self._has_written_config or is_new
            saved = self.load_config()  # of two simultaneous writers one has won
        return saved

    def withdraw(self) -> None:
        """Remove what this process has made, because its start fails: its folder in tmp/, and if no
        worker has registered its config.json, the experiment's folder, and the shared folder if it
        is empty then."""
        sessions = self.latest_sessions()
        if self.owner not in sessions:
            self.delete(f"tmp/{self.owner}")
        if self._has_written_config and not worker_ids(sessions):
            self.delete("config.json")
        if not self._is_maker:
            return

        # An empty folder can be removed, another one cannot. peers/ goes first: if a node has
        # registered, a coordinator for example, this fails and all the rest stays.
        archive = self.root / "archives" / self.experiment_dir.name
        with contextlib.suppress(OSError):
            os.rmdir(self.experiment_dir / "peers")
            shutil.rmtree(self.experiment_dir)
            for path in (archive, *(self.root / name for name in ROOT_DIRS)):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
            os.rmdir(self.root)

    # -- rounds

    def current_round(self) -> int:
        """The highest open round, -1 if there is none. Only names count: one listing is enough."""
        newest = -1
        for name in self.list_names("state/rounds"):
            match = re.fullmatch(r"round_(\d{6})\.[\w.-]+\.json", name, re.ASCII)
            if match:
                newest = max(newest, int(match[1]))
        return newest

    def open_round(self, round_: int, by: str) -> None:
        """Declare that this round and all before it are open. Several nodes may open the same round
        without harm."""
        state = {"round": round_, "stage": 0, "updated_at": time.time(), "updated_by": by}
        self.write_once(f"state/rounds/round_{round_:06d}.{by}.json", state)
        self.write_atomic("state/current_state.json", state)  # for people

    # -- rollouts

    def publish_rollouts(
        self, round_: int, stage: int, node_id: str, metadata: dict, groups: dict
    ) -> bool:
        """Write a node's rollout file, then move its marker. Returns False if a valid file exists
        already.

        groups: {"0": {"task", "seed", "prompt", "answer", "completions"}, "1": …}
        """
        # What the file says of itself comes first, so that a person sees it at once.
        data = {
            "format": ROLLOUT_FORMAT_VERSION,
            "peer_id": node_id,
            "round": round_,
            "stage": stage,
            "timestamp": time.time(),
            **metadata,
            "rollouts": groups,
        }

        # An existing file counts if a peer could use it.
        def is_valid(existing: bytes) -> bool:
            parse_rollouts(parse_json(existing), round_, stage, node_id)
            return True

        path = round_file("rollouts", node_id, round_, stage)
        is_new = self.write_once(path, data, is_valid)
        self.advance_marker("rollouts", node_id, round_, stage)
        return is_new

    def fetch_rollouts(
        self, round_: int, stage: int, node_id: str, max_bytes: int = MAX_JSON_BYTES
    ) -> list[dict] | None:
        """Read a peer's groups. Their structure is checked here, their content is not.

        Returns None if there is no file: the peer has skipped this round, or its file has not
        arrived yet. Raises InvalidFileError with the reason if the file cannot be used.
        """
        data = self.read_json(round_file("rollouts", node_id, round_, stage), max_bytes)
        if data is None:
            return None

        # A file that was published a moment ago shows that its node is alive.
        groups = parse_rollouts(data, round_, stage, node_id)
        self._last_activity[node_id] = data["timestamp"]
        return groups

    def prune_rollouts(self, node_id: str, before_round: int, archive: bool) -> None:
        """Delete a node's own rollouts of all rounds before this one, or move them to
        archives/EXPERIMENT/NODE/."""
        for round_, stage in self.list_stages("rollouts", node_id):
            if round_ >= before_round:
                break
            path = round_file("rollouts", node_id, round_, stage)
            if archive:
                self._archive(path, node_id)
            self.delete(path)

    def _archive(self, path: str, node_id: str) -> None:
        shared = DriveStore(self.root, None)
        folder = f"archives/{self.experiment_dir.name}/{node_id}"
        self._make_dir(shared.resolve(folder, for_writing=True))  # only this node makes it
        target = shared.resolve(f"{folder}/{Path(path).name}", for_writing=True)
        if os.path.lexists(target):  # from a deleted experiment of the same name
            target = target.with_name(f"{target.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):  # moved before, by a call that then failed
            self.resolve(path).rename(target)

    # -- rewards

    def submit_reward(self, round_: int, stage: int, node_id: str, data: dict) -> bool:
        """Publish a node's reward and metrics, then move its marker. Returns False if a valid file
        exists already."""
        metadata = {"node_id": node_id, "round": round_, "stage": stage}

        def is_valid(existing: bytes) -> bool:
            return parse_reward(parse_json(existing), **metadata) is not None

        path = round_file("rewards", node_id, round_, stage)
        data = {**metadata, "timestamp": time.time(), **data}
        is_new = self.write_once(path, data, is_valid)
        self.advance_marker("rewards", node_id, round_, stage)
        return is_new

    def read_reward(self, round_: int, stage: int, node_id: str) -> dict | None:
        """A node's reward and metrics, None if there is no valid file. It may not have arrived."""
        data = self.read_json_matching(round_file("rewards", node_id, round_, stage)) or {}
        reward = parse_reward(data, node_id=node_id, round=round_, stage=stage)
        if reward is not None:
            self._last_activity[node_id] = reward["timestamp"]
        return reward

    def read_rewards(self, round_: int, node_ids, num_stages: int) -> list[dict]:
        """The valid rewards that `node_ids` submitted in a round, stage by stage."""
        rewards = []
        progress = self.list_progress("rewards")
        for stage in range(num_stages):
            for node_id in sorted(node_ids):
                if progress.get(node_id, (-1, 0)) >= (round_, stage):
                    reward = self.read_reward(round_, stage, node_id)
                    if reward is not None:
                        rewards.append(reward)
        return rewards

    # -- progress

    def list_progress(self, kind: str) -> dict[str, tuple[int, int]]:
        """{node_id: (round, stage)} up to which each node has written files of this kind: rollouts
        or rewards. Only names count, so one listing is enough."""
        progress = {}
        for node_id, marker_kind, round_, stage in self._list_markers():
            if marker_kind == kind:
                progress[node_id] = max((round_, stage), progress.get(node_id, (-1, 0)))
        return dict(sorted(progress.items()))

    def list_nodes(self, kind: str, round_: int, stage: int) -> list[str]:
        """The nodes that have got as far as this round and stage, sorted."""
        progress = self.list_progress(kind)
        return [node_id for node_id in progress if progress[node_id] >= (round_, stage)]

    def advance_marker(self, kind: str, node_id: str, round_: int, stage: int) -> None:
        """Move a node's marker forward, after its file has been written. Never moves it back."""
        known = self._markers.get((kind, node_id)) or self.list_progress(kind).get(node_id)
        if known is not None and known >= (round_, stage):
            return
        path = marker_file(kind, node_id, round_, stage)
        try:
            if known is None:
                raise FileNotFoundError
            self._replace(self.resolve(marker_file(kind, node_id, *known)), path)
        except FileNotFoundError:  # there is no marker yet, or it has been moved or deleted
            self.write_atomic(path, b"")
        self._markers[kind, node_id] = (round_, stage)

    def reset_markers(self, node_id: str) -> None:
        """Set a node's markers to its newest files, and delete its other ones: those that an
        earlier session left, or that somebody planted."""
        newest_open = self.current_round()
        for kind in ("rollouts", "rewards"):
            written = [at for at in self.list_stages(kind, node_id) if at[0] <= newest_open]
            for other, marker_kind, round_, stage in self._list_markers():
                is_right = bool(written) and (round_, stage) == written[-1]
                if (other, marker_kind) == (node_id, kind) and not is_right:
                    self.delete(marker_file(kind, node_id, round_, stage))
            self._markers.pop((kind, node_id), None)
            if written:
                self.advance_marker(kind, node_id, *written[-1])

    def _list_markers(self) -> list[tuple[str, str, int, int]]:
        """(node_id, kind, round, stage) of all markers. Copies such as "… (1)" do not match."""
        pattern = re.compile(r"(.+)\.(rollouts|rewards)\.(\d{6})\.(0|[1-9]\d?)", re.ASCII)
        markers = []
        for name in self.list_names("progress"):
            match = pattern.fullmatch(name)
            if match and is_safe_name(match[1]):
                markers.append((match[1], match[2], int(match[3]), int(match[4])))
        return markers

    # -- nodes

    def register(self, node_ids: list[str], role: str, metadata: dict) -> str:
        """Register the nodes of one process. Returns the id of the new session.

        A session id begins with the time in milliseconds. It sorts after every earlier session of
        these nodes, also where another machine's wall clock is ahead.
        """
        # Choose a session id that is later than all earlier ones of these nodes.
        previous = "0"
        for node_id, session in self.latest_sessions().items():
            if node_id in node_ids:
                previous = max(previous, session)
        milliseconds = max(int(time.time() * 1000), int(previous[:13]) + 1)
        session = f"{milliseconds:013d}-{secrets.token_hex(4)}"

        # One file for each node, under a name that no other process uses.
        for node_id in node_ids:
            data = {
                "node_id": node_id,
                "role": role,
                "session": session,
                "registered_at": time.time(),
                **metadata,
            }
            self.write_once(f"peers/{node_id}.{session}.json", data)
        return session

    def latest_sessions(self) -> dict[str, str]:
        """{node_id: its latest session} of all nodes that ever registered. One listing."""
        sessions = {}
        for name in self.list_names("peers"):  # sorted: a node's last session comes last
            match = re.fullmatch(r"(.+)\.(\d{13}-[0-9a-f]{8})\.json", name, re.ASCII)
            if match and is_safe_name(match[1]):
                sessions[match[1]] = match[2]
        return dict(sorted(sessions.items()))

    def write_heartbeat(
        self, node_id: str, session: str, round_: int, state: str = "running"
    ) -> None:
        """Show that a node is alive. state: running, or done or stopped when it exits."""
        data = {
            "node_id": node_id,
            "time": time.time(),
            "session": session,
            "round": round_,
            "state": state,
        }
        self.write_atomic(f"heartbeats/{node_id}.json", data)

    def node_status(self, node_id: str, session: str, stale_after: float) -> str:
        """Return "exited", "alive" or "dead".

        A node has exited if the heartbeat of its latest session says so. Otherwise it is alive if
        its registration, its heartbeat, or the last file of it that was read here is younger than
        `stale_after` seconds. Ages are differences of wall-clock times, so the clocks of all
        machines must agree within `stale_after`.
        """
        # Read the heartbeat again unless that was done a moment ago.
        read_at, heartbeat = self._heartbeat_cache.get(node_id, (-math.inf, {}))
        if time.monotonic() - read_at > min(HEARTBEAT_CACHE_SECONDS, stale_after / 8):
            heartbeat = self.read_json_matching(f"heartbeats/{node_id}.json", node_id=node_id) or {}
            self._heartbeat_cache[node_id] = (time.monotonic(), heartbeat)

        # The state of an earlier session does not count.
        if heartbeat.get("session") == session and heartbeat.get("state") in ("done", "stopped"):
            return "exited"

        # One recent timestamp is enough, because on a slow drive the heartbeat may arrive late.
        registered_at = int(session[:13] or 0) / 1000
        for timestamp in (registered_at, heartbeat.get("time"), self._last_activity.get(node_id)):
            if is_finite_number(timestamp) and abs(time.time() - timestamp) < stale_after:
                return "alive"
        return "dead"

    # -- listings

    def list_stages(self, kind: str, node_id: str) -> list[tuple[int, int]]:
        """(round, stage) of a node's files of this kind, ascending."""
        stages = []
        for name in self.list_names(f"{kind}/{node_id}"):
            match = re.fullmatch(r"round_(\d{6})\.stage_(0|[1-9]\d?)\.json", name, re.ASCII)
            if match:
                stages.append((int(match[1]), int(match[2])))
        return sorted(stages)

    def list_checkpoints(self, process: str) -> dict[int, str]:
        """{round: path} of this process's checkpoints, the newest first."""
        checkpoints = {}
        for name in reversed(self.list_names(f"checkpoints/{process}")):
            if re.fullmatch(r"round_\d{6}\.safetensors", name, re.ASCII):
                checkpoints[int(name[6:12])] = f"checkpoints/{process}/{name}"
        return checkpoints

    # -------- Atomic files, and reading -----------------------------------------------------------

    def write_atomic(self, path: str, data, fsync: bool = False) -> None:
        """Write a file in place of an older one. Readers see the old file or the whole new one.

        data: a dict, bytes, or a function that is given a path and writes a file there.
        fsync: the contents reach the disk before the file gets its name.
        A link, a FIFO or a folder of this name is replaced.
        """
        with self._temp_file(data, fsync) as temp:
            self._replace(temp, path)

    def write_once(self, path: str, data, is_valid=None, fsync: bool = False) -> bool:
        """Write a file that must never change afterwards. Returns False if a valid file already has
        this name.

        is_valid: decides from its bytes whether the existing file is valid; an invalid one is
        replaced. It may raise ValueError instead of returning False, as the default, `parse_json`,
        does.
        """
        # A hard link either gets the name or fails; a rename would replace the other node's file.
        with self._temp_file(data, fsync) as temp:
            try:
                os.link(temp, self.resolve(path, for_writing=True))  # fails if the name is taken
            except OSError:  # the name is taken, or the storage has no hard links
                if self._is_valid_file(path, is_valid or parse_json):
                    return False
                self._replace(temp, path)  # there is no valid file of this name
        return True

    def write_directory(self, path: str, write) -> None:
        """Write several files into the directory `path`, each as `write_atomic` would.

        write: a function that fills the empty directory that it is given, without subdirectories.
        """
        # Let the function fill a directory in tmp/, where no reader looks.
        temp = self._temp_path()
        directory = self.resolve(temp, for_writing=True)
        os.mkdir(directory)
        try:
            write(directory)

            # Move the files to their places, one by one.
            for file in sorted(directory.iterdir()):
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
                self._replace(file, f"{path}/{file.name}")
        finally:
            self.delete(temp)

    @contextlib.contextmanager
    def _temp_file(self, data, fsync: bool):
        """Write `data` to a new file in tmp/ and yield its path. The file is deleted at the end."""
        temp = self.resolve(self._temp_path(), for_writing=True)
        try:
            if callable(data):
                data(temp)
            elif isinstance(data, dict):
                temp.write_bytes(dump_json(data))
            else:
                temp.write_bytes(data)
            if fsync:
                with open(temp, "rb") as file:
                    os.fsync(file.fileno())
            yield temp
        except OSError:
            self._checked_dirs.clear()  # a directory may have disappeared
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temp)

    def _temp_path(self) -> str:
        """A new name below tmp/. Beside the experiments no node has a folder of its own in it."""
        name = secrets.token_hex(8)
        return f"tmp/{self.owner}.{name}" if self.is_root else f"tmp/{self.owner}/{name}"

    def delete_temp_files(self) -> None:
        """Delete what a killed process of this owner left in tmp/."""
        if self.is_root:
            for name in self.list_names("tmp"):
                if name.startswith(f"{self.owner}."):
                    self.delete(f"tmp/{name}")
        else:
            for name in self.list_names(f"tmp/{self.owner}"):
                self.delete(f"tmp/{self.owner}/{name}")

    def _replace(self, temp: Path, path: str) -> None:
        target = self.resolve(path, for_writing=True)
        try:
            os.replace(temp, target)
        except IsADirectoryError:
            self.delete(path)
            os.replace(temp, target)

    def _is_valid_file(self, path: str, is_valid) -> bool:
        try:
            existing = self.read_bytes(path, MAX_JSON_BYTES)
            return existing is not None and bool(is_valid(existing))
        except ValueError:  # is_valid may raise it, as may InvalidFileError
            return False

    def append(self, path: str, text: str) -> None:
        """Append whole lines to a log.

        First truncate what a failed attempt left behind, and terminate a line that a crash cut off.
        A link, a FIFO or a folder of this name is replaced.
        """
        # Open the log. If something else has its name, make room for it.
        try:
            file = self.open(path, "a+b")
        except InvalidFileError:
            self.delete(path)
            file = self.open(path, "a+b")

        with file:
            # Remember the length before the first attempt until an attempt succeeds.
            size = self._append_offsets.setdefault(path, os.fstat(file.fileno()).st_size)
            file.truncate(size)
            is_torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(("\n" if is_torn else "").encode() + text.encode("utf-8", "replace"))
        del self._append_offsets[path]  # after the close, which is where a full disk raises

    def delete(self, path: str) -> None:
        """Delete a file, a link, or a directory with everything in it."""
        with contextlib.suppress(FileNotFoundError, InvalidFileError):
            target = self.resolve(path)
            if stat.S_ISDIR(os.lstat(target).st_mode):
                shutil.rmtree(target, ignore_errors=True)  # follows no links
                self._checked_dirs.clear()
            else:
                os.unlink(target)

    # -- reading

    def read_json(self, path: str, max_bytes: int = MAX_METADATA_BYTES) -> dict | None:
        """Read one JSON object. Returns None if there is no such file.

        Raises InvalidFileError, and counts it, if the file cannot be used. That includes a file
        that cannot be read (EIO, ESTALE) although the experiment's folder can be listed.
        """
        try:
            data = self.read_bytes(path, max_bytes)
            return None if data is None else parse_json(data)
        except OSError as error:
            self.check_mounted()  # raises if it is the folder that fails, not the file
            reason = f"cannot be read ({error.strerror})"
        except InvalidFileError as error:
            reason = str(error)
        self.invalid_files[reason] += 1
        raise InvalidFileError(reason)

    def read_json_matching(self, path: str, **metadata) -> dict | None:
        """Read a JSON object that must contain `metadata`. Returns None if the file is missing or
        invalid, or does not contain it."""
        try:
            data = self.read_json(path) or {}
        except InvalidFileError:
            return None
        return data if metadata.items() <= data.items() else None

    def read_bytes(self, path: str, max_bytes: int) -> bytes | None:
        """Read a whole file. Returns None if it is missing.

        Raises InvalidFileError if it is larger than max_bytes.
        """
        try:
            with self.open(path) as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            return None
        if len(data) > max_bytes:
            raise InvalidFileError(f"larger than {max_bytes} bytes")
        return data

    def open(self, path: str, mode: str = "rb"):
        """Open a regular file to read ("rb") or to append ("a+b").

        Raises InvalidFileError for a FIFO, a link or a directory, FileNotFoundError if the file is
        missing, and another OSError if the experiment's folder is missing as well.
        """
        # Follow no link, and do not wait for the other end of a FIFO.
        is_reading = mode == "rb"
        flags = os.O_RDONLY if is_reading else os.O_RDWR | os.O_APPEND | os.O_CREAT
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            target = self.resolve(path, for_writing=not is_reading)
            descriptor = os.open(target, flags, 0o666)
        except FileNotFoundError:
            self.check_mounted(path)
            raise
        except OSError as error:
            if error.errno in NOT_REGULAR_FILE_ERRNOS:
                raise InvalidFileError("not a regular file that this user may use") from error
            raise

        # Check what was opened, not the name: the name may mean another file by now.
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and (is_reading or status.st_size < MAX_LOG_BYTES):
            return os.fdopen(descriptor, mode)
        os.close(descriptor)
        raise InvalidFileError("not a regular file that this user may use")

    def existing_file(self, path: str) -> Path | None:
        """Full path of a regular file, for a library that opens files by path. None if missing."""
        try:
            target = self.resolve(path)
            return target if stat.S_ISREG(os.lstat(target).st_mode) else None
        except (FileNotFoundError, InvalidFileError):
            self.check_mounted(path)
            return None

    def list_names(self, path: str) -> list[str]:
        """Names in a directory, sorted. An empty list if there is no such directory."""
        try:
            return sorted(os.listdir(self.resolve(f"{path}/-").parent))  # "-": any file in it
        except (FileNotFoundError, InvalidFileError):
            self.check_mounted(path)
            return []

    def resolve(self, path: str, for_writing: bool = False) -> Path:
        """Full path of a file in the experiment. Refuses symbolic links among its parents.

        Each parent is checked when it is first used, and again after an outage. A link or a file in
        place of a directory raises InvalidFileError; for_writing=True replaces it by a directory. A
        missing parent raises FileNotFoundError: it is made elsewhere, or has not arrived yet.
        """
        *parents, name = path.split("/")
        current = self.experiment_dir
        for parent in parents:
            current = current / parent
            if current in self._checked_dirs:
                continue

            # A planted link would lead outside the experiment.
            if not stat.S_ISDIR(os.lstat(current).st_mode):
                if not for_writing:
                    raise InvalidFileError("not in a folder of this experiment")
                current.unlink()
                os.mkdir(current)
            self._checked_dirs.add(current)
        return current / name

    def check_mounted(self, path: str = "") -> None:
        """Raise OSError if the experiment's folder cannot be listed: the drive is not mounted.

        For a node also if `path` lies in a shared folder that is missing.
        """
        self._checked_dirs.clear()  # after an outage another drive may be mounted
        try:
            os.listdir(self.experiment_dir)
        except OSError as error:
            reason = f"{error.strerror}: not mounted?"
            raise OSError(errno.ENOTCONN, reason, str(self.experiment_dir)) from error
        if self.is_root or not self.owner:
            return
        for name in SHARED_DIRS:
            is_inside = path == name or path.startswith(f"{name}/")
            if is_inside and not os.path.lexists(self.experiment_dir / name):
                raise OSError(
                    errno.ENOENT, "this folder is missing", str(self.experiment_dir / name)
                )


# -------- Parsing untrusted files -----------------------------------------------------------------


def is_safe_name(name: str) -> bool:
    """Whether `name` may become part of a path: 1 to 64 letters, digits, ".", "_" or "-"."""
    return re.fullmatch(r"[A-Za-z0-9_-]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?", name) is not None


def is_finite_number(value) -> bool:
    """Whether `value` is a finite int or float. Booleans and integers beyond floats are not."""
    return type(value) in (int, float) and abs(value) < 1e300  # nan < 1e300 is False


def parse_json(data: bytes) -> dict:
    """Parse one JSON object.

    Raises InvalidFileError for anything that no file of this program contains: NaN, Infinity,
    1e400, lone surrogates, deep nesting, huge integers.
    """

    def parse_finite(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits} is not a finite number")
        return value

    # Bound the number of Python objects before any is created.
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_JSON_ELEMENTS:
        raise InvalidFileError("too many elements")

    try:
        parsed = json.loads(
            data.decode("utf-8"), parse_constant=parse_finite, parse_float=parse_finite
        )
        json.dumps(parsed, ensure_ascii=False).encode(
            "utf-8"
        )  # "\ud800" parses but cannot be saved
    except (ValueError, RecursionError) as error:
        raise InvalidFileError("not valid JSON" if data else "empty file") from error

    if not isinstance(parsed, dict):
        raise InvalidFileError("not a JSON object")
    return parsed


def dump_json(data: dict, indent: int | None = None) -> bytes:
    """Encode a dict as JSON. indent=1 is for files that people read; it takes ten times as long,
    because json's fast encoder cannot indent."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode("utf-8", "replace")


def parse_reward(data: dict, **metadata) -> dict | None:
    """The numbers of a reward file, 64 at most, together with `metadata`.

    Returns None if the file does not agree with `metadata`, or if its reward or timestamp is out of
    range. A node that generated nothing (I = 0) has no reward: it is None.
    """
    # Keep only numbers with plain names: they become columns of tables and curves of plots.
    numbers = {}
    for name, value in data.items():
        if len(numbers) == 64:
            break
        if is_finite_number(value) and re.fullmatch(r"\w{1,40}", name, re.ASCII):
            numbers[name] = value

    # The metadata must agree with the file's path, and the reward must be one.
    row = numbers | metadata
    if row.get("completions") == 0:
        row.setdefault("reward", None)
    is_reward = "reward" in row and (row["reward"] is None or 0 <= row["reward"] <= 1)
    in_range = is_reward and 0 < row.get("timestamp", 0) < 1e11
    return row if in_range and metadata.items() <= data.items() else None


def parse_rollouts(data: dict, round_: int, stage: int, node_id: str) -> list[dict]:
    """Check the structure of a rollout file and return its groups.

    A group: {"key": (round, stage, node_id, index), "task", "seed", "prompt", "answer",
    "completions": [{"response", "finished", "reward"}]}. The answer and the rewards are claims of
    the peer. They are shown to people and never used for learning.

    Raises InvalidFileError with the reason if anything has the wrong type or is out of bounds.
    """

    def require(condition, reason: str) -> None:
        if not condition:
            raise InvalidFileError(reason)

    def is_text(value, max_chars: int = MAX_TEXT_CHARS) -> bool:
        return isinstance(value, str) and len(value) <= max_chars

    # The file must say what its path says.
    header = [data.get(name) for name in ("format", "peer_id", "round", "stage")]
    expected = [ROLLOUT_FORMAT_VERSION, node_id, round_, stage]
    require(header == expected, "another format, or its contents do not match its path")
    require(is_finite_number(data.get("timestamp")), "timestamp is not a number")
    rollouts = data.get("rollouts")
    require(isinstance(rollouts, dict), "rollouts is not an object")

    groups = []
    for index, group in rollouts.items():
        # The question.
        is_index = re.fullmatch(r"0|[1-9]\d{0,5}", index, re.ASCII)
        require(is_index and isinstance(group, dict), "a group is not an object with an index")
        task, seed, prompt = group.get("task"), group.get("seed"), group.get("prompt")
        require(is_text(task, 64), "task is not a string, or too long")
        require(is_text(prompt), "prompt is not a string, or too long")
        require(type(seed) is int and 0 <= seed < MAX_SEED, "seed out of range")  # True is an int

        # Its completions. Only the three keys that are read here are kept.
        completions = []
        listed = group.get("completions")
        require(isinstance(listed, list) and len(listed) in GROUP_SIZES, "group size out of range")
        for each in listed:
            require(isinstance(each, dict), "a completion is not an object")
            require(is_finite_number(each.get("reward", 0)), "reward is not a number")
            require(isinstance(each.get("response"), str), "response is not a string")
            require(isinstance(each.get("finished"), bool), "finished is not a boolean")
            completions.append(
                {
                    "response": each["response"],
                    "finished": each["finished"],
                    "reward": each.get("reward", 0),
                }
            )

        groups.append(
            {
                "key": (round_, stage, node_id, int(index)),
                "task": task,
                "seed": seed,
                "prompt": prompt,
                "answer": str(group.get("answer"))[:64],
                "completions": completions,
            }
        )
    return groups


# -------- Retry and polling -----------------------------------------------------------------------

COORDINATOR_ID = "coordinator"  # the node_id of the one coordinator that an experiment may have


class RetryingStore:
    """A DriveStore whose calls are repeated until the folder can be reached.

    That is safe because every method of DriveStore may be called twice.

    on_event(kind, text): called once when an outage begins and once when it is over.
    signals: `signals.requested` is true when the user wants to stop.
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
        """Call `call(…)` again after each OSError, with pauses of 0.5 to 5 seconds.

        Raises KeyboardInterrupt if the user stops during an outage: no round can be finished and
        no checkpoint written then.
        """
        started = time.monotonic()
        pause = 0.5
        while True:
            try:
                result = call(*args, **kwargs)
                break
            except OSError as error:
                if pause == 0.5:
                    reason = printable(error, 200)
                    self.on_event("outage", f"the shared folder fails ({reason}); waiting for it")

                # Pause in small steps, so that Ctrl-C works during an outage.
                wake_at = time.monotonic() + pause
                while time.monotonic() < wake_at:
                    if self.signals.requested:
                        raise KeyboardInterrupt from error
                    time.sleep(0.1)
                pause = min(2 * pause, 5.0)

        if pause > 0.5:
            seconds = time.monotonic() - started
            self.on_event("outage over", f"the shared folder is back after {seconds:.0f} s")
        return result


def poll_sleep(poll_started: float) -> float:
    """Sleep as long as the last poll took, between 20 ms and 2 s.

    Returns the time of poll and sleep together. A poll counts as at most 2 s, so an outage is not
    charged to the peers.
    """
    poll_seconds = min(2.0, time.monotonic() - poll_started)
    pause = max(0.02, poll_seconds)
    time.sleep(pause)
    return poll_seconds + pause


def heartbeat_interval(stale_after: float) -> float:
    """Seconds between two heartbeats, well below the silence after which a node counts as dead."""
    return min(10.0, stale_after / 8)


def worker_ids(sessions) -> list[str]:
    """The workers among registered nodes, sorted: all but the coordinator."""
    return sorted(set(sessions) - {COORDINATOR_ID})


def printable(value, width: int = 100) -> str:
    """Text from a stranger, safe for a terminal: cut to `width`, control characters as "?"."""
    return "".join(char if char.isprintable() else "?" for char in str(value)[:width])
