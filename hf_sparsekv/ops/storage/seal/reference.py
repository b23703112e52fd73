"""Move full blocks into the block pool, from the ring of recent tokens or from a prompt: the definitions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..quantise.reference import quantise

MOST_HALF = torch.finfo(torch.float16).max
MOST_SPREADS = 6.0  # a label's distance from its centre: one that drifts further may not take all steps of its token


@dataclass(frozen=True)
class Index:
    """Fields per physical block that two-level selection reads; None for fields that are not kept.

    Args:
        key_dim: ``Dk``; for latents (MLA) the whole width of a token.
        bounds: ``[num_blocks, H, 2, Dk]``, see :func:`key_bounds`.
        channels: int32 ``[batch, H, r]``, label channels of each row and KV head.
        norms: float32 ``[batch, H, 2, r]``, centre and spread of each of them, see :func:`standardised`. With channels.
        codes: uint8 ``[num_blocks, H, block_size, r / 2]``.
        qparams: float16 ``[num_blocks, H, block_size, 2]``, scale and zero point of each token. With codes.
        means: ``[num_blocks, H, D]``, running means, see :func:`running_means`.
        span: blocks in a span of ``means``.
        scales: float16 ``[num_blocks, H, 2 Dk + block_size]``, for a ``kv`` of int8 codes (``ops.storage.quantise``).
    """

    key_dim: int
    bounds: Tensor | None = None
    channels: Tensor | None = None
    norms: Tensor | None = None
    codes: Tensor | None = None
    qparams: Tensor | None = None
    means: Tensor | None = None
    span: int = 1
    scales: Tensor | None = None


def key_bounds(keys: Tensor, usable: Tensor) -> Tensor:
    """Largest and smallest usable key per channel of each block.

    A block without usable keys gets bounds that score lower than every real one; readers skip it anyway. NaN in a
    usable key gives NaN in that channel.

    Args:
        keys: ``[..., H, block_size, Dk]``.
        usable: bool ``[..., block_size]``.

    Returns:
        ``[..., H, 2, Dk]``.
    """
    out = ~usable[..., None, :, None]
    limit = torch.finfo(keys.dtype).max
    return torch.stack((keys.masked_fill(out, -limit).amax(-2), keys.masked_fill(out, limit).amin(-2)), dim=-2)


def standardised(labels: Tensor, norms: Tensor) -> Tensor:
    """Labels in units of their channels: ``(label - centre) / spread``, float32, held to ``MOST_SPREADS``.

    A token's codes have one scale for all channels, which a channel with a large mean would take for itself. So would
    one that rotates slowly, and has left by far what it was when the centre was calibrated.

    Args:
        labels: ``[..., batch, H, tokens, r]``.
        norms: ``[batch, H, 2, r]``.
    """
    centre, spread = norms[:, :, None].unbind(3)
    return ((labels.float() - centre) / spread).clamp(-MOST_SPREADS, MOST_SPREADS)


def quantise_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """INT4 codes of label channels, with a scale and a zero point per token.

    Labels are clamped to the range of float16, so that scale and zero point are finite. A token with NaN among its
    labels gets NaN for both, and codes of 0.

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
    digits = ((x - zero.float()) / torch.where(step == 0, 1.0, step)).round().clamp(0, 15)
    digits = digits.nan_to_num(0.0).to(torch.uint8)
    half = x.shape[-1] // 2
    return digits[..., :half] | (digits[..., half:] << 4), torch.cat((scale, zero), dim=-1)


def running_means(
    blocks: Tensor, usable: Tensor, before: Tensor, count: Tensor, *, first: int = 0, span: int = 1
) -> Tensor:
    """Running mean of keys and values: over the usable tokens of each block and of those before it in its span.

    A span has ``span`` blocks. The last block of a full span holds the mean of the whole span; in a growing span, the
    last full block does. Adding a block therefore changes no earlier one.

    Args:
        blocks: ``[n, batch, H, block_size, D]``, consecutive blocks.
        usable: bool ``[n, batch, block_size]``.
        before: ``[batch, H, D]``, the running mean of the block before the first one.
        count: int ``[batch]``, the number of usable tokens in ``before``.
        first: index of the first block in its span. With 0, ``before`` and ``count`` are not read.

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


def check(recent_kv: Tensor, rows: Tensor, after: Tensor, sinks: int, kv: Tensor, index: Index) -> None:
    """Raise ``ValueError`` for arguments that no implementation accepts; reads shapes only."""
    batch, ring, size = len(recent_kv), recent_kv.shape[2] - sinks, kv.shape[2]
    if ring % size:
        raise ValueError(f"the ring must hold whole blocks of {size} tokens, got {ring} beside {sinks} sinks")
    for name, t in (("rows", rows), ("after", after)):
        if t.shape != (batch, 2):
            raise ValueError(f"{name} must be [{batch}, 2], length and sealed tokens of each row, got {tuple(t.shape)}")
    if (kv.dtype == torch.int8) != (index.scales is not None):
        raise ValueError(f"kv of int8 has scales, and nothing else: got {kv.dtype}")


def seal(
    recent_kv: Tensor,
    rows: Tensor,
    after: Tensor,
    sinks: int,
    block_table: Tensor,
    kv: Tensor,
    index: Index,
) -> None:
    """Seal the oldest block in the ring of each row where ``after`` has more sealed tokens than ``rows``.

    Other rows are neither read nor written. A row is also skipped if ``rows`` gives it no tokens, or if its block table
    has no block (-1) for the tokens. The call is therefore safe in every step, whichever rows have a block due.

    Keys and values go to the row's physical block, unchanged or as codes. Bounds and means are computed from the
    selectable tokens, labels from all tokens; codes are never read back for them. A row's first ``sinks`` tokens are
    its sinks: they are also copied to the front of the recent buffer, and cannot be selected.

    Args:
        recent_kv: ``[batch, H, sinks + R, Dk + Dv]``, ``R`` a multiple of ``block_size``: token ``i`` is at
            ``sinks + i % R``. The first ``sinks`` entries may be written.
        rows: int32 ``[batch, 2]``, length and sealed tokens of each row before.
        after: int32 ``[batch, 2]``, the same afterwards: as many sealed tokens, or one block more.
        block_table: int32 ``[batch, cap]``, physical id of each block of each row. Block ``rows[r, 1] // block_size``
            is filled. With means, the blocks before it in its span are read.
        kv: ``[num_blocks, H, block_size, Dk + Dv]``; may be in host memory while everything else is on the device.
            Its width is 0 if keys and values are kept elsewhere. int8 with ``index.scales``.
        index: further fields to fill. A mean counts the tokens from the start of its span on, except sinks.
    """
    check(recent_kv, rows, after, sinks, kv, index)
    size, ring = kv.shape[2], recent_kv.shape[2] - sinks
    sealed, nth = rows[:, 1].long(), rows[:, 1].long() // size
    to = block_table.gather(1, nth.clamp_max(block_table.shape[1] - 1)[:, None])[:, 0].long()
    row = ((after[:, 1] > rows[:, 1]) & (rows[:, 0] > 0) & (to >= 0)).nonzero()[:, 0]
    if not len(row):
        return
    sealed, nth, to = sealed[row], nth[row], to[row]
    token = sealed[:, None] + torch.arange(size, device=row.device)  # [rows, block_size]
    block = recent_kv[row[:, None], :, sinks + token % ring].transpose(1, 2)  # [rows, H, block_size, D]
    usable = token >= sinks
    for i, j in (~usable).nonzero().tolist():
        recent_kv[row[i], :, token[i, j]] = block[i, :, j]
    if index.scales is None:
        kv[to.to(kv.device)] = block[..., : kv.shape[3]].to(kv.device)
    else:
        coded, index.scales[to] = quantise(block, index.key_dim)
        kv[to.to(kv.device)] = coded.to(kv.device)
    keys = block[..., : index.key_dim]
    if index.bounds is not None:
        index.bounds[to] = key_bounds(keys, usable)
    if index.codes is not None:
        assert index.channels is not None and index.norms is not None and index.qparams is not None
        labels = keys.gather(-1, index.channels[row].long()[:, :, None].expand(-1, -1, size, -1))
        index.codes[to], index.qparams[to] = quantise_labels(standardised(labels, index.norms[row]))
    if index.means is not None:
        start = (nth - nth % index.span) * size
        count = (sealed - start.clamp_min(sinks)).clamp_min(0)  # tokens in the preceding mean
        last = block_table[row, (nth - 1).clamp_min(0)].long().clamp_min(0)
        before = index.means[last].float().masked_fill((count == 0)[:, None, None], 0.0)
        held = block.masked_fill(~usable[:, None, :, None], 0.0).sum(2, dtype=torch.float32)
        total = (count + usable.sum(1)).clamp_min(1)
        index.means[to] = ((before * count[:, None, None] + held) / total[:, None, None]).to(index.means.dtype)


def check_range(
    recent_kv: Tensor, k: Tensor, v: Tensor, past: int, first: int, end: int, kv: Tensor, index: Index
) -> None:
    """Raise ``ValueError`` for arguments that no implementation of :func:`seal_range` accepts; reads shapes only."""
    rows, heads, _, width = recent_kv.shape
    size = kv.shape[-2]
    if kv.dim() == 5 and kv.shape[:3] != (end - first, rows, heads):
        raise ValueError(f"blocks {first} .. {end - 1} of {rows} rows do not fit a buffer of {tuple(kv.shape)}")
    if k.shape[:3] != (rows, heads, v.shape[2]) or v.shape[:2] != (rows, heads) or k.shape[3] + v.shape[3] != width:
        raise ValueError(f"k and v must make tokens of width {width}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if index.key_dim not in (k.shape[3], width):
        raise ValueError(f"keys are k, or all of a token: key_dim={index.key_dim} is neither")
    if index.scales is not None:
        raise ValueError("codes of keys and values are made of whole blocks, by ops.storage.quantise")
    if not 0 <= first < end or end * size > past + k.shape[2]:
        raise ValueError(f"blocks {first} .. {end - 1} of {size} tokens are not among {past} + {k.shape[2]} tokens")


def seal_range(
    recent_kv: Tensor,
    k: Tensor,
    v: Tensor,
    past: int,
    first: int,
    end: int,
    sinks: int,
    block_table: Tensor,
    kv: Tensor,
    index: Index,
) -> None:
    """Seal blocks ``first .. end - 1`` of a prompt, or of a chunk of it, in rows of equal length.

    Does for each block what :func:`seal` does for one. Some or all of the tokens are new and not in the ring.

    Args:
        recent_kv: ``[rows, H, sinks + R, D]``, ``R`` a multiple of ``block_size``. The ring holds the tokens before
            ``past`` that belong to these blocks. The first ``sinks`` entries may be written.
        k, v: ``[rows, H, n, D']``, whose widths add up to ``D``: tokens ``past .. past + n - 1``.
        block_table: int32 ``[rows, cap]``, physical id of each block of each row.
        kv: ``[num_blocks, H, block_size, D]``, indexed by physical id. Or a buffer of these blocks alone, ``[end -
            first, rows, H, block_size, D]``. The width is 0 if keys and values are kept elsewhere.
        index: further fields to fill, by physical id; without ``scales``.
    """
    check_range(recent_kv, k, v, past, first, end, kv, index)
    size, ring, start = kv.shape[-2], recent_kv.shape[2] - sinks, first * kv.shape[-2]
    token = torch.arange(start, end * size, device=k.device)
    old = min(max(past - start, 0), len(token))
    new = slice(start + old - past, end * size - past)
    tokens = torch.cat((k[:, :, new], v[:, :, new]), dim=-1)
    if old:
        tokens = torch.cat((recent_kv[:, :, sinks + token[:old] % ring], tokens), dim=2)
    if start < sinks:
        recent_kv[:, :, start : min(sinks, end * size)] = tokens[:, :, : sinks - start]
    blocks = tokens.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4)  # [n, rows, H, block_size, D]
    ids = block_table[:, first:end].T.long()  # [n, rows]
    if kv.shape[-1]:
        if kv.dim() == 5:
            kv.copy_(blocks)
        else:
            kv[ids] = blocks
    usable = (token >= sinks).view(-1, 1, size).expand(-1, len(recent_kv), -1)
    keys = blocks[..., : index.key_dim]
    if index.bounds is not None:
        index.bounds[ids] = key_bounds(keys, usable)
    if index.codes is not None:
        assert index.channels is not None and index.norms is not None and index.qparams is not None
        at = index.channels.long()[None, :, :, None].expand(*blocks.shape[:4], -1)
        labels = standardised(keys.gather(-1, at), index.norms)
        index.codes[ids], index.qparams[ids] = quantise_labels(labels)
    if index.means is not None:
        place = first % index.span
        earlier = max(start - max((first - place) * size, sinks), 0)  # tokens in the preceding mean
        before = index.means.new_zeros(len(recent_kv), *index.means.shape[1:])
        if earlier:
            before = index.means[block_table[:, first - 1].long()]
        count = torch.full((len(before),), earlier, device=k.device)
        index.means[ids] = running_means(blocks, usable, before, count, first=place, span=index.span)
