"""Changes of all layers of a cache, which stop half-way or are done in each of them.

A change that only some layers have made leaves the cache incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .cache_state import CacheState, FullLayer
from .kinds import LayerKind


@contextmanager
def in_all(cache: CacheState, what: str, others: Callable[[Any], object] | None = None) -> Iterator[None]:
    """The body changes all layers of ours, and may stop half-way: they count as incomplete until it is done.

    Args:
        others: changes a layer that is transformers' own, before the body. If it raises, nothing has changed.
    """
    if cache.row_batch is not None:
        raise ValueError(f"{what} is not for rows that come and go: join(), leave() and hold() change them")
    cache.changes += 1
    cache.under_way = None
    layers = cache.sparse_layers
    before = [layer.broken for layer in layers]
    for layer in layers:
        layer.broken = layer.broken or f"{what} stopped half-way"
    rest = [layer for layer in cache.layers if layer not in layers]
    try:
        if others is not None:
            _change_others(rest, others)
    except BaseException as error:
        # What raises by itself does so before anything is written. An interrupt may come between two layers whose
        # memory is written in place.
        if isinstance(error, Exception) or not any(isinstance(layer, LayerKind) for layer in rest):
            _set_broken(layers, before)
        raise
    yield
    _set_broken(layers, before)


def _set_broken(layers: Sequence[FullLayer], reasons: list[str | None]) -> None:
    for layer, reason in zip(layers, reasons):
        layer.broken = reason


def _change_others(layers: list[Any], change: Callable[[Any], object]) -> None:
    """Change all of these, or none. (Transformers' layers replace their tensors, and write into dictionaries.)"""
    before = [
        {name: held.copy() if isinstance(held, dict | list) else held for name, held in vars(layer).items()}
        for layer in layers
    ]
    try:
        for layer in layers:
            change(layer)
    except BaseException:
        for layer, held in zip(layers, before):
            vars(layer).update(held)
        raise


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
