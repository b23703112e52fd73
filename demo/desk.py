"""What the page's events do: tabs, tasks, and what a race looks like."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import gradio as gr
import psutil
import torch

from . import charts, documents
from .caches import METHODS
from .language import Language, Needle
from .models import Loaded, ModelError, Models
from .race import Busy, Session, Started, Task
from .turns import Turns
from .view import RaceView

REFRESH = 0.2  # seconds between pictures
SILENT = 600  # seconds until the document and the conversation of a tab that nobody uses are forgotten
_SWEEP = 15  # seconds between looks for such tabs


@dataclass
class Tab:
    """One browser tab: its session, and the earlier questions with both answers."""

    session: Session
    history: list[tuple[str, list[str]]] = field(default_factory=list)
    seen: float = field(default_factory=time.monotonic)


class Desk:
    """Serves all tabs; a model, and the machine, are shared by them."""

    def __init__(self, models: Models) -> None:
        self.models, self.turns = models, Turns()
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
        """What tabs have read with a model that gave its place to another is of no use to them."""
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
            return [self.status(str(busy), error=True), gr.update(), gr.update()]
        return [self.status("A new conversation; the document is not read again."), *map(self.empty_pane, range(2))]

    # ------------------------------------------------------------------ the document

    def length(self, model: str) -> int:
        """Tokens of context at first."""
        if self.models.device.type == "cuda":
            return 32768
        return 4096 if model == "probe" else 2048

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

    def chose_model(self, model: str, hide: bool, depth: float) -> list:
        """Controls follow the model."""
        try:
            self.models.look(model)
        except ModelError as error:
            return [gr.update(), gr.update(), self.status(str(error), error=True)]
        longest = self.longest(model)
        length = min(self.length(model), longest)
        slider = gr.update(maximum=longest, value=length)
        return [slider, self.question(model, hide, depth, length), self.status("Press Race.")]

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
        tab, view = self.tab(request), RaceView()
        try:
            with contextlib.ExitStack() as until_done:
                until_done.enter_context(tab.session.running())
                yield self._page(tab, view, None, question, None, "Loading the model", running=True)
                loaded = until_done.enter_context(self.models.use(model))
                task, needle = self._task(
                    loaded, source, pasted, upload, int(length), hide, depth, question, method, offload,
                    int(new_tokens), go_on, values,
                )  # fmt: skip
                drawn = 0.0
                for event in tab.session.race(loaded, task):
                    if isinstance(event, Started) and not event.follows:
                        tab.history.clear()
                    view.add(event)
                    if time.monotonic() - drawn >= REFRESH:
                        drawn = time.monotonic()
                        yield self._page(tab, view, loaded, question, needle, running=True)
                stopped = tab.session.stop.is_set()
                last = self._page(tab, view, loaded, question, needle, running=False)
                if stopped:
                    tab.history.clear()
                else:
                    tab.history.append((question, [_answer(loaded, lane)[0] for lane in view.lanes]))
            yield last  # the memory is free by now, and another race may begin
        except Busy as busy:
            gr.Info(str(busy))
            yield gr.skip()
        except (ModelError, documents.DocumentError, ValueError, MemoryError) as error:
            yield self._page(tab, view, None, question, None, str(error), error=True)
        except torch.OutOfMemoryError:
            message = "The memory of the GPU is full: take a shorter context, or offload."
            yield self._page(tab, view, None, question, None, message, error=True)
        except (
            Exception
        ) as error:  # a model whose files are damaged fails anywhere; the page must not stay at "Loading"
            traceback.print_exc()
            message = f"{type(error).__name__}: {error} (its traceback is where the server was started)"
            yield self._page(tab, view, None, question, None, message, error=True)

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

    def _page(
        self,
        tab: Tab,
        view: RaceView,
        loaded: Loaded | None,
        question: str,
        needle: Needle | None,
        message: str | None = None,
        running: bool = False,
        error: bool = False,
    ) -> list:
        """All outputs."""
        message = message or self._message(tab, view, loaded)
        fraction = None
        if view.reading and not view.decoding and not view.ended:
            fraction = view.reading[0] / view.reading[1]
        panes = [self._pane(tab, i, view, loaded, question, needle) for i in range(2)]
        pictures = [
            charts.line_plot(view),
            self._verdict(view, loaded),
            charts.numbers(view, self.machine()),
            charts.heat_map(view.lanes[1].blocks),
        ]
        buttons = [gr.update(interactive=not running), gr.update(interactive=running)]
        return [self.status(message, fraction, error), *panes, *pictures, *buttons]

    def _message(self, tab: Tab, view: RaceView, loaded: Loaded | None) -> str:
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

    @staticmethod
    def status(message: str, fraction: float | None = None, error: bool = False) -> str:
        """The line above the panes."""
        bar = "" if fraction is None else f"<div class='bar'><i style='width:{100 * fraction:.0f}%'></i></div>"
        return f"<div class='status{' error' * error}' role='status'>{charts.esc(message)}{bar}</div>"

    @staticmethod
    def empty_pane(number: int) -> str:
        """A pane before anything was asked."""
        name = ("full attention", "sparse")[number]
        return f"<div class='pane'><div class='name {charts.NAMES[number]}'>{name}</div></div>"

    def empty_pictures(self) -> dict[str, str]:
        """Element ids of what lies below the panes, and what they hold at first."""
        view = RaceView()
        return {
            "plot": charts.line_plot(view), "verdict": self._verdict(view, None),
            "numbers": charts.numbers(view, self.machine()), "heat": charts.heat_map(None),
        }  # fmt: skip

    @staticmethod
    def _verdict(view: RaceView, loaded: Loaded | None) -> str:
        text = None if loaded is None else view.verdict(loaded.on_gpu)
        return f"<div class='verdict'>{charts.esc(text)}</div>" if text else ""

    def _pane(self, tab: Tab, number: int, view: RaceView, loaded, question: str, needle: Needle | None) -> str:
        lane = view.lanes[number]
        name, _, about = (lane.name or ("full attention", "sparse")[number]).partition(", ")
        said = [f"<p class='q'>{charts.esc(q)}</p><p class='a'>{charts.esc(a[number])}</p>" for q, a in tab.history]
        answer = after = foot = ""
        if loaded is not None:
            answer, after = _answer(loaded, lane)
            foot = f"<span>{len(lane.ids)} tokens</span>"
            if needle is not None and lane.ids:
                found = needle.answer in answer
                over = found or bool(after) or lane.ended is not None
                mark = ("right", "the hidden fact: found") if found else ("wrong", "the hidden fact: not found")
                foot += f"<span class='{mark[0]}'>{mark[1]}</span>" if over else ""
        said.append(
            f"<p class='q'>{charts.esc(question)}</p><p class='a'>{charts.esc(answer)}</p>"
            + (f"<p class='after'>decoding on: &hellip;{charts.esc(after[-60:])}</p>" if after else "")
        )
        return (
            f"<div class='pane'><div class='name {charts.NAMES[number]}'>{charts.esc(name)}</div>"
            f"<div class='about'>{charts.esc(about)}</div><div class='talk'><div>{''.join(said)}</div></div>"
            f"<div class='foot'>{foot}</div></div>"
        )

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


def _answer(loaded: Loaded, lane) -> tuple[str, str]:
    """An answer, and what was decoded after its end."""
    end = next((i for i, token in enumerate(lane.ids) if token in loaded.ends), len(lane.ids))
    decode = loaded.language.tokenizer.decode
    return decode(lane.ids[:end]).strip(), decode(lane.ids[end:])


_UPLOADS: dict[str, str] = {}


def _uploaded(path: str) -> str:
    """The text of an upload, read once; the newest few are kept."""
    if path not in _UPLOADS:
        text = documents.read_upload(path)
        while len(_UPLOADS) >= 4:
            _UPLOADS.pop(next(iter(_UPLOADS)))
        _UPLOADS[path] = text
    return _UPLOADS[path]
