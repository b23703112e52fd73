"""Caches of one method each: their constructors take its configuration, or its options alone.

:class:`.cache.SparseCache` does all of their work.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hf_sparsekv_config.predictive import PredictiveConfig
from hf_sparsekv_config.progressive import ProgressiveConfig
from hf_sparsekv_config.sparse import OffloadConfig
from hf_sparsekv_config.tokens import TokenConfig

from .cache import SparseCache


class OffloadedSparseCache(SparseCache):
    """Sparse decoding over a KV cache whose full blocks live in host memory (AsyncTLS) or on the device.

    Each decode step scores all tokens in full blocks by label channels. It attends to the best ones, the sinks and the
    recent window. Recently chosen tokens have copies on the device. The same as
    ``SparseCache(TokenConfig(...), OffloadConfig())``.

    Args:
        config: what to select.
        offload: how to offload; ``None`` keeps all KV on the device.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
        changes: options of the configuration: ``OffloadedSparseCache(token_budget=512)``.

    Raises:
        ValueError: the channel file named in ``config`` is missing or of another model.
    """

    config_type = TokenConfig

    def __init__(
        self,
        config: TokenConfig | None = None,
        offload: OffloadConfig | None = OffloadConfig(),  # noqa: B008 (frozen)
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(config, offload, model_config, **changes)  # type: ignore[arg-type]


class ProgressiveCache(SparseCache):
    """Sparse decoding over as many tokens as it takes to cover a share of the attention mass (PSA, Twilight).

    Each decode step estimates the mass of every token by its label. For each row, layer and KV head it attends to the
    largest ones until the wanted share is covered (see ``stats()``). Same as ``SparseCache(ProgressiveConfig(...))``.

    Args:
        config: how much to cover.
        offload: how to offload; ``None`` keeps all KV on the device.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
        changes: options of the configuration: ``ProgressiveCache(mass=0.98)``.
    """

    config_type = ProgressiveConfig

    def __init__(
        self,
        config: ProgressiveConfig | None = None,
        offload: OffloadConfig | None = None,
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(config, offload, model_config, **changes)  # type: ignore[arg-type]


class AsyncPredictiveCache(SparseCache):
    """Sparse decoding over tokens that were chosen a step before, for a predicted query (AsyncSpade).

    During each decode step the next step's query is predicted from the latest ones. All tokens in full blocks are
    scored for it. The next step attends to the best ones, the sinks and everything newer.
    The same as ``SparseCache(PredictiveConfig(...))``.

    Args:
        config: what to predict and to select, and where.
        offload: how to offload; ``None`` keeps all KV on the device, unless ``config.cache_rank`` is ``"host"``.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
        changes: options of the configuration: ``AsyncPredictiveCache(token_budget=512)``.

    Raises:
        ValueError: ``config`` and ``offload`` want different places, or the channel file named in ``config`` is missing
            or of another model.
    """

    config_type = PredictiveConfig

    def __init__(
        self,
        config: PredictiveConfig | None = None,
        offload: OffloadConfig | None = None,
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(config, offload, model_config, **changes)  # type: ignore[arg-type]


SparseCache.kinds += [OffloadedSparseCache, ProgressiveCache, AsyncPredictiveCache]
