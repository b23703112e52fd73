"""Hooks on a model's decoder layers that hand the residual stream to the layers of a cache.

They act in decode steps over caches that ask for it, until ``remove()``. All callers that install them share the hooks
of a model.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from ..cache_name import given_cache
from ..untraced import untraced
from .points import Point, Points, place


class ForeseeingCache(Protocol):
    """A cache, as the hooks need it.

    Attributes:
        foresight: the stream that its layers need from the layers before them (``Shared.foresight``); None: none.
        met: whether hooks that deliver it have met this cache.
        layers, sparse_layers: all of its layers, by index, and those that select.
    """

    foresight: str | None
    met: bool
    layers: list
    sparse_layers: list


class _Here(threading.local):
    """State that the hooks of one thread's forward pass share."""

    before: Tensor | None = None  # input of the layer that computes; of several tokens only the last one's
    positions: dict[str, Any] | None = None  # position embeddings of this step, by the kind of layer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Here:
        """A copy of the model gets a new one: no forward pass runs through it."""
        return _Here()


class Hooks:
    """The hooks on one model.

    Attributes:
        points: where queries can be predicted.
        users: the users that have installed them (:class:`.tap.QueryTap`).
    """

    def __init__(self, model: nn.Module) -> None:
        self.points = Points(model)
        self.users: set[object] = set()
        self._here = _Here()
        self._met: weakref.WeakSet[ForeseeingCache] = weakref.WeakSet()
        self._checked = self._said = False
        self._handles: list = []

    # ------------------------------------------------------------------ hooks

    def install(self) -> None:
        points = self.points.found.values()
        ends = {point.layer: point for point in points}
        begins = {point.before: point for point in points}
        for layer in dict.fromkeys((*begins, *ends)):
            hook = self._entered(layer, ends.get(layer), begins.get(layer))
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        if any(point.kind for point in points):
            self._handles.append(self.points.rotary.register_forward_hook(self._turned(), with_kwargs=True))

    def remove(self) -> None:
        while self._handles:  # remove the hook before its handle: an interrupt may come in between
            self._handles[-1].remove()
            self._handles.pop()
        for cache in self._met:
            for layer in cache.sparse_layers:
                if layer.policy.foresight is not None:
                    layer.policy.foresight.source = None
            cache.met = False
        self._met.clear()

    # Functions instead of methods: copies of a model copy its hooks, and the copies must do nothing.

    def _entered(self, own: nn.Module, ends: Point | None, begins: Point | None) -> Callable:
        """A decoder layer is called: the layer before, of the point ``ends``, is done; that of ``begins`` starts."""
        here = self._here

        @untraced
        def entered(module: nn.Module, args: tuple, given: dict[str, Any]) -> None:
            before, here.before = here.before, None
            cache = given_cache(given)
            if getattr(cache, "foresight", None) is None or module is not own:
                return
            stream = args[0] if args else given.get("hidden_states")
            if len(args) > 1 or stream is None or stream.ndim != 3:
                return
            one, by_delta = stream.shape[1] == 1, place(cache.foresight) == "in_delta"
            if not one and not by_delta:
                return
            self.meet(cache)
            if before is not None and before.device == stream.device and (layer := _waiting(ends, cache)) is not None:
                mask = given.get("attention_mask")
                layer.note_added(before, stream, mask if isinstance(mask, Tensor) and mask.ndim == 2 else None)
            if begins is None:
                return
            if by_delta:  # a new cache has no layers yet that would ask for it
                here.before = stream if one else stream[:, -1:].detach().clone()  # a long prompt need not live on
            layer = _waiting(begins, cache)
            if not one or layer is None:
                return
            given = {name: value for name, value in given.items() if name != "hidden_states"}
            if begins.kind is not None:
                if here.positions is None or begins.kind not in here.positions:
                    return
                given["position_embeddings"] = here.positions[begins.kind]
            foresight = layer.policy.foresight
            layer.foresee(lambda: begins.expected(foresight.expected(stream, layer.store), given), stream)

        return entered

    def _turned(self) -> Callable:
        here, rotary = self._here, self.points.rotary

        @untraced
        def turned(module: nn.Module, args: tuple, given: dict[str, Any], out: Any) -> None:
            if module is not rotary:
                return
            kind = given.get("layer_type", args[2] if len(args) > 2 else None)
            x = args[0] if args else given.get("x")
            if kind is None or x is None or x.shape[1] != 1:
                here.positions = None  # not needed for a prompt, whose position embeddings are long
            else:
                here.positions = {**(here.positions or {}), kind: out}

        return turned

    # ------------------------------------------------------------------ caches

    def meet(self, cache: ForeseeingCache) -> None:
        """Tell the layers of a predictive cache which streams their queries will be predicted from."""
        if cache in self._met or cache.foresight is None or not cache.sparse_layers:
            return
        if not self._checked:
            self._check()
        wanting = [layer for layer in cache.sparse_layers if layer.policy.foresight is not None]
        for layer in wanting:
            point = self.points.found.get(layer.index)
            foresight = layer.policy.foresight
            foresight.source = None if point is None else place(cache.foresight)
            foresight.stream_like = None if point is None else (point.width, point.like.dtype)
        self._met.add(cache)
        cache.met = True
        without = [layer.index for layer in wanting if layer.policy.foresight.source is None]
        odd = [index for index in without if self.points.skipped.get(index) != "there is no layer before it"]
        if odd and not self._said:
            self._said = True
            reasons = "; ".join(sorted({self.points.skipped.get(i, "no decoder layers that are known") for i in odd}))
            warnings.warn(
                f"layers {', '.join(map(str, odd))} choose tokens by their own query, in place: right, but without "
                f"overlap with other work ({reasons})",
                stacklevel=4,
            )

    def _check(self) -> None:
        """See :meth:`.points.Points.check`; it runs layers, whose hooks must not take that for a pass."""
        self._checked = True
        here = self._here
        before, positions = here.before, here.positions  # a pass may be under way
        self.points.check()
        here.before, here.positions = before, positions


def _waiting(point: Point | None, cache: ForeseeingCache):
    """The layer of a cache that waits for what a point gives; None if it does not."""
    if point is None or point.index >= len(cache.layers):
        return None
    layer = cache.layers[point.index]
    foresight = getattr(getattr(layer, "policy", None), "foresight", None)
    if foresight is None or foresight.source is None or point.module.config._attn_implementation != "sparsekv":
        return None
    return layer
