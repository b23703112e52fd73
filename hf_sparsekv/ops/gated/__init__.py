"""The product of a gated MLP."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import ACTIVATIONS
from .reference import gated as _reference

__all__ = ["ACTIVATIONS", "gated"]


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``; see ``reference.gated``."""
    if use_triton(gate):
        from .triton import gated as kernel

        return kernel(gate, up, activation)
    return _reference(gate, up, activation)
