"""What a predictive step does beside its attention, part by part: captured, one layer after the other.

Metrics, microseconds a layer: push_us (the step's query into the ring), predict_us, score_us, select_us, pack_us
(newly chosen tokens into the packed buffer, read where their blocks live; pack_copied is their share of the chosen),
and attend_us, what a step's own attention takes. What runs beside the step is free as long as it is shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from ..attention.exact import AttentionSpec
from ..cache import SparseCache
from ..layer import SparseLayer
from ..ops.topk_select import token_select
from ..selection.predictive import PredictivePolicy

# Of the tokens chosen for consecutive steps, on the recorded small model: two thirds are the same (docs/accuracy.md).
COPIED = 1 / 3
SETS = 10  # layers: what they read does not stay in the L2 cache


def predictive_layers(cache: SparseCache) -> list[SparseLayer]:
    """Layers that choose for a predicted query and have done so."""
    return [
        layer for layer in cache.sparse_layers if isinstance(layer.policy, PredictivePolicy) and layer.policy.chosen
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


def parts(layers: list[SparseLayer], queries: list[Tensor], scale: float) -> dict[str, Callable[[int], None]]:
    """Each part alone, of layer ``i``; ``queries``: ``[batch, Hq, Dk]`` of each layer."""
    stores, policies = [layer.store for layer in layers], [layer.policy for layer in layers]
    column = [store.clock.at(store.device, store.length) for store in stores]
    spec = AttentionSpec(scale=scale)
    predicted = [p.predictor.predict(p.queries.held, p.queries.position, p.queries.count) for p in policies]
    scores = [policy.scores(q, store) for policy, q, store in zip(policies, predicted, stores)]
    budget = policies[0].config.token_budget

    def predict(i: int) -> None:
        held = policies[i].queries
        policies[i].predictor.predict(held.held, held.position, held.count)

    def select(i: int) -> None:
        token_select(scores[i], None, budget, stores[i].block_size, out=policies[i].ids[..., :budget])

    found = {
        "push": lambda i: policies[i].queries.push(queries[i][:, :, None], None, column[i]),
        "predict": predict,
        "score": lambda i: policies[i].scores(predicted[i], stores[i]),
        "select": select,
        "attend": lambda i: policies[i].attend(queries[i], stores[i], spec),
    }
    if all(policy.packed is not None for policy in policies):
        ids = [p.ids.clone() for p in policies]
        choices = [(a, partly_new(a, s.sealed, s.block_size, COPIED)) for a, s in zip(ids, stores)]
        turn = [0] * len(layers)

        def pack(i: int) -> None:
            turn[i] ^= 1
            policies[i].packed.update(choices[i][turn[i]], stores[i].pool.kv, stores[i].table)

        found["pack"] = pack
    return found


def measure_parts(cache: SparseCache, report) -> None:
    """Add the parts' figures to a report. What the cache holds is void afterwards."""
    from .operator_timing import captured  # needs Triton

    layers = predictive_layers(cache)[:SETS]
    if not layers:
        return
    with ExitStack() as stack:
        for layer in layers:  # the shapes of a captured step
            layer.store.fixed = True
            stack.callback(setattr, layer.store, "fixed", False)
        queries = [layer.policy.queries.held[:, :, 0].clone() for layer in layers]
        for name, run in parts(layers, queries, layers[0].store.key_dim ** -0.5).items():
            before = [layer.policy.packed.counters.clone() for layer in layers] if name == "pack" else []
            time = captured(run, len(layers))
            report.add(f"{name}_us", [time.low, time.median, time.high], "us")
            if before:
                needed, copied = sum((la.policy.packed.counters - b) for la, b in zip(layers, before)).tolist()
                report.add("pack_copied", copied / needed, "share")
