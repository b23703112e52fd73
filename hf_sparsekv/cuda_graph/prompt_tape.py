"""The tape: a model's cache while a prompt is captured. It keeps the layers' inputs in memory that replays write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..attention.exact import exact_attention
from ..attention.handle import KVHandle, Step
from ..attention.parts import serves, without_plan
from ..kv.pool import BlockPool
from ..layers.dense_drafts import attend_at_once
from ..predictor.channels import magnitudes
from ..types import AttentionParams

AT_ONCE = 128  # query heads of a KV head: many tokens read what is cached together, at the rate of tensor cores


class Shape(NamedTuple):
    """Sizes that all layers of a model have in common: ``k_dim`` and ``v_dim`` are of a KV head."""

    layers: int
    heads: int
    k_dim: int
    v_dim: int
    q_heads: int
    dtype: torch.dtype
    device: torch.device


class Kept:
    """Memory for what the layers of one pass over ``[batch, size]`` tokens get (:class:`..layers.adopting.Computed`).

    Args:
        k, v: ``[layers, batch, H, size, D]``.
        observing: so many last layers calibrate their labels on the prompt.
    """

    def __init__(self, shape: Shape, k: Tensor, v: Tensor, observing: int) -> None:
        layers, batch = k.shape[:2]
        of_query = batch, shape.q_heads, shape.k_dim
        self.k, self.v = k, v
        self.last = k.new_empty(layers, batch, shape.q_heads, 1, shape.k_dim)
        self.queries = torch.empty(observing, *of_query, device=k.device) if observing else None
        self.params: list[AttentionParams] = []


class Past:
    """A layer's cached tokens before a pass, as :func:`..layers.dense_drafts.attend_at_once` reads it.

    Its ring and block table are copies at addresses that a graph holds; nothing of it is counted.
    """

    latent = False
    counters = SimpleNamespace(attended=None)

    def __init__(self, pool: BlockPool, recent_kv: Tensor, table: Tensor, sinks: int, value_dim: int) -> None:
        self.pool, self.recent_kv, self.table, self.sinks, self.value_dim = pool, recent_kv, table, sinks, value_dim
        self.heads = recent_kv.shape[1]


class TapeLayer(CacheLayerMixin):
    """One layer of a :class:`Tape`: hands out handles, by which the attention function finds it."""

    is_sliding = False
    latent = False

    def __init__(self, tape: Tape, index: int) -> None:
        super().__init__()
        self.owner, self.index = tape, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> Any:
        step = Step(self, key_states, value_states, 0)
        return KVHandle(step, "k"), KVHandle(step, "v")

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    def materialise(self, step: Step, which: str) -> Tensor:
        raise RuntimeError("a layer reads its keys or values outside of the attention function")


class Tape(Cache):
    """The cache of a prompt's captured pass.

    Args:
        kept: where it goes.
        last: int64 ``[1]``, place of the last token; what follows is padding.
        valid: bool ``[1, size]``, which columns are tokens.
        observed: most tokens of a row that calibration reads; None: all.
        past: what each layer attends to before the pass, and int32 ``[batch, 2]``, how much each row has (see
            :attr:`..kv.store.LayerStore.rows`). None: nothing. The model does not see it: positions are given.
    """

    def __init__(
        self,
        kept: Kept,
        last: Tensor,
        valid: Tensor,
        observed: int | None = None,
        past: tuple[list[Past], Tensor] | None = None,
    ) -> None:
        super().__init__(layers=[TapeLayer(self, index) for index in range(len(kept.k))])
        self.past = past
        self.kept, self.last, self.valid = kept, last, valid
        self.observed = observed
        self.reached = 0

    def attend(
        self, module: Any, step: Any, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float
    ) -> tuple[Tensor, None, None]:
        """As the attention function asks: attention of the prompt to itself."""
        kept, index = self.kept, step.layer.index
        if mask is not None or index != self.reached or (self.past is not None and params.sliding_window is not None):
            raise RuntimeError("a prompt whose attention is not plainly causal, or not one call a layer")
        self.reached += 1
        kept.k[index].copy_(step.k)
        kept.v[index].copy_(step.v)
        torch.index_select(query, 2, self.last, out=kept.last[index])
        kept.params.append(params)
        if kept.queries is not None and (nth := index - (len(self.layers) - len(kept.queries))) >= 0:
            seen = query[:, :, : self.observed]
            kept.queries[nth].copy_(magnitudes(seen, self.valid[:, : self.observed]))
        if self.past is not None:
            layers, rows = self.past
            store: Any = layers[index]
            return attend_at_once(store, query, step.k, step.v, rows, params, AT_ONCE), None, None
        plain = params.softcap is None and params.sink_logits is None and params.sliding_window is None
        if plain and serves(query, step.k, step.v):  # a graph cannot make a plan
            return without_plan(query, step.k, step.v, params.scale), None, None
        return exact_attention(query, step.k, step.v, params), None, None
