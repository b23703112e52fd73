"""Progressive selection: blocks in order of importance until enough mass is covered (PSA section 3)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..config import ProgressiveConfig
from ..kv.state import Held, State
from ..kv.store import LayerStore
from ..ops.block_rank import block_rank
from ..ops.progressive import MASS_ONE, TOTALS, Walk, WalkState, block_masses, progressive_decode
from ..ops.progressive.state import FIRST
from ..ops.seal import Index
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .base import Policy
from .block_metadata import BlockMetadata, bounds_bytes
from .measured import WalkStats
from .memory import Memory, Request
from .plan import CROSSOVER, DENSE, Plan, planned
from .registry import register

# estimate="scores": the logarithm of a block's mass rises by so much when its score rises by one logit. With these the
# estimated mass comes out as the true one on the small real model and on the GQA probe (docs/accuracy.md).
SLOPES = {"cuboid_mean": 0.7, "min_max": 0.5, "mean": 0.5}


NOTHING = (0, 0.0, 1.0, 0.0)  # audited: walks, their masses, the least, their estimates


class Walks(WalkState, State):
    """The operator's state, as what captures and beams follow."""

    TENSORS: ClassVar = {
        "limits": Held(rows=1, trial=True),
        "used": Held(trial=True),
        "mass": Held(trial=True),
        "chosen": Held(trial=True),
        "totals": Held(rows=None, trial=True),
    }

    def reset(self) -> None:
        self.totals.zero_()
        self.limits[0] = 0
        self.limits[1] = FIRST


@register(
    "progressive",
    ProgressiveConfig,
    about="blocks in order of importance until a share of the attention mass is covered (PSA)",
    knob=("threshold", 0.5, 1.0),
)
class ProgressivePolicy(Policy):
    """State: how far the last walks went, and with offload which blocks the next ones will begin with.

    Each step ranks all full blocks for its own query, so nothing is chosen ahead. With offload, the blocks that a
    step has used (and an eighth more) are brought to the device after it; what the next step wants beyond them is read
    in host memory.
    """

    TENSORS: ClassVar = {"_since": Held(rows=None, trial=True)}
    HOST: ClassVar = {"_walked": False}  # the state's chosen blocks are those of this step
    PARTS: ClassVar = ("state",)
    OWN: ClassVar = ("_walked",)

    config: ProgressiveConfig
    method, granularity = "progressive", "block"

    def __init__(self, config: ProgressiveConfig, layer_idx: int, offloaded: bool) -> None:
        super().__init__(config, layer_idx, offloaded)
        self.fetches = offloaded
        self.metadata = BlockMetadata(config)
        self._audited = NOTHING
        self._params: AttentionParams | None = None  # stays: replays of an earlier capture do not tell it anew

    @classmethod
    def needs(cls, request: Request) -> Memory:
        memory = Memory(blocks=request.blocks, bounds=bounds_bytes(request))
        if request.offload is not None and request.full_blocks > 0:
            room = ahead(request.table)
            memory.fetch(request, expected(room), room)
        return memory

    def reset(self) -> None:
        super().reset()
        self._audited = NOTHING

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self.metadata.start(store)
        self._key_dim = store.key_dim
        self.state = Walks.empty(store.batch, store.heads, store.device, self._ahead(store))
        self._since = torch.zeros(1, dtype=torch.int32, device=store.device) if self.fetches else None

    def _ahead(self, store: LayerStore) -> int:
        """Blocks of one row and KV head that are brought to the device after a step, at most."""
        return ahead(store.block_table.shape[1]) if self.fetches else 0

    # ------------------------------------------------------------------ index

    def index(self, kv: Tensor, flags: Tensor) -> dict[str, Tensor]:
        return self.metadata.index(kv[..., : self._key_dim], flags)

    def sealing(self, store: LayerStore) -> Index:
        return self.metadata.sealing(store, Index(store.key_dim))

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        if not store.full_blocks:
            return DENSE
        if self.below_crossover(store):
            return CROSSOVER
        return planned("walk", self.fetches, self.paged)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        self._walked = not plan.dense
        if plan.dense:
            return store.attend(q, None, "all", params)
        store.count_padded("block")
        self._params = params
        walk = self._walk(q, store, self.state, params, plan.paged)
        out = progressive_decode(walk)
        if self.watch is not None:
            self.watch.mark(walk.ids, self.state.used)
        return out

    def _walk(
        self, q: Tensor, store: LayerStore, state: WalkState, params: AttentionParams, paged: bool = False
    ) -> Walk:
        config, fields, table = self.config, store.pool.fields, store.table
        logits, logit_scale = None, params.scale
        if config.estimate == "as_min":
            scores = self.metadata.scores(q, store)
        else:
            scores, logits = self.metadata.head_scores(q, store)
            if params.softcap is not None:
                logits, logit_scale = params.softcap * torch.tanh(logits * (params.scale / params.softcap)), 1.0
            if config.estimate == "scores":
                logit_scale *= SLOPES[config.metadata]
        ids, tokens = block_rank(scores, fields["fill"], table)
        return Walk(
            q,
            store.pool.kv,
            fields["flags"],
            table,
            ids,
            tokens,
            store.recent_kv,
            store.recent_valid,
            state,
            value_dim=store.value_dim,
            scale=params.scale,
            threshold=config.threshold,
            group_reduce=config.group_reduce,
            min_blocks=config.min_blocks,
            max_blocks=config.max_blocks,
            estimate=config.estimate,
            logits=logits,
            logit_scale=logit_scale,
            softcap=params.softcap,
            sink_logits=params.sink_logits,
            pages=store.pages.pool.pages if paged else None,
            page_ids=store.pages.find(ids, table, self._since) if paged else None,
            from_host=None if store.pool.host is None else store.counters.from_host,
            attended=store.counters.attended,
        )

    def account(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        every = self.config.audit_every
        if every is not None and not plan.dense and store.counters.steps % every == 0:
            self._audit(q, store)
        super().account(q, store, plan)
        if not plan.dense:
            store.count_index(self.metadata.nbytes(store))

    # ------------------------------------------------------------------ the next step

    def _enter(self, store: LayerStore) -> bool:
        """Whether blocks are brought to the device; makes room for them."""
        if not self.fetches:
            return False
        room = self._ahead(store)
        if self.state.chosen.shape[-1] != room:
            self._widen(room)
        return store.pages.enter(store.batch * store.heads * expected(room))

    @no_inference_mode
    def _widen(self, room: int) -> None:
        old = self.state.chosen
        self.state.chosen = old.new_full((*old.shape[:2], room), -1)
        kept = min(room, old.shape[-1])
        self.state.chosen[..., :kept] = old[..., :kept]

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if not plan.dense:
            self._enter(store)
        return plan

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan, again: bool = False) -> None:
        if again:
            return  # nothing depends on the block that was sealed
        walked, self._walked = self._walked, False
        self.paged = plan.ahead and self._enter(store)
        if not self.paged:
            return
        chosen = self.state.chosen
        if not walked:  # a prompt has been read, or the last dense step is over
            ids, _ = block_rank(self.metadata.scores(q, store), store.pool.fields["fill"], store.table)
            first = min(FIRST, ids.shape[-1], chosen.shape[-1])
            chosen.fill_(-1)
            chosen[..., :first] = ids[..., :first]
        store.pages.fetch(chosen, store.table, 1)
        self._since.copy_(store.pages.pool.state.now)

    def replayed(self, store: LayerStore, plan: Plan) -> None:
        if plan.ahead:
            self.paged = store.pages.pool is not None

    # ------------------------------------------------------------------ numbers

    def _audit(self, q: Tensor, store: LayerStore) -> None:
        """Compute what share of the attention mass the step's blocks really hold. Waits for the GPU."""
        spare = WalkState.empty(store.batch, store.heads, store.device)
        walk = self._walk(q, store, spare, self._params)
        walk.from_host = None
        masses = block_masses(walk)
        if self._params.sink_logits is not None:
            sinks = self._params.sink_logits.float().view(1, store.heads, 1, -1) / torch.log(torch.tensor(2.0))
            masses = torch.cat((sinks.to(masses).expand(store.batch, -1, -1, -1), masses), dim=2)
        before = masses.shape[2] - walk.ids.shape[2]
        share = (masses - masses.amax(2, keepdim=True)).exp2()
        taken = torch.arange(share.shape[2], device=share.device) < self.state.used[..., None] + before
        if self.config.group_reduce == "sum":  # as the estimate: over all heads, on one scale
            share = (masses - masses.amax((2, 3), keepdim=True)).exp2().sum(3, keepdim=True)
        true = ((share * taken[..., None]).sum(2) / share.sum(2)).amin(-1)  # [batch, H]
        walks, mass, least, estimate = self._audited
        self._audited = (
            walks + true.numel(),
            mass + float(true.double().sum()),
            min(least, float(true.min())),
            estimate + float(self.state.mass.double().sum()),
        )

    def measured(self) -> WalkStats | None:
        if self.state is None:
            return None
        counted = self.state.totals.tolist()
        found = dict(zip(TOTALS, counted))
        audits, mass, least, estimate = self._audited
        return WalkStats(
            layer=self.layer_idx,
            walks=found["walks"],
            blocks_used=found["used"],
            blocks_read=found["read"],
            capped=found["capped"],
            mass=found["mass"] / MASS_ONE / found["walks"] if found["walks"] else None,
            least_mass=1 - found["worst"] / MASS_ONE if found["walks"] else None,
            histogram=tuple(counted[len(TOTALS) :]),
            audits=audits,
            audited_mass=mass / audits if audits else None,
            least_audited_mass=least if audits else None,
            audited_estimate=estimate / audits if audits else None,
        )

    def reopened(self) -> None:
        self._walked = False


def ahead(table: int) -> int:
    """Blocks of one row and KV head that are brought to the device after a step, at most, of ``table`` blocks."""
    return min(table, max(64, table // 4))


def expected(room: int) -> int:
    """Blocks of one row and KV head that a step is expected to choose; a pool holds several such selections."""
    return max(1, room // 4)
