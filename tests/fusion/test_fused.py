"""The fused layers: the same model as before, nothing changed outside of it, and everything undone.

Without a GPU the operators' references run, with the test for CUDA lifted.
"""

from __future__ import annotations

import copy
import importlib

import model_list
import pytest
import torch
import transformers
from caches import CACHES, FULL
from models import MLA, MODELS, REFERENCE, build, prompt
from torch import nn
from transformers import DynamicCache

from hf_sparsekv.fusion import fuse as fused
from hf_sparsekv.fusion import layers as fused_layers
from hf_sparsekv.fusion.fuse import ARCHS, fuse, why_not
from hf_sparsekv.fusion.layers import FusedLayer, FusedNorm

pytestmark = pytest.mark.quick

KINDS = [name for name, (_, config, _) in MODELS.items() if config.model_type.removesuffix("_text") in ARCHS]
VARIANTS = {
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    **{name: (name, {}) for name in KINDS},
}


@pytest.fixture
def anywhere(monkeypatch):
    """Let the fused code run on the CPU."""
    monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)


def made(variant: str, attn: str | None = None, seed: int = 0) -> nn.Module:
    """A model whose norms and biases are not all ones and zeros."""
    name, changes = VARIANTS[variant]
    model = build(name, attn or REFERENCE.get(name, "sdpa"), seed, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: nn.Module, pads: tuple[int, ...] | None = (0, 3)) -> torch.Tensor:
    """A prefill and three single tokens, ``[batch, q, vocab]``."""
    given = prompt(2, 24, pads)
    device = next(model.parameters()).device
    ids, mask = given["input_ids"].to(device), given["attention_mask"].to(device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache, rows = DynamicCache(config=model.config), []
    with torch.no_grad():
        for lo, hi in ((0, 21), (21, 22), (22, 23), (23, 24)):
            out = model(
                ids[:, lo:hi],
                attention_mask=mask[:, :hi],
                position_ids=positions[:, lo:hi],
                past_key_values=cache,
            )
            rows.append(out.logits)
    return torch.cat(rows, dim=1)


def snapshot(model: nn.Module) -> list:
    """Class, attributes and memory of every module; tensors by identity, value and layout."""
    rows = []
    for name, module in model.named_modules():
        rows.append((name, type(module), sorted(module.__dict__), {k: id(v) for k, v in module.__dict__.items()}))
        for key, p in module.named_parameters(recurse=False):
            rows.append((name, key, id(p), p.stride(), p.requires_grad, p.untyped_storage().nbytes(), p.tolist()))
        for key, hooks in module.__dict__.items():
            if "hooks" in key:
                rows.append((name, key, len(hooks)))
    return rows


def module_globals() -> dict[str, dict]:
    """What every modeling file and torch.nn.Linear hold."""
    files = {f"transformers.models.{name}.modeling_{name}" for name in ARCHS}
    found = {file: dict(vars(importlib.import_module(file))) for file in files}
    classes = [c for names in found.values() for c in names.values() if isinstance(c, type)]
    found["classes"] = {c: dict(vars(c)) for c in (*classes, nn.Linear, nn.Module)}
    return found


# linear layers joined, and taken by the kernels for small batches: all, nothing, and for some models the first alone.
# Layers with a state: test_fused_states.py. gpt-oss: below.
HOW = [
    (variant, both, both) for variant in VARIANTS if variant not in ("qwen3-next", "gpt-oss") for both in (True, False)
]
HOW += [(variant, True, False) for variant in ("qwen3", "phi3-partial", "deepseek-v2")]


@pytest.mark.parametrize(("variant", "linears", "small_batch"), HOW)
def test_same_logits_and_undoing_restores_everything(anywhere, variant, linears, small_batch):
    model, outside = made(variant), module_globals()
    before, want = snapshot(model), logits(model)
    fusion = fuse(model, linears=linears, small_batch=small_batch)
    layers = model.config.num_hidden_layers
    assert fusion.skipped == []
    latent = variant == "deepseek-v2"  # of attention only its linear layers
    assert fusion.counts["DecoderLayer"] == fusion.counts["MLP"] == layers
    assert fusion.counts.get("Attention", 0) == layers * (not latent)
    joined = linears and not variant.startswith("phi3")
    found = (fusion.counts.get("qkv", 0), fusion.counts.get("gate_up", 0))
    assert found == (layers * (joined and not latent), layers * joined)
    singles = 1 + layers * (5 if latent else 4 if variant.startswith("phi3") else 3 if variant in MLA else 2)
    assert fusion.counts.get("linear", 0) == singles * small_batch
    assert snapshot(model) != before
    assert (logits(model) - want).norm() < 1e-5 * want.norm()
    assert module_globals() == outside
    for _ in range(2):  # once, and again without effect
        fusion.undo()
        assert snapshot(model) == before
    assert torch.equal(logits(model), want)
    assert fuse(model) is not None  # and again


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "phi3"])
def test_the_fused_code_runs(anywhere, monkeypatch, variant):
    """Every operator is called as often as the architecture says: nothing falls back unseen."""
    model = made(variant)
    calls = []
    for op in ("add_norm", "qk_rope", "gated"):
        original = getattr(fused_layers, op)
        monkeypatch.setattr(
            fused_layers, op, lambda *a, _op=op, _original=original, **k: (calls.append(_op), _original(*a, **k))[1]
        )
    fuse(model)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))
        n = model.config.num_hidden_layers
        # One norm before the first layer, then one sum after each attention and each MLP.
        assert (calls.count("add_norm"), calls.count("qk_rope"), calls.count("gated")) == (1 + 2 * n, n, n)
        calls.clear()
        with torch.inference_mode():
            model(torch.tensor([[5, 6, 7]]))
        assert (calls.count("add_norm"), calls.count("qk_rope"), calls.count("gated")) == (1 + 2 * n, n, n)


@pytest.mark.parametrize("small_batch", [True, False])
@pytest.mark.parametrize("variant", ["llama-bias", "qwen3", "gemma3", "phi3"])
def test_few_rows_take_gate_and_up_at_once(anywhere, monkeypatch, variant, small_batch):
    """No kernel between the projections, unless a hook wants to see them, or what is there is not ours any more."""
    model, calls = made(variant), []
    for op in ("gated", "small_linear"):
        original = getattr(fused_layers, op)
        monkeypatch.setattr(
            fused_layers, op, lambda *a, _op=op, _original=original: (calls.append((_op, *a[3:])), _original(*a))[1]
        )
    token = torch.tensor([[5]])
    with torch.no_grad():
        want, n = model(token).logits, model.config.num_hidden_layers
        fuse(model, small_batch=small_batch)
        mlp = model.model.layers[0].mlp
        up = mlp.gate_up_proj if variant == "phi3" else mlp.up_proj

        def taken() -> tuple[int, int]:
            """MLPs whose gate and up projection are one kernel with the activation, and those with one between."""
            calls.clear()
            assert (model(token).logits - want).norm() < 1e-5 * want.norm()
            return sum(op == "small_linear" and bool(more) for op, *more in calls), calls.count(("gated",))

        assert taken() == ((n, 0) if small_batch else (0, n))
        seen = []
        hook = up.register_forward_hook(lambda m, a, out: seen.append(out))
        assert taken() == ((n - 1, 1) if small_batch else (0, n)) and len(seen) == 1
        hook.remove()
        hook = mlp.down_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
        assert taken() == ((n, 0) if small_batch else (0, n)) and len(seen) == 2
        hook.remove()
        model.double().float()  # gives joined weights memory of their own; Phi-3's were one before
        assert taken() == ((n, 0) if small_batch and variant == "phi3" else (0, n))


@pytest.mark.pairwise
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rank", [24, None])
@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe-lite", "youtu"])
def test_fused_latent_attention(anywhere, monkeypatch, name, rank, interleaved):
    changes = {"q_lora_rank": rank, "rope_interleave": interleaved}
    model, calls = build(name, "sdpa", **changes), []
    original = fused_layers.latent_rope
    monkeypatch.setattr(fused_layers, "latent_rope", lambda *a: (calls.append(0), original(*a))[1])
    want = logits(model)
    assert fuse(model).counts["qkv"] == model.config.num_hidden_layers
    assert (logits(model) - want).norm() < 1e-5 * want.norm()
    assert len(calls) == 4 * model.config.num_hidden_layers


@pytest.mark.parametrize("variant", ["deepseek-v3", "glm4-moe-lite"])
def test_the_fused_router_runs(anywhere, monkeypatch, variant):
    """For few tokens; many go the way they went."""
    model, calls, original = made(variant), [], fused_layers.route
    monkeypatch.setattr(fused_layers, "route", lambda *a, **k: (calls.append("route"), original(*a, **k))[1])
    short, long = prompt(2, 3)["input_ids"], prompt(1, 70)["input_ids"]
    with torch.no_grad():
        want = model(short).logits, model(long).logits
        fuse(model)
        assert (model(short).logits - want[0]).norm() < 1e-5 * want[0].norm()
        assert calls == ["route"]
        calls.clear()
        assert (model(long).logits - want[1]).norm() < 1e-5 * want[1].norm()
        assert calls == []


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma2", "deepseek-v3", "glm4-moe-lite"])
def test_generate_with_our_cache(anywhere, variant):
    stock, ours = made(variant), made(variant, "sparsekv")
    fuse(ours)
    given = prompt(2, 70, (0, 9))
    want = stock.generate(**given, do_sample=False, max_new_tokens=20)
    cache = CACHES["host"](model_config=ours.config, **FULL)
    got = ours.generate(**given, do_sample=False, max_new_tokens=20, past_key_values=cache)
    assert torch.equal(got, want)
    assert cache.stats().materialised == 0


def test_another_model_is_untouched(anywhere):
    model, other = made("qwen3"), made("qwen3", seed=1)
    before, want = snapshot(other), logits(other)
    fusion = fuse(model)
    assert snapshot(other) == before
    assert torch.equal(logits(other), want)
    logits(model)
    assert torch.equal(logits(other), want)
    fusion.undo()
    assert torch.equal(logits(other), want)


def test_originals_run_on_the_cpu_and_with_gradients(monkeypatch):
    model = made("qwen3")
    want = logits(model)
    fusion = fuse(model)
    assert torch.equal(logits(model), want)
    assert any("not on a CUDA device" in line for line in fusion.skipped)
    fusion.undo()
    ids = torch.tensor([[5, 6, 7]])
    model(ids, labels=ids).loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)
    fuse(model)
    model(ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))


def test_hooks_see_what_they_saw(anywhere):
    """Outputs of observed modules, and what a hook writes into the residual stream, count as before."""

    def run(fusing: bool, in_place: bool) -> list[torch.Tensor]:
        model, seen = made("gemma3"), []
        if fusing:
            fuse(model)

        def steer(module, args, output):
            return output.add_(0.5) if in_place else output + 0.5

        layer = model.model.layers[1]
        watched = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.post_feedforward_layernorm,
            layer.self_attn.q_norm,
            layer.self_attn.k_proj,
            layer.mlp.up_proj,
        )
        for module in watched:
            module.register_forward_hook(lambda m, a, out: seen.append(out.clone()))
        model.model.layers[0].register_forward_hook(steer)
        return [logits(model, None), *seen]

    for in_place in (False, True):
        want, got = run(False, in_place), run(True, in_place)
        assert len(got) == len(want) == 1 + 6 * 4
        for a, b in zip(got, want):
            # transformers normalises queries after they are transposed in some versions.
            b = b if a.shape == b.shape else b.transpose(1, 2)
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_recorded_outputs(anywhere):
    model = made("qwen3", "eager")
    ids = prompt(2, 9)["input_ids"]
    with torch.no_grad():
        want = model(ids, output_hidden_states=True, output_attentions=True)
        fuse(model)
        got = model(ids, output_hidden_states=True, output_attentions=True)
    for a, b in zip(got.hidden_states + got.attentions, want.hidden_states + want.attentions):
        assert (a - b).norm() <= 1e-5 * b.norm()
    assert not any(hasattr(t, fused_layers._READY) for t in got.hidden_states)


def test_joined_weights(anywhere, tmp_path):
    """No weight is stored twice; saving, loading, copying and moving work, and what is moved is still right."""
    model = made("llama-bias")
    want, state = logits(model), {k: v.clone() for k, v in model.state_dict().items()}
    memory = sum(p.nbytes for p in model.parameters())
    fusion = fuse(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == memory
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(logits(again), want)

    other = made("llama-bias", seed=1)
    model.load_state_dict(other.state_dict())
    assert (logits(model) - logits(other)).norm() < 1e-5 * want.norm()
    model.load_state_dict(state)

    copied = copy.deepcopy(model)
    model.load_state_dict(other.state_dict())  # does not reach the copy
    assert (logits(copied) - want).norm() < 1e-5 * want.norm()
    model.load_state_dict(state)

    model.double().float()  # gives each weight memory of its own
    assert (logits(model) - want).norm() < 1e-5 * want.norm()
    fusion.undo()
    assert torch.equal(logits(model), want)


def test_projections_that_are_replaced(anywhere):
    """A layer that takes a projection's place after fusing is called."""
    model = made("qwen2")
    fuse(model)
    plain = made("qwen2")
    for m in (model, plain):
        projection = m.model.layers[0].self_attn.k_proj
        m.model.layers[0].self_attn.k_proj = nn.Sequential(projection, nn.Tanh())
    want = logits(plain)
    assert (logits(model) - want).norm() < 1e-5 * want.norm()


def _layer(model: nn.Module) -> nn.Module:
    return model.model.layers[0]


def _halved(module: nn.Module) -> None:
    module.__dict__["forward"] = lambda *args: 0.5 * type(module).forward(module, *args)


def _norm(model: nn.Module, name: str) -> None:
    width = getattr(_layer(model), name).weight.shape[0]
    setattr(_layer(model), name, nn.LayerNorm(width))


# What is done to a model behind fuse(): a fused layer must not go on with what it was.
CHANGES = {
    "a norm's eps": lambda m: [
        setattr(n, "variance_epsilon", 0.5) for n in m.modules() if hasattr(n, "variance_epsilon")
    ],
    "another norm before the MLP": lambda m: _norm(m, "post_attention_layernorm"),
    "another norm before the attention": lambda m: _norm(m, "input_layernorm"),
    "another query norm": lambda m: setattr(_layer(m).self_attn, "q_norm", nn.LayerNorm(16)),
    "a last norm": lambda m: setattr(m.model, "norm", nn.LayerNorm(64)),
    "an activation": lambda m: setattr(_layer(m).mlp, "act_fn", nn.Tanh()),
    "an activation's hook": lambda m: _layer(m).mlp.act_fn.register_forward_hook(lambda *given: given[2] * 2),
    "a projection's forward": lambda m: _halved(_layer(m).self_attn.v_proj),
    "a projection's bias": lambda m: setattr(_layer(m).mlp.up_proj, "bias", nn.Parameter(torch.ones(96))),
    "a projection's data": lambda m: setattr(
        _layer(m).mlp.up_proj.weight, "data", 2 * _layer(m).mlp.up_proj.weight.data
    ),
    "weights in place": lambda m: m.requires_grad_(False) and [p.mul_(1.5) for p in m.parameters()],
    "weights assigned": lambda m: m.load_state_dict({k: 1.5 * v for k, v in m.state_dict().items()}, assign=True),
    "a scale of attention": lambda m: setattr(_layer(m).self_attn, "scaling", 0.01),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_behind_it_counts(anywhere, name):
    model, plain = made("qwen3"), made("qwen3")
    before = logits(plain)
    assert fuse(model) is not None
    for m in (model, plain):
        CHANGES[name](m)
    want = logits(plain)
    assert (logits(model) - want).norm() < 1e-5 * want.norm()
    assert (before - want).norm() > 1e-3 * want.norm(), "the change was to be seen"


class Scaled(nn.Linear):
    """Stands for a quantised or LoRA layer."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_special_projections_stay(anywhere):
    model = made("llama")
    model.model.layers[1].mlp.up_proj.__class__ = Scaled
    want = logits(model)
    fusion = fuse(model)
    assert fusion.counts["gate_up"] == fusion.counts["qkv"] - 1
    assert fusion.skipped == ["MLP: a projection is not a plain linear layer (1 modules)"]
    assert (logits(model) - want).norm() < 1e-5 * want.norm()


def test_reasons(anywhere, monkeypatch):
    assert "no layers of a supported architecture" in why_not(build("minicpm3", "sdpa"))
    assert fuse(build("minicpm3", "sdpa")) is None
    assert fuse(nn.Linear(3, 4)) is None
    model = made("qwen3")
    assert why_not(model) is None
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    assert "replaced" in why_not(model)
    del model.model.layers[0].mlp.forward
    fusion = fuse(model)
    assert "already" in why_not(model)
    fusion.undo()
    known = fused._names
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_names", lambda arch: {**known(arch), "MLP": {"other"}})
        assert "Qwen3MLP" in why_not(model)
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    assert fuse(model).skipped == ["MLP: unknown activation (1 modules)"]
    assert "not loaded" in why_not(build("llama", "sdpa").to("meta"))


def test_dropping_a_fused_model_frees_it(anywhere):
    import gc
    import weakref

    model = made("llama")
    fusion = fuse(model)
    gc.collect()
    gc.disable()
    try:
        weight = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
        del model, fusion
        assert weight() is None, "there is a reference cycle"
    finally:
        gc.enable()


def test_classes_keep_their_names(anywhere):
    model = made("qwen3")
    fuse(model)
    layer = model.model.layers[0]
    assert type(layer).__name__ == "Qwen3DecoderLayer"
    assert isinstance(layer, FusedLayer)
    assert isinstance(layer, transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer)
    assert isinstance(model.model.norm, FusedNorm)
    assert isinstance(layer.mlp.down_proj, nn.Linear)
    assert type(layer.mlp.down_proj).__name__ == "Linear"


def test_a_router_by_softmax(anywhere, monkeypatch):
    """Qwen3-MoE's layers are those of Qwen3, with experts in the place of MLPs."""
    model, calls, original = model_list.build("qwen3_moe"), [], fused_layers.route
    monkeypatch.setattr(fused_layers, "route", lambda *a, **k: (calls.append(k["scores"]), original(*a, **k))[1])
    want = logits(model)
    fusion = fuse(model)
    n = model.config.num_hidden_layers
    assert fusion.counts["TopKRouter"] == fusion.counts["qkv"] == fusion.counts["DecoderLayer"] == n
    assert (logits(model) - want).norm() < 1e-5 * want.norm()
    assert set(calls) == {"softmax"} and len(calls) == 4 * n
    fusion.undo()
    assert torch.equal(logits(model), want)


def test_gpt_oss(anywhere, monkeypatch):
    """Sinks, half rotary factors, norms that round once, and a mixture that also returns its scores."""
    model, calls, original = model_list.build("gpt_oss"), [], fused_layers.route
    monkeypatch.setattr(fused_layers, "route", lambda *a, **k: (calls.append(k["scores"]), original(*a, **k))[1])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    want = logits(model)
    fusion = fuse(model)
    n = model.config.num_hidden_layers
    assert fusion.counts["TopKRouter"] == fusion.counts["qkv"] == fusion.counts["DecoderLayer"] == n
    assert "MLP" not in fusion.counts and fusion.counts["RMSNorm"] == 2 * n + 1
    assert (logits(model) - want).norm() < 1e-5 * want.norm()
    assert set(calls) == {"softmax_chosen"} and len(calls) == 4 * n
    fusion.undo()
    assert torch.equal(logits(model), want)
