"""Routed experts for many tokens: pairs of token and expert are sorted by expert, and each expert is read once.

No number waits for the host, and launches depend on shapes alone, so a graph can hold them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import _device
from ..._operands import Rows, Table, operand
from ..._overlap import begin, launch
from .gates import RAW, Gate
from .mxfp4 import Mxfp4
from .tiles import (
    CODES,
    COLUMNS,
    ROWS,
    block_scale,
    empty,
    form_of,
    gate_rows,
    gated_values,
    kind_of,
    two_values,
    weights_operand,
)

SCAN = 1024  # pairs that a program of the sort looks at, at once
SUM = 1024  # outputs of a program of the weighted sum


class Tile(NamedTuple):
    """Pairs and results per program, inputs per step of its loop, warps, stages."""

    pairs: int
    rows: int
    inputs: int
    warps: int
    stages: int


def tile_of(each: float, up: bool, kind: int) -> Tile:
    """The tile for ``each`` pairs of an expert, on average (H200: `experts:tog` in operator.csv)."""
    if each > 16 and kind != CODES.value:
        rows = 64 if up else 128
        return Tile(64, rows, 64, 4, 4) if each <= 96 else Tile(128, 128 if up else 256, 64, 8, 3)
    if kind == ROWS.value:
        return Tile(16, 32 if up else 64, 128, 4, 4)
    if kind == COLUMNS.value:
        return Tile(16, 64, 64, 4, 5 if up else 6)
    return Tile(16 if each <= 16 else 32, 64, 128, 4, 2)  # words of 8 codes are 16 inputs of a product


class Order(NamedTuple):
    """Pairs by expert, in tiles of ``size``.

    Attributes:
        pairs: int32 ``[tiles * size]``, ``token * k + slot``; the number of pairs where a tile is not full.
        experts: int32 ``[tiles]``, the expert of each tile; -1 for tiles that are not needed.
    """

    pairs: Tensor
    experts: Tensor
    size: int


@triton.jit(do_not_specialize=["total", "tiles"])
def order_kernel(
    index, p_pairs, p_experts, total, tiles, K: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, SIZE: tl.constexpr,
    SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tiles of one expert. Its program counts those of all experts to find where they begin."""
    begin(PDL)
    mine = tl.program_id(0)
    o_e, o_s = tl.arange(0, BE), tl.arange(0, SCAN)
    b_count = tl.zeros([BE], tl.int32)
    for first in range(0, total, SCAN):
        o = first + o_s
        b_e = tl.load(index.ptr + (o // K).to(tl.int64) * index.batch + (o % K) * index.head, mask=o < total, other=-1)
        b_e = tl.where((b_e >= 0) & (b_e < E), b_e, BE - 1).to(tl.int32)
        b_count += tl.histogram(b_e, BE)
    b_tiles = tl.where(o_e < E, (b_count + SIZE - 1) // SIZE, 0)
    start = tl.sum(tl.where(o_e < mine, b_tiles, 0), 0)
    held = tl.sum(tl.where(o_e == mine, b_tiles, 0), 0)
    own = tl.sum(tl.where(o_e == mine, b_count, 0), 0)
    for tile in range(0, held):
        tl.store(p_experts + start + tile, mine)
    done = start * SIZE
    for first in range(0, total, SCAN):
        o = first + o_s
        b_e = tl.load(index.ptr + (o // K).to(tl.int64) * index.batch + (o % K) * index.head, mask=o < total, other=-1)
        b_hit = (b_e == mine).to(tl.int32)
        b_at = done + tl.cumsum(b_hit, 0) - 1
        tl.store(p_pairs + b_at, o, mask=b_hit > 0)
        done += tl.sum(b_hit, 0)
    for first in range(own, held * SIZE, SCAN):  # of the last tile, what is not used
        o = first + o_s
        tl.store(p_pairs + start * SIZE + o, o * 0 + total, mask=o < held * SIZE)
    if mine == E - 1:
        for first in range(start + held, tiles, SCAN):
            o = first + o_s
            tl.store(p_experts + o, o * 0 - 1, mask=o < tiles)


def order(index: Tensor, count: int, size: int) -> Order:
    """Sort the pairs of ``index [tokens, k]`` by their expert of ``count``. Pairs of no expert are left out."""
    total = index.numel()
    tiles = min(total, count) + total // size
    pairs = torch.empty(tiles * size, dtype=torch.int32, device=index.device)
    experts = torch.empty(tiles, dtype=torch.int32, device=index.device)
    held = triton.next_power_of_2(count + 1)
    fixed = {"K": index.shape[1], "E": count, "BE": held, "SIZE": size, "SCAN": SCAN}
    args = operand(Rows, index), pairs, experts, total, tiles
    launch(order_kernel, (count,), index, *args, **fixed, num_warps=4)
    return Order(pairs, experts, size)


@triton.jit
def tile_products(
    weight, p_x, m_x, expert, o_row, m_row, d, KIND: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Inputs at ``p_x [BM, 1]`` times rows ``o_row [BR]`` of an expert: float32 ``[BM, BR]``."""
    b_sum = tl.zeros([BM, BR], tl.float32)
    if KIND == CODES:
        # Inputs lie as codes do in their words: all first of eight, all second, ...
        o_w = tl.arange(0, BD // 8)
        p_w = weight.ptr + expert * weight.expert + (o_row.to(tl.int64) * weight.row)[None, :]
        p_s = weight.scales + expert * weight.scales_expert + (o_row.to(tl.int64) * weight.scales_row)[None, :]
        for d_0 in tl.range(0, d, BD, num_stages=STAGES):
            o = d_0 // 8 + o_w
            m_d = o < d // 8
            b_words = tl.load(p_w + o[:, None], mask=m_d[:, None] & m_row[None, :], other=0)
            b_scale = block_scale(tl.load(p_s + (o // 4)[:, None], mask=m_d[:, None] & m_row[None, :], other=0))
            for i in tl.static_range(4):
                b_near, b_far = two_values(b_words, i)
                b_x = tl.load(p_x + i * (d // 8) + o[None, :], mask=m_x & m_d[None, :], other=0.0)
                b_sum = tl.dot(b_x, (b_near * b_scale).to(DTYPE), b_sum, input_precision="ieee")
                b_x = tl.load(p_x + (i + 4) * (d // 8) + o[None, :], mask=m_x & m_d[None, :], other=0.0)
                b_sum = tl.dot(b_x, (b_far * b_scale).to(DTYPE), b_sum, input_precision="ieee")
    else:
        o_d = tl.arange(0, BD)
        p_w = weight.ptr + expert * weight.expert + (o_row.to(tl.int64) * weight.row)[None, :]
        for d_0 in tl.range(0, d, BD, num_stages=STAGES):
            o = d_0 + o_d
            m_d = o < d
            b_w = tl.load(p_w + (o * weight.col)[:, None], mask=m_d[:, None] & m_row[None, :], other=0.0)
            b_x = tl.load(p_x + o[None, :], mask=m_x & m_d[None, :], other=0.0)
            b_sum = tl.dot(b_x, b_w, b_sum, input_precision="ieee")
    return b_sum


@triton.jit
def with_bias(b_sum, weight, expert, o_row, m_row, DTYPE: tl.constexpr):
    """Products ``[BM, BR]`` in ``DTYPE`` plus their biases, rounded after each."""
    b_out = b_sum.to(DTYPE)
    if weight.bias is not None:
        b_bias = tl.load(weight.bias + expert * weight.bias_expert + o_row, mask=m_row, other=0.0).to(tl.float32)
        b_out = (b_out.to(tl.float32) + b_bias[None, :]).to(DTYPE)
    return b_out


@triton.jit(do_not_specialize=["total"])
def together_kernel(
    x, p_pairs, p_experts, weight, p_out, n, d, total, SHARED: tl.constexpr, FORM: tl.constexpr, KIND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``BN`` results of the ``BM`` pairs of a tile. Row ``pair // SHARED`` of ``x`` is that of a pair."""
    begin(PDL)
    blocks = tl.cdiv(n, BN)
    tile, i_n = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(p_experts + tile).to(tl.int64)
    if expert >= 0:
        o_pair = tl.load(p_pairs + tile * BM + tl.arange(0, BM))
        m_pair = o_pair < total
        o_row, m_row = gate_rows(i_n, n, BN, FORM)
        p_x = x.ptr + ((o_pair // SHARED).to(tl.int64) * x.row)[:, None]
        DTYPE: tl.constexpr = p_out.dtype.element_ty
        b_sum = tile_products(
            weight, p_x, m_pair[:, None], expert, o_row, m_row, d, KIND, BM, o_row.shape[0], BD, STAGES, DTYPE
        )
        b_values = with_bias(b_sum, weight, expert, o_row, m_row, DTYPE)
        o_n = i_n * BN + tl.arange(0, BN)
        p_n = p_out + o_pair.to(tl.int64)[:, None] * n + o_n[None, :]
        tl.store(p_n, gated_values(b_values, BM, BN, FORM), mask=m_pair[:, None] & (o_n < n)[None, :])


def together(x: Tensor, by: Order, weight, bias, gate: Gate, pairs: int, shared: int, tile: Tile) -> Tensor:
    """``gate`` of the products of each pair, ``[pairs, n]``; undefined for pairs of no expert.

    Args:
        x: ``[pairs / shared, d]``.
    """
    _, n, d = weight.shape
    n //= gate.rows
    out = empty(x, pairs, n)
    if isinstance(weight, Mxfp4):
        x = x.reshape(-1, d // 8, 8).transpose(1, 2).reshape(-1, d)  # as codes lie in their words
    args = operand(Table, x), by.pairs, by.experts, weights_operand(weight, bias), out, n, d, pairs
    fixed = {"SHARED": shared, "FORM": form_of(gate), "KIND": kind_of(weight), "BM": by.size}
    held = (by.size + gate.rows * tile.rows) * tile.inputs * x.element_size()  # of a stage
    stages = max(1, min(tile.stages, _device.gpu_of(x).shared_bytes // held - 1))
    fixed |= {"BN": tile.rows, "BD": tile.inputs, "STAGES": stages}
    grid = (len(by.experts) * triton.cdiv(n, tile.rows),)
    launch(together_kernel, grid, x, *args, **fixed, num_warps=tile.warps, num_stages=stages)
    return out


@triton.jit
def weighted_sum_kernel(
    p_each, p_place, index, share, p_bias, p_out, n, count, K: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr
):
    """``BN`` outputs of one token."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    b_sum = tl.zeros([BN], tl.float32)
    for i in tl.static_range(K):
        expert = tl.load(index.ptr + token * index.batch + i * index.head)
        factor = tl.load(share.ptr + token * share.batch + i * share.head).to(tl.float32)
        mine = (expert >= 0) & (expert < count)
        at = token * K + i
        if p_place is not None:
            at = tl.load(p_place + at).to(tl.int64)
        m_n = mine & (o_n < n)
        b_each = tl.load(p_each + at * n + o_n, mask=m_n, other=0.0).to(tl.float32)
        if p_bias is not None:
            b_each += tl.load(p_bias + expert.to(tl.int64) * n + o_n, mask=m_n, other=0.0).to(tl.float32)
            b_each = b_each.to(p_out.dtype.element_ty).to(tl.float32)
        b_sum += tl.where(mine, b_each * factor, 0.0)
    tl.store(p_out + token * n + o_n, b_sum.to(p_out.dtype.element_ty), mask=o_n < n)


def weighted_sum(
    each: Tensor,
    index: Tensor,
    weights: Tensor,
    count: int,
    place: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The sum of the rows of ``each [tokens * k, n]`` of a token, times its ``weights``: ``[tokens, n]``.

    Args:
        place: int32 ``[tokens * k]``, the row of each pair; None: they are in order.
        bias: ``[E, n]``, added to each row, that of its expert.
    """
    (tokens, k), n = index.shape, each.shape[1]
    out = empty(each, tokens, n)
    bn = min(SUM, triton.next_power_of_2(n))
    bias = None if bias is None else bias.contiguous()
    args = each, place, operand(Rows, index), operand(Rows, weights), bias, out, n, count
    launch(weighted_sum_kernel, (tokens, triton.cdiv(n, bn)), each, *args, K=k, BN=bn)
    return out


def experts_together(x, index, weights, gate_up, down, gate, gate_up_bias=None, down_bias=None, tiles=None):
    """As ``reference.experts``, for at least one token.

    Args:
        tiles: of the first and of the second product.
    """
    count, pairs, k = gate_up.shape[0], index.numel(), index.shape[1]
    up_tile, down_tile = tiles or (tile_of(pairs / count, up, kind_of(gate_up)) for up in (True, False))
    by = order(index, count, up_tile.pairs)
    form = gate if isinstance(gate, Gate) else RAW
    middle = together(x, by, gate_up, gate_up_bias, form, pairs, k, up_tile)
    if not isinstance(gate, Gate):
        middle = gate(middle).contiguous()
    each = together(middle, by, down, down_bias, RAW, pairs, 1, down_tile)
    return weighted_sum(each, index, weights, count)
