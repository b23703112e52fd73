"""Counters of policies: ``Policy.measured()`` gives these of each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WalkStats:
    """Reads of one layer's selections by need: one adaptive selection a step, row and KV head.

    Args:
        layer: index of the layer.
        walks: how many there were.
        tokens_used: tokens that they attended to beside sinks and recent ones, in all.
        capped: walks that ``token_budget`` ended before the share of the mass was covered.
        mass, least_mass: the attention mass that the walks estimated to cover, mean and least (least of the heads).
        histogram: walks by tokens used: entry 0 none or one, entry ``b`` more than ``2 ** (b - 1)``, up to ``2 ** b``.
        audits: walks that were compared with the attention to all tokens (``ProgressiveConfig(audit_every=...)``).
        audited_mass, least_audited_mass: the mass that these covered, mean and least. None without audits.
        audited_estimate: the mass that the same walks estimated, mean.
    """

    layer: int
    walks: int
    tokens_used: int
    capped: int
    mass: float | None
    least_mass: float | None
    histogram: tuple[int, ...]
    audits: int = 0
    audited_mass: float | None = None
    least_audited_mass: float | None = None
    audited_estimate: float | None = None

    def since(self, earlier: WalkStats) -> WalkStats:
        """The walks after ``earlier``. The least masses stay those of all walks."""
        walks, audits = self.walks - earlier.walks, self.audits - earlier.audits

        def mean(name: str, weight: str, count: int) -> float | None:
            if not count:
                return None
            sums = [(getattr(w, name) or 0.0) * getattr(w, weight) for w in (self, earlier)]
            return (sums[0] - sums[1]) / count

        return replace(
            self,
            walks=walks,
            tokens_used=self.tokens_used - earlier.tokens_used,
            capped=self.capped - earlier.capped,
            mass=mean("mass", "walks", walks),
            histogram=tuple(a - b for a, b in zip(self.histogram, earlier.histogram)),
            audits=audits,
            audited_mass=mean("audited_mass", "audits", audits),
            audited_estimate=mean("audited_estimate", "audits", audits),
        )


@dataclass(frozen=True)
class PackStats:
    """Copies that one layer has made to keep its chosen tokens together on the device.

    Args:
        needed: chosen tokens, over all selections, rows and KV heads.
        copied: of these, not there yet.
        bytes: of these.
        late: layer calls that attended to an older selection, because the last one was not there in time.
    """

    needed: int
    copied: int
    bytes: int
    late: int = 0
