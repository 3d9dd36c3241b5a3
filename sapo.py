# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "transformers", "reasoning-gym"]
# ///
"""SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721): N nodes, each with its own model, learn by
GRPO on reasoning-gym questions and share decoded rollouts, plain text, through one shared folder.

`train` is the paper's Algorithm 1; read it first. Its six steps stand below it, in their order; then the
clock, the log, settings, checkpoints and roles. Configuration is environment variables only (class Config).
`python sapo.py` alone trains, NODE_ROLE=coordinator keeps a swarm in step.
"""

import contextlib
import copy
import difflib
import hashlib
import itertools
import json
import os
import platform
import random
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm

if "DriveStore" not in globals():  # pasted into one notebook cell, the three modules are there already
    from coordinator import Coordinator, Swarm, compare, experiment_status, in_notebook, is_known_dead
    from coordinator import list_experiments, monitor, process_identity, report_text, reward_rows, short_time
    from coordinator import summarize, validate_experiment, write_report, write_winners
    from drive_store import COORDINATOR, BadFile, DriveStore, StoreError, bucket, check_name
    from grpo import HELD_OUT_SEEDS, PAPER_TASKS, REASONING_GYM_VERSION, SMALL_TASKS, TASK_TABLE
    from grpo import BadQuestion, Codec, ConfigError, Group, Question, find_answer, generate, halving_on_oom
    from grpo import keep_freed_memory, load_model, load_weights, lucky_question, make_question, new_optimizer
    from grpo import pack_weights, rows_that_fit, score_all, task_hash, unpack_weights, update, warm_start
    from grpo import warm_start_name, why_refused

# -------- Algorithm 1 -----------------------------------------------------------------------------


def train(run: "Run") -> None:
    """SAPO, Algorithm 1 of arXiv:2509.08721, for the nodes of this process; returns after the last round.

    With LOCAL_NODES > 1 all nodes share, then all learn: sharing is exactly synchronous, and a run repeats
    bit for bit. Every step leaves its figures for the log in `node.figures`.
    """
    while (t := next_round(run)) is not None:
        for stage in range(run.config.MAX_STAGES):
            for node in run.nodes:
                questions = sample_batch(run, node, t, stage)  # 1. draw I questions
                generate_rollouts(run, node, questions, t, stage)  # 2. G completions of each
                communicate(run, node, t, stage)  # 3. publish them, decoded
            for node in run.nodes:
                external = sample_external(run, node, t, stage)  # 4. draw J of the peers' groups
                policy_gradient(run, node, external)  # 5. learn from own and external groups
                submit_reward(run, node, t, stage)  # 6. report
        finish_round(run, t)


@dataclass
class Rollout:
    """A question with its G completions, as text and as this process's token ids."""

    question: Question
    group: Group
    texts: list[str]
    finished: list[bool]  # whether the model ended the completion itself
    key: tuple | None = None  # of an external one: (round, stage, node, index)


@dataclass
class Node:
    """One learner. Model, optimizer, total_reward and trained go into its checkpoint."""

    id: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    total_reward: float = 0.0
    trained: set = field(default_factory=set)  # keys of external groups already used: never twice
    session: str = ""
    rollouts: list = field(default_factory=list)  # its own, of the current stage
    unpublished: list = field(default_factory=list)  # of the round so far, for publish frequency `round`
    figures: dict = field(default_factory=dict)  # of the current stage, for the log and the reward file


@dataclass
class Run:
    """What the functions below share: one process's nodes and its view of the swarm."""

    config: "Config"
    store: DriveStore  # handed to the Swarm's thread; training itself never calls it
    swarm: Swarm
    codec: Codec
    nodes: list[Node]
    log: "Log"
    stop: "StopButton"
    tasks: list[str]
    scratch: Path  # local folder for files on their way to the shared one
    done: int = -1  # last round finished (or skipped)
    saved: int = -1  # last round after which a checkpoint was made
    checkpoints: list = field(default_factory=list)  # rounds whose checkpoint is in the folder, oldest first
    verified: dict = field(default_factory=dict)  # key -> Rollout, or the reason of its rejection
    reported: set = field(default_factory=set)  # (peer, reason) of rejections that were logged
    max_rows: int = 1024  # completions per forward pass in the update
    max_decoded: int = 2**30  # completions generated at once; lowered when memory runs out
    began: float = field(default_factory=time.monotonic)
    round_began: float = 0.0
    rounds_worked: int = 0
    seconds_per_round: float = 0.0  # so far
    barren: int = 0  # rounds in a row without any informative group


# -------- The six steps of a round ----------------------------------------------------------------


def stream_seed(config: "Config", node_id: str, round_: int, stage: int, purpose: str, i: int = 0) -> int:
    """Seed of one random stream, from a hash: no state to save, no overlap, a resumed node repeats itself."""
    text = f"{config.SEED}|{node_id}|{round_}|{stage}|{purpose}|{i}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_SEEDS.start


def sample_batch(run: Run, node: Node, t: int, stage: int) -> list[Question]:
    """Step 1: I questions (times LOCAL_OVERSAMPLE), task uniform with replacement, seed from a hash."""
    if stage == 0:
        run.stop.check()  # only here: once weights have changed, the round is finished first
    questions = []
    for i in range(run.config.NUM_TRAIN_SAMPLES * run.config.LOCAL_OVERSAMPLE):
        seed = stream_seed(run.config, node.id, t, stage, "question", i)
        questions.append(lucky_question(random.Random(seed).choice(run.tasks), seed))
    return questions


def generate_rollouts(run: Run, node: Node, questions: list[Question], t: int, stage: int) -> None:
    """Step 2: G completions for each question, in one batched call, decoded and scored, as node.rollouts."""
    began = time.monotonic()
    seed = stream_seed(run.config, node.id, t, stage, "generate")
    node.rollouts = answer(run, node, questions, run.config.NUM_GENERATIONS, seed)
    texts = [text for r in node.rollouts for text in r.texts]
    lengths = [len(ids) for r in node.rollouts for ids in r.group.completions]
    finished = [done for r in node.rollouts for done in r.finished]
    node.figures = {
        "reward": mean_reward(node.rollouts),
        "completions": len(texts),
        "informative_local": sum(r.group.is_informative for r in node.rollouts),
        "answer_tag_rate": sum(find_answer(text) is not None for text in texts) / len(texts),
        "truncated_rate": 1 - sum(finished) / len(finished),
        "mean_length": sum(lengths) / len(lengths),
        "generated_tokens": sum(lengths),
        "generate_seconds": time.monotonic() - began,
    }


def answer(run: Run, node: Node, questions: list[Question], g: int, seed: int) -> list[Rollout]:
    """`g` completions of each question by this node's model, decoded and scored."""
    config, codec = run.config, run.codec
    prompts = [codec.prompt(q) for q in questions]

    def attempt(rows_at_once):
        return generate(
            node.model, prompts, g, config.MAX_NEW_TOKENS, config.TEMPERATURE, codec.eos_ids,
            torch.Generator().manual_seed(seed), codec.eos_id, rows_at_once, getattr(torch, config.DTYPE),
            answered=codec.answered if codec.few_shot else None,
        )  # fmt: skip

    rows = g * len(questions)
    completions, run.max_decoded = halving_on_oom(attempt, run.max_decoded, rows, "generation", smallest=g)
    rollouts = []
    for question, prompt, group in zip(questions, prompts, completions, strict=True):
        texts = [codec.decode(ids) for ids in group]
        rewards = score_all(question, texts, config.REWARD)
        finished = [ids[-1] in codec.eos_ids or codec.answered(ids) for ids in group]
        rollouts.append(Rollout(question, Group(prompt, group, rewards), texts, finished))
    return rollouts


def mean_reward(rollouts: list[Rollout]) -> float:
    """The node's reward of a round: the mean over all its own completions, never over externals."""
    rewards = [reward for rollout in rollouts for reward in rollout.group.rewards]
    return sum(rewards) / len(rewards)


def communicate(run: Run, node: Node, t: int, stage: int) -> None:
    """Step 3: publish this stage's groups as text, before training on them."""
    groups = [as_published(rollout) for rollout in node.rollouts]
    if run.config.ROLLOUT_PUBLISH_FREQUENCY == "round":
        node.unpublished = (node.unpublished if stage else []) + groups
        if stage < run.config.MAX_STAGES - 1:
            return
        groups = node.unpublished
    about = {"model": run.config.MODEL_NAME, "reasoning_gym": REASONING_GYM_VERSION, "tasks": task_hash()}
    run.swarm.publish(t, stage, node.id, about, {str(i): group for i, group in enumerate(groups)})


def as_published(rollout: Rollout) -> dict:
    """A group as it stands in a rollout file: bare question, decoded completions, this node's own rewards."""
    q, rewards = rollout.question, rollout.group.rewards
    completions = [
        {"response": text, "reward": reward, "finished": finished}
        for text, reward, finished in zip(rollout.texts, rewards, rollout.finished, strict=True)
    ]
    return {"task": q.task, "seed": q.seed, "prompt": q.text, "answer": q.answer, "completions": completions}


def sample_external(run: Run, node: Node, t: int, stage: int) -> list[Rollout]:
    """Step 4: verify and score the peers' groups, drop those that are not informative, draw J uniformly.

    Groups of older rounds, up to ROLLOUT_MAX_AGE back, fill gaps.
    """
    config, began = run.config, time.monotonic()
    wanted, drawn = config.NUM_TRANSPLANT_TREES, []
    figures = {"external_pool": 0, "external_peers": 0, "rejected": 0}
    if wanted > 0:
        wait_for_peers(run, t, stage)
        figures["rejected"] = sum(key[0] == t for key in list(run.swarm.refused))
        rng = random.Random(stream_seed(config, node.id, t, stage, "external"))
        for age in range(min(config.ROLLOUT_MAX_AGE, t) + 1):
            pool = informative_pool(run, node, t - age, None if age else stage, rng, figures)
            figures["external_pool"] += len(pool)
            drawn += rng.sample(pool, min(wanted - len(drawn), len(pool)))
            if len(drawn) == wanted:
                break
    oldest = t - config.ROLLOUT_MAX_AGE
    node.trained = {key for key in node.trained if key[0] >= oldest} | {r.key for r in drawn}
    ages = [t - rollout.key[0] for rollout in drawn]
    node.figures |= {**figures, "external_groups": len(drawn), "external_ages": ages}
    node.figures |= {"external_short": max(0, wanted - len(drawn)), "wait_seconds": time.monotonic() - began}
    return drawn


def wait_for_peers(run: Run, t: int, stage: int) -> None:
    """Wait for the peers that published the round before, FETCH_TIMEOUT_SECONDS at most."""
    swarm, config = run.swarm, run.config
    last_stage = config.MAX_STAGES - 1
    if config.ROLLOUT_PUBLISH_FREQUENCY == "round" and stage < last_stage:
        return  # nobody publishes before the last stage
    deadline = time.monotonic() + config.FETCH_TIMEOUT_SECONDS
    while not (swarm.alone or swarm.down or run.stop.requested):
        late = swarm.missing(t, stage)
        if swarm.looked_at >= t and not late:
            return
        if time.monotonic() > deadline:
            swarm.give_up(late)
            names = " ".join(sorted(late)) or "the folder's listing"
            why = f"not here after FETCH_TIMEOUT_SECONDS={config.FETCH_TIMEOUT_SECONDS:g}"
            run.log.event("wait", f"round {t}: {names} {why}", round=t)
            return
        swarm.wait()


def informative_pool(run: Run, node: Node, round_: int, stage, rng, figures: dict) -> list[Rollout]:
    """The groups of one round that this node may draw: verified, scored here, informative, not used before.

    At most FETCH_MAX_PEERS peers, and I groups of each: flooding the folder buys no influence.
    """
    config = run.config
    files = {peer: groups for peer, groups in run.swarm.groups_of(round_, stage).items() if peer != node.id}
    peers = sorted(files)
    if stage is None or len(peers) >= config.FETCH_MAX_PEERS:
        peers = sorted(rng.sample(peers, min(config.FETCH_MAX_PEERS, len(peers))))
    figures["external_peers"] += 0 if stage is None else len(peers)
    pool = []
    for peer in peers:
        groups = [raw for raw in files[peer] if raw["key"] not in node.trained]
        if len(groups) > config.NUM_TRAIN_SAMPLES:
            groups = rng.sample(groups, config.NUM_TRAIN_SAMPLES)
        for raw in groups:
            key = raw["key"]
            if key not in run.verified:  # the nodes of this process verify a group once for all
                run.verified[key] = verify(run, raw)
            rollout = run.verified[key]
            if isinstance(rollout, str):
                figures["rejected"] += 1
                if (peer, rollout) not in run.reported:  # say it once
                    run.reported.add((peer, rollout))
                    run.log.event("reject", f"{peer}: {rollout}", peer=peer)
            elif rollout.group.is_informative or not config.EXTERNAL_FILTER:
                pool.append(rollout)
    return pool


def verify(run: Run, raw: dict) -> Rollout | str:
    """A peer's group -> Rollout in this process's ids with rewards of its own, or the reason of rejection.

    Only (task, seed) and the completions' text are used: question and answer are made again from them.
    """
    if raw["task"] not in run.tasks:
        return "task is not one of this experiment's"
    if raw["seed"] in HELD_OUT_SEEDS:
        return "held-out question"
    try:
        question = make_question(raw["task"], raw["seed"])
    except BadQuestion:
        return "a question that cannot be made"
    if raw["prompt"] != question.text:
        return "prompt differs from the question"
    texts, finished = ([c[name] for c in raw["completions"]] for name in ("response", "finished"))
    completions = []
    for text, done in zip(texts, finished, strict=True):  # stop at the first that is too long
        completions.append(run.codec.completion(text, done))
        if not 1 <= len(completions[-1]) <= run.codec.max_completion:
            return f"completion empty or over {run.codec.max_completion} tokens here"
    rewards = score_all(question, texts, run.config.REWARD)
    group = Group(run.codec.prompt(question), completions, rewards)
    return Rollout(question, group, texts, finished, raw["key"])


def policy_gradient(run: Run, node: Node, external: list[Rollout]) -> None:
    """Step 5: one GRPO update on I own groups, informative ones first, and the external ones alike."""
    config, began = run.config, time.monotonic()
    local = sorted(node.rollouts, key=lambda r: not r.group.is_informative)[: config.NUM_TRAIN_SAMPLES]
    stats = update(
        node.model, node.optimizer, [r.group for r in local + external], max_new_tokens=config.MAX_NEW_TOKENS,
        temperature=config.TEMPERATURE, loss_type=config.LOSS_TYPE, clip_low=config.CLIP_LOW,
        clip_high=config.CLIP_HIGH, num_iterations=config.NUM_ITERATIONS, max_rows=run.max_rows,
        pad_id=run.codec.eos_id, dtype=getattr(torch, config.DTYPE),
    )  # fmt: skip
    run.max_rows = min(run.max_rows, stats.pop("max_rows"))
    informative = sum(r.group.is_informative for r in local + external)
    node.figures |= {**stats, "local_groups": len(local), "informative_groups": informative}
    node.figures["train_seconds"] = time.monotonic() - began


def submit_reward(run: Run, node: Node, t: int, stage: int) -> None:
    """Step 6: publish the reward and the round's figures, now and then with held-out accuracy."""
    config, figures = run.config, node.figures
    if config.EVAL_INTERVAL and (t + 1) % config.EVAL_INTERVAL == 0 and stage == config.MAX_STAGES - 1:
        figures["held_out"] = held_out_accuracy(run, node, t)
    node.total_reward += figures["reward"]
    run.swarm.post(run.store.submit_reward, t, stage, node.id, {"session": node.session, **figures})
    row = {"timestamp": time.time(), "round": t, "stage": stage, "node_id": node.id}
    row |= {"experiment": config.EXPERIMENT_NAME, "my_reward": figures["reward"]}
    run.log.row(node.id, "metrics.jsonl", row | {"total_reward": node.total_reward} | figures)


def held_out_accuracy(run: Run, node: Node, t: int) -> float:
    """pass@1 on EVAL_SAMPLES questions of the reserved seed range, the same for all nodes."""
    questions = []
    for i in range(run.config.EVAL_SAMPLES):
        seed = HELD_OUT_SEEDS.start + stream_seed(run.config, "", 0, 0, "held-out", i)
        questions.append(lucky_question(random.Random(seed).choice(run.tasks), seed))
    return mean_reward(answer(run, node, questions, 1, stream_seed(run.config, node.id, t, 0, "evaluate")))


# -------- From round to round ---------------------------------------------------------------------


class Ended(Exception):
    """The run ends early: "stopped" (Ctrl-C, SIGTERM, SIGUSR1) or "superseded" (by a newer session)."""


def next_round(run: Run) -> int | None:
    """The round to work on now, None after the last one. Rounds that were missed meanwhile are skipped."""
    config, own = run.config, run.done + 1
    t = wait_for_clock(run, own) if own < config.MAX_ROUNDS else own
    if t >= config.MAX_ROUNDS:
        if run.rounds_worked == 0:
            todo = f"raise MAX_ROUNDS={config.MAX_ROUNDS} to go on, or choose another EXPERIMENT_NAME"
            run.log.event("end", f"already finished: the experiment is at round {t}; {todo}")
        return None
    if t > own:
        missed = f"rounds {own} to {t - 1} were opened by the swarm meanwhile; going on with round {t}"
        run.log.event("skip", missed, first=own, last=t - 1)
    run.round_began, run.swarm.round = time.monotonic(), t
    return t


def wait_for_clock(run: Run, own: int) -> int:
    """The clock's round where a coordinator leads; else the process's own next one, or a later one.

    Where nobody else ever registered, a process that resumes replays its rounds after the checkpoint.
    """
    swarm, grace = run.swarm, 0.0 if run.config.LOCAL_NODES > 1 else 2.0
    impatient_at = time.monotonic() + max(30.0, 2 * run.seconds_per_round)
    while True:
        run.stop.check()
        if swarm.superseded:
            run.log.event(
                "end", f"a newer session of {', '.join(swarm.superseded)} is running; this one stops"
            )
            raise Ended("superseded")
        if swarm.down:  # alone for now, and no faster than usual, so as not to run away from the swarm
            if time.monotonic() >= run.round_began + run.seconds_per_round:
                return own
        elif swarm.is_led:
            if swarm.clock >= own:
                return swarm.clock
        elif time.monotonic() - swarm.leaderless_since >= grace:
            t = own if swarm.alone else max(own, swarm.clock)
            if t > swarm.clock:
                swarm.open(t)
            return t
        if time.monotonic() > impatient_at:
            impatient_at = float("inf")  # say it once
            why = "the coordinator's rounds are long, or the folder shows old listings"
            run.log.event("wait", f"round {own} is not open here yet: {why}", round=own)
        swarm.wait()


def finish_round(run: Run, t: int) -> None:
    """Say how the round went; checkpoint when due, clean up; then a stop that was asked for takes effect."""
    config, last = run.config, t == run.config.MAX_ROUNDS - 1
    intervals = [(round_ + 1) // config.CHECKPOINT_INTERVAL for round_ in (run.done, t)]
    due = intervals[0] < intervals[1]  # also where the round in which it was due was skipped
    run.done, run.rounds_worked = t, run.rounds_worked + 1
    run.seconds_per_round = (time.monotonic() - run.began) / run.rounds_worked
    report_round(run, t)
    if last and run.swarm.alone:  # elsewhere whoever opens the next round does this
        run.swarm.post(write_winners, run.store, t)
    if due or last:
        run.swarm.flush_log()  # first: rounds that are not replayed have their rows in the log
        save_checkpoint(run)
        for node in run.nodes:
            push_to_hub(run, node, last)
    if config.ROLLOUT_CLEANUP_ENABLED:
        run.swarm.post(run.store.retire_rollouts, t + 1 - rounds_to_keep(config), config.ROLLOUT_ARCHIVE_OLD)
    run.verified = {key: known for key, known in run.verified.items() if key[0] >= t - config.ROLLOUT_MAX_AGE}
    if run.log.bar is not None:
        run.log.bar.update(t + 1 - run.log.bar.n)
    run.stop.check()


def rounds_to_keep(config: "Config") -> int:
    """Rounds of rollouts that retention leaves: what was asked for, and what a resumed node may draw from."""
    return max(config.ROLLOUT_KEEP_LAST_N_ROUNDS, config.CHECKPOINT_INTERVAL + config.ROLLOUT_MAX_AGE)


class StopButton:
    """A flag, set by a first signal and looked at between a round's steps. A second signal exits at once."""

    def __init__(self):
        self.requested = self.twice = False
        self._since, self._old = 0.0, {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # SIGUSR1: Slurm sends it before a time limit
                if number := getattr(signal, name, None):
                    self._old[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self.requested:
            raise Ended("stopped")

    def _on_signal(self, number, frame) -> None:
        if self.requested:
            if time.monotonic() - self._since > 0.5:  # one key press may arrive twice
                self.twice = True
                raise KeyboardInterrupt
            return
        self.requested, self._since = True, time.monotonic()
        with contextlib.suppress(OSError, RuntimeError):  # a closed terminal; a print that was interrupted
            print("\nstopping after this step; once more to exit at once", flush=True)


# -------- The log ---------------------------------------------------------------------------------


class Log:
    """Lines for people, JSON lines for programs."""

    def __init__(self, node_id: str, secret: str, resume_line: str):
        self.node_id, self.secret, self.resume_line, self.bar = node_id, secret, resume_line, None
        self.lines = deque()  # (path, line) on their way to the shared folder; the Swarm's thread takes them

    def say(self, text: str, quiet: bool = False) -> None:
        """A line for people; quiet: only into stdout.log."""
        text = self._scrub(text)
        if not quiet:
            with contextlib.suppress(OSError, ValueError):  # a full disk, or a reader that is gone
                self.bar.write(text) if self.bar is not None else print(text, flush=True)
        self.lines.append((f"logs/{self.node_id}/stdout.log", text))

    def event(self, kind: str, text: str, quiet: bool = False, **data) -> None:
        """A row of training_events.jsonl, and a line for people unless `quiet`."""
        self.say(f"{self.node_id} {kind}: {text}", quiet)
        row = {"timestamp": time.time(), "event": kind, "node_id": self.node_id, "text": text, **data}
        self.row(self.node_id, "training_events.jsonl", row)

    def row(self, node_id: str, name: str, row: dict) -> None:
        self.lines.append((f"logs/{node_id}/{name}", self._scrub(json.dumps(row))))

    def _scrub(self, text: str) -> str:
        return text.replace(self.secret, "***") if self.secret else text


def report_round(run: Run, t: int) -> None:
    """A short line for the round (VERBOSE: a long one for each node), and now and then what is missing."""
    config, swarm, each = run.config, run.swarm, [node.figures for node in run.nodes]
    mean = {key: sum(f[key] for f in each) / len(each) for key in each[0] if key != "external_ages"}
    name = run.nodes[0].id if len(each) == 1 else f"{len(each)} nodes"
    eta = short_time(run.seconds_per_round * (config.MAX_ROUNDS - 1 - t))
    run.log.say(f"{name} {short_line(t, config.MAX_ROUNDS, mean)} | eta {eta}")
    for node in run.nodes:
        run.log.say(f"{node.id} {long_line(t, config.MAX_ROUNDS, node.figures)}", quiet=not config.VERBOSE)
    run.barren = 0 if mean["informative_groups"] else run.barren + 1
    if run.barren == 10:
        run.barren = 0
        rates = "pass rate {reward:.3f}, answer tags {answer_tag_rate:.0%}, cut off {truncated_rate:.0%}"
        todo = (
            "equal rewards give no gradient: try WARM_START_STEPS, NUM_SHOTS, MAX_NEW_TOKENS or easier TASKS"
        )
        run.log.event(
            "no signal", f"no informative group for 10 rounds: {rates.format(**mean)}; {todo}", round=t
        )
    if mean["external_short"] and not mean["external_peers"] and run.rounds_worked % 10 == 1:
        rounds = [key[0] for key in list(swarm.rollouts) if key[2] not in swarm.nodes]
        newest = (
            f"the newest peer file is {t - max(rounds)} rounds old" if rounds else "no peer file was found"
        )
        short = f"{mean['external_short']:.0f} of {config.NUM_TRANSPLANT_TREES} externals missing"
        text = f"round {t}: {short}; {newest} (ROLLOUT_MAX_AGE={config.ROLLOUT_MAX_AGE})"
        run.log.event("wait", text, round=t)


def short_line(t: int, max_rounds: int, s: dict) -> str:
    held_out = f" (held-out {s['held_out']:.2f})" if "held_out" in s else ""
    groups = f"{s['local_groups']:.0f}+{s['external_groups']:.3g} ({s['informative_groups']:.2g} informative)"
    seconds = (
        f"{s['generate_seconds']:.1f}s gen {s['wait_seconds']:.1f}s wait {s['train_seconds']:.1f}s train"
    )
    counted = f"round {t:0{len(str(max_rounds))}d}/{max_rounds}"
    return f"{counted} | reward {s['reward']:.2f}{held_out} | groups {groups} | {seconds}"


def long_line(t: int, max_rounds: int, s: dict) -> str:
    """All figures of one node's round. How to read it: README, "The log line"."""
    return short_line(t, max_rounds, s) + (
        f" | {s['external_pool']} in the pool, {s['external_short']} short, {s['rejected']} rejected"
        f" | tags {s['answer_tag_rate']:.0%} cut {s['truncated_rate']:.0%} len {s['mean_length']:.1f}"
        f" | loss {s['loss']:+.4f} clip {s['clip_fraction']:.1%} grad {s['grad_norm']:.1f}"
    )


# -------- Settings --------------------------------------------------------------------------------


def var(default, help, allowed=None, low=None, high=None):
    return field(default=default, metadata={"help": help, "allowed": allowed, "low": low, "high": high})


# fmt: off
@dataclass(frozen=True, repr=False)
class Config:
    """Every environment variable; `resolve` works out "auto". Adding one here is all it takes."""

    # the swarm
    GDRIVE_PATH: str = var("auto", "the shared folder; auto: rl-swarm in MyDrive if mounted, else ./rl-swarm")
    EXPERIMENT_NAME: str = var("default", "one experiment = one subfolder, isolated from all others")
    NODE_ROLE: str = var("worker", "worker or coordinator; monitor, report and validate only read",
                         ("worker", "coordinator", "monitor", "report", "validate"))
    NODE_ID: str = var("auto", "unique name of this node; auto: node_<8 hex>, node if LOCAL_NODES > 1")
    LOCAL_NODES: int = var(1, "workers in this process: NODE_ID_0, NODE_ID_1 …", low=1, high=256)
    SEED: int = var(42, "the swarm's seed; nodes differ by NODE_ID", low=0, high=2**31)
    TEST_MODE: bool = var(False, "quick validation: 3 rounds, I = 4, G = 4, tiny with a short warm start")
    MAX_ROUNDS: int = var(2000, "rounds to train", low=1, high=10**6)
    MAX_STAGES: int = var(1, "generate-share-update stages in a round", low=1, high=100)
    # model and tasks
    MODEL_NAME: str = var("auto", "tiny, a Hugging Face id or a folder; auto: by what the machine has")
    TASKS: str = var("auto", "comma list; auto: the paper's nine, for tiny the eight small ones")
    NUM_SHOTS: int = var("auto", "solved examples without a chat template; auto: 2, tiny 0", low=0, high=16)
    WARM_START_STEPS: int = var("auto", "supervised steps first; auto: tiny 1750, else 0", low=0, high=10**6)
    ANSWER_TAG_SHARE: float = var(0.02, "rewarded style at the end of tiny's warm start", low=0, high=1)
    REWARD: str = var("exact", "exact: 1 if the verifier gives 0.99, else 0; verifier: its score",
                      ("exact", "verifier"))
    # a round
    NUM_TRAIN_SAMPLES: int = var(8, "I: own questions per round and stage", low=1, high=4096)
    NUM_TRANSPLANT_TREES: int = var(0, "J: external groups per stage; 0: plain GRPO", low=0, high=4096)
    NUM_GENERATIONS: int = var(8, "G: completions per question", low=2, high=64)
    TEMPERATURE: float = var(1.0, "of sampling and of the log-probabilities in the loss", low=0.01, high=100)
    MAX_NEW_TOKENS: int = var("auto", "longest completion; auto: 10 for tiny, else 256", low=1, high=32768)
    EXTERNAL_FILTER: bool = var(True, "drop groups that are not informative before drawing externals")
    LOCAL_OVERSAMPLE: int = var(1, "k: generate k x I questions, train on I of them", low=1, high=64)
    # the update
    LEARNING_RATE: float = var("auto", "AdamW; auto: 3e-4 for tiny, else 1e-6", low=0, high=1)
    CLIP_LOW: float = var(0.2, "ratio clipped below at 1 - this", low=0, high=1)
    CLIP_HIGH: float = var(0.28, "ratio clipped above at 1 + this", low=0, high=10)
    NUM_ITERATIONS: int = var(1, "optimizer steps on the completions of one stage", low=1, high=100)
    LOSS_TYPE: str = var("dapo", "dapo: mean over all tokens; grpo: of completions' means; dr_grpo: fixed",
                         ("dapo", "grpo", "dr_grpo"))
    MICRO_BATCH_SIZE: int = var("auto", "completions per forward pass of the update; auto: by memory",
                                low=1, high=65536)
    DTYPE: str = var("auto", "compute type, weights stay float32; auto: bfloat16 where the hardware has it",
                     ("auto", "float32", "bfloat16"))
    DEVICE: str = var("auto", "cuda, cuda:1, mps or cpu; auto: the first there is")
    # the clock and sharing
    COORDINATOR_ROUND_INTERVAL: float = var(60.0, "seconds of a round (time), at the latest (hybrid)",
                                            low=0.01, high=86400)
    ROUND_ADVANCE: str = var("hybrid", "time, completion (all live workers submitted) or hybrid (either)",
                             ("time", "completion", "hybrid"))
    ROLLOUT_PUBLISH_FREQUENCY: str = var("stage", "a file per stage or per round; generation means stage",
                                         ("generation", "stage", "round"))
    ROLLOUT_MAX_AGE: int = var(4, "how many rounds back externals may come from", low=0, high=1000)
    FETCH_MAX_PEERS: int = var(10, "peers to read per round, drawn at random", low=1, high=1000)
    FETCH_TIMEOUT_SECONDS: float = var(30.0, "how long to wait for peers' rollouts", low=0, high=3600)
    STALE_AFTER_SECONDS: float = var(300.0, "silence after which a node is not live", low=1, high=86400)
    # what is kept
    ROLLOUT_CLEANUP_ENABLED: bool = var(False, "remove old rollouts")
    ROLLOUT_KEEP_LAST_N_ROUNDS: int = var(10, "rounds of rollouts to keep", low=1, high=10**6)
    ROLLOUT_ARCHIVE_OLD: bool = var(False, "move old rollouts to archives/ instead of deleting them")
    CHECKPOINT_INTERVAL: int = var(10, "rounds between checkpoints", low=1, high=10**6)
    CHECKPOINT_KEEP: int = var(2, "checkpoints to keep", low=1, high=1000)
    EVAL_INTERVAL: int = var(0, "rounds between held-out evaluations (pass@1); 0: none", low=0, high=10**6)
    EVAL_SAMPLES: int = var(64, "held-out questions, from seeds that no node trains on", low=1, high=65536)
    VERBOSE: bool = var(False, "every node's line of every round on the screen, not only in stdout.log")
    HUGGINGFACE_ACCESS_TOKEN: str = var("", "push the model to the Hub with each checkpoint; never shown")
    HF_REPO: str = var("auto", "where to; auto: <user>/<experiment>-<node>")
    # run_swarm.sh
    NUM_WORKERS: int = var("auto", "workers to start and expect; auto: 4", low=1, high=10**4)
    CONFIGS: str = var("", "I/J pairs to compare, such as 8/0 4/4")
    SEEDS: str = var("", "seeds to compare them over")

    def __repr__(self):  # the default one would show the access token in every traceback
        return config_table(self)


# fmt: on
TEST_MODE_DEFAULTS = {"MAX_ROUNDS": 3, "NUM_TRAIN_SAMPLES": 4, "NUM_GENERATIONS": 4, "MODEL_NAME": "tiny"}
TEST_MODE_DEFAULTS |= {"WARM_START_STEPS": 150, "ANSWER_TAG_SHARE": 0.9}  # something to learn from
SHARED_SETTINGS = ("SEED", "TASKS", "REWARD", "MAX_STAGES")  # of all nodes of an experiment, for ever
SECRET = "HUGGINGFACE_ACCESS_TOKEN"
PRIVATE_SETTINGS = (SECRET, "HF_REPO", "NODE_ID", "NODE_ROLE", "GDRIVE_PATH", "DEVICE", "VERBOSE")


def parse_value(text: str, spec):
    """One variable's text -> its value; ValueError says what is allowed."""
    kind, allowed, low, high = spec.type, *(spec.metadata[name] for name in ("allowed", "low", "high"))
    words = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
        ("0", "false", "no", "off"), False
    )
    expected = f"{'an integer' if kind is int else 'a number'} from {low} to {high}"
    expected = "True or False" if kind is bool else ", ".join(allowed or (expected,))
    expected += ", or auto" * (spec.default == "auto")
    if text == "auto" and spec.default == "auto":
        return text
    try:
        value = words[text.lower()] if kind is bool else kind(text)  # never bool(text): bool("False") is True
        is_allowed = not allowed or text in allowed
        is_allowed = (
            is_allowed and (low is None or low <= value) and (high is None or value <= high)
        )  # no nan
    except (KeyError, ValueError):
        is_allowed = False
    if not is_allowed:
        raise ValueError(f"expected {expected}")
    return value


def read_config(environ) -> tuple[Config, list[str]]:
    """Environment -> (Config without "auto", warnings). All mistakes come in one ConfigError."""
    specs = {f.name: f for f in fields(Config)}
    given, mistakes, warnings = {}, [], []
    for name, spec in specs.items():
        text = environ.get(name, "").strip()
        try:
            if text and not (name == SECRET and text == "None"):
                given[name] = parse_value(text, spec)
        except ValueError as error:
            mistakes.append(f"{name}={environ[name]!r}: {error}")
    for name in sorted(set(environ) - set(specs)):
        if near := difflib.get_close_matches(name.upper(), specs, n=1, cutoff=0.88):
            warnings.append(f"{name} is not a variable of this program: did you mean {near[0]}?")
    config = Config(**(TEST_MODE_DEFAULTS if given.get("TEST_MODE") else {}) | given)
    last = [f"{config.NODE_ID}_{config.LOCAL_NODES - 1}"] if config.LOCAL_NODES > 1 else []
    for name, values in (("EXPERIMENT_NAME", [config.EXPERIMENT_NAME]), ("NODE_ID", [config.NODE_ID, *last])):
        try:
            for value in values:
                check_name(value, name)
        except ValueError as error:
            mistakes.append(str(error))
    if config.NODE_ROLE == "worker" and config.NODE_ID.lower() == COORDINATOR:
        mistakes.append(f"NODE_ID={config.NODE_ID!r}: this name is the coordinator's seat; choose another")
    if not (config.HUGGINGFACE_ACCESS_TOKEN.isascii() and config.HUGGINGFACE_ACCESS_TOKEN.isprintable()):
        mistakes.append(f"{SECRET}: holds characters that no token has (pasted with something invisible?)")
    tasks = [task.strip() for task in config.TASKS.split(",")]
    refused = [task for task in tasks if task not in TASK_TABLE and tasks != ["auto"]]
    mistakes += [f"TASKS: {why_refused(task)}" for task in refused]
    if mistakes:
        raise ConfigError("these settings cannot be used:\n  " + "\n  ".join(mistakes))
    if (
        config.ROLLOUT_CLEANUP_ENABLED
        and (keep := rounds_to_keep(config)) > config.ROLLOUT_KEEP_LAST_N_ROUNDS
    ):
        why = "a resumed node may need CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE rounds"
        warnings.append(
            f"ROLLOUT_KEEP_LAST_N_ROUNDS={config.ROLLOUT_KEEP_LAST_N_ROUNDS} counts as {keep}: {why}"
        )
    return resolve(replace(config, TASKS=",".join(tasks))), warnings


def resolve(config: Config) -> Config:
    """Work out every "auto" except TASKS, which may come from the experiment's config.json."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    there = [name for name in found if found[name]] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    device = there[0] if config.DEVICE == "auto" else config.DEVICE
    if device not in there:
        raise ConfigError(f"DEVICE={device!r}: this machine has {', '.join(there)}")
    model = config.MODEL_NAME
    if model == "auto":
        model = "tiny" if device == "cpu" else "Gensyn/Qwen2.5-0.5B-Instruct"
    tiny, colab = model == "tiny", Path("/content/drive/MyDrive")
    has_bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)  # no T4
    auto = {
        "GDRIVE_PATH": str(colab / "rl-swarm") if colab.is_dir() else "rl-swarm",
        "NODE_ID": "node" if config.LOCAL_NODES > 1 else f"node_{secrets.token_hex(4)}",
        "NUM_SHOTS": 0 if tiny else 2,
        "WARM_START_STEPS": 1750 if tiny else 0,
        "LEARNING_RATE": 3e-4 if tiny else 1e-6,
        "MAX_NEW_TOKENS": 10 if tiny else 256,
        "DTYPE": "bfloat16" if has_bf16 else "float32",
    }
    chosen = {name: value for name, value in auto.items() if getattr(config, name) == "auto"}
    if config.NODE_ROLE == "coordinator":
        chosen["NODE_ID"] = COORDINATOR
    return replace(config, MODEL_NAME=model, DEVICE=device, **chosen)


def config_table(config: Config) -> str:
    """The settings in force, one per line, non-defaults marked with *; a secret only as set or unset."""
    lines = []
    for spec in fields(config):
        value = getattr(config, spec.name)
        shown = ("set" if value else "unset") if spec.name == SECRET else value
        lines.append(f"{'*' if value != spec.default else ' '} {spec.name:28} {shown}")
    return "\n".join(lines)


def help_text() -> str:
    """Every variable with its default and what it does, as `python sapo.py --help` prints it."""
    lines = [f"{f.name:27} {f.default!s:8.8} {f.metadata['help']}" for f in fields(Config)]
    return "\n".join(["usage: NAME=value … python sapo.py      (environment variables only)", *lines])


def resume_line(config: Config, environ) -> str:
    """The command that resumes this node: what was set and what was made up; never the secret."""
    given = {f.name: environ[f.name] for f in fields(config) if environ.get(f.name) and f.name != SECRET}
    given |= {"GDRIVE_PATH": os.path.abspath(config.GDRIVE_PATH), "NODE_ID": config.NODE_ID}
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in given.items()), "python sapo.py"])


# -------- Checkpoints, the final model, the Hub ---------------------------------------------------


def save_checkpoint(run: Run) -> None:
    """All nodes' state after round `run.done` in one file: first on the local disk, then in the folder.

    While the folder is away only the newest one waits. A full disk costs the checkpoint, not the training.
    """
    if run.done <= run.saved:
        return  # it may be on its way
    nodes, run.saved = {}, run.done
    for node in run.nodes:
        nodes[node.id] = {"model": node.model.state_dict(), "optimizer": node.optimizer.state_dict()}
        nodes[node.id] |= {"total_reward": node.total_reward, "trained": sorted(map(list, node.trained))}
    for older in run.scratch.glob("*.pt"):
        older.unlink(missing_ok=True)
    local = run.scratch / f"{run.done}.pt"
    try:
        torch.save({"model_name": run.config.MODEL_NAME, "next_round": run.done + 1, "nodes": nodes}, local)
        run.swarm.post(carry_checkpoint, run, run.done, local)
        run.log.event("checkpoint", f"after round {run.done}", quiet=True, round=run.done)
    except (OSError, RuntimeError) as error:
        run.log.event("error", f"no checkpoint after round {run.done}: {run.scratch}: {error}")


def checkpoint_path(run: Run, round_: int) -> str:
    return f"checkpoints/{bucket(round_)}/{run.config.NODE_ID}.pt"


def carry_checkpoint(run: Run, round_: int, local: Path) -> None:
    """In the Swarm's thread: copy a checkpoint to the folder, delete all but the newest CHECKPOINT_KEEP."""
    if local.exists():  # else a newer one took its place
        run.store.write(checkpoint_path(run, round_), local)
        run.checkpoints.append(round_)
        for old in run.checkpoints[: -run.config.CHECKPOINT_KEEP]:
            run.store.delete(checkpoint_path(run, old), prune=True)
            run.checkpoints.remove(old)
        local.unlink(missing_ok=True)


def resume(run: Run) -> None:
    """Load the newest checkpoint of this process that is readable; none at all means round 0.

    StoreError if there are checkpoints and none can be used: a swarm never starts over by accident.
    """
    rounds = run.store.checkpoints(run.config.NODE_ID)
    for round_ in rounds:
        try:
            with run.store.open(checkpoint_path(run, round_)) as file:
                if damaged := zipfile.ZipFile(file).testzip():  # torch.load does not look at the checksums
                    raise ValueError(f"checksum of {damaged}")
                file.seek(0)
                restore(run, torch.load(file, map_location="cpu", weights_only=True), round_)
        except ConfigError:
            raise
        except Exception as error:  # torch raises many kinds; an unusable file is what they have in common
            path = run.store.base / checkpoint_path(run, round_)
            run.log.event("resume", f"{path} cannot be used ({type(error).__name__}); trying the one before")
            continue
        run.done = run.saved = round_
        run.checkpoints = sorted(r for r in rounds if r <= round_)
        run.log.event("resume", f"from the checkpoint after round {round_}", round=round_)
        return
    if rounds:
        raise StoreError(
            f"{run.store.base / 'checkpoints'}: none of {run.config.NODE_ID}'s checkpoints can be used. "
            "Nothing was changed; restore one, or start under another NODE_ID or EXPERIMENT_NAME"
        )


def restore(run: Run, state: dict, round_: int) -> None:
    """A checkpoint's contents into the nodes; but the settings of the update are those of this start."""
    if state["model_name"] != run.config.MODEL_NAME:
        made_with = f"the checkpoint of {run.config.NODE_ID} was made with {state['model_name']!r}"
        raise ConfigError(f"MODEL_NAME={run.config.MODEL_NAME!r}: {made_with}; set that, or another NODE_ID")
    if state["nodes"].keys() != {node.id for node in run.nodes}:
        holds = f"the checkpoint of {run.config.NODE_ID} holds {', '.join(state['nodes'])}"
        raise ConfigError(f"LOCAL_NODES={run.config.LOCAL_NODES}: {holds}; set that many, or another NODE_ID")
    if state["next_round"] != round_ + 1:
        raise ValueError("the round differs from the file's name")
    for node in run.nodes:
        mine = state["nodes"][node.id]
        (group,) = node.optimizer.param_groups
        ours = {key: value for key, value in group.items() if key != "params"}
        node.model.load_state_dict(mine["model"])
        node.optimizer.load_state_dict(mine["optimizer"])
        node.optimizer.param_groups[0].update(ours)
        node.total_reward = float(mine["total_reward"])
        node.trained = {tuple(key) for key in mine["trained"]}


def save_models(run: Run) -> None:
    """models/NODE: an ordinary Hugging Face folder, with the line that tries it."""
    for node in run.nodes:
        for file in sorted(save_locally(run, node, "models").iterdir()):
            run.swarm.post(run.store.write, f"models/{node.id}/{file.name}", file)
    folder = run.store.base / "models" / run.nodes[0].id
    prompt = run.codec.tokenizer.decode(run.codec.prompt(make_question(run.tasks[0], 1)))
    tokens = run.config.MAX_NEW_TOKENS
    ask = f"pipeline('text-generation', {str(folder)!r})({prompt!r}, max_new_tokens={tokens})"
    code = shlex.quote(f"from transformers import pipeline; print({ask})")
    run.log.say(f"final model: {folder}\n  try it: python -c {code}")


def save_locally(run: Run, node: Node, folder: str) -> Path:
    local = run.scratch / folder / node.id
    node.model.save_pretrained(local)
    run.codec.tokenizer.save_pretrained(local)
    return local


HUB_PATIENCE = 1800.0  # seconds that the end of a run waits for uploads


def push_to_hub(run: Run, node: Node, last: bool) -> None:
    """Upload the model in the background if a token is set; a failed push is said and never stops training.

    While one is under way none but the last model's is begun, and that one waits for its turn.
    """
    config, under_way = run.config, [thread for thread in uploads() if thread.name == f"hub {node.id}"]
    if not config.HUGGINGFACE_ACCESS_TOKEN or (under_way and not last):
        return
    round_, local = run.done, save_locally(run, node, f"hub/{run.done}")

    def push():
        for thread in under_way:
            thread.join(HUB_PATIENCE / 2)
        try:
            from huggingface_hub import HfApi  # transformers brings it

            api, repo = HfApi(token=config.HUGGINGFACE_ACCESS_TOKEN), config.HF_REPO
            if repo == "auto":
                repo = f"{api.whoami()['name']}/{config.EXPERIMENT_NAME}-{node.id}"
            api.create_repo(repo, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=local, commit_message=f"after round {round_}")
            run.log.event("hub", f"pushed to {repo}")
        except Exception as error:  # its text may hold the token: only type and status are told
            status = getattr(getattr(error, "response", None), "status_code", "no answer")
            run.log.event("hub", f"push failed, training goes on: {type(error).__name__} ({status})")
        shutil.rmtree(local, ignore_errors=True)

    threading.Thread(target=push, name=f"hub {node.id}", daemon=True).start()


def uploads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hub ")]


# -------- Roles -----------------------------------------------------------------------------------


def join_experiment(config: Config, store: DriveStore, say, only_read: bool) -> list[str]:
    """The experiment's tasks, if this node's settings agree with it; ConfigError names both values if not.

    only_read: config.json is not written yet, for what a start with a mistake leaves would bind the next.
    """
    own_tasks = ",".join(SMALL_TASKS if config.MODEL_NAME == "tiny" else PAPER_TASKS)
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in PRIVATE_SETTINGS}
    settings |= {"TASKS": own_tasks if config.TASKS == "auto" else config.TASKS}
    settings |= {"reasoning_gym": REASONING_GYM_VERSION, "task_table": task_hash()}
    began_with = store.open_config(settings | {"created_at": time.time()}, only_read)
    path = store.base / "config.json"
    is_coordinator = config.NODE_ROLE == "coordinator"  # it knows neither I, J nor model
    if config.TASKS == "auto" or is_coordinator:
        settings["TASKS"] = str(began_with.get("TASKS"))
    tasks = settings["TASKS"].split(",")
    if unknown := [task for task in tasks if task not in TASK_TABLE]:
        raise ConfigError(f"TASKS in {path}: {why_refused(unknown[0])}")
    differ = {
        n: f"{v!r} (there {began_with.get(n)!r:.80})" for n, v in settings.items() if began_with.get(n) != v
    }
    fixed = ("MAX_STAGES",) if is_coordinator else SHARED_SETTINGS
    if wrong := [f"{name}={differ[name]}" for name in fixed if name in differ]:
        raise ConfigError(f"{path} disagrees; change {', '.join(wrong)} or EXPERIMENT_NAME")
    if differ and not only_read:
        each = ", ".join(f"{name}={both}" for name, both in differ.items())
        say(f"warning: settings that differ from the experiment's config.json: {each}")
    return tasks


def announce(config: Config, store: DriveStore, say) -> None:
    """Say that an experiment is new (a typing mistake?), or who is in it and where it stands."""
    if not store.names(""):
        others = list_experiments(config.GDRIVE_PATH)
        also = f"; there are also: {', '.join(others)}" if others else ""
        say(f"new experiment {config.EXPERIMENT_NAME}{also}")
        return
    nodes = sorted(store.sessions().keys() - {COORDINATOR})
    known = f"{', '.join(nodes[:8])}{' …' if len(nodes) > 8 else ''}" if nodes else "nobody yet"
    say(f"experiment {config.EXPERIMENT_NAME} is there already: round {store.clock()[0]}, nodes: {known}")
    if nodes and config.NODE_ID not in {node.rsplit("_", 1)[0] for node in nodes} | set(nodes):
        say(f"{config.NODE_ID} joins it. To resume a node set NODE_ID; to start afresh, EXPERIMENT_NAME")


def load_warm_start(config: Config, model, codec: Codec, tasks, say, check_stop=lambda: None) -> None:
    """Bring `model` to its warm start: from the shared cache, or by making it there once for all nodes.

    warmstart/<recipe>.safetensors is write-once; a claim file keeps the others from making it too. It is
    ignored when its maker died or took ten minutes (making it twice is harmless).
    """
    if config.WARM_START_STEPS == 0:
        return
    shared, name = DriveStore(config.GDRIVE_PATH, None, config.NODE_ID), warm_start_name(model, config, tasks)
    path, claim = f"warmstart/{name}.safetensors", f"warmstart/{name}.claim"
    largest = (1 << 20) + sum(w.numel() * w.element_size() for w in model.state_dict().values())

    def cached():
        with contextlib.suppress(OSError, BadFile):
            return unpack_weights(shared.read_bytes(path, largest))

    waited_until = None
    while (weights := cached()) is None:
        check_stop()
        with contextlib.suppress(OSError, BadFile):
            if is_known_dead(shared.read(claim) or {}):
                shared.delete(claim)
        mine = True
        with contextlib.suppress(OSError):  # a folder in the claim's place: then everybody makes it
            mine = shared.write_once(claim, process_identity())
        if mine or (waited_until and time.monotonic() > waited_until):
            try:
                warm_start(model, codec, config, tasks, say)
                shared.write(path, pack_weights(model), keep=lambda old: cached() is not None)
            except OSError as error:
                say(f"the warm start cannot be shared, this node goes on with its own: {error}")
                return
            finally:
                with contextlib.suppress(OSError):
                    shared.delete(claim)
        elif waited_until is None:
            waited_until = time.monotonic() + 600
            say(f"another node makes the warm start; waiting up to 10 minutes (delete {claim} if it is dead)")
        time.sleep(0.0 if mine else 0.5)
    with contextlib.suppress(OSError):
        shared.delete(shared.tmp)
    if not load_weights(model, weights):
        raise StoreError(f"{shared.base / path} does not fit the model; delete it and start again")


def run_worker(config: Config, log: Log, stop: StopButton) -> str:
    """Load, resume, train, save. Returns how it ended: finished, stopped or superseded."""
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME, config.NODE_ID)
    store.create()
    announce(config, store, log.say)
    tasks = join_experiment(config, store, log.say, only_read=True)
    keep_freed_memory()
    if config.MODEL_NAME == "tiny":
        torch.set_num_threads(1)  # 0.14 M parameters: a second thread costs more than it brings
    model, codec = load_model(config, tasks)
    load_warm_start(config, model, codec, tasks, log.say, stop.check)
    tasks = join_experiment(config, store, log.say, only_read=False)
    ids = (
        [f"{config.NODE_ID}_{i}" for i in range(config.LOCAL_NODES)]
        if config.LOCAL_NODES > 1
        else [config.NODE_ID]
    )
    nodes = [new_node(node_id, model, config) for node_id in ids]
    del model  # every node has a copy
    swarm = new_swarm(config, store, dict.fromkeys(ids, ""), log)
    run = Run(config, store, swarm, codec, nodes, log, stop, tasks, make_scratch())
    try:
        prepare(run)
        train(run)
        swarm.state = "done"
        save_models(run)
        total = sum(node.total_reward for node in nodes) / len(nodes)
        log.event("end", f"finished; cumulative reward {total:.2f} per node")
        return "finished"
    except Ended as how:
        if str(how) == "stopped":
            swarm.state = "stopped"
            save_checkpoint(run)
            log.event("end", f"stopped before round {run.done + 1}; to go on:\n  {log.resume_line}")
        return str(how)
    finally:
        if not stop.twice:
            close(run)


def new_node(node_id: str, model, config: Config) -> Node:
    """A node with its own copy of the weights."""
    own = copy.deepcopy(model).eval()
    return Node(node_id, own, new_optimizer(own, config))


def make_scratch() -> Path:
    """A local folder for files on their way; those that killed processes of this user left are removed."""
    for left in Path(tempfile.gettempdir()).glob("sapo-*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            identity = json.loads((left / "process.json").read_text())
            if is_known_dead(identity) and left.stat().st_uid == os.getuid():
                shutil.rmtree(left)
    scratch = Path(tempfile.mkdtemp(prefix="sapo-"))
    (scratch / "process.json").write_text(json.dumps(process_identity()))
    return scratch


def prepare(run: Run) -> None:
    """Resume, sweep what a killed session left, look at the folder, check the disk, say what begins."""
    config, store, swarm = run.config, run.store, run.swarm
    resume(run)  # before registering: a start that is refused must not take a running node's place
    about = {"model": config.MODEL_NAME, **process_identity(), **versions()}
    for node in run.nodes:
        node.session = swarm.nodes[node.id] = store.register(node.id, "worker", about)
    store.delete(store.tmp)  # temp files that a killed process of this name left
    swarm.round = run.done + 1
    swarm.start()
    for t in range(
        run.done + 1, 0 if swarm.alone else swarm.clock
    ):  # finished before a kill, and not replayed
        for node, stage in itertools.product(run.nodes, range(config.MAX_STAGES)):
            node.total_reward += (store.reward(t, stage, node.id) or {"reward": 0.0})["reward"]
    check_disk(run)
    run.max_rows, row, available = rows_that_fit(run.nodes[0].model, config)
    groups = config.NUM_TRAIN_SAMPLES + config.NUM_TRANSPLANT_TREES
    rows = min(run.max_rows, config.NUM_GENERATIONS * groups)
    needed = f"the update takes about {rows * row:.1f} GB for {rows} completions at once"
    run.log.say(f"memory: {needed}; {available:.1f} GB available")
    info = {**process_identity(), **versions(), "device": config.DEVICE, "cpus": os.cpu_count()}
    for node in run.nodes:
        swarm.post(store.rewrite, f"logs/{node.id}/system_info.json", {"node_id": node.id, **info})
    if config.NUM_TRANSPLANT_TREES == 0:
        run.log.say("NUM_TRANSPLANT_TREES=0: nothing is learned from peers (plain GRPO)")
    what = f"{len(run.nodes)} node(s), model {config.MODEL_NAME} on {config.DEVICE} ({config.DTYPE})"
    run.log.event("start", f"{what}, round {run.done + 1}")
    run.log.say(f"to resume: {run.log.resume_line}")
    if sys.stdout.isatty() or in_notebook():  # a log file wants plain lines
        run.log.bar = tqdm(total=config.MAX_ROUNDS, initial=run.done + 1, unit="round", dynamic_ncols=True)


def check_disk(run: Run) -> None:
    """Checkpoint size against free space, in the shared folder and on the local disk."""
    size = sum(12 * p.numel() for p in run.nodes[0].model.parameters()) * len(
        run.nodes
    )  # weights, Adam's moments
    for place, copies in ((run.store.base, run.config.CHECKPOINT_KEEP + 1), (run.scratch, 1)):
        free = shutil.disk_usage(place).free
        if free < copies * size:
            needed = f"{free / 1e9:.1f} GB free, {copies} checkpoints need {copies * size / 1e9:.1f} GB"
            run.log.event("disk", f"{place}: {needed}; lower CHECKPOINT_KEEP or make room")


def close(run: Run) -> None:
    """Write what is still queued and say goodbye. Nothing is given up silently."""
    if run.log.bar is not None:
        run.log.bar.close()
        run.log.bar = None
    if uploads():
        run.log.say("waiting for the Hub (Ctrl-C gives up)")
    deadline = time.monotonic() + (HUB_PATIENCE if run.swarm.state == "done" else 120.0)
    for thread in uploads():
        thread.join(max(0.0, deadline - time.monotonic()))
    if uploads():
        run.log.event("hub", f"an upload did not reach the Hub; the model lies in {run.scratch / 'hub'}")
    pending = run.swarm.close(patience=10.0)
    if pending:
        run.log.say(f"{pending} writes wait for the shared folder, up to 5 minutes (Ctrl-C gives up)")
        pending = run.swarm.close(patience=300.0)
    if pending:
        print(f"{pending} writes did not reach the shared folder; a checkpoint may lie in {run.scratch}")
    elif not uploads():
        shutil.rmtree(run.scratch, ignore_errors=True)


def versions() -> dict:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    return found | {"transformers": transformers.__version__, "reasoning_gym": REASONING_GYM_VERSION}


def run_coordinator(config: Config, log: Log, stop: StopButton) -> str:
    """Open rounds for the swarm; loads no model."""
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME, COORDINATOR)
    store.create()
    join_experiment(config, store, log.say, only_read=True)
    store.delete(store.tmp)  # temp files that a killed process of this name left
    session = store.register(COORDINATOR, "coordinator", {"model": None, **process_identity(), **versions()})
    swarm = new_swarm(config, store, {COORDINATOR: session}, log)
    swarm.start()

    def each_round(round_):
        if config.ROLLOUT_CLEANUP_ENABLED:  # workers clean up after themselves; this is for those long gone
            before = round_ - 2 * rounds_to_keep(config)
            swarm.post(store.retire_rollouts, before, config.ROLLOUT_ARCHIVE_OLD)

    coordinator = Coordinator(
        swarm, max_rounds=config.MAX_ROUNDS, last_stage=config.MAX_STAGES - 1, strategy=config.ROUND_ADVANCE,
        interval=config.COORDINATOR_ROUND_INTERVAL, say=log.say, each_round=each_round,
        expected=0 if config.NUM_WORKERS == "auto" else config.NUM_WORKERS,
    )  # fmt: skip
    outcome = coordinator.run(lambda: stop.requested)
    log.say(f"coordinator: {outcome}" + " by a newer one on this seat" * (outcome == "superseded"))
    swarm.state = "done" if outcome == "finished" else "stopped"
    swarm.close(patience=10.0)
    return outcome


def new_swarm(config: Config, store: DriveStore, sessions: dict, log: Log) -> Swarm:
    draws = config.NODE_ROLE == "worker" and config.NUM_TRANSPLANT_TREES > 0
    return Swarm(
        store, sessions, seat=COORDINATOR, stages=config.MAX_STAGES, max_age=config.ROLLOUT_MAX_AGE,
        max_peers=config.FETCH_MAX_PEERS if draws else 0, stale_after=config.STALE_AFTER_SECONDS,
        note=log.event, lines=log.lines,
    )  # fmt: skip


def run_reader(config: Config, stop: StopButton) -> str:
    """monitor, validate or report: they change no experiment and load no model."""
    names, shared = list_experiments(config.GDRIVE_PATH), DriveStore(config.GDRIVE_PATH, None)
    if config.NODE_ROLE == "report" and names:
        rows = compare_experiments(config.GDRIVE_PATH)
        print(report_text(rows) if rows else f"report: no rewards below {config.GDRIVE_PATH}")
        written = write_report(rows, lambda name, data: shared.write(f"reports/{name}", data)) if rows else []
        print("\n".join(str(shared.base / "reports" / name) for name in written))
        return "finished" if rows else "invalid"
    if config.EXPERIMENT_NAME not in names:
        there = f"there are: {', '.join(names)}" if names else "there is none"
        print(f"no experiment {config.EXPERIMENT_NAME!r} in {config.GDRIVE_PATH}; {there}")
        return "invalid"
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME)
    began_with = store.open_config({}, only_read=True)

    def given(name, otherwise):  # as set here, else as the run was started
        both = (getattr(config, name), began_with.get(name))
        known = [n for n in both if type(n) is int and 0 < n <= 10**6 and n != getattr(Config, name)]
        return known[0] if known else otherwise

    rounds, nodes = given("MAX_ROUNDS", Config.MAX_ROUNDS), given("LOCAL_NODES", given("NUM_WORKERS", 4))
    if config.NODE_ROLE == "monitor":
        live = sys.stdout.isatty() or in_notebook()  # every 30 seconds there, once elsewhere
        monitor(store, config.STALE_AFTER_SECONDS, rounds, once=not live, should_stop=lambda: stop.requested)
        return "finished"
    problems = validate_experiment(store, rounds, nodes)
    for line in (*problems, f"{store.base}: " + ("FAILED" if problems else "passed")):
        print(f"validate: {line}")
    return "invalid" if problems else "valid"


# -------- For notebooks, and the command line -----------------------------------------------------


def get_experiment_status(path, name: str) -> dict:
    """Status of one experiment below the shared folder `path`: current_round, num_active_peers, …"""
    return experiment_status(DriveStore(path, name))


def get_experiment_metrics(path, name: str):
    """One row per node, round and stage: a pandas.DataFrame if there is pandas, else a list of dicts."""
    rows = reward_rows(DriveStore(path, name))
    with contextlib.suppress(ImportError):
        import pandas

        return pandas.DataFrame(rows)
    return rows


def compare_experiments(path, names=None) -> list[dict]:
    """Figures of experiments (all below `path` by default) over seeds, against their J = 0 baseline."""
    summaries = []
    for name in names or list_experiments(path):
        try:
            summaries.append(summarize(DriveStore(path, name)))
        except (ValueError, StoreError) as error:  # one damaged config.json: the others are reported
            print(f"experiment {name} is left out: {error}")
    return compare([summary for summary in summaries if summary])


def main(environ=None) -> int:
    """Run the role that the environment asks for; returns the exit status. Only here it is read."""
    environ = os.environ if environ is None else environ
    try:
        config, warnings = read_config(environ)
    except ConfigError as error:
        print(error)
        return 2
    log = Log(config.NODE_ID, config.HUGGINGFACE_ACCESS_TOKEN, resume_line(config, environ))
    for warning in warnings:
        log.say(f"warning: {warning}")
    transformers.utils.logging.set_verbosity_error()  # it warns of padding that this program handles itself
    transformers.utils.logging.disable_progress_bar()
    stop = StopButton()
    stop.install()
    try:
        if config.NODE_ROLE in ("worker", "coordinator"):
            print(config_table(config), flush=True)
            outcome = (run_worker if config.NODE_ROLE == "worker" else run_coordinator)(config, log, stop)
        else:
            outcome = run_reader(config, stop)
    except (ConfigError, StoreError) as error:
        log.say(str(error))
        return 2
    except OSError as error:
        where, why = error.filename or config.GDRIVE_PATH, error.strerror or error
        log.say(f"{where} cannot be used: {why} (GDRIVE_PATH={config.GDRIVE_PATH})")
        return 2
    except (Ended, KeyboardInterrupt):
        log.say(f"stopped; to go on:\n  {log.resume_line}")
        return 130
    finally:
        stop.restore()
    return {"finished": 0, "valid": 0, "stopped": 130, "superseded": 3, "invalid": 1}[outcome]


if __name__ == "__main__":
    wants_help = sys.argv[1:] and not in_notebook()  # --help, -h, help: nothing is set by arguments
    status = print(help_text()) if wants_help else main()
    if status and not in_notebook():  # in a notebook the cell just ends
        sys.exit(status)
