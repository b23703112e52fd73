"""Expected times of drafts and verifications before any was tried, by ``calibrate-device`` or a guess.

The pace soon replaces these by its own measurements. It knows neither caches nor GPUs.
"""

from __future__ import annotations

from ..layers.cache_state import CacheState
from ..policies import crossover
from .pace import Expected


def expected(cache: CacheState) -> Expected | None:
    """The expectation for a filled cache, for captured passes; None: nothing is known."""
    layers = [layer for layer in cache.sparse_layers if layer.index >= cache.config.dense_layers]
    rule = getattr(layers[-1].policy, "crossover", None) if layers else None
    if rule is None or rule.name is None or layers[-1].store.device.type != "cuda":
        return None
    store = layers[-1].store
    width, held = store.heads * store.token_bytes, store.held
    rows = max(1, sum(n > 0 for n in held.lengths))
    tokens = sum(held.sealed) * store.block_size // rows
    name = f"{rule.name}:mla" if store.latent else rule.name
    less = crossover.faster(store.device, name, rows, tokens, width, rule.q_heads // store.heads)
    if less is None:
        return None
    more = crossover.slower(store.device, rows * tokens * width)
    return Expected(len(layers) * less, {n: len(cache.sparse_layers) * seconds for n, seconds in more.items()})
