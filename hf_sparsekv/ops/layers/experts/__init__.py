"""The routed experts of a mixture of experts."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .gates import Gate
from .mxfp4 import Mxfp4, dequantise, encode

__all__ = ["Gate", "Mxfp4", "dequantise", "encode", "experts"]

experts = operator(reference.experts, on="x")
