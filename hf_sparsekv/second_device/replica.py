"""A layer's store that another device follows: what is cached here is cached there as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ..kv.store import LayerStore
from ..ops._dispatch import use_triton
from ..tensors import DeviceLength, lasting

# Layers that a captured step chooses for at a time: selecting and packing leave room. Measured on two H200s, 8 x 32k,
# 90 % new tokens a step: 11.9 ms a token, with one 12.9.
LANES = 2


class Rank:
    """A second device and the order of its work: one stream there, and one here that hands things over.

    In captured steps :data:`LANES` streams there take turns by layer, each with memory of its own.

    Copies between GPUs make both their current streams wait for each other. So they run on streams of their own: the
    computation of this device waits for nothing that the other one does.

    Raises:
        ValueError: there is no such GPU.
    """

    @lasting
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
        self._others = [torch.cuda.Stream(device) for _ in range(LANES - 1)] if self.stream is not None else []
        self._forked = False  # a captured step has work under way there
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._buffers: dict[tuple, Tensor] = {}
        self._met: set[torch.device] = set()
        self._owes = False  # something was launched that nobody has waited for
        with self.on_stream():
            self.enabled = torch.ones(1, dtype=torch.int32, device=device)  # 0: trial runs are to copy nothing
            self._gate = torch.zeros(1, dtype=torch.int32, device=device)

    def __deepcopy__(self, memo: dict) -> Rank:
        return self

    @lasting
    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, lane: int = 0) -> Tensor:
        """Memory there that the layers of a lane use one after the other.

        It is never given back: a captured step of another device's graph has no pool of its own here, and what it was
        captured with must not become somebody else's.
        """
        key = (name, tuple(shape), dtype, lane)
        if key not in self._buffers:
            with self._current():
                self._buffers[key] = torch.empty(shape, dtype=dtype, device=self.device)
        return self._buffers[key]

    def reach(self, name: str, tensor: Tensor | None) -> Tensor | None:
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
        """Inside, no chosen token is copied. What steps under way have chosen still is."""
        try:
            with self.settled():
                self.enabled.zero_()
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """Chosen tokens are copied from here on."""
        with self.on_stream():
            self.enabled.fill_(1)

    def on_stream(self) -> AbstractContextManager:
        """What is inside is in the order of what is chosen there, which another stream of the device would not be."""
        self._owes = True
        return self._current()

    def settled(self) -> AbstractContextManager:
        """As :meth:`on_stream`, and after all steps under way: captured ones are in the order of their own device."""
        for home in self._side:
            self.stream.wait_stream(torch.cuda.current_stream(home))
        return self.on_stream()

    def _current(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def entered(self, home: torch.device, *used: Tensor | None) -> Iterator[None]:
        """What is inside runs on the other device, after what ``home``'s current stream has launched so far.

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

    def lane(self, layer: int) -> int:
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
            for other in self._others:  # behind whatever is under way there; and a part of the capture
                other.wait_stream(self.stream)
        stream = (self.stream, *self._others)[self.lane(layer)]
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
            for other in self._others:
                self.stream.wait_stream(other)
            side.wait_stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """Tells when all that was launched there so far is done; None: it is."""
        return None if self.stream is None else self.stream.record_event()

    def join(self, home: torch.device) -> None:
        """What ``home``'s current stream launches from here on comes after what was launched there so far.

        And after what was handed over beside it. Waits once, though every layer asks.
        """
        if self.stream is not None and self._owes:
            self._owes = False
            now = torch.cuda.current_stream(home)
            for stream in (self.stream, self._side.get(home)):
                if stream is not None:
                    now.wait_stream(stream)


class FollowedLength(DeviceLength):
    """The length of a twin. In a captured step it is the leader's, which is set before each replay."""

    def __init__(self, clock: DeviceLength, home: torch.device, rank: Rank) -> None:
        super().__init__()
        self._leads, self._home, self._rank = clock, home, rank

    def held(self, device: torch.device) -> Tensor:
        return self._rank.reach("length", self._leads.held(self._home))


class LeadingStore(LayerStore):
    """The store of the device that attends, and its twin on the one that chooses, which keeps the blocks.

    Here are the near tokens, and of each block what tells its tokens apart. Whoever attends to all tokens, or needs
    blocks back, reads the other device's memory.

    Attributes:
        twin: the other one, made when the first tokens come.
        rank: where it is.
        new: key, value and validity of a step's token, which the twin does not have yet.
        kept: those of the last captured step: in a graph, what is let go is later layers' memory at once, and the other
            device may not have read it yet.
    """

    keeps_blocks = False
    twin: LayerStore | None = None
    rank: Rank | None = None
    new: tuple[Tensor, Tensor, Tensor | None] | None = None
    kept: tuple[Tensor, Tensor, Tensor | None] | None = None

    def follow(self, rank: Rank) -> LayerStore:
        """Make the twin, unless it is there."""
        if self.twin is None:
            self.rank = rank
            rank.introduce(self.device)
            nothing = torch.empty(1, dtype=self.dtype, device=rank.device)
            shape = (self.batch, self.heads, self.slots.shape[1] * self.block_size)
            k, v = (nothing.expand(*shape, dim) for dim in (self.key_dim, self.value_dim))
            self.twin = LayerStore(k, v, self.config, None, FollowedLength(self.clock, self.device, rank))
        return self.twin

    @property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        twin = self.twin
        return twin.pool.kv, twin.pool.fields["flags"], twin.slots if self.fixed else twin.slots[:, : self.sealed]

    def attend(self, q: Tensor, ids: Tensor | None, granularity: str, *rest, **named) -> Tensor:
        if granularity == "all" and not self.fixed:  # a captured step has been prepared
            self.rank.join(self.device)
        return super().attend(q, ids, granularity, *rest, **named)

    def _read(self, first: int, end: int, out: Tensor) -> None:
        with self.rank.entered(self.device, out):
            self.twin._read(first, end, out)
        self.rank.join(self.device)

    def _to_slots(self, blocks: Tensor, *rest) -> Tensor:
        return super()._to_slots(blocks[..., :0], *rest)

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        super().append(k, v, valid)
        self.new = k, v, valid

    def extend(self, k: Tensor, v: Tensor, valid: Tensor | None, indexer) -> None:
        super().extend(k, v, valid, indexer)
        self.new = None
        with self.rank.entered(self.device, k, v, valid):
            there = [None if t is None else t.to(self.rank.device) for t in (k, v, valid)]
            self.twin.extend(*there, indexer.twin)

    @lasting
    def crop(self, length: int) -> None:
        super().crop(length)
        with self.rank.entered(self.device):
            self.twin.crop(length)

    @lasting
    def map_rows(self, index: Tensor) -> None:
        super().map_rows(index)
        with self.rank.entered(self.device, index):
            self.twin.map_rows(index.to(self.rank.device))

    def reset(self) -> None:
        super().reset()
        self.new = None
        if self.twin is not None:
            with self.rank.entered(self.device):
                self.twin.reset()

    @lasting
    def copy(self, clock: DeviceLength, frames=None, lanes=None) -> LeadingStore:
        new = super().copy(clock, frames, lanes)
        if self.twin is not None:
            with self.rank.entered(self.device):
                new.twin = self.twin.copy(FollowedLength(clock, self.device, self.rank))
        return new

    def add_addresses(self, found: list[int]) -> None:
        super().add_addresses(found)
        if self.twin is not None:
            self.twin.add_addresses(found)

    @property
    def second_bytes(self) -> int:
        return 0 if self.twin is None else self.twin.nbytes()[0]
