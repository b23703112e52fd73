"""Advance the lengths of all rows at the start of a captured step: the definition."""

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
    """Begin a decode step: count one token more in each row, and mark the block that leaves the recent window as due.

    Args:
        after: int32 ``[batch, 2]``: tokens of each row, and tokens in full blocks, after the last step. Updated to the
            state after this step.
        past: int32 ``[batch]``, written: tokens before this step.
        now: int32 ``[batch, 2]``, written: tokens including the step's own, and tokens in full blocks while it attends.
        valid: bool ``[batch]``, rows that get a token; None: all.
        block_size: tokens of a block.
        recent: newest tokens of a row that stay unsealed.
        skip: rows that get no token attend to nothing. ``now`` gives them no tokens, and their ``after`` is unchanged.
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
