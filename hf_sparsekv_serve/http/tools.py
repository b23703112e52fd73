"""Tool calls in an answer, read by transformers' ``parse_response`` as the model's template writes them."""

from __future__ import annotations

import itertools
import json
import logging
import re
import uuid
from collections.abc import Sequence
from typing import Any

import regex  # as transformers' parser, whose patterns are counted here
from transformers import PreTrainedTokenizerBase

from hf_sparsekv.serving.grammar import WHITESPACE
from hf_sparsekv.serving.request import Output

from .errors import ApiError

# For tokenizers without a response_template of their own, whose chat templates show calls in this way: Hermes, Qwen 2.5
# and 3. The names of the fields are transformers'.
BETWEEN = "\0"  # texts around the calls: no model writes it
IN_TAGS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text", "repeats": True, "join": BETWEEN},
    },
}
# transformers' parser looks for each delimiter again after each region: regions times the text's length.
MAX_REGIONS = 128
MAX_SPACE = 256  # characters: delimiters that are patterns may begin with any whitespace, and are tried at each of them
SPACE = re.compile(r"\s+")
COUNTING_S = 0.1  # seconds
PROMPT_END = 512  # tokens in which the template may have begun the message
# Answers that are calls, written as IN_TAGS has them. Each tool's schema is a document of its own: `#` in a reference
# means the schema's own root.
LARK = """start: call{more}
call: "<tool_call>\\n" ({tools}) "\\n</tool_call>"
"""
LARK_TOOL = """tool{i}: "{{\\"name\\": " name{i} ", \\"arguments\\": " arguments{i} "}}"
name{i}: %json {name}
arguments{i}: %json {schema}
"""
MOST_CALLS = 16
OF_ANY_TYPE = {"type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const"}  # a schema without these may be any JSON
SHOWS_TAGS = ("<|im_start|>", "<tool_call>", "</tool_call>", '"arguments"')

log = logging.getLogger(__name__)


class ToolReader:
    """Makes messages of answers to one conversation with tools.

    Args:
        tokenizer: with the chat template that the tools are given to.
        tools: as clients give them.
        prompt: ids, in which the template may have begun the message.

    Raises:
        ApiError: the template knows no tools, or how its model writes calls is not known.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]], prompt: Sequence[int]) -> None:
        template = tokenizer.get_chat_template(tools=tools)
        if "tools" not in template:
            raise ApiError(400, "this model's chat template knows no tools", "tools", "unsupported_parameter")
        self._form = getattr(tokenizer, "response_template", None)
        if self._form is None and all(tag in template for tag in SHOWS_TAGS):
            self._form = IN_TAGS
        if self._form is None:
            message = "this model's tokenizer does not say how calls of tools are written (response_template)"
            raise ApiError(400, message, "tools", "unsupported_parameter")
        self._tokenizer, self._tools = tokenizer, tools
        self._prompt = tokenizer.decode(list(prompt[-PROMPT_END:]))

    def grammar(self, names: Sequence[str], several: bool) -> str:
        """The grammar of an answer that is calls of these tools and nothing else, in llguidance's dialect of Lark.

        Raises:
            ApiError: the model writes calls in a way of its own, whose grammar is not known.
        """
        if self._form is not IN_TAGS:
            message = "tool_choice must be auto or none: how this model writes calls is known for reading only"
            raise ApiError(400, message, "tool_choice", "unsupported_parameter")
        asked = [tool for tool in (one["function"] for one in self._tools) if tool["name"] in names]
        more = f" (/\\n/ call){{0,{MOST_CALLS - 1}}}" if several else ""
        rules = [
            LARK_TOOL.format(i=i, name=json.dumps({"const": tool["name"]}), schema=json.dumps(_arguments(tool)))
            for i, tool in enumerate(asked)
        ]
        tools = " | ".join(f"tool{i}" for i in range(len(asked)))
        return "".join((LARK.format(more=more, tools=tools), *rules))

    def message(self, output: Output, cut: bool) -> dict[str, Any]:
        """``content``, and ``tool_calls`` or ``reasoning_content`` if there are any; the text if it cannot be read.

        It takes up to a second, so it is not for the event loop.

        Args:
            cut: stop strings were asked for: the text is read, without special tokens, not the tokens.
        """
        try:
            plain = cut or self._form is IN_TAGS  # whose tags are no special tokens
            text = output.text if plain else self._tokenizer.decode(list(output.token_ids), skip_special_tokens=False)
            self._check(text)
            read = self._tokenizer.parse_response(text, self._form, prefix=self._prompt, tools=self._tools)
            calls = [_call(call["function"]) for call in read.get("tool_calls") or []]
        except Exception as error:  # the answer may not follow the format
            # Do not log the message: it quotes the answer, which is private to the client.
            log.warning("an answer's tool calls cannot be read (%s): it is given as text", type(error).__name__)
            return {"content": output.text}
        content = read.get("content") or ""
        if self._form is IN_TAGS:  # joined of what is between the calls
            content = "\n".join(filter(None, content.split(BETWEEN)))
        message = {"content": content or (None if calls else "")}
        if thinking := read.get("thinking"):
            message["reasoning_content"] = thinking
        return {**message, "tool_calls": calls} if calls else message

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


def _arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object if it does not say what they are."""
    given = tool.get("parameters")
    given = given if isinstance(given, dict) else {}  # none, or true: any
    made = given if given.keys() & OF_ANY_TYPE else {"type": "object", **given}
    return {**made, "x-guidance": WHITESPACE}


def _call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    about = {"name": str(function["name"]), "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": about}
