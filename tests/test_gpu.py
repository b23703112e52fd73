"""The caches on a real GPU: kernels instead of references, blocks read in place from pinned memory."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from caches import ALL, CACHES, FULL, TIGHT
from models import MODELS, NEEDS_CONFIG, NOTHING_SPARSE, REFERENCE, build, prompt
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig

pytestmark = pytest.mark.gpu

KINDS = [name for name in MODELS if name not in NOTHING_SPARSE]


def forced(model, cache, ids: torch.Tensor, mask: torch.Tensor, n: int) -> torch.Tensor:
    """Logits of the last ``n`` tokens fed one by one after a prefill, float32 ``[batch, n, vocab]``."""
    start = ids.shape[1] - n
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    rows = []
    with torch.no_grad():
        for lo, hi in [(0, start), *((i, i + 1) for i in range(start, ids.shape[1]))]:
            out = model(
                ids[:, lo:hi],
                attention_mask=mask[:, :hi],
                position_ids=positions[:, lo:hi],
                past_key_values=cache,
                logits_to_keep=1,
            )
            rows.append(out.logits[:, -1].float().cpu())
    return torch.stack(rows[1:], dim=1)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_dense(kind, offload):
    ours = build(kind, "sparsekv").cuda()
    stock = build(kind, REFERENCE.get(kind, "sdpa")).cuda()
    config = ours.config if kind in NEEDS_CONFIG else None
    given = prompt(3, 150, (0, 5, 61)) if offload else prompt(1, 150)
    given = {k: v.cuda() for k, v in given.items()}
    want = stock.generate(**given, do_sample=False, max_new_tokens=40)
    cache = CACHES["host" if offload else "device"](model_config=config, **FULL)
    got = ours.generate(**given, do_sample=False, max_new_tokens=40, past_key_values=cache)
    assert torch.equal(got, want)
    assert cache.stats().host_bytes > 0 if offload else cache.stats().host_bytes == 0


USUAL = ("host", "device", "progressive", "progressive-host", "predictive", "predictive-host")


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("llama", name) for name in ALL), *((kind, name) for kind in ("gemma2", "gpt-oss") for name in USUAL)],
)
def test_sparse_logits_equal_the_references(kind, name):
    """The CPU runs the operators' references; a kernel that selects or gathers otherwise moves the logits."""
    on_cpu = build(kind, "sparsekv")
    on_gpu = build(kind, "sparsekv").cuda()
    given = prompt(2, 220, (0, 37), seed=3)
    ids, mask = given["input_ids"], given["attention_mask"]
    want_cache, got_cache = ALL[name](**TIGHT), ALL[name](**TIGHT)
    want = forced(on_cpu, want_cache, ids, mask, 40)
    got = forced(on_gpu, got_cache, ids.cuda(), mask.cuda(), 40)
    # Rounding may swap two tokens of almost equal score now and then; everything else must agree.
    close = ((got - want).abs().amax(-1) < 2e-3 * want.abs().max()).float().mean()
    assert close > 0.97, f"{close:.3f} of the steps agree"
    ours, theirs = got_cache.stats(), want_cache.stats()
    assert ours.sparse_calls == theirs.sparse_calls > 0
    if not name.startswith("progressive"):
        assert ours.attended_tokens == theirs.attended_tokens
        # Which tokens are copied depends on which were chosen before; blocks are brought for several.
        rel = 0.02 if name.startswith("predictive") else 0
        assert ours.host_to_device_bytes == pytest.approx(theirs.host_to_device_bytes, rel=rel, abs=0)
        return
    # A walk whose share is just the threshold may stop a block earlier or later.
    assert ours.attended_tokens == pytest.approx(theirs.attended_tokens, rel=0.01)
    assert ours.host_to_device_bytes == pytest.approx(theirs.host_to_device_bytes, rel=0.05)


@cache
def beside(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A text, and its logits with stock attention in float32 and in ``dtype``."""
    given = prompt(1, 300, seed=5)
    ids, mask = given["input_ids"].cuda(), given["attention_mask"].cuda()
    nets = build("llama", "sdpa").cuda(), build("llama", "sdpa").cuda().to(dtype)
    return ids, mask, *(forced(net, DynamicCache(), ids, mask, 80) for net in nets)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in USUAL), *((name, torch.float16) for name in USUAL[1::2])],
)
def test_half_precision_stays_as_close_to_float32_as_sdpa(name, dtype):
    ids, mask, exact, stock = beside(dtype)
    ours = forced(build("llama", "sparsekv").cuda().to(dtype), CACHES[name](**FULL), ids, mask, 80)
    error, baseline = (ours - exact).norm() / exact.norm(), (stock - exact).norm() / exact.norm()
    agree = (ours.argmax(-1) == stock.argmax(-1)).float().mean()
    print(f"{dtype}: error {error:.2e}, sdpa's own {baseline:.2e}, top-1 agreement with sdpa {agree:.3f}")
    assert error < 1.3 * baseline
    assert agree > 0.9


def test_chunked_prefill_and_second_turn():
    ours, stock = build("llama", "sparsekv").cuda(), build("llama", "sdpa").cuda()
    ids = prompt(1, 500, seed=7)["input_ids"].cuda()
    want = stock.generate(ids, do_sample=False, max_new_tokens=40)
    for offload in (OffloadConfig(), None):
        config = TokenConfig(block_size=16, window=16, dense_layers=0, token_budget=2048)
        cache = OffloadedSparseCache(config, offload=offload)
        got = ours.generate(ids, do_sample=False, max_new_tokens=20, past_key_values=cache, prefill_chunk_size=111)
        got = ours.generate(got, do_sample=False, max_new_tokens=20, past_key_values=cache)
        assert torch.equal(got, want)


def test_host_memory_is_given_back():
    import gc

    model = build("llama", "sparsekv").cuda()
    ids = prompt(1, 400)["input_ids"].cuda()

    def run() -> int:
        cache = CACHES["host"](**TIGHT)
        model.generate(ids, do_sample=False, max_new_tokens=8, past_key_values=cache)
        budget = cache.budget
        del cache
        gc.collect()
        return budget.used

    assert run() == 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
