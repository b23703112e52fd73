"""Move the oldest full block of the ring into the block pool, and index it for selection."""

from __future__ import annotations

from .._dispatch import operator
from . import reference
from .reference import Index, key_bounds, key_metadata, quantise_labels, running_means

__all__ = ["Index", "key_bounds", "key_metadata", "quantise_labels", "running_means", "seal"]

seal = operator(reference.seal, on="recent_kv", in_place=("kv",))
