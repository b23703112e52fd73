"""The forms that are known, by name, and readers of answers in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import deepseek, gemma, glm, harmony, hermes, invoke, kimi, llama, mistral, qwen, thinking
from .calls import Tools
from .events import Reader, Sink
from .source import Source, Steps
from .thinking import Marks


@dataclass(frozen=True)
class Form:
    """A way to write calls.

    Attributes:
        read: a generator that tells a sink what the text of a source is.
        shown: texts that chat templates of this form have, all of them; alternatives in a tuple.
        marks: texts that may be special tokens, which are no text otherwise.
        thinks: the form itself has reasoning, beside no other marks.
    """

    read: Callable[[Source, Sink, Tools], Steps[None]]
    shown: tuple[str | tuple[str, ...], ...]
    marks: tuple[str, ...]
    thinks: bool = False

    def is_of(self, template: str) -> bool:
        """Whether a chat template shows calls in this form."""
        return all(any(one in template for one in ((text,) if isinstance(text, str) else text)) for text in self.shown)


_PYTHON = (*llama.OPENS, llama.END)
# The first whose template it is; those that are told by more than one of them come first.
FORMS = {
    "harmony": Form(harmony.read, (harmony.CHANNEL, harmony.MESSAGE), harmony.MARKS, thinks=True),
    "gemma": Form(gemma.read, (gemma.OPEN, "call:"), (gemma.OPEN, gemma.CLOSE, gemma.QUOTE)),
    "function-gemma": Form(
        gemma.read_function,
        (gemma.FUNCTION_OPEN,),
        (gemma.FUNCTION_OPEN, gemma.FUNCTION_CLOSE, gemma.FUNCTION_QUOTE),
    ),
    "deepseek-3.2": Form(invoke.read, (invoke.DSML,), (invoke.DSML,)),
    "deepseek": Form(
        deepseek.read,
        (deepseek.OPEN,),
        (deepseek.OPEN, deepseek.CLOSE, deepseek.CALL, deepseek.SEPARATOR, deepseek.CALL_END),
    ),
    "kimi": Form(kimi.read, (kimi.OPEN,), (kimi.OPEN, kimi.CLOSE, kimi.CALL, kimi.ARGUMENTS, kimi.CALL_END)),
    "minimax": Form(invoke.read_minimax, (invoke.MINIMAX_OPEN,), (invoke.MINIMAX_OPEN, invoke.MINIMAX_CLOSE)),
    "glm": Form(glm.read, (glm.KEY,), (glm.OPEN, glm.CLOSE, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END)),
    "qwen": Form(qwen.read, (qwen.FUNCTION, qwen.PARAMETER), (qwen.OPEN, qwen.CLOSE)),
    "hermes": Form(hermes.read, (hermes.OPEN, hermes.CLOSE, "arguments"), (hermes.OPEN, hermes.CLOSE)),
    "mistral": Form(mistral.read, (mistral.OPEN,), (mistral.OPEN, mistral.ID, mistral.ARGS)),
    "llama": Form(llama.read, ("parameters", (*_PYTHON, "ipython")), _PYTHON),
}


def form_of(template: str) -> str | None:
    """The name of the form in which a chat template shows calls."""
    return next((name for name, form in FORMS.items() if form.is_of(template)), None)


def reader(form: Form | None, tools: Tools | None, marks: Marks | None, begun: bool = False) -> Reader:
    """A reader of one answer.

    Args:
        form: of its calls.
        tools: of the request; None: it has none, so the answer has no calls.
        marks: of its reasoning; None: it has none.
        begun: the template has begun the reasoning.
    """

    def steps(source: Source, sink: Sink) -> Steps[None]:
        if marks is not None:
            yield from thinking.reasoning(source, sink, marks, begun)
        if form is not None and (tools is not None or form.thinks):
            yield from form.read(source, sink, tools or Tools())

    return Reader(steps)
