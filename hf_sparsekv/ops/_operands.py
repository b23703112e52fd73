"""Tensors as kernel arguments: a pointer and its strides in one argument.

A stride is named after the dimension that it steps over; the last dimension is contiguous, unless it has a stride too.
``None`` in the place of a tensor gives ``None`` in the kernel, where ``if x is not None`` is decided at compile time.
Triton always specialises the members (divisible by 16, equal to 1), as it does plain arguments. Only strides that never
change kind may be passed this way; for those that change during an answer see :mod:`._layout`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor


class Query(NamedTuple):
    """``[batch, Hq, Dk]``, strided in any way."""

    ptr: Any
    batch: Any
    head: Any
    dim: Any


class Rows(NamedTuple):
    """``[batch, H, n]``: a list of each row and head, or one vector."""

    ptr: Any
    batch: Any
    head: Any


class LabelRows(NamedTuple):
    """Label channels int32 ``[batch, H, r]``, and their centres and spreads float32 ``[batch, H, 2, r]`` or None."""

    ptr: Any
    batch: Any
    head: Any
    norms: Any
    norms_batch: Any
    norms_head: Any


class Tokens(NamedTuple):
    """``[batch, H, tokens, D]``: the recent buffer, or a ring."""

    ptr: Any
    batch: Any
    head: Any
    token: Any


class AnyTokens(NamedTuple):
    """``[batch, H, tokens, D]``, strided in any way."""

    ptr: Any
    batch: Any
    head: Any
    token: Any
    dim: Any


class Table(NamedTuple):
    """``[rows, n]``: the block table, or numbers of each row of the batch."""

    ptr: Any
    row: Any


class PagedKV(NamedTuple):
    """``[num_blocks, H, block_size, D]``: stored blocks, or their index."""

    ptr: Any
    block: Any
    head: Any
    token: Any


class Scales(NamedTuple):
    """``[num_blocks, H, 2 Dk + block_size]``: of blocks of codes, see :mod:`.storage.quantise.reference`."""

    ptr: Any
    block: Any
    head: Any


class Pages(NamedTuple):
    """``[pages, block_size, D]``: device pages, each with a block of one KV head."""

    ptr: Any
    page: Any
    token: Any


Operand = TypeVar("Operand")


def operand(kind: type[Operand], t: Tensor | None) -> Operand | None:
    """``t`` as ``kind``; None for None. A bool becomes a byte: to Triton it is one bit."""
    if t is None:
        return None
    strides = t.stride()[: len(kind._fields) - 1]
    return kind(t.view(torch.uint8) if t.dtype == torch.bool else t, *strides)


def label_rows(channels: Tensor | None, norms: Tensor | None) -> LabelRows | None:
    """Both as one operand; None without channels, which go with norms.

    Raises:
        ValueError: norms do not fit the channels, or are not contiguous in each row and head.
    """
    if channels is None:
        return None
    batch, head = channels.stride()[:2]
    r = channels.shape[-1]
    assert norms is not None
    if norms.shape != (*channels.shape[:2], 2, r) or norms.stride()[2:] != (r, 1) or norms.dtype != torch.float32:
        raise ValueError(
            f"norms must be float32 {[*channels.shape[:2], 2, r]}, contiguous in each row and head, got {norms.dtype} "
            f"{list(norms.shape)} with strides {norms.stride()}"
        )
    return LabelRows(channels, batch, head, norms, norms.stride(0), norms.stride(1))


def in_each_row(t: Tensor | None) -> tuple[Tensor | None, int]:
    """Numbers of each row, ``t [rows, ...]``, and the entries between two rows': plain arguments, not an operand.

    ``do_not_specialize`` does not work for members. A column of a mask has any alignment, and the mask's stride.
    """
    if t is None:
        return None, 0
    return t.view(torch.uint8) if t.dtype == torch.bool else t, t.stride(0)


def describable(*kept: Tensor) -> bool:
    """Whether tensor descriptors (TMA) can address these: strides and address are whole 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and t.numel() and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        for t in kept
    )


@triton.constexpr_function
def padded(n, least=16):
    """The power of two that holds ``n``, at least ``least``: the side of a tile."""
    return max(least, triton.next_power_of_2(n))


@triton.constexpr_function
def log2(n):
    """Base-2 logarithm of a power of two."""
    return n.bit_length() - 1


@triton.jit
def batch_and_head(i_row, HEADS: tl.constexpr):
    """Row of the batch and KV head of row ``i_row`` of both, in 64 bits: offsets of long contexts need them."""
    return (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)


@triton.jit
def row_ptr(t, i_batch, i_head):
    """Pointer to row ``i_batch`` and head ``i_head`` of ``Rows``, ``LabelRows``, ``Query`` or ``Tokens``."""
    return t.ptr + i_batch * t.batch + i_head * t.head


@triton.jit
def load_norms(t, i_batch, i_head, o_r, m_r, R: tl.constexpr):
    """Centres and spreads of label channels ``o_r`` of ``LabelRows``."""
    p_norm = t.norms + i_batch * t.norms_batch + i_head * t.norms_head + o_r
    return tl.load(p_norm, mask=m_r, other=0.0), tl.load(p_norm + R, mask=m_r, other=1.0)
