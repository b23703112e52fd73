"""Write new tokens into the ring of recent tokens: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import require_each_row


def append(
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    recent_kv: Tensor,
    past: Tensor,
    sinks: int,
) -> None:
    """Append ``q`` new tokens to every row, as its tokens ``past .. past + q - 1``.

    Token ``i`` of a row is stored at position ``sinks + i % R`` of the recent buffer, where ``R`` is the ring's size.

    Args:
        k: ``[batch, H, q, Dk]`` keys. ``q <= R``.
        v: ``[batch, H, q, Dv]`` values. With latents (MLA), ``k`` may be the latent and ``v`` the rotary part, or ``k``
            the whole token and ``Dv`` 0.
        valid: bool ``[batch]`` or ``[batch, 1]``: rows where it is False get no token. ``None``: all rows get theirs.
        recent_kv: ``[batch, H, sinks + R, Dk + Dv]``, written in place.
        past: int32 ``[batch]``, tokens of each row before this call. May be a strided column of a larger tensor. Read
            on the device, not changed.
        sinks: positions of the recent buffer that precede the ring.
    """
    batch, _, q, _ = k.shape
    require_each_row(batch, valid, past=past)
    ring = recent_kv.shape[2] - sinks
    row = torch.arange(batch, device=k.device) if valid is None else valid.flatten().nonzero()[:, 0]
    # Both terms are reduced first so that the sum cannot overflow.
    at = sinks + (past[row, None] % ring + torch.arange(q, device=k.device)) % ring  # [rows, q]
    recent_kv[row[:, None], :, at] = torch.cat((k, v), -1)[row].transpose(1, 2).to(recent_kv.dtype)
