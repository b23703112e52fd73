"""Losses of tokens: how far a sparse step's distribution of each is from full attention's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_AT_ONCE = 1 << 24  # logits that are compared at once: 64 MB in float32, several times


class Losses(NamedTuple):
    """Losses of tokens, ``[batch, n]`` each.

    Args:
        kl: KL divergence of the sparse distribution from full attention's, in nats.
        variation: total variation: half of the summed differences of all probabilities.
        same: bool, the likeliest token is the same.
        probability: that full attention gives the token.
    """

    kl: Tensor
    variation: Tensor
    same: Tensor
    probability: Tensor

    @property
    def numbers(self) -> Tensor:
        """All of them, float32 ``[batch, n, 4]``, as :class:`..kv.audited.Audited` has them."""
        return torch.stack((self.kl, self.variation, self.same.float(), self.probability), dim=-1)


def losses(full: Tensor, sparse: Tensor, tokens: Tensor) -> Losses:
    """Losses of ``tokens [batch, n]`` by the model's logits ``full`` and ``sparse``, ``[batch, n, vocabulary]``.

    In float32. A token that only full attention finds possible makes an infinite KL divergence. Logits that are no
    distribution make NaN.
    """
    batch, n, size = full.shape
    step = max(1, _AT_ONCE // (batch * size))
    parts = [_losses(*(one[:, i : i + step] for one in (full, sparse, tokens))) for i in range(0, n, step)]
    return parts[0] if len(parts) == 1 else Losses(*(torch.cat(one, dim=1) for one in zip(*parts)))


def _losses(full: Tensor, sparse: Tensor, tokens: Tensor) -> Losses:
    log_p, log_q = full.float().log_softmax(-1), sparse.float().log_softmax(-1)
    same = log_p.argmax(-1) == log_q.argmax(-1)
    p = log_p.exp()
    kl = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1).clamp_min(0.0)
    variation = 0.5 * (p - log_q.exp()).abs().sum(-1)
    return Losses(kl, variation, same, p.gather(-1, tokens[..., None])[..., 0])
