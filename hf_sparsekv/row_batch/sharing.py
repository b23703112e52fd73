"""Full blocks that rows share, and the label channels that they are indexed by.

The tokens that determined the channels decide which blocks may be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..kv.read_back import reindex
from ..layers.cache_state import CacheState
from ..layers.joining import open_rows, read_sinks
from ..policies.base import Policy
from ..policies.indexed import IndexedPolicy
from ..policies.label_index import LabelIndex, RowChannels

Channels = Sequence[RowChannels | None]  # label channels of a row in each layer; None: no labels


class Calibration(NamedTuple):
    """Which tokens the label channels of rows are of: see the attributes of :class:`.RowBatch`."""

    calibration_tokens: int
    alike_tokens: int | None
    whole_tokens: int


def calibration_of(cache: CacheState, labels: LabelIndex | None, max_length: int) -> Calibration:
    """The calibration of rows of up to ``max_length`` tokens, whose layers have such labels."""
    offload, least = cache.offload_config, cache.shared.whole_tokens
    online = labels is not None and labels.fixed is None
    wanted = cache.config.calibration_tokens if online else 0
    tokens = wanted if wanted <= max_length else 0
    alike = (tokens or None) if online and max_length > least else 0
    whole = 0 if offload is not None and offload.kv_dtype == "int8" else least
    return Calibration(tokens, alike, whole)


def check_sharing(policy: Policy, lacks_states: bool) -> None:
    """Raise ValueError for rows that cannot begin with blocks of others.

    ``lacks_states``: layers keep a window or a state, and none were given.
    """
    if lacks_states:
        raise ValueError(
            "some layers of this model keep a window or a state, which are in no block: give what snapshot() made "
            "after these blocks, or read the whole prompt by prefill()"
        )
    if isinstance(policy, IndexedPolicy):
        raise ValueError(
            "rows of this model cannot share blocks: its trained indexer keeps keys of its own, which are in no block. "
            "Read the whole prompt by prefill()"
        )


def begin_with(
    batch: CacheState, ids: np.ndarray, channels: Channels, drop: Callable[[CacheState], None]
) -> CacheState:
    """A cache of one row beside a batch that begins with these blocks: see :meth:`.RowBatch.begin`.

    If it cannot be filled, ``drop`` ends it.
    """
    cache = batch.beside()
    cache.bind(batch.model_config)
    for layer, mine, one in zip(cache.sparse_layers, batch.sparse_layers, channels):
        open_rows(layer, 1, mine)
        if one is not None:
            layer.policy.labels.give(0, one)
    cache.row_table.begin(ids, exact=batch.row_table.exactness.inexact_from is None)
    try:
        for layer in cache.sparse_layers:
            read_sinks(layer.store)
    except BaseException:
        drop(cache)
        raise
    return cache


def reindex_blocks(batch: CacheState, ids: np.ndarray, channels: Channels, drop: Callable[[CacheState], None]) -> None:
    """Recompute the labels of a row's full blocks, which no other row shares, by these channels."""
    if len(ids):
        same = begin_with(batch, ids, channels, drop)
        try:
            for layer in same.sparse_layers:
                reindex(layer.store, layer.policy, own=False)
        finally:
            drop(same)


def channels_of(cache: CacheState, row: int) -> Channels:
    """Label channels of a row in each layer."""
    labels = [layer.policy.labels for layer in cache.sparse_layers]
    return tuple(None if one is None else one.of_row(row) for one in labels)


def give_channels(batch: CacheState, row: int, channels: Channels) -> None:
    """Set a row's label channels. The labels of its full blocks still belong to the old channels."""
    for layer, one in zip(batch.sparse_layers, channels):
        if one is not None:
            layer.policy.labels.give(row, one)
