"""Quantised layers on a real GPU: kernels instead of references, captured steps instead of imitated ones."""

from __future__ import annotations

import pytest
import torch
from caches import FULL, two_level
from models import build, prompt
from quantised_layers import IMITATIONS, Bnb8, named, replaced

from hf_sparsekv import optimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.fusion.fuse import fuse

pytestmark = pytest.mark.gpu
GO = {"do_sample": False, "max_new_tokens": 24}


@named("Linear8bitLt", "bitsandbytes.nn.modules")
class AsksTheHost(Bnb8):
    """As LLM.int8 with a threshold: no graph can hold what it asks."""

    def forward(self, x):
        assert x.abs().amax().item() < 1e9
        return super().forward(x)


class WideBlocks(IMITATIONS["bnb4-like"]):
    """As bitsandbytes cuts 4 bits, which leaves out the down projections: their 96 inputs are no whole blocks."""

    SIZE = 64


named("Linear4bit", "bitsandbytes.nn.modules")(WideBlocks)
FORMATS = {"bnb4-wide-like": WideBlocks} | IMITATIONS | {"bnb8-outliers-like": AsksTheHost}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_steps_are_captured_and_right(name, form):
    """Tokens of the layers' own code under sdpa; in float32, of one row, which 4 bits leave to it."""
    plain = replaced(build(name, "sdpa").cuda(), FORMATS[form])
    inputs = {key: t.cuda() for key, t in prompt(1, 90).items()}
    expected = plain.generate(**inputs, **GO)
    ours = optimize(replaced(build(name, "sparsekv").cuda(), FORMATS[form]))
    runner = runner_of(ours)
    if not runner.fusion.counts.get("quantised"):
        pytest.skip(f"this GPU does not serve {runner.fusion.quantised}")
    assert runner.fusion.quantised == ({"Linear4bit": 2} if form == "bnb4-wide-like" else {})
    found = ours.generate(**inputs, past_key_values=two_level(**FULL), **GO)
    assert torch.equal(found, expected)
    assert runner.replays > GO["max_new_tokens"] - 5


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_logits(form, rows, dtype):
    """As close to float32 as the layers' own code is in the same dtype."""
    ids = torch.randint(2, 90, (rows, 1), generator=torch.Generator().manual_seed(0)).cuda()
    model = replaced(build("llama", "sdpa").cuda(), FORMATS[form])
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
        # Codes and scales stay as they are: `to` would take the scales along.
        for module in model.modules():
            if not type(module).__module__.startswith(("bitsandbytes.", "transformers.integrations.")):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype)
        stock = model(ids, use_cache=False).logits.float()
        fusion = fuse(model)
        if not fusion.counts.get("quantised"):
            pytest.skip(f"this GPU does not serve {fusion.quantised}")
        ours = model(ids, use_cache=False).logits.float()
    error, baseline = ((one - exact).norm() / exact.norm() for one in (ours, stock))
    print(f"{form} {rows} {dtype}: error {error:.2e}, unfused {baseline:.2e}")
    assert error < 1.5 * baseline + 2e-5
