"""Host memory is unregistered, unmapped and given back to the budget: once, in this order, and not too early."""

from __future__ import annotations

import copy
import gc
import os

import psutil
import pytest
from caches import TIGHT, two_level
from host_memory import MB, arena_of, budget_of, faked, fill, make_pool, run_alone
from models import model, prompt

from hf_sparsekv.offload.host_pool import _release


@pytest.fixture
def fake(monkeypatch):
    with faked(monkeypatch) as cuda:
        yield cuda


def test_unregistered_once_and_before_it_is_unmapped(fake):
    budget = budget_of()
    blocks = make_pool(budget)
    fill(blocks, 300)
    fill(blocks, 300)
    ranges = fake.told("register")
    assert len(ranges) > 2
    fake.log.clear()
    del blocks
    kinds = [entry[0] for entry in fake.log]
    assert kinds == ["synchronize", *["unregister"] * len(ranges), "unmap"]
    assert sorted(fake.told("unregister")) == sorted(ranges) and budget.used == 0
    fake.log += [("register", *entry) for entry in ranges]  # for the fixture's count


def test_a_view_keeps_the_memory(fake):
    budget = budget_of()
    blocks = make_pool(budget)
    fill(blocks, 40)
    view = blocks.kv[30:].flatten(1)[:, 5]
    size = budget.used
    del blocks
    gc.collect()
    assert not fake.told("unmap") and budget.used == size
    assert view[1] == 31
    del view
    assert len(fake.told("unmap")) == 1 and budget.used == 0


def test_copies_of_a_cache_share_the_memory(fake):
    cache = two_level(**TIGHT)
    model("llama").generate(**prompt(1, 300), do_sample=False, max_new_tokens=5, past_key_values=cache)
    budget, size = cache.budget, cache.budget.used
    copied = copy.deepcopy(cache)
    assert budget.used == size and fake.live
    del cache
    gc.collect()
    assert budget.used == size and not fake.told("unmap")
    del copied
    gc.collect()
    assert budget.used == 0 and not fake.live


def test_dies_with_an_exception(fake):
    budget = budget_of()

    def work():
        blocks = make_pool(budget)
        fill(blocks, 40)
        cycle = [blocks]
        cycle.append(cycle)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        work()
    gc.collect()
    assert budget.used == 0 and not fake.live


def test_dies_while_a_graph_is_captured(fake):
    """Waiting for the device would spoil the capture: it waits for the next who needs memory."""
    budget = budget_of()
    blocks = make_pool(budget)
    fake.in_capture = True
    size = budget.used
    del blocks
    assert budget.used == size and len(fake.live) == 1
    fake.in_capture = False
    other = make_pool(budget)
    assert budget.used == other.kv.nbytes and len(fake.live) == 1


def test_a_device_in_error_does_not_stop_the_release(fake, monkeypatch):
    def lost(device):
        fake.log.append(("synchronize",))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fake, "synchronize", lost)
    budget = budget_of()
    blocks = make_pool(budget)
    del blocks
    assert budget.used == 0 and not fake.live and len(fake.told("unmap")) == 1


def test_a_forked_child_releases_nothing(fake):
    """It has no CUDA context, and at these addresses, which it did not inherit, memory of its own."""
    blocks = make_pool(budget_of())
    held = arena_of(blocks)._held
    held.pid = os.getpid() + 1
    before = len(fake.log)
    del blocks
    assert fake.log[before:] == []
    held.pid = os.getpid()
    _release(held)


def test_exit_of_the_interpreter():
    """Alive as a global, in a cycle, and read by a daemon thread: nothing crashes, nothing is pulled away."""
    run_alone("""
        import atexit, threading
        import torch
        from hf_sparsekv import OffloadConfig
        from hf_sparsekv.kv import pool
        from hf_sparsekv.kv.block_ids import BlockIds
        from hf_sparsekv.offload import host_pool
        from hf_sparsekv.offload.host_limit import HostBudget

        class Fake:
            def register(self, address, size, device): return 0
            def unregister(self, address, device): raise SystemError("at exit")
            def synchronize(self, device): raise SystemError("at exit")
            def capturing(self): return False

        host_pool.cuda = Fake()
        pool._pins = lambda host, device: True

        def make():
            shape = {"heads": 2, "block_size": 16, "token_dim": 32, "split": 16}
            budget = HostBudget(OffloadConfig(max_host_bytes=1 << 24))
            return pool.BlockPool(**shape, dtype=torch.float32, device=torch.device("cpu"), host=budget, capacity=64,
                                  ids=BlockIds())

        alive, cycle = make(), [make()]
        cycle.append(cycle)

        view = alive.kv.numpy()

        def read():  # with numpy alone: a thread that is ended inside torch aborts the process, with any tensor
            while True:
                view.sum()

        threading.Thread(target=read, daemon=True).start()
        atexit.register(lambda: alive.kv.fill_(1))
    """)


def test_many_pools_leave_nothing_behind(fake):
    process = psutil.Process()

    def once():
        budget = budget_of()
        blocks = make_pool(budget, capacity=1024)
        fill(blocks, 1024)
        fill(blocks, 500)
        return budget

    once()
    gc.collect()
    memory, addresses = process.memory_info().rss, process.memory_info().vms
    for _ in range(60):
        assert once().used == 0
    assert process.memory_info().rss - memory < 4 * MB  # 60 times 7 MB were used
    assert process.memory_info().vms - addresses < 64 * MB


def test_many_caches_leave_nothing_behind():
    process = psutil.Process()
    inputs = prompt(1, 200)
    for i in range(20):
        if i == 5:
            gc.collect()
            before = process.memory_info().rss
        model("llama").generate(**inputs, do_sample=False, max_new_tokens=3, past_key_values=two_level(**TIGHT))
    gc.collect()
    assert process.memory_info().rss - before < 8 * MB
