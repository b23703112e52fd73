"""The model chooses: a trained indexer gives each query its tokens (DeepSeek Sparse Attention, DeepSeek-V3.2).

The model's indexer chooses: this policy chooses nothing, and no configuration asks for it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_sparsekv_config.sparse import SparseConfig
from hf_sparsekv_config.tokens import TokenConfig

from ..kv.chosen_rows import ChosenRows, attend_by_head
from ..kv.counters import Tally
from ..kv.ring import ring_tokens
from ..kv.state import Held, State
from ..kv.store import LayerStore
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .base import Policy
from .device_tokens import DeviceTokens, add_device_tokens
from .labelled import LabelledPolicy
from .memory import Memory, Request
from .plan import DENSE, Plan, planned

EVERYTHING = 1 << 30  # a window that no context outgrows: captured steps know its columns on the device
_MORE = 8  # room for one more key in so many: keys are copied when they outgrow it


class IndexedPolicy(LabelledPolicy):
    """Attends to what the model's indexer has chosen. Without labels: it keeps the indexer's keys.

    Attributes:
        index_keys: ``[batch, capacity, D]``, by columns, on the device; None in layers that use the choice of others.
            Keys of several ``indexers`` lie side by side, where layers that store nothing have indexers, too.
        positions: int64 ``[3, batch, capacity]``, by columns, if the model keeps them here (Qwen4-Exp).
        chosen: columns for the step's query, int64 ``[batch, k]``, or for each KV head ``[batch, H, k]``; -1 for none.
            In a captured step: tokens.
        topk: columns that the indexer chooses.
    """

    TENSORS: ClassVar = {"index_keys": Held(counted=True, file="index_keys"), "positions": Held(rows=1)}
    HOST: ClassVar = {"chosen": None}
    OWN: ClassVar = ("chosen",)
    indexers = 1

    index_keys: Tensor | None
    positions: Tensor | None
    chosen: Tensor

    def __init__(self, config: SparseConfig, layer_idx: int, offloaded: bool, topk: int) -> None:
        Policy.__init__(self, config, layer_idx, offloaded)  # without labels
        self.fetches = self.copies_tokens = offloaded
        self.topk = topk

    def start(self, store: LayerStore, q_heads: int) -> None:
        self.tokens = DeviceTokens.begin(self.tokens, store)

    @no_inference_mode
    @torch.no_grad()
    def keep_keys(self, keys: Tensor, first: int, place: int = 0) -> Tensor:
        """Keep keys ``[batch, n, D]`` of columns ``first ..``, of the indexer at ``place``: all of them so far."""
        held, end = self.index_keys, first + keys.shape[1]
        if first and held is None:
            raise RuntimeError("this cache has lost the keys of the model's indexer: call reset() and prefill again")
        width = keys.shape[2] * self.indexers
        if held is None or held.shape[1] < end or (not first and not _alike(held, keys, width)):
            room = _room(end, self.config.max_length)
            held = self.index_keys = _grown(held if first else None, keys, room, width)
        mine = held[:, :end].unflatten(2, (self.indexers, -1))[:, :, place]
        mine[:, first:] = keys
        return mine

    def keep_key(self, keys: Tensor, column: Tensor) -> Tensor:
        """By columns that the device knows: keep one key of each row, ``[batch, 1, D]``, of ``column [batch, 1]``.

        Returns:
            All keys that there is room for. Keys after that column are undefined.
        """
        assert self.index_keys is not None
        self.index_keys.scatter_(1, column.long()[:, :, None].expand_as(keys), keys)
        return self.index_keys

    @no_inference_mode
    def keep_positions(self, positions: Tensor) -> None:
        """Keep the positions ``[3, batch, n]`` of all columns so far."""
        held, (_, batch, n) = self.positions, positions.shape
        if held is None or held.shape[1] != batch or held.shape[2] < n or held.device != positions.device:
            held = self.positions = positions.new_zeros(3, batch, _room(n, self.config.max_length), dtype=torch.long)
        held[..., :n] = positions

    # ------------------------------------------------------------------ rows that come and go

    @no_inference_mode
    def open_rows(self, like: IndexedPolicy, store: LayerStore) -> None:
        """Room for the keys of rows of any length that ``store`` has room for; ``like`` holds those of the first."""
        if (keys := like.index_keys) is not None:
            tokens = store.block_table.shape[1] * store.block_size + store.ring.tokens
            self.index_keys = keys.new_zeros(store.batch, tokens, keys.shape[2])

    @no_inference_mode
    def take_row(self, row: int, other: IndexedPolicy, tokens: int) -> None:
        """Row ``row`` gets the keys of the only one of ``other``, which has ``tokens`` tokens."""
        if self.index_keys is not None and other.index_keys is not None:
            self.index_keys[row, :tokens] = other.index_keys[0, :tokens]

    def add_rows(self, other: State, found: list[tuple[Tensor, Tensor, int]]) -> None:
        if other is self:  # else :meth:`take_row`: there is room for other lengths
            super().add_rows(other, found)

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        if self.fetches:
            return planned("indexed", True, self.tokens is not None, brings=True)
        if store.full_blocks * store.block_size + store.ring.tokens <= self.topk:  # all are chosen
            return DENSE
        return planned("indexed")

    @no_inference_mode
    def prepare(self, store: LayerStore) -> Plan:
        if self.fetches:
            self.enter(store)
        if store.table_of_rows.managed:
            return self.plan(store)
        store.step_rows.window(EVERYTHING)
        rows, keys = store.held, self.index_keys
        room = store.block_table.shape[1] * store.block_size + store.ring.tokens + rows.columns - min(rows.lengths)
        if keys is not None and keys.shape[1] < room:  # captured steps may go on until the table is full
            self.index_keys = _grown(keys, keys, room, keys.shape[2])
        if (at := self.positions) is not None and at.shape[2] < room:
            self.positions = torch.nn.functional.pad(at, (0, room - at.shape[2]))
        return self.plan(store)

    def wanted_copies(self, tokens: int) -> int:
        return min(self.topk, tokens) if self.copies_tokens else 0

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        tokens, number = self.chosen, None if store.capturing else store.held.tokens(store.device)
        if number is not None:  # rows have padding
            tokens = number.gather(1, tokens.clamp_min(0)).masked_fill(tokens < 0, -1)
        if store.table_of_rows.managed:  # rows without a token have none
            tokens = tokens.masked_fill(tokens >= store.rows[:, :1].view(-1, *[1] * (tokens.ndim - 1)), -1)
        if tokens.ndim == 3:
            return self._attend_by_head(q, tokens, store, plan, params)
        rows = ChosenRows.of(store, tokens)
        if not store.table.shape[1]:
            return rows.attend(q, None, "all", params)
        ids = tokens.masked_fill(tokens >= store.rows[:, 1:], -1).int()[:, None].expand(-1, store.heads, -1)
        ids = ids.contiguous()
        if plan.ahead:
            self._taken = ids, None
        return self.attend_to(q, ids, rows, params, plan.paged)

    def _attend_by_head(
        self, q: Tensor, tokens: Tensor, store: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        """:meth:`attend` to ``tokens [batch, H, k]``, which each KV head has chosen for itself."""
        ids = tokens.masked_fill(tokens >= store.rows[:, 1:, None], -1).int()
        if plan.ahead:
            self._taken = ids, None
        if self.watch is not None:
            self.watch.mark_tokens(ids, store.block_size, None)
        if not plan.paged or not store.table.shape[1]:
            return attend_by_head(store, q, tokens, ids, None, params)
        assert self.tokens is not None
        return attend_by_head(store, q, tokens, self.tokens.locate(ids, store), self.tokens.pages, params)

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        if plan.ahead and self._taken is not None:
            self.bring_taken(q, store)

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().account(q, store, plan, tally)
        if (keys := self.index_keys) is not None:
            store.counters.index_bytes += tally.context * keys.shape[2] * keys.itemsize


def _room(columns: int, max_length: int | None) -> int:
    """Keys that there is room for, once there are so many."""
    return max(columns + columns // _MORE, max_length or 0)


def needs(request: Request, topk: int) -> Memory:
    """Bytes that layers take whose model chooses ``topk`` tokens, after a prompt in one piece.

    Offloaded, prompts prepare captured steps; on the device the first of these does.
    """
    memory, there = Memory(blocks=request.blocks), request.table * request.config.block_size
    room = max(_room(request.context, request.config.max_length), there + ring_tokens(request.config))
    memory.index_keys = request.batch * room * request.item * sum(layer.index_dim for layer in request.layers)
    if request.offload is not None:
        add_device_tokens(memory, request, min(topk, there))
    return memory


def _alike(held: Tensor, keys: Tensor, width: int) -> bool:
    """Whether ``keys``, ``width`` wide with those of other indexers, can be kept in the memory of earlier ones."""
    return (len(held), held.shape[2], held.dtype, held.device) == (len(keys), width, keys.dtype, keys.device)


def _grown(held: Tensor | None, keys: Tensor, room: int, width: int) -> Tensor:
    """Room for ``room`` keys of each row, like ``keys`` but ``width`` wide, with those that are ``held``."""
    made = keys.new_zeros(len(keys), room, width)
    if held is not None:
        made[:, : held.shape[1]] = held
    return made


def chooses(config: SparseConfig) -> bool:
    """Whether a configuration says what to choose; False: it leaves that to the model, as the defaults do."""
    shared = {field.name for field in fields(SparseConfig)}
    own = [field for field in fields(config) if field.name not in shared]
    return type(config) is not TokenConfig or any(getattr(config, field.name) != field.default for field in own)


def in_blocks(text_config: Any) -> bool:
    """Whether each KV head chooses its own blocks of tokens (MiniMax M3), in some layers."""
    return "minimax_m3_sparse" in (getattr(text_config, "layer_types", None) or ())


def chosen_tokens(text_config: Any) -> int:
    """Tokens that an indexer of such a model chooses for a query, at most."""
    if hasattr(text_config, "index_topk"):
        return text_config.index_topk
    if in_blocks(text_config):
        return text_config.index_topk_blocks * text_config.index_block_size
    return text_config.indexer_budget + text_config.indexer_compress_ratio - 1  # and what makes no whole block
