"""Copies of chosen tokens in offloaded caches: they decide where tokens are read, never which, whatever happens."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import predictive, progressive, two_level
from inside import of_config
from models import COMMON, VOCAB, build, model, prompt
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from hf_sparsekv import OffloadConfig
from hf_sparsekv.policies.device_tokens import DeviceTokens

pytestmark = pytest.mark.filterwarnings("ignore:AsyncPredictiveCache chooses")  # by each layer's own query
BUDGET = {"token_budget": 32}
METHODS = {
    "two_level": lambda offload: two_level(offload, level="token", lag=False, **BUDGET),
    "progressive": lambda offload: progressive(offload, mass=0.5),
    "predictive": lambda offload: predictive(offload, **BUDGET),
    "ahead": lambda offload: predictive(offload, predictor="assembled", **BUDGET),
}
ROOM = 2 * 2 * 32 * (2 * 16 * 4 + 8)  # bytes of a layer for 32 tokens of each row and KV head


def feed(cache, length: int, seed: int, rows: int = 2, together: bool = False, net=None) -> list[torch.Tensor]:
    """Logits of tokens, one after the other or all at once."""
    ids, net = prompt(rows, length, seed=seed)["input_ids"], net or model("llama")
    with torch.no_grad():
        parts = [ids] if together else ids.split(1, dim=1)
        return [net(part, past_key_values=cache).logits[:, -1] for part in parts]


def life(cache) -> list[torch.Tensor]:
    """A prompt, steps, a deep crop and other tokens in its place, rows that change places and numbers, a second one."""
    found = feed(cache, 170, 0, together=True) + feed(cache, 12, 1)
    cache.crop(-80)  # full blocks as well
    found += feed(cache, 60, 2, together=True) + feed(cache, 12, 3)
    cache.reorder_cache(torch.tensor([1, 0]))
    found += feed(cache, 6, 4)
    cache.batch_repeat_interleave(2)
    found += feed(cache, 6, 5, rows=4)
    cache.batch_select_indices(torch.tensor([3, 0]))
    found += feed(cache, 6, 6)
    copied = copy.deepcopy(cache)
    found += feed(copied, 6, 7) + feed(cache, 6, 8) + feed(copied, 6, 9)
    cache.reset()
    return found + feed(cache, 150, 10, together=True) + feed(cache, 8, 11)


@pytest.mark.few
@pytest.mark.parametrize("pool", [None, 2 * ROOM], ids=["usual", "one selection"])
@pytest.mark.parametrize("method", METHODS)
def test_copies_never_show(method, pool):
    """The same as without any."""
    cache = METHODS[method](OffloadConfig(device_pool=pool))
    for found, expected in zip(life(cache), life(METHODS[method](OffloadConfig(device_pool=0))), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    held = [layer.policy.tokens for layer in cache.sparse_layers]
    assert all(isinstance(one, DeviceTokens) for one in held)
    assert {one.room for one in held} == {32} if pool else min(one.room for one in held) > 32
    assert cache.stats().hit_rate > 0


@pytest.mark.parametrize("method", METHODS)
def test_another_dtype_after_a_reset(method):
    """Copies of the first model's tokens are no room for the second's."""
    cache, wide = METHODS[method](OffloadConfig()), build("llama", "sparsekv").double()
    feed(cache, 170, 0, together=True)
    feed(cache, 3, 1)
    cache.reset()
    feed(cache, 170, 2, together=True, net=wide)
    assert torch.cat(feed(cache, 3, 3, net=wide)).isfinite().all()
    held = [layer.policy.tokens for layer in cache.sparse_layers]
    assert {one.kv.dtype for one in held} == {torch.float64} and cache.stats().hit_rate > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_reset_forgets_what_was_copied(method):
    cache = METHODS[method](OffloadConfig())
    feed(cache, 170, 0, together=True)
    feed(cache, 3, 1)
    assert cache.stats().hit_rate > 0
    cache.reset()
    assert cache.stats().hit_rate is None and cache.stats().host_to_device_bytes == 0


def test_no_room_for_a_block():
    """Too little memory for anything: told once, and everything is read where it is."""
    with pytest.warns(UserWarning, match="copies of the chosen tokens take") as told:
        cache = METHODS["two_level"](OffloadConfig(device_pool=100))
        feed(cache, 170, 0, together=True)
        feed(cache, 3, 1)
    assert len(told) == 1
    assert all(layer.policy.tokens is None for layer in cache.sparse_layers)
    assert cache.stats().hit_rate is None


def test_a_context_that_outgrows_its_copies():
    """Progressive selections grow with the context, and the room with them."""
    cache = METHODS["progressive"](OffloadConfig())
    feed(cache, 170, 0, together=True)
    feed(cache, 2, 1)
    before = cache.sparse_layers[0].policy.tokens
    feed(cache, 700, 2, together=True)
    feed(cache, 4, 3)
    after = cache.sparse_layers[0].policy.tokens
    assert after.room >= 2 * before.room and after.slots.shape[-1] > before.slots.shape[-1]
    assert int((after.columns >= 0).sum()) > 0


@pytest.mark.parametrize("way", ["steps", "reordered", "cropped"])
@pytest.mark.parametrize("method", ["two_level", "progressive"])
def test_pieces_of_a_prompt_bring_nothing(method, way):
    """What a piece's last query chooses is for a step, which another piece may come before: the step brings it."""
    caches = [METHODS[method](OffloadConfig(device_pool=pool)) for pool in (None, 0)]
    for cache in caches:
        for seed in range(3):
            feed(cache, 80, seed, together=True)
        if way == "reordered":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif way == "cropped":
            cache.crop(-80)  # full blocks as well: that query is gone
    held = [layer.policy.tokens for layer in caches[0].sparse_layers]
    assert not any(int(one.counters.sum()) for one in held)
    assert torch.allclose(*(feed(cache, 1, 4)[0] for cache in caches), atol=1e-5, rtol=1e-5)
    copied, none = (sum(layer.store.counters.total_from_host for layer in cache.sparse_layers) for cache in caches)
    assert (copied == none) if way == "cropped" else (copied < none)


def test_layers_that_share_keys_and_values():
    """What they choose is for themselves: nothing of it is left for other rows, which come before the next step."""
    of = {name: COMMON[name] for name in COMMON.keys() - {"intermediate_size", "tie_word_embeddings"}}
    config = Gemma3nTextConfig(
        **{**of, "num_hidden_layers": 3, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 3},
        **{"intermediate_size": [96] * 3, "activation_sparsity_pattern": [0.0] * 3, "laurel_rank": 8},
        **{"altup_num_inputs": 2, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16},
    )
    torch.manual_seed(0)
    net = of_config(Gemma3nForCausalLM, config, "sparsekv").eval()
    found = []
    for pool in (None, 0):
        cache = METHODS["two_level"](OffloadConfig(device_pool=pool))
        feed(cache, 170, 0, together=True, net=net)
        feed(cache, 3, 1, net=net)
        cache.batch_repeat_interleave(2)
        feed(cache, 20, 2, rows=4, together=True, net=net)
        found.append(torch.stack(feed(cache, 2, 3, rows=4, net=net)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
