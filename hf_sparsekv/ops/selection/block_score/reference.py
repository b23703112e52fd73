"""Score of every stored block for one query: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import give


def query_parts(q: Tensor, metadata: str) -> Tensor:
    """The factor of a block's metadata, ``[..., D]`` to ``[..., sides * D]``: the score is linear in both."""
    if metadata == "min_max":
        return torch.cat((q.relu(), -(-q).relu()), dim=-1)
    return torch.cat((q, q.abs()), dim=-1) if metadata == "cuboid_mean" else q


def block_score(
    q: Tensor,
    bounds: Tensor,
    rows: Tensor,
    block_table: Tensor,
    reduce: str,
    metadata: str = "min_max",
    *,
    tokens: int,
    sinks: int,
    out: Tensor | None = None,
    each: Tensor | None = None,
    fill: bool = True,
) -> Tensor:
    """Estimate of the largest ``q . k`` over the keys of each block, reduced over the query heads of a group.

    * ``"min_max"``: ``relu(q_h) . kmax_b - relu(-q_h) . kmin_b``, an upper bound for the block (Quest's bound in
      AsyncTLS's GEMM form, section 4.1).
    * ``"cuboid_mean"``: ``q_h . centre_b + |q_h| . deviation_b`` (ArkVale, also used by PSA): not a bound.
    * ``"mean"``: ``q_h . mean_b``.

    The mean or maximum over the heads ``h`` of the KV head's group follows. A NaN score counts as ``-inf``, also in the
    maximum. Scores are NaN where a key or query is, or where an infinity meets a zero.

    Args:
        q: ``[batch, Hq, Dk]`` queries of this step, rotary embedding applied.
        bounds: ``[num_blocks, H, sides, Dk]``, see :func:`...seal.reference.key_metadata`.
        rows: int32 ``[batch, 2]``, length and sealed tokens of each row.
        block_table: ``[batch, n]`` int32, physical id of each block of each row; -1 where there is none. Entries of
            blocks that are not sealed are not read. Parts of blocks are scored as separate blocks.
        reduce: ``"mean"``, ``"max"`` or ``"none"``.
        metadata: kind of ``bounds``.
        tokens: number of tokens in a block, or in a part.
        sinks: first tokens of a row, which cannot be selected; those from there to the last sealed one can.
        out: receives the result.
        each: float32 ``[batch, Hq, n]``, receives the result of ``reduce="none"``.
        fill: False leaves the scores after a row's sealed blocks unwritten, for callers that do not read them.

    Returns:
        ``[batch, H, n]`` float32, ``[batch, Hq, n]`` without reduction. ``-inf`` where there is no block, or no
        selectable token in it. Never NaN.
    """
    batch, q_heads, dk = q.shape
    heads, sides = bounds.shape[1:3]
    n = block_table.shape[1]
    parts = query_parts(q.float().view(batch, heads, q_heads // heads, dk), metadata)  # [batch, H, G, sides * Dk]
    if reduce == "mean":  # linear, so the group collapses to one vector first
        parts = parts.mean(2, keepdim=True)
    first = torch.arange(n, device=q.device) * tokens
    live = (first + tokens > sinks) & (first < rows[:, 1:]) & (block_table >= 0)
    at = block_table.masked_fill(~live, 0).long()
    box = bounds[at].float().permute(0, 2, 3, 4, 1).reshape(batch, heads, sides * dk, n)
    score = parts @ box  # [batch, H, G or 1, n]
    score = score.masked_fill(~live[:, None, None] | score.isnan(), float("-inf"))
    if each is not None:
        sizes = {"tokens": tokens, "sinks": sinks}
        block_score(q, bounds, rows, block_table, "none", metadata, **sizes, out=each, fill=fill)
    score = score.flatten(1, 2) if reduce == "none" else score.amax(2)
    if not fill:  # without `out` this is unwritten memory: NaN exposes code that reads it
        held = torch.full_like(score, float("nan")) if out is None else out
        score = torch.where((first < rows[:, 1:])[:, None], score, held)
    return give(score, out)
