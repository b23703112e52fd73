"""Keys and values in host memory as codes of 8 bits: what is computed is what it would be of the numbers that these
stand for, whatever a cache goes through, and these are near the ones that came.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from caches import CODED, INT8, SMALL, TIGHT, full_block_kv, two_level
from models import model, prompt
from saved_files import saved
from test_token_copies import feed, life

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, SparseCache, TokenConfig
from hf_sparsekv.kv.store import LayerStore
from hf_sparsekv.ops.storage.quantise.reference import dequantise, quantise

WITHOUT = OffloadConfig()
EXACT = 1 + 2**-10, 4e-6  # what float16 makes of a scale: relative, and where it is below the finest step
CENTRE = 2**-11  # what float16 makes of a centre, relative


def through_codes(kv: torch.Tensor, split: int) -> torch.Tensor:
    return dequantise(*quantise(kv, split), split, kv.dtype)


@contextlib.contextmanager
def rounded():
    """Inside, host memory has the model's dtype, and in it numbers that have been codes."""

    def round_after(method):
        def call(self, *args, **named):
            before = self.pool.kv.clone()
            method(self, *args, **named)
            if self.pool.host is not None:  # the new blocks: what codes stand for has other codes
                new = torch.ones(len(self.pool.kv), dtype=torch.bool)
                new[: len(before)] = (self.pool.kv[: len(before)] != before).flatten(1).any(1)
                self.pool.kv[new] = through_codes(self.pool.kv[new], self.split)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("extend", "seal_due"):
            patch.setattr(LayerStore, name, round_after(getattr(LayerStore, name)))
        yield


def plain(cache: SparseCache) -> SparseCache:
    """As this one, in the model's dtype."""
    return type(cache)(cache.config, dataclasses.replace(cache.offload_config, kv_dtype=None))


# ---------------------------------------------------------------------- what is attended


@pytest.mark.few(
    name=("host-int8-nopool", "host-default-int8", "host-dense1-int8", "progressive-tail-int8", "predictive-host-int8")
)
@pytest.mark.parametrize("name", CODED)
def test_a_life_of_codes_is_that_of_what_they_stand_for(name):
    """Prompts, pieces of them, steps, crops into full blocks, rows that change, copies, a reset: the very numbers."""
    cache = CODED[name](**TIGHT)
    with rounded():
        expected = life(plain(cache))
    found = life(cache)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert cache.stats().sparse_calls > 0
    assert all(
        (layer.store.pool.kv.dtype == torch.int8) == (i > 0 or "kept1" not in name)
        for i, layer in enumerate(cache.sparse_layers)
    )


@pytest.mark.parametrize("name", ["host-int8", "host-default-int8", "predictive-host-int8"])
def test_padding(name):
    inputs, go = prompt(3, 130, (0, 30, 7)), {"do_sample": False, "max_new_tokens": 30}
    cache = CODED[name](**TIGHT)
    with rounded():
        expected = model("llama").generate(**inputs, past_key_values=plain(cache), **go)
    assert torch.equal(model("llama").generate(**inputs, past_key_values=cache, **go), expected)


def come_and_go(cache) -> list[torch.Tensor]:
    """Logits of rows that join, wait, fork, move and leave."""
    rows, net, found = cache.rows(4, 400), model("llama"), []

    def join(n: int, seed: int) -> int:
        first = rows.prefill(net, prompt(1, n, seed=seed)["input_ids"], chunk=40)
        found.append(first.logits)
        return rows.join(first)

    def step(n: int) -> None:
        for seed in range(n):
            found.append(rows.step(net, prompt(1, rows.max_rows, seed=seed)["input_ids"][0])[list(rows.active)].clone())

    join(150, 1)
    step(4)
    join(90, 2)
    join(30, 3)
    step(22)  # over blocks that become full
    rows.hold(0)
    step(5)
    rows.leave(1)
    rows.resume(0)
    assert join(201, 4) == 1
    step(20)
    rows.leave(0)
    rows.move(2)
    step(5)
    rows.fork(0)
    step(5)
    return found


@pytest.mark.few(name=("host-int8", "progressive-host-int8"))
@pytest.mark.parametrize("name", ["host-default-int8-smallpool", "host-int8", "progressive-host-int8"])
def test_rows_that_come_and_go(name):
    cache = CODED[name](lag=False, **TIGHT) if name == "host-int8" else CODED[name](**TIGHT)
    with rounded():
        expected = come_and_go(plain(cache))
    for one, other in zip(come_and_go(cache), expected, strict=True):
        assert torch.equal(one, other)


def test_the_usual_dtype_is_as_it_was():
    """Without ``kv_dtype`` there are no scales, and nothing is rounded."""
    cache = two_level(WITHOUT, **TIGHT)
    feed(cache, 170, 0, together=True)
    for layer in cache.sparse_layers:
        assert layer.store.pool.kv.dtype == torch.float32 and "scales" not in layer.store.pool.fields


@pytest.mark.parametrize("size", [1.0, 300.0, 1e-3])
def test_errors_are_bounded(size):
    """Half a code: 1/254 of half the range of a key's channel in its block, or of the largest entry of the value."""
    kv = size * torch.randn(5, 3, 16, 100)
    kv[0, 0, 3, 7] *= 50  # an outlier makes its own channel coarser, and no other
    kv[0, 0, 5, 70] *= 50  # and its own value
    kv[..., 9] += 400 * min(size, 100.0)
    assert ((kv - through_codes(kv, 60)).abs() <= bounds(kv, 60)).all()


def bounds(kv: torch.Tensor, split: int) -> torch.Tensor:
    """The largest error of codes of ``kv``."""
    high, low = kv[..., :split].amax(-2, keepdim=True), kv[..., :split].amin(-2, keepdim=True)
    most = (high - low) / 2 + CENTRE * torch.maximum(high.abs(), low.abs())
    of_values = kv[..., split:].abs().amax(-1, keepdim=True)
    shape = (*kv.shape[:-1], split), (*kv.shape[:-1], kv.shape[-1] - split)
    most = torch.cat((most.expand(shape[0]), of_values.expand(shape[1])), -1)
    return most / 254 * EXACT[0] + EXACT[1]


def test_what_blocks_hold_is_near_what_came():
    """Prompts and steps; labels and means are those of the numbers that came."""
    caches = [
        two_level(offload, level="token", lag=False, tail="mean", tail_tokens=32, **TIGHT)
        for offload in (INT8, dataclasses.replace(INT8, kv_dtype=None))
    ]
    for cache in caches:
        feed(cache, 170, 0, together=True)
        for token in prompt(2, 40, seed=1)["input_ids"].split(1, 1):  # its queries and keys of layer 0 are the same
            model("llama")(token, past_key_values=cache)
    mine, theirs = (cache.sparse_layers[0].store for cache in caches)
    assert mine.full_blocks == theirs.full_blocks > 170 // 16
    codes, kv = full_block_kv(mine), full_block_kv(theirs)
    assert ((codes - kv).abs() <= bounds(kv, mine.split)).all()
    ids = [store.table.flatten().long() for store in (mine, theirs)]
    for name in ("codes", "qparams", "means"):
        assert torch.equal(mine.pool.fields[name][ids[0]], theirs.pool.fields[name][ids[1]])


def test_sinks_stay_exact_when_blocks_are_indexed_again():
    """Label channels are found in the second piece: blocks of the first are indexed of what their codes stand for."""
    cache = two_level(INT8, level="token", lag=False, calibration_tokens=100, **TIGHT)
    ids = prompt(1, 160)["input_ids"]
    with torch.no_grad():
        model("llama")(ids[:, :80], past_key_values=cache)
        layer = cache.sparse_layers[0]
        assert layer.policy.labels.calibrating and layer.store.full_blocks
        before = layer.store.recent_kv[:, :, : layer.store.sinks].clone()
        model("llama")(ids[:, 80:], past_key_values=cache)
    assert not layer.policy.labels.calibrating
    assert torch.equal(layer.store.recent_kv[:, :, : layer.store.sinks], before)


def test_a_prompt_that_begins_with_blocks_of_another_row():
    """Sinks of such a row are what its blocks hold."""
    config = TokenConfig(**{**SMALL, "token_budget": 32})
    made = lambda: OffloadedSparseCache(config, INT8)  # noqa: E731
    rows, net, ids = made().rows(2, 400), model("llama"), prompt(1, 250, seed=1)["input_ids"]
    donor = rows.join(rows.prefill(net, ids[:, :200], chunk=40))
    cache = rows.begin(rows.blocks(donor)[:9], rows.channels(donor))
    layer = cache.sparse_layers[1].store
    held = full_block_kv(layer)[0, 0]  # [H, block_size, Dk + Dv]
    assert torch.equal(layer.recent_kv[0, :, : layer.sinks], held[:, : layer.sinks])
    with torch.no_grad():
        own = made()
        expected = net(ids, past_key_values=own).logits[0, -1]
        found = net(ids[:, 144:], past_key_values=cache).logits[0, -1]
    assert (found - expected).abs().max() < 0.2  # the spread of logits is about 10


# ---------------------------------------------------------------------- bytes


def test_a_quarter_of_the_bytes_of_float32():
    """In host memory and over the link; the scales are on the device."""
    caches = [two_level(offload, **TIGHT) for offload in (INT8, WITHOUT)]
    for cache in caches:
        feed(cache, 700, 0, together=True)
        feed(cache, 20, 1)
    mine, theirs = (cache.stats() for cache in caches)
    stores = [layer.store for layer in caches[0].sparse_layers]
    numbers = sum(store.pool.capacity * store.heads * (2 * store.split + 16) for store in stores)
    scales = sum(store.pool.fields["scales"].nbytes for store in stores)
    assert scales == 2 * numbers
    assert mine.host_bytes == theirs.host_bytes // 4
    assert mine.device_bytes == theirs.device_bytes + scales
    assert mine.device_to_host_bytes == theirs.device_to_host_bytes // 4
    assert 0 < mine.host_to_device_bytes < 0.3 * theirs.host_to_device_bytes


# ---------------------------------------------------------------------- files


def test_files_go_back_where_codes_are(tmp_path):
    """Into the same kind of host memory; the way to do that is told."""
    caches = {kv_dtype: two_level(OffloadConfig(kv_dtype=kv_dtype), **TIGHT) for kv_dtype in (None, "int8")}
    for kv_dtype, cache in caches.items():
        feed(cache, 170, 0, together=True)
        other = OffloadConfig(kv_dtype="int8" if kv_dtype is None else None)
        for offload in (other, None) if kv_dtype else (other,):
            with pytest.raises(ValueError, match=r"load it with the OffloadConfig\(kv_dtype"):
                saved(cache, tmp_path, offload=offload)
        copied = saved(cache, tmp_path, offload=cache.offload_config)
        assert all(torch.equal(*pair) for pair in zip(feed(copied, 6, 1), feed(cache, 6, 1)))


def test_files_are_smaller(tmp_path):
    sizes = []
    for offload in (INT8, WITHOUT):
        cache = two_level(offload, **TIGHT)
        feed(cache, 700, 0, together=True)
        cache.save(tmp_path / "file")
        sizes.append((tmp_path / "file").stat().st_size)
    assert sizes[0] < 0.5 * sizes[1]


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("wrong", ["fp8", "float8_e4m3fn", "int4", torch.int8, 8, True])
def test_other_dtypes_are_refused(wrong):
    with pytest.raises(ValueError, match="kv_dtype must be 'int8' or None"):
        OffloadConfig(kv_dtype=wrong)


def test_without_host_memory_there_is_nothing_to_say_it_of():
    with pytest.raises(TypeError, match="kv_dtype is an option of OffloadConfig"):
        SparseCache(TokenConfig(), None, kv_dtype="int8")


def test_latents_are_refused():
    """Before anything is cached."""
    cache = two_level(INT8, **TIGHT)
    with pytest.raises(ValueError, match="this model caches latents"):
        feed(cache, 60, 0, together=True, net=model("glm4-moe-lite"))
