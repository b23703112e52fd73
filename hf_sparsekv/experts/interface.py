"""The experts' implementation that the package registers with transformers as ``sparsekv``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..ops.layers.experts import experts
from ..untraced import untraced
from .recognised import gate_of

NAME = "sparsekv"
_REPLACED = ("eager", "grouped_mm", "batched_mm")  # transformers' own; others were chosen by the user
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_GATHERED = 16  # tokens: up to here transformers' steps gather weights, and above they group tokens


def accelerated(t: Tensor) -> bool:
    """Whether our kernels run on the device of ``t``."""
    return t.is_cuda


def sparsekv_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts: our kernels, which read weights where they are.

    They do not serve gradients, autocast, tracing, CPUs, or weights that are sharded, quantised or of another dtype.
    Those go to transformers' ``"batched_mm"`` (few tokens) or ``"grouped_mm"``. So nothing waits for the host.

    Args:
        module: experts of a model, decorated by ``use_experts_implementation``.
        hidden_states: ``[tokens, D]``.
        top_k_index: integer ``[tokens, k]``; experts that are not here (expert parallel) add nothing.
        top_k_weights: ``[tokens, k]``.

    Returns:
        ``[tokens, D]``.
    """
    if torch.compiler.is_compiling():
        return transformers_own(module, hidden_states, top_k_index, top_k_weights)
    return _ours(module, hidden_states, top_k_index, top_k_weights)


@untraced
def _ours(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    first = module._parameters.get("gate_up_proj" if module.has_gate else "up_proj")
    down, biases = module._parameters.get("down_proj"), (None, None)
    if module.has_bias:
        names = "gate_up_proj_bias" if module.has_gate else "up_proj_bias", "down_proj_bias"
        biases = tuple(module._parameters.get(name) for name in names)
    held = (first, down, *biases) if module.has_bias else (first, down)
    if not _serves(x, index, held):
        return transformers_own(module, x, index, weights)
    first, down = (w.data.transpose(1, 2) if module.is_transposed else w.data for w in (first, down))
    return experts(x, index, weights, first, down, gate_of(module), *biases)


def _serves(x: Tensor, index: Tensor, held: tuple) -> bool:
    """Whether our kernels multiply ``x`` with these parameters."""
    return (
        accelerated(x)
        and x.ndim == 2
        and x.stride(-1) == 1
        and index.ndim == 2
        and x.dtype in _DTYPES
        and all(type(p) is nn.Parameter and type(p.data) is Tensor for p in held)
        and all(p.dtype == x.dtype and p.device == x.device for p in held)
        and all(p.ndim < 3 or 1 in p.stride()[1:] for p in held)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
    )


def transformers_own(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor, known: Any = None) -> Tensor:
    """What transformers computes: ``"batched_mm"`` for few tokens on a GPU, as ``generate()`` chooses it."""
    how = "batched_mm" if x.is_cuda and x.shape[0] <= _GATHERED else "grouped_mm"
    return (known or ALL_EXPERTS_FUNCTIONS)[how](module, x, index, weights)


def _register_fp8() -> None:
    """Experts in fp8 have implementations of their own, and ours leaves them to these."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS as of_fp8

    def own(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return transformers_own(module, hidden_states, top_k_index, top_k_weights, of_fp8)

    of_fp8.register(NAME, own)


def chosen(model: nn.Module) -> dict[str, str | None]:
    """Implementations of a model and its parts, as :func:`choose` takes them; empty for a model without experts."""
    get: Callable | None = getattr(model, "get_experts_implementation", None)
    if get is None or not any(hasattr(module, "is_transposed") for module in model.modules()):
        return {}
    return dict(get())


def choose(model: Any, wanted: dict[str, str | None]) -> None:
    """Set what :func:`chosen` returned."""
    if wanted and chosen(model) != wanted:
        model.set_experts_implementation(wanted)


def put_back(model: nn.Module, held: dict[str, str | None]) -> None:
    """Undo :func:`use_ours`: ``held`` was :func:`chosen` before. What the user has chosen since then stays."""
    choose(model, {part: held[part] if how == NAME and part in held else how for part, how in chosen(model).items()})


def use_ours(model: nn.Module) -> None:
    """Let the experts of ``model`` run by our kernels, unless the user has chosen another library's."""
    if any("FP8Experts" in (kind.__name__ for kind in type(module).__mro__) for module in model.modules()):
        _register_fp8()
    choose(model, {part: NAME if how in _REPLACED else how for part, how in chosen(model).items()})
