"""Progressive selection: tokens in order of their estimated mass until enough of it is covered (PSA, Twilight)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from ..config import OffloadConfig, ProgressiveConfig
from ..kv.state import Held
from ..kv.store import LayerStore
from ..ops.mass_select import MASS_ONE, TOTALS, Selection, mass_select
from ..ops.mass_select.reference import LENGTHS
from ..ops.seal import Index
from ..ops.sparse_decode.reference import gather
from ..ops.topk_select import block_select
from ..predictor.channels import LabelChannels
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .base import Policy
from .behind import Behind, reads_here
from .block_walk import BlockWalkPolicy
from .label_index import LabelIndex, label_bytes
from .measured import WalkStats
from .memory import Memory, Request
from .plan import CROSSOVER, DENSE, Plan, planned
from .registry import register
from .shared import Labelled, Shared

FIRST = 32  # blocks that are brought to the device before the first step
NOTHING = (0, 0.0, 1.0, 0.0)  # audited: walks, their masses, the least, their estimates


@register(
    "progressive",
    ProgressiveConfig,
    about="tokens in order of importance until a share of the attention mass is covered (PSA)",
    knob=("threshold", 0.5, 1.0),
)
class ProgressivePolicy(Policy):
    """State: the label channels, and what walks have read.

    Each step scores the labels of all tokens for its own query, so nothing is chosen ahead. With offload, blocks of the
    tokens that a step has taken are brought to the device after it, those with the most important ones first; what
    the next step wants beyond them is read in host memory.

    With an estimate of the papers the layers have :class:`.block_walk.BlockWalkPolicy` instead.
    """

    TENSORS: ClassVar = {
        "totals": Held(rows=None, trial=True),
    }
    HOST: ClassVar = {"_walked": None}  # blocks that a step wants next, from its attention to its end
    PARTS: ClassVar = ("labels", "behind")
    OWN: ClassVar = ("_walked",)

    config: ProgressiveConfig
    method = "progressive"

    def __init__(
        self, config: ProgressiveConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded)
        self.fetches = offloaded
        self.behind = Behind() if offloaded else None
        self.labels = LabelIndex(config, layer_idx, channels)
        self._audited = NOTHING
        self._params: AttentionParams | None = None  # stays: replays of an earlier capture do not tell it anew

    @classmethod
    def share(cls, config: ProgressiveConfig, offload: OffloadConfig | None) -> Shared:
        return Labelled(cls, config, offload) if config.labels else Shared(BlockWalkPolicy, config, offload)

    @classmethod
    def needs(cls, request: Request) -> Memory:
        if not request.config.labels:
            return BlockWalkPolicy.needs(request)
        memory = Memory(blocks=request.blocks)
        memory.labels = sum(request.block_capacity * label_bytes(request, layer) for layer in request.layers)
        if request.offload is not None and request.full_blocks > 0:
            room = ahead(request.table)
            memory.fetch(request, expected(room), room)
        return memory

    def reset(self) -> None:
        super().reset()
        if self.totals is not None:
            self.totals.zero_()
        self._audited = NOTHING

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self.labels.start(store)
        self.totals = torch.zeros(len(TOTALS) + LENGTHS, dtype=torch.int64, device=store.device)
        if self.behind is not None:
            self.behind.start(store)

    @property
    def observes(self) -> bool:
        return self.labels.calibrating

    @no_inference_mode
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        if self.observes and self.labels.observe(q, k, valid) and store.full_blocks:
            store.reindex(self)  # blocks that were sealed before there were channels

    # ------------------------------------------------------------------ index

    def index(self, kv: Tensor, flags: Tensor) -> dict[str, Tensor]:
        return self.labels.index(kv)

    def sealing(self, store: LayerStore) -> Index:
        return self.labels.sealing(store, Index(store.key_dim))

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        if self.labels.calibrating:
            return planned(learns=True, captured=self.labels.goes_on)
        if store.full_blocks * store.block_size <= self.config.min_tokens:
            return DENSE
        if self.below_crossover(store):
            return CROSSOVER
        return planned("walk", self.fetches, self.paged)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        self._walked = None
        if plan.dense:
            return store.attend(q, None, "all", params)
        self._params = params
        page_ids = self.behind.places(store) if plan.paged else None
        found = self._select(q, store, params, page_ids, self.totals, plan.ahead)
        if self.watch is not None:
            self.watch.mark_tokens(found.ids if page_ids is None else self._columns(found), store.block_size)
        if plan.ahead:
            self._walked = self._wanted(found, store)
        return store.attend(q, found.ids, "token", params, plan.paged, used=found.count)

    def _select(
        self,
        q: Tensor,
        store: LayerStore,
        params: AttentionParams,
        page_ids: Tensor | None = None,
        totals: Tensor | None = None,
        by_block: bool = False,
    ) -> Selection:
        config = self.config
        return mass_select(
            self.labels.scores(q, store, reduce="none"),
            q,
            self.labels.channels,
            store.recent_kv,
            store.recent_valid,
            page_ids,
            sinks=store.sinks,
            scale=params.scale,
            softcap=params.softcap,
            sink_logits=params.sink_logits,
            threshold=config.threshold,
            min_tokens=config.min_tokens,
            max_tokens=config.max_tokens,
            group_reduce=config.group_reduce,
            block_size=store.block_size,
            totals=totals,
            by_block=by_block,
        )

    def _columns(self, found: Selection) -> Tensor:
        """The columns of tokens that may be given by place, in any order; -1 for no token."""
        column = torch.arange(found.bins.shape[-1], device=found.bins.device)
        return torch.where(found.bins <= found.cut[..., None], column, -1)

    def _wanted(self, found: Selection, store: LayerStore) -> Tensor:
        """The blocks with the most important of the tokens that were taken, int32 ``[batch, H, n]``."""
        return block_select(found.blocks, ahead(store.block_table.shape[1]))

    def account(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        every = self.config.audit_every
        if every is not None and not plan.dense and store.counters.steps % every == 0:
            self._audit(q, store)
        super().account(q, store, plan)
        if not plan.dense:
            store.count_index(self.labels.nbytes_read(store, store.full_blocks))

    # ------------------------------------------------------------------ the next step

    def _enter(self, store: LayerStore) -> bool:
        """Whether blocks are brought to the device; makes room for them."""
        room = store.batch * store.heads * expected(ahead(store.block_table.shape[1]))
        return self.fetches and store.pages.enter(room)

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if not plan.dense:
            self._enter(store)
        return plan

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan, again: bool = False) -> None:
        if again:
            return  # nothing depends on the block that was sealed
        wanted, self._walked = self._walked, None
        self.paged = plan.ahead and self._enter(store)
        if not self.paged:
            return
        if wanted is None:  # a prompt has been read, or the last dense step is over
            scores = self.labels.scores(q, store, per_token=False)
            room = ahead(store.block_table.shape[1])
            first = block_select(scores, min(FIRST, room))
            wanted = torch.nn.functional.pad(first, (0, room - first.shape[-1]), value=-1)
        else:
            wanted = reads_here(wanted)
        self.behind.bring(wanted, store)

    def replayed(self, store: LayerStore, plan: Plan) -> None:
        if plan.learns:
            self.labels.stats.tokens += 1
        elif plan.ahead:
            self.paged = store.pages.pool is not None

    # ------------------------------------------------------------------ numbers

    def _audit(self, q: Tensor, store: LayerStore) -> None:
        """Compute what share of the attention mass the step's tokens really hold. Waits for the GPU."""
        params, heads, size = self._params, store.heads, store.block_size
        found = self._select(q, store, params)
        taken = torch.zeros(*found.bins.shape[:2], found.bins.shape[-1] + 1, dtype=torch.bool, device=q.device)
        taken.scatter_(-1, torch.where(found.ids < 0, taken.shape[-1] - 1, found.ids).long(), True)
        blocks = torch.arange(store.table.shape[1], dtype=torch.int32, device=q.device)
        blocks = blocks.repeat(store.batch, heads, 1)
        stored, usable = gather(store.pool.kv, store.pool.fields["flags"], store.table, blocks, "block", heads, size)
        keys = torch.cat((stored.to(q.device), store.recent_kv), dim=2)[..., : store.key_dim].float()
        near = store.recent_valid[:, None].expand(-1, heads, -1)
        usable = torch.cat((usable.to(q.device), near), dim=2)[:, :, None]
        taken = torch.cat((taken[..., :-1], near), dim=2)[:, :, None]
        logits = q.float().view(store.batch, heads, -1, store.key_dim) @ keys.transpose(-1, -2) * params.scale
        if params.softcap is not None:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        sinks = logits.new_zeros(*logits.shape[:3], 0)
        if params.sink_logits is not None:
            sinks = params.sink_logits.float().view(1, heads, -1, 1).expand(store.batch, -1, -1, -1)
        held, whole = (
            torch.cat((logits.masked_fill(~these, -math.inf), sinks), -1).logsumexp(-1) for these in (taken, usable)
        )
        if self.config.group_reduce == "sum":  # as the estimate: over all heads, on one scale
            held, whole = held.logsumexp(-1, keepdim=True), whole.logsumexp(-1, keepdim=True)
        true = (held - whole).exp().amin(-1)  # [batch, H]
        walks, mass, least, estimate = self._audited
        self._audited = (
            walks + true.numel(),
            mass + float(true.double().sum()),
            min(least, float(true.min())),
            estimate + float(found.mass.double().sum()),
        )

    def measured(self) -> WalkStats | None:
        if self.totals is None:
            return None
        counted = self.totals.tolist()
        found = dict(zip(TOTALS, counted))
        audits, mass, least, estimate = self._audited
        return WalkStats(
            layer=self.layer_idx,
            walks=found["walks"],
            tokens_used=found["used"],
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
        self._walked = None


def ahead(table: int) -> int:
    """Blocks of one row and KV head that are brought to the device after a step, at most, of ``table`` blocks."""
    return min(table, max(64, table // 4))


def expected(room: int) -> int:
    """Blocks of one row and KV head that a step is expected to choose; a pool holds several such selections."""
    return max(1, room // 4)
