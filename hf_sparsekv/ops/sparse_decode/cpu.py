"""Attention of one query per row over chosen cached tokens on a CPU: parts where they lie, one softmax over all.

Blocks, the recent buffer and the means are multiplied one after the other, and only their logits are put together: no
copy holds them all. Whole blocks are not copied at all.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...tensors import no_inference_mode
from .._dispatch import give
from . import reference


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
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`.reference.sparse_decode`; for one row, chosen tokens (as many as the ids) or all, without pages.

    What else is asked, the reference answers.
    """
    length, sealed = rows[0].tolist() if len(rows) == 1 else (0, 0)
    (heads, size), n = kv.shape[1:3], sealed // kv.shape[2]
    blocks = tuple(block_table[0, :n].tolist())
    plain = pages is None and used is None and from_host is None and lse is None and kv.is_contiguous()
    if not (plain and 0 < n == len(blocks) and min(blocks) >= 0 and all_given(ids, granularity, sealed)):
        return reference.sparse_decode(
            *(q, kv, rows, block_table, ids, recent_kv),
            **{"granularity": granularity, "value_dim": value_dim, "sinks": sinks, "scale": scale, "softcap": softcap},
            **{"sink_logits": sink_logits, "attended": attended, "pages": pages, "page_ids": page_ids},
            **{"from_host": from_host, "lse": lse, "used": used, "means": means, "mean_tokens": mean_tokens},
            **{"columns": columns, "out": out},
        )
    reference.check_means(means, mean_tokens, granularity, size, False, columns)
    dk, group = q.shape[2], q.shape[1] // heads
    asked = q.float().view(heads, group, dk) * scale

    def capped(logits: Tensor) -> Tensor:
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    at = recent_tokens(length, sealed, sinks if granularity == "token" else 0, sinks, recent_kv.shape[2] - sinks)
    if granularity == "token":
        stored = chosen(kv, blocks, ids[0]).float()  # [H, n, D]
        logits = asked @ stored[..., :dk].transpose(1, 2)
    else:
        stored = in_a_row(kv, blocks).float()  # [blocks, H, block_size, D]
        logits = (stored[..., :dk] @ asked.transpose(1, 2)).permute(1, 3, 0, 2).flatten(2)
    recent = recent_kv[0].index_select(1, at).float()
    if attended is not None:
        attended += logits.shape[-1] + len(at)
    logits = [capped(logits), capped(asked @ recent[..., :dk].transpose(1, 2))]
    if means is not None:
        mean, unread = unchosen(means, blocks, ids[0], sealed, size, mean_tokens, sinks)
        logits.append(capped(asked @ mean[..., :dk].transpose(1, 2)) + unread.log()[:, None])
    if sink_logits is not None:
        logits.append(sink_logits.float().view(heads, group, 1))
    weights = reference.softmax(torch.cat(logits, -1)).split([part.shape[-1] for part in logits], -1)
    values = reference.values_of(stored, dk, value_dim)
    if granularity == "token":
        result = weights[0] @ values
    else:
        result = (weights[0].unflatten(2, (n, size)).permute(2, 0, 1, 3) @ values).sum(0)
    result.baddbmm_(weights[1], reference.values_of(recent, dk, value_dim))
    if means is not None:
        result.baddbmm_(weights[2], reference.values_of(mean, dk, value_dim))
    return give(result.to(q.dtype).view(1, heads * group, value_dim), out)


def all_given(ids: Tensor | None, granularity: str, sealed: int) -> bool:
    """Whether everything is attended, or each of the tokens ``ids [1, H, n]`` is one that is sealed."""
    if granularity != "token":
        return granularity == "all"
    if not ids.shape[-1]:
        return False
    least, most = torch.aminmax(ids)
    return int(least) >= 0 and int(most) < sealed


@lru_cache(maxsize=8)
@no_inference_mode
def recent_tokens(length: int, sealed: int, first: int, sinks: int, ring: int) -> Tensor:
    """Where in the recent buffer the tokens of a row are: the ``first`` ones that are sealed, and those that are not.

    Layers of a step ask for the same.
    """
    at = sinks + torch.arange(sealed, min(length, sealed + ring)) % ring
    return torch.cat((torch.arange(min(first, sealed)), at))


@lru_cache(maxsize=8)
@no_inference_mode
def places(blocks: tuple[int, ...], heads: int, size: int) -> tuple[Tensor, Tensor]:
    """Of what is stored as ``[blocks, H, block_size]``: what a token's number becomes an index by, adding it.

    ``[sealed]`` of each token, and ``[H, 1]`` of each head.
    """
    at = torch.tensor(blocks)[:, None] * (heads * size) + torch.arange(size)
    return at.flatten(), torch.arange(heads)[:, None] * size


@lru_cache(maxsize=8)
@no_inference_mode
def spans(sealed: int, block_size: int, tokens: int, sinks: int, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The last block of each span of ``tokens`` tokens, and how many tokens of it can be selected, float32."""
    first = torch.arange(0, sealed, tokens)
    end = (first + tokens).clamp_max(sealed)
    return torch.tensor(blocks)[(end - 1) // block_size], (end - first.clamp_min(sinks)).clamp_min(0).float()


def chosen(kv: Tensor, blocks: tuple[int, ...], ids: Tensor) -> Tensor:
    """Tokens ``ids [H, n]`` of a row whose blocks are ``blocks``: ``[H, n, D]``."""
    heads, size = kv.shape[1:3]
    token, head = places(blocks, heads, size)
    at = token.index_select(0, ids.flatten()).view_as(ids) + head
    return kv.view(-1, kv.shape[-1]).index_select(0, at.flatten()).view(heads, -1, kv.shape[-1])


def in_a_row(kv: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """``kv[blocks]``: without a copy where they lie one after the other, as those of a prompt do."""
    first, n = blocks[0], len(blocks)
    return kv[first : first + n] if blocks == tuple(range(first, first + n)) else kv[list(blocks)]


def unchosen(
    means: Tensor, blocks: tuple[int, ...], ids: Tensor, sealed: int, block_size: int, tokens: int, sinks: int
) -> tuple[Tensor, Tensor]:
    """Means ``[H, spans, D]`` of spans of ``tokens`` tokens, and how many tokens that are not ``ids`` each stands for.

    As :func:`.reference.gather_means` for one row.
    """
    last, held = spans(sealed, block_size, tokens, sinks, blocks)
    mean = means.index_select(0, last).transpose(0, 1).float()
    taken = torch.div(ids, tokens, rounding_mode="floor").long()
    unread = held.expand(len(ids), -1).scatter_add(1, taken, torch.full(ids.shape, -1.0)).clamp_min_(0)
    return mean.masked_fill((unread == 0)[..., None], 0.0), unread
