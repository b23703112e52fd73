"""Keep the latest queries of each row: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def push(
    q: Tensor, valid: Tensor | None, column: Tensor, ring: Tensor, first: Tensor, count: Tensor, position: Tensor
) -> None:
    """Store the queries of columns ``column .. column + n - 1``; the query of column ``c`` lives at ``c % R``.

    What is written depends on the columns alone, so pushing the same queries twice is pushing them once.

    Args:
        q: ``[batch, Hq, n, D]``, ``n <= R``.
        valid: ``[batch, n]`` bool, False for padding; ``None`` if no column is padding.
        column: int32 ``[1]``, read on the device.
        ring: ``[batch, Hq, R, D]``, written in place.
        first: int32 ``[batch]``, written in place: the first column whose query, and all after it, are known. A column
            of padding moves it on.
        count: int32 ``[batch]``, written: queries of each row that the ring holds, from ``first`` on.
        position: int32 ``[1]``, written: where the next query goes.
    """
    n, size = q.shape[2], ring.shape[2]
    columns = column + torch.arange(n, dtype=torch.int32, device=ring.device)
    ring.index_copy_(2, (columns % size).long(), q.to(ring.dtype))
    if valid is not None and n:
        after = torch.where(valid, 0, columns + 1).amax(1)
        first.copy_(torch.maximum(first, after.int()))
    count.copy_((column + n - first).clamp(0, size))
    position.copy_((column + n) % size)
