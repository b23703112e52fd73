"""Sums of attention masses that a scoring kernel adds up for the selection after it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PARTS = 3  # sums of a part: stored tokens, recent ones, the ratios of recent ones' true masses to those of their labels


@dataclass
class PartialSums:
    """Sums that :func:`.token_score.token_score` may compute for :func:`.mass_select.mass_select`.

    Attributes:
        recent_kv, stored, scale: as those of :func:`.mass_select.mass_select`.
        parts: float32 ``[batch * H, n, G, 3, 2]``, for each of ``n`` parts of a row: the largest base-2 logit, and the
            sum of the masses relative to it. ``None`` where the scores come from another kernel, which adds up nothing.
    """

    recent_kv: Tensor
    stored: Tensor | None
    scale: float
    parts: Tensor | None = None
