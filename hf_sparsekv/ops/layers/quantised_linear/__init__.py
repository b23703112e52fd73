"""A linear layer for a few rows with weights of 4 or 8 bits."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..._dispatch import has_triton, operator
from . import lookup, reference
from .reference import FP8, LEAST, MAX_ROWS, QuantisedWeight, dequantise

__all__ = ["MAX_ROWS", "QuantisedWeight", "dequantise", "quantised_linear", "serves"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def serves(x: Tensor, weight: QuantisedWeight, *_, **__) -> bool:
    """Whether a kernel for ``x [..., in]`` and ``weight`` runs on this GPU: 1 to ``MAX_ROWS`` rows, in float32 one.

    :mod:`.lookup` serves several rows, and codes of a codebook. Triton serves one row of 8 bits, and 8-bit floats from
    compute capability 8.9 on. Its scales must be of whole rows, or of blocks of a multiple of ``LEAST`` inputs. On a
    CPU no kernel runs, and only rows and blocks are checked.
    """
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if not 0 < rows <= MAX_ROWS or x.dtype not in _DTYPES or (rows > 1 and x.dtype == torch.float32):
        return False
    of_triton = rows == 1 and weight.codebook is None
    if of_triton and weight.scales.shape[1] > 1 and weight.block[1] % LEAST:
        return False
    if not x.is_cuda:
        return True
    if not has_triton():
        return False
    if of_triton and (weight.codes.dtype != FP8 or has_fp8(x.get_device())):
        return True
    return lookup.serves(x, weight)


@cache
def has_fp8(device: int) -> bool:
    """Whether Triton converts 8-bit floats on a CUDA device. -1 is a CPU, where its interpreter does."""
    return device < 0 or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9))


quantised_linear = operator(reference.quantised_linear, on="x", when=serves)
