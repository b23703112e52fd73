"""A prompt that several layers store at once, whose memory lies side by side (:mod:`.memory`).

A launch for all layers takes the host as long as one for a single layer. A layer's own store works without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..ops.storage.append import append
from ..ops.storage.seal import Index, seal_range
from ..tensors import no_inference_mode
from .memory import for_layers
from .sealing import Indexer, indexing, with_means
from .store import LayerStore


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Contiguous ``tensors`` of one shape as one, ``[len(tensors) * shape[0], ...]``, if they follow each other."""
    first = tensors[0]
    place, size, storage = first.data_ptr(), first.nbytes, first.untyped_storage().data_ptr()
    for i, one in enumerate(tensors):
        if one.data_ptr() != place + i * size or one.shape != first.shape or not one.is_contiguous():
            return None
        if one.untyped_storage().data_ptr() != storage:  # neighbours by chance
            return None
    return first.as_strided((len(tensors) * first.shape[0], *first.shape[1:]), first.stride())


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """:func:`side_by_side`, or a copy: of what is only read."""
    held = [one for one in tensors if one is not None]
    if len(held) < len(tensors):
        return None
    found = side_by_side(held)
    return torch.cat(held) if found is None else found


@no_inference_mode
def extend_together(stores: Sequence[LayerStore], indexers: Sequence[Indexer], k: Tensor, v: Tensor) -> bool:
    """Cache ``k, v [layers, batch, H, n, D]`` in some layers by one launch of each kind, as each would by ``extend()``.

    Returns:
        Whether it was done: all are on one device, side by side, hold as much as each other, and index alike.
    """
    store, before, n = stores[0], stores[0].held, k.shape[3]
    pools = [one.pool for one in stores]
    if pools[0].host is not None or not before.uniform or any(one.held is not before for one in stores):
        return False
    after = store.table_of_rows.follow(before, n, None)
    if store.pool.ids.used > store.pool.capacity:
        with for_layers(len(stores)):  # they grow alike
            for one in stores:
                one.fit(before)
    recent, kv = side_by_side([one.recent_kv for one in stores]), side_by_side([pool.kv for pool in pools])
    if recent is None or kv is None:
        return False
    found = [indexing(indexer, one) for indexer, one in zip(indexers, stores)]
    if any(by_host is not None for _, by_host in found):
        return False
    all_of_them = [with_means(index, one.pool, one.mean_tokens) for (index, _), one in zip(found, stores)]
    index = _together(all_of_them)
    if index is None:
        return False
    length, start, end, batch = before.lengths[0], before.sealed[0], after.sealed[0], store.batch
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    if start < end:
        offsets = torch.arange(0, len(kv), pools[0].capacity, dtype=torch.int32, device=k.device)
        table = (store.block_table[None, :, :end] + offsets[:, None, None]).flatten(0, 1)
        seal_range(recent, k, v, length, start, end, store.sinks, table, kv, index)
    skip = max(end * store.block_size - length, 0)
    if skip < n:
        past = after.past(len(recent), length + skip, store.device)
        append(k[:, :, skip:], v[:, :, skip:], None, recent, past, store.sinks)
    for one in stores:
        one.took(after)
        one.counters.count_to_host((end - start) * batch)
    return True


def _together(indexes: Sequence[Index]) -> Index | None:
    """One index for the blocks of all layers, by their ids in one pool; None if that cannot be."""
    first = indexes[0]
    fields: dict[str, Tensor | None] = {}
    for name in ("bounds", "codes", "qparams", "means"):
        held = [getattr(index, name) for index in indexes]
        if held[0] is None:
            if any(one is not None for one in held):
                return None
            continue
        if any(one is None for one in held) or (found := side_by_side(held)) is None:
            return None
        fields[name] = found
    for name in ("channels", "norms"):
        fields[name] = _joined([getattr(index, name) for index in indexes])
        if (fields[name] is None) != (getattr(first, name) is None):
            return None
    alike = ("key_dim", "span")
    if any(getattr(index, name) != getattr(first, name) for index in indexes for name in alike):
        return None
    return replace(first, **fields)  # type: ignore[arg-type]
