"""Selection from long rows by a sample of them, in three small steps.

1. One program a row reads a sample and derives a score that slightly more than ``k`` entries should reach.
2. Several programs a row write the entries that reach that score, keys and ids, each to a separate buffer.
3. One program a row searches the threshold among these, as among the entries of a short row, and writes the ids.

All entries are thus read once and compared with one number. The sample never affects the result. If too few or too many
entries reach its score (in a row of repeated scores, say), the last step searches the whole row, which takes
proportionally longer. (A sample to bound a rank: Floyd and Rivest, Expected Time Bounds for Selection, CACM 18, 1975.)
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..._layout import whole
from ..._operands import batch_and_head, log2, row_ptr
from ..._overlap import launch, release, wait
from .keys import MINUS_INF, entries, load_keys, ordered, pad, take, write
from .row import TOP, fifths, inside, narrow, select_keys, threshold

# Measured on an H200, 64 rows of 32k and 8 of 128k.
CHUNK, WARPS = 1024, 4  # entries and warps of a program of the second step
SAMPLE_WARPS = 8


@triton.jit(do_not_specialize=["rows", "n"])
def topk_select_sample_kernel(
    scores,
    rows,
    p_from,
    n,
    wanted,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SAMPLE: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The score of rank ``wanted / n`` in a sample of each row of ``n``, as a key.

    The smallest key if there are fewer entries, or if the last step holds the whole row.
    """
    wait(PDL)
    # After the wait, not before: the next kernel reads the scores at once, without waiting for them.
    release(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    n = entries(rows, i_batch, n, TOKENS)
    if n <= HELD:
        tl.store(p_from + i_row, MINUS_INF + 1)
    else:
        # One entry of each of SAMPLE equal stretches, at no constant distance: text may repeat itself.
        o_s = tl.arange(0, SAMPLE).to(tl.int64)
        b_within = ((((o_s + 1) * 2654435761) & 0xFFFFFFFF) * n) >> 32  # 0 .. n - 1
        o_n = (o_s * n + b_within) // SAMPLE
        b_key = ordered(tl.load(row_ptr(scores, i_batch, i_head) + o_n))  # [SAMPLE]
        rank = tl.maximum((wanted / n + 0.5).to(tl.int32), 1)
        lo, _, _, usable = threshold(b_key, rank)
        tl.store(p_from + i_row, tl.where(usable < rank, MINUS_INF + 1, lo))


@triton.jit(do_not_specialize=["rows", "n"])
def topk_select_collect_kernel(
    scores,
    blocks,
    rows,
    p_from,
    p_counts,
    p_keys,
    p_ids,
    n,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keys and ids of the entries of one chunk that reach the sample's score, ascending, and how many there are."""
    i_chunk, i_row = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    o_n = i_chunk * N + tl.arange(0, N)
    # Before the wait: the preceding kernel releases this one only after the scores are written, and writes none itself.
    live = entries(rows, i_batch, n, TOKENS)
    if rows is not None and i_chunk * N >= live:  # the next step does not read it
        wait(PDL)
        return
    b_key = load_keys(row_ptr(scores, i_batch, i_head), o_n, live, n, rows, WHOLE)  # [N]
    wait(PDL)
    release(PDL)
    m_take = b_key >= tl.load(p_from + i_row)
    b_at = tl.cumsum(m_take.to(tl.int32), 0) - 1
    i_part = (i_row * chunks + i_chunk).to(tl.int64)
    # Entries beyond the room are only counted; the next step then reads nothing but the count.
    m_take = m_take & (b_at < ROOM)
    tl.store(p_keys + i_part * ROOM + b_at, b_key, mask=m_take)
    p_blocks = None
    if BLOCK_SIZE > 0:
        p_blocks = row_ptr(blocks, i_batch, i_head)
    write(p_ids + i_part * ROOM, p_blocks, o_n, b_at, m_take, BLOCK_SIZE)
    tl.store(p_counts + i_part, tl.max(b_at, 0) + 1)


@triton.jit
def _search_row(p_row, n, wide, rows, k, N: tl.constexpr, WHOLE: tl.constexpr):
    """As ``row.threshold``, of a row that is read ``N`` entries at a time."""
    usable, lo, hi = n * 0, n * 0 + TOP, n * 0 + MINUS_INF
    for i in range(0, n, N):
        b_key = load_keys(p_row, i + tl.arange(0, N), n, wide, rows, WHOLE)
        m_usable = b_key > MINUS_INF
        usable += tl.sum(m_usable.to(tl.int32), 0)
        lo = tl.minimum(lo, tl.min(tl.where(m_usable, b_key, TOP), 0))
        hi = tl.maximum(hi, tl.max(b_key, 0))
    hi += 1
    count, over = usable, usable * 0
    while (count > k) & (hi - lo != 1):
        v_1, v_2, v_3, v_4 = fifths(lo, hi)
        v_1, v_2, v_3, v_4 = inside(lo, hi, v_1, v_2, v_3, v_4)
        n_1, n_2, n_3, n_4 = usable * 0, usable * 0, usable * 0, usable * 0
        for i in range(0, n, N):
            b_key = load_keys(p_row, i + tl.arange(0, N), n, wide, rows, WHOLE)
            n_1 += tl.sum((b_key >= v_1).to(tl.int32), 0)
            n_2 += tl.sum((b_key >= v_2).to(tl.int32), 0)
            n_3 += tl.sum((b_key >= v_3).to(tl.int32), 0)
            n_4 += tl.sum((b_key >= v_4).to(tl.int32), 0)
        lo, count, hi, over = narrow(lo, count, hi, over, v_1, v_2, v_3, v_4, n_1, n_2, n_3, n_4, k)
    return lo, count, over, usable


@triton.jit
def _select_whole(
    p_row,
    p_blocks,
    p_out,
    n,
    wide,
    rows,
    k,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write the ids of the ``k`` best entries of a row, reading the whole row several times."""
    lo, count, over, usable = _search_row(p_row, n, wide, rows, k, N, WHOLE)
    need = tl.where(count > k, k - over, n)  # of those that equal lo
    above, ties = n * 0, n * 0
    for i in range(0, n, N):
        o_n = i + tl.arange(0, N)
        b_key = load_keys(p_row, o_n, n, wide, rows, WHOLE)
        m_take, b_at = take(b_key, lo, above, ties, need)
        write(p_out, p_blocks, o_n, b_at, m_take, BLOCK_SIZE)
        above += tl.sum((b_key > lo).to(tl.int32), 0)
        ties += tl.sum((b_key == lo).to(tl.int32), 0)
    pad(p_out, tl.minimum(usable, k), k, TAIL)


@triton.jit(do_not_specialize=["rows", "n", "k", "chunks"])
def topk_select_choose_kernel(
    scores,
    blocks,
    out,
    rows,
    p_from,
    p_counts,
    p_keys,
    p_ids,
    n,
    k,
    chunks,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
    ROOM: tl.constexpr,
    HELD: tl.constexpr,
    BC: tl.constexpr,
    TAIL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select from what the chunks of a row have contributed, if ``HELD`` entries hold it."""
    wait(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    p_to = row_ptr(out, i_batch, i_head)
    i_part = i_row.to(tl.int64) * chunks
    o_c = tl.arange(0, BC)
    b_count = tl.load(p_counts + i_part + o_c, mask=o_c < chunks, other=0)  # [BC]
    live = entries(rows, i_batch, n, TOKENS)
    b_count = tl.where(o_c * N < live, b_count, 0)  # chunks after the row's end have written none
    least = tl.load(p_from + i_row)
    total = tl.sum(b_count, 0)
    if (total <= HELD) & ((total >= k) | (least == MINUS_INF + 1)):
        # The chunk that holds each of them, by binary search in the running sum.
        b_end = tl.cumsum(b_count, 0)  # [BC]
        o_h = tl.arange(0, HELD)
        b_chunk = tl.zeros([HELD], tl.int32)
        for i in tl.static_range(1, log2(BC) + 1):
            b_before = tl.gather(b_end, b_chunk + (BC >> i) - 1, 0)  # [HELD]
            b_chunk += tl.where(b_before <= o_h, BC >> i, 0)
        b_from = o_c * ROOM - b_end + b_count  # offset from a position among all to a position in the chunks' buffers
        o_at = i_part * ROOM + tl.gather(b_from, b_chunk, 0) + o_h
        m_h = o_h < total
        b_key = tl.load(p_keys + o_at, mask=m_h, other=MINUS_INF)  # [HELD]
        b_id = tl.load(p_ids + o_at, mask=m_h, other=0)  # [HELD]
        select_keys(p_to, b_key, b_id, k, TAIL, PDL)
    else:
        p_row = row_ptr(scores, i_batch, i_head)
        p_blocks = None
        if BLOCK_SIZE > 0:
            p_blocks = row_ptr(blocks, i_batch, i_head)
        _select_whole(p_row, p_blocks, p_to, live, n, rows, k, BLOCK_SIZE, WHOLE, HELD, TAIL)


def scratch_size(rows: int, n: int, room: int, chunk: int | None) -> int:
    """int32 entries of scratch memory for ``rows`` rows of ``n`` scores."""
    chunk = chunk or CHUNK
    return sum(_sizes(rows, triton.cdiv(n, chunk), min(chunk, room)))


def _sizes(rows: int, chunks: int, room: int) -> tuple[int, int, int, int]:
    return whole(rows), whole(rows * chunks), whole(rows * chunks * room), rows * chunks * room


def select_sampled(where, scores, blocks, out, rows, k, scratch, fixed, sample, room, config):
    """Launch the kernels, with ``sample`` and ``room`` of :func:`.config.tiles`.

    ``fixed`` are the constants that a selection from a short row has as well.
    """
    batch, heads, n = where.shape
    chunk = config.chunk or CHUNK
    lists, chunks, part = batch * heads, triton.cdiv(n, chunk), min(chunk, room)
    sizes = _sizes(lists, chunks, part)
    least, counts, keys, ids = scratch[: sum(sizes)].split(sizes)
    # As many standard errors above what the k best have in the sample as below what fills the room.
    wanted = (math.sqrt(k) + math.sqrt(room)) ** 2 / 4 * sample
    tile = {"HEADS": heads, "TOKENS": fixed["TOKENS"]}
    named = {**tile, "SAMPLE": sample, "HELD": room, "num_warps": SAMPLE_WARPS}
    launch(topk_select_sample_kernel, (lists,), where, scores, rows, least, n, wanted, **named)
    args = scores, blocks, rows, least, counts, keys, ids, n
    named = {**tile, "BLOCK_SIZE": fixed["BLOCK_SIZE"], "WHOLE": fixed["WHOLE"], "N": chunk, "ROOM": part}
    launch(topk_select_collect_kernel, (chunks, lists), where, *args, **named, num_warps=config.warps or WARPS)
    args = scores, blocks, out, rows, least, counts, keys, ids, n, k, chunks
    named = {"N": chunk, "ROOM": part, "HELD": room, "BC": triton.next_power_of_2(chunks), **fixed}
    warps = config.last_warps or (8 if room <= 4096 else 16)
    launch(topk_select_choose_kernel, (lists,), where, *args, **named, num_warps=warps)
