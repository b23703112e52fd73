"""The bytes that a tokenizer's tokens stand for.

Grammars and a server's log probabilities need them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase


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
