"""Sparse, offloadable KV caches for Hugging Face Transformers.

Importing the package registers the attention implementation ``"sparsekv"`` with transformers and changes nothing
else::

    with hf_sparsekv.sparse(model):
        model.generate(**inputs)

or, with a cache of one's own::

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sparsekv")
    model.generate(**inputs, past_key_values=OffloadedSparseCache(token_budget=1024))
"""

from . import policies as _policies  # noqa: F401 (registers the methods)
from .attention.interface import register as _register
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
from .version import __version__

_register()

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
    "generate",
    "optimize",
    "predict_ahead",
    "restore_mla",
    "sparse",
    "unoptimize",
]
