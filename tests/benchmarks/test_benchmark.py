"""Parts of the step and generate benchmarks: shapes, variants, filled caches, single steps."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
from inside import attention_of
from models import build

from benchmarks import baselines, decoding, filling, shapes
from benchmarks import step as bench_step
from benchmarks.baselines import VARIANTS, Variant, find, make_cache

BATCH, CONTEXT, NEW = 2, 300, 6


def decode(model, variant: Variant, context: int = CONTEXT, length: int | None = None):
    """Tokens generated over a filled cache, and the cache."""
    baselines.prepare(model, variant, fused=False)
    cache = make_cache(model, variant, length or context + NEW + 1)
    after = filling.fill_cache(model, cache, BATCH, context)
    return decoding.generate(model, cache, BATCH, NEW, each=after).tokens, cache


# ---------------------------------------------------------------------- shapes


SIZES = {
    "qwen3-8b": 8.19e9,
    "qwen3-32b": 32.76e9,
    "qwen3-0.6b": 0.596e9,
    "llama-3.3-70b": 70.55e9,
    "qwen2.5-7b": 7.62e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.2-1b": 1.236e9,
    "mha-7b": 6.74e9,
    "gemma3-12b": 11.77e9,
    "gemma3-27b": 27.01e9,
    "glm-4.7-flash": 29.94e9,
    "deepseek-v3": 671.0e9,
    "qwen3-30b-a3b": 30.53e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-20b-mxfp4": 11.96e9,  # a byte holds two codes
}


@pytest.mark.parametrize("name", list(shapes.SHAPES))
def test_shapes_are_the_models_they_are_named_after(name):
    """Parameters without a vision tower; every layer's cache has the shape that a filled one gets."""
    config = shapes.known_config(name)
    model = shapes.random_model(config, torch.bfloat16, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(SIZES[name], rel=0.003)
    attention = model.model.layers[0].self_attn
    if latent := shapes.latent_dims(config):
        assert shapes.cached_token(config) == (1, *latent) == (1, attention.kv_lora_rank, attention.qk_rope_head_dim)
        assert shapes.query_dim(config) == sum(latent)
        return
    assert attention.head_dim == shapes.head_dim(config)
    assert attention.k_proj.out_features == config.num_key_value_heads * shapes.head_dim(config)
    assert len(shapes.windows(config)) == config.num_hidden_layers


def test_limit_by_hand():
    """Gemma 3 12B, 2 rows of 4096 tokens, 2 TB/s: 8 layers read all, 40 layers 1024 tokens, 8 heads of 256 channels."""
    config = shapes.known_config("gemma3-12b")
    assert Counter(shapes.windows(config)) == {1024: 40, None: 8}
    kv = 2 * (8 * 4096 + 40 * 1024) * 2 * 8 * 256 * 2
    assert shapes.kv_bytes(config, 2, 4096) == kv
    assert bench_step.limit_ms(10**9, config, 2, 4096, 2, 2e12) == pytest.approx((1e9 + kv) / 2e12 * 1e3)


def test_limits_of_latents_and_experts():
    """GLM-4.7-Flash: 1,152 bytes a token and layer; of 64 experts in 46 layers a row reads 4, six rows 20.5."""
    config = shapes.known_config("glm-4.7-flash")
    assert shapes.kv_bytes(config, 1, 1 << 20) == 47 * 1152 << 20
    net = shapes.random_model(config, torch.bfloat16, torch.device("meta"))
    every = 46 * 64 * 3 * 2048 * 1536 * 2
    one, six = shapes.weight_bytes(net), shapes.weight_bytes(net, 6)
    assert six - one == pytest.approx(every * (1 - (1 - 4 / 64) ** 6 - 4 / 64), rel=1e-6)
    total = sum(p.nbytes for p in net.parameters()) - net.get_input_embeddings().weight.nbytes
    assert one == pytest.approx(total - every * 60 / 64, rel=1e-6)


# ---------------------------------------------------------------------- filled caches


@pytest.mark.parametrize("name", ("llama", "qwen2", "gemma3", "glm4-moe-lite"))
def test_all_caches_hold_the_same(name):
    """With a budget for everything every cache gives DynamicCache's tokens: the same keys, at the right places."""
    model = build(name, "sparsekv")
    expected, dynamic = decode(model, VARIANTS["hf_dynamic"])
    assert dynamic.get_seq_length() == CONTEXT + NEW
    everything = Variant("everything", "", settings={"token_budget": 4096, "dense_layers": 0})
    for variant, length in (
        ("hf_static", None),
        ("hf_static", CONTEXT + 100),
        (everything, None),
        ("captured_dense", None),
    ):
        variant = VARIANTS[variant] if isinstance(variant, str) else variant
        tokens, cache = decode(model, variant, length=length)
        assert int(cache.get_seq_length()) == CONTEXT + NEW
        assert torch.equal(tokens, expected), variant.name
    assert len(set(expected.flatten().tolist())) > 2, "text that could differ"


def test_replayed_keys_and_queries():
    model = build("gemma3", "sparsekv")
    cache = make_cache(model, VARIANTS["two_level"], CONTEXT + 20)
    after = filling.fill_cache(model, cache, BATCH, CONTEXT, "replayed")
    decoding.generate(model, cache, BATCH, NEW, each=after)
    assert cache.get_seq_length() == CONTEXT + NEW
    assert after.__self__.step == NEW, "the queries move on after each token"
    other = make_cache(model, VARIANTS["hf_dynamic"], None)
    filling.fill_cache(model, other, BATCH, CONTEXT, "replayed")()
    full = model.config.layer_types.index("full_attention")
    torch.testing.assert_close(cache.layers[full].keys[:, :, :CONTEXT], other.layers[full].keys)


@pytest.mark.parametrize("how", ["random", "replayed"])
def test_filled_caches_select_from_the_first_step(how):
    """The default settings: channels are known when the cache is full, or the first steps would be dense."""
    model = build("llama", "sparsekv", num_hidden_layers=3, max_position_embeddings=4096)
    for name in ("two_level", "two_level:lag+offload", "token_only", "block_only"):
        cache = make_cache(model, find(name), 2100)
        filling.fill_cache(model, cache, 1, 2048, how)
        last = cache.sparse_layers[2]
        assert last.policy.plan(last.store).attends in ("every", "chosen"), name


def test_dense_forward_attends_to_context_and_new_token():
    """The bound's forward, uncaptured: a model whose cache holds the same gives the same logits."""
    model = build("gemma3", "sparsekv")
    forward = baselines.DenseForward(model, BATCH, CONTEXT)
    lengths = [held[0].shape[2] for held in forward.held]
    assert lengths == [8, CONTEXT + 1, 8]
    held = [[t[:, :, :-1].clone() for t in pair] for pair in forward.held]
    with torch.no_grad():
        found = forward().logits[:, -1]
    forward.close()
    assert attention_of(model) == "sparsekv"
    model.set_attn_implementation("sdpa")
    cache = make_cache(model, VARIANTS["hf_dynamic"], None)
    for index, (key, value) in enumerate(held):
        cache.layers[index].update(key, value)
        if cache.layers[index].is_sliding:
            cache.layers[index].cumulative_length = CONTEXT
    with torch.no_grad():
        expected = model(forward.ids, position_ids=forward.position, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_steps_are_what_generate_makes():
    """The same arguments, in the same order: otherwise a captured step of the one would not serve the other."""
    model = build("llama", "sparsekv")
    cache = make_cache(model, VARIANTS["captured_dense"], CONTEXT + 20)
    filling.fill_cache(model, cache, BATCH, CONTEXT)
    own, seen = model.forward, []

    def forward(*args, **kwargs):
        seen.append({k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})
        return own(*args, **kwargs)

    forward.__signature__ = inspect.signature(own)
    model.forward = forward
    decoding.generate(model, cache, BATCH, 2)
    decoding.Steps(model, cache, BATCH, 1)()
    # Releases after transformers 5.17 leave out a mask without padding, which is no part of what a graph is known by.
    masks = [call["attention_mask"][1] for call in seen if call.get("attention_mask") is not None]
    rest = [{k: v for k, v in call.items() if k != "attention_mask"} for call in seen]
    assert rest[0] == rest[1] == rest[2]
    assert masks == [CONTEXT + 1, CONTEXT + 2, CONTEXT + 3][-len(masks) :]
