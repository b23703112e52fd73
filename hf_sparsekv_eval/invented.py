"""Invented names and text for tasks: nothing of it is in any training data, and it is this project's own (Apache-2.0).

The same random generator gives the same text on every machine and Python version.
"""

from __future__ import annotations

import random


def words(text: str, sign: str | None = None) -> tuple[str, ...]:
    """A list of words, or of what stands between signs."""
    return tuple(text.split(sign))


FIRST = words(
    "Ilse Anton Marta Piet Runa Tomas Greta Osric Lena Falk Edda Bruno Selma Ivar Hedda Casper Nora Emil Tilda Jorin "
    "Alma Viggo Dagny Rolf Minna Stellan Ragna Otto Sunniva Klaas"
)
LAST = words(
    "Varga Brook Veld Lindqvist Harrow Castell Mornay Thackeray Oduya Pell Sorensen Quill Ashdown Berisha Kestrel "
    "Dunmore Falconer Grieve Holloway Ibsen Jardine Kowal Larkin Marsh Nadler Orsini Penhale Rusk Stroud Tolland"
)
_TOWN = (
    words("Bren Alder Stone Fern Grey Hollow Kings Lark Marl Nether Oaken Pike Quarry Raven Silver Thorn Under Wester"),
    words("moor ford haven wick bridge field mouth stead cliff hurst dale gate"),
)
THINGS = words("copper iron silver brass crooked painted jagged hollow bent spotless blackened twisted narrow heavy")
PLACES = words(
    "boathouse,granary,observatory,chapel,archive,tannery,glasshouse,toll house,print shop,cooperage,ropewalk,"
    "ice cellar,sawmill,weaving shed,clock tower,apothecary",
    ",",
)
_WHO = words(
    "The miller,A carter,The schoolmistress,An old fisherman,The baker's apprentice,A travelling tinker,The warden", ","
)
_DID = (
    "mended the roof of the barn",
    "counted the sheep twice and found none missing",
    "spoke about the price of barley",
    "walked along the canal with a lantern",
    "carried a basket of plums across the square",
    "waited for the mail coach",
    "painted the shutters green again",
    "complained about the noise of the geese",
    "planted a row of young pear trees",
    "swept the steps of the market hall",
    "told a story that everybody knew already",
    "sharpened the scythes for the second mowing",
)
_WHEN = (
    "before the bells rang",
    "while the fog still lay on the meadows",
    "after a long and quiet dinner",
    "as the first swallows returned",
    "on the day of the horse fair",
    "although rain had been expected",
    "because nobody else was willing to",
    "when the river had fallen again",
    "in the week after the harvest",
    "without saying a word to anyone",
)
_THEN = (
    "",
    " The rest of the day passed without news.",
    " Nobody thought much of it.",
    " It was noted in the parish book.",
    " Some were pleased, and some were not.",
)


class Names:
    """Names that are drawn once each."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._left: dict[str, list[str]] = {}

    def draw(self, kind: str) -> str:
        """One more ``"person"``, ``"town"``, ``"thing"``, ``"place"`` or ``"number"`` (of five digits)."""
        if kind not in self._left:
            all_of = {
                "person": [f"{first} {last}" for first in FIRST for last in LAST],
                "town": [first + last for first in _TOWN[0] for last in _TOWN[1]],
                "thing": list(THINGS),
                "place": list(PLACES),
            }
            numbers = self.rng.sample(range(10_000, 100_000), 400) if kind == "number" else ()
            self._left[kind] = [str(n) for n in numbers] or all_of[kind]
            self.rng.shuffle(self._left[kind])
        return self._left[kind].pop()


def chronicle(rng: random.Random, size: int) -> list[str]:
    """``size`` sentences or pairs of them about nothing in particular."""
    return [f"{rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHEN)}.{rng.choice(_THEN)}" for _ in range(size)]


def spread(rng: random.Random, filler: list[str], facts: list[str], others: list[str]) -> list[str]:
    """Facts all over the filler: the i-th somewhere in the i-th of as many equal parts; the others anywhere."""
    places = [(rng.random(), other) for other in others]
    places += [((i + rng.random()) / len(facts), fact) for i, fact in enumerate(facts)]
    return insert(filler, places)


def insert(filler: list[str], places: list[tuple[float, str]]) -> list[str]:
    """Texts at depths (0 first, 1 last) of the filler."""
    out, at = [], 0
    for depth, text in sorted(places):
        place = min(int(depth * (len(filler) + 1)), len(filler))
        out += [*filler[at:place], text]
        at = place
    return [*out, *filler[at:]]
