"""Options that several commands share, and options that are made from fields of the configurations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, make_dataclass
from enum import Enum
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Annotated, Any

import typer

from hf_sparsekv_config import CACHES
from hf_sparsekv_config.options import declared, described
from hf_sparsekv_config.serving import ServingConfig
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from .values import parse_tokens

DENSE = "dense"
CacheKind = Enum("CacheKind", {name: name for name in (*CACHES, DENSE)}, type=str)  # values of --cache


class DType(str, Enum):
    """Values of ``--dtype``."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[
    str,
    typer.Argument(help="Hub id, local directory, .gguf file, or `small` (what `fetch` fetches).", show_default=False),
]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Precision; auto is the checkpoint's own.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")]


def spell(name: str) -> str:
    """A field's name as the command line spells it."""
    return "--" + name.replace("_", "-")


def wrong(error: ValueError, options: Mapping[str, str]) -> typer.BadParameter:
    """An error of a configuration as wrong usage, with its fields written as options."""
    fields = "|".join(sorted(options, key=len, reverse=True))
    message = str(error).replace(" or None", "")
    return typer.BadParameter(re.sub(rf"\b({fields})\b(?!')", lambda match: spell(options[match[0]]), message))


# ---------------------------------------------------------------------- made from fields


def option(config: type, field: str, **more: Any) -> Any:
    """A field of a configuration as an option of typer: its type, and as help the field's docstring."""
    types = [one for one in declared(config)[field] if one.kind is not NoneType]
    kind: Any = Path if any(one.kind is PathLike for one in types) else types[0].kind
    if kind is str and types[0].choices:
        kind = Enum(field, {choice: choice for one in types for choice in one.choices}, type=str)
    return Annotated[kind | None, typer.Option(help=help_of(config, field), **more)]


def help_of(config: type, field: str) -> str:
    """A field's docstring, with the names of options in it as the command line spells them."""
    text = re.sub(r":\w+:`[~.]?([^`]+)`", r"\1", described(config, field))
    known = {name for one in CACHES.values() for name in one.__dataclass_fields__}
    return re.sub(r"``(.*?)``", lambda match: spell(match[1]) if match[1] in known else match[1], text)


def _of_caches(name: str) -> tuple[str, Any, Any]:
    """A field of the caches' configurations as an option without a default: ``None`` is not given."""
    configs = {kind: config for kind, config in CACHES.items() if name in config.__dataclass_fields__}
    defaults = {kind: _shown(config.__dataclass_fields__[name]) for kind, config in configs.items()}
    first = next(iter(configs))
    others = [f"; {kind}: {value}" for kind, value in defaults.items() if value != defaults[first]]
    shown = f"{defaults[first] or 'automatic'}{''.join(others)}" if defaults[first] or others else False
    return name, option(configs[first], name, rich_help_panel="Sparse cache", show_default=shown), None


def _shown(field: Field) -> str:
    """A default as the help shows it; empty if the help says what None is."""
    value = field.default
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


PRESETS = dict.fromkeys(name for config in CACHES.values() for name in config.PRESETS)
KVDType = option(OffloadConfig, "kv_dtype", rich_help_panel="Sparse cache")


@dataclass(frozen=True)
class CacheOptions:
    """Options that describe a sparse cache; ``None``: not given. Subclasses have fields of the configurations."""

    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Keep full blocks in host memory; default: on the device.",
            rich_help_panel="Sparse cache",
        ),
    ] = None
    kv_dtype: KVDType = None
    preset: Annotated[
        str | None,
        typer.Option(help=f"Settings by name: {', '.join(PRESETS)}.", rich_help_panel="Sparse cache"),
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields of a configuration that are given."""
        named = {one.name: getattr(self, one.name) for one in fields(self)[len(fields(CacheOptions)) :]}
        return {name: one.value if isinstance(one, Enum) else one for name, one in named.items() if one is not None}

    def config(self, kind: CacheKind) -> SparseConfig:
        """The configuration of this kind of cache, with what is wrong about it reported as wrong usage.

        Options that this kind does not have may not be given.
        """
        made = CACHES[kind.value]
        for name in self.given:
            if name not in made.__dataclass_fields__:
                raise typer.BadParameter(f"{spell(name)} has no meaning with --cache {kind.value}")
        try:
            return made(**self.given) if self.preset is None else made.preset(self.preset, **self.given)
        except ValueError as error:
            raise wrong(error, {name: name for name in made.__dataclass_fields__}) from error

    def offload_config(self, **more: int | None) -> OffloadConfig | None:
        """``--offload`` and ``--kv-dtype`` as the cache takes them, with ``more`` fields."""
        return OffloadConfig(kv_dtype=self.kv_dtype and self.kv_dtype.value, **more) if self.offload else None

    def refuse_all(self) -> None:
        """Without a sparse cache no option may be given."""
        for one in fields(self):
            if (value := getattr(self, one.name)) is not None:
                name = "no-offload" if value is False and one.name == "offload" else one.name
                raise typer.BadParameter(f"{spell(name)} has no meaning without a sparse cache")


_PLANNED = (
    "token_budget",
    "mass",
    "num_blocks",
    "block_size",
    "level",
    "predictor",
    "start_length",
    "cache_rank",
    "sinks",
    "prefill",
    "window",
    "dense_layers",
    "label_channels",
    "max_length",
)


def _with_fields(name: str, *named: str) -> type[CacheOptions]:
    return make_dataclass(name, map(_of_caches, named), bases=(CacheOptions,), frozen=True)


PlanOptions = _with_fields("PlanOptions", *_PLANNED)
DecodingOptions = _with_fields("DecodingOptions", *_PLANNED, "lag", "channel_file")

# Fields of an engine's configurations, and the options of `serve` that give them.
SERVING = {
    "max_rows": "max_rows",
    "max_length": "context",
    "max_tokens": "batch_tokens",
    "max_waiting": "max_waiting",
    "max_wait_s": "max_wait_s",
    "prefill_ms": "prefill_ms",
    "prefix_cache": "prefix_cache",
    "exact": "exact",
    "flash_attention_4": "flash_attention_4",
}
ENGINE = {**SERVING, "device_pool": "device_kv", "max_host_bytes": "host_kv"}


def _of_engine(field: str, name: str) -> tuple[str, Any, Any]:
    tokens = {"parser": parse_tokens, "metavar": "TOKENS"} if field in ("max_length", "max_tokens") else {}
    default = ServingConfig.__dataclass_fields__[field].default
    more = {"show_default": False} if default is None else {}
    return name, option(ServingConfig, field, rich_help_panel="Requests", **tokens, **more), default


class _EngineOptions:
    """Options that are fields of :class:`.ServingConfig`."""

    def config(self) -> ServingConfig:
        try:
            return ServingConfig(**{field: getattr(self, name) for field, name in SERVING.items()})
        except ValueError as error:
            raise wrong(error, SERVING) from error


EngineOptions = make_dataclass(
    "EngineOptions", [_of_engine(*one) for one in SERVING.items()], bases=(_EngineOptions,), frozen=True
)


def spelling(command: Callable) -> Callable[[str], str]:
    """A function that writes arguments of Python in a message as this command's options.

    ``max_length=4096`` becomes ``--context 4096``, ``ServingConfig(prefix_cache=False)`` ``--no-prefix-cache``, and
    ``TokenConfig()`` ``--cache token``. Arguments without an option stay as they are.
    """
    own = inspect.signature(command).parameters
    if "token_budget" not in own:  # an evaluation's caches are given by Python's names
        return lambda message: message
    fields = {name for config in CACHES.values() for name in config.__dataclass_fields__}
    options = {name: name for name in own if name in fields | {"offload", "kv_dtype", "exact"}}
    options |= {name: option for name, option in ENGINE.items() if "max_rows" in own}
    kinds = {config.__name__: name for name, config in reversed(CACHES.items())}
    names = "|".join(sorted(options, key=len, reverse=True))
    value = r"""\.\.\.|"[^"]*"|'[^']*'|[^\s,;:()]*[^\s,;:().]"""
    given = re.compile(rf"\b[A-Z]\w*Config\(({names})=({value})\)|(?<![\w'\"/.(-])({names})=({value})")
    alone = re.compile(rf"(?<![\w'\"/.=-])({'|'.join(one for one in options if '_' in one)})(?![\w'\"/=(.-])")
    kind = re.compile(rf"\b({'|'.join(kinds)})\(\)")

    def option(match: re.Match[str]) -> str:
        name, value = (match[1], match[2]) if match[1] else (match[3], match[4])
        if value in ("True", "False"):
            return spell(options[name] if value == "True" else f"no_{options[name]}")
        return f"{spell(options[name])} {'' if value == '...' else value.strip(chr(34) + chr(39))}".rstrip()

    def spelled(message: str) -> str:
        message = kind.sub(lambda match: f"--cache {kinds[match[1]]}", given.sub(option, message))
        return alone.sub(lambda match: spell(options[match[1]]), message)

    return spelled
