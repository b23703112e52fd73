"""The kernels of chosen experts against their definition, and that against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.moe import _default_apply_gate, batched_mm_experts_forward

from hf_sparsekv.ops.experts import MAX_TOKENS
from hf_sparsekv.ops.experts import experts as public
from hf_sparsekv.ops.experts.reference import experts as reference
from hf_sparsekv.ops.experts.triton import experts

# tokens, experts, of a token, D, I
SHAPES = [(1, 8, 4, 256, 96), (3, 5, 2, 100, 33), (6, 4, 1, 64, 128), (2, 3, 3, 33, 7), (0, 4, 2, 64, 64)]


def made(place, shape):
    tokens, count, k, d, inner = shape
    index = torch.stack([place.randperm(count)[:k] for _ in range(tokens)]) if tokens else place.randperm(0).view(0, k)
    weights = place.rand(tokens, k)
    gate_up, down = place.randn(count, 2 * inner, d) / d**0.5, place.randn(count, d, inner) / inner**0.5
    return 2 * place.randn(tokens, d), index.long(), weights, gate_up, down


@pytest.mark.pairwise
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_reference(place, shape, activation):
    args = made(place, shape)
    want = reference(*(t.cpu() for t in args), activation)
    for run in (experts, public):
        place.close(run(*args, activation), want)


def test_parts_of_longer_rows(place32):
    x, index, weights, gate_up, down = made(place32, (3, 5, 2, 64, 40))
    want = reference(*(t.cpu() for t in (x, index, weights, gate_up, down)), "silu")
    wide = torch.cat((x, x), dim=1)[:, :64]
    turned = index.T.contiguous().T, weights.T.contiguous().T
    place32.close(experts(wide, *turned, gate_up, down, "silu"), want)


def test_reference_is_transformers_own():
    generator = torch.Generator().manual_seed(0)
    x, index = torch.randn(5, 32, generator=generator), torch.randint(0, 6, (5, 3), generator=generator)
    weights = torch.rand(5, 3, generator=generator)
    gate_up, down = torch.randn(6, 48, 32, generator=generator), torch.randn(6, 32, 24, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        module = SimpleNamespace(
            num_experts=6, has_gate=True, has_bias=False, is_transposed=False, act_fn=torch.nn.functional.silu,
            gate_up_proj=gate_up.to(dtype), down_proj=down.to(dtype),
        )  # fmt: skip
        module._apply_gate = lambda out, module=module: _default_apply_gate(module, out)
        want = batched_mm_experts_forward(module, x.to(dtype), index, weights)
        found = reference(x.to(dtype), index, weights, gate_up.to(dtype), down.to(dtype), "silu")
        assert torch.equal(found, want)


def test_refuses(place32):
    args = made(place32, (MAX_TOKENS + 1, 4, 2, 16, 16))
    with pytest.raises(ValueError, match="at most"):
        experts(*args, "silu")
    place32.close(public(*args, "silu"), reference(*(t.cpu() for t in args), "silu"))
    with pytest.raises(ValueError, match="activation"):
        experts(*made(place32, (1, 4, 2, 16, 16)), "relu")
