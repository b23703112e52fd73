"""Programmatic dependent launch: a kernel is there before the one that it waits for has ended.

On GPUs from Hopper on, the next kernel of a stream may be put on the processors as soon as the programs of this one
have all begun; it waits where it first needs what others have written. That hides the start of a kernel, a microsecond
or so, of which a decode step has several hundred. See "Programmatic Dependent Launch and Synchronization" in NVIDIA's
CUDA programming guide.
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

    (What no kernel before it writes, weights for instance, may be read earlier; so may, past the processor's own cache,
    what its predecessor has waited for, if that one releases behind its wait: see :mod:`.experts`.) Each kernel waits
    for its predecessor's end, which waited for its own: so all that came before is done.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel come once all programs are here. Early in a short kernel; late in one that needs the room."""
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
