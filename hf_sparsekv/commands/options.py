"""Command line options that several commands share, and the configurations made from them."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..config import OffloadConfig, PredictiveConfig, ProgressiveConfig, SparseConfig, TwoLevelConfig
from ..predictor.query import PREDICTORS

_PANEL = "Sparse cache"


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


class Scoring(str, Enum):
    """What ``--scoring`` takes."""

    labels = "labels"
    keys = "keys"


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

Threshold = Annotated[
    float,
    typer.Option(
        help="Progressive: share of the attention mass at which a KV head stops reading.", rich_help_panel=_PANEL
    ),
]
MaxBlocks = Annotated[
    int | None,
    typer.Option(
        help="Progressive: blocks attended per step and KV head at most; default: no limit.", rich_help_panel=_PANEL
    ),
]
Predictor = Annotated[
    str,
    typer.Option(
        help=f"Predictive: how the next query is predicted: {', '.join(PREDICTORS)}.",
        rich_help_panel=_PANEL,
    ),
]
ScoringOption = Annotated[
    Scoring,
    typer.Option("--scoring", help="Predictive: score tokens by labels or by whole keys.", rich_help_panel=_PANEL),
]
StartLength = Annotated[
    int, typer.Option(help="Predictive: attend to everything until so many tokens.", rich_help_panel=_PANEL)
]
Offload = Annotated[
    bool, typer.Option("--offload/--no-offload", help="Keep full blocks in host memory.", rich_help_panel=_PANEL)
]
TokenBudget = Annotated[
    int, typer.Option(help="Tokens attended per step and KV head beside sinks and window.", rich_help_panel=_PANEL)
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        help="Blocks that the coarse level keeps; default: 128, or more if the budget needs it.",
        rich_help_panel=_PANEL,
    ),
]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.", rich_help_panel=_PANEL)]
LevelOption = Annotated[
    Level, typer.Option("--level", help="Blocks then tokens, or one of the halves alone.", rich_help_panel=_PANEL)
]
Sinks = Annotated[int, typer.Option(help="First tokens, always attended.", rich_help_panel=_PANEL)]
Window = Annotated[int, typer.Option(help="Recent tokens, always attended.", rich_help_panel=_PANEL)]
DenseLayers = Annotated[int, typer.Option(help="First layers that attend densely.", rich_help_panel=_PANEL)]
Lag = Annotated[
    bool | None,
    typer.Option(
        "--lag/--no-lag",
        help="Choose tokens within the previous step's blocks; default: with --offload.",
        rich_help_panel=_PANEL,
    ),
]
Channels = Annotated[
    int | None,
    typer.Option(
        "--label-channels",
        help="Label channels per key; default: a quarter of the head dimension.",
        rich_help_panel=_PANEL,
    ),
]
ChannelFile = Annotated[
    Path | None,
    typer.Option(help="Channels made by `calibrate`; default: online.", rich_help_panel=_PANEL),
]
MaxLength = Annotated[
    int | None,
    typer.Option(help="Reserve storage for so many tokens; default: it grows in steps.", rich_help_panel=_PANEL),
]

DEFAULTS = TwoLevelConfig()
PROGRESSIVE = ProgressiveConfig()
PREDICTIVE = PredictiveConfig()
CONFIGS = {CacheKind.progressive: ProgressiveConfig, CacheKind.predictive: PredictiveConfig}


def sparse_config(kind: CacheKind = CacheKind.two_level, **options) -> SparseConfig:
    """The configuration of this kind of cache, with what is wrong about it reported as wrong usage.

    Options of the other kinds must have their defaults.
    """
    made = CONFIGS.get(kind, TwoLevelConfig)
    mine, defaults = made.__dataclass_fields__, (DEFAULTS, PROGRESSIVE, PREDICTIVE)
    for name, value in options.items():
        if name not in mine and all(value != getattr(one, name) for one in defaults if hasattr(one, name)):
            raise typer.BadParameter(f"{_spell(name)} has no meaning with --cache {kind.value}")
    try:
        return made(**{name: value for name, value in options.items() if name in mine})
    except ValueError as error:
        raise typer.BadParameter(_option_names(str(error))) from error


def check_place(config: SparseConfig, offload: bool) -> None:
    """Refuse what cannot be done with blocks in host memory."""
    if offload and getattr(config, "scoring", "labels") == "keys":
        raise typer.BadParameter("--scoring keys reads all keys in every step: add --no-offload")


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


def parse_bytes(text: str) -> int:
    """``24GiB``, ``80GB``, ``512MiB`` or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 24GiB or 80GB")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
