"""Selection for a predicted query, beside the computation: one step ahead here (AsyncSpade section 4).

For the query that the layer before expects in the same step: :mod:`.layer`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...config import OffloadConfig
from ...kv.counters import Tally
from ...kv.state import Held
from ...kv.store import LayerStore
from ...ops.topk_select import token_select
from ...predictor.channels import LabelChannels
from ...predictor.query import CustomPredictor, QueryPredictor, make_predictor
from ...tensors import no_inference_mode
from ...types import AttentionParams
from ..device_tokens import add_device_tokens
from ..label_index import label_bytes
from ..labelled import LabelledPolicy
from ..memory import Memory, Request, mean_bytes
from ..plan import CROSSOVER, DENSE, Plan, planned
from ..registry import register
from ..shared import Labelled
from .predictive_config import PredictiveConfig
from .query_ring import QueryRing


@register(
    "predictive", PredictiveConfig, about="tokens chosen beforehand for a predicted query (AsyncSpade, InfiniGen)"
)
class PredictivePolicy(LabelledPolicy):
    """Tokens of all full blocks by their labels, for the query that the next step will have.

    State: the latest queries; the tokens chosen for the next step; with blocks in host memory, their copies. A step
    attends to what the last one has chosen and to everything that is not sealed; sealing a block chooses anew, so
    every token is either recent or could have been chosen.
    """

    TENSORS: ClassVar = {"ids": Held(trial=True, counted=True, file="chosen", when="chosen")}  # [batch, H, room]
    HOST: ClassVar = {"_predicted": None}  # in a captured step, from its query to the end of its attention
    PARTS: ClassVar = ("queries",)  # None where the layer before predicts

    config: PredictiveConfig
    method = "predictive"
    rows_join = False
    second_device: ClassVar[type[Labelled]]  # who shares and plans where another device chooses: it says so itself
    layer_ahead: ClassVar[type[PredictivePolicy]]  # who chooses where the layer before predicts: it says so itself

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        # Measured on an H200, 8 x 32k on the device (benchmarks/NOTES.md, "Choosing from all tokens"): choosing behind
        # the step 7.5 ms, among it 7.1; fetching yields.
        self.low_priority = offloaded
        self.predictor = None if config.by_layer else predictor_of(config)
        self.layers_per_launch = config.layers_per_pack

    @classmethod
    def place(cls, config: PredictiveConfig, offload: OffloadConfig | None) -> OffloadConfig | None:
        rank = config.cache_rank
        if offload is None:
            return OffloadConfig() if rank == "host" else None
        if rank == "stream":
            raise ValueError("cache_rank='stream' keeps all blocks on the device: leave offload out, or cache_rank")
        if on_second_device(config):
            raise ValueError(f"with cache_rank={rank!r} blocks do not go to host memory: leave offload out")
        return offload

    @classmethod
    def share(cls, config: PredictiveConfig, offload: OffloadConfig | None) -> Labelled:
        if on_second_device(config):
            return cls.second_device(cls, config, offload)
        return Labelled(cls.layer_ahead if config.by_layer else cls, config, offload)

    @classmethod
    def foresees_by(cls, config: PredictiveConfig, offloaded: bool) -> str | None:
        return config.prediction if config.by_layer and config.prediction != "own" else None

    @classmethod
    def crossover(cls, config: PredictiveConfig, offloaded: bool) -> str | None:
        return None if on_second_device(config) else cls.method

    @classmethod
    def reserves(cls, config: PredictiveConfig, offloaded: bool) -> int:
        return room_for(config)

    @classmethod
    def needs(cls, request: Request) -> Memory:
        if on_second_device(request.config):
            return cls.second_device.needs(request)
        memory, config = Memory(blocks=request.blocks), request.config
        memory.tables = queries_bytes(request)
        memory.labels = sum(request.block_capacity * label_bytes(request, layer) for layer in request.layers)
        memory.means = 0 if config.tail is None else mean_bytes(request)
        begun = request.full_blocks * config.block_size > config.token_budget and request.context >= config.start_length
        if request.offload is not None and begun:
            add_device_tokens(memory, request, config.token_budget)
        return memory

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        if self.config.tail is not None and not on_second_device(self.config):
            store.keep_means(self.config.tail_tokens)
        room, batch, dim = room_for(self.config), store.batch, store.key_dim
        if self.ids is None or self.ids.shape[0] != batch or self.ids.device != store.device:
            self.ids = torch.full((batch, store.heads, room), -1, dtype=torch.int32, device=store.device)
        if self.predictor is None:
            return
        if self.queries is None or not self.queries.fits(batch, q_heads, dim, store.dtype, store.device):
            self.queries = QueryRing(batch, q_heads, self.predictor.slots, dim, store.dtype, store.device)
        self.queries.clear()

    # ------------------------------------------------------------------ a step

    @property
    def observes(self) -> bool:
        return self.predictor is not None or super().observes

    @no_inference_mode
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        super().observe(q, k, valid, store, new)
        if self.predictor is None or store.capturing:
            return  # no queries are kept; or this one is stored beside the step, by note()
        lengths, end = store.held.lengths, store.coming
        if q is k:  # something else attends: there is no query
            self.chosen = False
            self.queries.forget(end)
            return
        if self.queries.held.shape[1] != q.shape[1]:  # the layer began without queries
            held = self.queries
            self.queries = QueryRing(store.batch, q.shape[1], held.size, q.shape[3], store.dtype, store.device)
            self.queries.forget(lengths)
        picks = None if valid is None else store.table_of_rows.picks(valid)
        # Of some of a prompt's tokens the queries are there as they are the keys; of others the last ones only.
        self.queries.store(q, lengths, end, picks, k.shape[2])

    def plan(self, store: LayerStore) -> Plan:
        if self.labels.calibrating:
            return planned(learns=True, captured=self.labels.goes_on)
        if not selects(self.config, store):
            return DENSE
        if self.below_crossover(store):
            return CROSSOVER
        return planned("chosen" if self.chosen else "dense", True, self.chosen and self.paged)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        return self.attend_to(q, self.ids, store, params, plan.paged)

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().account(q, store, plan, tally)
        if plan.ahead:  # behind what the step has sealed
            store.counters.index_bytes += self.labels.nbytes_read(store, tally.blocks + tally.sealed)
        if not plan.dense:
            store.count_means(tally)

    # ------------------------------------------------------------------ the next step

    def prepare(self, store: LayerStore) -> Plan:
        self.queries.rewind(store.held.lengths)
        plan = self.plan(store)
        if plan.ahead:
            self.enter(store)
        return plan

    def note(self, q: Tensor, valid: Tensor | None, store: LayerStore, plan: Plan) -> None:
        # Scores then begin as soon as attention has ended, and meet linear layers of many programs rather than of few.
        # Measured on an H200, 8 x 32k, 16 x 16k and 1 x 128k: 6.46, 6.55 and 4.81 ms, with the query alone stored here
        # 6.54, 6.90, 5.24, with all of it behind attention 6.85, 7.01, 4.75, with scores here as well 6.78, 6.92, 5.19.
        # Other orders: benchmarks/NOTES.md, "Choosing from all tokens".
        self.queries.push(q[:, :, None], valid, store.step_rows.past)
        if plan.ahead:
            self._predicted = self._predict()

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        super().look_ahead(q, store, plan)
        if not plan.ahead:
            return
        self.chosen = True
        self.choose(store)
        self.paged = self.bring(self.ids, store)

    def _predict(self) -> Tensor:
        """The next query ``[batch, Hq, Dk]``."""
        queries = self.queries
        return self.predictor.predict(queries.held, queries.position, queries.count)

    def choose(self, store: LayerStore) -> None:
        """Write the tokens that the predicted query wants to :attr:`ids`."""
        config, predicted = self.config, self._predicted
        self._predicted = None
        scores = self.scores(self._predict() if predicted is None else predicted, store)
        ids = self.ids[..., : config.token_budget]
        token_select(scores, None, config.token_budget, store.block_size, rows=store.rows, out=ids)

    def scores(self, q: Tensor, store: LayerStore, out: Tensor | None = None) -> Tensor:
        """Scores of all tokens in full blocks for ``q [batch, Hq, Dk]``: ``[batch, H, n]``.

        What is behind a row's sealed tokens may be anything.
        """
        return self.labels.scores(q, store, out=out, fill=False)

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        if self.queries is not None:
            self.queries.end = store.held.lengths
        if plan.ahead:
            self.chosen, self.paged = True, self.tokens is not None


def selects(config: PredictiveConfig, store: LayerStore, all_of: int | None = None) -> bool:
    """Steps attend to a selection at this length; that changes only where a block is sealed.

    ``all_of``: so many tokens in full blocks are all attended to; default: the budget.
    """
    held = store.full_blocks * store.block_size
    if held <= (config.token_budget if all_of is None else all_of):
        return False
    return held + config.window + config.max_draft >= config.start_length


def room_for(config: PredictiveConfig) -> int:
    """Tokens that a row and KV head can hold chosen: the budget, in whole blocks."""
    return -(-config.token_budget // config.block_size) * config.block_size


def on_second_device(config: PredictiveConfig) -> bool:
    """Another device keeps the blocks, and chooses."""
    return config.cache_rank not in (None, "stream", "host")


def predictor_of(config: PredictiveConfig) -> QueryPredictor | CustomPredictor:
    """What predicts from earlier steps' queries."""
    return make_predictor(config.prediction, config.predictor_window, config.predictor_epsilon)


def queries_bytes(request: Request) -> int:
    """Bytes of the latest queries and of the ids of chosen tokens, all layers."""
    config, batch = request.config, request.batch
    slots = None if config.by_layer else predictor_of(config).slots
    rings = 0
    for each in () if slots is None else request.layers:
        rings += batch * (request.query_heads * slots * each.query_dim * request.item + 12)
    return rings + sum(batch * each.heads * room_for(config) * 4 for each in request.layers)
