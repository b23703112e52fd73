"""Log probabilities of a prompt's own tokens, taken from the forward passes that read it.

A pass over a few tokens gives logits of all of them, where other prompts need those of the last one alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .request import Logprob

LOGITS = 1 << 26  # of a pass: 128 MiB in 16 bits
LEAST = 16  # tokens of a pass, whatever the vocabulary
AT_ONCE = 64  # tokens whose logits are float32 at a time
MOST = 1 << 17  # log probabilities of a prompt that the host keeps


class PromptLogprobs:
    """Collects them for one prompt.

    Args:
        ids: ``[1, n]``, the prompt.
        likeliest: further tokens of each place.
    """

    def __init__(self, ids: Tensor, likeliest: int) -> None:
        self._ids, self._likeliest = ids[0], likeliest
        self._found: list[tuple[Tensor, Tensor]] = []

    def add(self, past: int, logits: Tensor) -> None:
        """Take the logits ``[t, vocabulary]`` of the tokens after the first ``past``."""
        targets = self._ids[past + 1 : past + 1 + len(logits)]  # the last token has no next one
        for some, target in zip(logits[: len(targets)].split(AT_ONCE), targets.split(AT_ONCE)):
            found = some.float().log_softmax(-1)
            best = found.topk(min(self._likeliest, found.shape[-1]))
            values = torch.cat([found.gather(1, target[:, None]), best.values], 1)
            self._found.append((values, best.indices))

    def told(self) -> list[Logprob]:
        """Those of all tokens but the first. Waits for the device."""
        values = [row for some, _ in self._found for row in some.tolist()]
        best = [row for _, some in self._found for row in some.tolist()]
        return [
            Logprob(token, drawn, tuple(zip(ids, likeliest)))
            for token, (drawn, *likeliest), ids in zip(self._ids[1:].tolist(), values, best)
        ]


def longest_pass(chunk: int, vocabulary: int) -> int:
    """Most tokens of a pass whose logits are all kept; ``chunk``: of other passes."""
    return min(chunk, max(LEAST, LOGITS // vocabulary))
