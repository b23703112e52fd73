"""A walk that the host drives: PSA's pipelined iteration (section 3.3).

Blocks are taken a micro-batch at a time. While one is attended to, the next is brought to the device, on a stream and a
thread of its own; a kernel tells the host through pinned memory which rows have stopped, so that nobody waits for the
GPU. The host is a micro-batch ahead of what it knows; one that nobody needed does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ..kv.store import LayerStore
from ..ops.progressive import Walk
from ..ops.residency import FREE

NEVER = FREE + 1  # no frame has this stamp


@functools.cache
def _loader(device: torch.device) -> tuple[torch.cuda.Stream, ThreadPoolExecutor]:
    """The stream that loads blocks to a GPU and the thread that drives it; all layers and caches share them."""
    return torch.cuda.Stream(device), ThreadPoolExecutor(1, thread_name_prefix="sparsekv-load")


def _arrived(loading: Future, stream: torch.cuda.Stream | None) -> None:
    """What ``stream`` does from here on comes after this load."""
    event = loading.result()
    if event is not None:
        stream.wait_event(event)


class HostDriven:
    """Runs walks micro-batch by micro-batch.

    Args:
        m: blocks a micro-batch, of each row and KV head.
    """

    def __init__(self, m: int) -> None:
        self.m = m
        self._done: Tensor | None = None  # pinned on a GPU
        self._written: torch.cuda.Event | None = None  # nobody writes to it any more
        # Of the last micro-batch. Numbers go on from step to step: one that ran ahead may report when the next step has
        # begun, and must not be taken for one of its own.
        self._number = 0

    def run(self, walk: Walk, store: LayerStore) -> Tensor:
        """The attention of one step, ``[batch, Hq, Dv]``."""
        batch, heads, n = walk.ids.shape
        cuda = walk.q.is_cuda
        if self._done is None or len(self._done) != batch * heads:
            self.settle()
            self._done = torch.zeros(batch * heads, dtype=torch.int32, pin_memory=cuda)
        done = self._done
        # Of the layer's device, which need not be the current one.
        stream = torch.cuda.current_stream(walk.q.device) if cuda else None
        walk.state.limits[0] = 0
        walk.state.limits[1] = self.m
        walk.expect()
        loads = self._loads(walk, store)
        count = max(1, -(-n // self.m))
        loading = loads(0) if loads else None
        try:
            for i in range(count):
                if loading is not None:
                    _arrived(loading, stream)
                self._number += 1
                walk.attend(near=i == 0)
                walk.verify(step=self.m, last=i + 1 == count, done=done, number=self._number)
                if loads and i + 1 < count:
                    loading = loads(i + 1)
                # What the one before has found, while this one runs; without a GPU this one itself.
                if (i or not cuda) and self._stopped(done, self._number - cuda, stream):
                    break
        finally:
            if cuda:  # the micro-batch that runs ahead is still to report
                self._written = self._written or torch.cuda.Event()
                self._written.record(stream)
            if loading is not None:
                _arrived(loading, stream)  # its frames and lists are in order before they are given away
        return walk.merge()

    def settle(self) -> None:
        """Wait until no kernel writes flags any more: their pinned memory may be given to others then."""
        if self._written is not None:
            self._written.synchronize()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter, or the device, may be going down
            self.settle()

    @staticmethod
    def _stopped(done: Tensor, number: int, stream: torch.cuda.Stream | None) -> bool:
        """Whether all rows have stopped by micro-batch ``number``; waits until it is known.

        Raises:
            RuntimeError: the GPU has nothing left to do and has not said so.
        """
        seen = done.numpy()
        over = False
        while (abs(seen) < number).any():  # microseconds: the kernel is writing it
            if over:
                raise RuntimeError("the verifier did not report: this step's attention is incomplete")
            over = stream is not None and stream.query()
        return bool((seen < 0).all())

    def _loads(self, walk: Walk, store: LayerStore) -> Callable[[int], Future] | None:
        """A function that begins to bring micro-batch ``i`` to the device, or None where blocks stay where they are."""
        residents = store.residents
        if residents is None or residents.pool is None:
            return None
        pool, table = residents.pool, store.table
        never = torch.full((1,), NEVER, dtype=torch.int32, device=walk.q.device)
        walk.frames, walk.places = pool.frames, residents.find(walk.ids, table, never)  # all in host memory as yet
        stream, thread = _loader(walk.q.device) if walk.q.is_cuda else (None, None)
        inference = torch.is_inference_mode_enabled()  # a mode of this thread, and of the tensors made in it

        def load(i: int) -> None:
            span = slice(i * self.m, (i + 1) * self.m)
            low, high = walk.state.limits
            # Rows that have stopped want no more. (Read while the kernel may be writing: at worst a block is brought
            # for nothing, or is read in host memory.)
            wanted = walk.ids[..., span].masked_fill((low >= high)[..., None], -1) if i else walk.ids[..., span]
            places = residents.fetch(wanted.contiguous(), table, 0, begins=i == 0)
            at = walk.places[..., span]
            at.copy_(torch.where(wanted >= 0, places, at))

        def on_stream(i: int) -> torch.cuda.Event:
            with torch.inference_mode(inference), torch.no_grad(), torch.cuda.stream(stream):
                load(i)
                return stream.record_event()

        def begin(i: int) -> Future:
            if stream is not None:
                if i == 0:
                    stream.wait_stream(torch.cuda.current_stream(walk.q.device))
                return thread.submit(on_stream, i)
            found: Future = Future()
            load(i)
            found.set_result(None)
            return found

        return begin
