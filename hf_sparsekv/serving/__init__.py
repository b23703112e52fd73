"""Continuous batching over one sparse cache: the engine. :mod:`hf_sparsekv_serve` has a server for it."""

from hf_sparsekv_config.serving import ServingConfig

from .request import Busy, Closed, Handle, Logprob, Output, Piece
from .sampling import Sampling
from .stats import EngineStats, Samples

__all__ = [
    "Busy",
    "Closed",
    "EngineStats",
    "Handle",
    "Logprob",
    "Output",
    "Piece",
    "Samples",
    "Sampling",
    "ServingConfig",
]
