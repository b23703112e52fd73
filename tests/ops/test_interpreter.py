"""What our shortcuts through Triton's interpreter leave as it was."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off where there is a GPU"
)


@triton.jit
def _join(n, least, index, n_2, least_2, index_2):
    """Not commutative: of equal ones the earlier index stays."""
    return n + n_2, tl.minimum(least, least_2), tl.where(least_2 < least, index_2, index)


@triton.jit
def _last(a, b):
    """Associative, and the order shows in every place."""
    return tl.where(b == 0.0, a, b)


@triton.jit
def _kernel(p_x, p_sum, p_least, p_index, p_last, N: tl.constexpr, M: tl.constexpr, AXIS: tl.constexpr):
    i, j = tl.arange(0, N), tl.arange(0, M)
    at = i[:, None] * M + j[None, :]
    b_x = tl.load(p_x + at)
    count, least, index = tl.reduce(((b_x > 0).to(tl.int32), b_x, at), AXIS, _join)
    out = j if AXIS == 0 else i
    tl.store(p_sum + out, count)
    tl.store(p_least + out, least)
    tl.store(p_index + out, index)
    tl.store(p_last + at, tl.associative_scan(b_x, AXIS, _last))


@triton.jit
def _flat(p_x, p_sum, N: tl.constexpr):
    b_x = tl.load(p_x + tl.arange(0, N))
    count, _, index = tl.reduce(((b_x > 0).to(tl.int32), b_x, tl.arange(0, N)), 0, _join)
    tl.store(p_sum, count)
    tl.store(p_sum + 1, index)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(8, 16), (16, 1), (1, 4), (32, 2)], ids=str)
def test_functions_of_ones_own(shape, axis):
    """``tl.reduce`` and ``tl.associative_scan``: ties go to the first, and nothing changes places."""
    x = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).float()
    left = shape[1 - axis]
    counts, index = torch.empty(2, left, dtype=torch.int32)
    least, last = torch.empty(left), torch.empty(shape)
    _kernel[(1,)](x, counts, least, index, last, *shape, axis)
    assert torch.equal(counts, (x > 0).sum(axis).int())
    assert torch.equal(least, x.amin(axis))
    assert torch.equal(x.flatten()[index.long()], least)
    assert torch.equal(index % shape[1] if axis else index // shape[1], (x == x.amin(axis, True)).int().argmax(axis))
    expected = x.clone()
    for one, other in zip(expected.unbind(axis), expected.unbind(axis)[1:]):
        other.copy_(torch.where(other == 0, one, other))
    assert torch.equal(last, expected)


def test_one_dimension():
    x, found = torch.tensor([3.0, -1.0, 2.0, -1.0]), torch.empty(2, dtype=torch.int32)
    _flat[(1,)](x, found, 4)
    assert found.tolist() == [2, 1]


def test_triton_is_itself_again_after_a_launch():
    """Also after a kernel that fails half-way."""
    before = {name: getattr(tl, name) for name in ("load", "range", "reduce", "arange")}
    x, found = torch.ones(4), torch.empty(2, dtype=torch.int32)
    _flat[(1,)](x, found, 4)
    with pytest.raises(interpreter.InterpreterError):
        _flat[(1,)](x, found, 3)  # not a power of two
    assert {name: getattr(tl, name) for name in before} == before
    _flat[(1,)](x, found, 4)
    assert found.tolist() == [4, 0]
