"""Route tokens to experts: the experts of each token, and their weights."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .reference import MAX_TOKENS

__all__ = ["MAX_TOKENS", "route"]

route = operator(reference.route, on="x", when=lambda x, *_, **__: x.shape[0] <= MAX_TOKENS)
