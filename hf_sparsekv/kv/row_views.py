"""Rows of many tensors, copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor


class RowViews:
    """Views of each row's state in all layers, created once.

    A view of each layer's tensors costs more than the copy of them all, and their addresses hardly ever change. Each
    copy checks that the tensors are the same ones.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._dims: tuple[int, ...] = ()
        self._groups: list[list[int]] = []  # of one device and dtype: only such are copied by one kernel
        self._views: dict[int, list[list[Tensor]]] = {}

    def copy(self, found: Sequence[tuple[Tensor, Tensor, int]], row: int, source: int | None = None) -> None:
        """Row ``row`` becomes what another is, on the tensors' devices, in the order of their streams.

        Args:
            found: what :meth:`.state.State.add_rows` gave, of all layers.
            source: that row of the same tensors; None: the only one of the second ones.
        """
        if not found:
            return
        mine, theirs, dims = zip(*found)
        if len(mine) != len(self._tensors) or not all(map(is_, mine, self._tensors)):
            self._begin(mine, dims)
        targets = self._of(row)
        sources = self._grouped(theirs) if source is None else self._of(source)
        for to, taken in zip(targets, sources):
            torch._foreach_copy_(to, taken)

    def _begin(self, tensors: tuple[Tensor, ...], dims: tuple[int, ...]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, tensor.dtype), []).append(i)
        self._tensors, self._dims, self._groups, self._views = tensors, dims, list(groups.values()), {}

    def _of(self, row: int) -> list[list[Tensor]]:
        if row not in self._views:
            views = [tensor.narrow(dim, row, 1) for tensor, dim in zip(self._tensors, self._dims)]
            self._views[row] = self._grouped(views)
        return self._views[row]

    def _grouped(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[tensors[i] for i in group] for group in self._groups]
