"""The configuration of progressive selection.

Apart from its policy because the baselines of the papers have it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType
from typing import ClassVar, Literal

from ..config import SparseConfig
from ..option_checks import not_negative, one_of, positive, require, share
from .label_options import Importance, Reduce, check_labels, check_tail


@dataclass(frozen=True, kw_only=True)
class ProgressiveConfig(SparseConfig):
    """Progressive selection: tokens in order of importance until enough attention mass is covered.

    Source: PSA's threshold (section 3) and Twilight's top-p over estimated masses. The budget is different in each
    step, layer, row and KV head. A token's mass is estimated from its label: the exponential of the query's product
    with some channels of its key. Sinks and recent tokens, whose true masses are computed, tell how much masses exceed
    what labels say (the verifier), and count as covered.

    Args:
        threshold: share of the attention mass to cover, in (0, 1], for each query head. It is estimated;
            ``audit_every`` shows the true one. 1 attends to everything.
        min_tokens: tokens attended to at least, beside sinks and recent window, if there are as many.
        max_tokens: tokens attended to at most per step, row and KV head, whatever they cover: a safety valve.
            ``stats()`` says how often it decided. ``None``: all.
        group_reduce: when the query heads of a KV head have seen enough: ``"all"`` of them, or the ``"sum"`` of their
            masses (which the heads with the largest logits decide).
        label_channels, label_bits, channel_file, channel_importance, calibration_tokens, tail, tail_tokens: as in
            :class:`TokenConfig`.
        audit_every: every so many decode steps, read all keys and compare the covered share of the attention mass
            with the estimate (``stats()``). Takes longer than a dense step. ``None``: never.
    """

    FREE = ("threshold", "min_tokens", "max_tokens", "group_reduce", "audit_every")
    PRESETS = MappingProxyType({"fast": {"threshold": 0.9}, "accurate": {"threshold": 0.98}})

    threshold: float = 0.95
    min_tokens: int = 256
    max_tokens: int | None = None
    group_reduce: Literal["all", "sum"] = "all"
    label_channels: int | None = None
    label_bits: int = 4
    channel_file: str | PathLike[str] | None = None
    channel_importance: Importance = "spread"
    calibration_tokens: int = 256
    tail: Literal["mean"] | None = "mean"
    tail_tokens: int = 256
    audit_every: int | None = None

    token_reduce: ClassVar[Reduce] = (
        "max"  # where one score stands for a group: what is brought to the device before the first step
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        share("threshold", self.threshold)
        not_negative("min_tokens", self.min_tokens)
        if self.max_tokens is not None:
            positive("max_tokens", self.max_tokens)
            require(
                self.max_tokens >= self.min_tokens,
                f"max_tokens={self.max_tokens} is less than min_tokens={self.min_tokens}: lower min_tokens as well",
            )
        for name in ("min_tokens", "max_tokens"):
            require((getattr(self, name) or 0) < 1 << 31, f"{name} must be less than 2^31, which kernels count to")
        one_of("group_reduce", self.group_reduce, ("all", "sum"))
        check_labels(self)
        check_tail(self)
        if self.audit_every is not None:
            positive("audit_every", self.audit_every)

    @property
    def means(self) -> bool:
        """Means stand for tokens that are not chosen."""
        return self.tail is not None
