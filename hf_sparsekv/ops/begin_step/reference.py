"""Take the rows of a captured step further: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def begin_step(after: Tensor, past: Tensor, now: Tensor, valid: Tensor | None, *, block_size: int, recent: int) -> None:
    """A decode step begins: each row gets a token, and the block that has become old by that is to be sealed.

    Args:
        after: int32 ``[batch, 2]``: tokens of each row, and tokens in full blocks, as the last step has left them.
            Becomes what this step leaves.
        past: int32 ``[batch]``, written: tokens before this step.
        now: int32 ``[batch, 2]``, written: tokens with the step's own, and tokens in full blocks while it attends.
        valid: bool ``[batch]``, rows that get a token; None: all.
        block_size: tokens of a block.
        recent: youngest tokens of a row that are not sealed.
    """
    length, sealed = after.unbind(1)
    past.copy_(length)
    now[:, 0] = length + (1 if valid is None else valid.int())
    now[:, 1] = sealed
    due = now[:, 0] - recent >= sealed + block_size
    after[:, 0] = now[:, 0]
    after[:, 1] = torch.where(due, sealed + block_size, sealed)
