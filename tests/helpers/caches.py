"""The table of caches that the generic tests run over: a new method is in it without a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    ProgressiveCache,
    ProgressiveConfig,
    SparseCache,
    TokenConfig,
)
from hf_sparsekv.policies.registry import Method, methods

# Small enough that blocks are sealed and channels fixed within some sixty tokens; sparse on any device.
SMALL = {
    "block_size": 16,
    "window": 16,
    "max_draft": 4,
    "dense_layers": 0,
    "calibration_tokens": 32,
    "dense_below": None,
}

FULL = {"token_budget": 4096}  # more than any test caches: the output must be the dense output
TIGHT = {"token_budget": 32, "num_blocks": 4}
TAIL = {"tail": "mean", "tail_tokens": 32}  # of two blocks


def two_level(offload: bool | OffloadConfig = True, model_config=None, **changes) -> OffloadedSparseCache:
    """A two-level cache with test-sized settings; blocks by their bounds, and with ``lag`` if they are offloaded."""
    usual = {"level": "two_level", "lag": bool(offload), "tail": None}
    config = TokenConfig(**{**SMALL, **usual, **changes})
    if isinstance(offload, bool):
        offload = OffloadConfig() if offload else None
    return OffloadedSparseCache(config, offload=offload, model_config=model_config)


def _default(offload: bool | OffloadConfig, **settings) -> Callable[..., SparseCache]:
    """With the defaults of what chooses: tokens among all."""

    def make(model_config=None, **changes) -> SparseCache:
        changes.pop("num_blocks", None)
        return two_level(offload, model_config, **{"level": "auto", "lag": False, **settings, **changes})

    return make


def progressive(offload: bool | OffloadConfig = True, model_config=None, **changes) -> ProgressiveCache:
    """A progressive cache with test-sized settings; its share is low, because random models attend to everything.

    A ``token_budget`` of ``FULL`` is everything, another one that other caches get (``TIGHT``'s) nothing.
    """
    if changes.pop("token_budget", None) == FULL["token_budget"]:
        changes |= {"mass": 1.0, "most": None}
    changes.pop("num_blocks", None)
    changes["token_budget"] = changes.pop("most", None)
    if isinstance(offload, bool):
        offload = OffloadConfig() if offload else None
    config = ProgressiveConfig(**{**SMALL, "mass": 0.6, "min_tokens": 8, "tail": None, **changes})
    return ProgressiveCache(config, offload=offload, model_config=model_config)


def by_need(offload: bool | OffloadConfig, **settings) -> Callable[..., SparseCache]:
    """Caches of the default method that choose by ``mass``, low because random models attend to everything."""

    def make(model_config=None, **changes) -> SparseCache:
        changes = {**settings, **changes}
        if changes.pop("token_budget", None) == FULL["token_budget"]:
            changes["mass"] = 1.0
        changes.pop("num_blocks", None)
        return two_level(offload, model_config, **{"level": "auto", "lag": False, "mass": 0.6, **changes})

    return make


def predictive(offload: bool | OffloadConfig = False, model_config=None, **changes) -> AsyncPredictiveCache:
    """A predictive cache with test-sized settings."""
    changes.pop("num_blocks", None)
    if isinstance(offload, bool):
        offload = OffloadConfig() if offload else None
    config = PredictiveConfig(**{**SMALL, "tail": None, **changes})
    return AsyncPredictiveCache(config, offload=offload, model_config=model_config)


def _made_by(make: Callable[..., SparseCache], offload: bool | OffloadConfig, **settings) -> Callable[..., SparseCache]:
    """The cache of ``make`` with these settings, unless others are given."""
    return lambda model_config=None, **changes: make(offload, model_config, **{**settings, **changes})


_two_level, _progressive, _predictive = (partial(_made_by, make) for make in (two_level, progressive, predictive))


def predicted_need(offload: bool | OffloadConfig, **settings) -> Callable[..., SparseCache]:
    """As :func:`by_need`, for expected queries."""

    def make(model_config=None, **changes) -> SparseCache:
        changes = {**settings, **changes}
        if changes.pop("token_budget", None) == FULL["token_budget"]:
            changes["mass"] = 1.0
        return predictive(offload, model_config, **{"mass": 0.6, **changes})

    return make


def generic(method: Method, offload: OffloadConfig | None = None) -> Callable[..., SparseCache]:
    """Caches of a method with test-sized settings, of which it takes those that it has.

    ``FULL`` turns the method's knob to everything.
    """

    def make(model_config=None, **changes) -> SparseCache:
        if changes.get("token_budget") == FULL["token_budget"]:
            changes[method.knob.name] = type(method.knob.least)(method.knob.most)
        settings = {name: v for name, v in {**SMALL, **changes}.items() if name in method.config.__dataclass_fields__}
        return SparseCache(method.config(**settings), offload, model_config)

    return make


# name -> make(model_config=None, **config changes)
CACHES: dict[str, Callable[..., SparseCache]] = {
    "host": _two_level(True),
    "device": _two_level(False),
    "host-default": _default(True),
    "device-default": _default(False),
    "host-default-nopool": _default(OffloadConfig(device_pool=0)),
    "host-default-smallpool": _default(OffloadConfig(device_pool=50_000)),
    "host-nopool": _two_level(OffloadConfig(device_pool=0)),
    "host-smallpool": _two_level(OffloadConfig(device_pool=50_000)),  # less than what several rows choose in a step
    "host-nolag": _two_level(True, lag=False),
    "device-lag": _two_level(False, lag=True),
    "device-block": _two_level(False, level="block"),
    "host-block": _two_level(True, level="block"),
    "device-token": _two_level(False, level="token"),
    "host-token": _two_level(True, level="token"),
    "device-mean": _two_level(False, token_reduce="mean"),
    "host-blocks32": _two_level(True, block_size=32, sinks=0),
    "device-dense1": _two_level(False, dense_layers=1),
    "device-tail": _default(False, **TAIL),
    "host-tail": _default(True, **TAIL),
    "host-lag-tail": _two_level(True, tail="mean", tail_tokens=16),
    "need": by_need(False),
    "need-host-tail": by_need(True, **TAIL),
    "progressive": _progressive(False),
    "progressive-host": _progressive(True),
    "progressive-host-nopool": _progressive(OffloadConfig(device_pool=0)),
    "progressive-host-smallpool": _progressive(OffloadConfig(device_pool=30_000)),
    "progressive-low": _progressive(False, mass=0.4, group_reduce="sum", min_tokens=0),
    "progressive-dense1": _progressive(True, dense_layers=1),
    "progressive-capped": _progressive(True, most=37, mass=0.9),
    "progressive-tail": _progressive(False, **TAIL),
    "progressive-host-tail": _progressive(True, **TAIL),
    "predictive": _predictive(False),
    "predictive-host": _predictive(True),
    "predictive-host-nopool": _predictive(OffloadConfig(device_pool=0)),
    "predictive-tail": _predictive(False, **TAIL),
    "predictive-host-tail": _predictive(True, predictor="assembled", **TAIL),
    "predictive-need": predicted_need(False),
    "predictive-need-host-tail": predicted_need(True, **TAIL),
    "predictive-earlier": _predictive(False, predictor="assembled", **TAIL),
    "predictive-earlier-host": _predictive(True, predictor="assembled"),
    "predictive-mean": _predictive(False, token_reduce="mean", sinks=0),
    "predictive-late": _predictive(False, start_length=90),
    "predictive-second": _predictive(False, cache_rank="cpu"),
    "predictive-host-dense1": _predictive(True, dense_layers=1, block_size=32),
}

# Methods that have no entry above, on the device and in host memory.
for _name, _method in methods().items():
    if _name not in ("token", "progressive", "predictive"):
        CACHES[_name] = generic(_method)
        CACHES[f"{_name}-host"] = generic(_method, OffloadConfig())

# Host memory holds codes: not the tokens of full attention, but all else that caches do.
INT8 = OffloadConfig(kv_dtype="int8")
CODED: dict[str, Callable[..., SparseCache]] = {
    "host-int8": _two_level(INT8),
    "host-int8-nopool": _two_level(OffloadConfig(kv_dtype="int8", device_pool=0)),
    "host-default-int8": _default(INT8),
    "host-default-int8-nopool": _default(OffloadConfig(kv_dtype="int8", device_pool=0)),
    "host-default-int8-smallpool": _default(OffloadConfig(kv_dtype="int8", device_pool=50_000)),
    "host-tail-int8": _default(INT8, **TAIL),
    "host-dense1-int8": _default(OffloadConfig(kv_dtype="int8", keep_dense=False), dense_layers=1),
    "host-kept1-int8": _default(INT8, dense_layers=1),
    "progressive-host-int8": _progressive(INT8),
    "progressive-tail-int8": _progressive(INT8, **TAIL),
    "predictive-host-int8": _predictive(INT8),
    "streaming-host-int8": generic(methods()["streaming"], INT8),
}
ALL = CACHES | CODED

# One of a kind: `make test` runs tests over all caches with these alone where they are marked ``few``.
TELLING = (
    *("host", "device-block", "host-nolag", "host-default", "device-default", "host-default-smallpool"),
    *("host-default-nopool", "need-host-tail", "progressive-host", "predictive-host", "predictive-earlier-host"),
    *("predictive-late", "predictive-second", "streaming-host", "host-default-int8", "progressive-tail-int8"),
)

# One of each method and way to choose: enough where other tests show what each of the caches above does.
ONE_EACH = (
    *("host", "device-block", "host-default-smallpool", "need-host-tail", "progressive-host"),
    *("predictive-earlier-host", "predictive-second", "streaming-host", "progressive-tail-int8"),
)

LATE = ("predictive-late",)  # choose nothing before some ninety tokens
HOST_RANK = ("predictive-second",)  # chosen on the host for a model on a GPU: such steps are not captured
UNSAVED = ("predictive-second",)  # cannot be saved yet


def full_block_kv(store) -> Tensor:
    """Full blocks of a layer, ``[full_blocks, batch, H, block_size, Dk + Dv]``; of rows that have fewer, anything."""
    return store.read(0, store.full_blocks).permute(2, 0, 1, 3, 4)
