"""Columns of chosen tokens, and their addresses in device pages."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["place_tokens"]

place_tokens = operator(reference.place_tokens, on="at")
