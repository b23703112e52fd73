"""Text that comes in pieces, for readers that are generators: they yield where they need more of it.

A reader sees one sequence of characters, wherever pieces end. So its results do not depend on the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

SPACE = re.compile(r"\s*")
NAME = re.compile(r"[\w.:/-]*")  # names of tools and their arguments
LONGEST = 1024  # characters of a name


class Malformed(Exception):
    """The text is not what a form has here. It is given as text."""


class Source:
    """An answer's text, up to where it has come.

    Attributes:
        ended: nothing will be added.
    """

    def __init__(self) -> None:
        self.ended = False
        self._text, self._at = "", 0
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        """Add the next piece."""
        self._text, self._at = self._text[self._at :] + text, 0

    def keep(self, begun: str) -> None:
        """Keep what is read from now on, after ``begun``."""
        self._kept = [begun]

    def kept(self) -> str:
        """What was kept, once."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def _take(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _give_back(self, count: int) -> None:
        """Put the last characters back, so that what is taken does not depend on the pieces."""
        self._at -= count
        if self._kept is not None:
            self._kept[-1] = self._kept[-1][:-count]

    def _has(self, count: int) -> Steps[bool]:
        """Wait for so many characters; False: the text ends before."""
        while len(self._text) - self._at < count:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, which is not taken; empty at the end."""
        yield from self._has(1)
        return self._text[self._at : self._at + 1]

    def next(self, count: int = 1) -> Steps[str]:
        """Take so many characters.

        Raises:
            Malformed: the text ends before.
        """
        if not (yield from self._has(count)):
            raise Malformed
        return self._take(count)

    def comes(self, literal: str) -> Steps[bool]:
        """Whether ``literal`` comes next. Nothing is taken."""
        for count in range(1, len(literal) + 1):
            if not (yield from self._has(count)) or not self._text.startswith(literal[:count], self._at):
                return False
        return True

    def take(self, literal: str) -> Steps[bool]:
        """Take ``literal`` if it comes next. Nothing is taken otherwise."""
        if not (yield from self.comes(literal)):
            return False
        self._take(len(literal))
        return True

    def cut_off(self, literal: str) -> Steps[bool]:
        """Whether the text ends here, or within ``literal``, whose beginning is taken."""
        yield from self._has(len(literal))
        rest = self._text[self._at :]
        return self.ended and literal.startswith(rest) and self._take(len(rest)) == rest

    def expect(self, literal: str) -> Steps[None]:
        """Take ``literal``.

        Raises:
            Malformed: something else comes.
        """
        if not (yield from self.take(literal)):
            raise Malformed

    def some(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take the next characters of a class, as far as they have come; empty: none of them comes next."""
        yield from self._has(1)
        found = pattern.match(self._text, self._at)
        return self._take(found.end() - found.start()) if found else ""

    def all(self, pattern: re.Pattern[str], most: int | None = None) -> Steps[str]:
        """Take all characters of a class that come next.

        Raises:
            Malformed: there are more than ``most``.
        """
        parts, count = [], 0
        while part := (yield from self.some(pattern)):
            parts.append(part)
            count += len(part)
            if most is not None and count > most:
                self._give_back(count - most)
                raise Malformed
        return "".join(parts)

    def space(self) -> Steps[str]:
        """Take whitespace."""
        return (yield from self.all(SPACE))

    def name(self, until: str) -> Steps[str]:
        """Take a name, and the mark after it.

        Raises:
            Malformed: there is none, or something else follows.
        """
        name = yield from self.all(NAME, LONGEST)
        if not name:
            raise Malformed
        yield from self.expect(until)
        return name

    def until(self, marks: tuple[str, ...], emit: Callable[[str], object]) -> Steps[str | None]:
        """Pass text on as it comes, up to the first of some marks, of which none begins with another.

        Returns:
            the mark, which is taken and not passed on; None: the text has ended without one.
        """
        pattern, firsts, longest = _searched(marks)
        while True:
            found = pattern.search(self._text, self._at) if marks else None
            end = found.start() if found else len(self._text)
            if not found and not self.ended and marks:
                end = self._held_from(marks, firsts, longest)
            if end > self._at:
                emit(self._take(end - self._at))
            if found:
                return self._take(len(found.group()))
            if self.ended:
                return None
            yield

    def whole(self, marks: tuple[str, ...], most: int | None = None) -> Steps[tuple[str, str]]:
        """Take the text up to the first of some marks.

        Returns:
            the text, and the mark.

        Raises:
            Malformed: none of them comes, or only after more than ``most`` characters.
        """
        parts: list[str] = []
        count = 0

        def add(text: str) -> None:
            nonlocal count
            parts.append(text)
            count += len(text)
            if most is not None and count > most:
                self._give_back(count - most)
                raise Malformed

        mark = yield from self.until(marks, add)
        if mark is None:
            raise Malformed
        return "".join(parts), mark

    def _held_from(self, marks: tuple[str, ...], firsts: re.Pattern[str], longest: int) -> int:
        """Where the end of the text begins that may become a mark."""
        text = self._text
        at = max(self._at, len(text) - longest + 1)
        while found := firsts.search(text, at):
            at = found.start()
            if any(mark.startswith(text[at:]) for mark in marks):
                return at
            at += 1
        return len(text)


@lru_cache(256)
def _searched(marks: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """A pattern of the marks, one of their first characters, and the length of the longest."""
    firsts = "".join(sorted({re.escape(mark[0]) for mark in marks}))
    pattern = "|".join(map(re.escape, marks))
    return re.compile(pattern), re.compile(f"[{firsts}]" if firsts else r"(?!)"), max(map(len, marks), default=1)
