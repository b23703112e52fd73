"""The residual and norm kernel against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.add_norm import add_norm as public
from hf_sparsekv.ops.add_norm.reference import add_norm as reference
from hf_sparsekv.ops.add_norm.triton import add_norm

# shape, residual, norm before the sum, Gemma's offset
CASES = {
    "norm alone": ((3, 1, 64), False, False, False),
    "norm alone, offset": ((2, 3, 96), False, False, True),
    "sum": ((2, 1, 4096), True, False, False),
    "sum, odd width": ((2, 3, 100), True, False, False),
    "norm, sum, norm": ((2, 2, 160), True, True, True),
    "norm, sum, norm without offset": ((5, 72), True, True, False),
    "a wide row": ((1, 1, 12288), True, False, False),
    "no row": ((0, 1, 64), True, False, False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case):
    shape, has_residual, has_post, offset = case
    n = shape[-1]
    x = 3 * place.randn(*shape)
    residual = place.randn(*shape) if has_residual else None
    weight, post = place.randn(n), place.randn(n) if has_post else None
    cpu = [None if t is None else t.cpu() for t in (x, residual, weight, post)]
    want = reference(*cpu[:3], 1e-6, offset, cpu[3], 1e-5)
    for run in (add_norm, public):
        total, out = run(x, residual, weight, 1e-6, offset, post, 1e-5)
        place.close(total, want[0])
        place.close(out, want[1])
        assert (total is x) == (residual is None)
        assert out.is_contiguous()


def test_parts_of_longer_rows(place32):
    """What a split of a joined projection gives; nothing outside the part is read."""
    x = place32.nan(2, 3, 100)
    x[..., 20:84] = place32.randn(2, 3, 64)
    residual, weight = place32.randn(2, 3, 64), place32.randn(64)
    want = reference(x[..., 20:84].cpu(), residual.cpu(), weight.cpu(), 1e-6)
    for got, expected in zip(add_norm(x[..., 20:84], residual, weight, 1e-6), want):
        place32.close(got, expected)


def test_refuses():
    with pytest.raises(ValueError, match="too wide"):
        add_norm(torch.zeros(1, 40_000), None, torch.zeros(40_000), 1e-6)
    with pytest.raises(ValueError, match="post_weight"):
        add_norm(torch.zeros(1, 4), None, torch.zeros(4), 1e-6, post_weight=torch.zeros(4))
