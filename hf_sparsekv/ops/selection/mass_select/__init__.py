"""Adaptive top-p selection of tokens by their estimated attention mass, from the scores of their labels."""

from __future__ import annotations

from ..._dispatch import operator
from . import cpu, reference
from .reference import BINS, MASS_ONE, NONE, TOTALS, Selection

__all__ = ["BINS", "MASS_ONE", "NONE", "TOTALS", "Selection", "mass_select"]

mass_select = operator(reference.mass_select, on="scores", on_cpu=cpu.mass_select)
