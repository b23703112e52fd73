"""Codes of keys in earlier files, which have one scale per token over all channels instead of one per channel.

Apart from loading, because only files of earlier releases need it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.storage.quantise import quantise
from .container import Layer


def index_of(record: Layer, index: dict[str, list], block_size: int) -> dict[str, list]:
    """``index``, the fields that a layer's blocks need, as a file with earlier codes has them."""
    return index | {"scales": ["float16", [record.heads, block_size, 2]]} if is_earlier(record) else index


def is_earlier(record: Layer) -> bool:
    """Whether the file has earlier codes: two scales per token, of its key and of its value."""
    return "scales" in record.index and len(record.index["scales"][1]) == 3


def converted(codes: Tensor, scales: Tensor, split: int) -> tuple[Tensor, Tensor]:
    """Codes and scales as the pool has them, of earlier codes ``[n, H, block_size, D]`` and their scales.

    The conversion adds at most the error of the new codes, which is the smaller one.
    """
    sizes = torch.tensor((split, codes.shape[-1] - split), device=codes.device)
    return quantise(codes.float() * scales.float().repeat_interleave(sizes, -1), split)
