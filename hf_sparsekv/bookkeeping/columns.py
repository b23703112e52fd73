"""Which columns of a forward pass are tokens, by its attention mask.

Apart from the cache because it depends on the pass alone: it is worked out once a pass, not once a layer.
"""

from __future__ import annotations

from torch import Tensor

from ..attention.handle import Step
from ..attention.masks import new_columns


class NewColumns:
    """The answer to the last mask."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None
        self._valid: Tensor | None = None

    def valid(self, mask: Tensor, step: Step) -> Tensor | None:
        """Validity of the step's columns, bool ``[batch, q]``; None if none is padding."""
        if self._mask is not mask:
            valid = new_columns(mask, step.past, step.length).expand(len(step.k), -1)  # one mask may serve all rows
            self._mask, self._valid = mask, None if bool(valid.all()) else valid
        return self._valid

    def clear(self) -> None:
        """Forget it."""
        self._mask = self._valid = None
