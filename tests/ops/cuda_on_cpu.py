"""Kernels in CUDA C++ on a CPU: compiled by the system's C++ compiler with ``cuda_on_cpu.h`` in place of CUDA."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from hf_sparsekv.ops._cuda import read_source

_HEADER, _SYSTEM = (Path(__file__).with_name(name) for name in ("cuda_on_cpu.h", "cuda_on_cpu_system.h"))
_KEPT = Path(__file__).parents[2] / "build" / "cuda_on_cpu"
_MET = 'extern "C" int met() { return meetings; }'
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
    """The kernel ``name`` of ``file``, a resource of ``package``, with these macros; ``build/`` keeps it.

    Raises:
        RuntimeError: it does not compile; with the compiler's messages.
    """
    entry = (
        f'extern "C" int run(i64* a, int x, int y, int shared, int seed, i64* places, int n) {{ '
        "given.clear(), outside = meetings = 0; "
        f"for (int i = 0; i < n; i += 2) given.push_back({{places[i], places[i + 1]}}); "
        f"launch([](i64* a) {{ call({name}, a); }}, a, x, y, shared, seed); return outside; }}"
    )
    # Not as options of the compiler: macros from there keep it from using a header that is compiled already.
    macros = [f"#define {key} {value}" for key, value in defined.items()]
    parts = [*macros, _HEADER.read_text(), read_source(package, file, defined), entry, _MET]
    return CpuKernel(ctypes.CDLL(str(_compiled("\n".join(parts), "kernel.cpp", ".so", "-include", _system()))))


def _system() -> str:
    """The system's headers, with what the compiler makes of them beside: it looks there."""
    made = _compiled(_SYSTEM.read_text(), "system.h", ".h.gch", "-x", "c++-header")
    header = made.with_suffix("")
    if not header.exists():
        shutil.copy(_SYSTEM, header)
    return str(header)


def _compiled(source: str, file: str, suffix: str, *options: str) -> Path:
    """The compiler's result for ``source``: it does so once for all workers and runs."""
    command = [COMPILER, "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-pthread", *options]
    key = hashlib.sha256("\n".join([_version(), *command, source]).encode()).hexdigest()[:32]
    made = _KEPT / (key + suffix)
    if not made.exists():
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as folder:
            (Path(folder) / file).write_text(source)
            done = subprocess.run(
                [*command, file, "-o", "made"], cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-4000:])
            os.replace(Path(folder) / "made", made)  # at once: another worker may look
    return made


@cache
def _version() -> str:
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
