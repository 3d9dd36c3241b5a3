"""Every causal language model that transformers knows, with small random weights: is it exact here,
or refused?

    python .ci/architectures.py [NAME …]      one line for each, then how many of each kind

exact      `load_model` accepts it, and `check_exact` of test_numbers.py passes: log-probabilities
           after shared prompts of unequal lengths, and samples, are those of the model's own plain
           forward pass
refused    a sentence says that it cannot be used
not built  the small sizes below do not suit it
wrong, died: bugs

Each model has a process of its own, with 3 GB and 60 seconds. All of them take a quarter of an
hour, so this is not part of the gate.
"""

import collections
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import grpo
from test_numbers import check_exact
from test_sapo import make_config

SMALL_SIZES = {  # a small value -> the settings, of any architecture, that get it
    0: "pad_token_id bos_token_id eos_token_id num_kv_shared_layers",
    0.3: "initializer_range init_std",
    1: "n_group topk_group",
    2: """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_key_value_heads num_kv_heads num_experts_per_tok linear_num_key_heads
        linear_num_value_heads mamba_expand
    """,
    4: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_experts num_local_experts n_routed_experts rotary_dim
    """,
    8: """
        head_dim d_kv kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim
        state_size sliding_window attention_window linear_key_head_dim linear_value_head_dim
        mamba_d_state mamba_d_head mamba_n_heads hidden_size_per_layer_input
    """,
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    32: "hidden_size n_embd d_model embedding_size",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff ffn_hidden_size",
    512: "max_position_embeddings n_positions max_seq_len",
}
MAX_PARAMETERS = 6e7
MAX_BYTES = 3 << 30
MAX_SECONDS = 60


def build(architecture: str, folder: str) -> None:
    """Write a small model of this architecture, with tiny's tokenizer, as a Hugging Face folder."""
    tokenizer = grpo.build_tiny_model(grpo.TINY_TASKS)[1]

    # Every setting that the architecture has gets its small value.
    small = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    for size, names in SMALL_SIZES.items():
        small |= dict.fromkeys(names.split(), size)
    default = transformers.CONFIG_MAPPING[architecture]().get_text_config()
    settings = {name: value for name, value in small.items() if hasattr(default, name)}
    config = type(default)(**settings)

    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        raise ValueError("not small")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def judge(folder: str) -> tuple[str, str]:
    """Load the model of a folder and compare. Returns (kind, reason)."""
    config = make_config(
        MODEL_NAME=folder, MAX_NEW_TOKENS=16, DEVICE="cpu", DTYPE="float32", NUM_SHOTS=0
    )
    try:
        model, codec = grpo.load_model(config, ["small_gcd"])
    except grpo.ModelError as error:
        return "refused", str(error)
    try:
        check_exact(model, codec)
    except AssertionError as error:
        return "wrong", str(error)
    return "exact", ""


def judge_in_a_process(architecture: str) -> str:
    """Build and judge a model in a child process. Returns "kind: reason"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
        signal.alarm(MAX_SECONDS)
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            kind = "not built"
            reason = ""
            try:
                build(architecture, folder)
                kind = "died"
                kind, reason = judge(folder)
            except BaseException as error:  # the parent prints it
                reason = repr(error)
        os.write(writer, f"{kind}: {reason}".replace("\n", " ")[:300].encode())
        os._exit(0)

    # A child that is killed, by the limits or a crash, sends nothing.
    os.close(writer)
    with open(reader, errors="replace") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result or "died: no answer"


if __name__ == "__main__":
    counts = collections.Counter()
    for architecture in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        result = judge_in_a_process(architecture)
        counts[result.split(":")[0]] += 1
        print(f"{architecture:24} {result}", flush=True)
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{summary} (transformers {transformers.__version__})")
