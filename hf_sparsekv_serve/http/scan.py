"""Counts the parts of JSON before it is parsed, because parsing holds the interpreter lock and all streams wait.

``json.loads`` is one call of C that no other thread interrupts. A body of 16 MB takes 35 ms if it is one string, and
4.7 s if it is five million empty lists. The scan reads a body in pieces as they arrive. It uses NumPy, which releases
the lock while it computes. Methods of ``bytes`` keep the lock, and each operator of a decode step would wait for it.
The scan knows only strings and brackets; the parser decides whether a body is JSON.
"""

from __future__ import annotations

import numpy as np

from .errors import ApiError

PIECE = 1 << 16  # bytes that are looked at in one go
MAX_DEPTH = 64
MAX_NESTED = 20_000  # lists and objects
MAX_FIELDS = 50_000  # in all objects together
MAX_VALUES = 100_000  # besides one token id for each token of the context
MAX_TEXTS = 200_000  # names of fields count, too
MAX_ESCAPES = 500_000  # backslashes in texts
MAX_FRACTIONS = 10_000  # numbers with a fraction or an exponent; true and false count, too
MAX_DIGITS = 100  # digits of a number

_QUOTE, _BACKSLASH = b'"'[0], b"\\"[0]


class Scan:
    """The counts of one request: of its body, and of JSON in its strings.

    Args:
        tokens: of the context: a prompt may be a list of as many ids.
    """

    def __init__(self, tokens: int) -> None:
        self._most = {
            "lists and objects": MAX_NESTED,
            "fields": MAX_FIELDS,
            "values": MAX_VALUES + tokens,
            "texts": MAX_TEXTS,
            "escapes": MAX_ESCAPES,
            "numbers with a fraction": MAX_FRACTIONS,
        }
        self._counts: dict[str, float] = dict.fromkeys(self._most, 0)
        self._begin()

    def _begin(self) -> None:
        self._depth = 0
        self._inside = False  # a string
        self._escaped = False  # the next byte follows an odd number of backslashes
        self._digits = 0  # digits of a number at the end of the last piece

    def text(self, text: bytes) -> None:
        """Look at JSON of its own, beside what was looked at before.

        Raises:
            ApiError: as :meth:`feed`.
        """
        self._begin()
        for at in range(0, len(text), PIECE):
            self.feed(text[at : at + PIECE])

    def feed(self, piece: bytes) -> None:
        """Look at the next piece.

        Args:
            piece: :data:`PIECE` bytes at most, or it takes longer than a stream should wait.

        Raises:
            ApiError: there is more of something than a request needs.
        """
        if not piece:
            return
        given = np.frombuffer(piece, np.uint8)
        quotes = given == _QUOTE
        self._look_at_escapes(given, quotes)
        # Bytes outside of strings have an even number of quotes before them; a count of 8 bits keeps that.
        inside = np.add.accumulate(quotes, dtype=np.uint8)
        inside &= 1
        if self._inside:
            inside ^= 1
        self._inside = bool(inside[-1])
        self._count("texts", np.count_nonzero(quotes) / 2)
        if inside.all():
            self._digits = 0
            return
        outside = np.where(inside, 0, given)  # ends of strings are quotes still
        counts = {chr(byte): int(np.count_nonzero(outside == byte)) for byte in b",:[]{}.eE"}
        self._count("values", counts[","])
        self._count("fields", counts[":"])
        if counts["["] or counts["{"] or counts["]"] or counts["}"]:
            self._look_at_depth(outside)
        self._count("lists and objects", counts["["] + counts["{"])
        self._count("numbers with a fraction", counts["."] + counts["e"] + counts["E"])
        self._look_at_numbers(outside)

    def _look_at_escapes(self, given: np.ndarray, quotes: np.ndarray) -> None:
        """Take quotes that follow an odd number of backslashes out of ``quotes``."""
        if self._escaped:
            quotes[0] = False
        slashes = given == _BACKSLASH
        if not (count := np.count_nonzero(slashes)):
            self._escaped = False
            return
        self._count("escapes", count)
        if self._escaped:
            slashes[0] = False  # it is escaped itself, and escapes nothing
        at = np.arange(len(given))
        others = np.maximum.accumulate(np.where(slashes, -1, at))  # the last byte that is no backslash
        odd = (at - others) % 2 == 1  # backslashes that end here
        quotes[1:] &= ~odd[:-1]
        self._escaped = bool(odd[-1])

    def _look_at_depth(self, outside: np.ndarray) -> None:
        opens = (outside == ord("[")) | (outside == ord("{"))
        closes = (outside == ord("]")) | (outside == ord("}"))
        changes = opens.view(np.int8) - closes.view(np.int8)
        depth = np.add.accumulate(changes[changes != 0], dtype=np.int64) + self._depth
        deep, closed = depth > MAX_DEPTH, depth < 0
        if deep.any() and not closed[: deep.argmax()].any():
            raise _too_much(f"is nested too deeply: {MAX_DEPTH} levels are allowed")
        if closed.any():
            raise ApiError(400, "the body is not JSON: a bracket is closed that was not opened")
        self._depth = int(depth[-1]) if len(depth) else self._depth

    def _look_at_numbers(self, outside: np.ndarray) -> None:
        digits = outside - np.uint8(ord("0")) < 10  # others wrap around
        if not digits.any():
            self._digits = 0
            return
        (ends,) = np.nonzero(~digits)
        if not len(ends):
            self._digits += len(outside)
            longest = self._digits
        else:
            longest = max(self._digits + int(ends[0]), int(np.diff(ends).max(initial=1)) - 1)
            self._digits = len(outside) - 1 - int(ends[-1])
        if max(longest, self._digits) > MAX_DIGITS:
            raise _too_much(f"has a number of more than {MAX_DIGITS} digits")

    def _count(self, what: str, more: float) -> None:
        self._counts[what] += more
        if self._counts[what] > self._most[what]:
            raise _too_much(f"has more than {self._most[what]:,} {what}")


def _too_much(what: str) -> ApiError:
    return ApiError(400, f"the body {what}", code="body_too_complex")
