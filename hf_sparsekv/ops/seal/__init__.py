"""Move full blocks into the block pool, and index them for selection: the oldest of the ring, or those of a prompt."""

from __future__ import annotations

from .._dispatch import operator
from . import reference
from .reference import Index, LayerBlocks, key_metadata, places_of, quantise_labels

__all__ = [
    "Index",
    "LayerBlocks",
    "key_metadata",
    "places_of",
    "quantise_labels",
    "seal",
    "seal_layers",
    "seal_range",
]

seal = operator(reference.seal, on="recent_kv", in_place=("kv",))
seal_range = operator(reference.seal_range, on="recent_kv")


def _reached(layers, rows, after, sinks, block_table, places) -> bool:
    """A kernel may write to all that these layers keep."""
    return places is not None and all(layer.kv.is_cuda or layer.kv.is_pinned() for layer in layers)


seal_layers = operator(reference.seal_layers, on="rows", when=_reached)
