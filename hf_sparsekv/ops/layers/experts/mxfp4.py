"""Weights of four bits: codes of e2m1 and a power of two for each 32 of them (OCP Microscaling formats 1.0, MXFP4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # weights that share a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; bit 3 is the sign
BIAS = 127  # of a scale's exponent
MAX_SCALE = 240  # kernels multiply by 2 ** 14 more, in float32


class Mxfp4(NamedTuple):
    """Weights ``[E, n, d]``, ``d`` a multiple of 32.

    Args:
        codes: uint8 ``[E, n, d / 2]``; input ``2 * i`` is in the lower four bits of byte ``i``.
        scales: uint8 ``[E, n, d / 32]``; weights are ``VALUES[code] * 2 ** (scale - 127)``.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, n, d)``."""
        experts, n, half = self.codes.shape
        return experts, n, 2 * half

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def check(self) -> None:
        """Raise unless codes and scales fit each other and are dense."""
        experts, n, d = self.shape
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.uint8:
            raise ValueError(f"codes and scales must be uint8, got {self.codes.dtype} and {self.scales.dtype}")
        if d % BLOCK or self.scales.shape != (experts, n, d // BLOCK):
            raise ValueError(
                f"codes {list(self.codes.shape)} need scales [{experts}, {n}, {d // BLOCK}] and a multiple of {BLOCK} "
                f"inputs, got {list(self.scales.shape)}"
            )
        if not (self.codes.is_contiguous() and self.scales.is_contiguous()):
            raise ValueError("codes and scales must be contiguous")


def dequantise(weight: Mxfp4, dtype: torch.dtype) -> Tensor:
    """The weights, ``[E, n, d]``: the definition."""
    values = torch.tensor([*VALUES, *(-v for v in VALUES)], device=weight.device)
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).int()
    wide = values[codes].unflatten(-2, (-1, BLOCK // 2)).flatten(-2)  # [E, n, d / 32, 32]
    scaled = torch.ldexp(wide, (weight.scales.int() - BIAS)[..., None])
    return scaled.flatten(-2).to(dtype)


def encode(weights: Tensor) -> Mxfp4 | None:
    """The codes whose weights are exactly ``weights [E, n, d]``; None if there are none.

    So a checkpoint in MXFP4 which a library has dequantised becomes codes again, without loss.
    """
    if weights.shape[-1] % BLOCK:
        return None
    blocks = weights.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    # Of the largest magnitude, 6, 4, 3, 2, 1.5, 1 or .5 times the scale, the exponent gives a scale of which it is 4 or
    # 6. A smaller one would leave it out of range; with a larger one, codes that are exact here may not be.
    exponent = torch.frexp(largest).exponent - 3  # 4 <= largest / 2 ** exponent < 8
    exponent = torch.where(largest > 0, exponent, 0).clamp(min=-BIAS)
    scaled = torch.ldexp(blocks, -exponent[..., None])
    grid = torch.tensor(VALUES, device=weights.device)
    code = torch.bucketize(scaled.abs().contiguous(), grid)  # the first that is not smaller
    code = code.clamp(max=len(VALUES) - 1)
    scales = exponent + BIAS
    if not (bool((grid[code] == scaled.abs()).all()) and bool(((scales >= 0) & (scales <= MAX_SCALE)).all())):
        return None
    code = (code + 8 * torch.signbit(blocks)).to(torch.uint8).flatten(-2)
    return Mxfp4(code[..., ::2] | code[..., 1::2] << 4, scales.to(torch.uint8))
