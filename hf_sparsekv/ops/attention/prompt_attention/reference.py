"""Exact attention of a prompt, or of a piece of it: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = 1 << 26  # of the scores that exist at once


def prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    columns: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    origin: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention of the last ``q`` columns over all ``n``.

    Args:
        query: ``[batch, Hq, q, Dk]``, of columns ``n - q .. n - 1``.
        key, value: ``[batch, H, n, D]``.
        scale: softmax scaling, positive.
        columns: bool ``[batch, n]``, which columns are tokens; None: all.
        window: a query at column ``c`` sees columns ``> c - window``. None: no window.
        chunk: a query sees columns of its own chunk of so many alone. None: no chunks.
        origin: int32 ``[batch]``, the column (maybe a negative one) at which a row's chunks begin; None: 0.
        softcap: logits become ``softcap * tanh(logits / softcap)``. None: they stay.
        sinks: ``[Hq]``, logits that take part in each query's softmax and have no value. None: there are none.
        out: ``[batch, Hq, q, Dv]``, receives the result.

    Returns:
        ``[batch, Hq, q, Dv]``; zeros for a query that sees no column.
    """
    batch, q_heads, q, _ = query.shape
    heads, n = key.shape[1:3]
    if out is None:
        # As projections lie, which is how the caller's result is used.
        out = query.new_empty(batch, q, q_heads, value.shape[3]).transpose(1, 2)
    step = max(1, _BYTES // (8 * batch * q_heads * n))
    for lo in range(0, q, step):
        hi = min(lo + step, q)
        first, end = reach(n - q + lo, n - q + hi, window)
        at = torch.arange(n - q + lo, end, device=query.device)
        seen = visible(at, first, end, columns, window, chunk, origin)
        some = query[:, :, lo:hi].float().unflatten(1, (heads, -1))  # [batch, H, group, rows, Dk]
        s = (some @ key[:, :, None, first:end].float().transpose(-1, -2)).mul_(scale)
        if softcap is not None:
            s = s.div_(softcap).tanh_().mul_(softcap)
        s = s.masked_fill_(~seen[:, None, None], float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(heads, -1, 1, 1).expand(batch, -1, -1, hi - lo, 1)
            s = torch.cat((s, sink), dim=-1)
        weights = s.softmax(-1).nan_to_num_(0.0)[..., : end - first]
        out[:, :, lo:hi] = (weights @ value[:, :, None, first:end].float()).flatten(1, 2).to(out.dtype)
    return out


def reach(first: int, end: int, window: int | None) -> tuple[int, int]:
    """From and up to which column queries of columns ``first .. end - 1`` may see."""
    return (0 if window is None else max(0, first - window + 1)), end


def visible(
    at: Tensor,
    first: int,
    end: int,
    columns: Tensor | None,
    window: int | None,
    chunk: int | None,
    origin: Tensor | None,
) -> Tensor:
    """Which of the columns ``first .. end - 1`` queries see, bool ``[batch or 1, queries, end - first]``.

    Args:
        at: int64 ``[queries]``, their columns.
    """
    of = torch.arange(first, end, device=at.device)
    seen = (of <= at[:, None])[None]
    if window is not None:
        seen = seen & (of > at[:, None] - window)
    if chunk is not None:
        begin = at[None] if origin is None else (at - origin[:, None]).clamp_min(0)
        seen = seen & (of >= (at - begin % chunk)[..., None])
    return seen if columns is None else seen & columns[:, None, first:end]
