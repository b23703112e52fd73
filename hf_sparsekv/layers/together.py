"""Changes of all rows at once, in the table and in every layer: rows that are mapped, and tokens that are removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from ..kv.row_table import RowTable
from ..kv.rows import Rows
from .cache_state import CacheState, FullLayer, resume
from .changes import in_all
from .kinds import made_layers

Layers = Sequence[CacheLayerMixin]


def check_complete(layers: Layers) -> None:
    """When a forward pass begins, all layers hold the same tokens.

    Raises:
        RuntimeError: an earlier one stopped half-way.
    """
    lengths = set()
    for layer in layers:
        if isinstance(layer, FullLayer):
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


def held_rows(layers: Layers) -> list[Rows]:
    """The rows held by each of our layers."""
    return [layer.store.held for layer in layers if isinstance(layer, FullLayer) and layer.store is not None]


def join_layers(table: RowTable, layers: Layers, own: Sequence[FullLayer]) -> None:
    """All layers of ours hold the same, and follow the table from here on.

    Raises:
        RuntimeError: they hold different things, after an error.
    """
    stores = [layer.store for layer in own if layer.store is not None]
    if table.join([store.held for store in stores]) is None:
        check_complete(layers)
        raise RuntimeError("this cache is incomplete: its layers hold different tokens. Call reset() and prefill again")
    for store in stores:
        store.join()


def forget(cache: CacheState) -> None:
    """No row of the cache holds anything. Its memory is kept."""
    cache.changes += 1
    cache.replays.pending, cache.row_batch = {}, None
    layers = cache.sparse_layers
    for layer in layers:
        layer.broken = "reset() stopped half-way"  # until all is done
    cache.under_way = None
    resume(cache)
    if cache.model_config is not None:
        # transformers 5.17 zeroes its own layers but keeps their length: take fresh ones.
        fresh = DynamicCache(config=cache.model_config).layers[: len(cache.layers)]
        cache.layers = made_layers(cache, cache.model_config.get_text_config(decoder=True), fresh)
    cache.row_table.clear()
    for layer in layers:
        layer.empty()
        layer.audit.clear()
    cache.copy_streams.release()
    if cache.device_pools is not None:
        cache.device_pools.reset()
    cache.linear_passes.clear()
    for layer in layers:
        layer.broken = None


def map_rows(
    table: RowTable,
    layers: Layers,
    select: Callable[[Tensor], Tensor],
) -> None:
    """Row ``i`` becomes what row ``index[i]`` was, in all layers of ours.

    ``select`` makes the index, int64 ``[rows]``, of the numbers of all rows. Without layers of ours none is made.
    """
    held = held_rows(layers)
    index = select(torch.arange(table.batch)) if held else torch.arange(0)
    order = index.tolist()
    mapped = {id(rows): rows.mapped(order) for rows in held}
    for layer in layers:
        if isinstance(layer, FullLayer) and layer.store is not None:
            layer.map_rows(index, mapped[id(layer.store.held)])
    if held:
        table.map_rows(order, max(mapped.values(), key=lambda rows: rows.columns))


def crop_other(tokens_to_remove: int, nothing: bool, layer: Any) -> None:
    """Crop a layer of transformers' own.

    ``nothing``: no token is removed. Then the crop drops states that no later pass needs, where any are kept.
    """
    if not nothing or getattr(layer, "record_past", True):
        layer.crop(tokens_to_remove)


def check_crop(layers: Layers, removed: int) -> None:
    """Raise ValueError if some layer cannot take ``removed`` tokens back: its recurrent state holds them all in one.

    (transformers' own ``crop()`` leaves such a state as it is, and steps go on from tokens that are gone.)
    """
    for index, layer in enumerate(layers if removed else ()):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            holds = *layer.is_conv_states_initialized.values(), *layer.is_recurrent_states_initialized.values()
            if any(holds) and not layer.is_croppable:
                raise ValueError(
                    f"layer {index} keeps a recurrent state, which cannot give back its last {removed} tokens: copy "
                    "the cache before them (copy.deepcopy(cache)), or call reset() and read the text that stays again"
                )


def keep_tokens(cache: CacheState, lengths: Sequence[int], valid: Tensor | None) -> None:
    """Each row keeps its first ``lengths`` tokens, and all rows end with the same column, after padding in front.

    The layers of the cache are all ours. ``valid``: which columns are tokens then, bool ``[batch, columns]``, or None.
    """
    before, table = cache.joined_rows(), cache.row_table
    cache.under_way = None
    after = before.aligned(lengths, table.config.window, valid)
    own = [layer for layer in cache.layers if isinstance(layer, FullLayer)]
    if after.sealed == before.sealed and not any(layer.policy.follows_crops for layer in own):
        table.rows = after
        return
    layers = cache.sparse_layers  # which account for the steps before this
    with in_all(cache, "taking back drafts"):
        for layer in layers:
            layer.shorten(after)
        table.trim([after])


def crop_recent(table: RowTable, layers: Layers, tokens_to_remove: int) -> bool:
    """A ``crop()`` that takes drafts back after captured steps: a change of the table, and no other.

    All layers follow the table. False, and nothing has changed, if layers have to be told.
    """
    if any(not isinstance(layer, FullLayer) or layer.broken or layer.policy.follows_crops for layer in layers):
        return False
    rows = table.rows
    keep = tokens_to_remove if tokens_to_remove > 0 else rows.columns + tokens_to_remove
    if not 0 < keep <= rows.columns:
        return False
    after = rows if keep == rows.columns else table.cropped(rows, keep)
    if after.sealed != rows.sealed:
        return False
    table.rows = after
    return True
