"""Exact attention with several queries: prefill, later chunks, second turns, draft verification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import AttentionParams
from .parts import chunk_attention, serves

_MASK_BYTES = 1 << 28  # queries are taken in chunks whose mask (or scores) stays below this


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
    """Softmax attention of the last ``q`` columns over all ``n`` columns.

    Args:
        query: ``[batch, Hq, q, Dk]``, the queries of columns ``n - q .. n - 1``.
        key, value: ``[batch, H, n, D]``.
        columns: bool ``[batch, n]``, False for padding; causality is added. ``None``: no padding.
        mask: ``[batch or 1, 1 or Hq, q, n]`` bool (True: attend) or additive, used as it is instead.
        dropout: dropout probability of the attention weights.

    Returns:
        ``[batch, Hq, q, Dv]``.
    """
    q, n = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    plain = params.softcap is None and params.sink_logits is None
    window = params.sliding_window if params.sliding_window is not None and params.sliding_window < n else None
    if plain and mask is None and columns is None and window is None:
        if not dropout and serves(query, key, value):
            return chunk_attention(query, key, value, params.scale)
        if q == 1 or q == n:
            return _sdpa(query, key, value, None, params.scale, q > 1, dropout, group)
        if query.is_cuda:  # reaches the flash kernels without a mask tensor
            from torch.nn.attention.bias import causal_lower_right

            return _sdpa(query, key, value, causal_lower_right(q, n), params.scale, False, dropout, group)
    per_query = n * query.shape[0] * (1 if plain else 4 * query.shape[1])
    chunk = max(1, _MASK_BYTES // per_query)
    outs = []
    for lo in range(0, q, chunk):
        hi = min(lo + chunk, q)
        part = _mask(mask, columns, window, n - q, lo, hi, n, query.device)
        if plain:
            outs.append(_sdpa(query[:, :, lo:hi], key, value, part, params.scale, False, dropout, group))
        else:
            outs.append(_softmax(query[:, :, lo:hi], key, value, part, params, dropout))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _mask(
    mask: Tensor | None,
    columns: Tensor | None,
    window: int | None,
    past: int,
    lo: int,
    hi: int,
    n: int,
    device: torch.device,
) -> Tensor:
    if mask is not None:
        return mask[:, :, lo:hi]
    at = torch.arange(past + lo, past + hi, device=device)[:, None]
    col = torch.arange(n, device=device)
    seen = col <= at
    if window is not None:
        seen = seen & (col > at - window)
    return seen[None, None] if columns is None else seen & columns[:, None, None, :]


def _sdpa(query, key, value, mask, scale, causal, dropout, group) -> Tensor:
    gqa = {}
    if group > 1:
        # Grouped heads without a mask reach the fast kernels; with one they would fall back to the slow `math` path.
        if not isinstance(mask, Tensor) and key.shape[-1] == value.shape[-1] <= 256:
            gqa = {"enable_gqa": True}
        else:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=causal, **gqa
    )


def _softmax(query, key, value, mask, params: AttentionParams, dropout: float) -> Tensor:
    """The definition, in float32: for softcapping and learned sinks, which sdpa does not know."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query.float() @ key.float().transpose(-1, -2) * params.scale
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    if mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, float("-inf"))
    else:
        logits = logits + mask
    if params.sink_logits is not None:
        sink = params.sink_logits.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink), dim=-1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]
    return (F.dropout(weights, dropout) @ value.float()).to(query.dtype)
