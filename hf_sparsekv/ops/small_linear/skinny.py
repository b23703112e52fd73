"""A linear layer of a few rows in CUDA C++: ``skinny.cu`` says how."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _cuda
from ..gated.reference import ACTIVATIONS
from .reference import MAX_ROWS


class Skinny(NamedTuple):
    """Threads of a block, blocks that a processor holds at least, and 32 inputs so many times in flight, twice."""

    threads: int = 256
    resident: int = 2
    steps: int = 4


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, out: Tensor, config: Skinny
) -> bool:
    """As ``reference.small_linear`` of ``x [rows, in]`` to ``out [rows, outputs]``, contiguous, where these tensors and
    this GPU allow it: whether it has.
    """
    rows, k = x.shape
    if x.dtype not in (torch.bfloat16, torch.float16) or any(
        t is not None and t.dtype != x.dtype for t in (weight, bias)
    ):
        return False
    if not 0 < rows <= MAX_ROWS or k % 8 or not _loads_16_bytes(x) or not _loads_16_bytes(weight):
        return False
    defined = {"THREADS": config.threads, "RESIDENT": config.resident, "STEPS": config.steps, "ROWS": rows}
    defined["ACTIVATION"] = 0 if activation is None else 1 + ACTIVATIONS.index(activation)
    defined["BFLOAT16"] = int(x.dtype == torch.bfloat16)
    kernel = _kernel(x, **defined)
    if kernel is None:
        return False
    n, each = out.shape[-1], 16 if activation is None else 8
    args = x, x.stride(0), weight, weight.stride(0), bias, out, n, k
    kernel.launch((-(-n // each), 1), config.threads, 0, x, *args)
    return True


def _kernel(x: Tensor, **defined: int) -> _cuda.Kernel | None:
    return _cuda.load(x, __package__, "skinny.cu", "small_linear_skinny_kernel", **defined)


def _loads_16_bytes(t: Tensor) -> bool:
    """Whether each row lies in one piece, at a multiple of 16 bytes."""
    return t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0
