"""Triton's interpreter without work whose result it throws away, or has already, and with a GPU's maximum.

Tests of kernels take a sixth of the time so. What an operation of a kernel computes stays Triton's. Triton 3.7.1:

* every call of a jitted function by another looks through all members of ``triton.language`` for what to replace,
  which the launch has done (half the time where kernels are made of small functions);
* every integer sum, difference and product is computed again in 64 bits, for an assertion that only ``debug`` makes
  (half the time of the selection kernels);
* every operation makes the table of numpy's types anew, and every value the shape of its type, twice and with a name:
  here a shape is worked out once, two values of the same one need no broadcasting, and a number becomes a value once
  (half of what is left);
* ``tl.reduce`` and ``tl.associative_scan`` with a function of one's own go from number to number. Here a function gets
  the halves of what is to be reduced, as on a GPU, or one row of a scan after the other;
* after a launch every tensor's whole storage is copied to where it is already, which makes gigabytes of one that is
  hardly used.

One thing is changed: ``tl.maximum`` and ``tl.minimum`` of NaN and a number are the number, as on a GPU, unless
``propagate_nan`` says otherwise. The interpreter propagates it either way (its reductions do not).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class _Patches:
    """Looks through ``triton.language`` once a launch, for each way in which a module has imported it."""

    def __init__(self) -> None:
        self.patch, self.execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
        self.imports: dict[object, frozenset[str]] = {}  # by function
        self.done: set[str] | None = None  # in the launch under way

    def __call__(self, fn):
        names = self.imports.get(fn)
        if names is None:
            held = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            names = self.imports[fn] = frozenset(module.__name__ for module in held)
        if self.done is not None and names <= self.done:
            return interpreter._LangPatchScope()
        if self.done is not None:
            self.done |= names
        return self.patch(fn)

    def launch(self, executor, *args, **kwargs):
        before, self.done = self.done, set()
        try:
            return self.execute(executor, *args, **kwargs)
        finally:
            self.done = before


def _np_dtypes():
    compute, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype: tl.dtype) -> np.dtype:
        name = (dtype.element_ty if isinstance(dtype, tl.block_type) else dtype).name
        if name not in known:
            known[name] = compute(dtype)
        return known[name]

    return np_dtype


def _combine(ops, dtypes, one, other) -> list[np.ndarray]:
    """The function of ``ops`` over arrays of the same shape, element by element."""
    args = [ops.to_tensor(value, dtype) for value, dtype in zip((*one, *other), (*dtypes, *dtypes))]
    found = ops.combine_fn.fn(*args)
    found = found if isinstance(found, tuple) else (found,)
    return [got.handle.data.astype(a.dtype).reshape(a.shape) for got, a in zip(found, one)]


def generic_reduce(self, input) -> list:
    """``ReduceOps.generic_reduce`` by halves."""
    dtypes, whole = [each.dtype for each in input], self.axis is None
    arrays = [each.handle.data.reshape(-1) if whole else np.moveaxis(each.handle.data, self.axis, 0) for each in input]
    while len(arrays[0]) > 1:
        arrays = _combine(self, dtypes, [a[0::2] for a in arrays], [a[1::2] for a in arrays])
    found = [a[0] for a in arrays]
    if self.keep_dims:
        axes = tuple(range(input[0].handle.data.ndim)) if whole else self.axis
        found = [np.expand_dims(a, axes) for a in found]
    return [self.to_tensor(a, dtype) for a, dtype in zip(found, dtypes)]


def generic_scan(self, input) -> list:
    """``ScanOps.generic_scan``, a row at a time."""
    dtypes = [each.dtype for each in input]
    rows = list(zip(*(np.moveaxis(each.handle.data, self.axis, 0) for each in input)))
    for i in range(1, len(rows)):
        rows[i] = _combine(self, dtypes, rows[i - 1], rows[i])
    return [self.to_tensor(np.stack(column, self.axis), dtype) for column, dtype in zip(zip(*rows), dtypes)]


class _Shape:
    """Triton's view of a block's shape: the one of its type, the one of its values, and how many there are."""

    def __init__(self, shape: tuple) -> None:
        self.of_type = tl.tuple(list(shape))
        self.of_values = tl.tuple([tl.constexpr(n) for n in shape])
        self.count = tl.core.validate_block_shape(self.of_type)
        self.name, self.numel = str(self.of_type), tl.constexpr(self.count)


_SCALAR = _Shape(())


@cache
def _shape(shape: tuple) -> _Shape:
    return _Shape(shape)


def _shapes() -> None:
    """Blocks and values share what their shape says."""
    define, to_ir = tl.block_type.__init__, tl.block_type.to_ir

    def named(self, element_ty, known: _Shape) -> tl.block_type:
        self.element_ty, self.shape, self.numel, self.known = element_ty, known.of_type, known.count, known
        self.name = f"<{known.name}, {element_ty.name}>"
        return self

    def init_block(self, element_ty, shape) -> None:
        numbers = tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if numbers and all(type(n) is int for n in numbers):
            named(self, element_ty, _shape(numbers))
        else:
            define(self, element_ty, shape)  # which says what is wrong

    def init_tensor(self, handle, type) -> None:
        known = type.known if type.is_block() else _SCALAR
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known.of_values, known.numel

    def with_element(self, scalar_ty) -> tl.block_type:
        return named(object.__new__(tl.block_type), scalar_ty, self.known)

    def type_of(self, builder):
        if builder is not interpreter.interpreter_builder:
            return to_ir(self, builder)
        return self.with_element_ty(self.element_ty.to_ir(builder))

    same = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or same(self, other)
    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor
    tl.block_type.with_element_ty, tl.block_type.to_ir = with_element, type_of


# Types of which nothing is converted among themselves, and the numbers that each can be with.
_WIDTHS = {f"int{bits}": ((int,), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
_PLAIN = {**_WIDTHS, "fp32": ((int, float), -math.inf, math.inf)}
_NOTHING = ((), 0, 0)


def _semantic() -> None:
    """Of values of the same shape nothing is broadcast, of the same type nothing converted; a number is made once."""
    semantic = interpreter.interpreter_semantic
    broadcast, constant = semantic.broadcast_impl_value, semantic.scalar_constant
    convert = semantic.binary_op_type_checking_impl

    @lru_cache(1 << 14)
    def made(value, kind: type, dtype, shape: _Shape):
        found = constant(value, dtype)
        if shape is not _SCALAR:
            found = semantic.splat(found, shape.of_type)
        found.handle.data.flags.writeable = False  # it is shared
        return found

    def scalar_constant(value, dtype):
        if type(value) in (bool, int, float) and dtype is not None:
            return made(value, type(value), dtype, _SCALAR)
        return constant(value, dtype)

    def broadcast_values(lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    def alike(value, number):
        """The number with the other's type and shape, None if Triton has to say what they are together."""
        kinds, least, most = _PLAIN.get(value.dtype.name, _NOTHING)
        if type(number) in kinds and least <= number <= most:
            return made(number, type(number), value.dtype, value.type.known if value.type.is_block() else _SCALAR)
        return None

    def operands(lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        values = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if all(values):
            same = lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in _PLAIN
            if same or (allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.name in _WIDTHS):
                return broadcast_values(lhs, rhs)
        elif arithmetic_check and any(values):
            found = alike(lhs, rhs) if values[0] else alike(rhs, lhs)
            if found is not None:
                return (lhs, found) if values[0] else (found, rhs)
        return convert(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.broadcast_impl_value, semantic.scalar_constant = broadcast_values, scalar_constant
    semantic.binary_op_type_checking_impl = operands


def install() -> None:
    """Make these changes; called once, before any kernel runs."""
    patches, builder = _Patches(), interpreter.interpreter_builder
    interpreter._patch_lang = patches
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    interpreter.GridExecutor.__call__ = lambda executor, *args, **kwargs: patches.launch(executor, *args, **kwargs)
    interpreter._get_np_dtype = _np_dtypes()
    _shapes()
    _semantic()
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.ScanOps.generic_scan = generic_scan
