"""Move the oldest full block of the ring into the block pool: the definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._flags import SELECTABLE, SINK, VALID

MOST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Index:
    """Per-physical block fields that two-level selection reads; None for what is not kept.

    Args:
        key_dim: ``Dk``; of latents (MLA) the whole row.
        bounds: ``[num_blocks, parts, H, sides, Dk]``, metadata of each part of a block, see :func:`key_metadata`.
        part_fill: int32 ``[num_blocks, parts]``, selectable tokens of each part.
        channels: int32 ``[batch, H, r]``, label channels of each row and KV head.
        codes: uint8 ``[num_blocks, H, block_size, r / 2]``, or ``[..., r]`` in the keys' dtype.
        qparams: float16 ``[num_blocks, H, block_size, 2]``; None with unquantised codes.
        metadata: what ``bounds`` are.
        means: ``[num_blocks, H, D]``, running means, see :func:`running_means`.
        earlier: int32 ``[batch, n]``, physical blocks of those before this one in its span; with ``means``.
    """

    key_dim: int
    bounds: Tensor | None = None
    part_fill: Tensor | None = None
    channels: Tensor | None = None
    codes: Tensor | None = None
    qparams: Tensor | None = None
    metadata: str = "min_max"
    means: Tensor | None = None
    earlier: Tensor | None = None


def key_metadata(keys: Tensor, usable: Tensor, parts: int, metadata: str = "min_max") -> Tensor:
    """What is kept of the usable keys of each part of a block, per channel.

    * ``"min_max"``: :func:`key_bounds`.
    * ``"cuboid_mean"``: the centre of the box that they span, ``(max + min) / 2``, and their mean absolute deviation
      from it (ArkVale, PSA).
    * ``"mean"``: their mean.

    A part without usable keys has zeros in the latter two. NaN in a usable key is NaN in its channel of its part.

    Args:
        keys: ``[..., H, block_size, Dk]``.
        usable: bool ``[..., block_size]``.

    Returns:
        ``[..., parts, H, sides, Dk]`` in the keys' dtype, ``sides`` 2, or 1 for the mean.
    """
    bounds = key_bounds(keys, usable, parts)
    if metadata == "min_max":
        return bounds
    dtype, keys = keys.dtype, keys.unflatten(-2, (parts, -1)).transpose(-4, -3).float()  # [..., parts, H, tokens, Dk]
    usable = usable.unflatten(-1, (parts, -1))[..., None, :, None]
    count = usable.sum(-2).clamp_min(1)
    if metadata == "mean":
        return (keys.masked_fill(~usable, 0.0).sum(-2) / count)[..., None, :].to(dtype)
    centre = (bounds[..., 0, :].float() + bounds[..., 1, :].float()) / 2
    spread = (keys - centre[..., None, :]).abs().masked_fill(~usable, 0.0).sum(-2) / count
    return torch.stack((centre, spread), dim=-2).to(dtype)


def key_bounds(keys: Tensor, usable: Tensor, parts: int) -> Tensor:
    """Largest and smallest usable key per channel of each part of a block.

    A part without any gets bounds that score lower than every real one; it is skipped by its fill anyway.

    Args:
        keys: ``[..., H, block_size, Dk]``.
        usable: bool ``[..., block_size]``.

    Returns:
        ``[..., parts, H, 2, Dk]``.
    """
    keys = keys.unflatten(-2, (parts, -1)).transpose(-4, -3)  # [..., parts, H, tokens, Dk]
    out = ~usable.unflatten(-1, (parts, -1))[..., None, :, None]
    limit = torch.finfo(keys.dtype).max
    return torch.stack((keys.masked_fill(out, -limit).amax(-2), keys.masked_fill(out, limit).amin(-2)), dim=-2)


def quantise_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """INT4 codes of label channels, a scale and a zero point per token.

    Labels beyond what float16 holds, infinities among them, are taken for its ends, so that scale and zero point are
    finite. A token with NaN among its labels gets both NaN, and 0 for the codes.

    Args:
        labels: ``[..., r]``, r even.

    Returns:
        codes uint8 ``[..., r / 2]`` (channel ``i`` in the low, ``i + r / 2`` in the high four bits) and float16
        ``[..., 2]``: scale and zero point, so that ``label ~ code * scale + zero``.
    """
    x = labels.float().clamp(-MOST_HALF, MOST_HALF)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half()
    zero = low.half()
    step = scale.float()
    digits = (
        ((x - zero.float()) / torch.where(step == 0, 1.0, step)).round().clamp(0, 15).nan_to_num(0.0).to(torch.uint8)
    )
    half = x.shape[-1] // 2
    return digits[..., :half] | (digits[..., half:] << 4), torch.cat((scale, zero), dim=-1)


def running_means(
    blocks: Tensor, usable: Tensor, before: Tensor, count: Tensor, *, first: int = 0, span: int = 1
) -> Tensor:
    """The mean of the usable tokens of each block and of those before it in its span, keys beside values.

    Spans are ``span`` blocks each, so that the last block of a span has the mean of all of it, and the last full block
    that of a span that still grows: no block changes when one is added.

    Args:
        blocks: ``[n, batch, H, block_size, D]``, one after the other.
        usable: bool ``[n, batch, block_size]``.
        before: ``[batch, H, D]``, what the block before the first one has.
        count: int ``[batch]``, usable tokens that ``before`` is the mean of.
        first: place of the first block in its span; 0: ``before`` and ``count`` are not looked at.

    Returns:
        ``[n, batch, H, D]`` in the blocks' dtype; zeros where no token is usable.
    """
    n, batch, heads, _, dim = blocks.shape
    held = blocks.masked_fill(~usable[:, :, None, :, None], 0.0).sum(3, dtype=torch.float32)
    held = torch.cat((held.new_zeros(first, batch, heads, dim), held))
    tokens = torch.cat((usable.new_zeros(first, batch, dtype=torch.int64), usable.sum(-1)))
    if first:
        tokens[first - 1] = count
        held[first - 1] = before.float() * count[:, None, None]
    more = -len(held) % span
    held, tokens = (torch.cat((x, x.new_zeros(more, *x.shape[1:]))).unflatten(0, (-1, span)) for x in (held, tokens))
    mean = held.cumsum(1) / tokens.cumsum(1).clamp_min(1)[..., None, None]
    return mean.flatten(0, 1)[first : first + n].to(blocks.dtype)


def seal(
    recent_kv: Tensor,
    recent_valid: Tensor,
    at: int,
    sinks: int,
    seen: Tensor,
    physical_ids: Tensor,
    kv: Tensor,
    flags: Tensor,
    fill: Tensor,
    index: Index,
) -> None:
    """Seal the block at position ``at`` of every row's recent buffer.

    The first ``sinks`` valid tokens of a row are its sinks: they are copied to the front of the recent buffer and
    cannot be selected. Keys and values go to the rows' physical blocks, as they are; what the selection reads is made
    of the selectable tokens (bounds, means) or of all (labels). The block's entries of the recent buffer become
    invalid.

    Args:
        recent_kv: ``[batch, H, sinks + R, Dk + Dv]``; its first ``sinks`` entries may be written.
        recent_valid: bool ``[batch, sinks + R]``, written.
        at: first of the ``block_size`` positions, one after the other.
        seen: int32 ``[batch]``, valid tokens sealed before; their number grows.
        physical_ids: int32 ``[batch]``, one physical block for each row.
        kv: ``[num_blocks, H, block_size, Dk + Dv]``; may lie in host memory while everything else is on the device.
            Or of width 0: keys and values are kept somewhere else.
        flags: uint8 ``[num_blocks, block_size]``: 0 padding, 1 selectable, 3 sink.
        fill: int32 ``[num_blocks]``, selectable tokens.
        index: further fields to fill.
    """
    size = kv.shape[2]
    span = slice(at, at + size)
    block, valid = recent_kv[:, :, span], recent_valid[:, span]
    nth = seen[:, None] + valid.int().cumsum(1) - 1
    is_sink = valid & (nth < sinks)
    for row, token in is_sink.nonzero().tolist():
        recent_kv[row, :, nth[row, token]] = block[row, :, token]
        recent_valid[row, nth[row, token]] = True
    to, home = physical_ids.long(), physical_ids.to(kv.device).long()
    kv[home] = block[..., : kv.shape[3]].to(kv.device)
    mark = valid.to(torch.uint8) * VALID + is_sink.to(torch.uint8) * SINK
    usable = mark == SELECTABLE
    flags[to] = mark
    fill[to] = usable.sum(-1, dtype=torch.int32)
    keys = block[..., : index.key_dim]
    if index.bounds is not None:
        index.bounds[to] = key_metadata(keys, usable, index.bounds.shape[1], index.metadata)
    if index.part_fill is not None:
        index.part_fill[to] = usable.unflatten(-1, (index.part_fill.shape[1], -1)).sum(-1, dtype=torch.int32)
    if index.codes is not None:
        labels = keys.gather(-1, index.channels.long()[:, :, None].expand(-1, -1, size, -1))
        if index.qparams is None:
            index.codes[to] = labels
        else:
            index.codes[to], index.qparams[to] = quantise_labels(labels)
    if index.means is not None:
        earlier = index.earlier.long()
        first, count = earlier.shape[1], fill[earlier].sum(-1)
        before = index.means[earlier[:, -1]] if first else index.means[to]
        found = running_means(block[None], usable[None], before, count, first=first, span=first + 1)
        index.means[to] = found[0]
    seen += valid.sum(1, dtype=torch.int32)
    recent_valid[:, span] = False
