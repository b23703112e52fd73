"""8-bit codes of keys and values: the definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MOST = 127  # largest magnitude of a code
MOST_SCALE = torch.finfo(torch.float16).max


def quantise(kv: Tensor, split: int) -> tuple[Tensor, Tensor]:
    """8-bit codes of blocks: a key's entries with a centre and a step per channel, a value's with a scale per token.

    This is the layout of KIVI (arXiv 2402.02750). Key channels differ in size, and a key bias is larger than the rest
    by a hundred in some models: with one scale per token it would take the steps of all other channels. Within a block
    it is nearly constant, also where rotary embedding turns it, so the centre absorbs it.

    A channel's centre is the middle of its range in the block, its step half of that range divided by 127. A value's
    scale is its largest magnitude divided by 127. All are rounded to float16. The error of an entry is at most half a
    step or scale (plus float16's rounding). Centres, steps and scales beyond the range of float16 (as with infinite
    entries) are clamped, and so are their entries. Those below that range become 0. A token with NaN in key or value
    has a NaN scale, and its whole value becomes NaN: attending to it shows. Other tokens of the block are not affected.

    Args:
        kv: ``[..., block_size, D]``: keys of ``split`` entries, then values.
        split: entries of the key, 1 to D.

    Returns:
        codes int8 ``[..., block_size, D]``, and scales float16 ``[..., 2 * split + block_size]`` on kv's device: the
        centre of each key channel, the step of each key channel, the scale of each token's value (0 without values).
    """
    key, value = kv.float().split((split, kv.shape[-1] - split), dim=-1)
    unknown = key.isnan()
    high = key.masked_fill(unknown, -math.inf).amax(-2).clamp(-MOST * MOST_SCALE, MOST * MOST_SCALE)
    low = key.masked_fill(unknown, math.inf).amin(-2).clamp(-MOST * MOST_SCALE, MOST * MOST_SCALE)
    centre = ((high + low) / 2).clamp(-MOST_SCALE, MOST_SCALE).half()
    step = _scale(torch.maximum(high - centre.float(), centre.float() - low).clamp_min(0.0))
    most = value.abs().amax(-1) if value.shape[-1] else value.new_zeros(value.shape[:-1])
    scale = _scale(most.masked_fill(unknown.any(-1), math.nan))
    codes = _codes(key - centre.float()[..., None, :], step[..., None, :]), _codes(value, scale[..., None])
    return torch.cat(codes, dim=-1), torch.cat((centre, step, scale), dim=-1)


def _scale(most: Tensor) -> Tensor:
    return (most / MOST).clamp_max(MOST_SCALE).half()


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    step = scale.float()
    digits = (x / torch.where(step == 0, 1.0, step)).round().clamp(-MOST, MOST)
    return digits.nan_to_num(0.0).to(torch.int8)


def dequantise(codes: Tensor, scales: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    """Invert :func:`quantise` up to its error, in float32 rounded to ``dtype``."""
    return _entries(codes, scales[..., None, : 2 * split], scales[..., 2 * split :, None], split, dtype)


def _entries(codes: Tensor, norms: Tensor, scale: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    """Entries of tokens ``codes [..., D]``, whose blocks have the centres and steps ``norms [..., 2 * split]``."""
    (key, value), norms = codes.float().split((split, codes.shape[-1] - split), dim=-1), norms.float()
    key = norms[..., :split] + key * norms[..., split:]  # a product of 8 and 11 bits is exact
    return torch.cat((key, value * scale.float()), dim=-1).to(dtype)


def entries(kv: Tensor, scales: Tensor | None, split: int, dtype: torch.dtype, *at: Tensor) -> Tensor:
    """Entries ``at`` of stored blocks, on their device: unchanged, or dequantised if there are ``scales``.

    ``at``: indices of blocks, or of blocks and then of tokens in them.
    """
    found = kv[at]
    if scales is None:
        return found
    blocks = scales.dim() - 1  # dimensions that tell blocks apart
    mine = scales[tuple(i.to(scales.device) for i in at[:blocks])].to(kv.device)
    if len(at) <= blocks:
        return dequantise(found, mine, split, dtype)
    scale = mine.gather(-1, 2 * split + at[-1].broadcast_to(mine.shape[:-1])[..., None])
    return _entries(found, mine[..., : 2 * split], scale, split, dtype)
