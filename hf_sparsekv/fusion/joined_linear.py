"""Linear layers that read the same input, computed as one matrix product; of sharded ones this rank's shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model_watch import kind_of

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DOUBLE = torch.float64


def is_observed(module: nn.Module) -> bool:
    """Whether the module has hooks, other than those by which transformers records outputs."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks)


def is_plain(layer: nn.Module) -> bool:
    """Whether ``layer`` is a linear layer and nothing more: not quantised, sharded, replaced or with LoRA."""
    # Exact types: those are subclasses or other classes, or their weights are.
    return (
        kind_of(layer) is nn.Linear
        and all(type(p) is nn.Parameter and type(p.data) is Tensor for p in layer.parameters(recurse=False))
        and "forward" not in layer.__dict__
        and not hasattr(layer, "parametrizations")
    )


def local(p: Tensor) -> Tensor:
    """The memory of a parameter; of a sharded one (a DTensor) this rank's share."""
    return p._local_tensor if hasattr(p, "_local_tensor") else p.data


def is_share(layer: nn.Module, dim: int) -> bool:
    """Whether ``layer`` is a linear layer whose weight transformers has sharded by ``dim``, and nothing more."""
    weight: Any = layer._parameters.get("weight")
    placements: Any = getattr(weight, "placements", ())
    return (
        kind_of(layer) is nn.Linear
        and len(placements) == 1
        and (placements[0].is_shard(dim) or placements[0].is_shard(dim - weight.ndim))
        and getattr(layer.__dict__.get("forward"), "__name__", "") == "tp_forward"
        and not hasattr(layer, "parametrizations")
    )


def _joins(layer: nn.Module) -> bool:
    """Whether a layer is plain, or a share of the outputs of one that is."""
    return is_plain(layer) or is_share(layer, 0)


def has_plain_weights(module: nn.Module) -> bool:
    """Whether the module's own parameters are plain float tensors, which a kernel reads in place."""
    own = module.parameters(recurse=False)
    return all(type(p) is nn.Parameter and type(p.data) is Tensor and p.dtype in _DTYPES for p in own)


def quantised(model: nn.Module, without: tuple[type, ...] = ()) -> dict[str, int]:
    """Number of linear layers of ``model`` whose weights are not 16 or 32 bit floats, by the name of the format.

    Layers of the classes ``without`` are not counted.

    The name is the layer's class (bitsandbytes' ``Linear4bit``, transformers' ``FP8Linear``, those of GPTQ and AWQ). In
    torch's own layers it is the class of the weight (torchao's ``Int8Tensor``).
    """
    counts: dict[str, int] = {}
    for module in model.modules():
        kept = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if not hasattr(module, "in_features") or not hasattr(module, "out_features") or not kept:
            continue
        if isinstance(module, without):
            continue
        weights = [t for name, t in kept if name.startswith(("weight", "qweight")) and t is not None]
        held = [(type(t), t) for t in (getattr(t, "_local_tensor", t) for t in weights)]
        other = [kind for kind, t in held if kind not in (nn.Parameter, Tensor) or t.dtype not in (*_DTYPES, _DOUBLE)]
        if other:
            of_torch = kind_of(module) is nn.Linear and other[0] not in (nn.Parameter, Tensor)
            name = (other[0] if of_torch else type(module)).__name__
            counts[name] = counts.get(name, 0) + 1
    return counts


def _give(p: nn.Parameter, memory: Tensor) -> None:
    """Let a parameter, or this rank's share of it, be ``memory``."""
    if hasattr(p, "_local_tensor"):
        p._local_tensor = memory
    else:
        p.data = memory


class JoinedLinear:
    """The linear layers ``names`` of a module, their weights stacked in one block of memory.

    The layers keep their parameters, which become views of the block. Nothing is stored twice, and ``state_dict()`` and
    saving are unchanged. Only these views hold the block, and it is found through them. After a layer is moved, copied
    or replaced, the layers are therefore no longer joined, and each is called separately.

    Args:
        names: names of the layers, attributes of their owner.
        product: computes the product, as ``torch.nn.functional.linear`` does.
    """

    def __init__(self, names: tuple[str, ...], product: Callable[..., Tensor] = F.linear) -> None:
        self.names = names
        self.product = product

    def _layers(self, owner: nn.Module) -> list[Any]:
        return [getattr(owner, name) for name in self.names]

    def parameters(self, owner: nn.Module) -> list[nn.Parameter]:
        return [p for layer in self._layers(owner) for p in layer.parameters(recurse=False)]

    def why_not(self, owner: nn.Module) -> str | None:
        """Why the layers of ``owner`` cannot be joined, in words."""
        layers = self._layers(owner)
        if not all(_joins(layer) for layer in layers):
            return "a projection is not a plain linear layer"
        parameters = [local(p) for p in self.parameters(owner)]
        if any(is_observed(layer) for layer in layers):
            return "a projection has hooks"
        if len({(p.device, p.dtype) for p in parameters}) != 1 or parameters[0].dtype not in _DTYPES:
            return "the projections' weights differ in device or dtype, or are quantised"
        if any(p.is_inference() or not p.is_contiguous() for p in parameters):
            return "a projection's weight cannot be moved"
        if len({layer.in_features for layer in layers}) != 1 or len({layer.bias is None for layer in layers}) != 1:
            return "the projections differ in shape"
        return None

    @torch.no_grad()
    def join(self, owner: nn.Module) -> None:
        """Move the weights into one block. Temporarily needs the memory of this block in addition to the model."""
        layers = self._layers(owner)
        for name in ("weight", "bias"):
            parameters = [getattr(layer, name) for layer in layers]
            if parameters[0] is None:
                continue
            block = torch.cat([local(p) for p in parameters])
            for p, part in zip(parameters, block.split([local(p).shape[0] for p in parameters])):
                _give(p, part)

    @torch.no_grad()
    def part(self, owner: nn.Module) -> None:
        """Give each layer separate memory again."""
        for p in self.parameters(owner):
            held = local(p)
            if held.untyped_storage().nbytes() != held.nbytes:
                _give(p, held.clone())

    def _block(self, layers: list[nn.Module], name: str) -> Tensor | None:
        """The stacked weights ``[sum of rows, ...]``, or ``None`` if they are no longer adjacent in memory."""
        parameters = [getattr(layer, name) for layer in layers]
        if not all(type(p) is nn.Parameter or hasattr(p, "_local_tensor") for p in parameters):
            return None
        parameters = [local(p) for p in parameters]
        first = parameters[0]
        memory, at = first.untyped_storage().data_ptr(), first.data_ptr()
        for p in parameters:
            if p.data_ptr() != at or p.untyped_storage().data_ptr() != memory or p.dtype != first.dtype:
                return None
            at += p.nbytes
        rows = sum(p.shape[0] for p in parameters)
        return first.as_strided((rows, *first.shape[1:]), first.stride())

    def stacked(self, owner: nn.Module) -> tuple[Tensor, Tensor | None] | None:
        """Weights ``[sum of out, in]`` and biases, while the layers are joined and have no hooks."""
        layers = self._layers(owner)
        if not all(
            (is_share(one, 0) if "forward" in one.__dict__ else kind_of(one) is nn.Linear) and not is_observed(one)
            for one in layers
        ):
            return None
        weight = self._block(layers, "weight")
        has_bias = any(layer.bias is not None for layer in layers)
        bias = self._block(layers, "bias") if has_bias else None
        return None if weight is None or (bias is not None) != has_bias else (weight, bias)

    def __call__(self, owner: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        """Outputs of each layer for ``x`` ``[..., in]``: views ``[..., out]`` of one tensor while they are joined."""
        layers, stacked = self._layers(owner), self.stacked(owner)
        if stacked is None:
            return tuple(layer(x) for layer in layers)
        return self.product(x, *stacked).split([local(layer.weight).shape[0] for layer in layers], dim=-1)
