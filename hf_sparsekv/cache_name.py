"""The keyword by which a model takes its cache: ``cache`` from transformers 5.24 on, ``past_key_values`` before.

From 5.24 on the old keyword is deprecated and warns. Code that looks at calls accepts both. Our own calls use the one
that the called model declares; its signature is read once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import GenerationMixin

NAMES = ("cache", "past_key_values")  # the newer one first
_known: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def _among(names: Iterable[str]) -> str | None:
    names = set(names)
    return next((name for name in NAMES if name in names), None)


def declared_name(module: nn.Module) -> str | None:
    """The keyword for a cache that ``module.forward`` declares; None if it takes no cache.

    A subclass that hands its keywords on, as fused modules do, declares what its base class declares.
    """
    for kind in type(module).__mro__:
        forward = kind.__dict__.get("forward")
        name = None if forward is None else _among(inspect.signature(forward).parameters)
        if name is not None:
            return name
    return None


# The keyword of generate() itself, which has it among others that it hands on.
GENERATE = _among(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters) or NAMES[-1]


def cache_name(model: Any) -> str:
    """The keyword for a cache in ``model(...)``.

    A wrapper that declares none, such as PEFT's, hands its keywords on: the first module inside that declares one
    decides. Anything but a module is taken for a function around one.
    """
    if not isinstance(model, nn.Module):
        return GENERATE
    name = _known.get(model)
    if name is None:
        name = _known[model] = next(filter(None, map(declared_name, model.modules())), GENERATE)
    return name


@functools.lru_cache(maxsize=64)
def output_name(kind: type) -> str:
    """The field for the cache in outputs of this dataclass."""
    return _among(field.name for field in dataclasses.fields(kind)) or GENERATE


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among a call's keywords, by either name; None if there is none."""
    cache = arguments.get("cache")
    return arguments.get("past_key_values") if cache is None else cache


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's other keywords."""
    return {name: value for name, value in arguments.items() if name not in NAMES}


def over(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword that gives a cache to a model: ``model(ids, **over(model, cache))``."""
    return {cache_name(model): cache}


def generate_over(cache: Any) -> dict[str, Any]:
    """The keyword that gives a cache to ``generate()``: ``model.generate(ids, **generate_over(cache))``."""
    return {GENERATE: cache}
