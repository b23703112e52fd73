"""All blocks of each row in order of their scores."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import block_rank as _reference

__all__ = ["block_rank"]


def block_rank(scores: Tensor, fill: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Ids by falling score, and the selectable tokens of each; see ``reference.block_rank``."""
    if use_triton(scores):
        from .triton import block_rank as kernel

        return kernel(scores, fill, slots)
    return _reference(scores, fill, slots)
