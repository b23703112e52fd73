"""The product of a gated MLP."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "gated"]

gated = operator(reference.gated, on="gate")
