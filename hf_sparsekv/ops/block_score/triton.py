"""Score of every stored block for one query: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import begin, overlap

TILE_ELEMENTS = 8192  # entries of kmax in registers at once. Not tuned yet.


@triton.jit
def _block_score_kernel(
    p_q,
    p_bounds,
    p_fill,
    p_slots,
    p_out,
    n,
    q_batch,
    q_head,
    q_dim,
    bounds_slot,
    bounds_head,
    bounds_side,
    slots_batch,
    out_batch,
    out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    MEAN: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of ``BN`` blocks of one row and KV head."""
    begin(PDL)
    i_row = tl.program_id(1)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    b_slot = tl.load(p_slots + i_batch * slots_batch + o_n, mask=m_n, other=-1).to(tl.int64)  # [BN]
    m_live = m_n & (b_slot >= 0)
    m_live = m_live & (tl.load(p_fill + b_slot, mask=m_live, other=0) != 0)  # [BN]

    o_g, o_k = tl.arange(0, BG), tl.arange(0, BK)
    m_q = (o_g < GROUP)[:, None] & (o_k < DK)[None, :]
    p_row = p_q + i_batch * q_batch + (i_head * GROUP + o_g[:, None]) * q_head
    b_q = tl.load(p_row + o_k[None, :] * q_dim, mask=m_q, other=0.0).to(tl.float32)  # [BG, BK]
    b_pos, b_neg = tl.maximum(b_q, 0.0), tl.minimum(b_q, 0.0)

    # What is not live may hold anything, NaN included, and is not read.
    m_box = m_live[:, None] & (o_k < DK)[None, :]
    p_box = p_bounds + b_slot[:, None] * bounds_slot + i_head * bounds_head + o_k[None, :]
    b_max = tl.load(p_box, mask=m_box, other=0.0)  # [BN, BK]
    b_min = tl.load(p_box + bounds_side, mask=m_box, other=0.0)  # [BN, BK]
    if MEAN:  # linear, so the group collapses to one vector first
        b_pos, b_neg = tl.sum(b_pos, 0) / GROUP, tl.sum(b_neg, 0) / GROUP
        b_both = b_max.to(tl.float32) * b_pos[None, :] + b_min.to(tl.float32) * b_neg[None, :]
        b_s = tl.sum(b_both, 1)  # [BN]
    else:
        if NATIVE:  # relu of a 16-bit query is exact in its own type
            b_pos, b_neg = b_pos.to(b_max.dtype), b_neg.to(b_max.dtype)
        else:
            b_max, b_min = b_max.to(tl.float32), b_min.to(tl.float32)
        b_all = tl.dot(b_pos, tl.trans(b_max), input_precision="ieee")  # [BG, BN]
        b_all += tl.dot(b_neg, tl.trans(b_min), input_precision="ieee")
        b_s = tl.max(tl.where((o_g < GROUP)[:, None], b_all, float("-inf")), 0)  # [BN]
    p_to = p_out + i_batch * out_batch + i_head * out_head + o_n
    tl.store(p_to, tl.where(m_live, b_s, float("-inf")), mask=m_n)


def block_score(
    q: Tensor, bounds: Tensor, fill: Tensor, slots: Tensor, reduce: str, *, out: Tensor | None = None
) -> Tensor:
    """As ``reference.block_score``, into ``out`` if given."""
    batch, q_heads, dk = q.shape
    heads, n = bounds.shape[1], slots.shape[1]
    if out is None:
        out = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    if not n:
        return out
    require_dense_rows(bounds=bounds, fill=fill, slots=slots, out=out)
    group = q_heads // heads
    wide = max(16, triton.next_power_of_2(dk))
    tile = max(16, TILE_ELEMENTS // wide)
    with torch.cuda.device_of(q):
        _block_score_kernel[(triton.cdiv(n, tile), batch * heads)](
            q,
            bounds,
            fill,
            slots,
            out,
            n,
            *q.stride(),
            *bounds.stride()[:3],
            slots.stride(0),
            *out.stride()[:2],
            HEADS=heads,
            GROUP=group,
            DK=dk,
            BG=max(16, triton.next_power_of_2(group)),
            BK=wide,
            BN=tile,
            MEAN=reduce == "mean",
            NATIVE=q.dtype == bounds.dtype and q.dtype != torch.float32,
            **overlap(q),
        )
    return out
