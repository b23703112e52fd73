"""A linear layer for a few rows; in a gated MLP with the product of its halves."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import operator
from . import reference
from .reference import MAX_ROWS

__all__ = ["MAX_ROWS", "serves", "small_linear"]


def serves(x: Tensor, *_, **__) -> bool:
    """Whether the kernels take ``x [..., in]``: 1 to ``MAX_ROWS`` rows, in float32 one."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    return 0 < rows <= MAX_ROWS and (rows == 1 or x.dtype != torch.float32)


small_linear = operator(reference.small_linear, on="x", when=serves)
