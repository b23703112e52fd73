"""The k best entries of each row as ascending ids: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch import give


def topk_ids(scores: Tensor, k: int) -> Tensor:
    """Positions of the ``k`` largest scores of each row, ascending.

    Entries of ``-inf`` and NaN are never chosen. Among equal scores the lower position wins, so the result is unique.

    Args:
        scores: ``[..., n]`` float32.
        k: entries to choose.

    Returns:
        ``[..., k]`` int32, ascending, padded at the end with -1 where fewer than ``k`` entries can be chosen.
    """
    n = scores.shape[-1]
    order = scores.masked_fill(scores.isnan(), float("-inf")).sort(dim=-1, descending=True, stable=True)
    best, at = order.values[..., :k], order.indices[..., :k]
    at = at.masked_fill(best == float("-inf"), n).sort(dim=-1).values
    at = at.masked_fill(at == n, -1).int()
    return torch.nn.functional.pad(at, (0, k - at.shape[-1]), value=-1)


def block_select(scores: Tensor, k: int, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """Blocks to keep: ``BlockIds`` int32 ``[batch, H, k]`` of the ``k`` best of ``scores [batch, H, n]``.

    ``out`` and ``scratch``: see :func:`token_select`.
    """
    return give(topk_ids(scores, k), out)


def token_select(
    scores: Tensor,
    block_ids: Tensor | None,
    k: int,
    block_size: int,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Tokens to attend to.

    Args:
        scores: ``[batch, H, n * block_size]`` float32: token scores of ``n`` blocks, one after the other.
        block_ids: ``[batch, H, n]`` int32 ascending block ids (-1 at the end) that the scores belong to;
            ``None`` if they are blocks ``0 .. n - 1``.
        k: tokens to choose per row and KV head.
        block_size: tokens in a block.
        out: receives the result.
        scratch: int32 of ``triton.scratch_size(scores, k)`` entries, for the kernels of long rows.

    Returns:
        ``TokenIds`` int32 ``[batch, H, k]``: columns, ascending, padded at the end with -1.
    """
    at = topk_ids(scores, k)
    if block_ids is None:
        return give(at, out)
    block = block_ids.gather(-1, (at.clamp_min(0) // block_size).long())
    return give(torch.where(at < 0, at, block * block_size + at % block_size).int(), out)
