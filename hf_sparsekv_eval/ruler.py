"""RULER's synthetic tasks for any tokenizer and length, made offline (Hsieh et al. 2024, arXiv 2404.06654, section 3).

Families, numbers of needles, keys, hops and repetitions, and scores are the paper's. Sentences and haystack are this
project's: essays and words come from Python's language reference, which is repeated for longer prompts. So scores
compare caches with each other, but not with published results. Question answering (SQuAD, HotpotQA) is left out,
because its data is not included. LongBench has both kinds.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from .samples import Sample, found, found_share, largest
from .text import python_reference


@dataclass(frozen=True)
class Needles:
    """A retrieval task (paper, table 2).

    Args:
        haystack: ``"noise"`` (four sentences over and over), ``"essay"`` or ``"needles"`` (nothing but other facts).
        keys: kind of the keys, ``"word"`` or ``"uuid"``; ``values``: ``"number"`` or ``"uuid"``.
        facts: keys that have a value; ``per_key``: values of each; ``asked``: keys of the question.
    """

    haystack: str = "essay"
    keys: str = "word"
    values: str = "number"
    facts: int = 1
    per_key: int = 1
    asked: int = 1


NEEDLES = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(),
    "niah_single_3": Needles(values="uuid"),
    "niah_multikey_1": Needles(facts=4),
    "niah_multikey_2": Needles(haystack="needles"),
    "niah_multikey_3": Needles(haystack="needles", keys="uuid", values="uuid"),
    "niah_multivalue": Needles(per_key=4),
    "niah_multiquery": Needles(facts=4, asked=4),
}
ANSWER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}
FAMILIES = (*NEEDLES, "vt", "cwe", "fwe")
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS, COMMON, TIMES_COMMON, TIMES_RARE, ZETA = 4, 10, 30, 3, 2.0


@lru_cache(maxsize=1)
def _sentences() -> tuple[str, ...]:
    text = " ".join(python_reference().split())
    return tuple(re.split(r"(?<=[.!?]) ", text))


@lru_cache(maxsize=1)
def _words() -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,10}\b", python_reference()))))


def make_sample(
    tokenizer, family: str, length: int, index: int, seed: int = 0, chat: bool = False, answer_tokens: int | None = None
) -> Sample:
    """One prompt of at most ``length`` tokens, its answer included.

    Args:
        family: one of :data:`FAMILIES`.
        chat: put it into the tokenizer's chat template.
        answer_tokens: room for the answer; ``None``: the paper's.

    Raises:
        ValueError: no such family, or ``length`` has no room for the task.
    """
    if family not in FAMILIES:
        raise ValueError(f"RULER has no family {family!r} here; there are {', '.join(FAMILIES)}")
    room = answer_tokens or ANSWER_TOKENS[family.split("_")[0]]
    build = _builder(family)

    def encode(size: int) -> tuple[list[int], tuple[str, ...]]:
        question, lead, references = build(random.Random(f"{family}-{length}-{index}-{seed}"), size)
        if chat:
            turn = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + lead
        else:
            text = f"{question} {lead}"
        return tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"], references

    ids, references = largest(encode, length - room)
    if ids is None:
        raise ValueError(f"{family} does not fit into {length} tokens (with {room} for the answer): give more")
    return Sample(family, length, index, tuple(ids), references, room, found_share, items=found)


def _builder(family: str) -> Callable[[random.Random, int], tuple[str, str, tuple[str, ...]]]:
    """``(random, haystack size)`` to the question, the words that the answer begins with, and the references."""
    if family in NEEDLES:
        return lambda rng, size: _niah(NEEDLES[family], rng, size)
    return {"vt": _variables, "cwe": _common_words, "fwe": _frequent_words}[family]


def _unit(kind: str, rng: random.Random) -> str:
    if kind == "number":
        return str(rng.randrange(1_000_000, 10_000_000))
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return "-".join(rng.sample(_words(), 2))


def _spread(rng: random.Random, hay: list[str], needles: list[str]) -> str:
    """Needles at random places of the haystack, in random order."""
    places = sorted(rng.randrange(len(hay) + 1) for _ in needles)
    out, at = [], 0
    for place, needle in zip(places, needles):
        out += [*hay[at:place], needle]
        at = place
    return " ".join([*out, *hay[at:]])


def _essay(rng: random.Random, size: int) -> list[str]:
    sentences = _sentences()
    start = rng.randrange(len(sentences))
    return [sentences[(start + i) % len(sentences)] for i in range(size)]


def _niah(task: Needles, rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
    facts = {}
    while len(facts) < task.facts:
        facts[_unit(task.keys, rng)] = [_unit(task.values, rng) for _ in range(task.per_key)]
    asked = rng.sample(list(facts), task.asked)
    kind = "number" if task.values == "number" else "uuid"

    def say(key: str, value: str) -> str:
        return f"The special magic {kind} for {key} is: {value}."

    needles = [say(key, value) for key, values in facts.items() for value in values]
    rng.shuffle(needles)
    if task.haystack == "noise":
        hay = [_NOISE] * size
    elif task.haystack == "essay":
        hay = _essay(rng, size)
    else:
        hay = [say(_unit(task.keys, rng), _unit(task.values, rng)) for _ in range(size)]
    many = task.per_key * task.asked > 1
    names = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    what = f"are all the special magic {kind}s" if many else f"is the special magic {kind}"
    text = (
        f"Special magic {kind}s are hidden in the following text. Remember them: you will be asked for them.\n"
        f"{_spread(rng, hay, needles)}\nWhat {what} for {names} mentioned in the text?"
    )
    lead = f"The special magic {kind}{'s' if many else ''} for {names} mentioned in the text {'are' if many else 'is'}"
    return text, lead, tuple(value for key in asked for value in facts[key])


def _variables(rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))
        names += [name] if name not in names else []
    value = rng.randrange(10_000, 100_000)
    right = [str(value), *(f"VAR {name}" for name in names[:-1])]
    chain = [f"VAR {name} = {given}." for name, given in zip(names, right)]
    hay = [_NOISE] * max(size, 0)
    places = sorted(rng.randrange(len(hay) + 1) for _ in chain)
    out, at = [], 0
    for place, line in zip(places, chain):  # in this order: a variable is given before it is used
        out += [*hay[at:place], line]
        at = place
    body = " ".join([*out, *hay[at:]])
    text = (
        "Follow the chain of variable assignments hidden in the following text.\n"
        f"{body}\nQuestion: which variables have the value {value}?"
    )
    return text, f"Answer: the variables that have the value {value} are:", tuple(names)


def _common_words(rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
    words = list(_words())
    rng.shuffle(words)
    while len(words) < COMMON + size:  # long prompts need more words than the text has
        words.append("".join(rng.choices("bdfgklmnprstvz", k=1) + rng.choices("aeiou", k=1)) * 2 + str(len(words)))
    common, rare = words[:COMMON], words[COMMON : COMMON + size]
    listed = common * TIMES_COMMON + rare * TIMES_RARE
    rng.shuffle(listed)
    body = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
    text = (
        f"Below is a numbered list of words. Some of them appear more often than others.\n{body}\n"
        f"Question: which {COMMON} words are the most common in the list?"
    )
    return text, f"Answer: the {COMMON} most common words in the list are:", tuple(common)


def _frequent_words(rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
    """Coded words with Zeta frequencies; the most frequent entry is noise, the next three are asked for."""
    count = 50
    coded: list[str] = []
    while len(coded) < count:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))
        coded += [word] if word not in coded else []
    weights = [1 / rank**ZETA for rank in range(1, count + 2)]
    total = max(40, 10 * size)
    share = sum(weights)
    text = ["..."] * round(total * weights[0] / share)
    for word, weight in zip(coded, weights[1:]):
        text += [word] * round(total * weight / share)
    rng.shuffle(text)
    question = (
        "Read the following coded text and count how often each coded word appears.\n"
        f"{' '.join(text)}\nQuestion: leave the dots aside. Which three coded words appear most often?"
    )
    return question, "Answer: the three coded words that appear most often are:", tuple(coded[:3])
