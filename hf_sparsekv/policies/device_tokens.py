"""One layer's copies of chosen tokens on the device; their blocks are in host memory."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kv.state import Held, State
from ..kv.store import LayerStore
from ..offload.lanes import even_lanes
from ..offload.page_table import TOKEN_SELECTIONS
from ..ops.storage.device_tokens import EMPTY, TokenSlots, bring_tokens, locate_tokens
from ..tensors import no_inference_mode, take_rows
from .measured import PackStats
from .memory import Memory, Request

SLOT_BYTES = 8  # of a slot beside its copy: column and stamp
COUNTER_BYTES = 16
# Tokens chosen within 12 steps, in units of one step's selection. Recorded real model: 3.2 with one token in 64 chosen,
# 2.7 with one in 16 (benchmarks/results/foreseen_queries.csv).
REUSED = 3.2


class DeviceTokens(State):
    """The tokens that latest selections have chosen, ``room`` of each row and KV head.

    Successive steps choose nearly the same tokens. The copies decide where tokens are read, never which tokens.

    Attributes:
        kv, columns, stamps, slots, now, lanes: see ``ops.storage.device_tokens.TokenSlots``.
        enabled: int32 ``[1]``; 0: nothing is copied.
        counters: int64 ``[2]``: tokens chosen, and of these copied.
        room: tokens of each row and KV head that there is room for; 0: rows come and go, and each has room of its own
            (:class:`.row_tokens.RowTokens`).
    """

    TENSORS: ClassVar = {
        "kv": Held(rows=None, counted=True),  # by rows, too: map_rows()
        "columns": Held(rows=None, counted=True),
        "stamps": Held(rows=None, counted=True),
        "slots": Held(counted=True),
        "now": Held(),
        "lanes": Held(rows=None),
        "enabled": Held(rows=None, shared=True),
        "counters": Held(rows=None, captured=False, counted=True),
    }

    @no_inference_mode
    def __init__(self, store: LayerStore, room: int, enabled: Tensor, slots: TokenSlots | None = None) -> None:
        """Room for ``room`` tokens of each row and KV head, or the memory ``slots``."""
        self.block_size, self.enabled, self.room = store.block_size, enabled, room
        self.stored_bytes = store.stored_bytes
        self.counters = torch.zeros(2, dtype=torch.int64, device=store.device)
        if slots is None:
            slots = empty_slots(store, store.batch * room, even_lanes(store.batch, room, store.device))
        self.kv, self.columns, self.stamps, self.slots, self.now, self.lanes = slots
        self.fit(store)

    @classmethod
    def enter(cls, held: DeviceTokens | None, store: LayerStore, chosen: int) -> DeviceTokens | None:
        """A layer's copies, ready for a step that chooses about ``chosen`` tokens of each row and KV head.

        Nothing that a captured step uses is made later than this. None where no device memory is to be had: steps read
        what they choose in host memory.

        Args:
            held: what it held so far. It gives way to twice as much, once the context asks for that.
        """
        size = store.block_size
        there = store.block_table.shape[1] * size
        if held is not None and held.slots.shape[-1] >= there:  # at once: the host asks in every step and layer
            return held
        if store.table_of_rows.managed:
            return held  # RowTokens made it, or nothing, when the first row came
        assert store.pages is not None
        each, pools = slot_bytes(store), store.pages.pools
        room = pools.tokens(chosen, there, each, store.device, store.batch) // store.batch // size * size
        if room and (held is None or room >= 2 * held.room):
            try:
                held = cls(store, room, pools.enabled(store.device))
            except torch.OutOfMemoryError as error:
                pools.refuse(error)
        if held is not None:
            held.fit(store)
        return held

    @staticmethod
    def begin(held: DeviceTokens | None, store: LayerStore) -> DeviceTokens | None:
        """A layer's copies when its first tokens come: none, in the memory that it had."""
        if held is None or not held.room or store.table_of_rows.managed:
            return None  # of rows that come and go, or did
        each, total = (store.batch, store.heads), (store.heads, store.batch * held.room)
        if any(t.shape[:2] != total for t in (held.kv, held.columns, held.stamps)):
            return None  # a change of rows may have stopped half-way
        if any(t.shape[:2] != each for t in (held.slots, held.now)) or len(held.lanes) != store.batch:
            return None
        if (held.kv.shape[2], held.kv.dtype, held.kv.device) != (store.width, store.dtype, store.device):
            return None
        held.forget()
        return held

    def of_rows(self) -> TokenSlots:
        """The arguments of kernels."""
        return TokenSlots(self.kv, self.columns, self.stamps, self.slots, self.now, self.lanes)

    @no_inference_mode
    def map_rows(self, index: Tensor) -> None:
        super().map_rows(index)
        for name in ("kv", "columns", "stamps"):
            held = getattr(self, name)
            by_row = held.view(len(held), -1, self.room, *held.shape[2:])
            setattr(self, name, take_rows(by_row, index, 1).flatten(1, 2))
        if len(index) != len(self.lanes):
            self.lanes = even_lanes(len(index), self.room, self.lanes.device)

    def first_rows(self, n: int) -> DeviceTokens:
        new = super().first_rows(n)
        new.lanes = self.lanes[:n]
        return new

    @no_inference_mode
    def fit(self, store: LayerStore) -> None:
        """The block table may have grown."""
        more = store.block_table.shape[1] * store.block_size - self.slots.shape[-1]
        if more > 0:
            self.slots = torch.nn.functional.pad(self.slots, (0, more), value=-1)

    # ------------------------------------------------------------------ a step

    @property
    def pages(self) -> Tensor:
        """The copies as ``ops.attention.sparse_decode`` takes them: ``[F, block_size, Dk + Dv]``."""
        return self.kv.view(-1, self.block_size, self.kv.shape[-1])

    def locate(self, ids: Tensor, store: LayerStore, used: Tensor | None = None) -> Tensor:
        """Where the tokens ``ids`` are: among :attr:`pages`, or in host memory. See ``ops.storage.device_tokens``."""
        slots, lanes = self.slots, self.lanes
        if len(ids) != len(slots):  # several queries of the only row
            slots, lanes = slots.expand(len(ids), -1, -1), lanes.expand(len(ids), -1).contiguous()
        return locate_tokens(ids, slots, lanes, store.table, self.columns.shape[1], self.block_size, used=used)

    def bring(self, ids: Tensor, store: LayerStore, used: Tensor | None = None) -> None:
        """The tokens ``ids`` were chosen: copy those that are missing, in the place of the oldest others.

        With one row, ``ids`` may belong to several queries, ``[n, H, K]``.
        """
        named = {"used": used, "enabled": self.enabled, "counters": self.counters, **store.pool.coded}
        bring_tokens(ids, store.pool.kv, store.table, self.of_rows(), **named)

    def forget(self) -> None:
        """Nothing is held."""
        self.slots.fill_(-1)
        self.columns.fill_(-1)
        self.stamps.fill_(EMPTY)

    def reset(self) -> None:
        """Forget everything, and reset the counters."""
        self.forget()
        self.counters.zero_()

    def measured(self) -> PackStats:
        """Counts of tokens copied so far."""
        needed, copied = self.counters.tolist()
        return PackStats(needed=needed, copied=copied, bytes=copied * self.stored_bytes)


def slot_bytes(store: LayerStore) -> int:
    """Bytes of one slot of a layer, all KV heads."""
    return store.heads * (store.token_bytes + SLOT_BYTES)


def empty_slots(
    store: LayerStore, total: int, lanes: Tensor, columns: int = 0, layers: tuple[int, ...] = ()
) -> TokenSlots:
    """Slots of one layer, ``total`` of each KV head, that hold nothing and know ``columns`` columns of a row.

    ``layers``: ``(n,)`` for those of ``n`` layers alike in one piece: ``[n, ...]`` each, but for the lanes.
    """

    def full(*shape: int, value: int) -> Tensor:
        return torch.full((*layers, *shape), value, dtype=torch.int32, device=store.device)

    batch, heads = store.batch, store.heads
    return TokenSlots(
        kv=torch.empty(*layers, heads, total, store.width, dtype=store.dtype, device=store.device),
        columns=full(heads, total, value=-1),
        stamps=full(heads, total, value=EMPTY),
        slots=full(batch, heads, columns, value=-1),
        now=full(batch, heads, value=0),
        lanes=lanes,
    )


def add_device_tokens(memory: Memory, request: Request, chosen: int) -> None:
    """Add what copies of tokens take, if a step chooses ``chosen`` of each row and KV head."""
    assert request.offload is not None
    there, pool = request.table * request.config.block_size, request.offload.device_pool
    rows = [request.batch * layer.heads for layer in request.layers]
    each = [row * (layer.width * request.item + SLOT_BYTES) for row, layer in zip(rows, request.layers)]
    size = request.config.block_size
    for row, one in zip(rows, each):
        room = min(there, TOKEN_SELECTIONS * chosen if pool is None else int(pool) // len(each) // one) // size * size
        memory.device_pages += room * one
        memory.tables += 4 * row * there + COUNTER_BYTES if room else 0
    step = sum(row * layer.width for row, layer in zip(rows, request.layers))
    memory.working_set = int(REUSED * chosen * step * request.item)
