"""Launch parameters of a call, from shapes, dtypes and the device alone, so that a captured step stays valid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
from torch import Tensor

from ..._device import SHARED, programs, shared_memory
from .reference import has_latents


@dataclass(frozen=True)
class Config:
    """Launch parameters of an attention.

    Args:
        tile: tokens at once.
        heads: query heads at once.
        programs: approximate number of programs for the tokens of all rows and KV heads (see :mod:`.share`). The
            constants below have an H200's.
        warps, stages: warps and stages of a program.
        clusters: blocks of a cluster that share a row and KV head of chosen tokens (``cluster.cu``, CUDA C++): a power
            of two, or ``None`` for as many as fill the GPU once. With ``False``, and for calls that this kernel does
            not support, Triton runs with the parameters above.
    """

    tile: int
    heads: int
    programs: int
    warps: int
    stages: int
    clusters: int | Literal[False] | None = False


# For latents one program fills an SM, and an H200 has 132 SMs. Measured on an H100 with
# GLM-4.7-Flash's 20 heads and DeepSeek-V3's 128. The next tile is in flight while one is computed. Loading it to
# registers instead took 31-86 % longer in every shape, and tiles with tokens first did not fit three stages.
ALL = Config(tile=64, heads=32, programs=132, warps=8, stages=3)
MANY_HEADS = Config(tile=32, heads=64, programs=132, warps=8, stages=3)  # more than 32
# Chosen tokens: 14.1 us where FEW_ALONE takes 19.1 (GLM-4.7-Flash, 6 x 96k), 60.3 against 79.5 (128 heads, 8 x 32k).
FEW = Config(tile=64, heads=32, programs=132, warps=8, stages=1)
# Where one tile holds all heads of a single row, both take 10.8 us. FEW needs 135 KB of shared memory
# instead of 90. A step with it takes 5.80 ms instead of 5.60 (1 x 128k on an H200; with 6 x 96k 11.42 for 11.66).
FEW_ALONE = Config(tile=32, heads=32, programs=132, warps=8, stages=2)
EXACT = Config(tile=16, heads=16, programs=132, warps=8, stages=1)  # float32, without tensor cores
WIDEST = 576  # entries of a row that these tiles are made for: wider ones get smaller tiles


def is_native(*tensors: Tensor) -> bool:
    """Whether products are computed in the tensors' own 16 bits; in float32 otherwise."""
    return len({t.dtype for t in tensors}) == 1 and tensors[0].dtype != torch.float32


def shared_bytes(c: Config, width: int, value_dim: int, item: int, means: bool = False) -> int:
    """Shared memory of a program over latents of ``width`` entries of ``item`` bytes, the first ``value_dim`` values.

    Found by compiling for sm_89, exact there. Besides the queries it is the tiles in flight and the products; for
    tiles that are loaded to registers their values twice instead, to change their layout. ``means`` of unselected
    tokens are always loaded to registers.
    """
    loaded = 2 * c.tile * triton.next_power_of_2(value_dim) * item if c.stages == 1 or means else 0
    on_their_way = (c.stages - 1) * c.tile * width * item + c.heads * c.tile * item if c.stages > 1 else 0
    return c.heads * width * item + max(loaded, on_their_way)


def fitting(c: Config, width: int, value_dim: int, item: int, limit: int, means: bool = False) -> Config:
    """``c``, reduced until a program fits ``limit`` bytes: first tiles in flight, then their size, then heads."""
    while shared_bytes(c, width, value_dim, item, means) > limit:
        if c.stages != 2:  # one needs more than two, see above
            c = replace(c, stages=2 if c.stages == 1 else c.stages - 1)
        elif c.tile > 32:
            c = replace(c, tile=c.tile // 2)
        elif c.heads > 16:
            c = replace(c, heads=c.heads // 2)
        elif c.tile > 16:
            c = replace(c, tile=c.tile // 2)
        else:
            break  # tensor cores take no less
    return c


def config(q: Tensor, kv: Tensor, recent_kv: Tensor, value_dim: int, granularity: str, means: bool = False) -> Config:
    """Launch parameters of :func:`.sparse_decode` for these tensors."""
    lists, group, width = q.shape[0] * kv.shape[1], q.shape[1] // kv.shape[1], q.shape[2]
    if not has_latents(kv, q):
        # Measured on an H200 (132 processors), bf16, 128 dimensions, with `operator --sweep sparse_decode
        # dense_decode`. 16 KB of K at once; twice that spills registers in float32.
        dense = granularity == "all"
        wide = triton.next_power_of_2(max(width, value_dim, 16))
        kind = recent_kv.dtype if kv.dtype == torch.int8 else kv.dtype  # the dtype that codes are dequantised to
        item = q.element_size() if q.dtype == kind else 4  # mixed: float32 inside
        tile = max(16, min(128, 16384 // (wide * item)))
        aim = programs(528 if dense else 1056, q)
        # Clusters: in a step, with means, a layer's attention to 1,024 tokens takes 7.3 us for 12.7 (1 x 32k) and 20.9
        # for 27.4 (8 x 32k). With all tokens they are slower: 52 us for 45 (1 x 32k), 185 for 142 (1 x 128k).
        clusters = None if granularity == "token" else False
        if dense and group > 32:  # of many tokens. Not measured yet
            return Config(tile, group, programs(264, q), warps=8, stages=2, clusters=clusters)
        return Config(tile, group, aim, warps=4 if dense else 2, stages=2, clusters=clusters)
    if not is_native(q, kv, recent_kv):
        chosen = EXACT
    elif granularity == "token":
        chosen = FEW_ALONE if lists == 1 and group <= FEW_ALONE.heads else FEW
    else:
        chosen = ALL if group <= ALL.heads else MANY_HEADS
    tile, wide = chosen.tile, width
    while wide > WIDEST and tile > 16:
        tile, wide = tile // 2, wide // 2
    most = chosen.heads * 512 // max(512, triton.next_power_of_2(value_dim))  # sums of 512 are what registers hold
    at_once = max(16, min(most, triton.next_power_of_2(group)))
    item = q.element_size() if is_native(q, kv, recent_kv) else 4
    chosen = replace(chosen, tile=tile, heads=at_once, programs=programs(chosen.programs, q))
    limit = shared_memory(q)
    if limit >= SHARED[90]:  # the measured parameters fit
        return chosen
    return fitting(chosen, width, value_dim, item, limit, means)
