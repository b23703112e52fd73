"""Where kernels are compared with references, tensors that are made there, and how near results must be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Largest RMS of the difference over the RMS of the reference, for a result of each dtype.
RATIO = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
GUARD = 64  # elements after a tensor that a kernel fills: it may write none of them


@dataclass
class Place:
    """A device and a dtype, and tensors made there from a fixed seed."""

    device: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self._guarded: list[tuple[Tensor, Tensor]] = []  # what lies after a tensor, now and at first

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype).to(self.device)

    def randperm(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator).int().to(self.device)

    def nan(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Entries that nobody may read: NaN, or a large number where the dtype has none."""
        dtype = dtype or self.dtype
        hole = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 3
        n = math.prod(shape)
        memory = torch.full((n + GUARD,), hole, dtype=dtype, device=self.device)
        self._guarded.append((memory[n:], memory[n:].clone()))
        return memory[:n].view(shape)

    def check_guards(self) -> None:
        """Nothing was written after the end of a tensor from :meth:`nan`."""
        for now, first in self._guarded:
            assert torch.equal(now.nan_to_num(), first.nan_to_num()), "written after the end of a tensor"
        self._guarded.clear()

    def close(self, got: Tensor, expected: Tensor, ratio: float | None = None) -> None:
        """Equal up to rounding, infinities exactly; ``expected`` is the reference's result on the CPU."""
        self.check_guards()
        got = got.cpu()
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        got, expected = got.float(), expected.float()
        assert not expected.isnan().any(), "the case itself is broken"
        wild = expected.isinf()
        assert torch.equal(got[wild], expected[wild])
        got, expected = got[~wild], expected[~wild]
        assert got.isfinite().all()
        difference = (got - expected).square().mean().sqrt()
        size = expected.square().mean().sqrt()
        limit = RATIO[self.dtype] if ratio is None else ratio
        assert not expected.numel() or difference <= limit * size, f"RMS ratio {difference / size:.2e}"
