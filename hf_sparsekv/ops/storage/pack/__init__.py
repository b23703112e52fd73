"""Gather the chosen tokens of each KV head into one buffer; copy only newly chosen ones."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["pack"]

pack = operator(reference.pack, on="ids", in_place=("kv", "packed", "page_ids"))
