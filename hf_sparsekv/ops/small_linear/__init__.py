"""A linear layer of a few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch import operator
from . import reference
from .reference import MAX_ROWS

__all__ = ["MAX_ROWS", "small_linear"]


def _serves(x: Tensor, *_, **__) -> bool:
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    return 0 < rows <= MAX_ROWS and (rows == 1 or x.dtype != torch.float32)


small_linear = operator(reference.small_linear, on="x", when=_serves)
