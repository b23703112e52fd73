"""What an audit sees of ``generate()``'s own loop: logits, tokens, and rows that end. The loop runs as it would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteriaList

from .text import pads


class Recorder(LogitsProcessor):
    """Keeps the logits of each step, before any processor.

    In the dtype of the model's last layer if that loses nothing, which the first step's logits tell.

    Attributes:
        kept: of the tokens that were not audited yet, ``[batch, vocabulary]`` each.
        runs_ahead: to a loop that learns late that a text has ended: one call too many changes nothing.
    """

    runs_ahead = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.kept: list[Tensor] = []
        self._dtype, self._known = dtype, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if not self._known:
            lower = scores.to(self._dtype).to(scores.dtype)
            self._dtype, self._known = self._dtype if torch.equal(lower, scores) else scores.dtype, True
        self.kept.append(scores.to(self._dtype, copy=True))
        return scores


class Watched(StoppingCriteriaList):
    """The criteria of a call, which tell of each new token.

    Args:
        criteria: of the call. told: called with all tokens ``[batch, n]`` after each new one.

    Attributes:
        done: bool ``[batch]``, rows that get padding in the place of each new token that was not audited yet, and
            of the next.
    """

    def __init__(self, criteria: Sequence, told: Callable[[Tensor], None]) -> None:
        super().__init__(criteria)
        self._told, self._pads = told, pads(criteria)
        self.done: list[Tensor] = []

    def __call__(self, input_ids, scores, **kwargs) -> Tensor:  # type: ignore[override]
        ends = super().__call__(input_ids, scores, **kwargs)
        if not self.done:
            self.done.append(torch.zeros_like(ends))
        done = self.done[-1] | ends
        self.done.append(done if self._pads else done.all().expand_as(done))
        self._told(input_ids)
        return ends
