"""Every causal language model that transformers knows, with small random weights: exact here, or refused?

    python .ci/architectures.py [NAME …]      a line for each, then how many of each kind

exact: `load_model` takes it, and what `check_exact` of test_numbers.py looks at is equal to the model's own plain
forward pass: log-probabilities behind shared prompts of unequal lengths, and what is sampled.
refused: a sentence says that it cannot be used. not built: these small sizes do not suit it. wrong, died: bugs.
Each in a process of its own with 3 GB and 60 seconds. Not part of the gate: a quarter of an hour.
"""

import collections
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo
import torch
import transformers
from test_numbers import check_exact
from test_sapo import config_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SIZES = {  # setting of some architecture -> small value
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads"
    " num_kv_heads num_experts_per_tok linear_num_key_heads linear_num_value_heads mamba_expand",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"
    " num_experts num_local_experts n_routed_experts rotary_dim",
    8: "head_dim d_kv kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim state_size"
    " sliding_window attention_window linear_key_head_dim linear_value_head_dim mamba_d_state mamba_d_head"
    " mamba_n_heads hidden_size_per_layer_input",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    32: "hidden_size n_embd d_model embedding_size",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff ffn_hidden_size",
    512: "max_position_embeddings n_positions max_seq_len",
    1: "n_group topk_group",
    0: "pad_token_id bos_token_id eos_token_id num_kv_shared_layers",
    0.3: "initializer_range init_std",
}


def build(name: str, folder: str) -> None:
    """A small model of this architecture, with the tokenizer of `tiny`, as a Hugging Face folder."""
    tokenizer = grpo.build_tiny(grpo.SMALL_TASKS)[1]
    default = transformers.CONFIG_MAPPING[name]().get_text_config()
    small = {setting: size for size, settings in SIZES.items() for setting in settings.split()}
    small |= dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(tokenizer))
    config = type(default)(**{setting: size for setting, size in small.items() if hasattr(default, setting)})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if sum(p.numel() for p in model.parameters()) > 6e7:
        raise ValueError("not small")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def judge(folder: str) -> tuple[str, str]:
    settings = dict(MODEL_NAME=folder, MAX_NEW_TOKENS="16", DEVICE="cpu", DTYPE="float32", NUM_SHOTS="0")
    try:
        loaded = grpo.load_model(config_of(**settings), ["small_gcd"])
    except ValueError as error:
        return "refused", str(error)
    try:
        check_exact(*loaded)
    except AssertionError as error:
        return "wrong", str(error)
    return "exact", ""


def in_a_process(name: str) -> str:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        signal.alarm(60)
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            kind, why = "not built", ""
            try:
                build(name, folder)
                kind = "died"
                kind, why = judge(folder)
            except BaseException as error:
                why = repr(error)
        os.write(writer, f"{kind}: {why}".replace("\n", " ")[:300].encode())
        os._exit(0)
    os.close(writer)
    with open(reader, errors="replace") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text or "died: no answer"


if __name__ == "__main__":
    kinds = collections.Counter()
    for name in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        result = in_a_process(name)
        kinds[result.split(":")[0]] += 1
        print(f"{name:24} {result}", flush=True)
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    print(f"{found} (transformers {transformers.__version__})")
