"""Memory of layers: one allocation for each, or side by side for all layers that are made together.

Pools, rings and fields of a cache's layers ask for it in turn.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST = 1 << 30  # bytes of all layers: their memory is freed when the last of them has left it, as when pools grow
ALIGNED = 16  # bytes: kernels are compiled again for addresses that are no multiples of it


class _Here(threading.local):
    layers = 0  # that are made together; 0: none are

    def __init__(self) -> None:
        self.held: dict[tuple, Iterator[Tensor]] = {}


_here = _Here()


@contextmanager
def for_layers(layers: int) -> Iterator[None]:
    """Inside, so many layers ask for memory in turn, and get theirs side by side."""
    _here.layers, _here.held = layers, {}
    try:
        yield
    finally:
        _here.layers, _here.held = 0, {}


def new_memory(
    what: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, zeros: bool = False
) -> Tensor:
    """A tensor of this shape, which is part of a layer's ``what``."""
    make, size = torch.zeros if zeros else torch.empty, math.prod(shape) * dtype.itemsize
    if not _here.layers or size % ALIGNED or size * _here.layers > MOST:
        return make(shape, dtype=dtype, device=device)
    kind = what, shape, dtype, device
    held = _here.held.get(kind)
    if held is None:
        held = _here.held[kind] = iter(make((_here.layers, *shape), dtype=dtype, device=device).unbind(0))
    one = next(held, None)
    return make(shape, dtype=dtype, device=device) if one is None else one
