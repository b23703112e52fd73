"""Tiles, warps and stages of a prompt's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._device import shared_memory


@dataclass(frozen=True)
class Config:
    """Launch parameters.

    Args:
        rows: queries of a program. tokens: keys of an iteration.
        descriptors: keys and values come through tensor descriptors (TMA); needs strides of whole 16 bytes.
        warps: of a program. stages: iterations in flight.
    """

    rows: int = 128
    tokens: int = 64
    descriptors: bool = False
    warps: int = 8
    stages: int = 2


def config(query: Tensor, dk: int, dv: int, window: int | None) -> Config:
    """Launch parameters for heads of ``dk`` and ``dv`` channels; an H200's are the fastest of four to seven each."""
    wide = max(dk, dv)
    if query.dtype == torch.float32:
        return Config(64, 32, stages=1)
    if shared_memory(query) < 200 << 10:
        if wide > 128:  # of so many keys that a thread spills little (compiled for sm_80 to sm_120)
            return Config(64, 32, stages=1) if wide <= 256 else Config(32, 16, warps=4, stages=1)
        return Config(128, 64, warps=4) if wide <= 64 else Config(64, 32, warps=4)
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] >= 9
    if wide > 128:
        return Config(128, 64, hopper) if wide <= 256 else Config(64, 32, hopper)
    if wide > 64 or (window is not None and window <= 256):
        return Config(64, 64, hopper, warps=4, stages=3)
    return Config(64, 128, hopper, warps=4)
