"""Route tokens to experts: the definition (DeepSeek-V3, section 2.1.2; Mixtral; gpt-oss)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TOKENS = 64  # the kernels' limit
LOWEST = -1e30  # replaces NaN and -inf in the choice: below all others, and the sum of two stays finite
SCORES = ("sigmoid", "softmax", "softmax_chosen")


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = False,
    scale: float = 1.0,
    scores: str = "sigmoid",
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts with the largest score, within the best groups.

    A group is ranked by the sum of its two best experts.

    Args:
        x: ``[tokens, D]``.
        weight: ``[E, D]``.
        bias: ``[E]``. With ``"sigmoid"`` it is added to scores for the choice only, otherwise to logits.
        top_k: experts per token.
        groups, top_groups: number of groups of consecutive experts, and how many of them a token may use.
        normalise: make the weights of a token sum to ``scale``.
        scale: factor of the weights.
        scores: of an expert: ``"sigmoid"`` of its float32 logit; its share in the ``"softmax"`` of all logits, or of
            those of the chosen experts (``"softmax_chosen"``). The latter two round logits and weights to the dtype of
            ``x``, as their models do.

    Returns:
        Logits ``[tokens, E]`` and weights ``[tokens, k]``, both float32 or rounded, and int64 experts ``[tokens, k]``,
        best first. Ties go to the lower expert, and NaN ranks last. The experts of a token are distinct.

    Raises:
        ValueError: unknown scores.
    """
    if scores not in SCORES:
        raise ValueError(f"scores must be one of {SCORES}, got {scores!r}")
    if scores == "sigmoid":
        logits = F.linear(x.float(), weight.float())
        shares = logits.sigmoid()
        choice = shares if bias is None else shares + bias
    else:
        logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
        shares = logits.float().softmax(-1) if scores == "softmax" else logits.float()
        choice = logits.float()
    choice = choice.nan_to_num(LOWEST, posinf=float("inf")).clamp_min(LOWEST)
    members = choice.unflatten(-1, (groups, -1))
    best = members.topk(min(2, members.shape[-1]), dim=-1).values.sum(-1)  # [tokens, groups]
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    usable = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
    choice = members.masked_fill(~usable[..., None], float("-inf")).flatten(1)
    index = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = shares.gather(1, index)
    if scores == "softmax_chosen":
        weights = weights.softmax(-1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, (weights * scale).to(logits.dtype), index
