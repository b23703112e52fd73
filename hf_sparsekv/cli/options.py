"""Command line options that several commands share, and the configurations made from them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, get_type_hints

import torch
import typer

from hf_sparsekv_cli.checks import DENSE, coded, spell

from ..config import OffloadConfig, SparseConfig
from ..policies.ahead.predictive_config import PREDICTORS
from ..policies.registry import Method, called, methods

CacheKind = Enum("CacheKind", {name: name for name in (*called(), DENSE)}, type=str)  # values of --cache


class Level(str, Enum):
    """Values of ``--level``."""

    auto = "auto"
    two_level = "two_level"
    block = "block"
    token = "token"


class KVDType(str, Enum):
    """Values of ``--kv-dtype``."""

    int8 = "int8"


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


def _defaults(name: str) -> str:
    """The defaults of a field, for people: ``1024``, or ``64; streaming: 1024`` where a method has another."""
    found = {
        method.name: _shown(method.config.__dataclass_fields__[name].default)
        for method in methods().values()
        if name in method.config.__dataclass_fields__
    }
    first = next(iter(found.values()))
    others = (f"; {method}: {value}" for method, value in found.items() if value != first)
    return first + "".join(others)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "automatic" if value is None else str(value)


def _of_cache(*names: str, help: str, default: str | bool = True) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel="Sparse cache", show_default=default)


def _field(name: str, help: str) -> typer.models.OptionInfo:
    """An option that is a field of configurations, whose defaults are theirs."""
    return _of_cache(help=help, default=_defaults(name))


@dataclass(frozen=True)
class CacheOptions:
    """Options that describe a sparse cache. Each field is an option; None: it is not given."""

    offload: Annotated[
        bool | None,
        _of_cache("--offload/--no-offload", help="Keep full blocks in host memory; default: on the device."),
    ] = None
    kv_dtype: Annotated[KVDType | None, _of_cache(help="Of keys and values in host memory; default: the model's.")] = (
        None
    )
    preset: Annotated[
        str | None,
        _of_cache(help="Settings by name: fast, accurate, previous (an earlier release's) or paper."),
    ] = None
    token_budget: Annotated[
        int | None, _field("token_budget", "Tokens attended per step and KV head beside sinks and window.")
    ] = None
    mass: Annotated[
        float | None,
        _of_cache(
            help="Choose by need: until this share of each query head's attention mass is covered; 0.9 where neither a "
            "budget nor a preset is given."
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        _of_cache(help="Blocks that two-level selection keeps; default: 128, or more if the budget needs it."),
    ] = None
    block_size: Annotated[int | None, _field("block_size", "Tokens in a block.")] = None
    level: Annotated[
        Level | None,
        _field("level", "Blocks then tokens, or one of the halves alone; auto: token, or two_level if offloaded."),
    ] = None
    predictor: Annotated[
        str | None,
        _field("predictor", f"Predictive: how queries are predicted: {', '.join(PREDICTORS)}."),
    ] = None
    start_length: Annotated[
        int | None, _field("start_length", "Predictive: attend to everything until so many tokens.")
    ] = None
    cache_rank: Annotated[
        str | None,
        _of_cache(help="Predictive: who chooses: stream, host, or a second GPU: cuda:1."),
    ] = None
    sinks: Annotated[int | None, _field("sinks", "First tokens, always attended.")] = None
    prefill: Annotated[
        float | None,
        _of_cache(help="Sparse prompts: attend to the blocks that hold this share of the mass, as 0.98; default: all."),
    ] = None
    window: Annotated[int | None, _field("window", "Recent tokens, always attended.")] = None
    dense_layers: Annotated[int | None, _field("dense_layers", "First layers that attend densely.")] = None
    label_channels: Annotated[
        int | None, _of_cache(help="Label channels per key; default: a quarter of the head dimension.")
    ] = None
    max_length: Annotated[
        int | None, _of_cache(help="Reserve storage for so many tokens; default: it grows in steps.")
    ] = None

    def config(self, kind: CacheKind) -> SparseConfig:
        """The configuration of this kind of cache, with what is wrong about it reported as wrong usage.

        Options that this kind does not have may not be given.
        """
        made = called()[kind.value].config
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        preset = given.pop("preset")
        del given["offload"], given["kv_dtype"]
        given = {name: value for name, value in given.items() if value is not None}
        given |= {name: value.value for name, value in given.items() if isinstance(value, Enum)}
        for name in given:
            if name not in made.__dataclass_fields__:
                raise typer.BadParameter(f"{spell(name)} has no meaning with --cache {kind.value}")
        try:
            return made(**given) if preset is None else made.preset(preset, **given)
        except ValueError as error:
            raise typer.BadParameter(_option_names(str(error))) from error

    def refuse_all(self) -> None:
        """Without a sparse cache no option may differ from its default."""
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                name = "no-offload" if value is False and field.name == "offload" else field.name
                raise typer.BadParameter(f"{spell(name)} has no meaning without a sparse cache")


@dataclass(frozen=True)
class DecodingOptions(CacheOptions):
    """And what does not matter to the memory that a cache takes."""

    lag: Annotated[
        bool | None,
        _of_cache("--lag/--no-lag", help="Choose tokens within the previous step's blocks; default: off."),
    ] = None
    channel_file: Annotated[Path | None, _of_cache(help="Channels made by `calibrate`; default: online.")] = None


def own_options(method: Method) -> list[tuple[str, object, None]]:
    """Options that a method brings along: fields of its configuration with ``metadata={"help": ...}``."""
    hints = get_type_hints(method.config)
    return [
        (field.name, Annotated[hints[field.name] | None, _field(field.name, field.metadata["help"])], None)
        for field in fields(method.config)
        if "help" in field.metadata
    ]


def _with_own(group: type) -> type:
    """``group`` with the options that methods bring along, unless it has them."""
    known, added = {field.name for field in fields(group)}, {}
    for method in methods().values():
        added |= {option[0]: option for option in own_options(method) if option[0] not in known}
    if not added:
        return group
    return make_dataclass(group.__name__, added.values(), bases=(group,), frozen=True)


def takes(group: type) -> Callable[[Callable], Callable]:
    """Give a command the fields of a dataclass as options; it gets them as one, as ``options``."""
    group = _with_own(group)
    hints = get_type_hints(group, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "options"]

        @functools.wraps(command)
        def run(**given):
            options = group(**{field.name: given.pop(field.name) for field in fields(group)})
            return command(**given, options=options)

        run.__signature__ = signature.replace(parameters=[*own, *shared])
        return run

    return decorate


def placed(kind: CacheKind, config: SparseConfig, options: CacheOptions) -> CacheOptions:
    """``--offload`` said, by the rule of docs/host-memory.md: blocks are on the device unless the user asks.

    ``--offload`` asks, and so does an option that only blocks in host memory have. Impossible places are wrong usage.
    """
    coded(options.kv_dtype, options.offload)
    asked = replace(options, offload=options.offload or options.kv_dtype is not None)
    try:
        place = called()[kind.value].shared.place(config, offload_config(asked))
    except ValueError as error:
        raise typer.BadParameter(_option_names(str(error))) from error
    if place is not None and options.offload is False:
        raise typer.BadParameter("this cache keeps its blocks in host memory: leave --no-offload out")
    return replace(options, offload=place is not None)


def offload_config(options: CacheOptions, **more: int | None) -> OffloadConfig | None:
    """``--offload`` and ``--kv-dtype`` as the cache takes them, with ``more`` fields."""
    kv_dtype = None if options.kv_dtype is None else options.kv_dtype.value
    return OffloadConfig(kv_dtype=kv_dtype, **more) if options.offload else None


# Arguments of an engine, beside those of its cache, and the options of `serve` that give them.
ENGINE = {
    **{
        name: name
        for name in ("max_rows", "max_waiting", "max_wait_s", "prefill_ms", "prefix_cache", "flash_attention_4")
    },
    **{"max_length": "context", "max_tokens": "batch_tokens", "device_pool": "device_kv", "max_host_bytes": "host_kv"},
}


def spelling(command: Callable) -> Callable[[str], str]:
    """A function that writes arguments of Python in a message as this command's options.

    ``max_length=4096`` becomes ``--context 4096``, ``ServingConfig(prefix_cache=False)`` ``--no-prefix-cache``, and
    ``TokenConfig()`` ``--cache token``. What the command has no option for stays.
    """
    own = inspect.signature(command).parameters
    if "token_budget" not in own:  # an evaluation's caches are given by Python's names
        return lambda message: message
    fields = {name for method in methods().values() for name in method.config.__dataclass_fields__}
    options = {name: name for name in own if name in fields | {"offload", "kv_dtype", "exact"}}
    options |= {name: option for name, option in ENGINE.items() if "max_rows" in own}
    kinds = {method.config.__name__: name for name, method in reversed(called().items())}
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


def torch_dtype(dtype: DType) -> torch.dtype | None:
    """``--dtype`` as torch takes it; None for auto."""
    return None if dtype is DType.auto else getattr(torch, dtype.value)


def _option_names(message: str) -> str:
    """Field names as the command line spells them."""
    names = {name for method in methods().values() for name in method.config.__dataclass_fields__}
    fields = "|".join(sorted(names, key=len, reverse=True))
    return re.sub(rf"\b({fields})\b(?!')", lambda match: spell(match[0]), message)
