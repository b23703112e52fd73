"""Parameters of a crossover rule (:mod:`..policies.crossover`), fitted to measured steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np

from ..policies.crossover import Rule, Verification

METHODS = ("two_level", "two_level:lag", "block_only", "token_only")


@dataclass(frozen=True)
class Timing:
    """One layer's attention in a decode step, in microseconds: dense, and by method."""

    batch: int
    tokens: int  # in full blocks, a row
    dense: float
    sparse: dict[str, float]
    verify: dict[int, float] = field(default_factory=dict)  # by tokens of a pass that verifies drafts


def fit(timings: list[Timing], width: int, methods: tuple[str, ...] = METHODS) -> dict[str, Rule]:
    """The rule of each measured method. Methods whose gain does not grow with the length get none.

    The gain over dense attention is modelled as linear in 1, rows and tokens. The fit is relative to the times, so that
    large shapes, where the faster method is clear, do not dominate. The gain is not quite linear, because beyond some
    length tokens are selected by another algorithm. Where the fitted rule would choose a slower step, the nearest rule
    with the least worst-case cost replaces it.

    Args:
        timings: several batches and lengths.
        width: bytes of a token's keys and values, all KV heads.
        methods: methods to fit.

    Raises:
        ValueError: too few batches or lengths to fit the three coefficients.
    """
    features = np.array([[1.0, t.batch, t.batch * t.tokens] for t in timings]).reshape(-1, 3)
    if np.linalg.matrix_rank(features) < 3:
        raise ValueError("timings of at least two batches and two lengths are needed")
    rules = {}
    for method in methods:
        if any(method not in t.sparse for t in timings):
            continue
        gain = [t.dense - t.sparse[method] for t in timings]
        fixed, row, token = _linear(features, gain, [t.dense + t.sparse[method] for t in timings])
        if token > 0:
            rule = Rule(float(-fixed / token * width), float(-row / token))
            rules[method] = _least_wrong(rule, timings, method, width)
    return rules


def fit_verifications(timings: list[Timing], width: int) -> dict[int, Verification]:
    """By tokens of a pass that verifies drafts, what it takes beyond a dense step: linear in the bytes that both read.

    ``width``: bytes of a token's keys and values, all KV heads.
    """
    found = {}
    for tokens in sorted(set.intersection(*(set(t.verify) for t in timings)) if timings else ()):
        features = np.array([[1.0, t.batch * t.tokens * width] for t in timings])
        longer = [t.verify[tokens] - t.dense for t in timings]
        fixed, byte = _linear(features, longer, [t.verify[tokens] for t in timings])
        found[tokens] = Verification(max(0.0, float(fixed)) / 1e6, max(0.0, float(byte)) / 1e6)
    return found


def _linear(features: np.ndarray, values: list[float], times: list[float]) -> np.ndarray:
    """Coefficients of ``features`` that give ``values`` with the least squares relative to ``times``."""
    weight = 1 / np.array(times)
    return np.linalg.lstsq(features * weight[:, None], np.array(values) * weight, rcond=None)[0]


def _least_wrong(rule: Rule, timings: list[Timing], method: str, width: int) -> Rule:
    """The rule whose worst choice among the timings costs least; among equals the nearest to ``rule``.

    Candidates are given by their crossover lengths for the fewest and for the most rows. Each is between two measured
    lengths, before all of them, or after all of them.
    """

    def cost(one: Rule) -> float:
        return max(wrong_by(one, t, method, width) for t in timings)

    few, many = (pick(t.batch for t in timings) for pick in (min, max))

    def changes(batch: int) -> list[float]:
        found = sorted({float(t.tokens) for t in timings if t.batch == batch})
        return [found[0] / 2, *((a + b) / 2 for a, b in pairwise(found)), found[-1] * 1.5]

    best, least = rule, (cost(rule), 0.0)
    for first, last in product(changes(few), changes(many)):
        fixed = (first - last) / (1 / few - 1 / many)  # tokens
        other = Rule(fixed * width, first - fixed / few)
        apart = sum(abs(math.log((other.tokens(n, width) + 1) / (rule.tokens(n, width) + 1))) for n in (few, many))
        if (found := (round(cost(other), 3), apart)) < (round(least[0], 3), least[1]):
            best, least = other, found
    return best


def wrong_by(rule: Rule, timing: Timing, method: str, width: int) -> float:
    """Relative extra time of the step that the rule chooses over the other one; 0 if the chosen step is faster."""
    selecting = timing.sparse[method]
    if timing.tokens <= rule.tokens(timing.batch, width):
        return max(0.0, timing.dense / selecting - 1)
    return max(0.0, selecting / timing.dense - 1)
