"""Host memory of the blocks with a real GPU: pinned, read across registrations, given back in the middle of copies."""

from __future__ import annotations

import gc
import warnings

import psutil
import pytest
import torch
from caches import FULL, two_level
from host_memory import arena_of, budget_of, fill, grow, intact, make_pool
from inside import keep_busy
from models import build, prompt

from hf_sparsekv.offload import host_pool
from hf_sparsekv.offload.host_pool import HostArena

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
MB, GB = 1 << 20, 1 << 30
BLOCK_SHAPE = (8, 64, 256)  # bf16: 256 KiB, a block of a model with 8 KV heads of 128


@triton.jit
def read(src, dst, n, BLOCK: tl.constexpr):
    """Copy ``n`` values, BLOCK a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at, mask=at < n), mask=at < n)


@triton.jit
def pick(src, ids, dst, BLOCK_NUMEL: tl.constexpr, SIZE: tl.constexpr):
    """Copy the first values of some physical blocks."""
    physical_id = tl.load(ids + tl.program_id(0)).to(tl.int64)
    at = tl.arange(0, SIZE)
    tl.store(dst + tl.program_id(0) * SIZE + at, tl.load(src + physical_id * BLOCK_NUMEL + at))


@pytest.fixture(autouse=True)
def nothing_waits():
    """No test leaves an error behind for the next one."""
    gc.collect()
    torch.cuda.synchronize()
    yield
    gc.collect()
    torch.cuda.synchronize()
    assert (torch.ones(3, device=GPU) + 1).sum() == 6


def grown(budget, sizes=(16, 16, 40, 100)):
    """A pool in several registrations; physical block ``i`` holds the number ``i`` (exact in bf16 up to 256)."""
    blocks = make_pool(budget, device=GPU, block_shape=BLOCK_SHAPE, dtype=torch.bfloat16)
    for n in sizes:
        fill(blocks, n)
    torch.cuda.synchronize()  # a kernel writes; tests read on the host
    assert len(arena_of(blocks).borders) > 2
    return blocks


def number_of(physical_ids):
    return torch.as_tensor(physical_ids, dtype=torch.bfloat16)


def test_pinned_and_in_place():
    budget = budget_of(GB, pin_memory=True)
    blocks = make_pool(budget, device=GPU, block_shape=BLOCK_SHAPE, dtype=torch.bfloat16)
    assert blocks.kv.is_pinned() and arena_of(blocks).pinned and blocks.kv.device.type == "cpu"
    place = blocks.kv.data_ptr()
    for n in (16, 30, 200):
        fill(blocks, n)
        assert blocks.kv.is_pinned() and blocks.kv[-1].is_pinned() and blocks.kv.data_ptr() == place
    assert budget.used == blocks.kv.nbytes


def test_pageable_on_request():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocks = make_pool(budget_of(GB, pin_memory=False), device=GPU, block_shape=BLOCK_SHAPE, dtype=torch.bfloat16)
        fill(blocks, 40)
    assert not blocks.kv.is_pinned()


def test_a_kernel_reads_across_borders_and_copies_keep_between_them():
    """Parts that ``runs`` yields may be copied asynchronously, both ways."""
    blocks = grown(budget_of(GB))
    flat = blocks.kv[: blocks.ids.used].flatten()
    got = torch.zeros_like(flat, device=GPU)
    # One program reads 8192 values beginning 4096 before each border, others all of it.
    read[(triton.cdiv(flat.numel(), 8192),)](flat, got, flat.numel(), BLOCK=8192)
    assert torch.equal(got.cpu(), flat)
    for border in arena_of(blocks).borders[:-1]:
        start = border // 2 - 4096
        piece = torch.zeros(8192, dtype=torch.bfloat16, device=GPU)
        read[(1,)](flat[start:], piece, 8192, BLOCK=8192)
        assert torch.equal(piece.cpu(), flat[start : start + 8192])
    n = blocks.ids.used
    got = torch.zeros(n, *BLOCK_SHAPE, dtype=torch.bfloat16, device=GPU)
    parts = list(blocks.runs(3, n))
    assert len(parts) > 2
    for lo, hi in parts:
        got[lo:hi].copy_(blocks.kv[lo:hi], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(got[3:, 0, 0, 0].cpu(), number_of(range(3, n)))
    assert torch.equal(got[3:].cpu(), blocks.kv[3:n])
    new = torch.randn(n, *BLOCK_SHAPE, device=GPU).bfloat16()
    for lo, hi in blocks.runs(0, n):
        blocks.kv[lo:hi].copy_(new[lo:hi], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(blocks.kv[:n], new.cpu())


@pytest.mark.parametrize("kind", ["copy", "kernel"])
def test_deleted_while_the_device_reads(kind):
    budget = budget_of(GB)
    blocks = grown(budget)
    n = blocks.ids.used
    want = blocks.kv[:n].clone()
    got = torch.zeros(n, *BLOCK_SHAPE, dtype=torch.bfloat16, device=GPU)
    grid = (triton.cdiv(got.numel(), 8192),)
    read[grid](want.cuda(), got, got.numel(), BLOCK=8192)  # compiles
    got.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy(2_000_000_000)  # about a second
        if kind == "kernel":
            read[grid](blocks.kv, got, got.numel(), BLOCK=8192)
        else:
            for lo, hi in blocks.runs(0, n):
                got[lo:hi].copy_(blocks.kv[lo:hi], non_blocking=True)
    assert not side.query()
    del blocks
    gc.collect()
    assert side.query() and budget.used == 0
    assert torch.equal(got.cpu(), want)


def test_deleted_during_a_capture():
    """The capture goes through; the memory is given back later."""
    budget = budget_of(GB)
    blocks = grown(budget)
    x = torch.ones(1000, device=GPU)
    (x * 2).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        del blocks
        z = y.sum()
    assert budget.used > 0
    graph.replay()
    assert z == 2000
    other = make_pool(budget, device=GPU, block_shape=BLOCK_SHAPE, dtype=torch.bfloat16)
    assert budget.used == other.kv.nbytes


def test_a_graph_goes_on_reading_while_the_pool_grows():
    blocks = grown(budget_of(GB), sizes=(16, 16, 20))
    ids = torch.zeros(4, dtype=torch.int32, device=GPU)
    got = torch.zeros(4, 256, dtype=torch.bfloat16, device=GPU)
    pick[(4,)](blocks.kv, ids, got, BLOCK_NUMEL=8 * 64 * 256, SIZE=256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pick[(4,)](blocks.kv, ids, got, BLOCK_NUMEL=8 * 64 * 256, SIZE=256)
    fill(blocks, 180)
    ids.copy_(torch.tensor([0, 51, 52, 231], dtype=torch.int32))
    graph.replay()
    assert got[:, 7].tolist() == number_of([0, 51, 52, 231]).tolist()


def test_a_gigabyte_in_steps():
    process = psutil.Process()
    make_pool(budget_of(GB), device=GPU, block_shape=BLOCK_SHAPE, dtype=torch.bfloat16)
    gc.collect()
    before = process.memory_info().rss
    budget = budget_of(4 * GB)
    blocks = make_pool(budget, device=GPU, block_shape=BLOCK_SHAPE, dtype=torch.bfloat16)
    place = blocks.kv.data_ptr()
    while blocks.kv.nbytes < GB:
        physical_ids = torch.from_numpy(grow(blocks, 256)).to(GPU)
        last = (physical_ids[-1] // 256).bfloat16()
        blocks.write(physical_ids[-1:], last.expand(1, *BLOCK_SHAPE))
    assert blocks.kv.data_ptr() == place and blocks.kv.is_pinned()
    used = process.memory_info().rss - before
    assert abs(used - budget.used) < 200 * MB, "exactly what was asked for"
    torch.cuda.synchronize()  # the last block is written by a kernel, in place
    ends = range(255, blocks.ids.used, 256)
    assert all((blocks.kv[end] == end // 256).all() for end in ends)
    del blocks
    gc.collect()
    assert budget.used == 0
    assert process.memory_info().rss - before < 200 * MB


def test_a_registration_that_cuda_refuses(monkeypatch):
    """A real error of CUDA: warned about, and not left for the next kernel to find."""
    real = host_pool.cuda.register
    calls = []

    def twice(address, size, device):
        calls.append(address)
        code = real(address, size, device)
        return real(address, size, device) if len(calls) == 2 else code  # CUDA: already registered

    monkeypatch.setattr(host_pool.cuda, "register", twice)
    budget = budget_of(GB)
    blocks = make_pool(budget, device=GPU, block_shape=BLOCK_SHAPE, dtype=torch.bfloat16)
    fill(blocks, 16)
    with pytest.warns(UserWarning, match=r"could not be pinned \(cudaHostRegister: error \d+\)"):
        fill(blocks, 16)
    assert (torch.ones(3, device=GPU) + 1).sum() == 6
    assert not blocks.kv.is_pinned() and not arena_of(blocks).pinned
    assert intact(blocks)
    fill(blocks, 40)
    # The imitation left the second step registered, which the pool does not know of.
    host_pool.cuda.unregister(calls[1], GPU)


def test_unregistering_what_is_not_registered():
    arena = HostArena(4 * MB, budget_of(GB), GPU, pin=False)
    assert host_pool.cuda.unregister(arena.address, GPU) != 0
    assert (torch.ones(3, device=GPU) + 1).sum() == 6


def test_a_cache_that_could_not_be_pinned_is_right(monkeypatch):
    model = build("llama", "sparsekv").cuda()
    ids = prompt(1, 300)["input_ids"].cuda()
    settings = {"do_sample": False, "max_new_tokens": 40}
    want = model.generate(ids, **settings, past_key_values=two_level(**FULL))
    calls = []

    def fails_for_the_second_layer(address, size, device):
        calls.append(address)
        return 2 if len(calls) > 1 else real(address, size, device)

    real = host_pool.cuda.register
    monkeypatch.setattr(host_pool.cuda, "register", fails_for_the_second_layer)
    cache = two_level(**FULL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = model.generate(ids, **settings, past_key_values=cache)
    told = [w for w in caught if "could not be pinned" in str(w.message)]
    assert len(told) == 1
    assert [layer.store.pool.kv.is_pinned() for layer in cache.sparse_layers] == [True, False]
    assert torch.equal(got, want)
