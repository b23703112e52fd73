"""Attention of one query per row over cached tokens on a CPU: few torch operations, each over all heads at once.

Chosen tokens, the recent ones and the means are gathered into one buffer, which one fused attention reads. Whole blocks
are not copied: each is attended in place, and the parts are merged by their denominators.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....tensors import no_inference_mode
from ..._dispatch import give
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
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`.reference.sparse_decode`; for one row without pages, chosen tokens (all ids, or ``used``) or all.

    Other calls go to the reference.
    """
    length, sealed = rows.tolist()[0] if rows.shape[0] == 1 else (0, 0)
    (_, heads, size, width), dk = kv.shape, q.shape[2]
    n = sealed // size
    blocks = tuple(block_table.tolist()[0][:n]) if n else ()
    plain = pages is None and from_host is None and lse is None and scales is None
    plain = plain and all(t is None or (t.is_contiguous() and t.dtype == kv.dtype) for t in (kv, recent_kv, means))
    listed, some = None, None  # chosen tokens [H, n], and how many of each list count [H], if not all
    if plain and granularity == "token" and ids.dtype == torch.int32:
        listed = ids[0].numpy()
        if used is not None:
            some = np.minimum(used[0].numpy(), listed.shape[1])
            listed = first_of(listed, some)
    fused = softcap is None and sink_logits is None and dk == value_dim
    there = n == len(blocks) and min(blocks, default=0) >= 0
    there = there and (n > 0 or (length > 0 and fused and granularity == "all"))  # a short row has recent tokens only
    if not (plain and there and all_given(listed, granularity, sealed)):
        return reference.sparse_decode(
            *(q, kv, rows, block_table, ids, recent_kv),
            **{"granularity": granularity, "value_dim": value_dim, "sinks": sinks, "scale": scale, "softcap": softcap},
            **{"sink_logits": sink_logits, "attended": attended, "pages": pages, "page_ids": page_ids},
            **{"from_host": from_host, "lse": lse, "used": used, "means": means, "mean_tokens": mean_tokens},
            **{"columns": columns, "scales": scales, "out": out},
        )
    reference.check_means(means, mean_tokens, granularity, size, False, columns)
    group = q.shape[1] // heads
    asked = q.float().view(heads, group, dk)
    at = recent_tokens(length, sealed, 0 if listed is None else sinks, sinks, recent_kv.shape[2] - sinks, heads)
    if attended is not None:
        attended += at.shape[0] // heads
        attended += sealed if listed is None else listed.shape[1] if some is None else torch.from_numpy(some)
    if listed is not None:
        taken, bias = gather(kv, blocks, listed, some, recent_kv, at, means, mean_tokens, sealed, sinks)
        keys, values = taken[..., :dk], reference.values_of(taken, dk, value_dim)  # [H, tokens, D]
        if fused:
            query, mask = asked[:, None], None if bias is None else bias.expand(-1, -1, group, -1)
            result = F.scaled_dot_product_attention(query, keys[:, None], values[:, None], mask, scale=scale)
        else:
            logits = cap(asked @ keys.transpose(1, 2) * scale, softcap)
            logits = logits if bias is None else logits + bias[:, 0]
            result = weigh(logits, sink_logits) @ values
    else:
        recent = recent_kv.view(-1, width).index_select(0, at).view(1, -1, heads, width).float()
        parts = [in_a_row(kv, blocks).float()] if n else []  # [blocks, H, block_size, D]
        parts.append(recent.transpose(1, 2))
        if fused:
            result = merged([attend(asked, part, scale) for part in parts])
        else:
            logits = [(part[..., :dk] @ asked.transpose(1, 2)).permute(1, 3, 0, 2).flatten(2) for part in parts]
            weights = weigh(cap(torch.cat(logits, -1) * scale, softcap), sink_logits)
            weights = weights.split([sealed, at.shape[0] // heads], -1)
            parts = [reference.values_of(part, dk, value_dim) for part in parts]
            result = (weights[0].unflatten(2, (n, size)).permute(2, 0, 1, 3) @ parts[0]).sum(0)
            result.baddbmm_(weights[1], parts[1][0])
    return give(result.to(q.dtype).view(1, heads * group, value_dim), out)


def all_given(listed: np.ndarray | None, granularity: str, sealed: int) -> bool:
    """Whether everything is attended, or each of the tokens ``listed [H, n]`` is one that is sealed."""
    if listed is None:
        return granularity == "all"
    return listed.size > 0 and listed.view(np.uint32).max() < sealed  # negative ids are large as unsigned numbers


def first_of(listed: np.ndarray, some: np.ndarray) -> np.ndarray:
    """The first ``some [H]`` tokens of each of the lists, ``[H, largest of some]``; token 0 in place of the others."""
    listed = listed[:, : max(1, int(some.max()))]
    return np.where(np.arange(listed.shape[1]) < some[:, None], listed, 0)


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(logits / softcap)``."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def weigh(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Softmax of ``logits [H, G, n]``, with learned sinks ``[Hq]`` in the denominator."""
    if sink_logits is None:
        return reference.softmax(logits)
    sinks = sink_logits.float().view(*logits.shape[:2], 1)
    return reference.softmax(torch.cat((logits, sinks), -1))[..., :-1]


def attend(asked: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Fused attention of ``asked [H, G, D]`` over each of ``kv [n, H, tokens, 2 D]`` separately.

    Returns:
        ``[n, H, G, D]``, and the logarithm of the denominators ``[n, H, G]``.
    """
    query = asked.expand(len(kv), -1, -1, -1)
    keys, values = kv.chunk(2, -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=scale)


def merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One result ``[H, G, D]`` from parts of :func:`attend`."""
    results, denominators = (torch.cat(of) for of in zip(*parts))
    return (results * denominators.softmax(0)[..., None]).sum(0)


@lru_cache(maxsize=8)
@no_inference_mode
def recent_tokens(length: int, sealed: int, first: int, sinks: int, ring: int, heads: int) -> Tensor:
    """Indices of a row's tokens in the recent buffer ``[H, sinks + ring]``: for each token all heads, ``[n * H]``.

    Includes the ``first`` sealed tokens and the unsealed ones. Cached, because all layers of a step need the same.
    """
    at = sinks + torch.arange(sealed, min(length, sealed + ring)) % ring
    at = torch.cat((torch.arange(min(first, sealed)), at))
    return (at[:, None] + torch.arange(heads) * (sinks + ring)).flatten()


@lru_cache(maxsize=8)
def places(blocks: tuple[int, ...], heads: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Index offsets of tokens and heads in a tensor ``[blocks, H, block_size]``; their sum is the index.

    int64, ``[sealed]`` for each token, and ``[H]`` for each head.
    """
    at = np.array(blocks)[:, None] * (heads * size) + np.arange(size)
    return at.ravel(), np.arange(heads) * size


@lru_cache(maxsize=8)
@no_inference_mode
def spans(
    sealed: int, block_size: int, tokens: int, sinks: int, blocks: tuple[int, ...], heads: int
) -> tuple[Tensor, np.ndarray]:
    """Indices of the means of spans of ``tokens`` tokens in ``[blocks, H]``: for each span all heads, ``[spans * H]``.

    Also returns the number of selectable tokens of each span, ``[spans]``.
    """
    first = np.arange(0, sealed, tokens)
    end = np.minimum(first + tokens, sealed)
    last = torch.tensor(blocks)[torch.from_numpy((end - 1) // block_size)]
    held = np.maximum(end - np.maximum(first, sinks), 0)
    return (last[:, None] * heads + torch.arange(heads)).flatten(), held


def gather(
    kv: Tensor,
    blocks: tuple[int, ...],
    listed: np.ndarray,
    some: np.ndarray | None,
    recent_kv: Tensor,
    recent: Tensor,
    means: Tensor | None,
    mean_tokens: int | None,
    sealed: int,
    sinks: int,
) -> tuple[Tensor, Tensor | None]:
    """The chosen tokens ``listed [H, n]``, then the recent ones, then the means: float32 ``[H, tokens, D]``.

    Args:
        some: how many of each list count, ``[H]``; None: all.
        recent: from :func:`recent_tokens`.

    Returns:
        The tokens, and a bias of their logits, ``[H, 1, 1, tokens]``; None if it would be zeros. The bias weights each
        mean by the tokens it represents and leaves out what does not count.
    """
    heads, size, width = kv.shape[1:]
    token, head = places(blocks, heads, size)
    parts = [(kv, torch.from_numpy((token.take(listed.T) + head).ravel())), (recent_kv, recent)]
    if means is not None:
        last, held = spans(sealed, size, mean_tokens, sinks, blocks, heads)
        parts.append((means, last))
    counts = [at.shape[0] for _, at in parts]
    taken = torch.empty(sum(counts), width, dtype=kv.dtype)
    for (of, at), out in zip(parts, taken.split(counts)):
        torch.index_select(of.view(-1, width), 0, at, out=out)
    taken = taken.view(-1, heads, width).float().transpose(0, 1)
    if means is None and some is None:
        return taken, None
    bias = torch.zeros(heads, 1, 1, taken.shape[1])
    counts = True
    if some is not None:
        counts = np.arange(listed.shape[1]) < some[:, None]
        missing = torch.from_numpy(~counts)
        bias[:, 0, 0, : listed.shape[1]].masked_fill_(missing, float("-inf"))
        taken[:, : listed.shape[1]].masked_fill_(missing[..., None], 0.0)  # token 0 may hold anything
    if means is None:
        return taken, bias
    of = (listed // mean_tokens + np.arange(heads)[:, None] * len(held))[counts]
    unread = np.maximum(held - np.bincount(of.ravel(), minlength=heads * len(held)).reshape(heads, -1), 0)
    bias[:, 0, 0, -len(held) :] = torch.from_numpy(unread).float().log_()  # -inf: it represents none
    if not unread.all():
        taken[:, -len(held) :].masked_fill_(torch.from_numpy(unread == 0)[..., None], 0.0)
    return taken, bias


def in_a_row(kv: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """``kv[blocks]``: a view if the blocks are consecutive, as those of a prompt are."""
    first, n = blocks[0], len(blocks)
    return kv[first : first + n] if blocks == tuple(range(first, first + n)) else kv[list(blocks)]
