"""One token of each row through a Mamba 2 layer, between its projections: the definition.

Convolution, update of the state, skip connection, gate and norm. Source: Dao and Gu, "Transformers are SSMs" (2024),
section 7; the arithmetic is in float32, as in the authors' kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def check(
    mixed: Tensor, gate: Tensor, conv_state: Tensor, conv_weight: Tensor, state: Tensor, norm_groups: int
) -> None:
    """Raise ValueError unless the shapes fit each other, and the states can be written in place."""
    batch, heads, p, n = state.shape
    channels = mixed.shape[1]
    wanted = {
        "gate": (gate, (batch, heads * p)),
        "mixed": (mixed, (batch, channels)),
        "conv_weight": (conv_weight, (channels, conv_weight.shape[-1])),
        "conv_state": (conv_state, (batch, *conv_weight.shape)),
    }
    for name, (t, shape) in wanted.items():
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(t.shape)}")
    groups, rest = divmod(channels - heads * p, 2 * n)
    if rest or groups < 1 or heads % groups:
        raise ValueError(f"{channels} channels are not those of {heads} heads of {p} with a state of {n}")
    if heads * p % norm_groups:
        raise ValueError(f"{heads * p} channels cannot be normalised in {norm_groups} groups")
    if not state[:1].is_contiguous() or not conv_state[:1].is_contiguous():
        raise ValueError("the states of a row must be contiguous")


def mamba2_step(
    mixed: Tensor,
    gate: Tensor,
    dt: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    state: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    norm_groups: int = 1,
    valid: Tensor | None = None,
) -> Tensor:
    """Read one token of each row into the states, and give the layer's output before its last projection.

    Args:
        mixed: ``[batch, C]``, as projected: inputs of ``H`` heads of ``P`` channels, then ``B`` and ``C`` of ``G``
            groups of heads, ``N`` numbers each.
        gate: ``[batch, H P]``. dt: ``[batch, H]``.
        conv_state: ``[batch, C, K]``, the last ``K`` inputs of the convolution. Written in place.
        conv_weight, conv_bias: ``[C, K]``, and ``[C]`` or None; SiLU follows the convolution.
        state: ``[batch, H, P, N]``. Written in place.
        a_log, d, dt_bias: ``[H]``.
        norm_weight, eps: ``[H P]``, RMS norm after the gate, of ``norm_groups`` groups of channels by themselves.
        valid: bool ``[batch]``, rows that have a token; None: all. Others keep their states, and give 0.

    Returns:
        ``[batch, H P]``, of the dtype of ``mixed``.

    Raises:
        ValueError: shapes do not fit.
    """
    check(mixed, gate, conv_state, conv_weight, state, norm_groups)
    batch, heads, p, n = state.shape
    dtype = mixed.dtype
    keeps = torch.ones(batch, dtype=torch.bool, device=mixed.device) if valid is None else valid.view(batch)

    window = torch.cat((conv_state[..., 1:], mixed[..., None]), dim=-1)  # [batch, C, K]
    mixed = (window.float() * conv_weight.float()).sum(-1)
    mixed = F.silu((mixed if conv_bias is None else mixed + conv_bias.float()).to(dtype)).float()
    conv_state.copy_(torch.where(keeps[:, None, None], window, conv_state))

    groups = (mixed.shape[1] - heads * p) // (2 * n)
    x, b, c = mixed.split((heads * p, groups * n, groups * n), dim=1)
    x = x.reshape(batch, heads, p)
    b, c = (t.reshape(batch, groups, 1, n).expand(-1, -1, heads // groups, -1).flatten(1, 2) for t in (b, c))
    step = F.softplus(dt.float() + dt_bias.float())  # [batch, heads]
    decay = torch.exp(-step * a_log.float().exp())
    after = state.float() * decay[..., None, None] + (step[..., None] * x)[..., None] * b[:, :, None]
    out = (after * c[:, :, None]).sum(-1) + x * d.float()[:, None]
    state.copy_(torch.where(keeps[:, None, None, None], after.to(state.dtype), state))

    out = out.to(dtype).float().flatten(1) * F.silu(gate.float())
    parts = out.view(batch, norm_groups, heads * p // norm_groups)
    normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(1).to(dtype)
    return torch.where(keeps[:, None], norm_weight * normed, 0)
