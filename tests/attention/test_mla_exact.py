"""Exact attention of several queries over latents: expanded in pieces or on the latents, as over expanded keys."""

from __future__ import annotations

import pytest
import torch
from caches import FULL, two_level
from inside import latent_pieces
from models import MLA, build, model, prompt
from test_mla import attention_modules

from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.mla import Absorbed
from hf_sparsekv.types import AttentionParams


@pytest.mark.pairwise
@pytest.mark.parametrize("piece", [1 << 29, 30_000, 9_000, 1])
@pytest.mark.parametrize("q", [1, 2, 4, 30, 77])
@pytest.mark.parametrize("what", ["plain", "padded", "4d", "additive", "softcap", "sinks", "window"])
def test_exact_attention(monkeypatch, what, q, piece):
    """On latents, expanded at once, and piece by piece: what attention over all expanded keys and values gives."""
    latent_pieces(monkeypatch, piece, 5000)
    absorbed = Absorbed(attention_modules(model("deepseek-v3"))[0])
    generator = torch.Generator().manual_seed(q)
    batch, heads, n = 2, 4, 77
    query = torch.randn(batch, heads, q, 20, generator=generator)
    latent, rotary = (torch.randn(batch, 1, n, dim, generator=generator) for dim in (16, 8))
    extra = {"softcap": {"softcap": 2.0}, "sinks": {"sink_logits": torch.randn(heads)}, "window": {"sliding_window": 9}}
    params, given = AttentionParams(0.4, **extra.get(what, {})), {}
    if what == "padded":
        given["columns"] = torch.arange(n) >= torch.tensor([[0], [30]])
    if what in ("4d", "additive"):
        mask = torch.rand(batch, 1, q, n, generator=generator) < 0.7
        mask[..., 0] = True
        given["mask"] = mask if what == "4d" else torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    expected = exact_attention(query, *absorbed.expand(latent, rotary), params, **given)
    found = absorbed.attention(query, latent, rotary, params, **given)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_expansion_is_the_models_own():
    for name in MLA:
        module = attention_modules(model(name))[0]
        latent, rotary = torch.randn(2, 1, 33, module.kv_lora_rank), torch.randn(2, 1, 33, module.qk_rope_head_dim)
        expected = type(module).expand_kv(module, latent, rotary)
        for found, each in zip(Absorbed(module).expand(latent, rotary), expected):
            torch.testing.assert_close(found, each)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_prefill_can_be_differentiated(dropout):
    net = build("deepseek-v3", "sparsekv")
    inputs = prompt(1, 40)
    for module in attention_modules(net):
        module.attention_dropout = dropout
    net.train()
    net(**inputs, past_key_values=two_level(**FULL)).logits.sum().backward()
    assert all(module.kv_b_proj.weight.grad.abs().sum() > 0 for module in attention_modules(net))
