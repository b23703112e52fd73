"""How many programs copy blocks: what is known of the device and its link."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...tuning.transfer import settings

SMALL = 16384  # bytes of a block, below which more programs share the link


@dataclass(frozen=True)
class Config:
    """
    Args:
        programs: that share the list.
        warps: of a program.
        tile: bytes that a program has on their way at a time: 128 a thread.
    """

    programs: int
    warps: int
    tile: int = 16384


def config(kv: Tensor, frames: Tensor, copies: Tensor) -> Config:
    """For copies of these blocks; over the link see :mod:`hf_sparsekv.tuning.transfer`."""
    known = settings(copies.device)
    if kv.is_cuda and frames.is_cuda:
        return Config(1056, known.warps)  # the link is no limit
    small = frames.shape[1] * frames.shape[2] * frames.itemsize < SMALL
    return Config(known.programs_small if small else known.programs, known.warps)
