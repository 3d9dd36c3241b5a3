# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9,<3", "transformers>=4.57,<5.25", "reasoning-gym>=0.1.25,<0.2"]
# ///
"""SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721).

N nodes, each with its own language model, learn by GRPO on reasoning-gym questions. They share
decoded rollouts, plain text, through one shared folder. Settings are environment variables
(`python sapo.py --help`). By default J is 0: a node learns from no peer (plain GRPO).

    EXPERIMENT_NAME=first MODEL_NAME=tiny MAX_ROUNDS=60 python sapo.py
"""

import contextlib
import copy
import csv
import dataclasses
import difflib
import fnmatch
import hashlib
import json
import math
import os
import random
import re
import secrets
import shlex
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from pathlib import Path

if "DriveStore" in globals():  # the four modules pasted into one notebook cell
    coordinator = drive_store = grpo = sys.modules[__name__]
else:
    import coordinator
    import drive_store
    import grpo

import huggingface_hub  # comes with transformers
import torch
import tqdm  # also


def train(run: "Run") -> None:
    """SAPO, Algorithm 1 of arXiv:2509.08721, for the nodes of this process, until the last round.

    Every node publishes before any node trains, so that sharing among them is fully synchronous. A
    run of one process repeats bit for bit on a CPU.
    """
    while (t := next_round(run)) is not None:
        for stage in range(run.config.MAX_STAGES):  # 1 by default
            at = drive_store.At(t, stage)
            for node in run.nodes:
                questions = sample_batch(run, node, at)  # 1. draw I questions
                node.groups = generate_groups(run, node, questions, at)  # 2. G completions of each
                publish_groups(run, node, at)  # 3. share them as text

            for node in run.nodes:
                node.external = sample_external(run, node, at)  # 4. draw J of the peers' groups
                policy_gradient(run, node)  # 5. one update on own and external groups
                submit_reward(run, node, at)  # 6. report
        finish_round(run, t)


@dataclass
class Node:
    """One learner. Checkpoints hold the first six of these fields."""

    id: str
    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer"
    total_reward: float = 0.0
    used_external: set = field(default_factory=set)  # keys of drawn groups: none is drawn twice
    held_out: dict = field(default_factory=dict)  # {"before training": accuracy, …}

    # Of the current stage. `external` was drawn from `candidates`; rows and steps are the update's.
    groups: "list[grpo.Group]" = field(default_factory=list)
    unshared: "list[grpo.Group]" = field(default_factory=list)  # not yet published
    external: "list[grpo.Group]" = field(default_factory=list)
    candidates: "list[grpo.Group]" = field(default_factory=list)
    rows: "list[grpo.Row]" = field(default_factory=list)
    steps: list[tuple] = field(default_factory=list)


@dataclass
class Run:
    """One process: its nodes, and what they share."""

    config: "Config"  # I, J, G: NUM_TRAIN_SAMPLES 8, NUM_TRANSPLANT_TREES 0, NUM_GENERATIONS 8
    store: "drive_store.RetryingStore"
    member: "drive_store.Member"  # this process in the swarm; member.board is the swarm's state
    codec: "grpo.Codec"
    nodes: list[Node]
    peers: "Peers"  # what was read of the peers' groups
    log: "Log"
    signals: "Signals"
    update_limit: "grpo.RowLimit"  # how many rows fit into memory
    generation_limit: "grpo.RowLimit"
    last_round: int = -1  # the last one that is finished
    checkpoints: list[int] = field(default_factory=list)  # rounds of those it has written or loaded


# -------- The six steps of a round ----------------------------------------------------------------
# `at` is a stage of a round, an At(round, stage). Below the banner three of the steps are replaced
# by timed versions, and submit_reward by one that logs what it returns.


def sample_batch(run: Run, node: Node, at) -> "list[grpo.Question]":
    """Step 1: draw I questions (k x I with LOCAL_OVERSAMPLE)."""
    config = run.config
    seeds = [derive_seed(config, node.id, at, "question", i) for i in range(config.num_questions)]
    return make_questions(run, seeds)


def derive_seed(config: "Config", node_id: str, at, purpose: str, i: int = 0) -> int:
    """A hash of the arguments, below HELD_OUT_SEEDS. No random state has to be saved, and a resumed
    node draws the same again."""
    text = f"{config.SEED}|{node_id}|{at.round}|{at.stage}|{purpose}|{i}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % grpo.HELD_OUT_SEEDS.start


def make_questions(run: Run, seeds: list[int]) -> "list[grpo.Question]":
    """For each seed a question of a task that the seed chooses. (Where none can be made or fits the
    model, the next seed counts.)"""
    questions = []
    for seed in seeds:
        task = random.Random(seed).choice(run.config.tasks)
        questions.append(grpo.first_valid_question(task, seed, run.codec.fits))
    return questions


def generate_groups(run: Run, node: Node, questions: list, at) -> "list[grpo.Group]":
    """Step 2: generate G completions of each question in one batch, decode and score them."""
    seed = derive_seed(run.config, node.id, at, "generate")
    return answer_questions(run, node, questions, run.config.NUM_GENERATIONS, seed)


def answer_questions(run: Run, node: Node, questions: list, num_generations: int, seed: int):
    """A group of each question."""
    codec = run.codec
    prompts = [codec.encode_prompt(question) for question in questions]
    generated = grpo.generate(
        node.model, codec, prompts, num_generations, run.config, seed, run.generation_limit
    )
    groups = []
    for question, prompt, completions in zip(questions, prompts, generated, strict=True):
        finished = [codec.is_finished(ids) for ids in completions]
        groups.append(score(run, question, prompt, completions, finished))
    return groups


def score(run: Run, question, prompt: list, completions: list, finished: list) -> "grpo.Group":
    """A group with its texts, and with the reward of each by `grpo.compute_reward`."""
    texts = [run.codec.decode(ids) for ids in completions]
    rewards = grpo.group_rewards(question, texts, run.config.REWARD)
    return grpo.Group(prompt, completions, rewards, question, texts, finished)


def publish_groups(run: Run, node: Node, at) -> None:
    """Step 3: share the groups as text, before training on them."""
    node.unshared += node.groups
    if at.stage in run.config.publishing_stages:  # in each, by default
        rollouts = {str(index): shared_form(group) for index, group in enumerate(node.unshared)}
        run.store.publish("rollouts", node.id, at, rollout_file(run.config, rollouts))
        node.unshared = []


def shared_form(group: "grpo.Group") -> dict:
    """A group in a rollout file. A peer uses task, seed, response and finished, and compares the
    prompt; answer and reward are for people."""
    completions = []
    for text, reward, finished in zip(group.texts, group.rewards, group.finished, strict=True):
        completions.append({"response": text, "reward": reward, "finished": finished})
    question = group.question
    asked = {"task": question.task, "seed": question.seed, "prompt": question.text}
    return asked | {"answer": question.answer, "completions": completions}


def sample_external(run: Run, node: Node, at) -> "list[grpo.Group]":
    """Step 4: wait for the peers, and draw J of their groups of this stage, each candidate with the
    same chance. What is missing is drawn from one round back, and so on to ROLLOUT_MAX_AGE (4)."""
    config = run.config
    if config.NUM_TRANSPLANT_TREES > 0:
        wait_for_peers(run, node, at)
    rng = random.Random(derive_seed(config, node.id, at, "external"))
    external = []
    node.candidates = []
    for age in range(min(config.ROLLOUT_MAX_AGE, at.round) + 1):
        num_missing = config.NUM_TRANSPLANT_TREES - len(external)
        if num_missing > 0:
            candidates = external_candidates(run, node, at, age, rng)
            external += rng.sample(candidates, min(num_missing, len(candidates)))
            node.candidates += candidates
    node.used_external |= {group.key for group in external}
    return external


def wait_for_peers(run: Run, node: Node, at) -> None:
    """Step 4a: wait for late peers until a later round opens or the budget is used up, which is
    FETCH_TIMEOUT_SECONDS (30) in a round, over all its stages and all nodes of this process."""
    late = late_peers(run, node, at)
    while late and wait_a_moment(run, late, at):  # False if no more waiting is allowed
        late = late_peers(run, node, at)


def late_peers(run: Run, node: Node, at) -> set[str]:
    """Whom to wait for: chosen peers whose file is not here and who are in step, because they have
    published all of the round before or have entered this one (in round 0 all are). One that dies
    falls out of step, so it costs one timeout. Nobody, if none of them is alive."""
    board = run.member.refresh()
    in_step = drive_store.in_step(board, "rollouts", at.round, run.config)
    chosen = set(choose_peers(run, node, at, in_step)) - set(run.config.node_ids)
    late = chosen - arrived(run, node, chosen, at)
    return late if any(map(run.member.is_alive, sorted(late))) else set()


def choose_peers(run: Run, node: Node, at, peers) -> list[str]:
    """The FETCH_MAX_PEERS (10) of these peers that rank first, so that the cost of a round does not
    grow with the swarm. A node ranks its peers by a hash, and anew every five rounds."""
    period = drive_store.At(at.round // 5)  # no real round: it only goes into the hash
    others = set(peers) - {node.id}
    rank = {peer: derive_seed(run.config, node.id, period, f"read {peer}") for peer in others}
    return sorted(sorted(others, key=rank.get)[: run.config.FETCH_MAX_PEERS])


def external_candidates(run: Run, node: Node, at, age: int, rng) -> "list[grpo.Group]":
    """Step 4b: the peers' groups that `node` may draw: verified, informative, not yet trained on.
    For age > 0 they are of all stages of that round."""
    config = run.config
    stages = [at.stage] if age == 0 else range(config.MAX_STAGES)
    files = [drive_store.At(at.round - age, stage) for stage in stages]
    published = run.member.board.reached("rollouts", files[0])

    candidates = []
    for peer in choose_peers(run, node, at, published):
        records = []
        for file in files:
            records += fetch_groups(run, node, peer, file) or []
        # At most I groups of each peer for each age (J if I = 0), chosen before they are verified:
        # nobody gains by publishing thousands.
        records = [record for record in records if record["key"] not in node.used_external]
        if len(records) > config.max_groups_per_peer:
            records = rng.sample(records, config.max_groups_per_peer)
        for group in verify_all(run, node, peer, records):
            if group.is_informative or not config.EXTERNAL_FILTER:
                candidates.append(group)
    return candidates


def verify(run: Run, record: dict) -> "grpo.Group":
    """A peer's group, its question made again, its texts tokenized and scored here. Rejected are a
    foreign task, a held-out seed, another prompt, and a completion that is empty, too long or has
    an EOS inside."""
    codec = run.codec
    question = checked_question(run, record)  # from its task and seed
    prompt = codec.encode_prompt(question)
    completions = record["completions"][: run.config.NUM_GENERATIONS]
    texts = [completion["response"] for completion in completions]
    finished = [completion["finished"] for completion in completions]
    token_ids = checked_ids(codec, prompt, texts, finished)  # with this model's tokenizer

    # Score the text that these tokens decode to, because the update trains on the tokens.
    group = score(run, question, prompt, token_ids, finished)
    return dataclasses.replace(group, key=record["key"])


def policy_gradient(run: Run, node: Node) -> None:
    """Step 5: one GRPO update on I of the own groups (LOCAL_OVERSAMPLE may have made more) and on
    all drawn external groups."""
    # EXERCISE: replace groups without information by informative ones of earlier rounds (replay).
    own = informative_first(node.groups)[: run.config.NUM_TRAIN_SAMPLES]
    node.rows, node.steps = grpo.update_policy(
        node.model, node.optimizer, own + node.external, run.config, run.codec, run.update_limit
    )


def submit_reward(run: Run, node: Node, at) -> dict:
    """Step 6: submit the stage's metrics. The reward is the mean over the node's own completions:
    external groups or a filter would bias it."""
    metrics = stage_metrics(run, node, at)  # now and then with a held-out evaluation
    submitted = run.store.publish("rewards", node.id, at, metrics)  # or what stands there already
    node.total_reward += submitted["reward"] or 0.0
    return metrics


def next_round(run: Run) -> int | None:
    """Enter the round to work on now and return it, None after the last one. A coordinator opens
    rounds. While none is alive, a process that has finished opens the next round by entering it: at
    once, or after 2 s if there ever was a coordinator. Who was away or slow goes on with the newest
    open round. Only where no other node ever registered are the rounds since a checkpoint repeated.
    """
    own = run.last_round + 1
    if own >= run.config.MAX_ROUNDS:
        return None
    t = coordinator.wait_for_round(run, own)
    enter_round(run, own, t)
    return t if t < run.config.MAX_ROUNDS else None


# ==== The heart ends here. Below: peers' files, rounds, metrics, settings, checkpoints, starting ==

# -------- What was read of the peers' groups ------------------------------------------------------

MAX_VERIFY_SECONDS_PER_PEER = 20.0  # in each draw; a peer can send text that is slow to score


@dataclass
class Peers:
    """What this process knows of the peers' groups, for all its nodes."""

    # (node, At) -> the groups of this rollout file, structure checked.
    fetched: dict = field(default_factory=dict)
    # Key of an external group -> its Group, or the reason why it cannot be used.
    verified: dict = field(default_factory=dict)
    # Node of this process -> unusable files and groups that it met in this stage.
    num_rejected: Counter = field(default_factory=Counter)
    # Seconds left in this round's budget for waiting on peers.
    seconds_to_wait: float = 0.0


class Rejected(ValueError):
    """A peer's group that cannot be used. The text says why."""


def wait_a_moment(run: Run, late: set, at) -> bool:
    """Sleep until the next look at the board, with a sign of life. False if no more waiting is
    allowed: the budget of this round is used up, which is said, a later round is open, or the
    process is to stop."""
    is_over = run.member.board.open_round > at.round or run.signals.requested
    if is_over or at.stage not in run.config.publishing_stages:
        return False
    if run.peers.seconds_to_wait <= 0:
        names = coordinator.join_names(sorted(late), 3)
        text = f"round {at.round}: {names} did not publish in time (FETCH_TIMEOUT_SECONDS)"
        run.log.once("wait", text)
        return False
    run.member.beat()
    run.peers.seconds_to_wait -= run.member.sleep()
    return True


def arrived(run: Run, node: Node, late: set, at) -> set:
    """Those whose rollouts are there: the marker, and the file, which arrives later on some
    storages."""
    marked = late.intersection(run.member.board.reached("rollouts", at))
    return {peer for peer in marked if fetch_groups(run, node, peer, at) is not None}


def fetch_groups(run: Run, node: Node, peer: str, at) -> list[dict] | None:
    """The groups of a peer's file, [] if it cannot be used, None if there is no file."""
    fetched = run.peers.fetched
    if fetched.get((peer, at)) is None and at.stage in run.config.publishing_stages:
        try:
            fetched[peer, at] = run.store.fetch_rollouts(peer, at)
        except drive_store.InvalidFileError as error:
            fetched[peer, at] = []
            reject(run, node, peer, error)
    return fetched.get((peer, at))


def reject(run: Run, node: Node, peer: str, reason) -> None:
    """Count an unusable file or group, and log each (peer, reason) once."""
    run.peers.num_rejected[node.id] += 1
    run.log.once("reject", f"{peer}: {reason}")


def verify_all(run: Run, node: Node, peer: str, records: list[dict]) -> "list[grpo.Group]":
    """`verify` for a peer's groups, without those that are rejected. The other nodes of this
    process get the same results."""
    groups = []
    verified = run.peers.verified
    started = time.thread_time()  # computing time; waiting does not count
    for record in records:
        # Once a peer's time is used up, the rest of its groups is rejected for good.
        key = record["key"]
        if key not in verified:
            try:
                if time.thread_time() - started > MAX_VERIFY_SECONDS_PER_PEER:
                    raise Rejected("too slow to verify")
                verified[key] = verify(run, record)
            except (Rejected, grpo.QuestionError) as error:
                verified[key] = str(error)
        if isinstance(verified[key], str):
            reject(run, node, peer, verified[key])
        else:
            groups.append(verified[key])
    return groups


def checked_question(run: Run, record: dict) -> "grpo.Question":
    """The question of a peer's group, made again. It must be one that this node could have drawn
    itself, and the file's prompt must equal it."""
    if record["task"] not in run.config.tasks:
        raise Rejected("its task is not one of this experiment's")
    if record["seed"] in grpo.HELD_OUT_SEEDS:
        raise Rejected("its question is held-out")
    question = grpo.make_question(record["task"], record["seed"])
    if record["prompt"] != question.text:
        raise Rejected("its prompt differs from the question")
    return question


def checked_ids(
    codec, prompt: list[int], texts: list[str], finished: list[bool]
) -> list[list[int]]:
    """Completions encoded with this model's tokenizer. They must be what it could have written."""
    # At most twice MAX_NEW_TOKENS of this model's tokens: the peer's tokenizer may need fewer.
    longest = min(codec.max_completion, codec.positions - len(prompt))
    if any(len(text) > codec.longest_token * longest for text in texts):
        raise Rejected("a completion is too long")
    completions = codec.encode_completions(texts, finished)
    for ids in completions:
        if not 1 <= len(ids) <= longest:
            raise Rejected(f"a completion is empty or over {longest} tokens here")
        if max(ids) >= codec.vocabulary or not codec.eos_ids.isdisjoint(ids[:-1]):
            raise Rejected("a completion contains a token that this model would not write there")
    return completions


def informative_first(groups: "list[grpo.Group]") -> "list[grpo.Group]":
    """With LOCAL_OVERSAMPLE there are more than I own groups."""
    return sorted(groups, key=lambda group: not group.is_informative)


# -------- Rounds ----------------------------------------------------------------------------------


def enter_round(run: Run, own: int, t: int) -> None:
    """Say that all nodes of this process work on round t now, although `own` may have been next."""
    if t > own:
        end = min(t, run.config.MAX_ROUNDS)
        text = f"rounds {own} to {end - 1} were opened by the swarm meanwhile; going on with {end}"
        if run.log.history:
            helps = "raise COORDINATOR_ROUND_INTERVAL or STALE_AFTER_SECONDS"
            if drive_store.COORDINATOR_ID not in run.member.board.sessions:
                helps = "start a coordinator with ROUND_ADVANCE=completion"
            text += f"; if steps are slow, {helps}"
        run.log.event("skip", text)
        # After a kill: add the rewards that a node had submitted in rounds that it now skips.
        for node in run.nodes:
            submitted = run.store.list_stages("rewards", node.id)
            for at in [at for at in submitted if own <= at.round < end]:
                row = run.store.read_reward(node.id, at) or {}
                node.total_reward += row.get("reward") or 0.0
    if t < run.config.MAX_ROUNDS:
        for node in run.nodes:
            run.store.move_marker("open", node.id, drive_store.At(t))
    run.peers.seconds_to_wait = run.config.FETCH_TIMEOUT_SECONDS


def finish_round(run: Run, t: int) -> None:
    """Log the round, write a checkpoint if one is due, and clean up."""
    config = run.config
    interval = config.CHECKPOINT_INTERVAL
    # A checkpoint is due if a multiple of its interval was passed, perhaps within skipped rounds.
    checkpoint_is_due = (run.last_round + 1) // interval < (t + 1) // interval
    run.last_round = t
    forget_old(run, t - config.ROLLOUT_MAX_AGE)

    # Flush first: rounds before a checkpoint are never repeated, so their log rows must already be
    # on disk.
    log_round(run, t)
    run.log.flush(run.store)
    if checkpoint_is_due or t == config.MAX_ROUNDS - 1:
        save_checkpoint(run)

    # Delete or archive old rollouts. A resumed node repeats the rounds since its checkpoint, and
    # the oldest of these may draw from ROLLOUT_MAX_AGE rounds earlier.
    if config.ROLLOUT_CLEANUP_ENABLED:
        needed = interval + config.ROLLOUT_MAX_AGE
        oldest_kept = t + 1 - max(config.ROLLOUT_KEEP_LAST_N_ROUNDS, needed)
        for node in run.nodes:
            for name in run.store.prune_rollouts(node.id, oldest_kept, config.ROLLOUT_ARCHIVE_OLD):
                run.log.once("retention", f"{node.id}/rollouts/{name} stays: it cannot be moved")


def forget_old(run: Run, oldest: int) -> None:
    """Forget what no later round draws from. A file that could not be used is read again."""
    peers = run.peers
    fetched = peers.fetched.items()
    peers.fetched = {file: groups for file, groups in fetched if groups and file[1].round >= oldest}
    peers.verified = {key: group for key, group in peers.verified.items() if key[0] >= oldest}
    for node in run.nodes:
        node.used_external = {key for key in node.used_external if key[0] >= oldest}


# -------- What the steps write and log ------------------------------------------------------------

SAMPLE_INTERVAL = 20  # rounds between two samples of what the model answers


def timed(step, name: str):
    """A step of `train`, the seconds of which become the metric `name`."""

    def timed_step(run: Run, node: Node, *args):
        started = time.monotonic()
        result = step(run, node, *args)
        run.log.seconds[node.id][name] = time.monotonic() - started
        return result

    return timed_step


def logged(step):
    """Step 6, the metrics of which are logged."""
    return lambda run, node, at: log_metrics(run, node, at, step(run, node, at))


generate_groups = timed(generate_groups, "generate_seconds")
sample_external = timed(sample_external, "wait_seconds")
policy_gradient = timed(policy_gradient, "train_seconds")
submit_reward = logged(submit_reward)


def stage_metrics(run: Run, node: Node, at) -> dict:
    """A finished stage in numbers, every EVAL_INTERVAL rounds with the held-out accuracy."""
    config = run.config
    metrics = generation_metrics(node.groups) | external_metrics(run, node, at)
    metrics |= update_metrics(run, node) | run.log.seconds[node.id]
    is_last_stage = at.stage == config.MAX_STAGES - 1
    if config.EVAL_INTERVAL and (at.round + 1) % config.EVAL_INTERVAL == 0 and is_last_stage:
        metrics["held_out"] = held_out_accuracy(run, node, at.round)
    return metrics


def held_out_accuracy(run: Run, node: Node, t: int) -> float:
    """Mean reward of one answer (pass@1 with REWARD=exact) to each of EVAL_SAMPLES questions with
    reserved seeds, the same for all nodes."""
    start = drive_store.At(0)
    indices = range(run.config.EVAL_SAMPLES)
    seeds = [derive_seed(run.config, "", start, "held-out", i) for i in indices]
    questions = make_questions(run, [grpo.HELD_OUT_SEEDS.start + seed for seed in seeds])
    seed = derive_seed(run.config, node.id, drive_store.At(t), "evaluate")
    return mean_reward(answer_questions(run, node, questions, 1, seed))


def evaluate(run: Run, when: str) -> None:
    """With EVAL_INTERVAL: the held-out accuracy "before training" or "after training", for an event
    and for the card of the model. A resumed run does not repeat it."""
    for node in run.nodes if run.config.EVAL_INTERVAL else ():
        if when not in node.held_out:
            node.held_out[when] = held_out_accuracy(run, node, run.last_round)
            run.log.event("held-out", f"{node.id} {when}: {node.held_out[when]:.2f}")


def collect(groups: "list[grpo.Group]", name: str) -> list:
    """The rewards, texts … of all completions of these groups."""
    return [value for group in groups for value in getattr(group, name)]


def mean_reward(groups: "list[grpo.Group]") -> float | None:
    """Mean reward of all completions of these groups. None if there are no groups."""
    return coordinator.mean(collect(groups, "rewards"))


def generation_metrics(groups: "list[grpo.Group]") -> dict:
    """Step 2 in numbers: reward, and what can explain a flat learning curve."""
    lengths = [len(ids) for ids in collect(groups, "completions")]
    answers = [grpo.extract_tagged_answer(text) for text in collect(groups, "texts")]
    by_task = {}
    for group in groups:
        task = re.sub(r"\W+", "_", group.question.task)[:30]  # a plain name for the column
        by_task.setdefault(f"reward_{task}", []).append(group)

    metrics = {
        "reward": mean_reward(groups),
        "groups": len(groups),
        "completions": len(lengths),
        "informative_local": sum(group.is_informative for group in groups),
        "answer_tag_rate": coordinator.mean(answer is not None for answer in answers),
        "truncated_rate": coordinator.mean(not end for end in collect(groups, "finished")),
        "mean_length": coordinator.mean(lengths),
        "generated_tokens": sum(lengths),
    }
    return metrics | {name: mean_reward(of_task) for name, of_task in by_task.items()}


def rollout_file(config: "Config", rollouts: dict) -> dict:
    """The contents of a rollout file. `DriveStore.publish` adds peer_id, round and stage."""
    return {
        "format": drive_store.ROLLOUT_FORMAT_VERSION,
        "model": config.MODEL_NAME,
        "reasoning_gym": grpo.REASONING_GYM_VERSION,
        "tasks": grpo.task_hash(),
        "rollouts": rollouts,
    }


def external_metrics(run: Run, node: Node, at) -> dict:
    """Step 4 in numbers: how many groups are missing, and how old the newest file of a peer is."""
    config = run.config
    board = run.member.board
    peers = set(board.reached("rollouts", drive_store.At(0))) - set(config.node_ids)
    ages = [max(0, at.round - board.progress["rollouts", peer].round) for peer in peers]
    metrics = {
        "external_pool": len(node.candidates),
        "rejected": run.peers.num_rejected.pop(node.id, 0),
        "external_short": config.NUM_TRANSPLANT_TREES - len(node.external),
        "newest_file_age": min(ages, default=None),
    }
    if config.NUM_TRANSPLANT_TREES > 0:
        metrics["external_peers"] = len(choose_peers(run, node, at, board.reached("rollouts", at)))
    return metrics


def update_metrics(run: Run, node: Node) -> dict:
    """Step 5 in numbers, among them how likely own and external completions were."""
    metrics = grpo.update_numbers(node.rows, node.steps, run.config)
    if node.rows and len(node.steps) < run.config.NUM_ITERATIONS:
        run.log.event("gradient", f"{node.id}: not finite, the rest of this update is skipped")
    logprobs = metrics.pop("logprobs")  # of the informative groups' completions, own ones first
    num_own = sum(row.group.key is None for row in node.rows)
    own = informative_first(node.groups)[: run.config.NUM_TRAIN_SAMPLES]
    return metrics | {
        "logp_own": coordinator.mean(logprobs[:num_own]),
        "logp_external": coordinator.mean(logprobs[num_own:]),
        "local_groups": len(own),
        "external_groups": len(node.external),
        "informative_groups": sum(group.is_informative for group in own + node.external),
    }


def log_metrics(run: Run, node: Node, at, metrics: dict) -> None:
    """Queue the row of a stage for metrics.jsonl."""
    row = {
        "timestamp": time.time(),
        "round": at.round,
        "stage": at.stage,
        "node_id": node.id,
        **metrics,
        "experiment": run.config.EXPERIMENT_NAME,
        "my_reward": metrics["reward"],
        "total_reward": node.total_reward,
        "teachers": [[group.key[2], group.question.task] for group in node.external],
        "external_ages": [at.round - group.key[0] for group in node.external],
    }
    run.log.queue(f"nodes/{node.id}/logs/metrics.jsonl", json.dumps(row))
    run.log.history.append(row)


def log_round(run: Run, t: int) -> None:
    """Log the line of a round, as means over its stages and the nodes of this process. A hint
    follows if ten rounds gave no signal, and every 20 rounds what the model answers."""
    config = run.config
    run.log.round_ends.append(time.monotonic())

    # The line.
    log = run.log
    rows = log.history[-len(run.nodes) * config.MAX_STAGES :]
    name = run.nodes[0].id if len(run.nodes) == 1 else f"{len(run.nodes)} nodes"
    log.info(f"{name} " + coordinator.format_round(t, config.MAX_ROUNDS, rows, log.round_ends))
    log.bar.update(t + 1 - log.bar.n)

    # What may be wrong, and now and then what the model says.
    recent = log.history[-10 * len(rows) :]
    if len(log.round_ends) % 10 == 0 and not coordinator.has_signal(recent):
        log.event("no signal", coordinator.diagnose(recent))
    if (t + 1) % SAMPLE_INTERVAL == 0 and t < config.MAX_ROUNDS - 1:
        log_samples(run)


def sample_answers(run: Run) -> list[dict]:
    """Ask the first node two questions, always the same ones, three times each."""
    start = drive_store.At(0)
    seeds = [derive_seed(run.config, "", start, "sample", i) for i in range(2)]
    questions = make_questions(run, seeds)
    seed = derive_seed(run.config, "", start, "sampled")
    groups = answer_questions(run, run.nodes[0], questions, 3, seed)
    return [shared_form(group) for group in groups]


def log_samples(run: Run, is_last: bool = False) -> None:
    """Print what the model answers now; after the last round beside what it answered before any."""
    for before, now in zip(run.log.initial_samples, sample_answers(run), strict=True):
        lines = coordinator.format_question(now)
        if is_last:
            lines += coordinator.format_completions(before, "before  ")
        lines += coordinator.format_completions(now, "now     " if is_last else "")
        run.log.info("\n".join(lines))


# -------- Settings --------------------------------------------------------------------------------


class ConfigError(ValueError):
    """Settings that cannot be used. The text names each variable, what was found and what is
    allowed."""


def setting(default, help: str, allowed=None, scope="node", **columns):
    """One row of the table.

    default: of a real model. tiny, test, tiny_test: in its place for the embedded model, with
    TEST_MODE, and for both together.
    allowed: a tuple of words, or a range (lowest, highest).
    scope: whose setting it is. A joining node takes those of the "swarm" from the experiment, those
    of the "model" if its MODEL_NAME is the same, and never those of a "node".
    agree: no node may set another value than the experiment's.
    """
    columns |= {"help": help, "allowed": allowed, "scope": scope}
    return field(default=default, metadata=columns)


# fmt: off
@dataclass(frozen=True, repr=False)  # a repr would show the access token in tracebacks
class Config:
    """All environment variables. A new one is one row."""

    GDRIVE_PATH: str = setting("auto",
        "the shared folder; auto: rl-swarm in MyDrive if it is mounted, else ./rl-swarm")
    EXPERIMENT_NAME: str = setting("default",
        "one experiment is one subfolder, isolated from all others")
    NODE_ROLE: str = setting("worker",
        "worker trains; coordinator opens rounds; auto: coordinator if the rank is 0; prepare "
        "loads and checks the model and makes the warm start; monitor, report, validate read",
        ("worker", "coordinator", "auto", "prepare", "monitor", "report", "validate"))
    NODE_ID: str = setting("auto",
        "unique name; auto: node_<rank or 8 hex digits>, or node if LOCAL_NODES > 1")
    LOCAL_NODES: int = setting(1, "workers in this process, named NODE_ID_0, NODE_ID_1 …", (1, 256))
    SEED: int = setting(42,
        "the swarm's seed; nodes differ by NODE_ID", (0, 2**31), "swarm", agree=True)
    TEST_MODE: bool = setting(False,
        "quick check: 3 rounds, I = 4, J = 2, G = 4, tiny, a short warm start; with another "
        "model the eight small tasks, 32 tokens and 30 warm-start steps")
    MAX_ROUNDS: int = setting(2000, "rounds to train", (1, 10**6), "swarm", test=3)
    MAX_STAGES: int = setting(1,
        "generate-share-update stages in a round", (1, 100), "swarm", agree=True)
    MODEL_NAME: str = setting("auto",
        "tiny, a Hugging Face id or a folder; auto: what fits the machine")
    TASKS: str = setting(",".join(grpo.PAPER_TASKS),
        "comma list, also file:mine.jsonl; auto: the paper's nine, for tiny its eight small ones",
        None, "swarm",
        agree=True, tiny=",".join(grpo.TINY_TASKS), test=",".join(grpo.TINY_TASKS))
    NUM_SHOTS: int = setting(2,
        "solved examples if there is no chat template", (0, 16), "model", tiny=0)
    WARM_START_STEPS: int = setting(0,
        "supervised steps before GRPO", (0, 10**6), "model", tiny=1750, test=30, tiny_test=150)
    ANSWER_TAG_SHARE: float = setting(0.02,
        "share of the rewarded form at the end of tiny's warm start", (0, 1), "model", test=0.9)
    REWARD: str = setting("exact",
        "exact: 1 for a right answer, else 0; verifier: reasoning-gym's own score, which pays a "
        "little for near misses", ("exact", "verifier"), "swarm", agree=True)
    NUM_TRAIN_SAMPLES: int = setting(8,
        "I: own questions per round and stage; 0: learn from peers' groups alone",
        (0, 4096), "swarm", test=4)
    NUM_TRANSPLANT_TREES: int = setting(0,
        "J: groups of peers per round and stage; 0: plain GRPO", (0, 4096), "swarm", test=2)
    NUM_GENERATIONS: int = setting(8, "G: completions per question", (2, 64), "swarm", test=4)
    TEMPERATURE: float = setting(1.0,
        "of sampling, and of the log-probabilities in the loss", (0.01, 100), "model")
    MAX_NEW_TOKENS: int = setting(256,
        "longest completion", (1, 32768), "model", tiny=10, test=32, tiny_test=10)
    EXTERNAL_FILTER: bool = setting(True,
        "draw only informative groups of peers", None, "swarm")
    LOCAL_OVERSAMPLE: int = setting(1,
        "k: generate k x I groups, train on I, informative ones first", (1, 64), "swarm")
    LEARNING_RATE: float = setting(1e-6, "of AdamW", (0, 1), "model", tiny=6e-4)
    CLIP_LOW: float = setting(0.2, "the ratio is clipped below at 1 - this", (0, 1), "model")
    CLIP_HIGH: float = setting(0.28, "the ratio is clipped above at 1 + this", (0, 10), "model")
    NUM_ITERATIONS: int = setting(1,
        "optimizer steps on the completions of one stage", (1, 100), "model")
    LOSS_TYPE: str = setting("dapo",
        "dapo: mean over tokens; grpo: over completions; dr_grpo: divide by MAX_NEW_TOKENS",
        ("dapo", "grpo", "dr_grpo"), "model")
    MICRO_BATCH_SIZE: int = setting("auto",
        "completions per forward pass; auto: by memory", (1, 65536))
    DTYPE: str = setting("auto",
        "type to compute in; auto: bfloat16 if the hardware has it",
        ("float32", "bfloat16"), tiny="float32")
    DEVICE: str = setting("auto",
        "cuda, cuda:1, mps or cpu; auto: the first that is present")
    COORDINATOR_ROUND_INTERVAL: float = setting(60.0,
        "seconds after which a round may end (ROUND_ADVANCE)", (0.01, 86400), "swarm")
    ROUND_ADVANCE: str = setting("hybrid",
        "a round ends: time: after the interval; completion: when all live workers have "
        "submitted; hybrid: at the first of both", ("time", "completion", "hybrid"), "swarm")
    ROLLOUT_PUBLISH_FREQUENCY: str = setting("stage",
        "stage: publish after every stage; round: once, after the last stage of a round; "
        "generation: means stage", ("stage", "round", "generation"), "swarm")
    ROLLOUT_MAX_AGE: int = setting(4,
        "how many rounds back groups of peers may come from", (0, 1000), "swarm")
    FETCH_MAX_PEERS: int = setting(10,
        "peers to read in one draw, for each age; others are chosen every five rounds", (1, 1000))
    FETCH_TIMEOUT_SECONDS: float = setting(30.0,
        "longest wait for peers' rollouts in a round", (0, 3600))
    STALE_AFTER_SECONDS: float = setting(300.0,
        "silence after which a node counts as dead", (1, 86400))
    ROLLOUT_CLEANUP_ENABLED: bool = setting(False, "remove old rollouts", None, "swarm")
    ROLLOUT_KEEP_LAST_N_ROUNDS: int = setting(10,
        "rounds of rollouts to keep, at least CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE",
        (1, 10**6), "swarm")
    ROLLOUT_ARCHIVE_OLD: bool = setting(False,
        "move old rollouts to archives/ instead of deleting them", None, "swarm")
    CHECKPOINT_INTERVAL: int = setting(10, "rounds between checkpoints", (1, 10**6), "swarm")
    CHECKPOINT_KEEP: int = setting(2, "checkpoints to keep", (1, 1000))
    EVAL_INTERVAL: int = setting(0,
        "rounds between held-out evaluations (pass@1); 0: none", (0, 10**6))
    EVAL_SAMPLES: int = setting(64,
        "held-out questions, with seeds that no node trains on", (1, 65536))
    HUGGINGFACE_ACCESS_TOKEN: str = setting("", "push the final models to the Hub; never shown")
    HF_REPO: str = setting("",
        "the repository, -<node> is appended; unset: the experiment's name")
    NUM_WORKERS: int = setting(0,
        "workers that run_swarm.sh starts (4 if unset); other processes wait for this many "
        "before the first round, one interval at most", (0, 10**4))
    CONFIGS: str = setting("", "for run_swarm.sh: I/J pairs to compare, such as 8/0 4/4")
    SEEDS: str = setting("", "for run_swarm.sh: seeds to compare them over")

    @property
    def node_ids(self) -> list[str]:
        """Names of this process's nodes."""
        if self.LOCAL_NODES == 1 or self.NODE_ROLE == "coordinator":
            return [self.NODE_ID]
        return [f"{self.NODE_ID}_{i}" for i in range(self.LOCAL_NODES)]

    @property
    def tasks(self) -> list[str]:
        """The tasks that questions are drawn from."""
        return self.TASKS.split(",")

    @property
    def publishing_stages(self) -> range:
        """Stages of a round in which rollouts are published."""
        is_last_only = self.ROLLOUT_PUBLISH_FREQUENCY == "round"
        return range(self.MAX_STAGES)[-1 if is_last_only else 0 :]

    @property
    def num_questions(self) -> int:
        """I, or k x I with LOCAL_OVERSAMPLE = k."""
        return self.NUM_TRAIN_SAMPLES * self.LOCAL_OVERSAMPLE

    @property
    def max_groups_per_peer(self) -> int:
        """A peer's fair share of a draw: I, or J if this node generates nothing itself."""
        return self.NUM_TRAIN_SAMPLES or self.NUM_TRANSPLANT_TREES
# fmt: on


TABLE = {row.name: row for row in fields(Config)}
SECRET = "HUGGINGFACE_ACCESS_TOKEN"
DEFAULT_MODEL = "Gensyn/Qwen2.5-0.5B-Instruct"
DEFAULT_MODEL_GB = 10  # weights, gradients, Adam and activations of one node
RANK_VARIABLES = ("SLURM_PROCID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK", "RANK")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")


def read_environment(environ) -> tuple[dict, list[str]]:
    """Environment -> ({name: value} of the variables that are set, warnings).

    Role, name and shared folder are worked out here, because they depend on the machine. All
    mistakes are reported in one ConfigError.
    """
    mistakes = []
    env = parse_settings(environ, mistakes)
    warnings = check_names(environ, env, mistakes)
    choose_role_and_name(environ, env, mistakes, warnings)

    # Names become parts of paths. The report takes a pattern of experiments instead of a name.
    last_id = Config(**env).node_ids[-1]
    experiment = "-" if env["NODE_ROLE"] == "report" else env.get("EXPERIMENT_NAME", "-")
    for name, value in (("EXPERIMENT_NAME", experiment), ("NODE_ID", last_id)):
        if not drive_store.is_safe_name(value):
            allowed = "1 to 64 letters, digits, '.', '_', '-', no '.' at either end"
            mistakes.append(f"{name}={value!r}: use {allowed}")

    # The shared folder: in a mounted Google Drive, or here. Its parent must exist: a missing one
    # means a drive that is not mounted.
    if "GDRIVE_PATH" not in env:
        env["GDRIVE_PATH"] = drive_store.default_root()
        if env["GDRIVE_PATH"] == "rl-swarm" and environ.get("COLAB_RELEASE_TAG"):
            advice = "from google.colab import drive; drive.mount('/content/drive')"
            warnings.append(f"no Google Drive is mounted: all is lost with this session; {advice}")
    for name in ("GDRIVE_PATH", "MODEL_NAME"):
        if env.get(name, "").startswith("~"):
            env[name] = os.path.expanduser(env[name])

    folder = Path(env["GDRIVE_PATH"]).absolute()
    if not os.path.isdir(folder.parent):
        mistakes.append(f"GDRIVE_PATH={str(folder)!r}: its parent directory does not exist")
    elif os.path.isfile(folder):
        mistakes.append(f"GDRIVE_PATH={str(folder)!r}: it is no folder")

    # All settings but the token may be written to files that peers read.
    for name, value in env.items():
        if name != SECRET and env.get(SECRET) and env[SECRET] in str(value):
            mistakes.append(f"{name}: it contains the token of {SECRET}, which is never written")

    if mistakes:
        raise ConfigError("these settings cannot be used:\n  " + "\n  ".join(mistakes + warnings))
    return env, warnings


def parse_settings(values, mistakes: list[str], where: str = "") -> dict:
    """{name: value} of the settings in an environment or in config.json, "auto" left out.

    A setting that cannot be parsed is left out and described in `mistakes`, with `where`.
    """
    parsed = {}
    for name, row in TABLE.items():
        text = str(values.get(name, "")).strip()
        is_auto = text == "auto" and name != "NODE_ROLE"
        if not text or is_auto or (name == SECRET and text == "None"):
            continue
        try:
            parsed[name] = parse_value(row, text)
        except ValueError as error:
            mistakes.append(f"{name}={drive_store.printable(repr(text))}{where}: {error}")

    if "TASKS" in parsed:
        tasks = split_tasks(parsed["TASKS"])
        refused = []
        for task in tasks:
            try:
                grpo.task_name(task, may_read_files=not where)
            except ValueError as error:
                refused.append(f"TASKS{where}: {error}")
        mistakes += refused[:5]
    return parsed


def split_tasks(text: str) -> list[str]:
    """The tasks of a comma list. Quotes hold a path together, as in CSV: '"file:a, b.txt",gcd'."""
    return [task.strip() for task in next(csv.reader([text], skipinitialspace=True), [])]


def parse_value(row, text: str):
    """The text of one variable -> its value. Raises ValueError that says what is allowed."""
    allowed = row.metadata["allowed"]
    if row.type is bool:  # never bool(text): bool("False") is True
        if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise ValueError("expected True or False")
        return text.lower() in ("1", "true", "yes", "on")
    if row.type is str:
        if allowed and text not in allowed:
            raise ValueError(f"expected {', '.join(allowed)}")
        return text

    with contextlib.suppress(ValueError):
        value = row.type(text)
        if allowed[0] <= value <= allowed[1]:  # False for nan
            return value
    kind = "an integer" if row.type is int else "a number"
    raise ValueError(f"expected {kind} from {allowed[0]} to {allowed[1]}")


def check_names(environ, env: dict, mistakes: list[str]) -> list[str]:
    """Warnings about variables whose names are nearly those of a setting.

    A near miss of EXPERIMENT_NAME or GDRIVE_PATH is a mistake, because the run would go to another
    place.
    """
    warnings = []
    for name in sorted(set(environ) - set(TABLE)):
        for intended in difflib.get_close_matches(name.upper(), TABLE, n=1, cutoff=0.88):
            text = f"{name} is not a variable of this program: did you mean {intended}?"
            is_fatal = intended in ("EXPERIMENT_NAME", "GDRIVE_PATH") and intended not in env
            (mistakes if is_fatal else warnings).append(text)
    return warnings


def choose_role_and_name(environ, env: dict, mistakes: list[str], warnings: list[str]) -> None:
    """Set NODE_ROLE and NODE_ID. An engine's rank makes both, so that a restarted task gets the
    same ones again; its local rank chooses the GPU."""
    # SLURM_PROCID counts in a job step only (the "step" of an interactive shell has ten digits): in
    # every interactive shell it is 0.
    in_job_step = 0 < len(environ.get("SLURM_STEP_ID", "")) < 10
    names = RANK_VARIABLES if in_job_step else RANK_VARIABLES[1:]
    rank = next((environ[name] for name in names if environ.get(name, "").isdecimal()), None)
    if env.setdefault("NODE_ROLE", "worker") == "auto":
        env["NODE_ROLE"] = "coordinator" if rank == "0" else "worker"

    # Of several GPUs each process on a machine takes its own.
    gpus = [name for name in grpo.available_devices() if ":" in name]
    local = [environ[name] for name in LOCAL_RANK_VARIABLES if environ.get(name, "").isdecimal()]
    if local and len(gpus) > 1:
        env.setdefault("DEVICE", gpus[int(local[0]) % len(gpus)])

    # Without a rank the name is made up, and the line that resumes the node tells it.
    made_up = "node" if env.get("LOCAL_NODES", 1) > 1 else f"node_{secrets.token_hex(4)}"
    env.setdefault("NODE_ID", f"node_{rank}" if rank else made_up)
    if env["NODE_ROLE"] == "coordinator":
        if environ.get("NODE_ID", "").strip() not in ("", "auto", drive_store.COORDINATOR_ID):
            warnings.append("NODE_ID is not used: a coordinator is always called coordinator")
        env["NODE_ID"] = drive_store.COORDINATOR_ID
    elif env["NODE_ID"].lower() == drive_store.COORDINATOR_ID:
        mistakes.append(f"NODE_ID={env['NODE_ID']!r}: this is the coordinator's name")


def resolve_config(env: dict, saved: dict, notes: list[str]) -> Config:
    """Environment and config.json -> a Config without "auto".

    The first that is set counts: environment, the experiment (see `setting`), the defaults of
    TEST_MODE and of tiny, the default. notes: sentences for the user are appended. Raises
    ConfigError if the experiment disagrees or holds a setting that cannot be used.
    """
    mistakes = []
    if "TASKS" in env:
        names = [grpo.task_name(task, True) for task in split_tasks(env["TASKS"])]
        env = {**env, "TASKS": ",".join(names)}
    saved = parse_settings(saved, mistakes, where=" (in config.json)")
    model, device = choose_model(env, saved, notes)
    is_tiny = model == "tiny"
    is_test = env.get("TEST_MODE", False)

    values = {}
    inherited = []
    for name, row in TABLE.items():
        # The default of this machine and this mode.
        columns = row.metadata
        defaults = [
            columns.get("tiny_test") if is_tiny and is_test else None,
            columns.get("test") if is_test else None,
            columns.get("tiny") if is_tiny else None,
            row.default,
        ]
        default = next(value for value in defaults if value is not None)

        # The experiment's value, where this node inherits it.
        is_same_model = columns["scope"] == "model" and saved.get("MODEL_NAME") == model
        if columns["scope"] == "swarm" or is_same_model:
            known = saved.get(name, default)
            if name not in env and known != default:
                inherited.append(f"{name}={known}")
            default = known

        values[name] = env.get(name, default)
        if columns.get("agree") and values[name] != saved.get(name, values[name]):
            mistakes.append(f"{name}={values[name]!r}: the experiment has {saved[name]!r}")
    if values["NUM_TRAIN_SAMPLES"] + values["NUM_TRANSPLANT_TREES"] == 0:
        mistakes.append("NUM_TRAIN_SAMPLES=0 needs NUM_TRANSPLANT_TREES: nothing to train on")
    if mistakes:
        listed = "\n  ".join(mistakes)
        folder = f"{env['GDRIVE_PATH']}/experiments/{env.get('EXPERIMENT_NAME', 'default')}"
        anew = f"another EXPERIMENT_NAME or, if nothing was trained there, delete {folder}"
        raise ConfigError(f"change this, or take {anew}:\n  {listed}")

    if inherited:
        notes.append("from the experiment: " + " ".join(inherited))
    if values["DTYPE"] == "auto":
        values["DTYPE"] = grpo.available_devices()[device]
    return Config(**values | {"MODEL_NAME": model, "DEVICE": device})


def choose_model(env: dict, saved: dict, notes: list[str]) -> tuple[str, str]:
    """MODEL_NAME and DEVICE, "auto" replaced by what fits the machine."""
    devices = grpo.available_devices()
    device = env.get("DEVICE", next(iter(devices)))
    if device not in devices:
        raise ConfigError(f"DEVICE={device!r}: this machine has {', '.join(devices)}")
    if "MODEL_NAME" in env or env.get("TEST_MODE") or saved.get("MODEL_NAME") == "tiny":
        return env.get("MODEL_NAME", "tiny"), device

    needed = DEFAULT_MODEL_GB * env.get("LOCAL_NODES", 1) * num_sharers(env.get("NUM_WORKERS", 1))
    fits = device != "cpu" and grpo.available_memory(device) / 1e9 > needed
    model = DEFAULT_MODEL if fits else "tiny"
    if env["NODE_ROLE"] in ("worker", "prepare"):
        reason = f"{DEFAULT_MODEL} needs an accelerator with {needed} GB"
        notes.append(f"MODEL_NAME=auto takes {model}: {reason}")
    return model, device


def num_sharers(num_workers: int) -> int:
    """How many processes share a device, if so many workers run on this machine."""
    gpus = [name for name in grpo.available_devices() if ":" in name]
    return max(1, math.ceil(num_workers / max(1, len(gpus))))


def saved_settings(config: Config) -> dict:
    """What config.json holds: the settings of the swarm and the model, and what readers need."""
    settings = {"layout": drive_store.LAYOUT, "maker": config.node_ids[0]}
    settings |= {"reasoning_gym": grpo.REASONING_GYM_VERSION, "created_at": time.time()}
    for_readers = ("EXPERIMENT_NAME", "MODEL_NAME", "LOCAL_NODES", "NUM_WORKERS")
    for name, row in TABLE.items():
        if row.metadata["scope"] != "node" or name in for_readers:
            settings[name] = getattr(config, name)
    return settings


def help_text() -> str:
    """All variables with their defaults, as `python sapo.py --help` prints them."""
    lines = ["usage: NAME=value … python sapo.py      (settings are environment variables)", ""]
    for name, row in TABLE.items():
        text = row.metadata["help"]
        if "tiny" in row.metadata and name != "TASKS":
            text += f"; for tiny {row.metadata['tiny']}"
        default = "auto" if name == "TASKS" else row.default
        head = f"  {name:27} {default!s:8.8} "
        lines += textwrap.wrap(text, 100, initial_indent=head, subsequent_indent=" " * len(head))
    lines += [
        "",
        "examples:",
        "  EXPERIMENT_NAME=first NODE_ID=anna MODEL_NAME=tiny MAX_ROUNDS=60 python sapo.py",
        "  EXPERIMENT_NAME=first NODE_ROLE=monitor python sapo.py",
        "The manual is .github/MANUAL.md.",
    ]
    return "\n".join(lines)


def start_command(env: dict, **changes) -> str:
    """The command that starts a process with everything that was set but the access token."""
    if coordinator.in_notebook():
        return f"run this cell again (NODE_ID={env['NODE_ID']})"
    named = {"EXPERIMENT_NAME": "default", **env, **changes}
    named["GDRIVE_PATH"] = os.path.abspath(env["GDRIVE_PATH"])
    shown = {name: named[name] for name in named if name != SECRET and named[name] is not None}
    words = [f"{name}={shlex.quote(str(value))}" for name, value in shown.items()]
    return " ".join([*words, "python sapo.py"])


# -------- Checkpoints and export ------------------------------------------------------------------


# What a file of tensors raises that is damaged, or that is of another model.
UNUSABLE = (drive_store.InvalidFileError, grpo.SafetensorError)


def save_checkpoint(run: Run) -> None:
    """Save the state of all nodes after round `run.last_round` to one file, and delete all but the
    newest CHECKPOINT_KEEP of this process."""
    run.member.check_superseded()  # never replace what a newer process of this name has written
    config = run.config
    metadata = {"model_name": config.MODEL_NAME, "round": run.last_round, "nodes": {}}
    for node in run.nodes:
        saved = {"total_reward": node.total_reward, "trained": sorted(node.used_external)}
        metadata["nodes"][node.id] = saved | {"held_out": node.held_out}
    upload_tensors(
        run.store,
        checkpoint_path(config, run.last_round),
        grpo.training_state(run.nodes),
        json.dumps(metadata),
    )
    for node in run.nodes:  # proves to a later start that there must be one
        run.store.move_marker("checkpoint", node.id, drive_store.At(run.last_round))

    # Only those count that this process has written or read: a stranger's, or a damaged one, must
    # not push out its own.
    run.checkpoints.append(run.last_round)
    kept = run.checkpoints[-config.CHECKPOINT_KEEP :]
    for round_ in list_checkpoints(run):
        if len(kept) == config.CHECKPOINT_KEEP and round_ < kept[0]:
            run.store.delete(checkpoint_path(config, round_), frees_space=True)


def upload_tensors(store, path: str, tensors: dict, metadata: str) -> None:
    """Write tensors with a text to a file of the shared folder."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "tensors")
        grpo.save_tensors(tensors, metadata, local)
        store.upload(local, path)


@contextlib.contextmanager
def local_copy(store, path: str, tensors: dict):
    """A local copy of a file of the shared folder that holds tensors like these; None if there is
    no such file."""
    max_bytes = grpo.MAX_HEADER_BYTES + sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "tensors")
        yield local if store.download(path, local, max_bytes) else None


def checkpoint_path(config: Config, round_: int) -> str:
    """A process has one checkpoint for all its nodes, in the folder of the first."""
    return f"nodes/{config.node_ids[0]}/checkpoints/round_{round_:06d}.safetensors"


def list_checkpoints(run: Run) -> list[int]:
    """Rounds of this process's checkpoints, the newest first."""
    stages = run.store.list_stages("checkpoints", run.config.node_ids[0])
    return [at.round for at in reversed(stages)]


def load_latest_checkpoint(run: Run) -> None:
    """Load the newest readable checkpoint. Without any, training begins at round 0.

    Raises StoreError if there must be one that can be used: a node never starts over by accident.
    """
    # The newest that can be read.
    reason = ""
    for round_ in list_checkpoints(run):
        path = checkpoint_path(run.config, round_)
        try:
            if load_checkpoint(run, path, round_):
                run.last_round = round_
                run.checkpoints = [round_]
                run.log.event("resume", f"from the checkpoint after round {round_}")
                return
        except UNUSABLE as error:
            reason = f"{path} cannot be used ({drive_store.printable(error, 200)})"
            run.log.event("resume", f"{reason}; trying the one before")

    # A node that has run before says by a marker that it has written one.
    board = run.store.board()
    for node in run.nodes:
        is_missing = ("checkpoint", node.id) in board.progress
        if is_missing or (reason and node.id in board.sessions):
            text = f"{node.id} needs its checkpoint, but {reason or 'it is gone'}"
            advice = "restore it, or take another NODE_ID or EXPERIMENT_NAME. Nothing was changed"
            raise drive_store.StoreError(f"{text}; {advice}")


def load_checkpoint(run: Run, path: str, round_: int) -> bool:
    """Load a checkpoint into the nodes. Returns False if there is no such file, and raises one of
    UNUSABLE if anything in it does not fit.

    Hyperparameters come from the current settings, not from the file. A stranger may have written
    it: it is a safetensors file, so reading it runs no code.
    """
    tensors = grpo.training_state(run.nodes)
    with local_copy(run.store, path, tensors) as file:
        if file is None:
            return False

        # It must be of this model, of these nodes and of this round.
        text = grpo.read_metadata(file)
        model_name, saved_round, nodes = drive_store.parse_checkpoint(text.encode())
        if model_name != run.config.MODEL_NAME or nodes.keys() != {*run.config.node_ids}:
            made_with = f"MODEL_NAME={model_name} and nodes {coordinator.join_names(sorted(nodes))}"
            advice = "set these, or take another NODE_ID"
            raise drive_store.InvalidFileError(f"made with {made_with}: {advice}")
        if saved_round != round_:
            raise drive_store.InvalidFileError("of another round")

        grpo.load_tensors(file, tensors)
    for node in run.nodes:
        node.total_reward, node.used_external, node.held_out = nodes[node.id]
    return True


def export_models(run: Run) -> None:
    """Write each node's model as an ordinary Hugging Face folder, push it if there is a token, and
    say how to try it."""
    config = run.config
    for node in run.nodes:
        # An ordinary folder, with the tokenizer. The library may refuse what it has loaded.
        card = model_card(run, node)
        with tempfile.TemporaryDirectory() as folder:
            try:
                grpo.save_model(node.model, run.codec, card, folder)
            except Exception as error:
                run.log.queue_traceback(error)
                text = f"the model of {node.id} could not be written ({type(error).__name__})"
                run.log.event("export", f"{text}; its checkpoint is complete")
                return
            run.store.upload_model(Path(folder), f"nodes/{node.id}/model")
            if config.HUGGINGFACE_ACCESS_TOKEN:
                repo = f"{config.HF_REPO or config.EXPERIMENT_NAME}-{node.id}"
                push_model(run, repo, folder, str(run.store.dir / "nodes" / node.id / "model"))

    # A chat model is asked by turns, another one by the prompt that it was trained with.
    question = make_questions(run, [1])[0]
    prompt = [{"role": "user", "content": question.text}]
    if not run.codec.tokenizer.chat_template:
        prompt = run.codec.decode(run.codec.encode_prompt(question))
    folder = str((run.store.dir / "nodes" / run.nodes[0].id / "model").absolute())
    ask = f'pipeline("text-generation", {json.dumps(folder)})({json.dumps(prompt)})'
    code = f"from transformers import pipeline; print({ask})"
    run.log.info(f"final model: {folder}\n  try it: python -c {shlex.quote(code)}")


def push_model(run: Run, repo: str, folder: str, target: str) -> None:
    """Push a model to the Hub. A push that fails changes nothing else. target: where it lies."""
    try:
        hub = huggingface_hub.HfApi(token=run.config.HUGGINGFACE_ACCESS_TOKEN)
        repo_id = hub.create_repo(repo, private=True, exist_ok=True).repo_id
        hub.upload_folder(repo_id=repo_id, folder_path=folder)
        run.log.event("hub", f"pushed to {repo_id} (private, unless it was there before)")
    except Exception as error:  # its text may contain the token
        text = f"push failed ({type(error).__name__}), the run is complete; to push later:"
        run.log.event("hub", f"{text}\n  hf upload --private {repo} {shlex.quote(target)}")


def model_card(run: Run, node: Node) -> str:
    """The README.md of a final model, in the Hub's format."""
    config = run.config
    # The metadata that the Hub reads.
    head = {"library_name": "transformers", "tags": ["grpo", "sapo", "reasoning-gym"]}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", config.MODEL_NAME) and not os.path.exists(
        config.MODEL_NAME
    ):
        head["base_model"] = config.MODEL_NAME  # a folder's path says nothing elsewhere
    yaml = "\n".join(f"{name}: {json.dumps(value)}" for name, value in head.items())

    # For people.
    sharing = f"I = {config.NUM_TRAIN_SAMPLES} own questions and J = {config.NUM_TRANSPLANT_TREES}"
    held_out = ", ".join(f"{value:.2f} {when}" for when, value in node.held_out.items())
    lines = [
        f"---\n{yaml}\n---\n# {config.EXPERIMENT_NAME}-{node.id}\n",
        "Trained with SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721): GRPO on own and",
        "on peers' rollouts.\n",
        f"- rounds: {config.MAX_ROUNDS}, each with {sharing} groups of peers,",
        f"  G = {config.NUM_GENERATIONS} completions of a question",
        f"- tasks (reasoning-gym): {', '.join(config.tasks)}",
        f"- cumulative reward: {node.total_reward:.2f}",
        f"- held-out accuracy (pass@1): {held_out or 'not measured'}",
    ]
    return "\n".join(lines) + "\n"


# -------- Starting --------------------------------------------------------------------------------


def run_role(env: dict, notes: list[str], signals: "Signals") -> str:
    """Run a worker, the coordinator or prepare. Returns how it ended: "finished", "stopped" or
    "superseded". notes: what the user must be told first."""
    # The settings: of this process, and of the experiment if there is one.
    log = Log(Config(**env).node_ids[0], env.get(SECRET))
    node = "" if env["NODE_ROLE"] == "prepare" else log.node_id
    experiment = env.get("EXPERIMENT_NAME", "default")
    store = drive_store.DriveStore(env["GDRIVE_PATH"], experiment, node)
    store = drive_store.RetryingStore(store, log.event, signals)
    saved = store.load_config()
    config = resolve_config(env, saved or {}, notes)
    for note in notes:
        log.info(f"note: {note}")

    member = drive_store.Member(store, config.node_ids, config.STALE_AFTER_SECONDS)
    try:
        if config.NODE_ROLE == "prepare":
            model, codec = load_checked_model(config, log, signals)
            apply_warm_start(config, model, codec, store, log, signals)
            log.info(f"{config.MODEL_NAME} is ready")
            return "finished"
        if saved is None and config.NODE_ROLE == "coordinator":
            saved = wait_for_experiment(config, env, store, log, signals)
            config = resolve_config(env, saved, [])

        # Say where this process stands: new, joining, resuming or finished.
        if saved is not None:
            board = store.board()
            if is_finished(config, store, board):
                text = f"already finished, all {config.MAX_ROUNDS} rounds (MAX_ROUNDS)"
                log.info(f"{config.EXPERIMENT_NAME}: {text}; {RAISE_IT}")
                return "finished"
            log.info(f"{config.EXPERIMENT_NAME}: {experiment_state(config, saved, board)}")

        try:
            if config.NODE_ROLE == "coordinator":
                store.create_node(config.NODE_ID)
                coordinator.run_coordinator(config, member, log, signals)
            else:
                run_worker(config, env, member, log, signals, is_known=saved is not None)
            outcome = "finished"
        except drive_store.Stopped as stop:
            outcome = str(stop)
        end_process(member, log, outcome, env)
        return outcome
    except KeyboardInterrupt:  # while it starts, in an outage, or the second Ctrl-C
        log.bar.close()
        begun = "without a checkpoint; to go on"
        how = begun if member.session else "before the first round; to start"
        log.info(f"stopped {how}:\n  {start_command(env)}")
        return "stopped"
    except BaseException as error:  # sys.exit() and what else is no Exception leaves a record, too
        log.bar.close()
        record_failure(member, log, error)
        raise


def end_process(member, log: "Log", outcome: str, env: dict) -> None:
    """Say how this process ended, to people and to the swarm."""
    log.bar.close()
    if outcome == "superseded":
        log.event("end", "a newer session of this name runs; this one stops")
    else:
        member.beat("done" if outcome == "finished" else "stopped")
        for node in member.nodes:
            member.store.remove_leftovers(node)
    if outcome == "stopped":
        log.info(f"stopped; to go on:\n  {start_command(env)}")
    log.flush(member.store)


def record_failure(member, log: "Log", error: BaseException) -> None:
    """Leave a record of what ends this process: in its logs, and as its last heartbeat.

    A process that has not registered yet leaves nothing.
    """
    if not member.session:
        return
    log.queue_traceback(error)
    log.queue_event("error", traceback.format_exception_only(error)[-1].strip())
    member.beat("failed")
    log.flush(member.store)


def wait_for_experiment(config, env: dict, store, log: "Log", signals: "Signals") -> dict:
    """A coordinator begins no experiment. Wait for the first worker, and say how to start one."""
    command = start_command(env, NODE_ROLE=None, NODE_ID="anna")
    text = f"waiting for the first worker, which begins {config.EXPERIMENT_NAME}"
    log.info(f"coordinator: {text}; to start one:\n  {command}")
    while (saved := store.load_config()) is None:
        signals.sleep(1.0)
    return saved


RAISE_IT = "raise it, or take another EXPERIMENT_NAME"


def experiment_state(config: Config, saved: dict, board) -> str:
    """Whether the experiment is joined or resumed, as a sentence.

    Raises ConfigError if there is nothing left to do: for a new node when the last round is over,
    for one whose name is made up when the last round is open.
    """
    known = {*board.sessions, str(saved.get("maker"))}
    is_known = not known.isdisjoint(config.node_ids)
    is_made_up = re.fullmatch("node_[0-9a-f]{8}", config.NODE_ID) is not None
    last_to_join = config.MAX_ROUNDS - 2 if is_made_up else config.MAX_ROUNDS - 1
    if board.open_round > last_to_join and not is_known:
        text = f"round {board.open_round} is open and MAX_ROUNDS is {config.MAX_ROUNDS}"
        raise ConfigError(f"{config.EXPERIMENT_NAME}: {text}; {RAISE_IT}")
    verb = "resuming" if is_known else "joining"
    names = coordinator.join_names(board.workers, 5) or "none yet"
    return f"{verb}, round {max(0, board.open_round)} of {config.MAX_ROUNDS}, nodes: {names}"


def is_finished(config: Config, store, board) -> bool:
    """Whether all nodes of this process, or for a coordinator all workers, have finished: they have
    submitted their reward of the last round, and have then said goodbye or gone on to later rounds.
    Files are read: names alone prove nothing."""
    nodes = board.workers if config.NODE_ROLE == "coordinator" else config.node_ids
    last = drive_store.At(config.MAX_ROUNDS - 1, config.MAX_STAGES - 1)
    for node in nodes:
        heartbeat = store.read_valid(f"nodes/{node}/heartbeat.json") or {}
        goodbye = (heartbeat.get("session"), heartbeat.get("state"))
        is_done = goodbye == (board.sessions.get(node), "done")
        goes_on = board.progress.get(("rewards", node), last) > last
        if store.read_reward(node, last) is None or not (is_done or goes_on):
            return False
    return bool(nodes)


def load_checked_model(config: Config, log: "Log", signals: "Signals"):
    """Load and check the model and the tasks. Returns the model and its Codec."""
    grpo.keep_freed_memory()
    if config.MODEL_NAME == "tiny":
        torch.set_num_threads(1)  # with 0.14 M parameters a second thread costs more than it gains
    else:
        is_local = os.path.isdir(config.MODEL_NAME)
        hint = "" if is_local else " (a download may take minutes)"
        log.info(f"loading {config.MODEL_NAME}{hint}")
    model, codec = grpo.load_model(config, config.tasks)
    for sentence in grpo.misfits(codec, config, config.tasks):
        log.info(f"note: {sentence}")
    if signals.requested:  # a stop while the model was loading must not begin an experiment
        raise KeyboardInterrupt
    return model, codec


def run_worker(
    config: Config, env: dict, member, log: "Log", signals: "Signals", is_known: bool
) -> None:
    """Load, begin or join, resume, train and save. Raises Stopped if it ends before the last round.
    is_known: whether it was said where this process stands.

    A start that fails while the model is loaded and checked has touched nothing, and one that is
    refused because of its checkpoints has changed nothing.
    """
    store = member.store
    model, codec = load_checked_model(config, log, signals)

    # If another process has begun the experiment meanwhile, its settings count.
    saved = store.create(saved_settings(config))
    if store.is_maker:
        log.info(f"{config.EXPERIMENT_NAME}: a new experiment in {store.dir.absolute()}")
    elif not is_known:
        log.info(f"{config.EXPERIMENT_NAME}: joining; another node began it meanwhile")
    agreed = resolve_config(env, saved, [])
    if agreed != config:
        log.info(f"{config.EXPERIMENT_NAME}: the settings that it began with count")
        return run_worker(agreed, env, member, log, signals, is_known=True)

    # Each node gets a copy of the model and an optimizer.
    apply_warm_start(config, model, codec, store, log, signals)
    copies = {node_id: copy.deepcopy(model).eval() for node_id in config.node_ids}
    nodes = [Node(name, own, grpo.make_optimizer(own, config)) for name, own in copies.items()]
    available = grpo.available_memory(config.DEVICE) // num_sharers(config.NUM_WORKERS)
    rows = grpo.estimate_micro_batch_size(model, config, available)
    limits = (
        grpo.RowLimit(rows, "the update", log.info),
        grpo.RowLimit(2**30, "generation", log.info),
    )
    run = Run(config, store, member, codec, nodes, Peers(), log, signals, *limits)
    for node in nodes:  # a step may take minutes: it shows signs of life at each forward pass
        node.model.base_model.register_forward_pre_hook(lambda *_: run.member.beat())

    # Resume before registering: a start that is refused must not supersede a running node.
    log.initial_samples = sample_answers(run)
    load_latest_checkpoint(run)
    register(run)
    if store.load_config() != saved:  # two processes took the place of a maker that was killed
        return run_worker(config, env, member, log, signals, is_known=True)
    log.info(f"to resume: {start_command(env)}")
    log_samples(run)
    evaluate(run, "before training")

    log.show_bar(config.MAX_ROUNDS, run.last_round + 1, "round")
    try:
        train(run)
    except drive_store.Stopped:  # between two rounds
        if run.last_round >= 0:
            save_checkpoint(run)
        raise
    finish_run(run)


def apply_warm_start(config: Config, model, codec, store, log: "Log", signals: "Signals") -> None:
    """Load the warm start of this model from warmstart/, or make it and write it there, so that all
    nodes begin with equal weights."""
    if config.WARM_START_STEPS == 0:
        return

    # The hash of what must be equal for nodes to share the weights is the name of the file.
    recipe = json.dumps(grpo.warm_start_recipe(model, codec, config, config.tasks))
    path = f"/warmstart/{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.safetensors"
    if config.NODE_ROLE == "prepare":
        store.retry(store.root.mkdir, exist_ok=True)
        store.make_dir("/warmstart")
        store.remove_leftovers()
    if load_weights(store, path, model, log):
        return

    log.info(f"making the warm start of {config.MODEL_NAME}: {config.WARM_START_STEPS} steps")
    log.show_bar(config.WARM_START_STEPS, 0, "step")

    def progress(step: int, steps: int, loss) -> None:
        if signals.requested:
            log.info(f"warm start stopped at step {step} of {steps}; the next start begins it anew")
            raise KeyboardInterrupt
        log.bar.update()
        if step % max(1, steps // 10) == 0 and log.bar.disable:
            log.info(f"warm start {step}/{steps}: loss {loss.item():.3f}")

    grpo.warm_start(model, codec, config, config.tasks, progress)
    log.bar.close()

    # A file that another node has made meanwhile counts.
    if store.has_dir("/warmstart") and not load_weights(store, path, model, log):
        upload_tensors(store, path, dict(model.named_parameters()), recipe)


def load_weights(store, path: str, model, log: "Log") -> bool:
    """Load the model's weights from a file of the shared folder. Returns False if it is missing or
    cannot be used."""
    weights = dict(model.named_parameters())
    try:
        with local_copy(store, path, weights) as file:
            if file is not None:
                grpo.load_tensors(file, weights)
            return file is not None
    except UNUSABLE as error:
        log.info(f"{path} cannot be used ({drive_store.printable(error, 200)}); it is made again")
        return False


def register(run: Run) -> None:
    """Register this process's nodes, and write down on what they run."""
    config = run.config
    store = run.store
    for node_id in config.node_ids:
        store.create_node(node_id)
    device = grpo.device_name(config.DEVICE)
    info = {"model": config.MODEL_NAME, "device": device, "host": os.uname().nodename}
    info |= grpo.VERSIONS
    run.member.register(info)
    run.signals.what_follows = "a round is finished first"

    for node_id in config.node_ids:
        store.write(f"nodes/{node_id}/logs/system_info.json", drive_store.dump_json(info))
        store.remove_leftovers(node_id)  # an older process that still writes one tries again

    if config.NUM_TRANSPLANT_TREES == 0:
        run.log.info("NUM_TRANSPLANT_TREES=0: nothing is learned from peers (plain GRPO)")
    nodes = "1 node" if len(run.nodes) == 1 else f"{len(run.nodes)} nodes"
    what = f"{config.MODEL_NAME} on {device} ({config.DTYPE})"
    first = max(run.last_round + 1, run.member.board.open_round if run.member.others() else 0)
    run.log.event("start", f"{nodes}, {what}, round {first}")


def finish_run(run: Run) -> None:
    """After the last round: say what was learned, and write models and picture."""
    if run.last_round not in (-1, *list_checkpoints(run)):  # it may have missed the last rounds
        save_checkpoint(run)
    log_samples(run, is_last=True)
    rows = []  # of all sessions
    for node in run.nodes:
        submitted = run.store.list_stages("rewards", node.id)
        rows += [run.store.read_reward(node.id, at) for at in submitted]
    rows = [row for row in rows if row is not None]
    if rows:
        total = coordinator.mean(node.total_reward for node in run.nodes)
        num_rounds = len({row["round"] for row in rows})
        text = f"trained {num_rounds} of {run.config.MAX_ROUNDS} rounds"
        text = f"{coordinator.verdict(run.config, rows)}; {text}"
        run.log.event("end", f"{text}; cumulative reward {total:.2f} per node")
    evaluate(run, "after training")
    export_models(run)
    # One process draws the picture for all: the coordinator, or the one of the first worker.
    board = run.member.board
    is_first = board.workers[0] in run.config.node_ids
    if is_first and drive_store.COORDINATOR_ID not in board.sessions:
        coordinator.write_picture(run.store, run.log)


def run_reader(env: dict, signals: "Signals") -> str:
    """Run monitor, validate or report. They change no experiment and load no model."""
    role = env["NODE_ROLE"]
    path = os.path.abspath(env["GDRIVE_PATH"])
    if role == "report":
        pattern = env.get("EXPERIMENT_NAME", "*")
        experiments = read_experiments(path, fnmatch.filter(list_experiments(path), pattern))
        if not experiments:
            coordinator.say(f"report: no rewards below {path} for EXPERIMENT_NAME={pattern}")
            return "invalid"
        coordinator.write_report(drive_store.DriveStore(path, ""), pattern, experiments)
        return "finished"

    # The others read a single experiment. The monitor waits for it if somebody watches.
    name = env.get("EXPERIMENT_NAME", "default")
    once = role == "validate" or not (sys.stdout.isatty() or coordinator.in_notebook())
    if not once and name not in list_experiments(path):
        others = coordinator.join_names(list_experiments(path), 8) or "none"
        where = f"{path}/experiments/{name} (GDRIVE_PATH, EXPERIMENT_NAME)"
        coordinator.say(f"monitor: waiting for {where}; there are: {others}")
        while name not in list_experiments(path):
            signals.sleep(2)
    store = drive_store.RetryingStore(
        open_experiment(path, name), lambda _, text: coordinator.say(f"{role}: {text}"), signals
    )
    if role == "monitor":
        folder = Path(path, "experiments")
        others = set(list_experiments(path)) - {name}
        others = sorted(others, key=lambda other: -(folder / other / "board").stat().st_mtime)
        coordinator.monitor(store, env.get("STALE_AFTER_SECONDS", 300.0), others, once, signals)
        return "finished"

    # Validate against what is set here, or else against what the experiment says.
    experiment = coordinator.read_experiment(store)
    max_rounds = env.get("MAX_ROUNDS") or experiment.setting("MAX_ROUNDS")
    begun_with = max(experiment.setting("NUM_WORKERS"), experiment.setting("LOCAL_NODES"))
    num_nodes = env.get("NUM_WORKERS") or env.get("LOCAL_NODES") or begun_with
    problems = coordinator.validate(experiment, store, max_rounds, num_nodes)
    status = experiment.status.get(drive_store.COORDINATOR_ID, "there was none")
    coordinator.say(f"validate: coordinator: {status}")
    for problem in problems:
        coordinator.say(f"validate: {problem}")
    coordinator.say(f"validate: {store.dir}: {'FAILED' if problems else 'passed'}")
    return "invalid" if problems else "finished"


# -------- Logging and signals ---------------------------------------------------------------------

if os.name == "nt":
    raise SystemExit("native Windows lacks what this program needs: run it in WSL")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # USR1: Slurm's limit


def mask(text: str, secret: str | None) -> str:
    """The text without the access token."""
    return text.replace(secret, "***") if secret else text


class Log:
    """Console lines and JSONL records, buffered in memory until `flush` appends them to their
    files. On a terminal a progress bar stands below the lines. The access token is in none."""

    def __init__(self, node_id: str, secret: str | None):
        self.node_id = node_id
        self.secret = secret
        self.queued = defaultdict(list)  # path of a file -> its lines
        self.warned = set()  # texts of `once`
        # The metrics of every stage of every node and when each round ended; of a worker also the
        # seconds of each node's last steps, and what the model answered before any round.
        self.history = []
        self.round_ends = []
        self.seconds = defaultdict(dict)
        self.initial_samples = []
        self.bar = tqdm.tqdm(disable=True)

    def info(self, text: str) -> None:
        """A line for people, on the screen and in stdout.log."""
        coordinator.say(self.queue(f"nodes/{self.node_id}/logs/stdout.log", text))

    def event(self, kind: str, text: str) -> None:
        """A record in training_events.jsonl, and a line for people."""
        self.info(f"{self.node_id} {kind}: {text}")
        self.queue_event(kind, text)

    def once(self, kind: str, text: str) -> None:
        """A warning, unless it was logged before."""
        if text not in self.warned:
            self.warned.add(text)
            self.event(kind, text)

    def queue_event(self, kind: str, text: str) -> None:
        """The record alone."""
        record = {"timestamp": time.time(), "event": kind, "node_id": self.node_id}
        record["text"] = mask(text, self.secret)  # before JSON, which would escape signs in it
        self.queue(f"nodes/{self.node_id}/logs/training_events.jsonl", json.dumps(record))

    def queue_traceback(self, error: BaseException) -> None:
        """A traceback for stdout.log alone."""
        text = "".join(traceback.format_exception(error))
        self.queue(f"nodes/{self.node_id}/logs/stdout.log", text)

    def queue(self, path: str, text: str) -> str:
        """Mask the access token, queue the line for a file and return the masked line."""
        text = mask(text, self.secret)
        self.queued[path].append(f"{text}\n")
        return text

    def flush(self, store) -> None:
        """Append the queued lines to their files."""
        queued = self.queued
        self.queued = defaultdict(list)  # while it waits for the folder, lines may be added
        for path, lines in queued.items():
            store.append(path, "".join(lines))

    def show_bar(self, total: int, done: int, unit: str) -> None:
        """Show a progress bar on a terminal. A file or a notebook gets plain lines only."""
        self.bar = tqdm.tqdm(
            total=total,
            initial=done,
            unit=unit,
            dynamic_ncols=True,
            leave=False,
            disable=not sys.stdout.isatty(),
        )


class Signals:
    """Counts the stop signals. They are obeyed between rounds and in every wait; a second one exits
    at once."""

    def __init__(self):
        self.requested = 0
        self.what_follows = "nothing was begun"
        self.last_at = 0.0
        self.old_handlers = {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows signal handlers in the main thread only
        for number in STOP_SIGNALS:
            under_nohup = signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP
            if not under_nohup:
                self.old_handlers[number] = signal.signal(number, self.on_signal)

    def on_signal(self, number, frame) -> None:
        # Two signals within half a second count as one: `timeout` sends two.
        now = time.monotonic()
        if self.requested and now - self.last_at < 0.5:
            return
        self.requested += 1
        self.last_at = now
        if self.requested > 1:
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it may have interrupted a print
            coordinator.say(f"\nstopping ({self.what_follows}); once more to exit at once")

    def sleep(self, seconds: float) -> None:
        """Sleep in small steps. Raises KeyboardInterrupt if the user wants to stop."""
        wake_at = time.monotonic() + seconds
        while not self.requested and time.monotonic() < wake_at:
            time.sleep(0.1)
        if self.requested:
            raise KeyboardInterrupt

    def uninstall(self) -> None:
        """Put the handlers back that were installed before."""
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)


# -------- Functions for notebooks -----------------------------------------------------------------


def open_experiment(path, name: str) -> "drive_store.DriveStore":
    """A reader's store of an experiment below the shared folder `path`. Raises StoreError, which
    says which experiments there are, if there is none of this name."""
    names = list_experiments(path)
    if name not in names:
        others = coordinator.join_names(names, 8) or "none"
        raise drive_store.StoreError(f"no experiment {name!r} in {path}; there are: {others}")
    return drive_store.DriveStore(path, name)


def list_experiments(path) -> list[str]:
    """Names of the experiments below `path`."""
    folders = [board.parent for board in Path(path).glob("experiments/*/board")]
    begun = [folder.name for folder in sorted(folders) if (folder / "config.json").exists()]
    return [name for name in begun if drive_store.is_safe_name(name)]


def get_experiment_status(path, name: str) -> dict:
    """Status of an experiment below the shared folder `path`: current_round, num_active_peers, …

    Raises StoreError if there is none of this name.
    """
    store = open_experiment(path, name)
    return coordinator.experiment_status(coordinator.read_experiment(store), store)


def get_experiment_metrics(path, name: str):
    """One row per node, round and stage: a pandas.DataFrame if pandas is installed, else a list.

    Raises StoreError if there is no experiment of this name.
    """
    rows = coordinator.read_experiment(open_experiment(path, name)).rows
    try:
        import pandas

        return pandas.DataFrame(rows)
    except Exception:  # it is missing or broken
        return rows


def read_experiments(path, names: list[str]) -> "list[coordinator.Experiment]":
    """Those experiments that have rewards. One that cannot be read is named and skipped."""
    experiments = []
    for name in names:
        store = open_experiment(path, name)
        try:
            experiment = coordinator.read_experiment(store)
        except OSError as error:
            coordinator.say(f"{store.dir} cannot be read: {drive_store.printable(error)}")
            continue
        if experiment.rows:
            experiments.append(experiment)
    return experiments


def compare_experiments(path, names=None) -> list[dict]:
    """Compare experiments over seeds with their J = 0 baseline: all below `path`, or `names`."""
    names = list_experiments(path) if names is None else names
    return coordinator.compare_arms(read_experiments(path, names))


# -------- Main ------------------------------------------------------------------------------------


def main(environ=None) -> int:
    """Run the role that the environment asks for and return the exit status. The environment is
    read only here."""
    environ = os.environ if environ is None else environ
    environ = {name: str(value) for name, value in environ.items()}

    # Print "?" for what the terminal's encoding lacks. (A notebook's stdout needs no such care.)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")

    secret = environ.get(SECRET, "").strip()
    num_threads = torch.get_num_threads()
    signals = Signals()
    try:
        env, warnings = read_environment(environ)
        is_reader = env["NODE_ROLE"] in ("monitor", "report", "validate")
        outcome = run_reader(env, signals) if is_reader else run_role(env, warnings, signals)
    except KeyboardInterrupt:
        outcome = "stopped"
    except (ConfigError, grpo.ModelError, drive_store.StoreError) as error:
        coordinator.say(mask(str(error), secret))
        outcome = "refused"
    except Exception:  # a mistake in the program shows its traceback
        coordinator.say(mask(traceback.format_exc(), secret))
        outcome = "failed"
    finally:
        signals.uninstall()
        torch.set_num_threads(num_threads)  # a notebook may go on with another model

    statuses = {"finished": 0, "invalid": 1, "failed": 1, "refused": 2, "superseded": 3}
    return statuses.get(outcome, 130)  # "stopped"


if __name__ == "__main__":
    arguments = [] if coordinator.in_notebook() else sys.argv[1:]
    if {"--help", "-h", "help"} & set(arguments):
        print(help_text())
        sys.exit(0)
    if arguments:
        print("settings are environment variables, such as MAX_ROUNDS=5 python sapo.py (--help)")
        sys.exit(2)
    status = main()
    if not coordinator.in_notebook():
        sys.exit(status)
    if status not in (0, 130):  # "Run all" must not go on; a stop is no mistake
        raise RuntimeError(f"the run has ended with status {status}, see above")
