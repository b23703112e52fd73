"""The query and key kernel against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.qk_rope import qk_rope as public
from hf_sparsekv.ops.qk_rope.reference import qk_rope as reference
from hf_sparsekv.ops.qk_rope.triton import qk_rope

# batch, tokens, query heads, key heads, head dim, rotary width, batch of cos, norm, Gemma's offset
CASES = {
    "rope": (2, 1, 8, 2, 64, 64, 2, False, False),
    "norm": (1, 1, 8, 2, 128, 128, 1, True, False),
    "norm with offset, one position for all rows": (3, 2, 4, 1, 64, 64, 1, True, True),
    "part of the dimensions": (2, 3, 3, 3, 96, 48, 2, False, False),
    "part of the dimensions, norm": (1, 2, 5, 5, 80, 32, 1, True, False),
    "head dim 256": (1, 1, 2, 1, 256, 256, 1, True, True),
    "no token": (1, 0, 2, 1, 64, 64, 1, False, False),
}


def inputs(place, case):
    batch, tokens, heads, k_heads, dim, width, cos_batch, has_norm, _ = case
    q, k = place.randn(batch, tokens, heads, dim), place.randn(batch, tokens, k_heads, dim)
    angle = 6 * torch.rand((cos_batch, tokens, width // 2), generator=place.generator).repeat(1, 1, 2)
    cos, sin = (f(angle).to(place.dtype).to(place.device) for f in (torch.cos, torch.sin))
    weights = (place.randn(dim), place.randn(dim)) if has_norm else (None, None)
    return q, k, cos, sin, *weights


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case):
    given = inputs(place, case)
    want = reference(*(None if t is None else t.cpu() for t in given), 1e-6, 1e-5, case[-1])
    for run in (qk_rope, public):
        for got, expected in zip(run(*given, 1e-6, 1e-5, case[-1]), want):
            place.close(got, expected)
            assert got.transpose(1, 2).is_contiguous()


def test_heads_of_a_joined_projection(place32):
    """Queries, keys and values side by side in one row; the values are not read."""
    joined = place32.nan(2, 3, 8 * 64)
    q, k = joined[..., : 4 * 64].unflatten(-1, (4, 64)), joined[..., 4 * 64 : 6 * 64].unflatten(-1, (2, 64))
    q.copy_(place32.randn(2, 3, 4, 64))
    k.copy_(place32.randn(2, 3, 2, 64))
    _, _, cos, sin, q_weight, k_weight = inputs(place32, (2, 3, 4, 2, 64, 64, 2, True, False))
    given = (q, k, cos, sin, q_weight, k_weight)
    want = reference(*(t.cpu() for t in given), 1e-6, 1e-6)
    for got, expected in zip(qk_rope(*given, 1e-6, 1e-6), want):
        place32.close(got, expected)


def test_refuses():
    q = torch.zeros(1, 1, 2, 64)
    with pytest.raises(ValueError, match="rotary width"):
        qk_rope(q, q, torch.zeros(1, 1, 80), torch.zeros(1, 1, 80))
