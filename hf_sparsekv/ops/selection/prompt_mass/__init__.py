"""Estimates of the attention mass that tiles of a prompt's queries give to blocks of keys."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["prompt_mass"]

prompt_mass = operator(reference.prompt_mass, on="query")
