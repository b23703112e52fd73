"""Adaptive top-p selection of tokens by their estimated attention mass: the kernels.

A row's scores are cut into chunks, one program each. A token's share needs the sum over the whole row, and its position
in the result needs the counts of all chunks. There are therefore three launches: sums, bins, and the ids. From the
second launch on a token is one byte, and 255 counts per chunk determine the cut, so nothing is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._device import programs
from ..._dispatch import require_dense_rows, require_each_row, require_rows
from ..._layout import empty_parts, empty_rows
from ..._operands import Query, Rows, Tokens, batch_and_head, operand, row_ptr
from ..._overlap import launch, release, wait
from ..._paged import load_row
from ..topk_select.keys import readable
from . import reference
from .cluster import select_clusters
from .reference import LENGTHS, TOTALS, Selection
from .sums import Sums, chunk_logits, mass_select_sum_kernel, whole_mass

CHUNKS, WARPS = (512, 4096), 8  # least and most scores of a program; its warps
PROGRAMS = 512  # per launch on an H200, some four per SM, as far as CHUNKS allow
NEAR = 64  # recent tokens at once
HEADS_AT_ONCE = 16  # query heads of a program over the recent tokens
SLAB = 64  # channels at once there
FEW, MOST = 32, 256  # chunks of a row whose sums are read at once; only two variants, as each is compiled separately

STEPS, NONE, BINS = tl.constexpr(reference.STEPS), tl.constexpr(reference.NONE), tl.constexpr(reference.BINS)
MASS_ONE, FIRST, LONGEST = tl.constexpr(reference.MASS_ONE), tl.constexpr(len(TOTALS)), tl.constexpr(LENGTHS - 1)
ALL = tl.constexpr(256)  # bins, including that of unselectable tokens


@triton.jit(do_not_specialize=["rows", "n", "chunks"])
def mass_select_bin_kernel(
    scores,
    rows,
    sums,
    bins,
    p_counts,
    n,
    chunks,
    scale,
    softcap,
    SUM: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BC: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """The bin of each token of one chunk, and how many tokens each bin has there."""
    wait(PDL)
    i_chunk, i_row = tl.program_id(0), tl.program_id(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    o_n = i_chunk * N + tl.arange(0, N)
    live = tl.minimum(n, load_row(rows, i_batch)[1])
    mine = tl.cdiv(live, N)  # chunks of this row
    if i_chunk >= mine:
        tl.store(row_ptr(bins, i_batch, i_head) + o_n, tl.full([N], NONE, tl.uint8), mask=o_n < readable(n, True))
        return
    m_n = o_n < live
    all_heads = tl.full([], float("-inf"), tl.float32)
    if SUM:
        for i_g in range(0, GROUP):
            _, whole = whole_mass(sums, i_row * GROUP + i_g, mine, chunks, BC)
            base = tl.maximum(all_heads, whole)
            base = tl.where(base == float("-inf"), 0.0, base)
            all_heads = base + tl.log2(tl.exp2(all_heads - base) + tl.exp2(whole - base))
    b_share = tl.full([N], float("-inf"), tl.float32)
    for i_g in range(0, GROUP):
        mean, whole = whole_mass(sums, i_row * GROUP + i_g, mine, chunks, BC)
        b_l = chunk_logits(row_ptr(scores, i_batch, i_head * GROUP + i_g) + o_n, m_n, scale, softcap) + mean
        if SUM:
            b_l = b_l - all_heads
            b_base = tl.maximum(b_share, b_l)
            b_base = tl.where(b_base == float("-inf"), 0.0, b_base)
            b_share = b_base + tl.log2(tl.exp2(b_share - b_base) + tl.exp2(b_l - b_base))
        else:
            b_l = b_l - whole
            b_share = tl.maximum(b_share, tl.where(b_l == b_l, b_l, float("-inf")))
    m_live = tl.abs(b_share) < float("inf")
    b_bin = tl.floor(tl.where(m_live, b_share, 0.0) * -STEPS)
    b_bin = tl.minimum(tl.maximum(b_bin, 0.0), BINS - 1.0).to(tl.int32)
    b_bin = tl.where(m_live, b_bin, NONE)  # [N]
    tl.store(row_ptr(bins, i_batch, i_head) + o_n, b_bin.to(tl.uint8), mask=o_n < readable(n, True))
    release(PDL)
    p_to = p_counts + (i_row.to(tl.int64) * chunks + i_chunk) * ALL
    tl.store(p_to + tl.arange(0, ALL), tl.histogram(b_bin, ALL))


@triton.jit(do_not_specialize=["rows", "n", "chunks"])
def mass_select_take_kernel(
    bins,
    rows,
    p_counts,
    ids,
    count,
    mass,
    cut,
    totals,
    n,
    chunks,
    left,
    least,
    most,
    HEADS: tl.constexpr,
    BC: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the ids that one chunk contributes: bins until what the others hold is at most ``left``."""
    wait(PDL)
    i_chunk, i_row = tl.program_id(0), tl.program_id(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    o_n = i_chunk * N + tl.arange(0, N)
    p_ids = row_ptr(ids, i_batch, i_head)
    tokens, sealed = load_row(rows, i_batch)
    mine = tl.cdiv(tl.minimum(n, sealed), N)
    if i_chunk >= tl.maximum(mine, 1):  # the first chunk tells how the row stands
        tl.store(p_ids + o_n, tl.full([N], -1, tl.int32), mask=o_n < readable(n, True))
        return
    o_bin = tl.arange(0, ALL)
    p_row = p_counts + i_row.to(tl.int64) * chunks * ALL
    b_all, b_earlier = tl.zeros([ALL], tl.int32), tl.zeros([ALL], tl.int32)
    for i in range(0, mine, BC):
        o_c = i + tl.arange(0, BC)
        b_some = tl.load(p_row + o_c[:, None] * ALL + o_bin[None, :], mask=(o_c < mine)[:, None], other=0)
        b_all += tl.sum(b_some, 0)  # [ALL]
        b_earlier += tl.sum(tl.where((o_c < i_chunk)[:, None], b_some, 0), 0)
    b_all = tl.where(o_bin < BINS, b_all, 0)
    b_each = tl.exp2((o_bin + 0.5) / -STEPS)
    b_left = tl.cumsum(b_all * b_each, 0, reverse=True)  # mass from each bin on
    enough = tl.sum(tl.where(b_left > left, b_all, 0), 0)
    live = tl.sum(b_all, 0)
    taken = tl.minimum(tl.minimum(tl.maximum(enough, least), most), live)
    last = tl.sum((tl.cumsum(b_all, 0) < taken).to(tl.int32), 0)
    last = tl.where(taken > 0, last, -1)
    need = taken - tl.sum(tl.where(o_bin < last, b_all, 0), 0)

    above = tl.sum(tl.where(o_bin < last, b_earlier, 0), 0)
    ties = tl.sum(tl.where(o_bin == last, b_earlier, 0), 0)
    b_bin = tl.load(row_ptr(bins, i_batch, i_head) + o_n, mask=o_n < readable(n, True), other=NONE).to(tl.int32)  # [N]
    m_above, m_tie = b_bin < last, b_bin == last
    b_above = above + tl.cumsum(m_above.to(tl.int32), 0)
    b_ties = ties + tl.cumsum(m_tie.to(tl.int32), 0)
    m_take = m_above | (m_tie & (b_ties <= need))
    release(PDL)
    tl.store(p_ids + b_above + tl.minimum(b_ties, need) - 1, o_n, mask=m_take)
    tl.store(p_ids + o_n, tl.full([N], -1, tl.int32), mask=(o_n >= taken) & (o_n < readable(n, True)))
    if i_chunk == 0:
        over = tl.sum(tl.where(o_bin == last, b_all - need, 0) * b_each, 0)
        held = 1.0 - (tl.sum(tl.where(o_bin > last, b_all * b_each, 0.0), 0) + over)
        held = tl.minimum(tl.maximum(held, 0.0), 1.0)
        tl.store(count + i_row, taken)
        tl.store(mass + i_row, held)
        tl.store(cut + i_row, last)
        if totals is not None:  # noqa: SIM102 (decided when the kernel is compiled)
            if tokens > 0:
                gap = ((1.0 - held) * MASS_ONE).to(tl.int64)
                length = tl.sum((taken > (1 << tl.arange(0, 32).to(tl.int64))).to(tl.int32), 0)  # up to 2 ** length
                tl.atomic_add(totals, 1, sem="relaxed")
                tl.atomic_add(totals + 1, taken.to(tl.int64), sem="relaxed")
                tl.atomic_add(totals + 2, (taken < tl.minimum(enough, live)).to(tl.int64), sem="relaxed")
                tl.atomic_add(totals + 3, -gap + MASS_ONE, sem="relaxed")
                tl.atomic_max(totals + 4, gap, sem="relaxed")
                tl.atomic_add(totals + FIRST + tl.minimum(length, LONGEST), 1, sem="relaxed")


def _chunk(n: int, scores: torch.Tensor) -> int:
    """Scores of a program, of ``n`` in all."""
    return min(max(triton.next_power_of_2(triton.cdiv(n, programs(PROGRAMS, scores))), CHUNKS[0]), CHUNKS[1])


def mass_select(
    scores,
    q,
    channels,
    recent_kv,
    rows,
    *,
    sinks,
    scale,
    softcap=None,
    sink_logits=None,
    threshold,
    min_tokens,
    max_tokens=None,
    group_reduce="all",
    totals=None,
    stored=None,
    out=None,
    sums=None,
    config=None,
):
    """As ``reference.mass_select``; ``config``: scores of a program, a power of two, with these kernels only."""
    require_dense_rows(scores=scores, channels=channels, recent_kv=recent_kv, sink_logits=sink_logits)
    batch, heads = recent_kv.shape[:2]
    require_rows(rows, batch)
    if stored is not None:
        require_each_row(batch, None, stored=stored)
    group, n, lists, device = q.shape[1] // heads, scores.shape[-1], batch * heads, scores.device
    size = config or _chunk(n * lists, scores)
    chunks = triton.cdiv(n, size)
    shape = (batch, heads)

    def empty(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if out is None:
        out = empty_rows((*shape, n), torch.int32, device), empty(torch.int32)
    ids, count = out
    found = Selection(ids, count, empty(torch.float32), None, empty(torch.int32))
    if sums is not None and config is None and softcap is None and group_reduce == "all":
        limits = {"threshold": threshold, "min_tokens": min_tokens, "max_tokens": max_tokens}
        near = {"sinks": sinks, "sink_logits": sink_logits}
        written = {"ids": ids, "count": count, "mass": found.mass, "cut": found.cut, "totals": totals}
        if select_clusters(scores, sums, rows, **near, **limits, **written):
            return found
    bins = empty_rows((*shape, n), torch.uint8, device)
    found = found._replace(bins=bins)
    if not chunks:  # no program writes them
        return reference.mass_select(
            scores,
            q,
            channels,
            recent_kv,
            rows,
            **{"sinks": sinks, "scale": scale, "softcap": softcap, "sink_logits": sink_logits, "totals": totals},
            **{"threshold": threshold, "min_tokens": min_tokens, "max_tokens": max_tokens},
            **{"group_reduce": group_reduce, "stored": stored, "out": out},
        )
    each = lists * group
    sums = Sums(*empty_parts((each * chunks, each, each), torch.float32, device))
    counts = torch.empty(lists * chunks * ALL.value, dtype=torch.int32, device=device)
    listed, scales = operand(Rows, scores), (float(scale), None if softcap is None else float(softcap))
    tile = {"HEADS": heads, "N": size, "num_warps": WARPS}
    launch(
        mass_select_sum_kernel,
        (chunks + triton.cdiv(group, HEADS_AT_ONCE), lists),
        scores,
        listed,
        operand(Query, q),
        operand(Rows, channels),
        operand(Tokens, recent_kv),
        rows,
        stored,
        sink_logits,
        sums,
        n,
        recent_kv.shape[2],
        sinks,
        chunks,
        *scales,
        GROUP=group,
        DK=q.shape[-1],
        R=channels.shape[-1],
        BH=HEADS_AT_ONCE,
        BN=NEAR,
        BD=SLAB,
        **tile,
    )
    bytes_of = operand(Rows, bins)
    args = listed, rows, sums, bytes_of, counts, n, chunks, *scales
    fixed = {"SUM": group_reduce == "sum", "GROUP": group, "BC": FEW if chunks <= FEW else MOST}
    launch(mass_select_bin_kernel, (chunks, lists), scores, *args, **fixed, **tile)
    limits = 1 - threshold, min_tokens, (1 << 31) - 1 if max_tokens is None else max_tokens
    args = (
        bytes_of,
        rows,
        counts,
        operand(Rows, ids),
        count,
        found.mass,
        found.cut,
        totals,
        n,
        chunks,
        *limits,
    )
    launch(mass_select_take_kernel, (chunks, lists), scores, *args, BC=16, **tile)
    return found
