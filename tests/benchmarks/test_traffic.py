"""Bytes that cross the link and pages that were found, as the benchmarks count them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from models import build

from benchmarks import baselines, traffic
from benchmarks.decoding import generate
from benchmarks.filling import ReplayedSource, fill_layers
from hf_sparsekv.policies.measured import PackStats

pytestmark = pytest.mark.slow

SMALL = {"token_budget": 32, "num_blocks": 4, "block_size": 16, "window": 16, "max_draft": 4, "dense_layers": 1}
CONTEXT = 440


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Selections that select within some hundred tokens."""
    changed = {
        name: dataclasses.replace(variant, settings={**SMALL, "calibration_tokens": 32, "lag": variant.settings["lag"]})
        for name, variant in baselines.VARIANTS.items()
        if "lag" in (variant.settings or {}) and name.startswith("two_level")
    }
    monkeypatch.setattr(baselines, "VARIANTS", {**baselines.VARIANTS, **changed})


def test_traffic_by_hand(monkeypatch):
    """Two pools and a layer with copies of tokens, one pair of looks."""

    class Pool:
        def __init__(self, nbytes):
            self.pages, self.counts = [SimpleNamespace(nbytes=nbytes)], {"needed": 10, "found": 4}

        def counters(self):
            return dict(self.counts)

    pools = {1: Pool(100), 2: Pool(1000), 3: None}
    now = SimpleNamespace(decode_steps=3, host_to_device_bytes=50, needed=20, found=8)
    copied = [PackStats(needed=0, copied=0, bytes=0)]
    layers = [SimpleNamespace(policy=SimpleNamespace(measured=of)) for of in (tuple, lambda: tuple(copied))]
    pools_of = SimpleNamespace(pools=pools, link_bytes=lambda pool: pool.pages[0].nbytes)
    cache = SimpleNamespace(device_pools=pools_of, sparse_layers=layers, stats=lambda: SimpleNamespace(**vars(now)))
    meter = traffic.Meter(cache)
    with pytest.raises(ValueError, match="no decode step"):
        meter.read()
    pools[1].counts, pools[2].counts = {"needed": 30, "found": 14}, {"needed": 20, "found": 14}
    now.decode_steps, now.host_to_device_bytes, now.needed, now.found = 7, 1050, 58, 36
    copied[0] = PackStats(needed=8, copied=0, bytes=0)
    assert meter.read() == traffic.Traffic(4, 28 / 38, 10 * 100 / 4, 1000 / 4)
    copied[0] = PackStats(needed=8, copied=3, bytes=60)
    assert meter.read().missed == (10 * 100 + 60) / 4
    meter.restart()
    now.decode_steps, now.host_to_device_bytes = 9, 1450
    assert meter.read() == traffic.Traffic(2, None, 200.0, 200.0), "nothing asked of the pools"


@pytest.mark.parametrize(("pool", "fetches"), [(None, True), (0, False)])
def test_traffic_of_a_cache(pool, fetches):
    """A pool that holds everything: what was missed is what crossed the link. Without one tokens are read in place."""
    model = build("llama", "sparsekv", num_hidden_layers=3, max_position_embeddings=4096)
    variant = baselines.find("two_level:lag", offload=True)
    cache = baselines.make_cache(model, variant, CONTEXT + 60, device_pool=pool)
    source = ReplayedSource(model, 1, CONTEXT, show=False)
    fill_layers(source, cache)
    after = source.replay(cache, source.made.queries(40))
    meter = traffic.Meter(cache)
    generate(model, cache, 1, 20, each=after)
    found = meter.read()
    assert found.steps == 20
    assert found.missed == found.host > 0
    assert (found.hit_rate is not None) == fetches
    if not fetches:
        layers, heads, token = 2, model.config.num_key_value_heads, 2 * 16 * 4
        assert found.host == pytest.approx(layers * heads * SMALL["token_budget"] * token, rel=0.1)


def test_step_reports_what_crossed_the_link(stepped):
    """``benchmarks step --offload``: the same figures, with a pool of a share of the KV."""
    command = f"--shapes 1x{CONTEXT} --variants two_level:lag --offload --kv replayed --tokens 12"
    model = build("llama", "sparsekv", num_hidden_layers=3, max_position_embeddings=4096)
    found = stepped(model, command) and stepped(model, f"{command} --device-pool 0.25kv")
    rows = {(row["variant"], row["metric"]): float(row["value"]) for row in found}
    usual, capped = "two_level:lag+offload:kv=replayed", "two_level:lag+offload:pool=0.25kv:kv=replayed"
    for metric in ("hit_rate", "missed_mb", "host_mb", "fill_s", "host_gb", "tpot_ms"):
        assert (usual, metric) in rows
    assert 0 < rows[capped, "hit_rate"] <= 1
    assert rows[capped, "missed_mb"] > 0
