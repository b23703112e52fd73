"""Changes of all layers of a cache, which stop half-way or are done in each of them.

A change that only some layers have made leaves the cache incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .cache_state import CacheState


@contextmanager
def in_all(cache: CacheState, what: str) -> Iterator[None]:
    """The body changes all layers, and may stop half-way: they count as incomplete until it is done."""
    if cache.row_batch is not None:
        raise ValueError(f"{what} is not for rows that come and go: join(), leave() and hold() change them")
    cache.changes += 1
    cache.under_way = None
    layers = cache.sparse_layers
    before = [layer.broken for layer in layers]
    for layer in layers:
        layer.broken = layer.broken or f"{what} stopped half-way"
    yield
    for layer, broken in zip(layers, before):
        layer.broken = broken


def drop_tokens(cache: CacheState, valid: Tensor) -> bool:
    """A mask hides cached columns: they are padding from here on, and all layers drop their tokens.

    As in a batch of conversations, whose shorter answers were filled up with tokens that the next turn masks.

    Args:
        valid: bool ``[batch, columns]``, of all cached columns.

    Returns:
        False, and nothing has changed, unless it leaves each row its first tokens.
    """
    layers = [layer for layer in cache.sparse_layers if layer.store is not None]
    rows = cache.row_table.masked(layers[0].store.held, valid)
    if rows is None:
        return False
    with in_all(cache, "dropping masked tokens"):
        for layer in layers:
            layer.shorten(rows)
        cache.row_table.trim([rows])
    return True
