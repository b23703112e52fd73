"""Exact attention of one query per row over chosen cached tokens: the launches.

The tokens of a row and KV head are split over several programs, and a second kernel merges the parts. How many there
are depends on shapes alone.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import overlap
from . import latents
from .merge import merge
from .reference import has_latents
from .split_kernel import split_kernel

# Measured on an H200 (132 processors), bf16, 128 dimensions, with `bench operator --sweep sparse_decode dense_decode`:
# programs to aim for, and the warps of each, for chosen tokens or blocks and for all.
PROGRAMS, PROGRAMS_ALL = 1056, 528
WARPS, WARPS_ALL = 2, 4
STAGES = 2
TILE_BYTES = 16384  # of K at once; twice that spills registers in float32


def _layout(
    q: Tensor, kv: Tensor, value_dim: int, n: int, near: int, splits: int | None, dense: bool, tile: int | None = None
) -> tuple[int, int, int, int]:
    """Tokens a tile, tokens a part, parts of the stored blocks and of the near buffer."""
    wide = triton.next_power_of_2(max(q.shape[-1], value_dim, 16))
    item = q.element_size() if q.dtype == kv.dtype else 4  # mixed: float32 inside
    tile = tile or max(16, min(128, TILE_BYTES // (wide * item)))
    parts = splits or max(1, (PROGRAMS_ALL if dense else PROGRAMS) // max(1, q.shape[0] * kv.shape[1]))
    per_split = max(1, triton.cdiv(triton.cdiv(n + near, parts), tile)) * tile
    return tile, per_split, triton.cdiv(n, per_split), triton.cdiv(near, per_split)


def _sizes(rows: int, parts: int, group: int, value_dim: int) -> tuple[int, int, int]:
    return rows * parts * group * value_dim, rows * parts * group, rows * parts


def scratch_size(
    q: Tensor, kv: Tensor, value_dim: int, n: int, near: int, splits: int | None = None, granularity: str = "token"
) -> int:
    """float32 entries of scratch memory for ``n`` positions of stored blocks and ``near`` of the near buffer."""
    heads = kv.shape[1]
    rows, group = q.shape[0] * heads, q.shape[1] // heads
    if has_latents(kv, q):
        how = latents.tiles(group, latents.is_native(q, kv), granularity)
        parts = latents.layout(rows, group, n + near, q.shape[-1], kv.shape[2], granularity, how, splits).parts
    else:
        parts = sum(_layout(q, kv, value_dim, n, near, splits, granularity == "all")[2:])
    return sum(_sizes(rows, parts, group, value_dim))


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
    frames: Tensor | None = None,
    places: Tensor | None = None,
    from_host: Tensor | None = None,
    lse: Tensor | None = None,
    used: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    splits: int | None = None,
    tile: int | None = None,
    stages: int = STAGES,
    warps: int | None = None,
    tiles: latents.Tiles | None = None,
) -> Tensor:
    """As ``reference.sparse_decode``, into ``out`` if given.

    ``scratch`` is float32 of ``scratch_size()`` entries. ``splits`` (how many parts to aim for), ``tile`` (tokens at
    once), ``stages`` and ``warps`` replace the constants; with latents ``tiles`` does instead of the latter three.
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
        frames=frames,
        places=places,
    )
    placed = frames is not None
    if placed and granularity == "all":
        raise ValueError("blocks go by place only where some are chosen, not with granularity='all'")
    if used is not None and not (granularity == "block" and has_latents(kv, q)):
        raise ValueError("used goes with granularity='block' of latents only: give fewer ids instead")
    if granularity == "token":
        n = ids.shape[-1]
    elif granularity == "block":
        n = ids.shape[-1] * block_size
    elif granularity == "all":
        n = slots.shape[-1] * block_size
    else:
        raise ValueError(f"granularity must be 'token', 'block' or 'all', got {granularity!r}")
    skip = sinks if granularity == "all" else 0
    near = near_kv.shape[2]
    rows, group = batch * heads, q_heads // heads
    if latent := has_latents(kv, q):
        tiles = tiles or latents.tiles(group, latents.is_native(q, kv, near_kv), granularity)
        cut = latents.layout(rows, group, n + near - skip, dk, block_size, granularity, tiles, splits)
        parts = cut.parts
    else:
        tile, per_split, stored, last = _layout(q, kv, value_dim, n, near - skip, splits, granularity == "all", tile)
        parts = stored + last
    sizes = _sizes(rows, parts, group, value_dim)
    if scratch is None:
        scratch = torch.empty(sum(sizes), dtype=torch.float32, device=q.device)
    acc, part_lse, count = scratch[: sum(sizes)].split(sizes)
    if out is None:
        out = torch.empty(batch, q_heads, value_dim, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        if latent:
            latents.split(
                q,
                kv,
                flags,
                slots,
                ids,
                near_kv,
                near_valid,
                granularity=granularity,
                value_dim=value_dim,
                n=n,
                skip=skip,
                scale=scale,
                softcap=softcap,
                frames=frames,
                places=places,
                from_host=from_host,
                used=used,
                acc=acc,
                lse=part_lse,
                count=count,
                how=tiles,
                cut=cut,
            )
        else:
            split_kernel[(rows, parts)](
                q,
                kv,
                flags,
                slots,
                ids,
                frames,
                places,
                near_kv,
                near_valid.view(torch.uint8),  # a bool is one bit to Triton
                acc,
                part_lse,
                count,
                from_host,
                n,
                near,
                skip,
                stored,
                per_split,
                float(scale),
                float(softcap or 0.0),
                *q.stride(),
                *kv.stride()[:3],
                flags.stride(0),
                slots.stride(0),
                *((0, 0) if granularity == "all" else ids.stride()[:2]),
                *(frames.stride()[:2] if placed else (0, 0)),
                *((0, 0) if places is None else places.stride()[:2]),
                *near_kv.stride()[:3],
                near_valid.stride(0),
                *((0, 0) if from_host is None else from_host.stride()),
                GRANULARITY=granularity,
                PLACED=placed,
                COUNT_HOST=from_host is not None,
                SOFTCAP=softcap is not None,
                NATIVE=q.dtype == kv.dtype == near_kv.dtype and q.dtype != torch.float32,
                BLOCK_SIZE=block_size,
                LOG_BLOCK=block_size.bit_length() - 1,
                HEADS=heads,
                GROUP=group,
                DK=dk,
                DV=value_dim,
                BG=max(16, triton.next_power_of_2(group)),
                BK=max(16, triton.next_power_of_2(dk)),
                BV=max(16, triton.next_power_of_2(value_dim)),
                BN=tile,
                STAGES=stages,
                num_warps=warps or (WARPS_ALL if granularity == "all" else WARPS),
                **overlap(q),
            )
        merge(acc, part_lse, count, sink_logits, attended, lse, out, heads)
    return out
