"""Sampled tokens in flight: drawn on the device for the next step, and copied to the host.

The host reads them one step late, after the device has written them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from .ends import Ends
from .grammar import Grammars
from .in_flight import Request
from .logit_edits import Allowed
from .request import Logprob
from .sampler import Logprobs, Sampler
from .work import Work


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there once the device's stream has come so far."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def logprobs_on_host(found: Logprobs) -> Logprobs:
    """A copy, as :func:`on_host`."""
    return replace(found, values=on_host(found.values), ids=on_host(found.ids))


def written(device: torch.device) -> torch.cuda.Event | None:
    """When the device's stream has come so far; None: it always has."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def logprobs_of(tokens: list[int], found: Logprobs | None) -> dict[int, Logprob]:
    """Log probabilities of ``tokens`` by place, from a copy that is there."""
    if found is None:
        return {}
    values, ids = found.values.tolist(), found.ids.tolist()
    return {
        place: Logprob(tokens[place], drawn, tuple(zip(best, likeliest)))
        for place, (drawn, *likeliest), best in zip(found.places, values, ids)
    }


@dataclass
class Record:
    """Tokens in flight to the host, and the requests that they belong to."""

    requests: list[tuple[int, Request]]  # place among the tokens
    host: Tensor  # [2, n]
    event: torch.cuda.Event | None
    marks: tuple | None = None  # clock marks of the step's start and end
    logprobs: Logprobs | None = None  # on the host
    took: Callable[[float], None] | None = None  # hears the seconds between the marks

    def token(self, place: int) -> int:
        """The token in a place. Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return int(self.host[0, place])

    def told(self) -> dict[int, Logprob]:
        """Log probabilities by place, once the device has written the record."""
        return {} if self.logprobs is None else logprobs_of(self.host[0].tolist(), self.logprobs)


class DrawnTokens:
    """Draws the tokens of steps and of prompts that have been read. Only the loop's thread may call it.

    Args:
        work: on the model and its rows.
        vocabulary: logits of a row.
        grammars: what makes the masks of answers that follow one.
        ends: tokens that end answers.
    """

    def __init__(self, work: Work, vocabulary: int, grammars: Grammars, ends: Ends) -> None:
        self.work, self.rows, self.device, self.tokens = work, work.rows, work.device, work.tokens
        self.sampler = Sampler(self.rows.max_rows, vocabulary, self.device)
        self.grammars, self.ends = grammars, ends
        self._records: deque[Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def step(
        self,
        active: Mapping[int, Request],
        ahead: Mapping[int, int] = MappingProxyType({}),
        took: Callable[[float], None] | None = None,
    ) -> None:
        """Launch a step of all active rows, whose requests these are.

        Args:
            ahead: rows that draft, and how many drafts they have. The host gets none of their tokens.
            took: hears the seconds that a step takes which attends to everything; None: it may select.
        """
        began = self.work.clock.mark()
        logits = self.work.step() if took is None else self.work.dense_step()
        n = len(logits)
        told = {row: request for row, request in active.items() if row not in ahead} if ahead else active
        # After the step was launched: the tokens before it are read meanwhile.
        rows = [row if row in active else -1 for row in range(n)]
        drawn = self.sampler(logits, rows, self.allowed(told), ahead)
        valid = self.rows.valid(self.device)
        if valid is None:
            self.tokens[:n].copy_(drawn)
        else:
            torch.where(valid[:n, 0], drawn, self.tokens[:n], out=self.tokens[:n])
        self.work.tokens_are_there()
        if told:
            self._record(list(told.items()), None if ahead else (began, self.work.clock.mark()), took)

    def first(self, request: Request, logits: Tensor) -> None:
        """Draw the first token of a request that has just joined; ``logits`` are those of the prompt's last token."""
        row = request.row
        self.sampler.set(row, request.sampling, request.ids)
        self.sampler(logits, [row], self.allowed({0: request}))
        self.tokens[row : row + 1].copy_(self.sampler.last[0])
        self.work.tokens_are_there()
        self._record([(0, request)])

    def allowed(self, active: Mapping[int, Request], ahead: int = 0) -> Allowed | None:
        """Masks for the places whose answers follow a grammar, or may not end yet.

        ``ahead``: tokens before it that may be taken back. A grammar does not know them.
        """
        found = {p: one.constraint for p, one in active.items() if one.constraint is not None and not ahead}
        early = {p: one for p, one in active.items() if one.sampling.min_tokens > one.launched + ahead}
        barred = {place: self.ends.barred(one.sampling) for place, one in early.items()}
        return self.grammars.allowed(found, self.tokens.device, barred)

    def _record(
        self,
        requests: list[tuple[int, Request]],
        marks: tuple | None = None,
        took: Callable[[float], None] | None = None,
    ) -> None:
        """Copy what was drawn last, and log probabilities, to the host, without waiting for them."""
        told = self.sampler.logprobs
        told = told if told is None else logprobs_on_host(told)
        host = on_host(self.sampler.last)
        record = Record(requests, host, written(self.device), marks, told, took)
        for place, request in requests:
            if request.constraint is not None:
                request.constraint.unread.append(partial(record.token, place))
        self._records.append(record)

    def written(self, keep: int) -> Iterator[Record]:
        """Records that the device has written, oldest first. Waits for all but the last ``keep``."""
        while self._records:
            record = self._records[0]
            if record.event is not None and not record.event.query():
                if len(self._records) <= keep:
                    return
                record.event.synchronize()
            elif record.event is None and len(self._records) <= keep:
                return
            yield self._records.popleft()

    def clear(self) -> None:
        """Forget the tokens in flight."""
        self._records.clear()
