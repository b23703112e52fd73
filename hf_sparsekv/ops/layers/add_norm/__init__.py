"""Add the residual stream and normalise the sum."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .reference import MAX_WIDTH

__all__ = ["MAX_WIDTH", "add_norm"]

add_norm = operator(reference.add_norm, on="x")
