"""The layers whose query can be predicted, and where the residual stream is read for each.

A decoder layer adds little to the residual stream. So layer ``l`` can predict its query from the input of layer
``l - 1`` (InfiniGen). Closer to the true query is that input plus the change that layer ``l - 1`` made for the row's
previous token. Both are known early enough to select layer ``l``'s tokens while all of layer ``l - 1`` computes.

This module decides what is possible for a model, without a cache or a pass. :mod:`.hooks` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..cache_name import GENERATE, declared_name
from ..types import AttentionParams
from .decoder import attention_name, layer_type, parameters, stack_of
from .mla import Absorbed, is_mla
from .own_query import query_of


@dataclass
class Point:
    """A layer whose query can be predicted, and from where.

    Args:
        index: of its cache layer.
        layer, attention: the decoder layer, and the name of its attention module.
        before: the decoder layer before it.
        kind: of its position embeddings, if they differ from those of the layer before.
    """

    index: int
    layer: nn.Module
    attention: str
    before: nn.Module
    kind: str | None = None

    @property
    def module(self) -> nn.Module:
        """The attention module; looked up each time, because adapters replace it."""
        return self.layer._modules[self.attention]

    @cached_property
    def cache_name(self) -> str:
        """The keyword by which the layer takes its cache; one that hands its keywords on takes its attention's."""
        return declared_name(self.layer) or declared_name(self.module) or GENERATE

    @property
    def like(self) -> Tensor:
        """A weight of the stream's type: a norm's, because projections may be quantised."""
        return min((p for p in self.layer.parameters() if p.is_floating_point()), key=lambda p: p.ndim)

    @property
    def width(self) -> int:
        """Width of the stream."""
        return self.module.config.hidden_size

    def query(self, stream: Tensor, given: dict[str, Any], whole: bool = False) -> Tensor:
        """The query of :meth:`expected` alone."""
        return self.expected(stream, given, whole)[0]

    @torch.no_grad()
    def expected(self, stream: Tensor, given: dict[str, Any], whole: bool = False) -> tuple[Tensor, AttentionParams]:
        """The layer's query for the input ``stream [batch, 1, hidden]``: ``[batch, Hq, Dk]``, absorbed in MLA.

        And with what parameters it attends.

        Args:
            given: the layer's other arguments.
            whole: project keys and values as well, as the layer does.

        Raises:
            RuntimeError: the layer ended without calling its attention function.
        """
        found = query_of(self.layer, self.attention, self.cache_name, stream, given, whole)
        if found is None:
            raise RuntimeError(f"layer {self.index} has not called the attention function sparsekv")
        module, (query, params) = self.module, found
        return (Absorbed(module).queries(query) if is_mla(module) else query)[:, :, 0], params


def place(foresight: str) -> str:
    """Where a cache wants the stream to be read: ``"in"``, or ``"in_delta"``."""
    return foresight.partition(":")[2] or "in"


class Points:
    """The points of one model.

    Attributes:
        found: points by index of the cache layer.
        skipped: why the other layers select by their own query.
        rotary: the module that computes position embeddings for all layers, if there is one.
        by_kind: whether it does so for each kind of layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[int, Point] = {}
        self.skipped: dict[int, str] = {}
        stack = stack_of(model)
        self.rotary = None if stack is None else stack._modules.get("rotary_emb")
        self.by_kind = self.rotary is not None and "layer_type" in parameters(self.rotary)
        if stack is not None:
            self._find(stack)

    def _find(self, stack: nn.Module) -> None:
        layers = list(stack._modules["layers"])
        kinds = list(getattr(getattr(stack, "config", None), "layer_types", None) or ())
        kinds += [None] * (len(layers) - len(kinds))
        for at, layer in enumerate(layers):
            name = attention_name(layer)
            if name is None:
                continue
            index, before = layer._modules[name].layer_idx, layers[at - 1]
            if at == 0:
                self.skipped[index] = "there is no layer before it"
                continue
            point = Point(index, layer, name, before)
            if self.by_kind and kinds[at] != kinds[at - 1]:
                point.kind = kinds[at]
            self.found[index] = point

    def check(self) -> None:
        """Try all layers on made-up input. Drop those that fail."""
        for index, point in list(self.found.items()):
            try:
                stream, given = self.made_up(point)
                ours, theirs = point.query(stream, given), point.query(stream, given, whole=True)
                if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max())):
                    raise RuntimeError("its query depends on keys or values")
            except Exception as error:  # whatever a model's own code does with input that it does not expect
                self.skipped[index] = f"its query cannot be had beforehand: {type(error).__name__}, {error}"
                del self.found[index]

    def made_up(self, point: Point) -> tuple[Tensor, dict[str, Any]]:
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
            kind = getattr(point.module, "layer_type", None) or layer_type(point.module)
            more = {"layer_type": kind} if self.by_kind else {}
            with torch.no_grad():
                given["position_embeddings"] = self.rotary(stream, position, **more)
        return stream, given
