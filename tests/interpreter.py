"""Triton's interpreter without work whose result it throws away, or has already, and with a GPU's maximum.

Tests of kernels take a third of the time so. What an operation of a kernel computes stays Triton's. Triton 3.7.1:

* every call of a jitted function by another looks through all members of ``triton.language`` for what to replace,
  which the launch has done (half the time where kernels are made of small functions);
* every integer sum, difference and product is computed again in 64 bits, for an assertion that only ``debug`` makes
  (half the time of the selection kernels);
* every operation makes the table of numpy's types anew;
* ``tl.reduce`` and ``tl.associative_scan`` with a function of one's own go from number to number. Here a function gets
  the halves of what is to be reduced, as on a GPU, or one row of a scan after the other;
* after a launch every tensor's whole storage is copied to where it is already, which makes gigabytes of one that is
  hardly used.

One thing is changed: ``tl.maximum`` and ``tl.minimum`` of NaN and a number are the number, as on a GPU, unless
``propagate_nan`` says otherwise. The interpreter propagates it either way (its reductions do not).
"""

from __future__ import annotations

from dataclasses import replace

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


def install() -> None:
    """Make these changes; called once, before any kernel runs."""
    patches, builder = _Patches(), interpreter.interpreter_builder
    interpreter._patch_lang = patches
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    interpreter.GridExecutor.__call__ = lambda executor, *args, **kwargs: patches.launch(executor, *args, **kwargs)
    interpreter._get_np_dtype = _np_dtypes()
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.ScanOps.generic_scan = generic_scan
