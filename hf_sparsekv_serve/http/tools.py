"""How answers to one request are read: calls of tools and reasoning, in the form of its model."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_sparsekv.serving.sampling import MAX_TEXT_TOKENS

from ..forms import known, thinking
from ..forms.calls import Tools
from ..forms.events import Arguments, Begin, Broken, End, Event
from ..forms.message import Message
from ..forms.spelling import Spelling, spelling_of
from ..forms.template import TemplateReader
from .call_grammar import grammar_of
from .errors import ApiError
from .formats import Form, composed, thought_of

PROMPT_END = 512  # tokens in which the template may have begun the message
TEMPLATE = "template"  # the form that a tokenizer defines itself, as its response_template

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Style:
    """How a model writes calls and reasoning.

    Attributes:
        form: the name of the form of its calls, or :data:`TEMPLATE`; None: it is not known.
        marks: of its reasoning.
        form_tokens: special tokens that calls are written with.
        marks_tokens: special tokens around reasoning.
        spelling: of its calls; None: they are known for reading only.
    """

    form: str | None
    marks: thinking.Marks | None
    form_tokens: tuple[int, ...] = ()
    marks_tokens: tuple[int, ...] = ()
    spelling: Spelling | None = None

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, template: str, ends: Iterable[int], asked: str | None = None) -> Style:
        """Of a chat template.

        Args:
            ends: tokens that end answers, which are never text.
            asked: the form that an operator has named; None: that of the template.
        """
        own = getattr(tokenizer, "response_template", None)
        form = asked or known.form_of(template) or (None if own is None else TEMPLATE)
        found = known.FORMS.get(form or "")
        thinks = found is not None and found.thinks
        marks = None if thinks else thinking.marks_of(template, set(tokenizer.get_added_vocab()))
        added = tokenizer.added_tokens_decoder.items()
        special = {id: token.content for id, token in added if token.special and id not in set(ends)}
        written = found.marks if found is not None else (str(own).replace("\\", ""),) if form == TEMPLATE else ()
        return Style(form, marks, _in(special, written), _in(special, marks or ()), spelling_of(form, template))


def _in(special: Mapping[int, str], texts: Sequence[str]) -> tuple[int, ...]:
    """Tokens that are part of some texts."""
    found = (id for id, token in special.items() if any(token in text for text in texts))
    return tuple(itertools.islice(found, MAX_TEXT_TOKENS // 2))


class Reading:
    """Makes readers of the answers to one conversation.

    Args:
        tokenizer: whose chat template the conversation was given to.
        style: of the model.
        tools: as clients give them; None: none.
        prompt: ids, in which the template may have begun the reasoning.
        first_only: calls after the first one are left out.

    Raises:
        ApiError: there are tools, and how the model writes calls is not known.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        style: Style,
        tools: list[dict[str, Any]] | None,
        prompt: Sequence[int],
        first_only: bool = False,
    ) -> None:
        if tools is not None and style.form is None:
            why = "this model's tokenizer does not say how calls of tools are written: name the form by --tool-format"
            raise ApiError(400, why, "tools", "unsupported_parameter")
        self._tokenizer, self._style, self._tools = tokenizer, style, tools
        self._form = known.FORMS.get(style.form or "")
        self._by_template = style.form == TEMPLATE and tools is not None
        self._marks = style.marks
        self._prompt = str(tokenizer.decode(list(prompt[-PROMPT_END:])))
        self._begun = self._marks is not None and thinking.begun(self._prompt, self._marks)
        self._named = None if tools is None else Tools.of(tools)
        self._first_only = first_only

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """Special tokens that it has to see."""
        of_form = self._tools is not None or (self._form is not None and self._form.thinks)
        return (self._style.form_tokens if of_form else ()) + (self._style.marks_tokens if self._marks else ())

    def settings(self, form: Form | None, calls: tuple[Sequence[str], bool] | None) -> dict[str, Any]:
        """What the engine has to follow, as fields of :class:`.Sampling`.

        Reasoning may come first, if a grammar can say how it is written. Otherwise the answer has none.

        Args:
            form: that an answer without calls follows.
            calls: arguments of :meth:`grammar`, if the answer must be calls; then ``form`` says nothing.

        Raises:
            ApiError: it cannot be followed.
        """
        if form is None and calls is None:
            return {}
        written = None
        if calls is not None:
            form, written = None, self.grammar(*calls)
        elif form is not None and self._tools is not None:
            if self._style.spelling is None:
                why = "and tools do not go together here: this model's calls are known for reading only. Leave one out"
                raise ApiError(400, f"{form.field} {why}", form.field, "unsupported_parameter")
            written = self.grammar([tool["function"]["name"] for tool in self._tools], not self._first_only)
        thought = self._thought()
        if form is not None and written is None and (thought is None or (form.rule is None and not self._begun)):
            thought = None
        if thought is None:
            self._marks = None
        if form is not None and written is None and thought is None:
            return {"json_schema": form.json_schema, "grammar": form.grammar}
        grammar = written if form is None and thought is None else composed(form, written, thought)
        return {"json_schema": None, "grammar": grammar}

    def _thought(self) -> str | None:
        """The rule of the reasoning that may come; None: none may."""
        if self._marks is None or self._prompt.rstrip().endswith(self._marks.close.rstrip()):
            return None
        added = self._tokenizer.added_tokens_decoder.items()
        special = {token.content: id for id, token in added if token.special}
        return thought_of(self._marks, self._begun, special)

    @property
    def needed(self) -> bool:
        """Whether answers are anything but text."""
        return self._tools is not None or self._marks is not None or (self._form is not None and self._form.thinks)

    def tokens(self, text: str) -> int:
        """Tokens of a part of an answer, counted again from its text."""
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def reader(self) -> AnswerReader:
        """For one answer."""
        if self._by_template:
            form = self._tokenizer.response_template
            return AnswerReader(TemplateReader(self._tokenizer, form, self._prompt, self._tools or []), False)
        return AnswerReader(known.reader(self._form, self._named, self._marks, self._begun), self._first_only)

    def message(self, text: str) -> Message:
        """The message of a whole answer. It takes up to a second, so it is not for the event loop."""
        reader = self.reader()
        return Message.of([*reader.feed(text), *reader.finish()])

    def grammar(self, names: Sequence[str], several: bool) -> str:
        """The grammar of an answer that is calls of these tools and nothing else, in llguidance's dialect of Lark.

        Raises:
            ApiError: the model writes calls in a way of its own, whose grammar is not known.
        """
        if self._style.spelling is None:
            message = "tool_choice must be auto or none: how this model writes calls is known for reading only"
            raise ApiError(400, message, "tool_choice", "unsupported_parameter")
        asked = [tool["function"] for tool in self._tools or () if tool["function"]["name"] in names]
        added = self._tokenizer.added_tokens_decoder.items()
        marks = self._form.marks if self._form is not None else ()
        tokens = {token.content: id for id, token in added if token.content in marks}
        return grammar_of(asked, several, self._style.spelling, tokens)


class AnswerReader:
    """Reads one answer, and gives each call an id.

    Args:
        reader: of the form.
        first_only: calls after the first one are left out.
    """

    def __init__(self, reader: known.Reader | TemplateReader, first_only: bool) -> None:
        self._reader, self._first_only = reader, first_only
        self._calls = 0
        self._left_out = False

    def feed(self, text: str) -> list[Event]:
        """Events of the next piece of text."""
        return list(self._kept(self._reader.feed(text)))

    def finish(self) -> list[Event]:
        """Events at the end of the answer."""
        return list(self._kept(self._reader.finish()))

    def _kept(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Begin):
                self._left_out = self._first_only and self._calls > 0
                event = Begin(event.name, event.id or f"call_{uuid.uuid4().hex}")
            if isinstance(event, Broken):  # without its text, which is private to the client
                log.warning("an answer's tool call cannot be read: it is given as text")
            if not self._left_out or not isinstance(event, Begin | Arguments | End | Broken):
                yield event
            self._calls += isinstance(event, End)
