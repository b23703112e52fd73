"""Route tokens to experts: the definition (DeepSeek-V3, section 2.1.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TOKENS = 64  # the kernels' limit
LOWEST = -1e30  # replaces NaN and -inf in the choice: below all others, and the sum of two stays finite


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts with the largest sigmoid score plus bias, within the best groups.

    A group is ranked by the sum of its two best experts.

    Args:
        x: ``[tokens, D]``.
        weight: ``[E, D]``.
        bias: ``[E]``, added for the choice only.
        top_k: experts per token.
        groups, top_groups: number of groups of consecutive experts, and how many of them a token may use.
        normalise: make the weights of a token sum to ``scale``.
        scale: factor of the weights.

    Returns:
        float32 logits ``[tokens, E]``, float32 weights ``[tokens, k]`` and int64 experts ``[tokens, k]``, best first.
        Ties go to the lower expert, and NaN ranks last. The experts of a token are distinct.
    """
    logits = F.linear(x.float(), weight.float())
    scores = logits.sigmoid()
    choice = (scores + bias).nan_to_num(LOWEST, posinf=float("inf")).clamp_min(LOWEST)
    members = choice.unflatten(-1, (groups, -1))
    best = members.topk(min(2, members.shape[-1]), dim=-1).values.sum(-1)  # [tokens, groups]
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    usable = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
    choice = members.masked_fill(~usable[..., None], float("-inf")).flatten(1)
    index = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, index)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * scale, index
