"""The kernels for linear layers of a few rows against their definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.layers.gated import ACTIVATIONS
from hf_sparsekv.ops.layers.gated.reference import gated
from hf_sparsekv.ops.layers.gated.triton import gated as gated_kernel
from hf_sparsekv.ops.layers.small_linear import small_linear as public
from hf_sparsekv.ops.layers.small_linear.reference import small_linear as reference
from hf_sparsekv.ops.layers.small_linear.triton import WIDE, small_linear

# shape of x, rows of the weight, bias
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
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (WIDE + 24, 4096), (5120, 6400), (8704, 2560)], ids=str)
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


# shape of x, outputs, bias
GATED = {
    "one row": ((1, 1, 2048), 32, False),
    "one row, bias, nothing even": ((1, 1, 700), 45, True),
    "one output": ((1, 64), 1, False),
    "two rows": ((2, 1, 512), 64, False),
    "nine rows, bias, nothing even": ((3, 3, 300), 45, True),
    "sixteen rows": ((16, 256), 48, True),
    "no row": ((0, 1, 64), 32, False),
}


def gated_inputs(place, shape, n, has_bias):
    """``x``, the weights and biases of gate and up one after the other, gates large enough to bend the activation."""
    k = shape[-1]
    weight = torch.cat((2 * place.randn(n, k), place.randn(n, k))) / k**0.5
    return place.randn(*shape), weight, place.randn(2 * n) if has_bias else None


def check_gated(place, activation, shape, n, has_bias):
    given = gated_inputs(place, shape, n, has_bias)
    # The products in float64; rounded to the dtype before the activation, as two operators would.
    product = reference(*(None if t is None else t.cpu().double() for t in given)).to(place.dtype)
    want = gated(*product.chunk(2, dim=-1), activation)
    if given[0].numel() <= shape[-1] or place.dtype != torch.float32:
        place.close(small_linear(*given, activation), want)
    place.close(public(*given, activation), want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", GATED.values(), ids=GATED.keys())
def test_gated(place, case, activation):
    check_gated(place, activation, *case)


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("shape", [(12288, 4096), (4096, 2560), (WIDE // 2 + 24, 4096)], ids=str)
def test_gated_sizes_of_a_model(place, shape, rows):
    if place.device == "cpu":
        pytest.skip("too large for the interpreter")
    check_gated(place, "silu", (rows, 1, shape[1]), shape[0], True)


@pytest.mark.parametrize("rows", [1, 3])
def test_gated_is_what_two_kernels_give(place16, rows):
    """To the last bit: the product is rounded before the activation, and its sums are taken in the same order."""
    given = gated_inputs(place16, (rows, 300), 45, True)
    product = small_linear(*given)
    for activation in ACTIVATIONS:
        gate, up = product.chunk(2, dim=-1)
        assert torch.equal(small_linear(*given, activation), gated_kernel(gate, up, activation))


@pytest.mark.parametrize("function", [small_linear, reference])
def test_no_gate_and_up(function):
    with pytest.raises(ValueError, match="activation must be one of"):
        function(torch.zeros(1, 8), torch.zeros(4, 8), None, "relu")
    with pytest.raises(ValueError, match="equally many rows of the weight, got 5"):
        function(torch.zeros(1, 8), torch.zeros(5, 8), None, "silu")


def test_too_many_rows():
    with pytest.raises(ValueError, match="at most 16 rows"):
        small_linear(torch.zeros(17, 8), torch.zeros(4, 8))
