"""The table of caches that the generic tests run over; a new cache class joins by a line in ``CACHES``."""

from __future__ import annotations

from collections.abc import Callable

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, SparseCache, TwoLevelConfig

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


def two_level(offload: bool | OffloadConfig = True, model_config=None, **changes) -> OffloadedSparseCache:
    """A two-level cache with test-sized settings."""
    config = TwoLevelConfig(**{**SMALL, **changes})
    if isinstance(offload, bool):
        offload = OffloadConfig() if offload else None
    return OffloadedSparseCache(config, offload=offload, model_config=model_config)


def _two_level(offload: bool | OffloadConfig, **settings) -> Callable[..., SparseCache]:
    def make(model_config=None, **changes) -> SparseCache:
        return two_level(offload, model_config, **{**settings, **changes})

    return make


# name -> make(model_config=None, **config changes)
CACHES: dict[str, Callable[..., SparseCache]] = {
    "host": _two_level(True),
    "device": _two_level(False),
    "host-nopool": _two_level(OffloadConfig(device_pool=0)),
    "host-smallpool": _two_level(OffloadConfig(device_pool=50_000)),  # less than what several rows choose in a step
    "host-nolag": _two_level(True, lag=False),
    "device-lag": _two_level(False, lag=True),
    "device-block": _two_level(False, level="block"),
    "host-block": _two_level(True, level="block"),
    "device-token": _two_level(False, level="token"),
    "host-token": _two_level(True, level="token"),
    "host-labels16": _two_level(True, label_bits=16),
    "device-mean": _two_level(False, block_reduce="mean", token_reduce="mean", channel_importance="mean"),
    "host-blocks32": _two_level(True, block_size=32, sinks=0),
    "device-parts": _two_level(False, block_size=32, bound_tokens=8),
    "device-dense1": _two_level(False, dense_layers=1),
}
