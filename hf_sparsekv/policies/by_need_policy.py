"""The default: tokens in order of their estimated mass until enough of it is covered (PSA, Twilight's top-p)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hf_sparsekv_config.labels import LabelConfig

from ..kv.counters import Tally
from ..kv.store import LayerStore
from ..ops._recent import recent_valid
from ..ops.attention.sparse_decode.reference import gather
from ..ops.selection.topk_select import token_select
from ..predictor.channels import LabelChannels
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .by_need import ByNeed
from .drafting import Drafting
from .label_index import LabelIndex
from .labelled import LabelledPolicy
from .launch import Launch
from .measured import PackStats, WalkStats
from .plan import CROSSOVER, DENSE, Plan, planned

FIRST = 1024  # tokens that are brought to the device before the first step
NOTHING = (0, 0.0, 1.0, 0.0)  # audited: walks, their masses, the least, their estimates


class ByNeedPolicy(Drafting, LabelledPolicy):
    """State: the label channels, and what walks have read.

    Each step scores the labels of all tokens for its own query, so nothing is chosen ahead. With offload, the tokens
    that a step has taken are copied to the device after it; what the next step wants beyond them is read in host
    memory.

    PSA's own estimate, by boxes around the keys of blocks, is a reference of the evaluation.
    """

    config: LabelConfig
    labels: LabelIndex
    need: ByNeed
    method = "progressive"
    follows_crops = False
    drafts = "together"

    def __init__(
        self, config: LabelConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        self.need = ByNeed(config)
        self._audited = NOTHING
        self.launch = Launch(each_step=config.audit_every is not None)

    def reset(self) -> None:
        super().reset()
        self._audited = NOTHING

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        if self.config.means:
            store.keep_means(self.config.tail_tokens)

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        if self.labels.calibrating:
            return planned(learns=True, captured=self.labels.goes_on)
        if store.full_blocks * store.block_size <= self.config.min_tokens:
            return DENSE
        if self.crossover.below(store):
            return CROSSOVER
        return planned("walk", self.fetches, self.tokens is not None, brings=self.fetches)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        found = self.need.select(q, store, self.labels, params)
        if plan.ahead:
            self._taken = found.ids, found.count
        return self.attend_to(q, found.ids, store, params, plan.paged, found.count)

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        found = self.need.select(q, rows, self.labels, params)
        brings = self.bring(found.ids, store, found.count)
        return self.attend_to(q, found.ids, rows, params, brings, found.count)

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        every = self.config.audit_every
        if every is not None and not plan.dense and store.counters.steps % every == 0:
            assert tally.last is not None
            if len(q) < store.batch:  # steps of the first rows: the others have asked for nothing
                q = torch.cat((q, q.new_zeros(store.batch - len(q), *q.shape[1:])))
            with store.at(tally.last):
                self._audit(q, store)
        super().account(q, store, plan, tally)
        if not plan.dense:
            store.counters.index_bytes += self.labels.nbytes_read(store, tally.blocks)
            store.count_means(tally)

    # ------------------------------------------------------------------ the next step

    def prepare(self, store: LayerStore) -> Plan:
        if not self.plan(store).dense:
            self.enter(store)
        return self.plan(store)

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        if plan.ahead:
            self.bring_taken(q, store)

    def best_tokens(self, q: Tensor, store: LayerStore) -> Tensor:
        scores = self.labels.scores(q, store, fill=False)
        return token_select(scores, None, min(FIRST, scores.shape[-1]), store.block_size, rows=store.rows)

    # ------------------------------------------------------------------ numbers

    def _audit(self, q: Tensor, store: LayerStore) -> None:
        """Compute what share of the attention mass the step's tokens really hold. Waits for the GPU."""
        params, heads = self.params, store.heads
        assert params is not None
        found = self.need.select(q, store, self.labels, params, counted=False)
        n = found.ids.shape[-1]
        there = torch.arange(n, device=q.device) < found.count[..., None]
        taken = torch.zeros(*found.ids.shape[:2], n + 1, dtype=torch.bool, device=q.device)
        taken.scatter_(-1, torch.where(there, found.ids, n).long(), True)
        blocks = torch.arange(store.table.shape[1], dtype=torch.int32, device=q.device)
        blocks = blocks.repeat(store.batch, heads, 1)
        stored, usable = gather(
            store.pool.kv, store.rows, store.table, blocks, "block", store.sinks, **store.pool.coded, dtype=store.dtype
        )
        keys = torch.cat((stored.to(q.device), store.recent_kv), dim=2)[..., : store.key_dim].float()
        near = recent_valid(store.rows, store.sinks, store.recent_kv.shape[2])[:, None].expand(-1, heads, -1)
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
        there = store.rows[:, 0] > 0
        true, mass = (held - whole).exp().amin(-1)[there], found.mass[there]  # [rows, H]
        walks, sum_of, least, estimate = self._audited
        self._audited = (
            walks + true.numel(),
            sum_of + float(true.double().sum()),
            min(least, float(true.min())),
            estimate + float(mass.double().sum()),
        )

    def measured(self) -> tuple[WalkStats | PackStats, ...]:
        found = super().measured()
        audits, mass, least, estimate = self._audited
        if not audits:
            return found
        walked = found[0]
        assert isinstance(walked, WalkStats)
        walked = replace(
            walked,
            audits=audits,
            audited_mass=mass / audits,
            least_audited_mass=least,
            audited_estimate=estimate / audits,
        )
        return walked, *found[1:]
