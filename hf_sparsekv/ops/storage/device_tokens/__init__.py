"""Copies of chosen tokens on the device: their addresses, and the eviction of old ones for newly chosen ones."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .state import EMPTY, TokenSlots

__all__ = ["EMPTY", "TokenSlots", "bring_tokens", "locate_tokens", "young_tokens"]

bring_tokens = operator(reference.bring_tokens, on="ids", in_place=("kv",))
locate_tokens = operator(reference.locate_tokens, on="ids")
young_tokens = operator(reference.young_tokens, on="stamps")
