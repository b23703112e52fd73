"""Copies of prompts' KV between the GPU and pinned host memory, on separate copy streams.

The host launches all layers of a prefill before the GPU has finished the first. If each layer allocated its own staging
buffers, they would all be in memory at once. So each copy stream owns a few buffers, and filling one waits, on the GPU,
until its previous contents have been copied.

Source: SparseServe, FlashD2H (saving through a staging buffer) and layer-segmented prefill.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from ..tensors import no_inference_mode

STAGED = 4  # pieces of a prompt's KV being copied to the host: 256 MiB, about 5 ms on the link


class CopyStream:
    """A CUDA stream and its staging buffers, used in turn."""

    def __init__(self, device: torch.device, buffers: int) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._buffers: list[Tensor | None] = [None] * buffers
        self._done: list[torch.cuda.Event | None] = [None] * buffers
        self._at = -1
        weakref.finalize(self, _join, self.stream, device).atexit = False

    @no_inference_mode
    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next buffer. The current stream waits until the last :meth:`run` on that buffer has ended."""
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
        """Run ``work`` on this stream, after what the current stream has launched so far; returns the end's event."""
        with self.after_current_stream():
            work()
            self._done[self._at] = event = self.mark()
        return event

    @contextmanager
    def after_current_stream(self) -> Iterator[None]:
        """Run the body on this copy stream, after everything launched on the current stream so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """An event after everything launched on this copy stream so far."""
        return self.stream.record_event()

    def release(self) -> None:
        """Free the buffers."""
        self._buffers = [None] * len(self._buffers)
        self._done = [None] * len(self._done)


class CopyStreams:
    """The copy streams of one cache, on each device that it uses: one to the host, one from it."""

    def __init__(self) -> None:
        self._out: dict[torch.device, CopyStream] = {}
        self._back: dict[torch.device, CopyStream] = {}
        self._ahead: tuple[object, Tensor, torch.cuda.Event] | None = None

    def __deepcopy__(self, memo: dict) -> CopyStreams:
        return CopyStreams()

    def out(self, device: torch.device) -> CopyStream:
        """The copy stream to the host."""
        if device not in self._out:
            self._out[device] = CopyStream(device, STAGED)
        return self._out[device]

    def _from_host(self, device: torch.device) -> CopyStream:
        if device not in self._back:
            self._back[device] = CopyStream(device, 2)
        return self._back[device]

    def read_ahead(
        self,
        store: object,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        read: Callable[[Tensor], None],
        in_use_until: Callable[[torch.cuda.Event], None],
    ) -> None:
        """Begin to read full blocks of ``store`` back, into a buffer of this shape, for :meth:`arrived`.

        Args:
            read: copies them into the buffer, on the current stream.
            in_use_until: called with the event after which the copy stream no longer reads the blocks.
        """
        copy_stream = self._from_host(device)
        # Filled on the copy stream itself, which comes after whatever the computing stream did with the buffer two
        # layers ago.
        out = copy_stream.take(shape, dtype)
        event = copy_stream.run(lambda: read(out))
        in_use_until(event)
        self._ahead = store, out, event

    def arrived(self, store: object, device: torch.device) -> Tensor | None:
        """The blocks that :meth:`read_ahead` has read, if it was for ``store``. The current stream waits for them.

        Each layer takes its own blocks in the same forward pass, so none are left over from an interrupted pass.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] is not store:
            return None
        wait(ahead[2], device)
        return ahead[1]

    def release(self) -> None:
        """Free all buffers at the end of a forward pass."""
        self._ahead = None
        for copy_stream in (*self._out.values(), *self._back.values()):
            copy_stream.release()


def _join(stream: torch.cuda.Stream, device: torch.device) -> None:
    """Order reuse of freed memory after pending copies: the copy stream, and perhaps its cache, has been deleted.

    (A capture cannot wait for the copies. There only another thread, on another stream, could delete a cache.)
    """
    with contextlib.suppress(RuntimeError):  # an earlier error of the device, which is reported elsewhere
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).wait_stream(stream)


def wait(event: torch.cuda.Event, device: torch.device) -> None:
    """Make the current stream wait for ``event``."""
    torch.cuda.current_stream(device).wait_event(event)


class Pending:
    """Events after which copy streams no longer use some memory. Code that changes or reuses it waits for them first.

    Several caches can share such memory, and each has separate copy streams.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._lock = threading.Lock()

    def add(self, event: torch.cuda.Event) -> None:
        """Register that a copy stream uses the memory until ``event``."""
        with self._lock:
            self._events = [one for one in self._events if not one.query()]
            self._events.append(event)

    def wait(self, device: torch.device) -> None:
        """Make the current stream wait for all of them. The host does not wait. Not allowed inside a capture."""
        if not self._events:
            return
        with self._lock:
            self._events = [one for one in self._events if not one.query()]
            for event in self._events:  # kept: another stream may have to wait, too
                wait(event, device)
