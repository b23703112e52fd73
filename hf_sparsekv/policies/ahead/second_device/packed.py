"""Copies of chosen tokens on the device that attends to them; their blocks are in host memory or on another GPU."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ....kv.state import Held, State
from ....ops.storage.pack import pack
from ....tensors import no_inference_mode


class Packed(State):
    """One layer's chosen tokens, ``room`` of each row and KV head at most. Only what is newly chosen is copied.

    Args:
        device: where is decided what to copy.
        enabled: int32 ``[1]`` there; 0: nothing is copied.
        home: where the copies are; default: there as well.

    Attributes:
        kv: ``[batch, H, room, Dk + Dv]``.
        page_ids: int32 ``[batch, H, room]``, positions of the chosen tokens in it, see ``ops.storage.pack``.
        counters: int64 ``[2]``: tokens chosen, and of these copied.
    """

    TENSORS: ClassVar = {
        "kv": Held(counted=True),
        "held": Held(counted=True),
        "order": Held(counted=True),
        "page_ids": Held(rows=None, counted=True),  # follow from `held` and `order`
        "enabled": Held(rows=None, shared=True),
        "counters": Held(rows=None, captured=False, counted=True),
    }

    @no_inference_mode
    def __init__(
        self,
        batch: int,
        heads: int,
        room: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        enabled: Tensor,
        home: torch.device | None = None,
    ) -> None:
        home = device if home is None else home
        self.enabled = enabled
        self.kv = torch.empty(batch, heads, room, width, dtype=dtype, device=home)
        self.held = torch.full((batch, heads, room), -1, dtype=torch.int32, device=device)
        self.order = torch.arange(room, dtype=torch.int32, device=device).expand(batch, heads, -1).contiguous()
        self.page_ids = torch.full_like(self.held, -1, device=home)
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)

    def pages(self, block_size: int) -> Tensor:
        """The copies as ``ops.attention.sparse_decode`` takes them: ``[F, block_size, Dk + Dv]``."""
        return self.kv.view(-1, block_size, self.kv.shape[-1])

    def update(self, ids: Tensor, kv: Tensor, block_table: Tensor, scratch: Tensor | None = None) -> None:
        """Bring ``ids`` together, see :func:`....ops.storage.pack.pack`."""
        pack(
            ids,
            kv,
            block_table,
            self.held,
            self.order,
            self.kv,
            self.page_ids,
            enabled=self.enabled,
            counters=self.counters,
            scratch=scratch,
        )

    def forget(self) -> None:
        """Nothing is held."""
        self.held.fill_(-1)
        self.page_ids.fill_(-1)

    def reset(self) -> None:
        """Set the counters to 0. The next tokens clear the copies."""
        self.counters.zero_()

    @no_inference_mode
    def map_rows(self, index: Tensor) -> None:
        super().map_rows(index)
        batch, heads, room = self.held.shape
        start = torch.arange(batch * heads, dtype=torch.int32, device=self.held.device).view(batch, heads, 1) * room
        page_ids = torch.where(self.held >= 0, self.order + start, -1).to(self.page_ids.device)
        self.page_ids = self.page_ids.copy_(page_ids) if self.page_ids.shape == page_ids.shape else page_ids
