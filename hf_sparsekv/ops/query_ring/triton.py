"""Keep the latest queries of each row: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import begin, overlap

HEADS = 8  # query heads a program. Not tuned yet.


@triton.jit
def _push_kernel(
    p_q,
    p_valid,
    p_column,
    p_ring,
    p_first,
    p_count,
    p_position,
    n,
    size,
    q_batch,
    q_head,
    q_token,
    q_dim,
    valid_batch,
    ring_batch,
    ring_head,
    ring_token,
    HAS_VALID: tl.constexpr,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the queries of ``BH`` heads of one row, one column after the other."""
    begin(PDL)
    i_batch = tl.program_id(0).to(tl.int64)
    o_h, o_d = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BD)
    o_far = o_h.to(tl.int64)  # heads of a prompt's queries lie far apart: 16 of a million tokens exceed 32 bits
    m_hd = (o_h < Q_HEADS)[:, None] & (o_d < DIM)[None, :]
    column = tl.load(p_column)
    for i in range(0, n):
        p_from = p_q + i_batch * q_batch + o_far[:, None] * q_head + i * q_token + o_d[None, :] * q_dim
        b_q = tl.load(p_from, mask=m_hd, other=0.0)  # [BH, BD]
        p_to = p_ring + i_batch * ring_batch + o_far[:, None] * ring_head + (column + i) % size * ring_token
        tl.store(p_to + o_d[None, :], b_q.to(p_ring.dtype.element_ty), mask=m_hd)
    if tl.program_id(1) == 0:  # counts belong to the row
        first = tl.load(p_first + i_batch)
        if HAS_VALID:
            o_n = tl.arange(0, BN)
            b_valid = tl.load(p_valid + i_batch * valid_batch + o_n, mask=o_n < n, other=1)  # [BN]
            after = tl.max(tl.where(b_valid != 0, 0, column + o_n + 1), 0)
            first = tl.maximum(first, after)
            tl.store(p_first + i_batch, first)
        tl.store(p_count + i_batch, tl.minimum(tl.maximum(column + n - first, 0), size))
        if i_batch == 0:
            tl.store(p_position, (column + n) % size)


def push(
    q: Tensor, valid: Tensor | None, column: Tensor, ring: Tensor, first: Tensor, count: Tensor, position: Tensor
) -> None:
    """As ``reference.push``. ``q`` may be strided in any way."""
    batch, heads, n, dim = q.shape
    require_dense_rows(valid=valid, ring=ring)
    valid = None if valid is None else valid.view(torch.uint8)  # a bool is one bit to Triton
    with torch.cuda.device_of(ring):
        _push_kernel[(batch, triton.cdiv(heads, HEADS))](
            q,
            valid,
            column,
            ring,
            first,
            count,
            position,
            n,
            ring.shape[2],
            *q.stride(),
            0 if valid is None else valid.stride(0),
            *ring.stride()[:3],
            HAS_VALID=valid is not None,
            Q_HEADS=heads,
            DIM=dim,
            BH=HEADS,
            BD=max(16, triton.next_power_of_2(dim)),
            BN=max(16, triton.next_power_of_2(n)),
            **overlap(ring),
        )
