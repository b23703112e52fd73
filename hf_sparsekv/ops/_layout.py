"""Layout of tensors that grow with an answer, chosen so that Triton compiles each kernel once.

Triton compiles a kernel again when a stride's divisibility by 16 changes, when a stride becomes 1, and when a pointer's
alignment to 16 bytes changes. Rows of changing width are therefore a multiple of ``UNIT`` entries apart, and the parts
of a tensor begin at such multiples. Plain numbers are passed with ``do_not_specialize``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

UNIT = 16


def whole(n: int) -> int:
    """The least multiple of ``UNIT`` that holds ``n`` entries; at least one ``UNIT``."""
    return max(UNIT, -(-n // UNIT) * UNIT)


def empty_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of ``shape``, whose rows (the last dimension) are :func:`whole` entries apart."""
    *outer, n = shape
    return torch.empty(*outer, whole(n), dtype=dtype, device=device)[..., :n]


def empty_parts(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Vectors of ``sizes`` entries or some more, in one allocation; each begins at a multiple of ``UNIT`` entries."""
    held = [whole(size) for size in sizes]
    return torch.empty(sum(held), dtype=dtype, device=device).split(held)


def is_whole(t: Tensor) -> bool:
    """Whether each row of ``t [.., .., n]`` can be read up to the next multiple of ``UNIT`` entries."""
    n = t.shape[-1]
    if n % UNIT == 0:
        return True
    if any(stride % UNIT for stride in t.stride()[:-1]) or not t.numel():
        return False
    last = t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape[:-1], t.stride()))
    return (last + whole(n)) * t.element_size() <= t.untyped_storage().nbytes()
