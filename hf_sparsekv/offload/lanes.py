"""Division of the memory for copies of tokens among the rows of a batch: first slot and number of slots per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import no_inference_mode, sent

_PIECE = 1 << 26  # bytes of the temporary copy while a lane moves to an overlapping range


class Move(NamedTuple):
    """Move the content of ``kept`` slots from ``begin`` to ``to``. The two ranges may overlap."""

    begin: int
    to: int
    kept: int


class Lanes:
    """The lane of each row: contiguous slots that begin at a multiple of the block size. Rows may have none.

    All layers have the same lanes. The host decides; the device has a copy that captured steps read.

    Attributes:
        slots: number of slots for all rows, a multiple of ``block_size``.
        held: first slot and number of slots of each row's lane.
    """

    def __init__(self, rows: int, slots: int, block_size: int) -> None:
        self.slots, self.block_size = slots // block_size * block_size, block_size
        self.held: list[tuple[int, int]] = [(0, 0)] * rows
        self._on: dict[torch.device, Tensor] = {}

    @no_inference_mode
    def on(self, device: torch.device) -> Tensor:
        """int32 ``[rows, 2]``, :attr:`held` on a device; written in place."""
        if device not in self._on:
            self._on[device] = sent(self.held, torch.int32, device)
        return self._on[device]

    @property
    def free(self) -> int:
        """Number of slots that no row has."""
        return self.slots - sum(room for _, room in self.held)

    def give(self, row: int, room: int) -> list[Move]:
        """Resize the lane of row ``row`` to ``room`` slots, a multiple of the block size.

        The lane stays where it is if it can. Otherwise it moves to the first gap that is large enough. If there is
        none, all lanes are compacted.

        Returns:
            The moves to make, in this order, so that every row keeps its content as far as there is room.

        Raises:
            ValueError: too few slots are free. Nothing has changed.
        """
        first, had = self.held[row]
        if room - had > self.free:
            raise ValueError(
                f"{room} slots were asked for, row {row} has {had} and {self.free} of {self.slots} are free: give "
                "other rows fewer first"
            )
        at = self._place(row, room)
        if at is None:
            return self._together(row, room)
        self._set({row: (at, room)})
        kept = min(room, had)
        return [Move(first, at, kept)] if kept and at != first else []

    def move(self, row: int, source: int) -> None:
        """Row ``row``, which has no slots, gets those of row ``source``."""
        self._set({row: self.held[source], source: (0, 0)})

    def _place(self, row: int, room: int) -> int | None:
        """First slot for ``room`` slots of this row: where its lane is, or in the first gap; None if nowhere fits."""
        if not room:
            return 0
        others = sorted(lane for i, lane in enumerate(self.held) if i != row and lane[1])
        gaps, end = [], 0
        for first, held in [*others, (self.slots, 0)]:
            gaps.append((end, first))
            end = first + held
        first, had = self.held[row]
        if had and any(begin <= first and first + room <= end for begin, end in gaps):
            return first
        return next((begin for begin, end in gaps if end - begin >= room), None)

    def _together(self, row: int, room: int) -> list[Move]:
        """Compact all lanes in their order, without gaps; row ``row`` gets ``room`` slots."""
        order = sorted(range(len(self.held)), key=lambda i: (self.held[i], i))
        order = [i for i in order if self.held[i][1] or i == row]
        down, up, end, lanes = [], [], 0, {}
        for i in order:
            first, had = self.held[i]
            size = room if i == row else had
            move = Move(first, end, min(had, size))
            if move.kept and move.to != first:
                (down if end < first else up).append(move)
            lanes[i] = end, size
            end += size
        self._set(lanes)
        # Downward moves from the front, then upward moves from the end: no lane is overwritten before it has moved.
        return down + up[::-1]

    def _set(self, lanes: dict[int, tuple[int, int]]) -> None:
        changed = {row: lane for row, lane in lanes.items() if self.held[row] != lane}
        self.held = [changed.get(row, lane) for row, lane in enumerate(self.held)]
        try:
            for held in self._on.values():
                for row, (first, room) in changed.items():
                    held[row, 0].fill_(first)  # fills: nothing waits for the device
                    held[row, 1].fill_(room)
        except BaseException:
            for held in self._on.values():
                held.copy_(sent(self.held, torch.int32, held.device))
            raise


@no_inference_mode
def even_lanes(rows: int, room: int, device: torch.device) -> Tensor:
    """int32 ``[rows, 2]``: consecutive lanes of ``room`` slots each."""
    first = torch.arange(rows, dtype=torch.int32, device=device) * room
    return torch.stack((first, torch.full_like(first, room)), dim=1)


def moved(tensors: Sequence[Tensor], moves: Sequence[Move], dim: int) -> None:
    """Move slots along dimension ``dim`` of each of the tensors ``[layers, ...]``, in all layers at once.

    Overlapping moves handle a few layers at a time, through a temporary copy.
    """
    for begin, to, kept in moves:
        for t in tensors:
            target, source = t.narrow(dim, to, kept), t.narrow(dim, begin, kept)
            if abs(to - begin) >= kept:
                target.copy_(source)
                continue
            layers = max(1, _PIECE * len(source) // max(1, source.nbytes))
            for one, two in zip(target.split(layers), source.split(layers)):
                one.copy_(two.clone())
