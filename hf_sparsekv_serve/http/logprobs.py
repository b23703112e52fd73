"""Log probabilities as OpenAI's two APIs show them: a list of objects for chats, lists side by side for completions.

:mod:`.shapes` knows answers, but not the text of single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_sparsekv.serving.request import Logprob
from hf_sparsekv.serving.text import REPLACEMENT, Detokenizer
from hf_sparsekv.serving.token_bytes import spelling

LOWEST = -9999.0  # for tokens that cannot come: JSON has no infinity


class TokenTexts:
    """The text of each single token.

    A tokenizer decodes a token alone as the first of a text, where some (Llama 2's, Mistral's) drop its space. So the
    text is made of the token's bytes, where these are known.

    Args:
        tokenizer: None: tokens are shown by their numbers.
        eos: tokens that end an answer, which are not in its text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, eos: Iterable[int] = ()) -> None:
        self._tokenizer, self.eos = tokenizer, frozenset(eos)
        self._spelled = None if tokenizer is None else spelling(tokenizer)
        self._added = frozenset() if tokenizer is None else frozenset(tokenizer.added_tokens_decoder)
        self._hidden = frozenset() if tokenizer is None else Detokenizer(tokenizer, eos).hidden
        self._read = lru_cache(4096)(self._decode)

    def _decode(self, token: int) -> tuple[str, bytes | None]:
        """The text, and its bytes if they are known."""
        if self._tokenizer is None:
            return str(token), str(token).encode()
        if self._spelled is None or token in self._added:
            text = str(self._tokenizer.decode([token]))
            return text, None if REPLACEMENT in text else text.encode()
        raw = self._spelled(
            str(self._tokenizer.convert_ids_to_tokens(token) or "")
        )  # none: ids that only the model knows
        return raw.decode(errors="replace"), raw

    def in_objects(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """Log probabilities of a chat: ``{"content": [{token, logprob, bytes, top_logprobs}]}``."""
        content = [
            {**self._object(one.token_id, one.logprob), "top_logprobs": [self._object(*best) for best in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _object(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._read(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": None if raw is None else list(raw)}

    def in_lists(self, logprobs: Sequence[Logprob], begun: int) -> tuple[dict[str, Any], int]:
        """Lists of a completion, with null for a prompt's first token, whose log probability is NaN.

        ``begun``: characters of the answer's text that begin in the tokens before.

        Returns:
            The lists, and the characters that begin up to the last of these tokens.
        """
        offsets = []
        for one in logprobs:
            inside, begins = self._place(one.token_id)
            offsets.append(max(0, begun - inside))
            begun += begins
        told = {
            "tokens": [self._read(one.token_id)[0] for one in logprobs],
            "token_logprobs": [None if math.isnan(one.logprob) else _finite(one.logprob) for one in logprobs],
            "top_logprobs": [None if math.isnan(one.logprob) else self._best(one) for one in logprobs],
            "text_offset": offsets,
        }
        return told, begun

    def _place(self, token: int) -> tuple[bool, int]:
        """Whether a token begins inside of a character, and how many characters begin in it."""
        if token in self._hidden:  # not in the text
            return False, 0
        text, raw = self._read(token)
        if raw is None:
            return False, len(text)
        later = [byte & 0xC0 == 0x80 for byte in raw]  # bytes of UTF-8 that continue a character
        return later[:1] == [True], len(later) - sum(later)

    def _best(self, one: Logprob) -> dict[str, float]:
        """By text, with the drawn token; the likeliest of tokens with the same text."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self._read(token)[0], _finite(logprob))
        return found


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
