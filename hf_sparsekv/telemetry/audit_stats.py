"""Statistics of audited texts, for each token and over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..kv.audited import Audited


class AuditedToken(NamedTuple):
    """A token that a sparse step has drawn, compared with full attention over the exact keys of the whole text.

    Args:
        row, column: its place in the result of ``generate()``.
        token: its id.
        kl: KL divergence of the sparse distribution from full attention's, in nats.
        variation: total variation between the two: 0 to 1.
        same_top: whether their likeliest tokens are the same.
        probability: that full attention gives the token. (Of the logits, before temperature and other processors.)
    """

    row: int
    column: int
    token: int
    kl: float
    variation: float
    same_top: bool
    probability: float


@dataclass(frozen=True)
class AuditStats:
    """The audit of a cache's texts since it was made or reset.

    Args:
        tokens: those that sparse steps have drawn, in the order of the passes.
        by_full: tokens that full attention has drawn itself: the first one after an exact prompt, and with ``max_loss``
            those at which the text went back, the one after each interval, and those of dense steps.
        returns: how often the text of a row went back.
        taken_back: tokens that were lost so.
    """

    tokens: tuple[AuditedToken, ...]
    by_full: int = 0
    returns: int = 0
    taken_back: int = 0

    @property
    def mean_kl(self) -> float | None:
        """Mean KL divergence; None without tokens."""
        return self._mean([one.kl for one in self.tokens])

    @property
    def mean_variation(self) -> float | None:
        """Mean total variation; None without tokens."""
        return self._mean([one.variation for one in self.tokens])

    @property
    def other_top(self) -> float | None:
        """Share of the tokens whose likeliest token full attention does not share; None without tokens."""
        return self._mean([float(not one.same_top) for one in self.tokens])

    @property
    def largest(self) -> AuditedToken | None:
        """The token of the largest total variation; None without tokens."""
        return max(self.tokens, key=lambda one: one.variation, default=None)

    def _mean(self, values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def __str__(self) -> str:
        if self.largest is None:
            line = "no token of a sparse step audited"
        else:
            top = self.largest
            line = (
                f"{len(self.tokens)} tokens audited: total variation {self.mean_variation:.3f} on average, "
                f"{top.variation:.2f} at most (column {top.column:,} of row {top.row}), another likeliest token in "
                f"{self.other_top:.1%}"
            )
        if self.returns:
            line += f"; went back {self.returns} times, by {self.taken_back} tokens"
        return line


def audit_stats(log: Audited | None) -> AuditStats | None:
    """The statistics of ``log``. Waits for the device."""
    if log is None:
        return None
    tokens = []
    for rows, columns, ids, numbers in log.parts:
        for row, column, token, (kl, variation, same, chance) in zip(
            rows.tolist(), columns.tolist(), ids.tolist(), numbers.tolist()
        ):
            tokens.append(AuditedToken(row, column, token, kl, variation, bool(same), chance))
    return AuditStats(tuple(tokens), log.by_full, log.returns, log.taken_back)
