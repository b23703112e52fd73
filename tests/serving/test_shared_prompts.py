"""A request's tokens do not depend on what an engine has kept of other requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from caches import SMALL
from engines import SERVING, greedy, ids_of, quiet
from models import build

from hf_sparsekv import (
    Engine,
    OffloadConfig,
    PredictiveConfig,
    ProgressiveConfig,
    StreamingConfig,
    TokenConfig,
)
from hf_sparsekv.serving.prefix import block_keys

CALIBRATION = 64  # four blocks
COMMON = {**SMALL, "dense_below": 0, "calibration_tokens": CALIBRATION}
BUDGET = {**COMMON, "token_budget": 32}
BLOCKS = {"level": "two_level", "num_blocks": 3, "tail": None}
PLAIN = {name: value for name, value in SMALL.items() if name != "calibration_tokens"}

MADE = {
    "tokens": (TokenConfig(**BUDGET), None),
    "tokens-host": (TokenConfig(**BUDGET), OffloadConfig()),
    "two-levels": (TokenConfig(**BUDGET, **BLOCKS), None),
    "progressive": (ProgressiveConfig(**COMMON, mass=0.7, min_tokens=16), None),
    "ahead": (PredictiveConfig(**BUDGET, predictor="layer:in_delta"), None),
    "streaming": (StreamingConfig(**{**PLAIN, "dense_below": None}), None),
}
SHARED = {16: 0, 63: 0, 64: 64, 100: 96}  # tokens that two prompts begin with: those found again


@contextmanager
def engine_of(name: str, **changes):
    """An engine of one of these methods."""
    config, offload = MADE[name]
    with Engine(build("llama", "sdpa"), None, config, offload, replace(SERVING, **changes)) as engine:
        yield engine


def ask(engine: Engine, ids: Sequence[int], tokens: int = 24) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were found in the prefix cache."""
    output = engine.submit(ids, greedy(tokens)).result(60)
    return list(output.token_ids), output.cached_tokens


@pytest.mark.few(name=("tokens-host", "streaming"))
@pytest.mark.parametrize("name", MADE)
def test_answers_are_those_without_a_prefix_cache(name):
    """Label channels are calibrated on the first 64 tokens: nothing is shared by prompts that differ in these."""
    prompts = {n: ids_of(n, n) + ids_of(150 - n, 1000 + n) for n in SHARED}
    turns = {}
    with engine_of(name, prefix_cache=False) as engine:
        alone = {n: ask(engine, ids)[0] for n, ids in prompts.items()}
        for n in (16, 100):
            turns[n] = [*prompts[n], *alone[n], *ids_of(20, 3000 + n)]
        then = {n: ask(engine, ids)[0] for n, ids in turns.items()}
    with engine_of(name) as engine:
        for n in SHARED:
            ask(engine, ids_of(n, n) + ids_of(140 - n, 2000 + n), 1)
        found = {n: ask(engine, ids) for n, ids in prompts.items()}
        assert {n: tokens for n, (tokens, _) in found.items()} == alone
        whole = {n: n // 16 * 16 for n in SHARED}  # without labels every common block is
        assert {n: cached for n, (_, cached) in found.items()} == (whole if name == "streaming" else SHARED)
        # A prompt that found nothing is kept itself: the next turn is read on from there.
        found = {n: ask(engine, ids) for n, ids in turns.items()}
        assert {n: tokens for n, (tokens, _) in found.items()} == then
        assert min(cached for _, cached in found.values()) >= 128
        quiet(engine)


@pytest.mark.few(shared=(40,))
@pytest.mark.parametrize("shared", [16, 40])
def test_short_prompts_share_nothing_before_there_is_enough_to_calibrate_on(shared):
    """Their own first 64 tokens are those of prompt and answer."""
    one, other = (ids_of(shared, 1) + ids_of(50 - shared, seed) for seed in (2, 3))
    with engine_of("tokens", prefix_cache=False) as engine:
        alone = ask(engine, other, 120)[0]
        turn = [*other, *alone, *ids_of(20, 4)]
        then = ask(engine, turn)[0]
    with engine_of("tokens") as engine:
        ask(engine, one, 120)
        assert ask(engine, other, 120) == (alone, 0)
        found, cached = ask(engine, turn)
        assert cached > 100, "once calibrated, it is kept"
        assert found == then, "with the channels of enough tokens"
        quiet(engine)


@pytest.mark.parametrize(("budget", "cached"), [(32, 0), (512, 144)])
def test_where_no_row_is_long_enough_to_calibrate_on(budget, cached):
    """Channels are then of the whole prompt: they matter to a step that chooses, and to no other."""
    config = TokenConfig(**{**BUDGET, "calibration_tokens": 512, "token_budget": budget})
    one, other = (ids_of(150, 1) + ids_of(50, seed) for seed in (2, 3))
    answers = []
    for keeps in (False, True):
        with Engine(build("llama", "sdpa"), None, config, None, replace(SERVING, prefix_cache=keeps)) as engine:
            ask(engine, one)
            answers.append(ask(engine, other))
            quiet(engine)
    assert answers == [(answers[0][0], 0), (answers[0][0], cached)]


def test_a_chunk_may_be_of_any_length():
    """Calibration reads the same tokens however a prompt is cut."""
    ids, answers = ids_of(200, 5), []
    for chunk in (33, 64, 100, 200):
        with engine_of("tokens", chunk=chunk) as engine:
            answers.append(ask(engine, ids)[0])
    assert all(answer == answers[0] for answer in answers)


def test_latents_are_calibrated_on_the_same_tokens():
    """Of a long chunk over latents a sample is calibrated on elsewhere, here no token after the first 64."""
    answers = []
    one, other = (ids_of(70, 1) + ids_of(230, seed) for seed in (2, 3))
    for keeps in (False, True):
        net, serving = build("deepseek-v3", "sdpa"), replace(SERVING, chunk=300, prefix_cache=keeps)
        with Engine(net, None, TokenConfig(**BUDGET), None, serving) as engine:
            ask(engine, one)
            answers.append(ask(engine, other))
    assert answers == [(answers[0][0], 0), (answers[0][0], 64)]


def test_keys_depend_on_what_channels_depend_on():
    tokens = list(range(40))
    others = [*tokens[:20], 99, *tokens[21:]]
    assert block_keys(tokens, 4, 5) == block_keys(others, 4, 5)
    assert not set(block_keys(tokens, 4, 5, alike=21)) & set(block_keys(others, 4, 5, alike=21))
    assert block_keys(tokens, 4, 5, alike=20) == block_keys(others, 4, 5, alike=20)
    assert block_keys(tokens[:19], 4, 4, alike=20) == []
    whole = block_keys(tokens, 4, 9, alike=20)
    assert whole[:3] + block_keys(tokens, 4, 9, whole[:3], alike=20) == whole
