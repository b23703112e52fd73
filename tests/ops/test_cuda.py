"""The compiler of kernels in CUDA C++, where it refuses; it needs no GPU."""

from __future__ import annotations

from enum import IntEnum

import pytest

from hf_sparsekv.ops import _cuda
from hf_sparsekv.ops._cuda import compile_file


class Status(IntEnum):
    SUCCESS = 0
    OUT_OF_MEMORY = 1


class Refuses:
    """As NVRTC, which ends its log with a NUL and writes to memory that is given to it."""

    def __init__(self, log: str) -> None:
        self.log, self.programs = log.encode() + b"\0", 0

    def nvrtcCreateProgram(self, *args):
        self.programs += 1
        return Status.SUCCESS, self

    def nvrtcCompileProgram(self, *args):
        return (Status.OUT_OF_MEMORY,)

    def nvrtcGetProgramLogSize(self, program):
        return Status.SUCCESS, len(self.log)

    def nvrtcGetProgramLog(self, program, to):
        memoryview(to)[:] = self.log  # raises for bytes, which Python shares where they are short
        return (Status.SUCCESS,)

    def nvrtcDestroyProgram(self, program):
        self.programs -= 1


@pytest.mark.parametrize("log, said", [("a.cu(1): error: no\n", "a.cu(1): error: no"), ("", "OUT_OF_MEMORY")])
def test_source_that_does_not_compile(log, said):
    """Says why, or how it failed."""
    compiler = Refuses(log)
    with pytest.raises(RuntimeError) as told:
        compile_file(compiler, 90, "hf_sparsekv.ops.selection.topk_select", "cluster.cu", {})
    assert str(told.value) == said
    assert compiler.programs == 0


@pytest.mark.parametrize("major, clusters, products", [(7, False, False), (8, False, True), (9, True, True)])
def test_what_a_kernel_needs(monkeypatch, major, clusters, products):
    """Clusters, or only what is there since compute 8.0."""
    monkeypatch.setattr(_cuda.torch.version, "cuda", "13.0")
    monkeypatch.setattr(_cuda.torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(_cuda, "_bindings", lambda: ("driver", "nvrtc"))
    assert (_cuda.why_not(0) is None) == clusters
    assert (_cuda.why_not(0, 8) is None) == products
