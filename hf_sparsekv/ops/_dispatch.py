"""Choice of an operator's implementation, and the checks that the Triton versions share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton can be imported. It is an optional dependency."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def use_triton(t: Tensor) -> bool:
    """Whether an operator whose result is on the device of ``t`` runs as a Triton kernel."""
    return t.is_cuda and has_triton()


def operator(
    reference: Callable,
    *,
    on: str,
    in_place: tuple[str, ...] = (),
    when: Callable[..., bool] | None = None,
    module: str = "triton",
    on_cpu: Callable | None = None,
) -> Callable:
    """The operator that ``reference`` defines: the kernel of the same name where it can run, otherwise ``reference``.

    On a CPU ``on_cpu`` runs instead, if it is given.

    Signature and docstring are the reference's. Kernels take the same arguments, and ``config`` in addition.

    Args:
        on: the argument whose device decides: a kernel runs on CUDA tensors if Triton is installed.
        in_place: arguments that a kernel reads or writes in place; those in host memory must be pinned.
        when: further condition for the kernel, a function of the same arguments.
        module: name of the kernel's module, in the package of the reference.
        on_cpu: computes the same in fewer torch operations (up to rounding), for the calls that are frequent in decode
            steps on a CPU. It passes other calls to ``reference``.
    """
    names = list(inspect.signature(reference).parameters)
    first, others = names.index(on), [(name, names.index(name)) for name in in_place]
    package, name = reference.__module__.rpartition(".")[0], reference.__name__

    @cache
    def kernel() -> Callable:
        return getattr(import_module(f"{package}.{module}"), name)

    @wraps(reference)
    def call(*args, **named):
        where = args[first] if first < len(args) else named.get(on)
        if where is None:  # the reference raises
            return reference(*args, **named)
        if use_triton(where):
            written = (args[i] if i < len(args) else named.get(name) for name, i in others)
            if all(t.is_cuda or t.is_pinned() for t in written if t is not None) and (
                when is None or when(*args, **named)
            ):
                return kernel()(*args, **named)
        if on_cpu is not None and where.is_cpu:
            return on_cpu(*args, **named)
        return reference(*args, **named)

    call.kernel = kernel
    return call


def give(result: Tensor, out: Tensor | None) -> Tensor:
    """``result``, copied to ``out`` if it is given: the references always allocate."""
    return result if out is None else out.copy_(result)


def require_dense_rows(**tensors: Tensor | None) -> None:
    """Raise for a tensor whose last dimension is strided: the kernels assume that it is contiguous."""
    for name, t in tensors.items():
        if t is not None and t.numel() and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, got strides {t.stride()}")


def require_each_row(batch: int, valid: Tensor | None, **numbers: Tensor) -> None:
    """Raise unless there is one number for each of ``batch`` rows, and ``valid`` is one flag for each."""
    if valid is not None and (valid.dtype != torch.bool or valid.shape not in ((batch,), (batch, 1))):
        raise ValueError(f"valid must be bool, one of each of {batch} rows, got {valid.dtype} {tuple(valid.shape)}")
    for name, t in numbers.items():
        if t.shape != (batch,):
            raise ValueError(f"{name} must have one entry for each of {batch} rows, got shape {tuple(t.shape)}")


def require_rows(rows: Tensor, batch: int) -> None:
    """Raise unless ``rows`` is contiguous int32 ``[batch, 2]``: the length of each row, and its sealed tokens."""
    if rows.shape != (batch, 2) or rows.dtype != torch.int32 or not rows.is_contiguous():
        raise ValueError(
            f"rows must be contiguous int32 [{batch}, 2] (length, sealed), got {rows.dtype} {list(rows.shape)} with "
            f"strides {rows.stride()}"
        )
