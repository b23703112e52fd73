"""Score of every stored block for one query: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import give


def block_score(
    q: Tensor,
    bounds: Tensor,
    rows: Tensor,
    block_table: Tensor,
    reduce: str,
    *,
    tokens: int,
    sinks: int,
    out: Tensor | None = None,
    fill: bool = True,
) -> Tensor:
    """Upper bound of ``q . k`` over the keys of each block, reduced over the query heads of a group.

    ``relu(q_h) . kmax_b - relu(-q_h) . kmin_b``: Quest's bound in AsyncTLS's GEMM form (section 4.1). The mean or
    maximum over the heads ``h`` of the KV head's group follows. A NaN score counts as ``-inf``, also in the
    maximum. Scores are NaN where a key or query is, or where an infinity meets a zero.

    Args:
        q: ``[batch, Hq, Dk]`` queries of this step, rotary embedding applied.
        bounds: ``[num_blocks, H, 2, Dk]``, see :func:`...seal.reference.key_bounds`.
        rows: int32 ``[batch, 2]``, length and sealed tokens of each row.
        block_table: ``[batch, n]`` int32, physical id of each block of each row; -1 where there is none. Entries of
            blocks that are not sealed are not read.
        reduce: ``"mean"`` or ``"max"``.
        tokens: number of tokens in a block.
        sinks: first tokens of a row, which cannot be selected; those from there to the last sealed one can.
        out: receives the result.
        fill: False leaves the scores after a row's sealed blocks unwritten, for callers that do not read them.

    Returns:
        ``[batch, H, n]`` float32. ``-inf`` where there is no block, or no selectable token in it. Never NaN.
    """
    batch, q_heads, dk = q.shape
    heads = bounds.shape[1]
    n = block_table.shape[1]
    q = q.float().view(batch, heads, q_heads // heads, dk)
    parts = torch.cat((q.relu(), -(-q).relu()), dim=-1)  # [batch, H, G, 2 Dk]
    if reduce == "mean":  # linear, so the group collapses to one vector first
        parts = parts.mean(2, keepdim=True)
    first = torch.arange(n, device=q.device) * tokens
    live = (first + tokens > sinks) & (first < rows[:, 1:]) & (block_table >= 0)
    at = block_table.masked_fill(~live, 0).long()
    box = bounds[at].float().permute(0, 2, 3, 4, 1).reshape(batch, heads, 2 * dk, n)
    score = parts @ box  # [batch, H, G or 1, n]
    score = score.masked_fill(~live[:, None, None] | score.isnan(), float("-inf"))
    score = score.amax(2)
    if not fill:  # without `out` this is unwritten memory: NaN exposes code that reads it
        held = torch.full_like(score, float("nan")) if out is None else out
        score = torch.where((first < rows[:, 1:])[:, None], score, held)
    return give(score, out)
