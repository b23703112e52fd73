"""A context that is prefilled once, from which any cache of the same model can start."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from .cache import SparseCache
from .kv.read_back import materialise
from .kv.state import Held
from .kv.store import LayerStore
from .layers.cache_state import FullLayer
from .layers.together import check_complete
from .policies.base import Policy
from .policies.registry import Method
from .policies.shared import Shared
from .predictor.channels import describe
from .transformers_compat import has_indexer

FIRST = 512  # queries kept for label channels, and most tokens that these can be calibrated on
LAST = 64  # queries kept for the first selection


class _Recording(Policy):
    """Dense attention that keeps the queries which other policies begin with, ``[batch, Hq, n, Dk]``."""

    TENSORS: ClassVar = {name: Held(captured=False, shared=True, dropped=True) for name in ("first", "last")}

    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        if q.shape[2] == 1 and store.length:
            return  # a decode step: tokens after the context are not part of it
        kept = 0 if self.first is None else self.first.shape[2]
        if kept < FIRST:
            more = q[:, :, : FIRST - kept].detach()
            self.first = more.clone() if self.first is None else torch.cat((self.first, more), 2)
        tail = q[:, :, -LAST:].detach()
        if self.last is not None and tail.shape[2] < LAST:
            tail = torch.cat((self.last[:, :, tail.shape[2] - LAST :], tail), 2)
        self.last = tail.clone()


class _Recorded(Shared):
    """State shared by a prefix's layers. A prefix does not support continuous batching."""

    rows_join = False


class PrefixCache(SparseCache):
    """A prefilled context: prefill once, then start any number of other caches from it.

        prefix = PrefixCache()
        model(**document, past_key_values=prefix, logits_to_keep=1)
        for config in (TokenConfig(token_budget=512), TokenConfig(token_budget=1024)):
            cache = prefix.start(OffloadedSparseCache(config))
            out = model.generate(ids, past_key_values=cache)  # ``ids``: the document's, and a question's

    Such a cache holds the same as after an exact prefill of its own, except perhaps its label channels. The context is
    read exactly, whatever the started cache's ``prefill`` says of later prompts. Channels are calibrated on the
    context's first 512 tokens (with latents: on queries from all over a long chunk). The first selection depends on the
    last pass of several tokens, so do not prefill a last chunk of one token. Copies of the prefix itself
    (``copy.deepcopy``) share its blocks and decode with full attention, in steps that :func:`optimize` captures. Use
    them as the dense baseline.

    Args:
        offload: keep the context's full blocks in host memory. ``None``: on the device.
        max_length: tokens to reserve storage for. ``None``: storage grows.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
    """

    def __init__(
        self,
        offload: OffloadConfig | None = None,
        max_length: int | None = None,
        model_config: PreTrainedConfig | None = None,
    ) -> None:
        super().__init__(SparseConfig(max_length=max_length, dense_layers=0), offload, model_config)

    _method = staticmethod(lambda config: Method("prefix", SparseConfig, _Recording, shared=_Recorded))

    def bind(self, model_config: PreTrainedConfig) -> None:
        """As :meth:`SparseCache.bind`. Raises ValueError for a model with an indexer as well."""
        if has_indexer(model_config):
            raise ValueError(
                "this model selects tokens by itself, by a trained indexer, whose keys a PrefixCache does not keep: "
                "prefill SparseCache(TokenConfig()) or OffloadedSparseCache(), and go on with copy.deepcopy() of it, "
                "which shares its blocks"
            )
        super().bind(model_config)

    @torch.no_grad()
    def start(self, cache: SparseCache) -> SparseCache:
        """Put the context into an empty sparse cache, and return that cache.

        Meanwhile the device holds one layer's keys and values twice.

        Raises:
            ValueError: the cache is not empty or was made for another model, nothing is prefilled, or the cache
                calibrates on more than 512 tokens.
            RuntimeError: an earlier error left the prefix incomplete.
        """
        self._filled()
        if cache.get_seq_length():
            raise ValueError(f"start() needs an empty cache, this one holds {cache.get_seq_length()} tokens")
        wanted = getattr(cache.config, "calibration_tokens", 0)
        if wanted > FIRST and cache.shared.channels is None:
            raise ValueError(f"a prefix keeps {FIRST} queries: calibration_tokens={wanted} is more than that")
        if cache.model_config is None:
            cache.bind(self.model_config)
        mine, theirs = (describe(config) for config in (self.model_config, cache.model_config))
        if mine != theirs:
            raise ValueError(f"the cache was made for another model: {theirs}, the prefix is of {mine}")
        for index, (mine, other) in enumerate(zip(self.layers, cache.layers)):
            if not isinstance(mine, FullLayer):
                cache.layers[index] = copy.deepcopy(mine)
                continue
            policy, store = mine.policy, mine.store
            key, value = materialise(store)
            valid = None if store.held.valid is None else store.held.valid_columns(store.device)
            n = min(policy.first.shape[2], key.shape[2])
            other.policy.params = policy.params  # the first choice may need them
            other.fill(policy.first[:, :, :n], key[:, :, :n], value[:, :, :n], None if valid is None else valid[:, :n])
            if n < key.shape[2]:
                rest = None if valid is None else valid[:, n:]
                other.fill(policy.last, key[:, :, n:], value[:, :, n:], rest)
        cache.linear_passes.take(self.linear_passes)  # its layers are copies of these
        column = self.row_table.exactness.inexact_from
        if self.offload_config is not None and self.offload_config.kv_dtype is not None:
            column = 0  # keys and values are rounded
        if column is not None:
            cache.row_table.exactness.selected(column)
        return cache

    @torch.no_grad()
    def full(self) -> DynamicCache:
        """The context in a new ``DynamicCache``, for transformers' own full attention."""
        self._filled()
        cache = DynamicCache(config=self.model_config)
        for index, mine in enumerate(self.layers):
            if isinstance(mine, FullLayer):
                cache.update(*materialise(mine.store), index)
            else:
                cache.layers[index] = copy.deepcopy(mine)
        return cache

    def _filled(self) -> None:
        check_complete(self.layers)
        self.linear_passes.check(0, self.layers, self.model_config)
        if not self.get_seq_length():
            raise ValueError("the prefix is empty: run the model over the context with it first")
