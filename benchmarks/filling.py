"""Caches that hold a long context without a prefill: the keys and values of every layer are put there directly.

The time of a step does not depend on where its keys and values come from while all of them are on the device. Where it
does (blocks in host memory that are used again), ``replayed`` imitates keys and queries recorded on a real model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from hf_sparsekv.layers.sparse_layer import SparseLayer
from hf_sparsekv_config.sparse import SparseConfig

from .shapes import cached_token, head_dim, latent_dims, query_dim, text_config, windows

if TYPE_CHECKING:
    from .synthetic.foreseen import Pairs
    from .synthetic.replay import ReplayedQueries

CALIBRATION = 512  # tokens that the label channels are made from
LATEST = 33  # queries that a predictor may look at
SHOWN_STEPS = 32  # steps whose achieved statistics are printed
STEPS = 256  # replayed queries; after the last one they run backwards


class Source(Protocol):
    """Makes what a cache is filled with; the same for every cache."""

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Key and value ``[batch, H, context, D]``, and queries ``[batch, Hq, n, D]``, ``n`` <= context."""
        ...

    def start(self, cache) -> Callable[[], None]:
        """The cache is full: what comes next. Gives what to call after each decode step."""
        ...


class RandomSource:
    """Normal keys, values and queries (or latents, and absorbed queries); decode steps use the model's own queries."""

    def __init__(self, model, batch: int, context: int, seed: int = 0) -> None:
        self.config, self.device, self.dtype = text_config(model), model.device, model.dtype
        self.batch, self.context, self.seed = batch, context, seed

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(1000 * self.seed + index)
        heads, key_dim, value_dim = cached_token(self.config)

        def normal(n_heads: int, n: int, dim: int) -> Tensor:
            shape = (self.batch, n_heads, n, dim)
            return torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator)

        key, value = normal(heads, self.context, key_dim), normal(heads, self.context, value_dim)
        queries = normal(self.config.num_attention_heads, min(CALIBRATION, self.context), query_dim(self.config))
        return key, value, queries

    def start(self, cache) -> Callable[[], None]:
        return lambda: None


class ReplayedSource(RandomSource):
    """Full-attention layers of keys and queries that imitate recorded ones; sliding layers as above.

    Their statistics in three layers are printed beside the recorded values, once for each shape. Where a cache chooses
    for the query that the layer before expects, the expected query is as far from the true one as recorded.

    Attributes:
        replayed, pairs: of the cache that was started last; None if it needs none.
    """

    _shown: ClassVar[set[tuple]] = set()

    def __init__(self, model, batch: int, context: int, seed: int = 0, show: bool = True, spread: float = 1.0) -> None:
        from .synthetic.keys import Profile, SyntheticKV

        super().__init__(model, batch, context, seed)
        self.replayed: ReplayedQueries | None = None
        self.pairs: Pairs | None = None
        self.show, config = show, self.config
        if latent_dims(config):
            raise ValueError("no keys and queries were recorded on a model that caches latents: use --kv random")
        self.full = [index for index, window in enumerate(windows(config)) if window is None]
        heads, dim = (config.num_attention_heads, config.num_key_value_heads), head_dim(config)
        kind = {"seed": seed, "dtype": self.dtype, "device": self.device, "profile": Profile(spread=spread)}
        self.made = SyntheticKV(len(self.full), *heads, dim, batch, context, **kind)

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if index not in self.full:
            return super().layer(index)
        at = self.full.index(index)
        query = self.made.prompt_queries(at)
        # Channels are fixed after so many queries, and steps are dense until then.
        n = min(CALIBRATION, self.context)
        return *self.made.keys_values(at), query.repeat(1, 1, -(-n // query.shape[2]), 1)[:, :, -n:]

    def start(self, cache) -> Callable[[], None]:
        self.replayed = self.pairs = None
        if not getattr(cache, "sparse_layers", None):  # dense attention costs the same whatever is asked
            return lambda: None
        pairs = self._pairs(cache)
        queries = self.made.queries(STEPS) if pairs is None else pairs.queries(STEPS)
        if self.show and pairs is None:
            self._show(queries, cache.config)
        return self.replay(cache, queries, pairs)

    def replay(self, cache, queries: Tensor, pairs: Pairs | None = None) -> Callable[[], None]:
        """Give a cache ``queries [steps, layers, batch, Hq, D]`` of its own; what to call after each step.

        And expected ones beside them, if the cache chooses for such.
        """
        from .synthetic.replay import ReplayedQueries

        self.pairs = self._pairs(cache) if pairs is None else pairs
        self.replayed = ReplayedQueries(queries, None if self.pairs is None else self.pairs.expected(queries))
        self.replayed.install(cache)
        return self.replayed.next

    def _pairs(self, cache) -> Pairs | None:
        """Pairs of true and expected queries, for a cache that chooses for expected ones."""
        from .foresight import selection_of
        from .synthetic.foreseen import Pairs

        selection = selection_of(cache)
        return None if selection is None else Pairs(self.made, selection)

    def _show(self, queries: Tensor, config: SparseConfig) -> None:
        from .synthetic.achieved import achieved

        n = len(self.full)
        shape = (n, self.context, *queries.shape[2:], config.block_size, self.made.profile.spread)
        if shape in self._shown:
            return
        self._shown.add(shape)

        def keys(layer: int) -> Tensor:
            return self.made.keys_values(layer)[0][:1].float().cpu()

        few = queries[:SHOWN_STEPS].float().cpu()
        targets = partial(self.made.profile.targets, layers=n)
        achieved(keys, few, config, layers=sorted({0, n // 2, n - 1}), steps=SHOWN_STEPS, targets=targets)


def make_source(kind: str, model, batch: int, context: int, seed: int = 0) -> RandomSource:
    """Keys and queries ``random``, ``replayed``, or ``replayed:SPREAD`` (:meth:`.synthetic.keys.Profile`)."""
    name, _, spread = kind.partition(":")
    if name == "random":
        return RandomSource(model, batch, context, seed)
    return ReplayedSource(model, batch, context, seed, spread=float(spread or 1))


@torch.no_grad()
def fill_cache(model, cache, batch: int, context: int, how: str = "random") -> Callable[[], None]:
    """Put ``context`` tokens per row into an empty cache of transformers' or of ours.

    Args:
        model: gives shapes, dtype and device.
        cache: made for ``model.config``.
        how: as in :func:`make_source`.

    Returns:
        A function to call after each decode step.

    Raises:
        ValueError: the model has layers that hold something other than keys and values.
    """
    windows(text_config(model))
    source: Source = make_source(how, model, batch, context)
    fill_layers(source, cache)
    return source.start(cache)


@torch.no_grad()
def fill_layers(source: Source, cache) -> None:
    """The keys and values of ``source`` into an empty cache: one layer on the device at a time."""
    ours = any(isinstance(layer, SparseLayer) for layer in cache.layers)
    for index, layer in enumerate(cache.layers):
        key, value, query = source.layer(index)
        if isinstance(layer, SparseLayer):
            n = min(CALIBRATION, key.shape[2])
            layer.fill(query, key[:, :, :n], value[:, :, :n])
            if n < key.shape[2]:
                layer.fill(query[:, :, -LATEST:], key[:, :, n:], value[:, :, n:])
        elif ours:
            layer.update(key, value)  # past the cache, which watches over whole forward passes
        else:
            cache.update(key, value, index)
