"""Times of generated tokens, taken through the streamer interface of ``generate()``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Timing:
    """Summary of one ``generate()`` call.

    Args:
        tokens: tokens generated per row.
        ttft_s: seconds to the first token, prefill included.
        tpot_s: seconds per token after the first: median; None with fewer than two tokens.
        low_s, high_s: 10th and 90th percentile of the same.
        total_s: seconds to the last token: the sum of the above.
    """

    tokens: int
    ttft_s: float | None
    tpot_s: float | None
    low_s: float | None
    high_s: float | None
    total_s: float

    def __str__(self) -> str:
        if self.ttft_s is None:
            return "no token"
        line = f"{self.tokens} tokens, first after {self.ttft_s:.2f} s"
        if self.tpot_s is not None and self.low_s is not None and self.high_s is not None:
            line += f", then {1e3 * self.tpot_s:.1f} ms each ({1e3 * self.low_s:.1f} - {1e3 * self.high_s:.1f})"
        return line


class TokenTimer(BaseStreamer):
    """A streamer that records when each token arrives, and passes it on to another streamer.

    The clock starts when the timer is created; :meth:`start` restarts it. ``generate()`` passes tokens as CPU tensors,
    so on a GPU the times include the work that produced the token. It refuses streamers with beam search. A second
    ``generate()`` with the same timer restarts it with the second prompt.

        timer = TokenTimer(TextStreamer(tokenizer, skip_prompt=True))
        model.generate(**inputs, past_key_values=cache, streamer=timer)
        print(timer.summary())

    Args:
        streamer: also receives the prompt and the tokens, for example a ``TextStreamer``. Its time per token is left
            out of the next token's time, unless that token is computed meanwhile (:func:`hf_sparsekv.optimize`).
        clock: for tests.
    """

    def __init__(self, streamer: BaseStreamer | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.streamer = streamer
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Forget all times and start the clock."""
        self._last = self._clock()
        self._prompt_seen = self._ended = self._ahead = False
        self.tokens = 0
        self.first_s: float | None = None
        self.steps_s: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called by ``generate()``: first with the prompt, then with the new tokens of every step."""
        if self._ended:
            self.start()  # the prompt of another call, which must not count as new tokens
        now = self._clock()
        if self._prompt_seen:
            # A step of assisted decoding brings several tokens [1, n]; plain decoding one per row, [batch].
            count = value.shape[-1] if value.ndim == 2 else 1
            self.tokens += count
            if self.first_s is None:
                self.first_s = now - self._last
            elif count:
                self.steps_s += [(now - self._last) / count] * count
        self._pass_on(value)
        # The first token is counted from the start, the prompt's arrival is no step.
        if self._prompt_seen:
            self._last = now if self._ahead else self._clock()
        self._prompt_seen = True

    @property
    def waits(self) -> bool:
        """Whether the loop must wait for each token, because the streamer reads counters after it."""
        return getattr(self.streamer, "waits", False)

    def runs_ahead(self) -> None:
        """Announce that tokens now arrive while the next one is computed, so that no time can be left out."""
        self._ahead = True
        if isinstance(self.streamer, TokenTimer):
            self.streamer.runs_ahead()

    def _pass_on(self, value: Tensor) -> None:
        """Pause the clock. For subclasses."""
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        """Called by ``generate()`` after the last token."""
        self._ended = True
        if self.streamer is not None:
            self.streamer.end()

    def summary(self) -> Timing:
        """The times so far."""
        if self.first_s is None:
            return Timing(0, None, None, None, None, 0.0)
        total = self.first_s + sum(self.steps_s)
        if not self.steps_s:
            return Timing(self.tokens, self.first_s, None, None, None, total)
        ordered = sorted(self.steps_s)
        low, high = (_quantile(ordered, p) for p in (0.1, 0.9))
        return Timing(self.tokens, self.first_s, statistics.median(ordered), low, high, total)


def _quantile(ordered: list[float], p: float) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    at = p * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
