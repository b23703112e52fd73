"""Options of the methods that choose tokens by labels: how many, by which labels, and what stands for the others."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import ClassVar, Literal

from ..config import SparseConfig
from ..option_checks import is_int, one_of, positive, require, share
from ..predictor.channels import IMPORTANCES

MASS = 0.9  # covered by default: docs/studies/by-need.md
# A share m of the mass is reckoned to take READ * (1 - m) ** POWER of the tokens. Fitted to all that steps read of
# replayed keys with labels of 32 channels (.070, .086, .116 at 80, 85, 90 %): on the safe side.
READ, POWER = 0.0206, -0.75
FIXED = 1024  # tokens, where blocks are chosen, or a second device chooses, and the configuration says nothing
MIN_TOKENS = 64  # of a selection by need
MAX_TAIL = 32  # blocks that share one mean: a program looks each of them up

Reduce = Literal["mean", "max"]
Importance = Literal["spread", "max", "mean"]


@dataclass(frozen=True, kw_only=True)
class LabelConfig(SparseConfig):
    """As many tokens as ``mass`` takes, a fixed number ``token_budget``, or with both as many as it takes at most.

    :class:`.token_config.TokenConfig` describes the options.
    """

    FREE: ClassVar[tuple[str, ...]] = ("token_budget", "mass", "token_reduce")

    token_budget: int | None = None
    mass: float | None = None
    token_reduce: Reduce = "max"
    label_channels: int | None = None
    label_bits: int = 4
    channel_file: str | PathLike[str] | None = None
    channel_importance: Importance = "spread"
    calibration_tokens: int = 256
    tail: Literal["mean"] | None = "mean"
    tail_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget is not None:
            positive("token_budget", self.token_budget)
        if self.mass is not None:
            share("mass", self.mass)
        self._check_labels()
        one_of("tail", self.tail, ("mean", None))
        positive("tail_tokens", self.tail_tokens)
        require(
            self.tail_tokens % self.block_size == 0 and self.tail_tokens <= MAX_TAIL * self.block_size,
            f"tail_tokens={self.tail_tokens} must be a multiple of block_size={self.block_size}, and at most "
            f"{MAX_TAIL} times as much",
        )

    def _check_labels(self) -> None:
        one_of("token_reduce", self.token_reduce, ("mean", "max"))
        if self.label_channels is not None:
            positive("label_channels", self.label_channels)
            require(self.label_channels % 2 == 0, f"label_channels must be even, got {self.label_channels}")
        require(
            is_int(self.label_bits) and self.label_bits in (4, 16),
            f"label_bits must be 4 or 16, got {self.label_bits!r}",
        )
        one_of("channel_importance", self.channel_importance, IMPORTANCES)
        positive("calibration_tokens", self.calibration_tokens)
        path = self.channel_file
        require(path is None or isinstance(path, str | PathLike), f"channel_file must be a path or None, got {path!r}")

    @property
    def can_need(self) -> bool:
        """Tokens can be chosen by need."""
        return True

    @property
    def threshold(self) -> float | None:
        """Share of the mass to cover; None: the number of tokens is fixed."""
        if self.mass is None and self.token_budget is None and self.can_need:
            return MASS
        return self.mass

    @property
    def budget(self) -> int:
        """The number of tokens, where it is fixed."""
        return self.token_budget or (FIXED if self.threshold is None else 0)

    @property
    def min_tokens(self) -> int:
        """Tokens attended at least."""
        return min(MIN_TOKENS, self.token_budget or MIN_TOKENS)

    @property
    def max_tokens(self) -> int | None:
        """Tokens attended at most."""
        return self.token_budget

    @property
    def group_reduce(self) -> Literal["all", "sum"]:
        """When the query heads of a KV head have seen enough: all of them, or the sum of their masses."""
        return "all"

    @property
    def audit_every(self) -> int | None:
        """Steps from one audit of the mass to the next; None: there are none."""
        return None

    @property
    def means(self) -> bool:
        """Means stand for tokens that are not chosen."""
        return self.tail is not None


def whole_tokens(config: LabelConfig) -> int:
    """So many tokens in full blocks are all attended to."""
    return config.budget if config.threshold is None else config.min_tokens


def reads(config: SparseConfig, tokens: int) -> int:
    """Of a row's ``tokens``, how many a step is reckoned to attend to."""
    need = tokens
    if isinstance(config, LabelConfig) and config.threshold is not None:
        need = max(config.min_tokens, round(READ * max(1 - config.threshold, 1e-3) ** POWER * tokens))
    return min(config.budget or need, need, tokens)
