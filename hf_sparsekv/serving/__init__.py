"""Many requests over one sparse cache: the engine, and (:mod:`hf_sparsekv.serving.http`) a server around it."""

from .config import ServingConfig
from .request import Busy, Closed, Handle, Output, Piece, Sampling
from .stats import EngineStats, Samples

__all__ = ["Busy", "Closed", "EngineStats", "Handle", "Output", "Piece", "Samples", "Sampling", "ServingConfig"]
