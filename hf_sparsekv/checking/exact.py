"""Exact mode of ``generate()``: whether a cache and a call can be used so, and the loop of a call.

Elsewhere every pass attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_sparsekv_config.sparse import SparseConfig
from hf_sparsekv_config.tokens import TokenConfig

from ..attention.rotary import switches
from ..cuda_graph.optimize import runner_of
from ..layers.cache_state import CacheState
from ..layers.kinds import face
from ..policies.base import Policy
from ..prefix import PrefixCache
from ..ranks import ranks_of
from .call import PLAIN, Call
from .choice import Choice, can_try
from .loop import Loop
from .paces import paces_of
from .rules import Equal
from .text import Text

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

    def check(self, cache: CacheState) -> None:
        """Raise ``ValueError`` if ``cache`` cannot be used so."""
        if cache.offload_config is not None:
            raise ValueError(
                "exact=True is not for keys and values in host memory: each verification would read all of them over "
                "the link, which takes longer than drafts save. Leave offload out, or exact"
            )
        check_cache(cache, "exact=True")
        most = cache.config.max_draft
        if not isinstance(cache, PrefixCache) and self.drafts is not None and not 1 <= self.drafts <= most:
            raise ValueError(
                f"drafts={self.drafts} is not between 1 and max_draft={most}, the drafts that recent tokens have room "
                "for: give fewer, or a larger max_draft"
            )

    def begin(self, cache: CacheState) -> None:
        """Have ``cache`` attend to everything, except where the loop drafts; as :meth:`check`."""
        self.check(cache)
        cache.row_table.exactness.begin(self)

    def generate(self, call: Call) -> Any:
        """The text of full attention, by drafts where these can be taken back and may pay."""
        text = Text(call.model, call.ids, call.criteria, call.config, call.kwargs)
        if not can_draft(call, text, self.drafts, call.cache.config.max_draft):
            return call.plain()
        model, cache = call.model, call.cache
        setting = cache.config.brief(), runner_of(model) is None, str(call.ids.device), model.dtype
        paces = paces_of(model, setting, cache.config.max_draft, self.drafts)
        return Loop(call, text, Choice(call.processors, call.config.do_sample), paces, Equal()).run()

    def refuse(self, what: str) -> None:
        """Nothing: each pass attends to everything there."""

    def __str__(self) -> str:
        return "exact"


def can_draft(call: Call, text: Text, drafts: int | None, most: int) -> bool:
    """Whether drafts of this call can be taken back, and may pay.

    ``drafts``: of each round, whatever they cost. ``most``: of a round.
    """
    model, cache, config = call.model, call.cache, call.config
    mask = text.kwargs.get("attention_mask")
    if call.synced_gpus or not can_try(call.processors):
        return False
    if mask is None or mask.shape != text.ids.shape or most < 1:
        return False
    if model.training:
        return False  # dropout: each pass draws numbers
    if any(value is not None for name, value in text.kwargs.items() if name not in PLAIN):
        return False  # images and the like
    if config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
        return False
    if ranks_of(model) is not None:
        return False  # each rank would decide by its own times
    if cache.model_config is None:
        cache.bind(model.config.get_text_config(decoder=True))
    if not cache.sparse_layers or not all(face(layer).can_take_back(most) for layer in cache.layers):
        return False  # linear attention keeps no earlier states
    longest = text.criteria.max_length
    for switch in switches(model):  # factors of a pass depend on its last position, which would be a draft's
        passes = longest is None or longest > switch.tokens
        if passes and (switch.grows or text.ids.shape[1] <= switch.tokens):
            return False
    # On a GPU only a captured verification is worth its drafts.
    captured = runner_of(model) is not None and len(cache.sparse_layers) == len(cache.layers)
    return drafts is not None or captured or text.ids.device.type == "cpu"


def check_cache(cache: CacheState, option: str) -> None:
    """Raise ``ValueError`` if drafts over ``cache`` cannot be verified by full attention, as ``option`` asks."""
    name = option.partition("=")[0]
    if cache.config.prefill is not None:
        raise ValueError(
            f"{option} gives full attention's text, which a sparse prompt changes: leave prefill out, or {name}"
        )
    exactness = cache.row_table.exactness
    exactness.cropped(cache.get_seq_length())  # an interrupt may have kept crop() from saying so
    if exactness.inexact_from is not None:
        raise ValueError(_not_exact(cache, exactness.inexact_from, option))
    if isinstance(cache, PrefixCache):
        return  # it attends to everything, so nothing is drafted
    policy = cache.shared.of_layer(cache.config.dense_layers)
    if policy.drafts == "exact" and type(policy) is not Policy:
        raise ValueError(
            f"{option} is not for {type(policy).__name__}, which chooses a step's tokens in the step before: "
            "drafts that are taken back would leave it without a choice. Use a method that chooses in the step "
            "itself: TokenConfig() without lag, ProgressiveConfig(), PredictiveConfig()"
        )


def _not_exact(cache: CacheState, exact: int, option: str) -> str:
    """Why ``cache``, whose first ``exact`` columns are exact, is refused, and what to do."""
    held = cache.get_seq_length()
    crops = exact and all(face(layer).selects for layer in cache.layers)  # others keep no earlier states
    return (
        f"{option} goes on from the keys and values of full attention. Of the {held} tokens in this cache only the "
        f"first {exact} are known to have them: sparse steps, a sparse prompt or a file of an earlier version gave the "
        "others theirs. Leave past_key_values out, or remove these by "
        f"cache.{f'crop({exact - held})' if crops else 'reset()'}, and generate() reads them again"
    )
