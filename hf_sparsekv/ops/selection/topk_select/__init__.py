"""The k best blocks or tokens of each row as ascending ids."""

from __future__ import annotations

from ..._dispatch import operator
from . import cpu, reference

__all__ = ["block_select", "token_select"]

block_select = operator(reference.block_select, on="scores")
token_select = operator(reference.token_select, on="scores", on_cpu=cpu.token_select)
