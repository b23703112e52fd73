"""Layers of a batch of rows beside those that select: rings of sliding windows, and states.

They keep no blocks: a row is all that they hold of it, of fixed size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layers.cache_state import CacheState, FullLayer
from ..layers.kinds import LayerKind

Found = list[tuple[Tensor, Tensor, int]]
Snapshot = list[tuple[int, Any]]  # of each layer, by its index


class OtherLayers:
    """The layers of a batch's cache that are no :class:`..FullLayer`.

    A step changes some tensors in all rows that it runs. So what a held row has there is kept apart until it goes on.

    Args:
        cache: the batch's.
    """

    def __init__(self, cache: CacheState) -> None:
        self.cache = cache
        self._layers: dict[int, LayerKind] = {}
        self._held: dict[int, list[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._layers)

    def open(self, like: CacheState, rows: int) -> None:
        """Make them for ``rows`` rows, like those of ``like``, which has read the first row."""
        layers = self.cache.layers
        for index, layer in enumerate(like.layers):
            if not isinstance(layer, FullLayer):
                made: Any = layer.for_rows(self.cache, index, rows)
                layers[index] = self._layers[index] = made

    def add_rows(self, other: CacheState, found: Found) -> None:
        """Add tensors that hold rows of these layers and of those of ``other``: :meth:`..LayerKind.add_rows`."""
        for index, layer in self._layers.items():
            layer.add_rows(other.layers[index], found)

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        found: Found = []
        self.add_rows(self.cache, found)
        return sum(mine.nbytes for mine, _, _ in found)

    def snapshot(self, cache: CacheState) -> Snapshot:
        """Copies of what the layers of a cache of one row hold now."""
        return [(index, cache.layers[index].snapshot()) for index in self._layers]

    def restore(self, cache: CacheState, held: Snapshot, tokens: int) -> None:
        """The layers of ``cache``, which is empty, begin with ``tokens`` tokens, as ``held``."""
        for index, layer in held:
            cache.layers[index].restore(layer, tokens)

    def hold(self, row: int) -> None:
        """Keep what steps change of a row that waits."""
        self._held[row] = [t[row].clone() for t in self._restless()]

    def resume(self, row: int, to: int | None = None) -> None:
        """A row goes on, or its copy in row ``to`` does, from where it was held."""
        held = self._held.get(row) if to is not None else self._held.pop(row, None)
        for t, kept in zip(self._restless(), held or ()):
            t[row if to is None else to].copy_(kept)

    def move(self, row: int, source: int) -> None:
        """Row ``row`` is what row ``source`` was."""
        if source in self._held:
            self._held[row] = self._held.pop(source)

    def leave(self, row: int) -> None:
        """A row has ended."""
        self._held.pop(row, None)

    def _restless(self) -> list[Tensor]:
        return [t for layer in self._layers.values() for t in layer.restless]
