"""Errors as OpenAI's API gives them, ``{"error": {"message", "type", "param", "code"}}``, or Anthropic's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from hf_sparsekv.serving.request import Busy, Closed, NotFollowed, TooLong

MOST = 800  # characters of a message, which may quote the client's input
TOO_LONG = "context_length_exceeded"
CONTEXT = "This model's maximum context length is {} tokens."
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

ANTHROPIC = "/v1/messages"  # addresses whose errors are as Anthropic's API has them
_ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """Something to tell a client.

    Args:
        status: of HTTP.
        message: a sentence that says what is wrong, and why or what to do.
        param: the field that it is about.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """As JSON has it."""
        message = str(self)
        if len(message) > MOST:
            message = f"{message[: MOST - 20]} ... {message[-15:]}"
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """As JSON of Anthropic's API has it."""
        kind = _ANTHROPICS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.body()["error"]["message"]}}

    def response(self, path: str = "") -> Response:
        """The whole answer, to a request for an address."""
        body = self.anthropic() if path.startswith(ANTHROPIC) else self.body()
        return json_response(body, self.status, self.headers)


def too_long(error: TooLong, param: str) -> ApiError:
    """Of a prompt that does not fit the context, as OpenAI's API and vLLM begin it: clients look for these words."""
    return ApiError(400, f"{CONTEXT.format(error.most)} However, {error}", param, TOO_LONG)


def dumped(content: object) -> bytes:
    """JSON in UTF-8. Half a surrogate pair, which a client may have sent, is escaped."""
    try:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(content, separators=(",", ":")).encode()


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with JSON."""
    return Response(dumped(content), status, dict(headers or {}), "application/json")


def told(error: BaseException, id: str | None = None) -> ApiError:
    """The client's version of an error of the engine; ``id``: the request's id, as in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        wait = str(max(1, math.ceil(error.retry_after)))
        return ApiError(429, str(error), code="busy", headers={"Retry-After": wait})
    if isinstance(error, Closed):
        return ApiError(503, str(error), code="closed")
    if isinstance(error, NotFollowed):
        return ApiError(400, str(error), "response_format", "grammar_too_large")
    who = "the request" if id is None else id
    return ApiError(500, f"{who} has failed: {type(error).__name__}: {error}", code="failed")
