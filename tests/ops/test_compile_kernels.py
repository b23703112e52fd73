"""Figures of kernels in CUDA C++, and the table that has them."""

from __future__ import annotations

import json
from subprocess import CompletedProcess

import compile_kernels
import pytest
from test_kernels import compiled

# Of cluster.cu, bounded to 32 registers and as it is; NVRTC 13.5.
SPILLS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'topk_select_cluster_kernel' for 'sm_90'
ptxas info    : Function properties for topk_select_cluster_kernel
ptxas         .     48 bytes stack frame, 44 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 48 bytes cumulative stack size, 5952 bytes smem
ptxas info    : Compile time = 212.273 ms
"""
USUAL = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'topk_select_cluster_kernel' for 'sm_120'
ptxas info    : Function properties for topk_select_cluster_kernel
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 2672 bytes smem
ptxas info    : Compile time = 230.952 ms
"""


def test_what_ptxas_says():
    none = {"STACK": 0, "SPILL": 0, "LOCAL": 0}
    assert compile_kernels.ptxas_usage(USUAL) == {"REG": 64, **none, "shared": 2672}
    assert compile_kernels.ptxas_usage(USUAL.replace(", 2672 bytes smem", "")) == {"REG": 64, **none, "shared": 0}
    assert compile_kernels.ptxas_usage(SPILLS) == {"REG": 32, "STACK": 48, "SPILL": 44, "LOCAL": 0, "shared": 5952}
    with pytest.raises(ValueError, match="nothing of ptxas"):
        compile_kernels.ptxas_usage("")


@pytest.mark.skipif(compile_kernels.nvrtc() is None, reason=f"{compile_kernels.MISSING} are not compiled")
def test_all_in_cuda_compile():
    """For sm_90, to the end, in clusters of each size; labels' scores of each width; keys and values in codes, too.
    None spills."""
    done = compiled("compile_kernels.py", "--stats", "--only", "in_cuda")
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["kernel"] for one in found} == compile_kernels.cuda_kernels()
    assert {one["macros"].get("CLUSTER") for one in found} == {1, 2, 4, 8, None}
    assert {one["macros"].get("WIDTH") for one in found} == {16, 32, 64, None}
    assert {one["macros"].get("CODES") for one in found} == {0, 1, None}
    assert not [one for one in found if one["SPILL"] or one["LOCAL"]]


@pytest.mark.parametrize("there", [False, True])
def test_rows_of_what_cannot_be_compiled_stay(monkeypatch, tmp_path, capsys, there):
    """Without NVRTC the table keeps its figures of kernels in CUDA C++; all others are those of now."""
    path, asked = tmp_path / "kernels.csv", []
    head, old = (
        "sm,kernel,launch,registers,stack_bytes,local_bytes,shared_bytes",
        "90,token_score_labels_kernel,0,1,2,3,4",
    )
    path.write_text(f"{head}\n{old}\n90,gone_kernel,0,5,6,7,8\n")

    def run(command, **how):
        asked.append(command)
        one = {"REG": 9, "STACK": 0, "LOCAL": 0, "shared": 10}
        names = ["pack_kernel", *(["token_score_labels_kernel"] if "in_cuda" in command else [])]
        return CompletedProcess(command, 0, "".join(json.dumps({"kernel": name, **one}) + "\n" for name in names))

    monkeypatch.setattr(compile_kernels, "ARCHITECTURES", (90,))
    monkeypatch.setattr(compile_kernels, "nvrtc", lambda: "a compiler" if there else None)
    monkeypatch.setattr(compile_kernels.subprocess, "run", run)
    compile_kernels.write_table(path)
    now = "90,token_score_labels_kernel,0,9,0,0,10" if there else old
    assert path.read_text().splitlines() == [head, "90,pack_kernel,0,9,0,0,10", now]
    assert capsys.readouterr().err.count("\n") == (not there)
    assert all("small_layers" in command for command in asked)
