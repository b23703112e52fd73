"""How a document, a hidden fact and a question look to a model: chat template, plain text, or the probe's language."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import torch

from hf_sparsekv_eval import probe_language as probe
from hf_sparsekv_eval.ruler_probe import speaks_probe

from . import documents

_HEAD = "Read the text below, then answer the question about it.\n\n"
_CITIES = ("Lisbon", "Oslo", "Vienna", "Dublin", "Athens", "Prague")
_MARK = "\u241eQ\u241e"  # where a chat template puts what is asked


@dataclass(frozen=True)
class Needle:
    """A fact, the question for it, and what the answer must contain."""

    fact: str
    question: str
    answer: str


class Language:
    """Turns texts into ids for one tokenizer."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.probe = speaks_probe(tokenizer)
        self.chat = tokenizer.chat_template is not None and not self.probe
        if self.chat:
            # The template's text before a first message, between a question and its answer, and so on.
            one = self._render([("user", _MARK)])
            self._before, self._after = one.split(_MARK)
            more = self._render([("user", "a"), ("assistant", _MARK), ("user", _MARK)])
            _, self._between, _ = more.split(_MARK)

    def _render(self, messages: list[tuple[str, str]]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        return self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    def ids(self, text: str) -> list[int]:
        """Token ids of ``text`` and nothing else."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    @lru_cache(maxsize=4)  # noqa: B019 (languages live as long as their models)
    def document(self, text: str) -> list[int]:
        """Token ids of a document; do not change them.

        Raises:
            DocumentError: the probe model cannot read it.
        """
        ids = self.ids(text)
        if self.probe and sum(i == probe.UNK for i in ids) > len(ids) // 10:
            raise documents.DocumentError(
                "the probe model reads its own language of 912 words only: take the bundled text, or another model"
            )
        return ids

    def bundled(self) -> str:
        """The bundled document: for the probe model, words of its own language."""
        return _filler() if self.probe else documents.bundled()

    @property
    def breaks(self) -> frozenset[int]:
        """Tokens that end a sentence or a line: facts are hidden after one."""
        if self.probe:
            return frozenset()
        return frozenset(self.tokenizer.convert_tokens_to_ids([t for t in self.tokenizer.get_vocab() if t in _ENDS]))

    def head(self) -> list[int]:
        """Tokens before the document."""
        if self.probe:
            return [probe.BOS]
        if self.chat:
            return self.ids(self._before + _HEAD)
        return [*self.tokenizer("", verbose=False)["input_ids"], *self.ids(_HEAD)]

    def question(self, text: str, first: bool) -> list[int]:
        """Tokens after the document, or after the last answer, which is without the token that ends it."""
        if self.probe:
            return self.ids(text) if first else [probe.END, *self.ids(text)]
        if not self.chat:
            return self.ids(f"\n\nQuestion: {text}\nAnswer:")
        between = "\n\nQuestion: " if first else self._between
        return self.ids(between + text + self._after)

    def needle(self, seed: int) -> Needle:
        """A fact to hide."""
        rng = random.Random(seed)
        if self.probe:
            key = " ".join(f"k{rng.randrange(probe.KEYS):03d}" for _ in range(2))
            value = " ".join(f"v{rng.randrange(probe.VALUES):03d}" for _ in range(2))
            return Needle(f"fact {key} {value} <end>", f"ask {key}", value)
        city, number = rng.choice(_CITIES), str(rng.randrange(10000, 99999))
        return Needle(
            f" The special magic number for {city} is: {number}. ",
            # Short answers: left alone, a small model goes on inventing things about the number.
            f"What is the special magic number for {city}? Answer with the number.",
            number,
        )

    def check_question(self, text: str) -> None:
        """Raise ``DocumentError`` for a question that the model cannot read."""
        if not text.strip():
            raise documents.DocumentError("ask something first")
        if self.probe and probe.UNK in self.ids(text):
            raise documents.DocumentError(
                "the probe model has its own language; a question is for example: ask k003 k017"
            )


_ENDS = frozenset({".", "\n", "\n\n", "\u010a", "\u010a\u010a", "<0x0A>", ".\u010a", ".\u010a\u010a"})


@lru_cache(maxsize=1)
def _filler() -> str:
    """8192 words of the probe models' language."""
    ids = probe.Filler(64, 160, seed=1).sample(1, 8192, torch.Generator().manual_seed(0))[0].tolist()
    words = {i: word for word, i in probe.vocabulary().items()}
    return " ".join(words[i] for i in ids)
