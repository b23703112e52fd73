"""The default: tokens by their labels, among all, for a step's own query (Double Sparsity; PSA, Twilight's top-p)."""

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
from ..predictor.channels import LabelChannels
from ..types import AttentionParams
from .drafting import Drafting
from .label_index import LabelIndex
from .labelled import LabelledPolicy
from .launch import Launch
from .measured import PackStats, WalkStats
from .plan import Plan, planned

NOTHING = (0, 0.0, 1.0, 0.0)  # audited: walks, their masses, the least, their estimates


class TokenPolicy(Drafting, LabelledPolicy):
    """Each step scores the labels of all tokens for its own query, and attends to those that it needs, or to the best.

    By need where the configuration has a share of the mass, else a fixed number. Nothing that is chosen outlives its
    step. Offloaded, a step reads what it has chosen where it is, and copies it to the device after the attention, for
    the steps that follow.

    PSA's own estimate, by boxes around the keys of blocks, is a reference of the evaluation.
    """

    labels: LabelIndex
    follows_crops = False
    drafts = "together"

    def __init__(
        self, config: LabelConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        self.method = "token_only" if self.need is None else "progressive"
        self._audited = NOTHING
        self.launch = Launch(each_step=config.audit_every is not None)

    def reset(self) -> None:
        super().reset()
        self._audited = NOTHING

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        if (plan := self.plan_all(store)) is not None:
            return plan
        return planned("every", self.fetches, self.tokens is not None, brings=self.fetches)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        ids, used = self.tokens_for(q, store, params)
        if plan.ahead:
            self._taken = ids, used
        return self.attend_to(q, ids, store, params, plan.paged, used)

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        ids, used = self.tokens_for(q, rows, params)
        return self.attend_to(q, ids, rows, params, self.bring(ids, store, used), used)

    def audit(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        if not plan.dense and store.counters.steps % self.config.audit_every == 0:
            assert tally.last is not None
            if len(q) < store.batch:  # steps of the first rows: the others have asked for nothing
                q = torch.cat((q, q.new_zeros(store.batch - len(q), *q.shape[1:])))
            with store.at(tally.last):
                self._audit(q, store)

    # ------------------------------------------------------------------ the next step

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if not plan.ahead:
            return plan
        self.enter(store)
        return self.plan(store)

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        if plan.ahead:
            self.bring_taken(q, store)

    # ------------------------------------------------------------------ numbers

    def _audit(self, q: Tensor, store: LayerStore) -> None:
        """Compute what share of the attention mass the step's tokens really hold. Waits for the GPU."""
        params, heads = self.params, store.heads
        assert params is not None and self.need is not None
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
