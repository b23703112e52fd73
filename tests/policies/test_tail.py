"""Means stand for tokens that are not chosen: the mean key and value of each span of tokens."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from caches import CACHES, TAIL, TIGHT, full_block_kv, predictive, progressive, two_level
from models import REFERENCE, build, model, prompt
from transformers import DynamicCache

from hf_sparsekv import SparseCache, TokenConfig

WAYS = (
    *("device-tail", "host-tail", "host-lag-tail", "predictive-tail", "predictive-host-tail"),
    *("progressive-tail", "progressive-host-tail"),
)


def forced(net, cache, inputs, ids):
    """Logits of decode steps that are given their tokens, ``[batch, steps, vocab]``."""
    mask, found = inputs["attention_mask"], []
    with torch.no_grad():
        net(**inputs, past_key_values=cache)
        for token in ids.split(1, dim=1):
            mask = torch.cat((mask, torch.ones_like(token)), dim=1)
            found.append(net(token, attention_mask=mask, past_key_values=cache).logits[:, -1])
    return torch.stack(found, 1)


@torch.no_grad()
def go_on(cache, batch, length=1, seed=0):
    """More tokens, none of them padding."""
    ids = prompt(batch, length, seed=seed)["input_ids"]
    mask = torch.cat((cache.sparse_layers[0].store.held.valid_columns("cpu").long(), torch.ones_like(ids)), dim=1)
    model("llama")(ids, attention_mask=mask, past_key_values=cache)


def check_means(cache) -> int:
    """The last full block of each span has the mean of the span's selectable tokens. Returns the spans of all rows."""
    spans = 0
    for layer in cache.sparse_layers:
        store = layer.store
        kv = full_block_kv(store).transpose(0, 1).float()  # [batch, blocks, H, block_size, D]
        size, dtype = store.mean_tokens // store.block_size, store.dtype
        for row, full_blocks in enumerate(store.held.sealed):
            for first in range(0, full_blocks, size):
                end = min(first + size, full_blocks)
                skip = min(max(store.sinks - first * store.block_size, 0), store.block_size)
                tokens = kv[row, first:end].transpose(0, 1).flatten(1, 2)[:, skip:]  # [H, tokens, D]
                found = store.pool.fields["means"][int(store.block_table[row, end - 1])]
                torch.testing.assert_close(found, tokens.mean(1).to(dtype), atol=1e-5, rtol=1e-5)
                spans += 1
    return spans


@pytest.mark.quick
@pytest.mark.pairwise(once=("name",))
@pytest.mark.parametrize("pads", [None, (0, 57, 20)])
@pytest.mark.parametrize("name", WAYS)
def test_means_follow_the_cache(name, pads):
    """Prompts in chunks, steps, beams, copies, crops deep and shallow."""
    cache = CACHES[name](**TIGHT)
    with torch.no_grad():
        model("llama")(**prompt(3, 75, pads), past_key_values=cache)
    full_blocks = [(75 - pad - 16 - 4) // 16 for pad in pads or (0, 0, 0)]
    assert check_means(cache) == 2 * sum(-(-max(n, 0) * 16 // cache.config.tail_tokens) for n in full_blocks)
    for seed, length in enumerate((41, *[1] * 20)):
        go_on(cache, 3, length, seed)
    check_means(cache)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    other = copy.deepcopy(cache)
    for each, kept in ((cache, 100), (other, 62)):
        each.crop(kept)
        check_means(each)
        for seed in range(34):  # to the end of a span and beyond
            go_on(each, 3, seed=seed + kept)
        check_means(each)
    check_means(cache)


@pytest.mark.parametrize("name", WAYS)
def test_saved(name, tmp_path):
    cache, net = CACHES[name](**TIGHT), model("llama")
    with torch.no_grad():
        net(**prompt(2, 130, (0, 30)), past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = type(cache).load(tmp_path / "cache", model_config=net.config)
    check_means(loaded)
    for seed in range(18):
        go_on(loaded, 2, seed=seed)
    full_blocks = loaded.sparse_layers[0].store.held.sealed
    assert full_blocks == ((148 - 20) // 16, (118 - 20) // 16)
    assert check_means(loaded) == 2 * sum(-(-n * 16 // cache.config.tail_tokens) for n in full_blocks)


@lru_cache
def mild(name, attn):
    """Queries are short, so that attention is as broad as a trained model's."""
    net = build(name, attn)
    with torch.no_grad():
        for key, weight in net.named_parameters():
            if "q_proj.weight" in key or "q_b_proj.weight" in key:
                weight *= 0.15
            if key.endswith("sinks"):
                weight -= 5.0
    return net


@pytest.mark.pairwise(once=("text", "name"))
@pytest.mark.parametrize("text", ["llama", "gemma2", "gpt-oss", "deepseek-v3"])
@pytest.mark.parametrize("name", WAYS)
def test_nearer_to_full_attention(name, text):
    """Softcaps, learned sinks and latents among them."""
    inputs, ids = prompt(2, 200, (0, 30)), prompt(2, 20, seed=1)["input_ids"]
    plain = mild(text, REFERENCE.get(text, "sdpa"))
    full = forced(plain, DynamicCache(config=plain.config), inputs, ids).log_softmax(-1)
    away = []
    for tail in ("mean", None):
        cache = CACHES[name](**{**TIGHT, "tail": tail, "label_channels": 4})  # of more, less is left to means
        found = forced(mild(text, "sparsekv"), cache, inputs, ids).log_softmax(-1)
        away.append(float((full.exp() * (full - found)).sum(-1).mean()))
    progress = name.startswith("progressive")  # what means stand for is little: most of the mass is chosen
    assert away[0] < (0.95 if progress else 0.75) * away[1]


@pytest.mark.quick
@pytest.mark.parametrize("pads", [None, (0, 30)])
def test_the_same_wherever_tokens_are(pads):
    """Ids of device pages, of blocks in host memory and of copies kept together leave the same tokens to the means."""
    inputs, ids = prompt(2, 200, pads), prompt(2, 20, seed=1)["input_ids"]
    settings = {**TIGHT, **TAIL}
    pairs = (
        [two_level(offload, level="token", **settings) for offload in (False, True)],
        [two_level(offload, lag=True, **settings) for offload in (False, True)],
        [predictive(offload, **settings) for offload in (False, True)],
        [predictive(offload, predictor="assembled", **settings) for offload in (False, True)],
        [progressive(offload, **settings) for offload in (False, True)],
    )
    for device, host in pairs:
        want, found = (forced(model("llama"), cache, inputs, ids) for cache in (device, host))
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
        assert host.stats().host_to_device_bytes > 0


@pytest.mark.parametrize("name", WAYS)
def test_counted_as_index(name):
    """One mean for each span and step is read; nothing more is attended to."""
    inputs, ids = prompt(2, 200), prompt(2, 6, seed=1)["input_ids"]
    with_tail, without = CACHES[name](**TIGHT), CACHES[name](**TIGHT, tail=None)
    for cache in (with_tail, without):
        forced(model("llama"), cache, inputs, ids)
    mine, theirs = with_tail.stats(), without.stats()
    apart = 0.01 if name.startswith("progressive") else 0  # what later layers need depends on the means of earlier ones
    assert mine.attended_tokens == pytest.approx(theirs.attended_tokens, rel=apart, abs=0)
    assert mine.blocks_chosen == theirs.blocks_chosen
    store = with_tail.sparse_layers[0].store
    spans = -(-store.full_blocks * 16 // with_tail.config.tail_tokens)
    calls = 2 * 6 * store.batch * store.heads  # layers, steps
    assert mine.index_bytes_read - theirs.index_bytes_read == calls * spans * store.token_bytes


def test_not_where_whole_blocks_are_attended_to():
    cache = two_level(False, level="block", **{**TIGHT, **TAIL})
    forced(model("llama"), cache, prompt(1, 150), prompt(1, 3, seed=1)["input_ids"])
    assert all(layer.store.mean_tokens == 0 for layer in cache.sparse_layers)


@pytest.mark.parametrize("tokens", [0, 100, 64 * 33])
def test_spans_are_whole_blocks(tokens):
    with pytest.raises(ValueError, match="tail_tokens"):
        SparseCache(TokenConfig(tail="mean", tail_tokens=tokens))
