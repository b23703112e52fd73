"""Blocks by what is kept of their keys, and tokens in them by their labels: AsyncTLS's two levels, and the first alone.

Block metadata gives the scores. Whole blocks are copied to the device.
"""

from __future__ import annotations

from torch import Tensor

from hf_sparsekv_config.tokens import TokenConfig, level, selection

from ..kv.counters import Tally
from ..kv.store import LayerStore
from ..offload.page_table import LayerPages
from ..ops.selection.topk_select import block_select, token_select
from ..ops.storage.place_tokens import place_tokens
from ..ops.storage.seal import Index
from ..predictor.channels import LabelChannels
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .block_bounds import BlockBounds
from .drafting import Drafting
from .labelled import LabelledPolicy
from .plan import Plan, planned


class BlockPolicy(Drafting, LabelledPolicy):
    """Each step chooses blocks for its own query, and attends to them, or to the best tokens in them.

    Nothing that is chosen outlives its step. Offloaded, chosen blocks are brought to the device before the attention.
    """

    config: TokenConfig
    follows_crops = False

    def __init__(
        self, config: TokenConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        self.method = selection(config)
        self.bounds = BlockBounds(config.token_reduce)
        if level(config) == "block":
            self.labels, self.granularity = None, "block"
        self.copies_tokens = False
        # Blocks are brought to pages that the next choice may take.
        self.drafts = "each" if offloaded else "together"

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self.bounds.start(store)

    def sealing(self, store: LayerStore) -> Index:
        return self.bounds.sealing(store, super().sealing(store))

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        if (plan := self.plan_all(store)) is not None:
            return plan
        return planned("chosen" if store.full_blocks > self.config.coarse_blocks else "every")

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if plan.ahead or plan.attends == "chosen":
            self.enter_blocks(store)
        return self.plan(store)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        if plan.attends != "chosen":  # no more blocks than would be chosen
            return self.attend_to(q, self.best_tokens(q, store), store, params, False)
        blocks, page_ids = self.blocks_for(q, store, plan)
        store.counters.blocks += (blocks >= 0).sum()
        if self.watch is not None:
            self.watch.mark(blocks)
        pages, size, columns = None, store.block_size, None
        if page_ids is not None:
            assert store.pages is not None and store.pages.pool is not None
            pages = store.pages.pool.pages
        if self.labels is None:
            return store.attend(q, blocks, "block", params, page_ids, pages)
        scores, budget = self.labels.scores(q, store, blocks), self.config.budget
        if pages is not None and store.mean_tokens:
            columns, tokens = place_tokens(token_select(scores, None, budget, size), blocks, page_ids, size)
        else:
            tokens = token_select(scores, blocks if pages is None else page_ids, budget, size)
        return store.attend(q, tokens, "token", params, pages=pages, columns=columns)

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        return self.attend(q, rows, plan, params)

    def blocks_for(self, q: Tensor, store: LayerStore, plan: Plan) -> tuple[Tensor, Tensor | None]:
        """``BlockIds [batch, H, coarse_blocks]`` that a step attends to, and their device pages, if they have some."""
        blocks, pages = self.choose_blocks(q, store), self.enter_blocks(store)
        return blocks, None if pages is None else pages.fetch(blocks, store.table, keep=0)

    def choose_blocks(self, q: Tensor, store: LayerStore) -> Tensor:
        """``BlockIds [batch, H, coarse_blocks]`` for this query."""
        scores = self.bounds.scores(q, store)
        return block_select(scores, self.config.coarse_blocks, rows=store.rows, block_size=store.block_size)

    def enter_blocks(self, store: LayerStore) -> LayerPages | None:
        """Make room for chosen blocks on the device; None: they are not brought there."""
        pages = store.pages if self.fetches else None
        entered = pages is not None and pages.enter(store.batch * store.heads * self.config.coarse_blocks)
        return pages if entered else None

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().account(q, store, plan, tally)
        if scored := self.blocks_scored(plan, tally):
            store.counters.index_bytes += self.bounds.nbytes(store, scored)

    def labels_scored(self, plan: Plan, tally: Tally) -> int:
        if plan.attends == "chosen":
            return self.config.coarse_blocks * tally.rows
        return super().labels_scored(plan, tally)

    def blocks_scored(self, plan: Plan, tally: Tally) -> int:
        """Blocks whose metadata the steps have read, of all rows together."""
        return tally.blocks if plan.attends == "chosen" else 0

    def file_names(self) -> set[str]:
        return super().file_names() | {"previous"}  # of a cache saved with lag
