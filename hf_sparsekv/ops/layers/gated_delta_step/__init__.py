"""One token of each row through a gated delta rule layer, between its projections."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference
from .reference import check

__all__ = ["check", "gated_delta_step"]

gated_delta_step = operator(reference.gated_delta_step, on="state", in_place=("conv_state", "state"))
