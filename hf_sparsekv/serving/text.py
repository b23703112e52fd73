"""Incremental detokenisation: whole characters only, cut before a stop string.

A token's text depends on its neighbours: a character may span several tokens, and some decoders drop the first space of
their input. So new tokens are decoded together with the tokens before them, and the additional text is new. These are
the prefix and read offsets of TGI, vLLM and ``tokenizers.decoders.DecodeStream``.

We do not use that class. It raises if bytes make an earlier character invalid, and never returns the text that it holds
back at the end. It decodes skipped special tokens again with each later token, and supports fast tokenizers only.
transformers' streamers decode the whole text again until a line ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for bytes that are no character, or not yet
CONTEXT = 6  # last tokens of the prompt that are decoded together with the first tokens of the answer
LAST_BYTES = 4  # most tokens of an incomplete character at the end; UTF-8 has four bytes at most
PENDING = 16  # tokens that are held back before we try to release the first of them


class Detokenizer:
    """Decodes many requests with one tokenizer; any number of threads may use it.

    Args:
        tokenizer: of transformers, fast or slow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decode = _decoder(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}

    def stream(self, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> TextStream:
        """For one answer; see :class:`TextStream`."""
        return TextStream(self, prompt, stop)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """``ids -> text``, with special tokens (which the caller leaves out) and without cleaning up.

    A fast tokenizer that decodes as its base class does is called directly: that takes a tenth of the time.
    """
    kind = type(tokenizer)
    as_base = all(
        getattr(kind, name, None) is getattr(TokenizersBackend, name)
        for name in ("decode", "_decode", "convert_tokens_to_string")
    )
    if as_base:
        backend = tokenizer.backend_tokenizer
        return lambda ids: backend.decode(ids, skip_special_tokens=False)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of one answer.

    The joined results of :meth:`push` and :meth:`end` equal the text after the prompt, if prompt and answer are decoded
    at once. They have no special tokens, and end before a stop string. There is one difference. Where byte tokens are
    no UTF-8, some decoders also replace valid characters next to them. Here these stay, as they may have been shown.

    Args:
        detokenizer: the tokenizer's decoder.
        prompt: token ids of the prompt. The last ones are context for the first tokens of the answer: a sentencepiece
            model's first word keeps its space if it continues the prompt. Without them the answer is decoded alone.
        stop: strings that end the answer.

    Attributes:
        stopped: whether a stop string has appeared; nothing may be pushed afterwards.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._decode = detokenizer.decode
        self._special = detokenizer.special
        self._known, self._prefix = self._context(prompt)  # tokens whose text has been returned, and that text
        self._pending: list[int] = []  # later tokens, without text so far
        self._stops = StopStrings(stop) if stop else None
        self.stopped = False

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens and their text. They start at a character, because part of one would be invalid."""
        last = [token for token in map(int, prompt[-2 * CONTEXT :]) if token not in self._special][-CONTEXT:]
        for begin in range(len(last)):
            text = self._decode(last[begin:])
            if REPLACEMENT not in text:
                return last[begin:], text
        return [], ""

    def push(self, token: int) -> str:
        """Add a token.

        Returns:
            the text that may be shown now; often empty, sometimes of several tokens.
        """
        if self.stopped:
            raise RuntimeError("a stop string has ended this text: nothing can be added")
        if token in self._special:
            return ""
        self._pending.append(token)
        text = self._decode(self._known + self._pending)
        if not text.endswith(REPLACEMENT):
            new = self._take(len(self._pending), text)
            if not new and len(self._pending) > PENDING:
                self._pending.pop()  # without any text: ids that only the model knows
        else:
            new = self._part() if len(self._pending) > PENDING else ""
        return self._seen(new)

    def end(self) -> str:
        """The text that was held back, when no token follows: half a character, or the beginning of a stop string.

        Empty after a stop string, or at a second call.
        """
        if self.stopped:
            return ""
        text = self._take(len(self._pending), self._decode(self._known + self._pending)) if self._pending else ""
        shown = self._seen(text)
        if not self.stopped and self._stops is not None:
            shown, self._stops.held = shown + self._stops.held, ""
        return shown

    def _take(self, count: int, text: str) -> str:
        """Text that the first ``count`` pending tokens add; ``text``: that of all kept tokens, up to these."""
        taken, prefix = self._pending[:count], self._prefix
        if not text.startswith(prefix):  # invalid bytes have also replaced an earlier character
            text, prefix = self._decode(taken), ""
        if len(text) == len(prefix):
            return ""  # kept: the space that a decoder drops at the beginning may still be dropped
        self._known, self._pending = taken, self._pending[count:]
        self._prefix = self._decode(taken)
        return text[len(prefix) :]

    def _part(self) -> str:
        """Text of pending tokens that cannot become a character any more, when the last tokens never complete one.

        A split whose sides decode to the same text as together is between two characters. The exception is an
        incomplete character around the split.
        """
        whole = self._decode(self._known + self._pending)
        for count in range(len(self._pending) - LAST_BYTES, 0, -1):
            left = self._decode(self._known + self._pending[:count])
            if left + self._decode(self._pending[count:]) == whole:
                return self._take(count, left)
        return ""

    def _seen(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        shown = self._stops.push(text)
        self.stopped = self._stops.found is not None
        return shown


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces, wherever the pieces end.

    First is the one that is complete first; of several that end at the same character, the longest. Time goes with
    the text's length alone (Knuth, Morris and Pratt).

    Attributes:
        found: the stop string that has come, or None.
        held: end of the text that may become one: not shown yet.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)  # characters of each that the text ends with
        self.found: str | None = None
        self.held = ""

    def push(self, text: str) -> str:
        """Add text.

        Returns:
            what may be shown: up to what is held back, or up to a stop string.
        """
        text = self.held + text
        for place in range(len(self.held), len(text)):
            character, longest = text[place], 0
            for which, (stop, borders) in enumerate(self._stops):
                matched = self._matched[which]
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                self._matched[which] = matched
                if matched == len(stop) > longest:
                    longest, self.found = matched, stop
            if longest:
                self.held = ""
                return text[: place + 1 - longest]
        keep = len(text) - max(self._matched, default=0)
        self.held = text[keep:]
        return text[:keep]


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``: the length of its longest proper beginning that it also ends with."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        borders.append(matched)
    return borders
