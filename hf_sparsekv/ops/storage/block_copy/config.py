"""Number of programs that copy blocks, and their warps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..._device import programs as device_programs

# The kernel reads pinned memory in place. Few programs fill the link, and each further program takes SMs from the
# decode step that runs at the same time. The same numbers serve both measured GPUs, each on PCIe 5.0:
# - H200: copying 256 MiB within a captured step costs 6 to 10 % of its time with 16 programs, 20 to 31 % with 64, both
#   at 51 GB/s. Small blocks need twice as many programs (rows of 4 KB: 46 GB/s). docs/speed.md.
# - H200, slowdown of a captured chain of linear layers by simultaneous copies: 9.2 and 9.1 % with 16 programs of 4 and
#   of 8 warps, the best in two runs.
# - H100, the same: 16 of 4 warps 9.4 % (alone 45.3 and 48.7 GB/s in two runs), 16 of 2 warps 9.3 to 10.2 % (48.4 to
#   48.5 GB/s). Small blocks, 32 of 4 warps: 10.3 % (46.8 to 48.4 GB/s), the best being 64 or 32. All within the noise.
PROGRAMS = 16
PROGRAMS_SMALL = 32  # for blocks below SMALL
SMALL = 16384  # bytes
WARPS = 4
PROGRAMS_ON_DEVICE = 1056  # on an H200, eight per SM: the link is no limit


@dataclass(frozen=True)
class Config:
    """Launch parameters of a copy.

    Args:
        programs: programs that share the list.
        warps: warps of a program.
        tile: bytes in flight per program: 128 a thread.
    """

    programs: int
    warps: int
    tile: int = 16384


def config(kv: Tensor, pages: Tensor) -> Config:
    """Launch parameters for copies of these blocks."""
    if kv.is_cuda and pages.is_cuda:
        return Config(device_programs(PROGRAMS_ON_DEVICE, pages), WARPS)
    small = pages.shape[1] * pages.shape[2] * pages.itemsize < SMALL
    return Config(PROGRAMS_SMALL if small else PROGRAMS, WARPS)
