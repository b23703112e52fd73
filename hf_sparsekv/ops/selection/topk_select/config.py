"""Launch parameters of a selection, from the length of its rows and the number of ids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton

SAMPLES = (2048, 4096, 8192, 16384)  # entries of a row that a sample may have
FEWEST, MOST = 4096, 32768  # entries that the last step has room for, at least and at most
ERRORS = 4.5  # standard errors by which a sample may err before the whole row is searched


def tiles(n: int, k: int, sample: int | None = None, fewest: int = FEWEST) -> tuple[int, int]:
    """Entries of a sample and entries that the last step has room for.

    About ``k sample / n`` of the ``k`` best of ``n`` entries are in the sample, with a standard error of its square
    root. The roots of this number, and of the same number for the room, must be far enough apart for a rank in between.
    Where they never are, the largest sample and the most room are taken, and the last step may search the whole row.
    """
    room, found = max(fewest, min(2 * triton.next_power_of_2(k), MOST // 2)), []
    while room <= MOST:
        for size in SAMPLES if sample is None else (sample,):
            if sample is not None or math.sqrt(size / n) * (math.sqrt(room) - math.sqrt(k)) >= ERRORS:
                found.append((size, room))
        room *= 2
    return min(found, key=sum, default=(sample or SAMPLES[-1], MOST))


@dataclass(frozen=True)
class Config:
    """Launch parameters of a selection. All but ``clusters`` are for rows that no cluster takes.

    Args:
        clusters: blocks of a cluster that share a row, 2, 4 or 8, on a GPU with clusters. ``None``: the number that
            measured best, where clusters are faster. ``False``: no clusters.
        row: longest row that one program holds, at most 32,768.
        chunk, warps: entries and warps of one of the programs that share a row; with short rows, its program's warps.
        sample, fewest: entries of a sample, and least number of entries that its last step has room for.
        last_warps: warps of that step's programs.
    """

    clusters: int | None = None
    row: int = 16384
    chunk: int | None = None
    warps: int | None = None
    sample: int | None = None
    fewest: int = FEWEST
    last_warps: int | None = None

    def tiles(self, n: int, k: int) -> tuple[int, int]:
        """:func:`tiles` for a selection of ``k`` from a long row."""
        return tiles(n, k, self.sample, self.fewest)
