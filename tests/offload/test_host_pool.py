"""Host memory of the blocks grows in place, is counted and pinned; and what happens when that fails."""

from __future__ import annotations

import gc
import itertools
import resource
import warnings

import psutil
import pytest
import torch
from host_memory import (
    BLOCK_SHAPE,
    CPU,
    GPU,
    MB,
    arena_of,
    block_bytes_of,
    budget_of,
    faked,
    fill,
    grow,
    in_child,
    intact,
    make_pool,
)
from inside import cpus_are, small_reservations

from hf_sparsekv import SparseConfig
from hf_sparsekv.kv.row_table import RowTable
from hf_sparsekv.kv.store import LayerStore
from hf_sparsekv.offload import host_pages, host_pool
from hf_sparsekv.offload.host_pages import PAGE
from hf_sparsekv.offload.host_pool import HostArena


@pytest.fixture
def fake(monkeypatch):
    with faked(monkeypatch) as cuda:
        yield cuda


# ---------------------------------------------------------------------- growth


@pytest.mark.slow
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("block_shape", [BLOCK_SHAPE, (2, 16, 10), (1, 64, 67)], ids=["page", "part", "odd"])
def test_growth_never_moves_data(fake, pin, block_shape):
    budget = budget_of(pin_memory=None if pin else False)
    blocks = make_pool(budget, block_shape=block_shape)
    place = blocks.kv.data_ptr()
    for n in (16, 1, 30, 3, 200, 77, 500):
        fill(blocks, n)
        assert blocks.kv.data_ptr() == place
        assert budget.used == blocks.kv.nbytes == blocks.kv.untyped_storage().nbytes() == blocks.nbytes()[1]
        assert intact(blocks)
    assert len(fake.told("register")) == (len(arena_of(blocks).borders) if pin else 0)
    if pin:
        assert sum(size for _, size in fake.told("register")) == budget.used
    assert not fake.told("unregister")


def test_an_old_view_stays_valid(fake):
    blocks = make_pool(budget_of())
    fill(blocks, 16)
    old = blocks.kv
    fill(blocks, 100)
    blocks.kv[3] = -1
    assert (old[3] == -1).all() and old.shape[0] == 16


def test_runs_do_not_cross_a_border(fake):
    blocks = make_pool(budget_of())
    fill(blocks, 100)
    ends = [end // block_bytes_of(blocks) for end in arena_of(blocks).borders]
    fill(blocks, 1 + ends[-1])
    parts = list(blocks.runs(3, blocks.capacity))
    assert parts[0][0] == 3 and parts[-1][1] == blocks.capacity
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts)) and len(parts) == len(arena_of(blocks).borders) > 1
    start = blocks.kv.data_ptr()
    for lo, hi in parts:
        at, size = start + lo * block_bytes_of(blocks), (hi - lo) * block_bytes_of(blocks)
        assert any(a <= at and at + size <= a + n for a, n in fake.live.items())
    assert list(blocks.runs(5, 5)) == []
    on_device = make_pool(None)
    assert list(on_device.runs(2, 9)) == [(2, 9)]


def test_a_reservation_that_is_full_moves_once(fake, monkeypatch):
    small_reservations(monkeypatch)
    budget = budget_of()
    blocks = make_pool(budget)
    for _ in range(60):
        fill(blocks, 10)
        assert intact(blocks) and budget.used == blocks.kv.nbytes
    assert 2 <= len(fake.told("unmap")) <= 6  # one for each arena that was left


def test_addresses_tell_that_the_fields_have_moved():
    blocks = make_pool(budget_of())
    blocks.add_field("labels", (4,), torch.uint8)
    fill(blocks, 16)
    before = blocks.addresses
    fill(blocks, 1)
    assert before[0] == blocks.addresses[0] and before[1:] != blocks.addresses[1:]


def test_a_captured_step_learns_that_the_fields_have_moved():
    like = torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16)
    config = SparseConfig(block_size=16, window=16, max_length=4096)
    table = RowTable(config)
    store = LayerStore(*like, config, budget_of(), table)
    store.pool.add_field("labels", (4,), torch.uint8)
    before, moves, capacity = store.addresses, table.moves, store.pool.capacity
    grow(store.pool, capacity)
    assert (store.addresses, table.moves) == (before, moves)
    block_table = store.block_table
    grow(store.pool, 1)
    assert store.pool.capacity > capacity and table.moves > moves
    assert store.block_table is block_table
    assert store.addresses[0] == before[0], "host blocks stay"
    assert store.addresses[1] != before[1]


# ---------------------------------------------------------------------- what fails


def test_a_touch_that_fails_changes_nothing(fake, monkeypatch):
    budget = budget_of()
    blocks = make_pool(budget)
    fill(blocks, 16)
    before = budget.used, blocks.capacity, blocks.ids.used, blocks.addresses
    with monkeypatch.context() as patch:

        def fail(address, size):
            raise MemoryError("no memory left")

        patch.setattr(host_pages, "populate", fail)
        with pytest.raises(MemoryError, match="no memory left"):
            grow(blocks, 100)
    assert before == (budget.used, blocks.capacity, blocks.ids.used, blocks.addresses)
    assert intact(blocks) and len(fake.live) == 1
    fill(blocks, 100)
    assert intact(blocks)


def test_one_of_many_touches_fails(monkeypatch):
    """The error comes when no thread is at work any more."""
    cpus_are(monkeypatch, 4, PAGE)
    done = []

    def sometimes(address, size):
        if address == 7 * PAGE:
            raise MemoryError("seven")
        done.append(address)

    monkeypatch.setattr(host_pages, "populate", sometimes)
    with pytest.raises(MemoryError, match="seven"):
        host_pages.touch(0, 50 * PAGE, threads=4)
    before = len(done)
    gc.collect()
    assert len(done) == before


def test_the_constructor_fails_half_way(fake, monkeypatch):
    budget = budget_of()
    monkeypatch.setattr(host_pages, "populate", lambda address, size: (_ for _ in ()).throw(MemoryError("none left")))
    with pytest.raises(MemoryError, match="none left"):
        make_pool(budget)
    gc.collect()
    assert budget.used == 0 and len(fake.told("unmap")) == 1 and not fake.told("register")


@pytest.mark.parametrize("step", [1, 2, 4])
def test_pinning_fails(fake, step):
    """All of the pool goes on pageable, and one warning says so, whatever the number of layers."""
    budget = budget_of()
    fake.fail_at = {step}
    with pytest.warns(UserWarning, match=r"could not be pinned \(cudaHostRegister: error 2\).*not captured") as caught:
        blocks = make_pool(budget)
        for _ in range(8):
            fill(blocks, 16)
        other = make_pool(budget)
        fill(other, 40)
    assert len(caught) == 1
    assert not arena_of(blocks).pinned and not arena_of(other).pinned and not fake.live
    assert fake.calls == step, "what has failed once is not tried again"
    assert intact(blocks) and intact(other)
    assert budget.used == blocks.kv.nbytes + other.kv.nbytes
    if step > 1:
        assert ("synchronize",) in fake.log


def test_another_cache_warns_again(fake):
    fake.fail_at = {1, 2}
    for _ in range(2):
        with pytest.warns(UserWarning, match="could not be pinned"):
            make_pool(budget_of())


def test_the_warning_as_an_error(fake):
    fake.fail_at = {2}
    budget = budget_of()
    blocks = make_pool(budget)
    fill(blocks, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="could not be pinned"):
            grow(blocks, 16)
        assert budget.used == blocks.kv.nbytes and blocks.ids.used == 16
        fill(blocks, 16)
    assert intact(blocks)


def test_pinning_that_was_asked_for_must_work(fake):
    fake.fail_at = {2}
    budget = budget_of(pin_memory=True)
    blocks = make_pool(budget)
    fill(blocks, 16)
    before = budget.used, blocks.capacity, blocks.ids.used, blocks.addresses
    with pytest.raises(RuntimeError, match=r"could not be pinned.*OffloadConfig\(pin_memory=None\) to go on"):
        grow(blocks, 16)
    assert before == (budget.used, blocks.capacity, blocks.ids.used, blocks.addresses)
    assert arena_of(blocks).pinned and len(fake.live) == 1
    fill(blocks, 16)
    assert intact(blocks) and len(fake.live) == 2


def test_interrupted_right_after_registering(fake):
    fake.stop_at = {2}
    budget = budget_of()
    blocks = make_pool(budget)
    fill(blocks, 16)
    with pytest.raises(KeyboardInterrupt):
        grow(blocks, 16)
    assert len(fake.live) == 1 and budget.used == blocks.kv.nbytes
    fill(blocks, 16)
    assert intact(blocks)


def test_no_room_for_so_many_addresses(fake, monkeypatch):
    asked = []

    def few(size):
        asked.append(size)
        return host_pages.reserve(size) if size <= 8 * MB else None

    monkeypatch.setattr(host_pool, "reserve", few)
    arena = HostArena(5 * PAGE, budget_of(), GPU, pin=True)
    assert len(asked) > 1 and 5 * PAGE <= arena.reserved < 8 * MB and arena.committed == 5 * PAGE
    budget = budget_of()
    with pytest.raises(MemoryError, match=r"no address space for .*ulimit -v"):
        HostArena(16 * MB, budget, GPU, pin=True)
    assert budget.used == 0


def test_limited_address_space():
    """The same with the real limit, in a process of its own."""

    def work():
        have = psutil.Process().memory_info().vms + 600 * MB
        resource.setrlimit(resource.RLIMIT_AS, (have, have))
        budget = budget_of(1 << 40)
        arena = HostArena(64 * MB, budget, CPU, pin=False)
        assert 64 * MB <= arena.reserved < 600 * MB, arena.reserved
        arena.tensor((64 * MB,), torch.uint8).fill_(3)
        with pytest.raises(MemoryError, match="ulimit -v"):
            HostArena(4 << 30, budget, CPU, pin=False)
        assert budget.used == 64 * MB

    in_child(work)
