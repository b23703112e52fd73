"""Selection from rows too long for one program.

Several programs a row find the threshold digit by digit from histograms: four digits of 256 bins, the most significant
first. Then each program writes the ids of its chunk. Partial histograms are in scratch memory, so there are no atomics
and the result does not depend on the order of the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._layout import whole
from ..._operands import batch_and_head, row_ptr
from .keys import MINUS_INF, entries, load_keys, pad, take, write

CHUNK, WARPS = 8192, 8  # entries and warps of a program. Not tuned yet.
BINS = tl.constexpr(256)
STATE = tl.constexpr(4)  # int32 of a row after each digit: threshold so far, ties to take, ids in all, unused


@triton.jit
def _refine(p_state, p_counts, chunks, k, DIGIT: tl.constexpr, BC: tl.constexpr):
    """Digit ``DIGIT - 1`` of the threshold of a row, from the histograms of its chunks.

    Returns that digit and the state: the threshold's prefix up to it, the ties still to take, and ids in all.
    """
    o_bin = tl.arange(0, BINS)
    b_bins = tl.zeros([BINS], tl.int32)
    for i in range(0, chunks, BC):
        o_c = i + tl.arange(0, BC)
        p_bins = p_counts + o_c[:, None] * BINS + o_bin[None, :]
        b_bins += tl.sum(tl.load(p_bins, mask=(o_c < chunks)[:, None], other=0), 0)  # [BC, BINS]
    usable = tl.sum(b_bins, 0)
    if DIGIT == 1:
        prefix = 0
        total = tl.minimum(usable, k)
        need = total
    else:
        p_last = p_state + (DIGIT - 1) * STATE
        prefix, need, total = tl.load(p_last), tl.load(p_last + 1), tl.load(p_last + 2)
    # Entries with this digit or a larger one fall as the digit grows: take the last one that has enough.
    b_from = usable - tl.cumsum(b_bins, 0) + b_bins  # [BINS]
    digit = tl.sum((b_from >= need).to(tl.int32), 0) - 1
    need -= tl.sum(tl.where(o_bin > digit, b_bins, 0), 0)
    if DIGIT == 1:
        prefix = digit - 128  # the first digit holds the sign
    else:
        prefix = prefix * BINS + digit
    return digit, prefix, need, total


@triton.jit(do_not_specialize=["rows", "n", "k", "chunks"])
def topk_select_histogram_kernel(
    scores,
    rows,
    p_counts,
    p_above,
    p_state,
    n,
    k,
    chunks,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    DIGIT: tl.constexpr,
    N: tl.constexpr,
    BC: tl.constexpr,
):
    """Count digit ``DIGIT`` over the entries of one chunk that share the threshold's digits before it."""
    i_chunk, i_row = tl.program_id(0), tl.program_id(1)
    lists = tl.num_programs(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    live = entries(rows, i_batch, n, TOKENS)
    mine = tl.maximum(tl.cdiv(live, N), 1)  # chunks of this row; the first tells how it stands
    if rows is not None and i_chunk >= mine:
        return
    o_bin = tl.arange(0, BINS)
    # Other programs still read the last digit's histograms: two sets take turns.
    p_mine = p_counts + (((DIGIT % 2) * lists + i_row).to(tl.int64) * chunks + i_chunk) * BINS
    p_state += i_row * 4 * STATE
    o_n = i_chunk * N + tl.arange(0, N)
    b_key = load_keys(row_ptr(scores, i_batch, i_head), o_n, live, n, rows, WHOLE)  # [N]
    m_match = b_key > MINUS_INF
    if DIGIT > 0:
        p_last = p_counts + (((DIGIT + 1) % 2 * lists + i_row).to(tl.int64) * chunks) * BINS
        digit, prefix, need, total = _refine(p_state, p_last, mine, k, DIGIT, BC)
        b_own = tl.load(p_last + i_chunk * BINS + o_bin)  # [BINS]
        above = tl.sum(tl.where(o_bin > digit, b_own, 0), 0)
        if DIGIT > 1:
            above += tl.load(p_above + i_row * chunks + i_chunk)
        tl.store(p_above + i_row * chunks + i_chunk, above)
        if i_chunk == 0:
            p_next = p_state + DIGIT * STATE
            tl.store(p_next, prefix)
            tl.store(p_next + 1, need)
            tl.store(p_next + 2, total)
        m_match = m_match & ((b_key >> (32 - 8 * DIGIT)) == prefix)
    b_digit = (b_key >> (24 - 8 * DIGIT)) & 255
    if DIGIT == 0:
        b_digit = b_digit ^ 128
    # The others count as digit 0 and are taken off again.
    b_count = tl.histogram(tl.where(m_match, b_digit, 0), BINS)
    b_count -= tl.where(o_bin == 0, N - tl.sum(m_match.to(tl.int32), 0), 0)
    tl.store(p_mine + o_bin, b_count)


@triton.jit(do_not_specialize=["rows", "n", "k", "chunks"])
def topk_select_compact_kernel(
    scores,
    blocks,
    out,
    rows,
    p_counts,
    p_above,
    p_state,
    n,
    k,
    chunks,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
    BC: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write the ids that one chunk contributes."""
    i_chunk, i_row = tl.program_id(0), tl.program_id(1)
    lists = tl.num_programs(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    live = entries(rows, i_batch, n, TOKENS)
    mine = tl.maximum(tl.cdiv(live, N), 1)
    if rows is not None and i_chunk >= mine:
        return
    p_last = p_counts + ((lists + i_row).to(tl.int64) * chunks) * BINS
    digit, threshold, need, total = _refine(p_state + i_row * 4 * STATE, p_last, mine, k, 4, BC)

    # The number of ids from the chunks before this one.
    o_bin = tl.arange(0, BINS)
    b_above, b_ties = tl.zeros([BC], tl.int32), tl.zeros([BC], tl.int32)
    for i in range(0, i_chunk, BC):
        o_c = i + tl.arange(0, BC)
        m_c = o_c < i_chunk
        b_bins = tl.load(p_last + o_c[:, None] * BINS + o_bin[None, :], mask=m_c[:, None], other=0)  # [BC, BINS]
        b_above += tl.load(p_above + i_row * chunks + o_c, mask=m_c, other=0)  # [BC]
        b_above += tl.sum(tl.where((o_bin > digit)[None, :], b_bins, 0), 1)
        b_ties += tl.sum(tl.where((o_bin == digit)[None, :], b_bins, 0), 1)

    o_n = i_chunk * N + tl.arange(0, N)
    b_key = load_keys(row_ptr(scores, i_batch, i_head), o_n, live, n, rows, WHOLE)  # [N]
    m_take, b_at = take(b_key, threshold, tl.sum(b_above, 0), tl.sum(b_ties, 0), need)
    p_to = row_ptr(out, i_batch, i_head)
    p_blocks = None
    if BLOCK_SIZE > 0:
        p_blocks = row_ptr(blocks, i_batch, i_head)
    write(p_to, p_blocks, o_n, b_at, m_take, BLOCK_SIZE)
    if i_chunk == 0:
        pad(p_to, total, k, TAIL)


def scratch_size(rows: int, n: int, chunk: int | None) -> int:
    """int32 entries of scratch memory for ``rows`` rows of ``n`` scores."""
    return sum(_sizes(rows, triton.cdiv(n, chunk or CHUNK)))


def _sizes(rows: int, chunks: int) -> tuple[int, int, int]:
    return 2 * rows * chunks * BINS.value, whole(rows * chunks), rows * 4 * STATE.value


def select_long(where, scores, blocks, out, rows, k, scratch, fixed, config):
    """Launch the kernels. ``fixed`` are the constants that a selection from a short row has as well."""
    batch, heads, n = where.shape
    chunk = config.chunk or CHUNK
    lists, chunks = batch * heads, triton.cdiv(n, chunk)
    sizes = _sizes(lists, chunks)
    counts, above, state = scratch[: sum(sizes)].split(sizes)
    grid, args = (chunks, lists), (rows, counts, above, state, n, k, chunks)
    shape = {"N": chunk, "BC": 8, "num_warps": config.warps or WARPS}
    counted = {name: fixed[name] for name in ("HEADS", "TOKENS", "WHOLE")}
    with torch.cuda.device_of(where):  # without dependent launches
        for digit in range(4):
            topk_select_histogram_kernel[grid](scores, *args, **counted, DIGIT=digit, **shape)
        topk_select_compact_kernel[grid](scores, blocks, out, *args, **shape, **fixed)
