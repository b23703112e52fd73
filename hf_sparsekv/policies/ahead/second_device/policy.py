"""Predictive selection on a second device, which follows what is cached and hands over what it has chosen.

Source: AsyncSpade sections 4.1 and 4.3, Inference Rank and Cache Rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from hf_sparsekv_config.predictive import PredictiveConfig
from hf_sparsekv_config.sparse import OffloadConfig

from ....kv.counters import Tally
from ....kv.store import LayerStore
from ....ops._dispatch import use_triton
from ....ops.selection.topk_select import token_select
from ....predictor.channels import LabelChannels
from ....tensors import no_inference_mode
from ....types import AttentionParams
from ...base import Policy
from ...label_index import label_bytes
from ...launch import Launch
from ...measured import PackStats
from ...memory import Memory, Request
from ...plan import Plan, planned
from ...shared import Labelled
from ..chosen_before import ChosenBefore
from ..earlier_queries import EarlierQueriesPolicy
from ..predicted_tokens import ids_bytes, room_for, whole_until
from ..query_ring import SLOTS, queries_bytes
from .packed import Packed
from .replica import PeerDevice, PrimaryStore


class ReplicaPolicy(EarlierQueriesPolicy):
    """A layer's share on the device that chooses: all that a step uses there has an address that is kept."""

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, channels: LabelChannels | None, peer: PeerDevice
    ) -> None:
        self.peer = peer
        self._memory: tuple | None = None  # cached by shape, because every step needs it
        super().__init__(config, layer_idx, False, channels)

    def memory(self, store: LayerStore) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Where predicted queries and all scores go, and what selecting and packing need beside them."""
        wanted = *self.queries.held.shape, store.block_table.shape[1], store.dtype
        if self._memory is None or self._memory[0] != wanted:
            self._memory = wanted, self._make_memory(store)
        return self._memory[1]

    def _make_memory(self, store: LayerStore) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        peer, (batch, heads, _, dim), stream_index = (
            self.peer,
            self.queries.held.shape,
            self.peer.stream_index(self.layer_idx),
        )
        predicted = peer.buffer("predicted", (batch, heads, dim), store.dtype, stream_index)
        room = store.block_table.shape[1] * store.block_size
        scores = peer.buffer("scores", (batch, store.heads, room), torch.float32, stream_index)
        scratch = None
        if use_triton(scores):
            from ....ops.selection.topk_select.triton import scratch_size

            scratch = peer.buffer("select", (scratch_size(scores, self.config.budget),), torch.int32, stream_index)
        return predicted, scores, scratch, peer.buffer("pack", (2 * self.ids.numel(),), torch.int32, stream_index)

    def choose(self, store: LayerStore) -> None:
        budget = self.config.budget
        predicted, scores, scratch, _ = self.memory(store)
        self.queries.predict(predicted)
        scores = scores[..., : store.table.shape[1] * store.block_size]
        self.scores(predicted, store, scores)
        scratch = scratch if store.capturing else None  # it is for all that there is room for
        how = {"rows": store.rows, "out": self.ids[..., :budget], "scratch": scratch}
        token_select(scores, None, budget, store.block_size, **how)


class SecondDevicePolicy(ChosenBefore):
    """A layer's share on the device that attends; :attr:`replica` is the one on the device that chooses.

    Chosen tokens are kept together here twice. A step attends to one of the two while the other is being written; they
    change places when that is done. A captured step, in which all of this is in order, writes the one in use.

    A late selection is waited for (``strict``), or the previous one is used again. A reused selection must know all
    full blocks: their tokens have left the ring.
    """

    HOST: ClassVar = {
        "late": 0,  # layer calls that used an older selection
        "at": 0,  # the pack in use
        "known": None,  # full blocks that the selection in use has chosen among
        "pending": None,  # the next one's end (an event, or None) and its full blocks
    }
    PARTS: ClassVar = ("replica", "packs")

    late: int
    at: int
    known: int | None
    pending: tuple[torch.cuda.Event | None, int] | None
    config: PredictiveConfig
    store_type = PrimaryStore

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, channels: LabelChannels | None, peer: PeerDevice
    ) -> None:
        super().__init__(config, layer_idx, False)
        self.replica = ReplicaPolicy(config, layer_idx, channels, peer)
        self.peer = peer
        self.packs: list[Packed] = []
        # Look-ahead gives the other device each token; selections that have come are taken over between steps.
        self.launch = Launch(low_priority=False, always=True, each_step=True)

    def reset(self) -> None:
        with self.peer.after_all_steps():
            super().reset()

    @no_inference_mode
    def start(self, store: PrimaryStore, q_heads: int) -> None:
        if store.latent:
            raise ValueError(
                "a cache rank on a second device does not hold latents (MLA): take cache_rank='stream' or 'host'"
            )
        super().start(store, q_heads)
        with self.peer.entered(store.device):
            self.replica.start(store.follow(self.peer), q_heads)
            shape = (store.batch, store.heads, room_for(self.config), store.key_dim + store.value_dim)
            held = [(tuple(packed.kv.shape), packed.kv.dtype, packed.kv.device) for packed in self.packs]
            if held != [(shape, store.dtype, store.device)] * 2:
                made = *shape, store.dtype, self.peer.device, self.peer.enabled, store.device
                self.packs = [Packed(*made) for _ in range(2)]
            for packed in self.packs:
                packed.forget()

    @property
    def _calibrating(self) -> bool:
        return self.replica.labels.calibrating

    # ------------------------------------------------------------------ a step

    @no_inference_mode
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: PrimaryStore, new: int | None = None) -> None:
        if store.capturing:
            return
        store.replica.held = store.held  # whatever a capture that failed has left
        store.replica.coming = store.coming
        with self.peer.entered(store.device, q, k, valid):
            there = self.peer.device
            known = None if valid is None else valid.to(there)
            if q is k:
                k = k.to(there)
                self.replica.observe(k, k, known, store.replica)
            elif self._calibrating:
                self.replica.observe(q.to(there), k.to(there), known, store.replica)
            else:  # of the keys nothing but their number is asked
                self.replica.observe(q[:, :, -SLOTS:].to(there), k, known, store.replica)
        if q is k:
            self.chosen, self.pending = False, None

    def plan(self, store: PrimaryStore) -> Plan:
        # Dense attention reads the other device, which is slower at every length. Tokens that are not brought here are
        # read there.
        held = store.full_blocks * store.block_size
        ahead = not self._calibrating and held > max(0, whole_until(self.config))
        captured = self.peer.device.type == store.device.type and not (self._calibrating or self._allocates(store))
        return planned("chosen" if ahead and self.chosen else "dense", ahead, pack=self.at, captured=captured)

    def _allocates(self, store: PrimaryStore) -> bool:
        """Whether choosing allocates memory there, which a captured step cannot: it has no pool there."""
        if self.config.token_reduce != "mean" or not use_triton(self.peer.enabled):
            return False
        from ....ops._group import MANY

        return self.replica.queries.held.shape[1] > MANY * store.heads

    def prepare(self, store: PrimaryStore) -> Plan:
        self._take(store, strict=True)
        lengths = store.held.lengths
        if any(end > length for end, length in zip(self.replica.queries.end, lengths)):
            with self.peer.entered(store.device):
                self.replica.queries.rewind(lengths)
        self.replica.memory(store.replica)  # not while a step is being captured
        self.peer.join(store.device)
        return self.plan(store)

    def attend(self, q: Tensor, store: PrimaryStore, plan: Plan, params: AttentionParams) -> Tensor:
        if not store.capturing:
            self._take(store, self.config.strict)
        packed = self.packs[self.at]
        return store.attend(q, packed.page_ids, "token", params, pages=packed.pages(store.block_size))

    def _take(self, store: PrimaryStore, strict: bool) -> None:
        """Go over to the next selection; not if it is late and the one in use will do."""
        if self.pending is None:
            return
        event, known = self.pending
        if not strict and self.known == store.full_blocks and event is not None and not event.query():
            self.late += 1
            return
        if event is not None:
            event.wait(torch.cuda.current_stream(store.device))
        self.at, self.known, self.pending = 1 - self.at, known, None

    def look_ahead(self, q: Tensor, store: PrimaryStore, plan: Plan) -> None:
        replica, used = store.replica, () if store.new is None else (q, *store.new)
        forked, entered = self.peer.forked, self.peer.entered
        with forked(store.device, self.layer_idx) if store.capturing else entered(store.device, *used):
            replica.capturing = store.capturing
            try:
                if store.new is not None:
                    self._follow(q, store)
                    replica.seal_due(self.replica)
                self._choose(store, plan)
            finally:
                replica.capturing = False

    def _follow(self, q: Tensor, store: PrimaryStore) -> None:
        """Hand over the step's query, key and value."""
        replica = store.replica
        given, store.new = store.new, None
        assert given is not None
        reach = self.peer.reach
        k, v, valid = reach("k", given[0]), reach("v", given[1]), reach("valid", given[2])
        if store.capturing:
            store.kept = given
            q = reach("q", q[:, :, None])
            self.replica.queries.push(q, valid, replica.step_rows.past)
        replica.append(k, v, valid, store._taken)

    def _choose(self, store: PrimaryStore, plan: Plan) -> None:
        replica = store.replica
        if not plan.ahead:
            self.chosen, self.pending, self.known = False, None, None
            return
        if self.pending is not None and self.pending[1] == replica.full_blocks and not self.config.strict:
            event = self.pending[0]
            if event is not None and not event.query():
                return  # it is late already; another one after it would never be in time
        self.replica.choose(replica)
        at = self.at if store.capturing else 1 - self.at  # in a captured step what it has attended to is over
        self.packs[at].update(self.replica.ids, replica.pool.kv, replica.table, self.replica.memory(replica)[-1])
        self.chosen = True
        if store.capturing:
            self.known = replica.full_blocks
        else:
            self.pending = self.peer.mark(), replica.full_blocks

    def account(self, q: Tensor, store: PrimaryStore, plan: Plan, tally: Tally) -> None:
        super().account(q, store, plan, tally)
        if plan.ahead:  # after what the step has sealed
            store.counters.index_bytes += self.replica.labels.nbytes_read(store.replica, tally.blocks + tally.sealed)

    def replayed(self, store: PrimaryStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        self.replica.queries.end = store.held.lengths
        if plan.ahead:
            self.chosen, self.known = True, store.full_blocks

    # ------------------------------------------------------------------ numbers

    def measured(self) -> tuple[PackStats, ...]:
        if not self.packs:
            return ()
        with self.peer.after_all_steps():
            one, other = (packed.counters for packed in self.packs)
            needed, copied = (one + other).tolist()
        kv = self.packs[0].kv
        size = copied * kv.shape[-1] * kv.itemsize
        return (PackStats(needed=needed, copied=copied, bytes=size, late=self.late),)

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in self.packs)

    # ------------------------------------------------------------------ capture

    def snapshot(self) -> dict:
        with self.peer.after_all_steps():
            return super().snapshot()

    def restore_device(self, saved: dict) -> None:
        with self.peer.on_stream():
            super().restore_device(saved)
        if self.packs:
            self.peer.join(self.packs[0].kv.device)  # a graph's work there is after this device's, not after that

    # ------------------------------------------------------------------ rows

    def reopened(self) -> None:
        self.chosen, self.pending, self.known = False, None, None
        self.replica.reopened()
        if self.packs:
            with self.peer.entered(self.packs[0].kv.device):
                for packed in self.packs:
                    packed.forget()

    def map_rows(self, index: Tensor) -> None:
        with self.peer.entered(index.device, index):
            super().map_rows(index.to(self.peer.device))
        self.peer.join(index.device)

    def copy(self) -> SecondDevicePolicy:
        if not self.packs:
            return super().copy()
        home = self.packs[0].kv.device
        self.peer.join(home)  # what is being chosen is copied when it is there
        with self.peer.entered(home):
            new = super().copy()
        self.peer.join(home)
        return new


class SecondDevice(Labelled):
    """State that the layers of such a cache share: where and in which order the other device works.

    Raises:
        ValueError: there is no such device, or the channel file is missing or something else.
    """

    places = (*Labelled.places, "second")
    rows_join = False

    def __init__(self, policy: type[Policy], config: PredictiveConfig, offload: OffloadConfig | None) -> None:
        super().__init__(policy, config, offload)
        assert config.cache_rank is not None
        self.peer = PeerDevice(torch.device(config.cache_rank))

    def policy(self, layer_idx: int) -> SecondDevicePolicy:
        return SecondDevicePolicy(self.config, layer_idx, self.channels, self.peer)

    def second_bytes(self, policies: Iterable[Policy]) -> int:
        return sum(policy.replica.nbytes for policy in policies if isinstance(policy, SecondDevicePolicy))

    def check_file(self, loading: bool) -> None:
        if loading:
            raise ValueError("a cache cannot be loaded for a second device yet: take another cache_rank")
        raise ValueError("a cache whose tokens are chosen on a second device cannot be saved yet")

    @contextmanager
    def trial(self) -> Iterator[None]:
        with self.peer.paused():
            yield

    def resume(self) -> None:
        self.peer.resume()

    def rejoin(self, stream: torch.cuda.Stream | None) -> None:
        self.peer.rejoin(stream)

    @classmethod
    def needs(cls, request: Request) -> Memory:
        """The keys and values of sparse layers are there alone; here are the copies of what is chosen, twice."""
        config, batch, recent = request.config, request.batch, request.recent_tokens
        size, block_capacity = config.block_size, request.block_capacity
        if config.max_length is None:  # the replica is made when its table is there
            block_capacity = request.room(request.table * batch)
        memory = Memory(
            blocks=0, second=ids_bytes(request) + queries_bytes(request), device_pages=2 * copied_bytes(request)
        )
        for layer in request.layers:
            token = request.token(layer)
            memory.second += block_capacity * size * token + batch * recent * token
            memory.second += block_capacity * label_bytes(request, layer)
        if torch.device(config.cache_rank).type != "cpu":  # which is this device, and has one table
            memory.second += request.table_bytes
        return memory


def copied_bytes(request: Request) -> int:
    """Bytes of the copies of chosen tokens, all layers."""
    tokens = request.batch * room_for(request.config)
    return sum(tokens * each.heads * (each.width * request.item + 12) + 16 for each in request.layers)
