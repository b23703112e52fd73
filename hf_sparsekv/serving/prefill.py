"""A prompt that is read in pieces, between decode steps (SparseServe, section 3.4).

A chunk's forward pass runs in a thread of its own, and waits between two layers until it is granted more: models are
not touched, and a long chunk costs decoding rows no more than a short one. Only one of the two threads runs at a time.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ..attention.parts import GRID
from ..cache_name import over
from ..row_batch import positions

# Tokens of a chunk at least, if only its length bounds its time: of fewer the weights are read and the kernels launched
# all the same, which would teach that tokens are slow, and so make the next chunk no longer.
LEAST = 512


class Cancelled(Exception):
    """The prompt is not wanted any more."""


class Clock:
    """Milliseconds between two points of a device's work, known once they are over."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def mark(self):
        """A point in time: now, or on a GPU when it gets there."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, begin, end) -> float | None:
        """Milliseconds; None: the GPU is not there yet."""
        if not self.cuda:
            return 1e3 * (end - begin)
        return begin.elapsed_time(end) if end.query() else None


class Pace:
    """What a chunk costs, from what chunks have cost.

    A token costs a layer's weights and its attention to what is before it; how quickly that goes is measured.

    Args:
        config: the model's.
    """

    def __init__(self, config) -> None:
        hidden, layers = config.hidden_size, config.num_hidden_layers
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or hidden // heads
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        self.layers = layers
        self.token = 2 * (2 * hidden * heads * dim + 2 * hidden * heads * dim + 3 * hidden * inner)  # flops, nearly
        self.pair = 4 * heads * dim
        self.per_ms: float | None = None  # of these in a millisecond
        self.spent_ms = 0.0  # in all
        self._marks: list[tuple] = []

    def work(self, tokens: int, past: int) -> float:
        """Of a layer that reads ``tokens`` behind ``past``."""
        return tokens * (self.token + self.pair * (past + tokens / 2))

    def learn(self, tokens: int, past: int, layers: int, ms: float) -> None:
        """So many layers of such a chunk took ``ms``."""
        if ms > 0:
            found = layers * self.work(tokens, past) / ms
            self.per_ms = found if self.per_ms is None else 0.5 * (self.per_ms + found)

    def note(self, clock: Clock, tokens: int, past: int, layers: int, began, ended, learns: bool = True) -> None:
        """So many layers of such a chunk run between two marks, from which is learnt when they are over.

        ``learns``: False for few tokens, which take as long as more would.
        """
        self._marks.append((clock, tokens, past, layers, began, ended, learns))

    def settle(self) -> None:
        """Learn from what is over."""
        while self._marks:
            clock, tokens, past, layers, began, ended, learns = self._marks[0]
            ms = clock.between(began, ended)
            if ms is None:
                return
            del self._marks[0]
            self.spent_ms += ms
            if learns:
                self.learn(tokens, past, layers, ms)

    def layers_in(self, ms: float, tokens: int, past: int) -> int:
        """How many layers of such a chunk fit; 1 at least."""
        if self.per_ms is None:
            return 1
        return max(1, int(min(ms * self.per_ms / self.work(tokens, past), 1e9)))

    def tokens_in(self, ms: float, past: int) -> int:
        """How many tokens through all layers fit."""
        if self.per_ms is None:
            return LEAST if math.isfinite(ms) else 1 << 30
        of_layer = min(ms, 1e9) * self.per_ms / self.layers
        linear = self.token + self.pair * past
        half = self.pair / 2  # half t^2 + linear t = of_layer
        return int((-linear + (linear * linear + 4 * half * of_layer) ** 0.5) / (2 * half))


class Segments:
    """Forward passes of one model that stop between its layers.

    One at a time: :meth:`open` it, :meth:`run` so many layers until it says that it is over. All run in one thread:
    each new one would make cuDNN's plans anew (:mod:`hf_sparsekv.attention.parts`).

    Args:
        layers: the model's decoder layers, in order.
        quietly: makes what the hooks that stop them come and go in.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        quietly: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._pass: tuple[Callable[[], None], torch.device] | None = None
        self._left = 0
        self._over = self._cancelled = False
        self._error: BaseException | None = None
        self._quietly = quietly
        with quietly():
            self._hooks = [layer.register_forward_pre_hook(self._between) for layer in layers]

    def open(self, run: Callable[[], None], device: torch.device) -> None:
        """Begin ``run``, which waits for the first grant."""
        self._over = self._cancelled = False
        self._error = None
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="hf-sparsekv-prefill", daemon=True)
            thread.start()
            self._thread = thread  # one that could not be started is not waited for
        self._pass = run, device

    def _work(self) -> None:
        self._ident = threading.get_ident()
        while True:
            self._go.acquire()
            if self._pass is None:
                return
            try:
                if not self._cancelled:
                    run, device = self._pass
                    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                        run()
            except Cancelled:
                pass
            except BaseException as error:
                self._error = error
            finally:
                run, self._over, self._pass = None, True, None  # which hold the prompt's cache
                self._stopped.release()

    def run(self, layers: int) -> bool:
        """Let it run so many layers; True: the pass is over.

        Raises:
            BaseException: what it has failed with.
        """
        self._left = layers
        self._go.release()
        self._stopped.acquire()
        if self._over:
            self._end()
        return self._over

    def cancel(self) -> None:
        """End the pass where it is, if there is one."""
        if self._pass is None:
            return
        self._cancelled = True
        self._go.release()
        self._stopped.acquire()
        with contextlib.suppress(Exception):
            self._end()

    def _end(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _between(self, module: nn.Module, args) -> None:
        if threading.get_ident() != self._ident:
            return
        if self._left == 0:
            self._stopped.release()
            self._go.acquire()
        if self._cancelled:
            raise Cancelled
        self._left -= 1

    def close(self) -> None:
        """Leave the model as it was."""
        self.cancel()
        if self._thread is not None:
            self._go.release()
            self._thread.join()
            self._thread = None
        with self._quietly():
            for hook in self._hooks:
                hook.remove()


def chunks(tokens: int, longest: int, past: int = 0) -> Iterator[int]:
    """Lengths of the chunks of a prompt behind ``past`` tokens, nearly equal; none is a single token, a decode step.

    Those that can end on the grid of lengths that attention has plans for (:mod:`hf_sparsekv.attention.parts`).

    Args:
        tokens: to be read; 1 is the only chunk of one token.
        longest: tokens of a chunk, 3 or more.
    """
    at, end = past, past + tokens
    while at < end:
        left = end - at
        length = -(-left // -(-left // longest))
        on_grid = -(-(at + length) // GRID) * GRID - at
        if on_grid <= min(longest, left):
            length = on_grid
        if left - length == 1:
            length -= 1
        yield length
        at += length


class Reading:
    """One prompt that is being read into a cache of its own.

    Args:
        model: what reads it.
        cache: one row over the pools of the batch that it will join, ``past`` tokens of the prompt in it.
        ids: ``[1, n]``, the whole prompt, on the model's device.
        segments, pace, clock: of the engine.
        chunk: tokens of a forward pass at most.
        by_layers: passes are cut between layers, or are short.
    """

    def __init__(
        self,
        model: nn.Module,
        cache,
        ids: Tensor,
        segments: Segments,
        pace: Pace,
        clock: Clock,
        chunk: int,
        by_layers: bool,
    ) -> None:
        self.model, self.cache, self.ids = model, cache, ids
        self.segments, self.pace, self.clock = segments, pace, clock
        self.chunk, self.by_layers = chunk, by_layers
        self.past = cache.get_seq_length()
        self.logits: Tensor | None = None
        self._now: tuple[int, int] | None = None  # tokens of the pass that is under way, layers that are left of it
        self._lengths: Iterator[int] | None = None

    @property
    def left(self) -> int:
        """Tokens that are not read yet."""
        return self.ids.shape[1] - self.past

    def share(self, ms: float) -> int:
        """How much :meth:`read` may read in about ``ms`` of the device's time: layers, or tokens."""
        self.pace.settle()
        if self.by_layers:
            tokens, layers = self._pass()
            return min(self.pace.layers_in(ms, tokens, self.past), layers)
        tokens = max(self.pace.tokens_in(ms, self.past) // 64 * 64, LEAST)
        tokens = min(tokens, self.chunk, self.left)
        return tokens - (self.left - tokens == 1)  # none is a single token

    def _pass(self) -> tuple[int, int]:
        """Tokens of the pass that is under way, or begins, and how many layers of it are left."""
        if self._now is None:
            if self._lengths is None:
                self._lengths = chunks(self.left, self.chunk, self.past)
            self._now = next(self._lengths), self.pace.layers
            # No function of its own, whose frame in an error's traceback would keep this and its cache.
            self.segments.open(partial(self._forward, self._now[0]), self.ids.device)
        return self._now

    def read(self, n: int) -> bool:
        """Read on: ``n`` layers or tokens; True: the prompt is read, :attr:`logits` are of its end.

        Raises:
            BaseException: what the forward pass failed with. The cache is lost.
        """
        began, past = self.clock.mark(), self.past
        if self.by_layers:
            tokens, layers = self._pass()
            # A pass that has all its layers runs to its end: the head is behind the last one.
            over = self.segments.run(n if n < layers else 1 << 30)
            self._now = None if over else (tokens, layers - n)
            self.pace.note(self.clock, tokens, past, n, began, self.clock.mark())
        else:
            self._forward(n)
            self.pace.note(self.clock, n, past, self.pace.layers, began, self.clock.mark())
        return not self.left

    @torch.no_grad()
    def _forward(self, tokens: int) -> None:
        part = self.ids[:, self.past : self.past + tokens]
        where = positions(self.past, self.past + part.shape[1], part.device)
        out = self.model(
            input_ids=part, position_ids=where, **over(self.model, self.cache), use_cache=True, logits_to_keep=1
        )
        self.logits = out.logits[:, -1]
        self.past += tokens

    def cancel(self) -> None:
        """Stop in the middle. The cache is lost."""
        if self._now is not None:
            self.segments.cancel()
            self._now = None
