"""Take the rows of a captured step further."""

from __future__ import annotations

from .._dispatch import operator
from . import reference

__all__ = ["begin_step"]

begin_step = operator(reference.begin_step, on="now")
