"""Behaviour of Triton's interpreter that our shortcuts leave as it was."""

from __future__ import annotations

import math
import os
from functools import partial

import numpy as np
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


def _value(data: list, dtype: tl.dtype) -> tl.tensor:
    array = np.array(data, interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def _outcome(convert, *given) -> list:
    """Types, shapes and numbers of both operands, or what was raised."""
    try:
        found = convert(*given)
    except (AttributeError, TypeError, ValueError) as error:  # the first: a kind of number that it does not know
        return [type(error), str(error)]
    return [(str(one.type), [int(n) for n in one.shape], one.handle.data.tolist()) for one in found]


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize(
    "dtype", [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32], ids=str
)
def test_operands_become_what_triton_makes_of_them(dtype, divides):
    """With numbers in and out of range and of other kinds, and with values of other shapes and types."""
    semantic, ours = interpreter.interpreter_semantic, interpreter.interpreter_semantic.binary_op_type_checking_impl
    theirs = partial(type(semantic).binary_op_type_checking_impl, semantic)
    row, single = _value([1, 0, 1, 1], dtype), tl.tensor(interpreter.TensorHandle(np.array([1]), tl.int64), tl.int64)
    others = [True, False, 0, 1, -1, 300, 2**31, -(2**40), 0.0, -0.0, 1.5, 1e30, math.inf, single]
    others += [_value(data, tl.int32) for data in ([3, 4, 5, 6], [7], [[1], [2]])] + [_value([1.5] * 4, tl.float32)]
    found = [[_outcome(ours, *pair, False, False, True, divides) for pair in ((row, x), (x, row))] for x in others]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast_impl_value", "scalar_constant", "binary_op_type_checking_impl"):
            patch.delattr(semantic, name)
        want = [[_outcome(theirs, *pair, False, False, True, divides) for pair in ((row, x), (x, row))] for x in others]
    assert found == want
    assert sum(isinstance(one[0], tuple) for pair in found for one in pair) >= 18


def test_a_number_that_is_shared_cannot_be_changed():
    found = interpreter.interpreter_semantic.scalar_constant(3, tl.int32)
    assert interpreter.interpreter_semantic.scalar_constant(3, tl.int32) is found
    with pytest.raises(ValueError, match="read-only"):
        found.handle.data[0] = 4
