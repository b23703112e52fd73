"""Options that earlier releases had, and what takes their place.

A configuration, the command line and a cache specification refuse such an option by name. A saved cache still loads if
the option had a value that stands for what happens now.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Removed:
    """An option that is gone.

    Args:
        instead: what to do instead, as it follows a colon.
        same: values that stand for what happens now: a file that was saved with one of them loads. None: any value.
        stored: what a saved cache holds depends on it, so another configuration cannot stand in for it.
    """

    instead: str
    same: tuple | None = None
    stored: bool = False

    def means_now(self, value: object) -> bool:
        """Whether a saved cache with this value behaves now as it did then."""
        return self.same is None or value in self.same


# By the name of the class.
REMOVED: dict[str, dict[str, Removed]] = {
    "ProgressiveConfig": {
        "execution": Removed(
            "leave it out. The GPU ends each walk by itself, as with execution='device', which was quicker than "
            "execution='host' at every length",
            ("auto", "device"),
        ),
        "micro_batch": Removed("leave it out. Only execution='host' had it, which is gone"),
        **{
            name: Removed(f"{instead}. Tokens are chosen by labels, which such a file does not hold", (), stored=True)
            for name, instead in {
                "metadata": "leave it out: of the estimates that go by boxes around blocks, 'scores' and 'as_min' have "
                "ArkVale's (what metadata='cuboid_mean' was), 'bound' has Quest's ('min_max')",
                "bound_tokens": "leave it out: labels tell every token apart",
                "block_reduce": "leave it out: group_reduce says how query heads share a selection",
                "min_blocks": "give min_tokens",
                "max_blocks": "give max_tokens",
            }.items()
        },
    },
    "PredictiveConfig": {
        "scoring": Removed(
            "leave it out. Tokens are scored by their labels, as with scoring='labels'; label_bits=16 and more "
            "label_channels take more of a key into the score, up to all of it",
            ("labels",),
            stored=True,
        ),
    },
}


def removed(config: type) -> dict[str, Removed]:
    """Options that this configuration once had, those of its bases included."""
    return {name: gone for base in config.__mro__ for name, gone in REMOVED.get(base.__name__, {}).items()}


def refuse(config: type, names: Iterable[str]) -> None:
    """Raise ValueError for the first name of an option that is gone."""
    gone = removed(config)
    for name in names:
        if name in gone:
            raise ValueError(f"{config.__name__} no longer has {name}: {gone[name].instead}")


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
    """Base of the configurations: an option that is gone raises ValueError, which says what to do instead.

    One that never was raises TypeError, which names the nearest that there is.
    """

    def __new__(cls, *args: object, **given: object) -> Options:
        refuse(cls, given)
        check_names(cls, given)
        return super().__new__(cls)
