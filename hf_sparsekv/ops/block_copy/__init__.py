"""Copy listed blocks into device pages (SparseServe's FlashH2D)."""

from __future__ import annotations

from .._dispatch import operator
from . import reference

__all__ = ["block_copy"]

block_copy = operator(reference.block_copy, on="pages", in_place=("kv",))
