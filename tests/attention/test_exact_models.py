"""Exact prompts of models with windows, chunks, sinks, soft caps and latents: transformers' own tokens, and no mask."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from caches import FULL, two_level
from models import COMMON, MODELS, REFERENCE, build, prompt, wide

from hf_sparsekv.attention import exact
from hf_sparsekv.attention.compact_mask import CompactMask

# Of several kinds of layers, whose window or chunk is shorter than the prompt.
FAMILIES = ("gemma2", "gemma3", "gpt-oss", "qwen3", "deepseek-v3", "glm4-moe-lite")
OTHERS = {
    "gemma4": (
        tf.Gemma4ForCausalLM,
        tf.Gemma4TextConfig,
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 12,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "llama4": (
        tf.Llama4ForCausalLM,
        tf.Llama4TextConfig,
        {
            "num_hidden_layers": 3,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            "no_rope_layers": [1, 1, 0],
            "attention_chunk_size": 24,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "moe_layers": [],
        },
    ),
}
GREEDY = {"do_sample": False, "max_new_tokens": 6}


def made(name: str, attn: str):
    if name in MODELS:
        return build(name, attn)
    model_class, config_class, own = OTHERS[name]
    torch.manual_seed(0)
    return wide(model_class(config_class(**{**COMMON, **own}, attn_implementation=attn)))


@pytest.fixture(params=["torch", "kernel", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Some queries at a time, or by the kernel; in all no mask of a whole prompt."""
    if request.param == "kernel":
        pytest.importorskip("triton")
        from hf_sparsekv.ops.attention.prompt_attention import triton
        from hf_sparsekv.ops.attention.prompt_attention.config import Config

        def kernel(*given):
            return triton.prompt_attention(*given, config=Config(32, 32, warps=4, stages=1))

        monkeypatch.setattr(exact, "use_triton", lambda t: True)
        monkeypatch.setattr(exact, "prompt_attention", kernel)
    elif request.param == "torch":
        monkeypatch.setattr(exact, "PIECE_BYTES", 3000)
        monkeypatch.setattr(exact, "LEAST_AT_ONCE", 7)
    monkeypatch.setattr(CompactMask, "materialise", lambda mask: pytest.fail(f"{mask} was made"))
    return "cuda" if request.param == "gpu" else "cpu"


@pytest.mark.few
@pytest.mark.parametrize("kind", ["plain", "unbound", "padded", "chunks", "turns", "no cache"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_tokens(name, offload, kind, device):
    def asked(*how, **named):
        return {key: value.to(device) for key, value in prompt(*how, **named).items()}

    inputs = asked(2, 75, (0, 31) if kind in ("padded", "chunks") else None)
    ours, theirs = (made(name, attn).to(device) for attn in ("sparsekv", REFERENCE.get(name, "sdpa")))
    if kind == "no cache":
        with torch.no_grad():
            found, expected = (net(**inputs, use_cache=False).logits for net in (ours, theirs))
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)
        return
    config = None if kind == "unbound" else ours.config  # the first pass tells the kinds of layers
    cache, stock = two_level(offload, config, **FULL), tf.DynamicCache(config=theirs.config)
    caches = {"past_key_values": cache}, {"past_key_values": stock}
    if kind == "turns":
        first = [net.generate(**inputs, **given, **GREEDY) for net, given in zip((ours, theirs), caches)]
        assert torch.equal(*first)
        ids = torch.cat((first[0], asked(2, 40, seed=1)["input_ids"]), dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "chunks":
        with torch.no_grad():
            for net, given in zip((ours, theirs), caches):
                for lo, hi in ((0, 40), (40, 60)):
                    mask = inputs["attention_mask"][:, :hi]
                    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, lo:]
                    net(inputs["input_ids"][:, lo:hi], attention_mask=mask, position_ids=positions, **given)
    found, expected = (net.generate(**inputs, **given, **GREEDY) for net, given in zip((ours, theirs), caches))
    assert torch.equal(found, expected)


def test_sliding_layers_keep_their_window_alone():
    """Not a view of the whole prompt."""
    net, cache = build("gemma3", "sparsekv"), two_level(False, **FULL)
    with torch.no_grad():
        net(**prompt(1, 75), past_key_values=cache)
    layers = [layer for layer in cache.layers if layer.is_sliding]
    assert len(layers) == 2
    for held in (held for layer in layers for held in (layer.keys, layer.values)):
        assert held.shape[2] == 7 and held.untyped_storage().nbytes() == held.nbytes
