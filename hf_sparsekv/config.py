"""What a user chooses, as frozen dataclasses that are checked when they are made.

A class lists in ``FREE`` the fields of its own that only later steps depend on: a saved cache may be loaded with
others (:meth:`SparseCache.load`). Every other field must be as it was saved. ``PRESETS`` names settings that belong
together (:meth:`SparseConfig.preset`); what each costs and finds is in docs/presets.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from os import PathLike
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeGuard, TypeVar

import torch
from torch import Tensor

from .option_names import Options, guess

# Names of query predictors (predictor/query.py) and what their settings may be.
PREDICTORS = ("last", "ridge", "ridge_softmax", "assembled", "assembled_ridge")
# Predictions within a step, by the layer before; and none: each layer's own query.
BY_LAYER = ("layer", "layer:in_delta", "layer:mid", "layer:in", "own")
MAX_WINDOW = 32  # one warp holds the Gram matrix of a head in registers; longer windows measured no better
MIN_EPSILON = 1e-4  # the Gram matrix's condition number stays below MAX_WINDOW / MIN_EPSILON: float32 solves that

# Measured on the small real model: docs/studies/predicted-queries.md.
PREDICTOR = "assembled_ridge"
WINDOW = 16
EPSILON = 0.1

MAX_TAIL = 32  # blocks that share one mean: a program looks each of them up

Config = TypeVar("Config", bound="SparseConfig")
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A user's predictor: ``(ring, position, count) -> prediction``, see ``QueryPredictor.predict()``."""

Reduce = Literal["mean", "max"]
Metadata = Literal["min_max", "cuboid_mean", "mean"]
METADATA = ("min_max", "cuboid_mean", "mean")
Level = Literal["auto", "two_level", "block", "token"]
LEVELS = ("auto", "two_level", "block", "token")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(name: str, value: object) -> None:
    _require(_is_int(value) and value > 0, f"{name} must be a positive integer, got {value!r}")


def _is_device(name: object) -> bool:
    try:
        return isinstance(name, str) and torch.device(name) is not None
    except RuntimeError:
        return False


def _not_negative(name: str, value: object) -> None:
    _require(_is_int(value) and value >= 0, f"{name} must be an integer >= 0, got {value!r}")


def _power_of_two(name: str, value: Any) -> None:
    _positive(name, value)
    _require(value & (value - 1) == 0, f"{name} must be a power of two, got {value}")


def check_window(window: object) -> None:
    """Raise ``ValueError`` unless a regression can have so many predecessors."""
    ok = _is_int(window) and 1 <= window <= MAX_WINDOW
    _require(ok, f"window must be an integer in [1, {MAX_WINDOW}], got {window!r}")


def check_predictor(predictor: object, window: object, epsilon: object) -> None:
    """Raise ``ValueError`` unless a query predictor of this name, or of a user's function, can be made."""
    if isinstance(predictor, str):
        _one_of("predictor", predictor, PREDICTORS)
        check_window(window)
        ok = (
            isinstance(epsilon, int | float) and not isinstance(epsilon, bool) and MIN_EPSILON <= epsilon < float("inf")
        )
        _require(ok, f"epsilon must be a number of at least {MIN_EPSILON}, got {epsilon!r}")
    elif not hasattr(predictor, "predict"):  # which is one that has been made, and checked, already
        _require(callable(predictor), f"a predictor must be callable, got {type(predictor).__name__}")
        check_window(window)


def _flag(name: str, value: object) -> None:
    _require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")


def _flag_or_none(name: str, value: object) -> None:
    _require(value is None or isinstance(value, bool), f"{name} must be True, False or None, got {value!r}")


def _one_of(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    hint = guess(value, filter(None, choices)) if isinstance(value, str) else ""
    _require(value in choices, f"{name} must be one of {', '.join(map(repr, choices))}{hint}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Options):
    """What every sparse method shares: block layout and the tokens that are always attended.

    Args:
        block_size: tokens in a block, the unit of storage, transfer and coarse selection. A power of two
            in [16, 128].
        sinks: the first valid tokens of each row, attended at every step on top of any budget.
        window: the most recent tokens, attended at every step on top of any budget. The tokens that have
            not been sealed into a block yet (at most ``max_draft + block_size`` more) are attended too.
        dense_layers: layers ``0 .. dense_layers - 1`` attend densely: their attention is too flat to select. The first
            one matters, a second one hardly does (docs/studies/settings.md).
        max_draft: draft tokens that a ``crop()`` can take back without reopening a stored block (assisted and
            prompt-lookup decoding take back at most their draft length). A deeper crop is correct but slower. Passes
            of at most one token more, if they verify drafts, attend as decode steps do; longer ones to everything.
        max_length: longest sequence (prompt and answer, in tokens) to reserve storage for. ``None`` lets the
            storage grow in steps.
        dense_below: a decode step attends to everything, as dense attention does, while the full blocks of the layer
            hold at most this many tokens, counted over all rows (batch x tokens a row, padding included; recent
            tokens come on top). ``"auto"``: while that is measured to be as quick as selecting on this GPU, or guessed
            (:mod:`hf_sparsekv.policies.crossover`; ``hf-sparsekv calibrate-device`` measures), so never with blocks in
            host memory that a GPU reads, for predicted queries over keys and values (over latents it is measured), or
            with progressive selection, which takes as long as the data want. ``None``: never. A number
            holds for offloaded blocks, too; with blocks on a second device it is an error.
    """

    FREE: ClassVar[tuple[str, ...]] = ("dense_below", "max_length")
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    block_size: int = 64
    sinks: int = 4
    window: int = 64
    dense_layers: int = 1
    max_draft: int = 16
    max_length: int | None = None
    dense_below: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        _power_of_two("block_size", self.block_size)
        _require(16 <= self.block_size <= 128, f"block_size must lie in [16, 128], got {self.block_size}")
        for name in ("sinks", "window", "dense_layers", "max_draft"):
            _not_negative(name, getattr(self, name))
        _require(self.window >= 1, "window must be at least 1: the newest token is always attended")
        if self.max_length is not None:
            _positive("max_length", self.max_length)
        ok = self.dense_below in ("auto", None) or (_is_int(self.dense_below) and self.dense_below >= 0)
        _require(ok, f"dense_below must be an integer >= 0, 'auto' or None, got {self.dense_below!r}")

    @classmethod
    def preset(cls: type[Config], name: str, **changes: Any) -> Config:
        """A configuration by name (docs/presets.md), with ``changes`` of single fields.

        ``"fast"`` and ``"accurate"`` lie on either side of the defaults; ``"previous"`` is what earlier releases took
        by default, ``"paper"`` the method's paper.

        Raises:
            ValueError: this class has no preset ``name``, or the changes do not fit it.
        """
        offered = ", ".join(map(repr, cls.PRESETS)) or "none"
        hint = guess(str(name), cls.PRESETS)
        _require(name in cls.PRESETS, f"{cls.__name__} has no preset {name!r}{hint}; it has {offered}")
        return cls(**{**cls.PRESETS[name], **changes})

    def brief(self) -> str:
        """Class and options that differ from the defaults, on one line: ``"TwoLevelConfig(token_budget=512)"``."""
        return f"{type(self).__name__}({self.changes()})"

    def changes(self) -> str:
        """Options that differ from the defaults: ``"token_budget=512, sinks=8"``."""
        held = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ", ".join(f"{name}={value!r}" for name, value, default in held if value != default)


def _check_index(config: TwoLevelConfig) -> None:
    """What the block metadata must obey."""
    _one_of("block_reduce", config.block_reduce, ("mean", "max"))
    if config.bound_tokens is not None:
        _power_of_two("bound_tokens", config.bound_tokens)
        _require(
            config.bound_tokens <= config.block_size,
            f"bound_tokens={config.bound_tokens} exceeds block_size={config.block_size}",
        )


def _check_tail(config: TwoLevelConfig | PredictiveConfig) -> None:
    """What stands for tokens that are not chosen."""
    _one_of("tail", config.tail, ("mean", None))
    _positive("tail_tokens", config.tail_tokens)
    _require(
        config.tail_tokens % config.block_size == 0 and config.tail_tokens <= MAX_TAIL * config.block_size,
        f"tail_tokens={config.tail_tokens} must be a multiple of block_size={config.block_size}, and at most "
        f"{MAX_TAIL} times as much",
    )


def _check_labels(config: TwoLevelConfig | ProgressiveConfig | PredictiveConfig) -> None:
    """What the token labels of these methods must obey."""
    if config.label_channels is not None:
        _positive("label_channels", config.label_channels)
        _require(config.label_channels % 2 == 0, f"label_channels must be even, got {config.label_channels}")
    _require(
        _is_int(config.label_bits) and config.label_bits in (4, 16),
        f"label_bits must be 4 or 16, got {config.label_bits!r}",
    )
    _one_of("channel_importance", config.channel_importance, ("max", "mean"))
    _positive("calibration_tokens", config.calibration_tokens)
    path = config.channel_file
    _require(path is None or isinstance(path, str | PathLike), f"channel_file must be a path or None, got {path!r}")
    _one_of("token_reduce", config.token_reduce, ("mean", "max"))


@dataclass(frozen=True, kw_only=True)
class TwoLevelConfig(SparseConfig):
    """Tokens by quantised label channels, among all or in a bounded number of blocks.

    Source: AsyncTLS section 4.1; the block bound is Quest's, the label channels are Double Sparsity's.

    By default every cached token can be chosen: on the device that is as fast as choosing blocks before, and it finds
    what a bound on a block hides (docs/studies/ruler.md). Offloaded, what a step chooses is copied to the device behind
    its attention; the next ones, which want nearly the same, read there what is there, and the other tokens that they
    choose in host memory (docs/offloading.md).

    Args:
        token_budget: tokens attended per step, row and KV head, beside sinks and recent window.
        num_blocks: blocks that the coarse level keeps, which must be able to hold the budget. ``None`` means 128, or as
            many as ``token_budget`` needs if that is more.
        level: ``"two_level"`` chooses ``num_blocks`` blocks, then tokens in them (AsyncTLS). Its halves: ``"block"``
            attends to all tokens of the ``token_budget // block_size`` best blocks (as Quest does), ``"token"`` chooses
            among all cached tokens (as Double Sparsity does). ``"auto"``: ``"token"``, or ``"two_level"`` if
            ``num_blocks``, ``metadata``, ``bound_tokens`` or ``lag=True`` asks for a choice of blocks.
        metadata: what is kept of a block's keys to score it by: ``"min_max"`` (Quest's bound, as AsyncTLS has it),
            ``"cuboid_mean"`` (ArkVale's centre of the keys' box and mean deviation from it) or ``"mean"`` (of the keys;
            half the memory). ``None`` means ``"min_max"``.
        bound_tokens: tokens that share one pair of key bounds; divides ``block_size``. A block scores as its best part
            does: narrower bounds find more, and take ``block_size / bound_tokens`` times the memory and time.
            ``None`` means one pair a block (AsyncTLS).
        label_channels: channels kept per key in the label cache; even. ``None`` means a quarter of the head
            dimension, at most 128 (which is AsyncTLS's choice for MLA latents).
        label_bits: 4 (packed codes with a scale and a zero point per token) or 16 (unquantised).
        channel_file: label channels made by ``hf-sparsekv calibrate``. ``None`` calibrates online on the
            prompt.
        channel_importance: how online calibration ranks channels: ``"max"`` (AsyncTLS: product of the largest
            magnitudes) or ``"mean"`` (Double Sparsity: mean magnitude of the product).
        calibration_tokens: online channels are fixed once this many tokens are cached; dense until then.
        block_reduce: how the query heads of a group share one block score: ``"max"`` or ``"mean"`` (their bounds
            are averaged; AsyncTLS). ``"max"`` measured better on the small real model (docs/studies/settings.md).
        token_reduce: the same for the token score.
        lag: choose tokens within the blocks that the previous step's query has chosen, so that fetching them can
            overlap (AsyncTLS section 4.2). Loses facts (docs/studies/ruler.md). ``None``, which
            files of earlier releases hold, means off.
        tail: ``"mean"``: tokens that are not chosen count, too, as the mean key and value of each ``tail_tokens``
            columns, times the tokens among them that are not chosen (RetroInfer's estimation zone). Nearer to full
            attention for one more token's reading in ``tail_tokens`` (docs/studies/not-chosen.md). Lost facts stay
            lost. Without effect with ``level="block"``. ``None``: they do not count.
        tail_tokens: columns that share one mean, a multiple of ``block_size``.
    """

    FREE = ("token_budget", "num_blocks", "lag", "block_reduce", "token_reduce")
    PRESETS = MappingProxyType(
        {
            "fast": {"token_budget": 512},
            "accurate": {"token_budget": 2048},
            "previous": {"level": "two_level", "metadata": "min_max", "lag": True, "tail": None, "dense_layers": 2},
            "paper": {
                **{"level": "two_level", "metadata": "min_max", "lag": True, "dense_layers": 2},
                **{"block_reduce": "mean", "token_reduce": "mean", "tail": None},
            },
        }
    )

    label_share = 4  # of the channels are label channels by default: one in so many

    token_budget: int = 1024
    num_blocks: int | None = None
    level: Level = "auto"
    metadata: Metadata | None = None
    bound_tokens: int | None = None
    label_channels: int | None = None
    label_bits: int = 4
    channel_file: str | PathLike[str] | None = None
    channel_importance: Literal["max", "mean"] = "max"
    calibration_tokens: int = 256
    block_reduce: Reduce = "max"
    token_reduce: Reduce = "max"
    lag: bool | None = False
    tail: Literal["mean"] | None = "mean"
    tail_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("token_budget", self.token_budget)
        _one_of("level", self.level, LEVELS)
        if self.num_blocks is not None:
            _positive("num_blocks", self.num_blocks)
            holds = self.num_blocks * self.block_size
            _require(
                self.level not in ("auto", "two_level") or holds >= self.token_budget,
                f"num_blocks={self.num_blocks} blocks of {self.block_size} tokens hold {holds} tokens, fewer than "
                f"token_budget={self.token_budget}: raise num_blocks to at least {self.blocks_for_budget}",
            )
        _require(
            self.level != "block" or self.token_budget >= self.block_size,
            f"level='block' attends to whole blocks: token_budget={self.token_budget} is less than one block of "
            f"{self.block_size} tokens",
        )
        _one_of("metadata", self.metadata, (*METADATA, None))
        _check_index(self)
        _check_labels(self)
        _check_tail(self)
        _flag_or_none("lag", self.lag)

    @property
    def blocks_for_budget(self) -> int:
        """Fewest blocks that hold ``token_budget`` tokens."""
        return -(-self.token_budget // self.block_size)

    @property
    def bounds_per_block(self) -> int:
        """Parts of a block that have metadata of their own."""
        return self.block_size // (self.bound_tokens or self.block_size)

    @property
    def coarse_blocks(self) -> int:
        """Blocks that the coarse level keeps per step, row and KV head."""
        if self.level == "block":
            return self.token_budget // self.block_size
        return self.num_blocks or max(128, self.blocks_for_budget)


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
        estimate: ``"labels"``, or one of three that go by boxes around the keys of whole blocks, as baselines:
            ``"as_min"`` (PSA's), ``"bound"`` (Quest's bound on what is left, which guarantees the threshold and reads
            nearly everything) and ``"scores"`` (this package's earlier one). See
            :mod:`hf_sparsekv.policies.block_walk`: plain torch on any device, which reads every key to find where to
            stop, so these are slower than dense attention. ``min_tokens`` and ``max_tokens`` become whole blocks, and
            label options are not used.
        label_channels: channels kept per key in its label; even. ``None`` means half of the head dimension, at most
            128: on the small real model a quarter reads more tokens and covers less of what retrieval heads look up
            (docs/studies/progressive.md).
        label_bits, channel_file, channel_importance, calibration_tokens: as in :class:`TwoLevelConfig`.
        audit_every: every so many decode steps, read all keys and compare the covered share of the attention mass
            with the estimate (``stats()``). Takes longer than a dense step. ``None``: never. Only with
            ``estimate="labels"``.
    """

    FREE = ("threshold", "min_tokens", "max_tokens", "group_reduce", "audit_every")
    PRESETS = MappingProxyType(
        {
            "fast": {"threshold": 0.9},
            "accurate": {"threshold": 0.98},
            "previous": {"estimate": "scores", "threshold": 0.98, "min_tokens": 512, "dense_layers": 2},
            "paper": {"estimate": "as_min", "threshold": 0.98, "min_tokens": 0, "dense_layers": 2},
        }
    )

    threshold: float = 0.95
    min_tokens: int = 256
    max_tokens: int | None = None
    group_reduce: Literal["all", "sum"] = "all"
    estimate: Literal["labels", "scores", "as_min", "bound"] = "labels"
    label_channels: int | None = None
    label_bits: int = 4
    channel_file: str | PathLike[str] | None = None
    channel_importance: Literal["max", "mean"] = "max"
    calibration_tokens: int = 256
    audit_every: int | None = None

    label_share = 2  # of the channels are label channels by default: one in so many
    token_reduce = "max"  # where one score stands for a group: what is brought to the device before the first step

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = (
            isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool) and 0 < self.threshold <= 1
        )
        _require(ok, f"threshold must lie in (0, 1], got {self.threshold!r}")
        _not_negative("min_tokens", self.min_tokens)
        if self.max_tokens is not None:
            _positive("max_tokens", self.max_tokens)
            _require(
                self.max_tokens >= self.min_tokens,
                f"max_tokens={self.max_tokens} is less than min_tokens={self.min_tokens}: lower min_tokens as well",
            )
        for name in ("min_tokens", "max_tokens"):
            _require((getattr(self, name) or 0) < 1 << 31, f"{name} must be less than 2^31, which kernels count to")
        _one_of("group_reduce", self.group_reduce, ("all", "sum"))
        _one_of("estimate", self.estimate, ("labels", "scores", "as_min", "bound"))
        _check_labels(self)
        if self.audit_every is not None:
            _positive("audit_every", self.audit_every)
            _require(self.labels, f"audit_every needs estimate='labels', got {self.estimate!r}")

    @property
    def labels(self) -> bool:
        """Tokens have labels."""
        return self.estimate == "labels"


@dataclass(frozen=True, kw_only=True)
class PredictiveConfig(SparseConfig):
    """Tokens chosen for a predicted query, so that a step finds them chosen.

    Source: AsyncSpade, section 4.

    Args:
        token_budget: tokens attended per step, row and KV head, beside sinks and recent window.
        predictor: how a query is known before it is there. ``"layer"``: the layer before expects it in the same step,
            from its input (``"layer:in"``, the same as ``"layer"``), which leaves a whole layer's time to choose. A
            little more right are its input plus what it added to the residual stream for the row's token before
            (``"layer:in_delta"``, 4 to 7 % more for a step), and the stream between its attention and its MLP
            (``"layer:mid"``), with too little time left to hide the choice. It takes hooks, which ``optimize()``
            or :func:`hf_sparsekv.predict_ahead` installs. Layers that nobody foresees choose by their own query, in
            place, as all do with ``"own"``. From queries of earlier steps, much less right
            (docs/studies/predicted-queries.md): ``"last"``, ``"ridge"``, ``"ridge_softmax"``, ``"assembled"``
            (AsyncSpade), ``"assembled_ridge"``, or a function; see :mod:`hf_sparsekv.predictor.query`. ``None``:
            ``"layer"``; ``"assembled_ridge"`` with a second device, where a query of the same step would come too late.
        predictor_window, predictor_epsilon: of the regressions on earlier steps: predecessors, strength of the ridge.
        start_length: attend to everything until so many tokens are cached, and then to the end of the block.
        cache_rank: who chooses and where the blocks live: ``"stream"``, the same GPU, beside its computation;
            ``"host"``, host memory (as with an :class:`OffloadConfig`): the GPU chooses by labels and copies what is
            newly chosen; or a second device (``"cuda:1"``), which keeps the blocks, chooses, and hands over what is
            chosen. ``None``: host memory if the cache has an :class:`OffloadConfig`, else the same GPU.
        strict: of a second device, where steps are not captured: wait for a selection that is late, so that runs repeat
            exactly. Otherwise the one before is used again and counted (``stats().late``), if it knows all full blocks.
        layers_per_pack: layers that begin to choose together in a captured step, where earlier steps predict.
        token_reduce, label_channels, label_bits, channel_file, channel_importance: as in :class:`TwoLevelConfig`.
        calibration_tokens, tail, tail_tokens: as there. With a second device ``tail`` has no effect.
        dense_layers: two, where other methods have one: of what the second layer asks, the first one's input says
            little (docs/studies/settings.md).
    """

    FREE = (
        *("token_budget", "predictor", "predictor_window", "predictor_epsilon", "start_length", "cache_rank"),
        *("layers_per_pack", "token_reduce"),
    )
    PRESETS = MappingProxyType(
        {
            "fast": {"token_budget": 512},
            "accurate": {"token_budget": 2048, "predictor": "layer:in_delta"},
            "previous": {"predictor": "assembled_ridge", "tail": None},
            "paper": {"predictor": "assembled", "tail": None},
        }
    )

    label_share = 4

    dense_layers: int = 2
    token_budget: int = 1024
    predictor: str | Predict | None = None
    predictor_window: int = WINDOW
    predictor_epsilon: float = EPSILON
    start_length: int = 0
    cache_rank: str | None = None
    strict: bool = False
    layers_per_pack: int = 1
    token_reduce: Reduce = "max"
    label_channels: int | None = None
    label_bits: int = 4
    channel_file: str | PathLike[str] | None = None
    channel_importance: Literal["max", "mean"] = "max"
    calibration_tokens: int = 256
    tail: Literal["mean"] | None = "mean"
    tail_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("token_budget", self.token_budget)
        if isinstance(self.predictor, str):
            _one_of("predictor", self.predictor, (*BY_LAYER, *PREDICTORS))
        own = PREDICTOR if self.predictor is None or self.predictor in BY_LAYER else self.predictor
        check_predictor(own, self.predictor_window, self.predictor_epsilon)
        _require(
            self.cache_rank in (None, "stream", "host") or self.predictor is None or self.predictor not in BY_LAYER,
            f"predictor={self.predictor!r} chooses within a step, which cache_rank={self.cache_rank!r} cannot: leave "
            f"predictor out, which takes {PREDICTOR!r} there, or leave cache_rank out",
        )
        _not_negative("start_length", self.start_length)
        _require(
            self.cache_rank in (None, "stream", "host") or _is_device(self.cache_rank),
            f"cache_rank must be 'stream', 'host', a device such as 'cuda:1' or None, got {self.cache_rank!r}",
        )
        _require(
            self.cache_rank in (None, "stream", "host") or self.dense_below in ("auto", None, 0),
            f"with cache_rank={self.cache_rank!r} blocks lie on that device, so attending to all of them is never as "
            f"quick: leave dense_below={self.dense_below!r} out (start_length says from where on to select)",
        )
        _flag("strict", self.strict)
        _positive("layers_per_pack", self.layers_per_pack)
        _check_labels(self)
        _check_tail(self)

    @property
    def prediction(self) -> str | Predict:
        """What :attr:`predictor` stands for."""
        if self.predictor is not None:
            return self.predictor
        return "layer" if self.cache_rank in (None, "stream", "host") else PREDICTOR

    @property
    def by_layer(self) -> bool:
        """Queries are expected within a step, or not at all: nothing of earlier steps is needed."""
        return isinstance(self.prediction, str) and self.prediction in BY_LAYER


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where full blocks live when a cache is offloaded.

    Args:
        pin_memory: page-lock the host blocks, so that the GPU can read them in place. ``None`` means yes where
            there is a GPU, and one warning if it fails; ``True`` makes that an error; ``False`` does not try. Without
            it every step copies the selected tokens through the CPU.
        max_host_bytes: refuse to grow beyond this many bytes of host memory over all layers. ``None`` means 80 %
            of the machine's (or container's) memory.
        device_pool: device memory for copies of chosen tokens or blocks: bytes (int), or a share of what is free when
            decoding begins (float, below 1). ``None`` means eight times the tokens or four times the blocks that one
            step chooses, at most half of what is free. 0 means none: each step reads what it chooses in host memory.
            Any size gives the same tokens.
        keep_dense: blocks of the first, dense layers stay on the device: a step reads all of them, which takes long
            over the link. False: they go to host memory as well.
        kv_dtype: of keys and values in host memory. ``"int8"``: symmetric codes of 8 bits, with a scale for the key and
            one for the value of each token and KV head, which stay on the device (4 bytes); they become the model's
            dtype again where they are read. Half the bytes in host memory and over the link of 16-bit KV; an entry's
            error is at most 1/254 of the largest one beside it. Not for latents (MLA). ``None``: as they are.
    """

    pin_memory: bool | None = None
    max_host_bytes: int | None = None
    device_pool: int | float | None = None
    keep_dense: bool = True
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        _require(
            self.kv_dtype in (None, "int8"),
            f"kv_dtype must be 'int8', or None for the model's own dtype, got {self.kv_dtype!r} (float8 is not there: "
            "as many bits, and a larger error)",
        )
        _flag_or_none("pin_memory", self.pin_memory)
        if self.max_host_bytes is not None:
            _positive("max_host_bytes", self.max_host_bytes)
        _flag("keep_dense", self.keep_dense)
        pool = self.device_pool
        _require(
            pool is None or (_is_int(pool) and pool >= 0) or (isinstance(pool, float) and 0 < pool < 1),
            f"device_pool must be bytes (an integer), a share of free memory (between 0 and 1) or None, got {pool!r}",
        )


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """``config`` with other values of some options.

    Raises:
        TypeError: it has no such option.
        ValueError: the values do not fit it.
    """
    for name in changes:
        if name in OffloadConfig.__dataclass_fields__:
            raise TypeError(
                f"{name} is an option of OffloadConfig: give offload=OffloadConfig({name}={changes[name]!r})"
            )
    return replace(config, **changes) if changes else config
