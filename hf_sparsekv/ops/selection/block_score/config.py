"""Number of blocks and channels that a program takes at once."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from ..._device import programs


@dataclass(frozen=True)
class Config:
    """Launch parameters of a score.

    Args:
        tile: blocks of a program.
        channels: channels of their metadata at once.
        stages: such pieces in flight.
    """

    tile: int
    channels: int
    stages: int


def config(q: Tensor, rows: int, n: int, group: int, dk: int) -> Config:
    """Launch parameters for ``n`` blocks of each of ``rows`` rows and KV heads. Not tuned yet."""
    most = 8192  # entries of metadata, or of the queries, in registers at once
    wide, tall = (max(16, triton.next_power_of_2(side)) for side in (dk, group))
    if max(16, tall) * wide <= most:
        return Config(max(16, most // wide), wide, 1)
    # In pieces, with about one program per SM (132 on an H200).
    return Config(max(16, min(64, triton.next_power_of_2(rows * n // programs(132, q)))), 64, 3)
