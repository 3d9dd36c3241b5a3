"""Nothing that this program writes, renames or deletes leaves the experiment, whatever a stranger planted there."""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from test_kill_storm import Process, nothing_left_behind  # noqa: F401  a fixture

from drive_store import DriveStore

TRAIN = {
    "MODEL_NAME": "tiny", "TASKS": "small_products", "WARM_START_STEPS": "40", "ANSWER_TAG_SHARE": "0.5",
    "NUM_TRAIN_SAMPLES": "2", "NUM_GENERATIONS": "2", "MAX_ROUNDS": "4", "CHECKPOINT_INTERVAL": "1",
    "ROLLOUT_CLEANUP_ENABLED": "True", "ROLLOUT_KEEP_LAST_N_ROUNDS": "1", "ROLLOUT_MAX_AGE": "0", "NODE_ID":
    "a", "EXPERIMENT_NAME": "x", "STALE_AFTER_SECONDS": "2",
}  # fmt: skip
LOGS = ("stdout.log", "training_events.jsonl", "metrics.jsonl", "system_info.json")
FILES = [  # that a worker, the coordinator or a reader writes
    *(f"experiments/x/logs/a/{name}" for name in LOGS), "experiments/x/logs/coordinator/stdout.log",
    "experiments/x/heartbeats/a.json", "experiments/x/heartbeats/coordinator.json",
    "experiments/x/state/current_state.json", "experiments/x/state/rounds/round_000001.a.json",
    "experiments/x/winners/round_000001.json", "experiments/x/models/a/config.json",
    "experiments/x/models/a/model.safetensors", "experiments/x/rollouts/round_000001/stage_0/a.json",
    "experiments/x/rewards/round_000001/stage_0/a.json",
    *(f"reports/{name}" for name in ("report.md", "report.csv", "curves.csv", "report.json", "report.png")),
]  # fmt: skip
FOLDERS = {  # name of a case -> folders that are links at the same time
    "of a node": (
        "logs/a", "heartbeats", "winners", "models/a", "rollouts/round_000000", "rewards/round_000001",
        "../../archives", "../../reports",
    ), "checkpoints": ("checkpoints",),
    "of the experiment": ("logs", "state/rounds", "models", "rollouts", "rewards", "../../archives/x",
    "../../tmp"), "deeper": (
        "state", "rollouts/round_000002/stage_0", "checkpoints/round_000001", "../../archives/x/rollouts",
        "../../tmp/a",
    ),
    "experiments": ("..",), "the experiment": (".",), "peers": ("peers",), "tmp": ("tmp",), "tmp/a":
    ("tmp/a",), "warmstart": ("../../warmstart",),
}  # fmt: skip
NEVER_STARTS = ("experiments", "the experiment", "peers", "warmstart")


def victim(place: Path) -> Path:
    """A folder that is nobody's business, with files of every name that the program writes or deletes."""
    outside = place / "outside"
    for path in [*FILES, *(f"{folder}/inner/precious" for folders in FOLDERS.values() for folder in folders)]:
        parts = [part for part in Path(path).parts if part not in ("..", ".")]
        for cut in range(len(parts)):
            file = outside.joinpath(*parts[cut:])
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                file.write_text("precious")
    return outside


def picture_of(folder: Path) -> dict:
    """Everything below a folder: kind, rights, change time, contents."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        about = path.lstat()
        contents = path.read_bytes() if stat.S_ISREG(about.st_mode) else None
        found[str(path)] = about.st_mode, about.st_mtime_ns, about.st_nlink, contents
    return found


class Role(Process):
    """A role of node a, as a process of its own with a file for its output."""

    def __init__(self, drive: Path, role: str = "worker", **settings):
        super().__init__(drive, "a", **{**TRAIN, "NODE_ROLE": role, **settings})


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A shared folder with the warm start."""
    place = tmp_path_factory.mktemp("warm") / "drive"
    worker = Role(place, MAX_ROUNDS=1).start()
    assert worker.end() == 0, worker.text
    return place / "warmstart"


@pytest.fixture
def drive(warm, tmp_path):
    shutil.copytree(warm, tmp_path / "drive/warmstart")
    return tmp_path / "drive"


def train_and_look(drive: Path, roles=("worker", "coordinator", "validate", "monitor", "report"), **settings):
    """A worker, then the coordinator, then the readers: what they can do they do, and none of them trips."""
    for role in roles:
        process = Role(drive, role, **settings).start()
        status, text = process.end(60), process.text
        assert "Traceback" not in text and status in (0, 1, 2), text
        assert status != 2 or str(drive) in text, f"it says what cannot be used: {text}"


def plant(path: Path, outside: Path, how: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
    target = outside / path.name
    if how == "link":
        path.symlink_to(target)
    elif how == "dangling link":
        path.symlink_to(outside / "new" / path.name if len(path.name) % 2 else outside / ("new " + path.name))
    elif how == "second name":
        os.link(target, path)
    elif how == "FIFO":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
        (path / "inner").write_text("")
    elif how == "full device":
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))


@pytest.mark.parametrize("how", ["link", "dangling link", "second name", "FIFO", "folder", "full device"])
def test_no_file_is_written_through_what_lies_in_its_place(drive, tmp_path, how):
    if how == "full device" and os.getuid() != 0:
        pytest.skip("only root makes devices")
    outside, worker = victim(tmp_path), Role(drive, MAX_ROUNDS=1).start()
    assert worker.end() == 0  # it has a checkpoint: beside a model alone it would not be started
    for path in FILES:
        plant(drive / path, outside, how)
    before = picture_of(outside)
    train_and_look(drive)
    after = picture_of(outside)
    if how == "second name":  # of a file whose own name was replaced one name is left, and its contents
        before, after = ({path: about[:2] + about[3:] for path, about in p.items()} for p in (before, after))
    assert after == before


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("case", FOLDERS)
def test_nothing_is_written_moved_or_deleted_below_a_folder_that_is_a_link(drive, tmp_path, case, archive):
    outside = victim(tmp_path)
    for path in FOLDERS[case]:
        plant(Path(os.path.normpath(drive / "experiments/x" / path)), outside, "link")
    before = picture_of(outside)
    starts = case not in NEVER_STARTS  # without a worker the coordinator would wait for one
    roles = ("worker", "coordinator", "validate", "monitor", "report") if starts else ("worker", "report")
    train_and_look(drive, roles, ROLLOUT_ARCHIVE_OLD=archive)
    assert picture_of(outside) == before


def test_a_folder_swapped_for_a_link_while_it_is_retired_leads_nowhere(tmp_path):
    """Whatever the moment, nothing outside is touched."""
    outside, stop = victim(tmp_path), threading.Event()
    before = picture_of(outside)
    store = DriveStore(tmp_path / "drive", "x", "a")
    store.create()

    def swap(name: str):
        while not stop.is_set():
            with contextlib.suppress(OSError):
                for path in [*store.base.glob(f"rollouts/**/{name}"), *store.base.glob(f"tmp/**/{name}")]:
                    path.rename(path.with_name("hidden"))
                    path.symlink_to(outside / "rollouts/round_000000")

    threads = [threading.Thread(target=swap, args=(name,)) for name in ("stage_0", "round_000001")]
    for thread in threads:
        thread.start()
    try:
        for again in range(150):
            for name in ("round_000000", "round_000001", "round_000002"):
                new = tmp_path / f"new.{again}.{name}"
                for stage in range(3):
                    (new / f"stage_{stage}/inner").mkdir(parents=True)
                    (new / f"stage_{stage}/inner/a.json").write_text("{}")
                with contextlib.suppress(OSError):  # last time's is still there
                    new.rename(store.base / "rollouts" / name)
            with contextlib.suppress(OSError):
                store.retire_rollouts(3, archive=again % 3 == 0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert picture_of(outside) == before


def test_folders_in_folders_a_thousand_deep_hold_up_neither_retention_nor_the_next_start(drive):
    for place in ("rollouts/round_000000", "tmp/a", "rollouts/round_000001/stage_0"):
        folder = drive / "experiments/x" / place
        folder.mkdir(parents=True)
        top = os.open(folder, os.O_RDONLY)
        for _ in range(1500):  # a path of that length has no name that the system takes
            os.mkdir("d", dir_fd=top)
            inner = os.open("d", os.O_RDONLY, dir_fd=top)
            os.close(top)
            top = inner
        os.close(top)
    try:
        train_and_look(drive)
        left = sorted(path.name for path in (drive / "experiments/x/rollouts").iterdir())
        assert left == ["round_000003"], "those of later rounds are gone"
    finally:
        subprocess.run(["rm", "-rf", drive], check=True)  # pytest's own cleaning would not get to the end


def test_what_belongs_to_another_user_is_left_alone_and_training_goes_on(warm, tmp_path):
    """Without root's rights, beside folders of root's that may be read, and one that may not."""
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    drive = tmp_path / "drive"
    shutil.copytree(warm, drive / "warmstart")
    for path in ("logs/a", "models/a", "winners", "rewards/round_000001", "rollouts/round_000001/stage_0"):
        (drive / "experiments/x" / path).mkdir(parents=True)
    for path in [drive, *drive.rglob("*")]:
        os.chown(path, 65534, 65534)
    for path in ("logs/a", "models/a", "winners", "rewards/round_000001"):
        os.chown(drive / "experiments/x" / path, 0, 0)
    (drive / "experiments/x/winners").chmod(0o700)
    for folder in [path for path in (tmp_path, *tmp_path.parents) if "pytest-of" in str(path)]:
        folder.chmod(0o777)
    process = Role(drive, UID=65534).start()
    assert process.end(60) == 1 and "Traceback" not in process.text, process.text
    kept = re.search(r"5 writes did not reach the shared folder; what lies in (\S+) can be", process.text)[1]
    kept = Path(kept)
    assert (kept / "models/a/model.safetensors").exists(), "what could not be written there is kept here"
    shutil.rmtree(kept)
    rewards = sorted(path.parts[-3] for path in (drive / "experiments/x/rewards").glob("*/*/a.json"))
    assert rewards == ["round_000000", "round_000002", "round_000003"]
    assert process.shows("submit_reward .*was set aside")
