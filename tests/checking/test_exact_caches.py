"""Caches that are given to exact mode: each knows how many of its first tokens full attention has computed."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from caches import SMALL
from captured import imitated
from models import PAD, build, model, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, PrefixCache, SparseCache, StreamingConfig, TokenConfig, sparse
from hf_sparsekv.layers import sparse_prompt

LONG = 120  # tokens of the prompts
CONFIG = TokenConfig(**{**SMALL, "token_budget": 8})
EVERYTHING = TokenConfig(**{**SMALL, "token_budget": 4096})
GO = {"do_sample": False, "pad_token_id": PAD}


class Text:
    """A conversation, and the cache that holds it but for its last tokens."""

    def __init__(self, rows: int = 1, name: str = "llama", net=None, config=CONFIG) -> None:
        self.name, self.net = name, net or model(name)
        self.ids = prompt(rows, LONG)["input_ids"]
        self.cache = SparseCache(config, None, self.net.config)

    def turn(self, tokens: int = 20, **how) -> Text:
        """The model writes, and the user says two tokens."""
        with sparse(self.net, **how):
            out = self.generate(self.net, self.cache, tokens)
        return self.says(out)

    def says(self, before: torch.Tensor) -> Text:
        self.ids = torch.cat((before, prompt(len(before), 2, seed=before.shape[1])["input_ids"]), dim=1)
        return self

    def generate(self, net, cache, tokens: int) -> torch.Tensor:
        given = {"attention_mask": torch.ones_like(self.ids), "past_key_values": cache}
        return net.generate(self.ids, **given, max_new_tokens=tokens, **GO)

    def forward(self, *pieces: int) -> Text:
        """Bare passes over pieces of so many tokens."""
        ids = prompt(len(self.ids), LONG)["input_ids"]
        if (more := sum(pieces) - LONG) > 0:
            ids = torch.cat((ids, prompt(len(self.ids), more, seed=1)["input_ids"]), dim=1)
        for piece in ids.split(pieces, dim=1):
            with torch.no_grad():
                self.net(piece, past_key_values=self.cache)
        return self.says(ids)

    def crop(self, tokens: int) -> Text:
        self.cache.crop(tokens)
        return self

    def holds(self, cache: SparseCache) -> Text:
        self.cache = cache
        return self

    def rows(self, change: Callable, index: list[int]) -> Text:
        change(self.cache, torch.tensor(index))
        self.ids = self.ids[index]
        return self

    def beams(self) -> Text:
        with sparse(self.net):
            out = self.net.generate(self.ids, past_key_values=self.cache, max_new_tokens=9, num_beams=2, **GO)
        self.cache.batch_select_indices(torch.tensor([0]))
        self.cache.crop(LONG + 1)
        return self.says(out[:, : LONG + 3])

    def reset(self) -> Text:
        self.cache.reset()
        return self


def drafted(rows: int = 1, sparse_drafts: bool = True) -> Text:
    text = Text(rows).forward(LONG)
    ids = torch.cat((text.ids[:, :LONG], torch.tensor([[5, 6, 7]] * rows)), dim=1)
    with text.cache.drafts(sparse_drafts), torch.no_grad():
        text.net(ids[:, LONG:], past_key_values=text.cache)
    return text.says(ids)


def replayed(config=CONFIG, **how) -> Text:
    net, runner = imitated("llama")
    text = Text(net=net, config=config).turn(30, **how)
    assert runner.replays > 20
    return text


def began(sparse_steps: bool = False, config=CONFIG) -> Text:
    """A row that shares the blocks of another one of a batch."""
    text = Text()
    rows = SparseCache(config, None).rows(2, 512)
    row = rows.join(rows.prefill(text.net, text.ids))
    if sparse_steps:
        rows.step(text.net, [7, 0])
    text.batch = rows  # its pools have to outlive it
    return text.holds(rows.begin(rows.blocks(row), rows.channels(row)))


def prefixed(offload: OffloadConfig | None = None, itself: bool = False) -> Text:
    prefix, text = PrefixCache(offload), Text()
    with torch.no_grad():
        text.net(text.ids, past_key_values=prefix)
    return text.says(text.ids).holds(copy.deepcopy(prefix) if itself else prefix.start(SparseCache(CONFIG, None)))


def filed(text: Text, path) -> Text:
    """Loaded by a configuration without sparse prompts."""
    text.cache.save(path)
    config = replace(text.cache.config, prefill=None)
    return text.holds(SparseCache.load(path, config, model_config=text.net.config))


def prefill(mass: float | None) -> TokenConfig:
    return TokenConfig(**SMALL, prefill=mass, prefill_below=60)


STREAMING = StreamingConfig(window=32, block_size=16, dense_layers=0, max_draft=4)
FAST = TokenConfig(**{**SMALL, "token_budget": 8, "dense_below": 4096})
OUTGROWN = TokenConfig(**{**SMALL, "token_budget": 128})

# name -> what makes a cache, and how many of its first tokens are full attention's. None: all.
CACHES: dict[str, tuple[Callable[..., Text], int | None]] = {
    "empty": (lambda path: Text(), None),
    "a prompt": (lambda path: Text().forward(LONG), None),
    "a loop of one's own": (lambda path: Text().forward(LONG, 1, 1, 1), LONG),
    "sparse steps": (lambda path: Text().turn(), LONG),
    "of several rows": (lambda path: Text(3).turn(), LONG),
    "by need": (lambda path: Text(config=TokenConfig(**SMALL, mass=0.6)).turn(), LONG),
    "streaming": (lambda path: Text(config=STREAMING).turn(), LONG),
    "beside sliding layers": (lambda path: Text(name="gemma3").turn(), LONG),
    "of latents": (lambda path: Text(name="deepseek-v3").turn(), LONG),
    "beams": (lambda path: Text().beams(), LONG),
    "within the budget": (lambda path: Text(config=EVERYTHING).turn(), None),
    "as fast dense": (lambda path: Text(config=FAST).turn(), None),
    "outgrowing the budget": (lambda path: Text(config=OUTGROWN).turn(60), 164),
    "an exact turn": (lambda path: Text().turn(exact=True, drafts=3), None),
    "a sparse turn after it": (lambda path: Text().turn(10, exact=True, drafts=2).turn(10), LONG + 9 + 3),
    "replayed steps": (lambda path: replayed(), LONG),
    "replayed dense steps": (lambda path: replayed(EVERYTHING), None),
    "replayed rounds": (lambda path: replayed(exact=True, drafts=3), None),
    "drafts, together": (lambda path: drafted(), LONG),
    "drafts, one by one": (lambda path: drafted(rows=2), LONG),
    "drafts, attending to everything": (lambda path: drafted(sparse_drafts=False), None),
    "a sparse prompt": (lambda path: filed(Text(config=prefill(0.5)).forward(LONG), path), 0),
    "its second piece is sparse": (lambda path: filed(Text(config=prefill(0.5)).forward(50, LONG - 50), path), 50),
    "cropped to the prompt": (lambda path: Text().turn().crop(-19), None),
    "in transformers' older form": (lambda path: Text().turn().crop(LONG), None),
    "to one token more": (lambda path: Text().turn().crop(-18), LONG),
    "grown again": (lambda path: Text().turn().crop(-49).turn(20, exact=True, drafts=3), None),
    "cropped to nothing": (lambda path: Text().turn().crop(-(LONG + 19)), None),
    "reset": (lambda path: Text().turn().reset(), None),
    "copied": (lambda path: (text := Text().turn()).holds(copy.deepcopy(text.cache)), LONG),
    "an exact one, copied": (lambda path: (text := Text().forward(LONG)).holds(copy.deepcopy(text.cache)), None),
    "loaded": (lambda path: filed(Text().turn(), path), LONG),
    "an exact one, loaded": (lambda path: filed(Text().forward(LONG), path), None),
    "rows selected": (lambda path: Text(3).turn().rows(SparseCache.batch_select_indices, [2]), LONG),
    "rows reordered": (lambda path: Text(2).turn().rows(SparseCache.reorder_cache, [1, 0]), LONG),
    "rows repeated": (
        lambda path: Text(2).turn().rows(lambda cache, index: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        LONG,
    ),
    "blocks of another row": (lambda path: began(), None),
    "that may be an answer's": (lambda path: began(sparse_steps=True), 0),
    "a prefix": (lambda path: prefixed(), None),
    "a copy of a prefix": (lambda path: prefixed(itself=True), None),
    "a prefix in 8 bits": (lambda path: prefixed(OffloadConfig(kv_dtype="int8")), 0),
}


@pytest.fixture
def few_tokens(monkeypatch):
    """Sparse prompts."""
    monkeypatch.setattr(sparse_prompt, "LEAST", 60)
    monkeypatch.setattr(sparse_prompt, "LAST", 32)


@pytest.mark.parametrize(("make", "exact"), CACHES.values(), ids=CACHES)
def test_exact_mode_takes_what_full_attention_has_computed(few_tokens, make, exact, tmp_path):
    """It refuses the rest, and says how to have it recomputed: then its text is full attention's."""
    text = make(tmp_path / "cache")
    assert text.cache.row_table.exactness.inexact_from == exact
    with sparse(text.net, exact=True, drafts=2):
        if exact is not None:
            with pytest.raises(ValueError, match=f"only the first {exact} are known") as refused:
                text.generate(text.net, text.cache, 12)
            (advice,) = re.findall(r"cache\.(\w+)\(([-\d]*)\)", str(refused.value))
            getattr(text.cache, advice[0])(*map(int, filter(None, advice[1:])))
        found = text.generate(text.net, text.cache, 12)
    assert torch.equal(found, text.generate(reference(text.name), None, 12))
    assert text.cache.row_table.exactness.inexact_from is None


@pytest.mark.parametrize(("mass", "exact"), [(0.5, 0), (None, None)])
def test_a_row_that_has_joined_takes_it_along(few_tokens, mass, exact):
    assert began(config=prefill(mass)).cache.row_table.exactness.inexact_from == exact


def test_a_prefix_takes_no_drafts_for_its_context():
    """It attends to everything anyway."""
    text = prefixed(itself=True)
    with sparse(text.net, exact=True, drafts=2):
        text.generate(text.net, text.cache, 12)
    stats = text.cache.stats()
    assert (stats.drafted, stats.decode_steps, stats.exact_calls) == (0, 11, 2)


def test_an_interrupt_between_a_crop_and_what_it_says():
    """All that is left is exact."""
    text = Text().forward(LONG)
    text.cache.row_table.exactness.selected(LONG)
    with sparse(text.net, exact=True, drafts=2):
        found = text.generate(text.net, text.cache, 5)
    assert torch.equal(found, text.generate(reference("llama"), None, 5))


def test_a_cache_of_transformers_own_is_gone_on_with():
    """By full attention, whatever it holds."""
    net, found = build("llama", "sdpa"), []
    for exactly in (False, True):
        text, cache = Text(net=net), DynamicCache(config=net.config)
        with sparse(net, exact=True) if exactly else nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no step of this")
            for _ in range(2):
                text.says(text.generate(net, cache, 10))
        found.append(text.ids)
    assert torch.equal(*found)
