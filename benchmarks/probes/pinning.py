"""How long does it take to pin host memory, and is memory pinned by us as fast as torch's?

    python -m benchmarks.probes.pinning [--budget SECONDS]

First table: time to touch, to register and to unregister, for torch's allocator and for the steps of `host_pages` with
several threads, with and without large pages. Second: copies and in-place gathers from it. Takes about a minute; what
would begin after the budget is left out. The first row is measured on memory that nobody has used since the machine
started, if nobody has: a virtual machine gets it from its host then.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import psutil
import torch

from hf_sparsekv import OffloadConfig
from hf_sparsekv.offload import host_pages, host_pool
from hf_sparsekv.offload.host_limit import HostBudget, host_memory_limit
from hf_sparsekv.results import versions
from hf_sparsekv.tuning.timing import gbps

from .gather import best_gather

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
        self.registered = False

    def register(self) -> None:
        code = host_pool.cuda.register(self.start, self.size, GPU)
        if code:
            raise RuntimeError(f"cudaHostRegister: error {code}")
        self.registered = True

    def unregister(self) -> None:
        if self.registered:
            host_pool.cuda.unregister(self.start, GPU)
        self.registered = False

    def unmap(self) -> None:
        self.unregister()
        host_pages.unmap(self.mapped, self.size + host_pages.HUGE)

    def tensor(self) -> torch.Tensor:
        """bf16; this object must outlive it."""
        view = {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.start, False)}
        holder = type("Bytes", (), {"__array_interface__": view})()
        return torch.from_numpy(np.asarray(holder)).view(torch.bfloat16)


# ---------------------------------------------------------------------- time to pin: seconds to touch, register, free


def ours(size: int, threads: int, large: bool) -> tuple[float, float, float]:
    pages = Pages(size, large)
    try:
        touch = seconds(lambda: host_pages.touch(pages.start, size, threads)) if threads else 0.0
        return touch, seconds(pages.register), seconds(pages.unregister)
    finally:
        pages.unmap()


def torchs(size: int) -> tuple[float, float, float]:
    held = []
    register = seconds(lambda: held.append(torch.empty(size, dtype=torch.uint8, pin_memory=True)))

    def free() -> None:
        held.clear()
        gc.collect()
        torch._C._host_emptyCache()

    return 0.0, register, seconds(free)


def arena(size: int) -> tuple[float, float, float]:
    """What the package does, whole: reservation, steps, budget."""
    budget, held = HostBudget(OffloadConfig(max_host_bytes=2 * size)), []
    register = seconds(lambda: held.append(host_pool.HostArena(size // 2, budget, GPU, pin=True)))
    register += seconds(lambda: held[0].commit(size))
    return 0.0, register, seconds(held.clear)


def pinning(begun: float, budget: float) -> None:
    print(f"{'':38} {'size':>8}   touch register   total")
    jobs = [
        (f"8 threads, large pages, {use}", 16, partial(ours, threads=8, large=True)) for use in ("first use", "again")
    ]
    for size in (1, 4):
        jobs += [("torch, pin_memory=True", size, torchs), ("HostArena in two steps", size, arena)]
        for large in (True, False):
            for n in (1, 4, 8, 16):
                name = f"{n} threads, {'large' if large else 'small'} pages"
                jobs.append((name, size, partial(ours, threads=n, large=large)))
        jobs.append(("register alone, large pages", size, partial(ours, threads=0, large=True)))
    jobs += [(f"{n} threads, large pages", 16, partial(ours, threads=n, large=True)) for n in (16, 4)]
    jobs.append(("torch, pin_memory=True", 16, torchs))
    for name, size, job in jobs:
        if time.perf_counter() - begun > budget:
            print(f"{name}: left out, no time")
            continue
        try:
            touch, register, free = job(size * GB)
        except (RuntimeError, MemoryError) as error:
            print(f"{name}: {str(error).splitlines()[0]}")
            continue
        rates = [f"{size * GB / t / 1e9:7.1f}" if t else "      -" for t in (touch, register, touch + register)]
        print(
            f"{name:38} {size:4} GiB {' '.join(rates)} GB/s {touch + register:7.2f} s  free {free:6.3f} s", flush=True
        )


# ---------------------------------------------------------------------- speed


def speed(name: str, host: torch.Tensor) -> None:
    """Copies of the first half of ``host`` (bf16, pinned) both ways; gathers of 32 KB and of 512 bytes."""
    if not host.is_pinned():
        raise RuntimeError(f"{name} is not pinned")
    half = host[: host.numel() // 2]
    on_gpu = torch.empty_like(half, device=GPU)
    rates = [
        max(gbps(half.nbytes, lambda: on_gpu.copy_(half, non_blocking=True))),
        max(gbps(half.nbytes, lambda: half.copy_(on_gpu, non_blocking=True))),
        *(best_gather(host.view(-1, width), GB // 8 // (2 * width)) for width in (16384, 256)),
    ]
    print(f"{name:38} {rates[0]:8.1f} {rates[1]:8.1f} {rates[2]:13.1f} {rates[3]:12.1f}  GB/s", flush=True)


def speeds() -> None:
    print(f"\n{'':38}      H2D      D2H  32 KB blocks  512 B rows")
    n = GB // 2
    content = torch.empty(n, dtype=torch.bfloat16, pin_memory=True)
    some = torch.arange(16381, dtype=torch.int16)  # finite numbers; a prime, so that no two rows are alike
    content.view(torch.int16).copy_(some.repeat(-(-n // len(some)))[:n])
    speed("torch, pin_memory=True", content)
    for name, large in (("large pages", True), ("small pages", False)):
        pages = Pages(content.nbytes, large)
        try:
            host_pages.touch(pages.start, pages.size)
            pages.register()
            speed(f"registered, {name}", pages.tensor().copy_(content))
            torch.cuda.synchronize()
        finally:
            pages.unmap()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=45, help="seconds after which no further pinning is begun")
    args = parser.parse_args()
    begun = time.perf_counter()
    torch.zeros(1, device=GPU)
    gib = psutil.virtual_memory().total / GB
    print(torch.cuda.get_device_name(), versions())
    near = sorted(host_pages.near_cpus(GPU) or ()) or "all"
    print(f"memory {gib:.1f} GiB, limit {host_memory_limit() / GB:.1f} GiB; CPUs near the GPU: {near}\n")
    pinning(begun, args.budget)
    speeds()
    print(f"\n{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
