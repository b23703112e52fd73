"""The routed experts of a mixture-of-experts layer: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gated.reference import gated

MAX_TOKENS = 16  # of the kernels: each token reads its experts again, so larger batches should share the reads


def experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """``sum_i weights_i * down[e_i] (activation(gate) * up)`` with ``[gate, up] = gate_up[e_i] x``.

    Rounds as transformers' ``"batched_mm"`` does, which first copies the chosen weights.

    Args:
        x: ``[tokens, D]``.
        index: integer ``[tokens, k]``, the experts of each token.
        weights: ``[tokens, k]``, float32 or in the dtype of ``x``.
        gate_up: ``[E, 2 * I, D]``.
        down: ``[E, D, I]``.
        activation: ``"silu"`` or ``"gelu_tanh"``.

    Returns:
        ``[tokens, D]``.
    """
    tokens, k = index.shape
    chosen = index.reshape(-1)
    rows = x.repeat_interleave(k, dim=0)[..., None]  # [tokens * k, D, 1]
    gate, up = torch.bmm(gate_up[chosen], rows).squeeze(-1).chunk(2, dim=-1)
    out = torch.bmm(down[chosen], gated(gate, up, activation)[..., None]).squeeze(-1)
    return (out * weights.reshape(-1, 1)).view(tokens, k, x.shape[1]).sum(1).to(x.dtype)
