"""Kernels in CUDA C++ on a CPU: compiled by the system's C++ compiler with ``cuda_on_cpu.h`` in place of CUDA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from hf_sparsekv.ops._cuda import read_source

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class CpuKernel:
    """As :class:`hf_sparsekv.ops._cuda.Kernel`; ``seed``: of the order in which threads take turns.

    ``meetings``: how often the blocks of the last launch have met at a barrier of their cluster, all together.
    """

    shared_bytes = 1 << 20

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.seed = self.launches = self.meetings = 0

    def resident(self, threads: int, where: Tensor, shared: int = 0) -> int:
        return 6

    def launch(self, grid: tuple[int, int], threads: int, shared: int, where: Tensor, *args) -> None:
        values = [t.data_ptr() if isinstance(t, Tensor) else t or 0 for t in args]
        packed = (ctypes.c_longlong * len(values))(*values)
        self.launches += 1
        places = [place for t in args if isinstance(t, Tensor) for place in _place(t)]
        outside = self._library.run(
            packed, *grid, shared, self.seed, (ctypes.c_longlong * len(places))(*places), len(places)
        )
        self.meetings = self._library.met()
        assert outside == 0, f"{outside} loads from elsewhere than the tensors, or not aligned"


def _place(t: Tensor) -> tuple[int, int]:
    """Addresses where ``t`` begins, and behind its last number."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) if t.numel() else -1
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


@cache
def build(package: str, file: str, name: str, **defined: float) -> CpuKernel:
    """The kernel ``name`` of ``file``, a resource of ``package``, with these macros.

    Raises:
        RuntimeError: it does not compile; with the compiler's messages.
    """
    folder = Path(tempfile.mkdtemp(prefix="cuda-on-cpu-"))
    entry = (
        f'extern "C" int run(i64* a, int x, int y, int shared, int seed, i64* places, int n) {{ '
        "given.clear(), outside = meetings = 0; "
        f"for (int i = 0; i < n; i += 2) given.push_back({{places[i], places[i + 1]}}); "
        f"launch([](i64* a) {{ call({name}, a); }}, a, x, y, shared, seed); return outside; }}"
    )
    source = read_source(package, file, defined) + "\n" + entry + 'extern "C" int met() { return meetings; }'
    (folder / "kernel.cpp").write_text(source)
    options = [f"-D{key}={value}" for key, value in defined.items()]
    header = Path(__file__).with_name("cuda_on_cpu.h")
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", *options, "-include", str(header)]
    try:
        done = subprocess.run(
            [*command, "kernel.cpp", "-o", "kernel.so"], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        return CpuKernel(ctypes.CDLL(str(folder / "kernel.so")))
    finally:
        shutil.rmtree(folder)
