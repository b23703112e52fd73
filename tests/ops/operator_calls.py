"""An operator and its calls: how their tensors may lie, what it writes, and how they are compared.

Apart from the calls themselves, which are by group of operators.
"""

from __future__ import annotations

import importlib
import inspect
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hf_sparsekv import ops
from hf_sparsekv.ops.layers.quantised_linear.reference import QuantisedWeight
from hf_sparsekv.ops.storage.seal import Index

PAST = 2**31 + 4096  # elements


@dataclass
class Operator:
    """An operator and its calls.

    Args:
        of: its folder, its function if that is named otherwise, and what else tells its cases from others of it.
        make: arguments, in the order of the signature, from a place, a case and options.
        cases: by name.
        options: what each case is made with in addition, in all combinations.
        small: case and options for views and for tensors of more than 2 ** 31 elements.
        writes: arguments that it changes; compared as results are.
        ratio: of a place, one of ``hows`` and the options: most RMS of the difference over that of the reference, None
            for the place's and 0 for equal results.
        hows: of the arguments and the options: configurations of the kernel, each of which has to give the same.
        views: arguments that may be parts of larger tensors: ``rows`` of longer ones, anywhere ``inside`` of a larger
            tensor, ``turned`` (stored transposed), or in ``half`` precision beside a float32 query.
        far: the dimension of an argument whose entries may lie more than 2 ** 31 elements apart.
    """

    of: str
    make: Callable[..., tuple]
    cases: dict[str, tuple]
    options: tuple[tuple, ...] = ()
    small: tuple | None = None
    writes: tuple[str, ...] = ()
    ratio: Callable[..., float | None] = lambda place, how, *options: None
    hows: Callable[..., list] = lambda given, *options: [None]
    views: dict[str, str] = field(default_factory=dict)
    far: dict[str, int] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[Callable, Callable]:
        """The kernel's and the reference's."""
        folder, name = (*self.of.split("."), "")[:2]
        (group,) = (path.parent.name for path in Path(ops.__path__[0]).glob(f"*/{folder}"))
        parts = (f"hf_sparsekv.ops.{group}.{folder}.{part}" for part in ("triton", "reference"))
        modules = [importlib.import_module(part) for part in parts]
        return tuple(getattr(module, name or folder) for module in modules)

    def call(self, place, *case) -> dict:
        """Arguments by name."""
        return dict(zip(inspect.signature(self.functions[1]).parameters, self.make(place, *case)))

    def results(self, function: Callable, given: dict, **how) -> list[torch.Tensor]:
        """The result of ``function``, and everything that it writes."""
        got = function(**given, **{name: value for name, value in how.items() if value is not None})
        got = [] if got is None else [got] if isinstance(got, torch.Tensor) else list(got)
        return got + [t for name in self.writes for t in tensors(given[name])]

    def expected(self, given: dict) -> list[torch.Tensor]:
        """The reference's results of copies on the CPU."""
        return self.results(self.functions[1], on_cpu(given))

    def check(self, place, given: dict, expected: list[torch.Tensor], *options) -> None:
        """The kernel gives and writes the same: numbers up to rounding, all else and NaN equally."""
        before = on_cpu({name: given[name] for name in self.writes})
        for how in self.hows(given, *options):
            ratio = self.ratio(place, how, *options)
            for name in self.writes:
                for t, old in zip(tensors(given[name]), tensors(before[name])):
                    t.copy_(old)
            got = self.results(self.functions[0], given, config=how)
            assert len(got) == len(expected)
            for one, other in zip(got, expected):
                if ratio == 0 or not other.dtype.is_floating_point:
                    torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
                else:
                    hidden = other.isnan()
                    assert torch.equal(one.isnan().cpu(), hidden)
                    place.close(one.cpu().masked_fill(hidden, 0), other.masked_fill(hidden, 0), ratio)


def tensors(given) -> list[torch.Tensor]:
    """One, those of an index, or none."""
    held = vars(given).values() if isinstance(given, Index) else [given]
    return [t for t in held if isinstance(t, torch.Tensor)]


def on_cpu(given):
    """Copies on the CPU of all tensors that something holds."""
    if isinstance(given, torch.Tensor):
        return given.cpu().clone()
    if isinstance(given, dict):
        return {name: on_cpu(value) for name, value in given.items()}
    if isinstance(given, QuantisedWeight):
        return QuantisedWeight(*map(on_cpu, given))
    return Index(**on_cpu(vars(given))) if isinstance(given, Index) else given


def view(t: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers, which lie as ``kind`` says among what nobody may read; see :class:`Operator`."""
    if kind == "half":
        return t.half()
    if kind == "turned":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    more = [3] * t.dim() if kind == "inside" else [0] * (t.dim() - 1) + [24]
    hole = math.nan if t.is_floating_point() else t.dtype == torch.bool or torch.iinfo(t.dtype).max // 3
    wide = torch.full([n + m for n, m in zip(t.shape, more)], hole, dtype=t.dtype, device=t.device)
    part = wide[tuple(slice(m - m // 3, m - m // 3 + n) for n, m in zip(t.shape, more))]
    return part.copy_(t)


def room_for(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """So many elements, which on a CPU take memory only where they are used, even if there is less in all."""
    if device != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    held = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    return torch.frombuffer(held, dtype=dtype)


def far(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Equal to ``t``; the last entry along ``dim`` lies more than ``2 ** 31`` elements behind the first."""
    step = (-(-PAST // (t.shape[dim] - 1)) + 63) // 64 * 64
    near = t.contiguous()
    strides = [step if i == dim else stride for i, stride in enumerate(near.stride())]
    room = room_for(PAST + (t.shape[dim] - 1) * step + near.numel(), t.dtype, t.device.type)
    return room.as_strided(t.shape, strides, PAST).copy_(t)


def column(place, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=place.device)


def shuffled(place, rows: int, n: int, k: int) -> torch.Tensor:
    """``k`` of ``n`` numbers in any order, ``[rows, k]``."""
    return torch.stack([place.randperm(n)[:k] for _ in range(rows)])


def lengths(place, batch: int, most: int) -> torch.Tensor:
    """Tokens that each row has, int32 ``[batch]``: the first one's are ``most``; a column of a table."""
    table = torch.stack((place.randint(0, most + 1, batch), place.nan(batch, dtype=torch.int32)), 1)
    table[0, 0] = most
    return table[:, 0]


def some(place, batch: int, asked: bool) -> torch.Tensor | None:
    """Which rows count: neither the second nor the fifth; None for all."""
    return (torch.arange(batch, device=place.device) % 3 != 1)[:, None] if asked else None


def equal(place, *options) -> float:
    """As a ratio: no rounding explains a difference."""
    return 0
