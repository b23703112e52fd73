"""A later chunk of a prompt: attention over its past and over itself, merged exactly.

torch reaches cuDNN's kernels for whole prompts only: a chunk that sees all of its past takes the flash kernels, which
do 60 % as much on a Hopper GPU. Without the causal corner both halves are shapes that cuDNN knows, and their
log-sum-exps tell how to weigh them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

LEAST = 512  # queries; below, two launches and a merge cost more than they save


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over two sets of keys from the attention over each.

    Args:
        out, other: ``[batch, Hq, q, Dv]``.
        lse, other_lse: float32 ``[batch, Hq, q]``, natural log of the sum of exponentials of the logits.

    Returns:
        ``[batch, Hq, q, Dv]`` in the dtype of ``out``.
    """
    weight = torch.sigmoid(lse - other_lse)[..., None]  # of `out`
    return torch.lerp(other.float(), out.float(), weight).to(out.dtype)


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`chunk_attention` is the quicker way for the last ``q`` of ``n`` columns, and possible."""
    past = key.shape[2] - query.shape[2]
    if not query.is_cuda or query.shape[2] < LEAST or past < LEAST:
        return False
    if torch.cuda.get_device_capability(query.device)[0] < 9:
        return False
    grouped = query.shape[1] != key.shape[1]
    halves = ((slice(None, past), False), (slice(past, None), True))
    return all(
        can_use_cudnn_attention(SDPAParams(query, key[:, :, at], value[:, :, at], None, 0.0, causal, grouped))
        for at, causal in halves
    )


def _cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(query.shape[:3])


def chunk_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, attend=_cudnn) -> Tensor:
    """Causal attention of the last ``q`` columns over all ``n``.

    Args:
        query: ``[batch, Hq, q, D]``, of columns ``n - q .. n - 1``.
        key, value: ``[batch, H, n, D]``.
        attend: ``(query, key, value, causal, scale)`` to output and log-sum-exp.

    Returns:
        ``[batch, Hq, q, D]``.
    """
    past = key.shape[2] - query.shape[2]
    before = attend(query, key[:, :, :past], value[:, :, :past], False, scale)
    return merge(*before, *attend(query, key[:, :, past:], value[:, :, past:], True, scale))
