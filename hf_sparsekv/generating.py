"""One line around ``generate()``: ``with sparse(model, "accurate"): model.generate(...)``.

``generate()`` asks its model for a cache, through ``_prepare_cache_for_generation``. Inside ``sparse()`` one model
instance has a replacement for that method, which returns a new sparse cache. So it covers every way to call
``generate()``: pipelines, chat, beams, drafts, wrappers such as PEFT's. Classes and functions of transformers stay.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import GENERATION_MODES_MAPPING

from .attention.interface import NAME
from .attention.mla import absorbs, is_mla, restore
from .attention.tap import QueryTap
from .cache import SparseCache
from .cache_name import GENERATE, given_cache
from .config import OffloadConfig, SparseConfig, with_changes
from .cuda_graph.optimize import optimize as capture
from .cuda_graph.optimize import runner_of, unoptimize
from .exact_mode.install import Exact, install, remove
from .generate_watch import GenerateWatch
from .policies.registry import method_of
from .policies.token_config import TokenConfig
from .ranks import ranks_of

_METHOD = "_prepare_cache_for_generation"
_changing = threading.RLock()  # one thread at a time enters or leaves


@dataclass(frozen=True)
class Settings:
    """Settings of new caches. Several threads may be inside ``sparse()`` at a time if their settings are equal."""

    config: SparseConfig
    offload: OffloadConfig | None = None
    optimize: bool | None = None
    exact: Exact | None = None

    def cache(self, model: PreTrainedModel) -> SparseCache:
        """A new one for ``model``."""
        cache = SparseCache(self.config, self.offload, model.config.get_text_config(decoder=True))
        if self.exact is not None:
            self.exact.begin(cache)
        return cache

    def __str__(self) -> str:
        offload, exact = "" if self.offload is None else ", offloaded", "" if self.exact is None else ", exact"
        return f"{self.config.brief()}{offload}{exact}, optimize={self.optimize}"


def _settings(
    config: str | SparseConfig | None,
    offload: bool | OffloadConfig | None,
    optimize: bool | None,
    changes: Mapping[str, Any],
    exact: bool = False,
    drafts: int | None = None,
) -> Settings:
    """Settings from the arguments of :func:`sparse`."""
    if isinstance(config, SparseCache):
        raise TypeError(
            f"sparse() makes a new cache for each generate(), and takes its settings: give {type(config).__name__}'s "
            "configuration; or leave sparse() out and give that cache to generate(past_key_values=...)"
        )
    if isinstance(config, str):
        config = TokenConfig.preset(config)
    elif config is None:
        config = TokenConfig()
    elif not isinstance(config, SparseConfig):
        raise TypeError(f"config must be a configuration, a preset's name or None, got {type(config).__name__}")
    method_of(config)
    if isinstance(offload, bool):
        offload = OffloadConfig() if offload else None
    elif not isinstance(offload, OffloadConfig | None):
        raise TypeError(f"offload must be an OffloadConfig, True, False or None, got {type(offload).__name__}")
    if not isinstance(optimize, bool | None):
        raise TypeError(f"optimize must be True, False or None, got {optimize!r}")
    if not isinstance(exact, bool):
        raise TypeError(f"exact must be True or False, got {exact!r}")
    if drafts is not None and not exact:
        raise ValueError("drafts are those of exact=True: give both, or none")
    settings = Settings(with_changes(config, changes), offload, optimize, Exact(drafts) if exact else None)
    if settings.exact is not None:
        settings.exact.check(SparseCache(settings.config, offload))
    return settings


def settings_of(config: str | SparseConfig | None, offload: bool | OffloadConfig | None) -> Settings:
    """Settings from ``config`` and ``offload`` of :func:`sparse`, with the same errors."""
    return _settings(config, offload, None, {})


def _generating(model: torch.nn.Module) -> list[PreTrainedModel]:
    """The models of transformers that generate: ``model``, or the one that it wraps (PEFT, ``torch.compile``).

    If its ``generate()`` calls that of its parts (BLIP-2, Qwen2.5-Omni), the result is these parts.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    found: Any = next((module for module in modules if isinstance(module, GenerationMixin)), None)
    if found is None:
        inner = getattr(model, "model", None)
        hint = ": give its model, sparse(pipe.model)" if isinstance(inner, GenerationMixin) else ""
        raise TypeError(f"sparse() needs a model of transformers that can generate(), got {type(model).__name__}{hint}")
    parts = [part for part in _generating_parts(found) if _why_not(part) is None] if _hands_on(found) else []
    for one in parts or [found]:
        if (error := _why_not(one)) is not None:
            raise error
    return parts or [found]


def _hands_on(model: Any) -> bool:
    """Whether its ``generate()`` neither is the one of transformers' loop nor calls it."""
    method = inspect.unwrap(type(model).generate)
    return method is not inspect.unwrap(GenerationMixin.generate) and "super" not in method.__code__.co_names


def _generating_parts(model: torch.nn.Module) -> Iterator[Any]:
    """The outermost modules below ``model`` that can ``generate()``."""
    for child in model.children():
        if isinstance(child, GenerationMixin):
            yield child
        else:
            yield from _generating_parts(child)


def _why_not(found: Any) -> Exception | None:
    """Why ``generate()`` of this model cannot decode sparsely."""
    if found.config.is_encoder_decoder:
        return ValueError(
            "sparse caches serve decoder-only models; call generate() of an encoder-decoder without sparse()"
        )
    if not found._supports_default_dynamic_cache() or "mamba" in type(found).__name__.lower():
        return ValueError(f"{type(found).__name__} has a cache of its own kind, without keys and values to select from")
    method = getattr(type(found), _METHOD, None)
    given = inspect.signature(method).parameters if method else {}
    if not {"generation_config", "model_kwargs"} <= set(given):
        return RuntimeError(
            "this version of transformers asks for a cache in another way than sparse() knows: give each generate() a "
            "cache, past_key_values=OffloadedSparseCache(...)"
        )
    return None


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
    """One ``with sparse(...)`` that is open."""

    settings: Settings
    thread: int = field(default_factory=threading.get_ident)
    name: str = field(default_factory=lambda: threading.current_thread().name)


class CacheSource:
    """Replaces one model's ``_prepare_cache_for_generation``, and restores the model at the end.

    The innermost ``sparse()`` decides. Several threads may be inside only with equal settings. So it does not matter
    which of them calls ``generate()``; it may also be a thread that is not inside (as with a streamer).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.original = getattr(model, _METHOD)
        self.had_own = _METHOD in model.__dict__
        self.signature = inspect.signature(self.original)
        self.uses: list[Use] = []
        self.attention = [(config, config._attn_implementation_internal) for config in _configs(model)]
        self.latent = [module for module in model.modules() if is_mla(module) and not absorbs(module)]
        self.optimized = False  # by us
        self.watch = GenerateWatch(model)
        self.tap = QueryTap(model)  # for eager steps of predictive caches; optimize() has its own

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Put a new cache where ``generate()`` looks for it, unless its caller has given one."""
        given = self.signature.bind(*args, **kwargs).arguments
        inputs: dict = given["model_kwargs"]
        uses = self.uses[-1:]  # empty if another thread has just left
        theirs = given_cache(inputs)
        if uses and theirs is not None:
            if uses[0].settings.exact is not None and isinstance(theirs, SparseCache):
                uses[0].settings.exact.begin(theirs)
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
        """Set up the model for ``use``.

        Raises:
            RuntimeError: another thread is inside, with other settings.
        """
        for other in self.uses:
            if other.thread != use.thread and any(one.settings != use.settings for one in self.uses):
                raise RuntimeError(
                    f"another thread ({other.name}) uses this model inside sparse() with {other.settings}; this "
                    f"one asks for {use.settings}. Use the same settings, or wait for its end; or give each generate() "
                    "a cache of its own, past_key_values=..., which may differ"
                )
        self.uses.append(use)
        self._settle()

    def leave(self, use: Use) -> None:
        """Set up the model for the remaining uses, or restore it after the last one."""
        if use in self.uses:
            self.uses.remove(use)
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
            model.__dict__[_METHOD] = self  # not by setattr(): to a captured step this is no change of the model
            self.watch.install()
            if (wanted or (wanted is None and _captures(model))) and runner_of(model) is None:
                self.optimized = True  # set first: an interrupt may come at any time from here on
                capture(model)
            if self.uses[-1].settings.exact is not None:
                install(model)
            if ahead:  # after optimize(): hooks that exist before it have to be compared in each step
                self.tap.install()
            return
        self.watch.remove()
        for module in self.latent:  # the caches have replaced their expand_kv
            restore(module)
        for config, name in self.attention:
            config._attn_implementation_internal = name
        if self.had_own:
            model.__dict__[_METHOD] = self.original
        else:
            model.__dict__.pop(_METHOD, None)

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


@contextmanager
def sparse(
    model: torch.nn.Module,
    config: str | SparseConfig | None = None,
    *,
    offload: bool | OffloadConfig | None = None,
    optimize: bool | None = None,
    exact: bool = False,
    drafts: int | None = None,
    **changes: Any,
) -> Iterator[torch.nn.Module]:
    """Inside, each ``model.generate()`` decodes sparsely over a new cache. At the end the model is restored.

        with sparse(model, "accurate"):
            out = model.generate(**inputs, max_new_tokens=200)

    This covers every caller of this model's ``generate()``: pipelines, other threads (a streamer's), wrappers such as
    PEFT's. A cache passed as ``past_key_values`` is used instead of a new one. ``return_dict_in_generate=True`` returns
    the new one, for its ``stats()`` or for the next turn of a conversation. Contexts may be nested: the innermost
    settings apply.

    Args:
        model: a model of transformers, or a wrapper around one. Its attention implementation is ``"sparsekv"`` inside.
        config: a preset's name (:meth:`TokenConfig.preset`), or a method's configuration. ``None``: the defaults.
        offload: keep full blocks in host memory: ``True``, or a configuration. Otherwise all KV is on the model's
            device.
        optimize: call :func:`optimize`, and undo it at the end. ``None``: if the whole model is on one GPU. A model
            that was optimised before stays so, which saves time at each entry and exit (docs/generating.md).
        exact: sparse steps only draft, and full attention decides: the text is full attention's (docs/exact.md).
        drafts: with ``exact``: tokens drafted before each verification. ``None``: as many as pay.
        changes: options of the configuration: ``sparse(model, token_budget=512)``.

    Raises:
        TypeError: the model cannot generate, or there is no such option.
        ValueError: this kind of model cannot decode sparsely, or a value is wrong.
        RuntimeError: another thread uses the model inside ``sparse()`` with other settings.
    """
    use = Use(_settings(config, offload, optimize, changes, exact, drafts))
    targets, sources = _generating(model), []
    try:
        with _changing:
            for target in targets:
                source = target.__dict__.get(_METHOD)
                if not isinstance(source, CacheSource):
                    source = CacheSource(target)
                sources.append(source)
                source.enter(use)
        yield model
    finally:
        with _changing:
            for source in reversed(sources):
                if use in source.uses:
                    source.leave(use)


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    generation_config: GenerationConfig,
    inputs_tensor: torch.Tensor | None = None,
    sparse_config: str | SparseConfig | None = None,
    offload: bool | OffloadConfig | None = None,
    optimize: bool | None = None,
    exact: bool = False,
    drafts: int | None = None,
    **given: Any,
) -> Any:
    """Run transformers' own loop over a sparse cache, as ``model.generate(..., custom_generate=hf_sparsekv.generate)``.

        model.generate(**inputs, custom_generate=hf_sparsekv.generate, sparse_config="accurate", offload=True)

    transformers passes neither ``streamer`` nor ``assistant_model`` to a ``custom_generate`` function. Use
    :func:`sparse` with these.

    Args:
        model, input_ids, generation_config, inputs_tensor: as ``generate()`` passes them.
        sparse_config: ``config`` of :func:`sparse`.
        offload, optimize, exact, drafts: as in :func:`sparse`.

    Returns:
        What ``generate()`` returns.

    Raises:
        ValueError: transformers no longer has this generation mode itself.
    """
    mode = generation_config.get_generation_mode()
    name = GENERATION_MODES_MAPPING[mode]
    if "/" in name:
        raise ValueError(f"{mode.value} is no longer part of transformers (see {name}): use another way to generate")
    settings = _settings(sparse_config, offload, optimize, {}, exact, drafts)
    with sparse(model, settings.config, offload=settings.offload, optimize=optimize, exact=exact, drafts=drafts):
        past = given_cache(given)
        if not getattr(past, "_is_user_defined", False):
            given[GENERATE] = new_cache(model, settings, generation_config)
        loop = getattr(type(model), name)
        if "inputs_tensor" in inspect.signature(loop).parameters:
            given["inputs_tensor"] = inputs_tensor
        run = partial(loop, model, input_ids, generation_config=generation_config, **given)
        return model.__dict__[_METHOD].watch.decodes(given_cache(given), run)
