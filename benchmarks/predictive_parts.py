"""What a predictive step does beside its attention, part by part: captured, one layer after the other.

Metrics, microseconds a layer: push_us (the step's query into the ring), predict_us, score_us, select_us, pack_us
(newly chosen tokens copied to where steps read them, from where their blocks live, with room for one selection;
pack_copied is their share of the chosen), and attend_us, what a step's own attention takes. What runs beside the step
is free as long as it is shorter.

Where a second GPU chooses, all but the attention is measured there, with transfer_us (the step's query, key and value,
read in the first GPU's memory and stored) in place of push_us. Packing writes that GPU's memory: pack_mb, 10^6 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from hf_sparsekv.cache import SparseCache
from hf_sparsekv.kv.store import LayerStore
from hf_sparsekv.layers.sparse_layer import SparseLayer
from hf_sparsekv.ops.selection.topk_select import token_select
from hf_sparsekv.policies.ahead.earlier_queries import EarlierQueriesPolicy
from hf_sparsekv.policies.ahead.layer_ahead import LayerAheadPolicy
from hf_sparsekv.policies.ahead.second_device.packed import Packed
from hf_sparsekv.policies.ahead.second_device.policy import SecondDevicePolicy
from hf_sparsekv.policies.device_tokens import DeviceTokens
from hf_sparsekv.types import AttentionParams

# Of the tokens chosen for consecutive steps, on the recorded small model: two thirds are the same
# (docs/studies/predicted-queries.md).
COPIED = 1 / 3
SETS = 10  # layers: what they read does not stay in the L2 cache


def predictive_layers(cache: SparseCache) -> list[SparseLayer]:
    """Layers that choose a fixed number of tokens for a predicted query and have done so."""
    return [
        layer
        for layer in (layer for layer in cache.sparse_layers if layer.policy.need is None)
        if (isinstance(layer.policy, EarlierQueriesPolicy | SecondDevicePolicy) and layer.policy.chosen)
        or (isinstance(layer.policy, LayerAheadPolicy) and layer.policy.plan(layer.store).attends == "chosen")
    ]


def partly_new(ids: Tensor, blocks: int, size: int, share: float) -> Tensor:
    """A selection like ``ids [batch, H, C]``, of which this share is other tokens of the first ``blocks`` blocks."""
    new = ids.clone()
    step = max(1, round(1 / share))
    at = torch.arange(0, ids.shape[-1], step, device=ids.device)
    # The next token, unless it is chosen as well: then the list still ascends, with one entry twice as likely kept.
    moved = new[..., at] + 1
    after = torch.nn.functional.pad(new, (0, 1), value=blocks * size)[..., at + 1]
    new[..., at] = torch.where((new[..., at] >= 0) & (moved < after), moved, new[..., at])
    return new


def seats(layers: list[SparseLayer]) -> tuple[list[LayerStore], list[EarlierQueriesPolicy]]:
    """Stores and policies of the layers, where tokens are chosen."""
    stores, policies = [layer.store for layer in layers], [layer.policy for layer in layers]
    if isinstance(policies[0], SecondDevicePolicy):
        return [store.replica for store in stores], [policy.replica for policy in policies]
    return stores, policies


def copies(layer: SparseLayer) -> DeviceTokens | Packed | None:
    """Where a layer has copies of its chosen tokens, if it has."""
    policy = layer.policy
    return policy.packs[policy.at] if isinstance(policy, SecondDevicePolicy) else policy.tokens


def parts(layers: list[SparseLayer], queries: list[Tensor], scale: float) -> dict[str, Callable[[int], None]]:
    """Each part alone, of layer ``i``; ``queries``: ``[batch, Hq, Dk]`` of each layer."""
    stores, policies = seats(layers)
    second = isinstance(layers[0].policy, SecondDevicePolicy)
    past = [store.held.on[store.device][:, 0] for store in stores]
    params = AttentionParams(scale=scale)
    by_layer = isinstance(policies[0], LayerAheadPolicy)  # predicting is the layer's own projection: no part of it here
    predicted = (
        queries
        if by_layer
        else [p.predictor.predict(p.queries.held, p.queries.position, p.queries.count) for p in policies]
    )
    scores = [policy.scores(q, store) for policy, q, store in zip(policies, predicted, stores)]
    budget = policies[0].config.budget
    plans = [layer.policy.plan(layer.store) for layer in layers]

    def predict(i: int) -> None:
        held = policies[i].queries
        policies[i].predictor.predict(held.held, held.position, held.count)

    def select(i: int) -> None:
        how = {"rows": stores[i].rows, "out": policies[i].ids[..., :budget]}
        token_select(scores[i], None, budget, stores[i].block_size, **how)

    def push(i: int) -> None:
        policies[i].queries.push(queries[i][:, :, None], None, past[i])

    def transfer(i: int) -> None:
        peer, store = layers[i].policy.peer, layers[i].store
        recent = store.recent_kv[:, :, :1]
        policies[i].queries.push(peer.reach("q", queries[i][:, :, None]), None, past[i])
        stores[i].append(*(peer.reach(*t) for t in zip("kv", recent.split((store.key_dim, store.value_dim), -1))), None)

    def attend(i: int) -> None:
        if by_layer:
            policies[i].foreseen = stores[i].length - 1  # chosen already
        layers[i].policy.attend(queries[i], layers[i].store, plans[i], params)

    found = {
        **({} if by_layer else {"transfer": transfer} if second else {"push": push}),
        **({} if by_layer else {"predict": predict}),
        "score": lambda i: policies[i].scores(predicted[i], stores[i]),
        "select": select,
        "attend": attend,
    }
    if all(copies(layer) is not None for layer in layers):
        ids = [p.ids.clone() for p in policies]
        choices = [(a, partly_new(a, s.full_blocks, s.block_size, COPIED)) for a, s in zip(ids, stores)]
        turn = [0] * len(layers)
        for policy, store in () if second else zip(policies, stores):
            policy.tokens = DeviceTokens(store, policy.ids.shape[-1], policy.tokens.enabled)

        def pack(i: int) -> None:
            turn[i] ^= 1
            if second:
                scratch = policies[i].memory(stores[i])[-1]
                copies(layers[i]).update(choices[i][turn[i]], stores[i].pool.kv, stores[i].table, scratch)
            else:
                copies(layers[i]).bring(choices[i][turn[i]], stores[i])

        found["pack"] = pack
    return found


def begin_step(store: LayerStore) -> None:
    """Begin a captured step of the rows of ``store``: what follows reads them on the device."""
    steps, table = store.step_rows, store.table_of_rows
    steps.load(store.held)
    steps.begin(None, store.block_size, table.recent)
    steps.held = None  # its token is never cached


def measure_parts(cache: SparseCache, report, asked: Sequence[Tensor]) -> None:
    """Add the parts' figures to a report. What the cache holds is void afterwards.

    ``asked``: the query of each sparse layer in the last captured step, ``[batch, Hq, Dk]``.
    """
    from hf_sparsekv.tuning.timing import captured  # needs Triton

    layers = predictive_layers(cache)[:SETS]
    if not layers:
        return
    home, (stores, policies) = layers[0].store, seats(layers)
    of_layers = [query for layer, query in zip(cache.sparse_layers, asked) if layer in layers]
    begin_step(home)
    for device in {home.device, stores[0].device}:
        torch.cuda.synchronize(device)
    with ExitStack() as stack:
        for store in (*(layer.store for layer in layers), *stores):  # the shapes of a captured step
            store.capturing = True
            stack.callback(setattr, store, "capturing", False)
        queries = [
            query if isinstance(policy, LayerAheadPolicy) else policy.queries.held[:, :, 0].clone().to(home.device)
            for query, policy in zip(of_layers, policies)
        ]
        for name, run in parts(layers, queries, home.key_dim**-0.5).items():
            before = [copies(layer).counters.clone() for layer in layers] if name == "pack" else []
            with torch.cuda.device(home.device if name == "attend" else stores[0].device):
                time = captured(run, len(layers))
            report.add(f"{name}_us", [time.low, time.median, time.high], "us")
            if before:
                needed, copied = sum((copies(la).counters - b) for la, b in zip(layers, before)).tolist()
                report.add("pack_copied", copied / needed, "share")
                chosen = int((policies[0].ids >= 0).sum())
                report.add("pack_mb", copied / needed * chosen * home.token_bytes / 1e6, "MB")
