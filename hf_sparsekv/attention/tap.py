"""``predict_ahead(model)``: the query of a layer, expected from the residual stream of the layer before it.

:mod:`.points` says from which streams it is expected, :mod:`.own_query` how, and :mod:`.hooks` brings the streams. Here
is who has a model's hooks installed: several users share them.
"""

from __future__ import annotations

import threading
import weakref

from torch import nn

from .hooks import Hooks

_installing = threading.RLock()
_hooked: weakref.WeakKeyDictionary[nn.Module, Hooks] = weakref.WeakKeyDictionary()


class QueryTap:
    """A user of a model's hooks: from :meth:`install` on they are there, until the last user has called :meth:`remove`.

    Attributes:
        hooks: they, shared by all users of the model; None before and after.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hooks: Hooks | None = None
        self._model = weakref.ref(model)
        self._user = object()

    def install(self) -> QueryTap:
        """Have the hooks. May be called again."""
        with _installing:
            model = self._model()
            if self.hooks is not None or model is None:
                return self
            hooks = _hooked.get(model)
            hooks = Hooks(model) if hooks is None else hooks
            try:
                self.hooks = _hooked[model] = hooks
                hooks.users.add(self._user)
                if len(hooks.users) == 1:
                    hooks.install()
            except BaseException:
                self.remove()
                raise
            return self

    def remove(self) -> None:
        """Have them no longer. May be called again, also where an interrupt has stopped it."""
        with _installing:
            hooks, model = self.hooks, self._model()
            if hooks is None:
                return
            if hooks.users <= {self._user}:
                hooks.remove()
                if model is not None and _hooked.get(model) is hooks:
                    del _hooked[model]
            hooks.users.discard(self._user)
            self.hooks = None

    def __enter__(self) -> QueryTap:
        return self.install()

    def __exit__(self, *error) -> None:
        self.remove()

    @property
    def layers(self) -> dict[int, str]:
        """For each layer: where the layer before is tapped (``"in"``, or ``"in, mid"``), or why it is not."""
        if self.hooks is None:
            return {}
        points = self.hooks.points
        found = {i: "in" if point.norm is None else "in, mid" for i, point in points.found.items()}
        return dict(sorted({**found, **points.skipped}.items()))

    def __repr__(self) -> str:
        if self.hooks is None:
            return "QueryTap(not installed)"
        points = self.hooks.points
        return f"QueryTap({len(points.found)} layers, {len(points.skipped)} by their own query)"


def predict_ahead(model: nn.Module) -> QueryTap:
    """Let predictive caches choose each layer's tokens while the layer before computes, for the query that it expects.

    ``optimize(model)`` does it by itself. Without either, ``predictor="layer"`` chooses by each layer's own query, in
    place, which is as right and slower where steps are captured; eager steps on one stream gain nothing but
    comparability with captured ones.

        with predict_ahead(model):
            model.generate(**inputs, past_key_values=AsyncPredictiveCache())

    Args:
        model: a causal language model of transformers, loaded with ``attn_implementation="sparsekv"``. It gets hooks on
            its decoder layers, which do nothing over other caches.

    Returns:
        What ends it: a context manager with ``remove()``. ``layers`` says what is done for which layer.

    Raises:
        ValueError: the decoder's layers were not found, or none of them can be asked.
    """
    tap = QueryTap(model).install()
    if not tap.hooks.points.found:
        tap.remove()
        raise ValueError(
            f"predict_ahead() found no decoder layers that it knows in {type(model).__name__}: leave it out, then each "
            "layer chooses by its own query"
        )
    return tap
