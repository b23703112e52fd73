"""Experts that stay in MXFP4: loaded, encoded again, saved; the same tokens as those that transformers dequantises."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import transformers as tf
from caches import CACHES, FULL
from models import build, prompt
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_sparsekv import keep_mxfp4, optimize, unoptimize
from hf_sparsekv.cli.loading import load
from hf_sparsekv.experts import mxfp4
from hf_sparsekv.experts.mxfp4 import CodedExperts
from hf_sparsekv.ops.layers.experts import Mxfp4, dequantise
from hf_sparsekv.tuning.random_model import numbers

GO = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128},
    **{"num_experts_per_tok": 2, "sliding_window": 16, "max_position_embeddings": 512, "eos_token_id": None},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tiny gpt-oss as it is published: codes and scales of its experts."""
    torch.manual_seed(0)
    model = tf.GptOssForCausalLM(tf.GptOssConfig(**SIZES))
    state = {}
    for name, weight in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, d, n = weight.shape
            state[f"{name}_blocks"] = torch.randint(0, 256, (count, n, d // 32, 16), dtype=torch.uint8)
            state[f"{name}_scales"] = torch.randint(122, 125, (count, n, d // 32), dtype=torch.uint8)
        else:
            state[name] = (torch.randn(weight.shape) * 0.3 + ("norm" in name)).to(torch.bfloat16)
    path = tmp_path_factory.mktemp("gpt-oss")
    save_file(state, path / "model.safetensors", {"format": "pt"})
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    model.config.save_pretrained(path)
    return str(path)


def plain(path: str, **named) -> torch.nn.Module:
    """As transformers loads it: dequantised, to bfloat16 whatever the dtype."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **named).float().eval()


def kept(path: str, **named) -> torch.nn.Module:
    config = keep_mxfp4(AutoConfig.from_pretrained(path))
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, **named).eval()


def coded(model: torch.nn.Module) -> list[CodedExperts]:
    return [module for module in model.modules() if isinstance(module, CodedExperts)]


@pytest.fixture(params=["kernels", "one by one"])
def way(request, monkeypatch) -> str:
    """Our operator (its definition, on a CPU), or experts one after another."""
    monkeypatch.setattr(mxfp4, "accelerated", lambda t: request.param == "kernels")
    return request.param


def test_a_checkpoint_keeps_its_codes(checkpoint, way):
    model, other = kept(checkpoint), plain(checkpoint)
    held = coded(model)
    assert len(held) == 2 and coded(other) == []
    stored = load_file(f"{checkpoint}/model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(held[1].down_proj_blocks, stored[f"{name}_blocks"])
    weights = dequantise(held[1].weight("down_proj"), torch.float32)
    assert torch.equal(weights.transpose(1, 2), other.get_submodule("model.layers.1.mlp.experts").down_proj)
    ids = prompt(2, 30, None)["input_ids"] % 128
    with torch.no_grad():
        for given in (ids, ids[:, :1]):
            want, got = other(given).logits, model(given).logits
            assert (got - want).norm() <= 1e-5 * want.norm()
    given = {"attention_mask": torch.ones_like(ids), **GO}
    assert torch.equal(model.generate(ids, **given), other.generate(ids, **given))


def test_our_caches_and_optimize(checkpoint, way):
    model, other = kept(checkpoint, attn_implementation="sparsekv"), plain(checkpoint)
    ids = prompt(1, 60)["input_ids"] % 128
    given = {"attention_mask": torch.ones_like(ids), **GO}
    optimize(model)
    got = model.generate(ids, past_key_values=CACHES["device"](model_config=model.config, **FULL), **given)
    assert torch.equal(got, other.generate(ids, **given))
    unoptimize(model)


def test_a_dequantised_model_becomes_codes_again(checkpoint, way):
    other = plain(checkpoint)
    model = keep_mxfp4(copy.deepcopy(other))
    assert len(coded(model)) == 2
    for module in coded(model):
        assert not any(parameter.ndim == 3 and parameter.is_floating_point() for parameter in module.parameters())
    ids = prompt(1, 30)["input_ids"] % 128
    with torch.no_grad():
        want = other(ids).logits
        assert (model(ids).logits - want).norm() <= 1e-5 * want.norm()


def test_it_is_saved_as_it_was(checkpoint, tmp_path):
    kept(checkpoint).save_pretrained(tmp_path)
    stored, again = load_file(f"{checkpoint}/model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(again)
    assert all(torch.equal(stored[name].to(again[name].dtype), again[name]) for name in stored)
    assert mxfp4.is_coded(AutoConfig.from_pretrained(tmp_path))
    assert len(coded(kept(str(tmp_path)))) == 2


def test_commands_keep_it(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "here")
    numbers(128).save_pretrained(tmp_path / "here")
    _, model = load(str(tmp_path / "here"), torch.float32, torch.device("cpu"))
    assert len(coded(model)) == 2


def test_hooks_and_gradients_elsewhere_stay(checkpoint):
    """The input's gradients: codes have none."""
    module = coded(kept(checkpoint))[0]
    x = torch.randn(3, 64, requires_grad=True)
    module(x, torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.rand(3, 2)).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and module.down_proj_bias.requires_grad


def test_what_is_not_in_mxfp4():
    with pytest.raises(ValueError, match="not in MXFP4"):
        keep_mxfp4(tf.GptOssConfig(**SIZES))
    with pytest.raises(ValueError, match="no experts"):
        keep_mxfp4(build("llama", "sdpa"))
    with pytest.raises(ValueError, match=r"does not hold model\.layers\.0\.mlp\.experts\.gate_up_proj exactly"):
        keep_mxfp4(tf.GptOssForCausalLM(tf.GptOssConfig(**SIZES)))
    with pytest.raises(ValueError, match="no multiple of 32"):
        keep_mxfp4(tf.GptOssForCausalLM(tf.GptOssConfig(**{**SIZES, "intermediate_size": 40})))


def test_scales_beyond_the_kernels(checkpoint, tmp_path):
    state = load_file(f"{checkpoint}/model.safetensors")
    state["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 250
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    AutoConfig.from_pretrained(checkpoint).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a scale of 2"):
        kept(str(tmp_path))


def test_shapes_of_weights():
    module = CodedExperts(tf.GptOssForCausalLM(tf.GptOssConfig(**SIZES)).model.layers[0].mlp.experts)
    assert isinstance(module.weight("gate_up_proj"), Mxfp4) and module.weight("gate_up_proj").shape == (4, 192, 64)
    assert module.weight("down_proj").shape == (4, 64, 96)
