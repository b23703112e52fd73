"""Checks of a file's content: its parts must agree with each other, with the configuration and the memory limits.

Separate from loading because a file may be damaged or malicious: kernels would follow any ids in it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kv.rows import Rows
from ..kv.store import ring_tokens
from ..layers.cache_state import CacheState, FullLayer
from ..offload.host_limit import readable
from ..policies.ahead.query_ring import SLOTS
from ..policies.registry import method_of
from ..predictor.channels import are_norms
from .configuration import keeps_queries
from .container import Layer, Reader, damaged, dtype_name
from .filed_cache import INDEX_KEYS, kept_index

_STORED = {"near_kv"}  # tensors of a store besides its blocks; all others belong to the policy
# Memory that the configuration in a file may reserve beyond the file's content: in bytes, or as a multiple of its
# size, whichever is more. Enough for a prompt of 2k tokens with max_length=32k.
_RESERVED, _RESERVED_TIMES = 1 << 28, 16


def check_header(cache: CacheState, file: Reader) -> None:
    """Check that the header's layers agree with each other and the configuration, before any memory is allocated."""
    latent = {record.latent for record in file.layers if record.selects}
    first = file.layers[0]
    blocks = next((record.blocks for record in file.layers if record.selects), 0)
    for index, (layer, record) in enumerate(zip(cache.layers, file.layers)):
        fits = {"length": record.length == first.length, "batch": record.batch == first.batch}
        if isinstance(layer, FullLayer):
            fits |= {"latent": len(latent) == 1 and (not record.latent or record.heads == 1)}
            fits["blocks"] = record.blocks == blocks
            _refuse(file, index, fits)
            fits |= _sparse_fits(layer, record, file.state["rows"]["sealed"], fits["length"], keeps_queries(file))
        elif record.window is not None:
            fits |= _sliding_fits(record, cache.record_past)
        _refuse(file, index, fits)


def _sparse_fits(layer: FullLayer, record: Layer, sealed: list[int], length: bool, queries: bool) -> dict[str, bool]:
    config, policy = layer.owner.config, layer.policy
    labels, tokens, heads = policy.labels, record.stats_tokens, record.query_heads
    return {
        "length": length,
        "near buffer": record.near == config.sinks + ring_tokens(config),
        "blocks": (record.blocks > 0) == (sum(sealed) > 0) and record.blocks <= sum(sealed),
        "index": record.blocks > 0 or not record.index,
        "policy": record.policy == layer.owner.shared.name_of(policy),
        "channels": (record.channels is not None) == (labels is not None and tokens is None),
        "stats_tokens": tokens is None or (labels is not None and tokens < config.calibration_tokens),
        "query_heads": (heads is not None) == bool(tokens) and (heads or 0) % record.heads == 0,
        "ring": (record.ring is not None) == (queries and "queries" in policy.file_names())
        and (record.ring is None or (record.ring[0] % record.heads == 0 and record.ring[1] == SLOTS)),
        **{name: getattr(record, name) is None or name in policy.file_names() for name in ("previous", "chosen")},
    }


def _sliding_fits(record: Layer, record_past: bool) -> dict[str, bool]:
    shown = record.length if record.window == 1 else min(record.length, record.window - 1)
    recorded = record_past and record.record_past
    return {
        "record_past": record_past or not record.record_past,
        "kept": 0 < record.kept <= record.length if recorded else record.kept == shown,
    }


def check_reserved(cache: CacheState, file: Reader) -> None:
    """Check that a small file does not reserve much memory: only a configuration that the caller passes may."""
    config, size = cache.config, 0
    chosen = method_of(config).shared.reserves(config)
    for record in file.layers:
        if record.selects:
            token = record.heads * (record.key_dim + record.value_dim) * getattr(torch, record.dtype).itemsize
            size += record.batch * ((config.max_length or 0) * token + chosen * record.heads * 4)
    most = max(_RESERVED, _RESERVED_TIMES * file.nbytes)
    if size > most:
        raise ValueError(
            f"{file.path} reserves {readable(size)} (max_length={config.max_length}, {chosen} blocks or tokens chosen "
            f"a step), more than the {readable(most)} that a file of {readable(file.nbytes)} may ask for: pass config, "
            "with as much as you want reserved"
        )


def check_tensors(layer: FullLayer, record: Layer, rows: Rows, held: dict[str, Tensor], file: Reader) -> None:
    """Check that no id points outside its tensor: kernels would follow it."""
    store, policy = layer.store, layer.policy
    labels = policy.labels
    calibrates = labels is not None and record.channels is None
    index = {k: [dtype_name(v.dtype), list(v.shape[1:])] for k, v in kept_index(layer, calibrates).items()}
    # The tensors of a new cache are required; further ones must be known to this policy.
    kept, always = held.keys() - _STORED, policy.to_file((0,) * rows.batch).keys()
    if not keeps_queries(file):  # the predictor starts without queries
        always = always - {"queries", "queries_from"}
    fits = {
        "index": record.blocks == 0 or record.index == index,
        "channels": labels is None or calibrates or record.channels == labels.r,
        **{name: name in kept for name in always},
        **{name: name in policy.file_names() for name in kept - always},
    }
    if INDEX_KEYS in held:
        keys = held[INDEX_KEYS]
        fits[INDEX_KEYS] &= keys.is_floating_point() and keys.shape[:-1] == (record.batch, record.length)
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
    if "norms" in held:  # what is read from this cache's own channel file is not looked at
        fits["norms"] = labels is not None and are_norms(held["norms"])
    _refuse(file, layer.index, fits)


def _refuse(file: Reader, index: int, fits: dict[str, bool]) -> None:
    for name, fit in fits.items():
        if not fit:
            raise damaged(file.path, f"{name} in layer {index} does not fit the rest")


def refuse_rows(file: Reader, fits: dict[str, bool]) -> None:
    for name, fit in fits.items():
        if not fit:
            raise damaged(file.path, f"{name} of the rows does not fit the rest")


def _distinct(ids: Tensor) -> bool:
    """Whether no number but -1 occurs twice in a row."""
    ids = ids.sort(-1).values
    return not bool(((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)).any())


def names_each_block(table: np.ndarray, blocks: int) -> bool:
    """Each block has a row that names it, and rows that share it have it at the same place."""
    place = np.full(blocks, -1)
    row, column = (table >= 0).nonzero()
    place[table[row, column]] = column
    return bool((place >= 0).all() and (place[table[row, column]] == column).all())
