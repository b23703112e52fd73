"""Answers in a form that a tokenizer defines itself: transformers' ``response_template``.

transformers' parser tells a call once it has ended, and gives up whole answers of which a part is wrong. So such an
answer is read at its end.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import regex  # as transformers' parser, whose patterns are counted here
from transformers import PreTrainedTokenizerBase

from .events import Arguments, Begin, Broken, End, Event, Text, Thought

# transformers' parser looks for each delimiter again after each region: regions times the text's length.
MAX_REGIONS = 128
MAX_SPACE = 256  # characters: delimiters that are patterns may begin with any whitespace, and are tried at each of them
SPACE = re.compile(r"\s+")
COUNTING_S = 0.1  # seconds


class TemplateReader:
    """Reads one answer.

    Args:
        tokenizer: whose ``parse_response`` reads it.
        form: its response template.
        prompt: the prompt's end, in which the message may have begun.
        tools: of the request.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: dict[str, Any],
        prompt: str,
        tools: Sequence[dict[str, Any]],
    ) -> None:
        self._tokenizer, self._form, self._prompt = tokenizer, form, prompt
        self._tools: list[dict[str, Any] | Callable[..., Any]] = [*tools]
        self._texts: list[str] = []

    def feed(self, text: str) -> list[Event]:
        """Add the next piece of text. Nothing is told yet."""
        self._texts.append(text)
        return []

    def finish(self) -> list[Event]:
        """All of the answer; its text if it cannot be read. It takes up to a second."""
        text = "".join(self._texts)
        try:
            self._check(text)
            read = self._tokenizer.parse_response(text, self._form, prefix=self._prompt, tools=self._tools)
            found: list[Event] = [Thought(read["thinking"])] if read.get("thinking") else []
            found += [Text(read["content"])] if read.get("content") else []
            for call in read.get("tool_calls") or []:
                given = call["function"].get("arguments", {})
                given = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
                found += [Begin(str(call["function"]["name"]), None), Arguments(given), End()]
            return found
        except Exception:  # whatever the parser raises: the answer may not follow the format
            return [Broken(text, False)]

    def _check(self, text: str) -> None:
        """Raise ValueError if reading it would take long."""
        regions = 0
        for field in self._form["fields"].values():
            literals = field.get("open", ())
            regions += sum(map(text.count, [literals] if isinstance(literals, str) else literals))
            if "open_pattern" in field:
                if max(map(len, SPACE.findall(text)), default=0) > MAX_SPACE:
                    raise ValueError(f"more than {MAX_SPACE} characters of whitespace")
                found = regex.finditer(field["open_pattern"], text, regex.DOTALL, timeout=COUNTING_S)
                regions += sum(1 for _ in itertools.islice(found, MAX_REGIONS + 1))
        if regions > MAX_REGIONS:
            raise ValueError(f"more than {MAX_REGIONS} parts")
