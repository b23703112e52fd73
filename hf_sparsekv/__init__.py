"""Sparse, offloadable KV caches for Hugging Face Transformers.

Importing the package registers the attention implementation ``"sparsekv"`` with transformers and changes nothing
else::

    with hf_sparsekv.sparse(model):
        model.generate(**inputs)

or, with a cache of one's own::

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sparsekv")
    model.generate(**inputs, past_key_values=OffloadedSparseCache(token_budget=1024))
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from .attention.interface import register as _register
from .version import __version__

if TYPE_CHECKING:
    from .attention.flash_4 import flash_attention_4
    from .attention.mla import absorb_mla, restore_mla
    from .attention.rotary import fixed_rotary
    from .attention.tap import QueryTap, predict_ahead
    from .cache import SparseCache
    from .cache_variants import AsyncPredictiveCache, OffloadedSparseCache, ProgressiveCache
    from .config import OffloadConfig, SparseConfig
    from .cuda_graph.optimize import optimize, unoptimize
    from .generating import disable, enable, generate, sparse
    from .policies.ahead.predictive_config import PredictiveConfig
    from .policies.measured import WalkStats
    from .policies.progressive_config import ProgressiveConfig
    from .policies.streaming import StreamingConfig
    from .policies.token_config import TokenConfig, TwoLevelConfig
    from .prefix import PrefixCache
    from .row_trial import check_rows
    from .serving import Sampling, ServingConfig
    from .serving.engine import Engine
    from .telemetry.monitor import StepMonitor, StepReport
    from .telemetry.prompt_stats import PromptStats
    from .telemetry.stats import CacheStats
    from .telemetry.watch import BlockMap

_register()

# Where each public name is defined. They are imported at their first use, so that importing the package takes no
# longer than importing a model of transformers.
_PLACES = {
    "attention.mla": ("absorb_mla", "restore_mla"),
    "attention.flash_4": ("flash_attention_4",),
    "attention.rotary": ("fixed_rotary",),
    "attention.tap": ("QueryTap", "predict_ahead"),
    "cache": ("SparseCache",),
    "cache_variants": ("AsyncPredictiveCache", "OffloadedSparseCache", "ProgressiveCache"),
    "config": ("OffloadConfig", "SparseConfig"),
    "cuda_graph.optimize": ("optimize", "unoptimize"),
    "generating": ("disable", "enable", "generate", "sparse"),
    "policies.ahead.predictive_config": ("PredictiveConfig",),
    "policies.measured": ("WalkStats",),
    "policies.progressive_config": ("ProgressiveConfig",),
    "policies.streaming": ("StreamingConfig",),
    "policies.token_config": ("TokenConfig", "TwoLevelConfig"),
    "prefix": ("PrefixCache",),
    "row_trial": ("check_rows",),
    "serving": ("Sampling", "ServingConfig"),
    "serving.engine": ("Engine",),
    "telemetry.monitor": ("StepMonitor", "StepReport"),
    "telemetry.prompt_stats": ("PromptStats",),
    "telemetry.stats": ("CacheStats",),
    "telemetry.watch": ("BlockMap",),
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _PLACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(_import_module(f"{__name__}.{_PLACE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AsyncPredictiveCache",
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
    "optimize",
    "predict_ahead",
    "restore_mla",
    "sparse",
    "unoptimize",
]
