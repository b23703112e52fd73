"""Decode with given queries instead of the model's own: a benchmark of random weights with realistic selections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_sparsekv.cache import SparseCache


class ReplayedQueries:
    """Queries of consecutive steps, given to the layers of a cache through buffers at fixed addresses.

        replayed = ReplayedQueries(synthetic.queries(200))
        replayed.install(cache)
        model.generate(..., past_key_values=cache, stopping_criteria=[replayed])
        replayed.remove()

    A captured step reads the buffers like any other, so the same graph serves all steps; install before the first step
    is captured. As a stopping criterion it moves on after each token and never stops anything; in a loop of one's own
    call :meth:`next` between the steps.

    A cache may let the layer before expect a query. The query from the residual stream of random weights is computed,
    as ever, and replaced by the ``expected`` one.

    Args:
        sequence: ``[steps, layers, batch, Hq, D]``, the model's dtype, on its device; one entry for each sparse layer.
        expected: what the layers before expect of them, the same shape; None: what the model's own stream gives.
    """

    def __init__(self, sequence: Tensor, expected: Tensor | None = None) -> None:
        if sequence.ndim != 5 or not len(sequence):
            raise ValueError(f"queries must be [steps, layers, batch, Hq, D], got {tuple(sequence.shape)}")
        if expected is not None and expected.shape != sequence.shape:
            raise ValueError(
                f"expected queries must be as many as the queries, {tuple(sequence.shape)}, got {tuple(expected.shape)}"
            )
        self.sequence, self.expected = sequence, expected
        self.buffer = sequence[0].clone()
        self.expected_buffer = None if expected is None else expected[0].clone()
        self.step = 0  # whose queries the buffer holds
        self._cache: SparseCache | None = None

    def next(self) -> None:
        """Put the next step's queries into the buffer: one copy, outside of any captured graph.

        After the last step the sequence runs backwards, and so on: that keeps consecutive steps alike.
        """
        self.step += 1
        turn = max(1, 2 * (len(self.sequence) - 1))
        at = self.step % turn
        at = min(at, turn - at) if len(self.sequence) > 1 else 0
        self.buffer.copy_(self.sequence[at])
        if self.expected is not None:
            self.expected_buffer.copy_(self.expected[at])

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        """As one of ``generate()``'s stopping criteria."""
        self.next()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def install(self, cache: SparseCache) -> None:
        """From now on steps of one token attend with these queries, in every sparse layer of ``cache``.

        Raises:
            ValueError: the cache has another number of layers or rows, or has queries installed already.
        """
        layers = cache.sparse_layers
        if len(layers) != self.buffer.shape[0]:
            raise ValueError(f"queries for {self.buffer.shape[0]} layers, the cache has {len(layers)} sparse ones")
        if any("attend" in vars(layer) for layer in layers):
            raise ValueError("this cache has replayed queries already: remove() them first")
        for layer, held in zip(layers, self.buffer):
            layer.attend = self._attend(layer, held[:, :, None])
        if self.expected is not None:
            for layer, held in zip(layers, self.expected_buffer):
                layer.foresee = self._foresee(layer, held)
        self._cache = cache

    @staticmethod
    def _attend(layer, held: Tensor):
        own = type(layer).attend

        def attend(step, query, mask, params, dropout=0.0):
            if query.shape[2] == 1 and step.past:
                query = _instead(query, held)
            return own(layer, step, query, mask, params, dropout)

        return attend

    @staticmethod
    def _foresee(layer, held: Tensor):
        own = type(layer).foresee

        def foresee(expected, stream):
            def instead():  # computed where and when it always is
                query, params = expected()
                return _instead(query, held), params

            own(layer, instead, stream)

        return foresee

    def remove(self) -> None:
        """Let the layers use the model's own queries again. Graphs captured meanwhile still read the buffers."""
        if self._cache is not None:
            for layer in self._cache.sparse_layers:
                vars(layer).pop("attend", None)
                vars(layer).pop("foresee", None)
            self._cache = None


def _instead(query: Tensor, held: Tensor) -> Tensor:
    """``held`` in place of the model's own query."""
    if query.shape != held.shape or query.dtype != held.dtype:
        raise ValueError(
            f"replayed queries are {tuple(held.shape)} {held.dtype}, the model's {tuple(query.shape)} {query.dtype}"
        )
    return held
