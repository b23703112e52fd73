"""The query of a layer for a given input, by the layer's own ``forward()``.

Each model computes a query from the residual stream in its own way: norms, joined projections, query norms, rotary
embedding. So we run the layer's own ``forward()`` on the stream, with two changes that only that call sees. It skips
the work for keys and values. A stand-in for the cache ends the call when the query reaches the attention function. So
this module needs to know nothing of a model's steps before its attention.

:mod:`.points` decides for which layers and inputs this is done.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..cache_name import without_cache
from ..types import AttentionParams
from .handle import KVHandle, Step
from .mla import Absorbed, is_mla

_KEYS = ("k_proj", "v_proj", "kv_a_proj_with_mqa")  # projections that a query does not need
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # rows of such weights are multiplied by as is


class Asked(Exception):
    """Ends a layer's forward as soon as its query is known."""

    def __init__(self, found: Tensor, params: AttentionParams) -> None:
        super().__init__("a layer's forward pass was ended on purpose")
        self.found, self.params = found, params


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

    def attend(
        self, module: nn.Module, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, *rest
    ) -> NoReturn:
        raise Asked(query, params)

    def materialise(self, step: Step, which: str) -> Tensor:
        return step.k if which == "k" else step.v


class _Skipped:
    """Replaces a projection whose result is not used: the right shape, from memory that is there."""

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


def view_of(module: nn.Module, **children: object) -> nn.Module:
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
    view = view_of(attention, **children)
    if is_mla(attention):
        view.__dict__["expand_kv"] = lambda latent, rotary: (latent, rotary)  # the probe gets latents
    return view


def query_of(
    layer: nn.Module, attention: str, cache_name: str, stream: Tensor, given: dict[str, Any], whole: bool
) -> tuple[Tensor, AttentionParams] | None:
    """The query of a decoder layer whose input is ``stream``: ``[batch, Hq, 1, Dk]``, before absorption in MLA.

    And with what parameters it attends. None: the layer ended without calling the attention function.

    Args:
        attention: the name of its attention module.
        cache_name: the keyword by which it takes its cache.
        given: its other arguments.
        whole: project keys and values as well, as the layer does.
    """
    module = layer._modules[attention]
    view = view_of(layer, **{attention: view_of(module) if whole else _query_only(module)})
    if whole and is_mla(module):
        view._modules[attention].__dict__["expand_kv"] = lambda latent, rotary: (latent, rotary)
    given = {**without_cache(given), cache_name: _Probe(module), "attention_mask": None}
    try:
        view.forward(stream.detach(), **given)  # another tensor object: fused layers leave notes with theirs
    except Asked as asked:
        return asked.found, asked.params
    return None
