"""Adaptive top-p selection of tokens by their estimated attention mass: the definition (Twilight's top-p).

Logarithms are to base 2. The kernels have the same three steps:

1. :func:`near_masses` computes the mass of the recent tokens and a correction for the channels that labels leave out.
2. :func:`share_bins` stores each token's share of the mass as one byte.
3. :func:`take` picks the tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..._recent import recent_valid
from ..partial_sums import PartialSums

LOG2E = math.log2(math.e)
INF = float("inf")
STEPS = 8  # bins an octave: a token's share is known to 4 %
NONE = 255  # the bin of tokens that cannot be selected
BINS = 255  # all other bins; the last one holds every share below 2 ** -31.75
MASS_ONE = 1 << 30  # counted masses are integers, so that sums do not depend on the order
LENGTHS = 32  # entries of the histogram: entry 0 is no token or one, entry b is up to 2 ** b tokens
TOTALS = ("walks", "used", "capped", "mass", "worst")  # the first entries of ``totals``; the histogram follows
LARGEST = 1e30  # of logits: differences of infinities are NaN


class Selection(NamedTuple):
    """Selected tokens of each row and KV head, and the estimates that they were selected by.

    Attributes:
        ids: int32 ``[batch, H, n]``: tokens, ascending. Entries after ``count`` are -1, or not written.
        count: int32 ``[batch, H]``, the number of tokens.
        mass: float32 ``[batch, H]``, the estimated share of the attention mass in these and the recent tokens.
        bins: uint8 ``[batch, H, n]``: ``STEPS * -log2(share)`` of each token, rounded down, or ``NONE``. ``None`` from
            a kernel that keeps them to itself.
        cut: int32 ``[batch, H]``: the last bin from which tokens were taken, -1 if none were.
    """

    ids: Tensor
    count: Tensor
    mass: Tensor
    bins: Tensor | None
    cut: Tensor


def logits(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Base-2 logits from products of queries and keys."""
    found = products * scale
    if softcap is not None:
        found = softcap * torch.tanh(found / softcap)
    return found * LOG2E


def near_masses(
    q: Tensor,
    channels: Tensor,
    recent_kv: Tensor,
    rows: Tensor,
    *,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The mass of the recent tokens, and the mean ratio of their true mass to the mass that their labels estimate.

    Labels are some channels of a key. The other channels add noise, which on average makes masses larger. They also add
    a part that all keys share. Without the correction, label masses would not compare with the recent tokens' true
    masses.

    Returns:
        float32 logarithms ``[batch, H, G]`` each. A mass that is not finite counts as 0, a mean as 1.
    """
    batch, heads = recent_kv.shape[:2]
    q = q.float().view(batch, heads, -1, q.shape[-1])
    keys = recent_kv[..., : q.shape[-1]].float()
    at = channels.long()
    own = q.gather(-1, at[:, :, None].expand(-1, -1, q.shape[2], -1))
    labels = keys.gather(-1, at[:, :, None].expand(-1, -1, keys.shape[2], -1))
    true = logits(q @ keys.transpose(-1, -2), scale, softcap)
    over = true - logits(own @ labels.transpose(-1, -2), scale, softcap)
    valid = recent_valid(rows, sinks, recent_kv.shape[2])
    usable, recent = valid[:, None, None], valid.clone()
    recent[:, :sinks] = False
    held = _sum(true.masked_fill(~usable, -INF))
    if sink_logits is not None:
        held = torch.logaddexp2(held, (sink_logits.float() * LOG2E).view(1, heads, -1).expand_as(held))
    mean = _sum(over.masked_fill(~recent[:, None, None], -INF)) - recent.sum(-1).clamp_min(1).log2()[:, None, None]
    return held.masked_fill(~held.isfinite(), -INF), mean.masked_fill(~mean.isfinite(), 0.0)


def share_bins(
    scores: Tensor,
    near: Tensor,
    mean: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    group_reduce: str = "all",
) -> Tensor:
    """The share of the attention mass that each token should hold, as a bin.

    Args:
        scores: float32 ``[batch, Hq, n]``: products with labels, ``-inf`` for tokens that cannot be selected.
        near, mean: from :func:`near_masses`.
        group_reduce: ``"all"``: a token's largest share over the query heads of the group. ``"sum"``: its share of the
            summed masses of these heads.

    Returns:
        uint8 ``[batch, H, n]``.
    """
    held = logits(scores.unflatten(1, near.shape[1:]), scale, softcap).clamp_max(LARGEST)  # [batch, H, G, n]
    held = held.masked_fill(scores.unflatten(1, near.shape[1:]) == -INF, -INF) + mean[..., None]
    whole = torch.logaddexp2(near, _sum(held))  # [batch, H, G]
    if group_reduce == "sum":
        share = _sum(held.transpose(2, 3)) - _sum(whole)[..., None]
    else:
        share = (held - whole[..., None]).nan_to_num(nan=-INF, neginf=-INF).amax(2)
    bins = (-STEPS * share).floor().clamp(0, BINS - 1)
    return bins.masked_fill(~share.isfinite(), NONE).to(torch.uint8)


def take(
    bins: Tensor, *, threshold: float, min_tokens: int, max_tokens: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Take tokens in order of decreasing share, the lower position first within a bin.

    Whole bins are taken until the remaining ones hold at most ``1 - threshold`` of the mass. At least ``min_tokens``
    and at most ``max_tokens`` are taken. A token counts with the share at the middle of its bin.

    Returns:
        A mask ``[batch, H, n]`` of the tokens, then ``count``, ``mass`` and ``cut`` (see :class:`Selection`). Last, a
        mask ``[batch, H]`` of the selections that ``max_tokens`` cut short of the threshold.
    """
    each = torch.arange(BINS, device=bins.device)
    counts = _count(bins)
    held = counts * (-(each + 0.5) / STEPS).exp2()  # float32 [batch, H, BINS]
    left = held.flip(-1).cumsum(-1).flip(-1)  # from each bin on
    so_far = counts.cumsum(-1)
    enough = torch.where(left > 1 - threshold, counts, 0).sum(-1)
    live = so_far[..., -1]
    wanted = enough.clamp_min(min_tokens)
    count = torch.minimum(wanted if max_tokens is None else wanted.clamp_max(max_tokens), live)
    cut = (so_far < count[..., None]).sum(-1)
    cut = torch.where(count > 0, cut, -1)
    before = torch.where(each < cut[..., None], counts, 0).sum(-1)
    tie = bins == cut[..., None]
    taken = (bins < cut[..., None]) | (tie & (tie.cumsum(-1) <= (count - before)[..., None]))
    at = cut.clamp_min(0)[..., None]
    over = (counts.gather(-1, at)[..., 0] - (count - before)) * (-(at[..., 0] + 0.5) / STEPS).exp2()
    after = torch.nn.functional.pad(left, (0, 1)).gather(-1, cut[..., None] + 1)[..., 0]
    mass = 1 - torch.where(cut >= 0, after + over, after)
    return taken, count.int(), mass.clamp(0, 1).float(), cut.int(), count < torch.minimum(enough, live)


def mass_select(
    scores: Tensor,
    q: Tensor,
    channels: Tensor,
    recent_kv: Tensor,
    rows: Tensor,
    *,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    threshold: float,
    min_tokens: int,
    max_tokens: int | None = None,
    group_reduce: str = "all",
    totals: Tensor | None = None,
    stored: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    sums: PartialSums | None = None,
) -> Selection:
    """Select tokens so that these and the recent ones cover an estimated ``threshold`` of the attention mass.

    The mass of a token is estimated from its label and corrected by the mean ratio of :func:`near_masses`. With
    ``group_reduce="all"`` a token's share is the largest one over the query heads of the group. The sum of these shares
    is an upper bound for each head, so no head misses more than ``1 - threshold``.

    Args:
        scores: float32 ``[batch, Hq, n]`` from :func:`..token_score.token_score` for all blocks, ``reduce="none"``.
            Scores after a row's sealed tokens are not read.
        q, recent_kv, rows, sinks, scale, softcap, sink_logits: as in :func:`...attention.sparse_decode.sparse_decode`.
        channels: int32 ``[batch, H, r]``, the label channels.
        threshold, min_tokens, max_tokens: see :func:`take`.
        group_reduce: see :func:`share_bins`.
        totals: int64 ``[len(TOTALS) + LENGTHS]``, updated in place. Counts selections (one per row and KV head),
            tokens, and selections that ``max_tokens`` ended. Then come the sum of the estimated masses and the largest
            estimated gap, both times ``MASS_ONE``, and a histogram of the lengths. Rows without tokens are not counted.
        stored: int32 ``[batch]``: of each row only so many tokens have their key in ``recent_kv`` yet; the others count
            as no mass. None: all have.
        out: where ``ids`` (its rows may be any multiple of 16 entries apart) and ``count`` (contiguous) are written.
            Entries of ``ids`` after ``count`` may stay as they were.
        sums: made by the kernel that computed ``scores``, of the same ``recent_kv``, ``stored`` and ``scale``. A kernel
            takes them in place of its own.
    """
    bins = bins_of(
        scores,
        q,
        channels,
        recent_kv,
        rows,
        sinks=sinks,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        group_reduce=group_reduce,
        stored=stored,
    )
    taken, count, mass, cut, capped = take(bins, threshold=threshold, min_tokens=min_tokens, max_tokens=max_tokens)
    n = bins.shape[-1]
    column = torch.arange(n, dtype=torch.int32, device=bins.device).expand_as(bins)
    at = torch.where(taken, column, n).sort(dim=-1).values
    ids = torch.where(at == n, -1, at).int()
    if out is not None:
        ids, count = out[0].copy_(ids), out[1].copy_(count)
    if totals is not None:
        add_up(totals, rows, count, mass, capped)
    return Selection(ids, count, mass, bins, cut)


def bins_of(
    scores: Tensor,
    q: Tensor,
    channels: Tensor,
    recent_kv: Tensor,
    rows: Tensor,
    *,
    sinks: int,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    group_reduce: str,
    stored: Tensor | None,
) -> Tensor:
    """The bins of :func:`mass_select`, with its arguments: uint8 ``[batch, H, n]``."""
    after = torch.arange(scores.shape[-1], device=scores.device) >= rows[:, 1:, None]
    scores = scores.masked_fill(after, -INF)
    there = rows if stored is None else torch.stack((torch.minimum(rows[:, 0], stored), rows[:, 1]), dim=1)
    near, mean = near_masses(
        q, channels, recent_kv, there, sinks=sinks, scale=scale, softcap=softcap, sink_logits=sink_logits
    )
    return share_bins(scores, near, mean, scale=scale, softcap=softcap, group_reduce=group_reduce)


def add_up(totals: Tensor, rows: Tensor, count: Tensor, mass: Tensor, capped: Tensor) -> None:
    """Count selections of ``count``, ``mass`` and ``capped [batch, H]`` in ``totals``, see :func:`mass_select`."""
    there = rows[:, 0] > 0
    gap, lengths = ((1.0 - mass[there]) * MASS_ONE).long(), (count[there] - 1).clamp_min(0)
    for i, value in enumerate((gap.numel(), count.sum(), capped.sum(), (MASS_ONE - gap).sum())):
        totals[i] += value
    first = len(TOTALS)
    if gap.numel():
        totals[first - 1] = torch.maximum(totals[first - 1], gap.max())
    lengths = torch.where(lengths > 0, lengths.clamp_min(1).double().log2().floor().long() + 1, 0)
    totals[first:] += torch.bincount(lengths.flatten(), minlength=LENGTHS)


def _count(bins: Tensor) -> Tensor:
    """Tokens of each bin, int64 ``[batch, H, BINS]``."""
    counts = torch.zeros(*bins.shape[:2], NONE + 1, dtype=torch.int64, device=bins.device)
    counts.scatter_add_(-1, bins.long(), torch.ones_like(bins, dtype=torch.int64))
    return counts[..., :BINS]


def _sum(x: Tensor) -> Tensor:
    """Base-2 logarithm of the sum over the last dimension, from base-2 logarithms."""
    return (x / LOG2E).logsumexp(-1) * LOG2E if x.shape[-1] else x.new_full(x.shape[:-1], -INF)
