"""Checks of options: each function raises ``ValueError`` with the option's name and its value.

Apart from the configurations because each method has its own in another file, and all use these checks.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from .option_names import guess


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def positive(name: str, value: object) -> None:
    require(is_int(value) and value > 0, f"{name} must be a positive integer, got {value!r}")


def not_negative(name: str, value: object) -> None:
    require(is_int(value) and value >= 0, f"{name} must be an integer >= 0, got {value!r}")


def power_of_two(name: str, value: Any) -> None:
    positive(name, value)
    require(value & (value - 1) == 0, f"{name} must be a power of two, got {value}")


def flag(name: str, value: object) -> None:
    require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")


def flag_or_none(name: str, value: object) -> None:
    require(value is None or isinstance(value, bool), f"{name} must be True, False or None, got {value!r}")


def one_of(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    hint = guess(value, filter(None, choices)) if isinstance(value, str) else ""
    require(value in choices, f"{name} must be one of {', '.join(map(repr, choices))}{hint}, got {value!r}")


def share(name: str, value: object) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    require(ok, f"{name} must lie in (0, 1], got {value!r}")
