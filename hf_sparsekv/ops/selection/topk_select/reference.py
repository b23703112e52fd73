"""The k best entries of each row as ascending ids: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import give, require_rows


def topk_ids(scores: Tensor, k: int, rows: Tensor | None = None, tokens: int = 1) -> Tensor:
    """Positions of the ``k`` largest scores of each row, ascending.

    Entries of ``-inf`` and NaN are never chosen. Among equal scores the lower position wins, so the result is unique.

    Args:
        scores: ``[batch, H, n]`` float32.
        k: entries to choose.
        rows: int32 ``[batch, 2]``, length and sealed tokens of each row. Entries that begin after the sealed tokens are
            not read. ``None``: all are.
        tokens: number of tokens in an entry.

    Returns:
        ``[..., k]`` int32, ascending, padded at the end with -1 where fewer than ``k`` entries can be chosen.
    """
    n = scores.shape[-1]
    if rows is not None:
        after = torch.arange(n, device=scores.device) * tokens >= rows[:, 1:]
        scores = scores.masked_fill(after[:, None], float("-inf"))
    order = scores.masked_fill(scores.isnan(), float("-inf")).sort(dim=-1, descending=True, stable=True)
    best, at = order.values[..., :k], order.indices[..., :k]
    at = at.masked_fill(best == float("-inf"), n).sort(dim=-1).values
    at = at.masked_fill(at == n, -1).int()
    return torch.nn.functional.pad(at, (0, k - at.shape[-1]), value=-1)


def block_select(
    scores: Tensor,
    k: int,
    *,
    rows: Tensor | None = None,
    block_size: int | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Blocks to keep: ``BlockIds`` int32 ``[batch, H, k]`` of the ``k`` best of ``scores [batch, H, n]``.

    ``rows``, ``out`` and ``scratch``: see :func:`token_select`. With ``rows``, blocks after the row's sealed ones
    cannot be chosen, and their scores are not read. ``block_size`` is the number of tokens in a block; ``rows`` need
    it.

    Raises:
        ValueError: ``rows`` without ``block_size``, or not ``[batch, 2]`` int32.
    """
    if rows is not None:
        require_rows(rows, scores.shape[0])
    return give(topk_ids(scores, k, rows, tokens_of(rows, block_size)), out)


def tokens_of(rows: Tensor | None, block_size: int | None) -> int:
    """Tokens of a block; 1 without ``block_size``, which only ``rows`` need."""
    if rows is not None and not block_size:
        raise ValueError("rows count tokens: give block_size, the tokens in a block, with them")
    return block_size or 1


def token_select(
    scores: Tensor,
    block_ids: Tensor | None,
    k: int,
    block_size: int,
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Tokens to attend to.

    Args:
        scores: ``[batch, H, n * block_size]`` float32: token scores of ``n`` blocks, in order.
        block_ids: ``[batch, H, n]`` int32 ascending block ids (-1 at the end) that the scores belong to;
            ``None`` if they are blocks ``0 .. n - 1``.
        k: tokens to choose per row and KV head.
        block_size: tokens in a block.
        rows: int32 ``[batch, 2]``, length and sealed tokens of each row, for scores of all blocks. Tokens after the
            sealed ones cannot be chosen. Their scores are not read, so short rows take less time. ``None``: all ``n``
            blocks count.
        out: receives the result.
        scratch: int32 of ``triton.scratch_size(scores, k)`` entries, for the kernels of long rows.

    Returns:
        ``TokenIds`` int32 ``[batch, H, k]``: columns, ascending, padded at the end with -1.

    Raises:
        ValueError: ``rows`` with ``block_ids``, whose scores are not in the order of the row's tokens; or ``rows`` that
            are not ``[batch, 2]`` int32.
    """
    require_all_blocks(rows, block_ids, scores.shape[0])
    at = topk_ids(scores, k, rows)
    if block_ids is None:
        return give(at, out)
    block = block_ids.gather(-1, (at.clamp_min(0) // block_size).long())
    return give(torch.where(at < 0, at, block * block_size + at % block_size).int(), out)


def require_all_blocks(rows: Tensor | None, block_ids: Tensor | None, batch: int) -> None:
    """Raise ``ValueError`` unless ``rows`` are valid and the scores are those of all blocks."""
    if rows is None:
        return
    if block_ids is not None:
        raise ValueError("rows bound scores of all blocks: leave them out where block_ids are given")
    require_rows(rows, batch)
