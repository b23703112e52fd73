"""Copy listed blocks into frames: with the copy engine, driven by the host."""

from __future__ import annotations

import torch
from torch import Tensor


def runs(listed: Tensor, heads: int) -> list[tuple[int, int, int]]:
    """Source, frame and length of what lies together on both sides, within a slot.

    No further, because pinned memory may consist of several registrations, which meet between slots, and a copy must
    not cross their borders (see ``offload.host_pool``).

    Args:
        listed: int ``[n, 2]``, source and frame.
        heads: sources of a slot.
    """
    if not len(listed):
        return []
    listed = listed.long()[listed[:, 0].long().argsort()]
    begins = torch.ones(len(listed), dtype=torch.bool, device=listed.device)
    begins[1:] = (listed.diff(dim=0) != 1).any(1) | (listed[1:, 0] % heads == 0)
    at = begins.nonzero().flatten()
    length = torch.cat((at, at.new_tensor([len(listed)]))).diff()
    return [(*pair, n) for pair, n in zip(listed[at].tolist(), length.tolist())]


def block_copy(kv: Tensor, frames: Tensor, copies: Tensor, n_copies: Tensor) -> None:
    """As ``reference.block_copy``. Waits for the list; the copies themselves run behind on the current stream."""
    source = kv.flatten(0, 1)
    for first, frame, n in runs(copies[: int(n_copies)].cpu(), kv.shape[1]):
        frames[frame : frame + n].copy_(source[first : first + n], non_blocking=True)
