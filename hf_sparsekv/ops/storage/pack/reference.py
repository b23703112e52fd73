"""Keep the chosen tokens of each KV head in one buffer: the definition (AsyncSpade section 4.1, Cache Rank)."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(
    ids: Tensor,
    kv: Tensor,
    block_table: Tensor,
    held: Tensor,
    order: Tensor,
    packed: Tensor,
    page_ids: Tensor,
    *,
    enabled: Tensor | None = None,
    counters: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Make ``packed`` hold the tokens ``ids``. Tokens that it already holds do not move.

    New tokens, in ascending order, take the positions that become free, in the order of the tokens that these held.

    Args:
        ids: ``[batch, H, C]`` int32 ``TokenIds``: columns, ascending, -1 at the end.
        kv: ``[num_blocks, H, block_size, Dk + Dv]`` stored blocks; may be pinned host memory.
        block_table: ``[batch, cap]`` int32, physical id of each block of each row.
        held: ``[batch, H, C]`` int32, written in place: the tokens in ``packed``, in the form of ``ids``.
        order: ``[batch, H, C]`` int32, written in place: the position of each entry of ``held``. Empty entries have the
            free positions, so each row is a permutation.
        packed: ``[batch, H, C, Dk + Dv]``, written in place. It and ``page_ids`` may be on another GPU.
        page_ids: ``[batch, H, C]`` int32, written: for entry ``i`` of ``held`` the position in ``packed``, counted over
            all rows and heads, ``(row * H + head) * C + order``; -1 for none. ``ops.attention.sparse_decode`` takes
            them as ids when ``packed`` is viewed as pages of ``block_size`` tokens.
        enabled: int32 ``[1]``; 0: nothing is changed.
        counters: int64 ``[2]``, increased by the tokens chosen and the tokens copied.
        scratch: int32, twice as many entries as ``ids``, for the kernels.
    """
    batch, heads, room = ids.shape
    size = kv.shape[2]
    if enabled is not None and not bool(enabled):
        return
    for row in range(batch):
        for head in range(heads):
            new, old, at = ids[row, head], held[row, head], order[row, head].clone()
            stays = torch.isin(old, new) & (old >= 0)
            known = torch.isin(new, old) & (new >= 0)
            position = torch.empty_like(at)
            position[known] = at[stays]  # both ascend
            position[~known] = at[~stays]
            missing = (~known & (new >= 0)).nonzero().flatten()
            column = new[missing].long()
            physical_id = block_table[row, column // size].to(kv.device).long()
            source = kv[physical_id, head, (column % size).to(kv.device)]
            packed[row, head, position[missing].long().to(packed.device)] = source.to(packed.device)
            held[row, head], order[row, head] = new, position
            start = (row * heads + head) * room
            page_ids[row, head] = torch.where(new >= 0, position + start, -1).to(page_ids.device)
            if counters is not None:
                counters += torch.tensor([int((new >= 0).sum()), len(missing)], device=counters.device)
