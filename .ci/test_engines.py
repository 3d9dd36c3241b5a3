"""A swarm as a job of Slurm: a cluster of three nodes on this machine, started for these tests alone.

Skipped where Slurm's commands are not installed (Debian: apt-get install slurm-wlm munge).
"""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
os.environ["PATH"] += ":/usr/sbin:/sbin"  # where the daemons are
MISSING = [command for command in COMMANDS if shutil.which(command) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SETTINGS = {
    "MODEL_NAME": "tiny", "NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4, "NUM_GENERATIONS": 4,
    "WARM_START_STEPS": 150, "ANSWER_TAG_SHARE": 0.9, "NUM_WORKERS": 2, "NODE_ROLE": "auto",
    "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1, "MAX_ROUNDS": 60,
}  # fmt: skip
NODES = ("node_1", "node_2")  # rank 0 is the coordinator
CONFIGURATION = """\
ClusterName=proof
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
CommunicationParameters=NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[3]}] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""
SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name=sapo --ntasks=3 --ntasks-per-node=1 --open-mode=append --output=%x.out
#SBATCH --requeue --signal=TERM@15
srun --label --kill-on-bad-exit=0 "$PYTHON" "$SAPO"
status=$?; echo "srun ended with $status"
case $status in 130 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac  # stopped: goes on where it stopped
exit $status
"""


def four_free_ports() -> list[int]:
    """Four ports in a row of which nobody uses any, below those that the system hands out."""
    for first in range(17000, 30000, 4):
        try:
            for port in range(first, first + 4):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return list(range(first, first + 4))
        except OSError:
            continue
    pytest.skip("no four free ports in a row")


def until(condition, seconds: float, what: str):
    """The first truthy value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} after {seconds} s"
        time.sleep(0.2)
    return value


class Cluster:
    """munged, slurmctld and three slurmd, all in one folder; `close` ends all of them."""

    def __init__(self, place: Path):
        self.place, self.daemons = place, []
        host, user = socket.gethostname().split(".")[0], getpass.getuser()
        for name in ("state", "spool.n1", "spool.n2", "spool.n3"):
            (place / name).mkdir()
        (place / "munge.key").write_bytes(os.urandom(128))
        (place / "munge.key").chmod(0o600)
        text = CONFIGURATION.format(host=host, user=user, place=place, ports=four_free_ports())
        (place / "slurm.conf").write_text(text)
        self.environ = {n: os.environ[n] for n in ("PATH", "HOME", "LANG") if n in os.environ}
        self.environ |= {"SLURM_CONF": str(place / "slurm.conf")}

    def start(self):
        place = self.place
        files = {name: place / f"munge.{name}" for name in ("socket", "key", "pid", "log", "seed")}
        flags = [f"--{name}-file={files[name]}" for name in ("key", "pid", "log", "seed")]
        self.daemon("munged", "--foreground", "--force", f"--socket={files['socket']}", *flags)
        until(files["socket"].exists, 10, "socket of munged")
        self.daemon("slurmctld", "-D", "-c", "-i")
        for name in ("n1", "n2", "n3"):
            self.daemon("slurmd", "-D", "-c", "-N", name)
        until(
            lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3", 30, "three idle nodes"
        )

    def daemon(self, *command):
        with open(
            self.place / f"{command[0]}.{command[-1].strip('-')[-8:]}.out".replace("/", "_"), "ab"
        ) as out:
            arguments = {"stdout": out, "stderr": subprocess.STDOUT, "env": self.environ}
            self.daemons.append(subprocess.Popen(command, start_new_session=True, **arguments))

    def run(self, *command) -> str:
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def close(self):
        self.run("scancel", "--user", getpass.getuser())
        until(lambda: not self.run("squeue", "-h").strip(), 45, "end of all jobs")
        for child in reversed(self.daemons):
            child.send_signal(signal.SIGTERM)
        for child in reversed(self.daemons):
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            cluster.start()
        except (AssertionError, OSError) as error:
            pytest.skip(f"no Slurm on this machine: {error}")
        yield cluster
    finally:
        cluster.close()


class Job:
    """The swarm as a batch job in a folder of its own; `text` is all that its starts have printed."""

    def __init__(self, cluster: Cluster, place: Path, **settings):
        self.cluster, self.place, self.drive = cluster, place, place / "drive"
        place.mkdir(exist_ok=True)
        (place / "swarm.sbatch").write_text(SCRIPT)
        given = {
            **SETTINGS,
            "GDRIVE_PATH": self.drive,
            "PYTHON": sys.executable,
            "SAPO": ROOT / "sapo.py",
            **settings,
        }
        self.settings = {name: str(value) for name, value in given.items()}

    def submit(self, *flags):
        self.cluster.run("scancel", "--user", getpass.getuser())  # what a test that failed has left
        environ = self.cluster.environ | self.settings
        command = ("sbatch", "--parsable", f"--chdir={self.place}", *flags, "swarm.sbatch")
        done = subprocess.run(
            command, cwd=self.place, env=environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()
        return self

    @property
    def text(self) -> str:
        out = self.place / "sapo.out"
        return out.read_text(errors="replace") if out.exists() else ""

    def until(self, pattern: str, times: int = 1, seconds: float = 150):
        def shown():
            return len(re.findall(pattern, self.text)) >= times

        try:
            until(shown, seconds, repr(pattern))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.state}\n{self.text[-6000:]}") from None
        return self

    @property
    def state(self) -> str:
        return self.cluster.run("scontrol", "show", "job", self.id)

    def ended(self, state: str) -> str:
        return until(lambda: f"JobState={state} " in self.state and self.state, 60, f"state {state}")

    def rewards(self) -> dict[str, set[int]]:
        base = self.drive / "experiments/default/rewards"
        return {n: {int(p.parts[-3][6:]) for p in base.glob(f"*/stage_0/{n}.json")} for n in NODES}

    def checkpoints(self) -> set[str]:
        return {
            path.name for path in (self.drive / "experiments/default/checkpoints").glob("*/*.safetensors")
        }

    def registered(self) -> dict[str, int]:
        """How often each name was started."""
        names = [
            path.name.split(".")[0] for path in (self.drive / "experiments/default/peers").glob("*.json")
        ]
        return {name: names.count(name) for name in sorted(set(names))}

    def validate(self):
        environ = self.cluster.environ | self.settings | {"NODE_ROLE": "validate"}
        command = (sys.executable, ROOT / "sapo.py")
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed" in done.stdout


def test_a_job_of_three_tasks_is_a_coordinator_and_two_workers_and_every_round_is_rewarded(cluster, tmp_path):
    job = Job(cluster, tmp_path / "job").submit("--time=10").until("srun ended with")
    assert "ExitCode=0:0" in job.ended("COMPLETED"), job.text[-3000:]
    assert job.registered() == {"coordinator": 1, "node_1": 1, "node_2": 1}
    assert job.rewards() == {node: set(range(60)) for node in NODES}
    job.validate()


def test_a_job_at_its_time_limit_is_requeued_and_resumes_under_the_same_names(cluster, tmp_path):
    job = Job(
        cluster, tmp_path / "job", MAX_ROUNDS=100_000, ROUND_ADVANCE="time", COORDINATOR_ROUND_INTERVAL=1
    )
    job.submit("--time=2", "--signal=TERM@45").until("srun ended with 130").until(r"node_\d resume: ", 2)
    job.until(r"node_\d round ", 1)
    stopped = [int(n) for n in re.findall(r"stopped before round (\d+)", job.text)]
    resumed = [int(n) for n in re.findall(r"resume: from the checkpoint after round (\d+)", job.text)]
    assert sorted(n + 1 for n in resumed) == sorted(stopped), job.text[-3000:]
    expected, deadline = {"coordinator": 2, "node_1": 2, "node_2": 2}, time.monotonic() + 60
    while job.registered() != expected and time.monotonic() < deadline:  # each resumes before it registers
        time.sleep(0.2)
    assert job.registered() == expected


def test_a_cancelled_job_stops_cleanly_with_a_checkpoint_of_each_worker_and_is_not_requeued(
    cluster, tmp_path
):
    job = Job(cluster, tmp_path / "job", MAX_ROUNDS=100_000).submit("--time=10").until(r"node_\d round ", 20)
    cluster.run("scancel", job.id)
    job.ended("CANCELLED")
    job.until("stopped before round", 2, 20).until("coordinator: stopped", 1, 20)
    assert job.checkpoints() == {"node_1.safetensors", "node_2.safetensors"}
    assert job.registered() == {"coordinator": 1, "node_1": 1, "node_2": 1}  # nobody requeued it
    assert not list((job.drive / "experiments/default/tmp").glob("*/*"))
