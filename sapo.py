# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9,<3", "transformers>=4.57,<5.25", "reasoning-gym>=0.1.25,<0.2"]
# ///
"""SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721).

N nodes, each with its own language model, learn by GRPO on reasoning-gym questions. They share
decoded rollouts, plain text, through one shared folder. Settings are environment variables:

    EXPERIMENT_NAME=first MODEL_NAME=tiny MAX_ROUNDS=60 python sapo.py     one node
    bash run_swarm.sh                                                      a swarm on this machine
    python sapo.py --help                                                  all variables

    GDRIVE_PATH            the shared folder
    EXPERIMENT_NAME        one experiment is one subfolder
    NODE_ID                this node's name, unique in the experiment
    NODE_ROLE              worker, coordinator, or a reader: monitor, report, validate
    MODEL_NAME             tiny, a Hugging Face id or a folder
    MAX_ROUNDS             rounds to train
    NUM_TRAIN_SAMPLES      I, a node's own questions in a round
    NUM_TRANSPLANT_TREES   J, its peers' groups in a round; 0 is plain GRPO

`train` is the paper's Algorithm 1, and its six steps follow it. Then come rounds, settings,
checkpoints and export, starting, logging and signals, and functions for notebooks.

One thread makes all calls to the folder, in order, and retries a failed call until it succeeds
(`RetryingStore` in drive_store.py). If a process is killed, the folder therefore holds its writes
up to some point and none after it.
"""

import contextlib
import copy
import difflib
import fnmatch
import functools
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

# Before torch is loaded, which takes some seconds: a missing package is named in one sentence, and
# Ctrl-C ends the program without a traceback.
packages = ("torch", "transformers", "reasoning_gym")
missing_packages = [name for name in packages if importlib.util.find_spec(name) is None]
if missing_packages:
    advice = "pip install torch transformers reasoning-gym"
    raise SystemExit(f"missing packages: {', '.join(missing_packages)}; {advice}")
is_script = sys.orig_argv[-1].endswith("sapo.py") and "IPython" not in sys.modules
if is_script:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import huggingface_hub  # comes with transformers, and so do safetensors and tqdm
import safetensors
import torch
import tqdm

if "DriveStore" in globals():  # the four modules pasted into one notebook cell
    coordinator = drive_store = grpo = sys.modules[__name__]
else:
    import coordinator
    import drive_store
    import grpo


def train(run: "Run") -> None:
    """SAPO, Algorithm 1 of arXiv:2509.08721, for the nodes of this process. Returns after the last
    round.

    Every node publishes before any node trains, so that sharing among the nodes of one process is
    fully synchronous and a run repeats bit for bit on a CPU. Each step adds its numbers to
    `node.metrics`.
    """
    while (t := next_round(run)) is not None:
        for stage in range(run.config.MAX_STAGES):
            for node in run.nodes:
                questions = sample_batch(run, node, t, stage)  # 1. draw I questions
                node.groups = generate_groups(run, node, questions, t, stage)  # 2. G completions
                publish_groups(run, node, t, stage)  # 3. share them as text

            for node in run.nodes:
                external = sample_external(run, node, t, stage)  # 4. draw J of the peers' groups
                policy_gradient(run, node, external)  # 5. one update on own and external groups
                submit_reward(run, node, t, stage)  # 6. report
        finish_round(run, t)


@dataclass
class Node:
    """One learner. Checkpoints hold its model, optimizer, total_reward and used_external."""

    id: str
    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer"
    total_reward: float = 0.0
    # Keys of the external groups already trained on; each is used at most once.
    used_external: set = field(default_factory=set)
    # Its own groups of the current stage.
    groups: "list[grpo.Group]" = field(default_factory=list)
    # Its own groups of this round that are still to be published, in the form of the file.
    pending: list = field(default_factory=list)
    # Numbers about the current stage, for the log and for the reward file.
    metrics: dict = field(default_factory=dict)
    # Of each external group of this stage the peer that wrote it, and the task. For the log.
    teachers: list = field(default_factory=list)
    # The metrics of each stage of this round.
    stage_metrics: list[dict] = field(default_factory=list)


@dataclass
class Run:
    """One process: its nodes, and what it knows of the swarm."""

    config: "Config"
    store: "drive_store.RetryingStore"
    codec: "grpo.Codec"
    nodes: list[Node]
    log: "Log"
    signals: "SignalHandler"
    tasks: list[str]

    # Completions per forward pass in the update; lowered when memory runs out.
    max_rows: int
    # Completions generated at once; lowered when memory runs out.
    max_generation_rows: int = 2**30

    # The session id under which this process is registered in peers/.
    session: str = ""
    # Latest session id of each node, refreshed on every poll.
    sessions: dict = field(default_factory=dict)
    last_finished_round: int = -1
    last_checkpoint_round: int = -1
    next_heartbeat: float = 0.0
    coordinator_last_seen: float = field(default_factory=time.monotonic)
    # Seconds left in this round's budget for waiting on peers.
    fetch_budget_seconds: float = 0.0

    # (round, stage, node_id) -> the groups of this rollout file, structure checked.
    fetched: dict = field(default_factory=dict)
    # Key of an external group -> its Group, or the Rejected that says why it cannot be used.
    verified_groups: dict = field(default_factory=dict)
    # Warnings already logged: (peer, reason), or the round of a timeout.
    logged_once: set = field(default_factory=set)

    # Mean metrics of the nodes in each round since the start of this process.
    history: list = field(default_factory=list)
    # The same of the rounds before, if this process resumes.
    earlier_history: list = field(default_factory=list)
    start_time: float = field(default_factory=time.monotonic)
    # What the model answered before any round.
    initial_samples: list = field(default_factory=list)


# -------- The six steps of a round ----------------------------------------------------------------


def sample_batch(run: Run, node: Node, t: int, stage: int) -> "list[grpo.Question]":
    """Step 1: draw I questions, or k x I with LOCAL_OVERSAMPLE = k.

    Each has a hash as its seed, and the seed chooses one of the tasks uniformly.
    """
    send_heartbeats(run)
    seeds = []
    for i in range(run.config.NUM_TRAIN_SAMPLES * run.config.LOCAL_OVERSAMPLE):
        seeds.append(derive_seed(run.config, node.id, t, stage, "question", i))
    return questions_from_seeds(run, seeds)


def derive_seed(
    config: "Config", node_id: str, round_: int, stage: int, purpose: str, i: int = 0
) -> int:
    """Derive a seed by hashing the arguments.

    No random state has to be saved, different purposes get different numbers, and a resumed node
    draws the same ones again. The result lies below HELD_OUT_SEEDS.
    """
    text = f"{config.SEED}|{node_id}|{round_}|{stage}|{purpose}|{i}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % grpo.HELD_OUT_SEEDS.start


def questions_from_seeds(run: Run, seeds: list[int]) -> "list[grpo.Question]":
    """For each seed a question of a random task."""
    questions = []
    for seed in seeds:
        task = random.Random(seed).choice(run.tasks)
        questions.append(grpo.first_valid_question(task, seed))
    return questions


def generate_groups(
    run: Run, node: Node, questions: list, t: int, stage: int
) -> "list[grpo.Group]":
    """Step 2: generate G completions of each question in one batch, decode and score them."""
    started = time.monotonic()
    seed = derive_seed(run.config, node.id, t, stage, "generate")
    groups = answer_questions(run, node, questions, run.config.NUM_GENERATIONS, seed)

    # Record what can explain a flat learning curve: answer tags, truncation, informative groups.
    lengths = [len(ids) for group in groups for ids in group.completions]
    has_tag = []
    is_truncated = []
    for group in groups:
        has_tag += [grpo.extract_tagged_answer(text) is not None for text in group.texts]
        is_truncated += [not finished for finished in group.finished]
    node.metrics = {
        "reward": mean_reward(groups),
        "groups": len(groups),
        "completions": len(lengths),
        "informative_local": sum(group.is_informative for group in groups),
        "answer_tag_rate": coordinator.nanmean(has_tag),
        "truncated_rate": coordinator.nanmean(is_truncated),
        "mean_length": coordinator.nanmean(lengths),
        "generated_tokens": sum(lengths),
        "generate_seconds": time.monotonic() - started,
    }
    for task in {question.task for question in questions}:
        of_task = [group for group in groups if group.question.task == task]
        node.metrics[f"reward_{task}"] = mean_reward(of_task)
    return groups


def answer_questions(
    run: Run, node: Node, questions: list, num_generations: int, seed: int
) -> "list[grpo.Group]":
    """Completions of each question by this node's model, decoded and scored."""
    codec = run.codec
    prompts = [codec.encode_prompt(question) for question in questions]

    # Generate, with smaller batches if memory runs out. A base model without chat template gets
    # solved examples (few-shot) and would go on with more of them, so its tokens are checked.
    stop_fn = codec.ends_with_answer if codec.few_shot else None
    attempt = functools.partial(
        grpo.generate,
        node.model,
        prompts,
        num_generations,
        run.config,
        seed,
        codec.eos_ids,
        codec.pad_id,
        stop_fn=stop_fn,
    )
    generated, run.max_generation_rows = grpo.retry_with_smaller_batch(
        attempt,
        run.max_generation_rows,
        num_rows=num_generations * len(questions),
        where="generation",
        smallest=num_generations,
    )

    groups = []
    for question, prompt, completions in zip(questions, prompts, generated, strict=True):
        texts = [codec.decode(ids) for ids in completions]
        rewards = grpo.group_rewards(question, texts, run.config.REWARD)
        finished = [ids[-1] in codec.eos_ids or codec.ends_with_answer(ids) for ids in completions]
        groups.append(grpo.Group(prompt, completions, rewards, question, texts, finished))
    return groups


def mean_reward(groups: "list[grpo.Group]") -> float | None:
    """Mean reward of all completions of these groups.

    The reward of a round is the mean over the node's own groups, unfiltered. External groups or a
    filter would bias it. None if there are no groups.
    """
    rewards = []
    for group in groups:
        rewards += group.rewards
    return coordinator.nanmean(rewards)


def publish_groups(run: Run, node: Node, t: int, stage: int) -> None:
    """Step 3: publish this stage's groups as text, before training on them.

    Peers get the question without chat template or examples, the decoded completions and this
    node's own rewards. With ROLLOUT_PUBLISH_FREQUENCY=round the groups of all stages are published
    together, in the last stage.
    """
    for group in node.groups:
        completions = []
        for text, reward, finished in zip(group.texts, group.rewards, group.finished, strict=True):
            completions.append({"response": text, "reward": reward, "finished": finished})
        node.pending.append(
            {
                "task": group.question.task,
                "seed": group.question.seed,
                "prompt": group.question.text,
                "answer": group.question.answer,
                "completions": completions,
            }
        )

    if stage in run.config.publishing_stages:
        groups = {str(i): group for i, group in enumerate(node.pending)}
        metadata = {
            "model": run.config.MODEL_NAME,
            "reasoning_gym": grpo.REASONING_GYM_VERSION,
            "tasks": grpo.task_hash(),
        }
        run.store.publish_rollouts(t, stage, node.id, metadata, groups)
        node.pending = []
    send_heartbeats(run)


def sample_external(run: Run, node: Node, t: int, stage: int) -> "list[grpo.Group]":
    """Step 4: verify and score the peers' groups here, drop those without information, and draw J
    of the rest uniformly.

    If fewer than J are left, the rest is drawn from older rounds, at most ROLLOUT_MAX_AGE (4)
    rounds back.
    """
    config = run.config
    started = time.monotonic()
    node.metrics |= {"external_pool": 0, "external_peers": 0, "rejected": 0}
    external = []
    if config.NUM_TRANSPLANT_TREES > 0:
        wait_for_peers(run, node, t, stage)
        rng = random.Random(derive_seed(config, node.id, t, stage, "external"))
        for age in range(min(config.ROLLOUT_MAX_AGE, t) + 1):
            candidates = external_candidates(run, node, t, stage, age, rng)
            node.metrics["external_pool"] += len(candidates)
            num_missing = config.NUM_TRANSPLANT_TREES - len(external)
            external += rng.sample(candidates, min(num_missing, len(candidates)))
            if len(external) == config.NUM_TRANSPLANT_TREES:
                break

    # Remember what was drawn, and forget what is too old to be drawn again.
    oldest = t - config.ROLLOUT_MAX_AGE
    node.used_external = {key for key in node.used_external if key[0] >= oldest}
    node.used_external |= {group.key for group in external}

    node.teachers = [(group.key[2], group.question.task) for group in external]

    rounds_of_files = [round_ for (round_, _, _), groups in run.fetched.items() if groups]
    newest_file = max(rounds_of_files, default=t)
    node.metrics |= {
        "external_ages": [t - group.key[0] for group in external],
        "external_short": config.NUM_TRANSPLANT_TREES - len(external),
        "newest_file_age": t - newest_file,
        "wait_seconds": time.monotonic() - started,
    }
    return external


def wait_for_peers(run: Run, node: Node, t: int, stage: int) -> None:
    """Step 4a: wait for the live peers that have not published this stage yet, at most
    FETCH_TIMEOUT_SECONDS (30) in a round.

    A peer that published nothing in the previous round is not waited for, so a peer that dies costs
    the swarm at most one timeout. In round 0 all live peers are waited for.
    """
    config = run.config
    store = run.store
    if stage not in config.publishing_stages:
        return

    # Which peers are expected?
    if t == 0:
        expected = drive_store.worker_ids(run.sessions)
    else:
        expected = store.list_nodes("rollouts", t - 1, config.publishing_stages[-1])
    late = set(expected) - {node.id for node in run.nodes}

    # Poll until none is late. If the swarm has opened a later round, there is no point in waiting.
    while late and not run.signals.requested and store.current_round() <= t:
        poll_started = time.monotonic()
        progress = store.list_progress("rollouts")
        for peer in sorted(late):
            marker = progress.get(peer, (-1, 0))
            # On some storages a marker arrives before its file. (If more peers publish than are
            # read, another one replaces a file that is missing.)
            is_on_its_way = (
                marker == (t, stage)
                and len(expected) <= config.FETCH_MAX_PEERS
                and fetch_peer_groups(run, node, (t, stage, peer)) is None
            )
            has_published = marker >= (t, stage) and not is_on_its_way
            if has_published or not is_alive(run, peer):
                late.remove(peer)
        if not late:
            return

        # The budget is for the whole round, whatever its number of stages.
        if run.fetch_budget_seconds <= 0:
            if t not in run.logged_once:
                run.logged_once.add(t)
                peers = coordinator.join_names(sorted(late), 8)
                text = f"round {t}: no rollouts of {peers} after FETCH_TIMEOUT_SECONDS"
                run.log.event("wait", text, round=t)
            return
        send_heartbeats(run)
        run.fetch_budget_seconds -= drive_store.poll_sleep(poll_started)


MAX_VERIFY_SECONDS_PER_PEER = 20.0  # in each draw; a peer can send text that is slow to score


def external_candidates(
    run: Run, node: Node, t: int, stage: int, age: int, rng: random.Random
) -> "list[grpo.Group]":
    """Step 4b: the peers' groups that `node` may draw from, verified, informative and not yet
    trained on.

    age: 0 means this stage of round t; a > 0 means all stages of round t - a.
    """
    config = run.config
    round_ = t - age
    stages = [stage] if age == 0 else config.publishing_stages

    # Which peers have published? If there are more than FETCH_MAX_PEERS (10), a random subset is
    # read, so that the cost of a round does not grow with the swarm. (For older rounds the order is
    # drawn in any case, because recorded runs depend on the random numbers that this consumes.)
    published = run.store.list_nodes("rollouts", round_, stages[0])
    peers = [peer for peer in published if peer != node.id]
    if age > 0 or len(peers) >= config.FETCH_MAX_PEERS:
        peers = rng.sample(peers, len(peers))

    # Read the peers' files. For a peer that has skipped the round, another one is read.
    groups_of_peer = {}
    for peer in peers[: 4 * config.FETCH_MAX_PEERS]:
        if len(groups_of_peer) == config.FETCH_MAX_PEERS:
            break
        for s in stages:
            groups = fetch_peer_groups(run, node, (round_, s, peer))
            if groups is not None:
                groups_of_peer.setdefault(peer, []).extend(groups)
    if age == 0:
        node.metrics["external_peers"] = len(groups_of_peer)

    candidates = []
    for peer, groups in sorted(groups_of_peer.items()):
        # A node trains on each group at most once.
        groups = [group for group in groups if group["key"] not in node.used_external]

        # A peer contributes at most I groups here (J if I = 0), chosen before they are verified, so
        # it gains nothing by publishing thousands.
        if len(groups) > config.max_groups_per_peer:
            groups = rng.sample(groups, config.max_groups_per_peer)

        # Verification makes the question again and scores every completion. A hostile peer can make
        # that slow, so each peer has a time budget. The results, groups or rejections, are kept in
        # run.verified_groups for all nodes of this process.
        started = time.thread_time()  # CPU time, so a suspended process is not charged
        for group in groups:
            key = group["key"]
            if key not in run.verified_groups:
                try:
                    if time.thread_time() - started > MAX_VERIFY_SECONDS_PER_PEER:
                        raise Rejected("too slow to verify")
                    run.verified_groups[key] = verify(run, group)
                except Rejected as rejection:
                    run.verified_groups[key] = rejection

            result = run.verified_groups[key]
            if isinstance(result, Rejected):
                log_rejection(run, node, peer, result.reason)
            elif result.is_informative or not config.EXTERNAL_FILTER:
                candidates.append(result)
    return candidates


def fetch_peer_groups(run: Run, node: Node, file: tuple) -> list[dict] | None:
    """The groups of a peer's rollout file (round, stage, node_id), [] if it cannot be used, None if
    there is no such file."""
    if run.fetched.get(file) is None:
        try:
            run.fetched[file] = run.store.fetch_rollouts(*file, run.config.max_rollout_bytes)
        except drive_store.InvalidFileError as error:
            run.fetched[file] = []  # `finish_round` forgets it, so the next round reads it again
            log_rejection(run, node, file[2], str(error))
    return run.fetched[file]


def log_rejection(run: Run, node: Node, peer: str, reason: str) -> None:
    """Count an unusable file or group, and log each (peer, reason) once."""
    node.metrics["rejected"] += 1
    if (peer, reason) not in run.logged_once:
        run.logged_once.add((peer, reason))
        run.log.event("reject", f"{peer}: {reason}", peer=peer)


class Rejected(Exception):
    """An external group that cannot be used, with the reason."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def verify(run: Run, external: dict) -> "grpo.Group":
    """Re-tokenize and re-score a peer's group. Raises Rejected if it cannot be used.

    Of the peer's file task, seed, response and finished are used. The question is made again here,
    and the peer's prompt is only compared with it.
    """
    codec = run.codec

    # The question must be one that this node could have drawn itself.
    if external["task"] not in run.tasks:
        raise Rejected("its task is not one of this experiment's")
    if external["seed"] in grpo.HELD_OUT_SEEDS:
        raise Rejected("its question is held-out")
    try:
        question = grpo.make_question(external["task"], external["seed"])
    except grpo.QuestionError as error:
        raise Rejected("its question cannot be made") from error
    if external["prompt"] != question.text:
        raise Rejected("its prompt differs from the question")

    # A group of more than G completions would have more weight than an own one, so draw G of them.
    completions = external["completions"]
    if len(completions) > run.config.NUM_GENERATIONS:
        rng = random.Random(str(external["key"]))
        completions = rng.sample(completions, run.config.NUM_GENERATIONS)
    texts = [completion["response"] for completion in completions]
    finished = [completion["finished"] for completion in completions]

    # Encode the texts with this model's tokenizer. They must fit into its positions, and the model
    # must be able to generate every token. A token is hardly ever longer than 64 characters.
    prompt = codec.encode_prompt(question)
    longest = min(codec.max_completion, codec.positions - len(prompt))
    reason = f"a completion is empty or over {longest} tokens here"
    if any(len(text) > 64 * longest for text in texts):
        raise Rejected(reason)
    token_ids = codec.encode_completions(texts, finished)
    if not all(1 <= len(ids) <= longest for ids in token_ids):
        raise Rejected(reason)
    if max(map(max, token_ids)) >= codec.vocabulary:
        raise Rejected("a completion contains a token that this model does not have")
    if not all(codec.eos_ids.isdisjoint(ids[:-1]) for ids in token_ids):
        raise Rejected("a completion contains this model's EOS token")

    # Score the text that these tokens decode to, because the update trains on the tokens.
    texts = [codec.decode(ids) for ids in token_ids]
    rewards = grpo.group_rewards(question, texts, run.config.REWARD)
    return grpo.Group(prompt, token_ids, rewards, question, texts, finished, external["key"])


def policy_gradient(run: Run, node: Node, external: "list[grpo.Group]") -> None:
    """Step 5: one GRPO update on I of the own groups and on all drawn external groups."""
    config = run.config
    started = time.monotonic()

    # With LOCAL_OVERSAMPLE there are more than I own groups, and informative ones come first.
    own = sorted(node.groups, key=lambda group: not group.is_informative)
    own = own[: config.NUM_TRAIN_SAMPLES]
    # EXERCISE: replace groups without information by informative ones of earlier rounds (replay).
    external = drop_unlikely(run, node, external)
    groups = own + external

    metrics = grpo.update_policy(
        node.model, node.optimizer, groups, config, run.codec.pad_id, run.max_rows
    )

    run.max_rows = metrics.pop("max_rows")

    # How likely were own completions under this policy, and how likely external ones?
    logprobs = metrics.pop("logprobs")  # of the informative groups' completions, own ones first
    num_own = sum(len(group.completions) for group in own if group.is_informative)
    node.metrics |= metrics | {
        "logp_own": coordinator.nanmean(logprobs[:num_own]),
        "logp_external": coordinator.nanmean(logprobs[num_own:]),
        "local_groups": len(own),
        "external_groups": len(external),
        "informative_groups": sum(group.is_informative for group in groups),
        "train_seconds": time.monotonic() - started,
    }
    send_heartbeats(run)


def submit_reward(run: Run, node: Node, t: int, stage: int) -> None:
    """Step 6: submit the stage's reward and metrics. Every EVAL_INTERVAL rounds they include the
    held-out accuracy."""
    config = run.config
    is_last_stage = stage == config.MAX_STAGES - 1
    if config.EVAL_INTERVAL and (t + 1) % config.EVAL_INTERVAL == 0 and is_last_stage:
        node.metrics["held_out"] = held_out_accuracy(run, node, t)
    node.total_reward += node.metrics["reward"] or 0.0

    run.store.submit_reward(t, stage, node.id, {"session": run.session, **node.metrics})
    row = {
        "timestamp": time.time(),
        "round": t,
        "stage": stage,
        "node_id": node.id,
        **node.metrics,
        "experiment": config.EXPERIMENT_NAME,
        "my_reward": node.metrics["reward"],
        "total_reward": node.total_reward,
        "teachers": node.teachers,
    }
    run.log.queue(f"{node.id}/metrics.jsonl", json.dumps(row))
    node.stage_metrics.append(node.metrics)


def held_out_accuracy(run: Run, node: Node, t: int) -> float:
    """pass@1 on EVAL_SAMPLES questions with reserved seeds, the same for all nodes."""
    seeds = []
    for i in range(run.config.EVAL_SAMPLES):
        seed = derive_seed(run.config, "", 0, 0, "held-out", i)
        seeds.append(grpo.HELD_OUT_SEEDS.start + seed)
    questions = questions_from_seeds(run, seeds)
    seed = derive_seed(run.config, node.id, t, 0, "evaluate")
    return mean_reward(answer_questions(run, node, questions, 1, seed))


def drop_unlikely(run: Run, node: Node, groups: "list[grpo.Group]") -> "list[grpo.Group]":
    """Drop external completions whose mean token log-probability is below the EXTERNAL_FLOOR
    quantile of this node's own completions. Off by default.

    Very unlikely text can dominate the gradient, up to 90% of it in our study (cf.
    arXiv:2605.22537). Completions are dropped first, and advantages are computed from the rest. In
    the other order, dropping the only right answer would leave only negative advantages.
    """
    if not groups or not node.groups or run.config.EXTERNAL_FLOOR == 0:
        return groups

    # Score own and external completions under the current policy.
    num_own = sum(len(group.completions) for group in node.groups)
    num_external = sum(len(group.completions) for group in groups)
    attempt = functools.partial(
        grpo.mean_logprobs, node.model, node.groups + groups, run.config, run.codec.pad_id
    )
    means, run.max_rows = grpo.retry_with_smaller_batch(
        attempt, run.max_rows, num_own + num_external, "EXTERNAL_FLOOR"
    )

    # The floor is the quantile of the own completions. With EXTERNAL_FLOOR=1 all external ones go.
    rank = int(run.config.EXTERNAL_FLOOR * num_own)
    floor = sorted(means[:num_own])[rank] if rank < num_own else math.inf
    is_likely = [mean >= floor for mean in means[num_own:]]
    node.metrics["external_kept"] = coordinator.nanmean(is_likely)

    # Keep the likely completions of each group.
    remaining = iter(is_likely)
    kept = []
    for group in groups:
        completions = []
        rewards = []
        for ids, reward in zip(group.completions, group.rewards, strict=True):
            if next(remaining):
                completions.append(ids)
                rewards.append(reward)
        if completions:
            kept.append(grpo.Group(group.prompt, completions, rewards, key=group.key))
    return kept


# -------- Rounds ----------------------------------------------------------------------------------

SAMPLE_INTERVAL = 20  # rounds between two samples of what the model answers


class StopTraining(Exception):
    """The run ends early: "stopped" by a signal, or "superseded" by a newer session."""


def next_round(run: Run) -> int | None:
    """The round to work on now, None after the last one. Rounds that were missed are skipped."""
    own = run.last_finished_round + 1
    if own >= run.config.MAX_ROUNDS:
        return None

    t = wait_for_round(run, own)
    if t > own:
        text = (
            f"rounds {own} to {t - 1} were opened by the swarm meanwhile; going on with round {t}"
        )
        run.log.event("skip", text, first=own, last=t - 1)
    run.fetch_budget_seconds = run.config.FETCH_TIMEOUT_SECONDS
    return t if t < run.config.MAX_ROUNDS else None


def wait_for_round(run: Run, own: int) -> int:
    """Block until round `own` or a later one is open, and return it.

    If no coordinator is alive, this process opens `own` itself, once the last sighting of one (or
    its own start) is this long ago:

        COORDINATOR_ROUND_INTERVAL   (60 s) in its first round, while fewer than NUM_WORKERS workers
                                     have registered
        2 s                          if other nodes exist and this process runs a single node
        0 s                          otherwise

    Without any coordinator only the first round waits, therefore. Later the fastest worker opens
    each round at once.

    A killed coordinator counts as alive for STALE_AFTER_SECONDS (300 s; `DriveStore.node_status`).
    If no other node ever registered, a resumed process repeats the rounds since its checkpoint.
    """
    config = run.config
    store = run.store
    own_ids = {node.id for node in run.nodes}
    while True:
        poll_started = time.monotonic()
        run.signals.raise_if_requested()  # only between rounds: a round that has begun is finished
        send_heartbeats(run)
        check_superseded(run)

        # In a swarm, work on the newest open round. A process that is alone decides itself.
        others = run.sessions.keys() - own_ids
        current = store.current_round()
        if others and current >= own:
            return current

        # How long must no coordinator have been seen before this process opens the round?
        delay = 2.0 if others and config.LOCAL_NODES == 1 else 0.0
        num_registered = len(drive_store.worker_ids(run.sessions))
        is_first_round = not run.history
        if num_registered < config.NUM_WORKERS and is_first_round:
            delay = config.COORDINATOR_ROUND_INTERVAL
            if "workers" not in run.logged_once:
                run.logged_once.add("workers")
                text = f"for {config.NUM_WORKERS} workers (NUM_WORKERS), {num_registered} are here"
                run.log.event("wait", f"{text}; {delay:.0f} s at most", topic="start")
        if is_alive(run, drive_store.COORDINATOR_ID):
            run.coordinator_last_seen = poll_started
        elif poll_started - run.coordinator_last_seen >= delay:
            store.open_round(own, run.nodes[0].id)
            coordinator.write_winners(store, own - 1, run.sessions, config.MAX_STAGES)
            return own
        drive_store.poll_sleep(poll_started)


def send_heartbeats(run: Run, state: str = "") -> None:
    """Write each node's heartbeat if one is due. With `state`, write a final one immediately."""
    if state or time.monotonic() >= run.next_heartbeat:
        for node in run.nodes:
            round_ = run.last_finished_round + 1
            run.store.write_heartbeat(node.id, run.session, round_, state or "running")
        pause = drive_store.heartbeat_interval(run.config.STALE_AFTER_SECONDS)
        run.next_heartbeat = time.monotonic() + pause


def is_alive(run: Run, node_id: str) -> bool:
    """Whether a node of the swarm is alive."""
    session = run.sessions.get(node_id, "")
    return run.store.node_status(node_id, session, run.config.STALE_AFTER_SECONDS) == "alive"


def check_superseded(run: Run) -> None:
    """Raise StopTraining if a newer process has registered one of this process's nodes."""
    run.sessions = run.store.latest_sessions()
    newer = [node.id for node in run.nodes if run.sessions.get(node.id, "") > run.session]
    if newer:
        names = coordinator.join_names(newer)
        run.log.event("end", f"a newer session of {names} runs; this one stops")
        raise StopTraining("superseded")


def finish_round(run: Run, t: int) -> None:
    """Log the round, write a checkpoint if one is due, and clean up."""
    config = run.config
    last = config.MAX_ROUNDS - 1
    interval = config.CHECKPOINT_INTERVAL
    # A checkpoint is also due if the round in which it was due has been skipped.
    checkpoint_is_due = (run.last_finished_round + 1) // interval < (t + 1) // interval
    run.last_finished_round = t

    # Flush first: rounds before a checkpoint are never repeated, so their log rows must already be
    # on disk.
    log_round_metrics(run, t)
    run.log.flush(run.store)
    if (t + 1) % SAMPLE_INTERVAL == 0 and t < last:
        log_samples(run, sample_answers(run))
    if checkpoint_is_due or t == last:
        save_checkpoint(run)

    # Delete or archive old rollouts.
    if config.ROLLOUT_CLEANUP_ENABLED:
        oldest_kept = t + 1 - max(config.ROLLOUT_KEEP_LAST_N_ROUNDS, config.min_kept_rounds)
        for node in run.nodes:
            run.store.prune_rollouts(node.id, oldest_kept, config.ROLLOUT_ARCHIVE_OLD)

    # Forget what no later round draws from. A file that could not be used is read again.
    oldest = t - config.ROLLOUT_MAX_AGE
    run.fetched = {
        file: groups for file, groups in run.fetched.items() if groups and file[0] >= oldest
    }
    run.verified_groups = {
        key: result for key, result in run.verified_groups.items() if key[0] >= oldest
    }


# -------- Settings --------------------------------------------------------------------------------


class ConfigError(ValueError):
    """Settings that cannot be used. The text names each variable, what was found and what is
    allowed."""


def setting(default, help: str, allowed="", scope: str = "node"):
    """One line of Config.

    allowed: a string of words, or the lowest and the highest number.
    scope: whose setting it is. config.json stores every setting but those of a "process". A joining
    node inherits those of the "swarm", and those of the "model" if its MODEL_NAME is the same. It
    never inherits those of a "node".
    """
    return field(default=default, metadata={"help": help, "allowed": allowed, "scope": scope})


# fmt: off
@dataclass(frozen=True, repr=False)  # a repr would show the access token in tracebacks
class Config:
    """All environment variables. `resolve_config` replaces "auto". A new one is one line here."""

    GDRIVE_PATH: str = setting("auto",
        "the shared folder; auto: rl-swarm in MyDrive if it is mounted, else ./rl-swarm",
        scope="process")
    EXPERIMENT_NAME: str = setting("default",
        "one experiment is one subfolder, isolated from all others")
    NODE_ROLE: str = setting("worker",
        "worker trains; coordinator opens rounds; auto: coordinator if the rank is 0; prepare "
        "loads and checks the model and makes the warm start; monitor, report, validate read",
        "worker coordinator auto prepare monitor report validate", scope="process")
    NODE_ID: str = setting("auto",
        "unique name; auto: node_<rank or 8 hex digits>, or node if LOCAL_NODES > 1",
        scope="process")
    LOCAL_NODES: int = setting(1, "workers in this process, named NODE_ID_0, NODE_ID_1 …", (1, 256))
    SEED: int = setting(42, "the swarm's seed; nodes differ by NODE_ID", (0, 2**31), scope="swarm")
    TEST_MODE: bool = setting(False,
        "quick check: 3 rounds, I = 4, J = 2, G = 4, tiny, a short warm start; with another "
        "model the eight small tasks, 32 tokens and 40 warm-start steps")
    MAX_ROUNDS: int = setting(2000, "rounds to train", (1, 10**6), scope="swarm")
    MAX_STAGES: int = setting(1, "generate-share-update stages in a round", (1, 100), scope="swarm")
    MODEL_NAME: str = setting("auto",
        "tiny, a Hugging Face id or a folder; auto: what fits the machine")
    TASKS: str = setting("auto",
        "comma list; auto: the paper's nine, for tiny its eight small ones", scope="swarm")
    NUM_SHOTS: int = setting("auto",
        "solved examples if there is no chat template; auto: 2, for tiny 0", (0, 16), scope="model")
    WARM_START_STEPS: int = setting("auto",
        "supervised steps before GRPO; auto: 1750 for tiny, else 0", (0, 10**6), scope="model")
    ANSWER_TAG_SHARE: float = setting(0.02,
        "share of the rewarded form at the end of tiny's warm start", (0, 1), scope="model")
    REWARD: str = setting("exact",
        "exact: 1 for a right answer, else 0; verifier: reasoning-gym's own score, which pays"
        " a little for near misses",
        "exact verifier", scope="swarm")
    NUM_TRAIN_SAMPLES: int = setting(8,
        "I: own questions per round and stage; 0: learn from peers' groups alone",
        (0, 4096), scope="swarm")
    NUM_TRANSPLANT_TREES: int = setting(0,
        "J: groups of peers per round and stage; 0: plain GRPO", (0, 4096), scope="swarm")
    NUM_GENERATIONS: int = setting(8, "G: completions per question", (2, 64), scope="swarm")
    TEMPERATURE: float = setting(1.0,
        "of sampling, and of the log-probabilities in the loss", (0.01, 100), scope="model")
    MAX_NEW_TOKENS: int = setting("auto",
        "longest completion; auto: 10 for tiny, else 256", (1, 32768), scope="model")
    EXTERNAL_FILTER: bool = setting(True, "draw only informative groups of peers", scope="swarm")
    EXTERNAL_FLOOR: float = setting(0.0,
        "guard against text that this model would hardly ever write: drop peers' completions "
        "less likely per token than this quantile of the node's own; 0: off",
        (0, 1), scope="swarm")
    LOCAL_OVERSAMPLE: int = setting(1,
        "k: generate k x I groups, train on I, informative ones first", (1, 64), scope="swarm")
    LEARNING_RATE: float = setting("auto",
        "of AdamW; auto: 6e-4 for tiny, else 1e-6", (0, 1), scope="model")
    CLIP_LOW: float = setting(0.2, "the ratio is clipped below at 1 - this", (0, 1), scope="model")
    CLIP_HIGH: float = setting(0.28,
        "the ratio is clipped above at 1 + this", (0, 10), scope="model")
    NUM_ITERATIONS: int = setting(1,
        "optimizer steps on the completions of one stage", (1, 100), scope="model")
    LOSS_TYPE: str = setting("dapo",
        "dapo: mean over tokens; grpo: over completions; dr_grpo: divide by MAX_NEW_TOKENS",
        "dapo grpo dr_grpo", scope="model")
    MICRO_BATCH_SIZE: int = setting("auto",
        "completions per forward pass; auto: by memory", (1, 65536))
    DTYPE: str = setting("auto",
        "type to compute in; auto: bfloat16 if the hardware has it, for tiny on a CPU float32",
        "float32 bfloat16")
    DEVICE: str = setting("auto",
        "cuda, cuda:1, mps or cpu; auto: the first that is present", scope="process")
    COORDINATOR_ROUND_INTERVAL: float = setting(60.0,
        "seconds after which a round may end (ROUND_ADVANCE)", (0.01, 86400), scope="swarm")
    ROUND_ADVANCE: str = setting("hybrid",
        "a round ends: time: after the interval; completion: when all live workers have "
        "submitted; hybrid: at the first of both",
        "time completion hybrid", scope="swarm")
    ROLLOUT_PUBLISH_FREQUENCY: str = setting("stage",
        "stage: publish after every stage; round: once, after the last stage of a round; "
        "generation: means stage",
        "stage round generation", scope="swarm")
    ROLLOUT_MAX_AGE: int = setting(4,
        "how many rounds back groups of peers may come from", (0, 1000), scope="swarm")
    FETCH_MAX_PEERS: int = setting(10, "peers to read in a round, drawn at random", (1, 1000))
    FETCH_TIMEOUT_SECONDS: float = setting(30.0,
        "longest wait for peers' rollouts in a round", (0, 3600))
    STALE_AFTER_SECONDS: float = setting(300.0,
        "silence after which a node counts as dead", (1, 86400))
    ROLLOUT_CLEANUP_ENABLED: bool = setting(False, "remove old rollouts", scope="swarm")
    ROLLOUT_KEEP_LAST_N_ROUNDS: int = setting(10,
        "rounds of rollouts to keep, at least CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE",
        (1, 10**6), scope="swarm")
    ROLLOUT_ARCHIVE_OLD: bool = setting(False,
        "move old rollouts to archives/ instead of deleting them", scope="swarm")
    CHECKPOINT_INTERVAL: int = setting(10, "rounds between checkpoints", (1, 10**6), scope="swarm")
    CHECKPOINT_KEEP: int = setting(2, "checkpoints to keep", (1, 1000))
    EVAL_INTERVAL: int = setting(0,
        "rounds between held-out evaluations (pass@1); 0: none", (0, 10**6))
    EVAL_SAMPLES: int = setting(64,
        "held-out questions, with seeds that no node trains on", (1, 65536))
    VERBOSE: bool = setting(False,
        "print every node's line of every round, and all settings", scope="process")
    QUIET: str = setting("False",
        "False: print everything; rounds: no line per round; True: only what went wrong, and "
        "the end. run_swarm.sh sets it where another process prints the same",
        "False rounds True", scope="process")
    HUGGINGFACE_ACCESS_TOKEN: str = setting("",
        "push the final models to the Hub; never shown", scope="process")
    HF_REPO: str = setting("auto",
        "the repository, with -<node> if there are several nodes; auto: "
        "<user>/<experiment>-<node>",
        scope="process")
    NUM_WORKERS: int = setting(0,
        "workers that run_swarm.sh starts (4 if unset); other processes wait for this many "
        "before the first round, one interval at most",
        (0, 10**4))
    CONFIGS: str = setting("",
        "for run_swarm.sh: I/J pairs to compare, such as 8/0 4/4", scope="process")
    SEEDS: str = setting("", "for run_swarm.sh: seeds to compare them over", scope="process")

    @property
    def publishing_stages(self) -> range:
        """Stages of a round in which rollouts are published."""
        first = self.MAX_STAGES - 1 if self.ROLLOUT_PUBLISH_FREQUENCY == "round" else 0
        return range(first, self.MAX_STAGES)

    @property
    def node_ids(self) -> list[str]:
        """Names of this process's nodes."""
        if self.LOCAL_NODES == 1:
            return [self.NODE_ID]
        return [f"{self.NODE_ID}_{i}" for i in range(self.LOCAL_NODES)]

    @property
    def process_id(self) -> str:
        """The name of this process in checkpoints/, logs/ and tmp/: that of its first node."""
        return self.node_ids[0] if self.NODE_ROLE == "worker" else self.NODE_ID

    @property
    def min_kept_rounds(self) -> int:
        """How many rounds of rollouts must be kept. A resumed node repeats the rounds since its
        checkpoint, and the first of these may draw from ROLLOUT_MAX_AGE rounds earlier."""
        return self.CHECKPOINT_INTERVAL + self.ROLLOUT_MAX_AGE

    @property
    def max_groups_per_peer(self) -> int:
        """A peer's fair share of a draw: I, or J if this node generates nothing itself."""
        return self.NUM_TRAIN_SAMPLES or self.NUM_TRANSPLANT_TREES

    @property
    def max_rollout_bytes(self) -> int:
        """Size limit of a peer's rollout file, far above what its groups need."""
        groups = self.max_groups_per_peer * self.LOCAL_OVERSAMPLE * self.MAX_STAGES
        bytes_per_completion = 64 * (self.MAX_NEW_TOKENS + 16)
        bytes_per_group = (1 << 13) + self.NUM_GENERATIONS * bytes_per_completion  # 8 kB: question
        return min(drive_store.MAX_JSON_BYTES, (1 << 18) + groups * bytes_per_group)
# fmt: on


def settings_of_scope(scope: str) -> list[str]:
    """Names of the settings with this scope."""
    return [spec.name for spec in fields(Config) if spec.metadata["scope"] == scope]


SWARM_SETTINGS = settings_of_scope("swarm")
MODEL_SETTINGS = settings_of_scope("model")
PROCESS_SETTINGS = settings_of_scope("process")
MUST_AGREE = ("SEED", "TASKS", "REWARD", "MAX_STAGES")  # between all nodes of an experiment
SECRET = "HUGGINGFACE_ACCESS_TOKEN"
COLAB_DRIVES = ("/content/drive/MyDrive", "/content/gdrive/MyDrive")
DEFAULT_MODEL = "Gensyn/Qwen2.5-0.5B-Instruct"
DEFAULT_MODEL_GB = 10  # weights, gradients, Adam and activations of one node
TEST_MODE_DEFAULTS = {  # so little, and yet something to learn from
    "MAX_ROUNDS": 3,
    "NUM_TRAIN_SAMPLES": 4,
    "NUM_TRANSPLANT_TREES": 2,
    "NUM_GENERATIONS": 4,
    "MODEL_NAME": "tiny",
    "WARM_START_STEPS": 150,
    "ANSWER_TAG_SHARE": 0.9,
}
TEST_MODE_OTHER_DEFAULTS = {  # for a model that is not tiny
    "TASKS": ",".join(grpo.TINY_TASKS),
    "WARM_START_STEPS": 40,
    "MAX_NEW_TOKENS": 32,
}
TINY_DEFAULTS = {
    "TASKS": ",".join(grpo.TINY_TASKS),
    "NUM_SHOTS": 0,
    "WARM_START_STEPS": 1750,
    "LEARNING_RATE": 6e-4,
    "MAX_NEW_TOKENS": 10,
}
OTHER_DEFAULTS = {
    "TASKS": ",".join(grpo.PAPER_TASKS),
    "NUM_SHOTS": 2,
    "WARM_START_STEPS": 0,
    "LEARNING_RATE": 1e-6,
    "MAX_NEW_TOKENS": 256,
}
RANK_VARIABLES = (
    "SLURM_ARRAY_TASK_ID",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
    "SKYPILOT_NODE_RANK",
    "RANK",
)
SHORT_NAMES = {
    "LR": "LEARNING_RATE",
    "I": "NUM_TRAIN_SAMPLES",
    "J": "NUM_TRANSPLANT_TREES",
    "G": "NUM_GENERATIONS",
    "NUM_ROUNDS": "MAX_ROUNDS",
    "MODEL": "MODEL_NAME",
}


def read_environment(environ) -> tuple[dict, list[str]]:
    """Environment -> ({name: value} of the variables that are set, warnings).

    Role, node_id and shared folder are worked out here, because they depend on the machine. All
    mistakes are reported in one ConfigError.
    """
    mistakes = []
    env = parse_settings(environ, mistakes)
    warnings = check_names(environ, env, mistakes)

    # Role and name. An engine's rank makes both, and a restarted task gets the same ones again.
    rank = rank_of(environ)
    if env.get("NODE_ROLE") == "auto":
        is_rank_zero = rank is not None and set(rank) <= {"0", "_"}
        env["NODE_ROLE"] = "coordinator" if is_rank_zero else "worker"
    role = env.get("NODE_ROLE", "worker")
    num_nodes = env.get("LOCAL_NODES", 1)
    if role in ("coordinator", "prepare"):
        fixed_name = drive_store.COORDINATOR_ID if role == "coordinator" else "prepare"
        if env.get("NODE_ID", "auto") not in ("auto", fixed_name):
            warnings.append(f"NODE_ID={env['NODE_ID']}: the name of a {role} is {fixed_name}")
        env["NODE_ID"] = fixed_name
    elif env.get("NODE_ID", "auto") == "auto":
        if rank:
            env["NODE_ID"] = f"node_{rank}"
        else:
            env["NODE_ID"] = "node" if num_nodes > 1 else f"node_{secrets.token_hex(4)}"
    elif role == "worker" and env["NODE_ID"].lower() == drive_store.COORDINATOR_ID:
        name = env["NODE_ID"]
        mistakes.append(f"NODE_ID={name!r}: this is the coordinator's name; choose another")

    # Names become parts of paths. The report takes a pattern of experiments instead of a name.
    longest_id = f"{env['NODE_ID']}_{num_nodes - 1}" if num_nodes > 1 else env["NODE_ID"]
    experiment = "-" if role == "report" else env.get("EXPERIMENT_NAME", "-")
    for name, value in (("EXPERIMENT_NAME", experiment), ("NODE_ID", longest_id)):
        if not drive_store.is_safe_name(value):
            allowed = "1 to 64 letters, digits, '.', '_', '-', no '.' at either end"
            mistakes.append(f"{name}={value!r}: use {allowed}")

    # The shared folder. Its parent must exist: a missing one means a drive that is not mounted.
    if env.get("GDRIVE_PATH", "auto") == "auto":
        mounted = [folder for folder in COLAB_DRIVES if os.path.isdir(folder)]
        env["GDRIVE_PATH"] = f"{mounted[0]}/rl-swarm" if mounted else "rl-swarm"
        if not mounted and environ.get("COLAB_RELEASE_TAG"):
            advice = "from google.colab import drive; drive.mount('/content/drive')"
            warnings.append(f"no Google Drive is mounted: all is lost with this session; {advice}")
    for name in ("GDRIVE_PATH", "MODEL_NAME"):
        if env.get(name, "").startswith("~"):
            env[name] = os.path.expanduser(env[name])
    if not Path(env["GDRIVE_PATH"]).absolute().parent.is_dir():
        path = env["GDRIVE_PATH"]
        mistakes.append(f"GDRIVE_PATH={path!r}: its parent directory does not exist")

    # All settings but the token are written to files that peers read.
    secret = env.get(SECRET)
    for name, value in env.items():
        if secret and name != SECRET and secret in str(value):
            mistakes.append(f"{name}: it contains the token of {SECRET}, which is never written")

    if mistakes:
        raise ConfigError("these settings cannot be used:\n  " + "\n  ".join(mistakes + warnings))
    return env, warnings


def parse_settings(values, mistakes: list[str], where: str = "") -> dict:
    """{name: value} of the settings in an environment or in config.json.

    A setting that cannot be parsed is left out and described in `mistakes`, with `where`.
    """
    parsed = {}
    for spec in fields(Config):
        text = str(values.get(spec.name, "")).strip()
        if not text or (spec.name == SECRET and text == "None"):
            continue
        try:
            parsed[spec.name] = parse_value(text, spec)
        except ValueError as error:
            mistakes.append(f"{spec.name}={drive_store.printable(repr(text))}{where}: {error}")

    if parsed.get("TASKS", "auto") != "auto":
        tasks = re.findall(r"[^\s,]+", parsed["TASKS"])
        unknown = [task for task in tasks if task not in grpo.TASK_TABLE]
        for task in unknown[:5]:
            mistakes.append(f"TASKS{where}: {grpo.why_refused(task)}")
        if len(unknown) > 5:
            mistakes.append(f"TASKS{where}: {len(unknown) - 5} more are unknown")
        if not tasks:
            mistakes.append(f"TASKS{where}: expected at least one task, or auto")
        parsed["TASKS"] = ",".join(tasks)
    return parsed


def parse_value(text: str, spec):
    """The text of one variable -> its value. Raises ValueError that says what is allowed."""
    if text == "auto" and spec.default == "auto":
        return text

    allowed = spec.metadata["allowed"]
    value = None
    if spec.type is bool:  # never bool(text): bool("False") is True
        expected = "True or False"
        if text.lower() in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            value = text.lower() in ("1", "true", "yes", "on")
    elif spec.type is str:
        expected = ", ".join(allowed.split())
        if not allowed or text in allowed.split():
            value = text
    else:
        kind = "an integer" if spec.type is int else "a number"
        expected = f"{kind} from {allowed[0]} to {allowed[1]}"
        with contextlib.suppress(ValueError):
            number = spec.type(text)
            if allowed[0] <= number <= allowed[1]:  # False for nan
                value = number

    if value is None:
        suffix = ", or auto" if spec.default == "auto" else ""
        raise ValueError(f"expected {expected}{suffix}")
    return value


def check_names(environ, env: dict, mistakes: list[str]) -> list[str]:
    """Warnings about variables whose names are nearly those of a setting.

    A near miss of EXPERIMENT_NAME or GDRIVE_PATH is a mistake, because the run would go to another
    place.
    """
    names = [spec.name for spec in fields(Config)]
    warnings = []
    for name in sorted(set(environ) - set(names)):
        closest = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.88)
        intended = SHORT_NAMES.get(name.upper(), closest[0] if closest else None)
        if intended is None:
            continue
        text = f"{name} is not a variable of this program: did you mean {intended}?"
        is_fatal = intended in ("EXPERIMENT_NAME", "GDRIVE_PATH") and intended not in env
        (mistakes if is_fatal else warnings).append(text)
    return warnings


def rank_of(environ) -> str | None:
    """This process's rank if an engine gives it one, such as "3", or "4_1" in a job array whose
    elements have several tasks."""
    ranks = [environ[name] for name in RANK_VARIABLES if environ.get(name, "").isdecimal()]
    has_several_tasks = environ.get("SLURM_NTASKS", "1") != "1"
    num_parts = 2 if environ.get("SLURM_ARRAY_TASK_ID") and has_several_tasks else 1
    return "_".join(ranks[:num_parts]) or None


def resolve_config(env: dict, saved: dict, notes: list[str]) -> "Config":
    """Environment and config.json -> a Config without "auto".

    Precedence: environment, then `saved` (the experiment's config.json), then TEST_MODE's defaults,
    then what fits the machine. Of config.json, settings of the swarm count, those of the model if
    MODEL_NAME is the same, and MODEL_NAME itself only if it is tiny.

    notes: sentences for the user are appended. Raises ConfigError if the experiment disagrees or
    holds a setting that cannot be used.
    """
    mistakes = []
    env = {name: value for name, value in env.items() if value != "auto"}
    saved_model = saved.get("MODEL_NAME")
    saved = {
        name: value
        for name, value in saved.items()
        if name in (*SWARM_SETTINGS, *MODEL_SETTINGS) and str(value).strip() != "auto"
    }
    saved = parse_settings(saved, mistakes, where=" (in config.json)")

    # Inherit the swarm's settings, and the model's if it is the same model.
    inherited = {name: saved[name] for name in SWARM_SETTINGS if name in saved and name not in env}
    if saved_model == "tiny" and "MODEL_NAME" not in env:
        inherited["MODEL_NAME"] = "tiny"
    test_mode = TEST_MODE_DEFAULTS if env.get("TEST_MODE") else {}
    defaults = resolve_auto(Config(**test_mode | inherited | env), notes)
    if test_mode and defaults["MODEL_NAME"] != "tiny":
        test_mode = test_mode | TEST_MODE_OTHER_DEFAULTS
    if saved_model == defaults["MODEL_NAME"]:
        for name in MODEL_SETTINGS:
            if name in saved and name not in env:
                inherited[name] = saved[name]
    config = Config(**defaults | test_mode | inherited | env)
    if config.max_groups_per_peer == 0:
        raise ConfigError("NUM_TRAIN_SAMPLES=0 needs NUM_TRANSPLANT_TREES: nothing to train on")

    check_agreement(config, saved, mistakes)

    # Tell the user about inherited settings that are not the defaults, and about differing ones.
    without_saved = Config(**defaults | test_mode | env)
    unusual = []
    for name, value in inherited.items():
        if value != getattr(without_saved, name):
            unusual.append(f"{name}={value}")
    if unusual:
        notes.append("from the experiment: " + " ".join(unusual))
    differing = []
    for name, value in saved.items():
        if value != getattr(config, name):
            differing.append(f"{name} (there {value})")
    if differing:
        notes.append("not as in the experiment: " + ", ".join(differing))
    return config


def check_agreement(config: "Config", saved: dict, mistakes: list[str] = ()) -> None:
    """Raise ConfigError unless this start agrees with the experiment's settings, as all nodes of an
    experiment must. mistakes: other reasons to refuse it."""
    mistakes = list(mistakes)
    for name in MUST_AGREE:
        value = getattr(config, name)
        if name in saved and saved[name] != value:
            found = drive_store.printable(repr(saved[name]))
            mistakes.append(f"{name}={value!r}: the experiment has {found}")
    if mistakes:
        advice = "change them, or take another EXPERIMENT_NAME"
        listed = "\n  ".join(mistakes)
        raise ConfigError(
            f"{config.EXPERIMENT_NAME} began with other settings: {advice}:\n  {listed}"
        )


def resolve_auto(config: "Config", notes: list[str]) -> dict:
    """Device and model that "auto" stands for on this machine, and the defaults that follow."""
    devices = grpo.available_devices()
    device = next(iter(devices)) if config.DEVICE == "auto" else config.DEVICE
    if device not in devices:
        raise ConfigError(f"DEVICE={device!r}: this machine has {', '.join(devices)}")

    model = config.MODEL_NAME
    if model == "auto" and config.NODE_ROLE in ("worker", "prepare"):
        needed = DEFAULT_MODEL_GB * config.LOCAL_NODES
        available = grpo.available_memory(device) / max(1, config.NUM_WORKERS) / 1e9
        model = DEFAULT_MODEL if device != "cpu" and available > needed else "tiny"
        reason = f"{DEFAULT_MODEL} needs an accelerator with {needed} GB"
        notes.append(f"MODEL_NAME=auto takes {model}: {reason}")
    defaults = TINY_DEFAULTS if model == "tiny" else OTHER_DEFAULTS
    dtype = devices[device]
    if model == "tiny" and device == "cpu":
        dtype = "float32"  # exact, because a run of tiny repeats bit for bit
    return {**defaults, "MODEL_NAME": model, "DEVICE": device, "DTYPE": dtype}


def format_config(config: "Config", env: dict) -> str:
    """The settings that were set, one per line; with VERBOSE all settings."""
    lines = []
    for name, value in asdict(config).items():
        if name in env or config.VERBOSE:
            if name == SECRET and value:
                value = "set"
            lines.append(f"  {name:28} {value}")
    return "\n".join(lines)


def help_text() -> str:
    """All variables with their defaults, as `python sapo.py --help` prints them."""
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    lines = ["usage: NAME=value … python sapo.py      (settings are environment variables)", ""]
    for spec in fields(Config):
        text = spec.metadata["help"]
        words = spec.metadata["allowed"].split() if spec.type is str else []
        if not all(word in text for word in words):  # the help does not explain each word
            text = f"{', '.join(words)}: {text}"
        head = f"  {spec.name:27} {spec.default!s:8.8} "
        lines += textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head))
    lines += [
        "",
        "examples:",
        "  EXPERIMENT_NAME=first NODE_ID=anna MODEL_NAME=tiny MAX_ROUNDS=60 python sapo.py",
        "  EXPERIMENT_NAME=first NODE_ROLE=monitor python sapo.py",
        "The manual is .github/MANUAL.md.",
    ]
    return "\n".join(lines)


def resume_command(config: "Config", env: dict) -> str:
    """The command that resumes this node, with everything that was set but the access token."""
    if coordinator.in_notebook():
        return f"run this cell again (NODE_ID={config.NODE_ID})"
    named = {name: value for name, value in env.items() if name != SECRET}
    named["GDRIVE_PATH"] = os.path.abspath(config.GDRIVE_PATH)
    named["EXPERIMENT_NAME"] = config.EXPERIMENT_NAME
    words = [f"{name}={shlex.quote(str(value))}" for name, value in named.items()]
    return " ".join([*words, "python sapo.py"])


# -------- Checkpoints and export ------------------------------------------------------------------


def save_checkpoint(run: Run) -> None:
    """Save the state of all nodes after round `run.last_finished_round` to one file, and delete all
    but the newest CHECKPOINT_KEEP checkpoints."""
    config = run.config
    round_ = run.last_finished_round
    if round_ <= run.last_checkpoint_round:
        return
    check_superseded(run)  # never replace what a newer process of this name has written

    # Collect tensors and metadata. Weights that are not finite must not replace good ones.
    tensors = {}
    for name, tensor in checkpoint_tensors(run.nodes).items():
        tensors[name] = tensor.cpu().contiguous()
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        advice = "lower LEARNING_RATE; the checkpoints before are kept"
        text = f"no checkpoint after round {round_}: weights are not finite: {advice}"
        run.log.event("error", text)
        return
    nodes = {}
    for node in run.nodes:
        used = sorted(node.used_external)
        nodes[node.id] = {"total_reward": node.total_reward, "trained": used}
    metadata = {
        "model_name": config.MODEL_NAME,
        "next_round": round_ + 1,
        "nodes": nodes,
        "crc": grpo.checksum(tensors.values()),
    }

    # Write the new one before the old ones are deleted.
    path = f"checkpoints/{config.process_id}/round_{round_:06d}.safetensors"
    write = functools.partial(grpo.save_tensors, tensors, json.dumps(metadata))
    run.store.write_atomic(path, write, fsync=True)
    run.last_checkpoint_round = round_
    run.log.event("checkpoint", f"after round {round_}", file_only=True, round=round_)
    checkpoints = run.store.list_checkpoints(config.process_id)  # the newest first
    own = [path for saved_round, path in checkpoints.items() if saved_round <= round_]
    for path in own[config.CHECKPOINT_KEEP :]:
        run.store.delete(path)


EXPECTED_CHECKPOINT_ERRORS = (  # those that a damaged or a stranger's file raises
    ValueError,
    KeyError,
    TypeError,
    OSError,
    safetensors.SafetensorError,
)


def checkpoint_tensors(nodes: list[Node]) -> dict:
    """{name: tensor} of everything that these nodes resume from. Not copies."""
    tensors = {}
    for node in nodes:
        for name, tensor in grpo.training_state(node.model, node.optimizer).items():
            tensors[f"{node.id}/{name}"] = tensor
    return tensors


def load_latest_checkpoint(run: Run) -> None:
    """Load this process's newest readable checkpoint. Without any checkpoint, training begins at
    round 0.

    Raises StoreError if a node that has registered before has checkpoints but none can be used, or
    if its rewards show that there must be one: a node never starts over by accident.
    """
    reason = None
    last_error = None
    checkpoints = run.store.list_checkpoints(run.config.process_id)
    is_known = bool(run.store.latest_sessions().keys() & set(run.config.node_ids))
    if is_known and not checkpoints and must_have_checkpoint(run):
        reason = "no checkpoint is here, although a node's rewards show that one was written"
    for round_, path in checkpoints.items():
        file = run.store.existing_file(path)
        try:
            run.store.retry(load_checkpoint, run, file, round_)
        except Exception as error:  # a damaged or a stranger's file may raise anything
            cause = drive_store.printable(f"{type(error).__name__}: {error}", 200)
            reason = f"{path} cannot be used ({cause})"
            run.log.event("resume", f"{reason}; trying the one before")
            last_error = error
            continue
        run.last_finished_round = run.last_checkpoint_round = round_
        text = f"from the checkpoint after round {round_}"
        run.log.event("resume", text, topic="start", round=round_)
        return
    if reason is not None and is_known:
        # A mistake in `load_checkpoint` would look like a damaged file; show where it was raised.
        if last_error is not None and not isinstance(last_error, EXPECTED_CHECKPOINT_ERRORS):
            traceback.print_exception(last_error)
        advice = "restore one, or take another NODE_ID or EXPERIMENT_NAME. Nothing was changed"
        raise drive_store.StoreError(f"{run.store.experiment_dir}: {reason}; {advice}")


def must_have_checkpoint(run: Run) -> bool:
    """Whether a node's own rewards show that a checkpoint has been written.

    The first one is due when CHECKPOINT_INTERVAL rounds have ended. A round has ended if there is a
    reward of a later one.
    """
    saved_interval = coordinator.saved_setting(run.store, "CHECKPOINT_INTERVAL", default=1)
    interval = max(run.config.CHECKPOINT_INTERVAL, saved_interval)
    for node in run.nodes:
        rounds = sorted({round_ for round_, _ in run.store.list_stages("rewards", node.id)})
        ended = rounds[:-1]
        if ended and ended[-1] + 1 >= interval:
            return True
    return False


def load_checkpoint(run: Run, file: Path | None, round_: int) -> None:
    """Load a checkpoint into the nodes. Hyperparameters come from the current settings, not from
    the file. Raises an exception if anything does not fit.

    A stranger may have written the file. It is a safetensors file, so reading it runs no code.
    """
    if file is None:
        raise drive_store.InvalidFileError("not a regular file")
    metadata = drive_store.parse_json(grpo.read_metadata(file).encode())
    tensors = checkpoint_tensors(run.nodes)

    # It must be of this model and these nodes.
    node_ids = sorted(metadata["nodes"])
    is_same_model = metadata["model_name"] == run.config.MODEL_NAME
    if not is_same_model or node_ids != sorted(node.id for node in run.nodes):
        names = coordinator.join_names(node_ids)
        made_with = f"MODEL_NAME={metadata['model_name']} and nodes {names}"
        raise ValueError(f"made with {made_with}: set these, or take another NODE_ID")

    # It must be whole, and of this round.
    saved = grpo.load_tensors(file, tensors)
    checksum = grpo.checksum(saved.values())
    if metadata["next_round"] != round_ + 1 or metadata["crc"] != checksum:
        raise ValueError("damaged, or of another round")

    for node in run.nodes:
        saved_node = metadata["nodes"][node.id]
        node.used_external = set()
        for t, stage, peer, index in saved_node["trained"]:
            node.used_external.add((int(t), int(stage), str(peer), int(index)))
        node.total_reward = float(saved_node["total_reward"])
    grpo.copy_tensors(tensors, saved)


def export_models(run: Run) -> None:
    """Write each node's model to models/NODE, an ordinary Hugging Face folder, and say how to try
    it."""
    for node in run.nodes:
        write = functools.partial(grpo.save_model, node.model, run.codec.tokenizer)
        run.store.write_directory(f"models/{node.id}", write)

    # Ask the question that was answered best in the last round. A chat model is asked by turns,
    # another one by the prompt that it was trained with.
    question = grpo.first_valid_question(run.tasks[0], 1)
    groups = run.nodes[0].groups
    if groups:
        question = max(groups, key=lambda group: sum(group.rewards)).question
    if run.codec.tokenizer.chat_template:
        prompt = [{"role": "user", "content": question.text}]
    else:
        prompt = run.codec.decode(run.codec.encode_prompt(question))
    folder = str(run.store.experiment_dir / "models" / run.nodes[0].id)
    pipeline = f'pipeline("text-generation", {json.dumps(folder)})'
    ask = f"print({pipeline}({json.dumps(prompt)}, max_new_tokens=99))"
    code = f"from transformers import pipeline; {ask}"
    mark = "!" if coordinator.in_notebook() else ""
    text = f"final model: {folder}\n  try it (right: {question.answer}; it may be wrong):"
    text += f"\n  {mark}python -c {shlex.quote(code)}"
    run.log.info(text, topic="sample")


def push_to_hub(run: Run) -> None:
    """Push the final models to the Hugging Face Hub if there is an access token. A failure is
    logged and changes nothing else."""
    config = run.config
    if not config.HUGGINGFACE_ACCESS_TOKEN:
        return
    has_several_nodes = max(config.LOCAL_NODES, config.NUM_WORKERS) > 1
    repos = []
    try:
        api = huggingface_hub.HfApi(token=config.HUGGINGFACE_ACCESS_TOKEN)
        for node in run.nodes:
            repo = config.HF_REPO
            if repo == "auto":
                repo = f"{api.whoami()['name']}/{config.EXPERIMENT_NAME}-{node.id}"
            elif has_several_nodes:
                repo += f"-{node.id}"
            api.create_repo(repo, exist_ok=True)
            api.upload_folder(
                repo_id=repo,
                folder_path=run.store.experiment_dir / "models" / node.id,
                commit_message=f"after round {run.last_finished_round}",
            )
            repos.append(repo)
    except Exception as error:  # the network, the Hub, a wrong token
        # The error's text may contain the token, so only its type and the status are logged.
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", "no answer")
        reason = f"{type(error).__name__}, {status}"
        run.log.event("hub", f"push failed ({reason}); the run is complete without it")
        return
    run.log.event("hub", f"pushed to {coordinator.join_names(repos)}")


# -------- Starting --------------------------------------------------------------------------------


def run_role(env: dict, warnings: list[str], signals: "SignalHandler") -> str:
    """Run a worker, the coordinator or prepare. Returns how it ended: "finished", "stopped" or
    "superseded"."""
    # The settings of this process are in the environment, the others perhaps in the experiment.
    own = Config(**env)
    log = Log(own.process_id, own.HUGGINGFACE_ACCESS_TOKEN, own.QUIET)
    signals.is_quiet = own.QUIET != "False"
    store = drive_store.DriveStore(own.GDRIVE_PATH, own.EXPERIMENT_NAME, own.process_id)
    store = drive_store.RetryingStore(store, log.event, signals)
    notes = list(warnings)
    config = resolve_config(env, store.load_config() or {}, notes)

    for note in notes:
        log.info(f"note: {note}", topic="start")
    is_prepare = config.NODE_ROLE == "prepare"
    if not is_prepare and log_experiment_state(config, store, log) == "finished":
        return "finished"
    if not is_prepare:
        log.info(format_config(config, env), topic="start")

    try:
        if is_prepare:
            return run_prepare(config, log, signals)
        if config.NODE_ROLE == "coordinator":
            return start_coordinator(config, store, log, signals)
        return run_worker(config, env, warnings, store, log, signals)
    except (StopTraining, KeyboardInterrupt):
        log.close_bar()
        if not signals.is_quiet:
            log.info(f"stopped\nto go on:\n  {resume_command(config, env)}")
        return "stopped"


def log_experiment_state(config: "Config", store: "drive_store.RetryingStore", log: "Log") -> str:
    """Say whether the experiment is new, joined, resumed or finished. Returns "finished" if nothing
    is left to do, else "".

    That is the case if the nodes of this process, or for a coordinator all nodes, have written
    their last checkpoint and model. Raises ConfigError if a node would join an experiment that is
    over for it.
    """
    name = config.EXPERIMENT_NAME
    if not store.is_complete():
        others = [other for other in list_experiments(config.GDRIVE_PATH) if other != name]
        text = f"new experiment {name}"
        if others:
            text += f"; other experiments here: {coordinator.join_names(others, 8)}"
        log.info(text, topic="start")
        return ""

    # Is the last round's checkpoint there, and the model of each node concerned?
    sessions = store.latest_sessions()
    workers = drive_store.worker_ids(sessions)
    node_ids = workers if config.NODE_ROLE == "coordinator" else config.node_ids
    last_round = config.MAX_ROUNDS - 1
    is_finished = bool(node_ids)
    if config.NODE_ROLE == "worker":
        is_finished = last_round in store.list_checkpoints(config.process_id)
    for node_id in node_ids:
        has_reward = (last_round, config.MAX_STAGES - 1) in store.list_stages("rewards", node_id)
        has_model = bool(store.list_names(f"models/{node_id}"))
        is_finished = is_finished and has_reward and has_model
    if is_finished:
        text = f"{name}: already finished, all {config.MAX_ROUNDS} rounds (MAX_ROUNDS)"
        log.info(f"{text}; raise it, or choose another EXPERIMENT_NAME", topic="start")
        return "finished"

    # A node may still join in the last round, unless its name is made up.
    current = store.current_round()
    is_known = bool(sessions.keys() & {config.NODE_ID, *config.node_ids})
    has_made_up_name = re.fullmatch("node_[0-9a-f]{8}", config.NODE_ID) is not None
    last_to_join = last_round - 1 if has_made_up_name else last_round
    if current > last_to_join and not is_known:
        advice = "set EXPERIMENT_NAME for another, or NODE_ID and MAX_ROUNDS to go on with this one"
        rounds = f"round {current} is open and MAX_ROUNDS is {config.MAX_ROUNDS}"
        raise ConfigError(f"{name} has nothing left to do for a new node: {rounds}; {advice}")

    open_round = f"round {current} is open" if current >= 0 else "no round is open yet"
    nodes = f"nodes: {coordinator.join_names(workers, 8)}" if workers else "no workers yet"
    verb = "resuming" if is_known else "joining"
    log.info(f"{verb} experiment {name}: {open_round}, {nodes}", topic="start")
    return ""


def run_prepare(config: "Config", log: "Log", signals: "SignalHandler") -> str:
    """Load and check the model and make its warm start, so that every node finds it. Begins no
    experiment."""
    load_initial_model(config, log, signals)
    log.info(f"{config.MODEL_NAME} is ready", topic="start")
    return "finished"


def start_coordinator(
    config: "Config", store: "drive_store.RetryingStore", log: "Log", signals: "SignalHandler"
) -> str:
    """Open rounds for the swarm (`run_coordinator` in coordinator.py), then draw the plot."""
    store.create([drive_store.COORDINATOR_ID], drive_store.COORDINATOR_DIRS)
    outcome = coordinator.run_coordinator(config, store, log, signals)
    suffix = " by a newer coordinator" if outcome == "superseded" else ""
    log.info(f"coordinator: {outcome}{suffix}")
    if outcome == "finished":
        store.retry(write_plot, store.store, log)
    log.flush(store)
    return outcome


def run_worker(
    config: "Config",
    env: dict,
    warnings: list[str],
    store: "drive_store.RetryingStore",
    log: "Log",
    signals: "SignalHandler",
) -> str:
    """Load, resume, train and save. Returns "finished", "stopped" or "superseded".

    warnings: about variables; they are said again when the start has scrolled them away.
    """
    try:
        # Begin the experiment before the model is loaded, which may take minutes: a node that joins
        # meanwhile finds the settings. If another node was faster, its settings count.
        config = begin_experiment(config, env, store, log)
        build = functools.partial(build_run, config, store, log, signals)
        run, _ = grpo.retry_with_smaller_batch(build, max_rows=1, num_rows=1, where="the start")

        # If the node that began the experiment has failed meanwhile, it has removed it again.
        begin_experiment(config, env, store, log)
        store.create(config.node_ids)

        # Resume before registering: a start that is refused must not supersede a running node.
        run.initial_samples = sample_answers(run)
        load_latest_checkpoint(run)
        load_earlier_history(run)
        register_nodes(run)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            store.store.withdraw()
        raise
    if not signals.is_quiet:
        log.info(f"to resume: {resume_command(config, env)}")
    log_samples(run, sample_answers(run) if run.last_finished_round >= 0 else run.initial_samples)
    for warning in warnings:
        log.info(wrap_text(f"note: {warning}"), topic="start")

    log.show_bar(config.MAX_ROUNDS, run.last_finished_round + 1, "round")
    signals.is_training = True
    try:
        train(run)
        signals.is_training = False
        outcome = "finished"
        finish_run(run)
    except StopTraining as stop:
        outcome = str(stop)
    if outcome == "stopped":
        try:
            save_checkpoint(run)
        except StopTraining as stop:  # a newer process has registered this very moment
            outcome = str(stop)
        else:
            log.event("end", f"stopped before round {run.last_finished_round + 1}")
            if not signals.is_quiet:
                log.info(f"to go on:\n  {resume_command(config, env)}")
    log.close_bar()
    if outcome != "superseded":
        send_heartbeats(run, "done" if outcome == "finished" else "stopped")
    log.flush(store)
    return outcome


def begin_experiment(
    config: "Config", env: dict, store: "drive_store.RetryingStore", log: "Log"
) -> "Config":
    """Write config.json, unless the experiment has one. Returns the settings of this start, which
    follow those of the experiment."""
    store.create()
    settings = {}
    for name, value in asdict(config).items():
        if name not in PROCESS_SETTINGS:
            settings[name] = value
    settings["reasoning_gym"] = grpo.REASONING_GYM_VERSION
    settings["task_table"] = grpo.task_hash()
    settings["created_at"] = time.time()
    saved = store.load_or_create_config(settings)

    notes = []
    resolved = resolve_config(env, saved, notes)
    if resolved != config:
        for note in notes:
            log.info(f"note: {note}", topic="start")
    return resolved


def finish_run(run: Run) -> None:
    """After the last round: write checkpoint, models and winners, and say what was learned."""
    save_checkpoint(run)  # in case this start found the last one missing
    export_models(run)
    config = run.config
    coordinator.write_winners(run.store, config.MAX_ROUNDS - 1, run.sessions, config.MAX_STAGES)
    if run.history:
        log_summary(run)
    if drive_store.COORDINATOR_ID not in run.sessions:  # a coordinator draws the plot for all
        run.store.retry(write_plot, run.store.store, run.log)
    push_to_hub(run)


def build_run(
    config: "Config",
    store: "drive_store.RetryingStore",
    log: "Log",
    signals: "SignalHandler",
    max_rows: int,
) -> Run:
    """Load the model at its warm start and make a copy and an optimizer for each node.

    max_rows has no meaning here; `retry_with_smaller_batch` passes it.
    """
    model, codec, tasks = load_initial_model(config, log, signals)
    nodes = []
    for node_id in config.node_ids:
        own = copy.deepcopy(model).eval()
        nodes.append(Node(node_id, own, grpo.make_optimizer(own, config)))
    available = grpo.available_memory(config.DEVICE) // max(1, config.NUM_WORKERS)
    rows = grpo.estimate_micro_batch_size(model, config, available)
    return Run(config, store, codec, nodes, log, signals, tasks, rows)


def load_initial_model(config: "Config", log: "Log", signals: "SignalHandler"):
    """Load the model and bring it to its warm start. Returns model, Codec and tasks."""
    tasks = config.TASKS.split(",")
    grpo.keep_freed_memory()
    if config.MODEL_NAME == "tiny":
        torch.set_num_threads(1)  # with 0.14 M parameters a second thread costs more than it gains
    model, codec = grpo.load_model(config, tasks)
    for note in codec.notes:
        log.info(wrap_text(f"note: {note}"), topic="start")
    if config.WARM_START_STEPS > 0:
        load_or_make_warm_start(config, model, codec, tasks, log, signals)
    return model, codec, tasks


def load_or_make_warm_start(
    config: "Config", model, codec, tasks, log: "Log", signals: "SignalHandler"
) -> None:
    """Load the warm start of this model from warmstart/, or make it and write it there."""
    store = drive_store.DriveStore(config.GDRIVE_PATH, None, config.process_id)
    store = drive_store.RetryingStore(store, log.event, signals)
    store.create_root_dirs()
    store.delete_temp_files()

    # The hash of everything that the weights depend on is the name of the file.
    recipe = json.dumps(grpo.warm_start_recipe(model, codec, config, tasks))
    path = f"warmstart/{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.safetensors"
    if load_weights(store, path, model, log):
        return

    log.info(f"{config.NODE_ID} makes the warm start of {config.MODEL_NAME}", topic="start")
    log.show_bar(config.WARM_START_STEPS, 0, "step")
    progress = functools.partial(log_warm_start, log, signals, time.monotonic())
    grpo.warm_start(model, codec, config, tasks, progress)
    log.close_bar()

    # All nodes must begin with equal weights. A file that another node has made meanwhile counts.
    if not load_weights(store, path, model, log):
        weights = {}
        for name, tensor in grpo.named_weights(model).items():
            weights[name] = tensor.cpu().contiguous()
        write = functools.partial(grpo.save_tensors, weights, recipe)
        store.write_atomic(path, write, fsync=True)


def load_weights(store: "drive_store.RetryingStore", path: str, model, log: "Log") -> bool:
    """Load the model's weights from a file below the shared folder. Returns False if it is missing
    or cannot be used."""
    file = store.existing_file(path)
    if file is None:
        return False
    weights = grpo.named_weights(model)
    try:
        saved = grpo.load_tensors(file, weights)
    except Exception as error:  # a damaged or a stranger's file may raise anything
        cause = drive_store.printable(f"{type(error).__name__}: {error}", 200)
        log.info(wrap_text(f"{path} cannot be used ({cause}); it is made again"))
        return False
    grpo.copy_tensors(weights, saved)
    return True


def log_warm_start(
    log: "Log", signals: "SignalHandler", started: float, step: int, steps: int, loss
) -> None:
    """After each step of a warm start: obey Ctrl-C, move the bar, and log every tenth of it."""
    signals.raise_if_requested()
    log.update_bar(step)
    if step % max(1, steps // 10) == 0:
        seconds_left = (time.monotonic() - started) / step * (steps - step)
        text = f"warm start {step}/{steps}: loss {loss.item():.3f} | eta {seconds_left:.0f}s"
        log.info(text, topic="start", file_only=log.bar is not None)


def register_nodes(run: Run) -> None:
    """Register this process's nodes, add up the rewards of rounds that are not repeated, and say
    what begins."""
    config = run.config
    store = run.store
    nodes = {node.id: node for node in run.nodes}
    metadata = {
        "model": config.MODEL_NAME,
        "device": config.DEVICE,
        "host": os.uname().nodename,
        **grpo.VERSIONS,
    }
    run.session = store.register(list(nodes), "worker", metadata)
    run.sessions = store.latest_sessions()
    store.delete_temp_files()
    for node_id in nodes:
        store.reset_markers(node_id)
    send_heartbeats(run)
    for node_id in nodes:
        data = {"node_id": node_id, **metadata}
        store.write_atomic(f"logs/{node_id}/system_info.json", data)

    # In a swarm the rounds since the checkpoint are not repeated, but their rewards count.
    is_whole_swarm = run.sessions.keys() == nodes.keys()
    end = 0 if is_whole_swarm else min(store.current_round(), config.MAX_ROUNDS)
    for t in range(run.last_finished_round + 1, end):
        for row in store.read_rewards(t, nodes, config.MAX_STAGES):
            nodes[row["node_id"]].total_reward += row["reward"] or 0.0

    if config.NUM_TRANSPLANT_TREES == 0:
        text = "NUM_TRANSPLANT_TREES=0: nothing is learned from peers (plain GRPO)"
        run.log.info(text, topic="start")
    if (
        config.ROLLOUT_CLEANUP_ENABLED
        and config.ROLLOUT_KEEP_LAST_N_ROUNDS < config.min_kept_rounds
    ):
        text = f"rollouts of {config.min_kept_rounds} rounds are kept, which a resumed node needs"
        run.log.info(f"{text}: CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE", topic="start")

    # One forecast of the disk space that checkpoints and final models will take.
    checkpoint_bytes = sum(tensor.nbytes for tensor in checkpoint_tensors(run.nodes).values())
    model_bytes = 0
    for node in run.nodes:
        model_bytes += sum(p.nbytes for p in node.model.parameters())
    needed = ((config.CHECKPOINT_KEEP + 1) * checkpoint_bytes + model_bytes) / 1e9
    free = store.retry(shutil.disk_usage, config.GDRIVE_PATH).free / 1e9
    what = f"{len(nodes)} node(s), model {config.MODEL_NAME} on {config.DEVICE} ({config.DTYPE})"
    disk = f"for checkpoints and models {needed:.2g} GB on disk, {free:.1f} free"
    text = f"{what}, round {run.last_finished_round + 1}; {disk}"
    run.log.event("start", text, topic="start")


def run_reader(env: dict, signals: "SignalHandler") -> str:
    """Run monitor, validate or report. They change no experiment and load no model."""
    config = Config(**env)
    path = config.GDRIVE_PATH
    if config.NODE_ROLE == "report":
        return run_report(path, env.get("EXPERIMENT_NAME", "*"))

    try:
        store = open_experiment(path, config.EXPERIMENT_NAME)
    except drive_store.StoreError as error:
        print(error)
        return "invalid"
    if config.NODE_ROLE == "monitor":
        once = not (sys.stdout.isatty() or coordinator.in_notebook())
        max_rounds = env.get("MAX_ROUNDS")
        coordinator.monitor(store, config.STALE_AFTER_SECONDS, max_rounds, once, signals)
        return "finished"

    # Validate against what is set here, or else against what the experiment says.
    max_rounds = env.get("MAX_ROUNDS")
    if max_rounds is None:
        saved_rounds = coordinator.saved_setting(store, "MAX_ROUNDS", default=1)
        max_rounds = max(saved_rounds, store.current_round() + 1)
    num_nodes = env.get("NUM_WORKERS") or env.get("LOCAL_NODES")
    if num_nodes is None:
        num_nodes = max(
            coordinator.saved_setting(store, "LOCAL_NODES", default=1),
            coordinator.saved_setting(store, "NUM_WORKERS", default=1),
        )
    problems = coordinator.validate_experiment(store, max_rounds, num_nodes)
    for problem in problems:
        print(f"validate: {problem}")
    print(f"validate: {store.experiment_dir}: {'FAILED' if problems else 'passed'}")
    return "invalid" if problems else "valid"


def run_report(path: str, pattern: str) -> str:
    """Compare the experiments whose names match `pattern`; print the table, and write it, a plot
    and the numbers as JSON to reports/."""
    rows = compare_experiments(path, fnmatch.filter(list_experiments(path), pattern))
    if not rows:
        print(f"report: no rewards below {path} for EXPERIMENT_NAME={pattern}")
        return "invalid"
    text = coordinator.format_report(rows)
    print(text)

    # Files named after the pattern: "compare_*" -> reports/report_compare.md
    shared = drive_store.DriveStore(path, None, "reader")
    shared.create_root_dirs()
    name = re.sub(r"[^A-Za-z0-9._-]", "", pattern)[:64].strip("._-") or "all"
    report = f"reports/report_{name}"
    shared.write_atomic(f"{report}.md", text.encode())
    shared.write_atomic(f"{report}.json", json.dumps(rows).encode())
    plot = coordinator.plot_comparison(rows)
    if plot:
        shared.write_atomic(f"{report}.png", plot)
        print(shared.experiment_dir / f"{report}.png")
        coordinator.show_in_notebook(plot)

    # Of a single experiment also who taught whom.
    names = [run["experiment"] for row in rows for run in row["runs"]]
    store = drive_store.DriveStore(path, names[0], "reader")
    plot = coordinator.plot_teachers(store) if len(names) == 1 else None
    if plot:
        shared.write_atomic(f"{report}_teachers.png", plot)
        print(shared.experiment_dir / f"{report}_teachers.png")
        coordinator.show_in_notebook(plot)
    return "finished"


# -------- Logging and signals ---------------------------------------------------------------------

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # USR1: Slurm's limit


class Log:
    """Console lines and JSONL records, buffered in memory until `flush` appends them to their
    files. On a terminal a progress bar stands below the lines.

    quiet: QUIET of Config. "rounds" hides lines with the topic "round", "True" also those with the
    topics "start" and "sample". The files get all lines.
    """

    def __init__(self, node_id: str, secret: str, quiet: str):
        self.node_id = node_id
        self.secret = secret
        self.hidden_topics = {
            "False": (),
            "rounds": ("round",),
            "True": ("round", "start", "sample"),
        }[quiet]
        self.lines = []  # (path, text)
        self.bar = None

    def info(self, text: str, topic: str = "", file_only: bool = False) -> None:
        """A line for people, on the screen and in stdout.log."""
        if not text:
            return
        text = self.queue(f"{self.node_id}/stdout.log", text)
        if file_only or topic in self.hidden_topics:
            return
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a closed pipe
            if self.bar is not None:
                self.bar.write(text)
            else:
                print(text, flush=True)

    def event(self, kind: str, text: str, topic: str = "", file_only: bool = False, **data) -> None:
        """A record in training_events.jsonl, and a line for people."""
        self.info(wrap_text(f"{self.node_id} {kind}: {text}"), topic, file_only)
        record = {
            "timestamp": time.time(),
            "event": kind,
            "node_id": self.node_id,
            "text": text,
            **data,
        }
        self.queue(f"{self.node_id}/training_events.jsonl", json.dumps(record))

    def queue(self, path: str, text: str) -> str:
        """Mask the access token, queue the line for a file and return the masked line."""
        if self.secret:
            text = text.replace(self.secret, "***")
        self.lines.append((f"logs/{path}", text))
        return text

    def flush(self, store) -> None:
        """Append the queued lines to their files."""
        by_path = {}
        for path, text in self.lines:
            by_path.setdefault(path, []).append(f"{text}\n")
        self.lines = []
        for path, lines in by_path.items():
            store.append(path, "".join(lines))

    def show_bar(self, total: int, done: int, unit: str) -> None:
        """Show a progress bar on a terminal. A file or a notebook gets plain lines only."""
        if sys.stdout.isatty() and not self.hidden_topics:
            self.bar = tqdm.tqdm(
                total=total, initial=done, unit=unit, dynamic_ncols=True, leave=False
            )

    def update_bar(self, done: int) -> None:
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def wrap_text(text: str) -> str:
    """A sentence as lines that fit the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    return textwrap.fill(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def log_round_metrics(run: Run, t: int) -> None:
    """Log the metrics of a round, as means over its stages and the nodes of this process; with
    VERBOSE those of each node, too. A hint follows if ten rounds gave no signal."""
    config = run.config
    stages = []
    for node in run.nodes:
        stages += node.stage_metrics
    mean = mean_metrics(stages)
    run.history.append(mean)

    # The line of the process. Peers' files that come late are named with the variable that helps.
    round_text = coordinator.format_round(t, config.MAX_ROUNDS)
    rounds_left = config.MAX_ROUNDS - 1 - t
    notes = []
    if mean["wait_seconds"] > 0.5:
        notes.append(f"waited {mean['wait_seconds']:.1f}s")
    if mean["external_short"] and mean["newest_file_age"]:
        age = coordinator.format_number(mean["newest_file_age"])
        notes.append(f"newest peer file {age} rounds old (ROLLOUT_MAX_AGE)")
    is_single = len(run.nodes) == 1
    name = run.nodes[0].id if is_single else f"{len(run.nodes)} nodes"
    line = coordinator.format_metrics(
        f"{name} {round_text}", run.history, run.start_time, rounds_left, notes
    )
    run.log.info(line, topic="round")

    # A line for each of several nodes.
    for node in run.nodes if not is_single else ():
        history = [mean_metrics(node.stage_metrics)]
        label = f"{node.id} {round_text}"
        line = coordinator.format_metrics(label, history, run.start_time, rounds_left, [])
        run.log.info(line, topic="round", file_only=not config.VERBOSE)
    run.log.update_bar(t + 1)
    for node in run.nodes:
        node.stage_metrics = []

    recent = run.history[-10:]
    has_signal = any(metrics["informative_groups"] for metrics in recent)
    if len(run.history) % 10 == 0 and not has_signal:
        reason = coordinator.diagnose_no_signal(recent)
        run.log.event("no signal", f"for 10 rounds: {reason}", round=t)


def mean_metrics(stages: list[dict]) -> dict:
    """The mean of each metric over several stages or nodes, and the time at which they ended."""
    mean = {"ended": time.monotonic()}
    lists = {"external_ages", "teachers"}
    for name in {name for metrics in stages for name in metrics} - lists:
        mean[name] = coordinator.nanmean(metrics.get(name) for metrics in stages)
    return mean


def sample_answers(run: Run) -> list[dict]:
    """Ask the first node two questions, always the same ones, three times each."""
    seeds = [derive_seed(run.config, "", 0, 0, "sample", i) for i in range(2)]
    questions = questions_from_seeds(run, seeds)
    seed = derive_seed(run.config, "", 0, 0, "sampled")
    samples = []
    for group in answer_questions(run, run.nodes[0], questions, 3, seed):
        completions = []
        for text, reward in zip(group.texts, group.rewards, strict=True):
            completions.append({"response": text, "reward": reward})
        samples.append(
            {
                "prompt": group.question.text,
                "answer": group.question.answer,
                "completions": completions,
            }
        )
    return samples


def log_samples(run: Run, samples: list[dict]) -> None:
    """Record what the model answers now, and print it."""
    next_round_number = run.last_finished_round + 1
    text = f"what it answers before round {next_round_number}"
    is_last = next_round_number == run.config.MAX_ROUNDS  # the summary prints that one
    run.log.event("sample", text, topic="sample", file_only=is_last, groups=samples)
    run.log.info(format_samples(samples), topic="sample", file_only=is_last)


def format_samples(samples: list[dict], before: list[dict] | None = None) -> str:
    """Samples as lines that fit the terminal, after those of an earlier time if `before` is
    given."""
    width = shutil.get_terminal_size((100, 24)).columns
    lines = []
    for i, sample in enumerate(samples):
        lines += coordinator.format_question(sample["prompt"], sample["answer"], width)
        if before:
            earlier = before[i]["completions"]
            lines += coordinator.format_completions(earlier, width, "before  ")
            lines += coordinator.format_completions(sample["completions"], width, "now     ")
        else:
            lines += coordinator.format_completions(sample["completions"], width)
    return "\n".join(lines)


def load_earlier_history(run: Run) -> None:
    """Read the metrics of the rounds up to the checkpoint from this process's own logs."""
    rows = []
    for node in run.nodes:
        for row in coordinator.read_metrics(run.store, node.id):
            if row["round"] <= run.last_finished_round:
                rows.append(row)
    by_round = coordinator.group_by("round", rows)
    run.earlier_history = [mean_metrics(stages) for stages in by_round.values()]


def log_summary(run: Run) -> None:
    """Log what was learned in all rounds of these nodes, or why nothing was."""
    samples = sample_answers(run)
    log_samples(run, samples)
    text = f"what it answered at the start, and now, after round {run.last_finished_round}:"
    run.log.info(text, topic="sample")
    run.log.info(format_samples(samples, before=run.initial_samples), topic="sample")

    name = run.nodes[0].id if len(run.nodes) == 1 else f"{len(run.nodes)} nodes"
    history = run.earlier_history + run.history
    summary = coordinator.learning_summary(history, name)
    total = coordinator.nanmean(node.total_reward for node in run.nodes)
    external = coordinator.nanmean(metrics.get("external_groups") for metrics in history)
    unit = " per node" if len(run.nodes) > 1 else ""
    text = f"cumulative reward {total:.2f}{unit}; {external:.1f} groups a round came from peers"
    run.log.event("end", f"{summary}; {text}")

    tasks = []
    for task, mean in coordinator.reward_per_task(run.history[-20:]).items():
        tasks.append(f"{task} {mean:.2f}")
    if tasks:
        run.log.info(wrap_text("reward per task: " + ", ".join(tasks)), topic="sample")


def write_plot(store: "drive_store.DriveStore", log: Log) -> None:
    """Write reports/EXPERIMENT.png if matplotlib is installed."""
    name = store.experiment_dir.name
    plot = coordinator.plot_run(coordinator.all_rewards(store), name)
    if plot:
        shared = drive_store.DriveStore(store.root, None, store.owner)
        shared.write_atomic(f"reports/{name}.png", plot)
        log.info(f"picture: {shared.experiment_dir / 'reports' / name}.png")
        coordinator.show_in_notebook(plot)


class SignalHandler:
    """Counts the stop signals. They are obeyed between rounds and in every wait; a second one exits
    at once."""

    def __init__(self):
        self.requested = 0
        self.is_quiet = False  # another process says it
        self.is_training = False  # a round that has begun is finished
        self._last_signal_at = 0.0
        self._old_handlers = {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows signal handlers in the main thread only
        for number in STOP_SIGNALS:
            under_nohup = signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP
            if not under_nohup:
                self._old_handlers[number] = signal.signal(number, self._on_signal)

    def raise_if_requested(self) -> None:
        """Raise StopTraining if the user wants to stop."""
        if self.requested:
            raise StopTraining("stopped")

    def uninstall(self) -> None:
        """Put the handlers back that were installed before."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number, frame) -> None:
        # Two signals within half a second count as one: `timeout` sends two.
        now = time.monotonic()
        if self.requested and now - self._last_signal_at < 0.5:
            return
        self.requested += 1
        self._last_signal_at = now
        if self.requested > 1:
            raise KeyboardInterrupt
        if not self.is_quiet:
            first = " (a round is finished first)" if self.is_training else ""
            text = f"\nstopping{first}; once more to exit at once"
            with contextlib.suppress(
                OSError, RuntimeError
            ):  # a closed terminal; an interrupted print
                print(text, flush=True)


# -------- Functions for notebooks -----------------------------------------------------------------


def open_experiment(path, name: str) -> "drive_store.DriveStore":
    """A reader's store of an experiment below the shared folder `path`. Raises StoreError, which
    says which experiments there are, if there is none of this name."""
    names = list_experiments(path)
    if name in names:
        return drive_store.DriveStore(path, name)

    # The names that resemble it most come first.
    def similarity(other: str) -> float:
        return difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()

    names.sort(key=similarity, reverse=True)
    others = coordinator.join_names(names, 8) or "none"
    raise drive_store.StoreError(f"no experiment {name!r} in {path}; there are: {others}")


def get_experiment_status(path, name: str) -> dict:
    """Status of an experiment below the shared folder `path`: current_round, num_active_peers, …

    Raises StoreError if there is none of this name.
    """
    return coordinator.experiment_status(open_experiment(path, name))


def get_experiment_metrics(path, name: str):
    """One row per node, round and stage: a pandas.DataFrame if pandas is installed, else a list.

    Raises StoreError if there is no experiment of this name.
    """
    rewards = coordinator.all_rewards(open_experiment(path, name))
    try:
        import pandas
    except ImportError:
        return rewards
    return pandas.DataFrame(rewards)


def list_experiments(path) -> list[str]:
    """Names of the experiments below `path`."""
    if not os.path.isdir(path):
        return []
    names = []
    for name in drive_store.DriveStore(path, None).list_names("experiments"):
        if drive_store.is_safe_name(name) and drive_store.DriveStore(path, name).is_complete():
            names.append(name)
    return names


def compare_experiments(path, names=None) -> list[dict]:
    """Compare experiments over seeds against their J = 0 baseline: all below `path`, or `names`."""
    runs = []
    for name in list_experiments(path) if names is None else names:
        try:
            run = coordinator.summarize_experiment(drive_store.DriveStore(path, name))
        except (ValueError, OSError) as error:  # the others are still reported
            print(f"experiment {name} is left out: {drive_store.printable(error)}")
            continue
        if run is not None:
            runs.append(run)
    return coordinator.compare_arms(runs)


# -------- Main ------------------------------------------------------------------------------------


def run_environment(environ: dict[str, str], signals: SignalHandler) -> int:
    """Run the role that `environ` asks for, print why it failed if it did, and return the exit
    status."""
    secret = environ.get(SECRET, "").strip()
    try:
        env, warnings = read_environment(environ)
        if env.get("NODE_ROLE") in ("monitor", "report", "validate"):
            outcome = run_reader(env, signals)
        else:
            outcome = run_role(env, warnings, signals)
        statuses = {"finished": 0, "valid": 0, "invalid": 1, "stopped": 130, "superseded": 3}
        return statuses[outcome]
    except KeyboardInterrupt:
        return 130
    except (ConfigError, grpo.ModelError, drive_store.StoreError, MemoryError) as error:
        reason = str(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        path = environ.get("GDRIVE_PATH", "auto")
        reason = f"GDRIVE_PATH={path} cannot be used: {drive_store.printable(error, 300)}"
    print(reason.replace(secret, "***") if secret else reason, flush=True)
    return 2


def main(environ=None) -> int:
    """Run the role that the environment asks for and return the exit status. The environment is
    read only here."""
    environ = os.environ if environ is None else environ
    environ = {name: str(value) for name, value in environ.items()}

    # Print "?" for what the terminal's encoding lacks. (A notebook's stdout needs no such care.)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")

    signals = SignalHandler()
    status = 0
    try:
        status = run_environment(environ, signals)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads it any more, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is buffered
    finally:
        signals.uninstall()
    return status


if __name__ == "__main__":
    arguments = [] if coordinator.in_notebook() else sys.argv[1:]
    if set(arguments) & {"--help", "-h", "help"}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
        print(help_text())
        sys.exit(0)
    if arguments:  # such as MAX_ROUNDS=5 or monitor
        words = [word if "=" in word else f"NODE_ROLE={word}" for word in arguments]
        sys.exit(f"settings are environment variables: {shlex.join(words)} python sapo.py")
    status = main()
    if not coordinator.in_notebook():  # in a notebook the cell just ends
        sys.exit(status)
