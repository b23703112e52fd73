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


class SeqLenTensor:
    """An int32 tensor per device that kernels read a length from; written only when the length has changed.

    The layers of a cache share one, so that a step writes it once and not once a layer.
    """

    def __init__(self) -> None:
        self._held: dict[torch.device, list] = {}

    def __deepcopy__(self, memo: dict) -> SeqLenTensor:
        return SeqLenTensor()

    @no_inference_mode
    def at(self, device: torch.device, value: int) -> Tensor:
        """int32 ``[1]`` on ``device`` that holds ``value``; filled anew only if it changes."""
        held = self._held.get(device)
        if held is None:
            held = self._held[device] = [torch.empty(1, dtype=torch.int32, device=device), -1]
        if held[1] != value:
            held[1] = -1  # unknown if an interrupt stops the fill
            held[0].fill_(value)
            held[1] = value
        return held[0]

    def forget(self) -> None:
        """Forget the written values: something else has written the tensors."""
        for held in self._held.values():
            held[1] = -1

    def held(self, device: torch.device) -> Tensor:
        """The tensor as it is: what a captured step reads is set before each replay."""
        return self._held[device][0]


def reads_here(made: Tensor) -> Tensor:
    """``made`` on a step's own stream, for work on the current one, which may be a side stream and come later."""
    if made.is_cuda:  # or its memory would be reused while it is read here
        made.record_stream(torch.cuda.current_stream(made.device))
    return made
