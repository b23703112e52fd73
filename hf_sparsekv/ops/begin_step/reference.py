"""Take the rows of a captured step further: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def begin_step(
    after: Tensor,
    past: Tensor,
    now: Tensor,
    valid: Tensor | None,
    *,
    block_size: int,
    recent: int,
    skip: bool = False,
) -> None:
    """A decode step begins: each row gets a token, and the block that has become old by that is to be sealed.

    Args:
        after: int32 ``[batch, 2]``: tokens of each row, and tokens in full blocks, as the last step has left them.
            Becomes what this step leaves.
        past: int32 ``[batch]``, written: tokens before this step.
        now: int32 ``[batch, 2]``, written: tokens with the step's own, and tokens in full blocks while it attends.
        valid: bool ``[batch]``, rows that get a token; None: all.
        block_size: tokens of a block.
        recent: youngest tokens of a row that are not sealed.
        skip: rows that get no token attend to nothing: in ``now`` they hold none, and ``after`` stays as it is.
    """
    length, sealed = after.unbind(1)
    given = torch.ones_like(length) if valid is None else valid.int()
    past.copy_(length)
    now[:, 0] = length + given
    now[:, 1] = sealed
    due = now[:, 0] - recent >= sealed + block_size
    after[:, 0] = now[:, 0]
    if skip:
        due &= given > 0
        now *= given[:, None]
    after[:, 1] = torch.where(due, sealed + block_size, sealed)
