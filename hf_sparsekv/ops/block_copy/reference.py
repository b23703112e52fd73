"""Copy listed blocks into device pages: the definition."""

from __future__ import annotations

from torch import Tensor


def block_copy(kv: Tensor, pages: Tensor, copies: Tensor, n_copies: Tensor) -> None:
    """``pages[copies[i, 1]] = kv[block, head]`` with ``block * H + head = copies[i, 0]``, for ``i < n_copies``.

    Args:
        kv: ``[num_blocks, H, B, W]``, in host memory or on a device; contiguous.
        pages: ``[F, B, W]`` of the same dtype, written in place; contiguous. May lie in host memory, too.
        copies: int32 ``[most, 2]``: source and page. A page is named once.
        n_copies: int32 ``[1]``, how many of them count.
    """
    listed = copies[: int(n_copies)].long()
    source = kv.flatten(0, 1)
    pages[listed[:, 1].to(pages.device)] = source[listed[:, 0].to(kv.device)].to(pages.device)
