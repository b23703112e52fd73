"""Which combinations of a test's parameters run: of ``pairwise`` and ``few`` tests not all."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Iterator

import pytest


def _values(item: pytest.Item) -> set:
    """A test's parameters with their values."""
    return {(name, repr(value)) for name, value in _params(item).items()}


def _params(item: pytest.Item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _pairs(item: pytest.Item, alone: tuple[str, ...]) -> set:
    """All pairs of values of a test's parameters; those named ``alone`` are in none."""
    values = sorted(_values(item))
    if len(values) < 2:
        raise pytest.UsageError(f"{item.nodeid} is marked pairwise but has {len(values)} parameters: two are needed")
    paired = itertools.combinations([value for value in values if value[0] not in alone], 2)
    return set(values) | set(paired)


def _cover(group: list[pytest.Item], found: list[set]) -> list[pytest.Item]:
    """Few tests that have everything that was found in one of them."""
    missing, kept = set().union(*found), []
    # Ties by a hash: in order, the first value of every parameter would meet the first of all others alone.
    best = [(-len(found), -zlib.crc32(group[i].nodeid.encode()), i) for i, found in enumerate(found)]
    heapq.heapify(best)
    while missing:
        gain, order, i = heapq.heappop(best)
        left = len(found[i] & missing)
        if left == -gain:
            missing -= found[i]
            kept.append(group[i])
        else:
            heapq.heappush(best, (-left, order, i))  # it once had more: the next may have the most now
    return kept


def _grids(items: list[pytest.Item], *marked: str) -> Iterator[tuple[frozenset, list[pytest.Item]]]:
    """Tests with one of these markers that differ in parameters alone, and their markers."""
    groups: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        marks = frozenset(mark.name for mark in item.iter_markers())  # which of them run on a machine
        if marks.intersection(marked):
            groups.setdefault((item.parent, item.originalname, marks), []).append(item)
    for (_, _, marks), group in groups.items():
        yield marks, group


def not_needed(items: list[pytest.Item]) -> set[pytest.Item]:
    """Cases marked ``pairwise`` that need not run: of those with the same markers each pair of values is there."""
    dropped = set()
    for marks, group in _grids(items, "pairwise"):
        alone = () if "gpu" in marks else group[0].get_closest_marker("pairwise").kwargs.get("once", ())
        dropped |= set(group) - set(_cover(group, [_pairs(item, alone) for item in group]))
    return dropped


def not_telling(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests marked ``few`` or ``pairwise`` that ``make test`` leaves out: others have each of their values."""
    left_out = set()
    for marks, group in _grids(items, "few", "pairwise"):
        if "gpu" in marks or "slow" in marks:
            continue
        few = group[0].get_closest_marker("few")
        telling = few.kwargs if few else {}
        among = [item for item in group if all(_params(item)[name] in values for name, values in telling.items())]
        among = among or group  # named on the command line
        left_out |= set(group) - set(_cover(among, [_values(item) for item in among]))
    return left_out
