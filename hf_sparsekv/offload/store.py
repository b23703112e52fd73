"""What one cache layer holds: sealed blocks in slots, recent tokens in a ring, sinks beside it.

Columns are positions of the attention mask: all rows of a padded batch fill and seal a block at the same step, and
padding is a matter of validity, not of place. Block ``b`` is columns ``b * block_size ..``; blocks ``0 .. sealed - 1``
are in slots, younger columns in the ring, where column ``c`` lives at ``c % ring``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.exact import AttentionSpec
from ..config import SparseConfig
from ..ops.append import append
from ..ops.sparse_decode import sparse_decode
from .counters import Counters
from .frames import FramePools, Residents
from .lasting import DeviceLength, lasting, take_rows
from .pool import BlockPool, HostBudget, bucket
from .sealing import VALID, Indexer, Sealing

_SEAL_BYTES = 1 << 26  # blocks are sealed in pieces of about this size, which bounds the temporaries of a long prompt


def ring_tokens(config: SparseConfig) -> int:
    """Tokens that the ring of recent tokens holds: window and drafts, and a block that fills up behind them."""
    recent = config.window + config.max_draft
    return (-(-recent // config.block_size) + 1) * config.block_size


class LayerStore(Sealing):
    """KV of one layer for ``batch`` rows.

    Attributes:
        length: columns cached (host int).
        sealed: blocks in slots (host int).
        padded: some column may be padding.
        slots: int32 ``[batch, cap]``, slot of each sealed block of each row; -1 elsewhere.
        near_kv: ``[batch, H, sinks + ring, Dk + Dv]``.
        near_valid: bool ``[batch, sinks + ring]``: entries to attend to. Sealing a block clears its entries.
        seen: int32 ``[batch]``, valid tokens in sealed blocks.
    """

    @lasting
    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        config: SparseConfig,
        host: HostBudget | None,
        clock: DeviceLength,
        frames: FramePools | None = None,
    ) -> None:
        self.config, self.clock = config, clock
        self.batch, self.heads, _, self.key_dim = k.shape
        self.value_dim = v.shape[3]
        self.dtype, self.device = k.dtype, k.device
        self.block_size, self.sinks, self.ring = config.block_size, config.sinks, ring_tokens(config)
        self.length = self.sealed = 0
        self.padded = False
        self.fixed = False  # a step is being captured: shapes may not depend on what is cached
        expected = config.max_length or k.shape[2]
        self.pool = BlockPool(
            heads=self.heads,
            block_size=self.block_size,
            token_dim=self.key_dim + self.value_dim,
            dtype=self.dtype,
            device=self.device,
            host=host,
            capacity=bucket(-(-expected // self.block_size) * self.batch),
        )
        self.slots = self._ints((self.batch, bucket(-(-expected // self.block_size))), -1)
        near = self.sinks + self.ring
        self.near_kv = k.new_zeros(self.batch, self.heads, near, self.key_dim + self.value_dim)
        self.near_valid = torch.zeros(self.batch, near, dtype=torch.bool, device=self.device)
        self.seen = self._ints((self.batch,), 0)
        self.residents = None if frames is None else Residents(frames, self.pool)
        self.pool.register(self)
        self.counters = Counters(self.batch, self.heads, self.device)

    @lasting
    def _ints(self, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    # ------------------------------------------------------------------ writing

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Put a few new tokens into the ring: ``k, v [batch, H, q, D]``, ``valid [batch, q]`` bool or None."""
        length = self.clock.held(self.device) if self.fixed else self.clock.at(self.device, self.length)
        append(k, v, valid, self.near_kv, self.near_valid, length, self.sinks)
        self.padded |= valid is not None
        self.length += k.shape[2]

    def sealable(self, length: int) -> int:
        """Blocks that are older than window and drafts once ``length`` columns are cached."""
        recent = self.config.window + self.config.max_draft
        return max(self.sealed, (length - recent) // self.block_size, 0)

    def extend(self, k: Tensor, v: Tensor, valid: Tensor | None, indexer: Indexer) -> None:
        """Cache any number of new tokens, sealing what has become old on the way."""
        end = self.length + k.shape[2]
        target = self.sealable(end)
        if valid is not None:
            self.padded = True
        old = self.length - self.sealed * self.block_size  # columns in the ring
        piece = max(1, _SEAL_BYTES // (self.batch * self.heads * self.block_size * self.near_kv.shape[3] * k.itemsize))
        start = self.sealed
        for lo in range(start, target, piece):
            hi = min(lo + piece, target)
            kv, ok = self._columns(lo, hi, start * self.block_size, old, k, v, valid)
            self._seal(kv, ok, indexer)
        # What remains goes to the ring; older columns that stay unsealed are there already.
        first = max(target * self.block_size, self.length)
        skip = first - self.length
        self._clear(start, target)
        self.length = first
        if skip < k.shape[2]:
            self.append(k[:, :, skip:], v[:, :, skip:], None if valid is None else valid[:, skip:])

    def _ring_index(self, start: int, end: int) -> Tensor:
        """Near-buffer positions of columns ``start .. end - 1``."""
        return self.sinks + torch.arange(start, end, device=self.device) % self.ring

    # ------------------------------------------------------------------ reading

    @property
    def table(self) -> Tensor:
        """Slots of the sealed blocks, ``[batch, sealed]``; with ``fixed`` shapes ``[batch, cap]``, -1 for none."""
        return self.slots if self.fixed else self.slots[:, : self.sealed]

    @property
    def near_length(self) -> int:
        """Columns in the ring."""
        return self.length - self.sealed * self.block_size

    def forget(self, slots: Tensor) -> None:
        """The pool gives these slots to other blocks; nobody has named them for a while."""
        if self.residents is not None:
            self.residents.forget(slots)

    def attend(
        self,
        q: Tensor,
        ids: Tensor | None,
        granularity: str,
        spec: AttentionSpec,
        placed: bool = False,
        places: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query per row over the near tokens and ``ids`` (see :func:`..ops.sparse_decode`).

        ``placed``: the ids are places in the frames of :attr:`residents`, or ``places`` are those of the ids.
        """
        self.count_padded(granularity)
        return sparse_decode(
            q,
            self.pool.kv,
            self.pool.fields["flags"],
            self.table,
            ids,
            self.near_kv,
            self.near_valid,
            granularity=granularity,
            value_dim=self.value_dim,
            sinks=self.sinks,
            scale=spec.scale,
            softcap=spec.softcap,
            sink_logits=spec.sink_logits,
            attended=self.counters.attended,
            frames=self.residents.pool.frames if placed else None,
            places=places,
            from_host=None if self.pool.host is None else self.counters.from_host,
        )

    def count_padded(self, granularity: str) -> None:
        """The device's count of a step of padded rows; of others the host knows enough."""
        if self.padded:
            counters = self.counters
            ring = self.near_valid[:, self.sinks :].sum()
            counters.context[0] += self.heads * (self.seen.sum() + ring)
            counters.near[0] += self.heads * (ring if granularity == "all" else self.near_valid.sum())

    def count_step(self, granularity: str) -> None:
        """The host's count of a step that attended with this granularity."""
        counters, dense = self.counters, granularity == "all"
        counters.steps += 1
        counters.dense += dense
        counters.sparse += not dense
        if not self.padded:
            sinks = 0 if dense else min(self.sinks, self.sealed * self.block_size)
            counters.context[1] += self.batch * self.heads * self.length
            counters.near[1] += self.batch * self.heads * (self.near_length + sinks)

    def count_blocks(self, ids: Tensor) -> None:
        """The coarse level kept ``ids``."""
        self.counters.blocks += (ids >= 0).sum()

    def count_index(self, size: int) -> None:
        """``size`` bytes of bounds or labels were read."""
        self.counters.index_bytes += size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value, one KV head."""
        return (self.key_dim + self.value_dim) * self.dtype.itemsize

    def materialise(self) -> tuple[Tensor, Tensor]:
        """All cached keys and values on the device, ``[batch, H, length, Dk]`` and ``[..., Dv]``."""
        parts = []
        if self.sealed:
            home = self.pool.kv.device
            blocks = self.pool.kv[self.table.to(home).long()].to(self.device)  # [batch, n, H, B, Dk + Dv]
            if self.pool.host is not None:
                self.counters.to_device_bytes += blocks.nbytes
            parts.append(blocks.transpose(1, 2).flatten(2, 3))
        parts.append(self.near_kv[:, :, self._ring_index(self.sealed * self.block_size, self.length)])
        kv = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return kv[..., : self.key_dim], kv[..., self.key_dim :]

    def valid_columns(self) -> Tensor:
        """Validity of all cached columns, bool ``[batch, length]``."""
        flags = self.pool.fields["flags"][self.table.long()].flatten(1, 2)
        ring = self.near_valid[:, self._ring_index(self.sealed * self.block_size, self.length)]
        return torch.cat(((flags & VALID) > 0, ring), dim=1)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Changes when a tensor that a captured step uses has moved."""
        return (
            *self.pool.addresses,
            self.slots.data_ptr(),
            self.near_kv.data_ptr(),
            self.counters.attended.data_ptr(),
            *(() if self.residents is None else self.residents.addresses),
        )

    def sealed_blocks(self) -> tuple[Tensor, Tensor]:
        """Sealed blocks on the device, ``[sealed, batch, H, block_size, Dk + Dv]``, and their flags."""
        home = self.pool.kv.device
        at = self.table.T
        return self.pool.kv[at.to(home).long()].to(self.device), self.pool.fields["flags"][at.long()]

    # ------------------------------------------------------------------ changing

    def reindex(self, indexer: Indexer) -> None:
        """Index the sealed blocks anew, in slots of this store's own: what is shared keeps its index."""
        kv, flags = self.sealed_blocks()
        with self.pool.lock:
            self.slots[:, : self.sealed] = self._to_slots(kv, flags, indexer.index(kv, flags))

    @lasting
    def crop(self, length: int) -> None:
        """Keep the first ``length`` columns.

        A block that would leave the window short is taken back into the ring; its slot is left to whoever shares it.
        """
        if length >= self.length:
            return
        size = self.block_size
        sealed = min(self.sealed, max(0, (length - self.config.window) // size))
        if sealed < self.sealed:
            end = min(self.sealed * size, length)
            if end > sealed * size:
                at = self.slots[:, sealed : -(-end // size)]
                home = self.pool.kv.device
                kv = self.pool.kv[at.to(home).long()].to(self.device).transpose(1, 2).flatten(2, 3)
                ok = (self.pool.fields["flags"][at.long()].flatten(1, 2) & VALID) > 0
                ring = self._ring_index(sealed * size, end)
                self.near_kv[:, :, ring] = kv[:, :, : end - sealed * size]
                self.near_valid[:, ring] = ok[:, : end - sealed * size]
            kept = (self.pool.fields["flags"][self.slots[:, :sealed].long()] & VALID) > 0
            self.seen.copy_(kept.flatten(1).sum(1, dtype=torch.int32))  # a captured step knows the address
            self.slots[:, sealed:] = -1
            place = torch.arange(self.sinks, device=self.device)
            self.near_valid[:, : self.sinks] = place < self.seen[:, None]
            self.sealed = sealed
        self.near_valid[:, self._ring_index(length, self.sealed * size + self.ring)] = False
        self.length = length

    @lasting
    def map_rows(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was. Sealed blocks are shared, not copied."""
        index = index.to(self.device)
        for name in ("slots", "near_kv", "near_valid", "seen"):
            setattr(self, name, take_rows(getattr(self, name), index))
        self.batch = index.shape[0]
        self.counters.regroup(self.batch)

    def fits(self, k: Tensor, v: Tensor) -> bool:
        """This store could have been made for ``k, v [batch, H, q, D]``."""
        mine = (self.batch, self.heads, self.key_dim, self.value_dim, self.dtype, self.device)
        return mine == (k.shape[0], k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)

    def reset(self) -> None:
        """Forget everything but keep the memory."""
        self.length = self.sealed = 0
        self.padded = False
        self.slots.fill_(-1)
        self.near_valid.fill_(False)
        self.seen.zero_()
        if self.residents is not None:
            self.residents.clear()
        if not self.pool.shared:
            self.pool.release_all()
        self.counters.clear()

    @lasting
    def copy(self, clock: DeviceLength, frames: FramePools | None = None) -> LayerStore:
        """An independent store that shares the sealed blocks."""
        new = object.__new__(LayerStore)
        new.__dict__.update(self.__dict__)
        for name in ("slots", "near_kv", "near_valid", "seen"):
            setattr(new, name, getattr(self, name).clone())
        new.clock = clock
        new.counters = self.counters.copy()
        new.residents = None if frames is None else Residents(frames, new.pool)
        new.pool.register(new)
        return new

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated on the device and in host memory."""
        own = sum(t.nbytes for t in (self.slots, self.near_kv, self.near_valid, self.seen))
        own += 0 if self.residents is None else self.residents.nbytes
        device, host = self.pool.nbytes()
        return device + own, host
