"""The kernel between MLA's projections and the cache against its definition, and that against transformers' own."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.latent_rope import latent_rope as public
from hf_sparsekv.ops.latent_rope.reference import latent_rope as reference
from hf_sparsekv.ops.latent_rope.reference import turn
from hf_sparsekv.ops.latent_rope.triton import latent_rope

# batch, tokens, heads, dn, dr, r
SHAPES = [(1, 1, 20, 192, 64, 512), (2, 3, 4, 12, 8, 16), (3, 2, 5, 33, 6, 40), (0, 1, 4, 12, 8, 16)]


def made(place, shape):
    batch, tokens, heads, nope, rope, rank = shape
    angles = 6.3 * place.rand(batch, tokens, rope // 2)
    angles = torch.cat((angles, angles), dim=-1)
    wide = place.randn(batch, tokens, 7 + rank + rope)[..., 7:]  # part of a joined projection
    weight = 1 + 0.2 * place.randn(rank)
    return (
        place.randn(batch, tokens, heads, nope + rope),
        wide,
        angles.cos().to(place.dtype),
        angles.sin().to(place.dtype),
        weight,
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_reference(place, shape, interleaved):
    args = made(place, shape)
    want = reference(*(t.cpu() for t in args), 1e-6, interleaved)
    for run in (latent_rope, public):
        for got, expected in zip(run(*args, 1e-6, interleaved), want):
            place.close(got, expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_reference_is_transformers_own(interleaved):
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as file

    angles = torch.rand(2, 5, 4)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    apply = file.apply_rotary_pos_emb_interleave if interleaved else file.apply_rotary_pos_emb
    for x, expected in zip((q, k), apply(q, k, cos, sin)):
        assert torch.equal(turn(x.transpose(1, 2), cos, sin, interleaved).transpose(1, 2), expected)


def test_refuses(place32):
    q, compressed, cos, sin, weight = made(place32, SHAPES[1])
    with pytest.raises(ValueError, match="no latents"):
        latent_rope(q, compressed, cos, sin, weight[:-1].contiguous(), 1e-6, True)
