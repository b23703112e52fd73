"""The chosen experts of a mixture, for the few tokens of a decode step."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import MAX_TOKENS
from .reference import experts as _reference

__all__ = ["MAX_TOKENS", "experts"]


def experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Weighted sum of gated MLPs; see ``reference.experts``. The kernels read the weights where they are."""
    if use_triton(x) and x.shape[0] <= MAX_TOKENS:
        from .triton import experts as kernel

        return kernel(x, index, weights, gate_up, down, activation)
    return _reference(x, index, weights, gate_up, down, activation)
