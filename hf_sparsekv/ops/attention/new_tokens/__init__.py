"""Attention of some new tokens to each other, beside attention to what was there before them."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["new_tokens"]

new_tokens = operator(reference.new_tokens, on="query")
