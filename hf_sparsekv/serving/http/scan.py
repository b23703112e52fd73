"""Counts what JSON consists of before it is parsed: parsing holds the interpreter, and all streams wait for it.

``json.loads`` is one call of C that no other thread interrupts. A body of 16 MB takes 35 ms if it is one text, and
4.7 s if it is five million empty lists. The scan looks at a body in pieces, as they come, and each piece takes a few
milliseconds at most. It knows strings and brackets alone: whether a body is JSON, the parser says.
"""

from __future__ import annotations

from .errors import ApiError

PIECE = 1 << 16  # bytes that are looked at in one go
MAX_DEPTH = 64
MAX_NESTED = 20_000  # lists and objects
MAX_FIELDS = 50_000  # of all objects together
MAX_VALUES = 100_000  # beside as many token ids as the context has
MAX_TEXTS = 200_000  # names of fields count, too
MAX_ESCAPES = 500_000  # backslashes in texts
MAX_FRACTIONS = 10_000  # numbers with a fraction or an exponent; true and false count, too
MAX_DIGITS = 100  # of a number

_OTHERS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_DIGITS_AS_0 = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))
_LONG = b"0" * (MAX_DIGITS + 1)


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
        self._escaped = False  # the next byte follows a backslash
        self._digits = b""  # that the last piece ends with

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
        if self._escaped:
            piece = piece[1:]
        self._escaped = False
        if backslashes := piece.count(b"\\"):
            self._count("escapes", backslashes)
            self._escaped = bool((len(piece) - len(piece.rstrip(b"\\"))) % 2)
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b'"'.join(parts[self._inside :: 2])
        began_inside, self._inside = self._inside, self._inside != (len(parts) % 2 == 0)
        self._look_at_depth(outside)
        self._count("values", outside.count(b","))
        self._count("texts", (len(parts) - 1) / 2)
        self._count("fields", outside.count(b":"))
        self._count("lists and objects", outside.count(b"[") + outside.count(b"{"))
        self._count("numbers with a fraction", sum(map(outside.count, (b".", b"e", b"E"))))
        self._look_at_numbers(outside, began_inside)

    def _look_at_depth(self, outside: bytes) -> None:
        for bracket in outside.translate(None, _OTHERS):
            self._depth += 1 if bracket in b"[{" else -1
            if self._depth > MAX_DEPTH:
                raise _too_much(f"is nested too deeply: {MAX_DEPTH} levels are allowed")
            if self._depth < 0:
                raise ApiError(400, "the body is not JSON: a bracket is closed that was not opened")

    def _look_at_numbers(self, outside: bytes, began_inside: bool) -> None:
        digits = (b"" if began_inside else self._digits) + outside.translate(_DIGITS_AS_0)
        if _LONG in digits:
            raise _too_much(f"has a number of more than {MAX_DIGITS} digits")
        self._digits = b"" if self._inside else digits[len(digits.rstrip(b"0")) :]

    def _count(self, what: str, more: float) -> None:
        self._counts[what] += more
        if self._counts[what] > self._most[what]:
            raise _too_much(f"has more than {self._most[what]:,} {what}")


def _too_much(what: str) -> ApiError:
    return ApiError(400, f"the body {what}", code="body_too_complex")
