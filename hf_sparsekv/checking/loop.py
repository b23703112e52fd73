"""The loop of exact mode: rounds of drafts and their verification, and dense steps by ``generate()``'s own loop.

It needs no more than a model, a cache, and a call's arguments.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache import SparseCache
from ..cache_layers import ready_for_steps
from ..cache_name import output_name
from ..cuda_graph.optimize import runner_of
from ..row_batch.verifying import selects
from .choice import Choice
from .clock import Clock
from .expected import expected
from .lookup import found_before
from .pace import Pace
from .paces import Paces
from .ragged import Ragged, can_be_ragged
from .text import Text, Until, Verified

CAPTURES = 0.2  # seconds: of a sparse step and of a verification, in a cache that has none yet (.1 each on an H200)


class _Unended(BaseStreamer):
    """A streamer for one of several parts of a text: its end is not the text's."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer

    def put(self, value: Tensor) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:  # what the loop looks for on a streamer
        return getattr(self._streamer, name)


class Loop:
    """Writes the texts of one ``generate()`` call in exact mode.

    Args:
        model: the model.
        cache: attends to everything, except while it drafts.
        text: what there is of it.
        choice, paces: see there.
        dense: ``generate()``'s own loop: ``dense(ids, stopping_criteria, generation_config, streamer, **kwargs)``.
        config: of the call. streamer: of the call; None: there is none.
    """

    def __init__(
        self,
        model: Any,
        cache: SparseCache,
        text: Text,
        choice: Choice,
        paces: Paces,
        dense: Callable[..., Any],
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.model, self.cache, self.text, self.choice, self.paces = model, cache, text, choice, paces
        self.dense, self.config, self.streamer = dense, config, streamer
        self.clock, self.runner = Clock(text.ids.device), runner_of(model)
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
    def pace(self) -> Pace:
        """The pace of the text as it is now."""
        return self.paces.of(len(self.text.ids), self.text.ids.numel(), partial(expected, self.cache))

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
        streamer = None if self.streamer is None else _Unended(self.streamer)
        out = self.dense(self.text.ids, until, self.config, streamer, **self.text.kwargs)
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
        had, rows, pace = text.ids.shape[1], text.ahead, self.pace
        begin, began, before = clock.mark(), time.perf_counter(), self._captures
        found = self._looked_up(drafts)
        if found is not None:
            drafts = found.shape[1]
            ids = torch.cat((text.ids, found), dim=1)
            kwargs = self.model._update_model_kwargs_for_generation({}, dict(text.kwargs), num_new_tokens=drafts)
        else:
            ids, kwargs = self._drafted(drafts) if drafts else (text.ids, text.kwargs)
        middle, between = clock.mark(), self._captures
        self._keep_back(drafts + 1)
        with cache.drafts():
            out = self._pass(ids, drafts + 1, kwargs)
        logits = [one.to(copy=True, dtype=torch.float32, device=ids.device) for one in out.unbind(1)]
        tokens, scores, weights = [], [], []
        for i, one in enumerate(logits):
            given = one.clone() if text.logits is not None else one
            chosen = self.choice(ids[:, : had + i], given, ahead=i, rows=rows)
            tokens.append(text.filled(chosen.tokens))
            scores.append(chosen.scores)
            weights.append(chosen.weights)
        sound = ~torch.stack(weights, dim=1).isnan()
        if not (drafts or self.choice.sample):
            sound.fill_(True)  # generate()'s own loop takes the first token then
        self._told, self._streaming = 0, 0.0
        added = text.add(Verified(ids[:, had:], torch.stack(tokens, dim=1), scores, logits, sound), self._tell)
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

    def _tell(self, tokens: Tensor) -> None:
        """A token of each row, ``[batch]``, has come."""
        self.choice.keep(1)
        self._told += 1
        if self.streamer is not None:
            began = time.perf_counter()
            self.streamer.put(tokens.cpu())
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

    def _drafted(self, drafts: int) -> tuple[Tensor, dict]:
        """All tokens and drafts after them, and the model's arguments for these. The cache holds none of the drafts."""
        text, cache = self.text, self.cache
        ids, kwargs = text.ids, dict(text.kwargs)  # which is changed
        self._keep_back(drafts)
        with cache.row_table.exactness.drafting():
            for i in range(drafts):
                logits = self._pass(ids, 1, kwargs)[:, -1]
                logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
                token = self.choice(ids, logits, ahead=i, rows=text.ahead).tokens
                ids = torch.cat((ids, text.filled(token)[:, None]), dim=1)
                kwargs = self.model._update_model_kwargs_for_generation({}, kwargs)
        cache.crop(-drafts)
        return ids, kwargs

    def _pass(self, ids: Tensor, new: int, kwargs: dict) -> Tensor:
        """Logits ``[batch, new, vocabulary]`` of a forward pass over the last ``new`` tokens."""
        given = self.model.prepare_inputs_for_generation(ids, next_sequence_length=new, **kwargs)
        if "logits_to_keep" in given:
            given["logits_to_keep"] = new
        return self.model(**given, return_dict=True).logits[:, -new:]

    def _keep_back(self, tokens: int) -> None:
        """All layers prepare to take back the next tokens."""
        for layer in self.cache.layers:
            layer.keep_back(tokens)
