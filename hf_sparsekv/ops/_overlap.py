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

if hasattr(tl.extra, "cuda") and hasattr(tl.extra.cuda, "gdc_wait"):
    _wait, _release = tl.extra.cuda.gdc_wait, tl.extra.cuda.gdc_launch_dependents
else:
    _wait = _release = None


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel come, then wait for those before. Every kernel calls this before it reads or writes.

    (What no kernel before it writes, weights for instance, may be read earlier.) Each kernel waits for its
    predecessor's end, which waited for its own: so all that came before is done.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def _has_overlap(device: int) -> bool:
    return _wait is not None and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9


def overlap(t: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that calls :func:`begin`, on the device of ``t``."""
    if t.is_cuda and _has_overlap(t.get_device()):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
