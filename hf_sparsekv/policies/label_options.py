"""Options that methods share which choose tokens by labels: what they may be.

Apart from the configurations because three of them have these options, each with defaults of its own.
"""

from __future__ import annotations

from os import PathLike
from typing import Literal, Protocol

from ..option_checks import is_int, one_of, positive, require
from ..predictor.channels import IMPORTANCES

MAX_TAIL = 32  # blocks that share one mean: a program looks each of them up

Reduce = Literal["mean", "max"]
Importance = Literal["spread", "max", "mean"]


class LabelOptions(Protocol):
    """A configuration with labels."""

    @property
    def label_channels(self) -> int | None: ...
    @property
    def label_bits(self) -> int: ...
    @property
    def channel_file(self) -> str | PathLike[str] | None: ...
    @property
    def channel_importance(self) -> Importance: ...
    @property
    def calibration_tokens(self) -> int: ...
    @property
    def token_reduce(self) -> Reduce: ...


class TailOptions(Protocol):
    """A configuration by which tokens that are not chosen may count as means."""

    @property
    def block_size(self) -> int: ...
    @property
    def tail(self) -> Literal["mean"] | None: ...
    @property
    def tail_tokens(self) -> int: ...


def check_tail(config: TailOptions) -> None:
    """What stands for tokens that are not chosen."""
    one_of("tail", config.tail, ("mean", None))
    positive("tail_tokens", config.tail_tokens)
    require(
        config.tail_tokens % config.block_size == 0 and config.tail_tokens <= MAX_TAIL * config.block_size,
        f"tail_tokens={config.tail_tokens} must be a multiple of block_size={config.block_size}, and at most "
        f"{MAX_TAIL} times as much",
    )


def check_labels(config: LabelOptions) -> None:
    """What the token labels of these methods must obey."""
    if config.label_channels is not None:
        positive("label_channels", config.label_channels)
        require(config.label_channels % 2 == 0, f"label_channels must be even, got {config.label_channels}")
    require(
        is_int(config.label_bits) and config.label_bits in (4, 16),
        f"label_bits must be 4 or 16, got {config.label_bits!r}",
    )
    one_of("channel_importance", config.channel_importance, IMPORTANCES)
    positive("calibration_tokens", config.calibration_tokens)
    path = config.channel_file
    require(path is None or isinstance(path, str | PathLike), f"channel_file must be a path or None, got {path!r}")
    one_of("token_reduce", config.token_reduce, ("mean", "max"))
