"""Every model of transformers that asks for an implementation of its experts gets ours, and computes the same.

Without a GPU the definition runs, with the test for CUDA lifted.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import model_list
import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_sparsekv.experts import interface
from hf_sparsekv.ops.layers.experts import Gate

MODELS = Path(transformers.__file__).parent / "models"
FAMILIES = sorted(
    path.parent.name
    for path in MODELS.glob("*/modeling_*.py")
    if re.search(r"^@use_experts_implementation", path.read_text(), re.MULTILINE)
)
KINDS = sorted(kind for kind in CONFIG_MAPPING if model_type_to_module_name(kind) in FAMILIES)
TELLING = ["gpt_oss", "qwen3_moe", "nemotron_h", "deepseek_v4", "granitemoe", "mixtral"]
# Parts of models that hold no text decoder, and models that are none.
_NO_DECODER = ("_vision", "_audio", "_encoder", "_vision_model", "_mm_model", "code_predictor")
_SIZES = {"hidden_size": 24, "intermediate_size": 20, "moe_intermediate_size": 20, "moe_latent_size": None}


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let our implementation run on the CPU. Returns the gates of its calls."""
    seen, real = [], interface.experts
    monkeypatch.setattr(interface, "accelerated", lambda t: True)
    monkeypatch.setattr(interface, "experts", lambda *a: (seen.append(a[5]), real(*a))[1])
    return seen


class Sizes:
    """A configuration of small sizes, with the activation and the limits of a family's own."""

    def __init__(self, family: str) -> None:
        file = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        kinds = [kind for kind in vars(file).values() if isinstance(kind, type) and issubclass(kind, PreTrainedConfig)]
        self._own = [kind() for kind in kinds if kind is not PreTrainedConfig and kind.__module__ == file.__name__]

    def __getattr__(self, name: str) -> object:
        if name in _SIZES:
            return _SIZES[name]
        if "experts" in name:
            return 5
        found = [getattr(own, name) for own in self.__dict__["_own"] if getattr(own, name, None) is not None]
        if not found:
            raise AttributeError(name)
        return 24 if isinstance(found[0], int) and "size" in name else found[0]


def experts_of(family: str) -> list[nn.Module]:
    """The family's modules of experts, tiny, of random weights."""
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [kind for kind in vars(file).values() if isinstance(kind, type) and hasattr(kind, "_apply_gate")]
    generator, made = torch.Generator().manual_seed(0), []
    for kind in (kind for kind in classes if kind.__module__ == file.__name__):
        module = kind(Sizes(family))
        for parameter in module.parameters():
            parameter.data.normal_(std=0.5, generator=generator)
        module.config = SimpleNamespace(_experts_implementation="eager")
        made.append(module)
    return made


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_each_family(family, anywhere):
    """For one token and for several, by kernels for a gate that they know: none of transformers' own is left over."""
    modules = experts_of(family)
    assert modules
    for module in modules:
        for tokens in (1, 7):
            generator = torch.Generator().manual_seed(tokens)
            x = 3 * torch.randn(tokens, module.down_proj.shape[2 if module.is_transposed else 1], generator=generator)
            index = torch.stack([torch.randperm(module.num_experts, generator=generator)[:2] for _ in range(tokens)])
            weights = torch.rand(tokens, 2, generator=generator)
            module.config._experts_implementation = "eager"
            want = module(x, index, weights)
            module.config._experts_implementation = "sparsekv"
            anywhere.clear()
            got = module(x, index, weights)
            assert len(anywhere) == 1 and isinstance(anywhere[0], Gate), anywhere
            assert (got - want).norm() <= 3e-6 * want.norm()


@torch.no_grad()
@pytest.mark.few(kind=TELLING)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith(_NO_DECODER)])
def test_whole_models(kind, anywhere):
    """Greedy tokens of transformers' own, in float32, for those that a tiny one can be made of."""
    try:
        model = model_list.build(kind)
    except Exception as error:
        pytest.skip(f"no tiny model: {str(error)[:90]}")
    if not interface.chosen(model):
        pytest.skip("the tiny model has no experts")
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    given = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    model.set_experts_implementation("eager")
    torch.manual_seed(0)
    want = model.generate(ids, **given)
    interface.use_ours(model)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, **given), want)
    held = [module for module in model.modules() if hasattr(module, "is_transposed")]
    assert len(anywhere) >= 5 * bool(held)
