"""Keep the chosen tokens of each KV head together; only newly chosen ones travel."""

from __future__ import annotations

from .._dispatch import operator
from . import reference

__all__ = ["pack"]

pack = operator(reference.pack, on="ids", in_place=("kv", "packed", "places"))
