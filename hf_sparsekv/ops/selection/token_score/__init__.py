"""Approximate score of tokens from the label cache."""

from __future__ import annotations

from ..._dispatch import operator
from . import cpu, reference

__all__ = ["token_score"]

token_score = operator(reference.token_score, on="q", on_cpu=cpu.token_score)
