"""The configuration of predictive selection."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from .labels import FIXED, LabelConfig
from .options import Count, require

EARLIER = "assembled"  # AsyncSpade's; the others expect a query within the step, by the layer before
QueryPredictor = Literal["layer", "layer:in_delta", "assembled"]
PREDICTORS = get_args(QueryPredictor)


DEVICE = r"(cpu|cuda|mps|xpu|hpu|xla|npu|mtia|meta)(:\d{1,4})?"


@dataclass(frozen=True, kw_only=True)
class PredictiveConfig(LabelConfig):
    """Tokens chosen for a predicted query, so that a step finds them chosen.

    Source: AsyncSpade, section 4.

    Args:
        token_budget, mass: as in :class:`TokenConfig`, with the masses that are estimated for the expected query.
            ``"assembled"`` chooses a fixed number, 1,024 if ``token_budget`` is ``None``.
        predictor: how a query is known before it is there. ``"layer"``: the layer before expects it in the same step,
            from its input, which leaves a whole layer's time to choose. ``"layer:in_delta"``, a little more right, adds
            what the layer added to the residual stream for the row's last token (4 to 7 % more for a step). Both take
            hooks, which ``optimize()`` or :func:`hf_sparsekv.predict_ahead` installs. Layers without a foreseen query
            choose by their own query, in place. ``"assembled"`` (AsyncSpade), much less right
            (docs/studies/predicted-queries.md): regressions on the queries of earlier steps. ``None``: ``"layer"``;
            ``"assembled"`` with a second device, where a query of the same step would come too late.
        start_length: attend to everything until so many tokens are cached, and then to the end of the block.
        cache_rank: who chooses and where the blocks live: ``"stream"``, ``"host"``, or a second device (``"cuda:1"``).
            ``"stream"`` is the same GPU, beside its computation. ``"host"`` is host memory, as with an
            :class:`OffloadConfig`: the GPU chooses by labels and copies what is newly chosen. A second device keeps the
            blocks, chooses, and hands over what is chosen. ``None``: host memory if the cache has an
            :class:`OffloadConfig`, else the same GPU.
        strict: of a second device, where steps are not captured: wait for a selection that is late, so that runs repeat
            exactly. Otherwise the one before is used again and counted (``stats().late``), if it knows all full blocks.
        token_reduce, label_channels, channel_file: as in :class:`TokenConfig`.
        calibration_tokens, tail, tail_tokens: as there. With a second device ``tail`` has no effect.
        dense_layers: two, where other methods have one: of what the second layer asks, the first one's input says
            little (docs/studies/settings.md).
    """

    FREE = ("predictor", "start_length", "cache_rank")
    PRESETS = MappingProxyType(
        {
            "fast": {"mass": 0.75},
            "accurate": {"mass": 0.95, "predictor": "layer:in_delta"},
            "paper": {"token_budget": FIXED, "predictor": EARLIER, "tail": None},
        }
    )

    dense_layers: Count = 2
    predictor: QueryPredictor | None = None
    start_length: Count = 0
    cache_rank: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.cache_rank in (None, "stream", "host") or self.predictor is None or not self.by_layer,
            f"predictor={self.predictor!r} chooses within a step, which cache_rank={self.cache_rank!r} cannot: leave "
            f"predictor out, which takes {EARLIER!r} there, or leave cache_rank out",
        )
        require(
            self.cache_rank in (None, "stream", "host") or re.fullmatch(DEVICE, self.cache_rank) is not None,
            f"cache_rank must be 'stream', 'host', a device such as 'cuda:1' or None, got {self.cache_rank!r}",
        )
        require(
            self.cache_rank in (None, "stream", "host") or self.dense_below in ("auto", None, 0),
            f"with cache_rank={self.cache_rank!r} blocks lie on that device, so attending to all of them is never as "
            f"quick: leave dense_below={self.dense_below!r} out (start_length says from where on to select)",
        )
        require(
            self.by_layer or self.mass is None,
            f"mass={self.mass} is for queries that the layer before expects, not for predictor={EARLIER!r} or a second "
            "device: give a token_budget instead",
        )

    @property
    def can_need(self) -> bool:
        """Tokens can be chosen by need: for queries of the same step."""
        return self.by_layer

    @property
    def means(self) -> bool:
        """Means stand for tokens that are not chosen."""
        return self.tail is not None and not on_second_device(self)

    @property
    def prediction(self) -> str:
        """The predictor in use: :attr:`predictor`, or the default."""
        return self.predictor or (EARLIER if on_second_device(self) else "layer")

    @property
    def by_layer(self) -> bool:
        """Queries are expected within a step: nothing of earlier steps is needed."""
        return self.prediction != EARLIER


def on_second_device(config: PredictiveConfig) -> bool:
    """Another device keeps the blocks, and chooses."""
    return config.cache_rank not in (None, "stream", "host")
