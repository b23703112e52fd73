"""Exact attention of one query per row over chosen cached tokens."""

from __future__ import annotations

from ..._dispatch import operator
from . import cpu, reference

__all__ = ["sparse_decode"]

sparse_decode = operator(reference.sparse_decode, on="q", in_place=("kv",), on_cpu=cpu.sparse_decode)
