"""The result of reading a prompt for a batch of rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..layers.cache_state import CacheState


class Prefilled(NamedTuple):
    """A prompt that has been read.

    Args:
        cache: one row, over the pools of the batch that it was made for.
        logits: ``[1, vocabulary]`` of its last token.
    """

    cache: CacheState
    logits: Tensor
