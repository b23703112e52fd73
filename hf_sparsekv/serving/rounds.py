"""Rounds of exact requests: steps draft some of their tokens, and one pass that attends to everything verifies these.

Steps of a round are the other requests' own. The loop knows only that a round's tokens come at its end. The loop of
``generate()`` is in :mod:`..checking`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checking.expected import expected
from ..checking.pace import Pace
from ..checking.paces import Paces
from ..checking.text import Added, agreed
from ..row_batch.verifying import selects, take_back
from ..tensors import sent
from .drawn import DrawnTokens, logprobs_of, logprobs_on_host, on_host, written
from .in_flight import MOST, Request
from .request import Logprob
from .sampler import Logprobs
from .work import Work

_RIGHT_AFTER = 0.02  # seconds between rounds, in which the host has done only the work of rounds
_UNASKED = 7  # dense steps at most for which nothing is asked, if the same rows go on: these are 90 calls of Python


class Heard(NamedTuple):
    """A token of a request at the end of a round; ``bad``: its logits were NaN or infinite."""

    request: Request
    token: int
    bad: int
    logprob: Logprob | None


@dataclass
class Round:
    """A round whose tokens are in flight to the host.

    Args:
        requests: that are exact. before: tokens that their rows held. counts: tokens that their rows were given.
        drafts: of each that can draft.
        chosen: ``[drafts + 1, 2, n]`` on the host, as :attr:`.Sampler.last` of each token. told: log probabilities.
        used: ``[2, n]`` on the host: accepted drafts of each request, all and those that it had room for.
        marks: of the clock: its start, the end of its drafts, and its own. pace: that hears of them.
        idle: seconds since the device had ended the round before, if one came right before.
        event: when the host's copies are there.
    """

    requests: list[Request]
    before: list[int]
    counts: list[int]
    drafts: int
    chosen: Tensor
    told: list[Logprobs | None]
    used: Tensor
    marks: tuple
    pace: Pace
    idle: float
    event: torch.cuda.Event | None


class Rounds:
    """Decodes exact requests beside others. Only the loop's thread may call it.

    Args:
        work: on the model and its rows.
        drawn: tokens of steps.

    Attributes:
        in_flight: the round whose tokens the host has not read; None: there is none.
    """

    def __init__(self, work: Work, drawn: DrawnTokens) -> None:
        self.work, self.drawn, self.rows = work, drawn, work.rows
        self.most = min(MOST, self.rows.cache.config.max_draft)
        self.in_flight: Round | None = None
        self._paces = Paces(self.most)
        self._over: float | None = None  # when the device had ended the round before this turn
        self._pace = Pace(self.most)  # of the rows as they were when it was asked last
        self._dense = 0  # steps before it is asked for drafts again
        self._unasked = 0, -1  # so many of the next steps ask nothing, as long as the cache's changes are these

    def drafts(self, active: Mapping[int, Request], tries: bool = True) -> int | None:
        """Drafts of the next round; None: all rows make a step that attends to everything.

        ``tries``: drafts that are not known to pay may be tried now.
        """
        cache: Any = self.rows.cache
        unasked, changes = self._unasked
        if unasked and changes == cache.changes:
            self._dense, self._unasked = max(0, self._dense - 1), (unasked - 1, changes)
            return None
        lengths = self.rows.lengths
        pace = self._paces.of(self.rows.width, sum(lengths), partial(expected, cache))
        if pace is not self._pace:
            self._pace, self._dense = pace, 0
        exact = [request for request in active.values() if request.exact]
        can = any(request.constraint is None for request in exact)
        if not selects(cache) or not (can or len(exact) < len(active)):
            # Other requests may attend to a selection from the next step on.
            drafts, steps, self._dense = 0, 1 if len(exact) < len(active) else 1 + _UNASKED, 0
        elif len(exact) < len(active):
            drafts, steps = pace.beside() if can else 1, 0
        else:
            drafts, steps = (0, self._dense) if self._dense else pace.next(True, tries)
            self._dense = max(0, steps - 1)
        if not drafts:
            self._unasked = min(steps - 1, _UNASKED), cache.changes
            return None
        self._dense = 0
        return min(drafts, self.rows.max_length - max(lengths[row] for row, one in active.items() if one.exact))

    def dense_step(self, active: Mapping[int, Request]) -> None:
        """Launch a step of all rows that attends to everything."""
        self._over = None
        self.drawn.step(active, took=self._pace.stepped)

    # ------------------------------------------------------------------ a round

    def launch(
        self, active: Callable[[], Mapping[int, Request]], drafts: int, launched: Callable[[Request], None]
    ) -> None:
        """Launch the steps of a round and its verification.

        Args:
            active: gives the requests that decode, by their rows: others than exact ones may leave after each step.
            drafts: so many steps.
            launched: called with each of the others after each step.
        """
        work, rows, sampler = self.work, self.rows, self.drawn.sampler
        requests = [request for request in active().values() if request.exact]
        places = [row for row, request in active().items() if request.exact]
        before, index = [rows.lengths[place] for place in places], sent(places, torch.long, work.device)
        idle = 0.0 if self._over is None else time.perf_counter() - self._over
        idle = idle if idle < _RIGHT_AFTER else 0.0
        counted, pace = sampler.counted(places), self._pace
        began, tokens = work.clock.mark(), [work.tokens.clone()]
        for i in range(drafts):
            others = [request for request in active().values() if not request.exact]
            self.drawn.step(active(), ahead=dict.fromkeys(places, i))
            tokens.append(work.tokens.clone())
            for request in others:
                launched(request)
        middle = work.clock.mark()
        take_back(rows, dict(zip(places, before)))
        counts = [self._room(request, drafts) for request in requests]
        by_row = dict(zip(places, counts))
        logits = work.verify(
            torch.stack(tokens if drafts else tokens * 2, dim=1), [by_row.get(row, 0) for row in range(rows.max_rows)]
        )[index]
        if counted is not None:
            sampler.count_again(counted, tokens[0][index, None], torch.zeros_like(index))
        found, told = [], []
        for i in range(drafts + 1):
            allowed = self.drawn.allowed(dict(enumerate(requests)), ahead=i)
            sampler(logits[:, i], places, allowed, ahead=dict.fromkeys(places, i))
            found.append(sampler.last)
            told.append(None if sampler.logprobs is None else logprobs_on_host(sampler.logprobs))
        every = torch.stack(found)
        chosen = every[:, 0].T
        accepted = agreed(torch.stack([one[index] for one in tokens[1:]], dim=1), chosen) if drafts else 0 * index
        used = torch.minimum(accepted, sent(counts, torch.long, work.device) - 1)
        if counted is not None:
            sampler.count_again(counted, chosen, used + 1)
        work.tokens.index_copy_(0, index, chosen.gather(1, used[:, None])[:, 0])
        marks = began, middle, work.clock.mark()
        both = on_host(torch.stack((accepted, used)))
        self.in_flight = Round(
            requests, before, counts, drafts, on_host(every), told, both, marks, pace, idle, written(work.device)
        )

    @staticmethod
    def _room(request: Request, drafts: int) -> int:
        """Tokens of a request that a round with so many drafts may give: a grammar knows no draft's next tokens."""
        left = request.sampling.max_tokens - request.launched
        return min(drafts + 1, left) if request.constraint is None else 1

    def settle(self) -> tuple[list[Heard], float]:
        """The tokens of the round in flight, in their order, and the seconds that it took. Waits for the device."""
        one, self.in_flight = self.in_flight, None
        assert one is not None
        if one.event is not None:
            one.event.synchronize()
        self._over, heard, lengths, drafted = time.perf_counter(), [], {}, []
        chosen, (accepted, used) = one.chosen.tolist(), one.used.tolist()
        told = [logprobs_of(tokens, found) for (tokens, _), found in zip(chosen, one.told)]
        for place, request in enumerate(one.requests):
            if request.row is None:  # it has ended with the token before the round
                continue
            n = used[place] + 1
            lengths[request.row] = one.before[place] + n
            self.drawn.sampler.keep(request.row, n)
            request.launched += n
            tokens = [chosen[i][0][place] for i in range(n)]
            if request.constraint is not None:
                request.constraint.unread += [partial(int, token) for token in tokens]
            heard += [Heard(request, tokens[i], chosen[i][1][place], told[i].get(place)) for i in range(n)]
            if one.drafts and one.counts[place] == one.drafts + 1:
                drafted.append(accepted[place])
        take_back(self.rows, lengths)
        between = self.work.clock.between
        drafting, verifying = (1e-3 * (between(*pair) or 0.0) for pair in pairwise(one.marks))
        if drafted:
            rejected = sum(n < one.drafts for n in drafted)
            added = Added(len(drafted), sum(drafted), rejected, min(drafted) + 1)
            one.pace.drafted(one.drafts, added, drafting, verifying + one.idle)
            exactness = self.rows.cache.row_table.exactness
            exactness.drafted += one.drafts * len(drafted)
            exactness.accepted += sum(drafted)
        return heard, drafting + verifying
