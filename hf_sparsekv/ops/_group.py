"""The mean over the query heads of a group, computed before a score that is linear in it.

Each program of a score reads the queries of its group. With the 128 heads of a latent's group these are larger than the
labels or bounds that the program scores, so they are reduced once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._operands import Query, batch_and_head, operand, padded
from ._overlap import begin, launch

MANY = 32  # query heads of a group above which this is worth a separate launch. Not measured yet.
CHANNELS = 64  # of a program


@triton.jit
def mean_heads_kernel(
    q,
    p_out,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BK`` channels of one row and KV head."""
    begin(PDL)
    BG: tl.constexpr = padded(GROUP, 1)
    i_row = tl.program_id(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    o_g, o_k = tl.arange(0, BG), tl.program_id(1) * BK + tl.arange(0, BK)
    p_from = q.ptr + i_batch * q.batch + (i_head * GROUP + o_g[:, None]) * q.head + o_k[None, :] * q.dim
    b_q = tl.load(p_from, mask=(o_g < GROUP)[:, None] & (o_k < DK)[None, :], other=0.0).to(tl.float32)  # [BG, BK]
    if SPLIT:
        p_to = p_out + i_row * 2 * DK + o_k
        tl.store(p_to, tl.sum(tl.maximum(b_q, 0.0, propagate_nan=tl.PropagateNan.ALL), 0) / GROUP, mask=o_k < DK)
        tl.store(p_to + DK, tl.sum(tl.minimum(b_q, 0.0, propagate_nan=tl.PropagateNan.ALL), 0) / GROUP, mask=o_k < DK)
    else:
        tl.store(p_out + i_row * DK + o_k, tl.sum(b_q, 0) / GROUP, mask=o_k < DK)


def mean_heads(q: Tensor, heads: int, split: bool = False) -> Tensor:
    """Mean of ``q [batch, Hq, Dk]`` over each of ``heads`` groups: float32 ``[batch, H, Dk]``.

    With ``split`` ``[batch, 2 H, Dk]``: of the positive, then of the negative parts.
    """
    batch, q_heads, dk = q.shape
    group = q_heads // heads
    out = torch.empty(batch, heads * (1 + split), dk, dtype=torch.float32, device=q.device)
    grid = batch * heads, triton.cdiv(dk, CHANNELS)
    named = {"SPLIT": split, "HEADS": heads, "GROUP": group, "DK": dk, "BK": CHANNELS}
    launch(mean_heads_kernel, grid, q, operand(Query, q), out, **named)
    return out
