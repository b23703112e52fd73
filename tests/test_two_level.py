"""Sparse decode steps against an independent oracle: the same logits, step by step."""

from __future__ import annotations

import pytest
import torch
from caches import TIGHT, two_level
from models import build, model, prompt
from oracle import NAME, Oracle, asked
from transformers import DynamicCache

STEPS = 40
TOLERANCE = 2e-3  # of logits whose spread is about 10


class Race:
    """One model twice, with our cache and with the oracle over a stock cache, fed the same tokens."""

    def __init__(self, name: str, offload: bool, model_config=None, **config) -> None:
        self.ours = two_level(offload, **config)
        lag = self.ours.config.lag
        lag = offload if lag is None else lag
        self.oracle = Oracle(self.ours.config, lag and self.ours.config.level != "token")
        self.stock = DynamicCache()
        self.model, self.plain = model(name), model(name, NAME)
        self.mask = None

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the last column, ours and the oracle's. ``mask`` covers the new columns."""
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = mask if self.mask is None else torch.cat((self.mask, mask), dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        self.oracle.valid = self.mask.bool()
        common = {"position_ids": positions, "logits_to_keep": 1}
        ours = self.model(ids, attention_mask=self.mask, past_key_values=self.ours, **common).logits[:, -1]
        with asked(self.oracle):
            theirs = self.plain(ids, past_key_values=self.stock, **common).logits[:, -1]
        return ours, theirs

    def map_rows(self, index: torch.Tensor) -> None:
        self.mask = self.mask[index]
        self.ours.reorder_cache(index)
        self.stock.reorder_cache(index)
        self.oracle.map_rows(index)

    def crop(self, remove: int) -> None:
        self.mask = self.mask[:, :-remove]
        self.ours.crop(-remove)
        self.stock.crop(-remove)
        self.oracle.crop(self.mask.shape[1])

    def run(self, steps: int, seed: int = 7) -> float:
        """Feed random tokens one by one; the largest difference of any logit."""
        tokens = prompt(self.mask.shape[0], steps, seed=seed)["input_ids"]
        worst = 0.0
        for i in range(steps):
            ours, theirs = self.feed(tokens[:, i : i + 1])
            worst = max(worst, float((ours - theirs).abs().max()))
        return worst


def dense_logits(name: str, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(name, "sdpa")(ids).logits[:, -1]


CASES = {
    "two_level": (True, {}),
    "two_level-nolag": (True, {"lag": False}),
    "two_level-device-lag": (False, {"lag": True}),
    "two_level-mean": (False, {"block_reduce": "mean", "token_reduce": "mean"}),
    "two_level-parts": (True, {"bound_tokens": 4}),
    "two_level-parts-mean": (False, {"bound_tokens": 8, "block_reduce": "mean"}),
    "two_level-cuboid": (True, {"metadata": "cuboid_mean"}),
    "block-mean-keys": (False, {"level": "block", "metadata": "mean", "bound_tokens": 8}),
    "two_level-labels16": (True, {"label_bits": 16}),
    "two_level-mean-importance": (False, {"channel_importance": "mean", "label_channels": 2}),
    "two_level-wide": (True, {"block_size": 32, "window": 5, "max_draft": 0, "sinks": 9}),
    "two_level-dense1": (False, {"dense_layers": 1}),
    "block": (False, {"level": "block"}),
    "block-lag": (True, {"level": "block"}),
    "block-mean": (False, {"level": "block", "block_reduce": "mean", "sinks": 0}),
    "token": (True, {"level": "token"}),
    "token-mean": (False, {"level": "token", "token_reduce": "mean"}),
}
ODD_BUDGET = {"token_budget": 24, "num_blocks": 3}


@pytest.mark.parametrize("pads", [None, (5, 61)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_logits_follow_the_oracle(case, pads):
    offload, config = CASES[case]
    race = Race("llama", offload, **{**TIGHT, **config})
    start = prompt(2 if pads else 1, 130, pads)
    ours, theirs = race.feed(start["input_ids"], start["attention_mask"])
    assert (ours - theirs).abs().max() < TOLERANCE  # prefill is exact
    assert race.run(STEPS) < TOLERANCE
    stats = race.ours.stats()
    assert stats.sparse_calls > 0
    assert stats.attended_tokens == race.oracle.attended
    assert stats.decode_steps == STEPS


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen3", "phi3"])
def test_other_head_groups(name):
    race = Race(name, True, **ODD_BUDGET)
    start = prompt(2, 120, (0, 9), seed=3)
    race.feed(start["input_ids"], start["attention_mask"])
    assert race.run(24) < TOLERANCE


def test_selection_changes_the_result():
    """Otherwise the tests above would pass for dense attention too."""
    race = Race("llama", True, **TIGHT)
    ids = prompt(1, 131)["input_ids"]
    race.feed(ids[:, :130])
    ours, _ = race.feed(ids[:, 130:])
    assert (ours - dense_logits("llama", ids)).abs().max() > 100 * TOLERANCE


def test_lag_changes_the_choice():
    results = []
    for lag in (True, False):
        race = Race("llama", False, lag=lag, **TIGHT)
        race.feed(prompt(1, 130)["input_ids"])
        race.run(3)
        results.append(race.feed(torch.tensor([[5]]))[0])
    assert (results[0] - results[1]).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("level", ["two_level", "block", "token"])
def test_short_prompt_long_answer(level):
    """Dense until there is enough to calibrate on, sparse soon after, and right at every step between."""
    race = Race("llama", True, level=level, token_budget=16, num_blocks=2)
    race.feed(prompt(2, 7, (0, 3))["input_ids"], prompt(2, 7, (0, 3))["attention_mask"])
    assert race.run(110) < TOLERANCE
    stats = race.ours.stats()
    assert stats.dense_calls > 0 and stats.sparse_calls > 0


@pytest.mark.parametrize("offload", [True, False])
def test_chunked_prefill_and_padded_second_turn(offload):
    race = Race("llama", offload, **TIGHT)
    first = prompt(3, 100, (0, 5, 35))
    for lo in range(0, 100, 37):
        chunk = slice(lo, min(lo + 37, 100))
        ours, theirs = race.feed(first["input_ids"][:, chunk], first["attention_mask"][:, chunk])
        assert (ours - theirs).abs().max() < TOLERANCE
    assert race.run(10) < TOLERANCE
    second = prompt(3, 40, (17, 0, 39), seed=1)  # leaves holes in the middle of the rows
    ours, theirs = race.feed(second["input_ids"], second["attention_mask"])
    assert (ours - theirs).abs().max() < TOLERANCE
    assert race.run(30, seed=2) < TOLERANCE
    assert race.ours.stats().attended_tokens == race.oracle.attended


@pytest.mark.parametrize("after", [12, 110], ids=["before-calibration", "after-calibration"])
def test_rows_are_regrouped(after):
    """What beams do: rows change places, are copied and dropped, then go different ways."""
    race = Race("llama", True, **TIGHT)
    start = prompt(3, after, (0, 2, 7))
    race.feed(start["input_ids"], start["attention_mask"])
    for step, index in enumerate(([2, 0, 0], [1, 1, 2], [0, 2, 1, 0], [3, 1])):
        assert race.run(20, seed=step) < TOLERANCE
        race.map_rows(torch.tensor(index))
    assert race.run(20, seed=9) < TOLERANCE
    assert race.ours.stats().attended_tokens == race.oracle.attended


@pytest.mark.quick
@pytest.mark.parametrize("lag", [True, False])
@pytest.mark.parametrize("level", ["two_level", "block", "token"])
def test_crop(level, lag):
    """Shallow and deep, then single tokens: what is gone is neither attended to nor chosen."""
    race = Race("llama", lag, level=level, lag=lag, **TIGHT)
    start = prompt(2, 150, (0, 30))
    race.feed(start["input_ids"], start["attention_mask"])
    for seed, remove in enumerate((3, 4, 20, 60, 2)):
        assert race.run(12, seed=seed) < TOLERANCE
        race.crop(remove)
    assert race.run(40) < TOLERANCE


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
