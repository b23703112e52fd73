"""Names of options that are wrong, and the right ones that they resemble.

Apart from the configurations because the command line, cache specifications and benchmarks name their choices alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields


def guess(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the one of ``known`` that a wrong name resembles; empty if none does."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_names(config: type, names: Iterable[str]) -> None:
    """Raise TypeError for the first name that is no field of a dataclass, with the one that it resembles."""
    known = [field.name for field in fields(config)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(known)}"
            raise TypeError(f"{config.__name__} got an unexpected keyword argument {name!r}: {hint}")


class Options:
    """Base of the configurations: an option that there is not raises TypeError, which names the nearest that there is.

    (A dataclass's own error names none.)
    """

    def __new__(cls, *args: object, **given: object) -> Options:
        check_names(cls, given)
        return super().__new__(cls)
