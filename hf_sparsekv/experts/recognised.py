"""What a model's experts compute between their products, found by what it gives for some numbers.

Models write it as code of their own: an activation and a gate, with limits or without. Kernels are built for a
:class:`~hf_sparsekv.ops.layers.experts.Gate`. So the code runs once on numbers that tell all gates apart; the first
gate with the same results is what it computes. Code that is none of them stays, between two products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..ops.layers.experts import Gate
from ..ops.layers.experts.gates import ACTIVATIONS, between

_LIMITS = ("limit", "swiglu_limit")  # attributes of transformers' experts
_ALPHAS = ("alpha", "swiglu_alpha")
_found: WeakKeyDictionary[nn.Module, tuple[tuple, Gate | None]] = WeakKeyDictionary()


def _numbers() -> Tensor:
    """Values of a first product, ``[16, 64]``: of both signs, near 0, and beyond all limits. All are different."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(16, 64, generator=generator, dtype=torch.float32, device="cpu")
    return wide * torch.logspace(-1, 2, 16, dtype=torch.float32, device="cpu")[:, None]


def _candidates(module: nn.Module, gated: bool) -> Iterator[Gate]:
    """Gates that the module's code may compute: with its own numbers."""
    limits = [math.inf, *(float(v) for name in _LIMITS if isinstance(v := getattr(module, name, None), int | float))]
    alphas = [1.0, 1.702, *(float(v) for name in _ALPHAS if isinstance(v := getattr(module, name, None), int | float))]
    if not gated:
        yield from (Gate("silu", False, alpha=alpha) for alpha in dict.fromkeys(alphas))
        yield from (Gate(name, False) for name in ACTIVATIONS if name != "silu")
        return
    for limit, offset, interleaved, active in product(dict.fromkeys(limits), (0.0, 1.0), (False, True), (False, True)):
        if active and limit == math.inf:
            continue
        for name in ACTIVATIONS:
            for alpha in dict.fromkeys(alphas) if name == "silu" else (1.0,):
                yield Gate(name, True, interleaved, alpha, limit, offset, active)


def _recognise(module: nn.Module, code: Callable[[Tensor], Tensor], gated: bool) -> Gate | Callable[[Tensor], Tensor]:
    numbers = _numbers()
    try:
        want = code(numbers.clone())
    except (RuntimeError, TypeError, ValueError):  # weights of its own on a device, or another shape
        return code
    if not isinstance(want, Tensor) or want.shape != (16, 32 if gated else 64) or not want.isfinite().all():
        return code
    for gate in _candidates(module, gated):
        if torch.allclose(between(numbers, gate), want, rtol=1e-5, atol=1e-4):
            return gate
    return code


def gate_of(module: nn.Module) -> Gate | Callable[[Tensor], Tensor]:
    """What stands between the products of the experts ``module``: a gate, or the module's own code.

    Found once, and again when the activation or a number of the module has changed. An activation with hooks is called.
    """
    gated, act = bool(getattr(module, "has_gate", True)), getattr(module, "act_fn", None)
    code: Callable[[Tensor], Tensor] = module._apply_gate if gated else act  # type: ignore[assignment]
    if isinstance(act, nn.Module) and (act._forward_hooks or act._forward_pre_hooks):
        return code
    held = module.__dict__
    numbers = tuple(held.get(name) for name in (*_LIMITS, *_ALPHAS))
    key = act, getattr(type(module), "_apply_gate", None), held.get("_apply_gate"), gated, numbers
    found = _found.get(module)
    if found is None or found[0] != key:
        gate = _recognise(module, code, gated)
        # The module's own code is not kept: it holds the module, which would then never be freed.
        found = _found[module] = key, gate if isinstance(gate, Gate) else None
    return code if found[1] is None else found[1]
