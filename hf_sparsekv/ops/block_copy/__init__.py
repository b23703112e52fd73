"""Copy listed blocks into device pages (SparseServe's FlashH2D), or all blocks of a table."""

from __future__ import annotations

from .._dispatch import operator
from . import reference

__all__ = ["block_copy", "gather_blocks"]

block_copy = operator(reference.block_copy, on="pages", in_place=("kv",))
gather_blocks = operator(reference.gather_blocks, on="out", in_place=("kv",))
