"""Copy listed blocks into frames: the kernel, which reads pinned host memory in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._overlap import begin, launch
from .config import config as default

WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit
def block_copy_kernel(p_kv, p_frames, p_copies, p_n_copies, RUN: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr):
    """Every ``num_programs``-th block of the list, ``BW`` of its ``RUN`` words at a time."""
    begin(PDL)
    n, step = tl.load(p_n_copies), tl.num_programs(0)
    o_w = tl.arange(0, BW)
    i = tl.program_id(0)
    source = tl.load(p_copies + 2 * i, mask=i < n, other=0)
    frame = tl.load(p_copies + 2 * i + 1, mask=i < n, other=0)
    while i < n:
        p_from = p_kv + source.to(tl.int64) * RUN
        p_to = p_frames + frame.to(tl.int64) * RUN
        i += step
        source = tl.load(p_copies + 2 * i, mask=i < n, other=0)  # on its way while the block is copied
        frame = tl.load(p_copies + 2 * i + 1, mask=i < n, other=0)
        for c in tl.static_range(0, RUN, BW):
            if RUN - c >= BW:
                tl.store(p_to + c + o_w, tl.load(p_from + c + o_w))  # [BW]
            else:
                m_w = c + o_w < RUN
                tl.store(p_to + c + o_w, tl.load(p_from + c + o_w, mask=m_w), mask=m_w)  # [BW]


def block_copy(kv, frames, copies, n_copies, *, config=None):
    """As ``reference.block_copy``; ``kv`` and ``frames`` are pinned or on the device, ``copies`` are on the device.

    Nothing waits, and it can be captured. ``config`` replaces the default for blocks of this size.
    """
    if kv.dtype != frames.dtype or kv.shape[2:] != frames.shape[1:]:
        raise ValueError(
            f"blocks and frames differ: {kv.dtype} {tuple(kv.shape[2:])}, {frames.dtype} {tuple(frames.shape[1:])}"
        )
    if not (kv.is_contiguous() and frames.is_contiguous() and copies.is_contiguous()):
        raise ValueError("kv, frames and copies must be contiguous")
    run = frames.shape[1] * frames.shape[2] * frames.itemsize
    if not run or not len(copies):
        return
    config = config or default(kv, frames)
    size, word = next((size, word) for size, word in WORDS if run % size == 0)
    fixed = {"RUN": run // size, "BW": triton.next_power_of_2(min(run, config.tile) // size)}
    args = kv.view(-1).view(word), frames.view(-1).view(word), copies, n_copies
    launch(block_copy_kernel, (min(config.programs, len(copies)),), copies, *args, **fixed, num_warps=config.warps)
