"""Statistical tests of the questions, groups and tokens that are drawn (L2, L3, L4), and of the
verdict (U3). They compare the observed shares with the guaranteed shares.

The threshold is computed as follows. Suppose that k of n independent draws have a property whose
probability is p. With surprise(k, n, p) = n KL(k/n || p), in nats, Chernoff's bound holds for any n
and p, even for rare properties:

    P(surprise(k, n, p) >= x) <= 2 exp(-x)

If p is unknown, it is estimated from a second sample, in which j of m draws have the property. Both
samples are compared with their pooled share q = (k + j) / (n + m). The sum of the two surprises is
no larger than it would be with the true p, so the probability that it reaches x is at most
(1 + y) exp(-y), where y = x - 2 log 2. At LIMIT, the two bounds are 2e-13 and 1.2e-11. A test
checks about a thousand shares, so it fails by chance less than once in ten million runs. A share
exceeds LIMIT if it is off by about eight standard deviations.
"""

import functools
import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy
import pytest
import torch

import coordinator
import grpo
import sapo

from common import read_log, run
from drive_store import At
from test_sapo import group_by_hand, make_config, our_generate, small_codec
from test_sapo import small_gpt2, update_settings, write_peer

LIMIT = 30  # nats
PER_TASK = 500  # questions per task in a multi-task run; a task on its own gets three times as many


def surprises(counts: dict, total: int, chances: dict) -> Counter:
    """Return each outcome's surprise, in nats. It is infinite if an impossible outcome occurs."""
    found = Counter()
    for outcome in {*counts, *chances}:
        count, chance = counts.get(outcome, 0), chances.get(outcome, 0.0)
        for seen, share in ((count, chance), (total - count, 1 - chance)):
            if seen > 0:
                found[outcome] += seen * math.log(seen / (total * share)) if share else math.inf
    return found


def assert_no_surprise(found: Counter) -> None:
    assert max(found.values()) < LIMIT, f"largest surprises, in nats: {found.most_common(5)}"


# -------- Questions -------------------------------------------------------------------------------
# Only the text of questions is compared, because a model sees only the text.


def count_properties(texts: list[str]) -> Counter:
    """Count how many of these questions have each property.

    The properties are the length, the lowercase words (which show the kind of question), how many
    numbers there are (terms, cells), and the last three numbers (operands, bases, sizes).
    """
    counts = Counter()
    for text in texts:
        counts["length in twenties", len(text) // 20] += 1
        counts["words", *re.findall(r"\b[a-z]+\b", text)] += 1
        numbers = [int(digits) for digits in re.findall(r"\d+", text)]
        counts["numbers", len(numbers)] += 1
        for place, number in enumerate(numbers[-3:], start=-min(3, len(numbers))):
            size = number if number < 32 else f"{number.bit_length()} bits"
            counts["number", place, size] += 1
    return counts


def letters(text: str, add_special_tokens=True) -> SimpleNamespace:
    """Tokenize a text into its characters."""
    return SimpleNamespace(input_ids=list(text))


letters.chat_template = None


def make_run(tasks, seed: int) -> SimpleNamespace:
    """Return a minimal Run that draws questions, with two nodes and no limit on prompt length."""
    codec = small_codec()
    codec.tokenizer, codec.max_prompt = letters, 10**6
    nodes = [SimpleNamespace(id=name) for name in ("anna", "bob")]
    return SimpleNamespace(
        config=make_config(TASKS=",".join(tasks), SEED=seed), codec=codec, nodes=nodes
    )


def in_training(run, total: int) -> list:
    """Return the questions that the nodes train on, over rounds of two stages."""
    questions = []
    for round_, stage, node in itertools.product(range(total), (0, 1), run.nodes):
        if len(questions) < total:
            questions += sapo.sample_batch(run, node, At(round_, stage))
    return questions


def held_out(run, total: int) -> list:
    """Return the questions of a held-out evaluation."""
    run.config = replace(run.config, EVAL_SAMPLES=total)
    with patch.object(sapo, "answer_questions", return_value=[]) as answer:
        sapo.held_out_accuracy(run, run.nodes[0], 0)
    return answer.call_args.args[2]


def in_samples(run, total: int) -> list:
    """Return the questions of the sample answers, of which each experiment has two."""
    questions = []
    for seed in range(run.config.SEED, run.config.SEED + total // 2):
        run.config = replace(run.config, SEED=seed)
        with patch.object(sapo, "answer_questions", return_value=[]) as answer:
            sapo.sample_answers(run)
        questions += answer.call_args.args[2]
    return questions


def in_prompts(run, total: int) -> list:
    """Return the few-shot example in the prompt of each training question."""
    run.codec.num_shots = 1
    examples = []
    for question in in_training(run, total):
        prompt = "".join(run.codec.encode_prompt(question))
        example, rest = prompt.split("\n<answer>")
        assert rest.endswith(f"</answer>\n\n{question.text}\n")
        examples.append(SimpleNamespace(task=question.task, text=example))
    return examples


WAYS = (in_training, held_out, in_samples, in_prompts)
MIXTURES = {"paper": grpo.PAPER_TASKS, "tiny": grpo.TINY_TASKS}


@functools.cache
def asked(way, *tasks: str) -> dict[str, list[str]]:
    """Return {task: the texts of its questions} in a multi-task run with these tasks."""
    texts = {}
    for question in way(make_run(tasks, seed=1000), PER_TASK * len(tasks)):
        texts.setdefault(question.task, []).append(question.text)
    return texts


@functools.cache
def asked_alone(task: str) -> list[str]:
    """Return the texts of a task's questions in a run with no other task."""
    return [question.text for question in in_training(make_run([task], seed=1), 3 * PER_TASK)]


@pytest.mark.parametrize("tasks", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("way", WAYS)
def test_L3_in_a_mixture_each_tasks_questions_are_distributed_as_the_tasks_own(way, tasks):
    found = Counter()
    for task, texts in asked(way, *tasks).items():
        samples = [(count_properties(each), len(each)) for each in (texts, asked_alone(task))]
        (ours, total), (theirs, their_total) = samples
        shares = {x: n / (total + their_total) for x, n in (ours + theirs).items()}
        for counts in samples:
            for name, nats in surprises(*counts, shares).items():
                found[task, *name] += nats
    assert_no_surprise(found)


@pytest.mark.parametrize("way", WAYS)
def test_L3_in_a_mixture_each_line_of_ones_own_file_is_asked_equally_often(way, tmp_path):
    all_lines = {f"What is {i} + {i}?" for i in range(20)}
    rows = [json.dumps({"question": line, "answer": "1"}) for line in sorted(all_lines)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))

    # Two lines are held out, and only an evaluation uses them.
    tasks = (*grpo.TINY_TASKS, f"file:{tmp_path}/mine.jsonl")
    (own,) = make_run(tasks[-1:], seed=1).config.tasks
    lines = {*asked(in_training, *tasks)[own]}
    assert len(lines) == 18
    if way is held_out:
        lines = all_lines - lines

    texts = asked(way, *tasks)[own]
    assert {*texts} == lines
    assert_no_surprise(surprises(Counter(texts), len(texts), dict.fromkeys(lines, 1 / len(lines))))


@pytest.mark.parametrize("tasks", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("way", WAYS)
def test_L3_each_task_of_a_mixture_is_asked_equally_often(way, tasks):
    counts = {task: len(texts) for task, texts in asked(way, *tasks).items()}
    chances = dict.fromkeys(tasks, 1 / len(tasks))
    assert_no_surprise(surprises(counts, sum(counts.values()), chances))


def test_L3_seeds_of_nodes_rounds_stages_and_purposes_never_coincide():
    """With 90,000 random numbers below 2**52, a collision has a chance of less than 1e-6."""
    nodes = ("", "n", "n1", "n11", "1", "n_1")
    rounds = (*range(120), *range(1110, 1140))
    purposes = ("question", "generate", "external", "held-out", "sample")
    config = make_config()
    seeds = []
    for node, round_, stage, purpose in itertools.product(nodes, rounds, range(4), purposes):
        at = At(round_, stage)
        seeds += [sapo.derive_seed(config, node, at, purpose, i) for i in (0, 1, 2, 10, 11)]
    assert len(seeds) == len({*seeds}) == 90_000

    # Among the questions that are asked, only an evaluation's questions have held-out seeds.
    for way in WAYS[:3]:
        seeds = {question.seed for question in way(make_run(["small_gcd"], seed=1), 400)}
        assert len(seeds) == 400
        assert {seed in grpo.HELD_OUT_SEEDS for seed in seeds} == {way is held_out}


# -------- External groups and tokens --------------------------------------------------------------


def test_L4_each_group_of_the_peers_is_drawn_equally_often(tmp_path):
    """In each round, three peers publish six groups with different rewards, and each of 24 nodes
    draws three of them. The nodes generate no groups themselves (I = 0)."""
    tasks = ("small_products", "small_gcd", "small_lcm")
    for round_, (number, peer) in itertools.product(range(20), enumerate("abc", start=1)):
        groups = []
        for right, task in enumerate(tasks[:number], start=1):
            groups.append(group_by_hand(1000 * round_ + 10 * number + right, task, right))
        write_peer(tmp_path, "default", peer, groups, round_)

    settings = {
        "NODE_ID": "n", "LOCAL_NODES": 24, "MAX_ROUNDS": 20, "TASKS": ",".join(tasks),
        "NUM_TRAIN_SAMPLES": 0, "NUM_TRANSPLANT_TREES": 3, "ROLLOUT_MAX_AGE": 0,
        "FETCH_MAX_PEERS": 100, "FETCH_TIMEOUT_SECONDS": 0, "CHECKPOINT_INTERVAL": 100,
    }  # fmt: skip
    assert run(tmp_path, settings) == 0
    rows = [row for node in range(24) for row in read_log(tmp_path, f"n_{node}")]
    drawn = Counter((peer, task) for row in rows for peer, task in row["teachers"])
    assert len(drawn) == 6
    assert_no_surprise(surprises(drawn, 24 * 20, dict.fromkeys(drawn, 3 / 6)))


def test_L4_each_peer_is_chosen_equally_often():
    """Each of twenty nodes chooses three of twelve peers. The rounds are far apart, because the
    choice stays the same for five rounds."""
    peers = [f"peer_{i}" for i in range(12)]
    run = SimpleNamespace(config=make_config(FETCH_MAX_PEERS=3))
    nodes = [SimpleNamespace(id=f"n{i}") for i in range(20)]
    chosen = Counter()
    for node, round_ in itertools.product(nodes, range(0, 5000, 50)):
        chosen.update(sapo.choose_peers(run, node, At(round_), [node.id, *peers]))
    assert_no_surprise(surprises(chosen, 20 * 100, dict.fromkeys(peers, 3 / 12)))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_L2_sampled_tokens_follow_the_softmax_at_the_temperature(temperature):
    """Compare the first token, and the second token after each first token, with the model's own
    probabilities. A wrong temperature changes each token's share only a little, but changes the
    shares of all likely tokens in the same direction. At a temperature of 0.7, the test detects an
    error of 5%."""
    model = small_gpt2()
    config = update_settings(MAX_NEW_TOKENS=2, TEMPERATURE=temperature)
    (completions,) = our_generate(model, [[3, 1, 4]], 100_000, config, 7, eos_ids={2})
    next_tokens = {}
    for ids in completions:
        assert len(ids) == 2 or ids == [2]
        for i, token in enumerate(ids):
            next_tokens.setdefault(tuple(ids[:i]), []).append(token)

    found = Counter()
    for beginning, tokens in next_tokens.items():
        with torch.no_grad():
            logits = model(torch.tensor([[3, 1, 4, *beginning]])).logits[0, -1].double()
        chances, order = torch.softmax(logits / temperature, -1).sort(descending=True)
        counts = torch.tensor(tokens).bincount(minlength=23)[order]

        # Compare the count of each token, and the total counts of the most likely token, the two
        # most likely tokens, and so on.
        tokens_each = (counts, chances)
        tokens_together = (counts.cumsum(0)[:-1], chances.cumsum(0)[:-1])
        for name, pair in (("token", tokens_each), ("likeliest", tokens_together)):
            seen, expected = (dict(enumerate(values.tolist())) for values in pair)
            for rank, nats in surprises(seen, len(tokens), expected).items():
                found[beginning, name, rank] = nats
    assert_no_surprise(found)


# -------- The verdict -----------------------------------------------------------------------------


def resample(rng, curve, num_nodes: int, num_groups: int) -> list[dict]:
    """Return the rows of a run whose policy reaches these mean rewards.

    The eight completions of a question share its difficulty, which is drawn from a beta
    distribution. At a mean reward of 0.5, the standard deviation of a mean of eight groups is
    between 0.111 and 0.134, as measured.
    """
    correlation = rng.uniform(0.31, 0.51)
    rows = []
    for t, average in enumerate(curve):
        shape = numpy.array([average, 1 - average]) * (1 / correlation - 1)
        chances = rng.beta(*shape, size=(num_nodes, num_groups))
        rewards = rng.binomial(8, chances).mean(axis=1) / 8
        for node, reward in enumerate(rewards):
            row = {"node_id": f"n{node}", "round": t, "stage": 0, "reward": float(reward)}
            rows.append(row | {"informative_groups": 1, "completions": 8 * num_groups})
    return rows


def verdicts(curve, num_nodes: int, num_groups: int, num_runs: int = 400) -> Counter:
    """Return how often each verdict's first word is given over resampled runs."""
    rng = numpy.random.default_rng(0)
    runs = (resample(rng, curve, num_nodes, num_groups) for _ in range(num_runs))
    return Counter(coordinator.diagnose(rows).split()[0].strip(":") for rows in runs)


@pytest.mark.parametrize("num_nodes, num_groups", [(1, 4), (4, 8)])
def test_U3_a_policy_that_never_changes_hardly_ever_gets_a_verdict(num_nodes, num_groups):
    """Each false verdict occurs in at most 3% of runs, plus three standard deviations of 400 runs
    (2.6%) for each length and of 2,000 runs (1.1%) for all lengths together."""
    total = Counter()
    for num_rounds in (10, 20, 40, 80, 120):
        found = verdicts([0.4] * num_rounds, num_nodes, num_groups)
        assert max(found["learned"], found["worse"]) <= 0.056 * 400, (num_rounds, found)
        total += found
    assert max(total["learned"], total["worse"]) <= 0.041 * 2000, total


@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize("num_groups", [4, 8])
def test_U3_a_rise_from_5_to_30_percent_is_recognized_in_20_rounds(num_nodes, num_groups):
    found = verdicts([0.05] * 10 + [0.3] * 10, num_nodes, num_groups)
    assert found["learned"] > 0.9 * 400 and found["worse"] == 0, found
    # A rise over all 20 rounds is recognized less often, particularly with little data per round.
    found = verdicts(numpy.linspace(0.05, 0.3, 20), num_nodes, num_groups)
    assert found["learned"] > (0.4 if num_nodes * num_groups == 4 else 0.7) * 400, found


def test_U3_an_immediate_collapse_is_recognized_in_20_rounds():
    found = verdicts([0.4] + [0.01] * 19, num_nodes=1, num_groups=8)
    assert found["worse"] > 0.9 * 400 and found["learned"] == 0, found
