"""KV of prompts on its way between the GPU and pinned host memory, beside the stream that computes.

Prefill runs far ahead on the host: all layers are launched before the GPU has finished the first. So memory in flight
is bounded by the order of streams, not by the allocator, which would give each layer buffers of its own: a lane has a
few buffers, and whoever fills one waits, on the GPU, until its former contents have left.

Source: SparseServe, FlashD2H (saving through a staging buffer) and layer-segmented prefill.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ..tensors import lasting

STAGED = 4  # pieces of a prompt's KV under way to the host: 256 MiB, what the link takes 5 ms for


class Stored(Protocol):
    """What :class:`Lanes` need of a layer's store to read its full blocks back."""

    device: torch.device
    dtype: torch.dtype

    def gathered_shape(self, columns: int) -> tuple[int, ...]:
        """Of a buffer that holds ``columns`` columns in blocks."""
        ...

    def read_blocks(self, out: Tensor) -> None:
        """Copy the full blocks into the front of ``out``, on the current stream."""
        ...


class Lane:
    """A stream, and buffers that are used in turn."""

    def __init__(self, device: torch.device, buffers: int) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._buffers: list[Tensor | None] = [None] * buffers
        self._done: list[torch.cuda.Event | None] = [None] * buffers
        self._at = -1
        weakref.finalize(self, _join, self.stream, device).atexit = False

    @lasting
    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next buffer. What the current stream does to it comes after what :meth:`run` did with it last."""
        self._at = at = (self._at + 1) % len(self._buffers)
        size = prod(shape) * dtype.itemsize
        held = self._buffers[at]
        if held is None or held.numel() < size:
            held = self._buffers[at] = torch.empty(size, dtype=torch.uint8, device=self.device)
            held.record_stream(self.stream)  # given back only after what this stream does with it
        elif self._done[at] is not None:
            wait(self._done[at], self.device)
        return held[:size].view(dtype).view(shape)

    def run(self, work: Callable[[], None]) -> torch.cuda.Event:
        """Run ``work`` on this lane, after what the current stream has launched so far; the event tells its end."""
        with self.behind():
            work()
            self._done[self._at] = event = self.mark()
        return event

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What is inside runs on this lane, after what the current stream has launched so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """Tells when all that was launched on this lane so far is done."""
        return self.stream.record_event()

    def release(self) -> None:
        """Give the buffers back."""
        self._buffers = [None] * len(self._buffers)
        self._done = [None] * len(self._done)


class Lanes:
    """The lanes of one cache, on each device that it uses: one to the host, one from it."""

    def __init__(self) -> None:
        self._out: dict[torch.device, Lane] = {}
        self._back: dict[torch.device, Lane] = {}
        self._ahead: tuple[Stored, Tensor, torch.cuda.Event] | None = None

    def __deepcopy__(self, memo: dict) -> Lanes:
        return Lanes()

    def out(self, device: torch.device) -> Lane:
        """To the host."""
        if device not in self._out:
            self._out[device] = Lane(device, STAGED)
        return self._out[device]

    def _from_host(self, device: torch.device) -> Lane:
        if device not in self._back:
            self._back[device] = Lane(device, 2)
        return self._back[device]

    def read_ahead(self, store: Stored, columns: int) -> None:
        """Begin to read the full blocks of ``store`` back, into a buffer of at least ``columns`` columns."""
        lane = self._from_host(store.device)
        # Filled on the lane itself, which comes after whatever the computing stream did with the buffer two layers ago.
        out = lane.take(store.gathered_shape(columns), store.dtype)
        event = lane.run(lambda: store.read_blocks(out))
        self._ahead = store, out, event

    def arrived(self, store: Stored) -> Tensor | None:
        """What :meth:`read_ahead` has brought, if it was for this. The current stream waits for it.

        The layers before have asked in the same forward pass, so nothing is left of one that was broken off.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] is not store:
            return None
        wait(ahead[2], store.device)
        return ahead[1]

    def release(self) -> None:
        """Give all buffers back: a forward pass has ended."""
        self._ahead = None
        for lane in (*self._out.values(), *self._back.values()):
            lane.release()


def _join(stream: torch.cuda.Stream, device: torch.device) -> None:
    """A lane has died, and with it perhaps its cache: what gets that memory next comes after what the lane still does.

    (Inside a capture nothing can be waited for; there a cache could die by another thread only, on another stream.)
    """
    with contextlib.suppress(RuntimeError):  # an earlier error of the device, which is not ours to report
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).wait_stream(stream)


def wait(event: torch.cuda.Event, device: torch.device) -> None:
    """What the current stream launches from here on comes after ``event``."""
    torch.cuda.current_stream(device).wait_event(event)
