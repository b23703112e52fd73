"""Attention of a prompt's queries to chosen blocks of keys."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["block_attention"]

block_attention = operator(reference.block_attention, on="query")
