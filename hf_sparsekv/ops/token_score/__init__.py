"""Approximate score of tokens from the label cache."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import give, use_triton
from .reference import token_score as _reference

__all__ = ["token_score"]


def token_score(
    q: Tensor,
    codes: Tensor,
    qparams: Tensor | None,
    channels: Tensor,
    flags: Tensor,
    slots: Tensor,
    block_ids: Tensor | None,
    reduce: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Score of each token of the given blocks; see ``reference.token_score``. ``out`` receives the result."""
    if use_triton(q):
        from .triton import token_score as kernel

        return kernel(q, codes, qparams, channels, flags, slots, block_ids, reduce, out=out)
    return give(_reference(q, codes, qparams, channels, flags, slots, block_ids, reduce), out)
