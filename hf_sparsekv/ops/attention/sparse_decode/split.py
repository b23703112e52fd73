"""Exact attention of one query per row over chosen cached tokens: the kernel over the parts.

The tokens of a row and KV head (the chosen stored tokens, the recent buffer, the means) are split over several
programs. Each program keeps a running softmax for the whole group of query heads. The number of programs of a row
follows from the lengths of all rows: see :mod:`.share`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..._ascending import find
from ..._operands import padded, row_ptr
from ..._overlap import release, wait
from ..._paged import find_recent, find_tokens, load_codes, load_row, locate, locate_page, open_blocks
from .merge import LOG2E
from .share import Share, count_means, count_recent, find_part


class Stored(NamedTuple):
    """Stored blocks ``[num_blocks, H, block_size, D]``, and the scales of codes (:class:`..._operands.Scales`)."""

    ptr: Any
    block: Any
    head: Any
    token: Any
    scales: Any = None
    scales_block: Any = None
    scales_head: Any = None


class Recent(NamedTuple):
    """Sinks and recent window ``[batch, H, end, D]``; entries ``first .. end - 1`` that hold a token are attended."""

    ptr: Any
    batch: Any
    head: Any
    token: Any
    sinks: Any
    first: Any
    end: Any


class Means(NamedTuple):
    """Means that represent the tokens that are not attended.

    ``means [num_blocks, H, D]``, the chosen tokens ``[batch, H, n]``, and the number of blocks that share a mean.
    """

    ptr: Any
    block: Any
    head: Any
    columns: Any
    columns_batch: Any
    columns_head: Any
    span: Any


class Parts(NamedTuple):
    """Results of each part and KV head, contiguous float32, and the ranges of parts of each row.

    ``acc`` is the attention ``[parts, H, G, Dv]``, ``lse`` the base-2 logarithm of the denominator ``[parts, H, G]``,
    ``count`` the number of tokens ``[parts, H]``. ``ranges``, int32 ``[batch, 2]``, has the first part of each row and
    its number of parts. Where lists have lengths of their own, a part is one KV head's: no dimension ``H``, and ranges
    ``[batch * H, 2]``. ``aim`` is the number of parts to aim at, see :class:`.share.Share`; 0 if it is not needed.
    """

    acc: Any
    lse: Any
    count: Any
    ranges: Any
    aim: Any = 0


class Logits(NamedTuple):
    """Scale and softcap that turn products into logits: two floats, or one and None."""

    scale: Any
    softcap: Any


@triton.jit
def base_2(b_s, scale, softcap):
    """Base-2 logits of the products ``b_s``."""
    if softcap is not None:
        b_s = b_s * (scale / softcap)
        b_s = softcap * (2.0 * tl.sigmoid(2.0 * b_s) - 1.0)  # tanh
        b_s = b_s * LOG2E
    else:
        b_s = b_s * (scale * LOG2E)
    return b_s


@triton.jit
def weigh(b_s, b_max):
    """Weights of the logits ``b_s [heads, tokens]``, the updated maxima, and the factor for earlier sums."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # nothing attended yet: -inf - -inf is no number
    return tl.exp2(b_s - b_base[:, None]), b_new, tl.exp2(b_max - b_base)


@triton.jit
def open_means(
    i,
    means,
    n,
    p_table,
    sealed,
    sinks,
    spans,
    i_batch,
    i_head,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
):
    """Pointers to the means of spans ``i .. i + BN - 1``, and how many tokens each mean represents, ``[BN]`` each.

    A mean represents the selectable tokens of its span that are not among the ``n`` chosen ones.
    """
    tokens = means.span * BLOCK_SIZE
    o_s = i + tl.arange(0, BN)
    b_end = tl.minimum((o_s + 1) * tokens, sealed)
    m_s = o_s < spans
    b_last = tl.load(p_table + tl.cdiv(b_end, BLOCK_SIZE) - 1, mask=m_s, other=-1)  # [BN], the last sealed block
    b_unread = tl.where(b_last >= 0, b_end - tl.maximum(o_s * tokens, sinks), 0)
    p_columns = means.columns + i_batch * means.columns_batch + i_head * means.columns_head
    # Chosen tokens ascend: those of a span are the ones below its end less the ones below its beginning.
    is_end = (tl.arange(0, 2) == 1)[None, :]
    b_bound = tl.where(is_end, b_end[:, None], tl.minimum(o_s * tokens, sealed)[:, None])  # [BN, 2]
    # Half a digit more than there are: a logarithm is rounded.
    digits = (tl.log2(tl.maximum(n, 1).to(tl.float32)) + 1.5).to(tl.int32)
    b_below = find(p_columns, b_bound, n, digits)
    b_unread -= tl.sum(tl.where(is_end, b_below, -b_below), 1)
    p_mean = means.ptr + tl.maximum(b_last, 0).to(tl.int64) * means.block + i_head * means.head
    return p_mean, tl.maximum(b_unread, 0)


@triton.jit
def times(b_s, b_unread):
    """Base-2 logits ``b_s [heads, spans]`` of means that represent ``b_unread [spans]`` tokens each, so weighted."""
    return b_s + tl.log2(tl.maximum(b_unread, 1).to(tl.float32))[None, :]


@triton.jit
def take_tile(
    b_q,
    b_max,
    b_sum,
    b_acc,
    p_k,
    m_n,
    b_unread,
    scale,
    softcap,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Take a tile of tokens into the running softmax: those that ``m_n`` marks, keys at ``p_k [BN]``.

    ``b_unread [BN]``: of how many tokens each is the mean, or None.
    """
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    # Tokens that are not attended may hold anything, NaN included, and are not read.
    b_k = tl.load(p_k[:, None] + o_k[None, :], mask=m_n[:, None] & (o_k < DK)[None, :], other=0.0)  # [BN, BK]
    b_v = tl.load(p_k[:, None] + DK + o_v[None, :], mask=m_n[:, None] & (o_v < DV)[None, :], other=0.0)  # [BN, BV]
    return take_loaded(b_q, b_max, b_sum, b_acc, b_k, b_v, m_n, b_unread, scale, softcap)


@triton.jit
def take_loaded(b_q, b_max, b_sum, b_acc, b_k, b_v, m_n, b_unread, scale, softcap):
    """As :func:`take_tile`, of keys ``b_k [BN, BK]`` and values ``b_v [BN, BV]``: zeros where ``m_n`` marks none."""
    b_k, b_v = b_k.to(b_q.dtype), b_v.to(b_q.dtype)  # float32 where dtypes differ
    b_s = base_2(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), scale, softcap)  # [BG, BN]
    if b_unread is not None:
        b_s = times(b_s, b_unread)
    b_p, b_max, b_keep = weigh(tl.where(m_n[None, :], b_s, float("-inf")), b_max)
    b_sum = b_sum * b_keep + tl.sum(b_p, 1)
    b_acc = b_acc * b_keep[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")  # [BG, BV]
    return b_max, b_sum, b_acc


@triton.jit
def whole(b_sum):
    """Denominators; 1 where nothing is attended: such a part is zeros of no weight."""
    return tl.where(b_sum > 0, b_sum, 1.0)


@triton.jit
def store_part(
    parts,
    i,
    i_head,
    b_max,
    b_sum,
    b_out,
    b_count,
    o_g,
    m_first,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
):
    """Attention ``b_out`` and denominator of heads ``o_g`` in part ``i``; where ``m_first``, its number of tokens."""
    i_out = i * tl.num_programs(1) + i_head  # in 64 bits, as i_head is
    o_out, o_v = i_out * GROUP + o_g, tl.arange(0, b_out.shape[1])
    b_lse = tl.where(b_sum > 0, b_max + tl.log2(whole(b_sum)), float("-inf"))
    tl.store(parts.lse + o_out, b_lse, mask=o_g < GROUP)
    m_out = (o_g < GROUP)[:, None] & (o_v < DV)[None, :]
    tl.store(parts.acc + o_out[:, None] * DV + o_v[None, :], b_out, mask=m_out)
    tl.store(parts.count + i_out, tl.sum(b_count, 0).to(tl.float32), mask=m_first)


@triton.jit
def store_range(parts, i_batch, i, n_parts, m_first):
    """Part ``i`` is the first of ``n_parts`` of row (or list) ``i_batch``, if ``m_first``."""
    tl.store(parts.ranges + 2 * i_batch, i, mask=m_first)
    tl.store(parts.ranges + 2 * i_batch + 1, n_parts, mask=m_first)


@triton.jit
def count_from_host(from_host, b_host, i_batch, i_head, m_first):
    """Add the tokens ``b_host`` that this program has read from ``kv``."""
    n_host = tl.sum(b_host, 0)
    tl.atomic_add(row_ptr(from_host, i_batch, i_head), n_host.to(tl.int64), mask=(n_host > 0) & m_first, sem="relaxed")


@triton.jit
def load_query(q, i_batch, i_head, GROUP: tl.constexpr, DK: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr):
    """The queries of a row and KV head ``[BG, BK]``."""
    o_g, o_k = tl.arange(0, BG), tl.arange(0, BK)
    m_q = (o_g < GROUP)[:, None] & (o_k < DK)[None, :]
    p_q = q.ptr + i_batch * q.batch + (i_head * GROUP + o_g[:, None]) * q.head
    return tl.load(p_q + o_k[None, :] * q.dim, mask=m_q, other=0.0)


@triton.jit
def find_stored(
    o_n,
    m_n,
    p_table,
    p_ids,
    p_page_ids,
    pages,
    recent,
    sealed,
    GRANULARITY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Pages of the chosen tokens ``o_n [BN]`` in ``m_n``, positions in them (:func:`..._paged.locate`), and two masks.

    The first mask has the tokens to attend, the second those of them that are in ``kv``.
    """
    if GRANULARITY == "token":
        b_id = tl.load(p_ids + o_n, mask=m_n, other=-1)  # [BN]
        b_page, o_in, m_n, m_kv = find_tokens(b_id, m_n, sealed, p_table, pages, BLOCK_SIZE)
    else:
        b_block, b_physical_id, b_page = open_blocks(o_n // BLOCK_SIZE, m_n, p_table, p_ids, p_page_ids)  # [BN]
        o_in = o_n % BLOCK_SIZE
        m_n = m_n & (b_physical_id >= 0)
        if GRANULARITY == "block":
            b_token = b_block * BLOCK_SIZE + o_in  # [BN]
            m_n = m_n & (b_token >= recent.sinks) & (b_token < sealed)
        m_kv = m_n
        if pages is not None:
            m_n = m_n & (b_page != -1)
            m_kv = m_n & (b_page < 0)
    return b_page, o_in, m_n, m_kv


@triton.jit(do_not_specialize=["rows", "batch", "n"])
def sparse_decode_split_kernel(
    q,
    kv,
    pages,
    recent,
    rows,
    table,
    ids,
    page_ids,
    used,
    means,
    parts,
    from_host,
    batch,
    n,
    logits,
    GRANULARITY: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    BATCH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one part of the stored tokens, of the recent buffer or of the means, of one row and KV head.

    ``batch`` and ``n``: see :class:`.share.Share`. With ``used`` the parts are those of lists, of all KV heads.
    """
    wait(PDL)
    BG: tl.constexpr = padded(GROUP)
    BK: tl.constexpr = padded(DK)
    BV: tl.constexpr = padded(DV)
    BOUNDED: tl.constexpr = (GRANULARITY == "all") or (used is not None)
    i, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    share = Share(batch, parts.aim, tl.num_programs(0), n)
    scale, softcap = logits.scale, logits.softcap
    if BATCH == 1 and used is None:  # one row only: its query is loaded together with its length, not after it
        b_q = load_query(q, 0, i_head, GROUP, DK, BG, BK)
    if used is not None:
        there, i_list, i_part, kinds, n_parts = find_part(
            i, rows, share, recent, means, BOUNDED, BLOCK_SIZE, BN, BATCH, used, HEADS
        )
        i_batch, i_head, i_slot = i_list // HEADS, i_list % HEADS, i_head  # of the only program in this dimension
    else:
        there, i_batch, i_part, kinds, n_parts = find_part(
            i, rows, share, recent, means, BOUNDED, BLOCK_SIZE, BN, BATCH
        )
        i_list, i_slot = i_batch, i_head
    if not there:
        return
    length, sealed = load_row(rows, i_batch)
    o_g, o_k = tl.arange(0, BG), tl.arange(0, BK)
    if BATCH != 1 or used is not None:
        b_q = load_query(q, i_batch, i_head, GROUP, DK, BG, BK)  # [BG, BK]
    if not NATIVE:
        b_q = b_q.to(tl.float32)
    b_max = tl.full([BG], float("-inf"), tl.float32)
    b_sum = tl.zeros([BG], tl.float32)
    b_acc = tl.zeros([BG, BV], tl.float32)
    b_count, b_host = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)

    if used is not None:
        n = tl.minimum(n, tl.load(row_ptr(used, i_batch, i_head)))
    if i_part < kinds.stored:
        p_table, p_ids, p_page_ids = table.ptr + i_batch * table.row, None, None
        if ids is not None:
            p_ids = row_ptr(ids, i_batch, i_head)
        if page_ids is not None:
            p_page_ids = row_ptr(page_ids, i_batch, i_head)
        if GRANULARITY == "all":
            n = tl.minimum(n, sealed)
        per_part = tl.cdiv(tl.cdiv(n, kinds.stored), BN) * BN
        first = i_part * per_part
        end = tl.minimum(first + per_part, n)
        for j in tl.range(first, end, BN, num_stages=STAGES):
            o_n = j + tl.arange(0, BN)
            b_page, o_in, m_n, m_kv = find_stored(
                o_n, o_n < end, p_table, p_ids, p_page_ids, pages, recent, sealed, GRANULARITY, BLOCK_SIZE
            )
            b_count += m_n.to(tl.int32)
            if from_host is not None:
                b_host += m_kv.to(tl.int32)
            if kv.scales is None:
                p_k = locate(b_page, o_in, kv, pages, i_head)  # [BN]
                b_max, b_sum, b_acc = take_tile(
                    b_q, b_max, b_sum, b_acc, p_k, m_n, None, scale, softcap, DK, DV, BK, BV
                )
            elif pages is not None:
                p_k, m_page = locate_page(b_page, o_in, pages), m_n & (b_page >= 0)
                b_max, b_sum, b_acc = take_tile(
                    b_q, b_max, b_sum, b_acc, p_k, m_page, None, scale, softcap, DK, DV, BK, BV
                )
        if kv.scales is not None:
            # Codes go through registers: tiles of 16 tokens take 209 to 242, as without codes, of 32 all, of 64 more.
            # In a loop of their own they do not keep the rest from being loaded ahead, and often a tile has none.
            KIND: tl.constexpr = recent.ptr.dtype.element_ty
            CN: tl.constexpr = min(BN, 16)
            o_v = tl.arange(0, BV)
            for j in range(first, end, CN):
                o_n = j + tl.arange(0, CN)
                b_page, o_in, m_n, m_kv = find_stored(
                    o_n, o_n < end, p_table, p_ids, p_page_ids, pages, recent, sealed, GRANULARITY, BLOCK_SIZE
                )
                if tl.max(m_kv.to(tl.int32), 0) > 0:
                    b_k = load_codes(b_page, o_in, m_kv, kv, pages, i_head, o_k, DK, DV, "k", KIND)  # [BN, BK]
                    b_v = load_codes(b_page, o_in, m_kv, kv, pages, i_head, o_v, DK, DV, "v", KIND)  # [BN, BV]
                    b_max, b_sum, b_acc = take_loaded(b_q, b_max, b_sum, b_acc, b_k, b_v, m_kv, None, scale, softcap)
    elif i_part < kinds.stored + kinds.recent:
        ring = recent.end - recent.sinks
        per_part = tl.cdiv(tl.cdiv(count_recent(length, sealed, recent), kinds.recent), BN) * BN
        first = recent.first + (i_part - kinds.stored) * per_part
        length = tl.minimum(length, first + per_part - recent.sinks + sealed)  # of this part
        for j in tl.range(first, recent.sinks + length - sealed, BN, num_stages=STAGES):
            o_n = j + tl.arange(0, BN)
            b_entry, m_n = find_recent(o_n, recent.sinks, ring, length, sealed)
            p_k = row_ptr(recent, i_batch, i_head) + b_entry.to(tl.int64) * recent.token  # [BN]
            b_count += m_n.to(tl.int32)
            b_max, b_sum, b_acc = take_tile(b_q, b_max, b_sum, b_acc, p_k, m_n, None, scale, softcap, DK, DV, BK, BV)
    elif means is not None:
        p_table = table.ptr + i_batch * table.row
        spans = count_means(means, sealed, BLOCK_SIZE)
        per_part = tl.cdiv(tl.cdiv(spans, tl.maximum(kinds.means, 1)), BN) * BN
        first = (i_part - kinds.stored - kinds.recent) * per_part
        for j in tl.range(first, tl.minimum(first + per_part, spans), BN, num_stages=1):
            p_k, b_unread = open_means(
                j, means, n, p_table, sealed, recent.sinks, spans, i_batch, i_head, BLOCK_SIZE, BN
            )
            m_n = b_unread > 0
            b_max, b_sum, b_acc = take_tile(
                b_q, b_max, b_sum, b_acc, p_k, m_n, b_unread, scale, softcap, DK, DV, BK, BV
            )

    release(PDL)
    if from_host is not None:
        count_from_host(from_host, b_host, i_batch, i_head, True)
    b_out = b_acc / whole(b_sum)[:, None]
    store_part(parts, i, i_slot, b_max, b_sum, b_out, b_count, o_g, True, GROUP, DV)
    store_range(parts, i_list, i, n_parts, (i_part == 0) & (i_slot == 0))
