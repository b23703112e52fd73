"""Text of an answer as its tokens come: whole characters only, cut before a stop string.

A token's text depends on its neighbours: a character may be spread over several tokens, and some decoders drop the
first space of what they are given. So new tokens are decoded behind those whose text is known, and what is longer than
before is new: the prefix and read offsets of TGI and vLLM, and of ``tokenizers.decoders.DecodeStream``. That class is
not used: it raises if bytes make an earlier character invalid, keeps what it holds back at the end, decodes special
tokens that it skips again with each token behind them, and is for fast tokenizers only. transformers' streamers decode
the whole text again until a line ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # of bytes that are no character, or not yet
CONTEXT = 6  # tokens of the prompt that the first tokens are decoded behind
LAST_BYTES = 4  # tokens that a character's beginning may take at the end; UTF-8 has four bytes at most
PENDING = 16  # tokens that are held back before it is tried to part with the first of them


class Detokenizer:
    """Decodes for many requests with one tokenizer; any number of threads may use it.

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

    What :meth:`push` and :meth:`end` return is, together, what decoding prompt and answer at once has behind the
    prompt (without special tokens, up to a stop string). One difference is left: where byte tokens are no UTF-8, some
    decoders replace valid characters beside them, too; here these stay, since they may have been shown.

    Args:
        detokenizer: of the tokenizer.
        prompt: its ids, whose last ones are context for the first tokens: a sentencepiece model's first word keeps its
            space if it goes on with the prompt. Without it the answer is decoded by itself.
        stop: strings that end the answer.

    Attributes:
        stopped: a stop string has come; nothing may be pushed any more.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._decode = detokenizer.decode
        self._special = detokenizer.special
        self._known, self._prefix = self._context(prompt)  # tokens whose text is out, and that text
        self._pending: list[int] = []  # behind them: no text is out
        self._stops = StopStrings(stop) if stop else None
        self.stopped = False

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens and their text; not from within a character, which would spoil what follows."""
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
        """What was held back, when no token follows: half a character, or the beginning of a stop string.

        Nothing if a stop string has come, or a second time.
        """
        if self.stopped:
            return ""
        text = self._take(len(self._pending), self._decode(self._known + self._pending)) if self._pending else ""
        shown = self._seen(text)
        if not self.stopped and self._stops is not None:
            shown, self._stops.held = shown + self._stops.held, ""
        return shown

    def _take(self, count: int, text: str) -> str:
        """What the first ``count`` pending tokens add; ``text``: of all that is kept, up to these."""
        taken, prefix = self._pending[:count], self._prefix
        if not text.startswith(prefix):  # bytes that are no character have taken one before with them
            text, prefix = self._decode(taken), ""
        if len(text) == len(prefix):
            return ""  # kept: the space that a decoder drops at the beginning may still be dropped
        self._known, self._pending = taken, self._pending[count:]
        self._prefix = self._decode(taken)
        return text[len(prefix) :]

    def _part(self) -> str:
        """Text of pending tokens that end with no character, again and again: of those that cannot become one.

        A place where both sides decode to the same as together is between two characters, unless the end of the left
        one and the right one are a character's beginning.
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
