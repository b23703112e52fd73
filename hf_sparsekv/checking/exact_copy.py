"""A copy of a cache in which full attention reads the text again, while sparse steps go on over the cache itself.

It shares the full blocks of the exact beginning, and has its own keys and values from there on.
"""

from __future__ import annotations

import copy

from ..layers.cache_state import CacheState, FullLayer
from ..policies.base import Policy


def exact_copy(cache: CacheState) -> CacheState:
    """A copy that attends to everything and holds the columns of ``cache`` that full attention has computed."""
    known = {id(layer.policy): _dense(layer) for layer in cache.sparse_layers}
    new = copy.deepcopy(cache, known)
    new.watched, new.going_on = False, False
    exactness = new.row_table.exactness
    exactness.begin(None)
    exactness.aside = True
    if exactness.inexact_from is not None:
        new.crop(exactness.inexact_from - new.get_seq_length())
    return new


def _dense(layer: FullLayer) -> Policy:
    """A policy that keeps nothing and attends to everything, in the place of the layer's own."""
    own = layer.policy
    new = Policy(own.config, own.layer_idx, own.offloaded)
    new.params = own.params
    return new
