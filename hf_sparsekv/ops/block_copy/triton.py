"""Copy listed blocks into device pages: the kernel, which reads pinned host memory in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._overlap import begin, launch
from .config import config as default

WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit
def block_copy_kernel(p_kv, p_pages, p_copies, p_n_copies, RUN: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr):
    """Every ``num_programs``-th block of the list, ``BW`` of its ``RUN`` words at a time."""
    begin(PDL)
    n, step = tl.load(p_n_copies), tl.num_programs(0)
    o_w = tl.arange(0, BW)
    i = tl.program_id(0)
    source = tl.load(p_copies + 2 * i, mask=i < n, other=0)
    page = tl.load(p_copies + 2 * i + 1, mask=i < n, other=0)
    while i < n:
        p_from = p_kv + source.to(tl.int64) * RUN
        p_to = p_pages + page.to(tl.int64) * RUN
        i += step
        source = tl.load(p_copies + 2 * i, mask=i < n, other=0)  # on its way while the block is copied
        page = tl.load(p_copies + 2 * i + 1, mask=i < n, other=0)
        for c in tl.static_range(0, RUN, BW):
            if RUN - c >= BW:
                tl.store(p_to + c + o_w, tl.load(p_from + c + o_w))  # [BW]
            else:
                m_w = c + o_w < RUN
                tl.store(p_to + c + o_w, tl.load(p_from + c + o_w, mask=m_w), mask=m_w)  # [BW]


def block_copy(kv, pages, copies, n_copies, *, config=None):
    """As ``reference.block_copy``; ``kv`` and ``pages`` are pinned or on the device, ``copies`` are on the device.

    Nothing waits, and it can be captured. ``config`` replaces the default for blocks of this size.
    """
    if kv.dtype != pages.dtype or kv.shape[2:] != pages.shape[1:]:
        raise ValueError(
            f"blocks and frames differ: {kv.dtype} {tuple(kv.shape[2:])}, {pages.dtype} {tuple(pages.shape[1:])}"
        )
    if not (kv.is_contiguous() and pages.is_contiguous() and copies.is_contiguous()):
        raise ValueError("kv, frames and copies must be contiguous")
    run = pages.shape[1] * pages.shape[2] * pages.itemsize
    if not run or not len(copies):
        return
    config = config or default(kv, pages)
    size, word = next((size, word) for size, word in WORDS if run % size == 0)
    fixed = {"RUN": run // size, "BW": triton.next_power_of_2(min(run, config.tile) // size)}
    args = kv.view(-1).view(word), pages.view(-1).view(word), copies, n_copies
    launch(block_copy_kernel, (min(config.programs, len(copies)),), copies, *args, **fixed, num_warps=config.warps)
