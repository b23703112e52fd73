"""Choice of the kernel that scores tokens, and its launch parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..._device import programs
from ..._group import MANY

# Limits for the queries in a program of the tensor-core kernel; up to FEW heads may have twice the channels.
MOST_HEADS, MOST_CHANNELS, FEW = 16, 64, 4
PROGRAMS = 4096  # of the tensor-core kernel to aim for on an H200, measured with 64 rows of 512 blocks


@dataclass(frozen=True)
class Config:
    """Launch parameters of a score.

    Args:
        tensor_cores: use the tensor-core kernel: integer products, a block at a time.
        columns: columns of a tile: query heads in the tensor-core kernel, else entries of a token's codes.
        warps: warps of a program.
        blocks: blocks of a program of the tensor-core kernel.
        tokens: tokens of a program of the other kernel.
    """

    tensor_cores: bool
    columns: int
    warps: int
    blocks: int = 1
    tokens: int = 128


def has_whole_words(q: Tensor, codes: Tensor, qparams: Tensor) -> bool:
    """Whether the queries have 16 bits, and a block's codes are contiguous, in whole words."""
    width = codes.shape[-1]
    # A scale and a zero point are read as one int32.
    pairs = (qparams.data_ptr(), *(2 * stride for stride in qparams.stride()[:-1]))
    places = (width, codes.data_ptr(), *codes.stride()[:-1], *pairs)
    whole = codes.stride(2) == width and qparams.stride(2) == 2 and all(place % 4 == 0 for place in places)
    return q.dtype in (torch.float16, torch.bfloat16) and whole


def can_use_tensor_cores(q: Tensor, codes: Tensor, qparams: Tensor, mean: bool) -> bool:
    """Whether Triton's tensor-core kernel supports these: :func:`has_whole_words`, and few enough queries."""
    vectors = 1 if mean else q.shape[1] // codes.shape[1]
    fits = vectors <= MOST_HEADS and 2 * codes.shape[-1] <= MOST_CHANNELS * (1 + (vectors <= FEW))
    return fits and has_whole_words(q, codes, qparams)


def config(
    q: Tensor, codes: Tensor, qparams: Tensor, blocks: int, mean: bool, tensor_cores: bool | None = None
) -> Config:
    """Launch parameters for ``blocks`` blocks per row and KV head; ``tensor_cores=False`` excludes that kernel."""
    heads, block_size, width = codes.shape[1:]
    group, rows = q.shape[1] // heads, q.shape[0] * heads
    if tensor_cores is not False and can_use_tensor_cores(q, codes, qparams, mean):
        each = min(16, triton.next_power_of_2(max(1, rows * blocks // programs(PROGRAMS, q))))
        columns = FEW if mean else max(FEW, triton.next_power_of_2(group))
        return Config(True, columns, 1 if block_size <= 64 else 2, blocks=each)
    # Whole keys of latents (576 wide) as labels are taken in pieces: at once they exceed an H200's shared memory. Not
    # tuned yet, nor are the warps.
    columns = max(16, triton.next_power_of_2(width)) if width <= 128 else 64
    vectors = 1 if mean and group > MANY else group
    return Config(False, columns, 8 if vectors * width > 2048 else 4)
