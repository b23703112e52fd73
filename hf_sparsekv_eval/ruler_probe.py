"""The RULER families in the probe models' language: the prompts that their training and model cards know."""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch

from . import probe_cells as cells
from . import probe_language as lang
from .samples import Sample, exact

FAMILIES = cells.EXAMS


def speaks_probe(tokenizer) -> bool:
    """The tokenizer is the probe models'."""
    return tokenizer.get_vocab() == lang.vocabulary()


@lru_cache(maxsize=2)
def _filler(chains: int) -> lang.Filler:
    return lang.Filler(chains, 512, seed=1)


def make_sample(tokenizer, family: str, length: int, index: int, seed: int = 0) -> Sample:
    """One exam.

    Args:
        tokenizer: the probe models'.
        family: one of :data:`FAMILIES`.
        length: tokens of prompt and answer together, as in training.

    Raises:
        ValueError: no such family, or too short a prompt for it.
    """
    if family not in FAMILIES:
        raise ValueError(f"the probe models know no family {family!r}; they know {', '.join(FAMILIES)}")
    if length < 8 * cells.CELL:
        raise ValueError(f"a prompt of {length} tokens is too short: give at least {8 * cells.CELL}")
    filler = _filler(max(256, 2 ** (4 * length // 512).bit_length()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{family}-{length}-{index}-{seed}".encode()))
        ids, kind = cells.make(1, length, cells.exam_mix(family, length), filler)
    first = int((kind[0] > 0).nonzero()[0])
    answer = ids[0, first:]
    answer = answer[: int((answer == lang.END).nonzero()[0])]
    text = tokenizer.decode(answer)
    prompt = tuple(ids[0, :first].tolist())
    return Sample(family, length, index, prompt, (text,), len(answer) + 1, exact, frozenset({lang.END}))


def needle_sample(tokenizer, length: int, depth: float, index: int, seed: int = 0) -> Sample:
    """A single fact at ``depth`` (0 first, 1 last) of filler, and the question for its value."""
    random = torch.Generator().manual_seed(zlib.crc32(f"needle-{length}-{depth}-{index}-{seed}".encode()))
    ids = _filler(max(256, 2 ** (4 * length // 512).bit_length())).sample(1, length, random)[0]

    def pair(first: int, count: int) -> list[int]:
        return (torch.randint(0, count, (2,), generator=random) + first).tolist()

    key, value = pair(lang.KEY, lang.KEYS), pair(lang.VALUE, lang.VALUES)
    question = [lang.ASK, *key]
    prompt = ids[: length - 3].tolist()  # with the value and its end the prompt is ``length`` long
    prompt[0] = lang.BOS
    fact = [lang.FACT, *key, *value, lang.END]
    last = len(prompt) - len(question) - len(fact)
    at = 1 + round(depth * (last - 1))
    prompt[at : at + len(fact)] = fact
    prompt[-len(question) :] = question
    name = f"depth {depth:.2f}"
    stop = frozenset({lang.END})
    return Sample(name, length, index, tuple(prompt), (tokenizer.decode(value),), 3, exact, stop)
