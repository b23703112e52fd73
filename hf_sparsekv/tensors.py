"""Tensors that outlive a step: written in place, at addresses that captured graphs hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
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


_DEVICES = "cpu", "cuda"
# One call instead of one for each kind of device: every layer asks in every step.
any_autocast = getattr(torch._C, "_is_any_autocast_enabled", None) or (
    lambda: any(map(torch.is_autocast_enabled, _DEVICES))
)


def no_autocast(function: Function) -> Function:
    """Decorates whatever computes with cached keys and values: the caller's ``torch.autocast`` does not reach inside.

    Operators say by themselves what they compute in which dtype. Where no autocast is on, nothing is entered (0.2 us).
    """

    @wraps(function)
    def call(*args, **named):
        if not any_autocast():
            return function(*args, **named)
        with ExitStack() as stack:
            for kind in _DEVICES:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **named)

    return call


def lowered(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``t`` in the dtype that ``torch.autocast`` gives attention's inputs, where it is on for their device.

    ``dtype``: in this one instead, there.
    """
    if not any_autocast() or t.dtype not in _LOWERED or not torch.is_autocast_enabled(t.device.type):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type) if dtype is None else dtype)


_LOWERED = torch.float32, torch.float16, torch.bfloat16


def as_called(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``function``, to be called inside :func:`no_autocast`, computes in the autocast that is on now."""
    kinds = [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)] if any_autocast() else ()
    if not kinds:
        return function
    dtypes = [torch.get_autocast_dtype(kind) for kind in kinds]

    def call() -> Tensor:
        with ExitStack() as stack:
            for kind, low in zip(kinds, dtypes):
                stack.enter_context(torch.autocast(kind, low))
            return function()

    return call


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy ``values`` (numbers, an array, a tensor) to a small tensor on a device, after all work launched there.

    The host does not wait, because the copy is from pinned memory that the host does not write again. A copy from
    pageable memory, as in ``torch.tensor(values, device=device)``, waits until the GPU has done all earlier work.
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
    """Let the current stream, perhaps a side stream, read ``made``, which was allocated on a step's own stream."""
    if made.is_cuda:  # otherwise its memory could be reused while it is read here
        made.record_stream(torch.cuda.current_stream(made.device))
    return made
