"""What else grpo.py holds: other architectures, memory, every task, hostile answers, tokenizers, weights."""

import decimal
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from math import gcd, inf
from types import SimpleNamespace

import grpo
import pytest
import torch
from grpo import ANSWER_STYLES, EVAL_ON_ANSWER, UNSTABLE, BadQuestion, check_model, end_of_turn
from grpo import exact_positions, halving_on_oom, load_model, load_weights, lucky_question, new_optimizer
from grpo import pack_weights, rows_that_fit, sample_tokens, score, sequence_logps, shared_prompt_logps
from grpo import score_all, token_logps, update, warm_start_batches, warm_start_name
from test_sapo import HELD_OUT_SEEDS, KINDS, PROJECT, SMALL_TASKS, TASK_TABLE, build_tiny
from test_sapo import config_error, config_of, generate, make_question, near, our_update, pairs_of
from test_sapo import plain_logps, ragged_groups, tiny_codec, tiny_lm, weights_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

LLAMA = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
LLAMA |= dict(num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
SIZES = {
    "gpt_neo": dict(hidden_size=16, num_layers=2, num_heads=2, window_size=8, max_position_embeddings=64,
                    attention_types=[[["global", "local"], 1]]),
    "mpt": dict(d_model=16, n_heads=2, n_layers=2, max_seq_len=64),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
    "bart": dict(d_model=16, encoder_layers=2, decoder_layers=2, decoder_attention_heads=2, init_std=0.3),
    "lfm2": LLAMA | {"layer_types": ["conv", "full_attention"]},
    "mistral": LLAMA | {"sliding_window": 8}, "gemma2": LLAMA | {"head_dim": 4, "pad_token_id": 0},
}  # fmt: skip


def other_lm(name, **settings):
    torch.manual_seed(1)
    settings = {"vocab_size": 29, "initializer_range": 0.3, **SIZES.get(name, LLAMA), **settings}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).eval()


# -------- Loss and update -------------------------------------------------------------------------------


def test_a_batch_of_flat_groups_changes_no_weight_not_even_by_momentum():
    model = tiny_lm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    update(model, optimizer, ragged_groups(), max_new_tokens=9)
    before = weights_of(model)
    stats = update(model, optimizer, ragged_groups(flat=range(4)), max_new_tokens=9)
    assert torch.equal(weights_of(model), before) and stats["trained_tokens"] == stats["loss"] == 0


def test_the_step_is_cut_to_the_maximal_gradient_norm_and_left_out_where_the_gradient_is_not_finite():
    weights, stats = our_update(tiny_lm(), ragged_groups(), lr=1.0)
    near((weights - weights_of(tiny_lm())).norm().item(), 1.0, 1e-3)
    assert stats["grad_norm"] > 1.5
    broken, start = tiny_lm(), tiny_lm()
    for model in (broken, start):
        model.transformer.ln_f.weight.data[0] = inf
    assert torch.equal(our_update(broken, ragged_groups())[0], weights_of(start))


def test_the_optimizer_that_has_its_memory_at_the_start_steps_like_adamw():
    ours, plain = tiny_lm(), tiny_lm()
    optimizer = new_optimizer(ours, config_of(MODEL_NAME="tiny", LEARNING_RATE=0.01))
    places = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    adam = torch.optim.AdamW(plain.parameters(), 0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(2):
        update(ours, optimizer, ragged_groups(), max_new_tokens=9)
        update(plain, adam, ragged_groups(), max_new_tokens=9)
    assert torch.equal(weights_of(ours), weights_of(plain))
    assert places == [value.data_ptr() for state in optimizer.state.values() for value in state.values()]


# -------- Log-probabilities and sampling ------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(20, 25, 31), (20, 20), (17, 40)])
def test_what_all_prompts_begin_with_is_run_once(lengths):
    """Also where one prompt is the beginning of another, and where all are the same."""
    for model in (tiny_lm(), other_lm("llama")):
        pairs, seen = [([i % 19 + 1 for i in range(n)], [[7, 8, 9], [10]]) for n in lengths], []
        alone = [plain_logps(model, p, c) for p, completions in pairs for c in completions]
        see = lambda module, args, given, seen=seen: seen.append(given["input_ids"].shape)  # noqa: E731
        model.base_model.register_forward_pre_hook(see, with_kwargs=True)
        near(shared_prompt_logps(model, pairs, 1.0)[0], pad_sequence(alone, batch_first=True))
        assert seen[:2] == [(1, min(lengths) - 1), (len(lengths), max(lengths) - min(lengths) + 1)]


@pytest.mark.parametrize("name", ["mistral", "gpt_neo", "mpt"])
def test_a_model_that_counts_slots_gets_no_padding_inside_a_prompt(name):
    """Its windows and distances count slots: padding behind the common start would shift real tokens."""
    model = other_lm(name)
    pairs = [([*range(1, 20), *rest], [[7, 8, 9], [10]]) for rest in ([3], [4, 5, 6, 11, 12, 13])]
    rows = [(p, c) for p, completions in pairs for c in completions]
    alone = [shared_prompt_logps(model, [(p, [c])], 1.0)[0][0] for p, c in rows]
    alone = pad_sequence(alone, batch_first=True)
    near(shared_prompt_logps(model, pairs, 1.0)[0], alone)
    near(sequence_logps(model, *zip(*rows, strict=True))[0], alone)


def test_models_whose_plain_forward_pass_gives_other_logps_are_refused_by_name():
    text = [i * 7 % 29 for i in range(30)]
    for name in ("llama", "qwen2"):
        check_model(other_lm(name), text)
    check_model(other_lm("gemma2", final_logit_softcapping=0.1), text)  # capped here too, however large
    with pytest.raises(ValueError, match="MODEL_NAME.*granite"):
        check_model(other_lm("granite", logits_scaling=4.0), text)


REFUSED_FOR = dict.fromkeys(("gpt2", "gpt_neo", "mistral", "mpt", "phi3"))
REFUSED_FOR |= {
    "bart": "differ by",
    "mamba": "AttributeError",
    "jamba": "ValueError",
    "lfm2": "AttributeError",
}


@pytest.mark.parametrize("name, reason", REFUSED_FOR.items())
def test_architectures_are_exact_or_refused_by_name_whatever_they_trip_over(name, reason):
    model, text = other_lm(name, pad_token_id=0), [i * 7 % 29 for i in range(30)]
    named = pytest.raises(ValueError, match=f"MODEL_NAME: architecture '{name}'.*{reason}")
    with named if reason else nullcontext():
        check_model(model, text)


@pytest.mark.parametrize("where", ["in front", "behind the common start"])
def test_a_model_that_takes_padding_for_words_is_refused_wherever_the_padding_stands(where):
    def forget(module, args, given):
        if (mask := given["attention_mask"]) is not None and (mask[:, 0].min() == 0) == (where == "in front"):
            return args, given | {"attention_mask": None}

    model, text = other_lm("llama"), [i * 7 % 29 for i in range(30)]
    check_model(model, text)
    model.base_model.register_forward_pre_hook(forget, with_kwargs=True)
    with pytest.raises(ValueError, match="'llama'.*differ by"):
        check_model(model, text)


def test_scoring_in_chunks_equals_scoring_at_once_in_value_and_gradient(monkeypatch):
    model, pairs, seen, found = tiny_lm(), pairs_of(ragged_groups()), [], []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(len(logits)))
    for elements in (2**25, 5 * 23):
        monkeypatch.setattr(grpo, "LOGIT_ELEMENTS", elements)
        seen.clear()
        logp, _ = shared_prompt_logps(model, pairs, 0.7)
        gradients = torch.autograd.grad(logp.square().sum(), list(model.parameters()))
        found.append(torch.cat([logp.detach().flatten(), *(g.flatten() for g in gradients)]))
    near(found[1], found[0])
    assert max(seen) == 5 and len(seen) > 10  # never more at once; again in the backward pass


def test_under_bfloat16_autocast_probabilities_still_add_up_to_one():
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = token_logps(tiny_lm(), hidden.expand(23, -1), torch.arange(23), 0.7).exp()
    near(p.sum(), torch.tensor(1.0), 1e-5, 0)
    weights, stats = our_update(tiny_lm(), ragged_groups(), dtype=torch.bfloat16)
    assert weights.dtype == torch.float32 and stats["grad_norm"] > 0


def test_under_autocast_the_cache_holds_the_compute_type_and_says_the_same(monkeypatch):
    model, found = other_lm("llama"), []
    for cache in (grpo.ComputeCache, grpo.transformers.DynamicCache):
        monkeypatch.setattr(grpo, "ComputeCache", cache)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layers = grpo.prefill(model, [[1, 2, 3]], 0, 2)[1].layers
            logp, _ = shared_prompt_logps(model, pairs_of(ragged_groups()), 0.7)
        found.append(({x.dtype for layer in layers for x in (layer.keys, layer.values)}, logp))
    (ours, logp), (plain, expected) = found
    assert ours == {torch.bfloat16} and torch.float32 in plain and torch.equal(logp, expected)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24])  # the ends of what torch.rand returns
@pytest.mark.parametrize("vocabulary", [5, 50_000])
def test_a_token_of_probability_zero_is_never_drawn(noise, vocabulary):
    logits = torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[:, [0, 1, -2, -1]] = -inf
    drawn = sample_tokens(logits, torch.full((20,), noise), 1.0)
    assert (drawn >= 2).all() and (drawn < vocabulary - 2).all()


def test_rows_that_have_answered_stop_like_rows_that_sampled_an_eos():
    settings = ([[3, 4, 5], [6]], 4, 12, 1.0, {2})
    whole, ours = (
        generate(tiny_lm(), *settings, torch.Generator().manual_seed(0), answered=answered)
        for answered in (None, lambda ids: ids[-1] > 14)
    )
    cut = [[c[: next((i + 1 for i, t in enumerate(c) if t > 14), len(c))] for c in group] for group in whole]
    assert ours == cut != whole


# -------- Memory ----------------------------------------------------------------------------------------


def on_a_cpu() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    return caught.value


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("MPS backend out of memory"), on_a_cpu()]
)
def test_out_of_memory_halves_the_micro_batch_and_gives_the_same_step(iterations, error, monkeypatch):
    (expected, _), rows = our_update(tiny_lm(), ragged_groups(), num_iterations=iterations), []

    def scarce(model, pairs, *rest):
        rows.append(sum(len(completions) for _, completions in pairs))
        if rows[-1] > 2 and len(rows) % 2 == 0:  # the first micro-batch has left its gradient behind
            raise error
        return shared_prompt_logps(model, pairs, *rest)

    monkeypatch.setattr(grpo, "shared_prompt_logps", scarce)
    weights, stats = our_update(tiny_lm(), ragged_groups(), num_iterations=iterations, max_rows=8)
    near(weights, expected, 5e-5, 1e-3)
    assert stats["max_rows"] == max(rows[4:]) == 2 < min(rows[1], rows[3])


def test_work_is_halved_only_for_want_of_memory_and_the_smallest_that_fails_is_explained():
    tried, errors = [], []

    def attempt(rows):
        tried.append(rows)
        raise errors[-1]

    for error, said in ((torch.OutOfMemoryError(), "lower LOCAL_NODES"), (RuntimeError("shapes"), "shapes")):
        errors.append(error)
        with pytest.raises((MemoryError, RuntimeError), match=said):
            halving_on_oom(attempt, 2**30, 15, "generation", smallest=3)
    assert tried == [2**30, 8, 4, 3, 2**30]
    assert halving_on_oom(lambda rows: rows, 8, 15, "generation") == (8, 8)


def test_a_cpu_is_given_no_more_than_a_group_or_a_gigabyte_and_a_half_at_once():
    shape = SimpleNamespace(num_hidden_layers=30, hidden_size=576)  # SmolLM2
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: shape))
    for tokens, asked, rows in ((64, "auto", 9), (256, "auto", 8), (1024, "auto", 8), (64, 100, 100)):
        config = config_of(DEVICE="cpu", MODEL_NAME="x", MAX_NEW_TOKENS=tokens, MICRO_BATCH_SIZE=asked)
        assert rows_that_fit(model, config, 10**9)[0] == rows, tokens
    assert rows_that_fit(tiny_lm(), config_of(DEVICE="cpu"), 10**9)[0] == 1024


# -------- Tasks and rewards -----------------------------------------------------------------------------

OTHER_PROCESS = """
import hashlib, json, sys
from grpo import *
payloads = ['__import__("os").system("touch PWNED")', "[c for c in ().__class__.__base__.__subclasses__()]",
            '(lambda: open("PWNED","w"))()']
events, armed = [], False
def spy(event, arguments):
    if armed and event in ("exec", "compile", "open", "os.system", "subprocess.Popen", "os.exec"):
        events.append(event)
questions = [make_question(task, seed) for task in TASK_TABLE for seed in (3, 2**51)]
for q in questions:
    score(q, "<answer>1</answer>"), score(q, f"<answer>{q.answer}</answer>")  # imports and caches are warm
pairs = [(q, f"<answer>{text}</answer>") for q in questions for p in payloads for text in (p, p + q.answer)]
sys.addaudithook(spy)
armed = True
best = max(score(question, text, "verifier") for question, text in pairs)
guarded, unsafe = list(events), questions[2 * list(TASK_TABLE).index("binary_matrix")]
for p in payloads:
    unsafe.dataset.score_answer(p, unsafe.entry)
armed = False
model, tokenizer = build_tiny(SMALL_TASKS)
weights = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
print(json.dumps({"questions": [[q.task, q.seed, q.text, q.answer] for q in questions], "guarded": guarded,
    "best": best, "unguarded": events, "weights": weights, "vocabulary": tokenizer.get_vocab()}))
"""


@pytest.fixture(scope="module")
def other_process(tmp_path_factory):
    """Another process, another PYTHONHASHSEED: its questions, its tiny model, what it did while it scored."""
    folder = tmp_path_factory.mktemp("payload")
    environ = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OTHER_PROCESS]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(**json.loads(done.stdout), pwned=(folder / "PWNED").exists())


def test_questions_are_the_same_in_every_process(other_process):
    assert [task for task, *_ in other_process.questions] == [task for task in TASK_TABLE for _ in range(2)]
    for task, seed, text, answer in other_process.questions:
        assert (make_question(task, seed).text, make_question(task, seed).answer) == (text, answer), task


def test_scoring_evaluates_opens_and_runs_nothing_where_the_verifier_alone_does(other_process):
    assert other_process.guarded == [] and other_process.best < 1
    assert {"compile", "exec", "open", "os.system"} <= set(other_process.unguarded) and other_process.pwned


@pytest.mark.parametrize("task", TASK_TABLE)
def test_of_a_task_only_the_right_answer_is_rewarded(task):
    questions = [make_question(task, 7919 * i) for i in range(40)]
    make_question.cache_clear()
    assert questions == [make_question(task, q.seed) for q in questions]
    assert len({q.text for q in questions}) > 20 and all(q.answer for q in questions)
    scores = [score(q, f"I think <answer>{q.answer}</answer>", kind) for q in questions for kind in KINDS]
    # propositional_logic has no oracle, and its own example is wrong on about 1% of its questions
    assert set(sorted(scores)[4 if task == "propositional_logic" else 0 :]) == {1.0}
    for question in questions[:8]:
        oracle = question.answer
        for text in (f"it is {oracle}", f"x{oracle}", f"1, {oracle}", "", "0 1 2 3 -1", "[[0]]", "None"):
            assert score(question, f"<answer>{text}</answer>") == 0, text
        assert score(question, oracle) == score(question, f"<answer>{oracle}") == 0


REFUSED = [
    *((task, "eval") for task in EVAL_ON_ANSWER),
    *((task, "differ between processes") for task in UNSTABLE if task not in EVAL_ON_ANSWER),
    ("composite", "not checked"), ("number_sorting", "not checked"), ("small_gdc", "did you mean small_gcd?"),
    ("nosuch", "allowed: base_"),
]  # fmt: skip


@pytest.mark.parametrize("task, reason", REFUSED)
def test_tasks_that_cannot_be_trusted_are_refused_with_the_reason(task, reason):
    message = config_error(TASKS=f"gcd,{task}")
    assert f"{task!r} is refused" in message and reason in message and "'gcd'" not in message


def test_hostile_answers_cost_less_than_a_second_each():
    questions = {name: make_question(task, 5) for task, (name, _) in TASK_TABLE.items()}.values()
    logic, letters = make_question("propositional_logic", 1), "∧".join("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHI")
    bodies = ["9" * 100_000, "9" * 4000, "9" * 2000 + "/" + "9" * 2000, "(" * 50_000 + ")" * 50_000, letters]
    bodies += ["-1E+999999999999999999", "1e999999999", "(" * 90 + "Z" + ")" * 90, "sNaN", "¬" * 199 + "Z"]
    texts = [f"<answer>{body}</answer>" for body in (*bodies, "\\frac{" + " " * 3900)]
    texts += ["<answer>" * 16_000, "<answer>" * 200 + "</answer>" * 200]
    gaps = [gap for length in (1, 2, 3, 4) for gap in itertools.product("¬ ", repeat=length) if "¬" in gap]
    atoms = ["".join(("P", *gap, "P")) for gap in gaps]
    # P¬P∧P¬¬P∧P¬ P …: to the verifier's parser 18 variables
    disguised = f"<answer>{'∧'.join(atoms[:18])}</answer>"
    assert len(letters) == 69 and len(disguised) < 200
    for question, text in [(logic, disguised), *itertools.product(questions, texts)]:
        began = time.process_time()
        assert score(question, text) == 0
        assert time.process_time() - began < 1, f"{question.task}: {text[:60]}"


def test_a_formula_is_parsed_only_if_it_is_short_and_has_few_signs(monkeypatch):
    question, parse, parsed = make_question("propositional_logic", 1), grpo.Expression.from_string, []
    monkeypatch.setattr(grpo.Expression, "from_string", lambda text: parsed.append(text) or parse(text))
    assert question.answer == "(Q ∧ Q)"  # two signs
    for negations, spaces, reward in ((38, 0, 1), (40, 0, 0), (0, 153, 1), (0, 154, 0), (192, 0, 0)):
        parsed.clear()
        text = "¬" * negations + f"(Q ∧ Q{' ' * spaces})"
        assert score(question, f"<answer>{text}</answer>") == reward == bool(parsed), text


def test_a_text_that_stands_in_a_group_many_times_is_scored_once():
    scored = []
    verifier = SimpleNamespace(score_answer=lambda answer, entry: scored.append(answer) or float(answer))
    question = replace(make_question("small_gcd", 5), dataset=verifier)
    texts = [f"<answer>{i % 2}</answer>" for i in range(64)]
    assert score_all(question, texts) == [0.0, 1.0] * 32 and sorted(scored) == ["0", "1"]


def test_generators_leave_no_trace_on_the_terminal_or_in_the_decimal_context(capfd):
    before = repr(decimal.getcontext())
    for task, seed in itertools.product(TASK_TABLE, range(100, 104)):
        score(make_question.__wrapped__(task, seed), "<answer>1.5</answer>")
    assert capfd.readouterr() == ("", "") and repr(decimal.getcontext()) == before


def test_seeds_at_which_a_generator_fails_or_computes_for_minutes_are_refused_and_stepped_over():
    began = time.monotonic()
    for task, seed in (("decimal_arithmetic", 1488473454406226), ("basic_arithmetic", 721121905971561)):
        with pytest.raises(BadQuestion):
            make_question(task, seed)
        assert lucky_question(task, seed) == make_question(task, seed + 1)
    assert time.monotonic() - began < 5


# -------- Prompts, tokenizers, models -------------------------------------------------------------------


def test_a_model_without_chat_template_sees_solved_examples_of_the_same_task():
    for question in (make_question("small_gcd", 5), make_question("small_gcd", HELD_OUT_SEEDS.stop - 1)):
        *shots, own = tiny_codec(2).decode(tiny_codec(2).prompt(question)).split("\n\n")
        assert own == question.text + "\n" == tiny_codec().decode(tiny_codec().prompt(question))
        assert len(set(shots)) == 2 and question.text not in str(shots)
        for text, answer in (shot.split("\n") for shot in shots):
            a, b = (int("".join(filter(str.isdigit, part))) for part in text.split(",")[:2])
            assert answer == f"<answer>{gcd(a, b)}</answer>"


@pytest.mark.parametrize("system_role", ["there", "refused", "left out"])
def test_a_chat_model_sees_the_default_system_prompt_and_the_question(system_role):
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    other = {"there": turn, "refused": "{{ raise_exception('no') }}", "left out": ""}[system_role]
    turn = "{% if m.role == 'system' %}" + other + "{% else %}" + turn + "{% endif %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    codec = tiny_codec(2, template, controls=("<|im_start|>", "<|im_end|>"))
    question = make_question("gcd", 5)
    assert len(codec.encode("<|im_end|>")) == 10  # that must not change how the next prompt is encoded
    rules, alone = grpo.SYSTEM_PROMPTS["default"], system_role != "there"
    between = "\n" if alone else "<|im_end|>\n<|im_start|>user\n"
    text = f"<|im_start|>{'user' if alone else 'system'}\n{rules}{between}{question.text}<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    assert codec.tokenizer.decode(codec.prompt(question)) == text
    start, end = codec.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert codec.prompt(question).count(start) == text.count("<|im_start|>") and not codec.few_shot
    assert end_of_turn(codec.tokenizer, {0, end}) == end and end_of_turn(tiny_codec().tokenizer, {0, 5}) == 0


def test_the_tiny_tokenizer_loses_nothing_and_keeps_small_prompts_short():
    codec, rng = tiny_codec(), random.Random(0)
    questions = {task: [make_question(task, 31 * i) for i in range(40)] for task in TASK_TABLE}
    pieces = [*map(chr, range(32, 127)), *"\n∧∨¬→↔", "<answer>", "</answer>", "<eos>", "The answer is "]
    texts = [text for batch in questions.values() for q in batch for text in (q.text, q.answer)]
    for text in texts + ["".join(rng.choices(pieces, k=rng.randrange(60))) for _ in range(200)]:
        ids = codec.encode(text)
        assert codec.decode(ids) == text and codec.tokenizer.unk_token_id not in ids
    lengths = [len(codec.prompt(q)) for task in SMALL_TASKS for q in questions[task]]
    assert 5 <= min(lengths) and max(lengths) <= 20 and len(grpo.PAPER_TASKS) == 9 and len(SMALL_TASKS) == 8


def test_tiny_is_the_same_in_every_build_and_process_and_leaves_the_random_state_alone(other_process):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    for tasks in (SMALL_TASKS, SMALL_TASKS[::-1]):
        model, tokenizer = build_tiny(tasks)
        data = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
        assert hashlib.sha256(data).hexdigest() == other_process.weights
        assert tokenizer.get_vocab() == other_process.vocabulary
    assert torch.equal(before, torch.get_rng_state())
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 200_000 and len(tokenizer) < 150


@pytest.fixture(scope="session")
def base_models(tmp_path_factory):
    """Random models as people have them on disk: a byte-level BPE, neither pad token nor chat template."""
    folder = tmp_path_factory.mktemp("models")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    texts = [make_question("small_gcd", seed).text + " <answer>12</answer>" for seed in range(50)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=["<end>"], initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    sizes = dict(vocab_size=len(backend.get_vocab()), max_position_embeddings=512)
    for name in ("llama", "gpt2"):
        other_lm(name, **sizes, bos_token_id=0, eos_token_id=0).save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder / name)
    return folder


def test_a_base_model_stops_after_its_answer_and_its_peers_need_no_eos_there(base_models):
    config = config_of(MODEL_NAME=base_models / "gpt2", MAX_NEW_TOKENS=64)
    _, codec = load_model(config, ["small_gcd"])
    assert codec.tokenizer.pad_token is None and codec.few_shot and config.NUM_SHOTS == 2
    right = codec.encode("<answer>7</answer>")
    assert codec.answered(right) and not codec.answered(right[:-1])
    assert not replace(codec, num_shots=0).answered(right), "a chat model ends its turn itself"
    assert codec.completions(["<answer>7</answer>"], [True]) == [right]
    assert codec.completions(["7"], [True]) == [[*codec.encode("7"), codec.eos_id]]


def test_a_model_that_cannot_be_used_is_refused_with_the_variable_to_change(base_models, tmp_path):
    (tmp_path / "empty").mkdir()
    for settings, message in [
        ({"MODEL_NAME": tmp_path / "empty"}, "MODEL_NAME=.*cannot be loaded"),
        ({"MODEL_NAME": base_models / "gpt2", "MAX_NEW_TOKENS": 257}, "MAX_NEW_TOKENS=257.*512 positions"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_model(config_of(**settings), ["small_gcd"])
    for spoil, message in [
        (dict(without="lm_head"), "its files lack lm_head.weight"),
        (dict(without="layers.1."), "its files lack model.layers.1."),
        (
            dict(template="{{ raise_exception('never') }}"),
            "chat template cannot be used .TemplateError: never",
        ),
        (dict(template="{% for m in messages %}"), "chat template cannot be used .TemplateSyntaxError"),
        (dict(template="{% if false %}x{% endif %}"), "cannot be used .ValueError: the prompt is the same"),
        (
            dict(added="<turn>", template="{{ messages[-1].content }}<turn>"),
            r"has token (\d+), the model \1 in all",
        ),
        (
            dict(added="<turn>", template="{{ messages[-1].content.replace('bits', '<turn>') }}"),
            r"has token (\d+), the model \1 in all",
        ),
        (dict(added="<turn>", eos="<turn>"), r"has token (\d+), the model \1 in all"),
        (dict(added="</answer>"), "its tokenizer decodes <answer>12</answer> as '<answer>12'"),
        (dict(template="{{ messages[0].content }}"), "the prompt is the same for every question"),
        (dict(template="{{ messages[-1].content }}"), None),
    ]:
        spoiled(base_models / "llama", tmp_path / "spoiled", **spoil)
        config = config_of(MODEL_NAME=tmp_path / "spoiled", MAX_NEW_TOKENS=8)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            load_model(config, ["small_gcd", "small_count_bits"])
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
    assert exact_positions(other_lm("llama", max_position_embeddings=192, rope_parameters=rope)) == 48
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
    sizes = dict(max_position_embeddings=512, original_max_position_embeddings=64, pad_token_id=0)
    assert exact_positions(other_lm("phi3", **sizes, rope_parameters=rope)) == 64
    kinds = SimpleNamespace(max_position_embeddings=256, rope_parameters={"full_attention": None})
    kinds.rope_parameters["full_attention"] = rope | {"original_max_position_embeddings": 32}
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: kinds))
    assert exact_positions(model) == 32, "of one type of layers"


def spoiled(source, folder, without="nothing", template=None, added=None, eos=None) -> None:
    """A copy of a model's folder in which something is not as it should be."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": [added]} if added else {})
    tokenizer.eos_token = eos or tokenizer.eos_token
    weights = {name: tensor for name, tensor in model.state_dict().items() if without not in name}
    model.save_pretrained(folder, state_dict=weights), tokenizer.save_pretrained(folder)


def test_a_base_model_gets_its_first_token_and_only_whole_examples(base_models):
    config = config_of(MODEL_NAME=base_models / "llama", MAX_NEW_TOKENS=8)
    _, codec = load_model(config, ["small_gcd"])
    question = make_question("small_gcd", 1)
    plain = codec.prompt(question)
    assert codec.decode(plain).count("</answer>") == 2 and codec.bos == []
    one = replace(codec, max_prompt=len(plain) - 1).prompt(question)
    assert codec.decode(plain).endswith(codec.decode(one)) and codec.decode(one).count("<answer>") == 1
    first = f"{make_question('small_gcd', 3).text}\n<answer>"
    assert codec.decode(one).startswith(first), "the first example is left out whole"
    start = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    codec.tokenizer.backend_tokenizer.post_processor = start
    codec.tokenizer.bos_token = "<end>"
    assert replace(codec).prompt(question) == [0, *plain]
    assert len(replace(codec, max_prompt=9).prompt(question)) == 9, "a question that is too long is cut"


def test_a_loaded_chat_model_ends_its_turn_as_its_template_does(base_models, tmp_path):
    """Gemma has two ids that end a text: <eos>, and <end_of_turn>, which is what it says."""
    tokenizer = AutoTokenizer.from_pretrained(base_models / "llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<turn>\n{% endfor %}"
    model = AutoModelForCausalLM.from_pretrained(base_models / "llama")
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = [0, turn := tokenizer.convert_tokens_to_ids("<turn>")]
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    _, codec = load_model(config_of(MODEL_NAME=tmp_path, MAX_NEW_TOKENS=8), ["small_gcd"])
    assert (codec.eos_ids, codec.eos_id, codec.completions(["7"], [True])[0][-1]) == ({0, turn}, turn, turn)


def test_weights_travel_as_bytes_and_anything_else_is_turned_down():
    model, other = tiny_lm(), tiny_lm("llama")
    data, before = pack_weights(model), weights_of(other)
    assert not load_weights(other, data) and torch.equal(weights_of(other), before)
    for p in (blank := tiny_lm()).parameters():
        p.data.zero_()
    assert load_weights(blank, data) and torch.equal(weights_of(blank), weights_of(model))
    model.lm_head.weight.data[0] = inf
    for bad in (b"", data[:-9], b"\xff" * 99, pack_weights(model)):
        assert not load_weights(blank, bad)


def test_another_model_in_the_same_folder_gets_a_warm_start_of_its_own(base_models):
    config, model = config_of(MODEL_NAME=base_models / "gpt2", WARM_START_STEPS=3), other_lm("gpt2")
    recipe = tiny_codec(), config, SMALL_TASKS
    name = warm_start_name(model, *recipe)
    assert name == warm_start_name(other_lm("gpt2"), *recipe)
    template = tiny_codec(chat_template="{{ messages[-1].content }}")
    assert name != warm_start_name(model, template, *recipe[1:])
    assert name != warm_start_name(model, replace(tiny_codec(), eos_id=5), *recipe[1:])
    next(model.parameters()).data[3, 4] += 0.1
    assert name != warm_start_name(model, *recipe)


def test_a_warm_start_for_which_no_question_is_short_enough_ends_in_a_sentence():
    codec = replace(tiny_codec(), max_prompt=2, max_completion=1)
    with pytest.raises(ValueError, match="TASKS: no question and answer fit"):
        next(warm_start_batches(codec, config_of(), SMALL_TASKS, random.Random(0), 8, 0.5))


def test_only_the_first_style_of_a_warm_start_is_rewarded_and_rewards_lie_in_zero_to_one():
    question = make_question("small_gcd", 5)
    assert [score(question, style.format(question.answer)) for style in ANSWER_STYLES] == [1.0] + [0.0] * 5
    for verdict, reward in ((float("nan"), 0), (inf, 0), (7, 1), (-3, 0), ("x", 0), (None, 0)):
        verifier = SimpleNamespace(score_answer=lambda answer, entry, verdict=verdict: verdict)
        assert score(replace(question, dataset=verifier), "<answer>1</answer>", "verifier") == reward


def test_a_model_folder_with_code_of_its_own_is_refused_and_nobody_is_asked_to_run_it(
    base_models, tmp_path, monkeypatch
):
    shutil.copytree(base_models / "gpt2", folder := tmp_path / "own")
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    settings = json.loads((folder / "config.json").read_text()) | {"model_type": "own", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    with pytest.raises(ValueError, match="MODEL_NAME=.*cannot be loaded"):
        load_model(config_of(MODEL_NAME=folder, MAX_NEW_TOKENS=8), ["small_gcd"])
    assert not asked and not (tmp_path / "ran").exists()
