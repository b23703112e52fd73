"""Copy listed blocks into device pages (SparseServe's FlashH2D), or all blocks of a block table into a buffer."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["block_copy", "gather_blocks"]

# The list decides: either side may be pinned host memory, which the kernel reads and writes in place.
block_copy = operator(reference.block_copy, on="copies", in_place=("kv", "pages"))
gather_blocks = operator(reference.gather_blocks, on="out", in_place=("kv",))
