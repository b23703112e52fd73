"""How answers look in OpenAI's two APIs: chat and completions, whole or as chunks of a stream.

Apart from :mod:`.answers`, which knows when something is sent, and not its fields.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ..request import Output
from . import schema
from .answers import Format
from .tools import ToolReader


class Shape(Format):
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
        """One whole answer."""
        raise NotImplementedError

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All answers at once."""
        choices = [self.answer(which, output) for which, output in enumerate(outputs)]
        return {**self._about, "object": self.object_name, "choices": choices, "usage": _usage(outputs)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One chunk of a stream."""
        return {**self._about, "object": self.chunk_name, "choices": choices, **self._null}

    def usage(self, outputs: Sequence[Output]) -> list[object]:
        return [{**self.chunk([]), "usage": _usage(outputs)}] if self._include_usage else []


class Completion(Shape):
    """Answers of ``/v1/completions``."""

    prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        return self._choice(which, output.text, output.finish_reason)

    def text(self, which: int, text: str) -> list[object]:
        return [self.chunk([self._choice(which, text, None)])]

    def last(self, which: int, output: Output) -> list[object]:
        return [self.chunk([self._choice(which, "", output.finish_reason)])]

    def _choice(self, which: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": which, "text": text, "logprobs": None, "finish_reason": reason}


class Chat(Shape):
    """Answers of ``/v1/chat/completions``."""

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
