"""Tensors that outlive a step: written in place, at addresses that captured graphs hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable)


def no_inference_mode(function: Function) -> Function:
    """Decorates whatever creates state that is written in place. Such state must not be an inference tensor.

    A cache may be filled inside ``torch.inference_mode()`` and used outside of it. Where that mode is off, nothing is
    entered: a prompt calls some ten such functions in each layer.
    """

    @wraps(function)
    def call(*args, **named):
        if not torch.is_inference_mode_enabled():
            return function(*args, **named)
        with torch.inference_mode(False):
            return function(*args, **named)

    return call


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor of ``values`` (numbers, an array, a tensor) on a device, behind what was launched there.

    From memory that the host does not use again, so it does not wait. A copy from ordinary memory, such as
    ``torch.tensor(values, device=device)`` makes, waits until the GPU has done all that it was given before.
    """
    made = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type == "cuda" and made.device.type == "cpu":
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)


def take_rows(held: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Rows ``index`` of ``held``; in place if there are as many, because captured graphs hold the address."""
    rows = held.index_select(dim, index.to(held.device))
    return held.copy_(rows) if rows.shape == held.shape else rows


def reads_here(made: Tensor) -> Tensor:
    """``made`` on a step's own stream, for work on the current one, which may be a side stream and come later."""
    if made.is_cuda:  # or its memory would be reused while it is read here
        made.record_stream(torch.cuda.current_stream(made.device))
    return made
