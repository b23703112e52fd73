"""Pages for people and probing clients: ``/``, ``/docs``, and addresses that other servers have.

:mod:`.app` serves requests. The page loads nothing from elsewhere: no script, no style sheet.
"""

from __future__ import annotations

from html import escape
from typing import Any

from starlette.responses import HTMLResponse, Response

from hf_sparsekv.version import __version__

from . import fields, messages_api, responses_api
from .errors import ApiError, json_response

ENDPOINTS = {
    "POST /v1/chat/completions": "a conversation, as OpenAI's API",
    "POST /v1/completions": "a continuation, as OpenAI's API",
    "POST /v1/responses": "a conversation, as OpenAI's newer API",
    "POST /v1/messages": "a conversation, as Anthropic's API",
    "POST /v1/messages/count_tokens": "the tokens of a conversation",
    "POST /tokenize": "the tokens of a prompt or a conversation, as vLLM's",
    "POST /detokenize": "the text of tokens, as vLLM's",
    "GET /v1/models": "the served model",
    "GET /health": "the process answers, and its engine has not failed",
    "GET /ready": "requests are taken",
    "GET /metrics": "for Prometheus",
    "GET /docs": "this list, for people",
}
ANSWERING = tuple(name.removeprefix("POST ") for name in ENDPOINTS if name.startswith("POST "))
FIELDS = {
    "/v1/chat/completions": fields.CHAT,
    "/v1/completions": fields.COMPLETION,
    "/v1/responses": responses_api.RESPONSES,
    "/v1/messages": messages_api.MESSAGES,
}
# Endpoints that clients of OpenAI's API ask for and this server lacks, each with the reason.
UNSERVED = {
    "/v1/embeddings": "this server makes no embeddings: it serves /v1/chat/completions and /v1/completions",
    "/v1/moderations": "this server moderates nothing: it serves /v1/chat/completions and /v1/completions",
    "/v1/audio/speech": "this server makes no sound: it serves /v1/chat/completions and /v1/completions",
    "/v1/audio/transcriptions": "this server reads no sound: it serves /v1/chat/completions and /v1/completions",
    "/v1/images/generations": "this server makes no images: it serves /v1/chat/completions and /v1/completions",
}
EXAMPLE = """curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'"""
STYLE = "body{font:16px/1.5 sans-serif;max-width:46em;margin:2em auto;padding:0 1em}code,pre{font-size:14px}"
STYLE += "pre{background:#8882;padding:1em;overflow:auto}td{padding:.2em 1em .2em 0}:root{color-scheme:light dark}"


def welcome() -> Response:
    """``/``: what this is. It does not name the model, as it is there without a key."""
    about: dict[str, Any] = {"name": "hf-sparsekv", "version": __version__, "endpoints": ENDPOINTS}
    return json_response(about)


def page() -> Response:
    """``/docs``."""
    rows = "".join(f"<tr><td><code>{escape(name)}</code></td><td>{escape(about)}" for name, about in ENDPOINTS.items())
    known = "".join(
        f"<h2><code>{escape(path)}</code></h2><p>{', '.join(f'<code>{name}</code>' for name in sorted(kind.known))}</p>"
        for path, kind in FIELDS.items()
    )
    body = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>hf-sparsekv</title><style>{STYLE}</style>"
        f"<h1>hf-sparsekv {escape(__version__)}</h1><p>OpenAI's API over one model with a sparse KV cache.</p>"
        f"<table>{rows}</table><h2>Try it</h2><pre>{escape(EXAMPLE)}</pre>"
        f"<p>With an API key: <code>-H 'Authorization: Bearer KEY'</code>. Any other field is refused, unless the "
        f"server was started with <code>--ignore-unknown-fields</code>.</p>{known}</html>"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return HTMLResponse(body, headers={"Content-Security-Policy": policy})


def nothing(path: str) -> ApiError:
    """404, with the reason where one is known."""
    why = UNSERVED.get(path.rstrip("/"))
    if path.startswith("/v1/responses/"):
        why = "this server stores no responses: POST /v1/responses has the whole answer"
    if why is None:
        why = f"there is nothing at {path}: GET / lists what there is"
    return ApiError(404, why, code="not_found")
