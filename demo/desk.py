"""The page's events: tabs, tasks, and how a race is shown."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import gradio as gr
import psutil
import torch

from . import charts, documents, panes
from .caches import METHODS
from .language import Language, Needle
from .models import PROBE, Loaded, ModelError, Models
from .race import Busy, Session, Started, Stepped, Task
from .recording import Recording
from .turns import Turns
from .view import Asked, RaceView

REFRESH = 0.2  # seconds between pictures
DEPTH = 50  # %, of the hidden fact at first; docs/demo.md has the measurements
_ANSWER = 1024  # tokens of context that are left for question and answer at first
SILENT = 600  # seconds until an unused tab's document and conversation are dropped
_SWEEP = 15  # seconds between looks for such tabs


@dataclass
class Tab:
    """One browser tab: its session, the race's earlier questions with both answers, and the chat."""

    session: Session
    history: list[tuple[str, list[str]]] = field(default_factory=list)
    chat: list[Asked] = field(default_factory=list)
    seen: float = field(default_factory=time.monotonic)


class Desk:
    """Serves all tabs; a model, and the machine, are shared by them."""

    def __init__(self, models: Models, recordings: Sequence[Recording] = ()) -> None:
        self.models, self.turns, self.recordings = models, Turns(), list(recordings)
        models.gone = self._forget_lost
        self._tabs: dict[str, Tab] = {}
        self._lock = threading.Lock()
        self._sweeper: threading.Thread | None = None

    # ------------------------------------------------------------------ tabs

    def tab(self, request: gr.Request) -> Tab:
        """The tab that asks."""
        with self._lock:
            tab = self._tabs.setdefault(request.session_hash, Tab(Session(self.turns)))
            tab.seen = time.monotonic()
            if self._sweeper is None:
                self._sweeper = threading.Thread(target=self._sweep, name="demo-sweep", daemon=True)
                self._sweeper.start()
            return tab

    def _sweep(self) -> None:
        """A thread's work while there are tabs: forget the silent ones, whether or not anybody asks for something."""
        while True:
            time.sleep(_SWEEP)
            with self._lock:
                now = time.monotonic()
                for tab in self._tabs.values():
                    if tab.session.busy:
                        tab.seen = now
                left = [key for key, tab in self._tabs.items() if now - tab.seen > SILENT]
                left = [self._tabs.pop(key) for key in left]
                if done := not self._tabs:
                    self._sweeper = None
            for tab in left:
                tab.session.end()
            if done:
                return
            del left

    def _forget_lost(self) -> None:
        """Drop what tabs have read with a model that left memory: it is of no use to them."""
        with self._lock:
            tabs = list(self._tabs.values())
        for tab in tabs:
            tab.session.forget_lost()

    def leave(self, request: gr.Request) -> None:
        """A tab was closed: what runs there stops, its memory is given back."""
        with self._lock:
            tab = self._tabs.pop(request.session_hash, None)
        if tab is not None:
            tab.session.end()

    def stop(self, request: gr.Request):
        """The button Stop."""
        self.tab(request).session.stop.set()
        return gr.update(interactive=False)

    def clear(self, request: gr.Request) -> list:
        """The button Clear: forget the conversation, keep the document."""
        tab = self.tab(request)
        try:
            with tab.session.running():
                tab.session.new_talk()
                tab.history.clear()
        except Busy as busy:
            return [panes.status(str(busy), error=True), gr.update(), gr.update(), gr.update()]
        said = panes.status("A new conversation; the document is not read again.")
        return [said, "", "", ""]

    # ------------------------------------------------------------------ the document

    def length(self, model: str) -> int:
        """Tokens of context at first; fewer if the model was not made for so many and an answer."""
        wanted = 32768 if self.models.device.type == "cuda" else 2048
        return max(512, min(wanted, (self.longest(model) - _ANSWER) // 256 * 256))

    def longest(self, model: str) -> int:
        """Tokens of context at most: what the model was made for, within reason."""
        try:
            return min(self.models.look(model)[1], 1 << 18)
        except ModelError:
            return 1 << 16

    def about(self, model: str, source: str, pasted: str, upload: str | None, length: int) -> str:
        """A line on the document: how long it is, and what the slider does to it."""
        try:
            language, _ = self.models.look(model)
            tokens = len(language.document(self._text(language, source, pasted, upload)))
        except (documents.DocumentError, ModelError) as error:
            return f"<div class='small'>{charts.esc(str(error))}</div>"
        done = "cut" if tokens >= length else f"repeated {length / tokens:.1f} times"
        name = {"Bundled": "Alice in Wonderland" if not language.probe else "Words of the probe's language"}
        return f"<div class='small'>{name.get(source, 'The text')}: {tokens:,} tokens, {done} to {int(length):,}</div>"

    @staticmethod
    def _text(language: Language, source: str, pasted: str, upload: str | None) -> str:
        if source == "Paste":
            return documents.check(pasted or "", "the text box")
        if source == "Upload":
            if not upload:
                raise documents.DocumentError("upload a file first")
            return _uploaded(upload)
        return language.bundled()

    def question(self, model: str, hide: bool, depth: float, length: int, now: str = "") -> str:
        """The question for the hidden fact; what the reader has written, if nothing is hidden."""
        try:
            language, _ = self.models.look(model)
        except ModelError:
            return now
        if hide:
            return _needle(language, depth, length).question
        return now

    def press(self, model: str) -> str:
        """The page's first text: how long a press of the button takes."""
        if self._on_gpu:
            takes = "seconds"
        else:
            takes = "a few seconds" if model == PROBE else "half a minute on two idle cores"
        shown = "Shown below: a recorded race. " if self.recordings else ""
        return f"{shown}Run one here: both caches answer the same question about the same document ({takes})."

    def first(self) -> list[str]:
        """The page's first picture: how the first recording ends, or nothing."""
        view = self.recordings[0].view(float("inf")) if self.recordings else RaceView()
        return self._shown(view, []) if self.recordings else ["", "", "", charts.line_plot(view), "", ""]

    def _shown(self, view: RaceView, history: list) -> list[str]:
        where = {"recorded:": view.recorded} if view.recorded else self.machine()
        return [
            panes.verdict(view), *(panes.pane(view, i, history) for i in range(2)),
            charts.line_plot(view), charts.numbers(view, where), charts.heat_map(view.lanes[1].blocks),
        ]  # fmt: skip

    def chose_model(self, model: str, hide: bool, depth: float) -> list:
        """Controls follow the model."""
        try:
            self.models.look(model)
        except ModelError as error:
            return [gr.update(), gr.update(), panes.status(str(error), error=True)]
        longest, length = self.longest(model), self.length(model)
        slider = gr.update(maximum=longest, value=length)
        return [slider, self.question(model, hide, depth, length), panes.status(self.press(model))]

    # ------------------------------------------------------------------ the race

    def race(
        self,
        request: gr.Request,
        model,
        source,
        pasted,
        upload,
        length,
        hide,
        depth,
        question,
        method,
        offload,
        new_tokens,
        go_on,
        *values,
    ) -> Iterator[list]:
        """The button Race."""
        tab, view = self.tab(request), RaceView(question=question, on_gpu=self._on_gpu)
        try:
            with contextlib.ExitStack() as until_done:
                until_done.enter_context(tab.session.running())
                yield self._page(tab, view, "Loading the model", running=True)
                loaded = until_done.enter_context(self.models.use(model))
                task, needle = self._task(
                    loaded, source, pasted, upload, int(length), hide, depth, question, method, offload,
                    int(new_tokens), go_on, values,
                )  # fmt: skip
                view.wanted = needle.answer if needle else None
                drawn = 0.0
                for event in tab.session.race(loaded, task):
                    if isinstance(event, Started) and not event.follows:
                        tab.history.clear()
                    view.add(event)
                    if time.monotonic() - drawn >= REFRESH:
                        drawn = time.monotonic()
                        self._say(view, loaded)
                        yield self._page(tab, view, running=True)
                stopped = tab.session.stop.is_set()
                self._say(view, loaded)
                last = self._page(tab, view)
                if stopped:
                    tab.history.clear()
                else:
                    tab.history.append((question, [lane.answer for lane in view.lanes]))
            yield last  # the memory is free by now, and another race may begin
        except Exception as error:
            yield from _told(error, lambda message: self._page(tab, view, message, error=True))

    @staticmethod
    def _say(view: RaceView, loaded: Loaded) -> None:
        for lane in view.lanes:
            lane.answer, lane.after = loaded.say(lane.ids)

    def player(self, recording: Recording) -> Callable[[gr.Request], Iterator[list]]:
        """The event of a recording's button."""

        def play(request: gr.Request) -> Iterator[list]:
            yield from self.play(request, recording)

        return play

    def play(self, request: gr.Request, recording: Recording) -> Iterator[list]:
        """Show a recording at the speed at which it ran. Nothing is computed."""
        tab = self.tab(request)
        try:
            with tab.session.running():
                began, view = time.monotonic(), recording.view(0.0)
                while not view.ended and not tab.session.stop.is_set():
                    yield self._page(tab, view, self._played(recording, view), running=True)
                    time.sleep(REFRESH)
                    view = recording.view((time.monotonic() - began) * recording.speed)
                message = self._played(recording, view)
                if tab.session.stop.is_set():
                    tab.session.stop.clear()  # what the tab has read is not what was stopped
                    message = "The recording was stopped."
            yield self._page(tab, view, message)
        except Busy as busy:
            gr.Info(str(busy))
            yield gr.skip()

    @staticmethod
    def _played(recording: Recording, view: RaceView) -> str:
        speed = f" {recording.speed:.1f} times as fast as it ran" if recording.speed > 1 else ""
        if view.ended:
            return f"The recording{speed and ', played' + speed + ','} has ended; nothing ran on this machine."
        return f"Playing a recording{speed}; nothing runs on this machine. Reading took {recording.read_s:.1f} s."

    # ------------------------------------------------------------------ the chat

    def ask(
        self, request: gr.Request, model, source, pasted, upload, length, hide, depth, question, method, offload,
        new_tokens, *values,
    ) -> Iterator[list]:  # fmt: skip
        """The button Ask: one more question about the same document, answered by the cache that is chosen."""
        tab, asked, view = self.tab(request), Asked(question), RaceView(on_gpu=self._on_gpu)
        try:
            with contextlib.ExitStack() as until_done:
                until_done.enter_context(tab.session.running())
                yield self._chat(tab, asked, "Loading the model", running=True)
                loaded = until_done.enter_context(self.models.use(model))
                task, _ = self._task(
                    loaded, source, pasted, upload, int(length), hide, depth, question, method, offload,
                    int(new_tokens), False, values,
                )  # fmt: skip
                task = replace(task, talk="chat", lanes=(1,))
                began, drawn, lane = time.monotonic(), 0.0, view.lanes[1]
                for event in tab.session.race(loaded, task):
                    if isinstance(event, Started) and not event.follows:
                        tab.chat.clear()
                    view.add(event)
                    if isinstance(event, Stepped) and asked.first_s is None:
                        asked.first_s, asked.read_s = time.monotonic() - began, view.read_s
                    if time.monotonic() - drawn >= REFRESH:
                        drawn = time.monotonic()
                        asked.answer = loaded.say(lane.ids)[0]
                        yield self._chat(tab, asked, self._asking(view), running=True)
                asked.answer, asked.median_ms = loaded.say(lane.ids)[0], lane.median_ms
                asked.share = None if lane.stats is None else lane.stats.attended_share
                failed = lane.ended.error if lane.ended else None
                if tab.session.stop.is_set():
                    tab.chat.clear()
                    last = self._chat(tab, None, "Stopped. The next question reads the document again.")
                elif failed:
                    last = self._chat(tab, None, failed, error=True)
                else:
                    tab.chat.append(asked)
                    last = self._chat(tab, None, "Ask again: the document is not read again.")
            yield last
        except Exception as error:
            yield from _told(error, lambda message: self._chat(tab, None, message, error=True))

    @staticmethod
    def _asking(view: RaceView) -> str:
        if view.lanes[1].ids:
            return "Answering."
        if view.reading and view.reading[0] < view.reading[1]:
            return f"Reading the document: {view.reading[0]:,} of {view.reading[1]:,} tokens."
        return "Reading the question."

    def _chat(self, tab: Tab, asked: Asked | None, message: str, running: bool = False, error: bool = False) -> list:
        """All outputs of the chat; ``asked``: the question that is being answered."""
        talk = [*tab.chat, *([asked] if asked else [])]
        said = []
        for each in talk:
            said.append({"role": "user", "content": each.question})
            said.append({"role": "assistant", "content": each.answer or "\u2026"})
        buttons = [gr.update(interactive=not running), gr.update(interactive=running)]
        return [panes.status(message, error=error), said, charts.questions(talk), *buttons]

    def new_chat(self, request: gr.Request) -> list:
        """The button Clear of the chat: forget its conversation, keep the document."""
        tab = self.tab(request)
        try:
            with tab.session.running():
                tab.session.new_talk("chat")
                tab.chat.clear()
        except Busy as busy:
            return [panes.status(str(busy), error=True), gr.update(), gr.update(), gr.update(), gr.update()]
        return self._chat(tab, None, "A new conversation; the document is not read again.")

    # ------------------------------------------------------------------ what both ask

    def _task(
        self, loaded, source, pasted, upload, length, hide, depth, question, method, offload, new_tokens, go_on, values
    ) -> tuple[Task, Needle | None]:
        language = loaded.language
        language.check_question(question)
        head = language.head()
        asked, later = (language.question(question, first) for first in (True, False))
        needle = _needle(language, depth, length) if hide else None
        fact = language.ids(needle.fact) if needle else []
        text = language.document(self._text(language, source, pasted, upload))
        room = length - len(head) - len(fact)
        if room < 1:
            raise documents.DocumentError(f"a context of {length} tokens has no room for the document")
        ids = documents.fit(text, room)
        if fact:
            ids = documents.hide(ids, fact, depth / 100, language.breaks)
        _, longest = self.models.look(loaded.name)
        if length + len(asked) + new_tokens > longest:
            raise documents.DocumentError(
                f"context, question and answer are {length + len(asked) + new_tokens:,} tokens; the model was made for "
                f"{longest:,}: shorten the context"
            )
        names = [(key, control.name) for key, m in METHODS.items() for control in m.controls]
        chosen = {name: value for (key, name), value in zip(names, values) if key == method}
        task = Task(
            (*head, *ids), tuple(asked), tuple(later), method, chosen, bool(offload) and method != "dense", new_tokens,
            bool(go_on),
        )  # fmt: skip
        return task, needle

    # ------------------------------------------------------------------ what it looks like

    @property
    def _on_gpu(self) -> bool:
        return self.models.device.type == "cuda"

    def _page(
        self, tab: Tab, view: RaceView, message: str | None = None, running: bool = False, error: bool = False
    ) -> list:
        """All outputs of the race."""
        message = message or self._message(tab, view)
        fraction = None
        if view.reading and not view.decoding and not view.ended:
            fraction = view.reading[0] / view.reading[1]
        history = [] if view.recorded else tab.history
        buttons = [gr.update(interactive=not running), gr.update(interactive=running)]
        return [
            panes.status(message, fraction, error), *self._shown(view, history), *buttons,
            *(gr.update(interactive=not running) for _ in self.recordings),
        ]  # fmt: skip

    def _message(self, tab: Tab, view: RaceView) -> str:
        errors = [
            f"{lane.name or 'a pane'}: {lane.ended.error}" for lane in view.lanes if lane.ended and lane.ended.error
        ]
        if errors:
            return "; ".join(errors)
        if tab.session.stop.is_set():
            return "Stopped. The memory of document and answers is given back; the next race reads the document again."
        if view.ended:
            read = "was read before" if view.reused else f"took {view.read_s or 0:.1f} s to read"
            return f"Done. The document {read}; ask again, and it is not read again."
        if view.decoding:
            others = (
                f" {view.others} other tab{'s' * (view.others > 1)} run too: turns are shared." if view.others else ""
            )
            return f"Decoding in turns.{others}"
        if view.reading:
            done, total = view.reading
            return f"Reading the document: {done:,} of {total:,} tokens."
        return "Getting ready."

    def machine(self) -> dict[str, str]:
        """Where it runs, and memory in use."""
        process = psutil.Process().memory_info().rss
        device = self.models.device
        if device.type != "cuda":
            threads = torch.get_num_threads()
            return {"CPU,": f"{threads} thread{'s' * (threads > 1)}", "process memory": charts.size(process)}
        free, total = torch.cuda.mem_get_info(device)
        return {
            f"{torch.cuda.get_device_name(device)}, memory": f"{charts.size(total - free)} of {charts.size(total)}",
            "process memory": charts.size(process),
        }


def _needle(language: Language, depth: float, length: int) -> Needle:
    return language.needle(zlib.crc32(f"{depth:g}-{int(length)}".encode()))


def _told(error: Exception, page: Callable[[str], list]) -> Iterator[list]:
    """The page's answer to an error; ``page`` makes its outputs of a message."""
    if isinstance(error, Busy):
        gr.Info(str(error))
        yield gr.skip()
    elif isinstance(error, torch.OutOfMemoryError):
        yield page("The memory of the GPU is full: take a shorter context, or offload.")
    elif isinstance(error, ModelError | documents.DocumentError | ValueError | MemoryError):
        yield page(str(error))
    else:  # a model whose files are damaged fails anywhere; the page must not stay at "Loading"
        traceback.print_exception(error)
        yield page(f"{type(error).__name__}: {error} (its traceback is where the server was started)")


_UPLOADS: dict[str, str] = {}


def _uploaded(path: str) -> str:
    """The text of an upload, read once; the newest few are kept."""
    if path not in _UPLOADS:
        text = documents.read_upload(path)
        while len(_UPLOADS) >= 4:
            _UPLOADS.pop(next(iter(_UPLOADS)))
        _UPLOADS[path] = text
    return _UPLOADS[path]
