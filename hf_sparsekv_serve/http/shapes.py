"""How answers look in OpenAI's two APIs: chat and completions, whole or as chunks of a stream.

:mod:`.answers` decides when something is sent; this module decides its fields.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hf_sparsekv.serving.request import Handle, Logprob, Output

from ..forms.events import Arguments, Begin, Broken, End, Event, Text, Thought
from ..forms.message import Message
from . import schema
from .answers import Format
from .logprobs import TokenTexts
from .tools import AnswerReader, Reading


class Shape(Format):
    """How the answers to one request of a client look."""

    prefix = object_name = chunk_name = ""

    def __init__(
        self, model_id: str, asked: schema.Asked, reading: Reading | None, logprobs: TokenTexts | None = None
    ) -> None:
        self._about = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model_id}
        self._include_usage = asked.include_usage
        self._null: dict[str, Any] = {"usage": None} if asked.include_usage else {}
        self._counts: dict[int, tuple[int, int]] | None = {} if asked.counts_each else None  # tokens, by answer
        self._echoed = asked.echoed if asked.echo else ()
        self._answers_nothing = asked.answers_nothing
        self._reading = reading
        self.reads = reading is not None
        self._readers: dict[int, AnswerReader] = {}  # by answer, of a stream
        self._each = asked.n  # answers to a prompt
        self._logprobs = logprobs if asked.sampling.logprobs is not None else None
        # Tokens that end an answer are not in it, nor in the log probabilities of a chat.
        self._ends = frozenset(asked.sampling.stop_token_ids)
        if logprobs is not None and not asked.sampling.ignore_eos:
            self._ends |= logprobs.eos

    def message(self, output: Output) -> Message:
        """What a whole answer consists of."""
        return Message(output.text) if self._reading is None else self._reading.message(output.text)

    def events(self, which: int, text: str) -> list[Event]:
        """What new text of a stream is."""
        if self._reading is None:
            return [Text(text)] if text else []
        if which not in self._readers:
            self._readers[which] = self._reading.reader()
        return self._readers[which].feed(text)

    def last_events(self, which: int) -> list[Event]:
        """What the end of a stream is."""
        return [*self.events(which, ""), *self._readers[which].finish()] if self._reading is not None else []

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        """One whole answer."""
        raise NotImplementedError

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All answers at once."""
        choices = [self.answer(which, output) for which, output in enumerate(outputs)]
        return {**self._about, "object": self.object_name, "choices": choices, "usage": self._usage(outputs)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One chunk of a stream."""
        null = self._null
        if self._counts is not None and choices:
            null = {"usage": self._counted(*self._counts.get(choices[0]["index"], (0, 0)))}
        return {**self._about, "object": self.chunk_name, "choices": choices, **null}

    def counted(self, which: int, handle: Handle, tokens: int) -> None:
        if self._counts is not None:
            self._counts[which] = handle.prompt_tokens, tokens

    def usage(self, outputs: Sequence[Output]) -> list[object]:
        return [{**self.chunk([]), "usage": self._usage(outputs)}] if self._include_usage else []

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Counts of tokens; a prompt with several answers counts once."""
        first = outputs[:: self._each]
        prompt, cached = sum(one.prompt_tokens for one in first), sum(one.cached_tokens for one in first)
        answer = 0 if self._answers_nothing else sum(len(one.token_ids) for one in outputs)
        return {**self._counted(prompt, answer), "prompt_tokens_details": {"cached_tokens": cached}}

    @staticmethod
    def _counted(prompt: int, answer: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


class Completion(Shape):
    """Answers of ``/v1/completions``."""

    prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._begun: Counter[int] = Counter()  # by answer: characters that begin in the tokens so far

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        if not self._echoed:
            return self._choice(which, output.text, output.finish_reason, output.logprobs)
        prompt, first = self._echoed[which // self._each]
        logprobs = (Logprob(first, math.nan), *output.prompt_logprobs)  # of the first token nothing is known
        if self._answers_nothing:
            return self._choice(which, prompt, "length", logprobs)
        return self._choice(which, prompt + output.text, output.finish_reason, (*logprobs, *output.logprobs))

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
        self._calls: Counter[int] = Counter()  # by answer: calls that have begun
        self._whole: set[int] = set()  # answers with a whole call
        self._untold: dict[int, list[Logprob]] = {}  # by answer: of tokens whose text has not been sent

    def answer(self, which: int, output: Output) -> dict[str, Any]:
        read = self.message(output)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in read.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": read.text or (None if calls else "")}
        message |= {"reasoning_content": read.reasoning} if read.reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        message["refusal"] = None
        reason = _reason(bool(calls), output)
        return {"index": which, "message": message, "logprobs": self._told(output.logprobs), "finish_reason": reason}

    def _first(self, which: int) -> list[object]:
        """The role, before whatever an answer sends first. Clients take the first chunk for the first token."""
        if which in self._begun:
            return []
        self._begun.add(which)
        return [self._delta(which, {"role": "assistant", "content": ""})]

    def text(self, which: int, text: str, logprobs: Sequence[Logprob] = ()) -> list[object]:
        return self._deltas(which, self.events(which, text), logprobs)

    def _deltas(self, which: int, events: Sequence[Event], logprobs: Sequence[Logprob]) -> list[object]:
        """Chunks for events. Log probabilities go with the first of them, or wait for the next."""
        untold = [*self._untold.pop(which, ()), *logprobs]
        chunks = []
        for event in events:
            if (delta := self._delta_of(which, event)) is not None:
                chunks += [*self._first(which), self._delta(which, delta, logprobs=untold)]
                untold = []
        if untold and self._reading is None:  # a token without text
            return [*chunks, *self._first(which), self._delta(which, {"content": ""}, logprobs=untold)]
        if untold:
            self._untold[which] = untold
        return chunks

    def _delta_of(self, which: int, event: Event) -> dict[str, Any] | None:
        index = self._calls[which] - 1
        match event:
            case Text(text):
                return {"content": text}
            case Thought(text):
                return {"reasoning_content": text}
            case Begin(name, id):
                self._calls[which] += 1
                about = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index + 1, "id": id, "type": "function", "function": about}]}
            case Arguments(text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case End():
                self._whole.add(which)
            case Broken(text, cut) if not cut:  # what was sent of it cannot be taken back
                return {"content": text}
        return None

    def last(self, which: int, output: Output) -> list[object]:
        chunks = self._deltas(which, self.last_events(which), ())
        reason = _reason(which in self._whole, output)
        last = self._delta(which, {}, reason, self._untold.pop(which, ()))
        return [*chunks, *self._first(which), last]

    def _delta(
        self, which: int, delta: dict[str, Any], reason: str | None = None, logprobs: Sequence[Logprob] = ()
    ) -> dict[str, Any]:
        told = self._told(logprobs)
        return self.chunk([{"index": which, "delta": delta, "logprobs": told, "finish_reason": reason}])

    def _told(self, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        if self._logprobs is None or not logprobs:
            return None
        return self._logprobs.in_objects([one for one in logprobs if one.token_id not in self._ends])


def _reason(calls: bool, output: Output) -> str:
    """The finish reason. ``max_tokens`` may have cut off what follows whole calls."""
    return "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
