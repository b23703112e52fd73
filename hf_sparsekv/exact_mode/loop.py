"""The loop of exact mode: rounds of drafts and their verification, and dense steps by ``generate()``'s own loop.

Apart from what installs it because it needs no more than a model, a cache, and a call's arguments.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..bookkeeping.making import use_rings
from ..cache import SparseCache
from ..cache_name import output_name
from ..layers.decode import plan_of
from ..layers.sliding import SlidingRing
from .choice import Choice
from .pace import Pace


class _Until(StoppingCriteriaList):
    """Criteria of a segment, which ends by them or at ``length`` tokens. ``done [batch]``: rows that ended by them."""

    def __init__(self, criteria: StoppingCriteriaList, length: int) -> None:
        super().__init__(criteria)
        self._length, self.done = length, None

    def __call__(self, input_ids, scores, **kwargs) -> Tensor:  # type: ignore[override]
        done = super().__call__(input_ids, scores, **kwargs)
        self.done = done if self.done is None else self.done | done
        return done | (input_ids.shape[1] >= self._length)

    @property
    def max_length(self) -> int:
        most = super().max_length
        return self._length if most is None else min(most, self._length)


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


class Clock:
    """Times of work on a device, without a wait: read them after the next one."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        """This moment in the device's work."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds."""
        return 1e-3 * begin.elapsed_time(end) if self._on_gpu else end - begin


class Text:
    """The texts of one ``generate()`` call, prompts included, and what belongs to them.

    All rows have as many tokens: a round accepts what the row accepts that accepts least.

    Attributes:
        ids: ``[batch, n]``, all tokens. Their last one is not cached yet.
        kwargs: the model's further arguments for these.
        unfinished: bool ``[batch]``.
        ended: all rows have ended. some_ended: at least one has.
        scores, logits: as ``generate()`` returns them; None: not asked for.
    """

    def __init__(self, ids: Tensor, criteria: StoppingCriteriaList, config: GenerationConfig, kwargs: dict) -> None:
        self.ids, self.criteria, self.kwargs = ids, criteria, kwargs
        self.unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self.ended = self.some_ended = False
        returns = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if returns and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if returns and config.output_logits else None
        pads = any(hasattr(one, "eos_token_id") for one in criteria)
        self._pad = getattr(config, "_pad_token_tensor", None) if pads else None
        if self._pad is not None:
            self._pad = self._pad.to(ids.device)
        self._theirs = not all(type(one).__module__.startswith("transformers.") for one in criteria)

    @property
    def room(self) -> int | None:
        """Tokens that may still come; None: no limit."""
        most = self.criteria.max_length
        return None if most is None else most - self.ids.shape[1]

    def filled(self, tokens: Tensor) -> Tensor:
        """``tokens [batch]`` with padding for rows that have ended."""
        return tokens if self._pad is None or not self.some_ended else torch.where(self.unfinished, tokens, self._pad)

    def end_rows(self, done: Tensor) -> None:
        """Rows end, bool ``[batch]``. Waits for the device."""
        self.unfinished = self.unfinished & ~done
        left = self.unfinished.tolist()
        self.ended, self.some_ended = not any(left), not all(left)

    def extend(self, tokens: Tensor, scores: list[Tensor], logits: list[Tensor]) -> int:
        """Add ``tokens [batch, n]`` up to the first that ends a row; what its row gets next depends on it.

        Returns:
            How many were added.
        """
        n, done = self.ids.shape[1], []
        ids = torch.cat((self.ids, tokens), dim=1)
        for i in range(tokens.shape[1]):
            known = None if self.scores is None else self.scores + tuple(scores[: i + 1])
            done.append(self.criteria(ids[:, : n + i + 1], known) & self.unfinished)
            if self._theirs and bool(done[-1].any()):
                break  # criteria of the caller's own see tokens of the text only
        ends = torch.stack([one.any() for one in done]).tolist()
        added = ends.index(True) + 1 if any(ends) else len(ends)
        self.ids = ids[:, : n + added]
        if self.scores is not None:
            self.scores += tuple(scores[:added])
        if self.logits is not None:
            self.logits += tuple(logits[:added])
        if any(ends):
            self.end_rows(done[added - 1])
        return added


class Loop:
    """Writes the texts of one ``generate()`` call in exact mode.

    Args:
        model: the model.
        cache: attends to everything, except while it drafts.
        text: what there is of it.
        choice, pace: see there.
        dense: ``generate()``'s own loop: ``dense(ids, stopping_criteria, generation_config, streamer, **kwargs)``.
        config: of the call. streamer: of the call; None: there is none.
    """

    def __init__(
        self,
        model: Any,
        cache: SparseCache,
        text: Text,
        choice: Choice,
        pace: Pace,
        dense: Callable[..., Any],
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.model, self.cache, self.text, self.choice, self.pace = model, cache, text, choice, pace
        self.dense, self.config, self.streamer = dense, config, streamer
        self.clock = Clock(text.ids.device)

    def run(self) -> Any:
        """What ``generate()`` returns."""
        before, self.cache.going_on = self.cache.going_on, True  # no pass has to look for padding in its mask
        try:
            return self._run()
        finally:
            self.cache.going_on = before

    def _run(self) -> Any:
        text, pace = self.text, self.pace
        self._segment(1)
        self.config = copy.copy(self.config)
        self.config.prefill_chunk_size = None  # the prompt is cached
        use_rings(self.cache)
        while not text.ended:
            drafts, steps = pace.next(self._selects())
            room = text.room
            drafts = drafts if room is None else min(drafts, room - 1)
            if drafts > 0 or self.choice.ahead or text.some_ended:
                self._round(max(0, drafts))
            else:
                begin = time.perf_counter()
                had = text.ids.shape[1]
                self._segment(steps or 1)
                pace.stepped(text.ids.shape[1] - had, time.perf_counter() - begin)
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return text.ids
        kind = GenerateDecoderOnlyOutput
        return kind(sequences=text.ids, scores=text.scores, logits=text.logits, **{output_name(kind): self.cache})

    def _selects(self) -> bool:
        """Whether sparse steps would select: the last layer's, because the first ones may be dense anyway."""
        layer = self.cache.sparse_layers[-1]
        with self.cache.row_table.exactness.drafting():
            return not plan_of(layer.store, layer.policy).dense

    def _segment(self, steps: int) -> None:
        """Some dense steps by ``generate()``'s own loop."""
        text, had = self.text, self.text.ids.shape[1]
        until = _Until(text.criteria, had + steps)
        streamer = None if self.streamer is None else _Unended(self.streamer)
        out = self.dense(text.ids, until, self.config, streamer, **text.kwargs)
        if isinstance(out, Tensor):
            text.ids = out
        else:
            text.ids = out.sequences
            if text.scores is not None:
                text.scores += out.scores
            if text.logits is not None:
                text.logits += out.logits
        self._told(text.ids.shape[1] - had)
        assert until.done is not None
        text.end_rows(until.done)

    def _told(self, tokens: int) -> None:
        """Have the model's arguments tell of so many more tokens."""
        self.text.kwargs = self.model._update_model_kwargs_for_generation({}, self.text.kwargs, num_new_tokens=tokens)

    # ------------------------------------------------------------------ a round

    def _round(self, drafts: int) -> None:
        """Draft, verify, and take back what full attention would not have said."""
        cache, held = self.cache, self.cache.get_seq_length()
        try:
            self._drafted_and_verified(drafts)
        except BaseException:
            more = cache.get_seq_length() - held
            if more > 0 and not any(layer.broken for layer in cache.sparse_layers):
                cache.crop(-more)  # an interrupt leaves no draft in a cache that the caller keeps
            raise

    def _drafted_and_verified(self, drafts: int) -> None:
        text, cache, clock = self.text, self.cache, self.clock
        had = text.ids.shape[1]
        begin = clock.now()
        ids, kwargs = self._drafted(drafts) if drafts else (text.ids, text.kwargs)
        middle = clock.now()
        self._can_take_back(drafts + 1)
        with cache.drafts():
            out = self._pass(ids, drafts + 1, kwargs)
        logits = [one.to(copy=True, dtype=torch.float32, device=ids.device) for one in out.unbind(1)]
        tokens, scores = [], []
        for i, one in enumerate(logits):
            token, score = self.choice(ids[:, : had + i], one.clone() if text.logits is not None else one, ahead=i)
            tokens.append(text.filled(token))
            scores.append(score)
        chosen = torch.stack(tokens, dim=1)
        end = clock.now()
        accepted = self._agreed(ids[:, had:], chosen)
        added = text.extend(chosen[:, : accepted + 1], scores, logits)
        cache.crop(added - drafts - 1)
        self.choice.keep(added)
        self._told(added)
        if self.streamer is not None:
            for token in text.ids[:, had:].cpu().unbind(1):
                self.streamer.put(token)
        if drafts:
            exactness = cache.row_table.exactness
            exactness.drafted += drafts * len(ids)
            exactness.accepted += accepted * len(ids)
            self.pace.drafted(drafts, accepted, clock.between(begin, middle), clock.between(middle, end))

    def _drafted(self, drafts: int) -> tuple[Tensor, dict]:
        """All tokens and drafts after them, and the model's arguments for these. The cache holds none of the drafts."""
        text, cache = self.text, self.cache
        ids, kwargs = text.ids, dict(text.kwargs)  # which is changed
        self._can_take_back(drafts)
        with cache.row_table.exactness.drafting():
            for i in range(drafts):
                logits = self._pass(ids, 1, kwargs)[:, -1]
                token, _ = self.choice(ids, logits.to(copy=True, dtype=torch.float32, device=ids.device), ahead=i)
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

    def _can_take_back(self, tokens: int) -> None:
        """Rings of sliding layers keep what the next tokens overwrite."""
        for layer in self.cache.layers:
            if isinstance(layer, SlidingRing):
                layer.keep_back(tokens)

    def _agreed(self, drafted: Tensor, chosen: Tensor) -> int:
        """How many of the drafts ``[batch, k]`` all rows have chosen, ``[batch, k + 1]``. Waits for the device."""
        if not drafted.shape[1]:
            return 0
        return int((drafted == chosen[:, :-1]).all(0).int().cumprod(0).sum())
