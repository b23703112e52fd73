"""How answers of OpenAI's ``/v1/responses`` look: a response of items, or the events of its stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from hf_sparsekv.serving.request import Handle, Logprob, Output

from ..forms.events import Arguments, Begin, Broken, End, Event, Text, Thought
from .answers import event
from .errors import ApiError
from .shapes import Shape

PART = {  # of an item: the type of its part, and of events about it
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}
PREFIX = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class Responses(Shape):
    """An answer of ``/v1/responses``."""

    prefix = "resp_"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        asked = args[1]
        self._repeated = {**asked.told, "temperature": asked.sampling.temperature, "top_p": asked.sampling.top_p}
        self._names = asked.names
        self._number = -1  # of the last event
        self._items: list[dict[str, Any]] = []  # that have ended
        self._open: dict[str, Any] | None = None  # the item that comes
        self._texts: list[str] = []  # of it

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        about = {"id": self._about["id"], "object": "response", "created_at": self._about["created"]}
        none = dict.fromkeys(("error", "incomplete_details", "instructions", "previous_response_id", "usage"))
        about |= {"status": status, "model": self._about["model"], **none, **self._repeated}
        return {**about, "tools": [], "truncation": "disabled", "store": False, "output": output, **more}

    def _ended(self, items: list[dict[str, Any]], output: Output) -> dict[str, Any]:
        cut = output.finish_reason == "length"
        thoughts = "".join(part["text"] for one in items if one["type"] == "reasoning" for part in one["content"])
        usage = {
            "input_tokens": output.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(output.token_ids),
            "output_tokens_details": {
                "reasoning_tokens": self._reading.tokens(thoughts) if thoughts and self._reading else 0
            },
            "total_tokens": output.prompt_tokens + len(output.token_ids),
        }
        why = {"reason": "max_output_tokens"} if cut else None
        return self._response("incomplete" if cut else "completed", items, usage=usage, incomplete_details=why)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        read = self.message(output)
        items = [_filled(_item("reasoning"), read.reasoning)] if read.reasoning else []
        items += [_filled(_item("message"), read.text)] if read.text or not (read.calls or items) else []
        items += [_filled(self._call(call.name, call.id), call.arguments) for call in read.calls]
        if output.finish_reason == "length":
            items[-1]["status"] = "incomplete"
        return self._ended(items, output)

    def _call(self, name: str, id: str | None) -> dict[str, Any]:
        """The item of a call, by the names that the client has for its tool."""
        space, own = self._names.get(name, (None, name))
        about = {"call_id": id, "name": own, "arguments": ""}
        return {**_item("function_call"), **about, **({"namespace": space} if space is not None else {})}

    # A stream.

    end = b""

    def encoded(self, data: Any) -> bytes:
        self._number += 1
        return event({**data, "sequence_number": self._number}, data["type"])

    def first(self, handles: Sequence[Handle]) -> list[object]:
        begun = self._response("in_progress", [])
        return [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]

    def failed(self, error: ApiError) -> list[object]:
        why = {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": str(error)}
        return [{"type": "response.failed", "response": self._response("failed", self._items, error=why)}]

    def text(self, which: int, text: str, logprobs: Sequence[Logprob] = ()) -> list[object]:
        return [one for found in self.events(which, text) for one in self._told(found)]

    def last(self, which: int, output: Output) -> list[object]:
        told = [one for found in self.last_events(which) for one in self._told(found)]
        if not self._items and self._open is None:  # an empty answer is an empty message
            told += self._begun(_item("message"))
        told += self._closed("incomplete" if output.finish_reason == "length" else "completed")
        made = self._ended(self._items, output)
        return [*told, {"type": f"response.{made['status']}", "response": made}]

    def usage(self, outputs: Sequence[Output]) -> list[object]:
        return []

    def _told(self, found: Event) -> list[object]:
        match found:
            case Text(text):
                return [*self._of("message"), self._piece(text)]
            case Thought(text):
                return [*self._of("reasoning"), self._piece(text)]
            case Begin(name, id):
                return self._begun(self._call(name, id))
            case Arguments(text):
                return [self._piece(text)]
            case End():
                return self._closed("completed")
            case Broken(text, cut):  # what was sent of it cannot be taken back
                closed = self._closed("incomplete")
                return closed if cut else [*closed, *self._of("message"), self._piece(text)]

    def _of(self, kind: str) -> list[object]:
        """Go on with an item of this type, or begin one."""
        return [] if self._open is not None and self._open["type"] == kind else self._begun(_item(kind))

    def _begun(self, item: dict[str, Any]) -> list[object]:
        closed = self._closed("completed")
        self._open, self._texts = item, []
        begun: dict[str, Any] = {**item, "status": "in_progress"}
        told = [{"type": "response.output_item.added", "output_index": len(self._items), "item": begun}]
        if item["type"] in PART:
            about = {"type": "response.content_part.added", **self._where(), "part": _part(item["type"], "")}
            told.append(about)
        return [*closed, *told]

    def _where(self) -> dict[str, Any]:
        """Where events about the open item belong."""
        item = self._open or {}
        index = {"content_index": 0} if item["type"] in PART else {}
        return {"item_id": item["id"], "output_index": len(self._items), **index}

    def _piece(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        kind = (self._open or {})["type"]
        name = PART[kind][1] if kind in PART else "response.function_call_arguments"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return {"type": f"{name}.delta", **self._where(), "delta": text, **more}

    def _closed(self, status: str) -> list[object]:
        """The ends of the open item."""
        if self._open is None:
            return []
        text, where, kind = "".join(self._texts), self._where(), self._open["type"]
        told: list[object]
        if kind in PART:
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            told = [
                {"type": f"{PART[kind][1]}.done", **where, "text": text, **more},
                {"type": "response.content_part.done", **where, "part": _part(kind, text)},
            ]
        else:
            name = "response.function_call_arguments.done"
            told = [{"type": name, **where, "arguments": text, "name": self._open["name"]}]
        item = {**_filled(self._open, text), "status": status}
        told.append({"type": "response.output_item.done", "output_index": len(self._items), "item": item})
        self._items.append(item)
        self._open = None
        return told


def _item(kind: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": PREFIX[kind] + uuid.uuid4().hex, "type": kind, "status": "completed"}
    if kind == "message":
        item |= {"role": "assistant", "content": []}
    elif kind == "reasoning":
        item |= {"summary": [], "content": [], "encrypted_content": None}
    return item


def _filled(item: dict[str, Any], text: str) -> dict[str, Any]:
    kind = item["type"]
    return {**item, "content": [_part(kind, text)]} if kind in PART else {**item, "arguments": text}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": PART[kind][0], "text": text, **more}
