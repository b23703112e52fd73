"""State of the pages of a device pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

FREE = -(1 << 30)  # stamp of a page that holds nothing: older than all others
COUNTERS = ("needed", "found", "fetched", "unserved")


@dataclass
class PageState:
    """Owner of each page and the step that chose it last. All tensors keep their addresses.

    A page holds one block of one KV head of one layer; the layers share the pages.

    Attributes:
        owner: int32 ``[F, 2]``: layer and ``block * H + head`` of the block in a page; (-1, -1) if it is empty.
        stamp: int32 ``[F]``: number of the last step that chose the page; ``FREE`` if it is empty.
        hand: int32 ``[1]``: the page at which the next search begins.
        now: int32 ``[1]``: number of the current step, at least 1.
        enabled: int32 ``[1]``: with 0, :func:`residency` only looks pages up: nothing is fetched, stamped or counted.
        counters: int64 ``[4]``, see ``COUNTERS``: blocks needed, found in a page, fetched, and left in host memory.
            The rest is fetched for another row of the same call.
        page_tables: the page tables of the layers, int32 ``[capacity, H]``, contiguous: the page of each physical block
            and KV head, -1 if it has none.
        addresses: int64 ``[layers]``: addresses of the page tables, for the kernel.
    """

    owner: Tensor
    stamp: Tensor
    hand: Tensor
    now: Tensor
    enabled: Tensor
    counters: Tensor
    addresses: Tensor
    page_tables: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, pages: int, device: torch.device | str, most_layers: int = 1024) -> PageState:
        """State of ``pages`` free pages."""

        def full(shape: tuple[int, ...], value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            owner=full((pages, 2), -1),
            stamp=full((pages,), FREE),
            hand=full((1,), 0),
            now=full((1,), 1),
            enabled=full((1,), 1),
            counters=full((len(COUNTERS),), 0, torch.int64),
            addresses=full((most_layers,), 0, torch.int64),
        )

    def set_table(self, layer: int, table: Tensor) -> None:
        """Make ``table`` the page table of layer ``layer``, which may be the next new one."""
        if table.dtype != torch.int32 or table.dim() != 2 or not table.is_contiguous():
            raise ValueError(f"a page table is contiguous int32 [slots, H], got {table.dtype} {tuple(table.shape)}")
        if table.device != self.stamp.device:
            raise ValueError(f"the page table is on {table.device}, the frames are on {self.stamp.device}")
        if layer >= len(self.addresses):
            raise ValueError(f"a device pool serves at most {len(self.addresses)} layers")
        self.page_tables[layer : layer + 1] = [table]
        self.addresses[layer : layer + 1].fill_(table.data_ptr())  # indexed assignment would wait for the device
