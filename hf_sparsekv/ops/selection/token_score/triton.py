"""Approximate score of the tokens of chosen blocks from the label cache: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows, require_rows
from ..._group import MANY, mean_heads
from ..._layout import empty_rows
from ..._operands import PagedKV, Query, Rows, Table, batch_and_head, label_rows, load_norms, operand, padded, row_ptr
from ..._overlap import launch, release, wait
from ..._paged import load_row
from .config import config as default
from .labels import score_all
from .reference import require_filled
from .tensor_core import find_sealed, known, token_score_tensor_core_kernel


@triton.jit(do_not_specialize=["rows", "blocks"])
def token_score_kernel(
    q,
    codes,
    qparams,
    channels,
    rows,
    table,
    ids,
    out,
    blocks,
    sinks,
    MEAN: tl.constexpr,
    EACH: tl.constexpr,
    FILL: tl.constexpr,
    NATIVE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of ``BT`` tokens of one row and KV head. A token's codes are ``WIDTH`` entries."""
    wait(PDL)
    BG: tl.constexpr = padded(GROUP)
    i_row = tl.program_id(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    sealed = load_row(rows, i_batch)[1] // BLOCK_SIZE
    if not FILL:
        blocks = tl.minimum(blocks, sealed)
    tokens = blocks * BLOCK_SIZE  # the compiler knows a divisor of it
    if not FILL:  # noqa: SIM102 (decided when the kernel is compiled)
        if tl.program_id(0) * BT >= tokens:
            return

    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < tokens
    p_ids = None
    if ids is not None:
        p_ids = row_ptr(ids, i_batch, i_head)
    b_block, b_physical_id = find_sealed(o_t // BLOCK_SIZE, m_t, table.ptr + i_batch * table.row, p_ids, sealed)
    b_physical_id, o_in = b_physical_id.to(tl.int64), o_t % BLOCK_SIZE  # [BT]
    m_live = (b_physical_id >= 0) & (b_block * BLOCK_SIZE + o_in >= sinks)

    o_g = tl.arange(0, BG)
    p_channels = row_ptr(channels, i_batch, i_head)
    p_row = q.ptr + i_batch * q.batch + (i_head * GROUP + o_g[:, None]) * q.head
    p_code = codes.ptr + b_physical_id[:, None] * codes.block + i_head * codes.head + o_in[:, None] * codes.token
    # label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q)
    if MEAN:
        b_s, b_sum = tl.zeros([BT], tl.float32), tl.zeros([BW], tl.float32)
    else:
        b_all, b_sum = tl.zeros([BT, BG], tl.float32), tl.zeros([BG], tl.float32)
    b_constant = tl.zeros([BG], tl.float32)
    for i in tl.static_range(0, WIDTH, BW):
        # The query's label channels; packed codes hold the second half of them in the high four bits.
        o_w = i + tl.arange(0, BW)
        m_w = o_w < WIDTH
        m_q = (o_g < GROUP)[:, None] & m_w[None, :]
        b_channel = tl.load(p_channels + o_w, mask=m_w, other=0)  # [BW]
        b_low = tl.load(p_row + b_channel[None, :] * q.dim, mask=m_q, other=0.0).to(tl.float32)  # [BG, BW]
        b_channel = tl.load(p_channels + o_w + WIDTH, mask=m_w, other=0)  # [BW]
        b_high = tl.load(p_row + b_channel[None, :] * q.dim, mask=m_q, other=0.0).to(tl.float32)  # [BG, BW]
        b_centre, b_spread = load_norms(channels, i_batch, i_head, o_w, m_w, 2 * WIDTH)  # [BW]
        b_constant += tl.sum(b_low * b_centre[None, :], 1)
        b_low *= b_spread[None, :]
        b_centre, b_spread = load_norms(channels, i_batch, i_head, o_w + WIDTH, m_w, 2 * WIDTH)
        b_constant += tl.sum(b_high * b_centre[None, :], 1)
        b_high *= b_spread[None, :]
        # Tokens that are not live may hold anything, NaN included, and are not read.
        b_code = tl.load(p_code + o_w[None, :], mask=m_live[:, None] & m_w[None, :], other=0).to(tl.int32)
        b_low_code, b_high_code = b_code & 15, b_code >> 4  # [BT, BW]
        if MEAN:
            b_low_mean = tl.sum(b_low, 0) / GROUP  # [BW]
            b_high_mean = tl.sum(b_high, 0) / GROUP  # [BW]
            b_sum += b_low_mean + b_high_mean
            b_both = b_low_code.to(tl.float32) * b_low_mean[None, :]
            b_s += tl.sum(b_both + b_high_code.to(tl.float32) * b_high_mean[None, :], 1)
        else:
            b_sum += tl.sum(b_low + b_high, 1)
            b_low_q, b_high_q = tl.trans(b_low), tl.trans(b_high)  # [BW, BG]
            if NATIVE:  # digits 0 .. 15 are exact in any 16-bit type
                b_low_q, b_high_q = b_low_q.to(q.ptr.dtype.element_ty), b_high_q.to(q.ptr.dtype.element_ty)
            b_all = tl.dot(b_low_code.to(b_low_q.dtype), b_low_q, b_all, input_precision="ieee")  # [BT, BG]
            b_all = tl.dot(b_high_code.to(b_high_q.dtype), b_high_q, b_all, input_precision="ieee")
    p_param = qparams.ptr + b_physical_id * qparams.block + i_head * qparams.head + o_in * qparams.token
    b_scale = tl.load(p_param, mask=m_live, other=0.0).to(tl.float32)  # [BT]
    b_zero = tl.load(p_param + 1, mask=m_live, other=0.0).to(tl.float32)  # [BT]
    if MEAN:
        b_s = b_scale * b_s + b_zero * known(tl.sum(b_sum, 0))  # [BT]
        b_s += tl.sum(b_constant, 0) / GROUP
    else:
        b_all = b_scale[:, None] * b_all + b_zero[:, None] * known(b_sum)[None, :]
        b_all += b_constant[None, :]
    release(PDL)
    if EACH:
        b_all = tl.where(m_live[:, None] & (b_all == b_all), b_all, float("-inf"))  # [BT, BG]
        p_to = row_ptr(out, i_batch, i_head * GROUP + o_g)[None, :] + o_t[:, None]
        tl.store(p_to, b_all, mask=m_t[:, None] & (o_g < GROUP)[None, :])
    else:
        if not MEAN:  # the maximum of NaN and numbers is a number
            b_s = tl.max(tl.where((o_g < GROUP)[None, :], b_all, float("-inf")), 1)  # [BT]
        b_s = tl.where(m_live & (b_s == b_s), b_s, float("-inf"))
        tl.store(row_ptr(out, i_batch, i_head) + o_t, b_s, mask=m_t)


def token_score(
    q,
    codes,
    qparams,
    channels,
    rows,
    block_table,
    block_ids,
    reduce,
    *,
    sinks,
    norms,
    out=None,
    fill=True,
    sums=None,
    config=None,
):
    """As ``reference.token_score``; ``config`` replaces the default for these shapes."""
    require_filled(fill, block_ids)
    batch, q_heads, _ = q.shape
    heads, block_size, width = codes.shape[1:]
    blocks = (block_table if block_ids is None else block_ids).shape[-1]
    tokens = blocks * block_size
    if out is None:
        out = empty_rows((batch, q_heads if reduce == "none" else heads, tokens), torch.float32, q.device)
    if not tokens:
        return out
    require_rows(rows, batch)
    require_dense_rows(codes=codes, qparams=qparams, channels=channels)
    require_dense_rows(block_table=block_table, block_ids=block_ids, out=out)
    everything = q, codes, qparams, channels, rows, block_table, reduce, sinks, norms, out, fill, sums
    if config is None and block_ids is None and score_all(*everything):
        return out
    group, mean = q_heads // heads, reduce == "mean"
    config = config or default(q, codes, qparams, blocks, mean)
    if mean and group > MANY:
        q, group = mean_heads(q, heads), 1
    labels = codes, qparams.view(torch.int32) if config.tensor_cores else qparams
    args = operand(Query, q), *(operand(PagedKV, t) for t in labels), label_rows(channels, norms), rows
    args = *args, operand(Table, block_table), operand(Rows, block_ids), operand(Rows, out)
    fixed = {"MEAN": mean, "EACH": reduce == "none", "FILL": fill, "HEADS": heads, "GROUP": group}
    fixed |= {"BLOCK_SIZE": block_size, "WIDTH": width}
    if config.tensor_cores:
        grid = triton.cdiv(blocks, config.blocks), batch * heads
        fixed |= {"BG": config.columns, "BLOCKS": config.blocks, "num_warps": config.warps}
        launch(token_score_tensor_core_kernel, grid, q, *args, blocks, sinks, **fixed)
    else:
        grid = triton.cdiv(tokens, config.tokens), batch * heads
        fixed |= {"NATIVE": q.dtype == torch.bfloat16}  # float16 does not hold every query times a spread
        fixed |= {"BW": config.columns, "BT": config.tokens, "num_warps": config.warps}
        launch(token_score_kernel, grid, q, *args, blocks, sinks, **fixed)
    return out
