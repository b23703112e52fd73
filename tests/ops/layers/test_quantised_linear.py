"""Linear layers of weights in 8 bits: the definition by hand, other tiles, and what is refused.

Calls of all shapes are in ``test_operators.py``.
"""

from __future__ import annotations

import pytest
import torch
from operators import BY_NAME

from hf_sparsekv.ops.layers import quantised_linear as package
from hf_sparsekv.ops.layers.quantised_linear import MAX_ROWS, QuantisedWeight, dequantise, lookup, serves
from hf_sparsekv.ops.layers.quantised_linear import quantised_linear as public
from hf_sparsekv.ops.layers.quantised_linear.reference import FP8
from hf_sparsekv.ops.layers.quantised_linear.triton import Tile, quantised_linear

reference = BY_NAME["quantised_linear"].functions[1]
TILES = [Tile(4, 64, 1, 4), Tile(16, 128, 2, 2), Tile(32, 256, 3, 4), Tile(64, 32, 4, 4, 128)]


def test_all_numbers_of_a_byte(place):
    """Each code times 1: every int8, and every finite 8-bit float, to the last bit."""
    for dtype in (torch.int8, FP8):
        codes = torch.arange(256).to(torch.uint8).view(dtype).to(place.device)
        codes = codes[codes.float().isfinite()]
        weight = QuantisedWeight(codes[:, None].repeat(1, 32), torch.ones(1, 1, device=place.device))
        x = torch.zeros(1 if place.dtype == torch.float32 else 3, 32, dtype=place.dtype, device=place.device)
        x[:, 5] = 1
        for some in {1, len(x)}:
            got = quantised_linear(x[:some], weight)
            assert torch.equal(got.float(), codes.float().expand(some, -1))


def test_scales_of_blocks_by_hand():
    codes = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int8)
    weight = QuantisedWeight(codes, torch.tensor([[1.0, 10.0], [100.0, 1000.0]]))
    assert weight.block == (2, 2)
    assert dequantise(weight).tolist() == [[1, 2, 30], [4, 5, 60], [700, 800, 9000]]
    got = public(torch.ones(2, 3), weight, torch.tensor([0.0, 1.0, 2.0]))
    assert got.tolist() == [[33, 70, 10502]] * 2


def test_codes_of_a_codebook_by_hand():
    weight = QuantisedWeight(torch.tensor([[0x1F, 0x20]], dtype=torch.uint8), torch.ones(1, 1), torch.arange(16.0))
    assert (weight.out_features, weight.in_features) == (1, 4)
    assert dequantise(weight).tolist() == [[1, 15, 2, 0]]


@pytest.mark.few
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("scales", [(100, 1), (4, 3)], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_agree(place, tile, scales, kind):
    """Several steps, neither rows of the weight nor inputs a multiple."""
    given = BY_NAME["quantised_linear"].call(place, (1, 286), 100, scales, True, kind)
    (want,) = BY_NAME["quantised_linear"].expected(given)
    place.close(quantised_linear(**given, config=tile), want)


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("form", [("int8", False), ("fp8", False), ("fp8", True)], ids=str)
@pytest.mark.parametrize("shape", [(1024, 4096), (12288, 4096), (4096, 12288), (6152, 3584)], ids=str)
def test_sizes_of_a_model(place, shape, form, rows):
    if place.device == "cpu":
        pytest.skip("too large for the interpreter")
    (n, k), (kind, blocks) = shape, form
    scales = (-(-n // 128), k // 128) if blocks else (n, 1)
    if blocks and n % 128:
        pytest.skip("no whole number of blocks")
    given = BY_NAME["quantised_linear"].call(place, (rows, k), n, scales, True, kind)
    (want,) = BY_NAME["quantised_linear"].expected(given)
    place.close(quantised_linear(**given), want)
    place.close(public(**given), want)


def test_strided_weights_and_scales(place):
    """Rows of larger blocks, which hold what nobody may read."""
    x, weight, _ = BY_NAME["quantised_linear"].call(place, (1, 128), 32, (4, 4)).values()
    want = reference(x.cpu(), QuantisedWeight(weight.codes.cpu(), weight.scales.cpu()))
    codes = torch.full((40, 200), 99, dtype=torch.int8, device=place.device)
    scales = place.nan(6, 9, dtype=torch.float32)
    codes[8:, 40:168], scales[2:, 5:] = weight.codes, weight.scales
    place.close(quantised_linear(x, QuantisedWeight(codes[8:, 40:168], scales[2:, 5:])), want)


def test_bias_of_another_dtype(place16):
    x, weight, _ = BY_NAME["quantised_linear"].call(place16, (1, 64), 32, (32, 1)).values()
    bias = torch.linspace(-1, 1, 32, device=place16.device)
    want = reference(x.cpu(), QuantisedWeight(weight.codes.cpu(), weight.scales.cpu()), bias.cpu())
    place16.close(quantised_linear(x, weight, bias), want)


# ---------------------------------------------------------------------- what is refused, and who serves


def eight_bits(n=8, k=64, scales=(8, 1), dtype=torch.int8) -> QuantisedWeight:
    return QuantisedWeight(torch.zeros(n, k, dtype=dtype), torch.ones(scales))


def four_bits(n=8, k=64, group=64) -> QuantisedWeight:
    codes = torch.arange(n * k // 2).to(torch.uint8).view(n, -1)
    return QuantisedWeight(codes, torch.rand(n, k // group) + 0.5, torch.randn(16))


BROKEN = {
    "codes of 16 bits": (eight_bits(dtype=torch.int16), "codes without a codebook must be"),
    "codes of a codebook": (eight_bits()._replace(codebook=torch.zeros(16)), "codes with a codebook must be"),
    "a short codebook": (four_bits()._replace(codebook=torch.zeros(8)), r"must be float32 \[16\]"),
    "scales of 16 bits": (eight_bits()._replace(scales=torch.ones(8, 1).half()), r"scales must be float32 \[a, b\]"),
    "a vector of scales": (eight_bits()._replace(scales=torch.ones(8)), r"scales must be float32 \[a, b\]"),
    "scales of nothing": (eight_bits(scales=(5, 1)), "5 blocks of equal size do not divide 8"),
}


@pytest.mark.parametrize("function", [quantised_linear, reference, public])
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_weight(function, broken):
    with pytest.raises(ValueError, match=broken[1]):
        function(torch.zeros(1, 64), broken[0])


def test_what_the_kernels_refuse():
    for function in (quantised_linear, reference):
        with pytest.raises(ValueError, match="x has 32 inputs, the weight 64"):
            function(torch.zeros(1, 32), eight_bits())
    with pytest.raises(ValueError, match="at most 16 rows"):
        quantised_linear(torch.zeros(17, 64).half(), eight_bits())
    with pytest.raises(ValueError, match="in float32 one; got 2"):
        quantised_linear(torch.zeros(2, 64), eight_bits())
    with pytest.raises(ValueError, match="16 inputs each: the kernel needs a multiple of 32"):
        quantised_linear(torch.zeros(1, 64), eight_bits(scales=(8, 4)))
    with pytest.raises(ValueError, match="codes must be contiguous"):
        quantised_linear(torch.zeros(1, 8), QuantisedWeight(eight_bits().codes.t(), torch.ones(1, 1)))


class OnGpu:
    """The properties of inputs that ``serves`` reads."""

    is_cuda = True

    def __init__(self, *shape: int, dtype=torch.bfloat16) -> None:
        self.shape, self.dtype = shape, dtype

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def get_device(self) -> int:
        return 0


def test_who_serves(monkeypatch):
    """Triton one row of 8 bits; all else where codes are looked up."""
    looked_up = set()
    monkeypatch.setattr(lookup, "serves", lambda x, weight: weight.codes.dtype in looked_up)
    for capability, floats in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        package.has_fp8.cache_clear()
        assert serves(OnGpu(1, 64), eight_bits())
        assert serves(OnGpu(1, 64), eight_bits(dtype=FP8)) is floats
    package.has_fp8.cache_clear()
    assert not serves(OnGpu(MAX_ROWS, 1, 64), eight_bits())
    assert not serves(OnGpu(0, 64), eight_bits())
    assert serves(OnGpu(1, 64, dtype=torch.float32), eight_bits())
    assert not serves(OnGpu(2, 64, dtype=torch.float32), eight_bits())
    assert not serves(OnGpu(1, 64, dtype=torch.float64), eight_bits())
    assert serves(OnGpu(1, 64), eight_bits(scales=(8, 2)))
    assert not serves(OnGpu(1, 64), eight_bits(scales=(8, 4)))
    assert not serves(OnGpu(1, 64), four_bits())
    looked_up |= {torch.uint8, torch.int8}
    assert serves(OnGpu(1, 64), four_bits()) and serves(OnGpu(MAX_ROWS, 1, 64), eight_bits())
    assert not serves(OnGpu(MAX_ROWS + 1, 64), eight_bits())
    monkeypatch.setattr(package, "has_triton", lambda: False)
    assert not serves(OnGpu(1, 64), eight_bits())


def test_who_multiplies(monkeypatch):
    """Codes of a codebook, and more than one row, are looked up where that serves."""
    asked = []

    def multiply(x, weight, bias, out):
        asked.append((x.shape, out.shape, None if bias is None else bias.dtype))
        out.fill_(7)
        return True

    x, bias = torch.randn(2, 1, 64).half(), torch.randn(8).half()
    few, many = four_bits(), eight_bits()
    for weight in (few, many):
        torch.testing.assert_close(quantised_linear(x, weight, bias), reference(x, weight, bias), rtol=1e-2, atol=1e-2)
    monkeypatch.setattr(lookup, "multiply", multiply)
    assert all(quantised_linear(x, weight, bias.float()).eq(7).all() for weight in (few, many))
    assert quantised_linear(x[0], few).eq(7).all()
    assert not quantised_linear(x[0], many).eq(7).any()
    assert asked == [((2, 64), (2, 8), torch.float16)] * 2 + [((1, 64), (1, 8), None)]
    monkeypatch.setattr(lookup, "multiply", lambda *given: False)
    assert torch.equal(quantised_linear(x, few, bias), reference(x, few, bias))
