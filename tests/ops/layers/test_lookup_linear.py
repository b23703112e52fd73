"""A linear layer of a few rows of weights that a table tells (CUDA C++): of 4 and 8 bits, against its definition.

On a CPU, run thread by thread; on the GPU where there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from cuda_on_cpu import COMPILER, build
from inside import kernel_is
from places import RATIO, Place
from torch import Tensor

from hf_sparsekv.ops import _device
from hf_sparsekv.ops.layers.quantised_linear import QuantisedWeight, lookup
from hf_sparsekv.ops.layers.quantised_linear.lookup import Form
from hf_sparsekv.ops.layers.quantised_linear.reference import FP8
from hf_sparsekv.ops.layers.quantised_linear.reference import quantised_linear as reference

# Of bitsandbytes.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [0.0, 0.0052083, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]
CODEBOOKS = {
    "nf4": torch.tensor(NF4),
    "fp4": torch.tensor([*FP4, *(-number for number in FP4)]),
    "random": torch.randn(16, generator=torch.Generator().manual_seed(1)),
}
EIGHT = {"int8": torch.int8, "fp8": FP8}


@dataclass
class Case:
    rows: int
    outputs: int
    inputs: int
    block: int = 64  # 0: all inputs of a row; -1: all weights
    codebook: str = "nf4"
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    block_rows: int = 1  # that share a scale, of one for each `block` inputs

    def make(self, place: Place) -> tuple[Tensor, QuantisedWeight, Tensor | None]:
        eight = EIGHT.get(self.codebook)
        codes = place.randint(0, 256, self.outputs, self.inputs // (1 if eight else 2), dtype=torch.uint8)
        if eight == FP8:
            codes[codes % 128 == 127] = 0  # no numbers
        rows = -(-self.outputs // self.block_rows) if self.block >= 0 else 1
        scales = place.rand(rows, -(-self.inputs // self.block) if self.block > 0 else 1) * 2 + 0.1
        if eight:
            weight = QuantisedWeight(codes.view(eight), scales / (100 if eight == FP8 else 127))
        else:
            weight = QuantisedWeight(codes, scales, CODEBOOKS[self.codebook].to(codes.device))
        return place.randn(self.rows, self.inputs), weight, place.randn(self.outputs) * 9 if self.bias else None


def on_cpu(weight: QuantisedWeight) -> QuantisedWeight:
    return QuantisedWeight(*(t if t is None else t.cpu() for t in weight))


class Runs:
    """The kernel where it is tested; a test that took another one would show nothing."""

    def __init__(self, device: str, monkeypatch) -> None:
        self.device, self.seed = device, 0
        if device == "cpu":
            kernel_is(monkeypatch, lookup, self._build)
            monkeypatch.setattr(_device, "gpu_of", lambda t: replace(_device.H200, processors=self.processors))
        self.processors = 1

    def _build(self, x: Tensor, *how):
        self.kernel = build(lookup.__package__, "lookup.cu", lookup.NAME, **lookup.macros(x.dtype, *how))
        self.kernel.seed = self.seed
        return self.kernel

    def place(self, dtype: torch.dtype) -> Place:
        return Place(self.device, dtype)

    def check(self, case: Case, form: Form | None = None, turns: int = 1) -> None:
        x, weight, bias = case.make(self.place(case.dtype))
        # Neighbours may hold anything, and keep it.
        held = torch.full((case.rows + 1, case.outputs + 9), 4096.0, dtype=x.dtype, device=x.device)
        out = held[: case.rows, : case.outputs]
        rest = on_cpu(weight)
        if rest.codebook is not None:  # what it holds is rounded, as the kernel may do
            rest = rest._replace(codebook=rest.codebook.to(x.dtype).float())
        expected = reference(x.cpu(), rest, None if bias is None else bias.cpu())
        found = []
        for _ in range(turns):
            assert lookup.multiply(x, weight, bias, out, form), "another kernel would show nothing"
            self.seed += 1
            self.place(x.dtype).close(out, expected, RATIO[x.dtype])
            assert (held[case.rows :] == 4096).all()
            assert (held[:, case.outputs :] == 4096).all()
            found.append(out.clone())
            out.fill_(math.nan)
        assert all(torch.equal(one, found[0]) for one in found), "sums in another order"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def runs(request, monkeypatch) -> Runs:
    if request.param == "cpu" and COMPILER is None:
        pytest.skip("no C++ compiler is installed")
    return Runs(request.param, monkeypatch)


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16])
@pytest.mark.parametrize("outputs, inputs", [(16, 128), (33, 512), (75, 1152), (100, 384)])
@pytest.mark.parametrize("block", [64, 128, 0, -1])
@pytest.mark.parametrize("numbers", [*CODEBOOKS, *EIGHT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_against_reference(rows, outputs, inputs, block, numbers, dtype, bias, runs):
    kind = getattr(lookup, {"int8": "INT8", "fp8": "E4M3"}.get(numbers, "CODEBOOK"))
    form = lookup.form_of(rows, outputs, kind, _device.gpu_of(torch.empty(0, device=runs.device)))
    runs.check(Case(rows, outputs, inputs, block, numbers, dtype, bias), form._replace(warps=4))


FORMS = [
    (1, Form(1, 1, 4, 1, 1)),
    (2, Form(2, 2, 4, 1, 1)),
    (2, Form(3, 1, 1, 4, 2)),
    (1, Form(9, 1, 2, 1, 3)),
    (4, Form(9, 2, 2, 2, 2)),
    (3, Form(3, 1, 1, 2, 3)),
    (7, Form(3, 2, 1, 4, 1)),
    (5, Form(9, 1, 1, 1, 2)),
    (13, Form(3, 2, 1, 2, 2)),
    (16, Form(5, 1, 1, 3, 1)),
    (12, Form(13, 2, 1, 1, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, form", FORMS, ids=lambda one: "-".join(map(str, one)) if isinstance(one, tuple) else one
)
def test_forms(rows, form, runs):
    """Blocks that have several groups of rows; warps that have several units, one, or fewer than others."""
    runs.check(Case(rows, 150, 1600), form, turns=3)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", EIGHT)
@pytest.mark.parametrize("rows, form", [(2, Form(3, 1, 4, 1, 1)), *FORMS[6:11]], ids=str)
def test_forms_of_8_bits(rows, form, numbers, runs):
    """Likewise; a scale for blocks of rows and inputs, of which the last rows are cut off."""
    runs.check(Case(rows, 158, 1664, 128, numbers, block_rows=32), form, turns=2)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_rows_of_larger_tensors(rows, runs):
    """Rows of x and of the weight lie apart; what lies between is no number."""
    place = runs.place(torch.float16)
    x, weight, _ = Case(rows, 50, 576).make(place)
    wide = place.nan(rows + 1, 576 + 40)
    wide[:rows, 16:592] = x
    codes = torch.full((50, 288 + 48), 255, dtype=torch.uint8, device=x.device)
    codes[:, 32:320] = weight.codes
    scales = torch.full((50, 9 + 2), math.nan, device=x.device)
    scales[:, 1:10] = weight.scales
    apart = weight._replace(codes=codes[:, 32:320], scales=scales[:, 1:10])
    got, want = (torch.empty(rows, 50, dtype=x.dtype, device=x.device) for _ in range(2))
    assert lookup.multiply(wide[:rows, 16:592], apart, None, got)
    assert lookup.multiply(x, weight, None, want)
    assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [1, 6, 16])
def test_not_finite(rows, runs):
    """An input that is no number makes its row's results none, and no other's."""
    x, weight, _ = Case(rows, 40, 512).make(runs.place(torch.bfloat16))
    x[rows - 1, 77], x[0, 300] = math.nan, math.inf
    out = torch.empty(rows, 40, dtype=x.dtype, device=x.device)
    assert lookup.multiply(x, weight, None, out)
    expected = reference(x.cpu(), on_cpu(weight))
    assert torch.equal(out.cpu().isfinite(), expected.isfinite())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("numbers", ["nf4", "int8", "fp8"])
def test_replayed(rows, numbers):
    """In a graph, behind and before kernels of other kinds, which it may overlap."""
    x, weight, _ = Case(rows, 1000, 2048, 64 if numbers == "nf4" else 0, numbers).make(Place("cuda", torch.bfloat16))
    out, other = (torch.empty(rows, 1000, dtype=x.dtype, device="cuda") for _ in range(2))
    assert lookup.multiply(2 * x, weight, None, out)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        lookup.multiply(2 * given, weight, None, other)
        result = other + 1
        lookup.multiply(4 * given, weight, None, other)
    given.copy_(x)
    for _ in range(3):
        graph.replay()
        assert torch.equal(result, out + 1) and torch.equal(other, 2 * out)


def not_aligned(t: Tensor) -> Tensor:
    held = torch.empty(t.numel() + 4, dtype=t.dtype, device=t.device)
    return held[4:].view_as(t).copy_(t)


def scaled(weight: QuantisedWeight, scales: Tensor) -> QuantisedWeight:
    return weight._replace(scales=scales)


def few_inputs(weight: QuantisedWeight) -> QuantisedWeight:
    return weight._replace(codes=weight.codes[:, :48].contiguous(), scales=weight.scales[:, :1].contiguous())


CHANGES = {
    "32 bits": lambda x, weight, bias, out: (x.float(), weight, None, out.float()),
    "many rows": lambda x, weight, bias, out: (x.repeat(9, 1)[:17], weight, None, out.repeat(9, 1)[:17]),
    "no rows": lambda x, weight, bias, out: (x[:0], weight, None, out[:0]),
    "blocks of 32": lambda x, weight, bias, out: (x, scaled(weight, weight.scales.repeat_interleave(2, 1)), None, out),
    "blocks of 3 rows": lambda x, weight, bias, out: (x, scaled(weight, weight.scales[::3]), None, out),
    "96 inputs": lambda x, weight, bias, out: (x[:, :96].contiguous(), few_inputs(weight), None, out),
    "codes not aligned": lambda x, weight, bias, out: (x, weight._replace(codes=not_aligned(weight.codes)), None, out),
    "x not aligned": lambda x, weight, bias, out: (not_aligned(x), weight, None, out),
    "columns": lambda x, weight, bias, out: (x.t().contiguous().t(), weight, None, out),
    "a bias of another dtype": lambda x, weight, bias, out: (x, weight, bias.half(), out),
    "a result of another dtype": lambda x, weight, bias, out: (x, weight, None, out.half()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_where_it_does_not_serve(what, runs):
    x, weight, bias = Case(2, 48, 512, bias=True).make(runs.place(torch.bfloat16))
    out = torch.full((2, 48), 5.0, dtype=x.dtype, device=x.device)
    assert lookup.multiply(x, weight, bias, out.clone())
    given = CHANGES[what](x, weight, bias, out)
    assert not lookup.multiply(*given)
    assert (given[-1] == 5).all(), "nothing is written"


def test_forms_of_fewer_rows(runs):
    x, weight, _ = Case(3, 48, 512).make(runs.place(torch.bfloat16))
    assert not lookup.multiply(x, weight, None, torch.empty_like(x[:, :48]), Form(4, 1, 4, 1, 1))


def test_serves(runs):
    x, weight, _ = Case(2, 48, 512).make(runs.place(torch.bfloat16))
    assert lookup.serves(x, weight) == x.is_cuda
    assert not lookup.serves(x.float(), weight)
    assert not lookup.serves(x, weight._replace(scales=weight.scales.repeat_interleave(2, 1)))
    assert not lookup.serves(x.repeat(9, 1), weight)
