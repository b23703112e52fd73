"""``predict_ahead(model)``: predict the query of a layer from the residual stream of the layer before it.

:mod:`.points` finds the streams for the prediction, :mod:`.own_query` computes the query, and :mod:`.hooks` delivers
the streams. This module counts the users of a model's hooks, because several users share them.
"""

from __future__ import annotations

import threading
import weakref

from torch import nn

from .hooks import Hooks

_installing = threading.RLock()
_hooked: weakref.WeakKeyDictionary[nn.Module, Hooks] = weakref.WeakKeyDictionary()


class QueryTap:
    """A user of a model's hooks. They stay from :meth:`install` until the last user has called :meth:`remove`.

    Attributes:
        hooks: the hooks, shared by all users of the model; None while this user has not installed them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hooks: Hooks | None = None
        self._model = weakref.ref(model)
        self._user = object()

    def install(self) -> QueryTap:
        """Install the hooks. May be called again."""
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
        """Stop using the hooks. May be called again, also after an interrupt."""
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
        """Where each layer's prediction reads the stream (``"in"``: the input of the layer before), or why not."""
        if self.hooks is None:
            return {}
        points = self.hooks.points
        return dict(sorted({**dict.fromkeys(points.found, "in"), **points.skipped}.items()))

    def __repr__(self) -> str:
        if self.hooks is None:
            return "QueryTap(not installed)"
        points = self.hooks.points
        return f"QueryTap({len(points.found)} layers, {len(points.skipped)} by their own query)"


def predict_ahead(model: nn.Module) -> QueryTap:
    """Let predictive caches select each layer's tokens by its predicted query, while the layer before computes.

    ``optimize(model)`` does this automatically. Without either, ``predictor="layer"`` selects by each layer's own query
    just before its attention. That is as accurate, but slower in captured steps. Eager steps on one stream get no
    speedup from prediction, only results that compare with those of captured steps.

        with predict_ahead(model):
            model.generate(**inputs, past_key_values=AsyncPredictiveCache())

    Args:
        model: a causal language model of transformers, loaded with ``attn_implementation="sparsekv"``. Its decoder
            layers get hooks, which do nothing with other caches.

    Returns:
        A context manager; its end, or ``remove()``, removes the hooks. ``layers`` describes each layer.

    Raises:
        ValueError: the decoder's layers were not found, or the query of none of them can be predicted.
    """
    tap = QueryTap(model).install()
    if not tap.hooks.points.found:
        tap.remove()
        raise ValueError(
            f"predict_ahead() found no decoder layers that it knows in {type(model).__name__}: leave it out, then each "
            "layer chooses by its own query"
        )
    return tap
