"""A copy of a cache in which full attention reads the text again, while sparse steps go on over the cache itself.

It shares the full blocks of the exact beginning, and has its own keys and values from there on.
"""

from __future__ import annotations

import copy

from ..kv.pool import room
from ..layers.cache_state import CacheState, FullLayer
from ..policies.base import Policy

_ROOM = 4096  # tokens that there is room for at once


def exact_copy(cache: CacheState, tokens: int = 0) -> CacheState:
    """A copy that attends to everything and holds the columns of ``cache`` that full attention has computed.

    ``tokens``: of each row, expected in both. There is room for them then: where blocks move, steps are captured again.
    """
    known = {id(layer.policy): _dense(layer) for layer in cache.sparse_layers}
    new = copy.deepcopy(cache, known)
    new.watched, new.going_on = False, False
    exactness = new.row_table.exactness
    exactness.begin(None)
    exactness.aside = True
    if exactness.inexact_from is not None:
        new.crop(exactness.inexact_from - new.get_seq_length())
    make_room(cache, 2 * tokens)
    return new


def make_room(cache: CacheState, tokens: int) -> None:
    """Have room for ``tokens`` more of each row, up to some thousands, if blocks are on the device."""
    blocks = cache.row_table.batch * -(-min(tokens, _ROOM) // cache.config.block_size)
    for pool in {id(layer.store.pool): layer.store.pool for layer in cache.sparse_layers}.values():
        wanted = pool.ids.used + blocks
        if pool.host is None and wanted > pool.capacity:
            pool.reserve(room(wanted, pool.device))


def _dense(layer: FullLayer) -> Policy:
    """A policy that keeps nothing and attends to everything, in the place of the layer's own."""
    own = layer.policy
    new = Policy(own.config, own.layer_idx, own.offloaded)
    new.params = own.params
    return new
