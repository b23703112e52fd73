"""Exact attention of one query per row over chosen cached tokens: the launches.

The tokens of a row and KV head (first the chosen part of the stored blocks, then the near buffer) are split over
several programs, each of which keeps a running softmax for the whole group of query heads. The parts are merged by the
row's last program to end, if there are counters to tell which that is, or by a second kernel. How many parts there are
depends on shapes alone.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .._dispatch import require_dense_rows
from .merge import merge, merge_tile
from .split import split_kernel

PROGRAMS = 396  # programs to aim for, three for each processor of an H200. Not tuned yet.
TILE_BYTES = 16384  # of K at once; twice that spills registers in float32. Not tuned yet.
WARPS, STAGES = 4, 3  # Not tuned yet.


def _layout(
    q: Tensor, kv: Tensor, value_dim: int, total: int, splits: int | None, tile: int | None
) -> tuple[int, int, int]:
    """Tokens a tile, tokens a part, and parts, for ``total`` positions of a row and KV head."""
    wide = triton.next_power_of_2(max(q.shape[-1], value_dim, 16))
    item = q.element_size() if q.dtype == kv.dtype else 4  # mixed: float32 inside
    tile = tile or max(16, min(128, TILE_BYTES // (wide * item)))
    parts = splits or max(1, PROGRAMS // max(1, q.shape[0] * kv.shape[1]))
    per_split = max(1, triton.cdiv(triton.cdiv(total, parts), tile)) * tile
    return tile, per_split, max(1, triton.cdiv(total, per_split))


def _sizes(rows: int, parts: int, group: int, value_dim: int) -> tuple[int, int, int]:
    return rows * parts * group * value_dim, rows * parts * group, rows * parts


def scratch_size(
    q: Tensor, kv: Tensor, value_dim: int, n: int, near: int, splits: int | None = None, tile: int | None = None
) -> int:
    """float32 entries of scratch memory for ``n`` positions of stored blocks and ``near`` of the near buffer."""
    heads = kv.shape[1]
    _, _, parts = _layout(q, kv, value_dim, n + near, splits, tile)
    return sum(_sizes(q.shape[0] * heads, parts, q.shape[1] // heads, value_dim))


def sparse_decode(
    q: Tensor,
    kv: Tensor,
    flags: Tensor,
    slots: Tensor,
    ids: Tensor | None,
    near_kv: Tensor,
    near_valid: Tensor,
    *,
    granularity: str,
    value_dim: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    attended: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    counters: Tensor | None = None,
    splits: int | None = None,
    tile: int | None = None,
    warps: int = WARPS,
    stages: int = STAGES,
) -> Tensor:
    """As ``reference.sparse_decode``, into ``out`` if given.

    ``scratch`` is float32 of ``scratch_size()`` entries. ``counters``, int32 ``[batch * H]``, saves the launch that
    merges: zeros, which this call leaves behind again; no other call may use them at the same time. ``splits`` is how
    many parts to aim for; it and the rest replace the constants.
    """
    batch, q_heads, dk = q.shape
    heads, block_size = kv.shape[1:3]
    require_dense_rows(
        kv=kv,
        flags=flags,
        slots=slots,
        ids=ids,
        near_kv=near_kv,
        near_valid=near_valid,
        sink_logits=sink_logits,
    )
    if granularity == "token":
        n = ids.shape[-1]
    elif granularity == "block":
        n = ids.shape[-1] * block_size
    elif granularity == "all":
        n = slots.shape[-1] * block_size
    else:
        raise ValueError(f"granularity must be 'token', 'block' or 'all', got {granularity!r}")
    skip = sinks if granularity == "all" else 0
    near = near_kv.shape[2] - skip
    rows, group = batch * heads, q_heads // heads
    if kv.dtype != near_kv.dtype:
        raise ValueError(f"stored and recent tokens differ in dtype: {kv.dtype}, {near_kv.dtype}")
    tile, per_split, parts = _layout(q, kv, value_dim, n + near, splits, tile)
    heads_wide = triton.next_power_of_2(group)
    values_wide = max(16, triton.next_power_of_2(value_dim))
    sizes = _sizes(rows, parts, group, value_dim)
    if scratch is None:
        scratch = torch.empty(sum(sizes), dtype=torch.float32, device=q.device)
    acc, lse, count = scratch[: sum(sizes)].split(sizes)
    if out is None:
        out = torch.empty(batch, q_heads, value_dim, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        split_kernel[(rows, parts)](
            q,
            kv,
            flags,
            slots,
            ids,
            near_kv,
            near_valid.view(torch.uint8),  # a bool is one bit to Triton
            acc,
            lse,
            count,
            counters,
            sink_logits,
            attended,
            out,
            n,
            near,
            skip,
            per_split,
            float(scale),
            float(softcap or 0.0),
            *q.stride(),
            *kv.stride()[:3],
            flags.stride(0),
            slots.stride(0),
            *((0, 0) if granularity == "all" else ids.stride()[:2]),
            *near_kv.stride()[:3],
            near_valid.stride(0),
            *((0, 0) if attended is None else attended.stride()),
            *out.stride()[:2],
            GRANULARITY=granularity,
            SOFTCAP=softcap is not None,
            NATIVE=q.dtype == kv.dtype and q.dtype != torch.float32,
            MERGE=counters is not None,
            HAS_SINK=sink_logits is not None,
            HAS_ATTENDED=attended is not None,
            BLOCK_SIZE=block_size,
            HEADS=heads,
            GROUP=group,
            DK=dk,
            DV=value_dim,
            BG=max(16, heads_wide),
            BK=max(16, triton.next_power_of_2(dk)),
            BV=values_wide,
            BN=tile,
            BM=heads_wide,
            BS=merge_tile(parts, heads_wide * values_wide),
            num_warps=warps,
            num_stages=stages,
        )
        if counters is None:
            merge(acc, lse, count, sink_logits, attended, out, heads)
    return out
