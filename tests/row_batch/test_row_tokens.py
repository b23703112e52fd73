"""Room for copies of chosen tokens in rows that come and go: it decides where tokens are read, never which."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from captured import imitated
from models import build, model, prompt
from test_row_batch import BUDGET, CHOOSE, NEAR, ROWS, STEPS, Rows

from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    ProgressiveCache,
    ProgressiveConfig,
    QueryTap,
    TokenConfig,
)
from hf_sparsekv.ops.storage.device_tokens import EMPTY, TokenSlots
from hf_sparsekv.ops.storage.device_tokens.reference import bring_tokens
from hf_sparsekv.policies.device_tokens import DeviceTokens
from hf_sparsekv.policies.row_tokens import needed_room

pytestmark = pytest.mark.filterwarnings("error:decode steps run eagerly")

SIZE, SLOT = 16, 2 * 2 * (2 * 16 * 4 + 8)  # of a block; bytes of a slot, in two layers of two KV heads
METHODS = {
    "two_level": (OffloadedSparseCache, TokenConfig(**BUDGET)),
    "progressive": (ProgressiveCache, ProgressiveConfig(**CHOOSE, mass=0.7, min_tokens=16)),
    "ahead": (AsyncPredictiveCache, PredictiveConfig(**BUDGET, predictor="layer:in_delta")),
}


@contextmanager
def made(name: str, slots: int, captured: bool = False, **changes) -> Iterator[Rows]:
    """Rows with ``slots`` slots in all."""
    kind, config = METHODS[name]
    alone = model("llama")
    net = imitated()[0] if captured else alone
    if name == "ahead":
        QueryTap(alone).install()
    try:
        yield Rows(kind(config, OffloadConfig(device_pool=slots * SLOT)), net, alone, **changes)
    finally:
        if name == "ahead":
            QueryTap(alone).remove()


def lanes_of(rows):
    """Which slots each row has."""
    return rows._slots.tokens.lanes


def consistent(rows) -> None:
    """Each slot that is taken holds its column's token, and the column knows its slot."""
    lanes = lanes_of(rows)
    for layer in rows.cache.sparse_layers:
        held, store = layer.policy.tokens, layer.store
        assert held.lanes.tolist() == [list(lane) for lane in lanes.held]
        for row in rows.rows:
            first, room = lanes.held[row]
            for head in range(store.heads):
                lane = slice(first, first + room)
                columns, slots = held.columns[head, lane], held.slots[row, head]
                taken = (columns >= 0).nonzero().flatten()
                column = columns[taken].long()
                assert torch.equal(slots[column], taken.int())
                assert int((slots >= 0).sum()) == len(taken)
                assert torch.equal(held.stamps[head, lane] == EMPTY, columns < 0)
                stored = store.pool.kv[store.block_table[row, column // SIZE].long(), head, column % SIZE]
                assert torch.equal(held.kv[head, lane][taken], stored)


def held_by(rows, row: int) -> int:
    """Slots of a row that hold something, all layers and KV heads."""
    return sum(int((layer.policy.tokens.slots[row] >= 0).sum()) for layer in rows.cache.sparse_layers)


@pytest.mark.few
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("name", METHODS)
def test_rooms_that_differ_and_change_never_show(name, captured):
    with made(name, 256, captured) as it:
        rows = it.rows
        assert (rows.slots, rows.free_slots) == (0, 0), "no prompt has been read"
        prompts = [it.prefill(n, n) for n in (150, 90, 201)]
        assert rows.slots == rows.free_slots == 256
        it.join(prompts[0])
        assert rows.room(0) == 64, "an even share"
        it.join(prompts[1], room=0)
        it.join(prompts[2], room=113)
        assert (rows.room(1), rows.room(2), rows.free_slots) == (0, 128, 64)
        assert max(it.step() for _ in range(4)) < NEAR
        for changes in ({0: 32}, {1: 96}, {2: 48, 0: 80}, {1: 0}, {0: 0, 2: 250}, {0: 0}):
            for row, tokens in changes.items():
                rows.give(row, tokens)
                assert rows.room(row) == -(-tokens // SIZE) * SIZE
                consistent(rows)
            assert max(it.step() for _ in range(3)) < NEAR
            consistent(rows)
        assert held_by(rows, 0) == held_by(rows, 1) == 0 < held_by(rows, 2)
        assert rows.cache.stats().hit_rate > 0


def test_a_change_of_room_is_not_captured_anew():
    with made("two_level", 256) as it:
        it.net, runner = imitated()
        for n in (150, 90, 201):
            it.join(it.prefill(n, n), room=64)
        for _ in range(3):
            it.step()
        captures, replays = runner.captures, runner.replays
        for row, tokens in ((0, 128), (1, 0), (2, 16), (1, 96)):
            it.rows.give(row, tokens)
            assert it.step() < NEAR
        assert (runner.captures, runner.replays) == (captures, replays + 4)


def test_what_a_row_holds_stays_where_its_room_changes():
    """Larger, moved by others, smaller by what is empty: nothing is read over the link that was there."""
    with made("two_level", 1024) as it:
        rows = it.rows
        for n in (150, 90, 201):
            it.join(it.prefill(n, n), room=160)
        for _ in range(6):
            it.step()
        held = [held_by(rows, row) for row in range(3)]
        assert min(held) > 0
        rows.give(0, 320)
        rows.give(2, 400)
        rows.give(1, 144)
        rows.give(1, 300)  # all move together
        consistent(rows)
        assert [held_by(rows, row) for row in range(3)] == held
        rows.give(1, 16)
        assert held_by(rows, 1) < held[1]
        consistent(rows)
        assert max(it.step() for _ in range(3)) < NEAR


@pytest.mark.few(room=(16, 112))
@pytest.mark.parametrize("room", [16, 48, 112, 144])
def test_what_does_not_fit_any_more_was_chosen_longest_ago(room):
    """Wherever it lies; and what stays is found where it is."""
    with made("two_level", 512) as it:
        rows = it.rows
        for n in (150, 330, 201):
            it.join(it.prefill(n, n), room=160)
        for _ in range(14):
            it.step()
        first = lanes_of(rows).held[1][0]
        layers = [layer.policy.tokens for layer in rows.cache.sparse_layers]
        before = [held.stamps[:, first : first + 160].sort(descending=True).values for held in layers]
        assert all(int((stamps[:, 0] - stamps[:, -1]).min()) > 0 for stamps in before), "some are older than others"
        rows.give(1, room)
        consistent(rows)
        first = lanes_of(rows).held[1][0]
        for held, stamps in zip(layers, before):
            after = held.stamps[:, first : first + room].sort(descending=True).values
            assert torch.equal(after, stamps[:, :room])
        assert max(it.step() for _ in range(3)) < NEAR


def test_a_fork_holds_what_it_forks():
    """As far as it has room: its own slots, its own ages."""
    with made("two_level", 256) as it:
        rows = it.rows
        it.join(it.prefill(150, 1), room=80)
        for _ in range(6):
            it.step()
        new = rows.fork(0)
        assert rows.room(new) == 64 and 0 < held_by(rows, new) <= held_by(rows, 0)
        it.own[new], it.next[new] = copy.deepcopy(it.own[0]), it.next[0]
        consistent(rows)
        assert max(it.step() for _ in range(3)) < NEAR
        consistent(rows)
        before = held_by(rows, new)
        rows.leave(0)
        it.join(it.prefill(90, 2), room=192)
        assert held_by(rows, new) == before and held_by(rows, 0) == 0
        assert max(it.step() for _ in range(3)) < NEAR
        consistent(rows)


@contextmanager
def recorded(monkeypatch) -> Iterator[list]:
    """What each layer was told to bring: the :class:`DeviceTokens`, ids, and a view of the layer's store."""
    calls, bring = [], DeviceTokens.bring

    def record(self, ids, store, used=None):
        calls.append((self, ids.clone(), store))
        bring(self, ids, store, used)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceTokens, "bring", record)
        yield calls


def test_a_row_holds_what_it_would_alone_in_so_much_room(monkeypatch):
    """Slot by slot what one row with so many slots would hold, and as many tokens are copied."""
    rooms = (48, 0, 96, 64)
    with made("two_level", 256) as it, recorded(monkeypatch) as calls:
        for room, n in zip(rooms, (150, 90, 201, 330), strict=True):
            it.join(it.prefill(n, n), room)
        for _ in range(14):
            it.step()
        rows = it.rows
        for layer in rows.cache.sparse_layers:
            held, store = layer.policy.tokens, layer.store
            expected = torch.zeros(2, dtype=torch.int64)
            for row, room in enumerate(rooms):
                slots = TokenSlots(
                    torch.zeros(2, room, store.width),
                    torch.full((2, room), -1, dtype=torch.int32),
                    torch.full((2, room), EMPTY, dtype=torch.int32),
                    torch.full_like(held.slots[:1], -1),
                    torch.zeros(1, 2, dtype=torch.int32),
                    torch.tensor([[0, room]], dtype=torch.int32),
                )
                table = store.block_table[row : row + 1]
                for ids in (ids for mine, ids, _ in calls if mine is held):
                    bring_tokens(ids[row : row + 1], store.pool.kv, table, slots, counters=expected)
                first = lanes_of(rows).held[row][0]
                assert torch.equal(held.columns[:, first : first + room], slots.columns)
                assert torch.equal(held.stamps[:, first : first + room], slots.stamps)
                assert torch.equal(held.slots[row], slots.slots[0])
            assert torch.equal(held.counters, expected)


def test_working_sets_literally(monkeypatch):
    """Tokens that the last steps have chosen and that are still held, row by row."""
    with made("two_level", 512) as it, recorded(monkeypatch) as calls:
        rows = it.rows
        for room, n in ((256, 330), (32, 201), (0, 150)):
            it.join(it.prefill(n, n), room)
        expected = [rows.expected_working_set(n) for n in (330, 201, 150)]
        none = int(needed_room(torch.full((1, 4), expected[2])))
        before = rows.working_sets()
        assert before.read() == [0, 0, none, 0], "no step has been made; the third has no room"
        for _ in range(9):
            it.step()
        for steps in (1, 4, 12):
            counted = rows.working_sets(steps)
            wanted = []
            for layer in rows.cache.sparse_layers:
                held = layer.policy.tokens
                ids = [ids for mine, ids, _ in calls if mine is held][-steps:]
                for head in range(2):
                    chosen = [set(torch.cat([one[row, head] for one in ids]).tolist()) - {-1} for row in range(3)]
                    there = [set((held.slots[row, head] >= 0).nonzero().flatten().tolist()) for row in range(3)]
                    held_now = [len(mine & its) for mine, its in zip(chosen, there)]
                    full = [n >= room - room // 32 for n, room in zip(held_now, (256, 32, 0))]
                    wanted.append([max(n, e) if all_of_it else n for n, e, all_of_it in zip(held_now, expected, full)])
            assert counted.ready
            assert counted.read() == [*needed_room(torch.tensor(wanted).T).tolist(), 0]
        found = counted.read()
        assert 100 < found[0] < 256 and 32 < found[1] <= expected[1], "more was chosen than 32 slots hold"
        with pytest.raises(ValueError, match="steps must be positive, got 0"):
            rows.working_sets(0)


def test_rows_that_wait_grow_no_older():
    """Their working set stays, however many steps others make."""
    with made("two_level", 512) as it:
        rows = it.rows
        for n in (330, 201):
            it.join(it.prefill(n, n), room=256)
        for _ in range(4):
            it.step()
        rows.hold(0)
        before, held = rows.working_sets(2).read(), held_by(rows, 0)
        for _ in range(5):
            it.step()
        assert before[0] > 0 and rows.working_sets(2).read()[0] == before[0] and held_by(rows, 0) == held
        assert rows.working_sets().read()[1] > rows.working_sets(1).read()[1]


def test_expected_working_sets():
    for name, (expected, none) in {"two_level": (102, 32), "ahead": (102, 32), "progressive": (38, 0)}.items():
        with made(name, 256) as it:
            assert it.rows.expected_working_set(400) == expected
            assert it.rows.expected_working_set(none) == 0
            assert it.rows.expected_working_set(60) == (60 if name != "progressive" else 3)


def test_rows_without_copies_have_no_room():
    """Nothing is offloaded, or device memory is not to be used."""
    for offload in (None, OffloadConfig(device_pool=0)):
        rows = OffloadedSparseCache(TokenConfig(**BUDGET), offload).rows(2, 200)
        rows.join(rows.prefill(model("llama"), prompt(1, 90)["input_ids"]))
        assert (rows.slots, rows.free_slots, rows.room(0)) == (0, 0, 0)
        rows.give(0, 0)
        with pytest.raises(ValueError, match="these rows keep no copies"):
            rows.give(0, 16)
        assert rows.working_sets().read() == [0, 0]
        assert rows.step(model("llama"), [1, 2])[0].isfinite().all()


def test_what_is_refused_changes_nothing():
    with made("two_level", 256) as it:
        rows, first, second = it.rows, it.prefill(150, 1), it.prefill(90, 2)
        it.join(first, room=200)
        it.step()
        before = held_by(rows, 0)
        for change, why in (
            (lambda: rows.give(0, 257), "272 slots were asked for, row 0 has 208 and 48 of 256 are free"),
            (lambda: rows.give(0, -1), "give 0 or more"),
            (lambda: rows.give(1, 16), "there is no row 1"),
            (lambda: rows.room(1), "there is no row 1"),
            (lambda: rows.join(second, room=49), "64 slots were asked for, 48 of 256 are free"),
            (lambda: rows.join(second, room=-1), "give 0 or more"),
        ):
            with pytest.raises(ValueError, match=why):
                change()
        assert (rows.room(0), rows.free_slots, rows.rows, held_by(rows, 0)) == (208, 48, (0,), before)
        it.join(second)
        assert rows.room(1) == 48, "what is left"
        forked = rows.fork(1)
        assert rows.room(forked) == 0
        rows.leave(0)
        assert rows.free_slots == 208
        assert rows.step(it.net, [1] * ROWS)[1].isfinite().all()


def test_no_memory_to_move_with(monkeypatch):
    """Rows are forgotten, and answer as before."""
    with made("two_level", 256) as it:
        rows = it.rows
        for n in (150, 90, 201):
            it.join(it.prefill(n, n), room=64)
        it.step()

        def full(*args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr("hf_sparsekv.policies.row_tokens.moved", full)
            with pytest.raises(torch.OutOfMemoryError):
                rows.give(0, 128)
        assert held_by(rows, 0) == held_by(rows, 1) == held_by(rows, 2) == 0
        consistent(rows)
        assert max(it.step() for _ in range(3)) < NEAR
        consistent(rows)


def test_no_memory_at_all(monkeypatch):
    """Told once; steps read what they choose in host memory."""

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("hf_sparsekv.policies.row_tokens.DeviceTokens", full)
    with made("two_level", 256) as it:
        with pytest.warns(
            UserWarning, match="no device memory for copies of chosen tokens .CUDA out of memory"
        ) as told:
            it.join(it.prefill(150, 1))
        assert max(it.step() for _ in range(3)) < NEAR
        assert len(told) == 1 and it.rows.slots == 0 and it.rows.cache.stats().hit_rate is None


def test_less_than_one_row_needs_is_told():
    with (
        pytest.warns(UserWarning, match="copies of the chosen tokens take .* 8704 are allowed"),
        made("two_level", 16) as it,
    ):
        it.join(it.prefill(150, 1))
        it.join(it.prefill(90, 2))
    assert (it.rows.slots, it.rows.room(0), it.rows.room(1)) == (16, 16, 0)
    assert max(it.step() for _ in range(3)) < NEAR


def test_all_layers_have_the_same_lanes():
    """One tensor on the device, that all read."""
    with made("two_level", 256) as it:
        it.join(it.prefill(150, 1))
        tokens = [layer.policy.tokens for layer in it.rows.cache.sparse_layers]
        assert {one.columns.shape for one in tokens} == {(2, 256)}
        assert {one.lanes.data_ptr() for one in tokens} == {tokens[0].lanes.data_ptr()}


@pytest.mark.few(captured=(True,))
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_anything_in_any_order(captured):
    """Rooms given and taken between joins, leaves, holds, forks and crops: rows answer as caches of their own."""
    chance = random.Random(11)
    with made("two_level", 320, captured) as it:
        rows, waiting, steps, given = it.rows, [], 0, 0
        while steps < STEPS // 4:
            free, row = ROWS - len(rows.rows), chance.choice(rows.rows) if rows.rows else None
            kind = chance.choices(
                ("step", "prefill", "join", "leave", "hold", "resume", "fork", "crop", "move", "give"),
                (30, 3, 6, 1, 2, 4, 1, 2, 3, 8),
            )[0]
            if kind == "step" and rows.active:
                if full := [r for r in rows.active if rows.lengths[r] >= 390]:
                    rows.leave(full[0])
                    continue
                assert it.step() < NEAR
                consistent(rows)
                steps += 1
            elif kind == "prefill" and len(waiting) < 3:
                waiting.append(it.prefill(chance.randint(20, 250), chance.randint(0, 999)))
            elif kind == "join" and waiting and free:
                wanted = chance.choice((None, 0, chance.randint(0, rows.free_slots // SIZE) * SIZE))
                it.join(waiting.pop(chance.randrange(len(waiting))), wanted)
            elif kind == "leave" and row is not None:
                rows.leave(row)
            elif kind == "hold" and row in rows.active:
                rows.hold(row)
            elif kind == "resume" and row is not None and row not in rows.active:
                rows.resume(row)
            elif kind == "fork" and row is not None and free:
                new = rows.fork(row)
                it.own[new], it.next[new] = copy.deepcopy(it.own[row]), it.next[row]
            elif kind == "crop" and row is not None and rows.lengths[row] > 60:
                gone = chance.choice((1, 3, 30))
                rows.crop(row, rows.lengths[row] - gone)
                it.own[row].crop(-gone)
            elif kind == "move" and row is not None and row > 0 and len(set(range(row)) - set(rows.rows)):
                holds = rows.room(row), held_by(rows, row)
                new = rows.move(row)
                it.own[new], it.next[new] = it.own.pop(row), it.next.pop(row)
                assert (rows.room(new), held_by(rows, new)) == holds
                consistent(rows)
            elif kind == "give" and row is not None:
                most = (rows.free_slots + rows.room(row)) // SIZE
                rows.give(row, SIZE * chance.randint(0, most))
                consistent(rows)
                given += 1
            taken = sum(rows.room(row) for row in rows.rows)
            assert taken + rows.free_slots == rows.slots == 0 or rows.slots == 320
        assert given > STEPS // 40
        assert rows.cache.stats().hit_rate > 0.1


def test_a_batch_that_comes_behind_rows_has_its_even_room():
    """reset() ends the rows; the cache then serves generate(), and its memory is split evenly again."""
    with made("two_level", 256, max_rows=2) as it:
        it.join(it.prefill(150, 1), room=240)
        it.step()
        cache = it.rows.cache
        cache.reset()
        net, ids = build("llama", "sparsekv"), prompt(2, 152)["input_ids"]
        with torch.no_grad():
            for part in ids.split((150, 1, 1), dim=1):
                logits = net(part, past_key_values=cache).logits[:, -1]
        assert logits.isfinite().all()
        assert {layer.policy.tokens.room for layer in cache.sparse_layers} == {128}
        assert cache.sparse_layers[0].policy.tokens.lanes.tolist() == [[0, 128], [128, 128]]
