"""Sparse, offloadable KV caches for Hugging Face Transformers.

Importing the package registers ``"sparsekv"`` with transformers, as an implementation of attention and of experts, and
changes nothing else::

    with hf_sparsekv.sparse(model):
        model.generate(**inputs)

or, with a cache of one's own::

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sparsekv")
    model.generate(**inputs, past_key_values=OffloadedSparseCache(token_budget=1024))
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as _of_experts

from .attention.interface import register as _register
from .version import __version__

if TYPE_CHECKING:
    from hf_sparsekv_config.audit import AuditConfig
    from hf_sparsekv_config.predictive import PredictiveConfig
    from hf_sparsekv_config.progressive import ProgressiveConfig
    from hf_sparsekv_config.serving import ServingConfig
    from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig
    from hf_sparsekv_config.streaming import StreamingConfig
    from hf_sparsekv_config.tokens import TokenConfig, TwoLevelConfig

    from .attention.flash_4 import flash_attention_4
    from .attention.mla import absorb_mla, restore_mla
    from .attention.rotary import fixed_rotary
    from .attention.tap import QueryTap, predict_ahead
    from .cache import SparseCache
    from .cache_variants import AsyncPredictiveCache, OffloadedSparseCache, ProgressiveCache
    from .cuda_graph.optimize import optimize, unoptimize
    from .experts.mxfp4 import keep_mxfp4
    from .generating import disable, enable, generate, sparse
    from .policies.measured import WalkStats
    from .prefix import PrefixCache
    from .row_trial import check_rows
    from .serving.engine import Engine
    from .serving.sampling import Sampling
    from .telemetry.audit_stats import AuditedToken, AuditStats
    from .telemetry.monitor import StepMonitor, StepReport
    from .telemetry.prompt_stats import PromptStats
    from .telemetry.stats import CacheStats
    from .telemetry.watch import BlockMap

_register()


def _experts(module, hidden_states, top_k_index, top_k_weights):  # type: ignore[no-untyped-def]
    """Experts by :func:`hf_sparsekv.experts.interface.sparsekv_experts`, imported at the first call."""
    from .experts.interface import sparsekv_experts

    return sparsekv_experts(module, hidden_states, top_k_index, top_k_weights)


_of_experts.register("sparsekv", _experts)

# Where each public name is defined. They are imported at their first use, so that importing the package takes no
# longer than importing a model of transformers.
_PLACES = {
    ".attention.mla": ("absorb_mla", "restore_mla"),
    ".attention.flash_4": ("flash_attention_4",),
    ".attention.rotary": ("fixed_rotary",),
    ".attention.tap": ("QueryTap", "predict_ahead"),
    ".cache": ("SparseCache",),
    ".cache_variants": ("AsyncPredictiveCache", "OffloadedSparseCache", "ProgressiveCache"),
    "hf_sparsekv_config.sparse": ("OffloadConfig", "SparseConfig"),
    ".cuda_graph.optimize": ("optimize", "unoptimize"),
    ".experts.mxfp4": ("keep_mxfp4",),
    ".generating": ("disable", "enable", "generate", "sparse"),
    "hf_sparsekv_config.audit": ("AuditConfig",),
    "hf_sparsekv_config.predictive": ("PredictiveConfig",),
    ".policies.measured": ("WalkStats",),
    "hf_sparsekv_config.progressive": ("ProgressiveConfig",),
    "hf_sparsekv_config.streaming": ("StreamingConfig",),
    "hf_sparsekv_config.tokens": ("TokenConfig", "TwoLevelConfig"),
    ".prefix": ("PrefixCache",),
    ".row_trial": ("check_rows",),
    ".serving.sampling": ("Sampling",),
    "hf_sparsekv_config.serving": ("ServingConfig",),
    ".serving.engine": ("Engine",),
    ".telemetry.audit_stats": ("AuditStats", "AuditedToken"),
    ".telemetry.monitor": ("StepMonitor", "StepReport"),
    ".telemetry.prompt_stats": ("PromptStats",),
    ".telemetry.stats": ("CacheStats",),
    ".telemetry.watch": ("BlockMap",),
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _PLACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(_import_module(_PLACE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AsyncPredictiveCache",
    "AuditConfig",
    "AuditStats",
    "AuditedToken",
    "BlockMap",
    "CacheStats",
    "Engine",
    "OffloadConfig",
    "OffloadedSparseCache",
    "PredictiveConfig",
    "PrefixCache",
    "ProgressiveCache",
    "ProgressiveConfig",
    "PromptStats",
    "QueryTap",
    "Sampling",
    "ServingConfig",
    "SparseCache",
    "SparseConfig",
    "StepMonitor",
    "StepReport",
    "StreamingConfig",
    "TokenConfig",
    "TwoLevelConfig",
    "WalkStats",
    "__version__",
    "absorb_mla",
    "check_rows",
    "disable",
    "enable",
    "fixed_rotary",
    "flash_attention_4",
    "generate",
    "keep_mxfp4",
    "optimize",
    "predict_ahead",
    "restore_mla",
    "sparse",
    "unoptimize",
]
