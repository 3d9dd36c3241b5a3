# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "transformers", "reasoning-gym"]
# ///
"""SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721): N nodes, each with its own model, learn by
GRPO on reasoning-gym questions and share decoded rollouts, plain text, through one shared folder.

`train` is the paper's Algorithm 1; begin with it. Its six steps stand below it, in their order; then the
clock, the log, settings, checkpoints and roles. Configuration is environment variables only (class Config).
`python sapo.py` alone trains, NODE_ROLE=coordinator keeps a swarm in step.
"""

import contextlib
import copy
import difflib
import fcntl
import hashlib
import json
import math
import os
import platform
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
from collections import deque
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

if "DriveStore" not in globals():  # pasted into one notebook cell, the modules are there already
    from coordinator import COORDINATOR, Coordinator, Swarm, average, begun_with, compare, counted
    from coordinator import experiment_status, in_notebook, is_known_dead, monitor, plain
    from coordinator import process_identity, recent, report_files, report_text, reward_rows
    from coordinator import rounds_to_keep, short_time, summarize, validate_experiment, without_seat
    from drive_store import MAX_GAP, MAX_JSON_BYTES, BadFile, DriveStore, StoreError
    from drive_store import bucket, check_name, is_name, is_number, parse_json


def import_learner() -> None:
    """torch and grpo.py, where a worker runs: all else starts at once and needs a tenth of the memory."""
    global torch, transformers, HELD_OUT_SEEDS, PAPER_TASKS, REASONING_GYM_VERSION, SMALL_TASKS, TASK_TABLE
    global BadQuestion, Codec, Group, Question, available_memory, checksum, fill, find_answer, generate
    global halving_on_oom, keep_freed_memory, load_model, load_weights, lucky_question, make_question
    global micro_batches, new_optimizer, pack_weights, rows_that_fit, safe_open, save_file, score_all
    global shared_prompt_logps, task_hash, training_state, update, warm_start, warm_start_name, why_refused

    if "torch" not in sys.modules:
        with contextlib.suppress(OSError):  # a full disk
            print("loading torch …", file=sys.stderr, flush=True)
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.torch import save_file

    transformers.utils.logging.set_verbosity_error()  # it warns of padding that grpo.py handles itself
    transformers.utils.logging.disable_progress_bar()
    if "Group" not in globals():
        from grpo import HELD_OUT_SEEDS, PAPER_TASKS, REASONING_GYM_VERSION, SMALL_TASKS, TASK_TABLE
        from grpo import BadQuestion, Codec, Group, Question, available_memory, checksum, fill, find_answer
        from grpo import generate, halving_on_oom, keep_freed_memory, load_model, load_weights
        from grpo import lucky_question, make_question, micro_batches, new_optimizer, pack_weights
        from grpo import rows_that_fit, score_all, shared_prompt_logps, task_hash, training_state, update
        from grpo import warm_start, warm_start_name, why_refused


# -------- Algorithm 1 -----------------------------------------------------------------------------


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
                policy_gradient(run, node, external, t, stage)  # 5. learn from own and external groups
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
    past: list = field(default_factory=list)  # for LOCAL_REPLAY: (round, own informative Group)
    rollouts: list = field(default_factory=list)  # its own, of the current stage
    unpublished: list = field(default_factory=list)  # of the round so far, as it will be published
    figures: dict = field(default_factory=dict)  # of the current stage, for the log and the reward file


# -------- The six steps of a round ----------------------------------------------------------------


def stream_seed(config: "Config", node_id: str, round_: int, stage: int, purpose: str, i: int = 0) -> int:
    """Seed of one random stream, from a hash: no state to save, no overlap, a resumed node repeats itself."""
    text = f"{config.SEED}|{node_id}|{round_}|{stage}|{purpose}|{i}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_SEEDS.start


def sample_batch(run: "Run", node: Node, t: int, stage: int) -> "list[Question]":
    """Step 1: I questions (times LOCAL_OVERSAMPLE), task uniform with replacement, seed from a hash."""
    if stage == 0:
        run.stop.check()  # the only safe place within a round: no weights have changed yet
    config, count = run.config, run.config.NUM_TRAIN_SAMPLES * run.config.LOCAL_OVERSAMPLE
    return draw_questions(run, [stream_seed(config, node.id, t, stage, "question", i) for i in range(count)])


def draw_questions(run: "Run", seeds: list[int]) -> "list[Question]":
    """A question of a random task for each seed."""
    return [lucky_question(random.Random(seed).choice(run.tasks), seed) for seed in seeds]


def generate_rollouts(run: "Run", node: Node, questions: "list[Question]", t: int, stage: int) -> None:
    """Step 2: G completions for each question, in one batched call, decoded and scored, as node.rollouts."""
    began = time.monotonic()
    seed = stream_seed(run.config, node.id, t, stage, "generate")
    node.rollouts = answer(run, node, questions, run.config.NUM_GENERATIONS, seed)
    lengths = [len(ids) for r in node.rollouts for ids in r.group.completions]
    node.figures = {
        "reward": mean_reward(node.rollouts),
        "completions": len(lengths),
        "informative_local": sum(r.group.is_informative for r in node.rollouts),
        "answer_tag_rate": average(find_answer(text) is not None for r in node.rollouts for text in r.texts),
        "truncated_rate": average(not done for r in node.rollouts for done in r.finished),
        "mean_length": average(lengths),
        "generated_tokens": sum(lengths),
        "generate_seconds": time.monotonic() - began,
    }


def answer(run: "Run", node: Node, questions: "list[Question]", g: int, seed: int) -> list[Rollout]:
    """`g` completions of each question by this node's model, decoded and scored."""
    config, codec = run.config, run.codec
    prompts = [codec.prompt(q) for q in questions]

    def attempt(rows_at_once):
        return generate(
            node.model, prompts, g, config.MAX_NEW_TOKENS, config.TEMPERATURE, codec.eos_ids,
            torch.Generator().manual_seed(seed), codec.pad_id, rows_at_once, getattr(torch, config.DTYPE),
            answered=codec.answered if codec.few_shot else None,  # None: no look at every token
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
    """The node's reward of a round and stage: the mean over all its own completions, never externals."""
    return average(reward for rollout in rollouts for reward in rollout.group.rewards)


def communicate(run: "Run", node: Node, t: int, stage: int) -> None:
    """Step 3: publish this stage's groups as text, before training on them."""
    node.unpublished += [as_published(rollout) for rollout in node.rollouts]
    if stage in run.swarm.publishing_stages:
        groups, node.unpublished = {str(i): group for i, group in enumerate(node.unpublished)}, []
        about = {"model": run.config.MODEL_NAME, "reasoning_gym": REASONING_GYM_VERSION, "tasks": task_hash()}
        run.swarm.publish(t, stage, node.id, about, groups)


def as_published(rollout: Rollout) -> dict:
    """A group as it stands in a rollout file: bare question, decoded completions, this node's own rewards."""
    q, rewards = rollout.question, rollout.group.rewards
    each = zip(rollout.texts, rewards, rollout.finished, strict=True)
    completions = [{"response": text, "reward": r, "finished": done} for text, r, done in each]
    return {"task": q.task, "seed": q.seed, "prompt": q.text, "answer": q.answer, "completions": completions}


def sample_external(run: "Run", node: Node, t: int, stage: int) -> list[Rollout]:
    """Step 4: verify and score the peers' groups, drop those that are not informative, draw J uniformly.

    Groups of older rounds, up to ROLLOUT_MAX_AGE back, fill gaps.
    """
    config, figures, began = run.config, node.figures, time.monotonic()
    wanted, drawn = config.NUM_TRANSPLANT_TREES, []
    figures |= {"external_pool": 0, "external_peers": 0, "rejected": 0}
    if wanted > 0:
        wait_for_peers(run, t, stage)
        figures["rejected"] = sum(key[0] == t for key in list(run.swarm.refused))  # files; groups are added
        rng = random.Random(stream_seed(config, node.id, t, stage, "external"))
        for age in range(min(config.ROLLOUT_MAX_AGE, t) + 1):
            pool = informative_pool(run, node, t - age, None if age else stage, rng)
            figures["external_pool"] += len(pool)
            drawn += rng.sample(pool, min(wanted - len(drawn), len(pool)))
            if len(drawn) == wanted:
                break
    oldest = t - config.ROLLOUT_MAX_AGE
    node.trained = {key for key in node.trained if key[0] >= oldest} | {r.key for r in drawn}
    figures |= {"external_ages": [t - r.key[0] for r in drawn], "external_short": wanted - len(drawn)}
    figures["wait_seconds"] = time.monotonic() - began
    return drawn


def wait_for_peers(run: "Run", t: int, stage: int) -> None:
    """Wait FETCH_TIMEOUT_SECONDS at most for who published the last round; at first, once, for everybody."""
    swarm, timeout = run.swarm, run.config.FETCH_TIMEOUT_SECONDS
    if stage not in swarm.publishing_stages:
        return  # nobody publishes yet
    deadline = time.monotonic() + timeout
    while not (swarm.alone or swarm.down or run.stop.pressed or swarm.clock > t):  # the swarm has gone on
        late = swarm.missing(t, stage)
        if swarm.looked_at_round >= t and not late:
            return
        if time.monotonic() > deadline:
            swarm.give_up(late)
            who = some(sorted(late), 8) or "the folder's listing"
            run.log.event("wait", f"round {t}: {who} not here after FETCH_TIMEOUT_SECONDS={timeout}", round=t)
            return
        swarm.wait()


PEER_SECONDS = 20.0  # for verifying what one peer published in a round: verifiers can be made slow


def informative_pool(run: "Run", node: Node, round_: int, stage, rng) -> list[Rollout]:
    """The groups of one round that this node may draw: verified, scored here, informative, not used before.

    At most FETCH_MAX_PEERS peers, I groups of each: flooding under one name buys nothing. stage=None: all.
    """
    config, figures = run.config, node.figures
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
        began = time.thread_time()  # stands still while this process is suspended
        for raw in groups:
            key = raw["key"]
            if key not in run.verified:  # the nodes of this process verify a group once for all
                in_time = time.thread_time() - began < PEER_SECONDS
                run.verified[key] = verify(run, raw) if in_time else "too slow to verify"
                raw["completions"] = []  # not needed any more
            found = run.verified[key]  # a Rollout, or a reason
            if isinstance(found, str):
                figures["rejected"] += stage is not None  # an older round's were counted in it
                if (peer, found) not in run.reported:  # say it once
                    run.reported.add((peer, found))
                    run.log.event("reject", f"{peer}: {found}", peer=peer)
            elif found.group.is_informative or not config.EXTERNAL_FILTER:
                pool.append(found)
    return pool


def verify(run: "Run", raw: dict) -> Rollout | str:
    """A peer's group -> Rollout in this process's ids with rewards of its own, or the reason of rejection.

    Only task, seed, response and finished are used: the question is made again, the prompt must agree.
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
    longest, completions = run.codec.max_completion, run.codec.completions(texts, finished)
    if not all(1 <= len(ids) <= longest for ids in completions):
        return f"completion empty or over {longest} tokens here"
    if max(map(max, completions)) >= run.codec.vocabulary:
        return "a token that this model does not have"
    if not all(run.codec.eos_ids.isdisjoint(ids[:-1]) for ids in completions):
        return "a text that is the end of a turn here"
    texts = [run.codec.decode(ids) for ids in completions]  # the reward is that of the tokens trained on
    group = Group(run.codec.prompt(question), completions, score_all(question, texts, run.config.REWARD))
    return Rollout(question, group, texts, finished, raw["key"])


def policy_gradient(run: "Run", node: Node, external: list[Rollout], t: int, stage: int) -> None:
    """Step 5: one GRPO update on I own groups, informative ones first, and the external ones alike."""
    config, began = run.config, time.monotonic()
    local = sorted(node.rollouts, key=lambda r: not r.group.is_informative)[: config.NUM_TRAIN_SAMPLES]
    own = replay([r.group for r in local], node, config, t, stage)
    groups = own + without_unlikely(run, node, [r.group for r in external])
    stats = update(
        node.model, node.optimizer, groups, max_new_tokens=config.MAX_NEW_TOKENS,
        temperature=config.TEMPERATURE, loss_type=config.LOSS_TYPE, clip_low=config.CLIP_LOW,
        clip_high=config.CLIP_HIGH, num_iterations=config.NUM_ITERATIONS, max_rows=run.max_rows,
        pad_id=run.codec.pad_id, dtype=getattr(torch, config.DTYPE),
    )  # fmt: skip
    run.max_rows, logps = stats.pop("max_rows"), stats.pop("logps")  # logps: of informative groups, own first
    own_rows = sum(len(group.completions) for group in own if group.is_informative)
    stats |= {"logp_own": average(logps[:own_rows]), "logp_external": average(logps[own_rows:])}
    stats |= {"informative_groups": sum(group.is_informative for group in groups), "local_groups": len(own)}
    stats |= {"external_groups": len(groups) - len(own)}  # EXTERNAL_FLOOR: perhaps fewer than were drawn
    node.figures |= {**stats, "train_seconds": time.monotonic() - began}


def submit_reward(run: "Run", node: Node, t: int, stage: int) -> None:
    """Step 6: publish the stage's reward and figures, now and then with held-out accuracy."""
    config, swarm, figures = run.config, run.swarm, node.figures
    if config.EVAL_INTERVAL and (t + 1) % config.EVAL_INTERVAL == 0 and stage == config.MAX_STAGES - 1:
        figures["held_out"] = held_out_accuracy(run, node, t)
    node.total_reward += figures["reward"]
    swarm.post(run.store.submit_reward, t, stage, node.id, {"session": swarm.nodes[node.id], **figures})
    row = {"timestamp": time.time(), "round": t, "stage": stage, "node_id": node.id}
    row |= {"experiment": config.EXPERIMENT_NAME, "my_reward": figures["reward"]}
    run.log.row(node.id, "metrics.jsonl", row | {"total_reward": node.total_reward} | figures)


def held_out_accuracy(run: "Run", node: Node, t: int) -> float:
    """pass@1 on EVAL_SAMPLES questions of the reserved seed range, the same for all nodes."""
    seeds = [stream_seed(run.config, "", 0, 0, "held-out", i) for i in range(run.config.EVAL_SAMPLES)]
    questions = draw_questions(run, [HELD_OUT_SEEDS.start + seed for seed in seeds])
    return mean_reward(answer(run, node, questions, 1, stream_seed(run.config, node.id, t, 0, "evaluate")))


def replay(groups: "list[Group]", node: Node, config: "Config", t: int, stage: int) -> "list[Group]":
    """LOCAL_REPLAY: own informative groups of earlier rounds, each once more, in the place of flat ones."""
    if config.LOCAL_REPLAY == 0:
        return groups
    useful = [group for group in groups if group.is_informative]
    flat = [group for group in groups if not group.is_informative]
    past = [(round_, group) for round_, group in node.past if round_ >= t - config.ROLLOUT_MAX_AGE]
    rng = random.Random(stream_seed(config, node.id, t, stage, "replay"))
    again = rng.sample(range(len(past)), min(config.LOCAL_REPLAY, len(past), len(flat)))
    node.past = [pair for i, pair in enumerate(past) if i not in again] + [(t, group) for group in useful]
    return useful + [past[i][1] for i in again] + flat[len(again) :]


def without_unlikely(run: "Run", node: Node, groups: "list[Group]") -> "list[Group]":
    """Externals without completions that are less likely, per token, than EXTERNAL_FLOOR of this node's own.

    A stranger's answers behind words that nobody here says can be 90% of an update (cf. arXiv:2605.22537).
    They go before advantages are made: the rest of such a group would only teach what not to say.
    """
    node.figures["external_kept"] = 1.0
    if not (groups and run.config.EXTERNAL_FLOOR):
        return groups
    own = [r.group for r in node.rollouts]
    dtype, rows = getattr(torch, run.config.DTYPE), sum(len(group.completions) for group in own + groups)

    def attempt(rows_at_once):
        means = torch.zeros(rows)
        with torch.no_grad(), torch.autocast(node.model.device.type, dtype, enabled=dtype != torch.float32):
            for pairs, index in micro_batches(own + groups, rows_at_once):
                logp, mask = shared_prompt_logps(node.model, pairs, run.config.TEMPERATURE, run.codec.pad_id)
                means[index] = (logp.sum(1) / mask.sum(1)).cpu()
        return means.tolist()

    means, run.max_rows = halving_on_oom(attempt, run.max_rows, rows, "the floor")
    count = sum(len(group.completions) for group in own)
    floor = [*sorted(means[:count]), math.inf][int(run.config.EXTERNAL_FLOOR * count)]  # inf: 1, all
    likely = [mean >= floor for mean in means[count:]]
    node.figures["external_kept"], marks = average(likely), iter(likely)
    pairs = [[p for p in zip(g.completions, g.rewards, strict=True) if next(marks)] for g in groups]
    kept = zip(groups, pairs, strict=True)
    return [Group(g.prompt, [c for c, _ in rest], [r for _, r in rest]) for g, rest in kept if rest]


# -------- From round to round ---------------------------------------------------------------------


@dataclass
class Run:
    """What the functions below share: one process's nodes and its view of the swarm."""

    config: "Config"
    store: DriveStore  # handed to the Swarm's thread; training itself never calls it
    swarm: Swarm
    codec: "Codec"
    nodes: list[Node]
    log: "Log"
    stop: "StopButton"
    tasks: list[str]
    scratch: Path  # local folder for files on their way to the shared one, see make_scratch
    done: int = -1  # last round finished
    saved: int = -1  # last round after which a checkpoint was made
    checkpoints: list = field(default_factory=list)  # rounds whose checkpoint is in the folder, oldest first
    verified: dict = field(default_factory=dict)  # key -> Rollout, or the reason of its rejection
    reported: set = field(default_factory=set)  # (peer, reason) of rejections that were logged
    max_rows: int = 1024  # completions per forward pass in the update
    max_decoded: int = 2**30  # completions generated at once; lowered when memory runs out
    round_began: float = 0.0
    hanging: bool = False  # whether it was said that the folder does not answer
    history: list = field(default_factory=list)  # of each round of this start: the nodes' mean figures
    paces: deque = field(default_factory=lambda: deque(maxlen=10))  # seconds a round, with the folder there


class Ended(Exception):
    """The run ends early: "stopped" (by one of STOP_SIGNALS) or "superseded" (by a newer session)."""


def next_round(run: Run) -> int | None:
    """The round to work on now, None after the last one. Rounds that were missed meanwhile are skipped."""
    config, own = run.config, run.done + 1
    t = wait_for_clock(run, own) if own < config.MAX_ROUNDS else own
    if t > own:
        last = min(t, config.MAX_ROUNDS) - 1
        rest = f"going on with round {t}" if t < config.MAX_ROUNDS else "to go on, raise MAX_ROUNDS"
        missed = f"rounds {own} to {last} were opened by the swarm meanwhile; {rest}"
        run.log.event("skip", missed, first=own, last=last)
    if t >= config.MAX_ROUNDS:
        if t == own and not run.history:
            there = f"already finished: all {config.MAX_ROUNDS} rounds (MAX_ROUNDS)"
            run.log.event("end", f"{there}; raise it, or choose another EXPERIMENT_NAME")
        return None
    if run.history and not run.swarm.down:  # rounds of an outage wait for nobody: they set no pace
        run.paces.append(time.monotonic() - run.round_began)
    run.round_began, run.swarm.round = time.monotonic(), t
    return t


def wait_for_clock(run: Run, own: int) -> int:
    """The clock's round as soon as it is `own` or later; `own` where nobody leads, or the folder is away.

    Where nobody else ever registered, a process that resumes replays its rounds after the checkpoint.
    """
    swarm, began = run.swarm, time.monotonic()  # at first no pace is known
    pace = average(run.paces or [0.0 if swarm.alone else run.config.COORDINATOR_ROUND_INTERVAL])
    while True:
        run.stop.check()
        if swarm.superseded:
            run.log.event("end", f"a newer session of {', '.join(swarm.superseded)} runs; this one stops")
            raise Ended("superseded")
        if swarm.hangs and not run.hanging:  # the Swarm's thread tells of errors; now it is stuck itself
            run.log.event("outage", "the shared folder does not answer; training goes on, writes are queued")
        run.hanging = swarm.hangs
        if swarm.down:  # alone for now, and no faster than usual, so as not to run away from the swarm
            if time.monotonic() >= run.round_began + pace:
                if not swarm.is_led:
                    swarm.open(own)  # later; the clock must have no gap
                return own
        elif swarm.clock >= own and (swarm.is_led or not swarm.alone):
            return swarm.clock
        elif not swarm.is_led and time.monotonic() - swarm.leaderless_since >= grace(run):
            swarm.open(own)
            return own
        if time.monotonic() > began + max(30.0, 2 * pace):
            began = float("inf")  # say it once
            why = "the coordinator's rounds are long" if swarm.is_led else "others are expected (NUM_WORKERS)"
            why += ", or the folder shows old listings"
            run.log.event("wait", f"round {own} is not open here yet: {why}", round=own)
        swarm.wait()


def grace(run: Run) -> float:
    """Seconds without a live coordinator (`Life.is_live`) after which a worker opens rounds itself.

    Two, none with LOCAL_NODES; longer where NUM_WORKERS are expected, or of others nothing has come yet.
    """
    config, registered = run.config, len(without_seat(run.swarm.sessions))
    if config.LOCAL_NODES > 1:
        return 0.0
    if registered < config.NUM_WORKERS and not run.history:
        return config.COORDINATOR_ROUND_INTERVAL  # so many are expected
    unmet = config.NUM_TRANSPLANT_TREES > 0 and registered > 1 and not run.swarm.has_met
    return max(2.0, config.FETCH_TIMEOUT_SECONDS) if unmet else 2.0


def finish_round(run: Run, t: int) -> None:
    """Say how the round went; checkpoint when due, clean up; then a stop that was asked for takes effect."""
    config, last, every = run.config, t == run.config.MAX_ROUNDS - 1, run.config.CHECKPOINT_INTERVAL
    due = (run.done + 1) // every < (t + 1) // every  # also where the round in which it was due was skipped
    run.done = t
    report_round(run, t)
    if due or last:
        run.swarm.flush_log()  # first: rounds that are not replayed have their rows in the log
        save_checkpoint(run)
        push_to_hub(run, last)
    if config.ROLLOUT_CLEANUP_ENABLED:
        run.swarm.post(retire, run)
    run.verified = recent(run.verified, t - config.ROLLOUT_MAX_AGE)
    if run.log.bar is not None:
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a reader that is gone
            run.log.bar.update(t + 1 - run.log.bar.n)
    run.stop.check()


def retire(run: Run) -> None:
    """In the Swarm's thread: delete or archive old rollouts. An outage may have led this node far ahead."""
    before = min(run.done, run.swarm.clock) + 1 - rounds_to_keep(run.config)
    run.store.retire_rollouts(before, run.config.ROLLOUT_ARCHIVE_OLD)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # USR1: Slurm's time limit


class StopButton:
    """Counts signals; `check` looks at it where no update is under way. A second one exits at once."""

    def __init__(self):
        self.pressed, self._since, self._old = 0, 0.0, {}

    def install(self) -> None:
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


# -------- The log ---------------------------------------------------------------------------------


class Log:
    """Lines for people, JSON lines for programs."""

    def __init__(self, node_id: str, secret: str, resume_line: str):
        self.node_id, self.secret, self.resume_line, self.bar = node_id, secret, resume_line, None
        self.lines = deque()  # (path, line) on their way to the shared folder; the Swarm's thread takes them

    def say(self, text: str, quiet: bool = False) -> None:
        """A line for people, in one write (two threads do this); quiet: only into stdout.log."""
        text = self._scrub(text)
        if not quiet:
            with contextlib.suppress(OSError, ValueError):  # a full disk, or a reader that is gone
                self.bar.write(text) if self.bar is not None else print(text + "\n", end="", flush=True)
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
    config, each = run.config, [node.figures for node in run.nodes]
    mean = {key: average(f[key] for f in each) for key in each[0] if key != "external_ages"}
    run.history.append(mean)
    name = run.nodes[0].id if len(each) == 1 else f"{len(each)} nodes"
    pace = average(run.paces) or time.monotonic() - run.round_began
    eta = short_time(pace * (config.MAX_ROUNDS - 1 - t))
    run.log.say(f"{name} {short_line(t, config.MAX_ROUNDS, mean)} | eta {eta}")
    for node in run.nodes:
        run.log.say(f"{node.id} {long_line(t, config.MAX_ROUNDS, node.figures)}", quiet=not config.VERBOSE)
    if len(run.history) % 10 == 0 and not any(f["informative_groups"] for f in run.history[-10:]):
        rates = "pass rate {reward:.3f}, answer tags {answer_tag_rate:.0%}, cut off {truncated_rate:.0%}"
        todo = "equal rewards give no gradient: try WARM_START_STEPS, NUM_SHOTS, MAX_NEW_TOKENS, easier TASKS"
        nothing = f"no informative group for 10 rounds: {rates.format(**mean)}; {todo}"
        run.log.event("no signal", nothing, round=t)
    if mean["external_short"] and not mean["external_peers"] and len(run.history) % 10 == 1:
        rounds = [key[0] for key in list(run.swarm.rollouts) if key[2] not in run.swarm.nodes]
        seen = f"the newest peer file is {t - max(rounds)} rounds old" if rounds else "no peer file was found"
        few = f"{mean['external_short']:.0f} of {config.NUM_TRANSPLANT_TREES} externals missing"
        run.log.event("wait", f"round {t}: {few}; {seen} (ROLLOUT_MAX_AGE={config.ROLLOUT_MAX_AGE})", round=t)


def short_line(t: int, max_rounds: int, s: dict) -> str:
    held_out = f" (held-out {s['held_out']:.2f})" if "held_out" in s else ""
    groups = f"{s['local_groups']:.0f}+{s['external_groups']:.3g} ({s['informative_groups']:.4g} informative)"
    wait = f" ({s['wait_seconds']:.1f}s wait)" if s["wait_seconds"] >= 0.1 else ""
    seconds = f"{s['generate_seconds'] + s['wait_seconds'] + s['train_seconds']:.1f}s{wait}"
    return f"{counted(t, max_rounds)} | reward {s['reward']:.2f}{held_out} | groups {groups} | {seconds}"


def long_line(t: int, max_rounds: int, s: dict) -> str:
    """All figures of one node's round. How to read it: README, "The log line"."""
    own, external = ("-" if s[name] is None else f"{s[name]:.2f}" for name in ("logp_own", "logp_external"))
    return short_line(t, max_rounds, s) + (
        f" | {s['generate_seconds']:.1f}s gen {s['train_seconds']:.1f}s train"
        f" | {s['external_pool']} in the pool, {s['external_short']} short, {s['rejected']} rejected"
        f" | tags {s['answer_tag_rate']:.0%} cut {s['truncated_rate']:.0%} len {s['mean_length']:.1f}"
        f" | loss {s['loss']:+.4f} clip {s['clip_fraction']:.1%} grad {s['grad_norm']:.1f}"
        f" | logp {own} own {external} external"
    )


def conclusion(run: Run) -> str:
    """How the rewards went since this start, and what they sum up to, in one sentence."""
    tenth = max(1, len(run.history) // 10)
    first, last = (average(f["reward"] for f in part) for part in (run.history[:tenth], run.history[-tenth:]))
    own, peers = (sum(f[name] for f in run.history) for name in ("local_groups", "external_groups"))
    total = sum(node.total_reward for node in run.nodes) / len(run.nodes)
    went = f"mean reward {first:.2f} -> {last:.2f} in {len(run.history)} rounds"
    return f"{went}, {total:.2f} in all per node; {peers / (own + peers):.0%} of the groups came from peers"


# -------- Settings --------------------------------------------------------------------------------


def var(default, help, allowed="", low=None, high=None):
    return field(default=default, metadata=dict(help=help, allowed=allowed.split(), low=low, high=high))


# fmt: off
@dataclass(frozen=True, repr=False)  # a repr would show the access token in every traceback
class Config:
    """Every environment variable; `resolve` works out "auto". Adding one here is all it takes."""

    GDRIVE_PATH: str = var("auto", "the shared folder; auto: rl-swarm in MyDrive if mounted, else ./rl-swarm")
    EXPERIMENT_NAME: str = var("default", "one experiment = one subfolder, isolated from all others")
    NODE_ROLE: str = var("worker", "monitor, report, validate only read; auto: by rank",
                         "worker coordinator auto monitor report validate")
    NODE_ID: str = var("auto", "unique name; auto: node_<rank or 8 hex>, node if LOCAL_NODES > 1")
    LOCAL_NODES: int = var(1, "workers in this process: NODE_ID_0, NODE_ID_1 …", low=1, high=256)
    SEED: int = var(42, "the swarm's seed; nodes differ by NODE_ID", low=0, high=2**31)
    TEST_MODE: bool = var(False, "quick validation: 3 rounds, I = 4, G = 4, tiny with a short warm start")
    MAX_ROUNDS: int = var(2000, "rounds to train", low=1, high=10**6)
    MAX_STAGES: int = var(1, "generate-share-update stages in a round", low=1, high=100)
    MODEL_NAME: str = var("auto", "tiny, a Hugging Face id or a folder; auto: by what the machine has")
    TASKS: str = var("auto", "comma list; auto: the paper's nine, for tiny the eight small ones")
    NUM_SHOTS: int = var("auto", "solved examples without a chat template; auto: 2, tiny 0", low=0, high=16)
    WARM_START_STEPS: int = var("auto", "supervised steps first; auto: tiny 1750, else 0", low=0, high=10**6)
    ANSWER_TAG_SHARE: float = var(0.02, "rewarded style at the end of tiny's warm start", low=0, high=1)
    REWARD: str = var("exact", "1 if the verifier gives at least 0.99, else 0; its score", "exact verifier")
    NUM_TRAIN_SAMPLES: int = var(8, "I: own questions per round and stage", low=1, high=4096)
    NUM_TRANSPLANT_TREES: int = var(0, "J: external groups per stage; 0: plain GRPO", low=0, high=4096)
    NUM_GENERATIONS: int = var(8, "G: completions per question", low=2, high=64)
    TEMPERATURE: float = var(1.0, "of sampling and of the log-probabilities in the loss", low=0.01, high=100)
    MAX_NEW_TOKENS: int = var("auto", "longest completion; auto: 10 for tiny, else 256", low=1, high=32768)
    EXTERNAL_FILTER: bool = var(True, "drop groups that are not informative before drawing externals")
    EXTERNAL_FLOOR: float = var(0.0, "leave out externals less likely than this share of own", low=0, high=1)
    LOCAL_OVERSAMPLE: int = var(1, "k: generate k x I questions, train on I of them", low=1, high=64)
    LOCAL_REPLAY: int = var(0, "own informative groups used again in place of flat ones", low=0, high=4096)
    LEARNING_RATE: float = var("auto", "AdamW; auto: 3e-4 for tiny, else 1e-6", low=0, high=1)
    CLIP_LOW: float = var(0.2, "ratio clipped below at 1 - this", low=0, high=1)
    CLIP_HIGH: float = var(0.28, "ratio clipped above at 1 + this", low=0, high=10)
    NUM_ITERATIONS: int = var(1, "optimizer steps on the completions of one stage", low=1, high=100)
    LOSS_TYPE: str = var("dapo", "per token, per completion, by MAX_NEW_TOKENS", "dapo grpo dr_grpo")
    MICRO_BATCH_SIZE: int = var("auto", "completions per forward pass; auto: by memory", low=1, high=65536)
    DTYPE: str = var("auto", "to compute in; auto: bfloat16 if the hardware can", "float32 bfloat16")
    DEVICE: str = var("auto", "cuda, cuda:1, mps or cpu; auto: the first there is")
    COORDINATOR_ROUND_INTERVAL: float = var(60.0, "seconds of a round, at the latest", low=0.01, high=86400)
    ROUND_ADVANCE: str = var("hybrid", "interval over, all submitted, or either", "time completion hybrid")
    ROLLOUT_PUBLISH_FREQUENCY: str = var("stage", "generation means stage", "stage round generation")
    ROLLOUT_MAX_AGE: int = var(4, "how many rounds back externals may come from", low=0, high=1000)
    FETCH_MAX_PEERS: int = var(10, "peers to read per round, drawn at random", low=1, high=1000)
    FETCH_TIMEOUT_SECONDS: float = var(30.0, "how long to wait for peers' rollouts", low=0, high=3600)
    STALE_AFTER_SECONDS: float = var(300.0, "silence after which a node is not live", low=1, high=86400)
    ROLLOUT_CLEANUP_ENABLED: bool = var(False, "remove old rollouts")
    ROLLOUT_KEEP_LAST_N_ROUNDS: int = var(10, "rounds of rollouts to keep", low=1, high=10**6)
    ROLLOUT_ARCHIVE_OLD: bool = var(False, "move old rollouts to archives/ instead of deleting them")
    CHECKPOINT_INTERVAL: int = var(10, "rounds between checkpoints", low=1, high=10**6)
    CHECKPOINT_KEEP: int = var(2, "checkpoints to keep", low=1, high=1000)
    EVAL_INTERVAL: int = var(0, "rounds between held-out evaluations (pass@1); 0: none", low=0, high=10**6)
    EVAL_SAMPLES: int = var(64, "held-out questions, from seeds that no node trains on", low=1, high=65536)
    VERBOSE: bool = var(False, "every node's line of every round on the screen, not only in stdout.log")
    HUGGINGFACE_ACCESS_TOKEN: str = var("", "push the model to the Hub with each checkpoint; never shown")
    HF_REPO: str = var("auto", "where to, with -<node> if several; auto: <user>/<experiment>-<node>")
    NUM_WORKERS: int = var(0, "workers that run_swarm.sh starts (4), or to expect", low=0, high=10**4)
    CONFIGS: str = var("", "I/J pairs to compare, such as 8/0 4/4")
    SEEDS: str = var("", "seeds to compare them over")

TEST_MODE_DEFAULTS = {  # with something to learn from
    "MAX_ROUNDS": 3, "NUM_TRAIN_SAMPLES": 4, "NUM_GENERATIONS": 4, "MODEL_NAME": "tiny",
    "WARM_START_STEPS": 150, "ANSWER_TAG_SHARE": 0.9,
}
# fmt: on
SHARED_SETTINGS = ("SEED", "TASKS", "REWARD", "MAX_STAGES")  # of all nodes of an experiment, for ever
SECRET = "HUGGINGFACE_ACCESS_TOKEN"
GROUPS = {  # the first variable of each group in the help -> its heading
    "GDRIVE_PATH": "the swarm", "MODEL_NAME": "model and tasks", "NUM_TRAIN_SAMPLES": "a round",
    "LEARNING_RATE": "the update", "COORDINATOR_ROUND_INTERVAL": "the clock and sharing",
    "ROLLOUT_CLEANUP_ENABLED": "what is kept", "NUM_WORKERS": "run_swarm.sh",
}  # fmt: skip
PRIVATE_SETTINGS = (SECRET, "HF_REPO", "NODE_ID", "NODE_ROLE", "GDRIVE_PATH", "DEVICE", "VERBOSE")


def parse_value(text: str, spec):
    """One variable's text -> its value; ValueError says what is allowed."""
    kind, allowed, low, high = spec.type, *(spec.metadata[name] for name in ("allowed", "low", "high"))
    words = dict(zip("1 true yes on 0 false no off".split(), [True] * 4 + [False] * 4, strict=True))
    expected = f"{'an integer' if kind is int else 'a number'} from {low} to {high}"
    expected = "True or False" if kind is bool else ", ".join(allowed or (expected,))
    if text == "auto" and spec.default == "auto":
        return text
    try:
        value = words[text.lower()] if kind is bool else kind(text)  # never bool(text): bool("False") is True
        in_range = (low is None or low <= value) and (high is None or value <= high)  # nan is in none
    except (KeyError, ValueError):
        in_range = False
    if not in_range or (allowed and text not in allowed):
        raise ValueError(f"expected {expected}{', or auto' * (spec.default == 'auto')}")
    return value


RANKS = ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK", "RANK")
SHORT_NAMES = {"LR": "LEARNING_RATE", "I": "NUM_TRAIN_SAMPLES", "J": "NUM_TRANSPLANT_TREES",
               "G": "NUM_GENERATIONS", "NUM_ROUNDS": "MAX_ROUNDS", "MODEL": "MODEL_NAME"}  # fmt: skip


def rank_of(environ) -> str | None:
    """This process's index where an engine gives it one; a requeued task gets the same one again."""
    ranks = [environ[name] for name in RANKS if environ.get(name, "").isdecimal()]
    several = environ.get("SLURM_ARRAY_TASK_ID") and environ.get("SLURM_NTASKS", "1") != "1"
    return "_".join(ranks[: 2 if several else 1]) or None


def mistakes_in(config: Config) -> list[str]:
    """What is wrong with values that are each of the right type."""
    mistakes = []
    longest = f"{config.NODE_ID}_{config.LOCAL_NODES - 1}" if config.LOCAL_NODES > 1 else config.NODE_ID
    names = (("EXPERIMENT_NAME", config.EXPERIMENT_NAME), ("NODE_ID", config.NODE_ID), ("NODE_ID", longest))
    for name, value in dict.fromkeys(names):
        try:
            check_name(value, name)
        except ValueError as error:
            mistakes.append(str(error))
    if config.NODE_ROLE == "worker" and config.NODE_ID.lower() == COORDINATOR:
        mistakes.append(f"NODE_ID={config.NODE_ID!r}: this name is the coordinator's seat; choose another")
    if not (config.HUGGINGFACE_ACCESS_TOKEN.isascii() and config.HUGGINGFACE_ACCESS_TOKEN.isprintable()):
        mistakes.append(f"{SECRET}: holds characters that no token has (pasted with something invisible?)")
    if config.NODE_ROLE == "worker" and config.TASKS != "auto":
        mistakes += [f"TASKS: {why_refused(x)}" for x in config.TASKS.split(",") if x not in TASK_TABLE]
    return mistakes


def read_config(environ) -> tuple[Config, list[str]]:
    """Environment -> (Config as `resolve` leaves it, warnings). All mistakes come in one ConfigError.

    Where it is a worker's, this imports torch (the devices, the tasks): ImportError if that is missing.
    """
    specs, rank = {f.name: f for f in fields(Config)}, rank_of(environ)
    given, mistakes, warnings = {}, [], []
    for name, spec in specs.items():
        text = environ.get(name, "").strip()
        try:
            if text and not (name == SECRET and text == "None"):
                given[name] = parse_value(text, spec)
        except ValueError as error:
            mistakes.append(f"{name}={environ[name]!r}: {error}")
    for name in sorted(set(environ) - set(specs)):
        close = difflib.get_close_matches(name.upper(), specs, n=1, cutoff=0.88)
        if near := SHORT_NAMES.get(name.upper(), *close[:1]):
            warnings.append(f"{name} is not a variable of this program: did you mean {near}?")
    if given.get("NODE_ROLE") == "auto":
        given["NODE_ROLE"] = "coordinator" if rank and not rank.strip("0_") else "worker"
    if rank and given.get("NODE_ID", "auto") == "auto":
        given["NODE_ID"] = f"node_{rank}"
    given |= {"TASKS": ",".join(re.findall(r"[^\s,]+", given["TASKS"]))} if "TASKS" in given else {}
    config = Config(**(TEST_MODE_DEFAULTS if given.get("TEST_MODE") else {}) | given)
    if config.NODE_ROLE == "worker":
        import_learner()
    mistakes += mistakes_in(config)
    if mistakes:
        raise ConfigError("these settings cannot be used:\n  " + "\n  ".join(mistakes + warnings))
    config = resolve(config, warnings)
    kept, keep = config.ROLLOUT_KEEP_LAST_N_ROUNDS, rounds_to_keep(config)
    if config.ROLLOUT_CLEANUP_ENABLED and keep > kept:
        why = "a resumed node may need CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE rounds"
        warnings.append(f"ROLLOUT_KEEP_LAST_N_ROUNDS={kept} counts as {keep}: {why}")
    if config.NODE_ROLE == "coordinator" and "NODE_ID" in given and not rank:
        warnings.append(f"NODE_ID={given['NODE_ID']} is ignored: the coordinator has a seat of its own")
    if config.FETCH_TIMEOUT_SECONDS > given.get("COORDINATOR_ROUND_INTERVAL", math.inf):
        warnings.append(f"FETCH_TIMEOUT_SECONDS={config.FETCH_TIMEOUT_SECONDS:g} is more than a round lasts")
    return config, warnings


class ConfigError(ValueError):
    """Settings that cannot be used. The text names each variable, what was found and what is allowed."""


REAL_MODEL, ITS_GB = "Gensyn/Qwen2.5-0.5B-Instruct", 10  # weights, gradients, Adam, activations of one node


def resolve(config: Config, notes: list[str]) -> Config:
    """Work out "auto", the model's for a worker; TASKS, MICRO_BATCH_SIZE and HF_REPO where they are used."""
    colab = Path("/content/drive/MyDrive")
    seat = COORDINATOR if config.NODE_ROLE == "coordinator" else config.NODE_ID
    config = replace(config, GDRIVE_PATH=os.path.expanduser(config.GDRIVE_PATH), NODE_ID=seat)
    auto = {
        "GDRIVE_PATH": str(colab / "rl-swarm") if colab.is_dir() else "rl-swarm",
        "NODE_ID": "node" if config.LOCAL_NODES > 1 else f"node_{secrets.token_hex(4)}",
    }
    auto |= resolve_model(config, notes) if config.NODE_ROLE == "worker" else {}
    return replace(config, **{name: value for name, value in auto.items() if getattr(config, name) == "auto"})


def resolve_model(config: Config, notes: list[str]) -> dict:
    """The device and model that "auto" stands for here, and what follows from them."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    there = [name for name in found if found[name]] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    device = there[0] if config.DEVICE == "auto" else config.DEVICE
    if device not in there:
        raise ConfigError(f"DEVICE={device!r}: this machine has {', '.join(there)}")
    model, needed = config.MODEL_NAME, ITS_GB * config.LOCAL_NODES
    if model == "auto":
        here = memory_share(config, device) / 1e9
        model = REAL_MODEL if device != "cpu" and here > needed else "tiny"
        why = "there is no accelerator" if device == "cpu" else f"{here:.0f} GB for this process on {device}"
        notes.append(f"MODEL_NAME=auto takes {model}: {why}; {REAL_MODEL} needs one with {needed} GB")
    tiny = model == "tiny"
    has_bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)  # no T4
    return {
        "MODEL_NAME": model,
        "DEVICE": device,
        "NUM_SHOTS": 0 if tiny else 2,
        "WARM_START_STEPS": 1750 if tiny else 0,
        "LEARNING_RATE": 3e-4 if tiny else 1e-6,
        "MAX_NEW_TOKENS": 10 if tiny else 256,
        "DTYPE": "bfloat16" if has_bf16 else "float32",
    }


def memory_share(config: Config, device: str) -> int:
    """Bytes that this process may have: what is available, or its part of all where NUM_WORKERS share it."""
    free, total = available_memory(device)
    return min(free, total // max(1, config.NUM_WORKERS))


def config_table(config: Config, everything: bool = True) -> str:
    """The settings in force, one per line, non-defaults marked with *; a secret only as set or unset."""
    lines, chosen = [], [f for f in fields(config) if everything or getattr(config, f.name) != f.default]
    for spec in chosen:
        value = getattr(config, spec.name)
        shown = ("set" if value else "unset") if spec.name == SECRET else value
        lines.append(f"{'*' if value != spec.default else ' '} {spec.name:28} {shown}")
    left = len(fields(config)) - len(chosen)
    lines += [f"  {left} others at their defaults (VERBOSE=1 shows them, --help explains)"] if left else []
    return "\n".join(lines)


def help_text() -> str:
    """Every variable with its default and what it does, as `python sapo.py --help` prints it."""
    lines = ["usage: NAME=value … python sapo.py      (environment variables only)"]
    for f in fields(Config):
        lines += [f"\n{GROUPS[f.name]}"] if f.name in GROUPS else []
        choice = ", ".join(f.metadata["allowed"]) + ": " * bool(f.metadata["allowed"])
        lines.append(f"  {f.name:27} {f.default!s:8.8} {choice}{f.metadata['help']}")
    return "\n".join(lines)


def resume_line(config: Config, environ) -> str:
    """How to resume this node: the command with what was set and what was made up; never the secret."""
    if in_notebook():
        return f"run this cell again (NODE_ID={config.NODE_ID})"
    names = {f.name for f in fields(config)} - {SECRET, "NUM_WORKERS", "CONFIGS", "SEEDS"}
    given = {name: value for name, value in environ.items() if value and name in names}
    given |= {"GDRIVE_PATH": os.path.abspath(config.GDRIVE_PATH), "NODE_ID": config.NODE_ID}
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in given.items()), "python sapo.py"])


# -------- Checkpoints, the final model, the Hub ---------------------------------------------------


MAX_HEADER = 2**23  # characters of what a checkpoint says beside its tensors: unpacked 30 times as much
HUB_PATIENCE = 1800.0  # seconds that the end of a run waits for uploads
CLAIM_SECONDS = 600.0  # how long the others wait for whoever makes the warm start


def save_checkpoint(run: Run) -> None:
    """All nodes' state after round `run.done` in one file: first on the local disk, then in the folder.

    While the folder is away only the newest one waits. A full disk costs the checkpoint, not the training.
    """
    if run.done <= run.saved:
        return  # it may be on its way
    tensors, nodes = {}, {}
    for node in run.nodes:
        mine = {name: x.cpu().contiguous() for name, x in training_state(node.model, node.optimizer).items()}
        tensors |= {f"{node.id}/{name}": tensor for name, tensor in mine.items()}
        used, crc = sorted(node.trained), checksum(mine.values())
        nodes[node.id] = {"total_reward": node.total_reward, "trained": used, "crc": crc}
    about = {"model_name": run.config.MODEL_NAME, "next_round": run.done + 1, "nodes": nodes}
    local = run.scratch / checkpoint_path(run.config.NODE_ID, run.done)
    try:
        local.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up the local disk
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise RuntimeError("weights are not finite any more; the checkpoints before are kept")
        if len(written := json.dumps(about)) > MAX_HEADER:
            raise RuntimeError("too many externals: lower NUM_TRANSPLANT_TREES or ROLLOUT_MAX_AGE")
        save_file(tensors, run.scratch / "saving", {"about": written})
        (run.scratch / "saving").rename(local)  # whole, for the other thread
        for older in {*run.scratch.glob("checkpoints/*/*")} - {local}:
            older.unlink(missing_ok=True)
        run.swarm.post(carry_checkpoint, run, run.done)
        run.saved = run.done  # where that fails it is tried again when the next is due, and at the end
    except Exception as error:  # a full disk: safetensors has a type of its own for it
        run.log.event("error", f"no checkpoint after round {run.done}: {run.scratch}: {error}")


def checkpoint_path(process: str, round_: int) -> str:
    return f"checkpoints/{bucket(round_)}/{process}.safetensors"


def waiting_files(scratch: Path) -> list[Path]:
    """Checkpoints and models on their way to the shared folder. They lie in `scratch` as they will there."""
    return [*scratch.glob("checkpoints/*/*"), *scratch.glob("models/*/*")]


def carry_checkpoint(run: Run, round_: int) -> None:
    """In the Swarm's thread: copy a checkpoint to the folder, delete older ones there."""
    path = checkpoint_path(run.config.NODE_ID, round_)
    if (run.scratch / path).exists():  # else a newer one waits in its place
        carry(run, path)
        run.checkpoints.append(round_)
        run.log.event("checkpoint", f"after round {round_}", quiet=True, round=round_)
        run.swarm.flush_log()  # by this row a later start knows that there was one
        while len(run.checkpoints) > run.config.CHECKPOINT_KEEP:
            older = checkpoint_path(run.config.NODE_ID, run.checkpoints.pop(0))
            run.swarm.post(run.store.delete, older, True)


def carry(run: Run, path: str) -> None:
    """In the Swarm's thread: a local file into the folder; `close` counts what did not get there."""
    local = run.scratch / path
    run.swarm.sessions = run.store.sessions()  # this process may have slept while a newer one finished
    if run.swarm.superseded:  # perhaps by a stranger: what was to be written is kept
        raise BadFile(f"a newer session of this node runs; it lies in {local}")
    run.store.write(path, local)
    local.unlink(missing_ok=True)


def resume(run: Run) -> None:
    """Load the newest checkpoint of this process that is readable; none at all means round 0.

    ConfigError or StoreError if there are checkpoints, or were, and none can be used: a swarm never starts
    over by accident.
    """
    store, config, reason, clock = run.store, run.config, None, run.store.clock()[0]
    last = max(clock, store.last_rewarded()) + MAX_GAP - 1
    if store.rounds("checkpoints")[-1:] > [last]:
        run.log.say(f"checkpoints after round {last} are too far above the swarm's {clock} to be believed")
    for round_ in (rounds := store.checkpoints(config.NODE_ID, last)):
        run.stop.check()
        path = checkpoint_path(config.NODE_ID, round_)
        try:
            with safe_open(fetch_checkpoint(run, path), framework="pt") as file:
                restore(run, file, round_)
            (run.scratch / "resume").unlink(missing_ok=True)  # what was fetched
        except OSError as error:  # a bad moment is no reason to go back
            where = f"{path} cannot be copied to {run.scratch} (TMPDIR)"
            raise StoreError(f"{where}: {error}; try again") from error
        except Exception as error:  # many kinds; an unusable file is what they have in common
            reason, text = error, f"{store.base / path} cannot be used ({type(error).__name__})"
            run.log.event("resume", f"{text}; trying the one before")
            continue
        run.done = run.saved = round_
        run.checkpoints = [r for r in reversed(rounds) if r <= round_]
        ahead = f", ahead of the swarm's round {clock}: rewards may be missing between" * (round_ > clock)
        run.log.event("resume", f"from the checkpoint after round {round_}{ahead}", round=round_)
        return
    if isinstance(reason, ConfigError):
        raise reason
    if reason or had_checkpoint(run):
        found = f"none of {config.NODE_ID}'s can be used ({plain(reason)}): restore one"
        missing = f"{config.NODE_ID} trained here, and has no checkpoint: restore it or LOCAL_NODES"
        todo = f"{found if reason else missing}, or take another NODE_ID or EXPERIMENT_NAME"
        raise StoreError(f"{store.base / 'checkpoints'}: {todo}. Nothing was changed")
    if run.nodes[0].id in store.sessions():
        run.log.say(f"{config.NODE_ID} was here before, and left no checkpoint: it begins with fresh weights")


def had_checkpoint(run: Run) -> bool:
    """Whether this process, that finds no checkpoint to go on from, once had one: its log says so.

    Or one of its nodes had, with another LOCAL_NODES: alone, or in a process with others (of one session).
    """
    store, name, ids = run.store, run.config.NODE_ID, [node.id for node in run.nodes]
    sessions = store.sessions()
    with_others = ids == [name] and [*sessions.values()].count(sessions.get(name)) > 1
    processes = [name, *(sessions.keys() & ids), *[name.rpartition("_")[0]] * with_others]
    if any(map(store.checkpoints, processes)) or any(store.names(f"models/{node}") for node in ids):
        return True  # of rounds that are not believed; of a run that ended
    for log in (f"logs/{process}/training_events.jsonl" for process in processes):
        with contextlib.suppress(FileNotFoundError, BadFile), store.open(log) as file:
            if b'"event": "checkpoint"' in file.read(4 * MAX_JSON_BYTES):
                return True
    return False


def checkpoint_bytes(run: Run) -> int:
    """About the size of a checkpoint: weights and Adam's two moments in float32."""
    return 12 * sum(p.numel() for node in run.nodes for p in node.model.parameters())


def fetch_checkpoint(run: Run, path: str) -> Path:
    """A checkpoint, copied to the local disk; ValueError if it is far larger than this model's."""
    local, most = run.scratch / "resume", 2 * checkpoint_bytes(run) + 2**26
    with run.store.open(path) as file, open(local, "wb") as copied:
        while piece := file.read(2**20):
            header = int.from_bytes(piece[:8], "little") if copied.tell() == 0 else 2
            if not 2 <= header <= 2 * MAX_HEADER or copied.tell() + copied.write(piece) > most:
                raise ValueError(f"no header, or over {2 * MAX_HEADER} bytes of it, or over {most} in all")
    return local


def restore(run: Run, file, round_: int) -> None:
    """An open checkpoint into the nodes; the settings of the update are those of this start. Or an exception.

    A stranger may have written it: it is a safetensors file, so that reading it runs and unpacks nothing.
    """
    name, state = run.config.NODE_ID, parse_json(file.metadata()["about"].encode(), MAX_HEADER)
    if state["model_name"] != run.config.MODEL_NAME:
        made_with = f"the checkpoint of {name} was made with {plain(state['model_name'])}"
        raise ConfigError(f"MODEL_NAME={run.config.MODEL_NAME!r}: {made_with}; set that, or another NODE_ID")
    if state["nodes"].keys() != {node.id for node in run.nodes}:
        holds = f"the checkpoint of {name} holds {plain(', '.join(state['nodes']))}"
        raise ConfigError(f"LOCAL_NODES={run.config.LOCAL_NODES}: {holds}; set that many, or another NODE_ID")
    since = round_ - run.config.ROLLOUT_MAX_AGE  # what is older, or newer, is of no use, or forged
    for node in run.nodes:
        mine = state["nodes"][node.id]
        ours = training_state(node.model, node.optimizer)
        tensors = {key: file.get_tensor(f"{node.id}/{key}") for key in ours}
        written = state["next_round"], mine["crc"]
        if written != (round_ + 1, checksum(tensors.values())) or not is_number(mine["total_reward"]):
            raise ValueError("damaged, or of another round")
        used = [key for key in mine["trained"] if since <= key[0] <= round_ and is_name(key[2])]
        node.trained = {(int(t), int(stage), peer, int(i)) for t, stage, peer, i in used}
        node.total_reward = mine["total_reward"]
        fill(ours, tensors)


def save_models(run: Run) -> None:
    """models/NODE: an ordinary Hugging Face folder, with the line that tries it."""
    folder = run.store.base / "models" / run.nodes[0].id
    local = [save_locally(run, node, "models") for node in run.nodes]
    for file in sorted(file for path in local for file in path.glob("*")):
        run.swarm.post(carry, run, f"models/{file.parent.name}/{file.name}")
    decode, prompt = run.codec.tokenizer.decode, run.codec.prompt(make_question(run.tasks[0], 1))
    prompt = json.dumps(decode(prompt).removeprefix(decode(run.codec.bos)))  # which the pipeline adds
    model = json.dumps(str(folder))  # double quotes inside, single ones around
    load = f'pipeline("text-generation", {model}, trust_remote_code=False)'
    ask = f"{load}({prompt}, max_new_tokens={run.config.MAX_NEW_TOKENS})"
    code = shlex.quote(f"from transformers import pipeline; print({ask})")
    if local[0].exists():  # else it was said why not
        run.log.say(f"final model: {folder}\n  try it: python -c {code}")


def save_locally(run: Run, node: Node, folder: str) -> Path:
    local = run.scratch / folder / node.id
    try:
        node.model.save_pretrained(local)
        run.codec.tokenizer.save_pretrained(local, save_jinja_files=False)  # several would be a folder
    except Exception as error:  # a full disk: safetensors has a type of its own for it
        run.log.event("error", f"no copy of the model: {local}: {error}")
        run.swarm.set_aside.add(str(local))  # `close` counts it
        return local / "incomplete"  # nothing to go on with
    return local


def push_to_hub(run: Run, last: bool) -> None:
    """Upload the models in the background if a token is set; a failed push is said and never stops training.

    While one is under way none but the last models' is begun, and that one waits for its turn.
    """
    config, under_way = run.config, uploads()
    if not config.HUGGINGFACE_ACCESS_TOKEN or (under_way and not last):
        return
    round_, folders = run.done, {node.id: save_locally(run, node, f"hub/{run.done}") for node in run.nodes}

    def push():
        for thread in under_way:
            thread.join(HUB_PATIENCE / 2)
        for node_id, local in folders.items():
            try:
                from huggingface_hub import HfApi  # transformers brings it

                api, repo = HfApi(token=config.HUGGINGFACE_ACCESS_TOKEN), config.HF_REPO
                if repo == "auto":
                    repo = f"{api.whoami()['name']}/{config.EXPERIMENT_NAME}-{node_id}"
                elif max(config.LOCAL_NODES, config.NUM_WORKERS) > 1:
                    repo += f"-{node_id}"
                api.create_repo(repo, exist_ok=True)
                api.upload_folder(repo_id=repo, folder_path=local, commit_message=f"after round {round_}")
                run.log.event("hub", f"pushed to {repo}")
            except Exception as error:  # its text may hold the token: only type and status are told
                status = getattr(getattr(error, "response", None), "status_code", "no answer")
                run.log.event("hub", f"push failed, training goes on: {type(error).__name__} ({status})")
            shutil.rmtree(local, ignore_errors=True)

    threading.Thread(target=push, name="hub", daemon=True).start()


def uploads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hub"]


# -------- Roles -----------------------------------------------------------------------------------


def join_experiment(config: Config, store: DriveStore, say, only_read: bool) -> list[str]:
    """The experiment's tasks, if this node's settings agree with it; ConfigError names both values if not.

    only_read: config.json is not written yet, for what a start with a mistake leaves would bind the next.
    """
    own_tasks = ",".join(SMALL_TASKS if config.MODEL_NAME == "tiny" else PAPER_TASKS)
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in PRIVATE_SETTINGS}
    settings |= {"TASKS": own_tasks if config.TASKS == "auto" else config.TASKS}
    settings |= {"reasoning_gym": REASONING_GYM_VERSION, "task_table": task_hash()}
    there = store.open_config(settings | {"created_at": time.time()}, only_read)
    path = store.base / "config.json"
    if config.TASKS == "auto" and there.get("TASKS") != own_tasks:
        settings["TASKS"] = str(there.get("TASKS"))
        if only_read:
            say(f"TASKS of {path}: {plain(settings['TASKS'], 300)}")
    tasks = settings["TASKS"].split(",")
    if unknown := [task for task in tasks if task not in TASK_TABLE]:
        raise ConfigError(f"TASKS in {path}: {why_refused(unknown[0])}")
    differ = {n: f"{v!r} (there {there.get(n)!r:.80})" for n, v in settings.items() if there.get(n) != v}
    if wrong := [f"{name}={differ[name]}" for name in SHARED_SETTINGS if name in differ]:
        raise ConfigError(f"{path} disagrees; change {', '.join(wrong)} or EXPERIMENT_NAME")
    if differ and not only_read:
        each = ", ".join(f"{name}={both}" for name, both in differ.items())
        say(f"warning: settings that differ from the experiment's config.json: {each}")
    return tasks


def some(names: list[str], most: int = 20) -> str:
    """The first of these names, for a sentence."""
    return ", ".join(names[:most]) + f" and {len(names) - most} others" * (len(names) > most)


def announce(config: Config, store: DriveStore, say) -> None:
    """Say that an experiment is new (a typing mistake?), or who is in it and where it stands."""
    if not ((nodes := without_seat(store.sessions())) or store.rounds("rewards")):
        others = some([n for n in list_experiments(config.GDRIVE_PATH) if n != config.EXPERIMENT_NAME])
        say(f"new experiment {config.EXPERIMENT_NAME}" + f"; there are also: {others}" * bool(others))
        return
    last = begun_with(store, "MAX_ROUNDS", math.inf)
    last = last if config.MAX_ROUNDS == Config.MAX_ROUNDS else max(last, config.MAX_ROUNDS)
    if nodes and re.fullmatch("node_[0-9a-f]{8}", config.NODE_ID) and store.clock()[0] >= last - 1:
        todo = "set EXPERIMENT_NAME for another, or NODE_ID and MAX_ROUNDS to go on with this one"
        raise ConfigError(f"experiment {config.EXPERIMENT_NAME} has finished its {last} rounds: {todo}")
    known = some(nodes, 8) or "nobody yet"
    say(f"experiment {config.EXPERIMENT_NAME} is there already: round {store.clock()[0]}, nodes: {known}")
    if nodes and config.NODE_ID not in {node.rsplit("_", 1)[0] for node in nodes} | set(nodes):
        say(f"{config.NODE_ID} joins it. To resume a node set NODE_ID; to start afresh, EXPERIMENT_NAME")


def load_warm_start(config: Config, model, codec, tasks, say, check_stop=lambda: None) -> None:
    """Bring `model` to its warm start: from the shared cache, or by making it there once for all nodes.

    warmstart/<hash>.safetensors is write-once; a claim file keeps the others from making it too. The claim
    is ignored when its maker died or took ten minutes (making it twice is harmless).
    """
    if config.WARM_START_STEPS == 0:
        return
    shared = DriveStore(config.GDRIVE_PATH, None, config.NODE_ID)
    name = warm_start_name(model, codec, config, tasks)
    path, claim = f"warmstart/{name}.safetensors", f"warmstart/{name}.claim"
    largest = (1 << 20) + sum(w.numel() * w.element_size() for w in model.state_dict().values())
    until = float("inf")  # as long as nobody was waited for
    recipe = model, codec, config, tasks, lambda line: (say(line), check_stop())

    def made() -> bool | None:
        with contextlib.suppress(OSError, BadFile):
            return load_weights(model, shared.read_bytes(path, largest))

    while not made():
        check_stop()
        with contextlib.suppress(OSError, BadFile):
            if is_known_dead(shared.read(claim) or {}):
                shared.delete(claim)
            if not shared.write_once(claim, process_identity()) and time.monotonic() < until:
                if until == float("inf"):
                    until = time.monotonic() + CLAIM_SECONDS
                    say(f"another node makes the warm start; waiting up to 10 minutes (or delete {claim})")
                time.sleep(0.5)
                continue
        try:
            if not made():  # by who held the claim until just now
                halving_on_oom(lambda _: warm_start(*recipe), 1, 1, "the warm start")
                shared.write(path, pack_weights(model), keep=lambda old: load_weights(model, old))
        except OSError as error:
            say(f"the warm start cannot be shared, this node goes on with its own: {error}")
        finally:
            with contextlib.suppress(OSError):
                shared.delete(claim)
                shared.delete(shared.tmp)
        return


def run_worker(config: Config, log: Log, stop: StopButton) -> str:
    """Load, resume, train, save. Returns how it ended: finished, incomplete, stopped or superseded."""
    stop.check()  # the imports took a while
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME, config.NODE_ID, config.MAX_STAGES)
    store.create()
    announce(config, store, log.say)
    tasks = join_experiment(config, store, log.say, only_read=True)
    keep_freed_memory()
    if config.MODEL_NAME == "tiny":
        torch.set_num_threads(1)  # 0.14 M parameters: a second thread costs more than it brings
    try:
        model, codec = load_model(config, tasks)
        load_warm_start(config, model, codec, tasks, log.say, stop.check)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    longest = {task: max(len(codec.prompt(lucky_question(task, i))) for i in range(5)) for task in tasks}
    if cut := [task for task in tasks if longest[task] == codec.max_prompt]:
        log.say(f"note: questions of {some(cut)} are cut to {codec.max_prompt} tokens: lower MAX_NEW_TOKENS")
    if join_experiment(config, store, log.say, only_read=False) != tasks:
        raise ConfigError(f"TASKS in {store.base / 'config.json'} changed during this start: start it again")
    max_rows = check_memory(config, model, log.say)
    ids = [f"{config.NODE_ID}_{i}" for i in range(config.LOCAL_NODES)]
    nodes = [new_node(node_id, model, config) for node_id in (ids if len(ids) > 1 else [config.NODE_ID])]
    del model  # every node has a copy
    swarm = Swarm(store, {node.id: "" for node in nodes}, config, log.event, log.lines)
    scratch, lock = make_scratch(store, log)
    run = Run(config, store, swarm, codec, nodes, log, stop, tasks, scratch, max_rows=max_rows)
    try:
        prepare(run)
        train(run)
        swarm.state = "done"
        if run.done >= 0:  # also of a start that only finds them missing, after a stop in the last round
            save_checkpoint(run)
            save_models(run)
            swarm.post(swarm.end, run.done)
        if run.history:
            log.event("end", f"finished; {conclusion(run)}; next: NODE_ROLE=report compares experiments")
        outcome = "finished"
    except Ended as how:
        outcome = str(how)
        save_checkpoint(run)  # a superseded one's stays on the local disk, see `carry`
        if outcome == "stopped":
            swarm.state = "stopped"
            log.event("end", f"stopped before round {run.done + 1}; to go on:\n  {log.resume_line}")
    finally:
        arrived = stop.pressed < 2 and close(run)
        swarm.is_abandoned = True
        lock.close()  # in a notebook this process lives on
    outcome = "superseded" if swarm.superseded else outcome
    return "incomplete" if outcome == "finished" and not arrived else outcome


def check_memory(config: Config, model, say) -> int:
    """Say what memory is needed and what is there; ConfigError if even the models do not fit.

    Weights, gradients and Adam take 16 bytes a parameter and node. Returns completions per forward pass.
    """
    needed = 16e-9 * sum(p.numel() for p in model.parameters()) * config.LOCAL_NODES
    share = memory_share(config, config.DEVICE)
    rows, row = rows_that_fit(model, config, share)
    batch = config.NUM_GENERATIONS * (config.NUM_TRAIN_SAMPLES + config.NUM_TRANSPLANT_TREES)
    memory = f"{needed:.2g} GB for {config.LOCAL_NODES} x {config.MODEL_NAME} with gradients and Adam"
    memory += f", about {min(rows, batch) * row:.2g} GB for {min(rows, batch)} completions at once"
    if needed > share / 1e9:
        todo = "lower LOCAL_NODES or NUM_WORKERS, or set a smaller MODEL_NAME"
        raise ConfigError(f"not enough memory: {memory}; this process may have {share / 1e9:.1f} GB: {todo}")
    say(f"memory: {memory}; {share / 1e9:.1f} GB available")
    return rows


def new_node(node_id: str, model, config: Config) -> Node:
    """A node with its own copy of the weights."""
    own = copy.deepcopy(model).eval()
    return Node(node_id, own, new_optimizer(own, config))


def make_scratch(store: DriveStore, log: Log) -> tuple[Path, object]:
    """A local folder for files on their way to the shared one, and its lock, open while this process lives.

    Those that ended processes left are deleted; one with files that did not arrive is kept, and named by the
    next start of its node.
    """
    whose = f"{os.path.realpath(store.base)} {store.owner}"
    try:
        scratch = Path(tempfile.mkdtemp(prefix="sapo-"))
        lock = open(scratch / "lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(whose, file=lock, end="", flush=True)
    except OSError as error:
        raise ConfigError(f"TMPDIR={tempfile.gettempdir()}: no folder can be made there ({error})") from error
    for path in scratch.parent.glob("sapo-????????/lock"):
        with contextlib.suppress(OSError, ValueError), open(path, "r+") as theirs:
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: in use
            if not (waiting := waiting_files(path.parent)):
                if os.fstat(theirs.fileno()).st_mtime < time.time() - 60:  # else just made, not yet locked
                    shutil.rmtree(path.parent)
            elif theirs.read(len(whose) + 1) == whose:
                why = f"did not reach {store.base} in an earlier start, and this one does not use it"
                todo = "a copy there is gone on from (rewards before it that are not there stay missing)"
                log.say(f"{plain(waiting[0], 300)} {why}; {todo}; or delete it")
    return scratch, lock


def prepare(run: Run) -> None:
    """Resume, register, try out the folder, look at it, check the disk, say what begins."""
    config, store, swarm = run.config, run.store, run.swarm
    resume(run)  # before registering: a start that is refused must not take a running node's place
    run.log.say(f"the folder: {store.probe()}")  # it also sweeps what a killed process of this name left
    about = {"model": config.MODEL_NAME, "device": config.DEVICE, **process_identity()}
    about |= {"cpus": os.cpu_count(), "torch": torch.__version__, "transformers": transformers.__version__}
    about |= {"python": platform.python_version(), "reasoning_gym": REASONING_GYM_VERSION}
    session = store.new_session(*swarm.nodes)
    for node in run.nodes:
        swarm.nodes[node.id] = store.register(node.id, "worker", about, session)
        swarm.post(store.rewrite, f"logs/{node.id}/system_info.json", {"node_id": node.id, **about})
    swarm.round = run.done + 1
    swarm.start()
    nodes, end = {node.id: node for node in run.nodes}, min(swarm.clock, config.MAX_ROUNDS)
    for t in [t for t in store.rounds("rewards") if run.done < t < end and not swarm.alone]:
        run.stop.check()  # these rounds were finished before a kill, and are not replayed
        for row in store.rewards(t, nodes):
            nodes[row["node_id"]].total_reward += row["reward"]
    size = checkpoint_bytes(run)
    for place, copies in ((store.base, config.CHECKPOINT_KEEP + 1), (run.scratch, 1)):
        if (free := shutil.disk_usage(place).free) < copies * size:
            needed = f"{free / 1e9:.2f} GB free, {copies} checkpoints need {copies * size / 1e9:.2f} GB"
            run.log.event("disk", f"{place}: {needed}; lower CHECKPOINT_KEEP or make room")
    if config.NUM_TRANSPLANT_TREES == 0:
        run.log.say("NUM_TRANSPLANT_TREES=0: nothing is learned from peers (plain GRPO)")
    what = f"{len(run.nodes)} node(s), model {config.MODEL_NAME} on {config.DEVICE} ({config.DTYPE})"
    run.log.event("start", f"{what}, round {run.done + 1}")
    run.log.say(f"to resume: {run.log.resume_line}")
    if sys.stdout.isatty() or in_notebook():  # a log file wants plain lines
        from tqdm.auto import tqdm  # transformers brings it

        rounds = dict(total=config.MAX_ROUNDS, initial=run.done + 1, unit="round", dynamic_ncols=True)
        with contextlib.suppress(OSError, ValueError):
            run.log.bar = tqdm(**rounds)


def close(run: Run) -> bool:
    """Write what is still queued and say goodbye; whether all of it arrived. Nothing is given up silently."""
    if run.log.bar is not None:
        with contextlib.suppress(OSError, ValueError):
            run.log.bar.close()
        run.log.bar = None
    if uploads():
        run.stop.pressed = 1  # one more is the last
        run.log.say("waiting for the Hub (Ctrl-C gives up)")
    deadline = time.monotonic() + (HUB_PATIENCE if run.swarm.state == "done" else 120.0)
    with contextlib.suppress(KeyboardInterrupt):
        for thread in uploads():
            thread.join(max(0.0, deadline - time.monotonic()))
    if uploads():
        run.log.event("hub", f"an upload did not reach the Hub; the model lies in {run.scratch / 'hub'}")
    pending = True  # as long as it is not known
    with contextlib.suppress(KeyboardInterrupt):
        if pending := run.swarm.close(patience=10.0):
            run.stop.pressed = 1
            run.log.say(f"{pending} writes wait for the shared folder, up to 5 minutes (Ctrl-C gives up)")
            pending = run.swarm.close(patience=300.0)
    if run.swarm.set_aside:
        run.log.say(f"set aside, because they cannot be written: {len(run.swarm.set_aside)} files")
    waiting = waiting_files(run.scratch)
    unsaved = run.swarm.state != "running" and run.done not in (-1, *run.checkpoints)
    lost = pending or len(waiting) or len(run.swarm.set_aside) or unsaved
    if lost:
        here = f"; what lies in {run.scratch} can be copied there" * bool(waiting)
        run.log.say(f"{'some' if lost is True else lost} writes did not reach the shared folder{here}")
    if not waiting and not uploads():
        shutil.rmtree(run.scratch, ignore_errors=True)
    return not lost


def run_coordinator(config: Config, log: Log, stop: StopButton) -> str:
    """Open rounds for the swarm; loads no model."""
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME, COORDINATOR, config.MAX_STAGES)
    store.create()
    store.open_config({}, only_read=True)  # StoreError if it is none of this program's
    stages = begun_with(store, "MAX_STAGES", config.MAX_STAGES)
    if config.MAX_STAGES not in (stages, Config.MAX_STAGES):  # not set: whatever the workers have
        todo = f"{store.base / 'config.json'} says {stages}; set that, or another EXPERIMENT_NAME"
        raise ConfigError(f"MAX_STAGES={config.MAX_STAGES}: {todo}")
    store.max_stages = min(100, stages)
    store.sweep()
    session = store.register(COORDINATOR, "coordinator", {"model": None, **process_identity()})
    swarm = Swarm(store, {COORDINATOR: session}, config, log.event, log.lines)
    outcome = Coordinator(swarm, config, log.say).run(lambda: stop.pressed)
    log.say(f"coordinator: {outcome}" + " by a newer one on this seat" * (outcome == "superseded"))
    swarm.state = "done" if outcome == "finished" else "stopped"
    swarm.close(patience=10.0)
    return outcome


def run_reader(config: Config, stop: StopButton) -> str:
    """monitor, validate or report: they change no experiment and load no model."""
    names, shared = list_experiments(config.GDRIVE_PATH), DriveStore(config.GDRIVE_PATH, None)
    if config.NODE_ROLE == "report" and names:
        rows = compare_experiments(config.GDRIVE_PATH)
        lines = [report_text(rows) if rows else f"report: no rewards below {config.GDRIVE_PATH}"]
        for name, data in (report_files(rows) if rows else {}).items():
            path = f"reports/{name}"
            try:
                shared.write(path, data)
                lines.append(str(shared.base / path))
            except OSError as error:
                lines.append(f"{shared.base / path} cannot be written: {error}")
        print(*lines, sep="\n")  # last: whoever reads it may leave (head)
        return "finished" if rows else "invalid"
    live = config.NODE_ROLE == "monitor" and (sys.stdout.isatty() or in_notebook())
    if live and config.EXPERIMENT_NAME not in names:
        print(f"waiting for experiment {config.EXPERIMENT_NAME} in {config.GDRIVE_PATH}", flush=True)
    while live and config.EXPERIMENT_NAME not in names and not stop.pressed:
        time.sleep(0.5)
        names = list_experiments(config.GDRIVE_PATH)
    if config.EXPERIMENT_NAME not in names:
        there = f"there are: {some(names)}" if names else "there is none"
        print(f"no experiment {config.EXPERIMENT_NAME!r} in {config.GDRIVE_PATH}; {there}")
        return "invalid"
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME)
    store.open_config({}, only_read=True)  # StoreError if it is none of this program's
    rounds = config.MAX_ROUNDS if config.MAX_ROUNDS != Config.MAX_ROUNDS else None  # as set here
    if config.NODE_ROLE == "monitor":
        monitor(store, config.STALE_AFTER_SECONDS, rounds, once=not live, should_stop=lambda: stop.pressed)
        return "finished"
    set_here = max(config.LOCAL_NODES, config.NUM_WORKERS)
    begun = max(begun_with(store, "LOCAL_NODES", 1), begun_with(store, "NUM_WORKERS", 1))
    nodes = next((n for n in (set_here, begun) if n > 1), len(without_seat(store.sessions())))
    rounds = rounds or max(begun_with(store, "MAX_ROUNDS", Config.MAX_ROUNDS), store.clock()[0] + 1)
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


def list_experiments(path) -> list[str]:
    """Names of the experiments below `path`. One with a coordinator alone has no config.json yet."""
    shared = DriveStore(path, None)
    names = [n for n in (shared.names("experiments") if os.path.isdir(path) else ()) if is_name(n)]
    inside = ((n, shared.names(f"experiments/{n}{p}", look=False)) for n in names for p in ("", "/state"))
    return sorted({n for n, there in inside if {"config.json", "rounds"} & {*there}})


def compare_experiments(path, names=None) -> list[dict]:
    """Figures of experiments (all below `path` by default) over seeds, against their J = 0 baseline."""
    summaries = []
    for name in names or list_experiments(path):
        try:
            summaries.append(summarize(store := DriveStore(path, name)))
            said = [f"experiment {name}: not used: {plain(why)}" for why in store.skipped]
        except (ValueError, OSError, StoreError) as error:  # one that is damaged: the others are reported
            said = [f"experiment {name} is left out: {error}"]
        with contextlib.suppress(OSError):  # a full disk
            print("".join(f"{line}\n" for line in said), end="")
    return compare(summaries)


def unseen_globals(environ) -> list[str]:
    """In a notebook: variables set as Python's own, which this program cannot see, with the line to write."""
    names = sys.modules["IPython"].get_ipython().user_ns if in_notebook() else {}
    unseen = [(f.name, names[f.name]) for f in fields(Config) if f.name in names and f.name != SECRET]
    unseen = [(n, v) for n, v in unseen if isinstance(v, str | int | float) and environ.get(n) != str(v)]
    return [f"{n} is a Python variable, which is not seen: write %env {n}={v}" for n, v in unseen]


def main(environ=None) -> int:
    """Run the role that the environment asks for (read only here), say what goes wrong; the exit status."""
    environ = {name: str(value) for name, value in (os.environ if environ is None else environ).items()}
    say, to_go_on = print, ""
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # closed by >&-
    with contextlib.suppress(AttributeError):  # a notebook's has no encoding to care for
        sys.stdout.reconfigure(errors="replace")  # a terminal may know no "…"
    stop = StopButton()
    stop.install()
    try:
        config, notes = read_config(environ)
        log = Log(config.NODE_ID, config.HUGGINGFACE_ACCESS_TOKEN, resume_line(config, environ))
        say, to_go_on = log.say, f"; to go on:\n  {log.resume_line}"
        run = {"worker": run_worker, "coordinator": run_coordinator}.get(config.NODE_ROLE)
        if run:
            say(config_table(config, config.VERBOSE))
        for note in notes + unseen_globals(environ):
            say(f"note: {note}")
        outcome = run(config, log, stop) if run else run_reader(config, stop)
        return {"finished": 0, "valid": 0, "stopped": 130, "superseded": 3}.get(outcome, 1)
    except (Ended, KeyboardInterrupt):
        say(f"stopped{to_go_on}")
        return 130
    except ImportError as error:
        say(f"{error}\n  pip install torch transformers reasoning-gym")
    except (ConfigError, StoreError, MemoryError) as error:
        say(str(error))
    except OSError as error:
        say(f"GDRIVE_PATH={environ.get('GDRIVE_PATH', 'auto')} cannot be used: {plain(error)}")
    finally:
        stop.restore()
    return 2


if __name__ == "__main__":
    wants_help = sys.argv[1:] and not in_notebook()  # --help, -h, help: nothing is set by arguments
    status = print(help_text()) if wants_help else main()
    if status and not in_notebook():  # in a notebook the cell just ends
        sys.exit(status)
