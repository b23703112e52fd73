"""Sinks and the recent window against an oracle; what lies between them is kept, and read by nobody but a prompt."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from caches import CACHES, SMALL
from models import model, prompt, reference
from oracle import TOLERANCE, Oracle, Race
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, SparseCache, SparseConfig, StreamingConfig, TokenConfig


class StreamingOracle(Oracle):
    """Columns of a decode step: the first real tokens, and all that is not in a full block yet."""

    def __init__(self, config: StreamingConfig) -> None:
        shared = {field.name: getattr(config, field.name) for field in fields(SparseConfig)}
        super().__init__(TokenConfig(level="block", **shared), lag=False)  # whole blocks: nothing to calibrate

    def decode_columns(self, state, layer, row, head, group, query, key) -> list[int]:
        real = self.real(row, key.shape[2])
        if layer < self.config.dense_layers:
            return real
        sinks, near, _ = self.parts(state, row, real)
        return sorted({*sinks, *near})


def race(offload: bool = False, captured: bool = False, **changes) -> Race:
    cache = CACHES["streaming-host" if offload else "streaming"](**changes)
    return Race(cache, StreamingOracle(cache.config), captured=captured)


@pytest.mark.pairwise
@pytest.mark.parametrize("changes", [{}, {"sinks": 0, "window": 1}, {"dense_layers": 1, "block_size": 32}], ids=str)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_steps(offload, captured, changes):
    one = race(offload, captured, **changes)
    one.feed(*prompt(2, 90, (0, 25)).values())
    assert one.run(24) < TOLERANCE
    assert one.ours.stats().attended_tokens == one.oracle.attended
    if captured:
        assert one.runner.replays > 20


def test_prompts_rows_and_crops():
    one = race()
    one.feed(*prompt(2, 70, (0, 11)).values())
    one.run(5)
    one.feed(*prompt(2, 40, (3, 0), seed=1).values())  # of several tokens: attends to everything
    assert one.run(20) < TOLERANCE
    one.map_rows(torch.tensor([1, 1, 0]))
    assert one.run(5) < TOLERANCE
    for remove in (3, 30):  # within max_draft, and blocks taken back
        one.crop(remove)
        assert one.run(12) < TOLERANCE


def test_a_window_that_holds_everything_is_full_attention():
    inputs, go = prompt(2, 90, (0, 20)), {"do_sample": False, "max_new_tokens": 40}
    expected = reference("llama").generate(**inputs, **go)
    cache = SparseCache(StreamingConfig(window=200, dense_layers=0))
    assert torch.equal(model("llama").generate(**inputs, past_key_values=cache, **go), expected)
    assert cache.stats().sparse_calls == 0


def test_what_is_between_stays_on_the_host_and_comes_back():
    """No step reads a stored block; a later prompt attends to all of them."""
    cache, stock = SparseCache(StreamingConfig(**_small()), OffloadConfig()), DynamicCache()
    ids, more = prompt(1, 150)["input_ids"], prompt(1, 30, seed=1)["input_ids"]
    ours, plain = model("llama"), reference("llama")
    with torch.no_grad():
        ours(ids, past_key_values=cache)
        plain(ids, past_key_values=stock)
        for token in (5, 6, 7):
            ours(torch.tensor([[token]]), past_key_values=cache)
        assert cache.stats().host_to_device_bytes == 0
        assert cache.memory_bytes()["host"] > 0
        cache.crop(-3)
        found = ours(more, past_key_values=cache).logits
        expected = plain(more, past_key_values=stock).logits
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)


def _small() -> dict:
    return {name: value for name, value in SMALL.items() if name != "calibration_tokens"}
