"""How long does it take to pin host memory, and is memory pinned by us as fast as torch's?

    python -m benchmarks.probes.pinning [--budget SECONDS]

First table: time to touch, to register and to unregister, for torch's allocator and for the steps of `host_pages` with
several threads, with and without large pages. Second: copies and in-place gathers from it. Takes about a minute; what
would begin after the budget is left out. The first row is measured on memory that nobody has used since the machine
started, if nobody has: a virtual machine gets it from its host then.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch
import triton
import triton.language as tl

from hf_sparsekv import OffloadConfig
from hf_sparsekv.offload import host_pages, host_pool
from hf_sparsekv.offload.host_limit import HostBudget, host_memory_limit

GB = 1 << 30
NO_HUGEPAGE = 15  # linux/mman.h
GPU = torch.device("cuda", 0)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Pages:
    """Reserved memory, to be touched and registered by hand."""

    def __init__(self, size: int, large: bool) -> None:
        self.size, self.mapped = size, host_pages.reserve(size + host_pages.HUGE)
        if self.mapped is None:
            raise MemoryError(f"no address space for {size} bytes")
        self.start = -(-self.mapped // host_pages.HUGE) * host_pages.HUGE
        host_pages.advise(self.start, size, host_pages.HUGEPAGE if large else NO_HUGEPAGE)
        host_pages.open_pages(self.start, size)
        self.registered: list[int] = []

    def register(self, parts: int = 1) -> None:
        step = self.size // parts

        def one(i: int) -> None:
            code = host_pool.cuda.register(self.start + i * step, step, GPU)
            if code:
                raise RuntimeError(f"cudaHostRegister: error {code}")
            self.registered.append(self.start + i * step)

        with ThreadPoolExecutor(parts) as workers:
            list(workers.map(one, range(parts)))

    def unregister(self) -> None:
        while self.registered:
            host_pool.cuda.unregister(self.registered.pop(), GPU)

    def unmap(self) -> None:
        host_pages.unmap(self.mapped, self.size + host_pages.HUGE)

    def tensor(self) -> torch.Tensor:
        """bf16; this object must outlive it."""
        view = {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.start, False)}
        holder = type("Bytes", (), {"__array_interface__": view})()
        return torch.from_numpy(np.asarray(holder)).view(torch.bfloat16)


# ---------------------------------------------------------------------- time to pin


def row(name: str, size: int, touch: float, register: float, free: float) -> None:
    def rate(t: float) -> str:
        return f"{size / t / 1e9:7.1f}" if t > 0 else "      -"

    total = touch + register
    print(
        f"{name:38} {size / GB:4.0f} GiB {rate(touch)} {rate(register)} {rate(total)} GB/s "
        f"{total:7.2f} s  free {free:6.3f} s",
        flush=True,
    )


def ours(name: str, size: int, threads: int, large: bool, parts: int = 1) -> None:
    pages = Pages(size, large)
    try:
        touch = seconds(lambda: host_pages.touch(pages.start, size, threads)) if threads else 0.0
        register = seconds(lambda: pages.register(parts))
        free = seconds(pages.unregister)
    finally:
        pages.unregister()
        free_pages = seconds(pages.unmap)
    row(name, size, touch, register, free + free_pages)


def torchs(size: int) -> None:
    held = []
    register = seconds(lambda: held.append(torch.empty(size, dtype=torch.uint8, pin_memory=True)))

    def free() -> None:
        held.clear()
        gc.collect()
        torch._C._host_emptyCache()

    row("torch, pin_memory=True", size, 0.0, register, seconds(free))


def arena(size: int) -> None:
    """What the package does, whole: reservation, steps, budget."""
    budget = HostBudget(OffloadConfig(max_host_bytes=2 * size))
    held = []
    register = seconds(lambda: held.append(host_pool.HostArena(size // 2, budget, GPU, pin=True)))
    register += seconds(lambda: held[0].commit(size))
    assert held[0].pinned and held[0].tensor((size,), torch.uint8).is_pinned()
    row("HostArena in two steps", size, 0.0, register, seconds(held.clear))


def pinning(begun: float, budget: float) -> None:
    print(f"{'':38} {'size':>8}   touch register   total")
    jobs: list[tuple[str, Callable[[], None]]] = [
        ("first use", lambda: ours("8 threads, large pages, first use", 16 * GB, 8, True)),
        ("again", lambda: ours("8 threads, large pages, again", 16 * GB, 8, True)),
    ]
    for size in (1 * GB, 4 * GB):
        jobs.append(("torch", lambda size=size: torchs(size)))
        jobs.append(("arena", lambda size=size: arena(size)))
        for large in (True, False):
            pages = "large pages" if large else "small pages"
            for n in (1, 4, 8, 16):
                name = f"{n} threads, {pages}"
                jobs.append((name, lambda name=name, size=size, n=n, large=large: ours(name, size, n, large)))
        name = "register alone, large pages"
        jobs.append((name, lambda name=name, size=size: ours(name, size, 0, True)))
        name = "8 threads, large, registered in 4 parts"
        jobs.append((name, lambda name=name, size=size: ours(name, size, 8, True, 4)))
    for n in (16, 4):
        name = f"{n} threads, large pages"
        jobs.append((name, lambda name=name, n=n: ours(name, 16 * GB, n, True)))
    jobs.append(("torch 16 GiB", lambda: torchs(16 * GB)))
    for name, job in jobs:
        if time.perf_counter() - begun > budget:
            print(f"{name}: left out, no time")
            continue
        try:
            job()
        except (RuntimeError, MemoryError) as error:
            print(f"{name}: {str(error).splitlines()[0]}")


# ---------------------------------------------------------------------- speed


@triton.jit
def gather(src, dst, ids, n, ROW: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Copy rows ``ids`` of ``src [.., ROW]``, BN at a time, BD values of each."""
    for i in range(tl.program_id(0) * BN, n, tl.num_programs(0) * BN):
        o_n = i + tl.arange(0, BN)
        m_n = (o_n < n)[:, None]
        b_id = tl.load(ids + o_n, mask=o_n < n, other=0).to(tl.int64)
        for d in range(0, ROW, BD):
            o_d = d + tl.arange(0, BD)
            b_row = tl.load(src + b_id[:, None] * ROW + o_d[None, :], mask=m_n)
            tl.store(dst + o_n.to(tl.int64)[:, None] * ROW + o_d[None, :], b_row, mask=m_n)


def median_ms(run: Callable[[], object], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[2:])[rounds // 2]


def speed(name: str, host: torch.Tensor) -> None:
    """``host`` bf16, pinned; the first half is copied."""
    assert host.is_pinned()
    n = host.numel() // 2
    on_gpu = torch.empty(n, dtype=torch.bfloat16, device=GPU)
    rates = [2 * n / median_ms(lambda: on_gpu.copy_(host[:n], non_blocking=True)) / 1e6]
    rates.append(2 * n / median_ms(lambda: host[:n].copy_(on_gpu, non_blocking=True)) / 1e6)
    for width, together, part in ((16384, 1, 4096), (256, 16, 256)):
        total = GB // 8 // (2 * width)  # 128 MiB
        ids = torch.randperm(host.numel() // width, device=GPU)[:total].sort().values.int()
        got = torch.empty(total, width, dtype=torch.bfloat16, device=GPU)

        def launch(grid: int, args=(host, got, ids, total, width, together, part)) -> None:
            gather[(grid,)](*args, num_warps=4)

        best = min(median_ms(lambda grid=grid: launch(grid)) for grid in (132, 264, 528, 1056))
        rates.append(2 * total * width / best / 1e6)
        some = torch.randint(total, (64,))
        want = host.view(-1, width)[ids.cpu()[some].long()]
        assert torch.equal(got[some.to(GPU)].cpu(), want), "the gather read something else"
    print(f"{name:38} {rates[0]:8.1f} {rates[1]:8.1f} {rates[2]:13.1f} {rates[3]:12.1f}  GB/s", flush=True)


@contextlib.contextmanager
def pinned(content: torch.Tensor, large: bool, parts: int = 1) -> Iterator[torch.Tensor]:
    """A registered copy of ``content``."""
    pages = Pages(content.nbytes, large)
    try:
        host_pages.touch(pages.start, pages.size)
        pages.register(parts)
        yield pages.tensor().copy_(content)
        torch.cuda.synchronize()
    finally:
        pages.unregister()
        pages.unmap()


def speeds() -> None:
    print(f"\n{'':38}      H2D      D2H  32 KB blocks  512 B rows")
    n = GB // 2
    torchs_own = torch.empty(n, dtype=torch.bfloat16, pin_memory=True)
    some = torch.arange(16381, dtype=torch.int16)  # finite numbers; a prime, so that no two rows are alike
    torchs_own.view(torch.int16).copy_(some.repeat(-(-n // len(some)))[:n])
    speed("torch, pin_memory=True", torchs_own)
    for large in (True, False):
        with pinned(torchs_own, large) as mine:
            speed(f"registered, {'large' if large else 'small'} pages", mine)
    with pinned(torchs_own, True, parts=8) as mine:
        over_borders(mine, torchs_own)


def over_borders(mine: torch.Tensor, content: torch.Tensor) -> None:
    """Whether one copy may cross registrations: if so, no copy needs cutting."""
    on_gpu = torch.zeros_like(content, device=GPU)
    for name, run in (
        ("H2D", lambda: on_gpu.copy_(mine, non_blocking=True)),
        ("D2H", lambda: mine.copy_(on_gpu, non_blocking=True)),
    ):
        try:
            ms = median_ms(run)
            result = "right" if torch.equal(on_gpu.cpu(), content) and torch.equal(mine, content) else "WRONG"
            print(f"one copy over 8 registrations, {name}: {content.nbytes / ms / 1e6:.1f} GB/s, {result}")
        except RuntimeError as error:
            on_gpu.copy_(content)
            print(f"one copy over 8 registrations, {name}: {str(error).splitlines()[0]}")


def machine() -> None:
    def told(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return "-"

    gib = psutil.virtual_memory().total / GB
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    print(f"MemTotal {gib:.1f} GiB, host_memory_limit {host_memory_limit() / GB:.1f} GiB")
    print("cgroup:", told("/sys/fs/cgroup/memory.max"), told("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    print("large pages:", told("/sys/kernel/mm/transparent_hugepage/enabled"))
    near = host_pages.near_cpus(GPU)
    print(
        "NUMA nodes:", told("/sys/devices/system/node/online"), "CPUs near the GPU:", sorted(near) if near else "all\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=45, help="seconds after which no further pinning is begun")
    args = parser.parse_args()
    begun = time.perf_counter()
    torch.zeros(1, device=GPU)
    machine()
    pinning(begun, args.budget)
    speeds()
    gib = psutil.virtual_memory().total / GB
    print(f"\nMemTotal at the end {gib:.1f} GiB; {time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
