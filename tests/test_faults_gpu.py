"""Failures on a GPU in the middle of things: right output or an error that says so, and nothing left behind."""

from __future__ import annotations

import copy
import gc
from functools import lru_cache

import pytest
import torch
from caches import FULL, TIGHT, two_level
from inside import grow_of_pools, grows_by
from lazy_copy_streams import slow
from models import build, prompt
from transformers import DynamicCache, StoppingCriteria

from hf_sparsekv import OffloadConfig, optimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.offload.copy_streams import CopyStream

pytestmark = pytest.mark.gpu
HOW = {"max_new_tokens": 40, "do_sample": False}
LATE = 20_000_000  # cycles, some 10 ms


@pytest.fixture
def late(monkeypatch):
    """All copies by a copy stream begin late."""
    make = CopyStream.__init__

    def init(self, *args):
        make(self, *args)
        slow(self, LATE)

    monkeypatch.setattr(CopyStream, "__init__", init)


@pytest.fixture(params=["eager", "captured"])
def net(request):
    ours = build("llama", "sparsekv").cuda()
    return optimize(ours, fused=False) if request.param == "captured" else ours


def inputs(length: int = 300, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in prompt(2, length, (0, 30), seed=seed).items()}


@lru_cache
def plain() -> torch.nn.Module:
    return build("llama", "sdpa").cuda()


def dense(given: dict[str, torch.Tensor]) -> torch.Tensor:
    return plain().generate(**given, **HOW)


def test_the_first_step_waits_for_the_prompt(net, late):
    """The prompt's blocks are still on their way when the first token is decoded; captured at once, too."""
    given = inputs()
    for settings in (FULL, TIGHT):
        caches = two_level(**settings), two_level(**settings)
        texts = [net.generate(**given, **HOW, past_key_values=cache) for cache in caches]
        assert torch.equal(*texts)
        assert settings is TIGHT or torch.equal(texts[0], dense(given))


@pytest.mark.parametrize("way", ["dropped", "reset", "copied"])
def test_blocks_on_their_way(net, late, way):
    """A cache that goes, or is emptied, or whose original goes, before its blocks have arrived."""
    given = inputs()
    for seed in range(3):
        cache = two_level(**FULL)
        with torch.no_grad():
            net(**inputs(seed=seed), past_key_values=cache)
        if way == "reset":
            cache.reset()
            assert torch.equal(net.generate(**given, **HOW, past_key_values=cache), dense(given))
        elif way == "copied":
            copied, stock = copy.deepcopy(cache), DynamicCache()
            del cache
            gc.collect()
            junk = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(8)]
            token = torch.full((2, 1), 5, device="cuda")
            mine = inputs(seed=seed)
            mask = torch.cat((mine["attention_mask"], torch.ones_like(token)), 1)
            with torch.no_grad():
                found = net(token, attention_mask=mask, past_key_values=copied).logits
                plain()(**mine, past_key_values=stock)
                want = plain()(token, attention_mask=mask, past_key_values=stock).logits
            torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-3)
            del junk
        else:
            del cache
    assert torch.equal(net.generate(**given, **HOW, past_key_values=two_level(**FULL)), dense(given))


def test_a_copy_chooses_what_its_original_does(net, late):
    """Copied while the first step's blocks are still being chosen."""
    for seed in range(3):
        ids, cache = prompt(2, 500, seed=seed)["input_ids"].cuda(), two_level(**TIGHT)
        with torch.no_grad():
            net(ids, past_key_values=cache)
            copied = copy.deepcopy(cache)
            found, want = (
                torch.cat([net(token, past_key_values=each).logits.clone() for token in ids[:, :8].split(1, 1)], 1)
                for each in (copied, cache)
            )
        torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-3)


def test_a_copy_that_only_reads_its_question(late):
    """Copies of a cache read a question each and are dropped at once: what they still fetch harms nobody's memory."""
    net, base = build("llama", "sparsekv").cuda(), two_level(**TIGHT)
    mine = inputs()
    with torch.no_grad():
        net(**mine, past_key_values=base)
        for seed in range(6):
            question = prompt(2, 40, seed=seed)["input_ids"].cuda()
            mask = torch.cat((mine["attention_mask"], torch.ones_like(question)), 1)
            copied = copy.deepcopy(base)
            net(question, attention_mask=mask, past_key_values=copied)
            pools = [pool for pool in copied.device_pools.pools.values() if pool is not None]
            sizes = [pool.pages.nbytes for pool in pools]
            assert pools
            del copied, pools
            held = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes for _ in range(4)]
            torch.cuda.synchronize()
            assert not any(bool(there.any()) for there in held)


class Raises(StoppingCriteria):
    """Gives up after some tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, ids, scores, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise InterruptedError("the user has gone")
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


@pytest.mark.parametrize("after", [1, 2, 17])
def test_a_stopping_criterion_that_raises(net, after):
    """Between two steps: the cache is whole, and the answer goes on with what was cached."""
    given, cache = inputs(), two_level(**FULL)
    with pytest.raises(InterruptedError, match="the user has gone"):
        net.generate(**given, **HOW, past_key_values=cache, stopping_criteria=[Raises(after)])
    want = dense(given)
    assert cache.get_seq_length() == 300 + after - 1
    so_far = want[:, : 300 + after]
    mask = torch.cat((given["attention_mask"], torch.ones_like(so_far[:, 300:])), 1)
    rest = {**HOW, "max_new_tokens": HOW["max_new_tokens"] - after}
    assert torch.equal(net.generate(so_far, attention_mask=mask, **rest, past_key_values=cache), want)


def test_two_caches_in_turns(net):
    """Steps of two caches alternate, with one device pool each."""
    prompts = inputs(300), inputs(260, seed=5)
    caches = two_level(**FULL), two_level(OffloadConfig(device_pool=50_000), **FULL)
    stocks = DynamicCache(), DynamicCache()
    masks = [given["attention_mask"] for given in prompts]
    with torch.no_grad():
        for given, cache, stock in zip(prompts, caches, stocks):
            net(**given, past_key_values=cache)
            plain()(**given, past_key_values=stock)
        for token in prompt(2, 60, seed=9)["input_ids"].cuda().split(1, dim=1):
            for i in range(2):
                masks[i] = torch.cat((masks[i], torch.ones_like(token)), 1)
                found = net(token, attention_mask=masks[i], past_key_values=caches[i]).logits
                want = plain()(token, attention_mask=masks[i], past_key_values=stocks[i]).logits
                torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-3)


def test_out_of_device_memory_in_mid_answer(net, monkeypatch):
    """While the pool grows: an error, and after reset() the same cache gives the right text.

    A captured step grows it before it begins, so that the cache stays whole.
    """
    given, cache = inputs(), two_level(**FULL)
    own, calls = grow_of_pools(), []

    def fail(self, capacity):
        calls.append(capacity)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    grows_by(monkeypatch, fail)
    with pytest.raises(torch.OutOfMemoryError):
        net.generate(**given, max_new_tokens=400, do_sample=False, past_key_values=cache)
    assert calls
    grows_by(monkeypatch, own)
    assert [layer.broken is None for layer in cache.sparse_layers] == [runner_of(net) is not None, True]
    if runner_of(net) is None:
        with pytest.raises(RuntimeError, match="incomplete"), torch.no_grad():
            net(given["input_ids"][:, :1], past_key_values=cache)
    cache.reset()
    assert torch.equal(net.generate(**given, **HOW, past_key_values=cache), dense(given))


def test_memory_is_all_given_back(net, late):
    """After caches that were dropped in every state, device and host memory are what they were."""

    def round(seed: int) -> None:
        cache = two_level(**TIGHT)
        net.generate(**inputs(seed=seed), max_new_tokens=1 + 30 * (seed % 2), do_sample=False, past_key_values=cache)
        budgets.append(cache.budget)

    budgets = []
    for seed in range(2):
        round(seed)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seed in range(8):
        round(seed)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert {budget.used for budget in budgets} == {0}
