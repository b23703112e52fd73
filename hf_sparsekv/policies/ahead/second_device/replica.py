"""A layer's store with a replica on another device, which caches the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, overload

import torch
from torch import Tensor

from ....kv.row_table import RowTable
from ....kv.rows import Rows, Taken
from ....kv.store import LayerStore
from ....ops._dispatch import use_triton
from ....tensors import no_inference_mode

if TYPE_CHECKING:
    from typing_extensions import Self

# Layers that a captured step chooses for at a time: selecting and packing leave room. Measured on two H200s, 8 x 32k,
# 90 % new tokens a step: 11.9 ms a token, with one 12.9.
STREAMS = 2


class PeerDevice:
    """A second device and the order of its work: one stream there, and one here that hands things over.

    In captured steps :data:`STREAMS` streams there take turns by layer, each with memory of its own.

    Copies between GPUs make both their current streams wait for each other. So they run on streams of their own: the
    computation of this device waits for nothing that the other one does.

    Raises:
        ValueError: there is no such GPU.
    """

    @no_inference_mode
    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            found = torch.cuda.device_count()
            if (device.index or 0) >= found:
                raise ValueError(
                    f"cache_rank={str(device)!r}, but torch finds {found} CUDA device(s): choose another, or 'stream'"
                )
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._others = [torch.cuda.Stream(device) for _ in range(STREAMS - 1)] if self.stream is not None else []
        self._forked = False  # a captured step has work in flight there
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._buffers: dict[tuple, Tensor] = {}
        self._met: set[torch.device] = set()
        self._owes = False  # work was launched that no stream has waited for
        with self.on_stream():
            self.enabled = torch.ones(1, dtype=torch.int32, device=device)  # 0: trial runs are to copy nothing
            self._gate = torch.zeros(1, dtype=torch.int32, device=device)

    def __deepcopy__(self, memo: dict) -> PeerDevice:
        return self

    @no_inference_mode
    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, stream_index: int = 0) -> Tensor:
        """Memory there that the layers of a lane use one after the other.

        Never freed: captured graphs hold these addresses, and a graph captured on another device has no memory pool
        here.
        """
        key = (name, tuple(shape), dtype, stream_index)
        if key not in self._buffers:
            with self._current():
                self._buffers[key] = torch.empty(shape, dtype=dtype, device=self.device)
        return self._buffers[key]

    @overload
    def reach(self, name: str, tensor: Tensor) -> Tensor: ...
    @overload
    def reach(self, name: str, tensor: Tensor | None) -> Tensor | None: ...
    def reach(self, name, tensor):
        """``tensor`` where operators there can read it: where it is, over peer access, or a copy in such memory.

        Only Triton's kernels are indifferent to where their operands lie. A step's few tokens are read in place because
        a copy makes both devices wait for each other twice.
        """
        if tensor is None or (tensor.is_cuda and use_triton(self.enabled)):
            return tensor
        return self.buffer(name, tensor.shape, tensor.dtype).copy_(tensor)

    def introduce(self, home: torch.device) -> None:
        """Each device may read and write the other's memory from here on.

        Raises:
            ValueError: there is no way between them.
        """
        if self.stream is None or home.type != "cuda" or home == self.device or home in self._met:
            return
        for one, other in ((home, self.device), (self.device, home)):
            if not torch.cuda.can_device_access_peer(one, other):
                raise ValueError(f"{one} has no peer access to {other}: choose another cache_rank, or 'stream'")
            torch.zeros(1, device=one).to(other)  # torch enables it with the first copy
        self._met.add(home)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no chosen token is copied. Selections of steps in flight are still copied."""
        try:
            with self.after_all_steps():
                self.enabled.zero_()
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """Chosen tokens are copied from here on."""
        with self.on_stream():
            self.enabled.fill_(1)

    def on_stream(self) -> AbstractContextManager:
        """Work inside runs in the order of the selections there, on their stream."""
        self._owes = True
        return self._current()

    def after_all_steps(self) -> AbstractContextManager:
        """As :meth:`on_stream`, and after all steps in flight: captured ones are in the order of their own device."""
        for home in self._side:
            assert self.stream is not None
            self.stream.wait_stream(torch.cuda.current_stream(home))
        return self.on_stream()

    def _current(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def entered(self, home: torch.device, *used: Tensor | None) -> Iterator[None]:
        """Work inside runs on the other device, after all launches so far on ``home``'s current stream.

        Args:
            used: tensors that are read inside; those of ``home`` are kept until that is done.
        """
        if self.stream is None:
            yield
            return
        if home not in self._side:
            self._side[home] = torch.cuda.Stream(home)
        side = self._side[home]
        side.wait_stream(torch.cuda.current_stream(home))
        for tensor in used:
            if tensor is not None and tensor.device == home:
                for stream in (side, self.stream):
                    tensor.record_stream(stream)
        self.stream.wait_stream(side)
        self._owes = True
        with torch.cuda.stream(side), torch.cuda.stream(self.stream):
            yield

    def stream_index(self, layer: int) -> int:
        """The stream that a layer's captured work runs on."""
        return layer % (1 + len(self._others))

    @contextmanager
    def forked(self, home: torch.device, layer: int) -> Iterator[None]:
        """As :meth:`entered`, for a layer of a captured step: the current stream is one beside the computation.

        :meth:`rejoin` ends it, for all layers.
        """
        if self.stream is None:
            yield
            return
        side = torch.cuda.current_stream(home)
        if not self._forked:
            self._forked = True
            self.stream.wait_stream(side)
            for other in self._others:  # after whatever is in flight there; and a part of the capture
                other.wait_stream(self.stream)
        stream = (self.stream, *self._others)[self.stream_index(layer)]
        stream.wait_stream(side)
        with torch.cuda.stream(stream):
            # Our kernels are launched to overlap their predecessor (ops/_overlap.py), which in a graph is an edge of
            # its own kind: between kernels of one device. This launch, which does not, takes the other's.
            self._gate.zero_()
            yield

    def rejoin(self, side: torch.cuda.Stream | None) -> None:
        """``side`` waits for what was forked: a capture ends only if that has come back."""
        if self._forked:
            self._forked = False
            assert self.stream is not None and side is not None
            for other in self._others:
                self.stream.wait_stream(other)
            side.wait_stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event after all work launched there so far; None if there is nothing to wait for."""
        return None if self.stream is None else self.stream.record_event()

    def join(self, home: torch.device) -> None:
        """Work that ``home``'s current stream launches from here on waits for all earlier launches there.

        And after copies on the side stream. Waits once per step, not once per layer.
        """
        if self.stream is not None and self._owes:
            self._owes = False
            now = torch.cuda.current_stream(home)
            for stream in (self.stream, self._side.get(home)):
                if stream is not None:
                    now.wait_stream(stream)


class ReplicaStore(LayerStore):
    """The store of the device that chooses. In a captured step it reads the rows of the device that attends."""

    peer: PeerDevice
    home: torch.device

    @property
    def step_rows(self) -> ReadRows:  # type: ignore[override]  # nothing else is read here
        step = self.table_of_rows.steps(self.home)
        return ReadRows(*(self.peer.reach(name, getattr(step, name)) for name in ReadRows._fields))


class ReadRows(NamedTuple):
    """The tensors of ``kv.step_rows.StepRows`` that the other device reads."""

    past: Tensor
    now: Tensor
    after: Tensor


class PrimaryStore(LayerStore):
    """The store of the device that attends, and its replica on the one that chooses, which keeps the blocks.

    Here are the recent tokens. Attention beyond the selection, and
    reading blocks back, uses peer access to the other device's memory.

    Attributes:
        replica: the other one, made when the first tokens come.
        peer: where it is.
        new: key, value and validity of a step's token, which the replica does not have yet.
        kept: tensors of the last captured step. In a graph, freed memory goes to later layers at once, and the other
            device may not have read it yet.
    """

    keeps_blocks = False
    replica: ReplicaStore = None  # type: ignore[assignment]  # follow() makes it
    peer: PeerDevice
    new: tuple[Tensor, Tensor, Tensor | None] | None = None
    kept: tuple[Tensor, Tensor, Tensor | None] | None = None

    def follow(self, peer: PeerDevice) -> ReplicaStore:
        """Make the replica, unless it is there."""
        if self.replica is None:
            self.peer = peer
            peer.introduce(self.device)
            nothing = torch.empty(1, dtype=self.dtype, device=peer.device)
            shape = (self.batch, self.heads, self.block_table.shape[1] * self.block_size)
            k, v = (nothing.expand(*shape, dim) for dim in (self.key_dim, self.value_dim))
            self.replica = ReplicaStore(k, v, self.config, None, self.table_of_rows)
            self.replica.peer, self.replica.home = peer, self.device
            self.table_of_rows.blocks.order(peer.device, peer.after_all_steps)
        self.replica.held = self.held
        return self.replica

    @property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.replica.pool.kv, self.rows, self.table

    def attend(self, q: Tensor, ids: Tensor | None, granularity: str, *rest, **named) -> Tensor:
        if granularity == "all" and not self.capturing:  # a captured step has been prepared
            self.peer.join(self.device)
        return super().attend(q, ids, granularity, *rest, **named)

    def read(self, first: int, end: int, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.shape((end - first) * self.block_size), dtype=self.dtype, device=self.device)
        with self.peer.entered(self.device, out):
            self.replica.read(first, end, out)
        self.peer.join(self.device)
        return out

    def fit(self, before: Rows) -> None:
        super().fit(before)
        if self.replica is not None:
            with self.peer.entered(self.device):
                self.replica.fit(before)

    def join(self) -> None:
        super().join()
        if self.replica is not None:
            self.replica.join()

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None = None, taken: Taken | None = None) -> None:
        super().append(k, v, valid, taken)
        self.new = k, v, valid

    def extend(self, k: Tensor, v: Tensor, valid: Tensor | None, indexer) -> None:
        super().extend(k, v, valid, indexer)
        self.new = None
        with self.peer.entered(self.device, k, v, valid):
            there = self.peer.device
            valid = None if valid is None else valid.to(there)
            self.replica.extend(k.to(there), v.to(there), valid, indexer.replica)

    def restore_host(self, saved: dict) -> None:
        super().restore_host(saved)
        if self.replica is not None:
            self.replica._rows = self._rows

    @no_inference_mode
    def crop_to(self, after: Rows) -> None:
        super().crop_to(after)
        with self.peer.entered(self.device):
            self.replica.crop_to(after)

    @no_inference_mode
    def map_rows(self, index: Tensor, rows: Rows) -> None:  # type: ignore[override]
        super().map_rows(index, rows)
        with self.peer.entered(self.device, index):
            self.replica.map_rows(index.to(self.peer.device), rows)

    def reset(self) -> None:
        super().reset()
        self.new = None
        if self.replica is not None:
            with self.peer.entered(self.device):
                self.replica.reset()

    @no_inference_mode
    def copy(self, table: RowTable, pools=None, copy_streams=None) -> Self:  # type: ignore[override]
        new = super().copy(table, pools, copy_streams)
        if self.replica is not None:
            with self.peer.entered(self.device):
                new.replica = self.replica.copy(table)
        return new

    def add_addresses(self, found: list[int]) -> None:
        super().add_addresses(found)
        if self.replica is not None:
            self.replica.add_addresses(found)

    @property
    def second_bytes(self) -> int:  # type: ignore[override]
        return 0 if self.replica is None else self.replica.nbytes()[0]
