"""Attention to the tokens that a model's own indexer has chosen: DeepSeek Sparse Attention (DSA), DeepSeek-V3.2.

Each query has a list of columns of its own. A prompt gathers the rows of some
queries at a time. On latents (MLA) that takes ``2r + dr`` products a chosen token and head, whatever the context.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..types import AttentionParams
from .exact import exact_attention
from .handle import Step
from .masks import shows
from .mla import Absorbed, product

_BYTES = 1 << 29  # of the rows and scores of the queries that are taken at once


def visible(indices: Tensor, mask: Tensor | None) -> Tensor:
    """``indices [batch, q, k]``, int64; -1 for those that the mask ``[batch or 1, 1, q, n]`` hides.

    An indexer chooses hidden columns where a query sees fewer than it has to choose.
    """
    indices = indices.long()
    if mask is None:
        return indices
    seen = shows(mask[:, 0]).expand(len(indices), -1, -1).gather(-1, indices.clamp_min(0))
    return indices.masked_fill(~seen, -1)


def index_mask(indices: Tensor, mask: Tensor | None, columns: int) -> Tensor:
    """Bool mask ``[batch, 1, q, columns]`` of the columns that are chosen and visible."""
    chosen = visible(indices, mask)
    one_more = torch.zeros(*chosen.shape[:2], columns + 1, dtype=torch.bool, device=chosen.device)
    return one_more.scatter_(-1, chosen.masked_fill(chosen < 0, columns), True)[:, None, :, :columns]


def columns_of_blocks(blocks: Tensor, size: int) -> Tensor:
    """Columns, int64 ``[..., k * size]``, of ``blocks [..., k]`` of ``size`` columns; -1 of a block -1."""
    blocks = blocks.long()[..., None]
    inside = torch.arange(size, device=blocks.device)
    return (blocks * size + inside).masked_fill(blocks < 0, -1).flatten(-2)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, blocks: Tensor, size: int, dropout: float = 0.0
) -> Tensor:
    """Causal attention of the last ``q`` columns, ``query [batch, Hq, q, Dk]``, to blocks of ``size`` columns.

    ``blocks``: int ``[batch, H, q, k]``, for each KV head; -1 for none. All columns are tokens.
    """
    (batch, heads, n), new = key.shape[:3], query.shape[2]
    if blocks.shape[-1] * size >= n:  # all are chosen
        return exact_attention(query, key, value, params, dropout=dropout)
    column = torch.arange(n, device=key.device)
    query = query.unflatten(1, (heads, -1)).flatten(0, 1)  # [batch * H, G, q, Dk]: one mask serves a group
    key, value = (x.flatten(0, 1)[:, None].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    step, outs = max(1, _BYTES // (8 * batch * heads * n)), []  # of masks
    for some, part, own in zip(query.split(step, 2), blocks.split(step, 2), column[n - new :].split(step)):
        there = torch.zeros(*part.shape[:3], -(-n // size) + 1, dtype=torch.bool, device=key.device)
        there.scatter_(-1, part.long().masked_fill(part < 0, there.shape[-1] - 1), True)
        mask = there[..., :-1].repeat_interleave(size, -1)[..., :n] & (column <= own[:, None])
        outs.append(
            scaled_dot_product_attention(
                some, key, value, attn_mask=mask.flatten(0, 1)[:, None], dropout_p=dropout, scale=params.scale
            )
        )
    return torch.cat(outs, dim=2).unflatten(0, (batch, heads)).flatten(1, 2)


def exact_of(step: Step) -> Callable[..., Tensor]:
    """Attention of a prompt, or of a piece of it, as :func:`.exact.exact_attention`."""
    if step.indices is not None:
        return partial(_of_step, step)
    return exact_attention if step.absorbed is None else step.absorbed.attention


def _of_step(step: Step, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, **given) -> Tensor:
    """With the mask of the step, which contains those that are ``given``."""
    assert step.indices is not None
    if step.indices.ndim == 4:
        return block_attention(query, key, value, params, step.indices, step.size, given["dropout"])
    return indexed_attention(
        query, key, value, params, step.indices, step.shown, absorbed=step.absorbed, dropout=given["dropout"]
    )


def indexed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    indices: Tensor,
    shown: Tensor | None,
    *,
    absorbed: Absorbed | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of the last ``q`` columns, each to its own ``k`` columns.

    Args:
        query: ``[batch, Hq, q, Dk]``, the queries of columns ``n - q .. n - 1``.
        key, value: ``[batch, H, n, D]``; with ``absorbed`` latents and their rotary part.
        indices: int ``[batch, q, k]``, columns; -1 for none.
        shown: the mask ``[batch or 1, 1, q, n]`` that hides some of them, causality included; None: hides none.

    Returns:
        ``[batch, Hq, q, Dv]``; zeros for a query without a visible column.
    """
    batch, heads, n = key.shape[:3]
    if dropout or torch.is_grad_enabled() or indices.shape[-1] >= n:
        exact = exact_attention if absorbed is None else absorbed.attention
        return exact(query, key, value, params, mask=index_mask(indices, shown, n), dropout=dropout)
    kv, split = torch.cat((key, value), dim=-1).transpose(1, 2), key.shape[3]  # [batch, n, H, Dk + Dv]
    row = torch.arange(batch, device=key.device)[:, None, None]
    each = batch * indices.shape[-1] * (heads * kv.shape[-1] * kv.itemsize + 3 * 4 * query.shape[1])
    step, outs = max(1, _BYTES // each), []
    for lo in range(0, query.shape[2], step):
        hi = min(lo + step, query.shape[2])
        chosen = visible(indices[:, lo:hi], None if shown is None else shown[:, :, lo:hi])
        rows = kv[row, chosen.clamp_min(0)].transpose(2, 3)  # [batch, q, H, k, Dk + Dv]
        q = query[:, :, lo:hi] if absorbed is None else absorbed.queries(query[:, :, lo:hi])
        keys, values = (rows[..., :split], rows[..., split:]) if absorbed is None else (rows, rows[..., :split])
        out = _attend(q.transpose(1, 2).unflatten(2, (heads, -1)), keys, values, chosen >= 0, params)
        out = out.flatten(2, 3).transpose(1, 2)
        outs.append(out if absorbed is None else absorbed.outputs(out))
    return torch.cat(outs, dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, params: AttentionParams) -> Tensor:
    """Attention of ``query [batch, q, H, G, Dk]`` to rows of its own, ``key, value [batch, q, H, k, D]``."""
    shape = query.shape[:3]
    key, value = key.flatten(0, 2), value.flatten(0, 2)
    logits = product(query.flatten(0, 2), key.transpose(1, 2)).unflatten(0, shape) * params.scale
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    logits = logits.masked_fill(~seen[:, :, None, None], float("-inf"))
    if params.sink_logits is not None:
        sinks = params.sink_logits.float().view(*logits.shape[2:4], 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., : key.shape[1]]
    return torch.bmm(weights.to(value.dtype).flatten(0, 2), value).unflatten(0, shape)
