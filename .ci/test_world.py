"""Tests of the swarm and the folder (S, F, L4 to L6, X) in a simulated world.

    pytest .ci/test_world.py -k "random and [17]"             repeat the schedule with seed 17
    SEEDS=600 pytest .ci/test_world.py -k random              run 600 schedules instead of 40
    EVERY=1 pytest .ci/test_world.py -k lone                  inject a fault at every call
    NODES="4 16 64 256" pytest -s .ci/test_world.py -k many   print the calls per round as a table

A random schedule is generated from a seed. It consists of a swarm's settings, its processes and the
faults to inject. While it runs, `Oracle` checks each change of the folder and each update of a
model, and afterwards the remaining files. If a schedule fails, it is reduced to the faults and
processes that the failure needs, and printed.

The oracle depends only on exit codes, the names and keys in the folder, and the seams in world.py.
The second half of this file contains scenarios that random schedules hardly ever reach.
"""

import errno
import itertools
import json
import os
import random
import re
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

import grpo
import sapo
import world
from world import REAL, World, question

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
# A lone process is tested with a fault at every EVERY-th call, or less often.
EVERY = int(os.environ.get("EVERY", 4))
NUM_SEEDS = int(os.environ.get("SEEDS", 40))
# Allowed calls on a process's own files: for its start and end, per node, per stage or end of a
# round, and per node and second (two calls per heartbeat, plus four markers that are posted again).
CALLS = 80, 50, 12, 1.3
TASK = "small_count_bits"
BASE = {
    "MODEL_NAME": "tiny", "DEVICE": "cpu", "TASKS": TASK, "WARM_START_STEPS": 0, "MAX_ROUNDS": 6,
    "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 3, "MAX_STAGES": 1,
    "EXTERNAL_FILTER": False, "CHECKPOINT_INTERVAL": 2, "FETCH_TIMEOUT_SECONDS": 30,
    "ROLLOUT_PUBLISH_FREQUENCY": "stage", "ROLLOUT_MAX_AGE": 2, "STALE_AFTER_SECONDS": 40,
    "ROLLOUT_CLEANUP_ENABLED": False, "ROLLOUT_KEEP_LAST_N_ROUNDS": 1, "ROLLOUT_ARCHIVE_OLD": False,
    "ROUND_ADVANCE": "hybrid", "COORDINATOR_ROUND_INTERVAL": 60, "NUM_WORKERS": 0,
    "FETCH_MAX_PEERS": 10,
}  # fmt: skip


# -------- Schedules -------------------------------------------------------------------------------


def random_schedule(seed: int) -> dict:
    """Generate a schedule, a dict with these keys besides "seed".

    "swarm": settings of all processes
    "delays": possible delays of changed names in listings, in seconds
    "processes": [(name, seconds before its start, seconds per step, clock error, settings)]
    "faults": [(name of the process, number of the call before which it happens, kind, *arguments)]
    """
    rng = random.Random(seed)
    pick = rng.choice
    swarm = BASE | {
        "MAX_ROUNDS": pick([3, 5, 8]),
        "MAX_STAGES": pick([1, 1, 1, 2]),
        "ROLLOUT_PUBLISH_FREQUENCY": pick(["stage", "stage", "round"]),
        "NUM_TRAIN_SAMPLES": pick([1, 2, 3]),
        "NUM_TRANSPLANT_TREES": pick([0, 2, 2, 4]),
        "EXTERNAL_FILTER": pick([False, False, True]),
        "CHECKPOINT_INTERVAL": pick([1, 2, 3, 100]),
        "FETCH_TIMEOUT_SECONDS": pick([2, 30, 100]),
        "ROLLOUT_MAX_AGE": pick([0, 1, 2]),
        "ROLLOUT_CLEANUP_ENABLED": pick([False, True]),
        "ROLLOUT_ARCHIVE_OLD": pick([False, True]),
        "ROUND_ADVANCE": pick(["time", "completion", "hybrid"]),
        "COORDINATOR_ROUND_INTERVAL": pick([5, 60]),
        "WARM_START_STEPS": pick([0, 0, 0, 3]),
    }
    num_workers = pick([1, 1, 2, 2, 3, 3, 4, 6])
    swarm["NUM_WORKERS"] = pick([0, 0, num_workers])
    processes = []
    for i in range(num_workers):
        settings = {"LOCAL_NODES": pick([1, 1, 1, 2, 3])}
        late = pick([0, 0, 1, 60]) * rng.random() * (i > 0)
        error = pick([0, 0, 0, 12, -12])
        processes.append((f"w{i}", late, pick([0.1, 0.3, 2.0, 6.0, 20.0]), error, settings))
    if num_workers > 1 and rng.random() < 0.5:
        processes.append(("coordinator", pick([0, 0, 30]), 0.1, 0, {}))
    # Changed names may become visible late or never.
    never = 1e9 * (rng.random() < 0.3)
    delays = pick([[0.0]] * 5 + [[0.0, 1.0, 5.0, 20.0, never]])

    faults = []
    for _ in range(pick([0, 1, 1, 2, 3, 5, 8])):
        name = pick(processes)[0]
        call = 1 + int(rng.random() ** 1.5 * (60 + 50 * swarm["MAX_ROUNDS"]))
        restart = pick([0.1, 5, 60] + [None] * (name != "w0" and call > 100))
        fault = pick([
            ("kill", restart), ("kill", restart), ("kill", restart), ("stop", restart),
            ("suspend", pick([3, 50, 200])), ("error", "before"), ("error", "after"),
            ("outage", pick([0.3, 3, 30])), ("outage", pick([0.3, 3, 30]), True),
            ("twin", pick([0.3, 6.0])), ("stranger",), ("stranger",),
        ])  # fmt: skip
        faults.append((name, call, *fault))
    return dict(seed=seed, swarm=swarm, delays=delays, processes=processes, faults=faults)


def run_schedule(schedule: dict, drive: Path) -> "Oracle":
    """Run a schedule to its end, and check the remaining files."""
    world = World(drive, schedule["seed"])
    world.delays = schedule["delays"]
    oracle = Oracle(world, schedule["swarm"])
    kinds = [kind for _, _, kind, *_ in schedule["faults"]]
    oracle.is_alone = len(schedule["processes"]) == 1 and "stranger" not in kinds
    for name, late, step_seconds, clock_error, settings in schedule["processes"]:
        process = world.process(name, step_seconds, clock_error, **oracle.swarm | settings)
        faults = [fault for fault in schedule["faults"] if fault[0] == name]
        process.faults = {call: what for _, call, *what in faults}
        world.at(late, process.start)
    slowest = max(process.step_seconds * len(process.nodes) for process in world.processes)
    pause = 2.5 * slowest + oracle.swarm["FETCH_TIMEOUT_SECONDS"] + 65
    with world.patched():
        seconds = 1000 + 400 * len(schedule["faults"]) + 2 * pause * 9
        world.run(seconds=seconds)
        oracle.check()
    return oracle


# -------- The oracle ------------------------------------------------------------------------------

STAGE_FILE = r"nodes/([^/]+)/(rollouts|rewards)/round_(\d{6})\.stage_(\d+)\.json"
MARKER = r"board/(open|rollouts|rewards|checkpoint)\.(.+)\.(\d{6})\.(\d+)"


def round_of(path: Path) -> int:
    """round_000012.stage_0.json -> 12"""
    return int(path.name[6:12])


@dataclass(frozen=True)
class Past:
    """The history of certain weights. After an update, no two nodes have the same weights."""

    round: int = -1
    node: str | None = None
    used: frozenset = frozenset()


class Oracle:
    """An observer of a world that reports each violation when it happens."""

    def __init__(self, world, swarm: dict):
        self.world, self.swarm, self.run = world, swarm, world.run
        self.dir = world.drive / "experiments/default"
        world.observe, world.trained, world.ended = self.change, self.update, self.end
        world.stranger = self.stranger
        self.is_alone, self.numbers = False, itertools.count()

        # {path: writer}, {path: bytes of a published file}, paths that retention has removed, and
        # paths of planted files.
        self.writers, self.published, self.removed, self.planted = {}, {}, set(), set()
        self.files = defaultdict(dict)  # (node, kind) -> {(round, stage): contents}
        self.checkpoints = set()  # paths of all checkpoints so far
        self.moves = []  # times at which a name on the board changed

        # By a group's (task, seed): the (node, round, stage) that published it, and its responses.
        # `bad` groups must not be used in training.
        self.groups, self.responses, self.bad = {}, {}, set()
        self.pasts, self.last = {}, {}  # weights -> Past, and node -> its latest weights

        # By process: the time of its last marker or heartbeat; its round, and the number of groups
        # when it entered this round; its number of calls when it entered each round; its updates
        # since it started, and since a newer process with its name registered.
        self.signs, self.entered, self.calls_at = {}, {}, defaultdict(dict)
        self.num_updates, self.late_updates = Counter(), Counter()
        # By name: the round of the newest checkpoint plus 1; the newest session, and its process.
        self.saved, self.session, self.newest = Counter(), {}, {}

    def require(self, condition, text: str) -> None:
        if not condition:
            self.world.fail(f"{self.world.now - 1e9:.2f} s: {text}")

    # -------- For scenarios -----------------------------------------------------------------------

    def start(self, name="n", step_seconds=0.3, clock_error=0.0, **settings):
        settings = {**self.swarm, **settings}
        return self.world.process(name, step_seconds, clock_error, **settings).start()

    def check(self) -> None:
        """Check the remaining files after all processes have ended."""
        self.world.tell(self.check_what_is_left)
        assert not self.world.violations, "\n".join(self.world.violations)

    def wait(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.world.run(lambda: self.world.now >= end)

    def opened(self, name="*") -> int:
        """Return the newest round that a node (by default, any node) has entered."""
        markers = (self.dir / "board").glob(f"open.{name}.*")
        return max((int(path.name.split(".")[-2]) for path in markers), default=-1)

    def contents(self) -> dict:
        files = self.world.drive.rglob("*")
        return {str(path): path.read_bytes() for path in files if path.is_file()}

    def rows(self, node: str, log="metrics") -> list:
        lines = (self.dir / f"nodes/{node}/logs/{log}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def rounds(self, node: str, kind="rewards") -> list:
        """Return the rounds for which a node has published files."""
        return sorted({round_ for round_, _ in self.files[node, kind]})

    def waits(self, process) -> dict:
        """Return {round: total seconds that this process's nodes waited}."""
        waits = Counter()
        for row in itertools.chain(*map(self.rows, process.nodes)):
            waits[row["round"]] += row["wait_seconds"]
        return waits

    # -------- Each change of the folder -----------------------------------------------------------

    def change(self, process, name: str, path: str, target: str) -> None:
        for each in {path, target}:
            writer = self.writers.setdefault(each, process.name)
            self.require(
                writer == process.name, f"F1: {process.name} changes {writer}'s {each} ({name})"
            )
        inside = os.path.relpath(target, self.dir)
        self.require(name != "mkdir" or inside != ".", "F6: the experiment appears empty")
        experiment = process.settings.get("EXPERIMENT_NAME", "default")
        if name == "mkdir" and (self.dir.with_name(experiment) / "config.json").exists():
            # The experiment's creator has created all folders that several processes write into.
            dirs = (f"/experiments/{experiment}/nodes", f"/archives/{experiment}")
            own = ["/.new-", *(f"{folder}/{node}" for node in process.nodes for folder in dirs)]
            is_own = any(part in target for part in own)
            self.require(is_own, f"F7: {process.name} creates {inside} after the start")
        if name == "open":
            # (A checkpoint is emptied before it is deleted.)
            is_temporary = os.path.basename(path).startswith(".new-")
            is_emptied = path in self.checkpoints and os.path.getsize(path) == 0
            is_right = is_temporary or is_emptied or "/logs/" in inside
            self.require(is_right, f"F1: {inside} is written in place")
        elif path in self.published:
            self.retire(process, path, target)
        elif name in ("replace", "rename"):
            self.arrive(process, inside, target)
            self.checkpoints |= {target} if "/checkpoints/" in target else set()

    def arrive(self, process, inside: str, path: str) -> None:
        """Check a file that was just renamed to its final name."""
        if file := re.fullmatch(STAGE_FILE, inside):
            node, kind, *at = file.groups()
            self.publish(process, path, node, kind, *map(int, at))
        elif inside.startswith("board/session."):
            for each in (path, str(self.dir / "config.json")):
                self.publish(process, each)
            if inside[-22:] > self.session.get(process.name, ""):
                self.session[process.name], self.newest[process.name] = inside[-22:], process
        elif marker := re.fullmatch(MARKER, inside):
            kind, node, round_, stage = marker.groups()
            if kind == "open":
                self.entered[process] = int(round_), len(self.groups)
                self.calls_at[process][int(round_)] = process.num_calls
            elif kind == "checkpoint":  # a process saves it in its first node's folder
                folder = self.dir / f"nodes/{process.nodes[0]}/checkpoints"
                is_there = any(folder.glob(f"round_{round_}.*"))
                self.require(is_there, f"F1: {inside} appears before its file")
            else:
                is_there = (int(round_), int(stage)) in self.files[node, kind]
                self.require(is_there, f"F1: {inside} appears before its file")
        elif inside == ".":  # the experiment appears complete, with board/ and nodes/
            self.require({*os.listdir(path)} == {"config.json", "board", "nodes"}, "F6: incomplete")
            self.publish(process, f"{path}/config.json")

        # Markers and heartbeats show that the process is alive.
        if inside.startswith("board/") or inside.endswith("heartbeat.json"):
            silence = self.world.now - self.signs.get(process, self.world.now)
            is_early = silence < self.swarm["STALE_AFTER_SECONDS"] / 2 or process.struck
            self.require(is_early, f"S2: {process.name} was silent for {silence:.0f} s")
            self.signs[process] = self.world.now
            self.moves += [self.world.now] * inside.startswith("board/")

    def publish(self, process, path, node=None, kind=None, round_=0, stage=0) -> None:
        """Record a published file, and check that it never changes."""
        data = Path(path).read_bytes()
        before = self.published.setdefault(path, data)
        content = json.loads(data)
        is_same = before == data
        if len(self.namesakes(process)) > 1 and kind:
            # Two processes with the same name may both write a stage's file. The contents must be
            # equal, except for the time, unless the newer process has removed the file meanwhile.
            is_same = {**json.loads(before), "timestamp": 0} == {**content, "timestamp": 0}
            is_same |= path in self.removed
            # If the older process checks for the file just before the newer process publishes it,
            # the older process replaces it. This is the exception in F1.
            if process is not self.newest[process.name]:
                is_same, self.published[path] = True, data
                self.files[node, kind][round_, stage] = content
        self.require(is_same, f"F1: {path} has changed")
        if not kind:
            return

        for each in self.world.processes:
            each.calls["open", path] = 0  # if it was opened too early, it may be opened again
        self.removed.discard(path)
        self.files[node, kind].setdefault((round_, stage), json.loads(before))
        is_right = (content["round"], content["stage"]) == (round_, stage) and node in process.nodes
        self.require(is_right, f"F1: {process.name} wrote {path} with round {content['round']}")
        for group in content["rollouts"].values() if kind == "rollouts" else ():
            at, id = (node, round_, stage), (group["task"], group["seed"])
            known = self.groups.setdefault(id, at)
            self.responses[id] = [completion["response"] for completion in group["completions"]]
            self.require(known[:2] == at[:2], f"L5: {at} repeats a question of {known}")

    def retire(self, process, path: str, target: str) -> None:
        """Check that retention allows this published file to be moved or deleted."""
        node, kind, round_, _ = re.search(f"{STAGE_FILE}|$", path).groups()
        is_asked = self.swarm["ROLLOUT_CLEANUP_ENABLED"] and kind == "rollouts"
        is_old = is_asked and int(round_) < self.oldest_kept(self.entered[process][0])
        archive = f"{self.world.drive}/archives/default/{node}/"
        goal = archive if self.swarm["ROLLOUT_ARCHIVE_OLD"] else os.path.dirname(path)
        is_right = is_old and target.startswith(goal)
        self.require(is_right, f"F5: {path} moved to {target} by {process.name}")
        self.removed.add(path)

    def oldest_kept(self, t: int) -> int:
        needed = self.swarm["CHECKPOINT_INTERVAL"] + self.swarm["ROLLOUT_MAX_AGE"]
        return t + 1 - max(needed, self.swarm["ROLLOUT_KEEP_LAST_N_ROUNDS"])

    def namesakes(self, process) -> list:
        """Return all processes with the name of this process, including itself."""
        return [each for each in self.world.processes if each.name == process.name]

    # -------- Each update -------------------------------------------------------------------------

    def update(self, process, before: bytes, after: bytes, groups: list) -> None:
        t, num_seen = self.entered[process]
        if not self.pasts:
            self.pasts[before] = Past()
        past = self.pasts.get(before)
        if past is None:
            return self.require(False, f"F3, L6: {process.name} has unknown weights")

        # A superseded process may finish its round, but must not start another.
        is_newest = self.newest[process.name] is process
        self.late_updates[process] += not is_newest
        at_most = len(process.nodes) * self.swarm["MAX_STAGES"]
        self.require(
            self.late_updates[process] <= at_most, f"S4: two processes named {process.name} train"
        )

        # A process resumes from its newest checkpoint. If it is alone, it skips no round.
        self.num_updates[process] += 1
        if self.num_updates[process] <= len(process.nodes) and "twin" not in process.struck:
            saved = self.saved[process.name] - 1
            self.require(
                past.round == saved,
                f"F3: {process.name} resumes after round {past.round}, not after {saved}",
            )
        follows = past.round <= t and (past.round + 1 >= t or not self.is_alone)
        self.require(
            follows, f"F3: {process.name} trains in round {t} right after round {past.round}"
        )

        # Its own groups are groups that it has published in this stage.
        own = [id for id, _, is_own in groups if is_own]
        files = [self.groups.get(id) for id in own]
        node = next((file[0] for file in files if file), past.node)
        if self.swarm["ROLLOUT_PUBLISH_FREQUENCY"] == "stage" and own:
            is_right = len({*files}) == 1 and None not in files and files[0][:2] == (node, t)
            self.require(is_right and node in process.nodes, f"S: {process.name} trains on {files}")
        self.require(len(own) <= self.swarm["NUM_TRAIN_SAMPLES"], "L4: too many own groups")

        external = [(id, rewards) for id, rewards, is_own in groups if not is_own]
        self.check_external(process, node, t, past, external, num_seen)
        self.pasts[after] = Past(t, node, past.used | {id for id, _ in external})
        if is_newest:
            self.last[node] = after

    def check_external(self, process, node, t: int, past: Past, external, num_seen: int) -> None:
        swarm = self.swarm
        ids = [id for id, _ in external]
        self.require(not past.used & {*ids}, f"L4: {node} trains twice on a group")
        self.require(
            len({*ids}) == len(ids) <= swarm["NUM_TRANSPLANT_TREES"],
            f"L4: repeated groups, or more than J: {ids}",
        )
        cap = swarm["NUM_TRAIN_SAMPLES"] or swarm["NUM_TRANSPLANT_TREES"]
        of_peer = Counter()
        for id, rewards in external:
            peer, round_, _ = self.groups.get(id, (None, 0, 0))
            is_right = peer not in (None, node) and 0 <= t - round_ <= swarm["ROLLOUT_MAX_AGE"]
            self.require(
                is_right, f"L4: {node} uses a group of {peer} from round {round_} in round {t}"
            )
            self.require(id not in self.bad, f"L4, X4: {node} trains on the invalid group {id}")
            answer = f"<answer>{question(*id)[1]}</answer>"
            truth = [float(text == answer) for text in self.responses.get(id, ())]
            self.require(rewards == truth, f"X4: rewards of {peer}'s group: {rewards}, not {truth}")
            is_informative = len({*rewards}) > 1 or not swarm["EXTERNAL_FILTER"]
            self.require(is_informative, f"L4: {node} trains on a flat group of {peer}")
            of_peer[peer, round_] += 1
        self.require(
            max(of_peer.values(), default=0) <= cap, f"L4: too many groups from one peer: {of_peer}"
        )

        # If groups are missing, older groups must be used.
        found = Counter()
        for id, (peer, round_, _) in [*self.groups.items()][:num_seen]:
            is_old = 1 <= t - round_ <= swarm["ROLLOUT_MAX_AGE"]
            if peer not in (node, "evil") and is_old and id not in past.used:
                found[peer, round_] += 1
        is_due = node and not swarm["EXTERNAL_FILTER"] and self.world.delays == [0.0]
        if is_due and not {"error", "outage"} & {*process.struck}:
            available = sum(min(cap, number) for number in found.values())
            wanted = min(available, swarm["NUM_TRANSPLANT_TREES"])
            self.require(
                len(ids) >= wanted, f"L4: {node} uses {len(ids)} of {wanted} groups in round {t}"
            )

    # -------- Each end ----------------------------------------------------------------------------

    def end(self, process) -> None:
        status, struck, name = process.status, {*process.struck}, process.name
        has_twin = any("twin" in each.struck for each in self.namesakes(process))
        expected = {-9: "kill" in struck, 130: "stop" in struck, 3: has_twin, 0: True}
        is_expected = expected.get(status, False) or status in process.may_end
        self.require(is_expected, f"{name} exited with code {status}: {process.output[-1500:]}")

        # A process that finishes or is stopped reports this in its last heartbeat and has saved its
        # last round. This need not hold if it is stopped in an outage or by a second signal, or
        # while an older process with the same name still writes heartbeats.
        files = self.dir.glob(f"nodes/{process.nodes[0]}/checkpoints/round_??????.safetensors")
        self.saved[name] = max(map(round_of, files), default=-1) + 1
        is_hasty = {"error", "outage"} & struck or process.struck.count("stop") > 1
        is_last = all(each.name != name for each in self.world.running)
        has_registered = process in self.signs and self.newest[name] is process
        if has_registered and is_last and (status == 0 or status == 130 and not is_hasty):
            for node in process.nodes:
                heartbeat = json.loads((self.dir / f"nodes/{node}/heartbeat.json").read_bytes())
                is_right = heartbeat["state"] == ("stopped" if status else "done")
                self.require(is_right, f"{node} ends with the heartbeat {heartbeat}")
            if self.num_updates[process]:
                t = self.entered[process][0]
                self.require(self.saved[name] == t + 1, f"S5: {name} has not saved round {t}")
        self.num_updates[process] = 0
        self.signs.pop(process, None)

    def check_what_is_left(self) -> None:
        finished = [process for process in self.world.processes if process.status == 0]
        for path, data in self.published.items():
            is_there = path in self.removed or Path(path).read_bytes() == data
            self.require(is_there, f"F1: {path} has changed")
        for path in self.planted:
            is_there = path.exists() and path.read_text() == "mine"
            self.require(is_there, f"F5: {path} is gone")
        hidden = {*self.world.drive.rglob(".*")} - self.planted
        owners = {self.writers[str(path)] for path in hidden}
        # A process that finds a finished experiment does not join, so it deletes nothing.
        joined = [each for each in finished if "already finished" not in each.output]
        lone = {each.name for each in joined if len(self.namesakes(each)) == 1}
        self.require(not owners & lone, f"F3: unfinished files: {hidden}")
        if self.swarm["WARM_START_STEPS"]:
            files = os.listdir(self.world.drive / "warmstart")
            self.require(len(files) == 1, f"L6: not exactly one warm start: {files}")
        for process in finished:
            for node in process.nodes if process.name != "coordinator" else ():
                self.check_node(process, node)
        self.check_pace()

    def check_node(self, process, node: str) -> None:
        """Check a node that has finished the last round."""
        swarm, struck = self.swarm, {*process.struck}
        last = swarm["MAX_ROUNDS"] - 1
        twins, worked = self.namesakes(process), self.rounds(node)
        self.require(worked and worked[-1] == last, f"S1: {node} finished only the rounds {worked}")

        # Each reward counts once. (A newer process does not know the rewards that an older process
        # with the same name submits later.)
        rows = sorted(self.rows(node), key=lambda row: (row["round"], row["stage"]))
        rewards = self.files[node, "rewards"]
        paid = sum(row["reward"] or 0.0 for row in rewards.values())
        total = rows[-1]["total_reward"]
        is_right = abs(total - paid) < 1e-6 or (len(twins) > 1 and total < paid)
        self.require(is_right, f"F3: {node} has a total reward of {total}, not {paid}")

        # Each stage has a row in the log. (For an older process with the same name, see above.)
        stages = {(row["round"], row["stage"]) for row in rows}
        is_right = stages == rewards.keys() or len(twins) > 1
        self.require(is_right, f"F3: {node} has rows {stages}, but rewards {rewards.keys()}")
        is_once = len(rows) == len(stages) or "kill" in struck or len(twins) > 1
        self.require(is_once, f"F2: {node} has a row twice")

        # Missed rounds are logged, and so are the start and the end of each outage.
        events = self.rows(process.nodes[0], "training_events")
        numbers = [{*map(int, re.findall(r"\b\d+\b", row["text"]))} for row in events]
        missed = {*range(last)} - {*worked}
        if not self.is_alone and "kill" not in struck:
            first = [t for t in missed if t - 1 not in missed]
            is_named = all(any(t in each for each in numbers) for t in first)
            self.require(is_named, f"S2: {node} has missed {missed}, but logged {events}")
        kinds = [row["event"] for row in events if row["event"].startswith("outage")]
        is_right = kinds == ["outage", "outage over"] * (len(kinds) // 2)
        self.require(is_right or not {"kill", "stop", "twin"}.isdisjoint(struck), f"F2: {kinds}")

        # Retention has deleted or archived all old rollouts, and no others.
        archived = sorted(map(round_of, self.world.drive.glob(f"archives/default/{node}/*")))
        there = (self.dir / f"nodes/{node}/rollouts").iterdir()
        there = sorted(map(round_of, {*there} - self.planted))
        everything = sorted(round_ for round_, _ in self.files[node, "rollouts"])
        oldest = self.oldest_kept(last) if swarm["ROLLOUT_CLEANUP_ENABLED"] else 0
        if len(twins) > 1:  # the older process may publish its last round after retention
            there = [t for t in there if t >= oldest]
        kept = [t for t in everything if t >= oldest]
        old = [t for t in everything if t < oldest and swarm["ROLLOUT_ARCHIVE_OLD"]]
        found = f"F5: {node} kept {there} and archived {archived}"
        self.require((there, archived) == (kept, old), found)

        # The newest checkpoint and the model exist.
        folder = self.dir / f"nodes/{node}"
        if node == process.nodes[0]:
            saved = sorted(map(round_of, (folder / "checkpoints").iterdir()))
            self.require(saved[-1] == last, f"F3: checkpoints {saved}")
            self.require(len(saved) <= 1 + len(process.statuses), f"F5: checkpoints {saved}")
        self.require((folder / "model/model.safetensors").exists(), f"U8: {node}")

    def results(self) -> dict:
        """Return the results that a lone process reproduces after a fault.

        They are the published files, without times, and each node's weights and moments.
        """
        found = dict(self.last)
        for at, files in self.files.items():
            for stage, row in files.items():
                names = [name for name in row if not re.search("seconds|time", name)]
                found[at, stage] = {name: row[name] for name in names}
        return found

    def check_pace(self) -> None:
        """Check that no worker waits too long, falls behind or polls the folder too often."""
        swarm, everybody = self.swarm, self.world.processes
        workers = [process for process in everybody if process.name != "coordinator"]
        troubled = {kind for process in everybody for kind in process.struck}
        if "outage" in troubled or self.world.delays != [0.0]:
            return
        num_nodes = sum(len(process.nodes) for process in workers)
        slowest = max(2 * process.step_seconds * len(process.nodes) for process in everybody)
        patience = swarm["FETCH_TIMEOUT_SECONDS"]
        is_led = len(workers) < len(everybody)
        if is_led and swarm["ROUND_ADVANCE"] != "completion":
            patience = min(patience, swarm["COORDINATOR_ROUND_INTERVAL"])
        for process in workers:
            if process.status != 0 or process.struck:
                continue
            waits = self.waits(process)
            limit = swarm["FETCH_TIMEOUT_SECONDS"] + 10
            self.require(max(waits.values()) < limit, f"S3: {process.name} waits {waits}")
            if not troubled:
                self.check_calls(process)

            # If the slowest node's rounds take less time than its peers wait, no worker misses a
            # round. (A late worker may miss rounds after its first.) If no fault was injected, all
            # external groups are from the current round.
            rounds = self.rounds(process.nodes[0])
            share = 0.7 if is_led or rounds[0] == 0 else 0.6
            is_kept = swarm["MAX_STAGES"] * slowest < share * patience and num_nodes <= 10
            if is_kept and swarm["NUM_TRANSPLANT_TREES"]:
                missed = {*range(rounds[:2][-1], rounds[-1])} - {*rounds}
                self.require(not missed, f"S1: {process.name} has missed {missed} of {rounds}")
                if not troubled and all(0 in self.rounds(each.nodes[0]) for each in workers):
                    self.check_ages(process, num_nodes)

    def check_ages(self, process, num_nodes: int) -> None:
        """Check that, from round 1 on, external groups are from the current round if possible."""
        swarm = self.swarm
        wanted = min(swarm["NUM_TRANSPLANT_TREES"], swarm["NUM_TRAIN_SAMPLES"] * (num_nodes - 1))
        if swarm["EXTERNAL_FILTER"] or swarm["ROLLOUT_PUBLISH_FREQUENCY"] == "round":
            return
        for row in itertools.chain(*map(self.rows, process.nodes)):
            is_right = row["round"] == 0 or row["external_ages"].count(0) == wanted
            self.require(is_right, f"S1: {process.name}, {row['round']}: {row['external_ages']}")

    def check_calls(self, process) -> None:
        """Check the number of a worker's calls on the folder."""
        num_nodes, began, ended = len(process.nodes), process.began_at, process.ended_at
        rounds = len(self.rounds(process.nodes[0]))
        stages = rounds * self.swarm["MAX_STAGES"] * num_nodes
        read, asked, looks, own = Counter(), 0, 0, 0
        for (name, path), number in process.calls.items():
            is_own = any(f"/nodes/{node}/" in path for node in process.nodes)
            if not is_own and (file := re.search(STAGE_FILE, path)):
                is_once = number <= 1 or path not in self.published or path in self.removed
                self.require(is_once, f"S3: {path} is read {number} times")
                read[file[3], file[4]] += number > 0
            elif not is_own and path.endswith("/heartbeat.json"):
                asked += number
            elif path.endswith("/board"):
                looks += number * (name == "listdir")
            else:
                own += number

        # Count the pauses that are allowed. Each lasts a tenth of the time since the last change of
        # the board, but at least 20 ms and at most 2 s.
        pauses, moves = 0, [t for t in self.moves if began < t < ended]
        for begin, end in itertools.pairwise([began, *moves, ended]):
            waited = 0.0
            while waited < end - begin:
                waited += max(0.02, min(2.0, waited / 10))
                pauses += 1

        # A worker polls the board after each pause, when it enters a round, before it draws groups
        # and before it submits a reward. After each poll, it may read a heartbeat, or all
        # heartbeats until NUM_WORKERS workers are alive. In a round, it reads the files of
        # FETCH_MAX_PEERS peers. In a stage, it writes log rows and two files, each with a check for
        # an older file, a temporary name and a marker. It also writes heartbeats, checkpoints, and
        # files at its start and end.
        num_peers = self.swarm["FETCH_MAX_PEERS"]
        start, of_node, of_stage, of_second = CALLS
        of_node += (ended - began) * of_second
        limits = {
            "pauses": (process.num_pauses, pauses),
            "looks": (looks, 10 + 3 * (num_nodes + stages) + process.num_pauses),
            "heartbeats": (asked, looks + num_peers + 3 * self.swarm["NUM_WORKERS"]),
            "files": (max(read.values(), default=0), 2 * num_nodes * num_peers),
            "own": (own, start + of_node * num_nodes + of_stage * (stages + rounds)),
        }
        for name, (number, limit) in limits.items():
            self.require(number <= limit, f"S3: {process.name} {name}: {number}, more than {limit}")

    # -------- An untrusted peer -------------------------------------------------------------------

    def stranger(self, process) -> None:
        """Act as an untrusted peer that knows the protocol.

        It registers as "evil" and publishes groups, some of which are valid. It claims one round
        more than it has published, and plants files next to a node's own files. Damaged files are
        tested in test_untrusted.py.
        """
        board, folder = self.dir / "board", self.dir / "nodes/evil/rollouts"
        if not board.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        pick, number, t = self.world.rng.choice, next(self.numbers), max(self.opened(), 0)
        session = f"{int(self.world.now * 1000):013d}-{number:08x}"
        heartbeat = {"time": self.world.now, "session": session, "state": "running"}
        for path in (board / f"session.evil.{session}", folder.parent / "heartbeat.json"):
            path.write_text(pick([json.dumps(heartbeat), "[" * 9000, "\x1b]0;x\x07"]))

        groups = {}
        for i in range(8):
            kind, start = pick([("sound", 10**9), ("held-out", 2**52), ("altered", 10**10)])
            id = TASK, start + 100 * number + i
            if kind == "sound":
                self.groups[id] = ("evil", t, 0)
            self.bad |= {id} - self.groups.keys()
            texts = self.responses[id] = [f"<answer>{pick('1234')}</answer>" for _ in range(3)]
            made = [{"response": text, "finished": True, "reward": 0.1} for text in texts]
            prompt = question(*id)[0] + "x" * (kind == "altered")
            group = {"task": TASK, "seed": id[1], "prompt": prompt, "answer": "1"}
            groups[str(i)] = group | {"completions": made}
        file = dict(format=1, peer_id="evil", round=t, stage=0, timestamp=1e9, rollouts=groups)
        path = folder / f"round_{t:06d}.stage_0.json"
        if not path.exists():
            path.write_text(json.dumps(file))
        for name in (f"evil.{t:06d}.0", f"evil.{t + 1:06d}.0", "w0.0000000001.0"):
            (board / f"rollouts.{name}").touch()
        if process.name != "coordinator":
            self.plant(process.nodes[0], BESIDE)

    def plant(self, node: str, names) -> None:
        """Next to a node's own files, plant files that must not be deleted."""
        for name in names:
            path = self.dir / f"nodes/{node}" / name.replace("NODE", node)
            if path.parent.exists():
                path.write_text("mine")
                self.planted.add(path)


DIGITS = "0123456789abcdef"
BESIDE = (
    f"rollouts/.new-NODE-b-{DIGITS}", f"rollouts/.new-b-{DIGITS}", "rollouts/notes",
    "rollouts/round_000000.stage_0.txt",
)  # fmt: skip
QUIET = {}  # a schedule without faults -> its results


def fails(schedule: dict) -> str:
    """Return why a schedule fails, or "" if it does not.

    A lone process must reproduce the results of a run without faults.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        try:
            oracle = run_schedule(schedule, Path(folder, "drive"))
            if oracle.is_alone:
                quiet = schedule | {"faults": []}
                if str(quiet) not in QUIET:
                    QUIET[str(quiet)] = run_schedule(quiet, Path(folder, "quiet")).results()
                expected, found = QUIET[str(quiet)], oracle.results()
                differ = [key for key in expected | found if expected.get(key) != found.get(key)]
                assert not differ, f"F3, L5: {differ} differ from the run without faults"
        except AssertionError as error:
            return str(error) or "assert"
    return ""


def shrink(schedule: dict) -> dict:
    """Remove the faults and processes without which a schedule still fails."""
    for name in ("faults", "processes"):
        for each in [*schedule[name]]:
            smaller = schedule | {name: [other for other in schedule[name] if other is not each]}
            if smaller["processes"] and fails(smaller):
                schedule = smaller
    return schedule


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random(seed):
    schedule = random_schedule(seed)
    if fails(schedule):
        schedule = shrink(schedule)
        pytest.fail(f"{fails(schedule)}\nto reproduce it: fails({schedule})", pytrace=False)


# -------- Scenarios that random schedules hardly ever reach ---------------------------------------


@pytest.mark.parametrize("num_nodes, every, kind", [
    (1, EVERY, ("kill", 0.1)), (2, 6 * EVERY, ("kill", 0.1)), (1, 4 * EVERY, ("error", "after")),
    (2, 8 * EVERY, ("error", "before")), (1, 6 * EVERY, ("stop", 0.1)),
])  # fmt: skip
def test_F2_F3_S5_at_every_call_of_a_lone_process(num_nodes, every, kind):
    """The calls belong to startup, warm start, rounds, checkpoints, retention and export."""
    swarm = BASE | {"MAX_ROUNDS": 4, "CHECKPOINT_INTERVAL": 1, "ROLLOUT_MAX_AGE": 1,
                    "WARM_START_STEPS": 3, "NUM_TRANSPLANT_TREES": 4}  # fmt: skip
    swarm |= {"ROLLOUT_CLEANUP_ENABLED": True, "ROLLOUT_ARCHIVE_OLD": num_nodes == 2}
    processes = [("w0", 0, 0.3, 0, {"LOCAL_NODES": num_nodes})]
    schedule = dict(seed=0, swarm=swarm, delays=[0.0], processes=processes, faults=[])
    assert not fails(schedule)
    for call in range(1, 240 * num_nodes, every):
        why = fails(schedule | {"faults": [("w0", call, *kind)]})
        assert not why, f"call {call}: {why}"


@pytest.fixture
def scene():
    """Provide the oracle of an empty world, in which a scenario starts processes itself."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        oracle = Oracle(World(Path(folder, "drive")), {**BASE})
        with oracle.world.patched():
            yield oracle


def finish(scene, name="n", status=0, words="", **settings):
    """Run a process to its end. It must print `words` and end with this exit code.

    If the exit code is 2, the folder must be unchanged.
    """
    before = scene.contents()
    process = scene.start(name, **settings)
    process.may_end = {status}
    scene.run(lambda: process.status is not None)
    assert process.status == status and words in process.output, process.output
    assert status != 2 or scene.contents() == before
    return process


@pytest.mark.parametrize("names, behind", [
    ("w0 w1 w2", "w0"), ("coordinator w0 w1 w2", "w0"), ("coordinator w0 w1 w2", "coordinator"),
])  # fmt: skip
def test_S1_workers_keep_together_with_or_without_a_coordinator(scene, names, behind):
    """Even if a clock is 200 s behind, workers keep together, and no process waits an interval."""
    scene.swarm |= {"COORDINATOR_ROUND_INTERVAL": 600, "STALE_AFTER_SECONDS": 300, "NUM_WORKERS": 3}
    for name in names.split():
        scene.start(name, clock_error=-200.0 * (name == behind))
    scene.run(seconds=60)
    for process in scene.world.processes:
        assert process.name == "coordinator" or scene.rounds(process.name) == [*range(6)]
    scene.check()


@pytest.mark.parametrize("advance, slow_step, seconds", [
    ("time", 1.0, 10), ("completion", 1.0, 2), ("hybrid", 1.0, 2),
    ("time", 15.0, 10), ("completion", 15.0, 30), ("hybrid", 15.0, 26),
])  # fmt: skip
def test_S1_a_round_is_over_by_time_by_completion_or_by_either(scene, advance, slow_step, seconds):
    """With a slow step of 15 s, the fast worker waits for the slow worker's rollouts and submits
    after 16 s. With `hybrid`, the interval of 10 s starts then."""
    scene.swarm |= {"ROUND_ADVANCE": advance, "COORDINATOR_ROUND_INTERVAL": 10}
    *_, slow = [scene.start(name, 1.0) for name in ("coordinator", "fast", "slow")]
    for round_ in (2, 3):
        began = scene.world.now
        scene.run(lambda: scene.opened("coordinator") == round_)  # noqa: B023
        slow.step_seconds = slow_step
    assert seconds - 1 < scene.world.now - began < seconds + 2


@pytest.mark.parametrize("step", [100.0, 200.0])
def test_S1_slow_rounds_are_all_trained_with_external_groups_of_the_same_round(scene, step):
    """All settings that matter have their defaults. A round takes two steps and many intervals.
    One worker's step takes ten seconds longer, which is less than its peer waits."""
    names = ("COORDINATOR_ROUND_INTERVAL", "FETCH_TIMEOUT_SECONDS", "STALE_AFTER_SECONDS")
    scene.swarm |= {name: sapo.TABLE[name].default for name in (*names, "ROUND_ADVANCE")}
    scene.swarm |= {"MAX_ROUNDS": 12, "CHECKPOINT_INTERVAL": 10}
    leader, *workers = [scene.start(name, step) for name in ("coordinator", "w0", "w1")]
    workers[1].step_seconds += 10.0
    scene.run(seconds=30 * 2 * step)
    for process in workers:
        ages = [row["external_ages"] for row in scene.rows(process.name)]
        assert ages == [[0, 0]] * 12, "a round was missed, or it had older external groups"
        assert "no peer published" not in process.output
    assert leader.status == 0 and "reward" in leader.output.split("11/12")[1]
    scene.check()


@pytest.mark.parametrize(
    "advance, is_over", [("time", True), ("completion", False), ("hybrid", True)]
)
def test_S1_a_worker_that_lives_but_never_submits_delays_one_round(scene, advance, is_over):
    """The stuck worker writes heartbeats, but its step takes days."""
    scene.swarm |= {"MAX_ROUNDS": 10**4, "ROUND_ADVANCE": advance, "NUM_TRANSPLANT_TREES": 0}
    *_, stuck = [scene.start(name, 3.0) for name in ("coordinator", "well", "stuck")]
    scene.run(lambda: scene.opened() == 3)
    stuck.step_seconds = 1e6
    scene.wait(300)
    assert (scene.opened() > 5) == is_over


@pytest.mark.parametrize("names", [("w0",), ("w0", "w1")])
def test_S1_S2_the_coordinator_ends_even_if_the_last_rewards_markers_are_lost(scene, names):
    """The workers have ended, so they do not post the lost markers again."""
    folder = str(scene.dir / "board")
    for name in names:  # on its way to the coordinator, a change of this name is lost
        scene.world.shows.setdefault(folder, []).append((9e9, name, f"rewards.{name}.000005.0", 1))
    leader, *_ = [scene.start(name) for name in ("coordinator", *names)]
    scene.run(seconds=100)
    assert leader.status == 0 and scene.rounds(names[0]) == [*range(6)]
    scene.check()


def test_S1_a_node_without_external_groups_logs_once_which_setting_helps(scene):
    """With `time` and an interval of 5 s, the peer's rollouts arrive after their round is over."""
    scene.swarm |= {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 5, "MAX_ROUNDS": 40}
    scene.swarm |= {"ROLLOUT_MAX_AGE": 0}
    for name, step in (("coordinator", 1.0), ("fast", 1.0), ("slow", 40.0)):
        scene.start(name, step)
    scene.run()
    events = [row["text"] for row in scene.rows("fast", "training_events")]
    (text,) = [text for text in events if "no peer published in time in ten rounds" in text]
    assert "FETCH_TIMEOUT_SECONDS" in text and "ROUND_ADVANCE" in text


def test_S1_F6_the_coordinator_says_how_to_join_holds_round_0_and_waits_for_the_last(scene):
    scene.swarm |= {"ROUND_ADVANCE": "time", "COORDINATOR_ROUND_INTERVAL": 5, "MAX_ROUNDS": 4}
    leader = scene.start("coordinator")
    scene.wait(20)
    assert not scene.world.drive.exists()
    assert {"sapo.py", "MAX_ROUNDS=4", f"TASKS={TASK}"} <= {*leader.output.split()}
    worker = scene.start("n", 10.0)
    scene.run(lambda: leader.status is not None)
    assert leader.status == 0 and scene.rounds("n")[0] == 0 and scene.rounds("n")[-1] == 3
    scene.run()
    assert worker.status == 0


def test_S1_the_coordinator_waits_at_each_start_for_all_that_are_expected(scene):
    scene.swarm |= {"MAX_ROUNDS": 10**4, "NUM_WORKERS": 2, "COORDINATOR_ROUND_INTERVAL": 3600}
    scene.swarm |= {"CHECKPOINT_INTERVAL": 100}  # a stopped process writes a checkpoint anyway
    leader, first = scene.start("coordinator"), scene.start("first")
    scene.wait(60)
    assert scene.opened() == 0
    second = scene.start("second")
    scene.run(lambda: scene.opened() > 3, seconds=60)
    for process in (leader, first, second):
        process.strike("stop")
    scene.run()

    opened = scene.opened()
    leader.start(), first.start()
    scene.wait(60)
    assert scene.opened() == opened
    second.start()
    scene.run(lambda: scene.opened() > opened + 3, seconds=60)


def test_S1_S2_a_dead_coordinator_is_replaced_and_takes_over_again(scene):
    scene.swarm |= {"MAX_ROUNDS": 10**4, "ROUND_ADVANCE": "completion"}
    leader, *_ = [scene.start(name) for name in ("coordinator", "w0", "w1")]
    scene.run(lambda: scene.opened() >= 4)
    leader.strike("kill")
    killed_at, before = scene.world.now, scene.opened()
    scene.run(lambda: scene.opened() > before + 1)
    assert 0.8 * 40 < scene.world.now - killed_at < 1.2 * 40, "not after STALE_AFTER_SECONDS"
    scene.run(lambda: scene.opened() > before + 3)
    leader.start()
    scene.run(lambda: scene.opened("coordinator") == scene.opened() > before + 9, seconds=60)


@pytest.mark.parametrize("is_led", [False, True])
def test_S1_S2_S3_a_slow_node_among_fast_ones_costs_its_timeout_and_is_alive(scene, is_led):
    """In each round, the slow node samples for 50 s and trains for 50 s."""
    scene.swarm |= {"MAX_ROUNDS": 10**4, "COORDINATOR_ROUND_INTERVAL": 5}
    fast, *_ = [scene.start(name, 3.0) for name in ("a", "b", "coordinator")[: 2 + is_led]]
    scene.start("snail", 50.0)
    scene.run(lambda: len(scene.rounds("snail")) > 2)
    waits = scene.waits(fast).values()
    assert max(waits) < 34 and len(waits) > 20
    assert sum(wait > 5 for wait in waits) <= len(scene.rounds("snail", "rollouts")) + 2


@pytest.mark.parametrize("is_led, num_external", [(False, 2), (True, 0)])
def test_S1_a_late_and_slow_worker_misses_no_round_after_its_first(scene, is_led, num_external):
    """Workers wait for the late worker's rollouts, and a coordinator waits for its rewards."""
    scene.swarm |= {"MAX_ROUNDS": 15, "NUM_TRANSPLANT_TREES": num_external}
    for name in ("a", "b", "coordinator")[: 2 + is_led]:
        scene.start(name, 1.0)
    scene.run(lambda: scene.opened() > 2)
    scene.start("late", 4.0)
    scene.run()
    rounds = scene.rounds("late")
    assert rounds == [*range(rounds[0], 15)] and rounds[0] < 10


def test_S2_U3_a_worker_that_joined_too_late_for_any_round_reports_this_at_its_end(scene):
    """While the late worker creates its warm start, the swarm passes that worker's last round."""
    scene.swarm |= {"MAX_ROUNDS": 10**4}
    scene.start("early", 1.0)
    scene.run(lambda: scene.opened() > 0)
    late = scene.start("late", 20.0, MAX_ROUNDS=5, WARM_START_STEPS=3)
    scene.run(lambda: late.status is not None)
    (text,) = [
        row["text"] for row in scene.rows("late", "training_events") if row["event"] == "end"
    ]
    assert late.status == 0 and not scene.rounds("late"), late.output
    assert text.startswith("no rewards") and "trained 0 of 5 rounds" in text


def test_S2_a_suspended_worker_delays_no_peer_and_continues_with_the_open_round(scene):
    scene.swarm |= {"MAX_ROUNDS": 10**4, "FETCH_TIMEOUT_SECONDS": 5}
    away, other, _ = [scene.start(name, 3.0) for name in ("w0", "w1", "w2")]
    scene.run(lambda: scene.opened() > 3)
    away.faults[away.num_calls + 1] = ("suspend", 200)
    scene.wait(100)
    before = scene.opened()
    scene.wait(60)
    assert scene.opened() > before + 7
    scene.wait(100)
    assert scene.rounds("w0")[-3:] == [*range(scene.rounds("w0")[-1] - 2, scene.opened() + 1)][:3]
    assert [row["external_ages"] for row in scene.rows("w1")[-3:]] == [[0, 0]] * 3


@pytest.mark.parametrize("lies, frequency", [(False, "stage"), (True, "stage"), (True, "round")])
def test_S3_X3_the_dead_cost_nothing_and_one_that_only_claims_to_publish_its_timeout(
    scene, lies, frequency
):
    """A process waits for a lying peer once per round, in total over its stages and nodes."""
    scene.swarm |= {"FETCH_TIMEOUT_SECONDS": 20, "MAX_STAGES": 2}
    scene.swarm |= {"MAX_ROUNDS": 4, "ROLLOUT_PUBLISH_FREQUENCY": frequency}
    finish(scene, "dead", MAX_ROUNDS=1)  # it is in step in round 1
    process = scene.start("n", LOCAL_NODES=2)
    session = f"session.liar.{int(scene.world.now * 1000) + 5000}-abcdef01"
    for name in ("rollouts.liar.000999.0", "rewards.liar.000999.0", session) if lies else ():
        (scene.dir / "board" / name).touch()
    scene.run()
    waits = scene.waits(process)
    assert process.status == 0 and max(waits.values()) < (24 if lies else 5), waits


@pytest.mark.parametrize("name", ["n", "coordinator"])
def test_S4_of_two_of_one_name_the_older_ends_with_status_3(scene, name):
    scene.swarm |= {"MAX_ROUNDS": 10**4}
    scene.start("other")
    older = scene.start(name)
    scene.run(lambda: scene.opened(name) > 2)
    older.strike("twin", 0.3)
    scene.run(lambda: older.status == 3)
    newer, before = scene.world.processes[-1], scene.opened(name)
    scene.run(lambda: scene.opened(name) > before + 2)
    assert newer.status is None

    # A process that has no rounds left does not supersede the running process.
    if name == "n":
        finish(scene, "n", 0, "finished", MAX_ROUNDS=2)
        scene.run(lambda: scene.opened(name) > before + 6)
        assert newer.status is None


def test_F1_L6_F6_F7_of_nodes_that_start_together_one_begins_and_all_have_its_settings(scene):
    """The later nodes leave NUM_TRAIN_SAMPLES unset, so they inherit it."""
    swarm = scene.swarm | {"WARM_START_STEPS": 3, "MAX_ROUNDS": 3, "NUM_TRAIN_SAMPLES": 8}
    for delay in (0, 0.05, 0.3, 0.9, 1.1, 2):
        scene = Oracle(World(scene.world.drive.with_name(f"after_{delay}")), swarm)
        with scene.world.patched():
            first = scene.start("anna", SEED=77, NUM_TRAIN_SAMPLES=3)
            first.may_end = {0, 2}
            scene.wait(delay)
            others = [scene.start(name, NUM_TRAIN_SAMPLES="") for name in ("ben", "carl")]
            others[0].may_end = others[1].may_end = {0, 2}
            scene.run()
            config = json.loads((scene.dir / "config.json").read_text())
            assert first.status == (0 if config["SEED"] == 77 else 2), "a different SEED"
            for other in others:
                if other.status == 2:  # another node created it first, with different settings
                    assert "restart this node" in other.output
                    other.start()
                    scene.run()
                assert other.status == 0, delay
                groups = {row["groups"] for row in scene.rows(other.name)}
                assert groups == {config["NUM_TRAIN_SAMPLES"]}
            assert len(os.listdir(scene.world.drive / "warmstart")) == 1


@pytest.mark.parametrize("fault", [("kill",), ("error", "after")])
def test_F6_a_crash_or_error_while_an_experiment_is_created_leaves_a_usable_folder(
    scene, monkeypatch, fault
):
    """The experiment is complete as soon as it is visible.

    After a crash, a node's next process deletes the unfinished folder.
    """
    monkeypatch.setattr(world, "ERRORS", (errno.EIO, errno.ETIMEDOUT, errno.EEXIST))
    for call in range(9, 20):
        scene = Oracle(World(scene.world.drive.with_name(f"call_{call}"), call), scene.swarm)
        with scene.world.patched():
            first = scene.start("first", MAX_ROUNDS=1)
            first.faults = {call: fault}
            scene.run(lambda: first.status is not None)  # noqa: B023
            assert first.status == (0 if fault[0] == "error" else -9), (call, first.output)
            names = [path.name for path in scene.world.drive.glob("experiments/[!.]*")]
            assert names == sapo.list_experiments(scene.world.drive), call
            finish(scene, "second", MAX_ROUNDS=2)
            if first.status != 0:
                finish(scene, "first", MAX_ROUNDS=3)
            assert os.listdir(scene.world.drive / "experiments") == ["default"], call


def test_F3_rewards_submitted_before_a_crash_are_counted_and_logged(scene):
    """While the node is down, the swarm opens further rounds, which the resumed node skips."""
    scene.swarm |= {"MAX_ROUNDS": 12, "CHECKPOINT_INTERVAL": 3}
    scene.start("other")
    process = scene.start("n")

    def kill_in_round_4(process, name, path):
        if "board/rewards.n." in path and 4 in scene.rounds("n"):
            process.strike("kill")

    scene.world.refuse = kill_in_round_4
    scene.run(lambda: process.status == -9)
    scene.world.refuse = lambda *_: None
    scene.run(lambda: scene.opened() > 6)
    process.start()
    scene.run()
    scene.check()


def test_F1_F3_a_stage_that_samples_differently_after_a_crash_trains_on_what_it_published(
    scene, monkeypatch
):
    """A GPU may generate different completions, but peers have read the older completions."""
    process = scene.world.process("n", **scene.swarm)
    fake, trained = grpo.sample_in_batches, []

    def sample(model, codec, prompts, num_generations, config, seed, limit):
        seed += len(process.statuses)
        return fake(model, codec, prompts, num_generations, config, seed, limit)

    def train(process, before, after, groups):
        trained.append((scene.entered[process][0], groups))

    def kill_in_round_2(process, name, path):
        if path.endswith("board/rollouts.n.000001.0") and not process.statuses:
            process.strike("kill")

    monkeypatch.setattr(grpo, "sample_in_batches", sample)
    scene.world.trained, scene.world.refuse = train, kill_in_round_2
    process.start()
    scene.run()
    assert process.status == -9
    process.start()
    scene.run()
    assert process.status == 0 and [t for t, _ in trained] == [*range(6)]
    for t, groups in trained:
        file = scene.files["n", "rollouts"][t, 0]["rollouts"].values()
        published = {}
        for group in file:
            rewards = [completion["reward"] for completion in group["completions"]]
            published[TASK, group["seed"]] = rewards
        assert {id: rewards for id, rewards, _ in groups} == published
        mean = sum(map(sum, published.values())) / sum(map(len, published.values()))
        assert scene.files["n", "rewards"][t, 0]["reward"] == pytest.approx(mean)


def test_F3_a_checkpoint_that_an_older_process_saves_while_a_newer_one_starts_counts(scene):
    scene.swarm |= {"MAX_ROUNDS": 10**4, "CHECKPOINT_INTERVAL": 1}
    older = scene.start("n", 1.0)
    scene.run(lambda: scene.opened() > 3)
    newer = scene.world.process("n", 1.0, **scene.swarm)
    newer.struck.append("twin")

    def suspend_before_joining(process, name, path):
        if process is newer and "nodes/n/.new-" in path and newer.struck == ["twin"]:
            newer.strike("suspend", 20)

    scene.world.refuse = suspend_before_joining
    newer.start()
    scene.run(lambda: older.status == 3)
    saved = max(map(round_of, (scene.dir / "nodes/n/checkpoints").glob("round_*")))
    scene.run(lambda: scene.num_updates[newer] > 0)
    resumed = re.findall(r"from the checkpoint after round (\d+)", newer.output)
    assert int(resumed[0]) < int(resumed[-1]) == saved, resumed


def test_F4_a_resumed_node_posts_the_checkpoint_marker_that_a_crash_prevented(scene):
    scene.swarm |= {"CHECKPOINT_INTERVAL": 4}
    process = scene.start("n", MAX_ROUNDS=5)
    scene.world.refuse = lambda process, name, path: (
        name == "replace" and "/checkpoints/.new-" in path and process.strike("kill")
    )
    scene.run()
    scene.world.refuse = lambda *_: None
    assert process.status == -9 and not [*scene.dir.glob("board/checkpoint.*")]
    process.start()
    scene.run(lambda: process.output.count("start:") == 2)
    process.strike("kill")
    scene.run()
    assert [path.name for path in scene.dir.glob("board/checkpoint.*")] == ["checkpoint.n.000003.0"]
    for path in scene.dir.glob("nodes/n/checkpoints/*"):
        path.unlink()
    finish(scene, "n", 2, "checkpoint")


@pytest.mark.parametrize("name", ["n", "prepare"])
def test_F3_a_plot_that_a_crash_interrupted_leaves_no_file(scene, name):
    """The next `prepare` deletes a reader's leftover. Files of other nodes are kept."""
    finish(scene, "n", MAX_ROUNDS=1)
    reports = scene.world.drive / "reports"
    for owner in ("n", "prepare", "n-b"):
        (reports / f".new-{owner}-{DIGITS}").write_text("half of a plot")
    finish(scene, "n", MAX_ROUNDS=2, NODE_ROLE="prepare" if name == "prepare" else "worker")
    left = {f".new-{owner}-{DIGITS}" for owner in ("n", "prepare", "n-b") if owner != name}
    assert {*os.listdir(reports)} == left


def with_text(path: Path, text: str) -> None:
    """Replace the text that the program stored in a safetensors file, but keep the tensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    head["__metadata__"] = dict.fromkeys(head["__metadata__"], text)
    head = json.dumps(head).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[start:])


DAMAGES = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "odd": lambda path: path.write_bytes(b"\xff" * 9 + path.read_bytes()[9:]),
    "gone": Path.unlink,
    "no state": lambda path: with_text(path, "{}"),
    "a list": lambda path: with_text(path, "[]"),
    "odd state": lambda path: with_text(path, '{"round": 3, "nodes": {"n": {"trained": 5}}}'),
    "of another user": lambda path: None,  # opening it fails; see `closed`, below
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_F4_the_newest_readable_checkpoint_counts_and_without_one_a_start_is_refused(scene, damage):
    finish(scene, MAX_ROUNDS=4)
    older, newer = sorted((scene.dir / "nodes/n/checkpoints").iterdir())
    sound, closed = older.read_bytes(), {str(older), str(newer)} if "user" in damage else set()
    scene.world.refuse = lambda _, name, path: name == "open" and path in closed and errno.EACCES
    for path in (older, newer):
        DAMAGES[damage](path)
    finish(scene, "n", 2, "checkpoint")
    older.write_bytes(sound)
    closed.discard(str(older))
    scene.saved["n"] = round_of(older) + 1
    finish(scene)


# The call before which the folder becomes unavailable, and whether the process is then stopped. If
# the number is negative, the process creates the experiment. Otherwise, it joins.
MOMENTS = [(-3, False), (-6, False), (4, False), (30, False), (120, True), (150, False)]


@pytest.mark.parametrize("moment, is_stopped", MOMENTS)
def test_F2_a_folder_that_is_unmounted_for_a_minute_is_not_created_again(scene, moment, is_stopped):
    world, unmounted = scene.world, scene.world.drive.with_name("unmounted")
    if moment > 0:
        finish(scene, "other", MAX_ROUNDS=1)
    world.drive.mkdir(exist_ok=True)
    process = scene.start("n")
    world.run(lambda: process.num_calls >= abs(moment))
    process.strike("outage", 0)  # so that the oracle expects an outage
    world.drive.rename(unmounted)
    world.run(lambda: world.now > process.began_at + 90)
    assert process.status is None and not world.drive.exists(), process.output
    if is_stopped:  # it cannot write a checkpoint, and logs this
        process.strike("stop")
        world.run()
        assert process.status == 130 and "without saving a checkpoint" in process.output
    unmounted.rename(world.drive)
    world.run()
    assert is_stopped or process.status == 0


@pytest.mark.parametrize("kind", ["checkpoints", "warmstart"])
def test_F2_a_temporary_error_on_a_file_that_a_node_needs_is_an_outage(scene, kind):
    """The node must not continue without its newest checkpoint, or with a second warm start."""
    scene.swarm |= {"WARM_START_STEPS": 3}
    finish(scene, "prepare", NODE_ROLE="prepare")
    if kind == "checkpoints":
        finish(scene, MAX_ROUNDS=4)
    path = str(max(scene.world.drive.rglob(f"{kind}/*.safetensors")))
    codes = [errno.EIO] * 3
    scene.world.refuse = lambda _, name, called: called == path and codes and codes.pop()
    process = scene.world.process("n", **scene.swarm)
    process.struck.append("outage")  # so that the oracle expects an outage
    process.start()
    scene.run()
    assert process.status == 0 and not codes and "outage" in process.output, process.output
    assert len(os.listdir(scene.world.drive / "warmstart")) == 1


def test_F2_a_peers_unreadable_file_is_skipped_and_read_again_in_a_later_round(scene):
    finish(scene, "peer", MAX_ROUNDS=1)
    codes = [errno.EIO] * 2
    path = str(scene.dir / "nodes/peer/rollouts/round_000000.stage_0.json")
    scene.world.refuse = lambda _, name, called: called == path and codes and codes.pop()
    process = scene.start("n", NUM_TRAIN_SAMPLES=1)
    process.strike("outage", 0)
    scene.run()
    found = [row["external_groups"] for row in scene.rows("n")]
    assert sum(found) == 1 and found[0] == 0 and "outage" not in process.output, found


def test_F5_U8_what_the_user_put_beside_a_nodes_files_stays_and_stops_nothing(scene):
    scene.swarm |= {"ROLLOUT_CLEANUP_ENABLED": True, "MAX_ROUNDS": 9, "ROLLOUT_MAX_AGE": 0}
    finish(scene, MAX_ROUNDS=3)
    folder, outside = scene.dir / "nodes/n", scene.world.drive / "outside"
    outside.write_text("mine")
    (folder / "rollouts/round_000001.stage_7.json").mkdir()
    (folder / "model/tokenizer.json").unlink()
    (folder / "model/tokenizer.json").symlink_to(outside)
    scene.plant("n", (
        *BESIDE, "rollouts/round_000001.stage_7.json/in", "rollouts/round_000000.stage_00.json", "rewards/round_1.stage_0.json",
        "checkpoints/round_000001.x", "checkpoints/round_00001.safetensors", "model/notes.md", "model/.hidden",
    ))  # fmt: skip
    finish(scene)
    assert scene.rounds("n") == [*range(9)] and outside.read_text() == "mine"
    assert all(path.read_text() == "mine" for path in scene.planted)
    assert not (folder / "model/tokenizer.json").is_symlink()


@pytest.mark.parametrize("words, settings", [
    ("a new experiment", {"EXPERIMENT_NAME": "other"}), ("resuming", {"MAX_ROUNDS": 7}),
    ("joining", {"NODE_ID": "late"}), ("already finished", {}),
    ("already finished", {"NODE_ROLE": "coordinator", "NODE_ID": ""}),
])  # fmt: skip
def test_F6_a_start_says_whether_it_is_new_joined_resumed_or_finished(scene, words, settings):
    finish(scene)
    before = {path: data for path, data in scene.contents().items() if "/nodes/n/" in path}
    if "EXPERIMENT_NAME" in settings:
        scene.world.trained = lambda *_: None  # the oracle knows only one experiment
    finish(scene, settings.get("NODE_ID") or "n", 0, words, **settings)
    after = scene.contents()
    assert "resuming" in words or all(after[path] == data for path, data in before.items())


@pytest.mark.parametrize("words, changes, settings", [
    ("SEED", {}, {"SEED": 7}), ("version", {"layout": 4}, {}), ("SEED", {"SEED": "7\x1b[2J"}, {}),
    ("MAX_ROUNDS", {}, {"NODE_ID": "late", "MAX_ROUNDS": 3}), ("NODE_ID", {}, {"NODE_ID": "", "MAX_ROUNDS": 6}),
])  # fmt: skip
def test_F6_a_node_with_different_settings_or_no_rounds_left_exits_and_writes_nothing(
    scene, words, changes, settings
):
    finish(scene)
    path = scene.dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (scene.dir / f"nodes/n/.new-n-{DIGITS}").write_text("half of a file")
    process = finish(scene, "n", 2, words, **{"MAX_ROUNDS": 8} | settings)
    assert process.output.replace("\n", "").isprintable()


@pytest.mark.parametrize("has_begun", [False, True])
def test_F6_a_model_that_cannot_be_loaded_leaves_nothing_behind(scene, monkeypatch, has_begun):
    if has_begun:
        finish(scene)
    monkeypatch.setattr(grpo, "load_model", REAL["load_model"])
    late = scene.start("late", MODEL_NAME="./no_such_model", MAX_ROUNDS=8)
    late.may_end = {2}
    before = [*scene.world.drive.rglob("*")]
    scene.run()
    assert late.status == 2 and "MODEL_NAME" in late.output
    assert before == [*scene.world.drive.rglob("*")]


@pytest.mark.parametrize("call", [1, 2, 4, 6, 8, 10])
def test_F3_what_a_killed_prepare_leaves_goes_when_it_is_started_again(scene, call):
    scene.swarm |= {"WARM_START_STEPS": 3}
    process = scene.start("p", NODE_ROLE="prepare")
    process.faults = {call: ("kill",)}
    scene.run()
    process.start()
    scene.run()
    names = os.listdir(scene.world.drive / "warmstart")
    assert process.status == 0 and len(names) == 1 and not names[0].startswith("."), names
    finish(scene, "n")
    assert names == os.listdir(scene.world.drive / "warmstart")


def test_U8_a_model_that_the_library_refuses_to_write_is_an_event(scene, monkeypatch):
    monkeypatch.setattr(grpo, "save_model", lambda *args: 1 / 0)
    finish(scene, "n", 0, "cannot be written")
    events = [row["event"] for row in scene.rows("n", "training_events")]
    assert "export" in events and len(scene.rounds("n")) == 6


def test_S3_a_round_of_many_nodes_costs_a_worker_hardly_more_calls_than_one_of_twelve(scene):
    """Print the number of calls per round of a worker and of the coordinator.

    They are counted in round 1, with calls of 2 ms, and averaged over the workers. The workers'
    steps take 20 to 40 s, so the board changes all the time while the fast workers wait. (If all
    steps took equally long, the calls would depend on how long the coordinator happens to sleep.)
    """
    of_workers = []
    for num_nodes in map(int, os.environ.get("NODES", "12 24").split()):
        world = World(scene.world.drive.with_name(f"of_{num_nodes}"))
        swarm = {"NUM_WORKERS": num_nodes, "MAX_ROUNDS": 3, "CHECKPOINT_INTERVAL": 100}
        oracle = Oracle(world, BASE | swarm)
        with world.patched():
            world.call_seconds = 0.002
            oracle.start("coordinator")
            for i in range(num_nodes):
                oracle.start(f"w{i}", 20.0 + 20.0 * i / (num_nodes - 1))
            world.run()
            oracle.check()
        costs = {p.name: calls[2] - calls[1] for p, calls in oracle.calls_at.items()}
        of_coordinator = costs.pop("coordinator")
        of_worker = sum(costs.values()) / num_nodes
        print(f"| {num_nodes} | {of_worker:.0f} | {of_coordinator:.0f} |", flush=True)
        of_workers += [of_worker] * (num_nodes > 11)  # from here on, some peers are not read
    assert all(calls < 1.1 * of_workers[0] for calls in of_workers)
