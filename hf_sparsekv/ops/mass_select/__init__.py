"""Tokens whose estimated attention mass covers a share of the whole (top-p), from the scores of their labels."""

from __future__ import annotations

from .._dispatch import operator
from . import reference
from .reference import BINS, MASS_ONE, NONE, TOTALS, Selection

__all__ = ["BINS", "MASS_ONE", "NONE", "TOTALS", "Selection", "mass_select"]

mass_select = operator(reference.mass_select, on="scores")
