"""A linear layer of a few rows in CUDA C++, run on a CPU thread by thread, against its definition."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from conftest import Place
from cuda_on_cpu import COMPILER, CpuKernel, build
from test_small_linear import SKINNY_CASES, check_skinny

from hf_sparsekv.ops.small_linear import skinny

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")


def seeded(turn: int, where, **defined) -> CpuKernel:
    kernel = build("hf_sparsekv.ops.small_linear", "skinny.cu", "small_linear_skinny_kernel", **defined)
    kernel.seed = turn
    return kernel


@pytest.fixture(params=[1, 2], ids=lambda steps: f"{steps} steps")
def linear(request, monkeypatch):
    """A linear layer of these rows; in turns of another order each."""

    def run(x, weight, bias, activation):
        config = skinny.Skinny(threads=64, resident=1, steps=request.param)
        n = len(weight) if activation is None else len(weight) // 2
        found = []
        for turn in range(2):
            out = torch.full((len(x), n), math.nan, dtype=x.dtype)
            monkeypatch.setattr(skinny, "_kernel", partial(seeded, turn))
            assert skinny.skinny_linear(x, weight, bias, activation, out, config)
            found.append(out)
        assert torch.equal(*found)
        return found[0]

    return run


@pytest.mark.pairwise
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", SKINNY_CASES.values(), ids=SKINNY_CASES.keys())
def test_against_reference(case, dtype, activation, linear):
    check_skinny(Place("cpu", dtype), *case, activation, linear)


def test_where_it_does_not_serve(monkeypatch):
    monkeypatch.setattr(skinny, "_kernel", lambda where, **defined: pytest.fail("it would be launched"))
    x, weight = torch.ones(2, 64, dtype=torch.float16), torch.ones(16, 64, dtype=torch.float16)
    wrong = [
        (x.float(), weight.float()),
        (x, weight.bfloat16()),
        (x[:, 4:], weight[:, 4:]),
        (x[:, ::2], weight[:, ::2]),
    ]
    wrong += [(x[:0], weight), (x.repeat(9, 1), weight)]
    for x, weight in wrong:
        assert not skinny.skinny_linear(x, weight, None, None, x.new_empty(len(x), 16), skinny.Skinny())
