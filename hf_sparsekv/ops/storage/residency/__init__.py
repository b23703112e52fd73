"""Find the device pages of chosen blocks, and assign pages to those without one."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .reference import WINDOW
from .state import COUNTERS, FREE, PageState

__all__ = ["COUNTERS", "FREE", "WINDOW", "PageState", "residency"]

residency = operator(reference.residency, on="block_ids")
