"""Selections for the queries that the layers before expect, compared with those of the steps' own queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv.cache import SparseCache
from hf_sparsekv.layers.sparse_layer import SparseLayer
from hf_sparsekv.ops.selection.topk_select import token_select
from hf_sparsekv.policies.ahead.layer_ahead import LayerAheadPolicy
from hf_sparsekv.policies.token_policy import TokenPolicy
from hf_sparsekv_config.labels import FIXED
from hf_sparsekv_config.sparse import SparseConfig

from .report import Report
from .synthetic.foreseen import ROOMS, Pairs, Selection, place_of
from .synthetic.replay import ReplayedQueries

SAMPLED = 8  # steps
SLACK = 0.25  # selections that there may be room for less than the smallest recorded one


def selection_of(cache: SparseCache) -> Selection | None:
    """A cache's selection for queries that the layer before expects, or its copies to the device after a step.

    None if it does neither: its own query chooses, by bounds or from what is on the device.
    """
    config = cache.config
    for policy in (layer.policy for layer in cache.sparse_layers):
        if isinstance(policy, LayerAheadPolicy):
            return Selection(nominal(config), place_of(cache.foresight), config)
        if isinstance(policy, TokenPolicy) and policy.need is None and policy.fetches:
            return Selection(config.budget, None, config)
    return None


def nominal(config: SparseConfig) -> int:
    """Tokens that what is replayed is like recorded ones in; where they are chosen by need, as many as usual."""
    return config.budget or FIXED


def chosen_ids(layer: SparseLayer, q: Tensor) -> Tensor:
    """The tokens that a layer chooses for ``q [batch, Hq, Dk]``, ``[batch, H, n]``: -1 for none."""
    policy, store = layer.policy, layer.store
    return token_select(policy.labels.scores(q, store), None, nominal(policy.config), store.block_size)


def shared(ids: Tensor, others: Tensor) -> float:
    """The share of ``ids [..., n]`` that is among ``others``; -1 is none."""
    size = max(int(ids.max()), int(others.max())) + 2
    masks = [torch.zeros(*x.shape[:-1], size, dtype=torch.bool, device=x.device) for x in (ids, others)]
    for mask, x in zip(masks, (ids, others)):
        mask.scatter_(-1, x.long() + 1, True)  # none: the first
        mask[..., 0] = False
    return float((masks[0] & masks[1]).sum() / masks[0].sum().clamp_min(1))


@dataclass(frozen=True)
class Foresight:
    """Statistics of replayed queries: achieved or recorded, averaged over layers, steps, rows and heads.

    Args:
        step_overlap: share of what the step's own query chooses that the step before chose.
        overlap: share of it that is chosen for the expected query, too; None where nothing is expected.
        cosine: of both queries.
        hit_rate, missed: recorded only, where the device holds copies of chosen tokens, with so much room. Share of the
            tokens of a step's own query that are held, and bytes a step of the others.
    """

    step_overlap: float
    overlap: float | None = None
    cosine: float | None = None
    hit_rate: float | None = None
    missed: float | None = None


def choosing(cache: SparseCache, selection: Selection) -> list[tuple[int, SparseLayer]]:
    """Layers that choose so in their next step, with their place among the sparse layers."""
    found = []
    for at, layer in enumerate(cache.sparse_layers):
        if layer.store is not None:
            plan = layer.policy.plan(layer.store)
            if plan.foresees or (selection.place is None and plan.attends in ("chosen", "every")):
                found.append((at, layer))
    return found


@torch.no_grad()
def achieved(cache: SparseCache, replayed: ReplayedQueries, selection: Selection) -> Foresight | None:
    """Over the cache as it is, for some of the steps; None if no layer chooses. Changes nothing."""
    found: list[list[float]] = []
    last = len(replayed.sequence) - 1
    for at, layer in choosing(cache, selection):
        for step in {round(i * last / SAMPLED) for i in range(1, SAMPLED + 1)}:
            own = replayed.sequence[step, at]
            mine = chosen_ids(layer, own)
            one = [shared(mine, chosen_ids(layer, replayed.sequence[max(0, step - 1), at]))]
            if replayed.expected is not None:
                expected = replayed.expected[step, at]
                cosine = torch.nn.functional.cosine_similarity(own[..., 1:].float(), expected[..., 1:].float(), dim=-1)
                one += [shared(mine, chosen_ids(layer, expected)), float(cosine.mean())]
            found.append(one)
    return Foresight(*np.mean(found, axis=0).tolist()) if found else None


def recorded(cache: SparseCache, pairs: Pairs) -> Foresight:
    """The recorded statistics for these layers, such a share of tokens, and so much room for copies of them."""
    place, layers = pairs.selection.place, choosing(cache, pairs.selection)

    def mean(of: str | None) -> float:
        return float(np.mean([pairs.recorded(at, of) for at, _ in layers]))

    found = Foresight(mean(None))
    if place is not None:
        cosine = float(np.mean([pairs.recording.at(f"{place}:cosine", at, pairs.made.layers) for at, _ in layers]))
        found = replace(found, overlap=mean(place), cosine=cosine)
    held = [(at, layer.policy.tokens) for at, layer in layers if layer.policy.tokens is not None]
    rooms = [tokens.room / pairs.selection.chosen for _, tokens in held]
    if len(held) < len(layers) or min(rooms) < ROOMS[0] - SLACK:
        return found
    rates = [pairs.hit_rate(at, room) for (at, _), room in zip(held, rooms)]
    missed = [
        (1 - rate) * pairs.selection.chosen * tokens.now.numel() * tokens.kv[0, 0].nbytes
        for rate, (_, tokens) in zip(rates, held)
    ]
    return replace(found, hit_rate=float(np.mean(rates)), missed=sum(missed))


def add_to(report: Report, cache: SparseCache, replayed: ReplayedQueries, pairs: Pairs) -> None:
    """Rows of what was achieved, and beside each what was recorded."""
    now = achieved(cache, replayed, pairs.selection)
    if now is None:
        report.note("no layer chose by what was expected")
        return
    wanted = recorded(cache, pairs)
    missed = None if wanted.missed is None else wanted.missed / 1e6
    for metric, mine, theirs, unit in (
        ("foreseen_overlap", now.overlap, wanted.overlap, "share"),
        ("foreseen_cosine", now.cosine, wanted.cosine, "share"),
        ("overlap_1", now.step_overlap, wanted.step_overlap, "share"),
        ("hit_rate", None, wanted.hit_rate, "share"),
        ("missed_mb", None, missed, "MB"),
    ):
        for name, value in ((metric, mine), (f"{metric}:recorded", theirs)):
            if value is not None:
                report.add(name, value, unit)
