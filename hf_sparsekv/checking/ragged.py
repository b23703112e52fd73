"""Texts whose rows each grow by what they accept.

Processors, criteria and callers still get rows as ``generate()`` has them, which are equally long at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria

from ..layers.cache_state import CacheState
from ..layers.kinds import face
from ..layers.together import keep_tokens
from ..tensors import sent
from .text import Added, Text, Until, Verified, agreed, of_transformers

# They look at the logits of a token only.
_OF_LOGITS = {
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TopHLogitsWarper"),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
    *("LogitNormalization", "SuppressTokensLogitsProcessor"),
}


def can_be_ragged(text: Text, cache: CacheState, processors: LogitsProcessorList, kept: bool) -> bool:
    """Whether the rows of ``text`` may grow independently.

    ``kept``: the caller keeps the cache, whose columns must be those of the text.
    """
    if kept or len(text.ids) == 1 or not all(face(layer).kind == "full" for layer in cache.layers):
        return False
    if not of_transformers(text.criteria) or any(type(one).__name__ not in _OF_LOGITS for one in processors):
        return False
    if text.pad is None and any(not isinstance(one, MaxLengthCriteria) for one in text.criteria):
        return False  # rows that have ended would grow on
    if any(isinstance(one, MaxTimeCriteria) for one in text.criteria):
        return False  # all rows end with one token
    mask, positions = text.kwargs["attention_mask"].bool().long(), text.kwargs.get("position_ids")
    counted = (mask.cumsum(1) - 1).clamp_min(0)
    if positions is not None and positions.shape != counted.shape:
        return False
    usual = (mask[:, 1:] >= mask[:, :-1]).all()  # padding in front
    if positions is not None:
        usual = usual & ((positions == counted) | (mask == 0)).all()
    return bool(usual)


class Ragged(Text):
    """Texts whose rows each grow by what they accept.

    To the model they end at the same column, with padding in front. A row that has ended gets padding.

    Args:
        text: texts of one length, from which this is made.
    """

    def __init__(self, text: Text) -> None:
        self.__dict__.update(text.__dict__)
        ids, padding = text.ids, ~text.kwargs["attention_mask"].bool()
        self._prompt, self._most = ids, text.criteria.max_length
        self.criteria = StoppingCriteriaList([one for one in text.criteria if not isinstance(one, MaxLengthCriteria)])
        self._columns = [ids.shape[1]] * len(ids)  # of each row, as generate() counts them
        pads = padding.sum(1)
        self._pads: list[int] = pads.tolist()
        self._ends = [None if one else ids.shape[1] for one in text.unfinished.tolist()]  # columns; None: it goes on
        at = (torch.arange(ids.shape[1], device=ids.device) + pads[:, None]).clamp_max(ids.shape[1] - 1)
        self._tokens = ids.gather(1, at)  # of each row without padding; anything after its last one
        self._align()

    def _open(self) -> list[int]:
        """Columns of the rows that go on."""
        return [n for n, end in zip(self._columns, self._ends) if end is None]

    @property
    def _least(self) -> int:
        """Columns that all rows have which go on; if none does, those that ``generate()``'s own loop would have."""
        return min(self._open(), default=max(n or 0 for n in self._ends))

    @property
    def ahead(self) -> list[int]:  # type: ignore[override]
        return [n - self._least if end is None else 0 for n, end in zip(self._columns, self._ends)]

    @property
    def room(self) -> int | None:
        return None if self._most is None else self._most - self._least

    @property
    def columns(self) -> list[int]:
        return list(self._columns)

    @property
    def sequences(self) -> Tensor:
        ends = [n if end is None else end for n, end in zip(self._columns, self._ends)]
        prompt, new = self._prompt, max(ends)
        at = torch.arange(prompt.shape[1], new, device=prompt.device) - _on(self._pads, prompt)
        made = self._tokens.gather(1, at.clamp(0, self._tokens.shape[1] - 1))
        if self.pad is not None:
            made = made.where(torch.arange(prompt.shape[1], new, device=prompt.device) < _on(ends, prompt), self.pad)
        return torch.cat((prompt, made), dim=1)

    def until(self, steps: int) -> Until:
        if self._most is not None:
            steps = min(steps, self._most - max(self._open()))
        return Until(self.criteria, self.ids.shape[1] + steps, self.clock, self._over())

    def add_segment(self, out: Any, until: Until) -> int:
        new = out[:, self.ids.shape[1] :]
        n = new.shape[1]
        done = torch.stack(until.done[:n]).tolist()
        self._grow(new, [n] * len(new), [[one[row] for one in done] for row in range(len(new))])
        return n

    def add(self, verified: Verified, told: Callable[[Tensor], None]) -> Added:
        """As :meth:`.text.Text.add`, for each row; ``told`` is not called."""
        drafted, chosen, sound = verified.drafted, verified.chosen, verified.sound
        n, before = self.ids.shape[1], self._least
        ids = torch.cat((self.ids, chosen), dim=1)
        done = [self.criteria(ids[:, : n + i + 1], None).long() for i in range(chosen.shape[1])]
        limits = agreed(drafted, chosen), sound.long().cumprod(1).sum(1)
        *ends, accepted, firm = torch.stack((*done, *limits)).tolist()
        had, counts, going = self.columns, [], [row for row, end in enumerate(self._ends) if end is None]
        for row, drafts in enumerate(accepted):
            most = len(done) if self._most is None else self._most - self._columns[row]
            counts.append(1 if self._ends[row] is not None else min(drafts + 1, most, firm[row]))
        self._grow(chosen, counts, [[bool(one[row]) for one in ends] for row in range(len(ids))], cut=True)
        right = [accepted[row] for row in going]
        rejected = sum(drafts < drafted.shape[1] for drafts in right)
        stuck = min((self._columns[row] - self._least for row in going if not firm[row]), default=None)
        gained = [n - m if row in going else 0 for row, (n, m) in enumerate(zip(self.columns, had))]
        return Added(len(going), sum(right), rejected, self._least - before, stuck, gained)

    def take_back(self, cache: CacheState) -> None:
        mask = self.kwargs["attention_mask"][:, :-1].bool()
        lengths = [n - pads - 1 for n, pads in zip(self._columns, self._pads)]
        keep_tokens(cache, lengths, mask if min(lengths) < max(lengths) else None)

    def _grow(self, tokens: Tensor, counts: list[int], done: list[list[bool]], cut: bool = False) -> None:
        """Each row gets its first ``counts`` of ``tokens [batch, n]``. It ends with the first after which it is done.

        ``cut``: it gets no token after that one.
        """
        before = [n - pads for n, pads in zip(self._columns, self._pads)]
        if (short := max(before) + tokens.shape[1] - self._tokens.shape[1]) > 0:
            more = max(short, self._tokens.shape[1] // 4 + 64)
            self._tokens = torch.nn.functional.pad(self._tokens, (0, more))
        at = torch.arange(tokens.shape[1], device=tokens.device) + _on(before, tokens)
        self._tokens.scatter_(1, at, tokens)
        for row, count in enumerate(counts):
            ended = self._ends[row] is not None
            if not ended and any(done[row][:count]):
                last = done[row].index(True) + 1
                self._ends[row] = self._columns[row] + last
                count = last if cut else count
            self._columns[row] += count
            if not ended and self._ends[row] is None and self._columns[row] == self._most:
                self._ends[row] = self._most
        open_rows = [end is None for end in self._ends]
        self.ended, self.some_ended = not any(open_rows), not all(open_rows)
        if self.some_ended:
            self.unfinished = torch.tensor(open_rows, device=tokens.device)
        self._align()

    def _align(self) -> None:
        """Have the model's arguments tell of the rows, which end at the same column."""
        lengths = [n - pads for n, pads in zip(self._columns, self._pads)]
        columns = max(lengths)
        at = torch.arange(columns, device=self._tokens.device) - columns + _on(lengths, self._tokens)
        self.ids = self._tokens.gather(1, at.clamp_min(0))
        kwargs = {**self.kwargs, "attention_mask": (at >= 0).to(self.kwargs["attention_mask"].dtype)}
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = at.clamp_min(0).to(kwargs["position_ids"].dtype)
        self.kwargs = kwargs


def _on(numbers: list[int], like: Tensor) -> Tensor:
    """``numbers`` as a column on the device of ``like``."""
    return sent(numbers, torch.long, like.device)[:, None]
