"""Copy listed blocks into frames (SparseServe's FlashH2D)."""

from __future__ import annotations

from .._dispatch import operator
from . import reference

__all__ = ["block_copy"]

block_copy = operator(reference.block_copy, on="frames", in_place=("kv",))
