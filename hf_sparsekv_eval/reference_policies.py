"""Selections to measure others by: the best there is (an oracle) and the one that must fail (chance).

PSA's own walk is here, too. All read every key at every step and cannot be captured: they are references and save
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparsekv.kv.read_back import tokens
from hf_sparsekv.kv.store import LayerStore
from hf_sparsekv.ops._recent import recent_valid
from hf_sparsekv.ops.selection.topk_select.reference import topk_ids
from hf_sparsekv.policies.registry import register
from hf_sparsekv.policies.selector import Selector
from hf_sparsekv.types import AttentionParams
from hf_sparsekv_config.options import Count, Positive, Share
from hf_sparsekv_config.sparse import SparseConfig


@dataclass(frozen=True, kw_only=True)
class OracleConfig(SparseConfig):
    """A budget, as other methods have it.

    Args:
        token_budget: tokens attended per step, row and KV head, beside sinks and recent window.
    """

    token_budget: Positive = 1024


@dataclass(frozen=True, kw_only=True)
class RandomConfig(OracleConfig):
    """The same, for tokens by chance.

    Args:
        seed: of the random selection.
    """

    seed: Count = 0


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


@dataclass(frozen=True, kw_only=True)
class PSAConfig(SparseConfig):
    """PSA's walk over whole blocks (section 3, Algorithm 1), without a fixed budget.

    Args:
        threshold: share of the attention mass to cover, in (0, 1].
    """

    threshold: Share = 0.98
    dense_layers: Count = 2


@register(
    "psa", PSAConfig, about="reference: PSA's blocks, by its own estimate", reference=True, knob=("threshold", 0.5, 1.0)
)
class PSAPolicy(Selector):
    """Blocks in order of their score until the estimated mass that is covered exceeds the threshold.

    A block's score is ``q . centre + |q| . deviation`` of the box around its keys (ArkVale's, which PSA takes). After
    each block, for each query head (``AS(b)`` is the sum of ``exp(logit)`` over the block's tokens)::

        AS_acc += AS(b)
        P = AS_acc / (AS_acc + AS_left)

    and a KV head stops when ``P > threshold`` for all its query heads. Sinks and recent tokens, and learned sinks, are
    part of ``AS_acc`` from the beginning. ``AS_left`` is the least mass of a token in the blocks read so far, on
    average over its block, times the tokens that are left.
    """

    granularity, captured = "block", False
    config: PSAConfig

    def select(self, q: Tensor, store: LayerStore, params: AttentionParams) -> Tensor:
        n, size, dim = store.full_blocks, store.block_size, store.key_dim
        mine = q.float().view(store.batch, store.heads, -1, dim)
        keys = tokens(store)[:, :, : n * size, :dim].float().unflatten(2, (n, size))  # [batch, H, n, size, Dk]
        token = torch.arange(n * size, device=q.device)
        usable = (token >= store.sinks) & (token < store.rows[:, 1:])
        usable = usable.view(-1, 1, n, size)  # [batch, 1, n, size]
        count = usable.sum(-1).expand(-1, store.heads, -1)  # [batch, H, n]
        scores = _box_scores(mine, keys, usable).masked_fill(count == 0, -math.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        held = _masses(torch.einsum("bhgd,bhntd->bhngt", mine, keys), usable[:, :, :, None], params)
        held = held.gather(2, order[..., None].expand_as(held))  # [batch, H, n, G]
        count = count.gather(2, order)
        near = recent_valid(store.rows, store.sinks, store.recent_kv.shape[2])[:, None, None]
        near = _masses(mine @ store.recent_kv[..., :dim].float().mT, near, params)[:, :, None]
        if params.sink_logits is not None:
            near = torch.logaddexp(near, params.sink_logits.double().view(1, store.heads, 1, -1).expand_as(near))
        density = (held - count.clamp_min(1).log()[..., None]).masked_fill((count == 0)[..., None], math.inf)
        left = density.cummin(2).values + (count.sum(-1, keepdim=True) - count.cumsum(-1)).log()[..., None]
        seen = torch.logaddexp(near, held.logcumsumexp(2))
        enough = torch.sigmoid((seen - left).nan_to_num(nan=math.inf)).amin(-1) > self.config.threshold
        used = torch.where(enough.any(-1), enough.int().argmax(-1) + 1, n).minimum((count > 0).sum(-1))
        return order.int().masked_fill(torch.arange(n, device=q.device) >= used[..., None], -1)


def _box_scores(q: Tensor, keys: Tensor, usable: Tensor) -> Tensor:
    """Scores ``[batch, H, n]`` of blocks for ``q [batch, H, G, Dk]``, by the best query head."""
    out, limit = ~usable[..., None], torch.finfo(keys.dtype).max
    centre = (keys.masked_fill(out, -limit).amax(-2) + keys.masked_fill(out, limit).amin(-2)) / 2  # [batch, H, n, Dk]
    off = (keys - centre[..., None, :]).abs().masked_fill(out, 0.0).sum(-2)
    return (q @ centre.mT + q.abs() @ (off / usable.sum(-1).clamp_min(1)[..., None]).mT).amax(2)


def _masses(products: Tensor, usable: Tensor, params: AttentionParams) -> Tensor:
    """Logarithms of the attention masses, float64, of ``products [..., tokens]`` of queries and keys."""
    logits = products * params.scale
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    return logits.double().masked_fill(~usable, -math.inf).logsumexp(-1)
