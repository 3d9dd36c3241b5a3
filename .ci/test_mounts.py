"""Real mounts: a swarm on two FUSE mounts of one WebDAV remote, each with a stale cache of its own, as two
Colab machines see one Drive. While it trains, the remote dies, the mounts vanish, the disk fills, listings
age, junk appears.

What is lost is looked for on the remote itself, after everything has settled: a mount takes a write, and
carries it there later.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open
from test_kill_storm import CHILDREN, Process, nothing_left_behind, unbroken  # noqa: F401 (a fixture)

SETTINGS = {
    "MAX_ROUNDS": 10**5, "ROUND_ADVANCE": "hybrid", "COORDINATOR_ROUND_INTERVAL": 4,
    "FETCH_TIMEOUT_SECONDS": 2, "CHECKPOINT_KEEP": 1000, "NUM_TRAIN_SAMPLES": 8,
}  # fmt: skip
INTERVAL = 3  # rounds between checkpoints, as in TINY
FAILS_FAST = (
    "--low-level-retries",
    "1",
)  # a call fails at once; with rclone's default of 10 it hangs for 20 s


class Drive:
    """A directory served over WebDAV on loopback, and what is mounted of it; `close` ends all of it."""

    def __init__(self, place: Path, remote: Path):
        self.place, self.remote, self.server, self.mounted, self.tmpfs = place, remote, None, {}, False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"

    def rclone(self, name, *arguments):
        with open(self.place / f"rclone.{name}.log", "ab") as out:
            command = ["rclone", *map(str, arguments), "--config", "/dev/null", "-v"]
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def serve(self):
        flags = ("--addr", self.address, "--dir-cache-time", "0s")
        self.server = self.rclone("server", "serve", "webdav", self.remote, *flags)
        self.until(self.answers, "a WebDAV server that answers")

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(self.address.split(":"), timeout=1):
            return True
        return False

    def mount(self, name: str, *flags) -> Path:
        """Mount the remote at `name`. The cache folder stays: a remount carries on with the uploads."""
        path = self.place / name
        give_up = pytest.fail if path.exists() else pytest.skip
        path.mkdir(exist_ok=True)
        self.mounted[name] = self.rclone(
            name, "mount", ":webdav:", path, "--webdav-url", f"http://{self.address}",
            "--webdav-vendor", "other", "--cache-dir", self.place / f"cache.{name}", "--vfs-cache-mode",
            "writes", "--vfs-write-back", "1s", "--dir-cache-time", "5s", *flags,
        )  # fmt: skip
        mounting = self.mounted[name]
        self.until(lambda: os.path.ismount(path) or mounting.poll() is not None, f"a mount at {path}")
        if mounting.poll() is not None:
            give_up("rclone cannot mount here: " + (self.place / f"rclone.{name}.log").read_text()[-300:])
        return path

    def unmount(self, name: str):
        """Lazily: the folder is gone at once, whoever is using it; then the mount's process ends."""
        subprocess.run(["fusermount3", "-u", "-z", self.place / name], capture_output=True, timeout=30)
        child = self.mounted.pop(name)
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def close(self):
        for name in list(self.mounted):
            self.unmount(name)
        if self.server:
            self.server.kill()
            self.server.wait()
        if self.tmpfs:
            subprocess.run(["umount", "-l", self.remote], timeout=30)

    def until(self, condition, what: str, seconds: float = 90):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
            time.sleep(0.1)


class Swarm:
    """A coordinator, node a, and b_0 and b_1 in one process; seen through the remote and their output."""

    def __init__(self, drive: Drive, seat: Path, a: Path, b: Path, **settings):
        settings = {**SETTINGS, **settings}
        self.base, self.rewards, self.clock = drive.remote / "experiments" / "default", {}, -1
        self.drawn = {}  # checkpoint file -> external groups that its nodes have trained on
        self.coordinator = Process(seat, "coordinator", **settings).start()
        self.a, self.b = Process(a, "a", **settings), Process(b, "b", LOCAL_NODES=2, **settings)
        self.processes = (self.coordinator,)
        self.until(lambda: self.clock == 0, "round 0 on the remote")  # else b, who sees nobody, would lead
        self.a.start(), self.b.start()
        self.processes = (self.coordinator, self.a, self.b)

    def look(self):
        """The clock never goes back, and a reward that was whole once keeps its value."""
        opened = self.base.glob("state/rounds/round_??????.coordinator.json")
        clock = max((whole(path).get("round", -1) for path in opened), default=-1)
        assert clock >= self.clock
        self.clock = clock
        for path in self.base.glob("rewards/*/*/*.json"):
            key = path.parts[-3], path.name
            if (data := whole(path)) and "(" not in path.name:
                assert self.rewards.setdefault(key, data) == data, f"{path} has changed"

    def until(self, condition, what: str, seconds: float = 90):
        """Wait for a condition, looking at the remote meanwhile; all must be alive, none with a traceback."""
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if condition():
                return
            for process in self.processes:
                assert process.child.poll() is None and "Traceback" not in process.text, process.text[-3000:]
            tails = "\n".join(f"--- {p.name}\n{p.text[-1500:]}" for p in self.processes)
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}:\n{tails}"
            time.sleep(0.2)

    def until_rounds(self, count: int, seconds: float = 90):
        """Until both workers have finished `count` more rounds."""
        before = {p: len(rounds_of(p)) for p in (self.a, self.b)}

        def done():
            return all(len(rounds_of(p)) >= n + count for p, n in before.items())

        self.until(done, f"{count} more rounds", seconds)

    def crossed(self) -> tuple[int, int]:
        """Groups that were trained on across the mounts, by the checkpoints: (of a by b, of b by a)."""
        for path in self.base.glob("checkpoints/*/[ab].safetensors"):
            if path not in self.drawn and is_checkpoint(path):
                with safe_open(path, "pt") as file:
                    nodes = json.loads(file.metadata()["about"])["nodes"]
                self.drawn[path] = {
                    (i, key[2], key[0], key[3]) for i, n in nodes.items() for key in n["trained"]
                }
        pairs = {
            (node[0], peer[0], node, peer, *key) for keys in self.drawn.values() for node, peer, *key in keys
        }
        used = [pair[:2] for pair in pairs]
        return used.count(("b", "a")), used.count(("a", "b"))

    def until_crossed(self, seconds: float = 120):
        """Until more has crossed in both directions: the swarm is one again."""
        before = self.crossed()

        def more():
            return all(n > m for n, m in zip(self.crossed(), before, strict=True))

        self.until(more, "externals across the mounts", seconds)

    def end(self, after_outage=False, seconds: float = 90) -> dict:
        """Stop all, wait until the remote has what they printed or saved; returns what was counted.

        Of the checkpoints due in an outage only the newest is kept for the folder.
        """
        for process in self.processes:
            process.signal(signal.SIGINT)
        for process in self.processes:
            assert process.end() == 130 and "Traceback" not in process.text, process.text[-3000:]
            assert "did not reach the shared folder" not in process.text, process.text[-3000:]
        expected, saved = set(), set()
        for process, nodes in ((self.a, ["a"]), (self.b, ["b_0", "b_1"])):
            rounds = rounds_of(process)
            assert rounds == sorted(set(rounds)), f"{process.name} went back: {rounds}"
            expected |= {(f"round_{r:06d}", f"{node}.json") for r in rounds for node in nodes}
            steps = zip([-1, *rounds], rounds, strict=False)
            due = {r for before, r in steps if (r + 1) // INTERVAL > (before + 1) // INTERVAL}
            due = {rounds[-1]} | (set() if after_outage else due)
            saved |= {self.base / f"checkpoints/round_{r:06d}/{process.name}.safetensors" for r in due}

        def missing():
            self.look()
            return sorted(expected - set(self.rewards)) + [path for path in saved if not is_checkpoint(path)]

        deadline = time.monotonic() + seconds
        while missing() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not (lost := missing()), f"not on the remote: {lost}"
        saved = list(self.base.glob("checkpoints/*/*.safetensors"))
        assert all(is_checkpoint(path) for path in saved)
        for kind in ("rewards", "rollouts"):  # `timestamp` is set when a write is carried out
            for node in ("a", "b_0", "b_1"):
                files = [(whole(p), p.parts[-3]) for p in self.base.glob(f"{kind}/*/*/{node}.json")]
                written = [(data["timestamp"], round_) for data, round_ in files if data]
                rounds = [round_ for _, round_ in sorted(written)]
                assert rounds == sorted(rounds), f"{kind} of {node} out of order"
        (to_b, to_a), left = self.crossed(), sum(path.is_file() for path in self.base.glob("tmp/*/*"))
        return {
            "rounds": self.clock + 1, "rewards": len(expected), "checkpoints": len(saved),
            "a->b": to_b, "b->a": to_a, "lost": 0, "temp files left": left,
        }  # fmt: skip


def whole(path: Path) -> dict:
    """A JSON file, {} while it is not all there."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def is_checkpoint(path: Path) -> bool:
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt"):
        return True
    return False


def rounds_of(process: Process) -> list[int]:
    """Rounds that this process says it has finished, in its order."""
    return [int(r) for r in re.findall(r"^(?:a|2 nodes) round (\d+)/", process.text, re.MULTILINE)]


@pytest.fixture
def tell(capsys, request):
    """Prints a line of figures past pytest's capture."""

    def line(**figures):
        with capsys.disabled():
            print(f"\n{request.node.name}\n    " + ", ".join(f"{k} {v}" for k, v in figures.items()))

    return line


@pytest.fixture
def drive(tmp_path_factory, tmp_path, request):
    for need in ("rclone", "fusermount3"):
        if not shutil.which(need):
            pytest.skip(f"{need} is not installed")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse here")
    source, drive = unbroken(tmp_path_factory.getbasetemp()), Drive(tmp_path, tmp_path / "remote")
    drive.remote.mkdir()
    try:
        if size := getattr(request, "param", None):
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", drive.remote]
            mounting = subprocess.run(command, capture_output=True, text=True)
            if mounting.returncode:
                pytest.skip(f"no tmpfs here: {mounting.stderr}")
            drive.tmpfs = True
        shutil.copytree(source / "warmstart", drive.remote / "warmstart")
        drive.serve()
        yield drive
    finally:
        for child in CHILDREN:  # before the mounts go: nobody may hang in a call
            child.kill()
        drive.close()


def test_a_swarm_on_two_mounts_trains_together_and_never_rewinds(drive, tell):
    a, b = drive.mount("A", *FAILS_FAST), drive.mount("B", *FAILS_FAST)
    swarm = Swarm(drive, a, a, b)
    swarm.until(lambda: min(swarm.crossed()) >= 5 and swarm.clock >= 8, "externals in both directions", 120)
    beats = swarm.base / "heartbeats"  # read all the time on their own mount, and yet carried to the remote
    swarm.until(
        lambda: whole(beats / "coordinator.json") and whole(beats / "a.json"), "heartbeats on the remote"
    )
    assert not any(p.shows("outage:") for p in swarm.processes)
    tell(**swarm.end())


def test_training_goes_on_while_the_server_is_dead_and_nothing_is_lost(drive, tell):
    a, b = drive.mount("A", *FAILS_FAST), drive.mount("B")  # on B every call hangs for 20 s before it fails
    # By time: a trains on alone no faster than usual, and waits afterwards until the clock has caught up with it.
    # Rounds must take as long after the outage, when B's uploads are slow, as before it.
    swarm = Swarm(drive, a, a, b, ROUND_ADVANCE="time")
    swarm.until_rounds(2)
    before = {p: len(rounds_of(p)) for p in (swarm.a, swarm.b)}
    drive.server.kill()
    drive.server.wait()
    died = time.monotonic()
    swarm.until_rounds(2)
    swarm.until(lambda: time.monotonic() > died + 20, "20 s without a server")
    meanwhile, seconds = {p.name: len(rounds_of(p)) - n for p, n in before.items()}, time.monotonic() - died
    drive.serve()

    def over(process):  # a call that hung and came back is no outage
        return process.shows("outage over") or not process.shows("outage: ")

    swarm.until(lambda: swarm.a.shows("outage over") and over(swarm.b), "the outage's end in both logs")
    swarm.until_crossed()
    assert swarm.coordinator.shows("folder fails") == swarm.coordinator.shows("is back")
    tell(**swarm.end(after_outage=True), seconds=round(seconds), during=meanwhile)


def test_mounts_that_crash_or_vanish_are_waited_for_and_never_refilled_on_the_local_disk(drive, tell):
    a, b = drive.mount("A", *FAILS_FAST), drive.mount("B", *FAILS_FAST)
    swarm = Swarm(drive, a, a, b)
    swarm.until_rounds(10)  # the pace of ten rounds together is the one at which each trains on alone
    before = {p: len(rounds_of(p)) for p in (swarm.a, swarm.b)}
    drive.mounted["B"].kill()  # from now on ENOTCONN, "Transport endpoint is not connected"
    drive.unmount("A")  # and here an empty local folder
    fails = "the shared folder fails"
    swarm.until(lambda: all(p.shows(fails) for p in swarm.processes), "the outage in all logs")
    swarm.until_rounds(2)
    drive.unmount("B")
    swarm.until_rounds(1)
    meanwhile = {p.name: len(rounds_of(p)) - n for p, n in before.items()}
    refilled = [*a.iterdir(), *b.iterdir()]
    drive.mount("A", *FAILS_FAST), drive.mount("B", *FAILS_FAST)
    back = "outage over|is back"
    swarm.until(lambda: all(p.shows(back) for p in swarm.processes), "the outage's end in all logs")
    # Who trained on alone waits for the clock, whose rounds now take up to the interval.
    furthest, began = max(rounds_of(swarm.a)[-1], rounds_of(swarm.b)[-1]), time.monotonic()
    ahead = furthest - swarm.clock
    patience = 60 + ahead * (1 + SETTINGS["COORDINATOR_ROUND_INTERVAL"])
    swarm.until(lambda: swarm.clock >= furthest, f"the clock at round {furthest}", patience)
    waited = time.monotonic() - began
    swarm.until_crossed()
    # 103, "Software caused connection abort", of a call that was under way
    assert swarm.b.shows(r"outage: .*Errno 10[37]") and not refilled
    assert swarm.coordinator.shows("drive not mounted")
    tell(**swarm.end(after_outage=True), during=meanwhile, ahead=ahead, waited=round(waited))


@pytest.mark.parametrize("drive", ["100m"], indirect=True)
def test_a_full_remote_stops_nobody_and_everything_arrives_once_there_is_room(drive, tell):
    """b has the remote as its own disk and sees ENOSPC; a's mount keeps its writes meanwhile."""
    a = drive.mount("A", *FAILS_FAST)
    swarm = Swarm(drive, a, a, drive.remote)
    swarm.until_rounds(2)
    ballast = drive.remote / "ballast"

    def fill():
        with contextlib.suppress(OSError), open(ballast, "ab", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        return swarm.b.shows("outage: .*No space left on device")

    swarm.until(fill, "ENOSPC in b's log")
    before, full = {p: len(rounds_of(p)) for p in (swarm.a, swarm.b)}, time.monotonic()
    swarm.until_rounds(3)
    swarm.until(lambda: fill() and time.monotonic() > full + 10, "10 s without room")
    meanwhile = {p.name: len(rounds_of(p)) - n for p, n in before.items()}
    ballast.unlink()
    swarm.until(lambda: swarm.b.shows("outage over"), "the outage's end in b's log")
    swarm.until_crossed()
    uploads = (drive.place / "rclone.A.log").read_text()
    tell(**swarm.end(after_outage=True), during=meanwhile, uploads_failed=uploads.count("failed to upload"))


def test_a_machine_whose_listings_are_a_minute_old_follows_in_leaps_and_says_so(drive, tell):
    a, b = drive.mount("A", *FAILS_FAST), drive.mount("B", "--dir-cache-time", "60s", *FAILS_FAST)
    swarm = Swarm(drive, a, a, b)
    swarm.until(lambda: rounds_of(swarm.b), "b's first round")
    swarm.until(lambda: swarm.b.shows(r"b skip: rounds \d+ to \d+ were opened"), "a round that b missed", 120)
    swarm.until(lambda: swarm.crossed()[1] >= 1, "b's rollouts at a")
    assert swarm.b.shows(r"b wait: round \d+ is not open here yet") and not swarm.b.shows("outage:")
    leaps = re.findall(r"b skip: rounds (\d+) to (\d+)", swarm.b.text)
    tell(**swarm.end(), leaps=leaps)


def test_copies_torn_and_empty_files_anywhere_in_the_folder_change_nothing(drive, tell):
    a, b = drive.mount("A", *FAILS_FAST), drive.mount("B", *FAILS_FAST)
    swarm = Swarm(drive, a, a, b)
    swarm.until_rounds(2)
    dropped = 0
    for _ in range(3):  # into the current round and the next two, which the swarm will write itself
        clock = swarm.clock
        for path in [p for p in swarm.base.glob("*/**/*.json") if "(" not in p.name][-40:]:
            shutil.copy(path, path.with_name(f"{path.stem} (1).json"))
            dropped += 1
        for round_ in (clock + 1, clock + 2, clock + 500):
            text = json.dumps({"round": round_, "opened_by": "coordinator", "opened_at": 0.0})
            junk = {
                f"state/rounds/round_{round_:06d}.coordinator (1).json": text,
                f"state/rounds/round_{round_:06d}.json": text,
                f"state/rounds/round_{clock + 500:06d}.a.json": text[:20],
                "state/rounds/round_999999.coordinator.json": "",
            }
            for kind in ("rollouts", "rewards"):
                for name in ("a", "b_0", "ghost"):
                    torn = '{"format": 1, "peer_id": "gho' if name == "ghost" else ""
                    junk[f"{kind}/round_{round_:06d}/stage_0/{name}.json"] = torn
            for name, text in junk.items():
                path = swarm.base / name
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
                    dropped += 1
        swarm.until_rounds(2)
    swarm.until_crossed()
    refused = r" reject: (?:ghost|a|b_\d): (?:not valid JSON|empty file)"
    said = sum(len(re.findall(refused, p.text)) for p in (swarm.a, swarm.b))
    assert swarm.clock < 400 and said >= 2
    tell(**swarm.end(), dropped=dropped, rejections_logged=said)
