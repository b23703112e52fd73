"""One token of each row through a gated delta rule layer, between its projections: the definition.

Convolution, gates, update of the state, output norm and its gate. Source: Yang, Kautz and Hatamizadeh, "Gated Delta
Networks" (2024), equation 10; it rounds where transformers' layers of Qwen3-Next and its successors round.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6  # of the norm of queries and keys


def check(q: Tensor, k: Tensor, v: Tensor, conv_state: Tensor, conv_weight: Tensor, state: Tensor) -> None:
    """Raise ValueError unless the shapes fit each other, and the states can be written in place."""
    batch, key_heads, dk = q.shape
    heads, dv = state.shape[1], state.shape[3]
    wanted = {
        "k": (k, (batch, key_heads, dk)),
        "v": (v, (batch, key_heads, heads // key_heads * dv)),
        "conv_weight": (conv_weight, (2 * key_heads * dk + heads * dv, conv_weight.shape[-1])),
        "conv_state": (conv_state, (batch, *conv_weight.shape)),
        "state": (state, (batch, heads, dk, dv)),
    }
    for name, (t, shape) in wanted.items():
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(t.shape)}")
    if state.dtype != torch.float32 or not state[:1].is_contiguous() or not conv_state[:1].is_contiguous():
        raise ValueError("state must be float32, and the states of a row contiguous")


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    state: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    beta_scale: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    """Read one token of each row into the states, and give the layer's output before its last projection.

    Key head ``h`` belongs to the ``R`` value heads from ``h R`` on.

    Args:
        q, k: ``[batch, Hk, Dk]``, as projected.
        v, z: ``[batch, Hk, R Dv]``; ``z`` is the gate of the output.
        a, b: ``[batch, Hk, R]``, for the decay and the strength of the update.
        conv_state: ``[batch, C, K]``, the last ``K`` inputs of the convolution: channels of ``q``, ``k``, ``v`` in this
            order. Written in place.
        conv_weight: ``[C, K]``; SiLU follows the convolution.
        state: float32 ``[batch, Hk R, Dk, Dv]``. Written in place.
        a_log, dt_bias: ``[Hk R]``.
        norm_weight, eps: ``[Dv]``, RMS norm of each head's output.
        beta_scale: factor of the update's strength, 2 where eigenvalues may be negative.
        valid: bool ``[batch]``, rows that have a token; None: all. Others keep their states, and give 0.

    Returns:
        ``[batch, Hk R Dv]``, of the dtype of ``q``.

    Raises:
        ValueError: shapes do not fit, or the state is not float32.
    """
    check(q, k, v, conv_state, conv_weight, state)
    batch, key_heads, dk = q.shape
    heads, dv, dtype = state.shape[1], state.shape[3], q.dtype
    keeps = torch.ones(batch, dtype=torch.bool, device=q.device) if valid is None else valid.view(batch)

    mixed = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)[..., None]
    window = torch.cat((conv_state[..., 1:], mixed), dim=-1)  # [batch, C, K]
    mixed = F.silu((window.float() * conv_weight.float()).sum(-1).to(dtype))
    conv_state.copy_(torch.where(keeps[:, None, None], window, conv_state))

    q, k, v = mixed.split((key_heads * dk, key_heads * dk, heads * dv), dim=1)
    q, k = (t.reshape(batch, key_heads, 1, dk).expand(-1, -1, heads // key_heads, -1).flatten(1, 2) for t in (q, k))
    q, k, v = q.float(), k.float(), v.reshape(batch, heads, dv).float()
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + L2_EPS) for t in (q, k))
    q = q * dk**-0.5

    decay = torch.exp(-a_log.float().exp() * F.softplus(a.flatten(1).float() + dt_bias.float()))  # [batch, heads]
    beta = (b.flatten(1).sigmoid() * beta_scale).float()
    after = state * decay[..., None, None]
    delta = (v - (after * k[..., None]).sum(-2)) * beta[..., None]
    after = after + k[..., None] * delta[..., None, :]
    out = (after * q[..., None]).sum(-2).to(dtype).float()  # [batch, heads, dv]
    state.copy_(torch.where(keeps[:, None, None, None], after, state))

    normed = (out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)
    out = (norm_weight * normed) * F.silu(z.reshape(batch, heads, dv).float())
    return torch.where(keeps[:, None], out.to(dtype).flatten(1), 0)
