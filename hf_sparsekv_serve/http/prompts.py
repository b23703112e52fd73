"""Submits the requests of a parsed body: chat templates, tokenising, and limits of length.

All of it runs on a thread beside the event loop, because a long prompt takes long.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_sparsekv.serving.request import Handle, TooLong
from hf_sparsekv.serving.sampling import shown

from ..process import step_aside
from . import schema
from .engine import Engine
from .errors import CONTEXT, TOO_LONG, ApiError, told, too_long
from .fields import EFFORT, MAX_NAME, MOST_TOLD
from .messages import applied, check_history, with_reasoning, without_unknown
from .scan import Scan
from .tools import Reading, Style

READING = 4  # threads that parse bodies, apply templates and tokenise at a time
LARGE = 1 << 18  # bytes of a body; these are read one at a time, or they would take the interpreter from the engine
LIKELY = 8  # bytes a token: a text of more than this times the context is tokenised in pieces first
COUNTED = 1 << 16  # characters of a piece: some tokenizers make four tokens of one
# Settings that an engine refuses, and the fields that clients have for them.
FIELDS = {
    **{name: name for name in ("logit_bias", "exact", "min_tokens", "stop_token_ids", "ignore_eos")},
    "json_schema": "response_format",
    "grammar": "tool_choice",
    "prompt_logprobs": "logprobs",
}
COMMON_ANSWER = 4096  # tokens
SWITCHES = ("enable_thinking", "thinking")  # variables of templates
CUT = 16  # tokens that a piece may have more because it is cut out


class Prompts:
    """Submits what a body asks for. Any thread may call it.

    Args:
        engine: serves the requests.
        model_id: the name that clients ask for.
        max_answer: tokens of a chat's answer if the client does not say; None: as many as memory has for each row.
        ignore_unknown: leave unknown fields out.
        tool_format: the form in which the model writes calls; None: that of its chat template.
    """

    def __init__(
        self,
        engine: Engine,
        model_id: str,
        max_answer: int | None,
        ignore_unknown: bool = False,
        tool_format: str | None = None,
    ) -> None:
        self._engine = engine
        self._model_id = model_id
        self._max_answer = max_answer
        self.ignore_unknown = ignore_unknown
        self._tool_format = tool_format
        self._styles: dict[str, Style] = {}
        # Both are free while a schema is compiled: others need not wait for it.
        self._reading, self._reading_large = threading.Semaphore(READING), threading.Semaphore(1)

    def submit(
        self,
        body: bytes,
        scan: Scan,
        parse: Callable[[dict[str, Any], Scan, bool], schema.Asked],
        handles: list[Handle],
    ) -> tuple[schema.Asked, Reading | None]:
        """Parse, tokenise and submit, on a thread. Appends to ``handles``.

        Returns:
            The requests, without their texts: answers may take long, and many wait. How the answers are read; None:
            they are text.
        """
        step_aside()
        with self.turn(body) as turn:
            asked, reading = self._parsed(body, scan, parse), None
            self._check_count(len(asked.prompts or (None,)), asked.n)
            with _told(asked):
                if asked.messages is not None:
                    asked, reading, prompt = self._conversation(asked)
                    prompts, default = [prompt], self._most_of_answer(len(prompt))
                else:
                    prompts, default = [self._ids(one) for one in asked.prompts or ()], schema.COMPLETION_TOKENS
                    if asked.echo:
                        asked = replace(asked, echoed=tuple(map(self._echoed, asked.prompts or (), prompts)))
                turn.close()
                for prompt in prompts:
                    for sampling in asked.sampled(len(prompt), self._engine.max_length, default):
                        handles.append(self._engine.submit(prompt, sampling))
        return replace(asked, prompts=None, messages=None, template={}, calls=None, hints=()), reading

    def count(self, body: bytes, scan: Scan, parse: Callable[[dict[str, Any], Scan, bool], schema.Asked]) -> int:
        """Tokens of a conversation, on a thread."""
        step_aside()
        with self.turn(body):
            asked = self._parsed(body, scan, parse)
            with _told(asked):
                return len(self._conversation(asked)[2])

    @contextlib.contextmanager
    def turn(self, body: bytes) -> Iterator[contextlib.ExitStack]:
        """Wait for a turn to read, which ends with this context or its stack."""
        with contextlib.ExitStack() as turn:
            if len(body) > LARGE:
                turn.enter_context(self._reading_large)
            turn.enter_context(self._reading)
            yield turn

    def _parsed(
        self, body: bytes, scan: Scan, parse: Callable[[dict[str, Any], Scan, bool], schema.Asked]
    ) -> schema.Asked:
        return parse(self.loaded(body), scan, self.ignore_unknown)

    def _conversation(self, asked: schema.Asked) -> tuple[schema.Asked, Reading | None, list[int]]:
        """What a conversation asks of the engine, how its answers are read, and its tokens."""
        asked = self._with_known(asked)
        prompt = self._rendered(asked)
        asked, reading = self._with_reading(asked, prompt)
        return asked, reading, prompt

    def _most_of_answer(self, prompt: int) -> int:
        """Tokens of an answer to a prompt of so many, if the client does not say: the engine reserves memory for them.

        All rows may have as many. Where long prompts leave little of a row's share, it is a common length all the same.
        """
        if self._max_answer is not None:
            return self._max_answer
        share = self._engine.tokens_per_row
        return max(share - prompt, min(COMMON_ANSWER, share // 2), 1)

    def loaded(self, body: bytes) -> dict[str, Any]:
        """A body's fields, if it asks for the model that is served."""
        fields = schema.loads(body)
        schema.check_model(fields, self._model_id)
        return fields

    def of_conversation(self, asked: schema.Asked) -> list[int]:
        """The tokens of a conversation. Raises ApiError if the template refuses it."""
        return self._rendered(self._with_known(asked))

    def of_text(self, text: str, **options: Any) -> list[int]:
        """The tokens of a prompt; ``options``: of the tokenizer."""
        if self._engine.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer: give the prompt as token ids", "prompt")
        return self._tokens(text, "prompt", **options)

    def _with_reading(self, asked: schema.Asked, prompt: list[int]) -> tuple[schema.Asked, Reading | None]:
        """How answers to a conversation are read, and what that asks of the engine."""
        tokenizer, tools, sampling = self._tokenizer(), asked.template.get("tools"), asked.sampling
        template = tokenizer.get_chat_template(tools=tools)
        if tools and "tools" not in template:
            raise ApiError(400, "this model's chat template knows no tools", "tools", "unsupported_parameter")
        reading = Reading(tokenizer, self._style(template), tools, prompt, asked.first_only)
        settings = reading.settings(asked.form, asked.calls)
        asked = replace(asked, sampling=replace(sampling, **settings, text_tokens=reading.text_tokens))
        return asked, reading if reading.needed else None

    def _style(self, template: str) -> Style:
        """How the model of a chat template writes. A tokenizer has one or two templates."""
        if template not in self._styles:
            self._styles[template] = Style.of(self._tokenizer(), template, self._engine.eos, self._tool_format)
        return self._styles[template]

    def _check_count(self, prompts: int, each: int) -> None:
        """Raise 400 for more answers than ever fit the queue; 429 would make the client try again."""
        most = max(1, self._engine.max_waiting)
        if prompts * each > most:
            name, what = ("prompt", f"{prompts:,} prompts") if each == 1 else ("n", f"{prompts * each:,} answers")
            message = f"{name} asks for {what}: {most:,} may wait here at a time. Send them in several requests"
            raise ApiError(400, message, name)

    def _echoed(self, prompt: str | list[int], ids: list[int]) -> tuple[str, int]:
        """The text of a prompt, and its first token."""
        if isinstance(prompt, str):
            return prompt, ids[0] if ids else 0
        tokenizer = self._engine.tokenizer
        known = range(len(tokenizer) if tokenizer is not None else 0)
        if tokenizer is None or not all(one in known for one in ids):  # the engine says what is wrong
            return "", ids[0]
        return str(tokenizer.decode(ids, skip_special_tokens=True)), ids[0]

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return self.of_text(prompt) if isinstance(prompt, str) else prompt

    def _tokens(self, text: str, field: str, **options: Any) -> list[int]:
        """The ids of a text, which is made of ``field``. All tokenising is here, so that no text is too long for it."""
        self._check_length(text, field)
        return self._engine.tokenizer(text, verbose=False, **options)["input_ids"]

    def _check_length(self, text: str, field: str) -> None:
        """Raise 400 for a text with far more tokens than the context.

        Tokenising it whole takes some hundred bytes a token: 8 MiB of text for a context of 1,000 tokens took 1.1 GB.
        """
        most, tokens = self._engine.max_length, 0
        if (len(text) if text.isascii() else len(text.encode())) <= LIKELY * most:
            return
        for at in range(0, len(text), COUNTED):
            ids = self._engine.tokenizer(text[at : at + COUNTED], add_special_tokens=False, verbose=False)["input_ids"]
            tokens += max(0, len(ids) - CUT)
            if tokens > most:
                why = f"a prompt of {len(text):,} characters has more tokens than max_length={most}: shorten it"
                raise ApiError(400, f"{CONTEXT.format(most)} However, {why}", field, TOO_LONG)

    def _with_known(self, asked: schema.Asked) -> schema.Asked:
        """A conversation without the variables that its template does not know, if that may be; or 400."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            return asked
        source = tokenizer.get_chat_template(tools=asked.template.get("tools"))
        for field, variables in asked.hints:
            known = {name: value for name, value in variables.items() if name in source}
            told = (*asked.ignored, *(() if known else (field,)))[:MOST_TOLD]
            asked = replace(asked, template={**known, **asked.template}, ignored=told)
        if self.ignore_unknown and asked.messages is not None:
            messages, where = without_unknown(asked.messages, source)
            ignored = (*asked.ignored, *(one[: 2 * MAX_NAME] for one in where))[:MOST_TOLD]
            asked = replace(asked, messages=messages, ignored=ignored)
        unknown = [name for name in asked.template if name != "tools" and name not in source]
        if not unknown:
            return asked
        if self.ignore_unknown:
            left_out = set(unknown)  # there may be thousands
            template = {name: value for name, value in asked.template.items() if name not in left_out}
            first = unknown[: max(0, MOST_TOLD - len(asked.ignored))]
            where = [name if name == EFFORT else f"chat_template_kwargs.{name[:MAX_NAME]}" for name in first]
            return replace(asked, template=template, ignored=(*asked.ignored, *where))
        why = "is not known to this model's chat template, which would leave it out"
        if EFFORT in unknown:
            switch = next((name for name in SWITCHES if name in source), None)
            instead = f'. It turns reasoning off by chat_template_kwargs {{"{switch}": false}}' if switch else ""
            raise ApiError(400, f"{EFFORT} {why}{instead}", EFFORT, "unsupported_parameter")
        message = f"chat_template_kwargs: {shown(unknown[0])} {why}"
        raise ApiError(400, message, "chat_template_kwargs", "unsupported_parameter")

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """A tokenizer with a chat template."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", "messages")
        return tokenizer

    def _rendered(self, asked: schema.Asked) -> list[int]:
        tokenizer = self._tokenizer()
        source = tokenizer.get_chat_template(tools=asked.template.get("tools"))
        messages = asked.messages or []
        check_history(messages, source)
        messages = with_reasoning(messages, source)
        if tools := asked.template.get("tools"):  # they are kept until the answer ends, whatever the template shows
            self._check_length(json.dumps(tools, ensure_ascii=False), "tools")
        try:
            options: dict[str, Any] = {"add_generation_prompt": asked.generation_prompt, "tokenize": False}
            options |= {} if asked.whole_message else {"continue_final_message": True}
            text = applied(
                messages, lambda given: str(tokenizer.apply_chat_template(given, **asked.template, **options))
            )
        except Exception as error:  # templates raise whatever they like
            raise ApiError(400, f"the chat template refuses these messages: {error}", "messages") from error
        return self._tokens(text, "messages", add_special_tokens=False)


@contextlib.contextmanager
def _told(asked: schema.Asked) -> Iterator[None]:
    """The engine's errors as clients get them."""
    try:
        yield
    except TooLong as error:
        raise too_long(error, "prompt" if asked.messages is None else "messages") from error
    except ValueError as error:
        usual = "messages" if asked.messages is not None else "prompt"
        name, _, rest = str(error).partition(" ")
        field = FIELDS.get(name)
        if asked.form is not None and name in ("json_schema", "grammar"):
            field = asked.form.field
        raise ApiError(400, str(error) if field is None else f"{field} {rest}", field or usual) from error
    except RuntimeError as error:
        raise told(error) from error
