"""Copy streams that do nothing until somebody waits, and copy streams of a GPU that begin late."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import ClassVar

import torch
from inside import keep_busy

from hf_sparsekv.kv import block_writer, pool
from hf_sparsekv.offload import copy_streams, device_pool
from hf_sparsekv.offload.copy_streams import CopyStream


class Late:
    """Something that a copy stream has not done yet."""

    def __init__(self, copy_stream) -> None:
        self.copy_stream, self.at = copy_stream, copy_stream.given

    def query(self) -> bool:
        return self.copy_stream.done >= self.at

    def wait(self) -> None:
        self.copy_stream.catch_up(self.at)


class LazyCopyStream:
    """Does nothing until somebody waits, then everything up to there, in order."""

    made: ClassVar[list[LazyCopyStream]] = []
    stream = None

    def __init__(self, device, buffers) -> None:
        self.left, self.given, self.done = [], 0, 0
        self.buffers, self.events, self.at = [None] * buffers, [None] * buffers, -1
        self.inside = False
        self.made.append(self)

    def take(self, shape, dtype):
        self.at = at = (self.at + 1) % len(self.buffers)
        if self.events[at] is not None:
            self.events[at].wait()
        if self.buffers[at] is not None:
            self.buffers[at].fill_(float("nan"))  # whoever still reads it shows
        self.buffers[at] = torch.full(shape, float("nan"), dtype=dtype)
        return self.buffers[at]

    def run(self, work):
        self.left.append(work)
        self.given += 1
        self.events[self.at] = event = Late(self)
        return event

    def catch_up(self, at) -> None:
        if self.inside:
            return  # on the copy stream itself what came before is done
        while self.done < at:
            self.inside = True
            self.left[self.done]()
            self.inside = False
            self.left[self.done] = None
            self.done += 1

    @contextmanager
    def after_current_stream(self):
        self.catch_up(self.given)
        yield

    def mark(self):
        self.given += 1
        self.left.append(lambda: None)
        return Late(self)

    def release(self):
        for buffer, event in zip(self.buffers, self.events):
            if event is not None and event.query():
                buffer.fill_(float("nan"))
        self.buffers, self.events = [None] * len(self.buffers), [None] * len(self.buffers)


def imitate(patch) -> None:
    """Host memory counts as pinned, and what goes there goes by a lazy copy stream."""
    LazyCopyStream.made.clear()
    patch.setattr(copy_streams, "CopyStream", LazyCopyStream)
    for module in (copy_streams, block_writer, device_pool):
        patch.setattr(module, "wait", lambda event, device: event.wait())
    patch.setattr(pool.BlockPool, "direct", property(lambda self: self.host is not None))


def logits(net, cache, chunks):
    with torch.no_grad():
        return torch.cat([net(chunk, past_key_values=cache).logits for chunk in chunks], 1)


def chunks_of(ids, *sizes):
    """Pieces of these sizes, then single tokens."""
    head = ids.split([*sizes, ids.shape[1] - sum(sizes)], dim=1)
    return (*head[:-1], *head[-1].split(1, dim=1))


def finish() -> None:
    """Do what is left on all lazy copy streams, those that were made last first, whoever has forgotten it."""
    for copy_stream in reversed(LazyCopyStream.made):
        copy_stream.catch_up(copy_stream.given)


def slow(copy_stream: CopyStream, cycles: int) -> None:
    """Delay everything on this copy stream. (Holds no reference to it: it must be deleted with its cache.)"""
    this = weakref.ref(copy_stream)

    def late_run(work):
        def wait_and_work():
            keep_busy(cycles)
            work()

        return CopyStream.run(this(), wait_and_work)

    @contextmanager
    def late_after_current_stream():
        with CopyStream.after_current_stream(this()):
            keep_busy(cycles)
            yield

    copy_stream.run, copy_stream.after_current_stream = late_run, late_after_current_stream
