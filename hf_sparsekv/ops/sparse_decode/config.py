"""How a call's work is cut: by shapes and dtypes alone, so that a captured step stays as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from .reference import has_latents


@dataclass(frozen=True)
class Config:
    """
    Args:
        tile: tokens at once.
        heads: query heads at once.
        programs: that share the tokens of all rows and KV heads; about as many (see :mod:`.share`).
        warps, stages: of a program.
    """

    tile: int
    heads: int
    programs: int
    warps: int
    stages: int


# Of latents: one program fills a processor, of which an H200 has 132. Measured on an H100 with
# GLM-4.7-Flash's 20 heads and DeepSeek-V3's 128. The next tile is on its way while one is computed; loading it to
# registers instead took 31-86 % longer in every shape, and tiles with tokens first did not fit three stages.
ALL = Config(tile=64, heads=32, programs=132, warps=8, stages=3)
MANY_HEADS = Config(tile=32, heads=64, programs=132, warps=8, stages=3)  # more than 32
# Chosen tokens: 14.1 us where FEW_ALONE takes 19.1 (GLM-4.7-Flash, 6 x 96k), 60.3 against 79.5 (128 heads, 8 x 32k).
FEW = Config(tile=64, heads=32, programs=132, warps=8, stages=1)
# Where one tile holds all heads of the only row both take 10.8 us, but a step with FEW, which wants 135 KB of shared
# memory instead of 90, takes 5.80 ms instead of 5.60 (1 x 128k on an H200; 6 x 96k 11.42 instead of 11.66).
FEW_ALONE = Config(tile=32, heads=32, programs=132, warps=8, stages=2)
EXACT = Config(tile=16, heads=16, programs=132, warps=8, stages=1)  # float32, without tensor cores
WIDEST = 576  # entries of a row that these tiles are made for: wider ones get smaller tiles


def is_native(*tensors: Tensor) -> bool:
    """Whether products are computed in the tensors' own 16 bits; in float32 otherwise."""
    return len({t.dtype for t in tensors}) == 1 and tensors[0].dtype != torch.float32


def config(q: Tensor, kv: Tensor, recent_kv: Tensor, value_dim: int, granularity: str) -> Config:
    """Of :func:`.sparse_decode` of these tensors."""
    lists, group, width = q.shape[0] * kv.shape[1], q.shape[1] // kv.shape[1], q.shape[2]
    if not has_latents(kv, q):
        # Measured on an H200 (132 processors), bf16, 128 dimensions, with `operator --sweep sparse_decode
        # dense_decode`. 16 KB of K at once; twice that spills registers in float32.
        dense = granularity == "all"
        wide = triton.next_power_of_2(max(width, value_dim, 16))
        kind = recent_kv.dtype if kv.dtype == torch.int8 else kv.dtype  # what codes are made of
        item = q.element_size() if q.dtype == kind else 4  # mixed: float32 inside
        tile = max(16, min(128, 16384 // (wide * item)))
        return Config(tile, group, programs=528 if dense else 1056, warps=4 if dense else 2, stages=2)
    if not is_native(q, kv, recent_kv):
        chosen = EXACT
    elif granularity == "token":
        chosen = FEW_ALONE if lists == 1 and group <= FEW_ALONE.heads else FEW
    else:
        chosen = ALL if group <= ALL.heads else MANY_HEADS
    tile = chosen.tile
    while width > WIDEST and tile > 16:
        tile, width = tile // 2, width // 2
    at_once = max(16, min(chosen.heads, triton.next_power_of_2(group)))
    return replace(chosen, tile=tile, heads=at_once)
