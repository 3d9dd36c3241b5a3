"""Tests of the program's guarantees, which double as examples of how to test RL code.

The name of a test starts with the guarantees that it checks, such as L3, and then states the
property. L stands for learning, S for the swarm, F for the folder, X for untrusted peers and U for
users. All guarantees are listed in .github/MANUAL.md, and slower tests are in .ci/.

The parts are the mathematics, questions and rewards, the shared folder, settings, and whole swarms.

The tests train on the CPU. `DEVICE=cuda python -m pytest test_sapo.py` trains on a GPU instead, and
compares the same results with the same references.
"""

import contextlib
import errno
import gc
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import coordinator
import drive_store
import grpo
import sapo
from drive_store import At, DriveStore, InvalidFileError, StoreError, Swarm, stage_file
from grpo import HELD_OUT_SEEDS, TASK_TABLE, Group, make_question
from sapo import TABLE, Config, ConfigError, derive_seed, read_config

torch.set_num_threads(1)
DEVICE = os.environ.get("DEVICE", "cpu")  # the models' device


# -------- The mathematics -------------------------------------------------------------------------
# The reference_… functions are slow, simple versions of the program's functions. They handle one
# sequence or one token at a time, without batches, padding or a KV cache.


def small_gpt2(dropout: float = 0.0):
    """Return a small random GPT-2 with a vocabulary of 23 tokens.

    Because of its large weights, the softmax is peaked, so a wrong token or position changes the
    result noticeably. For other architectures, see .ci/test_numbers.py.
    """
    torch.manual_seed(1)
    sizes = {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, initializer_range=0.3))
    return model.eval().to(DEVICE)


def ragged_groups(sizes=(2, 3, 5, 4), uninformative=()) -> list[Group]:
    """Return groups of these sizes, with prompts and completions of different lengths.

    The rewards are 0, 0.5 and 1. In the groups whose indices are in `uninformative`, all are 1.
    """
    rng = random.Random(0)
    groups = []
    for i, size in enumerate(sizes):
        completions = []
        for _ in range(size):
            length = rng.randint(1, 6)
            completions.append([rng.randrange(21) for _ in range(length)])
        rewards = [0.0, 1.0] + [rng.choice([0.0, 0.5, 1.0]) for _ in range(size - 2)]
        if i in uninformative:
            rewards = [1.0] * size
        prompt = [rng.randrange(21) for _ in range(1 + i * 5 % 7)]
        groups.append(Group(prompt, completions, rewards))
    return groups


def flat_weights(model) -> torch.Tensor:
    """Return all weights of a model as one vector on the CPU."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def assert_close(ours, expected, atol=2e-5, rtol=1e-4) -> None:
    """Assert that tensors are equal within the tolerances. They may be on different devices."""
    torch.testing.assert_close(ours, expected, atol=atol, rtol=rtol, check_device=False)


def reference_logprobs(model, prompt, completion, temperature: float = 1.0):
    """Return each completion token's log-probability, (T,), from a plain forward pass."""
    logits = model(torch.tensor([prompt + completion], device=model.device)).logits.cpu()
    logits = logits[0, len(prompt) - 1 : -1].float()  # (T, V), which predict the completion
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs[range(len(completion)), completion]


def reference_loss(logprobs, old_logprobs, advantages, loss_type: str, max_new_tokens: int):
    """Return (loss, number of clipped tokens), computed token by token from the definition."""
    num_rows = len(logprobs)
    num_tokens = sum(len(row) for row in logprobs)
    loss = 0.0
    num_clipped = 0
    for row, old_row, advantage in zip(logprobs, old_logprobs, advantages, strict=True):
        divisor = {
            "dapo": num_tokens,
            "grpo": num_rows * len(row),
            "dr_grpo": num_rows * max_new_tokens,
        }[loss_type]
        for logprob, old_logprob in zip(row, old_row, strict=True):
            ratio = (logprob - old_logprob).exp()
            clipped_ratio = min(max(ratio, 0.8), 1.28)
            loss -= min(ratio * advantage, clipped_ratio * advantage) / divisor
            num_clipped += bool(clipped_ratio * advantage < ratio * advantage)
    return loss, num_clipped


def reference_update(model, groups, loss_type: str, num_steps: int):
    """Do gradient descent on `reference_loss` over all groups, informative or not.

    Return (new weights, loss of the first step, number of clipped tokens in all steps).
    """
    advantages = []
    for group in groups:
        mean = statistics.mean(group.rewards)
        std = statistics.stdev(group.rewards)
        advantages += [(reward - mean) / (std + 1e-4) for reward in group.rewards]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    old_logprobs = None
    losses = []
    num_clipped = 0
    for _ in range(num_steps):
        logprobs = []
        for group in groups:
            for ids in group.completions:
                logprobs.append(reference_logprobs(model, group.prompt, ids, 0.7))
        if old_logprobs is None:
            old_logprobs = [row.detach() for row in logprobs]

        loss, clipped = reference_loss(logprobs, old_logprobs, advantages, loss_type, 9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        num_clipped += clipped
    return flat_weights(model), losses[0], num_clipped


def update_settings(**changes) -> SimpleNamespace:
    """Return the settings that updates and sampling read, under their names in Config."""
    settings = {
        "LOSS_TYPE": "dapo", "MAX_NEW_TOKENS": 9, "TEMPERATURE": 0.7, "CLIP_LOW": 0.2,
        "CLIP_HIGH": 0.28, "NUM_ITERATIONS": 1, "DTYPE": "float32",
    }  # fmt: skip
    return SimpleNamespace(**settings | changes)


def small_codec(eos_ids=frozenset(), pad_id=0) -> grpo.Codec:
    """Return a Codec without a tokenizer. Only its EOS ids and its padding id are used."""
    names = ("num_shots", "positions", "max_prompt", "max_completion", "vocabulary")
    sizes = dict.fromkeys(names, 0)
    return grpo.Codec(None, set(eos_ids), None, **sizes, pad_id=pad_id, dtype=torch.float32)


def our_update(model, groups, lr=0.5, pad_id=0, at_once=99, **changes):
    """Run `update_policy` with SGD, whose step is proportional to the gradient.

    Return the new weights and the metrics.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = update_settings(**changes)
    limit = grpo.Limit(at_once, "the update")
    codec = small_codec(pad_id=pad_id)
    metrics = grpo.update_policy(model, optimizer, groups, config, codec, limit)
    return flat_weights(model), metrics


def our_generate(model, prompts, num_generations, config, seed, eos_ids, pad_id=0, at_once=99):
    """Run `sample_in_batches` with a model that has no tokenizer."""
    limit = grpo.Limit(at_once, "generation")
    codec = small_codec(eos_ids, pad_id)
    return grpo.sample_in_batches(model, codec, prompts, num_generations, config, seed, limit)


def test_L1_advantages_equal_the_reference_values_and_are_zero_if_all_rewards_are_equal():
    a = 0.86587543
    assert grpo.group_advantages([1, 0, 0, 1]) == pytest.approx([a, -a, -a, a], abs=1e-8)

    advantages = grpo.group_advantages([1, 0, 0, 0, 0, 0, 0, 0])
    assert advantages == pytest.approx([2.4741739] + [-0.3534534] * 7, abs=1e-7)

    for rewards in ([0.0], [0.0] * 4, [1.0] * 3, [0.1 + 0.2, 0.3, 0.3]):
        assert grpo.group_advantages(rewards) == [0.0] * len(rewards)
        assert not Group([1], [[1]] * len(rewards), rewards).is_informative


@pytest.mark.parametrize(
    "loss_type, expected_loss, expected_gradient, expected_on_policy_loss",
    [
        ("grpo", 0.1523116717, 0.7102527295, 0.1875),
        ("dapo", -0.2313029286, 0.5908817714, -0.2307692308),
        ("dr_grpo", -0.0939668147, 0.2400457196, -0.09375),
    ],
)
def test_L1_loss_and_gradient_equal_the_reference_values(
    loss_type, expected_loss, expected_gradient, expected_on_policy_loss
):
    # Use arbitrary log-probabilities for four completions of one to five tokens.
    row = torch.arange(4).double().unsqueeze(1)
    column = torch.arange(5).double()
    logprobs = (-0.5 - 0.1 * row - 0.05 * column).requires_grad_()
    old_logprobs = logprobs.detach() + 0.15 * ((row + 2 * column) % 5 - 2)
    lengths = torch.tensor([5, 3, 4, 1])
    mask = column < lengths.unsqueeze(1)
    advantages = torch.tensor([1, -0.5, 0.25, -1.5]).double()
    weights = grpo.loss_weights(lengths, loss_type, 8)

    loss, _ = grpo.grpo_loss(logprobs, old_logprobs, advantages, mask, weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_close(loss.item(), expected_loss, 1e-9, 0)
    assert_close(gradient.abs().sum().item(), expected_gradient, 1e-9, 0)

    # On policy, the ratio is 1, so the gradient equals REINFORCE's and no token is clipped.
    loss, num_clipped = grpo.grpo_loss(logprobs, logprobs.detach(), advantages, mask, weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_close(loss.item(), expected_on_policy_loss, 1e-9, 0)
    assert_close(gradient, -(advantages * weights).unsqueeze(1) * mask, 1e-9, 0)
    assert num_clipped == 0


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("at_once, num_steps", [(1, 1), (3, 1), (7, 1), (99, 1), (3, 3)])
def test_L1_the_update_equals_the_reference_for_any_micro_batch_size(
    loss_type, at_once, num_steps, monkeypatch
):
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 1e9)  # gradient clipping would hide a wrong scale
    # The groups have different sizes, and two of them are uninformative. A limit of 3 completions
    # at once splits the larger groups.
    groups = ragged_groups((4, 2, 7, 3, 5), uninformative=(0, 3))
    expected, loss, num_clipped = reference_update(small_gpt2(), groups, loss_type, num_steps)

    weights, metrics = our_update(
        small_gpt2(),
        groups,
        at_once=at_once,
        LOSS_TYPE=loss_type,
        NUM_ITERATIONS=num_steps,
    )
    assert_close(weights, expected, 1e-4, 1e-3)
    assert_close(metrics["loss"], loss)  # both are losses of the first step

    # In the first step, every ratio is 1, so only later steps can clip.
    num_trained = 0
    for group in groups:
        if group.is_informative:
            num_trained += sum(len(ids) for ids in group.completions)
    assert metrics["trained_tokens"] == num_trained
    assert metrics["clip_fraction"] == pytest.approx(num_clipped / num_trained / num_steps)
    assert bool(num_clipped) == (num_steps > 1)


def test_L1_an_uninformative_group_costs_no_forward_pass_but_counts_in_the_dapo_denominator(
    monkeypatch,
):
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 1e9)
    informative = Group([3], [[4, 5], [6]], [1.0, 0.0])  # 3 tokens
    uninformative = Group([20], [[21] * 6, [21] * 3], [1.0, 1.0])  # 9 tokens
    model = small_gpt2()
    start = flat_weights(model)
    seen = set()

    def record_ids(module, args, kwargs):
        seen.update(kwargs["input_ids"].flatten().tolist())

    model.base_model.register_forward_pre_hook(record_ids, with_kwargs=True)
    weights, _ = our_update(model, [informative, uninformative])
    assert seen == {3, 4, 6}, "tokens of the uninformative group passed through the model"

    # The uninformative group's tokens still raise the divisor, from 3 to 12.
    alone, _ = our_update(small_gpt2(), [informative])
    assert_close(weights - start, (alone - start) * 3 / 12)


@pytest.mark.parametrize("num_good_passes", [0, 4, 16])
def test_L8_memory_that_runs_out_halves_the_batch_at_last_to_one_completion(num_good_passes):
    """Memory runs out in the first forward pass, or only after 4 or 16 passes.

    In the last two cases, it runs out in the middle of the first and of the third optimizer step.
    The retry must not add to the gradients of the failed attempt, and it must still use the old
    log-probabilities from the first step.
    """
    config = update_settings()
    expected, metrics = our_update(small_gpt2(), ragged_groups(), NUM_ITERATIONS=3)
    completions = our_generate(small_gpt2(), [[3, 4], [5]], 4, config, 5, {2})

    def model_that_runs_out(largest_batch):
        model = small_gpt2()
        passes = itertools.count()

        def run_out(module, args, kwargs):
            if next(passes) >= num_good_passes and len(kwargs["input_ids"]) > largest_batch:
                raise torch.OutOfMemoryError("out of memory")

        model.base_model.register_forward_pre_hook(run_out, with_kwargs=True)
        return model

    model = model_that_runs_out(1)
    assert our_generate(model, [[3, 4], [5]], 4, config, 5, {2}, at_once=3) == completions
    model = model_that_runs_out(1)
    weights, in_parts = our_update(model, ragged_groups(), at_once=5, NUM_ITERATIONS=3)
    assert_close(weights, expected)
    for name in ("loss", "clip_fraction", "grad_norm", "trained_tokens", "logp_own"):
        assert in_parts[name] == pytest.approx(metrics[name], rel=1e-3), name
    with pytest.raises(grpo.ModelError, match="one completion"):
        our_update(model_that_runs_out(0), ragged_groups(), at_once=1, NUM_ITERATIONS=3)


@pytest.mark.parametrize("temperature, pad_id", [(1.0, 0), (0.7, 20)])
def test_L1_log_probabilities_are_the_models_own_and_none_is_read_at_a_padding_position(
    temperature, pad_id
):
    """Shorter prompts in a batch are padded. If the padding came after the prompt, a completion's
    first token would be scored from a padding position."""
    model = small_gpt2()
    groups = ragged_groups()
    expected = []
    for group in groups:
        for ids in group.completions:
            expected.append(reference_logprobs(model, group.prompt, ids, temperature))

    logprobs, mask = grpo.completion_logprobs(model, groups, temperature, pad_id)
    assert_close(logprobs, pad_sequence(expected, batch_first=True))
    assert mask.sum(1).tolist() == [len(row) for row in expected]


@pytest.mark.parametrize("pad_id", [0, 2])
def test_L2_the_eos_is_in_the_mask_and_learned_even_when_it_is_the_pad_token(pad_id):
    """If the EOS were masked out like padding, the model would never learn to stop."""
    model = small_gpt2()
    eos_id = 2
    group = Group([3, 4], [[9, eos_id], [9, 8, 7]], [1.0, 0.0])

    before, mask = grpo.completion_logprobs(model, [group], pad_id=pad_id)
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert before[0, 1] < 0, "the EOS is not scored"
    assert before[0, 2] == 0, "padding is scored"

    # The completion with the EOS was rewarded, so the EOS becomes more likely.
    our_update(model, [group], lr=0.1, pad_id=pad_id)
    assert reference_logprobs(model, [3, 4], [9, eos_id])[1] > before[0, 1]


def test_L1_log_softmax_of_bfloat16_logits_is_computed_in_float32():
    model = small_gpt2().bfloat16()
    targets = torch.arange(23, device=DEVICE)
    hidden = torch.randn(23, 16, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)

    logits = model.lm_head(hidden).float()
    expected = torch.log_softmax(logits / 0.7, -1)[targets, targets]
    assert_close(grpo.token_logprobs(model, hidden, targets, 0.7), expected, 1e-6)


def test_L1_dropout_and_recomputation_are_off_even_if_the_model_was_left_in_train_mode():
    left_in_train_mode = small_gpt2(dropout=0.5)
    # Recomputation disables the KV cache. Newer versions of transformers have renamed the method.
    recompute = getattr(left_in_train_mode, "activation_checkpointing_enable", None)
    (recompute or left_in_train_mode.gradient_checkpointing_enable)()
    clean = small_gpt2()

    draws = []
    config = update_settings(MAX_NEW_TOKENS=10, TEMPERATURE=1.0)
    for model in (left_in_train_mode.train(), clean):
        draws.append(our_generate(model, [[3, 4], [5]], 4, config, 5, {2}))
    assert draws[0] == draws[1]

    weights, _ = our_update(left_in_train_mode.train(), ragged_groups())
    expected, _ = our_update(clean, ragged_groups())
    if DEVICE == "cpu":
        assert_close(weights, expected, 0, 0)
    assert_close(weights, expected)  # a GPU adds numbers in a different order each time


def test_L2_sampling_uses_the_distribution_that_is_scored_the_full_softmax_at_the_temperature():
    model = small_gpt2()
    num_draws = 20_000
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    # Compute each token's log-probability as the loss does.
    targets = torch.arange(23, device=DEVICE)
    logprobs = grpo.token_logprobs(model, hidden.expand(23, -1), targets, 0.7)

    # With evenly spaced random numbers, each frequency is exact to within one draw, so this detects
    # top-k or top-p sampling.
    uniforms = (torch.arange(num_draws, device=DEVICE) + 0.5) / num_draws
    logits = grpo.scaled_logits(model, hidden, 0.7).expand(num_draws, -1)
    tokens = grpo.sample_tokens(logits, uniforms)
    frequencies = tokens.bincount(minlength=23) / num_draws
    assert_close(frequencies, logprobs.exp(), 1.5 / num_draws, 0)


@pytest.mark.parametrize("at_once", [99, 9, 3, 1])
def test_L2_generate_equals_a_token_by_token_loop_with_the_same_random_numbers(at_once):
    model = small_gpt2()
    eos_ids = {2, 7, 11}
    max_tokens = 10
    prompts = [group.prompt for group in ragged_groups((2,) * 5)]

    # Sample four completions of each prompt, one after another, without a KV cache.
    uniforms = torch.rand(max_tokens, 20, generator=torch.Generator().manual_seed(5))
    expected = []
    for row in range(20):
        completion = []
        while len(completion) < max_tokens and not eos_ids & set(completion):
            with torch.no_grad():
                ids = torch.tensor([prompts[row // 4] + completion], device=DEVICE)
                logits = model(ids).logits[0, -1].cpu()
            cumulative = torch.softmax(logits / 0.7, -1).cumsum(0)
            is_passed = cumulative <= uniforms[len(completion), row]
            completion.append(int(is_passed.sum()))
        expected.append(completion)

    config = update_settings(MAX_NEW_TOKENS=max_tokens)
    ours = our_generate(model, prompts, 4, config, 5, eos_ids, at_once=at_once)
    assert ours == [expected[i : i + 4] for i in range(0, 20, 4)]

    # Make sure that all hard cases occur: a completion of one token, completions that end with
    # different EOS ids, and a completion that reaches the length limit.
    last_ids = {completion[-1] for completion in expected}
    assert min(len(completion) for completion in expected) == 1
    assert len(last_ids & eos_ids) > 1
    assert last_ids - eos_ids


def test_U12_the_page_in_the_readme_and_the_program_compute_the_same(monkeypatch):
    # Define the page's functions, without running the loop that follows them.
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    code = text.split("<!-- page -->\n```python\n")[1].split("\ntokenizer = ")[0]
    page = ModuleType("page")
    exec(code, vars(page))

    # Compare advantages and log-probabilities in float64, on the CPU like the page. One group is
    # uninformative.
    model, twin = small_gpt2().cpu().double(), small_gpt2().cpu().double()
    groups = ragged_groups(uninformative=(2,))
    on_page = [(g.prompt, g.completions, torch.tensor(g.rewards).double()) for g in groups]
    exact = {"atol": 1e-9, "rtol": 1e-9}
    for group, (_, _, rewards) in zip(groups, on_page, strict=True):
        ours = torch.tensor(grpo.group_advantages(group.rewards), dtype=torch.float64)
        assert_close(ours, page.group_advantages(rewards), **exact)
        logprobs, mask = grpo.completion_logprobs(model, [group])
        theirs = [page.completion_logprobs(model, group.prompt, ids) for ids in group.completions]
        assert_close(logprobs[mask], torch.cat(theirs), **exact)

    # The page divides by the total number of tokens, like the weights of the default loss.
    lengths = torch.tensor([len(ids) for group in groups for ids in group.completions])
    weights = grpo.loss_weights(lengths, "dapo", 10)
    assert_close(weights, torch.full(weights.shape, 1 / lengths.sum().item()).double(), **exact)

    # Compare the weights after an update with all groups, and after an update with only the
    # uninformative group.
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for part in (slice(None), slice(2, 3)):
        page.update_policy(twin, optimizer, on_page[part])
        ours, _ = our_update(model, groups[part], TEMPERATURE=1.0)
        assert_close(ours, flat_weights(twin), **exact)


# -------- Questions and rewards -------------------------------------------------------------------


def make_config(**environ) -> Config:
    """Return the Config of a process with these environment variables."""
    return read_config({"NODE_ID": "n", **environ})


def test_L3_no_two_nodes_rounds_or_stages_ask_the_same_and_a_resumed_node_repeats_itself():
    nodes = ("n", "n1", "n11")
    purposes = ("question", "external")
    keys = list(itertools.product(nodes, range(40), range(2), purposes, range(4)))
    config = make_config()
    keys = [(node, At(round_, stage), *more) for node, round_, stage, *more in keys]
    seeds = [derive_seed(config, *key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert not any(seed in HELD_OUT_SEEDS for seed in seeds)

    # A seed depends only on these arguments and on SEED, so any process derives the same seed.
    in_another_process = make_config(NODE_ID="another")
    assert seeds == [derive_seed(in_another_process, *key) for key in keys]

    with_another_seed = make_config(SEED=43)
    assert not set(seeds) & {derive_seed(with_another_seed, *key) for key in keys}


@pytest.mark.parametrize("start", [0, HELD_OUT_SEEDS.start])
def test_L3_in_a_mixture_each_tasks_questions_are_distributed_as_the_tasks_own(start, monkeypatch):
    """If the random numbers that choose the task also generated the question, each task would be
    limited to a subset of its questions. For example, nine of ten sums would have two terms."""
    lines = [(str(line), "1") for line in range(4)]
    monkeypatch.setitem(grpo.FILE_TASKS, "file:mine", (lines, lines))

    def kind(question):
        about = question.entry["metadata"]
        # A file has no such metadata, so each of its lines counts as a kind.
        return about.get("num_terms") or about.get("task") or question.text

    # Use eight tasks. The first three have questions of several kinds.
    tasks = ["basic_arithmetic", "calendar_arithmetic", "file:mine"]
    tasks += ["gcd", "lcm", "products", "chain_sum", "count_bits"]
    codec = SimpleNamespace(fits=lambda question: True)
    run = SimpleNamespace(codec=codec, config=SimpleNamespace(tasks=tasks))
    config = make_config()
    seeds = [start + derive_seed(config, "n", At(t), "question") for t in range(2400)]
    questions = sapo.make_questions(run, seeds)
    assert all(question == make_question(question.task, question.seed) for question in questions)
    for task in tasks[:3]:
        in_mixture = [kind(question) for question in questions if question.task == task]
        alone = [kind(make_question(task, seed)) for seed in seeds[:300]]
        assert len(in_mixture) == pytest.approx(300, abs=60)
        assert len(set(alone)) >= 4
        for value in set(alone):
            share = alone.count(value) / len(alone)
            assert in_mixture.count(value) / len(in_mixture) == pytest.approx(share, abs=0.1)


def test_L3_garbage_earns_nothing_although_the_verifier_alone_pays_a_little_for_nearly_anything():
    total = make_question("chain_sum", 1)
    fraction = make_question("fraction_simplification", 1)
    logic = make_question("propositional_logic", 1)
    right = total.answer
    partial = len(right) / (len("it is ") + len(right))

    for question, text, exact, verifier in [
        (total, f"<answer>{right}.00</answer>", 1, 1),
        (total, right, 0, 0),  # without tags
        (total, f"<answer>it is {right}</answer>", 0, partial),
        (total, f"<answer>{right}</answer> or <answer>x</answer>", 0, 0),  # the last answer counts
        (fraction, "<answer>1/999983</answer>", 0, 0.05),
        (fraction, "<answer>x</answer>", 0, 0.01),
        (logic, "<answer>(P ∨ ¬P)</answer>", 0, 0.25),
    ]:
        assert grpo.compute_reward(question, text, "exact") == exact, text
        assert grpo.compute_reward(question, text, "verifier") == verifier, text


@pytest.mark.parametrize("task", TASK_TABLE)
def test_L3_an_answer_is_never_evaluated_and_no_text_makes_scoring_fail(
    task, tmp_path, monkeypatch
):
    """Some of reasoning-gym's verifiers evaluate the answer. With these, a peer's rollout could
    execute code on this machine."""
    monkeypatch.chdir(tmp_path)
    question = make_question(task, 5)
    payload = '__import__("os").system("touch PWNED")'
    answers = [payload, f"[{payload}]", payload + question.answer]
    answers += ["9" * 4000, "(" * 5000, "1/0", "\ud800"]
    for answer in answers:
        for kind in ("exact", "verifier"):
            reward = grpo.compute_reward(question, f"<answer>{answer}</answer>", kind)
            assert 0 <= reward < 1, answer
    assert os.listdir(tmp_path) == [], "the payload was executed"


# -------- The shared folder -----------------------------------------------------------------------


def group_by_hand(seed, task="small_products", right=1, **changes) -> dict:
    """Return a group as in a rollout file, with four completions. The first `right` are correct.

    The rewards in it are arbitrary, because nodes must not trust them.
    """
    question = make_question(task, seed)
    texts = [f"<answer>{question.answer}</answer>"] * right + ["<answer>no</answer>"] * (4 - right)
    completions = []
    for i, text in enumerate(texts):
        completions.append({"response": text, "reward": i % 2, "finished": True})
    group = {"task": task, "seed": seed, "prompt": question.text, "answer": question.answer}
    return group | {"completions": completions} | changes


def new_store(folder, owner="n1") -> DriveStore:
    """Create the experiment x and the folders of its node `owner`. Return the store."""
    store = DriveStore(folder, "x", [owner])
    store.begin({"layout": drive_store.LAYOUT, "maker": owner})
    for name in ("", *drive_store.NODE_DIRS):
        store.make_dir(f"nodes/{owner}/{name}")
    return store


def put(store, path, content=b"{}") -> Path:
    """Write a file into the experiment, as an untrusted peer could. Return its full path."""
    path = store.dir / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def contents(folder) -> dict:
    """Return {path: bytes} of all files below a folder."""
    files = {}
    for path in Path(folder).rglob("*"):
        if path.is_file():
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def dies_before_file_call(nth: int, work, *args) -> bool:
    """Call work(*args) in a forked child process that dies just before its nth file-system call.

    Return False if the work was finished before that.
    """
    child = os.fork()
    if child != 0:
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert exit_code in (0, 9), "the work itself failed"
        return exit_code == 9

    calls = itertools.count(1)

    def profile(frame, event, function):
        # Count functions of os, open(), and methods of open files.
        if event == "c_call" and function.__name__ != "fspath":
            module = function.__module__ or type(function.__self__).__module__
            if module in ("posix", "_io") and next(calls) == nth:
                os._exit(9)

    exit_code = 1
    sys.setprofile(profile)
    try:
        work(*args)
        exit_code = 0
    finally:
        os._exit(exit_code)


@pytest.mark.parametrize("old", [None, b'{"torn'])
def test_F1_a_crash_leaves_a_whole_file_or_none_and_what_is_published_never_changes(tmp_path, old):
    path = stage_file("rewards", "n1", At(0))
    marker = "board/rewards.n1.000000.0"

    # Crash before the first file-system call, then before the second, and so on, until the reward
    # is published without a crash.
    nth = 0
    died = True
    while died:
        nth += 1
        store = new_store(tmp_path / str(nth))
        if old is not None:
            put(store, path, old)
        died = dies_before_file_call(nth, store.publish, "rewards", "n1", At(0), {"reward": 0.25})
        left = contents(store.dir)
        is_published = left.get(path, old) != old
        assert not is_published or json.loads(left[path])["reward"] == 0.25
        assert is_published or marker not in left, "there is a marker without its file"

        # Restart the process with a different reward. A reward that is already published must stay.
        store = new_store(tmp_path / str(nth))
        store.publish("rewards", "n1", At(0), {"reward": 0.75})
        store.remove_leftovers()
        now = contents(store.dir)
        assert now.keys() == {"config.json", path, marker}
        assert store.read_reward("n1", At(0))["reward"] == (0.25 if is_published else 0.75)
        assert not is_published or now[path] == left[path]
    assert nth > 4, "no crash happened in the middle"


def test_F1_the_board_is_read_from_names_and_copies_and_strays_are_no_names(tmp_path):
    store = new_store(tmp_path)
    swarm = Swarm(store, 300)
    swarm.join({})
    session = swarm.session
    store.move_marker("open", "n1", At(2))
    store.move_marker("rewards", "n1", At(1))
    store.move_marker("rewards", "n1", At(2))

    # Sync clients and interrupted copies leave files with such names in a folder.
    for marker in ("rewards.n1.000007.0", "open.n1.000007.0", f"session.n2.{session}"):
        for stray in (f"{marker} (1)", f".{marker}", f"{marker}.tmp"):
            put(store, f"board/{stray}")
    board = store.read_board()
    assert board.open_round == 2
    assert board.sessions == {"n1": session}
    assert board.progress == {("open", "n1"): (2, 0), ("rewards", "n1"): (2, 0)}
    assert board.reached("rewards", At(2)) == ["n1"]
    assert board.reached("rewards", At(3)) == []


@pytest.mark.parametrize("has_links", [True, False])
def test_L6_of_two_warm_starts_that_are_made_at_once_one_counts(tmp_path, monkeypatch, has_links):
    """All nodes must load the same warm start, so the first upload counts."""

    # Some file systems, such as FAT, do not support hard links.
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    store = new_store(tmp_path)
    store.sleep = lambda seconds: None
    for text in ("first", "second"):
        local = tmp_path / text
        local.write_text(text)
        store.upload(local, "/warmstart/weights", replaces=False)
    assert contents(tmp_path / "warmstart") == {"weights": b"first"}


def test_S1_who_waits_posts_its_marker_again_in_case_it_was_lost_on_its_way(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    swarm = Swarm(store, 300)
    swarm.join({})
    store.move_marker("rewards", "n1", At(0))
    marker = store.dir / "board/rewards.n1.000000.0"
    marker.unlink()

    # The marker is posted again once the board has not changed for 75 s (stale_after / 4).
    signals = SimpleNamespace(requested=0)
    started = time.monotonic()
    for seconds, is_there in ((0, False), (60, False), (120, True)):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: started + 1 + seconds)
        swarm.check_in(signals)
        assert marker.exists() == is_there, seconds


def test_F2_a_node_waits_for_the_folder_says_so_once_and_keeps_the_order(tmp_path):
    store = new_store(tmp_path)
    away = tmp_path / "away"
    events = []
    now = 0.0

    def sleep(seconds):
        # The folder is unavailable for 20 s of simulated time, which advances only during sleeps.
        # If the store created the folder again in the meantime, this rename would fail.
        nonlocal now
        now += seconds
        if now >= 20 and away.exists():
            away.rename(store.dir)

    store.sleep = sleep
    store.on_event = lambda kind, text: events.append(kind)
    assert store.read("nodes/n1/0.json", 99) is None
    assert events == [], "a missing file is not an outage"

    store.dir.rename(away)
    for i in range(3):
        store.append("nodes/n1/logs/order", f"{i}\n")
        store.write(f"nodes/n1/{i}.json", b"{}")
    assert 20 <= now <= 25.5, "a pause was longer than 5 s"
    assert (store.dir / "nodes/n1/logs/order").read_text().split() == ["0", "1", "2"]
    assert [store.read(f"nodes/n1/{i}.json", 99) for i in range(3)] == [b"{}"] * 3
    assert events == ["outage", "outage over"]


@pytest.mark.parametrize("number", drive_store.HOPELESS, ids=errno.errorcode.get)
def test_F2_what_never_passes_is_a_sentence_for_a_process_that_starts_and_later_an_outage(
    tmp_path, monkeypatch, number
):
    """Errors such as missing permissions do not pass, so they end a process that is starting. Once
    the process has joined, the same errors count as an outage, so that a long run is not lost."""
    store = new_store(tmp_path)
    swarm = Swarm(store, 300)
    events = []
    store.on_event = lambda kind, text: events.append((kind, text))
    replace = os.replace

    def refuse(source, target):
        raise OSError(number, os.strerror(number), str(target))

    def mend(seconds):
        monkeypatch.setattr(os, "replace", replace)

    store.sleep = mend
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreError, match=os.strerror(number)) as refused:
        swarm.join({})
    assert f"GDRIVE_PATH={tmp_path}" in str(refused.value) and events == []

    mend(0)
    swarm.join({})
    monkeypatch.setattr(os, "replace", refuse)
    store.publish("rewards", "n1", At(0), {"reward": 0.5})
    assert [kind for kind, _ in events] == ["outage", "outage over"]
    assert os.strerror(number) in events[0][1]
    assert store.read_reward("n1", At(0))["reward"] == 0.5


def test_F2_a_local_disk_that_is_full_is_named_as_what_it_is(tmp_path, monkeypatch, capsys):
    store = new_store(tmp_path / "drive")
    store.on_event = store.sleep = Mock(side_effect=AssertionError("it waited for the folder"))
    store.write("nodes/n1/x", b"12345")
    with pytest.raises(StoreError, match="TMPDIR.*/dev/full"):
        store.download("nodes/n1/x", Path("/dev/full"), 99)
    monkeypatch.setattr(
        sapo.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext("/none")
    )
    with pytest.raises(StoreError, match="TMPDIR"):
        sapo.write_tensors(store, "nodes/n1/y", {"x": torch.ones(2)}, "")

    # A process checks the free space before it joins.
    monkeypatch.undo()
    monkeypatch.setattr(sapo.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert run_swarm(tmp_path, "full", WARM_START_STEPS=0, NODE_ID="n") == 2
    assert re.search("TMPDIR=.* a checkpoint needs .* GB", capsys.readouterr().out)
    assert not list(tmp_path.glob("experiments/full/nodes/*"))


def test_F6_the_first_config_counts_and_one_that_is_damaged_or_older_is_an_error(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(drive_store, "BEGIN_TIMEOUT_SECONDS", 0)
    for seed in (1, 2):
        settings = {"layout": drive_store.LAYOUT, "maker": "n1", "SEED": seed}
        assert DriveStore(tmp_path, "x").begin(settings)["SEED"] == 1

    # A folder with a damaged config.json or from an older version is rejected and left unchanged.
    for name, path, content in [
        ("damaged", "config.json", b'{"SEED": '),
        ("older", "config.json", {"layout": 4}),
        ("oldest", "rollouts/round_5/n1.json", {}),
    ]:
        store = DriveStore(tmp_path, name)
        put(store, path, content)
        before = contents(store.dir)
        with pytest.raises(StoreError, match="EXPERIMENT_NAME"):
            store.begin(settings)
        assert contents(store.dir) == before


@pytest.mark.parametrize("planted", ["link", "fifo"])
def test_X2_what_a_stranger_planted_is_never_followed_and_never_written_through(tmp_path, planted):
    # This file is outside all experiments and must not change.
    thesis = tmp_path / "home/round_000000.stage_0.json"
    thesis.parent.mkdir()
    thesis.write_bytes(b'{"thesis": 1}')

    path = stage_file("rollouts", "n1", At(0))
    for operation, *args in [
        ("read", path, 99),
        ("write", path, b"{}"),
        ("delete", path, True),
        ("prune_rollouts", "n1", 9, False),
    ]:
        # Plant a link or a FIFO in place of the file.
        store = new_store(tmp_path / operation)
        full = store.dir / path
        if planted == "link":
            full.symlink_to(thesis)
        else:
            os.mkfifo(full)

        # Writing must replace the link or FIFO itself, and deleting must remove it.
        result = None
        with contextlib.suppress(InvalidFileError):
            result = getattr(store, operation)(*args)
        assert contents(thesis.parent) == {thesis.name: b'{"thesis": 1}'}, operation
        assert not result or operation == "write", "the planted file was read"
        if operation == "write":
            assert full.read_bytes() == b"{}"
        if operation in ("delete", "prune_rollouts"):
            assert not os.path.lexists(full)


def test_X3_a_strangers_broken_file_is_rejected_with_a_reason_and_costs_no_time(tmp_path):
    good = {"format": 1, "peer_id": "p", "round": 1, "stage": 0}
    good["rollouts"] = {"0": group_by_hand(1)}
    broken = [
        (b"", "empty"), (b"[]", "object"), (b'{"torn', "JSON"), (b'{"a": NaN}', "JSON"),
        (b'{"a": "\\ud800"}', "JSON"), (b'{"a":' * 99_999, "JSON"), (b" " * 9_000_000, "larger"),
        (good | {"peer_id": "q"}, "path"), (good | {"round": 2}, "path"),
        (good | {"rollouts": []}, "type"),
    ]  # fmt: skip
    for name, value, reason in [
        ("task", 1, "type"), ("seed", 2**53, "range"), ("completions", [], "range"),
    ]:  # fmt: skip
        broken.append((good | {"rollouts": {"0": group_by_hand(1) | {name: value}}}, reason))

    store = new_store(tmp_path)
    started = time.monotonic()
    for content, reason in broken:
        put(store, stage_file("rollouts", "p", At(1)), content)
        with pytest.raises(InvalidFileError, match=reason):
            store.fetch("rollouts", "p", At(1))
    assert time.monotonic() - started < 2

    # Unknown keys, which a newer program may add, do no harm.
    put(store, stage_file("rollouts", "p", At(1)), good | {"new": 1})
    assert [group["key"] for group in store.fetch("rollouts", "p", At(1))] == [(1, 0, "p", 0)]


# -------- Settings --------------------------------------------------------------------------------

# Settings with checks of their own, as (valid value, invalid value, part of the error message).
CHECKED = {
    "TASKS": ("gcd,bf", "gdc", "did you mean gcd?"),
    "EXPERIMENT_NAME": ("e-1", "a/b", "letters"),
    "NODE_ID": ("n.1", "../n", "letters"),
    "DEVICE": ("cpu", "gpu", "this machine has"),
    "GDRIVE_PATH": ("here", "/no/such/folder", "parent directory"),
}


def config_error(**environ) -> str:
    """Return the message of the ConfigError that these environment variables raise."""
    with pytest.raises(ConfigError) as caught:
        read_config(environ)
    return str(caught.value)


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_U1_a_bad_value_is_refused_with_its_name_the_value_and_what_is_allowed(row):
    # Collect valid values as {text: value}, invalid values, and a part of the error message.
    allowed = row.metadata["allowed"]
    good = {"some-name": "some-name"}
    bad = []
    hint = ""
    if row.type is bool:  # bool("False") is True
        good = {"False": False, "0": False, " yes ": True, "TRUE": True}
        bad = ["maybe", "2"]
        hint = "True or False"
    elif row.type in (int, float):
        low, high = allowed
        good = {text: row.type(text) for text in (str(max(1, low)), str(high))}
        bad = ["many", "nan", str(low - 1), str(high + 1)]
        hint = "expected"
    elif allowed:
        good = {word: word for word in allowed}
        bad = ["no such"]
        hint = allowed[-1]
    elif row.name in CHECKED:
        text, wrong, hint = CHECKED[row.name]
        good = {text: text}
        bad = [wrong]

    for text, value in good.items():
        found = getattr(make_config(**{row.name: text}), row.name)
        assert found == value
        assert type(found) is row.type
    for text in bad:
        message = config_error(**{row.name: text})
        for part in (row.name, text, hint):
            assert part in message, message


def test_U1_all_mistakes_are_reported_together_and_a_blank_value_counts_as_unset():
    wrong_values = {"SEED": "x", "TEST_MODE": "maybe", "LOSS_TYPE": "ppo", "NODE_ID": "../x"}
    message = config_error(**wrong_values)
    for name, value in wrong_values.items():
        assert name in message
        assert value in message

    blank = {name: " " for name in TABLE if name != "NODE_ID"}
    assert make_config(**blank) == make_config()


def test_U1_all_refused_tasks_are_named():
    message = config_error(TASKS="small_gdc, gcd, countdown")
    assert "'small_gdc' is not a supported task; did you mean small_gcd?" in message
    assert "'countdown' is not a supported task" in message and "'gcd' is" not in message


def test_U1_a_misspelled_setting_is_an_error_and_other_programs_variables_are_not():
    # A name without its last letter is a near miss, unless it is short or an ordinary word.
    names = TABLE.keys() - {"SEED", "SEEDS", "TASKS", "CONFIGS"}
    near_misses = {name[:-1]: name for name in names}
    near_misses |= {"LEARING_RATE": "LEARNING_RATE", "MAX_RUONDS": "MAX_ROUNDS", "seed": "SEED"}
    message = config_error(**dict.fromkeys(near_misses, "4"), LOSS_TYPE="ppo")
    assert "LOSS_TYPE='ppo'" in message, "all errors are reported together"
    for wrong, right in near_misses.items():
        text = f"{wrong} is not a setting of this program; did you mean {right}?"
        assert text in message and text in config_error(**{wrong: "4"})

    # Names of other programs' settings are pointed out, and all other variables are ignored.
    foreign = {"LR": "LEARNING_RATE", "MODEL": "MODEL_NAME", "STEPS": "MAX_ROUNDS", "TASK": "TASKS"}
    others = "PATH HF_TOKEN HF_HOME NODE NODE_NAME NODE_RANK NODE_OPTIONS MAX_STEPS MODEL_ID"
    others += " LOG_DIR OMP_NUM_THREADS PYTHONHASHSEED CUDA_VISIBLE_DEVICES SLURM_NODEID COLAB_GPU"
    config = make_config(MODEL_NAME="tiny", **dict.fromkeys([*foreign, *others.split()], "4"))
    for text, (wrong, right) in zip(config.notes, foreign.items(), strict=True):
        assert text == f"{wrong} is not a setting of this program; did you mean {right}?"


def test_U1_archiving_without_cleaning_up_is_said_to_do_nothing():
    note = "ROLLOUT_ARCHIVE_OLD has no effect"
    for cleanup, is_said in (("False", True), ("True", False)):
        environ = {"ROLLOUT_ARCHIVE_OLD": "True", "ROLLOUT_CLEANUP_ENABLED": cleanup}
        assert any(note in text for text in read_config(environ).notes) == is_said


def test_F6_a_joining_node_inherits_the_swarms_settings_and_may_not_change_the_experiments():
    began = {"MODEL_NAME": "tiny", "SEED": 7, "NUM_TRAIN_SAMPLES": 4, "LEARNING_RATE": 1e-3}
    saved = sapo.saved_settings(make_config(**began, EVAL_INTERVAL=5))
    joining = read_config({"NODE_ID": "late", "NUM_GENERATIONS": "16"}, saved)
    assert joining.NUM_GENERATIONS == 16, "a setting that the node sets has priority"
    for name, value in began.items():
        assert getattr(joining, name) == value
    assert joining.EVAL_INTERVAL == 0, "settings with scope 'node' are not inherited"
    inherited = "SEED=7 NUM_TRAIN_SAMPLES=4 LEARNING_RATE=0.001"
    assert joining.notes == [f"inherited from the experiment: {inherited}"]

    # Settings with scope "model" are inherited only if MODEL_NAME is the same.
    other = read_config({"MODEL_NAME": "gpt2"}, saved | {"TASKS": "gcd"})
    assert (other.SEED, other.TASKS, other.LEARNING_RATE) == (7, "gcd", 3e-6)

    # A generated NODE_ID is kept when the settings are read again.
    config = read_config({})
    assert read_config(config.environ, saved).NODE_ID == config.NODE_ID != read_config({}).NODE_ID

    for name, value in (
        ("SEED", "8"),
        ("TASKS", "gcd"),
        ("REWARD", "verifier"),
        ("MAX_STAGES", "2"),
    ):
        with pytest.raises(ConfigError, match=f"{name}=.* the experiment uses"):
            read_config({name: value}, saved)
    with pytest.raises(ConfigError, match=r"SEED='x' \(in config.json\)"):
        read_config({}, saved | {"SEED": "x"})


def test_U6_test_mode_names_what_a_run_lacks(tmp_path):
    (tmp_path / "experiments/default/model").mkdir(parents=True)
    (tmp_path / "experiments/default/model/config.json").touch()

    def check(rows, folder="model", num_workers=2) -> tuple[int, str]:
        said = []
        run = SimpleNamespace(
            config=make_config(TEST_MODE=True, MAX_ROUNDS=2, NUM_WORKERS=2),
            store=DriveStore(tmp_path, "default"),
            swarm=SimpleNamespace(board=drive_store.Board(sessions={"n": "", "m": ""})),
            log=SimpleNamespace(event=lambda kind, text: said.append(text)),
        )
        while len(run.swarm.board.workers) > num_workers:
            run.swarm.board.sessions.popitem()
        return coordinator.check_test_run(run, rows, ["n"], [folder]), said[0]

    good = {"node_id": "n", "reward": 0.5, "informative_groups": 1, "external_groups": 1}
    rows = [good | {"round": 0}, good | {"round": 1}]
    assert check(rows) == (0, "passed")
    assert check(rows[1:]) == (0, "passed"), "a node that joined late must pass"

    flat = [row | {"informative_groups": 0} for row in rows]
    alone = [row | {"external_groups": 0} for row in rows]
    for arguments, problem in [
        (([],), r"n has rewards only in rounds \[\]"),
        ((rows[:1],), r"n has rewards only in rounds \[0\]"),
        ((rows, "checkpoints"), "checkpoints is empty"),
        ((flat,), "no group gave a gradient"),
        ((alone,), "no external group"),
        ((alone, "model", 1), "^only 1 of 2 workers joined$"),
    ]:
        status, said = check(*arguments)
        assert status == 1 and re.search(problem, said), said


def test_U3_a_policy_that_is_worse_than_before_training_is_told_so_and_noise_is_not():
    def rows_of(rewards, node="n", start=0) -> list[dict]:
        rows = [{"node_id": node, "round": start + t, "reward": r} for t, r in enumerate(rewards)]
        return [row | {"informative_groups": 1} for row in rows]

    def verdict(rewards, **more) -> str:
        return coordinator.diagnose(rows_of(rewards), **more)

    # The policy collapses in the first rounds. Comparing only the first 20 rounds (mean 0.03) with
    # the last 20 (mean 0.10) would suggest that it has learned.
    fallen = [0.4, 0.2, *[0.0] * 30, *[0.1] * 20]
    text = verdict(fallen, checkpoints=[At(39), At(49)])
    assert text.startswith("worse than before training (0.40 -> 0.10): lower LEARNING_RATE")
    assert "the oldest checkpoint left is from round 39" in text
    rows = rows_of(fallen)
    assert coordinator.diagnose(rows[-10:], rows).startswith("worse")

    # A change within the noise of the rounds gives no verdict, and neither does a single round.
    wavy = [0.3, 0.5] * 20
    assert verdict([0.7, *wavy]).startswith("no clear change: mean reward 0.41 -> 0.40")
    assert verdict([0.4]).startswith("no verdict")
    assert verdict([*wavy, *[reward + 0.2 for reward in wavy]]).startswith("learned")


def test_U3_a_changing_swarm_is_judged_by_the_nodes_that_were_there_at_both_ends():
    """Each node is a tuple (name, first round, reward at its start, reward at its end)."""

    def verdict(*nodes) -> str:
        rows = []
        for name, start, before, after in nodes:
            for t in range(start, 60):
                reward = before + (after - before) * (t - start) / (59 - start)
                row = {"node_id": name, "round": t, "reward": reward, "informative_groups": 1}
                rows.append(row)
        return coordinator.diagnose(sorted(rows, key=lambda row: row["round"]))

    # All nodes improve, but four of them join late and weak.
    late = [(name, 30, 0.05, 0.3) for name in "bcde"]
    assert verdict(("a", 0, 0.6, 0.8), *late).startswith("learned: mean reward 0.63 -> 0.77")
    # A node that joins within the first 20 rounds counts, and is compared with its own start.
    assert verdict(("a", 0, 0.6, 0.8), ("b", 10, 0.1, 0.3)).startswith(
        "learned: mean reward 0.38 -> 0.51"
    )
    # Four nodes collapse while four strong nodes join.
    old = [(name, 0, 0.5, 0.1) for name in "abcd"]
    new = [(name, 30, 0.9, 0.9) for name in "efgh"]
    assert verdict(*old, *new).startswith("worse than before training (0.50 -> 0.16)")
    # No node was there at both ends.
    gone = [{"node_id": "a", "round": t, "reward": 0.9} for t in range(20)]
    came = [{"node_id": "b", "round": t, "reward": 0.1} for t in range(20, 60)]
    assert coordinator.diagnose(gone + came).startswith("no verdict")


def test_U3_who_came_and_who_left_is_said_and_who_is_slow_has_not_left():
    """The log reports each node that joins or leaves, because the mean reward then changes."""
    said = []
    log = SimpleNamespace(event=lambda kind, text: said.append(text))
    swarm = SimpleNamespace(is_alive=lambda node: node == "slow", status=lambda node: "stopped")
    run = SimpleNamespace(present=set(), log=log, swarm=swarm)
    for t, nodes in enumerate(
        [("anna", "slow"), ("anna",), ("anna", "carl"), ("carl",), ("carl",)]
    ):
        coordinator.log_changes(run, t, [{"node_id": node} for node in nodes])
    assert said == ["carl joined in round 2, 3 nodes now", "anna has left (stopped), 2 nodes now"]


def test_U3_an_answer_that_is_closed_is_not_cut_off():
    texts = ["<answer>4</answer> and", "<answer>4", "4"]
    question = make_question("small_products", 0)
    group = Group([1], [[1]] * 3, [1.0, 0.0, 0.0], question, texts, [False, False, True])
    assert sapo.generation_metrics([group])["truncated_rate"] == pytest.approx(1 / 3)


def test_U7_a_gain_is_over_equal_seeds_and_unlike_runs_are_never_averaged(tmp_path):
    def experiment(name, reward, **settings) -> coordinator.Experiment:
        rows = [{"node_id": "n", "round": t, "reward": reward, "timestamp": 1} for t in range(20)]
        config = {name: row.default for name, row in TABLE.items()} | settings
        facts = {name: str(value) for name, value in config.items()}
        return coordinator.Experiment(name, config, drive_store.Board(), {}, rows, facts)

    eight = {"NUM_TRAIN_SAMPLES": 8, "NUM_TRANSPLANT_TREES": 0}
    four = {"NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4}
    runs = []
    for seed, ours, alone in [(0, 0.40, 0.20), (1, 0.52, 0.24), (2, 0.44, 0.20)]:
        runs.append(experiment(f"a{seed}", ours, SEED=seed, **four))
        runs.append(experiment(f"b{seed}", alone, SEED=seed, **eight))
    unlike = experiment("unlike", 0.01, SEED=0, LOSS_TYPE="grpo", **four)
    unfiltered = experiment("unfiltered", 0.02, SEED=0, EXTERNAL_FILTER=False, **four)
    rows, notes = coordinator.compare_arms([*runs, unlike, unfiltered])
    found = [(row["I/J"], row["runs"]) for row in rows]
    assert found == [
        ("4/4 LOSS_TYPE=dapo", 3), ("8/0 LOSS_TYPE=dapo", 3),
        ("4/4 unfiltered LOSS_TYPE=dapo", 1), ("4/4 LOSS_TYPE=grpo", 1),
    ]  # fmt: skip
    rewards = [row["reward per node"] for row in rows]
    assert rewards == pytest.approx([27.2 / 3, 12.8 / 3, 0.4, 0.2])
    assert any("differ in LOSS_TYPE" in note for note in notes)

    # Compute the gain and its 95% CI by hand. With three seeds, Student's t is 4.30.
    logs = [math.log(8 / 4), math.log(10.4 / 4.8), math.log(8.8 / 4)]
    center, margin = statistics.mean(logs), 4.30 * statistics.stdev(logs) / 3**0.5
    assert [row["gain"] for row in rows] == pytest.approx([math.expm1(center), None, None, None])
    ends = [math.expm1(center - margin), math.expm1(center + margin)]
    assert rows[0]["interval"] == pytest.approx(ends)

    # Two seeds give no confidence interval and a single seed gives no gain. A note explains this.
    for num_seeds in (1, 2):
        rows, notes = coordinator.compare_arms(runs[: 2 * num_seeds])
        assert rows[0]["interval"] is None
        assert (rows[0]["gain"] is None) == (num_seeds == 1)
        missing = "a gain needs 2" if num_seeds == 1 else "a 95% CI needs 3"
        (note,) = [note for note in notes if f"4/4 has {num_seeds} seed" in note]
        assert note.endswith(f"its baseline 8/0: {missing}")


# -------- Whole swarms in this process, judged by the files that they leave behind ----------------

SMALL = {
    "DEVICE": DEVICE, "DTYPE": "float32",
    "MODEL_NAME": "tiny", "TASKS": "small_products,small_count_bits", "LOCAL_NODES": 2,
    "WARM_START_STEPS": 300, "ANSWER_TAG_SHARE": 0.3, "LEARNING_RATE": 0.0006,
    "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "MAX_ROUNDS": 6,
    "CHECKPOINT_INTERVAL": 2, "FETCH_TIMEOUT_SECONDS": 0.1,
}  # fmt: skip
TASKS = SMALL["TASKS"].split(",")
# Without a warm start, no answer is correct. A node's own groups are then uninformative, and only
# external groups change the weights.
UNTRAINED = {"WARM_START_STEPS": 0}


@pytest.fixture(scope="session")
def drive(tmp_path_factory):
    """Return the shared folder of these swarms. The first swarm creates the others' warm start."""
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="session")
def uninterrupted(drive):
    """Run an experiment without interruption, and return its folder."""
    assert run_swarm(drive, "uninterrupted") == 0
    return drive / "experiments" / "uninterrupted"


def run_swarm(drive, name, program=sapo, **settings) -> int:
    """Run sapo.main with SMALL and these settings. Return its exit code."""
    return program.main({"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name, **SMALL, **settings})


def read_rewards(drive, name, node_id="*") -> list[dict]:
    """Return the reward files of one or all nodes, sorted by round, stage and node."""
    paths = drive.glob(f"experiments/{name}/nodes/{node_id}/rewards/*.json")
    paths = sorted(paths, key=lambda path: (path.name, path.parent.parent.name))
    return [json.loads(path.read_text()) for path in paths]


def read_results(drive, name) -> tuple:
    """Return all rewards and the bytes of the last checkpoint.

    The checkpoint contains the weights, the optimizer state, the total rewards and the keys of the
    external groups used. On a GPU, its last bits differ each time, so its bytes are not returned.
    """
    rewards = []
    for row in read_rewards(drive, name):
        rewards.append((row["round"], row["node_id"], row["reward"]))
    last_checkpoint = max(drive.glob(f"experiments/{name}/nodes/*/checkpoints/*"))
    return rewards, last_checkpoint.read_bytes() if DEVICE == "cpu" else None


def read_log(drive, name, log) -> list[dict]:
    """Return the rows of one of node_0's logs. training_events covers node_0's whole process."""
    path = drive / f"experiments/{name}/nodes/node_0/logs/{log}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_events(drive, name, kind) -> list[str]:
    """Return the texts of all events of one kind."""
    rows = read_log(drive, name, "training_events")
    return [row["text"] for row in rows if row["event"] == kind]


def read_teachers(drive, name) -> list[list[str]]:
    """Return the peers whose groups node_0 trained on, round by round."""
    rows = read_log(drive, name, "metrics")
    return [sorted(peer for peer, _ in row["teachers"]) for row in rows]


def write_peer(drive, name, peer, groups, round_=0) -> None:
    """Publish groups as `peer`, as any program or human can."""
    store = DriveStore(drive, name)
    store.begin({"layout": drive_store.LAYOUT, "maker": peer})
    store.make_dir(f"nodes/{peer}")
    store.make_dir(f"nodes/{peer}/rollouts")
    rollouts = {str(i): group for i, group in enumerate(groups)}
    store.publish("rollouts", peer, At(round_), {"format": 1, "rollouts": rollouts})


def at_call(monkeypatch, step, number, action) -> None:
    """Call `action` just before the `number`th call (from 1) of sapo's function `step`."""
    original = getattr(sapo, step)
    calls = itertools.count(1)

    def replacement(*args, **kwargs):
        if next(calls) == number:
            action()
        return original(*args, **kwargs)

    monkeypatch.setattr(sapo, step, replacement)


def test_L6_a_swarm_learns_far_more_than_chance_explains(drive):
    """Over six seeds, the mean reward rose by 0.21 to 0.28 from the first third of the rounds to
    the last third."""
    larger = {"LOCAL_NODES": 4, "NUM_TRAIN_SAMPLES": 4, "NUM_TRANSPLANT_TREES": 4}
    assert run_swarm(drive, "learns", **larger, NUM_GENERATIONS=8, MAX_ROUNDS=24) == 0
    rewards = [row["reward"] for row in read_rewards(drive, "learns")]
    assert len(rewards) == 4 * 24
    gain = statistics.mean(rewards[-32:]) - statistics.mean(rewards[:32])
    assert gain > 0.12, "this threshold is for tiny as shipped; a smaller model learns less"


def test_L4_external_groups_change_the_weights_even_if_all_own_groups_are_uninformative(drive):
    # Run the same node alone, and with two groups from a peer.
    write_peer(drive, "taught", "human", [group_by_hand(1), group_by_hand(2, TASKS[1])])
    for name in ("alone", "taught"):
        assert run_swarm(drive, name, MAX_ROUNDS=1, **UNTRAINED) == 0
    alone = read_rewards(drive, "alone")[0]
    taught = read_rewards(drive, "taught")[0]

    assert alone["informative_groups"] == alone["grad_norm"] == alone["trained_tokens"] == 0
    assert taught["external_groups"] == taught["informative_groups"] == 2
    assert taught["grad_norm"] > 0

    # A node's reward covers only its own completions.
    assert alone["reward"] == taught["reward"] == 0

    start = flat_weights(grpo.build_tiny_model(TASKS)[0])
    for name, is_changed in (("alone", False), ("taught", True)):
        folder = drive / f"experiments/{name}/nodes/node_0/model"
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(flat_weights(model), start) != is_changed


def test_L4_X4_strangers_are_verified_and_lies_gain_nothing(drive):
    # One peer helps, one lies about rewards and answers, and one floods the folder.
    peers = {
        "human": [group_by_hand(1), group_by_hand(2, TASKS[1], right=3)],
        "liar": [group_by_hand(seed, right=0, answer="no") for seed in range(10, 14)],
        "flood": [group_by_hand(seed) for seed in range(100, 600)],
    }
    # Four other peers each publish a group that must be rejected, listed with a part of the reason.
    rejected = {
        "rewriter": (group_by_hand(20, prompt="What is 1 + 1?"), "prompt"),
        "cheat": (group_by_hand(HELD_OUT_SEEDS.start + 5), "held-out"),
        "foreign": (group_by_hand(30, "small_gcd"), "task"),
        "broken": (group_by_hand(40, prompt=1), "type"),
    }
    for peer, groups in peers.items():
        write_peer(drive, "strangers", peer, groups)
    for peer, (group, _) in rejected.items():
        write_peer(drive, "strangers", peer, [group])

    settings = {"NUM_TRANSPLANT_TREES": 100, "ROLLOUT_MAX_AGE": 3}
    assert run_swarm(drive, "strangers", **settings, **UNTRAINED) == 0

    # In round 0, each peer's fair share is I = 2 groups, and the liar's groups are uninformative.
    # The flood's groups are drawn until they are more than three rounds old. A group is never used
    # twice, so the human's two groups are used only once.
    flood = ["flood"] * 2
    assert read_teachers(drive, "strangers") == [flood + ["human"] * 2, flood, flood, flood, [], []]

    # Each rejection is counted, and its reason is logged.
    first = read_rewards(drive, "strangers", "node_0")[0]
    assert first["reward"] == 0
    assert first["rejected"] == len(rejected)
    reasons = dict(text.split(": ", 1) for text in read_events(drive, "strangers", "reject"))
    assert reasons.keys() == rejected.keys()
    for peer, (_, reason) in rejected.items():
        assert reason in reasons[peer]


def test_L4_of_the_groups_of_one_age_each_is_drawn_equally_often(monkeypatch):
    # Three groups are from this round and six are from the previous round. The spread of their
    # rewards differs, but must not affect which groups are drawn.
    groups = [SimpleNamespace(key=i, rewards=[0.0] * i + [1.0]) for i in range(9)]
    of_age = {0: groups[:3], 1: groups[3:]}
    monkeypatch.setattr(sapo, "wait_for_peers", lambda *_: None)
    monkeypatch.setattr(sapo, "external_metrics", lambda *_: {})
    monkeypatch.setattr(sapo, "external_candidates", lambda run, node, at, age, rng: of_age[age])

    for num_drawn, chances in ((2, [2 / 3] * 3 + [0] * 6), (4, [1] * 3 + [1 / 6] * 6)):
        config = make_config(NUM_TRANSPLANT_TREES=num_drawn, ROLLOUT_MAX_AGE=1)
        counts = dict.fromkeys(range(9), 0)
        for t in range(1, 2001):
            run = SimpleNamespace(config=config)
            node = sapo.Node("n", None, None, metrics={"external_pool": 0})
            for group in sapo.sample_external(run, node, At(t)):
                counts[group.key] += 1
        assert list(counts.values()) == pytest.approx([2000 * p for p in chances], abs=90)


def test_L4_peers_are_drawn_at_random_and_not_in_the_order_of_the_listing(drive):
    for peer in "abcdefghijkl":
        for round_ in range(6):
            group = group_by_hand(1000 * round_ + ord(peer))
            write_peer(drive, "listing", peer, [group], round_)

    settings = {"FETCH_MAX_PEERS": 2, "ROLLOUT_MAX_AGE": 100, "NUM_TRANSPLANT_TREES": 1}
    assert run_swarm(drive, "listing", **settings, **UNTRAINED) == 0
    peers = set().union(*read_teachers(drive, "listing"))
    assert len(peers) > 2
    assert peers - {"a", "b"}


def test_L8_a_process_holds_one_model_for_each_node_and_too_little_memory_is_a_sentence(
    drive, monkeypatch, capfd
):
    def count_models() -> int:
        return sum(type(thing) is GPT2LMHeadModel for thing in gc.get_objects())

    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    gc.collect()
    before = count_models()
    counts = []
    with monkeypatch.context() as patch:
        at_call(patch, "policy_gradient", 1, lambda: counts.append(count_models()))
        assert run_swarm(drive, "models", MAX_ROUNDS=1, **UNTRAINED) == 0
    assert counts == [before + 2]
    assert count_models() == before, "in a notebook, the next run would lack memory"

    monkeypatch.setattr(grpo, "make_optimizer", run_out)
    assert run_swarm(drive, "memory", **UNTRAINED) == 2
    output = "".join(capfd.readouterr())
    assert "does not fit into memory" in output
    assert "Traceback" not in output
    assert count_models() == before


def test_L2_own_groups_are_trained_on_with_the_ids_that_were_sampled(drive, monkeypatch):
    """Decoding and re-encoding could change the ids. "<answer>" is one token, but a model can also
    sample it as eight single characters."""
    tokenizer = grpo.build_tiny_model(TASKS)[1]
    spelled = [*tokenizer.convert_tokens_to_ids([*"<answer>5"]), tokenizer.eos_token_id]
    assert len(tokenizer("<answer>5").input_ids) == 2

    def sample_in_batches(model, codec, prompts, num_generations, *args):
        return [[spelled] * num_generations for _ in prompts]

    update_policy = Mock(wraps=grpo.update_policy)
    monkeypatch.setattr(grpo, "sample_in_batches", sample_in_batches)
    monkeypatch.setattr(grpo, "update_policy", update_policy)
    assert run_swarm(drive, "spelled", MAX_ROUNDS=1, NUM_TRANSPLANT_TREES=0, **UNTRAINED) == 0

    assert update_policy.call_count == 2
    for call in update_policy.call_args_list:
        groups = call.args[2]
        assert [group.completions for group in groups] == [[spelled] * 4] * 2


def test_L5_local_nodes_repeat_bit_for_bit_and_never_ask_a_question_twice(drive, uninterrupted):
    assert run_swarm(drive, "again") == 0
    assert read_results(drive, "again") == read_results(drive, "uninterrupted")
    rewards = {row["reward"] for row in read_rewards(drive, "again")}
    assert len(rewards) > 2, "the rewards hardly differ, so equality proves little"

    seeds = []
    for path in uninterrupted.glob("nodes/*/rollouts/*.json"):
        groups = json.loads(path.read_text())["rollouts"]
        seeds += [group["seed"] for group in groups.values()]
    assert len(seeds) == len(set(seeds)) == 2 * 6 * 2  # nodes x rounds x I


@pytest.mark.parametrize(
    "step", ["publish_groups", "policy_gradient", "submit_reward", "save_checkpoint"]
)
def test_F3_a_killed_run_resumes_as_if_nothing_had_happened(
    drive, uninterrupted, monkeypatch, step
):
    """If the optimizer state, the totals, the used external groups or the position in a random
    stream were lost, the results would differ from the uninterrupted run's."""
    name = f"killed_in_{step}"
    call = 2 if step == "save_checkpoint" else 6

    # SystemExit simulates a kill. `say_failure` raises it again, so that the process cannot write
    # its last heartbeat and log lines.
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sapo, "say_failure", lambda *_: sys.exit())
        at_call(patch, step, call, sys.exit)
        run_swarm(drive, name)
    nodes = drive / "experiments" / name / "nodes"
    published = {path: path.read_bytes() for path in nodes.glob("*/r*/*.json")}

    assert run_swarm(drive, name) == 0
    assert "after round 1" in read_events(drive, name, "resume")[0]
    assert read_results(drive, name) == read_results(drive, "uninterrupted")
    for path, content in published.items():
        assert path.read_bytes() == content, "a published file was changed"


def test_U2_a_stop_finishes_the_round_and_prints_a_command_that_resumes_the_run(
    drive, uninterrupted, monkeypatch, capfd
):
    def press_ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)

    # Press Ctrl-C in the middle of round 3.
    with monkeypatch.context() as patch:
        at_call(patch, "publish_groups", 8, press_ctrl_c)
        assert run_swarm(drive, "stopped") == 130
    assert len(read_rewards(drive, "stopped", "node_1")) == 4

    # The printed command consists of settings and "python sapo.py".
    command = capfd.readouterr().out.split("to resume, run:\n")[1]
    words = shlex.split(command.split("python sapo.py")[0])
    assert sapo.main(dict(word.split("=", 1) for word in words)) == 0
    assert "after round 3" in read_events(drive, "stopped", "resume")[0]
    assert read_results(drive, "stopped") == read_results(drive, "uninterrupted")


def test_U5_U8_readers_change_nothing_and_the_final_model_is_an_ordinary_folder(
    drive, uninterrupted, capfd
):
    before = contents(uninterrupted)
    for role, expected in [("monitor", "round 5 of 6"), ("report", "2/2")]:
        environ = {"GDRIVE_PATH": drive, "EXPERIMENT_NAME": "uninterrupted", "NODE_ROLE": role}
        assert sapo.main(environ) == 0
        assert expected in capfd.readouterr().out, role
    assert contents(uninterrupted) == before

    model = AutoModelForCausalLM.from_pretrained(uninterrupted / "nodes/node_0/model")
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted / "nodes/node_0/model")
    assert len(tokenizer) == model.config.vocab_size


def test_U9_pasted_into_one_cell_the_four_modules_do_the_same(drive, uninterrupted, monkeypatch):
    # A cell is one module without a file. The four modules are pasted into it in this order.
    modules = (drive_store, grpo, coordinator, sapo)
    text = "\n".join(Path(module.__file__).read_text() for module in modules)
    cell = ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", cell)
    exec(compile(text, "cell", "exec"), vars(cell))
    assert cell.Config.__module__ == cell.DriveStore.__module__ == "cell"
    assert run_swarm(drive, "pasted", program=cell) == 0
    assert read_results(drive, "pasted") == read_results(drive, "uninterrupted")

    # A cell has no source file, so its code hash is None.
    codes = []
    for name in ("pasted", "uninterrupted"):
        codes.append(json.loads((drive / f"experiments/{name}/config.json").read_text())["code"])
    assert codes[0] is None and codes[1] == coordinator.hash_code()

    # In a cell, if two modules defined the same name, the later definition would silently win.
    for one, other in itertools.combinations(modules, 2):
        for name in vars(one).keys() & vars(other).keys():
            is_same = vars(one)[name] is vars(other)[name]
            assert is_same or name.startswith("__"), f"{name}: {one.__name__}, {other.__name__}"
