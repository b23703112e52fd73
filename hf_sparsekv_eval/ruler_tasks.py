"""RULER's task table, and how a prompt of a given length is made of a task.

Prompts from invented text and prompts from RULER's own data share the table.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .samples import Sample, found, found_any, found_share, largest


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
ANSWER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS, COMMON, TIMES_COMMON, TIMES_RARE, ZETA = 4, 10, 30, 3, 2.0
Made = tuple[str, str, tuple[str, ...]]  # the question, the words that the answer begins with, the references


def answer_tokens(family: str) -> int:
    """Room for the answer (paper, appendix)."""
    return ANSWER_TOKENS[family.split("_")[0]]


def fill(
    tokenizer, family: str, length: int, index: int, build: Callable[[int], Made], chat: bool, room: int | None
) -> Sample:
    """The sample with the largest haystack that fits.

    Args:
        length: tokens of prompt and answer.
        build: from the haystack's size to the texts of the prompt.
        chat: put it into the tokenizer's chat template.
        room: for the answer; ``None``: the paper's.

    Raises:
        ValueError: ``length`` has no room for the task.
    """
    room = room or answer_tokens(family)

    def encode(size: int) -> tuple[list[int], tuple[str, ...]]:
        question, lead, references = build(size)
        if chat:
            turn = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + lead
        else:
            text = f"{question} {lead}"
        return tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"], references

    ids, references = largest(encode, length - room)
    if ids is None:
        raise ValueError(f"{family} does not fit into {length} tokens (with {room} for the answer): give more")
    if family.startswith("qa"):
        return Sample(family, length, index, tuple(ids), references, room, found_any)
    return Sample(family, length, index, tuple(ids), references, room, found_share, items=found)


def unit(kind: str, rng: random.Random, words: Sequence[str]) -> str:
    """A new key or value: ``"number"``, ``"uuid"``, or two words."""
    if kind == "number":
        return str(rng.randrange(1_000_000, 10_000_000))
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return "-".join(rng.sample(words, 2))


def facts_of(task: Needles, rng: random.Random, words: Sequence[str]) -> dict[str, list[str]]:
    """Keys of a task and the values of each."""
    facts: dict[str, list[str]] = {}
    while len(facts) < task.facts:
        facts[unit(task.keys, rng, words)] = [unit(task.values, rng, words) for _ in range(task.per_key)]
    return facts


def spread(rng: random.Random, hay: list[str], needles: list[str], between: str = " ") -> str:
    """Needles at random places of the haystack, in their order."""
    places = sorted(rng.randrange(len(hay) + 1) for _ in needles)
    out, at = [], 0
    for place, needle in zip(places, needles):
        out += [*hay[at:place], needle]
        at = place
    return between.join([*out, *hay[at:]])


def coined(count: int, letters: str, length: int, rng: random.Random) -> list[str]:
    """Invented words, each once."""
    out: dict[str, None] = {}
    while len(out) < count:
        out["".join(rng.choices(letters, k=length))] = None
    return list(out)


def common_and_rare(rng: random.Random, known: Sequence[str], size: int) -> tuple[list[str], list[str]]:
    """Words that a list holds often, and ``size`` others."""
    words = list(known)
    rng.shuffle(words)
    while len(words) < COMMON + size:  # long prompts need more words than the text has
        words.append("".join(rng.choices("bdfgklmnprstvz", k=1) + rng.choices("aeiou", k=1)) * 2 + str(len(words)))
    return words[:COMMON], words[COMMON : COMMON + size]


def numbered(rng: random.Random, common: list[str], rare: list[str], often: int, seldom: int) -> str:
    """A shuffled list of the words, with numbers."""
    listed = common * often + rare * seldom
    rng.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


def zeta_words(rng: random.Random, coded: list[str], total: int, noise: str) -> str:
    """Some ``total`` words with Zeta frequencies: the first rank is ``noise``, the next ones are ``coded``'s."""
    weights = [1 / rank**ZETA for rank in range(1, len(coded) + 2)]
    share = sum(weights)
    text: list[str] = []
    for word, weight in zip((noise, *coded), weights):
        text += [word] * round(total * weight / share)
    rng.shuffle(text)
    return " ".join(text)
