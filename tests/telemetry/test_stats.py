"""The counters against counts that the test makes itself, and sizes against sums over tensors."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from caches import FULL, TIGHT, two_level
from models import model, prompt

from hf_sparsekv import OffloadConfig, OffloadedSparseCache

BLOCK, WINDOW, DRAFT, SINKS = 16, 16, 4, 4
LAYERS, HEADS, DIM = 2, 2, 16
TOKEN = 2 * DIM * 4  # bytes of one token's key and value, one KV head, float32
BUDGET, KEEP = TIGHT["token_budget"], TIGHT["num_blocks"]


@torch.no_grad()
def run(cache, length, steps, pads=None, batch=1):
    """A prefill and ``steps`` decode steps; the mask of all columns."""
    inputs = prompt(batch, length, pads)
    mask = inputs["attention_mask"]
    model("llama")(inputs["input_ids"], attention_mask=mask, past_key_values=cache)
    tokens = prompt(batch, steps, seed=1)["input_ids"]
    for i in range(steps):
        token = tokens[:, i : i + 1]
        mask = torch.cat((mask, torch.ones_like(token)), dim=1)
        model("llama")(token, attention_mask=mask, past_key_values=cache)
    return mask.bool()


def sealed_at(tokens):
    """Full blocks of a row once it holds so many tokens; a step attends before it seals."""
    return max(0, (tokens - WINDOW - DRAFT) // BLOCK)


def expected(mask, prompt_length):
    """Counts that the decode steps after a prompt of ``prompt_length`` columns must have, from the mask alone."""
    count = {"context": 0, "attended": 0, "stored": 0}  # stored: attended to in blocks
    for columns in range(prompt_length + 1, mask.shape[1] + 1):
        for tokens in mask[:, :columns].sum(1).tolist():
            edge = sealed_at(tokens - 1) * BLOCK
            sinks = min(SINKS, edge)
            taken = min(BUDGET, edge - sinks)
            count["context"] += tokens * HEADS * LAYERS
            count["attended"] += (tokens - edge + sinks + taken) * HEADS * LAYERS
            count["stored"] += taken * HEADS * LAYERS
    return count


@pytest.mark.pairwise
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("pads", [None, (0, 37)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("level", ["two_level", "token"])
def test_tokens_and_bytes(level, pads, offload):
    cache = two_level(offload, level=level, **TIGHT)
    mask = run(cache, 130, 40, pads, batch=2 if pads else 1)
    stats, count = cache.stats(), expected(mask, 130)
    assert stats.layers == LAYERS
    assert stats.cached_tokens == 170
    assert stats.decode_steps == 40
    assert stats.sparse_calls == 40 * LAYERS
    assert stats.dense_calls == stats.exact_calls == stats.materialised == 0
    assert stats.context_tokens == count["context"]
    assert stats.attended_tokens == count["attended"] < count["context"]
    assert stats.attended_share == count["attended"] / count["context"]
    assert stats.kv_bytes_read == count["attended"] * TOKEN
    assert stats.kv_bytes_dense == count["context"] * TOKEN
    assert (stats.hit_rate is None) == (not offload)
    assert stats.covered_mass is None
    if not offload:
        assert stats.host_to_device_bytes == stats.device_to_host_bytes == stats.host_bytes == 0
        return
    # Sinks and recent tokens stay on the device; every token of a full block went to the host once.
    fetched = cache.device_pools.counters()
    in_place = sum(layer.store.counters.total_from_host for layer in cache.sparse_layers)
    if level == "token":  # chosen by the prompt's last query and in each step; what a step missed was read in place
        copies = [layer.policy.measured()[0] for layer in cache.sparse_layers]
        needed, copied = sum(c.needed for c in copies), sum(c.copied for c in copies)
        assert count["stored"] < needed and 0 < in_place < copied < needed
        assert stats.host_to_device_bytes == (in_place + copied) * TOKEN
        assert stats.hit_rate == 1 - copied / needed
    else:  # there is room for all that is chosen a step ahead: what is read has been fetched, once
        assert fetched["unserved"] == in_place == 0
        assert stats.host_to_device_bytes == fetched["fetched"] * BLOCK * TOKEN
        assert stats.hit_rate == fetched["found"] / fetched["needed"]
        assert fetched["found"] + fetched["fetched"] == fetched["needed"]
    sealed = sum(sealed_at(tokens) for tokens in mask.sum(1).tolist())
    assert stats.device_to_host_bytes == sealed * BLOCK * HEADS * LAYERS * TOKEN
    assert stats.host_bytes > 0


@pytest.mark.parametrize("lag", [True, False])
def test_blocks_and_index(lag):
    """Unpadded: every full block is scored, KEEP are kept, and the labels of those are read."""
    cache = two_level(lag=lag, **TIGHT)
    run(cache, 130, 40)
    stats = cache.stats()
    bounds = blocks = labels = 0
    label = DIM // 2 + 4  # all channels in four bits; scale and zero point in float16
    for columns in range(131, 171):
        full_blocks = sealed_at(columns if lag else columns - 1)  # with lag they are chosen when a step has sealed
        if full_blocks > KEEP:
            bounds += full_blocks * HEADS * LAYERS * 2 * DIM * 4
    for columns in range(131, 171):
        blocks += KEEP * HEADS * LAYERS * (sealed_at(columns - 1) > KEEP)
        labels += min(KEEP, sealed_at(columns - 1)) * BLOCK * HEADS * LAYERS * label
    assert stats.blocks_chosen == blocks
    assert stats.index_bytes_read == bounds + labels


def test_block_level():
    cache = two_level(False, level="block", **TIGHT)
    run(cache, 130, 40)
    stats = cache.stats()
    keep = BUDGET // BLOCK
    assert stats.blocks_chosen == 40 * keep * HEADS * LAYERS
    near = sum(c - sealed_at(c - 1) * BLOCK for c in range(131, 171))
    # Sinks are read beside the blocks: a chosen first block counts without its four.
    most = HEADS * LAYERS * (near + 40 * (SINKS + keep * BLOCK))
    assert most - 40 * SINKS * HEADS * LAYERS <= stats.attended_tokens <= most


def test_dense_steps():
    cache = two_level(**FULL)
    mask = run(cache, 130, 40, (0, 37), batch=2)
    stats = cache.stats()
    real = HEADS * LAYERS * sum(int(mask[:, :c].sum()) for c in range(131, 171))
    assert stats.dense_calls == 40 * LAYERS and stats.sparse_calls == 0
    assert stats.attended_tokens == stats.context_tokens == real
    sealed = sum(sealed_at(tokens - 1) for c in range(131, 171) for tokens in mask[:, :c].sum(1).tolist())
    assert stats.host_to_device_bytes == sealed * BLOCK * HEADS * LAYERS * TOKEN
    assert stats.attended_share == 1.0


def test_without_a_device_pool_every_token_is_read_in_host_memory():
    cache = OffloadedSparseCache(two_level(**TIGHT).config, OffloadConfig(device_pool=0))
    mask = run(cache, 130, 40)
    stats = cache.stats()
    assert stats.hit_rate is None
    assert stats.host_to_device_bytes == expected(mask, 130)["stored"] * TOKEN


def test_dense_first_layers():
    cache = two_level(dense_layers=1, **TIGHT)
    run(cache, 130, 40)
    stats = cache.stats()
    assert (stats.dense_calls, stats.sparse_calls, stats.decode_steps) == (40, 40, 40)


def test_several_queries_read_everything():
    """Everything that was cached before them; they themselves are on the device."""
    cache = two_level(**TIGHT)
    run(cache, 130, 0)
    before, fetched = cache.stats(), cache.device_pools.counters()["bytes"]
    with torch.no_grad():
        model("llama")(prompt(1, 7, seed=2)["input_ids"], past_key_values=cache)
    stats = cache.stats()
    assert stats.exact_calls - before.exact_calls == LAYERS
    assert stats.decode_steps == stats.attended_tokens == 0
    moved = stats.host_to_device_bytes - before.host_to_device_bytes - cache.device_pools.counters()["bytes"] + fetched
    assert moved == sealed_at(130) * BLOCK * HEADS * LAYERS * TOKEN


def test_rows_that_are_regrouped_stay_counted():
    cache = two_level(**TIGHT)
    run(cache, 130, 10, batch=2)
    before = cache.stats()
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    stats = cache.stats()
    assert stats.attended_tokens == before.attended_tokens > 0
    assert stats.kv_bytes_read == before.kv_bytes_read


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_memory_is_the_sum_over_tensors(offload):
    cache = two_level(offload, **TIGHT)
    run(cache, 300, 5, (0, 37), batch=2)
    table = cache.row_table.blocks.on[torch.device("cpu")]  # for all layers
    held = {"device": table.untyped_storage().nbytes(), "host": 0}
    for layer in cache.sparse_layers:
        store, pool = layer.store, layer.store.pool
        if offload:
            held["device"] += store.pages.table.untyped_storage().nbytes()
        tensors = [t for t in vars(store).values() if isinstance(t, torch.Tensor)]
        held["device"] += sum(t.untyped_storage().nbytes() for t in [*tensors, *pool.fields.values()])
        held["host" if offload else "device"] += pool.kv.untyped_storage().nbytes()
    if offload:
        (pool,) = cache.device_pools.pools.values()
        lists = [copies for copies, _ in pool._lists.values()]
        held["device"] += sum(t.nbytes for t in (pool.pages, pool.state.owner, pool.state.stamp, *lists))
    assert cache.memory_bytes() == held
    stats = cache.stats()
    assert {"device": stats.device_bytes, "host": stats.host_bytes} == held
    assert held["host" if offload else "device"] >= 2 * sealed_at(305) * BLOCK * HEADS * LAYERS * TOKEN


def test_host_memory_is_given_back():
    cache = two_level(**TIGHT)
    run(cache, 300, 5)
    budget = cache.budget
    assert budget.used == cache.memory_bytes()["host"]
    copied = copy.deepcopy(cache)
    assert budget.used == copied.memory_bytes()["host"]
    del cache, copied
    gc.collect()
    assert budget.used == 0


def test_summary_line():
    cache = two_level(**TIGHT)
    assert "no decode step yet" in str(cache.stats())
    run(cache, 130, 40)
    stats = cache.stats()
    line = str(stats)
    assert line.startswith("40 steps over 170 cached tokens: attended to ")
    assert f"{stats.attended_share:.1%}" in line
    assert "of it from host memory" in line and "\n" not in line
    cache.reset()
    assert cache.stats().decode_steps == cache.stats().index_bytes_read == 0


def test_padding_takes_no_blocks():
    """Of rows that are padded on the left the pools hold what they have, not what the longest has."""
    held = []
    for pads in (None, (0, 1500, 1900, 1900)):
        cache = two_level(True, **TIGHT)
        with torch.no_grad():
            model("llama")(**prompt(4, 2000, pads), past_key_values=cache)
        held.append(cache.memory_bytes()["host"])
    assert held[1] < 0.45 * held[0]
