"""Long documents that a user gives: text files of a directory, one file, or a column of a CSV file.

:mod:`.text` makes prompts from a text that every Python installation has.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_FIELD = 1 << 30  # bytes of a field; csv's own limit is 128 kB


@dataclass(frozen=True)
class Passages:
    """Beginnings of documents.

    Args:
        words: ids ``[n]`` of all of them, one after the other.
        starts: where each begins in ``words``.
        indices: which document each begins with, counted from 0.
    """

    words: Tensor
    starts: list[int]
    indices: list[int]


def read(path: Path, column: str | None = None) -> list[str]:
    """Different texts, in the order of file names or rows.

    Args:
        path: a ``.csv`` file with a header, any other text file, or a directory with ``.txt`` files.
        column: of the CSV file; ``None``: the one with the longest texts.

    Raises:
        ValueError: there is no text, or no such column.
        OSError: a file cannot be read.
    """
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(f"{path} has no .txt files: give a directory with some, a text file, or a .csv file")
    else:
        files = [path]
    is_csv = path.suffix.lower() == ".csv" and not path.is_dir()
    if column is not None and not is_csv:
        raise ValueError(f"a column ({column!r}) can only be that of a .csv file, and {path} is none")
    texts = _column(path, column) if is_csv else [_text(file) for file in files]
    found = list(dict.fromkeys(text for text in texts if text.strip()))
    if not found:
        raise ValueError(f"{path} holds no text")
    return found


def passages(tokenizer, texts: list[str], tokens: int, count: int, join: bool = False) -> Passages:
    """The first ``tokens`` ids of the first ``count`` texts that have as many; fewer if there are no more.

    Args:
        join: a text that is too short goes on with the next ones.

    Raises:
        ValueError: no text has as many.
    """
    found: list[Tensor] = []
    indices: list[int] = []
    longest = 0
    held: list[Tensor] = []  # the parts of a passage
    for index, text in enumerate(texts):
        if len(found) == count:
            break
        text = f"\n\n{text}" if held else text
        held.append(tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0])
        length = sum(map(len, held))
        longest = max(longest, length)
        if length < tokens and join:
            continue
        if length >= tokens:
            found.append(torch.cat(held)[:tokens])
            indices.append(index + 1 - len(held))
        held = []
    if not found:
        what = (
            f"{len(texts)} documents have {longest:,} tokens together"
            if join
            else (f"the longest of {len(texts)} documents has {longest:,} tokens")
        )
        more = "give longer ones" if join else "give longer ones, --join them"
        raise ValueError(f"{what}, and {tokens:,} are needed: {more}, or shorten --lengths or --tokens")
    return Passages(torch.cat(found), [i * tokens for i in range(len(found))], indices)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error


def _column(path: Path, column: str | None) -> list[str]:
    with _long_fields():
        try:
            rows = list(csv.DictReader(io.StringIO(_text(path), newline="")))
        except csv.Error as error:
            raise ValueError(f"{path} is no CSV file: {error}") from error
    names = [name for name in (rows[0] if rows else {}) if name]
    if not names:
        raise ValueError(f"{path} has no rows under a header")
    if column is None:
        column = max(names, key=lambda name: sum(len(row[name] or "") for row in rows))
    if column not in names:
        raise ValueError(f"{path} has no column {column!r}; it has {', '.join(names)}")
    return [row[column] or "" for row in rows]


@contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)
