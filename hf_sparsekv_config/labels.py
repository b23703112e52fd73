"""Options of the methods that choose tokens by labels: how many, by which labels, and what stands for the others."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import ClassVar, Literal

from .options import Positive, Share, require
from .sparse import SparseConfig

MASS = 0.9  # covered by default: docs/studies/by-need.md
# A share m of the mass is reckoned to take READ * (1 - m) ** POWER of the tokens. Fitted to all that steps read of
# replayed keys with labels of 32 channels (.070, .086, .116 at 80, 85, 90 %): on the safe side.
READ, POWER = 0.0206, -0.75
FIXED = 1024  # tokens, where blocks are chosen, or a second device chooses, and the configuration says nothing
MIN_TOKENS = 64  # of a selection by need
MAX_TAIL = 32  # blocks that share one mean: a program looks each of them up

Reduce = Literal["mean", "max"]


@dataclass(frozen=True, kw_only=True)
class LabelConfig(SparseConfig):
    """As many tokens as ``mass`` takes, a fixed number ``token_budget``, or with both as many as it takes at most.

    :class:`.tokens.TokenConfig` describes the options.
    """

    FREE: ClassVar[tuple[str, ...]] = ("token_budget", "mass", "token_reduce")

    token_budget: Positive | None = None
    mass: Share | None = None
    token_reduce: Reduce = "max"
    label_channels: Positive | None = None
    channel_file: str | PathLike[str] | None = None
    calibration_tokens: Positive = 256
    tail: Literal["mean"] | None = "mean"
    tail_tokens: Positive = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        channels = self.label_channels
        require(channels is None or channels % 2 == 0, f"label_channels must be even, got {channels}")
        require(
            self.tail_tokens % self.block_size == 0 and self.tail_tokens <= MAX_TAIL * self.block_size,
            f"tail_tokens={self.tail_tokens} must be a multiple of block_size={self.block_size}, and at most "
            f"{MAX_TAIL} times as much",
        )

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
    """Tokens that a step is expected to attend to in a row of ``tokens``."""
    need = tokens
    if isinstance(config, LabelConfig) and config.threshold is not None:
        need = max(config.min_tokens, round(READ * max(1 - config.threshold, 1e-3) ** POWER * tokens))
    return min(config.budget or need, need, tokens)
