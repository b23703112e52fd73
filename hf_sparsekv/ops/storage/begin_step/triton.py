"""Advance the lengths of all rows at the start of a captured step: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._operands import Table, operand
from ..._overlap import begin, launch

ROWS = 32  # of a program


@triton.jit(do_not_specialize=["batch"])
def begin_step_kernel(
    after, p_past, now, p_valid, batch, block_size, recent, SKIP: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr
):
    """``BR`` rows."""
    begin(PDL)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    m_r = o_r < batch
    b_length = tl.load(after.ptr + o_r * after.row, mask=m_r, other=0)
    b_sealed = tl.load(after.ptr + o_r * after.row + 1, mask=m_r, other=0)
    tl.store(p_past + o_r, b_length, mask=m_r)
    b_given = tl.full([BR], 1, tl.int32)
    if p_valid is not None:
        b_given = tl.load(p_valid + o_r, mask=m_r, other=0).to(tl.int32)
    b_length += b_given
    m_live = m_r
    if SKIP:
        m_live = m_r & (b_given > 0)
    tl.store(now.ptr + o_r * now.row, tl.where(m_live, b_length, 0), mask=m_r)
    tl.store(now.ptr + o_r * now.row + 1, tl.where(m_live, b_sealed, 0), mask=m_r)
    b_sealed += tl.where(m_live & (b_length - recent >= b_sealed + block_size), block_size, 0)
    tl.store(after.ptr + o_r * after.row, b_length, mask=m_r)
    tl.store(after.ptr + o_r * after.row + 1, b_sealed, mask=m_r)


def begin_step(after, past, now, valid, *, block_size, recent, skip=False):
    """As ``reference.begin_step``."""
    import torch

    batch = len(past)
    if valid is not None:
        valid = valid.view(torch.uint8)
    launch(
        begin_step_kernel,
        (triton.cdiv(batch, ROWS),),
        now,
        operand(Table, after),
        past,
        operand(Table, now),
        valid,
        batch,
        block_size,
        recent,
        SKIP=skip,
        BR=ROWS,
    )
