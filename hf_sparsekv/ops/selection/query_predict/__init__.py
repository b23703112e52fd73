"""Predict the next query from the last ones."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["query_predict"]

query_predict = operator(reference.query_predict, on="ring")
