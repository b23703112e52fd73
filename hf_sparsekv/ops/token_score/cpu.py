"""Approximate score of tokens from the label cache on a CPU: few torch operations, each over all heads at once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...tensors import no_inference_mode
from . import reference


def token_score(
    q: Tensor,
    codes: Tensor,
    qparams: Tensor | None,
    channels: Tensor,
    rows: Tensor,
    block_table: Tensor,
    block_ids: Tensor | None,
    reduce: str,
    *,
    sinks: int,
    out: Tensor | None = None,
    fill: bool = True,
) -> Tensor:
    """See :func:`.reference.token_score`; for one row, whose sealed blocks all have an id, and all of them.

    Then what can be selected is one slice, and its labels are read by one ``index_select``. What else is asked, the
    reference answers.
    """

    def by_definition() -> Tensor:
        given = (q, codes, qparams, channels, rows, block_table, block_ids, reduce)
        return reference.token_score(*given, sinks=sinks, out=out, fill=fill)

    heads, size = codes.shape[1:3]
    n = int(rows[0, 1]) // size if len(rows) == 1 else 0
    usual = block_ids is None and out is None and 0 < n == block_table.shape[1] and codes.is_contiguous()
    if not usual or (qparams is not None and not qparams.is_contiguous()):
        return by_definition()
    blocks, sealed = tuple(block_table[0].tolist()), n * size
    if min(blocks) < 0:
        return by_definition()
    group, r = q.shape[1] // heads, channels.shape[-1]
    asked = q.float().view(heads, group, -1).gather(-1, channels[0].long()[:, None].expand(-1, group, -1))
    if reduce == "mean":
        asked = asked.mean(1, keepdim=True)
    each = by_head(blocks, heads)
    held = codes.flatten(0, 1).index_select(0, each).view(heads, sealed, -1)
    if qparams is None:
        score = asked @ held.float().transpose(1, 2)  # [H, G or 1, sealed]
    else:
        half = r // 2
        score = asked[..., :half] @ (held & 15).float().transpose(1, 2)
        score.baddbmm_(asked[..., half:], (held >> 4).float().transpose(1, 2))
        pairs = qparams.flatten(0, 1).index_select(0, each).view(heads, 1, sealed, 2).float()
        score = torch.addcmul(pairs[..., 1] * asked.sum(-1, keepdim=True), score, pairs[..., 0])
    if not bool(score.sum().isfinite()):  # which of them count as -inf is the definition's business
        return by_definition()
    score = score.flatten(0, 1) if reduce == "none" else score.amax(1)
    score[:, :sinks] = float("-inf")
    return score[None]


@lru_cache(maxsize=8)
@no_inference_mode
def by_head(blocks: tuple[int, ...], heads: int) -> Tensor:
    """Of what is stored as ``[blocks, H]``: the entries of each head, block after block. Layers of a step ask alike."""
    return (torch.arange(heads)[:, None] + torch.tensor(blocks) * heads).flatten()
