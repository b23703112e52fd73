"""How answers of Anthropic's ``/v1/messages`` look: a message of blocks, or the events of its stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hf_sparsekv.serving.request import Handle, Logprob, Output

from ..forms.events import Arguments, Begin, Broken, End, Event, Text, Thought
from .answers import event
from .errors import ApiError
from .shapes import Shape

EMPTY = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},  # it is nobody's but the client's
}
PING = {"type": "ping"}


class Messages(Shape):
    """An answer of ``/v1/messages``."""

    prefix = "msg_"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._index = -1  # of the last block
        self._open: str | None = None  # its type, until it ends
        self._whole = False  # a call has come whole
        self._most = args[1].sampling.max_tokens if args[1].limited else 0

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int], **end: Any) -> dict[str, Any]:
        about = {"id": self._about["id"], "type": "message", "role": "assistant", "model": self._about["model"]}
        return {**about, "content": content, "stop_reason": None, "stop_sequence": None, **end, "usage": usage}

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        read = self.message(output)
        content: list[dict[str, Any]] = [{**EMPTY["thinking"], "thinking": read.reasoning}] if read.reasoning else []
        content += [{**EMPTY["text"], "text": read.text}] if read.text else []
        for call in read.calls:
            about = {"type": "tool_use", "id": call.id, "name": call.name}
            content.append({**about, "input": json.loads(call.arguments)})
        return self._message(content, _usage(output), **self._end(bool(read.calls), output))

    def _end(self, calls: bool, output: Output) -> dict[str, Any]:
        """Why it has ended. The context may have had less room than the client asked for."""
        if output.finish_reason == "length":
            full = len(output.token_ids) < self._most
            reason = "model_context_window_exceeded" if full else "max_tokens"
        else:
            reason = "tool_use" if calls else "end_turn" if output.stopped_by is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": output.stopped_by if reason == "stop_sequence" else None}

    # A stream.

    waiting = event(PING, "ping")
    end = b""

    def encoded(self, data: Any) -> bytes:
        return event(data, data["type"])

    def first(self, handles: Sequence[Handle]) -> list[object]:
        usage = {"input_tokens": handles[0].prompt_tokens, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}  # known at the end
        return [{"type": "message_start", "message": self._message([], usage)}, PING]

    def failed(self, error: ApiError) -> list[object]:
        return [error.anthropic()]

    def text(self, which: int, text: str, logprobs: Sequence[Logprob] = ()) -> list[object]:
        return [one for found in self.events(which, text) for one in self._told(found)]

    def last(self, which: int, output: Output) -> list[object]:
        told = [one for found in self.last_events(which) for one in self._told(found)]
        usage = _usage(output)
        end = {"type": "message_delta", "delta": self._end(self._whole, output), "usage": usage}
        return [*told, *self._closed(), end, {"type": "message_stop"}]

    def usage(self, outputs: Sequence[Output]) -> list[object]:
        return []

    def _told(self, found: Event) -> list[object]:
        match found:
            case Text(text):
                return [*self._block("text"), self._delta("text_delta", "text", text)]
            case Thought(text):
                return [*self._block("thinking"), self._delta("thinking_delta", "thinking", text)]
            case Begin(name, id):
                return self._begun({"type": "tool_use", "id": id, "name": name, "input": {}})
            case Arguments(text):
                return [self._delta("input_json_delta", "partial_json", text)]
            case End():
                self._whole = True
                return self._closed()
            case Broken(text, cut):  # what was sent of it cannot be taken back
                closed = self._closed()
                return closed if cut else [*closed, *self._block("text"), self._delta("text_delta", "text", text)]

    def _block(self, kind: str) -> list[object]:
        """Go on with a block of this type, or begin one."""
        return [] if self._open == kind else self._begun(EMPTY[kind])

    def _begun(self, block: dict[str, Any]) -> list[object]:
        closed = self._closed()
        self._index += 1
        self._open = block["type"]
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _closed(self) -> list[object]:
        was, self._open = self._open, None
        return [{"type": "content_block_stop", "index": self._index}] if was is not None else []

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}


def _usage(output: Output) -> dict[str, int]:
    """Counts. Tokens from the cache do not count as input."""
    return {
        "input_tokens": output.prompt_tokens - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": len(output.token_ids),
    }
