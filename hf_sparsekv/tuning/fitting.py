"""The numbers of a crossover (:mod:`..policies.crossover`), fitted to measured steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..policies.crossover import Rule

METHODS = ("two_level", "two_level:lag", "block_only", "token_only")


@dataclass(frozen=True)
class Timing:
    """One layer's attention in a decode step, in microseconds: dense, and by method."""

    batch: int
    tokens: int  # in full blocks, a row
    dense: float
    sparse: dict[str, float]


def fit(timings: list[Timing], width: int, methods: tuple[str, ...] = METHODS) -> dict[str, Rule]:
    """The rule of each method that was measured; without one: a method that gains nothing with the length.

    The difference between both times is taken as linear in 1, rows and tokens, and fitted relative to the times, so
    that the large shapes, where nobody doubts what is quicker, do not decide.

    Args:
        timings: several batches and lengths.
        width: bytes of a token's keys and values, all KV heads.
        methods: those to look for.

    Raises:
        ValueError: too few batches or lengths to tell the three parts apart.
    """
    features = np.array([[1.0, t.batch, t.batch * t.tokens] for t in timings]).reshape(-1, 3)
    if np.linalg.matrix_rank(features) < 3:
        raise ValueError("timings of at least two batches and two lengths are needed")
    rules = {}
    for method in methods:
        if any(method not in t.sparse for t in timings):
            continue
        gain = np.array([t.dense - t.sparse[method] for t in timings])
        weight = 1 / np.array([t.dense + t.sparse[method] for t in timings])
        fixed, row, token = np.linalg.lstsq(features * weight[:, None], gain * weight, rcond=None)[0]
        if token > 0:
            rules[method] = Rule(float(-fixed / token * width), float(-row / token))
    return rules


def wrong_by(rule: Rule, timing: Timing, method: str, width: int) -> float:
    """How much longer the step that the rule chooses takes than the other one; 0 if it is the quicker one."""
    selecting = timing.sparse[method]
    if timing.tokens <= rule.tokens(timing.batch, width):
        return max(0.0, timing.dense / selecting - 1)
    return max(0.0, selecting / timing.dense - 1)
