# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9,<3", "transformers>=4.57,<5.25", "reasoning-gym>=0.1.25,<0.2"]
# ///
"""SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721): N nodes, each with its own model, learn by
GRPO on reasoning-gym questions and share decoded rollouts, plain text, through one shared folder.

`train` is the paper's Algorithm 1; its six steps stand below it, then clock, log, settings, checkpoints,
roles. The shared folder is the state. Calls to it are made in order by one thread; one that fails is tried
again until it works (`Patient` in coordinator.py). So what a kill leaves behind is always a prefix.
"""

import contextlib
import copy
import difflib
import fnmatch
import functools
import hashlib
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
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

if sys.orig_argv[-1].endswith("sapo.py") and "IPython" not in sys.modules:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is loaded, some seconds: no traceback

import huggingface_hub  # transformers brings it, and tqdm
import torch
import tqdm

if "DriveStore" not in globals():  # pasted into one notebook cell, the modules are there already
    from coordinator import (
        COORDINATOR, Patient, average, begun_with, breathe, compare, counted, draw, draw_run,
        experiment_status, group_lines, in_notebook, keep_the_clock, monitor, pace, plain, report_text,
        reward_per_task, reward_rows, round_line, some, summarize, validate_experiment, verdict,
        why_flat, workers_of, write_winners,
    )  # fmt: skip
    from drive_store import BadFile, DriveStore, StoreError, bucket, is_name, is_number, parse_json
    from grpo import (
        HELD_OUT_SEEDS, PAPER_TASKS, REASONING_GYM_VERSION, SMALL_TASKS, TASK_TABLE, VERSIONS, BadQuestion,
        Codec, Group, Question, available_memory, checksum, devices, fill, find_answer, generate,
        halving_on_oom, keep_freed_memory, load_model, load_tensors, lucky_question, make_question,
        mean_logps, new_optimizer, read_about, rows_that_fit, save_tensors, score_all, task_hash,
        training_state, update, warm_start, warm_start_recipe, weights_of, why_refused,
    )  # fmt: skip


def train(run: "Run") -> None:
    """SAPO, Algorithm 1 of arXiv:2509.08721, for the nodes of this process; returns after the last round.

    With LOCAL_NODES > 1 all nodes share, then all learn: sharing is exactly synchronous, and a run repeats
    bit for bit on a CPU. The steps leave their figures for the log in `node.figures`.
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

    question: "Question"
    group: "Group"
    texts: list[str]
    finished: list[bool]  # whether the model ended the completion itself
    key: tuple | None = None  # of an external one: (round, stage, node, index)


@dataclass
class Node:
    """One learner. Model, optimizer, total_reward and trained go into its checkpoint."""

    id: str
    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer"
    total_reward: float = 0.0
    trained: set = field(default_factory=set)  # keys of external groups already used: never twice
    rollouts: list = field(default_factory=list)  # its own, of the current stage
    unpublished: list = field(default_factory=list)  # of the round so far, as it will be published
    figures: dict = field(default_factory=dict)  # of the current stage, for the log and the reward file


@dataclass
class Run:
    """What the functions below share: one process's nodes and what they know of the swarm."""

    config: "Config"
    store: Patient  # a DriveStore whose calls wait for the folder
    codec: "Codec"
    nodes: list[Node]
    log: "Log"
    stop: "StopButton"
    tasks: list[str]
    max_rows: int  # completions per forward pass in the update
    max_decoded: int = 2**30  # completions generated at once; lowered when memory runs out
    session: str = ""  # of this process, in peers/
    sessions: dict = field(default_factory=dict)  # node -> its newest session, as of the last look
    done: int = -1  # last round finished
    saved: int = -1  # last round after which a checkpoint was made
    next_beat: float = 0.0
    led_until: float = field(default_factory=time.monotonic)  # when a coordinator was last seen alive
    fetch_seconds: float = 0.0  # that this round may still wait for peers' rollouts
    files: dict = field(default_factory=dict)  # (round, stage, node) -> groups, structure checked
    verified: dict = field(default_factory=dict)  # key of a group -> Rollout, or the reason of its rejection
    reported: set = field(default_factory=set)  # said once: (peer, reason) of a rejection; a round of waiting
    history: list = field(default_factory=list)  # of each round of this start: the nodes' mean figures
    began: float = field(default_factory=time.monotonic)
    first_sample: list = field(default_factory=list)  # what the model said at the start
    upload: object = None  # to the Hub, a Future


# -------- The six steps of a round ------------------------------------------------------------------------


def stream_seed(config: "Config", node_id: str, round_: int, stage: int, purpose: str, i: int = 0) -> int:
    """Seed of one random stream, from a hash: no state to save, no overlap, a resumed node repeats itself."""
    text = f"{config.SEED}|{node_id}|{round_}|{stage}|{purpose}|{i}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_SEEDS.start


def sample_batch(run: "Run", node: Node, t: int, stage: int) -> "list[Question]":
    """Step 1: I questions (times LOCAL_OVERSAMPLE), task uniform with replacement, seed from a hash."""
    beat(run)
    count = run.config.NUM_TRAIN_SAMPLES * run.config.LOCAL_OVERSAMPLE
    seeds = [stream_seed(run.config, node.id, t, stage, "question", i) for i in range(count)]
    return questions_of(run, seeds)


def questions_of(run: "Run", seeds: list[int]) -> "list[Question]":
    """A question of a random task for each seed."""
    return [lucky_question(random.Random(seed).choice(run.tasks), seed) for seed in seeds]


def generate_rollouts(run: "Run", node: Node, questions: list, t: int, stage: int) -> None:
    """Step 2: G completions for each question, in one batched call, decoded and scored, as node.rollouts."""
    began = time.monotonic()
    seed = stream_seed(run.config, node.id, t, stage, "generate")
    node.rollouts = answer(run, node, questions, run.config.NUM_GENERATIONS, seed)
    lengths = [len(ids) for r in node.rollouts for ids in r.group.completions]
    texts = [text for r in node.rollouts for text in r.texts]
    node.figures = {
        "reward": mean_reward(node.rollouts),
        "groups": len(node.rollouts),
        "completions": len(lengths),
        "informative_local": sum(r.group.is_informative for r in node.rollouts),
        "answer_tag_rate": average(find_answer(text) is not None for text in texts),
        "truncated_rate": average(not done for r in node.rollouts for done in r.finished),
        "mean_length": average(lengths),
        "generated_tokens": sum(lengths),
        "generate_seconds": time.monotonic() - began,
    }
    for task in {q.task for q in questions}:
        node.figures[f"reward_{task}"] = mean_reward([r for r in node.rollouts if r.question.task == task])


def answer(run: "Run", node: Node, questions: list, g: int, seed: int) -> list[Rollout]:
    """`g` completions of each question by this node's model, decoded and scored."""
    config, codec, dtype = run.config, run.codec, getattr(torch, run.config.DTYPE)
    prompts = [codec.prompt(q) for q in questions]

    def attempt(rows_at_once):
        return generate(
            node.model, prompts, g, config.MAX_NEW_TOKENS, config.TEMPERATURE, codec.eos_ids,
            torch.Generator().manual_seed(seed), codec.pad_id, rows_at_once, dtype,
            answered=codec.answered if codec.few_shot else None,  # None: no look at every token
        )  # fmt: skip

    rows = g * len(questions)
    drawn, run.max_decoded = halving_on_oom(attempt, run.max_decoded, rows, "generation", smallest=g)
    rollouts = []
    for question, prompt, group in zip(questions, prompts, drawn, strict=True):
        texts = [codec.decode(ids) for ids in group]
        rewards = score_all(question, texts, config.REWARD)
        finished = [ids[-1] in codec.eos_ids or codec.answered(ids) for ids in group]
        rollouts.append(Rollout(question, Group(prompt, group, rewards), texts, finished))
    return rollouts


def mean_reward(rollouts: list[Rollout]) -> float:
    """The node's reward of a round and stage: the mean over all its own completions, never externals."""
    return average(reward for rollout in rollouts for reward in rollout.group.rewards)


def communicate(run: "Run", node: Node, t: int, stage: int) -> None:
    """Step 3: publish this stage's groups as text, before training on them: the bare question, the decoded
    completions and this node's own rewards."""
    for r in node.rollouts:
        each = zip(r.texts, r.group.rewards, r.finished, strict=True)
        written = [{"response": text, "reward": reward, "finished": done} for text, reward, done in each]
        q = r.question
        group = {"task": q.task, "seed": q.seed, "prompt": q.text, "answer": q.answer}
        node.unpublished.append(group | {"completions": written})
    if stage in run.config.publishing_stages:
        groups = {str(i): group for i, group in enumerate(node.unpublished)}
        node.unpublished = []
        about = {"model": run.config.MODEL_NAME, "reasoning_gym": REASONING_GYM_VERSION, "tasks": task_hash()}
        run.store.publish(t, stage, node.id, about, groups)
    beat(run)


def sample_external(run: "Run", node: Node, t: int, stage: int) -> list[Rollout]:
    """Step 4: verify and score the peers' groups, drop those that are not informative, draw J uniformly.

    Groups of older rounds, up to ROLLOUT_MAX_AGE back, fill gaps.
    """
    config, figures, began = run.config, node.figures, time.monotonic()
    wanted, drawn = config.NUM_TRANSPLANT_TREES, []
    figures |= {"external_pool": 0, "external_peers": 0, "rejected": 0}
    if wanted > 0:
        wait_for_peers(run, t, stage)
        rng = random.Random(stream_seed(config, node.id, t, stage, "external"))
        for age in range(min(config.ROLLOUT_MAX_AGE, t) + 1):
            pool = informative_pool(run, node, t, stage, age, rng)
            figures["external_pool"] += len(pool)
            drawn += rng.sample(pool, min(wanted - len(drawn), len(pool)))
            if len(drawn) == wanted:
                break
    oldest = t - config.ROLLOUT_MAX_AGE
    node.trained = {key for key in node.trained if key[0] >= oldest} | {r.key for r in drawn}
    newest = max((key[0] for key, groups in run.files.items() if groups), default=t)
    figures |= {
        "external_ages": [t - r.key[0] for r in drawn],
        "external_short": wanted - len(drawn),
        "newest_file_age": t - newest,
        "wait_seconds": time.monotonic() - began,
    }
    return drawn


def wait_for_peers(run: "Run", t: int, stage: int) -> None:
    """Wait for live peers that published the last round and not yet this one, FETCH_TIMEOUT_SECONDS a round.

    Who did not publish the last round is not waited for: nobody who is gone costs more than one round. In
    round 0 all who live are waited for.
    """
    config, store = run.config, run.store
    if stage not in config.publishing_stages:
        return  # nobody publishes yet
    there = store.nodes("rollouts", t - 1, config.publishing_stages[-1]) if t else workers_of(run.sessions)
    late = set(there) - {node.id for node in run.nodes}
    while late and not run.stop.pressed and store.clock() <= t:  # else the swarm has gone on
        began = time.monotonic()
        late -= set(store.nodes("rollouts", t, stage))
        late = {peer for peer in late if is_live(run, peer)}
        if late and run.fetch_seconds <= 0:
            if t not in run.reported:  # say it once a round, whatever its stages
                run.reported.add(t)
                why = f"{some(sorted(late), 8)} not here after FETCH_TIMEOUT_SECONDS"
                run.log.event("wait", f"round {t}: {why}", round=t)
            return
        if late:
            beat(run)
            run.fetch_seconds -= breathe(began)


PEER_SECONDS = 20.0  # for verifying what one peer published in a round: verifiers can be made slow


def informative_pool(run: "Run", node: Node, t: int, stage: int, age: int, rng) -> list[Rollout]:
    """Groups of this stage, or of all stages `age` rounds ago, to draw from: verified, informative, not used.

    At most FETCH_MAX_PEERS peers, I groups of each: flooding under one name buys nothing.
    """
    config, pool = run.config, []
    stages = config.publishing_stages if age else [stage]
    there = [(t - age, s, peer) for s in stages for peer in run.store.nodes("rollouts", t - age, s)]
    peers = sorted({key[2] for key in there} - {node.id})
    if age or len(peers) >= config.FETCH_MAX_PEERS:  # else few enough: all are read
        peers = sorted(rng.sample(peers, min(config.FETCH_MAX_PEERS, len(peers))))
    if age == 0:
        node.figures["external_peers"] = len(peers)
    for peer in peers:
        groups = [raw for key in there if key[2] == peer for raw in peer_groups(run, node, key)]
        groups = [raw for raw in groups if raw["key"] not in node.trained]
        if len(groups) > config.NUM_TRAIN_SAMPLES:
            groups = rng.sample(groups, config.NUM_TRAIN_SAMPLES)
        began = time.thread_time()  # stands still while this process is suspended
        for raw in groups:
            if raw["key"] not in run.verified:  # the nodes of this process verify a group once for all
                in_time = time.thread_time() - began < PEER_SECONDS
                run.verified[raw["key"]] = verify(run, raw) if in_time else "too slow to verify"
            found = run.verified[raw["key"]]
            if isinstance(found, str):  # why it is rejected
                reject(run, node, peer, found)
            elif found.group.is_informative or not config.EXTERNAL_FILTER:
                pool.append(found)
    return pool


def peer_groups(run: "Run", node: Node, key: tuple) -> list[dict]:
    """The groups of a peer's rollout file; none if it cannot be used: it is read again in the next round."""
    if key not in run.files:
        try:
            run.files[key] = run.store.fetch(*key, run.config.max_rollout_bytes)
        except BadFile as error:
            run.files[key] = []  # for the rest of this round: `finish_round` forgets it
            reject(run, node, key[2], str(error))
    return run.files[key]


def reject(run: "Run", node: Node, peer: str, reason: str) -> None:
    """Count what a peer wrote and nobody can use; say it once."""
    node.figures["rejected"] += 1
    if (peer, reason) not in run.reported:
        run.reported.add((peer, reason))
        run.log.event("reject", f"{peer}: {reason}", peer=peer)


def verify(run: "Run", raw: dict) -> Rollout | str:
    """A peer's group -> Rollout in this process's ids with rewards of its own, or the reason of rejection.

    Only task, seed, response and finished are used: the question is made again, the prompt must agree.
    """
    codec, g, drawn = run.codec, run.config.NUM_GENERATIONS, raw["completions"]
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
    if len(drawn) > g:  # a larger group would weigh more than one of this node's own
        drawn = random.Random(str(raw["key"])).sample(drawn, g)
    texts, finished = ([c[name] for c in drawn] for name in ("response", "finished"))
    completions = codec.completions(texts, finished)
    if not all(1 <= len(ids) <= codec.max_completion for ids in completions):
        return f"completion empty or over {codec.max_completion} tokens here"
    if max(map(max, completions)) >= codec.vocabulary:
        return "a token that this model does not have"
    if not all(codec.eos_ids.isdisjoint(ids[:-1]) for ids in completions):
        return "a text that is the end of a turn here"
    texts = [codec.decode(ids) for ids in completions]  # the reward is that of the tokens trained on
    group = Group(codec.prompt(question), completions, score_all(question, texts, run.config.REWARD))
    return Rollout(question, group, texts, finished, raw["key"])


def policy_gradient(run: "Run", node: Node, external: list[Rollout]) -> None:
    """Step 5: one GRPO update on I own groups, informative ones first, and the external ones alike."""
    config, began = run.config, time.monotonic()
    local = sorted(node.rollouts, key=lambda r: not r.group.is_informative)[: config.NUM_TRAIN_SAMPLES]
    # EXERCISE: train on own informative groups of earlier rounds again, in the place of flat ones
    own = [rollout.group for rollout in local]
    groups = own + without_unlikely(run, node, [rollout.group for rollout in external])
    stats = update(
        node.model, node.optimizer, groups, max_new_tokens=config.MAX_NEW_TOKENS,
        temperature=config.TEMPERATURE, loss_type=config.LOSS_TYPE, clip_low=config.CLIP_LOW,
        clip_high=config.CLIP_HIGH, num_iterations=config.NUM_ITERATIONS, max_rows=run.max_rows,
        pad_id=run.codec.pad_id, dtype=getattr(torch, config.DTYPE),
    )  # fmt: skip
    run.max_rows, logps = stats.pop("max_rows"), stats.pop("logps")  # logps: of informative groups, own first
    own_rows = sum(len(group.completions) for group in own if group.is_informative)
    node.figures |= stats | {
        "logp_own": average(logps[:own_rows]),
        "logp_external": average(logps[own_rows:]),
        "local_groups": len(own),
        "external_groups": len(groups) - len(own),
        "informative_groups": sum(group.is_informative for group in groups),
        "train_seconds": time.monotonic() - began,
    }
    beat(run)


def submit_reward(run: "Run", node: Node, t: int, stage: int) -> None:
    """Step 6: publish the stage's reward and figures, now and then with held-out accuracy."""
    config, figures = run.config, node.figures
    if config.EVAL_INTERVAL and (t + 1) % config.EVAL_INTERVAL == 0 and stage == config.MAX_STAGES - 1:
        figures["held_out"] = held_out_accuracy(run, node, t)
    node.total_reward += figures["reward"]
    run.store.submit_reward(t, stage, node.id, {"session": run.session, **figures})
    row = {"timestamp": time.time(), "round": t, "stage": stage, "node_id": node.id, **figures}
    row |= {"experiment": config.EXPERIMENT_NAME, "my_reward": figures["reward"]}
    row["total_reward"] = node.total_reward
    run.log.add(f"{node.id}/metrics.jsonl", json.dumps(row))


def held_out_accuracy(run: "Run", node: Node, t: int) -> float:
    """pass@1 on EVAL_SAMPLES questions of the reserved seed range, the same for all nodes."""
    seeds = [stream_seed(run.config, "", 0, 0, "held-out", i) for i in range(run.config.EVAL_SAMPLES)]
    questions = questions_of(run, [HELD_OUT_SEEDS.start + seed for seed in seeds])
    return mean_reward(answer(run, node, questions, 1, stream_seed(run.config, node.id, t, 0, "evaluate")))


def without_unlikely(run: "Run", node: Node, groups: "list[Group]") -> "list[Group]":
    """Externals without completions that are less likely, per token, than EXTERNAL_FLOOR of this node's own.

    A stranger's answers behind words that nobody here says can be 90% of an update (cf. arXiv:2605.22537).
    They go before advantages are made: the rest of such a group would only teach what not to say.
    """
    if not groups or run.config.EXTERNAL_FLOOR == 0:
        return groups
    own = [rollout.group for rollout in node.rollouts]
    means, run.max_rows = mean_logps(
        node.model, own + groups, temperature=run.config.TEMPERATURE, max_rows=run.max_rows,
        pad_id=run.codec.pad_id, dtype=getattr(torch, run.config.DTYPE),
    )  # fmt: skip
    count = sum(len(group.completions) for group in own)
    rank = int(run.config.EXTERNAL_FLOOR * count)
    floor = sorted(means[:count])[rank] if rank < count else math.inf  # a share of 1 leaves all out
    likely = iter(mean >= floor for mean in means[count:])
    kept = []
    for group in groups:
        pairs = [pair for pair in zip(group.completions, group.rewards, strict=True) if next(likely)]
        if pairs:
            kept.append(Group(group.prompt, [ids for ids, _ in pairs], [reward for _, reward in pairs]))
    node.figures["external_kept"] = average(mean >= floor for mean in means[count:])
    return kept


# -------- From round to round -----------------------------------------------------------------------------


class Ended(Exception):
    """The run ends early: "stopped" (by one of STOP_SIGNALS) or "superseded" (by a newer session)."""


def beat(run: Run, state: str = "") -> None:
    """A sign of life of each node, every few seconds; state: goodbye, at once."""
    if state or time.monotonic() >= run.next_beat:
        for node in run.nodes:
            run.store.heartbeat(node.id, run.session, run.done + 1, state or "running")
        run.next_beat = time.monotonic() + min(10.0, run.config.STALE_AFTER_SECONDS / 8)


def is_live(run: Run, node: str) -> bool:
    session = run.sessions.get(node, "")
    return run.store.life(node, session, run.config.STALE_AFTER_SECONDS) == "live"


def is_alone(run: Run) -> bool:
    return len(run.nodes) == 1 and run.config.NUM_WORKERS <= 1 and len(workers_of(run.sessions)) == 1


def check_superseded(run: Run) -> None:
    """Ended if a newer session of one of this process's nodes has registered: that one goes on."""
    run.sessions = run.store.sessions()
    newer = [node.id for node in run.nodes if run.sessions.get(node.id, "") > run.session]
    if newer:
        run.log.event("end", f"a newer session of {some(newer)} runs; this one stops")
        raise Ended("superseded")


def next_round(run: Run) -> int | None:
    """The round to work on now, None after the last one. Rounds that were missed meanwhile are skipped."""
    own = run.done + 1
    if own >= run.config.MAX_ROUNDS:
        return None
    t = wait_for_clock(run, own)
    if t > own:
        missed = f"rounds {own} to {t - 1} were opened by the swarm meanwhile; going on with round {t}"
        run.log.event("skip", missed, first=own, last=t - 1)
    run.fetch_seconds = run.config.FETCH_TIMEOUT_SECONDS
    return t if t < run.config.MAX_ROUNDS else None


def wait_for_clock(run: Run, own: int) -> int:
    """The clock's round as soon as it is `own` or later; where nobody leads, this process opens its own.

    A coordinator leads while it is live: when killed, for STALE_AFTER_SECONDS more (`DriveStore.life`). Where
    none was seen alive for so long, the process opens the round itself:
        COORDINATOR_ROUND_INTERVAL   at its first round, while fewer than NUM_WORKERS have registered
        two seconds                  if others have registered, and it has one node
        no time                      else
    Where nobody else ever registered, a process that resumes replays its rounds after the checkpoint.
    """
    config, store, ours = run.config, run.store, {node.id for node in run.nodes}
    while True:
        look = time.monotonic()
        run.stop.check()  # between rounds, and in no step of one: a round that has begun is finished
        beat(run)
        check_superseded(run)
        others, clock = run.sessions.keys() - ours, store.clock()
        if others and clock >= own:
            return clock
        delay = 2.0 if others and config.LOCAL_NODES == 1 else 0.0
        if len(workers_of(run.sessions)) < config.NUM_WORKERS and not run.history:
            delay = config.COORDINATOR_ROUND_INTERVAL  # others are expected
        if is_live(run, COORDINATOR):
            run.led_until = look
        elif look - run.led_until >= delay:
            store.open_round(own, run.nodes[0].id)
            write_winners(store, own - 1, run.sessions)
            return own
        breathe(look)


def finish_round(run: Run, t: int) -> None:
    """Say how the round went, write the log; checkpoint when due, clean up."""
    config, last, every = run.config, run.config.MAX_ROUNDS - 1, run.config.CHECKPOINT_INTERVAL
    due = (run.done + 1) // every < (t + 1) // every  # also where the round in which it was due was skipped
    run.done = t
    report_round(run, t)
    run.log.flush(run.store)  # before the checkpoint: rounds that are not replayed have their rows
    if (t + 1) % SAMPLE_INTERVAL == 0 and t < last:
        run.log.say(sample_text(sample(run)))
    if due or t == last:
        save_checkpoint(run)
    uploading = run.upload is not None and not run.upload.done()
    if due and t < last and config.HUGGINGFACE_ACCESS_TOKEN and not uploading:  # the last ones: run_worker
        end_upload(run)
        export_models(run, last=False)
    if config.ROLLOUT_CLEANUP_ENABLED:
        needed = config.CHECKPOINT_INTERVAL + config.ROLLOUT_MAX_AGE  # by a node that resumes
        keep = max(config.ROLLOUT_KEEP_LAST_N_ROUNDS, needed)
        run.store.retire_rollouts(t + 1 - keep, config.ROLLOUT_ARCHIVE_OLD)
    oldest = t - config.ROLLOUT_MAX_AGE  # a file that could not be used is read again in the next round
    run.files = {key: groups for key, groups in run.files.items() if groups and key[0] >= oldest}
    run.verified = {key: found for key, found in run.verified.items() if key[0] >= oldest}


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # USR1: Slurm's time limit


class StopButton:
    """Counts signals; `check` looks at it where no update is under way. A second one exits at once."""

    def __init__(self):
        self.pressed, self._since, self._old = 0, 0.0, {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            nohup = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
            self._old = {n: signal.signal(n, self._on_signal) for n in {*STOP_SIGNALS} - nohup}

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self.pressed:
            raise Ended("stopped")

    def _on_signal(self, number, frame) -> None:
        if self.pressed and time.monotonic() - self._since < 0.5:
            return  # one key press may arrive twice
        self.pressed, self._since = self.pressed + 1, time.monotonic()
        if self.pressed > 1:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError, RuntimeError):  # a closed terminal; a print that was interrupted
            print("\nstopping (a round is finished first); once more to exit at once", flush=True)


# -------- The log -----------------------------------------------------------------------------------------


class Log:
    """Lines for people, JSON lines for programs. They gather in memory; `flush` appends them to the files."""

    def __init__(self, node_id: str, secret: str, resume_line: str):
        self.node_id, self.secret, self.resume_line = node_id, secret, resume_line
        self.lines, self.bar = [], None

    def show_bar(self, total: int, done: int) -> None:
        """A progress bar below the lines, on a terminal: a log file or a notebook wants plain lines."""
        if sys.stdout.isatty():
            self.bar = tqdm.tqdm(total=total, initial=done, unit="round", dynamic_ncols=True, leave=False)

    def add(self, path: str, text: str) -> str:
        """Queue a line for a file, without the token; it is returned."""
        text = text.replace(self.secret, "***") if self.secret else text
        self.lines.append((f"logs/{path}", text))
        return text

    def say(self, text: str, quiet: bool = False) -> None:
        """A line for people; quiet: only into stdout.log."""
        text = self.add(f"{self.node_id}/stdout.log", text)
        if not quiet:
            with contextlib.suppress(OSError, ValueError):  # a full disk, or a reader that is gone
                self.bar.write(text) if self.bar else print(text, flush=True)

    def progress(self, text: str) -> None:
        """A line that ends in "eta 5s"; on a terminal it is rewritten."""
        on_terminal = sys.stdout.isatty()
        self.say(text, quiet=on_terminal)
        if on_terminal:
            print(f"\r{text}  ", end="\n" if text.endswith("eta 0s") else "", flush=True)

    def event(self, kind: str, text: str, quiet: bool = False, **data) -> None:
        """A row of training_events.jsonl, and a line for people unless `quiet`."""
        self.say(f"{self.node_id} {kind}: {text}", quiet)
        row = {"timestamp": time.time(), "event": kind, "node_id": self.node_id, "text": text, **data}
        self.add(f"{self.node_id}/training_events.jsonl", json.dumps(row))

    def flush(self, store) -> None:
        lines, self.lines = self.lines, []
        for path in dict.fromkeys(path for path, _ in lines):
            store.append(path, "".join(f"{text}\n" for p, text in lines if p == path))


SAMPLE_INTERVAL = 20  # rounds between two samples of what the model says


def report_round(run: Run, t: int) -> None:
    """A line for the round, the mean of this process's nodes; VERBOSE: one for each of several; a hint."""
    config, each = run.config, [node.figures for node in run.nodes]
    names = {name for figures in each for name in figures} - {"external_ages"}
    mean = {name: average(figures.get(name) for figures in each) for name in names}
    run.history.append(mean | {"ended": time.monotonic()})
    recent, where = run.history[-20:], counted(t, config.MAX_ROUNDS)
    went = pace(run.began, run.history, config.MAX_ROUNDS - 1 - t)
    if mean["wait_seconds"] > 0.5:
        went = f"{mean['wait_seconds']:.1f}s wait of {went}"
    if mean["external_short"] and mean["newest_file_age"]:
        went += f" | the newest peer file is {mean['newest_file_age']:.0f} rounds old (ROLLOUT_MAX_AGE)"
    name = run.nodes[0].id if len(each) == 1 else f"{len(each)} nodes"
    run.log.say(f"{name} {where} | {round_line(recent)} | {went}")
    for node in run.nodes if len(each) > 1 else []:
        run.log.say(f"{node.id} {where} | {round_line([node.figures])}", quiet=not config.VERBOSE)
    if run.log.bar:
        run.log.bar.update(t + 1 - run.log.bar.n)
    if len(run.history) % 10 == 0 and not any(past["informative_groups"] for past in recent[-10:]):
        run.log.event("no signal", f"for 10 rounds: {why_flat(recent[-10:])}", round=t)


def sample(run: Run) -> list[dict]:
    """Two questions, the same all along, with what the first node answers now; an event, and lines."""
    questions = questions_of(run, [stream_seed(run.config, "", 0, 0, "sample", i) for i in range(2)])
    groups = []
    for r in answer(run, run.nodes[0], questions, 3, stream_seed(run.config, "", 0, 0, "sampled")):
        said = [{"response": x, "reward": y} for x, y in zip(r.texts, r.group.rewards, strict=True)]
        groups.append({"prompt": r.question.text, "answer": r.question.answer, "completions": said})
    what = f"what {run.nodes[0].id} says before round {run.done + 1}"
    run.log.event("sample", what, quiet=run.done + 1 == run.config.MAX_ROUNDS, groups=groups)
    return groups


def sample_text(groups: list[dict], before: list[dict] | None = None) -> str:
    """`sample` as eight lines that fit the terminal, with what was said before beside it."""
    width = shutil.get_terminal_size((100, 24)).columns - 14  # run_swarm.sh puts a name before each line
    lines, half = [], width // 2
    for group, old in zip(groups, before or groups, strict=True):
        question, *answers = group_lines(group["prompt"], group["answer"], group["completions"], width)
        if before:
            said = group_lines("", "", old["completions"], half - 1)[1:]
            answers = [f"{a:{half}}{b[:half]}" for a, b in zip(said, answers, strict=True)]
        lines += [question, *answers]
    return "\n".join(lines)


def conclude(run: Run) -> None:
    """What was learned since this start, or why nothing, in a few lines."""
    say, history, rounds = run.log.say, run.history, len(run.history)
    say(f"what it said before round {run.done + 1 - rounds}, and says now, after round {run.done}:")
    say(sample_text(sample(run), before=run.first_sample))
    who = run.nodes[0].id if len(run.nodes) == 1 else f"{len(run.nodes)} nodes"
    total, peers = average(n.total_reward for n in run.nodes), sum(f["external_groups"] for f in history)
    more = f"{total:.2f} in all a node since round 0; {peers / rounds:.1f} groups a round came from peers"
    run.log.event("end", f"{verdict(history, who)}; {more}")
    tasks = [f"{task} {mean:.2f}" for task, mean in reward_per_task(history[-20:]).items()]
    say("reward per task: " + ", ".join(tasks))
    if is_alone(run):
        say(ALONE)


def write_picture(store, say) -> None:
    """reports/EXPERIMENT.png, where there is matplotlib."""
    picture = draw_run(reward_rows(store), store.base.name)
    if picture:
        shared = DriveStore(store.root, None)
        shared.write(f"reports/{store.base.name}.png", picture)
        say(f"picture: {shared.base / 'reports' / store.base.name}.png")


# -------- Settings ----------------------------------------------------------------------------------------


def var(default, help, allowed="", of="node"):
    """A line of Config. allowed: words, or the lowest and the highest number. of: whose setting it is."""
    return field(default=default, metadata=dict(help=help, allowed=allowed, of=of))


# All but a process's own stand in config.json. A joining node takes the swarm's from there where it sets none
# itself; the model's, too, if its model is the same.
of_swarm, of_model, of_process = (functools.partial(var, of=of) for of in ("swarm", "model", "process"))


# fmt: off
@dataclass(frozen=True, repr=False)  # a repr would show the access token in every traceback
class Config:
    """Every environment variable; `settle` works out "auto". Adding one here is all it takes."""

    GDRIVE_PATH: str = of_process("auto",
                                  "the shared folder; auto: rl-swarm in MyDrive if mounted, else ./rl-swarm")
    EXPERIMENT_NAME: str = var("default", "one experiment = one subfolder, isolated from all others")
    NODE_ROLE: str = of_process("worker", "who trains, opens rounds, or only reads; auto: by rank",
                                "worker coordinator auto monitor report validate")
    NODE_ID: str = of_process("auto", "unique name; auto: node_<rank or 8 hex>, node if LOCAL_NODES > 1")
    LOCAL_NODES: int = var(1, "workers in this process: NODE_ID_0, NODE_ID_1 …", (1, 256))
    SEED: int = of_swarm(42, "the swarm's seed; nodes differ by NODE_ID", (0, 2**31))
    TEST_MODE: bool = var(False, "quick validation: 3 rounds, I = 4, J = 2, G = 4, tiny, short warm start")
    MAX_ROUNDS: int = of_swarm(2000, "rounds to train", (1, 10**6))
    MAX_STAGES: int = of_swarm(1, "generate-share-update stages in a round", (1, 100))
    MODEL_NAME: str = var("auto", "tiny, a Hugging Face id or a folder; auto: by what the machine has")
    TASKS: str = of_swarm("auto", "comma list; auto: the paper's nine, for tiny the eight small ones")
    NUM_SHOTS: int = of_model("auto", "solved examples without a chat template; auto: 2, tiny 0", (0, 16))
    WARM_START_STEPS: int = of_model("auto", "supervised steps first; auto: tiny 1750, else 0", (0, 10**6))
    ANSWER_TAG_SHARE: float = of_model(0.02, "rewarded style at the end of tiny's warm start", (0, 1))
    REWARD: str = of_swarm("exact", "1 where the verifier gives 0.99, else 0; its score", "exact verifier")
    NUM_TRAIN_SAMPLES: int = of_swarm(8, "I: own questions per round and stage", (1, 4096))
    NUM_TRANSPLANT_TREES: int = of_swarm(0, "J: external groups per stage; 0: plain GRPO", (0, 4096))
    NUM_GENERATIONS: int = of_swarm(8, "G: completions per question", (2, 64))
    TEMPERATURE: float = of_model(1.0, "of sampling and of the log-probabilities in the loss", (0.01, 100))
    MAX_NEW_TOKENS: int = of_model("auto", "longest completion; auto: 10 for tiny, else 256", (1, 32768))
    EXTERNAL_FILTER: bool = of_swarm(True, "drop groups that are not informative before drawing externals")
    EXTERNAL_FLOOR: float = of_swarm(0.0, "leave out externals less likely than this share of own", (0, 1))
    LOCAL_OVERSAMPLE: int = of_swarm(1, "k: generate k x I questions, train on I of them", (1, 64))
    LEARNING_RATE: float = of_model("auto", "AdamW; auto: 6e-4 for tiny, else 1e-6", (0, 1))
    CLIP_LOW: float = of_model(0.2, "ratio clipped below at 1 - this", (0, 1))
    CLIP_HIGH: float = of_model(0.28, "ratio clipped above at 1 + this", (0, 10))
    NUM_ITERATIONS: int = of_model(1, "optimizer steps on the completions of one stage", (1, 100))
    LOSS_TYPE: str = of_model("dapo", "per token, per completion, by MAX_NEW_TOKENS", "dapo grpo dr_grpo")
    MICRO_BATCH_SIZE: int = var("auto", "completions per forward pass; auto: by memory", (1, 65536))
    DTYPE: str = var("auto", "to compute in; auto: bfloat16 if the hardware can", "float32 bfloat16")
    DEVICE: str = of_process("auto", "cuda, cuda:1, mps or cpu; auto: the first there is")
    COORDINATOR_ROUND_INTERVAL: float = of_swarm(60.0, "seconds of a round, at the latest", (0.01, 86400))
    ROUND_ADVANCE: str = of_swarm("hybrid", "interval over, all are in, or either", "time completion hybrid")
    ROLLOUT_PUBLISH_FREQUENCY: str = of_swarm("stage", "generation means stage", "stage round generation")
    ROLLOUT_MAX_AGE: int = of_swarm(4, "how many rounds back externals may come from", (0, 1000))
    FETCH_MAX_PEERS: int = var(10, "peers to read per round, drawn at random", (1, 1000))
    FETCH_TIMEOUT_SECONDS: float = var(30.0, "how long to wait for peers' rollouts", (0, 3600))
    STALE_AFTER_SECONDS: float = var(300.0, "silence after which a node is not live", (1, 86400))
    ROLLOUT_CLEANUP_ENABLED: bool = of_swarm(False, "remove old rollouts")
    ROLLOUT_KEEP_LAST_N_ROUNDS: int = of_swarm(10, "rounds of rollouts to keep", (1, 10**6))
    ROLLOUT_ARCHIVE_OLD: bool = of_swarm(False, "move old rollouts to archives/ instead of deleting them")
    CHECKPOINT_INTERVAL: int = of_swarm(10, "rounds between checkpoints", (1, 10**6))
    CHECKPOINT_KEEP: int = var(2, "checkpoints to keep", (1, 1000))
    EVAL_INTERVAL: int = var(0, "rounds between held-out evaluations (pass@1); 0: none", (0, 10**6))
    EVAL_SAMPLES: int = var(64, "held-out questions, from seeds that no node trains on", (1, 65536))
    VERBOSE: bool = of_process(False, "every node's line of every round on the screen, too")
    HUGGINGFACE_ACCESS_TOKEN: str = of_process("", "push to the Hub with each checkpoint; never shown")
    HF_REPO: str = of_process("auto", "where to, with -<node> if several; auto: <user>/<experiment>-<node>")
    NUM_WORKERS: int = var(0, "workers that run_swarm.sh starts (4), or to expect", (0, 10**4))
    CONFIGS: str = of_process("", "I/J pairs to compare, such as 8/0 4/4")
    SEEDS: str = of_process("", "seeds to compare them over")

    @property
    def publishing_stages(self) -> range:
        """Stages of a round in which rollouts are published."""
        return range(self.MAX_STAGES - 1 if self.ROLLOUT_PUBLISH_FREQUENCY == "round" else 0, self.MAX_STAGES)

    @property
    def node_ids(self) -> list[str]:
        """Names of this process's nodes."""
        several = [f"{self.NODE_ID}_{i}" for i in range(self.LOCAL_NODES)]
        return several if self.LOCAL_NODES > 1 else [self.NODE_ID]

    @property
    def max_rollout_bytes(self) -> int:
        """Of a peer's file: what I groups of G completions take, many times over."""
        completions = self.NUM_TRAIN_SAMPLES * self.NUM_GENERATIONS * self.MAX_STAGES
        return min(8 << 20, (1 << 18) + 64 * completions * (self.MAX_NEW_TOKENS + 16))
# fmt: on


TEST_MODE_DEFAULTS = dict(  # with something to learn from
    MAX_ROUNDS=3, NUM_TRAIN_SAMPLES=4, NUM_TRANSPLANT_TREES=2, NUM_GENERATIONS=4, MODEL_NAME="tiny",
    WARM_START_STEPS=150, ANSWER_TAG_SHARE=0.9,
)  # fmt: skip
FOR_TINY = dict(
    TASKS=",".join(SMALL_TASKS), NUM_SHOTS=0, WARM_START_STEPS=1750, LEARNING_RATE=6e-4, MAX_NEW_TOKENS=10
)
FOR_OTHERS = dict(
    TASKS=",".join(PAPER_TASKS), NUM_SHOTS=2, WARM_START_STEPS=0, LEARNING_RATE=1e-6, MAX_NEW_TOKENS=256
)
REAL_MODEL, ITS_GB = "Gensyn/Qwen2.5-0.5B-Instruct", 10  # weights, gradients, Adam, activations of one node
SECRET = "HUGGINGFACE_ACCESS_TOKEN"
MUST_AGREE = ("SEED", "TASKS", "REWARD", "MAX_STAGES")  # in all nodes of an experiment, for ever
OF_SWARM, OF_MODEL, OF_PROCESS = (
    [spec.name for spec in fields(Config) if spec.metadata["of"] == of]
    for of in ("swarm", "model", "process")
)
RANKS = ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK", "RANK")
SHORT_NAMES = {"LR": "LEARNING_RATE", "I": "NUM_TRAIN_SAMPLES", "J": "NUM_TRANSPLANT_TREES",
               "G": "NUM_GENERATIONS", "NUM_ROUNDS": "MAX_ROUNDS", "MODEL": "MODEL_NAME"}  # fmt: skip


class ConfigError(ValueError):
    """Settings that cannot be used. The text names each variable, what was found and what is allowed."""


def parse_value(text: str, spec):
    """One variable's text -> its value; ValueError says what is allowed."""
    kind, allowed = spec.type, spec.metadata["allowed"]
    truths = dict.fromkeys("1 true yes on".split(), True) | dict.fromkeys("0 false no off".split(), False)
    if text == "auto" and spec.default == "auto":
        return text
    try:
        if kind is bool:
            expected = "True or False"
            return truths[text.lower()]  # never bool(text): bool("False") is True
        if kind is str:
            expected = ", ".join(allowed.split())
            fits, value = not allowed or text in allowed.split(), text
        else:
            expected = f"{'an integer' if kind is int else 'a number'} from {allowed[0]} to {allowed[1]}"
            value = kind(text)
            fits = allowed[0] <= value <= allowed[1]  # nan is in no range
    except (KeyError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"expected {expected}" + (", or auto" if spec.default == "auto" else ""))
    return value


def rank_of(environ) -> str | None:
    """This process's index where an engine gives it one; a requeued task gets the same one again."""
    ranks = [environ[name] for name in RANKS if environ.get(name, "").isdecimal()]
    several = environ.get("SLURM_ARRAY_TASK_ID") and environ.get("SLURM_NTASKS", "1") != "1"
    return "_".join(ranks[: 2 if several else 1]) or None


def parse_all(environ, mistakes: list[str], where: str = "") -> dict:
    """{name: value} of the variables that are set, in an environment or in config.json (where)."""
    given = {}
    for spec in fields(Config):
        text = str(environ.get(spec.name, "")).strip()
        try:
            if text and not (spec.name == SECRET and text == "None"):
                given[spec.name] = parse_value(text, spec)
        except ValueError as error:
            mistakes.append(f"{spec.name}={plain(repr(text))}{where}: {error}")
    if given.get("TASKS", "auto") != "auto":
        tasks = re.findall(r"[^\s,]+", given["TASKS"])
        mistakes += [f"TASKS{where}: {why_refused(task)}" for task in tasks if task not in TASK_TABLE]
        given["TASKS"] = ",".join(tasks)
    return given


def read_environment(environ) -> tuple[dict, list[str]]:
    """Environment -> ({name: value} of what is set and where this process is at home, warnings).

    All mistakes come in one ConfigError.
    """
    mistakes, warnings, rank = [], [], rank_of(environ)
    given = parse_all(environ, mistakes)
    names = [spec.name for spec in fields(Config)]
    for name in sorted(set(environ) - set(names)):
        close = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.88)
        near = SHORT_NAMES.get(name.upper(), close[0] if close else None)
        if near:
            fatal = near in ("EXPERIMENT_NAME", "GDRIVE_PATH") and near not in given
            said = f"{name} is not a variable of this program: did you mean {near}?"
            (mistakes if fatal else warnings).append(said)
    if given.get("NODE_ROLE") == "auto":
        given["NODE_ROLE"] = "coordinator" if rank and not rank.strip("0_") else "worker"
    role, several = given.get("NODE_ROLE", "worker"), given.get("LOCAL_NODES", 1)
    if role == "coordinator":
        given["NODE_ID"] = COORDINATOR
    elif given.get("NODE_ID", "auto") == "auto":
        made_up = "node" if several > 1 else f"node_{secrets.token_hex(4)}"
        given["NODE_ID"] = f"node_{rank}" if rank else made_up
    elif role == "worker" and given["NODE_ID"].lower() == COORDINATOR:
        mistakes.append(f"NODE_ID={given['NODE_ID']!r}: this is the coordinator's seat; choose another")
    longest = f"{given['NODE_ID']}_{several - 1}" if several > 1 else given["NODE_ID"]
    experiment = "-" if role == "report" else given.get("EXPERIMENT_NAME", "-")  # there it is a pattern
    for name, value in (("EXPERIMENT_NAME", experiment), ("NODE_ID", longest)):
        if not is_name(value):
            allowed = "1 to 64 letters, digits, '.', '_', '-', no '.' at either end"
            mistakes.append(f"{name}={value!r}: use {allowed}")
    colab = Path("/content/drive/MyDrive")
    if given.get("GDRIVE_PATH", "auto") == "auto":
        given["GDRIVE_PATH"] = str(colab / "rl-swarm") if colab.is_dir() else "rl-swarm"
    given["GDRIVE_PATH"] = os.path.expanduser(given["GDRIVE_PATH"])
    if not Path(given["GDRIVE_PATH"]).absolute().parent.is_dir():
        mistakes.append(f"GDRIVE_PATH={given['GDRIVE_PATH']!r}: there is no folder that it could be in")
    if mistakes:
        raise ConfigError("these settings cannot be used:\n  " + "\n  ".join(mistakes + warnings))
    return given, warnings


def settle(given: dict, there: dict, notes: list[str]) -> "Config":
    """Settings -> Config without "auto". Each comes from the first that has it: `given`, what is set;
    `taken`, what the experiment began with (`there`); `usual`, TEST_MODE's; `auto`, what fits the machine.

    ConfigError if the experiment disagrees, or holds what cannot be used. notes: what people should know.
    """
    mistakes, given = [], {name: value for name, value in given.items() if value != "auto"}
    there = {name: value for name, value in there.items() if str(value).strip() != "auto"}
    began_with = parse_all({n: there[n] for n in (*OF_SWARM, *OF_MODEL) if n in there}, mistakes, " (there)")
    if there.get("MODEL_NAME") == "tiny":
        began_with["MODEL_NAME"] = "tiny"
    taken = {n: v for n, v in began_with.items() if n in (*OF_SWARM, "MODEL_NAME") and n not in given}
    usual = TEST_MODE_DEFAULTS if given.get("TEST_MODE") else {}
    auto = choose_model(Config(**usual | taken | given), notes)
    if there.get("MODEL_NAME") == auto["MODEL_NAME"]:
        taken |= {n: began_with[n] for n in OF_MODEL if n in began_with and n not in given}
    config = Config(**auto | usual | taken | given)
    for name in MUST_AGREE:
        if name in began_with and began_with[name] != getattr(config, name):
            mistakes.append(f"{name}={getattr(config, name)!r}: the experiment has {began_with[name]!r}")
    if mistakes:
        todo = "change them, or take another EXPERIMENT_NAME"
        raise ConfigError(
            f"{config.EXPERIMENT_NAME} began with other settings: {todo}:\n  " + "\n  ".join(mistakes)
        )
    unusual = {n: v for n, v in taken.items() if v != getattr(Config(**auto | usual | given), n)}
    if unusual:
        notes.append("from the experiment: " + " ".join(f"{n}={v}" for n, v in unusual.items()))
    differ = [n for n, v in began_with.items() if v != getattr(config, n) and n != "MODEL_NAME"]
    if differ:
        notes.append("not as in the experiment: " + ", ".join(f"{n} (there {began_with[n]})" for n in differ))
    return config


def choose_model(config: "Config", notes: list[str]) -> dict:
    """The device and the model that "auto" stands for here, and the defaults that follow from them."""
    there = devices()
    device = next(iter(there)) if config.DEVICE == "auto" else config.DEVICE
    if device not in there:
        raise ConfigError(f"DEVICE={device!r}: this machine has {', '.join(there)}")
    model, needed = config.MODEL_NAME, ITS_GB * config.LOCAL_NODES
    if model == "auto" and config.NODE_ROLE == "worker":
        here = available_memory(device) / max(1, config.NUM_WORKERS) / 1e9
        model = REAL_MODEL if device != "cpu" and here > needed else "tiny"
        notes.append(f"MODEL_NAME=auto takes {model}: {REAL_MODEL} needs an accelerator with {needed} GB")
    usual = FOR_TINY if model == "tiny" else FOR_OTHERS
    return {**usual, "MODEL_NAME": model, "DEVICE": device, "DTYPE": there[device]}


def config_table(config: "Config", given) -> str:
    """The settings that were set (VERBOSE: all), one a line; a secret only as set."""
    values = {name: value for name, value in asdict(config).items() if config.VERBOSE or name in given}
    if values.get(SECRET):
        values[SECRET] = "set"
    return "\n".join(f"  {name:28} {value}" for name, value in values.items())


def help_text() -> str:
    """Every variable with its default and what it does, as `python sapo.py --help` prints it."""
    lines = ["usage: NAME=value … python sapo.py      (environment variables only)", ""]
    for f in fields(Config):
        choice = ", ".join(f.metadata["allowed"].split()) + ": " if f.type is str else ""
        meaning = choice.removeprefix(": ") + f.metadata["help"]
        lines.append(f"  {f.name:27} {f.default!s:8.8} {meaning}")
    return "\n".join(lines)


def resume_line(config: "Config", given: dict) -> str:
    """How to resume this node: the command with its name, its folder and all that was set; no secret."""
    if in_notebook():
        return f"run this cell again (NODE_ID={config.NODE_ID})"
    named = {name: value for name, value in given.items() if name != SECRET}
    named |= {"GDRIVE_PATH": os.path.abspath(config.GDRIVE_PATH), "EXPERIMENT_NAME": config.EXPERIMENT_NAME}
    return " ".join(
        [*(f"{name}={shlex.quote(str(value))}" for name, value in named.items()), "python sapo.py"]
    )


# -------- Checkpoints, the final model, the Hub -----------------------------------------------------------


def state_of(nodes: list[Node]) -> dict:
    """{name: tensor} of all that these nodes' training goes on from. No copies."""
    states = {node.id: training_state(node.model, node.optimizer) for node in nodes}
    return {f"{node_id}/{name}": tensor for node_id, mine in states.items() for name, tensor in mine.items()}


def save_checkpoint(run: Run) -> None:
    """All nodes' state after round `run.done` in one file; those beyond the newest CHECKPOINT_KEEP go."""
    if run.done <= run.saved:
        return
    check_superseded(run)  # what a newer process of this name wrote is not replaced
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state_of(run.nodes).items()}
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        todo = "lower LEARNING_RATE; the checkpoints before are kept"
        return run.log.event("error", f"no checkpoint after round {run.done}: weights are not finite: {todo}")
    nodes = {n.id: {"total_reward": n.total_reward, "trained": sorted(n.trained)} for n in run.nodes}
    about = {"model_name": run.config.MODEL_NAME, "next_round": run.done + 1, "nodes": nodes}
    about["crc"] = checksum(tensors.values())
    save = functools.partial(save_tensors, tensors, json.dumps(about))
    name = f"{run.config.NODE_ID}.safetensors"
    run.store.write(f"{bucket('checkpoints', run.done)}/{name}", save, sync=True)
    run.saved = run.done
    run.log.event("checkpoint", f"after round {run.done}", quiet=True, round=run.done)
    for older in [*run.store.checkpoints(run.config.NODE_ID).values()][run.config.CHECKPOINT_KEEP :]:
        run.store.delete(older)


def resume(run: Run) -> None:
    """Load the newest checkpoint of this process that is readable; none at all means round 0.

    StoreError if there are some and none can be used: a swarm never starts over by accident.
    """
    reason = None
    for round_, path in run.store.checkpoints(run.config.NODE_ID).items():
        try:
            run.store.insist(restore, run, run.store.find(path), round_)
        except Exception as error:  # many kinds; an unusable file is what they have in common
            reason = f"{path} cannot be used ({plain(error, 200)})"
            run.log.event("resume", f"{reason}; trying the one before")
            continue
        run.done = run.saved = round_
        return run.log.event("resume", f"from the checkpoint after round {round_}", round=round_)
    if reason:
        todo = "restore one, or take another NODE_ID or EXPERIMENT_NAME. Nothing was changed"
        raise StoreError(f"{run.store.base}: {reason}; {todo}")


def restore(run: Run, path: Path | None, round_: int) -> None:
    """A checkpoint into the nodes; the settings of the update are those of this start. Or an exception.

    A stranger may have written it: it is a safetensors file, so that reading it runs nothing.
    """
    if path is None:
        raise BadFile("not a regular file")
    about, ours = parse_json(read_about(path).encode()), state_of(run.nodes)
    nodes = sorted(about["nodes"])
    if about["model_name"] != run.config.MODEL_NAME or nodes != sorted(node.id for node in run.nodes):
        made_with = f"MODEL_NAME={about['model_name']} and nodes {some(nodes)}"
        raise ValueError(f"made with {made_with}: set these, or take another NODE_ID")
    saved = load_tensors(path, ours)
    if (about["next_round"], about["crc"]) != (round_ + 1, checksum(saved.values())):
        raise ValueError("damaged, or of another round")
    for node in run.nodes:
        mine = about["nodes"][node.id]
        node.trained = {(int(t), int(stage), str(peer), int(i)) for t, stage, peer, i in mine["trained"]}
        node.total_reward = float(mine["total_reward"])
    fill(ours, saved)


def export_models(run: Run, last: bool) -> None:
    """The models as ordinary Hugging Face folders: last: to models/NODE; to the Hub, if a token is set."""
    config, folder = run.config, tempfile.TemporaryDirectory()
    for node in run.nodes:
        exported = Path(folder.name, node.id)
        node.model.save_pretrained(exported)
        run.codec.tokenizer.save_pretrained(exported, save_jinja_files=False)  # several would be a folder
        for file in sorted(exported.iterdir()) if last else []:
            copy_it = functools.partial(shutil.copyfile, file)
            run.store.write(f"models/{node.id}/{file.name}", copy_it, sync=True)
    if config.HUGGINGFACE_ACCESS_TOKEN:
        api = huggingface_hub.HfApi(token=config.HUGGINGFACE_ACCESS_TOKEN)
        run.upload = api.run_as_future(push_to_hub, api, config, folder, f"after round {run.done}")
    else:
        folder.cleanup()
    if last:
        model = run.store.base / "models" / run.nodes[0].id
        question = lucky_question(run.tasks[0], 1)
        chat = [{"role": "user", "content": question.text}]
        prompt = chat if run.codec.tokenizer.chat_template else run.codec.decode(run.codec.prompt(question))
        made = f'pipeline("text-generation", {json.dumps(str(model))})'
        ask = f"from transformers import pipeline; print({made}({json.dumps(prompt)}, max_new_tokens=99))"
        run.log.say(f"final model: {model}\n  try it: python -c {shlex.quote(ask)}")


def push_to_hub(api, config: "Config", folder: tempfile.TemporaryDirectory, message: str) -> list[str]:
    """Upload the models of all nodes and delete `folder`; the names of their repositories.

    Runs in a thread of HfApi while training goes on: the one thing here that does.
    """
    repos = []
    with folder:
        for node in config.node_ids:
            repo = config.HF_REPO
            if repo == "auto":
                repo = f"{api.whoami()['name']}/{config.EXPERIMENT_NAME}-{node}"
            elif max(config.LOCAL_NODES, config.NUM_WORKERS) > 1:
                repo += f"-{node}"
            api.create_repo(repo, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=Path(folder.name, node), commit_message=message)
            repos.append(repo)
    return repos


def end_upload(run: Run) -> None:
    """Wait for the upload in the background, if there is one, and say how it went; it stops nothing."""
    if run.upload is None:
        return
    if not run.upload.done():
        run.log.say("waiting for the upload to the Hub")
    try:
        run.log.event("hub", f"pushed to {some(run.upload.result())}")
    except Exception as error:  # its text may hold the token: only type and status are told
        status = getattr(getattr(error, "response", None), "status_code", "no answer")
        run.log.event("hub", f"push failed, training goes on: {type(error).__name__} ({status})")
    run.upload = None


# -------- Roles -------------------------------------------------------------------------------------------


def announce(config: "Config", store: DriveStore, say) -> None:
    """Say whether the experiment is new, or who is in it; a made-up name joins none that has finished."""
    nodes = workers_of(store.sessions()) if store.base.is_dir() else []
    others = [name for name in list_experiments(config.GDRIVE_PATH) if name != config.EXPERIMENT_NAME]
    if not nodes:
        more = f"; there are also: {some(others, 8)}" if others else ""
        return say(f"new experiment {config.EXPERIMENT_NAME}{more}")
    clock = store.clock()
    if re.fullmatch("node_[0-9a-f]{8}", config.NODE_ID) and clock >= config.MAX_ROUNDS - 1:
        todo = "set EXPERIMENT_NAME for another, or NODE_ID and MAX_ROUNDS to go on with this one"
        raise ConfigError(f"{config.EXPERIMENT_NAME} has finished its {config.MAX_ROUNDS} rounds: {todo}")
    say(f"experiment {config.EXPERIMENT_NAME} is there already: round {clock}, nodes: {some(nodes, 8)}")


def load_warm_start(config: "Config", model, codec, tasks, log: Log, stop: StopButton) -> None:
    """Bring `model` to its warm start: from the shared cache, or by making it there once for all nodes.

    A claim keeps the others from making it too; one that was not renewed for two minutes counts no more.
    """
    Path(config.GDRIVE_PATH).mkdir(exist_ok=True)
    store = Patient(DriveStore(config.GDRIVE_PATH, None, config.NODE_ID), log.event, stop)
    store.delete(store.tmp)  # what a kill left
    recipe = json.dumps(warm_start_recipe(model, codec, config, tasks))
    name = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    path, claim, told = f"warmstart/{name}.safetensors", f"warmstart/{name}.claim", False

    def made() -> bool:
        try:
            where = store.find(path)
            if where:
                fill(weights_of(model), load_tensors(where, weights_of(model)))
            return where is not None
        except Exception:  # many kinds: it is damaged, or a stranger's
            return False

    def is_fresh(old: bytes) -> bool:
        claimed = parse_json(old)
        others = claimed.get("by") != config.NODE_ID  # a kill may have left a claim of this node's
        return others and is_number(claimed.get("time")) and abs(time.time() - claimed["time"]) < 120

    def progress(line: str) -> None:
        stop.check()
        log.progress(line)
        store.write(claim, {"time": time.time(), "by": config.NODE_ID, "progress": line})

    while config.WARM_START_STEPS > 0 and not made():
        stop.check()
        if store.write_once(claim, {"time": time.time(), "by": config.NODE_ID}, is_fresh):
            log.say(
                f"{config.NODE_ID} makes the warm start, once for all{why_new(store, json.loads(recipe))}"
            )
            warm_start(model, codec, config, tasks, progress)
            weights = {name: x.cpu().contiguous() for name, x in weights_of(model).items()}
            store.write(path, functools.partial(save_tensors, weights, recipe), sync=True)
            return store.delete(claim)
        if not told:
            told = True
            log.say("another node makes the warm start; waiting for it")
        time.sleep(0.5)


def why_new(store: Patient, recipe: dict) -> str:
    """Why none of the warm starts that are there fits: in what the nearest one differs; "" without any."""
    found = []
    for name in store.names("warmstart")[:20]:  # a stranger may have put thousands there
        with contextlib.suppress(Exception):  # a claim, or a file that is damaged or a stranger's
            other = parse_json(read_about(store.find(f"warmstart/{name}")).encode())
            found.append([key for key in recipe if other.get(key) != recipe[key]])
    return f" (the one that is there differs in {', '.join(min(found, key=len))})" if found else ""


def load_learner(config: "Config", store: Patient, log: Log, stop: StopButton) -> Run:
    """The model at its warm start, with a copy and an optimizer for each node."""
    tasks = config.TASKS.split(",")
    keep_freed_memory()
    if config.MODEL_NAME == "tiny":
        torch.set_num_threads(1)  # 0.14 M parameters: a second thread costs more than it brings
    try:
        model, codec = load_model(config, tasks)
        load_warm_start(config, model, codec, tasks, log, stop)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    nodes = []
    for node_id in config.node_ids:
        own = copy.deepcopy(model).eval()
        nodes.append(Node(node_id, own, new_optimizer(own, config)))
    share = available_memory(config.DEVICE) // max(1, config.NUM_WORKERS)
    return Run(config, store, codec, nodes, log, stop, tasks, rows_that_fit(model, config, share))


def gigabytes(run: Run, checkpoints: int = 1) -> str:
    """What so many checkpoints and the models at the end take on disk."""
    states = checkpoints * sum(x.nbytes for x in state_of(run.nodes).values())
    return f"{(states + sum(x.nbytes for node in run.nodes for x in node.model.parameters())) / 1e9:.2g}"


ALONE = (
    "one node learns from nobody; four in one process: "
    "EXPERIMENT_NAME=four LOCAL_NODES=4 NUM_TRANSPLANT_TREES=4 python sapo.py"
)


def register(run: Run) -> None:
    """Announce this process's nodes, count the rewards of rounds that are not replayed, say what begins."""
    config, store, ours = run.config, run.store, {node.id: node for node in run.nodes}
    about = {"model": config.MODEL_NAME, "device": config.DEVICE, "host": os.uname().nodename}
    about |= VERSIONS
    run.session = store.register([*ours], "worker", about)
    run.sessions = store.sessions()
    beat(run)
    for node in ours:
        store.write(f"logs/{node}/system_info.json", {"node_id": node, **about})
    replayed = run.sessions.keys() == ours.keys()
    for t in range(run.done + 1, 0 if replayed else min(store.clock(), config.MAX_ROUNDS)):
        for row in store.rewards(t, ours):
            ours[row["node_id"]].total_reward += row["reward"]
    if is_alone(run):
        run.log.say(ALONE)
    elif config.NUM_TRANSPLANT_TREES == 0:
        run.log.say("NUM_TRANSPLANT_TREES=0: nothing is learned from peers (plain GRPO)")
    what = f"{len(ours)} node(s), model {config.MODEL_NAME} on {config.DEVICE} ({config.DTYPE})"
    needed = gigabytes(run, config.CHECKPOINT_KEEP + 1)
    room = f"{needed} GB on disk, {shutil.disk_usage(config.GDRIVE_PATH).free / 1e9:.1f} free"
    run.log.event("start", f"{what}, round {run.done + 1}; for checkpoints and models {room}")
    run.log.say(f"to resume: {run.log.resume_line}")
    run.first_sample = sample(run)
    run.log.say(sample_text(run.first_sample))


def run_worker(config: "Config", store: DriveStore, log: Log, stop: StopButton) -> str:
    """Load, resume, train, save. Returns how it ended: finished, stopped or superseded."""
    patient = Patient(store, log.event, stop)
    run, _ = halving_on_oom(lambda _: load_learner(config, patient, log, stop), 1, 1, "the start")
    store.create()  # not before the model is there: a start that fails leaves nothing
    settings = {name: value for name, value in asdict(config).items() if name not in OF_PROCESS}
    settings |= {"reasoning_gym": REASONING_GYM_VERSION, "task_table": task_hash(), "created_at": time.time()}
    there = patient.open_config(settings)
    settle({name: settings[name] for name in MUST_AGREE}, there, [])  # somebody may have been faster
    resume(run)  # before registering: a start that is refused must not take a running node's place
    register(run)
    log.show_bar(config.MAX_ROUNDS, run.done + 1)
    try:
        train(run)
        log.say(f"writing checkpoint and models, {gigabytes(run)} GB")
        save_checkpoint(run)  # of a start that found it missing
        end_upload(run)
        export_models(run, last=True)
        write_winners(patient, config.MAX_ROUNDS - 1, run.sessions)
        if run.history:
            conclude(run)
        if COORDINATOR not in run.sessions:  # else it draws for all
            patient.insist(write_picture, store, log.say)
        outcome = "finished"
    except Ended as how:
        outcome = str(how)
        if outcome == "stopped":
            save_checkpoint(run)
            log.event("end", f"stopped before round {run.done + 1}; to go on:\n  {log.resume_line}")
    if log.bar:
        log.bar.close()
    end_upload(run)
    if outcome != "superseded":
        beat(run, "done" if outcome == "finished" else "stopped")
    log.flush(patient)
    return outcome


def run_coordinator(config: "Config", store: DriveStore, log: Log, stop: StopButton) -> str:
    """Open rounds for the swarm; loads no model."""
    store.create()
    patient = Patient(store, log.event, stop)
    outcome = keep_the_clock(patient, config, log, stop)
    log.say(f"coordinator: {outcome}" + (" by a newer one on this seat" if outcome == "superseded" else ""))
    if outcome == "finished":
        patient.insist(write_picture, store, log.say)
    log.flush(patient)
    return outcome


def run_reader(given: dict, stop: StopButton) -> str:
    """monitor, validate or report: they change no experiment and load no model."""
    config = Config(**given)
    name, path = config.EXPERIMENT_NAME, config.GDRIVE_PATH
    names = list_experiments(path)
    if config.NODE_ROLE == "report":
        rows = compare_experiments(path, fnmatch.filter(names, given.get("EXPERIMENT_NAME", "*")))
        if not rows:
            print(f"report: no rewards below {path} for EXPERIMENT_NAME={given.get('EXPERIMENT_NAME', '*')}")
            return "invalid"
        print(report_text(rows))
        shared, picture = DriveStore(path, None), draw(rows)
        shared.write("reports/report.md", report_text(rows).encode())
        if picture:
            shared.write("reports/report.png", picture)
            print(shared.base / "reports" / "report.png")
        return "finished"
    if name not in names:
        print(f"no experiment {name!r} in {path}; there are: {some(names) or 'none'}")
        return "invalid"
    store = DriveStore(path, name)
    if config.NODE_ROLE == "monitor":
        once = not (sys.stdout.isatty() or in_notebook())
        monitor(store, config.STALE_AFTER_SECONDS, given.get("MAX_ROUNDS"), once, stop)
        return "finished"
    rounds = given.get("MAX_ROUNDS") or max(begun_with(store, "MAX_ROUNDS", 1), store.clock() + 1)
    of_experiment = max(begun_with(store, "LOCAL_NODES", 1), begun_with(store, "NUM_WORKERS", 1))
    nodes = given.get("NUM_WORKERS") or given.get("LOCAL_NODES") or of_experiment
    problems = validate_experiment(store, rounds, nodes)
    for line in (*problems, f"{store.base}: " + ("FAILED" if problems else "passed")):
        print(f"validate: {line}")
    return "invalid" if problems else "valid"


# -------- For notebooks, and the command line -------------------------------------------------------------


def get_experiment_status(path, name: str) -> dict:
    """Status of one experiment below the shared folder `path`: current_round, num_active_peers, …"""
    return experiment_status(DriveStore(path, name))


def get_experiment_metrics(path, name: str):
    """One row per node, round and stage: a pandas.DataFrame if there is pandas, else a list of dicts."""
    rows = reward_rows(DriveStore(path, name))
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def list_experiments(path) -> list[str]:
    """Names of the experiments below `path`."""
    names = DriveStore(path, None).names("experiments") if os.path.isdir(path) else []
    return [name for name in names if is_name(name)]


def compare_experiments(path, names=None) -> list[dict]:
    """Figures of experiments (all below `path` by default) over seeds, against their J = 0 baseline."""
    summaries = []
    for name in list_experiments(path) if names is None else names:
        try:
            summaries.append(summarize(DriveStore(path, name)))
        except (ValueError, OSError) as error:  # one that is damaged: the others are reported
            print(f"experiment {name} is left out: {plain(error)}")
    return compare([run for run in summaries if run])


def has_finished(config: "Config", store: DriveStore) -> bool:
    """Whether nothing is left to do: this worker's nodes, for a coordinator all, have their last models."""
    saved = store.names(bucket("checkpoints", config.MAX_ROUNDS - 1)) if store.base.is_dir() else []
    nodes = workers_of(store.sessions()) if saved else []
    if config.NODE_ROLE == "worker":
        nodes = config.node_ids if f"{config.NODE_ID}.safetensors" in saved else []
    return bool(nodes) and all(store.names(f"models/{node}") for node in nodes)


def run_role(given: dict, notes: list[str], stop: StopButton) -> str:
    """Worker or coordinator: settle with the experiment that is there, say what is set, run. How it ended."""
    store = DriveStore(given["GDRIVE_PATH"], given.get("EXPERIMENT_NAME", "default"), given["NODE_ID"])
    there = store.open_config() or {}
    config = settle(given, there, notes)
    log = Log(config.NODE_ID, config.HUGGINGFACE_ACCESS_TOKEN, resume_line(config, given))
    for note in notes:
        log.say(f"note: {note}")
    if has_finished(config, store):
        done = f"{config.EXPERIMENT_NAME}: already finished, all {config.MAX_ROUNDS} rounds (MAX_ROUNDS)"
        log.say(f"{done}; raise it, or choose another EXPERIMENT_NAME")
        return "finished"
    announce(config, store, log.say)
    log.say(config_table(config, given))
    role = run_coordinator if config.NODE_ROLE == "coordinator" else run_worker
    try:
        return role(config, store, log, stop)
    except (Ended, KeyboardInterrupt):
        log.say(f"stopped; to go on:\n  {log.resume_line}")
        return "stopped"


def main(environ=None) -> int:
    """Run the role that the environment asks for (read only here), say what goes wrong; the exit status."""
    environ = {name: str(value) for name, value in (os.environ if environ is None else environ).items()}
    stop = StopButton()
    secret = environ.get(SECRET, "").strip()
    try:
        given, notes = read_environment(environ)
        is_reader = given.get("NODE_ROLE") in ("monitor", "report", "validate")
        outcome = run_reader(given, stop) if is_reader else run_role(given, notes, stop)
        return {"finished": 0, "valid": 0, "stopped": 130, "superseded": 3}.get(outcome, 1)
    except KeyboardInterrupt:
        return 130
    except (ConfigError, StoreError, MemoryError) as error:
        why = str(error)
    except OSError as error:
        why = f"GDRIVE_PATH={environ.get('GDRIVE_PATH', 'auto')} cannot be used: {plain(error, 300)}"
    finally:
        stop.restore()
    print(why.replace(secret, "***") if secret else why, flush=True)
    return 2


if __name__ == "__main__":
    wants_help = sys.argv[1:] and not in_notebook()  # --help, -h, help: nothing is set by arguments
    if wants_help:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `| head`
    status = print(help_text()) if wants_help else main()
    if status and not in_notebook():  # in a notebook the cell just ends
        sys.stdout.flush()
        os._exit(status)  # sys.exit would wait for an upload to the Hub
