"""Selections to measure others by: the best there is (an oracle) and the one that must fail (chance).

Both read all keys at every step and cannot be captured: they are references and save nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.config import SparseConfig
from hf_sparsekv.kv.read_back import tokens
from hf_sparsekv.kv.store import LayerStore
from hf_sparsekv.ops.selection.topk_select.reference import topk_ids
from hf_sparsekv.option_checks import not_negative, positive
from hf_sparsekv.policies.registry import register
from hf_sparsekv.policies.selector import Selector
from hf_sparsekv.types import AttentionParams


@dataclass(frozen=True, kw_only=True)
class OracleConfig(SparseConfig):
    """A budget, as other methods have it.

    Args:
        token_budget: tokens attended per step, row and KV head, beside sinks and recent window.
    """

    token_budget: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("token_budget", self.token_budget)


@dataclass(frozen=True, kw_only=True)
class RandomConfig(OracleConfig):
    """The same, for tokens by chance.

    Args:
        seed: of the random selection.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative("seed", self.seed)


class ReferencePolicy(Selector):
    """Attend to the ``token_budget`` tokens of full blocks that :meth:`rank` puts first."""

    config: OracleConfig
    captured = False

    def select(self, q: Tensor, store: LayerStore, params: AttentionParams) -> Tensor:
        token = torch.arange(store.full_blocks * store.block_size, device=q.device)
        usable = ((token >= store.sinks) & (token < store.rows[:, 1:]))[:, None]
        scores = self.rank(q, store, params).masked_fill(~usable, float("-inf"))
        return topk_ids(scores, self.config.token_budget)

    def rank(self, q: Tensor, store: LayerStore, params: AttentionParams) -> Tensor:
        """Scores ``[batch, H, full_blocks * block_size]`` of the tokens in full blocks, float32."""
        raise NotImplementedError


@register("oracle", OracleConfig, about="reference: the truly best tokens of each KV head", reference=True)
class OraclePolicy(ReferencePolicy):
    """The truly best tokens: by the largest share of attention that a query head of the group gives a token."""

    def rank(self, q: Tensor, store: LayerStore, params: AttentionParams) -> Tensor:
        keys = tokens(store)[..., : store.key_dim]
        batch, heads, _, dim = keys.shape
        logits = q.float().view(batch, heads, -1, dim) @ keys.float().mT * params.scale
        if params.softcap is not None:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        token = torch.arange(keys.shape[2], device=q.device)
        logits = logits.masked_fill((token >= store.rows[:, :1])[:, None, None], float("-inf"))
        if params.sink_logits is not None:
            extra = params.sink_logits.float().view(1, heads, -1, 1).expand(batch, -1, -1, -1)
            logits = torch.cat((logits, extra), -1)
        share = logits.softmax(-1).amax(2)
        return share[..., : store.full_blocks * store.block_size]


@register("random", RandomConfig, about="reference: tokens by chance", reference=True)
class RandomPolicy(ReferencePolicy):
    """Tokens by chance, others at every step: what no selector may be as bad as."""

    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self.generator = torch.Generator(store.device).manual_seed(self.config.seed * 1000 + self.layer_idx)

    def rank(self, q: Tensor, store: LayerStore, params: AttentionParams) -> Tensor:
        shape = (store.batch, store.heads, store.full_blocks * store.block_size)
        return torch.rand(shape, device=store.device, generator=self.generator)
