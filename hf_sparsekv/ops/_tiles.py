"""Tiles of a prompt's attention: what its kernels share."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ._operands import padded


@triton.jit
def rows_of(t, i_batch, i_head, row, n, D: tl.constexpr, BN: tl.constexpr, DESCRIPTORS: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """``BN`` keys or values from ``row`` on, ``[BN, padded(D)]``; zeros from ``n`` on, where that is asked for."""
    BD: tl.constexpr = padded(D)
    if DESCRIPTORS:
        return t.load([i_batch.to(tl.int32), i_head.to(tl.int32), row, 0]).reshape(BN, BD)
    else:
        o_n, o_d = row + tl.arange(0, BN), tl.arange(0, BD)
        p = t.ptr + i_batch * t.batch + i_head * t.head + o_n.to(tl.int64)[:, None] * t.token + o_d[None, :]
        if MASKED:
            return tl.load(p, mask=(o_n < n)[:, None] & (o_d < D)[None, :], other=0.0)
        elif BD == D:
            return tl.load(p)
        else:
            return tl.load(p, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def capped(b_s, slope, CAPPED: tl.constexpr):
    """Products of queries and keys as logits but for a factor: see :func:`factors`."""
    if CAPPED:  # tanh by an exponential: the hardware's own has 11 bits
        return 1.0 - 2.0 / (1.0 + tl.exp2(b_s * slope))
    else:
        return b_s


@triton.jit
def beginning(sinks, i_head, BM: tl.constexpr):
    """Maximum and sum of ``BM`` queries that have seen no key: those of a learned sink."""
    if sinks is not None:
        sink = tl.load(sinks + i_head).to(tl.float32) * 1.4426950408889634
        return tl.zeros([BM], tl.float32) + sink, tl.full([BM], 1.0, tl.float32)
    else:
        return tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)


@triton.jit
def rescale(b_top, b_max, b_sum, b_acc):
    """With a new maximum: what there is, and the maximum as it may be subtracted."""
    b_new = tl.maximum(b_max, b_top)
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_less = tl.exp2(b_max - b_safe)
    return b_new, b_safe, b_sum * b_less, b_acc * b_less[:, None]


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The factor of products in an exponential of base 2, and that of what :func:`capped` makes of them.

    A capped logit is ``softcap * tanh(scale / softcap * product)``, and ``tanh(x) = 1 - 2 / (1 + exp(2 x))``.
    """
    log2e = math.log2(math.e)
    return (1.0, scale * log2e) if softcap is None else (2 * scale * log2e / softcap, softcap * log2e)
