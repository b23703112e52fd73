"""RULER's 13 tasks made from its own data, with the paper's prompts (Hsieh et al. 2024, arXiv 2404.06654).

The prompts of :mod:`.ruler` need no data, and have this project's own words. Instructions, answer prefixes and the
solved example of ``vt`` and ``cwe`` are RULER's (Apache-2.0, NVIDIA). Essays begin at a random sentence here. Keys and
listed words are the essays' own instead of a word package's. Solved examples have this module's sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

from .ruler_data import Question, Questions, RulerData
from .ruler_tasks import (
    COMMON,
    HOPS,
    NEEDLES,
    NOISE,
    TIMES_COMMON,
    TIMES_RARE,
    Made,
    Needles,
    coined,
    common_and_rare,
    facts_of,
    fill,
    numbered,
    spread,
    unit,
    zeta_words,
)
from .samples import Sample

FAMILIES = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")
_CAPITALS, _SMALL = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"


def make_sample(
    tokenizer, data: RulerData, family: str, length: int, index: int, seed: int = 0, chat: bool = False
) -> Sample:
    """One prompt of at most ``length`` tokens, its answer included; equal for equal arguments.

    Args:
        data: read for this family.
        family: one of :data:`FAMILIES`.
        index: also says which question of ``qa_1`` and ``qa_2`` it is, at every length.
        chat: put it into the tokenizer's chat template.

    Raises:
        ValueError: no such family, or ``length`` has no room for the task.
    """
    if family not in FAMILIES:
        raise ValueError(f"RULER has no family {family!r}; there are {', '.join(FAMILIES)}")
    if family.startswith("qa"):
        asked = data.squad if family == "qa_1" else data.hotpotqa
        order = _order(len(asked.questions), f"{family}-{seed}")
        question = asked.questions[order[index % len(order)]]

        def build(rng: random.Random, size: int) -> Made:
            return _question(asked, question, rng, size)
    else:
        build = _builder(family, data, length)

    def texts(size: int) -> Made:
        return build(random.Random(f"{family}-{length}-{index}-{seed}"), size)

    return fill(tokenizer, family, length, index, texts, chat, None)


@lru_cache(maxsize=4)
def _order(count: int, seed: str) -> list[int]:
    """The questions' numbers in random order, so that no two samples of a run ask the same."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _builder(family: str, data: RulerData, length: int) -> Callable[[random.Random, int], Made]:
    if family in NEEDLES:
        return lambda rng, size: _niah(NEEDLES[family], data, rng, size)
    if family == "vt":
        return _variables
    if family == "cwe":
        return lambda rng, size: _common_words(data, rng, size)
    return lambda rng, size: _frequent_words(rng, size, max(50, length // 50))


def _niah(task: Needles, data: RulerData, rng: random.Random, size: int) -> Made:
    facts = facts_of(task, rng, data.words)
    asked = rng.sample(list(facts), task.asked)
    many = task.per_key * task.asked > 1
    one = "number" if task.values == "number" else "uuid"
    kind = f"{one}s" if many else one

    def say(key: str, value: str) -> str:
        return f"One of the special magic {one}s for {key} is: {value}."

    needles = [say(key, value) for key, values in facts.items() for value in values]
    rng.shuffle(needles)
    if task.haystack == "noise":
        hay = [NOISE] * size
    elif task.haystack == "essay":
        start = rng.randrange(len(data.sentences))
        hay = [data.sentences[(start + i) % len(data.sentences)] for i in range(size)]
    else:
        hay = []
        while len(hay) < size:
            key = unit(task.keys, rng, data.words)
            if key not in facts:  # two words may be drawn again
                hay.append(say(key, unit(task.values, rng, data.words)))
    text = spread(rng, hay, needles, " " if task.haystack == "essay" else "\n")
    keys = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    some, are = ("Some", "are") if many else ("A", "is")
    every = "are all the" if many else "is the"
    question = (
        f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n{text}\n"
        f"What {every} special magic {kind} for {keys} mentioned in the provided text?"
    )
    lead = f"The special magic {kind} for {keys} mentioned in the provided text {are}"
    return question, lead, tuple(value for key in asked for value in facts[key])


def _variables(rng: random.Random, size: int) -> Made:
    example, lead, found = _chain(rng, 5)
    question, asked, names = _chain(rng, size)
    return f"{example}\n{lead} {' '.join(found)}\n\n{question}", asked, names


def _chain(rng: random.Random, size: int) -> Made:
    names = coined(HOPS + 1, _CAPITALS, 5, rng)
    value = rng.randrange(10_000, 100_000)
    given = [str(value), *(f"VAR {name}" for name in names[:-1])]
    lines = [f"VAR {name} = {right}" for name, right in zip(names, given)]
    question = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        + spread(rng, [NOISE] * size, lines, "\n")
        + f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    )
    lead = (
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are:"
    )
    return question, lead, tuple(names)


def _common_words(data: RulerData, rng: random.Random, size: int) -> Made:
    lead = f"Answer: The top {COMMON} words that appear most often in the list are:"

    def ask(common: list[str], rare: list[str], often: int, seldom: int) -> str:
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{numbered(rng, common, rare, often, seldom)}\n"
            f"Question: What are the {COMMON} most common words in the above list?"
        )

    often, rare = common_and_rare(rng, data.words, COMMON)
    solved = " ".join(f"{i}. {word}" for i, word in enumerate(often, 1))
    example = f"{ask(often, rare, 3, 1)}\n{lead} {solved}"
    common, rare = common_and_rare(rng, data.words, size)
    return f"{example}\n\n{ask(common, rare, TIMES_COMMON, TIMES_RARE)}", lead, tuple(common)


def _frequent_words(rng: random.Random, size: int, vocabulary: int) -> Made:
    coded = coined(vocabulary, _SMALL, 6, rng)
    question = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {zeta_words(rng, coded, max(40, 10 * size), '...')}\n"
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    lead = "Answer: According to the coded text above, the three most frequently appeared words are:"
    return question, lead, tuple(coded[:3])


def _question(data: Questions, asked: Question, rng: random.Random, size: int) -> Made:
    """A question about its own documents among ``size`` others, near ones first, in random order."""
    others = rng.sample(asked.near, len(asked.near))[:size]
    seen = {*asked.own, *asked.near}
    while len(others) < size:
        if len(seen) >= len(data.documents):  # all are there: go on with each once more
            seen = set(asked.own) if len(asked.own) < len(data.documents) else set()
        number = rng.randrange(len(data.documents))
        if number not in seen:
            seen.add(number)
            others.append(number)
    held = [*asked.own, *others]
    rng.shuffle(held)
    documents = "\n\n".join(f"Document {i}:\n{data.documents[number]}" for i, number in enumerate(held, 1))
    order = "Answer the question based on the given documents."
    order += " Only give me the answer and do not output any other words."
    question = f"{order}\n\nThe following are given documents.\n\n{documents}\n\n{order}\n\nQuestion: {asked.text}"
    return question, "Answer:", asked.answers
