"""Sizes that the operators of sparse prompts share, and which blocks a tile of queries may see.

Mass, choice and attention have to agree on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128  # queries that choose together
BLOCK = 64  # keys that are chosen together
STEP = 16  # of so many queries the last one's scores are computed exactly
LONG = 1 << 16  # columns from which on these are twice as many queries: estimates take as long as attention there
POOL = 16  # keys of a mean
EVERY = 4  # of so many queries the last one is compared with means: more cost more than they find
SINKS = 4  # first tokens of a row, whose blocks it always attends to: with padding in front they may lie in two
NEAR = 2  # whole blocks before a tile's own ones, which it always attends to


def step_of(columns: int) -> int:
    """Distance of exactly scored queries, over so many columns: the last one of each ``step_of(columns)``."""
    return STEP if columns < LONG else 2 * STEP


def tiles_of(rows: int) -> int:
    """Tiles of so many queries."""
    return -(-rows // TILE)


def blocks_of(columns: int) -> int:
    """Blocks of so many keys, the last of which may be a part."""
    return -(-columns // BLOCK)


def key_means(key: Tensor, start: Tensor | None = None) -> Tensor:
    """Means of each ``POOL`` keys, those of padding left out.

    Args:
        key: ``[batch, H, n, Dk]``.
        start: int32 ``[batch]``, the first column that is no padding. None: 0.

    Returns:
        ``[batch, H, ceil(n / POOL), Dk]``, in the dtype of ``key``; zeros where all is padding.
    """
    n = key.shape[2]
    if start is not None:
        padding = torch.arange(n, device=key.device) < start[:, None]
        key = key.masked_fill(padding[:, None, :, None], 0)
    whole = n // POOL
    sums = key[:, :, : whole * POOL].unflatten(2, (whole, POOL)).sum(3, dtype=torch.float32)
    if n % POOL:
        sums = torch.cat((sums, key[:, :, whole * POOL :].sum(2, keepdim=True, dtype=torch.float32)), dim=2)
    return (sums / _counts(n, start, key.device).clamp_min(1)[:, None, :, None]).to(key.dtype)


def _counts(n: int, start: Tensor | None, device: torch.device) -> Tensor:
    """Keys of each mean, int ``[batch or 1, ceil(n / POOL)]``."""
    first = torch.arange(0, n, POOL, device=device)[None]
    from_ = first if start is None else first.maximum(start[:, None])
    return ((first + POOL).clamp_max(n) - from_).clamp_min(0)


def pool_counts(n: int, start: Tensor | None, device: torch.device) -> Tensor:
    """Keys of each mean as float32, ``[batch or 1, ceil(n / POOL)]``."""
    return _counts(n, start, device).float()


def seen_blocks(past: int, rows: int, start: Tensor | None, device: torch.device) -> Tensor:
    """How many blocks each tile can see, int64 ``[batch or 1, tiles]``.

    Args:
        past: the column of the first of ``rows`` queries.
    """
    last = (torch.arange(1, tiles_of(rows) + 1, device=device) * TILE).clamp_max(rows) + past - 1
    first = 0 if start is None else start[:, None]
    seen = last // BLOCK - first // BLOCK + 1
    return (seen if start is None else seen.masked_fill(last < first, 0)).view(-1, len(last))
