"""The race: one document, read once; two caches that answer a question about it, in turns."""

from __future__ import annotations

import copy
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from transformers.cache_utils import Cache

from hf_sparsekv import BlockMap, CacheStats, PrefixCache, SparseCache, StepReport
from hf_sparsekv.cache_name import generate_over, over

from .caches import DENSE, METHODS
from .models import Loaded
from .stopwatch import Stopwatch
from .turns import Lane, Stopped, Turns

TURN = 0.15  # seconds of a lane's turn, after which its counters are read
_QUEUED = 64  # events not yet read, before generation waits


@dataclass(frozen=True)
class Task:
    """The task of a race.

    Args:
        context: ids of the document, with what comes before it.
        question: ids of the question; ``follow_up``: the same after an answer.
        method: a key of ``METHODS``; ``values``, ``offload``: its controls.
        new_tokens: tokens to decode.
        go_on: do not stop where the answer ends: clocks need something to measure.
        talk: whose conversations the lanes go on with; each name has its own.
        lanes: which of the two answer: 0 full attention, 1 ``method``.
        rows: sequences that decode together, all over the same document, which is read once and copied. With several
            the lanes run one after the other, for two such caches may not fit the device.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    follow_up: tuple[int, ...]
    method: str
    values: dict = field(default_factory=dict)
    offload: bool = False
    new_tokens: int = 128
    go_on: bool = False
    talk: str = "race"
    lanes: tuple[int, ...] = (0, 1)
    rows: int = 1


@dataclass(frozen=True)
class Reading:
    """The document is being read: ``done`` of ``total`` tokens; ``seconds`` so far, None if it was read before."""

    done: int
    total: int
    seconds: float | None


@dataclass(frozen=True)
class Waiting:
    """Other tabs run as well."""

    others: int


@dataclass(frozen=True)
class Started:
    """A lane begins: in words what it is, and whether it goes on with a conversation."""

    lane: int
    name: str
    follows: bool


@dataclass(frozen=True)
class Stepped:
    """A lane has a new token. With the last one of a turn come the turn's statistics, and ``memory``: bytes of its
    cache on the device and in host memory."""

    lane: int
    report: StepReport
    memory: dict[str, int] | None = None


@dataclass(frozen=True)
class Ended:
    """A lane is done: ``totals`` of this answer, ``blocks`` that a step after it attends to; ``error`` if something
    went wrong, ``stopped`` by the user."""

    lane: int
    totals: CacheStats | None = None
    blocks: BlockMap | None = None
    error: str | None = None
    stopped: bool = False


Event = Reading | Waiting | Started | Stepped | Ended


@dataclass
class _Talk:
    """One pane's conversation: its cache, and the ids in it."""

    cache: Cache
    ids: list[int]


class Busy(RuntimeError):
    """The session is running already."""


class Session:
    """State of one tab: the document that it has read, and a conversation for each pane and for the chat."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._busy = threading.Lock()
        self.stop = threading.Event()
        self._prefix: PrefixCache | None = None
        # Models weakly: a tab that does not run keeps none in memory.
        self._read: tuple | None = None  # whose the prefix is
        self._talks: dict[tuple[str, int], _Talk] = {}
        self._of: tuple | None = None  # what the conversations depend on

    # ------------------------------------------------------------------ running

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around everything that a run does: there is one at a time. A stopped run frees its memory.

        Raises:
            Busy: this session is running already.
        """
        if not self._busy.acquire(blocking=False):
            raise Busy("this tab is running already: press Stop first, or wait")
        try:
            self.stop.clear()
            yield
        finally:
            if self.stop.is_set():
                self.forget()
            self._busy.release()

    def race(self, loaded: Loaded, task: Task) -> Iterator[Event]:
        """Run the task inside :meth:`running`, with an event for everything that happens.

        Ends its threads when the caller stops listening.

        Raises:
            ValueError: the controls of the cache do not fit each other.
        """
        try:
            yield from self._race(loaded, task)
        except Stopped:
            yield from (Ended(lane, stopped=True) for lane in task.lanes)

    def _race(self, loaded: Loaded, task: Task) -> Iterator[Event]:
        makers = self._makers(loaded, task)
        yield from self._prefill(loaded, task)
        of = (weakref.ref(loaded), task.context, task.method, tuple(sorted(task.values.items())), task.offload)
        if self._of != of:
            self._talks.clear()
            self._of = of
        events: queue.Queue[Event] = queue.Queue(_QUEUED)
        groups = [task.lanes] if task.rows > 1 else [(i,) for i in task.lanes]
        threads = [
            threading.Thread(
                target=self._answers, args=(group, loaded, task, makers, events), name=f"race-{group[0]}", daemon=True
            )
            for group in groups
        ]
        for thread in threads:
            thread.start()
        others, ended = -1, 0
        try:
            while ended < len(task.lanes):
                if others != (others := self.turns.runs - 1):
                    yield Waiting(others)
                try:
                    event = events.get(timeout=0.2)
                except queue.Empty:
                    continue
                ended += isinstance(event, Ended)
                yield event
        except GeneratorExit:  # the tab is gone
            self.stop.set()
            raise
        finally:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.05)
                    while not events.empty():
                        events.get_nowait()  # whoever waits for room

    def _makers(self, loaded: Loaded, task: Task) -> list[tuple[str, Callable[[], Cache]]]:
        """For each pane a name and what makes its cache, of all rows, from the prefix."""
        room = len(task.context) + len(task.question) + task.new_tokens + 1024

        def rows(cache: Cache) -> Cache:
            if task.rows > 1:
                cache.batch_repeat_interleave(task.rows)
            return cache

        def dense() -> Cache:
            return rows(copy.deepcopy(self._prefix) if loaded.on_gpu else self._prefix.full())

        if loaded.on_gpu:
            name = "full attention, captured steps (this package's dense cache)"
        else:
            name = "full attention, transformers' DynamicCache with sdpa"
        lanes = [(name, dense)]
        if task.method == DENSE:
            return [*lanes, (name, dense)]
        method = METHODS[task.method]
        empty = [method.make(task.values, task.offload, loaded.model.config, room)]  # complains before anything runs
        where = (
            "full blocks in host memory" if task.offload else "KV on the device" if loaded.on_gpu else "KV in memory"
        )
        return [*lanes, (f"{method.label.lower()}, {where}", lambda: rows(self._prefix.start(empty.pop())))]

    @torch.no_grad()
    def _prefill(self, loaded: Loaded, task: Task) -> Iterator[Reading]:
        """Read the document, unless that is what the session has."""
        total, whose = len(task.context), (weakref.ref(loaded), task.context)
        if self._read == whose:
            yield Reading(total, total, None)
            return
        self.forget()
        lane = Lane(self, self.stop)
        self.turns.join(lane)
        # On a GPU room for answers, too: storage that grows is captured again.
        room = total + 4096 if loaded.on_gpu else None
        spent, prefix = 0.0, PrefixCache(max_length=room, model_config=loaded.model.config)
        try:
            ids = torch.tensor([task.context], device=loaded.device)
            for at in range(0, total, chunk := 8192 if loaded.on_gpu else 512):
                yield Reading(at, total, spent)
                loaded.here()  # each piece may run in another thread
                self.turns.take(lane)
                began = time.perf_counter()
                out = loaded.model(
                    ids[:, at : at + chunk], **over(loaded.model, prefix), use_cache=True, logits_to_keep=1
                )
                out.logits.cpu()  # the work is done
                del out
                spent += time.perf_counter() - began
                self.turns.give(lane, time.perf_counter() - began)
        finally:
            self.turns.leave(lane)
        self._prefix, self._read = prefix, whose
        yield Reading(total, total, spent)

    def _answers(self, numbers: tuple[int, ...], loaded: Loaded, task: Task, makers: list, events: queue.Queue) -> None:
        """A thread's work: one lane after the other."""
        for number in numbers:
            self._answer(number, loaded, task, makers[number], events)
            self.left(number)
            if task.rows > 1:
                self._talks.pop((task.talk, number), None)  # its memory is for the next one
                gc.collect()

    def _answer(self, number: int, loaded: Loaded, task: Task, maker: tuple, events: queue.Queue) -> None:
        """One lane's answer."""
        lane = Lane(self, self.stop)
        self.turns.join(lane)
        ended = Ended(number)
        try:
            loaded.here()
            ended = self._generate(number, loaded, task, maker, events, lane)
        except Stopped:
            ended = Ended(number, stopped=True)
        except torch.OutOfMemoryError:
            ended = Ended(number, error="the memory of the GPU is full: a shorter context, or offload")
        except MemoryError as error:
            ended = Ended(number, error=str(error) or "memory is full: a shorter context")
        except Exception as error:  # whatever it is, the other pane goes on and the page says it
            ended = Ended(number, error=f"{type(error).__name__}: {error}")
        finally:
            if ended.error or ended.stopped:
                self._talks.pop((task.talk, number), None)  # may hold half an answer
            self.turns.leave(lane)
            events.put(ended)

    def stepped(self, number: int) -> None:
        """A lane has a new token, and another may be in flight. A session of another kind may do something then."""

    def left(self, number: int) -> None:
        """A lane's answer has ended. A session of another kind may let go of its cache."""

    def _generate(self, number, loaded: Loaded, task: Task, maker, events: queue.Queue, lane: Lane) -> Ended:
        name, make = maker
        self.turns.take(lane)
        talk = self._talks.get((task.talk, number))
        follows = talk is not None
        if follows:
            talk.ids += task.follow_up
        else:
            talk = self._talks[task.talk, number] = _Talk(make(), [*task.context, *task.question])
        cache = talk.cache
        before = seen = cache.stats() if isinstance(cache, SparseCache) else None
        given = torch.tensor([talk.ids] * task.rows, device=loaded.device)
        events.put(Started(number, name, follows))

        def between(took: list[StepReport]) -> None:
            nonlocal seen
            talk.ids += [report.tokens[0] for report in took]  # every row says the same
            *others, last = took
            if seen is not None and last.index:
                now = cache.stats()
                last, seen = replace(last, stats=now.since(seen)), now
            memory = _memory(cache)
            self.turns.give(lane, sum(report.seconds for report in took))
            for report in others:
                _put(events, Stepped(number, report), self.stop)
            _put(events, Stepped(number, last, memory), self.stop)
            self.turns.take(lane)

        never = loaded.model.config.get_text_config(decoder=True).vocab_size  # no token has this id
        loaded.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            **generate_over(cache),
            max_new_tokens=task.new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=never if task.go_on else sorted(loaded.ends) or never,
            pad_token_id=0,
            # Alone: criteria of our own would make an optimised model's loop wait for each token. Stop raises.
            streamer=Stopwatch(loaded.device, TURN, between, partial(self.stepped, number)),
        )
        if self.stop.is_set():
            raise Stopped
        totals = None if before is None else cache.stats().since(before)
        blocks = self._blocks(talk, loaded, task.rows) if number == 1 and task.talk == "race" else None
        self._settle(talk, len(given[0]), loaded)
        return Ended(number, totals, blocks)

    @staticmethod
    @torch.no_grad()
    def _blocks(talk: _Talk, loaded: Loaded, rows: int) -> BlockMap | None:
        """The blocks that a step after the answer attends to. Marking them takes time in each layer, so the answer's
        own steps do not."""
        cache = talk.cache
        if not isinstance(cache, SparseCache) or len(cache.sparse_layers) < len(cache.layers):
            return None  # a sliding layer cannot give the step's token back
        whole = torch.tensor([talk.ids] * rows, device=loaded.device)
        at = torch.full_like(whole[:, -1:], len(talk.ids) - 1)
        cache.watch_blocks()
        try:
            loaded.model(
                whole[:, -1:], attention_mask=torch.ones_like(whole), position_ids=at,
                **over(loaded.model, cache), use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            return cache.chosen_blocks()
        except torch.OutOfMemoryError:  # the answer is there; only the picture is not
            return None
        finally:
            cache.watch_blocks(False)

    @staticmethod
    def _settle(talk: _Talk, given: int, loaded: Loaded) -> None:
        """Leave the conversation where its answer ended, before the end token. Later tokens were for the clocks."""
        kept = loaded.answer_tokens(talk.ids[given:])
        talk.ids = talk.ids[: given + kept]
        surplus = talk.cache.get_seq_length() - len(talk.ids)
        if surplus > 0:
            talk.cache.crop(-surplus)

    # ------------------------------------------------------------------ memory

    def new_talk(self, name: str = "race") -> None:
        """Forget the conversations of that name, keep the document. Inside :meth:`running`."""
        self._talks = {key: talk for key, talk in self._talks.items() if key[0] != name}

    @property
    def busy(self) -> bool:
        """Something runs."""
        return self._busy.locked()

    def end(self) -> None:
        """Nobody will use the session again: stop what runs, or give its memory back."""
        self.stop.set()
        if self._busy.acquire(blocking=False):  # else the run does it
            try:
                self.forget()
            finally:
                self._busy.release()

    def forget_lost(self) -> None:
        """Give back the memory of a document that was read by a model which is no longer there; not while running."""
        read = self._read
        if read is not None and read[0]() is None and self._busy.acquire(blocking=False):
            try:
                if self._read is read:
                    self.forget()
            finally:
                self._busy.release()

    def forget(self) -> None:
        """Give back the memory of the document and the conversations. Not while running."""
        with self.turns.turn(self):
            self._talks.clear()
            self._prefix = self._read = self._of = None
            gc.collect()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that the document's own cache takes."""
        return {"device": 0, "host": 0} if self._prefix is None else self._prefix.memory_bytes()


def _memory(cache: Cache) -> dict[str, int]:
    if isinstance(cache, SparseCache):
        return cache.memory_bytes()
    held = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return {"device": sum(t.nbytes for t in held if t is not None), "host": 0}


def _put(events: queue.Queue, event: Event, stop: threading.Event) -> None:
    """Wait for room, but not for ever: the listener may be gone."""
    while True:
        try:
            events.put(event, timeout=0.1)
            return
        except queue.Full:
            if stop.is_set():
                raise Stopped from None


if __name__ == "__main__":
    from .record import main

    raise SystemExit(main())
