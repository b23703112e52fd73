"""The gated product's kernel against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.gated import ACTIVATIONS
from hf_sparsekv.ops.gated import gated as public
from hf_sparsekv.ops.gated.reference import gated as reference
from hf_sparsekv.ops.gated.triton import gated


@pytest.mark.pairwise
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2, 1, 3000), (3, 5, 96), (7, 33), (0, 1, 64)], ids=str)
def test_against_reference(place, shape, activation):
    gate, up = 3 * place.randn(*shape), place.randn(*shape)
    want = reference(gate.cpu(), up.cpu(), activation)
    for run in (gated, public):
        place.close(run(gate, up, activation), want)


def test_large_values(place):
    """Nothing overflows on the way: the ends are zero and the product."""
    gate = torch.tensor([-3e4, -60.0, 60.0, 3e4], dtype=place.dtype, device=place.device)
    for activation in ACTIVATIONS:
        got = gated(gate, torch.ones_like(gate), activation)
        place.close(got, torch.relu(gate).cpu())


def test_halves_of_a_joined_projection(place32):
    joined = place32.randn(2, 3, 2 * 1500)
    gate, up = joined.chunk(2, dim=-1)
    place32.close(gated(gate, up, "silu"), reference(gate.cpu(), up.cpu(), "silu"))


def test_refuses():
    for run in (gated, reference):
        with pytest.raises(ValueError, match="activation"):
            run(torch.zeros(4), torch.zeros(4), "relu")
