"""Attention over cached latents, whose values are the beginning of their keys (MLA): the kernels over the parts.

A token is one row: ``Dv`` numbers of latent, which are its value as well, then the rotated rotary part (DeepSeek-V2,
section 2.1, with the up-projections absorbed). It is read once, for the scores and for the sum of the values.

The sum of a head is 512 wide. With 20 heads in a tile of 32 it takes 64 KB of float32, with 64 heads 128 KB, half of an
SM's registers. One program therefore runs on each SM and must overlap its reads with its own products. The stored
tokens and the recent buffer form one list, and a part takes every ``n_parts``-th tile of it. Parts then stay equal
where only the first tokens of a list exist.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._operands import padded, row_ptr
from ..._overlap import release, wait
from ..._paged import find_recent, find_tokens, is_held, load_row, locate, open_blocks
from .share import count_means
from .split import base_2, count_from_host, open_means, store_part, store_range, times, weigh, whole


@triton.jit
def load_queries(
    p_q, head, dim, o_h, o_c, o_r, NATIVE: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr
):
    """Latents ``o_c`` and rotary parts ``o_r`` of heads ``o_h`` of the group at ``p_q``, in the shape of the three."""
    p_head = p_q + o_h.to(tl.int64) * head  # heads of a prompt's last query are as far apart as the prompt is long
    b_qc = tl.load(p_head + o_c * dim, mask=(o_h < GROUP) & (o_c < DV), other=0.0)
    b_qr = tl.load(p_head + (DV + o_r) * dim, mask=(o_h < GROUP) & (o_r < DK - DV), other=0.0)
    if not NATIVE:
        b_qc, b_qr = b_qc.to(tl.float32), b_qr.to(tl.float32)
    return b_qc, b_qr


@triton.jit
def load_rows(p_row, m_n, DK: tl.constexpr, DV: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr):
    """Latents ``[BN, BC]`` and rotary parts ``[BN, BR]`` of the rows at ``p_row [BN]`` that ``m_n [BN]`` marks."""
    o_c, o_r = tl.arange(0, BC), tl.arange(0, BR)
    # Tokens that are not attended may hold anything, NaN included, and are not read.
    b_c = tl.load(p_row[:, None] + o_c[None, :], mask=m_n[:, None] & (o_c < DV)[None, :], other=0.0)  # [BN, BC]
    b_r = tl.load(p_row[:, None] + DV + o_r[None, :], mask=m_n[:, None] & (o_r < DK - DV)[None, :], other=0.0)
    return b_c, b_r


@triton.jit
def take_rows(b_qc, b_qr, b_max, b_sum, b_acc, b_c, b_r, m_n, b_unread, scale, softcap):
    """Take a tile of rows into the running softmax: those that ``m_n [BN]`` marks.

    ``b_unread [BN]``: of how many tokens each is the mean, or None.
    """
    b_c, b_r = b_c.to(b_qc.dtype), b_r.to(b_qc.dtype)  # float32 where dtypes differ
    b_s = tl.dot(b_qc, tl.trans(b_c), input_precision="ieee")  # [BH, BN]
    b_s = base_2(tl.dot(b_qr, tl.trans(b_r), b_s, input_precision="ieee"), scale, softcap)
    if b_unread is not None:
        b_s = times(b_s, b_unread)
    b_p, b_max, b_keep = weigh(tl.where(m_n[None, :], b_s, float("-inf")), b_max)
    b_sum = b_sum * b_keep + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_c.dtype), b_c, b_acc * b_keep[:, None], input_precision="ieee")  # [BH, BC]
    return b_max, b_sum, b_acc


@triton.jit
def my_heads(GROUP: tl.constexpr, BH: tl.constexpr):
    """Part, KV head and first query head of this program.

    Programs that read the same rows are neighbours, so that the second one finds them in L2.
    """
    TILES: tl.constexpr = (GROUP + BH - 1) // BH
    return tl.program_id(0) // TILES, tl.program_id(1).to(tl.int64), tl.program_id(0) % TILES * BH


@triton.jit(do_not_specialize=["rows", "n_parts", "near_parts", "n"])
def sparse_decode_latent_tokens_kernel(
    q,
    kv,
    pages,
    recent,
    rows,
    table,
    ids,
    used,
    means,
    parts,
    from_host,
    n_parts,
    near_parts,
    n,
    logits,
    NATIVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one part of a row's tokens or means, for ``BH`` query heads of one KV head.

    Each row has ``n_parts`` parts. The first ``near_parts`` cover the chosen tokens (a list of ``n``) and the recent
    buffer, the others the means.
    """
    wait(PDL)
    BC: tl.constexpr = padded(DV)
    BR: tl.constexpr = padded(DK - DV)
    i, i_head, i_first = my_heads(GROUP, BH)
    scale, softcap = logits.scale, logits.softcap
    i_batch, i_part = (i // n_parts).to(tl.int64), i % n_parts
    length, sealed = load_row(rows, i_batch)
    o_h, o_c, o_r = i_first + tl.arange(0, BH), tl.arange(0, BC), tl.arange(0, BR)
    p_q = row_ptr(q, i_batch, i_head * GROUP)
    b_qc, b_qr = load_queries(p_q, q.head, q.dim, o_h[:, None], o_c[None, :], o_r[None, :], NATIVE, GROUP, DK, DV)
    b_max, b_sum = tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32)
    b_acc = tl.zeros([BH, BC], tl.float32)
    b_count, b_host = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)

    p_table, p_ids = table.ptr + i_batch * table.row, row_ptr(ids, i_batch, i_head)
    p_recent, ring = row_ptr(recent, i_batch, i_head), recent.end - recent.sinks
    if used is not None:
        n = tl.minimum(n, tl.load(row_ptr(used, i_batch, i_head)))
    n = tl.where(sealed > 0, n, 0)
    end = tl.where((length > 0) & (i_part < near_parts), n + recent.sinks + length - sealed, 0)
    for j in tl.range(i_part * BN, end, near_parts * BN, num_stages=STAGES):
        o_n = j + tl.arange(0, BN)
        b_entry, m_recent = find_recent(o_n - n, recent.sinks, ring, length, sealed)
        m_recent = m_recent & (o_n >= n)
        b_id = tl.load(p_ids + o_n, mask=o_n < n, other=-1)  # [BN]
        page, o_in, m_n, m_kv = find_tokens(b_id, o_n < n, sealed, p_table, pages, BLOCK_SIZE)
        if from_host is not None:
            b_host += m_kv.to(tl.int32)
        p_row = locate(page, o_in, kv, pages, i_head)
        p_row = tl.where(m_recent, p_recent + b_entry.to(tl.int64) * recent.token, p_row)
        m_n = m_n | m_recent
        b_count += m_n.to(tl.int32)
        b_c, b_r = load_rows(p_row, m_n, DK, DV, BC, BR)
        b_max, b_sum, b_acc = take_rows(b_qc, b_qr, b_max, b_sum, b_acc, b_c, b_r, m_n, None, scale, softcap)
    if means is not None:
        spans = count_means(means, sealed, BLOCK_SIZE)
        first = tl.where(i_part < near_parts, spans, (i_part - near_parts) * BN)
        for j in tl.range(first, spans, tl.maximum(n_parts - near_parts, 1) * BN, num_stages=1):
            p_row, b_unread = open_means(
                j, means, n, p_table, sealed, recent.sinks, spans, i_batch, i_head, BLOCK_SIZE, BN
            )
            m_n = b_unread > 0
            b_c, b_r = load_rows(p_row, m_n, DK, DV, BC, BR)
            b_max, b_sum, b_acc = take_rows(b_qc, b_qr, b_max, b_sum, b_acc, b_c, b_r, m_n, b_unread, scale, softcap)

    release(PDL)
    if from_host is not None:
        count_from_host(from_host, b_host, i_batch, i_head, i_first == 0)
    b_out = b_acc * (1.0 / whole(b_sum))[:, None]
    store_part(parts, i, i_head, b_max, b_sum, b_out, b_count, o_h, i_first == 0, GROUP, DV)
    store_range(parts, i_batch, i, n_parts, (i_part == 0) & (i_head == 0) & (i_first == 0))


@triton.jit
def open_tile(
    i,
    n,
    block,
    physical_id,
    page,
    length,
    sealed,
    kv,
    pages,
    recent,
    i_batch,
    i_head,
    CHOSEN: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
):
    """Pointer to the tile at ``i``, distance of its rows, mask of rows to attend, and whether it is in ``kv``."""
    o_n = tl.arange(0, BN)
    is_recent, i_recent = i >= n, i - n + recent.first
    o_in = i % BLOCK_SIZE  # of the tile in its block
    there = (physical_id >= 0) & (page != -1)
    in_kv = there
    if pages is not None:
        in_kv = there & (page < 0)
    p_recent = row_ptr(recent, i_batch, i_head) + i_recent.to(tl.int64) * recent.token
    p_rows = tl.where(is_recent, p_recent, locate(page, o_in, kv, pages, i_head))
    step = kv.token
    if STEP == 0:
        if pages is not None:
            step = tl.where(page < 0, kv.token, pages.token)
        step = tl.where(is_recent, recent.token, step)
    b_token = block * BLOCK_SIZE + o_in + o_n
    m_n = there & (b_token < sealed)
    if CHOSEN:
        m_n = m_n & (b_token >= recent.sinks)
    o_n = i_recent + o_n
    m_recent = (o_n < recent.end) & is_held(o_n, recent.sinks, recent.end - recent.sinks, length, sealed)
    return p_rows, step, tl.where(is_recent, m_recent, m_n), in_kv


@triton.jit(do_not_specialize=["rows", "n_parts", "n"])
def sparse_decode_latent_blocks_kernel(
    q,
    kv,
    pages,
    recent,
    rows,
    table,
    ids,
    page_ids,
    parts,
    from_host,
    n_parts,
    n,
    logits,
    NATIVE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one of ``n_parts`` parts of the ``n`` stored tokens and the recent buffer of one row and KV head.

    A program has ``BH`` query heads. A tile is within a block. Its address is computed while earlier tiles are: the
    physical block two tiles ahead, the mask of its tokens one tile ahead. With three ``STAGES`` Triton's pipeline also
    loads it to shared memory two tiles ahead. ``STEP`` is the distance of two rows if it is the same everywhere, else
    0. As a constant it takes no registers.
    """
    wait(PDL)
    BC: tl.constexpr = padded(DV)
    BR: tl.constexpr = padded(DK - DV)
    CHOSEN: tl.constexpr = ids is not None
    i, i_head, i_first = my_heads(GROUP, BH)
    scale, softcap = logits.scale, logits.softcap
    i_batch, i_part = (i // n_parts).to(tl.int64), i % n_parts
    length, sealed = load_row(rows, i_batch)
    o_h, o_c, o_r = i_first + tl.arange(0, BH), tl.arange(0, BC), tl.arange(0, BR)
    p_q = row_ptr(q, i_batch, i_head * GROUP)
    b_qc, b_qr = load_queries(p_q, q.head, q.dim, o_h[:, None], o_c[None, :], o_r[None, :], NATIVE, GROUP, DK, DV)
    b_max, b_sum = tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32)
    b_acc = tl.zeros([BH, BC], tl.float32)
    b_count, b_host = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)
    o_n = tl.arange(0, BN)

    p_table, p_ids, p_page_ids = table.ptr + i_batch * table.row, None, None
    if ids is not None:
        p_ids = row_ptr(ids, i_batch, i_head)
    if page_ids is not None:
        p_page_ids = row_ptr(page_ids, i_batch, i_head)
    n = tl.where(sealed > 0, n, 0)
    if not CHOSEN:
        n = tl.minimum(n, tl.cdiv(sealed, BN) * BN)
    end = tl.where(length > 0, n + recent.end - recent.first, 0)
    j, step = i_part * BN, n_parts * BN
    block, physical_id, page = open_blocks(j // BLOCK_SIZE, j < n, p_table, p_ids, p_page_ids)
    p_rows, row, m_n, in_kv = open_tile(
        j, n, block, physical_id, page, length, sealed, kv, pages, recent, i_batch, i_head, CHOSEN, STEP, BLOCK_SIZE, BN
    )
    block, physical_id, page = open_blocks((j + step) // BLOCK_SIZE, j + step < n, p_table, p_ids, p_page_ids)
    for j in tl.range(i_part * BN, end, step, num_stages=STAGES):
        b_count += m_n.to(tl.int32)
        if from_host is not None:
            b_host += (m_n & in_kv).to(tl.int32)
        m_now = m_n
        b_c, b_r = load_rows(p_rows + o_n * (STEP if STEP else row), m_now, DK, DV, BC, BR)
        p_rows, row, m_n, in_kv = open_tile(
            j + step,
            n,
            block,
            physical_id,
            page,
            length,
            sealed,
            kv,
            pages,
            recent,
            i_batch,
            i_head,
            CHOSEN,
            STEP,
            BLOCK_SIZE,
            BN,
        )
        ahead = j + 2 * step
        block, physical_id, page = open_blocks(ahead // BLOCK_SIZE, ahead < n, p_table, p_ids, p_page_ids)
        b_max, b_sum, b_acc = take_rows(b_qc, b_qr, b_max, b_sum, b_acc, b_c, b_r, m_now, None, scale, softcap)

    release(PDL)
    if from_host is not None:
        count_from_host(from_host, b_host, i_batch, i_head, i_first == 0)
    b_out = b_acc * (1.0 / whole(b_sum))[:, None]
    store_part(parts, i, i_head, b_max, b_sum, b_out, b_count, o_h, i_first == 0, GROUP, DV)
    store_range(parts, i_batch, i, n_parts, (i_part == 0) & (i_head == 0) & (i_first == 0))
