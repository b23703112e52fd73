"""Compile every kernel for sm_90, without a GPU: the interpreter does not see what the compiler refuses.

``python tests/ops/compile_kernels.py`` calls the operators' kernels with tensors in host memory, of the shapes that a
model's step has, and compiles what they launch instead of launching it. With ``--stats`` it prints each kernel's
registers, spilled bytes and shared memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton
from conftest import Place
from decode_cases import Case as Decode
from decode_cases import in_frames
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_sparsekv.ops import _overlap
from hf_sparsekv.ops.sparse_decode.triton import sparse_decode


class Hopper:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def place() -> Place:
    return Place("cpu", torch.bfloat16)


def sparse_decodes() -> None:
    usual = Decode(batch=1, group=4, dk=128, dv=128, block_size=64, cap=3, chosen=2)
    latents = Decode(batch=1, heads=1, group=20, dk=576, dv=512, block_size=64, cap=3, chosen=2, latents=True)
    for case in (usual, latents):
        for granularity in ("token", "block", "all"):
            args, named = case.make(place(), granularity)
            sparse_decode(*args, **named)
            if granularity != "all":
                args, named = in_frames(place(), args, named)
                counts = torch.zeros(2, 1, case.heads, dtype=torch.int64)
                sparse_decode(
                    *args, **named, attended=counts[0], from_host=counts[1], lse=torch.empty(args[0].shape[:2])
                )


CASES = (sparse_decodes,)


def usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"{os.getpid()}.cubin"
    path.write_bytes(cubin)
    told = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    path.unlink()
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}


def main() -> None:
    triton.runtime.driver.set_active(Hopper())
    _overlap.overlap = lambda t: {"PDL": True, "launch_pdl": True}  # as on Hopper
    run, found = JITFunction.run, {}

    def compile_only(self, *args, grid, warmup, **named):
        kernel = run(self, *args, grid=grid, warmup=True, **named)
        found.setdefault(self.fn.__name__, []).append(kernel)
        return kernel

    JITFunction.run = compile_only
    for case in CASES:
        case()
    for name, kernels in found.items():
        for kernel in kernels:
            told = {**usage(kernel.asm["cubin"]), "shared": kernel.metadata.shared} if "--stats" in sys.argv else {}
            print(json.dumps({"kernel": name, **told}))


if __name__ == "__main__":
    main()
