"""Many requests over one sparse cache: the engine, and (:mod:`hf_sparsekv.serving.http`) a server around it."""

from .config import ServingConfig
from .request import Busy, Closed, EngineStats, Handle, Output, Piece, Samples, Sampling

__all__ = ["Busy", "Closed", "EngineStats", "Handle", "Output", "Piece", "Samples", "Sampling", "ServingConfig"]
