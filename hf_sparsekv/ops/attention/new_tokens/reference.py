"""Attention of some new tokens to each other, beside attention to what was there before them: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def new_tokens(
    query: Tensor, key: Tensor, value: Tensor, past: Tensor, lse: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Causal softmax attention of new tokens, from that to all earlier ones and its denominators.

    Args:
        query: ``[batch, Hq, n, Dk]``.
        key, value: of the same tokens, ``[batch, H, n, D]``.
        past: float32 ``[batch, Hq, n, Dv]``, attention of the queries to earlier tokens.
        lse: float32 ``[batch, Hq, n]``, natural logarithm of its sum of exponentials; -inf where there was nothing.
        scale: softmax scaling.
        softcap: ``softcap * tanh(logit / softcap)`` stands for a logit.

    Returns:
        ``[batch, Hq, n, Dv]`` in the queries' dtype.
    """
    batch, q_heads, n, _ = query.shape
    heads = key.shape[1]
    group = q_heads // heads
    asked = query.reshape(batch, heads, group * n, -1).float()
    logits = asked @ key.float().transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    later = torch.ones(n, n, dtype=torch.bool, device=query.device).triu(1)
    logits = logits.view(batch, q_heads, n, n).masked_fill(later, float("-inf"))
    weights = torch.cat((lse[..., None], logits), dim=-1).softmax(-1)
    new = weights[..., 1:].reshape(batch, heads, group * n, n) @ value.float()
    return torch.addcmul(new.view_as(past), weights[..., :1], past).to(query.dtype)
