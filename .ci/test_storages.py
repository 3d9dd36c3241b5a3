"""Other storages for real: S3 (moto, mounted by rclone) and sshfs, each mounted twice as two machines would.

By hand or with MOUNTS=1, beside test_mounts.py; a storage whose programs are missing is skipped. The figures are
those of the table in .github/ENGINES.md: `python -m pytest -s .ci/test_storages.py`.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 20
SETTINGS = {
    "MODEL_NAME": "tiny", "NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4, "NUM_GENERATIONS": 4, "NUM_WORKERS": 2,
    "WARM_START_STEPS": 150, "ANSWER_TAG_SHARE": 0.9, "MAX_ROUNDS": ROUNDS, "EXTERNAL_FILTER": False,
    "OMP_NUM_THREADS": 1,
}  # fmt: skip
KINDS = ("rollouts", "rewards")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds=60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the proof waits for did not happen"
        time.sleep(0.1)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def s3(place: Path, children: list) -> None:
    """A bucket in moto's memory and two rclone mounts of it, each with a cache of its own."""
    port, log = free_port(), open(place / "s3.log", "wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    children.append(subprocess.Popen(command, stdout=log, stderr=log))
    until(lambda: answers(port))
    keys = "access_key_id=key,secret_access_key=secret,force_path_style=true"
    remote = f":s3,provider=Other,endpoint='http://127.0.0.1:{port}',{keys}:swarm"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environ["RCLONE_CONFIG"] = "/dev/null"
    subprocess.run(["rclone", "mkdir", remote], env=environ, check=True, capture_output=True)
    flags = "--vfs-cache-mode writes --vfs-write-back 1s --dir-cache-time 1s --low-level-retries 1".split()
    for side in "AB":
        command = ["rclone", "mount", remote, place / side, "--cache-dir", place / f"cache{side}", *flags]
        children.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))


def sshfs(place: Path, children: list) -> None:
    """A server on loopback with keys of its own and two mounts of one folder."""
    port = free_port()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / key], check=True)
    (place / "remote").mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)
    config = f"""Port {port}
        ListenAddress 127.0.0.1
        HostKey {place}/host
        AuthorizedKeysFile {place}/user.pub
        StrictModes no
        PermitRootLogin prohibit-password
        PasswordAuthentication no
        UsePAM no
        PidFile none
        Subsystem sftp internal-sftp"""
    (place / "sshd.conf").write_text(config)
    log = open(place / "sshd.log", "wb")
    command = [shutil.which("sshd"), "-D", "-e", "-f", place / "sshd.conf"]
    children.append(subprocess.Popen(command, stdout=log, stderr=log))
    until(lambda: answers(port))
    known = "StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,LogLevel=ERROR"
    options = f"port={port},IdentityFile={place}/user,{known},dcache_timeout=1,reconnect"
    for side in "AB":
        command = ["sshfs", "-f", "-o", options, f"root@127.0.0.1:{place}/remote", place / side]
        children.append(subprocess.Popen(command, stdout=log, stderr=log))


@pytest.fixture(params=[s3, sshfs], ids=["S3", "sshfs"])
def sides(request, tmp_path):
    """Two mounts of one storage, empty."""
    needed = ["fusermount3", *(["rclone"] if request.param is s3 else ["sshd", "sshfs", "ssh-keygen"])]
    if lacking := [program for program in needed if not shutil.which(program)]:
        pytest.skip(f"not installed: {', '.join(lacking)}")
    if request.param is s3:
        pytest.importorskip("moto")
    elif os.getuid() != 0:
        pytest.skip("sshd wants to be root")
    tmp_path.chmod(0o755)
    children, both = [], [tmp_path / side for side in "AB"]
    for side in both:
        side.mkdir()
    try:
        request.param(tmp_path, children)
        until(lambda: all(map(os.path.ismount, both)))
        yield both
    finally:
        for side in both:
            subprocess.run(["fusermount3", "-u", "-z", side], capture_output=True)
        for child in children:
            child.terminate()


def two_workers(places) -> None:
    """a0 on the one side and b0 on the other, to the end."""
    environ = {**os.environ, **{name: str(value) for name, value in SETTINGS.items()}}
    workers = []
    for node, place in zip(("a0", "b0"), places, strict=True):
        own = {**environ, "NODE_ID": node, "GDRIVE_PATH": str(place)}
        with open(place.parent / f"{node}.log", "ab") as log:
            command = [sys.executable, ROOT / "sapo.py"]
            workers.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    assert [worker.wait(timeout=400) for worker in workers] == [0, 0]


def figures(place) -> tuple[float, float]:
    """(rounds a minute, share of a node's rounds in which it drew all externals)."""
    paths = (place / "experiments/default").glob("rewards/*/stage_0/??.json")
    rows = [json.loads(path.read_text()) for path in paths]
    rounds = sorted({row["round"] for row in rows})
    ends = [max(row["timestamp"] for row in rows if row["round"] == t) for t in (rounds[0], rounds[-1])]
    full = sum(row["external_short"] == 0 for row in rows) / len(rows)
    return 60 * (rounds[-1] - rounds[0]) / (ends[1] - ends[0]), full


def test_two_workers_on_two_mounts_share_and_lose_nothing(sides, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    two_workers([local, local])
    shutil.copytree(local / "warmstart", sides[0] / "warmstart")
    until(lambda: [*sides[1].glob("warmstart/*.safetensors")])
    two_workers(sides)
    names = [f"{kind}/round_{t:06d}/stage_0" for kind in KINDS for t in range(ROUNDS)]

    def lost(side) -> list[str]:
        """What a node published on its own side and is not on this one."""
        there = {
            str(path.relative_to(s))
            for s in sides
            for name in names
            for path in (s / "experiments/default" / name).glob("??.json")
        }
        return [path for path in there if not (side / path).exists()]

    until(lambda: not any(map(lost, sides)))
    left = [path for side in sides for path in side.glob("experiments/default/tmp/*/*")]
    (here, full), (yardstick, _) = figures(sides[0]), figures(local)
    print(
        f"{here:.0f} rounds a minute, local {yardstick:.0f}; all externals in {full:.0%} of a node's rounds"
    )
    assert not left and full > 0.5
    for node in ("a0", "b0"):
        rounds = [*(sides[0] / "experiments/default").glob(f"rewards/*/stage_0/{node}.json")]
        assert len(rounds) > ROUNDS // 2, "it kept up with the other"
