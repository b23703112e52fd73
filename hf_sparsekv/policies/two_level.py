"""Tokens by their label channels, among all or, with two levels, in some of the blocks (AsyncTLS)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kv.counters import Tally
from ..kv.state import Held
from ..kv.store import LayerStore
from ..ops.place_tokens import place_tokens
from ..ops.seal import Index
from ..ops.topk_select import block_select, token_select
from ..policies.two_level_config import TwoLevelConfig
from ..predictor.channels import LabelChannels
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .block_metadata import BlockMetadata, bounds_bytes
from .device_tokens import add_device_tokens
from .label_index import label_bytes
from .labelled import LabelledPolicy
from .memory import Memory, Request, mean_bytes
from .plan import CROSSOVER, DENSE, Plan, planned
from .registry import register


@register(
    "two_level",
    TwoLevelConfig,
    about="tokens by labels, among all or in a bounded number of blocks (AsyncTLS)",
    variants={"block_only": {"level": "block"}, "token_only": {"level": "token"}},
)
class TwoLevelPolicy(LabelledPolicy):
    """State: the label channels; with ``lag`` the blocks chosen in the previous step, and where they are.

    Without ``lag`` nothing that is chosen outlives its step. Offloaded, tokens that are chosen among all are read where
    they are, and copied to the device behind the attention, for the steps that follow; chosen blocks are brought before
    it.
    """

    TENSORS: ClassVar = {
        "ids": Held(trial=True, dropped=True, file="previous", when="chosen"),  # BlockIds; only with lag
        "page_ids": Held(trial=True, dropped=True),
    }

    config: TwoLevelConfig
    follows_crops = False

    def __init__(
        self, config: TwoLevelConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        of = level(config)
        self.lag, self.method = lags(config), method(config)
        self.rows_join = not self.lag
        self.metadata = None
        if of != "token":
            self.metadata = BlockMetadata(kind_of(config), config.bounds_per_block, config.block_reduce)
        if of == "block":
            self.labels, self.granularity = None, "block"
        self.fetches_tokens = self.brings_only = offloaded and of == "token"
        # With lag, blocks are chosen by the query before, and each choice takes pages of those before. Without, blocks
        # are brought to pages that the next choice may take.
        one_by_one = offloaded and of != "token"
        self.drafts = "exact" if self.lag else "each" if one_by_one else "together"

    @property
    def whole_tokens(self) -> int:
        return 0 if self.labels is None else self.config.token_budget

    @classmethod
    def crossover(cls, config: TwoLevelConfig, offloaded: bool) -> str:
        return method(config)

    @classmethod
    def reserves(cls, config: TwoLevelConfig, offloaded: bool) -> int:
        return config.coarse_blocks if lags(config) else 0

    @classmethod
    def needs(cls, request: Request) -> Memory:
        config, memory = request.config, Memory(blocks=request.blocks)
        of = level(config)
        if of != "block":
            memory.labels = sum(request.block_capacity * label_bytes(request, layer) for layer in request.layers)
        if has_tail(config):
            memory.means = mean_bytes(request)
        if of != "token":
            memory.bounds = bounds_bytes(request, kind_of(config), config.bounds_per_block)
            if request.offload is not None and request.full_blocks > config.coarse_blocks:
                memory.fetch(request, config.coarse_blocks, config.coarse_blocks)
        elif request.offload is not None and request.full_blocks * config.block_size > config.token_budget:
            add_device_tokens(memory, request, config.token_budget)
        return memory

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        shape = (store.batch, store.heads, self.config.coarse_blocks)
        if self.lag:
            self.ids = torch.full(shape, -1, dtype=torch.int32, device=store.device)
        if self.fetches and self.lag:
            self.page_ids = torch.full(shape, -1, dtype=torch.int32, device=store.device)
        if self.metadata is not None:
            self.metadata.start(store)
        if has_tail(self.config):
            store.keep_means(self.config.tail_tokens)

    # ------------------------------------------------------------------ index

    def sealing(self, store: LayerStore) -> Index:
        index = super().sealing(store)
        return index if self.metadata is None else self.metadata.sealing(store, index)

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        config, labels = self.config, self.labels
        if labels is not None and labels.calibrating:
            return planned(learns=True, captured=labels.goes_on)
        many = self.metadata is not None and store.full_blocks > config.coarse_blocks
        ahead = self.lag and many
        few = store.full_blocks * store.block_size <= config.token_budget or (labels is None and not many)
        if few and not ahead:
            return DENSE
        if self.below_crossover(store):  # nothing is chosen; sealing the block that ends it chooses anew
            return DENSE if few else CROSSOVER
        if self.fetches_tokens:  # what is not on the device yet is read where it is
            return planned("every", True, self.tokens is not None)
        chosen = not few and (self.chosen if self.lag else many)
        attends = "chosen" if chosen else "dense" if few or labels is None else "every"
        return planned(attends, ahead, self.paged and self.lag and chosen)

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        if not self.fetches_tokens:
            return self.attend(q, rows, plan, params)
        ids = self.best_tokens(q, rows)
        return self.attend_to(q, ids, rows, params, self.bring(ids, store))

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        blocks = page_ids = None
        if plan.attends == "chosen":
            if self.lag:
                blocks, page_ids = self.ids, self.page_ids if plan.paged else None
            else:
                blocks = self._choose_blocks(q, store)
                if self._enter_blocks(store):
                    page_ids = store.pages.fetch(blocks, store.table, keep=0)
            store.counters.blocks += (blocks >= 0).sum()
            if self.watch is not None:
                self.watch.mark(blocks)
        pages, size, columns = None if page_ids is None else store.pages.pool.pages, store.block_size, None
        if self.labels is None:
            return store.attend(q, blocks, "block", params, page_ids, pages)
        if blocks is None:
            ids = self.best_tokens(q, store)
            if plan.ahead:
                self._taken = ids, None
            return self.attend_to(q, ids, store, params, plan.paged)
        scores = self.labels.scores(q, store, blocks)
        if pages is not None and store.mean_tokens:
            columns, tokens = place_tokens(
                token_select(scores, None, self.config.token_budget, size), blocks, page_ids, size
            )
        else:
            tokens = token_select(scores, blocks if pages is None else page_ids, self.config.token_budget, size)
        return store.attend(q, tokens, "token", params, pages=pages, columns=columns)

    def _enter_blocks(self, store: LayerStore) -> bool:
        """Whether chosen blocks are brought to the device; makes room for them."""
        return self.fetches and store.pages.enter(store.batch * store.heads * self.config.coarse_blocks)

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if self.fetches_tokens and plan.ahead:
            self.enter(store)
        elif plan.ahead or plan.attends == "chosen":
            self._enter_blocks(store)
        return self.plan(store)

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().account(q, store, plan, tally)
        chosen = plan.attends == "chosen"
        if plan.ahead and self.lag:  # behind what the step has sealed
            store.counters.index_bytes += self.metadata.nbytes(store, tally.blocks + tally.sealed)
        elif chosen and not self.lag:
            store.counters.index_bytes += self.metadata.nbytes(store, tally.blocks)
        if plan.dense:
            return
        if self.labels is not None:
            few = self.config.coarse_blocks * tally.rows
            store.counters.index_bytes += self.labels.nbytes_read(store, few if chosen else tally.blocks)
        store.count_means(tally)

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        super().look_ahead(q, store, plan)
        if not plan.ahead:
            return
        if self.fetches_tokens:
            self.bring_taken(q, store)
            return
        self.chosen = True
        self.ids.copy_(self._choose_blocks(q, store))
        self.paged = self._enter_blocks(store)
        if self.paged:
            store.pages.fetch(self.ids, store.table, 1, True, self.page_ids)

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        if plan.ahead and self.lag:
            self.chosen, self.paged = True, self.page_ids is not None and store.pages.pool is not None

    def _choose_blocks(self, q: Tensor, store: LayerStore) -> Tensor:
        """``BlockIds [batch, H, coarse_blocks]`` for this query."""
        scores = self.metadata.scores(q, store)
        return block_select(scores, self.config.coarse_blocks, rows=store.rows, block_size=store.block_size)


def level(config: TwoLevelConfig) -> str:
    """What ``config.level`` comes to: ``"two_level"``, ``"block"`` or ``"token"``."""
    if config.level != "auto":
        return config.level
    asked = (config.num_blocks, config.metadata, config.bound_tokens) != (None, None, None)
    return "two_level" if asked or config.lag else "token"


def kind_of(config: TwoLevelConfig) -> str:
    """Which summary of a block's keys is kept, where one is."""
    return config.metadata or "min_max"


def lags(config: TwoLevelConfig) -> bool:
    """Tokens are chosen within the blocks of the previous step."""
    return bool(config.lag) and level(config) != "token"


def method(config: TwoLevelConfig) -> str:
    """What the table of crossovers calls the selection."""
    of = level(config)
    if of != "two_level":
        return f"{of}_only"
    return "two_level:lag" if lags(config) else "two_level"


def has_tail(config: TwoLevelConfig) -> bool:
    """Means stand for tokens that are not chosen."""
    return config.tail is not None and config.level != "block"
