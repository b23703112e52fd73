"""How answers look in OpenAI's two APIs: chat and completions, whole or as chunks of a stream.

:mod:`.answers` decides when something is sent; this module decides its fields.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hf_sparsekv.serving.request import Logprob, Output

from . import schema
from .answers import Format
from .logprobs import TokenTexts
from .tools import ToolReader


class Shape(Format):
    """How the answers to one request of a client look."""

    prefix = object_name = chunk_name = ""

    def __init__(
        self, model_id: str, asked: schema.Asked, tools: ToolReader | None, logprobs: TokenTexts | None = None
    ) -> None:
        self._about = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model_id}
        self._include_usage = asked.include_usage
        self._null = {"usage": None} if asked.include_usage else {}
        self._tools = tools
        self.reads = tools is not None
        self._cut = bool(asked.sampling.stop)
        self._each = asked.n  # answers to a prompt
        self._logprobs = logprobs if asked.sampling.logprobs is not None else None

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        """One whole answer."""
        raise NotImplementedError

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All answers at once."""
        choices = [self.answer(which, output) for which, output in enumerate(outputs)]
        return {**self._about, "object": self.object_name, "choices": choices, "usage": self._usage(outputs)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One chunk of a stream."""
        return {**self._about, "object": self.chunk_name, "choices": choices, **self._null}

    def usage(self, outputs: Sequence[Output]) -> list[object]:
        return [{**self.chunk([]), "usage": self._usage(outputs)}] if self._include_usage else []

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Counts of tokens; a prompt with several answers counts once."""
        first = outputs[:: self._each]
        prompt, cached = sum(one.prompt_tokens for one in first), sum(one.cached_tokens for one in first)
        answer = sum(len(one.token_ids) for one in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Completion(Shape):
    """Answers of ``/v1/completions``."""

    prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._begun: Counter[int] = Counter()  # by answer: characters that begin in the tokens so far

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        return self._choice(which, output.text, output.finish_reason, output.logprobs)

    def text(self, which: int, text: str, logprobs: Sequence[Logprob] = ()) -> list[object]:
        return [self.chunk([self._choice(which, text, None, logprobs)])]

    def last(self, which: int, output: Output) -> list[object]:
        return [self.chunk([self._choice(which, "", output.finish_reason)])]

    def _choice(self, which: int, text: str, reason: str | None, logprobs: Sequence[Logprob] = ()) -> dict[str, Any]:
        told = None
        if self._logprobs is not None and logprobs:
            told, self._begun[which] = self._logprobs.in_lists(logprobs, self._begun[which])
        return {"index": which, "text": text, "logprobs": told, "finish_reason": reason}


class Chat(Shape):
    """Answers of ``/v1/chat/completions``."""

    prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._begun: set[int] = set()  # answers whose role has been sent

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        message, reason = self._read(output)
        message = {"role": "assistant", **message, "refusal": None}
        return {"index": which, "message": message, "logprobs": self._told(output.logprobs), "finish_reason": reason}

    def _first(self, which: int) -> list[object]:
        """The role, before whatever an answer sends first. Clients take the first chunk for the first token."""
        if which in self._begun:
            return []
        self._begun.add(which)
        return [self._delta(which, {"role": "assistant", "content": ""})]

    def text(self, which: int, text: str, logprobs: Sequence[Logprob] = ()) -> list[object]:
        if self._tools:  # it may be a call of one, which is known at its end
            return []
        return [*self._first(which), self._delta(which, {"content": text}, logprobs=logprobs)]

    def last(self, which: int, output: Output) -> list[object]:
        message, reason = self._read(output)
        deltas = []
        if self._tools:
            calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", ()))]
            deltas = [{name: text} for name, text in message.items() if text]
            deltas += [{"tool_calls": calls}] if calls else []
        logprobs = output.logprobs if self._tools else ()
        told = [self._delta(which, one) for one in deltas]
        return [*self._first(which), *told, self._delta(which, {}, reason, logprobs)]

    def _read(self, output: Output) -> tuple[dict[str, Any], str]:
        if self._tools is None:
            return {"content": output.text}, output.finish_reason
        message = self._tools.message(output, self._cut)
        ended = output.finish_reason == "stop"  # otherwise max_tokens has cut off what follows the whole calls
        return message, "tool_calls" if "tool_calls" in message and ended else output.finish_reason

    def _delta(
        self, which: int, delta: dict[str, Any], reason: str | None = None, logprobs: Sequence[Logprob] = ()
    ) -> dict[str, Any]:
        told = self._told(logprobs)
        return self.chunk([{"index": which, "delta": delta, "logprobs": told, "finish_reason": reason}])

    def _told(self, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        return self._logprobs.in_objects(logprobs) if self._logprobs is not None and logprobs else None
