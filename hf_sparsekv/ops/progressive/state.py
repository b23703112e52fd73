"""What a progressive walk keeps from step to step, and what it counts. All tensors stay where they are."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

FIRST = 32  # blocks that the first round of the first step reads
MASS_ONE = 1 << 30  # counted masses are integers: sums that do not depend on the order
BINS = 24  # of the histogram: bin 0 is no block or one, bin b is up to 2 ** b blocks
TOTALS = ("walks", "used", "read", "capped", "mass", "worst")  # what ``totals`` begins with; the histogram follows


def next_blocks(used):
    """Blocks that the next step's first round reads, once this step has used ``used``.

    Of replayed walks (benchmarks/NOTES.md) one in 25 then needs a second round. What the scores together with the last
    step's masses tell is no better a guess.
    """
    return used + used // 8 + 8


def some_more(high, reach):
    """Blocks to read by the next round where ``high`` are and ``reach`` should suffice: one in 25 needs another."""
    return reach + (reach - high) // 4 + 8


@dataclass
class WalkState:
    """State of the walks of one layer.

    Attributes:
        limits: int32 ``[2, batch, H]``: ranks that the next round reads, ``limits[0]`` to ``limits[1] - 1``. Between
            steps the first is 0 and the second what the last step suggests.
        used: int32 ``[batch, H]``: blocks that the last step used.
        mass: float32 ``[batch, H]``: the share of the attention mass that it estimated, the least of the heads'.
        chosen: int32 ``[batch, H, K]`` or None: block ids that the next step is expected to begin with, in order of
            their rank, padded with -1.
        totals: int64 ``[len(TOTALS) + BINS]``: walks (of one row and KV head), the blocks they used, the blocks they
            read (more than used: rounds are speculative), walks that ended at ``max_blocks`` short of the threshold,
            sum of the estimated masses and the largest estimated gap (both times ``MASS_ONE``), and a histogram of
            the blocks used.
    """

    limits: Tensor
    used: Tensor
    mass: Tensor
    totals: Tensor
    chosen: Tensor | None = None

    @classmethod
    def empty(cls, batch: int, heads: int, device: torch.device | str, chosen: int = 0) -> WalkState:
        """State before the first step; ``chosen`` is K."""

        def ints(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        state = cls(
            limits=ints(2, batch, heads),
            used=ints(batch, heads),
            mass=torch.zeros(batch, heads, device=device),
            totals=ints(len(TOTALS) + BINS, dtype=torch.int64),
            chosen=ints(batch, heads, chosen, value=-1) if chosen else None,
        )
        state.limits[1] = FIRST
        return state

    def tensors(self) -> dict[str, Tensor]:
        """By name, those that are there."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: held for name, held in found.items() if held is not None}

    def clone(self) -> WalkState:
        """A copy with tensors of its own."""
        return WalkState(**{name: held.clone() for name, held in self.tensors().items()})
