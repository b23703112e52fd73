"""All blocks of each row in order of their scores: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def block_rank(scores: Tensor, fill: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the blocks of each row and KV head by falling score; among equal scores the lower id comes first.

    Args:
        scores: ``[batch, H, n]`` float32; ``-inf`` where there is nothing to select, and NaN counts as ``-inf``.
        fill: ``[num_blocks]`` int32, tokens of a block that can be selected.
        block_table: ``[batch, n]`` int32, physical id of each block of each row.

    Returns:
        Ids int32 ``[batch, H, n]``, -1 from the last block with a score on, and the selectable tokens of each
        (int32, 0 there).
    """
    order = scores.masked_fill(scores.isnan(), float("-inf")).sort(dim=-1, descending=True, stable=True)
    live = order.values > float("-inf")
    physical_id = block_table[:, None].expand(-1, scores.shape[1], -1).gather(-1, order.indices)
    tokens = torch.where(live, fill[physical_id.clamp_min(0).long()], 0)
    return torch.where(live, order.indices, -1).int(), tokens.int()
