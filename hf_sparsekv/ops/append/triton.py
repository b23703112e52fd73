"""Write new tokens into the ring of recent tokens: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import begin, overlap

TILE = 16  # new tokens a program; a decode step has one. Not tuned yet.


@triton.jit
def _append_kernel(
    p_k,
    p_v,
    p_valid,
    p_near,
    p_near_valid,
    p_length,
    q,
    ring,
    sinks,
    k_batch,
    k_head,
    k_token,
    k_dim,
    v_batch,
    v_head,
    v_token,
    v_dim,
    valid_batch,
    near_batch,
    near_head,
    near_token,
    near_valid_batch,
    HAS_VALID: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy ``BQ`` new tokens of one row and KV head to their places in the ring."""
    begin(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    o_q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    m_q = o_q < q
    length = tl.load(p_length)
    # Taken apart so that the sum cannot overflow, and wrapped once because q <= ring.
    o_ring = length % ring + o_q
    o_near = sinks + tl.where(o_ring >= ring, o_ring - ring, o_ring)

    o_q = o_q.to(tl.int64)
    p_to = p_near + i_batch * near_batch + i_head * near_head + o_near.to(tl.int64)[:, None] * near_token
    o_k = tl.arange(0, BK)
    m_k = m_q[:, None] & (o_k < DK)[None, :]
    p_from = p_k + i_batch * k_batch + i_head * k_head
    b_k = tl.load(p_from + o_q[:, None] * k_token + o_k[None, :] * k_dim, mask=m_k, other=0.0)  # [BQ, BK]
    tl.store(p_to + o_k[None, :], b_k.to(p_near.dtype.element_ty), mask=m_k)

    o_v = tl.arange(0, BV)
    m_v = m_q[:, None] & (o_v < DV)[None, :]
    p_from = p_v + i_batch * v_batch + i_head * v_head
    b_v = tl.load(p_from + o_q[:, None] * v_token + o_v[None, :] * v_dim, mask=m_v, other=0.0)  # [BQ, BV]
    tl.store(p_to + DK + o_v[None, :], b_v.to(p_near.dtype.element_ty), mask=m_v)

    # Validity belongs to the row: its first head's programs write it.
    m_valid = m_q & (i_head == 0)
    b_valid = tl.full([BQ], 1, tl.uint8)
    if HAS_VALID:
        b_valid = tl.load(p_valid + i_batch * valid_batch + o_q, mask=m_valid, other=0)  # [BQ]
    tl.store(p_near_valid + i_batch * near_valid_batch + o_near, b_valid, mask=m_valid)


def append(
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    near_kv: Tensor,
    near_valid: Tensor,
    length: Tensor,
    sinks: int,
) -> None:
    """As ``reference.append``. ``k`` and ``v`` may be strided in any way."""
    batch, heads, q, dk = k.shape
    if not q:
        return
    dv = v.shape[-1]
    require_dense_rows(valid=valid, near_kv=near_kv, near_valid=near_valid)
    tile = min(TILE, triton.next_power_of_2(q))
    # Bytes instead of bool: a bool is one bit to Triton.
    near_valid = near_valid.view(torch.uint8)
    valid = None if valid is None else valid.view(torch.uint8)
    with torch.cuda.device_of(near_kv):
        _append_kernel[(batch * heads, triton.cdiv(q, tile))](
            k,
            v,
            valid,
            near_kv,
            near_valid,
            length,
            q,
            near_kv.shape[2] - sinks,
            sinks,
            *k.stride(),
            *v.stride(),
            0 if valid is None else valid.stride(0),
            *near_kv.stride()[:3],
            near_valid.stride(0),
            HAS_VALID=valid is not None,
            HEADS=heads,
            DK=dk,
            DV=dv,
            BQ=tile,
            BK=triton.next_power_of_2(dk),
            BV=triton.next_power_of_2(max(1, dv)),
            **overlap(near_kv),
        )
