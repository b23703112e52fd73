"""Incremental detokenisation: whole characters only, cut before a stop string.

A token's text depends on its neighbours: a character may span several tokens, and some decoders drop the first space of
their input. So new tokens are decoded together with the tokens before them, and the additional text is new. These are
the prefix and read offsets of TGI, vLLM and ``tokenizers.decoders.DecodeStream``.

We do not use that class. It raises if bytes make an earlier character invalid, and never returns the text that it holds
back at the end. It decodes skipped special tokens again with each later token, and supports fast tokenizers only.
transformers' streamers decode the whole text again until a line ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for bytes that are no character, or not yet
CONTEXT = 6  # last tokens of the prompt that are decoded together with the first tokens of the answer
LAST_BYTES = 4  # most tokens of an incomplete character at the end; UTF-8 has four bytes at most
PENDING = 16  # tokens that are held back before we try to release the first of them


def eos_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Tokens that end an answer: those of the generation configuration and of the tokenizer."""
    found: set[int] = set()
    config = getattr(model, "generation_config", None)
    for ids in (getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        found |= set(ids if isinstance(ids, list | tuple) else () if ids is None else (ids,))
    return frozenset(found)


class Detokenizer:
    """Decodes many requests with one tokenizer; any number of threads may use it.

    Args:
        tokenizer: of transformers, fast or slow.
        eos: tokens that end an answer. Chat models name some in their generation configuration alone, so their
            tokenizer does not mark them as special.

    Attributes:
        hidden: tokens that are never text: special ones, and those that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos: Iterable[int] = ()) -> None:
        self.decode = _decoder(tokenizer)
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {id for id, token in self._added.items() if token.special}
        self.hidden = frozenset(tokenizer.all_special_ids) | special | frozenset(eos)

    @cached_property
    def names(self) -> dict[int, str]:
        """The texts of hidden tokens, as stop strings name them."""
        texts = {id: self._added[id].content if id in self._added else self.decode([id]) for id in self.hidden}
        return {id: text for id, text in texts.items() if text}

    def stream(
        self, prompt: Sequence[int] = (), stop: Sequence[str] = (), text_tokens: Sequence[int] = ()
    ) -> TextStream:
        """For one answer; see :class:`TextStream`."""
        return TextStream(self, prompt, stop, text_tokens)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """``ids -> text``, with special and end tokens (which the caller leaves out) and without cleaning up.

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
    at once. They have no special or end tokens, and end before a stop string. A stop string that has the text of such a
    token matches that token. There is one difference. Where byte tokens are no UTF-8, some decoders also replace valid
    characters next to them. Here these stay, as they may have been shown.

    Args:
        detokenizer: the tokenizer's decoder.
        prompt: token ids of the prompt. The last ones are context for the first tokens of the answer: a sentencepiece
            model's first word keeps its space if it continues the prompt. Without them the answer is decoded alone.
        stop: strings that end the answer.
        text_tokens: hidden tokens that are text of this answer all the same.

    Attributes:
        stopped: whether a stop string has appeared; nothing may be pushed afterwards.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        text_tokens: Sequence[int] = (),
    ) -> None:
        self._decode = detokenizer.decode
        self._hidden = detokenizer.hidden.difference(text_tokens)
        self._known, self._prefix = self._context(prompt)  # tokens whose text has been returned, and that text
        self._pending: list[int] = []  # later tokens, without text so far
        names = {token: name for token, name in detokenizer.names.items() if token in self._hidden} if stop else {}
        self._stops = StopStrings(stop, names) if stop else None
        self.stopped = False

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the text."""
        return None if self._stops is None else self._stops.found

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens and their text. They start at a character, because part of one would be invalid."""
        last = [token for token in map(int, prompt[-2 * CONTEXT :]) if token not in self._hidden][-CONTEXT:]
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
        if token in self._hidden:
            return "" if self._stops is None else self._looked_at(self._stops.push_special(token))
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
        return text if self._stops is None or not text else self._looked_at(self._stops.push(text))

    def _looked_at(self, shown: str) -> str:
        self.stopped = self._stops.found is not None
        return shown


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces, wherever the pieces end.

    First is the one that is complete first; of several that end at the same character, the longest. Time goes with
    the text's length alone (Knuth, Morris and Pratt).

    Special tokens are not in the text. A stop string that contains a special token's text looks for that token. It sees
    the text with the tokens that it names written out.

    Args:
        stops: the strings.
        names: texts of special tokens.

    Attributes:
        found: the stop string that has come, or None.
        held: end of the text that may become one: not shown yet.
    """

    def __init__(self, stops: Iterable[str], names: Mapping[int, str] | None = None) -> None:
        self._stops = [_Stop(stop, names or {}) for stop in stops]
        self.found: str | None = None
        self.held = ""

    def push(self, text: str) -> str:
        """Add text.

        Returns:
            what may be shown: up to what is held back, or up to a stop string.
        """
        text = self.held + text
        for place in range(len(self.held), len(text)):
            character = text[place]
            if ended := [one for one in self._stops if one.step(character)]:
                return self._ended(text[: place + 1], ended)
        return self._hold(text)

    def push_special(self, token: int) -> str:
        """Add a special token, which has no text of its own. Returns as :meth:`push`."""
        if ended := [one for one in self._stops if one.step_special(token)]:
            return self._ended(self.held, ended)
        return self._hold(self.held)

    def _ended(self, text: str, ended: list[_Stop]) -> str:
        first = max(ended, key=lambda one: one.shown)
        self.held, self.found = "", first.stop
        return text[: len(text) - first.shown]

    def _hold(self, text: str) -> str:
        keep = len(text) - max((one.shown for one in self._stops), default=0)
        self.held = text[keep:]
        return text[:keep]


class _Stop:
    """How far one stop string has come.

    Attributes:
        stop: the string.
    """

    def __init__(self, stop: str, names: Mapping[int, str]) -> None:
        self.stop, self._borders = stop, _borders(stop)
        self._names = {token: name for token, name in names.items() if name in stop}
        self._matched = 0  # characters of it that the text ends with
        self._seen = 0  # characters so far, those of the tokens that it names included
        self._special: list[tuple[int, int]] = []  # where such tokens begin and end

    def step(self, character: str) -> bool:
        """Add a character. Returns whether the string is complete."""
        stop, matched = self.stop, self._matched
        while matched and stop[matched] != character:
            matched = self._borders[matched - 1]
        self._matched = matched + (stop[matched] == character)
        self._seen += 1
        return self._matched == len(stop)

    def step_special(self, token: int) -> bool:
        """Add a special token. Returns whether the string is complete."""
        name = self._names.get(token)
        if name is None:
            return False
        begin = self._seen
        ended = any(self.step(character) for character in name)
        self._special.append((begin, self._seen))
        return ended

    @property
    def shown(self) -> int:
        """Characters of the text that belong to what has matched; special tokens have none."""
        begin = self._seen - self._matched
        self._special = [one for one in self._special if one[1] > begin]
        return self._matched - sum(end - max(start, begin) for start, end in self._special)


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``: the length of its longest proper beginning that it also ends with."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        borders.append(matched)
    return borders
