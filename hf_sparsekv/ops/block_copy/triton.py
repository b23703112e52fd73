"""Copy listed blocks into device pages: the kernel, which reads pinned host memory in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._codes import load_decoded
from .._operands import padded
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


@triton.jit
def block_decode_kernel(
    p_kv,
    p_scales,
    p_pages,
    p_copies,
    p_n_copies,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every ``num_programs``-th block of the list, of codes, ``BT`` of its ``SIZE`` tokens at a time."""
    begin(PDL)
    n = tl.load(p_n_copies)
    o_w = tl.arange(0, padded(WIDTH))
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        first = tl.load(p_copies + 2 * i).to(tl.int64) * SIZE
        to = tl.load(p_copies + 2 * i + 1).to(tl.int64) * SIZE
        for c in tl.static_range(0, SIZE, BT):
            o_t = c + tl.arange(0, BT)
            m_t = o_t < SIZE
            p_code, p_scale = p_kv + (first + o_t) * WIDTH, p_scales + (first + o_t) * 2
            b_x = load_decoded(p_code, p_scale, m_t, o_w, WIDTH, SPLIT, p_pages.dtype.element_ty)  # [BT, BW]
            p_to = p_pages + (to + o_t) * WIDTH
            tl.store(p_to[:, None] + o_w[None, :], b_x, mask=m_t[:, None] & (o_w < WIDTH)[None, :])


def block_copy(kv, pages, copies, n_copies, *, scales=None, split=0, config=None):
    """As ``reference.block_copy``; ``kv`` and ``pages`` are pinned or on the device, ``copies`` are on the device.

    Nothing waits, and it can be captured. ``config`` replaces the default for blocks of this size.
    """
    if (scales is None and kv.dtype != pages.dtype) or kv.shape[2:] != pages.shape[1:]:
        raise ValueError(
            f"blocks and frames differ: {kv.dtype} {tuple(kv.shape[2:])}, {pages.dtype} {tuple(pages.shape[1:])}"
        )
    if not (kv.is_contiguous() and pages.is_contiguous() and copies.is_contiguous()):
        raise ValueError("kv, frames and copies must be contiguous")
    run = pages.shape[1] * pages.shape[2] * pages.itemsize
    if not run or not len(copies):
        return
    if scales is not None:
        if kv.dtype != torch.int8 or scales.shape != (*kv.shape[:3], 2) or not scales.is_contiguous():
            raise ValueError(
                f"scales must be those of int8 codes, contiguous: got {kv.dtype} {tuple(kv.shape)}, scales "
                f"{tuple(scales.shape)}"
            )
        config = config or default(kv, pages)
        size, width = pages.shape[1:]
        tile = max(1, min(triton.next_power_of_2(size), config.tile // triton.next_power_of_2(width)))
        fixed = {"SIZE": size, "WIDTH": width, "SPLIT": split, "BT": tile, "num_warps": config.warps}
        args = kv, scales, pages, copies, n_copies
        launch(block_decode_kernel, (min(config.programs, len(copies)),), copies, *args, **fixed)
        return
    config = config or default(kv, pages)
    size, word = next((size, word) for size, word in WORDS if run % size == 0)
    fixed = {"RUN": run // size, "BW": triton.next_power_of_2(min(run, config.tile) // size)}
    args = kv.view(-1).view(word), pages.view(-1).view(word), copies, n_copies
    launch(block_copy_kernel, (min(config.programs, len(copies)),), copies, *args, **fixed, num_warps=config.warps)
