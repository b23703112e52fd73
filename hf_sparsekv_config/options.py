"""Types of options with their bounds and choices, and the checks and sentences that follow from them.

A field of a configuration is declared once, as ``sinks: Count = 4``. Its type is checked when a configuration is made,
and the command line makes an option of it. The docstring of its class describes it for both.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

DIGITS = 80  # of an integer that an error quotes, and of a name that is compared with others


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def guess(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the one of ``known`` that a wrong name resembles; empty if none does."""
    near = [] if len(name) > DIGITS else difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


_QUOTED = reprlib.Repr()
_QUOTED.maxstring = _QUOTED.maxother = 80
_QUOTED.maxlevel = 2


def shown(value: object) -> str:
    """A value as an error quotes it: briefly, whatever its size."""
    if isinstance(value, int) and abs(value) >= 10**DIGITS:  # converting it takes quadratic time, or fails
        return f"an integer of more than {DIGITS} digits"
    return _QUOTED.repr(value)


# ---------------------------------------------------------------------- types


@dataclass(frozen=True)
class Number:
    """Bounds of an ``int`` or ``float``, as the second argument of ``Annotated``.

    Args:
        low: the least value; with ``above`` the value must be greater.
        high: the largest value; with ``below`` the value must be smaller.
        unit: what the number counts, for messages.
        infinite: infinity is allowed.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    unit: str = ""
    infinite: bool = False

    def holds(self, value: float) -> bool:
        finite = self.infinite or is_int(value) or math.isfinite(value)
        least = value > self.low if self.above else value >= self.low
        return finite and least and (value < self.high if self.below else value <= self.high)

    def words(self, kind: type) -> str:
        """The numbers within the bounds, as a message names them."""
        noun = "an integer" if kind is int else "a number"
        unit = f" ({self.unit})" if self.unit else ""
        if self.high < math.inf:
            low, high = (f"{end:g}" if isinstance(end, float) else end for end in (self.low, self.high))
            return f"{noun} in {'(' if self.above else '['}{low}, {high}{')' if self.below else ']'}{unit}"
        if kind is int and self.low == 1:
            return f"a positive integer{unit}"
        return f"{noun} {'>' if self.above else '>='} {self.low}{unit}" if self.low > -math.inf else f"{noun}{unit}"


Positive = Annotated[int, Number(1)]
Count = Annotated[int, Number(0)]
Share = Annotated[float, Number(0, 1, above=True)]


@dataclass(frozen=True)
class Alternative:
    """One of the types in a union, with its bounds."""

    kind: Any
    bounds: Number | None = None
    choices: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        if self.choices:
            # Enumerations and numpy's text are of a subclass. True, which is one of int, is no 1.
            return not isinstance(value, bool) and any(
                isinstance(value, type(one)) and value == one for one in self.choices
            )
        if self.kind in (int, float):
            ok = is_int(value) or (self.kind is float and isinstance(value, float) and not math.isnan(value))
            return ok and (self.bounds or Number(infinite=True)).holds(value)
        if self.kind is Callable:
            return callable(value)
        return isinstance(value, self.kind) if isinstance(self.kind, type) else True

    @property
    def words(self) -> list[str]:
        """The values, as a message names them."""
        if self.choices:
            return [repr(one) for one in self.choices]
        if self.kind in (int, float):
            return [(self.bounds or Number()).words(self.kind)]
        named = {bool: ["True", "False"], NoneType: ["None"], str: ["text"], PathLike: ["a path"]}
        return ["a function"] if self.kind is Callable else named.get(self.kind) or [f"a {self.kind.__name__}"]


def alternatives(hint: Any) -> list[Alternative]:
    """The types that an annotation allows; ``Annotated`` may name bounds or, as ``Literal``, the choices."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [one for part in args for one in alternatives(part)]
    if origin is Annotated:
        if isinstance(args[1], Number):
            return [replace(one, bounds=args[1]) for one in alternatives(args[0])]
        return alternatives(args[1] if get_origin(args[1]) in (Literal, Union, UnionType) else args[0])
    if origin is Literal:
        return [Alternative(type(args[0]), choices=args)]
    return [Alternative(NoneType if hint is None else origin or hint)]


@functools.cache
def declared(config: type) -> dict[str, list[Alternative]]:
    """The types of a configuration's fields; without those of a class that names types only for a type checker."""
    for kind in config.__mro__:
        with suppress(NameError):
            hints = get_type_hints(kind, include_extras=True)
            return {one.name: alternatives(hints[one.name]) for one in fields(config) if one.name in hints}
    return {}


# ---------------------------------------------------------------------- checks


def check(config: Any) -> None:
    """Raise ValueError for a field whose value is not of its type, or out of its bounds."""
    for name, types in declared(config.__class__).items():
        check_value(name, getattr(config, name), types)


def check_value(name: str, value: object, types: list[Alternative]) -> None:
    """Raise ValueError, with the name of the option, for a value that is of none of the types."""
    if any(one.holds(value) for one in types):
        return
    words = [word for one in types for word in one.words]
    told = f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]
    known = [choice for one in types for choice in one.choices if isinstance(choice, str)]
    hint = guess(value, known) if isinstance(value, str) else ""
    raise ValueError(f"{name} must be {told}{hint}, got {shown(value)}")


def check_names(config: type, names: Iterable[str]) -> None:
    """Raise TypeError for the first name that is no field of a dataclass, with the one that it resembles."""
    known = [field.name for field in fields(config)]
    for name in names:
        if name not in known:
            hint = guess(name, known).strip(" ()") or f"its options are {', '.join(known)}"
            raise TypeError(f"{config.__name__} got an unexpected keyword argument {name!r}: {hint}")


class Options:
    """Base of the configurations, frozen dataclasses that check the names and the values of their options."""

    def __new__(cls, *args: object, **given: object) -> Options:
        check_names(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check(self)


def described(config: type, name: str) -> str:
    """Help of a field, from the docstring of a class or a base class: the first sentence, and the meaning of None."""
    for kind in config.__mro__:
        entry = re.search(
            rf"^( +)(?:\w+, )*{name}(?:, \w+)*: (.*?)(?=\n\1\S|\n\n|\Z)", inspect.getdoc(kind) or "", re.M | re.S
        )
        if entry:
            text = " ".join(entry[2].split())
            first = re.match(r".+?[^\s.]\.(?=\s|$)", text)
            without = re.search(r"\bNone`*(?: means|:) (.+?[^\s.]\.)(?=\s|$)", text)
            said = first[0] if first else text
            return said[0].upper() + said[1:] + (f" Default: {without[1]}" if without else "")
    return ""
