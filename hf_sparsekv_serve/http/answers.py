"""Responses from handles: the engine's threads write, and each client reads at its own pace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hf_sparsekv.serving.request import Handle, Logprob, NotFollowed, Output, Piece

from .errors import ApiError, dumped, told

JOIN = 256  # texts that wait for a reader before they become one
TICK_S = 1.0
KEEP_ALIVE_S = 15.0  # silence until a keep-alive: proxies and clients give up on silent connections
STALL_S = 60.0  # how long a client may stop reading
LONG = 1 << 12  # characters of a text that is read for calls on a thread
READING = 2  # threads that read tool calls

_READING: WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.CapacityLimiter] = WeakKeyDictionary()

log = logging.getLogger(__name__)


class News(NamedTuple):
    """News of one request: text, log probabilities of tokens, its end if it has ended, and its tokens so far."""

    which: int
    text: str
    end: Output | BaseException | None
    logprobs: tuple[Logprob, ...] = ()
    tokens: int = 0


class Answers:
    """Collects news of several handles for one coroutine. Text that the reader has not taken yet is joined.

    Args:
        handles: the requests' handles, to which it listens.
        text: False if only the ends are needed.
        id: of the client's request, for the log.
    """

    def __init__(self, handles: Sequence[Handle], text: bool = True, id: str = "") -> None:
        self.handles = list(handles)
        self.id = id
        self._text = text
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the attributes below; the event belongs to the loop
        self._texts: list[list[str]] = [[] for _ in handles]
        self._logprobs: list[list[Logprob]] = [[] for _ in handles]
        self._ends: list[Output | BaseException | None] = [None] * len(self.handles)
        self._tokens = [0] * len(self.handles)  # so far
        self._woken = False
        self._event = asyncio.Event()
        for which, handle in enumerate(self.handles):
            handle.listen(partial(self._hear, which))

    def _hear(self, which: int, news: Piece | Output | BaseException) -> None:
        """Take news on the engine's thread, and wake the event loop unless that is pending already."""
        with self._lock:
            if isinstance(news, Piece):
                self._tokens[which] += len(news.token_ids)
            if not isinstance(news, Piece):
                self._ends[which] = news
            elif self._text and (news.text or news.logprobs):
                self._logprobs[which] += news.logprobs
                texts = self._texts[which]
                texts.append(news.text)
                if len(texts) >= JOIN:
                    texts[:] = ["".join(texts)]
            else:
                return
            if self._woken:
                return
            self._woken = True
        self._loop.call_soon_threadsafe(self._event.set)

    def wake(self) -> None:
        """Let :meth:`news` return with the news so far, perhaps none."""
        self._event.set()

    async def news(self) -> list[News]:
        """Wait for news since the last call."""
        await self._event.wait()
        self._event.clear()
        with self._lock:
            self._woken = False
            found = [
                News(which, "".join(texts), end, tuple(logprobs), self._tokens[which])
                for which, (texts, end, logprobs) in enumerate(zip(self._texts, self._ends, self._logprobs))
                if texts or end is not None
            ]
            self._texts = [[] for _ in self.handles]
            self._logprobs = [[] for _ in self.handles]
            self._ends = [None] * len(self.handles)
        return found

    async def outputs(self) -> list[Output]:
        """Wait for all ends.

        Raises:
            BaseException: the error of the first request that failed.
        """
        outputs: dict[int, Output] = {}
        while len(outputs) < len(self.handles):
            for one in await self.news():
                if one.end is not None:
                    outputs[one.which] = finished(one.end, self.handles[one.which].id, self.id)
        return [outputs[which] for which in range(len(self.handles))]

    def cancel(self) -> None:
        """Cancel all requests. It does nothing to those that have ended."""
        for handle in self.handles:
            handle.cancel()


def finished(end: Output | BaseException, id: str, asked: str = "") -> Output:
    """The output of request ``id``, which a client has ``asked`` for. Raises the error for the client if it failed."""
    if isinstance(end, NotFollowed):  # the client's own grammar
        raise told(end, id)
    if isinstance(end, BaseException):
        log.error("%s%s has failed", f"{asked}: " if asked else "", id, exc_info=end)
        raise told(end, id)
    if end.finish_reason == "cancelled":  # not by the client, who is listening
        raise ApiError(503, "the server has ended this request: it is stopping", code="closed")
    return end


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects; to be called after its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, answers: Answers) -> list[Output] | None:
    """All outputs, or None if the client disconnects first. Then the requests are cancelled, as after an error."""
    tasks = [asyncio.ensure_future(answers.outputs()), asyncio.ensure_future(gone(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await tasks[0] if tasks[0].done() else None
    finally:
        answers.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def on_thread(call: Callable[[], Any]) -> Any:
    """Run ``call`` on a thread. Two may run at a time; more would take the interpreter from the engine."""
    loop = asyncio.get_running_loop()
    limiter = _READING.get(loop)
    if limiter is None:
        limiter = _READING[loop] = anyio.CapacityLimiter(READING)
    return await anyio.to_thread.run_sync(call, limiter=limiter)


class Format:
    """Format of the pieces of answers; one object for each stream.

    Attributes:
        reads: whether the answer's text is read for calls. That of a long text, and its end, is on another thread.
    """

    reads = False
    waiting = b": waiting\n\n"  # in silent times
    end = b"data: [DONE]\n\n"

    def encoded(self, data: Any) -> bytes:
        """An event as it is sent."""
        return event(data)

    def first(self, handles: Sequence[Handle]) -> list[object]:
        """Events before all others."""
        return []

    def failed(self, error: ApiError) -> list[object]:
        """Events at the end of a stream that fails."""
        return [error.body()]

    def counted(self, which: int, handle: Handle, tokens: int) -> None:
        """Hear how many tokens an answer has so far, before the events of its last ones are made."""

    def text(self, which: int, text: str, logprobs: Sequence[Logprob] = ()) -> list[object]:
        """Events for new text, and for log probabilities of new tokens."""
        raise NotImplementedError

    def last(self, which: int, output: Output) -> list[object]:
        """Events at the end of one answer."""
        raise NotImplementedError

    def usage(self, outputs: Sequence[Output]) -> list[object]:
        """Events at the end of all answers."""
        return []


class EventStream(Response):
    """Pieces of answers as server-sent events.

    If a client disconnects, or reads nothing for a minute, its requests are cancelled. A slow client gets several
    pieces as one, so no more than its answers is ever buffered.
    """

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, form: Format, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._answers = answers
        self._form = form
        self._sending: float | None = None  # since when
        self._sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, while the client reads them."""
        tasks = [asyncio.ensure_future(self._stream(send)), asyncio.ensure_future(gone(receive))]
        ticking = asyncio.ensure_future(self._tick(tasks[0]))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._answers.cancel()
            for task in (*tasks, ticking):
                task.cancel()
            results = await asyncio.gather(*tasks, ticking, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _tick(self, streaming: asyncio.Task) -> None:
        """Watch a stream with one timer, instead of one for each piece."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if self._sending is not None and now - self._sending > STALL_S:
                log.warning("a client has taken nothing for %g s: its requests are cancelled", STALL_S)
                streaming.cancel()
                return
            if self._sending is None and now - self._sent > KEEP_ALIVE_S:
                self._answers.wake()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events()) as events:
            async for body in events:
                self._sending = time.monotonic()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._sending, self._sent = None, time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        form, outputs = self._form, {}
        count = len(self._answers.handles)
        # The head goes out with it. Of OpenAI's two older APIs an event would pass for the first token.
        yield b": begun\n\n" + b"".join(map(form.encoded, form.first(self._answers.handles)))
        events: list[bytes] = []
        try:
            while len(outputs) < count:
                events = []
                for which, text, end, logprobs, tokens in await self._answers.news():
                    form.counted(which, self._answers.handles[which], tokens)
                    if text or logprobs:
                        new = partial(form.text, which, text, logprobs)
                        long = form.reads and len(text) > LONG
                        events += map(form.encoded, await on_thread(new) if long else new())
                    if end is not None:
                        output = outputs[which] = finished(end, self._answers.handles[which].id, self._answers.id)
                        last = partial(form.last, which, output)
                        events += map(form.encoded, await on_thread(last) if form.reads else last())
                yield b"".join(events) or form.waiting
        except ApiError as error:  # what came with it, of this answer or of others, is told first
            yield b"".join(events) + b"".join(map(form.encoded, form.failed(error)))
            return
        yield b"".join(map(form.encoded, form.usage([outputs[which] for which in range(count)]))) + form.end


def event(data: object, name: str = "") -> bytes:
    """One server-sent event; JSON has no line ends of its own."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + dumped(data) + b"\n\n"
