"""Continuous batching over one sparse cache: the engine, and an HTTP server (:mod:`hf_sparsekv.serving.http`)."""

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
