"""Attention over cached latents, whose values are the beginning of their keys (MLA): the launches.

The stored columns and the near buffer are one list that is cut into equal parts, one for each processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .._overlap import overlap
from .latent_blocks import blocks_kernel
from .latent_tokens import tokens_kernel

PROGRAMS = 132  # the processors of an H200: one program fills one
WIDEST = 576  # entries of a row that the tiles below are made for: wider ones get smaller tiles


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work.

    Args:
        tile: tokens at once.
        heads: query heads at once, at most.
        warps, stages: of a program.
    """

    tile: int
    heads: int
    warps: int
    stages: int


# Not measured yet: chosen by what they take when compiled for sm_90 (no spilled registers, 184 KB of shared memory) and
# because the next tile is on its way while one is computed.
ALL = Tiles(64, 32, 8, 3)
MANY_HEADS = Tiles(32, 64, 8, 3)  # more than 32
FEW = Tiles(32, 32, 8, 2)  # chosen tokens
EXACT = Tiles(16, 16, 8, 1)  # float32, without tensor cores


@dataclass(frozen=True)
class Layout:
    """Tokens of a tile, query heads of a tile, and parts."""

    tile: int
    heads: int
    parts: int


def is_native(*tensors: Tensor) -> bool:
    """Whether products are computed in the tensors' own 16 bits; in float32 otherwise."""
    return len({t.dtype for t in tensors}) == 1 and tensors[0].dtype != torch.float32


def tiles(group: int, native: bool, granularity: str) -> Tiles:
    """How to cut the work for ``group`` query heads."""
    if not native:
        return EXACT
    if granularity == "token":
        return FEW
    return ALL if group <= ALL.heads else MANY_HEADS


def layout(
    rows: int, group: int, columns: int, width: int, block_size: int, granularity: str, how: Tiles, splits: int | None
) -> Layout:
    """How ``columns`` stored and recent tokens of ``rows`` rows and KV heads are cut; ``splits``: parts to aim for."""
    tile = how.tile
    while width > WIDEST and tile > 16:
        tile, width = tile // 2, width // 2
    if granularity != "token":
        tile = min(tile, block_size)
    heads = max(16, min(how.heads, triton.next_power_of_2(group)))
    parts = splits or max(1, PROGRAMS // max(1, rows * triton.cdiv(group, heads)))
    all_tiles = triton.cdiv(columns, tile)
    each = max(1, triton.cdiv(all_tiles, parts))  # tiles of a part
    return Layout(tile, heads, triton.cdiv(all_tiles, each))


def row_step(*stored: Tensor | None) -> int:
    """Distance of two tokens' rows if it is the same in all of these, otherwise 0."""
    steps = {t.stride(-2) for t in stored if t is not None}
    return steps.pop() if len(steps) == 1 else 0


def split(
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
    n: int,
    skip: int,
    scale: float,
    softcap: float | None,
    frames: Tensor | None,
    places: Tensor | None,
    from_host: Tensor | None,
    used: Tensor | None,
    acc: Tensor,
    lse: Tensor,
    count: Tensor,
    how: Tiles,
    cut: Layout,
) -> None:
    """Attention of each part, to ``acc``, ``lse`` and ``count`` as :func:`.merge.merge` takes them.

    ``n`` stored columns and the near buffer from entry ``skip`` on; the rest as in ``reference.sparse_decode``.
    """
    batch, q_heads, dk = q.shape
    heads, block_size = kv.shape[1:3]
    group = q_heads // heads
    placed, chosen = frames is not None, granularity == "block"
    grid = (batch * heads * triton.cdiv(group, cut.heads), cut.parts)
    results = (acc, lse, count, from_host)
    near = near_valid.view(torch.uint8)  # a bool is one bit to Triton
    from_host_strides = (0, 0) if from_host is None else from_host.stride()
    frame_strides = frames.stride()[:2] if placed else (0, 0)
    near_strides = (*near_kv.stride()[:3], near.stride(0))
    scales = (float(scale), float(softcap or 0.0))
    named = {
        "PLACED": placed,
        "COUNT_HOST": from_host is not None,
        "SOFTCAP": softcap is not None,
        "NATIVE": is_native(q, kv, near_kv),
        "BLOCK_SIZE": block_size,
        "HEADS": heads,
        "GROUP": group,
        "DK": dk,
        "DV": value_dim,
        "BH": cut.heads,
        "BC": max(16, triton.next_power_of_2(value_dim)),
        "BR": max(16, triton.next_power_of_2(dk - value_dim)),
        "BN": cut.tile,
        "STAGES": how.stages,
        "num_warps": how.warps,
        **overlap(q),
    }
    if granularity == "token":
        tokens_kernel[grid](
            q,
            kv,
            slots,
            ids,
            frames,
            near_kv,
            near,
            *results,
            n,
            near_kv.shape[2],
            *scales,
            *q.stride(),
            *kv.stride()[:3],
            slots.stride(0),
            *ids.stride()[:2],
            *frame_strides,
            *near_strides,
            *from_host_strides,
            LOG_BLOCK=block_size.bit_length() - 1,
            **named,
        )
        return
    blocks_kernel[grid](
        q,
        kv,
        flags,
        slots,
        ids,
        frames,
        places,
        near_kv,
        near,
        *results,
        used,
        n,
        near_kv.shape[2],
        skip,
        *scales,
        *q.stride(),
        *kv.stride()[:3],
        flags.stride(0),
        slots.stride(0),
        *(ids.stride()[:2] if chosen else (0, 0)),
        *frame_strides,
        *((0, 0) if places is None else places.stride()[:2]),
        *near_strides,
        *from_host_strides,
        *((0, 0) if used is None else used.stride()),
        CHOSEN=chosen,
        STEP=row_step(kv, near_kv, frames),
        HAS_USED=used is not None,
        **named,
    )
