"""``cache.save(path)``: a filled cache as tensors, and numbers that describe them. The file itself: :mod:`.container`.

A block that several rows share is stored once; unreferenced physical blocks are not stored. The index of the blocks
(bounds, labels) could be recomputed, but is stored too. It takes some five percent of the file, and a cache that is
loaded elsewhere then selects by exactly the same numbers. Separate from loading because saving trusts its input.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..kv.row_table import RowTable
from ..kv.rows import Rows
from ..layers.cache_state import CacheState, FullLayer
from ..layers.kinds import face
from ..layers.sliding import Sliding
from ..layers.together import check_complete
from ..policies.registry import method_of
from ..predictor.channels import describe
from .configuration import config_fields
from .container import PIECE, Layer, Pieces, all_tensors, dtype_name, norms_shape, write
from .filed_cache import INDEX_KEYS, Kinds, kept_index, kv_dtype_of


def save_cache(cache: CacheState, kinds: Kinds, path: str | os.PathLike[str]) -> None:
    """See :meth:`SparseCache.save`; ``kinds`` are the classes that can be saved."""
    for layer in cache.sparse_layers:
        layer._check_complete()
    check_complete(cache.layers)
    if not cache.layers or not cache.get_seq_length():
        raise ValueError("nothing is cached yet: prefill before you save")
    if type(cache) not in kinds:
        raise ValueError(f"{type(cache).__name__} cannot be saved yet")
    if cache.row_batch is not None:
        raise ValueError("rows that come and go cannot be saved yet: save the cache of a prompt, prefilled by itself")
    method = method_of(cache.config)
    if method.reference or type(cache.config) is not method.config:
        raise ValueError(f"caches of {type(cache.config).__name__} cannot be saved yet")
    cache.shared.check_file(loading=False)
    # No rows if all layers are sliding.
    rows = cache.joined_rows() if cache.sparse_layers else Rows(cache.config.block_size, 0, (), ())
    table = _table(cache.row_table, rows)
    named = np.unique(table[table >= 0])
    layers, pieces = [], {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, FullLayer):
            record, held = _sparse(layer, torch.from_numpy(named).long())
        else:
            record, held = (_sliding if isinstance(layer, Sliding) else _other)(layer, index, cache)
        record.kind, record.module = layer.kind, type(layer).__module__
        layers.append(record)
        pieces |= {f"layers.{index}.{name}": piece for name, piece in held.items()}
    padding = None if rows.valid is None else rows.valid.shape[1]
    inexact = cache.row_table.exactness.inexact_from
    if inexact is not None and inexact >= rows.columns:  # of a step that was interrupted
        inexact = None
    held = {"lengths": rows.lengths, "sealed": rows.sealed, "padding": padding, "inexact_from": inexact}
    shapes = all_tensors(layers, cache.config.block_size, held)
    if len(named):
        local = np.where(table >= 0, np.searchsorted(named, table), -1).astype(np.int32)
        pieces["table"] = _whole(torch.from_numpy(local))
    if rows.valid is not None:
        pieces["valid"] = _whole(rows.valid)
    state = {
        "cache": type(cache).__name__,
        "method": method.name,
        "config": config_fields(cache.config),
        "model": None if cache.model_config is None else describe(cache.model_config),
        "channel_file": None,
        "record_past": cache.record_past,
        "rows": held,
        "layers": [asdict(layer) for layer in layers],
    }
    channels = cache.shared.channels
    if channels is not None:
        shape = tuple(channels.ranking.shape)
        about = {name: getattr(channels, name) for name in ("model", "name", "tokens")}
        state["channel_file"] = {"shape": shape, **about}
        shapes["channel_file"], pieces["channel_file"] = (torch.int32, shape), _whole(channels.ranking)
        shapes["channel_norms"], pieces["channel_norms"] = (torch.float32, norms_shape(shape)), _whole(channels.norms)
    for device in {layer.device for layer in layers if layer.device.startswith("cuda")}:
        torch.cuda.synchronize(device)  # kernels seal blocks into host memory
    write(Path(path), state, shapes, pieces)


def _whole(tensor: Tensor) -> Pieces:
    return lambda: iter((tensor,))


def _table(table: RowTable, rows: Rows) -> np.ndarray:
    """Ids of the full blocks of each row, int32 ``[batch, blocks]``, -1 after them."""
    blocks = max(rows.sealed, default=0)
    return np.where(np.arange(blocks) < np.array(rows.sealed)[:, None], table.blocks.host[:, :blocks], -1)


def _sparse(layer: FullLayer, named: Tensor) -> tuple[Layer, dict[str, Pieces]]:
    """A sparse layer's record and tensors; ``named``: ids of the referenced blocks, int64."""
    store, labels = layer.store, layer.policy.labels
    store.writer.wait()
    calibrates = labels is not None and labels.calibrating
    index = kept_index(layer, calibrates)
    record = Layer(
        device=str(store.device),
        dtype=dtype_name(store.dtype),
        batch=store.batch,
        heads=store.heads,
        key_dim=store.split,
        value_dim=store.width - store.split,
        latent=store.latent,
        length=store.length,
        near=store.recent_kv.shape[2],
        blocks=len(named),
        policy=layer.owner.shared.name_of(layer.policy),
        stats_tokens=labels.stats.tokens if calibrates else None,
        kv_dtype=kv_dtype_of(store.pool),
    )
    if undeclared := layer.policy.undeclared():
        raise ValueError(
            f"caches of {type(layer.policy).__name__} cannot be saved: it keeps {', '.join(undeclared)}, which its "
            "TENSORS do not declare (docs/extending.md)"
        )
    kept = layer.policy.to_file(store.held.lengths)
    if INDEX_KEYS in kept:  # without room for more columns
        kept[INDEX_KEYS] = kept[INDEX_KEYS][:, : store.length]
    record.measure(kept)
    known = record.tensors(store.block_size)
    record.state = {name: [dtype_name(t.dtype), list(t.shape)] for name, t in kept.items() if name not in known}
    tensors = {"near_kv": store.recent_kv, **kept}
    found = {name: _whole(tensor) for name, tensor in tensors.items()}
    if len(named):
        record.index = {name: [dtype_name(held.dtype), list(held.shape[1:])] for name, held in index.items()}
        for name, held in {"blocks": store.pool.kv, **index}.items():
            found[name] = lambda held=held: _rows_of(held, named)
    return record, found


def _rows_of(held: Tensor, named: Tensor) -> Iterator[Tensor]:
    """Rows ``named`` of ``held``, in pieces."""
    for part in named.to(held.device).split(max(1, PIECE // held[0].nbytes)):
        yield held[part]


def _other(layer, index: int, cache: CacheState) -> tuple[Layer, dict[str, Pieces]]:
    """A layer of another kind, as it describes itself."""
    try:
        held, facts = face(layer).to_file()
    except NotImplementedError:
        raise ValueError(
            f"layer {index} is a {type(layer).__name__}, which cannot be saved: its kind says nothing of files "
            "(LayerKind.to_file())"
        ) from None
    first = next(iter(held.values()), torch.empty(0))
    record = Layer(
        device=str(first.device),
        dtype="float32",
        heads=1,
        key_dim=1,
        value_dim=0,
        batch=cache.row_table.batch if cache.sparse_layers else len(first),
        length=cache.get_seq_length(),
        state={name: [dtype_name(t.dtype), list(t.shape)] for name, t in held.items()},
        facts=facts,
    )
    return record, {name: _whole(tensor) for name, tensor in held.items()}


def _sliding(layer, index: int, cache: CacheState) -> tuple[Layer, dict[str, Pieces]]:
    keys, values = (held.as_subclass(torch.Tensor) for held in (layer.keys, layer.values))
    record = Layer(
        device=str(keys.device),
        dtype=dtype_name(keys.dtype),
        batch=keys.shape[0],
        heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        length=layer.cumulative_length,
        window=layer.sliding_window,
        kept=keys.shape[2],
        record_past=layer.record_past,
    )
    return record, {"keys": _whole(keys), "values": _whole(values)}
