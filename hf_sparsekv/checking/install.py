"""A model whose texts are checked: ``generate()``'s loop is replaced where its cache asks for that."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import GenerationMixin

from ..cache_name import given_cache
from ..cuda_graph.late_stop import LateStopping
from ..layers.cache_state import CacheState
from ..model_watch import kind_of
from .call import Call, Check


class CheckedSampling:
    """Base class that comes before the model's own class: its loop is that of the check that the cache asks for.

    Everything else over such a cache, beams or drafts of another model, runs as it is.
    """

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, **kwargs: Any
    ):
        cache, own = given_cache(kwargs), super()._sample  # type: ignore[misc]
        given = input_ids, logits_processor, stopping_criteria, generation_config
        if not isinstance(cache, CacheState) or (check := cache.row_table.exactness.check) is None:
            return own(*given, synced_gpus=synced_gpus, **kwargs)
        return check.generate(Call(self, cache, own, *given, kwargs.pop("streamer", None), synced_gpus, kwargs))

    def _beam_search(self, *args: Any, **kwargs: Any):
        _refuse(kwargs, "beams")
        return super()._beam_search(*args, **kwargs)  # type: ignore[misc]

    def _assisted_decoding(self, *args: Any, **kwargs: Any):
        _refuse(kwargs, "prompt lookup or an assistant")
        return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]


def _refuse(kwargs: dict[str, Any], what: str) -> None:
    """Raise ``ValueError`` if a check of the given cache is not for such a loop."""
    cache = given_cache(kwargs)
    if isinstance(cache, CacheState) and cache.row_table.exactness.check is not None:
        cache.row_table.exactness.check.refuse(what)


def install(model: nn.Module, check: Check) -> None:
    """Have ``model.generate()`` check texts over caches that ask for it, if its loop is transformers' own.

    Raises:
        ValueError: it is not, and ``check`` cannot do without.
    """
    kind: Any = type(model)
    if getattr(kind, "_sample", None) in (GenerationMixin._sample, LateStopping._sample):
        model.__class__ = _checked(kind)
    else:
        check.refuse("a generate() of the model's own")


def remove(model: nn.Module) -> None:
    """Undo :func:`install`."""
    kind = kind_of(model)
    if kind.__bases__[:1] == (CheckedSampling,):
        model.__class__ = kind.__bases__[1]


@functools.cache
def _checked(kind: type) -> type:
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (CheckedSampling, kind), named)
