"""The configuration of a window: nothing is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from .options import Positive
from .sparse import SparseConfig


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(SparseConfig):
    """A decode step attends to the first ``sinks`` tokens and to the ``window`` most recent ones.

    Source: StreamingLLM. Tokens between them stay stored, at their own positions, so that a later prompt can attend to
    them; a step never reads them. Recent tokens that do not fill a block yet are attended to as well
    (``SparseConfig``).
    """

    window: Positive = 1024
