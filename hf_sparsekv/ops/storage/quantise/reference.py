"""8-bit codes of keys and values: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 127  # largest magnitude of a code
MOST_SCALE = torch.finfo(torch.float16).max


def quantise(kv: Tensor, split: int) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit codes of each token's entries, with one scale for each of its two parts.

    A scale is the part's largest magnitude divided by 127, rounded to float16. The error of an entry is at most half a
    scale, 1/254 of that magnitude (plus float16's rounding). Scales beyond the range of float16 (as with infinite
    entries) are clamped, and so are their entries. Scales below that range become 0, and their entries zeros. A part
    with NaN has a NaN scale, and all its entries become NaN.

    Scales are per token and head, as KIVI (arXiv 2402.02750) has for values. With 8 bits, keys need no scales per
    channel.

    Args:
        kv: ``[..., D]``: key, then value; or latent, then rotary part (MLA).
        split: entries of the first part, 1 to D.

    Returns:
        codes int8 ``[..., D]``, and scales float16 ``[..., 2]``, on kv's device. The second scale is 0 if ``split`` is
        D.
    """
    x = kv.float()
    codes, scales = [], []
    for part in (x[..., :split], x[..., split:]):
        most = part.abs().amax(-1, keepdim=True) if part.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
        scale = (most / MOST).clamp_max(MOST_SCALE).half()
        step = scale.float()
        digits = (part / torch.where(step == 0, 1.0, step)).round().clamp(-MOST, MOST)
        codes.append(digits.nan_to_num(0.0).to(torch.int8))
        scales.append(scale)
    return torch.cat(codes, dim=-1), torch.cat(scales, dim=-1)


def dequantise(codes: Tensor, scales: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    """Invert :func:`quantise` up to its error: the product of codes and scales in float32, rounded to ``dtype``."""
    x, scales = codes.float(), scales.float()
    return torch.cat((x[..., :split] * scales[..., :1], x[..., split:] * scales[..., 1:]), dim=-1).to(dtype)


def entries(kv: Tensor, scales: Tensor | None, split: int, dtype: torch.dtype, *at: Tensor) -> Tensor:
    """Entries ``at`` of stored blocks, on their device: unchanged, or dequantised if there are ``scales``."""
    found = kv[at]
    if scales is None:
        return found
    mine = scales[tuple(i.to(scales.device) for i in at)]
    return dequantise(found, mine.to(kv.device), split, dtype)
