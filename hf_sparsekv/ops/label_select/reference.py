"""The tokens whose labels score best: the definition."""

from __future__ import annotations

from torch import Tensor

from ..token_score.reference import token_score
from ..topk_select.reference import token_select


def label_select(
    q: Tensor,
    codes: Tensor,
    qparams: Tensor | None,
    channels: Tensor,
    rows: Tensor,
    block_table: Tensor,
    k: int,
    reduce: str,
    *,
    sinks: int,
    out: Tensor | None = None,
) -> Tensor:
    """``TokenIds [batch, H, k]`` of the ``k`` best of all sealed tokens: their scores, and a selection from these.

    AsyncTLS section 4.1, fine-grained token selection, from all blocks.

    Args:
        q, codes, qparams, channels, rows, block_table, sinks: as of ``token_score``.
        k: tokens to choose per row and KV head.
        reduce: ``"mean"`` or ``"max"`` over the query heads of a group.
        out: receives the result.

    Returns:
        int32 ``[batch, H, k]``: columns, ascending, padded at the end with -1. Among equal scores the lower one wins.
    """
    scores = token_score(q, codes, qparams, channels, rows, block_table, None, reduce, sinks=sinks)
    return token_select(scores, None, k, codes.shape[2], rows=rows, out=out)
