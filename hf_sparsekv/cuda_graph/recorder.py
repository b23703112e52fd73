"""The recorder: a CUDA graph of one function, its streams and its memory pool.

Nothing here knows of caches. Tests without a GPU replace this class alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from .captured_step import Saved

Sides = tuple[torch.cuda.Stream, torch.cuda.Stream]  # for look-ahead: of the step's priority, of lower priority


class Recorder:
    """Captures on streams of its own, which all steps of one model share."""

    def __init__(self) -> None:
        self._captures_on: tuple[torch.cuda.Stream, Sides] | None = None
        self._pool: tuple[int, int] | None = None

    @staticmethod
    def readable(t: Tensor) -> bool:
        """Whether a kernel can read ``t`` in place."""
        return t.is_cuda or t.is_pinned()

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, Sides]:
        """The capture stream, and side streams for look-ahead of equal and lower priority (``Launch.low_priority``).

        All steps share them, because cuBLAS keeps a workspace of 32 MB for each stream that it has seen.
        """
        if self._captures_on is None or self._captures_on[0].device != device:
            main, equal = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
            self._captures_on = main, (equal, torch.cuda.Stream(device))
        return self._captures_on

    def _shared_pool(self) -> tuple[int, int]:
        self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        return self._pool

    def warm_up(self, run: Callable, device: torch.device) -> None:
        """Run once, which compiles the kernels. (Nothing to do for tests without a GPU.)"""
        if device.type == "cuda":
            main, sides = self.streams(device)
            main.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(main):
                run(sides)
            torch.cuda.current_stream(device).wait_stream(main)

    def record(self, run: Callable, device: torch.device, saved: list[Saved]) -> tuple[torch.cuda.CUDAGraph, object]:
        """Capture ``run``. (Tests without a GPU put an imitation here.)

        Graphs that save no state share their memory: the results of each are taken before the next one is replayed.
        """
        main, sides = self.streams(device)
        main.wait_stream(torch.cuda.current_stream(device))
        graph, first = torch.cuda.CUDAGraph(), None
        pool = torch.cuda.graph_pool_handle() if saved else self._shared_pool()
        how = {"pool": pool, "stream": main, "capture_error_mode": "thread_local"}
        try:
            # The outer context restores the stream: after a failed capture torch.cuda.graph raises before it does.
            with torch.cuda.stream(main), torch.cuda.graph(graph, **how):
                try:
                    output = run(sides)
                except RuntimeError as error:
                    first = error
                    raise
        except BaseException as error:
            _forget(pool, device, main)
            self._pool = None
            if first is not None and isinstance(error, RuntimeError):
                raise first from None  # the later one, at the end of the capture, says only that something failed
            raise
        finally:
            first = None  # its traceback holds this frame, and with it what the capture has allocated
        return graph, output


def _forget(pool: tuple[int, int], device: torch.device, stream: torch.cuda.Stream) -> None:
    """Make torch forget a capture that failed with a CUDA error (a layer that waits for the GPU).

    ``CUDAGraph.capture_end`` raises before it does so (torch 2.11). The allocator would then assume that the capture
    goes on. It would keep all memory that another stream has used, and query a graph that no longer exists. The random
    generator would refuse to draw ("Offset increment outside graph capture") until another capture has ended.
    """
    with contextlib.suppress(AttributeError, RuntimeError):  # raised if the capture has ended already
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    ended = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local")
    with contextlib.suppress(RuntimeError), torch.cuda.stream(stream), ended:
        torch.zeros(1, device=device)
