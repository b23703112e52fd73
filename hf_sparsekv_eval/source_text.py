"""An invented Python module (this project's own, Apache-2.0), with one constant and one function that are asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .invented import insert, words

_NOUNS = words(
    "harbor orchard ledger beacon quarry lantern stable saddle compass kettle anvil thicket parcel meadow pulley "
    "cistern turret barrel furrow gable"
)
_VERBS = words("collect merge sort filter count rank split weigh trim scan pair fold")
_TRAITS = words("width depth weight rating age price length level score height angle volume")
_LIMITS = words("TIMEOUT LIMIT OFFSET BUDGET CAPACITY INTERVAL THRESHOLD QUOTA")
_ARGUMENTS = words(
    "basket ripeness ladder tide anchor signal margin ballast wick shutter frost grain hinge spindle tariff plumb "
    "varnish stencil mortar gauge"
)
_BODIES = (
    "    chosen = [item for item in {noun}s if item.{trait} > {n}]\n"
    "    return sorted(chosen, key=lambda item: item.{trait})",
    "    total = 0\n    for item in {noun}s:\n        total += item.{trait} * {n}\n    return total",
    "    if not {noun}s:\n        return None\n    return max(item.{trait} for item in {noun}s) - {n}",
    "    groups = {{}}\n    for item in {noun}s:\n        groups.setdefault(item.{trait} // {n}, []).append(item)\n"
    "    return groups",
)


@dataclass(frozen=True)
class Module:
    """Its text; the constant and its value; the function and its keyword arguments."""

    text: str
    constant: str
    value: str
    function: str
    arguments: tuple[str, ...]


def module(rng: random.Random, size: int, depth: float, others: int) -> Module:
    """``size`` functions around the two definitions.

    Args:
        depth: of the definitions, 0 first, 1 last.
        others: constants and functions that are like those asked for in all but what matters.
    """
    names = [(noun, limit) for noun in _NOUNS for limit in _LIMITS]
    constants = rng.sample(names, 1 + others)
    values = rng.sample(range(1000, 10_000), 1 + others)
    callers = rng.sample([(verb, noun) for noun in _NOUNS for verb in _VERBS], 1 + others)
    arguments = rng.sample(_ARGUMENTS, 3 * (1 + others))

    def constant(i: int) -> str:
        return f"{constants[i][0]}_{constants[i][1]}".upper()

    def function(i: int) -> str:
        return f"{callers[i][0]}_{callers[i][1]}_entries"

    def define(i: int) -> str:
        own = arguments[3 * i : 3 * i + 3]
        return (
            f"def {function(i)}(entries, *, {', '.join(own)}):\n"
            f'    """{callers[i][0].capitalize()} the entries of the {callers[i][1]}."""\n'
            f"    return [entry for entry in entries if entry.{own[0]} < {own[1]} + {own[2]}]"
        )

    places = [(depth, f"{constant(0)} = {values[0]}"), (depth, define(0))]
    for i in range(1, 1 + others):
        places += [(rng.random(), f"{constant(i)} = {values[i]}"), (rng.random(), define(i))]
    text = "\n\n".join(insert([_filler(rng, i) for i in range(size)], places))
    return Module(text, constant(0), str(values[0]), function(0), tuple(arguments[:3]))


def _filler(rng: random.Random, index: int) -> str:
    verb, noun, trait = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_TRAITS)
    body = rng.choice(_BODIES).format(noun=noun, trait=trait, n=rng.randrange(2, 100))
    about = f'    """{verb.capitalize()} {noun}s by their {trait}."""'
    return f"def {verb}_{noun}s_{index}({noun}s):\n{about}\n{body}"
