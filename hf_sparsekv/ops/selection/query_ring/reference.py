"""Keep the latest queries of each row: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import require_each_row


def push(
    q: Tensor, valid: Tensor | None, past: Tensor, ring: Tensor, first: Tensor, count: Tensor, position: Tensor
) -> None:
    """Store the queries of each row's tokens ``past .. past + n - 1``; the query of token ``t`` goes to ``t % R``.

    The position depends on the token alone, so pushing the same queries again has no effect.

    Args:
        q: ``[batch, Hq, n, D]``, ``n <= R``.
        valid: bool ``[batch]`` or ``[batch, 1]``. Where it is False, no query is stored, and ``count`` and ``position``
            are those at ``past`` tokens. ``None``: the queries of all rows are stored.
        past: int32 ``[batch]``, tokens of each row before these. May be a strided column of a larger tensor. Read on
            the device.
        ring: ``[batch, Hq, R, D]``, written in place.
        first: int32 ``[batch]``, the token of each row from which on all queries are known.
        count: int32 ``[batch]``, written: queries of each row that the ring holds, from ``first`` on.
        position: int32 ``[batch]``, written: the ring position of each row's next query.
    """
    batch, n, size = len(q), q.shape[2], ring.shape[2]
    require_each_row(batch, valid, past=past, first=first, count=count, position=position)
    row = torch.arange(batch, device=q.device) if valid is None else valid.flatten().nonzero()[:, 0]
    at = (past[row, None] % size + torch.arange(n, device=q.device)) % size  # [rows, n]
    ring[row[:, None], :, at] = q[row].transpose(1, 2).to(ring.dtype)
    end = past + (n if valid is None else n * valid.flatten())
    count.copy_((end - first).clamp(0, size))
    position.copy_(end % size)
