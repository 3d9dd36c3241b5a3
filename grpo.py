"""GRPO for one learner: sample completions of questions, score them, and turn the rewards into a
gradient. The heart comes first: all of GRPO, as it runs.

`config`: the settings. `codec`: the tokenizer with its conventions. `limit`: how many completions
fit into memory at once. `limit.split(groups)` makes batches of at most that size;
`limit.retry(f)` calls f, and again with a lower limit if memory runs out. Symbols in the comments:
    N  prompts of a batch                   P  tokens of the longest prompt
    G  completions of one prompt            T  tokens of the longest completion
    B  completions of a batch, its rows     S  tokens of these completions, without padding
    R  rows that are not finished           H  hidden size          V  vocabulary

Differences from textbook GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1). Points 1, 2 and 4
follow the SAPO paper, point 3 does not:
1. There is no KL penalty and no reference model.
2. Clipping is asymmetric, 1-0.2 and 1+0.28 (DAPO's clip-higher, arXiv:2503.14476, section 3.1).
3. The default loss is a mean over all tokens of the update, not over completions (DAPO, 3.3).
4. The old log-probabilities are those of the *current* policy at the start of the update, also for
   completions that another model wrote. These are treated as if this policy had sampled them.
With NUM_ITERATIONS=1, the default, the ratio is therefore exactly 1, nothing is clipped, and the
gradient is that of -A log p, as in REINFORCE. The value of the loss says nothing: with equally long
completions it is 0 up to rounding, because the advantages of a group sum to 0. Watch the reward.
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
    """One question with its G completions (of a peer perhaps fewer): the unit of advantages, of
    sharing and of updates. All lists but `prompt` have one entry per completion."""

    prompt: list[int]  # token ids
    completions: list[list[int]]  # token ids; an EOS, if any, is the last
    rewards: list[float]  # in [0, 1]; computed in this process, never a peer's claim
    question: "Question | None" = None  # which an update does not need
    texts: list[str] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)  # whether the model ended it itself
    key: tuple | None = None  # of a group that a peer wrote: (round, stage, node_id, index)

    # An update adds these.
    advantages: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # in the loss, of each of its tokens
    old_logprobs: list[torch.Tensor] = field(default_factory=list)  # one number per token

    @property
    def is_informative(self) -> bool:
        """Whether the group gives a gradient: its rewards differ ("non-zero variance")."""
        return rewards_differ(self.rewards)


def rewards_differ(rewards: list[float]) -> bool:
    """[1, 1] -> False, [0, 1] -> True."""
    return max(rewards) - min(rewards) > 1e-6


# -------- Advantages and loss ---------------------------------------------------------------------


def group_advantages(rewards: list[float]) -> list[float]:
    """A_i = (r_i - mean) / (std + 1e-4) within one group; zeros if all rewards are equal. The std
    has Bessel's correction, as in TRL. [1, 0, 0, 1] -> [0.866, -0.866, -0.866, 0.866]"""
    if not rewards_differ(rewards):
        return [0.0] * len(rewards)
    r = torch.tensor(rewards, dtype=torch.float64)  # (G,)
    # EXERCISE (Dr. GRPO, arXiv:2503.20783): drop the division by the standard deviation.
    return ((r - r.mean()) / (r.std(unbiased=True) + 1e-4)).tolist()


def loss_weights(lengths: torch.Tensor, loss_type: str, max_new_tokens: int) -> torch.Tensor:
    """For each completion the weight that each of its tokens has in the loss.

    lengths: the number of tokens of each completion of an update. The weights are made once, for
    the whole update. Micro-batches only add up their parts of the loss, so the way in which an
    update is split does not change the gradient.
    """
    lengths = lengths.to(torch.float64)
    divisors = {
        "dapo": lengths.sum(),  # every token weighs the same
        "grpo": len(lengths) * lengths,  # every completion weighs the same
        "dr_grpo": len(lengths) * max_new_tokens,  # a constant, whatever the length
    }
    return torch.ones_like(lengths) / divisors[loss_type]


def grpo_loss(logprobs, old_logprobs, advantages, mask, weights, clip_low=0.2, clip_high=0.28):
    """Clipped surrogate loss (PPO, arXiv:1707.06347, eq. 7), weighted by `loss_weights` and summed.

    logprobs, old_logprobs, mask: (B, T); advantages, weights: (B,).
    Returns (loss, number of clipped tokens), both scalar tensors.
    """
    ratio = torch.exp(logprobs - old_logprobs)  # (B, T)
    a = advantages.unsqueeze(1)  # (B, 1)

    # The smaller of the two terms: the policy gains nothing by moving beyond the clip range.
    unclipped = ratio * a
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * a
    token_loss = -torch.min(unclipped, clipped)  # (B, T)

    loss = (token_loss * mask * weights.unsqueeze(1)).sum()
    num_clipped = ((clipped < unclipped) & mask).sum()
    return loss, num_clipped


# -------- The update ------------------------------------------------------------------------------

MAX_GRAD_NORM = 1.0  # EXERCISE: make it a setting (a row of `Config` in sapo.py)


def update_policy(model, optimizer, groups: list[Group], config, codec, limit) -> dict:
    """One GRPO update on own and external groups alike: NUM_ITERATIONS optimizer steps on the same
    completions. Returns the update in numbers, see `update_numbers`."""
    # What each completion brings to the loss. Uninformative groups count in the divisors, too.
    lengths = torch.tensor([len(ids) for group in groups for ids in group.completions])
    weights = loss_weights(lengths, config.LOSS_TYPE, config.MAX_NEW_TOKENS)
    sizes = [len(group.completions) for group in groups]
    for group, group_weights in zip(groups, weights.split(sizes), strict=True):
        # EXERCISE (DAPO, section 3.4): no gradient for completions that were cut off.
        group.advantages = group_advantages(group.rewards)
        group.weights = group_weights.tolist()
        # The first step writes into these. `limit.split` may cut a group into parts, which hold the
        # same tensors, so what is written reaches the group and all later parts.
        group.old_logprobs = [torch.zeros(len(ids)).double() for ids in group.completions]

    # Uninformative groups give no gradient, so they do not pass through the model. The others are
    # sorted, because prompts of similar length need little padding in a micro-batch.
    trained = [group for group in groups if group.is_informative]
    trained.sort(key=lambda group: len(group.prompt))

    steps = []  # the numbers of each optimizer step
    model.eval()  # dropout off: log-probabilities of one policy must not depend on chance

    # Without a gradient there is no step: Adam's momentum alone would move the parameters.
    for i in range(config.NUM_ITERATIONS if trained else 0):
        numbers = limit.retry(
            accumulate_gradients, model, optimizer, trained, config, codec, limit, step=i
        )
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if not torch.isfinite(grad_norm):  # such a step would destroy the parameters for good
            break
        optimizer.step()
        steps.append(numbers | {"grad_norm": grad_norm.item()})
    optimizer.zero_grad()
    return update_numbers(trained, steps, config)


def accumulate_gradients(model, optimizer, trained, config, codec, limit, step: int) -> dict:
    """Add up the gradients of all groups, in micro-batches. Returns loss and number of clipped
    tokens, summed over the micro-batches. step: 0 for the first optimizer step of the update."""
    optimizer.zero_grad()
    totals = defaultdict(float)
    for batch in limit.split(trained):  # a group that is too large comes in parts
        with autocast(config.DTYPE, model):
            logprobs, mask = completion_logprobs(model, batch, config.TEMPERATURE, codec.pad_id)

        # In the first step the policy has not moved yet: its log-probabilities are kept as the old
        # ones of all steps. So the ratio is 1 there.
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
        loss.backward()
        totals["loss"] += loss.item()
        totals["clipped_tokens"] += num_clipped.item()
    return totals


# -------- Log-probabilities -----------------------------------------------------------------------


def completion_logprobs(model, groups: list[Group], temperature: float = 1.0, pad_id: int = 0):
    """Log-probability of each token of all B completions of N groups, and the mask, False for
    padding, both (B, T).

    The prompt of a group passes through the model once. Its completions continue from copies of the
    KV cache, through which the gradient flows back.
    """
    # For each completion the last hidden state of its prompt (B, H), the KV cache, and the mask of
    # its prompt (B, P), which is 0 for the padding on the left.
    prompts = [group.prompt for group in groups]
    sizes = [len(group.completions) for group in groups]
    last, cache, attention_mask = prefill(model, prompts, sizes, pad_id)

    # The prompt's hidden state predicts token 0, that of token i predicts token i + 1.
    completions = [ids for group in groups for ids in group.completions]
    targets, mask = pad(completions, pad_id, model.device)  # (B, T)
    hidden = last.unsqueeze(1)  # (B, 1, H)
    if targets.shape[1] > 1:
        # Completions are padded on the right, where no token sees what follows it, so their part
        # of the attention mask is all 1.
        inputs = targets[:, :-1]  # (B, T-1)
        attention_mask = F.pad(attention_mask, (0, inputs.shape[1]), value=1)  # (B, P+T-1)
        rest, _ = forward_hidden(model, inputs, attention_mask, cache)  # (B, T-1, H)
        hidden = torch.cat([hidden, rest], dim=1)  # (B, T, H)

    # `token_logprobs`, in chunks. Padding gets no logits: its places keep 0.
    values = token_logprobs_in_chunks(model, hidden[mask], targets[mask], temperature)  # (S,)
    return values.new_zeros(mask.shape).masked_scatter(mask, values), mask


def token_logprobs(model, hidden, targets, temperature: float):
    """log p of each target, at the temperature of sampling. (S, H) and (S,) -> (S,)."""
    logits = scaled_logits(model, hidden, temperature)  # (S, V), divided by the temperature
    return -F.cross_entropy(logits, targets, reduction="none")


# -------- Sampling --------------------------------------------------------------------------------


@torch.no_grad()
def sample_completions(model, codec, prompts, uniforms, temperature: float) -> list[list[int]]:
    """Sample B completions, equally many of each prompt, token by token. Each ends with an EOS id,
    which is kept, or after MAX_NEW_TOKENS tokens; after solved examples also with </answer>.

    uniforms: (MAX_NEW_TOKENS, B), a column of random numbers for each completion, so that it does
    not depend on the others of its batch. The caller draws them on the CPU, for all devices alike.
    """
    max_tokens, num_rows = uniforms.shape
    sizes = [num_rows // len(prompts)] * len(prompts)
    last, cache, attention_mask = prefill(model, prompts, sizes, codec.pad_id)
    tokens = torch.full((num_rows, max_tokens), -1, device=model.device)  # -1: none
    rows = torch.arange(num_rows, device=model.device)  # those that are not finished

    for i in range(max_tokens):
        logits = scaled_logits(model, last, temperature)  # (R, V)
        token = sample_tokens(logits, uniforms[i, rows])  # (R,)
        tokens[rows, i] = token
        goes_on = ~codec.ended(tokens[rows, : i + 1])  # (R,); </answer> may be several tokens
        num_left = int(goes_on.sum())
        if num_left == 0 or i == max_tokens - 1:
            break

        if num_left < len(rows):  # finished rows leave the batch and its cache
            cache.batch_select_indices(goes_on)
            rows, token, attention_mask = rows[goes_on], token[goes_on], attention_mask[goes_on]
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
        hidden, cache = forward_hidden(model, token.unsqueeze(1), attention_mask, cache)
        last = hidden[:, -1]  # (R, H)

    return [[token for token in row if token >= 0] for row in tokens.tolist()]


def sample_tokens(logits, uniforms):
    """Draw one token per row by inverting the cumulative distribution: the first token id whose
    cumulative probability exceeds the row's random number. logits: (B, V), uniforms: (B,). No top-k
    and no top-p: it is the distribution of the loss."""
    cumulative = torch.softmax(logits, dim=-1).cumsum(-1)  # (B, V)
    # The last sum may be 0.9999, so the number is scaled by it, and may be rounded up to it.
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(1)  # (B,)
    return token.clamp(max=logits.shape[1] - 1)


# -------- What is asked, and what is rewarded -----------------------------------------------------
# reasoning-gym makes a question from (task, seed). A model with a chat template reads a system
# prompt that asks for <answer>…</answer>, and then the question. Another model reads some solved
# examples, "2 + 2?\n<answer>4</answer>\n\n" (tiny reads none), and then the question.


def compute_reward(question: "Question", text: str, kind: str = "exact") -> float:
    """Reward in [0, 1] of a completion, by the task's verifier.

    exact: 1 if the verifier's score is at least 0.99, else 0. Verifiers give even garbage a small
    score, and dividing by the std would make full-size advantages of it. verifier: its score.
    """
    # EXERCISE: a reward of your own, any number in 0 to 1. The text may be a stranger's: never
    # evaluate it, and let nothing in it raise an error or take long.
    answer = extract_tagged_answer(text)  # between the last <answer> and </answer>; None without
    score = 0.0 if answer is None else safe_score(question, answer)
    return score if kind == "verifier" else float(score >= 0.99)


# ==== The heart ends here. Below: the forward pass, memory, tasks, tokenizer, models, warm start ==

transformers.utils.logging.set_verbosity_error()  # it warns of padding that is handled here
if not sys.stderr.isatty():  # bars of downloads are for a terminal
    transformers.utils.logging.disable_progress_bar()


# -------- Through the model -----------------------------------------------------------------------

MAX_LOGIT_ELEMENTS = 2**27  # logits (tokens x vocabulary) computed at once: 512 MiB in float32
# The name of the KV cache in a model's forward: a new one since transformers 5.24.
HAS_NEW_NAME = hasattr(transformers.modeling_outputs.BaseModelOutputWithPast, "cache")
CACHE_ARGUMENT = "cache" if HAS_NEW_NAME else "past_key_values"


def forward_hidden(model, ids, attention_mask, cache=None):
    """Run `ids` (rows, length) through the model, after what the KV cache already holds. Returns
    the last layer's hidden states (rows, length, H) and the cache, which now contains `ids`.

    attention_mask: (rows, cached + length), 0 for padding on the left, which no token may see.
    """
    cache = KVCache(config=model.config) if cache is None else cache
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # they count real tokens only
    output = model.base_model(
        input_ids=ids,
        attention_mask=attention_mask,
        position_ids=positions[:, cache.get_seq_length() :],
        use_cache=True,
        **{CACHE_ARGUMENT: cache},
    )
    return output.last_hidden_state, cache


def prefill(model, prompts: list[list[int]], rows_per_prompt: list[int], pad_id: int):
    """Run N prompts through the model, and repeat the results for B rows. Returns the hidden state
    of each row's last token (B, H), the KV cache, and the attention mask (B, P).

    What all prompts begin with, such as a chat model's system prompt, passes through the model
    once.
    """
    repeats = torch.tensor(rows_per_prompt, device=model.device)  # (N,)
    cache = None
    shared = 0
    if len(prompts) > 1 and not needs_unpadded_prompts(model.config):
        # The last token of a prompt is never shared, because its hidden state is wanted.
        shared = len(os.path.commonprefix([prompt[:-1] for prompt in prompts]))
    if shared > 0:
        ids, mask = pad([prompts[0][:shared]], pad_id, model.device)  # (1, shared)
        _, cache = forward_hidden(model, ids, mask.long())
        cache.batch_repeat_interleave(len(prompts))

    # The rest is padded on the left, so that nothing stands between a prompt and its completion.
    ids, mask = pad([prompt[shared:] for prompt in prompts], pad_id, model.device, "left")
    attention_mask = F.pad(mask.long(), (shared, 0), value=1)  # (N, P)
    hidden, cache = forward_hidden(model, ids, attention_mask, cache)  # (N, P - shared, H)
    cache.batch_repeat_interleave(repeats)
    last = hidden[:, -1].repeat_interleave(repeats, 0)
    return last, cache, attention_mask.repeat_interleave(repeats, 0)


def needs_unpadded_prompts(config) -> bool:
    """True if padding between a shared beginning and the rest would shift relative positions:
    sliding windows, MPT's ALiBi."""
    is_sliding = transformers.DynamicCache(config=config).is_sliding
    return any(is_sliding) or config.model_type in ("gpt_neo", "mpt")


def scaled_logits(model, hidden, temperature: float):
    """(..., H) -> logits / temperature (..., V), at least in float32.

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
    """A KV cache whose keys have the type of its values. Rotary embeddings leave float32 keys,
    which attention would cast to autocast's type again for each token."""

    def update(self, keys, values, *args, **kwargs):
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def grouped_attention(module, query, key, value, attention_mask, **more):
    """bfloat16 attention on a CPU where several heads share keys and values: matrix products.

    transformers' "sdpa" copies keys and values for each of the heads. All other cases are left to
    it; in float32 it is faster.
    query: (B, heads, T, D); key, value: (B, fewer heads, S, D); attention_mask: (B, 1, T, S), True
    where a token sees another one. Returns (B, T, heads, D) and no weights.
    """
    rows, heads, length, size = query.shape
    kv_heads, total = key.shape[1:3]
    is_usual = more.get("scaling") and more.get("position_bias") is None
    is_masked = attention_mask is not None and attention_mask.dtype == torch.bool
    is_faster = heads > kv_heads and query.device.type == "cpu" and value.dtype != torch.float32
    if not (is_usual and is_masked and is_faster):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)

    # The heads of a group stand one below the other, as if they were further tokens.
    query = (query * more["scaling"]).to(value.dtype).reshape(rows, kv_heads, -1, size)
    scores = query @ key.transpose(2, 3)  # (B, kv_heads, heads / kv_heads x T, S)
    scores = scores.view(rows, kv_heads, -1, length, total)
    # The lowest number, not -inf: a padding token that sees nothing would become NaN.
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~attention_mask.unsqueeze(2), lowest)
    weights = torch.softmax(scores, dim=-1).view(rows, kv_heads, -1, total)
    return (weights @ value).view(rows, heads, length, -1).transpose(1, 2), None


# Under a name of its own, which the models of this program use: others in this process do not.
GROUPED_ATTENTION = "sdpa_grouped"
transformers.AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
transformers.AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


def token_logprobs_in_chunks(model, hidden, targets, temperature: float):
    """`token_logprobs`, of at most MAX_LOGIT_ELEMENTS logits at a time. The logits of a chunk are
    not stored but computed again in the backward pass."""
    chunk = max(1, MAX_LOGIT_ELEMENTS // model.config.get_text_config().vocab_size)
    if len(targets) <= chunk:
        return token_logprobs(model, hidden, targets, temperature)
    pieces = []
    for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        pieces.append(
            recompute_in_backward(token_logprobs, model, h, y, temperature, use_reentrant=False)
        )
    return torch.cat(pieces)


def pad(rows: list[list[int]], pad_id: int, device, side: str = "right"):
    """[[7], [8, 9]] -> ids [[7, pad_id], [8, 9]] and mask [[True, False], [True, True]]."""
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    ids = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side=side)
    mask = pad_sequence(mask, batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)


def autocast(dtype: str, model):
    """A context that computes in `dtype`, "float32" or "bfloat16".

    The weights stay float32, because small steps of the optimizer are lost in a bfloat16 weight.
    """
    return torch.autocast(model.device.type, getattr(torch, dtype), enabled=dtype != "float32")


# -------- An update in numbers --------------------------------------------------------------------


def update_numbers(trained: list[Group], steps: list[dict], config) -> dict:
    """An update in numbers.

    loss                     of the first optimizer step
    clip_fraction            share of tokens whose ratio was clipped, a mean over the steps
    grad_norm                of the last step, before the gradient is clipped
    trained_tokens           of the completions that were trained on
    optimizer_steps          NUM_ITERATIONS, or fewer if a gradient was not finite
    logp_own, logp_external  mean log-probability of a token before the update, a mean over own and
                             over external completions
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
    """Mean over completions of each one's mean over its tokens. None without any."""
    means = [row.mean().item() for group in groups for row in group.old_logprobs]
    return sum(means) / len(means) if means else None


# -------- Memory and devices ----------------------------------------------------------------------

# CUDA, MPS and the CPU's allocator say it in different words.
OUT_OF_MEMORY = (
    "out of memory|can't allocate memory|not enough memory|Invalid buffer|bad_alloc|ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch says that memory has run out. It raises no MemoryError."""
    return isinstance(error, RuntimeError) and bool(re.search(OUT_OF_MEMORY, str(error)))


@dataclass
class Limit:
    """How many completions pass through the model at once. It is halved when memory runs out."""

    completions: int
    where: str  # what needs the memory, for people
    notify: object = print  # a function of a text
    tried: int = 0  # completions of the largest batch of the last `split`

    def split(self, groups: list[Group]) -> list[list[Group]]:
        """The groups in batches of at most so many completions. A group that is larger is cut into
        parts. Groups of 2, 2 and 5 completions, 4 at once -> batches of 2 + 2, of 4 and of 1."""
        batches = []
        room = self.tried = 0
        for group in groups:
            for begin in range(0, len(group.completions), self.completions):
                # The rows of old_logprobs are the same tensors: the group has what they get.
                part = replace(group)
                for name in ("completions", "advantages", "weights", "old_logprobs"):
                    setattr(part, name, getattr(group, name)[begin : begin + self.completions])
                if len(part.completions) > room:
                    batches.append([])
                    room = self.completions
                batches[-1].append(part)
                room -= len(part.completions)
                self.tried = max(self.tried, self.completions - room)
        return batches

    def retry(self, work, *args, **kwargs):
        """Call `work`, which calls `split`; again with smaller batches if memory runs out. Raises
        ModelError if one completion does not fit."""
        while True:
            try:
                return work(*args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.tried <= 1:
                    advice = "lower LOCAL_NODES or MAX_NEW_TOKENS, or take a smaller model"
                    raise ModelError(f"no memory for one completion at once: {advice}") from error
                self.completions = self.tried // 2
                self.notify(f"out of memory in {self.where}: again with {self.completions} at once")


def sample_in_batches(model, codec, prompts, num_generations: int, config, seed: int, limit):
    """`sample_completions`, G for each prompt, in batches that fit into memory. Returns for each
    prompt G lists of token ids."""
    total = len(prompts) * num_generations
    rng = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(config.MAX_NEW_TOKENS, total, generator=rng).to(model.device)
    # Groups to come: `split` only counts their completions.
    empty_groups = [Group(prompt, [[]] * num_generations, []) for prompt in prompts]
    model.eval()  # dropout off

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
    """How many completions an update can take at once, roughly. If it is too many, memory runs out
    once.

    config: MICRO_BATCH_SIZE, NUM_GENERATIONS, MAX_NEW_TOKENS, DEVICE; available: bytes. Assumes 150
    bytes of activations per token, layer and hidden unit, in a quarter of the memory; on a CPU in
    3 GB at most, but whole groups, because there memory is large and a prompt is computed once.
    """
    if config.MICRO_BATCH_SIZE != "auto":
        return int(config.MICRO_BATCH_SIZE)
    text_config = model.config.get_text_config()
    bytes_per_token = text_config.num_hidden_layers * text_config.hidden_size * 150
    budget = min(available / 4, 3e9 if config.DEVICE == "cpu" else math.inf)
    fitting = int(budget // (bytes_per_token * config.MAX_NEW_TOKENS))
    return max(config.NUM_GENERATIONS if config.DEVICE == "cpu" else 1, fitting)


def available_devices() -> dict[str, str]:
    """{device: the type to compute in} for the devices of this machine, the best first.

    bfloat16 only where the hardware multiplies it: emulated it is many times slower than float32.
    """
    devices = {}
    if torch.cuda.is_available():
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        for name in ("cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))):
            devices[name] = "bfloat16" if has_bfloat16 else "float32"
    if torch.backends.mps.is_available():
        devices["mps"] = "float32"

    # AMX or AVX512_BF16. An older torch cannot tell.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    has_bfloat16 = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    devices["cpu"] = "bfloat16" if has_bfloat16 else "float32"
    return devices


def available_memory(device: str) -> int:
    """Bytes that are free now on a GPU, or those of main memory in all."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # a container has less
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks. Getting large ones from the kernel again, page by page, takes
    two fifths of an update on a CPU."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # macOS, musl: no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


# ==================================================================================================
# Tasks and rewards
# ==================================================================================================

# name -> (reasoning-gym dataset, its settings). Before you add a task, read its score_answer: text
# of peers reaches it. First come the paper's nine tasks, then eight that are small enough for
# `tiny`, then five more.
SMALL_RANGE = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASK_TABLE = {
    "base_conversion": ("base_conversion", {"min_value": 1}),  # it writes 0 as an empty string
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
# Nodes with different tables cannot verify each other.
TASK_HASH = hashlib.sha256(json.dumps(TASK_TABLE, sort_keys=True).encode()).hexdigest()[:16]
PAPER_TASKS = tuple(TASK_TABLE)[:9]
TINY_TASKS = tuple(TASK_TABLE)[9:17]
HELD_OUT_SEEDS = range(2**52, 2**53)  # training seeds are smaller; JSON is exact up to 2**53
VERSIONS = {name: version(name) for name in ("torch", "transformers", "reasoning-gym")}
REASONING_GYM_VERSION = VERSIONS["reasoning-gym"]  # its own __version__ names an older one
MAX_SCORED_CHARS = 4096  # only the end of a completion is searched for an answer


class QuestionError(ValueError):
    """reasoning-gym cannot make this question: it raises, or it would compute for minutes."""


@dataclass(frozen=True)
class Question:
    """A question. (task, seed) regenerates all of it on any machine."""

    task: str
    seed: int
    text: str
    answer: str
    dataset: object = field(repr=False, compare=False)  # its score_answer is the verifier
    entry: dict = field(repr=False, compare=False)  # reasoning-gym's own record of the question


@functools.lru_cache(maxsize=8192)
def make_question(task: str, seed: int) -> Question:
    """Make the question of a task and a seed. Raises QuestionError if there is none.

    It is item 0 of a fresh dataset, because reasoning-gym makes item i with Random(seed + i), so
    that neighbouring seeds share items.
    """
    if task in FILE_TASKS:
        training, held_out = FILE_TASKS[task]
        rng = random.Random(f"line {seed}")  # a stream of its own, as for the choice of the task
        text, answer = rng.choice(held_out if seed in HELD_OUT_SEEDS else training)
        entry = {"metadata": {"source_dataset": "file"}}
        return Question(task, seed, text, last_part(answer), None, entry)

    name, settings = TASK_TABLE[task]
    try:
        # decimal_arithmetic changes the precision of the process, and bf prints dots.
        with decimal.localcontext(), contextlib.redirect_stdout(io.StringIO()):
            dataset = reasoning_gym.create_dataset(name, seed=seed, size=1, **settings)
            entry = dataset[0]
    except Exception as error:  # a generator of reasoning-gym may raise anything
        raise QuestionError(f"{task} has no question at seed {seed}: {error!r}") from error

    answer = entry["answer"]
    if answer is None:  # propositional_logic has many right answers
        answer = entry["metadata"]["example_answer"]
    return Question(task, seed, entry["question"], answer, dataset, entry)


def bounded_divisors(a: int, b: int, search=basic_arithmetic.find_common_divisors) -> list[int]:
    """basic_arithmetic's search for divisors, which tries every number up to the root of the gcd,
    at some seeds for minutes. The bound is on the work, not on the time, so it is the same on every
    machine: a million tries, 0.1 s."""
    if math.gcd(a, b) > 10**12:
        raise QuestionError("its search for divisors is too long")
    return search(a, b)


basic_arithmetic.find_common_divisors = bounded_divisors


def first_valid_question(task: str, seed: int, is_good=lambda question: True) -> Question:
    """The first good question that exists among seed, seed + 1, …, seed + 50. For own questions
    only: a peer's seed must be right."""
    for candidate in range(seed, seed + 51):
        with contextlib.suppress(QuestionError):
            if is_good(question := make_question(task, candidate)):
                return question
    raise QuestionError(f"{task}: no question from seed {seed} on can be made and fits the model")


def first_solved_question(task: str, seed: int, is_good=lambda question: True) -> Question:
    """The first good question from this seed on whose own answer its verifier takes.

    The example answers of propositional_logic fail once in a hundred times. As solved examples they
    would teach what is not rewarded.
    """
    return first_valid_question(
        task, seed, lambda q: safe_score(q, q.answer) >= 0.99 and is_good(q)
    )


def extract_tagged_answer(text: str) -> str | None:
    """The text between the last </answer> and the last <answer> before it, None without both. Only
    the last MAX_SCORED_CHARS characters count."""
    text = text[-MAX_SCORED_CHARS:]
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end].strip()


def safe_score(question: Question, answer: str) -> float:
    """`verifier_score` within [0, 1], and 0 where the verifier raises or returns no number."""
    score = 0.0
    with contextlib.suppress(Exception):  # a verifier may raise anything on a stranger's text
        score = verifier_score(question, answer)
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def verifier_score(question: Question, answer: str) -> float:
    """The score of the task's verifier, which may raise anything. Never evaluates the answer."""
    source = question.entry["metadata"]["source_dataset"]
    if source == "file":
        return float(is_same_answer(answer, question.answer))
    if source == "binary_matrix":
        return float(answer == question.answer)  # its verifier would call eval(answer)
    if source == "propositional_logic" and not is_safe_formula(question, answer):
        return 0.0
    with decimal.localcontext():  # decimal_arithmetic changes the precision of the process
        return float(question.dataset.score_answer(answer, question.entry))


def is_safe_formula(question: Question, answer: str) -> bool:
    """Whether propositional_logic's verifier can score this answer in a moment: it is short, not
    deep, and uses only the question's own variables.

    The verifier's work doubles with each distinct variable; an answer of 69 characters took 9 s.
    Its own parser must say what a variable is: to it "P ¬P", "P()" and "PP" are three.
    """
    # All premises of a question joined by "and" take 88 characters, 30 of them signs.
    num_signs = sum(char in "∧∨¬→↔(" for char in answer)
    if len(answer) > 160 or num_signs > 40:
        return False
    used = question.dataset._collect_variables([Expression.from_string(answer)])
    return used <= set(question.entry["metadata"]["variables"])


# -------- The names of tasks, and questions of one's own ------------------------------------------

NUMBER = r"[-+]?(\d{1,30}|\d{1,3}(,\d{3}){1,9})(\.\d{1,30})?"  # 7, -1.50, 12,000


def is_same_answer(answer: str, right: str) -> bool:
    """Whether two answers to a question of one's own are equal apart from white space, or are two
    numbers of one value. Only digits are read. ("1,000.0", "1000") -> True."""
    texts = [plain_text(text).split() for text in (answer, right)]
    numbers = [re.sub(r"\\boxed\{(.*)\}|\$", r"\1", "".join(text)).rstrip(".") for text in texts]
    if not all(re.fullmatch(NUMBER, number, re.ASCII) for number in numbers):
        return texts[0] == texts[1]
    return len({decimal.Decimal(number.replace(",", "")) for number in numbers}) == 1


def plain_text(text: str) -> str:
    """Text in one form of its letters: composed (ä may be one sign or two), with ASCII's digits and
    minus sign."""
    text = unicodedata.normalize("NFC", text).replace("\N{MINUS SIGN}", "-")
    return "".join(str(int(char)) if char.isdecimal() else char for char in text)


# TASKS=file:mine.jsonl: the name of a task -> (questions to train on, held-out questions), each a
# list of (text, answer).
FILE_TASKS = {}


def task_names(text: str, may_read_files: bool) -> list[str]:
    """The names in TASKS: "gcd, lcm" -> ["gcd", "lcm"]. Raises ValueError that names all tasks
    that are refused: their verifiers evaluate the answer, or their questions differ from process to
    process. A file is read only if the user has named it, never because config.json says so."""
    names, mistakes = [], []
    for task in map(str.strip, text.split(",")):
        if task in TASK_TABLE or task in FILE_TASKS:
            names.append(task)
        elif task.startswith("file:") and may_read_files:
            try:
                names.append(load_task_file(os.path.expanduser(task.removeprefix("file:"))))
            except ValueError as error:
                mistakes.append(str(error))
        elif task.startswith("file:"):
            advice = "set TASKS to file:<path of your copy of it>"
            mistakes.append(f"{task!r:.80} is not here: {advice}")
        else:
            closest = difflib.get_close_matches(task, TASK_TABLE, n=1)
            hint = f"did you mean {closest[0]}?" if closest else f"allowed: {', '.join(TASK_TABLE)}"
            mistakes.append(f"{task!r:.80} is refused; {hint}")
    if mistakes:
        raise ValueError("; ".join(mistakes))
    return names


def last_part(answer: str) -> str:
    """The answer that is asked for: of a derivation what stands behind its last "####".
    "3 + 4 = 7 #### 7" -> "7"."""
    return answer.rpartition("####")[2].strip()


def load_task_file(path: str) -> str:
    """Read questions from lines of {"question": …, "answer": …}; a tenth of them is held out.

    Returns the name of the task, "file:mine.jsonl#1f3b5d7a", the same for equal contents. Raises
    ValueError that names the lines that cannot be used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a byte-order mark is no mistake
    except (OSError, ValueError) as error:
        raise ValueError(f"file:{path} cannot be read: {error}") from error

    answers = {}  # question -> answer
    mistakes = []
    for number, line in enumerate(text.split("\n"), start=1):  # in JSON no other sign ends a line
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            is_text = {type(row["question"]), type(row["answer"])} <= {str, int, float}
            is_text = is_text and row["answer"] == row["answer"]  # NaN, a gap in a table, is not
        except (ValueError, RecursionError, TypeError, LookupError):
            is_text = False
        if not is_text:
            mistakes.append(f"line {number}: expected JSON with a question and an answer")
            continue
        question, answer = str(row["question"]), str(row["answer"]).strip()
        last = last_part(answer)
        if not last or extract_tagged_answer(f"<answer>{last}</answer>") != last:
            mistakes.append(f"line {number}: its answer is empty, has tags or is too long")
        if answers.setdefault(question, answer) != answer:
            mistakes.append(f"line {number}: a second answer to one question")
    if len(answers) < 2:
        mistakes.append("expected at least two questions")
    if mistakes:
        raise ValueError(f"file:{path}: " + "; ".join(mistakes[:5]))

    # A hash decides which questions are held out, so that it does not depend on the file's order.
    digest = hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()
    by_hash = sorted(answers.items(), key=lambda row: hashlib.sha256(row[0].encode()).digest())
    num_held_out = max(1, len(answers) // 10)
    name = f"file:{re.sub('[ ,]', '_', os.path.basename(path))}#{digest[:8]}"
    FILE_TASKS[name] = (by_hash[num_held_out:], by_hash[:num_held_out])
    return name


# ==================================================================================================
# The tokenizer and the models
# ==================================================================================================

# The forms in which the embedded model learns to answer. Only the first is rewarded; see
# .github/STUDY.md.
ANSWER_TEMPLATES = (
    "<answer>{}</answer>", "The answer is {}.", "Answer: {}", "= {}", "{}", "It is {}",
)  # fmt: skip

# Some chat templates write today's date, by date_string or by strftime_now. Prompts must repeat, so
# they get this one. (A macro hides the function of the same name.)
PROMPT_DATE = "1 January 2025"
DATE_MACRO = "{% macro strftime_now(format) %}" + PROMPT_DATE + "{% endmacro %}\n"


SECRET = "HUGGINGFACE_ACCESS_TOKEN"  # the variable that holds it


class ModelError(ValueError):
    """A model that cannot be loaded or used. The text says why, for the user."""


@dataclass
class Codec:
    """A tokenizer with the conventions of its model: how a prompt looks, which ids end a
    completion, and how much fits."""

    tokenizer: object
    eos_ids: set[int]
    eos_id: int  # the one that ends this model's turn; appended to a peer's finished completion
    num_shots: int  # solved examples; 0 with a chat template
    positions: int  # the longest text that the model can read, in tokens
    max_prompt: int  # tokens; MAX_NEW_TOKENS positions are left for the completion
    max_completion: int  # tokens of a peer's completion, whose tokenizer may be another one
    vocabulary: int  # the model's number of ids; a tokenizer may know more
    pad_id: int  # any real token: the embedding of a padding token may be zero
    dtype: torch.dtype  # of the model's files; the final model is written in it, too

    # -- Prompts

    def encode_prompt(self, question: Question) -> list[int]:
        """The prompt of a question: the model's chat template, or else plain text after `num_shots`
        solved examples. Raises QuestionError if the question does not fit: none is ever cut."""
        examples = self.solved_examples(question)
        while True:
            ids = self.prompt_ids(examples, question.text)
            if len(ids) <= self.max_prompt:
                return ids
            if not examples:
                raise QuestionError(f"{question.task}: a prompt has {len(ids)} tokens; too many")
            examples.pop(0)  # whole examples are dropped until the prompt fits

    def fits(self, question: Question) -> bool:
        """Whether a prompt can hold this question."""
        with contextlib.suppress(QuestionError):
            return bool(self.encode_prompt(question))
        return False

    def solved_examples(self, question: Question) -> list[str]:
        """Solved questions of the same task, from the seeds that follow: never the question itself,
        and none twice, so that a small file may give fewer than `num_shots`."""
        examples = []
        for seed in range(question.seed + 1, question.seed + 50):
            if len(examples) < self.num_shots:
                solved = first_solved_question(question.task, seed % HELD_OUT_SEEDS.start)
                example = f"{solved.text}\n<answer>{solved.answer}</answer>\n\n"
                if solved.text != question.text and example not in examples:
                    examples.append(example)
        return examples

    def prompt_ids(self, examples: list[str], text: str) -> list[int]:
        """The token ids of a prompt. The tokenizer may put a BOS before plain text, without which
        models such as Llama know none."""
        prompt = self.prompt_text(examples, text)
        is_plain = not self.tokenizer.chat_template
        return self.tokenizer(prompt, add_special_tokens=is_plain).input_ids

    def prompt_text(self, examples: list[str], text: str) -> str:
        """System prompt and question in the model's chat template, or examples and question."""
        if not self.tokenizer.chat_template:
            return "".join(examples) + text + "\n"

        system = SYSTEM_PROMPTS["default"]
        turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        if not self.has_system_role:
            turns = [{"role": "user", "content": system + "\n" + text}]
        # EXERCISE: let a model that can think do so. It needs far more than 256 tokens.
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
        """Whether the chat template knows the system role: some raise, some drop it silently."""
        turns = [{"role": role, "content": f"as {role}"} for role in ("system", "user")]
        with contextlib.suppress(Exception):  # a template may raise anything
            return "as system" in self.tokenizer.apply_chat_template(turns, tokenize=False)
        return False

    # -- Completions

    def encode_completions(self, texts: list[str], finished: list[bool]) -> list[list[int]]:
        """Peers' completions as this model would have sampled them. "<|im_end|>" in a text stays
        plain text.

        A finished one gets this model's EOS, unless its answer tag already ends it (see
        `is_finished`).
        """
        rows = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True).input_ids
        for ids, text, is_finished in zip(rows, texts, finished, strict=True):
            if is_finished and not (self.num_shots > 0 and "</answer>" in text):
                ids.append(self.eos_id)
        return rows

    def decode(self, ids: list[int]) -> str:
        """Ids -> text, without the EOS, which is no special token in some models."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return self.tokenizer.decode([token for token in ids if token not in self.silent_ids])

    @functools.cached_property
    def silent_ids(self) -> set[int]:
        """Special tokens, which are no text. Answer tags are text, even where they are special."""
        added = self.tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special}
        tags = {i for i, token in added.items() if token.content in ("<answer>", "</answer>")}
        return special.union(self.tokenizer.all_special_ids) - tags

    def ended(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which of these completions (rows, t) end with their last token: (rows,)."""
        newest = tokens[:, max(0, tokens.shape[1] - 9) :]
        ended = [self.is_finished(ids) for ids in newest.tolist()]
        return torch.tensor(ended, device=tokens.device)

    def is_finished(self, ids: list[int]) -> bool:
        """Whether the model ended a completion itself: by an EOS, or after solved examples, with
        more of which a base model would go on, by </answer>."""
        if ids[-1] in self.eos_ids:
            return True
        return self.num_shots > 0 and "</answer>" in self.decode(ids[-9:])  # a byte a token


def load_model(config, tasks) -> tuple[torch.nn.Module, Codec]:
    """Load the model (float32, eval mode, on its device) and its Codec.

    config: MODEL_NAME, DEVICE, MAX_NEW_TOKENS, NUM_SHOTS, HUGGINGFACE_ACCESS_TOKEN. Raises
    ModelError if the model cannot be loaded or would not be trained exactly.
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
        # An architecture of others may raise anything. The traceback tells whose mistake it is.
        if config.MODEL_NAME == "tiny" or isinstance(error, ModelError):
            raise
        traceback.print_exc()
        raise model_error(config, f"{type(error).__name__}: {error}") from error
    return model, codec


def load_pretrained(config):
    """Load model and tokenizer of MODEL_NAME from the Hugging Face Hub or a folder. Returns them
    and the type of the weights in the files. Raises ModelError with the reason if that fails."""
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
    except Exception as error:  # files, network, tokenizer: a model's author may have done anything
        raise model_error(config, f"{type(error).__name__}: {error}") from error

    is_sdpa = model.config._attn_implementation == "sdpa"
    if is_sdpa and config.DEVICE == "cpu" and config.DTYPE == "bfloat16":
        model.set_attn_implementation(GROUPED_ATTENTION)

    # Weights that are missing would be random, and different in each process. Some that the model
    # does not take, such as scales of a quantization, show that the files are another model's.
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    is_trainable = all(p.requires_grad and p.is_floating_point() for p in model.parameters())
    # Some layers keep a state instead of keys and values. Their modules' names say it.
    names = " ".join(name for name, _ in model.named_modules())
    has_state = re.search(r"mamba|linear_attn|\bconv(1d)?\b", names) is not None
    reasons = {
        "it has layers with a state (Mamba, linear attention), which no cache repeats": has_state,
        f"its files lack {' '.join(missing[:1])}": bool(missing),
        f"its files hold {len(unexpected)} tensors that its model does not take, such as "
        f"{', '.join(unexpected[:3])}": bool(unexpected),
        "it gives no hidden states": model.base_model is model,
        "its weights are quantized or frozen: take the model in full precision": not is_trainable,
    }
    refuse(config, reasons)

    # Sampling settings are not used here, and some of them would make save_pretrained raise after
    # the last round. Keep the ids.
    loaded = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id,
        pad_token_id=loaded.pad_token_id,
    )
    dtype = stored.get_text_config().dtype
    return model, tokenizer, dtype if isinstance(dtype, torch.dtype) else torch.float32


def refuse(config, reasons: dict[str, bool]) -> None:
    """Raise ModelError with the first of these reasons that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise model_error(config, reason)


def model_error(config, reason: str) -> ModelError:
    """The error that names MODEL_NAME. Of a library's message the lines that help remain: the
    first, and those that say where to ask or what to install."""
    first, *more = filter(str.strip, reason.splitlines())
    helpful = [line for line in more if re.search("https?://|install|log in|logged in", line)]
    reason = " ".join(line.strip()[:300] for line in [first, *helpful[:2]])
    if "gated" in reason:
        reason += f" Your token belongs into {SECRET}."
    return ModelError(f"MODEL_NAME={config.MODEL_NAME!r} cannot be used: {reason}")


def make_codec(model, tokenizer, config, dtype: torch.dtype) -> Codec:
    """The conventions of a loaded model. Raises ModelError if it has no EOS or too few positions.

    config: MODEL_NAME, MAX_NEW_TOKENS, NUM_SHOTS.
    """
    # Every EOS id of the generation config ends a completion. So do the tokenizer's, and the token
    # that the chat template writes after an answer.
    usual = tokenizer.eos_token_id
    eos = model.generation_config.eos_token_id
    eos_ids = {*(eos if isinstance(eos, list) else [eos]), usual} - {None, -1}
    eos_id = find_end_of_turn_id(tokenizer, eos_ids)
    if eos_id is None:
        eos_id = usual if usual in eos_ids else min(eos_ids, default=None)
    text_config = model.config.get_text_config()
    positions = num_positions(text_config)
    reasons = {
        "it has no EOS token, so that nothing would end an answer": eos_id is None,
        f"MAX_NEW_TOKENS={config.MAX_NEW_TOKENS}: expected less than its {positions} positions": (
            positions <= config.MAX_NEW_TOKENS
        ),
    }
    refuse(config, reasons)
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
    """The token that the chat template puts after an answer (Gemma: <end_of_turn>): the first one
    there that is an EOS or that was added to the vocabulary. None without one."""
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
    try:
        chat = tokenizer.apply_chat_template(turns, tokenize=False)
        tail = tokenizer(chat.rpartition("four")[2], add_special_tokens=False).input_ids
    except Exception:  # there is no template, or it raises
        return None
    added = set(tokenizer.get_added_vocab().values())
    return next((token for token in tail if token in eos_ids | added), None)


def num_positions(text_config) -> int:
    """The longest text that a model can read, in tokens."""
    # Each family keeps it elsewhere. ALiBi (BLOOM) knows no end; 2048 tokens are what it has seen.
    positions = 2048
    for name in ("seq_length", "max_seq_len", "max_position_embeddings"):
        positions = getattr(text_config, name, None) or positions

    # Longer texts than the original length would rotate all of a text in another way, so that
    # cached keys would be wrong. Some models have one rule for each type of their layers.
    rope = getattr(text_config, "rope_parameters", None)
    rope = rope or getattr(text_config, "rope_scaling", None) or {}  # its name in transformers 4
    for rule in (rope, *rope.values()):
        if isinstance(rule, dict) and rule.get("rope_type") in ("dynamic", "longrope"):
            positions = rule.get("original_max_position_embeddings", positions)
    return positions


# -------- Exact or refused ------------------------------------------------------------------------


def check_tokens(codec: Codec, config, tasks) -> list[int]:
    """Raise ModelError unless five questions of each task and their right answers survive the
    tokenizer. Returns one of the prompts."""
    for task, seed in itertools.product(tasks, range(5)):
        question = first_valid_question(task, seed)
        verifier_score(question, question.answer)  # a mistake in one of one's own raises here
        question = first_solved_question(task, seed, codec.fits)

        # As a peer's, and with tags that are tokens of their own.
        prompt = codec.encode_prompt(question)
        right = f"<answer>{question.answer}</answer>"
        completions = codec.encode_completions([right, f"It is {right}"], [True, True])
        completions.append(codec.tokenizer(right, add_special_tokens=False).input_ids)

        # Some tokenizers drop tokens or put words apart.
        texts = [codec.decode(ids) for ids in completions]
        answers = [extract_tagged_answer(text) or "" for text in texts]
        is_right = all(safe_score(question, answer) >= 0.99 for answer in answers)
        texts_seen = [plain_text(text) for text in (question.text, codec.tokenizer.decode(prompt))]
        asked, seen = ["".join(text.split()) for text in texts_seen]
        is_whole = asked in seen
        has_eos = prompt[-1] in codec.eos_ids and not codec.tokenizer.chat_template
        # An id beyond the embedding raises IndexError on a CPU and an opaque assertion on a GPU.
        highest = max(codec.tokenizer.vocab_size - 1, *map(max, [prompt, *completions]))
        reasons = {
            f"a question of {task} is not whole in its prompt: mend its chat template or tokenizer":
                not is_whole,
            "an EOS ends the prompt: set add_eos_token to false in its tokenizer": has_eos,
            f"its tokenizer gives back {right!r:.40} as {texts!r:.200}": not is_right,
            f"its tokenizer has token {highest}, the model {codec.vocabulary} in all":
                highest >= codec.vocabulary,
        }  # fmt: skip
        refuse(config, reasons)
    return prompt


def check_logprobs(model, codec: Codec, config, prompt: list[int]) -> None:
    """Raise ModelError unless log-probabilities with shared prompts are those of the model's own
    plain forward pass.

    They are not where a cache cannot be repeated (state-space models), where positions are ignored
    (BART), and where logits are more than `scaled_logits`.
    """
    # Pieces of this prompt, of unequal lengths: two with a common beginning, two without.
    ids = (prompt * 30)[:30]
    answers = [ids[20:24], ids[3:4], ids[24:30]]
    for prompts in ([ids[:9], ids[:9] + ids[-5:]], [ids[:5], ids[4:18]]):
        groups = [Group(prompt, answers, []) for prompt in prompts]
        ours, mask = completion_logprobs(model, groups, pad_id=codec.pad_id)

        # The plain way: every row on its own, without padding or a cache.
        theirs = []
        for start, answer in itertools.product(prompts, answers):
            row = torch.tensor([start + answer], device=model.device)
            with torch.no_grad():
                logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits.float()
            losses = F.cross_entropy(logits[0, :-1], row[0, 1:], reduction="none")
            theirs.append(-losses[-len(answer) :])

        error = (ours.detach()[mask] - torch.cat(theirs)).abs().max().item()
        reason = f"log-probabilities differ by {error:.2g} from a plain forward pass"
        refuse(config, {reason: not error < 2e-3})  # also if it is no number
        ours.sum().backward()  # must not raise
        model.zero_grad()


def file_notes(codec: Codec, config, tasks) -> list[str]:
    """What the user should know of the own questions: sentences for each file."""
    sentences = []
    for task in filter(FILE_TASKS.get, tasks):
        rows = list(itertools.chain(*FILE_TASKS[task]))
        answers = [last_part(answer) for _, answer in rows]

        # What is too long for a prompt, or for MAX_NEW_TOKENS?
        tagged = [f"<answer>{answer}</answer>" for answer in answers]
        lengths = list(map(len, codec.encode_completions(tagged, [True] * len(rows))))
        long = []
        for (text, answer), length in zip(rows, lengths, strict=True):
            question = Question(task, 0, text, answer, None, {})
            if length > config.MAX_NEW_TOKENS or not codec.fits(question):
                long.append(text)
        if long:
            sentences.append(
                f"{task}: {len(long)} questions or their answers are too long, such as "
                f"{long[0]!r:.60}; MAX_NEW_TOKENS={max(lengths)} would hold all answers"
            )

        # A right answer must be repeated sign by sign, unless it is a number.
        derived = [answer for _, answer in rows if "####" in answer]
        if derived:
            sentences.append(f"{task}: of {len(derived)} answers only the part behind #### counts")
        odd = [answer for answer in answers if "\n" in answer or answer.endswith(".")]
        if len(odd) > len(rows) / 10:
            sentences.append(
                f"{task}: {len(odd)} answers have several lines or end in a full stop, which a "
                f"model must repeat to be right, such as {odd[0]!r:.60}"
            )
    return sentences


# -------- The embedded model, the optimizer, the warm start ---------------------------------------


def build_tiny_model(tasks):
    """Build the embedded model `tiny`, 0.14 M parameters, and its tokenizer of characters and
    phrases.

    A phrase is a fixed piece of the tasks' questions that recurs, or the beginning of an answer. It
    has at least five characters, no digit, and becomes one token.
    """
    # Collect the phrases: the pieces between the numbers of a hundred questions of each task.
    counts = Counter()
    for task in dict.fromkeys(tasks):
        for i in range(100):
            text = first_valid_question(task, 1000 * i).text + "\n"
            pieces = set(re.split(r"[0-9]+", text))
            counts.update(piece for piece in pieces if len(piece) >= 5)
    phrases = sorted(piece for piece, count in counts.items() if count >= 10)
    phrases += [text.split("{}")[0] for text in ANSWER_TEMPLATES[1:] if len(text) >= 5]

    # A tokenizer of single characters, with the phrases as added tokens.
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

    # The same random weights in every process, without a change to the global random state.
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=512,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
        initializer_range=0.1,  # about 1 / sqrt(n_embd); with GPT-2's 0.02 it learns half as much
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
    return model, tokenizer


def make_optimizer(model, config) -> torch.optim.AdamW:
    """AdamW with its moments allocated, so that no later step allocates them.

    config: MODEL_NAME, LEARNING_RATE. The fused step is one pass over memory. tiny uses the unfused
    one, because the fused one rounds differently and tiny's results must repeat bit for bit.
    """
    fused = config.MODEL_NAME != "tiny"
    optimizer = torch.optim.AdamW(
        model.parameters(), config.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
    )
    for p in model.parameters():  # what AdamW's first step would allocate
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


WARM_START_VERSION = 6  # raise it when `warm_start` changes, so that no older file is loaded


def warm_start(model, codec: Codec, config, tasks):
    """Train on the tasks' own questions, WARM_START_STEPS steps of supervised fine-tuning. They are
    counted in steps, not seconds, so that the result repeats. Yields (step, loss) after each step.

    tiny sees answers in all forms, half of them the rewarded one, then a last phase in which that
    form is rare (ANSWER_TAG_SHARE). It can do the arithmetic then but hardly ever writes the
    rewarded form. That is on purpose: finding this form is what is left to learn. Other models see
    the rewarded form only.

    config: MODEL_NAME, SEED, WARM_START_STEPS, ANSWER_TAG_SHARE, DTYPE.
    """
    steps = config.WARM_START_STEPS
    is_tiny = config.MODEL_NAME == "tiny"
    batch_size = 64 if is_tiny else 8
    optimizers = warm_start_optimizers(model, is_tiny)
    warm_up_steps = max(1, min(50, steps // 4))
    num_last_steps = min(150, steps // 4) if is_tiny else 0

    # The questions, as (prompt, answer), the shortest first: 16,000 at most, which takes 3 s. They
    # are asked several times.
    rng = random.Random(f"warm start {config.SEED}")
    samples = []
    for _ in range(min(16_000, steps * batch_size)):
        seed = rng.randrange(HELD_OUT_SEEDS.start)
        question = first_solved_question(rng.choice(tasks), seed, codec.fits)
        samples.append((codec.encode_prompt(question), question.answer))
    samples.sort(key=lambda sample: len(sample[0]))
    make_question.cache_clear()

    for step in range(1, steps + 1):
        # The learning rate rises, stays, and in the second half falls to 0.
        share = min(1.0, step / warm_up_steps, 2 * (1 - (step - 1) / steps))
        for optimizer, peak_lr in optimizers:
            optimizer.param_groups[0]["lr"] = peak_lr * share

        # A batch of similar lengths, so that little is padded: neighbours of a random sample.
        middle = rng.randrange(len(samples))
        neighbours = samples[max(0, middle - 8 * batch_size) : middle + 8 * batch_size]
        batch = rng.sample(neighbours, batch_size)

        # Each answer in one of the forms.
        tag_share = config.ANSWER_TAG_SHARE if step > steps - num_last_steps else 0.5
        answers = []
        for _, answer in batch:
            is_rewarded = not is_tiny or rng.random() < tag_share
            template = ANSWER_TEMPLATES[0] if is_rewarded else rng.choice(ANSWER_TEMPLATES[1:])
            answers.append(template.format(answer))

        # The negative log-likelihood of the answers, a mean over all their tokens. -100 stands for
        # what is not scored: prompts, and the padding, which stands on the right.
        rows = []
        labels = []
        answer_ids = codec.encode_completions(answers, [True] * len(answers))
        for (prompt, _), ids in zip(batch, answer_ids, strict=True):
            rows.append((prompt + ids)[: codec.positions])
            labels.append(([-100] * len(prompt) + ids)[: codec.positions])
        rows, _ = pad(rows, codec.pad_id, model.device)  # (batch size, P+T)
        labels, _ = pad(labels, -100, model.device)
        with autocast(config.DTYPE, model):
            loss = model(input_ids=rows, labels=labels, use_cache=False).loss

        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        yield step, loss.detach()


def warm_start_optimizers(model, is_tiny: bool) -> list[tuple]:
    """Optimizers with their highest learning rates: AdamW, and for the matrices in the layers of
    tiny Muon, with which half as many steps are enough."""
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
    """Make of each matrix's gradient the step of Muon (K. Jordan, 2024): its moving average, with
    all singular values near 1. That of torch computes in bfloat16, which takes an AVX2 CPU five
    times as long as the rest of a step."""
    for p in optimizer.param_groups[0]["params"]:
        average = optimizer.state[p].setdefault("average", torch.zeros_like(p))
        average.lerp_(p.grad, 0.05)
        x = p.grad.lerp(average, 0.95)  # Nesterov's look ahead

        # Five Newton-Schulz steps; on the side of the matrix where its products are small.
        is_tall = x.shape[0] > x.shape[1]
        x = x.T if is_tall else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            product = x @ x.T
            x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
        p.grad = (x.T if is_tall else x) * max(1, p.shape[0] / p.shape[1]) ** 0.5


def warm_start_recipe(model, codec: Codec, config, tasks) -> dict:
    """The settings, the data and the initial weights of a warm start, as {name: value}. Its hash is
    the name of the file; a change of the code counts through WARM_START_VERSION."""
    names = "MODEL_NAME WARM_START_STEPS SEED NUM_SHOTS MAX_NEW_TOKENS ANSWER_TAG_SHARE".split()
    questions = [first_valid_question(task, 1, codec.fits) for task in sorted(tasks)]
    return {name: getattr(config, name) for name in names} | {
        "version of this recipe": WARM_START_VERSION,
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


TRY_SCRIPT = '''"""Ask this model as it was asked in training: python try.py "What is 2 + 2?" """

import pathlib
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

BEFORE, QUESTION, AFTER = {before!r}, {question!r}, {after!r}

folder = pathlib.Path(__file__).parent
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = BEFORE + (sys.argv[1] if len(sys.argv) > 1 else QUESTION) + AFTER
inputs = tokenizer(prompt, add_special_tokens={is_plain}, return_tensors="pt")
how = {{"do_sample": True, "top_k": 0, "temperature": {temperature}, "max_new_tokens": {length}}}
output = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, **how)
print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
'''


def try_script(codec: Codec, question: Question, config) -> str:
    """A script that asks the final model as training did: with the system prompt and without
    thinking, or after solved examples."""
    asked = question.text.strip()
    prompt = codec.prompt_text(codec.solved_examples(question), asked)
    before, _, after = prompt.rpartition(asked)
    return TRY_SCRIPT.format(
        before=before,
        question=asked,
        after=after,
        is_plain=not codec.tokenizer.chat_template,
        temperature=config.TEMPERATURE,
        length=config.MAX_NEW_TOKENS,
    )


def save_model(model, codec: Codec, card: str, folder) -> None:
    """Write model, tokenizer and model card as an ordinary Hugging Face folder, the weights in the
    type that they came in. The model must not be trained afterwards."""
    transformers.utils.logging.disable_progress_bar()  # "Writing model shards"
    model.generation_config.eos_token_id = sorted(codec.eos_ids)  # else `generate` goes on for ever
    model.to(codec.dtype).save_pretrained(folder)
    # Several chat templates would need a subfolder.
    codec.tokenizer.save_pretrained(folder, save_jinja_files=False)
    Path(folder, "README.md").write_text(card, encoding="utf-8")

    # The name of the class that transformers 4 knows, too.
    file = Path(folder, "tokenizer_config.json")
    settings = file.read_text(encoding="utf-8")
    settings = settings.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    file.write_text(settings, encoding="utf-8")
