"""From block ids and token ids to addresses: block table, then physical block or device page, then pointer."""

from __future__ import annotations

import triton
import triton.language as tl

from ._operands import log2


@triton.jit
def open_blocks(i, m, p_table, p_ids, p_page_ids):
    """Number in its row, physical block and page of the ``i``-th block where ``m``; -1 where there is none.

    ``i`` counts the row's blocks, or with ``p_ids`` those of a list. Without ``p_page_ids`` the page is the physical
    block.
    """
    if p_page_ids is not None:
        page = tl.load(p_page_ids + i, mask=m, other=-1)
    block = i
    if p_ids is not None:
        block = tl.load(p_ids + i, mask=m, other=-1)
        m = m & (block >= 0)
    physical_id = tl.load(p_table + block, mask=m, other=-1)
    if p_page_ids is None:
        page = physical_id
    return block, physical_id, page


@triton.jit
def load_row(rows, i_batch):
    """Length and sealed tokens of row ``i_batch``; ``rows`` is int32 ``[batch, 2]``, contiguous."""
    return tl.load(rows + 2 * i_batch), tl.load(rows + 2 * i_batch + 1)


@triton.jit
def is_held(o_n, sinks, ring, length, sealed):
    """Mask of the entries ``o_n`` of a recent buffer that hold a token of a row: see :func:`._recent.recent_valid`."""
    b_ahead = o_n - sinks - sealed % tl.maximum(ring, 1)
    b_ahead = tl.where(b_ahead < 0, b_ahead + ring, b_ahead)
    return tl.where(o_n < sinks, o_n < sealed, b_ahead < length - sealed)


@triton.jit
def find_recent(o_n, sinks, ring, length, sealed):
    """Entries of the recent buffer in compact order, and a mask of those that hold a token.

    ``o_n`` counts the sinks first, then the tokens from ``sealed`` on. Occupied entries are therefore contiguous, and a
    loop may stop after them.
    """
    b_entry = o_n + sealed % tl.maximum(ring, 1)
    b_entry = tl.where(b_entry >= sinks + ring, b_entry - ring, b_entry)
    m_n = (o_n < sinks + length - sealed) & ((o_n >= sinks) | (o_n < sealed))
    return tl.where(o_n < sinks, o_n, b_entry), m_n


@triton.jit
def locate(page, o_in, kv, pages, i_head):
    """Pointer to token ``o_in`` of the block ``page``, which without ``pages`` is a physical block of ``kv``.

    With ``pages``, ``page >= 0`` is a device page, and ``-(physical_id + 2)`` a physical block of ``kv``.
    """
    o_in = o_in.to(tl.int64)
    if pages is None:
        p_row = kv.ptr + page.to(tl.int64) * kv.block + i_head * kv.head + o_in * kv.token
    else:
        p_kv = kv.ptr + (-(page + 2)).to(tl.int64) * kv.block + i_head * kv.head
        p_page = pages.ptr + page.to(tl.int64) * pages.page
        p_row = tl.where(page < 0, p_kv, p_page) + o_in * tl.where(page < 0, kv.token, pages.token)
    return p_row


@triton.jit
def locate_page(page, o_in, pages):
    """Pointer to token ``o_in`` of the device page ``page``; of the first page where ``page`` is not a device page."""
    return pages.ptr + tl.maximum(page, 0).to(tl.int64) * pages.page + o_in.to(tl.int64) * pages.token


@triton.jit
def load_codes(
    page,
    o_in,
    m_kv,
    kv,
    pages,
    i_head,
    o_w,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PART: tl.constexpr,
    dtype: tl.constexpr,
):
    """Keys (``PART`` "k") or values ("v") of the tokens ``m_kv`` that ``kv`` holds as codes, dequantised to ``dtype``.

    Other tokens, and channels ``o_w`` that a key or value does not have, give zeros. Addresses are as for
    :func:`locate`.
    """
    o_in, physical_id = o_in.to(tl.int64), page.to(tl.int64)
    if pages is not None:
        physical_id = -(physical_id + 2)
    p_code = kv.ptr + physical_id * kv.block + i_head * kv.head + o_in * kv.token
    p_scale = kv.scales + physical_id * kv.scales_block + i_head * kv.scales_head
    if PART == "k":
        m = m_kv[:, None] & (o_w < DK)[None, :]
        b_code = tl.load(p_code[:, None] + o_w[None, :], mask=m, other=0)
        p_norm = p_scale[:, None] + o_w[None, :]
        b_centre = tl.load(p_norm, mask=m, other=0.0).to(tl.float32)
        b_x = b_centre + b_code.to(tl.float32) * tl.load(p_norm + DK, mask=m, other=0.0).to(tl.float32)
    else:
        m = m_kv[:, None] & (o_w < DV)[None, :]
        b_code = tl.load(p_code[:, None] + DK + o_w[None, :], mask=m, other=0)
        b_scale = tl.load(p_scale + 2 * DK + o_in, mask=m_kv, other=0.0).to(tl.float32)
        b_x = b_code.to(tl.float32) * b_scale[:, None]
    return b_x.to(dtype)


@triton.jit
def find_tokens(b_id, m, sealed, p_table, pages, BLOCK_SIZE: tl.constexpr):
    """Pages of the tokens ``b_id``, positions in them (see :func:`locate`), and two masks.

    The first mask has the tokens of ``m`` that exist, the second those of them that are in ``kv``. Ids are tokens of
    the row and must be below ``sealed``. With ``pages`` they are ``page * BLOCK_SIZE + position in the block``.
    """
    if pages is None:
        m = m & (b_id >= 0) & (b_id < sealed)
        o_in = b_id % BLOCK_SIZE
        page = tl.load(p_table + b_id // BLOCK_SIZE, mask=m, other=-1)
        m = m & (page >= 0)
        m_kv = m
    else:
        page, o_in = b_id >> log2(BLOCK_SIZE), b_id & (BLOCK_SIZE - 1)  # both towards minus infinity
        m = m & (page != -1)
        m_kv = m & (page < 0)
    return page, o_in, m, m_kv
