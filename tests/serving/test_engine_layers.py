"""Engines over models with windows, chunks and states: requests get the tokens of generate() alone."""

from __future__ import annotations

import random
import time

import pytest
import torch
from engines import greedy, quiet
from layer_kinds import CHUNKS, FULL, STATES, TELLING, WINDOWS, new_model, plain
from models import VOCAB

from hf_sparsekv import Engine, OffloadConfig, ServingConfig, TokenConfig

KINDS = tuple(kind for kind in (*STATES, *CHUNKS, *WINDOWS) if kind != "jamba")  # its prompts are read at once
SERVING = ServingConfig(max_rows=3, max_length=160, chunk=32, prefill_ms=0.5)
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NO_PREFIXES = "ignore:.*keep a window or a state"


def alone(kind: str, ids: list[int], tokens: int, place: str) -> list[int]:
    model = plain(kind) if place == "cpu" else new_model(kind).to(place)
    given = torch.tensor([ids], device=place)
    go = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    return model.generate(given, attention_mask=torch.ones_like(given), **go)[0, len(ids) :].tolist()


@pytest.mark.few(kind=TELLING)
@pytest.mark.filterwarnings(NO_PREFIXES)
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
        assert result.cached_tokens == 0  # a prefix would need states that no block holds
