"""Warps, stages and the way keys are read, for attention to chosen blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._device import shared_memory


@dataclass(frozen=True)
class Config:
    """Launch parameters.

    Args:
        rows: queries of a program, a tile or half of one.
        many: blocks of keys an iteration, 1 or 2.
        descriptors: keys and values come through tensor descriptors (TMA); needs strides of whole 16 bytes.
        warps: of a program. stages: iterations in flight.
        heads_first: programs of the heads of a group run side by side, before those of other tiles.
    """

    rows: int = 128
    many: int = 2
    descriptors: bool = False
    warps: int = 8
    stages: int = 2
    heads_first: bool = False


def config(query: Tensor, dk: int, dv: int) -> Config:
    """Launch parameters for heads of ``dk`` and ``dv`` channels. Not tuned yet."""
    if query.dtype == torch.float32:
        return Config(many=1, stages=1)
    if max(dk, dv) > 128:
        return Config(many=1) if shared_memory(query) >= 200 << 10 else Config(rows=64, many=1, warps=4, stages=1)
    if query.is_cuda and torch.cuda.get_device_capability(query.device)[0] >= 9:
        return Config(many=2, descriptors=True)
    return Config(many=1, warps=4 if max(dk, dv) <= 64 else 8)
