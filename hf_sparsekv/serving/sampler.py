"""Sampling: draws tokens from logits with settings per row, all on the device.

    sampler = Sampler(max_rows=32, vocabulary=151936, device=model.device)
    sampler.set(row, sampling, prompt_ids)
    tokens = sampler(logits, rows)  # [n, vocabulary] of these rows; goes straight into the next step
    sampler.last  # [2, n]: the tokens, and 1 where they could not be drawn; for one copy to the host
    sampler.clear(row)

The order is that of transformers: penalties and biases (:mod:`.logit_edits`), temperature, top-k, top-p, min-p. Each of
the last three computes a lowest logit to keep. Equal logits are kept or dropped together, in whatever order a sort
returns them. The token is drawn by exponential noise: the largest ``p / e`` is token ``i`` with probability ``p_i``.

**Seeds.** A row with a seed draws its noise from a generator of its own, one vector a token. The noise of token ``t``
depends only on the seed and on ``t``, not on other rows, the row's place, or the time. So equal logits give equal
tokens, on one kind of device with one version of torch. Logits may differ in their last bits between batches of
different sizes, because products of different shapes round differently. This changes a token only if the two best
``p / e`` are that close. Rows without a seed draw from the device's generator.

**Drafts.** A draft and the token that replaces it draw with the same noise, which is kept until the token is certain
(:meth:`Sampler.keep`). So a seed gives the same text with and without drafts.

**Invalid logits.** A row whose largest logit is NaN, infinite, or -inf (all are masked) gets some valid token and a 1
in ``last[1]``. Its request fails when the host reads the tokens. Other rows are not affected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from ..tensors import no_inference_mode, sent
from . import logit_edits
from .logit_edits import Allowed, LogitEdits

_PLANS = 8  # of rows that alternate
GREEDY = 1e-5  # temperatures below it count as 0, as in vLLM


class Settings(logit_edits.Asked, Protocol):
    """Sampling settings of a request; names and meanings are those of vLLM's ``SamplingParams``."""

    temperature: float  # 0: the likeliest token
    top_p: float  # 1: all
    top_k: int  # 0: all
    min_p: float  # 0: all
    seed: int | None
    logprobs: int | None  # of so many tokens beside the drawn one; None: of none


@dataclass(frozen=True)
class Plan:
    """The sampling operations that a batch of rows needs, as index tensors on the device. None: no row needs it.

    Args:
        edits: changes of the logits.
        told: places whose log probabilities are asked for.
        told_index: the same, ``[t]``.
        told_most: the most log probabilities of one place, beside that of the drawn token.
        drawn: ``[d]`` places that are not greedy; None if all are drawn, or none is. drawn_rows: their rows.
        any_drawn: whether any place is drawn.
        settings: ``[d, 4]`` temperature, top-p, top-k, min-p of the drawn places.
        few: ``[k]`` places among the drawn ones with a top-k.
        most: the largest top-k.
        few_mass: whether a place with a top-k has a top-p, too.
        mass: ``[m]`` places among the drawn ones with a top-p and no top-k.
        any_min: whether one of the drawn places has a min-p.
        seeded: (place among the drawn ones, row) of rows with a seed.
        unseeded: whether there are drawn rows without a seed.
    """

    edits: logit_edits.Plan
    told: tuple[int, ...]
    told_index: Tensor | None
    told_most: int
    drawn: Tensor | None
    drawn_rows: tuple[int, ...]
    any_drawn: bool
    settings: Tensor
    few: Tensor | None
    most: int
    few_mass: bool
    mass: Tensor | None
    any_min: bool
    seeded: tuple[tuple[int, int], ...]
    unseeded: bool


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of one call, on the device.

    Args:
        places: of the batch, that they belong to.
        values: float32 ``[t, 1 + k]``: of the drawn token, and of the ``k`` likeliest ones by falling probability.
        ids: int64 ``[t, k]``, these tokens.
    """

    places: tuple[int, ...]
    values: Tensor
    ids: Tensor


class Sampler:
    """Keeps the settings of ``max_rows`` rows, and draws tokens with them.

    The host knows which operations a batch needs, and the device has the numbers. Nothing here waits for the device.

    Args:
        max_rows: rows of the table.
        vocabulary: logits of a row.
        device: device of the logits.

    Attributes:
        last: int64 ``[2, n]``, result of the last call: tokens, and 1 where a row's logits were invalid. Each call
            creates a new tensor.
        logprobs: of the last call; None: no row asked for any.
    """

    @no_inference_mode
    def __init__(self, max_rows: int, vocabulary: int, device: torch.device | str) -> None:
        for name, value in (("max_rows", max_rows), ("vocabulary", vocabulary)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        self.max_rows, self.vocabulary, self.device = max_rows, vocabulary, torch.device(device)
        self._asked: list[Settings | None] = [None] * max_rows
        self._generators: list[torch.Generator | None] = [None] * max_rows
        # Temperature, top-p, top-k, min-p. One additional row is for logits of inactive rows.
        self._settings = torch.ones(max_rows + 1, 4, device=self.device)
        self._edits = LogitEdits(max_rows, vocabulary, self.device)
        self._plans: dict[tuple[int, ...], Plan] = {}  # of the latest rows
        self._noise: list[deque[Tensor]] = [deque() for _ in range(max_rows)]  # of next tokens, [vocabulary] each
        self.last = torch.zeros(2, 0, dtype=torch.long, device=self.device)
        self.logprobs: Logprobs | None = None

    # ------------------------------------------------------------------ rows

    @no_inference_mode
    @torch.no_grad()
    def set(self, row: int, sampling: Settings, prompt_ids: Sequence[int] | Tensor = ()) -> None:
        """Set the sampling settings of a row whose request begins, or begins again.

        Args:
            sampling: the request's settings.
            prompt_ids: tokens ``[n]`` of the prompt, and of the answer if the request begins again. Used only for a
                repetition penalty.

        Raises:
            ValueError: there is no such row, or an id is outside the vocabulary. Nothing has changed.
        """
        self._check(row)
        ids = self._ids(prompt_ids) if logit_edits.repeats(sampling) else None
        if sampling.logit_bias:
            self._ids([token for token, _ in sampling.logit_bias])  # an error for others than there are
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocabulary else self.vocabulary
        top_p = sampling.top_p if sampling.top_p < 1 else torch.inf  # sums of all probabilities round to 1 too early
        temperature = 1.0 if _greedy(sampling) else sampling.temperature
        self._settings[row].copy_(sent([temperature, top_p, top_k, sampling.min_p], torch.float32, self.device))
        self._edits.set(row, sampling, ids)
        self._generators[row] = None
        if sampling.seed is not None and not _greedy(sampling):
            self._generators[row] = torch.Generator(self.device).manual_seed(sampling.seed)
        self._asked[row] = sampling
        self._noise[row] = deque()
        self._plans.clear()

    @torch.no_grad()
    def move(self, row: int, to: int) -> None:
        """Move a row's request to the free row ``to``. Raises ValueError if that is taken, or there is no request."""
        self._check(row)
        self._check(to)
        if self._asked[row] is None:
            raise ValueError(f"row {row} has no settings to move: set() it first")
        if self._asked[to] is not None:
            raise ValueError(f"row {to} is taken: clear() it first")
        self._settings[to].copy_(self._settings[row])
        self._edits.move(row, to)
        self._generators[to] = self._generators[row]
        self._asked[to] = self._asked[row]
        self._noise[to] = self._noise[row]
        self.clear(row)

    def clear(self, row: int) -> None:
        """Clear the settings of a row. Raises ValueError if there is no such row."""
        self._check(row)
        self._asked[row] = self._generators[row] = None
        self._noise[row] = deque()
        self._plans.clear()

    def _check(self, row: int) -> None:
        if not 0 <= row < self.max_rows:
            raise ValueError(f"there is no row {row}: rows are 0 to {self.max_rows - 1}")

    def _ids(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Ids ``[n]`` on the device. Checked only on the host, because a check on the device would wait for it."""
        found = torch.as_tensor(ids, dtype=torch.long).view(-1)
        if found.device.type == "cpu" and len(found):
            low, high = found.aminmax()
            if low < 0 or high >= self.vocabulary:
                raise ValueError(f"token ids must be 0 to {self.vocabulary - 1}, got {int(low)} to {int(high)}")
        return sent(found, torch.long, self.device)

    # ------------------------------------------------------------------ tokens

    @torch.no_grad()
    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        allowed: Allowed | None = None,
        ahead: Mapping[int, int] = MappingProxyType({}),
    ) -> Tensor:
        """Draw one token for each row.

        Args:
            logits: ``[n, vocabulary]``, of any dtype; not changed.
            rows: their rows; -1 for inactive ones, whose tokens are meaningless.
            allowed: the only tokens that may follow in some places. None: all may everywhere.
            ahead: rows whose token may be taken back, and how many such tokens they have before it.

        Returns:
            int64 ``[n]``: row 0 of :attr:`last`.

        Raises:
            ValueError: the logits have the wrong shape, or a row has no settings.
        """
        key = tuple(rows)
        if logits.shape != (len(key), self.vocabulary):
            raise ValueError(f"logits of {len(key)} rows are [{len(key)}, {self.vocabulary}], got {list(logits.shape)}")
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._planned(key)
        most, tokens = logits.max(-1)
        bad = ~most.isfinite()  # before the penalty: a client's penalty must not make a row fail
        given = logits
        if not plan.edits.empty or allowed is not None:
            logits = self._edits.apply(logits, plan.edits, allowed)
            most, tokens = logits.max(-1)
        self.last = torch.stack([tokens, bad.long()])
        tokens = self.last[0]
        if plan.any_drawn:
            picked = logits if plan.drawn is None else logits[plan.drawn]
            best = most if plan.drawn is None else most[plan.drawn]
            drawn = self._draw(picked.float(), best.float(), plan, ahead)
            tokens.copy_(drawn) if plan.drawn is None else tokens.index_copy_(0, plan.drawn, drawn)
        self._edits.drawn(tokens, plan.edits)
        self.logprobs = None if plan.told_index is None else self._tell(given, tokens, plan)
        return tokens

    @staticmethod
    def _tell(logits: Tensor, tokens: Tensor, plan: Plan) -> Logprobs:
        found = logits[plan.told_index].float().log_softmax(-1)
        drawn = found.gather(1, tokens[plan.told_index][:, None])
        best = found.topk(plan.told_most)
        return Logprobs(plan.told, torch.cat([drawn, best.values], 1), best.indices)

    def _planned(self, rows: tuple[int, ...]) -> Plan:
        """The plan for these rows, made again when the rows or their settings change."""
        missing = [row for row in rows if row != -1 and (not 0 <= row < self.max_rows or self._asked[row] is None)]
        if missing:
            raise ValueError(f"rows {missing} have no settings: set() them first")
        asked = [None if row == -1 else self._asked[row] for row in rows]
        index = self._index([self.max_rows if row == -1 else row for row in rows])
        places = [i for i, sampling in enumerate(asked) if sampling is not None and not _greedy(sampling)]
        drawn = [asked[i] for i in places]
        few = [i for i, sampling in enumerate(drawn) if 0 < sampling.top_k < self.vocabulary]
        mass = [i for i, sampling in enumerate(drawn) if sampling.top_p < 1 and i not in few]
        told = tuple(i for i, sampling in enumerate(asked) if sampling is not None and sampling.logprobs is not None)
        seeded = tuple((i, rows[place]) for i, place in enumerate(places) if drawn[i].seed is not None)
        return Plan(
            edits=self._edits.plan(asked, index),
            told=told,
            told_index=self._index(list(told)) if told else None,
            told_most=min(self.vocabulary, max((one.logprobs or 0 for one in asked if one is not None), default=0)),
            drawn=self._index(places) if 0 < len(places) < len(rows) else None,
            drawn_rows=tuple(rows[place] for place in places),
            any_drawn=bool(places),
            settings=self._settings[self._index([rows[i] for i in places])],
            few=self._index(few) if few else None,
            most=max((drawn[i].top_k for i in few), default=0),
            few_mass=any(drawn[i].top_p < 1 for i in few),
            mass=self._index(mass) if mass else None,
            any_min=any(sampling.min_p > 0 for sampling in drawn),
            seeded=seeded,
            unseeded=len(seeded) < len(drawn),
        )

    def _index(self, numbers: list[int]) -> Tensor:
        return sent(numbers, torch.long, self.device)

    def _draw(self, logits: Tensor, best: Tensor, plan: Plan, ahead: Mapping[int, int]) -> Tensor:
        """Tokens ``[d]`` of ``logits [d, vocabulary]``, float32, whose largest are ``best [d]``."""
        temperature, _, _, min_p = plan.settings.unbind(1)
        # From the largest one: no temperature makes it overflow.
        scores = (logits - best[:, None]).div_(temperature[:, None])
        lowest = min_p.log() if plan.any_min else torch.full_like(best, -torch.inf)
        for places, most, mass in ((plan.few, plan.most, plan.few_mass), (plan.mass, self.vocabulary, True)):
            if places is not None:
                found = _lowest(scores[places], plan.settings[places], most, mass)
                lowest = lowest.index_copy(0, places, torch.maximum(found, lowest[places]))
        if plan.any_min or plan.few is not None or plan.mass is not None:
            scores.masked_fill_(scores < lowest[:, None], -torch.inf)
        noise = torch.empty_like(scores)
        if plan.unseeded:
            noise.exponential_()
        for place, row in plan.seeded:
            if row not in ahead and not self._noise[row]:
                noise[place].exponential_(generator=self._generators[row])
        if ahead or any(self._noise[row] for row in plan.drawn_rows):
            for place, row in enumerate(plan.drawn_rows):
                if row in ahead or self._noise[row]:
                    noise[place] = self._kept(row, ahead.get(row))
        # The largest p / e, as its logarithm: exponential_() never gives 0.
        return scores.sub_(noise.log_()).argmax(-1)

    # ------------------------------------------------------------------ tokens that may be taken back

    def _kept(self, row: int, ahead: int | None) -> Tensor:
        """Noise ``[vocabulary]`` of a row's token after ``ahead`` uncertain ones; None: of its next one, for good."""
        noise = self._noise[row]
        while len(noise) <= (ahead or 0):
            new = torch.empty(self.vocabulary, device=self.device)
            noise.append(new.exponential_(generator=self._generators[row]))
        return noise.popleft() if ahead is None else noise[ahead]

    def keep(self, row: int, tokens: int) -> None:
        """The row's first ``tokens`` uncertain tokens are certain."""
        noise = self._noise[row]
        for _ in range(min(tokens, len(noise))):
            noise.popleft()

    def counted(self, rows: Sequence[int]) -> logit_edits.Counted | None:
        """Token counts of these rows' answers, for :meth:`count_again`; None: no row needs them."""
        asked = [self._asked[row] for row in rows]
        if not any(one is not None and (logit_edits.repeats(one) or logit_edits.counts(one)) for one in asked):
            return None
        return self._edits.counted(self._index([*rows]))

    def count_again(self, before: logit_edits.Counted, tokens: Tensor, used: Tensor) -> None:
        """Count the first ``used [n]`` of ``tokens [n, k]`` of rows, int64, after what was counted ``before``."""
        self._edits.count_again(before, tokens, used)


def _greedy(sampling: Settings) -> bool:
    return sampling.temperature < GREEDY


def _lowest(scores: Tensor, settings: Tensor, most: int, mass: bool) -> Tensor:
    """The lowest score that top-k, and then top-p, keep: ``[n]``.

    A token stays if fewer than k are better, and if the better ones together have less than p of what top-k keeps.

    Args:
        scores: ``[n, vocabulary]``, the largest of each row 0.
        settings: ``[n, 4]``.
        most: the largest k of these rows.
        mass: whether one of them has a top-p.
    """
    _, top_p, top_k, _ = settings.unbind(1)
    ordered = scores.topk(most).values if most < scores.shape[1] else scores.sort(descending=True).values
    lowest = ordered.gather(1, top_k.long()[:, None] - 1)
    if not mass:
        return lowest[:, 0]
    # Scores equal to the lowest stay with it, so they count, also where `ordered` ends before them.
    total = scores.exp().mul_(scores >= lowest).sum(-1, keepdim=True)
    share = ordered.exp().mul_(ordered >= lowest).div_(total)
    better = share.cumsum(-1).sub_(share)
    kept = (better < top_p[:, None]).sum(-1, keepdim=True).clamp_(min=1)
    return torch.maximum(lowest, ordered.gather(1, kept - 1))[:, 0]
