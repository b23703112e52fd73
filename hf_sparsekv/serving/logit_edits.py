"""Changes of logits before tokens are drawn: penalties of tokens that were used, biases, and tokens that may follow.

The order is: repetition penalty, frequency and presence penalty, bias, allowed tokens. The last are what a grammar
leaves. :mod:`.sampler` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..tensors import no_inference_mode, sent

WORD = 32  # tokens in a word of a mask


class Asked(Protocol):
    """Settings of a request that change logits."""

    repetition_penalty: float  # 1: none
    frequency_penalty: float  # 0: none
    presence_penalty: float  # 0: none
    logit_bias: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Allowed:
    """Tokens that may follow in some places of a batch.

    Args:
        places: int64 ``[m]`` places in the batch.
        words: int32 ``[m, ceil(vocabulary / 32)]``; bit ``i % 32`` of word ``i // 32`` is 1 if token ``i`` may follow.
    """

    places: Tensor
    words: Tensor


@dataclass(frozen=True)
class Plan:
    """The changes that a batch of rows needs, as index tensors on the device. None: no row needs it.

    Args:
        rows: ``[n]`` rows of the tables.
        repeated: ``[r]`` places with a repetition penalty.
        counted: ``[c]`` places with a frequency or presence penalty.
        biased: places, tokens and biases ``[b]``, one for each pair.
    """

    rows: Tensor
    repeated: Tensor | None
    counted: Tensor | None
    biased: tuple[Tensor, Tensor, Tensor] | None

    @property
    def empty(self) -> bool:
        """Whether no logit changes."""
        return self.repeated is None and self.counted is None and self.biased is None


class Counted(NamedTuple):
    """Token counts of some rows.

    Args:
        rows: int64 ``[n]``.
        seen, counts: the tables of :class:`LogitEdits` for these; None: there is none.
    """

    rows: Tensor
    seen: Tensor | None
    counts: Tensor | None


class LogitEdits:
    """Keeps what the requests in ``max_rows`` rows ask for, and changes logits by that.

    Args:
        max_rows: rows of the tables. One additional row is for inactive ones.
        vocabulary: logits of a row.
        device: device of the logits.
    """

    def __init__(self, max_rows: int, vocabulary: int, device: torch.device) -> None:
        self.max_rows, self.vocabulary, self.device = max_rows, vocabulary, device
        self._penalties = torch.zeros(max_rows + 1, 3, device=device)  # repetition, frequency, presence
        self._true = torch.ones((), dtype=torch.bool, device=device)  # a Python bool would wait for the device
        self._one = torch.ones((), dtype=torch.int32, device=device)
        self._bits = torch.arange(WORD, dtype=torch.int32, device=device)
        # Tables [max_rows + 1, vocabulary], once a row needs them.
        self._seen: Tensor | None = None  # bool: in the prompt or the answer
        self._counts: Tensor | None = None  # int32: of the answer

    @no_inference_mode
    @torch.no_grad()
    def set(self, row: int, asked: Asked, prompt: Tensor | None) -> None:
        """Set what a row's request asks for, whose answer is empty.

        Args:
            prompt: int64 ``[n]`` tokens that count for a repetition penalty; None if there is none.
        """
        numbers = [asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty]
        self._penalties[row].copy_(sent(numbers, torch.float32, self.device))
        shape = (self.max_rows + 1, self.vocabulary)
        if prompt is not None:
            if self._seen is None:
                self._seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self._seen[row].zero_().index_fill_(0, prompt, True)
        if counts(asked):
            if self._counts is None:
                self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._counts[row].zero_()

    def move(self, row: int, to: int) -> None:
        """Move a row's state to another one."""
        for table in (self._penalties, self._seen, self._counts):
            if table is not None:
                table[to].copy_(table[row])

    def plan(self, asked: Sequence[Asked | None], rows: Tensor) -> Plan:
        """The plan for a batch: what is asked for in each place (None: inactive), and the rows ``[n]``."""
        repeated = [i for i, one in enumerate(asked) if one is not None and repeats(one)]
        counted = [i for i, one in enumerate(asked) if one is not None and counts(one)]
        biases = [(i, token, bias) for i, one in enumerate(asked) if one is not None for token, bias in one.logit_bias]
        biased = None
        if biases:
            places, tokens, values = zip(*biases)
            biased = self._index(places), self._index(tokens), sent(values, torch.float32, self.device)
        return Plan(
            rows, self._index(repeated) if repeated else None, self._index(counted) if counted else None, biased
        )

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return sent(numbers, torch.long, self.device)

    def apply(self, logits: Tensor, plan: Plan, allowed: Allowed | None = None) -> Tensor:
        """The changed logits, float32; ``logits [n, vocabulary]`` stay as they are."""
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        if plan.repeated is not None and self._seen is not None:
            rows, found = plan.rows[plan.repeated], logits[plan.repeated]
            penalty = self._penalties[rows, :1]
            lowered = torch.where(found < 0, found * penalty, found / penalty)
            logits.index_copy_(0, plan.repeated, torch.where(self._seen[rows], lowered, found))
        if plan.counted is not None and self._counts is not None:
            rows, found = plan.rows[plan.counted], logits[plan.counted]
            used, penalties = self._counts[rows], self._penalties[rows]
            found.sub_(used * penalties[:, 1:2]).sub_(used.clamp(max=1) * penalties[:, 2:])
            logits.index_copy_(0, plan.counted, found)
        if plan.biased is not None:
            places, tokens, values = plan.biased
            logits.index_put_((places, tokens), values, accumulate=True)
        if allowed is not None:
            bits = ((allowed.words[:, :, None] >> self._bits) & 1).flatten(1)[:, : self.vocabulary]
            found = logits[allowed.places].masked_fill_(bits == 0, -torch.inf)
            logits.index_copy_(0, allowed.places, found)
        return logits

    def drawn(self, tokens: Tensor, plan: Plan) -> None:
        """Count the tokens ``[n]`` that were drawn."""
        if plan.repeated is not None and self._seen is not None:
            self._seen.index_put_((plan.rows, tokens), self._true)
        if plan.counted is not None and self._counts is not None:
            self._counts.index_put_((plan.rows, tokens), self._one, accumulate=True)

    def counted(self, rows: Tensor) -> Counted:
        """Token counts of rows, int64 ``[n]``."""
        return Counted(rows, *(None if table is None else table[rows] for table in (self._seen, self._counts)))

    def count_again(self, before: Counted, tokens: Tensor, used: Tensor) -> None:
        """Rows have counted what they had ``before``, and the first ``used [n]`` of ``tokens [n, k]``, int64."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        rows = torch.where(at < used[:, None], before.rows[:, None], self.max_rows)
        if self._seen is not None and before.seen is not None:
            self._seen.index_copy_(0, before.rows, before.seen)
            self._seen.index_put_((rows, tokens), self._true)
        if self._counts is not None and before.counts is not None:
            self._counts.index_copy_(0, before.rows, before.counts)
            self._counts.index_put_((rows, tokens), self._one, accumulate=True)


def repeats(asked: Asked) -> bool:
    """Whether it has a repetition penalty."""
    return asked.repetition_penalty != 1


def counts(asked: Asked) -> bool:
    """Whether it has a penalty by how often a token was used."""
    return asked.frequency_penalty != 0 or asked.presence_penalty != 0
