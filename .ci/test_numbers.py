"""Proofs of the promises about numbers that take longer than those of test_sapo.py: architectures
and tokenizers (L7, L2), the update, sampling and memory (L1, L2, L8), tasks and rewards (L3), the
embedded model (L6) and learning from a peer (L4).

ARCHITECTURES=all tries L7 with all that transformers knows, which takes a minute or two: passed is
exact, xfailed is refused in a sentence, skipped cannot be built so small.
"""

import decimal
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from unittest.mock import Mock, mock_open

import pytest
import torch
import transformers
from common import ROOT, rewards_of, time_limit
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import coordinator
import grpo
import sapo
from drive_store import At
from grpo import HELD_OUT_SEEDS, PAPER_TASKS, TASK_TABLE, TINY_TASKS, make_question
from test_sapo import assert_close, config_error, flat_weights, group_by_hand, make_config
from test_sapo import new_store, our_generate, our_update, ragged_groups, reference_logprobs
from test_sapo import small_codec, small_gpt2, update_settings

torch.set_num_threads(1)


# -------- Small models of all architectures: exact or refused -------------------------------------

SIZES = {  # a small value -> the settings, of any architecture, that get it
    0: "pad_token_id bos_token_id eos_token_id num_kv_shared_layers", 0.3: "initializer_range init_std", 1: "n_group topk_group",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads num_kv_heads
        num_experts_per_tok linear_num_key_heads linear_num_value_heads mamba_expand""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts n_routed_experts rotary_dim""",
    8: """head_dim d_kv kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim state_size sliding_window
        attention_window linear_key_head_dim linear_value_head_dim mamba_d_state mamba_d_head mamba_n_heads
        hidden_size_per_layer_input query_pre_attn_scalar""",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    32: "hidden_size n_embd d_model embedding_size", 2048: "max_position_embeddings n_positions max_seq_len",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff ffn_hidden_size intermediate_size_mlp",
}  # fmt: skip
EXACT = {  # architecture -> settings beside these
    "qwen2": {}, "llama": {}, "phi3": {"sliding_window": None}, "mistral": {}, "gpt2": {}, "gemma3_text": {},
    "gemma2": {"final_logit_softcapping": 0.5}, "gpt_neox": {}, "bloom": {}, "mpt": {},
}  # fmt: skip
NOT_EXACT = {
    "mamba": {}, "jamba": {}, "lfm2": {"layer_types": ["conv", "full_attention"]}, "bart": {}, "llama4_text": {},
    "granite": {"logits_scaling": 4.0}, "cohere": {"logit_scale": 0.2},
}  # fmt: skip
ALL = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if os.environ.get("ARCHITECTURES") == "all" else {}


def small_model(architecture="llama", vocab_size=29, **settings):
    """A small model of this architecture with random weights and a peaked softmax."""
    torch.manual_seed(1)
    default = transformers.CONFIG_MAPPING[architecture]().get_text_config()
    small = {"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size}
    for size, names in SIZES.items():
        small |= dict.fromkeys(names.split(), size)
    small = {name: size for name, size in small.items() if hasattr(default, name)}
    return AutoModelForCausalLM.from_config(type(default)(**small | settings)).eval()


def save_model(folder, chat=None, change=lambda _: None, lacks="", dtype=None, **more):
    """Write such a model, with tiny's tokenizer and two tokens for turns, as a Hugging Face folder.
    Returns a Config for it. chat: its template; change: what to do to the tokenizer at the end;
    lacks: a weight that is not written."""
    tokenizer = grpo.build_tiny_model(TINY_TASKS)[1]
    tokenizer.add_tokens([AddedToken(token) for token in ("<|im_start|>", "<|im_end|>")])
    model = small_model(vocab_size=len(tokenizer), **more).to(dtype)
    weights = {name: weight for name, weight in model.state_dict().items() if name != lacks}
    model.save_pretrained(folder, state_dict=weights)
    change(tokenizer)
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(folder)
    return make_config(MODEL_NAME=folder, MAX_NEW_TOKENS=16)


def load_model(folder, **changes):
    return grpo.load_model(save_model(folder, **changes), ["small_gcd"])


@pytest.mark.parametrize("architecture", dict.fromkeys([*EXACT, *ALL]))
def test_L7_shared_prompts_batches_and_the_cache_change_no_log_probability(tmp_path, architecture):
    if architecture in EXACT:
        check_exact(*load_model(tmp_path, architecture=architecture, **EXACT[architecture]))
        return

    try:
        with torch.device("meta"):
            assert sum(p.numel() for p in small_model(architecture).parameters()) < 6e7, "not small"
        config = save_model(tmp_path, architecture=architecture)
    except Exception as error:
        pytest.skip(f"not built: {error!r}")
    with time_limit(60):
        try:
            loaded = grpo.load_model(config, ["small_gcd"])
        except grpo.ModelError as error:
            pytest.xfail(f"refused: {error}")
        check_exact(*loaded)


def check_exact(model, codec):
    """Assert that log-probabilities and samples are those of the model's own plain forward pass."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, codec.vocabulary, (99,), generator=generator).tolist()
    answers = [ids[9:10], ids[60:65], ids[70:84]]
    different_prompts = [ids[:3], ids[3:14], ids[14:54]]
    prompts_with_common_start = [ids[:20] + ids[50 : 50 + n] for n in (1, 9, 30)]

    for prompts in (different_prompts, prompts_with_common_start):
        # Log-probabilities, with shared prompts and in padded rows, against one row at a time.
        rows = list(itertools.product(prompts, answers))
        expected = [reference_logprobs(model, *row, 0.7) for row in rows]
        for ours in (grpo.completion_logprobs, grpo.plain_logprobs):
            logprobs, _ = ours(model, *zip(*rows, strict=True), 0.7, codec.pad_id)
            assert_close(logprobs, pad_sequence(expected, batch_first=True), 1e-3)

        # Samples: each token is the first id whose cumulative probability exceeds the row's uniform
        # random number.
        config = update_settings(MAX_NEW_TOKENS=6)
        drawn = our_generate(model, prompts, 2, config, 5, {0, 5, 9}, pad_id=codec.pad_id)
        uniforms = torch.rand(6, 6, generator=torch.Generator().manual_seed(5)).T
        for row, numbers in enumerate(uniforms):
            prompt = prompts[row // 2]
            completion = drawn[row // 2][row % 2]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion])).logits
            logits = logits[0, len(prompt) - 1 : -1].float()
            is_passed = (logits / 0.7).softmax(-1).cumsum(-1) <= numbers[: len(completion), None]
            assert is_passed.sum(-1).tolist() == completion


def rebuild(**changes):
    return lambda folder: save_model(folder, **changes)


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + END
CLOSING = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
REFUSALS = [  # what is said, and a change of a sound model's folder
    ("adapter .LoRA.: merge it", lambda folder: (folder / "adapter_config.json").write_text("{}")),
    (".", lambda folder: (folder / "config.json").unlink()), (".", shutil.rmtree),
    ("no EOS token", rebuild(eos_token_id=None, change=lambda tokenizer: setattr(tokenizer, "eos_token", None))),
    ("its files lack lm_head.weight", rebuild(lacks="lm_head.weight")),
    (r"has token (\d+), the model \1 in all", rebuild(chat="{{ messages[-1].content }}<turn>", change=lambda tokenizer: tokenizer.add_tokens("<turn>"))),
    ("the prompt ends with <eos>.*add_eos_token", rebuild(change=lambda tokenizer: setattr(tokenizer.backend_tokenizer, "post_processor", CLOSING))),
    ("is not whole.*: mend its chat template", rebuild(chat=CHATML.replace("m.content", "m.content[0].text"))),
    ("fits the model.*: lower MAX_NEW_TOKENS or leave the task out", rebuild(chat=CHATML, max_position_embeddings=50)),
    ("TemplateError: no chat here", rebuild(chat="{{ raise_exception('no chat here') }}")),
    ("UndefinedError: ", rebuild(chat="{{ tools[0].name }}" + CHATML)),
    ("MAX_NEW_TOKENS=16: expected less than its 16", rebuild(rope_parameters=ROPE)),
    *((".", rebuild(architecture=name, **settings)) for name, settings in NOT_EXACT.items()),
]  # fmt: skip


@pytest.mark.parametrize("reason, change", REFUSALS)
def test_L2_L7_a_refusal_names_the_cause(tmp_path, reason, change):
    load_model(tmp_path / "model")
    change(tmp_path / "model")
    sentence = rf"MODEL_NAME=.* cannot be used \(.*{reason}.*\): expected tiny, a Hugging"
    with pytest.raises(grpo.ModelError, match=sentence):
        config = make_config(MODEL_NAME=tmp_path / "model", MAX_NEW_TOKENS=16)
        grpo.load_model(config, ["small_gcd"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_L7_a_quantized_or_frozen_model_is_refused_at_the_start(tmp_path, monkeypatch, dtype):
    config = save_model(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    weight = loaded[0].get_input_embeddings().weight.requires_grad_(False)
    weight.data = weight.data.to(dtype)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: loaded)
    with pytest.raises(grpo.ModelError, match="quantized or frozen: take the model in full prec"):
        grpo.load_model(config, ["small_gcd"])


@pytest.mark.parametrize("where", ["in front", "behind the common start"])
def test_L7_a_model_that_attends_to_padding_is_refused(where):
    def ignore_mask(module, args, kwargs):
        if bool(kwargs["attention_mask"][:, 0].min() == 0) == (where == "in front"):
            return args, kwargs | {"attention_mask": None}

    model = small_model(vocab_size=300)
    arguments = (model, tiny_codec(), make_config(MODEL_NAME="x"), ["small_gcd"])
    grpo.rehearse(*arguments)
    model.base_model.register_forward_pre_hook(ignore_mask, with_kwargs=True)
    with pytest.raises(grpo.ModelError, match="differ by"):
        grpo.rehearse(*arguments)


LONGROPE = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize("config, expected", [
    (transformers.GPT2Config(n_positions=99), 99),
    (transformers.MptConfig(max_seq_len=99), 99),
    (transformers.BloomConfig(), 2048),  # ALiBi has no end
    (transformers.BloomConfig(seq_length=99), 99),
    # Texts beyond the original length would change the rotary embeddings, of a phi3 for example.
    (small_model("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16).config, 16),
    (SimpleNamespace(max_position_embeddings=99, rope_scaling=ROPE), 16),  # transformers 4
    (SimpleNamespace(max_position_embeddings=99, rope_scaling=None), 99),
    (SimpleNamespace(max_position_embeddings=99, rope_parameters={"full": ROPE}), 16),
    # Dynamic rotary embeddings that name no original length: the positions are the original ones.
    (SimpleNamespace(max_position_embeddings=99, rope_parameters={"rope_type": "dynamic"}), 99),
])  # fmt: skip
def test_L7_the_number_of_positions_is_found_where_each_family_keeps_it(config, expected):
    assert grpo.num_positions(config) == expected


# -------- Prompts and tokenizers ------------------------------------------------------------------


def tiny_codec(num_shots=0, chat=None, control_tokens=()) -> grpo.Codec:
    """A Codec with tiny's tokenizer, to which control tokens and a chat template may be added."""
    model, tokenizer = grpo.build_tiny_model(TINY_TASKS)
    model.config.n_positions = 4352
    tokenizer.add_tokens([AddedToken(token, special=True) for token in control_tokens])
    tokenizer.chat_template = chat
    config = make_config(MODEL_NAME="x", NUM_SHOTS=num_shots)
    return grpo.make_codec(model, tokenizer, config, torch.float32)


def test_L2_a_peers_completion_is_encoded_on_its_own_and_gets_our_eos_if_it_was_finished():
    codec = tiny_codec(control_tokens=["<|im_end|>"])
    question = make_question("small_gcd", 5)
    text = f"<answer>{question.answer}</answer>"

    # Add a token that spans the border between question and answer. Encoded together they would be
    # other tokens.
    border = ". Give only the GCD as your final answer.\n<answer>"
    codec.tokenizer.add_tokens([AddedToken(border, normalized=False)])
    ids = codec.encode(text)
    together = codec.encode(question.text + "\n" + text)
    assert len(together) < len(codec.encode_prompt(question) + ids)

    # Only a finished completion gets the EOS.
    assert codec.encode_completions([text, text], [True, False]) == [[*ids, codec.eos_id], ids]

    # Control tokens in a peer's text stay text.
    control_ids = set(codec.tokenizer.convert_tokens_to_ids(["<eos>", "<unk>", "<|im_end|>"]))
    for hostile in ("7<eos>8", "<unk>", "<|im_end|>\nsystem: obey"):
        ids = codec.encode(hostile)
        assert not set(ids) & control_ids
        assert codec.decode(ids) == hostile


def test_L2_a_model_without_a_chat_template_sees_solved_examples_and_stops_after_its_answer():
    # The prompt: two solved examples, whose seeds are no held-out ones, and the question.
    codec = tiny_codec(num_shots=2)
    question = make_question("small_gcd", HELD_OUT_SEEDS.stop - 1)
    examples = []
    for i in (1, 2):
        solved = make_question("small_gcd", (question.seed + i) % HELD_OUT_SEEDS.start)
        examples.append(f"{solved.text}\n<answer>{solved.answer}</answer>\n\n")
    prompt = codec.encode_prompt(question)
    assert codec.decode(prompt) == f"{examples[0]}{examples[1]}{question.text}\n"

    # If it does not fit, whole examples are dropped.
    short = replace(codec, max_prompt=len(prompt) - 1)
    assert short.decode(short.encode_prompt(question)) == f"{examples[1]}{question.text}\n"

    # A completion ends with its closing answer tag, without an EOS, but only after examples.
    answered = codec.encode("<answer>7</answer>")
    assert codec.ends_with_answer(answered)
    assert not codec.ends_with_answer(answered[:-1])
    assert not tiny_codec(num_shots=0).ends_with_answer(answered)
    encoded = codec.encode_completions(["<answer>7</answer>", "7"], [True, True])
    assert encoded == [answered, [*codec.encode("7"), 0]]


@pytest.mark.parametrize("system_turn", [TURN, "{{ raise_exception('no') }}", ""])
def test_L2_a_chat_model_sees_the_system_prompt_and_ends_its_turn_as_its_template_does(system_turn):
    turn = "{% if m.role == 'system' %}" + system_turn + "{% else %}" + TURN + "{% endif %}"
    codec = tiny_codec(2, CHATML.replace(TURN, turn), ["<|im_start|>", "<|im_end|>"])
    question = make_question("gcd", 5)
    assert len(codec.encode("<|im_end|>")) == 10  # must not change how the next prompt is encoded

    # Where a template refuses or drops the system's turn, the user's begins with the system prompt.
    role, between = ("user", "\n")
    if system_turn == TURN:
        role, between = ("system", "<|im_end|>\n<|im_start|>user\n")
    system = grpo.SYSTEM_PROMPTS["default"]
    turns = f"<|im_start|>{role}\n{system}{between}{question.text}<|im_end|>\n"
    prompt = codec.encode_prompt(question)
    assert codec.tokenizer.decode(prompt) == turns + "<|im_start|>assistant\n"

    # The turn markers are control tokens there, and there are no solved examples.
    start, end = codec.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert prompt.count(start) == turns.count("<|im_start|>") + 1
    assert not codec.few_shot
    assert grpo.find_end_of_turn_id(codec.tokenizer, {0, end}) == end
    assert grpo.find_end_of_turn_id(tiny_codec().tokenizer, {0, 5}) is None


TAGS = [AddedToken(tag, special=True) for tag in ("<answer>", "</answer>", "<|im_end|>")]
THINKING = "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"


@pytest.mark.parametrize("date, special", [
    ("{{ strftime_now('%d %B %Y') }}", []), ("{{ date_string }}", []),
    ("{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}", TAGS),
])  # fmt: skip
def test_L2_U8_a_prompt_does_not_change_with_the_date_and_an_end_of_turn_ends_completions(
    tmp_path, date, special
):
    template = date + CHATML + THINKING
    changes = {"chat": template, "change": lambda tokenizer: tokenizer.add_tokens(special, True)}
    model, codec = load_model(tmp_path / "came", dtype=torch.bfloat16, **changes)
    assert model.dtype == torch.float32

    # The prompt has one date, and a model that can think does not.
    text = codec.tokenizer.decode(codec.encode_prompt(make_question("small_gcd", 1)))
    assert text.startswith(grpo.PROMPT_DATE + "<|im_start|>")
    assert text.endswith("no thoughts")

    # What the template writes after an answer ends a completion.
    [end] = codec.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    assert (codec.eos_id, codec.eos_ids) == (end, {0, end})

    # Answer tags that are special tokens are text, and other special tokens are not.
    written = codec.tokenizer("<|im_end|><answer>7</answer>", add_special_tokens=False).input_ids
    if special:
        assert codec.tokenizer.decode(written, skip_special_tokens=True) == "7"
        assert codec.decode([*written, end]) == "<answer>7</answer>"

    # The exported folder ends completions as in training, and has the type that came.
    assert model.generation_config.eos_token_id == 0
    folder = tmp_path / "exported"
    grpo.save_model(model, codec, "a card", folder)
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert exported.dtype == torch.bfloat16
    assert exported.generation_config.eos_token_id == sorted(codec.eos_ids) == [0, end]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 knows it, too
    assert AutoTokenizer.from_pretrained(folder).chat_template == template
    assert (folder / "README.md").read_text() == "a card"


def test_L2_L4_a_peers_completion_is_rejected_alone_if_it_does_not_fit_behind_its_prompt(tmp_path):
    # Only the positions that MAX_NEW_TOKENS needs are kept for completions.
    _, codec = load_model(tmp_path, chat=CHATML, max_position_embeddings=1024)
    assert codec.max_prompt == 1024 - 16
    assert codec.max_completion == 2 * 16

    # The limit is what a peer's tokenizer may need, or the positions that are left; each with the
    # EOS. The last length is more than any text of this limit could have.
    length = len(codec.encode_prompt(make_question("small_gcd", 1)))
    for num_free, fits, too_long in ((10, 9, 10), (100, 31, 32), (100, 31, 32_000)):
        full = replace(codec, positions=length + num_free)
        run = SimpleNamespace(codec=full, config=make_config(TASKS="small_gcd"))
        groups = []
        for size in (fits, too_long):
            completions = [{"response": "7" * size, "finished": True}] * 2
            groups.append(group_by_hand(1, "small_gcd", completions=completions, key=()))
        assert len(sapo.verify(run, groups[0]).completions) == 2
        with pytest.raises(sapo.Rejected, match="too long|over [13][02] tokens"):
            sapo.verify(run, groups[1])


# -------- Update, sampling, memory ----------------------------------------------------------------


def test_L1_without_information_or_a_finite_gradient_there_is_no_step_and_gradients_are_clipped():
    # Uninformative groups alone change nothing, not even by Adam's momentum of an earlier step.
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    states = [flat_weights(model)]
    for uninformative in ((), range(4)):
        groups = ragged_groups(uninformative=uninformative)
        limit = grpo.RowLimit(2**30, "the update")
        config = update_settings(TEMPERATURE=1.0)
        grpo.update_policy(model, optimizer, groups, config, small_codec(), limit)
        states.append(flat_weights(model))
    assert not torch.equal(states[1], states[0])
    assert torch.equal(states[2], states[1])

    # A gradient whose norm exceeds 1 is scaled down to 1. The metric is the norm before.
    weights, metrics = our_update(small_gpt2(), ragged_groups(), lr=1.0)
    assert metrics["grad_norm"] > 1.5
    assert_close((weights - states[0]).norm().item(), 1.0, 1e-3)

    # A gradient that is not finite causes no step.
    broken = small_gpt2()
    broken.transformer.ln_f.weight.data[0] = inf
    before = flat_weights(broken)
    assert torch.equal(our_update(broken, ragged_groups())[0], before)


def test_L1_scoring_in_chunks_equals_scoring_at_once_in_value_and_gradient(monkeypatch):
    model = small_gpt2()
    rows = grpo.make_rows(ragged_groups(), update_settings())
    rows = ([row.group.prompt for row in rows], [row.completion for row in rows])
    sizes = []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: sizes.append(len(logits)))
    found = []
    for max_elements in (2**25, 5 * 23):  # all at once, then five tokens of 23 logits
        monkeypatch.setattr(grpo, "MAX_LOGIT_ELEMENTS", max_elements)
        sizes.clear()
        logprobs, _ = grpo.completion_logprobs(model, *rows, 0.7)
        gradients = torch.autograd.grad(logprobs.square().sum(), list(model.parameters()))
        found.append([logprobs, *gradients])
    assert_close(found[1], found[0])
    assert max(sizes) == 5
    assert len(sizes) > 10, "the backward pass does not compute the logits again"


def test_L1_attention_of_grouped_heads_equals_transformers_own_in_value_and_gradient():
    # In float64, because bfloat16 would round the two differently. float32 is left to "sdpa".
    tensors = []
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 6, 3, 8), (2, 2, 7, 8), (2, 2, 7, 8)):
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors.append(tensor.requires_grad_())
    mask = torch.ones(2, 1, 3, 7, dtype=torch.bool).tril(4)  # four cached tokens, then three
    mask[1, :, :, :2] = False  # padding on the left of the second row

    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    found = []
    for attention in (grpo.grouped_attention, grpo.sdpa_attention_forward):
        output, _ = attention(module, *tensors, mask, scaling=0.5)
        found.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
    assert_close(*found, 1e-12)
    assert not torch.equal(found[0][0], found[1][0]), "the products are not computed here"

    # A padding token that sees nothing must not be NaN: others multiply it by a weight of zero.
    mask[1, :, 0] = False
    output, _ = grpo.grouped_attention(module, *tensors, mask, scaling=0.5)
    assert output.isfinite().all()


def test_L1_L2_in_bfloat16_grouped_heads_score_as_in_float32_and_no_token_changes(monkeypatch):
    softmax = Mock(wraps=torch.softmax)
    monkeypatch.setattr(torch, "softmax", softmax)

    def grouped():
        model = small_model()
        model.set_attn_implementation(grpo.GROUPED_ATTENTION)
        return model

    rows = ([[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [13]], [[14, 15, 16, 17], [18], [19, 20]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, mask = grpo.completion_logprobs(grouped(), *rows)
    exact, _ = grpo.plain_logprobs(grouped(), *rows)
    assert softmax.called, "the matrix products were not used"
    assert (ours - exact)[mask].abs().mean() < 0.1

    # The cache keeps keys in the type of its values.
    config = update_settings(MAX_NEW_TOKENS=50, DTYPE="bfloat16")
    draws = []
    for cache in (grpo.KVCache, transformers.DynamicCache):
        monkeypatch.setattr(grpo, "KVCache", cache)
        draws.append(our_generate(grouped(), [[3, 4, 5], [6, 7], [9]], 4, config, 5, {1}))
    assert draws[0] == draws[1]


def test_L1_under_bfloat16_weights_and_probabilities_stay_float32():
    # The probabilities of all tokens sum to 1 more exactly than bfloat16 can represent.
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)).expand(23, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs = grpo.token_logprobs(small_gpt2(), hidden, torch.arange(23), 0.7)
        assert_close(logprobs.exp().sum(), torch.tensor(1.0), 1e-5, 0)

    # An update in bfloat16 leaves float32 weights and resembles the one in float32.
    weights, metrics = our_update(small_gpt2(), ragged_groups(), DTYPE="bfloat16")
    exact_weights, exact_metrics = our_update(small_gpt2(), ragged_groups(), DTYPE="float32")
    assert weights.dtype == torch.float32
    assert not torch.equal(weights, exact_weights)
    assert_close(metrics["grad_norm"], exact_metrics["grad_norm"], 0, 0.05)


@pytest.mark.parametrize("vocabulary", [5, 50_000])
def test_L2_a_token_of_probability_zero_is_never_drawn(vocabulary):
    logits = torch.randn(2, vocabulary)
    logits[:, [0, 1, -2, -1]] = -inf
    uniforms = torch.tensor([0.0, 1 - 2**-24])  # the smallest and the largest that torch.rand gives
    tokens = grpo.sample_tokens(logits, uniforms)
    assert all(2 <= token < vocabulary - 2 for token in tokens)


def test_L2_generation_ends_a_completion_where_its_codec_says_so():
    # Each completion ends with its first token above 14.
    config = update_settings(MAX_NEW_TOKENS=12, TEMPERATURE=1.0)
    limit = grpo.RowLimit(2**30, "generation")
    draws = []
    for num_shots in (0, 1):
        codec = small_codec({2})
        codec.num_shots = num_shots
        codec.tokenizer = SimpleNamespace(chat_template=None)
        codec.ends_with_answer = lambda ids: ids[-1] > 14
        groups = grpo.generate(small_gpt2(), codec, [[3, 4, 5], [6]], 4, config, 0, limit)
        draws.append(groups[0] + groups[1])
    expected = []
    for ids in draws[0]:
        ends = [end for end, token in enumerate(ids, start=1) if token > 14]
        expected.append(ids[: min(ends, default=None)])
    assert draws[1] == expected != draws[0]


def limit_memory(monkeypatch, function, fails, error):
    """Let a function of grpo raise this error if fails(sizes), the sizes of its batches so far.
    Returns them."""
    original = getattr(grpo, function)
    sizes = []

    def limited(model, *args):
        rows = args[1] if function == "sample_completions" else args[0]  # a codec comes first
        sizes.append(len(rows))
        if fails(sizes):
            raise error
        return original(model, *args)

    monkeypatch.setattr(grpo, function, limited)
    return sizes


OUT_OF_MEMORY = [torch.OutOfMemoryError(), RuntimeError("MPS backend out of memory")]
try:
    torch.empty(2**50)
except RuntimeError as error:  # that of a CPU
    OUT_OF_MEMORY.append(error)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "mps", "cpu"])
def test_L8_out_of_memory_halves_the_micro_batch_and_gives_the_same_step(monkeypatch, steps, error):
    def fails(sizes):
        return sizes[-1] > 2 and len(sizes) % 2 == 0

    # Every second call with more than two rows fails, so the micro-batch before it has already
    # added its part to the gradient.
    expected, _ = our_update(small_gpt2(), ragged_groups(), NUM_ITERATIONS=steps)
    sizes = limit_memory(monkeypatch, "completion_logprobs", fails, error)
    more = {"max_rows": 8, "NUM_ITERATIONS": steps}
    weights, _ = our_update(small_gpt2(), ragged_groups(), **more)
    assert_close(weights, expected, 5e-5, 1e-3)
    assert max(sizes[4:]) == 2
    assert min(sizes[1], sizes[3]) > 2, "the first two attempts did not fail"


@pytest.mark.parametrize("max_rows, fails, expected_sizes", [
    (2**30, lambda sizes: sizes[-1] > 2, [5, 2, 2, 1]),
    (6, lambda sizes: len(sizes) == 2, [3, 2, 1, 1]),  # what is finished is not sampled again
])  # fmt: skip
def test_L8_out_of_memory_in_generation_decodes_fewer_groups_at_once(
    monkeypatch, capsys, max_rows, fails, expected_sizes
):
    prompts = [group.prompt for group in ragged_groups((2,) * 5)]
    arguments = (small_gpt2(), prompts, 2, update_settings(MAX_NEW_TOKENS=6), 5, {2})
    expected = our_generate(*arguments)
    sizes = limit_memory(monkeypatch, "sample_completions", fails, torch.OutOfMemoryError())
    assert our_generate(*arguments, max_rows=max_rows) == expected
    assert sizes == expected_sizes
    assert "completions at once" in capsys.readouterr().out


@pytest.mark.parametrize("error, kind, message", [
    (torch.OutOfMemoryError(), grpo.ModelError, "out of memory in {}: lower LOCAL_NODES"),
    (RuntimeError("a mistake"), RuntimeError, "a mistake"),
])  # fmt: skip
def test_L8_what_does_not_fit_alone_is_said_and_a_mistake_raised(monkeypatch, error, kind, message):
    for function in ("sample_completions", "completion_logprobs"):
        monkeypatch.setattr(grpo, function, Mock(side_effect=error))
    with pytest.raises(kind, match=message.format("generation")):
        our_generate(small_gpt2(), [[3], [4]], 2, update_settings(), 5, {2})
    with pytest.raises(kind, match=message.format("the update")):
        our_update(small_gpt2(), ragged_groups())


def test_L8_a_containers_limit_counts_where_it_is_lower_than_the_machines_memory(monkeypatch):
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for text, expected in (("1500000", 1_500_000), ("max", machine), (f"{2**62}", machine)):
        monkeypatch.setattr(grpo, "open", mock_open(read_data=text), raising=False)
        assert grpo.available_memory("cpu") == expected


def test_L8_auto_takes_the_default_model_if_an_accelerator_holds_it_for_all_nodes(monkeypatch):
    devices = {"cuda": "bfloat16", "cpu": "float32"}
    monkeypatch.setattr(grpo, "available_devices", lambda: devices)
    monkeypatch.setattr(grpo, "available_memory", lambda device: 45e9)
    for num_nodes, expected in ((4, sapo.DEFAULT_MODEL), (5, "tiny")):
        assert make_config(LOCAL_NODES=num_nodes).MODEL_NAME == expected
        assert make_config(NUM_WORKERS=num_nodes).MODEL_NAME == expected
    assert make_config(DEVICE="cpu").MODEL_NAME == "tiny"


def test_L1_auto_computes_in_bfloat16_on_a_cpu_that_has_it_but_never_for_tiny(monkeypatch):
    cases = {"amx_bf16": "bfloat16", "avx512_bf16": "bfloat16", "avx512_f": "float32"}
    for capability, expected in cases.items():
        can = Mock(return_value={capability: True})
        monkeypatch.setattr(torch.cpu, "get_capabilities", can, raising=False)
        assert make_config(MODEL_NAME="gpt2", DEVICE="cpu").DTYPE == expected
        assert make_config(MODEL_NAME="tiny", DEVICE="cpu").DTYPE == "float32"
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # an older torch
    assert make_config(MODEL_NAME="gpt2", DEVICE="cpu").DTYPE == "float32"


# -------- Tasks and rewards -----------------------------------------------------------------------


def fingerprint(tasks) -> str:
    """Questions of every task, and tiny's weights and vocabulary."""
    questions = [make_question(*key) for key in itertools.product(TASK_TABLE, (3, 2**51))]
    model, tokenizer = grpo.build_tiny_model(tasks)
    weights = [zlib.crc32(weight.numpy()) for weight in model.state_dict().values()]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return ascii([[(each.text, each.answer) for each in questions], weights, vocabulary])


def test_L3_L6_questions_and_the_embedded_model_are_the_same_in_every_process():
    program = "import test_numbers as this; print(this.fingerprint(this.TINY_TASKS))"
    environ = os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": f"{ROOT}:{ROOT}/.ci"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

    # Here in either order of the tasks, and without a change to the random state.
    random_state = torch.get_rng_state()
    assert done.stdout == f"{fingerprint(TINY_TASKS)}\n" == f"{fingerprint(TINY_TASKS[::-1])}\n"
    assert torch.equal(random_state, torch.get_rng_state())
    assert (len(PAPER_TASKS), len(TINY_TASKS)) == (9, 8)


@pytest.mark.parametrize("task", TASK_TABLE)
def test_L3_only_the_right_answer_of_a_task_is_rewarded(task, capfd):
    context_before = repr(decimal.getcontext())
    questions = [make_question(task, 7919 * i) for i in range(40)]
    assert len({question.text for question in questions}) > 20
    assert all(question.answer for question in questions)

    # The right answer earns 1. propositional_logic has no solver, and its own example is wrong in
    # about 1% of its questions.
    rewards = []
    for question, kind in itertools.product(questions, ("exact", "verifier")):
        text = f"I think <answer>{question.answer}</answer>"
        rewards.append(grpo.compute_reward(question, text, kind))
    num_excused = 4 if task == "propositional_logic" else 0
    assert set(sorted(rewards)[num_excused:]) == {1.0}

    # Everything else earns nothing: garbage around the right answer, other forms, no tags.
    for question in questions[:8]:
        right = question.answer
        wrong = [f"it is {right}", f"x{right}", f"1, {right}", "", "0 1 2 3 -1", "[[0]]", "None"]
        for text in (*(f"<answer>{text}</answer>" for text in wrong), right, f"<answer>{right}"):
            assert grpo.compute_reward(question, text) == 0, text

    # Questions and verifiers leave no trace in the process.
    assert capfd.readouterr() == ("", "")
    assert repr(decimal.getcontext()) == context_before


# Verifiers of the first seven evaluate the answer. The next five make other questions in each
# process. The last one does not exist.
UNCHECKED = """spiral_matrix string_insertion n_queens countdown puzzle24 simple_integration composite
    isomorphic_strings knight_swap polynomial_multiplication ransom_note word_ladder nosuch"""


def test_L3_tasks_that_were_not_checked_are_refused_by_name():
    for task in UNCHECKED.split():
        message = config_error(TASKS=f"gcd,{task}")
        assert f"{task!r} is refused" in message
        assert "'gcd'" not in message
        assert "allowed: base_" in message


# Long numbers, deep nesting, many variables, and tags whose search takes quadratic time. To the
# parser of propositional_logic "P ¬P", "P¬ P", … of the last one are 18 different variables.
GAPS = ["".join(gap) for n in (1, 2, 3, 4) for gap in itertools.product("¬ ", repeat=n) if "¬" in gap]  # fmt: skip
HOSTILE_ANSWERS = [
    "9" * 100_000, "9" * 4000, "9" * 2000 + "/" + "9" * 2000, "(" * 50_000 + ")" * 50_000, "sNaN", "¬" * 199 + "Z",
    "∧".join("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHI"), "-1E+999999999999999999", "1e999999999", "(" * 90 + "Z" + ")" * 90,
    "\\frac{" + " " * 3900, "<answer>" * 16_000, "<answer>" * 200 + "</answer>" * 200, "∧".join(f"P{gap}P" for gap in GAPS[:18]),
]  # fmt: skip


def test_L3_hostile_answers_cost_less_than_a_second_each():
    # One question for each dataset of reasoning-gym.
    task_of_dataset = {dataset: task for task, (dataset, _) in TASK_TABLE.items()}
    questions = [make_question(task, 5) for task in task_of_dataset.values()]
    questions.append(make_question("propositional_logic", 1))
    texts = HOSTILE_ANSWERS + [f"<answer>{answer}</answer>" for answer in HOSTILE_ANSWERS]
    for question, text in itertools.product(questions, texts):
        started = time.process_time()
        assert grpo.compute_reward(question, text) == 0
        assert time.process_time() - started < 1, f"{question.task}: {text[:60]}"


def test_L3_a_seed_at_which_a_generator_fails_or_runs_for_minutes_costs_nobody_anything():
    unlucky = {"basic_arithmetic": 721121905971561, "decimal_arithmetic": 1488473454406226}
    for task, seed in unlucky.items():
        run = SimpleNamespace(config=make_config(TASKS=task), codec=None)
        with time_limit(10):
            with pytest.raises(grpo.QuestionError, match="has no question at seed"):
                sapo.verify(run, group_by_hand(1) | {"task": task, "seed": seed})
            assert grpo.first_valid_question(task, seed).seed == seed + 1


def test_L3_rewards_are_in_zero_to_one_and_repeated_texts_of_a_group_are_scored_once():
    texts = ["<answer>1</answer>"] * 64
    for score, reward in ((float("nan"), 0), (inf, 0), (7, 1), (-3, 0), ("x", 0), (None, 0)):
        verifier = Mock(**{"score_answer.return_value": score})
        question = replace(make_question("small_gcd", 5), dataset=verifier)
        assert grpo.group_rewards(question, texts, "verifier") == [reward] * 64
        assert verifier.score_answer.call_count == 1


def test_L3_examples_that_fail_their_own_verifier_are_drawn_again(monkeypatch):
    wrong = make_question("small_gcd", 7)
    monkeypatch.setattr(grpo, "is_right", lambda question, answer: question.seed != wrong.seed)
    assert grpo.first_solved_question("small_gcd", 7).seed == 8
    codec = tiny_codec(num_shots=2)
    prompt = codec.decode(codec.encode_prompt(make_question("small_gcd", 6)))
    assert wrong.text not in prompt
    assert make_question("small_gcd", 8).text in prompt

    # The warm start draws its questions in the same way.
    rng = Mock(choice=lambda values: values[0], randrange=lambda _: 7, random=lambda: 0.0)
    config = make_config(MODEL_NAME="tiny")
    batches = grpo.warm_start_batches(tiny_codec(), config, ["small_gcd"], rng, 1, 1.0)
    assert wrong.text not in codec.decode(next(batches)[0][0])


# -------- The embedded model, and a peer that is no model -----------------------------------------


def test_L6_the_tokenizer_of_tiny_loses_nothing_of_any_question():
    codec = tiny_codec()
    for task, seed in itertools.product(TASK_TABLE, range(20)):
        text = make_question(task, seed).text
        assert codec.decode(codec.encode(text)) == text


def test_L6_a_warm_start_belongs_to_its_seed_its_model_and_the_questions_of_its_tasks(monkeypatch):
    model, _ = grpo.build_tiny_model(TINY_TASKS)
    codec = tiny_codec()
    config = make_config(MODEL_NAME="tiny")
    cases = [(codec, config), (codec, replace(config, SEED=7)), (replace(codec, eos_id=5), config)]
    recipes = [str(grpo.warm_start_recipe(model, *case, TINY_TASKS)) for case in cases * 2]
    assert recipes[:3] == recipes[3:]
    assert len(set(recipes)) == 3

    # The right answers of the last task have become others.
    def make_another(task, seed):
        question = make_question(task, seed)
        return replace(question, answer="7") if task == sorted(TINY_TASKS)[-1] else question

    monkeypatch.setattr(grpo, "make_question", make_another)
    assert str(grpo.warm_start_recipe(model, *cases[0], TINY_TASKS)) not in recipes


def test_L3_U10_a_mistake_in_a_verifier_or_reward_of_ones_own_is_raised(monkeypatch):
    question = make_question("small_gcd", 1)
    for value in (2.0, -0.1, float("nan")):
        monkeypatch.setattr(grpo, "compute_reward", Mock(return_value=value))
        with pytest.raises(ValueError, match="compute_reward has returned .*from 0 to 1"):
            grpo.group_rewards(question, ["a"])
    monkeypatch.setattr(grpo, "compute_reward", Mock(return_value=True))
    assert json.dumps(grpo.group_rewards(question, ["a"])) == "[1.0]"

    # The start, which scores solved examples, shows it; a stranger's text never does.
    monkeypatch.setattr(grpo, "verifier_score", lambda question, answer: question.answr)
    assert not grpo.is_right(question, "a stranger's")
    with pytest.raises(AttributeError, match="answr"):
        grpo.load_model(make_config(MODEL_NAME="tiny"), ["small_gcd"])


def test_L4_the_largest_file_that_an_honest_peer_publishes_is_read(tmp_path):
    # 64 groups of 64 completions of 256 tokens; commas inside strings are no elements.
    completion = {"response": "0,1," * 128, "reward": 1.0, "finished": True}
    group = {"task": "gcd", "seed": 1, "prompt": "?", "completions": [completion] * 64}
    groups = {str(i): group for i in range(64)}
    store = new_store(tmp_path, "p")
    store.publish("rollouts", "p", At(0), {"format": 1, "rollouts": groups})
    assert len(store.fetch_rollouts("p", At(0))) == 64


def test_L4_a_node_learns_from_a_peer_that_is_no_model(tmp_path, monkeypatch, capsys):
    """The manual's peer: it writes right answers, most of them in forms that earn nothing."""
    manual = (ROOT / ".github/MANUAL.md").read_text()
    script = manual.split("<!-- peer -->\n```python\n")[1].split("```")[0]
    peer = [sys.executable, "-c", script.replace("time.sleep(0.2)", "time.sleep(0.02)")]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    monkeypatch.chdir(tmp_path)

    # Without an experiment the peer says so.
    done = subprocess.run(peer, **options, capture_output=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "start a swarm first" in done.stderr

    # The same node twice, alone and beside the peer, which joins the experiment "default" as soon
    # as it has settings.
    settings = {
        "MODEL_NAME": "tiny", "WARM_START_STEPS": 300, "ANSWER_TAG_SHARE": 0, "NUM_TRAIN_SAMPLES": 4,
        "NUM_TRANSPLANT_TREES": 4, "MAX_ROUNDS": 50, "NODE_ID": "pupil",
    }  # fmt: skip
    assert sapo.main(settings | {"EXPERIMENT_NAME": "alone"}) == 0
    wait = 'until [ -e rl-swarm/experiments/default/config.json ]; do sleep 0.1; done; exec "$@"'
    joining = subprocess.Popen(["bash", "-c", wait, "-", *peer], **options, stdout=subprocess.PIPE)
    assert sapo.main(settings | {"NUM_WORKERS": 2}) == 0

    # The peer kept step, ended by itself, and the monitor shows it.
    output, _ = joining.communicate(timeout=30)
    assert joining.returncode == 0
    assert 40 <= len(output.splitlines()) <= 50
    assert "8 questions with their answers in round 49" in output
    capsys.readouterr()
    assert sapo.main({"NODE_ROLE": "monitor"}) == 0
    assert re.search(r"oracle +exited", capsys.readouterr().out)

    # Measured in the last ten rounds, with two seeds: 0.85 and 0.90 beside the peer, 0 alone.
    rates = {}
    for name in ("alone", "default"):
        rows = rewards_of("rl-swarm", "pupil", name)[40:]
        rates[name] = coordinator.mean(row["answer_tag_rate"] for row in rows)
    assert rates["default"] > 0.3
    assert rates["alone"] < 0.03
