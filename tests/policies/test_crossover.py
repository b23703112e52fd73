"""Dense below the crossover, sparse from there on: when it changes, what is counted, how it is captured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from caches import TIGHT, two_level
from captured import check, check_imitated, imitated, on_gpu
from models import build, model, prompt, reference
from oracle import TOLERANCE, Oracle
from test_two_level import CASES, ROWS, TwoLevelRace

from hf_sparsekv.policies import crossover

LAYERS = 2
TELLING = (  # of the cases: each level, with and without lag, on the host and on the device
    *("two_level", "two_level-device-lag", "two_level-nolag", "default-host", "default-device"),
    *("two_level-wide", "two_level-dense1", "block-lag", "block-mean-keys", "token"),
)


class DenseOracle(Oracle):
    """Attends to everything while the full blocks of all rows hold at most ``dense_below`` tokens."""

    def dense(self, full_blocks):
        return sum(full_blocks) * self.config.block_size <= self.config.dense_below

    def looks_ahead(self, full_blocks):
        return super().looks_ahead(full_blocks) and not self.dense(full_blocks)

    def decode_columns(self, state, layer, row, head, group, query, key):
        if self.dense(state.full_blocks):
            return self.real(row, key.shape[2])
        return super().decode_columns(state, layer, row, head, group, query, key)


class DenseRace(TwoLevelRace):
    oracle_type = DenseOracle


# ---------------------------------------------------------------------- steps


@pytest.mark.few(case=TELLING)
@pytest.mark.parametrize(("case", "pads"), ROWS)
def test_dense_up_to_the_number_then_as_the_oracle(case, pads):
    """Also the first sparse step, for which no blocks were chosen beforehand."""
    offload, config = CASES[case]
    config = {**TIGHT, **config}
    batch, size = 2 if pads else 1, config.get("block_size", 16)
    recent = config.get("window", 16) + config.get("max_draft", 4)
    lengths = [130 - pad for pad in pads or (0,)]

    def full(step: int) -> int:
        """Full blocks of all rows after so many steps."""
        return sum((n + step - recent) // size for n in lengths)

    last = full(0) + 1  # blocks of the last dense steps
    race = DenseRace("llama", offload, dense_below=last * size, **config)
    start = prompt(batch, 130, pads)
    race.feed(start["input_ids"], start["attention_mask"])
    dense = next(step for step in range(99) if full(step) > last)  # the last one seals the block that is too much
    sparse_layers = LAYERS - config.get("dense_layers", 0)
    assert race.run(dense) < TOLERANCE
    stats = race.ours.stats()
    assert (stats.sparse_calls, stats.crossover_calls) == (0, dense * sparse_layers)
    assert stats.attended_share == 1.0
    assert race.run(1, seed=1) < TOLERANCE
    # Without tokens' labels a step that no blocks were chosen for attends to everything once more.
    no_choice = race.ours.config.level == "block" and race.ours.config.lag
    assert race.ours.stats().sparse_calls == (0 if no_choice else sparse_layers)
    assert race.run(5, seed=2) < TOLERANCE
    stats = race.ours.stats()
    assert " of the layer calls were dense because that is as fast there (dense_below)" in str(stats)
    assert stats.crossover_calls == dense * sparse_layers
    assert stats.attended_tokens == race.oracle.attended
    assert stats.decode_steps == dense + 6


@pytest.mark.parametrize("lag", [True, False])
def test_a_number_for_rows_together(lag):
    """Twice the rows, half the tokens a row; one token less in the number, one block less."""
    steps = []
    for batch, number in ((1, 64), (2, 128), (2, 127), (4, 192)):
        cache = two_level(False, lag=lag, dense_below=number, **TIGHT)
        feed = prompt(batch, 60 + 45)["input_ids"]
        with torch.no_grad():
            model("llama")(feed[:, :60], past_key_values=cache)
            for i in range(45):
                model("llama")(feed[:, 60 + i : 61 + i], past_key_values=cache)
        steps.append(cache.stats().crossover_calls // LAYERS)
    fits = 2 * 16 + 16 + 20 - 60  # steps that are dense because the budget holds everything
    assert [fits + n for n in steps] == [last + 16 + 20 - 60 for last in (64, 64, 48, 48)]


@pytest.mark.parametrize(("number", "offload"), [(None, False), (0, False), ("auto", False), ("auto", True)])
def test_never(number, offload, monkeypatch):
    """``"auto"`` without a GPU reads no table."""
    monkeypatch.setattr(crossover, "_read", lambda path: pytest.fail("nothing is to be read"))
    cache = two_level(offload, dense_below=number, **TIGHT)
    model("llama").generate(**prompt(1, 130), past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert cache.stats().sparse_calls == 4 * LAYERS


def test_the_limit_is_that_of_the_layers_own_heads(monkeypatch):
    """Its bytes and its query heads are what the table is asked with."""
    asked = []
    monkeypatch.setattr(crossover, "dense_tokens", lambda *given: asked.append(given) or 0)
    net, cache = model("llama"), two_level(False, level="auto", lag=False)
    net.generate(**prompt(2, 130), past_key_values=cache, max_new_tokens=3, do_sample=False)
    config, store = net.config, cache.layers[-1].store
    assert config.num_attention_heads > config.num_key_value_heads
    group = config.num_attention_heads // config.num_key_value_heads
    assert asked and {given[4:6] + given[7:] for given in asked} == {(2, store.heads * store.token_bytes, group)}


def test_the_same_text_as_full_attention_below():
    inputs, go = prompt(2, 130, (0, 30)), {"do_sample": False, "max_new_tokens": 60}
    expected = reference("llama").generate(**inputs, **go)
    below, beyond = two_level(False, dense_below=1000, **TIGHT), two_level(False, **TIGHT)
    assert torch.equal(model("llama").generate(**inputs, past_key_values=below, **go), expected)
    assert not torch.equal(model("llama").generate(**inputs, past_key_values=beyond, **go), expected)
    assert "attended to all of them, which is as fast at this length (dense_below), read" in str(below.stats())
    assert "dense_below" not in str(beyond.stats())


def test_no_block_is_chosen_in_dense_steps():
    cache = two_level(False, lag=True, dense_below=112, **TIGHT)
    feed = prompt(1, 150)["input_ids"]
    with torch.no_grad():
        model("llama")(feed[:, :130], past_key_values=cache)
        for column in range(131, 151):
            before = cache.stats().index_bytes_read
            model("llama")(feed[:, column - 1 : column], past_key_values=cache)
            read = cache.stats().index_bytes_read - before
            # The step with 148 columns seals the eighth block; the next one is sparse, and looks ahead.
            assert (read > 0) == (column > 148)
            if column == 149:
                labels = 8 * 16 * (16 // 2 + 4)  # eight bytes and two numbers for the 16 channels of each token
                assert read == LAYERS * 2 * (8 * 2 * 16 * 4 + labels)  # beside 8 pairs of bounds, 2 heads, float32
    assert all(layer.policy.chosen for layer in cache.sparse_layers)


@pytest.mark.parametrize(("level", "lag"), [("two_level", True), ("block", False)])
def test_crop_and_second_turn(level, lag):
    """Back below and up again, one by one and many at once."""
    race = DenseRace("llama", lag, level=level, lag=lag, dense_below=2 * 112, **TIGHT)
    race.read(130, (0, 30))
    assert race.run(30) < TOLERANCE
    for seed, remove in enumerate((2, 60)):
        race.crop(remove)
        assert race.run(35, seed=seed) < TOLERANCE
    assert race.ours.stats().crossover_calls > 40, "after the second crop, too"
    race.crop(60)
    assert race.run(3, seed=4) < TOLERANCE
    more = prompt(2, 45, (3, 0), seed=5)
    assert race.feed(more["input_ids"], more["attention_mask"]) < TOLERANCE
    assert race.run(20, seed=6) < TOLERANCE
    assert race.ours.stats().attended_tokens == race.oracle.attended


@pytest.mark.parametrize("lag", [True, False])
def test_rows_come_and_go(lag):
    """One row lies below, three beyond. Rows that come have no blocks chosen for them: one step takes all of them."""
    race = DenseRace("llama", False, lag=lag, dense_below=160, **TIGHT)
    start = prompt(3, 130, (0, 2, 7))
    race.feed(start["input_ids"], start["attention_mask"])
    assert race.run(5) < TOLERANCE
    assert race.ours.stats().crossover_calls == 0
    race.map_rows(torch.tensor([1]))
    assert race.run(5, seed=1) < TOLERANCE
    assert race.ours.stats().crossover_calls == 5 * LAYERS
    race.map_rows(torch.tensor([0, 0, 0]))
    for state in race.oracle.layers.values():
        state.last_query = None
    assert race.run(5, seed=2) < TOLERANCE
    assert race.ours.stats().crossover_calls == 5 * LAYERS


# ---------------------------------------------------------------------- captured


SIDES = [({"lag": True}, None), ({"lag": True}, (0, 40)), ({"lag": False}, (0, 40)), ({"level": "token"}, (0, 40))]


@pytest.mark.parametrize(("settings", "pads"), [*SIDES, ({"level": "block", "lag": True}, None)])
def test_one_graph_a_side(settings, pads):
    settings = {**TIGHT, **settings, "dense_below": 2 * 112, "max_length": 400}
    caches = two_level(False, **settings), two_level(False, **settings)
    _, runner = check_imitated(caches, prompt(2, 130, pads), 40)
    lengths = [130 - pad for pad in pads or (0, 0)]
    dense = next(step for step in range(99) if sum((n + step - 20) // 16 for n in lengths) > 14)
    assert caches[1].stats().crossover_calls == dense * LAYERS
    # With lag the first sparse step goes by no choice yet.
    assert (runner.replays, runner.captures) == (39, 3 if settings.get("lag") else 2)


def test_captured_rows_come_and_go():
    """Blocks that were chosen before a dense stretch are forgotten by replays, as by eager steps."""
    fast, runner = imitated()
    feed, found = prompt(3, 200)["input_ids"], []
    for one in (model("llama"), fast):
        cache, rows, at = two_level(False, lag=True, dense_below=160, **TIGHT), [], 130
        with torch.no_grad():
            one(feed[:, :at], past_key_values=cache)
            for batch, index in ((3, None), (1, [1]), (3, [0, 0, 0])):
                if index is not None:
                    cache.reorder_cache(torch.tensor(index))
                for _ in range(4):
                    rows.append(one(feed[:batch, at : at + 1], past_key_values=cache).logits.clone())
                    at += 1
        found.append((rows, cache.stats()))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0]))
    counted = [dataclasses.replace(stats, device_bytes=0) for _, stats in found]
    assert counted[0] == counted[1]
    assert runner.replays == 12


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["device", "device-lag", "device-block", "host"])
def test_captured_on_a_gpu(cache):
    check("llama", cache, on_gpu(1, 180), {**TIGHT, "dense_below": 224, "max_length": 400})
    check("llama", cache, on_gpu(2, 180, (0, 40)), {**TIGHT, "dense_below": 448, "max_length": 400})


@pytest.mark.gpu
def test_auto_on_a_gpu():
    """Short: all dense on a GPU that was measured or guessed, all sparse with blocks in host memory."""
    ours, inputs = build("llama", "sparsekv").cuda(), on_gpu(1, 180)
    known = crossover.dense_tokens("auto", "two_level", torch.device("cuda"), False, 1, 4096) > 0
    for offload in (False, True):
        cache = two_level(offload, dense_below="auto", **TIGHT)
        ours.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=9)
        assert cache.stats().crossover_calls == (8 * LAYERS if known and not offload else 0)
