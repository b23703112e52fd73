"""Whether all layers of a cache hold the same tokens.

No layer knows the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers.cache_utils import CacheLayerMixin

from .sparse_layer import SparseLayer


def check_complete(layers: Sequence[CacheLayerMixin]) -> None:
    """When a forward pass begins, all layers hold the same tokens.

    Raises:
        RuntimeError: an earlier one stopped half-way.
    """
    lengths = set()
    for layer in layers:
        if isinstance(layer, SparseLayer):
            lengths.add(layer.get_seq_length())
        elif isinstance(layer, CacheLayerMixin):
            length = int(layer.get_seq_length())
            if length or getattr(layer, "is_sliding", False):  # layers of other kinds may never cache anything
                lengths.add(length)
    if len(lengths) > 1:
        raise RuntimeError(
            f"this cache is incomplete: its layers hold {sorted(lengths)} tokens, because an earlier forward pass "
            "stopped half-way. Call reset() and prefill again"
        )
