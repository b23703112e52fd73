"""Score of every stored block for one query."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import give, use_triton
from .reference import block_score as _reference

__all__ = ["block_score"]


def block_score(
    q: Tensor,
    bounds: Tensor,
    fill: Tensor,
    slots: Tensor,
    reduce: str,
    metadata: str = "min_max",
    *,
    out: Tensor | None = None,
    each: Tensor | None = None,
) -> Tensor:
    """Estimate of ``q . k`` for each block; see ``reference.block_score``.

    ``out`` receives the result, and ``each`` (float32 ``[batch, Hq, n]``) what ``reduce="none"`` gives.
    """
    if use_triton(q):
        from .triton import block_score as kernel

        return kernel(q, bounds, fill, slots, reduce, metadata, out=out, each=each)
    if each is not None:
        each.copy_(_reference(q, bounds, fill, slots, "none", metadata))
    return give(_reference(q, bounds, fill, slots, reduce, metadata), out)
