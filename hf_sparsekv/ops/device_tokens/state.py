"""Slots for copies of tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

EMPTY = -(1 << 30)  # stamp of a slot that holds nothing: older than all others


class TokenSlots(NamedTuple):
    """The slots of one layer, ``room`` of each row and KV head. All contiguous.

    A slot holds one token: ``slots[b, h, columns[b, h, s]] == s`` for each slot ``s`` that holds one.

    Attributes:
        kv: ``[batch, H, room, Dk + Dv]``: keys and values side by side.
        columns: int32 ``[batch, H, room]``: which token a slot holds, -1 for none.
        stamps: int32 ``[batch, H, room]``: when it was chosen last; ``EMPTY`` if it holds none.
        slots: int32 ``[batch, H, n]``: the slot of each column, -1 for none.
        now: int32 ``[batch, H]``: selections so far that chose any.
    """

    kv: Tensor
    columns: Tensor
    stamps: Tensor
    slots: Tensor
    now: Tensor
