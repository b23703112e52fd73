"""Selection for a predicted query, one step ahead and beside the computation (AsyncSpade section 4)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..attention.exact import AttentionSpec
from ..config import PredictiveConfig
from ..kv.lasting import lasting
from ..kv.state import Held
from ..kv.store import LayerStore
from ..ops.seal import Index
from ..ops.token_score import token_score
from ..ops.topk_select import token_select
from ..predictor.channels import LabelChannels
from ..predictor.query import make_predictor
from ..telemetry.stats import PackStats
from .base import Policy
from .label_index import LabelIndex
from .packed import Packed
from .plan import CROSSOVER, DENSE, Plan, planned
from .query_ring import QueryRing


class PredictivePolicy(Policy):
    """Tokens of all sealed blocks by their labels, for the query that the next step will have.

    State: the latest queries; the tokens chosen for the next step; with blocks in host memory, their copies. A step
    attends to what the last one has chosen and to everything that is not sealed; sealing a block chooses anew, so
    every token is either near or could have been chosen.
    """

    TENSORS: ClassVar = {"ids": Held(trial=True, counted=True, file="chosen", when="chosen")}  # [batch, H, room]
    HOST: ClassVar = {
        "_valid": None,  # of the new columns of a step that is being captured
        "_predicted": None,  # in such a step, from its query to the end of its attention
    }
    PARTS: ClassVar = ("labels", "queries", "packed")
    OWN: ClassVar = ("packed",)  # a copy's first step reads its tokens where they live

    config: PredictiveConfig
    method = "predictive"

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded)
        self.labels = LabelIndex(config, layer_idx, channels) if config.scoring == "labels" else None
        self.fetches = offloaded
        # Measured on an H200, 8 x 32k on the device (benchmarks/NOTES.md, "Choosing from all tokens"): choosing behind
        # the step 7.5 ms, among it 7.1; fetching yields.
        self.yields = offloaded
        self.predictor = make_predictor(config.predictor, config.predictor_window, config.predictor_epsilon)
        self.bundle = config.layers_per_pack
        self._every: Tensor | None = None  # all channels of a key, at an address that captured steps know

    @lasting
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        if self.labels is not None:
            self.labels.start(store)
        room, batch, dim = room_for(self.config), store.batch, store.key_dim
        if self.ids is None or self.ids.shape[0] != batch or self.ids.device != store.device:
            self.ids = torch.full((batch, store.heads, room), -1, dtype=torch.int32, device=store.device)
            self.packed = None
        if self.queries is None or not self.queries.fits(batch, q_heads, dim, store.dtype, store.device):
            self.queries = QueryRing(batch, q_heads, self.predictor.slots, dim, store.dtype, store.device)
        self.queries.clear()
        if self.packed is not None:
            self.packed.forget()
        if self.labels is None and (
            self._every is None or (len(self._every), self._every.device) != (dim, store.device)
        ):
            self._every = torch.arange(dim, dtype=torch.int32, device=store.device)

    def index(self, kv: Tensor, flags: Tensor) -> dict[str, Tensor]:
        return {} if self.labels is None else self.labels.index(kv)

    def sealing(self, store: LayerStore) -> Index:
        index = Index(store.key_dim)
        return index if self.labels is None else self.labels.sealing(store, index)

    # ------------------------------------------------------------------ a step

    @lasting
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        if self.labels is not None and self.labels.observe(q, k, valid) and store.sealed:
            store.reindex(self)  # blocks that were sealed before there were channels
        if store.fixed:
            self._valid = valid  # the query is stored beside the step
            return
        end = store.length + (k.shape[2] if new is None else new)
        if q is k:  # something else attends: there is no query
            self.queries.end, self.chosen = end, False
            self.queries.forget(end)
            return
        if self.queries.held.shape[1] != q.shape[1]:  # nobody had seen a query when the layer began
            held = self.queries
            self.queries = QueryRing(store.batch, q.shape[1], held.size, q.shape[3], store.dtype, store.device)
            self.queries.end = store.length
            self.queries.forget(store.length)
        self.queries.store(q, valid, store.length, end)

    def plan(self, store: LayerStore) -> Plan:
        labels = self.labels
        if labels is not None and labels.calibrating:
            return planned(learns=True, captured=labels.goes_on)
        if not selects(self.config, store):
            return DENSE
        if self.below_crossover(store):
            return CROSSOVER
        return planned("chosen" if self.chosen else "dense", True, self.chosen and self.placed)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, spec: AttentionSpec) -> Tensor:
        if plan.dense:
            return store.attend(q, None, "all", spec)
        if self.watch is not None:
            self.watch.mark_tokens(self.ids, store.block_size)
        if plan.placed:
            frames = self.packed.frames(store.block_size)
            return store.attend(q, self.packed.places, "token", spec, frames=frames)
        return store.attend(q, self.ids, "token", spec)

    # ------------------------------------------------------------------ the next step

    def prepare(self, store: LayerStore) -> Plan:
        self.queries.rewind(store.length)
        plan = self.plan(store)
        if plan.ahead:
            self._enter(store)
        return plan

    def _enter(self, store: LayerStore) -> bool:
        """Whether chosen tokens are copied to the device; makes room for them."""
        if not self.fetches:
            return False
        pools, room = store.residents.pools, self.ids.shape[-1]
        if self.packed is None and pools.grants(packed_bytes(store, room), store.device):
            enabled = pools.enabled(store.device)
            try:
                self.packed = Packed(store.batch, store.heads, room, store.width, store.dtype, store.device, enabled)
            except torch.OutOfMemoryError as error:
                pools.refuse(error)
        return self.packed is not None

    def note(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        # Scores then begin as soon as attention has ended, and meet linear layers of many programs rather than of few.
        # Measured on an H200, 8 x 32k, 16 x 16k and 1 x 128k: 6.46, 6.55 and 4.81 ms, with the query alone stored here
        # 6.54, 6.90, 5.24, with all of it behind attention 6.85, 7.01, 4.75, with scores here as well 6.78, 6.92, 5.19.
        # Other orders: benchmarks/NOTES.md, "Choosing from all tokens".
        self.queries.push(q[:, :, None], self._valid, store.clock.held(store.device))
        if plan.ahead:
            self._predicted = self._predict()

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan, again: bool = False) -> None:
        self.chosen = plan.ahead
        if not self.chosen:
            return
        self.choose(store)
        self.placed = self._enter(store)
        if self.placed:
            self.packed.update(self.ids, store.pool.kv, store.table)
            if again:  # a step needs its tokens once, whatever was copied for it
                self.packed.counters[:1] -= (self.ids >= 0).sum()
        if not again:
            store.count_index(self._index_bytes(store))

    def _predict(self) -> Tensor:
        """The next query ``[batch, Hq, Dk]``."""
        queries = self.queries
        return self.predictor.predict(queries.held, queries.position, queries.count)

    def choose(self, store: LayerStore) -> None:
        """Write the tokens that the predicted query wants to :attr:`ids`."""
        config, predicted = self.config, self._predicted
        self._predicted = None
        scores = self.scores(self._predict() if predicted is None else predicted, store)
        token_select(scores, None, config.token_budget, store.block_size, out=self.ids[..., : config.token_budget])

    def scores(self, q: Tensor, store: LayerStore, out: Tensor | None = None) -> Tensor:
        """Scores of all tokens in sealed blocks for ``q [batch, Hq, Dk]``: ``[batch, H, n]``, by labels or by keys."""
        if self.labels is not None:
            return self.labels.scores(q, store, out=out)
        codes = store.pool.kv[..., : store.key_dim], None  # full-width keys are labels of all channels
        channels = self._every.expand(store.batch, store.heads, -1)
        flags, reduce = store.pool.fields["flags"], self.config.token_reduce
        return token_score(q, *codes, channels, flags, store.table, None, reduce, out=out)

    def _index_bytes(self, store: LayerStore) -> int:
        if self.labels is not None:
            return self.labels.nbytes_read(store, store.sealed)
        return store.batch * store.heads * store.sealed * store.block_size * store.key_dim * store.dtype.itemsize

    def replayed(self, store: LayerStore, plan: Plan) -> None:
        self.queries.end = store.length
        if plan.learns:
            self.labels.stats.tokens += 1
        elif plan.ahead:
            self.chosen, self.placed = True, self.packed is not None
            store.count_index(self._index_bytes(store))

    def measured(self) -> PackStats | None:
        if self.packed is None:
            return None
        needed, copied = self.packed.counters.tolist()
        token = self.packed.kv.shape[-1] * self.packed.kv.itemsize
        return PackStats(needed=needed, copied=copied, bytes=copied * token)

    def reopened(self) -> None:
        super().reopened()  # one step attends to everything
        if self.packed is not None:
            self.packed.forget()  # other tokens may come to these columns


def selects(config: PredictiveConfig, store: LayerStore, all_of: int | None = None) -> bool:
    """Steps attend to a selection at this length; that changes only where a block is sealed.

    ``all_of``: so many tokens in sealed blocks are all attended to; default: the budget.
    """
    held = store.sealed * store.block_size
    if held <= (config.token_budget if all_of is None else all_of):
        return False
    return held + config.window + config.max_draft >= config.start_length


def room_for(config: PredictiveConfig) -> int:
    """Tokens that a row and KV head can hold chosen: the budget, in whole blocks."""
    return -(-config.token_budget // config.block_size) * config.block_size


def packed_bytes(store: LayerStore, room: int) -> int:
    """Bytes of the copies of one layer's chosen tokens."""
    return store.batch * store.heads * room * (store.token_bytes + 12) + 16
