"""Copy listed blocks into device pages, or all blocks of a block table: kernels that read pinned memory in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._codes import load_decoded
from ..._dispatch import require_dense_rows
from ..._operands import padded
from ..._overlap import begin, launch
from .config import config as default

WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit
def _copy(p_kv, p_pages, source, page, RUN: tl.constexpr, BW: tl.constexpr):
    """One block, ``BW`` of its ``RUN`` words at a time."""
    p_from, p_to = p_kv + source.to(tl.int64) * RUN, p_pages + page.to(tl.int64) * RUN
    o_w = tl.arange(0, BW)
    for c in tl.static_range(0, RUN, BW):
        if RUN - c >= BW:
            tl.store(p_to + c + o_w, tl.load(p_from + c + o_w))  # [BW]
        else:
            m_w = c + o_w < RUN
            tl.store(p_to + c + o_w, tl.load(p_from + c + o_w, mask=m_w), mask=m_w)  # [BW]


@triton.jit
def _decode(
    p_kv,
    p_scales,
    p_pages,
    source,
    page,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BT: tl.constexpr,
):
    """One block of codes, ``BT`` of its ``SIZE`` tokens at a time."""
    first, to = source.to(tl.int64) * SIZE, page.to(tl.int64) * SIZE
    o_w = tl.arange(0, padded(WIDTH))
    p_scale = p_scales + source.to(tl.int64) * (2 * SPLIT + SIZE) + tl.arange(0, 1)
    for c in tl.static_range(0, SIZE, BT):
        o_t = c + tl.arange(0, BT)
        m_t = o_t < SIZE
        p_code = p_kv + (first + o_t) * WIDTH
        b_x = load_decoded(p_code, p_scale, o_t, m_t, o_w, WIDTH, SPLIT, p_pages.dtype.element_ty)  # [BT, BW]
        p_to = p_pages + (to + o_t) * WIDTH
        tl.store(p_to[:, None] + o_w[None, :], b_x, mask=m_t[:, None] & (o_w < WIDTH)[None, :])


@triton.jit
def _listed(p_table, table_row, i, n, room, last, HEADS: tl.constexpr):
    """Source and target of the ``i``-th block of a table of ``n`` blocks a row, heads apart."""
    i_row, nth = i // n, i % n  # row and head
    block = tl.load(p_table + (i_row // HEADS).to(tl.int64) * table_row + nth)
    source = tl.minimum(tl.maximum(block, 0), last).to(tl.int64) * HEADS + i_row % HEADS
    return source, i_row.to(tl.int64) * room + nth


@triton.jit
def block_copy_kernel(p_kv, p_pages, p_copies, p_n_copies, RUN: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr):
    """Every ``num_programs``-th block of the list."""
    begin(PDL)
    n, step = tl.load(p_n_copies), tl.num_programs(0)
    i = tl.program_id(0)
    source = tl.load(p_copies + 2 * i, mask=i < n, other=0)
    page = tl.load(p_copies + 2 * i + 1, mask=i < n, other=0)
    while i < n:
        from_now, to_now = source, page
        i += step
        source = tl.load(p_copies + 2 * i, mask=i < n, other=0)  # in flight while the block is copied
        page = tl.load(p_copies + 2 * i + 1, mask=i < n, other=0)
        _copy(p_kv, p_pages, from_now, to_now, RUN, BW)


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
    """Every ``num_programs``-th block of the list, of codes."""
    begin(PDL)
    for i in range(tl.program_id(0), tl.load(p_n_copies), tl.num_programs(0)):
        source, page = tl.load(p_copies + 2 * i), tl.load(p_copies + 2 * i + 1)
        _decode(p_kv, p_scales, p_pages, source, page, SIZE, WIDTH, SPLIT, BT)


@triton.jit(do_not_specialize=["p_table", "table_row", "n", "room", "last", "total"])
def gather_blocks_kernel(
    p_kv,
    p_out,
    p_table,
    table_row,
    n,
    room,
    last,
    total,
    HEADS: tl.constexpr,
    RUN: tl.constexpr,
    BW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every ``num_programs``-th block of the table."""
    begin(PDL)
    for i in range(tl.program_id(0), total, tl.num_programs(0)):
        source, target = _listed(p_table, table_row, i, n, room, last, HEADS)
        _copy(p_kv, p_out, source, target, RUN, BW)


@triton.jit(do_not_specialize=["p_table", "table_row", "n", "room", "last", "total"])
def gather_blocks_decode_kernel(
    p_kv,
    p_scales,
    p_out,
    p_table,
    table_row,
    n,
    room,
    last,
    total,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every ``num_programs``-th block of the table, of codes."""
    begin(PDL)
    for i in range(tl.program_id(0), total, tl.num_programs(0)):
        source, target = _listed(p_table, table_row, i, n, room, last, HEADS)
        _decode(p_kv, p_scales, p_out, source, target, SIZE, WIDTH, SPLIT, BT)


def _check(kv, pages, scales, split, *more) -> None:
    """Raise ``ValueError`` for blocks ``kv [.., B, W]`` that cannot become ``pages [.., B, W]``."""
    if (scales is None and kv.dtype != pages.dtype) or kv.shape[-2:] != pages.shape[-2:]:
        raise ValueError(
            f"blocks and frames differ: {kv.dtype} {tuple(kv.shape[-2:])}, {pages.dtype} {tuple(pages.shape[-2:])}"
        )
    if not all(t.is_contiguous() for t in (kv, pages, *more)):
        raise ValueError("kv, frames and copies must be contiguous")
    if scales is None:
        return
    shape = (*kv.shape[:2], 2 * split + kv.shape[2])
    if kv.dtype != torch.int8 or scales.shape != shape or not scales.is_contiguous():
        raise ValueError(
            f"scales must be those of int8 codes, contiguous: got {kv.dtype} {tuple(kv.shape)}, scales "
            f"{tuple(scales.shape)}"
        )


def _words(kv, pages, tile: int) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Both as words, as wide as they can be, and how many a block has and a program copies at a time."""
    run = pages.shape[-2] * pages.shape[-1] * pages.itemsize
    size, word = next((size, word) for size, word in WORDS if run % size == 0)
    fixed = {"RUN": run // size, "BW": triton.next_power_of_2(min(run, tile) // size)}
    return kv.view(-1).view(word), pages.view(-1).view(word), fixed


def _tokens(pages, split: int, tile: int) -> dict[str, int]:
    """Shapes of a block of codes, and how many tokens a program decodes at a time."""
    size, width = pages.shape[-2:]
    at_once = max(1, min(triton.next_power_of_2(size), tile // triton.next_power_of_2(width)))
    return {"SIZE": size, "WIDTH": width, "SPLIT": split, "BT": at_once}


def block_copy(kv, pages, copies, n_copies, *, scales=None, split=0, config=None):
    """As ``reference.block_copy``; ``kv`` and ``pages`` are pinned or on the device, ``copies`` are on the device.

    Nothing waits, and it can be captured. ``config`` replaces the default for blocks of this size.
    """
    _check(kv, pages, scales, split, copies)
    if not pages.numel() or not len(copies):
        return
    config = config or default(kv, pages)
    grid = (min(config.programs, len(copies)),)
    if scales is not None:
        fixed = _tokens(pages, split, config.tile)
        args = kv, scales, pages, copies, n_copies
        launch(block_decode_kernel, grid, copies, *args, **fixed, num_warps=config.warps)
        return
    *both, fixed = _words(kv, pages, config.tile)
    launch(block_copy_kernel, grid, copies, *both, copies, n_copies, **fixed, num_warps=config.warps)


def gather_blocks(kv, block_table, out, *, scales=None, split=0, config=None):
    """As ``reference.gather_blocks``; ``kv`` is pinned or on the device, the rest is on the device.

    Nothing waits. ``config`` replaces the default for blocks of this size.
    """
    (rows, n), heads, pages = block_table.shape, kv.shape[1], out.view(-1, *out.shape[3:])
    _check(kv, out, scales, split)
    require_dense_rows(block_table=block_table)
    if out.shape[:2] != (rows, heads) or out.shape[2] < n:
        raise ValueError(f"{n} blocks of {rows} rows and {heads} heads do not fit {tuple(out.shape)}")
    total = rows * heads * n
    if not total or not out.shape[-2] * out.shape[-1]:
        return
    config = config or default(kv, pages)
    grid = (min(config.programs, total),)
    listed = block_table, block_table.stride(0), n, out.shape[2], len(kv) - 1, total
    if scales is not None:
        fixed = _tokens(pages, split, config.tile)
        launch(
            gather_blocks_decode_kernel,
            grid,
            out,
            kv,
            scales,
            out,
            *listed,
            HEADS=heads,
            **fixed,
            num_warps=config.warps,
        )
        return
    *both, fixed = _words(kv, out, config.tile)
    launch(gather_blocks_kernel, grid, out, *both, *listed, HEADS=heads, **fixed, num_warps=config.warps)
