"""Slots for copies of tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

EMPTY = -(1 << 30)  # stamp of a slot that holds nothing: older than all others


class TokenSlots(NamedTuple):
    """The slots of one layer: ``total`` per KV head, divided among the rows. All tensors are contiguous.

    A row's share is its lane: the ``lanes[b, 1]`` slots of every KV head from ``lanes[b, 0]`` on. A row counts its
    slots from 0. A slot holds one token: ``slots[b, h, columns[h, lanes[b, 0] + s]] == s`` for each occupied slot ``s``
    of a row. Lanes do not overlap; a row may have none.

    The slots of a KV head are adjacent, so that a lane grows and shrinks at its end in all heads without a copy.

    Attributes:
        kv: ``[H, total, Dk + Dv]``: keys and values side by side.
        columns: int32 ``[H, total]``: the token in each slot, -1 for none.
        stamps: int32 ``[H, total]``: the last selection that chose the slot's token; ``EMPTY`` if it holds none.
        slots: int32 ``[batch, H, n]``: the slot of each column, -1 for none.
        now: int32 ``[batch, H]``: selections so far that chose at least one token.
        lanes: int32 ``[batch, 2]``: first slot and number of slots of each row, multiples of the block size.
    """

    kv: Tensor
    columns: Tensor
    stamps: Tensor
    slots: Tensor
    now: Tensor
    lanes: Tensor
