"""Messages in channels, as gpt-oss writes them (https://github.com/openai/harmony).

``analysis`` is reasoning; ``final``, and ``commentary`` to nobody, are text. A message to ``functions.NAME`` is a call.
openai-harmony's parser reads tokens, and needs a vocabulary from the network: this one reads text.
"""

from __future__ import annotations

import re

from .calls import Tools, json_arguments, tried
from .events import Sink
from .source import LONGEST, Malformed, Source, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, *ENDS, "<|constrain|>")
TO = re.compile(r"\bto=functions\.([\w.-]+)")
KIND = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`."""
    texts = 0
    while (yield from source.peek()):
        begun = yield from source.space()
        if not (yield from _message_comes(source)):
            sink.text(begun)
            if (mark := (yield from source.until((START, CHANNEL, *ENDS), sink.text))) in (START, CHANNEL):
                yield from _message(source, sink, tools, mark, texts)
            texts += 1
            continue
        texts += yield from _message(source, sink, tools, "", texts)


def _message_comes(source: Source) -> Steps[bool]:
    for mark in (START, CHANNEL, "to="):
        if (yield from source.comes(mark)):
            return True
    return False


def _message(source: Source, sink: Sink, tools: Tools, begun: str, texts: int) -> Steps[int]:
    """Read a message from its header on. Returns how many texts it is."""
    source.keep(begun)
    try:
        header, _ = yield from source.whole((MESSAGE,), LONGEST)
    except Malformed:
        sink.text(source.kept())
        return 1
    whole = source.kept()
    header = begun + header
    channel = KIND.search(header)
    if (to := TO.search(header)) and tools.schemas:
        yield from tried(source, sink, whole, _call(source, sink, to[1]))
        return 0
    if to or channel is None or "to=" in header:  # to a tool that nobody gave: it is shown as it is
        sink.text(whole)
        emit = sink.text
    elif channel[1] == "analysis":
        emit = sink.thought
    else:
        emit = sink.text
        if texts:
            sink.text("\n\n")
    yield from source.until(ENDS, emit)
    return int(emit == sink.text)


def _call(source: Source, sink: Sink, name: str) -> Steps[None]:
    yield from json_arguments(source, sink, name)
    yield from source.space()
    if not (yield from source.peek()):
        return
    for mark in ENDS:
        if (yield from source.take(mark)):
            return
    raise Malformed
