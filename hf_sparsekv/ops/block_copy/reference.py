"""Copy listed blocks into frames: the definition."""

from __future__ import annotations

from torch import Tensor


def block_copy(kv: Tensor, frames: Tensor, copies: Tensor, n_copies: Tensor) -> None:
    """``frames[copies[i, 1]] = kv[slot, head]`` with ``slot * H + head = copies[i, 0]``, for ``i < n_copies``.

    Args:
        kv: ``[slots, H, B, W]``, in host memory or on a device; contiguous.
        frames: ``[F, B, W]`` of the same dtype, written in place; contiguous. May lie in host memory, too.
        copies: int32 ``[most, 2]``: source and frame. A frame is named once.
        n_copies: int32 ``[1]``, how many of them count.
    """
    listed = copies[: int(n_copies)].long()
    source = kv.flatten(0, 1)
    frames[listed[:, 1].to(frames.device)] = source[listed[:, 0].to(kv.device)].to(frames.device)
