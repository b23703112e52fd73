"""watch_blocks(), chosen_blocks(), CacheStats.since(): what a step did, and nothing if nobody asks."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from caches import CACHES, FULL, ONE_EACH, TIGHT, two_level
from captured import imitated, pair
from models import model, prompt

LENGTH = 150
SILENT = ("predictive-second",)  # what is chosen is known on another device


def step(ours, cache, token: int = 5) -> None:
    with torch.no_grad():
        ours(torch.tensor([[token]] * cache.sparse_layers[0].store.batch), past_key_values=cache)


def filled(ours, cache, batch: int = 1, pads=None, ends: tuple[int, ...] = (LENGTH,)):
    """A prompt in chunks that end there."""
    ids, mask = prompt(batch, ends[-1], pads).values()
    with torch.no_grad():
        for lo, hi in itertools.pairwise((0, *ends)):
            ours(ids[:, lo:hi], attention_mask=mask[:, :hi], past_key_values=cache)
    return cache


@pytest.mark.few(name=(*ONE_EACH, "predictive"))
@pytest.mark.parametrize("name", [name for name in CACHES if name not in SILENT])
def test_marks(name):
    """As many as the counters say, and captured steps make those of eager ones, also once the table has grown."""
    shares, (fast, runner) = [], imitated()
    for ours in (model("llama"), fast):
        # A table for 16 blocks, because the first chunk is short; the 17th becomes full at 292.
        cache = filled(ours, CACHES[name](**TIGHT), 2, (0, 30), (40, 286))
        dense = cache.config.dense_layers
        for i in range(12):
            if i == 2:
                cache.watch_blocks()
            before = cache.stats()
            step(ours, cache, 5 + i)
            if i < 2:
                continue
            done, seen = cache.stats().since(before), cache.chosen_blocks()
            assert (seen.length, seen.block_size) == (cache.get_seq_length(), cache.config.block_size)
            assert seen.layers == (0, 1) and seen.share.shape == (2, cache.sparse_layers[0].store.full_blocks)
            assert ((seen.share >= 0) & (seen.share <= 1)).all() and (seen.share[:dense] == 1).all()
            if done.blocks_chosen:  # a walk may need none; token-level selection counts no blocks
                assert seen.share[dense:].sum() * 2 * 2 == pytest.approx(done.blocks_chosen, abs=1e-3)  # rows x heads
            shares.append(seen.share)
    assert runner.replays > 6
    for one, other in zip(shares[:10], shares[10:], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", SILENT)
def test_a_method_that_does_not_say(name):
    ours, cache = model("llama"), CACHES[name](**TIGHT)
    cache.watch_blocks()
    filled(ours, cache)
    for _ in range(3):
        step(ours, cache)
    assert cache.chosen_blocks().share.isnan().all()


def test_who_watches_and_when():
    cache = filled(model("llama"), two_level(**TIGHT))
    with pytest.raises(RuntimeError, match="watch_blocks"):
        cache.chosen_blocks()
    assert all(layer.policy.watch is None for layer in cache.sparse_layers)
    cache.watch_blocks()
    assert cache.chosen_blocks().share.isnan().all(), "the prompt is no decode step"
    step(model("llama"), cache)
    assert not cache.chosen_blocks().share.isnan().any()
    cache.watch_blocks(False)
    assert all(layer.policy.watch is None for layer in cache.sparse_layers)
    dense = two_level(**FULL)
    dense.watch_blocks()
    assert dense.chosen_blocks() is None, "an empty cache has chosen nothing"
    step(model("llama"), filled(model("llama"), dense))
    assert (dense.chosen_blocks().share == 1).all()


@pytest.mark.parametrize("captured", [False, True])
def test_what_was_watched_before_a_reset_is_forgotten(captured):
    ours = imitated()[0] if captured else model("llama")
    cache = two_level(**TIGHT)
    cache.watch_blocks()
    for _ in range(2):
        filled(ours, cache)
        assert not (cache.chosen_blocks().share > 0).any()
        step(ours, cache)
        assert (cache.chosen_blocks().share > 0).any()
        cache.reset()


def test_a_copy_watches_for_itself():
    ours = model("llama")
    cache = two_level(**TIGHT)
    cache.watch_blocks()
    filled(ours, cache)
    step(ours, cache)
    before = cache.chosen_blocks().share.clone()
    other = copy.deepcopy(cache)
    for token in (9, 11, 13):
        step(ours, other, token)
    assert torch.equal(cache.chosen_blocks().share, before)
    assert not other.chosen_blocks().share.isnan().any()


def test_watching_captures_anew_and_stopping_returns_to_the_old_graph():
    ours, runner = imitated()
    cache = filled(ours, two_level(False, **TIGHT))
    for _ in range(3):
        step(ours, cache)
    once = runner.captures
    cache.watch_blocks()
    for _ in range(3):
        step(ours, cache)
    assert runner.captures > once
    twice = runner.captures
    cache.watch_blocks(False)
    for _ in range(3):
        step(ours, cache)
    assert runner.captures == twice


@pytest.mark.parametrize("name", ["host", "device", "progressive-host", "progressive-capped"])
def test_statistics_of_some_steps_add_up(name):
    ours, cache = model("llama"), CACHES[name](**TIGHT)
    filled(ours, cache)
    marks = [cache.stats()]
    for count in (1, 3, 5):
        for _ in range(count):
            step(ours, cache)
        marks.append(cache.stats())
    parts = [later.since(earlier) for earlier, later in itertools.pairwise(marks)]
    whole = marks[-1].since(marks[0])
    assert [part.decode_steps for part in parts] == [1, 3, 5]
    for field in ("attended_tokens", "kv_bytes_read", "blocks_chosen", "needed", "index_bytes_read"):
        assert sum(getattr(part, field) for part in parts) == getattr(whole, field), field
    assert whole.cached_tokens == LENGTH + 9
    if whole.needed:
        assert whole.hit_rate == whole.found / whole.needed
    if whole.walks:
        masses = [part.estimated_mass * sum(w.walks for w in part.walks) for part in parts]
        assert sum(masses) == pytest.approx(whole.estimated_mass * sum(w.walks for w in whole.walks))
        assert sum(sum(w.histogram) for part in parts for w in part.walks) == sum(w.walks for w in whole.walks)


def test_statistics_since_audits():
    ours, cache = model("llama"), CACHES["progressive"](audit_every=2)
    filled(ours, cache)
    for _ in range(4):
        step(ours, cache)
    before = cache.stats()
    step(ours, cache)
    step(ours, cache)
    found = cache.stats().since(before)
    assert sum(w.audits for w in found.walks) == 2 * 2  # one step of the two, layers x KV heads
    assert 0 < found.covered_mass <= 1


def test_statistics_of_another_cache_are_refused():
    ours, cache = model("llama"), two_level(**TIGHT)
    filled(ours, cache)
    earlier = cache.stats()
    step(ours, cache)
    with pytest.raises(ValueError, match="reset"):
        earlier.since(cache.stats())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["host", "device-block", "host-token", "progressive-host", "predictive", "streaming"])
def test_captured_steps_mark_what_eager_ones_do_on_a_gpu(name):
    shares = []
    for ours in pair("llama"):
        cache = CACHES[name](**TIGHT)
        cache.watch_blocks()
        with torch.no_grad():
            ours(prompt(1, LENGTH)["input_ids"].cuda(), past_key_values=cache)
            for i in range(40):
                ours(torch.tensor([[5 + i]], device="cuda"), past_key_values=cache)
                shares.append(cache.chosen_blocks().share)
    for one, other in zip(shares[:40], shares[40:], strict=True):
        torch.testing.assert_close(one, other)
