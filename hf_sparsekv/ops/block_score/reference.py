"""Score of every stored block for one query: the definition (Quest's bound in AsyncTLS's GEMM form)."""

from __future__ import annotations

import torch
from torch import Tensor


def block_score(q: Tensor, bounds: Tensor, fill: Tensor, slots: Tensor, reduce: str) -> Tensor:
    """Upper bound of ``q . k`` over the keys of each block, reduced over the query heads of a group.

    ``s_h(b) = relu(q_h) . kmax_b - relu(-q_h) . kmin_b`` (AsyncTLS section 4.1), then the mean or the maximum
    over the heads ``h`` of the KV head's group.

    Args:
        q: ``[batch, Hq, Dk]`` queries of this step, rotary embedding applied.
        bounds: ``[num_slots, H, 2, Dk]``: largest (0) and smallest (1) key of the block per channel.
        fill: ``[num_slots]`` int32, tokens of the block that can be selected.
        slots: ``[batch, n]`` int32, slot of each block of each row; -1 where there is none.
        reduce: ``"mean"`` or ``"max"``.

    Returns:
        ``[batch, H, n]`` float32; ``-inf`` where there is no block or nothing to select in it.
    """
    batch, q_heads, dk = q.shape
    heads, n = bounds.shape[1], slots.shape[1]
    q = q.float().view(batch, heads, q_heads // heads, dk)
    parts = torch.cat((q.relu(), -(-q).relu()), dim=-1)  # [batch, H, G, 2 Dk]
    if reduce == "mean":  # linear, so the group collapses to one vector first
        parts = parts.mean(2, keepdim=True)
    at = slots.clamp_min(0).long()
    box = bounds[at].float().permute(0, 2, 3, 4, 1).reshape(batch, heads, 2 * dk, n)
    score = (parts @ box).amax(2)
    missing = (slots < 0) | (fill[at] == 0)
    return score.masked_fill(missing[:, None], float("-inf"))
