"""Models with an indexer of their own (DSA) on a real GPU: kernels, captured steps, DeepSeek-V3.2's attention."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from captured import on_gpu
from models import INDEXED, REFERENCE, build, minimax_m3, sharp_on_gpu
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, SparseCache, TokenConfig, optimize
from hf_sparsekv.cache_name import over
from hf_sparsekv.cuda_graph.optimize import runner_of

pytestmark = pytest.mark.gpu

SMALL = {"block_size": 16, "window": 16, "max_draft": 4}
GO = {"do_sample": False, "max_new_tokens": 60}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "offload", [None, OffloadConfig(), OffloadConfig(device_pool=0)], ids=["device", "host", "bare"]
)
@pytest.mark.parametrize("name", INDEXED)
def test_tokens_are_those_of_transformers_own_cache(name, offload, padded):
    fast, stock = build(name, "sparsekv").cuda(), build(name, REFERENCE.get(name, "sdpa")).cuda()
    optimize(fast, fused=False)
    inputs, cache = on_gpu(2, 150, (0, 40) if padded else None), SparseCache(TokenConfig(**SMALL), offload)
    expected = stock.generate(**inputs, **GO)
    assert torch.equal(fast.generate(**inputs, **GO, **over(fast, cache)), expected)
    assert runner_of(fast).replays == 59
    assert cache.stats().attended_tokens == 59 * len(cache.layers) * 2 * 24
    chunked = SparseCache(TokenConfig(**SMALL), offload)
    found = fast.generate(**inputs, **{**GO, "max_new_tokens": 20}, prefill_chunk_size=40, **over(fast, chunked))
    assert torch.equal(found, expected[:, : found.shape[1]])


@pytest.mark.parametrize(
    "offload", [None, OffloadConfig(), OffloadConfig(device_pool=0)], ids=["device", "host", "bare"]
)
def test_blocks_of_heads(offload):
    """MiniMax M3, whose KV heads choose blocks by themselves; from before there are more than are chosen."""
    fast, stock = minimax_m3("sparsekv").cuda(), minimax_m3("sdpa").cuda()
    optimize(fast, fused=False)
    for length in (12, 150):
        inputs, cache = on_gpu(2, length), SparseCache(TokenConfig(**SMALL), offload)
        assert torch.equal(fast.generate(**inputs, **GO, **over(fast, cache)), stock.generate(**inputs, **GO))
    assert runner_of(fast).replays == 2 * 59
    assert cache.stats().needed > 0 or offload is None or offload.device_pool == 0


def made(attn: str, dtype: torch.dtype) -> torch.nn.Module:
    """Two layers with the attention and the indexer of DeepSeek-V3.2, and little else; 256 tokens are chosen."""
    config = tf.DeepseekV32Config(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        q_lora_rank=256,
        index_topk=256,
        max_position_embeddings=1 << 14,
        eos_token_id=None,
    )
    return sharp_on_gpu(config, attn, dtype)


@torch.no_grad()
def teacher_forced(net, cache, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    rows, at = [], 0
    for length in (prompt, *[1] * (ids.shape[1] - prompt)):
        rows.append(net(ids[:, at : at + length], **over(net, cache)).logits.float()[:, -1:].clone())
        at += length
    return torch.cat(rows, 1)


@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_attention_of_deepseek_v32(dtype, offload):
    """As near to float32 as transformers' own in the same dtype: rounding tips single tokens over, in both."""
    ids = torch.randint(0, 1000, (2, 1400), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    stock = made("sdpa", torch.float32)
    exact = teacher_forced(stock, DynamicCache(config=stock.config), ids, 1300)
    own = made("sdpa", dtype)
    theirs = teacher_forced(own, DynamicCache(config=own.config), ids, 1300)
    net, cache = optimize(made("sparsekv", dtype), fused=False), SparseCache(TokenConfig(), offload)
    mine = teacher_forced(net, cache, ids, 1300)
    assert runner_of(net).replays == 100
    size = exact.square().mean().sqrt()
    errors = [float((x - exact).square().mean().sqrt() / size) for x in (mine, theirs)]
    print(f"{dtype}, error {errors[0]:.2e}, stock {errors[1]:.2e}; {cache.stats()}")
    assert errors[0] < max(1.3 * errors[1], 1e-3)
    if offload is not None:
        assert 0 < cache.stats().hit_rate < 1
