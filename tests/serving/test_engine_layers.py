"""Engines over models with windows, chunks and states: requests get the tokens of generate() alone."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from engines import greedy, inside, quiet
from layer_kinds import CHUNKS, FULL, STATES, TELLING, WINDOWS, new_model, plain
from models import VOCAB

from hf_sparsekv import Engine, OffloadConfig, ServingConfig, TokenConfig

KINDS = tuple(kind for kind in (*STATES, *CHUNKS, *WINDOWS) if kind != "jamba")  # its prompts are read at once
SERVING = ServingConfig(max_rows=3, max_length=160, chunk=32, prefill_ms=0.5)
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def alone(kind: str, ids: list[int], tokens: int, place: str) -> list[int]:
    model = plain(kind) if place == "cpu" else new_model(kind).to(place)
    given = torch.tensor([ids], device=place)
    go = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    return model.generate(given, attention_mask=torch.ones_like(given), **go)[0, len(ids) :].tolist()


@pytest.mark.few(kind=TELLING)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_random_arrival(kind, place):
    """Prompts in chunks between steps, more requests than rows, some cancelled, some that begin as others did."""
    dice = random.Random(len(kind))
    first = [dice.randrange(3, VOCAB) for _ in range(100)]
    asked = []
    for i in range(9):
        n = dice.choice((1, 7, 16, 40, 70, 100))
        ids = first[:n] if i % 3 == 0 else [dice.randrange(3, VOCAB) for _ in range(n)]
        asked.append((ids, dice.choice((1, 5, 20, 40))))
    offload = OffloadConfig() if kind == "qwen3_next" else None
    with Engine(new_model(kind).to(place), None, TokenConfig(**FULL), offload, serving=SERVING) as engine:
        handles = []
        for i, (ids, tokens) in enumerate(asked):
            handles.append(engine.submit(ids, greedy(tokens)))
            if i in (2, 5):  # while it is read, waits or decodes
                cancelled = engine.submit(ids[::-1], greedy(30))
                time.sleep(dice.random() * 0.2)
                cancelled.cancel()
        results = [handle.result(120) for handle in handles]
        quiet(engine)
    for (ids, tokens), result in zip(asked, results):
        assert list(result.token_ids) == alone(kind, ids, tokens, place)


@pytest.mark.few(kind=TELLING)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes(kind, place):
    """A prompt begins where an earlier one's windows and states were kept, the last border of its full blocks."""
    dice = random.Random(1)
    first, other = ([dice.randrange(3, VOCAB) for _ in range(100)] for _ in range(2))
    asked = [first, first, first[:85] + other, other, first[:70] + other[:20], first[:97], other + first[:30]]
    cached = [0, 80, 80, 0, 0, 64, 80]  # the window and room for drafts are not in full blocks yet
    with Engine(new_model(kind).to(place), None, TokenConfig(**FULL), serving=replace(SERVING, max_rows=8)) as engine:
        results = [engine.submit(ids[:150], greedy(8)).result(120) for ids in asked]
        quiet(engine)
    for ids, result in zip(asked, results):
        assert list(result.token_ids) == alone(kind, ids[:150], 8, place)
    assert [result.cached_tokens for result in results] == cached


def test_snapshots_are_few():
    """As many as rows: those that were used longest ago go."""
    dice = random.Random(2)
    prompts = [[dice.randrange(3, VOCAB) for _ in range(60)] for _ in range(5)]
    with Engine(new_model("lfm2"), None, TokenConfig(**FULL), serving=SERVING) as engine:
        for ids in prompts:
            assert engine.submit(ids, greedy(1)).result(60).cached_tokens == 0
        again = [
            engine.submit(ids, greedy(1)).result(60).cached_tokens for ids in (*prompts[2:], prompts[0], prompts[4])
        ]
        blocks = inside(engine).loop.blocks.index._blocks.values()
        assert sum(block.held is not None for block in blocks) == SERVING.max_rows
        quiet(engine)
    assert again == [32, 32, 32, 0, 32]
