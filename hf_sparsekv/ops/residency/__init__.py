"""Which chosen blocks lie in a frame on the device, and which frame the others get."""

from __future__ import annotations

from .._dispatch import operator
from . import reference
from .reference import WINDOW
from .state import COUNTERS, FREE, FrameState

__all__ = ["COUNTERS", "FREE", "WINDOW", "FrameState", "lookup", "residency"]

residency = operator(reference.residency, on="block_ids")
lookup = operator(reference.lookup, on="block_ids", module="lookup")
