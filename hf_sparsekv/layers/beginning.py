"""A forward pass begins, in the first layer that attends: what it is for all of them.

It asks the cache: its mask, its rows, and whether drafts are verified.
"""

from __future__ import annotations

from torch import Tensor

from ..attention.drafts import are_drafts
from ..attention.handle import Step
from ..attention.masks import new_tokens
from ..kv.forward_pass import Pass
from ..kv.store import LayerStore
from .cache_state import CacheState, is_first
from .changes import drop_tokens
from .checks import check_mask


def begin_pass(owner: CacheState, store: LayerStore | None, step: Step, mask: Tensor | None) -> Pass:
    """The forward pass that brings a layer the tokens of ``step``: ``owner.under_way`` from here on."""
    if step.past and mask is not None and is_first(owner, step.layer):
        assert store is not None
        check_mask(store, mask, step.past, lambda valid: drop_tokens(owner, valid))
    before, new, known = store.held if store is not None and step.past else None, step.k.shape[2], owner.under_way
    if known is not None and not known.begins_with(before, new):
        known = None
    if known is not None and known.mask is mask and known.device in (None, step.k.device):
        return known
    if owner.row_table.exactness.counts is not None:
        valid = None  # rows get some of the tokens: see :func:`..kv.forward_pass.drafts_of`
    elif owner.row_batch is not None:
        valid = owner.row_batch.valid(step.k.device)
    else:
        valid = new_tokens(mask, step.past, step.length, len(step.k))
    few = valid is None and step.past and 1 < new <= owner.config.max_draft + 1 and (mask is None or mask.ndim == 2)
    drafts = bool(few) and are_drafts(owner, new)
    if known is not None and valid is None and known.valid is None and drafts == known.drafts:
        known.mask = mask  # the same, on another device
    else:
        known = owner.under_way = Pass(owner.row_table, before, new, mask, valid, drafts)
    return known
