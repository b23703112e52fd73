"""Watches inside :func:`.generating.sparse` whether ``generate()`` uses the cache that it was given.

A model may drop the cache (Phi-3, when it changes to the long factors of its rotary embedding). It may ignore it
(gradient checkpointing), or use another attention function. The text is still right, but decoding is dense, and the
keys and values are somewhere else. So we replace two methods of the model. ``prepare_inputs_for_generation`` keeps the
cache where the model drops it, and ``generate`` warns at its end if no decode step was sparse.
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
from .untraced import untraced

_BATCHING = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


@dataclass
class _Call:
    """A running ``generate()``."""

    caches: list[Cache] = field(default_factory=list)  # given or created
    steps: int = 0  # decode steps of one token so far


class _StandIn:
    """Replaces a method on one model. It is an object, so that a copy of the model calls the copy's method."""

    def __init__(self, original: Callable, does: Callable) -> None:
        functools.update_wrapper(self, original)  # generate() and pipelines look at signatures
        self.original, self.does = original, does

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self.original, *args, **kwargs)


class GenerateWatch:
    """Replaces ``generate()`` and related methods of one model, from :meth:`install` to :meth:`remove`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._calls: dict[int, _Call] = {}  # the innermost call of each thread
        self._own: dict[str, Any] = {}  # the instance's own attributes that were replaced
        self._installed: dict[str, _StandIn] = {}

    def install(self) -> None:
        """Replace the methods. May be called again."""
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
        """Restore the model. May be called again."""
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
        """Note that this thread's ``generate()`` decodes over ``cache``."""
        call = self._calls.get(threading.get_ident())
        if call is not None:
            call.caches.append(cache)

    def decodes(self, cache: Cache, run: Callable[[], Any]) -> Any:
        """Run ``run()``, the loop of a ``generate()`` over ``cache``, with or without :meth:`_generate` around it."""

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
            for cache in call.caches:
                if isinstance(cache, SparseCache):
                    cache.row_table.exactness.end()  # who keeps it may go on sparsely
            if outer is None:
                self._calls.pop(thread, None)
            else:
                self._calls[thread] = outer
        reason = self._why_dense(call)
        if reason is not None:
            warnings.warn(f"no step of this generate() was sparse: {reason}", stacklevel=4)
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
        """Read all tokens again, because the model has dropped a cache that is no longer valid.

        (transformers' own loop would continue with the last token alone.)
        """
        held = cache.get_seq_length()
        if held and input_ids.shape[1] <= held:
            raise RuntimeError(
                f"{type(self.model).__name__} gives up its cache at this length, and reads the text again; but its "
                f"prompt was given as inputs_embeds, and {held} of its tokens are cached: give input_ids, or a text "
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
        """Why none of the call's steps was sparse, and what to do. None: one was, or there were no steps."""
        if not call.caches:
            return None
        cache = call.caches[-1]
        if not isinstance(cache, SparseCache):
            asked = f"it was given a {type(cache).__name__}. Leave past_key_values out, or give a cache of hf_sparsekv"
            return asked if call.steps else None
        if cache.model_config is not None and not cache.sparse_layers:
            return None  # the cache has warned already
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
