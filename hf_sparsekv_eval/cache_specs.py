"""Caches by name: ``token:token_budget=512,lag=true``, as the command line and YAML files give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from hf_sparsekv.cache import SparseCache
from hf_sparsekv.policies.registry import Method, names
from hf_sparsekv_config.options import guess
from hf_sparsekv_config.sparse import OffloadConfig

from . import reference_policies as _references  # noqa: F401 (registers them)

FULL = "full"
# Quality is asked for, so steps, and prompts that are sparse, select at any length; a spec may say otherwise.
_STEPS = {"dense_below": None}
_PROMPTS = {"prefill_below": 0}


@dataclass(frozen=True)
class CacheSpec:
    """A cache that can be made any number of times.

    Args:
        name: what tables call it: the text that it was given as.
        method: a registered method or variant (:func:`known`), or ``full`` for transformers' own cache and attention.
        options: fields of the method's configuration, ``offload`` (bool; default: KV on the device), with it
            ``kv_dtype`` (:class:`..config.OffloadConfig`), and ``preset`` (a name,
            :meth:`..config.SparseConfig.preset`).
    """

    name: str
    method: str
    options: dict = dataclasses.field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Full attention: no cache of ours."""
        return self.method == FULL

    def make(self, model_config=None) -> SparseCache | None:
        """A new empty cache; ``None`` for full attention."""
        if self.full:
            return None
        options = dict(self.options)
        offload, kv_dtype = options.pop("offload", False), options.pop("kv_dtype", None)
        if kv_dtype is not None and not offload:
            raise ValueError("kv_dtype is of keys and values in host memory: add offload=true")
        offload = OffloadConfig(kv_dtype=kv_dtype) if offload else None
        method, variant = known()[self.method]
        always = _STEPS if options.get("prefill") is None else _STEPS | _PROMPTS
        preset, settings = options.pop("preset", None), {**always, **variant, **options}
        config = method.config(**settings) if preset is None else method.config.preset(preset, **settings)
        return SparseCache(config, offload, model_config)


def known() -> dict[str, tuple[Method, dict]]:
    """Every method and variant by name, with the settings that it stands for; the yardsticks, too."""
    return names(references=True)


def parse_cache(spec: str | dict) -> CacheSpec:
    """Read one spec.

    Args:
        spec: ``"method"``, ``"method:option=value,..."``, or a mapping (also as text, ``"{cache: token, ...}"``)
            with ``cache`` (the method), optionally ``name``, and options. Values are YAML scalars (``true``, ``null``,
            ``0.98``); ``none`` is ``null``.

    Raises:
        ValueError: unknown method or option, or options that do not fit each other; the message names the spec.
    """
    if isinstance(spec, str) and spec.strip().startswith("{"):
        try:
            spec = yaml.safe_load(spec)
        except yaml.YAMLError as error:
            raise ValueError(f"cache {spec!r} is not YAML: {' '.join(str(error).split())}") from error
    if isinstance(spec, dict):
        options = dict(spec)
        method, name = options.pop("cache", None), options.pop("name", None)
        if not isinstance(method, str):
            raise ValueError(f"cache {spec}: a mapping needs the key 'cache' with the name of a method ({_known()})")
        text = method + (":" + ",".join(f"{k}={_text(v)}" for k, v in options.items()) if options else "")
        name = text if name is None else str(name)
    elif isinstance(spec, str):
        name = text = spec.strip()
        method, _, rest = text.partition(":")
        options = dict(_option(part, text) for part in rest.split(",")) if rest else {}
    else:
        raise ValueError(f"a cache is given as a text or a mapping, got {spec!r}")
    if method not in known() and method != FULL:
        hint = guess(FULL if method == "dense" else method, (FULL, *known()))  # `generate --cache dense` is the same
        raise ValueError(f"cache {text!r}: unknown method {method!r}{hint}; known: {_known()}")
    parsed = CacheSpec(name, method, options)
    if parsed.full:
        if options:
            raise ValueError(f"cache {text!r}: full attention takes no options")
        return parsed
    fields = {field.name for field in dataclasses.fields(known()[method][0].config)} | {"offload", "kv_dtype", "preset"}
    for option in options:
        if option not in fields:
            raise ValueError(
                f"cache {text!r}: {method} has no option {option!r}{guess(option, fields)}; "
                f"it has {', '.join(sorted(fields))}"
            )
    if not isinstance(options.get("offload", False), bool):
        raise ValueError(f"cache {text!r}: offload must be true or false, got {options['offload']!r}")
    try:
        parsed.make()
    except (ValueError, TypeError) as error:
        raise ValueError(f"cache {text!r}: {error}") from error
    return parsed


def parse_caches(specs: Iterable[str | dict]) -> list[CacheSpec]:
    """Read several specs; one that ends in ``.yaml`` or ``.yml`` is a file with a list of them (or ``caches: [...]``).

    Raises:
        ValueError: none is given, two have the same name, or one is wrong.
    """
    found: list[CacheSpec] = []
    for spec in specs:
        if isinstance(spec, str) and spec.strip().endswith((".yaml", ".yml")):
            found += [parse_cache(entry) for entry in _entries(Path(spec.strip()))]
        else:
            found.append(parse_cache(spec))
    names = [spec.name for spec in found]
    if not names:
        raise ValueError("no cache is given")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"cache {name!r} is given twice")
    return found


def _entries(path: Path) -> list:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    entries = content.get("caches") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of caches, or a mapping with the key 'caches'")
    return entries


def _option(part: str, text: str) -> tuple[str, object]:
    key, equals, value = part.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"cache {text!r}: write options as name=value, got {part!r}")
    return key.strip(), _value(value)


def _value(text: str) -> object:
    text = text.strip()
    if text.lower() == "none":
        return None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _text(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _known() -> str:
    return ", ".join((FULL, *known()))
