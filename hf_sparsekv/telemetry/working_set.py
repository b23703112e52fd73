"""The working set of a decoding batch: the blocks that must fit the device for decode steps to find them there.

Source: SparseServe, section on working-set-aware batching. The working set is the union of the blocks chosen in the
last 12 steps. A batch scheduler admits a request only if the working sets of all requests fit the device pool.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..kv.store import LayerStore

STEPS = 12  # SparseServe's window


def working_set_bytes(stores: Iterable[LayerStore], steps: int = STEPS) -> tuple[int, ...] | None:
    """Bytes of the blocks that each row has chosen in its last ``steps`` steps, all layers. Synchronises.

    Computed from the device pool, which stamps each page with the last step that chose it. Blocks that were evicted
    since, or never got a page, are missing. A pool smaller than the working set therefore underestimates it. A block
    that several rows share counts for each. Blocks fetched for a predicted query count as chosen.

    Returns:
        One number a row; None if no blocks are fetched to the device (no offload, no pool, no selection yet).
    """
    total = None
    for store in stores:
        if store.pages is None or store.pages.pool is None:
            continue
        state = store.pages.pool.state
        block_table = store.block_table[:, : store.full_blocks]
        table = store.pages.table
        known = (block_table >= 0) & (block_table < len(table))
        frame = table[torch.where(known, block_table, 0).long()]  # [batch, sealed, H]
        chosen = state.stamp[frame.clamp_min(0).long()] > state.now - steps
        chosen &= known[..., None] & (frame >= 0)
        mine = chosen.flatten(1).sum(1) * (store.block_size * store.token_bytes)
        total = mine.cpu() if total is None else total + mine.cpu()
    return None if total is None else tuple(total.tolist())
