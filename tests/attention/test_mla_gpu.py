"""Multi-head latent attention on a real GPU: kernels instead of references, captured steps, sizes of real models."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import transformers as tf
from caches import CACHES, FULL, TIGHT, two_level
from captured import check, on_gpu
from inside import LATENT_BYTES, latent_pieces
from models import MLA, build, prompt, sharp_on_gpu
from test_mla import attention_modules
from transformers import DynamicCache

from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    ProgressiveCache,
    ProgressiveConfig,
    TokenConfig,
    optimize,
    predict_ahead,
)
from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.mla import Absorbed
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.types import AttentionParams

pytestmark = pytest.mark.gpu

PLAIN = [name for name in MLA if name not in ("kimi-linear", "longcat-flash")]  # needs its configuration; eager
SOME = ["host", "device", "device-lag", "device-block", "host-token", "host-nopool", "progressive", "progressive-host"]
SOME += ["predictive", "predictive-host", "predictive-mean"]


@pytest.mark.parametrize("name", PLAIN)
def test_captured_steps_are_eager_ones(name):
    check(name, "host", on_gpu(2, 150, (0, 33)))


@pytest.mark.parametrize("cache", SOME)
def test_caches(cache):
    check("glm4-moe-lite", cache, on_gpu(1, 180))


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_decoding(how):
    check("deepseek-v3", "host", on_gpu(2, 150, (0, 30)), **how)


@pytest.mark.parametrize(("name", "offload"), [(name, i % 2 == 0) for i, name in enumerate(PLAIN)])
def test_budget_for_everything_equals_dense(name, offload):
    """Also a second turn and a chunked prompt."""
    fast, stock = optimize(build(name, "sparsekv").cuda(), fused=False), build(name, "sdpa").cuda()
    inputs, more = on_gpu(2, 150, (0, 40)), on_gpu(2, 23, seed=3)
    caches, texts = (two_level(offload, **FULL), DynamicCache(config=stock.config)), []
    for net, cache in zip((fast, stock), caches):
        go = {"do_sample": False, "max_new_tokens": 40, "past_key_values": cache}
        first = net.generate(**inputs, **go)
        ids = torch.cat((first, more["input_ids"]), 1)
        answered = torch.ones_like(first[:, 150:])
        mask = torch.cat((inputs["attention_mask"], answered, more["attention_mask"]), 1)
        texts.append(net.generate(input_ids=ids, attention_mask=mask, **go))
    assert torch.equal(*texts)
    assert runner_of(fast).replays > 70
    chunked = two_level(offload, **FULL)
    go = {"do_sample": False, "max_new_tokens": 20, "prefill_chunk_size": 37}
    found = fast.generate(**inputs, **go, past_key_values=chunked)
    assert torch.equal(found, texts[0][:, : found.shape[1]])


def real(heads: int) -> tf.PreTrainedConfig:
    """Two layers with the attention of GLM-4.7-Flash (20 heads) or DeepSeek-V3 (128), and little else."""
    small = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 8,  # all: a router that tips over under rounding would be all that is measured
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 256,
        "max_position_embeddings": 1 << 16,
        "eos_token_id": None,
        "initializer_range": 0.05,
    }
    if heads == 20:
        return tf.Glm4MoeLiteConfig(**small)
    return tf.DeepseekV3Config(**small, first_k_dense_replace=1, num_attention_heads=heads, num_key_value_heads=heads)


def made(heads: int, attn: str, dtype: torch.dtype) -> torch.nn.Module:
    return sharp_on_gpu(real(heads), attn, dtype)


@torch.no_grad()
def teacher_forced(net, cache, ids: torch.Tensor, prompts: tuple[int, ...]) -> torch.Tensor:
    rows, at = [], 0
    for length in (*prompts, *[1] * (ids.shape[1] - sum(prompts))):
        rows.append(net(ids[:, at : at + length], past_key_values=cache, use_cache=True).logits.float().clone())
        at += length
    return torch.cat(rows, 1)


PROMPTS = (1000, 250, 20)


@lru_cache
def references(heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and logits of transformers' own attention in float32 and in bf16."""
    ids = torch.randint(0, 1000, (2, 1400), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    exact = teacher_forced(made(heads, "sdpa", torch.float32), DynamicCache(), ids, PROMPTS)
    return ids, exact, teacher_forced(made(heads, "sdpa", torch.bfloat16), DynamicCache(), ids, PROMPTS)


SIZES = [(20, "two_level"), (20, "two_level:fused"), (20, "progressive"), (128, "two_level:fused"), (128, "host")]


@pytest.mark.parametrize(("heads", "how"), SIZES)
def test_real_sizes(heads, how):
    """bf16, with a budget for everything; a later chunk that expands, one that attends to latents, captured steps."""
    ids, exact, stock = references(heads)
    net = optimize(made(heads, "sparsekv", torch.bfloat16), fused=how.endswith("fused"))
    if how == "progressive":
        cache = ProgressiveCache(ProgressiveConfig(mass=1.0, dense_layers=1, dense_below=None))
    else:
        # All but the dense branch: the budget holds what is stored, token by token.
        config = TokenConfig(token_budget=1216, num_blocks=19, dense_layers=1, dense_below=None)
        cache = OffloadedSparseCache(config, OffloadConfig() if how == "host" else None)
    with torch.no_grad():
        found = teacher_forced(net, cache, ids, PROMPTS)
    assert runner_of(net).replays > 100
    size = exact.square().mean().sqrt()
    mine, theirs = ((x - exact).square().mean().sqrt() / size for x in (found, stock))
    top1 = (found.argmax(-1) == stock.argmax(-1)).float().mean()
    print(f"{heads} heads, {how}: error {mine:.2e}, stock {theirs:.2e}, top-1 agreement {top1:.3f}; {cache.stats()}")
    assert mine < 1.3 * theirs
    assert top1 > 0.9


@pytest.mark.parametrize("how", ["device", "host"])
@pytest.mark.parametrize("heads", [20, 128])
def test_predicted_queries_of_real_sizes(heads, how):
    """The kernels can be launched, captured steps are eager ones, and few tokens are attended to."""
    ids = torch.randint(0, 1000, (2, 1400), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    config = PredictiveConfig(token_budget=256, dense_layers=1, dense_below=None)
    found = []
    for captured in (False, True):
        net = made(heads, "sparsekv", torch.bfloat16)
        if captured:
            optimize(net, fused=False)
        else:
            predict_ahead(net)  # as optimize() does
        cache = AsyncPredictiveCache(config, OffloadConfig() if how == "host" else None)
        found.append(teacher_forced(net, cache, ids, (1300,)))
        stats = cache.stats()
        assert found[-1].isfinite().all()
        assert stats.sparse_calls == 200
        assert stats.hit_rate is None if how != "host" else 0 < stats.hit_rate < 1
    assert runner_of(net).replays == 100
    difference = (found[0] - found[1]).square().mean().sqrt() / found[0].square().mean().sqrt()
    print(f"{heads} heads, {how}: captured against eager {difference:.2e}; {stats}")
    assert difference < 0.1  # what is rounded otherwise tips single tokens over


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("q", [1, 16, 64, 400])
@pytest.mark.parametrize("padded", [False, True])
def test_exact_attention(monkeypatch, q, dtype, padded):
    """On latents and expanded, whole and in pieces, at real sizes."""
    net = made(20, "sparsekv", dtype)
    absorbed = Absorbed(attention_modules(net)[0])
    generator = torch.Generator("cuda").manual_seed(q)
    batch, heads, n = 2, 20, 3000

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    query, latent, rotary = normal(batch, heads, q, 256), normal(batch, 1, n, 512), normal(batch, 1, n, 64)
    params = AttentionParams(256**-0.5)
    columns = torch.arange(n, device="cuda") >= torch.tensor([[0], [700]], device="cuda") if padded else None
    exact = Absorbed(attention_modules(made(20, "sparsekv", torch.float32))[0])
    key, value = exact.expand(latent.float(), rotary.float())
    expected = exact_attention(query.float(), key, value, params, columns=columns)
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for piece in (1 << 29, 1 << 22):
        latent_pieces(monkeypatch, piece)
        found = absorbed.attention(query, latent, rotary, params, columns=columns).float()
        assert (found - expected).norm() / expected.norm() < limit


def test_memory_of_a_long_prompt_stays_bounded():
    """Keys and values of all heads would take 1.3 GB in each layer; pieces take half a gigabyte whatever the length."""
    net = made(20, "sparsekv", torch.bfloat16)
    absorbed = Absorbed(attention_modules(net)[0])
    n = 1 << 16
    latent, rotary = (torch.randn(1, 1, n, dim, device="cuda", dtype=torch.bfloat16) for dim in (512, 64))
    query = torch.randn(1, 20, n, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = absorbed.attention(query, latent, rotary, AttentionParams(0.1))
        peak = torch.cuda.max_memory_allocated() - before - out.nbytes
    # A piece: projected, as keys, as values, and as the attention wants them.
    assert peak < 4 * LATENT_BYTES


def test_a_model_whose_experts_cannot_be_captured_says_so():
    fast = optimize(build("longcat-flash", "sparsekv").cuda())
    inputs, go = on_gpu(1, 150), {"do_sample": False, "max_new_tokens": 20}
    expected = build("longcat-flash", "sparsekv").cuda().generate(**inputs, **go, past_key_values=two_level(**TIGHT))
    with pytest.warns(UserWarning, match="decode steps run eagerly"):
        found = fast.generate(**inputs, **go, past_key_values=CACHES["host"](**TIGHT))
    assert torch.equal(found, expected)


def test_prompts_of_offloaded_latents_are_read_back_beside_the_computation():
    """Chunks of a prompt over blocks in host memory, as large as their copy streams' buffers are used again."""
    net = build("glm4-moe-lite", "sparsekv", num_hidden_layers=4, max_position_embeddings=1 << 15).cuda()
    stock = build("glm4-moe-lite", "sdpa", num_hidden_layers=4, max_position_embeddings=1 << 15).cuda()
    inputs = {name: value.cuda() for name, value in prompt(2, 3000).items()}
    caches, go = (two_level(True, **FULL), DynamicCache()), {"do_sample": False, "max_new_tokens": 8}
    texts = [
        one.generate(**inputs, **go, past_key_values=cache, prefill_chunk_size=500)
        for one, cache in zip((net, stock), caches)
    ]
    assert torch.equal(*texts)
