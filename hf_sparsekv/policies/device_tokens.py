"""One layer's copies of chosen tokens on the device; their blocks are in host memory."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kv.state import Held, State
from ..kv.store import LayerStore
from ..offload.page_table import TOKEN_SELECTIONS
from ..ops.device_tokens import EMPTY, TokenSlots, bring_tokens, locate_tokens
from ..tensors import no_inference_mode
from .measured import PackStats
from .memory import Memory, Request

SLOT_BYTES = 8  # of a slot beside its copy: column and stamp
# Selections that the tokens chosen within 12 steps amount to: 3.2 with one token in 64 chosen, 2.7 with one in 16, on
# the recorded real model (benchmarks/results/foreseen_queries.csv).
REUSED = 3.2


class DeviceTokens(State):
    """The tokens that latest selections have chosen, ``room`` of each row and KV head.

    Steps that follow each other choose nearly the same tokens. What is held decides where tokens are read, never which.

    Attributes:
        kv, columns, stamps, slots, now: see ``ops.device_tokens.TokenSlots``.
        enabled: int32 ``[1]``; 0: nothing is copied.
        counters: int64 ``[2]``: tokens chosen, and of these copied.
    """

    TENSORS: ClassVar = {
        "kv": Held(counted=True),
        "columns": Held(counted=True),
        "stamps": Held(counted=True),
        "slots": Held(counted=True),
        "now": Held(),
        "enabled": Held(rows=None, shared=True),
        "counters": Held(rows=None, captured=False, counted=True),
    }

    @no_inference_mode
    def __init__(self, store: LayerStore, room: int, enabled: Tensor) -> None:
        def full(*shape: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=store.device)

        rows = store.batch, store.heads
        self.block_size, self.enabled = store.block_size, enabled
        self.kv = torch.empty(*rows, room, store.width, dtype=store.dtype, device=store.device)
        self.columns = full(*rows, room, value=-1)
        self.stamps = full(*rows, room, value=EMPTY)
        self.now = full(*rows, value=0)
        self.slots = full(*rows, 0, value=-1)
        self.counters = full(2, value=0, dtype=torch.int64)
        self.fit(store)

    @classmethod
    def enter(cls, held: DeviceTokens | None, store: LayerStore, chosen: int) -> DeviceTokens | None:
        """What a layer holds, ready for a step that chooses about ``chosen`` tokens of each row and KV head.

        Nothing that a captured step uses is made later than this. None where no device memory is to be had: steps read
        what they choose in host memory.

        Args:
            held: what it held so far. It gives way to twice as much, once the context asks for that.
        """
        pools, size = store.pages.pools, store.block_size
        there = store.block_table.shape[1] * size
        if held is not None and held.slots.shape[-1] >= there:  # at once: the host asks in every step and layer
            return held
        each = store.table_of_rows.batch * store.heads * (store.token_bytes + SLOT_BYTES)
        room = pools.tokens(chosen, there, each, store.device) // size * size
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
        """What a layer holds when its first tokens come: nothing, in the memory that it had."""
        if held is None or any(t.shape[:2] != (store.batch, store.heads) for t in held.of_rows()):
            return None  # a change of rows may have stopped half-way
        if (held.kv.shape[3], held.kv.dtype, held.kv.device) != (store.width, store.dtype, store.device):
            return None
        held.forget()
        return held

    def of_rows(self) -> tuple[Tensor, ...]:
        """The fields of ``TokenSlots``."""
        return self.kv, self.columns, self.stamps, self.slots, self.now

    @property
    def room(self) -> int:
        """Tokens of each row and KV head that there is room for."""
        return self.kv.shape[2]

    @no_inference_mode
    def fit(self, store: LayerStore) -> None:
        """The block table may have grown."""
        more = store.block_table.shape[1] * store.block_size - self.slots.shape[-1]
        if more > 0:
            self.slots = torch.nn.functional.pad(self.slots, (0, more), value=-1)

    # ------------------------------------------------------------------ a step

    @property
    def pages(self) -> Tensor:
        """The copies as ``ops.sparse_decode`` takes them: ``[F, block_size, Dk + Dv]``."""
        return self.kv.view(-1, self.block_size, self.kv.shape[-1])

    def locate(self, ids: Tensor, store: LayerStore, used: Tensor | None = None) -> Tensor:
        """Where the tokens ``ids`` are: among :attr:`pages`, or in host memory. See ``ops.device_tokens``."""
        return locate_tokens(ids, self.slots, store.table, self.room, self.block_size, used=used)

    def bring(self, ids: Tensor, store: LayerStore, used: Tensor | None = None) -> None:
        """The tokens ``ids`` were chosen: copy those that are missing, in the place of the oldest others."""
        named = {"used": used, "enabled": self.enabled, "counters": self.counters}
        bring_tokens(ids, store.pool.kv, store.table, TokenSlots(*self.of_rows()), **named)

    def forget(self) -> None:
        """Nothing is held."""
        self.columns.fill_(-1)
        self.stamps.fill_(EMPTY)
        self.slots.fill_(-1)

    def forget_row(self, row: int) -> None:
        """Nothing of this row is held."""
        self.columns[row].fill_(-1)
        self.stamps[row].fill_(EMPTY)
        self.slots[row].fill_(-1)

    def reset(self) -> None:
        """Forget everything, and count anew."""
        self.forget()
        self.counters.zero_()

    def measured(self) -> PackStats:
        """What was copied so far."""
        needed, copied = self.counters.tolist()
        return PackStats(needed=needed, copied=copied, bytes=copied * self.kv.shape[-1] * self.kv.itemsize)


def add_device_tokens(memory: Memory, request: Request, chosen: int) -> None:
    """Add what copies of tokens take, if a step chooses ``chosen`` of each row and KV head."""
    there, pool = request.table * request.config.block_size, request.offload.device_pool
    rows = [request.batch * layer.heads for layer in request.layers]
    each = [row * (layer.width * request.item + SLOT_BYTES) for row, layer in zip(rows, request.layers)]
    size = request.config.block_size
    for row, one in zip(rows, each):
        room = min(there, TOKEN_SELECTIONS * chosen if pool is None else int(pool) // len(each) // one) // size * size
        memory.device_pages += room * one
        memory.tables += row * (4 * there + 4) if room else 0
    step = sum(row * layer.width for row, layer in zip(rows, request.layers))
    memory.working_set = int(REUSED * chosen * step * request.item)
