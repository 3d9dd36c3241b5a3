"""GRPO for one learner: sample completions of a question, score them, and turn the rewards into a
gradient.

Read from the top: advantages and loss, the update, log-probabilities, sampling. That is GRPO, and
it ends at the banner "Speed only". Below it come faster versions of the same computations, then
memory, tasks and rewards, the tokenizer and the models, the warm start, and tensors in files.

Symbols in the comments of this file:
    N  questions (groups) in a batch        P  length of the longest prompt in tokens
    G  completions of one question          T  length of the longest completion in tokens
    B  rows = all completions in a batch    K  rows of informative groups, those trained on
    V  vocabulary                           H  hidden size

Differences from textbook GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1). Points 1, 2 and 4
follow the SAPO paper, point 3 does not:
1. There is no KL penalty and no reference model.
2. Clipping is asymmetric, 1-0.2 and 1+0.28 (DAPO's clip-higher, arXiv:2503.14476, section 3.1).
3. The default loss is a mean over all tokens of the batch, not over completions (DAPO, section
   3.3).
4. The old log-probabilities are those of the *current* policy at the start of the update, also for
   completions that another model wrote. These are treated as if this policy had sampled them.
With NUM_ITERATIONS=1, the default, the ratio is therefore exactly 1 and nothing is clipped. The
gradient is that of -A log p, as in REINFORCE. The value of the loss says nothing: with equally long
completions it is exactly 0, because the advantages of a group sum to 0. Watch the reward instead.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import traceback
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers.cache_utils import DynamicLayer
from torch.utils.checkpoint import checkpoint as recompute_in_backward

transformers.utils.logging.set_verbosity_error()  # it warns of padding that is handled here
transformers.utils.logging.disable_progress_bar()


@dataclass
class Group:
    """One question with its G completions, the unit of advantages, of sharing and of updates.

    prompt       (P,) token ids
    completions  G lists of token ids, none of them empty; an EOS, if there is one, is the last id
    rewards      (G,) in [0, 1]; computed in this process, never a peer's claim
    question     the Question (defined below, under "Tasks and rewards")
    texts        G strings, the completions as text
    finished     G booleans, whether the model ended the completion itself
    key          of an external group, one that a peer wrote: (round, stage, node_id, index)
    """

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]
    question: "Question | None" = None
    texts: list[str] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    key: tuple | None = None

    @property
    def is_informative(self) -> bool:
        """Whether the group gives a gradient: its rewards differ. [1, 1]: False, [0, 1]: True."""
        return max(self.rewards) - min(self.rewards) > 1e-6


# -------- Advantages and loss ---------------------------------------------------------------------

ADVANTAGE_EPSILON = 1e-4  # keeps advantages bounded where rewards hardly differ (as in TRL)


def group_advantages(rewards: list[float]) -> list[float]:
    """A_i = (r_i - mean) / (std + 1e-4) within one group; zeros if all rewards are equal.

    The standard deviation has Bessel's correction (DeepSeekMath, section 4.1.2; TRL does the same).
    [1, 0, 0, 1] -> [0.866, -0.866, -0.866, 0.866]
    """
    if max(rewards) - min(rewards) <= 1e-6:
        return [0.0] * len(rewards)
    r = torch.tensor(rewards, dtype=torch.float64)  # (G,)
    # EXERCISE (Dr. GRPO, arXiv:2503.20783): drop the division by the standard deviation.
    return ((r - r.mean()) / (r.std(unbiased=True) + ADVANTAGE_EPSILON)).tolist()


def loss_weights(lengths: torch.Tensor, loss_type: str, max_new_tokens: int) -> torch.Tensor:
    """Per-token loss weight of each completion.

    The weights are normalised once, over the whole update. Micro-batches only add up their parts,
    so the way in which the update is split does not change the gradient.

    lengths: (B,) tokens of all completions of the *whole* update, those of groups without
    information included. Returns (B,) float64.
        dapo      1 / (tokens of all completions)
        grpo      1 / (B x tokens of this completion)
        dr_grpo   1 / (B x max_new_tokens)
    """
    lengths = lengths.to(torch.float64)
    batch_size = len(lengths)
    if loss_type == "dapo":
        divisors = lengths.sum()
    elif loss_type == "grpo":
        divisors = batch_size * lengths
    elif loss_type == "dr_grpo":
        divisors = batch_size * max_new_tokens
    else:
        raise ValueError(f"LOSS_TYPE={loss_type!r}")
    return torch.ones_like(lengths) / divisors


def grpo_loss(logprobs, old_logprobs, advantages, mask, weights, clip_low=0.2, clip_high=0.28):
    """Clipped surrogate loss (PPO, arXiv:1707.06347, eq. 7), weighted by `loss_weights` and summed.

    logprobs, old_logprobs, mask: (B, T); advantages, weights: (B,).
    Returns (loss, number of clipped tokens), both scalar tensors.

    If old_logprobs is logprobs.detach(), the ratio is 1 and the gradient of the loss is that of
    -weight * A * logprobs.
    """
    ratio = torch.exp(logprobs - old_logprobs)  # (B, T)
    a = advantages.unsqueeze(1)  # (B, 1)

    # The smaller of the two terms: the policy gains nothing by moving beyond the clip range.
    unclipped = ratio * a
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * a
    token_loss = -torch.min(unclipped, clipped)  # (B, T)

    loss = (token_loss * mask * weights.unsqueeze(1)).sum()
    num_clipped = ((clipped < unclipped) & mask.bool()).sum()
    return loss, num_clipped


# -------- The update ------------------------------------------------------------------------------

MAX_GRAD_NORM = 1.0  # EXERCISE: make the gradient clip a variable


@dataclass
class UpdateBatch:
    """The completions that an update trains on: K rows, in the order of `groups`.

    advantages, weights: (K,); old_logprobs: (K, T), filled in the first optimizer step.
    """

    groups: list[Group]
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logprobs: torch.Tensor


def update_policy(
    model, optimizer, groups: list[Group], config, pad_id: int, max_rows: int
) -> dict:
    """One GRPO update on own and external groups alike: NUM_ITERATIONS optimizer steps on the same
    completions.

    config: the update's settings (LOSS_TYPE, MAX_NEW_TOKENS, TEMPERATURE, CLIP_LOW, CLIP_HIGH,
    NUM_ITERATIONS, DTYPE). max_rows: completions per forward pass. Groups without information cost
    no forward pass, but their tokens count in the loss's denominator.

    Returns metrics: loss of the first step, clip_fraction (mean), grad_norm of the last step before
    clipping, trained_tokens, max_rows, which is lower if memory ran out, and logprobs, the mean
    log-probability per token of each completion that was trained on.
    """
    # The loss weights come from all B completions of the update.
    lengths = []
    gives_gradient = []  # for each completion: is its group informative?
    for group in groups:
        lengths += [len(ids) for ids in group.completions]
        gives_gradient += [group.is_informative] * len(group.completions)
    lengths = torch.tensor(lengths, dtype=torch.long)  # (B,)
    gives_gradient = torch.tensor(gives_gradient, dtype=torch.bool)  # (B,)
    weights = loss_weights(lengths, config.LOSS_TYPE, config.MAX_NEW_TOKENS)  # (B,)

    # The update itself needs only the K completions of informative groups. If there are none, skip
    # the step: even with a zero gradient Adam's momentum would move the weights.
    lengths = lengths[gives_gradient]  # (K,)
    weights = weights[gives_gradient]  # (K,)
    groups = [group for group in groups if group.is_informative]
    metrics = {
        "loss": 0.0,
        "clip_fraction": 0.0,
        "grad_norm": 0.0,
        "trained_tokens": int(lengths.sum()),
    }
    if not groups:
        return metrics | {"max_rows": max_rows, "logprobs": []}

    advantages = torch.tensor([a for group in groups for a in group_advantages(group.rewards)])
    old_logprobs = torch.zeros(len(lengths), int(lengths.max()))  # (K, T)
    batch = UpdateBatch(groups, advantages, weights, old_logprobs)
    model.eval()  # dropout off: log-probabilities of one policy must not depend on chance

    num_clippable = metrics["trained_tokens"] * config.NUM_ITERATIONS  # tokens x steps
    for step in range(config.NUM_ITERATIONS):
        # Gradient of the whole batch: attempt(max_rows=…), with smaller pieces if memory runs out.
        attempt = functools.partial(
            accumulate_gradients, model, optimizer, batch, config, pad_id, is_first_step=step == 0
        )
        (loss, num_clipped), max_rows = retry_with_smaller_batch(
            attempt, max_rows, len(lengths), "the update"
        )

        # A step on a gradient that is not finite would destroy the weights for good.
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if not torch.isfinite(grad_norm):
            print("non-finite gradient: the rest of this update is skipped", flush=True)
            break
        optimizer.step()

        if step == 0:
            metrics["loss"] = loss
        metrics["grad_norm"] = grad_norm.item()
        metrics["clip_fraction"] += num_clipped / num_clippable
    optimizer.zero_grad()

    mean_logprobs = batch.old_logprobs.sum(1) / lengths
    return metrics | {"max_rows": max_rows, "logprobs": mean_logprobs.tolist()}


def accumulate_gradients(
    model, optimizer, batch: UpdateBatch, config, pad_id: int, is_first_step: bool, max_rows: int
) -> list[float]:
    """Compute the gradient of the whole batch, `max_rows` completions at a time.

    Returns [loss, number of clipped tokens]. In the first step the policy has not moved yet, so the
    log-probabilities computed there are `old_logprobs` in all steps.
    """
    optimizer.zero_grad()
    totals = torch.zeros(2, dtype=torch.float64)
    for prompts_and_completions, rows in micro_batches(batch.groups, max_rows):
        # rows: the numbers of these completions among all K. The call returns what
        # `completion_logprobs` (below) returns, but computes each prompt once.
        logprobs, mask = completion_logprobs_shared_prompt(
            model, prompts_and_completions, config, pad_id
        )  # (b, t): the rows of this micro-batch, as long as the longest of them
        length = logprobs.shape[1]
        if is_first_step:
            batch.old_logprobs[rows, :length] = logprobs.detach().cpu()

        loss, num_clipped = grpo_loss(
            logprobs,
            batch.old_logprobs[rows, :length].to(logprobs),
            batch.advantages[rows].to(logprobs),
            mask,
            batch.weights[rows].to(logprobs),
            config.CLIP_LOW,
            config.CLIP_HIGH,
        )
        loss.backward()
        totals += torch.stack([loss, num_clipped]).detach().cpu()
    return totals.tolist()


# -------- Log-probabilities, the plain way --------------------------------------------------------


def completion_logprobs(model, prompts, completions, temperature: float = 1.0, pad_id: int = 0):
    """Log-probability of each token of B completions, each in a row with its own prompt.

    Returns logprobs (B, T) and mask (B, T), with zeros where the mask is False. Padding is only on
    the right, so no scored token follows a padding token, and the model needs no attention mask.

    This is the version to read, and the warm start uses it. The update calls
    `completion_logprobs_shared_prompt`, which computes the same numbers faster.
    """
    # What is the next token at each position? -1 means that it is not scored.
    # prompt [5, 6], completion [7, 8]: row [5, 6, 7, 8], targets [-1, 7, 8, -1]
    rows = []
    targets = []
    for prompt, completion in zip(prompts, completions, strict=True):
        rows.append(prompt + completion)
        targets.append([-1] * (len(prompt) - 1) + completion + [-1])
    ids, _ = right_pad(rows, pad_id, model.device)  # (B, P+T)
    targets, _ = right_pad(targets, -1, model.device)  # (B, P+T)
    _, mask = right_pad(completions, pad_id, model.device)  # (B, T)

    # Score only the positions that predict a token of a completion.
    hidden, _ = forward_hidden(model, ids)  # (B, P+T, H)
    is_scored = targets >= 0
    scored = token_logprobs(model, hidden[is_scored], targets[is_scored], temperature)
    return torch.zeros(mask.shape, device=model.device).masked_scatter(mask, scored), mask


def token_logprobs(model, hidden, targets, temperature: float):
    """log p(target) under softmax(logits / temperature), in float32.

    hidden: (S, H), targets: (S,) -> (S,). The temperature must be that of sampling. Large inputs
    are scored in chunks of at most MAX_LOGIT_ELEMENTS logits. The logits of a chunk are not stored
    but computed again in the backward pass.
    """
    chunk = max(1, MAX_LOGIT_ELEMENTS // model.config.get_text_config().vocab_size)
    if len(targets) <= chunk:
        return chunk_logprobs(model, hidden, targets, temperature)

    pieces = []
    for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        pieces.append(
            recompute_in_backward(chunk_logprobs, model, h, y, temperature, use_reentrant=False)
        )
    return torch.cat(pieces)


def chunk_logprobs(model, hidden, targets, temperature: float):
    """`token_logprobs` of one chunk."""
    logits = lm_head_logits(model, hidden)  # (S, V)
    if temperature != 1:  # dividing by 1 would copy all of them
        logits = logits / temperature
    return -F.cross_entropy(logits, targets, reduction="none")


def lm_head_logits(model, hidden):
    """(..., H) -> logits (..., V) in float32.

    Casting bfloat16 logits before the softmax reduces the mean error of a log-probability from
    0.025 to 0.004.
    """
    logits = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma 2
    return cap * torch.tanh(logits / cap) if cap else logits


def autocast_context(dtype: str, model):
    """A context that computes in `dtype`, "float32" or "bfloat16".

    The weights stay float32, because small steps of the optimizer are lost in a bfloat16 weight.
    """
    return torch.autocast(model.device.type, getattr(torch, dtype), enabled=dtype != "float32")


def right_pad(rows: list[list[int]], pad_id: int, device):
    """Rows as a batch: ids (B, T) and mask (B, T), True for real tokens.

    [[7], [8, 9]] -> [[7, pad], [8, 9]]
    """
    width = max(map(len, rows))
    ids = []
    mask = []
    for row in rows:
        padding = width - len(row)
        ids.append(row + [pad_id] * padding)
        mask.append([True] * len(row) + [False] * padding)
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


# -------- Sampling --------------------------------------------------------------------------------


def sample_tokens(logits, uniforms, temperature: float):
    """Draw one token per row by inverting the cumulative distribution: the first token id whose
    cumulative probability exceeds the row's random number.

    logits: (B, V) float32; uniforms: (B,) in [0, 1). It samples from the full softmax at
    `temperature`, without top-k or top-p, because the loss scores the same distribution. The random
    numbers come from outside, so that the draw of a row does not depend on the other rows.
    """
    if temperature != 1:
        logits = logits / temperature
    cumulative = torch.softmax(logits, dim=-1).cumsum(-1)  # (B, V)
    # The last entry should be 1 but is rounded. Scaled by it, no target lies beyond the vocabulary.
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(1)  # (B,)
    return token.clamp(max=logits.shape[1] - 1)  # in case the product is rounded up


@torch.no_grad()
def generate(
    model,
    prompts: list[list[int]],
    num_generations: int,
    config,
    seed: int,
    eos_ids: set[int],
    pad_id: int = 0,
    stop_fn=None,
    max_rows: int | None = None,
) -> list[list[list[int]]]:
    """Sample G completions for each of N prompts. Returns N lists of G lists of token ids.

    config: MAX_NEW_TOKENS, TEMPERATURE and DTYPE. A completion ends (1) with an EOS id, which is
    kept, (2) when stop_fn(its ids so far) is true, or (3) after MAX_NEW_TOKENS tokens.
    max_rows: completions decoded together (None: all); a group is never split. The result does not
    depend on max_rows, up to rounding, because each row has its own column of random numbers.
    """
    # Draw on the CPU, so that every device samples with the same random numbers.
    num_rows = len(prompts) * num_generations
    rng = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(config.MAX_NEW_TOKENS, num_rows, generator=rng).to(model.device)  # (T, B)
    model.eval()  # dropout off

    # Decode as many groups at once as fit into max_rows.
    prompts_per_batch = max(1, (max_rows or num_rows) // num_generations)
    completions = []
    for first in range(0, len(prompts), prompts_per_batch):
        batch = prompts[first : first + prompts_per_batch]
        columns = uniforms[:, first * num_generations : (first + len(batch)) * num_generations]
        with autocast_context(config.DTYPE, model):
            completions += generate_batch(
                model, batch, columns, config.TEMPERATURE, eos_ids, pad_id, stop_fn
            )
    return [completions[i : i + num_generations] for i in range(0, num_rows, num_generations)]


def generate_batch(model, prompts, uniforms, temperature, eos_ids, pad_id=0, stop_fn=None):
    """Sample one completion per row, token by token. Returns B lists of token ids.

    uniforms: (T, B) numbers in [0, 1), one column per row. Each prompt is prefilled once and its
    KV cache is repeated for the G completions of its group. Finished rows are removed from the
    batch as soon as they are a quarter of it.
    """
    max_tokens, batch_size = uniforms.shape
    num_generations = batch_size // len(prompts)  # G
    hidden, cache, mask = prefill(model, prompts, pad_id, num_generations)
    logits = lm_head_logits(model, hidden).repeat_interleave(num_generations, 0)  # (B, V)

    eos = torch.tensor(sorted(eos_ids), device=model.device)
    tokens = torch.full((batch_size, max_tokens), -1, device=model.device)  # -1: not sampled
    unfinished = torch.ones(batch_size, dtype=torch.bool, device=model.device)
    # rows[i] is the row of `tokens` that row i of the batch fills. The batch shrinks, `tokens` does
    # not.
    rows = torch.arange(batch_size, device=model.device)

    for step in range(max_tokens):
        # Sample. Finished rows that are still in the batch are computed, too, but their token is
        # discarded.
        token = sample_tokens(logits, uniforms[step, rows], temperature)
        tokens[rows, step] = torch.where(unfinished, token, -1)

        # A row ends with an EOS token or, with a few-shot prompt, with its closing answer tag.
        unfinished &= ~torch.isin(token, eos)
        if stop_fn is not None:
            so_far = tokens[rows, : step + 1].tolist()
            for i in unfinished.nonzero().flatten().tolist():
                if stop_fn(so_far[i]):
                    unfinished[i] = False
        num_unfinished = int(unfinished.sum())
        if num_unfinished == 0 or step == max_tokens - 1:
            break

        # Dropping rows copies the KV cache, which costs about one step. It pays once a quarter is
        # idle.
        if num_unfinished <= 0.75 * len(rows):
            cache.batch_select_indices(unfinished.nonzero().squeeze(1))
            mask = None if mask is None else mask[unfinished]
            rows = rows[unfinished]
            token = token[unfinished]
            unfinished = unfinished[unfinished]  # all True

        # The mask covers only the prompts; `forward_hidden` treats all later tokens as real.
        hidden, cache = forward_hidden(model, token.unsqueeze(1), mask, cache)
        logits = lm_head_logits(model, hidden[:, -1])

    return [[token for token in row if token >= 0] for row in tokens.tolist()]


# -------- Running the model -----------------------------------------------------------------------

CACHE_ARGUMENT = "past_key_values"  # the name of the KV cache in a model's forward
if hasattr(transformers.modeling_outputs.BaseModelOutputWithPast, "cache"):
    CACHE_ARGUMENT = "cache"  # since transformers 5.24


def forward_hidden(model, ids, mask=None, cache=None):
    """Run `ids` (rows, length) through the model, after what the KV cache already holds.

    mask: (rows, up to cached + length), 1 for real tokens and 0 for padding, which gets no position
    number; tokens beyond its end are real. None if no row has padding before its last real token,
    which allows fast causal kernels.
    Returns the last hidden states (rows, length, H) and the cache, which now contains `ids`.
    """
    if cache is None:
        cache = KVCache(config=model.config)

    # Positions count real tokens only, so that padding never changes a log-probability.
    past = cache.get_seq_length()
    if mask is None:
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)
        positions = positions.expand(ids.shape[0], -1)
    else:
        mask = F.pad(mask, (0, past + ids.shape[1] - mask.shape[1]), value=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, past:]

    output = model.base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        **{CACHE_ARGUMENT: cache},
    )
    return output.last_hidden_state, cache


class KVCache(transformers.DynamicCache):
    """A KV cache in the type of autocast, whose layers grow in place (see `GrowingLayer`)."""

    def __init__(self, config):
        super().__init__(config=config)
        for i, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:  # not one with a sliding window
                self.layers[i] = GrowingLayer()

    def update(self, keys, values, *args, **kwargs):
        if torch.is_autocast_enabled(keys.device.type):
            # Attention casts to this type in any case. Rotary embeddings leave float32 keys.
            dtype = torch.get_autocast_dtype(keys.device.type)
            keys, values = keys.to(dtype), values.to(dtype)
        return super().update(keys, values, *args, **kwargs)


# ==================================================================================================
# Speed only: the same numbers, faster
# ==================================================================================================

SPARE_TOKENS = 64  # for which a layer of the KV cache reserves room


class GrowingLayer(DynamicLayer):
    """One layer of the KV cache. While no gradient is needed, a token is written behind the others,
    where the layer it is derived from copies all of them for each token."""

    def __init__(self):
        super().__init__()
        self.room = {}  # "keys" or "values" -> (tensor with room for more tokens, what it holds)

    def update(self, keys, values, *args, **kwargs):
        if torch.is_grad_enabled() or not self.is_initialized:
            return super().update(keys, values, *args, **kwargs)
        self.keys = self.append("keys", self.keys, keys)
        self.values = self.append("values", self.values, values)
        return self.keys, self.values

    def append(self, name: str, old, new):
        """What torch.cat((old, new), dim=2) returns. old, new: (rows, heads, tokens, size)."""
        past = old.shape[2]
        length = past + new.shape[2]
        room, held = self.room.get(name, (None, None))
        # Rows may have been repeated or removed since the last token. Then `old` is another tensor.
        if held is not old or length > room.shape[2]:
            rows, heads, _, size = old.shape
            room = old.new_empty(rows, heads, length + SPARE_TOKENS, size)
            room[:, :, :past] = old
        room[:, :, past:length] = new
        held = room[:, :, :length]
        self.room[name] = room, held
        return held


MIN_SHARED_PREFIX = 16  # tokens; a shorter common beginning is not worth a forward pass of its own
MAX_LOGIT_ELEMENTS = 2**27  # logits (tokens x vocabulary) computed at once: 512 MiB in float32


def completion_logprobs_shared_prompt(model, prompts_and_completions, config, pad_id: int = 0):
    """Compute what `completion_logprobs` computes, with G times less work on prompts.

    prompts_and_completions: [(prompt, its completions), …]; config: TEMPERATURE and DTYPE.
    Returns logprobs (B, T) and mask (B, T).

    The completions of a group share their prompt. It is computed once and its KV cache is repeated
    for each completion *with gradient*, so that only the completions pass through the model again.
    """
    prompts = []
    completions = []
    group_sizes = []
    for prompt, group_completions in prompts_and_completions:
        prompts.append(prompt)
        completions += group_completions
        group_sizes.append(len(group_completions))
    targets, mask = right_pad(completions, pad_id, model.device)  # (B, T)
    group_sizes = torch.tensor(group_sizes, device=model.device)  # (N,)

    with autocast_context(config.DTYPE, model):
        # The last hidden state of each prompt predicts the first token of its completions.
        last, cache, prompt_mask = prefill(model, prompts, pad_id, group_sizes)
        hidden = last.repeat_interleave(group_sizes, 0).unsqueeze(1)  # (B, 1, H)

        # Token t of a completion predicts token t + 1. Real tokens never see the padding on their
        # right, so it needs no mask.
        if targets.shape[1] > 1:
            rest, _ = forward_hidden(model, targets[:, :-1], prompt_mask, cache)  # (B, T-1, H)
            hidden = torch.cat([hidden, rest], dim=1)  # (B, T, H)
        scored = token_logprobs(model, hidden[mask], targets[mask], config.TEMPERATURE)
    return torch.zeros(mask.shape, device=model.device).masked_scatter(mask, scored), mask


@torch.no_grad()
def mean_logprobs(model, groups: list[Group], config, pad_id: int, max_rows: int) -> list[float]:
    """Mean log-probability per token of every completion, in the order of `groups`."""
    means = torch.zeros(sum(len(group.completions) for group in groups))
    for prompts_and_completions, rows in micro_batches(groups, max_rows):
        logprobs, mask = completion_logprobs_shared_prompt(
            model, prompts_and_completions, config, pad_id
        )
        means[rows] = (logprobs.sum(1) / mask.sum(1)).cpu()
    return means.tolist()


def prefill(model, prompts: list[list[int]], pad_id: int, rows_per_prompt):
    """Run N prompts through the model once each.

    rows_per_prompt: a number or (N,), how often the cache of each prompt is repeated.
    Returns the last hidden states (N, H), the KV cache of B rows, and the mask (B, P) or None.
    """
    # Tokens that all prompts begin with, such as a chat model's system prompt, are computed once.
    # The last token of a prompt is never among them, because its hidden state is wanted.
    shared = len(os.path.commonprefix([prompt[:-1] for prompt in prompts]))
    is_too_short = len(prompts) == 1 or shared < MIN_SHARED_PREFIX
    if is_too_short or needs_unpadded_prompts(model.config):
        shared = 0

    ids, mask = left_pad([prompt[shared:] for prompt in prompts], pad_id, model.device)
    cache = None
    if shared > 0:
        prefix = torch.tensor([prompts[0][:shared]], device=model.device)
        _, cache = forward_hidden(model, prefix)
        cache.batch_repeat_interleave(len(prompts))
        mask = None if mask is None else F.pad(mask, (shared, 0), value=1)

    hidden, cache = forward_hidden(model, ids, mask, cache)
    cache.batch_repeat_interleave(rows_per_prompt)
    mask = None if mask is None else mask.repeat_interleave(rows_per_prompt, 0)
    return hidden[:, -1], cache, mask


def needs_unpadded_prompts(config) -> bool:
    """True if padding shifts relative positions (sliding windows, MPT's ALiBi). Then nothing may be
    padded between a shared prefix and the rest of a prompt, so no prefix is shared."""
    has_window = any(transformers.DynamicCache(config=config).is_sliding)
    return has_window or config.model_type in ("gpt_neo", "mpt")


def left_pad(prompts: list[list[int]], pad_id: int, device):
    """`right_pad` on the left, so that nothing stands between a prompt and its completion.

    The mask is None if nothing is padded.
    """
    ids, mask = right_pad([prompt[::-1] for prompt in prompts], pad_id, device)
    return ids.flip(1), None if mask.all() else mask.flip(1).long()


# -------- Memory ----------------------------------------------------------------------------------

# CUDA raises an exception of its own; MPS and the CPU's allocator only say it in the message.
OUT_OF_MEMORY = (
    "out of memory|can't allocate memory|not enough memory|Invalid buffer|bad_alloc|ALLOC_FAILED"
)


def micro_batches(groups: list[Group], max_rows: int):
    """Split the K completions of all groups into micro-batches of at most max_rows.

    Yields ([(prompt, completions), …], the numbers of these completions among all K). Groups of
    similar length come together, so that little is padded. A group that is larger than max_rows is
    cut.
    """
    # Number the completions 0 … K-1 in the order of `groups`, then sort the groups by length.
    numbered = []  # (length, number of the first completion, group)
    first_row = 0
    for group in groups:
        length = len(group.prompt) + max(map(len, group.completions))
        numbered.append((length, first_row, group))
        first_row += len(group.completions)
    numbered.sort(key=lambda entry: entry[0])

    # Fill one micro-batch after another with whole groups.
    prompts_and_completions = []
    rows = []
    for _, first_row, group in numbered:
        for start in range(0, len(group.completions), max_rows):
            part = group.completions[start : start + max_rows]
            if len(rows) + len(part) > max_rows:
                yield prompts_and_completions, torch.tensor(rows)
                prompts_and_completions = []
                rows = []
            prompts_and_completions.append((group.prompt, part))
            rows += range(first_row + start, first_row + start + len(part))
    if rows:
        yield prompts_and_completions, torch.tensor(rows)


def retry_with_smaller_batch(attempt, max_rows: int, num_rows: int, where: str, smallest: int = 1):
    """Call attempt(max_rows=…), again with half as many rows each time memory runs out.

    num_rows: how many rows there are in all; halving starts there if max_rows is larger.
    Returns (result of the call, max_rows that fitted). Raises MemoryError if `smallest` fails, too.
    """
    while True:
        try:
            return attempt(max_rows=max_rows), max_rows
        except RuntimeError as error:
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if not is_out_of_memory and not re.search(OUT_OF_MEMORY, str(error)):
                raise
            if min(max_rows, num_rows) <= smallest:
                advice = "lower LOCAL_NODES or MAX_NEW_TOKENS, or take a smaller model (MODEL_NAME)"
                raise MemoryError(f"out of memory in {where}: {advice}") from error

        # Outside the handler, where the memory of the failed attempt has been freed.
        max_rows = max(smallest, (min(max_rows, num_rows) + 1) // 2)
        print(f"out of memory in {where}: again with {max_rows} completions at once")


def estimate_micro_batch_size(model, config, available: int) -> int:
    """Completions per forward pass of the update, roughly. If it is too many, memory runs out once
    and the batch is halved.

    config: MICRO_BATCH_SIZE, MAX_NEW_TOKENS, NUM_GENERATIONS, NUM_WORKERS and DEVICE; available:
    bytes. Assumes 150 bytes of activations per token, layer and hidden unit, in a quarter of the
    memory. On a CPU it is an eighth of the machine's memory, 3 GB at most. The memory that happens
    to be free has no influence there, because then a run would not repeat bit for bit.
    """
    if config.MICRO_BATCH_SIZE != "auto":
        return config.MICRO_BATCH_SIZE

    text_config = model.config.get_text_config()
    bytes_per_token = text_config.num_hidden_layers * text_config.hidden_size * 150
    bytes_per_row = config.MAX_NEW_TOKENS * bytes_per_token
    if config.DEVICE == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = min(3e9, total / 8 / max(1, config.NUM_WORKERS))
        rows = max(config.NUM_GENERATIONS, int(budget / bytes_per_row))
    else:
        rows = available // 4 // bytes_per_row
    return max(1, min(1024, rows))


def available_devices() -> dict[str, str]:
    """{device: the type to compute in} for the devices of this machine, the best first."""
    names = []
    if torch.cuda.is_available():
        names.append("cuda")
    if torch.backends.mps.is_available():
        names.append("mps")
    names.append("cpu")
    names += [f"cuda:{i}" for i in range(torch.cuda.device_count())]

    # bfloat16 only where the hardware multiplies it: emulated it is many times slower than float32.
    has_bfloat16 = {"cpu": cpu_has_bfloat16()}
    if "cuda" in names:
        has_bfloat16["cuda"] = torch.cuda.is_bf16_supported(including_emulation=False)
    devices = {}
    for name in names:
        is_fast = has_bfloat16.get(name.split(":")[0], False)
        devices[name] = "bfloat16" if is_fast else "float32"
    return devices


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has AMX or AVX512_BF16. False if torch is too old to tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def available_memory(device: str) -> int:
    """Bytes that are free now, on the GPU or in main memory (on Linux with its file caches)."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, TypeError), open("/proc/meminfo") as file:
        return int(re.search(r"MemAvailable:\s+(\d+) kB", file.read())[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks. Getting large ones from the kernel again, page by page, takes
    two fifths of an update on a CPU."""
    with contextlib.suppress(
        OSError, AttributeError, TypeError
    ):  # Windows, macOS, musl: no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


# ==================================================================================================
# Tasks and rewards
# ==================================================================================================

import decimal
import difflib
from importlib.metadata import version

import reasoning_gym
from reasoning_gym.arithmetic import basic_arithmetic
from reasoning_gym.code.contrib.bfit.Compiler import Optimizer as bf_optimizer
from reasoning_gym.logic.propositional_logic import Expression
from reasoning_gym.utils import SYSTEM_PROMPTS

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


def first_valid_question(task: str, seed: int) -> Question:
    """The first question that exists among seed, seed + 1, …, seed + 50. For own questions only: a
    peer's seed must be right."""
    for candidate in range(seed, seed + 50):
        with contextlib.suppress(QuestionError):
            return make_question(task, candidate)
    return make_question(task, seed + 50)  # fifty failures in a row are a bug, so let it raise


def first_solved_question(task: str, seed: int) -> Question:
    """The first question from this seed on whose own answer earns the full reward.

    The example answers of propositional_logic fail its verifier once in a hundred times. As solved
    examples they would teach what is not rewarded.
    """
    for _ in range(50):
        question = first_valid_question(task, seed)
        if compute_reward(question, f"<answer>{question.answer}</answer>") == 1:
            return question
        seed = question.seed + 1
    raise QuestionError(f"{task}: its own answers do not earn its own full score")


def bounded_divisors(a: int, b: int, search=basic_arithmetic.find_common_divisors) -> list[int]:
    """reasoning-gym's own search, which tries every number up to the root of the gcd, with a bound.

    The bound is on the work, not on the time, so it is the same on every machine: a million tries,
    0.1 s.
    """
    if math.gcd(a, b) > 10**12:
        raise QuestionError("its search for divisors is too long")
    return search(a, b)


basic_arithmetic.find_common_divisors = bounded_divisors
bf_optimizer.print = lambda *_, **__: None  # it prints dots to the screen


def group_rewards(question: Question, texts: list[str], kind: str = "exact") -> list[float]:
    """Rewards of a group's completions. Equal texts are scored once, which bounds the work."""
    scores = {text: compute_reward(question, text, kind) for text in set(texts)}
    return [scores[text] for text in texts]


def compute_reward(question: Question, text: str, kind: str = "exact") -> float:
    """Reward in [0, 1] of a completion, by reasoning-gym's verifier. Never raises, and never
    evaluates the text.

    exact: 1 if the verifier's score is at least 0.99, else 0. Verifiers pay small sums for garbage,
    and the normalisation within a group would turn these into full-size advantages.
    verifier: the raw score.
    """
    answer = extract_tagged_answer(text)
    source = question.entry["metadata"]["source_dataset"]
    score = 0.0
    if source == "binary_matrix":
        score = float(answer == question.answer)  # its verifier would call eval(answer)
    elif answer is not None and (
        source != "propositional_logic" or is_safe_formula(question, answer)
    ):
        score = verifier_score(question, answer)

    if kind == "exact":
        return float(score >= 0.99)
    if kind == "verifier":
        return score
    raise ValueError(f"REWARD={kind!r}")


def verifier_score(question: Question, answer: str) -> float:
    """The score of reasoning-gym's verifier, limited to [0, 1]; 0 for an answer that it trips
    over."""
    try:
        with decimal.localcontext():
            score = float(question.dataset.score_answer(answer, question.entry))
    except Exception:  # a verifier may raise anything on a stranger's text
        return 0.0
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def extract_tagged_answer(text: str) -> str | None:
    """The text between the last </answer> and the last <answer> before it, None without both.

    A model may mention the tag before it uses it. (reasoning-gym's extract_answer would begin after
    the first tag, and takes quadratic time.)
    """
    text = text[-MAX_SCORED_CHARS:]
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end].strip()


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

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

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
    notes: list[str]  # sentences for the user about what is unusual in this model

    @property
    def few_shot(self) -> bool:
        """Whether prompts hold solved examples: the model has no chat template."""
        return self.num_shots > 0 and not self.tokenizer.chat_template

    def encode_prompt(self, question: Question) -> list[int]:
        """The prompt of a question: the model's chat template, or else plain text after `num_shots`
        solved examples."""
        if self.tokenizer.chat_template:
            return self.chat(question.text)

        # Solved examples of the same task, from the seeds that follow the question's.
        examples = []
        for i in range(self.num_shots):
            seed = (question.seed + 1 + i) % HELD_OUT_SEEDS.start
            solved = first_solved_question(question.task, seed)
            examples.append(f"{solved.text}\n<answer>{solved.answer}</answer>\n\n")

        # Drop whole examples until the prompt fits. The tokenizer may put a BOS before the text,
        # without which models such as Llama know no text.
        text = question.text + "\n"
        ids = self.tokenizer("".join(examples) + text).input_ids
        while len(ids) > self.max_prompt and examples:
            examples.pop(0)
            ids = self.tokenizer("".join(examples) + text).input_ids
        return ids[-self.max_prompt :]

    def encode_prompts(self, questions: list[Question]) -> list[list[int]]:
        """`encode_prompt` of each question. Plain text is tokenized in one call, which is several
        times as fast."""
        if self.tokenizer.chat_template or self.num_shots:
            return [self.encode_prompt(question) for question in questions]
        rows = self.tokenizer([question.text + "\n" for question in questions]).input_ids
        return [ids[-self.max_prompt :] for ids in rows]

    def chat(self, text: str) -> list[int]:
        """System prompt and question in the model's template, in one turn if it has no system
        role."""
        system = SYSTEM_PROMPTS["default"]
        turns = [{"role": "user", "content": system + "\n" + text}]
        if self.has_system_role:
            turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        # EXERCISE: let a model that can think do so. It needs far more than 256 tokens.
        ids = self.tokenizer.apply_chat_template(
            turns,
            chat_template=DATE_MACRO + self.tokenizer.get_chat_template(),
            add_generation_prompt=True,
            return_dict=False,
            date_string=PROMPT_DATE,
            enable_thinking=False,
        )
        return ids[-self.max_prompt :]

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
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def ends_with_answer(self, ids: list[int]) -> bool:
        """Whether a completion ends here without an EOS. After solved examples a base model would
        go on with more of them."""
        return self.few_shot and "</answer>" in self.decode(ids[-9:])  # a token is at least a byte

    @functools.cached_property
    def pad_id(self) -> int:
        """Any real token. The embedding of a padding token may be zero."""
        return self.encode("1")[0]


def load_model(config, tasks) -> tuple[torch.nn.Module, Codec]:
    """Load the model (float32, eval mode, on its device) and its Codec.

    config: MODEL_NAME, DEVICE, MAX_NEW_TOKENS, NUM_SHOTS, HUGGINGFACE_ACCESS_TOKEN, and what
    `check_model` reads. Raises ModelError if the model cannot be loaded or would not be trained
    exactly.
    """
    if config.MODEL_NAME == "tiny":
        model, tokenizer = build_tiny_model(tasks)
        model = model.to(config.DEVICE).eval()
        return model, make_checked_codec(model, tokenizer, config, tasks)

    model, tokenizer = load_pretrained(config)
    model = model.to(config.DEVICE).eval()
    try:
        return model, make_checked_codec(model, tokenizer, config, tasks)
    except ModelError:
        raise
    except Exception as error:  # raised by the model's own code, or by a mistake in this file
        traceback.print_exc()  # shows which of the two
        raise model_error(config, f"{type(error).__name__}: {error}") from error


def make_checked_codec(model, tokenizer, config, tasks) -> Codec:
    """The Codec of a loaded model, after both have been checked. Raises ModelError."""
    codec = make_codec(model, tokenizer, config)
    questions = [first_valid_question(task, seed) for task in tasks for seed in range(5)]
    check_codec(codec, questions, config)
    check_model(model, codec.encode(SYSTEM_PROMPTS["default"]), config)
    return codec


def load_pretrained(config):
    """Load model and tokenizer of MODEL_NAME from the Hugging Face Hub or a folder.

    Raises ModelError with the reason if that fails.
    """
    # Say what is wrong with a folder. The library's own message would be about something else.
    name = config.MODEL_NAME
    if os.path.isfile(os.path.join(name, "adapter_config.json")):
        raise model_error(config, "it is an adapter (LoRA): merge it into its base model first")
    if name.startswith(("/", "./", "../")) and not os.path.isdir(name):
        raise model_error(config, "there is no such folder")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise model_error(config, "the folder holds no model: it has no config.json")

    access = {"token": config.HUGGINGFACE_ACCESS_TOKEN or None, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.MODEL_NAME, **access)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            config.MODEL_NAME, dtype=torch.float32, output_loading_info=True, **access
        )
    except Exception as error:  # files, network, tokenizer: a model's author may have done anything
        raise model_error(config, f"{type(error).__name__}: {error}") from error

    # Weights that are missing would be random, and different in each process.
    if info["missing_keys"]:
        raise model_error(config, f"its files lack {min(info['missing_keys'])}")
    # Models that keep more than keys and values cannot share a prompt.
    if getattr(model, "_is_stateful", False):
        raise model_error(
            config, f"{type(model).__name__} keeps another state than keys and values"
        )

    # Sampling settings are not used here, and some of them would make save_pretrained raise after
    # the last round. Keep the ids.
    loaded = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id,
        pad_token_id=loaded.pad_token_id,
    )
    return model, tokenizer


def model_error(config, reason: str) -> ModelError:
    """The error that names MODEL_NAME, the first line of the reason, and what is expected."""
    reason = reason.splitlines()[0][:300]
    expected = "tiny, a Hugging Face id or a local folder of a decoder such as Qwen2.5 or GPT-2"
    return ModelError(
        f"MODEL_NAME={config.MODEL_NAME!r} cannot be used ({reason}): expected {expected}"
    )


def make_codec(model, tokenizer, config) -> Codec:
    """The conventions of a loaded model. Raises ModelError if it has no EOS or too few positions.

    config: MODEL_NAME, MAX_NEW_TOKENS, NUM_SHOTS.
    """
    # Every EOS id of the generation config ends a completion. So do the tokenizer's, and the token
    # that the chat template writes after an answer.
    eos = model.generation_config.eos_token_id
    eos_ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None, -1}
    end_of_turn = find_end_of_turn_id(tokenizer, eos_ids)
    notes = []
    if end_of_turn is not None and end_of_turn not in eos_ids:
        token = tokenizer.convert_ids_to_tokens(end_of_turn)
        notes.append(f"{token} ends a completion, too: the chat template writes it after an answer")
        eos_ids.add(end_of_turn)
    if not eos_ids:
        raise model_error(config, "it has no EOS token, so that nothing would end an answer")
    if end_of_turn is None:
        usual = tokenizer.eos_token_id
        end_of_turn = usual if usual in eos_ids else min(eos_ids)

    # Longer texts than the original length would rotate all of a text in another way, so that
    # cached keys would be wrong.
    text_config = model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", 0)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if re.search("dynamic|longrope", str(rope)):
        positions = rope.get("original_max_position_embeddings", positions)

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
        notes=notes,
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


def check_codec(codec: Codec, questions: list[Question], config) -> None:
    """Raise ModelError unless a few questions, an answer and all ids survive the tokenizer."""
    # Some tokenizers drop tokens of the answer or put words apart.
    decoded = codec.decode(codec.encode("<answer>12</answer>"))
    if (extract_tagged_answer(decoded) or "").strip() != "12":
        reason = f"its tokenizer gives back <answer>12</answer> as {decoded!r:.40}"
        raise model_error(config, reason)

    # A prompt must hold the whole question, and the tokenizer must not end it.
    prompts = [codec.encode_prompt(question) for question in questions]
    for question, prompt in zip(questions, prompts, strict=True):
        text = "".join(codec.tokenizer.decode(prompt).split())
        if "".join(question.text.split()) not in text:
            advice = "mend its chat template or tokenizer, one of which changes it"
            if len(prompt) == codec.max_prompt:
                advice = "lower MAX_NEW_TOKENS or leave the task out of TASKS"
            lost = f"a question of {question.task} is not whole in its prompt"
            raise model_error(config, f"{lost} of {len(prompt)} tokens: {advice}")
        if prompt[-1] in codec.eos_ids and not codec.tokenizer.chat_template:
            token = codec.tokenizer.convert_ids_to_tokens(prompt[-1])
            reason = f"the prompt ends with {token}, which ends the text before the answer"
            raise model_error(config, f"{reason}: set add_eos_token to false in its tokenizer")

    # An id beyond the embedding raises IndexError on a CPU and an opaque assertion on a GPU.
    highest = max(codec.eos_id, codec.tokenizer.vocab_size - 1, *map(max, prompts))
    if highest >= codec.vocabulary:
        reason = f"its tokenizer has token {highest}, the model {codec.vocabulary} in all"
        raise model_error(config, reason)


def check_model(model, ids: list[int], config) -> None:
    """Raise ModelError unless shared prompts give the log-probabilities of the model's own plain
    forward pass. Training would be silently wrong otherwise.

    That happens where a cache cannot be repeated (state-space models), where positions are ignored
    (BART), and where logits are more than `lm_head_logits` (scaled ones). ids: 30 of any text.
    """
    exact = replace(config, TEMPERATURE=1.0, DTYPE="float32")
    answers = [ids[20:24], ids[3:4], ids[24:30]]
    with_shared_prefix = [ids[:18], ids[:23]]  # more than MIN_SHARED_PREFIX tokens in common
    without = [ids[2:7], ids[4:18]]
    for prompts in (with_shared_prefix, without):
        # The plain way: every row on its own, without padding or a cache.
        theirs = []
        for prompt, answer in itertools.product(prompts, answers):
            row = torch.tensor([prompt + answer], device=model.device)
            with torch.no_grad():
                logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits.float()
            losses = F.cross_entropy(logits[0, :-1], row[0, 1:], reduction="none")
            theirs.append(-losses[-len(answer) :])
        theirs = torch.cat(theirs)

        # Our way, without a gradient as in generation and with one as in the update.
        prompts_and_completions = [(prompt, answers) for prompt in prompts]
        for has_gradient in (False, True):
            with torch.set_grad_enabled(has_gradient):
                ours, mask = completion_logprobs_shared_prompt(
                    model, prompts_and_completions, exact, pad_id=ids[0]
                )
            error = (ours.detach()[mask] - theirs).abs().max().item()
            if not error < 2e-3:
                reason = f"log-probabilities differ by {error:.2g} from a plain forward pass"
                raise model_error(config, reason)
        ours.sum().backward()
        model.zero_grad()


def build_tiny_model(tasks):
    """Build the embedded model `tiny`, 0.14 M parameters, and its tokenizer of characters and
    phrases.

    A phrase is a fixed piece of the tasks' questions that recurs. It has at least five characters,
    no digit, and becomes one token.
    """
    # Collect the phrases: the pieces between the numbers of a hundred questions of each task.
    counts = Counter()
    for task in dict.fromkeys(tasks):
        for i in range(100):
            text = first_valid_question(task, 1000 * i).text + "\n"
            pieces = set(re.split(r"[0-9]+", text))
            counts.update(piece for piece in pieces if len(piece) >= 5)
    phrases = sorted(piece for piece, count in counts.items() if count >= 10)
    for template in ANSWER_TEMPLATES[1:]:
        if len(template) >= 5:
            phrases.append(template.split("{}")[0])

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
    """AdamW with its moments allocated, so that no later step can run out of memory.

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


WARM_START_VERSION = 3  # raise it when `warm_start` changes, so that no older file is loaded


def warm_start(model, codec: Codec, config, tasks, progress) -> None:
    """Train on the tasks' own questions, WARM_START_STEPS steps of supervised fine-tuning. They are
    counted in steps, not seconds, so that the result repeats.

    tiny sees answers in all forms, half of them the rewarded one, then a last phase in which that
    form is rare (ANSWER_TAG_SHARE). It can do the arithmetic then but hardly ever writes the
    rewarded form. That is on purpose: finding this form is what is left to learn. Other models see
    the rewarded form only.

    config: MODEL_NAME, SEED, LEARNING_RATE, WARM_START_STEPS, ANSWER_TAG_SHARE.
    progress(step, steps, loss) is called after each step; the loss is a scalar tensor.
    """
    steps = config.WARM_START_STEPS
    if config.MODEL_NAME == "tiny":
        batch_size = 64
        peak_lr = 4e-3
        last_phase = min(150, steps // 4)
    else:
        batch_size = 8
        peak_lr = 2e-5
        last_phase = 0
    main_phase = steps - last_phase

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
            warm_up = min(1.0, (step + 1) / 50)
            lr = peak_lr * warm_up * 0.5 * (1 + math.cos(math.pi * step / main_phase))
        else:
            lr = peak_lr / 2 * (steps - step) / last_phase
        optimizer.param_groups[0]["lr"] = lr

        # The negative log-likelihood of the answers, a mean over all their tokens.
        prompts, answers = zip(*batch, strict=True)
        logprobs, mask = completion_logprobs(model, prompts, answers, pad_id=codec.pad_id)
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
            seed_task = rng.choice(tasks)
            question = first_solved_question(seed_task, rng.randrange(HELD_OUT_SEEDS.start))
            if config.MODEL_NAME != "tiny" or rng.random() < tag_share:
                template = ANSWER_TEMPLATES[0]
            else:
                template = rng.choice(ANSWER_TEMPLATES[1:])
            questions.append(question)
            answers.append(template.format(question.answer))

        # Encode them, and leave out what does not fit.
        prompt_ids = codec.encode_prompts(questions)
        answer_ids = codec.encode_completions(answers, [True] * len(answers))
        samples = []
        for prompt, answer in zip(prompt_ids, answer_ids, strict=True):
            if len(prompt) + len(answer) <= codec.positions:
                samples.append((prompt, answer))
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
    question = first_valid_question(tasks[0], 1)
    answer = codec.encode_completions(["<answer>1</answer>"], [True])
    return {name: getattr(config, name) for name in names} | {
        "version of this recipe": WARM_START_VERSION,
        "TASKS": sorted(tasks),
        "TASK_TABLE": task_hash(),
        "ANSWER_STYLES": ANSWER_TEMPLATES,
        "reasoning-gym": REASONING_GYM_VERSION,
        "the model's weights": checksum(p.detach().cpu() for p in model.parameters()),
        "its prompts": [codec.encode_prompt(question), answer],
    }


# ==================================================================================================
# Tensors in files
# ==================================================================================================

MAX_HEADER_BYTES = 2**23  # of a safetensors file; parsed, it takes some 30 times as much memory


def training_state(model, optimizer) -> dict[str, torch.Tensor]:
    """{name: tensor} of everything that training resumes from: weights, Adam's steps and moments.
    Not copies."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[f"{name}/weight"] = p.detach()
        for kind, tensor in optimizer.state[p].items():
            tensors[f"{name}/{kind}"] = tensor
    return tensors


def named_weights(model) -> dict[str, torch.Tensor]:
    """{name: tensor} of the weights alone, tied ones once. Not copies."""
    return {name: p.detach() for name, p in model.named_parameters()}


def checksum(tensors) -> int:
    """CRC-32 of float32 tensors in main memory, one after another."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.numpy(), crc)
    return crc


def save_tensors(tensors: dict[str, torch.Tensor], metadata: str, path) -> None:
    """Write a safetensors file with a text. Raises OSError if the disk is full."""
    try:
        safetensors.torch.save_file(tensors, path, {"about": metadata})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def save_model(model, tokenizer, folder) -> None:
    """Write model and tokenizer as an ordinary Hugging Face folder. Raises OSError if the disk is
    full."""
    try:
        model.save_pretrained(folder)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # several would need a subfolder


def read_metadata(path) -> str:
    """The text of a safetensors file. Raises ValueError if its header is too long to be parsed in a
    moment."""
    with open(path, "rb") as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
            raise ValueError("its header is too long")
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata()["about"]


def load_tensors(path, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read tensors with the names, shapes and types of `ours`, in this order.

    A stranger may have written the file, so this may raise any exception if the file is damaged or
    does not fit.
    """
    read_metadata(path)
    saved = {}
    with safetensors.safe_open(path, framework="pt") as file:
        for name, tensor in ours.items():
            # Compare the shape before the tensor is read: a wrong one may be enormous.
            if file.get_slice(name).get_shape() != list(tensor.shape):
                raise ValueError(f"{name}: its shape does not match the model's")
            saved[name] = file.get_tensor(name)
            if saved[name].dtype != tensor.dtype:
                raise ValueError(f"{name}: its type does not match the model's")
            if not saved[name].isfinite().all():
                raise ValueError(f"{name}: it holds values that are not finite")
    return saved


def copy_tensors(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Copy saved tensors into those of the same names."""
    for name, tensor in ours.items():
        tensor.copy_(saved[name])
