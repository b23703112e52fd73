"""Caches that are saved from a GPU or loaded onto one, and captured steps over them."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import TIGHT, two_level
from models import build, prompt

from hf_sparsekv import OffloadConfig, SparseCache, optimize

pytestmark = pytest.mark.gpu


@torch.no_grad()
def steps(net, cache, ids):
    """Logits of given tokens, one at a time; those of a captured step are valid until the next one."""
    return torch.cat([net(token, past_key_values=cache).logits.clone() for token in ids.split(1, dim=1)], 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("to_host", [True, False], ids=["to-host", "to-device"])
@pytest.mark.parametrize("from_host", [True, False], ids=["from-host", "from-device"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_answer_goes_on(name, from_host, to_host, captured, tmp_path):
    """Saved after decode steps (captured: with rings, and blocks sealed by kernels); copies go on like the original."""
    net = build(name, "sparsekv").cuda()
    if captured:
        optimize(net)
    cache = two_level(from_host, lag=True, **TIGHT)
    with torch.no_grad():
        net(prompt(2, 130)["input_ids"].cuda(), past_key_values=cache)
    steps(net, cache, prompt(2, 40, seed=1)["input_ids"].cuda())
    path = tmp_path / "context"
    cache.save(path)
    offload = OffloadConfig() if to_host else None
    more = prompt(2, 30, seed=2)["input_ids"].cuda()
    for device in (None, "cuda", "cuda:0"):
        loaded = SparseCache.load(path, offload=offload, model_config=net.config, device=device)
        for mine, theirs in zip(cache.layers, loaded.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    # The original on the other side reads the same numbers, perhaps in another order.
    want = steps(net, copy.deepcopy(cache), more)
    torch.testing.assert_close(steps(net, loaded, more), want, atol=2e-3, rtol=1e-3)
    assert loaded.stats().sparse_calls > 0


def test_other_machines(tmp_path):
    """From the GPU to the CPU and back."""
    net, ids = build("llama", "sparsekv"), prompt(1, 130)["input_ids"]
    on_gpu = build("llama", "sparsekv").cuda()
    cache = two_level(lag=True, **TIGHT)
    with torch.no_grad():
        on_gpu(ids.cuda(), past_key_values=cache)
    cache.save(tmp_path / "gpu")
    on_cpu = SparseCache.load(tmp_path / "gpu", device="cpu")
    on_cpu.save(tmp_path / "cpu")
    back = SparseCache.load(tmp_path / "cpu", device="cuda")
    more = prompt(1, 30, seed=2)["input_ids"]
    want = steps(net, on_cpu, more)
    torch.testing.assert_close(steps(on_gpu, back, more.cuda()).cpu(), want, atol=2e-3, rtol=1e-3)
