"""``predict_ahead(model)``: the query of a layer, expected from the residual stream of the layer before it.

A decoder layer adds little to the residual stream. What layer ``l`` would ask of the stream as it enters layer
``l - 1`` is therefore close to what it does ask (InfiniGen speculates so); closer if what layer ``l - 1`` added for the
row's token before is added to it; and as close if layer ``l - 1`` has attended, but has not run its MLP yet. The first
two queries are known early enough to choose layer ``l``'s tokens while all of layer ``l - 1`` computes, the third while
its MLP does.

How a query follows from the stream is up to the model: norms, joined projections, query norms, rotary embedding. So
layer ``l``'s own ``forward()`` is run on the stream, with two changes that only that call sees: what keys and values
alone need is left out, and in place of the cache there is one that ends the call as soon as the query comes to the
attention function. Whatever a model does before its attention is followed without being known here.

Hooks on the decoder layers bring the stream here. They act in decode steps over caches that ask for it, and are gone
after ``remove()``.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NoReturn, Protocol, get_origin

import torch
from torch import Tensor, nn

from ..cache_name import GENERATE, declared_name, given_cache, without_cache
from .handle import KVHandle, Step
from .mla import Absorbed, is_mla

_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm")  # before the MLP: the first of these that there is
_KEYS = ("k_proj", "v_proj", "kv_a_proj_with_mqa")  # projections that a query does not need
_STATE = {"update_conv_state", "update_recurrent_state"}  # what linear attention calls of a cache
_installing = threading.RLock()
_hooked: weakref.WeakKeyDictionary[nn.Module, Hooks] = weakref.WeakKeyDictionary()


# ---------------------------------------------------------------------- a layer's query


class _Asked(Exception):
    """Ends a layer's forward where its query is known, or another tensor that was looked for."""

    def __init__(self, found: Tensor) -> None:
        super().__init__("a layer's forward pass was ended on purpose")
        self.found = found


class _Probe:
    """Stands in for a cache and one of its layers: takes keys and values, and ends the pass with the query."""

    latent = False

    def __init__(self, module: nn.Module) -> None:
        self.absorbed = Absorbed(module) if is_mla(module) else None

    @property
    def owner(self) -> _Probe:
        """The cache of the layer, as :class:`.handle.Step` knows it."""
        return self

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        step = Step(self, keys, values, 0, self.absorbed)
        return KVHandle(step, "k"), KVHandle(step, "v")

    def get_seq_length(self, *args, **kwargs) -> int:
        return 0

    def attend(self, module: nn.Module, step: Step, query: Tensor, *rest) -> NoReturn:
        raise _Asked(query)

    def materialise(self, step: Step, which: str) -> Tensor:
        return step.k if which == "k" else step.v


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # rows of such weights are multiplied by as is


class _Skipped:
    """In place of a projection whose result nobody looks at: the right shape, from memory that is there."""

    def __init__(self, features: int) -> None:
        self.features = features

    def __call__(self, x: Tensor) -> Tensor:
        if self.features <= x.shape[-1]:
            return x[..., : self.features]
        return x.new_zeros(*x.shape[:-1], self.features)


class _QueryRows:
    """In place of a joined query, key and value projection: its first rows, which are the query's.

    The rows are a view of the weight. A cheaper copy of them (fewer bits, fewer channels) would be used here, and in
    place of ``q_proj`` in :func:`_query_only`.
    """

    def __init__(self, joined: nn.Linear, rows: int) -> None:
        self.joined, self.rows = joined, rows

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.joined.weight[: self.rows], self.joined.bias
        out = x.new_zeros(*x.shape[:-1], self.joined.out_features)
        out[..., : self.rows] = nn.functional.linear(x, weight, None if bias is None else bias[: self.rows])
        return out


def _plain(layer: nn.Module | None) -> bool:
    """A linear layer that does nothing but multiply by its weight, which is all here."""
    return (
        isinstance(layer, nn.Linear)
        and type(layer.weight) is nn.Parameter
        and type(layer.weight.data) is Tensor
        and tuple(layer.weight.shape) == (layer.out_features, layer.in_features)
        and "forward" not in layer.__dict__
        and not hasattr(layer, "parametrizations")
    )


def _view(module: nn.Module, **children: object) -> nn.Module:
    """The same module, its weights and all, with other ``children`` and without hooks. Made for one call."""
    view = object.__new__(type(module))
    view.__dict__.update(module.__dict__)
    view.__dict__["_modules"] = {**module._modules, **children}
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        view.__dict__[hooks] = OrderedDict()
    return view


def _query_only(attention: nn.Module) -> nn.Module:
    """A view of an attention module that projects queries only, where its projections are plain linear layers."""
    children: dict[str, object] = {}
    for name in _KEYS:
        if _plain(layer := attention._modules.get(name)):
            children[name] = _Skipped(layer.out_features)
    joined, config = attention._modules.get("qkv_proj"), getattr(attention, "config", None)
    if _plain(joined) and joined.weight.dtype in _FLOATS and hasattr(attention, "head_dim"):  # else with scales
        rows = getattr(config, "num_attention_heads", 0) * attention.head_dim
        if joined.out_features == rows + 2 * getattr(config, "num_key_value_heads", 0) * attention.head_dim:
            children["qkv_proj"] = _QueryRows(joined, rows)
    view = _view(attention, **children)
    if is_mla(attention):
        view.__dict__["expand_kv"] = lambda latent, rotary: (latent, rotary)  # on its way to the probe
    return view


# ---------------------------------------------------------------------- where a layer's stream comes from


@dataclass
class Point:
    """A layer whose query can be expected, and where.

    Args:
        index: of its cache layer.
        layer, attention: the decoder layer, and the name of its attention module.
        before: the decoder layer before it.
        norm: the norm before that layer's MLP, whose input is the residual stream; None if there is none.
        kind: of its position embeddings, if they differ from those of the layer before.
    """

    index: int
    layer: nn.Module
    attention: str
    before: nn.Module
    norm: nn.Module | None
    kind: str | None = None

    @property
    def module(self) -> nn.Module:
        """The attention module; looked up each time, because adapters replace it."""
        return self.layer._modules[self.attention]

    @cached_property
    def cache_name(self) -> str:
        """The keyword by which the layer takes its cache; one that hands its keywords on takes its attention's."""
        return declared_name(self.layer) or declared_name(self.module) or GENERATE

    def source(self, foresight: str) -> str | None:
        """Where the stream is taken for what a cache asks for: ``"in_delta"``, ``"in"``, ``"mid"``, or nowhere."""
        wanted = _place(foresight)
        return None if wanted == "mid" and self.norm is None else wanted

    @property
    def like(self) -> Tensor:
        """A weight of the stream's type: a norm's, because projections may be quantised."""
        return min((p for p in self.layer.parameters() if p.is_floating_point()), key=lambda p: p.ndim)

    @property
    def width(self) -> int:
        """Of the stream."""
        return self.module.config.hidden_size

    @torch.no_grad()
    def query(self, stream: Tensor, given: dict[str, Any], whole: bool = False) -> Tensor:
        """What the layer asks if ``stream [batch, 1, hidden]`` is its input: ``[batch, Hq, Dk]``, absorbed in MLA.

        Args:
            given: what the layer is called with beside it.
            whole: project keys and values as well, as the layer does.

        Raises:
            RuntimeError: the layer ends without having come to its attention function.
        """
        module = self.module
        view = _view(self.layer, **{self.attention: _view(module) if whole else _query_only(module)})
        if whole and is_mla(module):
            view._modules[self.attention].__dict__["expand_kv"] = lambda latent, rotary: (latent, rotary)
        given = {**without_cache(given), self.cache_name: _Probe(module), "attention_mask": None}
        try:
            view.forward(stream.detach(), **given)  # another tensor object: fused layers leave notes with theirs
        except _Asked as asked:
            query = asked.found
        else:
            raise RuntimeError(f"layer {self.index} has not called the attention function sparsekv")
        return (Absorbed(module).queries(query) if is_mla(module) else query)[:, :, 0]


def _place(foresight: str) -> str:
    """Where a cache wants the stream to be taken; ``"layer"`` needs no state and leaves a whole layer's time."""
    return foresight.partition(":")[2] or "in"


class ForeseeingCache(Protocol):
    """What the hooks need of a cache.

    Attributes:
        foresight: what its layers want of those before them (``Policy.foresees_by``); None for nothing.
        met: hooks that give it have met this cache.
        layers, sparse_layers: all of its layers, by index, and those that select.
    """

    foresight: str | None
    met: bool
    layers: list
    sparse_layers: list


class _Here(threading.local):
    """What the hooks of one thread's forward pass hand to each other."""

    call: tuple | None = None  # a layer of a cache that waits for the stream, and what its decoder layer will be given
    before: Tensor | None = None  # the input of the layer that computes; of several tokens, the last one's
    positions: dict[str, Any] | None = None  # position embeddings of this step, by the kind of layer


class Hooks:
    """The hooks on one model.

    Attributes:
        points: by index of the cache layer.
        skipped: why the other layers choose by their own query.
    """

    def __init__(self, model: nn.Module) -> None:
        self.points: dict[int, Point] = {}
        self.skipped: dict[int, str] = {}
        self.users: set[object] = set()
        self._here = _Here()
        self._met: weakref.WeakSet[ForeseeingCache] = weakref.WeakSet()
        self._checked = self._said = False
        self._handles: list = []
        stack = _stack(model)
        self.rotary = None if stack is None else stack._modules.get("rotary_emb")
        self.by_kind = self.rotary is not None and "layer_type" in _parameters(self.rotary)
        if stack is not None:
            self._find(stack)

    def _find(self, stack: nn.Module) -> None:
        layers = list(stack._modules["layers"])
        kinds = list(getattr(getattr(stack, "config", None), "layer_types", None) or ())
        kinds += [None] * (len(layers) - len(kinds))
        for at, layer in enumerate(layers):
            name = _attention_name(layer)
            if name is None:
                continue
            index, before = layer._modules[name].layer_idx, layers[at - 1]
            if at == 0:
                self.skipped[index] = "there is no layer before it"
                continue
            norm = next((before._modules[n] for n in _NORMS if isinstance(before._modules.get(n), nn.Module)), None)
            if isinstance(norm, nn.ModuleList):
                self.skipped[index] = "the layer before it has several attention modules"
                continue
            point = Point(index, layer, name, before, norm)
            if self.by_kind and kinds[at] != kinds[at - 1]:
                point.kind = kinds[at]
            self.points[index] = point

    # ------------------------------------------------------------------ hooks

    def install(self) -> None:
        ends = {point.layer: point for point in self.points.values()}
        begins = {point.before: point for point in self.points.values()}
        for layer in dict.fromkeys((*begins, *ends)):
            hook = self._entered(layer, ends.get(layer), begins.get(layer))
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        for point in self.points.values():
            if point.norm is not None:
                self._handles.append(point.norm.register_forward_pre_hook(self._half_way(point)))
        if any(point.kind for point in self.points.values()):
            self._handles.append(self.rotary.register_forward_hook(self._turned(), with_kwargs=True))

    def remove(self) -> None:
        while self._handles:  # a hook goes before its handle: an interrupt may come in between
            self._handles[-1].remove()
            self._handles.pop()
        for cache in self._met:
            for layer in cache.sparse_layers:
                layer.policy.source = None
            cache.met = False
        self._met.clear()

    # Functions and not methods: copies of a model copy its hooks, and theirs are to do nothing.

    def _entered(self, own: nn.Module, ends: Point | None, begins: Point | None) -> Callable:
        """A decoder layer is called: the layer before, of the point ``ends``, is done; that of ``begins`` starts."""
        here = self._here

        def entered(module: nn.Module, args: tuple, given: dict[str, Any]) -> None:
            before, here.before, here.call = here.before, None, None
            cache = given_cache(given)
            if getattr(cache, "foresight", None) is None or module is not own:
                return
            stream = args[0] if args else given.get("hidden_states")
            if len(args) > 1 or stream is None or stream.ndim != 3:
                return
            one, by_delta = stream.shape[1] == 1, _place(cache.foresight) == "in_delta"
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
            policy = layer.policy
            if policy.source == "mid":
                here.call = layer, given
            else:
                layer.foresee(lambda: begins.query(policy.expected(stream, layer.store), given), stream)

        return entered

    def _half_way(self, point: Point) -> Callable:
        here, norm = self._here, point.norm

        def half_way(module: nn.Module, args: tuple) -> None:
            if here.call is None:
                return
            (layer, given), here.call = here.call, None
            if module is norm and args and layer.index == point.index:
                stream = args[0]
                layer.foresee(lambda: point.query(stream, given), stream)

        return half_way

    def _turned(self) -> Callable:
        here, rotary = self._here, self.rotary

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
        """Tell the layers of a cache that asks for it where their queries will be expected from."""
        if cache in self._met or cache.foresight is None or not cache.sparse_layers:
            return
        if not self._checked:
            self._check()
        wanting = [layer for layer in cache.sparse_layers if layer.policy.foresight is not None]
        for layer in wanting:
            point = self.points.get(layer.index)
            layer.policy.source = None if point is None else point.source(cache.foresight)
            layer.policy.stream_like = None if point is None else (point.width, point.like.dtype)
        self._met.add(cache)
        cache.met = True
        without = [layer.index for layer in wanting if layer.policy.source is None and layer.policy.warns_unforeseen]
        odd = [index for index in without if self.skipped.get(index) != "there is no layer before it"]
        if odd and not self._said:
            self._said = True
            unknown = f"no place for {cache.foresight!r}"
            if not self.points:
                unknown = "no decoder layers that are known"
            reasons = "; ".join(sorted({self.skipped.get(i, unknown) for i in odd}))
            warnings.warn(
                f"layers {', '.join(map(str, odd))} choose tokens by their own query, in place: right, but not hidden "
                f"behind other work ({reasons})",
                stacklevel=4,
            )

    def _check(self) -> None:
        """Try all layers on made-up input: drop those that cannot be asked, and norms that see no residual stream."""
        self._checked = True
        here = self._here
        call, before, positions, here.call = here.call, here.before, here.positions, None  # a pass may be under way
        for index, point in list(self.points.items()):
            try:
                stream, given = self._made_up(point)
                ours, theirs = point.query(stream, given), point.query(stream, given, whole=True)
                if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max())):
                    raise RuntimeError("its query depends on keys or values")
                if point.norm is not None and not _sees_stream(point, stream, given):
                    point.norm = None
            except Exception as error:  # whatever a model's own code does with input that it does not expect
                self.skipped[index] = f"its query cannot be had beforehand: {type(error).__name__}, {error}"
                del self.points[index]
        here.call, here.before, here.positions = call, before, positions

    def _made_up(self, point: Point) -> tuple[Tensor, dict[str, Any]]:
        """Two rows of input for a layer, and what else it is given. No random number is drawn."""
        devices = {p.device for layer in (point.before, point.layer) for p in layer.parameters()}
        if len(devices) > 1 or any(device.type == "meta" for device in devices):
            raise RuntimeError("its weights and those of the layer before lie on several devices")
        like, width = point.like, point.width
        with torch.inference_mode(False):
            stream = torch.arange(2 * width, device=like.device).mul(0.7).sin().to(like.dtype).view(2, 1, width)
            position = torch.full((2, 1), 3, device=like.device)
        given: dict[str, Any] = {"position_ids": position}
        if self.rotary is not None:
            kind = getattr(point.module, "layer_type", None) or _kind(point.module)
            more = {"layer_type": kind} if self.by_kind else {}
            with torch.no_grad():
                given["position_embeddings"] = self.rotary(stream, position, **more)
        return stream, given


def _waiting(point: Point | None, cache: ForeseeingCache):
    """The layer of a cache that waits for what a point gives; None if it does not."""
    if point is None or point.index >= len(cache.layers):
        return None
    layer = cache.layers[point.index]
    policy = getattr(layer, "policy", None)
    if policy is None or policy.source is None or point.module.config._attn_implementation != "sparsekv":
        return None
    return layer


def _sees_stream(point: Point, stream: Tensor, given: dict[str, Any]) -> bool:
    """The norm before the MLP gets the layer's input plus what attention adds: two rows differ as they did before."""
    mixers = {name: _Nothing(tuple_=_returns_tuple(child)) for name, child in _mixers(point.before)}

    def stop(module: nn.Module, args: tuple) -> None:
        raise _Asked(args[0])

    handle = point.norm.register_forward_pre_hook(stop)
    try:
        view = _view(point.before, **mixers)
        with torch.no_grad():
            view.forward(stream.detach(), **{**given, point.cache_name: None, "attention_mask": None})
    except _Asked as asked:
        mid = asked.found
    else:
        return False
    finally:
        handle.remove()
    if mid.shape != stream.shape:
        return False
    return torch.allclose(mid[0] - mid[1], stream[0] - stream[1], rtol=1e-2, atol=1e-2)


class _Nothing:
    """In place of a layer's attention: adds nothing."""

    def __init__(self, tuple_: bool) -> None:
        self.tuple_ = tuple_

    def __call__(self, hidden_states: Tensor, *args, **kwargs):
        out = torch.zeros_like(hidden_states)
        return (out, None) if self.tuple_ else out


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(inspect.unwrap(type(module).forward)).parameters)


@lru_cache(maxsize=128)
def _keeps_state(kind: type) -> bool:
    """Modules of this class keep a state of linear attention in the cache, not keys and values.

    Up to transformers 5.23 they took the cache by a name of its own; from 5.24 on by the one that attention uses.
    """
    methods = (inspect.unwrap(one) for base in kind.__mro__ for one in vars(base).values() if inspect.isfunction(one))
    return any(_STATE.intersection(method.__code__.co_names) for method in methods)


def _attends(module: nn.Module) -> bool:
    """The module caches keys and values."""
    return declared_name(module) is not None and not _keeps_state(type(module))


def _returns_tuple(mixer: nn.Module) -> bool:
    """What mixes tokens returns more than one tensor: attention its weights, which linear attention has not."""
    returns = inspect.signature(inspect.unwrap(type(mixer).forward)).return_annotation
    return _attends(mixer) or get_origin(returns) is tuple


def _mixers(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What mixes tokens in a decoder layer: attention of any kind."""
    for name, child in layer.named_children():
        if hasattr(child, "layer_idx"):
            yield name, child


def _attention_name(layer: nn.Module) -> str | None:
    """The name of a decoder layer's only attention module that takes a cache."""
    names = [name for name, child in _mixers(layer) if _attends(child) and hasattr(child, "config")]
    return names[0] if len(names) == 1 else None


def _kind(attention: nn.Module) -> str | None:
    kinds = getattr(attention.config, "layer_types", None)
    return kinds[attention.layer_idx] if kinds else None


def _stack(model: nn.Module) -> nn.Module | None:
    """The part of a model whose ``layers`` are those of its decoder."""
    for module in model.modules():
        layers = module._modules.get("layers")
        if isinstance(layers, nn.ModuleList) and any(_attention_name(layer) for layer in layers):
            return module
    return None


# ---------------------------------------------------------------------- who uses it


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
        found = {i: "in" if point.norm is None else "in, mid" for i, point in self.hooks.points.items()}
        return dict(sorted({**found, **self.hooks.skipped}.items()))

    def __repr__(self) -> str:
        if self.hooks is None:
            return "QueryTap(not installed)"
        return f"QueryTap({len(self.hooks.points)} layers, {len(self.hooks.skipped)} by their own query)"


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
    if not tap.hooks.points:
        tap.remove()
        raise ValueError(
            f"predict_ahead() found no decoder layers that it knows in {type(model).__name__}: leave it out, then each "
            "layer chooses by its own query"
        )
    return tap
