"""What stands between an expert's two products: activation, gate, limits, as a value that kernels can be built for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "none")


class Gate(NamedTuple):
    """``activation(gate) * (up + offset)`` of a product's values; without ``gated``, ``activation(value)``.

    Args:
        activation: one of ``ACTIVATIONS``; ``"silu"`` is ``x * sigmoid(alpha * x)``, ``"relu2"`` the square of relu.
        gated: values come in pairs of gate and up.
        interleaved: pairs are neighbours (gpt-oss); otherwise all gates come before all ups.
        alpha: factor in the sigmoid of ``"silu"``.
        limit: largest gate, and largest magnitude of up.
        offset: added to up.
        limits_active: the limit is on the activation's result, not on the gate (Step 3).
    """

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0
    limits_active: bool = False

    @property
    def rows(self) -> int:
        """Values of the first product for each value of the result."""
        return 1 + self.gated

    def check(self) -> None:
        """Raise for a form that no kernel computes."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {self.activation!r}")
        if self.alpha != 1.0 and self.activation != "silu":
            raise ValueError(f"alpha is a factor of silu, not of {self.activation!r}")
        if not self.gated and (self.interleaved or self.limit < math.inf or self.offset or self.limits_active):
            raise ValueError(f"limits, offsets and interleaving are of gated experts, got {self}")


RAW = Gate("none", gated=False)


def _active(x: Tensor, gate: Gate) -> Tensor:
    if gate.activation == "silu":
        return F.silu(x) if gate.alpha == 1.0 else x.float() * torch.sigmoid(gate.alpha * x.float())
    if gate.activation == "relu2":
        return F.relu(x).float().square()
    if gate.activation in ("none", "relu"):
        return F.relu(x) if gate.activation == "relu" else x
    return F.gelu(x, approximate="tanh" if gate.activation == "gelu_tanh" else "none")


def between(values: Tensor, gate: Gate | Callable[[Tensor], Tensor]) -> Tensor:
    """What the second product multiplies: the definition.

    Computed in float32, and rounded after the activation and at the end.

    Args:
        values: ``[..., gate.rows * I]``, results of the first product.
        gate: the form; or any function of ``values``.

    Returns:
        ``[..., I]`` in the dtype of ``values``.
    """
    if not isinstance(gate, Gate):
        return gate(values)
    gate.check()
    if not gate.gated:
        return _active(values, gate).to(values.dtype)
    first, up = (values[..., ::2], values[..., 1::2]) if gate.interleaved else values.chunk(2, dim=-1)
    if gate.limit < math.inf and not gate.limits_active:
        first = first.float().clamp(max=gate.limit)
    active = _active(first, gate)
    if gate.limits_active:
        active = active.float().clamp(max=gate.limit)
    up = up.float().clamp(-gate.limit, gate.limit) + gate.offset
    return (active.to(values.dtype).float() * up).to(values.dtype)
