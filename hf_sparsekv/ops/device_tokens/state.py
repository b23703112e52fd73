"""Slots for copies of tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

EMPTY = -(1 << 30)  # stamp of a slot that holds nothing: older than all others


class TokenSlots(NamedTuple):
    """The slots of one layer: ``total`` of each KV head, shared out to the rows. All contiguous.

    A row's part is its lane: ``lanes[b, 1]`` slots of every KV head from ``lanes[b, 0]`` on, counted from 0 in each
    row. A slot holds one token: ``slots[b, h, columns[h, lanes[b, 0] + s]] == s`` for each slot ``s`` of a row that
    holds one. Lanes do not overlap; a row may have none.

    One KV head's slots lie together, so that a lane grows and shrinks at its end in all heads without a copy.

    Attributes:
        kv: ``[H, total, Dk + Dv]``: keys and values side by side.
        columns: int32 ``[H, total]``: which token a slot holds, -1 for none.
        stamps: int32 ``[H, total]``: when it was chosen last; ``EMPTY`` if it holds none.
        slots: int32 ``[batch, H, n]``: the slot of each column, -1 for none.
        now: int32 ``[batch, H]``: selections so far that have chosen something.
        lanes: int32 ``[batch, 2]``: where a row's slots begin and how many there are, multiples of the block size.
    """

    kv: Tensor
    columns: Tensor
    stamps: Tensor
    slots: Tensor
    now: Tensor
    lanes: Tensor
