"""A user's choices, as frozen dataclasses that are checked when they are made: configurations and their options.

Beside :mod:`hf_sparsekv` because importing that imports torch, which takes seconds. The command line answers help and
wrong usage from here.
"""

from .predictive import PredictiveConfig
from .progressive import ProgressiveConfig
from .sparse import SparseConfig
from .streaming import StreamingConfig
from .tokens import TokenConfig

# The methods' configurations by the names that the command line has for them.
CACHES: dict[str, type[SparseConfig]] = {
    "token": TokenConfig,
    "two_level": TokenConfig,
    "progressive": ProgressiveConfig,
    "predictive": PredictiveConfig,
    "streaming": StreamingConfig,
}

__all__ = ["CACHES"]
