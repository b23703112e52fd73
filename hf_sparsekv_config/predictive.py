"""The configuration of predictive selection."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol, get_args, runtime_checkable

from .labels import FIXED, LabelConfig
from .options import Count, Number, require

# Predictions within a step, by the layer before; and none: each layer's own query.
ByLayer = Literal["layer", "layer:in_delta", "layer:in", "own"]
# Predictions from earlier steps' queries. Measured on the small real model: docs/studies/predicted-queries.md.
EarlierQueries = Literal["last", "ridge", "ridge_softmax", "assembled", "assembled_ridge"]
BY_LAYER, PREDICTORS = get_args(ByLayer), get_args(EarlierQueries)
PREDICTOR = "assembled_ridge"
WINDOW, EPSILON = 16, 0.1
MAX_WINDOW = 32  # one warp holds the Gram matrix of a head in registers; longer windows measured no better
MIN_EPSILON = 1e-4  # the Gram matrix's condition number stays below MAX_WINDOW / MIN_EPSILON: float32 solves that

Window = Annotated[int, Number(1, MAX_WINDOW)]
Epsilon = Annotated[float, Number(MIN_EPSILON)]


@runtime_checkable
class Predictor(Protocol):
    """A predictor that is made already, see :mod:`hf_sparsekv.predictor.query`."""

    def predict(self, *args: Any, **kwargs: Any) -> Any: ...


DEVICE = r"(cpu|cuda|mps|xpu|hpu|xla|npu|mtia|meta)(:\d+)?"


@dataclass(frozen=True, kw_only=True)
class PredictiveConfig(LabelConfig):
    """Tokens chosen for a predicted query, so that a step finds them chosen.

    Source: AsyncSpade, section 4.

    Args:
        token_budget, mass: as in :class:`TokenConfig`, with the masses that are estimated for the expected query. A
            second device chooses a fixed number, 1,024 if ``token_budget`` is ``None``.
        predictor: how a query is known before it is there. ``"layer"``: the layer before expects it in the same step,
            from its input (``"layer:in"``, the same as ``"layer"``), which leaves a whole layer's time to choose.
            ``"layer:in_delta"``, a little more right, adds what the layer added to the residual stream for the row's
            last token (4 to 7 % more for a step). It takes hooks, which ``optimize()`` or
            :func:`hf_sparsekv.predict_ahead` installs. Layers without a foreseen query choose by
            their own query, in place, as all do with ``"own"``. From queries of earlier steps, much less right
            (docs/studies/predicted-queries.md): ``"last"``, ``"ridge"``, ``"ridge_softmax"``, ``"assembled"``
            (AsyncSpade), ``"assembled_ridge"``, or a function; see :mod:`hf_sparsekv.predictor.query`. ``None``:
            ``"layer"``; ``"assembled_ridge"`` with a second device, where a query of the same step would come too late.
        predictor_window, predictor_epsilon: of the regressions on earlier steps: predecessors, strength of the ridge.
        start_length: attend to everything until so many tokens are cached, and then to the end of the block.
        cache_rank: who chooses and where the blocks live: ``"stream"``, ``"host"``, or a second device (``"cuda:1"``).
            ``"stream"`` is the same GPU, beside its computation. ``"host"`` is host memory, as with an
            :class:`OffloadConfig`: the GPU chooses by labels and copies what is newly chosen. A second device keeps the
            blocks, chooses, and hands over what is chosen. ``None``: host memory if the cache has an
            :class:`OffloadConfig`, else the same GPU.
        strict: of a second device, where steps are not captured: wait for a selection that is late, so that runs repeat
            exactly. Otherwise the one before is used again and counted (``stats().late``), if it knows all full blocks.
        token_reduce, label_channels, label_bits, channel_file, channel_importance: as in :class:`TokenConfig`.
        calibration_tokens, tail, tail_tokens: as there. With a second device ``tail`` has no effect.
        dense_layers: two, where other methods have one: of what the second layer asks, the first one's input says
            little (docs/studies/settings.md).
    """

    FREE = ("predictor", "predictor_window", "predictor_epsilon", "start_length", "cache_rank")
    PRESETS = MappingProxyType(
        {
            "fast": {"mass": 0.75},
            "accurate": {"mass": 0.95, "predictor": "layer:in_delta"},
            "paper": {"token_budget": FIXED, "predictor": "assembled", "tail": None},
        }
    )

    dense_layers: int = 2
    predictor: Annotated[str, ByLayer | EarlierQueries] | Callable[..., Any] | Predictor | None = None
    predictor_window: Window = WINDOW
    predictor_epsilon: Epsilon = EPSILON
    start_length: Count = 0
    cache_rank: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.cache_rank in (None, "stream", "host") or self.predictor is None or not self.by_layer,
            f"predictor={self.predictor!r} chooses within a step, which cache_rank={self.cache_rank!r} cannot: leave "
            f"predictor out, which takes {PREDICTOR!r} there, or leave cache_rank out",
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
            not on_second_device(self) or self.mass is None,
            f"mass={self.mass} chooses where the blocks are read, which cache_rank={self.cache_rank!r} cannot: give a "
            "token_budget instead, or leave cache_rank out",
        )

    @property
    def can_need(self) -> bool:
        """Tokens can be chosen by need: on the same device."""
        return not on_second_device(self)

    @property
    def means(self) -> bool:
        """Means stand for tokens that are not chosen."""
        return self.tail is not None and not on_second_device(self)

    @property
    def prediction(self) -> str | Callable[..., Any] | Predictor:
        """What :attr:`predictor` stands for."""
        if self.predictor is not None:
            return self.predictor
        return "layer" if self.cache_rank in (None, "stream", "host") else PREDICTOR

    @property
    def by_layer(self) -> bool:
        """Queries are expected within a step, or not at all: nothing of earlier steps is needed."""
        return isinstance(self.prediction, str) and self.prediction in BY_LAYER


def on_second_device(config: PredictiveConfig) -> bool:
    """Another device keeps the blocks, and chooses."""
    return config.cache_rank not in (None, "stream", "host")
