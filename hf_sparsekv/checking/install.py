"""Exact mode of one model: ``generate()``'s loop is replaced where the cache asks for exact mode.

Before any token, it decides whether the loop can be used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_sparsekv_config.sparse import SparseConfig
from hf_sparsekv_config.tokens import TokenConfig

from ..attention.rotary import switches
from ..cache import SparseCache
from ..cache_name import NAMES, given_cache
from ..cuda_graph.late_stop import LateStopping
from ..cuda_graph.optimize import runner_of
from ..layers.kinds import face
from ..layers.sparse_layer import SparseLayer
from ..model_watch import kind_of
from ..policies.base import Policy
from ..prefix import PrefixCache
from ..ranks import ranks_of
from .choice import Choice, can_try
from .loop import Loop, Text
from .paces import paces_of

# Arguments of passes that mean the same whatever part of a text a pass reads.
_PLAIN = {*NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
# Tokens that drafts attend to where nothing was asked for. On a model of 0.5B at 30k tokens, 97 to 98 % of them are
# accepted; by need, 99 %. A step at 1 x 128k takes 5.0 ms; by need, 6.2 (docs/accuracy.md).
BUDGET = 1024


def of_drafts(config: SparseConfig) -> SparseConfig:
    """``config`` with a fixed budget, if neither a budget nor a share of the mass was asked for."""
    if not isinstance(config, TokenConfig) or not config.can_need:
        return config
    return config if (config.mass, config.token_budget) != (None, None) else replace(config, token_budget=BUDGET)


@dataclass(frozen=True)
class Exact:
    """Exact mode as :func:`..generating.sparse` was asked for it: ``drafts`` a round; None: as many as pay."""

    drafts: int | None = None

    def check(self, cache: SparseCache) -> None:
        """Raise ``ValueError`` if ``cache`` cannot be used so."""
        if cache.offload_config is not None:
            raise ValueError(
                "exact=True is not for keys and values in host memory: each verification would read all of them over "
                "the link, which takes longer than drafts save. Leave offload out, or exact"
            )
        if cache.config.prefill is not None:
            raise ValueError(
                "exact=True gives full attention's text, which a sparse prompt changes: leave prefill out, or exact"
            )
        exactness = cache.row_table.exactness
        exactness.cropped(cache.get_seq_length())  # an interrupt may have kept crop() from saying so
        if exactness.inexact_from is not None:
            raise ValueError(_not_exact(cache, exactness.inexact_from))
        if isinstance(cache, PrefixCache):
            return  # it attends to everything, so nothing is drafted
        policy = cache.shared.of_layer(cache.config.dense_layers)
        if policy.drafts == "exact" and type(policy) is not Policy:
            raise ValueError(
                f"exact=True is not for {type(policy).__name__}, which chooses a step's tokens in the step before: "
                "drafts that are taken back would leave it without a choice. Use a method that chooses in the step "
                "itself: TokenConfig() without lag, ProgressiveConfig(), PredictiveConfig()"
            )
        most = cache.config.max_draft
        if self.drafts is not None and not 1 <= self.drafts <= most:
            raise ValueError(
                f"drafts={self.drafts} is not between 1 and max_draft={most}, the drafts that recent tokens have room "
                "for: give fewer, or a larger max_draft"
            )

    def begin(self, cache: SparseCache) -> None:
        """Have ``cache`` attend to everything, except where :class:`ExactSampling` drafts; as :meth:`check`."""
        self.check(cache)
        cache.row_table.exactness.begin(self.drafts)


class ExactSampling:
    """Base class that comes before the model's own class: its loop drafts, if the cache is in exact mode.

    Everything else over such a cache, beams or drafts of another model, runs as it is, and attends to everything.
    """

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, **kwargs: Any
    ):
        model: Any = self
        own, cache, streamer = super()._sample, given_cache(kwargs), kwargs.pop("streamer", None)  # type: ignore[misc]

        def dense(ids, criteria, config, streamer, **kwargs) -> Any:
            more = {"synced_gpus": synced_gpus, "streamer": streamer, **kwargs}
            return own(ids, logits_processor, criteria, config, **more)

        if not isinstance(cache, SparseCache) or not cache.row_table.exactness.everything:
            return dense(input_ids, stopping_criteria, generation_config, streamer, **kwargs)
        most = cache.row_table.exactness.most
        if kwargs.get("attention_mask") is None and input_ids.shape[1] == getattr(generation_config, "_mask_length", 0):
            # From transformers 5.18 on a mask of ones is dropped before this.
            kwargs["attention_mask"] = torch.ones_like(input_ids)
        text = Text(model, input_ids, stopping_criteria, generation_config, kwargs)
        if synced_gpus or not can_try(logits_processor) or not _can_draft(model, cache, text, generation_config, most):
            return dense(input_ids, stopping_criteria, generation_config, streamer, **kwargs)
        choice = Choice(logits_processor, generation_config.do_sample)
        setting = cache.config.brief(), runner_of(model) is None, str(input_ids.device), model.dtype
        paces = paces_of(model, setting, cache.config.max_draft, most)
        return Loop(model, cache, text, choice, paces, dense, generation_config, streamer).run()


def _can_draft(
    model: PreTrainedModel, cache: SparseCache, text: Text, config: GenerationConfig, most: int | None
) -> bool:
    """Whether drafts of this call can be taken back, and may pay."""
    mask = text.kwargs.get("attention_mask")
    if mask is None or mask.shape != text.ids.shape or cache.config.max_draft < 1:
        return False
    if model.training:
        return False  # dropout: each pass draws numbers
    if any(value is not None for name, value in text.kwargs.items() if name not in _PLAIN):
        return False  # images and the like
    if config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
        return False
    if ranks_of(model) is not None:
        return False  # each rank would decide by its own times
    if cache.model_config is None:
        cache.bind(model.config.get_text_config(decoder=True))
    if not cache.sparse_layers or not all(face(layer).can_take_back(cache.config.max_draft) for layer in cache.layers):
        return False  # linear attention keeps no earlier states
    longest = text.criteria.max_length
    for switch in switches(model):  # factors of a pass depend on its last position, which would be a draft's
        passes = longest is None or longest > switch.tokens
        if passes and (switch.grows or text.ids.shape[1] <= switch.tokens):
            return False
    # On a GPU only a captured verification is worth its drafts.
    captured = runner_of(model) is not None and len(cache.sparse_layers) == len(cache.layers)
    return most is not None or captured or text.ids.device.type == "cpu"


def _not_exact(cache: SparseCache, exact: int) -> str:
    """Why ``cache``, whose first ``exact`` columns are exact, is refused, and what to do."""
    held = cache.get_seq_length()
    crops = exact and all(isinstance(layer, SparseLayer) for layer in cache.layers)  # others keep no earlier states
    return (
        f"exact=True goes on from the keys and values of full attention. Of the {held} tokens in this cache only the "
        f"first {exact} are known to have them: sparse steps, a sparse prompt or a file of an earlier version gave the "
        "others theirs. Leave past_key_values out, or remove these by "
        f"cache.{f'crop({exact - held})' if crops else 'reset()'}, and generate() reads them again"
    )


def install(model: nn.Module) -> None:
    """Have ``model.generate()`` draft over caches in exact mode, if its loop is transformers' own."""
    kind: Any = type(model)
    if getattr(kind, "_sample", None) in (GenerationMixin._sample, LateStopping._sample):
        model.__class__ = _drafting(kind)


def remove(model: nn.Module) -> None:
    """Undo :func:`install`."""
    kind = kind_of(model)
    if kind.__bases__[:1] == (ExactSampling,):
        model.__class__ = kind.__bases__[1]


@functools.cache
def _drafting(kind: type) -> type:
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (ExactSampling, kind), named)
