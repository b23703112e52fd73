"""Attention over chosen tokens in CUDA C++; ``cluster.cu`` explains the kernel."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ... import _cuda, _device

# Threads of a block: 1 x 32k, 8 blocks a list, 7.3 us (512: 8.1, 256: 8.4), 8 x 32k, 2 blocks, 15.9 (16.9, 17.7), H200,
# `operator --sweep sparse_decode`. A thread then has up to 170 registers; 16 loads of 16 bytes take 64 of them.
THREADS = 384
WIDTHS, MOST_HEADS = (64, 128), 8  # channels of keys and of values; query heads of a KV head
MOST_TOKENS = 4096  # chosen ones of a list; 1,024 were measured. 32k in one row take 52 us for Triton's 45


def attend_clusters(
    q: Tensor,
    kv: Tensor,
    rows: Tensor,
    block_table: Tensor,
    ids: Tensor,
    recent_kv: Tensor,
    *,
    sinks: int,
    scale: float,
    sink_logits: Tensor | None,
    attended: Tensor | None,
    pages: Tensor | None,
    from_host: Tensor | None,
    lse: Tensor | None,
    means: Tensor | None,
    mean_tokens: int | None,
    columns: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    clusters: int | None,
) -> bool:
    """Attend to tokens ``ids`` as ``reference.sparse_decode`` does, if these tensors and this GPU allow it.

    Returns whether it has. Supports keys and values of 16 bits (no latents), 8-bit codes in ``kv``, lists of at most
    ``MOST_TOKENS``, and no softcap. Codes of values are multiplied as integers and weights by their scales, so no value
    is rounded to 16 bits.

    Args:
        clusters: blocks that share a row and KV head, a power of two up to 8; None for as many as fill the GPU once.
    """
    batch, q_heads, dim = q.shape
    heads, size = kv.shape[1:3]
    group, lists = q_heads // heads, batch * heads
    numbers = [t for t in (q, recent_kv, pages, means, out) if t is not None]
    if q.dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != q.dtype for t in numbers):
        return False
    if kv.dtype != (q.dtype if scales is None else torch.int8):
        return False
    if dim not in WIDTHS or group > MOST_HEADS or size & (size - 1) or not 0 < lists <= _device.MOST_LISTS:
        return False
    if ids.shape[-1] > MOST_TOKENS:
        return False
    strides = [stride for t in (kv, pages, recent_kv, means, scales) if t is not None for stride in t.stride()]
    if (
        max(strides) >= 1 << 31
        or kv.shape[3] != 2 * dim
        or out.shape != q.shape
        or not all(_loads(t, 16) for t in (kv, *numbers))
        or not (scales is None or _loads(scales, 16))
    ):
        return False
    others = ((ids, torch.int32), (block_table, torch.int32), (columns, torch.int32))
    counts = ((attended, torch.int64), (from_host, torch.int64))
    if any(t is not None and t.dtype != kind for t, kind in (*others, *counts, (lse, torch.float32))):
        return False
    if sink_logits is not None and sink_logits.dtype not in (q.dtype, torch.float32):
        return False
    n = ids.shape[-1]
    blocks = clusters or _device.cluster_blocks(lists, q)
    spans = 0 if means is None else -(-block_table.shape[1] * size // mean_tokens)
    shared = 4 * max(spans, THREADS // 32 * group * dim)
    kernel = _kernel(q, size, group, blocks, pages is not None, scales is not None, sink_logits)
    if kernel is None or shared > kernel.shared_bytes:
        return False
    args = q, *q.stride()[:2], kv, *kv.stride()[:3], *_with_strides(pages), recent_kv, *recent_kv.stride()[:3], rows
    args += block_table, block_table.stride(0), *_with_strides(ids), *_with_strides(means)
    args += *_with_strides(columns), *_with_strides(out), *_with_strides(lse), *_with_strides(attended)
    args += *_with_strides(from_host), sink_logits, heads, n, sinks, recent_kv.shape[2], mean_tokens or 0, spans
    (scale_bits,) = struct.unpack("I", struct.pack("f", scale))
    args += (scale_bits,)
    if scales is not None:
        args += _with_strides(scales.view(torch.int32))  # in words of two
    kernel.launch((blocks, lists), THREADS, shared, q, *args)
    return True


def _loads(t: Tensor, size: int) -> bool:
    """Whether each row of the last dimension is contiguous and begins at a multiple of ``size`` bytes."""
    places = (t.data_ptr(), *(stride * t.element_size() for stride in t.stride()[:-1]))
    return t.stride(-1) == 1 and all(place % size == 0 for place in places)


def _with_strides(t: Tensor | None) -> tuple:
    return (None, 0, 0) if t is None else (t, *t.stride()[:2])


def _kernel(
    q: Tensor, size: int, group: int, blocks: int, paged: bool, coded: bool, sink_logits: Tensor | None
) -> _cuda.Kernel | None:
    defined = {"THREADS": THREADS, "CLUSTER": blocks, "GROUP": group, "DIM": q.shape[2]}
    defined |= {"LOG_BLOCK": size.bit_length() - 1, "PAGED": int(paged), "BFLOAT16": int(q.dtype == torch.bfloat16)}
    defined["CODES"] = int(coded)
    defined["SINK_BYTES"] = 4 if sink_logits is None else sink_logits.element_size()
    return _cuda.load(q, __package__, "cluster.cu", "sparse_decode_cluster_kernel", **defined)
