"""A new sparse cache for each ``generate()`` of one model while somebody wants that; the model as it was afterwards.

:mod:`.generating` decides for which calls, and for how long.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from .attention.indexer import is_replaced, restore_indexer
from .attention.interface import NAME
from .attention.mla import absorbs, is_mla, restore
from .attention.pooled_indexer import is_pooled
from .attention.tap import QueryTap
from .cache import SparseCache
from .cache_name import GENERATE, given_cache
from .checking.call import Check
from .checking.install import install, remove
from .cuda_graph.optimize import optimize as capture
from .cuda_graph.optimize import runner_of, unoptimize
from .generate_watch import GenerateWatch
from .ranks import ranks_of
from .transformers_compat import check_exact
from .untraced import untraced

METHOD = "_prepare_cache_for_generation"

# The ``with sparse(...)`` around what runs now, outermost first. Tasks and asyncio.to_thread() inherit it, threads do
# not. Weak, because a context may outlive the model.
_around: ContextVar[tuple[weakref.ref[Use], ...]] = ContextVar("hf_sparsekv_around", default=())


@dataclass(frozen=True)
class Settings:
    """Settings of new caches. Several threads may be inside ``sparse()`` at a time if their settings are equal."""

    config: SparseConfig
    offload: OffloadConfig | None = None
    optimize: bool | None = None
    check: Check | None = None

    def cache(self, model: PreTrainedModel) -> SparseCache:
        """A new one for ``model``."""
        cache = SparseCache(self.config, self.offload, model.config.get_text_config(decoder=True))
        if self.check is not None:
            self.check.begin(cache)
        return cache

    def __str__(self) -> str:
        offload, check = "" if self.offload is None else ", offloaded", "" if self.check is None else f", {self.check}"
        return f"{self.config.brief()}{offload}{check}, optimize={self.optimize}"


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations that set the attention of a model's parts, each once."""
    found: dict[int, PreTrainedConfig] = {}
    todo: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while todo:
        config = todo.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            todo += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


@dataclass(eq=False)
class Use:
    """One ``with sparse(...)`` that is open; or ``lasting``, from ``enable()`` to ``disable()``.

    Attributes:
        sources: those that it has entered.
        opened_by: the thread or task.
    """

    settings: Settings
    lasting: bool = False
    sources: list[CacheSource] = field(default_factory=list)
    opened_by: str = field(default_factory=lambda: _running())

    @property
    def is_around(self) -> bool:
        """Whether what runs now is inside."""
        return any(one() is self for one in _around.get())

    def open(self) -> None:
        """Count later calls of this thread or task as inside."""
        _around.set((*_around.get(), weakref.ref(self)))

    def close(self) -> None:
        """Undo :meth:`open`. In another thread or task than :meth:`open` nothing is left to undo."""
        _around.set(tuple(one for one in _around.get() if one() not in (None, self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Use:
        """The use in a copy of the model. No ``with`` ends it there, so it lasts until ``disable()``."""
        new = memo[id(self)] = Use(copy.deepcopy(self.settings, memo), lasting=True)
        new.sources = copy.deepcopy(self.sources, memo)
        return new


def _running() -> str:
    """The thread that runs, or its asyncio task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        task = None
    return f"thread ({threading.current_thread().name})" if task is None else f"task ({task.get_name()})"


class CacheSource:
    """Replaces one model's ``_prepare_cache_for_generation``, and restores the model at the end.

    The innermost ``sparse()`` decides, and without one ``enable()``. Several threads or tasks may be inside only with
    equal settings. A thread that is not inside gets what is enabled, or else the settings of the thread that is (a
    streamer's).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.original = getattr(model, METHOD)
        self.had_own = METHOD in model.__dict__
        self.signature = inspect.signature(self.original)
        self.uses: list[Use] = []
        self.attention = [(config, config._attn_implementation_internal) for config in _configs(model)]
        self.latent = [module for module in model.modules() if is_mla(module) and not absorbs(module)]
        self.indexers = [module for module in model.modules() if is_pooled(module) and not is_replaced(module)]
        self.optimized = False  # by us
        self.watch = GenerateWatch(model)
        self.tap = QueryTap(model)  # for eager steps of predictive caches; optimize() has its own

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Put a new cache where ``generate()`` looks for it, unless its caller has given one."""
        given = self.signature.bind(*args, **kwargs).arguments
        inputs: dict = given["model_kwargs"]
        uses = self._in_force()
        theirs = given_cache(inputs)
        if uses and theirs is not None:
            if uses[0].settings.check is not None and isinstance(theirs, SparseCache):
                uses[0].settings.check.begin(theirs)
            self.watch.gets(theirs)
        if theirs is not None or not uses:
            return self.original(*args, **kwargs)
        if given["generation_config"].is_assistant and not _attends(self.model):
            return self.original(*args, **kwargs)
        _check_keeps_caches(self.model)
        inputs[GENERATE] = new_cache(self.model, uses[0].settings, given["generation_config"])
        self.watch.gets(inputs[GENERATE])
        return None

    def enter(self, use: Use) -> None:
        """Set up the model for ``use``; one that lasts takes the place of the one before.

        Raises:
            RuntimeError: another thread or task is inside, with other settings.
            ValueError: exact mode of a model that chooses its own tokens.
        """
        if use.settings.check is not None:
            check_exact(self.model.config)
        others = [one for one in self.uses if not (use.lasting and one.lasting)]
        for other in others:
            if not other.is_around and any(one.settings != use.settings for one in others):
                raise _conflict(other, use.settings)
        self.uses = [use, *others] if use.lasting else [*others, use]
        self._settle()

    def _in_force(self) -> list[Use]:
        """The use whose settings the ``generate()`` that runs gets; none if another thread has just left.

        Raises:
            RuntimeError: another thread or task is inside, with other settings than those around this ``generate()``.
        """
        mine = [one for one in self.uses if one.is_around] or [one for one in self.uses if one.lasting]
        for other in self.uses[-1:]:  # the model is set up for it
            if mine and mine[-1].settings != other.settings:
                raise _conflict(other, mine[-1].settings)
        return mine[-1:] or self.uses[-1:]

    def leave(self, use: Use, before: Sequence[Use] = ()) -> None:
        """Set up the model for the remaining uses and those that lasted ``before``, or restore it after the last."""
        self.uses = [*before, *(one for one in self.uses if one is not use and one not in before)]
        self._settle()

    def _settle(self) -> None:
        model, wanted = self.model, self.uses[-1].settings.optimize if self.uses else False
        remove(model)  # first: its base class is the one that optimize() changes
        if self.optimized and wanted is False:
            unoptimize(model)
            self.optimized = False
        ahead = bool(self.uses) and getattr(self.uses[-1].settings.config, "by_layer", False)
        if not ahead:
            self.tap.remove()
        if self.uses:
            self._use_attention()
            model.__dict__[METHOD] = self  # not by setattr(): to a captured step this is no change of the model
            self.watch.install()
            if (wanted or (wanted is None and _captures(model))) and runner_of(model) is None:
                self.optimized = True  # set first: an interrupt may come at any time from here on
                capture(model)
            if self.uses[-1].settings.check is not None:
                install(model, self.uses[-1].settings.check)
            if ahead:  # after optimize(): hooks that exist before it have to be compared in each step
                self.tap.install()
            return
        self.watch.remove()
        for module in self.latent:  # the caches have replaced their expand_kv
            restore(module)
        for module in self.indexers:
            restore_indexer(module)
        for config, name in self.attention:
            config._attn_implementation_internal = name
        if self.had_own:
            model.__dict__[METHOD] = self.original
        else:
            model.__dict__.pop(METHOD, None)

    def _use_attention(self) -> None:
        text = self.model.config.get_text_config(decoder=True)
        if text._attn_implementation != NAME or self.model.config._attn_implementation != NAME:
            for config in _configs(self.model):  # flags that transformers leaves in the parts of parts (5.17)
                config.__dict__.pop("_attn_was_changed", None)
            self.model.set_attn_implementation(NAME)
        if text._attn_implementation != NAME:
            raise ValueError(
                f"{type(self.model).__name__} computes its attention itself, not by transformers' AttentionInterface: "
                "sparse decoding cannot take its place"
            )


def _conflict(other: Use, settings: Settings) -> RuntimeError:
    return RuntimeError(
        f"another {other.opened_by} uses this model inside {'enable()' if other.lasting else 'sparse()'} with "
        f"{other.settings}; this one asks for "
        f"{settings}. Use the same settings, or wait for its end; or give each generate() a cache of its own, "
        "past_key_values=..., which may differ"
    )


def _attends(model: PreTrainedModel) -> bool:
    """Whether some layer that runs attends to its whole past. (``assistant_early_exit`` drafts with the first ones.)"""
    text = model.config.get_text_config(decoder=True)
    kinds = (getattr(text, "layer_types", None) or [])[: text.num_hidden_layers]
    return not kinds or any(kind not in ("conv", "linear_attention", "mamba") for kind in kinds)


def _check_keeps_caches(model: PreTrainedModel) -> None:
    """Raise for a model that ignores every cache, because gradient checkpointing recomputes its layers."""
    if any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "gradient checkpointing is on and the model is in training mode, where layers keep no keys and values: "
            "call model.eval() or model.gradient_checkpointing_disable() before generate()"
        )


def _captures(model: PreTrainedModel) -> bool:
    """Whether decode steps can be captured: the model, or this rank's share of it, is on one GPU."""
    devices = {parameter.device for parameter in model.parameters()}
    ranks = ranks_of(model)
    return len(devices) == 1 and devices.pop().type == "cuda" and (ranks is None or ranks.captures)


def new_cache(model: PreTrainedModel, settings: Settings, asked: GenerationConfig) -> SparseCache:
    """A cache for one ``generate()`` call with these options.

    Raises:
        ValueError: the options ask for another cache, or for none.
    """
    if asked.use_cache is False:
        raise ValueError(
            "use_cache=False, in the call or in model.generation_config, and sparse decoding do not go together: give "
            "use_cache=True, or call generate() outside of sparse()"
        )
    kind = asked.cache_implementation
    if kind not in (None, "dynamic", model.generation_config.cache_implementation):
        raise ValueError(
            f"cache_implementation={kind!r} asks for another cache than sparse() gives: leave it out "
            "(sparse(model, offload=True) keeps keys and values in host memory), or call generate() outside of sparse()"
        )
    cache = settings.cache(model)
    if asked.is_assistant:  # drafts are taken back
        cache.activate_past_recording()
    return cache
