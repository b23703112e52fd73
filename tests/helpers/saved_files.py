"""Caches by way of files: what tests of them share."""

from __future__ import annotations

import json
import os

import torch
from models import model, prompt
from safetensors import safe_open
from safetensors.torch import save_file

from hf_sparsekv import SparseCache
from hf_sparsekv.layers.sparse_layer import SparseLayer

IDS = prompt(1, 130)["input_ids"]


@torch.no_grad()
def feed(cache, ids, mask=None, name="llama"):
    return model(name)(ids, attention_mask=mask, past_key_values=cache).logits


def steps(cache, n, name="llama", seed=4):
    """Logits of ``n`` given tokens, one at a time."""
    tokens = prompt(cache.layers[0].keys.shape[0], n, seed=seed)["input_ids"].split(1, dim=1)
    return torch.cat([feed(cache, token, name=name) for token in tokens], 1)


def saved(cache, tmp_path, **load):
    """The cache, by way of a file."""
    path = tmp_path / "context.safetensors"
    cache.save(path)
    assert os.listdir(tmp_path) == [path.name], "something was left beside the file"
    return SparseCache.load(path, **load)


def state(cache):
    """Everything that a cache knows, by value."""
    found = []
    for layer in cache.layers:
        if not isinstance(layer, SparseLayer):
            found.append((layer.keys, layer.values, layer.cumulative_length, layer.record_past))
            continue
        store, policy, fields = layer.store, layer.policy, layer.store.pool.fields
        rows, table = store.held, store.table
        # Behind a row's full blocks the table says nothing.
        at = torch.cat([table[row, :n] for row, n in enumerate(rows.sealed)]).long()
        host = (rows.columns, rows.lengths, rows.sealed, rows.valid is not None, store.heads, store.dtype, store.device)
        tensors = [store.recent_kv, store.rows, rows.valid_columns(store.device), store.pool.kv[at]]
        labels = policy.labels
        calibrating = labels is not None and labels.calibrating
        tensors += [fields[name][at] for name in sorted(fields) if not (calibrating and name in ("codes", "qparams"))]
        tensors.append(torch.zeros(0) if labels is None or calibrating else labels.channels)
        tensors.append(torch.zeros(0) if labels is None or labels.norms is None else labels.norms)
        tensors.append(policy.ids if getattr(policy, "chosen", False) else torch.zeros(0))
        if calibrating:
            stats = labels.stats
            held = (stats.q, stats.moments.seen, stats.moments.centre, stats.moments.squares)
            tensors += [torch.zeros(0) if one is None else one for one in held]
            host += (labels.stats.tokens,)
        found.append((host, *tensors))
    return found


def same(a, b):
    for mine, theirs in zip(a, b, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            if isinstance(x, torch.Tensor):
                assert x.dtype == y.dtype and x.shape == y.shape
                assert torch.equal(x.nan_to_num(), y.nan_to_num())
            else:
                assert x == y


def rewrite(path, to, tensors=lambda held: None, metadata=lambda held: None, state=lambda held: None, **layer):
    """The file with changes; ``layer`` changes the first layer's entry."""
    with safe_open(path, "pt") as file:
        held, meta = {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    about = json.loads(meta["state"])
    about["layers"][0] |= layer
    state(about)
    meta["state"] = json.dumps(about)
    tensors(held)
    metadata(meta)
    save_file(held, to, metadata=meta)
    return to
