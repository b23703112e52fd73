"""A program that uses every public name, for a type checker (`make types`): what a user's own program would be told.

It is checked, and never run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import assert_type

import hf_sparsekv
from hf_sparsekv import (
    AsyncPredictiveCache,
    BlockMap,
    CacheStats,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    PrefixCache,
    ProgressiveCache,
    ProgressiveConfig,
    QueryTap,
    SparseCache,
    SparseConfig,
    StepMonitor,
    StepReport,
    StreamingConfig,
    TokenConfig,
    WalkStats,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decode(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with hf_sparsekv.sparse(model, "accurate", offload=True, optimize=False, token_budget=512) as inner:
        assert_type(inner, torch.nn.Module)
    with hf_sparsekv.sparse(model, TokenConfig.preset("fast", sinks=8)):
        pass
    assert_type(hf_sparsekv.enable(model, "fast", offload=True, token_budget=512), torch.nn.Module)
    assert_type(hf_sparsekv.disable(model), torch.nn.Module)
    generated = hf_sparsekv.generate(model, ids, generation_config=model.generation_config, sparse_config="fast")
    assert_type(generated, Any)
    assert_type(hf_sparsekv.optimize(model, fused=False), torch.nn.Module)
    assert_type(hf_sparsekv.unoptimize(model), torch.nn.Module)
    assert_type(hf_sparsekv.absorb_mla(model), list[torch.nn.Module])
    hf_sparsekv.restore_mla(model)
    tap = hf_sparsekv.predict_ahead(model)
    assert_type(tap, QueryTap)
    tap.remove()
    print(hf_sparsekv.__version__.upper())
    return ids


def configurations() -> list[SparseConfig]:
    assert_type(TokenConfig.preset("fast"), TokenConfig)
    assert_type(ProgressiveConfig(mass=0.98).mass, float)
    assert_type(StreamingConfig(window=512).window, int)
    assert_type(SparseConfig().max_length, int | None)
    assert_type(OffloadConfig(device_pool=0.25).keep_dense, bool)
    return [TokenConfig(token_budget=512, lag=True), PredictiveConfig(predictor="layer"), StreamingConfig()]


def caches(model: PreTrainedModel, path: Path) -> list[SparseCache]:
    made = [
        SparseCache(StreamingConfig(), offload=OffloadConfig(), model_config=model.config),
        OffloadedSparseCache(TokenConfig(), offload=None, token_budget=512),
        ProgressiveCache(ProgressiveConfig(mass=0.9), model_config=None),
        AsyncPredictiveCache(token_budget=512),
        PrefixCache(max_length=4096),
    ]
    prefix = PrefixCache()
    assert_type(prefix.start(made[0]), SparseCache)
    for cache in made:
        cache.save(path)
        cache.reset()
        cache.crop(3)
        assert_type(cache.get_max_length(), int)
    assert_type(SparseCache.load(path, config=TokenConfig(), offload=None, device="cpu"), SparseCache)
    return made


def watched(cache: SparseCache) -> str:
    stats = cache.stats()
    assert_type(stats, CacheStats)
    assert_type(stats.hit_rate, float | None)
    assert_type(stats.since(stats), CacheStats)
    assert_type(stats.walks, tuple[WalkStats, ...])
    cache.watch_blocks()
    blocks = cache.chosen_blocks()
    assert_type(blocks, BlockMap | None)

    def show(report: StepReport) -> None:
        assert_type(report.seconds, float)
        assert_type(report.stats, CacheStats | None)

    on_step: Callable[[StepReport], None] = show
    monitor = StepMonitor(cache, on_step, every=8, interval=0.2, blocks=True)
    monitor.start()
    return str(monitor.summary())
