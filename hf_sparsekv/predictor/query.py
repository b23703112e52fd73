"""Predict the next step's query, so that its tokens can be chosen before it is there (AsyncSpade section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from hf_sparsekv_config.options import alternatives, check, check_value
from hf_sparsekv_config.predictive import EPSILON, PREDICTOR, WINDOW, EarlierQueries, Epsilon, Window

from ..ops.selection.query_predict import query_predict

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A user's predictor: ``(ring, position, count) -> prediction``, see ``QueryPredictor.predict()``."""

# By name: whether all windows are averaged, and whether their weights are normalised by a softmax.
_FORMS = {
    "ridge": (False, False),
    "ridge_softmax": (False, True),
    "assembled": (True, True),
    "assembled_ridge": (True, False),
}


@dataclass(frozen=True)
class QueryPredictor:
    """Predicts the query of step ``t + 1`` from those of the steps up to ``t``, per row and query head.

    Args:
        name: ``"last"``, the newest query as it is. ``"ridge"``, the regression of the newest query on its ``window``
            predecessors, shifted by one. ``"ridge_softmax"``, the same with its weights normalised by a softmax.
            ``"assembled"``, the average of the latter over all windows up to ``window`` (AsyncSpade).
            ``"assembled_ridge"``, that average of weights as the ridge gives them.
        window: predecessors that the regression has, 1 to 32.
        epsilon: strength of the ridge, relative to the mean squared norm of the predecessors.
    """

    name: Annotated[str, EarlierQueries] = PREDICTOR
    window: Window = WINDOW
    epsilon: Epsilon = EPSILON

    def __post_init__(self) -> None:
        check(self)

    @property
    def slots(self) -> int:
        """Queries that the ring must hold: the newest and its predecessors."""
        return 1 if self.name == "last" else self.window + 1

    def predict(self, ring: Tensor, position: Tensor, count: Tensor, out: Tensor | None = None) -> Tensor:
        """The next query of each row and head: one kernel, nothing waits for the device, a CUDA graph can hold it.

        A row with few queries uses fewer predecessors; with one query it gets that query, with none zeros.

        Args:
            ring: ``[batch, Hq, slots, D]``, queries after the rotary embedding. Layers may be stacked along the batch.
            position: int32 ``[batch]``: the slot that a row's next query will take; its newest lies before it. Rows of
                different lengths differ.
            count: int32 ``[batch]``, queries that a row has in the ring.
            out: where to put the result.

        Returns:
            ``[batch, Hq, D]`` in the dtype of ``ring``.
        """
        window = 0 if self.name == "last" else self.window
        return query_predict(ring, position, count, window, self.epsilon, *_FORMS.get(self.name, ()), out=out)


class CustomPredictor:
    """A user's predictor, whose results are checked.

    Args:
        function: ``(ring, position, count) -> [batch, Hq, D]``, see :meth:`QueryPredictor.predict`. It is called once a
            layer and step, must not change the ring, and in captured steps must do the same launches each time.
        window: the ring has one slot more.
    """

    def __init__(self, function: Predict, window: int = WINDOW) -> None:
        if not callable(function):
            raise ValueError(f"a predictor must be callable, got {type(function).__name__}")
        check_value("window", window, alternatives(Window))
        self.function = function
        self.window = window
        self.name = getattr(function, "__name__", type(function).__name__)

    @property
    def slots(self) -> int:
        """Queries that the ring holds."""
        return self.window + 1

    def predict(self, ring: Tensor, position: Tensor, count: Tensor, out: Tensor | None = None) -> Tensor:
        """As :meth:`QueryPredictor.predict`.

        Raises:
            ValueError: the function returned something else than ``[batch, Hq, D]`` of the ring's dtype and device.
        """
        found = self.function(ring, position, count)
        if not isinstance(found, Tensor):
            raise ValueError(f"the predictor {self.name} must return a tensor, got {type(found).__name__}")
        want = (ring.shape[0], ring.shape[1], ring.shape[3])
        if tuple(found.shape) != want:
            raise ValueError(
                f"the predictor {self.name} must return [batch, query heads, head dim] = {list(want)} for a ring of "
                f"{list(ring.shape)}, got {list(found.shape)}"
            )
        if found.dtype != ring.dtype or found.device != ring.device:
            raise ValueError(
                f"the predictor {self.name} must return {ring.dtype} on {ring.device}, as the ring is, got "
                f"{found.dtype} on {found.device}"
            )
        return found if out is None else out.copy_(found)


def make_predictor(
    predictor: Any = PREDICTOR, window: int = WINDOW, epsilon: float = EPSILON
) -> QueryPredictor | CustomPredictor:
    """A predictor by its name, or of a user's function.

    Args:
        predictor: a name, see :class:`QueryPredictor`; or a function, see :class:`CustomPredictor`. A predictor that is
            made already is taken as it is.
        window, epsilon: see there.

    Raises:
        ValueError: there is no such predictor, or a setting is out of range.
    """
    if isinstance(predictor, QueryPredictor | CustomPredictor):
        return predictor
    if isinstance(predictor, str):
        return QueryPredictor(predictor, window, epsilon)
    return CustomPredictor(predictor, window)
