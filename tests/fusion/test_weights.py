"""Models whose weights are quantised, or brought for each call: the tokens of plain sdpa, and what is said.

Without a GPU: fused code runs with the test for CUDA lifted, captured steps are imitated.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from caches import FULL, two_level
from captured import Imitation
from models import build, prompt
from quantised_layers import IMITATIONS, KNOWN, Bnb4, Bnb8, Fp8, replaced
from torch import nn

from hf_sparsekv import optimize, unoptimize
from hf_sparsekv.cuda_graph import optimize as optimizing
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.fusion import fuse as fusing
from hf_sparsekv.fusion import layers as fused_layers
from hf_sparsekv.fusion.fuse import fuse
from hf_sparsekv.fusion.joined_linear import quantised
from hf_sparsekv.fusion.quantised_weight import Kept, found
from hf_sparsekv.ops.layers.quantised_linear import dequantise

pytestmark = pytest.mark.quick
GO = {"do_sample": False, "max_new_tokens": 24}


class Packed(nn.Linear):
    """Stores two numbers of 4 bits a byte, and a scale a row: a subclass with other weights, as ``Linear4bit`` is."""

    @classmethod
    def of(cls, layer: nn.Linear) -> Packed:
        new = cls(layer.in_features, layer.out_features, bias=layer.bias is not None)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 7
        codes = (layer.weight.detach() / scale).round().to(torch.int8) + 8
        new.weight = nn.Parameter((codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8).view(-1, 1), False)
        new.bias = layer.bias
        new.register_buffer("scale", scale)
        return new

    def forward(self, x):
        both = self.weight.view(self.out_features, -1)
        codes = torch.stack((both // 16, both % 16), -1).view(self.out_features, self.in_features)
        return F.linear(x, ((codes.to(x.dtype) - 8) * self.scale.to(x.dtype)), self.bias)


class Scaled(nn.Linear):
    """Weights of the usual shape, 8 bits each, beside a scale: as transformers' ``FP8Linear``."""

    @classmethod
    def of(cls, layer: nn.Linear) -> Scaled:
        new = cls(layer.in_features, layer.out_features, bias=layer.bias is not None)
        scale = layer.weight.detach().abs().amax() / 448
        new.weight = nn.Parameter((layer.weight.detach() / scale).to(torch.float8_e4m3fn), False)
        new.bias = layer.bias
        new.register_buffer("weight_scale_inv", scale)
        return new

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale_inv, self.bias)


class Elsewhere(nn.Module):
    """No linear layer at all, and no ``weight``: as those of GPTQ and AWQ."""

    @classmethod
    def of(cls, layer: nn.Linear) -> Elsewhere:
        new = cls()
        new.in_features, new.out_features = layer.in_features, layer.out_features
        new.register_buffer("scales", layer.weight.detach().abs().amax(1, keepdim=True) / 127)
        new.register_buffer("qweight", (layer.weight.detach() / new.scales).round().to(torch.int8))
        new.bias = layer.bias
        return new

    def forward(self, x):
        return F.linear(x, self.qweight.to(x.dtype) * self.scales, self.bias)


UNKNOWN = {"packed": Packed.of, "scaled": Scaled.of, "elsewhere": Elsewhere.of}
FORMATS = UNKNOWN | KNOWN


@pytest.fixture
def as_on_gpu(monkeypatch):
    """``optimize()`` fuses and captures on the CPU."""
    monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)
    monkeypatch.setattr(optimizing, "StepRunner", Imitation)


def told(call) -> tuple[object, list[str]]:
    """The result of ``call()``, and the warnings of ours."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = call()
    ours = ("quantised linear layers", "decode steps run eagerly")
    return result, [str(w.message) for w in seen if str(w.message).startswith(ours)]


def all_quantised(model: nn.Module) -> int:
    return sum(quantised(model).values())


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "form"), [*(("llama", form) for form in FORMATS), *(("phi3", form) for form in UNKNOWN)]
)
def test_quantised_models_are_captured_and_right(as_on_gpu, name, form):
    plain = replaced(build(name, "sdpa"), FORMATS[form])
    expected = plain.generate(**(inputs := prompt(2, 90, (0, 20))), **GO)
    ours = replaced(build(name, "sparsekv"), FORMATS[form])
    layers = all_quantised(ours)
    _, said = told(lambda: optimize(ours))
    runner = runner_of(ours)
    fusion = runner.fusion
    # Blocks of 64 of bitsandbytes' 4 bits do not divide the 96 inputs of a down projection.
    left = layers if form in UNKNOWN else 2 if form in ("bnb4", "bnb4-nested") else 0
    assert fusion.counts.get("quantised", 0) == layers - left
    assert sum(fusion.quantised.values()) == left
    assert len(said) == bool(left)
    assert all(str(left) in one for one in said)
    found, more = told(lambda: ours.generate(**inputs, past_key_values=two_level(**FULL), **GO))
    assert torch.equal(found, expected)
    assert more == []
    assert runner.replays > GO["max_new_tokens"] - 5
    counts = fusion.counts
    assert counts["Attention"] == counts["MLP"] == counts["DecoderLayer"] == 2
    assert "qkv" not in counts
    assert "gate_up" not in counts
    assert counts["linear"] == 1  # the output embedding


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:quantised linear layers stay as they are")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("llama", form) for form in KNOWN),
        *(("phi3", form) for form in IMITATIONS),
        *(("deepseek-v3", form) for form in ("bnb8-like", "compressed-fp8-like")),
    ],
)
def test_our_kernel_multiplies_in_steps_of_known_formats(as_on_gpu, monkeypatch, name, form):
    """One row: of float32 the operator takes no more. Prompts go to the library."""
    plain = replaced(build(name, "sdpa"), KNOWN[form])
    expected = plain.generate(**(inputs := prompt(1, 90)), **GO)
    ours = replaced(build(name, "sparsekv"), KNOWN[form])
    calls = []
    operator = fused_layers.quantised_linear
    monkeypatch.setattr(fused_layers, "quantised_linear", lambda x, *more: calls.append(x) or operator(x, *more))
    optimize(ours)
    fused = runner_of(ours).fusion.counts["quantised"]
    found = ours.generate(**inputs, past_key_values=two_level(**FULL), **GO)
    assert torch.equal(found, expected)
    assert {x.shape[:-1].numel() for x in calls} == {1}
    assert len(calls) >= fused * (GO["max_new_tokens"] - 1)
    unoptimize(ours)
    calls.clear()
    assert torch.equal(ours.generate(**inputs, past_key_values=two_level(**FULL), **GO), expected)
    assert calls == []


@pytest.mark.parametrize("form", KNOWN)
def test_undo_gives_the_library_its_layers_back(form):
    model = replaced(build("llama", "sparsekv"), KNOWN[form])
    kinds = [type(module) for module in model.modules()]
    attributes = [set(module.__dict__) for module in model.modules()]
    fusion = fuse(model)
    q_proj = model.model.layers[0].self_attn.q_proj
    assert isinstance(q_proj, fused_layers.FusedQuantised)
    assert type(q_proj).__name__ in {kind.__name__ for kind in kinds}
    fusion.undo()
    assert [type(module) for module in model.modules()] == kinds
    assert [set(module.__dict__) for module in model.modules()] == attributes
    without = fuse(model, small_batch=False)
    assert "quantised" not in without.counts
    assert sum(without.quantised.values()) == all_quantised(model)
    without.undo()


def test_plain_models_have_nothing_to_say(as_on_gpu):
    _, said = told(lambda: optimize(build("llama", "sparsekv")))
    assert said == []


def test_some_layers_quantised(as_on_gpu):
    model = build("llama", "sparsekv")
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Packed.of(mlp.up_proj)
    fusion = fuse(model)
    assert fusion.quantised == {"Packed": 1}
    assert fusion.counts["gate_up"] == 1  # the other layer's
    assert fusion.counts["qkv"] == 2
    fusion.undo()


# ---------------------------------------------------------------------- where libraries keep weights


@pytest.mark.parametrize("form", KNOWN)
def test_weights_are_found_where_they_are(form):
    """Codes are not copied, results are the layer's, and nothing is made twice; before and behind a first call."""
    layer, x = KNOWN[form](nn.Linear(128, 64, bias=False)), torch.randn(3, 128)
    kept = Kept()
    weight = found(layer, kept)
    assert weight is not None
    held = getattr(layer.weight, "qdata", layer.weight)
    assert weight.codes.data_ptr() == held.data_ptr()
    for again in (found(layer), found(layer, kept), layer(x) is not None and found(layer, kept)):
        torch.testing.assert_close(F.linear(x, dequantise(again)), layer(x), rtol=1e-5, atol=1e-5)
    assert found(layer, kept).scales is found(layer, kept).scales


def test_weights_that_change_are_found_anew():
    first, second = Bnb8(nn.Linear(64, 32)), Bnb8(nn.Linear(64, 32))
    kept = Kept()
    before = found(first, kept)
    old = before.scales.clone()
    first.weight.SCB.mul_(2)
    doubled = found(first, kept)
    torch.testing.assert_close(dequantise(doubled), dequantise(found(first)))
    assert torch.equal(doubled.scales, 2 * old)
    assert doubled.scales is before.scales, "captured steps know where they are"
    first.weight = second.weight
    assert torch.equal(dequantise(found(first, kept)), dequantise(found(second)))
    layer = Fp8(nn.Linear(64, 32))
    weight = found(layer, kept := Kept())
    assert weight.scales.data_ptr() == layer.weight_scale_inv.data_ptr()
    layer.weight_scale_inv.data = layer.weight_scale_inv.data.clone()
    assert found(layer, kept).scales.data_ptr() == layer.weight_scale_inv.data_ptr()


def four_bits(**changes) -> nn.Module:
    layer = Bnb4(nn.Linear(128, 64))
    vars(layer.weight.quant_state).update(changes)
    return layer


def blocks(size: int, inputs: int) -> nn.Module:
    layer = Fp8(nn.Linear(inputs, 64))
    layer.block_size = (32, size)
    return layer


def wide8() -> nn.Module:
    layer = Bnb8(nn.Linear(64, 32))
    layer.state.has_fp16_weights = True
    return layer


STRANGE = {
    "plain": lambda: nn.Linear(64, 32),
    "no layer": lambda: nn.LayerNorm(64),
    "another's class of that name": lambda: type("Linear4bit", (nn.Module,), {"__module__": "elsewhere"})(),
    "no state yet": lambda: four_bits(shape=None),
    "packed for the CPU": lambda: four_bits(packing_format_for_cpu=True),
    "blocks of two rows": lambda: four_bits(blocksize=256, absmax=torch.ones(32)),
    "another codebook": lambda: four_bits(code=torch.ones(256)),
    "16 bits": wide8,
    "blocks that the operator cuts otherwise": lambda: blocks(30, 128),
    "dequantised": lambda: setattr(layer := Fp8(nn.Linear(64, 32)), "weight", nn.Linear(64, 32).weight) or layer,
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_other_layers_are_no_weights(make):
    assert found(make()) is None


def test_what_the_kernel_does_not_take_goes_to_the_library(as_on_gpu, monkeypatch):
    """Many rows, several in float32, gradients, another width, weights that are gone: the layer's own code."""
    model = build("llama", "sparsekv")
    model.model.layers[0].self_attn.q_proj = layer = Bnb8(model.model.layers[0].self_attn.q_proj)
    fusion, calls = fuse(model), []
    operator = fused_layers.quantised_linear
    monkeypatch.setattr(fused_layers, "quantised_linear", lambda x, *more: calls.append(x) or operator(x, *more))
    with torch.no_grad():
        for rows, served in ((1, 1), (2, 0), (17, 0)):
            assert layer(torch.randn(rows, 1, 64)).shape == (rows, 1, 64)
            assert len(calls) == served
            calls.clear()
        for rows, served in ((2, 1), (16, 1), (17, 0)):
            layer(torch.randn(rows, 64).half())
            assert len(calls) == served
            calls.clear()
        layer.state.has_fp16_weights = True
        layer(torch.randn(1, 64))
        layer.state.has_fp16_weights = False
    layer(torch.randn(1, 64))
    assert calls == []
    fusion.undo()


def test_layers_that_the_gpu_cannot_serve_are_left_alone(monkeypatch):
    """And counted as such: 8-bit floats on an older GPU, 4 bits without their kernel."""
    model = replaced(build("llama", "sparsekv"), IMITATIONS["fp8-like"])
    asked = []
    monkeypatch.setattr(fusing, "serves_quantised", lambda x, weight: asked.append(x.shape) or False)
    fusion = fuse(model)
    assert set(asked) == {(1, 64), (1, 96)}
    assert "quantised" not in fusion.counts
    assert fusion.quantised == {"FP8Linear": 14}
    fusion.undo()


# ---------------------------------------------------------------------- weights that are brought for each call


def cpu_offloaded(model, path):
    import accelerate

    return accelerate.cpu_offload(model, execution_device="cpu")


def disk_offloaded(model, path):
    import accelerate

    return accelerate.disk_offload(model, str(path), execution_device="cpu")


def partly(model, path):
    """As ``device_map={..., "model.layers.1": "disk"}``."""
    import accelerate

    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(path), force_hooks=True)


@pytest.mark.few
@pytest.mark.parametrize("offload", [cpu_offloaded, disk_offloaded, partly])
@pytest.mark.parametrize("name", ["llama", "phi3", "glm4-moe-lite"])
def test_offloaded_weights_run_eagerly_and_say_why(as_on_gpu, tmp_path, offload, name):
    pytest.importorskip("accelerate")
    expected = build(name, "sdpa").generate(**(inputs := prompt(2, 90, (0, 20))), **GO)
    model = offload(build(name, "sparsekv"), tmp_path)
    ours, said = told(lambda: optimize(model))
    assert said == []
    assert runner_of(ours).fusion is None

    def twice():
        for _ in range(2):
            found = ours.generate(**inputs, past_key_values=two_level(**FULL), **GO)
            assert torch.equal(found, expected)

    _, said = told(twice)
    assert len(said) == 1
    assert "weights are offloaded" in said[0]
    assert runner_of(ours).captures == 0
