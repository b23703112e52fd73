"""Reading blocks back: all that a layer has cached, in one piece, on the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor

from .sealing import VALID


class Reading:
    """How a :class:`LayerStore` gives its blocks back."""

    def gathered_shape(self, columns: int) -> tuple[int, ...]:
        """Of a buffer that holds ``columns`` columns in blocks: ``[batch, H, blocks, block_size, Dk + Dv]``."""
        return (self.batch, self.heads, -(-columns // self.block_size), self.block_size, self.width)

    def read_blocks(self, out: Tensor) -> None:
        """Copy the sealed blocks to the device, into the front of ``out`` (see :meth:`gathered_shape`)."""
        self._read(0, self.sealed, out)
        if self.pool.host is not None:
            self.counters.to_device_bytes += self.batch * self.heads * self.sealed * self.block_size * self.token_bytes

    def _read(self, first: int, end: int, out: Tensor) -> None:
        """Copy sealed blocks ``first .. end - 1`` into the front of ``out`` (see :meth:`gathered_shape`)."""
        self.settle()
        self.pool.read(self.slots[:, first:end], out)

    def materialise(self, k: Tensor | None = None, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All cached keys and values on the device, followed by ``k, v [batch, H, q, D]``, which are not cached yet.

        Returns:
            ``[batch, H, length + q, Dk]`` and ``[..., Dv]``: views of one tensor, which the next but one call of a
            later chunk may overwrite.
        """
        size, columns = self.block_size, self.length + (0 if k is None else k.shape[2])
        out = None if k is None or self.lanes is None else self.lanes.arrived(self)
        if out is None:
            out = torch.empty(self.gathered_shape(columns), dtype=self.dtype, device=self.device)
            self.read_blocks(out)
        kv = out.flatten(2, 3)
        near = slice(self.sealed * size, self.length)
        kv[:, :, near] = self.near_kv[:, :, self._ring_index(near.start, near.stop)]
        if k is not None:
            kv[:, :, self.length : columns, : self.split] = k
            kv[:, :, self.length : columns, self.split :] = v
        kv = kv[:, :, :columns]
        return kv[..., : self.split], kv[..., self.split :]

    def valid_columns(self) -> Tensor:
        """Validity of all cached columns, bool ``[batch, length]``."""
        flags = self.pool.fields["flags"][self.table.long()].flatten(1, 2)
        ring = self.near_valid[:, self._ring_index(self.sealed * self.block_size, self.length)]
        return torch.cat(((flags & VALID) > 0, ring), dim=1)

    def sealed_blocks(self) -> tuple[Tensor, Tensor]:
        """Sealed blocks on the device, ``[sealed, batch, H, block_size, Dk + Dv]``, and their flags."""
        out = torch.empty(self.gathered_shape(self.sealed * self.block_size), dtype=self.dtype, device=self.device)
        self._read(0, self.sealed, out)
        return out.permute(2, 0, 1, 3, 4), self.pool.fields["flags"][self.table.T.long()]
