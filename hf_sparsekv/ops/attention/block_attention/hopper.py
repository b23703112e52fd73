"""Attention of a prompt's queries to chosen blocks of keys, for compute capability 9.0, in Gluon.

Apart from the kernel in Triton, whose compiler waits for each product: here products with values run while the next
weights are computed, as in FlashAttention-3 (section 3.2). 16 bits, 64 or 128 channels, no padding.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..._prompts import BLOCK, TILE

WARPS = 8
_all_warps = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # as Triton 3.6 calls it


@gluon.jit
def _bring(t, p_ids, i, there, held, bars, stage, i_batch, i_kv, BN: gl.constexpr, D: gl.constexpr):
    """Begin to load the pair ``i`` of blocks of keys or values, if it is ``there``."""
    bar = bars.index(stage)
    mbarrier.expect(bar, 2 * BN * D * 2, pred=there)
    p_pair = p_ids + 2 * gl.where(there, i, 0)
    row, row_2 = gl.load(p_pair) * BN, gl.load(p_pair + 1) * BN
    tma.async_copy_global_to_shared(t, [i_batch, i_kv, row, 0], bar, held.index(2 * stage), pred=there)
    tma.async_copy_global_to_shared(t, [i_batch, i_kv, row_2, 0], bar, held.index(2 * stage + 1), pred=there)


@gluon.jit(do_not_specialize=["past", "rows", "nb"])
def ahead_kernel(
    q,
    q_batch,
    q_head,
    q_token,
    k,
    v,
    ids,
    counts,
    out,
    out_batch,
    out_head,
    out_token,
    past,
    rows,
    nb,
    binary,
    Q_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One tile of queries of one query head: pairs of whole blocks, then the others one by one.

    Two pairs of keys and two of values are on their way. Logits of a pair are computed in the iteration in which the
    weights of the pair before meet their values.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])  # of logits
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])  # of the output
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])  # in which queries are loaded
    W: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)  # of weights
    i_tile, i_row = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)  # later tiles have more to do
    i_batch, i_head = i_row // Q_HEADS, i_row % Q_HEADS
    i_kv = i_head // GROUP
    o_m = i_tile * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    p_q = q + i_batch.to(gl.int64) * q_batch + i_head.to(gl.int64) * q_head
    b_q = gl.load(
        p_q + o_m.to(gl.int64)[:, None] * q_token + o_d[None, :],
        mask=(o_m < rows)[:, None] & (o_d < D)[None, :],
        other=0.0,
    )
    b_q = gl.convert_layout(b_q, gl.DotOperandLayout(0, S, 2))  # in registers: shared memory is busy with keys
    i_list = i_row.to(gl.int64) * gl.num_programs(0) + i_tile
    count, p_ids = gl.load(counts + i_list), ids + i_list * nb
    last = past + gl.minimum(i_tile * BM + BM, rows) - 1
    pairs = gl.maximum(count - (last // BN - (past + i_tile * BM + 1) // BN + 1), 0) // 2

    keys = gl.allocate_shared_memory(dtype, [4, BN, D], k.layout)
    values = gl.allocate_shared_memory(dtype, [4, BN, D], v.layout)
    k_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    one_bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(k_bars.index(stage), count=1)
        mbarrier.init(v_bars.index(stage), count=1)
    mbarrier.init(one_bar.index(0), count=1)
    fence_async_shared()
    _all_warps()

    b_max = gl.full([BM], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    b_sum = gl.full([BM], 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    b_acc = gl.full([BM, D], 0.0, gl.float32, layout=OUT)
    b_zero = gl.full([BM, BN], 0.0, gl.float32, layout=S)
    if pairs > 0:
        for pair in gl.static_range(2):
            _bring(k, p_ids, pair, pair < pairs, keys, k_bars, pair, i_batch, i_kv, BN, D)
            _bring(v, p_ids, pair, pair < pairs, values, v_bars, pair, i_batch, i_kv, BN, D)
        mbarrier.wait(k_bars.index(0), 0)
        b_s = warpgroup_mma(b_q, keys.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_s2 = warpgroup_mma(b_q, keys.index(1).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_s, b_s2 = warpgroup_mma_wait(0, deps=(b_s, b_s2))
        _all_warps()  # both warp groups have read these keys
        _bring(k, p_ids, 2, pairs > 2, keys, k_bars, 0, i_batch, i_kv, BN, D)
        b_max = gl.max(gl.maximum(b_s, b_s2), 1) * binary
        b_e = gl.exp2(b_s * binary - b_max[:, None])
        b_e2 = gl.exp2(b_s2 * binary - b_max[:, None])
        b_sum = gl.sum(b_e + b_e2, 1)
        b_p, b_p2 = gl.convert_layout(b_e.to(dtype), W), gl.convert_layout(b_e2.to(dtype), W)
        for i in range(1, pairs):
            at, before = i % 2, 1 - i % 2
            mbarrier.wait(k_bars.index(at), (i // 2) & 1)
            b_s = warpgroup_mma(b_q, keys.index(2 * at).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            b_s2 = warpgroup_mma(b_q, keys.index(2 * at + 1).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            mbarrier.wait(v_bars.index(before), ((i - 1) // 2) & 1)
            b_new = warpgroup_mma(b_p, values.index(2 * before), b_acc, is_async=True)
            b_new = warpgroup_mma(b_p2, values.index(2 * before + 1), b_new, is_async=True)
            b_s, b_s2 = warpgroup_mma_wait(2, deps=(b_s, b_s2))
            b_top = gl.maximum(b_max, gl.max(gl.maximum(b_s, b_s2), 1) * binary)
            b_less = gl.exp2(b_max - b_top)
            b_max = b_top
            b_e = gl.exp2(b_s * binary - b_max[:, None])
            b_e2 = gl.exp2(b_s2 * binary - b_max[:, None])
            b_sum = b_sum * b_less + gl.sum(b_e + b_e2, 1)
            b_next, b_next2 = gl.convert_layout(b_e.to(dtype), W), gl.convert_layout(b_e2.to(dtype), W)
            b_acc, b_p, b_p2 = warpgroup_mma_wait(0, deps=(b_new, b_p, b_p2))
            b_p, b_p2 = b_next, b_next2
            _all_warps()
            _bring(k, p_ids, i + 2, i + 2 < pairs, keys, k_bars, at, i_batch, i_kv, BN, D)
            _bring(v, p_ids, i + 1, i + 1 < pairs, values, v_bars, before, i_batch, i_kv, BN, D)
            b_acc = b_acc * gl.convert_layout(b_less, gl.SliceLayout(1, OUT))[:, None]
        at = (pairs - 1) % 2
        mbarrier.wait(v_bars.index(at), ((pairs - 1) // 2) & 1)
        b_new = warpgroup_mma(b_p, values.index(2 * at), b_acc, is_async=True)
        b_new = warpgroup_mma(b_p2, values.index(2 * at + 1), b_new, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=(b_new,))

    phase, bar = 0, one_bar.index(0)
    o_at = past + i_tile * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, S))
    for i in range(2 * pairs, count):
        row = gl.load(p_ids + i) * BN
        _all_warps()
        mbarrier.expect(bar, 2 * BN * D * 2)
        tma.async_copy_global_to_shared(k, [i_batch, i_kv, row, 0], bar, keys.index(0))
        tma.async_copy_global_to_shared(v, [i_batch, i_kv, row, 0], bar, values.index(0))
        mbarrier.wait(bar, phase)
        phase = phase ^ 1
        b_s = warpgroup_mma(b_q, keys.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        o_n = row + gl.arange(0, BN, layout=gl.SliceLayout(0, S))
        b_s = gl.where(o_n[None, :] <= o_at[:, None], b_s, float("-inf"))
        b_top = gl.maximum(b_max, gl.max(b_s, 1) * binary)
        b_safe = gl.where(b_top == float("-inf"), 0.0, b_top)
        b_less = gl.exp2(b_max - b_safe)
        b_max = b_top
        b_e = gl.exp2(b_s * binary - b_safe[:, None])
        b_sum = b_sum * b_less + gl.sum(b_e, 1)
        b_acc = b_acc * gl.convert_layout(b_less, gl.SliceLayout(1, OUT))[:, None]
        b_new = warpgroup_mma(gl.convert_layout(b_e.to(dtype), W), values.index(0), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=(b_new,))

    b_sum = gl.convert_layout(b_sum, gl.SliceLayout(1, OUT))
    b_acc = b_acc / gl.where(b_sum > 0, b_sum, 1.0)[:, None]
    o_m = i_tile * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, OUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
    p_out = out + i_batch.to(gl.int64) * out_batch + i_head.to(gl.int64) * out_head
    p_out += o_m.to(gl.int64)[:, None] * out_token + o_d[None, :]
    gl.store(p_out, b_acc.to(dtype), mask=(o_m < rows)[:, None] & (o_d < D)[None, :])


def attend_ahead(query, key, value, ids, counts, scale, past, out) -> None:
    """As ``reference.block_attention``, into ``out``; keys and values are such that descriptors can address them."""
    batch, q_heads, r, dim = query.shape
    dtype = gl.bfloat16 if query.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK, dim], dtype)
    kv = [TensorDescriptor.from_tensor(t, [1, 1, BLOCK, dim], layout) for t in (key, value)]
    with torch.cuda.device_of(query):
        ahead_kernel[ids.shape[2], batch * q_heads](
            query,
            *query.stride()[:3],
            *kv,
            ids.contiguous(),
            counts.contiguous(),
            out,
            *out.stride()[:3],
            past,
            r,
            ids.shape[3],
            scale * math.log2(math.e),
            Q_HEADS=q_heads,
            GROUP=q_heads // key.shape[1],
            D=dim,
            BM=TILE,
            BN=BLOCK,
            num_warps=WARPS,
        )


def serves(query, key, value, start) -> bool:
    """Whether :func:`attend_ahead` takes these tensors, of a GPU that it is for."""
    return (
        start is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] == value.shape[3]
        and query.shape[3] in (64, 128)
    )
