"""An imitation of CUDA's registration of memory, and small pools, for the tests of host memory."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import warnings

import torch

from hf_sparsekv import OffloadConfig
from hf_sparsekv.kv import pool
from hf_sparsekv.kv.block_ids import BlockIds
from hf_sparsekv.kv.pool import BlockPool
from hf_sparsekv.offload import host_pages, host_pool
from hf_sparsekv.offload.host_limit import HostBudget
from hf_sparsekv.offload.host_pages import PAGE

MB = 1 << 20
BLOCK_SHAPE = (2, 16, 32)  # float32: one page
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def arena_of(blocks: BlockPool) -> host_pool.HostArena | None:
    """The host memory that a pool's blocks lie in: tests look into it here."""
    return blocks._arena


def block_bytes_of(blocks: BlockPool) -> int:
    return blocks._block_bytes


class FakeCuda:
    """Registers ranges as CUDA does, and complains about what CUDA would not survive."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.log: list[tuple] = []
        self.fail_at: set[int] = set()  # which calls of register() fail
        self.stop_at: set[int] = set()  # which are interrupted after they have worked
        self.calls = 0
        self.in_capture = False

    def register(self, address, size, device):
        self.calls += 1
        assert address % PAGE == size % PAGE == 0
        assert all(address + size <= a or a + n <= address for a, n in self.live.items()), "registered twice"
        if self.calls in self.fail_at:
            return 2
        self.live[address] = size
        self.log.append(("register", address, size))
        if self.calls in self.stop_at:
            raise KeyboardInterrupt
        return 0

    def unregister(self, address, device):
        assert self.log[-1][0] in ("synchronize", "unregister", "register"), "the memory is gone already"
        self.log.append(("unregister", address, self.live.pop(address)))
        return 0

    def synchronize(self, device):
        assert not self.in_capture
        self.log.append(("synchronize",))

    def capturing(self):
        return self.in_capture

    def told(self, what):
        return [entry[1:] for entry in self.log if entry[0] == what]


@contextlib.contextmanager
def faked(monkeypatch):
    """Everything is to be pinned, by an imitation. Checks at the end that each range was unregistered once."""
    gc.collect()
    cuda = FakeCuda()

    def unmap(address, size):
        assert not any(address <= a < address + size for a in cuda.live), "unmapped while registered"
        cuda.log.append(("unmap", address, size))
        host_pages.unmap(address, size)

    monkeypatch.setattr(host_pool, "cuda", cuda)
    monkeypatch.setattr(host_pool, "unmap", unmap)
    monkeypatch.setattr(pool, "_pins", lambda host, device: host.config.pin_memory is not False)
    yield cuda
    gc.collect()
    assert not cuda.live
    assert sorted(cuda.told("register")) == sorted(cuda.told("unregister"))


def budget_of(size=64 * MB, **kwargs):
    return HostBudget(OffloadConfig(max_host_bytes=size, **kwargs))


def make_pool(budget, capacity=16, device=CPU, block_shape=BLOCK_SHAPE, dtype=torch.float32):
    heads, block, dim = block_shape
    return BlockPool(
        heads=heads,
        block_size=block,
        token_dim=dim,
        split=dim // 2,
        dtype=dtype,
        device=device,
        host=budget,
        capacity=capacity,
        ids=BlockIds(),
    )


def grow(blocks, n):
    """Make room for ``n`` more physical blocks: their ids, which are given back if there is none."""
    ids = blocks.ids.take(n)
    try:
        blocks.fit()
    except BaseException:
        blocks.ids.drop(ids)
        raise
    return ids


def fill(blocks, n):
    """Take and write ``n`` physical blocks, each with its number."""
    physical_ids = torch.from_numpy(grow(blocks, n)).to(blocks.device)
    values = physical_ids.float()[:, None, None, None].expand(n, *blocks.kv.shape[1:]).to(blocks.kv.dtype)
    blocks.write(physical_ids, values)
    return physical_ids


def intact(blocks):
    used = blocks.ids.used
    want, held = torch.arange(used, dtype=torch.float32), blocks.kv[:used].float()
    return torch.equal(held.amax((1, 2, 3)), want) and torch.equal(held.amin((1, 2, 3)), want)


def run_alone(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr


def in_child(work) -> None:
    """Run ``work`` in a forked child; what it raises is raised here."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of every fork of a process with threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            signal.alarm(120)
            torch.set_num_threads(1)  # OpenMP's threads have not come along: with more than one torch waits for them
            work()
            code = 0
        except BaseException as error:
            os.write(write, repr(error).encode()[:4000])
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, said or f"the child ended with {code}"
