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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..untraced import untraced

_WHY = (
    "keys and values of a sparse cache are copies, so that writing to them changes nothing: change them before they "
    "are cached, by a forward hook on the attention module's k_proj or v_proj; or use transformers' DynamicCache. To "
    "edit the copy itself: clone() it"
)


class ReadOnlyTensor(Tensor):
    """A tensor that raises RuntimeError where an operator would write it, or a view of it, in place.

    The schema of each operator names the arguments that it writes. Memory given away has no schema: DLPack is refused
    and arrays of numpy are read-only. Writes to a storage, and inside ``torch.vmap``, are not noticed.
    """

    @classmethod
    @untraced
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _RAW and isinstance(args[0], cls):
            raise RuntimeError(_WHY)
        held = {_address(one) for one in tree_leaves((args, kwargs)) if isinstance(one, cls)} - {None}
        with torch._C.DisableTorchFunctionSubclass(), _Unwritten(held):
            out = func(*args, **kwargs)
        if isinstance(out, np.ndarray):
            out.setflags(write=False)
        if isinstance(out, Tensor) or (isinstance(out, list | tuple) and any(isinstance(one, Tensor) for one in out)):
            return tree_map_only(Tensor, lambda one: cls._kept(one, held), out)
        return out  # numbers, perhaps many, and sizes, which are no trees

    @classmethod
    def _kept(cls, one: Tensor, held: set[int | None]) -> Tensor:
        """A result read-only if it is in memory that is; itself where it is an argument (``requires_grad_()``)."""
        return cls.of(one) if _address(one) in held and not isinstance(one, cls) else one

    @classmethod
    def of(cls, one: Tensor) -> ReadOnlyTensor:
        """The same memory, read-only. It is no view where autograd needs none: Dynamo follows ``_base`` without end."""
        return one.as_subclass(cls) if one.requires_grad else Tensor._make_subclass(cls, one)

    def set_(self, *source: Any, **place: Any) -> Any:  # which does not come to __torch_function__
        raise RuntimeError(_WHY)

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        new = memo[id(self)] = self._plain().clone()
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # so that torch.load() needs no class of this package


# Give memory away, or write it without an operator.
_RAW = (Tensor.data.__set__, Tensor.__dlpack__, Tensor.apply_, Tensor.map_)  # type: ignore[attr-defined]


class _Unwritten(TorchDispatchMode):
    """Operators that write a tensor whose memory begins at one of the addresses raise RuntimeError."""

    def __init__(self, held: set[int | None]) -> None:
        super().__init__()
        self.held = held

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                if any(isinstance(one, Tensor) and _address(one) in self.held for one in tree_leaves(given)):
                    raise RuntimeError(_WHY)
        return func(*args, **kwargs)


def _address(one: Tensor) -> int | None:
    """Address of a tensor's data; None for a sparse one, or inside a transform of torch.func."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return one.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


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
        return None if copy is None else ReadOnlyTensor.of(copy)

    def __set__(self, layer: Any, value: Tensor | None) -> None:
        if value is not None:  # the constructor of transformers' own layer sets None
            raise AttributeError(_WHY)

    def __delete__(self, layer: Any) -> None:
        raise AttributeError(_WHY)
