"""Predictive selection on a second device, which follows what is cached and hands over what it has chosen.

Source: AsyncSpade sections 4.1 and 4.3, Inference Rank and Cache Rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from ..config import OffloadConfig, PredictiveConfig
from ..kv.store import LayerStore
from ..ops._dispatch import use_triton
from ..ops.topk_select import token_select
from ..policies.base import Policy
from ..policies.label_index import label_bytes
from ..policies.measured import PackStats
from ..policies.memory import Memory, Request
from ..policies.packed import Packed
from ..policies.plan import Plan, planned
from ..policies.predictive import PredictivePolicy, copied_bytes, queries_bytes, room_for, selects
from ..policies.shared import Labelled
from ..predictor.channels import LabelChannels
from ..predictor.query import QueryPredictor
from ..tensors import lasting
from ..types import AttentionSpec
from .replica import LeadingStore, Rank


class TwinPolicy(PredictivePolicy):
    """A layer's share on the device that chooses: all that a step uses there has an address that is kept."""

    def __init__(self, config: PredictiveConfig, layer_idx: int, channels: LabelChannels | None, rank: Rank) -> None:
        self.rank = rank
        self._memory: tuple | None = None  # what it is for, and where it is: every step asks
        super().__init__(config, layer_idx, False, channels)

    def memory(self, store: LayerStore) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Where predicted queries and all scores go, and what selecting and packing need beside them."""
        wanted = *self.queries.held.shape, store.slots.shape[1], store.dtype
        if self._memory is None or self._memory[0] != wanted:
            self._memory = wanted, self._make_memory(store)
        return self._memory[1]

    def _make_memory(self, store: LayerStore) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        rank, (batch, heads, _, dim), lane = self.rank, self.queries.held.shape, self.rank.lane(self.layer_idx)
        predicted = rank.buffer("predicted", (batch, heads, dim), store.dtype, lane)
        room = store.slots.shape[1] * store.block_size
        scores = rank.buffer("scores", (batch, store.heads, room), torch.float32, lane)
        scratch = None
        if use_triton(scores):
            from ..ops.topk_select.triton import scratch_size

            scratch = rank.buffer("select", (scratch_size(scores, self.config.token_budget),), torch.int32, lane)
        return predicted, scores, scratch, rank.buffer("pack", (2 * self.ids.numel(),), torch.int32, lane)

    def choose(self, store: LayerStore) -> None:
        queries, budget = self.queries, self.config.token_budget
        predicted, scores, scratch, _ = self.memory(store)
        self.predictor.predict(queries.held, queries.position, queries.count, out=predicted)
        scores = scores[..., : store.table.shape[1] * store.block_size]
        self.scores(predicted, store, scores)
        scratch = scratch if store.fixed else None  # it is for all that there is room for
        token_select(scores, None, budget, store.block_size, out=self.ids[..., :budget], scratch=scratch)


class SecondDevicePolicy(Policy):
    """A layer's share on the device that attends; :attr:`twin` is the one on the device that chooses.

    Chosen tokens are kept together here twice. A step attends to one of the two while the other is being written; they
    change places when that is done. A captured step, in which all of this is in order, writes the one in use.

    A selection that comes late is waited for (``strict``), or the one before is used again, but never one that does not
    know all sealed blocks: their tokens have left the ring.
    """

    HOST: ClassVar = {
        "late": 0,  # layer calls that used an older selection
        "at": 0,  # the pack in use
        "known": None,  # sealed blocks that the selection in use has chosen among
        "pending": None,  # the next one's end (an event, or None) and its sealed blocks
    }
    PARTS: ClassVar = ("twin", "packs")

    config: PredictiveConfig
    method = "predictive"
    yields = False
    store_type = LeadingStore

    def __init__(self, config: PredictiveConfig, layer_idx: int, channels: LabelChannels | None, rank: Rank) -> None:
        super().__init__(config, layer_idx, False)
        self.twin = TwinPolicy(config, layer_idx, channels, rank)
        self.rank = rank
        self.packs: list[Packed] = []
        self.bundle = config.layers_per_pack

    def reset(self) -> None:
        with self.rank.settled():
            super().reset()

    @lasting
    def start(self, store: LeadingStore, q_heads: int) -> None:
        if store.latent:
            raise ValueError(
                "a cache rank on a second device does not hold latents (MLA): take cache_rank='stream' or 'host'"
            )
        super().start(store, q_heads)
        with self.rank.entered(store.device):
            self.twin.start(store.follow(self.rank), q_heads)
            shape = (store.batch, store.heads, room_for(self.config), store.key_dim + store.value_dim)
            held = [(tuple(packed.kv.shape), packed.kv.dtype, packed.kv.device) for packed in self.packs]
            if held != [(shape, store.dtype, store.device)] * 2:
                made = *shape, store.dtype, self.rank.device, self.rank.enabled, store.device
                self.packs = [Packed(*made) for _ in range(2)]
            for packed in self.packs:
                packed.forget()

    @property
    def _calibrating(self) -> bool:
        return self.twin.labels.calibrating

    # ------------------------------------------------------------------ a step

    @lasting
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LeadingStore, new: int | None = None) -> None:
        if store.fixed:
            return
        store.twin.length = store.length  # whatever a capture that failed has left
        with self.rank.entered(store.device, q, k, valid):
            there = self.rank.device
            known = None if valid is None else valid.to(there)
            if q is k:
                k = k.to(there)
                self.twin.observe(k, k, known, store.twin)
            elif self._calibrating:
                self.twin.observe(q.to(there), k.to(there), known, store.twin)
            else:  # of the keys nothing but their number is asked
                self.twin.observe(q[:, :, -self.twin.queries.size :].to(there), k, known, store.twin)
        if q is k:
            self.chosen, self.pending = False, None

    def plan(self, store: LeadingStore) -> Plan:
        # What is attended to densely is on the other device: that is never as quick, whatever the length.
        ahead = not self._calibrating and selects(self.config, store, 0)  # what is not brought here is read there
        captured = self.rank.device.type == store.device.type and not (self._calibrating or self._allocates(store))
        return planned("chosen" if ahead and self.chosen else "dense", ahead, pack=self.at, captured=captured)

    def _allocates(self, store: LeadingStore) -> bool:
        """Choosing takes memory there that would be somebody else's by the next replay: a graph has none there."""
        if not isinstance(self.twin.predictor, QueryPredictor):
            return True  # a user's may
        if self.config.token_reduce != "mean" or not use_triton(self.rank.enabled):
            return False
        from ..ops._group import MANY

        return self.twin.queries.held.shape[1] > MANY * store.heads

    def prepare(self, store: LeadingStore) -> Plan:
        self._take(store, strict=True)
        if self.twin.queries.end > store.length:
            with self.rank.entered(store.device):
                self.twin.queries.rewind(store.length)
        self.twin.memory(store.twin)  # not while a step is being captured
        self.rank.join(store.device)
        return self.plan(store)

    def attend(self, q: Tensor, store: LeadingStore, plan: Plan, spec: AttentionSpec) -> Tensor:
        if plan.dense:
            return store.attend(q, None, "all", spec)
        if not store.fixed:
            self._take(store, self.config.strict)
        packed = self.packs[self.at]
        return store.attend(q, packed.places, "token", spec, frames=packed.frames(store.block_size))

    def _take(self, store: LeadingStore, strict: bool) -> None:
        """Go over to the next selection; not if it is late and the one in use will do."""
        if self.pending is None:
            return
        event, known = self.pending
        if not strict and self.known == store.sealed and event is not None and not event.query():
            self.late += 1
            return
        if event is not None:
            event.wait(torch.cuda.current_stream(store.device))
        self.at, self.known, self.pending = 1 - self.at, known, None

    def look_ahead(self, q: Tensor, store: LeadingStore, plan: Plan, again: bool = False) -> None:
        twin, used = store.twin, () if store.new is None else (q, *store.new)
        forked, entered = self.rank.forked, self.rank.entered
        with forked(store.device, self.layer_idx) if store.fixed else entered(store.device, *used):
            twin.fixed = store.fixed
            try:
                self._follow(q, store)
                if not store.fixed:
                    twin.seal_due(self.twin)
                self._choose(store, plan, again)
            finally:
                twin.fixed = False
        if again:
            self.rank.join(store.device)

    def _follow(self, q: Tensor, store: LeadingStore) -> None:
        """Hand over the step's query, key and value, unless they are there."""
        twin = store.twin
        if store.new is None:
            twin.length = store.length
            return
        given, store.new = store.new, None
        k, v, valid = (self.rank.reach(name, tensor) for name, tensor in zip(("k", "v", "valid"), given))
        if store.fixed:
            store.kept = given
            q = self.rank.reach("q", q[:, :, None])
            self.twin.queries.push(q, valid, twin.clock.held(twin.device))
        twin.append(k, v, valid)

    def _choose(self, store: LeadingStore, plan: Plan, again: bool) -> None:
        twin = store.twin
        if not plan.ahead:
            self.chosen, self.pending, self.known = False, None, None
            return
        if self.pending is not None and self.pending[1] == twin.sealed and not self.config.strict:
            event = self.pending[0]
            if event is not None and not event.query():
                return  # it is late already; another one behind it would never be in time
        self.twin.choose(twin)
        in_place = store.fixed or again  # a captured step: what it has attended to is over
        at = self.at if in_place else 1 - self.at
        self.packs[at].update(self.twin.ids, twin.pool.kv, twin.table, self.twin.memory(twin)[-1])
        self.chosen = True
        if in_place:
            self.known = twin.sealed
        else:
            self.pending = self.rank.mark(), twin.sealed
        if again:  # a step needs its tokens once, whatever was copied for it
            self.packs[at].counters[:1] -= (self.twin.ids >= 0).sum()
        else:
            store.count_index(self.twin._index_bytes(twin))

    def replayed(self, store: LeadingStore, plan: Plan) -> None:
        store.twin.length, self.twin.queries.end = store.length, store.length
        if plan.ahead:
            self.chosen, self.known = True, store.sealed
            store.count_index(self.twin._index_bytes(store.twin))

    # ------------------------------------------------------------------ numbers

    def measured(self) -> PackStats | None:
        if not self.packs:
            return None
        with self.rank.settled():
            needed, copied = sum(packed.counters for packed in self.packs).tolist()
        kv = self.packs[0].kv
        return PackStats(needed=needed, copied=copied, bytes=copied * kv.shape[-1] * kv.itemsize, late=self.late)

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in self.packs)

    @property
    def second_bytes(self) -> int:
        return self.twin.nbytes

    # ------------------------------------------------------------------ capture

    def snapshot(self) -> dict:
        with self.rank.settled():
            return super().snapshot()

    def restore_device(self, saved: dict) -> None:
        with self.rank.on_stream():
            super().restore_device(saved)
        if self.packs:
            self.rank.join(self.packs[0].kv.device)  # a graph's work there is behind this device's, not behind that

    # ------------------------------------------------------------------ rows

    def reopened(self) -> None:
        self.chosen, self.pending, self.known = False, None, None
        self.twin.reopened()
        if self.packs:
            with self.rank.entered(self.packs[0].kv.device):
                for packed in self.packs:
                    packed.forget()

    def map_rows(self, index: Tensor) -> None:
        with self.rank.entered(index.device, index):
            super().map_rows(index.to(self.rank.device))
        self.rank.join(index.device)

    def copy(self) -> SecondDevicePolicy:
        if not self.packs:
            return super().copy()
        home = self.packs[0].kv.device
        self.rank.join(home)  # what is being chosen is copied when it is there
        with self.rank.entered(home):
            new = super().copy()
        self.rank.join(home)
        return new


class SecondDevice(Labelled):
    """What the layers of such a cache have in common: where and in which order the other device works.

    Raises:
        ValueError: there is no such device, or the channel file is missing or something else.
    """

    places = (*Labelled.places, "second")

    def __init__(self, policy: type[PredictivePolicy], config: PredictiveConfig, offload: OffloadConfig | None) -> None:
        super().__init__(policy, config, offload)
        self.rank = Rank(torch.device(config.cache_rank))

    def policy(self, layer_idx: int) -> SecondDevicePolicy:
        return SecondDevicePolicy(self.config, layer_idx, self.channels, self.rank)

    def check_file(self, loading: bool) -> None:
        if loading:
            raise ValueError("a cache cannot be loaded for a second device yet: take another cache_rank")
        raise ValueError("a cache whose tokens are chosen on a second device cannot be saved yet")

    @contextmanager
    def trial(self) -> Iterator[None]:
        with self.rank.paused():
            yield

    def resume(self) -> None:
        self.rank.resume()

    def rejoin(self, stream: torch.cuda.Stream) -> None:
        self.rank.rejoin(stream)

    @staticmethod
    def needs(request: Request) -> Memory:
        """The keys and values of sparse layers are there alone; here are the copies of what is chosen, twice."""
        config, batch, near = request.config, request.batch, request.near_tokens
        size, slots = config.block_size, request.room(request.table * batch)
        memory = Memory(blocks=0, second=queries_bytes(request), frames=2 * copied_bytes(request))
        for layer in request.layers:
            token = request.token(layer)
            memory.second += slots * (size * token + size + 4) + batch * near * token
            memory.second += batch * (request.table * 4 + near + 4)
            memory.second += slots * label_bytes(request, layer)
        return memory


PredictivePolicy.second_device = SecondDevice
