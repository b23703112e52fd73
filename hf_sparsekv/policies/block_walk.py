"""Walks over ranked blocks as PSA has them: baselines, by plain torch, which read every key to find where to stop."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kv.store import LayerStore
from ..ops._recent import recent_valid
from ..ops.attention.sparse_decode.reference import gather
from ..ops.storage.seal import Index
from ..policies.progressive_config import ProgressiveConfig
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .block_metadata import BlockMetadata, bounds_bytes
from .memory import Request
from .selector import Selector

METADATA = {"scores": "cuboid_mean", "as_min": "cuboid_mean", "bound": "min_max"}  # what an estimate goes by
# estimate="scores": the logarithm of a block's mass rises by so much when its score rises by one logit. With this the
# estimated mass comes out as the true one on the small real model and on the GQA probe, on average (docs/accuracy.md).
SLOPE = 0.7


class BlockWalkPolicy(Selector):
    """Blocks in order of their score until an estimate of the covered mass exceeds the threshold (PSA, Algorithm 1).

    After each block, for each query head (``AS(b)`` is the sum of ``exp(logit)`` over the block's tokens)::

        AS_acc += AS(b)
        P = AS_acc / (AS_acc + AS_left)

    and a KV head stops when ``P > threshold`` for all its query heads, or, with ``group_reduce="sum"``, for the sums
    over them. Sinks and recent tokens, and learned sinks, are part of ``AS_acc`` from the beginning. ``AS_left`` is

    * ``"as_min"`` (PSA): the least mass of a token in the blocks read so far, on average over its block, times the
      tokens that are left;
    * ``"bound"``: the most that Quest's bounds allow the blocks that are left;
    * ``"scores"``: what the scores of the blocks that are left predict, times the mean of what blocks read so far hold
      over what theirs predict.
    """

    granularity, captured = "block", False

    config: ProgressiveConfig

    def __init__(self, config: ProgressiveConfig, layer_idx: int, offloaded: bool) -> None:
        super().__init__(config, layer_idx, offloaded)
        self.metadata = BlockMetadata(METADATA[config.estimate], 1, "max")

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self.metadata.start(store)

    def sealing(self, store: LayerStore) -> Index:
        return self.metadata.sealing(store, Index(store.key_dim))

    def select(self, q: Tensor, store: LayerStore, params: AttentionParams) -> Tensor:
        config, size = self.config, store.block_size
        scores, each = self.metadata.head_scores(q, store)
        first = torch.arange(store.table.shape[1], device=q.device) * size
        end = torch.minimum(first + size, store.rows[:, 1:].long())
        tokens = (end - first.clamp_min(store.sinks)).clamp_min(0)[:, None]  # that can be selected
        scores = scores.masked_fill(scores.isnan(), -math.inf)
        ranked = scores.sort(dim=-1, descending=True, stable=True)
        order, live = ranked.indices, ranked.values > -math.inf
        tokens = tokens.expand_as(order).gather(-1, order).masked_fill(~live, 0)  # [batch, H, n]
        ids = order.int().masked_fill(~live, -1)

        mine = q.float().view(store.batch, store.heads, -1, store.key_dim)

        def masses(keys: Tensor, usable: Tensor) -> Tensor:
            """Of ``keys [batch, H, blocks, tokens, Dk]``, float64 ``[batch, H, blocks, G]``."""
            found = _cap(torch.einsum("bhgd,bhntd->bhngt", mine, keys.float()) * params.scale, params.softcap)
            found = found.masked_fill(~usable[:, :, :, None], -math.inf).double().logsumexp(-1)
            return found.masked_fill(~found.isfinite(), -math.inf)

        stored, usable = gather(
            store.pool.kv, store.rows, store.table, ids, "block", store.sinks, **store.pool.coded, dtype=store.dtype
        )
        stored, usable = stored[..., : store.key_dim].to(q.device), usable.to(q.device)
        held = masses(stored.unflatten(2, (-1, size)), usable.unflatten(2, (-1, size)))
        near = recent_valid(store.rows, store.sinks, store.recent_kv.shape[2])[:, None, None]
        near = near.expand(-1, store.heads, -1, -1)
        near = masses(store.recent_kv[:, :, None, :, : store.key_dim], near)
        if params.sink_logits is not None:
            near = torch.logaddexp(near, params.sink_logits.double().view(1, store.heads, 1, -1).expand_as(near))
        each = each.double().unflatten(1, (store.heads, -1)).transpose(2, 3)  # [batch, H, n, G]
        each = each.gather(2, order[..., None].expand_as(each))
        slope = SLOPE if config.estimate == "scores" else 1.0
        predicted = slope * _cap(each * params.scale, params.softcap) + tokens.clamp_min(1).log()[..., None]
        predicted = predicted.masked_fill((tokens == 0)[..., None] | predicted.isnan(), -math.inf)
        used = stop(held, near, predicted, tokens, config, size)
        return ids.masked_fill(torch.arange(ids.shape[-1], device=ids.device) >= used[..., None], -1)


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def stop(held: Tensor, near: Tensor, predicted: Tensor, tokens: Tensor, config: ProgressiveConfig, size: int) -> Tensor:
    """Blocks that each walk uses, ``[batch, H]``. Masses are natural logarithms; blocks are in order of their rank."""
    n = held.shape[2]
    if config.group_reduce == "sum":
        held, near, predicted = (x.logsumexp(-1, keepdim=True) for x in (held, near, predicted))
    rank = torch.arange(1, n + 1, device=held.device)
    after = predicted.flip(2).logcumsumexp(2).flip(2)[:, :, 1:]
    left = torch.nn.functional.pad(after, (0, 0, 0, min(n, 1)), value=-math.inf)
    if config.estimate == "as_min":
        density = (held - tokens.clamp_min(1).log()[..., None]).masked_fill((tokens == 0)[..., None], math.inf)
        after = tokens.sum(-1, keepdim=True) - tokens.cumsum(-1)
        left = density.cummin(2).values + after.log()[..., None]
    elif config.estimate == "scores":
        ratio = torch.where(predicted > -math.inf, held - predicted, -math.inf)
        left = left + ratio.logcumsumexp(2) - rank.log()[:, None]
    seen = torch.logaddexp(near, held.logcumsumexp(2))
    share = torch.sigmoid((seen - left).nan_to_num(nan=math.inf)).amin(-1)
    enough = (share > config.threshold) & (rank * size >= config.min_tokens)
    used = torch.where(enough.any(-1), enough.int().argmax(-1) + 1, n) if n else tokens.sum(-1)
    most = n if config.max_tokens is None else max(1, config.max_tokens // size)
    return torch.minimum(used.clamp_max(most), (tokens > 0).sum(-1))


def walk_bytes(request: Request) -> int:
    """Bytes of the boxes around blocks, all layers."""
    return bounds_bytes(request, METADATA[request.config.estimate], 1)
