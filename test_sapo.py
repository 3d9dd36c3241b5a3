"""What this program promises, a property a test, said in its name; heavier proofs are in .ci/.

L learning, F the folder, X strangers who write into it, U people. In this order: mathematics, rewards,
the folder, waiting for it, settings, whole swarms, shape of the code.
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
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import safetensors
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import coordinator
import drive_store
import grpo
import sapo
from drive_store import DriveStore, InvalidFileError, RetryingStore, StoreError, round_dir
from grpo import HELD_OUT_SEEDS, TASK_TABLE, Group, generate, make_question
from sapo import Config, ConfigError, derive_seed, read_environment, resolve_config

torch.set_num_threads(1)
# ======== The mathematics =================================================================================
# The plain_ functions do the same slowly: one sequence, one token at a time, no cache, no padding.


def small_gpt2(dropout=0.0):
    """A model with a peaked softmax. Other architectures: .ci/test_numbers.py."""
    torch.manual_seed(1)
    sizes = dict(
        vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3
    )
    config = GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    return GPT2LMHeadModel(config).eval()


def ragged_groups(sizes=(2, 3, 5, 4), flat=()) -> list[Group]:
    """Unequal prompts and completions, rewards of several levels; those of the groups `flat` are all 1."""
    rng, groups = random.Random(0), []
    for i, size in enumerate(sizes):
        completions = [[rng.randrange(21) for _ in range(rng.randint(1, 6))] for _ in range(size)]
        rewards = [0.0, 1.0] + [rng.choice([0.0, 0.5, 1.0]) for _ in range(size - 2)]
        prompt = [rng.randrange(21) for _ in range(1 + i * 5 % 7)]
        groups.append(Group(prompt, completions, [1.0] * size if i in flat else rewards))
    return groups


def flat_weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_close(ours, expected, atol=2e-5, rtol=1e-4):
    torch.testing.assert_close(ours, expected, atol=atol, rtol=rtol)


def reference_logprobs(model, prompt, completion, temperature=1.0):
    """(T,) by the model's own logits."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)[range(len(completion)), completion]


def reference_loss(logps, olds, advantages, loss_type, max_new_tokens):
    """The definition, token by token. Returns (loss, clipped tokens)."""
    loss, clipped, rows, tokens = 0.0, 0, len(logps), sum(map(len, logps))
    for row, old_row, a in zip(logps, olds, advantages, strict=True):
        scale = {"dapo": tokens, "grpo": rows * len(row), "dr_grpo": rows * max_new_tokens}[
            loss_type
        ]
        for logp, old in zip(row, old_row, strict=True):
            ratio = (logp - old).exp()
            limited = min(max(ratio, 0.8), 1.28)
            loss -= min(ratio * a, limited * a) / scale
            clipped += bool(limited * a < ratio * a)
    return loss, clipped


def reference_update(model, groups, loss_type, iterations):
    """Gradient descent on reference_loss, flat groups and all -> (new weights, first loss, clipped tokens)."""
    optimizer, olds, losses, advantages = torch.optim.SGD(model.parameters(), lr=0.5), None, [], []
    for g in groups:
        mean, std = statistics.mean(g.rewards), statistics.stdev(g.rewards)
        advantages += [(r - mean) / (std + 1e-4) for r in g.rewards]
    for _ in range(iterations):
        logps = [reference_logprobs(model, g.prompt, c, 0.7) for g in groups for c in g.completions]
        olds = olds or [row.detach() for row in logps]
        losses.append(reference_loss(logps, olds, advantages, loss_type, 9))
        optimizer.zero_grad()
        losses[-1][0].backward()
        optimizer.step()
    return flat_weights(model), losses[0][0].item(), sum(clipped for _, clipped in losses)


def update_settings(**changes) -> SimpleNamespace:
    """The settings that an update reads, as Config names them."""
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
    """The new weights, and the metrics of the update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = update_settings(**changes)
    metrics = grpo.update_policy(model, optimizer, groups, config, pad_id, max_rows)
    return flat_weights(model), metrics


def test_L1_advantages_equal_the_reference_values_and_are_zero_in_a_flat_group():
    a, b, c = 0.86587543, 2.4741739, -0.3534534
    assert grpo.group_advantages([1, 0, 0, 1]) == pytest.approx([a, -a, -a, a], abs=1e-8)
    assert grpo.group_advantages([1, 0, 0, 0, 0, 0, 0, 0]) == pytest.approx([b] + [c] * 7, abs=1e-7)
    for flat in ([0.0], [0.0] * 4, [1.0] * 3, [0.1 + 0.2, 0.3, 0.3]):
        assert grpo.group_advantages(flat) == [0.0] * len(flat)
        assert not Group([1], [[1]] * len(flat), flat).is_informative


@pytest.mark.parametrize(
    "loss_type, loss, gradient, loss_on_policy",
    [("grpo", 0.1523116717, 0.7102527295, 0.1875), ("dapo", -0.2313029286, 0.5908817714, -0.2307692308),
     ("dr_grpo", -0.0939668147, 0.2400457196, -0.09375)],
)  # fmt: skip
def test_L1_loss_and_gradient_equal_the_reference_values(loss_type, loss, gradient, loss_on_policy):
    i, t = torch.arange(4).double().unsqueeze(1), torch.arange(5).double()  # row, column
    logp = (-0.5 - 0.1 * i - 0.05 * t).requires_grad_()
    old = logp.detach() + 0.15 * ((i + 2 * t) % 5 - 2)
    lengths, a = torch.tensor([5, 3, 4, 1]), torch.tensor([1, -0.5, 0.25, -1.5]).double()
    mask, weights = t < lengths.unsqueeze(1), grpo.loss_weights(lengths, loss_type, 8)
    ours, _ = grpo.grpo_loss(logp, old, a, mask, weights)
    assert_close(ours.item(), loss, 1e-9, 0)
    assert_close(torch.autograd.grad(ours, logp)[0].abs().sum().item(), gradient, 1e-9, 0)
    ours, clipped = grpo.grpo_loss(logp, logp.detach(), a, mask, weights)
    assert_close(ours.item(), loss_on_policy, 1e-9, 0)
    assert_close(torch.autograd.grad(ours, logp)[0], -(a * weights).unsqueeze(1) * mask, 1e-9, 0)  # ratio 1
    assert clipped == 0


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("rows, steps", [(1, 1), (3, 1), (5, 1), (99, 1), (3, 3)])
def test_L1_update_is_plain_gradient_descent_for_any_micro_batch(kind, rows, steps, monkeypatch):
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 1e9)  # so that a wrong scale shows
    groups = ragged_groups(
        (4, 2, 7, 3, 5), flat=(0, 3)
    )  # one larger than any micro-batch, two flat
    expected, loss, clipped = reference_update(small_gpt2(), groups, kind, steps)
    settings = dict(LOSS_TYPE=kind, max_rows=rows, NUM_ITERATIONS=steps)
    weights, stats = our_update(small_gpt2(), groups, **settings)
    assert_close(weights, expected, 1e-4, 1e-3)
    assert_close(
        stats["loss"], loss
    )  # of the first iteration; later ones clip against the policy of the start
    assert stats["trained_tokens"] == sum(
        len(c) for g in groups if g.is_informative for c in g.completions
    )
    assert stats["clip_fraction"] == pytest.approx(clipped / stats["trained_tokens"] / steps)
    assert bool(clipped) == (steps > 1)


def test_L1_a_flat_group_costs_no_forward_but_counts_in_the_dapo_denominator(monkeypatch):
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 1e9)
    group, flat = (
        Group([3], [[4, 5], [6]], [1.0, 0.0]),
        Group([20], [[21] * 6, [21] * 3], [1.0, 1.0]),
    )
    model, start, seen = small_gpt2(), flat_weights(small_gpt2()), set()
    see = lambda module, args, given: seen.update(given["input_ids"].flatten().tolist())  # noqa: E731
    model.base_model.register_forward_pre_hook(see, with_kwargs=True)
    step = our_update(model, [group, flat])[0] - start
    assert_close(step, (our_update(small_gpt2(), [group])[0] - start) * 3 / 12)  # the tokens: 3 of 12
    assert seen == {3, 4, 6}  # the informative group's tokens only


@pytest.mark.parametrize("temperature, pad_id", [(1.0, 0), (0.7, 20)])
def test_L1_logps_are_the_models_own_and_none_is_taken_from_a_pad_position(temperature, pad_id):
    model, groups = small_gpt2(), ragged_groups()
    rows = [(g.prompt, c) for g in groups for c in g.completions]
    expected = pad_sequence(
        [reference_logprobs(model, *row, temperature) for row in rows], batch_first=True
    )
    pairs = [(g.prompt, g.completions) for g in groups]
    shared, mask = grpo.completion_logprobs_shared_prompt(
        model, pairs, update_settings(TEMPERATURE=temperature), pad_id
    )
    plain, plain_mask = grpo.completion_logprobs(
        model, *zip(*rows, strict=True), temperature, pad_id
    )
    assert_close(shared, expected)
    assert_close(plain, expected)
    assert torch.equal(mask, plain_mask) and mask.sum(1).tolist() == [len(c) for _, c in rows]


@pytest.mark.parametrize("pad_id", [0, 2])
def test_L2_the_eos_is_in_the_mask_and_learned_even_when_it_is_the_pad_token(pad_id):
    model, eos, group = small_gpt2(), 2, Group([3, 4], [[9, 2], [9, 8, 7]], [1.0, 0.0])
    logp, mask = grpo.completion_logprobs_shared_prompt(
        model, [(group.prompt, group.completions)], update_settings(TEMPERATURE=1.0), pad_id
    )
    assert (
        mask.tolist() == [[True, True, False], [True, True, True]] and logp[0, 1] < 0 == logp[0, 2]
    )
    our_update(model, [group], lr=0.1, pad_id=pad_id)
    assert (
        reference_logprobs(model, [3, 4], [9, eos])[1] > logp[0, 1]
    )  # stopping was rewarded: likelier now


def test_L1_log_softmax_of_bfloat16_logits_is_taken_in_float32():
    model, targets = small_gpt2().bfloat16(), torch.arange(23)
    hidden = torch.randn(23, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.log_softmax(model.lm_head(hidden).float() / 0.7, -1)[targets, targets]
    assert_close(grpo.token_logprobs(model, hidden, targets, 0.7), expected, 1e-6)


def test_L1_dropout_and_recomputation_are_off_in_a_model_left_in_train_mode():
    left, clean = small_gpt2(dropout=0.5), small_gpt2()
    left.gradient_checkpointing_enable()  # in train mode it would also switch the KV cache off
    prompts, config = [[3, 4], [5]], update_settings(MAX_NEW_TOKENS=10, TEMPERATURE=1.0)
    draws = [generate(m, prompts, 4, config, 5, {2}) for m in (left.train(), clean)]
    assert draws[0] == draws[1]
    assert_close(our_update(left.train(), ragged_groups())[0], our_update(clean, ragged_groups())[0], 0, 0)


def test_L2_what_is_sampled_is_what_is_scored_the_full_softmax_at_the_temperature():
    model, draws = small_gpt2(), 20_000
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    p = grpo.token_logprobs(
        model, hidden.expand(23, -1), torch.arange(23), 0.7
    ).exp()  # as the loss sees it
    noise = (torch.arange(draws) + 0.5) / draws  # evenly spread: frequencies are exact to one draw
    drawn = grpo.sample_tokens(grpo.lm_head_logits(model, hidden).expand(draws, -1), noise, 0.7)
    assert_close(drawn.bincount(minlength=23) / draws, p, 1.5 / draws, 0)  # no top-k, no top-p


@pytest.mark.parametrize("max_rows", [None, 1, 9])
def test_L2_generate_equals_a_token_by_token_loop_with_the_same_noise(max_rows):
    model, eos_ids, steps, expected = small_gpt2(), {2, 7, 11}, 10, []
    prompts = [g.prompt for g in ragged_groups((2,) * 5)]
    for row, noise in enumerate(
        torch.rand(steps, 20, generator=torch.Generator().manual_seed(5)).T
    ):
        completion = []
        while len(completion) < steps and not eos_ids & set(completion):
            with torch.no_grad():
                logits = model(torch.tensor([prompts[row // 4] + completion])).logits[0, -1]
            below = torch.softmax(logits / 0.7, -1).cumsum(0) <= noise[len(completion)]
            completion.append(int(below.sum()))
        expected.append(completion)
    config = update_settings(MAX_NEW_TOKENS=steps)
    ours = generate(model, prompts, 4, config, 5, eos_ids, max_rows=max_rows)
    assert ours == [expected[i : i + 4] for i in range(0, 20, 4)]
    ends = {
        c[-1] for c in expected
    }  # a hard case: some end at once, some never, by several EOS ids
    assert min(map(len, expected)) == 1 and len(ends & eos_ids) > 1 and ends - eos_ids


# ======== Questions, rewards, tokens ======================================================================


def make_config(**environ) -> Config:
    return resolve_config(
        read_environment({"NODE_ID": "n", **{k: str(v) for k, v in environ.items()}})[0], {}, []
    )


def test_L3_no_two_nodes_rounds_or_stages_ask_the_same_and_a_resumed_node_repeats_itself():
    keys = [
        *itertools.product(
            ("n", "n1", "n11"), range(40), range(2), ("question", "external"), range(4)
        )
    ]
    ours, again, another = make_config(), make_config(NODE_ID="another"), make_config(SEED=43)
    seeds = [derive_seed(ours, *key) for key in keys]
    assert len(set(seeds)) == len(seeds) and not any(seed in HELD_OUT_SEEDS for seed in seeds)
    assert seeds == [derive_seed(again, *key) for key in keys], "no hidden state"
    assert not set(seeds) & {derive_seed(another, *key) for key in keys}


def test_L3_garbage_earns_nothing_where_the_verifier_alone_pays_a_little_for_nearly_anything():
    total, fraction = make_question("chain_sum", 1), make_question("fraction_simplification", 1)
    for question, text, exact, verifier in [
        (total, f"<answer>{total.answer}.00</answer>", 1, 1), (total, total.answer, 0, 0),
        (total, f"<answer>it is {total.answer}</answer>", 0, len(total.answer) / (6 + len(total.answer))),
        (total, f"<answer>{total.answer}</answer> or <answer>x</answer>", 0, 0),  # the last one counts
        (fraction, "<answer>1/999983</answer>", 0, 0.05), (fraction, "<answer>x</answer>", 0, 0.01),
        (make_question("propositional_logic", 1), "<answer>(P ∨ ¬P)</answer>", 0, 0.25),
    ]:  # fmt: skip
        assert [grpo.compute_reward(question, text, kind) for kind in ("exact", "verifier")] == [
            exact,
            verifier,
        ], text


@pytest.mark.parametrize("task", TASK_TABLE)
def test_L3_an_answer_is_never_evaluated_and_no_text_makes_scoring_fail(
    task, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    question, payload = make_question(task, 5), '__import__("os").system("touch PWNED")'
    texts = [
        payload,
        f"[{payload}]",
        payload + question.answer,
        "9" * 4000,
        "(" * 5000,
        "1/0",
        "\ud800",
    ]
    for text, kind in itertools.product(texts, ("exact", "verifier")):
        assert 0 <= grpo.compute_reward(question, f"<answer>{text}</answer>", kind) < 1, text
    assert grpo.compute_reward(question, "<answer>" * 16_000) == 0 and not os.listdir(tmp_path)


# ======== The shared folder ===============================================================================
def new_store(folder, owner="n1") -> DriveStore:
    store = DriveStore(folder, "x", owner)
    store.create()
    return store


def put(store, path, content=b"{}") -> Path:
    """Lay a file into the experiment by hand, as a stranger would."""
    path = store.experiment_dir / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def rollout_file(node="p", **changes) -> dict:
    """A rollout file with one group of two completions; changes wherever there is a field of that name."""
    completions = [
        {"response": "<answer>1</answer>", "reward": 0.5, "finished": True} for _ in range(2)
    ]
    group = {"task": "gcd", "seed": 1, "prompt": "?", "answer": "1", "completions": completions}
    data = {
        "format": 1,
        "peer_id": node,
        "round": 1,
        "stage": 0,
        "timestamp": 1.0,
        "rollouts": {"0": group},
    }
    for place, field in itertools.product((data, group, completions[1]), changes):
        place |= {field: changes[field]} if field in place else {}
    return data


def contents(folder) -> dict:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()
    }


def dies_before_file_call(nth, work) -> bool:
    """work() in a forked child that is gone before its nth call to the file system, if there are so many."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    calls, names = itertools.count(1), "open mkdir write flush fsync link replace unlink".split()

    def profile(frame, event, function):
        if event == "c_call" and function.__name__ in names and next(calls) == nth:
            os._exit(9)

    sys.setprofile(profile)
    work()
    os._exit(0)


@pytest.mark.parametrize("links", [True, False])  # a storage may have no hard links
@pytest.mark.parametrize("once, old", [(0, b"{}"), (1, None), (1, b'{"a": 1}'), (1, b'{"torn')])
def test_F1_a_crash_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, once, old, links):
    """once: a complete file is never changed."""
    store, big, left_over = new_store(tmp_path), {"text": "x" * 50_000}, 0
    write, stays = store.write_once if once else store.write_atomic, once and old == b'{"a": 1}'
    monkeypatch.setattr(os, "link", os.link if links else Mock(side_effect=OSError("no links")))
    files, nth, died = len(contents(store.experiment_dir)), 0, True
    while died:
        path = put(store, "a.json", old or b"")
        if old is None:
            path.unlink()
        nth += 1
        died = dies_before_file_call(nth, lambda: write("a.json", big, fsync=True))
        now = path.read_bytes() if path.exists() else None
        assert now == old or (json.loads(now) == big and not stays), f"crash before call {nth}"
        left_over += len(contents(store.experiment_dir)) - files - (now is not None)
        new_store(tmp_path)
        assert len(contents(store.experiment_dir)) - files == (now is not None), (
            "the next start sweeps"
        )
    assert (now == old) == bool(stays) and left_over > 2


def test_F1_an_append_that_failed_half_way_is_made_again_and_a_torn_line_is_closed(tmp_path):
    store, limits = new_store(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    log = put(store, "logs/n1/log", b"one\nto")  # a kill tore the second line
    for _ in range(2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (13, limits[1]))
        with pytest.raises(OSError, match="too large"):
            store.append("logs/n1/log", "three\nfour\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert log.read_bytes() == b"one\nto\nthree\n", "half of it is there"
    store.append("logs/n1/log", "three\nfour\n")
    store.append("logs/n1/log", "five\n")
    assert log.read_text() == "one\nto\nthree\nfour\nfive\n"


def test_X3_a_strangers_broken_file_is_a_rejection_with_a_reason_and_costs_no_time(tmp_path):
    store, path, began = (
        new_store(tmp_path),
        "rollouts/round_000001/stage_0/p.json",
        time.monotonic(),
    )
    for content in [
        b"", b"[]", b'{"a": NaN}', b'{"torn', b'{"a":' * 99_999, b'{"a": "\\ud800"}', b" " * 9_000_000,
        b'{"a": [' + b"[]," * 500_000 + b"[]]}", rollout_file("q"), rollout_file(round=2), rollout_file(rollouts=[]),
        rollout_file(task=1), rollout_file(seed=2**53), rollout_file(prompt="x" * 40_000), rollout_file(finished=1),
        rollout_file(completions=[{"response": "", "finished": True}] * 65), rollout_file(response=None),
    ]:  # fmt: skip
        put(store, path, content)
        with pytest.raises(InvalidFileError, match=r"\w+ \w+"):
            store.fetch_rollouts(1, 0, "p")
    assert time.monotonic() - began < 2
    put(store, path, {**rollout_file(), "new": 1})  # keys of a newer writer do no harm
    assert [group["key"] for group in store.fetch_rollouts(1, 0, "p")] == [(1, 0, "p", 0)]


@pytest.mark.parametrize("planted", ["link", "fifo", "folder", "folder that is a link"])
def test_X2_no_link_is_followed_and_what_lies_in_a_writers_way_makes_room(tmp_path, planted):
    thesis, home = put(DriveStore(tmp_path, None), "home/n1.json", {"thesis": 1}), tmp_path / "home"
    for kind, call in {
        "read": lambda store, path: store.read_json(path),
        "written": lambda store, path: store.write_atomic(path, {"a": 1}),
        "written once": lambda store, path: store.write_once(path, {"a": 1}),
        "appended": lambda store, path: store.append(path, "{}\n"),
        "deleted": lambda store, path: store.delete(path),
        "rollouts": lambda store, path: store.prune_rollouts(9, archive=False),
    }.items():  # fmt: skip
        store, name = new_store(tmp_path / kind), f"{kind}/round_000000/n1.json"
        path = put(store, name)
        path.unlink()
        if planted == "folder that is a link":
            path.parent.rmdir()
            path.parent.symlink_to(home)
        else:
            {"fifo": os.mkfifo, "folder": os.mkdir}.get(planted, lambda p: p.symlink_to(thesis))(
                path
            )
        with suppress(InvalidFileError) if kind in ("read", "deleted") else nullcontext():
            assert bool(call(store, name)) == (kind == "written once")
        assert contents(home) == {"n1.json": b'{"thesis": 1}'}, kind
        assert (path.is_file() and not path.resolve() == thesis) == kind.startswith(
            ("written", "appended")
        )


def test_F1_copies_and_strays_are_in_no_listing_and_the_clock_is_names_alone(tmp_path):
    store = new_store(tmp_path)
    session = store.register(["n1"], "worker", {})
    store.open_round(2, "n1")
    store.submit_reward(2, 0, "n1", {"reward": 0.5})
    strays = [
        "n1 (1).json",
        ".n3.json",
        "n4.json.tmp",
        f"n1.{session} (1).json",
        "round_000007.n1 (1).json",
    ]
    for place, name in itertools.product(
        ("rewards/round_000002/stage_0", "peers", "state/rounds"), strays
    ):
        put(store, f"{place}/{name}")
    assert store.list_nodes("rewards", 2, 0) == ["n1"] and store.latest_sessions() == {
        "n1": session
    }
    put(store, "state/rounds/round_000003.n2.json", b"torn")  # what is in it does not matter
    assert store.current_round() == 3


def test_F6_ones_own_damaged_or_older_state_is_an_error_and_is_left_as_it_was(tmp_path):
    assert [
        new_store(tmp_path).load_or_create_config({"SEED": seed})["SEED"] for seed in (1, 2)
    ] == [1, 1]
    damaged, older = new_store(tmp_path / "damaged"), new_store(tmp_path / "older")
    put(damaged, "config.json", b'{"SEED": ')
    put(older, "rollouts/round_5/n1.json")  # of the program before this one
    for store in (damaged, older):
        before = contents(store.experiment_dir)
        with pytest.raises(StoreError, match="EXPERIMENT_NAME"):
            store.load_or_create_config({"SEED": 2})
        assert before.items() <= contents(store.experiment_dir).items()


# ======== Waiting for the folder ==========================================================================
def test_F2_a_node_waits_for_the_folder_says_so_once_and_keeps_the_order(tmp_path, monkeypatch):
    """The folder is away for 20 s of a clock that only sleeping moves."""
    store, away, events, now = new_store(tmp_path), tmp_path / "away", [], [0.0]
    patient = RetryingStore(
        store, lambda kind, text: events.append(kind), SimpleNamespace(requested=0)
    )
    patient.append("logs/n1/order", "start\n")

    def sleep(seconds):
        now[0] += seconds
        if now[0] >= 20 and away.exists():
            away.rename(store.experiment_dir)

    monkeypatch.setattr(drive_store, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    store.experiment_dir.rename(away)
    for i in range(3):
        patient.append("logs/n1/order", f"{i}\n")
        assert patient.write_once(f"{i}.json", {"i": i})
    assert 20 <= now[0] <= 25.5, "pauses grow to 5 s at most"
    assert (store.experiment_dir / "logs/n1/order").read_text().split() == ["start", "0", "1", "2"]
    assert [patient.read_json(f"{i}.json") for i in range(3)] == [{"i": i} for i in range(3)]
    assert events == ["outage", "outage over"]


def test_F2_an_absent_file_is_an_answer_and_a_stop_ends_the_waiting(tmp_path):
    store, events, stop = new_store(tmp_path), [], SimpleNamespace(requested=0)
    patient = RetryingStore(store, lambda *event: events.append(event), stop)
    assert (
        patient.read_json("none/at all") is None
        and patient.list_names("none") == []
        and patient.current_round() == -1
    )
    assert (
        patient.existing_file("none") is None
        and patient.delete("none/at all") is None
        and events == []
    )
    store.experiment_dir.rename(tmp_path / "away")
    stop.requested = 1
    for call in (
        lambda: patient.read_json("none"),
        lambda: patient.list_names("none"),
        lambda: patient.write_atomic("a", {}),
    ):
        pytest.raises(KeyboardInterrupt, call)
    assert not store.experiment_dir.exists(), "made anew on the local disk"


# ======== Settings ========================================================================================

# Variables that take more than any word: (a good value, a bad one, what the message says)
CHECKED = {
    "TASKS": ("gcd,bf", "gdc", "did you mean gcd?"), "EXPERIMENT_NAME": ("e-1", "a/b", "letters"),
    "NODE_ID": ("n.1", "../n", "letters"), "DEVICE": ("cpu", "gpu", "this machine has"),
    "GDRIVE_PATH": ("here", "/no/such/folder", "parent directory"),
}  # fmt: skip


def config_error(**environ) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_config(read_environment(environ)[0], {}, [])
    return str(caught.value)


@pytest.mark.parametrize("spec", fields(Config), ids=lambda spec: spec.name)
def test_U1_a_bad_value_is_refused_by_name_value_and_what_is_allowed(spec):
    allowed, (text, wrong, hint) = (
        spec.metadata["allowed"],
        CHECKED.get(spec.name, ("some-name", None, "")),
    )
    good, bad = {text: text}, [wrong] if wrong else []
    if spec.type is bool:  # bool("False") is True
        good = {"False": False, "0": False, " yes ": True, "TRUE": True}
        bad, hint = ["maybe", "2"], "True or False"
    elif spec.type in (int, float):
        low, high = allowed
        good, hint = {text: spec.type(text) for text in (str(max(1, low)), str(high))}, "expected"
        bad = ["many", "nan", str(low - 1), str(high + 1)]
    elif allowed:
        good = {word: word for word in allowed.split() if word != "auto"}
        bad, hint = ["no such"], allowed.split()[-1]
    for text, value in good.items():
        found = getattr(make_config(**{spec.name: text}), spec.name)
        assert found == value and type(found) is spec.type
    for text in bad:
        message = config_error(**{spec.name: text})
        assert spec.name in message and text in message and hint in message, message


def test_U1_all_mistakes_are_reported_together_and_a_blank_value_counts_as_unset():
    mistakes = dict(SEED="x", TEST_MODE="maybe", LOSS_TYPE="ppo", NODE_ID="../x", TASKS="gdc")
    assert all(text in config_error(**mistakes) for text in (*mistakes, *mistakes.values()))
    assert make_config(**{f.name: " " for f in fields(Config) if f.name != "NODE_ID"}) == make_config()


def test_U1_near_misses_are_named_with_the_correction_and_other_programs_variables_are_not():
    names, right = (
        {spec.name for spec in fields(Config)},
        {"EXPERIMENT_NAME": "x", "GDRIVE_PATH": "x"},
    )
    slips = {name[:-1]: name for name in names if len(name) > 6 and name[:-1] not in names}
    slips |= {"LR": "LEARNING_RATE", "node_role": "NODE_ROLE"}
    said = {
        text.split()[0]: text
        for text in read_environment({**dict.fromkeys(slips, "4"), **right})[1]
    }
    assert said.keys() == slips.keys() and all(
        f"mean {slips[name]}?" in said[name] for name in slips
    )
    for name in right:  # to go on would put this node into another experiment
        assert f"mean {name}?" in config_error(**{name[:-1]: "mine"})
    others = ("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "NODE_OPTIONS", "PYTHONHASHSEED")
    assert read_environment({**dict.fromkeys(others, "x"), "MODEL_NAME": "tiny"})[1] == []


# ======== Whole swarms in this process, judged by the files that they leave ===============================

TASKS = ["small_products", "small_count_bits"]
SMALL = {
    "MODEL_NAME": "tiny", "TASKS": ",".join(TASKS), "WARM_START_STEPS": 300, "ANSWER_TAG_SHARE": 0.3,
    "LOCAL_NODES": 2, "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4,
    "MAX_ROUNDS": 6, "CHECKPOINT_INTERVAL": 2, "FETCH_TIMEOUT_SECONDS": 0.1, "LEARNING_RATE": 0.0006,
}  # fmt: skip
UNTRAINED = {
    "WARM_START_STEPS": 0
}  # never right: own groups are flat, so what is learned comes from peers


@pytest.fixture(scope="session")
def drive(tmp_path_factory):
    return tmp_path_factory.mktemp(
        "drive"
    )  # its warm start is made by the first run and used by all others


@pytest.fixture(scope="session")
def unbroken(drive):
    assert run_swarm(drive, "unbroken") == 0
    return drive / "experiments" / "unbroken"


def run_swarm(drive, name, **settings) -> int:
    """Run sapo.main with SMALL and these settings; returns its exit status."""
    return sapo.main({"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name} | SMALL | settings)


def read_rewards(drive, name, node="") -> list[dict]:
    """The reward files of an experiment, by round, stage and node."""
    paths = sorted(drive.glob(f"experiments/{name}/rewards/*/*/{node}*.json"))
    return [json.loads(path.read_text()) for path in paths]


def outcome_of(drive, name) -> tuple:
    """All rewards, and the last checkpoint's bytes: weights, optimizer, totals, externals used."""
    rewards = [(row["round"], row["node_id"], row["reward"]) for row in read_rewards(drive, name)]
    return rewards, max(drive.glob(f"experiments/{name}/checkpoints/*/*")).read_bytes()


def read_events(drive, name, kind) -> list[dict]:
    path = drive / "experiments" / name / "logs/node/training_events.jsonl"
    return [
        row for line in path.read_text().splitlines() if kind in (row := json.loads(line))["event"]
    ]


def used_external_keys(drive, name, round_=5) -> set:
    path = drive / f"experiments/{name}/checkpoints/round_{round_:06d}/node.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        return set(map(tuple, json.loads(file.metadata()["about"])["nodes"]["node_0"]["trained"]))


def write_peer(drive, name, peer, groups, round_=0, **changes) -> None:
    """What any program or human can do: put a rollout file into the folder."""
    changes = {
        "round": round_,
        "rollouts": {str(i): group for i, group in enumerate(groups)},
        **changes,
    }
    put(
        DriveStore(drive, name),
        f"{round_dir('rollouts', round_, 0)}/{peer}.json",
        rollout_file(peer, **changes),
    )


def group_by_hand(seed, task=TASKS[0], right=1, **changes) -> dict:
    """Four completions, the first `right` of them correct, whatever their rewards claim."""
    question = make_question(task, seed)
    texts = [f"<answer>{question.answer}</answer>"] * right + ["<answer>no</answer>"] * (4 - right)
    completions = [
        {"response": text, "reward": i % 2, "finished": True} for i, text in enumerate(texts)
    ]
    about = {"task": task, "seed": seed, "prompt": question.text, "answer": question.answer}
    return {**about, "completions": completions, **changes}


def at_call(monkeypatch, step, number, action) -> None:
    """Do `action` just before the `number`th call (from 1) of one of the steps of `sapo.train`."""
    original, calls = getattr(sapo, step), itertools.count(1)
    monkeypatch.setattr(
        sapo, step, lambda *args: (next(calls) == number and action(), original(*args))[1]
    )


def test_L6_a_swarm_learns_far_beyond_noise(drive):
    """Mean reward of the last third of the rounds minus the first: 0.21 to 0.28 with six seeds."""
    sizes = dict(LOCAL_NODES=4, NUM_TRAIN_SAMPLES=4, NUM_TRANSPLANT_TREES=4, NUM_GENERATIONS=8)
    assert run_swarm(drive, "learns", **sizes, MAX_ROUNDS=24, CHECKPOINT_INTERVAL=100) == 0
    rewards = [row["reward"] for row in read_rewards(drive, "learns")]
    assert len(rewards) == 4 * 24 and sum(rewards[-32:]) / 32 - sum(rewards[:32]) / 32 > 0.12


def test_L4_external_groups_change_the_weights_even_where_all_own_groups_are_flat(drive):
    write_peer(drive, "taught", "human", [group_by_hand(1), group_by_hand(2, TASKS[1])])
    names = ("alone", "taught")
    assert [run_swarm(drive, name, MAX_ROUNDS=1, **UNTRAINED) for name in names] == [0, 0]
    alone, taught = (read_rewards(drive, name)[0] for name in names)
    assert alone["informative_groups"] == alone["grad_norm"] == alone["trained_tokens"] == 0
    assert (
        taught["external_groups"] == taught["informative_groups"] == 2 and taught["grad_norm"] > 0
    )
    assert alone["reward"] == taught["reward"] == 0, (
        "a node's reward is that of its own completions"
    )
    load, start = AutoModelForCausalLM.from_pretrained, flat_weights(grpo.build_tiny_model(TASKS)[0])
    ends = [flat_weights(load(drive / f"experiments/{name}/models/node_0")) for name in names]
    assert [torch.equal(end, start) for end in ends] == [True, False]


def test_L5_local_nodes_repeat_bit_for_bit_and_never_ask_a_question_twice(drive, unbroken):
    assert run_swarm(drive, "again") == 0
    assert outcome_of(drive, "again") == outcome_of(drive, "unbroken")
    assert len({row["reward"] for row in read_rewards(drive, "again")}) > 2, (
        "there is something to learn from"
    )
    files = [
        json.loads(path.read_text())["rollouts"] for path in unbroken.glob("rollouts/*/*/*.json")
    ]
    seeds = [group["seed"] for groups in files for group in groups.values()]
    assert len(seeds) == len(set(seeds)) == 2 * 6 * 2


@pytest.mark.parametrize(
    "step", ["publish_groups", "policy_gradient", "submit_reward", "save_checkpoint"]
)
def test_F3_a_killed_run_goes_on_as_if_nothing_had_happened(drive, unbroken, monkeypatch, step):
    """Optimizer, totals, used externals, place in the stream: if any were lost, some number would differ."""
    name = f"killed_in_{step}"
    with (
        monkeypatch.context() as patch,
        pytest.raises(SystemExit),
    ):  # nothing in the program handles it
        at_call(patch, step, 2 if step == "save_checkpoint" else 6, sys.exit)
        run_swarm(drive, name)
    published = contents(drive / "experiments" / name / "rollouts")
    assert run_swarm(drive, name) == 0
    assert [event["round"] for event in read_events(drive, name, "resume")] == [1]
    assert outcome_of(drive, name) == outcome_of(drive, "unbroken")
    assert published.items() <= contents(drive / "experiments" / name / "rollouts").items()


@pytest.mark.parametrize("step, call, done", [("finish_round", 3, 2), ("publish_groups", 8, 3)])
def test_U2_a_stop_prints_a_line_that_goes_on(
    drive, unbroken, monkeypatch, capfd, step, call, done
):
    name = f"stopped_in_{step}"
    with monkeypatch.context() as patch:
        at_call(patch, step, call, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run_swarm(drive, name) == 130
    line = capfd.readouterr().out.split("to go on:\n")[1].split("python sapo.py")[0]
    assert (drive / f"experiments/{name}/checkpoints/round_{done:06d}/node.safetensors").exists()
    assert sapo.main(dict(word.split("=", 1) for word in line.split())) == 0
    assert outcome_of(drive, name) == outcome_of(drive, "unbroken")


def test_F6_a_joining_node_takes_the_swarms_settings_and_one_that_disagrees_is_refused(
    drive, capfd
):
    alone = dict(LOCAL_NODES=1, MAX_ROUNDS=2, SEED=7, NODE_ID="first", **UNTRAINED)
    assert run_swarm(drive, "joined", **alone) == 0 and capfd.readouterr()
    assert (
        sapo.main(three := dict(GDRIVE_PATH=drive, EXPERIMENT_NAME="joined", NODE_ID="second")) == 0
    )
    (row,) = read_rewards(drive, "joined", "second")
    assert (row["round"], row["completions"]) == (1, 8), (
        "it goes on with the clock's round, and I x G"
    )
    assert "from the experiment: SEED=7" in capfd.readouterr().out
    before = contents(drive / "experiments/joined")
    for name, value in dict(SEED=8, TASKS="gcd", REWARD="verifier", MAX_STAGES=2).items():
        assert sapo.main({**three, name: value, "NODE_ID": "third"}) == 2
        assert f"{name}=" in capfd.readouterr().out
    assert contents(drive / "experiments/joined") == before


def test_X4_strangers_are_verified_and_lies_gain_nothing(drive):
    lies = [group_by_hand(seed, right=0, answer="no") for seed in range(10, 14)]
    for peer, groups, changes in [
        ("human", [group_by_hand(1), group_by_hand(2, TASKS[1], right=3)], {}), ("liar", lies, {}),
        ("flood", [group_by_hand(seed) for seed in range(100, 600)], {}),
        ("rewriter", [group_by_hand(20, prompt="What is 1 + 1?")], {}),
        ("cheat", [group_by_hand(HELD_OUT_SEEDS.start + 5)], {}),
        ("foreign", [group_by_hand(30, "small_gcd")], {}), ("broken", [group_by_hand(40, prompt=1)], {}),
        ("impostor", [group_by_hand(50)], {"peer_id": "human"}),
    ]:  # fmt: skip
        write_peer(drive, "strangers", peer, groups, **changes)
    settings = dict(
        NUM_TRANSPLANT_TREES=100, ROLLOUT_MAX_AGE=3, CHECKPOINT_INTERVAL=1, CHECKPOINT_KEEP=9
    )
    assert run_swarm(drive, "strangers", **settings, **UNTRAINED) == 0
    rows, used = read_rewards(drive, "strangers", "node_0"), used_external_keys(drive, "strangers", 0)
    assert Counter(key[2] for key in used) == {"human": 2, "flood": 2}, "a fair share is I = 2"
    assert [row["external_groups"] for row in rows] == [4, 2, 2, 2, 0, 0], (
        "old ones fill gaps for a while"
    )
    assert len(used_external_keys(drive, "strangers", 3)) == 10, "and no group is trained on twice"
    assert (rows[0]["rejected"], rows[0]["reward"]) == (5, 0)
    reasons = dict(
        event["text"].split(": ", 1) for event in read_events(drive, "strangers", "reject")
    )
    expected = dict(
        rewriter="prompt", cheat="held-out", foreign="task", broken="not a string", impostor="path"
    )
    assert reasons.keys() == expected.keys() and all(
        expected[peer] in reasons[peer] for peer in reasons
    )


def test_L4_peers_are_drawn_at_random_never_the_first_of_the_listing(drive):
    for peer, round_ in itertools.product("abcdefghijkl", range(6)):
        write_peer(drive, "listing", peer, [group_by_hand(1000 * round_ + ord(peer))], round_)
    settings = dict(FETCH_MAX_PEERS=2, ROLLOUT_MAX_AGE=100, NUM_TRANSPLANT_TREES=1, **UNTRAINED)
    assert run_swarm(drive, "listing", **settings) == 0
    assert {key[2] for key in used_external_keys(drive, "listing")} - {"a", "b"}


def test_L2_own_rollouts_are_trained_on_with_the_ids_that_were_sampled(drive, monkeypatch):
    """Decoded and encoded again they would differ: "<answer>" is one token, but eight when spelled."""
    tokenizer, trained = grpo.build_tiny_model(TASKS)[1], []
    spelled = [*tokenizer.convert_tokens_to_ids([*"<answer>5"]), tokenizer.eos_token_id]
    assert len(tokenizer("<answer>5").input_ids) == 2
    update = grpo.update_policy
    monkeypatch.setattr(
        grpo, "generate", lambda _, prompts, g, *__, **___: [[spelled] * g for _ in prompts]
    )
    monkeypatch.setattr(grpo, "update_policy", lambda *a: trained.extend(a[2]) or update(*a))
    assert run_swarm(drive, "spelled", MAX_ROUNDS=1, NUM_TRANSPLANT_TREES=0, **UNTRAINED) == 0
    assert len(trained) == 4 and all(group.completions == [spelled] * 4 for group in trained)


def test_X4_the_access_token_is_shown_nowhere_and_a_failing_hub_stops_nothing(
    drive, monkeypatch, capsys
):
    given = {"HUGGINGFACE_ACCESS_TOKEN": (secret := "hf_0123456789abcdefSECRET")}
    monkeypatch.setattr(
        "huggingface_hub.HfApi.whoami", Mock(side_effect=OSError(f"401 for token {secret}"))
    )
    assert run_swarm(drive, "hub", **given, MAX_ROUNDS=2, **UNTRAINED) == 0
    assert "push failed" in str(read_events(drive, "hub", "hub"))
    config = make_config(**given)
    shown = [
        repr(config),
        sapo.format_config(config, given),
        sapo.resume_command(config, given),
        *capsys.readouterr(),
    ]
    shown += [config_error(**given, SEED="x"), str(contents(drive / "experiments/hub"))]
    assert all(shown[:2]) and not any(secret[:12] in text for text in shown)


def test_U5_U8_readers_change_nothing_and_the_final_model_is_an_ordinary_folder(
    drive, unbroken, capfd
):
    before, given = contents(unbroken), dict(GDRIVE_PATH=drive, EXPERIMENT_NAME="unbroken")
    for role, said in (("validate", "passed"), ("monitor", "round 5 of 6"), ("report", "2/2")):
        assert sapo.main({**given, "NODE_ROLE": role}) == 0 and said in capfd.readouterr().out, role
    assert contents(unbroken) == before
    model = AutoModelForCausalLM.from_pretrained(unbroken / "models/node_0")
    assert len(AutoTokenizer.from_pretrained(unbroken / "models/node_0")) == model.config.vocab_size


# ======== Shape of the code: the rules that let four files become one notebook cell =======================

MODULES = (
    "drive_store",
    "grpo",
    "coordinator",
    "sapo",
)  # the order in which they are pasted into one cell
TEXTS = {name: Path(sapo.__file__).with_name(f"{name}.py").read_text() for name in MODULES}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}
NODES = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]


def bound_names(tree) -> list[str]:
    """Names that a module defines at its top level, the guarded import of its siblings aside."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.If) and "DriveStore" in ast.unparse(node.test):
            continue
        else:
            comprehensions = [n for n in ast.walk(node) if isinstance(n, ast.comprehension)]
            local = {inner for n in comprehensions for inner in ast.walk(n.target)}
            for inner in ast.walk(node):
                is_bound = isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
                if is_bound and inner not in local:
                    names.append(inner.id)
    return names


def test_U9_pasted_into_one_cell_they_compile_and_no_name_means_two_things():
    compile("\n".join(TEXTS.values()), "one_cell", "exec")

    # Each name is defined by one module only.
    owner = {}
    for module, tree in TREES.items():
        for name in bound_names(tree):
            assert owner.setdefault(name, module) == module, f"{name}: {owner[name]}, {module}"

    # An imported name means one thing, and none that a module defines. The project's own modules
    # are imported as modules.
    imported = {}
    for module, node in NODES:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        source = getattr(node, "module", None)
        assert source not in MODULES, f"{module}.py: from {source} import …"
        for each in node.names:
            name = each.asname or each.name
            assert imported.setdefault(name, (source, each.name)) == (source, each.name), name
            assert name not in owner, f"two things: {name}"


def test_U9_one_main_guard_last_and_nothing_that_fails_in_a_notebook_or_runs_a_strangers_text():
    *_, main, guard = TREES["sapo"].body
    assert [n for _, n in NODES if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test)] == [
        guard
    ]
    may_read = {*ast.walk(main), *ast.walk(guard)}
    never = "__file__ argparse __future__ subprocess pickle torch.load os.system eval exec compile input"
    for name, node in NODES:
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        assert not {text, getattr(node, "module", ""), getattr(node, "name", "")} & {
            *never.split()
        }, name
        assert text not in ("os.environ", "os.getenv") or node in may_read, name
