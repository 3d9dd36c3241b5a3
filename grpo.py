"""GRPO by hand: sample completions, score them under the policy, turn group rewards into a gradient.

Read `group_advantages`, `grpo_loss`, then `update` at the end: that is GRPO. The rest is how to sample and score fast.

Symbols, the same in code, log and README:
    N  questions (groups) in a batch        P  prompt length in tokens (padded on the left of what is not common)
    G  completions of one question          T  completion length in tokens (right-padded)
    B  rows = all completions in a batch    V  vocabulary        H  hidden size

Where this departs from a textbook GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1); 1, 2 and 4 as in SAPO (arXiv:2509.08721):
1. no KL penalty and no reference model;
2. asymmetric clipping, 1-0.2 and 1+0.28 (DAPO's clip-higher, arXiv:2503.14476, section 3.1);
3. the default loss is a mean over all tokens of the batch (DAPO, section 3.3), not a mean of per-completion means;
4. old_logp is the *current* policy's, taken at the start of an update, also for completions another model wrote:
   they are treated as if this policy had sampled them.
With num_iterations=1, the default, the ratio is therefore exactly 1: nothing is clipped, the gradient is that of A log p,
and the value of the loss says little (0 for equally long completions): watch the reward.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

ADVANTAGE_EPSILON = 1e-4  # keeps a group with a tiny spread from blowing up (TRL uses the same value)
MAX_GRAD_NORM = 1.0  # EXERCISE: make the gradient clip a variable
MIN_COMMON_TOKENS = 16  # a common start of all prompts that is shorter is not worth a forward pass of its own
LOGIT_ELEMENTS = 2**25  # (tokens x vocabulary) logits of the update that are made at once: 128 MiB a copy in float32


@dataclass
class Group:
    """One question with all its completions, in token ids: the unit of advantages, of sharing and of the update.

    prompt       (P,) ids
    completions  G lists of ids, each at least one long; the first EOS, where there is one, is the last id
    rewards      (G,) in [0, 1]; whoever builds the group scored them itself
    """

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]

    @property
    def advantages(self) -> list[float]:
        return group_advantages(self.rewards)

    @property
    def is_informative(self) -> bool:
        return is_informative(self.rewards)


# -------- Advantages and loss ---------------------------------------------------------------------------------


def is_informative(rewards: list[float]) -> bool:
    """Whether a group teaches anything: its rewards differ. [1, 1, 1] -> False, [0, 1, 0] -> True."""
    return max(rewards) - min(rewards) > 1e-6


def group_advantages(rewards: list[float]) -> list[float]:
    """A_i = (r_i - mean) / (std + 1e-4) within one group, std with Bessel's correction; zeros for a flat group.

    [1, 0, 0, 1] -> [0.866, -0.866, -0.866, 0.866]        (DeepSeekMath, section 4.1.2; epsilon and correction as in TRL)
    """
    if len(rewards) < 2 or not is_informative(rewards):
        return [0.0] * len(rewards)
    r = torch.tensor(rewards, dtype=torch.float64)  # (G,)
    # EXERCISE (Dr. GRPO, arXiv:2503.20783): drop the division by the standard deviation.
    return ((r - r.mean()) / (r.std(unbiased=True) + ADVANTAGE_EPSILON)).tolist()


def row_weights(lengths: torch.Tensor, loss_type: str, max_new_tokens: int) -> torch.Tensor:
    """How much one token of each completion counts, so that any split into micro-batches sums to the same loss.

    lengths: (B,) tokens of every completion of the *whole* update, flat groups included. Returns (B,) float64.
    dapo: 1 / all tokens · grpo: 1 / (B x own length) · dr_grpo: 1 / (B x max_new_tokens), the length half of Dr. GRPO.
    """
    lengths = lengths.to(torch.float64)
    if loss_type == "dapo":
        return torch.ones_like(lengths) / lengths.sum()
    if loss_type == "grpo":
        return 1.0 / (len(lengths) * lengths)
    if loss_type == "dr_grpo":
        return torch.full_like(lengths, 1.0 / (len(lengths) * max_new_tokens))
    raise ValueError(f"LOSS_TYPE={loss_type!r}: expected dapo, grpo or dr_grpo")


def grpo_loss(logp, old_logp, advantages, mask, weights, clip_low=0.2, clip_high=0.28):
    """Clipped surrogate loss (PPO, arXiv:1707.06347, eq. 7), summed with `row_weights`.

    logp, old_logp, mask: (B, T); advantages, weights: (B,). old_logp=None means "exactly on policy": ratio 1, gradient A.
    Returns (loss, number of clipped tokens), both scalar tensors.
    """
    if old_logp is None:
        old_logp = logp.detach()
    ratio = torch.exp(logp - old_logp)  # (B, T)
    a = advantages.unsqueeze(1)  # (B, 1)
    unclipped = ratio * a
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * a
    token_loss = -torch.min(unclipped, clipped)  # (B, T)
    # EXERCISE (KL penalty): token_loss += beta * (exp(ref_logp - logp) - (ref_logp - logp) - 1); flat groups have one too
    loss = (token_loss * mask * weights.unsqueeze(1)).sum()
    return loss, ((clipped < unclipped) & mask.bool()).sum()


# -------- The model, called in one way everywhere -------------------------------------------------------------


def autocast(model, dtype: torch.dtype):
    """Compute in bf16 where asked for; weights and optimizer stay float32 (a step of 1e-6 is lost in a bf16 weight)."""
    return torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32)


def forward_hidden(model, ids, mask=None, cache=None):
    """Last hidden states (rows, length, H) of `ids` (rows, length), and the KV cache that now contains them.

    mask: (rows, cached + length), 1 = real token, 0 = padding; None where no row has padding before its last real
    token (causality hides what comes after), which keeps the fast causal kernels. Positions count real tokens only.
    """
    past = cache.get_seq_length() if cache is not None else 0
    if mask is None:
        positions = torch.arange(past, past + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    else:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, past:]
    out = model.base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache if cache is not None else DynamicCache(config=model.config),
        use_cache=True,
    )
    return out.last_hidden_state, out.past_key_values


def head_logits(model, hidden):
    """Logits (..., V) in float32 from hidden states (..., H).

    The cast comes before any softmax: log-softmax in bfloat16 is off by 0.025 on average, after the upcast by 0.004.
    """
    return model.get_output_embeddings()(hidden).float()


def check_head(model) -> None:
    """Fail early on models whose logits are more than `head(hidden)` (soft-capped, scaled): their loss would be wrong."""
    ids = torch.ones((1, 2), dtype=torch.long, device=model.device)
    with torch.no_grad():
        ours = head_logits(model, forward_hidden(model, ids)[0])
        theirs = model(input_ids=ids).logits.float()
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
        raise ValueError(
            f"MODEL_NAME: {type(model).__name__} changes its logits after the output layer (soft cap or scaling), "
            "which head_logits() in grpo.py does not do; add it there or choose another model"
        )


def left_pad(prompts: list[list[int]], pad_id: int, device):
    """Prompts as one batch: ids (N, P) and mask (N, P), or None as the mask where all are equally long.

    Padding goes on the left, so that question and completion stay contiguous. [[7], [8, 9]] -> [[pad, 7], [8, 9]].
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, None if mask.all() else mask


def right_pad(rows: list[list[int]], pad_id: int, device):
    """Completions as one batch: ids (B, T) and mask (B, T), True = real token. [[7], [8, 9]] -> [[7, pad], [8, 9]]."""
    width = max(map(len, rows))
    ids = torch.tensor([r + [pad_id] * (width - len(r)) for r in rows], device=device)
    return ids, torch.tensor([[True] * len(r) + [False] * (width - len(r)) for r in rows], device=device)


def counts_slots(model) -> bool:
    """Whether distance in its attention includes padding (sliding windows, ALiBi of MPT): none may stand inside a prompt."""
    return any(DynamicCache(config=model.config).is_sliding) or model.config.model_type in ("gpt_neo", "mpt")


def prefill(model, prompts: list[list[int]], pad_id: int):
    """Run N prompts, each once: last hidden state (N, H), KV cache (N rows) and its mask (N, P), None without padding.

    What all of them begin with (a chat model's system prompt) is run once for all, and its cache repeated.
    """
    common = 0
    for tokens in zip(*(p[:-1] for p in prompts), strict=False):  # position by position; the last of each stays
        if len(set(tokens)) > 1:
            break
        common += 1
    if len(prompts) == 1 or common < MIN_COMMON_TOKENS or counts_slots(model):
        common = 0
    ids, mask = left_pad([p[common:] for p in prompts], pad_id, model.device)
    cache = None
    if common:
        _, cache = forward_hidden(model, torch.tensor([prompts[0][:common]], device=model.device))
        cache.batch_repeat_interleave(len(prompts))
        mask = None if mask is None else F.pad(mask, (common, 0), value=1)
    hidden, cache = forward_hidden(model, ids, mask, cache)
    return hidden[:, -1], cache, mask


# -------- Generation ------------------------------------------------------------------------------------------


def sample_tokens(logits, noise, temperature: float):
    """One token per row by inverting the cumulative distribution: the first id whose cumulative probability > noise.

    logits: (B, V) float32; noise: (B,) uniform in [0, 1). The full softmax at `temperature`, no top-k or top-p: the
    loss scores the same distribution. Taking the noise from outside makes a draw independent of the batch around it.
    """
    cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(-1)  # (B, V)
    target = noise.unsqueeze(1) * cumulative[:, -1:]  # the last entry is 1 up to rounding
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


@torch.no_grad()
def generate(
    model, prompts, num_generations, max_new_tokens, temperature, eos_ids, rng,
    pad_id=0, max_rows=None, dtype=torch.float32, answered=None,
):  # fmt: skip
    """Sample G completions for each of N prompts. Each prompt is prefilled once, then its KV cache is repeated G times.

    prompts: N lists of ids. eos_ids: set of ids that end a completion, as does answered(its ids so far) where that is
    given and true. rng: a CPU torch.Generator.
    Returns N lists of G completions (lists of ids, the EOS included where one was sampled).
    max_rows: completions decoded together (None: all), never a part of a group. The tokens do not depend on it but for
    rounding, because each row has its own column of noise.
    """
    rows = len(prompts) * num_generations
    noise = torch.rand(max_new_tokens, rows, generator=rng)  # on the CPU, so that every device draws the same
    at_once = max(1, (max_rows or rows) // num_generations)  # prompts per batch
    model.eval()
    completions = []
    for first in range(0, len(prompts), at_once):
        batch = prompts[first : first + at_once]
        columns = noise[:, first * num_generations : (first + len(batch)) * num_generations]
        with autocast(model, dtype):
            completions += decode(model, batch, num_generations, temperature, eos_ids, columns, pad_id, answered)
    return [completions[i : i + num_generations] for i in range(0, rows, num_generations)]


def decode(model, prompts, num_generations, temperature, eos_ids, noise, pad_id, answered) -> list[list[int]]:
    """The decoding loop of `generate`: N prompts -> N x G completions. noise: (max_new_tokens, N x G)."""
    device = model.device
    hidden, cache, mask = prefill(model, prompts, pad_id)  # of N rows
    cache.batch_repeat_interleave(num_generations)
    logits = head_logits(model, hidden).repeat_interleave(num_generations, 0)  # (B, V)
    mask = None if mask is None else mask.repeat_interleave(num_generations, 0)  # (B, P)

    steps, rows = noise.shape
    noise = noise.to(device)
    eos = torch.tensor(sorted(eos_ids), device=device)
    out = torch.full((rows, steps), -1, device=device)  # -1: nothing sampled
    alive = torch.arange(rows, device=device)  # which completion each row of the batch is
    running = torch.ones(rows, dtype=torch.bool, device=device)  # is it unfinished? Finished rows leave in bulk
    for step in range(steps):
        token = sample_tokens(logits, noise[step, alive], temperature)  # (rows alive,)
        out[alive, step] = torch.where(running, token, -1)
        running &= ~torch.isin(token, eos)
        if answered is not None:
            rows_so_far = zip(running.tolist(), out[alive, : step + 1].tolist(), strict=True)
            running = torch.tensor([on and not answered(ids) for on, ids in rows_so_far], device=device)
        left = int(running.sum())
        if left == 0 or step == steps - 1:
            break
        if left <= 0.75 * len(alive):  # copying the cache costs about a step: worth it for a quarter of the rows
            cache.batch_select_indices(running.nonzero().squeeze(1))
            alive, token = alive[running], token[running]
            mask = None if mask is None else mask[running]
            running = running[running]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        hidden, cache = forward_hidden(model, token.unsqueeze(1), mask, cache)
        logits = head_logits(model, hidden[:, -1])
    return [[t for t in row if t >= 0] for row in out.tolist()]


# -------- Log-probabilities, with gradient --------------------------------------------------------------------


def token_logps(model, hidden, targets, temperature: float):
    """log p(target) under softmax(logits / temperature), in float32. hidden: (S, H), targets: (S,) -> (S,).

    The temperature must be the one that sampled. More than LOGIT_ELEMENTS logits are made in chunks, and made again in
    the backward pass rather than kept.
    """

    def score(h, y):
        return -F.cross_entropy(head_logits(model, h) / temperature, y, reduction="none")

    chunk = max(1, LOGIT_ELEMENTS // model.config.vocab_size)
    if len(targets) <= chunk:
        return score(hidden, targets)
    pieces = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([checkpoint(score, h, y, use_reentrant=False) for h, y in pieces])


def shared_prompt_logps(model, pairs, temperature: float, pad_id: int = 0):
    """Log-probabilities (B, T) and mask (B, T) of all completions of `pairs` = [(prompt, completions), …].

    A group shares its prompt: it is run once, its KV cache is repeated for each completion *with gradient*, and only the
    completions go through the model again. Exact, and about G times less prompt work than whole sequences.
    """
    device = model.device
    sizes = torch.tensor([len(completions) for _, completions in pairs], device=device)  # (N,)
    rows = [c for _, completions in pairs for c in completions]
    targets, mask = right_pad(rows, pad_id, device)  # (B, T)
    prompt_hidden, cache, attention_mask = prefill(model, [prompt for prompt, _ in pairs], pad_id)  # of N rows
    hidden = prompt_hidden.repeat_interleave(sizes, 0).unsqueeze(1)  # (B, 1, H): scores each completion's first token
    if (more := targets.shape[1] - 1) > 0:
        cache.batch_repeat_interleave(sizes)
        if attention_mask is not None:  # completions are padded on the right: causality alone hides that padding
            attention_mask = F.pad(attention_mask.repeat_interleave(sizes, 0), (0, more), value=1)
        rest, _ = forward_hidden(model, targets[:, :-1], attention_mask, cache)  # (B, T-1, H)
        hidden = torch.cat([hidden, rest], dim=1)  # (B, T, H): position t predicts token t
    logp = torch.zeros(mask.shape, device=device)
    return logp.masked_scatter(mask, token_logps(model, hidden[mask], targets[mask], temperature)), mask


def sequence_logps(model, prompts, completions, temperature: float = 1.0, pad_id: int = 0):
    """The plain path: each prompt + completion as one right-padded row. Log-probabilities (B, T) and mask (B, T).

    Used where every prompt has one completion (the supervised warm start), and as the reference for the path above.
    """
    ids, _ = right_pad([p + c for p, c in zip(prompts, completions, strict=True)], pad_id, model.device)  # (B, P+T)
    _, mask = right_pad(completions, pad_id, model.device)  # (B, T)
    hidden, _ = forward_hidden(model, ids)
    first = torch.tensor([[len(p) - 1] for p in prompts], device=model.device)
    position = torch.arange(ids.shape[1] - 1, device=model.device)
    scored = (position >= first) & (position < first + mask.sum(1, keepdim=True))  # position t predicts token t + 1
    logp = token_logps(model, hidden[:, :-1][scored], ids[:, 1:][scored], temperature)
    return torch.zeros(mask.shape, device=model.device).masked_scatter(mask, logp), mask


# -------- The update ------------------------------------------------------------------------------------------


def micro_batches(groups: list[Group], max_rows: int):
    """Yield micro-batches of at most `max_rows` completions, similar lengths together; a larger group is cut in pieces.

    Each as [(prompt, completions), …] and the index of its rows among all B.
    """
    pieces, first = [], 0
    for group in groups:
        index = range(first, first + len(group.completions))
        first = index.stop
        for start in range(0, len(index), max_rows):
            piece = slice(start, start + max_rows)
            pieces.append((group.prompt, group.completions[piece], index[piece]))
    pieces.sort(key=lambda piece: len(piece[0]) + max(map(len, piece[1])))
    pairs, rows = [], []
    for prompt, completions, index in pieces:
        if len(rows) + len(index) > max_rows:
            yield pairs, torch.tensor(rows)
            pairs, rows = [], []
        pairs.append((prompt, completions))
        rows += index
    yield pairs, torch.tensor(rows)


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has an exception of its own for it; MPS and the CPU's allocator only say so."""
    said = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in said)


def halving_on_oom(attempt, max_rows: int, rows: int, where: str, smallest: int = 1):
    """attempt(max_rows); when memory runs out, again with half as many. Returns (its result, what fitted).

    rows: how many there are, from where the halving starts if max_rows is above. Raises what it caught where even
    `smallest` do not fit.
    """
    while True:
        try:
            return attempt(max_rows), max_rows
        except RuntimeError as error:
            if not is_out_of_memory(error) or min(max_rows, rows) <= smallest:
                raise
        max_rows = max(smallest, (min(max_rows, rows) + 1) // 2)  # outside the handler: the failed attempt is freed
        print(f"out of memory in {where}: again with {max_rows} completions at once", flush=True)


def update(
    model, optimizer, groups, *, max_new_tokens, temperature=1.0, loss_type="dapo", clip_low=0.2, clip_high=0.28,
    num_iterations=1, max_rows=None, pad_id=0, dtype=torch.float32, before_step=lambda: None,
):  # fmt: skip
    """One GRPO update on local and external groups alike; `num_iterations` optimizer steps on the same completions.

    Flat groups cost no forward pass but count in the loss's denominator. max_rows: completions per forward pass; the
    gradient does not depend on it. before_step: called right before the weights change. Returns loss (of the first
    step), clip_fraction (mean), grad_norm (of the last step, before its cut), trained_tokens, max_rows (what fitted).
    """
    lengths = torch.tensor([len(c) for g in groups for c in g.completions])
    weights = row_weights(lengths, loss_type, max_new_tokens)  # over the whole batch, flat groups included
    keep = torch.tensor([g.is_informative for g in groups for _ in g.completions])
    groups = [g for g in groups if g.is_informative]
    weights, lengths = weights[keep], lengths[keep]  # from here on the B rows are those of informative groups
    max_rows = max_rows or max(1, len(lengths))
    stats = {"loss": 0.0, "clip_fraction": 0.0, "grad_norm": 0.0, "trained_tokens": int(lengths.sum()), "max_rows": max_rows}
    if not groups:
        return stats  # no step at all: Adam's momentum alone would move the weights
    advantages = torch.tensor([a for g in groups for a in g.advantages])  # (B,)
    old_logp = None  # on policy, ratio 1
    model.eval()  # dropout off: log-probs of one policy must not depend on chance

    @torch.no_grad()
    def logps_at_start(rows_at_once):
        """The policy before the first step, (B, longest T): needed where a second step will have moved away from it."""
        old = torch.zeros(len(lengths), int(lengths.max()), device=model.device)
        for pairs, rows in micro_batches(groups, rows_at_once):
            with autocast(model, dtype):
                logp, _ = shared_prompt_logps(model, pairs, temperature, pad_id)
            old[rows, : logp.shape[1]] = logp
        return old

    def accumulate(rows_at_once):
        """Gradient of the whole batch, micro-batch by micro-batch; returns (loss, clipped tokens)."""
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(2, dtype=torch.float64)
        for pairs, rows in micro_batches(groups, rows_at_once):
            with autocast(model, dtype):
                logp, mask = shared_prompt_logps(model, pairs, temperature, pad_id)
            old = None if old_logp is None else old_logp[rows, : logp.shape[1]]
            loss, clipped = grpo_loss(logp, old, advantages[rows].to(logp), mask, weights[rows].to(logp), clip_low, clip_high)
            loss.backward()
            total += torch.stack([loss, clipped]).detach().cpu()
        return total.tolist()

    if num_iterations > 1:
        old_logp, max_rows = halving_on_oom(logps_at_start, max_rows, len(lengths), "the update")
    for step in range(num_iterations):
        (loss, clipped), max_rows = halving_on_oom(accumulate, max_rows, len(lengths), "the update")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if not torch.isfinite(norm):
            print("non-finite gradient: this step is skipped", flush=True)
            break
        before_step()
        optimizer.step()
        stats |= {"grad_norm": norm.item(), "loss": stats["loss"] if step else loss}
        stats["clip_fraction"] += clipped / (stats["trained_tokens"] * num_iterations)
    optimizer.zero_grad(set_to_none=True)
    return {**stats, "max_rows": max_rows}
