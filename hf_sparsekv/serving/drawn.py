"""Sampled tokens in flight: drawn on the device for the next step, and copied to the host.

The host reads them one step late, after the device has written them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

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


@dataclass
class Record:
    """Tokens in flight to the host, and the requests that they belong to."""

    requests: list[tuple[int, Request]]  # place among the tokens
    host: Tensor  # [2, n]
    event: torch.cuda.Event | None
    marks: tuple | None = None  # clock marks of the step's start and end
    logprobs: Logprobs | None = None  # on the host

    def token(self, place: int) -> int:
        """The token in a place. Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return int(self.host[0, place])

    def told(self) -> dict[int, Logprob]:
        """Log probabilities by place, once the device has written the record."""
        if self.logprobs is None:
            return {}
        tokens, found = self.host[0].tolist(), self.logprobs
        values, ids = found.values.tolist(), found.ids.tolist()
        return {
            place: Logprob(tokens[place], drawn, tuple(zip(best, likeliest)))
            for place, (drawn, *likeliest), best in zip(found.places, values, ids)
        }


class DrawnTokens:
    """Draws the tokens of steps and of prompts that have been read. Only the loop's thread may call it.

    Args:
        work: on the model and its rows.
        vocabulary: logits of a row.
        grammars: what makes the masks of answers that follow one.
    """

    def __init__(self, work: Work, vocabulary: int, grammars: Grammars) -> None:
        self.work, self.rows, self.device, self.tokens = work, work.rows, work.device, work.tokens
        self.sampler = Sampler(self.rows.max_rows, vocabulary, self.device)
        self.grammars = grammars
        self._records: deque[Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def step(self, active: dict[int, Request]) -> None:
        """Launch a step of all active rows, whose requests these are."""
        began = self.work.clock.mark()
        logits = self.work.step()
        n = len(logits)
        # After the step was launched: the tokens before it are read meanwhile.
        drawn = self.sampler(logits, [row if row in active else -1 for row in range(n)], self._allowed(active))
        valid = self.rows.valid(self.device)
        if valid is None:
            self.tokens[:n].copy_(drawn)
        else:
            torch.where(valid[:n, 0], drawn, self.tokens[:n], out=self.tokens[:n])
        self.work.tokens_are_there()
        self._record(self.sampler.last, list(active.items()), (began, self.work.clock.mark()))

    def first(self, request: Request, logits: Tensor) -> None:
        """Draw the first token of a request that has just joined; ``logits`` are those of the prompt's last token."""
        row = request.row
        self.sampler.set(row, request.sampling, request.ids)
        self.sampler(logits, [row], self._allowed({0: request}))
        self.tokens[row : row + 1].copy_(self.sampler.last[0])
        self.work.tokens_are_there()
        self._record(self.sampler.last, [(0, request)])

    def _allowed(self, active: dict[int, Request]) -> Allowed | None:
        """Masks for the places whose answers follow a grammar."""
        found = {place: one.constraint for place, one in active.items() if one.constraint is not None}
        return self.grammars.allowed(found, self.tokens.device)

    def _record(self, last: Tensor, requests: list[tuple[int, Request]], marks: tuple | None = None) -> None:
        """Copy ``last [2, n]`` and log probabilities to the host, without waiting for them."""
        told = self.sampler.logprobs
        if told is not None:
            told = replace(told, values=on_host(told.values), ids=on_host(told.ids))
        host, event = on_host(last), None
        if last.is_cuda:
            event = torch.cuda.Event()
            event.record()
        record = Record(requests, host, event, marks, told)
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
