"""The caches to choose from, and their controls. Another cache joins by an entry in ``METHODS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    ProgressiveCache,
    ProgressiveConfig,
    TwoLevelConfig,
)

DENSE = "dense"


@dataclass(frozen=True)
class Control:
    """A slider.

    Args:
        name: field of the configuration.
        value: at first; ``on_gpu``: at first on a GPU, where contexts are longer.
    """

    name: str
    label: str
    minimum: float
    maximum: float
    step: float
    value: float
    on_gpu: float | None = None
    info: str | None = None


@dataclass(frozen=True)
class Method:
    """A cache to race against full attention.

    Args:
        cache, config: its classes; ``None``: full attention twice, which shows what the clocks are worth.
        settings: fixed fields of the configuration.
        adjust: makes values fit each other before the configuration checks them.
    """

    label: str
    about: str
    cache: type | None = None
    config: type | None = None
    controls: tuple[Control, ...] = ()
    settings: dict = field(default_factory=dict)
    adjust: Callable[[dict], dict] = dict

    def make(self, values: dict, offload: bool, model_config, max_length: int):
        """A new empty cache.

        Raises:
            ValueError: values that do not fit each other; the message says which.
        """
        chosen = {c.name: _number(c, values[c.name]) for c in self.controls}
        config = self.config(max_length=max_length, **self.settings, **self.adjust(chosen))
        return self.cache(config, offload=OffloadConfig() if offload else None, model_config=model_config)


def _number(control: Control, value: float) -> float | int:
    """Sliders give 256.0 for 256."""
    return int(value) if float(control.step).is_integer() else float(value)


_BUDGET = Control("token_budget", "Token budget", 64, 4096, 64, 256, 1024, "tokens attended, beside recent ones")


def _zero_is_never(values: dict) -> dict:
    return {**values, "audit_every": values["audit_every"] or None}


METHODS: dict[str, Method] = {
    "two_level": Method(
        "Two-level",
        "blocks by a bound on their scores, then the best tokens in them (AsyncTLS)",
        OffloadedSparseCache,
        TwoLevelConfig,
        (
            _BUDGET,
            Control("num_blocks", "Blocks", 4, 512, 4, 32, 128, "of 64 tokens, among which tokens are chosen"),
        ),
        adjust=lambda v: {**v, "num_blocks": max(v["num_blocks"], -(-v["token_budget"] // 64))},
    ),
    "progressive": Method(
        "Progressive",
        "blocks in order of importance until enough attention mass is covered (PSA)",
        ProgressiveCache,
        ProgressiveConfig,
        (
            Control("threshold", "Mass to cover", 0.5, 0.999, 0.001, 0.98, None, "share of attention, estimated"),
            Control("min_blocks", "Blocks at least", 1, 64, 1, 8),
            Control("audit_every", "Measure the true mass every", 0, 64, 1, 0, None, "tokens; 0 never. Takes time"),
        ),
        adjust=_zero_is_never,
    ),
    "predictive": Method(
        "Predictive",
        "the next query is predicted, its tokens are ready when it comes (AsyncSpade)",
        AsyncPredictiveCache,
        PredictiveConfig,
        (_BUDGET,),
    ),
    DENSE: Method("Dense again", "full attention in both panes: how far apart equal runs are"),
}
