"""Chunked prefill between decode steps, interruptible between layers (SparseServe, section 3.4).

A chunk's forward pass runs in a thread of its own. It waits between two layers until it may run more. So models need
no changes, and a long chunk delays decoding rows no more than a short one. Only one of the two threads runs at a time.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.parts import GRID
from ..cache_name import over
from ..checking.clock import Clock
from ..cuda_graph.prompts import paused_passes
from ..row_batch import positions
from ..untraced import untraced
from .prompt_logprobs import PromptLogprobs, longest_pass

# Least tokens of a chunk if only its length bounds its time. Reading the weights and launching the kernels dominates
# shorter chunks. They would make tokens look slow, and so keep the next chunk short, too.
LEAST = 512


SPARSE = 0.3  # of the attention of an exact prompt: what a sparse one takes, at 20 % of the blocks and its estimates

_NOTHING = contextlib.nullcontext()


class Cancelled(Exception):
    """Ends a prefill that was cancelled."""


class Pace:
    """Estimates the time of a chunk from the measured times of earlier chunks.

    In a layer a token costs products with the weights, and attention to the tokens before it. The speed is measured.

    Args:
        config: the model's configuration.
        sparse_from: prompts are sparse from so many tokens on. None: all are exact.
        sparse_least: and their pieces from so many new ones on.
    """

    def __init__(self, config, sparse_from: int | None = None, sparse_least: int = 0) -> None:
        layers = config.num_hidden_layers
        config = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
        hidden = config.hidden_size
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or hidden // heads
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        inner = sum(inner) / len(inner) if isinstance(inner, list) else inner  # of each layer
        self.layers = layers
        self.token = 2 * (2 * hidden * heads * dim + 2 * hidden * heads * dim + 3 * hidden * inner)  # flops, nearly
        self.pair = 4 * heads * dim
        self.sparse_from = math.inf if sparse_from is None else sparse_from
        self.sparse_least = sparse_least
        self.per_ms: float | None = None  # flops per millisecond
        self.spent_ms = 0.0  # total of all chunks
        self._marks: list[tuple] = []

    def work(self, tokens: int, past: int) -> float:
        """Flops of a layer that reads ``tokens`` after ``past``."""
        pair = self.pair if tokens < self.sparse_least else self._pair(past + tokens)
        return tokens * (self.token + pair * (past + tokens / 2))

    def _pair(self, length: int) -> float:
        """Flops of a query and a key, in the mean over keys, where so many tokens are read."""
        return self.pair if length < self.sparse_from else SPARSE * self.pair

    def least(self, past: int) -> int:
        """Tokens of the shortest chunk after so many, if only its length bounds its time: sparse wherever it can be."""
        return max(LEAST, self.sparse_least) if past + self.sparse_least >= self.sparse_from else LEAST

    def learn(self, tokens: int, past: int, layers: int, ms: float) -> None:
        """Update the speed: ``layers`` layers of such a chunk took ``ms``."""
        if ms > 0:
            found = layers * self.work(tokens, past) / ms
            self.per_ms = found if self.per_ms is None else 0.5 * (self.per_ms + found)

    def note(self, clock: Clock, tokens: int, past: int, layers: int, began, ended, learns: bool = True) -> None:
        """Note that ``layers`` layers of such a chunk run between two marks, for :meth:`settle`.

        ``learns``: False for few tokens, because these take as long as more would.
        """
        self._marks.append((clock, tokens, past, layers, began, ended, learns))

    def settle(self) -> None:
        """Learn from the marks that the device has passed."""
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
        """How many layers of such a chunk fit in ``ms``; 1 at least."""
        if self.per_ms is None:
            return 1
        return max(1, int(min(ms * self.per_ms / self.work(tokens, past), 1e9)))

    def tokens_in(self, ms: float, past: int) -> int:
        """How many tokens fit in ``ms``, through all layers."""
        if self.per_ms is None:
            return LEAST if math.isfinite(ms) else 1 << 30
        of_layer = min(ms, 1e9) * self.per_ms / self.layers
        pair = self._pair(past)
        linear = self.token + pair * past
        half = pair / 2  # half t^2 + linear t = of_layer
        return int((-linear + (linear * linear + 4 * half * of_layer) ** 0.5) / (2 * half))


class Segments:
    """Runs forward passes of one model that can pause between its layers, one pass at a time.

    :meth:`open` starts a pass, and :meth:`run` runs some layers until it returns True. All passes run in one thread,
    because each new thread would make cuDNN's plans again (:mod:`hf_sparsekv.attention.parts`).

    Args:
        layers: the model's decoder layers, in order.
        quietly: makes a context in which the pausing hooks are added and removed.
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
        """Start ``run``, which waits for the first call of :meth:`run`."""
        self._over = self._cancelled = False
        self._error = None
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="hf-sparsekv-prefill", daemon=True)
            thread.start()
            self._thread = thread  # set after start(): a thread that could not start is not joined
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
                    with paused_passes(), torch.cuda.device(device) if device.type == "cuda" else _NOTHING:
                        run()
            except Cancelled:
                pass
            except BaseException as error:
                self._error = error
            finally:
                run, self._over, self._pass = None, True, None  # these references hold the prompt's cache
                self._stopped.release()

    def run(self, layers: int) -> bool:
        """Run the next ``layers`` layers. True: the pass has ended.

        Raises:
            BaseException: the error of the pass.
        """
        self._left = layers
        self._go.release()
        self._stopped.acquire()
        if self._over:
            self._end()
        return self._over

    def cancel(self) -> None:
        """End the pass between two layers, if there is one."""
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

    @untraced
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
        """Restore the model."""
        self.cancel()
        if self._thread is not None:
            self._go.release()
            self._thread.join()
            self._thread = None
        with self._quietly():
            for hook in self._hooks:
                hook.remove()


def chunks(tokens: int, longest: int, past: int = 0) -> Iterator[int]:
    """Lengths of the chunks of a prompt after ``past`` tokens, nearly equal.

    No chunk is a single token, which would be a decode step, unless ``tokens`` is 1. Chunks end where possible on the
    grid of lengths for which attention has plans (:mod:`hf_sparsekv.attention.parts`).

    Args:
        tokens: tokens to read.
        longest: most tokens of a chunk, 3 or more.
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
    """The prefill of one prompt into a cache of its own.

    Args:
        model: the model.
        cache: one row over the pools of the batch that it will join. It may hold the prompt's first tokens.
        ids: ``[1, n]``, the whole prompt, on the model's device.
        segments, pace, clock: shared by the engine's prefills.
        chunk: most tokens of a forward pass.
        by_layers: pause passes between layers. False: keep passes short instead.
        likeliest: tokens whose log probabilities are told beside those of the prompt's. None: of none.
        border: a pass ends after so many tokens, where :attr:`held` is made; 0: it is not.
        snapshot: makes it of the cache.

    Attributes:
        told: the log probabilities of the prompt so far.
        held: ``border``, and what the cache's windows and states were there.
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
        likeliest: int | None = None,
        border: int = 0,
        snapshot: Callable[[Any], Any] | None = None,
    ) -> None:
        self.model, self.cache, self.ids = model, cache, ids
        self.border, self.snapshot = border, snapshot
        self.held: tuple[int, Any] | None = None
        self.segments, self.pace, self.clock = segments, pace, clock
        self.chunk, self.by_layers = chunk, by_layers
        self.told: PromptLogprobs | None = None
        if likeliest is not None:
            self.told = PromptLogprobs(ids, likeliest)
            config: Any = model.config
            vocabulary = config.get_text_config(decoder=True).vocab_size
            self.chunk = longest_pass(chunk, vocabulary)
        self.past = cache.get_seq_length()
        self.logits: Tensor | None = None
        self._now: tuple[int, int] | None = None  # of the pass in progress: its tokens, and the layers left
        self._lengths: Iterator[int] | None = None

    @property
    def left(self) -> int:
        """Tokens that are not read yet."""
        return self.ids.shape[1] - self.past

    def share(self, ms: float) -> int:
        """Layers, or tokens, that :meth:`read` may read in about ``ms`` of the device's time."""
        self.pace.settle()
        if self.by_layers:
            tokens, layers = self._pass()
            return min(self.pace.layers_in(ms, tokens, self.past), layers)
        tokens = max(self.pace.tokens_in(ms, self.past) // 64 * 64, self.pace.least(self.past))
        left = self.border - self.past if self.past < self.border else self.left
        tokens = min(tokens, self.chunk, left)
        return tokens - (left - tokens == 1)  # none is a single token

    def _pass(self) -> tuple[int, int]:
        """Tokens of the pass in progress, or of a new one, and its layers that are left."""
        if self._now is None:
            if self._lengths is None:
                parts = [chunks(self.left, self.chunk, self.past)]
                if self.past < self.border:
                    first, rest = self.border - self.past, self.ids.shape[1] - self.border
                    parts = [chunks(first, self.chunk, self.past), chunks(rest, self.chunk, self.border)]
                self._lengths = chain(*parts)
            self._now = next(self._lengths), self.pace.layers
            # No function of its own, whose frame in an error's traceback would keep this and its cache.
            self.segments.open(partial(self._forward, self._now[0]), self.ids.device)
        return self._now

    def read(self, n: int) -> bool:
        """Read ``n`` more layers or tokens. True: the prompt is read, and :attr:`logits` are those of its last token.

        Raises:
            BaseException: the error of the forward pass. The cache is lost.
        """
        began, past = self.clock.mark(), self.past
        if self.by_layers:
            tokens, layers = self._pass()
            # A pass that may run all its layers runs to its end, because the head comes after the last layer.
            over = self.segments.run(n if n < layers else 1 << 30)
            self._now = None if over else (tokens, layers - n)
            ran = layers if over else n  # a short prompt's graph has all of them
            self.pace.note(self.clock, tokens, past, ran, began, self.clock.mark())
        else:
            self._forward(n)
            self.pace.note(self.clock, n, past, self.pace.layers, began, self.clock.mark())
        if self.border and self.past == self.border and self.held is None and self.snapshot is not None:
            self.held = self.border, self.snapshot(self.cache)
        return not self.left

    @torch.no_grad()
    def _forward(self, tokens: int) -> None:
        part = self.ids[:, self.past : self.past + tokens]
        where = positions(self.past, self.past + part.shape[1], part.device)
        keep = 1 if self.told is None else tokens
        out = self.model(
            input_ids=part, position_ids=where, **over(self.model, self.cache), use_cache=True, logits_to_keep=keep
        )
        self.logits = out.logits[:, -1]
        if self.told is not None:
            self.told.add(self.past, out.logits[0])
        self.past += tokens

    def cancel(self) -> None:
        """Stop the prefill. The cache is lost."""
        if self._now is not None:
            self.segments.cancel()
            self._now = None
