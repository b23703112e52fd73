"""The indexer of Qwen4-Exp (QSA), for all queries at once: it scores means of keys, and chooses blocks of tokens.

transformers loops over rows and queries in Python, and passes a mask to attention in place of indices. We replace
``forward`` of the indexer, on the instance.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..untraced import untraced
from .indexer import arguments, is_ours, own_forward, replace_forward
from .masks import columns_of, shows

_BYTES = 1 << 30  # of the scores of the queries that are taken at once
_NEEDED = ("index_qk_proj", "q_layernorm", "k_layernorm", "block_topk", "compress_ratio", "token_budget")


def is_pooled(module: nn.Module) -> bool:
    """An indexer that scores means of keys."""
    return all(hasattr(module, name) for name in _NEEDED)


def take_pooled(model: Any) -> None:
    """Replace the ``forward`` of all such indexers of a model, which reads its configuration."""
    for module in model.modules():
        if is_pooled(module):
            replace_forward(module, partial(forward, model.config))


@untraced
def forward(config: Any, self: Any, *args, **kwargs) -> Tensor:
    """Replaces an indexer's ``forward``: leaves its choice with our cache. The returned mask hides nothing.

    With another cache or attention function the original method runs.
    """
    own, given = own_forward(self), arguments(self, args, kwargs)
    cache: Any = given.get("past_key_values", given.get("cache"))
    if not is_ours(cache) or config._attn_implementation != "sparsekv":
        return own(*args, **kwargs)
    mask, layer = given["attention_mask"], cache.layers[self.layer_idx]
    columns: Any = columns_of(mask)
    if (span := layer.captured_span()) is not None:
        columns = None  # the mask is that of the step that was captured
    if columns is mask:  # of the caller: which columns a query sees says only the mask
        indices = _chosen(
            shows(own(*args, **kwargs)[:, 0]) & shows(mask[:, 0]), self.token_budget + self.compress_ratio
        )
    else:
        hidden, tables = given["hidden_states"], given["position_embeddings"]
        keep = partial(cache.update_indexer, layer_idx=self.layer_idx)
        indices = choose(self, hidden, tables, columns, keep, span)
    layer.choice = indices, mask
    return mask.new_ones((), dtype=torch.bool)


def _chosen(selected: Tensor, most: int) -> Tensor:
    """Columns of a mask ``[batch, q, n]``, int64 ``[batch, q, k]``; -1 for none."""
    there, columns = selected.to(torch.uint8).topk(min(most, selected.shape[-1]), dim=-1)
    return columns.masked_fill(there == 0, -1)


@torch.no_grad()
def choose(
    indexer: Any,
    hidden: Tensor,
    tables: tuple[Tensor, Tensor],
    columns: Tensor | None,
    keep: Callable[[Tensor], Tensor],
    span: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The choice of each of the last ``q`` columns: blocks of its tokens, and tokens that make no whole block.

    Args:
        indexer: the module. hidden: ``[batch, q, hidden]``.
        tables: cosines and sines of all columns, ``[batch, n, D]``.
        columns: which columns are tokens, bool ``[batch, n]``; None: all.
        keep: gets the keys of new columns ``[batch, q, D]``, gives those of all.
        span: of a captured step: int ``[batch, 1]`` each, the columns after the last token and of the first one. Keys
            of later columns are undefined, and ``tables`` have one more, that of the step.

    Returns:
        columns, int64 ``[batch, q, k]``; -1 for none. Among blocks of equal scores any may be chosen.
    """
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    (batch, new), size, dim = hidden.shape[:2], indexer.compress_ratio, indexer.index_head_dim
    query, keys = indexer.index_qk_proj(hidden).split((indexer.index_n_heads * dim, dim), dim=-1)
    query = indexer.q_layernorm(query.reshape(batch, new, -1, dim))
    query = rotate(query, cos=tables[0][:, -new:], sin=tables[1][:, -new:], unsqueeze_dim=2)
    keys = keep(keys)
    n, plain = keys.shape[1], columns is None and span is None
    if tables[0].shape[1] != n + (span is not None):
        raise ValueError(
            f"this cache holds {n} tokens, and the model knows the positions of {tables[0].shape[1]}: prefill again"
        )
    order = torch.arange(n, device=keys.device).expand(batch, -1)
    if span is not None:
        end, first = span
        order, seen = (order + first).clamp_max(n - 1), end - first
    elif columns is None:
        seen = order[:, -new:] + 1
    else:  # tokens in front, in their order
        order = (~columns).byte().argsort(dim=1, stable=True)
        seen = columns.cumsum(1)[:, -new:]  # tokens that each query sees

    def in_blocks(values: Tensor, each: int) -> Tensor:
        """Every ``each``-th token of ``values [batch, n, D]``, in whole blocks."""
        some = slice(0, n // size * size, each)
        if plain:
            return values[:, some]
        at = order[:, some, None]
        return values.expand(batch, -1, -1).gather(1, at.expand(-1, -1, values.shape[2]))

    pooled = in_blocks(keys, 1).unflatten(1, (-1, size)).float().mean(2)
    pooled = indexer.k_layernorm(pooled.to(keys.dtype))[:, :, None]
    cos, sin = (in_blocks(table, size) for table in tables)
    pooled = rotate(pooled, cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0].float().transpose(1, 2)  # [batch, D, blocks]
    blocks, most = pooled.shape[2], min(indexer.block_topk, n // size)
    inside, rest = (torch.arange(length, device=keys.device) for length in (size, size - 1))
    step, found = max(1, _BYTES // (4 * batch * indexer.index_n_heads * max(1, blocks))), []
    for part, count in zip(query.split(step, 1), seen.split(step, 1)):
        complete = (count // size)[..., None]
        scores = (part.float().flatten(1, 2) @ pooled).unflatten(1, (part.shape[1], -1))
        scores = torch.relu(scores).sum(2) / math.sqrt(dim)
        scores = scores.masked_fill(torch.arange(blocks, device=keys.device) >= complete, float("-inf"))
        best = scores.topk(most, dim=-1).indices
        best = torch.where(best < complete, best, n)  # beyond all tokens
        tail = complete * size + rest
        tail = torch.where(tail < count[..., None], tail, n)
        tokens = torch.cat(((best[..., None] * size + inside).flatten(2), tail), dim=-1)
        there = tokens < n
        rows = order[:, None].expand(-1, part.shape[1], -1)
        found.append(rows.gather(2, tokens.masked_fill(~there, 0)).masked_fill(~there, -1))
    return torch.cat(found, dim=1)
