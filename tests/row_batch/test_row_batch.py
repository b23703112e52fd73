"""Rows that come and go: each answers as a cache of its own would."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace

import model_list
import pytest
import torch
from caches import FULL, SMALL
from captured import imitated
from models import build, model, prompt, reference

from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    ProgressiveCache,
    ProgressiveConfig,
    QueryTap,
    SparseCache,
    StreamingConfig,
    TokenConfig,
)
from hf_sparsekv.kv.pool import BlockPool
from hf_sparsekv.kv.read_back import reindex

pytestmark = pytest.mark.filterwarnings("error:decode steps run eagerly")

ROWS, LENGTH = 4, 400
STEPS = int(os.environ.get("HF_SPARSEKV_RANDOM_STEPS", "400"))
NEAR = 2e-3  # of logits whose spread is about 10: sums over other shapes
CHOOSE = {**SMALL, "dense_below": 0}
BUDGET = {**CHOOSE, "token_budget": 32}
BLOCKS = {"level": "two_level", "num_blocks": 3, "tail": None}

MADE = {
    "tokens": lambda: OffloadedSparseCache(TokenConfig(**BUDGET), None),
    "tokens-host": lambda: OffloadedSparseCache(TokenConfig(**BUDGET)),
    "tokens-host-smallpool": lambda: OffloadedSparseCache(TokenConfig(**BUDGET), OffloadConfig(device_pool=30_000)),
    "blocks-host": lambda: OffloadedSparseCache(TokenConfig(**BUDGET, **BLOCKS)),
    "progressive-host": lambda: ProgressiveCache(ProgressiveConfig(**CHOOSE, mass=0.7, min_tokens=16), OffloadConfig()),
    "ahead": lambda: AsyncPredictiveCache(PredictiveConfig(**BUDGET, predictor="layer:in_delta")),
    "ahead-host": lambda: AsyncPredictiveCache(PredictiveConfig(**BUDGET, predictor="layer:in_delta"), OffloadConfig()),
    "ahead-need-host": lambda: AsyncPredictiveCache(PredictiveConfig(**CHOOSE, mass=0.7), OffloadConfig()),
    "streaming": lambda: SparseCache(StreamingConfig(block_size=16, sinks=4, window=32, dense_layers=0)),
}


COUNTS = (
    *("decode_steps", "sparse_calls", "dense_calls", "attended_tokens", "context_tokens", "blocks_chosen"),
    *("index_bytes_read", "host_to_device_bytes", "device_to_host_bytes", "needed", "found", "foreseen_calls"),
)


class Rows:
    """Rows of a cache, and for each a cache of its own that gets the same tokens."""

    def __init__(self, cache, net, alone, max_rows: int = ROWS) -> None:
        self.net, self.alone = net, alone
        self.rows = cache.rows(max_rows, LENGTH)
        self.own, self.next = {}, {}

    def prefill(self, n: int, seed: int):
        return self.rows.prefill(self.alone, prompt(1, n, seed=seed)["input_ids"], chunk=40)

    def join(self, first, room: int | None = None) -> int:
        own, token = copy.deepcopy(first.cache), int(first.logits.argmax())
        row = self.rows.join(first, room)
        self.own[row], self.next[row] = own, token
        return row

    def move(self, row: int) -> int:
        new = self.rows.move(row)
        self.own[new], self.next[new] = self.own.pop(row), self.next.pop(row)
        return new

    def step(self) -> float:
        """The largest difference of any row's logits from those of its own cache."""
        tokens = torch.tensor([self.next.get(row, 0) for row in range(self.rows.max_rows)])
        found = self.rows.step(self.net, tokens).clone()
        assert len(found) == self.rows.width
        worst = 0.0
        for row in self.rows.active:
            own = self.own[row]
            with torch.no_grad():
                expected = self.alone(tokens[row].view(1, 1), past_key_values=own).logits[0, -1]
            worst = max(worst, float((found[row] - expected).abs().max()))
            self.next[row] = int(expected.argmax())
        return worst


def made(name: str, captured: bool, **changes) -> Rows:
    alone = model("llama")
    net = alone
    if captured:
        net, _ = imitated()
    if name.startswith("ahead"):
        QueryTap(alone).install()
    cache = MADE[name]()
    return Rows(type(cache)(replace(cache.config, **changes), cache.offload_config), net, alone)


@pytest.mark.few(
    name=("tokens-host-smallpool", "blocks-host", "progressive-host", "ahead", "ahead-need-host", "streaming")
)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("name", MADE)
def test_rows_answer_as_caches_of_their_own(name, captured):
    it = made(name, captured)
    try:
        it.join(it.prefill(150, 1))
        assert max(it.step() for _ in range(4)) < NEAR
        second, third = it.prefill(90, 2), it.prefill(30, 3)  # two prompts between two steps
        assert it.step() < NEAR
        it.join(third)
        it.join(second)
        assert max(it.step() for _ in range(22)) < NEAR  # over a block that becomes full
        it.rows.hold(0)
        assert max(it.step() for _ in range(5)) < NEAR
        it.rows.leave(1)
        it.rows.resume(0)
        fourth = it.join(it.prefill(201, 4))
        assert fourth == 1
        assert max(it.step() for _ in range(9)) < NEAR
        it.rows.leave(0)
        assert it.move(2) == 0
        assert it.rows.rows == it.rows.active == (0, 1)
        assert max(it.step() for _ in range(6)) < NEAR
        new = it.rows.fork(0)
        it.own[new], it.next[new] = copy.deepcopy(it.own[0]), it.next[1]
        assert max(it.step() for _ in range(4)) < NEAR
        stats = it.rows.cache.stats()
        assert stats.decode_steps == 51 and stats.sparse_calls > 0
    finally:
        if name == "ahead":
            QueryTap(it.alone).remove()


def test_of_a_prompt_that_was_not_watched_nothing_is_added():
    """What the row before it has left is not its own."""
    net = build("llama", "sparsekv")
    it = Rows(MADE["ahead"](), net, net)
    with QueryTap(net):
        row = it.join(it.prefill(150, 1))
    added = [layer.policy.foresight.added for layer in it.rows.cache.sparse_layers[1:]]
    assert all(held[row].any() for held in added)
    it.rows.leave(row)
    assert it.join(it.prefill(90, 2)) == row
    assert not any(held[row].any() for held in added)


def test_a_step_planned_twice_alike_asks_no_layer_again_unless_one_is_incomplete():
    net, runner = imitated()
    it = Rows(MADE["tokens"](), net, model("llama"))
    it.join(it.prefill(150, 1))
    assert max(it.step() for _ in range(5)) < NEAR
    assert it.rows.cache in runner.steady
    for layer in it.rows.cache.sparse_layers:
        layer.broken = "KeyboardInterrupt after a captured step"
    with pytest.raises(RuntimeError, match="call reset"):
        it.step()


@pytest.mark.few(name=("tokens-host", "blocks-host", "progressive-host"))
@pytest.mark.parametrize("name", ["tokens", "tokens-host", "blocks-host", "progressive-host", "streaming"])
def test_a_prompt_that_begins_with_blocks_of_another_row(name):
    net = model("llama")
    it = Rows(MADE[name](), net, net)
    ids = prompt(1, 250, seed=1)["input_ids"]
    donor = it.join(it.rows.prefill(net, ids[:, :200], chunk=40))
    n = 9  # blocks of 16
    cache = it.rows.begin(it.rows.blocks(donor)[:n], it.rows.channels(donor))
    assert cache.get_seq_length() == n * 16
    own = MADE[name]()
    with torch.no_grad():
        for part in ids[:, : n * 16].split([32, 40, 40, 32], dim=1):  # channels of rows are of 32 tokens
            net(part, past_key_values=own)
        expected = net(ids[:, n * 16 :], past_key_values=own).logits[0, -1]
        found = net(ids[:, n * 16 :], past_key_values=cache).logits[0, -1]
    assert (found - expected).abs().max() < NEAR
    it.rows.leave(donor)
    it.rows.adopt(cache)
    row = it.rows.join(cache)
    it.own[row], it.next[row] = own, int(expected.argmax())
    assert max(it.step() for _ in range(30)) < NEAR


@pytest.mark.few(name=("tokens-host", "progressive-host", "ahead-host"))
@pytest.mark.parametrize("name", ["tokens", "tokens-host", "blocks-host", "progressive-host", "ahead-host"])
def test_a_row_gets_the_channels_of_more_tokens(name):
    """Its labels are those of a cache that was calibrated so; a row that shares its blocks keeps its own."""
    it = made(name, False)
    try:
        ids = prompt(1, 130, seed=1)["input_ids"]
        row = it.rows.join(it.rows.prefill(it.alone, ids[:, :20]))
        for token in ids[0, 20:].tolist():
            it.rows.step(it.alone, [token] * ROWS)
        other, layers = it.rows.fork(row), it.rows.cache.sparse_layers
        assert it.rows.calibration_tokens == 32
        before, labels = it.rows.channels(row), [labels_of(layer, row) for layer in layers]
        with torch.no_grad():
            read, own = it.rows.prefill(it.alone, ids[:, :32]), MADE[name]()
            it.alone(ids[:, :32], past_key_values=own)
        it.rows.calibrate(row, read)
        it.rows.drop(read)
        for one in (own, read):
            with pytest.raises(ValueError, match=r"calibrate\(\) takes what prefill\(\) of these rows gave"):
                it.rows.calibrate(row, one)
        after = it.rows.channels(row)
        differ = [not torch.equal(a.channels, b.channels) for a, b in zip(before, after)]
        anew = it.rows.begin(it.rows.blocks(row), after)
        for layer in anew.sparse_layers:
            reindex(layer.store, layer.policy)  # in blocks of its own
        for i, (layer, single) in enumerate(zip(layers, own.sparse_layers)):
            assert all(torch.equal(*pair) for pair in zip(after[i], single.policy.labels.of_row(0)))
            assert torch.equal(labels_of(layer, row), labels_of(anew.sparse_layers[i], 0))
            assert not torch.equal(labels_of(layer, row), labels[i]), "centres and spreads are of more tokens"
            assert torch.equal(labels_of(layer, other), labels[i])
            assert all(torch.equal(*pair) for pair in zip(layer.policy.labels.of_row(other), before[i]))
        assert any(differ)
        it.rows.drop(anew)
    finally:
        if name.startswith("ahead"):
            QueryTap(it.alone).remove()


@pytest.mark.parametrize(
    ("name", "calibrated", "whole"),
    [
        *[("tokens", 32, 32), ("blocks-host", 32, 32), ("progressive-host", 32, 16)],
        *[("ahead", 32, 32), ("ahead-need-host", 32, 64), ("streaming", 0, 0)],
    ],
)
def test_how_many_tokens_channels_are_of_and_from_where_on_they_matter(name, calibrated, whole):
    rows = MADE[name]().rows(ROWS, LENGTH)
    assert (rows.calibration_tokens, rows.whole_tokens) == (calibrated, whole)
    assert MADE[name]().rows(ROWS, 31).calibration_tokens == 0, "no row gets so long"
    if whole and not name.startswith("ahead"):
        config = MADE[name]().config
        codes = type(MADE[name]())(config, OffloadConfig(kv_dtype="int8"))
        assert codes.rows(ROWS, LENGTH).whole_tokens == 0, "as early as can be: keys are rounded"


def test_a_row_that_could_not_be_calibrated_holds_no_blocks_beside_its_own(monkeypatch):
    it = made("tokens", False)
    row = it.rows.join(it.rows.prefill(it.alone, prompt(1, 130, seed=1)["input_ids"]))
    ids, read = it.rows.cache.row_table.ids, it.rows.prefill(it.alone, prompt(1, 40, seed=2)["input_ids"])

    def fails(*args, **kwargs):
        raise MemoryError("no memory for labels")

    used = ids.used
    with monkeypatch.context() as patch:
        patch.setattr("hf_sparsekv.row_batch.sharing.reindex", fails)
        with pytest.raises(MemoryError, match="no memory for labels"):
            it.rows.calibrate(row, read)
    it.rows.drop(read)
    it.rows.leave(row)
    assert used > 0 and ids.used == 0


def labels_of(layer, row: int) -> torch.Tensor:
    """The codes of a row's full blocks."""
    n = layer.store.held.sealed[row]
    return layer.store.pool.fields["codes"][layer.store.block_table[row, :n].long()]


@pytest.mark.few(name=("tokens-host", "progressive-host", "ahead-need-host"))
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(
    "name", ["tokens-host", "blocks-host", "progressive-host", "ahead-host", "ahead-need-host", "streaming"]
)
def test_a_held_row_costs_nothing(name, captured):
    """Steps of others leave it alone, and read, bring and count as much as if it were not there."""
    one, two = made(name, captured), made(name, captured)
    try:
        for it in (one, two):
            it.join(it.prefill(180, 1))
        two.join(two.prefill(230, 2))
        assert max(two.step() for _ in range(6)) < NEAR
        two.rows.hold(1)
        assert max(one.step() for _ in range(8)) < NEAR and max(two.step() for _ in range(2)) < NEAR
        mine, before = row_state(two.rows.cache, 1), [it.rows.cache.stats() for it in (one, two)]
        for it in (one, two):
            assert max(it.step() for _ in range(20)) < NEAR  # over blocks that become full
        assert all(torch.equal(t, was) for t, was in zip(row_state(two.rows.cache, 1), mine, strict=True))
        alone, both = (it.rows.cache.stats().since(was) for it, was in zip((one, two), before))
        for count in COUNTS:
            assert getattr(both, count) == getattr(alone, count), count
        assert [w.walks for w in both.walks] == [w.walks for w in alone.walks]
        assert [w.tokens_used for w in both.walks] == [w.tokens_used for w in alone.walks]
        two.rows.resume(1)
        assert max(two.step() for _ in range(8)) < NEAR
    finally:
        if name.startswith("ahead"):
            for it in (one, two):
                QueryTap(it.alone).remove()


@pytest.mark.parametrize("name", ["progressive-host", "tokens-host"])
def test_steps_of_some_rows_tell_as_much(name):
    """Audits and marks of blocks come from captured steps of the first rows as from eager ones of all."""
    found = []
    for captured in (False, True):
        it = made(name, captured, **({"audit_every": 2} if name == "progressive-host" else {}))
        it.rows.cache.watch_blocks()
        for n in (180, 90):
            it.join(it.prefill(n, n))
        assert max(it.step() for _ in range(3)) < NEAR
        it.rows.hold(1)
        assert max(it.step() for _ in range(8)) < NEAR
        assert it.rows.width == 1 < ROWS
        found.append((it.rows.cache.stats(), it.rows.cache.chosen_blocks().share))
    (eager, marks), (replayed, again) = found
    same_walks(eager, replayed)
    torch.testing.assert_close(again, marks, equal_nan=True)
    if name == "progressive-host":
        assert eager.covered_mass == pytest.approx(replayed.covered_mass, rel=1e-4)
        assert 0.5 < replayed.covered_mass <= 1


def same_walks(*stats) -> None:
    one, other = ([(w.walks, w.tokens_used, w.audits) for w in each.walks] for each in stats)
    assert one == other


def row_state(cache, row: int) -> list[torch.Tensor]:
    """The bytes that the layers keep of one row, copied: places not written yet may hold NaN, which equals nothing."""
    held = []
    for layer in cache.sparse_layers:
        store, tokens = layer.store, getattr(layer.policy, "tokens", None)
        counters = store.counters
        held += [t[row] for t in (store.recent_kv, counters.attended, counters.from_host)]
        if tokens is not None:
            first, room = tokens.lanes[row].tolist()
            lane = slice(first, first + room)
            held += [t[:, lane] for t in (tokens.kv, tokens.columns, tokens.stamps)]
            held += [t[row] for t in (tokens.slots, tokens.now, tokens.lanes)]
    return [t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in held]


def test_prompts_between_two_steps_change_nothing():
    """Selections of prompts are their own: the rows that decode find all that they had."""
    feeds, found = prompt(1, 60, seed=9)["input_ids"][0].tolist(), []
    for between in (0, 2):
        rows = MADE["tokens-host-smallpool"]().rows(ROWS, LENGTH)
        rows.join(rows.prefill(model("llama"), prompt(1, 200, seed=1)["input_ids"]))
        logits = []
        for i, token in enumerate(feeds):
            for seed in range(between if i == 30 else 0):
                rows.join(rows.prefill(model("llama"), prompt(1, 220, seed=20 + seed)["input_ids"]))
            logits.append(rows.step(model("llama"), [token] * ROWS)[0].clone())
        found.append(torch.stack(logits))
    torch.testing.assert_close(*found, atol=NEAR, rtol=0)


@pytest.mark.few(captured=(True,))
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_anything_in_any_order(captured):
    """Joins, leaves, holds, forks and crops, with room for everything: the tokens are full attention's."""
    chance, plain = random.Random(5), reference("llama")
    net = imitated()[0] if captured else model("llama")
    cache = OffloadedSparseCache(TokenConfig(**{**SMALL, **FULL}))
    rows = cache.rows(ROWS, 160)
    texts: dict[int, list[int]] = {}  # of each row, the token to come included
    waiting = []
    done = steps = 0

    def check(row: int) -> None:
        """The text of a row since its prompt is full attention's."""
        text, begun = texts[row], starts[row]
        with torch.no_grad():
            logits = plain(torch.tensor([text[:-1]])).logits[0, begun - 1 :]
        for expected, token in zip(logits, text[begun:], strict=True):
            assert expected[token] >= expected.max() - NEAR

    starts: dict[int, int] = {}
    while steps < STEPS:
        free = ROWS - len(rows.rows)
        kind = chance.choices(
            ("step", "prefill", "join", "leave", "hold", "resume", "fork", "crop", "move"), (40, 3, 6, 2, 2, 4, 1, 2, 3)
        )[0]
        row = chance.choice(rows.rows) if rows.rows else None
        if kind == "step" and rows.active:
            if full := [r for r in rows.active if rows.lengths[r] >= 150]:
                check(full[0])
                rows.leave(full[0])
                continue
            tokens = [texts[r][-1] if r in rows.active else 0 for r in range(ROWS)]
            logits = rows.step(net, tokens)
            for r in rows.active:
                texts[r] = [*texts[r], int(logits[r].argmax())]
            steps += 1
        elif kind == "prefill" and len(waiting) < 3:
            ids = prompt(1, chance.randint(1, 90), seed=chance.randint(0, 999))["input_ids"]
            waiting.append((rows.prefill(model("llama"), ids, chunk=chance.choice((None, 33))), ids[0].tolist()))
        elif kind == "join" and waiting and free:
            first, text = waiting.pop(chance.randrange(len(waiting)))
            new = rows.join(first)
            texts[new], starts[new] = [*text, int(first.logits.argmax())], len(text)
        elif kind == "leave" and row is not None:
            check(row)
            rows.leave(row)
            done += 1
        elif kind == "hold" and row in rows.active:
            rows.hold(row)
        elif kind == "resume" and row is not None and row not in rows.active:
            rows.resume(row)
        elif kind == "fork" and row is not None and free:
            new = rows.fork(row)
            texts[new], starts[new] = list(texts[row]), starts[row]
        elif kind == "move" and row is not None and (before := set(range(row)) - set(rows.rows)):
            active = row in rows.active
            to = chance.choice([None, *set(range(ROWS)) - set(rows.rows)])
            new = rows.move(row, to)
            assert new == (min(before) if to is None else to)
            assert (new in rows.active) == active and row not in rows.rows
            texts[new], starts[new] = texts.pop(row), starts.pop(row)
        elif kind == "crop" and row is not None and rows.lengths[row] > starts[row] + 1:
            keep = chance.randint(max(starts[row], rows.lengths[row] - 45), rows.lengths[row] - 1)
            rows.crop(row, keep)
            texts[row] = texts[row][: keep + 1]  # the token behind it is fed next
    for row in rows.rows:
        check(row)
        rows.leave(row)
    assert done > STEPS // 60
    while waiting:
        rows.leave(rows.join(waiting.pop()[0]))
    assert cache.row_table.ids.used == 0, "blocks of nobody are left"


def test_each_width_is_captured_once():
    """Joins, leaves, holds and moves change how many rows a step runs; what was captured for as many serves again."""
    net, runner = imitated()
    rows = MADE["tokens-host"]().rows(20, LENGTH)
    assert rows.widths == (1, 2, 4, 8, 16, 20)
    first = {n: rows.prefill(model("llama"), prompt(1, 100 + n, seed=n)["input_ids"]) for n in range(11)}
    seen = []

    def steps(width: int) -> None:
        for _ in range(3):
            assert rows.step(net, [1] * 20).shape[0] == rows.width == width
        seen.append(width)
        assert runner.captures == len(set(seen))

    rows.join(first[0])
    steps(1)
    for n in range(1, 6):
        rows.join(first[n])
    steps(8)
    rows.hold(5)
    rows.hold(4)
    steps(4)
    rows.leave(3)
    rows.leave(0)
    steps(4)
    rows.resume(5)
    steps(8)
    assert rows.move(5) == 0
    steps(4)
    rows.leave(2)
    steps(2)
    assert rows.move(4) == 2
    rows.resume(2)
    steps(4)
    rows.leave(1)
    rows.leave(2)
    steps(1)
    for n in range(6, 11):
        rows.join(first[n])
    steps(8)


# ---------------------------------------------------------------------- refusals


def rows_of_two():
    rows = MADE["tokens"]().rows(2, 60)
    rows.join(rows.prefill(model("llama"), prompt(1, 50)["input_ids"]))
    return rows


def test_rows_longer_than_the_configuration_expects():
    """``max_length`` of the configuration is what storage is made for at first; rows() says how long they may be."""
    it = made("tokens", False, max_length=64)
    rows = [it.join(it.prefill(n, n)) for n in (300, 40)]
    assert max(it.step() for _ in range(20)) < NEAR
    assert [it.rows.lengths[row] for row in rows] == [320, 60]


def test_a_cropped_row_reads_back_what_it_lacks_and_no_more(monkeypatch):
    """Any contents of other rows, and few tokens: a row's window is refilled from its own last blocks."""
    it = made("tokens-host", False)
    rows = [it.join(it.prefill(n, n)) for n in (390, 40, 200)]
    it.step()
    blocks, plain = [], BlockPool.read

    def read(pool, ids, out):
        blocks.append(ids.shape[1])
        plain(pool, ids, out)

    monkeypatch.setattr(BlockPool, "read", read)
    before = it.rows.cache.joined_rows().sealed[rows[0]]
    it.rows.crop(rows[0], 350)
    after = it.rows.cache.joined_rows().sealed[rows[0]]
    assert after < before and blocks == [-(-350 // 16) - after] * len(it.rows.cache.layers)
    it.own[rows[0]].crop(350)
    assert max(it.step() for _ in range(30)) < NEAR


def test_of_a_cropped_row_nothing_is_expected_of_the_token_that_is_gone():
    """What a layer added is of the row's last token: unknown, so zero, once that is another one; as in other caches."""
    it = made("ahead", False)
    first, second = (it.join(it.prefill(n, n)) for n in (200, 190))
    for _ in range(2):
        it.step()
    foresights = [layer.policy.foresight for layer in it.rows.cache.sparse_layers]
    added = [foresight.added for foresight in foresights if foresight.added is not None]
    known = [one.clone() for one in added]
    assert added and all(bool(one[[first, second]].any(-1).all()) for one in added)
    for length, seen in ((202, known), (201, [torch.zeros_like(one) for one in known])):
        it.rows.crop(first, length)
        assert all(torch.equal(one[first], like[first]) for one, like in zip(added, seen))
        assert all(torch.equal(one[second], like[second]) for one, like in zip(added, known))


def test_a_prompt_in_chunks_is_attended_to_exactly_whatever_is_left_of_it():
    """A chunk of a single token would be a decode step, which chooses."""
    it = made("tokens", False)
    ids = prompt(1, 201, seed=3)["input_ids"]
    expected = it.rows.prefill(it.net, ids).logits
    for chunk in (200, 100, 50, 40, 67):
        assert (it.rows.prefill(it.net, ids, chunk).logits - expected).abs().max() < NEAR


def test_a_crop_that_stops_half_way_is_noticed(monkeypatch):
    it = made("tokens", False)
    row = it.join(it.prefill(200, 1))
    it.step()
    last = it.rows.cache.sparse_layers[-1]

    def fail(*args):
        raise torch.OutOfMemoryError("no memory for what it brings back")

    with monkeypatch.context() as patch:
        patch.setattr(last.store, "crop_to", fail)
        with pytest.raises(torch.OutOfMemoryError):
            it.rows.crop(row, 190)
    with pytest.raises(RuntimeError, match="its layers hold different tokens"):
        it.step()


def test_what_is_refused_changes_nothing():
    rows, net = rows_of_two(), model("llama")
    more = rows.prefill(net, prompt(1, 20)["input_ids"])
    rows.join(more)
    with pytest.raises(ValueError, match="once"):
        rows.join(more)
    with pytest.raises(ValueError, match="all 2 rows are taken"):
        rows.join(rows.prefill(net, prompt(1, 20)["input_ids"]))
    with pytest.raises(ValueError, match="all 2 rows are taken"):
        rows.fork(0)
    other = MADE["tokens"]().rows(2, 60)
    with pytest.raises(ValueError, match="other pools"):
        other.join(rows.prefill(net, prompt(1, 20)["input_ids"]))
    with pytest.raises(ValueError, match="does not fit rows of 1 to 60"):
        rows.prefill(net, prompt(1, 61)["input_ids"])
    with pytest.raises(ValueError, match="row by row"):
        rows.prefill(net, prompt(2, 20)["input_ids"])
    with pytest.raises(ValueError, match="there is no row 2"):
        rows.leave(2)
    rows.hold(1)
    with pytest.raises(ValueError, match="held already"):
        rows.hold(1)
    with pytest.raises(ValueError, match="is not held"):
        rows.resume(0)
    with pytest.raises(ValueError, match="3 tokens were given for 2 rows"):
        rows.step(net, [1, 2, 3])
    with pytest.raises(ValueError, match="no row before row 1 is free"):
        rows.move(1)
    for to in (0, 1, 2, -1):
        with pytest.raises(ValueError, match=rf"row 1 cannot take place {to}: rows that are there: \[0, 1\]"):
            rows.move(1, to)
    with pytest.raises(ValueError, match="there is no row 2"):
        rows.move(2)
    with pytest.raises(ValueError, match="cannot be kept"):
        rows.crop(0, 51)
    assert (rows.rows, rows.active, rows.lengths) == ((0, 1), (0,), (50, 20))
    for _ in range(10):
        rows.step(net, [1, 2])
    with pytest.raises(ValueError, match=r"rows \[0\] hold max_length=60 tokens"):
        rows.step(net, [1, 2])
    rows.leave(0)
    with pytest.raises(ValueError, match="no row is active"):
        rows.step(net, [1, 2])
    with pytest.raises(ValueError, match="there is no row 0"):
        rows.hold(0)


@pytest.mark.few(name=("tokens-host", "blocks-host"))
@pytest.mark.parametrize("name", ["tokens", "tokens-host", "blocks-host"])
def test_rows_anew_after_a_reset(name):
    """Other rows than before, of other lengths: what the first ones left is of pools that are gone."""
    cache, net = MADE[name](), model("llama")
    for lengths in ((150, 60), (90, 201, 30, 170), (120,)):
        again = Rows(cache, net, net, max_rows=len(lengths))
        for seed, n in enumerate(lengths):
            again.join(again.prefill(n, seed))
        assert max(again.step() for _ in range(5)) < NEAR
        cache.reset()
    with torch.no_grad():
        ids = prompt(2, 130)["input_ids"]
        alone = MADE[name]()
        for part in (ids[:, :120], *ids[:, 120:].split(1, dim=1)):
            found, expected = (net(part, past_key_values=held).logits[:, -1] for held in (cache, alone))
    torch.testing.assert_close(found, expected, atol=NEAR, rtol=0)


def test_the_cache_of_rows_takes_nothing_else():
    rows = rows_of_two()
    cache = rows.cache
    with pytest.raises(ValueError, match=r"read by rows\.prefill\(\)"):
        model("llama")(prompt(2, 5)["input_ids"], past_key_values=cache)
    for change in (lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.tensor([1, 0]))):
        with pytest.raises(ValueError, match="rows that come and go"):
            change()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(cache)
    with pytest.raises(ValueError, match="rows already"):
        cache.rows(2, 60)
    cache.reset()
    with pytest.raises(RuntimeError, match="was reset"):
        rows.hold(0)
    again = cache.rows(2, 60)
    again.join(again.prefill(model("llama"), prompt(1, 30)["input_ids"]))
    assert again.step(model("llama"), [1, 0]).isfinite().all()


@pytest.mark.parametrize(
    "cache",
    [
        lambda: OffloadedSparseCache(TokenConfig(**BUDGET, **BLOCKS, lag=True)),
        lambda: AsyncPredictiveCache(PredictiveConfig(predictor="assembled")),
    ],
    ids=["lag", "assembled"],
)
def test_methods_that_choose_ahead_are_refused(cache):
    with pytest.raises(ValueError, match="chooses ahead"):
        cache().rows(2, 60)


def test_models_without_a_layer_that_selects_are_refused():
    rows = MADE["tokens"]().rows(2, 60)
    with pytest.warns(UserWarning, match="nothing to make sparse"), pytest.raises(ValueError, match="whole past"):
        rows.prefill(model("mistral-window"), prompt(1, 20)["input_ids"])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["resident", "host"])
def test_fewer_layers_than_the_configuration_names(known, offload):
    """The decoder was cut: said at the first prompt, and nothing is taken."""
    net = build("llama", "sparsekv", num_hidden_layers=4)
    net.model.layers = net.model.layers[:2]
    cache = OffloadedSparseCache(TokenConfig(**BUDGET), offload, net.config if known else None)
    rows = cache.rows(2, 60)
    with pytest.raises(ValueError, match=r"configuration names 4 layers.*keys in 2: layers \[2, 3\] hold nothing. Set"):
        rows.prefill(net, prompt(1, 58)["input_ids"])
    assert rows.rows == () and cache.row_table.ids.used == 0
    net.config.num_hidden_layers = 2
    cache.reset()
    rows = OffloadedSparseCache(TokenConfig(**BUDGET), offload, net.config).rows(2, 60)
    assert rows.join(rows.prefill(net, prompt(1, 20)["input_ids"])) == 0


def test_layers_of_two_kinds_at_once_are_refused_before_a_prompt():
    config = model_list.small_config("falcon_h1")
    with pytest.warns(UserWarning, match="nothing to make sparse"):
        cache = SparseCache(TokenConfig(**BUDGET), model_config=config)
    with pytest.raises(ValueError, match="attention and a state in one layer"):
        cache.rows(2, 60)
    assert cache.row_batch is None


def test_a_model_that_reads_the_keys_itself_is_refused():
    rows = SparseCache(TokenConfig(**BUDGET)).rows(2, 60)
    with pytest.warns(UserWarning, match="right, but dense"), pytest.raises(ValueError, match="reads the keys and"):
        rows.prefill(build("llama", "sdpa"), prompt(1, 20)["input_ids"])
