"""Offloaded blocks on the device: the same tokens whatever happens to the frames."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from caches import TIGHT, two_level
from captured import Imitation
from models import build, model, prompt

from hf_sparsekv import OffloadConfig
from hf_sparsekv.offload.device_pool import DevicePool
from hf_sparsekv.offload.page_table import LayerPages

ALTERNATELY = [(("two_level", True), ("block", False)), (("two_level", False), ("block", True))]


def generate(net, cache, inputs, tokens: int = 40) -> torch.Tensor:
    return net.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=tokens)


def logits(cache, inputs, tokens: int = 40, seed: int = 4) -> torch.Tensor:
    """A prompt's given continuation, step by step."""
    net, found = model("llama"), []
    with torch.no_grad():
        net(**inputs, past_key_values=cache)
        for token in prompt(len(inputs["input_ids"]), tokens, seed=seed)["input_ids"].split(1, dim=1):
            found.append(net(token, past_key_values=cache).logits)
    return torch.cat(found, dim=1)


def now(cache) -> int:
    (pool,) = cache.device_pools.pools.values()
    return int(pool.state.now)


@pytest.mark.parametrize("batch", [1, 3])
def test_another_prompt_after_reset(batch):
    """As many rows as before, or others: the layers' storage is kept, or made anew."""
    cache, inputs = two_level(**TIGHT), prompt(batch, 150, seed=2)
    logits(cache, prompt(1, 130))
    cache.reset()
    found = logits(cache, inputs)
    fresh = two_level(**TIGHT)
    assert torch.equal(found, logits(fresh, inputs))
    assert cache.device_pools.counters() == fresh.device_pools.counters()
    assert now(cache) == now(fresh) > 40


def test_another_prompt_after_crop_to_nothing():
    """The same physical blocks hold other blocks, which no page table may take for the old ones."""
    cache, inputs = two_level(**TIGHT), prompt(1, 150, seed=2)
    logits(cache, prompt(1, 150))
    cache.crop(-cache.get_seq_length())
    assert torch.equal(logits(cache, inputs), logits(two_level(**TIGHT), inputs))


def test_slots_that_are_used_again_are_forgotten():
    """A copy decodes and is deleted; the original reuses its blocks, whose old contents may be in device pages."""
    cache, inputs = two_level(**TIGHT, max_length=200), prompt(1, 130)
    net = model("llama")
    with torch.no_grad():
        net(**inputs, past_key_values=cache)
        for seed in (3, 4):
            copied = copy.deepcopy(cache)
            more = prompt(1, 50, seed=seed)["input_ids"]
            expected = None
            for one in (copied, cache):
                found = [net(token, past_key_values=one).logits for token in more.split(1, dim=1)]
                expected = found if expected is None else expected
                assert all(torch.equal(a, b) for a, b in zip(found, expected))
            cache.crop(-50)
            del copied
    assert cache.sparse_layers[0].store.pool.capacity < 60


@pytest.mark.few
@pytest.mark.parametrize(
    ("pool", "level", "lag"),  # every pair
    [(pool, level, lag) for i, pool in enumerate((None, 0, 4_000, 50_000)) for level, lag in ALTERNATELY[i % 2]],
)
def test_any_pool_gives_the_same(pool, level, lag):
    inputs = prompt(3, 140, (0, 20, 60))
    settings = {**TIGHT, "token_budget": 64, "level": level, "lag": lag}
    cache = two_level(OffloadConfig(device_pool=pool), **settings)
    assert torch.equal(logits(cache, inputs), logits(two_level(False, **settings), inputs))
    counters = cache.device_pools.counters()
    if pool is None:  # what was not brought beforehand for the layer's own query is read in host memory
        assert counters["found"] > 0 and (counters["unserved"] == 0 or (not lag and cache.stats().foreseen_calls))
        assert counters["unserved"] < 0.2 * counters["needed"]
    elif pool:
        assert counters["unserved"] > 0


def test_captured_steps_of_a_copy_use_its_frames():
    """A copy's first step finds no block on the device; the steps after it are not captured in that state."""
    net = build("llama", "sparsekv")
    runner = Imitation(net)
    runner.install()
    cache, inputs = two_level(**TIGHT), prompt(1, 130)
    with torch.no_grad():
        net(**inputs, past_key_values=cache)
        copied = copy.deepcopy(cache)
        for token in prompt(1, 20, seed=4)["input_ids"].split(1, dim=1):
            assert torch.equal(
                net(token, past_key_values=copied).logits, net(token, past_key_values=cache).logits.clone()
            )
    in_place = [sum(layer.store.counters.total_from_host for layer in one.sparse_layers) for one in (cache, copied)]
    assert in_place[0] == 0
    assert 0 < in_place[1] <= 32 * 2 * 2, "the budget of one step in two layers of two heads"
    assert runner.replays == 40


def test_no_device_memory_for_frames(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(DevicePool, "sized", full)
    cache, inputs = two_level(**TIGHT), prompt(2, 140)
    with pytest.warns(UserWarning, match="no device memory for copies") as said:
        found = logits(cache, inputs)
    assert len([w for w in said if "no device memory" in str(w.message)]) == 1
    assert torch.equal(found, logits(two_level(False, lag=True, **TIGHT), inputs))
    assert cache.stats().hit_rate is None


def test_no_device_memory_for_a_page_table(monkeypatch):
    cache, inputs = two_level(**TIGHT), prompt(1, 140)
    made = LayerPages._new_table

    def full(self):
        monkeypatch.setattr(LayerPages, "_new_table", made)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LayerPages, "_new_table", full)
    with pytest.raises(torch.OutOfMemoryError):
        logits(cache, inputs)
    cache.reset()
    assert torch.equal(logits(cache, inputs), logits(two_level(**TIGHT), inputs))


def test_beams_and_generate_with_a_small_pool():
    net, inputs = model("llama"), prompt(2, 130, (0, 30))
    go = {"do_sample": False, "max_new_tokens": 30, "num_beams": 3}
    small, none = two_level(OffloadConfig(device_pool=20_000), **TIGHT), two_level(False, lag=True, **TIGHT)
    found = net.generate(**inputs, past_key_values=small, **go)
    assert torch.equal(found, net.generate(**inputs, past_key_values=none, **go))


@pytest.mark.parametrize("wrong", [-1, 1.0, 1.5, True, "8GB"])
def test_configuration(wrong):
    with pytest.raises(ValueError, match=r"device_pool must be an integer >= 0 \(bytes\), a number in \(0, 1\)"):
        OffloadConfig(device_pool=wrong)
    with pytest.raises(ValueError, match="keep_dense"):
        OffloadConfig(keep_dense=2)


def test_dense_layers_stay_on_the_device():
    for keep in (True, False):
        cache = two_level(OffloadConfig(keep_dense=keep), dense_layers=1, **TIGHT)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logits(cache, prompt(1, 130), tokens=5)
        assert [layer.store.pool.host is None for layer in cache.sparse_layers] == [keep, False]


@pytest.mark.few
@pytest.mark.parametrize("lag", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_working_set(rows, lag):
    """The union of the last selections, block by block, against what each step's attention was given."""
    cache, chosen = two_level(lag=lag, **TIGHT), []
    policies = [layer.policy for layer in cache.sparse_layers]
    net = model("llama")
    with torch.no_grad():
        net(**prompt(rows, 150), past_key_values=cache)
        assert (cache.stats().working_set_bytes is None) == (not lag)
        policies = [layer.policy for layer in cache.sparse_layers]
        originals = [policy.choose_blocks for policy in policies]
        for policy, original in zip(policies, originals):
            policy.choose_blocks = lambda *given, policy=policy, original=original, **named: (
                chosen.append((policy, found := original(*given, **named))) or found
            )
        for token in prompt(rows, 30, seed=4)["input_ids"].split(1, dim=1):
            net(token, past_key_values=cache)
    want = [0] * rows
    for layer in cache.sparse_layers:
        ids = [blocks for policy, blocks in chosen if policy is layer.policy][-12:]
        assert len(ids) == 12
        for row in range(rows):
            for head in range(layer.store.heads):
                union = {int(b) for blocks in ids for b in blocks[row, head] if b >= 0}
                want[row] += len(union) * layer.store.block_size * layer.store.token_bytes
    assert cache.stats().working_set_bytes == tuple(want)
    assert "working set" in str(cache.stats())
