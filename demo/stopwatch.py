"""A lane's clock: it runs as long as ``generate()`` does, and stands while the lane waits for its next turn.

It alone decides which time is a token's. An optimised model computes the next token while one arrives, as it does for
its users. The page's questions are answered between turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer

from hf_sparsekv import StepReport


class Stopwatch(BaseStreamer):
    """A streamer that takes the time of each token; the loop that it listens to does not wait for that.

    The first token ends a turn, and so does the first one that comes ``turn`` seconds after a turn's beginning. Then
    the device finishes what it has begun, on this clock, and the clock stands while ``between`` runs.

    Args:
        device: where the model is.
        turn: seconds.
        between: called with the reports of a turn, without statistics. An error that it raises ends ``generate()``.
        each: called for each token, on the clock.
        clock: for tests.
    """

    def __init__(
        self,
        device: torch.device,
        turn: float,
        between: Callable[[list[StepReport]], None],
        each: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.turn, self.between, self.each, self.clock = device, turn, between, each, clock
        self._took: list[StepReport] = []
        self._count = -1  # tokens; -1: the prompt comes first
        self._last = self._began = clock()

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate()``, with the prompt and then with the tokens of every step, ``[rows]``."""
        self._count += 1
        if not self._count:
            return  # its time is the first token's
        now = self.clock()
        self._took.append(StepReport(self._count - 1, tuple(value.tolist()), now - self._last))
        self._last = now
        self.each()
        if self._count == 1 or now - self._began >= self.turn:
            self._stand()

    def end(self) -> None:
        """Called by ``generate()`` after the last token."""
        if self._took:
            self._stand()

    def _stand(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the next token's step may be in flight
        took, self._took, standing = self._took, [], self.clock()
        self.between(took)
        self._began = self.clock()
        self._last += self._began - standing
