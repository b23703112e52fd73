"""Filled caches in files: ``cache.save(path)`` and ``SparseCache.load(path)``. The file itself: :mod:`.container`.

A block of several rows is stored once, and no physical block that nobody names. What a selection keeps of the blocks
(bounds, labels) is stored too, though it could be made again: it is some five percent of the file, and a cache that is
loaded elsewhere then selects by the very same numbers.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from ..attention.handle import Step
from ..config import BY_LAYER, OffloadConfig, SparseConfig
from ..kv.pool import BlockPool
from ..kv.row_table import RowTable
from ..kv.rows import Rows
from ..kv.store import ring_tokens
from ..layers.sliding import SlidingRing
from ..layers.sparse_layer import SparseLayer
from ..offload.host_limit import readable
from ..policies.registry import method_of, methods
from ..policies.shared import Shared
from ..predictor.channels import LabelChannels, describe
from ..removed import removed
from ..tensors import no_inference_mode
from .container import PIECE, Layer, Pieces, Reader, all_tensors, damaged, dtype_name, write

_LABELS = {"codes", "qparams"}
_STORED = {"near_kv"}  # what a store has beside its blocks; the rest is the policy's
# Memory that the configuration in a file may reserve beyond what the file holds: so many bytes, or so many times its
# size. Enough for a prompt of 2k tokens with max_length=32k.
_DEFAULT = "default"  # a predictor that nobody named
_RESERVED, _RESERVED_TIMES = 1 << 28, 16


class FiledCache(Protocol):
    """What saving and loading need of a cache.

    Attributes:
        config_type: the only configuration that its class takes; None: each method's.
        layers: ours, and transformers' own sliding ones.
        model_config: None as long as nobody told.
        _record_past: sliding layers keep what leaves their window, for ``crop()``.
        row_table: what the rows hold.
        row_batch: rows that come and go; None: they do not.
    """

    config_type: ClassVar[type[SparseConfig] | None]
    config: SparseConfig
    offload_config: OffloadConfig | None
    shared: Shared
    layers: list[CacheLayerMixin]
    model_config: PreTrainedConfig | None
    _record_past: bool
    row_table: RowTable
    row_batch: object | None

    def __init__(self, config: SparseConfig, offload: OffloadConfig | None) -> None: ...

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The layers that are ours."""
        ...

    def get_seq_length(self) -> int:
        """Columns cached."""
        ...

    def joined_rows(self) -> Rows:
        """What all layers hold."""
        ...

    def bind(self, model_config: PreTrainedConfig) -> None:
        """Make the layers that the model's configuration asks for."""
        ...

    def _layer(self, index: int) -> SparseLayer:
        """Make one of ours."""
        ...

    def _check_complete(self) -> None:
        """Raise RuntimeError if an earlier forward pass has stopped half-way."""
        ...


Kinds = Sequence[type[FiledCache]]


def _index(layer: SparseLayer, calibrates: bool) -> dict[str, Tensor]:
    """What a selection keeps of the blocks. (Labels are made when channels are.)"""
    left = _LABELS if calibrates else ()
    return {name: held for name, held in layer.store.pool.fields.items() if name not in left}


# ---------------------------------------------------------------------- saving


def save_cache(cache: FiledCache, kinds: Kinds, path: str | os.PathLike[str]) -> None:
    """See :meth:`SparseCache.save`; ``kinds`` are the classes that files name."""
    for layer in cache.sparse_layers:
        layer._check_complete()
    cache._check_complete()
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
    # Rows without any, if all layers are sliding.
    rows = cache.joined_rows() if cache.sparse_layers else Rows(cache.config.block_size, 0, (), ())
    table = _table(cache.row_table, rows)
    named = np.unique(table[table >= 0])
    layers, pieces = [], {}
    for index, layer in enumerate(cache.layers):
        record, held = (
            _sparse(layer, torch.from_numpy(named).long()) if isinstance(layer, SparseLayer) else _sliding(layer, index)
        )
        layers.append(record)
        pieces |= {f"layers.{index}.{name}": piece for name, piece in held.items()}
    padding = None if rows.valid is None else rows.valid.shape[1]
    held = {"lengths": rows.lengths, "sealed": rows.sealed, "padding": padding}
    shapes = all_tensors(layers, cache.config.block_size, held)
    if len(named):
        local = np.where(table >= 0, np.searchsorted(named, table), -1).astype(np.int32)
        pieces["table"] = _whole(torch.from_numpy(local))
    if rows.valid is not None:
        pieces["valid"] = _whole(rows.valid)
    state = {
        "cache": type(cache).__name__,
        "method": method.name,
        "config": _fields(cache.config),
        "model": None if cache.model_config is None else describe(cache.model_config),
        "channel_file": None,
        "record_past": cache._record_past,
        "rows": held,
        "layers": [asdict(layer) for layer in layers],
    }
    channels = cache.shared.channels
    if channels is not None:
        shape = tuple(channels.ranking.shape)
        about = {name: getattr(channels, name) for name in ("model", "name", "importance", "tokens")}
        state["channel_file"] = {"shape": shape, **about}
        shapes["channel_file"], pieces["channel_file"] = (torch.int32, shape), _whole(channels.ranking)
    for device in {layer.device for layer in layers if layer.device.startswith("cuda")}:
        torch.cuda.synchronize(device)  # kernels seal blocks into host memory
    write(Path(path), state, shapes, pieces)


def _fields(config: SparseConfig) -> dict:
    """The configuration as JSON holds it; its predictor: None for one of the user's own, ``_DEFAULT`` for None."""
    found = {field.name: getattr(config, field.name) for field in fields(config)}
    if "predictor" in found and not isinstance(found["predictor"], str):
        found["predictor"] = _DEFAULT if found["predictor"] is None else None
    return found


def _whole(tensor: Tensor) -> Pieces:
    return lambda: iter((tensor,))


def _table(table: RowTable, rows: Rows) -> np.ndarray:
    """Ids of the full blocks of each row, int32 ``[batch, blocks]``, -1 behind them."""
    blocks = max(rows.sealed, default=0)
    return np.where(np.arange(blocks) < np.array(rows.sealed)[:, None], table.host[:, :blocks], -1)


def _sparse(layer: SparseLayer, named: Tensor) -> tuple[Layer, dict[str, Pieces]]:
    """``named``: ids of the blocks that there are, int64."""
    store, labels = layer.store, layer.policy.labels
    store.wait_for_copies()
    calibrates = labels is not None and labels.calibrating
    index = _index(layer, calibrates)
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
        policy=layer.policy.saved_as,
        stats_tokens=labels.stats.tokens if calibrates else None,
        kv_dtype=_kv_dtype(store.pool),
    )
    if undeclared := layer.policy.undeclared():
        raise ValueError(
            f"caches of {type(layer.policy).__name__} cannot be saved: it keeps {', '.join(undeclared)}, which its "
            "TENSORS do not declare (docs/extending.md)"
        )
    kept = layer.policy.to_file(store.held.lengths)
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


def _kv_dtype(pool: BlockPool) -> str | None:
    """Of codes in the pool's blocks; None: keys and values are there as they are."""
    return dtype_name(pool.kv.dtype) if "scales" in pool.fields else None


def _rows_of(held: Tensor, named: Tensor) -> Iterator[Tensor]:
    """Rows ``named`` of ``held``, some at a time."""
    for part in named.to(held.device).split(max(1, PIECE // held[0].nbytes)):
        yield held[part]


def _sliding(layer, index: int) -> tuple[Layer, dict[str, Pieces]]:
    if type(layer) not in (DynamicSlidingWindowLayer, SlidingRing):
        raise ValueError(
            f"layer {index} is a {type(layer).__name__}: caches with layers other than full and sliding-window "
            "attention (linear attention, for one) cannot be saved yet"
        )
    keys, values = layer.keys, layer.values
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


# ---------------------------------------------------------------------- loading


@no_inference_mode
@torch.no_grad()
def load_cache(
    kind: type[FiledCache],
    kinds: Kinds,
    path: str | os.PathLike[str],
    config: SparseConfig | None,
    offload: OffloadConfig | Literal["default"] | None,
    model_config,
    device: torch.device | str | None,
) -> FiledCache:
    """See :meth:`SparseCache.load`; ``kinds`` are the classes that files name."""
    with Reader(path) as file:
        state = file.state
        made = next((known for known in kinds if known.__name__ == state["cache"]), None)
        if made is None or not issubclass(made, kind):
            raise ValueError(f"{path} holds a {state['cache']}, which {kind.__name__}.load() cannot make")
        named = None if made.config_type is None else method_of(made.config_type()).name
        name = state["method"]
        if named not in (None, name):
            raise damaged(path, f"method {name!r} is not that of a {made.__name__}")
        if name not in methods():
            raise ValueError(f"{path} holds a cache of an unknown method {name!r}: import what registers it first")
        if offload == "default":
            offload = inspect.signature(made).parameters["offload"].default
        cache = _empty(made, methods()[name].config, file, config, offload)
        cache.shared.check_file(loading=True)
        _bind(cache, file, model_config)
        _check_header(cache, file)
        if config is None:
            _check_reserved(cache, file)
        rows = _rows(cache, file, device)
        for index, (layer, record) in enumerate(zip(cache.layers, file.layers)):
            where = _device(file, record, device)
            if isinstance(layer, SparseLayer):
                _fill(layer, record, rows, file, f"layers.{index}.", where)
            else:
                keys, values = (file.tensor(f"layers.{index}.{name}").to(where) for name in ("keys", "values"))
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values, layer.cumulative_length = keys, values, record.length
        if cache.sparse_layers:
            cache.joined_rows()
    return cache


def _rows(cache: FiledCache, file: Reader, device: torch.device | str | None) -> tuple[Rows, np.ndarray]:
    """The rows, and the ids that the saved blocks have here. Without layers of ours there are none."""
    about, size, columns = file.state["rows"], cache.config.block_size, file.layers[0].length
    lengths, sealed = tuple(about["lengths"]), tuple(about["sealed"])
    ours = next((record for record in file.layers if record.window is None), None)
    batch, blocks = (0, 0) if ours is None else (ours.batch, ours.blocks)
    # A step seals what is older than window and drafts; crop() takes back what would leave the window short.
    old = [length - cache.config.window for length in lengths]
    least, most = ([max(0, n // size) for n in (x - more for x in old)] for more in (cache.config.max_draft, 0))
    _refuse_rows(
        file,
        {
            "lengths": len(lengths) == batch,
            "sealed": len(sealed) == len(lengths)
            and all(low <= n <= high for low, n, high in zip(least, sealed, most)),
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
    _refuse_rows(
        file,
        {
            "padding": fits and list(lengths) == seen,
            "table": bool(((table >= 0) == there).all() and (table < blocks).all() and (table >= -1).all())
            and _names_each_block(table, blocks),
        },
    )
    if valid is not None:
        valid = valid.to(_device(file, ours, device))
    rows = Rows(size, columns, lengths, sealed, valid)
    cache.row_table.start(batch, max(1, table.shape[1]) * size)
    return rows, cache.row_table.load(rows, table)


def _refuse_rows(file: Reader, fits: dict[str, bool]) -> None:
    for name, fit in fits.items():
        if not fit:
            raise damaged(file.path, f"{name} of the rows does not fit the rest")


def _empty(
    made: type[FiledCache],
    saved_as: type[SparseConfig],
    file: Reader,
    config: SparseConfig | None,
    offload: OffloadConfig | None,
) -> FiledCache:
    """A cache without layers, of the saved configuration or of ``config`` if that agrees."""
    named = _without_removed(saved_as, file, config)
    try:
        if named.get("predictor", "") is None:
            if config is None:
                raise ValueError("it was saved with a predictor of the user's own, which no file holds: pass config")
            del named["predictor"]
        elif named.get("predictor") == _DEFAULT:
            named["predictor"] = None
        saved = saved_as(**named)
        if getattr(saved, "cache_rank", None) not in (None, "stream", "host"):
            raise ValueError(f"cache_rank is {saved.cache_rank!r}, and caches of a second device are not saved")
        if (getattr(saved, "channel_file", None) is None) != (file.state["channel_file"] is None):
            raise ValueError("channel_file does not fit the rest")
        about, channels = file.state["channel_file"], None
        if about is not None:  # the file itself may be gone, or another
            about = {name: value for name, value in about.items() if name != "shape"}
            channels = LabelChannels(file.tensor("channel_file"), **about)
    except (TypeError, ValueError) as error:
        raise damaged(file.path, f"its configuration: {error}") from None
    if config is None:
        cache = made(saved if channels is None else replace(saved, channel_file=None), offload)
        if channels is not None:
            cache.config = cache.shared.config = saved
            cache.shared.channels = channels
        return cache
    cache = made(config, offload)
    if type(config) is not saved_as:
        raise TypeError(f"config must be a {saved_as.__name__}, as {file.path} has it, got {type(config).__name__}")
    free = free_fields(saved_as)
    for name in (field.name for field in fields(config)):
        theirs, ours = getattr(saved, name), getattr(config, name)
        same = theirs == ours
        if name == "channel_file":  # contents count, not names
            held = (channels, cache.shared.channels)
            same = held == (None, None) or (None not in held and torch.equal(*(c.ranking for c in held)))
        if name not in free and not same:
            raise ValueError(
                f"{file.path} was saved with {name}={theirs!r}, which its contents depend on; got {ours!r}. Leave "
                f"config out, change only {', '.join(free)}, or prefill again"
            )
    return cache


def _without_removed(made: type[SparseConfig], file: Reader, config: SparseConfig | None) -> dict:
    """The saved configuration without options that are gone; their values must stand for what happens now.

    Where nothing that is stored depends on such an option, a ``config`` of the loader's may take its place.
    """
    named, gone = dict(file.state["config"]), removed(made)
    for name in named.keys() & gone.keys():
        value, option = named.pop(name), gone[name]
        if not option.means_now(value) and (option.stored or config is None):
            way = "prefill again" if option.stored else "pass config to load it without"
            raise ValueError(f"{file.path} was saved with {name}={value!r}, which is gone: {option.instead} ({way})")
    return named


def free_fields(config: type[SparseConfig]) -> list[str]:
    """Fields that only later steps depend on: ``FREE`` of the class and of those that it inherits from."""
    lists = (vars(kind).get("FREE", ()) for kind in config.__mro__)
    return list(dict.fromkeys(name for names in lists for name in names))


def _bind(cache: FiledCache, file: Reader, model_config) -> None:
    """Give the cache its layers, which must be of the saved kinds."""
    cache._record_past = file.state["record_past"]
    windows = [record.window for record in file.layers]
    if model_config is None:
        if any(windows):
            raise ValueError(
                f"{file.path} holds sliding-window layers, which only the model's configuration describes: pass "
                "model_config=model.config"
            )
        for index in range(len(windows)):
            cache.layers.append(cache._layer(index))
        return
    saved = file.state["model"]
    for name, ours in describe(model_config).items():
        if saved is not None and saved.get(name) != ours:
            raise ValueError(
                f"{file.path} was saved from another model: {name} is {saved.get(name)} in the file, {ours} in "
                "model_config. Load it for the model that it was made with, or prefill again"
            )
    cache.bind(model_config)
    kinds = [None if isinstance(layer, SparseLayer) else getattr(layer, "sliding_window", 0) for layer in cache.layers]
    if kinds != windows:
        raise ValueError(
            f"{file.path} was saved from another model: its layers' windows are {windows}, those of model_config "
            f"{kinds} (None: full attention). Load it for the model that it was made with, or prefill again"
        )


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
    layer: SparseLayer,
    record: Layer,
    loaded: tuple[Rows, np.ndarray],
    file: Reader,
    prefix: str,
    device: torch.device,
) -> None:
    """Make the layer's store and policy as they were. ``loaded``: see :func:`_rows`."""
    size, rows = layer.owner.config.block_size, (record.batch, record.heads)
    # As many tokens as the blocks hold: rows may share theirs.
    tokens = max(1, -(-record.blocks // record.batch)) * size
    nothing = torch.empty(1, dtype=getattr(torch, record.dtype), device=device)
    shape = [(*rows, tokens, dim) for dim in (record.key_dim, record.value_dim)]
    layer.latent = record.latent
    q_heads = record.ring[0] if record.ring else record.query_heads or record.heads
    try:
        layer._begin(Step(layer, *(nothing.expand(s) for s in shape), 0), q_heads)
    except ValueError as error:  # label channels that the model cannot have
        raise damaged(file.path, f"layer {layer.index}: {error}") from None
    store, policy = layer.store, layer.policy
    if record.kv_dtype != (kv_dtype := _kv_dtype(store.pool)):
        raise ValueError(
            f"{file.path} has layer {layer.index} with kv_dtype={record.kv_dtype!r} in its blocks, this cache with "
            f"{kv_dtype!r}: load it with the OffloadConfig(kv_dtype=..., keep_dense=...) that it was saved with, or "
            "prefill again"
        )
    held = {name: file.tensor(prefix + name) for name in record.tensors(size) if name not in {"blocks", *record.index}}
    rows, ids = loaded
    _check_tensors(layer, record, rows, held, file)
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


# ---------------------------------------------------------------------- checks


def _check_header(cache: FiledCache, file: Reader) -> None:
    """What the header says of the layers agrees with itself and the configuration, before memory is taken for it."""
    latent = {record.latent for record in file.layers if record.window is None}
    first = file.layers[0]
    blocks = next((record.blocks for record in file.layers if record.window is None), 0)
    for index, (layer, record) in enumerate(zip(cache.layers, file.layers)):
        fits = {"length": record.length == first.length, "batch": record.batch == first.batch}
        if isinstance(layer, SparseLayer):
            fits |= {"latent": len(latent) == 1 and (not record.latent or record.heads == 1)}
            fits["blocks"] = record.blocks == blocks
            _refuse(file, index, fits)
            fits |= _sparse_fits(layer, record, file.state["rows"]["sealed"], fits["length"], _keeps_queries(file))
        else:
            fits |= _sliding_fits(record, cache._record_past)
        _refuse(file, index, fits)


def _refuse(file: Reader, index: int, fits: dict[str, bool]) -> None:
    for name, fit in fits.items():
        if not fit:
            raise damaged(file.path, f"{name} in layer {index} does not fit the rest")


def _keeps_queries(file: Reader) -> bool:
    """The predictor that the cache was saved with follows the queries of its steps."""
    return file.state["config"].get("predictor") not in (_DEFAULT, *BY_LAYER)


def _sparse_fits(layer: SparseLayer, record: Layer, sealed: list[int], length: bool, queries: bool) -> dict[str, bool]:
    config, policy = layer.owner.config, layer.policy
    labels, tokens, heads = policy.labels, record.stats_tokens, record.query_heads
    return {
        "length": length,
        "near buffer": record.near == config.sinks + ring_tokens(config),
        "blocks": (record.blocks > 0) == (sum(sealed) > 0) and record.blocks <= sum(sealed),
        "index": record.blocks > 0 or not record.index,
        "policy": record.policy == policy.saved_as,
        "channels": (record.channels is not None) == (labels is not None and tokens is None),
        "stats_tokens": tokens is None or (labels is not None and tokens < config.calibration_tokens),
        "query_heads": (heads is not None) == bool(tokens) and (heads or 0) % record.heads == 0,
        "ring": (record.ring is not None) == (queries and "queries" in policy.PARTS)
        and (record.ring is None or record.ring[0] % record.heads == 0),
        **{name: getattr(record, name) is None or name in policy.file_names() for name in ("previous", "chosen")},
    }


def _sliding_fits(record: Layer, record_past: bool) -> dict[str, bool]:
    shown = record.length if record.window == 1 else min(record.length, record.window - 1)
    recorded = record_past and record.record_past
    return {
        "record_past": record_past or not record.record_past,
        "kept": 0 < record.kept <= record.length if recorded else record.kept == shown,
    }


def _check_reserved(cache: FiledCache, file: Reader) -> None:
    """A small file may not ask for much memory: that is up to who passes a configuration."""
    config, size = cache.config, 0
    chosen = method_of(config).policy.reserves(config, cache.offload_config is not None)
    for record in file.layers:
        if record.window is None:
            token = record.heads * (record.key_dim + record.value_dim) * getattr(torch, record.dtype).itemsize
            size += record.batch * ((config.max_length or 0) * token + chosen * record.heads * 4)
    most = max(_RESERVED, _RESERVED_TIMES * file.nbytes)
    if size > most:
        raise ValueError(
            f"{file.path} reserves {readable(size)} (max_length={config.max_length}, {chosen} blocks or tokens chosen "
            f"a step), more than the {readable(most)} that a file of {readable(file.nbytes)} may ask for: pass config, "
            "with as much as you want reserved"
        )


def _check_tensors(layer: SparseLayer, record: Layer, rows: Rows, held: dict[str, Tensor], file: Reader) -> None:
    """Nothing may point at what is not there: kernels would follow."""
    store, policy = layer.store, layer.policy
    labels = policy.labels
    calibrates = labels is not None and record.channels is None
    index = {k: [dtype_name(v.dtype), list(v.shape[1:])] for k, v in _index(layer, calibrates).items()}
    # What a cache that has just begun would write is always there; beside it what this policy knows.
    kept, always = held.keys() - _STORED, policy.to_file((0,) * rows.batch).keys()
    if not _keeps_queries(file):  # and this one's predictor begins without any
        always = always - {"queries", "queries_from"}
    fits = {
        "index": record.blocks == 0 or record.index == index,
        "channels": labels is None or calibrates or record.channels == labels.r,
        **{name: name in kept for name in always},
        **{name: name in policy.file_names() for name in kept - always},
    }
    _refuse(file, layer.index, fits)
    sealed, lengths = (torch.tensor(of, dtype=torch.int64).view(-1, 1, 1) for of in (rows.sealed, rows.lengths))
    limits = {
        "previous": (-1, sealed),
        "channels": (0, record.query_dim),
        "chosen": (-1, sealed * store.block_size),
        "queries_from": (0, lengths[:, 0, 0] + 1),
    }
    for name, (low, high) in limits.items():
        if name in held and not ((low <= held[name]) & (held[name] < high)).all():
            raise damaged(file.path, f"{name} in layer {layer.index} is out of range")
    fits = {name: _distinct(held[name]) for name in ("channels", "previous", "chosen") if name in held}
    if "channels" in held and labels is not None and labels.channels is not None:  # of a channel file
        fits["channels"] &= torch.equal(held["channels"], labels.channels.cpu())
    _refuse(file, layer.index, fits)


def _distinct(ids: Tensor) -> bool:
    """No number but -1 comes twice in a row."""
    ids = ids.sort(-1).values
    return not bool(((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)).any())


def _names_each_block(table: np.ndarray, blocks: int) -> bool:
    """Each block has a row that names it, and rows that share it have it at the same place."""
    place = np.full(blocks, -1)
    row, column = (table >= 0).nonzero()
    place[table[row, column]] = column
    return bool((place >= 0).all() and (place[table[row, column]] == column).all())
