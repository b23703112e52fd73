"""Keep the latest queries of each row."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["push"]

push = operator(reference.push, on="ring")
