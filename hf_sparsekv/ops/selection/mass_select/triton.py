"""Adaptive top-p selection of tokens by their estimated attention mass: the kernels.

A row's scores are cut into chunks, one program each. A token's share needs the sum over the whole row, and its position
in the result needs the counts of all chunks. There are therefore three launches: sums, bins, and the ids. From the
second launch on a token is one byte, and 255 counts per chunk determine the cut, so nothing is sorted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..._device import programs
from ..._dispatch import require_dense_rows, require_each_row, require_rows
from ..._layout import empty_parts, empty_rows
from ..._operands import Query, Rows, Tokens, batch_and_head, operand, padded, row_ptr
from ..._overlap import launch, release, wait
from ..._paged import find_recent, load_row
from ...attention.sparse_decode.split import base_2
from ..topk_select.keys import readable
from . import reference
from .cluster import select_clusters
from .reference import LENGTHS, TOTALS, Selection

CHUNKS, WARPS = (512, 4096), 8  # least and most scores of a program; its warps
PROGRAMS = 512  # per launch on an H200, some four per SM, as far as CHUNKS allow
NEAR = 64  # recent tokens at once
HEADS_AT_ONCE = 16  # query heads of a program over the recent tokens
SLAB = 64  # channels at once there
FEW, MOST = 32, 256  # chunks of a row whose sums are read at once; only two variants, as each is compiled separately

STEPS, NONE, BINS = tl.constexpr(reference.STEPS), tl.constexpr(reference.NONE), tl.constexpr(reference.BINS)
MASS_ONE, FIRST, LONGEST = tl.constexpr(reference.MASS_ONE), tl.constexpr(len(TOTALS)), tl.constexpr(LENGTHS - 1)
LARGEST = tl.constexpr(reference.LARGEST)
LOG2E = tl.constexpr(reference.LOG2E)
ALL = tl.constexpr(256)  # bins, including that of unselectable tokens


class Sums(NamedTuple):
    """Base-2 logarithms of masses, contiguous float32, for each query head.

    ``chunk`` ``[rows * G, chunks]``: mass of each chunk. ``near`` ``[rows * G]``: mass of the recent tokens. ``mean``
    ``[rows * G]``: mean ratio of true to label mass.
    """

    chunk: Any
    near: Any
    mean: Any


@triton.jit
def _add(b_most, b_sum, b_s):
    """Take ``b_s [heads, n]`` into a running sum of powers of two, kept relative to its largest."""
    b_new = tl.maximum(b_most, tl.max(b_s, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    return b_new, b_sum * tl.exp2(b_most - b_base) + tl.sum(tl.exp2(b_s - b_base[:, None]), 1)


@triton.jit
def _log_sum(b_x):
    """Logarithm of the sum of powers of two of a vector."""
    most = tl.max(b_x, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    return base + tl.log2(tl.sum(tl.exp2(b_x - base), 0))


@triton.jit
def _near(
    q,
    channels,
    recent_kv,
    length,
    sealed,
    sink,
    sums,
    near,
    sinks,
    scale,
    softcap,
    i_row,
    i_first,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Mass of the recent tokens, and the mean ratio of their true to their label mass, for ``BH`` query heads."""
    i_batch, i_head = batch_and_head(i_row, HEADS)
    o_h, o_n, o_r = i_first + tl.arange(0, BH), tl.arange(0, BN), tl.arange(0, padded(R))
    m_h, m_r = (o_h < GROUP)[:, None], o_r < R
    p_q = row_ptr(q, i_batch, i_head * GROUP) + o_h[:, None].to(tl.int64) * q.head
    b_channel = tl.load(row_ptr(channels, i_batch, i_head) + o_r, mask=m_r, other=0)  # [R]
    b_own = tl.load(p_q + b_channel[None, :] * q.dim, mask=m_h & m_r[None, :], other=0.0)  # [BH, R]
    b_most, b_sum = tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32)
    b_over_most, b_over = b_most, b_sum
    recent = 0.0
    for i in range(0, sinks + length - sealed, BN):
        b_entry, m_n = find_recent(i + o_n, sinks, near - sinks, length, sealed)
        p_k = row_ptr(recent_kv, i_batch, i_head) + b_entry[:, None].to(tl.int64) * recent_kv.token
        b_s = tl.zeros([BH, BN], tl.float32)
        for d in range(0, DK, BD):
            o_d = d + tl.arange(0, BD)
            m_d = (o_d < DK)[None, :]
            b_q = tl.load(p_q + o_d[None, :] * q.dim, mask=m_h & m_d, other=0.0)  # [BH, BD]
            b_k = tl.load(p_k + o_d[None, :], mask=m_n[:, None] & m_d, other=0.0).to(b_q.dtype)  # [BN, BD]
            b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="ieee")  # 16-bit factors: exact, on tensor cores
        b_k = tl.load(p_k + b_channel[None, :], mask=m_n[:, None] & m_r[None, :], other=0.0).to(b_own.dtype)  # [BN, R]
        b_label = base_2(tl.dot(b_own, tl.trans(b_k), input_precision="ieee"), scale, softcap)
        b_s = base_2(b_s, scale, softcap)  # [BH, BN]
        b_most, b_sum = _add(b_most, b_sum, tl.where(m_n[None, :], b_s, float("-inf")))
        m_n = m_n & (i + o_n >= sinks)
        b_over_most, b_over = _add(b_over_most, b_over, tl.where(m_n[None, :], b_s - b_label, float("-inf")))
        recent += tl.sum(m_n.to(tl.float32), 0)
    b_held, b_mean = b_most + tl.log2(b_sum), b_over_most + tl.log2(b_over) - tl.log2(tl.maximum(recent, 1.0))
    if sink is not None:  # a learned sink is mass without a token
        b_sink = tl.load(sink + i_head * GROUP + o_h, mask=o_h < GROUP, other=0.0).to(tl.float32) * LOG2E
        b_new = tl.maximum(b_held, b_sink)
        b_new = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_held = b_new + tl.log2(tl.exp2(b_held - b_new) + tl.exp2(b_sink - b_new))
    o_out = i_row * GROUP + o_h
    # NaN counts as no mass, or as no correction, so that the other heads are not affected.
    tl.store(sums.near + o_out, tl.where(tl.abs(b_held) < float("inf"), b_held, float("-inf")), mask=o_h < GROUP)
    tl.store(sums.mean + o_out, tl.where(tl.abs(b_mean) < float("inf"), b_mean, 0.0), mask=o_h < GROUP)


@triton.jit
def _logits(p_scores, m_n, scale, softcap):
    """Logits to base 2 of a chunk's scores."""
    b_s = tl.load(p_scores, mask=m_n, other=float("-inf"))  # [N]
    b_l = tl.minimum(base_2(b_s, scale, softcap), LARGEST)
    return tl.where(b_s == float("-inf"), float("-inf"), b_l)  # the softcap's tanh would make -inf finite


@triton.jit(do_not_specialize=["rows", "n", "chunks"])
def mass_select_sum_kernel(
    scores,
    q,
    channels,
    recent_kv,
    rows,
    stored,
    sink,
    sums,
    n,
    near,
    sinks,
    chunks,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Label masses of one chunk, for each query head. The programs after the chunks compute the recent tokens' part."""
    wait(PDL)
    i_chunk, i_row = tl.program_id(0), tl.program_id(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    length, sealed = load_row(rows, i_batch)
    if i_chunk < chunks:
        n = tl.minimum(n, sealed)
        o_n = i_chunk * N + tl.arange(0, N)
        if i_chunk * N < n:
            for i_g in range(0, GROUP):
                p_scores = row_ptr(scores, i_batch, i_head * GROUP + i_g) + o_n
                b_l = _logits(p_scores, o_n < n, scale, softcap)
                tl.store(sums.chunk + (i_row * GROUP + i_g) * chunks + i_chunk, _log_sum(b_l))
    else:
        i_first = (i_chunk - chunks) * BH
        if stored is not None:
            length = tl.minimum(length, tl.load(stored + i_batch))
        _near(
            q,
            channels,
            recent_kv,
            length,
            sealed,
            sink,
            sums,
            near,
            sinks,
            scale,
            softcap,
            i_row,
            i_first,
            HEADS,
            GROUP,
            DK,
            R,
            BH,
            BN,
            BD,
        )
    release(PDL)


@triton.jit
def _whole(sums, i_head, mine, chunks, BC: tl.constexpr):
    """Mean ratio of true to label mass, and mass of all tokens, for one query head of ``mine`` chunks."""
    most, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for i in range(0, mine, BC):
        o_c = i + tl.arange(0, BC)
        b_sum = tl.load(sums.chunk + i_head * chunks + o_c, mask=o_c < mine, other=float("-inf"))  # [BC]
        new = tl.maximum(most, tl.max(b_sum, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(most - base) + tl.sum(tl.exp2(b_sum - base), 0)
        most = new
    mean, near = tl.load(sums.mean + i_head), tl.load(sums.near + i_head)
    stored = mean + most + tl.log2(total)
    base = tl.maximum(near, stored)
    base = tl.where(base == float("-inf"), 0.0, base)
    return mean, base + tl.log2(tl.exp2(near - base) + tl.exp2(stored - base))


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
            _, whole = _whole(sums, i_row * GROUP + i_g, mine, chunks, BC)
            base = tl.maximum(all_heads, whole)
            base = tl.where(base == float("-inf"), 0.0, base)
            all_heads = base + tl.log2(tl.exp2(all_heads - base) + tl.exp2(whole - base))
    b_share = tl.full([N], float("-inf"), tl.float32)
    for i_g in range(0, GROUP):
        mean, whole = _whole(sums, i_row * GROUP + i_g, mine, chunks, BC)
        b_l = _logits(row_ptr(scores, i_batch, i_head * GROUP + i_g) + o_n, m_n, scale, softcap) + mean
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
    if config is None and softcap is None and group_reduce == "all":
        limits = {"threshold": threshold, "min_tokens": min_tokens, "max_tokens": max_tokens}
        near = {"sinks": sinks, "scale": scale, "sink_logits": sink_logits, "stored": stored}
        written = {"ids": ids, "count": count, "mass": found.mass, "cut": found.cut, "totals": totals}
        if select_clusters(scores, q, channels, recent_kv, rows, **near, **limits, **written):
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
