"""Blocks that a captured step makes old: of all layers alike by one launch, behind all that the step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..ops.seal import LayerBlocks, places_of, seal, seal_layers


class Due(NamedTuple):
    """What a layer seals, and the rows before and behind that."""

    layer: LayerBlocks
    rows: Tensor
    after: Tensor
    sinks: int
    block_table: Tensor


class StepSeals:
    """Seals the blocks of a captured step.

    Nothing in the step reads them. A launch a layer, beside the model's head, took 0.5 ms of a step of 8 rows and 1.1
    of one of 32 although hardly any of them had something to do (``benchmarks/NOTES.md``).

    Args:
        layers: those that will be :class:`Due` in each step, in their order, at the addresses that they have then.
    """

    def __init__(self, layers: Sequence[LayerBlocks]) -> None:
        self._places = {kind: places_of(alike) for kind, alike in _by_kind(layers, lambda layer: layer.kind).items()}

    def launch(self, due: Sequence[Due]) -> None:
        """Seal what is due: of all layers, or none."""
        for (kind, *_), alike in _by_kind(due, _together).items():
            places = self._places.get(kind)
            _, rows, after, sinks, block_table = alike[0]
            layers = [one.layer for one in alike]
            if places is not None and len(places) == len(layers):
                seal_layers(layers, rows, after, sinks, block_table, places)
                continue
            for layer in layers:
                seal(layer.recent_kv, rows, after, sinks, block_table, layer.kv, layer.index)


def _together(due: Due) -> tuple:
    """The same in layers that one launch seals."""
    return due.layer.kind, due.sinks, *(t.data_ptr() for t in (due.rows, due.after, due.block_table))


def _by_kind(given: Sequence, key) -> dict[tuple, list]:
    found: dict[tuple, list] = {}
    for one in given:
        found.setdefault(key(one), []).append(one)
    return found
