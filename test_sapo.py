"""Proofs of what this program promises. The name of a test begins with the promise that it proves:
L learning, F the folder, X strangers who write into it, U people. .github/MANUAL.md, section "The
promises", lists them.

The order is: mathematics; questions, rewards and tokens; the shared folder; waiting for it;
settings; whole swarms; the shape of the code. Proofs that take longer are in .ci/.
"""

import ast
import itertools
import json
import os
import random
import resource
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import safetensors
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import drive_store
import grpo
import sapo
from drive_store import DriveStore, InvalidFileError, RetryingStore, StoreError, round_file
from grpo import HELD_OUT_SEEDS, TASK_TABLE, Group, make_question
from sapo import Config, ConfigError, derive_seed, read_environment, resolve_config

torch.set_num_threads(1)


# -------- The mathematics -------------------------------------------------------------------------
# The reference_… functions compute the same things slowly: one sequence and one token at a time,
# without a cache and without padding.


def small_gpt2(dropout: float = 0.0):
    """A GPT-2 of 23 tokens with a peaked softmax. Other architectures: .ci/test_numbers.py."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=23,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.3,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config).eval()


def ragged_groups(sizes=(2, 3, 5, 4), uninformative=()) -> list[Group]:
    """Groups of these sizes, with prompts and completions of unequal lengths and rewards of three
    levels. All rewards are 1 in the groups whose indices are in `uninformative`."""
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
    """All weights of a model in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_close(ours, expected, atol=2e-5, rtol=1e-4) -> None:
    torch.testing.assert_close(ours, expected, atol=atol, rtol=rtol)


def reference_logprobs(model, prompt, completion, temperature: float = 1.0):
    """Log-probability of each token of one completion, (T,), from the model's own logits."""
    logits = model(torch.tensor([prompt + completion])).logits
    logits = logits[0, len(prompt) - 1 : -1].float()  # those that predict the completion
    logprobs = torch.log_softmax(logits / temperature, -1)  # (T, V)
    return logprobs[range(len(completion)), completion]


def reference_loss(logprobs, old_logprobs, advantages, loss_type: str, max_new_tokens: int):
    """The definition of the loss, token by token. Returns (loss, number of clipped tokens)."""
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
    """Gradient descent on `reference_loss`, with all groups, informative or not.

    Returns (new weights, loss of the first step, number of clipped tokens in all steps).
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
    """The settings that an update and `generate` read, with the names that they have in Config."""
    settings = {
        "LOSS_TYPE": "dapo",
        "MAX_NEW_TOKENS": 9,
        "TEMPERATURE": 0.7,
        "CLIP_LOW": 0.2,
        "CLIP_HIGH": 0.28,
        "NUM_ITERATIONS": 1,
        "DTYPE": "float32",
    }
    return SimpleNamespace(**settings | changes)


def our_update(model, groups, lr=0.5, pad_id=0, max_rows=2**30, **changes):
    """`update_policy` with SGD. Returns the new weights and the metrics."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = update_settings(**changes)
    metrics = grpo.update_policy(model, optimizer, groups, config, pad_id, max_rows)
    return flat_weights(model), metrics


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
    # Made-up log-probabilities of four completions of at most five tokens.
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

    # On policy the ratio is 1: the gradient is REINFORCE's, and nothing is clipped.
    loss, num_clipped = grpo.grpo_loss(logprobs, logprobs.detach(), advantages, mask, weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_close(loss.item(), expected_on_policy_loss, 1e-9, 0)
    assert_close(gradient, -(advantages * weights).unsqueeze(1) * mask, 1e-9, 0)
    assert num_clipped == 0


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("max_rows, num_steps", [(1, 1), (3, 1), (5, 1), (99, 1), (3, 3)])
def test_L1_the_update_equals_the_reference_for_any_micro_batch_size(
    loss_type, max_rows, num_steps, monkeypatch
):
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 1e9)  # clipping would hide a wrong scale
    # Two of the groups are uninformative, and one is larger than most of the micro-batches.
    groups = ragged_groups((4, 2, 7, 3, 5), uninformative=(0, 3))
    expected, loss, num_clipped = reference_update(small_gpt2(), groups, loss_type, num_steps)

    weights, metrics = our_update(
        small_gpt2(), groups, max_rows=max_rows, LOSS_TYPE=loss_type, NUM_ITERATIONS=num_steps
    )
    assert_close(weights, expected, 1e-4, 1e-3)
    assert_close(metrics["loss"], loss)  # that of the first step

    # Only later steps move away from the policy at the start, so only they clip.
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
    assert seen == {3, 4, 6}, "tokens of the uninformative group pass through the model"

    alone, _ = our_update(small_gpt2(), [informative])
    assert_close(weights - start, (alone - start) * 3 / 12)


@pytest.mark.parametrize("temperature, pad_id", [(1.0, 0), (0.7, 20)])
def test_L1_log_probabilities_are_the_models_own_and_none_is_read_at_a_padding_position(
    temperature, pad_id
):
    model = small_gpt2()
    groups = ragged_groups()
    prompts = []
    completions = []
    for group in groups:
        for ids in group.completions:
            prompts.append(group.prompt)
            completions.append(ids)

    expected = []
    for prompt, ids in zip(prompts, completions, strict=True):
        expected.append(reference_logprobs(model, prompt, ids, temperature))
    expected = pad_sequence(expected, batch_first=True)

    shared, shared_mask = grpo.completion_logprobs_shared_prompt(
        model,
        [(group.prompt, group.completions) for group in groups],
        update_settings(TEMPERATURE=temperature),
        pad_id,
    )
    padded, mask = grpo.completion_logprobs(model, prompts, completions, temperature, pad_id)
    assert_close(shared, expected)
    assert_close(padded, expected)
    assert torch.equal(shared_mask, mask)
    assert mask.sum(1).tolist() == [len(ids) for ids in completions]


@pytest.mark.parametrize("pad_id", [0, 2])
def test_L2_the_eos_is_in_the_mask_and_learned_even_when_it_is_the_pad_token(pad_id):
    model = small_gpt2()
    eos_id = 2
    group = Group([3, 4], [[9, eos_id], [9, 8, 7]], [1.0, 0.0])

    before, mask = grpo.completion_logprobs_shared_prompt(
        model, [(group.prompt, group.completions)], update_settings(TEMPERATURE=1.0), pad_id
    )
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert before[0, 1] < 0, "the EOS is not scored"
    assert before[0, 2] == 0, "padding is scored"

    # The completion that ended was rewarded, so the EOS becomes more likely.
    our_update(model, [group], lr=0.1, pad_id=pad_id)
    assert reference_logprobs(model, [3, 4], [9, eos_id])[1] > before[0, 1]


def test_L1_log_softmax_of_bfloat16_logits_is_computed_in_float32():
    model = small_gpt2().bfloat16()
    targets = torch.arange(23)
    hidden = torch.randn(23, 16, generator=torch.Generator().manual_seed(0)).bfloat16()

    logits = model.lm_head(hidden).float()
    expected = torch.log_softmax(logits / 0.7, -1)[targets, targets]
    assert_close(grpo.token_logprobs(model, hidden, targets, 0.7), expected, 1e-6)


def test_L1_dropout_and_recomputation_are_off_even_if_the_model_was_left_in_train_mode():
    left_in_train_mode = small_gpt2(dropout=0.5)
    left_in_train_mode.gradient_checkpointing_enable()  # would switch the KV cache off, too
    clean = small_gpt2()

    draws = []
    config = update_settings(MAX_NEW_TOKENS=10, TEMPERATURE=1.0)
    for model in (left_in_train_mode.train(), clean):
        draws.append(grpo.generate(model, [[3, 4], [5]], 4, config, 5, {2}))
    assert draws[0] == draws[1]

    weights, _ = our_update(left_in_train_mode.train(), ragged_groups())
    expected, _ = our_update(clean, ragged_groups())
    assert_close(weights, expected, 0, 0)


def test_L2_sampling_uses_the_distribution_that_is_scored_the_full_softmax_at_the_temperature():
    model = small_gpt2()
    num_draws = 20_000
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))

    # The probability of each token as the loss sees it.
    logprobs = grpo.token_logprobs(model, hidden.expand(23, -1), torch.arange(23), 0.7)

    # With evenly spaced random numbers every frequency is exact to one draw. Top-k or top-p would
    # show.
    uniforms = (torch.arange(num_draws) + 0.5) / num_draws
    logits = grpo.lm_head_logits(model, hidden).expand(num_draws, -1)
    tokens = grpo.sample_tokens(logits, uniforms, 0.7)
    frequencies = tokens.bincount(minlength=23) / num_draws
    assert_close(frequencies, logprobs.exp(), 1.5 / num_draws, 0)


@pytest.mark.parametrize("max_rows", [None, 1, 9])
def test_L2_generate_equals_a_token_by_token_loop_with_the_same_random_numbers(max_rows):
    model = small_gpt2()
    eos_ids = {2, 7, 11}
    max_tokens = 10
    prompts = [group.prompt for group in ragged_groups((2,) * 5)]

    # Four completions of each prompt, one after another, without a cache.
    uniforms = torch.rand(max_tokens, 20, generator=torch.Generator().manual_seed(5))
    expected = []
    for row in range(20):
        completion = []
        while len(completion) < max_tokens and not eos_ids & set(completion):
            with torch.no_grad():
                logits = model(torch.tensor([prompts[row // 4] + completion])).logits[0, -1]
            cumulative = torch.softmax(logits / 0.7, -1).cumsum(0)
            is_passed = cumulative <= uniforms[len(completion), row]
            completion.append(int(is_passed.sum()))
        expected.append(completion)

    config = update_settings(MAX_NEW_TOKENS=max_tokens)
    ours = grpo.generate(model, prompts, 4, config, 5, eos_ids, max_rows=max_rows)
    assert ours == [expected[i : i + 4] for i in range(0, 20, 4)]

    # The case is a hard one: completions end at once, late or never, and with several EOS ids.
    last_ids = {completion[-1] for completion in expected}
    assert min(len(completion) for completion in expected) == 1
    assert len(last_ids & eos_ids) > 1
    assert last_ids - eos_ids


# -------- Questions, rewards, tokens --------------------------------------------------------------


def make_config(**environ) -> Config:
    """The Config of a process with these environment variables."""
    environ = {"NODE_ID": "n", **environ}
    env, _ = read_environment({name: str(value) for name, value in environ.items()})
    return resolve_config(env, {}, [])


def test_L3_no_two_nodes_rounds_or_stages_ask_the_same_and_a_resumed_node_repeats_itself():
    keys = list(
        itertools.product(
            ("n", "n1", "n11"), range(40), range(2), ("question", "external"), range(4)
        )
    )
    config = make_config()
    seeds = [derive_seed(config, *key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert not any(seed in HELD_OUT_SEEDS for seed in seeds)

    # There is no hidden state: equal arguments give equal seeds, in every process.
    in_another_process = make_config(NODE_ID="another")
    assert seeds == [derive_seed(in_another_process, *key) for key in keys]

    with_another_seed = make_config(SEED=43)
    assert not set(seeds) & {derive_seed(with_another_seed, *key) for key in keys}


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
        (total, f"<answer>{right}</answer> or <answer>x</answer>", 0, 0),  # the last one counts
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
    monkeypatch.chdir(tmp_path)
    question = make_question(task, 5)
    payload = '__import__("os").system("touch PWNED")'
    answers = [
        payload,
        f"[{payload}]",
        payload + question.answer,
        "9" * 4000,
        "(" * 5000,
        "1/0",
        "\ud800",
    ]
    for answer in answers:
        for kind in ("exact", "verifier"):
            reward = grpo.compute_reward(question, f"<answer>{answer}</answer>", kind)
            assert 0 <= reward < 1, answer

    assert grpo.compute_reward(question, "<answer>" * 16_000) == 0
    assert os.listdir(tmp_path) == [], "the payload was run"


# -------- The shared folder -----------------------------------------------------------------------


def new_store(folder, owner="n1") -> DriveStore:
    """The store of the experiment x, whose folders and those of the owner are created."""
    store = DriveStore(folder, "x", owner)
    store.create([owner])
    return store


def put(store, path, content=b"{}") -> Path:
    """Write a file into the experiment by hand, as a stranger would. Returns its full path."""
    path = store.experiment_dir / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def rollout_file(node_id="p", **changes) -> dict:
    """The contents of a rollout file with one group of two completions.

    Each change replaces the field of that name wherever there is one: in the file itself, in the
    group, in the second completion.
    """
    completions = []
    for _ in range(2):
        completions.append({"response": "<answer>1</answer>", "reward": 0.5, "finished": True})
    group = {"task": "gcd", "seed": 1, "prompt": "?", "answer": "1", "completions": completions}
    data = {
        "format": 1,
        "peer_id": node_id,
        "round": 1,
        "stage": 0,
        "timestamp": 1.0,
        "rollouts": {"0": group},
    }
    for place in (data, group, completions[1]):
        for name, value in changes.items():
            if name in place:
                place[name] = value
    return data


def contents(folder) -> dict:
    """{path: bytes} of all files below a folder."""
    files = {}
    for path in Path(folder).rglob("*"):
        if path.is_file():
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def dies_before_file_call(nth: int, work) -> bool:
    """Call work() in a forked child that dies just before its nth call to the file system. Returns
    whether there was such a call."""
    child = os.fork()
    if child != 0:
        _, status = os.waitpid(child, 0)
        return status != 0

    watched = ("open", "mkdir", "write", "flush", "fsync", "link", "replace", "unlink")
    calls = itertools.count(1)

    def profile(frame, event, function):
        if event == "c_call" and function.__name__ in watched and next(calls) == nth:
            os._exit(9)

    sys.setprofile(profile)
    work()
    os._exit(0)


@pytest.mark.parametrize("has_links", [True, False])  # a storage may have no hard links
@pytest.mark.parametrize(
    "method, old",
    [
        ("write_atomic", b"{}"),
        ("write_once", None),
        ("write_once", b'{"a": 1}'),
        ("write_once", b'{"torn'),
    ],
)
def test_F1_a_crash_leaves_the_old_file_or_the_new_one(
    tmp_path, monkeypatch, method, old, has_links
):
    link = os.link if has_links else Mock(side_effect=OSError("no links"))
    monkeypatch.setattr(os, "link", link)
    store = new_store(tmp_path)
    num_files = len(contents(store.experiment_dir))
    new = {"text": "x" * 50_000}
    must_stay = method == "write_once" and old == b'{"a": 1}'  # complete, so never changed

    def write():
        getattr(store, method)("a.json", new, fsync=True)

    # Crash before the first call to the file system, then before the second, and so on, until the
    # write succeeds.
    num_left_over = 0
    nth = 0
    died = True
    while died:
        path = put(store, "a.json", old or b"")
        if old is None:
            path.unlink()
        nth += 1
        died = dies_before_file_call(nth, write)

        now = path.read_bytes() if path.exists() else None
        if now != old:
            assert json.loads(now) == new, f"crash before call {nth}"
            assert not must_stay, f"crash before call {nth}"

        # The next start deletes the temporary file that the crash left behind.
        num_expected = num_files + (now is not None)
        num_left_over += len(contents(store.experiment_dir)) - num_expected
        new_store(tmp_path).delete_temp_files()
        assert len(contents(store.experiment_dir)) == num_expected

    assert (now == old) == must_stay
    assert num_left_over > 2, "no crash left anything behind"


def test_F1_an_append_that_failed_half_way_is_repeated_and_a_torn_line_is_terminated(tmp_path):
    store = new_store(tmp_path)
    log = put(store, "logs/n1/log", b"one\nto")  # a crash cut the second line off

    # The disk is full after half of the text.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in range(2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (13, limits[1]))
        with pytest.raises(OSError, match="too large"):
            store.append("logs/n1/log", "three\nfour\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert log.read_bytes() == b"one\nto\nthree\n"

    store.append("logs/n1/log", "three\nfour\n")
    store.append("logs/n1/log", "five\n")
    assert log.read_text() == "one\nto\nthree\nfour\nfive\n"


def test_X3_a_strangers_broken_file_is_rejected_with_a_reason_and_costs_no_time(tmp_path):
    store = new_store(tmp_path)
    path = "rollouts/p/round_000001.stage_0.json"
    started = time.monotonic()
    for content in [
        b"",
        b"[]",
        b'{"a": NaN}',
        b'{"torn',
        b'{"a":' * 99_999,
        b'{"a": "\\ud800"}',
        b" " * 9_000_000,
        b'{"a": [' + b"[]," * 500_000 + b"[]]}",
        rollout_file("q"),
        rollout_file(round=2),
        rollout_file(rollouts=[]),
        rollout_file(task=1),
        rollout_file(seed=2**53),
        rollout_file(prompt="x" * 40_000),
        rollout_file(finished=1),
        rollout_file(completions=[{"response": "", "finished": True}] * 65),
        rollout_file(response=None),
    ]:
        put(store, path, content)
        with pytest.raises(InvalidFileError, match=r"\w+ \w+"):
            store.fetch_rollouts(1, 0, "p")
    assert time.monotonic() - started < 2

    # Keys that a newer program may add do no harm.
    put(store, path, {**rollout_file(), "new": 1})
    groups = store.fetch_rollouts(1, 0, "p")
    assert [group["key"] for group in groups] == [(1, 0, "p", 0)]


def use_file(store, operation: str, path: str):
    """Do one of the store's operations with the file `path`."""
    if operation == "read":
        return store.read_json(path)
    if operation == "write_atomic":
        return store.write_atomic(path, {"a": 1})
    if operation == "write_once":
        return store.write_once(path, {"a": 1})
    if operation == "append":
        return store.append(path, "{}\n")
    if operation == "delete":
        return store.delete(path)
    return store.prune_rollouts("n1", 9, archive=False)


@pytest.mark.parametrize("planted", ["link", "fifo", "folder", "parent that is a link"])
def test_X2_no_link_is_followed_and_an_obstacle_in_a_writers_way_is_replaced(tmp_path, planted):
    # A file outside all experiments, which must stay as it is.
    home = tmp_path / "home"
    thesis = put(DriveStore(tmp_path, None), "home/round_000000.stage_0.json", {"thesis": 1})

    for operation in ("read", "write_atomic", "write_once", "append", "delete", "rollouts"):
        # Plant something in place of the file, or of its folder.
        store = new_store(tmp_path / operation)
        name = "rollouts/n1/round_000000.stage_0.json"
        path = put(store, name)
        path.unlink()
        if planted == "link":
            path.symlink_to(thesis)
        elif planted == "fifo":
            os.mkfifo(path)
        elif planted == "folder":
            path.mkdir()
        else:
            path.parent.rmdir()
            path.parent.symlink_to(home)

        # A reader may refuse it. Of the others, only write_once returns anything.
        result = None
        try:
            result = use_file(store, operation, name)
        except InvalidFileError:
            assert operation in ("read", "delete")
        assert bool(result) == (operation == "write_once")

        assert contents(home) == {"round_000000.stage_0.json": b'{"thesis": 1}'}, operation
        is_own_file = path.is_file() and path.resolve() != thesis
        assert is_own_file == (operation in ("write_atomic", "write_once", "append"))


def test_F1_copies_and_strays_are_in_no_listing_and_only_names_tell_the_open_round(tmp_path):
    store = new_store(tmp_path)
    session = store.register(["n1"], "worker", {})
    store.open_round(2, "n1")
    store.submit_reward(2, 0, "n1", {"reward": 0.5})

    # Sync clients and interrupted copies leave such files in a folder.
    strays = [
        "n1.rewards.000007.0 (1)",
        ".n3.rewards.000007.0",
        "n4.rewards.000007.0.tmp",
        f"n1.{session} (1).json",
        "round_000007.n1 (1).json",
    ]
    for folder in ("progress", "peers", "state/rounds"):
        for name in strays:
            put(store, f"{folder}/{name}")
    assert store.list_nodes("rewards", 2, 0) == ["n1"]
    assert store.latest_sessions() == {"n1": session}

    # A round is open as soon as its file has a name, whatever the file contains.
    put(store, "state/rounds/round_000003.n2.json", b"torn")
    assert store.current_round() == 3


def test_F6_the_first_config_counts(tmp_path):
    for seed in (1, 2):
        assert new_store(tmp_path).load_or_create_config({"SEED": seed})["SEED"] == 1


def test_F6_an_experiments_own_damaged_or_older_state_is_an_error_and_stays_as_it_was(tmp_path):
    damaged = new_store(tmp_path / "damaged")
    put(damaged, "config.json", b'{"SEED": ')
    older = new_store(tmp_path / "older")
    put(older, "rollouts/round_5/n1.json")  # written by the program before this one

    for store in (damaged, older):
        before = contents(store.experiment_dir)
        with pytest.raises(StoreError, match="EXPERIMENT_NAME"):
            store.load_or_create_config({"SEED": 2})
        assert before.items() <= contents(store.experiment_dir).items()


# -------- Waiting for the folder ------------------------------------------------------------------


def test_F2_a_node_waits_for_the_folder_says_so_once_and_keeps_the_order(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    events = []
    retrying = RetryingStore(
        store, lambda kind, text: events.append(kind), SimpleNamespace(requested=0)
    )
    retrying.append("logs/n1/order", "start\n")

    # The folder is away for 20 s of a simulated time, which only sleeping advances.
    away = tmp_path / "away"
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds
        if now >= 20 and away.exists():
            away.rename(store.experiment_dir)

    simulated = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(drive_store, "time", simulated)
    store.experiment_dir.rename(away)
    for i in range(3):
        retrying.append("logs/n1/order", f"{i}\n")
        assert retrying.write_once(f"{i}.json", {"i": i})

    assert 20 <= now <= 25.5, "a pause is longer than 5 s"
    log = store.experiment_dir / "logs/n1/order"
    assert log.read_text().split() == ["start", "0", "1", "2"]
    for i in range(3):
        assert retrying.read_json(f"{i}.json") == {"i": i}
    assert events == ["outage", "outage over"]


def test_F2_a_missing_file_is_no_outage_and_a_stop_signal_ends_the_waiting(tmp_path):
    store = new_store(tmp_path)
    events = []
    signals = SimpleNamespace(requested=0)
    retrying = RetryingStore(store, lambda *event: events.append(event), signals)

    assert retrying.read_json("none/at all") is None
    assert retrying.list_names("none") == []
    assert retrying.current_round() == -1
    assert retrying.existing_file("none") is None
    assert retrying.delete("none/at all") is None
    assert events == []

    store.experiment_dir.rename(tmp_path / "away")
    signals.requested = 1
    with pytest.raises(KeyboardInterrupt):
        retrying.read_json("none")
    with pytest.raises(KeyboardInterrupt):
        retrying.list_names("none")
    with pytest.raises(KeyboardInterrupt):
        retrying.write_atomic("a", {})
    assert not store.experiment_dir.exists(), "it was created again, on the local disk"


# -------- Settings --------------------------------------------------------------------------------

# Variables that are checked, but not against a list of words: a good value, a bad one, and a part
# of the message.
CHECKED = {
    "TASKS": ("gcd,bf", "gdc", "did you mean gcd?"),
    "EXPERIMENT_NAME": ("e-1", "a/b", "letters"),
    "NODE_ID": ("n.1", "../n", "letters"),
    "DEVICE": ("cpu", "gpu", "this machine has"),
    "GDRIVE_PATH": ("here", "/no/such/folder", "parent directory"),
}


def config_error(**environ) -> str:
    """The message with which these environment variables are refused."""
    with pytest.raises(ConfigError) as caught:
        env, _ = read_environment(environ)
        resolve_config(env, {}, [])
    return str(caught.value)


@pytest.mark.parametrize("spec", fields(Config), ids=lambda spec: spec.name)
def test_U1_a_bad_value_is_refused_with_its_name_the_value_and_what_is_allowed(spec):
    # Good values as {text: value}, bad ones, and a part of the message.
    allowed = spec.metadata["allowed"]
    if spec.type is bool:  # bool("False") is True
        good = {"False": False, "0": False, " yes ": True, "TRUE": True}
        bad = ["maybe", "2"]
        hint = "True or False"
    elif spec.type in (int, float):
        low, high = allowed
        good = {text: spec.type(text) for text in (str(max(1, low)), str(high))}
        bad = ["many", "nan", str(low - 1), str(high + 1)]
        hint = "expected"
    elif allowed:
        words = allowed.split()
        good = {word: word for word in words if word != "auto"}
        bad = ["no such"]
        hint = words[-1]
    elif spec.name in CHECKED:
        text, wrong, hint = CHECKED[spec.name]
        good = {text: text}
        bad = [wrong]
    else:
        good = {"some-name": "some-name"}
        bad = []
        hint = ""

    for text, value in good.items():
        found = getattr(make_config(**{spec.name: text}), spec.name)
        assert found == value
        assert type(found) is spec.type
    for text in bad:
        message = config_error(**{spec.name: text})
        assert spec.name in message, message
        assert text in message, message
        assert hint in message, message


def test_U1_all_mistakes_are_reported_together_and_a_blank_value_counts_as_unset():
    mistakes = {
        "SEED": "x",
        "TEST_MODE": "maybe",
        "LOSS_TYPE": "ppo",
        "NODE_ID": "../x",
        "TASKS": "gdc",
    }
    message = config_error(**mistakes)
    for name, value in mistakes.items():
        assert name in message
        assert value in message

    blank = {spec.name: " " for spec in fields(Config) if spec.name != "NODE_ID"}
    assert make_config(**blank) == make_config()


def test_U1_near_misses_are_named_with_the_correction_and_other_programs_variables_are_not():
    # The longer names without their last letter, a short name, and a name in lower case.
    names = {spec.name for spec in fields(Config)}
    misspelled = {}
    for name in names:
        if len(name) > 6 and name[:-1] not in names:
            misspelled[name[:-1]] = name
    misspelled["LR"] = "LEARNING_RATE"
    misspelled["node_role"] = "NODE_ROLE"

    # Each gives a warning that begins with the wrong name.
    right = {"EXPERIMENT_NAME": "x", "GDRIVE_PATH": "x"}
    _, warnings = read_environment({**dict.fromkeys(misspelled, "4"), **right})
    warned = {text.split()[0]: text for text in warnings}
    assert warned.keys() == misspelled.keys()
    for wrong, name in misspelled.items():
        assert f"mean {name}?" in warned[wrong]

    # These two are errors, because the node would otherwise join another experiment.
    for name in right:
        assert f"mean {name}?" in config_error(**{name[:-1]: "mine"})

    others = ("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "NODE_OPTIONS", "PYTHONHASHSEED")
    _, warnings = read_environment({**dict.fromkeys(others, "x"), "MODEL_NAME": "tiny"})
    assert warnings == []


# -------- Whole swarms in this process, judged by the files that they leave -----------------------

TASKS = ["small_products", "small_count_bits"]
SMALL = {
    "MODEL_NAME": "tiny",
    "TASKS": ",".join(TASKS),
    "WARM_START_STEPS": 300,
    "ANSWER_TAG_SHARE": 0.3,
    "LOCAL_NODES": 2,
    "NUM_TRAIN_SAMPLES": 2,
    "NUM_TRANSPLANT_TREES": 2,
    "NUM_GENERATIONS": 4,
    "MAX_ROUNDS": 6,
    "CHECKPOINT_INTERVAL": 2,
    "FETCH_TIMEOUT_SECONDS": 0.1,
    "LEARNING_RATE": 0.0006,
}
# Without a warm start no answer is right. Own groups are uninformative then, and only peers' groups
# change the weights.
UNTRAINED = {"WARM_START_STEPS": 0}


@pytest.fixture(scope="session")
def drive(tmp_path_factory):
    """The shared folder of all these swarms. The first one makes the warm start for the others."""
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="session")
def uninterrupted(drive):
    """The folder of an experiment that ran from beginning to end."""
    assert run_swarm(drive, "uninterrupted") == 0
    return drive / "experiments" / "uninterrupted"


def run_swarm(drive, name, **settings) -> int:
    """Run sapo.main with SMALL and these settings. Returns its exit status."""
    return sapo.main({"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name, **SMALL, **settings})


def read_rewards(drive, name, node_id="") -> list[dict]:
    """The reward files of an experiment by round, stage and node, of all nodes or of one."""
    paths = drive.glob(f"experiments/{name}/rewards/{node_id}*/*.json")
    paths = sorted(paths, key=lambda path: (path.name, path.parent.name))
    return [json.loads(path.read_text()) for path in paths]


def read_results(drive, name) -> tuple:
    """All rewards, and the bytes of the last checkpoint: weights, optimizer, total rewards, and the
    external groups used."""
    rewards = []
    for row in read_rewards(drive, name):
        rewards.append((row["round"], row["node_id"], row["reward"]))
    last_checkpoint = max(drive.glob(f"experiments/{name}/checkpoints/*/*"))
    return rewards, last_checkpoint.read_bytes()


def read_events(drive, name, kind) -> list[dict]:
    """The events of one kind that a process whose first node is node_0 has logged."""
    path = drive / f"experiments/{name}/logs/node_0/training_events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if kind in event["event"]]


def read_used_external(drive, name, round_=5) -> set:
    """Keys of the external groups that node_0 has used, from the checkpoint after a round."""
    path = drive / f"experiments/{name}/checkpoints/node_0/round_{round_:06d}.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["about"])
    return {tuple(key) for key in metadata["nodes"]["node_0"]["trained"]}


def write_peer(drive, name, peer, groups, round_=0, **changes) -> None:
    """Put a rollout file of `peer` into the folder, as any program and any human can."""
    changed_fields = {
        "round": round_,
        "rollouts": {str(i): group for i, group in enumerate(groups)},
        **changes,
    }
    store = DriveStore(drive, name, "by_hand")
    store.create([peer])
    path = round_file("rollouts", peer, round_, 0)
    put(store, path, rollout_file(peer, **changed_fields))
    store.advance_marker("rollouts", peer, round_, 0)


def group_by_hand(seed, task=TASKS[0], right=1, **changes) -> dict:
    """A group of four completions, the first `right` of them correct, whatever its rewards
    claim."""
    question = make_question(task, seed)
    texts = [f"<answer>{question.answer}</answer>"] * right + ["<answer>no</answer>"] * (4 - right)
    completions = []
    for i, text in enumerate(texts):
        completions.append({"response": text, "reward": i % 2, "finished": True})
    group = {
        "task": task,
        "seed": seed,
        "prompt": question.text,
        "answer": question.answer,
        "completions": completions,
    }
    return group | changes


def at_call(monkeypatch, step, number, action) -> None:
    """Do `action` just before the `number`th call (from 1) of a function of sapo, such as one of
    the steps of `train`."""
    original = getattr(sapo, step)
    calls = itertools.count(1)

    def replacement(*args):
        if next(calls) == number:
            action()
        return original(*args)

    monkeypatch.setattr(sapo, step, replacement)


def test_L6_a_swarm_learns_far_more_than_chance_explains(drive):
    """Measured with six seeds: the mean reward of the last third of the rounds is 0.21 to 0.28
    above that of the first third."""
    status = run_swarm(
        drive,
        "learns",
        LOCAL_NODES=4,
        NUM_TRAIN_SAMPLES=4,
        NUM_TRANSPLANT_TREES=4,
        NUM_GENERATIONS=8,
        MAX_ROUNDS=24,
        CHECKPOINT_INTERVAL=100,
    )
    assert status == 0

    rewards = [row["reward"] for row in read_rewards(drive, "learns")]
    assert len(rewards) == 4 * 24
    assert statistics.mean(rewards[-32:]) - statistics.mean(rewards[:32]) > 0.12


def test_L4_external_groups_change_the_weights_even_if_all_own_groups_are_uninformative(drive):
    # The same node twice, alone and with two groups of a peer.
    write_peer(drive, "taught", "human", [group_by_hand(1), group_by_hand(2, TASKS[1])])
    for name in ("alone", "taught"):
        assert run_swarm(drive, name, MAX_ROUNDS=1, **UNTRAINED) == 0
    alone = read_rewards(drive, "alone")[0]
    taught = read_rewards(drive, "taught")[0]

    assert alone["informative_groups"] == alone["grad_norm"] == alone["trained_tokens"] == 0
    assert taught["external_groups"] == taught["informative_groups"] == 2
    assert taught["grad_norm"] > 0

    # A node's reward is that of its own completions.
    assert alone["reward"] == taught["reward"] == 0

    start = flat_weights(grpo.build_tiny_model(TASKS)[0])
    for name, is_changed in (("alone", False), ("taught", True)):
        model = AutoModelForCausalLM.from_pretrained(drive / f"experiments/{name}/models/node_0")
        assert torch.equal(flat_weights(model), start) != is_changed


def test_L5_local_nodes_repeat_bit_for_bit_and_never_ask_a_question_twice(drive, uninterrupted):
    assert run_swarm(drive, "again") == 0
    assert read_results(drive, "again") == read_results(drive, "uninterrupted")
    rewards = {row["reward"] for row in read_rewards(drive, "again")}
    assert len(rewards) > 2, "there was nothing to learn from"

    seeds = []
    for path in uninterrupted.glob("rollouts/*/*.json"):
        groups = json.loads(path.read_text())["rollouts"]
        seeds += [group["seed"] for group in groups.values()]
    assert len(seeds) == len(set(seeds)) == 2 * 6 * 2  # nodes x rounds x I


@pytest.mark.parametrize(
    "step", ["publish_groups", "policy_gradient", "submit_reward", "save_checkpoint"]
)
def test_F3_a_killed_run_resumes_as_if_nothing_had_happened(
    drive, uninterrupted, monkeypatch, step
):
    """If optimizer, totals, used external groups or the place in a random stream were lost, some
    number would differ."""
    name = f"killed_in_{step}"
    call = 2 if step == "save_checkpoint" else 6

    # SystemExit stands for a kill: nothing in the program handles it.
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        at_call(patch, step, call, sys.exit)
        run_swarm(drive, name)
    published = contents(drive / "experiments" / name / "rollouts")

    assert run_swarm(drive, name) == 0
    assert [event["round"] for event in read_events(drive, name, "resume")] == [1]
    assert read_results(drive, name) == read_results(drive, "uninterrupted")
    published_in_the_end = contents(drive / "experiments" / name / "rollouts")
    assert published.items() <= published_in_the_end.items(), "a published file was changed"


@pytest.mark.parametrize(
    "step, call, last_round", [("finish_round", 3, 2), ("publish_groups", 8, 3)]
)
def test_U2_a_stop_prints_a_command_that_resumes_the_run(
    drive, uninterrupted, monkeypatch, capfd, step, call, last_round
):
    name = f"stopped_in_{step}"

    def press_ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        at_call(patch, step, call, press_ctrl_c)
        assert run_swarm(drive, name) == 130
    checkpoint = f"experiments/{name}/checkpoints/node_0/round_{last_round:06d}.safetensors"
    assert (drive / checkpoint).exists()

    # The command is a list of settings and the program.
    command = capfd.readouterr().out.split("to go on:\n")[1]
    words = command.split("python sapo.py")[0].split()
    assert sapo.main(dict(word.split("=", 1) for word in words)) == 0
    assert read_results(drive, name) == read_results(drive, "uninterrupted")


def test_F6_a_joining_node_takes_the_swarms_settings_and_is_refused_if_it_disagrees(drive, capfd):
    first = {"LOCAL_NODES": 1, "MAX_ROUNDS": 2, "SEED": 7, "NODE_ID": "first", **UNTRAINED}
    assert run_swarm(drive, "joined", **first) == 0
    capfd.readouterr()

    # A node that sets nothing but its name goes on with the open round, and with I and G.
    joining = {"GDRIVE_PATH": drive, "EXPERIMENT_NAME": "joined"}
    assert sapo.main({**joining, "NODE_ID": "second"}) == 0
    (row,) = read_rewards(drive, "joined", "second")
    assert row["round"] == 1
    assert row["completions"] == 2 * 4
    assert "from the experiment: SEED=7" in capfd.readouterr().out

    # One that disagrees is refused with the setting's name, and changes nothing.
    before = contents(drive / "experiments/joined")
    disagreeing = {"SEED": 8, "TASKS": "gcd", "REWARD": "verifier", "MAX_STAGES": 2}
    for name, value in disagreeing.items():
        assert sapo.main({**joining, "NODE_ID": "third", name: value}) == 2
        assert f"{name}=" in capfd.readouterr().out
    assert contents(drive / "experiments/joined") == before


def test_X4_strangers_are_verified_and_lies_gain_nothing(drive):
    # A helpful human, and seven peers whose files make false claims or flood the folder.
    helpful = [group_by_hand(1), group_by_hand(2, TASKS[1], right=3)]
    lies = [group_by_hand(seed, right=0, answer="no") for seed in range(10, 14)]
    flood = [group_by_hand(seed) for seed in range(100, 600)]
    held_out_seed = HELD_OUT_SEEDS.start + 5
    write_peer(drive, "strangers", "human", helpful)
    write_peer(drive, "strangers", "liar", lies)
    write_peer(drive, "strangers", "flood", flood)
    write_peer(drive, "strangers", "rewriter", [group_by_hand(20, prompt="What is 1 + 1?")])
    write_peer(drive, "strangers", "cheat", [group_by_hand(held_out_seed)])
    write_peer(drive, "strangers", "foreign", [group_by_hand(30, "small_gcd")])
    write_peer(drive, "strangers", "broken", [group_by_hand(40, prompt=1)])
    write_peer(drive, "strangers", "impostor", [group_by_hand(50)], peer_id="human")

    status = run_swarm(
        drive,
        "strangers",
        NUM_TRANSPLANT_TREES=100,
        ROLLOUT_MAX_AGE=3,
        CHECKPOINT_INTERVAL=1,
        CHECKPOINT_KEEP=9,
        **UNTRAINED,
    )
    assert status == 0

    # In round 0 each peer's fair share is I = 2 groups. Old groups fill gaps for a while, and none
    # is used twice.
    rows = read_rewards(drive, "strangers", "node_0")
    used = read_used_external(drive, "strangers", 0)
    assert Counter(peer for _, _, peer, _ in used) == {"human": 2, "flood": 2}
    assert [row["external_groups"] for row in rows] == [4, 2, 2, 2, 0, 0]
    assert len(read_used_external(drive, "strangers", 3)) == 10

    # The liar's groups teach nothing, because rewards are computed here. The other five peers are
    # rejected, each with its reason.
    assert rows[0]["rejected"] == 5
    assert rows[0]["reward"] == 0
    reasons = {}
    for event in read_events(drive, "strangers", "reject"):
        peer, reason = event["text"].split(": ", 1)
        reasons[peer] = reason
    expected = {
        "rewriter": "prompt",
        "cheat": "held-out",
        "foreign": "task",
        "broken": "not a string",
        "impostor": "path",
    }
    assert reasons.keys() == expected.keys()
    for peer, reason in reasons.items():
        assert expected[peer] in reason


def test_L4_peers_are_drawn_at_random_and_not_in_the_order_of_the_listing(drive):
    for peer in "abcdefghijkl":
        for round_ in range(6):
            group = group_by_hand(1000 * round_ + ord(peer))
            write_peer(drive, "listing", peer, [group], round_)

    status = run_swarm(
        drive,
        "listing",
        FETCH_MAX_PEERS=2,
        ROLLOUT_MAX_AGE=100,
        NUM_TRANSPLANT_TREES=1,
        **UNTRAINED,
    )
    assert status == 0
    peers = {peer for _, _, peer, _ in read_used_external(drive, "listing")}
    assert peers - {"a", "b"}


def test_L2_own_groups_are_trained_on_with_the_ids_that_were_sampled(drive, monkeypatch):
    """Decoded and encoded again they would differ: "<answer>" is one token, but eight when it was
    sampled letter by letter."""
    tokenizer = grpo.build_tiny_model(TASKS)[1]
    spelled = [*tokenizer.convert_tokens_to_ids([*"<answer>5"]), tokenizer.eos_token_id]
    assert len(tokenizer("<answer>5").input_ids) == 2

    trained = []
    update_policy = grpo.update_policy

    def generate(model, prompts, num_generations, *args, **kwargs):
        return [[spelled] * num_generations for _ in prompts]

    def recording_update(model, optimizer, groups, *args):
        trained.extend(groups)
        return update_policy(model, optimizer, groups, *args)

    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(grpo, "update_policy", recording_update)
    assert run_swarm(drive, "spelled", MAX_ROUNDS=1, NUM_TRANSPLANT_TREES=0, **UNTRAINED) == 0

    assert len(trained) == 4
    for group in trained:
        assert group.completions == [spelled] * 4


def test_X4_the_access_token_is_shown_nowhere_and_a_failing_hub_stops_nothing(
    drive, monkeypatch, capsys
):
    token = "hf_0123456789abcdefSECRET"
    environ = {"HUGGINGFACE_ACCESS_TOKEN": token}
    failure = OSError(f"401 for token {token}")
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", Mock(side_effect=failure))
    assert run_swarm(drive, "hub", **environ, MAX_ROUNDS=2, **UNTRAINED) == 0
    (event,) = read_events(drive, "hub", "hub")
    assert event["text"].startswith("push failed (")
    assert event["text"].endswith("; the run is complete without it")

    # Everything that is printed or written.
    config = make_config(**environ)
    shown = [
        repr(config),
        sapo.format_config(config, environ),
        sapo.resume_command(config, environ),
        *capsys.readouterr(),
        config_error(**environ, SEED="x"),
        str(contents(drive / "experiments/hub")),
    ]
    assert shown[0]
    assert shown[1]
    for text in shown:
        assert token[:12] not in text


def test_U5_U8_readers_change_nothing_and_the_final_model_is_an_ordinary_folder(
    drive, uninterrupted, capfd
):
    before = contents(uninterrupted)
    for role, expected in (
        ("validate", "passed"),
        ("monitor", "round 5 of 6"),
        ("report", "2/2"),
    ):
        environ = {"GDRIVE_PATH": drive, "EXPERIMENT_NAME": "uninterrupted", "NODE_ROLE": role}
        assert sapo.main(environ) == 0
        assert expected in capfd.readouterr().out, role
    assert contents(uninterrupted) == before

    model = AutoModelForCausalLM.from_pretrained(uninterrupted / "models/node_0")
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted / "models/node_0")
    assert len(tokenizer) == model.config.vocab_size


# -------- Shape of the code: the rules that let four files become one notebook cell ---------------

MODULES = ("drive_store", "grpo", "coordinator", "sapo")  # in the order in which they are pasted
TEXTS = {name: Path(sapo.__file__).with_name(f"{name}.py").read_text() for name in MODULES}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}
NODES = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]


def is_guarded_import(node) -> bool:
    """Return whether a statement is the block that imports the other modules, and nothing else:

    if "DriveStore" in globals():
        drive_store = grpo = sys.modules[__name__]
    else:
        import drive_store
        import grpo
    """
    text = ast.unparse(node)
    siblings = [name for name in sorted(MODULES) if f"import {name}" in text]
    lines = [
        "if 'DriveStore' in globals():",
        "    " + " = ".join([*siblings, "sys.modules[__name__]"]),
        "else:",
        *[f"    import {name}" for name in siblings],
    ]
    return text == "\n".join(lines)


def bound_names(tree) -> list[str]:
    """Names that a module defines outside its functions and classes, except the guarded import of
    the other modules."""
    names = []
    unvisited = list(tree.body)
    comprehension_variables = set()  # they do not exist outside their comprehension
    while unvisited:
        node = unvisited.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
            continue
        if is_guarded_import(node):
            continue

        if isinstance(node, ast.comprehension):
            comprehension_variables.update(ast.walk(node.target))
        is_bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if is_bound and node not in comprehension_variables:
            names.append(node.id)
        unvisited += ast.iter_child_nodes(node)
    return names


def test_U9_pasted_into_one_cell_they_compile_and_no_name_means_two_things():
    compile("\n".join(TEXTS.values()), "one_cell", "exec")

    # Each name is defined by one module only.
    owner = {}
    for module, tree in TREES.items():
        for name in bound_names(tree):
            assert owner.setdefault(name, module) == module, f"{name}: {owner[name]}, {module}"

    # An imported name means one thing, and none that a module defines. The project's own modules
    # are imported as modules, and only in the guarded block, which the pasted cell skips.
    guarded = set()
    for _, node in NODES:
        if isinstance(node, ast.If) and is_guarded_import(node):
            guarded.update(node.orelse)
    imported = {}
    for module, node in NODES:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        source = getattr(node, "module", None)
        assert source not in MODULES, f"{module}.py: from {source} import …"
        for each in node.names:
            name = each.asname or each.name
            assert each.name not in MODULES or node in guarded, f"{module}.py: import {each.name}"
            assert imported.setdefault(name, (source, each.name)) == (source, each.name), name
            assert name not in owner, f"two things: {name}"


def test_U9_there_is_one_main_guard_and_nothing_fails_in_a_notebook_or_runs_a_strangers_text():
    # sapo.py ends with `main` and the only guard.
    *_, main, guard = TREES["sapo"].body
    guards = []
    for _, node in NODES:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            guards.append(node)
    assert guards == [guard]

    # Some names are never used, and the environment is read only by those two.
    forbidden = {
        "__file__", "argparse", "__future__", "subprocess", "pickle", "torch.load", "os.system",
        "eval", "exec", "compile", "input",
    }  # fmt: skip
    may_read_environment = {*ast.walk(main), *ast.walk(guard)}
    for module, node in NODES:
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        names = {text, getattr(node, "module", ""), getattr(node, "name", "")}
        assert not names & forbidden, module
        if text in ("os.environ", "os.getenv"):
            assert node in may_read_environment, module
