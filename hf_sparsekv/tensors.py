"""Tensors that outlive a step: written in place, at addresses that captured graphs hold."""

from __future__ import annotations

import torch
from torch import Tensor

# Decorates whatever creates state that is written in place. Such state must not be an inference tensor: a cache may be
# filled inside torch.inference_mode() and used outside of it.
no_inference_mode = torch.inference_mode(False)


def take_rows(held: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Rows ``index`` of ``held``; in place if there are as many, because captured graphs hold the address."""
    rows = held.index_select(dim, index.to(held.device))
    return held.copy_(rows) if rows.shape == held.shape else rows


def reads_here(made: Tensor) -> Tensor:
    """``made`` on a step's own stream, for work on the current one, which may be a side stream and come later."""
    if made.is_cuda:  # or its memory would be reused while it is read here
        made.record_stream(torch.cuda.current_stream(made.device))
    return made
