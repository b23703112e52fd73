"""Sparse and dense steps on a CPU in turn."""

from __future__ import annotations

import time

from models import build

from benchmarks.studies import cpu_steps


def test_each_cache_takes_all_steps():
    model = build("llama", "sparsekv")
    made = cpu_steps.caches(model, 400, [64])
    found = cpu_steps.times(model, made, 2, time.perf_counter)
    assert {name: len(of) for name, of in found.items()} == {"dense": 2, "all": 2, "64": 2}
    assert all(cache.get_seq_length() == 400 + cpu_steps.WARM + 2 for cache, _ in made.values())
    assert [made[name][0].config.dense_below for name in ("all", "64")] == [1 << 30, None]
