"""Move full blocks from the ring of recent tokens, or from a prompt, into the block pool; index them for selection."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .reference import Index, key_bounds, quantise_labels, standardised

__all__ = ["Index", "key_bounds", "quantise_labels", "seal", "seal_range", "standardised"]

seal = operator(reference.seal, on="recent_kv", in_place=("kv",))
seal_range = operator(reference.seal_range, on="recent_kv")
