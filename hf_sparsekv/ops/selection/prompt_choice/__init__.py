"""Which blocks of keys a tile of a prompt's queries attends to."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["prompt_choice"]

prompt_choice = operator(reference.prompt_choice, on="pooled")
