"""The texts of one ``generate()`` call in exact mode: all have as many tokens.

:mod:`.ragged` has texts whose rows grow independently.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from ..layers.cache_state import CacheState
from .clock import Clock
from .losses import Losses


def of_transformers(ones: Sequence[object]) -> bool:
    """Whether all of these criteria are transformers' own."""
    return all(type(one).__module__.startswith("transformers.") for one in ones)


def pads(criteria: Sequence[object]) -> bool:
    """Whether rows that have ended get padding; else they go on until all have."""
    return any(hasattr(one, "eos_token_id") for one in criteria)


def agreed(drafted: Tensor, chosen: Tensor) -> Tensor:
    """How many first drafts ``[batch, k]`` are what was chosen, ``[batch, k + 1]``: int64 ``[batch]``."""
    return (drafted == chosen[:, :-1]).long().cumprod(1).sum(1)


class Verified(NamedTuple):
    """A round of ``k`` drafts that a pass has looked at.

    Args:
        drafted: ``[batch, k]``.
        chosen: ``[batch, k + 1]``, the tokens after the text and after each draft.
        scores, logits: of each chosen token; None where neither are asked for, and the draft stays.
        sound: bool ``[batch, k + 1]``, the token's logits are a distribution. The first that are not end the round.
        losses: of the drafts, if the rule compares. stays: bool ``[batch, k + 1]``, by these the token is the draft.
    """

    drafted: Tensor
    chosen: Tensor
    scores: list[Any]
    logits: list[Any]
    sound: Tensor
    losses: Losses | None = None
    stays: Tensor | None = None


class Added(NamedTuple):
    """The tokens that a round has added.

    Args:
        rows: that go on, for which was drafted.
        accepted: their drafts that were. rejected: rows whose drafts were not all accepted.
        tokens: that all rows have got.
        stuck: a row got none, because its logits are no distribution: tokens that it has beyond the row with fewest.
        counts: tokens that each row has got, without padding.
    """

    rows: int
    accepted: int
    rejected: int
    tokens: int
    stuck: int | None = None
    counts: Sequence[int] = ()


class Until(StoppingCriteriaList):
    """Criteria of a segment, which ends by them or at ``length`` tokens.

    Args:
        clock: of the device that takes the steps.
        ended: bool ``[batch]``, rows that had ended before it; None: none.

    Attributes:
        done: bool ``[batch]`` after each token, which rows had ended by them.
    """

    def __init__(self, criteria: Sequence, length: int, clock: Clock, ended: Tensor | None = None) -> None:
        super().__init__(criteria)
        self._length, self._ended, self._clock = length, ended, clock
        self._times: list[Any] = []
        self.done: list[Tensor] = []

    def __call__(self, input_ids, scores, **kwargs) -> Tensor:  # type: ignore[override]
        self._times.append(self._clock.mark())
        done = super().__call__(input_ids, scores, **kwargs)
        before = self.done[-1] if self.done else self._ended
        self.done.append(done if before is None else done | before)
        return self.done[-1] | (input_ids.shape[1] >= self._length)

    @property
    def max_length(self) -> int:
        most = super().max_length
        return self._length if most is None else min(most, self._length)

    @property
    def tokens(self) -> int:
        """Tokens of all rows in the segment, without padding. Waits for the device."""
        if not pads(self):
            return len(self.done) * len(self.done[0])
        none = torch.zeros_like(self.done[0]) if self._ended is None else self._ended
        return int(sum((~before).sum() for before in (none, *self.done[:-1])))

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, without the time before and after all steps; None: there were too few.

        Read it when the device has done them.
        """
        taken = [self._clock.seconds(*both) for both in pairwise(self._times[1:])]
        return statistics.median_low(taken) if taken else None


class Text:
    """The texts of a call, prompts included, and what belongs to them.

    All rows have as many tokens: a round adds what the row accepts that accepts least.

    Args:
        model: the model, which says how its arguments grow with a text.
        ids: the prompts. kwargs: the model's further arguments for these. criteria, config: of the call.

    Attributes:
        ids: ``[batch, n]``, all tokens. Their last one is not cached yet.
        kwargs: the model's further arguments for these.
        clock: of the device.
        unfinished: bool ``[batch]``.
        ended: all rows have ended. some_ended: at least one has.
        scores, logits: as ``generate()`` returns them; None: not asked for.
        ahead: tokens of each row that :class:`.choice.Choice` has been told, beyond the row with fewest; None: none.
    """

    ahead: list[int] | None = None

    def __init__(
        self, model: Any, ids: Tensor, criteria: StoppingCriteriaList, config: GenerationConfig, kwargs: dict
    ) -> None:
        self.model, self.ids, self.criteria, self.kwargs = model, ids, criteria, kwargs
        self.clock = Clock(ids.device)
        self.unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self.ended = self.some_ended = False
        returns = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if returns and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if returns and config.output_logits else None
        pad = getattr(config, "_pad_token_tensor", None) if pads(criteria) else None
        self.pad: Tensor | None = None if pad is None else pad.to(ids.device)
        self._theirs = not of_transformers(criteria)
        self._ending: Tensor | None = None  # rows that have ended in the drafts of the round under way

    @property
    def room(self) -> int | None:
        """Tokens that may still come; None: no limit."""
        most = self.criteria.max_length
        return None if most is None else most - self.ids.shape[1]

    @property
    def columns(self) -> list[int]:
        """Columns of each row, as ``generate()`` counts them."""
        return [self.ids.shape[1]] * len(self.ids)

    def would_end(self, ids: Tensor, tell: bool) -> bool:
        """Whether all rows end at some draft in ``ids``, which the last call had one less of.

        Only criteria of transformers are asked: others see tokens of the text only. False unless it is to ``tell``,
        for which it waits.
        """
        n = self.ids.shape[1]
        if ids.shape[1] == n + 1 or self._ending is None:
            self._ending = ~self.unfinished
        if not self._theirs:
            self._ending = self._ending | self.criteria(ids, None)
        return tell and bool(self._ending.all())

    @property
    def sequences(self) -> Tensor:
        """The result of ``generate()``."""
        return self.ids

    def filled(self, tokens: Tensor) -> Tensor:
        """``tokens [batch]`` with padding for rows that have ended."""
        return tokens if self.pad is None or not self.some_ended else torch.where(self.unfinished, tokens, self.pad)

    def until(self, steps: int) -> Until:
        """Criteria that end a segment after so many steps."""
        return Until(self.criteria, self.ids.shape[1] + steps, self.clock, self._over())

    def _over(self) -> Tensor | None:
        """Rows that have ended, bool ``[batch]``; None: none has."""
        return ~self.unfinished if self.some_ended else None

    def add_segment(self, out: Any, until: Until) -> int:
        """Add what ``generate()``'s own loop has returned. Returns how many tokens that is. Waits for the device."""
        had = self.ids.shape[1]
        if isinstance(out, Tensor):
            self.ids = out
        else:
            self.ids = out.sequences
            if self.scores is not None:
                self.scores += out.scores
            if self.logits is not None:
                self.logits += out.logits
        added = self.ids.shape[1] - had
        if self.some_ended:  # the loop took their first token for one of the text
            self.ids[:, had] = self.filled(self.ids[:, had])
        self._tell(added)
        self._end(until.done[-1])
        return added

    def add(self, verified: Verified, told: Callable[[Tensor], None]) -> Added:
        """Add chosen tokens up to the first after a draft that was not, or that ends a row.

        The tokens after the end of a row depend on it. Waits for the device. ``told`` is called with each new token
        ``[batch]``, in order, as ``generate()``'s own loop tells a streamer.
        """
        drafted, chosen, scores, logits, sound, *_ = verified
        padded = self.some_ended and self.pad is not None
        going = self.unfinished.tolist() if padded else [True] * len(self.ids)
        n, done = self.ids.shape[1], []
        ids, right = torch.cat((self.ids, chosen), dim=1), agreed(drafted, chosen).min()
        limits = torch.stack((right + 1, sound.all(0).long().cumprod(0).sum()))
        asked = min(limits.tolist()) if self._theirs else chosen.shape[1]  # of drafts that are wrong, too: a wait less
        for i in range(asked):
            if self._theirs:
                told(chosen[:, i])  # criteria of the caller's own may raise
            known = None if self.scores is None else self.scores + tuple(scores[: i + 1])
            done.append(self.criteria(ids[:, : n + i + 1], known) & self.unfinished)
            if self._theirs and bool(done[-1].any()):
                break  # criteria of the caller's own see tokens of the text only
        *ends, may, firm = torch.stack([*(one.any().long() for one in done), *limits]).tolist()
        ends = ends[: min(may, firm)]
        added = ends.index(1) + 1 if any(ends) else len(ends)
        for i in range(0 if self._theirs else added):
            told(chosen[:, i])
        self.ids = ids[:, : n + added]
        if self.scores is not None:
            self.scores += tuple(scores[:added])
        if self.logits is not None:
            self.logits += tuple(logits[:added])
        if any(ends):
            self._end(done[added - 1])
        if added:
            self._tell(added)
        rows, accepted = len(ids), may - 1
        rejected = rows * (accepted < drafted.shape[1])
        return Added(rows, rows * accepted, rejected, added, None if firm else 0, [added * one for one in going])

    def take_back(self, cache: CacheState) -> None:
        """Have ``cache`` hold all but the last token of each row."""
        cache.crop(self.ids.shape[1] - 1 - cache.get_seq_length())

    def _end(self, done: Tensor) -> None:
        self.unfinished = self.unfinished & ~done
        left = self.unfinished.tolist()
        self.ended, self.some_ended = not any(left), not all(left)

    def _tell(self, tokens: int) -> None:
        """Have the model's arguments tell of so many more tokens."""
        self.kwargs = self.model._update_model_kwargs_for_generation({}, self.kwargs, num_new_tokens=tokens)
