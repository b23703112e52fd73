"""One token of each row through a Mamba 2 layer, between its projections."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["mamba2_step"]

mamba2_step = operator(reference.mamba2_step, on="state", in_place=("conv_state", "state"))
