"""How a memory for copies of tokens is shared out to the rows of a batch: where each row's slots begin, how many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import no_inference_mode

_PIECE = 1 << 26  # bytes, of what is kept beside while a lane moves into a part of itself


class Move(NamedTuple):
    """What ``kept`` slots from ``begin`` on hold is to lie at ``to``. The two may overlap."""

    begin: int
    to: int
    kept: int


class Lanes:
    """The lane of each row: slots that lie together, at a multiple of the block size. Rows may have none.

    All layers have the same lanes. The host decides; the device has a copy that captured steps read.

    Attributes:
        slots: of all rows, a multiple of ``block_size``.
        held: of each row, where its lane begins and how many slots it has.
    """

    def __init__(self, rows: int, slots: int, block_size: int) -> None:
        self.slots, self.block_size = slots // block_size * block_size, block_size
        self.held: list[tuple[int, int]] = [(0, 0)] * rows
        self._on: dict[torch.device, Tensor] = {}

    @no_inference_mode
    def on(self, device: torch.device) -> Tensor:
        """int32 ``[rows, 2]``, :attr:`held` on a device; written in place."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.held, dtype=torch.int32, device=device)
        return self._on[device]

    @property
    def free(self) -> int:
        """Slots of no row."""
        return self.slots - sum(room for _, room in self.held)

    def give(self, row: int, room: int) -> list[Move]:
        """Row ``row`` has ``room`` slots, a multiple of the block size, from here on.

        In its place if it can stay, else in the first gap that is large enough, else all lanes are moved together.

        Returns:
            What has to be moved, in this order, for every row to keep what it holds, as far as there is room.

        Raises:
            ValueError: there are not so many free. Nothing has changed.
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
        """Where ``room`` slots of this row can begin: where its lane is, or in the first gap; None: nowhere."""
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
        """All lanes beside each other in their order, without gaps; row ``row`` has ``room`` slots."""
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
        # Down from the front on, then up from the end on: none is written over before it has been moved.
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
                held.copy_(torch.tensor(self.held, dtype=torch.int32))
            raise


@no_inference_mode
def even_lanes(rows: int, room: int, device: torch.device) -> Tensor:
    """int32 ``[rows, 2]``: ``room`` slots each, one row behind the other."""
    first = torch.arange(rows, dtype=torch.int32, device=device) * room
    return torch.stack((first, torch.full_like(first, room)), dim=1)


def moved(tensors: Sequence[Tensor], moves: Sequence[Move], dim: int) -> None:
    """Move slots along dimension ``dim`` of each of the tensors ``[layers, ...]``, of all their layers at once.

    Where a lane moves into a part of itself only of some layers at once: these are copied twice.
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
