"""Find the device pages of chosen blocks, and assign pages to those without one: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import give
from .state import FREE, PageState

WINDOW = 4096  # pages among which the oldest are evicted
OLDEST = 254  # ages from here on count as equal
SLACK = 4  # pages to examine for each one that is needed
EXTRA = 3  # further windows to examine, if those hold too few evictable pages


def windows(missing: int, pages: int, window: int) -> tuple[int, int]:
    """Number of windows that share the evictions evenly, and the most windows to examine."""
    there = -(-pages // window)
    planned = min(there, -(-SLACK * missing // window))
    return planned, min(there, planned + EXTRA)


def residency(
    block_ids: Tensor,
    block_table: Tensor,
    state: PageState,
    layer: int,
    keep: int,
    window: int = WINDOW,
    *,
    page_ids: Tensor | None = None,
    copies: Tensor | None = None,
    n_copies: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the pages of one layer's chosen blocks, and assign pages to those that have none.

    1. A page that holds a chosen block is stamped with this step.
    2. The other blocks get pages, once each, in the order of ``block_ids`` (batch, head, position). A page is evictable
       if it is empty, or if it was last chosen before step ``now - keep``. Starting at ``hand``, each window of
       ``window`` pages contributes its share: its oldest pages, the first among equals. This approximates LRU, and is
       exact if all pages fit one window. Pages are assigned in order of their distance from ``hand``, which then moves
       past the examined windows.
    3. An evicted block loses its entry in its layer's page table. Owner, stamp and entry are set immediately: the
       caller must copy the listed blocks before anything reads them.
    4. If too few pages are evictable, the last blocks get none and are read from host memory.

    Args:
        block_ids: ``[batch, H, K]`` int32, all different, padded with -1. Earlier blocks get pages first. The blocks of
            a row have different physical blocks; rows may share physical blocks.
        block_table: ``[batch, cap]`` int32, physical id of each block of each row, -1 where there is none.
        state: the pages; changed in place, unless ``enabled`` is 0.
        layer: index of the layer's page table.
        keep: preceding steps whose pages may still be in use: 0 or 1.
        window: pages that are compared with each other.
        page_ids, copies, n_copies: receive the results.

    Returns:
        page ids int32 ``[batch, H, K]``: page ``f``, ``-(physical_id + 2)`` for a block in host memory, -1 for no
        block. Copies int32 ``[batch * H * K, 2]``: ``physical_id * H + head`` and page of each block to copy. And the
        number of copies, int32 ``[1]``; later entries are undefined.
    """
    batch, heads, k = block_ids.shape
    table, device = state.page_tables[layer].view(-1), block_ids.device
    listed = torch.zeros(batch * heads * k, 2, dtype=torch.int32, device=device)
    there = block_ids >= 0
    if block_table.shape[1]:
        physical_id = (
            block_table[:, None].expand(-1, heads, -1).gather(-1, block_ids.clamp_min(0).long()).masked_fill(~there, -1)
        )
    else:
        physical_id = torch.full_like(block_ids, -1)
    there = physical_id >= 0
    index = physical_id * heads + torch.arange(heads, dtype=torch.int32, device=device)[:, None]  # into the page table
    index = index[there].long()
    page = table[index]
    host = -(physical_id[there] + 2)

    taken = 0
    if bool(state.enabled):
        state.stamp[page[page >= 0].long()] = state.now
        found = int((page >= 0).sum())
        missing = first_of_each(index[page < 0])
        taken = _take(missing, state, layer, keep, window, listed)
        page = table[index]
        unserved = int((page < 0).sum())
        state.counters += torch.tensor([len(index), found, taken, unserved], device=device)
    found = torch.full_like(block_ids, -1)
    found[there] = torch.where(page >= 0, page, host)
    number = torch.tensor([taken], dtype=torch.int32, device=device)
    return give(found, page_ids), give(listed, copies), give(number, n_copies)


def first_of_each(values: Tensor) -> Tensor:
    """The distinct values, in the order of their first occurrence."""
    distinct, inverse = values.unique(return_inverse=True)
    at = torch.arange(len(values), device=values.device)
    first = torch.full_like(distinct, len(values)).scatter_reduce_(0, inverse, at, "amin")
    return values[first.sort().values]


def _take(missing: Tensor, state: PageState, layer: int, keep: int, window: int, copies: Tensor) -> int:
    """Assign pages to the ``missing`` entries of the page table; returns how many got one."""
    pages, now, hand = len(state.stamp), int(state.now), int(state.hand)
    planned, most = windows(len(missing), pages, window)
    taken = 0
    for i in range(most):
        left = len(missing) - taken
        if not left:
            break
        at = torch.arange(i * window, min((i + 1) * window, pages), device=missing.device)
        at = (hand + at) % pages
        stamp = state.stamp[at]
        age = torch.where(stamp == FREE, OLDEST + 1, (now - stamp).clamp(0, OLDEST))
        age = age.masked_fill((stamp != FREE) & (stamp >= now - keep), 0)
        share = -(-left // (planned - i)) if i < planned else left
        oldest = age.argsort(descending=True, stable=True)[:share].sort().values
        victims = at[oldest[age[oldest] > 0]]
        old = state.owner[victims].long()
        for old_layer in set(old[:, 0].tolist()) - {-1}:
            state.page_tables[old_layer].view(-1)[old[old[:, 0] == old_layer, 1]] = -1
        n = len(victims)
        got = missing[taken : taken + n]
        state.page_tables[layer].view(-1)[got] = victims.int()
        state.owner[victims, 0] = layer
        state.owner[victims, 1] = got.int()
        state.stamp[victims] = now
        copies[taken : taken + n, 0], copies[taken : taken + n, 1] = got.int(), victims.int()
        taken += n
        state.hand.fill_((hand + min((i + 1) * window, pages)) % pages)
    return taken
