"""Attention to blocks in order of their rank until enough mass is seen: the definition (PSA, Algorithm 1).

Three operators on the same buffers, so that the walk can be cut into rounds of any size: attention within each block
(:func:`attend`), the walk over what the blocks hold (:func:`verify`), and the sum of the blocks before the place where
it stopped (:func:`merge`). Masses are logarithms to base 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..sparse_decode.reference import gather, gather_paged, softmax, sparse_decode, values_of
from .state import BINS, MASS_ONE, TOTALS, WalkState, next_blocks, some_more

LOG2E = math.log2(math.e)
INF = float("inf")
NO_LIMIT = 1 << 30  # more blocks than there are
LARGEST = 1e30  # logarithm to base 2 of what a block may be expected to hold: differences of infinities are NaN
MOST = 100.0  # logarithm to base 2 of what is left, relative to the largest mass seen: more makes no difference


def near_parts(near: int, block_size: int) -> int:
    """Parts that the recent buffer of ``near`` entries is cut into: they come before the blocks."""
    return -(-near // block_size)


def attend(
    q: Tensor,
    kv: Tensor,
    flags: Tensor,
    block_table: Tensor,
    ids: Tensor,
    recent_kv: Tensor,
    recent_valid: Tensor,
    limits: Tensor,
    acc: Tensor | None,
    lse: Tensor,
    *,
    near: bool,
    scale: float,
    softcap: float | None = None,
    pages: Tensor | None = None,
    page_ids: Tensor | None = None,
    from_host: Tensor | None = None,
) -> None:
    """Attention within each block of one round, for every query head by itself.

    Args:
        q, kv, flags, block_table, recent_kv, recent_valid, scale, softcap, pages, page_ids, from_host: as in
            ``sparse_decode.reference`` with ``granularity="block"``; ``page_ids`` are those of ``ids``.
        ids: int32 ``[batch, H, n]``, blocks in order of their rank, -1 for none.
        limits: int32 ``[2, batch, H]``: ranks to read, ``limits[0]`` to ``limits[1] - 1`` (those below n).
        acc: float32 ``[batch, H, P + n, G, Dv]``, written: the attention within the parts of the recent buffer (P parts
            of ``block_size`` entries, if ``near``) and within the blocks of these ranks. Zeros for what is empty. None:
            masses alone, for latents: see :func:`attend_used`.
        lse: float32 ``[batch, H, P + n, G]``, written: logarithm to base 2 of the sum of ``exp(logit)`` over its
            tokens; ``-inf`` for what is empty, and where a logit is NaN or infinitely large, so that a walk can go on
            by the others (its result is NaN once it uses such a block).
    """
    batch, heads, n = ids.shape
    size, dk = kv.shape[2], q.shape[-1]
    parts = lse.shape[2] - n
    q = q.float().view(batch, heads, -1, dk)

    def within(stored: Tensor, usable: Tensor) -> tuple[Tensor | None, Tensor]:
        """Of ``stored [batch, H, m * size, Dk + Dv]``."""
        stored, usable = stored.float().unflatten(2, (-1, size)), usable.unflatten(2, (-1, size))
        logits = torch.einsum("bhgd,bhmtd->bhmgt", q, stored[..., :dk]) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~usable[:, :, :, None], -INF)
        mass = logits.logsumexp(-1) * LOG2E
        mass = mass.masked_fill(~mass.isfinite(), -INF)
        if acc is None:
            return None, mass
        # What is not attended may hold anything, NaN included: 0 x NaN must not reach the sum.
        values = values_of(stored, dk, acc.shape[-1]).masked_fill(~usable[..., None], 0.0)
        return softmax(logits) @ values, mass

    if near and parts:
        missing = parts * size - recent_kv.shape[2]
        stored = torch.nn.functional.pad(recent_kv, (0, 0, 0, missing))
        usable = torch.nn.functional.pad(recent_valid, (0, missing))[:, None].expand(-1, heads, -1)
        found = within(stored, usable)
        for held, new in zip((acc, lse), found):
            if held is not None:
                held[:, :, :parts] = new
    low, high = limits.clamp_max(n)
    busy = low < high
    if not bool(busy.any()):
        return
    first, last = int(low[busy].min()), int(high[busy].max())
    rank = torch.arange(first, last, device=ids.device)
    mine = (rank >= low[..., None]) & (rank < high[..., None])  # [batch, H, m]
    these = ids[..., first:last].masked_fill(~mine, -1)
    if pages is None:
        stored, usable = gather(kv, flags, block_table, these, "block", heads, size)
        at_home = usable
    else:
        page_ids = page_ids[..., first:last].masked_fill(~mine, -1)
        stored, usable, at_home = gather_paged(kv, flags, block_table, these, "block", pages, page_ids)
    if from_host is not None:
        from_host += at_home.sum(-1).to(from_host.device)
    found = within(stored.to(q.device), usable.to(q.device))
    for held, new in zip((acc, lse), found):
        if held is None:
            continue
        at = held[:, :, parts + first : parts + last]
        wanted = mine.view(*mine.shape, *(1,) * (new.ndim - 3)).to(at.device)
        at.copy_(torch.where(wanted, new, at))


def expect(
    logits: Tensor,
    ids: Tensor,
    tokens: Tensor,
    *,
    logit_scale: float = 1.0,
    group_reduce: str = "all",
) -> tuple[Tensor, Tensor, Tensor]:
    """What blocks hold if all their tokens have their block's logit; once a step, for all its verifications.

    Args:
        logits: float32 ``[batch, Hq, n]``: those of each block (by id), to be multiplied by ``logit_scale``. NaN counts
            as ``-inf``, and more than ``LARGEST`` as that.
        ids: int32 ``[batch, H, n]``, blocks in order of their rank.
        tokens: int32 ``[batch, H, n]``, selectable tokens of these; 0 for no block.
        group_reduce: with ``"sum"`` all heads of a group get their sum.

    Returns:
        Logarithms to base 2, float32 ``[batch, H, n, G]`` each, ``-inf`` for nothing: ``tokens * exp(logit)`` of each
        block, and its sum over those behind it; and int32 ``[batch, H]``, how many blocks have tokens. The kernel may
        take a sum for nothing if it is less than ``2 ** -120`` of another block.
    """
    heads, n = ids.shape[1:]
    logits = logits.unflatten(1, (heads, -1)).transpose(2, 3)  # [batch, H, n, G]
    at = ids.clamp_min(0).long()[..., None].expand(-1, -1, -1, logits.shape[3])
    expected = logits.gather(2, at) * (logit_scale * LOG2E)
    expected = expected + tokens.clamp_min(1).log2()[..., None]
    expected = expected.masked_fill((tokens[..., None] == 0) | expected.isnan(), -INF).clamp_max(LARGEST)
    if group_reduce == "sum":
        expected = _over_heads(expected, 3).expand_as(expected).contiguous()
    left = (expected / LOG2E).flip(2).logcumsumexp(2).flip(2) * LOG2E if n else expected  # with the block itself
    behind = torch.nn.functional.pad(left[:, :, 1:], (0, 0, 0, min(n, 1)), value=-INF)
    return expected, behind, (tokens > 0).sum(-1, dtype=torch.int32)


def verify(
    lse: Tensor,
    tokens: Tensor,
    state: WalkState,
    *,
    parts: int,
    threshold: float,
    group_reduce: str = "all",
    min_blocks: int = 1,
    max_blocks: int | None = None,
    last: bool = True,
    certain: bool = True,
    sink_logits: Tensor | None = None,
    estimate: str = "scores",
    expected: Tensor | None = None,
    behind: Tensor | None = None,
    live: Tensor | None = None,
) -> None:
    """Walk over the blocks that have been read, and stop where enough mass is seen.

    After each block, for each query head (``AS(b)`` is the sum of ``exp(logit)`` over the block's tokens)::

        AS_acc += AS(b)
        P = AS_acc / (AS_acc + AS_left)

    and a KV head stops when ``P > threshold`` for all its query heads. Sinks and recent tokens, and learned sinks, are
    part of ``AS_acc`` from the beginning. ``AS_left`` is, by ``estimate``,

    * ``"as_min"`` (PSA): ``AS_min * T_left``, with ``AS_min = min(AS_min, AS(b) / tokens(b))`` and
      ``T_left -= tokens(b)``. Blocks count by their selectable tokens, which for full blocks is what PSA writes: a
      block that holds padding or sinks would make ``AS_min`` too small otherwise.
    * ``"bound"``: the sum of ``tokens(b) * exp(logit(b))`` over the blocks left, for logits that no token of a block
      exceeds.
    * ``"scores"``: this sum times the mean of ``AS(b) / (tokens(b) * exp(logit(b)))`` over the blocks read, for logits
      that are as good as a guess (the mean-of-ratios estimator of survey sampling; Cochran, Sampling Techniques,
      chapter 6).

    Where what has been read is not enough, the walk goes on with blocks of the least mass seen (``"bound"``: of none):
    where that stops, reading for certain suffices (a block that holds more raises ``AS_acc``, one that holds less
    lowers ``AS_min``). So a few rounds reach the end of every walk. With ``"scores"`` nothing but reading all suffices
    for certain, since a block that holds more than expected raises ``AS_left``; where it stops if all of them hold what
    is expected is what the next round reads, and a little more.

    Args:
        lse: as :func:`attend` has written it: ``parts`` near parts, then the blocks below ``limits[1]``.
        tokens: int32 ``[batch, H, n]``, selectable tokens of the blocks in order of their rank; 0 for no block.
        state: ``limits`` become the next round's; rows that have stopped get an empty one, and ``used`` and ``mass``.
        threshold: share at which to stop.
        group_reduce: ``"all"``; or ``"sum"``: masses are added up over the query heads.
        min_blocks: do not stop before.
        max_blocks: stop there whatever has been seen.
        last: there is no next round: stop at the end of what has been read.
        certain: the next round reads as many blocks as suffice for certain; otherwise at most as many again as have
            been read, and 16 (``"scores"``: as many as should suffice, and :func:`..state.some_more`).
        sink_logits: ``[Hq]`` logits of learned sinks.
        estimate: ``"as_min"``, ``"bound"`` or ``"scores"``; the latter two need those of :func:`expect`.
        expected, behind, live: of :func:`expect`, with the same ``group_reduce``.
    """
    batch, heads, n = tokens.shape
    group = lse.shape[-1]
    low, high = state.limits
    running = low < high
    live = (tokens > 0).sum(-1) if live is None else live
    cap = live if max_blocks is None else live.clamp_max(max_blocks)
    high = torch.minimum(high, cap)
    known = (torch.arange(n, device=lse.device) < high[..., None])[..., None]  # [batch, H, n, 1]
    near, blocks = lse[:, :, :parts], lse[:, :, parts:].masked_fill(~known, -INF)
    if sink_logits is not None:
        sinks = (sink_logits.float() * LOG2E).view(1, heads, 1, group).expand(batch, -1, -1, -1)
        near = torch.cat((near, sinks), dim=2)
    if group_reduce == "sum":
        near, blocks = _over_heads(near, 3), _over_heads(blocks, 3)
        expected, behind = (x if x is None else x[..., :1] for x in (expected, behind))
    base = torch.cat([near, blocks], dim=2).amax(2, keepdim=True)  # [batch, H, 1, G or 1]
    base = base.masked_fill(base == -INF, 0.0)

    count = tokens[..., None].float()
    held = (blocks - base).exp2()  # [batch, H, n, G or 1]
    reads = torch.where(known, held, 0.0)
    if estimate == "as_min":
        density = (held / count.clamp_min(1)).masked_fill(~known, INF)
        least = density.amin(2, keepdim=True) if n else density.sum(2, keepdim=True)  # of all that has been read
        reads = torch.where(known, held, least.nan_to_num(posinf=0.0) * count)
        rest = density.cummin(2).values * (count.sum(2, keepdim=True) - count.cumsum(2)) if n else held
    else:
        rest = behind
        if estimate == "scores":
            rest = rest + _trust(blocks, expected, known, high)
        rest = (rest - base).clamp_max(MOST).exp2()
    seen = (near - base).exp2().sum(2, keepdim=True) + reads.cumsum(2)
    whole = seen + rest
    if estimate == "scores" and n:  # beyond what has been read the whole stays what is expected there
        end = (high - 1).clamp_min(0).long()[..., None, None].expand(-1, -1, 1, whole.shape[3])
        whole = torch.where(known, whole, whole.gather(2, end))
        seen = torch.where(known, seen, whole - rest)
    share = torch.where(whole > 0, seen / whole, 1.0).amin(3)  # [batch, H, n]
    enough = (share > threshold) & (torch.arange(n, device=lse.device) + 1 >= min_blocks)
    first = torch.where(enough.any(-1), enough.int().argmax(-1), n) + 1 if n else torch.ones_like(live)
    reach = torch.minimum(first, cap)
    stops = (reach <= high) | (high >= cap) | last
    used = torch.minimum(reach, high)
    at = (used - 1).clamp_min(0).long()[..., None]
    found = torch.where(used > 0, share.gather(-1, at)[..., 0], 1.0) if n else torch.ones_like(state.mass)
    if estimate == "scores":
        more = cap if certain else some_more(high, reach)
    else:
        more = cap if certain else high + high + 16
        more = torch.minimum(more, reach + 2)  # two more than what suffices, for the roundings
    onward = torch.minimum(more, cap).int()
    ended = running & stops
    state.used.copy_(torch.where(ended, used, state.used))
    state.mass.copy_(torch.where(ended, found, state.mass))
    high = high.int()
    state.limits[0] = torch.where(running, high, state.limits[0])
    state.limits[1] = torch.where(running, torch.where(stops, high, onward), state.limits[1])


def _over_heads(x: Tensor, dim: int) -> Tensor:
    """Logarithms of the sums over the query heads, which remain as one."""
    return (x / LOG2E).logsumexp(dim, keepdim=True) * LOG2E


def _trust(blocks: Tensor, expected: Tensor, known: Tensor, high: Tensor) -> Tensor:
    """Logarithm of the mean of what the blocks up to each hold over what was expected; beyond ``high`` as there."""
    if not blocks.shape[2]:
        return blocks
    ratio = torch.where(known & (expected > -INF), blocks - expected, -INF)
    most = ratio.amax(2, keepdim=True)
    most = most.masked_fill(most == -INF, 0.0)
    read = torch.minimum(torch.arange(1, blocks.shape[2] + 1, device=blocks.device), high[..., None].clamp_min(1))
    return ((ratio - most).exp2().cumsum(2) / read[..., None]).log2() + most


def attend_used(
    q: Tensor,
    kv: Tensor,
    flags: Tensor,
    block_table: Tensor,
    ids: Tensor,
    recent_kv: Tensor,
    recent_valid: Tensor,
    state: WalkState,
    out: Tensor,
    **named,
) -> None:
    """Attention over recent buffer and used blocks together, to ``out``: of latents, which :func:`attend` does not sum.

    ``named`` are further arguments of ``sparse_decode.reference`` with ``granularity="block"``.
    """
    args = (q, kv, flags, block_table, ids, recent_kv, recent_valid)
    out.copy_(sparse_decode(*args, granularity="block", value_dim=out.shape[-1], sinks=0, used=state.used, **named))


def _sum(acc: Tensor, lse: Tensor, tokens: Tensor, state: WalkState, out: Tensor, sink_logits: Tensor | None) -> None:
    """The sum of the parts of the recent buffer and of the used blocks, to ``out``."""
    _, heads, n = tokens.shape
    parts, group = lse.shape[2] - n, lse.shape[3]
    most = parts + int(state.used.max()) if n else parts
    rank = torch.arange(-parts, most - parts, device=lse.device)
    taken = (rank < state.used[..., None])[..., None]  # [batch, H, m, 1]
    part = lse[:, :, :most].masked_fill(~taken, -INF)
    base = part.amax(2, keepdim=True)
    if sink_logits is not None:
        sinks = (sink_logits.float() * LOG2E).view(1, heads, 1, group)
        base = torch.maximum(base, sinks)
    base = base.masked_fill(base == -INF, 0.0)
    weight = (part - base).exp2()
    total = weight.sum(2)
    if sink_logits is not None:
        total = total + (sinks - base).exp2()[:, :, 0]
    summed = (weight[..., None] * acc[:, :, :most].masked_fill(~taken[..., None], 0.0)).sum(2)
    out.copy_((summed / torch.where(total > 0, total, 1.0)[..., None]).flatten(1, 2))


def merge(
    acc: Tensor | None,
    lse: Tensor,
    ids: Tensor,
    tokens: Tensor,
    recent_valid: Tensor,
    state: WalkState,
    out: Tensor | None,
    *,
    threshold: float,
    max_blocks: int | None = None,
    sink_logits: Tensor | None = None,
    attended: Tensor | None = None,
) -> None:
    """Attention over recent buffer and used blocks together; counts the walk and sets up the next one.

    Args:
        acc, lse, ids, tokens, recent_valid, threshold, max_blocks, sink_logits: as before.
        state: ``used`` blocks are merged; ``totals``, ``limits`` and ``chosen`` are written.
        out: ``[batch, Hq, Dv]``, written. A row with nothing to attend to gives zeros. Without ``acc`` there is none.
        attended: int64 ``[batch, H]``; the number of attended tokens is added to it.
    """
    n = tokens.shape[2]
    if acc is not None:
        _sum(acc, lse, tokens, state, out, sink_logits)
    used, read = state.used, state.limits[1]
    if attended is not None:
        counted = torch.where(torch.arange(n, device=tokens.device) < used[..., None], tokens, 0).sum(-1)
        attended += counted + recent_valid.sum(-1)[:, None]
    live = (tokens > 0).sum(-1)
    capped = (live > used) & (state.mass <= threshold) & (used == (max_blocks or -1))
    gap = ((1.0 - state.mass) * MASS_ONE).long()
    first = len(TOTALS)
    counts = (used.numel(), used.sum(), read.sum(), capped.sum(), (MASS_ONE - gap).sum())
    for at, value in enumerate(counts):
        state.totals[at] += value
    state.totals[first - 1] = torch.maximum(state.totals[first - 1], gap.max())
    bins = (used - 1).clamp_min(0)
    bins = torch.where(bins > 0, bins.float().log2().floor().long() + 1, 0).clamp_max(BINS - 1)
    state.totals[first:] += torch.bincount(bins.flatten(), minlength=BINS)
    state.limits[1] = next_blocks(used).clamp_max(max_blocks or NO_LIMIT)
    state.limits[0] = 0
    if state.chosen is not None:
        k = state.chosen.shape[-1]
        front = torch.nn.functional.pad(ids[..., :k], (0, max(0, k - n)), value=-1)
        state.chosen.copy_(front.masked_fill(torch.arange(k, device=ids.device) >= state.limits[1][..., None], -1))
