"""Which token comes next, in such a way that drafting changes no text: not a greedy one, and not a drawn one.

Drafts and their verification choose alike.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..random_state import random_state, set_random_state

# They remember the calls before, or call a function of the caller's; drafts are further calls. The first one hides the
# NaN by which a verification is known that a draft has spoilt.
_CANNOT_TRY = (
    "InfNanRemoveLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "WhisperNoSpeechDetection",
    "DiaEOSDelayPatternLogitsProcessor",
)


def can_try(processors: LogitsProcessorList) -> bool:
    """Whether the processors may be called for tokens that are taken back: those of transformers that keep nothing."""
    return all(
        type(one).__module__.startswith("transformers.") and type(one).__name__ not in _CANNOT_TRY for one in processors
    )


class Chosen(NamedTuple):
    """The tokens after some texts.

    Args:
        tokens: int64 ``[batch]``.
        scores: processed logits ``[batch, vocabulary]``.
        weights: of the tokens, ``[batch]``: scores, or probabilities where they were drawn. NaN where the logits are no
            distribution.
    """

    tokens: Tensor
    scores: Tensor
    weights: Tensor


class Choice:
    """Chooses tokens from logits, as ``generate()``'s own loop does.

    ``torch.multinomial`` draws a token of probabilities ``p`` as ``argmax(p / e)``, with exponential noise ``e``. Here
    each token of the text has noise of its own, drawn in the order of that loop. Its draft and its verification share
    it. So the text is the one that the same seed gives without drafts, and similar probabilities choose the same token.
    (Rejection sampling gives the same distribution, but its text depends on how many tokens were drafted.)

    Noise is drawn ahead, and some of it is not needed in the end: :meth:`rewind` leaves the generator where that loop
    would.

    Args:
        processors: of the call.
        sample: whether tokens are drawn; otherwise the likeliest ones are taken.
    """

    def __init__(self, processors: LogitsProcessorList, sample: bool) -> None:
        self.sample = sample
        self.processors: Any = processors  # their annotations name kinds of tensors that no tensor has
        self._noise: deque[Tensor] = deque()  # of the next tokens, [batch, vocabulary] each
        self._states: deque[tuple[torch.device, Tensor]] = deque()  # of the generator before each of these

    def __call__(self, ids: Tensor, logits: Tensor, ahead: int = 0, rows: list[int] | None = None) -> Chosen:
        """The token after ``ids [batch, n]``, by ``logits [batch, vocabulary]`` in float32.

        Args:
            ahead: tokens of ``ids`` that :meth:`keep` does not know. rows: how many more of them each row has.
        """
        scores = self.processors(ids, logits)
        if not self.sample:
            return _weighed(scores.argmax(-1), scores, scores)
        shares = scores.softmax(-1)
        while len(self._noise) <= ahead + max(rows or (0,)):
            self._states.append((shares.device, random_state(shares.device)))  # first: an interrupt may follow
            self._noise.append(shares.new_empty(shares.shape).exponential_())
        noise = self._noise[ahead]
        if rows is not None and any(rows):
            noise = torch.stack([self._noise[ahead + more][row] for row, more in enumerate(rows)])
        return _weighed((shares / noise).argmax(-1), scores, shares)

    def keep(self, tokens: int) -> None:
        """So many more tokens belong to the text."""
        for _ in range(min(tokens, len(self._noise))):
            self._noise.popleft()
            self._states.popleft()

    def rewind(self) -> None:
        """Leave the generator as if noise had been drawn for the tokens of the text alone."""
        if self._states:
            set_random_state(*self._states[0])
        self._noise.clear()
        self._states.clear()

    def refuse(self) -> NoReturn:
        """Raise what ``torch.multinomial`` raises for logits that are no distribution."""
        torch.multinomial(torch.full((1,), torch.nan), 1)
        raise AssertionError("torch.multinomial() has drawn from NaN")


def _weighed(tokens: Tensor, scores: Tensor, weights: Tensor) -> Chosen:
    return Chosen(tokens, scores, weights.gather(-1, tokens[:, None])[:, 0])
