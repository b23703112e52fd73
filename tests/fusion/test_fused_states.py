"""Fused layers with a state: kernels between the projections give what transformers' own code gives."""

from __future__ import annotations

import copy

import model_list
import pytest
import torch
from models import prompt
from transformers import DynamicCache

from hf_sparsekv import SparseCache, TokenConfig
from hf_sparsekv.fusion import layers as fused_layers
from hf_sparsekv.fusion import recurrent
from hf_sparsekv.fusion.fuse import fuse, why_not

DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
MAMBA = ("bamba", "granitemoehybrid", "nemotron_h")
KINDS = *DELTA, *MAMBA


@pytest.fixture
def anywhere(monkeypatch):
    """Let the fused code run on the CPU."""
    monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)


def new_model(kind: str) -> torch.nn.Module:
    """With norms, biases and gates that are not all ones and zeros."""
    model = model_list.build(kind)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: torch.nn.Module, cache) -> torch.Tensor:
    """Of a padded prompt, of single tokens, of several over them, and of single ones again."""
    device = next(model.parameters()).device
    given = {name: value.to(device) for name, value in prompt(2, 40, (0, 5)).items()}
    positions, rows = (given["attention_mask"].cumsum(1) - 1).clamp_min(0), []
    for lo, hi in ((0, 24), *((i, i + 1) for i in range(24, 30)), (30, 35), *((i, i + 1) for i in range(35, 40))):
        of = {"attention_mask": given["attention_mask"][:, :hi], "position_ids": positions[:, lo:hi]}
        rows.append(model(given["input_ids"][:, lo:hi], past_key_values=cache, **of).logits)
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_same_logits(anywhere, monkeypatch, kind):
    """Over transformers' caches and ours; each step is a kernel in each layer; undone, all is as before."""
    calls: list[int] = []
    operator = "gated_delta_step" if kind in DELTA else "mamba2_step"
    original = getattr(recurrent, operator)
    monkeypatch.setattr(recurrent, operator, lambda *given: calls.append(1) or original(*given))
    model = new_model(kind)
    want = logits(model, DynamicCache(config=model.config))
    held = {name: value.clone() for name, value in model.state_dict().items()}
    fusion = fuse(model)
    assert fusion is not None and fusion.skipped == []
    states = model.config.layer_types.count("linear_attention")
    if kind in DELTA:
        assert fusion.counts["GatedDeltaNet"] == fusion.counts["delta"] == states > 0
    else:
        assert fusion.counts["Mamba2"] == states > 0
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        assert fusion.counts["linear"] == len(linear) > 2 * states + 1
    for cache in (DynamicCache(config=model.config), SparseCache(TokenConfig(), None, model.config)):
        if isinstance(cache, SparseCache):
            model.set_attn_implementation("sparsekv")
        calls.clear()
        found = logits(model, cache)
        assert (found - want).norm() < 1e-5 * want.norm()
        assert len(calls) == states * 11
    model.set_attn_implementation("sdpa")
    fusion.undo()
    assert {name: torch.equal(value, held[name]) for name, value in model.state_dict().items()} == dict.fromkeys(
        held, True
    )
    calls.clear()
    assert torch.equal(logits(model, DynamicCache(config=model.config)), want)
    assert not calls


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
def test_norms_and_linear_layers_alone(anywhere, kind):
    """Of models whose layers have no kernel."""
    model = new_model(kind)
    want = logits(model, DynamicCache(config=model.config))
    fusion = fuse(model)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert fusion.skipped == [] and {*fusion.counts} == {"RMSNorm", "linear"}
    assert fusion.counts["linear"] == len(linear)
    found = logits(model, DynamicCache(config=model.config))
    assert (found - want).norm() < 1e-5 * want.norm()
    fusion.undo()
    assert torch.equal(logits(model, DynamicCache(config=model.config)), want)


CHANGES = ("recording", "activation", "hook", "state", "bias")


@pytest.mark.parametrize(
    ("kind", "change"),
    [*(("qwen3_5_text", change) for change in CHANGES), *(("bamba", change) for change in CHANGES[:4])],
)
def test_what_no_kernel_computes(anywhere, monkeypatch, kind, change):
    """The layer's own code runs, and is right."""
    for operator in ("gated_delta_step", "mamba2_step"):
        monkeypatch.setattr(recurrent, operator, lambda *given: pytest.fail("the kernel ran"))
    model = new_model(kind)
    with_states = [module for module in model.modules() if hasattr(module, "conv1d")]
    for one in with_states:
        if change == "activation":
            one.activation = "gelu"
        if change == "bias":
            one.conv1d.bias = torch.nn.Parameter(torch.randn(one.conv_dim))
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    if change == "recording":
        for cache in caches:
            cache.activate_past_recording()
    want = None
    for cache in caches:
        if change == "state":
            original = cache.update_recurrent_state
            monkeypatch.setattr(
                cache,
                "update_recurrent_state",
                lambda state, *at, _to=original, **named: _to(state.double(), *at, **named),
            )
        found = logits(model, cache)
        if want is None:
            want = found
            fuse(model)
            if change == "hook":
                for one in with_states:
                    one.norm.register_forward_hook(lambda module, given, out: out)
    assert (found - want).norm() < 1e-5 * want.norm()


def test_a_copy_of_a_cache_has_its_own_states(anywhere):
    model = new_model("qwen3_5_text")
    fuse(model)
    ids = prompt(1, 30)["input_ids"]
    with torch.no_grad():
        model(ids, past_key_values=(cache := DynamicCache(config=model.config)))
        other = copy.deepcopy(cache)
        first = model(ids[:, :1], past_key_values=cache).logits
        assert torch.equal(model(ids[:, :1], past_key_values=other).logits, first)
    assert why_not(model) == "it is fused already"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_on_a_gpu(kind, dtype):
    """As close to float32 as transformers' own code is in the same dtype."""
    model = new_model(kind).cuda()
    exact = logits(model, DynamicCache(config=model.config))
    model = model.to(dtype)
    stock = logits(model, DynamicCache(config=model.config)).float()
    assert fuse(model).skipped == []
    ours = logits(model, DynamicCache(config=model.config)).float()
    error, baseline = ((one - exact).norm() / exact.norm() for one in (ours, stock))
    print(f"{kind} {dtype}: error {error:.2e}, unfused {baseline:.2e}")
    assert error < 1.3 * baseline + 2e-5
