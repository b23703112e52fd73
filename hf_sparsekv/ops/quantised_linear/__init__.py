"""A linear layer of a few rows whose weights are kept in 4 or 8 bits."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import operator
from . import reference
from .reference import MAX_ROWS, QuantisedWeight, dequantise

__all__ = ["MAX_ROWS", "QuantisedWeight", "dequantise", "quantised_linear"]
