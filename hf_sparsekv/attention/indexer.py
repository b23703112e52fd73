"""The indexer of a model that was trained sparse (DSA): it scores a prompt's queries in pieces.

transformers' indexers score all new queries at once, ``[batch, q, heads, n]`` in float32: 128 GiB for 4,096 queries of
64 heads over 131,072 tokens. We replace ``forward`` of the indexer, on the instance, by a loop over pieces of queries
that calls the model's own ``forward``. A query scores no column after its own, so what it chooses is the same.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..untraced import untraced

_OWN = "_sparsekv_own_forward"
_BYTES = 1 << 30  # of the scores of the queries that are taken at once


def is_ours(cache: object) -> bool:
    """Whether ``cache`` is one of ours."""
    return hasattr(cache, "attend")


@untraced
def forward(self, *args, **kwargs) -> Tensor:
    """Replaces an indexer's ``forward``: indices ``[batch, q, k]``, -1 where a query has fewer columns to choose from.

    Or ``[batch, H, q, k]``, blocks of columns for each KV head, of an indexer that gets no mask (MiniMax M3).

    With another cache or attention function the original method runs.
    """
    own, given = own_forward(self), arguments(self, args, kwargs)
    new, mask = given["hidden_states"].shape[1], given.get("attention_mask")
    cache: Any = given.get("past_key_values", given.get("cache"))
    if not is_ours(cache) or self.config._attn_implementation != "sparsekv":
        return own(*args, **kwargs)
    if new == 1:
        captured = None if mask is None else cache.layers[self.layer_idx].step_mask()
        return own(**(given if captured is None else {**given, "attention_mask": captured}))
    if mask is None:
        n, heads = cache.layers[self.layer_idx].get_seq_length(), self.num_heads
    else:
        n, heads = mask.shape[-1], self.n_heads
    batch = len(given["hidden_states"])
    each = heads + (self.head_dim if batch > 1 else 0)  # torch.matmul copies the keys of several rows
    step = max(1, _BYTES // (4 * batch * each * n))
    found = [own(**_piece(given, lo, min(lo + step, new), n - new)) for lo in range(0, new, step)]
    most = found[-1].shape[-1]
    return torch.cat([nn.functional.pad(part, (0, most - part.shape[-1]), value=-1) for part in found], dim=-2)


def own_forward(indexer: Any) -> Callable[..., Tensor]:
    """The ``forward`` that was replaced."""
    return indexer.__dict__[_OWN][0] or types.MethodType(type(indexer).forward, indexer)


def arguments(indexer: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call of an indexer's own ``forward``, by name."""
    kind: Any = type(indexer)
    given = _signature(kind).bind(indexer, *args, **kwargs).arguments
    given.pop("self")
    return given


@lru_cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


def _piece(given: dict, lo: int, hi: int, past: int) -> dict:
    """The arguments for queries ``lo .. hi - 1``, of columns ``past + lo ..``."""
    part = dict(given)
    for name in ("hidden_states", "q_resid", "position_ids"):
        if isinstance(part.get(name), Tensor):
            part[name] = part[name][:, lo:hi]
    part["position_embeddings"] = tuple(table[:, lo:hi] for table in part["position_embeddings"])
    if "attention_mask" in part:
        part["attention_mask"] = part["attention_mask"][:, lo:hi, : past + hi]
    return part


def take_pieces(indexer: Any) -> None:
    """Replace the ``forward`` of an indexer by one that scores a prompt in pieces."""
    replace_forward(indexer, forward)


def replace_forward(indexer: Any, other: Callable[..., Tensor]) -> None:
    """Replace the ``forward`` of an indexer by ``other``, which gets it first."""
    if _OWN not in indexer.__dict__:
        bound = types.MethodType(other, indexer)
        indexer.__dict__[_OWN] = indexer.__dict__.get("forward"), bound
        indexer.forward = bound


def is_replaced(indexer: Any) -> bool:
    """Whether :func:`replace_forward` has replaced its ``forward``."""
    return _OWN in indexer.__dict__


def restore_indexer(indexer: Any) -> None:
    """Undo :func:`replace_forward`, unless something else has replaced ``forward`` since, which calls it."""
    own, bound = indexer.__dict__.get(_OWN, (None, None))
    if bound is not None and indexer.__dict__.get("forward") is bound:
        del indexer.__dict__[_OWN]
        if own is None:
            del indexer.forward
        else:
            indexer.forward = own
