"""Tokens that end an answer: the model's own and those of a request, and which steps bar them (``min_tokens``).

:mod:`.drawn` draws tokens, and :mod:`.loop` ends answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .logit_edits import WORD
from .sampling import Sampling

KEPT = 64  # masks


class Ends:
    """The ends of all requests of an engine.

    Args:
        eos: tokens that end any answer.
        vocabulary: logits of a row.
    """

    def __init__(self, eos: Iterable[int], vocabulary: int) -> None:
        self.eos, self._vocabulary = frozenset(eos), vocabulary
        self._words = lru_cache(KEPT)(self._made)

    def ended_by(self, token: int, sampling: Sampling) -> bool:
        """Whether a token ends an answer with these settings."""
        return token in sampling.stop_token_ids or (token in self.eos and not sampling.ignore_eos)

    def barred(self, sampling: Sampling) -> Tensor:
        """The mask of a token that must not end an answer: int32 ``[words]`` on the host."""
        return self._words(tuple(sorted(self.eos | {*sampling.stop_token_ids})))

    def _made(self, tokens: tuple[int, ...]) -> Tensor:
        """All tokens but these."""
        words = np.full(-(-self._vocabulary // WORD), 0xFFFFFFFF, dtype=np.uint32)
        for token in tokens:
            if token < self._vocabulary:
                words[token // WORD] &= ~np.uint32(1 << token % WORD)
        return torch.from_numpy(words.view(np.int32))
