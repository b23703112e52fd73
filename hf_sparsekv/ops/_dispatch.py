"""Which implementation of an operator runs, and the checks that the Triton versions share."""

from __future__ import annotations

from functools import cache

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
    """Whether the Triton kernel serves an operator whose result lies where ``t`` lies."""
    return t.is_cuda and has_triton()


def give(result: Tensor, out: Tensor | None) -> Tensor:
    """``result``, in ``out`` if there is one: the references always allocate."""
    return result if out is None else out.copy_(result)


def require_dense_rows(**tensors: Tensor | None) -> None:
    """Raise for a tensor whose last dimension is strided: the kernels take it to be contiguous."""
    for name, t in tensors.items():
        if t is not None and t.numel() and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, got strides {t.stride()}")
