"""Copy listed blocks into device pages, or all blocks of a block table into a buffer: the definitions."""

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
        pages: ``[F, B, W]`` of the same dtype, written in place; contiguous. May be in host memory, too.
        copies: int32 ``[most, 2]``: source and page. No page appears twice.
        n_copies: int32 ``[1]``, how many of them are made.
        scales: float16 ``[num_blocks, H, 2 * split + B]`` on the pages' device, contiguous. With them ``kv`` holds int8
            codes, which are dequantised to the pages' dtype (``ops.storage.quantise``).
        split: leading entries of a token that are its key.
    """
    listed = copies[: int(n_copies)].long()
    source, held = kv.flatten(0, 1), None if scales is None else scales.flatten(0, 1)
    found = entries(source, held, split, pages.dtype, listed[:, 0].to(kv.device))
    pages[listed[:, 1].to(pages.device)] = found.to(pages.device)


def gather_blocks(
    kv: Tensor, block_table: Tensor, out: Tensor, *, scales: Tensor | None = None, split: int = 0
) -> None:
    """``out[r, h, i] = kv[block_table[r, i], h]``: the blocks of each row, in order.

    Args:
        kv: ``[num_blocks, H, B, W]``, in host memory or on a device; contiguous.
        block_table: int32 ``[rows, n]`` on the device of ``out``. Invalid ids give arbitrary blocks.
        out: ``[rows, H, m, B, W]`` of the same dtype, m >= n, contiguous; the first ``n`` blocks are written.
        scales, split: as of :func:`block_copy`.
    """
    rows, n = block_table.shape
    ids = block_table.flatten().long().clamp(0, len(kv) - 1)
    found = entries(kv, scales, split, out.dtype, ids.to(kv.device)).to(out.device)
    out[:, :, :n] = found.unflatten(0, (rows, n)).transpose(1, 2)
