"""The product of a gated MLP: the definition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, all ``[..., n]`` of one dtype; ``activation`` is one of ``ACTIVATIONS``."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up
