"""Long text that every Python installation has, and prompts made from it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def python_reference() -> str:
    """The language reference that ``help()`` shows: some 110k tokens of English prose and code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def reference_ids(tokenizer) -> Tensor:
    """Ids ``[n]`` of Python's language reference or, for a probe model, of its filler."""
    from . import probe_language, ruler_probe

    if ruler_probe.speaks_probe(tokenizer):
        return probe_language.Filler(chains=1024, steps=512, seed=1).words.long() + probe_language.FILLER
    return torch.tensor(_reference_words(tokenizer))


@lru_cache(maxsize=1)  # tokenizing it takes a second, and every needle needs it
def _reference_words(tokenizer) -> list[int]:
    return tokenizer(python_reference(), add_special_tokens=False, verbose=False)["input_ids"]


@dataclass(frozen=True)
class Needle:
    """A prompt with one planted fact.

    Args:
        ids: ``[1, n]`` prompt.
        answer: what the continuation must contain.
    """

    ids: Tensor
    answer: str


def needle_prompt(tokenizer, length: int, depth: float, seed: int = 0) -> Needle:
    """A prompt of about ``length`` tokens with a fact planted at ``depth`` (0 first, 1 last) and asked for.

    A chat prompt, if the tokenizer has a template. Prompts longer than the text repeat it.
    """
    rng = random.Random(f"{seed}-{length}-{depth}")
    city = rng.choice(["Lisbon", "Oslo", "Vienna", "Dublin", "Athens", "Prague"])
    number = str(rng.randrange(1000000, 9999999))
    fact = f"\nThe special magic number for {city} is: {number}.\n"
    question = f"\n\nWhat is the special magic number for {city} mentioned in the text above? Answer with the number."
    head = "Read the text below. A special magic number is hidden in it; remember it.\n\n"
    words = _reference_words(tokenizer)
    overhead = len(tokenizer(head + fact + question)["input_ids"]) + 40
    if length >= len(words):
        words = words * (length // len(words) + 2)
    start = rng.randrange(0, len(words) - length)
    body = words[start : start + length - overhead]
    cut = int(depth * len(body))
    text = tokenizer.decode(body[:cut]) + fact + tokenizer.decode(body[cut:])
    prompt = head + text + question
    if tokenizer.chat_template is None:
        prompt += "\n"
    else:
        chat = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt += f"The special magic number for {city} is"
    return Needle(tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"], number)
