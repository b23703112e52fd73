"""Write new tokens into the ring of recent tokens."""

from __future__ import annotations

from ..._dispatch import operator
from . import cpu, reference

__all__ = ["append"]

append = operator(reference.append, on="recent_kv", on_cpu=cpu.append)
