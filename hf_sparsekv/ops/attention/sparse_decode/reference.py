"""Exact attention of one query per row over chosen cached tokens: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import give
from ..._recent import recent_valid
from ...storage.quantise.reference import entries


def sparse_decode(
    q: Tensor,
    kv: Tensor,
    rows: Tensor,
    block_table: Tensor,
    ids: Tensor | None,
    recent_kv: Tensor,
    *,
    granularity: str,
    value_dim: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    attended: Tensor | None = None,
    pages: Tensor | None = None,
    page_ids: Tensor | None = None,
    from_host: Tensor | None = None,
    lse: Tensor | None = None,
    used: Tensor | None = None,
    means: Tensor | None = None,
    mean_tokens: int | None = None,
    columns: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax attention over the recent buffer and the chosen part of the stored blocks.

    Token ``i`` of a row belongs to its block ``i // block_size``. The first ``sealed`` tokens are stored in blocks, the
    others in the ring of the recent buffer. Tokens with ``sinks <= i < sealed`` are selectable.

    With ``means``, the selectable tokens that are not attended are approximated (the estimation zone of RetroInfer,
    arXiv 2505.02922). Each span of ``mean_tokens`` tokens adds one token with the mean key and mean value of its
    selectable tokens. That token is weighted by the number of tokens of the span that are not attended.

    Args:
        q: ``[batch, Hq, Dk]``.
        kv: ``[num_blocks, H, block_size, Dk + Dv]`` stored blocks: each token's key, then its value. Or ``[..., Dk]``
            where a value is the first ``Dv`` entries of its key (MLA: latent, then rotary part). ``recent_kv`` and
            ``pages`` have the same layout. May be pinned host memory while everything else is on the device.
        rows: ``[batch, 2]`` int32, contiguous, on q's device: tokens of each row, and how many of them are sealed.
        block_table: ``[batch, cap]`` int32, physical id of each block of each row; -1 where there is none. Entries
            after the sealed tokens are not read.
        ids: int32, the selection that is attended besides the recent buffer; -1 for none.

            * ``granularity="token"``: selectable tokens of the row, ``[batch, H, n]``; unsealed ones are not attended.
            * ``"block"``: block ids ``[batch, H, n]``, whose selectable tokens are attended.
            * ``"all"``: ``None``. Every sealed token is attended, sinks included, and the recent buffer's ring.
        recent_kv: ``[batch, H, sinks + R, Dk + Dv]``: copies of the sealed tokens ``i < sinks``, then the ring, where
            token ``i`` is at ``sinks + i % R``.
        value_dim: ``Dv``.
        sinks: positions of the recent buffer that precede the ring.
        scale: softmax scaling.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sink_logits: ``[Hq]`` logits of learned attention sinks: part of the denominator, without a value.
        attended: ``[batch, H]`` int64; the number of attended tokens is added to it.
        pages: ``[F, block_size, Dk + Dv]`` device pages: copies of some blocks, one KV head each. With them a block is
            addressed by its page id: page ``f``, or ``-(physical_id + 2)`` if it has no page and is read from ``kv``;
            -1 is no block. ``granularity="token"``: ``ids`` are ``page_id * block_size + position in the block``, all
            of sealed tokens. ``"block"``: ``page_ids`` are the page ids of ``ids``.
        page_ids: ``[batch, H, n]`` int32, see ``pages``.
        from_host: ``[batch, H]`` int64; the number of attended tokens that were read from ``kv`` is added to it.
        lse: ``[batch, Hq]`` float32, receives the natural logarithm of the denominator (learned sinks included); -inf
            where it is 0.
        used: ``[batch, H]`` int32, the length of each list; with ``granularity="token"`` only. Only the first ``used``
            entries of ``ids`` are attended. The entries after them are not read.
        means: ``[num_blocks, H, Dk + Dv]`` (or ``[..., Dk]``, as ``kv``), on q's device: the mean of the selectable
            tokens of a block and of the blocks before it in its span. The mean of a span is therefore that of its last
            sealed block; a span whose last block is -1 has none. Needs ``granularity="token"`` and ascending ``ids``
            with -1 after them, because kernels search the list. Neither ``attended`` nor ``from_host`` counts a mean.
        mean_tokens: tokens of a span, a multiple of ``block_size``; with ``means``. The first span begins at token 0.
        columns: ``[batch, H, n]`` int32, the tokens of the row that ``ids`` address in ``pages``; needed with both
            ``means`` and ``pages``.
        scales: float16 ``[num_blocks, H, 2 Dk + block_size]`` on q's device, for a ``kv`` of int8 codes
            (``ops.storage.quantise``): the dequantised entries are attended, in ``recent_kv``'s dtype. Not for latents.

    Returns:
        ``[batch, Hq, Dv]`` in q's dtype, ``out`` if given. A row with nothing to attend to gives zeros. A row that
        attends to a token whose key is NaN gives NaN.
    """
    batch, q_heads, dk = q.shape
    heads, block_size = kv.shape[1:3]
    skip = sinks if granularity == "all" else 0
    check_means(means, mean_tokens, granularity, block_size, pages is not None, columns)
    check_scales(kv, scales, dk)
    listed = ids if columns is None else columns
    coded = {"scales": scales, "split": dk, "dtype": recent_kv.dtype}
    if used is not None:
        after = torch.arange(ids.shape[-1], device=ids.device) >= used[..., None]
        ids, listed = ids.masked_fill(after, -1), listed.masked_fill(after, -1)
    if pages is None:
        stored, usable = gather(kv, rows, block_table, ids, granularity, sinks, **coded)
        at_home = usable
    else:
        where = kv, rows, block_table, ids, granularity, sinks, pages, page_ids
        stored, usable, at_home = gather_paged(*where, **coded)
    if from_host is not None:
        from_host += at_home.sum(-1).to(from_host.device)
    stored = stored.to(q.device)
    chosen = torch.cat((stored, recent_kv[:, :, skip:]), dim=2).float()  # [batch, H, n, Dk + Dv]
    recent = recent_valid(rows, sinks, recent_kv.shape[2])[:, None, skip:].expand(-1, heads, -1)
    usable = torch.cat((usable.to(q.device), recent), dim=2)

    logits = q.float().view(batch, heads, q_heads // heads, dk) @ chosen[..., :dk].transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~usable[:, :, None], float("-inf"))
    # Tokens that are not attended may hold NaN: 0 x NaN must not reach the sum.
    values = values_of(chosen, dk, value_dim).masked_fill(~usable[..., None], 0.0)
    if attended is not None:
        attended += usable.sum(-1)
    if means is not None:
        mean, unread = gather_means(means, rows, block_table, listed, block_size, mean_tokens, sinks)
        stand = q.float().view(batch, heads, q_heads // heads, dk) @ mean[..., :dk].transpose(-1, -2) * scale
        if softcap is not None:
            stand = softcap * torch.tanh(stand / softcap)
        stand = stand.masked_fill((unread <= 0)[:, :, None], float("-inf")) + unread.clamp_min(1).log()[:, :, None]
        logits = torch.cat((logits, stand), dim=-1)
        values = torch.cat((values, values_of(mean, dk, value_dim)), dim=2)
    if sink_logits is not None:
        extra = sink_logits.float().view(1, heads, -1, 1).expand(batch, -1, -1, -1)
        logits = torch.cat((logits, extra), dim=-1)
    if lse is not None:
        lse.copy_(logits.logsumexp(-1).flatten(1))
    weights = softmax(logits)[..., : values.shape[2]]
    return give((weights @ values).to(q.dtype).flatten(1, 2), out)


def check_means(
    means: Tensor | None, span: int | None, granularity: str, block_size: int, paged: bool, columns: Tensor | None
) -> None:
    """Raise ``ValueError`` where ``means`` do not fit the other arguments."""
    if means is None:
        return
    if granularity != "token":
        raise ValueError(f"means go with granularity='token', not {granularity!r}: they stand for unselected tokens")
    if span is None or span < block_size or span % block_size:
        raise ValueError(f"mean_tokens must be a multiple of block_size={block_size}, got {span}")
    if paged and columns is None:
        raise ValueError("with pages the ids are places: means need their columns as well")


def check_scales(kv: Tensor, scales: Tensor | None, key_dim: int) -> None:
    """Raise ``ValueError`` where ``scales`` do not fit ``kv``."""
    if (kv.dtype == torch.int8) != (scales is not None):
        raise ValueError(f"kv of int8 has scales, and nothing else: got {kv.dtype}, scales {scales is not None}")
    if scales is None:
        return
    if kv.shape[-1] == key_dim:
        raise ValueError("kv of int8 holds keys and values, no latents (MLA)")
    shape = [*kv.shape[:2], 2 * key_dim + kv.shape[2]]
    if list(scales.shape) != shape or scales.dtype != torch.float16:
        raise ValueError(f"scales must be float16 {shape}, got {scales.dtype} {list(scales.shape)}")


def gather_means(
    means: Tensor, rows: Tensor, block_table: Tensor, columns: Tensor, block_size: int, tokens: int, sinks: int
) -> tuple[Tensor, Tensor]:
    """Means ``[batch, H, spans, D]`` of spans of ``tokens`` tokens, and how many unread tokens each represents.

    Both are float32. Means that represent no token are zero.
    """
    batch, heads = columns.shape[:2]
    spans = -(-block_table.shape[1] * block_size // tokens)
    sealed = rows[:, 1:].long()
    first = torch.arange(spans, device=columns.device) * tokens
    end = torch.minimum(first + tokens, sealed)  # [batch, spans]
    last = block_table.long().gather(-1, (-(-end // block_size) - 1).clamp_min(0)) if spans else first.expand(batch, 0)
    held = (end - first.clamp_min(sinks)).clamp_min(0).masked_fill(last < 0, 0)
    taken = torch.zeros(batch, heads, spans + 1, dtype=torch.int64, device=columns.device)
    span = torch.where((columns < 0) | (columns >= sealed[:, None]), spans, columns // tokens).long()
    taken.scatter_add_(-1, span, torch.ones_like(span))
    unread = (held[:, None] - taken[..., :spans]).clamp_min(0)
    mean = means[last.clamp_min(0)].transpose(1, 2).float()
    return mean.masked_fill((unread == 0)[..., None], 0.0), unread.float()


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; zeros where all are ``-inf``. NaN stays NaN, so that attending to it shows."""
    return logits.softmax(-1).masked_fill((logits == float("-inf")).all(-1, keepdim=True), 0.0)


def has_latents(kv: Tensor, q: Tensor) -> bool:
    """Whether values are the first part of their keys (MLA): stored tokens are then as wide as a query."""
    return kv.shape[-1] == q.shape[-1]


def values_of(rows: Tensor, dk: int, value_dim: int) -> Tensor:
    """Values of tokens stored as ``rows [..., Dk + Dv]``, or as latents ``[..., Dk]``."""
    first = 0 if rows.shape[-1] == dk else dk
    return rows[..., first : first + value_dim]


def gather(
    kv: Tensor,
    rows: Tensor,
    block_table: Tensor,
    ids: Tensor | None,
    granularity: str,
    sinks: int,
    *,
    scales: Tensor | None = None,
    split: int = 0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Entries ``[batch, H, n, Dk + Dv]`` on ``kv``'s device, and a mask of those to use, ``[batch, H, n]``.

    ``scales``, ``split`` and ``dtype`` are for a ``kv`` of int8 codes, see ``ops.storage.quantise``.
    """
    home, (heads, block_size) = kv.device, kv.shape[1:3]
    block_table, sealed = block_table.to(home).long(), rows[:, 1].to(home).long()[:, None, None]
    head = torch.arange(heads, device=home)[None, :, None]
    physical_id = block_table[:, None].expand(-1, heads, -1)
    if granularity == "token":
        ids = ids.to(home).long()
        usable = (ids >= 0) & (ids < sealed)
        physical_id = physical_id.gather(-1, ids.masked_fill(~usable, 0) // block_size)
        usable = usable & (physical_id >= 0)
        where = physical_id.clamp_min(0), head, ids.clamp_min(0) % block_size
        return entries(kv, scales, split, dtype, *where), usable
    if granularity == "block":
        ids = ids.to(home).long()
        physical_id = physical_id.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, -1)
        usable = selectable(ids, block_size, sinks, sealed)
    elif granularity == "all":
        usable = torch.arange(block_table.shape[1] * block_size, device=home).expand(1, heads, -1) < sealed
    else:
        raise ValueError(f"granularity must be 'token', 'block' or 'all', got {granularity!r}")
    usable = usable & (physical_id >= 0).repeat_interleave(block_size, -1)
    return entries(kv, scales, split, dtype, physical_id.clamp_min(0), head).flatten(2, 3), usable


def selectable(ids: Tensor, block_size: int, sinks: int, sealed: Tensor) -> Tensor:
    """Mask of the selectable tokens of the blocks ``ids [batch, H, n]``: ``[batch, H, n * block_size]``."""
    token = (ids[..., None] * block_size + torch.arange(block_size, device=ids.device)).flatten(2)
    return (token >= sinks) & (token < sealed)


def gather_paged(
    kv: Tensor,
    rows: Tensor,
    block_table: Tensor,
    ids: Tensor,
    granularity: str,
    sinks: int,
    pages: Tensor,
    page_ids: Tensor | None,
    *,
    scales: Tensor | None = None,
    split: int = 0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`gather`, but by page id from ``pages`` and ``kv``, on the pages' device; and a mask of reads of ``kv``.

    A page id below -1 addresses a block of ``kv``.
    """
    heads, size = kv.shape[1:3]
    head = torch.arange(heads, device=kv.device)[None, :, None]
    if granularity == "token":
        at, token = ids.long() // size, ids.long() % size  # both towards minus infinity
        usable = at != -1
    elif granularity == "block":
        physical_id = block_table.long()[:, None].expand(-1, heads, -1).gather(-1, ids.clamp_min(0).long())
        there = (ids >= 0) & (physical_id >= 0) & (page_ids != -1)
        usable = selectable(ids.long(), size, sinks, rows[:, 1].long()[:, None, None])
        usable = usable & there.repeat_interleave(size, -1)
        at = page_ids.long().repeat_interleave(size, -1)
        token = torch.arange(size, device=at.device).repeat(ids.shape[-1]).expand_as(at)
    else:
        raise ValueError(f"page ids are for granularity 'token' or 'block', not for granularity={granularity!r}")
    where = (-at - 2).clamp_min(0).to(kv.device), head, token.to(kv.device)
    from_host = entries(kv, scales, split, dtype, *where).to(pages.device)
    if not len(pages):
        return from_host, usable, usable
    found = torch.where((at >= 0)[..., None], pages[at.clamp_min(0), token], from_host)
    return found, usable, usable & (at < 0)
