"""Exact attention with several queries: prefill, later chunks, second turns, draft verification.

Which kernel computes it. Plainly causal attention has the fastest ones (:mod:`.parts`); long rows of a padded batch get
it one by one. Windows, chunks, soft caps, learned sinks and other padding have our own
(:mod:`..ops.attention.prompt_attention`). On a CPU, with a gradient, or under masks of others, some queries at a time
attend under a mask of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops._dispatch import use_triton
from ..ops.attention.prompt_attention import prompt_attention
from ..ops.attention.prompt_attention.reference import reach
from ..types import AttentionParams
from .compact_mask import CompactMask, Rule
from .masks import is_whole
from .parts import chunk_attention, serves

PIECE_BYTES = 1 << 28  # queries are taken in pieces whose mask (or scores) stays below this
# In float32, whose products are not the tensor cores': our kernel spills with more channels, and is slower than sdpa.
WIDEST_FLOAT32 = 64
WIDEST = 512  # channels of a head
LEAST_AT_ONCE = 128  # queries of a piece, where windows are shorter
LEAST = 2048  # tokens of each row of a padded batch, from which on rows are computed one by one


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    *,
    columns: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of the last ``q`` columns over all ``n``.

    Args:
        query: ``[batch, Hq, q, Dk]``, the queries of columns ``n - q .. n - 1``.
        key, value: ``[batch, H, n, D]``.
        columns: bool ``[batch, n]``, False for padding; causality is added. ``None``: no padding.
        mask: a :class:`.compact_mask.CompactMask`; or ``[batch or 1, 1 or Hq, q, n]``, bool (True: attend) or
            additive, used as it is instead.
        dropout: dropout probability of the attention weights.

    Returns:
        ``[batch, Hq, q, Dv]``; zeros, or nothing of meaning, for padding.
    """
    rule = None
    if columns is not None and is_whole(columns):
        columns = None
    if mask is None or isinstance(mask, CompactMask):
        rule = (Rule(columns) if mask is None else mask.rule).within(params.sliding_window, key.shape[2])
    plain = params.softcap is None and params.sink_logits is None
    ours = not dropout and not _learns(query, key, value, params.sink_logits) and _has_kernel(query, value)
    if rule is not None and rule.is_causal and plain:
        found = _causal(query, key, value, params.scale, dropout, ours)
        if found is not None:
            return found
    if rule is not None and ours:
        if plain and rule.window is rule.chunk is None and rule.columns is not None:
            found = _row_by_row(query, key, value, params, rule.columns)
            if found is not None:
                return found
        about = rule.columns, rule.window, rule.chunk, rule.origin, params.softcap, params.sink_logits
        return prompt_attention(query, key, value, params.scale, *about)
    return torch.cat(list(_in_pieces(query, key, value, params, rule, mask, dropout)), dim=2)


def _learns(*tensors: Tensor | None) -> bool:
    """A gradient may have to reach what attends or is attended to; kernels of ours pass none on."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    widest = max(query.shape[3], value.shape[3])
    fits = {torch.float32: WIDEST_FLOAT32, torch.float64: 0}.get(query.dtype, WIDEST)
    return query.shape[2] > 1 and widest <= fits and use_triton(query)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, ours: bool) -> Tensor | None:
    """Causal attention by kernels of others, which need no mask; None: by ``ours``, or there are none."""
    q, n, width = query.shape[2], key.shape[2], query.shape[3]
    if not dropout and serves(query, key, value):
        return chunk_attention(query, key, value, scale)
    if ours and query.is_cuda and torch.cuda.get_device_capability(query.device)[0] >= 9:
        return None  # torch's flash kernels, FlashAttention 2's, take up to twice as long there
    grouped, same = query.shape[1] > key.shape[1], width == value.shape[3]
    if query.is_cuda and grouped and not (same and width <= 256 and query.itemsize == 2):
        return None  # they would make all scores
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "enable_gqa": grouped}
    if q == 1 or q == n:
        wide_q, wide_k, wide_v = (query, key, value) if query.is_cuda else _one_width(query, key, value)
        return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=q > 1, **options)[..., : value.shape[3]]
    if same and query.is_cuda and query.itemsize == 2:
        from torch.nn.attention.bias import causal_lower_right  # reaches the flash kernels without a mask tensor

        return F.scaled_dot_product_attention(query, key, value, causal_lower_right(q, n), **options)
    return None


def _one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With zeros up to the wider one: torch's fused kernel for CPUs has one width."""
    more = query.shape[3] - value.shape[3]
    wider = (0, max(0, -more))
    return F.pad(query, wider), F.pad(key, wider), F.pad(value, (0, max(0, more)))


def _row_by_row(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, columns: Tensor) -> Tensor | None:
    """Each row without the padding in front of it; None if rows are short, or have other padding."""
    q, n = query.shape[2], key.shape[2]
    if q < LEAST or (starts := starts_of(columns)) is None:
        return None
    firsts = [max(0, start - (n - q)) for start in starts]  # queries that are padding
    parts = [
        (query[i : i + 1, :, first:], key[i : i + 1, :, start:], value[i : i + 1, :, start:])
        for i, (first, start) in enumerate(zip(firsts, starts))
    ]
    if any(part[0].shape[2] < LEAST or not serves(*part) for part in parts):
        return None
    out = query.new_empty(len(query), q, query.shape[1], value.shape[3]).transpose(1, 2)
    for i, (first, part) in enumerate(zip(firsts, parts)):
        out[i, :, :first] = 0
        out[i : i + 1, :, first:] = chunk_attention(*part, params.scale)
    return out


_STARTS = "_sparsekv_starts"  # attribute of a mask of columns that all layers get: looking into it waits for the GPU


def starts_of(columns: Tensor) -> tuple[int, ...] | None:
    """Where each row's tokens begin; None if padding is elsewhere, too. Waits for ``columns [batch, n]`` once."""
    held = getattr(columns, _STARTS, None)
    if held is None:
        in_front = (columns[:, 1:] >= columns[:, :-1]).all()
        *starts, fits = torch.cat(((~columns).sum(1), in_front[None])).tolist()
        held = (tuple(starts) if fits else None,)
        setattr(columns, _STARTS, held)
    return held[0]


def _in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    rule: Rule | None,
    mask: Tensor | None,
    dropout: float,
) -> Iterator[Tensor]:
    """Some queries at a time, under a mask of their own: of ``rule``, or of ``mask``, which has any form."""
    q, n = query.shape[2], key.shape[2]
    fused = params.softcap is None and params.sink_logits is None
    each = (query.shape[1] // key.shape[1] if query.is_cuda else 1) if fused else 12 * query.shape[1]
    step = max(1, PIECE_BYTES // (n * query.shape[0] * each))
    if rule is not None and rule.window is not None:
        step = min(step, max(rule.window, LEAST_AT_ONCE))
    attend = _sdpa if fused else _definition
    for lo in range(0, q, step):
        hi, first, end = min(lo + step, q), 0, n
        if rule is None:
            assert mask is not None
            seen = mask[:, :, lo:hi]
        else:
            first, end = reach(n - q + lo, n - q + hi, rule.window)
            seen = rule.mask(n - q + lo, end, first, query.device)
        yield attend(query[:, :, lo:hi], key[:, :, first:end], value[:, :, first:end], seen, params, dropout)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams, dropout: float) -> Tensor:
    """By torch, whose fused kernels know no groups under a mask on a GPU, and one width only on a CPU."""
    heads = key.shape[1]
    if query.is_cuda:  # query heads of a group become further queries: keys are not repeated
        grouped = _grouped(mask, heads, query.shape[1] // heads).flatten(2, 3)
        query = query.unflatten(1, (heads, -1))
        group = query.shape[2]
        out = F.scaled_dot_product_attention(query.flatten(2, 3), key, value, grouped, dropout, scale=params.scale)
        return out.unflatten(2, (group, -1)).flatten(1, 2)
    q, k, v = _one_width(query, key, value)
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=params.scale, enable_gqa=True)
    return out[..., : value.shape[3]]


def _definition(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams, dropout: float
) -> Tensor:
    """In float32: soft caps and learned sinks, which sdpa does not know."""
    heads = key.shape[1]
    group = query.shape[1] // heads
    some = query.float().unflatten(1, (heads, group))
    logits = some @ key[:, :, None].float().transpose(-1, -2) * params.scale  # [batch, H, group, q, n]
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    seen = _grouped(mask, heads, group)
    logits = logits.masked_fill(~seen, float("-inf")) if mask.dtype == torch.bool else logits + seen
    if params.sink_logits is not None:
        sink = params.sink_logits.float().view(heads, group, 1, 1).expand(*logits.shape[:4], 1)
        logits = torch.cat((logits, sink), dim=-1)
    weights = F.dropout(logits.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]], dropout)
    return (weights @ value[:, :, None].float()).flatten(1, 2).to(query.dtype)


def _grouped(mask: Tensor, heads: int, group: int) -> Tensor:
    """``mask [batch or 1, 1 or Hq, q, n]`` as ``[batch or 1, 1 or H, group, q, n]``."""
    if mask.shape[1] == 1:
        return mask[:, :, None].expand(-1, -1, group, -1, -1)
    return mask.unflatten(1, (heads, group))
