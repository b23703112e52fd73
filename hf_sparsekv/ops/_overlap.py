"""Programmatic dependent launch: a kernel starts before the kernel that it waits for has ended.

On Hopper and later, the next kernel of a stream may start as soon as all programs of this one have begun. It waits
where it first needs results of earlier kernels. This hides a kernel's start, about a microsecond; a decode step has
several hundred. See "Programmatic Dependent Launch and Synchronization" in NVIDIA's CUDA programming guide.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernels before this one. Every kernel calls this, or :func:`begin`, before it reads or writes.

    Data that no earlier kernel writes, such as weights, may be read before the wait. So may the data that the
    predecessor waited for, bypassing L1, if the predecessor releases after its wait: see :mod:`.layers.experts`. Each
    kernel waits for its predecessor's end, and that one waited for its own, so all earlier kernels are done.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start once all programs got here. Early in a short kernel; late in one that needs the SMs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin(PDL: tl.constexpr):
    """:func:`release`, then :func:`wait`."""
    release(PDL)
    wait(PDL)


@cache
def _has_overlap(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9


def overlap(t: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that calls :func:`begin`, on the device of ``t``."""
    if t.is_cuda and _has_overlap(t.get_device()):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def launch(kernel, grid: tuple[int, ...], where: Tensor, *args, **named) -> None:
    """``kernel[grid](*args, **named)`` on the device of ``where``, with the options of :func:`overlap`."""
    with torch.cuda.device_of(where):
        kernel[grid](*args, **named, **overlap(where))
