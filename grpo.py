"""GRPO for one model: sample completions of questions, score them, and train on the rewards.

The core is GRPO exactly as it runs, on top of the forward pass and the tokenizer below. It departs
from textbook GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1) in four ways. The SAPO paper
(arXiv:2509.08721) shares departures 1, 2 and 4.

1. There is no KL penalty, so there is no reference model.
2. The clip range of the ratio is asymmetric, from 1 - 0.2 to 1 + 0.28 (clip-higher, DAPO,
   arXiv:2503.14476, section 3.1).
3. By default (LOSS_TYPE=dapo), the loss is averaged over all tokens of the update (DAPO, section
   3.3). Textbook GRPO averages over the tokens of each completion first (LOSS_TYPE=grpo).
4. The old log-probabilities are computed by the *current* model at the start of the update, even
   for completions that another model wrote.

By default, an update is a single optimizer step (NUM_ITERATIONS=1). The ratio is then exactly 1, no
token is clipped, and the loss has the same gradient as -A log p (REINFORCE). A group's advantages
sum to 0, so its loss is 0 if its completions are equally long. Watch the reward, not the loss.

Recurring arguments:
    config  the settings (`Config` in sapo.py)
    codec   the tokenizer and the model's conventions, such as EOS ids
    limit   how many completions fit in memory. `limit.split(groups)` returns batches of at most
            this size, and cuts large groups into parts. `limit.retry(f, …)` calls f(…) and, if
            memory runs out, calls it again with a lower limit.

Shapes in comments:
    N  prompts in a batch                    P  tokens in the longest prompt
    G  completions per prompt                T  tokens in the longest completion
    B  completions (rows) in a batch         S  tokens in these completions, without padding
    R  unfinished rows                       H  hidden size          V  vocabulary size
"""

import contextlib
import ctypes
import decimal
import difflib
import functools
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import sys
import traceback
import unicodedata
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import reasoning_gym
import torch
import torch.nn.functional as F
import transformers
from reasoning_gym.arithmetic import basic_arithmetic
from reasoning_gym.logic.propositional_logic import Expression
from reasoning_gym.utils import SYSTEM_PROMPTS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from torch.utils.checkpoint import checkpoint as recompute_in_backward


@dataclass
class Group:
    """One question with its G completions, the unit of advantages, updates and sharing.

    Every list except `prompt` has one entry per completion. An external group comes from a peer
    (another node).
    """

    prompt: list[int]  # token ids
    completions: list[list[int]]  # token ids; an EOS can only come last
    rewards: list[float]  # in [0, 1]; computed by this process, even for external groups
    question: "Question | None" = None
    texts: list[str] = field(default_factory=list)  # the completions, decoded
    finished: list[bool] = field(default_factory=list)  # False if the completion was truncated
    key: tuple | None = None  # (round, stage, node_id, index) of an external group

    # `update_policy` fills in these fields.
    advantages: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # loss weight of the completion's tokens
    old_logprobs: list[torch.Tensor] = field(default_factory=list)  # one value per token

    @property
    def is_informative(self) -> bool:
        """True if the rewards differ (non-zero variance). Otherwise, it contributes no gradient."""
        return rewards_differ(self.rewards)


def rewards_differ(rewards: list[float]) -> bool:
    """Return whether the rewards differ. [1, 1] -> False, [0, 1] -> True."""
    return max(rewards) - min(rewards) > 1e-6


# -------- Advantages and loss ---------------------------------------------------------------------


def group_advantages(rewards: list[float]) -> list[float]:
    """Return A_i = (r_i - mean) / (std + 1e-4) within one group, or zeros if all r_i are equal.

    The std uses Bessel's correction, as in TRL.
    [1, 0, 0, 1] -> [0.866, -0.866, -0.866, 0.866]
    """
    if not rewards_differ(rewards):
        return [0.0] * len(rewards)
    r = torch.tensor(rewards, dtype=torch.float64)  # (G,)
    # EXERCISE (Dr. GRPO, arXiv:2503.20783): drop the division by the standard deviation.
    return ((r - r.mean()) / (r.std(unbiased=True) + 1e-4)).tolist()


def loss_weights(lengths: torch.Tensor, loss_type: str, max_new_tokens: int) -> torch.Tensor:
    """Return the loss weight of each completion's tokens. lengths: tokens per completion.

    The weights are computed once per update, from all its completions, so the gradient does not
    depend on how the update is split into micro-batches.
    """
    lengths = lengths.to(torch.float64)
    divisors = {
        "dapo": lengths.sum(),  # every token weighs the same
        "grpo": len(lengths) * lengths,  # every completion weighs the same
        "dr_grpo": len(lengths) * max_new_tokens,  # independent of the lengths
    }
    return torch.ones_like(lengths) / divisors[loss_type]


def grpo_loss(logprobs, old_logprobs, advantages, mask, weights, clip_low=0.2, clip_high=0.28):
    """Return PPO's clipped loss (arXiv:1707.06347, eq. 7) and the number of clipped tokens.

    The loss is a weighted sum over tokens.
    logprobs, old_logprobs, mask: (B, T); advantages, weights (from `loss_weights`): (B,).
    """
    ratio = torch.exp(logprobs - old_logprobs)  # (B, T)
    a = advantages.unsqueeze(1)  # (B, 1)

    # The minimum removes the incentive to move the ratio beyond the clip range.
    unclipped = ratio * a
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * a
    token_loss = -torch.min(unclipped, clipped)  # (B, T)

    loss = (token_loss * mask * weights.unsqueeze(1)).sum()
    num_clipped = ((clipped < unclipped) & mask).sum()
    return loss, num_clipped


# -------- The update ------------------------------------------------------------------------------

MAX_GRAD_NORM = 1.0  # EXERCISE: turn this into a setting, a row of `Config` in sapo.py


def update_policy(model, optimizer, groups: list[Group], config, codec, limit) -> dict:
    """Train on own and external groups together, in up to NUM_ITERATIONS steps.

    Return the metrics that `update_numbers` lists. Raise ModelError if memory is too small for a
    single completion.
    """
    # Uninformative groups count in the denominators of the loss weights.
    lengths = torch.tensor([len(ids) for group in groups for ids in group.completions])
    weights = loss_weights(lengths, config.LOSS_TYPE, config.MAX_NEW_TOKENS)
    sizes = [len(group.completions) for group in groups]
    for group, group_weights in zip(groups, weights.split(sizes), strict=True):
        # EXERCISE (DAPO, section 3.4): give truncated completions no gradient.
        group.advantages = group_advantages(group.rewards)
        group.weights = group_weights.tolist()
        # The first step fills these tensors. float64 holds any dtype's values exactly.
        group.old_logprobs = [torch.zeros(len(ids)).double() for ids in group.completions]

    # Uninformative groups skip the forward pass. Sorting by prompt length reduces padding.
    trained = [group for group in groups if group.is_informative]
    trained.sort(key=lambda group: len(group.prompt))

    steps = []
    model.eval()  # no dropout, so that log-probabilities are deterministic

    # Without a gradient, Adam's momentum would still move the weights, so take no step.
    for i in range(config.NUM_ITERATIONS if trained else 0):
        metrics = limit.retry(
            accumulate_gradients, update_micro_batches, model, trained, config, codec, limit, step=i
        )
        if not math.isfinite(metrics["grad_norm"]):  # this step would ruin the weights
            break
        optimizer.step()
        steps.append(metrics)
    optimizer.zero_grad()  # frees the gradients' memory
    return update_numbers(trained, steps, config)


def accumulate_gradients(micro_batches, model, groups, config, *args, **kwargs) -> dict:
    """Add up the gradients of one optimizer step, clip them, and return the step's metrics.

    `micro_batches`, which gets all other arguments, yields a dict per micro-batch with its loss and
    other metrics, which are added up. (The warm start uses a different `micro_batches`.)
    """
    # float16 rounds gradients below 3e-8 to 0. Therefore, multiply the loss by a power of two, and
    # divide the gradients by it. If they overflow, repeat the step with a smaller power.
    for scale in (2.0**12, 2.0**6, 1.0) if config.DTYPE == "float16" else (1.0,):
        model.zero_grad()
        totals = defaultdict(float)
        for metrics in micro_batches(model, groups, config, *args, **kwargs):
            (metrics["loss"] * scale).backward()
            for name, value in metrics.items():
                totals[name] += value.item()

        for p in model.parameters():
            if scale > 1 and p.grad is not None:
                p.grad /= scale
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if torch.isfinite(grad_norm):
            break
    return totals | {"grad_norm": grad_norm.item()}


def update_micro_batches(model, groups: list[Group], config, codec, limit, step: int):
    """Yield the loss and the number of clipped tokens of each micro-batch of an update."""
    for batch in limit.split(groups):
        with autocast(config.DTYPE, model):
            logprobs, mask = completion_logprobs(model, batch, config.TEMPERATURE, codec.pad_id)

        # The first step's log-probabilities are the old log-probabilities of every step. They are
        # kept in the groups, whose parts in `batch` share these tensors.
        old_rows = [row for group in batch for row in group.old_logprobs]
        if step == 0:
            for old_row, row in zip(old_rows, logprobs.detach(), strict=True):
                old_row.copy_(row[: len(old_row)])  # without the padding
        old_logprobs = pad_sequence(old_rows, batch_first=True).to(logprobs)  # (B, T)

        advantages = logprobs.new_tensor([a for group in batch for a in group.advantages])  # (B,)
        weights = logprobs.new_tensor([w for group in batch for w in group.weights])  # (B,)
        loss, num_clipped = grpo_loss(
            logprobs, old_logprobs, advantages, mask, weights, config.CLIP_LOW, config.CLIP_HIGH
        )
        yield {"loss": loss, "clipped_tokens": num_clipped}


# -------- Log-probabilities -----------------------------------------------------------------------


def completion_logprobs(model, groups: list[Group], temperature: float = 1.0, pad_id: int = 0):
    """Return the log-probability of each completion token and the mask of real tokens, both (B, T).

    A group's prompt passes through the model once per micro-batch. Its completions continue from
    copies of the KV cache, through which the gradient flows back into the prompt.
    """
    # Run the N prompts. The results have one row per completion:
    #     last            hidden state of the prompt's last token (B, H)
    #     cache           KV cache of the prompt
    #     attention_mask  1 for tokens, 0 for padding (B, P)
    prompts = [group.prompt for group in groups]
    sizes = [len(group.completions) for group in groups]
    last, cache, attention_mask = prefill(model, prompts, sizes, pad_id)

    # `last` predicts token 0 of the completion, and token i predicts token i + 1.
    completions = [ids for group in groups for ids in group.completions]
    targets, mask = pad(completions, pad_id, model.device)  # (B, T)
    hidden = last.unsqueeze(1)  # (B, 1, H)
    if targets.shape[1] > 1:
        inputs = targets[:, :-1]  # (B, T-1); the last token predicts nothing
        # No token can see padding on its right, so all these positions of the mask may be 1.
        attention_mask = F.pad(attention_mask, (0, inputs.shape[1]), value=1)  # (B, P+T-1)
        rest, _ = forward_hidden(model, inputs, attention_mask, cache)  # (B, T-1, H)
        hidden = torch.cat([hidden, rest], dim=1)  # (B, T, H)

    # Compute logits for real tokens only, in chunks to save memory.
    values = token_logprobs_in_chunks(model, hidden[mask], targets[mask], temperature)  # (S,)
    return values.new_zeros(mask.shape).masked_scatter(mask, values), mask


def token_logprobs(model, hidden, targets, temperature: float):
    """Return log p of each target at the sampling temperature: (S, H), (S,) -> (S,)."""
    logits = scaled_logits(model, hidden, temperature)  # (S, V)
    return -F.cross_entropy(logits, targets, reduction="none")


# -------- Sampling --------------------------------------------------------------------------------


@torch.no_grad()
def sample_completions(model, codec, prompts, uniforms, temperature: float) -> list[list[int]]:
    """Sample B completions token by token, the same number for each prompt, in the prompts' order.

    A completion ends with an EOS, with </answer> if the prompt is few-shot, or at the latest after
    MAX_NEW_TOKENS tokens.

    uniforms: (MAX_NEW_TOKENS, B) random numbers, drawn on the CPU, so they are the same on every
    device. Each completion uses its own column. Apart from rounding, it therefore does not depend
    on the rest of its batch.
    """
    max_tokens, num_rows = uniforms.shape
    tokens = torch.full((num_rows, max_tokens), -1, device=model.device)  # -1: not sampled

    # `rows` lists the unfinished rows of `tokens` (R of them; at first, all B). `last`, `cache`,
    # `attention_mask` and `new_tokens` have one entry per unfinished row.
    rows = torch.arange(num_rows, device=model.device)  # (R,)
    sizes = [num_rows // len(prompts)] * len(prompts)
    last, cache, attention_mask = prefill(model, prompts, sizes, codec.pad_id)

    for i in range(max_tokens):
        logits = scaled_logits(model, last, temperature)  # (R, V)
        new_tokens = sample_tokens(logits, uniforms[i, rows])  # (R,)
        tokens[rows, i] = new_tokens
        unfinished = codec.unfinished(tokens[rows, : i + 1])  # </answer> may span several tokens
        if not unfinished or i == max_tokens - 1:
            break

        # Keep only the unfinished rows.
        if len(unfinished) < len(rows):
            unfinished = torch.tensor(unfinished, device=model.device)
            rows = rows[unfinished]
            new_tokens = new_tokens[unfinished]
            attention_mask = attention_mask[unfinished]
            cache.batch_select_indices(unfinished)

        # Run the new tokens through the model.
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
        hidden, cache = forward_hidden(model, new_tokens.unsqueeze(1), attention_mask, cache)
        last = hidden[:, -1]  # (R, H)

    return [[token for token in row if token >= 0] for row in tokens.tolist()]


def sample_tokens(logits, uniforms):
    """Draw one token id per row from the softmax: logits (R, V), uniforms (R,) -> (R,).

    It is the first token whose cumulative probability exceeds the row's random number. Top-k and
    top-p are not used, because the loss uses probabilities from the full softmax.
    """
    cumulative = torch.softmax(logits, dim=-1).cumsum(-1)  # (R, V)
    # Rounding may leave the total at 0.9999, so scale the random number by the total. If the
    # product rounds up to the total, the search returns V, hence the clamp.
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(1)  # (R,)
    return token.clamp(max=logits.shape[1] - 1)


# -------- Prompts and rewards ---------------------------------------------------------------------
# reasoning-gym generates a question from (task, seed). With a chat template, a system prompt asks
# for <answer>…</answer>. Otherwise, few-shot examples such as
# "Calculate 2 + 2.\n<answer>4</answer>\n\n" precede the question (by default, none for `tiny`).


def compute_reward(question: "Question", text: str, kind: str = "exact") -> float:
    """Return the reward of a completion, in [0, 1]; 0 if it has no answer in <answer> tags.

    kind="verifier": the score of the task's verifier.
    kind="exact": 1 if this score is at least 0.99, otherwise 0. Some verifiers give even garbage a
    small score, which division by the std would inflate to a full-size advantage.
    """
    # EXERCISE: return your own reward, any number from 0 to 1. The text may come from an untrusted
    # peer, so never evaluate it, and make sure that no text makes your code fail or run for long.
    answer = extract_tagged_answer(text)  # between the last <answer> and </answer>, or None
    score = 0.0 if answer is None else safe_score(question, answer)
    return score if kind == "verifier" else float(score >= 0.99)


# ==== The core ends here. Below: the forward pass, memory, tasks, tokenizer, models, warm start ===

transformers.utils.logging.set_verbosity_error()  # hide warnings about padding; it is handled here
if not sys.stderr.isatty():  # show download progress only in a terminal
    transformers.utils.logging.disable_progress_bar()


# -------- The forward pass ------------------------------------------------------------------------

MAX_LOGIT_ELEMENTS = 2**27  # logits (tokens x vocabulary) per chunk, 512 MiB in float32
# The name of the forward method's cache argument, which changed in transformers 5.24. Newer
# versions accept the old name, but print a warning.
HAS_NEW_NAME = hasattr(transformers.modeling_outputs.BaseModelOutputWithPast, "cache")
CACHE_ARGUMENT = "cache" if HAS_NEW_NAME else "past_key_values"


def forward_hidden(model, ids, attention_mask, cache=None):
    """Run ids (rows, length) through the model, after the tokens that the KV cache already holds.

    attention_mask: (rows, cached + length), 0 for padding on the left, which no token may see.
    Return the last layer's hidden states (rows, length, H) and the cache, which now includes ids.
    """
    cache = KVCache(config=model.config) if cache is None else cache
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # count real tokens only
    output = model.base_model(
        input_ids=ids,
        attention_mask=attention_mask,
        position_ids=positions[:, cache.get_seq_length() :],
        use_cache=True,
        **{CACHE_ARGUMENT: cache},
    )
    return output.last_hidden_state, cache


def prefill(model, prompts: list[list[int]], rows_per_prompt: list[int], pad_id: int):
    """Run N prompts through the model and repeat the results for B rows.

    Return the hidden state of each row's last token (B, H), the KV cache, and the attention mask
    (B, P). A prefix that all prompts share, such as a chat model's system prompt, passes through
    the model once.
    """
    repeats = torch.tensor(rows_per_prompt, device=model.device)  # (N,)
    cache = None
    shared = 0
    if len(prompts) > 1 and not needs_unpadded_prompts(model.config):
        # The last token of a prompt is never shared, because its hidden state is needed.
        shared = len(os.path.commonprefix([prompt[:-1] for prompt in prompts]))
    if shared > 0:
        ids, mask = pad([prompts[0][:shared]], pad_id, model.device)  # (1, shared)
        _, cache = forward_hidden(model, ids, mask.long())
        cache.batch_repeat_interleave(len(prompts))

    # Pad the rest on the left, so that no padding separates a prompt from its completion.
    ids, mask = pad([prompt[shared:] for prompt in prompts], pad_id, model.device, "left")
    attention_mask = F.pad(mask.long(), (shared, 0), value=1)  # (N, P)
    hidden, cache = forward_hidden(model, ids, attention_mask, cache)  # (N, P - shared, H)
    cache.batch_repeat_interleave(repeats)
    last = hidden[:, -1].repeat_interleave(repeats, 0)
    return last, cache, attention_mask.repeat_interleave(repeats, 0)


def needs_unpadded_prompts(config) -> bool:
    """Return whether padding between a shared prefix and the rest would shift relative positions.

    It would in models with sliding windows, such as GPT-Neo, and in MPT, which uses ALiBi.
    """
    is_sliding = transformers.DynamicCache(config=config).is_sliding
    return any(is_sliding) or config.model_type in ("gpt_neo", "mpt")


def scaled_logits(model, hidden, temperature: float):
    """Return logits / temperature, at least in float32: (..., H) -> (..., V).

    Casting bfloat16 logits to float32 before the softmax reduces the mean error of a
    log-probability from 0.025 to 0.004.
    """
    logits = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    factor /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    logits = logits if factor == 1 else logits * factor
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    logits = cap * torch.tanh(logits / cap) if cap else logits
    return logits if temperature == 1 else logits / temperature  # dividing by 1 would copy them


class KVCache(transformers.DynamicCache):
    """A KV cache whose keys have the dtype of its values.

    Rotary embeddings return float32 keys, all of which attention would otherwise cast to autocast's
    dtype again for every new token.
    """

    def update(self, keys, values, *args, **kwargs):
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def grouped_attention(module, query, key, value, attention_mask, **more):
    """Compute bfloat16 attention on a CPU for models in which several heads share keys and values.

    transformers' "sdpa" copies the keys and values for every head; plain matrix products do not.
    All other cases are left to "sdpa", which is faster in float32.

    query: (rows, heads, length, size); key, value: (rows, kv_heads, total, size);
    attention_mask: (rows, 1, length, total), True where a token may attend to another token.
    Return (rows, length, heads, size), and None in place of the attention weights.
    """
    rows, heads, length, size = query.shape
    kv_heads, total = key.shape[1:3]
    is_usual = more.get("scaling") and more.get("position_bias") is None
    is_masked = attention_mask is not None and attention_mask.dtype == torch.bool
    is_faster = heads > kv_heads and query.device.type == "cpu" and value.dtype != torch.float32
    if not (is_usual and is_masked and is_faster):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)

    # Stack the heads that share keys and values along the token axis, as if they were more tokens.
    query = (query * more["scaling"]).to(value.dtype).reshape(rows, kv_heads, -1, size)
    scores = query @ key.transpose(2, 3)  # (rows, kv_heads, heads / kv_heads * length, total)
    scores = scores.view(rows, kv_heads, -1, length, total)
    # Mask with the lowest number, not -inf. Otherwise, a padding token that may attend to no token
    # would become NaN.
    scores = scores.masked_fill(~attention_mask.unsqueeze(2), torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1).view(rows, kv_heads, -1, total)
    return (weights @ value).view(rows, heads, length, -1).transpose(1, 2), None


# Register it under a separate name, so that other models in this process keep their "sdpa".
GROUPED_ATTENTION = "sdpa_grouped"
transformers.AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
transformers.AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


def token_logprobs_in_chunks(model, hidden, targets, temperature: float):
    """Compute `token_logprobs` in chunks of at most MAX_LOGIT_ELEMENTS logits.

    If there are several chunks, the backward pass recomputes their logits instead of storing them.
    """
    chunk = max(1, MAX_LOGIT_ELEMENTS // model.config.get_text_config().vocab_size)
    if len(targets) <= chunk:
        return token_logprobs(model, hidden, targets, temperature)
    pieces = [
        recompute_in_backward(token_logprobs, model, h, y, temperature, use_reentrant=False)
        for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(pieces)


def pad(rows: list[list[int]], pad_id: int, device, side: str = "right"):
    """Pad rows of token ids to the same length. Return the ids and the mask of real tokens.

    [[7], [8, 9]] -> [[7, pad_id], [8, 9]] and [[True, False], [True, True]]
    """
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    ids = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side=side)
    mask = pad_sequence(mask, batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)


def autocast(dtype: str, model):
    """Return a context that computes in `dtype`, "float32", "bfloat16" or "float16".

    The weights stay in float32, because a 16-bit weight would lose small optimizer steps.
    """
    return torch.autocast(model.device.type, getattr(torch, dtype), enabled=dtype != "float32")


# -------- Metrics of an update --------------------------------------------------------------------


def update_numbers(trained: list[Group], steps: list[dict], config) -> dict:
    """Return the metrics of an update.

    loss                     of the first optimizer step
    clip_fraction            share of clipped tokens, averaged over NUM_ITERATIONS steps; steps that
                             were skipped because of a non-finite gradient count as 0
    grad_norm                of the last step, before gradient clipping
    trained_tokens           tokens in the completions that were trained on
    optimizer_steps          NUM_ITERATIONS; fewer if a gradient was not finite, and 0 if no group
                             was informative
    logp_own, logp_external  mean log-probability per token before the update, in own informative
                             groups and in external informative groups
    """
    num_tokens = sum(len(ids) for group in trained for ids in group.completions)
    num_clipped = sum(step["clipped_tokens"] for step in steps)
    return {
        "loss": steps[0]["loss"] if steps else 0.0,
        "clip_fraction": num_clipped / max(1, num_tokens * config.NUM_ITERATIONS),
        "grad_norm": steps[-1]["grad_norm"] if steps else 0.0,
        "trained_tokens": num_tokens,
        "optimizer_steps": len(steps),
        "logp_own": mean_logprob([group for group in trained if group.key is None]),
        "logp_external": mean_logprob([group for group in trained if group.key is not None]),
    }


def mean_logprob(groups: list[Group]) -> float | None:
    """Average the log-probabilities within each completion, then over completions.

    Return None if there are no completions.
    """
    means = [row.mean().item() for group in groups for row in group.old_logprobs]
    return sum(means) / len(means) if means else None


# -------- Memory and devices ----------------------------------------------------------------------

# These phrases occur in the out-of-memory errors of CUDA, MPS and the CPU's allocator.
OUT_OF_MEMORY = (
    "out of memory|can't allocate memory|not enough memory|Invalid buffer|bad_alloc|ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch ran out of memory, which raises RuntimeError rather than MemoryError."""
    return isinstance(error, RuntimeError) and bool(re.search(OUT_OF_MEMORY, str(error)))


@dataclass
class Limit:
    """The number of completions per forward pass, which is halved when memory runs out."""

    completions: int
    where: str  # the work that needs the memory, for the log
    notify: object = print  # called with a message
    tried: int = 0  # completions in the largest batch of the last `split`

    def split(self, groups: list[Group]) -> list[list[Group]]:
        """Split groups into batches of at most `self.completions` completions.

        A group that is too large is split into parts. With a limit of 4, groups of 2, 2 and 5
        completions become batches of 2 + 2, 4 and 1.
        """
        batches = []
        room = self.tried = 0
        for group in groups:
            for begin in range(0, len(group.completions), self.completions):
                # A part shares its old_logprobs tensors with the group, so a step can fill them in.
                rows = slice(begin, begin + self.completions)
                part = replace(
                    group,
                    completions=group.completions[rows],
                    advantages=group.advantages[rows],
                    weights=group.weights[rows],
                    old_logprobs=group.old_logprobs[rows],
                )
                if len(part.completions) > room:
                    batches.append([])
                    room = self.completions
                batches[-1].append(part)
                room -= len(part.completions)
                self.tried = max(self.tried, self.completions - room)
        return batches

    def retry(self, work, *args, **kwargs):
        """Call `work`, which calls `split`, and repeat it with smaller batches if memory runs out.

        Raise ModelError if a single completion does not fit.
        """
        while True:
            try:
                return work(*args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.tried <= 1:
                    raise ModelError(
                        "not enough memory for one completion: "
                        "lower LOCAL_NODES or MAX_NEW_TOKENS, or use a smaller model"
                    ) from error
                self.completions = self.tried // 2
                self.notify(
                    f"out of memory in {self.where}: retrying with {self.completions} at a time"
                )


def sample_in_batches(model, codec, prompts, num_generations: int, config, seed: int, limit):
    """Run `sample_completions` for G completions of each prompt, in batches that fit in memory.

    Return G lists of token ids per prompt.
    """
    total = len(prompts) * num_generations
    rng = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(config.MAX_NEW_TOKENS, total, generator=rng).to(model.device)
    # These are placeholders, because `split` only counts completions.
    empty_groups = [Group(prompt, [[]] * num_generations, []) for prompt in prompts]
    model.eval()  # no dropout

    def sample_all() -> list[list[int]]:
        done = []
        for batch in limit.split(empty_groups):
            batch_prompts = [group.prompt for group in batch]
            num_rows = sum(len(group.completions) for group in batch)
            columns = uniforms[:, len(done) : len(done) + num_rows]
            with autocast(config.DTYPE, model):
                done += sample_completions(model, codec, batch_prompts, columns, config.TEMPERATURE)
        return done

    completions = limit.retry(sample_all)
    return [completions[i : i + num_generations] for i in range(0, total, num_generations)]


def estimate_completions_at_once(model, config, available: int) -> int:
    """Estimate how many completions an update can process at once.

    config: MICRO_BATCH_SIZE, NUM_GENERATIONS, MAX_NEW_TOKENS, DEVICE; available: bytes.

    The estimate assumes 150 bytes of activations per token, layer and hidden unit, and a budget of
    a quarter of the available memory. A CPU's budget is at most 3 GB, but always allows one whole
    group, because main memory is large and a whole group's prompt is computed only once. If the
    estimate is too high, `Limit` lowers it.
    """
    if config.MICRO_BATCH_SIZE != "auto":
        return int(config.MICRO_BATCH_SIZE)
    text_config = model.config.get_text_config()
    bytes_per_token = text_config.num_hidden_layers * text_config.hidden_size * 150
    budget = min(available / 4, 3e9 if config.DEVICE == "cpu" else math.inf)
    fitting = int(budget // (bytes_per_token * config.MAX_NEW_TOKENS))
    return max(config.NUM_GENERATIONS if config.DEVICE == "cpu" else 1, fitting)


def estimate_generated_at_once(model, config, available: int) -> int:
    """Estimate how many completions a CPU can generate at once.

    config: MAX_NEW_TOKENS; available: bytes. A CPU needs this estimate because Linux kills a
    process that uses too much memory. On a GPU, torch raises an error, and `Limit` halves batches.

    The estimate assumes prompts of 512 tokens, a KV cache in float32, four copies of the next
    token's logits, and a budget of a quarter of the available memory.
    """
    ids = torch.zeros(1, 1, dtype=torch.long)
    _, cache = forward_hidden(model, ids, torch.ones_like(ids))
    bytes_per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    logits = 16 * model.config.get_text_config().vocab_size
    needed = bytes_per_token * (512 + config.MAX_NEW_TOKENS) + logits
    return max(1, available // 4 // needed)


def available_devices() -> dict[str, str]:
    """Return {device: dtype to compute in} for this machine's devices, best first.

    bfloat16 is used only where the hardware supports it, because emulation is many times slower
    than float32. A GPU without bfloat16, such as a T4, is fast in float16, but a CPU is not.
    """
    devices = {}
    if torch.cuda.is_available():
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        for name in ("cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))):
            devices[name] = "bfloat16" if has_bfloat16 else "float16"
    if torch.backends.mps.is_available():
        devices["mps"] = "float32"

    # A CPU needs AMX or AVX512_BF16, which older versions of torch do not report.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    has_bfloat16 = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    devices["cpu"] = "bfloat16" if has_bfloat16 else "float32"
    return devices


def available_memory(device: str) -> int:
    """Return a GPU's free memory, or the total main memory for other devices, in bytes."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # a container may have less
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def keep_freed_memory() -> None:
    """Let glibc keep freed memory.

    Otherwise, getting large blocks from the kernel again, page by page, takes 40% of an update's
    time on a CPU.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # macOS, musl: no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: do not use mmap for large blocks
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


# ==================================================================================================
# Tasks and rewards
# ==================================================================================================

# name -> (reasoning-gym dataset, its settings). The paper's nine tasks come first, then eight tasks
# that are small enough for `tiny`, then five more. Before you add a task, read its score_answer,
# because peers' text reaches it.
SMALL_RANGE = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASK_TABLE = {
    "base_conversion": ("base_conversion", {"min_value": 1}),  # it would write 0 as an empty string
    "basic_arithmetic": ("basic_arithmetic", {}),
    "arc_1d": ("arc_1d", {}),
    "bf": ("bf", {}),
    "propositional_logic": ("propositional_logic", {}),
    "fraction_simplification": ("fraction_simplification", {}),
    "decimal_arithmetic": ("decimal_arithmetic", {}),
    "calendar_arithmetic": ("calendar_arithmetic", {}),
    "binary_matrix": ("binary_matrix", {}),
    "small_arithmetic": ("basic_arithmetic", {
        **SMALL_RANGE, "operators": ("+", "-", "*"),
        "allow_parentheses": False, "allow_negation": False}),
    "small_bases": ("base_conversion", {
        "min_base": 2, "max_base": 4, "min_value": 1, "max_value": 31}),
    "small_fractions": ("fraction_simplification", {
        "max_value": 9, "max_factor": 5, "styles": ("plain",)}),
    "small_chain_sum": ("chain_sum", {"min_terms": 3, "max_terms": 3, "max_digits": 1}),
    "small_gcd": ("gcd", {"max_value": 30}),
    "small_lcm": ("lcm", {"max_value": 12}),
    "small_count_bits": ("count_bits", {"max_n": 63}),
    "small_products": ("products", SMALL_RANGE),
    "chain_sum": ("chain_sum", {}),
    "count_bits": ("count_bits", {}),
    "gcd": ("gcd", {}),
    "lcm": ("lcm", {}),
    "products": ("products", {}),
}  # fmt: skip
# Nodes with different tables cannot verify each other's groups.
TASK_HASH = hashlib.sha256(json.dumps(TASK_TABLE, sort_keys=True).encode()).hexdigest()[:16]
PAPER_TASKS = tuple(TASK_TABLE)[:9]
TINY_TASKS = tuple(TASK_TABLE)[9:17]
HELD_OUT_SEEDS = range(2**52, 2**53)  # training seeds are smaller; JSON is exact up to 2**53
VERSIONS = {name: version(name) for name in ("torch", "transformers", "reasoning-gym")}
REASONING_GYM_VERSION = VERSIONS["reasoning-gym"]  # the module's __version__ is out of date
MAX_SCORED_CHARS = 4096  # only the end of a completion is searched for an answer


class QuestionError(ValueError):
    """Raised if a question cannot be generated, takes too long, or does not fit into a prompt."""


@dataclass(frozen=True)
class Question:
    """A question, which any machine can regenerate from (task, seed)."""

    task: str
    seed: int
    text: str
    answer: str
    dataset: object = field(repr=False, compare=False)  # its score_answer is the verifier
    entry: dict = field(repr=False, compare=False)  # reasoning-gym's own record of the question


@functools.lru_cache(maxsize=8192)
def make_question(task: str, seed: int) -> Question:
    """Generate a task's question for a seed. Raise QuestionError if this fails.

    The question is always item 0 of a new dataset. reasoning-gym generates item i with
    Random(seed + i), so later items would also be the questions of neighboring seeds.
    """
    if task in FILE_TASKS:
        training, held_out = FILE_TASKS[task]
        rng = random.Random(f"line {seed}")  # separate from the stream that chose the task
        text, answer = rng.choice(held_out if seed in HELD_OUT_SEEDS else training)
        entry = {"metadata": {"source_dataset": "file"}}
        return Question(task, seed, text, last_part(answer), None, entry)

    name, settings = TASK_TABLE[task]
    try:
        # decimal_arithmetic changes the global Decimal precision, and bf prints dots.
        with decimal.localcontext(), contextlib.redirect_stdout(io.StringIO()):
            dataset = reasoning_gym.create_dataset(name, seed=seed, size=1, **settings)
            entry = dataset[0]
    except Exception as error:  # a generator may raise anything
        raise QuestionError(f"{task} has no question for seed {seed} ({error!r})") from error

    answer = entry["answer"]
    if answer is None:  # propositional_logic has many correct answers
        answer = entry["metadata"]["example_answer"]
    return Question(task, seed, entry["question"], answer, dataset, entry)


def bounded_divisors(a: int, b: int, search=basic_arithmetic.find_common_divisors) -> list[int]:
    """Run basic_arithmetic's search for common divisors, unless it would take too long.

    The search tries every number up to the square root of the gcd, which takes minutes for some
    seeds. The limit is a million tries (0.1 s) rather than a time, because all machines must accept
    the same seeds.
    """
    if math.gcd(a, b) > 10**12:
        raise QuestionError("the search for common divisors would take too long")
    return search(a, b)


basic_arithmetic.find_common_divisors = bounded_divisors


def first_valid_question(task: str, seed: int, is_good=lambda question: True) -> Question:
    """Return the first question for which `is_good` holds, from the seeds seed to seed + 50.

    Use this only for a node's own questions. The seed of a peer's question is never replaced.
    """
    for candidate in range(seed, seed + 51):
        with contextlib.suppress(QuestionError):
            if is_good(question := make_question(task, candidate)):
                return question
    raise QuestionError(f"no valid {task} question fits the model (tried 51 seeds, from {seed} up)")


def first_solved_question(task: str, seed: int, is_good=lambda question: True) -> Question:
    """Return the first valid question, starting at `seed`, whose own answer passes the verifier.

    About 1% of propositional_logic's example answers fail. Few-shot examples and the warm start
    would otherwise teach answers that are not rewarded.
    """
    return first_valid_question(
        task, seed, lambda q: safe_score(q, q.answer) >= 0.99 and is_good(q)
    )


def extract_tagged_answer(text: str) -> str | None:
    """Return the text between the last </answer> and the last <answer> before it, or None.

    Only the last MAX_SCORED_CHARS characters are searched.
    """
    text = text[-MAX_SCORED_CHARS:]
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end].strip()


def safe_score(question: Question, answer: str) -> float:
    """Return `verifier_score` clamped to [0, 1], or 0 if it raises an error or is not finite."""
    score = 0.0
    with contextlib.suppress(Exception):  # a verifier may raise anything on untrusted text
        score = verifier_score(question, answer)
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def verifier_score(question: Question, answer: str) -> float:
    """Return the score of the task's verifier. It may raise anything but never evals answers."""
    source = question.entry["metadata"]["source_dataset"]
    if source == "file":
        return float(is_same_answer(answer, question.answer))
    if source == "binary_matrix":
        return float(answer == question.answer)  # its verifier would call eval(answer)
    if source == "propositional_logic" and not is_safe_formula(question, answer):
        return 0.0
    with decimal.localcontext():  # decimal_arithmetic changes the global Decimal precision
        return float(question.dataset.score_answer(answer, question.entry))


def is_safe_formula(question: Question, answer: str) -> bool:
    """Return whether propositional_logic's verifier can score this answer quickly.

    It can if the answer is short and not deeply nested, and uses only the question's own variables.
    The verifier's work doubles with each distinct variable; an answer of 69 characters took 9 s.
    Its parser decides what a variable is, and reads "P ¬P", "P()" and "PP" as one variable each.
    """
    # The conjunction of a question's premises has up to 88 characters and 30 of the signs below.
    num_signs = sum(char in "∧∨¬→↔(" for char in answer)
    if len(answer) > 160 or num_signs > 40:
        return False
    used = question.dataset._collect_variables([Expression.from_string(answer)])
    return used <= set(question.entry["metadata"]["variables"])


# -------- Task names, and the user's own questions ------------------------------------------------

NUMBER = r"[-+]?(\d{1,30}|\d{1,3}(,\d{3}){1,9})(\.\d{1,30})?(e[-+]?\d{1,3})?"  # 7, 12,000, 5e-05


def is_same_answer(answer: str, right: str) -> bool:
    """Return whether two answers to one of the user's own questions match.

    They match if they differ only in whitespace, or if both are numbers with the same value.
    Expressions are not evaluated. ("$1,000.0", "1000") -> True, but ("1 000", "1000") -> False
    """
    texts = [plain_text(text) for text in (answer, right)]
    # Remove "$", \boxed{} and a final period, but only at the ends of the whole answer.
    inner = [re.sub(r"^[ $]*\\boxed\{(.*)\}[ $.]*$", r"\1", text) for text in texts]
    numbers = [text.lstrip(" $").rstrip(" $.") for text in inner]
    if not all(re.fullmatch(NUMBER, number, re.ASCII | re.IGNORECASE) for number in numbers):
        return texts[0] == texts[1]
    return len({decimal.Decimal(number.replace(",", "")) for number in numbers}) == 1


def plain_text(text: str) -> str:
    """Return a text in the normal form in which questions and answers are compared.

    In this form, letters are composed (ä is one code point, not two), digits and minus signs are
    ASCII, and each run of whitespace between words is a single space.
    """
    text = unicodedata.normalize("NFC", text).replace("\N{MINUS SIGN}", "-")
    text = "".join(str(int(char)) if char.isdecimal() else char for char in text)
    return " ".join(text.split())


# Tasks from TASKS=file:mine.jsonl, as name -> (training questions, held-out questions). Each
# question is a pair (text, answer).
FILE_TASKS = {}


def task_names(text: str, may_read_files: bool) -> list[str]:
    """Return the names in TASKS: "gcd, lcm" -> ["gcd", "lcm"].

    Raise a ValueError that lists all errors. Some reasoning-gym tasks are not supported, because
    their verifiers eval the answer or their questions differ between processes. A file is read only
    if the user's own TASKS contains it (may_read_files), never because of config.json.
    """
    names, errors = [], []
    for task in map(str.strip, text.split(",")):
        if task in TASK_TABLE or task in FILE_TASKS:
            names.append(task)
        elif task.startswith("file:") and may_read_files:
            try:
                names.append(load_task_file(os.path.expanduser(task.removeprefix("file:"))))
            except ValueError as error:
                errors.append(str(error))
        elif task.startswith("file:"):
            errors.append(
                f"{task!r:.80} is not available on this machine: "
                "set TASKS to file:<path of your copy>"
            )
        else:
            closest = difflib.get_close_matches(task, TASK_TABLE, n=1)
            hint = f"did you mean {closest[0]}?" if closest else f"allowed: {', '.join(TASK_TABLE)}"
            errors.append(f"{task!r:.80} is not a supported task; {hint}")
    if errors:
        raise ValueError("; ".join(errors))
    return names


def last_part(answer: str) -> str:
    """Return the final answer, the part of a derivation after its last "####".

    "3 + 4 = 7 #### 7" -> "7"
    """
    return answer.rpartition("####")[2].strip()


def load_task_file(path: str) -> str:
    """Read questions from lines of {"question": …, "answer": …} and hold out a tenth of them.

    Return the task's name, such as "file:mine.jsonl#1f3b5d7a", which depends only on the file's
    name and contents. Raise a ValueError that lists up to five errors.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # skips a byte-order mark
    except (OSError, ValueError) as error:
        raise ValueError(f"file:{path} cannot be read: {error}") from error

    rows = {}  # normal form of a question -> (question, answer)
    errors = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() may cut JSON strings
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)  # NaN is a missing value
            is_text = {type(row["question"]), type(row["answer"])} <= {str, int, float}
        except (ValueError, RecursionError, TypeError, LookupError):
            is_text = False
        if not is_text:
            errors.append(f"line {number}: expected JSON with a question and an answer")
            continue
        question, answer = str(row["question"]), str(row["answer"]).strip()
        last = last_part(answer)
        if not last or extract_tagged_answer(f"<answer>{last}</answer>") != last:
            errors.append(f"line {number}: the answer is empty, contains tags or is too long")
        _, first_answer = rows.setdefault(plain_text(question), (question, answer))
        if not is_same_answer(last_part(first_answer), last):
            errors.append(f"line {number}: conflicting answers to the same question")
    if len(rows) < 2:
        errors.append("expected at least two questions")
    if errors:
        raise ValueError(f"file:{path}: " + "; ".join(errors[:5]))

    # A hash selects the held-out questions, so that they do not depend on the order of the lines.
    # The task's name contains a hash of the normal forms, the original questions and the answers.
    answers = {form: answer for form, (_, answer) in rows.items()} | dict(rows.values())
    digest = hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()
    forms = sorted(rows, key=lambda form: hashlib.sha256(form.encode()).digest())
    by_hash = [rows[form] for form in forms]
    num_held_out = max(1, len(rows) // 10)
    name = f"file:{re.sub('[ ,]', '_', os.path.basename(path))}#{digest[:8]}"
    FILE_TASKS[name] = (by_hash[num_held_out:], by_hash[:num_held_out])
    return name


# ==================================================================================================
# The tokenizer and the models
# ==================================================================================================

# The answer formats that the built-in model learns. Only the first is rewarded; see
# .github/STUDY.md.
ANSWER_TEMPLATES = (
    "<answer>{}</answer>", "The answer is {}.", "Answer: {}", "= {}", "{}", "It is {}",
)  # fmt: skip

# Some chat templates insert today's date, from date_string or strftime_now. Prompts must be
# reproducible, so they get this date instead. (A macro overrides the function of the same name.)
PROMPT_DATE = "1 January 2025"
DATE_MACRO = "{% macro strftime_now(format) %}" + PROMPT_DATE + "{% endmacro %}\n"


# A SentencePiece tokenizer, as in Llama 2, prepends a space to a text and removes it when decoding.
# Each key is a rule in the tokenizer's file that does this, and each value is its replacement.
SPACE_RULES = {
    '"prepend":"▁"': '"prepend":""',
    '"content":" ","start":1': '"content":" ","start":0',
    '"prepend_scheme":"first"': '"prepend_scheme":"never"',
    '"prepend_scheme":"always"': '"prepend_scheme":"never"',
    '"add_prefix_space":true': '"add_prefix_space":false',
}

SECRET = "HUGGINGFACE_ACCESS_TOKEN"  # the setting that holds the access token


class ModelError(ValueError):
    """Raised if a model cannot be loaded or used, with a reason in the user's terms."""


@dataclass
class Codec:
    """A tokenizer with its model's conventions: the prompt format, the EOS ids and the limits."""

    tokenizer: object
    eos_ids: set[int]
    eos_id: int  # the EOS that ends this model's turn; appended to a peer's finished completion
    num_shots: int  # few-shot examples per prompt; 0 with a chat template
    positions: int  # the model's context length, in tokens
    max_prompt: int  # tokens; leaves MAX_NEW_TOKENS positions for the completion
    max_completion: int  # tokens in a peer's completion; more than our own, as tokenizers differ
    vocabulary: int  # the model's number of token ids; a tokenizer may have more
    pad_id: int  # any real token, because the embedding of a padding token may be zero
    dtype: torch.dtype  # of the weights in the model's files; the final model is saved in it

    # -- Prompts

    def encode_prompt(self, question: Question) -> list[int]:
        """Return the prompt of a question as token ids.

        Few-shot examples are dropped until the prompt fits, but the question is never
        truncated. Raise QuestionError if it does not fit even without examples.
        """
        examples = self.solved_examples(question)
        is_plain = not self.tokenizer.chat_template
        for num_dropped in range(len(examples) + 1):
            # Plain text gets a BOS if the tokenizer adds one, as Llama's does.
            prompt = self.prompt_text(examples[num_dropped:], question.text)
            ids = self.tokenizer(prompt, add_special_tokens=is_plain).input_ids
            if len(ids) <= self.max_prompt:
                return ids
        raise QuestionError(f"{question.task}: a prompt of {len(ids)} tokens does not fit")

    def fits(self, question: Question) -> bool:
        """Return whether this question fits into a prompt."""
        with contextlib.suppress(QuestionError):
            return bool(self.encode_prompt(question))
        return False

    def solved_examples(self, question: Question) -> list[str]:
        """Return few-shot examples of the same task, from the seeds after the question's own.

        The question itself and duplicates are left out, so a small file may yield fewer than
        `num_shots` examples.
        """
        examples = []
        for seed in range(question.seed + 1, question.seed + 50):
            if len(examples) < self.num_shots:
                solved = first_solved_question(question.task, seed % HELD_OUT_SEEDS.start)
                example = f"{solved.text}\n<answer>{solved.answer}</answer>\n\n"
                if solved.text != question.text and example not in examples:
                    examples.append(example)
        return examples

    def prompt_text(self, examples: list[str], text: str) -> str:
        """Return the prompt as text, from the chat template or with few-shot examples."""
        if not self.tokenizer.chat_template:
            return "".join(examples) + text + "\n"

        system = SYSTEM_PROMPTS["default"]
        turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        if not self.has_system_role:
            turns = [{"role": "user", "content": system + "\n" + text}]
        # EXERCISE: enable thinking in models that support it. It needs far more than 256 tokens.
        return self.tokenizer.apply_chat_template(
            turns,
            chat_template=DATE_MACRO + self.tokenizer.get_chat_template(),
            add_generation_prompt=True,
            tokenize=False,
            date_string=PROMPT_DATE,
            enable_thinking=False,
        )

    @functools.cached_property
    def has_system_role(self) -> bool:
        """True if the chat template uses the system role. Some templates reject it or drop it."""
        turns = [{"role": role, "content": f"as {role}"} for role in ("system", "user")]
        with contextlib.suppress(Exception):  # a template may raise anything
            return "as system" in self.tokenizer.apply_chat_template(turns, tokenize=False)
        return False

    # -- Completions

    @functools.cached_property
    def completion_tokenizer(self):
        """The tokenizer without SPACE_RULES, because a completion continues the prompt's text.

        With these rules, a peer's text would start with a space that was never sampled. This
        tokenizer does not remove spaces before punctuation either.
        """
        rules = self.tokenizer.backend_tokenizer.to_str()
        for rule, replacement in SPACE_RULES.items():
            rules = rules.replace(rule, replacement)
        return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(rules))

    def encode_completions(self, texts: list[str], finished: list[bool]) -> list[list[int]]:
        """Return the token ids of peers' completions, as if this model had sampled them.

        Text such as "<|im_end|>" stays plain text. A finished completion gets this model's EOS,
        unless its answer tag already ends it (see `is_finished`).
        """
        rows = self.completion_tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True
        ).input_ids
        for ids, text, is_finished in zip(rows, texts, finished, strict=True):
            if is_finished and not (self.num_shots > 0 and "</answer>" in text):
                ids.append(self.eos_id)
        return rows

    def decode(self, ids: list[int]) -> str:
        """Decode ids without EOS and special tokens."""
        ids = [token for token in ids if token not in self.silent_ids]
        return self.completion_tokenizer.decode(ids)

    @functools.cached_property
    def silent_ids(self) -> set[int]:
        """The tokens that `decode` leaves out, which are EOS and special tokens.

        In some models, the EOS is not marked as a special token. Answer tags always count as text.
        """
        added = self.tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special}
        tags = {i for i, token in added.items() if token.content in ("<answer>", "</answer>")}
        return special.union(self.tokenizer.all_special_ids, self.eos_ids) - tags

    def unfinished(self, tokens: torch.Tensor) -> list[int]:
        """Return the indices of the rows (of token ids) that do not end a completion."""
        rows = enumerate(tokens[:, -9:].tolist())  # here, sampling waits for the GPU
        return [i for i, ids in rows if not self.is_finished(ids)]

    def is_finished(self, ids: list[int]) -> bool:
        """Return whether the model ended a completion itself.

        A model ends a completion with an EOS or, after a few-shot prompt, with </answer>. Without
        the second rule, a base model would continue with more examples.
        """
        has_tag = self.num_shots > 0 and "</answer>" in self.decode(ids[-9:])  # at most 9 tokens
        return has_tag or ids[-1] in self.eos_ids


def load_model(config, tasks) -> tuple[torch.nn.Module, Codec]:
    """Load the model (float32, eval mode, on its device) and its Codec.

    config: MODEL_NAME, DEVICE, DTYPE, MAX_NEW_TOKENS, NUM_SHOTS, HUGGINGFACE_ACCESS_TOKEN. Raise
    ModelError if the model cannot be loaded or fails a check.
    """
    if config.MODEL_NAME == "tiny":
        model, tokenizer = build_tiny_model(tasks)
        dtype = torch.float32
    else:
        model, tokenizer, dtype = load_pretrained(config)
    model = model.to(config.DEVICE).eval()

    try:
        codec = make_codec(model, tokenizer, config, dtype)
        prompt = check_tokens(codec, config, tasks)
        check_logprobs(model, codec, config, prompt)
    except QuestionError as error:
        raise model_error(config, f"{error}: lower MAX_NEW_TOKENS or change TASKS") from error
    except Exception as error:
        # Third-party models may raise anything. The traceback shows where the bug is.
        if config.MODEL_NAME == "tiny" or isinstance(error, ModelError):
            raise
        traceback.print_exc()
        raise model_error(config, f"{type(error).__name__}: {error}") from error
    return model, codec


def load_pretrained(config):
    """Load the model and tokenizer of MODEL_NAME from the Hugging Face Hub or a folder.

    Return them and the dtype of the weights in the files. Raise ModelError with the reason if they
    cannot be loaded or trained.
    """
    name = config.MODEL_NAME
    is_adapter = os.path.isfile(os.path.join(name, "adapter_config.json"))  # it would be ignored
    refuse(config, {"it is an adapter (LoRA): merge it into its base model first": is_adapter})
    access = {"token": config.HUGGINGFACE_ACCESS_TOKEN or None, "trust_remote_code": False}
    try:
        stored = transformers.AutoConfig.from_pretrained(name, **access)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **access)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, **access
        )
    except Exception as error:  # files, network and tokenizer may fail in any way
        raise model_error(config, f"{type(error).__name__}: {error}") from error

    is_sdpa = model.config._attn_implementation == "sdpa"
    if is_sdpa and config.DEVICE == "cpu" and config.DTYPE == "bfloat16":
        model.set_attn_implementation(GROUPED_ATTENTION)

    # Missing weights would be random and differ between processes. Unexpected tensors, such as
    # quantization scales, show that the files belong to a different model.
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    is_trainable = all(p.requires_grad and p.is_floating_point() for p in model.parameters())
    # Recurrent layers keep a state instead of keys and values. Module names reveal them.
    names = " ".join(name for name, _ in model.named_modules())
    has_state = re.search(r"mamba|linear_attn|\bconv(1d)?\b", names) is not None
    refuse(config, {
        "it has recurrent layers (Mamba, linear attention), whose state cannot be copied for "
        "several completions": has_state,
        f"its files lack {' '.join(missing[:1])}": bool(missing),
        f"its files contain {len(unexpected)} tensor(s) that the model does not use, such as "
        f"{', '.join(unexpected[:3])}": bool(unexpected),
        "it does not expose hidden states": model.base_model is model,
        "its tokenizer is not based on the tokenizers library": not tokenizer.is_fast,
        "its weights are quantized or frozen: use the full-precision model": not is_trainable,
    })  # fmt: skip

    # Keep only the token ids of the generation config. Its sampling settings are not used here, and
    # some of them would make save_pretrained raise an error after the last round.
    loaded = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id,
        pad_token_id=loaded.pad_token_id,
    )
    dtype = stored.get_text_config().dtype
    return model, tokenizer, dtype if isinstance(dtype, torch.dtype) else torch.float32


def refuse(config, reasons: dict[str, bool]) -> None:
    """Raise ModelError with the first reason that holds, if any."""
    for reason, holds in reasons.items():
        if holds:
            raise model_error(config, reason)


def model_error(config, reason: str) -> ModelError:
    """Return a ModelError with MODEL_NAME and the reason.

    A library's message is reduced to its first line and up to two lines that contain a link or a
    hint about installing or logging in.
    """
    first, *more = filter(str.strip, reason.splitlines())
    helpful = [line for line in more if re.search("https?://|install|log in|logged in", line)]
    reason = " ".join(line.strip()[:300] for line in [first, *helpful[:2]])
    if "gated" in reason:
        reason += f" Put your token in {SECRET}."
    return ModelError(f"MODEL_NAME={config.MODEL_NAME!r} cannot be used: {reason}")


def make_codec(model, tokenizer, config, dtype: torch.dtype) -> Codec:
    """Return a loaded model's Codec. Raise ModelError if it has no EOS or too few positions.

    config: MODEL_NAME, MAX_NEW_TOKENS, NUM_SHOTS.
    """
    # A completion ends with any EOS id of the generation config, with the tokenizer's EOS, or with
    # the token that the chat template writes after an answer.
    usual = tokenizer.eos_token_id
    eos = model.generation_config.eos_token_id
    eos_ids = {*(eos if isinstance(eos, list) else [eos]), usual} - {None, -1}
    eos_id = find_end_of_turn_id(tokenizer, eos_ids)
    if eos_id is None:
        eos_id = usual if usual in eos_ids else min(eos_ids, default=None)
    text_config = model.config.get_text_config()
    positions = num_positions(text_config)
    refuse(config, {
        "it has no EOS token, so it could not end an answer": eos_id is None,
        f"MAX_NEW_TOKENS={config.MAX_NEW_TOKENS} must be below its context length, {positions}":
            positions <= config.MAX_NEW_TOKENS,
    })  # fmt: skip
    return Codec(
        tokenizer=tokenizer,
        eos_ids=eos_ids | {eos_id},
        eos_id=eos_id,
        num_shots=0 if tokenizer.chat_template else config.NUM_SHOTS,
        positions=positions,
        max_prompt=positions - config.MAX_NEW_TOKENS,
        max_completion=2 * config.MAX_NEW_TOKENS,
        vocabulary=text_config.vocab_size,
        pad_id=tokenizer("1", add_special_tokens=False).input_ids[0],
        dtype=dtype,
    )


def find_end_of_turn_id(tokenizer, eos_ids: set[int]) -> int | None:
    """Return the token that the chat template writes after an answer, or None.

    It is the first token after the answer that is an EOS or was added to the vocabulary, such as
    Gemma's <end_of_turn>.
    """
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
    try:
        chat = tokenizer.apply_chat_template(turns, tokenize=False)
        tail = tokenizer(chat.rpartition("four")[2], add_special_tokens=False).input_ids
    except Exception:  # no template, or it fails
        return None
    added = set(tokenizer.get_added_vocab().values())
    return next((token for token in tail if token in eos_ids | added), None)


def num_positions(text_config) -> int:
    """Return a model's context length, in tokens."""
    # Model families use different names. ALiBi (BLOOM) has no limit but was trained on 2048 tokens.
    positions = 2048
    for name in ("seq_length", "max_seq_len", "max_position_embeddings"):
        positions = getattr(text_config, name, None) or positions

    # With dynamic RoPE and LongRoPE, a text longer than the original limit changes the rotation of
    # all its tokens, so cached keys would be wrong. Some models have one rule per layer type.
    rope = getattr(text_config, "rope_parameters", None) or {}
    for rule in (rope, *rope.values()):
        if isinstance(rule, dict) and rule.get("rope_type") in ("dynamic", "longrope"):
            positions = rule.get("original_max_position_embeddings", positions)
    return positions


# -------- Checks of a model -----------------------------------------------------------------------


def check_tokens(codec: Codec, config, tasks) -> list[int]:
    """Raise ModelError unless five questions per task and their answers survive tokenization.

    Return one of the prompts.
    """
    for task, seed in itertools.product(tasks, range(5)):
        question = first_valid_question(task, seed)
        verifier_score(question, question.answer)  # raises if a custom verifier has a bug
        question = first_solved_question(task, seed, codec.fits)

        # Encode the correct answer like a peer's text, and once more with tags as single tokens,
        # if the tokenizer has such tokens.
        prompt = codec.encode_prompt(question)
        right = f"<answer>{question.answer}</answer>"
        completions = [
            *codec.encode_completions([right, f"It is {right}"], [True, True]),
            codec.tokenizer(right, add_special_tokens=False).input_ids,
        ]

        # Some tokenizers drop tokens, which is an error. Others insert spaces, so prompts are
        # compared without whitespace.
        texts = [codec.decode(ids) for ids in completions]
        is_right = all(
            safe_score(question, extract_tagged_answer(text) or "") >= 0.99 for text in texts
        )
        asked = plain_text(question.text).replace(" ", "")
        seen = plain_text(codec.tokenizer.decode(prompt)).replace(" ", "")
        # An id that is too high raises IndexError on a CPU and fails an opaque assertion on a GPU.
        highest = max(codec.tokenizer.vocab_size - 1, *map(max, [prompt, *completions]))
        refuse(config, {
            f"its prompt lacks part of the {task} question: fix its chat template or tokenizer":
                asked not in seen,
            "its prompts end with an EOS: set add_eos_token to false in its tokenizer":
                prompt[-1] in codec.eos_ids and not codec.tokenizer.chat_template,
            f"its tokenizer turns {right!r:.40} into {texts!r:.200}": not is_right,
            f"its tokenizer has token id {highest}, but the model has only {codec.vocabulary} ids":
                highest >= codec.vocabulary,
        })  # fmt: skip
    return prompt


def check_logprobs(model, codec: Codec, config, prompt: list[int]) -> None:
    """Raise ModelError unless shared prompts give the log-probabilities of a plain forward pass.

    They do not if the cache cannot be repeated (state-space models), if the model ignores positions
    (BART), or if it scales its logits differently from `scaled_logits`.
    """
    # Use pieces of this prompt with different lengths, first with and then without a shared prefix.
    ids = (prompt * 30)[:30]
    answers = [ids[20:24], ids[3:4], ids[24:30]]
    for prompts in ([ids[:9], ids[:9] + ids[-5:]], [ids[:5], ids[4:18]]):
        groups = [Group(prompt, answers, []) for prompt in prompts]
        ours, mask = completion_logprobs(model, groups, pad_id=codec.pad_id)

        # The reference passes each row through the model on its own, without padding or a cache.
        theirs = []
        for start, answer in itertools.product(prompts, answers):
            row = torch.tensor([start + answer], device=model.device)
            with torch.no_grad():
                logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits.float()
            losses = F.cross_entropy(logits[0, :-1], row[0, 1:], reduction="none")
            theirs.append(-losses[-len(answer) :])

        # Compare in float32, whatever DTYPE is. In float16, rounding alone can change a
        # log-probability by 0.02, and in bfloat16 by 0.07 (small models with random weights).
        error = (ours.detach()[mask] - torch.cat(theirs)).abs().max().item()
        with autocast(config.DTYPE, model):
            trained, _ = completion_logprobs(model, groups, pad_id=codec.pad_id)
        refuse(config, {
            f"its log-probabilities differ by {error:.2g} from a plain forward pass":
                not error < 2e-3,  # `not <` is true for NaN, unlike `>=`
            f"its numbers overflow in {config.DTYPE}: set DTYPE=float32":
                not trained.isfinite().all(),
        })  # fmt: skip
        trained.sum().backward()  # must not raise an error
        model.zero_grad()


def file_notes(codec: Codec, config, tasks) -> list[str]:
    """Return notes about the user's own questions, as sentences."""
    sentences = []
    for task in filter(FILE_TASKS.get, tasks):
        rows = list(itertools.chain(*FILE_TASKS[task]))
        sentences.append(
            f"{task}: {len(FILE_TASKS[task][1])} of {len(rows)} questions are held out"
        )

        # Find questions too long for a prompt and answers too long for MAX_NEW_TOKENS.
        tagged = [f"<answer>{last_part(answer)}</answer>" for _, answer in rows]
        lengths = list(map(len, codec.encode_completions(tagged, [True] * len(rows))))
        long = []
        for (text, answer), length in zip(rows, lengths, strict=True):
            question = Question(task, 0, text, answer, None, {})
            if length > config.MAX_NEW_TOKENS or not codec.fits(question):
                long.append(text)
        if long:
            sentences.append(
                f"{task}: {len(long)} questions (or their answers) are too long, such as "
                f"{long[0]!r:.60}; all answers fit with MAX_NEW_TOKENS={max(lengths)}"
            )
    return sentences


# -------- The built-in model, the optimizer, the warm start ---------------------------------------


def build_tiny_model(tasks):
    """Build the built-in model `tiny` (0.14M parameters) and its tokenizer.

    Its tokens are characters and phrases. A phrase is a recurring piece of the tasks' questions, at
    least five characters long and without digits, or a fixed piece of an answer format.
    """
    # Collect the phrases, which are the pieces between numbers, from a hundred questions per task.
    counts = Counter()
    for task in dict.fromkeys(tasks):
        for i in range(100):
            text = first_valid_question(task, 1000 * i).text + "\n"
            counts.update(set(re.findall("[^0-9]{5,}", text)))
    phrases = sorted(piece for piece, count in counts.items() if count >= 10)
    phrases += [text.split("{}")[0] for text in ANSWER_TEMPLATES[1:] if len(text) >= 5]

    # Build a tokenizer of single characters, with the phrases as added tokens.
    characters = sorted({*map(chr, range(32, 127)), *"\n∧∨¬→↔"})
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    phrases = ["<answer>", "</answer>", *phrases]
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )

    # Every process gets the same random weights. The global RNG state is left unchanged.
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=512,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
        initializer_range=0.1,  # about 1 / sqrt(n_embd); tiny learns half as much with GPT-2's 0.02
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
    return model, tokenizer


def make_optimizer(model, config) -> torch.optim.AdamW:
    """Return AdamW with its moments allocated, so that no later step allocates them.

    config: MODEL_NAME, LEARNING_RATE. The fused step is a single pass over memory. tiny does not
    use it, because the fused step rounds differently and tiny must be reproducible bit for bit.
    """
    fused = config.MODEL_NAME != "tiny"
    optimizer = torch.optim.AdamW(
        model.parameters(), config.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
    )
    for p in model.parameters():  # as AdamW's first step would do
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


WARM_START_VERSION = 7  # increase it when `warm_start` changes, so that older files are not loaded


def warm_start(model, codec: Codec, config, tasks):
    """Run WARM_START_STEPS steps of supervised fine-tuning on the tasks' own questions.

    The length is counted in steps, not seconds, so that the result is reproducible. Yield (step,
    loss) after each step.

    At first, tiny sees answers in all formats, half of them in the rewarded format. In the last
    phase, the rewarded format is rare (ANSWER_TAG_SHARE). The model can then do the arithmetic but
    hardly ever uses that format. This is by design, because finding the format is left to GRPO.
    Other models see only the rewarded format.

    config: MODEL_NAME, SEED, WARM_START_STEPS, ANSWER_TAG_SHARE, DTYPE and, for models other than
    tiny, DEVICE, MICRO_BATCH_SIZE, NUM_GENERATIONS, MAX_NEW_TOKENS.
    """
    steps = config.WARM_START_STEPS
    is_tiny = config.MODEL_NAME == "tiny"
    batch_size = 64 if is_tiny else 8
    optimizers = warm_start_optimizers(model, is_tiny)
    warm_up_steps = max(1, min(50, steps // 4))
    num_last_steps = min(150, steps // 4) if is_tiny else 0

    # Generate up to 16,000 pairs (prompt, answer), which takes 3 s, and sort them by prompt length.
    # A long warm start uses each pair several times.
    rng = random.Random(f"warm start {config.SEED}")
    samples = []
    for _ in range(min(16_000, steps * batch_size)):
        seed = rng.randrange(HELD_OUT_SEEDS.start)
        # Sorting makes the result independent of the order of TASKS.
        question = first_solved_question(rng.choice(sorted(tasks)), seed, codec.fits)
        samples.append((codec.encode_prompt(question), question.answer))
    samples.sort(key=lambda sample: len(sample[0]))

    # A real model's batch is split into micro-batches with as many tokens as fit into an update.
    limit = Limit(batch_size, "the warm start")
    if not is_tiny:
        at_once = estimate_completions_at_once(model, config, available_memory(config.DEVICE))
        longest = len(samples[-1][0]) + config.MAX_NEW_TOKENS  # tokens in a prompt with its answer
        limit.completions = max(1, at_once * config.MAX_NEW_TOKENS // longest)

    for step in range(1, steps + 1):
        # The learning rate warms up, stays constant, and falls to 0 in the second half.
        share = min(1.0, step / warm_up_steps, 2 * (1 - (step - 1) / steps))
        for optimizer, peak_lr in optimizers:
            optimizer.param_groups[0]["lr"] = peak_lr * share

        # Draw the batch from the neighbors of a random sample. Their prompts have similar lengths,
        # so the batch needs little padding.
        middle = rng.randrange(len(samples))
        neighbors = samples[max(0, middle - 8 * batch_size) : middle + 8 * batch_size]
        batch = rng.sample(neighbors, batch_size)

        # Write each answer in one of the formats.
        tag_share = config.ANSWER_TAG_SHARE if step > steps - num_last_steps else 0.5
        answers = []
        for _, answer in batch:
            is_rewarded = not is_tiny or rng.random() < tag_share
            template = ANSWER_TEMPLATES[0] if is_rewarded else rng.choice(ANSWER_TEMPLATES[1:])
            answers.append(template.format(answer))

        answer_ids = codec.encode_completions(answers, [True] * len(answers))
        groups = [
            Group(prompt, [ids[: codec.positions - len(prompt)]], [])
            for (prompt, _), ids in zip(batch, answer_ids, strict=True)
        ]
        metrics = limit.retry(
            accumulate_gradients, warm_start_micro_batches, model, groups, config, codec, limit
        )
        for optimizer, _ in optimizers:
            optimizer.step()
        yield step, metrics["loss"]


def warm_start_micro_batches(model, groups: list[Group], config, codec: Codec, limit):
    """Yield the loss of each micro-batch of a warm-start step. Each group has one completion.

    The losses add up to the mean negative log-likelihood of all answer tokens.
    """
    num_tokens = sum(len(group.completions[0]) for group in groups)
    for batch in limit.split(groups):
        # Prompts and the padding on the right have the label -100, which the loss ignores.
        rows = [group.prompt + group.completions[0] for group in batch]
        labels = [[-100] * len(group.prompt) + group.completions[0] for group in batch]
        rows, _ = pad(rows, codec.pad_id, model.device)  # (B, P+T)
        labels, _ = pad(labels, -100, model.device)
        with autocast(config.DTYPE, model):
            loss = model(input_ids=rows, labels=labels, use_cache=False).loss
        yield {"loss": loss * ((labels >= 0).sum() / num_tokens)}


def warm_start_optimizers(model, is_tiny: bool) -> list[tuple]:
    """Return (optimizer, peak learning rate) pairs: AdamW and, for tiny's matrices, Muon.

    With Muon for the matrices in its layers, tiny needs half as many steps.
    """
    rest = dict(model.named_parameters())
    names = [name for name, p in rest.items() if is_tiny and ".h." in name and p.ndim == 2]
    matrices = [rest.pop(name) for name in names]
    adamw = torch.optim.AdamW(rest.values(), betas=(0.9, 0.95), weight_decay=0.0)
    if not is_tiny:
        return [(adamw, 2e-5)]
    muon = torch.optim.SGD(matrices)
    muon.register_step_pre_hook(orthogonalize_gradients)
    return [(adamw, 6e-3), (muon, 0.03)]


@torch.no_grad()
def orthogonalize_gradients(optimizer, args, kwargs) -> None:
    """Replace each matrix's gradient with Muon's step (K. Jordan, 2024).

    This is the gradient's moving average with all singular values near 1. torch's Muon computes in
    bfloat16, which takes more than half of a warm-start step's time on an AVX2 CPU.
    """
    for p in optimizer.param_groups[0]["params"]:
        average = optimizer.state[p].setdefault("average", torch.zeros_like(p))
        average.lerp_(p.grad, 0.05)
        x = p.grad.lerp(average, 0.95)  # Nesterov momentum

        # Run five Newton-Schulz steps. A tall matrix is transposed, so that its products are small.
        is_tall = x.shape[0] > x.shape[1]
        x = x.T if is_tall else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            product = x @ x.T
            x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
        p.grad = (x.T if is_tall else x) * max(1, p.shape[0] / p.shape[1]) ** 0.5


def warm_start_recipe(model, codec: Codec, config, tasks) -> dict:
    """Return the settings, data and initial weights of a warm start, as {name: value}.

    The hash of this dict is the file's name. WARM_START_VERSION represents the code. The weights'
    checksums replace MODEL_NAME, so a model's folder may be moved.
    """
    names = "WARM_START_STEPS SEED NUM_SHOTS MAX_NEW_TOKENS ANSWER_TAG_SHARE DTYPE".split()
    questions = [first_valid_question(task, 1, codec.fits) for task in sorted(tasks)]
    return {name: getattr(config, name) for name in names} | {
        "version of this recipe": WARM_START_VERSION,
        "is tiny": config.MODEL_NAME == "tiny",
        "TASKS": sorted(tasks),
        "TASK_TABLE": [TASK_TABLE.get(task) for task in sorted(tasks)],
        "ANSWER_STYLES": ANSWER_TEMPLATES,
        "reasoning-gym": REASONING_GYM_VERSION,
        "the model's weights": [zlib.crc32(p.detach().cpu().numpy()) for p in model.parameters()],
        "its questions": [[codec.encode_prompt(each), each.answer] for each in questions],
        "its answers": codec.encode_completions(["<answer>1</answer>"], [True]),
    }


# ==================================================================================================
# The final model
# ==================================================================================================


TRY_SCRIPT = '''"""Prompt this model exactly as in training.

python try.py             asks the question below, and prints the correct answer with it
python try.py "QUESTION"  asks your own question, which should be worded like the question below
"""

import pathlib
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

BEFORE, QUESTION, AFTER = {before!r}, {question!r}, {after!r}
ANSWER = {answer!r}

folder = pathlib.Path(__file__).parent
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = BEFORE + (sys.argv[1] if len(sys.argv) > 1 else QUESTION) + AFTER
inputs = tokenizer(prompt, add_special_tokens={is_plain}, return_tensors="pt")
how = {{"do_sample": True, "top_k": 0, "temperature": {temperature}, "max_new_tokens": {length}}}
output = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, **how)
if len(sys.argv) == 1:
    print(QUESTION, f"(correct: {{ANSWER}})")
print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
'''


def try_script(codec: Codec, question: Question, config) -> str:
    """Return a script that prompts the final model exactly as in training.

    The prompt includes the system prompt (without thinking) or the few-shot examples.
    """
    asked = question.text.strip()
    prompt = codec.prompt_text(codec.solved_examples(question), asked)
    before, _, after = prompt.rpartition(asked)
    return TRY_SCRIPT.format(
        before=before,
        question=asked,
        answer=question.answer,
        after=after,
        is_plain=not codec.tokenizer.chat_template,
        temperature=config.TEMPERATURE,
        length=config.MAX_NEW_TOKENS,
    )


def save_model(model, codec: Codec, card: str, folder) -> None:
    """Save model, tokenizer and model card as a standard Hugging Face folder.

    The weights are converted back to the dtype of their original files, so the model must not be
    trained afterward.
    """
    transformers.utils.logging.disable_progress_bar()  # hides the bar "Writing model shards"
    # If the input and output embeddings differ in the original files, they are not tied, whatever
    # config.json says. The exported config.json must not tie them either.
    model.config.tie_word_embeddings = (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    model.generation_config.eos_token_id = sorted(codec.eos_ids)  # so that `generate` stops
    model.to(codec.dtype).save_pretrained(folder)
    # Keep chat templates in tokenizer_config.json, because several files would need a subfolder.
    codec.tokenizer.save_pretrained(folder, save_jinja_files=False)
    Path(folder, "README.md").write_text(card, encoding="utf-8")
