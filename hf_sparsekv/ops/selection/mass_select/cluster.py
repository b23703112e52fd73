"""Selection by estimated attention mass in CUDA C++; ``cluster.cu`` explains the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _cuda, _device
from ..partial_sums import PartialSums

THREADS = 512
MOST_HEADS = 8  # query heads of a KV head: scores of four tokens are held in registers, twice
TILE = 128  # tokens of a warp at once


def select_clusters(
    scores: Tensor,
    sums: PartialSums,
    rows: Tensor,
    *,
    sinks: int,
    sink_logits: Tensor | None,
    threshold: float,
    min_tokens: int,
    max_tokens: int | None,
    totals: Tensor | None,
    ids: Tensor,
    count: Tensor,
    mass: Tensor,
    cut: Tensor,
    bins: Tensor | None = None,
    clusters: int | None = None,
) -> bool:
    """Select as ``reference.mass_select`` with ``group_reduce="all"`` does, if these tensors and this GPU allow it.

    Returns whether it has. Supports scores whose kernel has added up ``sums``, up to ``MOST_HEADS`` query heads of a
    KV head, and no softcap.

    Args:
        ids, count, mass, cut: what a :class:`.reference.Selection` has, written in place. Entries of ``ids`` after
            ``count`` are not written.
        bins: uint8 ``[batch, H, n]``, rows a multiple of four entries apart: receives the bins of a row's sealed
            tokens, and up to three more. ``None``: they are not written.
        clusters: blocks that share a row and KV head, a power of two up to 8; ``None``: as many as fill the GPU once.
    """
    near, parts = sums.recent_kv, sums.parts
    (batch, q_heads, n), (heads, end) = scores.shape, near.shape[1:3]
    group, lists = q_heads // heads, batch * heads
    if (
        parts is None
        or scores.dtype != torch.float32
        or group > MOST_HEADS
        or not 0 < lists <= _device.MOST_LISTS
        or not n
    ):
        return False
    if any(stride % 4 for stride in scores.stride()[:2]) or scores.data_ptr() % 16 or scores.stride(2) != 1:
        return False
    if ids.stride(2) != 1 or ids.dtype != torch.int32:
        return False
    if sink_logits is not None and sink_logits.dtype not in (near.dtype, torch.float32):
        return False
    blocks = clusters or _device.cluster_blocks(lists, scores)
    kernel = _kernel(near, group, blocks, sink_logits)
    held = THREADS // 32 * TILE * -(-n // (blocks * THREADS // 32 * TILE))  # a byte for each token of a block
    if kernel is None or held > kernel.shared_bytes:
        return False
    of_bins = (None, 0, 0) if bins is None else (bins, *(stride // 4 for stride in bins.stride()[:2]))
    args = scores, *scores.stride()[:2], parts, parts.shape[1], rows, sums.stored, sink_logits
    args += ids, *ids.stride()[:2], *of_bins, count, mass, cut, totals, heads, n, end - sinks
    args += _cuda.float_bits(sums.scale), _cuda.float_bits(1 - threshold)
    args += max(min_tokens, 0), (1 << 31) - 1 if max_tokens is None else max_tokens
    kernel.launch((blocks, lists), THREADS, held, scores, *args)
    return True


def _kernel(near: Tensor, group: int, blocks: int, sink_logits: Tensor | None) -> _cuda.Kernel | None:
    defined = {"THREADS": THREADS, "CLUSTER": blocks, "GROUP": group, "BFLOAT16": int(near.dtype == torch.bfloat16)}
    defined["SINK_BYTES"] = 4 if sink_logits is None else sink_logits.element_size()
    return _cuda.load(near, __package__, "cluster.cu", "mass_select_cluster_kernel", **defined)
