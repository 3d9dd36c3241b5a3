# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9,<3", "transformers>=5.0,<5.25", "reasoning-gym>=0.1.25,<0.2"]
# ///
"""SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721).

Several nodes each train their own language model with GRPO on reasoning-gym questions, and share
their rollouts as plain text through one folder (see drive_store.py). In each stage of a round, a
node trains on I groups of its own (NUM_TRAIN_SAMPLES, 8) and J external groups from its peers
(NUM_TRANSPLANT_TREES, by default 0, which is plain GRPO). A group is one question with its
completions (see `Group` in grpo.py).

Settings are environment variables (see `python sapo.py --help`):

    EXPERIMENT_NAME=first MODEL_NAME=tiny MAX_ROUNDS=60 python sapo.py
"""

import contextlib
import copy
import difflib
import gc
import hashlib
import inspect
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
import textwrap
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

try:
    import huggingface_hub  # comes with transformers, like safetensors and tqdm
    import safetensors.torch
    import torch
    import tqdm

    if "DriveStore" in globals():  # the four modules were pasted into one notebook cell
        coordinator = drive_store = grpo = sys.modules[__name__]
    else:
        import coordinator
        import drive_store
        import grpo
except ModuleNotFoundError as error:  # in a notebook, sys.exit must not be called
    raise (ImportError if "ipykernel" in sys.modules else SystemExit)(
        f"{error}: activate the environment with the packages (such as `. venv/bin/activate`), "
        "or install them with the command in README.md"
    ) from None


def train(run: "Run") -> None:
    """Run Algorithm 1 of the paper with this process's nodes until the last round.

    In each stage, all nodes of this process finish step 3 before any of them starts step 4. They
    thus share synchronously, and a swarm in one process is bit-for-bit reproducible on a CPU.

    Raise drive_store.Stopped between two rounds if the process should end early.

    `run` is the state of this process. Its main parts are:
        config, codec   as in grpo.py; `run.update_limit` is `limit` there
        nodes           the learners (`Node`) of this process, by default one (LOCAL_NODES)
        store           the shared folder
        swarm.board     a snapshot of the board; swarm.look() replaces and returns it
        swarm.enter(t)  moves these nodes' "open" markers to round t
        swarm.beat()    writes their heartbeats if they are due
        last_round      the last finished round, or -1; `finish_round` updates it
    """
    while (t := next_round(run)) is not None:
        for stage in range(run.config.MAX_STAGES):  # 1 by default
            at = drive_store.At(t, stage)
            for node in run.nodes:
                questions = sample_batch(run, node, at)  # 1. draw I questions
                node.groups = generate_groups(run, node, questions, at)  # 2. answer each G times
                publish_groups(run, node, at)  # 3. share them as text

            for node in run.nodes:
                node.external = sample_external(run, node, at)  # 4. draw J external groups
                policy_gradient(run, node)  # 5. do one update on own and external groups
                submit_reward(run, node, at)  # 6. report
        finish_round(run, t)


# -------- The steps of a stage --------------------------------------------------------------------
# `at` is the current stage, At(round, stage). `node.metrics` collects its metrics.


def sample_batch(run: "Run", node: "Node", at) -> "list[grpo.Question]":
    """Draw I questions (step 1), or k times as many with LOCAL_OVERSAMPLE=k (default 1).

    Their seeds are hashes, so a resumed node draws the same questions without a saved RNG state.
    """
    node.metrics = {"rejected": 0, "external_pool": 0}  # a new stage
    indices = range(run.config.NUM_TRAIN_SAMPLES * run.config.LOCAL_OVERSAMPLE)
    seeds = [derive_seed(run.config, node.id, at, "question", i) for i in indices]
    return make_questions(run, seeds)


def generate_groups(run: "Run", node: "Node", questions: list, at) -> "list[grpo.Group]":
    """Generate and score G completions per question (step 2; see `grpo.sample_completions`)."""
    seed = derive_seed(run.config, node.id, at, "generate")
    with timed(node, "generate_seconds"):
        groups = answer_questions(run, node, questions, run.config.NUM_GENERATIONS, seed)
    node.metrics |= generation_metrics(groups)
    return groups


def publish_groups(run: "Run", node: "Node", at) -> None:
    """Share this stage's groups as text (step 3), by default before training on them."""
    node.unshared += node.groups
    if run.config.publishes(at.stage):  # only the last stage if ROLLOUT_PUBLISH_FREQUENCY=round
        rollouts = drive_store.rollout_file(node.unshared, run.about)  # `about` is informational
        older = run.store.publish("rollouts", node.id, at, rollouts)
        node.unshared = []
        if older is not None:  # from before a crash; peers may have read these groups
            use_published(run, node, older)


def sample_external(run: "Run", node: "Node", at) -> "list[grpo.Group]":
    """Wait for the peers and draw J of their groups (step 4).

    If this stage has too few, fill the gaps with groups from one, two … ROLLOUT_MAX_AGE (4) rounds
    back. Candidates of the same age are equally likely to be drawn.
    """
    config = run.config
    with timed(node, "wait_seconds"):
        if config.NUM_TRANSPLANT_TREES > 0 and config.publishes(at.stage):
            wait_for_peers(run, node, at)

    rng = random.Random(derive_seed(config, node.id, at, "external"))
    external = []
    for age in range(min(config.ROLLOUT_MAX_AGE, at.round) + 1):
        num_missing = config.NUM_TRANSPLANT_TREES - len(external)
        if num_missing == 0:
            break
        candidates = external_candidates(run, node, at, age, rng)
        # EXERCISE: choose the groups differently.
        external += rng.sample(candidates, min(num_missing, len(candidates)))
        node.metrics["external_pool"] += len(candidates)
    node.used_external |= {group.key for group in external}
    node.metrics |= external_metrics(run, node, at, external)
    return external


def external_candidates(run: "Run", node: "Node", at, age: int, rng) -> "list[grpo.Group]":
    """Return the verified groups of one age that `node` may draw and has not drawn before.

    Age 0 is this stage, and age 1 is all stages of the previous round. `choose_peers` selects at
    most FETCH_MAX_PEERS (10) other nodes by a hash. With EXTERNAL_FILTER (the default), all groups
    are informative.
    """
    config = run.config
    stages = [at.stage] if age == 0 else range(config.MAX_STAGES)
    sources = [drive_store.At(at.round - age, stage) for stage in stages]
    publishers = run.swarm.board.reached("rollouts", sources[0])  # at sources[0] or later

    candidates = []
    for peer in choose_peers(run, node, at, publishers):
        records = unused_records(run, node, peer, sources)  # groups as dicts

        # Draw at most I groups per peer and age (J if I = 0), before the expensive verification.
        fair_share = config.NUM_TRAIN_SAMPLES or config.NUM_TRANSPLANT_TREES
        if len(records) > fair_share:
            records = rng.sample(records, fair_share)

        for record in records:
            group = verify_once(run, node, record)  # cached; None if rejected
            if group and (group.is_informative or not config.EXTERNAL_FILTER):
                candidates.append(group)
    return candidates


def verify(run: "Run", record: dict) -> "grpo.Group":
    """Return a peer's group with its question, token ids and rewards computed locally.

    Only the record's task and seed, and each completion's response and finished, are used. The
    prompt is compared with the regenerated question. The answer and the rewards are ignored.

    Raise Rejected or grpo.QuestionError for
    - a task that is not one of TASKS, or a seed that has no question;
    - a held-out seed, which is reserved for evaluation;
    - a prompt that differs from the regenerated question, or a question too long for this model;
    - a completion that is empty, too long for this model or longer than 2 * MAX_NEW_TOKENS (this
      model's tokenizer may need more tokens than the peer's);
    - an EOS before the end of a completion, or a token that this model does not have.
    """
    question = checked_question(run, record)
    prompt = run.codec.encode_prompt(question)
    shared = record["completions"][: run.config.NUM_GENERATIONS]  # a peer's G may be larger
    finished = [completion["finished"] for completion in shared]
    token_ids = checked_ids(run.codec, prompt, shared, finished)

    # Score the text that these tokens decode to (with `grpo.compute_reward`), because the update
    # trains on the tokens.
    group = score(run, question, prompt, token_ids, finished)
    return replace(group, key=record["key"])


def policy_gradient(run: "Run", node: "Node") -> None:
    """Do one GRPO update on I of the node's own groups and the external groups (step 5).

    If more than I groups were generated (LOCAL_OVERSAMPLE), informative groups are chosen first.
    """
    # EXERCISE: replace uninformative groups with informative groups from earlier rounds (replay).
    own = sorted(node.groups, key=lambda group: not group.is_informative)
    groups = own[: run.config.NUM_TRAIN_SAMPLES] + node.external
    with timed(node, "train_seconds"):
        update = grpo.update_policy(
            node.model, node.optimizer, groups, run.config, run.codec, run.update_limit
        )
    node.metrics |= update_metrics(run, node, groups, update)


def submit_reward(run: "Run", node: "Node", at) -> None:
    """Submit and log the stage's metrics (step 6).

    The reward is the mean over all of the node's own completions, because external groups, or a
    choice of informative groups, would bias it. With I = 0, it is None.
    """
    reward = coordinator.mean(reward for group in node.groups for reward in group.rewards)
    metrics = {"reward": reward, **node.metrics, **held_out_metrics(run, node, at)}
    # If this stage was already submitted before a crash, the earlier metrics count.
    node.metrics = run.store.publish("rewards", node.id, at, metrics) or metrics
    node.total_reward += node.metrics["reward"] or 0.0
    log_metrics(run, node, at)


# -------- Which nodes wait for which --------------------------------------------------------------


def wait_for_peers(run: "Run", node: "Node", at) -> None:
    """Wait for late peers, for at most FETCH_TIMEOUT_SECONDS (30).

    All stages of a round and all nodes of this process share this time. The wait also ends when a
    later round opens or a stop is requested.
    """
    while late := late_peers(run, node, at):
        if run.swarm.board.open_round > at.round or run.signals.requested:
            return
        if run.seconds_to_wait <= 0:
            run.given_up |= late  # see expected_workers
            names = coordinator.join_names(sorted(late), 3)
            run.log.once("wait", f"{names} did not publish round {at.round} in time")
            return
        run.swarm.beat()
        run.seconds_to_wait -= run.swarm.sleep()  # seconds since the last poll began


def late_peers(run: "Run", node: "Node", at) -> set[str]:
    """Return the expected peers that have not published this stage.

    If none of them is alive, return an empty set, because dead peers alone are no reason to wait.
    """
    board = run.swarm.look()
    late = set()
    for peer in choose_peers(run, node, at, expected_workers(run, board, at.round)):
        # On some storage backends, a file arrives later than its marker.
        if peer not in board.reached("rollouts", at) or fetch_records(run, node, peer, at) is None:
            late.add(peer)
    late -= set(run.config.node_ids)  # the nodes of this process have published
    return late if any(map(run.swarm.is_alive, sorted(late))) else set()


def expected_workers(run: "Run", board, t: int) -> set[str]:
    """Return the workers whose rollouts of round t this process waits for.

    These are the workers in step (see `Board.in_step`) and, so that slow workers can catch up,
    workers that have entered round t - 1 but not published it. After a wait for a worker has timed
    out, the worker is not expected again until it is in step.
    """
    in_step = board.in_step("rollouts", t, run.config.MAX_STAGES)
    run.given_up -= in_step
    entered_previous = set(board.reached("open", drive_store.At(t - 1))) & set(board.workers)
    return in_step | (entered_previous - run.given_up)


def next_round(run: "Run") -> int | None:
    """Enter the next round and return it, or return None after the last round.

    If other processes have opened later rounds, the next round is the open round, so a process that
    was slow or unavailable skips rounds.
    """
    next_own = run.last_round + 1
    if next_own >= run.config.MAX_ROUNDS:
        return None
    t = coordinator.wait_for_round(run, next_own)

    log_skipped(run, next_own, min(t, run.config.MAX_ROUNDS))
    if t >= run.config.MAX_ROUNDS:  # other processes may have a larger MAX_ROUNDS
        return None
    run.swarm.enter(t)
    run.seconds_to_wait = run.config.FETCH_TIMEOUT_SECONDS
    return t


@dataclass
class Node:
    """A learner. The first six fields are saved in checkpoints."""

    id: str
    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer"
    total_reward: float = 0.0
    used_external: set = field(default_factory=set)  # keys of drawn external groups
    held_out: dict = field(default_factory=dict)  # {"before training": accuracy, …}

    # The state of the current stage. `unshared` may also hold groups of earlier stages.
    groups: "list[grpo.Group]" = field(default_factory=list)
    unshared: "list[grpo.Group]" = field(default_factory=list)  # own groups not yet published
    external: "list[grpo.Group]" = field(default_factory=list)
    metrics: dict = field(default_factory=dict)


# ==== The core ends here. Below: peers' files, rounds, metrics, settings, checkpoints, startup ====

if coordinator is not sys.modules[__name__]:  # functions for notebooks
    from coordinator import (  # noqa: F401
        compare_experiments,
        get_experiment_metrics,
        get_experiment_status,
        list_experiments,
    )


@dataclass
class Run:
    """The state of a process. The fields from `nodes` on belong to workers."""

    config: "Config"
    store: "drive_store.DriveStore"
    swarm: "drive_store.Swarm"  # this process's view of the swarm
    log: "Log"
    signals: "Signals"
    code: str | None = field(default_factory=coordinator.hash_code)  # when the process starts
    history: list[dict] = field(default_factory=list)  # the metrics of each stage and node
    round_ends: list[float] = field(default_factory=list)  # times of the monotonic clock
    present: set = field(default_factory=set)  # in the coordinator: the nodes now in the swarm

    nodes: list[Node] = field(default_factory=list)
    codec: "grpo.Codec | None" = None
    about: dict = field(default_factory=dict)  # informational fields of its rollout files
    update_limit: "grpo.Limit | None" = None  # how many completions fit into memory
    generation_limit: "grpo.Limit | None" = None
    last_round: int = -1  # the last finished round
    samples: list[dict] = field(default_factory=list)  # sample answers from before training

    # Caches: (peer, At) -> the groups in this file, as dicts with checked types, and key of a group
    # -> the verified Group, or None for a rejected group.
    fetched: dict = field(default_factory=dict)
    verdicts: dict = field(default_factory=dict)

    # The seconds left to wait for peers in this round, and peers for which a wait has timed out.
    seconds_to_wait: float = 0.0
    given_up: set = field(default_factory=set)

    @property
    def is_first_round(self) -> bool:
        """True until this process has finished a round (not necessarily round 0)."""
        return not self.round_ends


# -------- Questions and answers -------------------------------------------------------------------


def derive_seed(config: "Config", node_id: str, at, purpose: str, i: int = 0) -> int:
    """Return a hash of the arguments as a seed, which is below all HELD_OUT_SEEDS."""
    text = f"{config.SEED}|{node_id}|{at.round}|{at.stage}|{purpose}|{i}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % grpo.HELD_OUT_SEEDS.start


def make_questions(run: Run, seeds: list[int]) -> "list[grpo.Question]":
    """Return a question for each seed, which also determines the task.

    If a seed yields no question that fits the model, the next seeds are tried.
    """
    questions = []
    for seed in seeds:
        # Use a separate random stream. Random(seed)'s first numbers also generate the question, so
        # choosing the task with them would restrict each task to a subset of its questions.
        task = random.Random(f"task {seed}").choice(run.config.tasks)
        questions.append(grpo.first_valid_question(task, seed, run.codec.fits))
    return questions


def answer_questions(run: Run, node: Node, questions: list, num_generations: int, seed: int):
    """Generate completions of each question, and return them as scored groups.

    Training, evaluation and sample answers all use this function.
    """
    prompts = [run.codec.encode_prompt(question) for question in questions]
    generated = grpo.sample_in_batches(
        node.model, run.codec, prompts, num_generations, run.config, seed, run.generation_limit
    )
    groups = []
    for question, prompt, completions in zip(questions, prompts, generated, strict=True):
        finished = [run.codec.is_finished(ids) for ids in completions]
        groups.append(score(run, question, prompt, completions, finished))
    return groups


def score(run: Run, question, prompt: list, completions: list, finished: list) -> "grpo.Group":
    """Decode and score completions (see `grpo.compute_reward`), and return them as a group."""
    texts = [run.codec.decode(ids) for ids in completions]
    rewards = [float(grpo.compute_reward(question, text, run.config.REWARD)) for text in texts]
    if not all(0 <= reward <= 1 for reward in rewards):
        raise ValueError(f"compute_reward returned {rewards}: return numbers from 0 to 1")
    return grpo.Group(prompt, completions, rewards, question, texts, finished)


# -------- Peers' files ----------------------------------------------------------------------------


def choose_peers(run: Run, node: Node, at, peers) -> list[str]:
    """Select at most FETCH_MAX_PEERS (10) of these peers for this node.

    A hash ranks the peers, and the ranking changes every five rounds. The limit keeps the cost of a
    round from growing with the swarm.
    """
    period = drive_store.At(at.round // 5)  # used only in the hash
    ranked = sorted(
        set(peers) - {node.id},
        key=lambda p: derive_seed(run.config, node.id, period, f"read {p}"),
    )
    return sorted(ranked[: run.config.FETCH_MAX_PEERS])


class Rejected(ValueError):
    """A peer's group cannot be used. The text is the reason."""


def unused_records(run: Run, node: Node, peer: str, sources: list) -> list[dict]:
    """Return the groups in a peer's files that the node has not drawn yet."""
    records = []
    for source in sources:
        records += fetch_records(run, node, peer, source) or []
    return [record for record in records if record["key"] not in node.used_external]


def fetch_records(run: Run, node: Node, peer: str, at) -> list[dict] | None:
    """Return the groups in a peer's file, [] if it is unusable, or None if it does not exist."""
    if run.fetched.get((peer, at)) is None and run.config.publishes(at.stage):
        try:
            run.fetched[peer, at] = run.store.fetch("rollouts", peer, at)
        except drive_store.InvalidFileError as error:  # the file is read again next round
            run.fetched[peer, at] = []
            reject(run, node, peer, error)
    return run.fetched.get((peer, at))


def verify_once(run: Run, node: Node, record: dict) -> "grpo.Group | None":
    """Verify a group once for all nodes of this process. Return None for a rejected group."""
    key = record["key"]
    if key not in run.verdicts:
        run.verdicts[key] = None
        try:
            run.verdicts[key] = verify(run, record)
        except (Rejected, grpo.QuestionError) as error:
            reject(run, node, key[2], error)
    return run.verdicts[key]


def use_published(run: Run, node: Node, records: list[dict]) -> None:
    """Train on the groups in the node's own rollout file if they differ from its new groups.

    On a GPU, a stage that is repeated after a crash may yield different completions.
    """
    records = records[-len(node.groups) :]  # of this stage, if several stages share the file
    texts = [[each["response"] for each in record["completions"]] for record in records]
    if texts != [group.texts for group in node.groups]:
        published = [verify_once(run, node, record) for record in records]
        node.groups = [replace(group, key=None) for group in published if group]
        node.metrics |= generation_metrics(node.groups)


def reject(run: Run, node: Node, peer: str, reason) -> None:
    """Count an unusable file or group, and log each (peer, reason) once."""
    node.metrics["rejected"] += 1
    run.log.once("reject", f"{peer}: {reason}")


def checked_question(run: Run, record: dict) -> "grpo.Question":
    """Regenerate the question of a peer's group.

    Raise Rejected if this node could never draw this question itself, or if the peer's prompt is
    different.
    """
    if record["task"] not in run.config.tasks:
        raise Rejected("a group's task is not in this experiment's TASKS")
    if record["seed"] in grpo.HELD_OUT_SEEDS:
        raise Rejected("a group's question has a held-out seed")
    question = grpo.make_question(record["task"], record["seed"])
    if record["prompt"] != question.text:
        raise Rejected("a group's prompt differs from the regenerated question")
    return question


def checked_ids(codec, prompt: list, completions: list, finished: list) -> list[list[int]]:
    """Encode a peer's completions with this model's tokenizer.

    Raise Rejected if this model could not have generated them.
    """
    texts = [completion["response"] for completion in completions]
    longest = min(codec.max_completion, codec.positions - len(prompt))
    if any(len(text) > 16 * longest for text in texts):  # encoding the text would take long
        raise Rejected("a completion is too long")
    token_ids = codec.encode_completions(texts, finished)
    for ids in token_ids:
        if not 1 <= len(ids) <= longest:
            raise Rejected(f"a completion is empty or longer than {longest} of this model's tokens")
        if max(ids) >= codec.vocabulary or not codec.eos_ids.isdisjoint(ids[:-1]):
            raise Rejected("a completion contains an unknown token, or an EOS before its end")
    return token_ids


# -------- Rounds ----------------------------------------------------------------------------------


def log_skipped(run: Run, next_own: int, end: int) -> None:
    """Log that this process missed the rounds from `next_own` to `end` - 1, if there are any."""
    if end == next_own:
        return
    missed = f"rounds {next_own} to {end - 1}" if end > next_own + 1 else f"round {next_own}"
    run.log.event("skip", f"the swarm ran {missed} without this process")
    run.log.show_bar(run.config.MAX_ROUNDS, end)  # its rate counts only trained rounds

    # A node may have submitted rewards in these rounds before a crash. Add them to its total, which
    # the checkpoint does not include yet, and log the rows that the crash prevented.
    for node in run.nodes if run.is_first_round else ():
        stages = run.store.list_stages("rewards", node.id)
        skipped = [at for at in stages if next_own <= at.round < end]
        logged = coordinator.logged_rows(run.store, node.id)
        for row in run.store.read_rewards(node.id, skipped):
            node.metrics = row
            node.total_reward += row["reward"] or 0.0
            at = drive_store.At(row["round"], row["stage"])
            if at not in logged:
                log_metrics(run, node, at)


def finish_round(run: Run, t: int) -> None:
    """Log the round, save a checkpoint if it is due, and clean up."""
    interval = run.config.CHECKPOINT_INTERVAL
    # A checkpoint is due if a multiple of the interval was reached, perhaps in a skipped round.
    checkpoint_is_due = (run.last_round + 1) // interval < (t + 1) // interval
    run.last_round = t

    # Flush first. A resumed process does not repeat the rounds before its checkpoint, so their log
    # rows must already be in the file.
    log_round(run, t)
    run.log.flush(run.store)
    if checkpoint_is_due or t == run.config.MAX_ROUNDS - 1:
        save_checkpoint(run)

    # Forget groups that are too old for later rounds. Forget unusable files as well, so that they
    # are read again.
    oldest = t - run.config.ROLLOUT_MAX_AGE
    run.fetched = {
        file: groups for file, groups in run.fetched.items() if groups and file[1].round >= oldest
    }
    run.verdicts = {key: group for key, group in run.verdicts.items() if key[0] >= oldest}
    for node in run.nodes:
        node.used_external = {key for key in node.used_external if key[0] >= oldest}

    prune_rollouts(run)


def prune_rollouts(run: Run) -> None:
    """Delete or archive old rollouts if ROLLOUT_CLEANUP_ENABLED is set.

    A resumed node repeats the rounds since its checkpoint, and the first of these rounds may draw
    groups from up to ROLLOUT_MAX_AGE rounds earlier. Rollouts of all these rounds are kept.
    """
    config = run.config
    if config.ROLLOUT_CLEANUP_ENABLED:
        needed = config.CHECKPOINT_INTERVAL + config.ROLLOUT_MAX_AGE
        oldest = run.last_round + 1 - max(config.ROLLOUT_KEEP_LAST_N_ROUNDS, needed)
        for node in run.nodes:
            reason = run.store.prune_rollouts(node.id, oldest, config.ROLLOUT_ARCHIVE_OLD)
            if reason:
                run.log.once("archive", f"cannot archive old rollouts ({reason}); keeping them")


# -------- Metrics ---------------------------------------------------------------------------------


@contextlib.contextmanager
def timed(node: Node, name: str):
    """Record the block's duration in seconds as one of the node's metrics."""
    started = time.monotonic()
    yield
    node.metrics[name] = time.monotonic() - started


def collect(groups: "list[grpo.Group]", name: str) -> list:
    """Return the field `name`, such as "rewards", of all completions in these groups."""
    return [value for group in groups for value in getattr(group, name)]


def generation_metrics(groups: "list[grpo.Group]") -> dict:
    """Return the metrics of step 2, which can explain a flat learning curve."""
    lengths = [len(ids) for ids in collect(groups, "completions")]
    answers = [grpo.extract_tagged_answer(text) for text in collect(groups, "texts")]
    # A completion that reaches the length limit after its answer does not count as truncated.
    ends = zip(collect(groups, "finished"), answers, strict=True)
    metrics = {
        "groups": len(groups),
        "completions": len(lengths),
        "informative_local": sum(group.is_informative for group in groups),
        "answer_tag_rate": coordinator.mean(answer is not None for answer in answers),
        "truncated_rate": coordinator.mean(not end and answer is None for end, answer in ends),
        "mean_length": coordinator.mean(lengths),
        "generated_tokens": sum(lengths),
    }
    by_task = defaultdict(list)
    for group in groups:
        by_task[f"reward_{column_name(group.question.task)}"] += group.rewards
    return metrics | {name: coordinator.mean(rewards) for name, rewards in by_task.items()}


def column_name(task: str) -> str:
    """Return a plain column name for a task, from its last 30 characters.

    The name of a file task ends with the file's hash, so different files have different columns.
    "file:我的.jsonl#1f3b5d7a" -> "file_jsonl_1f3b5d7a"
    """
    return re.sub(r"\W+", "_", task, flags=re.ASCII)[-30:]


def external_metrics(run: Run, node: Node, at, external: list) -> dict:
    """Return the metrics of step 4, such as the number of missing groups."""
    board = run.swarm.board
    peers = set(board.reached("rollouts", drive_store.At(0))) - set(run.config.node_ids)
    ages = [max(0, at.round - board.progress["rollouts", peer].round) for peer in peers]
    published = board.reached("rollouts", at) if run.config.NUM_TRANSPLANT_TREES > 0 else []
    return {
        "external_groups": len(external),
        "external_short": run.config.NUM_TRANSPLANT_TREES - len(external),
        "external_peers": len(choose_peers(run, node, at, published)),
        "newest_file_age": min(ages, default=None),
    }


def update_metrics(run: Run, node: Node, groups: "list[grpo.Group]", update: dict) -> dict:
    """Return the metrics of step 5: `update` (from `grpo.update_policy`) and the group counts.

    Log an event if the update ended early.
    """
    num_informative = sum(group.is_informative for group in groups)
    num_steps = update.pop("optimizer_steps")
    if num_informative > 0 and num_steps < run.config.NUM_ITERATIONS:
        run.log.event("gradient", f"skipped the rest of {node.id}'s update (non-finite gradient)")
    return update | {
        "local_groups": len(groups) - len(node.external),
        "informative_groups": num_informative,
    }


def held_out_metrics(run: Run, node: Node, at) -> dict:
    """Return {"held_out": accuracy} every EVAL_INTERVAL rounds and in the last round, else {}."""
    interval = run.config.EVAL_INTERVAL
    end = at.round + 1
    is_due = interval > 0 and (end % interval == 0 or end == run.config.MAX_ROUNDS)
    if is_due and at.stage == run.config.MAX_STAGES - 1:
        return {"held_out": held_out_accuracy(run, node, at.round)}
    return {}


def held_out_accuracy(run: Run, node: Node, t: int) -> float:
    """Return the mean reward of one answer to each of EVAL_SAMPLES held-out questions.

    With REWARD=exact, this is pass@1. The questions have reserved seeds and are the same for all
    nodes.
    """
    indices = range(run.config.EVAL_SAMPLES)
    seeds = [derive_seed(run.config, "", drive_store.At(0), "held-out", i) for i in indices]
    questions = make_questions(run, [grpo.HELD_OUT_SEEDS.start + seed for seed in seeds])
    seed = derive_seed(run.config, node.id, drive_store.At(t), "evaluate")
    groups = answer_questions(run, node, questions, 1, seed)
    return coordinator.mean(collect(groups, "rewards"))


def evaluate(run: Run, when: str) -> None:
    """Measure the held-out accuracy "before training" or "after training", if EVAL_INTERVAL is set.

    It is logged and appears in the model card. A resumed node reads the accuracy before training
    from its checkpoint. If the node has trained in the last round, the accuracy after training is
    already known.
    """
    for node in run.nodes:
        if run.config.EVAL_INTERVAL > 0 and when not in node.held_out:
            if "held_out" not in node.metrics:
                node.metrics["held_out"] = held_out_accuracy(run, node, run.last_round)
            node.held_out[when] = node.metrics["held_out"]
            run.log.event("held-out", f"{node.id}'s accuracy {when} is {node.held_out[when]:.2f}")


# -------- Logging ---------------------------------------------------------------------------------


def log_metrics(run: Run, node: Node, at) -> None:
    """Queue a stage's row for metrics.jsonl."""
    row = {
        "timestamp": time.time(),
        "round": at.round,
        "stage": at.stage,
        "node_id": node.id,
        **node.metrics,
        "experiment": run.config.EXPERIMENT_NAME,
        "my_reward": node.metrics["reward"],
        "total_reward": node.total_reward,
        "teachers": [[group.key[2], group.question.task] for group in node.external],
        "external_ages": [at.round - group.key[0] for group in node.external],
    }
    run.log.queue(f"nodes/{node.id}/logs/metrics.jsonl", json.dumps(row))
    run.history.append(row)


def log_round(run: Run, t: int) -> None:
    """Log a round's line, with means over its stages and this process's nodes.

    Every ten rounds, add a hint if no group in these rounds was informative, or if no peer
    published in time. Every 20 rounds, add sample answers.
    """
    config, log = run.config, run.log
    run.round_ends.append(time.monotonic())
    num_rows = len(run.nodes) * config.MAX_STAGES  # rows per round
    name = run.nodes[0].id if len(run.nodes) == 1 else f"{len(run.nodes)} nodes"
    rows = run.history[-num_rows:]
    log.info(f"{name} " + coordinator.format_round(t, config.MAX_ROUNDS, rows, run.round_ends))
    log.bar.update(t + 1 - log.bar.n)

    # Explain a lack of signal, and log sample answers from time to time.
    recent = run.history[-10 * num_rows :]
    if len(run.round_ends) % 10 == 0 and not coordinator.has_signal(recent):
        log.event("no signal", coordinator.diagnose(recent, run.history))
    has_peers = any(row["external_groups"] + row["external_peers"] for row in recent)
    if len(run.round_ends) % 10 == 0 and config.NUM_TRANSPLANT_TREES > 0 and not has_peers:
        log.once(
            "wait",
            "no peer published in time in ten rounds: raise FETCH_TIMEOUT_SECONDS, use a "
            "coordinator with ROUND_ADVANCE=completion or, if this node is alone, start others",
        )
    if (t + 1) % 20 == 0 and t < config.MAX_ROUNDS - 1:
        log_samples(run)


def sample_answers(run: Run) -> list[dict]:
    """Return two fixed questions with three answers each, as in a rollout file."""
    start = drive_store.At(0)
    seeds = [derive_seed(run.config, "", start, "sample", i) for i in range(2)]
    seed = derive_seed(run.config, "", start, "sampled")
    groups = answer_questions(run, run.nodes[0], make_questions(run, seeds), 3, seed)
    return [drive_store.group_to_json(group) for group in groups]


def log_samples(run: Run, is_last: bool = False) -> list[dict]:
    """Log the first node's current sample answers and, if is_last, its answers before training.

    Return the current sample answers.
    """
    answers = sample_answers(run)
    for before, now in zip(run.samples, answers, strict=True):
        run.log.info("\n".join(coordinator.format_sample(now, before if is_last else None)))
    return answers


# -------- Settings --------------------------------------------------------------------------------


class ConfigError(ValueError):
    """Settings are invalid. The text lists each of them with its value and the allowed values."""


def setting(default, help: str, allowed=None, scope="node", **presets):
    """Return one row of the settings table.

    default: the value for a real model.
    presets: different values for the built-in model (tiny), TEST_MODE (test) or both (tiny_test).
    allowed: a tuple of words, or a range (lowest, highest).
    scope: whether a joining node inherits the value in config.json.
        "experiment"  always; a different value is an error
        "swarm"       unless the node sets its own value
        "model"       like "swarm", but only if the node has the experiment's model
        "node"        never
    """
    metadata = {"help": help, "allowed": allowed, "scope": scope, **presets}
    return field(default=default, metadata=metadata)


# fmt: off
@dataclass(frozen=True, repr=False)  # a repr would put the access token into tracebacks
class Config:
    """All settings, which are environment variables. To add a setting, add one row."""

    environ: dict = field(default_factory=dict, compare=False)  # the variables before parsing
    notes: list = field(default_factory=list, compare=False)  # messages for the user

    GDRIVE_PATH: str = setting("auto",
        "the shared folder; auto: rl-swarm in MyDrive if it is mounted, otherwise ./rl-swarm")
    EXPERIMENT_NAME: str = setting("default",
        "name of the experiment and of its subfolder; experiments are isolated from each other")
    NODE_ROLE: str = setting("worker",
        "worker trains; coordinator opens rounds; prepare loads and checks the model and creates "
        "the warm start; monitor shows progress; report compares experiments",
        ("worker", "coordinator", "prepare", "monitor", "report"))
    NODE_ID: str = setting("auto",
        "unique name; auto: node_<8 hex digits>, or node if LOCAL_NODES > 1")
    LOCAL_NODES: int = setting(1, "workers in this process, named NODE_ID_0, NODE_ID_1 …", (1, 256))
    SEED: int = setting(42,
        "the swarm's seed; NODE_ID gives each node its own questions", (0, 2**31), "experiment")
    TEST_MODE: bool = setting(False,
        "quick check with 3 rounds, I = 4, J = 2, G = 4, tiny and a short warm start; any other "
        "model uses the eight small tasks, 32 tokens and 30 warm-start steps")
    MAX_ROUNDS: int = setting(2000, "rounds to train", (1, 10**6), "swarm", test=3)
    MAX_STAGES: int = setting(1,
        "generate-share-update stages per round", (1, 100), "experiment")
    MODEL_NAME: str = setting("auto",
        "tiny (built-in), a Hugging Face id or a folder; auto: a model that fits the machine")
    TASKS: str = setting(",".join(grpo.PAPER_TASKS),
        "comma-separated list, which may contain file:mine.jsonl; auto: the paper's nine tasks, "
        "or eight small tasks for tiny",
        None, "experiment", tiny=",".join(grpo.TINY_TASKS), test=",".join(grpo.TINY_TASKS))
    NUM_SHOTS: int = setting(2,
        "few-shot examples for models without a chat template", (0, 16), "model", tiny=0)
    WARM_START_STEPS: int = setting(0,
        "supervised steps before GRPO", (0, 10**6), "model", tiny=1000, test=30, tiny_test=150)
    ANSWER_TAG_SHARE: float = setting(0.02,
        "share of answers in the rewarded format at the end of tiny's warm start",
        (0, 1), "model", test=0.9)
    REWARD: str = setting("exact",
        "exact: 1 for a correct answer, otherwise 0; verifier: reasoning-gym's own score, which "
        "gives partial credit", ("exact", "verifier"), "experiment")
    NUM_TRAIN_SAMPLES: int = setting(8,
        "I: own questions per stage; 0: train on external groups only", (0, 4096), "swarm", test=4)
    NUM_TRANSPLANT_TREES: int = setting(0,
        "J: external groups (from peers) per stage; 0: plain GRPO", (0, 4096), "swarm", test=2)
    NUM_GENERATIONS: int = setting(8, "G: completions per question", (2, 64), "swarm", test=4)
    TEMPERATURE: float = setting(1.0,
        "temperature for sampling and for the log-probabilities in the loss", (0.01, 100), "model")
    MAX_NEW_TOKENS: int = setting(256,
        "maximum completion length in tokens", (1, 32768), "model", tiny=10, test=32, tiny_test=10)
    EXTERNAL_FILTER: bool = setting(True,
        "draw only informative external groups", None, "swarm")
    LOCAL_OVERSAMPLE: int = setting(1,
        "k: generate k x I groups and train on I of them, informative groups first",
        (1, 64), "swarm")
    LEARNING_RATE: float = setting(3e-6, "learning rate of AdamW", (0, 1), "model", tiny=6e-4)
    CLIP_LOW: float = setting(0.2,
        "the policy ratio is clipped to at least 1 - CLIP_LOW", (0, 1), "model")
    CLIP_HIGH: float = setting(0.28,
        "the policy ratio is clipped to at most 1 + CLIP_HIGH", (0, 10), "model")
    NUM_ITERATIONS: int = setting(1,
        "optimizer steps per stage, all on the same completions", (1, 100), "model")
    LOSS_TYPE: str = setting("dapo",
        "dapo: mean over all tokens; grpo: mean over each completion's tokens, then over "
        "completions; dr_grpo: like grpo, but divided by MAX_NEW_TOKENS instead of the length",
        ("dapo", "grpo", "dr_grpo"), "model")
    MICRO_BATCH_SIZE: int = setting("auto",
        "completions per forward pass; auto: sized to available memory", (1, 65536))
    DTYPE: str = setting("auto",
        "compute dtype; auto: bfloat16 if supported, float16 on other CUDA GPUs, otherwise float32",
        ("float32", "bfloat16", "float16"), tiny="float32")
    DEVICE: str = setting("auto",
        "cuda, cuda:1, mps or cpu; auto: the first of these that is available")
    COORDINATOR_ROUND_INTERVAL: float = setting(60.0,
        "seconds after which a round may end (see ROUND_ADVANCE)", (0.01, 86400), "swarm")
    ROUND_ADVANCE: str = setting("hybrid",
        "time: a round ends after the interval; completion: when all live workers in it have "
        "submitted rewards; hybrid: like completion, or an interval after the first reward",
        ("time", "completion", "hybrid"), "swarm")
    ROLLOUT_PUBLISH_FREQUENCY: str = setting("stage",
        "stage: publish in every stage; round: publish once, in the last stage of a round; "
        "generation: same as stage", ("stage", "round", "generation"), "swarm")
    ROLLOUT_MAX_AGE: int = setting(4,
        "maximum age of external groups, in rounds", (0, 1000), "swarm")
    FETCH_MAX_PEERS: int = setting(10,
        "maximum number of peers that a node waits for and reads; the selection changes every "
        "five rounds", (1, 1000))
    FETCH_TIMEOUT_SECONDS: float = setting(30.0,
        "maximum seconds per round to wait for peers' rollouts", (0, 3600))
    STALE_AFTER_SECONDS: float = setting(300.0,
        "seconds without activity after which a node counts as dead", (1, 86400))
    ROLLOUT_CLEANUP_ENABLED: bool = setting(False, "remove old rollouts", None, "swarm")
    ROLLOUT_KEEP_LAST_N_ROUNDS: int = setting(10,
        "rounds of rollouts to keep, or CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE if that is more",
        (1, 10**6), "swarm")
    ROLLOUT_ARCHIVE_OLD: bool = setting(False,
        "move old rollouts to archives/ instead of deleting them", None, "swarm")
    CHECKPOINT_INTERVAL: int = setting(10, "rounds between checkpoints", (1, 10**6), "swarm")
    CHECKPOINT_KEEP: int = setting(2, "checkpoints to keep", (1, 1000))
    EVAL_INTERVAL: int = setting(0,
        "rounds between held-out evaluations (pass@1); 0: never", (0, 10**6))
    EVAL_SAMPLES: int = setting(64,
        "held-out questions per evaluation, from seeds that no node trains on", (1, 65536))
    HUGGINGFACE_ACCESS_TOKEN: str = setting("",
        "if set, the final models are pushed to the Hub; the token is never logged")
    HF_REPO: str = setting("",
        "name of the Hub repositories, to which -<node> is appended; default: EXPERIMENT_NAME")
    NUM_WORKERS: int = setting(0,
        "workers that run_swarm.sh starts (4 if unset); a process that opens rounds first waits "
        "until this many are alive, for at most one interval", (0, 10**4))
    CONFIGS: str = setting("", "for run_swarm.sh: I/J pairs to compare, such as 8/0 4/4")
    SEEDS: str = setting("", "for run_swarm.sh: seeds of the comparison, such as 1 2 3")

    @property
    def node_ids(self) -> list[str]:
        """The names of this process's nodes."""
        if self.LOCAL_NODES == 1 or self.NODE_ROLE == "coordinator":
            return [self.NODE_ID]
        return [f"{self.NODE_ID}_{i}" for i in range(self.LOCAL_NODES)]

    @property
    def tasks(self) -> list[str]:
        """The tasks that questions are drawn from."""
        return self.TASKS.split(",")

    def publishes(self, stage: int) -> bool:
        """Return whether a stage publishes rollouts.

        By default, every stage does; with ROLLOUT_PUBLISH_FREQUENCY=round, only the last stage of a
        round does.
        """
        return self.ROLLOUT_PUBLISH_FREQUENCY != "round" or stage == self.MAX_STAGES - 1
# fmt: on


TABLE = {row.name: row for row in fields(Config) if row.metadata}
FOREIGN_NAMES = {  # names in other programs, which may set them for their own use -> names here
    "LR": "LEARNING_RATE", "BATCH_SIZE": "NUM_TRAIN_SAMPLES", "STEPS": "MAX_ROUNDS",
    "EPOCHS": "MAX_ROUNDS", "MODEL": "MODEL_NAME", "TASK": "TASKS", "CONFIG": "CONFIGS",
    "DEVICES": "DEVICE", "TYPE": "DTYPE",
}  # fmt: skip
DEFAULT_MODEL = "Gensyn/Qwen2.5-0.5B-Instruct"


def read_config(environ, saved=None) -> Config:
    """Return the settings of a process, or raise ConfigError with all errors.

    The environment has priority over the experiment's settings (`saved`, the contents of its
    config.json; see `setting`), and these have priority over the defaults. Once the experiment is
    known, the settings are read again with read_config(config.environ, saved), which keeps a
    generated NODE_ID.
    """
    given, errors = parse_settings(environ)
    known, more_errors = parse_settings(saved or {}, " (in config.json)")
    errors += more_errors

    devices = grpo.available_devices()
    device = given.get("DEVICE", next(iter(devices)))
    model, notes = choose_model(given, known, device)

    # A near miss of a name is an error, because the run might ignore the intended value for hours.
    for name in sorted(set(environ) - set(TABLE)):
        text = f"{name} is not a setting of this program; did you mean"
        close = difflib.get_close_matches(name.upper(), TABLE, n=1, cutoff=0.88)
        if name in FOREIGN_NAMES:
            notes.append(f"{text} {FOREIGN_NAMES[name]}?")
        elif close:
            errors.append(f"{text} {close[0]}? Otherwise, unset it")

    defaults = default_values(given, model, devices[device])
    if given.get("NODE_ROLE") == "coordinator":
        given["NODE_ID"] = drive_store.COORDINATOR_ID

    # Find the settings that a joining node inherits from the experiment. The last part of a path or
    # Hub id identifies a model, because its folder may be moved.
    scopes = ["experiment", "swarm"]
    if Path(known.get("MODEL_NAME", "")).name == Path(model).name:
        scopes.append("model")
    theirs = {name: known[name] for name in known if TABLE[name].metadata["scope"] in scopes}
    for name, value in theirs.items():
        if TABLE[name].metadata["scope"] == "experiment" and given.get(name, value) != value:
            errors.append(
                f"{name}={given[name]!r}: the experiment uses {value!r}; "
                "to change it, use another EXPERIMENT_NAME"
            )
    inherited = [name for name in theirs if name not in given and theirs[name] != defaults[name]]
    settings = " ".join(f"{name}={theirs[name]}" for name in inherited)

    values = defaults | theirs | given | {"MODEL_NAME": model, "DEVICE": device}
    config = Config({**environ, "NODE_ID": values["NODE_ID"]}, notes, **values)
    errors += check_together(config)
    more_notes = {
        f"inherited from the experiment: {settings}": bool(inherited),
        "ROLLOUT_ARCHIVE_OLD has no effect without ROLLOUT_CLEANUP_ENABLED=True": (
            config.ROLLOUT_ARCHIVE_OLD and not config.ROLLOUT_CLEANUP_ENABLED
        ),
        f"{config.GDRIVE_PATH} will disappear with this Colab session: to keep the run, mount "
        'Google Drive first (from google.colab import drive; drive.mount("/content/drive"))': (
            "COLAB_RELEASE_TAG" in environ
            and not re.match("/content/g?drive/", os.path.abspath(config.GDRIVE_PATH))
        ),
    }
    notes += [text for text, holds in more_notes.items() if holds]
    if errors:
        raise ConfigError("invalid settings:\n  " + "\n  ".join(dict.fromkeys(errors)))
    return config


def default_values(given: dict, model: str, dtype: str) -> dict:
    """Return the defaults for this model, TEST_MODE and this machine."""
    generated_id = f"node_{secrets.token_hex(4)}" if given.get("LOCAL_NODES", 1) == 1 else "node"
    values = {
        **{name: row.default for name, row in TABLE.items()},
        "GDRIVE_PATH": drive_store.default_root(),
        "NODE_ID": generated_id,
        "DTYPE": dtype,
    }

    # Apply the presets (see `setting`). Later presets have priority.
    is_tiny, is_test = model == "tiny", given.get("TEST_MODE", False)
    presets = {"tiny": is_tiny, "test": is_test, "tiny_test": is_tiny and is_test}
    for name, row in TABLE.items():
        for preset, counts in presets.items():
            if counts and preset in row.metadata:
                values[name] = row.metadata[preset]
    return values


def check_together(config: Config) -> list[str]:
    """Check the parsed settings together, and return the errors."""
    folder = Path(config.GDRIVE_PATH).absolute()  # on an unmounted drive, the parent is missing
    role = config.NODE_ROLE
    allowed = "use 1 to 64 letters, digits, '.', '_' or '-', without '.' at either end"
    errors = {
        "NUM_TRAIN_SAMPLES=0, NUM_TRANSPLANT_TREES=0: nothing to train on; raise one of them": (
            config.NUM_TRAIN_SAMPLES + config.NUM_TRANSPLANT_TREES == 0
        ),
        f"EXPERIMENT_NAME={config.EXPERIMENT_NAME!r}: {allowed}": (
            role != "report" and not drive_store.is_safe_name(config.EXPERIMENT_NAME)
        ),  # in a report, it is a pattern
        f"NODE_ID={config.NODE_ID!r}: {allowed}": not drive_store.is_safe_name(config.node_ids[-1]),
        f"NODE_ID={config.NODE_ID!r}: reserved for the coordinator; use another name": (
            role != "coordinator" and config.NODE_ID.lower() == drive_store.COORDINATOR_ID
        ),
        f"GDRIVE_PATH={folder}: expected a folder whose parent directory exists": (
            not os.path.isdir(folder.parent) or os.path.isfile(folder)
        ),
        f"MODEL_NAME={config.MODEL_NAME!r}: expected tiny, a Hugging Face id (such as gpt2) or a "
        "folder that exists": (
            role in ("worker", "prepare")
            and not os.path.isdir(config.MODEL_NAME)
            and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", config.MODEL_NAME)
        ),
    }
    return [text for text, holds in errors.items() if holds]


def parse_settings(source, where: str = "") -> tuple[dict, list[str]]:
    """Parse the settings in the environment or in config.json. Return ({name: value}, errors).

    A value that is blank, "None" or "auto" counts as unset.
    """
    values = {}
    errors = []
    for name, row in TABLE.items():
        text = str(source.get(name, "")).strip()
        # NODE_ROLE=auto is an error, because it was a role in earlier versions.
        if text in ("", "None") or (text == "auto" and name != "NODE_ROLE"):
            continue
        try:
            values[name] = parse_value(row, text, may_read_files=not where)
        except ValueError as error:
            errors.append(f"{name}={drive_store.printable(repr(text))}{where}: {error}")
    return values, errors


def parse_value(row, text: str, may_read_files: bool = False):
    """Parse one setting. If the text is invalid, raise ValueError with the allowed values."""
    allowed = row.metadata["allowed"]
    if row.name == "TASKS":
        return ",".join(grpo.task_names(text, may_read_files))
    if row.name == "DEVICE" and text not in grpo.available_devices():
        raise ValueError(f"this machine has {', '.join(grpo.available_devices())}")
    if row.type is bool:  # not bool(text), because bool("False") is True
        if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise ValueError("expected True or False")
        return text.lower() in ("1", "true", "yes", "on")
    if row.type is str:
        if allowed and text not in allowed:
            raise ValueError(f"expected {', '.join(allowed)}")
        return os.path.expanduser(text)

    with contextlib.suppress(ValueError):
        value = row.type(text)
        if allowed[0] <= value <= allowed[1]:  # false for nan
            return value
    kind = "an integer" if row.type is int else "a number"
    raise ValueError(f"expected {kind} from {allowed[0]} to {allowed[1]}")


def choose_model(given: dict, known: dict, device: str) -> tuple[str, list[str]]:
    """Return (MODEL_NAME, notes that explain an automatic choice of the model to train).

    auto selects tiny if no model is needed, in TEST_MODE, and in an experiment created with tiny.
    Otherwise, it selects a real model only on an accelerator with enough memory for all nodes.
    """
    needs_none = given.get("NODE_ROLE") in ("coordinator", "monitor", "report")
    is_tiny = needs_none or given.get("TEST_MODE") or known.get("MODEL_NAME") == "tiny"
    if "MODEL_NAME" in given or is_tiny:
        return given.get("MODEL_NAME", "tiny"), []
    # Each node needs 10 GB for weights, gradients, Adam's moments and activations.
    needed = 10 * given.get("LOCAL_NODES", 1) * num_sharers(given.get("NUM_WORKERS", 1))
    has_room = device != "cpu" and grpo.available_memory(device) / 1e9 > needed
    model = DEFAULT_MODEL if has_room else "tiny"
    return model, [
        f"MODEL_NAME=auto selected {model} ({DEFAULT_MODEL} needs an accelerator with {needed} GB)"
    ]


def num_sharers(num_workers: int) -> int:
    """Return how many processes share a device if this many workers run on this machine."""
    gpus = [name for name in grpo.available_devices() if ":" in name]
    return max(1, math.ceil(num_workers / max(1, len(gpus))))


def saved_settings(config: Config) -> dict:
    """Return the contents of config.json: settings that joining nodes inherit or readers need."""
    names = [name for name, row in TABLE.items() if row.metadata["scope"] != "node"]
    names += ["EXPERIMENT_NAME", "MODEL_NAME", "LOCAL_NODES", "NUM_WORKERS", "TEST_MODE"]
    return {
        "layout": drive_store.LAYOUT,
        "maker": config.node_ids[0],
        "reasoning_gym": grpo.REASONING_GYM_VERSION,
        "code": coordinator.hash_code(),
        "created_at": time.time(),
        **{name: getattr(config, name) for name in names},
    }


def help_text() -> str:
    """Return all settings with their defaults, as `python sapo.py --help` prints them."""
    lines = ["usage: NAME=value … python sapo.py      (settings are environment variables)\n"]
    for name, row in TABLE.items():
        text = row.metadata["help"]
        if "tiny" in row.metadata and name != "TASKS":
            text += f"; for tiny {row.metadata['tiny']}"
        default = "auto" if name == "TASKS" else row.default
        head = f"  {name:27} {default!s:8.8} "
        lines += textwrap.wrap(text, 100, initial_indent=head, subsequent_indent=" " * len(head))
    lines += [
        "\nexamples:",
        "  EXPERIMENT_NAME=first NODE_ID=anna MODEL_NAME=tiny MAX_ROUNDS=60 python sapo.py",
        "  EXPERIMENT_NAME=first NODE_ROLE=monitor python sapo.py",
        "The manual is .github/MANUAL.md.",
    ]
    return "\n".join(lines)


def start_command(config: Config, **changes) -> str:
    """Return the command that restarts this process, without the access token."""
    shown = {
        **{name: config.environ.get(name, "") for name in TABLE if name != grpo.SECRET},
        "EXPERIMENT_NAME": config.EXPERIMENT_NAME,
        "GDRIVE_PATH": os.path.abspath(config.GDRIVE_PATH),
        **changes,
    }
    words = [f"{name}={shlex.quote(text)}" for name, text in shown.items() if text.strip()]
    return " ".join([*words, "python sapo.py"])


# -------- Checkpoints -----------------------------------------------------------------------------
# A process writes one checkpoint for all its nodes, in its first node's folder. A checkpoint is a
# safetensors file with a JSON text in its header, so loading it executes no code.

# Errors caused by a tensor file that is damaged or belongs to a different model.
UNUSABLE = (ValueError, TypeError, LookupError, AttributeError, safetensors.SafetensorError)


def save_checkpoint(run: Run) -> None:
    """Save the state of all nodes after round `run.last_round`.

    Keep the CHECKPOINT_KEEP newest checkpoints, and delete older checkpoints.
    """
    run.swarm.check_superseded()  # never overwrite the checkpoint of a newer process of this node
    about = {"round": run.last_round, "nodes": {}}
    for node in run.nodes:
        about["nodes"][node.id] = {
            "total_reward": node.total_reward,
            "trained": sorted(node.used_external),
            "held_out": node.held_out,
        }
    write_tensors(
        run.store,
        checkpoint_path(run, run.last_round),
        checkpoint_tensors(run.nodes),
        json.dumps(about),
    )
    for node in run.nodes:  # so that a later process knows that there must be a checkpoint
        run.store.move_marker("checkpoint", node.id, drive_store.At(run.last_round))

    # Checkpoints of later rounds do not count, because they could not be loaded.
    stages = run.store.list_stages("checkpoints", run.nodes[0].id)
    rounds = sorted({at.round for at in stages if at.round <= run.last_round})
    for old in rounds[: -run.config.CHECKPOINT_KEEP]:
        run.store.delete(checkpoint_path(run, old), frees_space=True)


def load_latest_checkpoint(run: Run) -> None:
    """Load the newest readable checkpoint, if there are checkpoints after round `run.last_round`.

    Raise StoreError if a checkpoint must exist, but no checkpoint can be used. A node thus never
    starts over by accident.
    """
    reason = ""
    stages = run.store.list_stages("checkpoints", run.nodes[0].id)
    rounds = [at.round for at in stages if at.round > run.last_round]
    for t in reversed(rounds):
        try:
            load_checkpoint(run, t)
            run.last_round = t
            run.log.event("resume", f"from the checkpoint after round {t}")
            return
        except UNUSABLE as error:
            reason = (
                f"the checkpoint after round {t} cannot be used "
                f"({drive_store.printable(error, 200)})"
            )
            run.log.once("resume", f"{reason}; trying an older checkpoint")

    # A node has written a checkpoint if it has a checkpoint marker, or if it ran before this
    # process joined and a checkpoint file is unusable.
    board = run.store.read_board()
    for node in run.nodes if run.last_round < 0 else ():
        is_missing = ("checkpoint", node.id) in board.progress
        has_run = node.id in board.sessions and not run.swarm.session
        if is_missing or (reason and has_run):
            raise drive_store.StoreError(
                f"cannot resume {node.id} ({reason or 'its checkpoint is missing'}): "
                "restore the checkpoint or use another NODE_ID"
            )


def load_checkpoint(run: Run, t: int) -> None:
    """Load the checkpoint after round t into the nodes.

    Hyperparameters come from the settings, not from the file. Raise one of UNUSABLE if the file
    does not fit. The tensors decide whether the model fits, because its folder may be moved.
    """
    ours = checkpoint_tensors(run.nodes)
    tensors, text = read_tensors(run.store, checkpoint_path(run, t), ours)
    about = drive_store.parse_json(text.encode())
    drive_store.require(about, {"round": int, "nodes": dict})
    for saved in about["nodes"].values():
        drive_store.require(saved, {"total_reward": float, "trained": list, "held_out": dict})
        saved["trained"] = {tuple(key) for key in saved["trained"]}
    if about["round"] != t or about["nodes"].keys() != {*run.config.node_ids}:
        raise drive_store.InvalidFileError("it belongs to a different round or to different nodes")
    copy_tensors(tensors, ours)
    for node in run.nodes:
        saved = about["nodes"][node.id]
        node.total_reward = saved["total_reward"]
        node.used_external = saved["trained"]
        node.held_out = saved["held_out"]


def checkpoint_path(run: Run, t: int) -> str:
    return f"nodes/{run.nodes[0].id}/checkpoints/round_{t:06d}.safetensors"


def checkpoint_tensors(nodes: list[Node]) -> dict:
    """Return {name: tensor} of the nodes' weights and Adam's state, without copying them."""
    tensors = {}
    for node in nodes:
        for name, p in node.model.named_parameters():
            tensors[f"{node.id}/{name}/weight"] = p
            for kind, tensor in node.optimizer.state[p].items():
                tensors[f"{node.id}/{name}/{kind}"] = tensor
    return tensors


def check_room(run: Run) -> None:
    """Raise StoreError if TMPDIR has no room for a checkpoint, which is written there first."""
    needed = sum(tensor.nbytes for tensor in checkpoint_tensors(run.nodes).values()) + 10**6
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise drive_store.StoreError(
            f"TMPDIR={folder} has only {free / 1e9:.2f} GB free, "
            f"but a checkpoint needs {needed / 1e9:.2f} GB: "
            "free some space or set TMPDIR to a different local folder"
        )


def write_tensors(store, path: str, tensors: dict, text: str, replaces: bool = True) -> None:
    """Write {name: tensor} and a text to a safetensors file in the shared folder."""
    saved = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "tensors")
        try:
            safetensors.torch.save_file(saved, local, {"about": text})
        except (OSError, safetensors.SafetensorError) as error:
            raise drive_store.StoreError(
                f"cannot write to {folder} ({error}): set TMPDIR to a different local folder"
            ) from error
        store.upload(local, path, replaces)


def read_tensors(store, path: str, ours: dict) -> tuple[dict, str]:
    """Return the tensors and the text of a file that `write_tensors` wrote.

    Raise one of UNUSABLE if the file cannot be used or is much larger than our tensors.
    """
    max_bytes = sum(tensor.nbytes for tensor in ours.values()) + 10**8  # for names and text
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "tensors")
        store.download(path, local, max_bytes)
        with safetensors.safe_open(local, framework="pt") as file:
            text = (file.metadata() or {}).get("about", "")
            return {name: file.get_tensor(name) for name in file.keys()}, text


@torch.no_grad()
def copy_tensors(saved: dict, ours: dict) -> None:
    """Copy the saved tensors into our tensors of the same names.

    If a tensor is missing or does not fit, raise InvalidFileError and change nothing.
    """
    for name, tensor in ours.items():
        fits = name in saved and saved[name].shape == tensor.shape
        if not fits or saved[name].dtype != tensor.dtype or not saved[name].isfinite().all():
            raise drive_store.InvalidFileError(
                f"{name} is missing, is not finite, or has a different shape or dtype"
            )
    for name, tensor in ours.items():
        tensor.copy_(saved[name])


# -------- The final model -------------------------------------------------------------------------


def export_models(run: Run, samples: list[dict]) -> None:
    """Write each node's model as a standard Hugging Face folder, and log how to try it.

    The script that tries a model asks the sample question that the first node answers best. With an
    access token, push the models to the Hub as well.
    """
    best = max(samples, key=lambda sample: sum(c["reward"] for c in sample["completions"]))
    script = grpo.try_script(run.codec, grpo.make_question(best["task"], best["seed"]), run.config)
    for node in run.nodes:
        with tempfile.TemporaryDirectory() as folder:
            try:
                grpo.save_model(node.model, run.codec, model_card(run, node), folder)
            except Exception as error:  # a library may fail to save a model that it has loaded
                run.log.event("export", f"{node.id}'s model cannot be written ({error!r})")
                continue
            Path(folder, "try.py").write_text(script, encoding="utf-8")
            target = f"nodes/{node.id}/model"
            run.store.make_dir(target)
            for name in os.listdir(folder):
                run.store.upload(Path(folder, name), f"{target}/{name}")
            if run.config.HUGGINGFACE_ACCESS_TOKEN:
                push_model(run, node, folder)

    folder = run.store.dir.absolute() / f"nodes/{run.nodes[0].id}/model"
    run.log.info(f"final model: {folder}\n  try it: python {shlex.quote(str(folder / 'try.py'))}")


def push_model(run: Run, node: Node, folder: str) -> None:
    """Push a model to the Hub. If this fails, log a command that retries it."""
    repo = f"{run.config.HF_REPO or run.config.EXPERIMENT_NAME}-{node.id}"
    try:
        hub = huggingface_hub.HfApi(token=run.config.HUGGINGFACE_ACCESS_TOKEN)
        repo_id = hub.create_repo(repo, private=True, exist_ok=True).repo_id
        hub.upload_folder(repo_id=repo_id, folder_path=folder)
        run.log.event("hub", f"pushed to {repo_id} (a new repository is private)")
    except Exception as error:  # the error's text may contain the token
        target = shlex.quote(str(run.store.dir.absolute() / f"nodes/{node.id}/model"))
        run.log.event(
            "hub",
            f"push failed ({type(error).__name__}); to retry, run:\n"
            f"  hf upload --private {repo} {target}",
        )


def model_card(run: Run, node: Node) -> str:
    """Return the README.md of a final model, in the Hub's format."""
    config = run.config
    # The Hub shows the base model, but a local path would be meaningless there.
    is_on_hub = config.MODEL_NAME != "tiny" and not os.path.isdir(config.MODEL_NAME)
    base_model = f"\nbase_model: {config.MODEL_NAME}" if is_on_hub else ""
    held_out = ", ".join(f"{value:.2f} {when}" for when, value in node.held_out.items())
    return f"""---
library_name: transformers
tags: [grpo, sapo, reasoning-gym]{base_model}
---
# {config.EXPERIMENT_NAME}-{node.id}

Trained with SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721), which is GRPO on the
node's own rollouts and, if J > 0, on rollouts that its peers shared.

- rounds of the run: {config.MAX_ROUNDS}
- per stage of a round: I = {config.NUM_TRAIN_SAMPLES} own questions,
  J = {config.NUM_TRANSPLANT_TREES} external groups (from peers),
  G = {config.NUM_GENERATIONS} completions per question
- tasks (reasoning-gym): {", ".join(config.tasks)}
- cumulative reward: {node.total_reward:.2f}
- held-out accuracy (pass@1): {held_out or "not measured"}

`python try.py` asks the model one of the tasks' questions, prompted and sampled as in training, and
prints the correct answer with it. To ask your own question, add it in quotes, and word it like the
questions of the tasks.
"""


# -------- Startup and shutdown --------------------------------------------------------------------

RAISE_IT = "raise MAX_ROUNDS or use another EXPERIMENT_NAME"


def main(environ=None) -> int:
    """Run the role that the environment selects, and return the exit code.

    0: finished, 1: failed, 2: cannot run (settings, model, folder or memory), 3: superseded by a
    newer process with the same NODE_ID, 130: stopped. Only this function reads the environment.
    """
    environ = os.environ if environ is None else environ
    environ = {name: str(value) for name, value in environ.items()}
    sys.stdout = sys.stdout or open(os.devnull, "w")  # a daemon has no stdout
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="replace")  # print "?" for unencodable characters
    num_threads = torch.get_num_threads()
    signals = Signals()
    log = Log(environ.get(grpo.SECRET, "").strip())
    try:
        config = read_config(environ)
        if config.NODE_ROLE in ("monitor", "report"):
            return coordinator.run_reader(config, signals)
        return run_role(config, log, signals)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return say_failure(log, error)
    finally:
        signals.uninstall()
        torch.set_num_threads(num_threads)  # a notebook may continue with another model


def say_failure(log: "Log", error: BaseException) -> int:
    """Log the error that ended this process, and return the exit code.

    Unusable settings, models and folders, and a lack of memory, are logged as one sentence. Any
    other error is a bug, which is logged with its traceback.
    """
    if grpo.is_out_of_memory(error):
        error = grpo.ModelError(
            f"this run does not fit into memory ({error}): "
            "lower LOCAL_NODES or use a smaller MODEL_NAME"
        )
    is_expected = isinstance(error, (ConfigError, grpo.ModelError, drive_store.StoreError))
    log.info(str(error) if is_expected else "".join(traceback.format_exception(error)))
    return 2 if is_expected else 1


def run_role(config: "Config", log: "Log", signals: "Signals") -> int:
    """Run a worker, the coordinator or prepare, and shut it down cleanly, even after an error.

    Return the exit code.
    """
    log.node_id = config.node_ids[0]
    node_ids = [] if config.NODE_ROLE == "prepare" else config.node_ids
    store = drive_store.DriveStore(
        config.GDRIVE_PATH, config.EXPERIMENT_NAME, node_ids, log.event, signals.sleep
    )
    saved = store.load_config()
    config = read_config(config.environ, saved)
    for note in config.notes:
        log.info(f"note: {note}")

    swarm = drive_store.Swarm(store, config.STALE_AFTER_SECONDS)
    run = Run(config, store, swarm, log, signals)
    roles = {"prepare": prepare, "coordinator": run_clock, "worker": run_worker}
    try:
        status, state = roles[config.NODE_ROLE](run, saved), "done"
    except drive_store.Stopped as stop:  # between two rounds
        if str(stop) == "superseded":
            status, state = 3, None  # the heartbeat belongs to the newer process
            log.event("end", "a newer process with this NODE_ID is running, so this process stops")
        else:
            status, state = 130, "stopped"
            log.info(f"stopped; to resume, run:\n  {start_command(config)}")
    except KeyboardInterrupt:  # Ctrl-C during startup or an outage, or pressed a second time
        log.info(f"stopped without saving a checkpoint; to resume, run:\n  {start_command(config)}")
        status, state = 130, "stopped"
        store.on_event = None  # from now on, no call waits for the folder
    except BaseException as error:  # even sys.exit() in the user's own code
        status, state = say_failure(log, error), "failed"
        if swarm.session:
            log.event("error", traceback.format_exception_only(error)[-1].strip())
    finally:
        log.bar.close()

    # Write the last heartbeat and the last log lines, if this process has joined the swarm.
    with contextlib.suppress(OSError if store.on_event is None else ()):
        if state is not None:
            swarm.beat(state)
        if swarm.session:
            log.flush(store)

    # Free the models, because the next run in a notebook needs their memory. They are in reference
    # cycles, which only gc.collect() frees at once.
    run.nodes.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return status


def prepare(run: Run, saved) -> int:
    """Load and check the model, and create its warm start."""
    model, run.codec = load_checked_model(run)
    run.store.make_root()
    run.store.make_dir("/warmstart")
    run.store.remove_leftovers()
    apply_warm_start(run, model)
    run.log.info(f"{run.config.MODEL_NAME} is ready")
    return 0


def run_clock(run: Run, saved: dict | None) -> int:
    """Run the coordinator once a worker has created the experiment. Return the exit code."""
    if saved is None:
        run.log.info(
            "waiting for the first worker, which creates the experiment:\n  "
            + start_command(run.config, NODE_ROLE="worker", NODE_ID="anna")
        )
        while (saved := run.store.load_config()) is None:
            run.signals.sleep(0.1)  # poll often, because workers open round 1 after 0.5 s
        run.config = read_config(run.config.environ, saved)
    if find_standing(run, saved) == "finished":
        return 0
    coordinator.run_coordinator(run)
    exp = coordinator.read_experiment(run.swarm)  # includes rounds of earlier processes
    coordinator.log_end(run, exp.rows)
    coordinator.write_plot(exp, run.store.root, run.log)
    folders = [f"nodes/{node_id}/rollouts" for node_id in exp.board.workers]
    return coordinator.check_test_run(run, exp.rows, exp.board.workers, folders)


def run_worker(run: Run, saved: dict | None) -> int:
    """Load the model, create or join the experiment, resume, train and save. Return the exit code.

    Raise Stopped if the process should end before the last round. If the model cannot be loaded or
    fails a check, the folder remains untouched. If the checkpoints are unusable, the nodes' files
    remain unchanged.
    """
    config, log = run.config, run.log
    if saved is not None and find_standing(run, saved) == "finished":
        return 0
    model, run.codec = load_checked_model(run)

    # Create the experiment. If another process has just created it, that process's settings apply.
    if saved is None:
        settings = saved_settings(config)
        saved = run.store.begin(settings)
        if read_config(config.environ, saved) != config:
            raise ConfigError(
                "another node has just created this experiment with different settings: "
                "restart this node to use them"
            )
        how = "a new experiment" if saved == settings else "joining another node's new experiment"
        log.info(f"{config.EXPERIMENT_NAME}: {how} in {run.store.dir.absolute()}")

    apply_warm_start(run, model)
    make_nodes(run, model)
    run.about = {
        "model": config.MODEL_NAME,
        "reasoning_gym": grpo.REASONING_GYM_VERSION,
        "tasks": grpo.TASK_HASH,
    }
    available = grpo.available_memory(config.DEVICE) // num_sharers(config.NUM_WORKERS)
    at_once = grpo.estimate_completions_at_once(model, config, available)
    run.update_limit = grpo.Limit(at_once, "the update", log.info)
    is_cpu = config.DEVICE == "cpu"
    at_once = grpo.estimate_generated_at_once(model, config, available) if is_cpu else 2**30
    run.generation_limit = grpo.Limit(at_once, "generation", log.info)

    check_room(run)

    # Resume before joining, because a process that cannot resume must not supersede a running node.
    run.samples = sample_answers(run)
    load_latest_checkpoint(run)
    join(run)
    log_samples(run)
    if run.last_round < 0:
        evaluate(run, "before training")

    log.show_bar(config.MAX_ROUNDS, run.last_round + 1)
    try:
        train(run)
    except drive_store.Stopped:  # between two rounds
        if run.last_round >= 0:
            save_checkpoint(run)
        raise
    return finish_run(run)


def find_standing(run: Run, saved: dict) -> str:
    """Log and return whether this process is "finished", "resuming" or "joining".

    saved: the contents of config.json. Raise ConfigError if a new node cannot join, because no
    rounds are left or because the user probably meant to resume a stopped node.
    """
    config, name = run.config, run.config.EXPERIMENT_NAME
    board = run.swarm.look()

    # The process is finished if each of its nodes (for a coordinator, each worker) either has
    # submitted the last reward and is done, or is alive and beyond MAX_ROUNDS. A node that was
    # stopped after its last reward is not done, because its model is missing.
    last = drive_store.At(config.MAX_ROUNDS - 1, config.MAX_STAGES - 1)
    ended = [n for n in board.reached("rewards", last) if run.swarm.status(n) == "done"]
    in_later_rounds = board.reached("rewards", drive_store.At(config.MAX_ROUNDS))
    ahead = [n for n in in_later_rounds if run.swarm.is_alive(n)]
    node_ids = board.workers if config.NODE_ROLE == "coordinator" else config.node_ids
    if node_ids and {*ended, *ahead}.issuperset(node_ids):
        run.log.info(f"{name}: already finished ({config.MAX_ROUNDS} rounds); {RAISE_IT}")
        return "finished"

    # A new node may join until the last round is over. A node with a generated name may only join
    # live nodes. If no node is alive, the user probably meant to resume a stopped node.
    is_known = not {*board.sessions, str(saved.get("maker"))}.isdisjoint(config.node_ids)
    has_generated_name = re.fullmatch("node_[0-9a-f]{8}", config.NODE_ID) is not None
    has_live_node = any(map(run.swarm.is_alive, board.workers))
    if has_generated_name and board.workers and not is_known and not has_live_node:
        statuses = [f"{node_id} is {run.swarm.status(node_id)}" for node_id in board.workers]
        raise ConfigError(
            f"{name}: cannot join without a NODE_ID, because no node is alive "
            f"({coordinator.join_names(statuses, 5)}): set NODE_ID to resume one of these nodes or "
            "to add a new node"
        )
    if board.open_round >= config.MAX_ROUNDS and not is_known:
        raise ConfigError(f"{name}: too late to join in round {board.open_round}; {RAISE_IT}")
    standing = "resuming" if is_known else "joining"
    names = coordinator.join_names(board.workers, 5) or "none yet"
    run.log.info(
        f"{name}: {standing}, round {max(0, board.open_round)} of {config.MAX_ROUNDS}, "
        f"nodes: {names}"
    )
    return standing


def load_checked_model(run: Run):
    """Load and check the model and the tasks. Return the model and its Codec."""
    config = run.config
    grpo.keep_freed_memory()
    if config.MODEL_NAME == "tiny":
        torch.set_num_threads(1)  # with 0.14M parameters, a second thread costs more than it saves
    else:
        run.log.info(f"loading {config.MODEL_NAME} (this may take minutes)")
    model, codec = grpo.load_model(config, config.tasks)
    for sentence in grpo.file_notes(codec, config, config.tasks):
        run.log.info(f"note: {sentence}")
    if run.signals.requested:  # stopped during loading, so create no experiment
        raise KeyboardInterrupt
    return model, codec


def apply_warm_start(run: Run, model) -> None:
    """Load this model's warm start (short SFT) from warmstart/, or create it and write it there.

    Nodes with the same model and warm-start settings therefore start with the same weights.
    """
    config, log = run.config, run.log
    if config.WARM_START_STEPS == 0:
        return

    # The file name is a hash of everything that must be equal for nodes to share the warm start.
    recipe = json.dumps(grpo.warm_start_recipe(model, run.codec, config, config.tasks))
    name = f"{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.safetensors"
    was_there = name in run.store.list_names("/warmstart")
    if was_there and load_weights(run, name, model):
        return

    steps = config.WARM_START_STEPS
    log.info(f"creating the warm start of {config.MODEL_NAME}: {steps} steps")
    for step, loss in grpo.warm_start(model, run.codec, config, config.tasks):
        if run.signals.requested:
            log.info(f"warm start stopped at step {step} of {steps}; it will start over next time")
            raise KeyboardInterrupt
        if step % max(1, steps // 10) == 0:
            log.info(f"warm start {step}/{steps}: loss {loss:.3f}")

    # Replace the file only if it could not be used. Then load the file that is there, because
    # another process may have written it in the meantime, and all nodes must use the same weights.
    if run.store.has_dir("/warmstart") and not (was_there and load_weights(run, name, model)):
        weights = dict(model.named_parameters())
        write_tensors(run.store, f"/warmstart/{name}", weights, recipe, replaces=was_there)
        load_weights(run, name, model)


def load_weights(run: Run, name: str, model) -> bool:
    """Load the model's weights from a file in warmstart/. Return False if it cannot be used."""
    try:
        ours = dict(model.named_parameters())
        tensors, _ = read_tensors(run.store, f"/warmstart/{name}", ours)
        copy_tensors(tensors, ours)
    except UNUSABLE as error:
        run.log.info(f"warmstart/{name} cannot be used ({drive_store.printable(error, 200)})")
        return False
    return True


def make_nodes(run: Run, model) -> None:
    """Create the nodes, each with a model and an optimizer.

    The last node uses `model` itself and the others use copies, so that the process holds exactly
    one model per node.
    """
    models = [copy.deepcopy(model) for _ in run.config.node_ids[1:]]
    for node_id, own in zip(run.config.node_ids, [*models, model], strict=True):
        own.eval()
        # A step may take minutes, so every forward pass writes a heartbeat if it is due.
        own.base_model.register_forward_pre_hook(lambda *_: run.swarm.beat())
        run.nodes.append(Node(node_id, own, grpo.make_optimizer(own, run.config)))


def join(run: Run) -> None:
    """Join the swarm. Record the settings (without the access token), code and versions in use."""
    config = run.config
    device = config.DEVICE
    if device.startswith("cuda"):
        device += f", {torch.cuda.get_device_name(device)}"
    about = {
        "model": config.MODEL_NAME,
        "device": device,
        "host": os.uname().nodename,
        "code": run.code,
        **grpo.VERSIONS,
        **{name: getattr(config, name) for name in TABLE if name != grpo.SECRET},
    }
    run.swarm.join(about)
    load_latest_checkpoint(run)  # an older process of this node may have saved a newer file
    for node in run.nodes:
        run.store.write(f"nodes/{node.id}/logs/system_info.json", drive_store.dump_json(about))
        if run.last_round >= 0:  # a crash may have prevented this marker
            run.store.move_marker("checkpoint", node.id, drive_store.At(run.last_round))

    sharing = "" if config.NUM_TRANSPLANT_TREES > 0 else "no learning from peers (J = 0), "
    nodes = "1 node" if len(run.nodes) == 1 else f"{len(run.nodes)} nodes"
    first = max(run.last_round + 1, run.swarm.board.open_round if run.swarm.others() else 0)
    run.log.event(
        "start",
        f"{nodes}, {config.MODEL_NAME} on {device} ({config.DTYPE}), {sharing}round {first}",
    )
    run.log.info(f"to resume: {start_command(run.config)}")


def finish_run(run: Run) -> int:
    """Log what was learned, and write the models and the plot. Return the exit code."""
    config = run.config
    # If this process missed the last rounds, the last round that it trained may not be saved.
    if not run.is_first_round and run.last_round < config.MAX_ROUNDS - 1:
        save_checkpoint(run)
    prune_rollouts(run)  # again, in case an earlier process was killed before it did
    samples = log_samples(run, is_last=True)
    rows = []  # from this and earlier processes
    for node in run.nodes:
        rows += coordinator.read_rows(run.store, run.swarm.board, node.id)
    coordinator.log_end(run, rows, run.store.list_stages("checkpoints", run.nodes[0].id))
    evaluate(run, "after training")
    export_models(run, samples)

    # The plot is drawn by the coordinator or, if it never joined, by the first worker's process.
    board = run.swarm.board
    if board.workers[0] in config.node_ids and drive_store.COORDINATOR_ID not in board.sessions:
        coordinator.write_plot(coordinator.read_experiment(run.swarm), run.store.root, run.log)

    folders = [f"nodes/{run.nodes[0].id}/checkpoints"]
    for node in run.nodes:
        folders += [f"nodes/{node.id}/{name}" for name in ("rollouts", "logs", "model")]
    return coordinator.check_test_run(run, rows, config.node_ids, folders)


# -------- Log and signals -------------------------------------------------------------------------

if os.name == "nt":
    raise SystemExit("native Windows is not supported: run this program in WSL")


class Log:
    """Log lines, which are printed immediately, and JSON records. `flush` writes both to files.

    On a terminal, a progress bar is below the lines. The access token is masked everywhere.
    """

    def __init__(self, secret: str):
        self.node_id = ""  # set once the settings are known
        self.secret = secret
        self.queued = defaultdict(list)  # file path -> its new lines
        self.warned = set()  # texts logged by `once`
        self.bar = tqdm.tqdm(disable=True)

    def info(self, text: str) -> None:
        """Print a line, and queue it for stdout.log."""
        coordinator.say(self.queue(f"nodes/{self.node_id}/logs/stdout.log", text))

    def event(self, kind: str, text: str) -> None:
        """Log a line, and queue a record for training_events.jsonl."""
        self.info(f"{self.node_id} {kind}: {text}")
        record = {
            "timestamp": time.time(),
            "event": kind,
            "node_id": self.node_id,
            "text": self.mask(text),  # before JSON escapes the token's characters
        }
        self.queue(f"nodes/{self.node_id}/logs/training_events.jsonl", json.dumps(record))

    def once(self, kind: str, text: str) -> None:
        """Log an event, unless the same text was logged before."""
        if text not in self.warned:
            self.warned.add(text)
            self.event(kind, text)

    def mask(self, text: str) -> str:
        """Return the text without the access token."""
        return text.replace(self.secret, "***") if self.secret else text

    def queue(self, path: str, text: str) -> str:
        """Queue a line for a file, and return it, both without the access token."""
        text = self.mask(text)
        self.queued[path].append(f"{text}\n")
        return text

    def flush(self, store) -> None:
        """Append the queued lines to their files."""
        queued = self.queued
        self.queued = defaultdict(list)  # lines may be added while `append` waits for the folder
        for path, lines in queued.items():
            store.append(path, "".join(lines))

    def show_bar(self, total: int, done: int) -> None:
        """Show a new progress bar on a terminal. Files and notebooks get plain lines only."""
        self.bar.close()
        self.bar = tqdm.tqdm(
            total=total,
            initial=done,
            unit="round",
            dynamic_ncols=True,
            leave=False,
            disable=not sys.stdout.isatty(),
        )


class Signals:
    """The stop signals received so far. They take effect between rounds and in every wait.

    A second signal makes the process exit immediately.
    """

    def __init__(self):
        self.requested = 0
        self.last_at = 0.0
        self.old_handlers = {}
        # Slurm can send SIGUSR1 before a job's time limit.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            under_nohup = signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP
            if not under_nohup:
                self.old_handlers[number] = signal.signal(number, self.on_signal)

    def on_signal(self, number, frame) -> None:
        # Two signals within half a second count as one, because `timeout` sends two.
        if self.requested and time.monotonic() - self.last_at < 0.5:
            return
        self.last_at = time.monotonic()
        self.requested += 1
        if self.requested > 1:
            raise KeyboardInterrupt
        coordinator.say("\nshutting down cleanly; press Ctrl-C again to exit immediately")

    def sleep(self, seconds: float) -> None:
        """Sleep in small steps. Raise KeyboardInterrupt if a stop was requested."""
        wake_at = time.monotonic() + seconds
        while time.monotonic() < wake_at:
            if self.requested:
                raise KeyboardInterrupt
            time.sleep(0.1)

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    arguments = [] if coordinator.in_notebook() else sys.argv[1:]
    if arguments:  # only --help is accepted, because settings are environment variables
        coordinator.say(help_text())  # tolerates a closed pipe, as in `| head`
        sys.exit(0 if {"--help", "-h", "help"} & set(arguments) else 2)

    # Without this check, a notebook would run this file with the modules of an earlier copy.
    own_folder = Path(inspect.getfile(main)).resolve().parent
    folders = {
        Path(inspect.getfile(function)).parent.resolve()
        for function in (drive_store.printable, grpo.load_model, coordinator.say)
    }
    if folders != {own_folder}:
        raise RuntimeError(
            f"cannot run {own_folder}/sapo.py (this kernel has loaded the modules of "
            f"{' and '.join(map(str, folders))}): restart the kernel to run another copy"
        )
    status = main()
    if not coordinator.in_notebook():
        with contextlib.suppress(OSError):  # otherwise, Python exits with code 120 on a full disk
            sys.stdout.close()
        sys.exit(status)
    if status not in (0, 130):  # ends "Run all" if this is a pasted cell; a stop is not an error
        raise RuntimeError(f"the run ended with exit code {status} (see above)")
