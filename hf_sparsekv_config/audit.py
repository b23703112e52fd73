"""Options of audits: how often full attention looks at a text, and how far from it a token may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .options import Number, Options, Positive


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Options):
    """How the tokens of sparse steps are compared with full attention, in hindsight (docs/exact.md).

    Args:
        interval: tokens of each row between two exact passes. A pass over more tokens takes less time for each. The
            logits of so many sparse steps are kept meanwhile, for the whole vocabulary.
        max_loss: the largest total variation between full attention's distribution of a token and the sparse step's;
            ``"top"``: their likeliest tokens must be the same. The text goes back to the first token beyond it, which
            full attention draws instead. ``None``: the text stays as it is.
        release: when a streamer gets tokens of a text with ``max_loss``. ``"checked"``: once full attention has looked
            at them. ``"drawn"``: at once; its method ``take_back(tokens)`` is called with the number of the latest
            tokens that are taken back.
    """

    interval: Positive = 128
    max_loss: Annotated[float, Number(0, 1)] | Literal["top"] | None = None
    release: Annotated[str, Literal["checked", "drawn"]] = "checked"
