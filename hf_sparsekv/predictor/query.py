"""Predict the next step's query, so that its tokens can be chosen before it is there (AsyncSpade section 4.2)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

PREDICTOR, WINDOW, EPSILON = "last", 16, 1e-2

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


class QueryPredictor:
    """The newest query as it is."""

    name, slots = "last", 1

    def predict(self, ring: Tensor, position: Tensor, count: Tensor, out: Tensor | None = None) -> Tensor:
        """The next query ``[batch, Hq, D]`` from ``ring [batch, Hq, slots, D]``."""
        newest = (position + (ring.shape[2] - 1)) % ring.shape[2]
        found = ring.index_select(2, newest.long())[:, :, 0]
        return found if out is None else out.copy_(found)


class CustomPredictor:
    """A user's function ``(ring, position, count) -> [batch, Hq, D]``."""

    def __init__(self, function: Predict, window: int = WINDOW) -> None:
        self.function, self.slots = function, window + 1

    def predict(self, ring: Tensor, position: Tensor, count: Tensor, out: Tensor | None = None) -> Tensor:
        """As :meth:`QueryPredictor.predict`."""
        found = self.function(ring, position, count)
        return found if out is None else out.copy_(found)


def make_predictor(
    predictor: str | Predict = PREDICTOR, window: int = WINDOW, epsilon: float = EPSILON
) -> QueryPredictor | CustomPredictor:
    """A predictor by its name, or of a user's function."""
    if predictor == "last":
        return QueryPredictor()
    if not callable(predictor):
        raise ValueError(f"predictor must be 'last' or a function, got {predictor!r}")
    return CustomPredictor(predictor, window)
