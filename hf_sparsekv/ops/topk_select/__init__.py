"""The k best blocks or tokens of each row as ascending ids."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import give, use_triton
from .reference import block_select as _block_reference
from .reference import token_select as _token_reference

__all__ = ["block_select", "token_select"]


def block_select(scores: Tensor, k: int, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """Blocks to keep; see ``reference.block_select``.

    ``out`` receives the result; ``scratch``, which long rows need, is int32 of ``triton.scratch_size(scores, k)``
    entries.
    """
    if use_triton(scores):
        from .triton import block_select as kernel

        return kernel(scores, k, out=out, scratch=scratch)
    return give(_block_reference(scores, k), out)


def token_select(
    scores: Tensor,
    block_ids: Tensor | None,
    k: int,
    block_size: int,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Tokens to attend to; see ``reference.token_select``; ``out`` and ``scratch`` as above."""
    if use_triton(scores):
        from .triton import token_select as kernel

        return kernel(scores, block_ids, k, block_size, out=out, scratch=scratch)
    return give(_token_reference(scores, block_ids, k, block_size), out)
