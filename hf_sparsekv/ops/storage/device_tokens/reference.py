"""Copies of chosen tokens on the device: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import give
from ..quantise.reference import entries
from .state import TokenSlots

CLASSES = 8  # age classes: 1, 2 to 3, 4 to 7, ..., 128 and more selections
WINDOW = 2048  # slots that are compared with each other
SLACK = 4  # evictable slots to examine, on average, for each slot that is needed


def age_class(age: Tensor) -> Tensor:
    """0 for tokens chosen in this selection, otherwise the number of binary digits of the age, at most ``CLASSES``."""
    return sum((age >= 1 << i).int() for i in range(CLASSES))


def looked_at(missing: int, found: int, now: int, room: int, window: int) -> tuple[int, int]:
    """First and end of the slots that selection ``now`` searches for ``missing`` slots to evict.

    ``room - found`` slots are evictable. The range has enough windows to hold ``SLACK`` times the slots needed, on
    average. Selections rotate over the windows; a range of several windows never extends past the last one.
    """
    windows = max(1, -(-room // window))
    wanted = min(windows, -(-SLACK * missing * room // (window * max(1, room - found))))
    first = min(now % windows, windows - wanted)
    return first * window, min(room, (first + wanted) * window)


def bring_tokens(
    ids: Tensor,
    kv: Tensor,
    block_table: Tensor,
    held: TokenSlots,
    *,
    used: Tensor | None = None,
    enabled: Tensor | None = None,
    counters: Tensor | None = None,
    window: int = WINDOW,
    scales: Tensor | None = None,
    split: int = 0,
) -> None:
    """Record that tokens were chosen, and copy those that are not on the device yet.

    1. A slot that holds a chosen token is stamped with the number of this selection.
    2. The other tokens, in the order of ``ids``, get the slots chosen longest ago, empty ones first. Slots compare by
       :func:`age_class`, and the lower slot wins among equals (approximately LRU). They are assigned in ascending
       order. Slots chosen in this selection are not evicted; if no others are left, the last tokens get none. Only some
       windows of the slots are examined, in rotation (:func:`looked_at`).
    3. The tokens are copied there from their blocks.

    Each row and KV head has separate slots and counts its selections separately. Where no token is chosen (a row
    without a token in this step), ages do not advance.

    Several queries of the only row form one selection. A token that several queries chose counts once, at its first
    occurrence.

    Args:
        ids: int32 ``[batch, H, K]``, columns in full blocks, all different, in any order; -1 for none. Or those of
            several queries of the only row, ``[n, H, K]``, each ascending, with -1 at the end.
        kv: ``[num_blocks, H, block_size, Dk + Dv]`` stored blocks; may be pinned host memory.
        block_table: int32 ``[batch, cap]``, physical id of each block of each row.
        held: written in place.
        used: int32 ``[batch, H]`` (or ``[n, H]``), how many entries of ``ids`` are valid; later ones are not read.
            None: all.
        enabled: int32 ``[1]``; 0: nothing is changed.
        counters: int64 ``[2]``, increased by the tokens chosen and the tokens copied.
        window: slots that are compared with each other.
        scales: float16 ``[num_blocks, H, block_size, 2]``. With them ``kv`` holds int8 codes, which are dequantised
            (``ops.storage.quantise``).
        split: leading entries of a token that the first scale covers.

    Raises:
        ValueError: several queries for several rows.
    """
    batch, heads = held.now.shape
    require_one_row(len(ids), batch)
    size = kv.shape[2]
    if enabled is not None and not bool(enabled):
        return
    lanes = held.lanes.tolist()
    for row in range(batch):
        for head in range(heads):
            queries = [row] if len(ids) == batch else range(len(ids))
            counted = [ids.shape[2] if used is None else int(used[i, head]) for i in queries]
            listed = [one for i, n in zip(queries, counted) for one in ids[i, head, :n].tolist() if one >= 0]
            mine = torch.tensor(list(dict.fromkeys(listed)), dtype=torch.long, device=ids.device)
            if not len(mine):
                continue
            lane = slice(lanes[row][0], sum(lanes[row]))
            slots, columns, stamps = held.slots[row, head], held.columns[head, lane], held.stamps[head, lane]
            held.now[row, head] += 1
            at, now = slots[mine], held.now[row, head]
            stamps[at[at >= 0].long()] = now
            missing = mine[at < 0]
            first, end = looked_at(len(missing), len(mine) - len(missing), int(now), len(stamps), window)
            age = age_class(now - stamps)
            age[:first], age[end:] = 0, 0
            oldest = torch.argsort(age, descending=True, stable=True)[: min(len(missing), int((age > 0).sum()))]
            to, missing = oldest.sort().values, missing[: len(oldest)]
            gone = columns[to]
            slots[gone[gone >= 0].long()] = -1
            columns[to], stamps[to] = missing.int(), now
            slots[missing] = to.int()
            physical_id = block_table[row, missing // size].to(kv.device).long()
            at = physical_id, torch.full_like(physical_id, head), (missing % size).to(kv.device)
            source = entries(kv, scales, split, held.kv.dtype, *at)
            held.kv[head, lane.start + to] = source.to(held.kv.device)
            if counters is not None:
                counters += torch.tensor([len(mine), len(missing)], device=counters.device)


def require_one_row(queries: int, batch: int) -> None:
    """Raise ``ValueError`` for several queries for several rows."""
    if batch not in (1, queries):
        raise ValueError(f"ids of {queries} queries need the slots of one row or of as many, got {batch}")


def locate_tokens(
    ids: Tensor,
    slots: Tensor,
    lanes: Tensor,
    block_table: Tensor,
    total: int,
    block_size: int,
    *,
    used: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Addresses of tokens, as ids for ``ops.attention.sparse_decode`` where a layer's slots are its ``pages``.

    Args:
        ids: int32 ``[batch, H, K]``, columns in full blocks; -1 for none.
        slots, lanes, total: from :class:`TokenSlots`.
        block_table: int32 ``[batch, cap]``, physical id of each block of each row.
        block_size: tokens of a block and of a page. A power of two that divides ``total`` and the start of each lane.
        used: int32 ``[batch, H]``, how many entries of ``ids`` are valid. Results after them are undefined.

    Returns:
        int32 ``[batch, H, K]``: ``head * total + lanes[row, 0] + slot``, or ``-(physical_id + 2) * block_size +
        position in the block`` where a token has no slot; -1 for none.
    """
    _, heads, k = ids.shape
    if not slots.shape[-1]:
        return give(torch.full_like(ids, -1), out)
    if used is not None:
        ids = ids.masked_fill(torch.arange(k, device=ids.device) >= used[..., None], -1)
    column = ids.clamp_min(0).long()
    slot = slots.gather(-1, column)
    physical_id = block_table[:, None].expand(-1, heads, -1).gather(-1, column // block_size)
    first = torch.arange(heads, dtype=torch.int32, device=ids.device)[:, None] * total + lanes[:, :1, None]
    place = torch.where(slot >= 0, first + slot, -(physical_id + 2) * block_size + ids % block_size)
    return give(torch.where((ids < 0) | (physical_id < 0), -1, place).int(), out)


def young_tokens(stamps: Tensor, now: Tensor, lanes: Tensor, steps: int, *, out: Tensor | None = None) -> Tensor:
    """Tokens on the device that the last ``steps`` selections chose, counted per layer, row and KV head.

    Args:
        stamps: int32 ``[layers, H, total]``, contiguous: the stamps of all layers' :class:`TokenSlots`.
        now: int32 ``[layers, batch, H]``, contiguous.
        lanes: int32 ``[batch, 2]``, contiguous.
        steps: at least 1.

    Returns:
        int32 ``[layers, batch, H]``.
    """
    young = torch.zeros_like(now)
    for row, (first, room) in enumerate(lanes.tolist()):
        mine = stamps[:, :, first : first + room] > now[:, row, :, None] - steps
        young[:, row] = mine.sum(-1)
    return give(young, out)
