"""The kernels for linear layers of a few rows against their definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.small_linear import small_linear as public
from hf_sparsekv.ops.small_linear.reference import small_linear as reference
from hf_sparsekv.ops.small_linear.triton import WIDE, small_linear

# shape of x, outputs, bias
CASES = {
    "one row": ((1, 1, 1024), 64, False),
    "one row, bias, nothing even": ((1, 1, 700), 45, True),
    "two rows": ((2, 1, 512), 64, False),
    "nine rows, bias, nothing even": ((3, 3, 300), 45, True),
    "sixteen rows": ((16, 256), 32, False),
    "no row": ((0, 1, 64), 32, False),
}


def check(place, shape, n, has_bias):
    x, weight = place.randn(*shape), place.randn(n, shape[-1]) / shape[-1] ** 0.5
    bias = place.randn(n) if has_bias else None
    # In float64: a half-precision product on the CPU may take its sums in half precision.
    wide = [None if t is None else t.cpu().double() for t in (x, weight, bias)]
    want = reference(*wide).to(place.dtype)
    one = x.numel() <= shape[-1]
    if one or place.dtype != torch.float32:
        place.close(small_linear(x, weight, bias), want)
    else:
        with pytest.raises(ValueError, match="in float32 one"):
            small_linear(x, weight, bias)
    place.close(public(x, weight, bias), want)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case):
    check(place, *case)


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (WIDE + 24, 4096)], ids=str)
def test_sizes_of_a_model(place, shape, rows):
    if place.device == "cpu":
        pytest.skip("too large for the interpreter")
    check(place, (rows, 1, shape[1]), shape[0], True)


def test_strided_rows_and_stacked_weights(place):
    """Inputs that are parts of longer rows, weights that are rows of a larger block."""
    block = place.nan(96, 512)
    block[32:64] = place.randn(32, 512) / 20
    x = place.nan(1, 600)
    x[:, 40:552] = place.randn(1, 512)
    want = reference(x[:, 40:552].cpu().double(), block[32:64].cpu().double()).to(place.dtype)
    place.close(small_linear(x[:, 40:552], block[32:64]), want)


def test_too_many_rows():
    with pytest.raises(ValueError, match="at most 16 rows"):
        small_linear(torch.zeros(17, 8), torch.zeros(4, 8))
