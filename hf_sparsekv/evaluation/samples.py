"""What a generation task is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A prompt and what its answer is measured by.

    Args:
        task, length, index: which sample; ``length`` is what was asked for, in tokens.
        ids: the prompt.
        references: right answers.
        max_new_tokens: room for the answer.
        score: ``(output, references)`` to a number from 0 to 1.
        stop: ids that end an answer beside the model's own.
    """

    task: str
    length: int
    index: int
    ids: tuple[int, ...]
    references: tuple[str, ...]
    max_new_tokens: int
    score: Callable[[str, tuple[str, ...]], float]
    stop: frozenset[int] = frozenset()


def found_share(output: str, references: tuple[str, ...]) -> float:
    """RULER's score: the share of references that the output contains, whatever their case."""
    low = output.lower()
    return sum(reference.lower() in low for reference in references) / len(references)


def exact(output: str, references: tuple[str, ...]) -> float:
    """1 if the output is the only reference."""
    return float(output.split() == references[0].split())
