"""``layer.keys`` and ``layer.values``: copies for inspection, which refuse to be written.

Transformers' own layers hold the tensors that steps read, so code that edits them in place (steering, simulated
quantisation) takes effect there. In a copy the edit would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WHY = (
    "keys and values of a sparse cache are copies, so that writing to them changes nothing: change them before they "
    "are cached, by a forward hook on the attention module's k_proj or v_proj; or use transformers' DynamicCache. To "
    "edit the copy itself: clone() it"
)


class ReadOnlyTensor(Tensor):
    """A tensor that raises RuntimeError where it, or a view of it, would be written in place."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(one, cls) for one in _written(func, args, kwargs)):
            raise RuntimeError(_WHY)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if isinstance(out, np.ndarray):
            out.setflags(write=False)
        if not isinstance(out, Tensor | tuple | list):
            return out
        held = {_address(one) for one in _flat(args) if isinstance(one, cls)} - {None}

        def like(one: Any) -> Any:
            return one.as_subclass(cls) if _address(one) in held else one

        if isinstance(out, Tensor):
            return like(out)
        same = [like(one) if isinstance(one, Tensor) else one for one in out]
        return same if isinstance(out, list) else tuple(same) if type(out) is tuple else type(out)(same)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        new = memo[id(self)] = self._plain().clone()
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # so that torch.load() needs no class of this package


def _address(one: Tensor) -> int | None:
    """Address of a tensor's data; None for a sparse one, or inside a transform of torch.func."""
    try:
        return one.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def _flat(args: Any) -> list[Any]:
    """The arguments, and what lists among them hold."""
    return [part for one in args for part in (one if isinstance(one, list | tuple) else (one,))]


def _written(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The tensors that ``func`` writes: the target of an in-place operation or of an assignment, or ``out=``."""
    name = getattr(func, "__name__", "").split(".")[0]
    if name in ("requires_grad_", "share_memory_") or func is Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
        return []
    named = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    writes = named or operator or name in ("__setitem__", "__set__")
    out = kwargs.get("out")
    return (_flat(args[:1]) if writes else []) + _flat([out] if isinstance(out, Tensor) else out or [])


class Inspected:
    """``keys`` or ``values`` of a cache's layer: a read-only copy ``[batch, H, length, D]``; None while empty.

    Args:
        read: makes the copy of a layer's.
    """

    def __init__(self, read: Callable[[Any], Tensor | None]) -> None:
        self.read = read

    def __get__(self, layer: Any, kind: type | None = None) -> Any:
        if layer is None:
            return self
        copy = self.read(layer)
        return None if copy is None else copy.as_subclass(ReadOnlyTensor)

    def __set__(self, layer: Any, value: Tensor | None) -> None:
        if value is not None:  # the constructor of transformers' own layer sets None
            raise AttributeError(_WHY)

    def __delete__(self, layer: Any) -> None:
        raise AttributeError(_WHY)
