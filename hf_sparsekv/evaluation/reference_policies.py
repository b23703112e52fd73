"""Selections to measure others by: the best there is (an oracle) and the one that must fail (chance).

Both read all keys at every step and cannot be captured: they are references and save nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention.exact import AttentionSpec
from ..cache import SparseCache
from ..config import SparseConfig, _not_negative, _positive
from ..kv.store import LayerStore
from ..ops.sparse_decode.reference import SELECTABLE
from ..ops.topk_select.reference import topk_ids
from ..policies.base import Policy, Selector
from ..policies.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(SparseConfig):
    """A budget, as other methods have it.

    Args:
        token_budget: tokens attended per step, row and KV head, beside sinks and recent window.
        seed: of the random selection.
    """

    token_budget: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("token_budget", self.token_budget)
        _not_negative("seed", self.seed)


class ReferencePolicy(Selector):
    """Attend to the ``token_budget`` tokens of sealed blocks that :meth:`rank` puts first."""

    config: ReferenceConfig

    def plan(self, store: LayerStore) -> Plan:
        return replace(super().plan(store), captured=False)

    def select(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        _, flags = store.sealed_blocks()  # [sealed, batch, block_size]
        usable = (flags == SELECTABLE).transpose(0, 1).flatten(1)[:, None]
        scores = self.rank(q, store, spec).masked_fill(~usable, float("-inf"))
        return topk_ids(scores, self.config.token_budget)

    def rank(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        """Scores ``[batch, H, sealed * block_size]`` of the tokens in sealed blocks, float32."""
        raise NotImplementedError


class OraclePolicy(ReferencePolicy):
    """The truly best tokens: by the largest share of attention that a query head of the group gives a token."""

    def rank(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        keys, _ = store.materialise()
        batch, heads, _, dim = keys.shape
        logits = q.float().view(batch, heads, -1, dim) @ keys.float().mT * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if store.padded:
            logits = logits.masked_fill(~store.valid_columns()[:, None, None], float("-inf"))
        if spec.sink_logits is not None:
            extra = spec.sink_logits.float().view(1, heads, -1, 1).expand(batch, -1, -1, -1)
            logits = torch.cat((logits, extra), -1)
        share = logits.softmax(-1).amax(2)
        return share[..., : store.sealed * store.block_size]


class RandomPolicy(ReferencePolicy):
    """Tokens by chance, others at every step."""

    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self.generator = torch.Generator(store.device).manual_seed(self.config.seed * 1000 + self.layer_idx)

    def rank(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        shape = (store.batch, store.heads, store.sealed * store.block_size)
        return torch.rand(shape, device=store.device, generator=self.generator)


class _ReferenceCache(SparseCache):
    policy: type[ReferencePolicy]

    def __init__(self, config: ReferenceConfig | None = None, offload=None, model_config=None) -> None:
        super().__init__(ReferenceConfig() if config is None else config, offload, model_config)

    def make_policy(self, layer_idx: int) -> Policy:
        kind = Policy if layer_idx < self.config.dense_layers else self.policy
        return kind(self.config, layer_idx, self.offload_config is not None)


class OracleCache(_ReferenceCache):
    """What a perfect selector of single tokens would reach with this budget."""

    policy = OraclePolicy


class RandomCache(_ReferenceCache):
    """What no selector may be as bad as: a test that it passes tests nothing."""

    policy = RandomPolicy
