"""Score of every stored block for one query."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["block_score"]

block_score = operator(reference.block_score, on="q")
