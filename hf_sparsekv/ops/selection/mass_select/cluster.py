"""Selection by estimated attention mass in CUDA C++; ``cluster.cu`` explains the kernel."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ... import _cuda, _device

THREADS = 512  # half of them where that many registers would not hold the queries
MOST = 8  # blocks that share a row and KV head; eight are the most that every GPU with clusters runs
BLOCKS = 132  # blocks per launch to aim for on an H200: one per SM
MOST_LISTS = 65535  # the grid's limit
MOST_HEADS, MOST_CHANNELS = 8, 256  # query heads of a KV head, channels of a key: queries are held in registers
TILE = 128  # tokens of a warp at once


def select_clusters(
    scores: Tensor,
    q: Tensor,
    channels: Tensor,
    recent_kv: Tensor,
    rows: Tensor,
    *,
    sinks: int,
    scale: float,
    sink_logits: Tensor | None,
    threshold: float,
    min_tokens: int,
    max_tokens: int | None,
    totals: Tensor | None,
    stored: Tensor | None = None,
    ids: Tensor,
    count: Tensor,
    mass: Tensor,
    cut: Tensor,
    bins: Tensor | None = None,
    clusters: int | None = None,
) -> bool:
    """Select as ``reference.mass_select`` with ``group_reduce="all"`` does, if these tensors and this GPU allow it.

    Returns whether it has. Supports queries and keys of 16 bits, up to ``MOST_HEADS`` query heads of a KV head, up to
    ``MOST_CHANNELS`` channels, and no softcap.

    Args:
        ids, count, mass, cut: what a :class:`.reference.Selection` has, written in place. Entries of ``ids`` after
            ``count`` are not written.
        bins: uint8 ``[batch, H, n]``, rows a multiple of four entries apart: receives the bins of a row's sealed
            tokens, and up to three more. ``None``: they are not written.
        clusters: blocks that share a row and KV head, a power of two up to 8; ``None``: as many as fill the GPU once.
    """
    (batch, q_heads, n), (heads, end), dim = scores.shape, recent_kv.shape[1:3], q.shape[-1]
    group, lists = q_heads // heads, batch * heads
    if q.dtype not in (torch.bfloat16, torch.float16) or recent_kv.dtype != q.dtype or scores.dtype != torch.float32:
        return False
    if group > MOST_HEADS or dim > MOST_CHANNELS or not 0 < lists <= MOST_LISTS or not n or scale <= 0:
        return False
    if any(stride % 4 for stride in scores.stride()[:2]) or scores.data_ptr() % 16 or scores.stride(2) != 1:
        return False
    if q.stride(2) != 1 or recent_kv.stride(3) != 1 or ids.stride(2) != 1 or channels.stride(2) != 1:
        return False
    if any(t.dtype != torch.int32 for t in (channels, ids)):
        return False
    if sink_logits is not None and sink_logits.dtype not in (q.dtype, torch.float32):
        return False
    blocks, threads = clusters or _blocks(lists, q), THREADS if group * dim <= 512 else THREADS // 2
    kernel = _kernel(q, group, blocks, threads, sink_logits)
    held = threads // 32 * TILE * -(-n // (blocks * threads // 32 * TILE))  # a byte for each token of a block
    if kernel is None or held > kernel.shared_bytes:
        return False
    of_bins = (None, 0, 0) if bins is None else (bins, *(stride // 4 for stride in bins.stride()[:2]))
    args = scores, *scores.stride()[:2], q, *q.stride()[:2], channels, *channels.stride()[:2], channels.shape[2]
    args += recent_kv, *recent_kv.stride()[:3], rows, stored, sink_logits, ids, *ids.stride()[:2], *of_bins
    args += count, mass, cut, totals, heads, n, sinks, end, _bits(scale), _bits(1 - threshold)
    args += max(min_tokens, 0), (1 << 31) - 1 if max_tokens is None else max_tokens
    kernel.launch((blocks, lists), threads, held, q, *args)
    return True


def _bits(number: float) -> int:
    """Of a float32."""
    return struct.unpack("I", struct.pack("f", number))[0]


def _kernel(q: Tensor, group: int, blocks: int, threads: int, sink_logits: Tensor | None) -> _cuda.Kernel | None:
    defined = {"THREADS": threads, "CLUSTER": blocks, "GROUP": group, "DIM": q.shape[2]}
    defined |= {"BFLOAT16": int(q.dtype == torch.bfloat16)}
    defined["SINK_BYTES"] = 4 if sink_logits is None else sink_logits.element_size()
    return _cuda.load(q, __package__, "cluster.cu", "mass_select_cluster_kernel", **defined)


def _blocks(lists: int, where: Tensor) -> int:
    """Number of blocks that share a list: a power of two."""
    each = max(1, _device.programs(BLOCKS, where) // lists)
    return min(MOST, 1 << each.bit_length() - 1)
