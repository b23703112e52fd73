"""The routed experts of a mixture-of-experts layer: the definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .gates import Gate, between
from .mxfp4 import Mxfp4, dequantise


def products(x: Tensor, weight: Tensor | Mxfp4, chosen: Tensor, bias: Tensor | None) -> Tensor:
    """``weight[chosen] x + bias[chosen]`` of each row, rounded after the product and after the sum."""
    if isinstance(weight, Mxfp4):
        rows = dequantise(Mxfp4(weight.codes[chosen], weight.scales[chosen]), x.dtype)
    else:
        rows = weight[chosen]
    out = torch.bmm(rows, x[..., None]).squeeze(-1)
    return out if bias is None else (out.float() + bias[chosen].float()).to(out.dtype)


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor | Mxfp4,
    down: Tensor | Mxfp4,
    gate: Gate | Callable[[Tensor], Tensor],
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """``sum_i weights_i * (down[e_i] between(gate_up[e_i] x))``, with biases after both products.

    Rounds as transformers' ``"batched_mm"`` does, which first copies the chosen weights.

    Args:
        x: ``[tokens, D]``.
        index: integer ``[tokens, k]``, the experts of each token. Others than ``0 .. E - 1`` add nothing.
        weights: ``[tokens, k]``, float32 or in the dtype of ``x``.
        gate_up: ``[E, n, D]`` in the dtype of ``x``, with ``n = gate.rows * I``; one of the last two dimensions is
            contiguous. Transposed weights are given as a view.
        down: ``[E, D, I]``, likewise.
        gate: what stands between the products (:class:`.gates.Gate`); or a function of ``[pairs, n]`` that returns
            ``[pairs, I]``.
        gate_up_bias: ``[E, n]``.
        down_bias: ``[E, D]``.

    Returns:
        ``[tokens, D]``.
    """
    (tokens, k), count = index.shape, gate_up.shape[0]
    chosen = index.reshape(-1).long()
    present = (chosen >= 0) & (chosen < count)
    chosen = torch.where(present, chosen, 0)
    rows = x.repeat_interleave(k, dim=0)
    middle = between(products(rows, gate_up, chosen, gate_up_bias), gate)
    out = products(middle, down, chosen, down_bias) * weights.reshape(-1, 1)
    return out.masked_fill(~present[:, None], 0).view(tokens, k, down.shape[1]).sum(1).to(x.dtype)
