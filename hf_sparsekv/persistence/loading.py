"""``SparseCache.load(path)``: a cache of the saved layers and rows, filled with the saved tensors.

Separate from :mod:`.checks`, which validate the content of a file.
"""

from __future__ import annotations

import inspect
import os
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..attention.handle import Step
from ..kv.pool import BlockPool
from ..kv.rows import Rows
from ..layers.cache_state import CacheState, FullLayer
from ..layers.kinds import face, kinds
from ..layers.sparse_layer import SparseLayer
from ..policies.registry import called, method_of
from ..predictor.channels import describe
from ..tensors import no_inference_mode
from .checks import check_header, check_reserved, check_tensors, names_each_block, refuse_rows
from .configuration import empty_cache
from .container import PIECE, Layer, Reader, damaged
from .filed_cache import Kinds, kv_dtype_of


@no_inference_mode
@torch.no_grad()
def load_cache(
    kind: type[Any],  # of CacheState
    kinds: Kinds,
    path: str | os.PathLike[str],
    config: SparseConfig | None,
    offload: OffloadConfig | Literal["default"] | None,
    model_config,
    device: torch.device | str | None,
) -> Any:
    """See :meth:`SparseCache.load`; ``kinds`` are the classes that can be loaded."""
    with Reader(path) as file:
        state = file.state
        made = next((known for known in kinds if known.__name__ == state["cache"]), None)
        if made is None or not issubclass(made, kind):
            raise ValueError(f"{path} holds a {state['cache']}, which {kind.__name__}.load() cannot make")
        named = None if made.config_type is None else method_of(made.config_type()).name
        name = state["method"]
        method = called().get(name)
        if named is not None and (method is None or named != method.name):
            raise damaged(path, f"method {name!r} is not that of a {made.__name__}")
        if method is None:
            raise ValueError(f"{path} holds a cache of an unknown method {name!r}: import what registers it first")
        if offload == "default":
            offload = inspect.signature(made).parameters["offload"].default
        cache = empty_cache(made, method.config, file, config, offload)
        cache.shared.check_file(loading=True)
        _bind(cache, file, model_config)
        check_header(cache, file)
        if config is None:
            check_reserved(cache, file)
        rows = _rows(cache, file, device)
        for index, (layer, record) in enumerate(zip(cache.layers, file.layers)):
            where = _device(file, record, device)
            if isinstance(layer, FullLayer):
                _fill(layer, record, rows, file, f"layers.{index}.", where)
            elif record.window is None:
                held = {name: file.tensor(f"layers.{index}.{name}").to(where) for name in record.state}
                try:
                    layer.from_file(held, record.facts)
                except (KeyError, TypeError, ValueError) as error:
                    raise damaged(path, f"layer {index}, of kind {record.kind!r}: {error}") from None
            else:
                keys, values = (file.tensor(f"layers.{index}.{name}").to(where) for name in ("keys", "values"))
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values, layer.cumulative_length = keys, values, record.length
        if cache.sparse_layers:
            cache.joined_rows()
        if (column := file.state["rows"]["inexact_from"]) is not None:
            cache.row_table.exactness.selected(column)
    return cache


def _bind(cache: CacheState, file: Reader, model_config) -> None:
    """Create the cache's layers, which must be of the saved kinds."""
    cache.record_past = file.state["record_past"]
    windows = [record.window for record in file.layers]
    for index, record in enumerate(file.layers):
        if record.kind not in kinds():
            raise ValueError(
                f"layer {index} in {file.path} is of the kind {record.kind!r}, which {record.module} registers: import "
                "that first"
            )
        if model_config is None and (record.kind != SparseLayer.kind or record.window is not None):
            raise ValueError(
                f"layer {index} in {file.path} is of the kind {record.kind!r}, which only the model's configuration "
                "describes: pass model_config=model.config"
            )
    if model_config is None:
        for index in range(len(windows)):
            cache.layers.append(SparseLayer(cache, index))
        return
    saved = file.state["model"]
    for name, ours in describe(model_config).items():
        if saved is not None and saved.get(name) != ours:
            raise ValueError(
                f"{file.path} was saved from another model: {name} is {saved.get(name)} in the file, {ours} in "
                "model_config. Load it for the model that it was made with, or prefill again"
            )
    cache.bind(model_config)
    saved = [(record.kind, record.window) for record in file.layers]
    made = [(face(layer).kind, getattr(layer, "sliding_window", None)) for layer in cache.layers]
    if made != saved:
        raise ValueError(
            f"{file.path} was saved from another model: the kinds and windows of its layers are {saved}, those of "
            f"model_config {made}. Load it for the model that it was made with, or prefill again"
        )


def _rows(cache: CacheState, file: Reader, device: torch.device | str | None) -> tuple[Rows, np.ndarray]:
    """The rows, and the new ids of the saved blocks. Without sparse layers there are none."""
    about, size, columns = file.state["rows"], cache.config.block_size, file.layers[0].length
    lengths, sealed = tuple(about["lengths"]), tuple(about["sealed"])
    ours = next((record for record in file.layers if record.selects), None)
    batch, blocks = (0, 0) if ours is None else (ours.batch, ours.blocks)
    # A step seals tokens older than the window plus drafts; crop() unseals tokens that the window needs.
    old = [length - cache.config.window for length in lengths]
    least, most = ([max(0, n // size) for n in (x - more for x in old)] for more in (cache.config.max_draft, 0))
    refuse_rows(
        file,
        {
            "lengths": len(lengths) == batch,
            "sealed": len(sealed) == len(lengths)
            and all(low <= n <= high for low, n, high in zip(least, sealed, most)),
            "inexact_from": about["inexact_from"] is None or about["inexact_from"] < columns,
        },
    )
    valid, seen, fits = None, [columns] * batch, True
    if about["padding"] is not None:
        valid = file.tensor("valid")
        seen = (valid.sum(1) + columns - valid.shape[1]).tolist()
        fits = batch > 0 and valid.shape[1] <= columns
    table = np.zeros((batch, 0), dtype=np.int32)
    if max(sealed, default=0):
        table = file.tensor("table").numpy()
    there = np.arange(table.shape[1]) < np.array(sealed)[:, None]
    refuse_rows(
        file,
        {
            "padding": fits and list(lengths) == seen,
            "table": bool(((table >= 0) == there).all() and (table < blocks).all() and (table >= -1).all())
            and names_each_block(table, blocks),
        },
    )
    if valid is not None:
        valid = valid.to(_device(file, ours, device))
    rows = Rows(size, columns, lengths, sealed, valid)
    cache.row_table.start(batch, max(1, table.shape[1]) * size)
    return rows, cache.row_table.load(rows, table)


def _device(file: Reader, record: Layer, device: torch.device | str | None) -> torch.device:
    try:
        return torch.empty(0, device=record.device if device is None else device).device  # cuda is cuda:0
    except (RuntimeError, AssertionError, ImportError) as error:  # as torch has it for each kind of device
        if device is not None:
            raise
        raise ValueError(
            f"{file.path} was saved on {record.device}, which is not here ({error}): pass device="
        ) from None


def _fill(
    layer: FullLayer,
    record: Layer,
    loaded: tuple[Rows, np.ndarray],
    file: Reader,
    prefix: str,
    device: torch.device,
) -> None:
    """Restore the layer's store and policy. ``loaded``: see :func:`_rows`."""
    size, rows = layer.owner.config.block_size, (record.batch, record.heads)
    # Room for the tokens of all blocks; rows may share blocks.
    tokens = max(1, -(-record.blocks // record.batch)) * size
    nothing = torch.empty(1, dtype=getattr(torch, record.dtype), device=device)
    shape = [(*rows, tokens, dim) for dim in (record.key_dim, record.value_dim)]
    layer.latent = record.latent
    q_heads = record.ring[0] if record.ring else record.query_heads or record.heads
    try:
        layer.begin(Step(layer, *(nothing.expand(s) for s in shape), 0), q_heads)
    except ValueError as error:  # label channels that do not fit the model
        raise damaged(file.path, f"layer {layer.index}: {error}") from None
    store, policy = layer.store, layer.policy
    if record.kv_dtype != (kv_dtype := kv_dtype_of(store.pool)):
        raise ValueError(
            f"{file.path} has layer {layer.index} with kv_dtype={record.kv_dtype!r} in its blocks, this cache with "
            f"{kv_dtype!r}: load it with the OffloadConfig(kv_dtype=..., keep_dense=...) that it was saved with, or "
            "prefill again"
        )
    held = {name: file.tensor(prefix + name) for name in record.tensors(size) if name not in {"blocks", *record.index}}
    rows, ids = loaded
    check_tensors(layer, record, rows, held, file)
    store.recent_kv.copy_(held["near_kv"])
    if record.blocks:
        _read_blocks(store.pool, torch.from_numpy(ids).long(), record, file, prefix)
    store.held = rows
    policy.from_file(held, device, rows.lengths)
    if record.stats_tokens is not None:
        policy.labels.stats.tokens = record.stats_tokens


def _read_blocks(pool: BlockPool, ids: Tensor, record: Layer, file: Reader, prefix: str) -> None:
    """Read the saved blocks into those with ``ids``, int64 ``[blocks]``."""
    pool.fit()
    for lo in range(0, record.blocks, step := max(1, PIECE // pool.kv[0].nbytes)):
        hi = min(lo + step, record.blocks)
        at, rows = ids[lo:hi], {name: file.rows(prefix + name, lo, hi) for name in ("blocks", *record.index)}
        pool.kv[at.to(pool.kv.device)] = rows.pop("blocks").to(pool.kv.device)
        for name, value in rows.items():
            pool.fields[name][at.to(pool.device)] = value.to(pool.device)
