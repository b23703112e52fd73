"""Queries, latents and rotary parts of MLA, ready for the cache."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import latent_rope as _reference

__all__ = ["latent_rope"]


def latent_rope(
    q: Tensor, compressed: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise latents and turn rotary parts to their positions; see ``reference.latent_rope``."""
    if use_triton(q):
        from .triton import latent_rope as kernel

        return kernel(q, compressed, cos, sin, weight, eps, interleaved)
    return _reference(q, compressed, cos, sin, weight, eps, interleaved)
