"""Samples of generation tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Built = TypeVar("Built")


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
        items: ``(output, references)`` to what the answer gets right, part by part; ``None``: the score is one part.
    """

    task: str
    length: int
    index: int
    ids: tuple[int, ...]
    references: tuple[str, ...]
    max_new_tokens: int
    score: Callable[[str, tuple[str, ...]], float]
    stop: frozenset[int] = frozenset()
    items: Callable[[str, tuple[str, ...]], tuple[float, ...]] | None = None

    def parts(self, output: str) -> tuple[float, ...]:
        """Score of each part of an answer, from 0 to 1, so that two answers can be compared in parts."""
        return (
            (float(self.score(output, self.references)),) if self.items is None else self.items(output, self.references)
        )


def found(output: str, references: tuple[str, ...]) -> tuple[float, ...]:
    """For each reference 1 if the output contains it, whatever their case."""
    low = output.lower()
    return tuple(float(reference.lower() in low) for reference in references)


def found_share(output: str, references: tuple[str, ...]) -> float:
    """RULER's score: the share of references that the output contains, whatever their case."""
    return sum(found(output, references)) / len(references)


def exact(output: str, references: tuple[str, ...]) -> float:
    """1 if the output is the only reference."""
    return float(output.split() == references[0].split())


def found_any(output: str, references: tuple[str, ...]) -> float:
    """RULER's score of question answering: 1 if the output contains one of the references, whatever their case."""
    return max(found(output, references))


def largest(encode: Callable[[int], tuple[list[int], Built]], room: int) -> tuple[list[int], Built] | tuple[None, None]:
    """A prompt whose haystack fills the room, to a unit of average size or half a percent of the room.

    Tokens grow nearly in proportion to the haystack, so the next size to try follows from the last. The search takes
    two or three encodings of the whole length; halving an interval takes ten.

    Args:
        encode: from the haystack's size (0 and more) to a prompt's ids, and whatever belongs to it.
        room: tokens at most.

    Returns:
        what ``encode`` gave; ``(None, None)``: not even the smallest fits.
    """
    best = encode(0)
    first = len(best[0])
    if first > room:
        return None, None
    least, most, size = 0, math.inf, 8  # the largest size that fits, the smallest that does not
    while most - least > 1:
        made = encode(size)
        count = len(made[0])
        unit = max((count - first) / size, 1 / 64)  # tokens
        if count > room:
            most = size
        else:
            best, least = made, size
            if room - count < max(unit, room / 200):
                break
        step = size + math.floor((room - count) / unit)
        size = int(min(max(step, least + 1), most - 1, 32 * size))
    return best
