"""Write new tokens into the ring of recent tokens: the definition."""

from __future__ import annotations

from torch import Tensor


def append(
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    recent_kv: Tensor,
    recent_valid: Tensor,
    length: Tensor,
    sinks: int,
) -> None:
    """Store ``q`` new tokens at columns ``length .. length + q - 1`` of every row.

    Column ``c`` lives at position ``sinks + c % R`` of the recent buffer, ``R`` being the size of its ring.

    Args:
        k: ``[batch, H, q, Dk]`` keys. ``q <= R``.
        v: ``[batch, H, q, Dv]`` values. Of latents (MLA) ``k`` may be the latent and ``v`` the rotary part; or ``k``
            the whole row and ``Dv`` 0.
        valid: ``[batch, q]`` bool, False for padding; ``None`` if no new token is padding.
        recent_kv: ``[batch, H, sinks + R, Dk + Dv]``, written in place.
        recent_valid: ``[batch, sinks + R]`` bool, written in place.
        length: int32 ``[1]``, columns cached before this call. Read on the device, not changed.
        sinks: positions of the recent buffer that come before the ring.
    """
    q, dk = k.shape[2], k.shape[3]
    ring = recent_kv.shape[2] - sinks
    at = int(length) % ring
    first = min(q, ring - at)  # tokens before the ring wraps
    for lo, hi, to in ((0, first, at), (first, q, 0)):
        if hi > lo:
            span = slice(sinks + to, sinks + to + hi - lo)
            recent_kv[:, :, span, :dk] = k[:, :, lo:hi]
            recent_kv[:, :, span, dk:] = v[:, :, lo:hi]
            recent_valid[:, span] = True if valid is None else valid[:, lo:hi]
