"""RMS norm and rotary embedding of queries and keys."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["qk_rope"]

qk_rope = operator(reference.qk_rope, on="q")
