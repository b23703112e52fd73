"""What ``generate()`` does with the cache that it was given, inside :func:`.generating.sparse`.

A model may drop a cache (Phi-3's, where it changes to the long factors of its rotary embedding), pass it over
(gradient checkpointing), or attend by another function. The text is as good as it would be; but it is dense, and the
keys and values lie somewhere else. So two methods of the model have a stand-in each: ``prepare_inputs_for_generation``
keeps the cache where the model drops it, and ``generate`` warns at its end if no decode step was one of ours.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .attention.interface import NAME
from .cache import SparseCache
from .cache_name import NAMES

_BATCHING = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


@dataclass
class _Call:
    """A ``generate()`` that is under way."""

    caches: list[Cache] = field(default_factory=list)  # given or made
    steps: int = 0  # decode steps that were asked for, of one token


class _StandIn:
    """Takes the place of a method on one model. An object, so that a copy of the model calls the copy's."""

    def __init__(self, original: Callable, does: Callable) -> None:
        functools.update_wrapper(self, original)  # generate() and pipelines look at signatures
        self.original, self.does = original, does

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self.original, *args, **kwargs)


class GenerateWatch:
    """Stands in for ``generate()`` of one model, and what belongs to it; :meth:`install` until :meth:`remove`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._calls: dict[int, _Call] = {}  # the last one of each thread
        self._own: dict[str, Any] = {}  # what the instance had in their place
        self._installed: dict[str, _StandIn] = {}

    def install(self) -> None:
        """Take their places. May be called again."""
        held = self.model.__dict__  # not by setattr(): to a captured step this is no change of the model
        places = {"generate": self._generate, "prepare_inputs_for_generation": self._prepare}
        places |= {name: self._refuse for name in _BATCHING if hasattr(self.model, name)}
        for name, does in places.items():
            if name not in self._installed:
                original = getattr(self.model, name)
                if name in held:
                    self._own[name] = held[name]
                held[name] = self._installed[name] = _StandIn(original, does)

    def remove(self) -> None:
        """Leave the model as it was. May be called again."""
        held = self.model.__dict__
        for name, one in self._installed.items():
            if held.get(name) is one:
                del held[name]
                if name in self._own:
                    held[name] = self._own[name]
        self._installed.clear()
        self._own.clear()

    # ------------------------------------------------------------------ the methods

    def gets(self, cache: Cache) -> None:
        """The ``generate()`` of this thread decodes over ``cache``."""
        call = self._calls.get(threading.get_ident())
        if call is not None:
            call.caches.append(cache)

    def decodes(self, cache: Cache, run: Callable[[], Any]) -> Any:
        """``run()`` is the loop of a ``generate()`` over ``cache``, which may have come here by a way of its own."""

        def loop() -> Any:
            self.gets(cache)
            return run()

        return loop() if threading.get_ident() in self._calls else self._generate(loop)

    def _generate(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        outer, call = self._calls.get(thread), _Call()
        self._calls[thread] = call
        try:
            out = original(*args, **kwargs)
        finally:
            if outer is None:
                self._calls.pop(thread, None)
            else:
                self._calls[thread] = outer
        reason = self._why_dense(call)
        if reason is not None:
            warnings.warn(f"no step of this generate() was sparse: {reason}", stacklevel=3)
        return out

    def _prepare(self, original: Callable, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict:
        given = next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)
        out = original(input_ids, *args, **kwargs)
        if isinstance(given, SparseCache) and not any(isinstance(out.get(name), Cache) for name in NAMES):
            out = self._again(original, input_ids, given, args, kwargs)
        call = self._calls.get(threading.get_ident())
        if call is not None and given is not None and given.get_seq_length():
            ids = out.get("input_ids")
            call.steps += isinstance(ids, Tensor) and ids.shape[1] == 1
        return out

    def _again(self, original: Callable, input_ids: Tensor, cache: SparseCache, args: tuple, kwargs: dict) -> dict:
        """The model has dropped the cache, because what is in it is of no more use: it reads all tokens once more.

        (transformers' own loop would go on with the last token alone.)
        """
        held = cache.get_seq_length()
        if held and input_ids.shape[1] <= held:
            raise RuntimeError(
                f"{type(self.model).__name__} gives up its cache at this length, and reads the text again; but its "
                f"prompt was given as inputs_embeds, of which {held} tokens are cached: give input_ids, or a text "
                "that is longer than that from the beginning"
            )
        cache.reset()
        name = next(name for name in NAMES if kwargs.get(name) is not None)
        mask = kwargs.get("attention_mask")
        more: dict[str, Any] = {"next_sequence_length": None, "is_first_iteration": True, name: None}
        if kwargs.get("position_ids") is not None:
            whole = torch.ones_like(input_ids) if mask is None else mask
            more["position_ids"] = (whole.cumsum(-1) - 1).clamp_min(0)
        out = original(input_ids, *args, **{**kwargs, **more})
        return {**out, name: cache}

    def _refuse(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "generate_batch() (continuous batching) keeps all keys and values in a paged cache of transformers' own, "
            "in whose place no sparse cache can be: call it outside of sparse(); or generate() inside, which takes "
            "batches, too; or use hf_sparsekv.Engine for many requests"
        )

    # ------------------------------------------------------------------ why

    def _why_dense(self, call: _Call) -> str | None:
        """Why none of the call's steps was one of ours, and what to do; None if one was, or there was none."""
        if not call.caches:
            return None
        cache = call.caches[-1]
        if not isinstance(cache, SparseCache):
            asked = f"it was given a {type(cache).__name__}. Leave past_key_values out, or give a cache of hf_sparsekv"
            return asked if call.steps else None
        if cache.model_config is not None and not cache.sparse_layers:
            return None  # the cache has said so
        stores = [layer.store for layer in cache.sparse_layers if layer.store is not None]
        if not any(store.length for store in stores):
            return (
                f"the model left {type(cache).__name__} empty{self._attention()}. Load it with transformers' own "
                f"modeling code and attn_implementation={NAME!r}, in eval mode; or leave sparse() out"
            )
        if not call.steps or any(store.counters.steps for store in stores):
            return None
        if any(store.counters.masked for store in stores):
            return (
                "its steps came with a 4-D attention mask, which says for each column whether it is seen, so they "
                "attended to all that it shows. Give attention_mask [batch, columns], or leave sparse() out"
            )
        if any(store.counters.materialised for store in stores):
            return (
                f"something else than the attention function {NAME!r} read the keys{self._attention()}. Don't change "
                "the attention implementation inside sparse()"
            )
        return (
            f"the model decoded {call.steps} tokens without the {type(cache).__name__} that holds its prompt"
            f"{self._attention()}. Its generate() or forward() goes on with another cache, or with none: please report "
            "the model; it is not sparse here"
        )

    def _attention(self) -> str:
        used = self.model.config.get_text_config(decoder=True)._attn_implementation
        return "" if used == NAME else f" (its attention implementation is {used!r} now)"
