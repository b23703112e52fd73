"""``hf-sparsekv doctor``."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from ..attention.interface import NAME
from ..offload.host_limit import host_memory_limit
from ..offload.link import link_name, measured_rate
from ..ops._cuda import why_not
from ..ops._device import gpu
from ..ops._dispatch import has_triton
from ..ops.layers.quantised_linear.lookup import AMPERE
from ..policies.crossover import guess, lookup
from .output import messages, results, size

_PACKAGES = ("hf-sparsekv", "torch", "transformers", "triton", "accelerate", "liger-kernel", "flash-attn-4")
_FORMATS = ("bitsandbytes", "torchao", "compressed-tensors", "gptqmodel")  # libraries of quantised weights
# operator -> its folder in hf_sparsekv.ops
_OPERATORS = {
    "append": "storage.append",
    "block_score": "selection.block_score",
    "block_select": "selection.topk_select",
    "token_score": "selection.token_score",
    "token_select": "selection.topk_select",
    "sparse_decode": "attention.sparse_decode",
}
METHOD = "token_only"  # the default method, as the crossover table names it
_QUERY = "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"


def doctor() -> None:
    """Show versions, GPU, link, memory, and what will run where."""
    with messages.status("looking around"):
        sections = {
            "versions": _versions(_PACKAGES),
            "quantised weights": _versions(_FORMATS),
            "GPU": gpus(),
            "host memory": _host(),
            "transformers": _registered(),
            "operators": operators(),
        }
    for title, rows in sections.items():
        results.print(title, style="bold")
        for name, value in rows:
            results.print(f"  {name:<20} {value}", markup=False)


def _versions(packages: tuple[str, ...]) -> list[tuple[str, str]]:
    rows = [("python", platform.python_version())] if packages is _PACKAGES else []
    for name in packages:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (torch was built without CUDA)"
        return [("none", f"everything runs on the CPU{built}: right, but not fast")]
    rows = []
    details = nvidia_smi()
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{p.name}, {size(p.total_memory)}, compute {p.major}.{p.minor}"))
        rows.append(("", f"crossover {_crossover(p.name, index)}"))
        rows.append(("", f"kernels in CUDA C++: {why_not(index) or 'used'}"))
        rows.append(("", f"quantised linear layers by a table: {why_not(index, AMPERE) or 'used'}"))
        if shared := getattr(p, "shared_memory_per_block_optin", 0):
            rows.append(("", f"{shared >> 10} KB of shared memory a program"))
        if index < len(details):
            driver, now, most, width = details[index]
            rows.append(("", f"driver {driver}, PCIe {now} of {most}, width {width}"))
        rows.append(("", f"link {link_name(index)}"))
        try:
            rows.append(("", f"pinned host to device: {measured_rate(index) / 1e9:.1f} GB/s"))
        except RuntimeError as error:  # out of memory, or pinning is not allowed here
            rows.append(("", f"pinned host to device: not measured ({str(error).splitlines()[0]})"))
    return rows


def _crossover(name: str, index: int) -> str:
    """Whether the length up to which dense attention is as fast was measured, for the default method."""
    if lookup(name, METHOD):
        return "measured"
    there = gpu(torch.device("cuda", index)) if has_triton() else None
    if there is None or guess(there, METHOD) is None:
        return "not known: all steps select"
    from_what = f"{there.bandwidth / 1e9:,.0f} GB/s and {there.processors} processors"
    return f"guessed from {from_what}: `hf-sparsekv calibrate-device` measures it"


def nvidia_smi() -> list[list[str]]:
    """Driver and link of each GPU; empty where nvidia-smi is missing or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 4]


def _host() -> list[tuple[str, str]]:
    memory = psutil.virtual_memory()
    limit = host_memory_limit()
    rows = [("machine", f"{size(memory.total)}, {size(memory.available)} available")]
    if limit < memory.total:
        rows.append(("container", f"limited to {size(limit)}"))
    rows.append(
        ("offloaded KV", f"{size(int(0.8 * limit))} at most, unless OffloadConfig(max_host_bytes=...) says else")
    )
    return rows


def _registered() -> list[tuple[str, str]]:
    from transformers import AttentionInterface, AttentionMaskInterface

    def told(names) -> str:
        return "registered" if NAME in names else "NOT registered"

    return [
        (f"attention {NAME!r}", told(AttentionInterface().valid_keys())),
        (f"mask {NAME!r}", told(AttentionMaskInterface().valid_keys())),
    ]


def operators() -> list[tuple[str, str]]:
    rows = []
    for operator, folder in _OPERATORS.items():
        kernel = importlib.util.find_spec(f"hf_sparsekv.ops.{folder}.triton") is not None
        if kernel and torch.cuda.is_available() and has_triton():
            rows.append((operator, "Triton kernel on the GPU"))
            continue
        if not kernel:
            why = "there is no kernel yet"
        elif not torch.cuda.is_available():
            why = "no GPU"
        else:
            why = "Triton is not installed: pip install triton"
        rows.append((operator, f"torch reference ({why})"))
    return rows
