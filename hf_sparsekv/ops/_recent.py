"""Mask of the entries of the recent buffer that hold a token, from the length of a row and its sealed tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def recent_valid(rows: Tensor, sinks: int, size: int) -> Tensor:
    """Bool ``[batch, size]``: entries of a recent buffer of ``sinks`` positions and a ring that hold a token.

    Entry ``s < sinks`` has the copy of token ``s`` once that is sealed. An unsealed token ``i`` is at entry
    ``sinks + i % R``, where ``R`` is the size of the ring.

    Args:
        rows: int32 ``[batch, 2]``: the length of each row and how many of its tokens are sealed.
        sinks: positions that precede the ring.
        size: of the buffer, ``sinks + R``.
    """
    length, sealed = rows.long().split(1, dim=-1)
    entry = torch.arange(size, device=rows.device)
    ahead = (entry - sinks - sealed) % max(1, size - sinks)  # tokens from the first that is not sealed on
    return torch.where(entry < sinks, entry < sealed, ahead < length - sealed)
