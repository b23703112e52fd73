"""The configuration of progressive selection, PSA's and Twilight's: a share of the mass, and when it counts as seen."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from .labels import LabelConfig
from .options import Number, Positive, Share, require

MAX_TOKENS = 2**31 - 1  # kernels count in 32 bits


@dataclass(frozen=True, kw_only=True)
class ProgressiveConfig(LabelConfig):
    """Progressive selection: tokens in order of importance until enough attention mass is covered.

    Source: PSA's threshold (section 3) and Twilight's top-p over estimated masses. The budget is different in each
    step, layer, row and KV head. A token's mass is estimated from its label: the exponential of the query's product
    with some channels of its key. Sinks and recent tokens, whose true masses are computed, tell how much masses exceed
    what labels say (the verifier), and count as covered.

    :class:`TokenConfig` chooses in the same way, for 90 % and from 64 tokens on. This one has more options.

    Args:
        mass: share of the attention mass to cover, in (0, 1], for each query head. It is estimated; ``audit_every``
            shows the true one. 1 attends to everything.
        min_tokens: tokens attended to at least, beside sinks and recent window, if there are as many.
        token_budget: tokens attended to at most per step, row and KV head, whatever they cover: a safety valve.
            ``stats()`` says how often it decided. ``None``: all.
        group_reduce: when the query heads of a KV head have seen enough: ``"all"`` of them, or the ``"sum"`` of their
            masses (which the heads with the largest logits decide).
        audit_every: every so many decode steps, read all keys and compare the covered share of the attention mass
            with the estimate (``stats()``). Takes longer than a dense step. ``None``: never.
        label_channels, channel_file, calibration_tokens: as in :class:`TokenConfig`.
        token_reduce, tail, tail_tokens: as there.
    """

    FREE = ("min_tokens", "group_reduce", "audit_every")
    PRESETS = MappingProxyType({"fast": {"mass": 0.9}, "accurate": {"mass": 0.98}})

    token_budget: Annotated[int, Number(1, MAX_TOKENS)] | None = None
    mass: Share = 0.95
    min_tokens: Annotated[int, Number(0, MAX_TOKENS)] = 256
    group_reduce: Literal["all", "sum"] = "all"
    audit_every: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.token_budget is None or self.token_budget >= self.min_tokens,
            f"token_budget={self.token_budget} is less than min_tokens={self.min_tokens}: lower min_tokens as well",
        )
