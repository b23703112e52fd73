"""One cache over several calls: turns, prefix copies, regrouped rows, crop, reset."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from caches import FULL, TIGHT, two_level
from models import model, plain_text, prompt, reference
from transformers import DynamicCache

from hf_sparsekv.layers.kinds import ready_for_steps

SOME = [("llama", True), ("llama", False), ("gemma3", False), ("glm4-moe-lite", True)]  # models, blocks in host memory
ATOL = {"atol": 5e-4, "rtol": 1e-4}


class Pair:
    """The same forwards through our model and cache and through sdpa with transformers' own cache."""

    def __init__(self, offload: bool = True, name: str = "llama", **config) -> None:
        self.name = name
        self.ours, self.stock = two_level(offload, **{**FULL, **config}), DynamicCache(config=model(name).config)
        self.mask = None

    @torch.no_grad()
    def feed(self, ids, mask=None) -> None:
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = mask if self.mask is None else torch.cat((self.mask, mask), dim=1)
        common = {
            "attention_mask": self.mask,
            "position_ids": (self.mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :],
        }
        found = model(self.name)(ids, past_key_values=self.ours, **common).logits[:, -1]
        expected = reference(self.name)(ids, past_key_values=self.stock, **common).logits[:, -1]
        torch.testing.assert_close(found, expected, **ATOL)

    def steps(self, n: int, seed: int = 3) -> None:
        for token in prompt(self.mask.shape[0], n, seed=seed)["input_ids"].split(1, dim=1):
            self.feed(token)

    def crop(self, remove: int) -> None:
        self.ours.crop(-remove)
        self.stock.crop(-remove)
        self.mask = self.mask[:, : max(0, self.mask.shape[1] - remove)]
        assert self.ours.get_seq_length() == self.mask.shape[1]

    def copy(self) -> Pair:
        new = copy.copy(self)
        new.ours, new.stock = copy.deepcopy(self.ours), copy.deepcopy(self.stock)
        return new

    def each(self, change) -> None:
        change(self.ours)
        change(self.stock)


def padded(batch, length, pads=None, seed=0):
    return prompt(batch, length, pads, seed).values()


# ---------------------------------------------------------------------- turns


def second_turn(name, offload, first, second, **generate):
    """Two rounds of generate() on one cache each, the whole conversation as input."""
    generate = {"do_sample": False, "max_new_tokens": 30, **generate}
    texts = []
    for net, cache in (
        (model(name), two_level(offload, **FULL)),
        (reference(name), DynamicCache(config=reference(name).config)),
    ):
        out = net.generate(**first, past_key_values=cache, **generate)
        ids = torch.cat((out, second["input_ids"]), dim=1)
        answered = torch.ones_like(out[:, first["input_ids"].shape[1] :])
        mask = torch.cat((first["attention_mask"], answered, second["attention_mask"]), dim=1)
        texts.append(net.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **generate))
    assert torch.equal(*texts)


@pytest.mark.few(name=("llama", "gemma3", "deepseek-v3"), offload=(True, False))
@pytest.mark.quick
@pytest.mark.parametrize(("name", "offload"), [*SOME, ("deepseek-v3", False)])
def test_second_turn(name, offload):
    second_turn(name, offload, prompt(1, 80), prompt(1, 25, seed=1))


@pytest.mark.quick
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_padded_second_turn(offload):
    """The second turn's padding leaves holes in the middle of the rows."""
    second_turn("llama", offload, prompt(3, 80, (0, 11, 50)), prompt(3, 40, (33, 0, 5), seed=1))


def test_second_turn_continues_with_one_token():
    pair = Pair()
    pair.feed(*padded(2, 70, (0, 40)))
    pair.feed(*padded(2, 20, (9, 0), seed=1))
    pair.steps(60)
    pair.feed(*padded(2, 1, seed=2))
    pair.feed(*padded(2, 90, (0, 80), seed=2))
    pair.steps(5)


# ---------------------------------------------------------------------- copies


@pytest.mark.few(name=("gemma3", "glm4-moe-lite"))
@pytest.mark.quick
@pytest.mark.parametrize(("name", "offload"), SOME)
def test_prefix_caching(name, offload):
    """transformers' pattern: one prefilled prefix, a deep copy for every question."""
    prefix = prompt(1, 100)["input_ids"]
    cache = two_level(offload, **FULL)
    with torch.no_grad():
        model(name)(prefix, past_key_values=cache)
    length = cache.get_seq_length()
    for seed, question in enumerate((5, 30, 80)):
        ids = torch.cat((prefix, prompt(1, question, seed=seed + 1)["input_ids"]), dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = model(name).generate(**inputs, do_sample=False, max_new_tokens=30, past_key_values=copy.deepcopy(cache))
        assert torch.equal(found, plain_text(name, inputs, max_new_tokens=30))
        assert cache.get_seq_length() == length


@pytest.mark.few(name=("llama", "gemma3"))
@pytest.mark.parametrize(("name", "offload"), SOME)
def test_memory_is_free_at_once(name, offload):
    """No cycle keeps a dropped cache alive until the next garbage collection, whatever was done with it."""
    net = model(name)
    gc.collect()
    gc.disable()
    try:
        cache = two_level(offload, **TIGHT)
        net.generate(**prompt(2, 150), past_key_values=cache, max_new_tokens=20, do_sample=False, prefill_chunk_size=64)
        copied = copy.deepcopy(cache)
        ready_for_steps(copied)
        copied.stats()
        stores = [layer.store for layer in (*cache.sparse_layers, *copied.sparse_layers)]
        held = [weakref.ref(x) for x in (cache, copied, *stores, *(store.pool for store in stores))]
        if offload:
            held += [weakref.ref(pool) for each in (cache, copied) for pool in each.device_pools.pools.values()]
        del cache, copied, stores
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_layer_without_its_cache():
    cache = two_level()
    with torch.no_grad():
        model("llama")(prompt(1, 40)["input_ids"], past_key_values=cache)
    layer = cache.layers[0]
    del cache
    with pytest.raises(RuntimeError, match="does not exist any more"):
        copy.deepcopy(layer)


def test_a_copy_has_device_pages_of_its_own():
    """What it chooses must not evict what the original has chosen."""
    cache = two_level(True, **TIGHT)
    model("llama").generate(**prompt(2, 150), past_key_values=cache, max_new_tokens=4, do_sample=False)
    copied = copy.deepcopy(cache)
    model("llama").generate(**prompt(2, 160), past_key_values=copied, max_new_tokens=4, do_sample=False)
    ours, theirs = ({id(pool) for pool in each.device_pools.pools.values()} for each in (cache, copied))
    assert ours and theirs and not ours & theirs
    assert not {id(layer.store.pages.pool) for layer in copied.sparse_layers} & ours


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_copies_go_their_own_ways(offload):
    """Original and copies in turns, through growth, with one of them collected on the way."""
    first = Pair(offload)
    first.feed(*padded(2, 100, (0, 30)))
    second, third = first.copy(), first.copy()
    for seed in range(2):
        for pair in (first, second, third):
            pair.steps(17, seed=seed + id(pair) % 1000)
    held = weakref.ref(second.ours)
    del second, pair
    gc.collect()
    assert held() is None, "a copy is kept alive by something"
    first.steps(34)  # takes the physical blocks that only the collected copy named
    third.feed(*padded(2, 200, seed=8))
    fourth = first.copy()
    for pair in (third, first, fourth):
        pair.steps(17)
    first.each(lambda cache: cache.reorder_cache(torch.tensor([1, 1])))
    first.mask = first.mask[[1, 1]]
    first.steps(20)
    fourth.steps(20)
    third.crop(150)
    third.steps(5)
    fourth.steps(5)


def test_copy_is_cheap():
    """Full blocks are shared; only tails and tables are new."""
    cache = two_level(max_length=1000, **FULL)
    with torch.no_grad():
        model("llama")(prompt(1, 900)["input_ids"], past_key_values=cache)
    copied = copy.deepcopy(cache)
    for mine, theirs in zip(cache.sparse_layers, copied.sparse_layers):
        assert mine.store.pool is theirs.store.pool
        assert mine.store is not theirs.store
        assert theirs.owner is copied


def test_sparse_copy_gives_the_same():
    """Selection state is copied too: the original and its copy choose alike."""
    cache = two_level(**TIGHT)
    with torch.no_grad():
        model("llama")(**prompt(2, 130, (0, 30)), past_key_values=cache)
        copied = copy.deepcopy(cache)
        for token in prompt(2, 40, seed=4)["input_ids"].split(1, dim=1):
            one = model("llama")(token, past_key_values=cache).logits
            two = model("llama")(token, past_key_values=copied).logits
            assert torch.equal(one, two)
    # The copy begins with no block on the device, so it reads and fetches more.
    mine, theirs = cache.stats(), copied.stats()
    assert theirs.host_to_device_bytes > mine.host_to_device_bytes
    assert theirs.hit_rate < mine.hit_rate
    differ = {"hit_rate": None, "host_to_device_bytes": 0, "needed": 0, "found": 0}
    assert replace(mine, **differ) == replace(theirs, **differ)


# ---------------------------------------------------------------------- rows


@pytest.mark.few
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("length", [10, 110])
def test_repeat_and_select_rows(offload, length):
    pair = Pair(offload)
    pair.feed(*padded(2, length, (0, 7)))
    pair.each(lambda cache: cache.batch_repeat_interleave(3))
    pair.mask = pair.mask.repeat_interleave(3, 0)
    pair.steps(20)
    keep = torch.tensor([5, 0, 2, 2])
    pair.each(lambda cache: cache.batch_select_indices(keep))
    pair.mask = pair.mask[keep]
    pair.steps(20)
    pair.feed(*padded(4, 30, (0, 29, 3, 3), seed=5))
    chosen = torch.tensor([True, False, False, True])
    pair.each(lambda cache: cache.batch_select_indices(chosen))
    pair.mask = pair.mask[chosen]
    pair.steps(10)


# ---------------------------------------------------------------------- crop


@pytest.mark.few(remove=(1, 5, 33, 150, 1000))
@pytest.mark.parametrize(
    ("remove", "offload"),
    [
        (1, True),
        (4, False),
        (5, True),
        (5, False),
        (33, True),
        (77, False),
        (140, True),
        (149, False),
        (150, True),
        (1000, False),
    ],
)
def test_crop(remove, offload):
    pair = Pair(offload)
    pair.feed(*padded(2, 140, (0, 30)))
    pair.steps(10)
    pair.crop(remove)
    if remove < 150:
        pair.steps(3)
    else:  # to nothing
        pair.stock, pair.mask = DynamicCache(), None
    pair.feed(*padded(2, 60, (0, 8), seed=6))
    pair.steps(30)


# ---------------------------------------------------------------------- reset


@pytest.mark.few(name=("gemma3", "glm4-moe-lite"))
@pytest.mark.parametrize(("name", "offload"), SOME)
def test_reset_and_reuse(name, offload):
    cache = two_level(offload, **FULL)
    for batch, length, pads in ((1, 120, None), (1, 60, None), (3, 90, (0, 5, 61)), (1, 200, None), (3, 20, (0, 1, 2))):
        inputs = prompt(batch, length, pads, seed=length)
        found = model(name).generate(**inputs, do_sample=False, max_new_tokens=17, past_key_values=cache)
        assert torch.equal(found, plain_text(name, inputs, max_new_tokens=17))
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.stats().decode_steps == 0


def test_reset_forgets_the_selection():
    """A used cache chooses as a new one does."""
    inputs = prompt(2, 140, (0, 30))
    used, new = two_level(**TIGHT), two_level(**TIGHT)
    model("llama").generate(**prompt(2, 150, seed=9), max_new_tokens=20, do_sample=False, past_key_values=used)
    used.reset()
    texts = [
        model("llama").generate(**inputs, max_new_tokens=40, do_sample=False, past_key_values=cache)
        for cache in (used, new)
    ]
    assert torch.equal(*texts)
    mine, theirs = used.stats(), new.stats()
    assert (mine.attended_tokens, mine.blocks_chosen) == (theirs.attended_tokens, theirs.blocks_chosen)


def test_reset_keeps_memory_and_drops_nothing_shared():
    cache = two_level(max_length=400, **FULL)
    pair = Pair()
    pair.ours = cache
    pair.feed(*padded(1, 120))
    copied = pair.copy()
    before = cache.memory_bytes()
    cache.reset()
    pair.stock, pair.mask = DynamicCache(), None
    assert cache.memory_bytes() == before
    pair.feed(*padded(1, 150, seed=4))
    copied.steps(30)
    pair.steps(30)
