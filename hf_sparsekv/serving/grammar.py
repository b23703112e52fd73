"""Answers that follow a grammar: which tokens may come next, by ``llguidance`` (the extra ``structured``).

A step's logits are computed while the host reads the token before, so a grammar costs a step nothing but the time that
its mask takes, if that is longer. Apart from :mod:`.drawn`, which knows tokens in flight and no grammar.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .logit_edits import WORD, Allowed
from .request import NotFollowed
from .sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # compiled grammars
MISSING = "needs llguidance: install the extra `structured`, or `pip install llguidance`"
# As people and models write it: a space, or lines that are indented. No more, or an answer may be nothing else.
WHITESPACE = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,64})?"}


class Constraint:
    """The grammar of one answer, and how far the answer has come.

    Attributes:
        unread: tokens in flight that follow, as callables that wait for them.
        error: why the grammar cannot be followed any further; the answer may only end then.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.unread: list[Any] = []
        self.error: NotFollowed | None = None

    def fill(self, words: Tensor) -> None:
        """Write which tokens may come next, int32 ``[words]`` on the host; after the end or an error only the end."""
        unread, self.unread = self.unread, []
        for token in unread:
            if not self._matcher.is_stopped():  # a row may run a step too many
                self._matcher.consume_token(token())
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        if self.error is None and self._matcher.is_error():
            self.error = NotFollowed(f"the grammar is too large for a step: {_first(self._matcher)}")


class Grammars:
    """Compiles grammars for one tokenizer; any thread may.

    Args:
        tokenizer: of the model; None: there is none, and no grammar.
        vocabulary: logits of a row.
        eos: tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, eos: Iterable[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, sorted(eos)
        self._lock = threading.Lock()  # guards the attributes below
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def constraint(self, sampling: Sampling) -> Constraint | None:
        """What a request's answer has to follow; None: nothing.

        Raises:
            ValueError: the schema or the grammar cannot be followed; llguidance or a tokenizer is missing.
        """
        if sampling.json_schema is None and sampling.grammar is None:
            return None
        name = "grammar" if sampling.json_schema is None else "json_schema"
        if self._tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer: give the engine one")
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ValueError(f"{name} {MISSING}") from None
        with self._lock:
            if self._tokens is None:
                self._tokens = ll_tokenizer(self._tokenizer, self._vocabulary, self._eos)
        try:
            if sampling.json_schema is None:
                text = LLMatcher.grammar_from_lark(sampling.grammar)
            else:
                text = LLMatcher.grammar_from_json_schema(sampling.json_schema, defaults=WHITESPACE)
        except ValueError as error:  # nested too deeply
            raise ValueError(f"{name} cannot be followed: {error}") from None
        return Constraint(self._matcher(name, text).deep_copy())

    def _matcher(self, name: str, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        with self._lock:
            if text in self._compiled:
                self._compiled.move_to_end(text)
                return self._compiled[text]
        made = LLMatcher(self._tokens, text, log_level=0)
        if made.is_error():
            raise ValueError(f"{name} cannot be followed: {_first(made)}")
        with self._lock:
            self._compiled[text] = made
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return made

    def allowed(self, constraints: Mapping[int, Constraint], device: torch.device) -> Allowed | None:
        """Masks of a batch by the places that have a grammar; it waits for their last tokens. None: there are none."""
        if not constraints:
            return None
        pinned = device.type == "cuda"
        words = torch.empty(len(constraints), -(-self._vocabulary // WORD), dtype=torch.int32, pin_memory=pinned)
        for row, constraint in zip(words, constraints.values()):
            constraint.fill(row)
        places = torch.tensor(list(constraints), pin_memory=pinned)
        return Allowed(places.to(device, non_blocking=True), words.to(device, non_blocking=True))


def _first(matcher: LLMatcher) -> str:
    """The first line of an error; the others show the text so far, which is the client's own."""
    return matcher.get_error().strip().split("\n")[0].split(" <state>")[0]


# ---------------------------------------------------------------------- the bytes of tokens


class _Tokens:
    """A tokenizer as llguidance takes one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: list[bytes], special: list[int], eos: int) -> None:
        self._tokenizer = tokenizer
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = eos, None

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text is a string")  # llguidance tries both
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def ll_tokenizer(tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos: Sequence[int]) -> LLTokenizer:
    """llguidance's view of a tokenizer, whose vocabulary has been filled up to the logits of a row.

    Raises:
        ValueError: it is not known which bytes its tokens stand for; or no token ends an answer.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos:
        raise ValueError("json_schema and grammar need a token that ends an answer, and this model has none")
    tokens, special = token_bytes(tokenizer, vocabulary)
    wrapped = TokenizerWrapper(_Tokens(tokenizer, tokens, special, eos[0]))
    return LLTokenizer(wrapped, n_vocab=vocabulary, eos_token=list(eos))


def token_bytes(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> tuple[list[bytes], list[int]]:
    """The bytes that each token stands for, and the ids of special tokens, which stand for none.

    llguidance reads them from the tokenizer's file, but for some decoders (of GGUF files) not rightly.

    Raises:
        ValueError: the tokenizer is neither byte-level nor as sentencepiece's.
    """
    spelled = spelling(tokenizer)
    if spelled is None:
        raise ValueError(
            "json_schema and grammar need a tokenizer of bytes, or as sentencepiece's: this one is neither"
        )
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
    tokens = [b""] * vocabulary
    for text, id in tokenizer.get_vocab().items():
        if id < vocabulary:
            tokens[id] = str(added[id].content).encode() if id in added else spelled(text)
    return tokens, sorted(id for id in special if id < vocabulary)


def spelling(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes] | None:
    """The bytes of a token as the vocabulary writes it; None: the tokenizer is neither byte-level nor sentencepiece's.

    Added tokens stand for their content.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kinds = set() if backend is None else _kinds(json.loads(backend.to_str())["decoder"])
    if "ByteLevel" in kinds:
        return _byte_level
    return _sentencepiece if kinds & {"ByteFallback", "Metaspace"} else None


def _kinds(decoder: Any) -> set[str]:
    """The kinds of a decoder and of those that it consists of."""
    if not isinstance(decoder, dict):
        return set()
    return {decoder["type"]}.union(*map(_kinds, decoder.get("decoders", ())))


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTERS = _alphabet()


def _byte_level(text: str) -> bytes:
    return b"".join(bytes([_LETTERS[one]]) if one in _LETTERS else one.encode() for one in text)


def _sentencepiece(text: str) -> bytes:
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text):
        return bytes([int(byte[1], 16)])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
