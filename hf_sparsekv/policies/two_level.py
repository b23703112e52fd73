"""Tokens by their label channels; where blocks are offloaded two-level: blocks, then tokens in them (AsyncTLS)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..config import OffloadConfig, TwoLevelConfig
from ..kv.state import Held
from ..kv.store import LayerStore
from ..ops.place_tokens import place_tokens
from ..ops.seal import Index
from ..ops.topk_select import block_select, token_select
from ..predictor.channels import LabelChannels
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .base import Policy
from .block_metadata import BlockMetadata, bounds_bytes
from .label_index import LabelIndex, label_bytes
from .memory import Memory, Request, mean_bytes
from .plan import CROSSOVER, DENSE, Plan, planned
from .registry import register
from .shared import Labelled


@register(
    "two_level",
    TwoLevelConfig,
    about="tokens by labels; offloaded, in a bounded number of blocks (AsyncTLS)",
    presets={"block_only": {"level": "block"}, "token_only": {"level": "token"}},
)
class TwoLevelPolicy(Policy):
    """State: the label channels; with ``lag`` the blocks chosen in the previous step; where chosen blocks are.

    Without ``lag`` nothing that is chosen outlives its step. The query that the layer before expects only says which
    blocks :meth:`foresee` brings to the device. Which blocks a step attends to is up to its own query: those that were
    not brought are read in host memory, and what was brought in vain may be evicted in the next step.
    """

    TENSORS: ClassVar = {
        "ids": Held(trial=True, dropped=True, file="previous", when="chosen"),  # BlockIds; only with lag
        "page_ids": Held(trial=True, dropped=True),
    }
    HOST: ClassVar = {
        "foreseen": None,  # columns that were cached when blocks were brought beforehand
        "in_place": False,  # there is no device memory for chosen blocks: they are read where they live
        "looked": False,  # the step has looked its blocks up in `page_ids`, not fetched them
    }
    PARTS: ClassVar = ("labels",)

    config: TwoLevelConfig
    label_index = LabelIndex

    def __init__(
        self, config: TwoLevelConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded)
        of = level(config, offloaded)
        self.lag, self.method = lags(config, offloaded), method(config, offloaded)
        self.coarse, self.by_labels = of != "token", of != "token" and by_labels(config)
        self.metadata = None
        if self.coarse and not self.by_labels:
            self.metadata = BlockMetadata(kind_of(config), config.bounds_per_block, config.block_reduce)
        self.labels = self.label_index(config, layer_idx, channels) if of != "block" else None
        self.granularity = "token" if self.labels else "block"
        self.fetches = offloaded and self.coarse
        self.foresight = self.foresees_by(config, offloaded)
        self.low_priority = self.foresight is None  # the next layer waits for it

    @classmethod
    def share(cls, config: TwoLevelConfig, offload: OffloadConfig | None) -> Labelled:
        return Labelled(cls, config, offload)

    @classmethod
    def crossover(cls, config: TwoLevelConfig, offloaded: bool) -> str:
        return method(config, offloaded)

    @classmethod
    def reserves(cls, config: TwoLevelConfig, offloaded: bool) -> int:
        return config.coarse_blocks if lags(config, offloaded) else 0

    @classmethod
    def needs(cls, request: Request) -> Memory:
        config, memory = request.config, Memory(blocks=request.blocks)
        of = level(config, request.offload is not None)
        if of != "block":
            memory.labels = sum(request.block_capacity * label_bytes(request, layer) for layer in request.layers)
        if has_tail(config):
            memory.means = mean_bytes(request)
        if of != "token":
            memory.bounds = 0 if by_labels(config) else bounds_bytes(request, kind_of(config), config.bounds_per_block)
            if request.offload is not None and request.full_blocks > config.coarse_blocks:
                memory.fetch(request, config.coarse_blocks, config.coarse_blocks)
        return memory

    @classmethod
    def foresees_by(cls, config: TwoLevelConfig, offloaded: bool) -> str | None:
        # Not from the layer's input: pages change hands in one order, so the layer before must have looked up its own.
        brings = offloaded and level(config, offloaded) != "token" and not lags(config, offloaded)
        return "layer:mid" if brings else None

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self._key_dim = store.key_dim
        shape = (store.batch, store.heads, self.config.coarse_blocks)
        if self.lag:
            self.ids = torch.full(shape, -1, dtype=torch.int32, device=store.device)
        if self.fetches:
            self.page_ids = torch.full(shape, -1, dtype=torch.int32, device=store.device)
        if self.metadata is not None:
            self.metadata.start(store)
        if self.labels is not None:
            self.labels.start(store)
        if has_tail(self.config):
            store.keep_means(self.config.tail_tokens)

    @property
    def observes(self) -> bool:
        return self.labels is not None and self.labels.calibrating

    @no_inference_mode
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        if self.observes and self.labels.observe(q, k, valid) and store.full_blocks:
            store.reindex(self)  # blocks that were sealed before there were channels

    # ------------------------------------------------------------------ index

    def index(self, kv: Tensor, flags: Tensor) -> dict[str, Tensor]:
        fields = {} if self.metadata is None else self.metadata.index(kv[..., : self._key_dim], flags)
        return fields if self.labels is None else {**fields, **self.labels.index(kv)}

    def sealing(self, store: LayerStore) -> Index:
        index = Index(store.key_dim)
        if self.metadata is not None:
            index = self.metadata.sealing(store, index)
        return index if self.labels is None else self.labels.sealing(store, index)

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        config, labels = self.config, self.labels
        if labels is not None and labels.calibrating:
            return planned(learns=True, captured=labels.goes_on)
        many = self.coarse and store.full_blocks > config.coarse_blocks
        ahead = self.lag and many
        few = store.full_blocks * store.block_size <= config.token_budget or (labels is None and not many)
        if few and not ahead:
            return DENSE
        if self.below_crossover(store):  # nothing is chosen; sealing the block that ends it chooses anew
            return DENSE if few else CROSSOVER
        chosen = not few and (self.chosen if self.lag else many)
        attends = "chosen" if chosen else "dense" if few or labels is None else "every"
        foresees = chosen and self.source is not None and not self.in_place
        return planned(attends, ahead, self.paged and self.lag and chosen, foresees)

    def foresee(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        if self._enter(store):  # there may be more blocks than in the step before
            store.pages.fetch(self._choose_blocks(q, store)[0], store.table, keep=0, ahead=True)
            self.foreseen = store.length

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        if plan.dense:
            return store.attend(q, None, "all", params)
        blocks = page_ids = scores = None
        if plan.attends == "chosen":
            if self.lag:
                blocks, page_ids = self.ids, self.page_ids if plan.paged else None
            else:
                blocks, scores = self._choose_blocks(q, store)
                page_ids = self._bring(blocks, store)
            store.count_blocks(blocks)
            if self.watch is not None:
                self.watch.mark(blocks)
        paged = page_ids is not None
        if self.labels is None:
            return store.attend(q, blocks, "block", params, paged, page_ids)
        if scores is None:
            scores = self.labels.scores(q, store, blocks)
        else:  # of all tokens
            scores = in_blocks(scores, blocks, store.block_size)
        size, columns = store.block_size, None
        if paged and store.mean_tokens:
            at = token_select(scores, None, self.config.token_budget, size)
            columns, tokens = place_tokens(at, blocks, page_ids, size)
        else:
            tokens = token_select(scores, page_ids if paged else blocks, self.config.token_budget, size)
        if self.watch is not None and blocks is None:
            self.watch.mark_tokens(tokens, size)
        return store.attend(q, tokens, "token", params, paged, columns=columns)

    def _bring(self, blocks: Tensor, store: LayerStore) -> Tensor | None:
        """Where the blocks that this step's query has chosen are; None if all are read where they live.

        Brings them, unless blocks have been brought for the query that the layer before expected: what that has missed
        is read in host memory, token by token, which takes less time than waiting for whole blocks.
        """
        foreseen, self.foreseen = self.foreseen == store.length - 1, None
        if not self._enter(store):
            return None
        if not foreseen:
            return store.pages.fetch(blocks, store.table, keep=0)
        if not store.capturing:
            store.counters.foreseen += 1
        self.looked = True
        return store.pages.find(blocks, store.table, out=self.page_ids)

    def _enter(self, store: LayerStore) -> bool:
        """Whether chosen blocks are brought to the device; makes room for them."""
        entered = self.fetches and store.pages.enter(store.batch * store.heads * self.config.coarse_blocks)
        self.in_place = not entered
        return entered

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if plan.ahead or plan.attends == "chosen":
            self._enter(store)
            plan = self.plan(store)
        return plan

    def account(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        super().account(q, store, plan)
        if plan.dense:
            return
        chosen = plan.attends == "chosen"
        if chosen and not self.lag:
            store.count_index(self._coarse_bytes(store) * (1 + plan.foresees))
        if self.labels is not None and not (chosen and self.by_labels and not self.lag):  # those are read already
            blocks = self.config.coarse_blocks if chosen else store.full_blocks
            store.count_index(self.labels.nbytes_read(store, blocks))
        store.count_means()

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan, again: bool = False) -> None:
        self.chosen = plan.ahead
        if self.looked:  # counted behind the attention, which does not wait for it
            self.looked = False
            store.pages.count(self.page_ids)
        if not plan.ahead:
            return
        self.ids.copy_(self._choose_blocks(q, store)[0])
        self.paged = self._enter(store)
        if self.paged:
            store.pages.fetch(self.ids, store.table, 1, not again, self.page_ids)
        if not again:
            store.count_index(self._coarse_bytes(store))

    def replayed(self, store: LayerStore, plan: Plan) -> None:
        store.counters.foreseen += plan.foresees
        if plan.learns:
            self.labels.stats.tokens += 1
        elif plan.ahead:
            self.chosen, self.paged = True, self.page_ids is not None and store.pages.pool is not None
            store.count_index(self._coarse_bytes(store))

    def _choose_blocks(self, q: Tensor, store: LayerStore) -> tuple[Tensor, Tensor | None]:
        """``BlockIds [batch, H, coarse_blocks]`` for this query; and the scores of all tokens, if blocks go by them."""
        if not self.by_labels:
            return block_select(self.metadata.scores(q, store), self.config.coarse_blocks), None
        scores = self.labels.scores(q, store)
        best = scores.unflatten(-1, (-1, store.block_size)).amax(-1)
        return block_select(best, self.config.coarse_blocks), scores

    def _coarse_bytes(self, store: LayerStore) -> int:
        """Bytes that scoring all full blocks reads."""
        if self.by_labels:
            return self.labels.nbytes_read(store, store.full_blocks)
        return self.metadata.nbytes(store)


def level(config: TwoLevelConfig, offloaded: bool) -> str:
    """What ``config.level`` comes to: ``"two_level"``, ``"block"`` or ``"token"``."""
    if config.level != "auto":
        return config.level
    asked = (config.num_blocks, config.metadata, config.bound_tokens) != (None, None, None)
    return "two_level" if offloaded or asked or config.lag else "token"


def by_labels(config: TwoLevelConfig) -> bool:
    """Blocks are scored by their tokens' labels, so nothing else is kept to score them by."""
    asked = config.metadata == "labels" or (config.metadata is None and config.bound_tokens is None)
    return asked and config.level != "block"


def kind_of(config: TwoLevelConfig) -> str:
    """Which summary of a block's keys is kept, where one is."""
    return config.metadata or "min_max"


def lags(config: TwoLevelConfig, offloaded: bool) -> bool:
    """Tokens are chosen within the blocks of the previous step."""
    return bool(config.lag) and level(config, offloaded) != "token"


def method(config: TwoLevelConfig, offloaded: bool) -> str:
    """What the table of crossovers calls the selection, or the one that takes about as long."""
    of = level(config, offloaded)
    if of != "two_level":
        return f"{of}_only"
    if lags(config, offloaded):
        return "two_level:lag"
    return "token_only" if by_labels(config) else "two_level"  # which reads the labels of all tokens


def has_tail(config: TwoLevelConfig) -> bool:
    """Means stand for tokens that are not chosen."""
    return config.tail is not None and config.level != "block"


def in_blocks(scores: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Of the scores ``[batch, H, n]`` of all tokens those in ``blocks [batch, H, K]``: ``[batch, H, K * block_size]``.

    ``-inf`` where there is no block.
    """
    each = scores.unflatten(-1, (-1, block_size))
    at = blocks.clamp_min(0).long()[..., None].expand(-1, -1, -1, block_size)
    return each.gather(2, at).masked_fill_((blocks < 0)[..., None], -torch.inf).flatten(2)
