"""Copy listed blocks into device pages: the definition."""

from __future__ import annotations

from torch import Tensor

from ..quantise.reference import entries


def block_copy(
    kv: Tensor,
    pages: Tensor,
    copies: Tensor,
    n_copies: Tensor,
    *,
    scales: Tensor | None = None,
    split: int = 0,
) -> None:
    """``pages[copies[i, 1]] = kv[block, head]`` with ``block * H + head = copies[i, 0]``, for ``i < n_copies``.

    Args:
        kv: ``[num_blocks, H, B, W]``, in host memory or on a device; contiguous.
        pages: ``[F, B, W]`` of the same dtype, written in place; contiguous. May lie in host memory, too.
        copies: int32 ``[most, 2]``: source and page. A page is named once.
        n_copies: int32 ``[1]``, how many of them count.
        scales: float16 ``[num_blocks, H, B, 2]`` on the pages' device, contiguous: ``kv`` are int8 codes, and pages get
            what these stand for, in their own dtype (``ops.quantise``).
        split: entries of a row that the first scale is of.
    """
    listed = copies[: int(n_copies)].long()
    source, held = kv.flatten(0, 1), None if scales is None else scales.flatten(0, 1)
    found = entries(source, held, split, pages.dtype, listed[:, 0].to(kv.device))
    pages[listed[:, 1].to(pages.device)] = found.to(pages.device)
