"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import MAX_TOKENS
from .reference import route as _reference

__all__ = ["MAX_TOKENS", "route"]


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and experts of each token; see ``reference.route``."""
    named = {"groups": groups, "top_groups": top_groups, "normalise": normalise, "scale": scale}
    if use_triton(x) and x.shape[0] <= MAX_TOKENS:
        from .triton import route as kernel

        return kernel(x, weight, bias, top_k, **named)
    return _reference(x, weight, bias, top_k, **named)
