"""Which token comes next, in such a way that drafting changes no text: not a greedy one, and not a drawn one.

Apart from the loop because drafts and their verification choose alike, and neither knows which it is.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

# They remember the calls before, or call a function of the caller's; drafts are further calls.
_REMEMBER = (
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
        type(one).__module__.startswith("transformers.") and type(one).__name__ not in _REMEMBER for one in processors
    )


class Choice:
    """Chooses tokens from logits, as ``generate()``'s own loop does.

    ``torch.multinomial`` draws a token of probabilities ``p`` as ``argmax(p / e)``, with exponential noise ``e``. Here
    each token of the text has noise of its own, drawn in the order of that loop. Its draft and its verification share
    it. So the text is the one that the same seed gives without drafts, and similar probabilities choose the same token.
    (Rejection sampling gives the same distribution, but its text depends on how many tokens were drafted.)

    Args:
        processors: of the call.
        sample: whether tokens are drawn; otherwise the likeliest ones are taken.
    """

    def __init__(self, processors: LogitsProcessorList, sample: bool) -> None:
        self.sample = sample
        self.processors: Any = processors  # their annotations name kinds of tensors that no tensor has
        self._noise: deque[Tensor] = deque()  # of the next tokens, [batch, vocabulary] each

    def __call__(
        self, ids: Tensor, logits: Tensor, ahead: int = 0, rows: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The token after ``ids [batch, n]``, by ``logits [batch, vocabulary]`` in float32.

        Args:
            ahead: tokens of ``ids`` that :meth:`keep` does not know. rows: how many more of them each row has.

        Returns:
            Tokens ``[batch]``, and their processed logits.
        """
        scores = self.processors(ids, logits)
        if not self.sample:
            return scores.argmax(-1), scores
        shares = scores.softmax(-1)
        while len(self._noise) <= ahead + max(rows or (0,)):
            self._noise.append(shares.new_empty(shares.shape).exponential_())
        noise = self._noise[ahead]
        if rows is not None and any(rows):
            noise = torch.stack([self._noise[ahead + more][row] for row, more in enumerate(rows)])
        return (shares / noise).argmax(-1), scores

    def keep(self, tokens: int) -> None:
        """So many more tokens belong to the text."""
        for _ in range(min(tokens, len(self._noise))):
            self._noise.popleft()

    @property
    def ahead(self) -> bool:
        """Numbers were drawn for tokens that are still to come."""
        return bool(self._noise)
