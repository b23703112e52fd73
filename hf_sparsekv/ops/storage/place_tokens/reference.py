"""Columns of chosen tokens, and their addresses in device pages: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def place_tokens(at: Tensor, block_ids: Tensor, page_ids: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Columns and addresses of tokens that were chosen from a list of blocks.

    Args:
        at: int32 ``[batch, H, k]``, positions among the tokens of the listed blocks, in order; -1 for none.
        block_ids: int32 ``[batch, H, n]``, the blocks.
        page_ids: int32 ``[batch, H, n]``, their page ids (``pages`` of ``sparse_decode``).
        block_size: tokens in a block.

    Returns:
        int32 ``[batch, H, k]`` each: ``block_id * block_size + position in the block``, and the same with the page id.
        -1 for none.
    """
    block = (at.clamp_min(0) // block_size).long()
    found = (of.gather(-1, block) * block_size + at % block_size for of in (block_ids, page_ids))
    columns, places = (torch.where(at < 0, -1, each).int() for each in found)
    return columns, places
