"""8-bit codes of keys and values."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .reference import dequantise, entries

__all__ = ["dequantise", "entries", "quantise"]

quantise = operator(reference.quantise, on="kv")
