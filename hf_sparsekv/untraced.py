"""Keeps TorchDynamo out of this package: where compiled models call it, they break their graph and call it eagerly.

A cache keeps numbers on the host (lengths, block ids, plans) that change in every step. Dynamo guards some of them and
takes others for constants, so a traced step attends to the tokens of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch

Decorated = TypeVar("Decorated", bound=Callable)

_REASON = "sparse caches keep state on the host, which no graph can hold: use hf_sparsekv.optimize() for captured steps"


def untraced(function: Decorated) -> Decorated:
    """Decorates a function that models call: neither it nor what it calls is traced (0.4 us a call).

    ``torch.compile(fullgraph=True)`` raises at such a call.
    """
    if _is_untraced(function):
        return function
    return torch.compiler.disable(function, reason=_REASON)  # type: ignore[return-value]


def _is_untraced(function: Callable) -> bool:
    return getattr(function, "_torchdynamo_disable", False)


def all_untraced(cls: type) -> None:
    """Have :func:`untraced` decorate all public methods and properties of a class, also those of other bases."""
    for name in dir(cls):
        if not name.startswith("_") and (found := _untraced(_static(cls, name))) is not None:
            setattr(cls, name, found)


def _static(cls: type, name: str) -> Any:
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


def _untraced(member: Any) -> Any:
    """The decorated form of what a class holds; None if it is decorated already, or if models cannot call it."""
    if isinstance(member, property):
        parts = [member.fget, member.fset, member.fdel]
        if all(part is None or _is_untraced(part) for part in parts):
            return None
        return property(*(part and untraced(part) for part in parts), doc=member.__doc__)
    if isinstance(member, classmethod | staticmethod | type | cached_property) or not callable(member):
        return None
    return None if _is_untraced(member) else untraced(member)
