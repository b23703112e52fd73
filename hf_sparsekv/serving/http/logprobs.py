"""Log probabilities as OpenAI's two APIs show them: a list of objects for chats, lists side by side for completions.

Apart from :mod:`.shapes`, which knows answers and not the text of single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..request import Logprob
from ..text import REPLACEMENT

LOWEST = -9999.0  # for tokens that cannot come: JSON has no infinity


class TokenTexts:
    """The text of each token by itself.

    Args:
        tokenizer: None: tokens are shown by their numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._text = lru_cache(4096)(self._decode)

    def _decode(self, token: int) -> str:
        return str(token) if self._tokenizer is None else str(self._tokenizer.decode([token]))

    def in_objects(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """Of a chat: ``{"content": [{token, logprob, bytes, top_logprobs}]}``."""
        content = [
            {**self._object(one.token_id, one.logprob), "top_logprobs": [self._object(*best) for best in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _object(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # Part of a character has no text of its own, and its bytes are the tokenizer's secret.
        raw = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}

    def in_lists(self, logprobs: Sequence[Logprob], offset: int) -> dict[str, Any]:
        """Of a completion; ``offset``: characters of the tokens before."""
        texts = [self._text(one.token_id) for one in logprobs]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [self._best(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _best(self, one: Logprob) -> dict[str, float]:
        """By text; the drawn token is among them. Of tokens with the same text the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self._text(token), _finite(logprob))
        return found


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
