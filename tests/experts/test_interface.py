"""When our implementation of experts runs, and what it leaves to transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from models import build, prompt
from torch import nn

from hf_sparsekv import optimize, unoptimize
from hf_sparsekv.experts import interface, recognised
from hf_sparsekv.experts.interface import choose, chosen, use_ours
from hf_sparsekv.experts.recognised import gate_of
from hf_sparsekv.ops.layers.experts import Gate


@pytest.fixture
def calls(monkeypatch):
    """Our implementation runs on the CPU; the gates of its calls."""
    seen, real = [], interface.experts
    monkeypatch.setattr(interface, "accelerated", lambda t: True)
    monkeypatch.setattr(interface, "experts", lambda *a: (seen.append(a[5]), real(*a))[1])
    return seen


def first_experts(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if hasattr(module, "is_transposed"))


def test_optimize_uses_it_and_gives_it_back(calls):
    model = build("gpt-oss", "sparsekv")
    model.set_experts_implementation("eager")
    optimize(model)
    assert chosen(model) == {"": "sparsekv"}
    with torch.no_grad():
        model(prompt(1, 5)["input_ids"])
    assert len(calls) == model.config.num_hidden_layers
    unoptimize(model)
    assert chosen(model) == {"": "eager"}


def test_what_the_user_chose_stays():
    model = build("gpt-oss", "sparsekv")
    model.set_experts_implementation("sonicmoe")
    optimize(model)
    assert chosen(model) == {"": "sonicmoe"}
    unoptimize(model)
    optimize(model)
    model.set_experts_implementation("batched_mm")  # since then
    unoptimize(model)
    assert chosen(model) == {"": "batched_mm"}


def test_a_model_without_experts_is_left_alone():
    model = build("llama", "sparsekv")
    before = model.get_experts_implementation()
    use_ours(model)
    choose(model, {})
    assert chosen(model) == {} and model.get_experts_implementation() == before


def outside(change: str, model: nn.Module) -> nn.Module:
    """A model that our kernels do not serve."""
    experts = first_experts(model)
    if change == "dtype":
        experts.half()
    elif change == "a parameter of another kind":
        experts.down_proj = type("Bytes", (nn.Parameter,), {})(experts.down_proj.detach())
    return model


@pytest.mark.parametrize("change", ["gradients", "autocast", "dtype", "a parameter of another kind", "on a CPU"])
def test_what_is_left_to_transformers(calls, monkeypatch, change):
    """It gives transformers' own results there, gradients included."""
    model = outside(change, build("gpt-oss", "eager"))
    experts = first_experts(model)
    if change == "on a CPU":
        monkeypatch.setattr(interface, "accelerated", lambda t: t.is_cuda)
    x = torch.randn(3, experts.hidden_size).requires_grad_(change == "gradients")
    index, weights = torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    with torch.set_grad_enabled(change == "gradients"), torch.autocast("cpu", enabled=change == "autocast"):
        results = []
        for how in ("grouped_mm", "sparsekv"):
            model.set_experts_implementation(how)
            results.append(experts(x, index, weights))
    assert calls == [] and torch.equal(*results)
    if change == "gradients":
        results[1].sum().backward()
        assert x.grad is not None


def test_experts_elsewhere_add_nothing(calls):
    """Expert parallel models give an index of no expert to those of other ranks."""
    model = build("gpt-oss", "eager")
    experts = first_experts(model)
    x, weights = torch.randn(4, experts.hidden_size), torch.rand(4, 2)
    here = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]])
    use_ours(model)
    with torch.no_grad():
        both = experts(x, here, weights)
        one = experts(x, torch.where(here == 0, 0, experts.num_experts), weights)
        other = experts(x, torch.where(here == 1, 1, experts.num_experts), weights)
    assert len(calls) == 3
    torch.testing.assert_close(one + other, both)


# ---------------------------------------------------------------------- what stands between the products


class Experts(nn.Module):
    """As transformers decorates them."""

    has_gate, limit = True, 3.0

    def __init__(self, act: object) -> None:
        super().__init__()
        self.act_fn = act

    def _apply_gate(self, values: torch.Tensor) -> torch.Tensor:
        first, up = values.chunk(2, dim=-1)
        return self.act_fn(first) * up


def test_another_activation_is_found_again():
    module = Experts(nn.SiLU())
    assert gate_of(module) == Gate()
    module.act_fn = nn.GELU(approximate="tanh")
    assert gate_of(module) == Gate("gelu_tanh")
    module.act_fn = nn.Softplus()
    assert gate_of(module) == module._apply_gate  # code that no kernel knows


def test_the_gate_is_found_under_another_default_device():
    module = Experts(nn.SiLU())
    with torch.device("meta"):
        assert gate_of(module) == Gate()


def test_numbers_that_change_are_seen():
    module = Experts(nn.SiLU())
    module._apply_gate = lambda v: (
        torch.nn.functional.silu(v[..., ::2].clamp(max=module.limit)) * v[..., 1::2].clamp(-module.limit, module.limit)
    )
    module.limit = 2.0
    assert gate_of(module) == Gate(interleaved=True, limit=2.0)
    module.limit = 5.0
    assert gate_of(module) == Gate(interleaved=True, limit=5.0)


def test_hooks_of_an_activation_are_called():
    module, seen = Experts(nn.SiLU()), []
    hook = module.act_fn.register_forward_hook(lambda *a: seen.append(1))
    gate_of(module)(torch.zeros(1, 4))
    assert seen == [1]
    hook.remove()
    assert gate_of(module) == Gate()


def test_code_that_fails_on_a_cpu_stays():
    def act(values):
        raise RuntimeError("only on a device")

    assert gate_of(module := Experts(act)) == module._apply_gate


def test_modules_are_not_kept():
    before = len(recognised._found)
    module = Experts(nn.Softplus())
    gate_of(module)
    assert len(recognised._found) == before + 1
    del module
    assert len(recognised._found) == before


def test_a_copy_has_its_own():
    module = Experts(nn.SiLU())
    gate_of(module)
    other = copy.deepcopy(module)
    other.act_fn = nn.ReLU()
    assert gate_of(other) == Gate("relu") and gate_of(module) == Gate()
