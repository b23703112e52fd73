"""Models whose weights are quantised, or brought for each call: the tokens of plain sdpa, and what is said.

Without a GPU: fused code runs with the test for CUDA lifted, captured steps are imitated.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from caches import FULL, two_level
from captured import Imitation
from models import build, prompt
from torch import nn

from hf_sparsekv import optimize
from hf_sparsekv.cuda_graph import optimize as optimizing
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.fusion import layers as fused_layers
from hf_sparsekv.fusion.fuse import fuse
from hf_sparsekv.fusion.joined_linear import quantised

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


def replaced(model: nn.Module, make) -> nn.Module:
    """``model`` with other linear layers in its decoder; the output embedding stays, as libraries leave it."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and name != "lm_head":
                setattr(parent, name, make(child))
    return model


def bnb4(layer: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    new = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32)
    new.weight = bnb.nn.Params4bit(layer.weight.detach().clone(), requires_grad=False)
    return new.to("cpu")


def bnb8(layer: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    new = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False, threshold=0.0)
    new.weight = bnb.nn.Int8Params(layer.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
    return new.to("cpu")


def torchao(config: str):
    def make(layer: nn.Linear) -> nn.Module:
        library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        holder = nn.Sequential(copy.deepcopy(layer))
        library.quantize_(holder, getattr(library, config)())
        return holder[0]

    return make


FORMATS = {
    "packed": Packed.of,
    "scaled": Scaled.of,
    "elsewhere": Elsewhere.of,
    "bnb4": bnb4,
    "bnb8": bnb8,
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-fp8": torchao("Float8WeightOnlyConfig"),
}


@pytest.fixture
def as_on_gpu(monkeypatch):
    """``optimize()`` fuses and captures on the CPU."""
    monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)
    monkeypatch.setattr(optimizing, "StepRunner", Imitation)


def told(call) -> tuple[object, list[str]]:
    """What ``call()`` returns, and the warnings of ours."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = call()
    ours = ("quantised linear layers", "decode steps run eagerly")
    return result, [str(w.message) for w in seen if str(w.message).startswith(ours)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_quantised_models_are_captured_and_right(as_on_gpu, form, name):
    plain = replaced(build(name, "sdpa"), FORMATS[form])
    expected = plain.generate(**(inputs := prompt(2, 90, (0, 20))), **GO)
    ours = replaced(build(name, "sparsekv"), FORMATS[form])
    _, said = told(lambda: optimize(ours))
    layers = sum(quantised(ours).values())
    assert len(said) == 1
    assert str(layers) in said[0]
    found, more = told(lambda: ours.generate(**inputs, past_key_values=two_level(**FULL), **GO))
    assert torch.equal(found, expected)
    assert more == []
    runner = runner_of(ours)
    assert runner.replays > GO["max_new_tokens"] - 5
    counts = runner.fusion.counts
    assert counts["Attention"] == counts["MLP"] == counts["DecoderLayer"] == 2
    assert "qkv" not in counts
    assert "gate_up" not in counts
    assert counts["linear"] == 1  # the output embedding


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


def test_experts_with_weights_of_another_kind_keep_their_own_code(as_on_gpu):
    class Bytes(nn.Parameter):
        pass

    model = build("deepseek-v3", "sparsekv")
    experts = next(module for module in model.modules() if type(module).__name__ == "DeepseekV3Experts")
    experts.down_proj = Bytes(experts.down_proj.detach())
    fusion = fuse(model)
    assert "Experts" not in fusion.counts
    assert any("Experts: its weights are quantised" in why for why in fusion.skipped)
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
