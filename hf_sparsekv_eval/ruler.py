"""RULER's synthetic tasks for any tokenizer and length, made offline (Hsieh et al. 2024, arXiv 2404.06654, section 3).

Families, numbers of needles, keys, hops and repetitions, and scores are the paper's. Sentences and haystack are this
project's: essays and words come from Python's language reference, which is repeated for longer prompts. So scores
compare caches with each other, but not with published results. Question answering needs RULER's own data, from which
:mod:`.ruler_paper` makes all tasks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache

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
from .text import python_reference

FAMILIES = (*NEEDLES, "vt", "cwe", "fwe")


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
    build = _builder(family)

    def texts(size: int) -> Made:
        return build(random.Random(f"{family}-{length}-{index}-{seed}"), size)

    return fill(tokenizer, family, length, index, texts, chat, answer_tokens)


def _builder(family: str) -> Callable[[random.Random, int], Made]:
    if family in NEEDLES:
        return lambda rng, size: _niah(NEEDLES[family], rng, size)
    return {"vt": _variables, "cwe": _common_words, "fwe": _frequent_words}[family]


def _essay(rng: random.Random, size: int) -> list[str]:
    sentences = _sentences()
    start = rng.randrange(len(sentences))
    return [sentences[(start + i) % len(sentences)] for i in range(size)]


def _niah(task: Needles, rng: random.Random, size: int) -> Made:
    facts = facts_of(task, rng, _words())
    asked = rng.sample(list(facts), task.asked)
    kind = "number" if task.values == "number" else "uuid"

    def say(key: str, value: str) -> str:
        return f"The special magic {kind} for {key} is: {value}."

    needles = [say(key, value) for key, values in facts.items() for value in values]
    rng.shuffle(needles)
    if task.haystack == "noise":
        hay = [NOISE] * size
    elif task.haystack == "essay":
        hay = _essay(rng, size)
    else:
        hay = [say(unit(task.keys, rng, _words()), unit(task.values, rng, _words())) for _ in range(size)]
    many = task.per_key * task.asked > 1
    names = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    what = f"are all the special magic {kind}s" if many else f"is the special magic {kind}"
    text = (
        f"Special magic {kind}s are hidden in the following text. Remember them: you will be asked for them.\n"
        f"{spread(rng, hay, needles)}\nWhat {what} for {names} mentioned in the text?"
    )
    lead = f"The special magic {kind}{'s' if many else ''} for {names} mentioned in the text {'are' if many else 'is'}"
    return text, lead, tuple(value for key in asked for value in facts[key])


def _variables(rng: random.Random, size: int) -> Made:
    chain_names = coined(HOPS + 1, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", 5, rng)
    value = rng.randrange(10_000, 100_000)
    right = [str(value), *(f"VAR {name}" for name in chain_names[:-1])]
    chain = [f"VAR {name} = {given}." for name, given in zip(chain_names, right)]
    # In this order: a variable is given before it is used.
    text = (
        "Follow the chain of variable assignments hidden in the following text.\n"
        f"{spread(rng, [NOISE] * size, chain)}\nQuestion: which variables have the value {value}?"
    )
    return text, f"Answer: the variables that have the value {value} are:", tuple(chain_names)


def _common_words(rng: random.Random, size: int) -> Made:
    common, rare = common_and_rare(rng, _words(), size)
    text = (
        "Below is a numbered list of words. Some of them appear more often than others.\n"
        f"{numbered(rng, common, rare, TIMES_COMMON, TIMES_RARE)}\n"
        f"Question: which {COMMON} words are the most common in the list?"
    )
    return text, f"Answer: the {COMMON} most common words in the list are:", tuple(common)


def _frequent_words(rng: random.Random, size: int) -> Made:
    """Coded words with Zeta frequencies; the most frequent entry is noise, the next three are asked for."""
    coded = coined(50, "abcdefghijklmnopqrstuvwxyz", 6, rng)
    question = (
        "Read the following coded text and count how often each coded word appears.\n"
        f"{zeta_words(rng, coded, max(40, 10 * size), '...')}\n"
        "Question: leave the dots aside. Which three coded words appear most often?"
    )
    return question, "Answer: the three coded words that appear most often are:", tuple(coded[:3])
