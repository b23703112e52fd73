"""Checks, messages and help that are made from the types and docstrings of fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import pytest

from hf_sparsekv import OffloadConfig, ServingConfig, TokenConfig
from hf_sparsekv_cli import options
from hf_sparsekv_config import CACHES
from hf_sparsekv_config.options import Count, Number, Options, Positive, Share, declared, described

if TYPE_CHECKING:
    from nowhere import Unknown


@dataclass(frozen=True)
class Made(Options):
    """One field of each kind.

    Args:
        positive: a number (of something), as 3.5 or so. More about it.
        count: what ``None`` stands for is next. ``None``: as many as fit.
    """

    positive: Positive = 1
    count: Count | None = None
    share: Share = 0.5
    ratio: Annotated[float, Number(0, 1, above=True, below=True, unit="of memory")] | Literal["auto"] = "auto"
    rate: Annotated[float, Number(infinite=True)] = 1.0
    flag: bool | None = None
    file: str | PathLike[str] | None = None


@dataclass(frozen=True)
class Unresolved(Made):
    """A type that only a type checker knows."""

    other: Unknown = None


@pytest.mark.parametrize(
    ("field", "right", "wrong", "allowed"),
    [
        ("positive", (1, 10**30), (0, True, 1.0, "1", None), "a positive integer"),
        ("count", (0, None), (-1, False, math.nan), "an integer >= 0 or None"),
        ("share", (1, 1e-9), (0, 1.1, math.nan, True, "1"), "a number in (0, 1]"),
        ("ratio", (0.5, "auto"), (0, 1, "aut"), "a number in (0, 1) (of memory) or 'auto'"),
        ("rate", (-3, math.inf), (math.nan, None), "a number"),
        ("flag", (True, False, None), (0, 1, "no"), "True, False or None"),
        ("file", ("a", Path("a"), None), (3, b"a"), "text, a path or None"),
    ],
)
@pytest.mark.parametrize("kind", [Made, Unresolved])
def test_values_are_checked_by_their_types(kind, field, right, wrong, allowed):
    for value in right:
        assert getattr(kind(**{field: value}), field) == value
    for value in wrong:
        with pytest.raises(ValueError) as told:
            kind(**{field: value})
        hint = " (did you mean 'auto'?)" if value == "aut" else ""
        assert str(told.value) == f"{field} must be {allowed}{hint}, got {value!r}"


class Chosen(str, Enum):
    """Values of an enumeration of texts."""

    reduce = "mean"


class Sizes(IntEnum):
    """Values of an enumeration of numbers."""

    block = 32


def test_choices_of_other_types():
    """Text of enumerations and numpy, and numbers of enumerations, are what they say; True and 32.0 are no size."""
    for text in (Chosen.reduce, np.str_("mean")):
        config = TokenConfig(token_reduce=text, tail=text, block_size=Sizes.block)
        assert config == TokenConfig(token_reduce="mean", tail="mean", block_size=32)
    for wrong in (True, 32.0, "32"):
        with pytest.raises(ValueError, match="block_size must be 16, 32, 64 or 128, got"):
            TokenConfig(block_size=wrong)


def test_no_fewer_than_no_dense_layers():
    for config in CACHES.values():
        with pytest.raises(ValueError, match="dense_layers must be an integer >= 0, got -1"):
            config(dense_layers=-1)


def test_names_are_checked():
    with pytest.raises(
        TypeError, match=r"Made got an unexpected keyword argument 'positiv': did you mean 'positive'\?"
    ):
        Made(positiv=3)


def test_a_field_is_described_by_its_docstring():
    assert described(Made, "positive") == "A number (of something), as 3.5 or so."
    assert described(Unresolved, "count") == "What ``None`` stands for is next. Default: as many as fit."
    assert described(Made, "share") == ""


@pytest.mark.parametrize("config", [*dict.fromkeys(CACHES.values()), OffloadConfig, ServingConfig])
def test_every_field_has_a_type_that_is_checked_and_a_sentence(config):
    assert declared(config).keys() == {one.name for one in fields(config)}
    for one in fields(config):
        said = options.help_of(config, one.name)
        assert said.endswith(".") and "`" not in said, (one.name, said)
