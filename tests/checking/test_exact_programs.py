"""Random programs: what a caller may ask of ``generate()``, in exact mode and of transformers alone, must end alike.

A program is a conversation of some turns. Each turn has its own options; between turns the cache may be dropped,
cropped, copied, saved, or used by sparse steps. Text, scores, errors, random numbers and what is cached are compared.
"""

from __future__ import annotations

import copy
import random
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from caches import SMALL
from captured import Told, imitated
from models import PAD, model, prompt, reference
from tokenizers_made import byte_level
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor

from hf_sparsekv import ProgressiveConfig, SparseCache, StreamingConfig, TokenConfig, sparse
from hf_sparsekv.checking.pace import Next, Pace

CHOOSE = {**SMALL, "dense_below": 0}
CONFIGS = [
    TokenConfig(**CHOOSE, token_budget=8),
    TokenConfig(**CHOOSE, token_budget=32),
    TokenConfig(**CHOOSE, mass=0.6),
    TokenConfig(**CHOOSE, token_budget=16, level="two_level", num_blocks=2, tail=None),
    ProgressiveConfig(**CHOOSE, mass=0.6, min_tokens=8, tail=None),
    StreamingConfig(block_size=16, window=32, dense_layers=0, max_draft=4),
]
FAMILIES = ["llama", "llama", "llama", "captured", "qwen3", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-next"]
KEEPS = ("llama", "captured", "qwen3", "deepseek-v3")  # all layers can be cropped


class Ends(StoppingCriteria):
    """The caller's own: rows end after their own numbers of tokens."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, input_ids, scores, **kwargs):
        late = torch.arange(len(input_ids)) + self.at
        return input_ids.shape[1] >= late


class Shifts(LogitsProcessor):
    """The caller's own."""

    def __call__(self, input_ids, scores):
        return scores - 0.01 * torch.arange(scores.shape[-1])


def options(draw: random.Random, rows: int, length: int, last: bool, cached: bool) -> dict[str, Any]:
    """Options of a call after ``length`` tokens. Functions make what only one call may use.

    ``last``: no turn follows. ``cached``: some tokens are.
    """
    how: dict[str, Any] = {"max_new_tokens": draw.choice((1, 2, 5, 9, 14)), "do_sample": draw.random() < 0.6}
    ends = draw.randint(1, 6)

    def maybe(chance: float, **more) -> None:
        if draw.random() < chance:
            how.update(more)

    if how["do_sample"]:
        maybe(0.5, temperature=draw.choice((0.3, 0.8, 1.5)))
        maybe(0.3, top_k=draw.choice((1, 5, 40)))
        maybe(0.3, top_p=draw.choice((0.5, 0.95)))
        maybe(0.15, min_p=0.05)
        maybe(0.1, typical_p=0.9)
        maybe(0.1, epsilon_cutoff=0.003)
    maybe(0.15, repetition_penalty=1.4)
    maybe(0.1, no_repeat_ngram_size=draw.choice((1, 2)))
    maybe(0.05, no_repeat_ngram_size=1, suppress_tokens=[*range(6, 97)])
    maybe(0.1, min_new_tokens=4)
    maybe(0.1, suppress_tokens=[*range(10, 50)])
    maybe(0.1, bad_words_ids=[[7], [8, 9]])
    maybe(0.1, renormalize_logits=True)
    maybe(0.1, remove_invalid_values=True)
    maybe(0.1, sequence_bias=[[[11], 3.0], [[12, 13], -2.0]])
    maybe(0.1 * (not cached), prefill_chunk_size=40)
    maybe(0.5, eos_token_id=draw.choice((5, [*range(2, 97, 9)], [*range(2, 97, 4)])))
    maybe(0.1, max_time=1e-9)
    maybe(0.1, stopping_criteria=lambda: StoppingCriteriaList([Ends(length + ends)]))
    maybe(0.1, logits_processor=lambda: LogitsProcessorList([Shifts()]))
    maybe(0.1, stop_strings=["a", "1"], tokenizer=byte_level)
    maybe(0.5, return_dict_in_generate=True)
    if "return_dict_in_generate" in how:
        maybe(0.3, output_scores=True)
        maybe(0.2, output_logits=True)
        maybe(0.1, output_hidden_states=True)
    if rows == 1:
        maybe(0.3, streamer=Told)
    if last and not cached and "streamer" not in how:  # afterwards there are other rows than texts
        maybe(0.1, **draw.choice(({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True})))
        if rows == 1 and len({"num_beams", "num_return_sequences"} & set(how)) == 0:
            maybe(0.1, prompt_lookup_num_tokens=3, do_sample=False)
    return how


class Side:
    """A conversation with exact mode, or with transformers alone."""

    def __init__(self, name: str, exactly: bool, config, given: bool, asked: dict[str, Any], path) -> None:
        self.exactly, self.config, self.asked, self.path = exactly, config, asked, path
        self.name = "llama" if name == "captured" else name
        make = (lambda name: imitated("llama")[0]) if name == "captured" else model
        self.net = make(name) if exactly else reference(self.name)
        self.given, self.cache = given, None

    def new(self) -> Any:
        config = self.net.config
        return SparseCache(self.config, None, config) if self.exactly else DynamicCache(config=config)

    def change(self, what: str, by: int, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """The cache before a turn. What is right for both is that it holds the beginning of the text."""
        if self.cache is None or what == "dropped":
            self.cache = self.new()
        elif what == "copied":
            self.cache = copy.deepcopy(self.cache)
        elif what == "cropped":
            self.cache.crop(-min(by, int(self.cache.get_seq_length()) - 1))
        elif what == "filed" and self.exactly:
            self.cache.save(self.path)
            self.cache = SparseCache.load(self.path, model_config=self.net.config)
        elif what == "sparse" and self.exactly:
            held = self.cache.get_seq_length()
            with sparse(self.net):
                given = {"attention_mask": mask, "past_key_values": self.cache, "pad_token_id": PAD}
                self.net.generate(ids, **given, max_new_tokens=by, do_sample=False)
            if self.cache.row_table.exactness.inexact_from is not None:
                with sparse(self.net, exact=True), pytest.raises(ValueError, match="are known to have") as refused:
                    self.net.generate(ids, **given, max_new_tokens=1)
                (does, tokens) = re.findall(r"cache\.(\w+)\(([-\d]*)\)", str(refused.value))[0]
                getattr(self.cache, does)(*map(int, filter(None, [tokens])))
            if self.cache.get_seq_length() > held:
                self.cache.crop(held - self.cache.get_seq_length())

    def turn(self, seed: int, ids: torch.Tensor, mask: torch.Tensor, how: dict[str, Any]) -> tuple[Any, ...]:
        """The output, and the text."""
        how = {key: value() if callable(value) else value for key, value in how.items()}
        if self.given:
            how["past_key_values"] = self.cache
        torch.manual_seed(seed)
        with sparse(self.net, self.config, **self.asked) if self.exactly else nullcontext():
            try:
                out = self.net.generate(ids, attention_mask=mask, pad_token_id=PAD, **how)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                return f"{type(error).__name__}: {str(error)[:60]}", torch.get_rng_state().tolist()
        text = out if isinstance(out, torch.Tensor) else out.sequences
        numbers = [] if isinstance(out, torch.Tensor) else [*(out.scores or ()), *(getattr(out, "logits", None) or ())]
        heard = how["streamer"].heard if "streamer" in how else None
        held = int(self.cache.get_seq_length()) if self.given else None
        return text, torch.get_rng_state().tolist(), heard, held, numbers


def seen(new: torch.Tensor, how: dict[str, Any], draw: random.Random) -> torch.Tensor:
    """Which of the ``new`` tokens the next turn's mask shows: all, or those up to each row's first end token."""
    ends = torch.isin(new, torch.tensor(how.get("eos_token_id", -1))).long()
    return (ends.cumsum(1) - ends == 0) | (draw.random() < 0.5)


def run(seed: int, path, asked: dict[str, Any] | None = None) -> list[str]:
    """A program. Returns what it did, for a failure's message. ``asked``: how full attention's text is asked for."""
    draw = random.Random(seed)
    name, config, given = draw.choice(FAMILIES), draw.choice(CONFIGS), draw.random() < 0.5
    rows, drafts = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3, 4, None))
    length, dtype = draw.randint(30, 110), draw.choice((torch.int64, torch.int64, torch.bool, torch.float32))
    pads = [draw.choice((0, 0, 3, length - 5)) for _ in range(rows)]
    pads[draw.randrange(rows)] = 0
    inputs = prompt(rows, length, tuple(pads), seed)
    ids, mask = inputs["input_ids"], inputs["attention_mask"].to(dtype)
    asked = {"exact": True, "drafts": drafts} if asked is None else asked
    sides = [Side(name, exactly, config, given, asked, path) for exactly in (False, True)]
    turns, done = draw.randint(1, 3), [f"{name}, {config.brief()}, {rows} rows, {drafts} drafts, {length}, {pads}"]
    for nth in range(turns):
        what = draw.choice(("kept", "kept", "dropped", "copied", "cropped", "filed", "sparse"))
        if name not in KEEPS and what in ("cropped", "filed", "sparse"):
            what = "kept"
        by, start = draw.randint(1, 30), draw.randint(0, 1 << 20)
        cached = given and nth > 0 and what != "dropped"
        how = options(draw, rows, ids.shape[1], nth == turns - 1, cached)
        done.append(f"{what} by {by}; {how}")
        found = []
        for side in sides:
            if given:
                side.change(what, by, ids, mask)
            found.append(side.turn(start, ids, mask, how))
        (text, *rest), (ours, *own) = found
        where = "\n".join(done)
        if isinstance(text, str) or isinstance(ours, str):
            assert found[0] == found[1], (
                f"{where}\n{text if isinstance(text, str) else None}\n{ours if isinstance(ours, str) else None}"
            )
            return done
        assert torch.equal(text, ours), where
        assert rest[:-1] == own[:-1], where
        assert len(rest[-1]) == len(own[-1]), where
        for one, other in zip(rest[-1], own[-1]):
            assert torch.allclose(one, other, atol=2e-3, rtol=2e-3, equal_nan=True), where
        more = prompt(len(text), draw.randint(1, 4), seed=start)["input_ids"]
        ids = torch.cat((text, more), dim=1)
        if len(text) == rows:
            mask = torch.cat((mask, seen(text[:, mask.shape[1] :], how, draw).to(dtype), torch.ones_like(more)), 1)
    return done


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 12)) for seed in range(150)])
def test_a_program_ends_as_with_transformers_alone(monkeypatch, seed, tmp_path):
    draw = random.Random(seed)

    def any_number(pace, *_, room=None, **__) -> Next:
        return Next(draw.choice((0, 1, 4)) if pace.fixed is None else pace.fixed, draw.randint(1, 3))

    monkeypatch.setattr(Pace, "next", any_number)
    run(seed, tmp_path / "cache")
