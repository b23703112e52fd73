"""The server: OpenAI's chat and completions, and what an operator asks for."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import anyio
from fastapi import FastAPI, Request
from prometheus_client import Counter
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from ..request import EngineStats, Handle, Output, Sampling, shown
from . import schema
from .answers import Answers, EventStream, Format, on_thread, while_there
from .errors import ApiError, json_response, told
from .metrics import PREFIX, registry
from .scan import PIECE, Scan
from .tools import ToolReader

MAX_BODY = 16 << 20  # bytes: some 4 million tokens of English
BODY_S = 60.0  # that a client may take to send its body
OPEN_BODIES = 16  # of the largest size, which may be held in memory at a time
SMALL_BODY = 1 << 16  # bytes that each may have beside that, so that large bodies do not keep small ones out
MAX_ANSWER = 4096  # tokens of a chat's answer if the client does not say: memory is reserved for it
SUBMITTING = 4  # threads that read bodies, apply templates and tokenise
LARGE = 1 << 18  # bytes of a body; these are read one at a time, or they would take the interpreter from the engine
LIKELY = 8  # characters a token: a text with more of them than that for the whole context is counted in pieces first
COUNTED = 1 << 18  # characters of a piece
CUT = 16  # tokens that a piece may have more because it is cut out
OPENMETRICS = "application/openmetrics-text"
OPEN = ("/health", "/ready", "/metrics")  # without a key

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the server needs of :class:`hf_sparsekv.Engine`."""

    tokenizer: PreTrainedTokenizerBase | None
    max_length: int

    @property
    def max_waiting(self) -> int: ...

    @property
    def ready(self) -> bool: ...

    @property
    def failed(self) -> BaseException | None: ...

    def submit(self, prompt: str | Sequence[int], sampling: Sampling) -> Handle: ...

    def stats(self) -> EngineStats: ...


def create_app(
    engine: Engine,
    model_id: str,
    api_key: str | None = None,
    max_body: int = MAX_BODY,
    max_answer: int | None = MAX_ANSWER,
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """An application for any ASGI server around an engine, which stays its caller's to close.

    Args:
        engine: serves the requests.
        model_id: the name that clients ask for.
        api_key: that clients have to give as ``Authorization: Bearer ...``, whitespace around it left out; ``None``:
            everybody may ask.
        max_body: bytes of a request's body.
        max_answer: tokens of a chat's answer if the client does not say; ``None``: what is left of the context.
        allowed_hosts: names of this server, beside ``localhost`` and IP addresses, that requests to a loopback address
            may be for if there is no key; ``"*"``: any. Otherwise any page in a browser on this machine could ask,
            once its name leads here (DNS rebinding).

    Raises:
        ValueError: ``api_key`` is empty.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("api_key is empty: give one, or None to let everybody in")
    # No pages that describe the interface: they would load scripts from elsewhere.
    # Nor redirects to an address with a slash more or less, which would be made of the client's Host header.
    app = FastAPI(title="hf-sparsekv", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    api = _Api(engine, model_id, max_body, max_answer)
    app.post("/v1/chat/completions")(api.chat)
    app.post("/v1/completions")(api.completions)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{name:path}")(api.model)
    app.get("/health")(api.health)
    app.get("/ready")(api.ready)
    app.get("/metrics")(api.metrics)
    app.exception_handler(ApiError)(_tell)
    app.exception_handler(HTTPException)(_tell_http)
    app.exception_handler(Exception)(_tell_any)
    app.add_middleware(_Gate, api_key=api_key, allowed_hosts=allowed_hosts, count=api.count)
    return app


async def _tell(request: Request, error: ApiError) -> Response:
    return error.response()


async def _tell_http(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return ApiError(404, f"there is nothing at {request.scope['path']}", code="not_found").response()
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response()


async def _tell_any(request: Request, error: Exception) -> Response:
    id = f"error-{uuid.uuid4().hex[:12]}"
    log.error("%s: %s %s has failed", id, request.method, shown(request.scope["path"]))  # the traceback follows
    return ApiError(500, f"the server has failed: {type(error).__name__} ({id} in its log)").response()


class _Gate:
    """Keeps those without the key out, before a body is read, and counts answers by their status.

    Without a key, on a loopback address, it keeps out those who have another name for this machine: pages of a browser.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, allowed_hosts: Sequence[str], count: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._hosts = {host.lower().rstrip(".") for host in allowed_hosts}
        self._key = None if api_key is None else api_key.strip().encode()  # of a file, its line's end is none of it
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        counting = _Counting(send, lambda status: self._count(scope["path"], status))
        if self._key is None and (host := self._foreign(scope)) is not None:
            message = f"this server is not {shown(host)}: ask it by its address, or allow the name (--allow-host)"
            error = ApiError(403, message, code="host_not_allowed")
            return await error.response()(scope, receive, counting)
        if self._key is None or scope["path"] in OPEN or self._admits(scope):
            try:
                return await self._app(scope, receive, counting)
            except Exception:
                counting.ended(500)  # told by the server, outside of this; or a stream that breaks off
                raise
            finally:
                counting.ended()
        message = "the API key is missing or wrong: send `Authorization: Bearer KEY`"
        error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return await error.response()(scope, receive, counting)

    def _foreign(self, scope: Scope) -> str | None:
        """The name that a request is for, if it came to a loopback address and that is not its name."""
        address = (scope.get("server") or ("",))[0] or ""
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if "*" in self._hosts or not _is_loopback(address):
            return None
        for host in given:  # HTTP/1.0 has none, and no browser speaks it
            name = _host_name(host)
            if name != "localhost" and name not in self._hosts and not _is_address(name):
                return host
        return None

    def _admits(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def _host_name(header: str) -> str:
    """Of a Host header: without its port, and without the brackets of IPv6."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0].lower().rstrip(".") if ":" in header else header.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


class _Counting:
    """``send`` of one answer, which is counted once: when it ends, by the status that it began with or failed with."""

    def __init__(self, send: Send, count: Callable[[int], None]) -> None:
        self._send = send
        self._count = count
        self._status: int | None = None  # that it began with
        self._over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif not message.get("more_body", False):
            self.ended()  # before who asked has all of it, and looks at the metrics
        await self._send(message)

    def ended(self, status: int | None = None) -> None:
        """It has come to its end, with ``status`` if that is another one; nobody counts what has not begun."""
        status = status or self._status
        if status is not None and not self._over:
            self._over = True
            self._count(status)


class _Api:
    """The endpoints; see :func:`create_app`."""

    def __init__(self, engine: Engine, model_id: str, max_body: int, max_answer: int | None) -> None:
        self._engine = engine
        self._model_id = model_id
        self._max_body = max_body
        self._max_answer = max_answer
        self._created = int(time.time())
        self._threads: tuple[anyio.CapacityLimiter, anyio.CapacityLimiter] | None = None
        self._held = 0  # bytes of bodies, beside what each may have
        self._registry = registry(engine.stats, lambda: engine.ready)
        about = "Answers to HTTP requests, by endpoint and status."
        self._answered = Counter(PREFIX + "http_requests", about, ["path", "status"], registry=self._registry)

    def count(self, path: str, status: int) -> None:
        """Count an answer."""
        known = ("/v1/chat/completions", "/v1/completions", "/v1/models", *OPEN)
        self._answered.labels(path if path in known else "other", str(status)).inc()

    # What an operator asks for.

    async def health(self) -> Response:
        """The process answers, and its engine has not failed."""
        if (error := self._engine.failed) is not None:
            return ApiError(503, f"the engine has failed: {type(error).__name__}: {error}", code="failed").response()
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """Requests are taken."""
        if self._engine.failed is not None:
            return await self.health()
        if not self._engine.ready:
            return ApiError(
                503, "the engine takes no requests: it starts, drains or is closed", code="closed"
            ).response()
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        # Of what the client accepts only the kind is looked at: versions that are none would be an error.
        kinds = [one.partition(";")[0].strip() for one in request.headers.get("accept", "").split(",")]
        encode, content_type = choose_encoder(OPENMETRICS if OPENMETRICS in kinds else "")
        return Response(encode(self._registry), media_type=None, headers={"content-type": content_type})

    async def models(self) -> Response:
        """The one that is served."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """The one that is served, by its name."""
        schema.check_model({"model": name}, self._model_id)
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        about = {"id": self._model_id, "object": "model", "created": self._created, "owned_by": "hf-sparsekv"}
        return {**about, "max_model_len": self._engine.max_length}

    # Answers.

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        return await self._answer(request, schema.chat, _Chat)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._answer(request, schema.completion, _Completion)

    async def _answer(
        self, request: Request, parse: Callable[[dict[str, Any], Scan], schema.Asked], kind: type[_Shape]
    ) -> Response:
        scan = Scan(self._engine.max_length)
        if self._threads is None:  # belongs to the loop
            self._threads = anyio.CapacityLimiter(SUBMITTING), anyio.CapacityLimiter(1)
        handles: list[Handle] = []
        try:
            async with self._body(request, scan) as body:
                limiter = self._threads[len(body) > LARGE]
                asked, tools = await anyio.to_thread.run_sync(self._submit, body, scan, parse, handles, limiter=limiter)
            answers = Answers(handles, text=asked.stream)
        except BaseException:  # also a server that ends while the thread is at it
            for handle in handles:
                handle.cancel()
            raise
        shape = kind(self._model_id, asked, tools)
        if asked.stream:
            return EventStream(answers, shape)
        outputs = await while_there(request.receive, answers)
        if outputs is None:
            return Response(status_code=499)  # which reaches nobody
        return json_response(await on_thread(partial(shape.whole, outputs)) if shape.reads else shape.whole(outputs))

    @contextlib.asynccontextmanager
    async def _body(self, request: Request, scan: Scan) -> AsyncIterator[bytes]:
        """The body, looked at as it comes. Its bytes are counted among those that are held until this is left."""
        self._check_type(request)
        too_large = ApiError(413, f"the body has more than {self._max_body:,} bytes", code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_body:
            raise too_large
        total = 0

        def hold(more: int) -> None:
            nonlocal total
            before, total = max(0, total - SMALL_BODY), total + more
            self._held += max(0, total - SMALL_BODY) - before
            if total > self._max_body:
                raise too_large
            if total > SMALL_BODY and self._held > OPEN_BODIES * self._max_body:
                message = "too many large bodies are being sent: send it again later"
                raise ApiError(429, message, code="busy", headers={"Retry-After": "1"})

        async def read() -> bytes:
            parts: list[bytes] = []
            refused, unread = None, self._max_body
            async for part in request.stream():
                if refused is not None:  # whoever is still sending does not read, and would not hear why
                    unread -= len(part)
                    if unread < 0:
                        break
                    continue
                try:
                    hold(len(part))
                    for at in range(0, len(part), PIECE):
                        scan.feed(part[at : at + PIECE])
                        if at:
                            await asyncio.sleep(0)  # streams have their turn
                    parts.append(part)
                except ApiError as error:
                    refused, parts = error, []
            if refused is not None:
                raise refused
            return b"".join(parts)

        try:
            try:
                body = await asyncio.wait_for(read(), BODY_S)
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body has not come within {BODY_S:g} s") from None
            except ClientDisconnect:
                raise ApiError(400, "the body has not come whole") from None  # which reaches nobody
            yield body
        finally:
            self._held -= max(0, total - SMALL_BODY)

    def _check_type(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # browsers send other types to this machine for any page that asks them to
            what = shown(kind or "none")
            raise ApiError(415, f"the body must be JSON: send `Content-Type: application/json`, not {what}")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise ApiError(415, f"the body must be sent as it is, without `Content-Encoding: {coding[:40]}`")

    def _submit(
        self,
        body: bytes,
        scan: Scan,
        parse: Callable[[dict[str, Any], Scan], schema.Asked],
        handles: list[Handle],
    ) -> tuple[schema.Asked, ToolReader | None]:
        """On a thread: all that takes long with a long prompt. Adds to ``handles``."""
        fields = schema.loads(body)
        schema.check_model(fields, self._model_id)
        asked, tools = parse(fields, scan), None
        try:
            if asked.messages is not None:
                prompts, default = [self._rendered(asked)], self._max_answer
                if "tools" in asked.template:
                    tools = ToolReader(self._engine.tokenizer, asked.template["tools"], prompts[0])
            else:
                self._check_count(len(asked.prompts))
                prompts, default = [self._ids(one) for one in asked.prompts], schema.COMPLETION_TOKENS
            for prompt in prompts:
                sampling = asked.sampled(len(prompt), self._engine.max_length, default)
                handles.append(self._engine.submit(prompt, sampling))
        except ValueError as error:
            where = "messages" if asked.messages is not None else "prompt"
            raise ApiError(400, str(error), where) from error
        except RuntimeError as error:
            raise told(error) from error
        return asked, tools

    def _check_count(self, prompts: int) -> None:
        """400 for a list that would never be taken, as 429 says that it will be later."""
        most = max(1, self._engine.max_waiting)
        if prompts > most:
            message = f"prompt has {prompts:,} prompts: {most:,} may wait here at a time. Send them in several requests"
            raise ApiError(400, message, "prompt")

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._engine.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer: give the prompt as token ids", "prompt")
        self._check_length(prompt)
        return self._engine.tokenizer(prompt, verbose=False)["input_ids"]

    def _check_length(self, text: str) -> None:
        """400 for a text of far more tokens than the context has.

        Tokenising it whole takes some hundred bytes a token: 16 MB of text for a context of 2,000 tokens took 400 MB.
        """
        most, tokens = self._engine.max_length, 0
        if len(text) <= LIKELY * most:
            return
        for at in range(0, len(text), COUNTED):
            ids = self._engine.tokenizer(text[at : at + COUNTED], add_special_tokens=False, verbose=False)["input_ids"]
            tokens += max(0, len(ids) - CUT)
            if tokens > most:
                why = f"a prompt of {len(text):,} characters has more tokens than max_length={most}: shorten it"
                raise ApiError(400, why, "prompt")

    def _rendered(self, asked: schema.Asked) -> list[int]:
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", "messages")
        schema.check_history(asked.messages, tokenizer.get_chat_template(tools=asked.template.get("tools")))
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        try:
            if sum(len(message["content"]) for message in asked.messages) > LIKELY * self._engine.max_length:
                self._check_length(
                    tokenizer.apply_chat_template(asked.messages, **asked.template, **{**options, "tokenize": False})
                )
            return tokenizer.apply_chat_template(asked.messages, **asked.template, **options)
        except ApiError:
            raise
        except Exception as error:  # templates raise whatever they like
            raise ApiError(400, f"the chat template refuses these messages: {error}", "messages") from error


class _Shape(Format):
    """How the answers to one request of a client look."""

    prefix = object_name = chunk_name = ""

    def __init__(self, model_id: str, asked: schema.Asked, tools: ToolReader | None) -> None:
        self._about = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model_id}
        self._include_usage = asked.include_usage
        self._null = {"usage": None} if asked.include_usage else {}
        self._tools = tools
        self.reads = tools is not None
        self._cut = bool(asked.sampling.stop)

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        """A whole one."""
        raise NotImplementedError

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All answers at once."""
        choices = [self.answer(which, output) for which, output in enumerate(outputs)]
        return {**self._about, "object": self.object_name, "choices": choices, "usage": _usage(outputs)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Of a stream."""
        return {**self._about, "object": self.chunk_name, "choices": choices, **self._null}

    def usage(self, outputs: Sequence[Output]) -> list[object]:
        return [{**self.chunk([]), "usage": _usage(outputs)}] if self._include_usage else []


class _Completion(_Shape):
    prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        return self._choice(which, output.text, output.finish_reason)

    def text(self, which: int, text: str) -> list[object]:
        return [self.chunk([self._choice(which, text, None)])]

    def last(self, which: int, output: Output) -> list[object]:
        return [self.chunk([self._choice(which, "", output.finish_reason)])]

    def _choice(self, which: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": which, "text": text, "logprobs": None, "finish_reason": reason}


class _Chat(_Shape):
    prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        message, reason = self._read(output)
        message = {"role": "assistant", **message, "refusal": None}
        return {"index": which, "message": message, "logprobs": None, "finish_reason": reason}

    def first(self, which: int) -> list[object]:
        return [self._delta(which, {"role": "assistant", "content": ""})]

    def text(self, which: int, text: str) -> list[object]:
        # With tools it may be a call of one, which is known at its end.
        return [] if self._tools else [self._delta(which, {"content": text})]

    def last(self, which: int, output: Output) -> list[object]:
        message, reason = self._read(output)
        deltas = []
        if self._tools:
            calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", ()))]
            deltas = [{name: text} for name, text in message.items() if text]
            deltas += [{"tool_calls": calls}] if calls else []
        return [*(self._delta(which, one) for one in deltas), self._delta(which, {}, reason)]

    def _read(self, output: Output) -> tuple[dict[str, Any], str]:
        if self._tools is None:
            return {"content": output.text}, output.finish_reason
        message = self._tools.message(output, self._cut)
        return message, "tool_calls" if "tool_calls" in message else output.finish_reason

    def _delta(self, which: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self.chunk([{"index": which, "delta": delta, "logprobs": None, "finish_reason": reason}])


def _usage(outputs: Sequence[Output]) -> dict[str, Any]:
    prompt, answer = (sum(map(count, outputs)) for count in (lambda o: o.prompt_tokens, lambda o: len(o.token_ids)))
    cached = sum(output.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
