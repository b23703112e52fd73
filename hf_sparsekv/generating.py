"""One line around ``generate()``: ``with sparse(model, "accurate"): model.generate(...)``.

``generate()`` asks its model for a cache, through ``_prepare_cache_for_generation``. Inside ``sparse()`` one model
instance has a replacement for that method, which returns a new sparse cache. So it covers every way to call
``generate()``: pipelines, chat, beams, drafts, wrappers such as PEFT's. Classes and functions of transformers stay.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GENERATION_MODES_MAPPING

from hf_sparsekv_config.audit import AuditConfig
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig, with_changes
from hf_sparsekv_config.tokens import TokenConfig

from . import cache_source
from .cache import SparseCache
from .cache_name import GENERATE, given_cache
from .cache_source import METHOD, CacheSource, Settings, Use
from .checking.audit import check_of
from .checking.call import Check
from .checking.exact import Exact, of_drafts
from .policies.registry import method_of

_changing = threading.RLock()  # one thread at a time enters or leaves


def _settings(
    config: str | SparseConfig | None,
    offload: bool | OffloadConfig | None,
    optimize: bool | None,
    changes: Mapping[str, Any],
    exact: bool = False,
    drafts: int | None = None,
    audit: bool | AuditConfig = False,
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
    if not isinstance(audit, bool | AuditConfig):
        raise TypeError(f"audit must be an AuditConfig, True or False, got {type(audit).__name__}")
    if audit and exact:
        raise ValueError("exact=True gives full attention's text, which needs no audit: give one of exact and audit")
    config = with_changes(config, changes)
    check: Check | None = None
    if exact:
        config, check = of_drafts(config), Exact(drafts)
    elif audit:
        check = check_of(AuditConfig() if audit is True else audit)
    settings = Settings(config, offload, optimize, check)
    if settings.check is not None:
        settings.check.check(SparseCache(settings.config, offload))
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
    method = getattr(type(found), METHOD, None)
    given = inspect.signature(method).parameters if method else {}
    if not {"generation_config", "model_kwargs"} <= set(given):
        return RuntimeError(
            "this version of transformers asks for a cache in another way than sparse() knows: give each generate() a "
            "cache, past_key_values=OffloadedSparseCache(...)"
        )
    return None


def sparse(
    model: torch.nn.Module,
    config: str | SparseConfig | None = None,
    *,
    offload: bool | OffloadConfig | None = None,
    optimize: bool | None = None,
    exact: bool = False,
    drafts: int | None = None,
    audit: bool | AuditConfig = False,
    **changes: Any,
) -> SparseContext:
    """Inside, each ``model.generate()`` decodes sparsely over a new cache. At the end the model is restored.

        with sparse(model, "accurate"):
            out = model.generate(**inputs, max_new_tokens=200)

    This covers every caller of this model's ``generate()``: pipelines, other threads (a streamer's), wrappers such as
    PEFT's. A cache passed as ``past_key_values`` is used instead of a new one. ``return_dict_in_generate=True`` returns
    the new one, for its ``stats()`` or for the next turn of a conversation. Contexts may be nested: the innermost
    settings apply. Without ``with`` nothing happens, except for a warning. :func:`enable` needs no ``with``.

    Args:
        model: a model of transformers, or a wrapper around one. Its attention implementation is ``"sparsekv"`` inside.
        config: a preset's name (:meth:`TokenConfig.preset`), or a method's configuration. ``None``: the defaults.
        offload: keep full blocks in host memory: ``True``, or a configuration. Otherwise all KV is on the model's
            device.
        optimize: call :func:`optimize`, and undo it at the end. ``None``: if the whole model is on one GPU. A model
            that was optimised before stays so, which saves time at each entry and exit (docs/generating.md).
        exact: sparse steps only draft, and full attention decides: the text is full attention's (docs/exact.md).
            Drafts attend to 1,024 tokens, unless ``config`` or ``changes`` name a budget, a share or a preset. A cache
            given to ``generate()`` must hold nothing but what full attention has computed.
        drafts: with ``exact``: tokens drafted before each verification. ``None``: as many as pay.
        audit: compare each token with full attention in hindsight, for ``stats().audit``: ``True``, or an
            :class:`AuditConfig`, with ``max_loss`` to go back where a token is too far (docs/audit.md).
        changes: options of the configuration: ``sparse(model, token_budget=512)``.

    Raises:
        TypeError: the model cannot generate, or there is no such option.
        ValueError: this kind of model cannot decode sparsely, or a value is wrong.
        RuntimeError: another thread or task uses the model inside ``sparse()`` with other settings.
    """
    return SparseContext(model, _settings(config, offload, optimize, changes, exact, drafts, audit))


class SparseContext(AbstractContextManager[torch.nn.Module], ContextDecorator):
    """The result of :func:`sparse`: for one ``with``, or for each call of a decorated function."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._use: Use | None = None
        self._used = False

    def __enter__(self) -> torch.nn.Module:
        if self._used:
            raise RuntimeError("this sparse() was entered before: write with sparse(model): ... each time")
        self._used, self._use = True, Use(self._settings)
        _enter(self._model, self._use)
        return self._model

    def __exit__(self, *error: object) -> None:
        if self._use is not None:
            _leave(self._use)
            self._use = None

    def _recreate_cm(self) -> SparseContext:
        """One for a call of the function that it decorates."""
        self._used = True
        return type(self)(self._model, self._settings)

    def __call__(self, func: Any) -> Any:
        """Decorate a function: each call is inside.

        Raises:
            TypeError: its body does not run in the call: it is async, or a generator.
        """
        self._used = True
        if inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func) or inspect.isgeneratorfunction(func):
            raise TypeError(
                f"a call of {func.__name__} ends before its body runs, which would not be sparse: write "
                "`with sparse(model): ...` inside of it"
            )
        return super().__call__(func)

    def __del__(self) -> None:
        if getattr(self, "_use", None) is not None:  # an interrupt came between the entry and the block
            self.__exit__()
        if not getattr(self, "_used", True):
            warnings.warn(
                "sparse(model) was not entered, so nothing is sparse: write `with sparse(model): ...`, or "
                "`enable(model)`, which stays until `disable(model)`",
                RuntimeWarning,
                stacklevel=2,
            )


def enable(
    model: torch.nn.Module,
    config: str | SparseConfig | None = None,
    *,
    offload: bool | OffloadConfig | None = None,
    optimize: bool | None = None,
    exact: bool = False,
    drafts: int | None = None,
    audit: bool | AuditConfig = False,
    **changes: Any,
) -> torch.nn.Module:
    """From now on each ``model.generate()`` decodes sparsely over a new cache, until :func:`disable`.

    As :func:`sparse` without an end: for notebooks and servers, where no ``with`` encloses the calls. Enabled again, it
    has the new settings. A :func:`sparse` context inside has its own settings for as long as it is open. Meanwhile
    other threads' calls expect the enabled settings, and raise RuntimeError if these differ.

    Args:
        model, config, offload, optimize, exact, drafts, audit, changes: as in :func:`sparse`.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError, RuntimeError: as in :func:`sparse`; what was enabled before still is.
    """
    _enter(model, Use(_settings(config, offload, optimize, changes, exact, drafts, audit), lasting=True))
    return model


def disable(model: torch.nn.Module) -> torch.nn.Module:
    """Undo :func:`enable`: the model is as it was before, but for :func:`sparse` contexts that are open.

    Nothing happens if the model is not enabled. A deep copy made inside :func:`sparse` counts as enabled.

    Returns:
        ``model``.

    Raises:
        TypeError: the model cannot generate.
    """
    with _changing:
        for use in _lasting(_sources(model)):
            _leave(use)
    return model


def _sources(model: torch.nn.Module) -> list[CacheSource]:
    """Those that are installed in the models that ``model`` generates with."""
    found = (target.__dict__.get(METHOD) for target in _generating(model))
    return [source for source in found if isinstance(source, CacheSource)]


def _lasting(sources: Iterable[CacheSource]) -> list[Use]:
    """The uses that :func:`enable` has begun and :func:`disable` not ended."""
    return list({id(use): use for source in sources for use in source.uses if use.lasting}.values())


def _enter(model: torch.nn.Module, use: Use) -> None:
    """Begin ``use`` in all parts of a model that generate; after an error all are as before."""
    targets = _generating(model)
    with _changing:
        before = _lasting(_sources(model)) if use.lasting else []
        try:
            for target in targets:
                source = target.__dict__.get(METHOD)
                if not isinstance(source, CacheSource):
                    source = CacheSource(target)
                use.sources.append(source)
                source.enter(use)
            use.open()
        except BaseException:
            _leave(use, before)
            raise


def _leave(use: Use, before: Sequence[Use] = ()) -> None:
    """End ``use``, which had taken the place of those ``before``."""
    with _changing:
        use.close()
        for source in reversed(use.sources):
            if use in source.uses:
                source.leave(use, before)


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
    audit: bool | AuditConfig = False,
    **given: Any,
) -> Any:
    """Run transformers' own loop over a sparse cache, as ``model.generate(..., custom_generate=hf_sparsekv.generate)``.

        model.generate(**inputs, custom_generate=hf_sparsekv.generate, sparse_config="accurate", offload=True)

    transformers passes neither ``streamer`` nor ``assistant_model`` to a ``custom_generate`` function. Use
    :func:`sparse` with these.

    Args:
        model, input_ids, generation_config, inputs_tensor: as ``generate()`` passes them.
        sparse_config: ``config`` of :func:`sparse`.
        offload, optimize, exact, drafts, audit: as in :func:`sparse`.

    Returns:
        The result of ``generate()``.

    Raises:
        ValueError: transformers no longer has this generation mode itself.
    """
    mode = generation_config.get_generation_mode()
    name = GENERATION_MODES_MAPPING[mode]
    if "/" in name:
        raise ValueError(f"{mode.value} is no longer part of transformers (see {name}): use another way to generate")
    settings = _settings(sparse_config, offload, optimize, {}, exact, drafts, audit)
    more: Any = {"exact": exact, "drafts": drafts, "audit": audit}
    with sparse(model, settings.config, offload=settings.offload, optimize=optimize, **more):
        past = given_cache(given)
        if not getattr(past, "_is_user_defined", False):
            given[GENERATE] = cache_source.new_cache(model, settings, generation_config)
        elif settings.check is not None and isinstance(past, SparseCache):
            settings.check.begin(past)
        loop = getattr(type(model), name)
        if "inputs_tensor" in inspect.signature(loop).parameters:
            given["inputs_tensor"] = inputs_tensor
        run = partial(loop, model, input_ids, generation_config=generation_config, **given)
        return model.__dict__[METHOD].watch.decodes(given_cache(given), run)
