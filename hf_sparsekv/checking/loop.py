"""The loop of checked texts: rounds of drafts and their exact pass, and dense steps by ``generate()``'s own loop.

It needs no more than a model, a cache, and a call's arguments.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache_name import output_name
from ..cuda_graph.optimize import runner_of
from ..kv.audited import Audited
from ..layers.kinds import ready_for_steps
from ..row_batch.verifying import selects
from .call import Call
from .choice import Choice, Chosen
from .clock import Clock
from .exact_copy import make_room
from .expected import expected
from .lookup import found_before
from .losses import losses
from .passes import logits_of
from .ragged import Ragged, can_be_ragged
from .rules import Rule
from .schedule import Schedule, Schedules
from .streaming import Early, Unended
from .text import Added, Text, Until, Verified

MANY = 16  # drafts after which a longer round looks whether all rows have ended, which waits for the device
CAPTURES = 0.2  # seconds: of a sparse step and of a verification, in a cache that has none yet (.1 each on an H200)


class Loop:
    """Writes the texts of one ``generate()`` call: sparse steps draft, and an exact pass looks at the drafts.

    Args:
        call: what was asked. Its cache attends to everything, except while it drafts.
        text: what there is of it.
        choice: which token comes next.
        schedules: how many tokens are drafted before each pass.
        rule: which of them stay.
        log: gets what the rule has compared; None: nobody asks.
        shows_drafts: the streamer gets drafts at once (:class:`.streaming.Early`).
    """

    def __init__(
        self,
        call: Call,
        text: Text,
        choice: Choice,
        schedules: Schedules,
        rule: Rule,
        log: Audited | None = None,
        shows_drafts: bool = False,
    ) -> None:
        self.model, self.cache, self.text, self.choice = call.model, call.cache, text, choice
        self.schedules, self.rule = schedules, rule
        self.dense, self.config, self.streamer = call.dense, call.config, call.streamer
        self.clock, self.runner = Clock(text.ids.device), runner_of(call.model)
        self.log, self.early = log, Early(call.streamer) if shows_drafts else None
        self._told, self._streaming = 0, 0.0  # of a round: tokens that were told, and the seconds that this took

    def run(self) -> Any:
        """Run to the end of the text: the result of ``generate()``."""
        before, self.cache.going_on = self.cache.going_on, True  # no pass has to look for padding in its mask
        try:
            return self._run()
        finally:
            self.cache.going_on = before
            try:
                self.choice.rewind()  # a seeded script draws the same numbers after this call, whatever was drafted
            except BaseException:  # an interrupt
                self.choice.rewind()
                raise

    def _run(self) -> Any:
        text = self.text
        self._segment(text.until(1))
        self.config = copy.copy(self.config)
        self.config.prefill_chunk_size = None  # the prompt is cached
        ready_for_steps(self.cache)
        if self.rule.compares and self.text.room is not None:
            make_room(self.cache, self.text.room)
        kept = self.config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)
        if self.streamer is None and can_be_ragged(self.text, self.cache, self.choice.processors, kept):
            text = self.text = Ragged(self.text)
        while not text.ended:
            pace = self.pace
            room = text.room
            sparse = pace.drafting or self._selects()  # and then so do the steps after them
            drafts, steps = pace.next(sparse, price=0.0 if pace.drafting else self._price(), room=room)
            drafts = drafts if room is None else min(drafts, room - 1)
            if drafts > 0:
                self._round(drafts)
            elif any(text.ahead or ()) or (kept and text.some_ended):
                self._single(max(1, steps))
            else:
                self.choice.rewind()
                began, until = time.perf_counter(), text.until(max(1, steps))
                added = self._segment(until)
                seconds = until.step_seconds
                whole = (time.perf_counter() - began) / added
                pace.stepped(whole if seconds is None else seconds, added, alone=seconds is not None)
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return text.sequences
        kind: Any = GenerateDecoderOnlyOutput
        return kind(sequences=text.sequences, scores=text.scores, logits=text.logits, **{output_name(kind): self.cache})

    @property
    def pace(self) -> Schedule:
        """The schedule of the text as it is now."""
        return self.schedules.of(len(self.text.ids), self.text.ids.numel(), partial(expected, self.cache))

    def _price(self) -> float:
        """Seconds of captures before the first round can be replayed: none if this cache has verified drafts before."""
        if self.runner is None or self.text.ids.device.type != "cuda":
            return 0.0
        graphs: Any = self.runner.graphs.get(self.cache, ())
        return 0.0 if any(key[0][1] > 1 for key in graphs) else CAPTURES

    def _selects(self) -> bool:
        """Whether sparse steps would select."""
        with self.cache.row_table.exactness.drafting():
            return selects(self.cache)

    def _segment(self, until: Until) -> int:
        """Dense steps by ``generate()``'s own loop. Returns how many there were."""
        streamer = None if self.streamer is None else Unended(self.streamer)
        out = self.dense(self.text.ids, until, self.config, streamer, **self.text.kwargs)
        if self.log is not None:
            self.log.by_full += until.tokens
            self.cache.row_table.exactness.audited = self.log  # a first prompt has cleared it
        return self.text.add_segment(out, until)

    def _single(self, steps: int) -> None:
        """Dense steps one by one: that loop has one number of tokens for all rows, and writes into those that ended."""
        begun, done = time.perf_counter(), 0
        while done < steps and not self.text.ended:
            self._round(0)
            done += 1
        self.pace.stepped((time.perf_counter() - begun) / done, done)

    # ------------------------------------------------------------------ a round

    def _round(self, drafts: int) -> None:
        """Draft, verify, and take back what full attention would not have said."""
        cache, held = self.cache, self.cache.get_seq_length()
        try:
            self._drafted_and_verified(drafts)
        except BaseException:
            more = cache.get_seq_length() - held
            if more > 0 and self.text.ahead is None and not any(layer.broken for layer in cache.sparse_layers):
                cache.crop(-more)  # an interrupt leaves no draft in a cache that the caller keeps
            raise

    def _drafted_and_verified(self, drafts: int) -> None:
        text, cache, clock = self.text, self.cache, self.clock
        pace = self.pace
        begin, began, before = clock.mark(), time.perf_counter(), self._captures
        found = self._looked_up(drafts)
        sparse = None
        if found is not None:
            drafts = found.shape[1]
            ids = torch.cat((text.ids, found), dim=1)
            kwargs = self.model._update_model_kwargs_for_generation({}, dict(text.kwargs), num_new_tokens=drafts)
        else:
            ids, kwargs, sparse = self._drafted(drafts) if drafts else (text.ids, text.kwargs, None)
            drafts = ids.shape[1] - text.ids.shape[1]
        middle, between = clock.mark(), self._captures
        self._keep_back(drafts + 1)
        with cache.drafts():
            out = logits_of(self.model, ids, drafts + 1, drafts + 1, kwargs)
        verified = self._verified(ids, out, sparse)
        self._told, self._streaming = 0, 0.0
        columns = text.columns
        added = text.add(verified, self._tell)
        if self.early is not None:
            self.early.take_back()
        self._note(verified, added, columns)
        text.take_back(cache)
        self.choice.keep(added.tokens - self._told)
        if drafts:
            exactness = cache.row_table.exactness
            exactness.drafted += drafts * added.rows
            exactness.accepted += added.accepted
            drafting = clock.seconds(begin, middle)
            verifying = None if self._captures > between else time.perf_counter() - began - drafting - self._streaming
            if found is not None:
                pace.looked_up(drafts, added, verifying)
            else:
                pace.drafted(drafts, added, None if between > before else drafting, verifying)
        if added.stuck is not None and drafts:
            self._round(0)  # a draft may be what is wrong: its NaN spoil the logits before it, too
        elif added.stuck is not None:
            self.choice.keep(added.stuck)
            self.choice.refuse()

    def _verified(self, ids: Tensor, out: Tensor, sparse: Tensor | None) -> Verified:
        """The tokens after the text, by full attention's logits ``out [batch, k + 1, vocabulary]``, and by the rule.

        ``ids``: with the ``k`` drafts. ``sparse``: the logits of these by sparse steps, where the rule compares.
        """
        text, had, drafts = self.text, self.text.ids.shape[1], out.shape[1] - 1
        drafted, found, stays = ids[:, had:], None, None
        if sparse is not None:
            found = losses(out[:, :drafts].to(ids.device), sparse, drafted)
            left = self.rule.left(found)
            assert left is not None  # of rules that compare
            stays = torch.nn.functional.pad(~left, (0, 1))
        no_scores: Any = None
        tokens, scores, logits, weights = [], [], [], []
        for i, settled in enumerate(self._settled(stays, drafts + 1)):
            if settled:
                chosen, one = Chosen(drafted[:, i], no_scores, torch.zeros(len(ids), device=ids.device)), None
            else:
                one = out[:, i].to(copy=True, dtype=torch.float32, device=ids.device)
                given = one.clone() if text.logits is not None else one
                chosen = self.choice(ids[:, : had + i], given, ahead=i, rows=text.ahead)
                if stays is not None and i < drafts:
                    token = drafted[:, i].where(stays[:, i], chosen.tokens)
                    chosen = Chosen(token, chosen.scores, chosen.weights.masked_fill(stays[:, i], 0.0))
            tokens.append(text.filled(chosen.tokens))
            scores.append(chosen.scores)
            logits.append(one)
            weights.append(chosen.weights)
        sound = ~torch.stack(weights, dim=1).isnan()
        if not (drafts or self.choice.sample):
            sound.fill_(True)  # generate()'s own loop takes the first token then
        return Verified(drafted, torch.stack(tokens, dim=1), scores, logits, sound, found, stays)

    def _settled(self, stays: Tensor | None, tokens: int) -> list[bool]:
        """Which of the tokens after the text are drafts that stay in all rows, and need no choice by full attention."""
        if stays is None or self.text.scores is not None or self.text.logits is not None:
            return [False] * tokens
        return stays.all(0).tolist()

    def _note(self, verified: Verified, added: Added, columns: list[int]) -> None:
        """Add the tokens of a round to the audit; ``columns``: of each row before it."""
        log = self.log
        if log is None:
            return
        if verified.losses is None or verified.stays is None:
            log.by_full += sum(added.counts)
            return
        numbers = torch.nn.functional.pad(verified.losses.numbers, (0, 0, 0, 1))
        log.add(added.counts, columns, verified.chosen, numbers, verified.stays)
        log.returns += added.rejected
        log.taken_back += added.rows * verified.drafted.shape[1] - added.accepted

    def _tell(self, tokens: Tensor) -> None:
        """A token of each row, ``[batch]``, has come."""
        self.choice.keep(1)
        self._told += 1
        if self.streamer is not None:
            began = time.perf_counter()
            (self.early or self.streamer).put(tokens.cpu())
            self._streaming += time.perf_counter() - began  # which is not the round's

    @property
    def _captures(self) -> int:
        """Passes that were captured so far: that takes as long as many replays."""
        return 0 if self.runner is None else self.runner.captures

    def _looked_up(self, drafts: int) -> Tensor | None:
        """Drafts ``[1, k]`` of the text itself, if they are expected to give more than ``drafts`` steps."""
        text, pace = self.text, self.pace
        if not drafts or len(text.ids) > 1 or not pace.looks_up(drafts):
            return None
        room = pace.most if text.room is None else min(pace.most, text.room - 1)
        found = found_before(text.ids, room)
        best = 0 if found is None else pace.best_of(found.shape[1], drafts)
        return None if found is None or not best else found[:, :best]

    def _drafted(self, drafts: int) -> tuple[Tensor, dict, Tensor | None]:
        """All tokens and drafts after them, the model's arguments for these, and the drafts' logits if the rule asks.

        The cache holds none of the drafts.
        """
        text, cache = self.text, self.cache
        ids, kwargs, kept = text.ids, dict(text.kwargs), []  # which are changed
        self._keep_back(drafts)
        with cache.row_table.exactness.drafting():
            for i in range(drafts):
                out = logits_of(self.model, ids, 1, 1, kwargs)[:, -1]
                if self.rule.compares:
                    kept.append(out.to(copy=True, device=ids.device))
                logits = out.to(copy=True, dtype=torch.float32, device=ids.device)
                token = text.filled(self.choice(ids, logits, ahead=i, rows=text.ahead).tokens)
                ids = torch.cat((ids, token[:, None]), dim=1)
                kwargs = self.model._update_model_kwargs_for_generation({}, kwargs)
                if self.early is not None:
                    self.early.draft(token.cpu())
                if drafts > MANY and text.would_end(ids, tell=i % MANY == MANY - 1):
                    break
        cache.crop(text.ids.shape[1] - ids.shape[1])
        return ids, kwargs, torch.stack(kept, dim=1) if kept else None

    def _keep_back(self, tokens: int) -> None:
        """All layers prepare to take back the next tokens."""
        for layer in self.cache.layers:
            layer.keep_back(tokens)
