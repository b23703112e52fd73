"""An error for attempts to differentiate sparse attention."""

from __future__ import annotations

import torch
from torch import Tensor


class NoGradient(torch.autograd.Function):
    """Identity that refuses to be differentiated: selection has no gradient, and cached keys carry none."""

    @staticmethod
    def forward(ctx, out: Tensor, query: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("attention over a sparse cache has no gradient: train without past_key_values")
