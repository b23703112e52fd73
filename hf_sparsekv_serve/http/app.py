"""The server: OpenAI's chat and completions, and endpoints for operators.

Only endpoints are here. Access, bodies, prompts and the format of answers are in modules of their own.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
from fastapi import FastAPI, Request
from prometheus_client import Counter
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from hf_sparsekv.serving.request import Handle
from hf_sparsekv.serving.sampling import shown

from ..forms.known import FORMS
from . import front, messages_api, responses_api, schema
from .answers import Answers, EventStream, on_thread, while_there
from .bodies import Bodies
from .engine import Engine
from .errors import ApiError, json_response
from .gate import ID, OPEN, Gate
from .logprobs import TokenTexts
from .messages_shape import Messages
from .metrics import PREFIX, registry
from .prompts import LARGE, Prompts
from .responses_shape import Responses
from .scan import Scan
from .shapes import Chat, Completion, Shape
from .tokenizing import Tokenizing
from .tools import TEMPLATE, Reading

MAX_BODY = 16 << 20  # bytes: some 4 million tokens of English
SUBMITTING = 64  # threads that submit small bodies, and as many large ones: READING read, others wait for schemas
IGNORED = "x-ignored-fields"
OPENMETRICS = "application/openmetrics-text"

log = logging.getLogger(__name__)


def create_app(
    engine: Engine,
    model_id: str,
    api_key: str | Sequence[str] | None = None,
    max_body: int = MAX_BODY,
    max_answer: int | None = None,
    allowed_hosts: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    ignore_unknown_fields: bool = False,
    tool_format: str | None = None,
) -> FastAPI:
    """An application for any ASGI server around an engine. The caller has to close the engine.

    Args:
        engine: serves the requests.
        model_id: the model name for clients.
        api_key: key, or keys, that clients send as ``Authorization: Bearer ...`` or ``x-api-key``; surrounding
            whitespace is ignored. ``None``: no key is needed.
        max_body: most bytes of a request's body.
        max_answer: most tokens of a chat's answer if the client sets no limit. ``None``: as many as
            memory has for each row.
        allowed_hosts: host names, besides ``localhost`` and IP addresses, that requests to a loopback address may use
            if there is no key. ``"*"``: any. The check keeps web pages in a browser on this machine from sending
            requests by DNS rebinding.
        cors_origins: origins of web pages that a browser lets ask this server, as ``https://chat.example.org``.
            ``"*"``: of all pages.
        ignore_unknown_fields: leave fields of requests out that the server does not know, and name them in the answer's
            header ``X-Ignored-Fields``. False: refuse them.
        tool_format: how the model writes calls of tools: one of :data:`.FORMS`, or ``template`` for the tokenizer's
            ``response_template``. ``None``: as its chat template shows.

    Raises:
        ValueError: ``api_key`` is empty, an origin is none, or there is no such form.
    """
    origins = [origin(one) for one in cors_origins]
    keys = [] if api_key is None else [api_key] if isinstance(api_key, str) else list(api_key)
    if api_key is not None and not (keys and all(key.strip() for key in keys)):
        raise ValueError("api_key is empty: give one, or None to let everybody in")
    if tool_format not in (None, TEMPLATE, *FORMS):
        raise ValueError(f"tool_format must be one of {', '.join([*FORMS, TEMPLATE])}, got {shown(tool_format)}")
    # No documentation pages: they would load scripts from elsewhere.
    # No redirects that add or remove a slash: they would contain the client's Host header.
    app = FastAPI(title="hf-sparsekv", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    prompts = Prompts(engine, model_id, max_answer, ignore_unknown_fields, tool_format)
    api = _Api(engine, model_id, Bodies(max_body), prompts)
    seen = partial(app.api_route, methods=["GET", "HEAD"])  # load balancers ask by HEAD
    seen("/")(api.welcome)
    seen("/docs")(api.docs)
    app.post("/v1/chat/completions")(api.chat)
    app.post("/v1/completions")(api.completions)
    app.post("/v1/responses")(api.responses)
    app.post("/v1/messages")(api.messages)
    app.post("/v1/messages/count_tokens")(api.count_tokens)
    app.post("/tokenize")(api.tokenize)
    app.post("/detokenize")(api.detokenize)
    seen("/v1/models")(api.models)
    seen("/v1/models/{name:path}")(api.model)
    seen("/health")(api.health)
    seen("/ready")(api.ready)
    seen("/metrics")(api.metrics)
    app.exception_handler(ApiError)(_tell)
    app.exception_handler(HTTPException)(_tell_http)
    app.exception_handler(Exception)(_tell_any)
    app.add_middleware(Gate, api_keys=keys, allowed_hosts=allowed_hosts, count=api.count)
    if origins:  # around the gate: a browser asks without a key whether it may ask
        told = [ID, IGNORED, "retry-after"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=told,
        )
    return app


def origin(text: str) -> str:
    """An origin of web pages, as browsers send it.

    Raises:
        ValueError: it is none.
    """
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise ValueError(f"{text!r} is no origin of web pages: give it as https://chat.example.org, or '*' for all")
    return text


async def _tell(request: Request, error: ApiError) -> Response:
    return error.response(request.scope["path"])


async def _tell_http(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return front.nothing(request.scope["path"]).response()
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response(request.scope["path"])


async def _tell_any(request: Request, error: Exception) -> Response:
    id = f"error-{uuid.uuid4().hex[:12]}"
    asked = request.scope.get(ID, "")
    log.error(
        "%s: %s %s has failed (%s)", id, request.method, shown(request.scope["path"]), asked
    )  # a traceback follows
    return ApiError(500, f"the server has failed: {type(error).__name__} ({id} in its log)").response(
        request.scope["path"]
    )


class _Api:
    """The endpoints; see :func:`create_app`."""

    def __init__(self, engine: Engine, model_id: str, bodies: Bodies, prompts: Prompts) -> None:
        self._engine = engine
        self._model_id = model_id
        self._bodies = bodies
        self._prompts = prompts
        self._tokenizing = Tokenizing(engine, prompts)
        self._texts = TokenTexts(engine.tokenizer, engine.eos)
        self._created = int(time.time())
        self._threads = anyio.CapacityLimiter(SUBMITTING), anyio.CapacityLimiter(SUBMITTING)
        self._registry = registry(engine.stats, lambda: engine.ready)
        about = "Answers to HTTP requests, by endpoint and status."
        self._answered = Counter(PREFIX + "http_requests", about, ["path", "status"], registry=self._registry)

    def count(self, path: str, status: int) -> None:
        """Count an answer."""
        known = (*front.ANSWERING, "/v1/models", *OPEN)
        self._answered.labels(path if path in known else "other", str(status)).inc()

    # For people and operators.

    async def welcome(self) -> Response:
        """``/``."""
        return front.welcome()

    async def docs(self) -> Response:
        """``/docs``."""
        return front.page()

    async def health(self) -> Response:
        """``/health``: the process answers, and its engine has not failed."""
        if (error := self._engine.failed) is not None:
            return ApiError(503, f"the engine has failed: {type(error).__name__}: {error}", code="failed").response()
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """``/ready``: the engine takes requests."""
        if self._engine.failed is not None:
            return await self.health()
        if not self._engine.ready:
            return ApiError(
                503, "the engine takes no requests: it starts, drains or is closed", code="closed"
            ).response()
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        # Use only the media types of the Accept header: an invalid version in it would be an error.
        kinds = [one.partition(";")[0].strip() for one in request.headers.get("accept", "").split(",")]
        encode, content_type = choose_encoder(OPENMETRICS if OPENMETRICS in kinds else "")
        return Response(encode(self._registry), media_type=None, headers={"content-type": content_type})

    async def models(self) -> Response:
        """The served model."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """The served model, by its name."""
        schema.check_model({"model": name}, self._model_id)
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        about = {"id": self._model_id, "object": "model", "created": self._created, "owned_by": "hf-sparsekv"}
        return {**about, "max_model_len": self._engine.max_length}

    # Answers.

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        return await self._answer(request, schema.chat, Chat)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._answer(request, schema.completion, Completion)

    async def responses(self, request: Request) -> Response:
        """``/v1/responses``."""
        return await self._answer(request, responses_api.responses, Responses)

    async def messages(self, request: Request) -> Response:
        """``/v1/messages``, as Anthropic's API."""
        return await self._answer(request, messages_api.messages, Messages)

    async def count_tokens(self, request: Request) -> Response:
        """``/v1/messages/count_tokens``."""
        scan = Scan(self._engine.max_length)
        async with self._bodies.read(request, scan) as body:
            limiter, count = self._threads[len(body) > LARGE], self._prompts.count
            tokens = await anyio.to_thread.run_sync(count, body, scan, messages_api.counted, limiter=limiter)
        return json_response({"input_tokens": tokens})

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``."""
        return await self._told(request, self._tokenizing.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """``/detokenize``."""
        return await self._told(request, self._tokenizing.detokenize)

    async def _told(self, request: Request, tell: Callable[[bytes, Scan], dict[str, Any]]) -> Response:
        """What a body asks for that the engine need not answer."""
        scan = Scan(self._engine.max_length)
        async with self._bodies.read(request, scan) as body:
            limiter = self._threads[len(body) > LARGE]
            return json_response(await anyio.to_thread.run_sync(tell, body, scan, limiter=limiter))

    async def _submitted(
        self, request: Request, parse: Callable[[dict[str, Any], Scan, bool], schema.Asked]
    ) -> tuple[schema.Asked, Reading | None, Answers]:
        """Read a body and submit what it asks for. On return nothing keeps the body: answers may take long."""
        scan = Scan(self._engine.max_length)
        handles: list[Handle] = []
        try:
            async with self._bodies.read(request, scan) as body:
                limiter, submit = self._threads[len(body) > LARGE], self._prompts.submit
                asked, reading = await anyio.to_thread.run_sync(submit, body, scan, parse, handles, limiter=limiter)
            id = request.scope.get(ID, "")
            answers = Answers(handles, text=asked.stream, id=id)
            log.info("%s: asked of the engine as %s", id, ", ".join(handle.id for handle in handles))
            return asked, reading, answers
        except BaseException:  # also if the server ends while the thread submits
            for handle in handles:
                handle.cancel()
            raise

    async def _answer(
        self, request: Request, parse: Callable[[dict[str, Any], Scan, bool], schema.Asked], kind: type[Shape]
    ) -> Response:
        asked, reading, answers = await self._submitted(request, parse)
        shape = kind(self._model_id, asked, reading, self._texts)
        headers = {IGNORED: ", ".join(map(_safe, asked.ignored))} if asked.ignored else {}
        if asked.stream:
            return EventStream(answers, shape, headers)
        outputs = await while_there(request.receive, answers)
        if outputs is None:
            return Response(status_code=499)  # the client has gone
        whole = await on_thread(partial(shape.whole, outputs)) if shape.reads else shape.whole(outputs)
        return json_response(whole, headers=headers)


def _safe(name: str) -> str:
    """A name that a client has given, as a header may have it."""
    return re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII)
