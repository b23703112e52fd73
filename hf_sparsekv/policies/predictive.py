"""Selection for a predicted query, one step ahead and beside the computation (AsyncSpade section 4)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..attention.exact import AttentionSpec
from ..config import OffloadConfig, PredictiveConfig
from ..kv.lasting import lasting, take_rows
from ..kv.store import LayerStore
from ..ops.token_score import token_score
from ..ops.topk_select import token_select
from ..predictor.channels import LabelChannels
from ..predictor.query import make_predictor
from ..telemetry.stats import PackStats
from .base import Policy
from .memory import Memory, Request
from .packed import Packed
from .query_ring import QueryRing
from .registry import register
from .shared import Labelled
from .two_level import TwoLevelPolicy, label_bytes


@register("predictive", PredictiveConfig, about="tokens chosen a step before, for a predicted query (AsyncSpade)")
class PredictivePolicy(TwoLevelPolicy):
    """The token level of two-level selection over all sealed blocks, for the query that the next step will have.

    State: the latest queries; the tokens chosen for the next step; with blocks in host memory, their copies. A step
    attends to what the last one has chosen and to everything that is not sealed; sealing a block chooses anew, so
    every token is either near or could have been chosen.
    """

    config: PredictiveConfig
    method = "predictive"
    second_device: ClassVar[type[Labelled]]  # who shares and plans where another device chooses: it says so itself

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        Policy.__init__(self, config, layer_idx, offloaded)
        self.coarse, self.fine, self.lag = False, True, False
        self.fetches = offloaded
        # Measured on an H200, 8 x 32k on the device (benchmarks/NOTES.md, "Choosing from all tokens"): choosing behind
        # the step 7.5 ms, among it 7.1; fetching yields.
        self.yields = offloaded
        self.fixed = channels
        self.predictor = make_predictor(config.predictor, config.predictor_window, config.predictor_epsilon)
        self.bundle = config.layers_per_pack
        self.all_of = config.token_budget  # so many tokens in sealed blocks are all attended to
        self.queries: QueryRing | None = None
        self.packed: Packed | None = None
        self.ids: Tensor | None = None  # TokenIds [batch, H, room] for the next step
        self.reset()

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
        return (cls.second_device if on_second_device(config) else Labelled)(cls, config, offload)

    @classmethod
    def crossover(cls, config: PredictiveConfig, offloaded: bool) -> str | None:
        return None if on_second_device(config) else cls.method

    @classmethod
    def needs(cls, request: Request) -> Memory:
        if on_second_device(request.config):
            return cls.second_device.needs(request)
        memory, config, copies = Memory(blocks=request.blocks), request.config, copied_bytes(request)
        memory.tables = queries_bytes(request)
        memory.labels = sum(request.slots * label_bytes(request, layer) for layer in request.layers)
        begun = request.sealed * config.block_size > config.token_budget and request.context >= config.start_length
        room = None if request.offload is None else request.offload.device_pool
        if request.offload is not None and begun and (room is None or copies <= room):
            memory.frames = copies
        return memory

    def reset(self) -> None:
        super().reset()
        self.chosen = False  # the ids are a selection for the next step
        self._valid: Tensor | None = None  # of the new columns of a step that is being captured
        self._predicted: Tensor | None = None  # in such a step, from its query to the end of its attention
        if self.packed is not None:
            self.packed.counters.zero_()

    @lasting
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        room, batch, dim = room_for(self.config), store.batch, store.key_dim
        if self.ids is None or self.ids.shape[0] != batch or self.ids.device != store.device:
            self.ids = torch.full((batch, store.heads, room), -1, dtype=torch.int32, device=store.device)
            self.packed = None
        if self.queries is None or not self.queries.fits(batch, q_heads, dim, store.dtype, store.device):
            self.queries = QueryRing(batch, q_heads, self.predictor.slots, dim, store.dtype, store.device)
        self.queries.clear()
        if self.packed is not None:
            self.packed.forget()

    # ------------------------------------------------------------------ a step

    @property
    def observes(self) -> bool:
        return True

    @lasting
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        super().observe(q, k, valid, store)
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

    def _selects(self, store: LayerStore) -> bool:
        """Steps attend to a selection at this length; it changes only where a block is sealed."""
        config = self.config
        if self._calibrating or store.sealed * store.block_size <= self.all_of:
            return False
        recent = config.window + config.max_draft
        return store.sealed * store.block_size + recent >= config.start_length

    def looks_ahead(self, store: LayerStore) -> bool:
        """Tokens are chosen for the next step."""
        return self._selects(store) and not self.below_crossover(store)

    def _attends(self, store: LayerStore) -> str:
        """``"chosen"``, ``"dense"``, or ``"quick"``: dense, because that is as quick."""
        if not self._selects(store):
            return "dense"
        if self.below_crossover(store):
            return "quick"
        return "chosen" if self.chosen else "dense"

    def mode(self, store: LayerStore) -> tuple[str, bool, bool] | str | None:
        """``(what is attended, whether tokens are chosen for the next step, whether this one's are copied)``."""
        if self._calibrating:
            return super().mode(store)
        attends = self._attends(store)
        placed = self.placed and attends == "chosen"
        return "dense" if attends == "quick" else attends, self.looks_ahead(store), placed

    def attend(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        if self._attends(store) != "chosen":
            return store.attend(q, None, "all", spec)
        if self.watch is not None:
            self.watch.mark_tokens(self.ids, store.block_size)
        if self.placed:
            frames = self.packed.frames(store.block_size)
            return store.attend(q, self.packed.places, "token", spec, frames=frames)
        return store.attend(q, self.ids, "token", spec)

    def account(self, store: LayerStore) -> None:
        attends = self._attends(store)
        store.count_step("token" if attends == "chosen" else "all")
        store.counters.crossover += attends == "quick"

    # ------------------------------------------------------------------ the next step

    def prepare(self, store: LayerStore) -> None:
        self.queries.rewind(store.length)
        if self.looks_ahead(store):
            self._enter(store)

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

    def note(self, q: Tensor, store: LayerStore) -> None:
        # Scores then begin as soon as attention has ended, and meet linear layers of many programs rather than of few.
        # Measured on an H200, 8 x 32k, 16 x 16k and 1 x 128k: 6.46, 6.55 and 4.81 ms, with the query alone stored here
        # 6.54, 6.90, 5.24, with all of it behind attention 6.85, 7.01, 4.75, with scores here as well 6.78, 6.92, 5.19.
        # Other orders: benchmarks/NOTES.md, "Choosing from all tokens".
        self.queries.push(q[:, :, None], self._valid, store.clock.held(store.device))
        if self.looks_ahead(store):
            self._predicted = self._predict()

    def look_ahead(self, q: Tensor, store: LayerStore, again: bool = False) -> None:
        self.chosen = self.looks_ahead(store)
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
        """Scores of all tokens in sealed blocks for ``q [batch, Hq, Dk]``: ``[batch, H, n]``."""
        fields, reduce = store.pool.fields, self.config.token_reduce
        labels = fields["codes"], fields.get("qparams"), self.channels
        return token_score(q, *labels, fields["flags"], store.table, None, reduce, out=out)

    def _index_bytes(self, store: LayerStore) -> int:
        return store.batch * store.heads * store.sealed * store.block_size * self._label_bytes(store)

    def replayed(self, store: LayerStore, looked: bool) -> None:
        self.queries.end = store.length
        if self._calibrating:
            self.stats.tokens += 1
        elif looked:
            self.chosen, self.placed = True, self.packed is not None
            store.count_index(self._index_bytes(store))
        elif not self.looks_ahead(store):
            self.chosen = False

    @property
    def nbytes(self) -> int:
        queries = 0 if self.queries is None else self.queries.nbytes + self.ids.nbytes
        return queries + (0 if self.packed is None else self.packed.nbytes)

    def packing(self) -> PackStats | None:
        if self.packed is None:
            return None
        needed, copied = self.packed.counters.tolist()
        token = self.packed.kv.shape[-1] * self.packed.kv.itemsize
        return PackStats(needed=needed, copied=copied, bytes=copied * token)

    # ------------------------------------------------------------------ capture

    @property
    def addresses(self) -> tuple[int, ...]:
        own = (self.channels, self.ids, self.stats.q)
        held = () if self.queries is None else self.queries.addresses
        packed = () if self.packed is None else self.packed.addresses
        return (*(0 if t is None else t.data_ptr() for t in own), *held, *packed)

    def save(self) -> dict:
        return {
            **super().save(),
            "chosen": self.chosen,
            "ids": self.ids.clone(),
            "end": self.queries.end,
            "valid": self._valid,
        }

    def restore_host(self, saved: dict) -> None:
        super().restore_host(saved)
        self.chosen, self._valid, self.queries.end = saved["chosen"], saved["valid"], saved["end"]
        self._predicted = None  # of a step that was broken off

    def restore_device(self, saved: dict) -> None:
        super().restore_device(saved)
        self.ids.copy_(saved["ids"])

    # ------------------------------------------------------------------ files

    def to_file(self, about: dict, store: LayerStore) -> dict[str, Tensor]:
        tensors, queries = super().to_file(about, store), self.queries
        queries.rewind(store.length)  # a crop() leaves that to the next step
        about["ring"] = list(queries.held.shape[1:3])
        tensors |= {"queries": queries.held, "queries_from": queries.first}
        if self.chosen:
            about["chosen"], tensors["chosen"] = self.ids.shape[2], self.ids
        return tensors

    def file_fits(self, about: dict) -> dict[str, bool]:
        ring = about["ring"]
        return super().file_fits(about) | {"chosen": True, "ring": ring is not None and ring[0] % about["heads"] == 0}

    @classmethod
    def reserves(cls, config: PredictiveConfig, offloaded: bool) -> int:
        return room_for(config)

    def from_file(self, about: dict, held: dict[str, Tensor], store: LayerStore) -> None:
        super().from_file(about, held, store)
        if "queries" not in held:
            raise ValueError("ring")
        self.queries.load(*(held.pop(name).to(store.device) for name in ("queries", "queries_from")), store.length)
        chosen = held.pop("chosen", None)
        if chosen is not None and self.ids.shape == chosen.shape:  # else a step attends to everything
            self.ids.copy_(chosen)
            self.chosen = True

    # ------------------------------------------------------------------ rows

    def reopened(self) -> None:
        self.chosen = False  # one step attends to everything
        if self.packed is not None:
            self.packed.forget()  # other tokens may come to these columns

    @lasting
    def map_rows(self, index: Tensor) -> None:
        super().map_rows(index)
        if self.ids is not None:
            self.ids = take_rows(self.ids, index)
            self.queries.map_rows(index)
        if self.packed is not None:
            self.packed.map_rows(index)

    @lasting
    def copy(self) -> PredictivePolicy:
        new = super().copy()
        new.packed = None  # the copy's first step reads its tokens where they live
        if self.ids is not None:
            new.ids, new.queries = self.ids.clone(), self.queries.copy()
        return new


def room_for(config: PredictiveConfig) -> int:
    """Tokens that a row and KV head can hold chosen: the budget, in whole blocks."""
    return -(-config.token_budget // config.block_size) * config.block_size


def on_second_device(config: PredictiveConfig) -> bool:
    """Another device keeps the blocks, and chooses."""
    return config.cache_rank not in (None, "stream", "host")


def queries_bytes(request: Request) -> int:
    """Bytes of the latest queries and of the ids of chosen tokens, all layers."""
    config, batch = request.config, request.batch
    slots = make_predictor(config.predictor, config.predictor_window, config.predictor_epsilon).slots
    rings = (batch * (request.query_heads * slots * each.query_dim * request.item + 8) + 4 for each in request.layers)
    return sum(rings) + sum(batch * each.heads * room_for(config) * 4 for each in request.layers)


def copied_bytes(request: Request) -> int:
    """Bytes of the copies of chosen tokens, all layers."""
    tokens = request.batch * room_for(request.config)
    return sum(tokens * each.heads * (each.width * request.item + 12) + 16 for each in request.layers)


def packed_bytes(store: LayerStore, room: int) -> int:
    """Bytes of the copies of one layer's chosen tokens."""
    return store.batch * store.heads * room * (store.token_bytes + 12) + 16
