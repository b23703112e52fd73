"""The audit of one cache's texts: what full attention has found of their tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Of a token: KL divergence, total variation, 1 if the likeliest token is the same, its probability by full attention.
NUMBERS = 4


@dataclass
class Audited:
    """Numbers of audited tokens, on their device until someone asks.

    Attributes:
        parts: of each pass: rows and columns of the tokens, the tokens, their numbers ``[n, 4]``.
        by_full: tokens that full attention has drawn itself.
        returns: how often the text of a row went back. taken_back: tokens of sparse steps that were lost so.
    """

    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    by_full: int = 0
    returns: int = 0
    taken_back: int = 0

    def add(
        self, counts: Sequence[int], columns: Sequence[int], tokens: Tensor, numbers: Tensor, sparse: Tensor
    ) -> None:
        """The first ``counts`` of each row's ``tokens [batch, n]`` belong to the text.

        Args:
            columns: of each row's first one. numbers: ``[batch, n, 4]``.
            sparse: bool ``[batch, n]``, those that sparse steps have drawn; full attention has drawn the others.
        """
        n = tokens.shape[1]
        kept = torch.arange(n) < torch.tensor(counts)[:, None]  # on the host
        mine = sparse.cpu() & kept
        self.by_full += int(kept.sum() - mine.sum())
        row, at = mine.nonzero(as_tuple=True)
        there = row.to(tokens.device), at.to(tokens.device)
        self.parts.append((row, torch.tensor(columns)[row] + at, tokens[there], numbers[there]))
