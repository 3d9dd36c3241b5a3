"""GRPO for one learner: sample completions of a question, score them, turn the rewards into a gradient.

Read from the top: advantages -> loss -> update -> log-probabilities -> sampling. That is GRPO; it ends with
`generate_batch`. Below it: how the model is run, memory, tasks and rewards, models, the warm start.

Symbols in the comments of this file:
    N  questions (groups) in a batch        P  prompt length in tokens (left-padded to the longest)
    G  completions of one question          T  completion length in tokens (right-padded)
    B  rows = all completions in a batch    V  vocabulary        H  hidden size

Where this departs from a textbook GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1); 1, 2, 4 as in SAPO:
1. no KL penalty and no reference model;
2. asymmetric clipping, 1-0.2 and 1+0.28 (DAPO's clip-higher, arXiv:2503.14476, section 3.1);
3. the default loss is a mean over all tokens of the batch (DAPO, section 3.3), not over completions;
4. old_logp is the *current* policy's, taken at the start of an update, also for completions that another
   model wrote: they are treated as if this policy had sampled them.
With num_iterations=1, the default, the ratio is therefore exactly 1: nothing is clipped, the gradient is that
of A log p, and the loss itself says little (0 for equally long completions): watch the reward.
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
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version

import reasoning_gym
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from reasoning_gym.arithmetic import basic_arithmetic
from reasoning_gym.code.contrib.bfit.Compiler import Optimizer as bf_optimizer
from reasoning_gym.logic.propositional_logic import Expression
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.checkpoint import checkpoint as recompute

transformers.utils.logging.set_verbosity_error()  # it warns of padding that is handled here
transformers.utils.logging.disable_progress_bar()

ADVANTAGE_EPSILON = 1e-4  # keeps a group with a tiny spread from blowing up (TRL uses the same value)
MAX_GRAD_NORM = 1.0  # EXERCISE: make the gradient clip a variable


@dataclass
class Group:
    """One question with all its completions, in token ids: the unit of advantages, sharing and updates.

    prompt       (P,) ids
    completions  G lists of ids, each at least one long; the first EOS, where there is one, is the last id
    rewards      (G,) in [0, 1]; computed in this process, never a peer's claim
    """

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]

    @property
    def is_informative(self) -> bool:
        """Whether it teaches anything: its rewards differ; else it is flat. [1, 1]: False, [0, 1]: True."""
        return max(self.rewards) - min(self.rewards) > 1e-6


# -------- Advantages and loss -----------------------------------------------------------------------------


def group_advantages(rewards: list[float]) -> list[float]:
    """A_i = (r_i - mean) / (std + 1e-4) in one group, std with Bessel's correction; zeros if it is flat.

    [1, 0, 0, 1] -> [0.866, -0.866, -0.866, 0.866]   (DeepSeekMath, section 4.1.2; details as in TRL)
    """
    if max(rewards) - min(rewards) <= 1e-6:
        return [0.0] * len(rewards)
    r = torch.tensor(rewards, dtype=torch.float64)  # (G,)
    # EXERCISE (Dr. GRPO, arXiv:2503.20783): drop the division by the standard deviation.
    return ((r - r.mean()) / (r.std(unbiased=True) + ADVANTAGE_EPSILON)).tolist()


def row_weights(lengths: torch.Tensor, loss_type: str, max_new_tokens: int) -> torch.Tensor:
    """How much one token of each completion counts: for the whole update, so that no split changes the loss.

    lengths: (B,) tokens of all completions of the *whole* update, flat groups included. Returns (B,) float64.
    dapo: 1 / all tokens; grpo: 1 / (B x own length); dr_grpo: 1 / (B x max_new_tokens), as Dr. GRPO does.
    """
    lengths = lengths.to(torch.float64)
    rows = len(lengths)
    divisors = {"dapo": lengths.sum(), "grpo": rows * lengths, "dr_grpo": rows * max_new_tokens}
    return torch.ones_like(lengths) / divisors[loss_type]


def grpo_loss(logp, old_logp, advantages, mask, weights, clip_low=0.2, clip_high=0.28):
    """Clipped surrogate loss (PPO, arXiv:1707.06347, eq. 7), summed with `row_weights`.

    logp, old_logp, mask: (B, T); advantages, weights: (B,). Where old_logp is logp.detach() the ratio is 1,
    the gradient A times that of logp. Returns (loss, number of clipped tokens), both scalar tensors.
    """
    ratio = torch.exp(logp - old_logp)  # (B, T)
    a = advantages.unsqueeze(1)  # (B, 1)
    unclipped = ratio * a
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * a
    token_loss = -torch.min(unclipped, clipped)  # (B, T)
    return (token_loss * mask * weights.unsqueeze(1)).sum(), ((clipped < unclipped) & mask.bool()).sum()


# -------- The update --------------------------------------------------------------------------------------


def update(
    model, optimizer, groups: list[Group], *, max_new_tokens: int, temperature=1.0, loss_type="dapo",
    clip_low=0.2, clip_high=0.28, num_iterations=1, max_rows=2**30, pad_id=0, dtype=torch.float32,
) -> dict:  # fmt: skip
    """One GRPO update on local and external groups alike: `num_iterations` steps on the same completions.

    Flat groups cost no forward pass but count in the denominator. max_rows: completions per forward pass.
    Returns loss (first step), clip_fraction (mean), grad_norm (last step, before the clip), trained_tokens,
    max_rows (what fitted), logps (informative groups', per token).
    """
    lengths = torch.tensor([len(c) for g in groups for c in g.completions])  # (B,), flat groups included
    informative = torch.tensor([g.is_informative for g in groups for _ in g.completions])
    weights = row_weights(lengths, loss_type, max_new_tokens)[informative]  # from here on B counts their rows
    lengths, groups = lengths[informative], [g for g in groups if g.is_informative]
    stats = dict(loss=0.0, clip_fraction=0.0, grad_norm=0.0, trained_tokens=int(lengths.sum()))
    advantages = torch.tensor([a for g in groups for a in group_advantages(g.rewards)])  # (B,)
    old_logp = torch.zeros(len(lengths), max(lengths.tolist(), default=0), device=model.device)  # (B, T)
    model.eval()  # dropout off: log-probs of one policy must not depend on chance

    def accumulate(rows_at_once: int, is_first_step: bool):
        """Gradient of the whole batch, micro-batch by micro-batch; returns (loss, clipped tokens)."""
        optimizer.zero_grad()
        total = torch.zeros(2, dtype=torch.float64)
        for pairs, rows in micro_batches(groups, rows_at_once):
            logp, mask = shared_prompt_logps(model, pairs, temperature, pad_id, dtype)
            if is_first_step:  # the policy has not moved yet
                old_logp[rows, : logp.shape[1]] = logp.detach()
            old, a, w = old_logp[rows, : logp.shape[1]], advantages[rows].to(logp), weights[rows].to(logp)
            loss, clipped = grpo_loss(logp, old, a, mask, w, clip_low, clip_high)
            loss.backward()
            total += torch.stack([loss, clipped]).detach().cpu()
        return total.tolist()

    for step in range(num_iterations if groups else 0):  # with none, Adam's momentum would move the weights
        once = functools.partial(accumulate, is_first_step=step == 0)
        (loss, clipped), max_rows = halving_on_oom(once, max_rows, len(lengths), "the update")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if not torch.isfinite(norm):
            print("non-finite gradient: the rest of this update is skipped", flush=True)
            break
        optimizer.step()  # needs no memory of its own, see new_optimizer
        stats |= {"grad_norm": norm.item(), "loss": stats["loss"] if step else loss}
        stats["clip_fraction"] += clipped / (stats["trained_tokens"] * num_iterations)
    optimizer.zero_grad()
    return {**stats, "max_rows": max_rows, "logps": (old_logp.sum(1).cpu() / lengths).tolist()}


def computing_in(dtype, model):
    """A context to compute in `dtype`. The weights stay float32: a bfloat16 one would lose small steps."""
    return torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32)


# -------- Log-probabilities, with gradient ----------------------------------------------------------------


def sequence_logps(model, prompts, completions, temperature: float = 1.0, pad_id: int = 0):
    """The plain way: log-probabilities (B, T) and mask (B, T) of completions, each after its prompt in a row.

    Padding stands on the right only. `shared_prompt_logps` below gives the same numbers.
    """
    pairs = list(zip(prompts, completions, strict=True))
    ids, _ = right_pad([p + c for p, c in pairs], pad_id, model.device)  # (B, P+T)
    # (B, P+T): what each position predicts, -1 where that is not scored
    targets, _ = right_pad([[-1] * (len(p) - 1) + c + [-1] for p, c in pairs], -1, model.device)
    _, mask = right_pad(completions, pad_id, model.device)  # (B, T)
    hidden, _ = forward_hidden(model, ids)
    logp = token_logps(model, hidden[targets >= 0], targets[targets >= 0], temperature)
    return torch.zeros(mask.shape, device=model.device).masked_scatter(mask, logp), mask


def shared_prompt_logps(model, pairs, temperature: float, pad_id: int = 0, dtype=torch.float32):
    """The same numbers, G times less work on prompts. pairs: [(prompt, its completions), …].

    A group shares its prompt: it is run once, its KV cache is repeated for each completion *with gradient*,
    and only the completions go through the model again.
    """
    targets, mask = right_pad([c for _, completions in pairs for c in completions], pad_id, model.device)
    sizes = torch.tensor([len(completions) for _, completions in pairs], device=model.device)  # (N,)
    with computing_in(dtype, model):
        last, cache, prompt_mask = prefill(model, [prompt for prompt, _ in pairs], pad_id, sizes)
        hidden = last.repeat_interleave(sizes, 0).unsqueeze(1)  # (B, 1, H): predicts the first tokens
        if targets.shape[1] > 1:  # no real token sees the padding on its right: no mask for it
            rest, _ = forward_hidden(model, targets[:, :-1], prompt_mask, cache)  # (B, T-1, H)
            hidden = torch.cat([hidden, rest], dim=1)  # (B, T, H): position t predicts token t
        scored = token_logps(model, hidden[mask], targets[mask], temperature)
    return torch.zeros(mask.shape, device=model.device).masked_scatter(mask, scored), mask


def token_logps(model, hidden, targets, temperature: float):
    """log p(target) under softmax(logits / temperature), in float32. hidden: (S, H), targets: (S,) -> (S,).

    The temperature must be the one that sampled. More than LOGIT_ELEMENTS logits are made in chunks, and made
    again in the backward pass rather than kept.
    """

    def logps(h, y):
        return -F.cross_entropy(head_logits(model, h) / temperature, y, reduction="none")

    chunk = max(1, LOGIT_ELEMENTS // model.config.get_text_config().vocab_size)
    if len(targets) <= chunk:
        return logps(hidden, targets)
    pieces = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([recompute(logps, h, y, use_reentrant=False) for h, y in pieces])


# -------- Sampling ----------------------------------------------------------------------------------------


def sample_tokens(logits, noise, temperature: float):
    """One token per row by inverting the cumulative distribution: the first id where it exceeds the noise.

    logits: (B, V) float32; noise: (B,) uniform in [0, 1). The full softmax at `temperature`, no top-k or
    top-p: the loss scores the same distribution. Noise is given: what a row draws depends on no other row.
    """
    cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(-1)  # (B, V)
    target = noise.unsqueeze(1) * cumulative[:, -1:]  # the last entry is 1 up to rounding
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


@torch.no_grad()
def generate(
    model, prompts: list[list[int]], num_generations: int, max_new_tokens: int, temperature: float, eos_ids,
    rng, pad_id=0, max_rows=None, dtype=torch.float32, answered=None,
) -> list[list[list[int]]]:  # fmt: skip
    """Sample G completions of each of N prompts: N lists of G lists of ids, with the EOS that was sampled.

    A completion ends with any of eos_ids, or where answered(its ids so far) is true, if that is given.
    rng: a CPU torch.Generator. max_rows: completions decoded together (None: all), a group is never split;
    the tokens do not depend on it but for rounding, because each row has its own column of noise.
    """
    rows = len(prompts) * num_generations
    noise = torch.rand(max_new_tokens, rows, generator=rng).to(model.device)  # every device draws the same
    at_once = max(1, (max_rows or rows) // num_generations)  # prompts per batch
    batches = [prompts[i : i + at_once] for i in range(0, len(prompts), at_once)]
    model.eval()
    completions = []
    for batch, columns in zip(batches, noise.split(at_once * num_generations, dim=1), strict=True):
        with computing_in(dtype, model):
            completions += generate_batch(model, batch, columns, temperature, eos_ids, pad_id, answered)
    return [completions[i : i + num_generations] for i in range(0, rows, num_generations)]


def generate_batch(model, prompts, noise, temperature, eos_ids, pad_id=0, answered=None) -> list[list[int]]:
    """One batch of `generate`, token by token: each prompt is run once, its cache repeated. noise: (T, B)."""
    device, (steps, rows) = model.device, noise.shape
    copies = rows // len(prompts)  # G
    hidden, cache, mask = prefill(model, prompts, pad_id, copies)
    logits = head_logits(model, hidden).repeat_interleave(copies, 0)  # (B, V)
    eos = torch.tensor(sorted(eos_ids), device=device)
    out = torch.full((rows, steps), -1, device=device)  # -1: nothing sampled
    alive = torch.arange(rows, device=device)  # row of the batch -> row of `out`
    running = torch.ones(rows, dtype=torch.bool, device=device)  # unfinished? Finished rows leave in bulk
    for step in range(steps):
        token = sample_tokens(logits, noise[step, alive], temperature)  # (rows alive,)
        out[alive, step] = torch.where(running, token, -1)
        running &= ~torch.isin(token, eos)
        if answered is not None:
            so_far = zip(running.tolist(), out[alive, : step + 1].tolist(), strict=True)
            running = torch.tensor([on and not answered(ids) for on, ids in so_far], device=device)
        left = int(running.sum())
        if left == 0 or step == steps - 1:
            break
        if left <= 0.75 * len(alive):  # copying the cache costs about a step: worth it for a quarter
            cache.batch_select_indices(running.nonzero().squeeze(1))
            mask = None if mask is None else mask[running]
            alive, token, running = alive[running], token[running], running[running]
        hidden, cache = forward_hidden(model, token.unsqueeze(1), mask, cache)
        logits = head_logits(model, hidden[:, -1])
    return [[t for t in row if t >= 0] for row in out.tolist()]


# -------- Running the model: one way for all of the above -------------------------------------------------

MIN_COMMON_TOKENS = 16  # a common start of all prompts that is shorter is not worth a forward pass of its own
CACHE_ARGUMENT = (  # of a model's forward: transformers 5.24 renamed it
    "cache" if hasattr(transformers.modeling_outputs.BaseModelOutputWithPast, "cache") else "past_key_values"
)
LOGIT_ELEMENTS = 2**25  # (tokens x vocabulary) logits of the update made at once: 128 MiB a copy in float32


class ComputeCache(transformers.DynamicCache):
    """Keys and values in the compute type: under autocast rotary embeddings leave the keys in float32."""

    def update(self, keys, values, *args, **kwargs):
        # Attention casts them to this type in any case.
        keys, values = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (keys, values))
        return super().update(keys, values, *args, **kwargs)


def forward_hidden(model, ids, mask=None, cache=None):
    """Last hidden states (rows, length, H) of `ids` (rows, length), and the KV cache that now contains them.

    mask: (rows, up to cached + length), 1 = real token (as all beyond its end), 0 = padding, not counted as a
    position. None where rows have no padding before their last real token: fast causal kernels.
    """
    if cache is None:
        new_cache = ComputeCache if torch.is_autocast_enabled(ids.device.type) else transformers.DynamicCache
        cache = new_cache(config=model.config)
    past = cache.get_seq_length()
    if mask is None:
        positions = torch.arange(past, past + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    else:
        mask = F.pad(mask, (0, past + ids.shape[1] - mask.shape[1]), value=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, past:]
    out = model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE_ARGUMENT: cache}
    )
    return out.last_hidden_state, cache


def head_logits(model, hidden):
    """(..., H) -> logits (..., V) in float32: a softmax of bfloat16 ones is off by 0.025, not by 0.004."""
    logits = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma 2
    return cap * torch.tanh(logits / cap) if cap else logits


def prefill(model, prompts: list[list[int]], pad_id: int, copies):
    """Run N prompts once each. Returns last hidden states (N, H), KV cache of B rows, mask (B, P) or None.

    copies: rows of the cache per prompt, a number or (N,). What all prompts begin with (a chat model's system
    prompt) is run once for all.
    """
    # At most all but the last token, whose hidden state is asked for. The function takes any sequences.
    common = len(os.path.commonprefix([p[:-1] for p in prompts]))
    if len(prompts) == 1 or common < MIN_COMMON_TOKENS or counts_slots(model.config):
        common = 0
    ids, mask = left_pad([p[common:] for p in prompts], pad_id, model.device)
    cache = None
    if common:
        _, cache = forward_hidden(model, torch.tensor([prompts[0][:common]], device=model.device))
        cache.batch_repeat_interleave(len(prompts))
        mask = None if mask is None else F.pad(mask, (common, 0), value=1)
    hidden, cache = forward_hidden(model, ids, mask, cache)
    cache.batch_repeat_interleave(copies)
    return hidden[:, -1], cache, None if mask is None else mask.repeat_interleave(copies, 0)


def counts_slots(config) -> bool:
    """Whether padding counts as distance (sliding windows, MPT's ALiBi): then none may stand in a prompt."""
    slides = any(transformers.DynamicCache(config=config).is_sliding)
    return slides or config.model_type in ("gpt_neo", "mpt")


def right_pad(rows: list[list[int]], pad_id: int, device):
    """Rows as a batch: ids (B, T), mask (B, T), True = real token. [[7], [8, 9]] -> [[7, pad], [8, 9]]."""
    width = max(map(len, rows))
    ids = torch.tensor([r + [pad_id] * (width - len(r)) for r in rows], device=device)
    return ids, torch.tensor([[True] * len(r) + [False] * (width - len(r)) for r in rows], device=device)


def left_pad(prompts: list[list[int]], pad_id: int, device):
    """The same, padded on the left: none between prompt and completion. No mask if nothing is padded."""
    ids, mask = right_pad([p[::-1] for p in prompts], pad_id, device)
    return ids.flip(1), None if mask.all() else mask.flip(1).long()


@torch.no_grad()
def mean_logps(
    model, groups: list[Group], *, temperature=1.0, max_rows=2**30, pad_id=0, dtype=torch.float32
) -> tuple[list[float], int]:
    """Mean log-probability per token of every completion, in order, without gradient; and what fitted."""
    rows = sum(len(group.completions) for group in groups)

    def attempt(rows_at_once: int):
        means = torch.zeros(rows)
        for pairs, index in micro_batches(groups, rows_at_once):
            logp, mask = shared_prompt_logps(model, pairs, temperature, pad_id, dtype)
            means[index] = (logp.sum(1) / mask.sum(1)).cpu()
        return means.tolist()

    return halving_on_oom(attempt, max_rows, rows, "EXTERNAL_FLOOR")


# -------- Memory ------------------------------------------------------------------------------------------

# CUDA has an exception of its own for it; MPS and the CPU's allocator only say so.
OUT_OF_MEMORY = "out of memory|can't allocate memory|not enough memory|Invalid buffer|bad_alloc|ALLOC_FAILED"


def micro_batches(groups: list[Group], max_rows: int):
    """Yield ([(prompt, completions), …], index of its rows among all B), `max_rows` rows at most.

    Similar lengths come together; a larger group is cut.
    """
    starts = [(g, i) for g in groups for i in range(0, len(g.completions), max_rows)]
    pairs = [(g.prompt, g.completions[i : i + max_rows]) for g, i in starts]
    sizes = [len(completions) for _, completions in pairs]
    pieces = zip(pairs, torch.arange(sum(sizes)).split(sizes), strict=True)
    pieces = sorted(pieces, key=lambda piece: len(piece[0][0]) + max(map(len, piece[0][1])))
    while pieces:
        fitting = sum(end <= max_rows for end in itertools.accumulate(len(rows) for _, rows in pieces))
        pairs, rows = zip(*pieces[:fitting], strict=True)
        yield pairs, torch.cat(rows)
        del pieces[:fitting]


def halving_on_oom(attempt, max_rows: int, rows: int, where: str, smallest: int = 1):
    """attempt(max_rows); when memory runs out, again with half as many. Returns (its result, what fitted).

    rows: how many there are: halving starts there if max_rows is above. MemoryError where `smallest` fails.
    """
    while True:
        try:
            return attempt(max_rows), max_rows
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not re.search(OUT_OF_MEMORY, str(error)):
                raise
            if min(max_rows, rows) <= smallest:
                todo = "lower LOCAL_NODES or MAX_NEW_TOKENS, or take a smaller model (MODEL_NAME)"
                raise MemoryError(f"out of memory in {where}: {todo}") from error
        max_rows = max(smallest, (min(max_rows, rows) + 1) // 2)  # outside the handler: what failed is freed
        print(f"out of memory in {where}: again with {max_rows} completions at once")


def rows_that_fit(model, config, available: int) -> int:
    """Completions per forward pass of the update, roughly; where it is too much, `update` halves it.

    About 150 bytes of activations per token, layer and hidden unit, in a quarter of the memory. On a CPU what
    is free at the moment has no say: a run would not repeat bit for bit.
    """
    if config.MICRO_BATCH_SIZE != "auto":
        return config.MICRO_BATCH_SIZE
    shape = model.config.get_text_config()
    row = config.MAX_NEW_TOKENS * shape.num_hidden_layers * shape.hidden_size * 150
    rows = max(config.NUM_GENERATIONS, int(1.5e9 / row)) if config.DEVICE == "cpu" else available // 4 // row
    return max(1, min(1024, rows))


def devices() -> dict[str, str]:
    """The devices of this machine, the best first, with the type to compute in."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    names = [name for name in found if found[name]]
    names += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    fast = found["cuda"] and torch.cuda.is_bf16_supported(including_emulation=False)  # not a T4
    return {name: "bfloat16" if fast and name.startswith("cuda") else "float32" for name in names}


def available_memory(device: str) -> int:
    """Bytes to be had now, of the GPU or of main memory; on Linux with caches counted."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, TypeError), open("/proc/meminfo") as file:
        return int(re.search(r"MemAvailable:\s+(\d+) kB", file.read())[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks: to fetch large ones page by page again is 2/5 of an update on a CPU."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # Windows, macOS, musl have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


# -------- Tasks and rewards -------------------------------------------------------------------------------

# name -> (reasoning-gym dataset, its settings). Before you add a task, read its score_answer: a peer's text
# reaches it. First come the paper's nine, then eight that are small enough for `tiny`, then five more.
SMALL_RANGE = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASK_TABLE = {
    "base_conversion": ("base_conversion", {"min_value": 1}),  # it writes 0 as an empty string
    **{name: (name, {}) for name in (
        "basic_arithmetic", "arc_1d", "bf", "propositional_logic", "fraction_simplification",
        "decimal_arithmetic", "calendar_arithmetic", "binary_matrix")},
    "small_arithmetic": ("basic_arithmetic", {
        **SMALL_RANGE, "operators": ("+", "-", "*"), "allow_parentheses": False, "allow_negation": False}),
    "small_bases": ("base_conversion", {"min_base": 2, "max_base": 4, "min_value": 1, "max_value": 31}),
    "small_fractions": ("fraction_simplification", {"max_value": 9, "max_factor": 5, "styles": ("plain",)}),
    "small_chain_sum": ("chain_sum", {"min_terms": 3, "max_terms": 3, "max_digits": 1}),
    "small_gcd": ("gcd", {"max_value": 30}), "small_lcm": ("lcm", {"max_value": 12}),
    "small_count_bits": ("count_bits", {"max_n": 63}), "small_products": ("products", SMALL_RANGE),
    **{name: (name, {}) for name in ("chain_sum", "count_bits", "gcd", "lcm", "products")},
}  # fmt: skip
PAPER_TASKS, SMALL_TASKS = tuple(TASK_TABLE)[:9], tuple(TASK_TABLE)[9:17]
HELD_OUT_SEEDS = range(2**52, 2**53)  # training seeds lie below; JSON numbers are exact up to here
VERSIONS = {name: version(name) for name in ("torch", "transformers", "reasoning-gym")}
REASONING_GYM_VERSION = VERSIONS["reasoning-gym"]  # its own __version__ names an older one
MAX_SCORED_CHARS = 4096  # of the end of a completion
MAX_FORMULA_CHARS, MAX_FORMULA_SIGNS = 160, 40  # all premises of a question joined by "and" take 88 and 30


def why_refused(task: str) -> str:
    """Why a task is not in TASK_TABLE: others' verifiers run eval, or their questions differ by process."""
    near = "".join(f"did you mean {name}? " for name in difflib.get_close_matches(task, TASK_TABLE, n=1))
    why = "unknown, or not checked against hostile answers"
    return f"{task!r:.80} is refused: {why}; {near}allowed: {', '.join(TASK_TABLE)}"


class BadQuestion(ValueError):
    """A (task, seed) of which reasoning-gym makes no question: it raises, or would compute for minutes."""


def bounded_divisors(a: int, b: int, search=basic_arithmetic.find_common_divisors) -> list[int]:
    """reasoning-gym tries every number up to the root of the gcd: a million and 0.1 s with this bound."""
    if math.gcd(a, b) > 10**12:  # a bound on the work, not on the time: the same on every machine
        raise BadQuestion("its search for divisors is too long")
    return search(a, b)


basic_arithmetic.find_common_divisors = bounded_divisors
bf_optimizer.print = lambda *_, **__: None  # it prints dots


@dataclass(frozen=True)
class Question:
    """(task, seed) regenerates everything else on any machine."""

    task: str
    seed: int
    text: str
    answer: str
    dataset: object = field(repr=False, compare=False)
    entry: dict = field(repr=False, compare=False)


@functools.lru_cache(maxsize=8192)
def make_question(task: str, seed: int) -> Question:
    """Item 0 of a fresh dataset: item i uses Random(seed + i), so neighbours overlap. Raises BadQuestion."""
    name, settings = TASK_TABLE[task]
    try:
        with decimal.localcontext():  # decimal_arithmetic leaves its precision behind for the whole process
            dataset = reasoning_gym.create_dataset(name, seed=seed, size=1, **settings)
            entry = dataset[0]
    except Exception as error:
        raise BadQuestion(f"{task} has no question at seed {seed}: {error!r}") from error
    answer = entry["answer"] if entry["answer"] is not None else entry["metadata"]["example_answer"]
    return Question(task, seed, entry["question"], answer, dataset, entry)


def lucky_question(task: str, seed: int) -> Question:
    """The first of seed, seed + 1, … of which a question can be made: for questions of one's own."""
    for candidate in range(seed, seed + 50):
        with contextlib.suppress(BadQuestion):
            return make_question(task, candidate)
    return make_question(task, seed + 50)  # so many at once are no bad luck: let the reason be seen


def score(question: Question, text: str, kind: str = "exact") -> float:
    """Reward in [0, 1] of a completion, by reasoning-gym's verifier. Never raises, never evaluates the text.

    The answer is what stands in the last <answer>…</answer> (with nested tags, all from the first one on).
    exact: 1 if the verifier gives at least 0.99, else 0, because verifiers pay small sums for garbage, which
    the normalisation within a group would blow up to a full-size advantage. verifier: the raw score.
    """
    answer, raw = find_answer(text), 0.0
    source = question.entry["metadata"]["source_dataset"]
    with contextlib.suppress(Exception), decimal.localcontext():  # what a verifier trips over is wrong
        if source == "binary_matrix":
            raw = float(answer == question.answer)  # its verifier calls eval(answer)
        elif answer is not None and (source != "propositional_logic" or is_small_formula(question, answer)):
            raw = float(question.dataset.score_answer(answer, question.entry))
    raw = min(1.0, max(0.0, raw)) if math.isfinite(raw) else 0.0
    return float(raw >= 0.99) if kind == "exact" else raw


def score_all(question: Question, texts: list[str], kind: str = "exact") -> list[float]:
    """Rewards of a group's completions. A text that occurs twice is scored once: the work is bounded."""
    scores = {text: score(question, text, kind) for text in set(texts)}
    return [scores[text] for text in texts]


def is_small_formula(question: Question, answer: str) -> bool:
    """Short, not deep, only the question's own variables: the verifier's work doubles with each distinct one.

    69 characters took 9 s. Its own parser must say what a variable is: to it "P ¬P", "P()", "PP" are three.
    """
    if len(answer) > MAX_FORMULA_CHARS or sum(c in "∧∨¬→↔(" for c in answer) > MAX_FORMULA_SIGNS:
        return False
    used = question.dataset._collect_variables([Expression.from_string(answer)])
    return used <= set(question.entry["metadata"]["variables"])


def find_answer(text: str) -> str | None:
    """What stands in the last answer tag. Text is capped, and cut after it: extract_answer is quadratic."""
    text = text[-MAX_SCORED_CHARS:]
    return extract_answer(text[: text.rfind("</answer>") + len("</answer>")])


def task_hash() -> str:
    """Of the table of tasks: learners with different ones cannot verify each other."""
    return hashlib.sha256(json.dumps(TASK_TABLE, sort_keys=True).encode()).hexdigest()[:16]


# -------- Models ------------------------------------------------------------------------------------------

# How the embedded model learns to answer; only the first style is rewarded. See .github/STUDY.md.
ANSWER_STYLES = ("<answer>{}</answer>", "The answer is {}.", "Answer: {}", "= {}", "{}", "It is {}")


@dataclass
class Codec:
    """A tokenizer with a learner's conventions: how a prompt looks, which ids end a completion, what fits."""

    tokenizer: object
    eos_ids: set[int]
    eos_id: int  # the one that ends this model's own turn: appended to a peer's finished completion
    num_shots: int
    max_prompt: int
    max_completion: int
    vocabulary: int  # ids that the model has; a tokenizer may know more

    def prompt(self, question: Question) -> list[int]:
        """Chat template where the model has one; else plain text with `num_shots` solved examples."""
        if self.tokenizer.chat_template:
            return self.chat(question.text)
        seeds = [(question.seed + 1 + i) % HELD_OUT_SEEDS.start for i in range(self.num_shots)]
        shots = [lucky_question(question.task, seed) for seed in seeds]
        solved = [f"{q.text}\n<answer>{q.answer}</answer>\n\n" for q in shots]
        text = question.text + "\n"  # the tokenizer may put a BOS before it: Llama knows no text without
        while len(ids := self.tokenizer("".join(solved) + text).input_ids) > self.max_prompt and solved:
            solved.pop(0)  # no example is cut
        return ids[-self.max_prompt :]

    def prompts(self, questions: list[Question]) -> list[list[int]]:
        """`prompt` of each; plain text is tokenized in one call, which is several times as fast."""
        if self.tokenizer.chat_template or self.num_shots:
            return [self.prompt(question) for question in questions]
        rows = self.tokenizer([question.text + "\n" for question in questions]).input_ids
        return [ids[-self.max_prompt :] for ids in rows]

    def chat(self, text: str) -> list[int]:
        """System prompt and question in the model's template; in one turn where it knows no system role."""
        system = SYSTEM_PROMPTS["default"]
        turns = [{"role": "user", "content": system + "\n" + text}]
        if self.has_system_role:
            turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return ids[-self.max_prompt :]

    @functools.cached_property
    def has_system_role(self) -> bool:
        """Whether the chat template knows it: some raise an exception, some leave it out without a word."""
        turns = [{"role": role, "content": f"as {role}"} for role in ("system", "user")]
        try:
            return "as system" in self.tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # whatever a template raises
            return False

    def encode(self, text: str | list[str]) -> list:
        """Text, or texts each on its own, -> ids. "<|im_end|>" in a peer's text is no special token."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def completions(self, texts: list[str], finished: list[bool]) -> list[list[int]]:
        """Peers' completions as this model would have sampled them: no EOS where `answered` ends one."""
        rows = self.encode(texts)
        for ids, text, done in zip(rows, texts, finished, strict=True):
            if done and not (self.few_shot and "</answer>" in text):
                ids.append(self.eos_id)
        return rows

    def decode(self, ids: list[int]) -> str:
        """Ids -> text, without the EOS: in some models it is no special token."""
        ended = ids[-1:] and ids[-1] in self.eos_ids
        return self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)

    def answered(self, ids: list[int]) -> bool:
        """Whether a completion ends here without EOS: after solved examples a base model adds more."""
        return self.few_shot and "</answer>" in self.decode(ids[-9:])  # a token is at least a byte

    @functools.cached_property
    def pad_id(self) -> int:
        """Any real token: the row of a padding token may be zero."""
        return self.encode("1")[0]

    @property
    def few_shot(self) -> bool:
        return self.num_shots > 0 and not self.tokenizer.chat_template


def build_tiny(tasks):
    """The embedded model, 0.14 M parameters, and its tokenizer of characters and phrases.

    A phrase is a fixed piece of the tasks' questions that recurs, 5+ characters without a digit: one token.
    """
    texts = [lucky_question(task, 1000 * i).text + "\n" for task in dict.fromkeys(tasks) for i in range(100)]
    counts = Counter(p for text in texts for p in set(re.split(r"[0-9]+", text)) if len(p) >= 5)
    styles = [p.split("{}")[0] for p in ANSWER_STYLES[1:] if len(p) >= 5]
    phrases = ["<answer>", "</answer>", *sorted(p for p, n in counts.items() if n >= 10), *styles]
    characters = sorted({*map(chr, range(32, 127)), *"\n∧∨¬→↔"})
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    special = dict(eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=512,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        initializer_range=0.1,  # about 1 / sqrt(n_embd); GPT-2 uses 0.02 for 768: it learns half as much
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config), tokenizer


def load_model(config, tasks) -> tuple[torch.nn.Module, Codec]:
    """Model (float32, eval mode, on its device) and Codec. ValueError if it cannot be had or used here."""
    name = config.MODEL_NAME
    try:
        if name == "tiny":
            model, tokenizer = build_tiny(tasks)
        else:
            access = {"token": config.HUGGINGFACE_ACCESS_TOKEN or None, "trust_remote_code": False}
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **access)
            access |= {"dtype": torch.float32, "output_loading_info": True}
            model, found = transformers.AutoModelForCausalLM.from_pretrained(name, **access)
            if found["missing_keys"]:  # they would be random, and others in each process
                raise ValueError(f"its files lack {min(found['missing_keys'])}")
        model = model.to(config.DEVICE).eval()
        codec = make_codec(model, tokenizer, config)
        check_codec(codec, [codec.prompt(lucky_question(task, seed)) for task in tasks for seed in range(5)])
        check_model(model, codec.encode(SYSTEM_PROMPTS["default"]))
    except Exception as error:  # whatever a model's author did
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        wanted = "expected tiny, a Hugging Face id or a local folder of a decoder such as Qwen2.5 or GPT-2"
        raise ValueError(f"MODEL_NAME={name!r} cannot be used ({why}): {wanted}") from error
    return model, codec


def make_codec(model, tokenizer, config) -> Codec:
    """The conventions of a loaded model. ValueError if it has too few positions for MAX_NEW_TOKENS."""
    shape, new = model.config.get_text_config(), config.MAX_NEW_TOKENS
    eos = model.generation_config.eos_token_id
    eos_ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None, -1}
    positions = getattr(shape, "max_position_embeddings", 0)
    rope = getattr(shape, "rope_parameters", None) or {}
    if re.search("dynamic|longrope", str(rope)):  # once a text is longer, all of it is rotated in another way
        positions = rope.get("original_max_position_embeddings", 0)  # what is cached would be wrong beyond
    if positions < 2 * new:
        raise ValueError(f"MAX_NEW_TOKENS={new}: expected at most half of its {positions} positions")
    longest = min(2 * new, positions // 2)  # of a peer's completion: its tokenizer may be another one
    eos_id = end_of_turn(tokenizer, eos_ids)
    shots, size = config.NUM_SHOTS, shape.vocab_size
    return Codec(tokenizer, eos_ids, eos_id, shots, positions - longest, longest, size)


def end_of_turn(tokenizer, eos_ids: set[int]) -> int:
    """Which of eos_ids the chat template puts after an answer (Gemma: <end_of_turn>); else the usual EOS."""
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
    try:
        tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("four")[2]
        return next(i for i in tokenizer(tail, add_special_tokens=False).input_ids if i in eos_ids)
    except Exception:  # no template, or none of them follows
        return tokenizer.eos_token_id if tokenizer.eos_token_id in eos_ids else min(eos_ids)


def check_codec(codec: Codec, prompts: list[list[int]]) -> None:
    """ValueError unless answers and ids survive the tokenizer. prompts: of several questions."""
    decoded = codec.decode(codec.encode("<answer>12</answer>"))
    if (find_answer(decoded) or "").strip() != "12":  # special tokens are left out, words put apart
        raise ValueError(f"its tokenizer gives back <answer>12</answer> as {decoded!r:.40}")
    highest = max(codec.eos_id, codec.tokenizer.vocab_size - 1, *map(max, prompts))
    if highest >= codec.vocabulary:
        raise ValueError(f"its tokenizer has token {highest}, the model {codec.vocabulary} in all")


@torch.no_grad()
def check_model(model, ids: list[int]) -> None:
    """ValueError unless shared prompts give the log-probabilities of the model's own plain forward pass.

    They do not where a cache cannot be repeated (state-space models), positions are ignored (BART) or logits
    are more than `head_logits` (scaled): training would be silently wrong. ids: 30 of any text.
    """
    answers = [ids[20:24], ids[3:4], ids[24:30]]
    for prompts in ([ids[:18], ids[:23]], [ids[2:7], ids[4:18]]):  # > MIN_COMMON_TOKENS in common; none
        ours, mask = shared_prompt_logps(model, [(prompt, answers) for prompt in prompts], 1.0, ids[0])
        theirs = []
        for prompt, answer in itertools.product(prompts, answers):
            row = torch.tensor([prompt + answer], device=model.device)
            logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits.float()
            theirs.append(-F.cross_entropy(logits[0, :-1], row[0, 1:], reduction="none")[-len(answer) :])
        error = (ours[mask] - torch.cat(theirs)).abs().max().item()
        if not error < 2e-3:
            raise ValueError(f"log-probabilities differ by {error:.2g} from a plain forward pass")


def new_optimizer(model, config) -> torch.optim.AdamW:
    """AdamW whose moments are allocated here, as its first step would: a step then never lacks memory.

    Fused but for tiny: one pass over memory. It rounds differently, and tiny's figures repeat bit for bit.
    """
    fused, lr = config.MODEL_NAME != "tiny", config.LEARNING_RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    for p in model.parameters():
        step = torch.zeros((), device=p.device if fused else "cpu")
        optimizer.state[p] = dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return optimizer


# -------- Warm start, and weights in files ----------------------------------------------------------------


def warm_start_recipe(model, codec: Codec, config, tasks) -> dict:
    """All that a warm start's weights depend on, as {what people would change: value}."""
    names = "MODEL_NAME WARM_START_STEPS SEED NUM_SHOTS MAX_NEW_TOKENS ANSWER_TAG_SHARE".split()
    question, answer = lucky_question(tasks[0], 1), codec.completions(["<answer>1</answer>"], [True])
    return {name: getattr(config, name) for name in names} | {
        "version of this recipe": 3,
        "TASKS": sorted(tasks),
        "TASK_TABLE": task_hash(),
        "ANSWER_STYLES": ANSWER_STYLES,
        "reasoning-gym": REASONING_GYM_VERSION,
        "the model's weights": checksum(p.detach().cpu() for p in model.parameters()),
        "its prompts": [codec.prompt(question), answer],
    }


def warm_start_batches(codec: Codec, config, tasks, rng, batch_size: int, share: float):
    """Batches of (prompt, answer) of similar lengths, without end. share: of the rewarded style."""
    while True:
        questions, answers = [], []
        for _ in range(16 * batch_size):
            questions.append(lucky_question(rng.choice(tasks), rng.randrange(HELD_OUT_SEEDS.start)))
            rewarded = config.MODEL_NAME != "tiny" or rng.random() < share
            style = ANSWER_STYLES[0] if rewarded else rng.choice(ANSWER_STYLES[1:])
            answers.append(style.format(questions[-1].answer))
        encoded = codec.completions(answers, [True] * len(answers))
        samples = list(zip(codec.prompts(questions), encoded, strict=True))
        samples = [s for s in samples if sum(map(len, s)) <= codec.max_prompt + codec.max_completion]
        if not samples:
            raise ValueError(f"TASKS: no question and answer fit into the positions of {config.MODEL_NAME}")
        samples.sort(key=lambda s: sum(map(len, s)))
        batches = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
        rng.shuffle(batches)
        yield from reversed(batches)


def warm_start(model, codec: Codec, config, tasks, say) -> None:
    """Supervised steps on the tasks' own questions, counted in steps, not seconds: the result repeats.

    tiny: answers in all styles, half of them the rewarded one, then a last phase in which that style is rare
    (ANSWER_TAG_SHARE): the model can do the arithmetic but hardly ever says it in the form that is rewarded.
    On purpose: finding that form is what is left to learn. Other models: the rewarded style only.
    """
    tiny, steps = config.MODEL_NAME == "tiny", config.WARM_START_STEPS
    batch_size, peak = (64, 4e-3) if tiny else (8, 2e-5)  # peak: the highest learning rate
    last_phase = min(150, steps // 4) if tiny else 0
    main = steps - last_phase
    rng = random.Random(f"warm start {config.SEED}")
    endless = functools.partial(warm_start_batches, codec, config, tasks, rng, batch_size)
    batches = itertools.chain(itertools.islice(endless(0.5), main), endless(config.ANSWER_TAG_SHARE))
    optimizer, began = new_optimizer(model, config), time.monotonic()
    for step, batch in enumerate(itertools.islice(batches, steps)):
        if step < main:  # warm-up and cosine
            lr = peak * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / main))
        else:
            lr = peak / 2 * (steps - step) / last_phase
        logp, mask = sequence_logps(model, *zip(*batch, strict=True), pad_id=codec.pad_id)
        loss = -(logp * mask).sum() / mask.sum()  # negative log-likelihood: ordinary supervised fine-tuning
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            left = (time.monotonic() - began) / (step + 1) * (steps - step - 1)
            say(f"warm start {step + 1}/{steps}: loss {loss.item():.3f} | eta {left:.0f}s")
    make_question.cache_clear()


MAX_HEADER_BYTES = 2**23  # of a safetensors file: unpacked it takes some 30 times as much


def training_state(model, optimizer) -> dict[str, torch.Tensor]:
    """{name: tensor} of all that training goes on from: weights, Adam's steps and moments. No copies."""
    named = [(name, {"weight": p.detach(), **optimizer.state[p]}) for name, p in model.named_parameters()]
    return {f"{name}/{kind}": tensor for name, kinds in named for kind, tensor in kinds.items()}


def weights_of(model) -> dict[str, torch.Tensor]:
    """{name: tensor} of the weights alone; tied ones stand in it once. No copies."""
    return {name: p.detach() for name, p in model.named_parameters()}


def checksum(tensors) -> int:
    """CRC-32 of float32 tensors in main memory, one after another."""
    return functools.reduce(lambda crc, tensor: zlib.crc32(tensor.numpy(), crc), tensors, 0)


def save_tensors(tensors: dict[str, torch.Tensor], about: str, path) -> None:
    """A safetensors file with a text; OSError where there is no room."""
    try:
        safetensors.torch.save_file(tensors, path, {"about": about})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def read_about(path) -> str:
    """The text of a safetensors file. ValueError if its header is so long that reading it would take long."""
    with open(path, "rb") as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
            raise ValueError("its header is too long")
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata()["about"]


def load_tensors(path, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with the names, shapes and types of `ours` from a safetensors file, in that order.

    A stranger may have made the file: an exception of any kind if it is damaged or something does not fit.
    """
    read_about(path)
    saved = {}
    with safetensors.safe_open(path, framework="pt") as file:
        for name, tensor in ours.items():
            if file.get_slice(name).get_shape() != list(tensor.shape):
                raise ValueError(f"{name}: another shape than the model's")
            saved[name] = file.get_tensor(name)
            if saved[name].dtype != tensor.dtype or not saved[name].isfinite().all():
                raise ValueError(f"{name}: another type than the model's, or values that are not finite")
    return saved


def fill(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Copy saved tensors into those of the same names."""
    for name, tensor in ours.items():
        tensor.copy_(saved[name])
