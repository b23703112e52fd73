"""Adaptive top-p selection, the first launch: masses of chunks of a row's scores, and of its recent tokens.

The later launches, which read these sums, are in :mod:`.triton`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..._operands import batch_and_head, padded, row_ptr
from ..._overlap import release, wait
from ..._paged import find_recent, load_row
from ...attention.sparse_decode.split import base_2
from . import reference

LARGEST = tl.constexpr(reference.LARGEST)
LOG2E = tl.constexpr(reference.LOG2E)


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
def chunk_logits(p_scores, m_n, scale, softcap):
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
                b_l = chunk_logits(p_scores, o_n < n, scale, softcap)
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
def whole_mass(sums, i_head, mine, chunks, BC: tl.constexpr):
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
