"""All blocks of each row in order of their scores."""

from __future__ import annotations

from .._dispatch import operator
from . import reference

__all__ = ["block_rank"]

block_rank = operator(reference.block_rank, on="scores")
