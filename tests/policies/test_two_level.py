"""Sparse decode steps against an independent oracle: the same logits, step by step."""

from __future__ import annotations

import re

import pytest
import torch
from caches import TIGHT, two_level
from models import build, model, prompt
from oracle import TOLERANCE, Oracle, Race

from hf_sparsekv import OffloadConfig, TokenConfig
from hf_sparsekv_config.tokens import level

STEPS = 24  # blocks of 16 become full at 132 and 148


class TwoLevelRace(Race):
    oracle_type = Oracle

    def __init__(self, name: str, offload: bool, captured: bool = False, **config) -> None:
        ours = two_level(offload, **config)
        of = level(ours.config)
        super().__init__(
            ours, self.oracle_type(ours.config, bool(ours.config.lag) and of != "token", of), name, captured
        )


def dense_logits(name: str, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(name, "sdpa")(ids).logits[:, -1]


DEFAULT = {"level": "auto", "lag": False, "num_blocks": None}  # of two-level selection's choices
CASES = {
    "two_level": (True, {}),
    "two_level-nolag": (True, {"lag": False}),
    "two_level-device-lag": (False, {"lag": True}),
    "default-host": (True, DEFAULT),
    "default-device": (False, DEFAULT),
    "two_level-mean": (False, {"token_reduce": "mean"}),
    "two_level-few-channels": (False, {"label_channels": 2}),
    "two_level-wide": (True, {"block_size": 32, "window": 5, "max_draft": 0, "sinks": 9}),
    "two_level-dense1": (False, {"dense_layers": 1}),
    "block": (False, {"level": "block"}),
    "block-lag": (True, {"level": "block"}),
    "block-mean": (False, {"level": "block", "token_reduce": "mean", "sinks": 0}),
    "token": (True, {"level": "token"}),
    "token-mean": (False, {"level": "token", "token_reduce": "mean"}),
}
ODD_BUDGET = {"token_budget": 24, "num_blocks": 3}


UNPADDED = ("two_level", "default-host", "default-device", "block-lag", "token-mean")
ROWS = [*((case, (0, 61)) for case in CASES), *((case, None) for case in UNPADDED)]


@pytest.mark.few
@pytest.mark.parametrize(("case", "pads"), ROWS)
def test_logits_follow_the_oracle(case, pads):
    offload, config = CASES[case]
    race = TwoLevelRace("llama", offload, **{**TIGHT, **config})
    assert race.read(130, pads) < TOLERANCE  # prefill is exact
    assert race.run(STEPS) < TOLERANCE
    stats = race.ours.stats()
    assert stats.sparse_calls > 0
    assert stats.attended_tokens == race.oracle.attended
    assert stats.decode_steps == STEPS


@pytest.mark.few(name=("llama-mqa", "qwen3"))
@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen3", "phi3"])
def test_other_head_groups(name):
    race = TwoLevelRace(name, True, **ODD_BUDGET)
    race.read(120, (0, 9), seed=3)
    assert race.run(24) < TOLERANCE


@pytest.mark.few
@pytest.mark.parametrize("pool", [None, 30_000, 0])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_tokens_are_chosen_among_all_wherever_they_are(captured, pool):
    """Tokens are copied behind a step; the next one reads in place what it chooses beyond them."""
    offload = OffloadConfig(device_pool=pool)
    race = TwoLevelRace("llama", offload, captured, **{**TIGHT, **DEFAULT, "level": "token", "num_blocks": 3})
    race.feed(prompt(2, 130, (0, 40))["input_ids"], prompt(2, 130, (0, 40))["attention_mask"])
    assert race.run(36) < TOLERANCE
    stats = race.ours.stats()
    assert stats.attended_tokens == race.oracle.attended
    assert (stats.hit_rate is None) == (pool == 0)
    paged = [layer.policy.tokens is not None for layer in race.ours.sparse_layers]
    assert paged == [pool != 0] * 2
    chosen = 2 * 36 * 2 * race.ours.sparse_layers[0].store.heads * TIGHT["token_budget"]
    read_in_place = sum(int(layer.store.counters.from_host.sum()) for layer in race.ours.sparse_layers)
    assert read_in_place == chosen if pool == 0 else 0 < read_in_place < chosen
    assert not captured or race.runner.replays == 36


def test_levels():
    """What the default comes to, and what asks for blocks."""
    asks = ({"num_blocks": 64}, {"lag": True})
    assert level(TokenConfig()) == "token"
    assert {level(TokenConfig(**one)) for one in asks} == {"two_level"}
    for of in ("two_level", "block", "token"):
        assert {level(TokenConfig(level=of, **one)) for one in ({}, {"lag": True})} == {of}
    kept = {True: {"codes", "qparams"}, False: {"bounds"}}
    for settings in ({}, {"level": "block"}, {"num_blocks": 4}, {"level": "token"}):
        cache = two_level(True, **{**DEFAULT, "token_budget": 32, **settings})
        with torch.no_grad():
            model("llama")(prompt(1, 130)["input_ids"], past_key_values=cache)
        fields = set(cache.sparse_layers[0].store.pool.fields)
        assert kept[True] <= fields or settings.get("level") == "block"
        assert ("bounds" in fields) == (settings in ({"level": "block"}, {"num_blocks": 4}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"level": "tokens"},
            "level must be 'auto', 'two_level', 'block' or 'token' (did you mean 'token'?), got 'tokens'",
        ),
        ({"num_blocks": 4}, "num_blocks=4 blocks of 64 tokens hold 256 tokens, fewer than token_budget=1024"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenConfig(**settings)


def test_selection_changes_the_result():
    """Otherwise the tests above would pass for dense attention too."""
    race = TwoLevelRace("llama", True, **TIGHT)
    ids = prompt(1, 131)["input_ids"]
    race.feed(ids[:, :130])
    ours, _ = race.logits(ids[:, 130:])
    assert (ours - dense_logits("llama", ids)).abs().max() > 100 * TOLERANCE


def test_lag_changes_the_choice():
    results = []
    for lag in (True, False):
        race = TwoLevelRace("llama", False, lag=lag, **TIGHT)
        race.feed(prompt(1, 130)["input_ids"])
        race.run(3)
        results.append(race.logits(torch.tensor([[5]]))[0])
    assert (results[0] - results[1]).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("level", ["two_level", "block", "token"])
def test_short_prompt_long_answer(level):
    """Dense until there is enough to calibrate on, sparse soon after, and right at every step between."""
    race = TwoLevelRace("llama", True, level=level, token_budget=16, num_blocks=2)
    race.feed(prompt(2, 7, (0, 3))["input_ids"], prompt(2, 7, (0, 3))["attention_mask"])
    assert race.run(85) < TOLERANCE
    stats = race.ours.stats()
    assert stats.dense_calls > 0 and stats.sparse_calls > 0


@pytest.mark.parametrize("after", [12, 110], ids=["before-calibration", "after-calibration"])
def test_rows_are_regrouped(after):
    """Beams: rows change places, are copied and dropped, then go different ways."""
    race = TwoLevelRace("llama", True, **TIGHT)
    start = prompt(3, after, (0, 2, 7))
    race.feed(start["input_ids"], start["attention_mask"])
    for step, index in enumerate(([2, 0, 0], [1, 1, 2], [0, 2, 1, 0], [3, 1])):
        assert race.run(20, seed=step) < TOLERANCE
        race.map_rows(torch.tensor(index))
    assert race.run(20, seed=9) < TOLERANCE
    assert race.ours.stats().attended_tokens == race.oracle.attended


@pytest.mark.few
@pytest.mark.parametrize("lag", [True, False])
@pytest.mark.parametrize("level", ["two_level", "block", "token"])
def test_second_turn_crop_and_rows(level, lag):
    race = TwoLevelRace("llama", lag, level=level, lag=lag, **TIGHT)
    assert race.turns((4, 20, 90, 2)) < TOLERANCE
    assert race.ours.stats().attended_tokens == race.oracle.attended


def test_bf16_selection_is_close():
    """The same choice from bf16 keys: labels and bounds are those of the keys that are stored."""
    ours = two_level(True, **TIGHT)
    ids = prompt(1, 170)["input_ids"]
    low = build("llama", "sparsekv").to(torch.bfloat16)
    high = two_level(True, **TIGHT)
    with torch.no_grad():
        low(ids[:, :130], past_key_values=ours)
        model("llama")(ids[:, :130], past_key_values=high)
        agree = 0
        for i in range(130, 170):
            a = low(ids[:, i : i + 1], past_key_values=ours).logits.float()
            b = model("llama")(ids[:, i : i + 1], past_key_values=high).logits
            agree += bool((a.argmax(-1) == b.argmax(-1)).all())
    assert ours.stats().attended_tokens == high.stats().attended_tokens
    assert agree >= 30, f"bf16 and fp32 agree on {agree} of 40 next tokens"
