"""Exact attention of a prompt, or of a piece of it, without a mask in memory."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["prompt_attention"]

prompt_attention = operator(reference.prompt_attention, on="query")
