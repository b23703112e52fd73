"""The rows of a store with only some of their recent tokens, those that were chosen.

An indexer's choice leaves most recent tokens out; other methods attend to all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.attention.sparse_decode import sparse_decode
from ..types import AttentionParams
from .ring import Ring
from .store import LayerStore


class ChosenRows(LayerStore):
    """A store, in the same memory, whose ring holds only chosen tokens. For attention; nothing is stored through it."""

    _there: Tensor

    @classmethod
    def of(cls, store: LayerStore, tokens: Tensor) -> ChosenRows:
        """``store`` with those of ``tokens [batch, k]`` that are not in full blocks; -1 for none.

        They are copied to a ring of their own, in the order in which they were chosen, as the first tokens after the
        full blocks. There are no sinks: these are in full blocks as well.
        """
        new = object.__new__(cls)
        new.__dict__.update(store.__dict__)
        new.recent_kv, new._there = _only(store.recent_kv, store.ring, store.rows[:, 1:], tokens)
        new.sinks = 0
        return new

    @property
    def rows(self) -> Tensor:
        return self._there


def _only(recent_kv: Tensor, ring: Ring, sealed: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A ring ``[batch, H, R, D]`` of those of ``tokens [batch, k]`` from ``sealed [batch, 1]`` on, and its rows."""
    recent = tokens >= sealed
    n = recent.sum(1, keepdim=True, dtype=torch.int32)
    place = (sealed + recent.cumsum(1) - 1) % ring.tokens
    source = tokens.new_zeros(len(tokens), ring.tokens + 1)  # the last entry takes what is not recent
    source.scatter_(1, torch.where(recent, place, ring.tokens), ring.sinks + tokens % ring.tokens)
    source = source[:, None, : ring.tokens, None].expand(-1, recent_kv.shape[1], -1, recent_kv.shape[3])
    return recent_kv.gather(2, source), torch.cat((sealed + n, sealed), dim=1)


def attend_by_head(
    store: LayerStore, q: Tensor, tokens: Tensor, ids: Tensor, pages: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attention of ``q [batch, Hq, Dk]`` to tokens that each KV head has chosen for itself, recent ones included.

    Heads differ in how many of the recent tokens they choose, and rows alone have lengths. So each row and KV head is
    a row of its own here, in the same memory: block ``i`` of head ``h`` is block ``i * H + h`` of one head.

    Args:
        tokens: ``[batch, H, k]``; -1 for none.
        ids: int32 ``[batch, H, k]``, those of them in full blocks; or, with ``pages``, their places.
    """
    kv, rows, table = store.blocks
    batch, heads, size = *tokens.shape[:2], kv.shape[2]
    head = torch.arange(heads, dtype=torch.int32, device=q.device)[:, None]
    if not table.shape[1]:
        ids, pages = ids[..., :0], None
    if pages is not None:  # page -(i + 2) of block i, which has no copy
        page = ids.div(size, rounding_mode="floor")
        at_home = (-((-page - 2) * heads + head + 2) - page) * size
        ids = torch.where(page < -1, ids + at_home, ids)
    recent_kv = store.recent_kv.flatten(0, 1)[:, None]
    sealed = rows[:, 1:].repeat_interleave(heads, 0)
    recent_kv, rows = _only(recent_kv, store.ring, sealed, tokens.flatten(0, 1))
    counters, scales = store.counters, store.pool.fields.get("scales")
    out = sparse_decode(
        q.reshape(batch * heads, -1, q.shape[2]),
        kv.view(-1, 1, *kv.shape[2:]),
        rows,
        (table[:, None] * heads + head).flatten(0, 1),
        ids.flatten(0, 1)[:, None],
        recent_kv,
        granularity="token",
        value_dim=store.value_dim,
        sinks=0,
        scale=params.scale,
        softcap=params.softcap,
        attended=counters.attended.view(-1, 1),
        pages=pages,
        from_host=None if store.pool.host is None else counters.from_host.view(-1, 1),
        scales=None if scales is None else scales.view(-1, 1, scales.shape[2]),
    )
    return out.view(batch, -1, store.value_dim)
