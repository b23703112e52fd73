"""Pairs of true and expected queries, as far from each other as recorded on a real model.

The residual stream of random weights foresees nothing, so what a cache chooses for the query of the layer
before (``hf_sparsekv/attention/points.py``) would always be wrong. Here each replayed query gets an expected one beside
it: the query plus an error.

* The recording (``profiles/*-foreseen.json``) is of the small real model (docs/benchmarking.md), by layer and place of
  the residual stream. It holds the error's size, how it varies between steps and how long it lasts. It holds the
  overlap of the tokens that both queries choose, for several shares of them. It also holds how many of a step's tokens
  are still on the device if those of the latest selections are kept there.
* The error is a sum of processes as in :class:`.keys.Walk`, weighted so that it is remembered as recorded. It points
  anywhere. On the recorded model, errors and keys have directions in common, which are not known here. So its size is
  not the recorded one, but the size at which selections overlap as recorded.
* How much the true queries remember is tuned likewise: :mod:`.keys` matches blocks that are chosen by their bounds.
* All of it is tuned on keys and queries of another seed than those that are measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv import PredictiveConfig, TokenConfig
from hf_sparsekv.ops.selection.token_score.reference import unpack_digits
from hf_sparsekv.ops.storage.seal import quantise_labels, standardised
from hf_sparsekv.policies.label_index import default_channels
from hf_sparsekv.predictor.channels import ChannelStats

from .keys import MEMORY, PROFILES, SyntheticKV, blend
from .statistics import FRACTIONS, stored_blocks

PLACES = ("in", "mid", "in_delta")  # where the residual stream of the layer before is taken
SHARES = (Fraction(1, 128), Fraction(1, 64), Fraction(1, 32), *FRACTIONS)  # of the stored tokens, chosen in a step
FIRST = 2  # layers with little known beforehand
ROOMS = (1, 2, 4, 8, 16)  # selections that there is room for on the device
ERROR_LAGS = (1, 4, 16)  # steps between two errors whose directions are compared
# Tuning: another seed, heads and steps of it, steps between them, tokens that channels are calibrated on.
TUNED_SEED, TUNED_HEADS, TUNED_STEPS, APART, CALIBRATED = 1000, 8, 16, 4, 512
SIZES, HALVINGS = (0.01, 10.0), 9  # of errors, in sizes of the query: where the right one is looked for


def place_of(foresight: str) -> str:
    """``"layer:mid"`` -> ``"mid"``; ``"layer"`` is ``"layer:in"``."""
    return foresight.partition(":")[2] or "in"


def calibrate(config: TokenConfig | PredictiveConfig, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Label channels ``[H, r]`` as caches calibrate them on ``queries [Hq, n, D]`` and ``keys [H, n, D]``.

    With their centres and spreads ``[H, 2, r]``.
    """
    stats = ChannelStats()
    stats.update(queries[None].float(), keys[None].float(), None)
    channels = stats.ranking(config.label_channels or default_channels(keys.shape[-1]))[0].long()
    return channels, stats.norms()[0].gather(-1, channels[:, None].expand(-1, 2, -1))


class StoredIndex:
    """The index that a layer's stored tokens are chosen by, as caches keep it: their labels.

    Args:
        config: of two-level or predictive selection.
        channels, norms: of the labels, ``[H, r]`` and ``[H, 2, r]``, see :func:`calibrate`.
    """

    def __init__(self, config: TokenConfig | PredictiveConfig, channels: Tensor, norms: Tensor) -> None:
        self.config, self.channels, self.norms = config, channels, norms
        self.labels = torch.empty(0)
        self.blocks = 0

    def store(self, keys: Tensor, blocks: int) -> None:
        """The first ``blocks`` blocks of ``keys [H, n, D]`` are stored; those known before have not changed."""
        if blocks <= self.blocks:
            return
        size = self.config.block_size
        new = keys[:, self.blocks * size : blocks * size].float()
        new = new.gather(-1, self.channels[:, None].expand(-1, new.shape[1], -1))
        centre, spread = self.norms[:, None].unbind(2)
        codes, qparams = quantise_labels(standardised(new[None], self.norms[None])[0])
        new = unpack_digits(codes) * qparams[..., :1].float() + qparams[..., 1:].float()
        new = new * spread + centre
        self.labels = new if not self.blocks else torch.cat((self.labels, new), dim=1)
        self.blocks = blocks

    def scores(self, q: Tensor) -> Tensor:
        """Scores of the tokens for ``q [T, Hq, D]``: ``[T, H, tokens]``, those of sinks -inf."""
        group = q.float().unflatten(1, (len(self.channels), -1))
        at = self.channels[None, :, None].expand(*group.shape[:3], -1)
        each = torch.einsum("thgr,hnr->thgn", group.gather(-1, at), self.labels)
        scores = each.mean(2) if self.config.token_reduce == "mean" else each.amax(2)
        scores[..., : self.config.sinks] = -torch.inf
        return scores


def best(scores: Tensor, k: int) -> Tensor:
    """The ``k`` best of the last dimension, as bool."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(k, dim=-1).indices, True)


def overlap(scores: Tensor, others: Tensor, k: int) -> Tensor:
    """The share of the ``k`` best by ``scores`` that is among the ``k`` best by ``others``: ``[...]``."""
    return (best(scores, k) & best(others, k)).sum(-1) / k


class Foreseen:
    """A recording of expected and true queries; see ``profiles/*-foreseen.json``."""

    def __init__(self, name: str = "smollm2-135m") -> None:
        data = json.loads((PROFILES / f"{name}-foreseen.json").read_text())
        self.source: dict = data["source"]
        self.recorded: dict[str, list[float]] = data["recorded"]
        self.layers = len(next(iter(self.recorded.values())))

    def at(self, name: str, layer: int, layers: int) -> float:
        """One statistic of layer ``layer`` of ``layers``, interpolated between recorded layers.

        The first two, which little is known of beforehand, are the first two of any model.
        """
        where = float(layer)
        if layer >= FIRST:
            where = FIRST + (layer - FIRST) * (self.layers - 1 - FIRST) / max(1, layers - 1 - FIRST)
        return float(np.interp(where, range(self.layers), self.recorded[name]))

    def overlap(self, share: float, layer: int, layers: int, place: str | None = None, what: str = "") -> float:
        """Recorded overlap if ``share`` of the stored tokens is chosen, interpolated between shares.

        Beyond the recorded shares it is that of the nearest.

        Args:
            place: of expected and true selection; None: of the true selections of consecutive steps.
            what: another statistic of the same, such as ``":hit_8"``.
        """
        known = [math.log(float(f)) for f in SHARES]
        of = "step" if place is None else place
        values = [self.at(f"{of}:tokens:k={f}{what}", layer, layers) for f in SHARES]
        return float(np.interp(math.log(share), known, values))

    def hit_rate(self, room: float, share: float, layer: int, layers: int) -> float:
        """Recorded share of the tokens that a step's own query chooses that are held, interpolated as above.

        Args:
            room: for so many selections; beyond the recorded ones that of the nearest.
            share: of the stored tokens, that a step chooses.
        """
        values = [self.overlap(share, layer, layers, None, f":hit_{known}") for known in ROOMS]
        return float(np.interp(math.log(room), np.log(ROOMS), values))

    def memory(self, place: str, layer: int, layers: int) -> tuple[float, ...]:
        """Variance of the error's parts, which are remembered as :data:`.keys.MEMORY` says: adds up to 1."""
        wanted = np.array([self.at(f"{place}:error_{lag}", layer, layers) for lag in ERROR_LAGS])
        return remembered(tuple(wanted))


def remembered(wanted: tuple[float, ...]) -> tuple[float, ...]:
    """Non-negative weights of the parts of :data:`.keys.MEMORY`, whose sum has these correlations at the lags.

    It tries all combinations in steps of 5 %: four numbers need no solver.
    """
    grid = np.arange(21) / 20
    parts = np.stack(np.meshgrid(grid, grid, grid, indexing="ij"), axis=-1).reshape(-1, 3)
    parts = parts[parts.sum(-1) <= 1 + 1e-9]
    powers = np.array([[memory**lag for lag in ERROR_LAGS] for memory in MEMORY[:3]])
    weights = parts[np.abs(parts @ powers - np.asarray(wanted)).sum(-1).argmin()]
    return *(float(w) for w in weights), float(max(0.0, 1 - weights.sum()))


@dataclass(frozen=True)
class Selection:
    """How many tokens a cache chooses, and for which query.

    Args:
        chosen: tokens, of a row and KV head.
        place: where the residual stream of the layer before is taken, one of :data:`PLACES`; None: the step's own
            query chooses.
        config: the cache's.
    """

    chosen: int
    place: str | None
    config: TokenConfig | PredictiveConfig

    def stored(self, context: int) -> int:
        """Tokens that are chosen from."""
        return stored_blocks(self.config, context) * self.config.block_size

    def share(self, context: int) -> float:
        """The chosen share of the stored tokens; above 1 nothing needs to be chosen."""
        return self.chosen / max(1, self.stored(context))


@dataclass(frozen=True)
class Tuned:
    """One layer's replayed pairs.

    Args:
        weights: variance of the parts of its queries, see :class:`.keys.Walk`.
        error: size of the expected queries' error, in sizes of the query.
    """

    weights: tuple[float, ...]
    error: float


class Pairs:
    """True and expected queries of consecutive steps, for one cache.

    Keys and queries are those of ``made``, except for how much the queries remember. Their memory and the size of the
    error are tuned: the selections overlap as recorded, from step to step and within the pair.

    Args:
        made: gives the keys.
        selection: what the cache chooses.
        recording: what to imitate.
    """

    def __init__(self, made: SyntheticKV, selection: Selection, recording: Foreseen | None = None) -> None:
        self.made, self.selection = made, selection
        self.recording = Foreseen() if recording is None else recording

    @property
    def share(self) -> float:
        """The chosen share of the stored tokens, at most 1."""
        return min(1.0, self.selection.share(self.made.context))

    def recorded(self, layer: int, place: str | None) -> float:
        """A layer's recorded overlap for such a share of the stored tokens, see :meth:`Foreseen.overlap`."""
        return self.recording.overlap(self.share, layer, self.made.layers, place)

    def hit_rate(self, layer: int, room: float) -> float:
        """A layer's recorded hit rate with room for ``room`` selections, see :meth:`Foreseen.hit_rate`."""
        return self.recording.hit_rate(room, self.share, layer, self.made.layers)

    @cached_property
    def tuned(self) -> list[Tuned]:
        """Tuned parameters of each layer, found on keys and queries of another seed."""
        return [self._tune(layer) for layer in range(self.made.layers)]

    def queries(self, steps: int) -> Tensor:
        """Queries ``[steps, layers, batch, Hq, D]``."""
        return self.made.queries(steps, weights=[layer.weights for layer in self.tuned])

    def expected(self, queries: Tensor) -> Tensor | None:
        """Expected queries for ``queries [steps, layers, batch, Hq, D]``, of their shape and dtype; None: none are."""
        if self.selection.place is None:
            return None
        expected = torch.empty_like(queries)
        for layer, tuned in enumerate(self.tuned):
            for step, error in zip(range(len(queries)), self.errors(self.made, layer)):
                expected[step, layer] = queries[step, layer].float() + tuned.error * error
        return expected

    def errors(self, made: SyntheticKV, layer: int) -> Iterator[Tensor]:
        """Errors ``[batch, Hq, D]`` of consecutive steps, float32: as long as a query on average, 0 in channel 0."""
        recording, place = self.recording, self.selection.place
        spread = recording.at(f"{place}:error_spread", layer, made.layers)
        walk = made.walk(recording.memory(place, layer, made.layers), made.generator(layer, 3))
        sizes = made.generator(layer, 4)
        while True:
            error = walk.next()
            error[..., 0] = 0  # a bias, see keys.py
            drawn = torch.randn(error.shape[:2], device=error.device, generator=sizes)
            yield error * (spread * drawn).exp()[..., None]

    def _tune(self, layer: int) -> Tuned:
        selection, made = self.selection, self._other_seed()
        k, weights = selection.chosen, made.parameters(layer).weights
        if selection.stored(made.context) <= k:
            return Tuned(weights, 0.0)  # everything is chosen
        keys = made.keys_values(layer)[0][0]
        index = StoredIndex(
            selection.config, *calibrate(selection.config, made.prompt_queries(layer)[0], keys[:, :CALIBRATED])
        )
        index.store(keys, stored_blocks(selection.config, made.context))
        steps = TUNED_STEPS * APART

        def chosen(q: Tensor) -> Tensor:
            return best(index.scores(q), k)

        def shared(mine: Tensor, others: Tensor) -> float:
            return float((mine & others).sum(-1).div(k).mean())

        def walked(by: float) -> tuple[Tensor, Tensor]:
            """Some queries, and those of the steps after them."""
            q = torch.stack([q[0] for q in islice(made.steps(layer, blend(weights, by)), steps)])
            return q[::APART], q[1::APART]

        def remembered_too_little(by: float) -> bool:
            first, second = walked(by)
            return shared(chosen(second), chosen(first)) < self.recorded(layer, None)

        by = halve(remembered_too_little, -1.0, 1.0)
        if selection.place is None:
            return Tuned(blend(weights, by), 0.0)
        true = walked(by)[0]
        error = torch.stack([e[0] for e in islice(self.errors(made, layer), steps)])[::APART]
        mine, wanted = chosen(true), self.recorded(layer, selection.place)
        low, high = (math.log(size) for size in SIZES)
        size = halve(lambda size: shared(mine, chosen(true + math.exp(size) * error)) > wanted, low, high)
        return Tuned(blend(weights, by), math.exp(size))

    def _other_seed(self) -> SyntheticKV:
        """As ``made``, of another seed, one row, and no more heads than are needed."""
        made = self.made
        heads = min(TUNED_HEADS, made.heads)
        return SyntheticKV(
            made.layers,
            made.q_heads // made.heads * heads,
            heads,
            made.dim,
            1,
            made.context,
            config=made.config,
            profile=made.profile,
            seed=made.seed + TUNED_SEED,
            dtype=torch.float32,
            device=made.device,
        )


def halve(below: Callable[[float], bool], low: float, high: float) -> float:
    """Where ``below`` turns from True to False between ``low`` and ``high``; the nearer end if it does not."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2
