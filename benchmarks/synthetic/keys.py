"""Keys, values and queries of any shape whose selections behave as those recorded on a real model.

With random keys and queries consecutive steps select almost unrelated blocks, and no block stands out. Here, per layer:

* a block's keys are its topic (a random vector) plus noise of each token's own. The noise's width differs a little
  between blocks, which moves the bound on a block's score without moving the score;
* a query is a sum of four parts of unit variance: one that never changes, a slow and a fast AR(1) process, and one that
  is new at every step. Half of their variance is shared by the query heads of a KV head;
* channel 0 is a bias: 1 in effect in every query, 0 in every key but those of the sinks, which take the mass that is
  not in stored blocks.

Strength of topics, noise and widths, and the weights of the four parts, were fitted for each recorded layer
(docs/benchmarking.md). They are kept in the profile, so nothing is fitted here. Three statistics match, as closely as
docs/benchmarking.md says: the overlap of block selections, the mass that these cover, and the number of blocks for 95 %
of the mass. The overlap is for an eighth of the blocks at lags 1, 2, 4, 8 and 16, and for a sixteenth and a quarter at
lag 1. Statistics are carried to other contexts as *fractions* of the stored blocks, never as counts: 128 of 2048 blocks
behave as 7 of 109. A layer between recorded ones (36 layers from 30) gets interpolated parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv import TokenConfig
from hf_sparsekv_config.sparse import SparseConfig

from .statistics import stored_blocks

PROFILES = Path(__file__).parent / "profiles"
MEMORY = (1.0, 0.94, 0.6, 0.0)  # AR(1) coefficients of a query's parts, a step
SHARED = 0.5  # variance that the query heads of a group have in common
LEAD = 64  # queries before the first step, as of the prompt's end
PIECE = 1 << 24  # entries of the keys that are made at once


@dataclass(frozen=True)
class LayerParameters:
    """How one layer's keys and queries are made.

    Args:
        topic, noise: standard deviation that topics and token noise give to the logits.
        width: spread of the noise's width between blocks, in logits of the bound.
        static, slow, fast: variance of the queries' parts; what is left to 1 is new at every step.
        offset: logarithm of the typical mean of ``exp(logit)`` over stored tokens; the sinks' logit follows from it.
        rest: attention mass outside the stored blocks.
    """

    topic: float
    noise: float
    width: float
    static: float
    slow: float
    fast: float
    offset: float = 0.0
    rest: float = 0.5

    @property
    def weights(self) -> tuple[float, float, float, float]:
        """Variance of the four parts, slowest first."""
        return self.static, self.slow, self.fast, max(0.0, 1 - self.static - self.slow - self.fast)

    def flatter(self, spread: float) -> LayerParameters:
        """The same layer with the deviations of its logits from their mean times ``spread``."""
        # The mean of exp(logit) of normal logits follows from their variance.
        return replace(
            self,
            topic=self.topic * spread,
            noise=self.noise * spread,
            width=self.width * spread,
            offset=self.offset * spread**2,
        )


def blend(weights: tuple[float, ...], by: float) -> tuple[float, ...]:
    """Weights that remember more (``by`` to 1: nothing ever changes) or less (to -1: every step is new)."""
    end = (1.0, 0.0, 0.0, 0.0) if by > 0 else (0.0, 0.0, 0.0, 1.0)
    return tuple((1 - abs(by)) * w + abs(by) * e for w, e in zip(weights, end))


class Profile:
    """Recorded and fitted statistics of a model's layers; see ``profiles/*.json``.

    Args:
        name: of the recorded model.
        spread: times the recorded spread of logits. Less than 1 is flatter attention: the same mass takes more tokens.
    """

    def __init__(self, name: str = "smollm2-135m", spread: float = 1.0) -> None:
        self.spread = spread
        data = json.loads((PROFILES / f"{name}.json").read_text())
        self.source: dict = data["source"]
        self.recorded: dict[str, list[float]] = data["recorded"]
        self.fitted: dict[str, list[float]] = data.get("fitted", {})
        self.layers = len(next(iter(self.recorded.values())))

    def at(self, values: list, layer: int, layers: int) -> np.ndarray:
        """``values`` of layer ``layer`` of ``layers``, interpolated between recorded layers."""
        where = layer * (self.layers - 1) / max(1, layers - 1)
        low = min(int(where), self.layers - 1)
        high = min(low + 1, self.layers - 1)
        a, b = np.asarray(values[low], dtype=float), np.asarray(values[high], dtype=float)
        return a + (where - low) * (b - a)

    def parameters(self, layer: int, layers: int) -> LayerParameters:
        """Parameters of layer ``layer`` in a model of ``layers``."""
        found = {f.name: float(self.at(self.fitted[f.name], layer, layers)) for f in fields(LayerParameters)}
        return LayerParameters(**found).flatter(self.spread)

    def targets(self, layer: int, layers: int) -> dict[str, float]:
        """Recorded statistics by name, averaged over KV heads."""
        return {name: float(self.at(values, layer, layers)) for name, values in self.recorded.items()}


class SyntheticKV:
    """Keys, values and queries of a model's layers. The same arguments on the same device give the same tensors.

    Args:
        layers, q_heads, heads, dim: the model's shape; ``dim`` of keys and values.
        batch, context: rows, and tokens that are cached before the first step.
        config: its blocks, sinks and window; where topics begin and end, and what counts as stored.
        profile: what to imitate, or its name.
    """

    def __init__(
        self,
        layers: int,
        q_heads: int,
        heads: int,
        dim: int,
        batch: int,
        context: int,
        *,
        config: SparseConfig | None = None,
        profile: Profile | str = "smollm2-135m",
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self.q_heads, self.heads, self.dim = layers, q_heads, heads, dim
        self.batch, self.context = batch, context
        self.config = TokenConfig() if config is None else config
        self.profile = Profile(profile) if isinstance(profile, str) else profile
        self.seed, self.dtype, self.device = seed, dtype, torch.device(device)

    def generator(self, layer: int, what: int) -> torch.Generator:
        """Random numbers of a layer: 0 for its keys, 1 values, 2 queries; others for what is made beside them."""
        return torch.Generator(self.device).manual_seed((self.seed * 1_000_003 + layer) * 8 + what)

    def parameters(self, layer: int) -> LayerParameters:
        """How layer ``layer`` is made."""
        return self.profile.parameters(layer, self.layers)

    # ------------------------------------------------------------------ keys and values

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[batch, H, context, D]`` each; the temporaries stay below some 200 MB."""
        shape = (self.batch, self.heads, self.context, self.dim)
        k = torch.empty(shape, dtype=self.dtype, device=self.device)
        v = torch.empty_like(k)
        make_keys(k, self.parameters(layer), self.config, self.generator(layer, 0))
        generator = self.generator(layer, 1)
        for part in v.split(self._tokens_at_once(), dim=2):
            part.normal_(generator=generator)
        return k, v

    def _tokens_at_once(self) -> int:
        return max(1, PIECE // (self.batch * self.heads * self.dim))

    # ------------------------------------------------------------------ queries

    def queries(
        self,
        steps: int,
        *,
        weights: list[tuple[float, ...]] | None = None,
    ) -> Tensor:
        """Queries ``[steps, layers, batch, Hq, D]`` of consecutive decode steps.

        Args:
            steps: more steps continue fewer ones.
            weights: variance of the queries' parts in each layer; None: as recorded.
        """
        shape = (steps, self.layers, self.batch, self.q_heads, self.dim)
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        for layer in range(self.layers):
            mine = self.steps(layer, None if weights is None else weights[layer])
            for step, q in enumerate(islice(mine, steps)):
                out[step, layer] = q
        return out

    def walk(self, weights: tuple[float, ...], generator: torch.Generator) -> Walk:
        """Vectors like queries ``[batch, Hq, D]``, step after step."""
        return Walk(self.batch, self.q_heads, self.heads, self.dim, weights, generator)

    def steps(self, layer: int, weights: tuple[float, ...] | None = None) -> Iterator[Tensor]:
        """One layer's queries ``[batch, Hq, D]`` of consecutive decode steps, float32.

        ``weights``: variance of the queries' parts; default: as recorded.
        """
        weights = self.parameters(layer).weights if weights is None else weights
        walk = self.walk(weights, self.generator(layer, 2))
        for _ in range(LEAD):
            walk.next()
        while True:
            yield walk.next()

    def prompt_queries(self, layer: int) -> Tensor:
        """The last queries of the prompt, ``[batch, Hq, LEAD, D]``, as recorded: what channels are calibrated on."""
        walk = self.walk(self.parameters(layer).weights, self.generator(layer, 2))
        return torch.stack([walk.next() for _ in range(LEAD)], dim=2).to(self.dtype)


def make_keys(k: Tensor, p: LayerParameters, config: SparseConfig, generator: torch.Generator) -> None:
    """Fill ``k [batch, H, context, D]``."""
    batch, heads, context, dim = k.shape
    size = config.block_size
    at_once = max(1, PIECE // (batch * heads * size * dim)) * size
    for start in range(0, context, at_once):
        part = k[:, :, start : start + at_once]
        blocks = -(-part.shape[2] // size)

        def draw(*shape: int) -> Tensor:
            return torch.randn(batch, heads, *shape, device=k.device, generator=generator)

        topics, widths = draw(blocks, 1, dim), draw(blocks, 1, 1)
        # A bound adds up the widths of all channels, a score their random sum: so little spread does so much.
        noise = p.noise * torch.exp(p.width / max(p.noise, 1e-3) / BOUND_WIDTH / dim**0.5 * widths)
        keys = draw(blocks, size, dim).mul_(noise).add_(topics, alpha=p.topic)
        part.copy_(keys.flatten(2, 3)[:, :, : part.shape[2]])
    k[..., 0] = 0
    set_sinks(k, p, config)


def set_sinks(k: Tensor, p: LayerParameters, config: SparseConfig, context: int | None = None) -> None:
    """Give the sinks of ``k [..., n, D]`` keys that take ``p.rest`` of the attention to ``context`` tokens (n)."""
    context = k.shape[-2] if context is None else context
    if not (config.sinks and context):
        return
    stored = stored_blocks(config, context) * config.block_size
    rest = min(max(p.rest, 1e-6), 1 - 1e-6)
    mass = rest / (1 - rest) * stored - (context - stored)  # of the sinks, in average stored tokens
    k[..., : config.sinks, :] = 0
    k[..., : config.sinks, 0] = p.offset + math.log(max(mass, 1e-3) / config.sinks)


BOUND_WIDTH = 2.37 * 0.8  # mean largest of 64 normal numbers, times the mean magnitude of a query's channel


class Walk:
    """Queries ``[batch, Hq, D]`` of one layer, step after step."""

    def __init__(
        self, batch: int, q_heads: int, heads: int, dim: int, weights: tuple[float, ...], generator: torch.Generator
    ) -> None:
        self.shape = (len(MEMORY), batch, heads, q_heads // heads, dim)
        self.generator = generator
        device = generator.device
        self.memory = torch.tensor(MEMORY, device=device).view(-1, 1, 1, 1, 1)
        self.renewal = (1 - self.memory**2).sqrt()
        self.weight = torch.tensor(weights, device=device).view(-1, 1, 1, 1, 1).sqrt()
        self.parts = self._draw()

    def _draw(self) -> Tensor:
        """Standard normal ``[parts, batch, H, G, D]``, correlated within the group."""
        parts, batch, heads, group, dim = self.shape
        drawn = torch.randn(parts, batch, heads, group + 1, dim, device=self.memory.device, generator=self.generator)
        return SHARED**0.5 * drawn[:, :, :, :1] + (1 - SHARED) ** 0.5 * drawn[:, :, :, 1:]

    def next(self) -> Tensor:
        """The next step's query, float32."""
        self.parts = self.memory * self.parts + self.renewal * self._draw()
        q = (self.weight * self.parts).sum(0)
        q[..., 0] = self.shape[-1] ** 0.5  # with the softmax scale D ** -0.5: key channel 0 is added to the logit
        return q.flatten(1, 2)
