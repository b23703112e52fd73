"""One layer in continuous batching: its store is opened, rows join it, and are cropped.

Only :mod:`..row_batch` uses it, which changes all layers at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.handle import Step
from ..kv.read_back import add_sinks, reindex
from ..kv.rows import Rows
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..policies.indexed import IndexedPolicy
from ..tensors import no_autocast, no_inference_mode
from .cache_state import FullLayer


def open_rows(layer: FullLayer, batch: int, other: FullLayer) -> None:
    """Make a store for ``batch`` rows, over the block pool of ``other``, which holds the first that is to join."""
    like, layer.latent = other.store, other.latent
    nothing = torch.empty(1, dtype=like.dtype, device=like.device)
    k, v = (nothing.expand(batch, like.heads, 1, dim) for dim in (like.split, like.width - like.split))
    layer.begin(Step(layer, k, v, 0), other.q_heads)
    if layer.policy.labels is not None:
        assert other.policy.labels is not None
        layer.policy.labels.open_rows(other.policy.labels)
    if isinstance(layer.policy, IndexedPolicy) and layer.store.table_of_rows.managed:
        assert isinstance(other.policy, IndexedPolicy)
        layer.policy.open_rows(other.policy, layer.store)


@no_inference_mode
def read_sinks(store: LayerStore) -> None:
    """The only row has begun with full blocks that were there: put its sinks where decode steps look for them."""
    store.join()
    add_sinks(store.recent_kv[0], store.ring, store.pool, store.table_of_rows.blocks.host[0, : store.full_blocks])


def join_row(layer: FullLayer, row: int, other: FullLayer) -> None:
    """Row ``row`` is about to become the only one of ``other``: :func:`add_rows` says what is to be copied."""
    other.store.writer.wait()
    layer.audit.merge(other.audit)
    if layer.policy.foresight is not None:
        assert other.policy.foresight is not None
        layer.policy.foresight.join_row(row, other.policy.foresight, layer.store)
    if isinstance(layer.policy, IndexedPolicy):
        assert isinstance(other.policy, IndexedPolicy)
        layer.policy.take_row(row, other.policy, other.store.held.lengths[0])


def add_rows(layer: FullLayer, other: FullLayer, found: list[tuple[Tensor, Tensor, int]]) -> None:
    """Tensors that hold rows of this and ``other`` beside the blocks, see :meth:`..kv.state.State.add_rows`."""
    layer.store.add_rows(other.store, found)
    layer.policy.add_rows(other.policy, found)


def crop_row(layer: FullLayer, row: int, rows: Rows) -> None:
    """The last tokens of a row are removed, which leaves ``rows``."""
    layer.store.crop_to(rows)
    if layer.policy.foresight is not None:
        layer.policy.foresight.crop_row(row)


@no_autocast
def end_calibration(store: LayerStore, policy: Policy) -> None:
    """Have label channels, whatever has been seen so far."""
    labels = policy.labels
    if labels is not None and labels.finish() and store.full_blocks:
        reindex(store, policy)
