"""Rules: which of the drafted tokens of a round stay as they are, once full attention has looked at them.

A round keeps the longest beginning in which no token changes: full attention chooses the tokens that the rule leaves to
it, with the random numbers of their drafts, and where it chooses another one the text goes back.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from .losses import Losses


class Rule(Protocol):
    """A rule of a text.

    Attributes:
        compares: it looks at how far the drafts are from full attention, for which their logits are kept.
    """

    compares: bool

    def left(self, losses: Losses | None) -> Tensor | None:
        """Which drafts are left to full attention, bool ``[batch, k]``; None: all.

        ``losses``: of the drafts; None unless the rule compares.
        """
        ...


class Equal:
    """Full attention chooses every token, as in exact mode."""

    compares = False

    def left(self, losses: Losses | None) -> Tensor | None:
        return None


class Within:
    """Drafts within a limit stay. Full attention chooses the others.

    Args:
        most: the largest total variation; ``"top"``: the likeliest token has to be the same.
    """

    compares = True

    def __init__(self, most: float | Literal["top"]) -> None:
        self.most = most

    def left(self, losses: Losses | None) -> Tensor | None:
        assert losses is not None
        if self.most == "top":
            return ~losses.same | losses.variation.isnan()
        return ~(losses.variation <= self.most)  # NaN too
