"""An engine without a model: it answers with the prompt's own tokens, again and again, one each step.

It keeps to what the server needs of the real one: handles that its thread writes to, cancelling, limits, stats.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from hf_sparsekv.serving.request import Busy, Closed, Handle, Logprob, Output, Piece, TooLong
from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv.serving.stats import EngineStats, SampleCounter
from hf_sparsekv.serving.text import Detokenizer, TextStream

BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass
class Row:
    """A request that is running or waits."""

    handle: Handle
    prompt: list[int]
    sampling: Sampling
    text: TextStream
    arrived: float = field(default_factory=time.perf_counter)
    shown: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    script: list[int] | None = None


class FakeEngine:
    """Args:
    step_s: a step takes.
    burst: tokens of a row and step.
    fail_at: the token at which each request fails.
    answer: text of all answers, instead of their prompts.
    """

    def __init__(
        self,
        tokenizer,
        step_s=0.001,
        max_length=1000,
        max_rows=256,
        max_waiting=256,
        burst=1,
        fail_at=None,
        answer=None,
    ) -> None:
        self.tokenizer, self.max_length, self.tokens_per_row = tokenizer, max_length, max_length
        self.step_s, self.max_rows, self.max_waiting = step_s, max_rows, max_waiting
        self.burst, self.fail_at = burst, fail_at
        self.answer = None if answer is None else [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        self.failed: BaseException | None = None
        self.draining = self.closed = False
        self.samplings: list[Sampling] = []  # of all requests, for tests to look at
        self.prompts: list[list[int]] = []
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.times = {name: SampleCounter(BOUNDS) for name in ("queue_s", "ttft_s", "between_s", "total_s")}
        self.eos = frozenset({tokenizer.eos_token_id})
        self._detokenizer = Detokenizer(tokenizer, self.eos)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return not (self.draining or self.closed or self.failed)

    @property
    def busy(self) -> int:
        """Requests that run or wait."""
        with self._lock:
            return len(self._rows) + len(self._waiting)

    def submit(self, prompt, sampling=Sampling(), script: list[int] | None = None) -> Handle:  # noqa: B008 (it is frozen)
        """As the engine's; ``script``: the tokens of this answer."""
        if not self.ready:
            self.refused["closed"] += 1
            raise Closed("the engine takes no requests: it drains")
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else [int(one) for one in prompt]
        if not ids:
            raise ValueError("the prompt is empty: give it at least one token")
        if wrong := [one for one in ids if not 0 <= one < len(self.tokenizer)]:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {len(self.tokenizer)}")
        if (most := max(sampling.stop_token_ids, default=0)) >= len(self.tokenizer):
            raise ValueError(
                f"stop_token_ids has token {most}, which is outside the vocabulary of {len(self.tokenizer)}"
            )
        if len(ids) + sampling.max_tokens > self.max_length:
            raise TooLong(
                f"a prompt of {len(ids)} tokens and an answer of up to {sampling.max_tokens} are more than "
                f"max_length={self.max_length}",
                *(len(ids), sampling.max_tokens, self.max_length),
            )
        with self._lock:
            if len(self._waiting) >= self.max_waiting:
                self.refused["waiting"] += 1
                raise Busy(f"{len(self._waiting)} requests wait already", 2.5)
            self.samplings.append(sampling)
            self.prompts.append(ids)
            self.counts["requests"] += 1
            handle = Handle(f"request-{next(self._ids)}", len(ids), lambda handle: self._wake.set())
            text = self._detokenizer.stream(ids, sampling.stop, sampling.text_tokens)
            self._waiting.append(Row(handle, ids, sampling, text, script=script))
        self._wake.set()
        return handle

    def _run(self) -> None:
        while not self.closed:
            with self._lock:
                while self._waiting and len(self._rows) < self.max_rows:
                    row = self._waiting.popleft()
                    self.times["queue_s"].add(time.perf_counter() - row.arrived)
                    self._rows.append(row)
                self._waiting = deque(row for row in self._waiting if not self._cancelled(row))
                rows = list(self._rows)
            if not rows:
                self._wake.wait(0.05)
                self._wake.clear()
                continue
            time.sleep(self.step_s)
            self.counts["steps"] += 1
            left = [row for row in rows if not self._cancelled(row) and not self._step(row)]
            with self._lock:
                self._rows = left

    def _cancelled(self, row: Row) -> bool:
        return row.handle.cancelled.is_set() and self._end(row, "cancelled")

    def _step(self, row: Row) -> bool:
        """True if it has ended."""
        text, added = "", []
        for _ in range(self.burst):
            now, sampling = time.perf_counter(), row.sampling
            answer = row.script or self.answer or row.prompt
            token = answer[len(row.tokens) % len(answer)]
            if len(row.tokens) == self.fail_at:
                self.counts["failed"] += 1
                return row.handle.fail(RuntimeError("the fake engine was told to fail"))
            self.times["between_s" if row.tokens else "ttft_s"].add(now - (row.times or [row.arrived])[-1])
            row.tokens.append(token)
            row.times.append(now)
            added.append(token)
            eos = token == self.tokenizer.eos_token_id and not sampling.ignore_eos
            eos = len(row.tokens) > sampling.min_tokens and (eos or token in sampling.stop_token_ids)
            text += "" if token in sampling.stop_token_ids else row.text.push(token)
            if eos or row.text.stopped or len(row.tokens) == sampling.max_tokens:
                self._push(row, text, added)
                return self._end(row, "stop" if eos or row.text.stopped else "length")
        self._push(row, text, added)
        return False

    def _push(self, row: Row, text: str, added: list[int]) -> None:
        row.shown.append(text)
        self.counts["generated_tokens"] += len(added)
        told = tuple(Logprob(token, -1.0) for token in added) if row.sampling.logprobs is not None else ()
        row.logprobs += told
        row.handle.push(Piece(text, tuple(added), told))

    def _end(self, row: Row, reason: str) -> bool:
        if rest := row.text.end():
            row.shown.append(rest)
            row.handle.push(Piece(rest, ()))
        total = time.perf_counter() - row.arrived
        self.times["total_s"].add(total)
        self.counts["cancelled" if reason == "cancelled" else "finished"] += 1
        self.counts["prompt_tokens"] += len(row.prompt)
        ttft = row.times[0] - row.arrived if row.times else 0.0
        output = Output(
            *("".join(row.shown), tuple(row.tokens), reason, len(row.prompt), 0, 0.0, ttft, total, tuple(row.times)),
            stopped_by=row.text.stopped_by,
        )
        told = row.sampling.prompt_logprobs
        known = () if told is None else tuple(Logprob(token, -0.5, ((token, -0.5),) * told) for token in row.prompt[1:])
        output = replace(output, logprobs=tuple(row.logprobs), prompt_logprobs=known)
        row.handle.finish(output)
        return True

    def stats(self) -> EngineStats:
        with self._lock:
            running, waiting = len(self._rows), len(self._waiting)
        none = (
            "cached_tokens",
            "captures",
            "drafted",
            "accepted",
            "device_tokens",
            "device_tokens_used",
            "host_bytes",
            "link_bytes",
        )
        counted = ("requests", "finished", "cancelled", "failed", "prompt_tokens", "generated_tokens", "steps")
        return EngineStats(
            running=running,
            waiting=waiting,
            held=0,
            prefilling=0,
            refused=dict(self.refused),
            step_s=self.counts["steps"] * self.step_s,
            prefill_s=0.0,
            host_limit=1 << 30,
            **dict.fromkeys(none, 0),
            **{name: self.counts[name] for name in counted},
            **{name: times.samples() for name, times in self.times.items()},
        )

    def drain(self, timeout: float | None = None) -> bool:
        self.draining = True
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.busy and time.monotonic() < until and not self.closed:
            time.sleep(0.005)
        return not self.busy

    def close(self) -> None:
        self.closed = True
        self._wake.set()
        self._thread.join(10)
        for row in (*self._rows, *self._waiting):
            self._end(row, "cancelled")

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
