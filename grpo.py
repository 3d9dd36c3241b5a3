"""GRPO for one learner: sample completions of questions, score them, and turn the rewards into a
gradient. The heart comes first: all of GRPO, as it runs.

`config`: the settings; `codec`: the tokenizer with its conventions; `limit`: how many rows fit into
memory at once. Symbols in the comments:
    N  questions (groups) in a batch        P  tokens of the longest prompt in the batch
    G  completions of one question          T  tokens of the batch's longest completion
    B  rows: completions in the batch       S  tokens that are scored
    H  hidden size                          V  vocabulary

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
import itertools
import json
import math
import os
import random
import re
import sys
import traceback
import zlib
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import reasoning_gym
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from reasoning_gym.arithmetic import basic_arithmetic
from reasoning_gym.code.contrib.bfit.Compiler import Optimizer as bf_optimizer
from reasoning_gym.logic.propositional_logic import Expression
from reasoning_gym.utils import SYSTEM_PROMPTS
from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


@dataclass
class Group:
    """One question with its G completions, the unit of advantages, of sharing and of updates."""

    prompt: list[int]  # (P,) token ids
    completions: list[list[int]]  # G lists of token ids, none empty; an EOS, if any, is the last
    rewards: list[float]  # (G,) in [0, 1]; computed in this process, never a peer's claim
    question: "Question | None" = None
    texts: list[str] = field(default_factory=list)  # (G,)
    finished: list[bool] = field(default_factory=list)  # (G,) whether its writer says it ended
    key: tuple | None = None  # of a group that a peer wrote: (round, stage, node_id, index)

    @property
    def is_informative(self) -> bool:
        """Whether the group gives a gradient: its rewards differ ("non-zero variance")."""
        return rewards_differ(self.rewards)


def rewards_differ(rewards: list[float]) -> bool:
    """[1, 1] -> False, [0, 1] -> True."""
    return max(rewards) - min(rewards) > 1e-6


# -------- Advantages and loss ---------------------------------------------------------------------

ADVANTAGE_EPSILON = 1e-4  # keeps advantages bounded where rewards hardly differ (as in TRL)


def group_advantages(rewards: list[float]) -> list[float]:
    """A_i = (r_i - mean) / (std + 1e-4) within one group; zeros if all rewards are equal.

    The standard deviation has Bessel's correction (DeepSeekMath, section 4.1.2; TRL does the same).
    [1, 0, 0, 1] -> [0.866, -0.866, -0.866, 0.866]
    """
    if not rewards_differ(rewards):
        return [0.0] * len(rewards)
    r = torch.tensor(rewards, dtype=torch.float64)  # (G,)
    # EXERCISE (Dr. GRPO, arXiv:2503.20783): drop the division by the standard deviation.
    return ((r - r.mean()) / (r.std(unbiased=True) + ADVANTAGE_EPSILON)).tolist()


def loss_weights(lengths: torch.Tensor, loss_type: str, max_new_tokens: int) -> torch.Tensor:
    """Per-token loss weight of each completion of an update. lengths: (B,) tokens -> (B,).

    The weights are normalised once, over the whole update. Micro-batches only add up their parts,
    so the way in which the update is split does not change the gradient.
    """
    lengths = lengths.to(torch.float64)
    divisors = {
        "dapo": lengths.sum(),  # a mean over all tokens
        "grpo": len(lengths) * lengths,  # over completions, of each one's mean over its tokens
        "dr_grpo": len(lengths) * max_new_tokens,  # the longest length in place of each one's
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

MAX_GRAD_NORM = 1.0  # EXERCISE: make the gradient clip a variable


@dataclass
class Row:
    """A completion that an update trains on."""

    group: Group
    completion: list[int]
    advantage: float
    weight: float
    old_logprobs: torch.Tensor | None = None  # of its tokens; known from the first pass on


def update_policy(model, optimizer, groups: list[Group], config, codec, limit):
    """One GRPO update on own and external groups alike: NUM_ITERATIONS optimizer steps on the same
    rows. Returns the rows and, of each step, (loss, number of clipped tokens, gradient's norm)."""
    rows = make_rows(groups, config)
    steps = []
    if not rows:  # even with a zero gradient Adam's momentum would move the weights
        return rows, steps

    model.eval()  # dropout off: log-probabilities of one policy must not depend on chance
    for _ in range(config.NUM_ITERATIONS):
        is_first_step = not steps
        loss, num_clipped = limit.run(  # anew, in smaller batches, if memory runs out
            accumulate_gradients, model, optimizer, rows, config, codec, limit, is_first_step
        )
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if not torch.isfinite(grad_norm):  # a step on it would destroy the weights for good
            break
        optimizer.step()
        steps.append((loss, num_clipped, grad_norm.item()))
    optimizer.zero_grad()
    return rows, steps


def make_rows(groups: list[Group], config) -> list[Row]:
    """The completions of informative groups. The weights are made for all, so the tokens of the
    others count in the denominator of the loss; then these are dropped: they give no gradient."""
    lengths = torch.tensor([len(ids) for group in groups for ids in group.completions])  # (B,)
    weights = iter(loss_weights(lengths, config.LOSS_TYPE, config.MAX_NEW_TOKENS).tolist())
    rows = []
    for group in groups:
        # EXERCISE (DAPO, section 3.4): no gradient for completions that were cut off.
        advantages = group_advantages(group.rewards)
        for ids, advantage in zip(group.completions, advantages, strict=True):
            rows.append(Row(group, ids, advantage, next(weights)))
    return [row for row in rows if row.group.is_informative]


def accumulate_gradients(model, optimizer, rows, config, codec, limit, is_first_step: bool):
    """Add up all rows' gradients in micro-batches. Returns [loss, number of clipped tokens]."""
    optimizer.zero_grad()
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in limit.split(by_length(rows)):  # B rows of similar length
        prompts = [row.group.prompt for row in batch]
        completions = [row.completion for row in batch]
        with autocast(config.DTYPE, model):
            logprobs, mask = completion_logprobs(
                model, prompts, completions, config.TEMPERATURE, codec.pad_id
            )  # (B, T)

        # The policy has not moved yet: these are the old log-probabilities of all steps.
        if is_first_step:
            for row, values in zip(batch, logprobs.detach(), strict=True):
                row.old_logprobs = values[: len(row.completion)]
        old_logprobs = pad_sequence([row.old_logprobs for row in batch], batch_first=True)
        advantages = logprobs.new_tensor([row.advantage for row in batch])
        weights = logprobs.new_tensor([row.weight for row in batch])
        loss, num_clipped = grpo_loss(
            logprobs, old_logprobs, advantages, mask, weights, config.CLIP_LOW, config.CLIP_HIGH
        )
        loss.backward()
        totals += torch.stack([loss, num_clipped]).detach().cpu()
    return totals.tolist()


# -------- Log-probabilities -----------------------------------------------------------------------


def completion_logprobs(model, prompts, completions, temperature: float = 1.0, pad_id: int = 0):
    """Log-probability of each token of B completions, and their mask, both (B, T).

    The prompt of a group passes through the model once in a batch. Its completions continue from
    the KV cache, with gradient.
    """
    distinct, rows_per_prompt = distinct_prompts(prompts, model.device)  # N prompts, (N,)
    last, cache, prompt_mask = prefill(model, distinct, rows_per_prompt, pad_id)

    # The last hidden state of a prompt predicts the first token, that of token i the next one.
    targets, mask = pad(completions, pad_id, model.device)  # (B, T)
    hidden = last.unsqueeze(1)  # (B, 1, H)
    if targets.shape[1] > 1:
        inputs = targets[:, :-1]  # (B, T-1)
        seen = F.pad(prompt_mask, (0, inputs.shape[1]), value=1)  # (B, P+T-1), may be attended to
        rest, _ = forward_hidden(model, inputs, seen, cache)  # (B, T-1, H)
        hidden = torch.cat([hidden, rest], dim=1)  # (B, T, H)

    # Only real tokens are scored; masked_scatter puts the values back in their places.
    scored = token_logprobs_in_chunks(model, hidden[mask], targets[mask], temperature)  # (S,)
    return scored.new_zeros(mask.shape).masked_scatter(mask, scored), mask


def token_logprobs(model, hidden, targets, temperature: float):
    """log p(target) at the temperature of sampling. hidden: (S, H), targets: (S,) -> (S,)."""
    logits = scaled_logits(model, hidden, temperature)  # (S, V)
    return -F.cross_entropy(logits, targets, reduction="none")


def prefill(model, prompts: list[list[int]], rows_per_prompt, pad_id: int):
    """Run N prompts through the model, and repeat the results for B rows. Returns the last hidden
    states (B, H), the KV cache and the mask (B, P). rows_per_prompt: one number, or one per prompt.
    """
    # Padded on the left, so that nothing stands between a prompt and its completion.
    ids, mask = pad(prompts, pad_id, model.device, "left")  # (N, P)
    hidden, cache, mask = forward_prompts(model, ids, mask)  # (N, up to P, H)

    cache.batch_repeat_interleave(rows_per_prompt)
    mask = mask.repeat_interleave(rows_per_prompt, 0)
    return hidden[:, -1].repeat_interleave(rows_per_prompt, 0), cache, mask


# -------- Sampling --------------------------------------------------------------------------------


@torch.no_grad()
def generate(model, codec, prompts: list[list[int]], num_generations: int, config, seed, limit):
    """Sample G completions for each of N prompts. Returns N lists of G lists of token ids."""
    # A column of random numbers for each row, so that no row's draw depends on the others; drawn on
    # the CPU, so that every device gets the same ones.
    num_rows = len(prompts) * num_generations
    rng = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(config.MAX_NEW_TOKENS, num_rows, generator=rng).to(model.device)  # (T, B)
    model.eval()  # dropout off
    done = []  # completions

    def sample_rest() -> None:  # runs again if memory ran out: `done` says where to go on
        rest = prompts[len(done) // num_generations :]
        for batch in limit.split(rest, num_generations):  # whole prompts, G rows of each
            columns = uniforms[:, len(done) : len(done) + len(batch) * num_generations]
            with autocast(config.DTYPE, model):
                done.extend(sample_completions(model, codec, batch, columns, config.TEMPERATURE))

    limit.run(sample_rest)
    return [done[i : i + num_generations] for i in range(0, num_rows, num_generations)]


def sample_completions(model, codec, prompts, uniforms, temperature: float) -> list[list[int]]:
    """Sample G completions of each prompt, token by token. One ends with an EOS id, which is kept,
    or after T tokens; after solved examples in the prompt also with </answer>."""
    max_tokens, num_rows = uniforms.shape  # T, B
    hidden, cache, mask = prefill(model, prompts, num_rows // len(prompts), codec.pad_id)
    tokens = torch.full((num_rows, max_tokens), -1, device=model.device)  # -1: none
    active = torch.arange(num_rows, device=model.device)  # the rows that are not finished

    for i in range(max_tokens):
        logits = scaled_logits(model, hidden, temperature)  # (active, V)
        token = sample_tokens(logits, uniforms[i, active])  # (active,)
        tokens[active, i] = token
        goes_on = ~codec.ended(tokens[active, : i + 1])
        num_left = int(goes_on.sum())
        if num_left == 0 or i == max_tokens - 1:
            break

        if num_left < len(active):  # finished rows leave the batch and its cache
            mask, active, token = drop_finished(cache, goes_on, mask, active, token)
        mask = F.pad(mask, (0, 1), value=1)
        hidden, cache = forward_hidden(model, token.unsqueeze(1), mask, cache)
        hidden = hidden[:, -1]

    return [[token for token in row if token >= 0] for row in tokens.tolist()]


def sample_tokens(logits, uniforms):
    """Draw one token per row by inverting the cumulative distribution: the first token id whose
    cumulative probability exceeds the row's random number. logits: (B, V), uniforms: (B,).

    The full softmax, without top-k or top-p, because the loss scores the same distribution.
    """
    cumulative = torch.softmax(logits, dim=-1).cumsum(-1)  # (B, V)
    # Scaled by the last entry, which is 1 but for rounding: no target lies beyond the vocabulary.
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(1)  # (B,)
    return token.clamp(max=logits.shape[1] - 1)  # in case the product is rounded up


# -------- What is asked, and what is rewarded -----------------------------------------------------
# reasoning-gym makes a question from (task, seed). A model with a chat template reads a system
# prompt that asks for <answer>…</answer>, and then the question. Another model reads some solved
# examples, "2 + 2?\n<answer>4</answer>\n\n" (tiny reads none), and then the question.


def compute_reward(question: "Question", text: str, kind: str = "exact") -> float:
    """Reward in [0, 1] of a completion, by reasoning-gym's verifier.

    exact: 1 if the verifier's score is at least 0.99, else 0. Verifiers give even garbage a small
    score, and dividing by the std would make full-size advantages of it. verifier: the raw score.
    """
    # EXERCISE: a reward of your own, any number in 0 to 1. The text may be a stranger's: never
    # evaluate it, and let nothing in it raise an error or take long.
    answer = extract_tagged_answer(text)
    score = 0.0 if answer is None else safe_score(question, answer)
    return score if kind == "verifier" else float(score >= 0.99)


def extract_tagged_answer(text: str) -> str | None:
    """The text between the last </answer> and the last <answer> before it, None without both."""
    text = text[-MAX_SCORED_CHARS:]
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end].strip()


# ==== The heart ends here. Below: speed, memory, tasks, the tokenizer and models, warm start ======

transformers.utils.logging.set_verbosity_error()  # it warns of padding that is handled here
if not sys.stderr.isatty():  # bars of downloads are for a terminal
    transformers.utils.logging.disable_progress_bar()


# -------- Through the model -----------------------------------------------------------------------


def forward_hidden(model, ids, mask=None, cache=None):
    """Run `ids` (rows, length) through the model, after what the KV cache already holds. Returns
    the last hidden states (rows, length, H) and the cache, which now contains `ids`.

    mask: (rows, cached + length), 0 for padding on the left. None: no such padding, no cache.
    """
    cache = KVCache(config=model.config) if cache is None else cache
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # they count real tokens only
    output = model.base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions[:, cache.get_seq_length() :],
        use_cache=True,
        **{CACHE_ARGUMENT: cache},
    )
    return output.last_hidden_state, cache


def scaled_logits(model, hidden, temperature: float):
    """(..., H) -> logits / temperature (..., V), at least in float32.

    Casting bfloat16 logits to float32 before the softmax reduces the mean error of a
    log-probability from 0.025 to 0.004.
    """
    logits = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma 2
    logits = cap * torch.tanh(logits / cap) if cap else logits
    return logits if temperature == 1 else logits / temperature  # dividing by 1 would copy them


def pad(rows: list[list[int]], pad_id: int, device, side: str = "right"):
    """[[7], [8, 9]] -> ids [[7, pad_id], [8, 9]] and mask [[True, False], [True, True]]."""
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    ids = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side=side)
    mask = pad_sequence(mask, batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)


# -------- An update in numbers --------------------------------------------------------------------


def update_numbers(rows: list[Row], steps: list[tuple], config) -> dict:
    """An update in numbers, from what `update_policy` returns.

    loss            of the first optimizer step
    clip_fraction   share of tokens whose ratio was clipped, a mean over the steps
    grad_norm       of the last step, before the gradient is clipped
    trained_tokens  of the completions that were trained on
    logprobs        mean log-probability per token of each of these completions
    """
    lengths = torch.tensor([len(row.completion) for row in rows])  # (K,)
    num_tokens = int(lengths.sum())
    logprobs = []
    if rows:
        old_logprobs = pad_sequence([row.old_logprobs for row in rows], batch_first=True)  # (K, T)
        logprobs = (old_logprobs.sum(1).cpu() / lengths).tolist()
    return {
        "loss": steps[0][0] if steps else 0.0,
        "clip_fraction": sum((n / (num_tokens * config.NUM_ITERATIONS) for _, n, _ in steps), 0.0),
        "grad_norm": steps[-1][2] if steps else 0.0,
        "trained_tokens": num_tokens,
        "logprobs": logprobs,
    }


# ==================================================================================================
# Speed only: the same numbers, faster
# ==================================================================================================

MIN_SHARED_PREFIX = 16  # tokens; a shorter common beginning is not worth a forward pass of its own
MAX_LOGIT_ELEMENTS = 2**27  # logits (tokens x vocabulary) computed at once: 512 MiB in float32
CACHE_ARGUMENT = "past_key_values"  # the name of the KV cache in a model's forward
if hasattr(transformers.modeling_outputs.BaseModelOutputWithPast, "cache"):
    CACHE_ARGUMENT = "cache"  # since transformers 5.24


def plain_logprobs(model, prompts, completions, temperature: float = 1.0, pad_id: int = 0):
    """What `completion_logprobs` computes, each completion in a row with its own prompt. For the
    warm start, whose prompts differ.

    Padding is only on the right, so no scored token follows a padding token, and the model needs no
    attention mask.
    """
    # What is the next token at each position? -1 means that it is not scored.
    # prompt [5, 6], completion [7, 8]: row [5, 6, 7, 8], targets [-1, 7, 8, -1]
    pairs = list(zip(prompts, completions, strict=True))
    ids, _ = pad([prompt + ids for prompt, ids in pairs], pad_id, model.device)  # (B, P+T)
    targets = [[-1] * (len(prompt) - 1) + ids + [-1] for prompt, ids in pairs]
    targets, _ = pad(targets, -1, model.device)  # (B, P+T)
    _, mask = pad(completions, pad_id, model.device)  # (B, T)

    # Score only the positions that predict a token of a completion.
    hidden, _ = forward_hidden(model, ids)  # (B, P+T, H)
    is_scored = targets >= 0
    scored = token_logprobs(model, hidden[is_scored], targets[is_scored], temperature)
    return torch.zeros(mask.shape, device=model.device).masked_scatter(mask, scored), mask


def distinct_prompts(prompts: list[list[int]], device):
    """Prompts of which neighbours are one and the same list, each once, and how often it stands
    there: (N,)."""
    same = [list(rows) for _, rows in itertools.groupby(prompts, key=id)]
    return [rows[0] for rows in same], torch.tensor([len(rows) for rows in same], device=device)


def drop_finished(cache, goes_on, *columns):
    """Finished rows leave the batch: its KV cache, and these tensors of a row each."""
    cache.batch_select_indices(goes_on)
    return [column[goes_on] for column in columns]


def by_length(rows: list[Row]) -> list[Row]:
    """Rows of similar length stand together, and those of a group, so that little is padded and a
    prompt is computed once."""
    return sorted(
        rows, key=lambda row: len(row.group.prompt) + max(map(len, row.group.completions))
    )


def forward_prompts(model, ids, mask):
    """`forward_hidden` of prompts that are padded on the left. What all of them begin with, such as
    a chat model's system prompt, passes through the model once.

    ids, mask: (N, P). Returns the hidden states of the rest, the cache, and its mask (N, P), where
    the padding stands behind that beginning.
    """
    mask = mask.long()
    prompts = [row[seen > 0] for row, seen in zip(ids, mask, strict=True)]
    # The last token of a prompt is never part of it, because its hidden state is wanted.
    shared = len(os.path.commonprefix([prompt[:-1].tolist() for prompt in prompts]))
    if len(prompts) == 1 or shared < MIN_SHARED_PREFIX or needs_unpadded_prompts(model.config):
        return *forward_hidden(model, ids, mask), mask

    _, cache = forward_hidden(model, prompts[0][:shared].unsqueeze(0))
    cache.batch_repeat_interleave(len(prompts))
    rest = [prompt[shared:] for prompt in prompts]
    ids = pad_sequence(rest, True, padding_value=int(ids[0, 0]), padding_side="left")  # any token
    mask = F.pad(mask[:, : ids.shape[1]], (shared, 0), value=1)
    return *forward_hidden(model, ids, mask, cache), mask


def needs_unpadded_prompts(config) -> bool:
    """True if padding shifts relative positions (sliding windows, MPT's ALiBi). Then nothing may be
    padded between a shared prefix and the rest of a prompt, so no prefix is shared."""
    is_sliding = transformers.DynamicCache(config=config).is_sliding
    return any(is_sliding) or config.model_type in ("gpt_neo", "mpt")


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


# -------- Memory ----------------------------------------------------------------------------------

# CUDA raises an exception of its own; MPS and the CPU's allocator only say it in the message.
OUT_OF_MEMORY = (
    "out of memory|can't allocate memory|not enough memory|Invalid buffer|bad_alloc|ALLOC_FAILED"
)


@dataclass
class RowLimit:
    """How many rows fit into memory at once. It is lowered when memory runs out."""

    rows: int
    where: str  # what needs the memory, for people
    notify: object = print  # a function of a text
    tried: int = 0  # rows at once, in the last `split`
    smallest: int = 1  # no fewer can be tried

    def run(self, work, *args):
        """work(*args), which calls `split`; again with smaller batches if memory runs out."""
        while True:
            try:
                return work(*args)
            except RuntimeError as error:
                self.halve(error)

    def halve(self, error: RuntimeError) -> None:
        """Half as many rows, because `error` says that memory ran out with so many.

        Any other error is raised again. Raises ModelError if `smallest` rows were too many.
        """
        is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not is_out_of_memory and not re.search(OUT_OF_MEMORY, str(error)):
            raise error
        if self.tried <= self.smallest:
            advice = "lower LOCAL_NODES or MAX_NEW_TOKENS, or take a smaller model (MODEL_NAME)"
            raise ModelError(f"out of memory in {self.where}: {advice}") from error
        self.rows = max(self.smallest, (self.tried + 1) // 2)
        again = f"again with {self.rows} completions at once"
        self.notify(f"out of memory in {self.where}: {again}")

    def split(self, items: list, rows_each: int = 1) -> list[list]:
        """The items in batches of nearly equal size, each of which fits into memory."""
        self.tried = min(self.rows, len(items) * rows_each)
        self.smallest = rows_each
        num_batches = math.ceil(len(items) / max(1, self.rows // rows_each))
        size = math.ceil(len(items) / max(1, num_batches))
        return [items[i : i + size] for i in range(0, len(items), max(1, size))]


def autocast(dtype: str, model):
    """A context that computes in `dtype`, "float32" or "bfloat16".

    The weights stay float32, because small steps of the optimizer are lost in a bfloat16 weight.
    """
    return torch.autocast(model.device.type, getattr(torch, dtype), enabled=dtype != "float32")


def estimate_micro_batch_size(model, config, available: int) -> int:
    """Completions per forward pass of the update, roughly. If it is too many, memory runs out once
    and the batch is halved.

    config: MICRO_BATCH_SIZE, MAX_NEW_TOKENS, NUM_GENERATIONS, NUM_WORKERS and DEVICE; available:
    bytes. Assumes 150 bytes of activations per token, layer and hidden unit, in a quarter of the
    memory. On a CPU it is an eighth of the machine's memory, 3 GB at most. The memory that happens
    to be free has no influence there, because then a run would not repeat bit for bit.
    """
    if config.MICRO_BATCH_SIZE != "auto":
        return int(config.MICRO_BATCH_SIZE)

    text_config = model.config.get_text_config()
    bytes_per_token = text_config.num_hidden_layers * text_config.hidden_size * 150
    budget = available // 4
    smallest = 1
    if config.DEVICE == "cpu":
        budget = min(3e9, available_memory("cpu") / 8 / max(1, config.NUM_WORKERS))
        smallest = config.NUM_GENERATIONS
    rows = int(budget / (config.MAX_NEW_TOKENS * bytes_per_token))
    return max(smallest, min(1024, rows))


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


def device_name(device: str) -> str:
    """The device, a GPU with the name of its model."""
    is_gpu = device.startswith("cuda")
    return f"{device}, {torch.cuda.get_device_name(device)}" if is_gpu else device


def available_memory(device: str) -> int:
    """Bytes that are free now on a GPU, or those of main memory in all."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # a container has less
        with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{limit}") as file:
            total = min(total, int(file.read()))
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
PAPER_TASKS = tuple(TASK_TABLE)[:9]
TINY_TASKS = tuple(TASK_TABLE)[9:17]
HELD_OUT_SEEDS = range(2**52, 2**53)  # training seeds are smaller; JSON is exact up to 2**53
VERSIONS = {name: version(name) for name in ("torch", "transformers", "reasoning-gym")}
REASONING_GYM_VERSION = VERSIONS["reasoning-gym"]  # its own __version__ names an older one
MAX_SCORED_CHARS = 4096  # only the end of a completion is searched for an answer
MAX_FORMULA_CHARS = 160  # all premises of a question joined by "and" take 88
MAX_FORMULA_SIGNS = 40  # and 30 operators and brackets


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
        return question_from_file(task, seed)
    name, settings = TASK_TABLE[task]
    try:
        with decimal.localcontext():  # decimal_arithmetic changes the precision of the process
            dataset = reasoning_gym.create_dataset(name, seed=seed, size=1, **settings)
            entry = dataset[0]
    except Exception as error:  # a generator of reasoning-gym may raise anything
        raise QuestionError(f"{task} has no question at seed {seed}: {error!r}") from error

    answer = entry["answer"]
    if answer is None:  # propositional_logic has many right answers
        answer = entry["metadata"]["example_answer"]
    return Question(task, seed, entry["question"], answer, dataset, entry)


# Questions of one's own, TASKS=file:mine.jsonl: the name of a task -> (questions to train on,
# held-out questions), each a list of (text, answer).
FILE_TASKS = {}


def load_task_file(path: str) -> str:
    """Read questions from lines of {"question": …, "answer": …}; a tenth of them is held out.

    Returns the name of the task, "file:mine.jsonl#1f3b5d7a", the same for equal contents. Raises
    ValueError that names the lines that cannot be used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a byte-order mark is no mistake
    except (OSError, ValueError) as error:
        raise ValueError(f"file:{path} cannot be read: {error}") from error

    rows = {}
    mistakes = []
    for number, line in enumerate(text.split("\n"), start=1):  # in JSON no other sign ends a line
        try:
            question, answer = parse_question(line) if line.strip() else ("", "")
            if rows.setdefault(question, answer) != answer:
                raise ValueError("a second answer to one question")
        except ValueError as error:
            mistakes.append(f"line {number}: {error}")
    rows.pop("", None)
    if len(rows) < 2:
        mistakes.append("expected at least two questions")
    if mistakes:
        raise ValueError(f"file:{path}: " + "; ".join(mistakes[:5]))

    # A hash decides which questions are held out, so that it does not depend on the file's order.
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    by_hash = sorted(rows.items(), key=lambda row: hashlib.sha256(row[0].encode()).digest())
    num_held_out = max(1, len(rows) // 10)
    name = f"file:{re.sub('[ ,]', '_', os.path.basename(path))}#{digest[:8]}"
    FILE_TASKS[name] = (by_hash[num_held_out:], by_hash[:num_held_out])
    return name


def parse_question(line: str) -> tuple[str, str]:
    """A line of a file of questions -> (question, answer). Raises ValueError that says what is
    wrong with it."""
    try:
        row = json.loads(line)
        question, answer = row["question"], row["answer"]
    except (ValueError, RecursionError) as error:
        raise ValueError("this is no JSON") from error
    except (TypeError, LookupError):
        question = answer = None
    if not {type(question), type(answer)} <= {str, int, float}:
        raise ValueError("expected a question and an answer, texts or numbers")
    question, answer = str(question), str(answer)
    if not question.strip() or not answer.strip():
        raise ValueError("an empty question or answer")
    if extract_tagged_answer(f"<answer>{answer}</answer>") != answer.strip():
        raise ValueError(f"an answer with tags, or of over {MAX_SCORED_CHARS - 17} characters")
    return question, answer


def question_from_file(task: str, seed: int) -> Question:
    """The question that this seed chooses from a file."""
    training, held_out = FILE_TASKS[task]
    # The seed has chosen the task, too: the same stream would reach a part of the lines only.
    rng = random.Random(f"line {seed}")
    text, answer = rng.choice(held_out if seed in HELD_OUT_SEEDS else training)
    return Question(task, seed, text, answer, None, {"metadata": {"source_dataset": "file"}})


def task_name(task: str, may_read_files: bool) -> str:
    """A task of TASKS -> its name. Raises ValueError if it is refused. A file is read only if the
    user has named it, never because config.json says so."""
    if task in TASK_TABLE or task in FILE_TASKS:
        return task
    if task.startswith("file:") and may_read_files:
        return load_task_file(os.path.expanduser(task.removeprefix("file:")))
    if may_read_files and os.path.isfile(task):
        raise ValueError(f"{task} is a file: set TASKS=file:{task}")
    raise ValueError(why_refused(task))


def first_valid_question(task: str, seed: int, is_good=lambda question: True) -> Question:
    """The first good question that exists among seed, seed + 1, …, seed + 50. For own questions
    only: a peer's seed must be right."""
    for candidate in range(seed, seed + 51):
        with contextlib.suppress(QuestionError):
            if is_good(question := make_question(task, candidate)):
                return question
    reason = "can be made, fits the model, and has an answer that its verifier takes"
    raise QuestionError(f"{task}: no question from seed {seed} on {reason}")


def first_solved_question(task: str, seed: int, is_good=lambda question: True) -> Question:
    """The first good question from this seed on whose own answer its verifier takes.

    The example answers of propositional_logic fail once in a hundred times. As solved examples they
    would teach what is not rewarded.
    """
    return first_valid_question(task, seed, lambda q: is_right(q, q.answer) and is_good(q))


def patch_reasoning_gym() -> None:
    """Bound the search for divisors of basic_arithmetic, and keep bf from printing dots.

    reasoning-gym tries every number up to the root of the gcd, at some seeds for minutes. The bound
    is on the work, not on the time, so it is the same on every machine: a million tries, 0.1 s.
    """
    search = basic_arithmetic.find_common_divisors

    def bounded_search(a: int, b: int) -> list[int]:
        if math.gcd(a, b) > 10**12:
            raise QuestionError("its search for divisors is too long")
        return search(a, b)

    basic_arithmetic.find_common_divisors = bounded_search
    bf_optimizer.print = lambda *_, **__: None


patch_reasoning_gym()


def group_rewards(question: Question, texts: list[str], kind: str = "exact") -> list[float]:
    """Rewards of a group's completions. Equal texts are scored once, which bounds the work."""
    scores = {text: float(compute_reward(question, text, kind)) for text in set(texts)}
    for score in scores.values():
        if not 0 <= score <= 1:
            raise ValueError(f"compute_reward has returned {score}: expected a number from 0 to 1")
    return [scores[text] for text in texts]


def is_right(question: Question, answer: str) -> bool:
    """Whether the task's verifier takes this answer, without tags, as right."""
    return safe_score(question, answer) >= 0.99


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
        return float(answer.split() == question.answer.split())
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
    num_signs = sum(char in "∧∨¬→↔(" for char in answer)
    if len(answer) > MAX_FORMULA_CHARS or num_signs > MAX_FORMULA_SIGNS:
        return False
    try:
        used = question.dataset._collect_variables([Expression.from_string(answer)])
    except Exception:  # reasoning-gym's parser may raise anything on a stranger's text
        return False
    return used <= set(question.entry["metadata"]["variables"])


def why_refused(task: str) -> str:
    """The sentence that refuses a task outside TASK_TABLE.

    Verifiers of other tasks evaluate the answer, or their questions differ from process to process.
    """
    if task.startswith("file:"):
        return f"{task!r:.80} is not here: set TASKS to file:<path of your copy of this file>"
    closest = difflib.get_close_matches(task, TASK_TABLE, n=1)
    suggestion = f"did you mean {closest[0]}? " if closest else ""
    reason = "unknown, or not checked against hostile answers"
    return f"{task!r:.80} is refused: {reason}; {suggestion}allowed: {', '.join(TASK_TABLE)}"


def task_hash() -> str:
    """Hash of the table of tasks. Nodes with different tables cannot verify each other."""
    return hashlib.sha256(json.dumps(TASK_TABLE, sort_keys=True).encode()).hexdigest()[:16]


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


class ModelError(ValueError):
    """A model that cannot be loaded or used. The text says why, for the user."""


@dataclass
class Codec:
    """A tokenizer with the conventions of its model: how a prompt looks, which ids end a
    completion, and how much fits."""

    tokenizer: object
    eos_ids: set[int]
    eos_id: int  # the one that ends this model's turn; appended to a peer's finished completion
    num_shots: int
    positions: int  # the longest text that the model can read, in tokens
    max_prompt: int  # tokens; MAX_NEW_TOKENS positions are left for the completion
    max_completion: int  # tokens of a peer's completion, whose tokenizer may be another one
    vocabulary: int  # the model's number of ids; a tokenizer may know more
    dtype: torch.dtype  # of the model's files; the final model is written in it, too

    @property
    def few_shot(self) -> bool:
        """Whether prompts hold solved examples: the model has no chat template."""
        return self.num_shots > 0 and not self.tokenizer.chat_template

    def encode_prompt(self, question: Question) -> list[int]:
        """The prompt of a question: the model's chat template, or else plain text after `num_shots`
        solved examples. Raises QuestionError if the question does not fit: none is ever cut."""
        if self.tokenizer.chat_template:
            examples = []
            ids = self.chat(question.text)
        else:
            examples = self.solved_examples(question)
            ids = self.plain_prompt(examples, question)

        # Drop whole examples until the prompt fits.
        while len(ids) > self.max_prompt and examples:
            examples.pop(0)
            ids = self.plain_prompt(examples, question)
        if len(ids) > self.max_prompt:
            text = f"a prompt of {len(ids)} tokens, of which {self.max_prompt} fit"
            raise QuestionError(f"{question.task} has at seed {question.seed} {text}")
        return ids

    def fits(self, question: Question) -> bool:
        """Whether a prompt can hold this question."""
        with contextlib.suppress(QuestionError):
            return bool(self.encode_prompt(question))
        return False

    def solved_examples(self, question: Question) -> list[str]:
        """Solved questions of the same task, from the seeds that follow: never the question itself,
        and none twice, so that a small file may give fewer than `num_shots`."""
        examples = {question.text: ""}
        for i in range(1, 50):
            if len(examples) <= self.num_shots:
                seed = (question.seed + i) % HELD_OUT_SEEDS.start
                solved = first_solved_question(question.task, seed)
                text = f"{solved.text}\n<answer>{solved.answer}</answer>\n\n"
                examples.setdefault(solved.text, text)
        return list(examples.values())[1:]

    def plain_prompt(self, examples: list[str], question: Question) -> list[int]:
        """Examples and question as ids. The tokenizer may put a BOS before the text, without which
        models such as Llama know no text."""
        return self.tokenizer("".join(examples) + question.text + "\n").input_ids

    def chat(self, text: str) -> list[int]:
        """System prompt and question in the model's template, in one turn if it has no system
        role."""
        system = SYSTEM_PROMPTS["default"]
        turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        if not self.has_system_role:
            turns = [{"role": "user", "content": system + "\n" + text}]
        # EXERCISE: let a model that can think do so. It needs far more than 256 tokens.
        return self.tokenizer.apply_chat_template(
            turns,
            chat_template=DATE_MACRO + self.tokenizer.get_chat_template(),
            add_generation_prompt=True,
            return_dict=False,
            date_string=PROMPT_DATE,
            enable_thinking=False,
        )

    @functools.cached_property
    def has_system_role(self) -> bool:
        """Whether the chat template knows the system role. Some templates raise, some drop it
        silently."""
        turns = [{"role": role, "content": f"as {role}"} for role in ("system", "user")]
        try:
            return "as system" in self.tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # a template may raise anything
            return False

    def encode(self, text: str | list[str]) -> list:
        """Text -> ids, or texts -> lists of ids. "<|im_end|>" in a peer's text stays plain text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def encode_completions(self, texts: list[str], finished: list[bool]) -> list[list[int]]:
        """Peers' completions as this model would have sampled them.

        A finished one gets this model's EOS, unless its answer tag already ends it (see
        `ends_with_answer`).
        """
        rows = self.encode(texts)
        for ids, text, is_finished in zip(rows, texts, finished, strict=True):
            if is_finished and not (self.few_shot and "</answer>" in text):
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
        ended = torch.isin(tokens[:, -1], torch.tensor([*self.eos_ids], device=tokens.device))
        if self.few_shot:
            answered = [self.ends_with_answer(ids) for ids in tokens.tolist()]
            ended |= torch.tensor(answered, device=tokens.device)
        return ended

    def is_finished(self, ids: list[int]) -> bool:
        """Whether the model ended a completion itself."""
        return ids[-1] in self.eos_ids or self.ends_with_answer(ids)

    def ends_with_answer(self, ids: list[int]) -> bool:
        """Whether a completion ends here without an EOS. After solved examples a base model would
        go on with more of them."""
        return self.few_shot and "</answer>" in self.decode(ids[-9:])  # a token is at least a byte

    @functools.cached_property
    def longest_token(self) -> int:
        """The most characters that a token stands for: SmolLM2 has one of 81 spaces."""
        return max(map(len, self.tokenizer.get_vocab()))

    @functools.cached_property
    def pad_id(self) -> int:
        """Any real token. The embedding of a padding token may be zero."""
        return self.encode("1")[0]


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
        rehearse(model, codec, config, tasks)
    except Exception as error:
        # A mistake in this file is raised as it is, an error in the model's own code is explained.
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        is_own = innermost == load_model.__code__.co_filename  # also of a ModelError
        if config.MODEL_NAME == "tiny" or is_own:
            raise
        raise model_error(config, f"{type(error).__name__}: {error}") from error
    return model, codec


def rehearse(model, codec: Codec, config, tasks) -> None:
    """Do once what training does. Raises ModelError if a model or tokenizer would silently be
    trained wrongly.

    Five questions of each task must be whole in their prompts, and their right answers, encoded as
    a peer's are, must come back as right ones. With shared prompts, log-probabilities must be those
    of the model's own plain forward pass.
    """
    for task in tasks:
        for seed in range(5):
            question = first_valid_question(task, seed)
            verifier_score(question, question.answer)  # a mistake in one of one's own raises here,
            first_solved_question(task, seed)  # or here, if it takes no answer
            try:
                question = first_solved_question(task, seed, codec.fits)
            except QuestionError as error:
                advice = "lower MAX_NEW_TOKENS or leave the task out of TASKS"
                raise model_error(config, f"{error}: {advice}") from error
            prompt = codec.encode_prompt(question)
            right = f"<answer>{question.answer}</answer>"
            answers = codec.encode_completions([right, f"It is {right}"], [True, True])
            # As the model itself would write it, if the tags are tokens of their own.
            answers.append(codec.tokenizer(right, add_special_tokens=False).input_ids)
            check_tokens(codec, config, question, prompt, answers)

    # Pieces of this prompt, of unequal lengths: two with a common beginning, two without.
    ids = (prompt * 30)[:30]
    beginning = ids[: MIN_SHARED_PREFIX + 2]
    for prompts in ([beginning, beginning + ids[-5:]], [ids[:5], ids[4:18]]):
        check_logprobs(model, codec, config, prompts, [ids[20:24], ids[3:4], ids[24:30]])


def check_logprobs(model, codec: Codec, config, prompts, answers) -> None:
    """Raise ModelError unless log-probabilities with shared prompts are those of the model's own
    plain forward pass.

    They are not where a cache cannot be repeated (state-space models), where positions are ignored
    (BART), and where logits are more than `scaled_logits`.
    """
    # The plain way: every row on its own, without padding or a cache.
    rows = list(itertools.product(prompts, answers))
    theirs = []
    for prompt, answer in rows:
        row = torch.tensor([prompt + answer], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits.float()
        losses = F.cross_entropy(logits[0, :-1], row[0, 1:], reduction="none")
        theirs.append(-losses[-len(answer) :])

    row_prompts, row_answers = zip(*rows, strict=True)
    ours, mask = completion_logprobs(model, row_prompts, row_answers, pad_id=codec.pad_id)
    error = (ours.detach()[mask] - torch.cat(theirs)).abs().max().item()
    if not error < 2e-3:
        reason = f"log-probabilities differ by {error:.2g} from a plain forward pass"
        raise model_error(config, reason)
    ours.sum().backward()  # must not raise
    model.zero_grad()


def check_tokens(codec: Codec, config, question: Question, prompt, answers) -> None:
    """Raise ModelError unless a question and its right answers survive the tokenizer."""
    # A prompt must hold the whole question, and the tokenizer must not end it.
    text = "".join(codec.tokenizer.decode(prompt).split())
    if "".join(question.text.split()) not in text:
        advice = "mend its chat template or tokenizer, one of which changes it"
        lost = f"a question of {question.task} is not whole in its prompt"
        raise model_error(config, f"{lost} of {len(prompt)} tokens: {advice}")
    if prompt[-1] in codec.eos_ids and not codec.tokenizer.chat_template:
        token = codec.tokenizer.convert_ids_to_tokens(prompt[-1])
        reason = f"the prompt ends with {token}, which ends the text before the answer"
        raise model_error(config, f"{reason}: set add_eos_token to false in its tokenizer")

    # Some tokenizers drop tokens of the answer or put words apart.
    for ids in answers:
        text = codec.decode(ids)
        answer = extract_tagged_answer(text)
        if answer is None or not is_right(question, answer):
            reason = f"its tokenizer gives back the right answer {question.answer!r:.40} as"
            raise model_error(config, f"{reason} {text!r:.60}")

    # An id beyond the embedding raises IndexError on a CPU and an opaque assertion on a GPU.
    highest = max(codec.tokenizer.vocab_size - 1, *map(max, [prompt, *answers]))
    if highest >= codec.vocabulary:
        reason = f"its tokenizer has token {highest}, the model {codec.vocabulary} in all"
        raise model_error(config, reason)


def load_pretrained(config):
    """Load model and tokenizer of MODEL_NAME from the Hugging Face Hub or a folder. Returns them
    and the type of the weights in the files.

    Raises ModelError with the reason if that fails.
    """
    name = config.MODEL_NAME
    if os.path.isfile(os.path.join(name, "adapter_config.json")):  # which would be ignored
        raise model_error(config, "it is an adapter (LoRA): merge it into its base model first")

    access = {"token": config.HUGGINGFACE_ACCESS_TOKEN or None, "trust_remote_code": False}
    try:
        stored = transformers.AutoConfig.from_pretrained(name, **access)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **access)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, **access
        )
    except Exception as error:  # files, network, tokenizer: a model's author may have done anything
        raise model_error(config, f"{type(error).__name__}: {error}") from error

    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)

    # Weights that are missing would be random, and different in each process.
    if info["missing_keys"]:
        raise model_error(config, f"its files lack {min(info['missing_keys'])}")
    if model.base_model is model:
        raise model_error(config, "it gives no hidden states")
    if not all(p.requires_grad and p.is_floating_point() for p in model.parameters()):
        advice = "take the model in full precision"
        raise model_error(config, f"its weights are quantized or frozen: {advice}")

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


def model_error(config, reason: str) -> ModelError:
    """The error that names MODEL_NAME, the first line of the reason, and what is expected."""
    reason = reason.splitlines()[0][:300]
    expected = "tiny, a Hugging Face id or a local folder of a decoder such as Qwen2.5 or GPT-2"
    return ModelError(
        f"MODEL_NAME={config.MODEL_NAME!r} cannot be used ({reason}): expected {expected}"
    )


def misfits(codec: Codec, config, tasks) -> list[str]:
    """What of one's own questions does not fit this model, a sentence for each file."""
    sentences = []
    for task in tasks:
        pairs = [pair for part in FILE_TASKS.get(task, ()) for pair in part]
        questions = [Question(task, 0, *pair, None, {}) for pair in pairs]
        long = [question.text for question in questions if not codec.fits(question)]
        if long:
            share = f"{len(long)} of {len(questions)}"
            sentences.append(f"{task}: {share} questions are too long, such as {long[0]!r:.60}")

        answers = codec.encode([f"<answer>{answer}</answer>" for _, answer in pairs] or [""])
        num_long = sum(len(ids) >= config.MAX_NEW_TOKENS for ids in answers)
        if num_long:
            limit = f"MAX_NEW_TOKENS={config.MAX_NEW_TOKENS}"
            sentences.append(f"{task}: {num_long} right answers are longer than {limit} tokens")
    return sentences


def make_codec(model, tokenizer, config, dtype: torch.dtype) -> Codec:
    """The conventions of a loaded model. Raises ModelError if it has no EOS or too few positions.

    config: MODEL_NAME, MAX_NEW_TOKENS, NUM_SHOTS.
    """
    # Every EOS id of the generation config ends a completion. So do the tokenizer's, and the token
    # that the chat template writes after an answer.
    eos = model.generation_config.eos_token_id
    eos_ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None, -1}
    end_of_turn = find_end_of_turn_id(tokenizer, eos_ids)
    if end_of_turn is not None:
        eos_ids.add(end_of_turn)
    elif eos_ids:
        usual = tokenizer.eos_token_id
        end_of_turn = usual if usual in eos_ids else min(eos_ids)
    else:
        raise model_error(config, "it has no EOS token, so that nothing would end an answer")

    text_config = model.config.get_text_config()
    positions = num_positions(text_config)
    if positions <= config.MAX_NEW_TOKENS:
        limit = f"expected less than its {positions} positions"
        raise model_error(config, f"MAX_NEW_TOKENS={config.MAX_NEW_TOKENS}: {limit}")
    return Codec(
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        eos_id=end_of_turn,
        num_shots=config.NUM_SHOTS,
        positions=positions,
        max_prompt=positions - config.MAX_NEW_TOKENS,
        max_completion=2 * config.MAX_NEW_TOKENS,
        vocabulary=text_config.vocab_size,
        dtype=dtype,
    )


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


# ==================================================================================================
# The warm start: supervised steps before GRPO
# ==================================================================================================


WARM_START_VERSION = 4  # raise it when `warm_start` changes, so that no older file is loaded


def warm_start(model, codec: Codec, config, tasks, progress) -> None:
    """Train on the tasks' own questions, WARM_START_STEPS steps of supervised fine-tuning. They are
    counted in steps, not seconds, so that the result repeats.

    tiny sees answers in all forms, half of them the rewarded one, then a last phase in which that
    form is rare (ANSWER_TAG_SHARE). It can do the arithmetic then but hardly ever writes the
    rewarded form. That is on purpose: finding this form is what is left to learn. Other models see
    the rewarded form only.

    config: MODEL_NAME, SEED, LEARNING_RATE, WARM_START_STEPS, ANSWER_TAG_SHARE, DTYPE.
    progress(step, steps, loss) is called after each step; the loss is a scalar tensor.
    """
    steps = config.WARM_START_STEPS
    is_tiny = config.MODEL_NAME == "tiny"
    batch_size = 64 if is_tiny else 8
    peak_lr = 4e-3 if is_tiny else 2e-5
    last_phase = min(150, steps // 4) if is_tiny else 0
    main_phase = steps - last_phase
    warm_up_steps = max(1, min(50, steps // 4))

    # Batches of the main phase, then those of the last phase.
    rng = random.Random(f"warm start {config.SEED}")
    main_batches = warm_start_batches(codec, config, tasks, rng, batch_size, tag_share=0.5)
    last_batches = warm_start_batches(
        codec, config, tasks, rng, batch_size, tag_share=config.ANSWER_TAG_SHARE
    )
    batches = itertools.chain(itertools.islice(main_batches, main_phase), last_batches)

    optimizer = make_optimizer(model, config)
    for step, batch in enumerate(itertools.islice(batches, steps)):
        # Learning rate: warm-up and cosine in the main phase, then a linear decay.
        if step < main_phase:
            warm_up = min(1.0, (step + 1) / warm_up_steps)
            lr = peak_lr * warm_up * 0.5 * (1 + math.cos(math.pi * step / main_phase))
        else:
            lr = peak_lr / 2 * (steps - step) / last_phase
        optimizer.param_groups[0]["lr"] = lr

        # The negative log-likelihood of the answers, a mean over all their tokens.
        prompts, answers = zip(*batch, strict=True)
        with autocast(config.DTYPE, model):
            logprobs, mask = plain_logprobs(model, prompts, answers, pad_id=codec.pad_id)
        loss = -(logprobs * mask).sum() / mask.sum()

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, steps, loss)
    make_question.cache_clear()


def warm_start_batches(codec: Codec, config, tasks, rng, batch_size: int, tag_share: float):
    """Yield batches of (prompt, answer), without end. The samples of a batch have similar lengths.

    tag_share: share of tiny's answers that have the rewarded form.
    """
    while True:
        # Draw 16 batches of questions, each with its answer in one of the forms.
        questions = []
        answers = []
        for _ in range(16 * batch_size):
            task = rng.choice(tasks)
            question = first_solved_question(task, rng.randrange(HELD_OUT_SEEDS.start), codec.fits)
            is_rewarded = config.MODEL_NAME != "tiny" or rng.random() < tag_share
            template = ANSWER_TEMPLATES[0] if is_rewarded else rng.choice(ANSWER_TEMPLATES[1:])
            questions.append(question)
            answers.append(template.format(question.answer))

        # Encode them, and leave out what does not fit.
        prompt_ids = [codec.encode_prompt(question) for question in questions]
        answer_ids = codec.encode_completions(answers, [True] * len(answers))
        samples = list(zip(prompt_ids, answer_ids, strict=True))
        samples = [(p, a) for p, a in samples if len(p) + len(a) <= codec.positions]
        if not samples:
            model = config.MODEL_NAME
            raise ModelError(f"TASKS: no question and answer fit into the positions of {model}")

        # Sort by length, so that little is padded, then shuffle the batches.
        samples.sort(key=lambda sample: len(sample[0]) + len(sample[1]))
        batches = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
        rng.shuffle(batches)
        yield from reversed(batches)


def warm_start_recipe(model, codec: Codec, config, tasks) -> dict:
    """The settings, the data and the initial weights of a warm start, as {name: value}.

    The hash of the recipe is the name of the file, so the keys never change. A change of the code
    counts through WARM_START_VERSION.
    """
    names = "MODEL_NAME WARM_START_STEPS SEED NUM_SHOTS MAX_NEW_TOKENS ANSWER_TAG_SHARE".split()
    questions = [first_valid_question(task, 1, codec.fits) for task in sorted(tasks)]
    answer = codec.encode_completions(["<answer>1</answer>"], [True])
    return {name: getattr(config, name) for name in names} | {
        "version of this recipe": WARM_START_VERSION,
        "TASKS": sorted(tasks),
        "TASK_TABLE": [TASK_TABLE.get(task) for task in sorted(tasks)],
        "ANSWER_STYLES": ANSWER_TEMPLATES,
        "reasoning-gym": REASONING_GYM_VERSION,
        "the model's weights": [zlib.crc32(p.detach().cpu().numpy()) for p in model.parameters()],
        "its questions": [[codec.encode_prompt(each), each.answer] for each in questions],
        "its answers": answer,
    }


# ==================================================================================================
# Tensors in files
# ==================================================================================================

MAX_HEADER_BYTES = 2**23  # of a safetensors file; parsed, it takes some 30 times as much memory


def training_state(nodes) -> dict[str, torch.Tensor]:
    """{name: tensor} of everything that these nodes resume from: weights, Adam's steps and moments.
    Not copies."""
    tensors = {}
    for node in nodes:
        for name, p in node.model.named_parameters():
            for kind, tensor in {"weight": p.detach(), **node.optimizer.state[p]}.items():
                tensors[f"{node.id}/{name}/{kind}"] = tensor
    return tensors


def save_tensors(tensors: dict[str, torch.Tensor], metadata: str, path) -> None:
    """Write a safetensors file with a text."""
    saved = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(saved, path, {"about": metadata})


def save_model(model, codec: Codec, card: str, folder) -> None:
    """Write model, tokenizer and model card as an ordinary Hugging Face folder, the weights in the
    type that they came in. The model must not be trained afterwards."""
    model.generation_config.eos_token_id = sorted(codec.eos_ids)  # else `generate` goes on for ever
    model.to(codec.dtype).save_pretrained(folder)
    # Several chat templates would need a subfolder.
    codec.tokenizer.save_pretrained(folder, save_jinja_files=False)
    Path(folder, "README.md").write_text(card, encoding="utf-8")

    # The name of the class that transformers 4 knows, too.
    file = Path(folder, "tokenizer_config.json")
    settings = file.read_text(encoding="utf-8").replace(
        '"TokenizersBackend"', '"PreTrainedTokenizerFast"'
    )
    file.write_text(settings, encoding="utf-8")


@contextlib.contextmanager
def open_tensors(path):
    """A safetensors file, opened. Raises SafetensorError if it is damaged, or if its header is too
    long to be parsed in a moment."""
    with open(path, "rb") as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
            raise SafetensorError("its header is too long")
    with safetensors.safe_open(path, framework="pt") as file:
        yield file


def read_metadata(path) -> str:
    """The text of a safetensors file, "" without one. Raises SafetensorError."""
    with open_tensors(path) as file:
        return (file.metadata() or {}).get("about", "")


@torch.no_grad()
def load_tensors(path, ours: dict[str, torch.Tensor]) -> None:
    """Read tensors with the names, shapes and types of `ours` into these.

    A stranger may have written the file. Raises SafetensorError if it is damaged or does not fit.
    """
    saved = {}
    with open_tensors(path) as file:
        for name, tensor in ours.items():
            # Compare the shape before the tensor is read: a wrong one may be enormous.
            if file.get_slice(name).get_shape() != list(tensor.shape):
                raise SafetensorError(f"{name}: its shape does not match the model's")
            saved[name] = file.get_tensor(name)
            if saved[name].dtype != tensor.dtype:
                raise SafetensorError(f"{name}: its type does not match the model's")
            if not saved[name].isfinite().all():
                raise SafetensorError(f"{name}: it holds values that are not finite")

    # Nothing is changed before all of it has been read.
    for name, tensor in ours.items():
        tensor.copy_(saved[name])
