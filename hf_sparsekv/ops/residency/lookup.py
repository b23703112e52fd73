"""Where blocks lie, without bringing any to the device: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import begin, overlap

LOOK = 256  # entries that a program looks up. Not tuned yet.


@triton.jit(do_not_specialize=["n", "k"])
def _lookup_kernel(
    p_ids,
    p_slots,
    p_table,
    p_stamp,
    p_since,
    p_places,
    n,
    k,
    ids_batch,
    ids_head,
    slots_batch,
    HEADS: tl.constexpr,
    HAS_SINCE: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Places of ``BN`` entries."""
    begin(PDL)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    i_row = o_n // k
    i_batch, i_head = (i_row // HEADS).to(tl.int64), i_row % HEADS
    b_id = tl.load(p_ids + i_batch * ids_batch + i_head * ids_head + o_n % k, mask=m_n, other=-1)  # [BN]
    b_slot = tl.load(p_slots + i_batch * slots_batch + b_id, mask=b_id >= 0, other=-1)  # [BN]
    m_there = b_slot >= 0
    b_frame = tl.load(p_table + b_slot.to(tl.int64) * HEADS + i_head, mask=m_there, other=-1)  # [BN]
    m_found = b_frame >= 0
    if HAS_SINCE:
        b_stamp = tl.load(p_stamp + b_frame, mask=m_found, other=0)  # [BN]
        m_found = m_found & (b_stamp == tl.load(p_since))
    tl.store(p_places + o_n, tl.where(m_found, b_frame, tl.where(m_there, -b_slot - 2, -1)), mask=m_n)


def lookup(
    block_ids: Tensor,
    slots: Tensor,
    table: Tensor,
    stamp: Tensor,
    since: Tensor | None = None,
    *,
    out: Tensor | None = None,
    look: int = LOOK,
) -> Tensor:
    """As ``reference.lookup``, into contiguous ``out`` if given; ``look`` replaces the constant."""
    _, heads, k = block_ids.shape
    n = block_ids.numel()
    if out is None:
        out = torch.empty(block_ids.shape, dtype=torch.int32, device=block_ids.device)
    if not n:
        return out
    require_dense_rows(block_ids=block_ids, slots=slots, table=table, out=out)
    with torch.cuda.device_of(block_ids):
        _lookup_kernel[(triton.cdiv(n, look),)](
            block_ids,
            slots,
            table,
            stamp,
            since,
            out,
            n,
            k,
            *block_ids.stride()[:2],
            slots.stride(0),
            HEADS=heads,
            HAS_SINCE=since is not None,
            BN=look,
            **overlap(block_ids),
        )
    return out
