"""Properties of all kernels: they compile, an operator's signature stands once, and few arguments are enough."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import forked
import pytest
import torch

from hf_sparsekv import ops
from hf_sparsekv.ops import _device
from hf_sparsekv.ops._dispatch import operator
from hf_sparsekv.ops.attention.sparse_decode import config as decode_config

ROOT = Path(__file__).parents[2]
MOST = 26  # parameters, compile-time ones included


def kernels() -> dict[str, int]:
    """Parameters of each kernel in Triton; a function without `@triton.jit` is none."""
    found = {}
    for path in Path(ops.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                found[node.name] = len(node.args.args)
    return found


def operators() -> list:
    """The operators of all folders, with the folder's kernels of the same names."""
    found = []
    for folder in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if folder.ispkg:
            package = importlib.import_module(folder.name)
            for name in getattr(package, "__all__", ()):  # the folders of operators have none
                if hasattr(call := getattr(package, name), "kernel"):
                    found.append(pytest.param(call, id=name))
    return found


def compiled(script: str, *args: str) -> CompletedProcess:
    """The output of a script beside this file, where Triton compiles instead of interpreting."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    here = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    return forked.run([str(Path(__file__).with_name(script)), *args], env=here)


@pytest.mark.slow
def test_all_compile():
    """For sm_90, up to the GPU dialect; the interpreter takes a branch that gives a name another type, for instance."""
    done = compiled("compile_kernels.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == set(kernels())


def test_lengths_and_drafts_compile_nothing_anew():
    """One kernel for each set of constants, whatever the rows, lengths, drafts and offsets of an answer are."""
    done = compiled("specialisations.py")
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["kernel"] for one in found} == set(kernels())
    assert [one for one in found if one["kinds"] != 1] == []


@pytest.mark.parametrize("group", [20, 128])
@pytest.mark.parametrize("granularity", ["token", "all"])
@pytest.mark.parametrize("means", [False, True], ids=["", "means"])
@pytest.mark.parametrize("arch", sorted(_device.SHARED))
def test_tiles_of_latents_fit_the_shared_memory(monkeypatch, arch, means, granularity, group):
    """An RTX 4090 has 99 KB a program, an H200 227; on the latter nothing is cut down."""
    q = torch.empty(2, group, 576, dtype=torch.bfloat16)
    kv, recent = (torch.empty(2, 1, n, 576, dtype=torch.bfloat16) for n in (64, 72))
    given, limit = (q, kv, recent, 512, granularity, means), _device.SHARED[arch]
    usual = decode_config.config(*given)
    monkeypatch.setattr(decode_config, "shared_memory", lambda t: limit)
    found = decode_config.config(*given)
    assert decode_config.shared_bytes(found, 576, 512, 2, means) <= limit
    assert (found == usual) == (limit >= decode_config.shared_bytes(usual, 576, 512, 2, means))


@pytest.mark.parametrize(
    "tile, heads, stages, measured",
    [(32, 32, 2, 75776), (64, 32, 2, 114688), (32, 64, 2, 114688), (32, 32, 3, 112640), (32, 32, 1, 102400)],
)
def test_shared_memory_is_what_the_compiler_says(tile, heads, stages, measured):
    """For sm_89, latents of 576 entries in 16 bits; Triton 3.7.1."""
    one = decode_config.Config(tile, heads, programs=132, warps=8, stages=stages)
    assert decode_config.shared_bytes(one, 576, 512, 2) == measured


# They read weights, or what their predecessor waited for, before they wait themselves.
WAIT_LATER = {
    *("experts_down_kernel", "quantised_one_row_kernel", "small_linear_one_row_kernel", "small_linear_rows_kernel"),
    "topk_select_collect_kernel",
}


def test_every_kernel_waits_for_those_before_it():
    """With programmatic dependent launch; one that did not would be right in most runs."""
    first, later = {}, set()
    for file in Path(ops.__file__).parent.rglob("*.py"):
        for one in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(one, ast.FunctionDef) and one.name.endswith("_kernel")):
                continue
            if "PDL" in (arg.arg for arg in one.args.args):
                first[one.name] = ast.unparse(one.body[1])
                calls = [call for call in ast.walk(one) if isinstance(call, ast.Call)]
                to = {ast.unparse(call.func) for call in calls if "PDL" in map(ast.unparse, call.args)}
                later |= {one.name} if to - {"release"} else set()  # itself, or a function that it hands that to
    assert len(first) > 40 and later == set(first)
    assert {name for name, call in first.items() if call not in ("begin(PDL)", "wait(PDL)")} == WAIT_LATER


def test_few_parameters():
    assert {name: n for name, n in kernels().items() if n > MOST} == {}


@pytest.mark.parametrize("call", operators())
def test_a_kernel_takes_what_its_operator_takes(call):
    """The same names, kinds and defaults; ``config`` in addition."""
    expected = [(p.name, p.kind, p.default) for p in inspect.signature(call).parameters.values()]
    got = [(p.name, p.kind, p.default) for p in inspect.signature(call.kernel()).parameters.values()]
    assert [p for p in got if p[0] != "config"] == expected
    assert call.__doc__.strip()


def test_where_an_operator_runs(monkeypatch):
    """On CUDA tensors the kernel, unless host memory is not pinned or ``when`` says no; the reference elsewhere."""

    class There:
        def __init__(self, is_cuda: bool, pinned: bool = False) -> None:
            self.is_cuda, self.is_pinned = is_cuda, lambda: pinned

    def double(q, kv, times=1):
        return "reference"

    double.__module__ = "somewhere.reference"
    asked = []
    kernel = type(sys)("somewhere.triton")
    kernel.double = lambda *args, **named: asked.append((args, named)) or "kernel"
    monkeypatch.setitem(sys.modules, "somewhere", type(sys)("somewhere"))
    monkeypatch.setitem(sys.modules, "somewhere.triton", kernel)
    call = operator(double, on="q", in_place=("kv",), when=lambda q, kv, times=1: times < 3)
    gpu, host, pinned = There(True), There(False), There(False, True)
    assert call(gpu, gpu) == call(gpu, pinned, 2) == call(kv=gpu, q=gpu, times=2) == "kernel"
    assert asked == [((gpu, gpu), {}), ((gpu, pinned, 2), {}), ((), {"kv": gpu, "q": gpu, "times": 2})]
    assert call(host, gpu) == call(gpu, host) == call(gpu, gpu, 3) == call(gpu, gpu, times=3) == "reference"
    with pytest.raises(TypeError, match="kv"):
        call(torch.zeros(1))
