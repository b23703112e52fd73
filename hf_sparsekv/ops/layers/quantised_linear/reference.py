"""A linear layer for a few rows with weights of 4 or 8 bits: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..small_linear.reference import MAX_ROWS as MAX_ROWS

FP8 = torch.float8_e4m3fn
CODES = 16  # in a codebook
LEAST = 32  # inputs: for one row, blocks of 8-bit scales must span a multiple of this


class QuantisedWeight(NamedTuple):
    """The weights ``[out, in]`` of a linear layer, as codes and scales.

    Args:
        codes: int8 or float8_e4m3fn ``[out, in]``, plain numbers. Or uint8 ``[out, in / 2]``: two codebook indices per
            byte, the first one in the upper half (as bitsandbytes packs them).
        scales: float32 ``[a, b]``, one for each block of codes. Blocks have ``ceil(out / a)`` rows and ``ceil(in / b)``
            inputs each; the last ones of a row or column may be cut off.
        codebook: float32 ``[16]``, for codes of 4 bits.
    """

    codes: Tensor
    scales: Tensor
    codebook: Tensor | None = None

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight: numbers, not bytes."""
        return self.codes.shape[1] * (2 if self.codebook is not None else 1)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and inputs that share a scale."""
        rows, columns = self.scales.shape
        return -(-self.out_features // rows), -(-self.in_features // columns)


def dequantise(weight: QuantisedWeight) -> Tensor:
    """The dequantised weights, float32 ``[out, in]``."""
    codes, scales, codebook = check(weight)
    if codebook is None:
        numbers = codes.float()
    else:
        numbers = codebook[torch.stack((codes >> 4, codes & 15), -1).flatten(-2).long()]
    rows, columns = weight.block
    of_each = scales.repeat_interleave(rows, 0)[: numbers.shape[0]].repeat_interleave(columns, 1)
    return numbers * of_each[:, : numbers.shape[1]]


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ W.T + bias``, ``[..., out]``, for ``x`` ``[..., in]`` of at most ``MAX_ROWS`` rows and a quantised ``W``.

    Inputs are not quantised (weight-only quantisation, "W4A16" and "W8A16"). Sums are computed in float32, and only the
    result, bias included, is rounded to ``x``'s dtype. Kernels may round the codebook's values to ``x``'s dtype.

    Raises:
        ValueError: shapes or dtypes do not fit :class:`QuantisedWeight`, or ``x`` does not fit the weight.
    """
    numbers = dequantise(weight)
    if x.shape[-1] != numbers.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} inputs, the weight {numbers.shape[1]}")
    return F.linear(x.float(), numbers, None if bias is None else bias.float()).to(x.dtype)


def check(weight: QuantisedWeight) -> QuantisedWeight:
    """Return ``weight`` if it is valid.

    Raises:
        ValueError: its shapes or dtypes are invalid.
    """
    codes, scales, codebook = weight
    wanted = (torch.uint8,) if codebook is not None else (torch.int8, FP8)
    if codes.dim() != 2 or codes.dtype not in wanted:
        of = "with a codebook" if codebook is not None else "without a codebook"
        kinds = " or ".join(map(str, wanted))
        raise ValueError(f"codes {of} must be {kinds} [out, .], got {codes.dtype} {list(codes.shape)}")
    if codebook is not None and (codebook.shape != (CODES,) or codebook.dtype != torch.float32):
        raise ValueError(f"a codebook must be float32 [{CODES}], got {codebook.dtype} {list(codebook.shape)}")
    if scales.dim() != 2 or scales.dtype != torch.float32 or not scales.numel():
        raise ValueError(f"scales must be float32 [a, b], got {scales.dtype} {list(scales.shape)}")
    # The number of blocks must match their size, or some scale would cover no weights.
    for size, blocks, block in zip((weight.out_features, weight.in_features), scales.shape, weight.block):
        if block and -(-size // block) != blocks:
            raise ValueError(f"{blocks} blocks of equal size do not divide {size} rows or inputs")
    return weight
