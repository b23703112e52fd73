"""Command line options that several commands share, and the configurations made from them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, get_type_hints

import torch
import typer

from ..config import OffloadConfig, PredictiveConfig, ProgressiveConfig, SparseConfig, TwoLevelConfig
from ..predictor.query import PREDICTORS
from ..removed import removed


class CacheKind(str, Enum):
    """What ``--cache`` takes."""

    two_level = "two_level"
    progressive = "progressive"
    predictive = "predictive"
    dense = "dense"


class Level(str, Enum):
    """What ``--level`` takes."""

    two_level = "two_level"
    block = "block"
    token = "token"


class DType(str, Enum):
    """What ``--dtype`` takes."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[
    str, typer.Argument(help="Hub id, local directory, or `small` (what `fetch` fetches).", show_default=False)
]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Precision; auto is the checkpoint's own.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")]

DEFAULTS = TwoLevelConfig()
PROGRESSIVE = ProgressiveConfig()
PREDICTIVE = PredictiveConfig()
CONFIGS = {CacheKind.progressive: ProgressiveConfig, CacheKind.predictive: PredictiveConfig}


_HIDDEN = Annotated[str | None, typer.Option(hidden=True)]


def _of_cache(*names: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel="Sparse cache")


@dataclass(frozen=True)
class CacheOptions:
    """What describes a sparse cache; a field is an option."""

    offload: Annotated[bool, _of_cache("--offload/--no-offload", help="Keep full blocks in host memory.")] = True
    token_budget: Annotated[int, _of_cache(help="Tokens attended per step and KV head beside sinks and window.")] = (
        DEFAULTS.token_budget
    )
    num_blocks: Annotated[
        int | None, _of_cache(help="Blocks that the coarse level keeps; default: 128, or more if the budget needs it.")
    ] = None
    block_size: Annotated[int, _of_cache(help="Tokens in a block.")] = DEFAULTS.block_size
    level: Annotated[Level, _of_cache(help="Blocks then tokens, or one of the halves alone.")] = Level.two_level
    threshold: Annotated[
        float, _of_cache(help="Progressive: share of the attention mass at which a KV head stops reading.")
    ] = PROGRESSIVE.threshold
    max_blocks: Annotated[
        int | None, _of_cache(help="Progressive: blocks attended per step and KV head at most; default: no limit.")
    ] = None
    predictor: Annotated[
        str, _of_cache(help=f"Predictive: how the next query is predicted: {', '.join(PREDICTORS)}.")
    ] = PREDICTIVE.predictor
    start_length: Annotated[int, _of_cache(help="Predictive: attend to everything until so many tokens.")] = 0
    cache_rank: Annotated[
        str | None,
        _of_cache(help="Predictive: who chooses: stream, host, or a second GPU: cuda:1."),
    ] = None
    sinks: Annotated[int, _of_cache(help="First tokens, always attended.")] = DEFAULTS.sinks
    window: Annotated[int, _of_cache(help="Recent tokens, always attended.")] = DEFAULTS.window
    dense_layers: Annotated[int, _of_cache(help="First layers that attend densely.")] = DEFAULTS.dense_layers
    label_channels: Annotated[
        int | None, _of_cache(help="Label channels per key; default: a quarter of the head dimension.")
    ] = None
    max_length: Annotated[
        int | None, _of_cache(help="Reserve storage for so many tokens; default: it grows in steps.")
    ] = None

    def config(self, kind: CacheKind) -> SparseConfig:
        """The configuration of this kind of cache, with what is wrong about it reported as wrong usage.

        Options of the other kinds must have their defaults.
        """
        made = CONFIGS.get(kind, TwoLevelConfig)
        mine, defaults = made.__dataclass_fields__, (DEFAULTS, PROGRESSIVE, PREDICTIVE)
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "offload"}
        given |= {name: value.value for name, value in given.items() if isinstance(value, Enum)}
        for name, value in given.items():
            if name not in mine and all(value != getattr(one, name) for one in defaults if hasattr(one, name)):
                raise typer.BadParameter(f"{_spell(name)} has no meaning with --cache {kind.value}")
        try:
            return made(**{name: value for name, value in given.items() if name in mine})
        except ValueError as error:
            raise typer.BadParameter(_option_names(str(error))) from error

    def refuse_all(self) -> None:
        """Without a sparse cache no option may differ from its default."""
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                name = "no-offload" if value is False and field.name == "offload" else field.name
                raise typer.BadParameter(f"{_spell(name)} has no meaning without a sparse cache")


@dataclass(frozen=True)
class DecodingOptions(CacheOptions):
    """And what does not matter to the memory that a cache takes."""

    lag: Annotated[
        bool | None,
        _of_cache("--lag/--no-lag", help="Choose tokens within the previous step's blocks; default: with --offload."),
    ] = None
    channel_file: Annotated[Path | None, _of_cache(help="Channels made by `calibrate`; default: online.")] = None


def takes(group: type) -> Callable[[Callable], Callable]:
    """Give a command the fields of a dataclass as options; it gets them as one, as ``options``.

    Options of the configurations that are gone are hidden ones, which say what to do instead.
    """
    hints = get_type_hints(group, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]
    gone = {name: option for made in CONFIGS.values() for name, option in removed(made).items()}
    hidden = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_HIDDEN) for name in gone
    ]

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "options"]

        @functools.wraps(command)
        def run(**given):
            for name, option in gone.items():
                if given.pop(name) is not None:
                    raise typer.BadParameter(f"{_spell(name)} is gone: {option.instead}")
            options = group(**{field.name: given.pop(field.name) for field in fields(group)})
            return command(**given, options=options)

        run.__signature__ = signature.replace(parameters=[*own, *shared, *hidden])
        return run

    return decorate


def check_place(config: SparseConfig, offload: bool) -> None:
    """Refuse what cannot be done where the blocks are to live."""
    rank = getattr(config, "cache_rank", None)
    if offload and rank not in (None, "host"):
        raise typer.BadParameter(f"--cache-rank {rank} keeps the blocks on a GPU: add --no-offload")
    if not offload and rank == "host":
        raise typer.BadParameter("--cache-rank host keeps the blocks in host memory: leave --no-offload out")


def offload_config(offload: bool) -> OffloadConfig | None:
    """``--offload`` as the cache takes it."""
    return OffloadConfig() if offload else None


def torch_dtype(dtype: DType) -> torch.dtype | None:
    """``--dtype`` as torch takes it; None for auto."""
    return None if dtype is DType.auto else getattr(torch, dtype.value)


def _spell(name: str) -> str:
    return "--" + name.replace("_", "-")


def _option_names(message: str) -> str:
    """Field names as the command line spells them."""
    names = {name for made in (TwoLevelConfig, *CONFIGS.values()) for name in made.__dataclass_fields__}
    fields = "|".join(sorted(names, key=len, reverse=True))
    return re.sub(rf"\b({fields})\b(?!')", lambda match: _spell(match[0]), message)


def parse_tokens(text: str) -> int:
    """``4k`` (4,096) or a plain number of tokens."""
    match = re.fullmatch(r"\s*(\d+)(k?)\s*", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise typer.BadParameter(f"{text!r} is no length; write for example 4k or 16384")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_bytes(text: str) -> int:
    """``24GiB``, ``80GB``, ``512MiB`` or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 24GiB or 80GB")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
