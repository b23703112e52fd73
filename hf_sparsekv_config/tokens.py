"""The configuration of the default: tokens by labels, among all or in a bounded number of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from .labels import LabelConfig
from .options import Positive, require

Level = Literal["auto", "two_level", "block", "token"]


@dataclass(frozen=True, kw_only=True)
class TokenConfig(LabelConfig):
    """Tokens by quantised label channels, among all or in a bounded number of blocks. ``TwoLevelConfig`` is an alias.

    Source: AsyncTLS section 4.1; the block bound is Quest's, the label channels are Double Sparsity's.

    By default every cached token can be chosen. On the device that is as fast as choosing blocks before. It finds
    tokens that a bound on a block hides (docs/studies/settings.md). Offloaded, what a step chooses is copied to the
    device after its attention. The next steps, which want nearly the same, read it there. Other tokens that they choose
    they read in host memory (docs/host-memory.md).

    Each row and KV head attends to as many tokens as it needs: heads differ (docs/studies/by-need.md).

    Args:
        token_budget: a fixed number of tokens attended per step, row and KV head, beside sinks and recent window; with
            ``mass`` the most. ``None``: as many as ``mass`` takes, or 1,024 where blocks are chosen.
        mass: choose by need: the tokens of the largest estimated masses, until this share of each query head's
            attention mass is covered, in (0, 1]. At least 64 tokens, at most ``token_budget``. Only where tokens are
            chosen among all. ``None`` means 0.9, or a fixed number if there is a ``token_budget``.
        num_blocks: blocks that the coarse level keeps, which must be able to hold the budget. ``None`` means 128, or as
            many as ``token_budget`` needs if that is more.
        level: a choice among all cached tokens (``"token"``, as Double Sparsity does), among those of ``num_blocks``
            chosen blocks (``"two_level"``, AsyncTLS), or of whole blocks (``"block"``, as Quest does). ``"block"``
            attends to all tokens of the ``token_budget // block_size`` best blocks. ``"auto"``: ``"token"``, or
            ``"two_level"`` if ``num_blocks`` or ``lag=True`` asks for a choice of blocks.
        label_channels: channels kept per key in the label cache; even. ``None`` means half of the head dimension, but
            64 if it has them, and at most 128 (which is AsyncTLS's choice for MLA latents). Those of the largest root
            mean square of the queries times standard deviation of the keys. A label takes ``label_channels / 2 + 4``
            bytes: codes of 4 bits, of channels less their mean in units of their spread, a scale and a zero point.
        channel_file: label channels made by ``hf-sparsekv calibrate``. ``None``: channels are found on the
            prompt.
        calibration_tokens: online channels are fixed once this many tokens are cached; dense until then.
        token_reduce: how the query heads of a group share one score, of a block or of a token: ``"max"`` or ``"mean"``
            (AsyncTLS). ``"max"`` measured better on the small real model (docs/studies/settings.md).
        lag: choose tokens within the blocks that the previous step's query has chosen, so that fetching them can
            overlap (AsyncTLS section 4.2). Loses facts (docs/studies/settings.md).
        tail: ``"mean"``: tokens that are not chosen count, too, by the mean key and value of each ``tail_tokens``
            columns (RetroInfer's estimation zone). A mean counts once for each token among them that is not chosen.
            Nearer to full attention for one more token's reading in ``tail_tokens`` (docs/studies/settings.md). Lost
            facts stay lost. Without effect with ``level="block"``. ``None``: they do not count.
        tail_tokens: columns that share one mean, a multiple of ``block_size``.
    """

    FREE = ("num_blocks", "lag")
    PRESETS = MappingProxyType(
        {
            "fast": {"mass": 0.75},
            "accurate": {"mass": 0.95},
            "paper": {"level": "two_level", "lag": True, "dense_layers": 2, "token_reduce": "mean", "tail": None},
        }
    )

    num_blocks: Positive | None = None
    level: Level = "auto"
    lag: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.mass is None or level(self) == "token",
            f"mass={self.mass} goes with level='token', not with a choice of blocks: give a token_budget instead",
        )
        if self.num_blocks is not None:
            holds = self.num_blocks * self.block_size
            require(
                self.level not in ("auto", "two_level") or holds >= self.budget,
                f"num_blocks={self.num_blocks} blocks of {self.block_size} tokens hold {holds} tokens, fewer than "
                f"token_budget={self.budget}: raise num_blocks to at least {self.blocks_for_budget}",
            )
        require(
            self.level != "block" or self.budget >= self.block_size,
            f"level='block' attends to whole blocks: token_budget={self.budget} is less than one block of "
            f"{self.block_size} tokens",
        )

    @property
    def can_need(self) -> bool:
        """Tokens can be chosen by need: among all."""
        return level(self) == "token"

    @property
    def means(self) -> bool:
        """Means stand for tokens that are not chosen."""
        return self.tail is not None and self.level != "block"

    @property
    def blocks_for_budget(self) -> int:
        """Fewest blocks that hold ``token_budget`` tokens."""
        return -(-self.budget // self.block_size)

    @property
    def coarse_blocks(self) -> int:
        """Blocks that the coarse level keeps per step, row and KV head."""
        if self.level == "block":
            return self.budget // self.block_size
        return self.num_blocks or max(128, self.blocks_for_budget)


TwoLevelConfig = TokenConfig
"""An alias of ``TokenConfig``: its name before tokens were chosen among all by default."""


def level(config: TokenConfig) -> str:
    """The level in use: ``"two_level"``, ``"block"`` or ``"token"``."""
    if config.level != "auto":
        return config.level
    return "two_level" if config.num_blocks is not None or config.lag else "token"


def lags(config: LabelConfig) -> bool:
    """Tokens are chosen within the blocks of the previous step."""
    return isinstance(config, TokenConfig) and config.lag and level(config) != "token"


def selection(config: TokenConfig) -> str:
    """The selection's name in the table of crossovers."""
    of = level(config)
    if of != "two_level":
        return f"{of}_only"
    return "two_level:lag" if lags(config) else "two_level"
