"""Prompts as JSON lines: token ids, where the question begins, and how an answer is scored.

Peers read the file in environments without hf-sparsekv: this module imports the standard library alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SCORES = ("share", "any")


@dataclass(frozen=True)
class Prompt:
    """One line of the file.

    Args:
        task, index: which prompt.
        length: tokens that were asked for, answer included.
        ids: the prompt, chat template included. Every system gets exactly these.
        question: how many of the ids are context. The rest is the question and whatever follows it.
        references: right answers.
        score: ``"share"`` of the references in the output, or ``"any"``: 1 if one of them is there.
        max_new_tokens: room for the answer.
        stop: ids that end an answer beside the model's own.
    """

    task: str
    index: int
    length: int
    ids: tuple[int, ...]
    question: int
    references: tuple[str, ...]
    score: str
    max_new_tokens: int
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.question < len(self.ids):
            raise ValueError(f"{self.task} {self.index}: question={self.question} leaves no context or no question")
        if not self.references:
            raise ValueError(f"{self.task} {self.index}: there are no references, so nothing can be scored")
        if self.score not in SCORES:
            raise ValueError(f"{self.task} {self.index}: score {self.score!r} is none of {', '.join(SCORES)}")

    def scored(self, output: str) -> float:
        """From 0 to 1, whatever the case of letters. More output never lowers it."""
        low = output.lower()
        found = [reference.lower() in low for reference in self.references]
        return float(any(found)) if self.score == "any" else sum(found) / len(found)


def write(path: Path, prompts: Iterable[Prompt]) -> int:
    """Write a file; the number of its prompts."""
    lines = [json.dumps(dataclasses.asdict(prompt), ensure_ascii=False) for prompt in prompts]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


def fingerprint(path: Path) -> str:
    """Fingerprint of the whole file: rows with different ones must not be compared."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def read(path: Path, tasks: Iterable[str] = (), each: int | None = None) -> list[Prompt]:
    """Prompts of a file, in its order.

    Args:
        tasks: of these only; none: of all.
        each: so many of each task at most.

    Raises:
        ValueError: a line is no prompt, no prompt is left, or there is no such task.
    """
    found: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            held = json.loads(line)
            lists = {name: tuple(held[name]) for name in ("ids", "references", "stop")}
            found.append(Prompt(**{**held, **lists}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}, is no prompt: {error}. Write the file anew") from error
    there = dict.fromkeys(prompt.task for prompt in found)
    for task in tasks:
        if task not in there:
            raise ValueError(f"{path} has no task {task!r}; it has {', '.join(there) or 'none'}")
    wanted, count, left = set(tasks) or set(there), dict.fromkeys(there, 0), []
    for prompt in found:
        count[prompt.task] += 1
        if prompt.task in wanted and (each is None or count[prompt.task] <= each):
            left.append(prompt)
    if not left:
        raise ValueError(f"{path} has no prompts")
    return left
