"""The structure of a model's decoder, found from its modules: its layers, and the token mixers of each.

It knows only models, not queries or streams.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

from ..cache_name import declared_name

_STATE = {"update_conv_state", "update_recurrent_state"}  # cache methods that linear attention calls


def parameters(module: nn.Module) -> set[str]:
    """The names of what a module's ``forward()`` takes."""
    return set(inspect.signature(inspect.unwrap(type(module).forward)).parameters)


@lru_cache(maxsize=128)
def _keeps_state(kind: type) -> bool:
    """Modules of this class keep a state of linear attention in the cache, not keys and values.

    Up to transformers 5.23 they took the cache by a name of its own; from 5.24 on by the one that attention uses.
    """
    methods = (inspect.unwrap(one) for base in kind.__mro__ for one in vars(base).values() if inspect.isfunction(one))
    return any(_STATE.intersection(method.__code__.co_names) for method in methods)


def _attends(module: nn.Module) -> bool:
    """The module caches keys and values."""
    return declared_name(module) is not None and not _keeps_state(type(module))


def _mixers(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The token mixers of a decoder layer: attention of any kind."""
    for name, child in layer.named_children():
        if hasattr(child, "layer_idx"):
            yield name, child


def attention_name(layer: nn.Module) -> str | None:
    """The name of a decoder layer's only attention module that takes a cache."""
    names = [name for name, child in _mixers(layer) if _attends(child) and hasattr(child, "config")]
    return names[0] if len(names) == 1 else None


def layer_type(attention: nn.Module) -> str | None:
    """The kind of an attention module's layer, where the model has several."""
    kinds = getattr(attention.config, "layer_types", None)
    return kinds[attention.layer_idx] if kinds else None


def stack_of(model: nn.Module) -> nn.Module | None:
    """The part of a model whose ``layers`` are those of its decoder."""
    for module in model.modules():
        layers = module._modules.get("layers")
        if isinstance(layers, nn.ModuleList) and any(attention_name(layer) for layer in layers):
            return module
    return None
